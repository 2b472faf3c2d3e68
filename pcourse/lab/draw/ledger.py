"""The memory ledger: bytes per rank and category."""

from __future__ import annotations

from collections.abc import Sequence

from pcourse.lab.palette import INK, LINE, MEMORY, MUTED, ink_on, tint
from pcourse.lab.picture import WIDTH, Picture, Sheet, box, byte_ticks
from pcourse.report import CATEGORIES, MemoryLedger, Report
from pcourse.wording import bytes_text, configuration_text, sources_text


def ledger(
    reports: Report | Sequence[tuple[str, Report]],
    expected: Report | None = None,
    at_peak: bool = False,
    title="",
) -> Picture:
    """Bytes per rank and category as stacked bars, the same bytes in figures below each bar.

    `reports` is one Report, or (label, Report) pairs to stand side by side. Each category has its own peak, or, with
    `at_peak`, what it held when their sum was largest. `expected`, a prediction of the one Report, stands beside it.
    """
    groups = [("", reports)] if isinstance(reports, Report) else list(reports)
    if expected is not None:
        label = groups[0][0]
        groups = [(f"{label} measured".strip(), groups[0][1]), (f"{label} predicted".strip(), expected)]
    bars = _bars(groups, beside=expected is not None)
    what = "at the peak of the sum" if at_peak else "each category at its own peak"
    title = title or f"Memory of {'the' if len(bars) == 1 else 'each'} rank: {what}"
    alone = len({report.parallel for _, report in groups} | {report.model for _, report in groups}) == 2
    source = sources_text([report for _, report in groups])
    figure = _draw_ledger(bars, at_peak, title, configuration_text(groups[0][1]) if alone else "", source)
    words = "; ".join(f"{bar.words}: {_ledger_words(bar.memory, at_peak)}" for bar in bars)
    return Picture(figure, f"{title}. {words}. {source}.")


class _Bar:
    """One column of the ledger: a rank, or several ranks whose ledgers are equal."""

    def __init__(self, group: str, ranks: list[int], memory: MemoryLedger, predicted: bool):
        self.group, self.ranks, self.memory, self.predicted = group, ranks, memory, predicted

    @property
    def name(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first}–{last}"

    @property
    def words(self) -> str:
        return f"{self.group}, {self.name}" if self.group else self.name


def _bars(groups, beside: bool) -> list[_Bar]:
    bars = [
        _Bar(label, [rank.rank], rank.memory, report.provenance == "predicted")
        for label, report in groups
        for rank in report.ranks
    ]
    if len(bars) > 8:
        bars = _joined(bars)
    if beside:  # a rank's prediction next to its measurement, not after the last rank
        bars.sort(key=lambda bar: bar.ranks[0])
    return bars


def _joined(bars: list[_Bar]) -> list[_Bar]:
    """Neighbouring ranks with equal ledgers as one bar, where there are too many to read."""
    joined: list[_Bar] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if last and last.group == bar.group and last.memory == bar.memory:
            last.ranks.extend(bar.ranks)
        else:
            joined.append(bar)
    return joined


def _held(memory: MemoryLedger, at_peak: bool) -> dict[str, int]:
    return {c: memory.at_peak.get(c, 0) if at_peak else getattr(memory, c) for c in CATEGORIES}


def _ledger_words(memory: MemoryLedger, at_peak: bool) -> str:
    held = ", ".join(f"{c} {bytes_text(n)}" for c, n in _held(memory, at_peak).items())
    return f"{held}; peak of the sum {bytes_text(memory.peak)}"


def _draw_ledger(bars: list[_Bar], at_peak: bool, title: str, subtitle: str, source: str):
    gutter, grouped = 1.42, any(bar.group for bar in bars)
    column = max(0.72, (WIDTH - gutter - 0.15) / len(bars))
    width = gutter + column * len(bars) + 0.15
    top, height = 0.72 if subtitle else 0.5, 2.35
    rows = top + height + (0.5 if grouped else 0.32)
    sheet = Sheet(rows + 0.24 * (len(CATEGORIES) + 1) + 0.24, width, source)
    sheet.head(title, subtitle)
    axes = sheet.axes(gutter, top, column * len(bars), height)
    tallest = max([bar.memory.peak for bar in bars] + [sum(_held(bar.memory, at_peak).values()) for bar in bars])
    axes.set(xlim=(0, len(bars)), ylim=(0, (tallest or 1) * 1.06), xticks=[])
    axes.set_yticks(byte_ticks(tallest), [bytes_text(t) for t in byte_ticks(tallest)])
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for place, bar in enumerate(bars):
        pixels = height * 96 / ((tallest or 1) * 1.06)
        _draw_bar(axes, place, min(0.74, 1.1 / column), bar, at_peak, pixels)
    _write_ledger(sheet, bars, at_peak, gutter, column, rows, top + height + 0.16)
    return sheet.figure


def _draw_bar(axes, place: int, width: float, bar: _Bar, at_peak: bool, pixels: float) -> None:
    left, bottom = place + 0.5 - width / 2, 0
    for category, held in _held(bar.memory, at_peak).items():
        colour, hatch = MEMORY[category]
        edge = {"linewidth": 1.2, "edgecolor": colour} if bar.predicted else {}
        face = tint(colour, 0.22) if bar.predicted else colour
        axes.add_artist(box(left, bottom, width, held, (face, hatch), **edge))
        if held * pixels >= 17:
            # The figures stand on the bar's own colour, so that a hatch does not cross them.
            behind = {"facecolor": face, "edgecolor": "none", "pad": 1.5}
            axes.text(
                place + 0.5, bottom + held / 2, bytes_text(held), ha="center", va="center", fontsize=8, bbox=behind,
                color=INK if bar.predicted else ink_on(colour), fontfamily="DejaVu Sans", parse_math=False,
            )  # fmt: skip
        bottom += held
    if bar.memory.peak:
        axes.plot(
            [left - 0.05, left + width + 0.05],
            [bar.memory.peak] * 2,
            color=INK,
            lw=1.6,
            solid_capstyle="butt",
        )


def _write_ledger(sheet, bars, at_peak, gutter, column, top, names) -> None:
    """The table under the bars: the legend, and every number, however thin its segment."""
    axes = sheet.canvas()
    right = gutter + column * len(bars)
    for line, category in enumerate([*reversed(CATEGORIES), "peak"]):
        y = top + (line + 0.5) * 0.24
        axes.plot([0.12, right], [y - 0.12] * 2, color=LINE, lw=0.6)
        if category == "peak":
            axes.plot([0.12, 0.28], [y] * 2, color=INK, lw=1.6, solid_capstyle="butt")
        else:
            axes.add_artist(box(0.12, y - 0.065, 0.16, 0.13, MEMORY[category], linewidth=0.6))
        sheet.text(0.36, y, "peak of the sum" if category == "peak" else category)
        for place, bar in enumerate(bars):
            held = bar.memory.peak if category == "peak" else _held(bar.memory, at_peak)[category]
            words = bytes_text(held)
            x = gutter + (place + 0.5) * column
            sheet.text(x, y, words, 8.5, ha="center", bold=category == "peak", colour=INK if held else MUTED)
    for place, bar in enumerate(bars):
        x = gutter + (place + 0.5) * column
        sheet.text(x, names, bar.name, ha="center")
        if bar.group:
            sheet.text(x, names + 0.17, bar.group, 8.5, ha="center", colour=MUTED)
