"""Checks of exercise 03, the column + row pair: f and g alone, then the MLP.

A forward result is read as a sum of the ranks' partial results and the bias, a gradient as a sum of the ranks' parts:
so a bias that was added on every rank shows as "b2 is in it 2 times", and a missing all-reduce as "only rank 1's part".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pcourse.checks import (
    SOURCE,
    calls_of,
    close,
    fail,
    many,
    on_ranks,
    operations,
    random,
    require,
    require_autograd_function,
    shares,
    times,
    wire_of,
)
from pcourse.comm import Comm
from pcourse.lab.check import Scoreboard, check
from pcourse.recorder import Call
from pcourse.split import shard_range

# --- f and g, each alone -------------------------------------------------------------------------------------------


@check
def copy_to_ranks(cls):
    """f does nothing forward and all-reduces the parts of dX backward."""
    require_autograd_function(cls, "CopyToRanks")
    for size in (2, 3, 4, 1):
        case = f"CopyToRanks on {many(size)}"
        for rank, seen in enumerate(on_ranks(case, size, _alone, cls, _part_of_gradient)):
            x, parts = random(0, 3, 4), [_part_of_gradient(q) for q in range(size)]
            _require_copied(case, rank, size, seen, x)
            _require_gradient(case, "dX", rank, seen.gradient, sum(parts), parts, _F_BACKWARD)
            _require_one_all_reduce(case, rank, size, seen.backward, x.numel(), "backward", "of dX")


@check
def reduce_from_ranks(cls):
    """g sums the ranks' partial results forward and does nothing backward."""
    require_autograd_function(cls, "ReduceFromRanks")
    for size in (2, 3, 4, 1):
        case = f"ReduceFromRanks on {many(size)}"
        for rank, seen in enumerate(on_ranks(case, size, _alone, cls, _whole_gradient, True)):
            gradient = _whole_gradient(rank)
            partials = [random(q, 3, 4) for q in range(size)]
            _require_reduced(case, rank, seen, partials)
            _require_one_all_reduce(case, rank, size, seen.forward, gradient.numel(), "forward", "of the partial sums")
            _require_gradient(case, "d(partial)", rank, seen.gradient, gradient, None, _G_BACKWARD)
            words = f"backward on rank {rank} calls {operations(seen.backward)}: every rank has dY already"
            require(not seen.backward, case, words)


_F_BACKWARD = "f's backward must all-reduce, with a sum: each rank's columns give one part of dX"
_G_BACKWARD = "g's backward passes dY on as it is: Y is replicated, so every rank has the whole dY already"


def _whole_gradient(rank: int) -> torch.Tensor:
    return random(7, 3, 4)


def _part_of_gradient(rank: int) -> torch.Tensor:
    return random(100 + rank, 3, 4)


@dataclass(frozen=True)
class _Seen:
    """What one autograd Function did on one rank."""

    result: torch.Tensor
    attached: bool
    gradient: torch.Tensor | None
    forward: list[Call]
    backward: list[Call]


def _alone(comm: Comm, cls, gradient_of, own_input: bool = False) -> _Seen:
    """Forward on x[3, 4] (`own_input`: another one on every rank), then backward from `gradient_of(rank)`."""
    leaf = random(comm.rank if own_input else 0, 3, 4).requires_grad_()
    y = cls.apply(leaf * 1.0, comm)
    forward = calls_of(comm)
    attached = isinstance(y, torch.Tensor) and y.requires_grad and y.shape == leaf.shape
    if attached:
        y.backward(gradient_of(comm.rank))
    return _Seen(y.detach() if isinstance(y, torch.Tensor) else y, attached, leaf.grad, forward, calls_of(comm))


def _require_shape(case: str, rank: int, what: str, got, shape) -> None:
    if not isinstance(got, torch.Tensor):
        fail(case, f"{what} on rank {rank} is {type(got).__name__}, not a tensor: is a `return` missing?")
    words = f"{what} on rank {rank} has shape {list(got.shape)}, and it must be {list(shape)}"
    longer = [d for d, (a, b) in enumerate(zip(got.shape, shape, strict=False)) if a > b]
    if len(got.shape) == len(shape) and longer:
        words += f": dim {longer[0]} has been put together from the ranks (a gather), and partial sums are added"
    require(got.shape == shape, case, words)


