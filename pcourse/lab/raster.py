"""A figure as pixels, and pixels as PNG: quick enough that a panel follows its controls.

Two thirds of a picture's time went into type and into small files. So what was once written is kept as pixels, and
only what a notebook saves is made small.
"""

from __future__ import annotations

import io
import struct
import threading
import zlib
from functools import lru_cache

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from PIL import Image

COLOURS = 96  # enough for smooth type over a dozen flat colours, a quarter of the bytes
MARGIN = 20  # pixels around words, for what leans out of their box

_drawing = threading.Lock()  # matplotlib's font and text caches are shared, and panels draw in threads of their own


def draw(figure: Figure, dpi: int) -> bytes:
    """`figure` as a PNG, its colours exact."""
    with _drawing:
        figure.set_dpi(dpi)
        width, height = (int(size) for size in figure.bbox.size)
        renderer = _Renderer(width, height, dpi)
        figure.draw(renderer)
        return _lossless(Image.frombuffer("RGBA", (width, height), renderer.buffer_rgba()).convert("RGB"))


def small(png: bytes) -> bytes:
    """The picture in few colours, a third of the bytes: to be saved."""
    return _in_few_colours(Image.open(io.BytesIO(png)))


def stacked(pngs: list[bytes]) -> bytes:
    """The pictures one below the other, in few colours."""
    images = [Image.open(io.BytesIO(png)) for png in pngs]
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return _in_few_colours(sheet)


def _in_few_colours(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, "png")
    return out.getvalue()


def _lossless(image: Image.Image) -> bytes:
    """A PNG whose rows hold what differs from the row above: most of a drawing is flat. Pillow tries every filter."""
    width, height = image.size
    rows = np.asarray(image).reshape(height, 3 * width)
    filtered = np.empty((height, 1 + 3 * width), np.uint8)
    filtered[:, 0] = 2  # each row begins with its filter, 2 is "up"
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(filtered, 1)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class _Renderer(RendererAgg):
    """Writes each piece of text once, and from then on copies it, to the nearest pixel."""

    def get_text_width_height_descent(self, s, prop, ismath):
        return _measured(s, prop, ismath, self.dpi)

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        if angle or ismath:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        pixels, below = _written(s, prop, self.dpi, gc.get_rgb())
        self.draw_image(gc, round(x) - MARGIN, self.height - round(y) - below, pixels)


@lru_cache(4096)
def _measured(words: str, font: FontProperties, ismath, dpi: float) -> tuple[float, float, float]:
    return RendererAgg(1, 1, dpi).get_text_width_height_descent(words, font, ismath)


@lru_cache(1024)
def _written(words: str, font: FontProperties, dpi: float, colour) -> tuple[np.ndarray, int]:
    """`words` as pixels, MARGIN to the left of them, and how many rows lie below their base line."""
    width, height, descent = _measured(words, font, False, dpi)
    below = int(descent) + MARGIN
    renderer = RendererAgg(int(width) + 2 * MARGIN, int(height) + 2 * MARGIN, dpi)
    gc = renderer.new_gc()
    gc.set_foreground(colour)
    renderer.draw_text(gc, MARGIN, renderer.height - below, words, font, 0)
    return np.ascontiguousarray(np.asarray(renderer.buffer_rgba())[::-1]), below
