"""Two ways of doing one thing, timed in turn within one run, and the ratio of their times with its interval."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Ours ÷ theirs: the median over pairs, and its 95 % interval by the bootstrap (2,000 resamples of the pairs)."""

    ours: float  # median seconds
    theirs: float
    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        times = f"{self.ours * 1e3:9.2f} {self.theirs * 1e3:9.2f}"
        return f"{times}   {self.median:5.2f}  [{self.low:4.2f}, {self.high:4.2f}]  {self.pairs:3d}"


HEADER = f"{'ours ms':>9} {'theirs ms':>9}   ratio  [95 % interval] pairs"


def interleave(comm, ours, theirs, pairs: int, warmup: int = 3) -> list[tuple[float, float]]:
    """On a rank: seconds of each, pair by pair, the order within a pair changing; every rank starts together.

    A pair's time is that of the slowest rank, so every rank returns the same list.
    """
    import torch

    times = []
    for i in range(warmup + pairs):
        taken = {}
        for run in (ours, theirs) if i % 2 else (theirs, ours):
            comm.barrier()
            start = comm.clock.now()
            run()
            taken[run] = comm.clock.seconds(comm.clock.now()) - comm.clock.seconds(start)
        slowest = comm.all_reduce(torch.tensor([taken[ours], taken[theirs]], device=comm.device), "max")
        times.append(tuple(slowest.tolist()))
    return times[warmup:]


def ratio(times: list[tuple[float, float]], seed: int = 0) -> Ratio:
    quotients = [a / b for a, b in times]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(quotients, k=len(quotients))) for _ in range(2000))
    a, b = zip(*times, strict=True)
    middle = statistics.median
    return Ratio(middle(a), middle(b), middle(quotients), medians[50], medians[1949], len(times))
