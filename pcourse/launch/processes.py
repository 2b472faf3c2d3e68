"""Ranks that are processes, seen from the one that runs them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import connection
from pathlib import Path

from pcourse.launch.cell_source import dump_program, load_result, unsendable
from pcourse.launch.errors import CannotSend, Failure, RankError
from pcourse.launch.rank_files import RankFiles
from pcourse.launch.rank_process import rank_main
from pcourse.launch.run import STARTUP, Run
from pcourse.launch.words import MAIN_GUARD, manner_of_death, one_line, paragraphs

RANK_NAME = "pcourse rank"

# Not pcourse, so that an edit of it reaches the next run. torch._dynamo because the first optimizer of a
# process imports it, which takes over a second; the fork server passes over what cannot be imported.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "cloudpickle"]

# multiprocessing polls all children of this process whenever one is started, and a child's exit status can be
# read only once: runs in several threads take turns.
_children_lock = threading.Lock()


def start_fork_server() -> None:
    _context()
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()  # the server would start it, and it unblocks what is blocked below
    # Jupyter's interrupt goes to the whole process group: the server inherits that it is blocked, and loads torch on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessRun(Run):
    def __init__(self, *args):
        if multiprocessing.current_process().name.startswith(RANK_NAME):
            advice = f"backend='threads' works, and in a script {MAIN_GUARD}"
            raise RuntimeError(f"a rank cannot start a World of processes: {advice}")
        super().__init__(*args)
        self._processes: list = []
        self._pipes: list = []

    def results(self) -> list:
        with tempfile.TemporaryDirectory(prefix="pcourse-", ignore_cleanup_errors=True) as directory:
            self._files = [RankFiles(Path(directory), rank) for rank in range(self.size)]
            return super().results()

    def start(self) -> None:
        try:
            with open(self._files[0].program, "wb") as file:
                self._classes = dump_program((self.program, self.args), file)
        except Exception as e:
            culprit = unsendable(self.program, self.args)
            raise CannotSend(f"{culprit} cannot be sent to ranks: {one_line(e)}") from None
        start_fork_server()
        for files in self._files:
            self._start_rank(files)
        self.deadline = time.monotonic() + STARTUP  # the first start waits until the fork server has torch

    def _start_rank(self, files: RankFiles) -> None:
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._pipes.append(reader)
        limit = STARTUP + self.timeout  # of one message: never the shorter, as the deadline is kept here
        args = (files, self.size, self.backend, limit, _environment(self.threads), writer)
        process = _context().Process(target=rank_main, args=args, name=f"{RANK_NAME} {files.rank}", daemon=True)
        self._processes.append(process)
        try:
            with _children_lock:
                process.start()
        finally:
            writer.close()

    def receive(self, seconds: float) -> None:
        ranks = [rank for rank in range(self.size) if rank not in self.ended]
        sources = {self._pipes[r]: r for r in ranks} | {self._processes[r].sentinel: r for r in ranks}
        ready = connection.wait(sources, seconds)
        for rank in {sources[source] for source in ready}:
            died = self._processes[rank].sentinel in ready
            # All that a dead rank has to say is in its pipe; a living one may have no end of messages.
            while (message := self._message(rank)) is not None:
                self.handle(rank, *message)
                if not died:
                    break
            if died and rank not in self.ended:
                self.ended[rank] = self._death(rank)

    def _message(self, rank: int) -> tuple | None:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes()) if self._pipes[rank].poll() else None
        except (EOFError, OSError):  # it died, perhaps in mid-message
            return None

    def _death(self, rank: int) -> Failure:
        with _children_lock:
            code = self._processes[rank].exitcode
        files = self._files[rank]
        stack = files.stack()
        headline = f"rank {rank} of {self.size} {manner_of_death(code, before_start=rank not in self.ready)}"
        where = f"most recent call last:\n{stack}" if stack else ""
        return Failure(headline, paragraphs(where, files.last_output()))

    def end(self) -> None:
        with _children_lock:
            started = [process for process in self._processes if process.pid is not None]
            for process in started:
                if process.exitcode is None:
                    _kill_group(process.pid)
        for process in started:
            connection.wait([process.sentinel])
        with _children_lock:
            for process in started:
                process.join()
                process.close()
        for pipe in self._pipes:
            pipe.close()

    def collect(self) -> list:
        return [self._load_result(rank) for rank in range(self.size)]

    def _load_result(self, rank: int):
        try:
            with open(self._files[rank].result, "rb") as file:
                return load_result(file, self._classes)
        except Exception as e:
            message = f"the result of rank {rank} cannot be read back: {one_line(e)}"
            raise RankError(message, rank, self.size) from e

    def show_output(self, last: bool = False) -> None:
        for files in self._files:
            files.show_output(last)

    def act(self, rank: int) -> str:
        return self._files[rank].act()

    def stacks(self) -> dict[int, str]:
        """SIGUSR1 makes a rank write its stack to a file, and would end one that is not ready yet."""
        ranks = [rank for rank in range(self.size) if rank not in self.ended]
        with _children_lock:
            for rank in self.ready.intersection(ranks):
                if self._processes[rank].exitcode is None:
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.1)
        return {rank: self._files[rank].stack() for rank in ranks}


def _kill_group(pid: int) -> None:
    """End a rank that lives, with what its program has started; before the rank leads a group, itself alone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _environment(threads: int) -> dict[str, str]:
    """The fork server keeps the environment of its own start; a rank gets today's, and stays on loopback."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    ours = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": str(threads)}
    return dict(os.environ) | ours
