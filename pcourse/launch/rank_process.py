"""What happens inside a rank's process, from its first line to its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from multiprocessing import connection
from pathlib import Path

from pcourse.launch.acts import COMPUTING, FINISHED, WRITING
from pcourse.launch.cell_source import dump_result, load_program
from pcourse.launch.errors import Failure
from pcourse.launch.rank_files import RankFiles
from pcourse.launch.words import failure, one_line


def rank_main(files: RankFiles, size: int, backend: str, timeout: float, environment, pipe) -> None:
    _end_with_the_kernel()
    if not files.directory.exists():  # the run was interrupted before this rank began
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    _write_output_to(files.output)
    faults = open(files.faults, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(faults)
    faulthandler.register(signal.SIGUSR1, faults)

    def tell(*message) -> None:
        pipe.send_bytes(pickle.dumps(message))

    me = os.getpid()
    failed = _run_program(files, size, backend, timeout, tell)
    if os.getpid() != me:  # a child that the program has forked came back here: only the rank itself has results
        os._exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    tell("ended", failed)
    if failed is None:
        threading.Event().wait()  # a peer may still connect or read: nobody leaves before World ends them all
    os._exit(1)  # a connection that closes is what tells the peers


def _run_program(files: RankFiles, size: int, backend: str, timeout: float, tell) -> Failure | None:
    act = files.act_writer()
    try:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        from pcourse.comm import process_comm

        with open(files.program, "rb") as file:
            (program, args), classes = load_program(file)
        comm = process_comm(
            files.rank,
            size,
            backend=backend,
            directory=str(files.directory),
            timeout=timeout,
            act=act,
            progress=lambda step, of, **info: tell("progress", step, of, info),
        )
        act(COMPUTING)
        tell("ready")
        result = program(comm, *args)
    except BaseException as e:
        return failure(e, files.rank, size)
    act(WRITING)
    try:
        with open(files.result, "wb") as file:
            dump_result(result, file, classes)
        act(FINISHED)
    except Exception as e:
        return Failure(f"the result of rank {files.rank} cannot be pickled: {one_line(e)}")
    return None


def _end_with_the_kernel() -> None:
    """Ranks do not outlive the process that runs them, and the keyboard interrupts only that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)  # a group of its own, so that what the program starts ends with it
    if sys.platform == "linux":  # our parent here is the fork server
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    kernel = multiprocessing.parent_process().sentinel
    with contextlib.suppress(OSError):  # not every system can do this with a pipe
        # A pipe that hangs up sends SIGIO, which ends even a rank that never frees the interpreter's lock.
        fcntl.fcntl(kernel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(kernel, fcntl.F_SETFL, fcntl.fcntl(kernel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        connection.wait([kernel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="pcourse-watch", daemon=True).start()


def _write_output_to(path: Path) -> None:
    """Standard output and error, those of C++ included; nothing is buffered that a sudden end would lose."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))
