"""Schedules: whole, in order, free of deadlock in a model of their channels; in flight and bubbles as theory says."""

from dataclasses import replace
from itertools import product

import pytest

from pcourse.config import ConfigError
from pcourse.parallel.schedule_check import ScheduleError, check_schedule, peak_in_flight
from pcourse.parallel.schedules import SCHEDULES, Action, make_schedule


def legal(name, p, m, v) -> bool:
    if name == "zb-v":
        return v == 2
    if name == "interleaved":
        return v == 1 or m % p == 0
    return v == 1


def theory_in_flight(name, p, m, v, i) -> float:
    """Huang 2019, Narayanan 2021, Korthikanti 2022 section 4.2.3, Qi 2024 table 2; never more than there are."""
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - i),
        "interleaved": min(m, ((v - 1) * p + 2 * (p - 1 - i) + 1) / v) if v > 1 else min(m, p - i),
        "zb-h1": min(m, p),
        "zb-h2": min(m, 2 * p - 1),
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_whole_in_order_and_free_of_deadlock(name):
    checked = 0
    for p, m, v in product(range(1, 9), range(1, 17), range(1, 5)):
        if legal(name, p, m, v):
            schedule = make_schedule(name, p, m, v)
            check_schedule(schedule)
            checked += 1
            if name != "zb-v":
                expected = [theory_in_flight(name, p, m, v, i) for i in range(p)]
                assert [peak_in_flight(schedule, i) for i in range(p)] == pytest.approx(expected), (p, m, v)
            else:  # balanced, and no more than 1F1B's fullest
                assert max(peak_in_flight(schedule, i) for i in range(p)) == min(m, p)
        else:
            with pytest.raises(ConfigError):
                make_schedule(name, p, m, v)
    assert checked >= 8 * 16


def test_interleaved_holds_what_korthikanti_says_on_the_first_stage():
    for p, v in product((2, 4, 8), (2, 3, 4)):
        assert peak_in_flight(make_schedule("interleaved", p, 4 * p, v), 0) == pytest.approx(
            p * (1 + (p - 1) / (p * v))
        )


def test_one_chunk_interleaved_is_1f1b():
    assert make_schedule("interleaved", 3, 5).orders == make_schedule("1f1b", 3, 5).orders


def test_1f1b_reads_as_in_the_papers():
    assert str(make_schedule("1f1b", 2, 3)).splitlines()[1:] == [
        "stage 0: F0 F1 B0 F2 B1 B2",
        "stage 1: F0 B0 F1 B1 F2 B2",
    ]


def test_messages_stand_where_they_must():
    """A receive is posted three computes ahead of the compute that needs it; a send follows what makes it."""
    first, last = make_schedule("1f1b", 2, 3).programs
    assert " ".join(map(str, first)) == "rg0 F0 sx0 rg1 F1 sx1 rg2 B0 F2 sx2 B1 B2"
    assert " ".join(map(str, last)) == "rx0 rx1 F0 rx2 B0 sg0 F1 B1 sg1 F2 B2 sg2"


def test_placement_goes_round_or_back():
    loop, v = make_schedule("interleaved", 3, 3, 2), make_schedule("zb-v", 3, 3, 2)
    assert [loop.holder(q) for q in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [v.holder(q) for q in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    for schedule in (loop, v):
        assert all(schedule.position(*schedule.holder(q)) == q for q in range(6))


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (["F0 B0 F1 B1", "F0 B0 F1"], "stage 1: micro-batch 1 has no backward"),
        (["F0 B0 F1 B1", "B0 F0 F1 B1"], "stage 1: backward of micro-batch 0 comes before its forward"),
        (["F0 B0 F1 B1", "F0 F0 B0 F1 B1"], "stage 1: forward of micro-batch 0 is done twice"),
        (
            ["F0 B0 F1 B1", "F0 B0 F1 B1 F2 B2"],
            "there is no forward of micro-batch 2; micro-batches are 0 to 1",
        ),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], "do not agree which activation comes as number 0"),
        (["F0 F1 B0 B1", "F0 F1 B1 B0"], "do not agree which gradient comes as number 0"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "deadlock: stage 0 before backward of micro-batch 0"),
        (["F0 B0 F1 B1"], "orders for 1 stages and there must be 2"),
    ],
)
def test_a_wrong_schedule_is_refused(orders, words):
    kinds = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
    orders = tuple(tuple(Action(kinds[a[0]], int(a[1:])) for a in order.split()) for order in orders)
    with pytest.raises(ScheduleError, match=words):
        check_schedule(replace(make_schedule("1f1b", 2, 2), orders=orders))


def test_a_chunk_before_its_neighbour_on_the_same_stage_is_refused():
    schedule = make_schedule("interleaved", 1, 2, 2)
    order = list(schedule.orders[0])
    order[0], order[1] = order[1], order[0]
    with pytest.raises(ScheduleError, match="forward of micro-batch 0 in chunk 1 comes before its forward in chunk 0"):
        check_schedule(replace(schedule, orders=(tuple(order),)))
