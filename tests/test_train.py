"""One training step and its Report."""

from dataclasses import replace

import pytest
import torch

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.proof import prove
from pcourse.report import TIME_KINDS, Report
from pcourse.train import measure
from pcourse.world import RankError, World

MODEL = ModelConfig(layers=2, hidden=32, heads=4, sequence=16)
TRAIN = TrainConfig(batch=4, steps=3, warmup=1)


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(MODEL, ParallelConfig(tp=2), TRAIN, World(2, "gloo"))


def test_a_report_is_whole(report):
    assert report.provenance == "measured" and "2 CPU ranks over gloo" in report.device
    assert len(report.loss) == len(report.gradient_norm) == len(report.step_times) == 3
    low, high = report.step_spread
    assert low <= report.step_seconds <= high and report.step_seconds in report.step_times
    assert report.tokens_per_second == pytest.approx(4 * 16 / report.step_seconds)
    assert report.source.startswith("measured on 2 CPU ranks over gloo")


def test_json_is_inverse(report):
    assert Report.from_json(report.to_json()) == report


def test_seconds_by_kind_add_up_to_the_step(report):
    for rank in report.ranks:
        assert set(rank.seconds) == set(TIME_KINDS) and min(rank.seconds.values()) >= 0
        assert sum(rank.seconds.values()) == pytest.approx(report.step_seconds)
        assert rank.seconds["compute"] > 0 and rank.seconds["communication"] > 0


def test_spans_lie_in_the_step_and_do_not_overlap(report):
    for rank in report.ranks:
        assert {s.kind for s in rank.spans} <= {"forward", "backward", "optimizer", "communication", "waiting"}
        assert all(0 <= s.start <= s.end <= report.step_seconds + 1e-9 for s in rank.spans)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(rank.spans, rank.spans[1:], strict=False))


def test_losses_are_those_of_the_unsplit_model(report):
    alone = measure(MODEL, ParallelConfig(), TRAIN, World(1, "threads"))
    assert report.loss == pytest.approx(alone.loss, rel=1e-5)
    assert report.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-4)
    assert report.loss[-1] < report.loss[0]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_micro_batches_are_exact_whatever_they_divide(micro_batches):
    assert (proof := prove(MODEL, ParallelConfig(tp=2, micro_batches=micro_batches), TrainConfig(batch=4))).holds, proof


def test_a_clipped_step_has_the_wanted_norm():
    tight = prove(MODEL, ParallelConfig(tp=2), TrainConfig(batch=2, clip=1e-3))
    assert tight.holds, tight


def test_what_cannot_run_is_refused_before_any_rank_starts():
    with pytest.raises(ConfigError, match="this world has 3 ranks and the configuration needs 2"):
        measure(MODEL, ParallelConfig(tp=2), TRAIN, World(3, "threads"))
    with pytest.raises(ConfigError, match="clock can be 'wall'"):
        measure(MODEL, clock="paced")


def test_progress_reaches_the_caller():
    seen = []
    measure(
        MODEL, ParallelConfig(tp=2), TRAIN, World(2, "gloo"), progress=lambda step, of, **info: seen.append((step, of))
    )
    assert seen[-1] == (6, 6)  # 1 warm-up, 3 steps, 2 of the memory pass


def test_a_rank_that_fails_in_backward_ends_the_run(monkeypatch):
    def fails(self, number):
        loss = (torch.ones(1, requires_grad=True) * 2).sum()
        loss.register_hook(lambda grad: 1 / 0)
        loss.backward()

    monkeypatch.setattr("pcourse.train.Trainer.forward_backward", fails)
    with pytest.raises(RankError, match="rank . of 2 raised ZeroDivisionError"):
        measure(MODEL, ParallelConfig(tp=2), TRAIN, World(2, "threads"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_train(dtype):
    report = measure(replace(MODEL, dtype=dtype), ParallelConfig(tp=2), TRAIN, World(2, "gloo"))
    assert report.loss[-1] < report.loss[0]
    assert report.ranks[0].row("tp", "all_reduce").calls == 12
