"""Calls and bytes of a training step, by formula, in the shape of a Report's communication rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pcourse.config import BYTES, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.units import TIED, units
from pcourse.parallel.partition import Part, stages_of
from pcourse.parallel.schedules import BACKWARD, BACKWARD_INPUT, FORWARD, Schedule
from pcourse.split import micro_batches, ring_wire, shard_sizes

LAYER_ALL_REDUCES = 4  # two forward (g), two backward (f): Korthikanti et al. 2022, section 4.2.2


def communication(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> dict:
    """{(axis, operation): {"calls", "payload", "wire"}} of one rank and step; payload and wire in bytes.

    Tensor parallelism, for each micro-batch of b sequences: four all-reduces of b·s·h a layer, one for the embedding
    (forward) and one for the output head (backward), and of the cross-entropy one of b·s maxima and one of 2·b·s sums.
    Where a layer is recomputed in full, its forward ones come again: one of the two, as the second run ends before the
    last, unless a dropout follows that.

    Pipeline parallelism, for each micro-batch: each cut between two ranks is crossed by b·s·h elements forward and as
    many backward (Narayanan et al. 2021, section 3.2). A tied matrix is all-reduced between the two ends once a step,
    or the rank's shard of it.

    Data parallelism, for each unit of the rank's parameters (`units`): see `data_parallel`.
    """
    schedule, parts = stages_of(model, parallel, train)
    stage = parallel.stage_of(rank)
    rows: dict = defaultdict(lambda: {"calls": 0, "payload": 0, "wire": 0})
    width = BYTES[model.dtype]
    replica = parallel.replica_of(rank)
    for rows_taken in micro_batches(train.batch, parallel.dp, replica, parallel.micro_batches):
        tokens = len(rows_taken) * model.sequence
        for position in schedule.places(stage):
            for size, elements in _tensor_parallel(model, parallel, parts[position], tokens, width):
                _add_collective(rows, "tp", "all_reduce", elements, size, parallel.tp, rank % parallel.tp)
            for neighbour in (position - 1, position + 1):  # to each it sends, and from each it gets, one message
                if 0 <= neighbour < schedule.parts and schedule.holder(neighbour)[0] != stage:
                    _add(rows, "pp", "send", tokens * model.hidden * width, tokens * model.hidden * width)
                    _add(rows, "pp", "recv", 0, 0)
    held = units(model, parallel, train, rank)
    grad_width = width if parallel.grad_dtype == "same" else BYTES["float32"]
    if model.tied and len(schedule.ends) == 2 and stage in schedule.ends:
        elements = shard_sizes(held[TIED], parallel.dp if parallel.zero else 1)[replica if parallel.zero else 0]
        if elements:
            _add_collective(rows, "tied", "all_reduce", elements, grad_width, 2, schedule.ends.index(stage))
    for name, elements in held.items():
        for operation, calls in data_parallel(parallel, *_passes(name, schedule, parts, stage, parallel)).items():
            for _ in range(calls):
                size = width if operation == "all_gather" else grad_width
                _add_collective(rows, "dp", operation, elements, size, parallel.dp, replica)
    return dict(rows)


def data_parallel(parallel: ParallelConfig, passes: int, gathers: int) -> dict[str, int]:
    """{operation: calls} of one unit in a step: one all-reduce; or with ZeRO (Rajbhandari et al. 2020, section 7) one
    reduce-scatter, or one for each of the `passes` that leave a gradient; and one all-gather, or for stage 3 `gathers`.
    """
    return {
        0: {"all_reduce": 1},
        1: {"reduce_scatter": 1, "all_gather": 1},
        2: {"reduce_scatter": passes, "all_gather": 1},
        3: {"reduce_scatter": passes, "all_gather": gathers},
    }[parallel.zero]


def _passes(name: str, schedule: Schedule, parts, stage: int, parallel: ParallelConfig) -> tuple[int, int]:
    """Backward passes through a unit, and how often it is gathered where gathered weights are freed (stage 3).

    A layer that reshards: before each forward and each backward. What stays is there from its first user's forward to
    its last one's backward, which on a pipeline may belong to different micro-batches.
    """
    chunks = {chunk for chunk, place in enumerate(schedule.places(stage)) if _holds(parts[place], name)}
    order = [a for a in schedule.orders[stage] if a.chunk in chunks]
    forwards = sum(a.kind == FORWARD for a in order)
    if name.startswith("layer") and parallel.reshard:
        return forwards, 2 * forwards
    users = gathers = 0
    for action in order:
        if action.kind == FORWARD:
            gathers += users == 0
            users += 1
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            users -= 1
    return forwards, gathers


def _holds(part: Part, name: str) -> bool:
    ends = {"embedding": part.embedding, "head": part.head, TIED: part.embedding or part.head}
    return ends[name] if name in ends else int(name.removeprefix("layer ")) in part.layers


def _tensor_parallel(
    model: ModelConfig, parallel: ParallelConfig, part: Part, tokens: int, width: int
) -> Iterator[tuple[int, int]]:
    """(bytes an element, elements) of each all-reduce that one part makes for one micro-batch."""
    again = 0
    if parallel.recompute == "full":
        recomputed = sum(layer % parallel.recompute_every == 0 for layer in part.layers)
        again = (2 if model.dropout else 1) * recomputed
    calls = LAYER_ALL_REDUCES * len(part.layers) + again + part.embedding + part.head
    yield from calls * [(width, tokens * model.hidden)]
    if part.head:  # the loss is in float32 or better
        yield from ((max(width, 4), tokens), (max(width, 4), 2 * tokens))


def _add_collective(rows, axis: str, operation: str, elements: int, size: int, ranks: int, rank: int) -> None:
    if ranks > 1:
        _add(rows, axis, operation, elements * size, ring_wire(operation, elements, ranks, rank) * size)


def _add(rows, axis: str, operation: str, payload: int, wire: int) -> None:
    row = rows[axis, operation]
    row["calls"] += 1
    row["payload"] += payload
    row["wire"] += wire
