"""Checks of exercise 06, broken training, program C: bfloat16 weights that follow float32 master weights.

The yardstick is a run whose weights are never rounded. Rounded once, a weight is at most half a step of bfloat16 from
it. The updates are all far below that half step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._pytree import tree_leaves

from pcourse.checks import fail, many, not_mended, on_ranks, random, require
from pcourse.comm import Comm
from pcourse.lab.check import Scoreboard, check
from pcourse.wording import count_text

RATE = 0.001


@dataclass(frozen=True)
class Case:
    """`steps` steps on `ranks` replicas of `length` weights between 1 and 2; the gradients do not depend on them."""

    ranks: int
    length: int = 20
    steps: int = 64

    def __str__(self) -> str:
        return f"{many(self.ranks)}, {count_text(self.length, 'weight')}, {count_text(self.steps, 'step')}"

    def weights(self) -> torch.Tensor:
        return (1.5 + random(170, self.length).tanh() / 2.01).bfloat16()

    def gradient(self, step: int, rank: int) -> torch.Tensor:
        signs = random(171, self.length).sign()
        size = 0.6 + 0.3 * random(180 + rank, self.length).tanh()
        return (signs * size + 0.05 * random(1000 + 10 * step + rank, self.length)).bfloat16()

    def mean(self, step: int) -> torch.Tensor:
        return sum(self.gradient(step, rank).double() for rank in range(self.ranks)) / self.ranks


CASES = [Case(2), Case(3, length=7), Case(4, length=3, steps=40), Case(1)]


@cache
def _unrounded(case: Case) -> list[torch.Tensor]:
    """The weights in float64 before the first step, and after each."""
    weights = [case.weights().double()]
    for step in range(case.steps):
        weights.append(weights[-1] - RATE * case.mean(step))
    return weights


@dataclass(frozen=True)
class _Seen:
    weights: list[torch.Tensor]  # after each step
    kept: list[torch.Tensor]  # what `state` holds after the last


def _program(comm: Comm, function, case: Case) -> _Seen:
    weights, state, after = case.weights(), {}, []
    for step in range(case.steps):
        function(comm, weights, case.gradient(step, comm.rank), state, RATE)
        after.append(weights.clone())
    return _Seen(after, [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.dim() > 0])


def _run(function, case: Case) -> list[_Seen]:
    return on_ranks(str(case), case.ranks, _program, function, case)


def _off(weights: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How far `weights` are from `exact`, in steps of bfloat16 (2**-7 between 1 and 2)."""
    step = torch.exp2(exact.abs().log2().floor() - 7)
    return (weights.double() - exact).abs() / step


def _rounded(weights: torch.Tensor, exact: torch.Tensor, slack: float = 0.01) -> torch.Tensor:
    """Which weights are `exact`, rounded: that leaves half a step, and sums in float32 differ in their last bits."""
    return _off(weights, exact) < 0.5 + slack


@check
def mixed_step(function):
    """The weights are those of a float32 run, rounded once, after every step and on every rank."""
    for case in CASES:
        seen = _run(function, case)
        for rank in range(case.ranks):
            _require_weights(function, case, rank, seen[rank])
        for rank in range(case.ranks):
            same = torch.equal(seen[rank].weights[-1], seen[0].weights[-1])
            require(
                same, str(case), f"the weights on ranks 0 and {rank} part, although each is close to what it should be"
            )
    case = Case(4, length=256)
    seen = _run(function, case)[0]
    board = Scoreboard(f"mixed precision: {case}", "measured on ranks that are threads of this process")
    wrong = (~_rounded(seen.weights[-1], _unrounded(case)[-1])).sum().item()
    board.add(f"weights of {case.length} that are not float32's, rounded", wrong, 0)
    state = sum(t.numel() * t.element_size() for t in seen.kept) / case.length
    board.add("state of the optimizer, bytes a weight", state, 4)
    return board


