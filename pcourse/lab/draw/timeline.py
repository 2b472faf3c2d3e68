"""The timeline of one step: what each rank did, and how its time divides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.ticker import FuncFormatter, MaxNLocator

from pcourse.lab.palette import LINE, MUTED, PALE, TIME, ink_on, rank_colour
from pcourse.lab.picture import WIDTH, Picture, Sheet, box
from pcourse.report import TIME_KINDS, RankReport, Report
from pcourse.wording import configuration_text, operation_text, seconds_text

_OTHER = ("#B8C0C8", "--")  # a kind of span without a colour of its own
_LETTERS = {"forward": "F", "backward": "B", "backward-input": "B", "backward-weight": "W", "recompute": "R"}
_SPLIT_ROW = 0.29  # inches per rank where its time is divided
_MESSAGES = ("communication", "waiting")  # on a track of their own, so that overlap with compute is seen


def timeline(report: Report) -> Picture:
    """The median step: one row per rank with its spans, and below, how each rank's time divides.

    Compute stands on the upper track of a row, messages and waiting for them on the lower, so that overlap is seen.
    """
    count = len(report.ranks)
    row = 0.46 if count <= 4 else 0.36 if count <= 8 else 0.28
    top, height = 1.02, row * count
    below = top + height + 0.88
    sheet = Sheet(below + _SPLIT_ROW * count + 0.26, source=report.source)
    step = f"{seconds_text(report.step_seconds)} {report.provenance}"
    sheet.head(f"One training step on {_ranks_text(count)}: {step}", configuration_text(report))
    spans = [span for rank in report.ranks for span in rank.spans]
    kinds = [k for k in TIME if any(span.kind == k for span in spans)]
    kinds += sorted({span.kind for span in spans} - set(TIME))
    sheet.legend(0.12, 0.75, [(_legend_words(k), TIME.get(k, _OTHER)) for k in kinds])
    end = max([report.step_seconds, *(span.end for span in spans)]) or 1.0
    axes = sheet.axes(0.86, top, WIDTH - 0.86 - 0.2, height)
    _draw_rows(axes, report, end, pixels=(WIDTH - 1.06) * 96)
    for number, rank in enumerate(report.ranks):
        _rank_name(sheet, rank.rank, top + (number + 0.5) * row, row * 0.62)
    _draw_split(sheet, report, below)
    return Picture(sheet.figure, _timeline_words(report))


def _legend_words(kind: str) -> str:
    letter = _LETTERS.get(kind)
    return f"{kind} ({letter})" if letter else kind


def _ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _rank_name(sheet: Sheet, rank: int, y: float, height: float) -> None:
    """The rank's name with its colour beside it."""
    axes = sheet.canvas()
    axes.add_artist(box(0.12, y - height / 2, 0.05, height, (rank_colour(rank), "")))
    sheet.text(0.24, y, f"rank {rank}")


