"""How long a pipeline schedule takes, from the times of its parts: an exact walk, no clock, no torch.

A compute begins when the one before it on its stage is done and its input is there; its input is there `transfer`
after the neighbour has made it. Sends take no time of the stage that sends, and messages do not hold each other up
(Qi et al. 2024, appendix D, counts the same way). Where backward is whole, the gradient leaves when it ends; where it
is split, when the input gradient is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pcourse.parallel.schedule_check import ScheduleError, in_flight
from pcourse.parallel.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from pcourse.report import Span


@dataclass(frozen=True)
class Simulation:
    """What a step of `schedule` takes; times in the unit that went in. `ends[i][n]` is when stage i ends its n-th
    compute, `durations[i][n]` how long that takes; `transfer` is what a message took, as `simulate` has it."""

    schedule: Schedule
    ends: tuple[tuple[float, ...], ...]
    durations: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...]

    @cached_property
    def step_seconds(self) -> float:
        """From the first start to the last end over all stages."""
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """What each stage computes."""
        return tuple(map(sum, self.durations))

    @property
    def bubble(self) -> float:
        """1 - busy/span of the stage with the longest span, from its own first start to its own last end: the bubble
        rate of Qi et al. 2024, table 5."""
        spans = [ends[-1] - (ends[0] - spent[0]) for ends, spent in zip(self.ends, self.durations, strict=True)]
        longest = max(range(len(spans)), key=spans.__getitem__)
        return 1 - self.busy[longest] / spans[longest] if spans[longest] else 0.0

    @property
    def bubble_of_step(self) -> float:
        """1 - mean busy/step: the share of the wall clock that the stages do not compute."""
        return 1 - sum(self.busy) / len(self.busy) / self.step_seconds if self.step_seconds else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """(step - ideal)/ideal, where the ideal is what the busiest stage computes: (p-1)/m if all are alike."""
        return self.step_seconds / max(self.busy) - 1 if max(self.busy) else 0.0

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Each stage's most micro-batches held at once, a chunk counting 1/v, until their weight gradient is done."""
        return tuple(in_flight(self.schedule, stage) for stage in range(self.schedule.stages))

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Each stage's computes with their start and end, in order."""
        several = self.schedule.chunks > 1
        return tuple(
            tuple(
                Span(a.kind, f"chunk {a.chunk}" if several else a.kind, end - took, end, a.micro_batch)
                for a, end, took in zip(order, ends, spent, strict=True)
            )
            for order, ends, spent in zip(self.schedule.orders, self.ends, self.durations, strict=True)
        )


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float],
    backward_input: float | Sequence[float],
    backward_weight: float | Sequence[float],
    transfer: float | Sequence[float] = 0.0,
) -> Simulation:
    """Walk `schedule` with these times of one micro-batch, in any one unit, a number or one per stage.

    A stage's times are those of all its chunks together; a chunk takes 1/v. `transfer` i is what a message takes
    between stages i and i + 1 (mod p), either way. Raises ValueError for times that are not such, ScheduleError where
    the stages wait for each other for ever.
    """
    p, v, m = schedule.stages, schedule.chunks, schedule.micro_batches
    f, b, w = (
        [t / v for t in _per_stage(name, times, p)]
        for name, times in (
            ("forward", forward), ("backward_input", backward_input), ("backward_weight", backward_weight),
        )
    )  # fmt: skip
    transfer = _per_stage("transfer", transfer, p)
    # One slot for each result that another compute may need: position·m + micro-batch, forwards first.
    backwards = schedule.positions * m
    made: list[float | None] = [None] * (2 * backwards)
    ends: list[list[float]] = [[] for _ in range(p)]
    durations: list[list[float]] = [[] for _ in range(p)]
    waiting: dict[int, int] = {}  # slot -> the stage that has come to a halt for it
    runnable = list(range(p))
    while runnable:
        stage = runnable.pop()
        order, ended, spent = schedule.orders[stage], ends[stage], durations[stage]
        kinds = {FORWARD: f[stage], BACKWARD: b[stage] + w[stage], BACKWARD_INPUT: b[stage], BACKWARD_WEIGHT: w[stage]}
        places = [_Place(schedule, stage, c, transfer) for c in range(v)]
        now = ended[-1] if ended else 0.0
        for n in range(len(ended), len(order)):
            kind, k, c = order[n]
            took, place = kinds[kind], places[c]
            if kind is not BACKWARD_WEIGHT:
                onward = kind is FORWARD
                needed = place.forward_needs if onward else place.backward_needs
                if needed is not None:
                    slot = needed * m + k + (0 if onward else backwards)
                    there = made[slot]
                    if there is None:
                        waiting[slot] = stage
                        break
                    there += place.forward_transfer if onward else place.backward_transfer
                    if there > now:
                        now = there
                now += took
                slot = place.position * m + k + (0 if onward else backwards)
                made[slot] = now
                if slot in waiting:
                    runnable.append(waiting.pop(slot))
            else:
                now += took
            ended.append(now)
            spent.append(took)
    for stage in range(p):
        if len(ends[stage]) < len(schedule.orders[stage]):
            stuck = schedule.orders[stage][len(ends[stage])]
            raise ScheduleError(f"stage {stage} waits for ever before {stuck.kind} of micro-batch {stuck.micro_batch}")
    return Simulation(schedule, tuple(map(tuple, ends)), tuple(map(tuple, durations)), tuple(transfer))


class _Place:
    """Where a chunk stands: whose results it needs, and how long they travel."""

    def __init__(self, schedule: Schedule, stage: int, chunk: int, transfer: list[float]):
        self.position = schedule.position(stage, chunk)
        first, last = self.position == 0, self.position == schedule.positions - 1
        self.forward_needs = None if first else self.position - 1
        self.backward_needs = None if last else self.position + 1
        self.forward_transfer = 0.0 if first else _link(schedule, stage, self.position - 1, transfer)
        self.backward_transfer = 0.0 if last else _link(schedule, stage, self.position + 1, transfer)


def _link(schedule: Schedule, stage: int, position: int, transfer: list[float]) -> float:
    """What a message takes between `stage` and the stage at `position`."""
    other = schedule.holder(position)[0]
    if other == stage:
        return 0.0
    # Neighbours share link min(i, j); the last stage and the first share the last link, unless they are neighbours.
    low, high = sorted((stage, other))
    return transfer[low] if high == low + 1 else transfer[high]


def _per_stage(name: str, times, p: int) -> list[float]:
    times = [float(times)] * p if isinstance(times, (int, float)) else [float(t) for t in times]
    if len(times) != p or not all(0 <= t < float("inf") for t in times):
        raise ValueError(f"{name}={times} must be times of 0 or more: one number, or one for each of {p} stages")
    return times
