"""The communication table: what a rank sent in a step, beside theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pcourse.lab.picture import Picture
from pcourse.lab.table import Cell, table
from pcourse.report import RankReport, Report
from pcourse.wording import bytes_text, configuration_text, number_text, operation_text

_PARTS = (("calls", number_text), ("payload", bytes_text), ("wire", bytes_text))
MOST_TIMES = 64  # above, a factor says less than the difference


def communication(report: Report, theory: Mapping | Sequence[Mapping] | None = None) -> Picture:
    """What a rank sent in one step: calls, payload and wire bytes per axis and operation, and theory beside them.

    `theory` is {(axis, operation): {"calls": …, "payload": …, "wire": …}} for every rank, or one such for each; what it
    leaves out is not compared. A row that theory has and the run has not is shown with zeros. Ranks with equal rows,
    measured and by theory, share them.
    """
    each = theory if isinstance(theory, Sequence) else [theory or {}] * len(report.ranks)
    expected = [{_key(axis, operation): row for (axis, operation), row in one.items()} for one in each]
    rows = [
        _row(ranks, row, expected[ranks[0].rank].get(_key(row.axis, row.operation)), theory is not None)
        for ranks in _alike(report.ranks, expected)
        for row in _operations(ranks[0], expected[ranks[0].rank])
    ]
    if not rows:
        rows = [[Cell(_rank_list(report.ranks), "muted"), "", "nothing is sent", "0", "0 B", "0 B", ""]]
    last = "against theory" if theory is not None else ""
    head = ["", "axis", "operation", "calls", "payload", "wire, sent", last]
    subtitle = configuration_text(report)
    return table("Communication in one step", head, rows, report.source, left=3, subtitle=subtitle)


def _key(axis: str, operation: str) -> tuple[str, str]:
    """Operations are written all-reduce, and called all_reduce."""
    return axis, operation.replace("-", "_")


def _row(ranks: Sequence[RankReport], row, expected: Mapping | None, compare: bool) -> list:
    verdict = _verdict(row, expected) if compare else ""
    tone = {"=": "good", "≠": "bad"}.get(verdict[:1], "muted")
    parts = [_compared(getattr(row, part), (expected or {}).get(part), text) for part, text in _PARTS]
    return [Cell(_rank_list(ranks), "muted"), row.axis, operation_text(row.operation), *parts, Cell(verdict, tone)]


def _alike(ranks: Sequence[RankReport], expected: Sequence[Mapping]) -> list[list[RankReport]]:
    """The ranks, in groups that made the same calls with the same bytes, and of which theory expects the same."""
    groups: list[tuple[tuple, list[RankReport]]] = []
    for rank in ranks:
        measured = [(r.axis, r.operation, r.calls, r.payload, r.wire) for r in rank.communication]
        key = measured, expected[rank.rank]
        alike = next((members for other, members in groups if other == key), None)
        if alike is None:
            groups.append((key, [rank]))
        else:
            alike.append(rank)
    return [members for _, members in groups]


def _rank_list(ranks: Sequence[RankReport]) -> str:
    numbers = [rank.rank for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"each of ranks {numbers[0]}–{numbers[-1]}"
    return "each of ranks " + ", ".join(map(str, numbers))


def _operations(rank: RankReport, theory: Mapping):
    """The rank's rows, scalars last, and a row of zeros for what theory alone has."""
    measured = [(row.axis, row.operation) for row in rank.communication]
    missing = [key for key in theory if key not in measured]
    return [rank.row(*key) for key in sorted(measured + missing, key=lambda key: key[0] == "scalar")]


def _compared(measured: float, expected: float | None, text: Callable) -> Cell:
    if expected is None or expected == measured:
        return Cell(text(measured))
    return Cell(f"{text(measured)} ≠ {text(expected)}", "bad", bold=True)


def _verdict(row, expected: Mapping | None) -> str:
    """Equal, or the first difference in words."""
    if expected is None:
        return "no theory given"
    for part, text in _PARTS:
        measured, wanted = getattr(row, part), expected.get(part)
        if wanted is not None and measured != wanted:
            return f"≠ {part}: {difference_text(measured, wanted, text)}"
    given = [part for part, _ in _PARTS if part in expected]
    return "= theory" if len(given) == len(_PARTS) else f"= theory ({', '.join(given)})"


def difference_text(value: float, wanted: float, text: Callable = number_text, than: str = "theory") -> str:
    """How `value` differs from `wanted`, which is called `than`: "3 more than theory", "twice theory"."""
    if value == wanted:
        return f"equal to {than}"
    if not wanted:
        return f"{text(value)} where {than} has none"
    if not value:
        return f"none where {than} has {text(wanted)}"
    ratio = value / wanted
    if 2 <= ratio <= MOST_TIMES and math.isclose(ratio, round(ratio)):
        return f"{_times(round(ratio))} {than}"
    if 2 <= 1 / ratio <= MOST_TIMES and math.isclose(1 / ratio, round(1 / ratio)):
        return f"{than} is {_times(round(1 / ratio))} this"
    apart = f"{text(abs(value - wanted))} {'more' if value > wanted else 'less'} than {than}"
    return f"{apart} ({100 * (ratio - 1):+.2g} %)"


def _times(factor: int) -> str:
    return "twice" if factor == 2 else f"{factor} times"
