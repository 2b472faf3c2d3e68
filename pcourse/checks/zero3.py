"""Checks of exercise 06, a linear layer of ZeRO-3: forward, and then backward.

What comes out is read as a sum over the shards of W, or over the ranks' rows (`shares`). That W is released is not
asked but counted: a MemoryMeter sees every storage that is still alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pcourse.checks import (
    ITEM,
    SOURCE,
    calls_of,
    close,
    explained,
    fail,
    listed,
    many,
    on_ranks,
    operations,
    random,
    require,
    require_autograd_function,
    sent,
    shares,
    times,
    wire_of,
)
from pcourse.comm import SCALAR, Comm
from pcourse.lab.check import CheckFailed, Scoreboard, check
from pcourse.meter import MemoryMeter
from pcourse.recorder import Call
from pcourse.split import shard_range, shard_sizes


@dataclass(frozen=True)
class Case:
    """`ranks` ranks, each with `rows` rows of its own, and y = x Wᵀ, W[outputs, inputs] flat and cut over the ranks."""

    ranks: int
    outputs: int
    inputs: int
    rows: int = 3

    def __str__(self) -> str:
        return f"{many(self.ranks)}, W[{self.outputs}, {self.inputs}] in shards of {listed(self.sizes)}"

    @property
    def length(self) -> int:
        return self.outputs * self.inputs

    @property
    def sizes(self) -> list[int]:
        return shard_sizes(self.length, self.ranks)

    def shard(self, rank: int) -> slice:
        span = shard_range(self.length, self.ranks, rank)
        return slice(span.start, span.stop)

    def weight(self) -> torch.Tensor:
        return random(80, self.length)

    def only(self, rank: int) -> torch.Tensor:
        """W with 0 in all shards but `rank`'s."""
        weight = torch.zeros(self.length, dtype=torch.float64)
        weight[self.shard(rank)] = self.weight()[self.shard(rank)]
        return weight.view(self.outputs, self.inputs)

    def whole(self) -> torch.Tensor:
        return self.weight().view(self.outputs, self.inputs)

    def x(self, rank: int) -> torch.Tensor:
        return random(81 + rank, self.rows, self.inputs)

    def gradient(self, rank: int) -> torch.Tensor:
        return random(91 + rank, self.rows, self.outputs)

    def weight_gradient(self, rank: int) -> torch.Tensor:
        """The flat gradient of W through `rank`'s rows."""
        return (self.gradient(rank).T @ self.x(rank)).flatten()


CASES = [Case(2, 4, 6), Case(3, 6, 6), Case(4, 5, 5), Case(3, 4, 5), Case(4, 1, 3), Case(1, 3, 2)]


@dataclass(frozen=True)
class _Seen:
    """What one layer did on one rank; `kept` and `left` are bytes alive beside what the contract keeps."""

    y: torch.Tensor
    attached: bool
    kept: int
    forward: list[Call]
    dx: torch.Tensor | None = None
    dshard: torch.Tensor | None = None
    left: int = 0
    backward: tuple[Call, ...] = ()


def _run(cls, case: Case, backward: bool) -> list[_Seen]:
    require_autograd_function(cls, "Zero3Linear")
    sizes = f"Shard r of the flat W has shard_sizes(P, N)[r] elements, here {listed(case.sizes)}"
    shard = "dshard is this rank's shard of the mean gradient: reduce-scatter the flat gradient of W"
    clues = {"invalid gradient at index 1": shard, "shape '[": sizes, "do not fit": sizes, "result is": sizes}
    try:
        return on_ranks(str(case), case.ranks, _program, cls, case, backward)
    except CheckFailed as error:
        raise explained(error, clues) from None


def _program(comm: Comm, cls, case: Case, backward: bool) -> _Seen:
    leaf = case.x(comm.rank).requires_grad_()
    shard = case.weight()[case.shard(comm.rank)].clone().requires_grad_()
    gradient = case.gradient(comm.rank)
    with MemoryMeter() as meter:
        meter.claim("parameters", [leaf, shard, gradient])
        y = cls.apply(leaf.view_as(leaf), shard, comm, (case.outputs, case.inputs))
        forward = calls_of(comm)
        if not isinstance(y, torch.Tensor):
            return _Seen(y, False, 0, forward)
        meter.claim("activations", [y])
        kept, value, attached = meter.bytes["temporary"], y.detach().clone(), y.requires_grad
        if not backward or not attached or y.shape != gradient.shape:
            return _Seen(value, attached, kept, forward)
        meter.claim("activations", [value])
        y.backward(gradient)
        del y
        meter.claim("gradients", [grad for grad in (leaf.grad, shard.grad) if grad is not None])
        left = meter.bytes["temporary"]
    return _Seen(value, attached, kept, forward, leaf.grad, shard.grad, left, tuple(calls_of(comm)))


