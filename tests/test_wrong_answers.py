"""The checks teach: each plausible wrong answer is refused in words that name its fault. What they say of the stub and
of the solution, test_exercises.py proves in a kernel."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import wrong_answers

from pcourse.course import ROOT
from pcourse.lab.check import CheckFailed

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
