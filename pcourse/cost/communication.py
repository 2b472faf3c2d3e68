"""Calls and bytes of a training step, by formula, in the shape of a Report's communication rows."""

from __future__ import annotations

from collections import defaultdict

from pcourse.config import BYTES, ModelConfig, ParallelConfig, TrainConfig
from pcourse.parallel.partition import Part, stages_of
from pcourse.split import ring_wire, shard_sizes

LAYER_ALL_REDUCES = 4  # two forward (g), two backward (f): Korthikanti et al. 2022, section 4.2.2


def communication(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> dict:
    """{(axis, operation): {"calls", "payload", "wire"}} of one rank and step; payload and wire in bytes.

    Tensor parallelism, for each micro-batch of b sequences: four all-reduces of b·s·h a layer, one for the embedding
    (forward) and one for the output head (backward), and of the cross-entropy one of b·s maxima and one of 2·b·s sums.

    Pipeline parallelism, for each micro-batch: each cut between two ranks is crossed by b·s·h elements forward and as
    many backward (Narayanan et al. 2021, section 3.2). A tied matrix is all-reduced between the two ends once a step.
    """
    schedule, parts = stages_of(model, parallel, train)
    stage = parallel.stage_of(rank)
    rows: dict = defaultdict(lambda: {"calls": 0, "payload": 0, "wire": 0})
    width = BYTES[model.dtype]
    for b in shard_sizes(train.batch, parallel.micro_batches):
        tokens = b * model.sequence
        for position in schedule.places(stage):
            for size, elements in _tensor_parallel(model, parts[position], tokens, width):
                _add_all_reduce(rows, "tp", elements, size, parallel.tp, rank % parallel.tp)
            for neighbour in (position - 1, position + 1):  # to each it sends, and from each it gets, one message
                if 0 <= neighbour < schedule.parts and schedule.holder(neighbour)[0] != stage:
                    _add(rows, "pp", "send", tokens * model.hidden * width, tokens * model.hidden * width)
                    _add(rows, "pp", "recv", 0, 0)
    if model.tied and len(schedule.ends) == 2 and stage in schedule.ends:
        elements = shard_sizes(model.vocab, parallel.tp)[rank % parallel.tp] * model.hidden
        _add_all_reduce(rows, "tied", elements, width, 2, schedule.ends.index(stage))
    return dict(rows)


def _tensor_parallel(model: ModelConfig, part: Part, tokens: int, width: int):
    """(bytes an element, elements) of each all-reduce that one part makes for one micro-batch."""
    calls = LAYER_ALL_REDUCES * len(part.layers) + part.embedding + part.head
    yield from calls * [(width, tokens * model.hidden)]
    if part.head:  # the loss is in float32 or better
        yield from ((max(width, 4), tokens), (max(width, 4), 2 * tokens))


def _add_all_reduce(rows, axis: str, elements: int, size: int, ranks: int, rank: int) -> None:
    if ranks > 1:
        _add(rows, axis, "all_reduce", elements * size, ring_wire("all_reduce", elements, ranks, rank) * size)


def _add(rows, axis: str, operation: str, payload: int, wire: int) -> None:
    row = rows[axis, operation]
    row["calls"] += 1
    row["payload"] += payload
    row["wire"] += wire
