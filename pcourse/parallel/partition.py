"""Which pieces of the model each part of a pipeline holds: contiguous, every layer on exactly one part.

A part is a stage, or a chunk where stages hold several. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from operator import add

from pcourse.config import PARTITIONS, ConfigError, ModelConfig, ParallelConfig, TrainConfig, listed
from pcourse.cost.layers import Piece, pieces
from pcourse.cost.states import bytes_on_a_replica, model_states
from pcourse.parallel.schedule_check import peak_in_flight
from pcourse.parallel.schedules import Schedule, check_sizes, make_schedule
from pcourse.split import micro_batches


@dataclass(frozen=True)
class Part:
    """`layers` in model order, from 0, with the embedding before them and the head after them if it holds those."""

    embedding: bool
    layers: range
    head: bool

    def pieces(self, all_pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Its own among `all_pieces`, which `pcourse.cost.layers.pieces` gives: embedding, layers, head."""
        return all_pieces[self.layers.start + (not self.embedding) : self.layers.stop + 1 + self.head]

    def __str__(self):
        first, last = self.layers.start, self.layers.stop - 1
        layers = {0: [], 1: [f"layer {first}"]}.get(len(self.layers), [f"layers {first}-{last}"])
        return ", ".join(["embedding"] * self.embedding + layers + ["head"] * self.head)


def partition(
    model: ModelConfig,
    parts: int,
    rule: str = "uniform",
    *,
    sequences: int = 1,
    in_flight: Sequence[float] | None = None,
    optimizer: str = "adamw",
    parallel: ParallelConfig | None = None,
) -> tuple[Part, ...]:
    """Cut `model` into `parts` parts by one of three rules.

    - `uniform`: as many layers on each part, whatever they weigh; where the number does not divide, the middle parts
      take one more, as the ends also hold the embedding and the head.
    - `compute`: the smallest possible largest `part_flops`.
    - `memory`: the smallest possible largest `part_bytes`, with micro-batches of `sequences` and `in_flight[i]` of them
      held by part i at its peak (one each if left out); or what tensor parallelism, ZeRO, mixed precision and recompute
      leave of those bytes in `parallel`.

    The last two cut between any two pieces, so a part may hold the embedding alone or the head alone. Raises
    ConfigError for parts that would stay empty, with the numbers that would do.
    """
    _require(model, parts, rule, in_flight)
    if rule == "uniform":
        return parts_of(_uniform(model.layers, parts), model)
    if rule == "compute":
        return parts_of(balance([piece.flops for piece in pieces(model, sequences)], parts), model)
    held = in_flight if in_flight is not None else [1] * parts
    split = parallel or ParallelConfig()
    recompute = {"recompute": split.recompute, "recompute_every": split.recompute_every}
    states = bytes_on_a_replica(model, split, optimizer)
    # A tied matrix counts twice here: its two pieces meet on one part only where there is no choice.
    costs = [
        [states * piece.parameters + n * piece.activations for n in held]
        for piece in pieces(model, sequences, tp=split.tp, **recompute)
    ]
    return parts_of(balance(costs, parts), model)


