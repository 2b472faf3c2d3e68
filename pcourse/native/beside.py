"""A split of ours and the same split through PyTorch's own classes, side by side in one run: time, messages, memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from pcourse.comm import Comm
from pcourse.config import ModelConfig, TrainConfig
from pcourse.meter import MemoryMeter
from pcourse.native.paired import Ratio, interleave, ratio
from pcourse.native.tensor import tensor_sides
from pcourse.wording import bytes_text

# What a rank sends of each element that it hands to the backend, N ranks taking part and each sending as much (see
# `comm.py`). gloo has no reduce-scatter: torch's is an all-reduce of it, and shows as one; ours is an all-to-all.
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,  # which is handed the rank's own shard
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: 1,  # which is handed what is for the others alone
    "broadcast": lambda n: (n - 1) / n,  # each rank being the source of its share
    "send": lambda n: 1,
}
CARRIED = {f"{backend}:{call}": call for backend in ("gloo", "nccl") for call in SENT}
SETTLED = 2  # steps until nothing new comes to be: the optimizer's state in the first, DDP's own buckets in the second


@dataclass(frozen=True)
class Beside:
    """One training step, ours and PyTorch's, in one run, as one rank saw it. Pairs are (ours, PyTorch's)."""

    times: list[tuple[float, float]]  # seconds, pair by pair
    peak: tuple[int, int]  # bytes
    calls: tuple[Counter, Counter]  # {(operation, elements) as they reach the backend: calls}
    loss_difference: float  # of the first step
    device: str
    ranks: int

    @property
    def ratio(self) -> Ratio:
        return ratio(self.times)

    @property
    def messages(self) -> tuple[Counter, Counter]:
        """{elements of a call as it reaches the backend: calls}, whatever the operation."""
        messages = Counter(), Counter()
        for counted, calls in zip(messages, self.calls, strict=True):
            for (_, elements), number in calls.items():
                counted[elements] += number
        return messages

    @property
    def sent(self) -> list[int]:
        """Elements that a rank sends in a step, if each collective goes over all ranks."""
        return [round(sum(SENT[c](self.ranks) * n * k for (c, n), k in calls.items())) for calls in self.calls]

    @property
    def cause(self) -> str:
        """Why ours is slower, where it surely is, as far as the counts tell."""
        if self.ratio.low <= 1:
            return ""
        if self.sent[0] > self.sent[1]:
            return f"ours sends {self.sent[0] / self.sent[1]:.2f} times as much"
        if self.calls[0].total() > self.calls[1].total():
            return f"ours makes {self.calls[0].total() - self.calls[1].total()} calls more"
        return "not the messages: compute"

    def table(self, theirs: str = "PyTorch's") -> str:
        """Time, messages and memory, a line each, ours in the first column and `theirs` in the second."""
        r = self.ratio
        rows = (
            ("", "ours", theirs),
            ("step, median", f"{r.ours * 1e3:.1f} ms", f"{r.theirs * 1e3:.1f} ms"),
            ("elements sent", *(f"{n:,}" for n in self.sent)),
            ("calls", *(str(calls.total()) for calls in self.calls)),
            ("peak memory", *map(bytes_text, self.peak)),
        )
        width = max(14, len(theirs) + 2)
        lines = [f"{name:<16}{a:>14}{b:>{width}}" for name, a, b in rows]
        lines[1] += f"   ratio {r.median:.2f} [{r.low:.2f}, {r.high:.2f}]"
        lines.append(f"ratio: ours / {theirs}, the median over {r.pairs} pairs of steps, with its 95 % interval")
        lines.append(f"first losses differ by {self.loss_difference:.1e}; measured on {self.device}")
        return "\n".join(lines)


def beside(
    comm: Comm, model: ModelConfig, train: TrainConfig, pairs: int = 20, sides: Callable = tensor_sides
) -> Beside:
    """A rank program: time both steps in turn, then count the messages and the peak memory of each by itself.

    `sides(comm, model, train)` tells how to make ours and PyTorch's. Each of the two, called, gives a function that
    takes a whole training step of a newly split model and returns the loss; or the model, and the function that leaves
    the gradients of a batch on its parameters and returns the loss: AdamW then steps them.
    """
    ours, theirs = ((lambda make=make: _step_of(make(), train)) for make in sides(comm, model, train))
    loss_difference = abs(ours()() - theirs()())
    times = interleave(comm, ours(), theirs(), pairs)
    calls = tuple(_calls(make()) for make in (ours, theirs))
    peak = tuple(_peak(make) for make in (ours, theirs))
    return Beside(times, peak, calls, loss_difference, comm.describe(), comm.size)


def _step_of(made, train: TrainConfig) -> Callable[[], float]:
    if callable(made):
        return lambda: made().item()
    model, forward_backward = made
    adam = torch.optim.AdamW(model.parameters(), lr=train.learning_rate)

    def step() -> float:
        loss = forward_backward()
        adam.step()
        adam.zero_grad()
        return loss.item()

    return step


def _calls(step) -> Counter:
    """The calls of one step, counted where the backend takes them."""
    for _ in range(SETTLED):
        step()
    with _silence(), torch.autograd.profiler.profile(use_kineto=False, record_shapes=True) as profile:
        step()
    taken = [e for e in profile.function_events if e.name in CARRIED]
    return Counter((CARRIED[e.name], math.prod(shape)) for e in taken for shape in e.input_shapes)


def _peak(make) -> int:
    with MemoryMeter() as meter, _resizes_seen(meter):
        step = make()
        for _ in range(SETTLED):
            step()
        meter.reset_peaks()
        step()
        return meter.ledger().peak


@contextlib.contextmanager
def _resizes_seen(meter: MemoryMeter):
    """Sharded weights come and go as their storage is resized, which is no operation that a meter would see."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage, size):
        resize(storage, size)
        meter.see(SimpleNamespace(untyped_storage=lambda: storage))

    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


@contextlib.contextmanager
def _silence():
    """The profiler writes lines of its own to this process's output."""
    kept = [os.dup(fd) for fd in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            os.dup2(nowhere.fileno(), fd)
    try:
        yield
    finally:
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
