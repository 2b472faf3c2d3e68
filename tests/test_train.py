"""One training step and its Report."""

import math
import time
from dataclasses import replace

import pytest
import torch

from pcourse.assemble import Recording, StepRecord, assemble
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.proof import prove
from pcourse.report import TIME_KINDS, MemoryLedger, Report
from pcourse.train import Trainer, measure
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
        busy = sum(span.seconds for span in rank.spans)
        assert busy <= report.step_seconds and rank.seconds["idle"] == pytest.approx(report.step_seconds - busy)
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


def test_a_clipped_step_moves_the_weights_by_the_clipped_norm():
    """Plain SGD: the step's length is learning rate × min(norm, clip), over the whole model."""

    def program(comm, clip):
        train = TrainConfig(batch=2, optimizer="sgd", learning_rate=0.5, clip=clip)
        trainer = Trainer(comm, replace(MODEL, dtype="float64"), ParallelConfig(tp=2), train)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        _, norm = trainer.step(0)
        moved = zip(trainer.model.parameters(), before, strict=True)
        squares = sum(((p - q) ** 2).sum() for p, q in moved if hasattr(p, "shard") or comm.rank == 0)
        return norm, comm.all_reduce(squares.detach()).sqrt().item()

    for clip in (1e-3, None):
        (norm, length), _ = World(2, "threads").run(program, clip, timeout=30)
        assert norm > 1e-3 and length == pytest.approx(0.5 * min(norm, clip or norm), rel=1e-3)


def test_the_seed_reaches_weights_text_and_dropout():
    def program(comm, seed):
        trainer = Trainer(comm, replace(MODEL, dropout=0.5), ParallelConfig(), TrainConfig(batch=2, seed=seed))
        trainer.forward_backward(3)
        return [m.step_seed for m in trainer.model.modules() if hasattr(m, "step_seed")]

    (first,), (again,), (other,) = (World(1, "threads").run(program, seed, timeout=30) for seed in (1, 1, 2))
    assert first == again and not set(first) & set(other)


def test_a_loss_that_is_not_finite_is_still_json(report):
    broken = replace(report, loss=(math.nan, 1.0), gradient_norm=(math.inf, 1.0))
    text = broken.to_json()
    assert "NaN" not in text and "Infinity" not in text
    assert math.isnan(Report.from_json(text).loss[0]) and Report.from_json(text).loss[1] == 1.0


def test_computes_inside_computes_count_once():
    """As a recomputed forward pass inside backward."""

    def program(comm):
        start = comm.clock.now()
        with comm.compute("backward"):
            time.sleep(0.02)
            with comm.compute("forward"):
                time.sleep(0.03)
            time.sleep(0.01)
        calls, computes = comm.recorder.take()
        return Recording("here", [StepRecord(start, comm.clock.now(), calls, computes, 0.0, 0.0)], MemoryLedger())

    report = assemble(World(1, "threads").run(program), MODEL, ParallelConfig(), TRAIN)
    spans = report.ranks[0].spans
    assert [span.kind for span in spans] == ["backward", "forward", "backward"]
    assert sum(span.seconds for span in spans) <= report.step_seconds
    assert spans[1].seconds == pytest.approx(0.03, rel=0.5)


def test_what_cannot_run_is_refused_before_any_rank_starts():
    with pytest.raises(ConfigError, match="this world has 3 ranks and the configuration needs 2"):
        measure(MODEL, ParallelConfig(tp=2), TRAIN, World(3, "threads"))
    with pytest.raises(ConfigError, match="clock='paced' needs the times to keep"):
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
