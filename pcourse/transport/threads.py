"""Messages between ranks that are threads of one process.

The network is a thread too: when every rank of a group has made its call, it copies from their inputs into their
outputs, in rank order, so that all ranks get the same bits. Nothing is cloned on the way, and a rank's own memory
meter sees only what that rank allocated.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field

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
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class Exchange:
    """Where the ranks of one world meet."""

    def __init__(self):
        self._lock = threading.Lock()
        self._gathering: dict = defaultdict(dict)  # (group, number) -> {rank: Posted}
        self._sends: dict = defaultdict(deque)
        self._recvs: dict = defaultdict(deque)
        self._pending: set[Posted] = set()
        self._aborted: str | None = None
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._network, name="pcourse-network", daemon=True).start()

    def post(self, posted: Posted, key, members: int, move) -> None:
        """A rank joins collective `key`; the last of `members` to join sets it in motion."""
        with self._lock:
            self._admit(posted)
            group = self._gathering[key]
            group[posted.rank] = posted
            if len(group) == members:
                del self._gathering[key]
                self._work.put((_agreed([group[r] for r in sorted(group)]), move))

    def post_send(self, posted: Posted, key) -> None:
        self._post_pair(posted, self._sends[key], self._recvs[key], sender=True)

    def post_recv(self, posted: Posted, key) -> None:
        self._post_pair(posted, self._recvs[key], self._sends[key], sender=False)

    def abort(self, reason: str) -> None:
        """End the world: every rank that waits for a peer, now or later, raises PeerLost."""
        with self._lock:
            self._aborted = reason
            for posted in self._pending:
                posted.error = PeerLost(reason)
                posted.done.set()
            self._pending.clear()
        self._work.put(None)

    def _post_pair(self, posted: Posted, mine: deque, theirs: deque, sender: bool) -> None:
        with self._lock:
            self._admit(posted)
            if not theirs:
                mine.append(posted)
                return
            other = theirs.popleft()
            pair = [posted, other] if sender else [other, posted]
            self._work.put((_agreed(pair), _move_message))

    def _admit(self, posted: Posted) -> None:
        if self._aborted is not None:
            raise PeerLost(self._aborted)
        self._pending.add(posted)

    def _network(self) -> None:
        while (item := self._work.get()) is not None:
            (group, error), move = item
            try:
                if error is None:
                    with torch.no_grad():
                        move([p.inputs for p in group], [p.outputs for p in group])
            except Exception as e:  # a shape that copy_ refuses: every rank of the group must hear of it
                error = ValueError(f"{group[0].operation}: {e}")
            with self._lock:
                for posted in group:
                    if posted in self._pending:
                        self._pending.discard(posted)
                        posted.inputs = posted.outputs = ()  # let go before the rank goes on: its meter counts them
                        posted.error = error
                        posted.done.set()


def _agreed(group: list[Posted]) -> tuple[list[Posted], ValueError | None]:
    if len({(p.operation, p.signature) if p.operation not in ("send", "recv") else p.signature for p in group}) == 1:
        return group, None
    calls = "; ".join(f"rank {p.rank} called {p.operation} of {p.signature}" for p in group)
    rule = "the ranks of a group must make the same calls, in the same order, with sizes that fit"
    return group, ValueError(f"{calls}: {rule}")


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
        self._number = 0

    def subgroup(self, groups: list[list[int]], name: str) -> ThreadTransport:
        mine = next(g for g in groups if self.rank in g)
        members = tuple(self.members[r] for r in mine)
        return ThreadTransport(self.exchange, mine.index(self.rank), members, f"{self.name}.{name}")

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
        posted = Posted(self.members[self.rank], "send", _shape(x), [x], [])
        self.exchange.post_send(posted, (self.name, self.members[self.rank], self.members[dst], tag))
        return posted.wait

    def irecv(self, out, src, tag):
        posted = Posted(self.members[self.rank], "recv", _shape(out), [], [out])
        self.exchange.post_recv(posted, (self.name, self.members[src], self.members[self.rank], tag))
        return posted.wait

    def describe(self) -> str:
        return f"{self.size} threads of one process" if self.size > 1 else "1 thread"

    def close(self) -> None:
        pass

    def _join(self, operation, signature, inputs, outputs, move):
        self._number += 1
        posted = Posted(self.members[self.rank], operation, signature, inputs, outputs)
        self.exchange.post(posted, (self.name, self.members, self._number), self.size, move)
        return posted.wait


def _shape(x) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
