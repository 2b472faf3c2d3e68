"""How a World's ranks are started, watched and ended: `pcourse.world` is its public face.

A run is watched from where `run()` was called (`run`). Its ranks are processes (`processes`; `rank_process` inside
each one; `rank_files` and `cell_source` between the two) or threads (`threads`). What a rank does (`acts`) and what
went wrong (`errors`, `words`) comes back in words. No torch here: only the ranks load it.
"""
