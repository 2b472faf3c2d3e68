"""Data parallelism and ZeRO equal the unsplit model, and send what theory says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, validate
from pcourse.cost.cluster import Cluster, Link
from pcourse.cost.communication import communication
from pcourse.cost.units import units
from pcourse.data import batch
from pcourse.model import build
from pcourse.parallel.data import DataParallel
from pcourse.parallel.partition import partition
from pcourse.parallel.stage import Stage
from pcourse.parallel.unit import units_of
from pcourse.proof import prove
from pcourse.train import Trainer, measure
from pcourse.world import World

TINY = ModelConfig(layers=2, hidden=12, heads=3, ffn=17, vocab=23, sequence=5)
ZERO = (0, 1, 2, 3)
CASES = {"dropout": {"dropout": 0.3}, "untied": {"tied": False}, "fused": {"attention": "fused"}}
UNEVEN = TrainConfig(batch=9, clip=0.5, weight_decay=0.1)  # over the replicas, and over two micro-batches of each


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_parity_on_threads(dp, zero):
    proof = prove(TINY, ParallelConfig(dp=dp, zero=zero, micro_batches=2), UNEVEN)
    assert proof.holds, proof


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("case", CASES)
def test_parity_of_other_models(zero, case):
    proof = prove(replace(TINY, **CASES[case]), ParallelConfig(dp=3, zero=zero, micro_batches=2), UNEVEN)
    assert proof.holds, proof


@pytest.mark.parametrize("zero", ZERO)
def test_parity_in_float32(zero):
    proof = prove(replace(TINY, dropout=0.1), ParallelConfig(dp=3, zero=zero), dtype="float32")
    assert proof.worst < 2e-5, proof


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("dp", [2, 3])
def test_parity_on_processes(dp, zero):
    parallel = ParallelConfig(dp=dp, zero=zero, micro_batches=2)
    proof = prove(replace(TINY, dropout=0.2), parallel, TrainConfig(batch=6), world=World(dp, "gloo"))
    assert proof.holds, proof


SPLITS = {
    "tp": {"tp": 3},
    "1f1b": {"pp": 2, "micro_batches": 3},
    "interleaved": {"pp": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1", "micro_batches": 3},
    "zb-v": {"pp": 2, "chunks": 2, "schedule": "zb-v", "micro_batches": 2},
    "tp and pp": {"tp": 3, "pp": 2, "micro_batches": 2},
    "recompute": {"recompute": "full", "micro_batches": 2},
}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("split", SPLITS)
def test_parity_beside_other_splits(zero, split):
    parallel = ParallelConfig(dp=2, zero=zero, **SPLITS[split])
    proof = prove(replace(TINY, layers=4, dropout=0.2), parallel, TrainConfig(batch=7, clip=0.5))
    assert proof.holds, proof


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dp=st.integers(1, 5),
    zero=st.sampled_from(ZERO),
    reshard=st.booleans(),
    micro_batches=st.integers(1, 3),
    sizes=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 3),
            "hidden": st.sampled_from([1, 2, 4, 6]),
            "vocab": st.integers(1, 20),
            "ffn": st.integers(1, 9),
            "sequence": st.integers(1, 6),
            "dropout": st.sampled_from([0.0, 0.4]),
            "tied": st.booleans(),
        }
    ),
    spare=st.integers(0, 3),
    clip=st.sampled_from([None, 0.1]),
)
def test_parity_at_odd_sizes(dp, zero, reshard, micro_batches, sizes, spare, clip):
    """Down to a hidden size of 1, where most ranks own nothing of some units."""
    parallel = ParallelConfig(dp=dp, zero=zero, micro_batches=micro_batches, reshard=reshard or zero < 3)
    proof = prove(ModelConfig(heads=1, **sizes), parallel, TrainConfig(batch=dp * micro_batches + spare, clip=clip))
    assert proof.holds, proof


def losses(zero: int, **train) -> list[float]:
    model, parallel = replace(TINY, dtype="float64"), ParallelConfig(dp=2, zero=zero, micro_batches=3)
    train = TrainConfig(batch=7, weight_decay=0.1, learning_rate=0.01, **train)

    def program(comm):
        trainer = Trainer(comm, model, parallel, train)
        return [trainer.step(number)[0] for number in range(5)]

    return World(2, "threads").run(program)[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_all_stages_give_the_same_losses(optimizer):
    """Over five steps of three accumulated micro-batches, clipped: what they share out changes no number."""
    first, *others = (losses(zero, optimizer=optimizer, clip=0.2) for zero in ZERO)
    assert len(set(first)) == 5
    for other in others:
        assert torch.allclose(torch.tensor(other), torch.tensor(first), rtol=1e-10, atol=0)


# --- bytes -----------------------------------------------------------------------------------------------------------


def sent(report) -> list[dict]:
    """{(axis, operation): {calls, payload, wire}} of each rank, start-up and scalars left out."""
    return [
        {
            (row.axis, row.operation): {"calls": row.calls, "payload": row.payload, "wire": row.wire}
            for row in rank.communication
            if row.axis not in ("scalar", "start-up")
        }
        for rank in report.ranks
    ]


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("split", SPLITS)
def test_bytes_are_those_of_theory(zero, split):
    model, train = replace(TINY, layers=4), TrainConfig(batch=7, steps=1, warmup=0)
    parallel = ParallelConfig(dp=2, zero=zero, **SPLITS[split])
    report = measure(model, parallel, train, clock="virtual", pace=1.0)
    assert sent(report) == [communication(model, parallel, train, rank) for rank in range(parallel.ranks)]


@pytest.mark.parametrize("reshard", [True, False])
def test_bytes_of_stage_3_that_keeps_what_it_gathered(reshard):
    model, train = replace(TINY, dtype="bfloat16", tied=False), TrainConfig(batch=7, steps=1, warmup=0)
    parallel = ParallelConfig(dp=3, zero=3, micro_batches=2, reshard=reshard, grad_dtype="float32", master_weights=True)
    report = measure(model, parallel, train, clock="virtual", pace=1.0)
    assert sent(report) == [communication(model, parallel, train, rank) for rank in range(3)]


@pytest.mark.parametrize("m", [1, 3])
def test_the_sums_of_the_papers(m):
    """2P(N-1)/N, (m+1)P(N-1)/N and 3mP(N-1)/N elements a rank, on average over the ranks; what stays in stage 3 counts
    2m: with tied weights the matrix, the positions and the last norm."""
    n, train = 4, TrainConfig(batch=4 * m)
    held = units(TINY, ParallelConfig(dp=n), train)
    P = sum(held.values())
    stays = sum(size for name, size in held.items() if not name.startswith("layer"))
    for zero, times_p in ((0, 2 * P), (1, 2 * P), (2, (m + 1) * P), (3, 3 * m * P - m * stays)):
        parallel = ParallelConfig(dp=n, zero=zero, micro_batches=m)
        wire = sum(row["wire"] for r in range(n) for row in communication(TINY, parallel, train, r).values()) / 4
        assert wire == pytest.approx(times_p * (n - 1), rel=0)


def test_units_are_what_theory_counts():
    parallel = ParallelConfig(pp=2, dp=2, tp=3)
    model = replace(TINY, layers=5)

    def program(comm):
        trainer = Trainer(comm, model, parallel, TrainConfig())
        return {unit.name: unit.numel for unit in trainer.replicas.units}

    for rank, found in enumerate(World(12, "threads").run(program)):
        assert found == units(model, parallel, TrainConfig(), rank)


# --- when, and what of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero, times", [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_a_layer_is_reduced_while_the_one_before_computes(zero, times):
    """Its reduction starts inside a backward pass: in the last micro-batch's alone, or with ZeRO 2 and 3 in each."""
    parallel = ParallelConfig(dp=2, zero=zero, micro_batches=3)

    def program(comm):
        trainer = Trainer(comm, replace(TINY, layers=4), parallel, TrainConfig(batch=6))
        comm.recorder.take()
        trainer.forward_backward(0)
        calls, computes = comm.recorder.take()
        operation = "reduce_scatter" if zero else "all_reduce"
        starts = [c.entered for c in calls if c.operation == operation and c.label == "layer 2"]
        backwards = [(c.start, c.end, c.micro_batch) for c in computes if c.kind == "backward"]
        return [k for at in starts for start, end, k in backwards if start < at < end]

    for inside in World(2, "threads").run(program):
        assert inside == [0, 1, 2][-times:]


