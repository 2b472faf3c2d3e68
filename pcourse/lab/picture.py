"""What every picture of the course shares: one palette, one type size, words for those who cannot see it.

A `Picture` is a matplotlib figure (object API only: panels draw in threads, and pyplot keeps global state) with
alternative text made from the same numbers. Colours are Okabe and Ito's, which colour-blind readers can tell apart;
hatches and labels carry the same meaning again. Sizes are in inches, 96 CSS pixels to the inch.
"""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from pcourse.config import ParallelConfig
from pcourse.report import Report

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"

INK, MUTED, LINE, PALE = "#1F2328", "#59636E", "#D1D9E0", "#F3F5F7"
WHOLE = "#DDE3E9"  # what every rank holds whole

# One colour and one hatch per kind of time, wherever time is drawn.
TIME = {
    "forward": (SKY, ""),
    "backward": (BLUE, ""),
    "backward-input": (BLUE, ""),
    "backward-weight": (GREEN, "..."),
    "recompute": (SKY, "\\\\\\"),
    "optimizer": (PURPLE, "xxx"),
    "compute": (BLUE, ""),
    "communication": (ORANGE, ""),
    "waiting": (YELLOW, "////"),
    "idle": (PALE, ""),
}
# One colour and one hatch per kind of memory. Activations are the forward's work, gradients the backward's.
MEMORY = {
    "parameters": (GREEN, ""),
    "gradients": (BLUE, "////"),
    "optimizer": (PURPLE, "xxx"),
    "activations": (SKY, ""),
    "temporary": (YELLOW, "..."),
}
RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, "#7A8490")

WIDTH = 7.6  # fits Lab's output area on a small laptop
DPI = 192  # twice the pixels that are shown: crisp on dense screens
COLOURS = 96  # enough for smooth type over a dozen flat colours, a quarter of the bytes

_drawing = threading.Lock()  # matplotlib's font and text caches are shared, and panels draw in threads of their own


def rank_colour(rank: int) -> str:
    """The colour of `rank`, the same in every picture."""
    return RANKS[rank % len(RANKS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "#FFFFFF"


def tint(colour: str, share: float = 0.3) -> tuple[float, float, float]:
    """`colour` thinned with white to `share` of its strength, so that ink stays readable on it."""
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))


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
    model, train = report.model, report.train
    split = [
        f"{field.name}={getattr(report.parallel, field.name)}"
        for field in fields(ParallelConfig)
        if getattr(report.parallel, field.name) != field.default
    ]
    sizes = f"{_count(model.layers, 'layer')}, hidden {number_text(model.hidden)}, {_count(model.heads, 'head')}"
    work = f"{_count(train.batch, 'sequence')} of {model.sequence}"
    return " · ".join([", ".join(split) or "not split", sizes, work])


def _count(n: int, thing: str) -> str:
    return f"{number_text(n)} {thing}{'' if n == 1 else 's'}"


def operation_text(operation: str) -> str:
    """An operation as the field writes it: all-reduce, not all_reduce."""
    return operation.replace("_", "-")


def sources_text(source: str | Report | Sequence[Report]) -> str:
    """Where numbers are from: words as they are, or those of one or several reports, each once."""
    if isinstance(source, str):
        return source
    reports = [source] if hasattr(source, "source") else source
    return " · ".join(dict.fromkeys(report.source for report in reports))


def byte_ticks(tallest: float) -> list[float]:
    """Whole powers of two of a unit, five steps at most."""
    if tallest <= 0:
        return [0]
    step = 2.0 ** math.ceil(math.log2(tallest / 4.5))
    return [step * k for k in range(int(tallest / step) + 1)]


