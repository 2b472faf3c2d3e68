"""Proof that the exercises teach: a stub fails each of its checks helpfully, and nowhere else; a solution passes them
within its targets.

Each notebook is made from its source here, so that a learner who has solved exercises/ can run the tests as well.
"""

import pytest

from pcourse.authoring import Target, targets
from pcourse.course import ROOT
from pcourse.headless import CHECK, NOT_YET, SOLVED, check_notebook

EXERCISES = [target for target in targets() if target.kind != "lesson"]


@pytest.mark.parametrize("target", EXERCISES, ids=lambda target: f"{target.source.stem}-{target.kind}")
def test_every_check_says_what_it_should(target: Target):
    notebook = target.make()
    checks = [cell for cell in notebook.cells if CHECK in cell.metadata.get("tags", [])]
    verdicts = check_notebook(notebook, ROOT / "exercises")
    expected = NOT_YET if target.kind == "stub" else SOLVED
    assert {verdict.state for verdict in verdicts} == {expected}, verdicts
    assert len(verdicts) == len(checks) > 0
    if target.kind == "stub":
        assert all("write" in verdict.message and "above" in verdict.message for verdict in verdicts), verdicts
    else:
        rows = [row for cell in checks for row in scoreboard_rows(cell)]
        assert rows and all("= target" in row or "better: " in row for row in rows), rows


def scoreboard_rows(cell) -> list[str]:
    """The lines of the scoreboard that a check has shown, each of which ends with its mark."""
    boards = [output.data["text/plain"] for output in cell.outputs if output.output_type == "display_data"]
    return [row for board in boards for row in board.splitlines()[2:-1]]  # between its head and its source
