"""A hundred runs that fail in every way we know leave no file, thread, folder or process behind."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from pcourse.world import RankError, World

on_linux = Path("/proc/self/fd").exists()
pytestmark = pytest.mark.skipif(not on_linux, reason="counts files and processes in /proc")

ROOT = Path(__file__).resolve().parents[1]
RUNS, SEED = 100, 20
# What one rank does while the others do an all-reduce, and how the error is led.
FAILURES = {
    "raise": "raised ValueError",
    "kill": "was ended by SIGKILL",
    "exit": "left with exit code 5",
    "system exit": "left with exit code 6",
    "hang": "the run did not finish",
    "keep": "cannot be pickled",
    "mismatch": "rank",
    "backward": "raised ZeroDivisionError",
    None: None,
}
ONLY_PROCESSES = ("kill", "exit", "keep")


def program(comm, culprit, way):
    import torch

    if comm.rank == culprit:
        if way == "raise":
            raise ValueError(way)
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exit":
            os._exit(5)
        if way == "system exit":
            sys.exit(6)
        if way == "backward":
            x = torch.ones(1, requires_grad=True)
            x.register_hook(lambda grad: 1 / 0)
            x.sum().backward()
        if way == "hang":
            time.sleep(1)
    total = comm.all_reduce(torch.ones(1000 if comm.rank == culprit and way == "mismatch" else 2))
    return threading.Lock() if comm.rank == culprit and way == "keep" else total.sum().item()


program.__module__ = "__main__"  # sent by value, so that no rank imports pytest


def descendants(of: int) -> set[int]:
    """Processes that have `of` as an ancestor."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = set(), {of}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in new}
    return found - {of}


def held(folder: Path) -> dict[str, int]:
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "folders": len(list(folder.iterdir())),
        "processes": len(descendants(os.getpid())),
    }


def settled(folder: Path, expected: dict[str, int], seconds: float = 10) -> dict[str, int]:
    """What is held; a process that was killed and a thread that was told to end have some seconds to go."""
    until = time.monotonic() + seconds
    while (now := held(folder)) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return now


def test_random_failures_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    World(2, "threads").run(program, None, None)
    World(2).run(program, None, None)
    before = held(tmp_path)
    chance = random.Random(SEED)
    for _ in range(RUNS):
        size, way = chance.randint(2, 4), chance.choice(list(FAILURES))
        backend = "gloo" if way in ONLY_PROCESSES else chance.choice(["gloo", "gloo", "threads"])
        culprit = chance.randrange(size)
        try:
            result = World(size, backend).run(program, culprit, way, timeout=0.4 if way == "hang" else 30)
        except RankError as error:
            assert way and FAILURES[way] in str(error).splitlines()[0], (way, str(error))
            assert way in ("hang", "mismatch") or error.rank == culprit, (way, culprit, str(error))
        else:
            assert way is None and result == [2.0 * size] * size, (way, result)
    assert settled(tmp_path, before) == before


KERNEL = """
import re, time
from pcourse.world import World

def program(comm):
    comm.progress(comm.rank, comm.size)
    if comm.rank == 1:
        time.sleep(1000)
    if comm.rank == 2:
        re.match("(a+)+$", "a" * 60 + "b")  # for years, in C, and holding the interpreter's lock
    comm.barrier()

def progress(step, of):
    seen.add(step)
    if len(seen) == of:
        print("running", flush=True)

seen = set()
if __name__ == "__main__":
    World(3).run(program, progress=progress)
"""


def test_ranks_end_with_a_kernel_that_is_killed(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    kernel = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert kernel.stdout.readline() == "running\n"
        time.sleep(0.3)
        family = descendants(kernel.pid)
        assert len(family) >= 5, "three ranks, the fork server, the resource tracker"
    finally:
        kernel.kill()
        kernel.communicate()
    until = time.monotonic() + 10
    while (alive := {pid for pid in family if is_running(pid)}) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive


def is_running(pid: int) -> bool:
    """Whether it runs; one that waits for a parent to take note of its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
