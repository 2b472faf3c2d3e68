"""Which parameters one rank holds, in the units that ZeRO divides, gathers and reduces.

A unit is a layer, the embedding or the head: what is needed at one time is one message. A tied token matrix is needed
at two times and is a unit of its own; on two stages it is on both.
"""

from __future__ import annotations

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.layers import pieces
from pcourse.parallel.partition import stages_of
from pcourse.split import shard_sizes

ENDS = ("embedding", "head")  # the pieces that use the token matrix
TIED = "tied matrix"


def units(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0) -> dict[str, int]:
    """{name: parameters} of the units of `rank`, after tensor and pipeline parallelism and before ZeRO's division.

    Column-parallel weights and biases, row-parallel weights, and the rows of the vocabulary are shards, which may be
    uneven; row-parallel biases, LayerNorms and positions are whole. Raises ConfigError for stages that cannot be.
    """
    schedule, parts = stages_of(model, parallel, train)
    tp_rank = rank % parallel.tp
    each = pieces(model, tp=parallel.tp, tp_rank=tp_rank)
    places = schedule.places(parallel.stage_of(rank))
    found = {piece.name: piece.parameters for place in sorted(places) for piece in parts[place].pieces(each)}
    ends = [name for name in ENDS if name in found]
    if model.tied and ends:
        matrix = shard_sizes(model.vocab, parallel.tp)[tp_rank] * model.hidden
        for name in ends:
            found[name] -= matrix
        found[TIED] = matrix
    return found
