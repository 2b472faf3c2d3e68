"""A split of ours and the same split through PyTorch's own classes, side by side in one run: time, messages, memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pcourse.comm import Comm
from pcourse.config import ModelConfig, TrainConfig
from pcourse.meter import MemoryMeter
from pcourse.native.paired import Ratio, interleave, ratio
from pcourse.native.tensor import tensor_sides

CARRIED = tuple(f"{backend}:{call}" for backend in ("gloo", "nccl") for call in ("all_reduce", "send"))


@dataclass(frozen=True)
class Beside:
    """One training step, ours and PyTorch's, in one run, as one rank saw it. Pairs are (ours, PyTorch's)."""

    times: list[tuple[float, float]]  # seconds, pair by pair
    peak: tuple[int, int]  # bytes
    messages: tuple[Counter, Counter]  # {elements of an all-reduce or a send as it reaches the backend: calls}
    loss_difference: float  # of the first step
    device: str

    @property
    def ratio(self) -> Ratio:
        return ratio(self.times)

    @property
    def sent(self) -> list[int]:
        """Elements that a step all-reduces or sends."""
        return [sum(size * calls for size, calls in counted.items()) for counted in self.messages]

    @property
    def cause(self) -> str:
        """Why ours is slower, where it surely is, as far as the counts tell."""
        if self.ratio.low <= 1:
            return ""
        if self.sent[0] > self.sent[1]:
            return f"ours sends {self.sent[0] / self.sent[1]:.2f} times as much"
        if self.messages[0].total() > self.messages[1].total():
            return f"ours makes {self.messages[0].total() - self.messages[1].total()} calls more"
        return "not the messages: compute"


def beside(
    comm: Comm, model: ModelConfig, train: TrainConfig, pairs: int = 20, sides: Callable = tensor_sides
) -> Beside:
    """A rank program: time both steps in turn, then count the messages and the peak memory of each by itself.

    `sides(comm, model, train)` tells how to make ours and PyTorch's. Each of the two, called, gives a model that is
    newly split, and the function that leaves the gradients of a batch on its parameters and returns the loss.
    """
    ours, theirs = ((lambda make=make: _stepper(*make(), train)) for make in sides(comm, model, train))
    loss_difference = abs(ours()() - theirs()())
    times = interleave(comm, ours(), theirs(), pairs)
    messages = tuple(_messages(make()) for make in (ours, theirs))
    peak = tuple(_peak(make) for make in (ours, theirs))
    return Beside(times, peak, messages, loss_difference, comm.describe())


def _stepper(model: torch.nn.Module, forward_backward: Callable, train: TrainConfig) -> Callable:
    adam = torch.optim.AdamW(model.parameters(), lr=train.learning_rate)

    def step() -> float:
        loss = forward_backward()
        adam.step()
        adam.zero_grad()
        return loss.item()

    return step


def _messages(step) -> Counter:
    """The messages of one step, counted where the backend takes them."""
    step()
    with _silence(), torch.autograd.profiler.profile(use_kineto=False, record_shapes=True) as profile:
        step()
    taken = [e for e in profile.function_events if e.name in CARRIED]
    return Counter(math.prod(shape) for e in taken for shape in e.input_shapes)


def _peak(make) -> int:
    with MemoryMeter() as meter:
        step = make()
        step()  # the optimizer's state comes to be
        meter.reset_peaks()
        step()
        return meter.ledger().peak


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
