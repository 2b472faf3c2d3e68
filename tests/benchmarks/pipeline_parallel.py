"""Our pipeline beside torch.distributed.pipelining's: one training step, timed in turn within one run.

    python tests/benchmarks/pipeline_parallel.py [--pairs 30] [--sizes tiny lesson] [--schedules 1f1b zb-h1]

Both cut the model at the same places, start from the same weights, see the same tokens in the same micro-batches, go
by the same schedule, and take a whole step: forward, backward, sum of the tied matrix's gradients, AdamW, and the loss
on every rank. Peak memory is that of the rank with the most; messages are those of all ranks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.native.beside import Beside, beside
from pcourse.native.paired import HEADER
from pcourse.native.pipeline import SCHEDULES, pipeline_sides
from pcourse.world import World

SIZES = {  # those of the tensor-parallel benchmark, with layers enough for two chunks on each of two stages
    "tiny": ModelConfig(layers=4, hidden=64, heads=4, sequence=32),
    "small": ModelConfig(layers=4, hidden=128, heads=4, sequence=64),
    "lesson": ModelConfig(layers=4, hidden=256, heads=8, sequence=128),
    "fused": ModelConfig(layers=4, hidden=256, heads=8, sequence=128, attention="fused"),
    "wide": ModelConfig(layers=4, hidden=768, heads=12, sequence=128),
    "long": ModelConfig(layers=4, hidden=256, heads=8, sequence=512),
}
CHUNKS = {"interleaved": 2, "zb-v": 2}
MICRO_BATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps per row [30]")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="[all]")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="[all]")
    parser.add_argument("--stages", type=int, default=2, help="pp [2]")
    options = parser.parse_args()
    columns = f"{'ours MB':>8} {'theirs':>8}  {'sent MB':>8} {'theirs':>8} calls theirs"
    print(f"{'size':<7} {'schedule':<11} {'p':>1} {'L':>2} {'h':>4} {'s':>4} {HEADER} {columns}  losses differ by")
    rows = [(name, schedule, options.stages) for schedule in options.schedules for name in options.sizes]
    if options.stages == 2 and "lesson" in options.sizes and "1f1b" in options.schedules:
        rows.append(("lesson", "1f1b", 4))
    for name, schedule, stages in rows:
        results = measured(SIZES[name], schedule, stages, options.pairs)
        print(f"{name:<7} {schedule:<11} {row(SIZES[name], stages, results)}", flush=True)
    print(f"one training step, m={MICRO_BATCHES} micro-batches of 1 sequence, measured on {results[0].device}")


def measured(model: ModelConfig, schedule: str, stages: int, pairs: int) -> list[Beside]:
    parallel = ParallelConfig(pp=stages, schedule=schedule, micro_batches=MICRO_BATCHES, chunks=CHUNKS.get(schedule, 1))
    sides = partial(pipeline_sides, parallel=parallel)
    with World(stages) as world, world.take_turns(print):
        return world.run(beside, model, TrainConfig(batch=MICRO_BATCHES), pairs, sides, timeout=600)


def row(model: ModelConfig, stages: int, results: list[Beside]) -> str:
    peaks = [max(result.peak[side] for result in results) / 1e6 for side in (0, 1)]
    sent = [sum(result.sent[side] for result in results) * 4 / 1e6 for side in (0, 1)]
    calls = [sum((result.messages[side] for result in results), Counter()).total() for side in (0, 1)]
    sizes = f"{stages:>1} {model.layers:>2} {model.hidden:>4} {model.sequence:>4}"
    columns = f"{peaks[0]:8.1f} {peaks[1]:8.1f}  {sent[0]:8.2f} {sent[1]:8.2f} {calls[0]:5d} {calls[1]:6d}"
    return f"{sizes} {results[0].ratio} {columns}  {results[0].loss_difference:.1e}"


if __name__ == "__main__":
    main()
