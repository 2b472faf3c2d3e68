"""Y = X · W with W cut into shards: what each rank holds, needs and gets.

The notation is `X[B, H/tp]`: dimension H is cut over tp; `{partial over tp}` is a sum still to be reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcourse.lab.palette import INK, MUTED, WHOLE, ink_on, rank_colour
from pcourse.lab.picture import WIDTH, Picture, Sheet, box
from pcourse.split import shard_sizes

_GAP = 0.09  # inches between shards, where the cut runs


def split_matrix(rows: int, columns: int, parts: int, along: str = "columns", batch: int = 3) -> Picture:
    """Y = X · W with W (`rows` × `columns`) cut into `parts` shards, and what each cut needs and leaves.

    `along="columns"` cuts between columns: every rank needs all of X, the results lie side by side. `"rows"` cuts
    between rows: each rank needs its part of X, the results must be summed. `"pair"` is the one after the other, as
    in an MLP: nothing is sent in between. Degree 1 shows the uncut product.
    """
    plans = {"columns": _cut_columns, "rows": _cut_rows, "pair": _cut_pair}
    if along not in plans:
        raise ValueError(f"along={along!r} is not known; along can be {', '.join(plans)}")
    cut = columns if along in ("columns", "pair") else rows
    if not 1 <= parts <= cut:
        raise ValueError(f"parts={parts} shards cannot share {cut} {along}; parts can be 1 to {cut}")
    title, matrices, signs, alt = plans[along](rows, columns, parts, batch)
    if parts == 1 and along != "pair":
        title, alt = "Not cut: Y[B, 4H] = X[B, H] · W[H, 4H]", "One rank holds all of it."
        matrices = [_Matrix(m.name, m.height, m.width) for m in matrices]
    return Picture(_draw_product(title, matrices, signs), f"{title}. {alt}")


class _Matrix:
    """One matrix of the product: its size in cells, how it is cut, and the words above and below it."""

    def __init__(self, name, height, width, parts=1, cut="", below=""):
        self.name, self.height, self.width = name, height, width
        self.parts, self.cut, self.below = parts, cut, below

    def shards(self) -> list[int]:
        """Cells per shard along the cut."""
        return shard_sizes(self.width if self.cut == "columns" else self.height, self.parts)

    def extent(self, cell: float) -> tuple[float, float]:
        """Width and height in inches, with the gaps of the cuts or the offset of the partial sums."""
        width, height = self.width * cell, self.height * cell
        gaps = _GAP * (self.parts - 1)
        if self.cut == "partial":
            return width + 1.6 * gaps, height + 1.6 * gaps
        return width + gaps * (self.cut == "columns"), height + gaps * (self.cut == "rows")


def _over(symbol: str, parts: int) -> str:
    return f"{symbol}/tp" if parts > 1 else symbol


def _cut_columns(rows, columns, parts, batch):
    cut = "columns" if parts > 1 else ""
    matrices = [
        _Matrix("X[B, H]", batch, rows, below="every rank needs all of X"),
        _Matrix(f"W[H, {_over('4H', parts)}]", rows, columns, parts, cut, "cut between columns"),
        _Matrix(f"Y[B, {_over('4H', parts)}]", batch, columns, parts, cut, "side by side: complete columns"),
    ]
    alt = (
        f"W has {rows} rows and {columns} columns in {parts} column shards, one per rank. Every rank multiplies all of "
        "X by its shard and gets complete columns of Y; put side by side they are Y, nothing need be summed."
    )
    return f"Column split over tp={parts}: Y[B, 4H] = X[B, H] · W[H, 4H]", matrices, ["·", "="], alt


def _cut_rows(rows, columns, parts, batch):
    split = parts > 1
    partial = " {partial over tp}" if split else ""
    matrices = [
        _Matrix(
            f"X[B, {_over('H', parts)}]",
            batch,
            rows,
            parts,
            "columns" if split else "",
            "cut as W's rows are",
        ),
        _Matrix(f"W[{_over('H', parts)}, 4H]", rows, columns, parts, "rows" if split else "", "cut between rows"),
        _Matrix(
            f"Y[B, 4H]{partial}",
            batch,
            columns,
            parts,
            "partial" if split else "",
            "to be summed: all-reduce",
        ),
    ]
    alt = (
        f"W has {rows} rows and {columns} columns in {parts} row shards, one per rank. Each rank needs its columns of "
        "X and gets a Y of full shape that is only a part of the sum; an all-reduce adds them."
    )
    return f"Row split over tp={parts}: Y[B, 4H] = X[B, H] · W[H, 4H]", matrices, ["·", "="], alt


def _cut_pair(rows, columns, parts, batch):
    split = parts > 1
    partial = " {partial over tp}" if split else ""
    wide = _over("4H", parts)
    matrices = [
        _Matrix("X[B, H]", batch, rows, below="on every rank"),
        _Matrix(f"A[H, {wide}]", rows, columns, parts, "columns" if split else "", "column split"),
        _Matrix(f"GeLU(XA)[B, {wide}]", batch, columns, parts, "columns" if split else "", "nothing is sent"),
        _Matrix(f"C[{wide}, H]", columns, rows, parts, "rows" if split else "", "row split"),
        _Matrix(
            f"Z[B, H]{partial.replace(' ', chr(10), 1)}",
            batch,
            rows,
            parts,
            "partial" if split else "",
            "all-reduce",
        ),
    ]
    alt = (
        f"The first matrix is cut into {parts} column shards, the second into {parts} row shards. GeLU acts on whole "
        "columns, so each rank goes on with its own; only the last product is a partial sum, for one all-reduce."
    )
    title = f"The pair over tp={parts}: column split, GeLU, row split"
    return title, matrices, ["·", "→", "·", "="], alt


def _draw_product(title: str, matrices: Sequence[_Matrix], signs: Sequence[str]):
    sign_room = 0.42
    gaps = sum(m.extent(0)[0] for m in matrices) + sign_room * len(signs)
    across = sum(m.width for m in matrices)
    cell = min(0.3, (WIDTH - 0.5 - gaps) / across)
    total = cell * across + gaps
    tall = max(m.extent(cell)[1] for m in matrices)
    top = 0.92
    sheet = Sheet(top + tall + 0.66)
    sheet.head(title)
    axes = sheet.canvas()
    x = (WIDTH - total) / 2
    for matrix, sign in zip(matrices, [*signs, ""], strict=True):
        width, height = matrix.extent(cell)
        upper = top + (tall - height) / 2
        _draw_matrix(sheet, axes, matrix, x, upper, cell)
        _centred(sheet, x + width / 2, upper - 0.13, matrix.name, INK, fontstyle="italic", va="bottom")
        _centred(sheet, x + width / 2, top + tall + 0.19, matrix.below, MUTED)
        sheet.text(x + width + sign_room / 2, top + tall / 2, sign, 17, bold=True, ha="center")
        x += width + sign_room
    legend = [("whole on every rank", (WHOLE, ""))]
    sheet.legend(0.12, sheet.height - 0.18, legend)
    if any(m.parts > 1 for m in matrices):
        words = "colour and number: the rank that holds the shard"
        sheet.text(WIDTH - 0.12, sheet.height - 0.18, words, 8.5, MUTED, ha="right")
    return sheet.figure


def _centred(sheet: Sheet, x: float, y: float, words: str, colour, **more) -> None:
    """Words centred at x, or as near to it as the sheet's edges let them."""
    half = max(map(len, words.splitlines() or [""])) * 0.034 + 0.1
    sheet.text(min(max(x, half), WIDTH - half), y, words, 8.5, colour, ha="center", **more)


