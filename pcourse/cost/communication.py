"""Calls and bytes of a training step, by formula, in the shape of a Report's communication rows."""

from __future__ import annotations

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.split import ring_wire, shard_sizes

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
LAYER_ALL_REDUCES = 4  # two forward (g), two backward (f): Korthikanti et al. 2022, section 4.2.2


def communication(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> dict:
    """{(axis, operation): {"calls", "payload", "wire"}} of one rank and step; payload and wire in bytes.

    Tensor parallelism, for each micro-batch of b sequences: four all-reduces of b·s·h a layer, one for the embedding
    (forward) and one for the output head (backward), and of the cross-entropy one of b·s maxima and one of 2·b·s sums.
    """
    if parallel.tp == 1:
        return {}
    width = BYTES[model.dtype]
    row = {"calls": 0, "payload": 0, "wire": 0}
    for b in shard_sizes(train.batch, parallel.micro_batches):
        tokens = b * model.sequence
        messages = (LAYER_ALL_REDUCES * model.layers + 2) * [(tokens * model.hidden, width)]
        messages += [(tokens, max(width, 4)), (2 * tokens, max(width, 4))]  # the loss is in float32 or better
        for elements, size in messages:
            row["calls"] += 1
            row["payload"] += elements * size
            row["wire"] += ring_wire("all_reduce", elements, parallel.tp, rank % parallel.tp) * size
    return {("tp", "all_reduce"): row}
