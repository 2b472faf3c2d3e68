"""Recompute changes no number: it runs a piece twice, keeps its inputs alone, and takes the same masks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.meter import MemoryMeter
from pcourse.model import Block, build
from pcourse.parallel.recompute import Recomputed, run_again_flops
from pcourse.proof import prove
from pcourse.train import Trainer, measure
from pcourse.world import World

TINY = ModelConfig(layers=4, hidden=12, heads=6, kv_heads=3, ffn=17, vocab=23, sequence=5, dropout=0.5)
POLICIES = {
    "full": {"recompute": "full"},
    "every other": {"recompute": "full", "recompute_every": 2},
    "selective": {"recompute": "selective"},
}
SPLITS = {
    "alone": {"micro_batches": 2},
    "tp": {"tp": 3},
    "1f1b": {"pp": 2, "micro_batches": 3},
    "interleaved": {"pp": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1", "micro_batches": 3},
    "zb-v": {"pp": 2, "chunks": 2, "schedule": "zb-v", "micro_batches": 2},
    "zero 3": {"dp": 2, "zero": 3, "micro_batches": 2},
    "zero 3 that keeps": {"dp": 2, "zero": 3, "reshard": False},
    "all": {"tp": 3, "pp": 2, "dp": 2, "zero": 3, "micro_batches": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", SPLITS)
def test_parity(policy, split):
    """With half of everything dropped: another mask in the second run would be seen at once."""
    parallel = ParallelConfig(**POLICIES[policy], **SPLITS[split])
    proof = prove(TINY, parallel, TrainConfig(batch=5, clip=0.5))
    assert proof.holds, proof


@pytest.mark.parametrize("policy", POLICIES)
def test_parity_of_fused_attention(policy):
    parallel = ParallelConfig(**POLICIES[policy], tp=3, pp=2, micro_batches=2)
    proof = prove(replace(TINY, attention="fused"), parallel, TrainConfig(batch=5, clip=0.5))
    assert proof.holds, proof


@pytest.mark.parametrize("policy", POLICIES)
def test_parity_on_processes(policy):
    parallel = ParallelConfig(**POLICIES[policy], pp=2, micro_batches=2)
    assert (proof := prove(TINY, parallel, world=World(2, "gloo"))).holds, proof
    assert (proof := prove(TINY, parallel, world=World(2, "gloo"), dtype="float32")).worst < 2e-5, proof


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(["selective", "full"]),
    every=st.integers(1, 3),
    sizes=st.fixed_dictionaries(
        {
            "layers": st.integers(3, 4),
            "heads": st.sampled_from([1, 2]),
            "ffn": st.integers(1, 9),
            "sequence": st.integers(1, 6),
            "dropout": st.sampled_from([0.0, 0.4]),
            "attention": st.sampled_from(["explicit", "fused"]),
            "tied": st.booleans(),
        }
    ),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h2"]),
    pp=st.integers(1, 3),
)
def test_parity_at_odd_sizes(policy, every, sizes, schedule, pp):
    parallel = ParallelConfig(recompute=policy, recompute_every=every, pp=pp, schedule=schedule, micro_batches=3)
    proof = prove(ModelConfig(hidden=4, vocab=13, **sizes), parallel, TrainConfig(batch=4))
    assert proof.holds, proof


@pytest.mark.parametrize("dropout, last_runs", [(0.0, 1), (0.5, 2)])
def test_each_layer_runs_twice_but_for_what_nobody_needs(dropout, last_runs):
    """The second run ends with the last tensor that backward reads: where no dropout follows, before `down`."""
    model = replace(TINY, dropout=dropout)

    def program(comm):
        trainer = Trainer(comm, model, ParallelConfig(recompute="full", recompute_every=2), TrainConfig(batch=2))
        begun, ended = [], []
        for i, block in trainer.model.blocks.items():
            block.attention.qkv.register_forward_pre_hook(lambda *_, i=int(i): begun.append(i))
            block.mlp.down.register_forward_hook(lambda *_, i=int(i): ended.append(i))
        trainer.forward_backward(0)
        return [begun.count(i) for i in range(4)], [ended.count(i) for i in range(4)]

    ((begun, ended),) = World(1, "threads").run(program)
    assert begun == [2, 1, 2, 1]
    assert ended == [last_runs, 1, last_runs, 1]


def kept(run) -> int:
    """Bytes that a forward pass leaves for backward."""
    torch.manual_seed(0)
    with MemoryMeter() as meter:
        block = Block(replace(TINY, dropout=0.0), 0)
        x = torch.randn(2, 5, 12, requires_grad=True)
        meter.claim("parameters", block.parameters())
        with meter.saving():
            y = run(block, meter)(x)
        bytes_kept = meter.bytes["activations"]
        y.sum().backward()
        assert meter.bytes["activations"] <= x.nbytes
        return bytes_kept


def test_only_the_input_is_kept():
    whole = kept(lambda block, meter: block)
    assert kept(lambda block, meter: Recomputed(block, meter=meter)) == 2 * 5 * 12 * 4 < whole / 10


def test_memory_of_a_step():
    """Every layer's activations, or every layer's input and one layer's activations."""
    model, train = replace(TINY, layers=8, dropout=0.0), TrainConfig(batch=4, steps=1, warmup=0)

    def activations(**how):
        return measure(model, ParallelConfig(**how), train, clock="virtual", pace=1.0).ranks[0].memory.activations

    none, full = activations(), activations(recompute="full")
    assert full < none / 3
    assert full < activations(recompute="full", recompute_every=2) < none
    assert full < activations(recompute="selective") < none


