"""The trade-off curve: what a granularity costs and brings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import quantiles

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from pcourse.lab.palette import BLUE, GREEN, INK, LINE, MUTED, ORANGE, PURPLE, VERMILLION, edge_of
from pcourse.lab.picture import WIDTH, Picture, Sheet, byte_ticks
from pcourse.report import Report
from pcourse.wording import bytes_text, number_text, seconds_text, sources_text

_CURVES = ((BLUE, "o"), (VERMILLION, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"), (INK, "P"))
_UNITS: dict[str, Callable] = {"": number_text, "bytes": bytes_text, "seconds": seconds_text}


def tradeoff(
    xs: Sequence[float],
    series: Mapping[str, Sequence],
    *,
    x: str,
    y: str,
    source: str | Report | Sequence[Report],
    unit: str = "",
    x_unit: str = "",
    log: bool = False,
    formula: tuple[str, Callable[[float], float]] | None = None,
    marks: Sequence[tuple[float, float, str]] = (),
    title: str = "",
) -> Picture:
    """Curves over a granularity: the median at each of `xs`, whiskers from the lower to the upper quartile.

    `series` maps a name to one entry for each x: a number, or several repetitions of it (`report.step_times`), or
    None where there is none. `unit` is "bytes", "seconds" or "", that of y (`x_unit`: of x); `log` scales y by its
    logarithm, for what spans decades. `formula` is a name and a function of x, drawn as a
    dashed curve; `marks` are (x, y, words) points to point at. `source` says where the numbers are from.
    """
    if not xs:
        raise ValueError("tradeoff needs at least one x; pass the settings that were measured, as xs=[1, 2, 4]")
    text = _UNITS.get(unit, lambda value: f"{number_text(value)} {unit}")
    points = {name: _summaries(name, xs, values) for name, values in series.items()}
    title = title or f"{y[:1].upper()}{y[1:]} against {x}"
    sheet = Sheet(3.74, source=sources_text(source))
    sheet.head(title)
    axes = sheet.axes(0.95, 0.7, WIDTH - 0.95 - 1.75, 2.5)
    _scale(axes, xs, x, y, text, unit, _tick_bytes if x_unit == "bytes" else number_text)
    ends = []
    if formula:
        ends.append(_draw_formula(axes, xs, *formula))
    for (name, summary), (colour, marker) in zip(points.items(), cycle(_CURVES), strict=False):
        ends.append(_draw_curve(axes, name, summary, colour, marker))
    for at, height, words in marks:
        _draw_mark(axes, at, height, words)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0, top=(axes.get_ylim()[1] or 1) * 1.04)
    _name_ends(sheet, axes, [end for end in ends if end], left=WIDTH - 1.66)
    words = "; ".join(f"{n}: " + ", ".join(f"{text(m)} at {a:g}" for a, _, m, _ in s) for n, s in points.items())
    extra = "".join(f"; {words}: {text(height)} at {at:g}" for at, height, words in marks)
    dashed = f"; dashed: {formula[0]}" if formula else ""
    return Picture(sheet.figure, f"{title}: {y} against {x}. {words}{dashed}{extra}. {sources_text(source)}.")


def _summaries(name: str, xs, values) -> list[tuple[float, float, float, float]]:
    """(x, lower quartile, median, upper quartile) for every x that has a value."""
    if len(values) != len(xs):
        raise ValueError(f"series {name!r} has {len(values)} values for {len(xs)} settings; give one for each of xs")
    found = []
    for at, value in zip(xs, values, strict=True):
        if value is None:
            continue
        runs = [float(value)] if isinstance(value, (int, float)) else [float(v) for v in value]
        low, middle, high = quantiles(runs, method="inclusive") if len(runs) > 1 else runs * 3
        found.append((at, low, middle, high))
    return found


def _scale(axes, xs, x, y, text, unit, x_text) -> None:
    """Ticks at the settings that exist, as far apart as their ratio where they double."""
    steps = sorted(set(xs))
    if len(steps) > 2 and steps[0] > 0 and steps[-1] / steps[0] >= 4:
        axes.set_xscale("log", base=2)
        axes.set_xlim(steps[0] / 2**0.2, steps[-1] * 2**0.06)
    else:
        room = 0.08 * (steps[-1] - steps[0]) or 0.5
        axes.set_xlim(steps[0] - room, steps[-1] + room / 3)
    axes.set_xticks(steps, [x_text(step) for step in steps])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(_ByteLocator() if unit == "bytes" else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlabel(x, fontsize=9, color=INK, labelpad=4)
    axes.text(-0.12, 1.04, y, transform=axes.transAxes, fontsize=9, color=INK, ha="left", va="bottom")
    axes.grid(axis="y", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set(visible=True, color=MUTED, linewidth=0.8)


def _tick_bytes(n: float) -> str:
    """A size at an axis, where there is little room: 16 KiB, and not 16.0 KiB."""
    number, unit = bytes_text(n).split()
    return f"{float(number):g} {unit}"


class _ByteLocator(MaxNLocator):
    """Ticks at round binary sizes, not at round decimal ones."""

    def tick_values(self, low, high):
        return byte_ticks(high)


def _draw_formula(axes, xs, name, function):
    low, high = min(xs), max(xs)
    grid = [low * (high / low) ** (k / 100) if low > 0 else low + (high - low) * k / 100 for k in range(101)]
    heights = [function(at) for at in grid]
    axes.plot(grid, heights, color=MUTED, lw=1.3, ls=(0, (5, 3)))
    return heights[-1], name, MUTED


def _draw_curve(axes, name, summary, colour, marker):
    if not summary:
        return None
    at, low, middle, high = zip(*summary, strict=True)
    axes.vlines(at, low, high, color=colour, lw=1.4)
    for edge in (low, high):
        shown = [(a, e) for a, e, lo, hi in zip(at, edge, low, high, strict=True) if hi > lo]
        axes.plot([a for a, _ in shown], [e for _, e in shown], color=colour, marker="_", ms=7, mew=1.4, ls="")
    axes.plot(at, middle, color=colour, marker=marker, ms=6.5, lw=1.8, mec="white", mew=1)
    return middle[-1], name, colour


def _draw_mark(axes, at, height, words) -> None:
    axes.plot([at], [height], marker="o", ms=13, mfc="none", mec=INK, mew=1.2)
    axes.annotate(
        words, (at, height), xytext=(0, 14), textcoords="offset points", ha="center", va="bottom", fontsize=8.5,
        color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, parse_math=False,
    )  # fmt: skip


def _name_ends(sheet: Sheet, axes, ends, left: float) -> None:
    """Each curve's name at its right end, moved apart where they would overlap: no legend to look up."""
    height_of = (axes.transData + axes.transAxes.inverted()).transform  # data to the share of the axes' height
    right, box_ = axes.get_xlim()[1], axes.get_position()
    top, height = (1 - box_.y1) * sheet.height, box_.height * sheet.height
    free = -math.inf
    for value, name, colour in sorted(ends, key=lambda end: -end[0]):
        y = max(top + height * (1 - height_of((right, value))[1]), free)
        free = y + 0.2
        ink = edge_of(colour) if colour != MUTED else MUTED
        sheet.text(left, y, name, colour=ink, bold=colour != MUTED)
