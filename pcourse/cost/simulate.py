"""How long a pipeline schedule takes, from the times of its parts: an exact walk, no clock, no torch.

A compute begins when the one before it on its stage is done and its input is there; its input is there `transfer`
after the neighbour has made it. Sends take no time of the stage that sends, and messages do not hold each other up
(Qi et al. 2024, appendix D, counts the same way). Where backward is whole, the gradient leaves when it ends; where it
is split, when the input gradient is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

from pcourse.parallel.schedule_check import ScheduleError, check_schedule, peak_in_flight
from pcourse.parallel.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from pcourse.report import Span

LARGEST = 1e150  # of a time: sums of such are finite


def bubble_of_step(busy: Sequence[float], step: float) -> float:
    """1 - mean busy/step: the share of the wall clock that the stages do not compute."""
    return 1 - sum(busy) / len(busy) / step if step else 0.0


def bubble_of_ideal(busy: Sequence[float], step: float) -> float:
    """step/ideal - 1, where the ideal is what the busiest stage computes: (p-1)/m for GPipe and 1F1B on even stages."""
    return step / max(busy) - 1 if max(busy) else 0.0


def link_between(stage_a: int, stage_b: int, stages: int) -> int | None:
    """Which link joins two stages: link i joins stage i and i + 1, the last one the last stage and the first.

    None within a stage, and between stages that are not neighbours. Of two stages it is link 0 that counts.
    """
    low, high = sorted((stage_a, stage_b))
    if high == low + 1:
        return low
    return high if (low, high) == (0, stages - 1) and stages > 1 else None


@dataclass(frozen=True)
class Simulation:
    """What a step of `schedule` takes; times in the unit that went in. `ends[i][n]` is when stage i ends its n-th
    compute, `durations[i][n]` how long that takes; `transfer` is what a message took, as `simulate` has it. `source`
    says where the times are from, if that is known."""

    schedule: Schedule
    ends: tuple[tuple[float, ...], ...]
    durations: tuple[tuple[float, ...], ...]
    transfer: tuple[float, ...]
    source: str = ""

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
        return bubble_of_step(self.busy, self.step_seconds)

    @property
    def bubble_of_ideal(self) -> float:
        return bubble_of_ideal(self.busy, self.step_seconds)

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Each stage's most micro-batches held at once, a chunk counting 1/v, until their weight gradient is done."""
        return tuple(peak_in_flight(self.schedule, stage) for stage in range(self.schedule.stages))

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
    the schedule is not one, or its stages wait for each other for ever.
    """
    p, v = schedule.stages, schedule.chunks
    f, b, w = (
        [t / v for t in _per_stage(name, times, p)]
        for name, times in (
            ("forward", forward), ("backward_input", backward_input), ("backward_weight", backward_weight),
        )
    )  # fmt: skip
    transfer = _per_stage("transfer", transfer, p)
    made: dict = {}  # (forward?, position, micro-batch) -> when its result is there
    ends, durations = [[] for _ in range(p)], [[] for _ in range(p)]

    def walk(stage: int) -> Iterator[tuple]:
        """Do all that `stage` does, into `ends` and `durations`; yield what it waits for whenever it has to wait."""
        lasts = {FORWARD: f[stage], BACKWARD: b[stage] + w[stage], BACKWARD_INPUT: b[stage], BACKWARD_WEIGHT: w[stage]}
        needs = _needs(schedule, stage, transfer)
        places = schedule.places(stage)
        now = 0.0
        for kind, k, c in schedule.orders[stage]:
            onward = kind == FORWARD
            source, travels = needs[kind, c]
            if source is not None:
                while (there := made.get((onward, source, k))) is None:
                    yield onward, source, k
                now = max(now, there + travels)
            now += lasts[kind]
            if kind != BACKWARD_WEIGHT:
                made[onward, places[c], k] = now
            ends[stage].append(now)
            durations[stage].append(lasts[kind])

    try:
        _run_all([walk(stage) for stage in range(p)], made)
    except (IndexError, KeyError):  # an action that there cannot be
        check_schedule(schedule)
        raise
    for stage in range(p):
        if len(ends[stage]) < len(schedule.orders[stage]):
            stuck = schedule.orders[stage][len(ends[stage])]
            raise ScheduleError(f"stage {stage} waits for ever before {stuck.kind} of micro-batch {stuck.micro_batch}")
    return Simulation(schedule, tuple(map(tuple, ends)), tuple(map(tuple, durations)), tuple(transfer))


def _run_all(walks: list[Iterator], made: dict) -> None:
    """Let each walk go as far as it can, and again those that got what they were waiting for."""
    runnable, waiting = list(walks), {}
    while runnable:
        for walk in runnable:
            if (slot := next(walk, None)) is not None:
                waiting.setdefault(slot, []).append(walk)
        runnable = [walk for slot in [slot for slot in waiting if slot in made] for walk in waiting.pop(slot)]


def _needs(schedule: Schedule, stage: int, transfer: list[float]) -> dict:
    """(kind, chunk) -> the position whose result such a compute needs, and how long that travels."""
    needs = {}
    for c in range(schedule.chunks):
        for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            source = schedule.source(stage, Action(kind, 0, c))
            link = None if source is None else link_between(stage, schedule.holder(source)[0], schedule.stages)
            needs[kind, c] = source, 0.0 if link is None else transfer[link]
    return needs


def _per_stage(name: str, times, p: int) -> list[float]:
    several = list(times) if isinstance(times, (list, tuple)) or getattr(times, "ndim", 0) == 1 else [times] * p
    real = all(isinstance(t, Real) and not isinstance(t, bool) and 0 <= t <= LARGEST for t in several)
    if len(several) != p or not real:
        raise ValueError(f"{name}={times!r} must be times of 0 or more: one number, or one for each of {p} stages")
    return [float(t) for t in several]
