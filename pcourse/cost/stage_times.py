"""The simulator calibrated: what a micro-batch took each stage in a report, and the report's schedule walked with that.

What is left between this walk and the report's step is what the walk leaves out: the optimizer, sums over replicas,
micro-batches of different lengths, whatever the stages do between computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pcourse.cost.simulate import Simulation, simulate
from pcourse.parallel.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule, make_schedule
from pcourse.report import RankReport, Report, Span
from pcourse.wording import seconds_text

# Recomputing goes before the input gradient, and holds the stage up as that does.
_PART_OF = {
    FORWARD: "forward",
    BACKWARD: "backward_input",
    BACKWARD_INPUT: "backward_input",
    "recompute": "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
}


def resimulate(report: Report) -> Simulation:
    """The report's own schedule, walked with the `stage_times` of the report, in seconds."""
    times = stage_times(report)
    walk = simulate(schedule_of(report), **times)
    messages = f"messages of {seconds_text(times['transfer'])}" if times["transfer"] else "messages that take no time"
    source = f"predicted from stage times {report.source}, and {messages}"
    return replace(walk, source=source)


def stage_times(report: Report) -> dict:
    """What one micro-batch takes each stage, as `simulate` wants it: lists `forward`, `backward_input` and
    `backward_weight`, and `transfer`, in seconds.

    Medians over the micro-batches, which may differ by a sequence where the batch does not divide; a stage's time is
    the sum over its chunks. A backward that is whole counts as `backward_input`. What the ranks of a stage send each
    other inside a compute (tp, cp) belongs to it. A stage's first rank stands for it.
    """
    times = {"forward": [], "backward_input": [], "backward_weight": []}
    for stage, rank in enumerate(stage_ranks(report)):
        found = _medians(rank.spans)
        for part in ("forward", "backward_input"):
            if not found[part]:
                raise ValueError(f"stage {stage} has no {part.replace('_', '-')} of a micro-batch among its spans")
        for part, each in times.items():
            each.append(found[part])
    return {**times, "transfer": _transfer(report)}


def stage_ranks(report: Report) -> list[RankReport]:
    """The first rank of each stage: along tp and cp, and of the first replica."""
    stages = [report.parallel.stage_of(rank.rank) for rank in report.ranks]
    return [report.ranks[stages.index(stage)] for stage in range(report.parallel.pp)]


def schedule_of(report: Report) -> Schedule:
    parallel = report.parallel
    return make_schedule(parallel.schedule, parallel.pp, parallel.micro_batches, parallel.chunks)


def chunk_of(span: Span) -> int:
    """The chunk that a span names in its label, 0 where it names none."""
    name, _, number = span.label.rpartition(" ")
    return int(number) if name == "chunk" and number.isdecimal() else 0


def _medians(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of one micro-batch by part, all chunks together."""
    begun, ended = {}, defaultdict(float)
    for span in spans:
        if span.kind in _PART_OF and span.micro_batch is not None:
            key = _PART_OF[span.kind], chunk_of(span), span.micro_batch
            begun[key] = min(begun.get(key, span.start), span.start)
            ended[key] = max(ended[key], span.end)
    lasted = defaultdict(list)
    for key, start in begun.items():
        part, chunk, _ = key
        lasted[part, chunk].append(ended[key] - start)
    totals: dict[str, float] = defaultdict(float)
    for (part, _), each in lasted.items():
        totals[part] += median(each)
    return totals


def _transfer(report: Report) -> float:
    """The median time of a message between stages, as far as receivers saw it whole; 0 where none did.

    A receive shows a message's whole time only if it was waiting before the message set out: a waiting span, and the
    communication right after it. Other receives find it under way or there. With cp, receives of another kind mix in.
    """
    if report.parallel.cp > 1:
        return 0.0
    whole = [
        moved.seconds
        for rank in stage_ranks(report)
        for waited, moved in _neighbours(rank.spans)
        if (waited.kind, moved.kind) == ("waiting", "communication") and waited.end == moved.start
    ]
    return median(whole) if whole else 0.0


def _neighbours(spans: Sequence[Span]):
    """Each span of a receive, and the next one with the same words."""
    by_label = defaultdict(list)
    for span in spans:
        if span.label.split(" ")[0] == "recv":
            by_label[span.label].append(span)
    for alike in by_label.values():
        alike.sort(key=lambda span: span.start)
        yield from zip(alike, alike[1:])