def test_stage_3_has_two_layers_whole_at_most():
    model, parallel = replace(TINY, layers=5), ParallelConfig(dp=2, zero=3)

    def program(comm):
        trainer = Trainer(comm, model, parallel, TrainConfig(batch=2))
        layers = [unit for unit in trainer.replicas.units if unit.name.startswith("layer")]
        most = []

        def count(*_):
            most.append(sum(unit.weights.untyped_storage().nbytes() > 0 for unit in layers))

        for block in trainer.model.blocks.values():
            block.mlp.register_forward_hook(count)
            block.mlp.register_full_backward_hook(count)
        trainer.step(0)
        return most, [unit.weights.untyped_storage().nbytes() for unit in trainer.replicas.units]

    for most, afterwards in World(2, "threads").run(program):
        assert len(most) == 10 and max(most) == 2
        assert set(afterwards) == {0}


def test_the_optimizer_steps_only_what_the_rank_owns():
    def program(comm, zero):
        trainer = Trainer(comm, TINY, ParallelConfig(dp=3, zero=zero), TrainConfig(batch=3))
        trainer.step(0)
        return sum(v.numel() for o, _ in trainer.optimizers for s in o.state.values() for v in s.values() if v.dim())

    total = sum(p.numel() for p in build(TINY).parameters())
    assert World(3, "threads").run(program, 0) == [2 * total] * 3
    for zero in (1, 2, 3):
        assert sum(World(3, "threads").run(program, zero)) == 2 * total