def _draw_matrix(sheet, axes, matrix: _Matrix, x: float, y: float, cell: float) -> None:
    if matrix.cut == "partial":
        step = 1.6 * _GAP
        for rank in reversed(range(matrix.parts)):  # rank 0 in front, lowest
            dx, dy = step * rank, step * (matrix.parts - 1 - rank)
            layer = 2 + (matrix.parts - rank) / matrix.parts
            _draw_shard(
                sheet,
                axes,
                rank,
                x + dx,
                y + dy,
                matrix.height,
                matrix.width,
                cell,
                layer,
                step if rank else 0,
            )
        return
    for rank, size in enumerate(matrix.shards()):
        height, width = matrix.height, matrix.width
        if matrix.cut == "columns":
            width = size
        elif matrix.cut == "rows":
            height = size
        _draw_shard(sheet, axes, rank if matrix.cut else None, x, y, height, width, cell)
        last = rank == matrix.parts - 1
        if matrix.cut == "columns":
            x += width * cell + _GAP
            if not last:
                _draw_cut(axes, [x - _GAP / 2] * 2, [y - 0.1, y + height * cell + 0.1])
        elif matrix.cut == "rows":
            y += height * cell + _GAP
            if not last:
                _draw_cut(axes, [x - 0.1, x + width * cell + 0.1], [y - _GAP / 2] * 2)


def _draw_cut(axes, xs, ys) -> None:
    axes.plot(xs, ys, color=INK, lw=1.1, ls=(0, (3, 2)))


def _draw_shard(sheet, axes, rank, x, y, height, width, cell, layer=2.0, strip=0.0) -> None:
    """A block of cells in its rank's colour; None is whole on every rank. Of a hidden one only `strip` is seen."""
    colour = WHOLE if rank is None else rank_colour(rank)
    axes.add_artist(
        box(x, y, width * cell, height * cell, (colour, ""), edgecolor="white", linewidth=1.2, zorder=layer)
    )
    if cell > 0.06 and not strip:
        for k in range(1, width):
            axes.plot([x + k * cell] * 2, [y, y + height * cell], color="white", lw=0.7, zorder=layer)
        for k in range(1, height):
            axes.plot([x, x + width * cell], [y + k * cell] * 2, color="white", lw=0.7, zorder=layer)
    if strip:
        middle = x + width * cell - strip / 2, y + height * cell / 2
        sheet.text(*middle, str(rank), 8, colour=ink_on(colour), ha="center")
    elif rank is not None and min(width, height) * cell > 0.17:
        words = f"rank {rank}" if width * cell > 0.56 else str(rank)
        style = {"boxstyle": "round,pad=0.18", "facecolor": colour, "edgecolor": "none"}
        middle = x + width * cell / 2, y + height * cell / 2
        sheet.text(*middle, words, 8, colour=ink_on(colour), ha="center", bbox=style)