def _require_weights(function, case: Case, rank: int, seen: _Seen) -> None:
    exact, last = _unrounded(case), seen.weights[-1]
    words = f"the weights on rank {rank} are {str(last.dtype).removeprefix('torch.')} after the step"
    rule = "the model computes with bfloat16. weights.copy_(master) rounds"
    require(last.dtype == torch.bfloat16, str(case), f"{words}: {rule}")
    if all(_rounded(after, exact[k + 1]).all() for k, after in enumerate(seen.weights)):
        return
    if torch.equal(last, case.weights()):
        fail(str(case), _why_still(function, case, rank, seen))
    moved = exact[-1] - exact[0]
    own = RATE * sum(case.gradient(step, rank).double() for step in range(case.steps))
    candidates = {
        f"move by {case.ranks} times what they should: by the sum of the ranks' gradients, and their mean is due": (
            exact[0] + case.ranks * moved
        ),
        f"move by 1/{case.ranks} of what they should: the mean is divided by N once more": (
            exact[0] + moved / case.ranks
        ),
        "move by this rank's own gradient alone: the all-reduce is missing, or what it returns is not used": (
            exact[0] - own
        ),
        "move the wrong way": exact[0] - moved,
        "are those of a master copy that begins at 0. It begins as a copy of the weights": moved,
    }
    known = [words for words, value in candidates.items() if _rounded(last, value, slack=0.1).all()]
    if all(_rounded(after, exact[k]).all() for k, after in enumerate(seen.weights)):
        words = "are one step behind: they are copied from the master copy before it is stepped"
    elif known:
        words = known[0]
    else:
        far, step = max((_off(after, exact[k + 1]).max().item(), k + 1) for k, after in enumerate(seen.weights))
        words = f"""are not float32's, rounded: after {count_text(step, "step")} one is {far:.3g} steps of bfloat16 from
            there, and rounding leaves half a step"""
    fail(str(case), f"the weights on rank {rank} {words}")


def _why_still(function, case: Case, rank: int, seen: _Seen) -> str:
    """Why no weight has moved; the fault that the program came with is not solved yet."""
    exact = _unrounded(case)
    far = (exact[-1] - exact[0]).abs().mean().item()
    words = f"no weight on rank {rank} has moved, and float32 weights have moved by {far:.2g} on average"
    masters = [t for t in seen.kept if t.numel() == case.length]
    if not masters:
        not_mended(function, str(case), f"the gradients are right, and {words}")
    if any(t.dtype == torch.float32 and torch.allclose(t.double(), exact[-1], atol=1e-5) for t in masters):
        return f"{words}. The master copy in `state` has: it is never copied back. weights.copy_(master), in every step"
    if any(t.dtype == torch.bfloat16 for t in masters):
        return f"{words}. The master copy in `state` is bfloat16, and rounds as they do: it must be float32"
    if any(torch.allclose(t.double(), exact[0], atol=2 * RATE) for t in masters):
        return f"""{words}. The float32 copy in `state` has not either: it is made anew from the rounded weights in each
            step. Make it once, in the first"""
    return words


def numbers(function) -> tuple[str, list[list], bool, bool]:
    """One run beside float32: its title, rows of label, ranks', one device's; whether all is right; ranks agree."""
    case = Case(2)
    seen, exact = _run(function, case), _unrounded(case)
    rows = []
    for step in (16, 32, case.steps):
        got = (seen[0].weights[step - 1].double() - exact[0]).norm().item()
        due = (exact[step] - exact[0]).norm().item()
        words = ["equal, but for rounding"] if _rounded(seen[0].weights[step - 1], exact[step]).all() else []
        rows.append([f"how far the weights have moved after {step} steps", got, due, *words])
    right = all(_rounded(after, exact[k + 1]).all() for k, after in enumerate(seen[0].weights))
    return str(case), rows, right, all(torch.equal(rank.weights[-1], seen[0].weights[-1]) for rank in seen)
