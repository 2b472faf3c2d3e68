"""What the threads world knows for certain: when nobody can ever move again, and which calls belong together."""

import threading
import time

import pytest
import torch

from pcourse.launch.threads import Deadlock
from pcourse.transport.threads import Exchange, Posted
from pcourse.world import World


def run(program, size: int = 2):
    return World(size, "threads").run(program, timeout=20)


def deadlock(program, size: int = 2) -> Deadlock:
    """The deadlock that `program` runs into, which must be seen at once."""
    begun = time.monotonic()
    with pytest.raises(Deadlock) as stuck:
        run(program, size)
    assert time.monotonic() - begun < 2, "neither a timeout nor a guess"
    return stuck.value


def right_and_left(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_everybody_receives_first():
    def program(comm):
        right, left = right_and_left(comm)
        comm.recv(torch.empty(3), left)
        comm.send(torch.ones(3), right)

    error = deadlock(program, 3)
    waits = ", ".join(f"rank {rank} waits in recv from rank {(rank - 1) % 3}" for rank in range(3))
    lacking = "Nobody sends what rank 0 waits for: rank 2 has no send to rank 0 under way"
    assert error.words == f"deadlock: {waits}. {lacking}"
    message = str(error)
    assert message.startswith(f"the run is stuck: {error.words}; rank 0 was last in recv number 1 over world")
    assert "comm.recv(torch.empty(3), left)" in message, "where each rank stands in its program"
    assert error.rank is None and error.size == 3


def test_everybody_sends_first():
    def program(comm):
        right, left = right_and_left(comm)
        comm.send(torch.ones(3), right)
        comm.recv(torch.empty(3), left)

    words = deadlock(program, 3).words
    assert "rank 0 waits in send to rank 1" in words and "Post the send with isend" in words


def test_a_rank_that_returns_leaves_the_others_waiting():
    def program(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(3))

    error = deadlock(program, 3)
    assert "rank 0 waits in all_reduce, rank 1 has returned, rank 2 has returned" in error.words
    assert "all_reduce ends only when every rank of the group calls it" in error.words
    assert "rank 1 had finished" in str(error)


def test_a_message_with_another_tag_is_told():
    def program(comm):
        if comm.rank == 0:
            comm.isend(torch.ones(3), 1, tag=1)
        else:
            comm.recv(torch.empty(3), 0, tag=2)

    assert "the send of rank 0 to rank 1 has another tag" in deadlock(program).words


def test_a_deadlock_after_the_last_message_has_arrived():
    """The wait begins while something else is still on its way, which then ends without helping."""

    def program(comm):
        reduced = comm.all_reduce(torch.ones(1 << 20), async_op=True)
        comm.recv(torch.empty(3), 1 - comm.rank)
        reduced.wait()

    assert "rank 0 waits in recv from rank 1" in deadlock(program).words


def test_a_rank_that_computes_is_no_deadlock():
    gate = threading.Event()

    def program(comm):
        if comm.rank == 1:
            gate.wait(0.3)
        elif comm.rank == 2:
            return 3.0  # gone early, and not needed
        pair = comm.isend if comm.rank else comm.irecv
        return pair(torch.full((3,), 1.0), 1 - comm.rank).wait().sum().item()

    assert run(program, 3) == [3.0, 3.0, 3.0]


def test_many_messages_are_no_deadlock():
    """Ranks wait all the time here, and something always comes."""

    def program(comm):
        right, left = right_and_left(comm)
        x = torch.full((2,), float(comm.rank))
        for _ in range(300):
            sent = comm.isend(x, right)
            x = comm.recv(torch.empty(2), left)
            sent.wait()
            comm.barrier()
        return x[0].item()

    assert run(program, 3) == [0.0, 1.0, 2.0]


def test_a_rank_that_raises_is_no_deadlock():
    def program(comm):
        if comm.rank == 1:
            time.sleep(0.05)
            raise KeyError("the cause")
        comm.recv(torch.empty(3), 1)

    with pytest.raises(Exception, match="rank 1 of 2 raised KeyError"):
        run(program)


def test_groups_of_two_splits_do_not_mix():
    def program(comm):
        first, second = comm.split(dp=2, tp=2), comm.split(dp=2, tp=2)
        handles = [
            mesh.tp.all_reduce(torch.full((2,), float(10**number)), async_op=True)
            for number, mesh in enumerate((first, second))
        ]
        messages = [mesh.dp.isend(torch.tensor([float(n)]), 1 - mesh.dp.rank) for n, mesh in ((1, first), (2, second))]
        arrived = [mesh.dp.recv(torch.empty(1), 1 - mesh.dp.rank).item() for mesh in (second, first)]
        for message in messages:
            message.wait()
        return [handle.wait()[0].item() for handle in handles], arrived

    assert run(program, 4) == [([2.0, 20.0], [2.0, 1.0])] * 4


def test_groups_within_groups_do_not_mix():
    def program(comm):
        outer = comm.split(dp=2, tp=4)
        inner = [outer.tp.split(x=2, y=2), outer.tp.split(x=2, y=2)]
        handles = [
            mesh.y.all_reduce(torch.tensor([float(10**number)]), async_op=True) for number, mesh in enumerate(inner)
        ]
        return [handle.wait().item() for handle in handles]

    assert run(program, 8) == [[2.0, 20.0]] * 8


def test_a_rank_joins_a_collective_once():
    exchange = Exchange()
    exchange.post(Posted(0, "barrier", "nothing", [], []), "key", 2, None)
    with pytest.raises(AssertionError, match="rank 0 joins key twice"):
        exchange.post(Posted(0, "barrier", "nothing", [], []), "key", 2, None)
    exchange.abort("the test is over")
