"""Checks of exercise 06, broken training, program A: the global norm of sharded and replicated gradients.

The square of a norm is a sum of each rank's shards and of the replicas. Each usual fault has a value of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose, sqrt

import torch

from pcourse.checks import (
    ITEM,
    calls_of,
    fail,
    many,
    not_mended,
    on_ranks,
    operations,
    random,
    require,
    shares,
    times,
)
from pcourse.comm import Comm
from pcourse.lab.check import Scoreboard, check
from pcourse.recorder import Call
from pcourse.split import shard_range
from pcourse.wording import number_text

LARGE, SMALL = (17, 10), (8, 6)  # elements of the gradients that are cut, and of those that are not


@dataclass(frozen=True)
class Case:
    ranks: int
    limit: float

    def __str__(self) -> str:
        return f"{many(self.ranks)}, limit {number_text(self.limit)}"

    def shards(self, rank: int) -> list[torch.Tensor]:
        spans = [shard_range(n, self.ranks, rank) for n in LARGE]
        return [random(130 + i, n)[span.start : span.stop].clone() for i, (n, span) in enumerate(zip(LARGE, spans))]

    def replicas(self) -> list[torch.Tensor]:
        return [random(140 + i, n) for i, n in enumerate(SMALL)]

    @property
    def squares(self) -> tuple[list[float], float]:
        """The sum of squares of each rank's shards, and that of the replicas."""
        return [_squares(self.shards(rank)) for rank in range(self.ranks)], _squares(self.replicas())

    @property
    def norm(self) -> float:
        cut, whole = self.squares
        return sqrt(sum(cut) + whole)


def _squares(gradients) -> float:
    return sum(g.square().sum().item() for g in gradients)


# On 4 ranks a limit of 9 lies between the norm and the one that has the replicas 4 times.
CASES = [Case(4, 1.0), Case(2, 1.0), Case(4, 9.0), Case(3, 1000.0), Case(1, 1.0)]


@dataclass(frozen=True)
class _Seen:
    norm: object
    shards: list[torch.Tensor]
    replicas: list[torch.Tensor]
    calls: list[Call]


def _program(comm: Comm, function, case: Case) -> _Seen:
    shards, replicas = case.shards(comm.rank), case.replicas()
    norm = function(comm, list(shards), list(replicas), case.limit)
    return _Seen(norm, shards, replicas, calls_of(comm))


@check
def clip_gradients(function):
    """The norm is that of one device, and all gradients are scaled by one factor."""
    for case in CASES:
        seen = on_ranks(str(case), case.ranks, _program, function, case)
        for rank in range(case.ranks):
            _require_norm(function, case, rank, seen[rank])
        for rank in range(case.ranks):
            _require_scaled(case, rank, seen[rank])
            _require_one_number(case, rank, seen[rank].calls)
    board = Scoreboard("clipping: the norm over one device's", "measured on ranks that are threads of this process")
    for size in (2, 4, 8):
        case = Case(size, 1.0)
        first = on_ranks(str(case), size, _program, function, case)[0]
        board.add(f"{size} ranks", round(float(first.norm) / case.norm, 6), 1)
    board.add("bytes of what is all-reduced", sum(call.payload for call in first.calls), ITEM, "bytes")
    return board


def _require_norm(function, case: Case, rank: int, seen: _Seen) -> None:
    number = isinstance(seen.norm, (int, float)) or isinstance(seen.norm, torch.Tensor) and seen.norm.numel() == 1
    words = f"rank {rank} returns {type(seen.norm).__name__}, and it must return the norm, a number"
    require(number, str(case), words)
    got, due = float(seen.norm), case.norm
    if isclose(got, due, rel_tol=1e-6):
        return
    told = f"the norm on rank {rank} is {got:.4g}, and one device's is {due:.4g}"
    cut, whole = case.squares
    if isclose(got, sqrt(sum(cut) + case.ranks * whole), rel_tol=1e-6):
        not_mended(function, str(case), f"{told}. Before clipping, all gradients are right")
    fail(str(case), told + _why_norm(case, rank, got))


