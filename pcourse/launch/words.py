"""What went wrong, in words: errors, tracebacks and deaths as the learner reads them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from itertools import dropwhile

from pcourse.launch.errors import Failure

MOST_WORDS = 20_000  # characters of one error
MAIN_GUARD = 'put the lines that start runs under `if __name__ == "__main__":`'

_LAUNCH = os.path.dirname(__file__) + os.sep


def failure(error: BaseException, rank: int, size: int) -> Failure:
    """What rank `rank` reports when its program ends with `error`."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        happened = f"left with exit code {code} before its program returned"
    else:
        happened = f"raised {one_line(error)}"
    return Failure(f"rank {rank} of {size} {happened}", _program_traceback(error), _is_peer_loss(error))


def one_line(error: BaseException) -> str:
    """The exception as the last line of a traceback has it; a longer message is cut after its first line."""
    lines = traceback.format_exception_only(error)
    return next(line for line in lines if not line.startswith(" ")).strip().split("\n")[0][:MOST_WORDS]


def manner_of_death(code: int, before_start: bool) -> str:
    """How a process ended that has reported nothing. `code` is multiprocessing's: -9 is SIGKILL."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (perhaps the machine ran out of memory)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    words = f"left with exit code {code} before its program {'began' if before_start else 'returned'}"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if before_start and script:
        words += f"; its own words are on this process's standard error. Ranks import {script}: {MAIN_GUARD}"
    return words


def paragraphs(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))


def format_frames(frames: list[traceback.FrameSummary]) -> str:
    """The frames of a whole thread, innermost last, from the program on."""
    # Where recursion is so deep that the outer frames were left out, ours are not among them.
    from_ours = list(dropwhile(lambda frame: not _is_ours(frame.filename), frames)) or frames
    program = dropwhile(lambda frame: _is_ours(frame.filename), from_ours)
    return "".join(traceback.StackSummary.from_list(program).format()).rstrip()


def name_cells(text: str) -> str:
    """`text` with every notebook cell called what its kernel calls it, where a traceback has a temporary path."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:  # no notebook, or a rank of a notebook: the kernel will do it
        return text

    def name(match: re.Match) -> str:
        with contextlib.suppress(Exception):  # a shell that is not IPython's own may lack this
            if label := shell.compile.format_code_name(match["path"]):
                return " ".join(label)
        return "this notebook" if re.search(r"\bipykernel_\d+\b", match["path"]) else match[0]

    return re.sub('File "(?P<path>.+?)"', name, text)


def _is_peer_loss(error: BaseException | None) -> bool:
    """Whether a lost peer is behind `error`, be it told by Comm or by gloo itself."""
    lost = getattr(sys.modules.get("pcourse.comm"), "PeerLost", ())
    while error is not None:
        words = "".join(traceback.format_exception_only(error))
        if isinstance(error, lost) or re.search("Connection (closed|reset) by peer", words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _program_traceback(error: BaseException) -> str:
    """The traceback without the frames of this package that called the program."""
    below = error.__traceback__
    while below is not None and _is_ours(below.tb_frame.f_code.co_filename):
        below = below.tb_next
    text = "".join(traceback.format_exception(type(error), error, below)).rstrip()
    if len(text) > MOST_WORDS:
        text = f"{text[: MOST_WORDS // 2]}\n  …\n{text[-MOST_WORDS // 2 :]}"
    return text


def _is_ours(filename: str) -> bool:
    return filename.startswith(_LAUNCH)
