"""What a message costs on this machine: measured against its size, and fitted to latency + bytes / bandwidth."""

from __future__ import annotations

import datetime
import statistics
from dataclasses import dataclass

import numpy as np

from pcourse.config import ConfigError
from pcourse.report import moment_text
from pcourse.world import World

# Bus bandwidth is algorithm bandwidth (S / t) times this: what a link carries, whatever the number of ranks
# (NVIDIA nccl-tests, PERFORMANCE.md).
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}


@dataclass(frozen=True)
class Line:
    """t(S) = latency + S / bandwidth, in seconds and bytes per second; `worst` is the largest relative residual."""

    latency: float
    bandwidth: float
    worst: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class MessageCost:
    """One operation over one number of ranks: `times[i]` are the seconds of `sizes[i]` bytes, one a repetition."""

    operation: str
    ranks: int
    sizes: tuple[int, ...]
    times: tuple[tuple[float, ...], ...]
    device: str
    made_at: str

    @property
    def medians(self) -> list[float]:
        return [statistics.median(t) for t in self.times]

    @property
    def line(self) -> Line:
        return fit(self.sizes, self.medians)

    @property
    def source(self) -> str:
        return f"measured on {self.device}, {moment_text(self.made_at)}"

    def bus_bandwidth(self) -> list[float]:
        """Bytes per second on each rank's link, per size, at the median time."""
        factor = BUS_FACTOR[self.operation](self.ranks)
        return [factor * s / t for s, t in zip(self.sizes, self.medians, strict=True)]


def fit(sizes, seconds) -> Line:
    """The line with the least squared *relative* error, so that small messages count as much as large ones."""
    s, t = np.asarray(sizes, float), np.asarray(seconds, float)
    ones = np.ones_like(t)
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / t, s / t], 1), ones, rcond=None)
    if latency < 0:  # the best line that no message undercuts goes through the origin
        latency, per_byte = 0.0, (s / t).sum() / (s / t).dot(s / t)
    per_byte = max(per_byte, 1e-15)
    worst = float(np.max(np.abs(latency + per_byte * s - t) / t))
    return Line(float(latency), float(1 / per_byte), worst)


def measure_messages(
    operation: str = "all_reduce",
    ranks: int = 2,
    sizes=tuple(4**k for k in range(5, 13)),
    repetitions: int = 15,
    *,
    world: World | None = None,
    progress=None,
    timeout: float = 120,
) -> MessageCost:
    """Time `operation` over `ranks` ranks for messages of `sizes` bytes (the full tensor).

    A message's time is from the last rank's entry to the last rank's end: waiting for a late rank is not its cost.
    Raises ConfigError for an operation that has no bus factor, and for a send among more than two ranks.
    """
    if operation not in BUS_FACTOR:
        raise ConfigError(f"operation={operation!r} is not timed here; it can be {', '.join(BUS_FACTOR)}")
    world = world or World(ranks)
    ranks = world.size
    if operation == "send" and ranks != 2:
        raise ConfigError(f"a send is from one rank to one other, not among {ranks}; ranks can be 2")
    with world.take_turns(print):
        results = world.run(_time_messages, operation, sizes, repetitions, timeout=timeout, progress=progress)
    times, device = results[0]
    made_at = datetime.datetime.now().isoformat(timespec="seconds")
    return MessageCost(operation, ranks, tuple(sizes), tuple(map(tuple, times)), device, made_at)


def _time_messages(comm, operation, sizes, repetitions):
    """The rank program: seconds per size and repetition, the same list on every rank."""
    import torch

    times = []
    for done, nbytes in enumerate(sizes, 1):
        x = torch.zeros(max(1, nbytes // 4), device=comm.device)
        taken = []
        for i in range(2 + repetitions):  # two to warm up
            comm.barrier()
            start = comm.clock.now()
            _once(comm, operation, x)
            stamps = [comm.clock.seconds(start), comm.clock.seconds(comm.clock.now())]
            stamps = torch.tensor(stamps, dtype=torch.float64, device=comm.device)
            entered, ended = comm.all_reduce(stamps, "max").tolist()
            if i >= 2:
                taken.append(ended - entered)
        times.append(taken)
        if comm.rank == 0:
            comm.progress(done, len(sizes))
    return times, comm.describe()


def _once(comm, operation, x):
    if operation == "send":
        comm.recv(x, 0) if comm.rank else comm.send(x, 1)
    elif operation == "all_gather":
        comm.all_gather(x[: len(x) // comm.size], sizes=[len(x) // comm.size] * comm.size)
    elif operation == "all_reduce":
        comm.all_reduce(x, out=x)
    else:
        getattr(comm, operation)(x)
