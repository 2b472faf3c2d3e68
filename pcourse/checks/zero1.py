"""Checks of exercise 06, one step of ZeRO-1: the weights after each step, the state, the bytes.

What a step has moved is read as a sum: of the ranks' gradients in the first step, of the steps' mean gradients in those
after it (`shares`). A sum in place of a mean, a reduce-scatter that is missing and a velocity that is not kept each
leave their own pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._pytree import tree_leaves

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
from pcourse.wording import count_text

STEPS, RATE, MOMENTUM = 3, 0.1, 0.75


@dataclass(frozen=True)
class Case:
    """`ranks` replicas of `length` weights, and the gradient that each of them has in each step."""

    ranks: int
    length: int

    def __str__(self) -> str:
        return f"{many(self.ranks)}, {count_text(self.length, 'weight')} in shards of {listed(self.sizes)}"

    @property
    def sizes(self) -> list[int]:
        return shard_sizes(self.length, self.ranks)

    def shard(self, rank: int) -> slice:
        span = shard_range(self.length, self.ranks, rank)
        return slice(span.start, span.stop)

    def weights(self) -> torch.Tensor:
        return random(40, self.length)

    def gradients(self, step: int) -> list[torch.Tensor]:
        return [random(50 + 10 * step + rank, self.length) for rank in range(self.ranks)]

    def mean(self, step: int) -> torch.Tensor:
        return sum(self.gradients(step)) / self.ranks


CASES = [Case(2, 16), Case(3, 18), Case(4, 22), Case(3, 20), Case(4, 3), Case(2, 1), Case(1, 5)]


@cache
def _unsplit(case: Case) -> list[torch.Tensor]:
    """The weights before the first step, and after each."""
    weights, velocity = [case.weights()], 0.0
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + case.mean(step)
        weights.append(weights[-1] - RATE * velocity)
    return weights


@dataclass(frozen=True)
class _Seen:
    """What one step of the learner's function left on one rank."""

    weights: torch.Tensor
    returned: object
    held: dict[str, tuple[int, int]]  # name in `state` -> elements, bytes that it keeps alive
    left: int  # bytes alive beside the weights, the gradient and the state
    calls: list[Call]


@check
def zero1_step(function):
    """Every rank has the unsplit step's weights, the state of one shard alone, and sent 2P(N - 1)/N elements a step."""
    for case in CASES:
        seen = _run(function, case)
        for step in range(STEPS):
            for rank in range(case.ranks):
                _require_weights(case, step, rank, seen[rank][step])
        for rank in range(case.ranks):
            for step in range(STEPS):
                _require_sharded_state(case, rank, seen[rank][step])
                _require_bytes(case, rank, seen[rank][step].calls)
            rule = "each weight is stepped by one rank, and the others copy it"
            same = torch.equal(seen[rank][-1].weights, seen[0][-1].weights)
            require(same, str(case), f"the weights on ranks 0 and {rank} differ in the last bits: {rule}")
    return _scoreboard(function)


def _run(function, case: Case) -> list[list[_Seen]]:
    """For each rank what each step left there."""
    try:
        return on_ranks(str(case), case.ranks, _program, function, case)
    except CheckFailed as error:
        sizes = f"Shard r is shard_range(P, N, r), here of {listed(case.sizes)} elements"
        clues = ("must match", "do not fit", "result is", "invalid for input", "inconsistent tensor size", "same size")
        raise explained(error, dict.fromkeys(clues, sizes)) from None


def _program(comm: Comm, function, case: Case) -> list[_Seen]:
    weights, state, seen = case.weights(), {}, []
    with MemoryMeter() as meter:
        meter.claim("parameters", [weights])
        for step in range(STEPS):
            gradient = case.gradients(step)[comm.rank].clone()
            meter.claim("gradients", [gradient])
            returned = function(comm, weights, gradient, state, RATE, MOMENTUM)
            if isinstance(returned, torch.Tensor):
                meter.claim("parameters", [returned])
            meter.claim("optimizer", (t for t in tree_leaves(state) if isinstance(t, torch.Tensor)))
            left = meter.bytes["temporary"]
            after = weights.clone()
            meter.claim("parameters", [after])
            seen.append(_Seen(after, returned, _held(state), left, calls_of(comm)))
            del gradient, returned
    return seen


def _held(state: dict) -> dict[str, tuple[int, int]]:
    held, storages = {}, set()
    for name, value in state.items():
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0:
                storage = tensor.untyped_storage()
                nbytes = 0 if storage._cdata in storages else storage.nbytes()
                storages.add(storage._cdata)
                known = held.get(str(name), (0, 0))
                held[str(name)] = known[0] + tensor.numel(), known[1] + nbytes
    return held


