"""Formulas for communication equal what the door counted; the fit of a message's cost finds what was put in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.calibrate import BUS_FACTOR, fit, measure_messages
from pcourse.cost.communication import communication
from pcourse.parallel.ring import ring_all_reduce
from pcourse.split import ring_wire, shard_range, shard_sizes
from pcourse.train import measure
from pcourse.world import World


@settings(max_examples=12, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 2),
    hidden=st.sampled_from([4, 12]),
    sequence=st.integers(1, 7),
    batch=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
)
def test_every_call_and_byte_of_a_step(tp, layers, hidden, sequence, batch, micro_batches, dtype):
    model = ModelConfig(layers=layers, hidden=hidden, heads=4, sequence=sequence, dtype=dtype, vocab=31)
    parallel = ParallelConfig(tp=tp, micro_batches=min(micro_batches, batch))
    train = TrainConfig(batch=batch, steps=1, warmup=0)
    report = measure(model, parallel, train, World(tp, "threads"))
    for rank in report.ranks:
        theory = communication(model, parallel, train, rank.rank)
        counted = {(r.axis, r.operation): r for r in rank.communication if r.axis != "scalar"}
        assert set(counted) == set(theory)
        for key, row in theory.items():
            assert (counted[key].calls, counted[key].payload, counted[key].wire) == (
                row["calls"],
                row["payload"],
                row["wire"],
            )


@settings(deadline=None)
@given(n=st.integers(0, 50), parts=st.integers(1, 8))
def test_ring_wire_sums_to_theory(n, parts):
    for operation, times in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        assert sum(ring_wire(operation, n, parts, r) for r in range(parts)) == times * (parts - 1) * n
    assert [len(shard_range(n, parts, r)) for r in range(parts)] == shard_sizes(n, parts)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ring_sends_what_the_door_counts_for_an_all_reduce(size):
    import torch

    def program(comm):
        sent = []
        for n in (0, 1, 3, 10, 12):
            x = (torch.arange(float(n)) + comm.rank).view(-1, 1).expand(n, 2)
            comm.recorder.take()
            assert torch.equal(ring_all_reduce(comm, x), comm.all_reduce(x))
            calls = comm.recorder.take()[0]
            sent.append([sum(c.wire for c in calls if c.operation == op) for op in ("send", "all_reduce")])
        return sent

    for sent in World(size, "threads").run(program, timeout=30):
        assert all(ring == door for ring, door in sent)


@given(latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e11))
def test_the_fit_finds_the_line(latency, bandwidth):
    sizes = [4**k for k in range(5, 13)]
    line = fit(sizes, [latency + s / bandwidth for s in sizes])
    assert line.worst < 1e-6
    assert line.seconds(2**20) == pytest.approx(latency + 2**20 / bandwidth, rel=1e-6)


@pytest.mark.parametrize("operation", BUS_FACTOR)
def test_messages_are_timed(operation):
    seen = []
    cost = measure_messages(operation, 2, (1024, 65536), 3, progress=lambda step, of, **_: seen.append((step, of)))
    assert seen == [(1, 2), (2, 2)]
    assert [len(t) for t in cost.times] == [3, 3] and min(map(min, cost.times)) > 0
    assert cost.source.startswith("measured on 2 ") and len(cost.bus_bandwidth()) == 2


def test_an_unknown_operation_is_refused():
    with pytest.raises(ConfigError, match="it can be all_reduce, reduce_scatter"):
        measure_messages("gossip")
