"""Notebooks from their sources: the cut, the build and its refusals, and whether the committed ones are up to date."""

import os
import re
from pathlib import Path

import jupytext
import nbformat
import pytest

from pcourse import authoring
from pcourse.authoring import AuthoringError, Target, cells_of, refuse_local_paths, solution, stub
from pcourse.course import ROOT, UnknownName

ANSWER = """\
def double(x):
    '''Twice x.'''
    ### BEGIN SOLUTION
    y = x
    return y + x
    ### END SOLUTION
"""
NAMED = "### BEGIN SOLUTION\nanswer = 42\n### END SOLUTION\n### STUB answer = None\n### STUB unit = None"


def test_an_answer_becomes_a_stub_that_is_valid_python():
    code = stub(ANSWER)
    assert code.splitlines()[2:] == ["    # YOUR CODE HERE", '    raise NotImplementedError("your code here")']
    compile(code, "stub", "exec")


def test_stub_lines_stand_in_place_of_the_default():
    assert stub(NAMED) == "# YOUR CODE HERE\nanswer = None\nunit = None"


def test_the_solution_has_the_answer_and_no_marks():
    assert solution(ANSWER).splitlines()[2:] == ["    y = x", "    return y + x"]
    assert solution(NAMED) == "answer = 42"


def test_two_answers_in_one_cell_are_cut_apart():
    between = "print(answer)"
    assert stub(f"{NAMED}\n{between}\n{NAMED}") == f"{stub(NAMED)}\n{between}\n{stub(NAMED)}"
    assert solution(f"{NAMED}\n{between}\n{NAMED}") == f"answer = 42\n{between}\nanswer = 42"


def test_code_without_an_answer_stays_as_it_is():
    assert stub("x = 1  ### a comment\n\ny = 2") == solution("x = 1  ### a comment\n\ny = 2")


@pytest.mark.parametrize(
    "code",
    [
        "### BEGIN SOLUTION\nx = 1",
        "x = 1\n### END SOLUTION",
        "### BEGIN SOLUTION\nx\n### END SOLUTION\n\n### STUB x = None",
        f"### BEGIN SOLUTION\n{NAMED}\n### END SOLUTION",
    ],
)
@pytest.mark.parametrize("cut", [stub, solution])
def test_marks_out_of_place_are_refused(code, cut):
    with pytest.raises(AuthoringError, match="out of place"):
        cut(code)


# --- building ----------------------------------------------------------------------------------------------------


LESSON = """\
# %% [markdown]
# # A lesson

# %%
import ipywidgets

ipywidgets.IntSlider()

# %% tags=["nbval-check-output"]
print("seen")
"""


def course_with(root: Path, **sources: str) -> Path:
    """A course in `root` whose sources are `lesson` and `exercise`, each called 01."""
    for kind, source in sources.items():
        path = root / f"{kind}/src/01_one.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def states(root: Path, **how) -> dict[str, str]:
    return {outcome.notebook: outcome.state for outcome in authoring.build(root=root, **how)}