# --- the weights ---------------------------------------------------------------------------------------------------


def _require_weights(case: Case, step: int, rank: int, seen: _Seen) -> None:
    before, expected = _unsplit(case)[step : step + 2]
    if close(seen.weights, expected):
        return
    place = f"{case}, step {step + 1}"
    if isinstance(seen.returned, torch.Tensor) and close(seen.returned, expected):
        words = f"what rank {rank} returns is right, and `weights` itself is not"
        fail(place, f"{words}: the step changes it in place. Write into it, with out=weights or weights.copy_(…)")
    words = _unmoved(case, rank, seen, before, expected)
    for q in [] if words else range(case.ranks):
        if not close(seen.weights[case.shard(q)], expected[case.shard(q)]):
            words = _shard_fault(case, step, rank, q, seen.weights, before)
            break
    fail(place, words)


def _unmoved(case: Case, rank: int, seen: _Seen, before, expected) -> str:
    """Which weights have not moved, in words; "" if that is not the fault."""
    got, gathers = seen.weights, any(call.operation == "all_gather" for call in seen.calls)
    covered = case.length // case.ranks * case.ranks
    if close(got, before):
        if gathers:
            return f"""no weight on rank {rank} changes. What an all-gather returns is a new tensor: out=weights or
                weights.copy_(…) writes it into the one that you were given, `weights = …` does not"""
        return f"no weight on rank {rank} changes: the step writes into the tensor that it is given"
    if (
        0 < covered < case.length
        and close(got[:covered], expected[:covered])
        and close(got[covered:], before[covered:])
    ):
        return f"""the last {case.length - covered} of {case.length} weights do not change: N shards of P // N elements
            leave a tail. The shards are {listed(case.sizes)}"""
    new = [q for q in range(case.ranks) if close(got[case.shard(q)], expected[case.shard(q)])]
    old = [q for q in range(case.ranks) if close(got[case.shard(q)], before[case.shard(q)])]
    if rank not in new or len(new) + len(old) < case.ranks:
        return ""
    words = f"on rank {rank} shard {rank}, its own, is new, and the others are as they were before the step"
    if gathers:
        return f"""{words}: the shards are all-gathered before they are stepped, or what the all-gather returns is not
            written into `weights`"""
    return f"{words}: the all-gather of the new shards is missing"


def _shard_fault(case: Case, step: int, rank: int, q: int, weights, before) -> str:
    """Why shard `q` of the weights on `rank` is not what it should be."""
    mine = case.shard(q)
    moved = (before - weights)[mine] / RATE
    where = f"shard {q} of the weights on rank {rank}"
    if not moved.isfinite().all():
        return f"{where} holds values that are not finite"
    if step == 0:
        counts = shares(moved, [gradient[mine] for gradient in case.gradients(0)])
        if counts:
            return f"{where} {_ranks_in_words(counts, rank, q)}"
    else:
        counts = shares(moved, [case.mean(k)[mine] for k in range(step + 1)])
        if counts:
            return f"{where} {_steps_in_words(counts)}"
    return _elsewhere(case, step, q, weights, before, where) or (
        f"{where} is not the unsplit step's (largest difference {(weights - _unsplit(case)[step + 1]).abs().max():.2g})"
    )


def _ranks_in_words(counts: list[float], rank: int, q: int) -> str:
    """A first step, from how often each rank's gradient is in it, times the learning rate; 1/N is due."""
    size, first = len(counts), counts[0]

    def every(value: float) -> bool:
        return all(abs(count - value) < 1e-5 for count in counts)

    alone = [r for r in range(size) if counts[r] != 0]
    if every(1) and size > 1:
        return f"moves by {size} times what it should: by the sum of the gradients, and the mean is due. Divide by N"
    if every(1 / size**2):
        return f"moves by 1/{size} of what it should: the mean is divided by N once more"
    if every(-1 / size):
        return "moves the wrong way: a step goes against the gradient"
    if every(1 / size / RATE):
        return "moves by the gradient itself: the learning rate is missing"
    if every(RATE / size):
        return "moves by too little: the learning rate is in it twice"
    if every((1 - MOMENTUM) / size):
        return "moves by (1 - momentum) of what it should: the contract adds the whole gradient to the velocity"
    if every((1 + MOMENTUM) / size):
        return "moves by (1 + momentum) of what it should: that is Nesterov's step, and the contract's is the plain one"
    if len(alone) == 1:
        whose = "its own gradient" if alone[0] == rank else f"rank {alone[0]}'s gradient"
        told = f"moves by {whose} alone" if alone[0] == rank else f"has moved by {whose} alone"
        return f"{told}: the reduce-scatter, which brings the others', is missing or not used"
    if every(first):
        return f"moves by {times(first * size, of=True)} what it should"
    told = listed(f"rank {r}'s {times(count)}" for r, count in enumerate(counts))
    return f"has the ranks' gradients in it as {told}; each is due 1/{size} times"