def _require_copied(case: str, rank: int, size: int, seen: _Seen, x: torch.Tensor) -> None:
    _require_shape(case, rank, "the result", seen.result, x.shape)
    counts = shares(seen.result, [x])
    words = f"forward on rank {rank} does not give x" + (f", but x {times(counts[0])}" if counts else "")
    if seen.forward:
        words += f" (it calls {operations(seen.forward)})"
    require(close(seen.result, x), case, f"{words}: f's forward passes x on as it is, as every rank has the whole x")
    words = f"forward on rank {rank} calls {operations(seen.forward)}: x is whole on every rank, so nothing is sent"
    require(not seen.forward, case, words)


def _require_reduced(case: str, rank: int, seen: _Seen, partials) -> None:
    _require_shape(case, rank, "the result", seen.result, partials[0].shape)
    if not close(seen.result, sum(partials)):
        fail(case, f"forward on rank {rank} {_sum_in_words(seen.result, partials, rank)}")


def _sum_in_words(got: torch.Tensor, partials, rank: int) -> str:
    size = len(partials)
    counts = shares(got, partials)
    if counts is None:
        return "is not the sum of the ranks' partial results"
    if all(abs(count - 1 / size) < 1e-5 for count in counts):
        return f"gives the sum divided by {size}: a mean, where g gives the sum"
    if [q for q in range(size) if counts[q] != 0] == [rank]:
        return f"gives only rank {rank}'s own partial result: g's forward must all-reduce"
    return "gives " + ", ".join(f"rank {q}'s partial result {times(count)}" for q, count in enumerate(counts))


def _require_gradient(case, name, rank, got, expected, parts, rule: str) -> None:
    """`got` must be `expected`, which is the sum of the ranks' `parts` (None where it is not made of parts)."""
    if got is None:
        fail(case, f"{name} on rank {rank} is missing: no gradient arrives. {rule}")
    require(got.shape == expected.shape, case, f"{name} on rank {rank} has shape {list(got.shape)}. {rule}")
    if close(got, expected):
        return
    size = len(parts) if parts else 0
    counts = shares(got, parts) if size > 1 else None
    ratio = shares(got, [expected])
    if ratio:
        words = f"{name} on rank {rank} is {times(ratio[0], of=True)} what it should be"
        words += ": a mean over the ranks, where the sum is due" if size and abs(ratio[0] * size - 1) < 1e-5 else ""
    elif counts and [q for q in range(size) if counts[q] != 0] == [rank]:
        words = f"{name} on rank {rank} holds only rank {rank}'s part" + _fraction(counts[rank])
    elif counts:
        words = f"{name} on rank {rank} holds " + ", ".join(f"rank {q}'s part {times(c)}" for q, c in enumerate(counts))
    else:
        words = f"{name} on rank {rank} is wrong (largest difference {(got - expected).abs().max():.2g})"
    fail(case, f"{words}. {rule}")


def _fraction(count: float) -> str:
    return "" if count == 1 else f", {times(count)}"


def _require_one_all_reduce(case: str, rank: int, size: int, calls, elements: int, when: str, what: str) -> None:
    due = [] if size == 1 else ["all_reduce"]
    words = f"{when} on rank {rank} calls {operations(calls)}, and it must be exactly one all_reduce, {what}"
    if any(call.operation == "all_gather" for call in calls):
        words += ": gathered to be added, S bytes cost S(tp - 1) from each rank, and all-reduced 2S(tp - 1)/tp"
    require([call.operation for call in calls] == due, case, words)
    wire, needed = sum(call.wire for call in calls), wire_of("all_reduce", elements, size, rank)
    require(wire == needed, case, f"{when} on rank {rank} sends {wire} bytes, and the all-reduce {what} needs {needed}")


# --- the pair ------------------------------------------------------------------------------------------------------

NAMES = ("x", "w1", "b1", "w2", "b2")


