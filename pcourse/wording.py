"""Numbers, configurations and tables as people read them: for a terminal, a picture and its alternative text alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from pcourse.config import ParallelConfig
from pcourse.report import Report, moment_text


def bytes_text(n: float) -> str:
    """`n` bytes for people: "0 B", "1.50 MiB"; three digits, binary units."""
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"


def seconds_text(seconds: float) -> str:
    """`seconds` for people: "0 s", "12.3 µs", "41.2 ms", "1.23 s", "2 min 3 s"."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if abs(seconds) * scale >= 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def number_text(value: float) -> str:
    """A number for people: whole ones with thousands apart, others with three or four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


def configuration_text(report: Report) -> str:
    """What was run, in one line: every way in which it was split, then the sizes."""
    model, parallel, train = report.model, report.parallel, report.train
    split = [
        f"{field.name}={getattr(parallel, field.name)}"
        for field in fields(ParallelConfig)
        if getattr(parallel, field.name) != field.default or (field.name == "schedule" and parallel.pp > 1)
    ]
    sizes = (
        f"{count_text(model.layers, 'layer')}, hidden {number_text(model.hidden)}, {count_text(model.heads, 'head')}"
    )
    work = f"{count_text(train.batch, 'sequence')} of {model.sequence}"
    return " · ".join([", ".join(split) or "not split", sizes, work])


def count_text(n: int, thing: str) -> str:
    """ "1 stage", "8 micro-batches"."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number_text(n)} {thing}{'' if n == 1 else plural}"


def operation_text(operation: str) -> str:
    """An operation as the field writes it: all-reduce, not all_reduce."""
    return operation.replace("_", "-")


def sources_text(source: str | Report | Sequence[Report]) -> str:
    """Where numbers are from: words as they are, or those of one or several reports, each once."""
    if isinstance(source, str):
        return source
    reports = [source] if hasattr(source, "source") else source
    if len({report.source for report in reports}) == 1:
        return reports[0].source
    origins = " · ".join(dict.fromkeys(report.origin for report in reports))
    first, *_, last = sorted(moment_text(report.made_at) for report in reports)
    return f"{origins}, {first}" + (f" to {last[-5:]}" if last > first else "")


def aligned_text(rows: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Columns that line up; `sides` says for each where its words stand, "left" or "right"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(w.ljust(n) if side == "left" else w.rjust(n) for w, n, side in zip(row, widths, sides, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
