"""A ring all-reduce, step by step."""

from __future__ import annotations

from matplotlib.patches import FancyArrowPatch

from pcourse.lab.palette import BLUE, INK, LINE, MUTED, ORANGE, ink_on, rank_colour, tint
from pcourse.lab.picture import WIDTH, Picture, Sheet, box
from pcourse.split import ring_chunk


def ring(n: int, step: int | None = None) -> Picture:
    """A ring all-reduce over `n` ranks as a strip of its steps, or one `step` of it.

    Every rank's tensor is cut into n chunks. A chunk is filled as far as its sum has come, with the number of ranks
    already in it; an arrow is a chunk on its way to the next rank. After n−1 steps each rank holds one complete
    chunk (reduce-scatter), after n−1 more it holds them all (all-gather).
    """
    if not 2 <= n <= 8:
        raise ValueError(f"a ring of {n} ranks cannot be drawn; n can be 2 to 8")
    last = 2 * (n - 1)
    if step is not None and not 0 <= step < last:
        raise ValueError(f"step={step} is not in a ring of {n} ranks; step can be 0 to {last - 1}")
    states = ring_states(n)
    shown = [step, step + 1] if step is not None else _telling_steps(n)
    return Picture(_draw_ring(n, shown, states), _ring_words(n, step))


def ring_states(n: int) -> list[list[list[int]]]:
    """How many ranks are summed into each chunk: states[step][rank][chunk], before each step and after the last."""
    counts = [[1] * n for _ in range(n)]
    states = [[list(row) for row in counts]]
    for step in range(2 * (n - 1)):
        moves = [(rank, ring_chunk(n, rank, step)) for rank in range(n)]
        sent = [counts[rank][chunk] for rank, chunk in moves]  # all send at once
        for (rank, chunk), ranks_in_it in zip(moves, sent, strict=True):
            receiver = counts[(rank + 1) % n]
            receiver[chunk] = receiver[chunk] + ranks_in_it if step < n - 1 else ranks_in_it
        states.append([list(row) for row in counts])
    return states


def _telling_steps(n: int) -> list[int]:
    last = 2 * (n - 1)
    return list(range(last + 1)) if n <= 4 else [0, 1, n - 2, n - 1, last - 1, last]


def _ring_words(n: int, step: int | None) -> str:
    words = (
        f"Ring all-reduce over {n} ranks: each tensor is cut into {n} chunks. In each of the first {n - 1} steps every "
        f"rank sends one chunk to the next rank, which adds it (reduce-scatter); in {n - 1} more steps the complete "
        f"chunks go round (all-gather). Each rank sends 2·{n - 1} chunks of S/{n}."
    )
    if step is None:
        return words
    moves = ", ".join(f"rank {r} sends chunk {ring_chunk(n, r, step)} to rank {(r + 1) % n}" for r in range(n))
    return f"{words} In step {step}: {moves}."


def _draw_ring(n: int, shown: list[int], states):
    left, right, top, pitch = 0.86, WIDTH - 0.1, 1.3, 0.66
    column = min(1.7, (right - left) / len(shown))
    chunk, last = min(0.3, (column - 0.2) / n), 2 * (n - 1)
    sheet = Sheet(top + pitch * n + 0.36)
    sheet.head(
        f"Ring all-reduce over {n} ranks",
        "Filled: how far a chunk's sum has come, and how many ranks are in it. Arrow: to the next rank.",
    )
    axes = sheet.canvas()
    for rank in range(n):
        y = top + pitch * rank + 0.17
        axes.add_artist(box(0.12, y - 0.15, 0.05, 0.3, (rank_colour(rank), "")))
        sheet.text(0.24, y, f"rank {rank}")
    for place, step in enumerate(shown):
        x = left + place * column + (column - chunk * n) / 2
        words = f"after step {step - 1}" if len(shown) == 2 and place else "done" if step == last else f"step {step}"
        _ring_heading(sheet, axes, n, step, words, left + place * column, column)
        if place and step - shown[place - 1] > 1:
            sheet.text(left + place * column, top + pitch * n / 2 - 0.16, "…", 14, MUTED, ha="center")
        for rank in range(n):
            _draw_chunks(sheet, axes, states[step][rank], n, x, top + pitch * rank, chunk)
        if step < last and (len(shown) > 2 or place == 0):
            _draw_sends(axes, n, step, x, top, pitch, chunk)
    sheet.text(0.12, sheet.height - 0.17, f"the last arrow goes round, from rank {n - 1} to rank 0", 8, colour=MUTED)
    return sheet.figure


def _ring_heading(sheet, axes, n, step, words, x, column) -> None:
    phase, colour = ("reduce-scatter", ORANGE) if step < n - 1 else ("all-gather", BLUE)
    if step == 2 * (n - 1):
        phase, colour = "all-reduced", LINE
    axes.plot([x + 0.06, x + column - 0.06], [0.98, 0.98], color=colour, lw=2.4, solid_capstyle="butt")
    sheet.text(x + column / 2, 0.85, words, 8.5, ha="center", bold=True)
    sheet.text(x + column / 2, 0.69, phase, 8, ha="center", colour=MUTED)


def _draw_chunks(sheet, axes, counts, n, x, y, chunk) -> None:
    height = 0.34
    for number, ranks_in_it in enumerate(counts):
        at, colour = x + number * chunk, rank_colour(number)
        full = ranks_in_it == n
        axes.add_artist(box(at, y, chunk - 0.025, height, (tint(colour, 0.18), "")))
        filled = height * ranks_in_it / n
        axes.add_artist(box(at, y + height - filled, chunk - 0.025, filled, (tint(colour, 1 if full else 0.6), "")))
        if chunk > 0.1:
            ink = ink_on(colour) if full else INK
            words = str(ranks_in_it)
            sheet.text(at + (chunk - 0.025) / 2, y + height / 2, words, 8 if chunk > 0.14 else 7, ink, ha="center")


def _draw_sends(axes, n, step, x, top, pitch, chunk) -> None:
    for rank in range(n):
        at = x + ring_chunk(n, rank, step) * chunk + (chunk - 0.025) / 2
        y = top + pitch * rank + 0.35
        _send_arrow(axes, at, y, y + pitch - 0.36)
    wrapped = x + ring_chunk(n, n - 1, step) * chunk + (chunk - 0.025) / 2
    _send_arrow(axes, wrapped, top - 0.24, top - 0.01)


def _send_arrow(axes, x, start, end) -> None:
    arrow = FancyArrowPatch(
        (x, start), (x, end), arrowstyle="-|>", mutation_scale=8, color=INK, lw=1.1, shrinkA=0, shrinkB=0
    )
    axes.add_artist(arrow)
