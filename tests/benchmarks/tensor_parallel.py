"""Our tensor parallelism beside DTensor's: one training step, tp=2, timed in turn within one run.

    python tests/benchmarks/tensor_parallel.py [--pairs 30] [--ranks 2]

Both start from the same weights, see the same tokens, and take a whole step: forward, backward, AdamW. Their first
losses are compared: later ones drift apart, as AdamW makes much of a last bit.
"""

from __future__ import annotations

import argparse

from pcourse.config import ModelConfig, TrainConfig
from pcourse.native.beside import beside
from pcourse.native.paired import HEADER
from pcourse.world import World

SIZES = (
    ("tiny", ModelConfig(layers=2, hidden=64, heads=4, sequence=32), 2),
    ("small", ModelConfig(layers=4, hidden=128, heads=4, sequence=64), 4),
    ("lesson", ModelConfig(layers=4, hidden=256, heads=8, sequence=128), 4),
    ("fused", ModelConfig(layers=4, hidden=256, heads=8, sequence=128, attention="fused"), 4),
    ("wide", ModelConfig(layers=2, hidden=768, heads=12, sequence=128), 4),
    ("long", ModelConfig(layers=2, hidden=256, heads=8, sequence=512), 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps per size [30]")
    parser.add_argument("--ranks", type=int, default=2, help="tp, which must divide the sizes' heads [2]")
    options = parser.parse_args()
    world = World(options.ranks)
    print(f"{'size':<8} {'L':>2} {'h':>4} {'s':>4} {'b':>2} {HEADER}  first losses differ by  cause")
    for name, model, batch in SIZES:
        with world.take_turns(print):
            result = world.run(beside, model, TrainConfig(batch=batch), options.pairs, timeout=600)[0]
        sizes = f"{name:<8} {model.layers:>2} {model.hidden:>4} {model.sequence:>4} {batch:>2}"
        print(f"{sizes} {result.ratio}  {result.loss_difference:>22.1e}  {result.cause}", flush=True)
    print(f"one training step (forward, backward, AdamW), tp={options.ranks}, measured on {result.device}")


if __name__ == "__main__":
    main()
