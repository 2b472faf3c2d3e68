"""Checks of exercise 03, the vocabulary-parallel cross-entropy.

A wrong loss is compared with what the usual faults compute: a maximum that is each rank's own, a target's logit that
every rank adds, a mean. The one that matches is named. So is a wrong gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pcourse.checks import (
    ITEM,
    SOURCE,
    calls_of,
    close,
    fail,
    many,
    on_ranks,
    operations,
    random,
    require,
    shares,
    times,
    wire_of,
)
from pcourse.comm import Comm
from pcourse.lab.check import Scoreboard, check
from pcourse.meter import MemoryMeter
from pcourse.recorder import Call

IGNORED = -100
UPSTREAM = 0.7  # the loss is multiplied by it before backward, so that the gradient that flows in is not 1


@dataclass(frozen=True)
class Tokens:
    """Logits of `tokens` tokens over a vocabulary that is cut into shards of `sizes`, and a target for every token.

    Here they are z[T, V] and targets[T]; a learner's function gets them as [2, T/2, V/tp] and [2, T/2].
    """

    sizes: tuple[int, ...]
    tokens: int = 12
    scale: float = 1.0
    ignored: int = 0

    def __str__(self) -> str:
        how = f", logits up to ±{self.scale:g}" if self.scale > 1 else ""
        how += f", {self.ignored} of the targets -100" if self.ignored else ""
        return f"{many(self.ranks)}, {self.tokens} tokens, V={sum(self.sizes)} in shards of {list(self.sizes)}{how}"

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def spans(self) -> list[range]:
        starts = [sum(self.sizes[:rank]) for rank in range(self.ranks)]
        return [range(start, start + size) for start, size in zip(starts, self.sizes, strict=True)]

    def logits(self) -> torch.Tensor:
        z = random(40 + self.tokens, self.tokens, sum(self.sizes))
        return z if self.scale == 1 else z.sign() * self.scale * (1 - z.abs() / 100)

    def targets(self) -> torch.Tensor:
        """Each shard's first and last row are among them: that is where an index goes wrong."""
        edges = [row for span in self.spans for row in (span[0], span[-1])]
        others = [5 * token % sum(self.sizes) for token in range(self.tokens)]
        targets = torch.tensor((edges + others)[: self.tokens])
        targets[self.tokens - self.ignored :] = IGNORED
        return targets

    def columns(self, of: torch.Tensor, rank: int) -> torch.Tensor:
        """The columns of z[T, V] that `rank` holds."""
        span = self.spans[rank]
        return of[:, span.start : span.stop]

    def loss(self, z: torch.Tensor) -> torch.Tensor:
        """The unsplit loss."""
        return F.cross_entropy(z, self.targets(), reduction="sum", ignore_index=IGNORED)


CASES = [
    Tokens((6, 6)),
    Tokens((5, 4, 4)),
    Tokens((2, 7, 3)),
    Tokens((4, 3, 3), scale=1e4),
    Tokens((5, 4, 4), ignored=4),
    Tokens((4, 4, 3, 3), ignored=12),
    Tokens((4, 4, 3, 3)),
    Tokens((7,)),
]


@check
def vocab_parallel_cross_entropy(function):
    """The loss and its gradient equal those of the whole logits, which no rank has ever seen."""
    for case in CASES:
        for rank, seen in enumerate(on_ranks(str(case), case.ranks, _forward_program, function, case)):
            _require_loss(case, rank, *seen)
        for rank, seen in enumerate(on_ranks(str(case), case.ranks, _backward_program, function, case)):
            _require_gradient(case, rank, *seen)
    return _scoreboard(function)


