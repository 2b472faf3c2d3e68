"""Notebooks from their sources, which are Python files that review well (jupytext's py:percent).

notebooks/src/NAME.py becomes notebooks/NAME.ipynb, executed, its outputs kept. exercises/src/NAME.py becomes two
notebooks that are not executed: exercises/NAME.ipynb, from which the answers are cut out, and
exercises/solutions/NAME.ipynb with them. In the source an answer stands between marks:

    ### BEGIN SOLUTION
    answer = 42
    ### END SOLUTION
    ### STUB answer = None

The lines marked STUB, if any, are what the learner finds in its place; else it is a `raise NotImplementedError`.
A cell that checks an answer has the tag: `# %% tags=["check"]`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbclient.exceptions import CellExecutionError, DeadKernelError

from pcourse.course import KERNEL, ROOT, STUB_WORDS, first_line, pick
from pcourse.headless import run_headless

LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
CURRENT, BUILT, STALE, NOT_BUILT = "current", "built", "stale", "not built"
CELL_TIMEOUT = 300  # seconds, on a slow machine

ANSWER_TAG = "answer"
ANSWER = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION\n"
    r"(?P<answer>(?:.*\n)*?)"
    r"^[ \t]*### END SOLUTION\n"
    r"(?P<stubs>(?:[ \t]*### STUB .*\n)*)",
    re.MULTILINE,
)
MARK = re.compile(r"^[ \t]*### *(BEGIN SOLUTION|END SOLUTION|STUB).*$", re.MULTILINE)
DEFAULT_STUB = f'raise NotImplementedError("{STUB_WORDS}")'


class AuthoringError(Exception):
    """A source that cannot become a notebook; the message names the cell."""


@dataclass(frozen=True)
class Outcome:
    """What came of one notebook: `state` is CURRENT, BUILT, STALE or NOT_BUILT."""

    notebook: str
    state: str
    message: str = ""

    @property
    def fine(self) -> bool:
        return self.state in (CURRENT, BUILT)

    def __str__(self) -> str:
        return f"{self.state}: {self.notebook}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class Target:
    """One notebook to build: from which source, to which file, in which way."""

    source: Path
    path: Path
    kind: str  # "lesson" | "stub" | "solution"

    def make(self) -> nbformat.NotebookNode:
        """The notebook as its source has it, without outputs."""
        notebook = jupytext.read(self.source, fmt="py:percent")
        notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE})
        notebook.nbformat, notebook.nbformat_minor = 4, 5
        for number, cell in enumerate(notebook.cells, 1):
            tags = cell.metadata.get("tags")
            cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
            if cell.cell_type == "code" and self.kind != "lesson":
                try:
                    cell.source = stub(cell.source) if self.kind == "stub" else solution(cell.source)
                except AuthoringError as e:
                    raise AuthoringError(f"cell {number} of {self.source.name}: {e}") from None
        _set_ids(notebook)
        return notebook

    def is_stale(self) -> bool:
        """Whether the file is not what the source says. Outputs are not compared: they differ between machines."""
        if not self.path.exists():
            return True
        built = nbformat.read(self.path, as_version=4)
        unrun = any(cell.cell_type == "code" and cell.execution_count is None for cell in built.cells)
        return cells_of(built) != cells_of(self.make()) or (self.kind == "lesson" and unrun)

    def build(self) -> None:
        """Write the notebook, a lesson executed in its own folder."""
        notebook = self.make()
        if self.kind == "lesson":
            run_headless(notebook, self.path.parent, timeout=CELL_TIMEOUT)
            clean(notebook)
            hide_answers(notebook)
            refuse_local_paths(notebook)
        nbformat.validate(notebook)
        self.path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, self.path)


def targets(root: Path = ROOT) -> Iterator[Target]:
    """Every notebook of the course."""
    for source in sorted((root / "notebooks/src").glob("*.py")):
        yield Target(source, root / f"notebooks/{source.stem}.ipynb", "lesson")
    for source in sorted((root / "exercises/src").glob("*.py")):
        yield Target(source, root / f"exercises/{source.stem}.ipynb", "stub")
        yield Target(source, root / f"exercises/solutions/{source.stem}.ipynb", "solution")


def stub(code: str) -> str:
    """`code` as the learner finds it: in place of each answer its STUB lines, or a NotImplementedError."""

    def replacement(region: re.Match) -> str:
        stubs = re.findall(r"### STUB (.*)", region["stubs"]) or [DEFAULT_STUB]
        return "".join(f"{region['indent']}{line}\n" for line in ["# YOUR CODE HERE", *stubs])

    return _cut(code, replacement)


def solution(code: str) -> str:
    """`code` with its answers, without the marks."""
    return _cut(code, lambda region: region["answer"])


def _cut(code: str, replacement) -> str:
    cut = ANSWER.sub(replacement, code + "\n").rstrip("\n")
    if left := MARK.search(cut):
        raise AuthoringError(
            f"the mark {left[0].strip()!r} is out of place; an answer stands between ### BEGIN SOLUTION and "
            "### END SOLUTION, and ### STUB lines follow at once"
        )
    return cut


def _set_ids(notebook) -> None:
    """A cell's id follows from its text, so that building again changes nothing."""
    seen: set[str] = set()
    for cell in notebook.cells:
        copy = 0
        while (digest := hashlib.sha256(f"{cell.cell_type} {copy} {cell.source}".encode()).hexdigest()[:8]) in seen:
            copy += 1
        seen.add(digest)
        cell.id = digest


