"""A World runs one function on every rank and brings back the results, or the reason why there are none.

The ranks of a run are new processes, forked from a fork server that has torch loaded, so that nothing that an
earlier run did can spoil a later one; they are ended with the run, however it ends. With `backend="threads"`
they are threads of this process: instant, in reach of a debugger, but a thread that spins cannot be ended.

Neither this module nor `pcourse.launch`, which does the work, imports torch, so that a notebook's kernel starts
quickly: only the ranks do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading

from pcourse.launch.errors import RankError, RunCancelled, RunTimeout
from pcourse.launch.machine_lock import machine_lock
from pcourse.launch.processes import ProcessRun, start_fork_server
from pcourse.launch.run import Run
from pcourse.launch.threads import ThreadRun

__all__ = ["BACKENDS", "RankError", "RunCancelled", "RunTimeout", "World", "machine_lock", "warm_up"]

LONGEST_RUN = 1_000_000  # seconds; gloo's own clock does not count much further
BACKENDS = ("auto", "gloo", "nccl", "threads")


class World:
    """`size` ranks on this machine.

    `backend`: "gloo" and "nccl" are processes that talk over it, "auto" is nccl where there is a GPU for each
    rank and else gloo, "threads" are threads of this process. `threads` is how many intra-op threads each rank
    computes with. Raises ValueError for another size, backend or number of threads.

        with World(4) as world:
            results = world.run(program, 1, 2)  # program(comm, 1, 2) on every rank; its results in rank order

    Every run has ranks of its own: a World works again after a failure, and for several threads at once.
    """

    def __init__(self, size: int = 2, backend: str = "auto", threads: int = 1):
        for name, value in (("size", size), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is not known; backend can be {', '.join(BACKENDS)}")
        self.size, self.backend, self.threads = size, backend, threads
        self._lock = threading.Lock()
        self._runs: set[Run] = set()
        self._closed = False

    def run(self, program, *args, timeout: float = 60, progress=None) -> list:
        """`program(comm, *args)` on every rank; returns the results in rank order.

        The program may be written in a notebook cell. What the ranks print appears here, led by their rank.
        The `timeout`, in seconds, counts from when all ranks have started. `progress(step, of, **info)` is
        called in this thread for each `comm.progress(step, of, **info)` of a rank.

        Raises RankError when a rank fails, RunTimeout (a RankError) when the run is late or stuck,
        RunCancelled when another thread ends it, TypeError where the program or its arguments cannot be sent,
        RuntimeError when the World is closed. The ranks are ended first in every case, be it an interruption.
        """
        if not callable(program):
            raise TypeError(f"program={program!r} must be a function that takes a communicator first")
        if not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_RUN:
            raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0, at most {LONGEST_RUN:,}")
        kind = ThreadRun if self.backend == "threads" else ProcessRun
        try:
            with self._admitted(kind(self.size, self.backend, self.threads, program, args, timeout, progress)) as run:
                return run.results()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the run was interrupted") from None  # where it waited helps nobody

    def cancel(self) -> None:
        """End what runs now, from any thread: its `run()` raises RunCancelled. Does nothing without a run."""
        with self._lock:
            for run in self._runs:
                run.cancelled = True

    def take_turns(self, announce):
        """A context in which no other run measures on this machine; `announce(words)` is told of a wait."""
        return machine_lock(announce)

    def close(self) -> None:
        """End what runs now, and allow no further run."""
        self._closed = True
        self.cancel()

    @contextlib.contextmanager
    def _admitted(self, run: Run):
        with self._lock:
            if self._closed:
                raise RuntimeError(f"this World is closed; make a new one: World({self.size})")
            self._runs.add(run)
        try:
            yield run
        finally:
            with self._lock:
                self._runs.discard(run)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World({self.size}, backend={self.backend!r})"


def warm_up() -> None:
    """Start the fork server, so that the first run need not wait for its torch. Takes about 10 ms."""
    # In a child, be it one that still imports its script, this would start another fork server.
    if multiprocessing.current_process().name == "MainProcess":
        start_fork_server()
