"""How a run fails: the errors that `World.run` raises, and what one rank reports about itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


class _ShortInNotebook(RuntimeError):
    """IPython shows the message alone: where World waited for its ranks helps nobody."""

    def _render_traceback_(self) -> list[str]:
        first, *rest = f"{type(self).__name__}: {self}".splitlines()
        return [f"\x1b[31m{first}\x1b[0m", *rest]


class RankError(_ShortInNotebook):
    """A rank raised, died or returned what cannot be sent.

    The message holds its traceback and what the other ranks did last. `rank` is the one of `size` that failed
    first, None where no single one can be named.
    """

    def __init__(self, message: str, rank: int | None = None, size: int | None = None):
        super().__init__(message)
        self.rank, self.size = rank, size


class RunTimeout(RankError):
    """The run did not finish in time, or no rank can move any more; the message shows where each one is."""


class RunCancelled(_ShortInNotebook):
    """`World.cancel()` or `World.close()` ended the run."""


class CannotSend(_ShortInNotebook, TypeError):
    """The program or an argument cannot be pickled, and so cannot reach ranks that are processes."""


@dataclass
class Failure:
    """How one rank failed. One that lost its peer is never the cause where another failed by itself."""

    headline: str
    details: str = ""
    peer_lost: bool = False
    when: float = field(default_factory=time.monotonic)  # seconds; one clock for all processes of a machine
    error: BaseException | None = None  # of a rank that is a thread
