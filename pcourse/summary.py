"""A Report as plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pcourse.report import CATEGORIES, LATENESS_LIMIT, TIME_KINDS, Report
from pcourse.wording import aligned_text, bytes_text, configuration_text, number_text, seconds_text


def summary(report: Report) -> str:
    """What was run and where, how fast it was, what the loss did; then tables of messages, memory and time."""
    blocks = [_headline(report), _speed(report), _communication(report), _memory(report), _seconds(report)]
    return "\n\n".join(block for block in [*blocks, *report.notes] if block)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that line up: numbers to the right, the first column to the left."""
    return aligned_text([head, *rows], ["left"] + ["right"] * (len(head) - 1))


def _headline(report: Report) -> str:
    return f"{configuration_text(report)}\n{report.source}"


def _speed(report: Report) -> str:
    low, high = report.step_spread
    steps = len(report.step_times)
    spread = f"  (quartiles {seconds_text(low)} to {seconds_text(high)}, {steps} steps)" if steps > 1 else ""
    lines = [
        ("step", f"{seconds_text(report.step_seconds)}{spread}"),
        *_lateness(report),
        ("speed", f"{number_text(round(report.tokens_per_second))} tokens/s"),
        ("loss", _first_and_last(report.loss)),
        ("gradient norm", _first_and_last(report.gradient_norm)),
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in lines)


def _lateness(report: Report) -> list[tuple[str, str]]:
    if report.lateness is None:
        return []
    verdict = "valid" if report.valid else "NOT VALID"
    words = f"{verdict}: {100 * report.lateness:,.2f} % of the step, {100 * LATENESS_LIMIT:g} % is allowed"
    return [("lateness", words)]


def _first_and_last(values: Sequence[float]) -> str:
    return f"{values[0]:.4f} → {values[-1]:.4f}" if len(values) > 1 else f"{values[0]:.4f}"


def _communication(report: Report) -> str:
    """One line per axis and operation. Ranks may differ: then the least and the most of them."""
    kinds = sorted({(row.axis, row.operation) for rank in report.ranks for row in rank.communication})
    rows = []
    for axis, operation in kinds:
        each = [rank.row(axis, operation) for rank in report.ranks]
        rows.append(
            [
                f"{axis} {operation}",
                _range([row.calls for row in each], number_text),
                _range([row.payload for row in each], bytes_text),
                _range([row.wire for row in each], bytes_text),
                _range([row.seconds for row in each], seconds_text),
                _range([row.exposed for row in each], seconds_text),
            ]
        )
    if not rows:
        return "no communication: there is one rank"
    head = ["messages of a rank, per step", "calls", "payload", "on the wire", "time", "exposed"]
    return table(head, rows)


def _range(values: Sequence[float], words) -> str:
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{low} to {high}"


def _memory(report: Report) -> str:
    """The peak of each category, which come at different moments, and the peak of their sum."""
    rows = [
        [f"rank {rank.rank}", *(bytes_text(getattr(rank.memory, c)) for c in (*CATEGORIES, "peak"))]
        for rank in report.ranks
    ]
    return table(["memory, peak of each", *CATEGORIES, "all at once"], rows)


def _seconds(report: Report) -> str:
    rows = [[f"rank {rank.rank}", *(seconds_text(rank.seconds[kind]) for kind in TIME_KINDS)] for rank in report.ranks]
    return table(["time in the median step", *TIME_KINDS], rows)