def _call(comm: Comm, function, case: Tokens):
    """The loss that the learner's function gives, and the leaf logits_shard[2, T/2, V/tp]."""
    mine = case.columns(case.logits(), comm.rank)
    shard = mine.reshape(2, case.tokens // 2, -1).clone().requires_grad_()
    return function(comm, shard, case.targets().view(2, -1), case.spans[comm.rank].start), shard


def _forward_program(comm: Comm, function, case: Tokens):
    loss, shard = _call(comm, function, case)
    untouched = torch.equal(shard.detach().flatten(0, 1), case.columns(case.logits(), comm.rank))
    return loss, untouched, calls_of(comm)


def _backward_program(comm: Comm, function, case: Tokens):
    loss, shard = _call(comm, function, case)
    calls_of(comm)
    (UPSTREAM * loss).backward()
    return shard.grad, calls_of(comm)


# --- the loss ------------------------------------------------------------------------------------------------------


def _require_loss(case: Tokens, rank: int, loss, untouched: bool, calls: list[Call]) -> None:
    where = f"the loss on rank {rank}"
    if not isinstance(loss, torch.Tensor):
        fail(str(case), f"{where} is {type(loss).__name__}, not a tensor: is a `return` missing?")
    words = f"{where} has shape {list(loss.shape)}, and it is one number, the sum over the tokens"
    require(loss.shape == (), str(case), words)
    expected = case.loss(case.logits())
    if not close(loss, expected):
        words = f"{where} is {loss.item():.6g}, and the unsplit one is {expected.item():.6g}"
        fail(str(case), f"{words}: {_loss_fault(case, rank, loss.detach())}")
    require(untouched, str(case), f"logits_shard on rank {rank} was changed in place: it belongs to the caller")
    rule = "comm.all_reduce alone has no backward: write an autograd.Function, or apply ReduceFromRanks"
    require(loss.requires_grad, str(case), f"{where} is cut off from autograd. {rule}")
    _require_few_bytes(case, rank, calls)


def _require_few_bytes(case: Tokens, rank: int, calls: list[Call]) -> None:
    whole = case.tokens * sum(case.sizes) * ITEM
    rule = "three numbers a token are enough: its largest logit, its sum of exponentials, its target's logit"
    large = next((call for call in calls if call.payload >= whole), None)
    if large:
        words = f"rank {rank} calls {large.operation} of {large.payload} bytes, the whole logits"
        fail(str(case), f"{words}: the loss is right, and the bytes grow with V. Do not gather; {rule}")
    numbers = sum(call.payload for call in calls) / (case.tokens * ITEM)
    words = f"rank {rank} calls {operations(calls)}, {numbers:.3g} numbers for each token"
    require(numbers <= 4, str(case), f"{words}: {rule}")


def _loss_fault(case: Tokens, rank: int, loss: torch.Tensor) -> str:
    """The fault that gives this loss, in words."""
    if loss == -torch.inf:
        return "every exp vanishes: more than the token's largest logit is subtracted. Maxima combine by op='max'"
    if not loss.isfinite():
        return "exp overflows: subtract the token's largest logit, over all ranks, before exp"
    pieces = _Pieces(case, rank)
    for faults in (_scale_faults, _maximum_faults, _sum_faults, _target_faults, _ignored_faults):
        for words, value in faults(pieces).items():
            if close(loss, value):
                return words
    return f"the difference is {(loss - case.loss(case.logits())).item():.3g}"


class _Pieces:
    """What the usual faults are made of, seen from one rank; all per token, [T]."""

    def __init__(self, case: Tokens, rank: int):
        z = case.logits()
        self.case, self.rank, self.z, self.targets = case, rank, z, case.targets()
        self.counted = self.targets != IGNORED
        self.shards = [case.columns(z, q) for q in range(case.ranks)]
        self.maxima = [shard.amax(1) for shard in self.shards]
        self.max = z.amax(1)
        self.shifted = z - self.max[:, None]
        self.log_sum = self.shifted.exp().sum(1).log()
        self.target = self.at_target(self.shifted)
        self.token_losses = (self.log_sum - self.target) * self.counted
        self.here = case.spans[rank]
        self.held = (self.targets >= self.here.start) & (self.targets < self.here.stop)

    def at_target(self, of: torch.Tensor) -> torch.Tensor:
        """of[T, V] at the target, 0 where the target is ignored."""
        return of.gather(1, self.targets.clamp(min=0)[:, None])[:, 0] * self.counted

    def total(self, token_losses: torch.Tensor) -> torch.Tensor:
        return (token_losses * self.counted).sum()

    def added_over_ranks(self, foreign, starts=None) -> torch.Tensor:
        """Per token, the sum over the ranks of what each reads as the target's logit, from shards that begin at
        `starts`. Where the target is another rank's it reads row foreign(index, rows); None: it adds 0."""
        total = torch.zeros_like(self.max)
        for rank, span in enumerate(self.case.spans):
            index = self.targets - (starts[rank] if starts else span.start)
            mine = (index >= 0) & (index < len(span))
            row = index * mine if foreign is None else torch.where(mine, index, foreign(index, len(span)))
            read = self.case.columns(self.shifted, rank).gather(1, row[:, None])[:, 0]
            total += read * mine if foreign is None else read
        return total


def _scale_faults(p: _Pieces) -> dict[str, torch.Tensor]:
    size, loss = p.case.ranks, p.token_losses.sum()
    mean = "a mean over the tokens, and the contract asks for the sum"
    return {
        f"it is {mean}": loss / p.counted.sum().clamp(min=1),
        f"it is {mean} (and of those that are not -100)": loss / p.case.tokens,
        f"it is {size} times the loss: every rank has the whole loss, so do not sum it over the ranks": loss * size,
        f"it is the loss divided by {size}: a mean over the ranks": loss / size,
    }


def _maximum_faults(p: _Pieces) -> dict[str, torch.Tensor]:
    own = torch.cat([shard - largest[:, None] for shard, largest in zip(p.shards, p.maxima, strict=True)], dim=1)
    log_sum = own.exp().sum(1).log()
    rule = "The shards subtract different maxima, so their sums do not fit: all-reduce the maximum first, with op='max'"
    return {
        f"the maximum is each rank's own. {rule}": p.total(log_sum - p.at_target(own)),
        f"the maximum is rank {p.rank}'s own. {rule}": p.total(log_sum + p.maxima[p.rank] - p.at_target(p.z)),
        f"the maximum, rank {p.rank}'s own, is taken from the exponentials alone. {rule}": p.total(
            log_sum - p.at_target(p.z)
        ),
        "the maximum is subtracted in the exponentials and not from the target's logit": p.total(
            p.log_sum - p.at_target(p.z)
        ),
    }


def _sum_faults(p: _Pieces) -> dict[str, torch.Tensor]:
    local = [p.case.columns(p.shifted, q).exp().sum(1).log() for q in range(p.case.ranks)]
    whole = [shard.logsumexp(1) for shard in p.shards]
    rule = "all-reduce the sum of exponentials, and take the log after"
    return {
        f"the sum of exponentials is that of rank {p.rank}'s shard alone: {rule}": p.total(local[p.rank] - p.target),
        f"each rank's log of its own sum is added: {rule}": p.total(sum(local) - p.target),
        f"each rank's logsumexp is added: {rule}": p.total(sum(whole) - p.at_target(p.z)),
        f"only tokens whose target rank {p.rank} holds are in it": p.total(p.token_losses * p.held),
    }


def _target_faults(p: _Pieces) -> dict[str, torch.Tensor]:
    rows = {edge: torch.tensor([span[edge] for span in p.case.spans]) for edge in (0, -1)}
    lost = {edge: p.target * ~torch.isin(p.targets, rows[edge]) for edge in rows}
    equally_long = [len(span) * rank for rank, span in enumerate(p.case.spans)]
    everywhere = "the target's logit is counted on every rank: where the target is another rank's, add 0, and not"
    targets = {
        f"the target's logit is only known where rank {p.rank} holds the target: all-reduce it": p.target * p.held,
        "the target's logit is not in it": torch.zeros_like(p.target),
        f"{everywhere} row 0": p.added_over_ranks(lambda index, rows: torch.zeros_like(index)),
        f"{everywhere} the row that the index, clamped to the shard, hits": p.added_over_ranks(
            lambda index, rows: index.clamp(0, rows - 1)
        ),
        f"{everywhere} the row that the index, modulo the shard, hits": p.added_over_ranks(
            lambda index, rows: index % rows
        ),
        "the target's logit is added once for every rank": p.target * p.case.ranks,
        "a target in the first row of a shard is not found: off by one": lost[0],
        "a target in the last row of a shard is not found: off by one": lost[-1],
        "the shards are taken to be equally long; first_row says where one begins": p.added_over_ranks(
            None, equally_long
        ),
    }
    return {words: p.total(p.log_sum - target) for words, target in targets.items()}


def _ignored_faults(p: _Pieces) -> dict[str, torch.Tensor]:
    words = "-100 marks a token that is left out, and here its loss is counted"
    return {
        words: (p.log_sum - p.target).sum(),
        f"{words}, with a target's logit of 0": (p.z.logsumexp(1) - p.at_target(p.z)).sum(),
        f"{words}, as if its target were row 0": F.cross_entropy(p.z, p.targets.clamp(min=0), reduction="sum"),
    }


# --- the gradient --------------------------------------------------------------------------------------------------


def _require_gradient(case: Tokens, rank: int, got, calls: list[Call]) -> None:
    z = case.logits().requires_grad_()
    (UPSTREAM * case.loss(z)).backward()
    where = f"the gradient of logits_shard on rank {rank}"
    require(got is not None, str(case), f"{where} is missing: nothing flows back to it")
    got, expected = got.flatten(0, 1), case.columns(z.grad, rank)
    if not close(got, expected):
        clue = f" (backward calls {operations(calls)}, and it needs no call)" if calls else ""
        fail(str(case), f"{where} {_gradient_fault(case, rank, got, expected)}{clue}")
    words = f"backward on rank {rank} calls {operations(calls)}: softmax - onehot is local once the sum is known"
    require(not calls, str(case), words)


def _gradient_fault(case: Tokens, rank: int, got: torch.Tensor, expected: torch.Tensor) -> str:
    if not got.isfinite().all():
        return "is not finite: is exp or log of something too large in its path?"
    ratio = shares(got, [expected])
    if close(got * UPSTREAM, expected):
        return "ignores the gradient that flows into backward: multiply by grad_output"
    if ratio and abs(ratio[0] - case.ranks) < 1e-5:
        rule = "every rank back-propagates the same loss, so backward sums nothing over the ranks"
        return f"is {case.ranks} times what it should be: {rule}"
    if ratio and abs(ratio[0] * case.ranks - 1) < 1e-5:
        rule = "every rank has the whole loss, and needs the whole gradient of its own logits"
        return f"is 1/{case.ranks} of what it should be: {rule}"
    if ratio:
        return f"is {times(ratio[0], of=True)} what it should be"
    for words, value in _gradient_faults(case, rank).items():
        if close(got, value):
            return words
    counted = (case.targets() != IGNORED)[:, None]
    if close(got * counted, expected):
        return "is not 0 for the tokens of -100: they are not in the loss, so nothing flows back to them"
    return f"is wrong (largest difference {(got - expected).abs().max():.2g})"


def _gradient_faults(case: Tokens, rank: int) -> dict[str, torch.Tensor]:
    """What the usual faults give in place of softmax - onehot."""
    z, targets, size = case.logits(), case.targets(), case.ranks
    counted = UPSTREAM * (targets != IGNORED)[:, None]
    softmax = case.columns(z.softmax(1), rank) * counted
    onehot = case.columns(F.one_hot(targets.clamp(min=0), z.shape[1]), rank) * counted
    local = case.columns(z, rank).softmax(1) * counted
    index = targets - case.spans[rank].start
    rows = case.sizes[rank]
    foreign = (index < 0) | (index >= rows)
    everywhere = [F.one_hot(i, rows) * counted for i in (index.masked_fill(foreign, 0), index.clamp(0, rows - 1))]
    only_once = "only the rank that holds a target subtracts it"
    return {
        "is the softmax alone: the one-hot of the target is not subtracted": softmax,
        "is the one-hot of the target alone: nothing flows back through the sum of exponentials": -onehot,
        "takes the softmax over this shard alone: divide by the all-reduced sum of exponentials": local - onehot,
        f"counts the softmax {size} times: every rank has the whole sum, so backward sums nothing over the ranks": size
        * softmax
        - onehot,
        f"has the one-hot of foreign targets subtracted in row 0: {only_once}": softmax - everywhere[0],
        f"has the one-hot of foreign targets subtracted in the nearest row: {only_once}": softmax - everywhere[1],
    }


# --- its cost ------------------------------------------------------------------------------------------------------


def _scoreboard(function) -> Scoreboard:
    case = Tokens((128, 128, 128, 128), tokens=64)
    costs = on_ranks(str(case), case.ranks, _cost_program, function, case)
    calls, wire, memory = (max(column) for column in zip(*costs, strict=True))
    board = Scoreboard(f"cross-entropy: {case}", SOURCE)
    board.add("calls, forward and backward", calls, 2)
    one = wire_of("all_reduce", case.tokens, case.ranks, 0)
    board.add("bytes sent by each rank, 3 numbers a token", wire, 3 * one, unit="bytes")
    shard = case.tokens * case.sizes[0] * ITEM
    board.add("most memory in forward, 1.25 times the shard", memory, 5 * shard // 4, unit="bytes")
    return board


def _cost_program(comm: Comm, function, case: Tokens) -> tuple[int, int, int]:
    shard = case.columns(case.logits(), comm.rank).reshape(2, case.tokens // 2, -1).clone().requires_grad_()
    targets = case.targets().view(2, -1)
    with MemoryMeter() as meter:
        meter.claim("parameters", [shard, targets])  # so that what is temporary is what the function allocates
        loss = function(comm, shard, targets, case.spans[comm.rank].start)
        memory = meter.ledger().temporary
    loss.backward()
    calls = calls_of(comm)
    return len(calls), sum(call.wire for call in calls), memory
