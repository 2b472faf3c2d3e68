"""The files of one rank in its run's directory: they outlive the rank, however it ends."""

from __future__ import annotations

import mmap
import os
import re
import traceback
from pathlib import Path

from pcourse.launch.acts import STARTING
from pcourse.launch.words import format_frames, name_cells

MOST_OUTPUT = 1_000_000  # bytes of one rank's output that are shown
LAST_BYTES = 20_000
LAST_LINES = 20  # of the output of a rank that died
ACT_BYTES = 256


class RankFiles:
    """The program that a rank gets, and what it leaves: its output, its last act, its stack and its result."""

    def __init__(self, directory: Path, rank: int):
        self.directory, self.rank = directory, rank
        self.program = directory / "program"  # one for all ranks
        self.output, self.page, self.faults, self.result = (
            directory / f"{name}-{rank}" for name in ("output", "act", "stack", "result")
        )
        self.output.touch()
        self.faults.touch()
        self.page.write_bytes(_act_bytes(STARTING))
        self._shown = 0

    def act(self) -> str:
        """What the rank does, or did last."""
        return _read(self.page).rstrip("\0")

    def act_writer(self):
        """The function by which the rank says what it does: memory of a file, written in a microsecond."""
        with open(self.page, "r+b") as file:
            page = mmap.mmap(file.fileno(), ACT_BYTES)

        def act(words: str) -> None:
            page[:] = _act_bytes(words)

        return act

    def stack(self) -> str:
        """The program's frames, innermost last, as far as faulthandler wrote any."""
        main_thread = _read(self.faults).rpartition("most recent call first")[2]
        frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', main_thread, re.MULTILINE)
        return format_frames([traceback.FrameSummary(f, int(n), name) for f, n, name in reversed(frames)])

    def last_output(self) -> str:
        lines = _read(self.output, last=LAST_BYTES).splitlines()[-LAST_LINES:]
        return "\n".join([f"the end of what rank {self.rank} printed:", *lines]) if lines else ""

    def show_output(self, last: bool) -> None:
        """Print the lines that are new, in the `last` call also one that has not ended."""
        if self._shown >= MOST_OUTPUT or not self.output.exists():
            return
        with open(self.output, "rb") as file:
            file.seek(self._shown)
            new = file.read(MOST_OUTPUT - self._shown)
        if not last:
            new = new[: new.rfind(b"\n") + 1]
        self._shown += len(new)
        # A progress bar writes its line again and again: the last one stands for all.
        lines = [line.rsplit("\r", 1)[-1] for line in new.decode(errors="replace").split("\n")]
        if lines[-1] == "":
            lines.pop()
        if self._shown >= MOST_OUTPUT:
            lines.append(f"… more than {MOST_OUTPUT:,} bytes: the rest is not shown")
        if lines:
            print(name_cells("\n".join(f"rank {self.rank} │ {line}" for line in lines)), flush=True)


def _act_bytes(words: str) -> bytes:
    return words.encode()[:ACT_BYTES].ljust(ACT_BYTES, b"\0")


def _read(path: Path, last: int | None = None) -> str:
    """All of a file, or its `last` bytes; empty where somebody has cleaned up the temporary folder."""
    try:
        with open(path, "rb") as file:
            if last is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