def _why_norm(case: Case, rank: int, got: float) -> str:
    cut, whole = case.squares
    total, n = sum(cut), case.ranks
    sharing = "Sum over the ranks the squares of what is cut, and add those of what is whole once"
    candidates = {
        f": its own shards alone are in it, so that each rank clips by another norm. {sharing}": sqrt(
            cut[rank] + whole
        ),
        f": the sum is divided by {n}, the shards with it, which are in it once already. {sharing}": sqrt(
            total / n + whole
        ),
        f": the norm is divided by {n}. {sharing}": sqrt(total + n * whole) / n,
        f": it is divided by the root of {n} once more. {sharing}": sqrt((total + whole) / n),
        ": the replicas are not in it": sqrt(total),
        f": the replicas are in it 1/{n} times: divide by N only what N ranks add up": sqrt(total + whole / n),
        f": everything is in it {n} times": sqrt(n * (total + whole)),
        ": it is the sum of squares. The norm is its root": total + whole,
        ": it is the sum of the ranks' norms. Squares add up, norms do not": sum(sqrt(c + whole) for c in cut),
        ": it is the sum of norms. Squares add up, norms do not": sum(sqrt(c) for c in cut) + sqrt(whole),
        ": it is the largest of the ranks' norms. The shards are different gradients, whose squares add up": max(
            sqrt(c + whole) for c in cut
        ),
        ": it is the norm after clipping, and the contract asks for the one before": min(case.limit, case.norm),
    }
    return next((words for words, value in candidates.items() if isclose(got, value, rel_tol=1e-6)), "")


def _require_scaled(case: Case, rank: int, seen: _Seen) -> None:
    due = min(1.0, case.limit / case.norm)
    kinds = {"shards": (seen.shards, case.shards(rank)), "replicas": (seen.replicas, case.replicas())}
    found = {kind: (shares(torch.cat(got), [torch.cat(before)]) or [None])[0] for kind, (got, before) in kinds.items()}
    if all(count is not None and isclose(count, due, abs_tol=2e-6) for count in found.values()):
        return
    words = f"the norm is right, and on rank {rank} the gradients are not scaled by {due:.4g}"
    if all(count == 1 for count in found.values()):
        words = f"{words}: they are as before. Scale them in place: g *= …, and not g = g * …"
    elif None not in found.values() and due == 1:
        words = f"the norm is below the limit, and on rank {rank} the gradients are scaled {times(found['shards'])}"
        words += ": clipping makes gradients shorter, and never longer"
    else:
        for kind, count in found.items():
            if count is None:
                words = f"on rank {rank} the {kind} are not scaled by one factor"
            elif not isclose(count, due, abs_tol=2e-6):
                words = f"the norm is right, and on rank {rank} the {kind} are scaled {count:.4g} times, not {due:.4g}"
                words = f"on rank {rank} the {kind} are not scaled, and the others are" if count == 1 else words
                break
    fail(str(case), words)


def _require_one_number(case: Case, rank: int, calls: list[Call]) -> None:
    nbytes = sum(call.payload for call in calls)
    words = f"rank {rank} communicates {nbytes} bytes ({operations(calls)}): one number is enough, a sum of squares"
    require(nbytes <= ITEM, str(case), words)


def numbers(function) -> tuple[str, list[list], bool, bool]:
    """One run beside one device: its title, rows of label, ranks', one device's; whether all is right; ranks agree."""
    case = Case(4, 1.0)
    seen = on_ranks(str(case), case.ranks, _program, function, case)
    norms = [float("nan") if rank.norm is None else float(rank.norm) for rank in seen]
    left = sqrt(sum(_squares(rank.shards) for rank in seen) + _squares(seen[0].replicas))
    rows = [
        ["gradient norm before clipping", norms[0], case.norm],
        ["gradient norm after clipping", left, min(case.limit, case.norm)],
    ]
    return str(case), rows, isclose(norms[0], case.norm, rel_tol=1e-6), isclose(min(norms), max(norms), rel_tol=1e-6)
