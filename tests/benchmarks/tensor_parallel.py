"""Our tensor parallelism beside DTensor's: one training step, tp=2, timed in turn within one run.

    python tests/benchmarks/tensor_parallel.py [--pairs 20] [--ranks 2]

Both start from the same weights, see the same tokens, and take a whole step: forward, backward, AdamW. Their first
losses are compared: later ones drift apart, as AdamW makes much of a last bit.
"""

from __future__ import annotations

import argparse

from pcourse.config import ModelConfig, TrainConfig
from pcourse.native.paired import HEADER, interleave, ratio
from pcourse.world import World

SIZES = (
    ("tiny", ModelConfig(layers=2, hidden=64, heads=4, sequence=32), 2),
    ("small", ModelConfig(layers=4, hidden=128, heads=4, sequence=64), 4),
    ("lesson", ModelConfig(layers=4, hidden=256, heads=8, sequence=128), 4),
    ("fused", ModelConfig(layers=4, hidden=256, heads=8, sequence=128, attention="fused"), 4),
    ("wide", ModelConfig(layers=2, hidden=768, heads=12, sequence=128), 4),
    ("long", ModelConfig(layers=2, hidden=256, heads=8, sequence=512), 4),
)


def compare(comm, model: ModelConfig, train: TrainConfig, pairs: int):
    import torch

    from pcourse.data import batch
    from pcourse.model import build
    from pcourse.native.tensor import dtensor_loss, dtensor_parallel
    from pcourse.parallel.tensor import tensor_parallel

    tokens, targets = batch(model, train, 0, device=comm.device)
    our_model = tensor_parallel(build(model, device=comm.device), comm)
    their_model = dtensor_parallel(build(model, device=comm.device), comm)
    our_adam = torch.optim.AdamW(our_model.parameters(), lr=1e-3)
    their_adam = torch.optim.AdamW(their_model.parameters(), lr=1e-3)
    first = {}

    def ours():
        loss = our_model.loss(tokens, targets) / targets.numel()
        loss.backward()
        our_adam.step()
        our_adam.zero_grad()
        first.setdefault("ours", loss.item())

    def theirs():
        first.setdefault("theirs", dtensor_loss(their_model, tokens, targets).item())
        their_adam.step()
        their_adam.zero_grad()

    times = interleave(comm, ours, theirs, pairs)
    return times, abs(first["ours"] - first["theirs"]), comm.describe()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    world = World(options.ranks)
    print(f"{'size':<8} {'L':>2} {'h':>4} {'s':>4} {'b':>2} {HEADER}  loss difference")
    for name, model, batch in SIZES:
        times, difference, device = world.run(compare, model, TrainConfig(batch=batch), options.pairs, timeout=600)[0]
        sizes = f"{name:<8} {model.layers:>2} {model.hidden:>4} {model.sequence:>4} {batch:>2}"
        print(f"{sizes} {ratio(times)}  {difference:.1e}", flush=True)
    print(f"one training step (forward, backward, AdamW), tp={options.ranks}, measured on {device}")


if __name__ == "__main__":
    main()
