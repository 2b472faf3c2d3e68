"""One transformer layer under tensor parallelism, and where its ranks meet."""

from __future__ import annotations

from matplotlib.patches import Circle, FancyArrowPatch

from pcourse.lab.palette import INK, MUTED, ORANGE, WHOLE, rank_colour, tint
from pcourse.lab.picture import WIDTH, Picture, Sheet, box

# (words, kind): "whole" runs alike on every rank, "split" on each rank's shard; f and g are where ranks meet.
_LAYER = (
    ("Layer\nNorm", "whole"), ("f", "f"), ("Q K V\ncolumn", "split"), ("atten-\ntion", "split"),
    ("out\nrow", "split"), ("g", "g"), ("+", "sum"),
    ("Layer\nNorm", "whole"), ("f", "f"), ("up\ncolumn", "split"), ("GeLU", "split"), ("down\nrow", "split"),
    ("g", "g"), ("+", "sum"),
)  # fmt: skip
_WIDTHS = {"whole": 0.5, "split": 0.53, "f": 0.3, "g": 0.3, "sum": 0.2}


def layer_communication(tp: int) -> Picture:
    """One transformer layer under tensor parallelism, and its four all-reduces: two forward, two backward.

    f and g are the two places where ranks meet: f passes its input on and sums gradients, g sums results and passes
    gradients on.
    """
    if tp < 1:
        raise ValueError(f"tp={tp} must be 1 or more")
    sheet = Sheet(3.0)
    if tp == 1:
        sheet.head("One transformer layer on one rank: nothing is sent")
    else:
        counted = "Two forward, two backward; each carries the whole X[B, S, H]."
        sheet.head(f"One transformer layer over tp={tp}: four all-reduces", counted)
    axes = sheet.canvas()
    places = _layer_places()
    middle = 1.72
    axes.plot([0.12, WIDTH - 0.12], [middle] * 2, color=MUTED, lw=1, zorder=0)
    for (words, kind), (x, width) in zip(_LAYER, places, strict=True):
        _draw_part(sheet, axes, words, kind, x, middle, width, tp)
    for start, end in ((0, 6), (7, 13)):
        _draw_residual(axes, places[start][0] - 0.06, places[end][0] + places[end][1] / 2, middle)
    _draw_passes(sheet, axes, places, middle, tp)
    entries = [(f"rank {r}'s shard", (tint(rank_colour(r), 0.55), "")) for r in range(min(tp, 4))] if tp > 1 else []
    if tp > 4:
        entries[-1] = (f"… to rank {tp - 1}", entries[-1][1])
    sheet.legend(0.12, sheet.height - 0.2, [*entries, ("whole on every rank", (WHOLE, ""))])
    return Picture(sheet.figure, _layer_words(tp))


def _layer_words(tp: int) -> str:
    parts = ", ".join(words.replace("-\n", "").replace("\n", " ") for words, kind in _LAYER if kind not in "fg")
    if tp == 1:
        return f"One transformer layer on one rank: {parts}. Nothing is sent."
    return (
        f"One transformer layer over tp={tp}: {parts}. Forward, left to right, an all-reduce after the attention's "
        "row-split output and another after the MLP's row-split second matrix. Backward, right to left, an all-reduce "
        "of the gradient before the MLP's column-split first matrix and another before Q, K and V: four in all, each "
        "of the whole X[B, S, H]."
    )


def _layer_places() -> list[tuple[float, float]]:
    """(left, width) of each part, spread over the sheet's width."""
    widths = [_WIDTHS[kind] for _, kind in _LAYER]
    gap = (WIDTH - 0.5 - sum(widths)) / (len(widths) - 1)
    lefts = [0.3 + sum(widths[:k]) + k * gap for k in range(len(widths))]
    return list(zip(lefts, widths, strict=True))


def _draw_part(sheet, axes, words, kind, x, y, width, tp) -> None:
    centre = x + width / 2
    if kind in ("f", "g"):
        if tp > 1:
            axes.add_artist(Circle((centre, y), 0.15, facecolor="white", edgecolor=INK, lw=1))
            sheet.text(centre, y, words, 9.5, ha="center", fontstyle="italic")
        return
    if kind == "sum":
        axes.add_artist(Circle((centre, y), 0.1, facecolor="white", edgecolor=MUTED, lw=1))
        sheet.text(centre, y, words, 9, ha="center", colour=MUTED)
        return
    height = 0.56
    bands = tp if kind == "split" else 1
    for band in range(bands):
        colour = tint(rank_colour(band), 0.55) if bands > 1 else WHOLE
        axes.add_artist(box(x, y - height / 2 + band * height / bands, width, height / bands, (colour, "")))
    behind = {"boxstyle": "round,pad=0.2", "facecolor": (1, 1, 1, 0.82), "edgecolor": "none"}
    sheet.text(centre, y, words, 8, ha="center", linespacing=1.25, bbox=behind if bands > 1 else None)


def _draw_residual(axes, left, right, y) -> None:
    """The residual stream around the block, into its +."""
    path = {"connectionstyle": "bar,fraction=0", "color": MUTED}
    axes.plot([left, left, right], [y, y - 0.46, y - 0.46], color=MUTED, lw=0.8)
    arrow = FancyArrowPatch((right, y - 0.46), (right, y - 0.1), arrowstyle="-|>", mutation_scale=7, lw=0.8, **path)
    axes.add_artist(arrow)


def _draw_passes(sheet, axes, places, y, tp) -> None:
    """The forward arrow above, the backward arrow below, and their all-reduces numbered in the order they happen."""
    above, below = y - 0.78, y + 0.62
    for row, start, end, words, side in (
        (above, 0.95, WIDTH - 0.12, "forward", "left"),
        (below, WIDTH - 0.95, 0.12, "backward", "right"),
    ):
        arrow = FancyArrowPatch((start, row), (end, row), arrowstyle="-|>", mutation_scale=11, color=INK, lw=1.2)
        axes.add_artist(arrow)
        sheet.text(0.2 if side == "left" else WIDTH - 0.2, row, words, 9, bold=True, ha=side)
    if tp == 1:
        return
    meets = [places[k][0] + places[k][1] / 2 for k, (_, kind) in enumerate(_LAYER) if kind == "g"]
    splits = [places[k][0] + places[k][1] / 2 for k, (_, kind) in enumerate(_LAYER) if kind == "f"]
    order = [(x, above, y - 0.15) for x in meets] + [(x, below, y + 0.15) for x in reversed(splits)]
    for number, (x, row, edge) in enumerate(order, 1):
        axes.plot([x, x], [row, edge], color=ORANGE, lw=1.6)
        style = {"boxstyle": "round,pad=0.32", "facecolor": ORANGE, "edgecolor": "white"}
        sheet.text(x, row, f"{number}  all-reduce", 8, ha="center", bbox=style)
