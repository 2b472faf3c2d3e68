"""The code of the package itself, shown in a lesson: it cannot drift from what runs."""

from __future__ import annotations

import inspect

from IPython.display import HTML, Code, display

_STYLE = "<style>.pcourse-source pre { white-space: pre; overflow-x: auto; }</style>"


def show_source(*objects) -> None:
    """Show the source of classes or functions, one after the other, under the name of the file they are from."""
    for thing in objects:
        code = Code(f"# {thing.__module__.replace('.', '/')}.py\n\n{inspect.getsource(thing)}", language="python")
        display(HTML(f'{_STYLE}<div class="pcourse-source">{code._repr_html_()}</div>'))
