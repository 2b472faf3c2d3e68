"""A table: HTML that follows the theme, a PNG for viewers without HTML, aligned text for the rest."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from pcourse.lab.palette import (
    BAD,
    CSS_BAD,
    CSS_FAINT_LINE,
    CSS_GOOD,
    CSS_INK,
    CSS_LINE,
    CSS_MUTED,
    GOOD,
    INK,
    LINE,
    MUTED,
)
from pcourse.lab.picture import WIDTH, Picture, Sheet
from pcourse.wording import aligned_text


@dataclass(frozen=True)
class Cell:
    """One cell of a table. `tone` is "plain", "muted", "good" or "bad"; words say the same as the tone."""

    words: str
    tone: str = "plain"
    bold: bool = False


_TONES = {"plain": INK, "muted": MUTED, "good": GOOD, "bad": BAD}
_CSS_TONES = {"plain": CSS_INK, "muted": CSS_MUTED, "good": CSS_GOOD, "bad": CSS_BAD}


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    source: str,
    left: int = 1,
    subtitle="",
) -> Picture:
    """A table: HTML that follows the theme, a PNG for viewers without HTML, aligned text for the rest.

    The first `left` columns and the last are words and stand left; those between are numbers and stand right.
    """
    cells, sides = _laid_out(head, rows, left)
    return Picture(
        _table_figure(title, subtitle, head, cells, sides, source),
        _table_text(title, subtitle, head, cells, sides, source),
        _table_html(title, subtitle, head, cells, sides, source),
    )


def table_html(title: str, head, rows, source: str, left: int = 1, subtitle="") -> str:
    """The same as HTML alone, for what is shown in a panel and not saved."""
    return _table_html(title, subtitle, head, *_laid_out(head, rows, left), source)


def _laid_out(head, rows, left: int):
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    return cells, ["left" if i < left or i == len(head) - 1 else "right" for i in range(len(head))]


def _table_text(title, subtitle, head, cells, sides, source) -> str:
    grid = aligned_text([list(head), *([cell.words for cell in row] for row in cells)], sides)
    return "\n".join([title, *([subtitle] if subtitle else []), grid, source])


def _table_html(title, subtitle, head, cells, sides, source) -> str:
    def cell(tag, words, side, tone, bold, line):
        style = (
            f"text-align:{side};padding:5px 12px 5px 0;line-height:1.4;color:{_CSS_TONES[tone]};background:none;"
            f"border:none;border-bottom:1px solid {line};"
            f"font-weight:{600 if bold else 400};white-space:nowrap"
        )
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} style="{style}">{html.escape(words)}</{tag}>'

    head_row = "".join(
        cell("th", words, side, "muted", False, CSS_LINE) for words, side in zip(head, sides, strict=True)
    )
    body = "".join(
        "<tr style='background:none'>"
        + "".join(cell("td", c.words, side, c.tone, c.bold, CSS_FAINT_LINE) for c, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in cells
    )
    small = f"color:{_CSS_TONES['muted']};font-size:12px;line-height:1.5"
    under = f'<div style="{small};margin:2px 0 6px">{html.escape(subtitle)}</div>' if subtitle else ""
    return (
        '<div style="overflow-x:auto;margin:8px 0;font-family:var(--jp-content-font-family, sans-serif)">'
        f'<div style="color:{_CSS_TONES["plain"]};font-weight:600;font-size:15px">{html.escape(title)}</div>{under}'
        '<table style="border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:0">'
        f"<thead><tr>{head_row}</tr></thead><tbody>{body}</tbody></table>"
        f'<div style="{small};font-style:italic;margin-top:6px">{html.escape(source)}</div></div>'
    )


def _table_figure(title, subtitle, head, cells, sides, source) -> Figure:
    line, top = 0.27, 0.82 if subtitle else 0.62
    grid = [list(head)] + [[cell.words for cell in row] for row in cells]
    widths = [max(len(row[i]) for row in grid) * 0.072 + 0.2 for i in range(len(head))]
    sheet = Sheet(top + line * (len(cells) + 0.5) + 0.24, max(WIDTH, 0.24 + sum(widths)), source)
    sheet.head(title, subtitle)
    axes = sheet.canvas()

    def write(row: int, words, tones, bolds):
        x = 0.12
        for word, width, side, tone, bold in zip(words, widths, sides, tones, bolds, strict=True):
            at = x if side == "left" else x + width - 0.2
            sheet.text(at, top + row * line, word, colour=_TONES[tone], bold=bold, ha=side)
            x += width
        axes.plot([0.12, 0.12 + sum(widths)], [top + (row + 0.5) * line] * 2, color=LINE, lw=0.6)

    write(0, head, ["muted"] * len(head), [False] * len(head))
    for number, row in enumerate(cells, 1):
        write(number, [c.words for c in row], [c.tone for c in row], [c.bold for c in row])
    return sheet.figure