@dataclass(frozen=True)
class Mlp:
    """The whole MLP, Y = GeLU(X W1 + B1) W2 + B2, and how it is cut: F columns of W1 over the ranks."""

    ranks: int
    batch: int = 2
    sequence: int = 5
    hidden: int = 6
    ffn: int = 10

    def __str__(self) -> str:
        return f"{many(self.ranks)}, x[{self.batch}, {self.sequence}, {self.hidden}], w1[{self.hidden}, {self.ffn}]"

    def whole(self) -> dict[str, torch.Tensor]:
        h, f = self.hidden, self.ffn
        shapes = {"x": (self.batch, self.sequence, h), "w1": (h, f), "b1": (f,), "w2": (f, h), "b2": (h,)}
        return {name: random(20 + i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    def cut(self, tensors: dict, rank: int) -> dict[str, torch.Tensor]:
        """Of each tensor what `rank` holds: w1[H, F/tp], b1[F/tp], w2[F/tp, H]; x and b2 whole."""
        span = shard_range(self.ffn, self.ranks, rank)
        mine = slice(span.start, span.stop)
        shards = {"w1": tensors["w1"][:, mine], "b1": tensors["b1"][mine], "w2": tensors["w2"][mine]}
        return {name: shards.get(name, tensors[name]).clone() for name in NAMES}

    def output_gradient(self) -> torch.Tensor:
        return random(30, self.batch, self.sequence, self.hidden)

    @property
    def elements(self) -> int:
        return self.batch * self.sequence * self.hidden


def _partial(t: dict) -> torch.Tensor:
    return F.gelu(t["x"] @ t["w1"] + t["b1"]) @ t["w2"]


def _gradients(t: dict, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of GeLU(X W1 + B1) W2 + B2 at whole tensors, or at one rank's shards."""
    leaves = {name: value.clone().requires_grad_() for name, value in t.items()}
    (_partial(leaves) + leaves["b2"]).backward(gradient)
    return {name: leaf.grad for name, leaf in leaves.items()}


@check
def parallel_mlp(function):
    """The pair equals the unsplit MLP, forward and in every gradient, for one all-reduce forward and one backward."""
    for case in (Mlp(2), Mlp(3), Mlp(4), Mlp(1)):
        for rank, seen in enumerate(on_ranks(str(case), case.ranks, _forward_program, function, case)):
            _require_mlp_forward(case, rank, *seen)
        for rank, seen in enumerate(on_ranks(str(case), case.ranks, _mlp_program, function, case)):
            _require_mlp_backward(case, rank, *seen)
    return _mlp_scoreboard(function)


def _forward_program(comm: Comm, function, case: Mlp):
    tensors = case.cut(case.whole(), comm.rank)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    y = function(comm, *leaves.values())
    return y, calls_of(comm)


def _mlp_program(comm: Comm, function, case: Mlp):
    leaves = {name: tensor.requires_grad_() for name, tensor in case.cut(case.whole(), comm.rank).items()}
    y = function(comm, *leaves.values())
    calls_of(comm)
    y.backward(case.output_gradient())
    return {name: leaf.grad for name, leaf in leaves.items()}, calls_of(comm)


def _require_mlp_forward(case: Mlp, rank: int, y, calls: list[Call]) -> None:
    expected = _partial(case.whole()) + case.whole()["b2"]
    _require_shape(str(case), rank, "Y", y, expected.shape)
    if not close(y, expected):
        fault = _forward_fault(case, rank, y.detach())
        fail(str(case), f"Y on rank {rank} is not the unsplit MLP's: {fault}")
    _require_one_all_reduce(str(case), rank, case.ranks, calls, case.elements, "forward", "of Y")
    rule = "comm.all_reduce alone has no backward, so apply ReduceFromRanks"
    require(y.requires_grad, str(case), f"Y on rank {rank} is cut off from autograd: {rule}")


def _forward_fault(case: Mlp, rank: int, y: torch.Tensor) -> str:
    shards = [case.cut(case.whole(), q) for q in range(case.ranks)]
    b2 = shards[0]["b2"].expand(y.shape)
    partials = [_partial(shard) for shard in shards]
    counts = shares(y, [*partials, b2])
    if counts:
        return _contributions(counts[:-1], counts[-1], rank)
    for words, value in _other_mlps(case, shards, rank).items():
        if close(y, value):
            return words
    largest = (y - sum(partials) - b2).abs().max()
    return f"it is no sum of the ranks' partial results and b2 (largest difference {largest:.2g})"


def _contributions(partials: list[float], bias: float, rank: int) -> str:
    size = len(partials)
    said = []
    if all(abs(count - 1 / size) < 1e-5 for count in partials) and size > 1:
        said.append(f"the partial results are divided by {size}: a mean, where g gives the sum")
    elif size > 1 and [q for q in range(size) if partials[q] != 0] == [rank]:
        said.append(f"only rank {rank}'s own partial result is in it: g, the all-reduce, is missing")
    elif any(count != 1 for count in partials):
        said.append(", ".join(f"rank {q}'s partial result is in it {times(count)}" for q, count in enumerate(partials)))
    if size > 1 and abs(bias - size) < 1e-5:
        said.append(f"b2 is in it {size} times: it was added on every rank before the sum. Add it once, after g")
    elif bias == 0:
        said.append("b2 is not in it")
    elif bias != 1:
        said.append(f"b2 is in it {times(bias)}")
    return "; ".join(said)


def _other_mlps(case: Mlp, shards, rank: int) -> dict[str, torch.Tensor]:
    """What the other usual faults compute."""
    b2, size = shards[0]["b2"], case.ranks
    inner = [s["x"] @ s["w1"] + s["b1"] for s in shards]
    linear = [h @ s["w2"] for h, s in zip(inner, shards, strict=True)]
    scaled = [_partial({**s, "x": size * s["x"]}) for s in shards]
    after = "GeLU acts on F/tp whole columns of X W1 + b1, before W2; of a partial sum it would be wrong"
    return {
        f"GeLU is applied after the sum of the partial results. {after}": F.gelu(sum(linear)) + b2,
        f"GeLU is applied to Y, b2 included. {after}": F.gelu(sum(linear) + b2),
        f"GeLU is applied to each rank's partial result. {after}": sum(F.gelu(p) for p in linear) + b2,
        "GeLU is missing": sum(linear) + b2,
        "GeLU is the tanh approximation; the contract asks for F.gelu as it is": sum(
            F.gelu(h, approximate="tanh") @ s["w2"] for h, s in zip(inner, shards, strict=True)
        ) + b2,
        "it has ReLU where the contract asks for GeLU": sum(
            F.relu(h) @ s["w2"] for h, s in zip(inner, shards, strict=True)
        ) + b2,
        "b1 is not in it": sum(_partial({**s, "b1": torch.zeros_like(s["b1"])}) for s in shards) + b2,
        f"X was multiplied by {size} on its way in: f's forward must pass X on as it is, not all-reduce it":
            sum(scaled) + b2,
        "b1 and b2 are right only on one rank: b1 is cut, so every rank adds its own": sum(
            _partial({**s, "b1": s["b1"] * (q == 0)}) for q, s in enumerate(shards)
        ) + b2,
    }  # fmt: skip


_RULES = {
    "w2": _G_BACKWARD,
    "b2": "Every rank has the whole b2 and adds it once, after g, so that every replica gets the whole gradient",
    "b1": _G_BACKWARD,
    "w1": _G_BACKWARD,
    "x": _F_BACKWARD,
}


def _require_mlp_backward(case: Mlp, rank: int, gradients: dict, calls: list[Call]) -> None:
    expected = case.cut(_gradients(case.whole(), case.output_gradient()), rank)
    parts = [_gradients(case.cut(case.whole(), q), case.output_gradient())["x"] for q in range(case.ranks)]
    for name, rule in _RULES.items():  # from the loss on, so that the first fault is named and not what follows from it
        got = gradients[name]
        if name == "b2" and got is not None and close(got * case.ranks, expected[name]) and case.ranks > 1:
            rule = f"b2/{case.ranks} in the sum gives the right Y and the wrong gradient. {rule}"
        elif name in ("w1", "b1") and got is not None and got.shape == expected[name].shape and len(calls) > 1:
            rule = f"Backward calls {operations(calls)}: a shard's gradient is its rank's own, f belongs on x alone"
        elif name == "w2" and got is None:
            rule = "Autograd does not see comm.all_reduce, so nothing flows back through it: apply ReduceFromRanks"
        elif name == "x" and len(calls) > 1:
            rule = f"{rule} (backward calls {operations(calls)}: one all_reduce is due)"
        _require_gradient(str(case), f"d{name}", rank, got, expected[name], parts if name == "x" else None, rule)
    _require_one_all_reduce(str(case), rank, case.ranks, calls, case.elements, "backward", "of dX")


def _mlp_scoreboard(function) -> Scoreboard:
    case = Mlp(4, batch=2, sequence=32, hidden=32, ffn=128)
    costs = on_ranks(str(case), case.ranks, _mlp_cost_program, function, case)
    calls, wire = (max(column) for column in zip(*costs, strict=True))
    board = Scoreboard(f"column + row: {case}", SOURCE)
    board.add("all-reduces, forward and backward", calls, 2)
    one = wire_of("all_reduce", case.elements, case.ranks, 0)
    board.add("bytes sent by each rank, 4S(tp - 1)/tp", wire, 2 * one, unit="bytes")
    return board


def _mlp_cost_program(comm: Comm, function, case: Mlp) -> tuple[int, int]:
    leaves = [tensor.requires_grad_() for tensor in case.cut(case.whole(), comm.rank).values()]
    function(comm, *leaves).sum().backward()
    calls = calls_of(comm)
    return len(calls), sum(call.wire for call in calls)
