"""Checks of exercise 06, broken training, program B: the mean over all valid tokens, however they lie on the ranks.

A gradient is read as a sum of the parts that each rank's tokens have in it (`shares`); each part is due once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from pcourse.checks import fail, listed, not_mended, on_ranks, random, require, shares, times
from pcourse.comm import Comm
from pcourse.lab.check import Scoreboard, check

TOKENS, HIDDEN, VOCAB = 12, 5, 7
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """As many ranks as there are numbers in `valid`: how many of a rank's TOKENS tokens have a target."""

    valid: tuple[int, ...]

    def __str__(self) -> str:
        ranks = f"{len(self.valid)} ranks with" if len(self.valid) > 1 else "1 rank with"
        return f"{ranks} {listed(self.valid)} valid tokens of {TOKENS}"

    @property
    def total(self) -> int:
        return sum(self.valid)

    def inputs(self, rank: int) -> torch.Tensor:
        return random(150 + rank, TOKENS, HIDDEN)

    def targets(self, rank: int) -> torch.Tensor:
        targets = (torch.arange(TOKENS) * 3 + rank) % VOCAB
        targets[self.valid[rank] :] = IGNORED
        return targets


CASES = [Case((10, 3)), Case((5, 1, 6)), Case((4, 4)), Case((6, 0)), Case((3, 5, 0, 2)), Case((7,))]


