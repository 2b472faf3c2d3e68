"""One run, seen from where `run()` was called, whatever a rank is made of."""

from __future__ import annotations

import abc
import contextlib
import time

from pcourse.launch.acts import by_itself, in_words
from pcourse.launch.errors import Failure, RankError, RunCancelled, RunTimeout
from pcourse.launch.words import name_cells, paragraphs

TICK = 0.1  # seconds after which a cancel is noticed
SHOW_EVERY = 0.5  # seconds between two looks at what the ranks print and do
STARTUP = 120.0  # seconds that all ranks together have to start
GRACE = 0.3  # seconds that the others have to report once one rank has failed
STUCK_WITH_A_RANK_GONE = 4.0  # seconds without a move when a rank has left the others waiting
STUCK = 30.0  # the same when every rank waits: a very large transfer looks like this too


class Run(abc.ABC):
    """The subclasses know how ranks are started, heard and ended."""

    def __init__(self, size, backend, threads, program, args, timeout, progress):
        self.size, self.backend, self.threads = size, backend, threads
        self.program, self.args, self.timeout = program, args, timeout
        self.progress = progress or (lambda step, of, **info: None)
        self.cancelled = False
        self.ready: set[int] = set()
        self.ended: dict[int, Failure | None] = {}
        self.deadline = time.monotonic() + STARTUP
        self._next_look = time.monotonic() + SHOW_EVERY
        self._seen, self._seen_since = [], 0.0

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def receive(self, seconds: float) -> None:
        """Wait for a message, no longer than that, and handle it."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the ranks, started or not, in whatever state they are."""

    @abc.abstractmethod
    def collect(self) -> list:
        """The results, after the end."""

    @abc.abstractmethod
    def act(self, rank: int) -> str:
        """What the rank does, or did last, in Comm's words."""

    @abc.abstractmethod
    def stacks(self) -> dict[int, str]:
        """Where in its program each rank is that has not ended."""

    @abc.abstractmethod
    def show_output(self, last: bool = False) -> None:
        """Print what the ranks have printed since the last call."""

    def let_go(self, reason: str) -> str:
        """Make the ranks end by themselves, where they cannot be ended; returns which ones do not, in words."""
        return ""

    def results(self) -> list:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.show_output, last=True)
            cleanup.callback(self.end)
            self.start()
            self._watch()
        return self.collect()

    def hear(self, until: float) -> None:
        """Receive until all ranks have ended or the time has come."""
        while len(self.ended) < self.size and time.monotonic() < until:
            self.receive(TICK)

    def handle(self, rank: int, kind: str, *content) -> None:
        """One message of a rank."""
        if kind == "progress":
            step, of, info = content
            self.progress(step, of, **info)
        elif kind == "ready":
            self.ready.add(rank)
            if len(self.ready) == self.size:
                self.deadline = time.monotonic() + self.timeout
                # A short run is over before the first look, and so prints in rank order.
                self._next_look = time.monotonic() + SHOW_EVERY
        else:
            self.ended[rank] = content[0]

    def _watch(self) -> None:
        """Until every rank has ended well; raises as soon as that cannot be."""
        while len(self.ended) < self.size:
            self.receive(TICK)
            if self.cancelled:
                cancelled = "the run was cancelled"
                raise RunCancelled(paragraphs(cancelled, self.let_go(cancelled)))
            if any(self.ended.values()):
                raise self._rank_error()
            if time.monotonic() > self.deadline:
                raise self._timeout(self._late())
            if time.monotonic() > self._next_look:
                self._look()

    def _look(self) -> None:
        self._next_look = time.monotonic() + SHOW_EVERY
        self.show_output()
        stuck_for = self._stuck_for()
        if stuck_for > (STUCK_WITH_A_RANK_GONE if self.ended else STUCK):
            raise self._timeout(f"the run is stuck: for {stuck_for:.0f} s no rank has computed or moved on")

    def _stuck_for(self) -> float:
        """Seconds since when each rank that has not ended waits in one and the same communication."""
        acts = [self.act(rank) for rank in range(self.size)]
        moving = any(by_itself(act) for rank, act in enumerate(acts) if rank not in self.ended)
        if moving or acts != self._seen:
            self._seen, self._seen_since = acts, time.monotonic()
        return time.monotonic() - self._seen_since

    # The words of an error.

    def _rank_error(self) -> RankError:
        stragglers = self.let_go("another rank has failed")
        self.hear(until=time.monotonic() + GRACE)
        failed = {rank: failure for rank, failure in self.ended.items() if failure}
        root = min(failed, key=lambda rank: (failed[rank].peer_lost, failed[rank].when))
        failure = failed[root]
        others = ", ".join(self._doing(rank) for rank in range(self.size) if rank != root)
        message = paragraphs(failure.headline, name_cells(failure.details), others, stragglers)
        error = RankError(message, root, self.size)
        error.__cause__ = failure.error
        return error

    def _late(self) -> str:
        if len(self.ready) < self.size:
            return f"the ranks did not start within {STARTUP:g} s"
        return f"the run did not finish within {self.timeout:g} s"

    def _timeout(self, what: str) -> RunTimeout:
        doing = ", ".join(self._doing(rank) for rank in range(self.size))
        stacks = [f"rank {rank}, most recent call last:\n{name_cells(s)}" for rank, s in self.stacks().items() if s]
        message = paragraphs(f"{what}; {doing}", *stacks)
        return RunTimeout(paragraphs(message, self.let_go(message)), None, self.size)

    def _doing(self, rank: int) -> str:
        act, failure = self.act(rank), self.ended.get(rank)
        if failure and failure.peer_lost:
            return f"rank {rank} lost its peer in {act}"
        if failure:
            return failure.headline
        return f"rank {rank} {'had finished' if rank in self.ended else in_words(act)}"
