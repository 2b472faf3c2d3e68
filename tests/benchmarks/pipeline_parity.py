"""Every pipeline schedule beside the unsplit model: the largest difference, for each schedule and number of stages.

    python tests/benchmarks/pipeline_parity.py [--dtype float32] [--backend gloo] [--tp 2]

Differences of the first step's loss, gradients and gradient norm, and of the weights after three SGD steps, over all
numbers of micro-batches that make sense, 1 to 8; 9 sequences, dropout 0.1, tied embedding, clipping.
"""

from __future__ import annotations

import argparse

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, validate
from pcourse.parallel.schedules import SCHEDULES
from pcourse.proof import TOLERANCE, prove
from pcourse.world import World

MODEL = ModelConfig(layers=8, hidden=16, heads=2, vocab=31, sequence=4, dropout=0.1)
TRAIN = TrainConfig(batch=9, clip=0.5)
STAGES, MICRO_BATCHES = (1, 2, 3, 4), range(1, 9)
CHUNKS = {"interleaved": 2, "zb-v": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="[float64]")
    parser.add_argument("--backend", choices=("threads", "gloo"), default="threads", help="[threads]")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks in each stage [1]")
    options = parser.parse_args()
    print(f"largest difference from the unsplit model, {options.dtype}, tp={options.tp}, on {options.backend}")
    print(f"{'schedule':<12} {'v':>1}" + "".join(f"{f'p={p}':>20}" for p in STAGES))
    for schedule in SCHEDULES:
        cells = [cell(schedule, p, options) for p in STAGES]
        print(f"{schedule:<12} {CHUNKS.get(schedule, 1):>1}" + "".join(f"{words:>20}" for words in cells), flush=True)
    print(f"in brackets: numbers of micro-batches tried; equal means at most {TOLERANCE[options.dtype]:g}")


def cell(schedule: str, stages: int, options) -> str:
    worst, tried = 0.0, 0
    for m in MICRO_BATCHES:
        parallel = ParallelConfig(
            pp=stages, tp=options.tp, schedule=schedule, micro_batches=m, chunks=CHUNKS.get(schedule, 1)
        )
        try:
            validate(MODEL, parallel, TRAIN)
        except ConfigError:  # no such schedule: interleaved takes whole rounds of p
            continue
        world = World(parallel.ranks, options.backend)
        proof = prove(MODEL, parallel, TRAIN, dtype=options.dtype, world=world)
        worst, tried = max(worst, proof.worst), tried + 1
    verdict = "" if worst <= TOLERANCE[options.dtype] else " NOT EQUAL"
    return f"{worst:.1e} ({tried}){verdict}"


if __name__ == "__main__":
    main()
