"""Pipeline parallelism equals the unsplit model for every schedule, and sends and holds what theory says."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, validate
from pcourse.cost.communication import communication
from pcourse.cost.layers import pieces
from pcourse.data import batch
from pcourse.model import build
from pcourse.parallel.partition import stages_of
from pcourse.parallel.pipeline import Pipeline, TiedGradients
from pcourse.parallel.put_off import PutOff
from pcourse.parallel.schedule_check import peak_in_flight
from pcourse.parallel.schedules import SCHEDULES
from pcourse.parallel.stage import Stage
from pcourse.proof import prove
from pcourse.train import Trainer, measure
from pcourse.world import RankError, World

TINY = ModelConfig(layers=8, hidden=8, heads=2, vocab=13, sequence=3)
CHUNKS = {"interleaved": 2, "zb-v": 2}


def configuration(name, p, m, **more) -> ParallelConfig:
    return ParallelConfig(**{"pp": p, "micro_batches": m, "schedule": name, "chunks": CHUNKS.get(name, 1), **more})


def runs(parallel, model=TINY, train=None) -> bool:
    try:
        validate(model, parallel, train or TrainConfig())
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_parity_on_threads(name, p):
    """Every number of micro-batches that makes sense; 9 sequences, so that most do not divide them."""
    legal = [m for m in range(1, 9) if runs(configuration(name, p, m))]
    assert len(legal) >= 2
    for m in legal:
        proof = prove(TINY, configuration(name, p, m), TrainConfig(batch=9, clip=0.5))
        assert proof.holds, (m, proof)


@pytest.mark.parametrize("name", SCHEDULES)
def test_parity_with_tensor_parallelism_and_dropout(name):
    model = replace(TINY, dropout=0.3)
    proof = prove(model, configuration(name, 2, 4, tp=2), TrainConfig(batch=6, clip=0.5))
    assert proof.holds, proof
    proof = prove(model, configuration(name, 2, 4, tp=2), TrainConfig(batch=6), dtype="float32")
    assert proof.worst < 2e-5, proof


@pytest.mark.parametrize(
    ("name", "p", "more"),
    [
        ("gpipe", 2, {}),
        ("1f1b", 4, {"partition": "memory"}),
        ("interleaved", 2, {"tp": 2}),
        ("zb-h1", 3, {}),
        ("zb-h2", 2, {"tp": 2, "partition": "compute"}),
        ("zb-v", 3, {}),
        ("1f1b", 3, {"tp": 2}),
    ],
)
def test_parity_on_processes(name, p, more):
    model, parallel = replace(TINY, dropout=0.2), configuration(name, p, 4, **more)
    world = World(parallel.ranks, "gloo")
    assert (proof := prove(model, parallel, TrainConfig(batch=6), world=world)).holds, proof
    assert (proof := prove(model, parallel, TrainConfig(batch=6), world=world, dtype="float32")).worst < 2e-5, proof


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(SCHEDULES),
    p=st.integers(1, 3),
    m=st.integers(1, 5),
    chunks=st.integers(1, 3),
    rule=st.sampled_from(["uniform", "compute", "memory"]),
    sizes=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 7),
            "vocab": st.integers(2, 300),
            "sequence": st.integers(1, 5),
            "tied": st.booleans(),
            "attention": st.sampled_from(["explicit", "fused"]),
            "dropout": st.sampled_from([0.0, 0.4]),
        }
    ),
    size=st.integers(1, 7),
)
def test_parity_at_odd_sizes(name, p, m, chunks, rule, sizes, size):
    model, train = replace(TINY, **sizes), TrainConfig(batch=size, clip=0.1)
    parallel = ParallelConfig(pp=p, schedule=name, micro_batches=m, chunks=chunks, partition=rule)
    if runs(parallel, model, train):
        proof = prove(model, parallel, train)
        assert proof.holds, (parallel, proof)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["naive", *CHUNKS, "zb-h2"])
def test_messages_equal_theory(name, tied):
    model, parallel, train = replace(TINY, tied=tied), configuration(name, 2, 4, tp=2), TrainConfig(batch=6, steps=1)
    report = measure(model, parallel, train, World(4, "threads"))
    for rank in report.ranks:
        measured = {
            (row.axis, row.operation): {"calls": row.calls, "payload": row.payload, "wire": row.wire}
            for row in rank.communication
            if row.axis != "scalar"
        }
        assert measured == communication(model, parallel, train, rank.rank)
    crossings = sum(rank.row("pp", "send").calls for rank in report.ranks[::2])
    cuts = {"interleaved": 3, "zb-v": 2}.get(name, 1)
    assert crossings == 2 * 4 * cuts


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved"])
def test_activations_in_flight_to_the_byte(name):
    """Each stage's peak is its own pieces' activations times the micro-batches that it holds."""
    model = replace(TINY, layers=6)
    parallel, train = configuration(name, 3, 6), TrainConfig(batch=12, steps=1, warmup=0)
    report = measure(model, parallel, train, World(3, "threads"))
    schedule, parts = stages_of(model, parallel, train)
    for stage, rank in enumerate(report.ranks):
        held = [
            sum(piece.activations for piece in parts[schedule.position(stage, c)].pieces(pieces(model, 2)))
            for c in range(schedule.chunks)
        ]
        if schedule.chunks == 1:
            assert rank.memory.activations == held[0] * peak_in_flight(schedule, stage)
        elif stage == 1:  # with equal chunks: neither embedding nor head
            assert rank.memory.activations == sum(held) * peak_in_flight(schedule, stage)


def test_zero_bubble_keeps_what_its_weight_gradients_need():
    """Qi et al. 2024, table 2, stage i from 0: (p - i) micro-batches whole, and of i more the linear layers' X and dY
    (there 32sbh bytes at 16 bit: here 16bsh numbers a layer)."""
    p, model = 4, ModelConfig(layers=4, hidden=64, heads=4, vocab=13, sequence=32)
    train = TrainConfig(batch=16, steps=1, warmup=0)
    reports = {n: measure(model, configuration(n, p, 8), train, World(p, "threads")) for n in ("1f1b", "zb-h1")}
    layer = pieces(model, 2)[1].activations
    for i in (1, 2):  # the stages of one layer and nothing else
        put_off = 16 * 2 * 32 * 64 * 4
        assert reports["1f1b"].ranks[i].memory.activations == (p - i) * layer
        measured = reports["zb-h1"].ranks[i].memory.activations
        assert measured == pytest.approx((p - i) * layer + i * put_off, rel=0.1)


def test_gpipe_grows_with_m_and_1f1b_does_not():
    train = TrainConfig(batch=32, steps=1, warmup=0)
    for name, factor in (("gpipe", 4.0), ("1f1b", 1.0)):
        few, many = (
            measure(TINY, configuration(name, 2, m), replace(train, batch=2 * m), World(2, "threads")) for m in (4, 16)
        )
        ratio = many.ranks[0].memory.activations / few.ranks[0].memory.activations
        assert ratio == pytest.approx(factor, rel=0.01), name


def test_unequal_token_counts_weigh_by_tokens():
    """Half of one micro-batch's targets are left out: still the mean over all that count (torchtitan#2206)."""
    parallel, train = configuration("1f1b", 2, 3), TrainConfig(batch=5)
    model = replace(TINY, dtype="float64")

    def load(rows, number=0):
        tokens, targets = batch(model, train, number, slice(rows.start, rows.stop))
        targets[:, ::2] = torch.where(torch.arange(rows.start, rows.stop)[:, None] < 2, -100, targets[:, ::2])
        return tokens, targets

    def program(comm):
        schedule, parts = stages_of(model, parallel, train)
        stage = Stage(build(model), [parts[comm.rank]])
        counted = int((load(range(5))[1] != -100).sum())
        pipeline = Pipeline(comm, schedule, stage)
        loss = pipeline.run([range(0, 2), range(2, 4), range(4, 5)], load, counted)
        pipeline.sum_tied(stage.tied_gradient)
        return loss.item(), {name: p.grad for name, p in stage.named_parameters()}

    whole = build(model)
    tokens, targets = load(range(5))
    loss = whole.loss(tokens, targets) / (targets != -100).sum()
    loss.backward()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for got, gradients in World(2, "threads").run(program):
        assert got == pytest.approx(loss.item(), abs=1e-12)
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, expected[name].grad, rtol=0, atol=1e-12)