def test_ranks_that_start_from_different_weights_are_made_equal():
    def differ(rank):
        def prepare(model):
            with torch.no_grad():
                for p in model.parameters():
                    p += rank
            return model

        return prepare

    def program(comm, zero):
        trainer = Trainer(comm, TINY, ParallelConfig(dp=3, zero=zero), TrainConfig(), prepare=differ(comm.rank))
        with trainer.replicas.whole_weights():
            return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    whole = dict(build(TINY).named_parameters())
    for zero in ZERO:
        for weights in World(3, "threads").run(program, zero):
            assert all(torch.equal(p, whole[name]) for name, p in weights.items())


@pytest.mark.parametrize("zero", ZERO)
def test_replicas_with_different_numbers_of_targets(zero):
    """Weighted by tokens: a mean of the replicas' means is something else."""
    model = replace(TINY, dtype="float64")
    tokens, targets = batch(model, TrainConfig(batch=4), 0)
    targets = targets.clone()
    targets[0], targets[3, :3] = -100, -100
    counted = int((targets != -100).sum())

    def load(rows):
        return tokens[rows.start : rows.stop], targets[rows.start : rows.stop]

    def program(comm):
        trainer = Trainer(comm, model, ParallelConfig(dp=2, zero=zero, micro_batches=2), TrainConfig(batch=4))
        return trainer.accumulate(load, counted).item(), trainer.replicas.whole_gradients()

    whole = build(model)
    loss = whole.loss(tokens, targets) / counted
    loss.backward()
    expected = dict(whole.named_parameters())
    for got, gradients in World(2, "threads").run(program):
        assert got == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name].grad, rtol=1e-10, atol=1e-14)


