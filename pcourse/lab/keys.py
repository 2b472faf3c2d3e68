"""Keys that are pressed in a widget stay in it.

JupyterLab reads single keys as commands to the notebook wherever the focus is, text fields excepted. With a list of
a widget in focus, ArrowDown leaves it, "2" makes the cell a heading, and "d" twice deletes it. Lab passes over an
element that carries `data-lm-suppress-shortcuts`, and a widget of Python's cannot set one; a line of JavaScript can.
"""

from __future__ import annotations

import ipywidgets as W

_CLASS = "pcourse-keys"
_PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
# The image may load before its box is in the page, so it looks for the box a few times.
_SCRIPT = (
    "(function find(image, times) {"
    f" const box = image.closest('.{_CLASS}');"
    " if (box) box.addEventListener('focusin', e => { e.target.dataset.lmSuppressShortcuts = 'true' });"
    " else if (times) setTimeout(find, 100, image, times - 1)"
    "})(this, 50)"
)


def keep_keys(box: W.Box) -> W.Box:
    """`box`, in which a key does what it does on any web page. Elsewhere than in Lab nothing changes."""
    box.add_class(_CLASS)
    guard = W.HTML(f'<img alt="" src="{_PIXEL}" onload="{_SCRIPT}">', layout=W.Layout(display="none"))
    box.children = (*box.children, guard)
    return box
