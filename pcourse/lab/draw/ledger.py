"""The memory ledger: bytes per rank and category, measured, and by formula beside it; and their course over a step."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pcourse.lab.draw.communication import difference_text
from pcourse.lab.palette import BAD, GOOD, INK, LINE, MEMORY, MUTED, TIME, edge_of, ink_on, tint
from pcourse.lab.picture import WIDTH, Picture, Sheet, box, byte_ticks
from pcourse.report import CATEGORIES, MemoryLedger, Report
from pcourse.wording import bytes_text, configuration_text, sources_text

_ROUGH = ("temporary", "peak")  # a formula has them nearly, or not at all
_NAMES = {"peak": "peak of the sum"}
MOST_BARS = 8  # above, neighbours with equal ledgers share one
GUTTER = 1.42  # inches to the left of the bars: the scale, and the categories' names
NO_FORMULA = "no formula"
NEAR = 0.1  # share by which a formula may be off and still be drawn as near; equal is equal to the byte


def ledger(
    reports: Report | Sequence[tuple[str, Report]],
    expected: Report | Callable[..., MemoryLedger] | None = None,
    at_peak: bool = False,
    title="",
) -> Picture:
    """Bytes per rank and category as stacked bars, the same bytes in figures below each bar.

    `reports` is one Report, or (label, Report) pairs to stand side by side. Each category has its own peak, or, with
    `at_peak`, what it held when their sum was largest.

    With `expected` each bar has a paler one beside it, and differences are named in words: a prediction of the one
    Report, or a formula, `f(model, parallel, train, rank)` such as `cost.memory.memory`. In its column "=" is equal to
    the byte. A formula without a peak says nothing about temporary memory either.
    """
    groups = [("", reports)] if isinstance(reports, Report) else list(reports)
    if at_peak and callable(expected):
        raise ValueError("a formula has each category's own peak, not their split at_peak; at_peak can be False")
    pairs = _pairs(groups, expected)
    bars = [bar for pair in pairs for bar in pair.bars]
    what = "at the peak of the sum" if at_peak else "each category at its own peak"
    title = title or f"Memory of {'the' if len(pairs) == 1 else 'each'} rank: {what}"
    alone = len({(report.model, report.parallel) for _, report in groups}) == 1
    source = _source([report for _, report in groups], expected)
    differences = _differences(pairs, at_peak)
    subtitle = configuration_text(groups[0][1]) if alone else ""
    figure = _draw_ledger(pairs, bars, at_peak, title, subtitle, differences, source)
    words = "; ".join(f"{bar.words}: {_ledger_words(bar.memory, at_peak)}" for bar in bars)
    return Picture(figure, ". ".join([title, words, *differences, source]) + ".")


@dataclass(frozen=True)
class _Bar:
    """One column: `name` is the rank's or the ranks', `beside` says which of a pair it is."""

    name: str
    beside: str
    memory: MemoryLedger
    predicted: bool

    @property
    def words(self) -> str:
        return f"{self.beside}, {self.name}" if self.beside else self.name


@dataclass
class _Pair:
    """A rank, or several whose ledgers are equal: what was measured, and what was expected of it, if anything."""

    label: str
    ranks: list[int]
    memory: MemoryLedger
    predicted: bool
    expected: MemoryLedger | None
    kind: str  # what the other bar is: "predicted" or "formula"

    @property
    def name(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"rank {first}" if first == last else f"ranks {first}–{last}"
        return f"{self.label}, {ranks}" if self.label else ranks

    @property
    def bars(self) -> list[_Bar]:
        if self.expected is None:
            return [_Bar(self.name, "", self.memory, self.predicted)]
        return [
            _Bar(self.name, "measured", self.memory, self.predicted),
            _Bar(self.name, self.kind, self.expected, True),
        ]


def _differences(pairs: list[_Pair], at_peak: bool) -> list[str]:
    """In words, what was measured and not expected, category by category; what is said of several, once.

    Of several, what is near in temporary memory and in the peak can be read off the table.
    """
    who: dict[str, list[str]] = {}
    for pair in (pair for pair in pairs if pair.expected is not None):
        than = "the formula" if pair.kind == "formula" else "predicted"
        for category in (*CATEGORIES, "peak"):
            held, wanted = (_of(memory, category, at_peak) for memory in (pair.memory, pair.expected))
            rough = category in _ROUGH and len(pairs) > 1 and _near(held, wanted)
            if held != wanted and not rough and _says(pair.expected, category):
                what = f"{_NAMES.get(category, category)}: {difference_text(held, wanted, bytes_text, than)}"
                who.setdefault(what, []).append(pair.name)
    if len(pairs) == 1:
        return list(who)
    return [f"{'each rank' if len(names) == len(pairs) else '; '.join(names)}: {what}" for what, names in who.items()]


def _pairs(groups, expected) -> list[_Pair]:
    pairs = []
    for label, report in groups:
        for rank in report.ranks:
            if callable(expected):
                other = expected(report.model, report.parallel, report.train, rank.rank)
            else:
                other = expected.ranks[rank.rank].memory if expected is not None else None
            kind = "formula" if callable(expected) else "predicted"
            pairs.append(_Pair(label, [rank.rank], rank.memory, report.provenance == "predicted", other, kind))
    return _joined(pairs) if len(pairs) * (1 if expected is None else 2) > MOST_BARS else pairs


def _joined(pairs: list[_Pair]) -> list[_Pair]:
    """Neighbouring ranks with equal ledgers as one, where there are too many to read."""
    joined: list[_Pair] = []
    for pair in pairs:
        last = joined[-1] if joined else None
        if last and (last.label, last.memory, last.expected) == (pair.label, pair.memory, pair.expected):
            last.ranks.extend(pair.ranks)
        else:
            joined.append(pair)
    return joined


def _source(reports: Sequence[Report], expected) -> str:
    if callable(expected):
        return f"{sources_text(reports)} · predicted from the formulas of {expected.__module__}"
    return sources_text([*reports, *([expected] if expected is not None else [])])


def _says(memory: MemoryLedger, category: str) -> bool:
    """Whether a ledger has this category: one without a peak is a formula that leaves temporary memory out."""
    return memory.peak > 0 or category not in _ROUGH


def _near(measured: int, wanted: int) -> bool:
    return abs(wanted - measured) <= NEAR * measured


def _of(memory: MemoryLedger, category: str, at_peak: bool) -> int:
    return memory.peak if category == "peak" else _held(memory, at_peak)[category]


def _held(memory: MemoryLedger, at_peak: bool) -> dict[str, int]:
    return {c: memory.at_peak.get(c, 0) if at_peak else getattr(memory, c) for c in CATEGORIES}


def _ledger_words(memory: MemoryLedger, at_peak: bool) -> str:
    held = _held(memory, at_peak).items()
    words = [f"{c} {bytes_text(n) if n or _says(memory, c) else NO_FORMULA}" for c, n in held]
    return ", ".join(words) + (f"; peak of the sum {bytes_text(memory.peak)}" if _says(memory, "peak") else "")


def _draw_ledger(pairs, bars: list[_Bar], at_peak: bool, title: str, subtitle: str, differences, source: str):
    named = 0.5 if any(pair.expected is not None or pair.label for pair in pairs) else 0.32
    column = max(0.72, (WIDTH - GUTTER - 0.15) / len(bars))
    width = GUTTER + column * len(bars) + 0.15
    top, height = 0.72 if subtitle else 0.5, 2.35
    rows = top + height + named
    foot = rows + 0.24 * (len(CATEGORIES) + 1)
    sheet = Sheet(foot + 0.18 * len(differences) + 0.24, width, source)
    sheet.head(title, subtitle)
    axes = sheet.axes(GUTTER, top, column * len(bars), height)
    tallest = max([bar.memory.peak for bar in bars] + [sum(_held(bar.memory, at_peak).values()) for bar in bars])
    axes.set(xlim=(0, len(bars)), ylim=(0, (tallest or 1) * 1.06), xticks=[])
    axes.set_yticks(byte_ticks(tallest), [bytes_text(t) for t in byte_ticks(tallest)])
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for place, bar in enumerate(bars):
        pixels = height * 96 / ((tallest or 1) * 1.06)
        _draw_bar(axes, place, min(0.74, 1.1 / column), bar, at_peak, pixels)
    _write_names(sheet, pairs, column, top + height + 0.16)
    _write_ledger(sheet, pairs, at_peak, column, rows)
    for line, words in enumerate(differences):
        sheet.text(0.12, foot + 0.14 + 0.18 * line, words, 8.5, colour=MUTED)
    return sheet.figure


def _draw_bar(axes, place: int, width: float, bar: _Bar, at_peak: bool, pixels: float) -> None:
    left, bottom = place + 0.5 - width / 2, 0
    for category, held in _held(bar.memory, at_peak).items():
        if not held:
            continue
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


def _write_names(sheet, pairs: list[_Pair], column: float, top: float) -> None:
    """Under the bars: the rank, over both bars of a pair, and which of the two is which."""
    at = GUTTER
    for pair in pairs:
        bars = pair.bars
        middle = at + column * len(bars) / 2
        if len(bars) == 1 and pair.label:
            sheet.text(middle, top, pair.name.removeprefix(f"{pair.label}, "), ha="center")
            sheet.text(middle, top + 0.17, pair.label, 8.5, ha="center", colour=MUTED)
        else:
            sheet.text(middle, top, pair.name, ha="center")
        for number, bar in enumerate(bars):
            sheet.text(at + (number + 0.5) * column, top + 0.17, bar.beside, 8.5, ha="center", colour=MUTED)
        at += column * len(bars)


def _write_ledger(sheet, pairs: list[_Pair], at_peak: bool, column: float, top: float) -> None:
    """The table under the bars: the legend, and every number, however thin its segment."""
    axes, count = sheet.canvas(), sum(len(pair.bars) for pair in pairs)
    for line, category in enumerate([*reversed(CATEGORIES), "peak"]):
        y = top + (line + 0.5) * 0.24
        axes.plot([0.12, GUTTER + column * count], [y - 0.12] * 2, color=LINE, lw=0.6)
        if category == "peak":
            axes.plot([0.12, 0.28], [y] * 2, color=INK, lw=1.6, solid_capstyle="butt")
        else:
            axes.add_artist(box(0.12, y - 0.065, 0.16, 0.13, MEMORY[category], linewidth=0.6))
        sheet.text(0.36, y, _NAMES.get(category, category))
        cells = (cell for pair in pairs for cell in _cells(pair, category, at_peak))
        for place, (words, colour, bold) in enumerate(cells):
            sheet.text(GUTTER + (place + 0.5) * column, y, words, 8.5, ha="center", bold=bold, colour=colour)


def _cells(pair: _Pair, category: str, at_peak: bool) -> list[tuple[str, str, bool]]:
    """(words, colour, bold) of one line of the table; what was expected says whether it is so, to the byte."""

    measured = _of(pair.memory, category, at_peak)
    cells = [(bytes_text(measured), INK if measured else MUTED, category == "peak")]
    if pair.expected is None:
        return cells
    if not _says(pair.expected, category):
        return [*cells, (NO_FORMULA, MUTED, False)]
    wanted = _of(pair.expected, category, at_peak)
    sign, colour = ("=", GOOD) if wanted == measured else ("≈", INK) if _near(measured, wanted) else ("≠", BAD)
    return [*cells, (f"{sign} {bytes_text(wanted)}", colour, sign == "≠")]


# --- over a step ------------------------------------------------------------------------------------------------------


def course(samples: Sequence[tuple[float, Mapping[str, int]]], computes: Sequence, source: str, title="") -> Picture:
    """What a rank held after each operation of a step, by category, and which pass the operations belong to.

    `samples` are (moment, {category: bytes}), one for each operation, in order; `computes` are the passes, each with a
    `kind`, a `start` and an `end` on the same clock.
    """
    if not samples:
        raise ValueError("course needs at least one sample, (moment, {category: bytes})")
    moments = [moment for moment, _ in samples]
    sums = [sum(held.values()) for _, held in samples]
    top = max(range(len(sums)), key=sums.__getitem__)
    phases = [
        (c.kind, bisect.bisect_left(moments, c.start), bisect.bisect_right(moments, c.end))
        for c in sorted(computes, key=lambda c: c.start)
    ]
    at = next((kind for kind, first, end in phases if first <= top < end), "between two passes")
    title = title or "Memory over one step"
    figure = _draw_course(title, samples, sums, top, phases, source)
    passes = "; ".join(
        f"{kind}: from {bytes_text(sums[first])} to {bytes_text(sums[end - 1])}" for kind, first, end in phases
    )
    split = ", ".join(f"{c} {bytes_text(samples[top][1].get(c, 0))}" for c in CATEGORIES)
    return Picture(figure, f"{title}. {passes}. Most in {at}, {bytes_text(sums[top])}: {split}. {source}.")


def _draw_course(title: str, samples, sums: list[int], top: int, phases, source: str):
    sheet = Sheet(4.02, source=source)
    sheet.head(title, f"{len(samples):,} operations, in order; what is held after each")
    axes = sheet.axes(0.95, 0.72, WIDTH - 0.95 - 0.2, 2.4)
    axes.set(xlim=(0, len(samples)), ylim=(0, max(sums) * 1.16 or 1), xticks=[])
    axes.set_yticks(byte_ticks(max(sums)), [bytes_text(t) for t in byte_ticks(max(sums))])
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    steps, low = range(len(samples) + 1), [0] * len(samples)
    for category in CATEGORIES:
        colour, hatch = MEMORY[category]
        high = [under + held.get(category, 0) for under, (_, held) in zip(low, samples, strict=True)]
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": edge_of(colour), "linewidth": 0}
        axes.fill_between(steps, [*low, low[-1]], [*high, high[-1]], step="post", **look)
        low = high
    axes.plot([top + 0.5], [sums[top]], marker="v", ms=7, mfc=INK, mec="white", mew=0.8)
    axes.text(
        top + 0.5, sums[top] + max(sums) * 0.045, f"peak {bytes_text(sums[top])}", ha="center", va="bottom",
        fontsize=8.5, color=INK, fontweight="bold", fontfamily="DejaVu Sans", parse_math=False,
    )  # fmt: skip
    strip = sheet.axes(0.95, 3.17, WIDTH - 0.95 - 0.2, 0.22)
    strip.set(xlim=(0, len(samples)), ylim=(0, 1), xticks=[], yticks=[])
    for kind, first, end in phases:
        colour, _ = TIME.get(kind, (LINE, ""))
        strip.add_artist(box(first, 0, end - first, 1, (colour, "")))
        strip.text(
            (first + end) / 2, 0.46, kind, ha="center", va="center", fontsize=8.5, color=ink_on(colour),
            fontfamily="DejaVu Sans", parse_math=False,
        )  # fmt: skip
    sheet.legend(0.95, 3.66, [(category, MEMORY[category]) for category in CATEGORIES])
    return sheet.figure
