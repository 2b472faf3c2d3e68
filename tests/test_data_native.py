"""Ours and PyTorch's own data parallelism are the same over three SGD steps; what each sends, and holds at its peak."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.units import units
from pcourse.data import batch
from pcourse.native.beside import beside
from pcourse.native.data import TorchReplica, data_sides
from pcourse.proof import largest, roughen
from pcourse.train import Trainer
from pcourse.world import World

MODEL = ModelConfig(layers=2, hidden=32, heads=4, vocab=64, sequence=9, dtype="float64")
KINDS = {
    "DDP": {"zero": 0},
    "ZeroRedundancyOptimizer": {"zero": 1},
    "FSDP2": {"zero": 3},
    "FSDP2, no reshard": {"zero": 3, "reshard": False},
}


def steps_apart(comm, model, train, m):
    """A rank program: for each kind the largest difference in three steps, and how many tensors were compared."""
    found = {}
    for kind, settings in KINDS.items():
        parallel = ParallelConfig(dp=comm.size, micro_batches=m, **settings)
        ours = Trainer(comm, model, parallel, train, prepare=roughen)
        native = TorchReplica(comm, model, parallel, train, prepare=roughen)
        found[kind] = _compare(ours, native, model, train)
    return found


def _compare(ours, native, model, train):
    theirs, differences, compared = dict(native.gpt.named_parameters()), [], []

    def compare(got: dict, value) -> None:
        compared.append(len(got))
        differences.extend((got[name].detach() - _whole(value(p)).detach()).abs().max() for name, p in theirs.items())

    for number in range(3):
        loss = ours.forward_backward(number)
        differences.append((native.forward_backward(*batch(model, train, number), number) - loss).abs())
        compare(ours.replicas.whole_gradients(), lambda p: p.grad)
        norm = ours.gradient_norm()
        differences.append((torch.nn.utils.get_total_norm([_whole(p.grad) for p in theirs.values()]) - norm).abs())
        ours.update(norm)
        native.update()
    with ours.replicas.whole_weights():
        compare(dict(ours.model.named_parameters()), lambda p: p)
    return largest([d.item() for d in differences]), compared


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize(
    "ranks, m, batch, case",
    [
        (2, 1, 4, {}),
        (2, 2, 4, {}),
        (3, 2, 7, {"hidden": 40}),  # neither sequences nor rows divide evenly
        (2, 1, 4, {"tied": False}),
        (2, 1, 4, {"kv_heads": 2, "attention": "fused"}),
        (2, 2, 4, {"dropout": 0.2}),
        (2, 1, 4, {"dtype": "float32"}),
    ],
)
def test_three_steps_are_the_same(ranks, m, batch, case):
    model, train = MODEL.but(**case), TrainConfig(batch=batch, optimizer="sgd", learning_rate=0.1)
    parameters = 12 * model.layers + 4 + (not model.tied)  # 12 a layer; tokens, positions and the norm of the head
    for found in World(ranks, "gloo").run(steps_apart, model, train, m, timeout=120):
        for kind, (difference, compared) in found.items():
            assert difference < {"float64": 1e-10, "float32": 2e-5}[model.dtype], kind
            assert compared == [parameters] * 4, kind


# --- what is sent, and what is held -----------------------------------------------------------------------------------

SMALL = MODEL.but(hidden=64, sequence=32, vocab=256, dtype="float32")
FACTS = 1 + 12 * SMALL.layers + 4  # elements: the loss, and for each parameter whether it was used


@cache
def side_by_side(ranks: int, m: int = 1) -> dict:
    """{kind: the ranks' Besides}"""
    parallel = {kind: ParallelConfig(dp=ranks, micro_batches=m, **settings) for kind, settings in KINDS.items()}
    results = World(ranks, "gloo").run(all_beside, TrainConfig(batch=2 * ranks), parallel, timeout=120)
    return {kind: [result[kind] for result in results] for kind in KINDS}


def all_beside(comm, train, parallel):
    return {kind: beside(comm, SMALL, train, 2, partial(data_sides, parallel=p)) for kind, p in parallel.items()}


def elements() -> tuple[int, int]:
    """Of the layers, and of all else."""
    held = units(SMALL, ParallelConfig(), TrainConfig())
    layers = sum(n for name, n in held.items() if name.startswith("layer"))
    return layers, sum(held.values()) - layers


def test_the_first_losses_agree():
    for results in side_by_side(2).values():
        for result in results:
            assert result.loss_difference < 1e-6
            assert len(result.times) == 2 and result.ratio.median > 0


@pytest.mark.parametrize("m", [1, 2])
def test_what_is_sent_beside_ddp(m):
    """Each element once, to the one other rank: by the unit, or in buckets; after the last micro-batch only."""
    result, layers_and_ends = side_by_side(2, m)["DDP"][0], sum(elements())
    assert result.sent == [layers_and_ends + FACTS, layers_and_ends + 1]
    units_and_facts = SMALL.layers + 3 + 1
    assert [calls.total() for calls in result.calls] == [units_and_facts, 1 + 1]  # all fits into one bucket


def test_what_is_sent_beside_zero_redundancy_optimizer():
    """Theirs all-reduces the gradient and broadcasts the weights; ours does with a reduce-scatter for the first."""
    result, layers_and_ends = side_by_side(2)["ZeroRedundancyOptimizer"][0], sum(elements())
    assert result.sent == [layers_and_ends + FACTS, layers_and_ends * 3 // 2 + 1]


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("kind, gathers", [("FSDP2", 2), ("FSDP2, no reshard", 1)])
def test_what_is_sent_beside_fsdp(kind, gathers, m):
    """As often gathered and reduced in each micro-batch; but over gloo, its reduce-scatter is an all-reduce."""
    result, (layers, ends) = side_by_side(2, m)[kind][0], elements()
    assert result.sent[0] == m * (layers * (gathers + 1) + ends * 2) // 2 + FACTS
    assert result.sent[1] == m * (layers * (gathers + 2) + ends * 3) // 2 + 1


def test_fsdp_pads_each_parameter_and_ours_none():
    result, hidden = side_by_side(3)["FSDP2"][0], SMALL.hidden

    def share(rows, columns=1):
        return -(-rows // 3) * columns

    weights = [(3 * hidden, hidden), (hidden, hidden), (SMALL.ffn, hidden), (hidden, SMALL.ffn)]
    layer = sum(share(*shape) + share(shape[0]) for shape in weights) + 4 * share(hidden)
    root = share(SMALL.vocab, hidden) + share(SMALL.sequence, hidden) + 2 * share(hidden)
    ours, theirs = ({n for operation, n in calls if operation == "all_gather"} for calls in result.calls)
    assert theirs == {layer, root}
    whole = elements()[0] // SMALL.layers
    assert -(-whole // 3) in ours and layer > -(-whole // 3)


def test_ours_holds_no_more_at_the_peak(capsys):
    """DDP's buckets stay from step to step. FSDP2 gathers into one buffer, and copies from that into another."""
    with capsys.disabled():
        print("\npeak bytes, (ours, PyTorch's) on each rank")
        for kind, results in side_by_side(2).items():
            print(f"{kind}:", *[result.peak for result in results])
    for results in side_by_side(2).values():
        assert all(result.peak[0] <= result.peak[1] for result in results)


def test_the_table():
    result = side_by_side(2)["DDP"][0]
    lines = result.table("DDP").splitlines()
    assert lines[0].split() == ["ours", "DDP"]
    assert lines[1].startswith("step, median") and f"ratio {result.ratio.median:.2f} [" in lines[1]
    assert lines[2].split() == ["elements", "sent", *(f"{n:,}" for n in result.sent)]
    assert lines[3].split() == ["calls", "6", "2"]
    assert lines[4].startswith("peak memory") and "2 CPU ranks over gloo" in lines[-1]


@pytest.mark.parametrize(
    "parallel, train, words",
    [
        ({"zero": 2}, {}, "zero=2 can be 0, 1 or 3"),
        ({"dp": 1}, {}, "are all 2 ranks, not dp=1"),
        ({"recompute": "full"}, {}, "recompute='full' stands beside"),
        ({"grad_dtype": "float32"}, {}, "in the model's own dtype"),
        ({}, {"clip": 1.0}, "clip=1.0 must be None"),
    ],
)
def test_what_stands_beside_nothing_is_refused(parallel, train, words):
    class TwoRanks:
        rank, size = 0, 2

    with pytest.raises(ConfigError, match=words):
        TorchReplica(TwoRanks(), MODEL, replace(ParallelConfig(dp=2), **parallel), TrainConfig(batch=8, **train))
