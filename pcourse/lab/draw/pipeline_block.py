"""What a picture of a pipeline says of one run, measured or simulated: its rows, its bubble, where it is from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pcourse.config import ConfigError
from pcourse.cost.simulate import Simulation, bubble_of_ideal, bubble_of_step
from pcourse.cost.stage_times import schedule_of, stage_ranks
from pcourse.parallel.schedule_check import peak_in_flight
from pcourse.parallel.schedules import FORWARD
from pcourse.report import Report, Span
from pcourse.wording import count_text, number_text, seconds_text

SECONDS = "seconds"


@dataclass(frozen=True)
class Block:
    """One run, as it is drawn. `peaks` are the most micro-batches in flight; None where the schedule is not known."""

    name: str
    rows: Sequence[Sequence[Span]]
    step: float
    busy: Sequence[float]
    peaks: Sequence[float] | None
    chunks: int
    source: str
    unit: str

    def time(self, value: float) -> str:
        return seconds_text(value) if self.unit == SECONDS else number_text(round(value, 9))

    @property
    def words(self) -> str:
        """The step and the bubble, which is counted in two ways: each is named."""
        optimizer = any(span.kind == "optimizer" for row in self.rows for span in row)
        ideal = f"{self.time(max(self.busy))}: the busiest stage's compute" + " and optimizer" * optimizer
        of_step, of_ideal = bubble_of_step(self.busy, self.step), bubble_of_ideal(self.busy, self.step)
        bubble = f"bubble {_percent(of_step)} of the wall clock, {_percent(of_ideal)} of the ideal"
        return f"step {self.time(self.step)} · {bubble} ({ideal})"


def blocks_of(runs: Sequence[Report | Simulation], names: Sequence[str] | None, unit: str | None) -> list[Block]:
    """A block for each run. Raises ValueError where they do not go on one axis."""
    if not runs:
        raise ValueError("pipeline needs a Report or a Simulation, or several")
    if names is not None and len(names) != len(runs):
        raise ValueError(f"{len(names)} names do not fit {len(runs)} runs; give one for each")
    make = [_of_simulation if isinstance(run, Simulation) else _of_report for run in runs]
    blocks = [f(run, name, unit) for f, run, name in zip(make, runs, names or [None] * len(runs), strict=True)]
    if len({block.unit for block in blocks}) > 1:
        raise ValueError(
            f"one time axis cannot hold {' and '.join(sorted({block.unit for block in blocks}))}: simulate with times "
            'in seconds and say unit="seconds", or take resimulate(report); or name one unit for all'
        )
    return blocks


def _of_simulation(run: Simulation, name: str | None, unit: str | None) -> Block:
    schedule = run.schedule
    unit = SECONDS if run.source else unit or _unit_of(run)
    return Block(
        name or _name(schedule.name, schedule.stages, schedule.micro_batches, schedule.chunks, "simulated"),
        run.spans, run.step_seconds, run.busy, run.peak_in_flight, schedule.chunks,
        run.source or _source(run, unit), unit,
    )  # fmt: skip


def _of_report(report: Report, name: str | None, _) -> Block:
    parallel, ranks = report.parallel, stage_ranks(report)
    try:
        schedule = schedule_of(report)
        peaks = [peak_in_flight(schedule, stage) for stage in range(schedule.stages)]
    except ConfigError:
        peaks = None
    busy = [rank.seconds.get("compute", 0.0) for rank in ranks]
    name = name or _name(parallel.schedule, parallel.pp, parallel.micro_batches, parallel.chunks, report.provenance)
    rows = [rank.spans for rank in ranks]
    source = report.source + ", the first rank of each stage" * (parallel.ranks > parallel.pp)
    return Block(name, rows, report.step_seconds, busy, peaks, parallel.chunks, source, SECONDS)


def _name(schedule: str, stages: int, micro_batches: int, chunks: int, provenance: str) -> str:
    each = f" of {chunks} chunks" if chunks > 1 else ""
    return f"{schedule}, {count_text(stages, 'stage')}{each}, {count_text(micro_batches, 'micro-batch')}, {provenance}"


def _per_micro_batch(run: Simulation) -> dict[str, list[float]]:
    """What a micro-batch takes each stage, all chunks together, by kind."""
    taken = defaultdict(list)
    for order, durations in zip(run.schedule.orders, run.durations, strict=True):
        totals = defaultdict(float)
        for action, took in zip(order, durations, strict=True):
            if action.micro_batch == 0:
                totals[action.kind] += took
        for kind, total in totals.items():
            taken[kind].append(total)
    return taken


def _unit_of(run: Simulation) -> str:
    forwards = _per_micro_batch(run)[FORWARD]
    return "units of one forward" if all(math.isclose(t, 1) for t in forwards) else "units of time"


def _source(run: Simulation, unit: str) -> str:
    text = seconds_text if unit == SECONDS else lambda t: number_text(round(t, 9))
    times = [
        f"{kind} {text(min(each))}" + (f" to {text(max(each))}" if text(max(each)) != text(min(each)) else "")
        for kind, each in _per_micro_batch(run).items()
    ]
    if run.schedule.stages > 1 and max(run.transfer):
        times.append(f"a message {text(max(run.transfer))}")
    return f"predicted from a walk of the schedule, a micro-batch taking a stage: {', '.join(times)}"


def _percent(share: float) -> str:
    percent = round(100 * share, 2) + 0.0  # no -0
    return f"{percent:.3g} %" if abs(percent) < 999.5 else f"{percent:,.0f} %"


def spoken(block: Block) -> str:
    """The block in words, for those who cannot see it."""
    stages = []
    for stage, busy in enumerate(block.busy):
        held = f", {number_text(round(block.peaks[stage], 2))} in flight" if block.peaks is not None else ""
        stages.append(f"stage {stage} computes {block.time(busy)}{held}")
    unit = "" if block.unit == SECONDS else f" (times in {block.unit})"
    return f"{block.name}: {block.words}{unit}; {'; '.join(stages)}. {block.source}."
