"""The code of the package itself, shown in a lesson: it cannot drift from what runs."""

from __future__ import annotations

import inspect

from IPython.display import Code, display


def show_source(*objects) -> None:
    """Show the source of classes or functions, one after the other, under the name of the file they are from."""
    for thing in objects:
        display(Code(f"# {thing.__module__.replace('.', '/')}.py\n\n{inspect.getsource(thing)}", language="python"))