def cells_of(notebook) -> list[tuple]:
    """What makes two notebooks the same to `is_stale`."""
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def clean(notebook) -> None:
    """Take out what only the kernel that has ended could show, so that a reader finds the saved pictures instead."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": LANGUAGE})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)


def hide_answers(notebook) -> None:
    """Save nothing of cells tagged `answer`: who opens a lesson must predict before they see what comes out."""
    for cell in notebook.cells:
        if ANSWER_TAG in cell.metadata.get("tags", []):
            cell.outputs = []


def refuse_local_paths(notebook, root: Path = ROOT) -> None:
    """Raise AuthoringError if an output shows where the author's files lie."""
    ours = [root, Path.home()]
    if sys.prefix != sys.base_prefix:  # a virtual environment, which may lie anywhere
        ours.append(Path(sys.prefix))
    paths = sorted({str(path) for path in ours if path != Path(path.anchor)}, key=len, reverse=True)
    for number, cell in enumerate(notebook.cells, 1):
        text = "\n".join(_texts(cell))
        for path in paths:
            if re.search(rf"(?<![\w.]){re.escape(path)}(?![\w-])", text):
                raise AuthoringError(
                    f"the output of cell {number} ({first_line(cell.source)}) shows {path}, a folder of this machine; "
                    "print file names without folders, and no traceback of installed code"
                )


def _texts(cell) -> Iterator[str]:
    """All that a cell's outputs say in words; pictures are left out."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield "\n".join(output.get("traceback", []))
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/png"):
                yield str(data)


def build(names=(), *, check: bool = False, force: bool = False, root: Path = ROOT) -> Iterator[Outcome]:
    """Build the notebooks called `names`, or all, where their source has changed (or all the same, if `force`).

    With `check` nothing is written. Yields what came of each notebook, as it comes. Raises UnknownName for a name
    that no source has.
    """
    every = list(targets(root))
    chosen = pick(names, [target.source.stem for target in every])
    for target in every:
        if target.source.stem in chosen:
            yield Outcome(str(target.path.relative_to(root)), *_build_one(target, check, force))


def _build_one(target: Target, check: bool, force: bool) -> tuple[str, str]:
    """The state of an Outcome, and its message."""
    try:
        if not force and not target.is_stale():
            return CURRENT, ""
        if check:
            return STALE, f"it is not what its source says; build it: python -m pcourse build {target.source.stem}"
        target.build()
    except (AuthoringError, CellExecutionError, DeadKernelError) as e:
        return NOT_BUILT, str(e)
    except nbformat.reader.NotJSONError:
        return NOT_BUILT, f"{target.path.name} is not JSON (an unfinished merge?); delete it and build again"
    return BUILT, ""
