"""What time is it on this rank: the one place that reads a clock, for the host and for a GPU's stream.

Stamps of the ranks of one machine compare: `time.perf_counter` is one clock for all its processes. Those of several
machines compare once `align_clocks` has run. On CUDA a stamp is an event in the stream, so that reading the clock does
not hold the GPU up; `seconds` turns stamps into seconds.
"""

from __future__ import annotations

import time

import torch


class WallClock:
    """The clock of measured runs: what the device took."""

    def __init__(self, device: torch.device):
        self.device = device
        self.offset = 0.0  # what is added to this machine's clock to have rank 0's: see `align_clocks`
        self.uncertainty = 0.0
        self._anchor = None  # (host seconds, event): where the stream's time meets the host's

    def now(self):
        """A stamp; opaque until `seconds` has resolved it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if self._anchor is None:
            torch.cuda.synchronize(self.device)
            self._anchor = (time.perf_counter(), self._event())
        return self._event()

    def seconds(self, stamp) -> float:
        """Seconds of a stamp, on rank 0's clock; waits until the GPU has passed it."""
        if isinstance(stamp, float):
            return stamp + self.offset
        stamp.synchronize()
        at, event = self._anchor
        return at + event.elapsed_time(stamp) / 1e3 + self.offset

    def _event(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def align_clocks(comm, rounds: int = 20) -> None:
    """Every rank asks rank 0 for the time and keeps the difference of the round trip that took least.

    `clock.uncertainty` is half that round trip: no answer can be off by more (Cristian 1989).
    """
    clock = comm.clock
    question, answer = (torch.zeros(1, dtype=torch.float64, device=comm.device) for _ in range(2))
    for rank in range(1, comm.size):
        best = float("inf")
        for _ in range(rounds):
            if comm.rank == 0:
                comm.recv(question, rank)
                comm.send(answer.fill_(time.perf_counter()), rank)
            elif comm.rank == rank:
                sent = time.perf_counter()
                comm.send(question, 0)
                there = comm.recv(answer, 0).item()
                back = time.perf_counter()
                if back - sent < best:
                    best, clock.offset = back - sent, there - (sent + back) / 2
        if comm.rank == rank:
            clock.uncertainty = best / 2
    comm.recorder.take()
