"""Tensor parallelism equals the unsplit model, and sends what theory says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.dropout import seed_dropout
from pcourse.model import build
from pcourse.parallel.tensor import ColumnParallelLinear, ReduceFromRanks, RowParallelLinear, tensor_parallel
from pcourse.proof import prove
from pcourse.split import shard_range
from pcourse.train import measure
from pcourse.world import World

TINY = ModelConfig(layers=2, hidden=48, heads=12, vocab=61, ffn=37, sequence=11)
CASES = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "untied": {"tied": False},
    "fused": {"attention": "fused"},
    "fused, dropout": {"attention": "fused", "dropout": 0.2},
    "grouped heads": {"kv_heads": 12, "heads": 24},
}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_parity_on_threads(tp, case):
    proof = prove(replace(TINY, **CASES[case]), ParallelConfig(tp=tp, micro_batches=2), TrainConfig(batch=3, clip=0.5))
    assert proof.holds, proof


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_parity_in_float32(tp):
    proof = prove(replace(TINY, dropout=0.1), ParallelConfig(tp=tp), dtype="float32")
    assert proof.worst < 2e-5, proof


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_parity_on_processes(tp):
    model = replace(TINY, dropout=0.2)
    assert (proof := prove(model, ParallelConfig(tp=tp), world=World(tp, "gloo"))).holds, proof
    assert (proof := prove(model, ParallelConfig(tp=tp), world=World(tp, "gloo"), dtype="float32")).worst < 2e-5, proof


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tp=st.integers(1, 4),
    groups=st.integers(1, 2),
    shared=st.integers(1, 2),
    width=st.sampled_from([1, 3, 4]),
    sizes=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 2),
            "vocab": st.integers(4, 70),
            "ffn": st.integers(4, 30),
            "sequence": st.integers(1, 9),
            "dropout": st.sampled_from([0.0, 0.4]),
            "tied": st.booleans(),
            "attention": st.sampled_from(["explicit", "fused"]),
        }
    ),
    batch=st.integers(1, 3),
    clip=st.sampled_from([None, 0.1]),
)
def test_parity_at_odd_sizes(tp, groups, shared, width, sizes, batch, clip):
    kv_heads = tp * groups
    heads = kv_heads * shared
    model = ModelConfig(heads=heads, kv_heads=kv_heads, hidden=heads * width, **sizes)
    proof = prove(model, ParallelConfig(tp=tp), TrainConfig(batch=batch, clip=clip))
    assert proof.holds, proof


def test_the_proof_can_fail(monkeypatch):
    """A bias added by every rank before the sum, the commonest fault, is seen in the loss."""

    def biased(self, x):
        return ReduceFromRanks.apply(nn.functional.linear(x, self.weight, self.bias), self.comm, "")

    monkeypatch.setattr(RowParallelLinear, "forward", biased)
    assert not prove(TINY, ParallelConfig(tp=2)).holds


def test_bytes_of_a_layer_equal_theory():
    """Two all-reduces of b·s·h forward, two backward: 8bsh(t-1)/t elements sent a layer (Narayanan et al., 3.2)."""
    model, train = (
        ModelConfig(layers=1, hidden=32, heads=4, vocab=64, sequence=16),
        TrainConfig(batch=2, steps=1, warmup=0),
    )
    for tp in (2, 4):
        one, three = (
            measure(replace(model, layers=n), ParallelConfig(tp=tp), train, World(tp, "threads")) for n in (1, 3)
        )
        payload = 2 * 16 * 32 * 4
        for a, b in zip(one.ranks, three.ranks, strict=True):
            rows = [r.row("tp", "all_reduce") for r in (a, b)]
            assert rows[1].calls - rows[0].calls == 2 * 4
            assert rows[1].payload - rows[0].payload == 2 * 4 * payload
            assert rows[1].wire - rows[0].wire == 2 * 8 * 2 * 16 * 32 * (tp - 1) // tp * 4


def test_bytes_of_a_whole_step_equal_theory():
    """Layers, embedding (1 forward), head (1 backward), cross-entropy (the maximum, then two sums, per token)."""
    model = ModelConfig(layers=2, hidden=32, heads=4, vocab=64, sequence=16)
    report = measure(model, ParallelConfig(tp=2), TrainConfig(batch=2, steps=1, warmup=0), World(2, "threads"))
    tokens, wide = 2 * 16, 2 * 16 * 32 * 4
    for rank in report.ranks:
        row = rank.row("tp", "all_reduce")
        assert row.calls == 4 * 2 + 2 + 2
        assert row.payload == (4 * 2 + 2) * wide + 3 * tokens * 4
        assert row.wire == row.payload  # 2(N-1)/N = 1 for two ranks
        assert {r.axis for r in rank.communication} == {"tp", "scalar"}
        assert rank.row("scalar", "all_reduce").calls == 1  # the gradient norm


def test_dropout_masks():
    """The same mask where the activation is replicated, different ones on different heads."""

    def program(comm):
        model = tensor_parallel(build(replace(TINY, dropout=0.5)), comm)
        seed_dropout(model, step_seed=3, first_sequence=0)
        block = model.blocks[0]
        return block.dropout1(torch.ones(2, 5, 48)), block.attention.dropout(torch.ones(2, 6, 5, 5))

    (replica0, heads0), (replica1, heads1) = World(2, "threads").run(program, timeout=30)
    assert torch.equal(replica0, replica1)
    assert not torch.equal(heads0, heads1)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_single_linears_that_gather_and_split(tp):
    """Column with gathered output, row with whole input: usable alone, forward and backward equal to nn.Linear."""

    def program(comm):
        torch_generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=torch_generator, dtype=torch.float64)  # noqa: E731
        linear = nn.Linear(7, 5, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(draw(5, 7)), linear.bias.copy_(draw(5))
        x, upstream = draw(3, 7), draw(3, 5)
        for split in (
            ColumnParallelLinear(linear, comm, gather_output=True),
            RowParallelLinear(linear, comm, split_input=True),
        ):
            x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
            linear.zero_grad()
            expected, got = linear(x1), split(x2)
            expected.backward(upstream)
            whole = linear.weight.grad.clone()
            got.backward(upstream)
            assert torch.allclose(got, expected) and torch.allclose(x2.grad, x1.grad)
            assert torch.allclose(split.weight.grad, split.weight.shard.of(whole))

    World(tp, "threads").run(program, timeout=30)


def test_heads_that_do_not_divide_are_refused_with_the_legal_values():
    with pytest.raises(ConfigError, match="12 heads do not split over tp=8; tp can be 1, 2, 3, 4, 6, 12"):
        measure(replace(TINY, hidden=48), ParallelConfig(tp=8))
    with pytest.raises(ConfigError, match=r"8 heads with 2 kv_heads do not split over tp=4; tp can be 1, 2$"):
        measure(ModelConfig(kv_heads=2), ParallelConfig(tp=4))
    with pytest.raises(ConfigError, match="without a row; tp can be 1, 2, 4$"):
        measure(ModelConfig(vocab=5), ParallelConfig(tp=8))


def test_uneven_shards_are_of_the_sizes_that_the_ranks_hold():
    def program(comm):
        model = tensor_parallel(build(TINY), comm)
        return model.embed.tokens.weight.shape[0], model.blocks[0].mlp.up.weight.shape[0]

    shapes = World(4, "threads").run(program, timeout=30)
    assert shapes == [(len(shard_range(61, 4, r)), len(shard_range(37, 4, r))) for r in range(4)]
    assert [sum(column) for column in zip(*shapes, strict=True)] == [61, 37]


def test_nan_proves_nothing(monkeypatch):
    def spoiled(model, comm):
        split = tensor_parallel(model, comm)
        split.head.norm.bias.register_hook(lambda grad: grad * float("nan"))
        return split

    monkeypatch.setattr("pcourse.train.tensor_parallel", spoiled)
    proof = prove(TINY, ParallelConfig(tp=2))
    assert not proof.holds and "NOT equal" in str(proof)


def test_a_clip_of_0_is_a_clip():
    assert prove(TINY, ParallelConfig(tp=2), TrainConfig(batch=2, clip=0)).holds
