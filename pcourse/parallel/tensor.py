"""Tensor parallelism: one layer's matrices cut over the ranks of a group, t of them.

Column, then row (Narayanan et al. 2021, section 2.3; Korthikanti et al. 2022, figure 4). With `{partial over tp}` for
a sum still to be made, an MLP reads

    forward    X[b,s,h] ─ f ─ H[b,s,f/tp] = GeLU(X · W1[h,f/tp]) ─ Y[b,s,h]{partial over tp} = H · W2[f/tp,h] ─ g ─ Y
    backward   dX ─ f: all-reduce ─ dX{partial over tp} ◄─────────────────────────────── dY ─ g: nothing ─ dY

so a pair costs one all-reduce of b·s·h elements forward (g) and one backward (f), and a transformer layer, which is
two pairs, two and two: 8bsh(t-1)/t elements sent by each rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pcourse.comm import Comm
from pcourse.model import GPT, Attention
from pcourse.parallel.shard import cut
from pcourse.split import shard_range


class CopyToRanks(torch.autograd.Function):
    """f. Forward: nothing, each rank reads the same X. Backward: all-reduce, as each holds a part of dX."""

    @staticmethod
    def forward(ctx, x, comm: Comm, label: str):
        ctx.comm, ctx.label = comm, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad, label=ctx.label), None, None


class ReduceFromRanks(torch.autograd.Function):
    """g. Forward: all-reduce, as each rank holds a part of Y. Backward: nothing, each rank gets the same dY."""

    @staticmethod
    def forward(ctx, partial, comm: Comm, label: str):
        ctx.mark_dirty(partial)
        return comm.all_reduce(partial, out=partial, label=label)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class GatherFromRanks(torch.autograd.Function):
    """Forward: all-gather along the last dim. Backward: keep the own shard of dY, which is the same on every rank."""

    @staticmethod
    def forward(ctx, x, comm: Comm, sizes: list[int], label: str):
        ctx.comm, ctx.sizes = comm, sizes
        return comm.all_gather(x, dim=-1, sizes=sizes, label=label)

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.sizes, dim=-1)[ctx.comm.rank].contiguous(), None, None, None


class SplitToRanks(torch.autograd.Function):
    """Forward: keep the own shard along the last dim. Backward: all-gather, as each rank holds a shard of dX."""

    @staticmethod
    def forward(ctx, x, comm: Comm, sizes: list[int], label: str):
        ctx.comm, ctx.sizes, ctx.label = comm, sizes, label
        return x.split(sizes, dim=-1)[comm.rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_gather(grad, dim=-1, sizes=ctx.sizes, label=ctx.label), None, None, None


class ColumnParallelLinear(nn.Module):
    """Y[.., out/tp] = f(X[.., in]) · W[in, out/tp] + B[out/tp]: each rank computes some of the output's columns.

    (PyTorch stores Wᵀ, so they are *rows* of `linear.weight`: `rows` says which, an even share of them if left out.)
    With `gather_output` the whole Y is put together on every rank, which costs an all-gather.
    """

    def __init__(self, linear: nn.Linear, comm: Comm, rows=None, gather_output: bool = False, label: str = ""):
        super().__init__()
        self.comm, self.label = comm, label
        rows = shard_range(linear.out_features, comm.size, comm.rank) if rows is None else rows
        self.weight = cut(linear.weight, 0, rows)
        self.bias = None if linear.bias is None else cut(linear.bias, 0, rows)
        self.gathered_sizes = _sizes(len(rows), comm) if gather_output else None

    def forward(self, x):
        y = F.linear(CopyToRanks.apply(x, self.comm, self.label), self.weight, self.bias)
        if self.gathered_sizes is None:
            return y
        return GatherFromRanks.apply(y, self.comm, self.gathered_sizes, self.label)


class RowParallelLinear(nn.Module):
    """Y[.., out] = g(X[.., in/tp] · W[in/tp, out]) + B[out]: each rank computes one term of a sum.

    (They are *columns* of `linear.weight` as PyTorch stores it.) The bias is whole on every rank and added once, after
    the sum. With `split_input` X comes whole and each rank takes its share, which costs an all-gather in backward.
    """

    def __init__(self, linear: nn.Linear, comm: Comm, columns=None, split_input: bool = False, label: str = ""):
        super().__init__()
        self.comm, self.label = comm, label
        columns = shard_range(linear.in_features, comm.size, comm.rank) if columns is None else columns
        self.weight = cut(linear.weight, 1, columns)
        self.bias = linear.bias
        self.input_sizes = _sizes(len(columns), comm) if split_input else None

    def forward(self, x):
        if self.input_sizes is not None:
            x = SplitToRanks.apply(x, self.comm, self.input_sizes, self.label)
        y = ReduceFromRanks.apply(F.linear(x, self.weight), self.comm, self.label)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """E[b,s,h] = g(rows of W[V/tp,h], zero where a token is another rank's): one all-reduce forward, none backward."""

    def __init__(self, embedding: nn.Embedding, comm: Comm):
        super().__init__()
        self.comm = comm
        self.rows = shard_range(embedding.num_embeddings, comm.size, comm.rank)
        self.weight = cut(embedding.weight, 0, self.rows)

    def forward(self, tokens):
        local = tokens - self.rows.start
        foreign = (local < 0) | (local >= len(self.rows))
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return ReduceFromRanks.apply(found.masked_fill(foreign.unsqueeze(-1), 0.0), self.comm, "embedding")


class VocabParallelCrossEntropy(nn.Module):
    """The summed cross-entropy of logits[b,s,V/tp] without gathering them: three numbers a token are reduced.

    Targets of -100 are left out. Every rank gets the same loss and back-propagates it.
    """

    def __init__(self, rows: range, comm: Comm):
        super().__init__()
        self.rows, self.comm = rows, comm

    def forward(self, logits, targets):
        logits = logits.flatten(0, 1)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return _CrossEntropy.apply(logits, targets.flatten(), self.rows, self.comm)


class _CrossEntropy(torch.autograd.Function):
    """Forward: all-reduce the maximum [n], then the sums of exponentials and the target's logit [2, n].
    Backward: nothing, softmax - onehot is local once the sum is known."""

    @staticmethod
    def forward(ctx, logits, targets, rows: range, comm: Comm):
        largest = comm.all_reduce(logits.amax(-1), "max", label="cross-entropy")
        shifted = logits - largest.unsqueeze(-1)
        local = targets - rows.start
        mine = (local >= 0) & (local < len(rows))
        local = local.masked_fill(~mine, 0)
        target_logit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        softmax = shifted.exp_()
        sums = torch.stack([softmax.sum(-1), target_logit])
        comm.all_reduce(sums, out=sums, label="cross-entropy")
        softmax /= sums[0].unsqueeze(-1)
        counted = targets != -100
        ctx.save_for_backward(softmax, local, mine, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, local, mine, counted = ctx.saved_tensors
        logits_grad = softmax.clone()
        logits_grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(softmax.dtype).unsqueeze(-1))
        return logits_grad.mul_((grad * counted).unsqueeze(-1)), None, None, None


def _sizes(mine: int, comm: Comm) -> list[int]:
    """Every rank's shard length, asked for once at start-up."""
    return comm.all_gather(torch.tensor(mine, device=comm.device), sizes=[1] * comm.size, account="start-up").tolist()


def tensor_parallel(model: GPT, comm: Comm) -> GPT:
    """Cut `model`, in place, over the ranks of `comm`; it starts from the same weights on every rank.

    LayerNorms, positions and the row linears' biases stay whole on every rank; their gradients come out equal, because
    what flows into them is replicated. Heads must divide (`config.validate` says so); vocabulary and ffn need not.
    """
    if comm.size == 1:
        return model
    for block in model.blocks:
        _split_attention(block.attention, comm)
        block.mlp.up = ColumnParallelLinear(block.mlp.up, comm, label="mlp")
        block.mlp.down = RowParallelLinear(block.mlp.down, comm, label="mlp")
    model.embed.tokens = VocabParallelEmbedding(model.embed.tokens, comm)
    model.head.output = ColumnParallelLinear(model.head.output, comm, label="head")
    if model.config.tied:
        model.head.output.weight = model.embed.tokens.weight
    model.token_loss = VocabParallelCrossEntropy(model.embed.tokens.rows, comm)
    return model


def _split_attention(attention: Attention, comm: Comm) -> None:
    """Each rank takes whole heads: their rows of q, k and v, and the columns of `out` that read them."""
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.width
    mine = shard_range(heads, comm.size, comm.rank)
    mine_kv = shard_range(kv_heads, comm.size, comm.rank)
    rows = [
        (first + head) * width + i
        for first, chosen in ((0, mine), (heads, mine_kv), (heads + kv_heads, mine_kv))
        for head in chosen
        for i in range(width)
    ]
    attention.qkv = ColumnParallelLinear(attention.qkv, comm, rows, label="attention")
    attention.out = RowParallelLinear(
        attention.out, comm, range(mine.start * width, mine.stop * width), label="attention"
    )
    attention.heads, attention.kv_heads = len(mine), len(mine_kv)
    attention.dropout.origin[1] = mine.start  # so that each head draws the mask it has in the unsplit model
