"""What one rank did: every communication and every named piece of compute, with their times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pcourse.clock import LogicalClock, WallClock

STAMPS = frozenset({"entered", "left", "wait_entered", "wait_left", "start", "end"})  # of Call and Compute


@dataclass
class Call:
    """One communication of one rank. Times are seconds on the clock that the Comm keeps.

    The rank was held in [entered, left] and, for an asynchronous form, in [wait_entered, wait_left] as well.
    `key` is the same for the members of one communication (group, or pair and tag; how many-th), so that their calls
    can be matched.
    """

    axis: str
    key: tuple
    operation: str
    label: str
    payload: int
    wire: int
    entered: float
    left: float = 0.0
    wait_entered: float | None = None
    wait_left: float | None = None
    account: str = ""  # the ledger's axis where it is not the group's own


@dataclass
class Compute:
    """One named piece of compute of one rank; the calls made inside it lie within its times.

    `flops` are its own, without those of the computes inside it, and so is its `share` of a paced pass. `done` is the
    part whose time has passed on a described machine.
    """

    kind: str
    label: str
    micro_batch: int | None
    flops: float
    bytes: float
    start: float
    end: float = 0.0
    share: float = 1.0
    done: float = 0.0


@dataclass
class Recorder:
    """What one rank did, over all its groups."""

    clock: WallClock | LogicalClock
    calls: list[Call] = field(default_factory=list)
    computes: list[Compute] = field(default_factory=list)
    under_way: list[Compute] = field(default_factory=list)  # each inside the one before it
    counts: Counter = field(default_factory=Counter)

    def key(self, *group, count_as: str = "") -> tuple:
        """The group and how many-th call this is in it; sends and receives of a pair are counted apart."""
        self.counts[group, count_as] += 1
        return *group, self.counts[group, count_as]

    def take(self) -> tuple[list[Call], list[Compute]]:
        """Everything recorded since the last take, its stamps in seconds."""
        calls, self.calls = self.calls, []
        computes, self.computes = self.computes, []
        for item in (*calls, *computes):
            for name in STAMPS.intersection(vars(item)):
                stamp = getattr(item, name)
                setattr(item, name, None if stamp is None else self.clock.seconds(stamp))
        return calls, computes
