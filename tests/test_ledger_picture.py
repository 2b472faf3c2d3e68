"""The memory ledger as a picture: what was measured beside a formula, by category."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_lab import assert_drawn

from pcourse import ModelConfig, ParallelConfig, TrainConfig, World
from pcourse.cost.memory import memory
from pcourse.lab.draw.ledger import course, ledger
from pcourse.report import MemoryLedger, RankReport, Report
from pcourse.train import memory_pass

MODEL, TRAIN = ModelConfig(layers=1, hidden=16, heads=2, sequence=8), TrainConfig(batch=4)
HELD = MemoryLedger(4000, 4000, 8000, 6000, 1000, 21_000, {"parameters": 4000, "activations": 6000})


def a_report(*ledgers: MemoryLedger, parallel=None, provenance="measured") -> Report:
    parallel = parallel or ParallelConfig(dp=len(ledgers))
    ranks = tuple(RankReport(number, held, (), (), {}) for number, held in enumerate(ledgers))
    return Report(
        provenance, "made-up ranks", MODEL, parallel, TRAIN, 1.0, (1.0, 1.0), (1.0,), 1.0, (5.0,), (1.0,), ranks
    )


def formula_of(*ledgers: MemoryLedger):
    return lambda model, parallel, train, rank: ledgers[rank]


def written(picture) -> list[str]:
    return [text.get_text() for text in picture.figure.texts]


def measured_on_threads() -> Report:
    return a_report(*World(1, "threads").run(memory_pass, MODEL, ParallelConfig(), TRAIN, lambda: None, timeout=60))


def test_what_was_measured_equals_its_formula_in_every_category_that_has_one():
    picture = ledger(measured_on_threads(), memory)
    assert sum(words.startswith("=") for words in written(picture)) >= 4
    assert not any(category in picture.alt.partition("made-up")[2] for category in ("parameters", "activations"))
    assert "predicted from the formulas of pcourse.cost.memory" in picture.alt
    assert_drawn(picture)


def test_a_formula_without_a_peak_says_nothing_about_temporary_memory():
    exact = replace(HELD, temporary=0, peak=0, at_peak={})
    picture = ledger(a_report(HELD), formula_of(exact))
    assert written(picture).count("no formula") == 2 and "temporary no formula" in picture.alt
    assert not any(words.startswith(("≈", "≠")) for words in written(picture))


def test_a_difference_is_named_with_its_category_and_size():
    less = replace(HELD, activations=5992, temporary=500, peak=21_000)
    picture = ledger(a_report(HELD, HELD), formula_of(HELD, less))
    line = "rank 1: activations: 8 B more than the formula (+0.13 %)"
    assert line in picture.alt and line in written(picture) and "rank 0: activations" not in picture.alt
    assert "≈ 5.85 KiB" in written(picture) and "≠ 500 B" in written(picture)
    assert_drawn(picture)


def test_a_difference_of_every_rank_is_named_once():
    less = replace(HELD, optimizer=7000)
    picture = ledger(a_report(HELD, HELD), formula_of(less, less))
    assert "each rank: optimizer: 0.98 KiB more than the formula (+14 %)" in picture.alt
    assert sum("optimizer:" in words for words in written(picture)) == 1


def test_what_is_near_is_named_for_a_single_rank():
    less = replace(HELD, peak=20_000)
    words = "peak of the sum: 0.98 KiB more than the formula (+5 %)"
    assert words in ledger(a_report(HELD), formula_of(less)).alt
    assert words not in ledger(a_report(HELD, HELD), formula_of(less, less)).alt


def test_a_rank_stands_beside_its_own_formula():
    alt = ledger(a_report(HELD, HELD), formula_of(HELD, HELD)).alt
    order = ["measured, rank 0", "formula, rank 0", "measured, rank 1", "formula, rank 1"]
    assert sorted(order, key=alt.index) == order


def test_each_of_several_reports_has_its_formula():
    picture = ledger([("zero=0", a_report(HELD)), ("zero=1", a_report(HELD))], formula_of(HELD))
    assert "formula, zero=1, rank 0" in picture.alt and written(picture).count("zero=1, rank 0") == 1
    assert_drawn(picture)


def test_many_equal_ranks_share_a_pair():
    other = replace(HELD, activations=1)
    picture = ledger(a_report(*[HELD] * 7, other), formula_of(*[HELD] * 8))
    assert "measured, ranks 0–6" in picture.alt and "formula, rank 7" in picture.alt
    assert "rank 7: activations: 5.86 KiB less than the formula" in picture.alt
    assert_drawn(picture)


def test_a_formula_has_no_split_at_the_peak():
    with pytest.raises(ValueError, match="at_peak can be False"):
        ledger(a_report(HELD), memory, at_peak=True)


def test_a_predicted_report_is_compared_at_the_peak():
    expected = a_report(replace(HELD, at_peak={"parameters": 4000}), provenance="predicted")
    assert "activations: 5.86 KiB where predicted has none" in ledger(a_report(HELD), expected, True).alt


def test_the_course_of_a_step_says_when_it_is_fullest():
    held = [{"parameters": 4000, "activations": n} for n in (1000, 6000, 8000, 0)]
    passes = [SimpleNamespace(kind=k, start=a, end=b) for k, a, b in (("forward", 0, 1), ("backward", 2, 3))]
    picture = course([*zip([0.5, 1.0, 2.5, 3.0], held, strict=True)], passes, "measured on a made-up rank")
    assert "forward: from 4.88 KiB to 9.77 KiB; backward: from 11.7 KiB to 3.91 KiB" in picture.alt
    assert "Most in backward, 11.7 KiB: parameters 3.91 KiB, gradients 0 B" in picture.alt
    assert_drawn(picture)


def test_a_course_needs_a_sample():
    with pytest.raises(ValueError, match="at least one sample"):
        course([], [], "")