def _draw_rows(axes, report: Report, end: float, pixels: float) -> None:
    scale, unit = (1, "seconds") if end >= 1 else (1e3, "milliseconds") if end >= 1e-3 else (1e6, "microseconds")
    axes.set(xlim=(0, end), ylim=(len(report.ranks), 0), yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x * scale:g}"))
    axes.set_xlabel(f"{unit} from the start of the step", fontsize=8.5, color=MUTED, labelpad=3)
    axes.grid(axis="x", color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    namings = _namings(report, end / pixels)
    for number, rank in enumerate(report.ranks):
        axes.add_artist(box(0, number + 0.07, end, 0.86, (PALE, "")))  # what no span covers is idle
        for span in rank.spans:
            _draw_span(axes, span, number, end / pixels, namings[span.kind])


def _draw_span(axes, span, number: int, pixel: float, naming: Callable) -> None:
    colour, hatch = TIME.get(span.kind, _OTHER)
    message = span.kind in _MESSAGES
    y, height = (number + 0.64, 0.25) if message else (number + 0.11, 0.49)
    gap = pixel if span.seconds > 4 * pixel else 0  # a hair of light between neighbours that are wide enough
    axes.add_artist(box(span.start, y, span.seconds - gap, height, (colour, hatch)))
    words = naming(span)
    if not hatch and _fits(words, span.seconds / pixel):
        axes.text(
            span.start + span.seconds / 2, y + height / 2, words, ha="center", va="center", clip_on=True,
            color=ink_on(colour), fontsize=6.5 if message else 8, fontfamily="DejaVu Sans", parse_math=False,
        )  # fmt: skip


def _names(span, numbered: bool) -> list[str]:
    """What can be written on a span, longest first."""
    letter = _LETTERS.get(span.kind, "")
    if span.kind in _MESSAGES:
        label = operation_text(span.label)
        return [label, label.partition(" ")[0]]
    if numbered and span.micro_batch is not None:
        return [f"{letter}{span.micro_batch}", str(span.micro_batch)]
    return [span.label or span.kind, letter]


def _namings(report: Report, pixel: float) -> dict[str, Callable]:
    """One way of naming for each kind of span, so that neighbours are not named in different ways.

    The longest name that fits three spans in four is taken for all of the kind. A single micro-batch has no number.
    """
    spans = [span for rank in report.ranks for span in rank.spans]
    numbered = len({span.micro_batch for span in spans} - {None}) > 1
    namings = {}
    for kind in {span.kind for span in spans}:
        alike = sorted((span for span in spans if span.kind == kind), key=lambda span: span.seconds)
        lower = alike[len(alike) // 4]
        fitting = [k for k, name in enumerate(_names(lower, numbered)) if _fits(name, lower.seconds / pixel)]
        namings[kind] = partial(_name, numbered=numbered, choice=fitting[0] if fitting else None)
    return namings


def _name(span, numbered: bool, choice: int | None) -> str:
    return "" if choice is None else _names(span, numbered)[choice]


def _fits(words: str, pixels: float) -> bool:
    return bool(words) and len(words) * 6.6 + 3 <= pixels


def _draw_split(sheet: Sheet, report: Report, top: float) -> None:
    """One line per rank: its milliseconds and percent of each kind, on a bar of that share."""
    axes = sheet.canvas()
    left, column = 0.86, (WIDTH - 0.86 - 0.2 + 0.16) / len(TIME_KINDS)
    for place, kind in enumerate(TIME_KINDS):
        x = left + place * column
        axes.add_artist(box(x, top - 0.26, 0.16, 0.12, TIME[kind], linewidth=0.6))
        sheet.text(x + 0.24, top - 0.2, kind, colour=MUTED)
        for number, rank in enumerate(report.ranks):
            y, wide = top + (number + 0.5) * _SPLIT_ROW, column - 0.16
            share, colour = _share(rank, kind), MUTED if kind == "idle" else TIME[kind][0]
            sheet.text(x, y - 0.04, seconds_text(rank.seconds.get(kind, 0.0)), size=8.5)
            sheet.text(x + wide, y - 0.04, _percent(share), size=8.5, ha="right")
            axes.add_artist(box(x, y + 0.065, wide, 0.04, (LINE, "")))
            axes.add_artist(box(x, y + 0.065, wide * share, 0.04, (colour, "")))
    for number, rank in enumerate(report.ranks):
        _rank_name(sheet, rank.rank, top + (number + 0.5) * _SPLIT_ROW, 0.21)


def _share(rank: RankReport, kind: str) -> float:
    total = sum(rank.seconds.get(k, 0.0) for k in TIME_KINDS)
    return rank.seconds.get(kind, 0.0) / total if total else 0.0


def _percent(share: float) -> str:
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _timeline_words(report: Report) -> str:
    lines = [
        f"rank {rank.rank}: "
        + ", ".join(
            f"{kind} {seconds_text(rank.seconds.get(kind, 0.0))} ({_percent(_share(rank, kind))})"
            for kind in TIME_KINDS
        )
        for rank in report.ranks
    ]
    step = f"Timeline of one step on {_ranks_text(len(report.ranks))}, {seconds_text(report.step_seconds)}"
    return f"{step} ({configuration_text(report)}). " + "; ".join(lines) + f". {report.source}."
