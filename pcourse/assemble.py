"""From what each rank recorded to one Report: calls matched across ranks, waiting told from moving bytes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass

from pcourse.report import LATENESS_LIMIT, CommunicationRow, MemoryLedger, RankReport, Report, Span

PROVENANCE = {"wall": "measured", "paced": "paced", "virtual": "predicted"}


@dataclass
class StepRecord:
    """One step of one rank: its interval, its calls and computes (see `comm`), its loss and gradient norm.

    A paced rank ended `late` seconds after `end`, and had last been on time `since_on_time` seconds before that; both
    in seconds of the machine that it is paced to.
    """

    start: float
    end: float
    calls: list
    computes: list
    loss: float
    gradient_norm: float
    late: float = 0.0
    since_on_time: float = 0.0


@dataclass
class Recording:
    """All that a rank brings back from `train.record`."""

    device: str
    steps: list[StepRecord]
    memory: MemoryLedger
    clock_uncertainty: float = 0.0  # seconds by which this rank's clock may differ from rank 0's
    allocator_peak: int | None = None  # bytes, of the memory pass; only a GPU's allocator tells


def assemble(recordings, model, parallel, train, *, made_at="", clock="wall", machine=None) -> Report:
    """One Report. The spans, seconds and communication are those of the median step (of an even number, the lower).

    `machine` is whose time the paced or the virtual `clock` kept.
    """
    steps = list(zip(*(r.steps for r in recordings), strict=True))  # steps[i][rank]
    times = [max(s.end + s.late for s in step) - min(s.start for s in step) for step in steps]
    median = statistics.median_low(times)
    if median == 0:
        raise ValueError(f"nothing in this step takes time on {machine}: give comm.compute its flops, or keep a pace")
    typical = steps[times.index(median)]
    arrivals = _last_arrivals(typical, rendezvous=machine is None)
    start = min(s.start for s in typical)
    ranks = tuple(
        _rank_report(r, recording.memory, step, start, median, arrivals)
        for r, (recording, step) in enumerate(zip(recordings, typical, strict=True))
    )
    return Report(
        provenance=PROVENANCE[clock],
        device=_device(recordings[0].device, clock, machine),
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
        notes=(*_notes(recordings), *([_lateness_note(typical, machine)] if clock == "paced" else [])),
        lateness=_lateness(typical) if clock == "paced" else None,
    )


def _device(ranks: str, clock: str, machine) -> str:
    """What stands behind "measured on", "paced to" or "predicted from"."""
    if clock == "wall":
        return ranks
    if clock == "virtual":
        return f"a run on the virtual clock with {machine}"
    motion = f", {machine.slow_motion:.4g} times slower" if machine.slow_motion != 1 else ""
    return f"{machine}{motion}, on {ranks}"


def _due(step) -> float:
    """How long the step was to take."""
    return max(s.end for s in step) - min(s.start for s in step)


def _lateness(step) -> float:
    """By how much the step ended late. A rank that was late and had time to spare delayed nothing."""
    return (max(s.end + s.late for s in step) - max(s.end for s in step)) / _due(step)


def _lateness_note(step, machine) -> str:
    """How late the step was, and if that is too late, what would do.

    Since it was last on time, a rank has used `since_on_time` seconds where `since_on_time - late` were due. The same
    work fits into a motion that many times slower that what is due and the allowance for the whole step make up for it.
    """
    late, limit = _lateness(step), f"{100 * LATENESS_LIMIT:g} %"
    words = f"the step ended {100 * late:,.2f} % after its time"
    if late <= LATENESS_LIMIT:
        return f"the paced run is valid: {words}, and {limit} is allowed"
    allowance = LATENESS_LIMIT * _due(step)
    factor = max(s.since_on_time / max(s.since_on_time - s.late + allowance, 1e-9) for s in step)
    would_do = machine.slower(_round_up(1.25 * factor)).pace_text()
    return f"the paced run is NOT VALID: {words}, and {limit} is allowed; {would_do} would do"


def _round_up(x: float) -> float:
    """To two digits."""
    unit = 10 ** (math.floor(math.log10(x)) - 1)
    return math.ceil(x / unit) * unit


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


def _last_arrivals(step, rendezvous: bool) -> dict:
    """When the last member of each communication entered it: from then on bytes can move.

    Unless a send is a `rendezvous`, its bytes move without the receiver.
    """
    last: dict = defaultdict(float)
    for rank in step:
        for call in rank.calls:
            if rendezvous or call.operation != "recv":
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
    """The computes, with the calls and the other computes made inside them cut out.

    They stand in the order of their ends: what is inside one comes before it, even if both take the same time.
    """
    held = [interval for call in step.calls for interval in _held(call)]
    spans = []
    for n, c in enumerate(step.computes):
        inner = [(d.start, d.end) for d in step.computes[:n] if c.start <= d.start and d.end <= c.end]
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