def test_a_pace_adds_one_forward():
    """A stage's forward takes t, its backward 2t, and recomputed in full 3t (Korthikanti et al. 2022, table 4)."""

    def seconds(**how):
        train = TrainConfig(batch=4, steps=1, warmup=0)
        return measure(TINY, ParallelConfig(**how), train, clock="virtual", pace=1.0).step_seconds

    assert seconds(recompute="full") == pytest.approx(4)
    assert seconds(recompute="full", recompute_every=2) == pytest.approx(3.5)
    assert seconds(recompute="full", pp=2, micro_batches=4) == pytest.approx((4 + 2 - 1) * 4)
    assert 3 < seconds(recompute="selective") < 3.5


def test_the_timeline_shows_it():
    report = measure(TINY, ParallelConfig(recompute="full"), TrainConfig(batch=4, steps=1), clock="virtual", pace=1.0)
    assert sum(span.seconds for span in report.ranks[0].spans if span.kind == "recompute") == pytest.approx(1)


def test_flops_of_the_second_run():
    model = ModelConfig(layers=1, hidden=64, heads=4, sequence=32)
    forward = 24 * 32 * 64**2 + 4 * 32**2 * 64
    assert run_again_flops(replace(model, dropout=0.1), "full") == forward
    assert run_again_flops(model, "full") == forward - 8 * 32 * 64**2
    assert run_again_flops(model, "selective") == 2 * 32**2 * 64


def test_a_piece_that_does_something_else_the_second_time_is_refused():
    times = []

    def fickle(x):
        times.append(1)
        return x.exp().exp() if len(times) == 1 else x.exp()

    y = Recomputed(fickle)(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="kept 1 tensors for backward where the first kept 2"):
        y.sum().backward()


def test_without_gradients_nothing_is_kept():
    block = build(TINY).blocks[0].eval()
    with torch.no_grad():
        x = torch.randn(2, 5, 12)
        assert torch.equal(Recomputed(block)(x), block(x))


def test_the_wrong_mask_is_seen(monkeypatch):
    """The second run of every micro-batch with the masks of the first one's: gradients are off, the loss is not."""
    from pcourse.parallel import pipeline

    seed = pipeline.seed_dropout
    calls = []

    def wrong(chunk, step_seed, first_sequence):
        calls.append(first_sequence)
        seed(chunk, step_seed, 0 if len(calls) > 2 else first_sequence)

    monkeypatch.setattr(pipeline, "seed_dropout", wrong)
    proof = prove(TINY, ParallelConfig(recompute="full", pp=1, schedule="gpipe", micro_batches=2), TrainConfig(batch=4))
    assert proof.gradients > 1e-4 > 1e-10 > proof.loss
