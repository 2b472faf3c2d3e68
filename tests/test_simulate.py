"""The simulator against closed forms, and against what papers print."""

import pickle
import time
from dataclasses import replace
from itertools import product

import pytest

from pcourse.cost import published
from pcourse.cost.published import GPIPE, ZERO_BUBBLE, speed_up
from pcourse.cost.simulate import simulate
from pcourse.parallel.schedule_check import ScheduleError
from pcourse.parallel.schedules import Action, make_schedule


@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_zero_bubble_table_5_from_table_9(row):
    assert {name: round(bubble, 4) for name, bubble in row.simulated().items()} == row.bubbles


@pytest.mark.parametrize("stages", GPIPE)
def test_gpipe_table_2_at_32_micro_batches(stages):
    """What the authors measured is up to 7 % (to a digit) slower than a schedule without messages."""
    assert -0.075 < GPIPE[stages] / speed_up(stages) - 1 < 0


def test_the_published_tables_are_printed(capsys):
    published.main()
    words = capsys.readouterr().out
    assert "0.2431 | 0.2431" in words and "0.0266 | 0.0266" in words and "6.56 | 6.3" in words


@pytest.mark.parametrize(("p", "m"), list(product((1, 2, 3, 4, 8), (1, 2, 4, 8, 32))))
def test_closed_forms(p, m):
    f, b, w = 3, 5, 2
    run = {name: simulate(make_schedule(name, p, m), f, b, w) for name in ("naive", "gpipe", "1f1b", "zb-h1")}
    for name in ("gpipe", "1f1b"):
        assert run[name].step_seconds == (m + p - 1) * (f + b + w)
        assert run[name].bubble_of_ideal == pytest.approx((p - 1) / m)
        assert run[name].bubble_of_step == pytest.approx((p - 1) / (m + p - 1))
    assert run["naive"].step_seconds == m * p * (f + b + w)
    equal = simulate(make_schedule("zb-h1", p, m), 1, 1, 1).step_seconds
    if m >= p:  # Qi et al., table 2
        assert run["zb-h1"].step_seconds == m * (f + b + w) + (p - 1) * (f + b - w)
        assert equal == 3 * m + p - 1
    else:
        assert equal == 2 * (m + p - 1) + 1


@pytest.mark.parametrize(("p", "v"), list(product((2, 4, 8), (2, 3, 4))))
def test_interleaving_divides_the_bubble_by_v(p, v):
    run = simulate(make_schedule("interleaved", p, 2 * p, v), 1.0, 1.0, 1.0)
    assert run.step_seconds == pytest.approx(2 * p * 3 + (p - 1) * 3 / v)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_at_equal_times(p):
    assert simulate(make_schedule("zb-h2", p, 4 * p), 1, 1, 1).bubble == pytest.approx(0)
    v = simulate(make_schedule("zb-v", p, 4 * p, 2), 1, 1, 1)
    assert v.step_seconds == 12 * p + (p - 1) / 2  # what is left is a stage's later start, a chunk's forward each
    assert max(v.peak_in_flight) == p


def test_the_slowest_stage_sets_the_pace():
    even = simulate(make_schedule("1f1b", 4, 32), 1, 1, 1).step_seconds
    for slow in range(4):
        times = [1.0 + (i == slow) for i in range(4)]
        uneven = simulate(make_schedule("1f1b", 4, 32), times, times, times)
        assert 32 * 6 < uneven.step_seconds <= 32 * 6 + 3 * 3 + 3
        assert uneven.step_seconds > 1.8 * even


def test_a_transfer_costs_twice_a_cut_and_more_in_the_steady_state():
    """2(p-1) transfers fill and drain; in the steady state each round of p micro-batches waits for 2(p-1) more."""
    p, m, c = 4, 16, 0.1
    gpipe = simulate(make_schedule("gpipe", p, m), 1, 1, 1, c).step_seconds
    assert gpipe == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * c)
    longer = [simulate(make_schedule("1f1b", p, n), 1, 1, 1, c).step_seconds for n in (m, m + p)]
    assert longer[1] - longer[0] == pytest.approx(p * 3 + 2 * c * (p - 1))


def test_spans_follow_each_other_and_their_dependencies():
    schedule = make_schedule("interleaved", 3, 6, 2)
    run = simulate(schedule, [1, 2, 1], [1, 1, 3], [2, 1, 1], [0.5, 0.25, 1])
    ends = {}
    for stage, spans in enumerate(run.spans):
        for action, span in zip(schedule.orders[stage], spans, strict=True):
            ends[action.kind, schedule.position(stage, action.chunk), action.micro_batch] = span
        assert all(a.end <= b.start + 1e-12 for a, b in zip(spans, spans[1:], strict=False))
    for (kind, q, k), span in ends.items():
        before = ends.get((kind, q - 1 if kind == "forward" else q + 1, k))
        assert before is None or span.start >= before.end + 0.25 - 1e-12


def test_64_stages_and_512_micro_batches_take_less_than_a_moment():
    schedule = make_schedule("interleaved", 64, 512, 4)
    start = time.process_time()
    simulate(schedule, 1, 1, 1, 0.1)
    assert time.process_time() - start < 3  # 0.6 s alone on a core: a guard against a slower kind of algorithm


@pytest.mark.parametrize(
    "times",
    [(1, 1, -1), (1, 1, [1, 1]), (1, 1, float("nan")), (1, 1, 1, [1, 2]), (1, 1, "123"), (1, None, 1), (1, 1, 10**400)],
)
def test_impossible_times_are_refused(times):
    with pytest.raises(ValueError, match="one number, or one for each of 3 stages"):
        simulate(make_schedule("1f1b", 3, 3), *times)


def test_an_equal_schedule_takes_as_long():
    """Of kinds that are spelt the same, not the same objects: as a learner writes them, or as they come from a file."""
    for name in ("1f1b", "zb-h1"):
        schedule = make_schedule(name, 3, 4)
        assert simulate(pickle.loads(pickle.dumps(schedule)), 1, 2, 3) == simulate(schedule, 1, 2, 3)


def test_a_schedule_that_is_none_is_told():
    good = make_schedule("1f1b", 2, 2)
    for orders, words in ((good.orders[:1], "orders for 1 stages"), ((good.orders[0], (Action("sleep", 0),)), "sleep")):
        with pytest.raises(ScheduleError, match=words):
            simulate(replace(good, orders=orders), 1, 1, 1)


def test_a_deadlock_is_told():
    orders = make_schedule("naive", 2, 2).orders[0], make_schedule("gpipe", 2, 2).orders[1]
    bad = replace(make_schedule("1f1b", 2, 2), orders=orders)
    with pytest.raises(ScheduleError, match="waits for ever"):
        simulate(bad, 1, 1, 1)