# --- forward -------------------------------------------------------------------------------------------------------


@check
def forward(cls):
    """Forward gathers W for as long as it takes, and keeps x and the shard alone."""
    for case in CASES:
        seen = _run(cls, case, backward=False)
        for rank in range(case.ranks):
            _require_output(case, rank, seen[rank])
            _require_released(case, rank, seen[rank].kept, "forward")
            _require_bytes(case, rank, seen[rank].forward, "forward", ["all_gather"])


def _require_output(case: Case, rank: int, seen: _Seen) -> None:
    got, expected = seen.y, case.x(rank) @ case.whole().T
    if not isinstance(got, torch.Tensor):
        fail(str(case), f"y on rank {rank} is {type(got).__name__}, not a tensor: is a `return` missing?")
    words = f"y on rank {rank} has shape {list(got.shape)}, and it must be {list(expected.shape)}"
    require(got.shape == expected.shape, str(case), words)
    rule = "y must come out of Zero3Linear.apply with its graph: does forward get a shard that needs a gradient?"
    require(seen.attached, str(case), f"y on rank {rank} is cut off from autograd: {rule}")
    if not close(got, expected):
        fail(str(case), f"y on rank {rank} is not the unsplit layer's: {_output_fault(case, rank, got)}")


def _output_fault(case: Case, rank: int, got: torch.Tensor) -> str:
    x, size = case.x(rank), case.ranks
    counts = shares(got, [x @ case.only(q).T for q in range(size)])
    if counts and size > 1:
        found = [q for q in range(size) if counts[q] != 0]
        if found == [rank]:
            return f"only shard {rank} of W is in it, this rank's own: the all-gather is missing"
        told = listed(f"shard {q} {times(count)}" for q, count in enumerate(counts))
        return f"it has {told}: an all-gather puts the shards side by side, once each and undivided"
    counts = shares(got, [case.x(q) @ case.whole().T for q in range(size)])
    if counts and size > 1:
        told = listed(f"rank {q}'s {times(count)}" for q, count in enumerate(counts))
        return f"it has the ranks' rows in it, {told}: in data parallelism each rank's rows are its own"
    if close(got, x @ case.weight().view(case.inputs, case.outputs)):
        return "the flat W was read as [inputs, outputs], and it lies as W[outputs, inputs]: y = x Wᵀ"
    for turn in range(1, size):
        turned = torch.cat([case.weight()[case.shard((q + turn) % size)] for q in range(size)])
        if close(got, x @ turned.view(case.outputs, case.inputs).T):
            return "the shards of W are not in rank order"
    return f"it is no sum of the shards' parts (largest difference {(got - x @ case.whole().T).abs().max():.2g})"


# --- what stays alive, and what is sent ----------------------------------------------------------------------------


def _require_released(case: Case, rank: int, nbytes: int, when: str) -> None:
    if nbytes == 0:
        return
    whole, shard, x = case.length * ITEM, case.sizes[rank] * ITEM, case.x(rank).numel() * ITEM
    what = "x, its shard and y" if when == "forward" else "x, its shard and their gradients"
    words = f"after {when} rank {rank} keeps {nbytes} bytes alive beside {what}"
    if nbytes in (whole, whole + x, 2 * whole):
        what = "W" if when == "forward" else "W, or its gradient,"
        words += f": W has {whole}, so the whole {what} is not released"
        words += ". Backward gathers it again, so do not keep it" if when == "forward" else ""
    elif nbytes == x:
        words += ": a copy of x. Keep x itself, which is alive anyway"
    elif nbytes == shard:
        words += ": a copy of the shard. Keep the shard itself, which is alive anyway"
    fail(str(case), words)


def _require_bytes(case: Case, rank: int, calls, when: str, due: list[str]) -> None:
    wire, expected = sent(calls), sum(wire_of(name, case.length, case.ranks, rank) for name in due)
    called = operations(list(calls))
    asked = " and ".join(f"one {name.replace('_', '-')}" for name in due)
    words = f"{when} on rank {rank} sends {wire} bytes, and {asked} of P elements are {expected}: it calls {called}"
    names = [call.operation for call in calls]
    if when == "backward" and case.ranks > 1 and "all_gather" not in names and wire < expected:
        words += ". W is not gathered again, so forward must have kept it"
    elif "all_reduce" in names and when == "backward":
        words += ". An all-reduce brings every rank the whole gradient, and each needs its shard: reduce-scatter"
    elif "all_reduce" in names:
        words += ". A sum of shards that are padded with 0 is an all-gather for twice the bytes"
    require(wire == expected, str(case), words)


# --- backward ------------------------------------------------------------------------------------------------------


