"""Ranks that are threads of this process."""

from __future__ import annotations

import functools
import operator
import queue
import sys
import threading
import time
import traceback

from pcourse.launch.acts import COMPUTING, FINISHED
from pcourse.launch.errors import RunTimeout
from pcourse.launch.run import Run
from pcourse.launch.words import failure, format_frames

GRACE = 1.0  # seconds that threads have to end once they are told to


class Deadlock(RunTimeout):
    """No rank can ever move again. `words` say, without the rest of the message, who waits for what."""

    def __init__(self, message: str, rank: int | None = None, size: int | None = None, words: str = ""):
        super().__init__(message, rank, size)
        self.words = words


class ThreadRun(Run):
    def __init__(self, *args):
        super().__init__(*args)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._acts = [COMPUTING] * self.size
        self._values = [None] * self.size
        self._threads: list[threading.Thread] = []
        self._patience = None  # when to give up on threads that were told to end
        self._abort = lambda reason: None

    def start(self) -> None:
        from pcourse.comm import thread_comms

        acts = [functools.partial(operator.setitem, self._acts, rank) for rank in range(self.size)]
        comms, self._abort = thread_comms(self.size, acts=acts, progress=self._tell_progress)
        comms[0].transport.exchange.on_deadlock = lambda words: self._inbox.put((None, "deadlock", words))
        self._threads = [
            threading.Thread(target=self._run_rank, args=(comm,), name=f"rank {comm.rank}", daemon=True)
            for comm in comms
        ]
        for rank, thread in enumerate(self._threads):
            thread.start()
            self.handle(rank, "ready")

    def _run_rank(self, comm) -> None:
        failed = None
        import torch

        torch.set_num_threads(self.threads)  # of this thread; what it sets for MKL is the whole process's: see end()
        try:
            self._values[comm.rank] = self.program(comm, *self.args)
            self._acts[comm.rank] = FINISHED
        except BaseException as e:
            failed = failure(e, comm.rank, self.size)
            failed.error = e
        self._inbox.put((comm.rank, "ended", failed))
        if failed is None:
            comm.close()  # only now: a deadlock that this leaves behind is told after the end

    def _tell_progress(self, step, of, **info) -> None:
        self._inbox.put((None, "progress", step, of, info))

    def receive(self, seconds: float) -> None:
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if message[1] == "deadlock":
            self._raise_deadlock(message[2])
        else:
            self.handle(*message)

    def _raise_deadlock(self, words: str) -> None:
        if self._patience is None:  # else the run is being ended already
            raise Deadlock(str(self._timeout(f"the run is stuck: {words}")), None, self.size, words)

    def let_go(self, reason: str) -> str:
        self._abort(reason)
        self._patience = self._patience or time.monotonic() + GRACE
        self.hear(until=self._patience)
        return "\n".join(
            f"rank {rank} is still running and cannot be ended: threads never can; restart the kernel to be rid of it"
            for rank in range(self.size)
            if rank not in self.ended
        )

    def end(self) -> None:
        if self._threads:
            self.let_go("the run has ended")
        import torch

        torch.set_num_threads(torch.get_num_threads())  # this thread's own, for MKL again
        for rank in self.ended:
            self._threads[rank].join()  # it has reported, so that its end is a matter of microseconds

    def collect(self) -> list:
        return self._values

    def act(self, rank: int) -> str:
        return self._acts[rank]

    def stacks(self) -> dict[int, str]:
        frames = sys._current_frames()
        running = {rank: frames.get(thread.ident) for rank, thread in enumerate(self._threads)}
        return {r: format_frames(traceback.extract_stack(frame)) for r, frame in running.items() if frame}

    def show_output(self, last: bool = False) -> None:
        """Nothing to do: what threads print appears by itself."""
