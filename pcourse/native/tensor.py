"""Tensor parallelism of the same GPT through DTensor (torch.distributed.tensor.parallel)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from pcourse.comm import Comm
from pcourse.config import ModelConfig, TrainConfig
from pcourse.data import batch
from pcourse.model import GPT, Attention, build
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


def tensor_sides(comm: Comm, model: ModelConfig, train: TrainConfig):
    """What `beside` takes turns with: ours and DTensor's, on the same tokens."""
    tokens, targets = batch(model, train, 0, device=comm.device)

    def ours():
        split = tensor_parallel(build(model, device=comm.device), comm)
        return split, lambda: _our_loss(split, tokens, targets)

    def theirs():
        split = dtensor_parallel(build(model, device=comm.device), comm)
        return split, lambda: dtensor_loss(split, tokens, targets)

    return ours, theirs


def _our_loss(model: GPT, tokens, targets) -> torch.Tensor:
    loss = model.loss(tokens, targets) / targets.numel()
    loss.backward()
    return loss.detach()


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
