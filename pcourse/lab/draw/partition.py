"""The model cut into stages: what each stage holds, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from pcourse.config import ModelConfig, listed
from pcourse.lab.draw.partition_bar import TEXTS, Bar, bars_of, require
from pcourse.lab.palette import BAD, INK, LINE, MUTED, PURPLE, SKY, YELLOW, ink_on
from pcourse.lab.picture import WIDTH, Picture, Sheet, box, byte_ticks
from pcourse.parallel.partition import Part
from pcourse.report import Report
from pcourse.wording import number_text, sources_text

# The model's pieces are no kinds of time or memory; the layers, which are most of it, are plain.
PIECES = {"embedding": (YELLOW, "\\\\\\"), "layers": (SKY, ""), "head": (PURPLE, "...")}
_TITLES = {
    "memory": "Memory of each stage",
    "compute": "Compute of each stage for a micro-batch, forward and backward",
    "parameters": "Parameters of each stage",
}
_MARKS = {"memory": "measured peak", "compute": "measured share of the seconds", "parameters": "measured"}
_LEFT, _RIGHT, _ROW, _TOP = 0.78, 1.95, 0.27, 0.86  # inches


def partition(
    model: ModelConfig,
    cuts: Mapping[str, Sequence[Part]],
    *,
    weight: str = "memory",
    limit: float | None = None,
    in_flight: Sequence[float] | None = None,
    measured: Mapping[str, Report | Sequence[float]] | None = None,
    source: str = "",
    sequences: int = 1,
    optimizer: str = "adamw",
    title: str = "",
) -> Picture:
    """For each rule in `cuts` a group of bars, one for each of its stages, made of embedding, layers and head.

    `weight` is "memory" (bytes: model states, and the activations of `in_flight[i]` micro-batches on stage i, one if
    left out), "compute" (FLOPs of a micro-batch, forward and backward) or "parameters" (a count). `limit`, in the same
    unit, is a line; bars beyond it say by how much. `measured` gives for a rule its Report, or a number for each stage
    with `source` saying where from: bytes at the peak, parameters, or seconds a micro-batch, which are drawn as shares
    of the whole. `sequences` are those of a micro-batch. Raises ValueError for what does not go together.
    """
    measured = measured or {}
    require(cuts, weight, in_flight, measured, source)
    groups = {
        rule: bars_of(model, parts, weight, in_flight, sequences, optimizer, measured.get(rule))
        for rule, parts in cuts.items()
    }
    text = TEXTS[weight]
    title = title or _TITLES[weight]
    source = _source(model, weight, in_flight, sequences, optimizer, measured, source)
    heights = [0.36 + _ROW * len(bars) for bars in groups.values()]
    sheet = Sheet(_TOP + sum(heights) + 0.2, source=source)
    sheet.head(title)
    _draw_legend(sheet, measured, limit, weight)
    widest = max([limit or 0, *(max(bar.total, bar.mark or 0) for bars in groups.values() for bar in bars)]) or 1.0
    top, indent = _TOP, max(_LEFT, 0.24 + 0.098 * max(map(len, groups)))
    for (rule, bars), height in zip(groups.items(), heights, strict=True):
        last = rule == list(groups)[-1]
        _draw_group(sheet, rule, bars, top, indent, widest * 1.02, limit, text, weight, last)
        top += height
    words = " ".join(_group_words(rule, bars, limit, text) for rule, bars in groups.items())
    at_most = f" The limit is {text(limit)}." if limit is not None else ""
    return Picture(sheet.figure, f"{title}.{at_most} {words} {source}.")


def _source(model, weight, in_flight, sequences, optimizer, measured, source) -> str:
    micro_batch = f"micro-batches of {sequences} sequence{'s' * (sequences > 1)} of {model.sequence}"
    held = "one" if in_flight is None else listed(number_text(n) for n in in_flight)
    words = {
        "memory": f"{model.dtype} and {optimizer}, in flight {held} {micro_batch}, temporary memory left out",
        "compute": micro_batch,
        "parameters": "a tied matrix on each stage that uses it",
    }[weight]
    reports = [given for given in measured.values() if isinstance(given, Report)]
    origins = ([source] if source else []) + ([sources_text(reports)] if reports else [])
    return " · ".join([f"predicted from the formulas of the model's pieces: {words}", *origins])


def _draw_legend(sheet: Sheet, measured, limit, weight) -> None:
    sheet.legend(0.12, 0.52, list(PIECES.items()))
    axes, x = sheet.canvas(), 3.1
    if measured:
        axes.plot([x], [0.52], marker="D", ms=5.5, color=INK, mec="white", mew=0.8)
        sheet.text(x + 0.12, 0.52, _MARKS[weight])
        x += 0.4 + 0.075 * len(_MARKS[weight])
    if limit is not None:
        axes.plot([x, x], [0.45, 0.59], color=BAD, lw=1.6)
        sheet.text(x + 0.1, 0.52, f"limit {TEXTS[weight](limit)}", colour=BAD)


def _draw_group(sheet, rule, bars, top, indent, widest, limit, text, weight, last) -> None:
    fullest = max(bars, key=lambda bar: bar.total)
    mean = sum(bar.total for bar in bars) / len(bars) or 1
    words = f"most on stage {fullest.stage}: {text(fullest.total)}, {fullest.total / mean:.2f} × the mean"
    sheet.text(0.12, top, rule, 9.5, bold=True)
    sheet.text(indent, top, words, 8.5, colour=MUTED)
    rows, width = top + 0.14, WIDTH - _LEFT - _RIGHT
    axes = sheet.axes(_LEFT, rows, width, _ROW * len(bars))
    axes.set(xlim=(0, widest), ylim=(len(bars), 0), yticks=[])
    axes.xaxis.set_major_locator(FixedLocator(byte_ticks(widest)) if weight == "memory" else MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: text(x) if last else ""))
    axes.grid(axis="x", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for number, bar in enumerate(bars):
        y = rows + (number + 0.5) * _ROW
        sheet.text(0.12, y, f"stage {bar.stage}", 8.5)
        _draw_bar(axes, number, bar, widest / (width * 96))
        sheet.text(WIDTH - _RIGHT + 0.1, y, text(bar.total), 8.5)
        if limit is not None and bar.total > limit:
            words = f"over by {text(bar.total - limit)}"
            sheet.text(WIDTH - 0.1, y, words, 8, colour=BAD, bold=True, ha="right")
    if limit is not None:
        axes.axvline(limit, color=BAD, lw=1.6, zorder=2.5)  # over the pieces, under their names


def _draw_bar(axes, number: int, bar: Bar, pixel: float) -> None:
    """Its pieces from left to right in the order of the model, a hair of light between layers."""
    at = 0.0
    for name, value in bar.weights.items():
        if not value:
            continue
        axes.add_artist(box(at, number + 0.12, value, 0.76, PIECES[name], gid=f"{bar.stage} {name}"))
        if name == "layers":
            _name_layers(axes, number, bar, at, pixel)
        else:
            _name(axes, [name], at, value, number, PIECES[name], pixel)
        at += value
    if bar.mark is not None:
        axes.plot([bar.mark], [number + 0.5], marker="D", ms=5.5, color=INK, mec="white", mew=0.8, clip_on=False)


def _name_layers(axes, number: int, bar: Bar, left: float, pixel: float) -> None:
    """Each layer by itself where there is room, else all together."""
    layers, widths = bar.part.layers, bar.each_layer
    lefts = [left + sum(widths[:k]) for k in range(len(layers))]
    if min(widths) > 4 * pixel:
        axes.vlines(lefts[1:], number + 0.12, number + 0.88, color="white", lw=0.7)
    if all(_fits(str(i), width, pixel) for i, width in zip(layers, widths, strict=True)):
        whole = all(_fits(f"layer {i}", width, pixel) for i, width in zip(layers, widths, strict=True))
        for i, at, width in zip(layers, lefts, widths, strict=True):
            _name(axes, [f"layer {i}" if whole else str(i)], at, width, number, PIECES["layers"], pixel, covers=False)
    else:
        together = f"{layers[0]}–{layers[-1]}"
        _name(axes, [f"layers {together}", together], left, sum(widths), number, PIECES["layers"], pixel)


def _name(axes, names: Sequence[str], left: float, width: float, number: int, look, pixel: float, covers=True) -> None:
    """The first of `names` that fits on its piece; if it `covers`, no hatch and no light between layers crosses it."""
    face, _ = look
    for words in names:
        if _fits(words, width, pixel):
            behind = {"facecolor": face, "edgecolor": "none", "pad": 1} if covers else None
            axes.text(
                left + width / 2, number + 0.5, words, ha="center", va="center", fontsize=7.5, color=ink_on(face),
                fontfamily="DejaVu Sans", parse_math=False, bbox=behind,
            )  # fmt: skip
            return


def _fits(words: str, width: float, pixel: float) -> bool:
    return len(words) * 6.2 + 6 <= width / pixel


def _group_words(rule: str, bars: Sequence[Bar], limit: float | None, text) -> str:
    stages = []
    for bar in bars:
        words = f"stage {bar.stage} ({bar.part}) {text(bar.total)}"
        if bar.measured:
            words += f", measured {bar.measured}"
        if limit is not None and bar.total > limit:
            words += f", over by {text(bar.total - limit)}"
        stages.append(words)
    return f"{rule}: {'; '.join(stages)}."
