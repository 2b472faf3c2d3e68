"""Our tensor parallelism and DTensor's side by side in one run: time, messages, memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from dataclasses import dataclass

import torch

from pcourse.comm import Comm
from pcourse.config import ModelConfig, TrainConfig
from pcourse.data import batch
from pcourse.meter import MemoryMeter
from pcourse.model import GPT, build
from pcourse.native.paired import Ratio, interleave, ratio
from pcourse.native.tensor import dtensor_loss, dtensor_parallel
from pcourse.parallel.tensor import tensor_parallel


@dataclass(frozen=True)
class Beside:
    """One training step, ours and DTensor's, in one run. Pairs are (ours, DTensor's)."""

    times: list[tuple[float, float]]  # seconds, pair by pair
    peak: tuple[int, int]  # bytes
    messages: tuple[Counter, Counter]  # {elements of an all-reduce as it reaches the backend: calls}
    loss_difference: float  # of the first step
    device: str

    @property
    def ratio(self) -> Ratio:
        return ratio(self.times)

    @property
    def sent(self) -> list[int]:
        """Elements that a step all-reduces."""
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


def beside(comm: Comm, model: ModelConfig, train: TrainConfig, pairs: int = 20) -> Beside:
    """A rank program: time both steps in turn, then count the messages and the peak memory of each by itself."""
    tokens, targets = batch(model, train, 0, device=comm.device)

    def ours():
        return _stepper(tensor_parallel(build(model, device=comm.device), comm), our_loss, tokens, targets, train)

    def theirs():
        return _stepper(dtensor_parallel(build(model, device=comm.device), comm), dtensor_loss, tokens, targets, train)

    loss_difference = abs(ours()() - theirs()())
    times = interleave(comm, ours(), theirs(), pairs)
    messages = tuple(_messages(make()) for make in (ours, theirs))
    peak = tuple(_peak(make) for make in (ours, theirs))
    return Beside(times, peak, messages, loss_difference, comm.describe())


def our_loss(model: GPT, tokens, targets) -> torch.Tensor:
    """Forward and backward of the mean loss per token, as `dtensor_loss`."""
    loss = model.loss(tokens, targets) / targets.numel()
    loss.backward()
    return loss.detach()


def _stepper(model: GPT, loss_backward, tokens, targets, train: TrainConfig):
    adam = torch.optim.AdamW(model.parameters(), lr=train.learning_rate)

    def step() -> float:
        loss = loss_backward(model, tokens, targets)
        adam.step()
        adam.zero_grad()
        return loss.item()

    return step


def _messages(step) -> Counter:
    """The all-reduces of one step, counted where the backend takes them."""
    step()
    with _silence(), torch.autograd.profiler.profile(use_kineto=False, record_shapes=True) as profile:
        step()
    taken = [e for e in profile.function_events if e.name in ("gloo:all_reduce", "nccl:all_reduce")]
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