def test_two_rounds_of_accumulation_are_one_big_batch():
    """torchtitan#1733: gradients that are scaled anew in each round are a moving average."""
    parallel, train = configuration("zb-h1", 2, 2), TrainConfig(batch=8)
    model = replace(TINY, dtype="float64")

    def load(rows):
        return batch(model, train, 0, slice(rows.start, rows.stop))

    def program(comm):
        schedule, parts = stages_of(model, parallel, train)
        stage = Stage(build(model), [parts[comm.rank]])
        pipeline = Pipeline(comm, schedule, stage)
        for rows in ([range(0, 2), range(2, 4)], [range(4, 6), range(6, 8)]):
            pipeline.run(rows, load, 8 * model.sequence)
        pipeline.sum_tied(stage.tied_gradient)
        return {name: p.grad for name, p in stage.named_parameters()}

    whole = build(model)
    (whole.loss(*load(range(8))) / (8 * model.sequence)).backward()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for gradients in World(2, "threads").run(program):
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, expected[name].grad, rtol=0, atol=1e-12)


def test_both_copies_of_a_tied_matrix_stay_equal_bit_for_bit():
    def program(comm):
        trainer = Trainer(comm, TINY, configuration("1f1b", 3, 3), TrainConfig(batch=5, optimizer="adamw"))
        for number in range(3):
            trainer.step(number)
        return None if trainer.model.tied_weight is None else trainer.model.tied_weight.detach().clone()

    first, middle, last = World(3, "gloo").run(program)
    assert middle is None
    assert torch.equal(first, last)


