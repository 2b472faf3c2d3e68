"""The checks teach: each plausible wrong answer is refused in words that name its fault, the stub is told that it is
not solved yet, and the solution passes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import linecache
import pkgutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import wrong_answers

from pcourse.authoring import Target
from pcourse.course import CHECK, ROOT
from pcourse.lab.check import CheckFailed, NotSolvedYet

MODULES = [
    importlib.import_module(f"wrong_answers.{module.name}") for module in pkgutil.iter_modules(wrong_answers.__path__)
]
EXERCISES = [module.EXERCISE for module in MODULES]


@pytest.mark.parametrize("case", wrong_answers.ALL, ids=str)
def test_a_wrong_answer_is_refused_in_words_that_name_its_fault(case):
    module = sys.modules[case.module]
    refuse = getattr(importlib.import_module(module.CHECKS), case.check)
    with pytest.raises(CheckFailed) as refusal:
        refuse(case.answer)
    message = str(refusal.value)
    print(f"{case}: {message}")
    assert [words for words in case.words if words not in message] == [], message
    assert inspect.getdoc(case.answer), "a wrong answer's docstring names its fault"
    sentence, *source = message.splitlines()
    assert len(source) <= 1 and len(sentence) < 500, "one line, and the learner's own where it raised"


@pytest.mark.parametrize("case", wrong_answers.RIGHT, ids=str)
def test_a_right_answer_of_another_make_is_accepted(case):
    getattr(importlib.import_module(sys.modules[case.module].CHECKS), case.check)(case.answer)


@pytest.mark.parametrize("module", MODULES, ids=EXERCISES)
def test_every_exercise_has_at_least_six_wrong_answers_and_one_for_each_of_its_checks(module):
    mine = [case for case in wrong_answers.ALL if case.module == module.__name__]
    assert len(mine) >= 6
    source = Path(ROOT, "exercises/src", f"{module.EXERCISE}.py").read_text(encoding="utf-8")
    short = module.CHECKS.rpartition(".")[2]
    assert {case.check for case in mine} == {
        line.removeprefix(f"{short}.").partition("(")[0] for line in source.splitlines() if line.startswith(f"{short}.")
    }


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes_every_check_within_its_targets(name, monkeypatch):
    boards = []
    monkeypatch.setattr(sys.modules[CheckFailed.__module__], "display", boards.append)
    outcomes = run_cells(name, "solution")
    assert outcomes[True] and not any(outcomes[True] + outcomes[False]), outcomes
    assert boards and all(board.met for board in boards), boards


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_is_told_that_it_is_not_solved_yet(name):
    outcomes = run_cells(name, "stub")
    assert not any(outcomes[False]), "only a check may fail before the exercise is solved"
    for error in outcomes[True]:
        assert isinstance(error, NotSolvedYet) and "write" in str(error), error


def run_cells(name: str, kind: str) -> dict[bool, list[Exception | None]]:
    """What each code cell of an exercise raised, one after the other: {is a check: [error or None]}."""
    notebook = Target(ROOT / f"exercises/src/{name}.py", Path("unused"), kind).make()
    namespace, outcomes = {"__name__": "exercise"}, defaultdict(list)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            with contextlib.redirect_stdout(io.StringIO()):
                error = run_cell(cell.source, f"<{name} {kind}, cell {number}>", namespace)
            outcomes[CHECK in cell.metadata.get("tags", [])].append(error)
    return outcomes


def run_cell(source: str, filename: str, namespace: dict) -> Exception | None:
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec"), namespace)
    except Exception as error:
        return error
    return None
