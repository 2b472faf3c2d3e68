"""What a panel has measured so far, a line for each setting: the comparison that the learner makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pcourse.lab.table import Cell, table_html
from pcourse.report import Report, moment_text
from pcourse.wording import bytes_text, seconds_text

MOST = 8  # lines, the newest


def history(measured: Sequence[tuple[Mapping, Report]], now: Report) -> str:
    """HTML for (the controls' values, report) pairs, the one on show in bold; "" where there is nothing to compare."""
    if len(measured) < 2:
        return ""
    names = list(measured[0][0])
    head = [*names, "step", "half of the steps within", "peak of a rank", "sent by a rank", "measured at"]
    rows = [_line(values, report, report is now) for values, report in measured[-MOST:]]
    return table_html("Measured here so far", head, rows, "", left=0)


def _line(values: Mapping, report: Report, now: bool) -> list[Cell]:
    low, high = report.step_spread
    words = [
        *map(str, values.values()),
        seconds_text(report.step_seconds),
        f"{seconds_text(low)} to {seconds_text(high)}",
        bytes_text(max(rank.memory.peak for rank in report.ranks)),
        bytes_text(max(sum(row.wire for row in rank.communication) for rank in report.ranks)),
        moment_text(report.made_at)[-5:],
    ]
    return [Cell(w, bold=now) for w in words]
