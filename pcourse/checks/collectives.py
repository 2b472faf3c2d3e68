"""Checks of exercise 02, the ring all-reduce: each phase alone, then the whole.

A result is read as a sum: how often is each rank's input in it (`shares`)? A fault in the order of the ring, a mean
and a lost message each leave their own pattern.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pcourse.checks import (
    ITEM,
    SOURCE,
    calls_of,
    close,
    fail,
    many,
    on_ranks,
    random,
    ranks,
    require,
    shares,
    times,
    wire_of,
)
from pcourse.comm import Comm
from pcourse.lab.check import Scoreboard, check
from pcourse.meter import MemoryMeter
from pcourse.recorder import Call
from pcourse.split import shard_range, shard_sizes


@dataclass(frozen=True)
class Case:
    """`ranks` ranks, each with an input of this shape, one after the other; `transposed` is not contiguous."""

    ranks: int
    shape: tuple[int, ...]
    transposed: bool = False

    def __str__(self) -> str:
        how = ", a transposed view" if self.transposed else ""
        return f"{many(self.ranks)}, x[{', '.join(map(str, self.shape))}]{how}"

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    def input(self, rank: int) -> torch.Tensor:
        x = random(rank, *(self.shape[::-1] if self.transposed else self.shape))
        return x.t() if self.transposed else x

    def inputs(self) -> list[torch.Tensor]:
        return [self.input(rank) for rank in range(self.ranks)]

    def chunk(self, index: int) -> slice:
        span = shard_range(self.length, self.ranks, index)
        return slice(span.start, span.stop)


EVEN = [Case(3, (18,)), Case(2, (12,)), Case(4, (28,))]
UNEVEN = [Case(4, (27,)), Case(3, (20,)), Case(4, (3,)), Case(1, (5,))]
SHAPED = [Case(2, (4, 5)), Case(3, (5, 4), transposed=True), Case(3, (0,))]


# --- the first phase -----------------------------------------------------------------------------------------------


@check
def ring_reduce_scatter(function):
    """In N - 1 steps chunk r on rank r becomes the sum over all ranks."""
    for case in EVEN + UNEVEN:
        results = on_ranks(str(case), case.ranks, _reduce_scatter_program, function, case)
        for rank, (chunks, given, calls) in enumerate(results):
            _require_only_messages(case, rank, calls, "ring_reduce_scatter")
            _require_summed(case, rank, chunks, _steps(calls, case.ranks - 1))
            require(
                close(given[rank], chunks[rank]),
                str(case),
                f"""rank {rank} puts a new tensor into the list, and the chunk that it was given does not change: the
                    contract says in place, so add with += or add_""",
            )
        for rank, (_, _, calls) in enumerate(results):
            nbytes = wire_of("reduce_scatter", case.length, case.ranks, rank)
            _require_ring(case, rank, calls, nbytes, case.ranks - 1)


def _reduce_scatter_program(comm: Comm, function, case: Case):
    given = [case.input(comm.rank)[case.chunk(c)].clone() for c in range(case.ranks)]
    chunks = list(given)
    function(comm, chunks)
    return chunks, given, calls_of(comm)


def _require_summed(case: Case, rank: int, chunks, steps: str) -> None:
    parts = case.inputs()
    expected = sum(parts)[case.chunk(rank)]
    if close(chunks[rank], expected):
        return
    whole = [c for c in range(case.ranks) if close(chunks[c], sum(parts)[case.chunk(c)])]
    if whole:
        words = f"""rank {rank} ends with the sum of chunk {whole[0]}, and the contract gives it chunk {rank}: the
            chunk index is off by {(whole[0] - rank) % case.ranks}. Rank r sends chunk r - 1 first, so that chunk r
            ends here"""
    else:
        words = _contents(chunks[rank], [p[case.chunk(rank)] for p in parts], rank, f"chunk {rank}")
    fail(str(case), f"{words}{steps}")


# --- the second phase ----------------------------------------------------------------------------------------------


@check
def ring_all_gather(function):
    """In N - 1 steps every rank has every finished chunk."""
    for case in EVEN + UNEVEN:
        results = on_ranks(str(case), case.ranks, _all_gather_program, function, case)
        for rank, (chunks, calls) in enumerate(results):
            _require_only_messages(case, rank, calls, "ring_all_gather")
            for c in range(case.ranks):
                _require_gathered(case, rank, chunks, c, _steps(calls, case.ranks - 1))
        for rank, (_, calls) in enumerate(results):
            nbytes = wire_of("all_gather", case.length, case.ranks, rank)
            _require_ring(case, rank, calls, nbytes, case.ranks - 1)


def _unfinished(rank: int) -> float:
    return 1000.0 + rank  # what lies in the chunks that rank has not got yet


def _all_gather_program(comm: Comm, function, case: Case):
    finished = case.input(0)
    chunks = [torch.full_like(finished[case.chunk(c)], _unfinished(comm.rank)) for c in range(case.ranks)]
    chunks[comm.rank].copy_(finished[case.chunk(comm.rank)])
    function(comm, chunks)
    return chunks, calls_of(comm)


def _require_gathered(case: Case, rank: int, chunks, c: int, steps: str) -> None:
    finished = [case.input(0)[case.chunk(d)] for d in range(case.ranks)]
    got, expected = chunks[c], finished[c]
    if close(got, expected):
        return
    owners = [q for q in range(case.ranks) if close(got, torch.full_like(got, _unfinished(q)))]
    places = [d for d in range(case.ranks) if close(got, finished[d])]
    what = f"chunk {c} on rank {rank}" + (", its own and finished," if c == rank else "")
    if got.shape != expected.shape:
        words = f"{what} has shape {list(got.shape)}, and it must be {list(expected.shape)}"
    elif places:
        words = f"""{what} holds what belongs in chunk {places[0]}: the chunk index is off, where it is sent or where it
            is received. Each step passes on the chunk that arrived in the step before"""
    elif owners == [rank]:
        words = f"{what} was never filled"
    elif owners:
        words = f"""{what} holds rank {owners[0]}'s values from before they were finished: a rank sends its own chunk r
            first, and then in each step the one that it has just received"""
    elif close(got - expected, (got - expected).mean().expand(got.shape)):
        words = f"""{what} is the finished chunk plus what lay there before: in this phase what arrives replaces, as it
            is summed already"""
    else:
        words = f"{what} is not the finished chunk of rank {c}"
    fail(str(case), f"{words}{steps}")


# --- the whole -----------------------------------------------------------------------------------------------------


@check
def ring_all_reduce(function):
    """Every rank has the same sum, to the bit, and each sent 2S(N - 1)/N bytes in 2(N - 1) messages."""
    for case in EVEN + UNEVEN + SHAPED:
        results = on_ranks(str(case), case.ranks, _all_reduce_program, function, case)
        for rank, (_, calls, _) in enumerate(results):
            _require_only_messages(case, rank, calls, "ring_all_reduce")
        for rank, (got, _, _) in enumerate(results):
            _require_all_reduced(case, rank, got, _steps(results[rank][1], 2 * (case.ranks - 1)))
        for rank, (_, _, changed) in enumerate(results):
            rule = "a collective leaves its input alone, so work on a copy"
            require(not changed, str(case), f"x itself was changed in place on rank {rank}: {rule}")
        for rank, (got, calls, _) in enumerate(results):
            nbytes = wire_of("all_reduce", case.length, case.ranks, rank)
            _require_ring(case, rank, calls, nbytes, 2 * (case.ranks - 1))
            rule = "each chunk must be summed once, by one rank, and then copied"
            same = torch.equal(got, results[0][0])
            require(same, str(case), f"ranks 0 and {rank} differ in the last bits: {rule}")
    return _scoreboard(function)


def _all_reduce_program(comm: Comm, function, case: Case):
    x = case.input(comm.rank)
    before = x.clone()
    got = function(comm, x)
    return got, calls_of(comm), not torch.equal(x, before)


def _scoreboard(function) -> Scoreboard:
    case = Case(4, (8192,))
    costs = on_ranks(str(case), case.ranks, _cost_program, function, case)
    messages, wire, memory = (max(column) for column in zip(*costs, strict=True))
    nbytes = case.length * ITEM
    board = Scoreboard(f"ring all-reduce: {case}", SOURCE)
    board.add("messages sent by each rank, 2(N - 1)", messages, 2 * (case.ranks - 1))
    board.add("bytes sent by each rank, 2S(N - 1)/N", wire, 2 * nbytes * (case.ranks - 1) // case.ranks, unit="bytes")
    target = nbytes + 2 * nbytes // case.ranks  # Python lets go of an arrived chunk only when the next one is there
    board.add("most memory beside x, S + 2S/N", memory, target, unit="bytes")
    return board


def _cost_program(comm: Comm, function, case: Case) -> tuple[int, int, int]:
    x = case.input(comm.rank)
    with MemoryMeter() as meter:
        meter.see(x, "parameters")  # so that what is temporary is what the function allocates
        function(comm, x)
    sends = _sends(calls_of(comm))
    return len(sends), sum(call.wire for call in sends), meter.ledger().temporary


def _require_all_reduced(case: Case, rank: int, got, steps: str) -> None:
    parts = case.inputs()
    expected = sum(parts)
    _require_shape(case, rank, got, expected)
    if close(got, expected):
        return
    got, parts = got.reshape(-1), [p.reshape(-1) for p in parts]
    right = [close(got[case.chunk(c)], sum(parts)[case.chunk(c)]) for c in range(case.ranks)]
    covered = case.length // case.ranks * case.ranks
    if covered < case.length and close(got[:covered], sum(parts)[:covered]):
        words = f"""the last {case.length - covered} of {case.length} elements are not summed: chunks of
            {case.length} // {case.ranks} elements drop the tail. The chunks are
            {shard_sizes(case.length, case.ranks)}"""
    elif right == [c == rank for c in range(case.ranks)]:
        words = f"""only chunk {rank}, this rank's own, is the sum on rank {rank}: the reduce-scatter is right, and the
            all-gather does not bring the finished chunks of the others"""
    elif close(got, parts[rank]) and not steps:
        words = f"""all messages are sent, and yet the result on rank {rank} is still this rank's own x: are the chunks
            that you fill views of what you return? chunks[c] = chunks[c] + … puts a new tensor into the list"""
    else:
        words = _contents(got, parts, rank, "the result") if shares(got, parts) else _by_chunk(case, rank, got, parts)
    fail(str(case), f"{words}{steps}")


def _require_shape(case: Case, rank: int, got, expected) -> None:
    if not isinstance(got, torch.Tensor):
        fail(str(case), f"rank {rank} returns {type(got).__name__}, not a tensor: is a `return` missing?")
    words = f"rank {rank} returns shape {list(got.shape)}, and the result has the shape of x, {list(expected.shape)}"
    owned = expected.reshape(-1)[case.chunk(rank)]
    if got.shape != expected.shape and close(got, owned):
        words = f"rank {rank} returns chunk {rank} alone: that is a reduce-scatter, and the all-gather is missing"
    require(got.shape == expected.shape, str(case), words)
    require(got.dtype == expected.dtype, str(case), f"x is {expected.dtype} and rank {rank} returns {got.dtype}")


def _by_chunk(case: Case, rank: int, got, parts) -> str:
    for c in range(case.ranks):
        part, expected = got[case.chunk(c)], [p[case.chunk(c)] for p in parts]
        if not close(part, sum(expected)):
            return _contents(part, expected, rank, f"chunk {c}")
    return f"the result on rank {rank} is not the sum over the ranks"


def _contents(got: torch.Tensor, parts, rank: int, what: str) -> str:
    """What `got` is made of, where it should be the sum of `parts`."""
    size = len(parts)
    counts = shares(got, parts)
    where = f"{what} on rank {rank}"
    if counts is None:
        return f"{where} is not the sum over the ranks, nor a sum of some of their inputs: do chunks get mixed up?"
    if all(math.isclose(count, 1 / size, rel_tol=1e-4) for count in counts):
        return f"{where} is the sum divided by {size}: a mean, where the contract asks for the sum"
    lacking = [q for q in range(size) if counts[q] == 0]
    if lacking == [q for q in range(size) if q != rank]:
        return f"{where} is still this rank's own x: nothing that arrived was added to it"
    if rank in lacking:
        return f"""{where} lacks this rank's own x: what arrives must be added to your chunk, and here it replaces it
            (it holds {_holders(lacking, size)})"""
    if lacking:
        return f"{where} lacks the x of {ranks(lacking)}: a partial sum, as the ring has not gone round"
    double = [f"rank {q}'s x {times(counts[q])}" for q in range(size) if counts[q] != 1]
    return f"{where} counts {', '.join(double)}"


def _holders(lacking: list[int], size: int) -> str:
    holders = [q for q in range(size) if q not in lacking]
    return f"only the x of {ranks(holders)}" if holders else "nothing"


# --- messages and bytes --------------------------------------------------------------------------------------------


def _sends(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.operation == "send"]


def _steps(calls: list[Call], due: int) -> str:
    """A clue beside a wrong value: the number of messages, where it is wrong too."""
    sent = len(_sends(calls))
    return "" if sent == due else f" (messages sent: {sent}, where {due} steps of one message each are due)"


def _require_only_messages(case: Case, rank: int, calls: list[Call], name: str) -> None:
    foreign = [call.operation for call in calls if call.operation not in ("send", "recv")]
    rule = "here it is built from isend and irecv"
    require(not foreign, str(case), f"{name} calls comm.{foreign[0] if foreign else ''} on rank {rank}: {rule}")


def _require_ring(case: Case, rank: int, calls: list[Call], nbytes: int, steps: int) -> None:
    sends = _sends(calls)
    right = (rank + 1) % case.ranks
    elsewhere = sorted({call.key[1][1] for call in sends} - {right})
    require(
        not elsewhere,
        str(case),
        f"""rank {rank} sends to {ranks(elsewhere or [0])}: in this ring a rank sends to its right neighbour r + 1
        alone, here rank {right}, and receives from its left""",
    )
    whole = case.length * ITEM
    wire = sum(call.wire for call in sends)
    words = f"rank {rank} sends {wire} bytes, and the ring needs {nbytes} (S = {whole} bytes)"
    if wire == (case.ranks - 1) * whole and all(call.wire == whole for call in sends):
        words += ": (N - 1)S, as every rank's whole x goes round. Send one chunk of S/N a step"
    elif len(sends) > steps:
        words += f": it sends {len(sends)} messages, and the ring takes {steps} steps of one message each"
    elif wire > nbytes and case.length % case.ranks:
        words += f": do you pad? The chunks are {shard_sizes(case.length, case.ranks)} elements, none of them padded"
    require(wire == nbytes and len(sends) <= steps, str(case), words)
