"""Notebooks run without a front end: to build one, and to check the learner's answers.

Nothing here imports torch: the kernels that the notebooks start do.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass
from pathlib import Path

from pcourse.course import KERNEL, first_line

PATIENCE = 10.0  # seconds that an interrupted cell has to end
CHECK = "check"  # the tag of a cell that checks an answer
SOLVED, NOT_YET, WRONG, BROKEN = "solved", "not solved yet", "wrong", "broken"


@dataclass(frozen=True)
class Verdict:
    """What came of one check: `state` is SOLVED, NOT_YET or WRONG. BROKEN is a cell without a check that failed."""

    cell: str  # its first line of code
    state: str
    message: str = ""


def run_headless(notebook, folder: Path, *, timeout: float, go_on: bool = False, on_cell=None) -> None:
    """Run `notebook` (as nbformat reads it) in a new kernel in `folder`; its outputs are put into it.

    A cell that fails raises CellExecutionError, unless `go_on`. One that takes longer than `timeout` seconds is
    interrupted, which is a failure too. `on_cell(done, of)` is called as cells end.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=math.ceil(timeout),
        interrupt_on_timeout=True,
        allow_errors=go_on,
        record_timing=False,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # a kernel warns that its loopback connection is not encrypted
    )
    client.reset_execution_trackers()
    # Not client.execute(): on Ctrl-C it ends the kernel, and then fails because the kernel has ended.
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            with _ended_after(timeout + PATIENCE, client):
                client.execute_cell(cell, number)
            if on_cell:
                on_cell(number + 1, len(notebook.cells))


@contextlib.contextmanager
def _ended_after(seconds: float, client):
    """A cell that swallows its interrupt loses its kernel: nbclient itself would wait for ever."""
    watch = threading.Timer(seconds, lambda: client.km.provisioner.process.kill())
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def check_notebook(notebook, folder: Path, *, timeout: float = 120, on_cell=None) -> list[Verdict]:
    """Run an exercise to its end, whatever fails on the way; returns what each of its checks said."""
    from nbclient.exceptions import DeadKernelError

    try:
        run_headless(notebook, folder, timeout=timeout, go_on=True, on_cell=on_cell)
    except DeadKernelError:
        return [
            Verdict(
                "the notebook",
                BROKEN,
                "a cell ended the kernel, or did not end itself: run the cells one by one to see which",
            )
        ]
    verdicts = (_verdict(cell, timeout) for cell in notebook.cells if cell.cell_type == "code")
    return [verdict for verdict in verdicts if verdict]


def _verdict(cell, timeout: float) -> Verdict | None:
    """None for a cell that checks nothing and did not fail."""
    checks = CHECK in cell.metadata.get("tags", [])
    name = first_line(cell.source)
    error = next((output for output in cell.outputs if output.output_type == "error"), None)
    if error is None:
        return Verdict(name, SOLVED) if checks else None
    if checks and error.ename == "NotSolvedYet":
        return Verdict(name, NOT_YET, error.evalue)
    message = error.evalue if error.ename == "CheckFailed" else f"{error.ename}: {error.evalue}"
    if error.ename == "KeyboardInterrupt":
        message = f"it did not end within {timeout:g} s"
    return Verdict(name, WRONG if checks else BROKEN, message)
