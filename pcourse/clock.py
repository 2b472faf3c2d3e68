"""What time is it on this rank: the clocks that a Comm can keep, for the host and for a GPU's stream.

The wall clock tells what the devices took. Stamps of the ranks of one machine compare: `time.perf_counter` is one clock
for all its processes. Those of several machines compare once `align_clocks` has run. On CUDA a stamp is an event in the
stream, so that reading the clock does not hold the GPU up; `seconds` turns stamps into seconds.

The logical clock tells what the same run would have taken on a described machine. Each rank carries `due`, when it is
done on that machine, and each message the moment of its arrival. Paced, a rank sleeps until its time has come, so that
it can be seen to pass; virtual, it does not.
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

STAMP = 1 << 20  # added to the tag of a message for that of its time of arrival
HEAD_START = 0.03  # seconds from when the last rank is there to when all start: to hear of it takes a while


class WallClock:
    """The clock of measured runs: what the device took."""

    buffered = False  # a send is over when it has been received

    def __init__(self, device: torch.device):
        self.device = device
        self.offset = 0.0  # what is added to this machine's clock to have rank 0's: see `align_clocks`
        self.uncertainty = 0.0
        self._anchor = None  # (host seconds, event): where the stream's time meets the host's

    def now(self):
        """A stamp; opaque until `seconds` has resolved it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if self._anchor is None:
            torch.cuda.synchronize(self.device)
            self._anchor = (time.perf_counter(), self._event())
        return self._event()

    def seconds(self, stamp) -> float:
        """Seconds of a stamp, on rank 0's clock; waits until the GPU has passed it."""
        if isinstance(stamp, float):
            return stamp + self.offset
        stamp.synchronize()
        at, event = self._anchor
        return at + event.elapsed_time(stamp) / 1e3 + self.offset

    def start(self, transport, warm_up: bool = False) -> None:
        """A step begins. Here and below: this clock takes the time as it comes."""

    def follow(self, transport, call, work, peer: int | None = None, tag: int = 0):
        return work

    def spend(self, kind: str, flops: float, share: float = 1) -> None: ...

    def keep_pace(self) -> None: ...

    def finish(self) -> tuple:
        """A step ends: a stamp of its end, and by how much that is late."""
        return self.now(), 0.0, 0.0

    def settle(self) -> None: ...

    def _event(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class LogicalClock:
    """The clock of a `machine`, a Cluster or PacedRanks: `due` is when rank `rank` of it is done, in its seconds.

    With `paced` the rank sleeps until `due` has come for real, slow_motion times slower. Deadlines are absolute: what
    comes late is made good by the next sleep, so that delays of this computer do not add up; what cannot be made good
    shows as lateness. What the machine takes no time for is not paced: its real time counts where it delays what is.
    """

    buffered = True  # a send is over when its bytes have left, as long as the link is free

    def __init__(self, machine, rank: int, wall: WallClock, paced: bool, sleep=time.sleep):
        self.machine, self.rank, self.wall, self.paced, self._sleep = machine, rank, wall, paced, sleep
        self.due = 0.0
        self._anchor = 0.0  # the real time of due = 0
        self._sleeps = False  # before the first step
        self._link_free = {}  # receiver -> when the link to it has sent all that it was given
        self._latest = {}  # members -> their latest collective
        self._outbox = []  # what waits for sends to be received
        self._begin()

    def now(self) -> float:
        return self.due

    def seconds(self, stamp: float) -> float:
        return stamp

    def start(self, transport, warm_up: bool = False) -> None:
        """A step begins, at 0 on every rank; in a `warm_up` nobody sleeps."""
        self._begin()
        self._sleeps = self.paced and not warm_up
        if self._sleeps:
            there = _message(self._real(), device=transport.device)
            transport.all_reduce(there, "max")()
            self._anchor = there.item() + HEAD_START
            self.keep_pace()

    def _begin(self) -> None:
        self.due = self._on_time = 0.0  # on time: what was due when the rank last had to sleep
        self._ended, self._timed = (0.0, 0.0, 0.0), False  # of what last took the machine time: see `finish`
        self._link_free.clear()
        self._latest.clear()

    def spend(self, kind: str, flops: float, share: float = 1) -> None:
        """A compute has been done: it ends when the machine would be done with it."""
        took = self.machine.compute_seconds(flops, kind, self.rank, share)
        self._reach(self.due + took, took)

    def follow(self, transport, call, work, peer: int | None = None, tag: int = 0):
        """Send the call's time along with its data. Returns what waits for both and moves `due`; `work` is the data's.

        These messages are not in the ledger: they are the instrument's.
        """
        if call.operation == "send":
            return self._send(transport, call.wire, work, peer, tag)
        if call.operation == "recv":
            return self._receive(transport, work, peer, tag)
        return self._meet(transport, call, work)

    def _send(self, transport, nbytes, work, peer, tag):
        receiver = transport.members[peer]
        occupied, latency = self.machine.transfer_seconds(self.rank, receiver, nbytes)
        left = self._link_free[receiver] = max(self.due, self._link_free.get(receiver, 0.0)) + occupied
        arrival = _message(left + latency, occupied + latency, device=transport.device)
        self._outbox += [work, transport.isend(arrival, peer, STAMP + tag)]
        return lambda: self._reach(left, occupied)

    def _receive(self, transport, work, peer, tag):
        arrival = _message(0.0, 0.0, device=transport.device)
        stamp = transport.irecv(arrival, peer, STAMP + tag)

        def wait():
            work()
            stamp()
            self._reach(*arrival.tolist())

        return wait

    def _meet(self, transport, call, work):
        meeting = _Meeting(self.machine, transport, call, self.due, self._latest.get(transport.members))
        self._latest[transport.members] = meeting

        def wait():
            work()
            self._reach(*meeting.end())

        return wait

    def _reach(self, moment: float, took: float) -> None:
        """Something that takes the machine `took` seconds has ended at `moment`."""
        self.due = max(self.due, moment)
        self._timed = self._timed or took > 0

    def keep_pace(self) -> None:
        """Paced: sleep until `due` has come for real."""
        if not self._sleeps:
            return
        while (early := self._deadline() - self._real()) > 0:
            self._sleep(early)
            self._on_time = self.due
        if self._timed:
            late = max(0.0, self._real() - self._deadline()) / self.machine.slow_motion
            self._ended = self.due, late, late + self.due - self._on_time
            self._timed = False

    def finish(self) -> tuple[float, float, float]:
        """A step ends: when the last thing ended that takes the machine time, how late that really was, and how long
        before the rank had last been on time; in the machine's seconds."""
        return self._ended if self._sleeps else (self.due, 0.0, 0.0)

    def settle(self) -> None:
        """Wait until all that this rank has sent is received."""
        for wait in self._outbox:
            wait()
        self._outbox.clear()

    def _deadline(self) -> float:
        return self._anchor + self.due * self.machine.slow_motion

    def _real(self) -> float:
        if self.wall.device.type == "cuda":
            torch.cuda.synchronize(self.wall.device)
        return time.perf_counter() + self.wall.offset


class _Meeting:
    """One collective on the logical clock: it starts when its last member is there and the one before it is over."""

    def __init__(self, machine, transport, call, due: float, before: _Meeting | None):
        self.machine, self.call, self.members, self.before = machine, call, transport.members, before
        self.latest = _message(due, float(call.wire), device=transport.device)  # of uneven shards, the most bytes count
        self.work = transport.all_reduce(self.latest, "max")

    def end(self) -> tuple[float, float]:
        """When it ends, and how long it takes."""
        if self.work is not None:
            self.work()
            start, wire = self.latest.tolist()
            if self.before is not None:
                start = max(start, self.before.end()[0])
            took = self.machine.collective_seconds(self.call.operation, wire, self.members)
            self._end = start + took, took
            self.work = self.before = None
        return self._end


def _message(*seconds: float, device) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64, device=device)