def test_a_lesson_is_executed_and_keeps_only_what_can_be_shown_later(tmp_path):
    course_with(tmp_path, notebooks=LESSON)
    assert states(tmp_path) == {"notebooks/01_one.ipynb": "built"}
    text = (tmp_path / "notebooks/01_one.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2]
    assert notebook.cells[2].outputs[0].text == "seen\n"
    assert notebook.cells[2].metadata == {"tags": ["nbval-check-output"]}
    assert "widget-view" not in text and "widgets" not in notebook.metadata
    assert not re.search(r"\d{4}-\d\d-\d\dT", text)
    assert states(tmp_path) == {"notebooks/01_one.ipynb": "current"}
    assert states(tmp_path, force=True) == {"notebooks/01_one.ipynb": "built"}
    assert (tmp_path / "notebooks/01_one.ipynb").read_text() == text  # building again changes nothing


def test_a_lesson_that_fails_is_not_written(tmp_path):
    course_with(tmp_path, notebooks="# %%\n1 / 0\n")
    (outcome,) = authoring.build(root=tmp_path)
    assert outcome.state == "not built" and "ZeroDivisionError" in outcome.message
    assert not (tmp_path / "notebooks/01_one.ipynb").exists()


def test_an_exercise_becomes_two_notebooks_that_were_not_run(tmp_path):
    course_with(tmp_path, exercises=f'# %%\n{ANSWER}\n# %% tags=["check"]\nassert double(1) == 2\n')
    assert set(states(tmp_path)) == {"exercises/01_one.ipynb", "exercises/solutions/01_one.ipynb"}
    stubbed, solved = (nbformat.read(tmp_path / name, as_version=4) for name in states(tmp_path))
    assert "NotImplementedError" in stubbed.cells[0].source and "return y + x" in solved.cells[0].source
    assert stubbed.cells[1].metadata.tags == ["check"]
    assert all(cell.execution_count is None and not cell.outputs for cell in stubbed.cells + solved.cells)


def test_check_finds_what_has_changed_and_writes_nothing(tmp_path):
    course_with(tmp_path, exercises="# %%\nx = 1\n")
    assert set(states(tmp_path, check=True).values()) == {"stale"}
    assert not (tmp_path / "exercises/01_one.ipynb").exists()
    states(tmp_path)
    assert set(states(tmp_path, check=True).values()) == {"current"}
    course_with(tmp_path, exercises="# %%\nx = 2\n")
    assert set(states(tmp_path, check=True).values()) == {"stale"}


def test_a_wrong_mark_names_its_cell(tmp_path):
    course_with(tmp_path, exercises="# %%\nx = 1\n\n# %%\n### END SOLUTION\n")
    messages = [outcome.message for outcome in authoring.build(root=tmp_path)]
    assert all(message.startswith("cell 2 of 01_one.py: the mark '### END SOLUTION'") for message in messages)


def test_a_name_that_no_source_has_is_refused_with_those_that_are(tmp_path):
    course_with(tmp_path, exercises="# %%\nx = 1\n")
    with pytest.raises(UnknownName, match="'02_two'; there is 01_one"):
        list(authoring.build(["02_two"], root=tmp_path))


def cell_that_shows(**output) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell("# where\nshow()", outputs=[nbformat.from_dict(output)])
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("here"), cell])


@pytest.mark.parametrize("folder", [ROOT, Path.home() / "course"])
def test_an_output_with_a_path_of_this_machine_is_refused(folder):
    for output in (
        {"output_type": "stream", "name": "stdout", "text": f"reading {folder}/x.py\n"},
        {"output_type": "error", "ename": "E", "evalue": "", "traceback": ["E", f'File "{folder}/x.py"']},
        {"output_type": "display_data", "metadata": {}, "data": {"text/html": f"<b>{folder}</b>"}},
    ):
        with pytest.raises(AuthoringError, match=r"cell 2 \(show\(\)\) shows /"):
            refuse_local_paths(cell_that_shows(**output))


def test_a_name_that_only_begins_like_such_a_path_is_fine():
    refuse_local_paths(cell_that_shows(output_type="stream", name="stdout", text=f"{Path.home()}work and x{ROOT}"))


# --- the course itself -------------------------------------------------------------------------------------------

TARGETS = list(authoring.targets())


def holds_answers(target: Target) -> bool:
    """Whether a learner's notebook differs from its stub only where the answers go."""
    stubs, original = target.make().cells, jupytext.read(target.source, fmt="py:percent").cells
    found = nbformat.read(target.path, as_version=4).cells
    fixed = [k for k, cell in enumerate(stubs) if cell.source == original[k].source]
    return len(found) == len(stubs) and all(found[k].source == stubs[k].source for k in fixed)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.path.relative_to(ROOT)))
def test_the_notebook_is_what_its_source_says(target):
    if target.is_stale() and target.kind == "stub" and "CI" not in os.environ and holds_answers(target):
        pytest.skip("it holds your answers")
    assert not target.is_stale(), f"build it: python -m pcourse build {target.source.stem}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.path.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(target):
    words = "\n".join(source for kind, source, _ in cells_of(target.make()) if kind == "markdown")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", words)
    missing = [link for link in links if not (target.path.parent / link).exists()]
    assert not missing


def test_the_readmes_links_lead_to_files_that_are_there():
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_answers_are_not_saved():
    """A lesson must not show what comes out before the learner has predicted."""
    cells = [nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("stream", text="1")]) for _ in range(2)]
    cells[1].metadata = nbformat.from_dict({"tags": [authoring.ANSWER_TAG]})
    notebook = nbformat.v4.new_notebook(cells=cells)
    authoring.hide_answers(notebook)
    assert [len(cell.outputs) for cell in notebook.cells] == [1, 0]


def test_every_score_is_an_answer():
    for source in (authoring.ROOT / "notebooks/src").glob("*.py"):
        for cell in jupytext.read(source, fmt="py:percent").cells:
            if ".score(" in cell.source or "after=" in cell.source:
                assert authoring.ANSWER_TAG in cell.metadata.get("tags", []), cell.source
