"""Our data parallelism, ZeRO and recompute beside PyTorch's own: one training step, timed in turn within one run.

    python tests/benchmarks/data_parallel.py [--pairs 12] [--sizes tiny wide] [--kinds DDP FSDP2] [--micro-batches 1]

Both start from the same weights, see the same tokens, and take a whole step: forward, backward, AdamW, and the loss on
every rank. The sizes are those of the tensor-parallel benchmark, with as many sequences on each of two ranks; recompute
runs on one. Time, calls and elements sent are rank 0's (over two ranks all send alike), peak memory is that of the rank
with the most.
"""

from __future__ import annotations

import argparse
from functools import partial

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.native.beside import Beside, beside
from pcourse.native.data import data_sides
from pcourse.native.paired import HEADER
from pcourse.native.recompute import recompute_sides
from pcourse.world import World

SIZES = {  # and sequences on each rank, in each micro-batch
    "tiny": (ModelConfig(layers=2, hidden=64, heads=4, sequence=32), 2),
    "small": (ModelConfig(layers=4, hidden=128, heads=4, sequence=64), 4),
    "lesson": (ModelConfig(layers=4, hidden=256, heads=8, sequence=128), 4),
    "fused": (ModelConfig(layers=4, hidden=256, heads=8, sequence=128, attention="fused"), 4),
    "wide": (ModelConfig(layers=2, hidden=768, heads=12, sequence=128), 4),
    "long": (ModelConfig(layers=2, hidden=256, heads=8, sequence=512), 4),
}
KINDS = {
    "DDP": {"dp": 2, "zero": 0},
    "DDP+ZeRO": {"dp": 2, "zero": 1},  # ZeroRedundancyOptimizer
    "FSDP2": {"dp": 2, "zero": 3},
    "FSDP2-stay": {"dp": 2, "zero": 3, "reshard": False},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps per row [12]")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="[all]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="[all]")
    parser.add_argument("--micro-batches", type=int, default=1, help="gradient accumulation [1]")
    options = parser.parse_args()
    columns = f"{'ours MB':>8} {'theirs':>8} {'ratio':>6}  {'sent':>11} {'theirs':>11} calls theirs"
    print(f"{'size':<7} {'kind':<10} {'L':>2} {'h':>4} {'s':>4} {'b':>2} {HEADER} {columns}  losses differ by")
    for kind in options.kinds:
        parallel = ParallelConfig(**KINDS[kind])
        if parallel.recompute == "none":
            parallel = ParallelConfig(**KINDS[kind], micro_batches=options.micro_batches)
        for name in options.sizes:
            model, each = SIZES[name]
            results = measured(model, each * parallel.dp * parallel.micro_batches, parallel, options.pairs)
            sizes = f"{name:<7} {kind:<10} {model.layers:>2} {model.hidden:>4} {model.sequence:>4} {each:>2}"
            print(f"{sizes} {row(results)}", flush=True)
    print(f"one training step, m={options.micro_batches} micro-batches of b sequences a rank")
    print(f"measured on {results[0].device}")


def measured(model: ModelConfig, batch: int, parallel: ParallelConfig, pairs: int) -> list[Beside]:
    sides = partial(data_sides if parallel.recompute == "none" else recompute_sides, parallel=parallel)
    with World(parallel.ranks) as world, world.take_turns(print):
        return world.run(beside, model, TrainConfig(batch=batch), pairs, sides, timeout=600)


def row(results: list[Beside]) -> str:
    ours, theirs = (max(result.peak[side] for result in results) for side in (0, 1))
    first = results[0]
    memory = f"{ours / 1e6:8.2f} {theirs / 1e6:8.2f} {ours / theirs:6.3f}"
    calls = f"{first.calls[0].total():5d} {first.calls[1].total():6d}"
    return f"{first.ratio} {memory}  {first.sent[0]:11,} {first.sent[1]:11,} {calls}  {first.loss_difference:.1e}"


if __name__ == "__main__":
    main()
