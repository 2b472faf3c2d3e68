"""Tensor parallelism of the same GPT through DTensor (torch.distributed.tensor.parallel)."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from pcourse.comm import Comm
from pcourse.config import ModelConfig, TrainConfig
from pcourse.data import batch
from pcourse.meter import MemoryMeter
from pcourse.model import GPT, Attention, build
from pcourse.native.paired import Ratio, interleave, ratio
from pcourse.parallel.tensor import tensor_parallel
from pcourse.split import shard_range


def dtensor_parallel(model: GPT, comm: Comm) -> GPT:
    """Cut `model`, in place, over all ranks of a process world. Heads, vocabulary and ffn must divide.

    ColwiseParallel cuts rows of a weight in one piece, so the rows of `qkv` are first put in rank order. The loss goes
    through `loss_parallel`, which does not gather the logits either.
    """
    mesh = init_device_mesh(comm.device.type, (comm.size,))
    plan = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i, block in enumerate(model.blocks):
        _group_rows_by_rank(block.attention, comm.size)
        plan |= {
            f"blocks.{i}.attention.qkv": ColwiseParallel(),
            f"blocks.{i}.attention.out": RowwiseParallel(),
            f"blocks.{i}.mlp.up": ColwiseParallel(),
            f"blocks.{i}.mlp.down": RowwiseParallel(),
        }
    if model.config.tied:  # parallelize_module cuts each by itself
        model.head.output.weight = nn.Parameter(model.embed.tokens.weight.detach().clone())
    parallelize_module(model, mesh, plan)
    if model.config.tied:
        model.head.output.weight = model.embed.tokens.weight
    for block in model.blocks:
        block.attention.heads //= comm.size
        block.attention.kv_heads //= comm.size
    return model


def dtensor_loss(model: GPT, tokens, targets) -> torch.Tensor:
    """Forward and backward of the mean loss per token; the gradients are left on the parameters."""
    with loss_parallel():
        loss = model.loss(tokens, targets) / targets.numel()
        loss.backward()
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()


def grouped_rows(attention: Attention, ranks: int) -> torch.Tensor:
    """The rows of `qkv` in the order in which ranks hold them: q, k and v of rank 0, of rank 1 …"""
    heads = torch.arange(attention.qkv.out_features).view(-1, attention.width)
    q, k, v = heads.split([attention.heads, attention.kv_heads, attention.kv_heads])
    mine = [[t[list(shard_range(len(t), ranks, r))] for t in (q, k, v)] for r in range(ranks)]
    return torch.cat([t for rank in mine for t in rank]).flatten()


def _group_rows_by_rank(attention: Attention, ranks: int) -> None:
    rows = grouped_rows(attention, ranks)
    with torch.no_grad():
        attention.qkv.weight.copy_(attention.qkv.weight[rows])
        attention.qkv.bias.copy_(attention.qkv.bias[rows])


@dataclass(frozen=True)
class Beside:
    """One training step, ours and DTensor's, in one run. Pairs are (ours, DTensor's)."""

    times: list[tuple[float, float]]  # seconds, pair by pair
    peak: tuple[int, int]  # bytes
    messages: tuple[Counter, Counter]  # {bytes of an all-reduce as it reaches the backend: calls}
    loss_difference: float  # of the first step
    device: str

    @property
    def ratio(self) -> Ratio:
        return ratio(self.times)

    @property
    def sent(self) -> list[int]:
        """Payload bytes of a step."""
        return [sum(size * calls for size, calls in counted.items()) for counted in self.messages]


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
    return Counter(4 * math.prod(shape) for e in taken for shape in e.input_shapes)


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
