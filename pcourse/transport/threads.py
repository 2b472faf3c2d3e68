"""Messages between ranks that are threads of one process.

The network is a thread too: when every rank of a group has made its call, it copies from their inputs into their
outputs, in rank order, so that all ranks get the same bits. Nothing is cloned on the way, and a rank's own memory
meter sees only what that rank allocated.

As every message passes here, a deadlock is known for certain and at once: no rank moves by itself, and nothing is on
its way. A rank communicates from one thread; helpers that it may have are not seen.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

import torch

from pcourse.comm import PeerLost


@dataclass(eq=False)
class Posted:
    """One rank's part in a communication: what it gives, where it wants the result, and whether it is done."""

    rank: int
    operation: str
    signature: str  # what all ranks of the group must agree on
    inputs: list
    outputs: list
    peer: int | None = None  # of a message
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return self.operation
        return f"{self.operation} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"


class Exchange:
    """Where the ranks of one world meet. `on_deadlock(words)` is called once no rank can ever move again."""

    def __init__(self):
        self.on_deadlock = lambda words: None
        self._lock = threading.Lock()
        self._gathering: dict = defaultdict(dict)  # (group, number) -> {rank: Posted}
        self._sends: dict = defaultdict(deque)
        self._recvs: dict = defaultdict(deque)
        self._pending: set[Posted] = set()
        self._in_motion = 0  # communications that all their ranks have joined and that are not done
        self._ranks: set[int] = set()
        self._gone: set[int] = set()
        self._waiting: dict[int, Posted] = {}  # what a rank waits for, while that is not done
        self._aborted: str | None = None
        self._over = threading.Event()
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._network, name="pcourse-network", daemon=True).start()

    def enter(self, rank: int) -> None:
        """`rank` takes part until it leaves. All enter before the first one communicates."""
        self._ranks.add(rank)

    def leave(self, rank: int) -> None:
        """`rank` communicates no more."""
        with self._lock:
            self._gone.add(rank)
            self._tell_deadlock()

    def post(self, posted: Posted, key, members: int, move) -> None:
        """A rank joins collective `key`; the last of `members` to join sets it in motion."""
        with self._lock:
            self._admit(posted)
            group = self._gathering[key]
            assert posted.rank not in group, f"rank {posted.rank} joins {key} twice: two groups have one name"
            group[posted.rank] = posted
            if len(group) == members:
                del self._gathering[key]
                self._set_in_motion([group[r] for r in sorted(group)], move)

    def post_send(self, posted: Posted, key) -> None:
        """A rank gives a message; it moves once its receiver has posted the same `key`."""
        with self._lock:
            self._admit(posted)
            if receivers := self._recvs[key]:
                self._set_in_motion([posted, receivers.popleft()], _move_message)
            else:
                self._sends[key].append(posted)

    def post_recv(self, posted: Posted, key) -> None:
        """A rank expects a message, as above."""
        with self._lock:
            self._admit(posted)
            if senders := self._sends[key]:
                self._set_in_motion([senders.popleft(), posted], _move_message)
            else:
                self._recvs[key].append(posted)

    def wait(self, posted: Posted) -> None:
        """Until the communication is done; raises what went wrong with it."""
        with self._lock:
            if not posted.done.is_set():
                self._waiting[posted.rank] = posted
                self._tell_deadlock()
        posted.done.wait()
        if posted.error is not None:
            raise posted.error

    def abort(self, reason: str) -> None:
        """End the world: every rank that waits for a peer, now or later, raises PeerLost."""
        with self._lock:
            self._aborted = reason
            for posted in list(self._pending):
                self._end(posted, PeerLost(reason))
        self._over.set()
        self._work.put(None)

    def sleep(self, seconds: float) -> None:
        """As time.sleep, and raises PeerLost as soon as the world ends."""
        if self._over.wait(seconds):
            raise PeerLost(self._aborted)

    # All below, but for the network itself, is called with the lock held.

    def _admit(self, posted: Posted) -> None:
        if self._aborted is not None:
            raise PeerLost(self._aborted)
        self._pending.add(posted)

    def _set_in_motion(self, group: list[Posted], move) -> None:
        self._in_motion += 1
        self._work.put((group, move))

    def _end(self, posted: Posted, error: BaseException | None) -> None:
        self._pending.discard(posted)
        if self._waiting.get(posted.rank) is posted:
            del self._waiting[posted.rank]
        posted.inputs = posted.outputs = ()  # let go before the rank goes on: its meter counts them
        posted.error = error
        posted.done.set()

    def _tell_deadlock(self) -> None:
        """Each rank waits or is gone, and nothing is on its way that could end a wait."""
        waits = len(self._waiting) > 0 and self._waiting.keys() | self._gone == self._ranks
        if waits and not self._in_motion and self._aborted is None:
            self.on_deadlock(_deadlock_words(self._waiting, self._gone, self._pending))

    def _network(self) -> None:
        while (item := self._work.get()) is not None:
            group, move = item
            error = _disagreement(group)
            try:
                if error is None:
                    with torch.no_grad():
                        move([p.inputs for p in group], [p.outputs for p in group])
            except Exception as e:  # a shape that copy_ refuses: every rank of the group must hear of it
                error = ValueError(f"{group[0].operation}: {e}")
            with self._lock:
                self._in_motion -= 1
                for posted in group:
                    if posted in self._pending:
                        self._end(posted, error)
                self._tell_deadlock()


def _disagreement(group: list[Posted]) -> ValueError | None:
    """What keeps these calls from being one communication."""
    if len({(p.operation if p.peer is None else "message", p.signature) for p in group}) == 1:
        return None
    calls = "; ".join(f"rank {p.rank} called {p.operation} of {p.signature}" for p in group)
    rule = "the ranks of a group must make the same calls, in the same order, with sizes that fit"
    return ValueError(f"{calls}: {rule}")


