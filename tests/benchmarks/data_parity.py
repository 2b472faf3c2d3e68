"""Every ZeRO stage and every recompute policy beside the unsplit model: the largest difference, over N replicas.

    python tests/benchmarks/data_parity.py [--dtype float32] [--backend gloo] [--tp 2] [--pp 2]

Differences of the first step's loss, gradients and gradient norm, and of the weights after three SGD steps, with 1 and
3 micro-batches; 13 sequences, which few numbers of replicas divide, dropout 0.1, tied embedding, clipping.
"""

from __future__ import annotations

import argparse

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.proof import TOLERANCE, prove
from pcourse.world import World

MODEL = ModelConfig(layers=4, hidden=16, heads=2, vocab=31, sequence=4, dropout=0.1)
TRAIN = TrainConfig(batch=13, clip=0.5)
REPLICAS, MICRO_BATCHES = (1, 2, 3, 4), (1, 3)
RECOMPUTE = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full, every 2nd": {"recompute": "full", "recompute_every": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="[float64]")
    parser.add_argument("--backend", choices=("threads", "gloo"), default="threads", help="[threads]")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks in each replica [1]")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages in each replica [1]")
    options = parser.parse_args()
    beside = f"tp={options.tp}, pp={options.pp}"
    print(f"largest difference from the unsplit model, {options.dtype}, {beside}, on {options.backend}")
    print(f"{'ZeRO':<5} {'recompute':<16}" + "".join(f"{f'N={n}':>16}" for n in REPLICAS))
    for zero in (0, 1, 2, 3):
        for policy, how in RECOMPUTE.items():
            cells = [cell(n, zero, how, options) for n in REPLICAS]
            print(f"{zero:<5} {policy:<16}" + "".join(f"{words:>16}" for words in cells), flush=True)
    print(f"equal means at most {TOLERANCE[options.dtype]:g}")


def cell(replicas: int, zero: int, how: dict, options) -> str:
    worst = 0.0
    for m in MICRO_BATCHES:
        parallel = ParallelConfig(dp=replicas, tp=options.tp, pp=options.pp, zero=zero, micro_batches=m, **how)
        world = World(parallel.ranks, options.backend)
        worst = max(worst, prove(MODEL, parallel, TRAIN, dtype=options.dtype, world=world).worst)
    return f"{worst:.1e}" + ("" if worst <= TOLERANCE[options.dtype] else " NOT EQUAL")


if __name__ == "__main__":
    main()