@check
def backward(cls):
    """Backward gathers W again and reduce-scatters its gradient: with forward, 3P(N - 1)/N elements."""
    for case in CASES:
        seen = _run(cls, case, backward=True)
        for rank in range(case.ranks):
            _require_output(case, rank, seen[rank])
            _require_input_gradient(case, rank, seen[rank].dx)
            _require_shard_gradient(case, rank, seen[rank].dshard)
        for rank in range(case.ranks):
            _require_bytes(case, rank, seen[rank].backward, "backward", ["all_gather", "reduce_scatter"])
            _require_released(case, rank, seen[rank].kept, "forward")
            _require_released(case, rank, seen[rank].left, "backward")
    return _scoreboard(cls)


def _require_input_gradient(case: Case, rank: int, got) -> None:
    gradient, size = case.gradient(rank), case.ranks
    expected = gradient @ case.whole()
    if got is None:
        fail(str(case), f"dx on rank {rank} is missing: the layers before this one get no gradient")
    if close(got, expected):
        return
    ratio = shares(got, [expected])
    shards = shares(got, [gradient @ case.only(q) for q in range(size)])
    rows = shares(got, [case.gradient(q) @ case.whole() for q in range(size)])
    words = f"dx on rank {rank} is wrong (largest difference {(got - expected).abs().max():.2g}): dx = dy W"
    if ratio:
        rule = "only the gradient of W is averaged: dx goes on to the layers before, which average their own"
        words = f"dx on rank {rank} is {times(ratio[0], of=True)} what it should be: {rule}"
    elif rows and size > 1:
        words = f"dx on rank {rank} has other ranks' rows in it: each rank's rows are its own, so dx is not reduced"
    elif shards and size > 1:
        words = f"dx on rank {rank} comes from {_named(shards)} of W alone: gather W again before you use it"
    fail(str(case), words)


def _named(counts: list[float]) -> str:
    found = [q for q, count in enumerate(counts) if count != 0]
    return f"shard{'s' if len(found) > 1 else ''} {listed(found)}" if found else "no shard"


def _require_shard_gradient(case: Case, rank: int, got) -> None:
    size, mine = case.ranks, case.shard(rank)
    parts = [case.weight_gradient(q) for q in range(size)]
    mean = sum(parts) / size
    if got is None:
        fail(str(case), f"dshard on rank {rank} is missing: the shard gets no gradient, and will never be stepped")
    if close(got, mean[mine]):
        return
    where = f"dshard on rank {rank}"
    ratio, counts = shares(got, [mean[mine]]), shares(got, [part[mine] for part in parts])
    transposed = sum((case.x(q).T @ case.gradient(q)).flatten() for q in range(size)) / size
    if ratio and abs(ratio[0] - size) < 1e-5:
        words = f"is {size} times what it should be: the sum over the ranks, and the contract asks for the mean"
    elif ratio and abs(ratio[0] * size - 1) < 1e-5:
        words = f"is 1/{size} of what it should be: the mean is divided by N once more"
    elif ratio:
        words = f"is {times(ratio[0], of=True)} what it should be"
    elif counts and [q for q in range(size) if counts[q] != 0] == [rank]:
        share = "" if counts[rank] == 1 else f", {times(counts[rank])}"
        words = f"has the gradient through rank {rank}'s own rows alone{share}: the reduce-scatter is missing"
    elif counts:
        told = listed(f"rank {q}'s {times(count)}" for q, count in enumerate(counts))
        words = f"has the gradients through the ranks' rows in it, {told}; each is due 1/{size} times"
    elif close(got, transposed[mine]):
        words = "is cut from xᵀ dy, which lies as [inputs, outputs]. W lies as [outputs, inputs]: dW = dyᵀ x"
    else:
        others = [q for q in range(size) if got.shape == mean[case.shard(q)].shape and close(got, mean[case.shard(q)])]
        words = "is wrong: dW = dyᵀ x, flat, and of its mean over the ranks this rank's shard"
        words = f"is the gradient of shard {others[0]}, and not of its own" if others else words
    fail(str(case), f"{where} {words}")


def _scoreboard(cls) -> Scoreboard:
    case = Case(4, 64, 32, rows=8)
    seen = _run(cls, case, backward=True)
    board = Scoreboard(f"a layer of ZeRO-3: {many(case.ranks)}, W[{case.outputs}, {case.inputs}]", SOURCE)
    counted = [call for call in (*seen[0].forward, *seen[0].backward) if call.account != SCALAR]
    board.add("collectives, forward and backward", len(counted), 3)
    wire = max(sent(rank.forward) + sent(rank.backward) for rank in seen)
    third = wire_of("all_gather", case.length, case.ranks, 0)
    board.add("bytes sent by each rank, 3P(N - 1)/N elements", wire, 3 * third, "bytes")
    alive = max(rank.kept for rank in seen) + case.sizes[0] * ITEM
    board.add("weights alive between forward and backward, P/N", alive, case.length * ITEM // case.ranks, "bytes")
    return board