def _deadlock_words(waiting: dict[int, Posted], gone: set[int], pending: set[Posted]) -> str:
    """Where each rank stands, and why nobody will ever come."""
    doing = ", ".join(
        f"rank {rank} waits in {waiting[rank]}" if rank in waiting else f"rank {rank} has returned"
        for rank in sorted(waiting.keys() | gone)
    )
    return f"deadlock: {doing}. {_why(waiting, gone, pending)}"


def _why(waiting: dict[int, Posted], gone: set[int], pending: set[Posted]) -> str:
    first = next((waiting[rank] for rank in sorted(waiting) if waiting[rank].operation != "send"), None)
    if lost := [send for send in waiting.values() if send.operation == "send" and send.peer in gone]:
        return f"Nobody receives what rank {lost[0].rank} sends: rank {lost[0].peer} has ended without a receive for it"
    if first is None:
        rule = "a send returns only when its message has been received, and nobody has posted a receive"
        return f"All of them send first: {rule}. Post the send with isend, then receive, then wait()"
    if first.operation != "recv":
        return f"{first.operation} ends only when every rank of the group calls it"
    lacking = f"rank {first.peer} has no send to rank {first.rank} under way"
    if any((p.operation, p.rank, p.peer) == ("send", first.peer, first.rank) for p in pending):
        lacking = f"the send of rank {first.peer} to rank {first.rank} has another tag, or goes over another group"
    return f"Nobody sends what rank {first.rank} waits for: {lacking}"


def _move_message(inputs, outputs) -> None:
    sent, received = inputs[0][0], outputs[1][0]
    received.copy_(sent)


def _move_all_reduce(op: str):
    def move(inputs, outputs) -> None:
        first = outputs[0][0]
        for (x,) in inputs[1:]:
            {"sum": first.add_, "max": lambda y: torch.maximum(first, y, out=first),
             "min": lambda y: torch.minimum(first, y, out=first)}[op](x)  # fmt: skip
        for (out,) in outputs[1:]:
            out.copy_(first)

    return move


def _move_all_gather(inputs, outputs) -> None:
    for outs in outputs:
        for (x,), out in zip(inputs, outs, strict=True):
            out.copy_(x)


def _move_reduce_scatter(inputs, outputs) -> None:
    for r, (out,) in enumerate(outputs):
        out.copy_(inputs[0][r])
        for parts in inputs[1:]:
            out.add_(parts[r])


def _move_all_to_all(inputs, outputs) -> None:
    for r, outs in enumerate(outputs):
        for q, out in enumerate(outs):
            out.copy_(inputs[q][r])


def _move_broadcast(src: int):
    def move(inputs, outputs) -> None:
        for r, (out,) in enumerate(outputs):
            if r != src:
                out.copy_(inputs[src][0])

    return move


class ThreadTransport:
    """One rank's way to the others of its group. Starts each operation and returns the function that waits for it."""

    device = torch.device("cpu")

    def __init__(self, exchange: Exchange, rank: int, members: tuple[int, ...], name: str = "world"):
        self.exchange, self.rank, self.members, self.name = exchange, rank, members, name
        self.size = len(members)
        self._number = self._subgroups = 0
        exchange.enter(members[rank])

    def subgroup(self, groups: list[list[int]], name: str) -> ThreadTransport:
        self._subgroups += 1  # in its name, since the same split again makes another group
        mine = next(g for g in groups if self.rank in g)
        members = tuple(self.members[r] for r in mine)
        return ThreadTransport(self.exchange, mine.index(self.rank), members, f"{self.name}.{name}{self._subgroups}")

    def duplicate(self) -> ThreadTransport:
        return self  # its tags keep messages apart

    def all_reduce(self, x, op):
        return self._join("all_reduce", f"{op} {_shape(x)}", [x], [x], _move_all_reduce(op))

    def all_gather(self, outs, x):
        return self._join("all_gather", f"{[_shape(o) for o in outs]}", [x], outs, _move_all_gather)

    def reduce_scatter(self, out, parts):
        return self._join("reduce_scatter", f"{[_shape(p) for p in parts]}", parts, [out], _move_reduce_scatter)

    def all_to_all(self, outs, parts):
        return self._join("all_to_all", str(parts[0].dtype), parts, outs, _move_all_to_all)

    def broadcast(self, x, src):
        return self._join("broadcast", f"{_shape(x)} from {src}", [x], [x], _move_broadcast(src))

    def barrier(self):
        return self._join("barrier", "nothing", [], [], lambda inputs, outputs: None)

    def isend(self, x, dst, tag):
        me, peer = self.members[self.rank], self.members[dst]
        posted = Posted(me, "send", _shape(x), [x], [], peer)
        self.exchange.post_send(posted, (self.name, me, peer, tag))
        return partial(self.exchange.wait, posted)

    def irecv(self, out, src, tag):
        me, peer = self.members[self.rank], self.members[src]
        posted = Posted(me, "recv", _shape(out), [], [out], peer)
        self.exchange.post_recv(posted, (self.name, peer, me, tag))
        return partial(self.exchange.wait, posted)

    def describe(self) -> str:
        return f"{self.size} threads of one process" if self.size > 1 else "1 thread"

    def sleep(self, seconds: float) -> None:
        self.exchange.sleep(seconds)

    def close(self) -> None:
        self.exchange.leave(self.members[self.rank])

    def _join(self, operation, signature, inputs, outputs, move):
        self._number += 1
        posted = Posted(self.members[self.rank], operation, signature, inputs, outputs)
        self.exchange.post(posted, (self.name, self.members, self._number), self.size, move)
        return partial(self.exchange.wait, posted)


def _shape(x) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
