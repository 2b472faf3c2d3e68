"""A progress bar for a terminal."""

from __future__ import annotations

import sys
from typing import Self

WIDTH = 30
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """A bar on standard error while its block lasts, where that is a terminal; elsewhere only notes are written.

    Calling it moves the bar; that is the form that `measure` and `check_notebook` want. `title` says what goes on.
    """

    def __init__(self, title: str):
        self.title = title
        self.stream = sys.stderr
        self.live = self.stream.isatty()

    def __enter__(self) -> Self:
        self(0, 1)
        return self

    def __exit__(self, *_) -> None:
        self._draw("")

    def __call__(self, step: int, of: int, note: str = "", **_) -> None:
        """`step` of `of` are done. A `note` is written on a line of its own, and stays."""
        if note:
            self._draw("")
            print(note, file=self.stream, flush=True)
        full = WIDTH * step // of
        self._draw(f"{self.title} [{'#' * full}{'.' * (WIDTH - full)}] {f'{step}/{of}' if step else ''}")

    def _draw(self, words: str) -> None:
        if self.live:
            self.stream.write(CLEAR_LINE + words)
            self.stream.flush()
