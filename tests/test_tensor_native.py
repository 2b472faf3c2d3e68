"""Ours and DTensor's tensor parallelism are the same: loss, gradients, norm and weights after three SGD steps."""

from dataclasses import replace

import pytest
import torch

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.data import batch
from pcourse.model import build
from pcourse.native.tensor import dtensor_loss, dtensor_parallel, grouped_rows
from pcourse.parallel.shard import shard_of
from pcourse.proof import roughen
from pcourse.train import Trainer
from pcourse.world import World

MODEL = ModelConfig(layers=2, hidden=32, heads=8, vocab=64, sequence=9, dtype="float64")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", [{}, {"tied": False}, {"kv_heads": 4}, {"attention": "fused"}])
def test_three_steps_equal_those_of_dtensor(tp, case):
    model, train = replace(MODEL, **case), TrainConfig(batch=2, optimizer="sgd", learning_rate=0.1)

    def program(comm):
        ours = Trainer(comm, model, ParallelConfig(tp=tp), train, prepare=roughen)
        native = roughen(build(model))
        order = grouped_rows(native.blocks[0].attention, comm.size)
        native = dtensor_parallel(native, comm)
        sgd = torch.optim.SGD(native.parameters(), lr=0.1)
        theirs, differences = dict(native.named_parameters()), []

        def compare(value):
            for name, p in ours.model.named_parameters():
                whole = value(theirs[name])
                whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
                whole = whole[order.argsort()] if "qkv" in name else whole
                shard = shard_of(p)
                differences.append((value(p) - (shard.of(whole) if shard else whole)).abs().max().item())

        for number in range(3):
            tokens, targets = batch(model, train, number)
            loss = ours.forward_backward(number)
            differences.append((dtensor_loss(native, tokens, targets) - loss).abs().item())
            compare(lambda p: p.grad)
            norm = ours.gradient_norm()
            sharded = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in native.parameters()]
            differences.append((torch.nn.utils.get_total_norm(sharded) - norm).abs().item())
            ours.update(norm)
            sgd.step()
            sgd.zero_grad()
        compare(lambda p: p.detach())
        return max(differences)

    assert max(World(tp, "gloo").run(program, timeout=60)) < 1e-12