def stages_of(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> tuple[Schedule, tuple[Part, ...]]:
    """The schedule, and which part of the model stands at each of its positions.

    Raises ConfigError where the schedule does not exist, or a part would stay empty.
    """
    sizes = parallel.pp, parallel.micro_batches, parallel.chunks
    check_sizes(parallel.schedule, *sizes, batch=train.batch // parallel.dp)
    _require_layers(model, parallel, train)
    schedule = make_schedule(parallel.schedule, *sizes)
    held = [peak_in_flight(schedule, schedule.holder(position)[0]) for position in range(schedule.parts)]
    sequences = max(map(len, micro_batches(train.batch, parallel.dp, 0, parallel.micro_batches)))
    how = {"sequences": sequences, "in_flight": held, "optimizer": train.optimizer, "parallel": parallel}
    return schedule, partition(model, schedule.parts, parallel.partition, **how)


def _require_layers(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    p, v, most = parallel.pp, parallel.chunks, _most_parts(model, parallel.partition)
    if p * v <= most:
        return
    legal = [
        n
        for n in range(1, most // v + 1)
        if _exists(parallel.schedule, n, parallel.micro_batches, v, train.batch // parallel.dp)
    ]
    would_do = f"pp can be {listed(legal)}" if legal else f"layers can be {p * v} or more"
    stages = f"pp={p} stages" + (f" of {v} chunks" if v > 1 else "")
    raise ConfigError(f"layers={model.layers} do not fill {stages} by partition={parallel.partition!r}; {would_do}")


def _exists(*sizes) -> bool:
    try:
        check_sizes(*sizes)
    except ConfigError:
        return False
    return True


def _most_parts(model: ModelConfig, rule: str) -> int:
    """How many parts a rule can fill: `uniform` counts layers, the others may set the two ends apart."""
    return model.layers + (0 if rule == "uniform" else 2)


def balance(costs: Sequence, parts: int) -> tuple[range, ...]:
    """Cut a row of things into `parts` runs, none empty, so that the costliest run costs as little as can be.

    `costs` has a number for each thing; or, where its cost depends on the part that holds it, a row of one number for
    each part. Among equally good cuts the evenest wins (least sum of squares), then the one that cuts earliest.
    Returns the indices that each part holds. Raises ValueError where there are fewer things than parts.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} costs do not fill parts={parts}; parts can be 1 to {len(costs)}")
    rows = [[cost if not hasattr(cost, "__len__") else cost[part] for cost in costs] for part in range(parts)]
    up_to = [list(accumulate(row, initial=0)) for row in rows]

    def run(part, start, stop):
        return up_to[part][stop] - up_to[part][start]

    def square(part, start, stop):
        return run(part, start, stop) ** 2 if run(part, start, stop) <= least else float("inf")

    least, _ = _best_cuts(len(costs), parts, run, max)
    _, cuts = _best_cuts(len(costs), parts, square, add)
    return tuple(range(start, stop) for start, stop in pairwise((0, *cuts)))


def _best_cuts(n: int, parts: int, cost, join) -> tuple[float, tuple[int, ...]]:
    """Dynamic programming: the least `join` of the parts' `cost(part, start, stop)`, and where each part stops.

    The best way to place the first `stop` things on the first parts extends the best way to place some `start` of them
    on one part fewer. A run that alone costs more than the best so far is not made longer.
    """
    best = {0: (0, ())}  # things placed so far -> (value, where each part stops)
    for part in range(parts):
        left = parts - part - 1  # parts still to come: each needs one thing
        longer, best = best, {}
        for stop in range(part + 1, n - left + 1) if left else (n,):
            found = (float("inf"), ())
            for start in range(stop - 1, part - 1, -1) if part else (0,):
                alone = cost(part, start, stop)
                if alone > found[0]:
                    break
                value, cuts = longer[start]
                found = min(found, (join(value, alone), (*cuts, stop)))
            best[stop] = found
    return best[n]


def part_parameters(part: Part, model: ModelConfig) -> int:
    """How many parameters `part` holds; a tied matrix once, if both of its ends are there."""
    count = sum(piece.parameters for piece in part.pieces(pieces(model)))
    shared = model.tied and part.embedding and part.head
    return count - (model.vocab * model.hidden if shared else 0)


def part_flops(part: Part, model: ModelConfig, *, sequences: int = 1) -> int:
    """FLOPs of `part`, forward and backward, for one micro-batch of `sequences`."""
    return sum(piece.flops for piece in part.pieces(pieces(model, sequences)))


def part_bytes(
    part: Part, model: ModelConfig, *, sequences: int = 1, in_flight: float = 1, optimizer: str = "adamw"
) -> int:
    """Bytes of `part`: its model states, and the activations of `in_flight` micro-batches of `sequences`.

    What lives only inside an operation (the meter's *temporary*) is not counted.
    """
    activations = sum(piece.activations for piece in part.pieces(pieces(model, sequences)))
    return model_states(part_parameters(part, model), model.dtype, optimizer) + round(in_flight * activations)


def _uniform(layers: int, parts: int) -> tuple[range, ...]:
    """Runs of pieces. Of the two ends the first takes an extra layer before the last does: a head multiplies."""
    least, extra = divmod(layers, parts)
    first = (parts - extra) // 2
    sizes = [least + (first <= i < first + extra) for i in range(parts)]
    sizes[0] += 1  # the embedding
    sizes[-1] += 1  # the head
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def parts_of(runs: tuple[range, ...], model: ModelConfig) -> tuple[Part, ...]:
    """Runs of pieces as Parts: piece 0 is the embedding, piece i + 1 is layer i, piece L + 1 the head."""
    head = model.layers + 1
    return tuple(Part(0 in run, range(max(run.start, 1) - 1, min(run.stop, head) - 1), head in run) for run in runs)


def _require(model: ModelConfig, parts, rule, in_flight) -> None:
    if rule not in PARTITIONS:
        raise ConfigError(f"partition={rule!r} is not known; partition can be {listed(PARTITIONS)}")
    if isinstance(parts, bool) or not isinstance(parts, Integral) or parts < 1:
        raise ConfigError(f"parts={parts!r} must be a whole number, 1 or more")
    layers, most = model.layers, _most_parts(model, "memory")
    have = f"{layers} layers" if layers > 1 else "1 layer"
    if rule == "uniform" and parts > layers:
        raise ConfigError(
            f"{have} cannot fill {parts} parts; parts can be 1 to {layers}, or 1 to {most} by compute or memory"
        )
    if parts > most:
        raise ConfigError(f"{have}, embedding and head cannot fill {parts} parts; parts can be 1 to {most}")
    if in_flight is not None and len(in_flight) != parts:
        raise ConfigError(
            f"in_flight has {len(in_flight)} numbers for {parts} parts; give each part its own, {parts} in all"
        )
