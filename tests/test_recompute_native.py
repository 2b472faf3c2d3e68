"""Ours and torch.utils.checkpoint are the same: gradients, weights after three steps, and what is kept, to the byte."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.data import batch
from pcourse.meter import MemoryMeter
from pcourse.model import build
from pcourse.native.beside import beside
from pcourse.native.recompute import checkpointed, recompute_sides
from pcourse.proof import largest, roughen
from pcourse.train import Trainer
from pcourse.world import World

MODEL = ModelConfig(layers=3, hidden=32, heads=4, vocab=64, sequence=16, dtype="float64")
TRAIN = TrainConfig(batch=2, optimizer="sgd", learning_rate=0.1)
POLICIES = [("full", 1), ("full", 2), ("selective", 1), ("selective", 2)]
MODELS = [{}, {"attention": "fused"}, {"kv_heads": 2, "tied": False}]


def steps_apart(comm, model, parallel):
    ours = Trainer(comm, model, parallel, TRAIN, prepare=roughen)
    native = checkpointed(roughen(build(model)), parallel)
    sgd = torch.optim.SGD(native.parameters(), lr=TRAIN.learning_rate)
    theirs, differences = dict(native.named_parameters()), []

    def compare(value):
        differences.extend((value(p) - value(theirs[name])).abs().max() for name, p in ours.model.named_parameters())

    for number in range(3):
        tokens, targets = batch(model, TRAIN, number)
        loss = ours.forward_backward(number)
        expected = native.loss(tokens, targets) / targets.numel()
        expected.backward()
        differences.append((loss - expected).abs())
        compare(lambda p: p.grad)
        norm = ours.gradient_norm()
        differences.append((torch.nn.utils.get_total_norm([p.grad for p in native.parameters()]) - norm).abs())
        ours.update(norm)
        sgd.step()
        sgd.zero_grad()
    compare(lambda p: p.detach())
    return largest([d.item() for d in differences])


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("policy, every", POLICIES)
def test_three_steps_equal_those_of_checkpoint(policy, every, case):
    parallel = ParallelConfig(recompute=policy, recompute_every=every)
    (difference,) = World(1, "threads").run(steps_apart, replace(MODEL, **case), parallel)
    assert difference < 1e-12


def kept_by_each(comm, model, parallel):
    """Bytes that live after a forward pass and did not before it: ours, and theirs."""
    kept = []
    with MemoryMeter() as meter:
        tokens, targets = batch(model, TRAIN, 0)
        trainer = Trainer(comm, model, parallel, TRAIN)
        native = checkpointed(build(model), parallel)
        for forward in (trainer.model.chunks[0], native.loss):
            gc.collect()
            before = sum(meter.bytes.values())
            loss = forward(tokens, targets)
            kept.append(sum(meter.bytes.values()) - before)
            del loss
    return kept


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("policy, every", POLICIES)
def test_as_many_bytes_are_kept(policy, every, case):
    model, parallel = replace(MODEL, **case), ParallelConfig(recompute=policy, recompute_every=every)
    ((ours, theirs),) = World(1, "threads").run(kept_by_each, model, parallel)
    ((all_of_it, _),) = World(1, "threads").run(kept_by_each, model, ParallelConfig())
    assert ours == theirs
    assert ours < all_of_it


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_side_by_side_in_one_run(policy):
    sides = partial(recompute_sides, parallel=ParallelConfig(recompute=policy))
    model = replace(MODEL, hidden=64, sequence=64, dtype="float32")
    (result,) = World(1, "gloo").run(beside, model, TRAIN, 3, sides, timeout=60)
    assert result.loss_difference < 1e-6 and result.sent == [0, 0]
    assert result.peak[0] <= result.peak[1]
    assert len(result.times) == 3 and result.ratio.median > 0


@pytest.mark.parametrize("change, words", [({"dp": 2}, "one rank's"), ({"micro_batches": 2}, "one micro-batch")])
def test_what_stands_beside_nothing_is_refused(change, words):
    class OneRank:
        rank, size = 0, 1

    with pytest.raises(ConfigError, match=words):
        recompute_sides(OneRank(), MODEL, TRAIN, replace(ParallelConfig(recompute="full"), **change))
