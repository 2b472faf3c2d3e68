"""Every operation of Comm gives the same result and the same byte counts on threads and on processes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcourse.split import shard_range, shard_sizes
from pcourse.world import RankError, World

BACKENDS = ["threads", "gloo"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_operations(backend, size):
    def program(comm):
        r, n = comm.rank, comm.size
        x = torch.arange(7.0) + r
        total = sum(torch.arange(7.0) + q for q in range(n))
        assert torch.equal(comm.all_reduce(x), total)
        assert torch.equal(comm.all_reduce(x, "max"), torch.arange(7.0) + n - 1)
        assert torch.equal(comm.all_reduce(x, "min"), torch.arange(7.0))
        assert torch.equal(x, torch.arange(7.0) + r), "the input is left alone"
        y = x.clone()
        assert comm.all_reduce(y, out=y) is y and torch.equal(y, total)
        gathered = comm.all_gather(torch.full((r, 2), float(r)))  # shards of 0, 1, 2 … rows
        assert gathered.tolist() == [[float(q)] * 2 for q in range(n) for _ in range(q)]
        assert comm.all_gather(torch.full((2, r + 1), float(r)), dim=1).shape == (2, n * (n + 1) // 2)
        assert comm.all_gather(torch.tensor(float(r))).tolist() == list(map(float, range(n)))
        mine = shard_range(7, n, r)
        assert torch.equal(comm.reduce_scatter(x), total[mine.start : mine.stop])
        sizes = [0] * (n - 1) + [7]
        assert comm.reduce_scatter(x, sizes=sizes).tolist() == (total.tolist() if r == n - 1 else [])
        sent = torch.arange(float(n * n)) + 100 * r
        assert comm.all_to_all(sent).tolist() == [100.0 * q + r * n + i for q in range(n) for i in range(n)]
        assert comm.all_to_all(x, sizes=sizes).numel() == (7 * n if r == n - 1 else 0)
        assert comm.broadcast(x, src=n - 1).tolist() == (torch.arange(7.0) + n - 1).tolist()
        comm.barrier()

    World(size, backend).run(program, timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_returned_for_a_non_contiguous_input_is_what_was_reduced(backend):
    def program(comm):
        x = (torch.arange(12.0).view(3, 4) + comm.rank).t()
        expected = 2 * torch.arange(12.0).view(3, 4).t() + 1
        assert torch.equal(comm.all_reduce(x), expected)
        assert torch.equal(comm.reduce_scatter(x, dim=1, sizes=[1, 2]), expected.split([1, 2], 1)[comm.rank])
        assert torch.equal(comm.all_gather(x, dim=1)[:, 3 * comm.rank : 3 * comm.rank + 3], x)
        assert torch.equal(comm.all_reduce(x, out=x), expected) and torch.equal(x, expected)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            assert torch.equal(comm.recv(torch.empty(3, 4).t(), 0), expected)

    World(2, backend).run(program, timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_forms(backend):
    def program(comm):
        x = torch.full((5,), comm.rank + 1.0)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        received = comm.irecv(torch.empty(5), left, tag=3)
        sent = comm.isend(x, right, tag=3)
        reduced, gathered = comm.all_reduce(x, async_op=True), comm.all_gather(x, sizes=[5] * 3, async_op=True)
        scattered, swapped = comm.reduce_scatter(x, async_op=True), comm.all_to_all(x.repeat(3), async_op=True)
        assert gathered.wait().tolist() == [1.0] * 5 + [2.0] * 5 + [3.0] * 5
        assert reduced.wait().tolist() == [6.0] * 5 and reduced.wait().tolist() == [6.0] * 5
        assert scattered.wait().numel() == [2, 2, 1][comm.rank]
        assert swapped.wait().tolist() == [1.0] * 5 + [2.0] * 5 + [3.0] * 5
        assert received.wait().tolist() == [left + 1.0] * 5
        sent.wait()

    World(3, backend).run(program, timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_dtypes(backend, dtype):
    def program(comm):
        x = torch.tensor([1, 2, 3]).to(dtype)
        assert torch.equal(comm.all_reduce(x), 2 * x)
        assert torch.equal(comm.all_gather(x), torch.cat([x, x]))
        assert torch.equal(comm.reduce_scatter(x), (2 * x)[:2] if comm.rank == 0 else (2 * x)[2:])

    World(2, backend).run(program, timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_along_axes(backend):
    def program(comm):
        mesh = comm.split(dp=2, tp=2)
        r = float(comm.rank)
        pairs = (mesh.tp.rank, mesh.dp.rank)
        return pairs, mesh.tp.all_gather(torch.tensor(r)).tolist(), mesh.dp.all_gather(torch.tensor(r)).tolist()

    results = World(4, backend).run(program, timeout=30)
    assert results == [
        ((0, 0), [0, 1], [0, 2]),
        ((1, 0), [0, 1], [1, 3]),
        ((0, 1), [2, 3], [0, 2]),
        ((1, 1), [2, 3], [1, 3]),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_splits_do_not_meet(backend):
    """Two splits alike, used at once, and a split of a split."""

    def program(comm):
        one, two = comm.split(dp=2, tp=2), comm.split(dp=2, tp=2)
        first = one.tp.all_reduce(torch.ones(3), async_op=True)
        second = two.tp.all_reduce(2 * torch.ones(3), async_op=True)
        assert second.wait().tolist() == [4.0] * 3 and first.wait().tolist() == [2.0] * 3
        inner = comm.split(all=4).all.split(x=2, y=2)
        mine = torch.tensor([10.0**comm.rank])
        return inner.x.all_reduce(mine).item(), inner.y.all_reduce(mine).item(), one.dp.split(a=2).a.size

    assert World(4, backend).run(program, timeout=30) == [(101, 11, 2), (1010, 11, 2), (101, 1100, 2), (1010, 1100, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_inside_one_group_alone(backend):
    def program(comm):
        mesh = comm.split(dp=2, tp=2)
        if mesh.dp.rank == 0:  # the other group has no part in it
            pair = mesh.tp.split(a=1, b=2).b
            return pair.all_reduce(torch.tensor(float(comm.rank))).item()

    assert World(4, backend).run(program, timeout=30) == [1, 1, None, None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_were_in_different_splits_still_find_each_other(backend):
    """torch names a group by how many its members have made before."""

    def program(comm):
        ends = comm.groups([[0, 3], [1], [2]], "ends")
        mesh = comm.split(a=2, b=2)
        if mesh.a.rank == 0:
            mesh.b.split(c=2)
        again = comm.split(d=2, e=2)
        mine = torch.tensor([10.0**comm.rank])
        return ends.size, mesh.a.all_reduce(mine).item(), again.d.all_reduce(mine).item()

    results = World(4, backend).run(program, timeout=30)
    assert results == [(2, 101, 101), (1, 1010, 1010), (1, 101, 101), (2, 1010, 1010)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_share_the_input_s_memory(backend):
    def program(comm):
        a = torch.arange(4.0).view(2, 2) + comm.rank
        expected = (2 * torch.arange(4.0).view(2, 2) + 1).t().clone()
        assert torch.equal(comm.all_reduce(a.t(), out=a), expected) and torch.equal(a, expected)
        b = torch.arange(4.0).view(2, 2)
        assert torch.equal(comm.broadcast(b.t(), out=b), torch.tensor([[0.0, 2.0], [1.0, 3.0]]))

    World(2, backend).run(program, timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_as_the_ring_counts_them(backend):
    def program(comm):
        x = torch.zeros(8)
        comm.all_reduce(x)
        comm.reduce_scatter(x)
        comm.all_gather(torch.zeros(2), sizes=[2] * 4)
        comm.broadcast(x, src=1)
        comm.all_to_all(x)
        comm.barrier()
        if comm.rank == 0:
            comm.send(x, 1)
        if comm.rank == 1:
            comm.recv(x, 0)
        return [(c.operation, c.payload, c.wire) for c in comm.recorder.take()[0]]

    results = World(4, backend).run(program, timeout=30)
    for r, calls in enumerate(results):
        assert calls[:6] == [
            ("all_reduce", 32, 48),
            ("reduce_scatter", 32, 24),
            ("all_gather", 32, 24),
            ("broadcast", 32, 0 if r == 0 else 32),  # rank 0 is the last of a ring that starts at 1
            ("all_to_all", 32, 24),
            ("barrier", 0, 0),
        ]
    assert results[0][6:] == [("send", 32, 32)] and results[1][6:] == [("recv", 0, 0)]


@settings(deadline=None)
@given(n=st.integers(0, 40), parts=st.integers(1, 8))
def test_shards_cover_everything_once(n, parts):
    assert [i for r in range(parts) for i in shard_range(n, parts, r)] == list(range(n))
    assert max(shard_sizes(n, parts)) - min(shard_sizes(n, parts)) <= 1


@settings(max_examples=15, deadline=None)
@given(n=st.integers(0, 23), size=st.integers(2, 4))
def test_wire_bytes_of_uneven_shards_add_up(n, size):
    """Over all ranks: reduce-scatter and all-gather (N-1)S, all-reduce 2(N-1)S."""

    def program(comm):
        x = torch.arange(float(n))
        shard = comm.reduce_scatter(x)
        assert torch.equal(comm.all_gather(shard, sizes=shard_sizes(n, comm.size)), comm.size * x)
        comm.all_reduce(x)
        return [c.wire for c in comm.recorder.take()[0]]

    wires = World(size, "threads").run(program, timeout=30)
    assert [sum(w) for w in zip(*wires, strict=True)] == [(size - 1) * 4 * n * k for k in (1, 1, 2)]


def test_collectives_inside_backward():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return ctx.comm.all_reduce(grad), None

    def program(comm):
        x = torch.ones(3, requires_grad=True)
        (Summed.apply(x, comm) * (comm.rank + 1)).sum().backward()
        return x.grad.tolist()

    for backend in BACKENDS:
        assert World(3, backend).run(program, timeout=30) == [[6.0] * 3] * 3


def test_different_calls_in_one_group_are_named():
    def program(comm):
        return comm.all_reduce(torch.zeros(3)) if comm.rank else comm.all_gather(torch.zeros(3), sizes=[3, 3])

    with pytest.raises(RankError, match=r"rank 0 called all_gather .* rank 1 called all_reduce"):
        World(2, "threads").run(program, timeout=10)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda comm: comm.all_reduce(torch.zeros(2), "mean"), "op can be sum, max, min"),
        (lambda comm: comm.reduce_scatter(torch.zeros(5), sizes=[2, 2]), "2 lengths that add up to 5"),
        (lambda comm: comm.send(torch.zeros(1), 5), "it can be"),
        (lambda comm: comm.split(tp=3), "multiply"),
        (lambda comm: comm.all_reduce(torch.zeros(2), out=torch.zeros(3)), "the result is"),
    ],
)
def test_wrong_arguments_say_which_would_do(call, words):
    with pytest.raises(RankError, match=words):
        World(2, "threads").run(call, timeout=10)


def test_each_thread_rank_draws_its_own_numbers():
    a, b = World(2, "threads").run(lambda comm: torch.rand(3, generator=comm.generator), timeout=10)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_may_land_in_its_own_input(backend):
    """NCCL's in-place form, and any other part of the input."""

    def program(comm):
        for shift in range(3):
            x = torch.arange(6.0) + 10 * comm.rank
            first = (comm.rank + shift) % 3 * 2
            got = comm.reduce_scatter(x, out=x[first : first + 2])
            expected = (3 * torch.arange(6.0) + 30)[2 * comm.rank : 2 * comm.rank + 2]
            assert torch.equal(got, expected) and torch.equal(x[first : first + 2], expected)

    World(3, backend).run(program, timeout=30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_to_all_of_uneven_lengths_needs_no_question(backend):
    def program(comm):
        x = torch.arange(5.0) + 10 * comm.rank
        return comm.all_to_all(x).tolist(), [c.operation for c in comm.recorder.take()[0]]

    (first, calls), (second, _) = World(2, backend).run(program, timeout=30)
    assert first == [0, 1, 2, 10, 11, 12] and second == [3, 4, 13, 14] and calls == ["all_to_all"]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda comm: comm.all_gather(torch.zeros(2), dim=1), "has no dim 1; it has 1"),
        (lambda comm: comm.reduce_scatter(torch.zeros(2), dim=-2), "has no dim -2"),
        (lambda comm: comm.all_gather(torch.zeros(2), sizes=[2, 2], out=torch.zeros(3)), "the result is"),
        (lambda comm: comm.split(a=-2, b=-1), "a=-2 must be a whole number"),
    ],
)
def test_dims_and_outs_that_do_not_fit_are_named(call, words):
    with pytest.raises(RankError, match=words):
        World(2, "threads").run(call, timeout=10)
