"""What time is it on this rank: the one place that reads a clock, for the host and for a GPU's stream.

Stamps of the ranks of one machine compare: `time.perf_counter` is one clock for all its processes. On CUDA a stamp is
an event in the stream, so that reading the clock does not hold the GPU up; `seconds` turns stamps into host seconds.
"""

from __future__ import annotations

import time

import torch


class WallClock:
    """The clock of measured runs: what the device took."""

    def __init__(self, device: torch.device):
        self.device = device
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
        """Host seconds of a stamp; waits until the GPU has passed it."""
        if isinstance(stamp, float):
            return stamp
        stamp.synchronize()
        at, event = self._anchor
        return at + event.elapsed_time(stamp) / 1e3

    def _event(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