def _layer() -> nn.Linear:
    layer = nn.Linear(HIDDEN, VOCAB, device="meta", dtype=torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(random(160, VOCAB, HIDDEN))
        layer.bias.copy_(random(161, VOCAB))
    return layer


@cache
def _parts(case: Case) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """What each rank's tokens have in the loss, in the gradient of the weight and in that of the bias."""
    parts = []
    for rank in range(len(case.valid)):
        layer = _layer()
        loss = F.cross_entropy(layer(case.inputs(rank)), case.targets(rank), reduction="sum") / case.total
        loss.backward()
        parts.append((loss.item(), layer.weight.grad, layer.bias.grad))
    return parts


def _loss(case: Case) -> float:
    return sum(loss for loss, _, _ in _parts(case))


@dataclass(frozen=True)
class _Seen:
    loss: object
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def _program(comm: Comm, function, case: Case) -> _Seen:
    layer = _layer()
    loss = function(comm, layer, case.inputs(comm.rank), case.targets(comm.rank))
    return _Seen(loss, layer.weight.grad, layer.bias.grad)


def _run(function, case: Case) -> list[_Seen]:
    return on_ranks(str(case), len(case.valid), _program, function, case)


@check
def token_step(function):
    """The loss is the mean over the valid tokens of all ranks, and every rank has its whole gradient."""
    for case in CASES:
        seen = _run(function, case)
        for rank in range(len(seen)):
            _require_gradient(function, case, rank, seen[rank])
        for rank in range(len(seen)):
            _require_loss(case, rank, seen[rank].loss)
            rule = "each adds the ranks' gradients in the same order: all-reduce them once, at the end"
            same = torch.equal(seen[rank].weight, seen[0].weight)
            require(same, str(case), f"the gradients on ranks 0 and {rank} differ in the last bits: {rule}")
    title = "gradient norm over one device's, by the ranks' valid tokens"
    board = Scoreboard(title, "measured on ranks that are threads of this process")
    for case in (Case((6, 6)), Case((10, 3)), Case((12, 1))):
        whole = sum(weight for _, weight, _ in _parts(case)).norm().item()
        board.add(listed(case.valid), round(_run(function, case)[0].weight.norm().item() / whole, 6), 1)
    return board


def _require_gradient(function, case: Case, rank: int, seen: _Seen) -> None:
    for name, got, index in (("weight", seen.weight, 1), ("bias", seen.bias, 2)):
        if got is None:
            fail(str(case), f"layer.{name} on rank {rank} has no gradient")
        parts = [part[index] for part in _parts(case)]
        if torch.allclose(got, sum(parts), rtol=1e-6, atol=1e-9):
            continue
        where = f"the gradient of layer.{name} on rank {rank}"
        if not got.isfinite().all():
            rule = "a mean over no token is 0/0, and one rank's nan is in every rank's sum"
            fail(str(case), f"{where} is nan: {rule}. Sum over the tokens, and divide by all ranks' valid ones")
        there = [q for q, valid in enumerate(case.valid) if valid]
        counts = shares(got, [parts[q] for q in there])
        if counts is None:
            fail(str(case), f"{where} is no sum of what the ranks' tokens have in it")
        _explain(function, case, rank, where, dict(zip(there, counts)), seen.loss)


def _explain(function, case: Case, rank: int, where: str, counts: dict[int, float], loss) -> None:
    """Raises for a gradient in which rank q's tokens are `counts[q]` times; once is due."""
    size, total = len(case.valid), case.total

    def all_are(value) -> bool:
        return all(abs(count - value(case.valid[q])) < 1e-4 for q, count in counts.items())

    told = listed(f"rank {q}'s tokens {times(count)}" for q, count in counts.items())
    uneven = len(set(counts.values())) > 1
    first = next(iter(counts.values()))
    if uneven and all_are(lambda valid: total / (size * valid)):
        words = f"{where} has {told}, and each token is due once"
        if isinstance(loss, (int, float)) and abs(loss - _loss(case)) < 1e-6:
            fail(str(case), f"the loss that is returned is right, and {words}: backward begins from another loss")
        not_mended(function, str(case), words)
    if uneven and all_are(lambda valid: total / valid):
        words = "each rank divides by its own valid tokens. Divide by those of all ranks: all-reduce their number"
        fail(str(case), f"{where} has {told}: {words}")
    if size > 1 and [q for q, count in counts.items() if count != 0] == [rank]:
        fail(str(case), f"{where} has its own tokens alone in it: the all-reduce of the gradients is missing")
    if uneven:
        fail(str(case), f"{where} has {told}, and each is due once")
    why = {
        1 / size: ": the sum over the ranks is divided by their number, and it has been divided by all tokens already",
        size: ": it is divided by the mean number of valid tokens of a rank, and then summed over the ranks",
        total: ": it is the sum over all valid tokens, which is not divided",
        total / size: ": it is divided by the number of ranks, where the number of valid tokens is due",
        total / (size * TOKENS): ": it is divided by the number of all tokens. Those of -100 do not count",
        total / TOKENS: ": it is divided by the tokens of one rank, with and without a target",
        total / max(case.valid): ": it is divided by the largest rank's valid tokens, where those of all are due",
    }
    words = next((words for value, words in why.items() if abs(value - first) < 1e-4), "")
    fail(str(case), f"{where} is {times(first, of=True)} what it should be{words}")


def _require_loss(case: Case, rank: int, loss) -> None:
    number = isinstance(loss, (int, float)) or isinstance(loss, torch.Tensor) and loss.numel() == 1
    words = f"rank {rank} returns {type(loss).__name__}, and it must return the loss of the step, a number"
    require(number, str(case), words)
    got, due, size = float(loss), _loss(case), len(case.valid)
    if abs(got - due) < 1e-6:
        return
    own = _parts(case)[rank][0]
    words = f"the gradients are right, and the loss on rank {rank} is {got:.4g}, where one device's is {due:.4g}"
    means = sum(part[0] * case.total / max(valid, 1) for part, valid in zip(_parts(case), case.valid)) / size
    if got != got:
        words += ": a mean over no token is 0/0, and one rank's nan is in every rank's sum. Sum over the tokens"
    elif abs(got - own) < 1e-6:
        words += ": it is what this rank's tokens have in it. Sum it over the ranks"
    elif abs(got - own * case.total / max(case.valid[rank], 1)) < 1e-6:
        words += ": it is the mean over this rank's tokens alone"
    elif abs(got - means) < 1e-6:
        words += ": it is still the mean of the ranks' means"
    elif abs(got * size - due) < 1e-6:
        words += ": the sum over the ranks is divided by their number once more"
    fail(str(case), words)


def numbers(function) -> tuple[str, list[list], bool, bool]:
    """One run beside one device: its title, rows of label, ranks', one device's; whether all is right; ranks agree."""
    case = Case((10, 3))
    seen = _run(function, case)
    parts, due = _parts(case), _loss(case)
    loss = float("nan") if seen[0].loss is None else float(seen[0].loss)
    rows = [["loss", loss, due]]
    for name, index in (("weight", 1), ("bias", 2)):
        got, whole = getattr(seen[0], name), sum(part[index] for part in parts)
        norm = float("nan") if got is None else got.norm().item()
        rows.append([f"gradient norm of layer.{name}", norm, whole.norm().item()])
    agree = all(rank.weight is not None and torch.equal(rank.weight, seen[0].weight) for rank in seen)
    return str(case), rows, all(abs(row[1] - row[2]) < 1e-6 * abs(row[2]) for row in rows), agree