class Detour(nn.Module):
    """A block that adds a term of its own where `taken` says so, and has a parameter that nobody uses."""

    def __init__(self, block, taken: bool, hidden: int):
        super().__init__()
        self.block, self.taken = block, taken
        self.sometimes = nn.Parameter(torch.ones(hidden, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(hidden, dtype=torch.float64))

    def forward(self, x):
        x = self.block(x)
        return x * self.sometimes if self.taken else x


@pytest.mark.parametrize("zero", ZERO)
def test_frozen_and_unused_parameters(zero):
    """One replica alone uses a parameter: all get its gradient. None uses another: it stays, whatever weight decay."""
    model = replace(TINY, dtype="float64")
    train = TrainConfig(batch=4, optimizer="sgd", weight_decay=0.5)

    def prepare(taken):
        def change(gpt):
            gpt.blocks[0] = Detour(gpt.blocks[0], taken, model.hidden)
            gpt.blocks[1].requires_grad_(False)
            gpt.embed.positions.requires_grad_(False)
            return gpt

        return change

    def program(comm):
        trainer = Trainer(comm, model, ParallelConfig(dp=2, zero=zero), train, prepare=prepare(comm.rank == 1))
        for number in range(2):
            trainer.step(number)
        with trainer.replicas.whole_weights():
            return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    whole = prepare(True)(build(model))
    sgd = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
    for number in range(2):
        tokens, targets = batch(model, train, number)
        for rows, whole.blocks[0].taken in ((slice(0, 2), False), (slice(2, 4), True)):
            (whole.loss(tokens[rows], targets[rows]) / targets.numel()).backward()
        sgd.step()
        sgd.zero_grad()
    for weights in World(2, "threads").run(program):
        for name, p in whole.named_parameters():
            assert torch.allclose(weights[name], p, rtol=1e-10, atol=1e-14), name
        assert torch.equal(weights["blocks.0.never"], torch.ones(model.hidden, dtype=torch.float64))


def test_everything_frozen_on_a_rank():
    model, train = replace(TINY, dtype="float64"), TrainConfig(batch=4)

    def freeze(gpt):
        return gpt.requires_grad_(False)

    def program(comm, zero):
        trainer = Trainer(comm, model, ParallelConfig(dp=2, zero=zero), train, prepare=freeze)
        return trainer.step(0)

    for zero in ZERO:
        (loss, norm), other = World(2, "threads").run(program, zero)
        assert (loss, norm) == other and norm == 0


def test_segments_partition_every_parameter():
    stage = Stage(build(TINY), list(partition(TINY, 1)))
    owned = {name: [] for name, _ in stage.named_parameters()}
    for rank in range(5):
        for unit in {unit for used in units_of(stage, 5, rank).values() for unit in used}:
            for segment in unit.segments:
                owned[segment.name] += range(segment.start, segment.stop)
    for name, p in stage.named_parameters():
        assert sorted(owned[name]) == list(range(p.numel()))


@pytest.mark.parametrize("zero", ZERO)
def test_a_step_has_the_gradients_of_its_own_batch(zero):
    """Whatever was run before it: a loss without backward, another backward, weights looked at in vain."""
    model, train = replace(TINY, dtype="float64"), TrainConfig(batch=4, learning_rate=0.01)

    def program(comm, disturb):
        trainer = Trainer(comm, model, ParallelConfig(dp=2, zero=zero), train)
        results = []
        for number in range(3):
            if disturb:
                with torch.no_grad():
                    trainer.model.chunks[0](*batch(model, train, number + 10))
                trainer.model.chunks[0](*batch(model, train, number + 20))
                trainer.forward_backward(number + 30)
                with pytest.raises(ZeroDivisionError), trainer.replicas.whole_weights():
                    1 / 0  # noqa: B018
            results.append(trainer.step(number))
        return results

    threads = World(2, "threads")
    assert threads.run(program, True) == threads.run(program, False)


@pytest.mark.parametrize("zero", ZERO)
def test_on_a_described_cluster_reductions_run_beside_the_backward(zero):
    """Each layer's starts when its own backward is over, and is hidden by the next one's; the last one's is not, nor
    are the weights that ZeRO-1 and 2 gather when all is done."""
    cluster = Cluster("c", peak_flops=1e12, efficiency=1.0, link=Link(bandwidth=8e9))
    model, train = ModelConfig(layers=8, hidden=64, sequence=32), TrainConfig(batch=16, steps=1, warmup=0)
    report = measure(model, ParallelConfig(dp=2, zero=zero), train, clock="virtual", cluster=cluster)
    rank = report.ranks[0]
    messages = rank.wire("dp") / cluster.link.bandwidth
    assert rank.seconds["compute"] < report.step_seconds < rank.seconds["compute"] + 0.7 * messages


# --- the proofs can fail ---------------------------------------------------------------------------------------------


def test_a_mean_over_replicas_is_seen(monkeypatch):
    take = DataParallel._take_gradient
    monkeypatch.setattr(DataParallel, "_take_gradient", lambda self, unit: take(self, unit) / 2)
    for zero in ZERO:
        assert prove(TINY, ParallelConfig(dp=2, zero=zero)).gradients > 1e-3


def test_a_norm_counted_twice_is_seen(monkeypatch):
    norm = Trainer.gradient_norm
    monkeypatch.setattr(Trainer, "gradient_norm", lambda self: norm(self) * 2**0.5)
    assert prove(TINY, ParallelConfig(dp=2)).gradient_norm > 0.1


def test_what_cannot_run_is_refused():
    for parallel, words in (
        (ParallelConfig(dp=5), "batch=4 sequences cannot fill dp=5 replicas; dp can be 1 to 4"),
        (ParallelConfig(dp=2, micro_batches=3), "micro_batches=3 on each of dp=2 replicas; it can be 1 to 2"),
        (ParallelConfig(dp=2, zero=2, reshard=False), "reshard=False keeps parameters that zero=3 has gathered"),
        (ParallelConfig(master_weights=True), "dtype='float32'; master_weights can be False"),
        (ParallelConfig(grad_dtype="float32"), "is for bfloat16 weights"),
        (ParallelConfig(recompute_every=2), "recompute_every can be 1, or recompute can be selective or full"),
    ):
        with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
            validate(TINY, parallel, TrainConfig(batch=4))