def test_three_stages_of_two_ranks_run_twice_in_one_world():
    """The time pass and the memory pass both split the world, and only the ends share the tied matrix."""
    report = measure(TINY, configuration("1f1b", 3, 3, tp=2), TrainConfig(batch=3, steps=1, warmup=0), timeout=30)
    assert len(report.ranks) == 6


def test_the_loss_is_known_on_every_rank():
    def program(comm):
        trainer = Trainer(comm, TINY, configuration("gpipe", 3, 2), TrainConfig(batch=4))
        return trainer.step(0)

    results = World(3, "threads").run(program)
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(torch.log(torch.tensor(13.0)).item(), rel=0.05)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_rank_that_raises_in_micro_batch_2_ends_all(backend):
    def program(comm):
        trainer = Trainer(comm, TINY, configuration("1f1b", 3, 4), TrainConfig(batch=4))
        if comm.rank == 1:
            chunk, seen = trainer.model.chunks[0], []
            forward = chunk.forward

            def third(x, targets=None):
                seen.append(1)
                if len(seen) == 3:
                    raise RuntimeError("a bad sequence in micro-batch 2")
                return forward(x, targets)

            chunk.forward = third
        trainer.step(0)

    world = World(3, backend)
    with pytest.raises(RankError, match="rank 1 of 3 raised RuntimeError: a bad sequence in micro-batch 2"):
        world.run(program, timeout=30)
    assert world.run(lambda comm: comm.rank) == [0, 1, 2]


def test_weight_gradients_that_are_put_off_are_the_same():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 2, bias=False)).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    with PutOff() as put_off:
        y = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected[0])
    assert all(p.grad is None for p in layer.parameters())
    put_off.compute()
    for p, grad in zip(layer.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_whole_and_split_backwards_can_be_mixed(monkeypatch):
    def mixed(*settings):
        schedule, parts = stages_of(*settings)
        orders = []
        for order in schedule.orders:
            halves = [[a] if a.micro_batch else [a._replace(kind="backward-input"), a._replace(kind="backward-weight")]
                      if a.kind == "backward" else [a] for a in order]  # fmt: skip
            orders.append(tuple(a for half in halves for a in half))
        return replace(schedule, orders=tuple(orders)), parts

    monkeypatch.setattr("pcourse.train.stages_of", mixed)
    assert (proof := prove(TINY, configuration("1f1b", 2, 3), TrainConfig(batch=5))).holds, proof


def test_a_failed_pass_leaves_nothing_behind():
    layer = torch.nn.Linear(3, 3)
    with PutOff() as put_off:
        y = layer(layer(torch.randn(2, 3, requires_grad=True))[:, :3].sin()).sum()
    y.backward()
    gone = [weakref.ref(put_off), weakref.ref(layer)]
    del y, layer, put_off
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_frozen_stage_and_a_frozen_tied_matrix():
    def program(comm):
        trainer = Trainer(comm, TINY, configuration("1f1b", 2, 2), TrainConfig(batch=2))
        for p in trainer.model.parameters():
            p.requires_grad_(comm.rank == 1 and p is not trainer.model.tied_weight)
        trainer.forward_backward(0)
        return [p.grad is not None for p in trainer.model.parameters()]

    frozen, trained = World(2, "threads").run(program)
    assert not any(frozen) and any(trained)


def test_the_proof_can_fail(monkeypatch):
    """A tied matrix whose two gradients are not summed is seen in the gradients, not in the loss."""
    monkeypatch.setattr(TiedGradients, "__call__", lambda self, *gradient: None)
    proof = prove(TINY, configuration("1f1b", 2, 2))
    assert not proof.holds
    assert proof.loss < 1e-12
    assert proof.gradients > 1e-6