@contextmanager
def described_time(comm, machine, paced: bool):
    """Inside, `comm` and all that are split from it keep the time of `machine`, a Cluster or PacedRanks; every rank
    enters together."""
    wall = comm.clock
    rank = comm.transport.members[comm.rank]
    comm.recorder.clock = LogicalClock(machine, rank, wall, paced, comm.transport.sleep)
    try:
        comm.start_together()
        yield
        comm.finish_step()
    finally:
        comm.recorder.clock = wall


def align_clocks(comm, rounds: int = 20) -> None:
    """Every rank asks rank 0 for the time and keeps the difference of the round trip that took least.

    `clock.uncertainty` is half that round trip: no answer can be off by more (Cristian 1989).
    """
    clock = comm.clock
    question, answer = (torch.zeros(1, dtype=torch.float64, device=comm.device) for _ in range(2))
    for rank in range(1, comm.size):
        best = float("inf")
        for _ in range(rounds):
            if comm.rank == 0:
                comm.recv(question, rank)
                comm.send(answer.fill_(time.perf_counter()), rank)
            elif comm.rank == rank:
                sent = time.perf_counter()
                comm.send(question, 0)
                there = comm.recv(answer, 0).item()
                back = time.perf_counter()
                if back - sent < best:
                    best, clock.offset = back - sent, there - (sent + back) / 2
        if comm.rank == rank:
            clock.uncertainty = best / 2
    comm.recorder.take()
