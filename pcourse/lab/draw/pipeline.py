"""Pipeline schedules in time: which stage works on which micro-batch, and how much of the step is bubble."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pcourse.cost.simulate import Simulation
from pcourse.cost.stage_times import chunk_of
from pcourse.lab.draw.pipeline_block import SECONDS, Block, blocks_of, spoken
from pcourse.lab.palette import LINE, MUTED, PALE, TIME, edge_of, ink_on, tint
from pcourse.lab.picture import WIDTH, Picture, Sheet, box
from pcourse.parallel.schedules import BACKWARD_WEIGHT, FORWARD
from pcourse.report import Report, Span
from pcourse.wording import number_text

_LEFT, _RIGHT = 0.78, 0.62  # inches beside the rows: the stages' names, what they hold
_HEAD = 0.44  # inches above a block's rows, for its numbers
_SWATCH = 0.16
_MESSAGES = ("communication", "waiting")
_OTHER = ("#B8C0C8", "--")
_DIGIT = 0.64 * 96 / 72  # a digit's width in pixels, for each point of its size


def pipeline(
    *runs: Report | Simulation, title: str | None = None, names: Sequence[str] | None = None, unit: str | None = None
) -> Picture:
    """One or several runs of a pipeline on one time axis: for each a block with a row per stage.

    A run is a Report (of each stage, its first rank) or a Simulation. Computes carry the number of their micro-batch
    where there is room; messages and waiting stand thin below them; what is left pale is idle. The bubble of the wall
    clock is 1 - mean compute/step, that of the ideal is step/(the busiest stage's compute) - 1; an optimizer counts as
    compute. `names` are the blocks' titles. A Simulation of plain numbers is in `unit`, which can be "seconds".
    """
    blocks = blocks_of(runs, names, unit)
    alone = len(blocks) == 1
    title = title or (blocks[0].name if alone else "Pipelines on one time axis")
    named = not (alone and title == blocks[0].name)
    pitch = 0.3 if max(len(block.rows) for block in blocks) <= 4 else 0.25
    heights = [
        0.2 * named + _HEAD + pitch * len(block.rows) + 0.14 + 0.16 * len(_source_lines(block)) for block in blocks
    ]
    legend = _legend(blocks)
    top = 0.66 + 0.2 * max((line for _, line, *_ in legend), default=0)
    sheet = Sheet(top + sum(heights) + 0.34, source=_note(blocks))
    sheet.head(title)
    _draw_legend(sheet, legend, 0.52)
    end = max(max([block.step, *(s.end for row in block.rows for s in row)]) for block in blocks) or 1.0
    two_tracks = any(span.kind in _MESSAGES for block in blocks for row in block.rows for span in row)
    for block, height in zip(blocks, heights, strict=True):
        _draw_block(sheet, block, top + 0.2 * named, pitch, end, two_tracks, named, last=block is blocks[-1])
        top += height
    return Picture(sheet.figure, " ".join([f"{title}."] * named + [*map(spoken, blocks)]))


def _note(blocks: Sequence[Block]) -> str:
    words = "on a compute: its micro-batch · pale: idle"
    if any(block.peaks is not None for block in blocks):
        shares = ", chunks by their share" if max(block.chunks for block in blocks) > 1 else ""
        words += f" · in flight: most micro-batches held at once{shares}"
    return words


def _source_lines(block: Block) -> list[str]:
    return textwrap.wrap(block.source, int(WIDTH * 15.5))


def _look(kind: str, chunk: int) -> tuple:
    """A kind's colour and hatch. Later chunks: forward and weight gradients lighter, the other backwards darker, so
    that no forward comes near a backward."""
    colour, hatch = TIME.get(kind, _OTHER)
    if kind.startswith("backward") and kind != BACKWARD_WEIGHT:
        return tuple(0.62**chunk * part for part in tint(colour, 1)), hatch
    return tint(colour, 0.2 + 0.8 * 0.5**chunk), hatch


def _has_chunks(kind: str) -> bool:
    return kind == FORWARD or kind.startswith("backward") or kind == "recompute"


def _legend(blocks: Sequence[Block]) -> list[tuple[float, int, str, str, int]]:
    """(x in inches, line, words, kind, swatches) of each kind that is drawn: a swatch for each of its chunks."""
    found = {span.kind for block in blocks for row in block.rows for span in row}
    chunks = max(block.chunks for block in blocks)
    entries, x, line = [], 0.12, 0
    for kind in [kind for kind in TIME if kind in found] + sorted(found - set(TIME)):
        swatches = chunks if _has_chunks(kind) else 1
        words = kind + (f", chunks 0–{chunks - 1}" if swatches > 1 and not entries else "")
        width = _SWATCH * max(swatches, 1.25) + 0.07 + 0.067 * len(words)
        if x + width > WIDTH - 0.12:
            x, line = 0.12, line + 1
        entries.append((x, line, words, kind, swatches))
        x += width + 0.15
    return entries


def _draw_legend(sheet: Sheet, entries, y: float) -> None:
    axes = sheet.canvas()
    for x, line, words, kind, swatches in entries:
        middle, width = y + 0.2 * line, _SWATCH * max(swatches, 1.25) / swatches
        for chunk in range(swatches):
            at = x + chunk * width
            axes.add_artist(box(at, middle - 0.065, width, 0.13, _look(kind, chunk), linewidth=0.6))
        sheet.text(x + width * swatches + 0.07, middle, words, 8.5)


def _draw_block(sheet, block: Block, top, pitch, end, two_tracks, named, last) -> None:
    rows = top + _HEAD
    if named:
        sheet.text(0.12, top + 0.02, block.name, 9.5, bold=True)
    sheet.text(0.12, top + 0.2, block.words, 8.5, colour=MUTED)
    count = len(block.rows)
    axes = sheet.axes(_LEFT, rows, WIDTH - _LEFT - _RIGHT, pitch * count)
    _scale(axes, block, end, count, last)
    pixel = end / ((WIDTH - _LEFT - _RIGHT) * 96)
    _draw_spans(axes, block, pixel, two_tracks)
    for stage in range(count):
        y = rows + (stage + 0.5) * pitch
        sheet.text(0.12, y, f"stage {stage}", 8.5)
        if block.peaks is not None:
            sheet.text(WIDTH - 0.12, y, number_text(round(block.peaks[stage], 2)), 8.5, ha="right")
    if block.peaks is not None:
        sheet.text(WIDTH - 0.12, rows - 0.08, "in flight", 8, ha="right", colour=MUTED)
    below = rows + pitch * count + (0.46 if last else 0.12)
    for line, words in enumerate(_source_lines(block)):
        sheet.text(0.12, below + 0.16 * line, words, 8, colour=MUTED, style="italic")


def _scale(axes, block: Block, end: float, count: int, last: bool) -> None:
    """The axis, the same for all blocks; its numbers stand under the last."""
    scale, words = 1, block.unit
    if block.unit == SECONDS:
        scale, words = (1, "seconds") if end >= 1 else (1e3, "milliseconds") if end >= 1e-3 else (1e6, "microseconds")
    axes.set(xlim=(0, end), ylim=(count, 0), yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x * scale:g}" if last else ""))
    axes.grid(axis="x", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    if last:
        axes.set_xlabel(f"{words} from the start of the step", fontsize=8, color=MUTED, labelpad=2)


def _draw_spans(axes, block: Block, pixel: float, two_tracks: bool) -> None:
    """All spans of one kind and chunk are one path, as a hatch is slow to begin; `gid` says which."""
    alike = defaultdict(list)
    for stage, row in enumerate(block.rows):
        axes.add_artist(box(0, stage + 0.06, block.step, 0.88, (PALE, "")))
        for span in row:
            alike[span.kind, chunk_of(span) if _has_chunks(span.kind) else 0].append((stage, span))
    sizes = _type_sizes(block, pixel)
    for (kind, chunk), spans in alike.items():
        look = _look(kind, chunk)
        top, bottom = (0.76, 0.94) if kind in _MESSAGES else (0.06, 0.72 if two_tracks else 0.94)
        corners = []
        for stage, span in spans:
            end = span.end - min(pixel, 0.2 * span.seconds)  # a hair of light before the next
            high, low = stage + top, stage + bottom
            corners.append([(span.start, high), (end, high), (end, low), (span.start, low)])
            if kind in sizes and _fits(span, sizes[kind], pixel):
                _number(axes, span, (span.start + end) / 2, (high + low) / 2, look, sizes[kind])
        path = Path.make_compound_path_from_polys(np.array(corners))
        style = {"facecolor": look[0], "hatch": look[1], "edgecolor": edge_of(look[0]), "linewidth": 0}
        axes.add_artist(PathPatch(path, gid=f"{kind} {chunk}", snap=True, **style))


def _number(axes, span: Span, x: float, y: float, look: tuple, size: float) -> None:
    """The span's micro-batch; a hatch does not cross it."""
    face, hatch = look
    behind = {"facecolor": face, "edgecolor": "none", "pad": 0.6} if hatch else None
    axes.text(
        x, y, str(span.micro_batch), ha="center", va="center_baseline", color=ink_on(face), fontsize=size,
        fontfamily="DejaVu Sans", parse_math=False, bbox=behind,
    )  # fmt: skip


def _type_sizes(block: Block, pixel: float) -> dict[str, float]:
    """For each kind of compute the largest type in which the longest number fits three spans in four."""
    by_kind = defaultdict(list)
    for span in (span for row in block.rows for span in row):
        if span.micro_batch is not None and span.kind not in _MESSAGES:
            by_kind[span.kind].append(span)
    sizes = {}
    for kind, spans in by_kind.items():
        lower = sorted(span.seconds for span in spans)[len(spans) // 4]
        digits = max(len(str(span.micro_batch)) for span in spans)
        fitting = [size for size in (8, 7, 6) if digits * size * _DIGIT + 3 <= lower / pixel]
        if fitting:
            sizes[kind] = fitting[0]
    return sizes


def _fits(span: Span, size: float, pixel: float) -> bool:
    return span.micro_batch is not None and len(str(span.micro_batch)) * size * _DIGIT + 3 <= span.seconds / pixel
