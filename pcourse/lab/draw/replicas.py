"""Replicas of one model: which sequences each takes, and what of the model states each holds."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch

from pcourse.config import listed
from pcourse.cost.states import DIVIDED_FROM, bytes_per_parameter, sum_on_a_replica
from pcourse.lab.palette import INK, LINE, MEMORY, MUTED, PALE, ink_on, rank_colour
from pcourse.lab.picture import WIDTH, Picture, Sheet, box
from pcourse.split import shard_range, shard_sizes
from pcourse.wording import count_text, number_text

_SHARED_OUT = ("nothing is shared out", "optimizer state", "optimizer state, gradients", "all of it")
_NAMES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "AdamW's state"}
_LEFT, _GAP = 0.78, 0.1  # inches: the ranks' names, between two states
_SEQUENCE = 0.19  # inches of one sequence


def replicas(
    ranks: int, stages: Sequence[int] = (0,), *, sequences: int = 0, dtype: str = "float32", title: str = ""
) -> Picture:
    """For each ZeRO stage in `stages` a group of bars, one for each of `ranks` replicas: what it holds of the model
    states, to scale, with AdamW. What others hold for it is pale.

    With `sequences` the batch stands before them, and the sum of the gradients between: for stage 0 alone.
    Raises ValueError for what cannot be drawn.
    """
    _require(ranks, stages, sequences)
    each = bytes_per_parameter(dtype)
    row, gap = (0.42, 0.3) if sequences else (0.2, 0.03)
    group = 0.3 + ranks * (row + gap)
    top = 0.86
    added = " + ".join(map(str, each))
    source = f"predicted: {added} = {sum(each)} bytes a parameter, in {dtype} with AdamW"
    sheet = Sheet(top + group * len(stages) - (gap - 0.12 if sequences else 0), source=source)
    title = title or f"{count_text(ranks, 'replica')}: what each holds of the model states"
    sheet.head(title)
    left = _LEFT + (_SEQUENCE * max(shard_sizes(sequences, ranks)) + 0.62 if sequences else 0)
    columns = _columns(left, 1.2 if sequences else 0.12, each)
    for (state, (x, width)), nbytes in zip(columns.items(), each, strict=True):
        sheet.text(x + width / 2, 0.6, f"{_NAMES[state]}: {nbytes}", ha="center")
    for number, stage in enumerate(stages):
        _draw_group(sheet, stage, ranks, sequences, columns, each, top + number * group, row, row + gap)
    words = "; ".join(_stage_words(stage, ranks, each) for stage in stages)
    taken = f" Of {sequences} sequences they take {listed(shard_sizes(sequences, ranks))}." if sequences else ""
    return Picture(sheet.figure, f"{title}.{taken} {words}. {source}.")


def _require(ranks: int, stages: Sequence[int], sequences: int) -> None:
    if not 1 <= ranks <= 8:
        raise ValueError(f"ranks={ranks} replicas cannot be drawn; ranks can be 1 to 8")
    if not stages or not set(stages) <= set(range(len(_SHARED_OUT))):
        raise ValueError(f"stages={list(stages)} must be ZeRO stages; they can be 0, 1, 2 and 3")
    if sequences and (list(stages) != [0] or sequences < ranks):
        raise ValueError(f"sequences={sequences} can be drawn for stages=(0,), {ranks} of them or more")


def _stage_words(stage: int, ranks: int, each) -> str:
    held = number_text(sum_on_a_replica(each, stage, ranks))
    return f"Stage {stage}, {_shared_out(stage)}: {held} bytes a parameter on each rank"


def _shared_out(stage: int) -> str:
    return f"shared out: {_SHARED_OUT[stage]}" if stage else _SHARED_OUT[0]


def _columns(left: float, right: float, each) -> dict[str, tuple[float, float]]:
    """{state: (left, width)} in inches, to scale, with `right` free behind them."""
    room = WIDTH - right - left - 2 * _GAP
    columns, x = {}, left
    for name, nbytes in zip(_NAMES, each, strict=True):
        columns[name] = x, room * nbytes / sum(each)
        x += columns[name][1] + _GAP
    return columns


def _draw_group(sheet: Sheet, stage, ranks, sequences, columns, each, top, row, pitch) -> None:
    held = number_text(sum_on_a_replica(each, stage, ranks))
    if sequences:
        sheet.text(_LEFT, top, "its sequences", 8.5, colour=MUTED)
        sheet.text(columns["parameters"][0], top, "the model states, whole on each", 8.5, colour=MUTED)
    else:
        sheet.text(0.12, top, f"stage {stage}", 9.5, bold=True)
        sheet.text(_LEFT, top, _shared_out(stage), 8.5, colour=MUTED)
        sheet.text(WIDTH - 0.12, top, f"{held} bytes a parameter", 9, bold=True, ha="right")
    for rank in range(ranks):
        y = top + 0.15 + rank * pitch
        _draw_rank(sheet, rank, y, row)
        if sequences:
            _draw_sequences(sheet, rank, shard_range(sequences, ranks, rank), y, row, columns["parameters"][0])
            words = f"{held} bytes\na parameter"
            sheet.text(WIDTH - 0.12, y + row / 2, words, 8.5, colour=MUTED, ha="right", linespacing=1.3)
        for (state, (x, width)), first in zip(columns.items(), DIVIDED_FROM, strict=True):
            shards = ranks if stage >= first else 1
            _draw_state(sheet, MEMORY[state], x, y, width, row, shards, rank if shards > 1 else 0)
        if sequences and rank:
            x, width = columns["gradients"]
            _draw_sum(sheet, x + width / 2, y - (pitch - row), y)


def _draw_rank(sheet: Sheet, rank: int, y: float, row: float) -> None:
    sheet.canvas().add_artist(box(0.12, y, 0.05, row, (rank_colour(rank), "")))
    sheet.text(0.24, y + row / 2, f"rank {rank}", 8.5)


def _draw_sequences(sheet: Sheet, rank: int, taken: range, y: float, row: float, right: float) -> None:
    axes, colour, size = sheet.canvas(), rank_colour(rank), _SEQUENCE
    for place, number in enumerate(taken):
        x = _LEFT + place * size
        axes.add_artist(box(x, y + row / 2 - 0.13, size - 0.03, 0.26, (colour, "")))
        sheet.text(x + size / 2 - 0.015, y + row / 2, str(number), 8, colour=ink_on(colour), ha="center")
    path = (_LEFT + len(taken) * size + 0.08, y + row / 2), (right - 0.08, y + row / 2)
    axes.add_artist(FancyArrowPatch(*path, arrowstyle="-|>", mutation_scale=9, lw=1, color=MUTED, shrinkA=0, shrinkB=0))


def _draw_state(sheet: Sheet, look, x: float, y: float, width: float, row: float, shards: int, own: int) -> None:
    """All of it, or the `own` one of its shards, the others' places pale."""
    axes = sheet.canvas()
    if shards > 1:
        axes.add_artist(box(x, y, width, row, (PALE, ""), edgecolor=LINE, linewidth=0.6))
    axes.add_artist(box(x + width * own / shards, y, width / shards, row, look))


def _draw_sum(sheet: Sheet, x: float, upper: float, lower: float) -> None:
    path = (x, upper + 0.02), (x, lower - 0.02)
    arrow = FancyArrowPatch(*path, arrowstyle="<|-|>", mutation_scale=9, lw=1.2, color=INK, shrinkA=0, shrinkB=0)
    sheet.canvas().add_artist(arrow)
    sheet.text(x + 0.09, (upper + lower) / 2, "summed", 8.5)