def _steps_in_words(counts: list[float]) -> str:
    """A later step, from how often the mean gradient of each step is in it; the newest is last and due once."""
    k = len(counts)
    due = [MOMENTUM ** (k - 1 - j) for j in range(k)]
    told, asked = (listed(f"{number + 0.0:.3g}" for number in numbers) for numbers in (counts, due))
    words = f"has the mean gradients of the steps so far in it {told} times, and {asked} are due"
    if all(count == 0 for count in counts[:-1]):
        return f"{words}: the velocity of the step before is lost. Keep it in `state`, and change it there"
    if any(count == 0 for count in counts[1:-1]):
        return f"{words}: what the velocity became in the last step is not kept in `state`"
    if all(abs(count - 1) < 1e-5 for count in counts):
        return f"{words}: the velocity is not multiplied by the momentum"
    return words


def _elsewhere(case: Case, step: int, q: int, weights, before, where: str) -> str:
    """A shard that was made from the weights, or by the gradients, of other places; "" where it was not."""
    mine, length = case.shard(q), case.sizes[q]
    step_of = before - _unsplit(case)[step + 1]  # what each weight should move by
    for start in range(case.length - length + 1) if length > 1 else ():
        there = slice(start, start + length)
        words = f"and shard {q} begins at {mine.start}. Shard r is shard_range(P, N, r): sizes differ, so add them up"
        if start != mine.start and close(weights[mine], before[there] - step_of[mine]):
            return f"{where} is made from the weights from {start} on, {words}"
        if start != mine.start and close(weights[mine], before[mine] - step_of[there]):
            return f"{where} moves by the gradient of the weights from {start} on, {words}"
        if start != mine.start and close(weights[mine], before[there] - step_of[there]):
            return f"{where} holds the new weights from {start} on, {words}"
    return ""


# --- state and bytes -----------------------------------------------------------------------------------------------


def _require_sharded_state(case: Case, rank: int, seen: _Seen) -> None:
    due = case.sizes[rank]
    told = listed(f"{count_text(n, 'element')} of {name}" for name, (n, _) in seen.held.items()) if seen.held else ""
    elements, nbytes = (sum(column) for column in zip((0, 0), *seen.held.values()))
    words = f"`state` on rank {rank} holds {told}, and its shard has {due}"
    if elements > due and any(n == case.length for n, _ in seen.held.values()) and case.ranks > 1:
        fail(str(case), f"{words}: that is state for all weights on every rank, which ZeRO-1 does away with")
    require(elements <= due, str(case), f"{words}: keep the velocity of this rank's own shard, and nothing else")
    view = f"""`state` on rank {rank} holds a view of {due} elements, and keeps alive the {nbytes} bytes of the whole
        tensor that it is cut from. Make a tensor of the shard's size, or clone() the view"""
    require(nbytes <= due * ITEM, str(case), view)
    left = f"""{seen.left} bytes are still alive on rank {rank} after the step, beside the weights, the gradient and
        `state`: state is kept in `state`, and what is gathered or reduced is let go"""
    require(seen.left == 0, str(case), left)


def _require_bytes(case: Case, rank: int, calls: list[Call]) -> None:
    wire, due = sent(calls), wire_of("all_reduce", case.length, case.ranks, rank)
    words = (
        f"rank {rank} sends {wire} bytes a step, and 2P(N - 1)/N elements are {due} here: it calls {operations(calls)}"
    )
    if any(call.operation == "all_reduce" for call in calls):
        words += """. An all-reduce brings every rank the gradient of all weights, and each steps one shard: a
            reduce-scatter brings that, for half the bytes"""
    else:
        words += ", where one reduce-scatter and one all-gather of P elements are enough"
    require(wire == due, str(case), words)


def _scoreboard(function) -> Scoreboard:
    case = Case(4, 4096)
    board = Scoreboard(f"ZeRO-1, SGD with momentum: {many(case.ranks)}, P = {case.length:,}", SOURCE)
    last = [steps[-1] for steps in _run(function, case)]
    calls = max(sum(call.account != SCALAR for call in seen.calls) for seen in last)
    board.add("collectives a step", calls, 2)
    wire = wire_of("all_reduce", case.length, case.ranks, 0)
    board.add("bytes sent by each rank a step, 2P(N - 1)/N elements", max(sent(s.calls) for s in last), wire, "bytes")
    state = max(sum(elements for elements, _ in seen.held.values()) for seen in last)
    board.add("elements of optimizer state of a rank, P/N", state, case.length // case.ranks)
    return board
