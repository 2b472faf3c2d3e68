"""Where the course lies, and what its notebooks are called. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUB_WORDS = "your code here"  # what the stub of an exercise raises NotImplementedError with
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


class UnknownName(ValueError):
    """No notebook is called so; the message lists those that are there."""


def pick(names, known) -> list[str]:
    """Those of `known` that begin with one of `names` (a file's name will do), or all where no name is given."""
    known = sorted(set(known))
    wanted = {name: [k for k in known if k.startswith(Path(name).stem)] for name in names}
    for name, found in wanted.items():
        if not found:
            raise UnknownName(f"no notebook is called {name!r}; there is {', '.join(known) or 'none'}")
    return [k for k in known if not names or any(k in found for found in wanted.values())]


def first_line(source: str) -> str:
    """The first line of a cell that is not a comment: what the cell is called in messages."""
    lines = (line.strip() for line in source.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "an empty cell")
