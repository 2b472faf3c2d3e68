"""Memory of one rank by formula, by the categories of a Report: what it is made of, and what tp, pp, dp, ZeRO and
recompute leave of it.

Model states are a number of bytes for each parameter, which ZeRO divides unit by unit. Activations are what each piece
of the model keeps (`cost.activations`), for all micro-batches in flight. Both are exact to the byte. What lives only
inside an operation, or while a message is under way, is temporary: of that the large parts are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, listed, tp_degrees
from pcourse.cost.activations import Run, kept_by_embedding, kept_by_head, kept_by_layer, sizes
from pcourse.cost.layers import StateBytes, bytes_per_parameter
from pcourse.cost.units import units
from pcourse.parallel.partition import Part, stages_of
from pcourse.parallel.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from pcourse.report import MemoryLedger
from pcourse.split import shard_sizes

DIVIDED_FROM = StateBytes(parameters=3, gradients=2, optimizer=1)  # the ZeRO stage (Rajbhandari et al. 2020, section 5)


# --- model states -----------------------------------------------------------------------------------------------------


def states(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> StateBytes:
    """Bytes of the parameters, gradients and optimizer state of `rank`, exact."""
    require(model, parallel, train, rank)
    gradients = parallel.grad_dtype
    if gradients == "both" and parallel.zero >= DIVIDED_FROM.gradients:
        gradients = "float32"  # those in the model's dtype live until their unit is reduced, and are temporary
    each = bytes_per_parameter(model.dtype, train.optimizer, gradients, parallel.master_weights)
    held = units(model, parallel, train, rank).values()
    return divided(held, each, parallel.zero, parallel.dp, dp_rank(parallel, rank))


def divided(held: Iterable[int], each: StateBytes, zero: int, dp: int, rank: int = 0) -> StateBytes:
    """Bytes of the model states on one of `dp` replicas: the optimizer's are divided from ZeRO's stage 1 on, gradients
    from stage 2, parameters from stage 3.

    `held` are numbers of parameters, one for each unit, which is divided by itself. P parameters of 16 bytes come to
    4P + 12P/N, 2P + 14P/N and 16P/N (Rajbhandari et al. 2020, figure 1).
    """
    held = tuple(held)
    whole, share = sum(held), sum(shard_sizes(unit, dp)[rank] for unit in held)
    return StateBytes(*(n * (share if zero >= stage else whole) for n, stage in zip(each, DIVIDED_FROM, strict=True)))


# --- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Bytes kept for backward at the moment when they are most, for each (piece, part) of the model.

    `in_flight` is how many micro-batches they are of, a chunk of v counting 1/v.
    """

    bytes: dict[tuple[str, str], int]
    in_flight: float

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def pieces(self) -> dict[str, int]:
        """By piece: the embedding, each layer, the head."""
        return self._sums(0)

    @property
    def parts(self) -> dict[str, int]:
        """By part: norms, attention, scores, mlp, logits, …, all layers together."""
        return self._sums(1)

    def _sums(self, by: int) -> dict[str, int]:
        sums: Counter = Counter()
        for key, nbytes in self.bytes.items():
            sums[key[by]] += nbytes
        return dict(sums)


def activations(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> Activations:
    """What `rank` keeps for backward at its peak: a walk through its schedule, in which a forward pass adds what it
    keeps and a backward pass, from the last part to the first, runs again what is recomputed and frees the rest."""
    require(model, parallel, train, rank)
    schedule, parts = stages_of(model, parallel, train)
    stage = parallel.stage_of(rank)
    replica_batch = shard_sizes(train.batch, parallel.dp)[dp_rank(parallel, rank)]
    micro_batches = shard_sizes(replica_batch, parallel.micro_batches)

    @cache
    def kept(chunk: int, sequences: int) -> tuple[tuple[str, Run], ...]:
        return tuple(_runs(parts[schedule.position(stage, chunk)], model, parallel, sequences, rank % parallel.tp))

    held: Counter = Counter()
    most, peak, in_flight = 0, Activations({}, 0.0), 0
    for kind, k, chunk in schedule.orders[stage]:
        in_flight += kind == FORWARD
        for changes in _changes(kind, kept(chunk, micro_batches[k])):
            held.update(changes)
            if held.total() > most:
                most, peak = held.total(), Activations(dict(held), in_flight / schedule.chunks)
        in_flight -= kind not in (FORWARD, BACKWARD_INPUT)
    return peak


def _runs(part: Part, model: ModelConfig, parallel: ParallelConfig, sequences: int, tp_rank: int) -> Iterator:
    """(piece, Run) of one part of the model, in the order of a forward pass."""
    share = {"tp": parallel.tp, "tp_rank": tp_rank, "sequence_parallel": parallel.sequence_parallel}
    own = sizes(model, sequences, **share)
    if part.embedding:
        yield from (("embedding", run) for run in kept_by_embedding(model, own))
    for layer in part.layers:
        policy = parallel.recompute if layer % parallel.recompute_every == 0 else "none"
        yield from ((f"layer {layer}", run) for run in kept_by_layer(model, own, policy))
    if part.head:
        yield from (("head", run) for run in kept_by_head(model, own))


def _changes(kind: str, runs: tuple[tuple[str, Run], ...]) -> Iterator[dict]:
    """What one compute adds to what is kept, and takes away, step by step."""
    if kind == FORWARD:
        yield _sum((piece, part.part, part.kept) for piece, run in runs for part in run)
    elif kind == BACKWARD_WEIGHT:
        yield _sum((piece, part.part, -part.later) for piece, run in runs for part in run)
    else:
        for piece, run in reversed(runs):
            yield _sum((piece, part.part, part.again) for part in run)
            for part in reversed(run):
                left = part.later if kind == BACKWARD_INPUT else 0
                yield {(piece, part.part): left - part.kept - part.again}


def _sum(changes: Iterable[tuple[str, str, int]]) -> Counter:
    sums: Counter = Counter()
    for piece, part, nbytes in changes:
        sums[piece, part] += nbytes
    return sums


# --- all together -----------------------------------------------------------------------------------------------------


def memory(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> MemoryLedger:
    """The ledger of `rank`, to be held beside the one that a Report has of it."""
    return MemoryLedger(
        **states(model, parallel, train, rank)._asdict(),
        activations=activations(model, parallel, train, rank).total,
    )


def dp_rank(parallel: ParallelConfig, rank: int) -> int:
    """Which replica `rank` belongs to: the ranks count along tp first, then cp, pp and dp."""
    return rank // (parallel.tp * parallel.cp * parallel.pp)


def require(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int) -> None:
    """Raises ConfigError where there is no such rank, or no formula."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < parallel.ranks:
        raise ConfigError(f"rank={rank!r} is none of the {parallel.ranks} ranks; rank can be 0 to {parallel.ranks - 1}")
    if parallel.cp > 1:
        raise ConfigError(f"there is no formula yet for the memory of cp={parallel.cp}; cp can be 1")
    if parallel.tp not in (legal := tp_degrees(model)):
        raise ConfigError(f"{model.kv_heads} kv_heads do not split over tp={parallel.tp}; tp can be {listed(legal)}")
    if train.batch < parallel.dp * parallel.micro_batches:
        raise ConfigError(
            f"batch={train.batch} sequences cannot fill dp={parallel.dp} replicas of micro_batches="
            f"{parallel.micro_batches}; batch can be {parallel.dp * parallel.micro_batches} or more"
        )
