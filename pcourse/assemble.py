"""From what each rank recorded to one Report: calls matched across ranks, waiting told from moving bytes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from pcourse.report import CommunicationRow, MemoryLedger, RankReport, Report, Span


@dataclass
class StepRecord:
    """One step of one rank: its interval, its calls and computes (see `comm`), its loss and gradient norm."""

    start: float
    end: float
    calls: list
    computes: list
    loss: float
    gradient_norm: float


@dataclass
class Recording:
    """All that a rank brings back from `train.record`."""

    device: str
    steps: list[StepRecord]
    memory: MemoryLedger
    clock_uncertainty: float = 0.0  # seconds by which this rank's clock may differ from rank 0's
    allocator_peak: int | None = None  # bytes, of the memory pass; only a GPU's allocator tells


def assemble(recordings, model, parallel, train, *, made_at="", provenance="measured") -> Report:
    """One Report. The spans, seconds and communication are those of the median step (of an even number, the lower)."""
    steps = list(zip(*(r.steps for r in recordings), strict=True))  # steps[i][rank]
    times = [max(s.end for s in step) - min(s.start for s in step) for step in steps]
    median = statistics.median_low(times)
    typical = steps[times.index(median)]
    arrivals = _last_arrivals(typical)
    start = min(s.start for s in typical)
    ranks = tuple(
        _rank_report(r, recording.memory, step, start, median, arrivals)
        for r, (recording, step) in enumerate(zip(recordings, typical, strict=True))
    )
    return Report(
        provenance=provenance,
        device=recordings[0].device,
        model=model,
        parallel=parallel,
        train=train,
        step_seconds=median,
        step_spread=_quartiles(times, median),
        step_times=tuple(times),
        tokens_per_second=train.batch * model.sequence / median,
        loss=tuple(step[0].loss for step in steps),
        gradient_norm=tuple(step[0].gradient_norm for step in steps),
        ranks=ranks,
        made_at=made_at,
        notes=tuple(_notes(recordings)),
    )


def _notes(recordings):
    """What a reader of this report must know beside its numbers."""
    if uncertainty := max(r.clock_uncertainty for r in recordings):
        yield f"ranks on several machines, their clocks aligned to within {uncertainty * 1e6:.0f} µs of rank 0's"
    for rank, recording in enumerate(recordings):
        if recording.allocator_peak is not None:
            yield f"rank {rank}: the GPU's allocator peaked at {recording.allocator_peak:,} bytes, rounding included"


def _quartiles(times, median) -> tuple[float, float]:
    """The lower and the upper one; of few steps, the median of which is one of them, they may lie on one side of it."""
    if len(times) == 1:
        return median, median
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return min(low, median), max(high, median)


def _last_arrivals(step) -> dict:
    """When the last member of each communication entered it: from then on bytes can move."""
    last: dict = defaultdict(float)
    for rank in step:
        for call in rank.calls:
            last[call.key] = max(last[call.key], call.entered)
    return last


def _rank_report(rank, memory, step, start, step_seconds, arrivals) -> RankReport:
    spans = sorted(_call_spans(step, arrivals) + _compute_spans(step), key=lambda s: s.start)
    spans = tuple(Span(s.kind, s.label, s.start - start, s.end - start, s.micro_batch) for s in spans)
    seconds = {"compute": 0.0, "communication": 0.0, "waiting": 0.0}
    for span in spans:
        seconds[span.kind if span.kind in seconds else "compute"] += span.seconds
    seconds["idle"] = max(0.0, step_seconds - sum(seconds.values()))
    return RankReport(rank, memory, _communication(step), spans, seconds)


def _held(call):
    """The intervals in which the rank did nothing but this call."""
    yield call.entered, call.left
    if call.wait_entered is not None:
        yield call.wait_entered, call.wait_left


def _call_spans(step, arrivals) -> list[Span]:
    spans = []
    for call in step.calls:
        label = f"{call.operation} {call.label}".strip()
        for begin, end in _held(call):
            ready = min(max(begin, arrivals[call.key]), end) if _blocks(call, begin) else begin
            spans += [
                Span(k, label, a, b) for k, a, b in (("waiting", begin, ready), ("communication", ready, end)) if b > a
            ]
    return spans


def _blocks(call, begin) -> bool:
    """The issue of an asynchronous call waits for nobody; its wait does."""
    return call.wait_entered is None or begin == call.wait_entered


def _compute_spans(step) -> list[Span]:
    """The computes, with the calls and the other computes made inside them cut out."""
    held = [interval for call in step.calls for interval in _held(call)]
    spans = []
    for c in step.computes:
        inner = [(d.start, d.end) for d in step.computes if d is not c and c.start <= d.start and d.end <= c.end]
        at = c.start
        for begin, end in sorted(held + inner):
            if end <= at or begin >= c.end:
                continue
            if begin > at:
                spans.append(Span(c.kind, c.label, at, begin, c.micro_batch))
            at = max(at, end)
        if c.end > at:
            spans.append(Span(c.kind, c.label, at, c.end, c.micro_batch))
    return spans


def _communication(step) -> tuple[CommunicationRow, ...]:
    rows: dict = defaultdict(list)
    for call in step.calls:
        rows[call.account or call.axis, call.operation].append(call)
    return tuple(
        CommunicationRow(
            axis,
            operation,
            len(calls),
            sum(c.payload for c in calls),
            sum(c.wire for c in calls),
            sum((c.left if c.wait_left is None else c.wait_left) - c.entered for c in calls),
            sum(end - begin for c in calls for begin, end in _held(c)),
        )
        for (axis, operation), calls in sorted(rows.items())
    )