class Picture:
    """A figure, its PNG, and its words. `markup`, if given, is shown instead of the image where HTML can be.

    `figure` is the matplotlib figure; `png` is drawn once, when first asked for.
    """

    def __init__(self, figure: Figure, alt: str, markup: str | None = None):
        self.figure, self.alt, self._markup = figure, alt, markup
        self._png: bytes | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown, in CSS pixels."""
        width, height = self.figure.get_size_inches()
        return round(width * 96), round(height * 96)

    @property
    def png(self) -> bytes:
        """The picture as PNG, at twice the pixels of `size`."""
        if self._png is None:
            with _drawing:
                self._png = _quantised(self.figure)
        return self._png

    @property
    def html(self) -> str:
        """Markup for a panel or a cell: a table, or an image that says in words what it shows."""
        if self._markup is not None:
            return self._markup
        width, height = self.size
        data = base64.b64encode(self.png).decode()
        style = "max-width:100%;height:auto;display:block;border-radius:6px;margin:4px 0"
        return (
            f'<img alt="{html.escape(self.alt)}" width="{width}" height="{height}" style="{style}" '
            f'src="data:image/png;base64,{data}">'
        )

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        width, height = self.size
        data = {
            "text/html": self.html,
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": self.alt,
        }
        return data, {"image/png": {"width": width, "height": height}}


def stacked(pictures: Sequence[Picture]) -> bytes:
    """The pictures one below the other in a single PNG, for viewers that show only one image."""
    images = [Image.open(io.BytesIO(picture.png)).convert("RGB") for picture in pictures]
    size = max(image.width for image in images), sum(image.height for image in images)
    sheet = Image.new("RGB", size, "white")
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return _png(sheet)


def _quantised(figure: Figure) -> bytes:
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()
    width, height = canvas.get_width_height()
    return _png(Image.frombuffer("RGBA", (width, height), canvas.buffer_rgba()).convert("RGB"))


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    small = image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(out, "png", optimize=True)
    return out.getvalue()


class Sheet:
    """A white sheet measured in inches from its top left corner, with the course's type on it."""

    def __init__(self, height: float, width: float = WIDTH, source: str = ""):
        """`source` says at the foot where the numbers are from; the sheet grows by the lines it needs."""
        lines = textwrap.wrap(source, int(width * 15.5))
        self.width, self.height = width, height + 0.16 * len(lines)
        self._canvas = None
        self.figure = Figure(figsize=(width, self.height), facecolor="white", dpi=DPI)
        for number, line in enumerate(reversed(lines)):
            self.text(0.12, self.height - 0.15 - 0.16 * number, line, size=8, colour=MUTED, style="italic")

    def axes(self, left: float, top: float, width: float, height: float):
        """Axes with no frame, placed in inches."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor="none")
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, labelsize=8.5, labelcolor=MUTED, pad=4)
        return axes

    def canvas(self):
        """Axes over the whole sheet in inches, y downwards, to draw on freely; the same ones every time."""
        if self._canvas is None:
            self._canvas = self.axes(0, 0, self.width, self.height)
            self._canvas.set(xlim=(0, self.width), ylim=(self.height, 0), xticks=[], yticks=[])
        return self._canvas

    def text(self, x: float, y: float, words: str, size: float = 9, colour=INK, bold=False, **more):
        """Type at (x, y) inches, its baseline middle at y."""
        more.setdefault("va", "center")
        return self.figure.text(
            x / self.width, 1 - y / self.height, words, fontsize=size, color=colour,
            fontweight="bold" if bold else "normal", fontfamily="DejaVu Sans", parse_math=False, **more,
        )  # fmt: skip

    def head(self, title: str, subtitle: str = "") -> None:
        """Title and subtitle, left aligned, at the top."""
        self.text(0.12, 0.22, title, size=11.5, bold=True)
        if subtitle:
            self.text(0.12, 0.45, subtitle, colour=MUTED)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, tuple[str, str]]]) -> None:
        """Swatches with their words in one row whose middle is at y."""
        handles = [swatch(look, label=words) for words, look in entries]
        legend = self.figure.legend(
            handles=handles, loc="center left", bbox_to_anchor=(x / self.width, 1 - y / self.height),
            ncols=max(1, len(handles)), frameon=False, fontsize=9, labelcolor=INK, handlelength=1.5,
            handleheight=1.0, columnspacing=1.4, handletextpad=0.5, borderpad=0, borderaxespad=0,
        )  # fmt: skip
        for words in legend.get_texts():
            words.set_fontfamily("DejaVu Sans")


def swatch(look: tuple[str, str], **more) -> Patch:
    """A patch in one kind's colour and hatch."""
    colour, hatch = look
    return Patch(facecolor=colour, hatch=hatch, edgecolor=edge_of(colour), linewidth=0.6, **more)


def box(x: float, y: float, width: float, height: float, look: tuple[str, str], **more) -> Rectangle:
    """A rectangle in one kind's colour and hatch."""
    colour, hatch = look
    more.setdefault("edgecolor", edge_of(colour))
    more.setdefault("linewidth", 0.0)
    return Rectangle((x, y), width, height, facecolor=colour, hatch=hatch, **more)


def edge_of(colour) -> tuple[float, float, float]:
    """A darker shade of `colour`: its outline, and its hatch."""
    return tuple(0.62 * part for part in to_rgb(colour))


@dataclass(frozen=True)
class Cell:
    """One cell of a table. `tone` is "plain", "muted", "good" or "bad"; words say the same as the tone."""

    words: str
    tone: str = "plain"
    bold: bool = False


_TONES = {"plain": INK, "muted": MUTED, "good": "#00694D", "bad": "#B04A00"}
_CSS_TONES = {  # the theme's own ink in Lab, light or dark; elsewhere the fallback
    "plain": "var(--jp-content-font-color1, #1F2328)",
    "muted": "var(--jp-content-font-color2, #59636E)",
    "good": "var(--jp-success-color1, #00694D)",
    "bad": "var(--jp-error-color1, #B04A00)",
}


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
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    sides = ["left" if i < left or i == len(head) - 1 else "right" for i in range(len(head))]
    return Picture(
        _table_figure(title, subtitle, head, cells, sides, source),
        _table_text(title, subtitle, head, cells, sides, source),
        _table_html(title, subtitle, head, cells, sides, source),
    )


def _table_text(title, subtitle, head, cells, sides, source) -> str:
    grid = [list(head)] + [[cell.words for cell in row] for row in cells]
    widths = [max(len(row[i]) for row in grid) for i in range(len(head))]
    lines = [
        "  ".join(w.ljust(n) if side == "left" else w.rjust(n) for w, n, side in zip(row, widths, sides, strict=True))
        for row in grid
    ]
    return "\n".join(line.rstrip() for line in [title, *([subtitle] if subtitle else []), *lines, source])


def _table_html(title, subtitle, head, cells, sides, source) -> str:
    def cell(tag, words, side, tone, bold, line):
        style = (
            f"text-align:{side};padding:5px 12px 5px 0;line-height:1.4;color:{_CSS_TONES[tone]};background:none;"
            f"border:none;border-bottom:1px solid var(--jp-border-color{line}, #D1D9E0);"
            f"font-weight:{600 if bold else 400};white-space:nowrap"
        )
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} style="{style}">{html.escape(words)}</{tag}>'

    head_row = "".join(cell("th", words, side, "muted", False, 1) for words, side in zip(head, sides, strict=True))
    body = "".join(
        "<tr style='background:none'>"
        + "".join(cell("td", c.words, side, c.tone, c.bold, 2) for c, side in zip(row, sides, strict=True))
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
