"""Ours and DTensor's tensor parallelism are the same function: loss and every gradient, from the same weights."""

from dataclasses import replace

import pytest

from pcourse.config import ModelConfig, TrainConfig
from pcourse.data import batch
from pcourse.model import build
from pcourse.native.tensor import dtensor_loss, dtensor_parallel, grouped_rows
from pcourse.parallel.shard import shard_of
from pcourse.parallel.tensor import tensor_parallel
from pcourse.proof import roughen
from pcourse.world import World

MODEL = ModelConfig(layers=2, hidden=32, heads=4, vocab=64, sequence=9, dtype="float64")


@pytest.mark.parametrize("case", [{}, {"tied": False}, {"kv_heads": 2}, {"attention": "fused"}])
def test_gradients_equal_those_of_dtensor(case):
    model = replace(MODEL, **case)

    def program(comm):
        tokens, targets = batch(model, TrainConfig(batch=2), 0)
        ours = tensor_parallel(roughen(build(model)), comm)
        loss = ours.loss(tokens, targets) / targets.numel()
        loss.backward()
        native = roughen(build(model))
        order = grouped_rows(native.blocks[0].attention, comm.size)
        native = dtensor_parallel(native, comm)
        differences = [(dtensor_loss(native, tokens, targets) - loss).abs().item()]
        theirs = dict(native.named_parameters())
        for name, p in ours.named_parameters():
            grad = theirs[name].grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if "qkv" in name:
                grad = grad[order.argsort()]
            shard = shard_of(p)
            differences.append((p.grad - (shard.of(grad) if shard else grad)).abs().max().item())
        return max(differences)

    assert max(World(2, "gloo").run(program, timeout=60)) < 1e-12
