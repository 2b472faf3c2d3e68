"""Memory of one rank by formula, by the categories of a Report: what it is made of, and what tp, pp, dp, ZeRO and
recompute leave of it.

Model states are a number of bytes for each parameter, which ZeRO divides unit by unit. Activations are what each piece
of the model keeps (`cost.activations`), for all micro-batches in flight. Both are exact to the byte. What lives only
inside an operation, or while a message is under way, is the residual: its large parts are named in `cost.temporary`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from numbers import Integral

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, listed, tp_degrees
from pcourse.cost.moments import Walk, sizes_on
from pcourse.cost.states import StateBytes, bytes_of_states, divided
from pcourse.cost.temporary import gathered, optimizer_step, passing, tied_gradient, unreduced
from pcourse.cost.units import TIED, units
from pcourse.report import CATEGORIES, MemoryLedger


def memory(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> MemoryLedger:
    """The ledger of `rank`, field by field as a Report has it.

    Parameters, gradients, optimizer and activations are exact; `temporary` and `peak` are as good as the parts that
    `cost.temporary` names. Raises ConfigError where there is no such rank, or no formula.
    """
    of_unit = unit_states(model, parallel, train, rank)
    parameters, gradients, optimizer = _sum(of_unit)
    walk = Walk(model, parallel, train, rank)
    moments = [
        (sum(of_unit[name].gradients for name in moment.with_gradient), moment.kept, moment.temporary)
        for moment in walk
    ]
    moments.append((gradients, 0, optimizer_step(walk.held, model, walk.sizes[0], parallel, train)))
    most = max(moments, key=sum)
    at_peak = dict(zip(CATEGORIES, (parameters, most[0], optimizer, most[1], most[2]), strict=True))
    return MemoryLedger(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=max(kept for _, kept, _ in moments),
        temporary=max(temporary for _, _, temporary in moments),
        peak=sum(at_peak.values()),
        at_peak=at_peak,
    )


# --- model states -----------------------------------------------------------------------------------------------------


def states(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> StateBytes:
    """Bytes of the parameters, gradients and optimizer state of `rank`, exact."""
    return _sum(unit_states(model, parallel, train, rank))


def _sum(of_unit: dict[str, StateBytes]) -> StateBytes:
    return StateBytes(*(sum(category) for category in zip(*of_unit.values(), strict=True)))


def unit_states(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0
) -> dict[str, StateBytes]:
    """{unit: its bytes on `rank`}; see `pcourse.cost.units`."""
    require(model, parallel, train, rank)
    each = bytes_of_states(model, parallel, train.optimizer)
    replica = parallel.replica_of(rank)
    held = units(model, parallel, train, rank).items()
    return {name: divided(unit, each, parallel.zero, parallel.dp, replica) for name, unit in held}


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
        """By part (norm; attention: projection, q, k, v, scores, output; …), that of all pieces together."""
        return self._sums(1)

    @property
    def groups(self) -> dict[str, int]:
        """By group of parts: norm, attention, mlp, …"""
        sums: Counter = Counter()
        for part, nbytes in self.parts.items():
            sums[part.split(":")[0]] += nbytes
        return dict(sums)

    def _sums(self, by: int) -> dict[str, int]:
        sums: Counter = Counter()
        for key, nbytes in self.bytes.items():
            sums[key[by]] += nbytes
        return dict(sums)


def activations(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> Activations:
    """What `rank` keeps for backward at its peak, exact."""
    require(model, parallel, train, rank)
    most, peak = 0, Activations({}, 0.0)
    for moment in Walk(model, parallel, train, rank):
        if moment.kept > most:
            most, peak = moment.kept, Activations(dict(moment.by_part), moment.in_flight)
    return peak


def residual(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> dict[str, int]:
    """What is temporary, in bytes by name, each at its own largest: they do not all come at one time."""
    require(model, parallel, train, rank)
    held, largest = units(model, parallel, train, rank), sizes_on(model, parallel, train, rank)[0]
    names = [name for name in held if name != TIED]
    parts = [part for name in names for part in passing(name, model, largest).values()]
    return {
        "one operation, forward": max(part.forward for part in parts),
        "one operation, backward": max(part.backward for part in parts),
        "gathered parameters": max(gathered(names, at, -1, held, model, parallel) for at in range(len(names))),
        "unreduced gradients": max(sum(unreduced(unit, model, parallel)[:2]) for unit in held.values()),
        "tied matrix's gradient": tied_gradient(held, model),
        "optimizer step": optimizer_step(held, model, largest, parallel, train),
    }


def require(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int) -> None:
    """Raises ConfigError where there is no such rank, or no formula."""
    if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < parallel.ranks:
        raise ConfigError(f"rank={rank!r} is none of {parallel.ranks} ranks; rank can be 0 to {parallel.ranks - 1}")
    if parallel.cp > 1:
        raise ConfigError(f"there is no formula yet for the memory of cp={parallel.cp}; cp can be 1")
    if parallel.tp not in (legal := tp_degrees(model)):
        raise ConfigError(f"{model.kv_heads} kv_heads do not split over tp={parallel.tp}; tp can be {listed(legal)}")
    if train.batch < parallel.dp * parallel.micro_batches:
        least = parallel.dp * parallel.micro_batches
        raise ConfigError(
            f"batch={train.batch} sequences cannot fill micro_batches={parallel.micro_batches} on each of "
            f"dp={parallel.dp} replicas; batch can be {least} or more"
        )
