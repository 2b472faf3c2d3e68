"""Bubbles of real runs that are paced, beside theory; the virtual clock beside the simulator."""

import time

import pytest

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.simulate import simulate
from pcourse.cost.stage_times import resimulate
from pcourse.pace import Pace
from pcourse.parallel.schedules import make_schedule
from pcourse.train import measure
from pcourse.world import World

TINY = ModelConfig(layers=8, hidden=8, heads=2, vocab=13, sequence=3)
ONE_STEP = TrainConfig(batch=16, steps=1, warmup=0)
UNEVEN = Pace((0.013, 0.017, 0.011, 0.029), (0.019, 0.011, 0.023, 0.013), (0.007, 0.005, 0.011, 0.003), 0.002)


@pytest.mark.parametrize(("p", "m", "within"), [(4, 4, 0.01), (4, 8, 0.01), (4, 16, 0.01), (8, 8, 0.03), (8, 16, 0.03)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_paced_bubble_is_theorys(name, p, m, within):
    """20 ms forward, 40 ms backward, real processes that really wait: (p - 1)/(m + p - 1) of the wall clock."""
    parallel = ParallelConfig(pp=p, schedule=name, micro_batches=m)
    for _ in range(3):  # this machine may be busy with something else
        begun = time.perf_counter()
        report = measure(TINY, parallel, ONE_STEP, World(p, "gloo"), clock="paced", pace=0.02)
        assert time.perf_counter() - begun > report.step_seconds >= (m + p - 1) * 0.06, "that much time really passed"
        if report.valid:
            break
    else:
        pytest.skip(f"this machine is too busy: {report.lateness:.1%} late")
    busy = sum(rank.seconds["compute"] for rank in report.ranks) / p
    assert 1 - busy / report.step_seconds == pytest.approx((p - 1) / (m + p - 1), abs=within)
    assert report.step_seconds / (m * 0.06) - 1 == pytest.approx((p - 1) / m, abs=within * (m + p - 1) / m)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)],
)
@pytest.mark.parametrize("pace", [Pace.of(0.02), UNEVEN], ids=["even", "uneven"])
def test_the_virtual_clock_is_the_simulator(name, chunks, pace):
    """To the last bit: every start and every end."""
    parallel = ParallelConfig(pp=4, schedule=name, micro_batches=8, chunks=chunks)
    report = measure(TINY, parallel, ONE_STEP, World(4, "threads"), clock="virtual", pace=pace)
    times = pace.forward, pace.backward_input, pace.backward_weight, pace.transfer
    expected = simulate(make_schedule(name, 4, 8, chunks), *times)
    assert report.step_seconds == expected.step_seconds
    for rank, spans in zip(report.ranks, expected.spans, strict=True):
        computes = [span for span in rank.spans if span.kind.startswith(("forward", "backward"))]
        assert [(s.kind, s.micro_batch, s.end) for s in computes] == [(s.kind, s.micro_batch, s.end) for s in spans]


def test_on_even_stages_clock_simulator_and_closed_form_agree():
    parallel = ParallelConfig(pp=4, schedule="1f1b", micro_batches=8)
    report = measure(TINY, parallel, ONE_STEP, World(4, "threads"), clock="virtual", pace=0.25)  # sums without rounding
    assert report.step_seconds == (8 + 4 - 1) * 0.75 == resimulate(report).step_seconds
