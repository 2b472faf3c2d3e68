"""What every picture of the course shares: one size of type, one way to be shown, words for those who cannot see it.

A `Picture` is a matplotlib figure (object API only: panels draw in threads, and pyplot keeps global state) with
alternative text made from the same numbers. Sizes are in inches, 96 CSS pixels to the inch.
"""

from __future__ import annotations

import base64
import html
import math
import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from pcourse.lab import raster
from pcourse.lab.palette import INK, MUTED, edge_of

WIDTH = 7.6  # fits Lab's output area on a small laptop
DPI = 192  # twice the pixels that are shown: crisp on dense screens


class Picture:
    """A figure, its PNG, and its words. `markup`, if given, is shown instead of the image where HTML can be.

    `figure` is the matplotlib figure; it is drawn once, when it is first shown.
    """

    def __init__(self, figure: Figure, alt: str, markup: str | None = None):
        self.figure, self.alt, self._markup = figure, alt, markup
        self._drawn: bytes | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown, in CSS pixels."""
        width, height = self.figure.get_size_inches()
        return round(width * 96), round(height * 96)

    @property
    def drawn(self) -> bytes:
        """The picture as PNG, at twice the pixels of `size`: quick to make, and large."""
        if self._drawn is None:
            self._drawn = raster.draw(self.figure, DPI)
        return self._drawn

    @property
    def png(self) -> bytes:
        """The same in few colours, to be saved."""
        return raster.small(self.drawn)

    @property
    def html(self) -> str:
        """Markup for a panel: a table, or an image that says in words what it shows."""
        return self._markup if self._markup is not None else self._image(self.drawn)

    def _image(self, png: bytes) -> str:
        width, height = self.size
        style = "max-width:100%;height:auto;display:block;border-radius:6px;margin:4px 0"
        return (
            f'<img alt="{html.escape(self.alt)}" width="{width}" height="{height}" style="{style}" '
            f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        )

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        """What a cell shows and its notebook saves."""
        png, (width, height) = self.png, self.size
        data = {
            "text/html": self._markup if self._markup is not None else self._image(png),
            "image/png": base64.b64encode(png).decode(),
            "text/plain": self.alt,
        }
        return data, {"image/png": {"width": width, "height": height}}


def stacked(pictures: Sequence[Picture]) -> bytes:
    """The pictures one below the other in a single PNG, for viewers that show only one image."""
    return raster.stacked([picture.drawn for picture in pictures])


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
            self._canvas.set(xlim=(0, self.width), ylim=(self.height, 0))
            self._canvas.set_axis_off()
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


def byte_ticks(tallest: float) -> list[float]:
    """Whole powers of two of a unit, five steps at most."""
    if tallest <= 0:
        return [0]
    step = 2.0 ** math.ceil(math.log2(tallest / 4.5))
    return [step * k for k in range(int(tallest / step) + 1)]
