"""The one door that every message and every named piece of compute passes: counted, timed, and the same in each world.

A rank program gets a `Comm` and talks to its peers through it. Collectives return their result and leave their input
alone (`out=x` works in place); with `async_op=True` they return a `Handle` whose `wait()` gives the result, and the
input must stay untouched until then. Bytes are counted, not sniffed, and so are the same over threads, gloo and NCCL:

    payload   the full tensor, S in nccl-tests
    wire      what this rank sends under the ring algorithm (sources: NVIDIA nccl-tests, PERFORMANCE.md):
              reduce-scatter S - shard(r), all-gather S - shard(r+1), all-reduce the sum of both,
              broadcast S (the last of the ring 0), all-to-all S - own, send S, recv and barrier 0

What a backend really sends may be more; the lesson on collectives says so. Autograd does not see these calls: what a
collective is in the backward pass, the technique says (`parallel/tensor.py`).
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from pcourse.clock import WallClock
from pcourse.recorder import Call, Compute, Recorder
from pcourse.split import ring_wire, shard_sizes

REDUCTIONS = ("sum", "max", "min")
SCALAR = "scalar"  # the ledger's axis for sums of scalars and for sizes: no technique's bytes


class PeerLost(RuntimeError):
    """A message could not be delivered: the peer is gone, or the run is being ended."""


class Handle:
    """An asynchronous call under way. `wait()` blocks until it is done and returns its result."""

    def __init__(self, wait):
        self._wait = wait

    def wait(self):
        if self._wait is not None:
            self._result, self._wait = self._wait(), None
        return self._result


class Comm:
    """One rank's end of a group of ranks.

    `rank` and `size` are those of the group, `axis` its name, `device` where this rank's tensors live, `generator` a
    random generator of this rank's own.
    """

    def __init__(self, transport, axis: str = "world", *, recorder: Recorder | None = None, act=None, progress=None):
        self.transport, self.axis = transport, axis
        self.rank, self.size, self.device = transport.rank, transport.size, transport.device
        self.recorder = recorder or Recorder(WallClock(self.device))
        self._act = act or (lambda words: None)
        self.progress = progress or (lambda step, of, **info: None)
        self.generator = torch.Generator(self.device).manual_seed(self.rank)

    @property
    def clock(self):
        """The clock that this rank keeps, in all its groups."""
        return self.recorder.clock

    # --- collectives -------------------------------------------------------------------------------------------

    def all_reduce(self, x, op: str = "sum", *, out=None, async_op=False, label="", account=""):
        """The elementwise `op` ("sum", "max" or "min") over the ranks, on every rank. Shape as `x`."""
        if op not in REDUCTIONS:
            raise ValueError(f"op={op!r} is not known; op can be {', '.join(REDUCTIONS)}")
        buffer, finish = _landing(x, out)
        _fill(buffer, x)
        nbytes = x.numel() * x.element_size()
        wire = ring_wire("all_reduce", x.numel(), self.size, self.rank) * x.element_size()

        def start(transport):
            return transport.all_reduce(buffer, op)

        return self._collective("all_reduce", nbytes, wire, start, finish, async_op, label, account)

    def all_gather(self, x, dim: int = 0, *, sizes=None, out=None, async_op=False, label="", account=""):
        """The ranks' shards side by side along `dim`, on every rank.

        `sizes` are the shards' lengths along `dim`. Left out, they are asked for first, at the price of a message of
        8 bytes a rank; shards may be uneven or empty.
        """
        x = x.reshape(1) if x.dim() == 0 else x
        _check_dim("all_gather", x, dim)
        if sizes is None:
            mine = torch.tensor([x.shape[dim]], device=self.device)
            sizes = self.all_gather(mine, sizes=[1] * self.size, account=SCALAR).tolist()
        self._check_sizes("all_gather", sizes, x.shape[dim], self.rank)
        _check_out(out, _with_length(x.shape, dim, sum(sizes)), x.dtype)
        direct = out is not None and out.is_contiguous() and dim % x.dim() == 0
        parts = [x.new_empty(_with_length(x.shape, dim, n)) for n in sizes] if not direct else out.detach().split(sizes)
        nbytes = [part.numel() * x.element_size() for part in parts]
        wire = sum(nbytes) - nbytes[(self.rank + 1) % self.size]

        def start(transport):
            return transport.all_gather(parts, x.detach().contiguous())

        def finish():
            return out if direct else _side_by_side(parts, dim, out)

        return self._collective("all_gather", sum(nbytes), wire, start, finish, async_op, label, account)

    def reduce_scatter(self, x, dim: int = 0, *, sizes=None, out=None, async_op=False, label="", account=""):
        """This rank's shard, along `dim`, of the sum over the ranks. `sizes`: the shards' lengths, even if left out."""
        _check_dim("reduce_scatter", x, dim)
        sizes = shard_sizes(x.shape[dim], self.size) if sizes is None else list(sizes)
        self._check_sizes("reduce_scatter", sizes, x.shape[dim])
        parts = [part.contiguous() for part in x.detach().split(sizes, dim)]
        buffer, finish = _landing(parts[self.rank], out, apart_from=x)
        nbytes = x.numel() * x.element_size()
        wire = nbytes - parts[self.rank].numel() * x.element_size()

        def start(transport):
            return transport.reduce_scatter(buffer, parts)

        return self._collective("reduce_scatter", nbytes, wire, start, finish, async_op, label, account)

    def broadcast(self, x, src: int = 0, *, out=None, async_op=False, label="", account=""):
        """`x` of rank `src`, on every rank; the others' `x` gives only shape and dtype."""
        self._check_peer("broadcast", src)
        buffer, finish = _landing(x, out)
        if self.rank == src:
            _fill(buffer, x)
        nbytes = x.numel() * x.element_size()
        wire = 0 if self.rank == (src - 1) % self.size else nbytes

        def start(transport):
            return transport.broadcast(buffer, src)

        return self._collective("broadcast", nbytes, wire, start, finish, async_op, label, account)

    def all_to_all(
        self, x, dim: int = 0, *, sizes=None, out_sizes=None, out=None, async_op=False, label="", account=""
    ):
        """Part q of `x` along `dim` goes to rank q; returns the parts received, side by side in rank order.

        `sizes` are the lengths sent, `out_sizes` those received (asked for first if only `sizes` is given). Both left
        out, `x` is as long on every rank and is divided as evenly as can be.
        """
        _check_dim("all_to_all", x, dim)
        if sizes is None and out_sizes is None:
            out_sizes = [shard_sizes(x.shape[dim], self.size)[self.rank]] * self.size
        sizes = shard_sizes(x.shape[dim], self.size) if sizes is None else list(sizes)
        self._check_sizes("all_to_all", sizes, x.shape[dim])
        out_sizes = self._ask_sizes(sizes) if out_sizes is None else list(out_sizes)
        parts = [part.contiguous() for part in x.detach().split(sizes, dim)]
        _check_out(out, _with_length(x.shape, dim, sum(out_sizes)), x.dtype)
        outs = [x.new_empty(_with_length(x.shape, dim, n)) for n in out_sizes]
        nbytes = x.numel() * x.element_size()
        wire = nbytes - parts[self.rank].numel() * x.element_size()

        def start(transport):
            return transport.all_to_all(outs, parts)

        def finish():
            return _side_by_side(outs, dim, out)

        return self._collective("all_to_all", nbytes, wire, start, finish, async_op, label, account)

    def barrier(self) -> None:
        """Returns when every rank of the group has arrived."""
        self._collective("barrier", 0, 0, lambda t: t.barrier(), lambda: None, False, "", "")

    # --- point to point ----------------------------------------------------------------------------------------

    def send(self, x, dst: int, *, tag: int = 0, label="") -> None:
        """Returns when rank `dst` has received `x`: a rendezvous, whatever the size."""
        self._check_peer("send", dst, other=True)
        self._point_to_point("send", dst, tag, x, label, async_op=False)

    def recv(self, out, src: int, *, tag: int = 0, label=""):
        """Fills `out` with what rank `src` sends and returns it."""
        self._check_peer("recv", src, other=True)
        return self._point_to_point("recv", src, tag, out, label, async_op=False)

    def isend(self, x, dst: int, *, tag: int = 0, label="") -> Handle:
        """Starts a send; `x` must stay untouched until `wait()` returns, which is when `dst` has received it."""
        self._check_peer("isend", dst, other=True)
        return self._point_to_point("send", dst, tag, x, label, async_op=True)

    def irecv(self, out, src: int, *, tag: int = 0, label="") -> Handle:
        """Posts a receive into `out`; `wait()` returns it, filled."""
        self._check_peer("irecv", src, other=True)
        return self._point_to_point("recv", src, tag, out, label, async_op=True)

    # --- groups and compute ------------------------------------------------------------------------------------

    def split(self, **axes: int) -> SimpleNamespace:
        """The group as a grid: `comm.split(dp=2, tp=2).tp` is this rank's group along tp.

        The last axis varies fastest, so its ranks are neighbours. The degrees multiply to `size`. Every rank calls it.
        An axis over all ranks is this same group under another name: calls on both stand in one order.
        """
        total = 1
        for axis, degree in axes.items():
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{axis}={degree!r} must be a whole number, 1 or more")
            total *= degree
        if total != self.size:
            wanted = " · ".join(f"{axis}={degree}" for axis, degree in axes.items())
            raise ValueError(
                f"{wanted} makes {total} ranks; this group has {self.size}: the degrees must multiply to it"
            )
        grid = torch.arange(self.size).view(*axes.values())
        comms = {}
        for position, (axis, degree) in enumerate(axes.items()):
            groups = grid.movedim(position, -1).reshape(-1, degree).tolist()
            transport = self.transport if degree == self.size else self.transport.subgroup(groups, axis)
            comms[axis] = self._over(transport, axis)
        return SimpleNamespace(**comms)

    def groups(self, ranks: list[list[int]], axis: str) -> Comm:
        """This rank's group among `ranks`, which name every rank once. Every rank calls it."""
        if sorted(r for group in ranks for r in group) != list(range(self.size)):
            raise ValueError(f"groups {ranks} must name each of {self.size} ranks once")
        return self._over(self.transport.subgroup(ranks, axis), axis)

    def duplicate(self) -> Comm:
        """The same ranks, their messages apart from this group's even where a backend knows no tags. Every rank calls
        it."""
        return self._over(self.transport.duplicate(), self.axis)

    def _over(self, transport, axis: str) -> Comm:
        return Comm(transport, axis, recorder=self.recorder, act=self._act, progress=self.progress)

    @contextmanager
    def compute(
        self,
        kind: str,
        label: str = "",
        *,
        micro_batch: int | None = None,
        flops: float = 0,
        bytes: float = 0,
        share: float = 1,
    ):
        """A named piece of compute, `kind` as the timeline colours it (forward, backward, optimizer …).

        On a described machine its own part comes last, after the messages and the computes inside it: as long as its
        `flops` say; under a pace, `share` of what the pace gives its `kind`.
        """
        piece = Compute(kind, label or kind, micro_batch, flops, bytes, self.clock.now(), share=share)
        self._act(f"computing {kind}" + (f", {label}" if label not in ("", kind) else ""))
        self.recorder.under_way.append(piece)
        try:
            yield
            self.part_computed(1.0)
            self._act("computing")
        finally:
            piece.end = self.clock.now()
            self.recorder.computes.append(self.recorder.under_way.pop())

    def part_computed(self, part: float) -> None:
        """So much of the compute under way is done: on a described machine its time passes now, before the messages
        that follow, and not at the end."""
        piece = self.recorder.under_way[-1] if self.recorder.under_way else None
        if piece is not None and piece.done < 1.0:
            part = min(part, 1.0 - piece.done)
            piece.done += part
            self.clock.spend(piece.kind, part * piece.flops, part * piece.share)
            self.clock.keep_pace()

    def start_together(self, warm_up: bool = False) -> None:
        """A step begins: wait for all ranks, and forget what was recorded before. In a `warm_up` nobody sleeps."""
        self.barrier()
        self.clock.start(self.transport, warm_up)
        self.recorder.take()

    def finish_step(self) -> tuple:
        """A step ends. Returns a stamp of its end, how late that is, and how long before the rank was last on time."""
        ended = self.clock.finish()
        self._act("waiting until its sends are received")
        self.clock.settle()
        self._act("computing")
        return ended

    def describe(self) -> str:
        """The devices and what carries the messages, in words."""
        return self.transport.describe()

    def close(self) -> None:
        self.transport.close()

    # --- the door itself ---------------------------------------------------------------------------------------

    def _collective(self, operation, payload, wire, start, finish, async_op, label, account):
        if self.size == 1:  # nothing leaves the rank, so nothing is counted
            start(self.transport)()
            return Handle(finish) if async_op else finish()
        key = self.recorder.key(self.axis, self.transport.members)
        call = Call(self.axis, key, operation, label, payload, wire, self.clock.now(), account=account)
        return self._carry(call, start, finish, async_op)

    def _point_to_point(self, operation, peer, tag, x, label, async_op):
        members = (self.rank, peer) if operation == "send" else (peer, self.rank)
        members = tuple(self.transport.members[r] for r in members)
        nbytes = x.numel() * x.element_size() if operation == "send" else 0
        if operation == "send" and self.clock.buffered:
            buffer = x.detach().clone(memory_format=torch.contiguous_format)
        else:
            buffer = x.detach().contiguous()
        key = self.recorder.key(self.axis, members, tag, count_as=operation)
        call = Call(self.axis, key, operation, label, nbytes, nbytes, self.clock.now())

        def finish():
            if operation == "recv" and not x.is_contiguous():
                x.detach().copy_(buffer)
            return x

        move = "isend" if operation == "send" else "irecv"
        return self._carry(call, lambda t: getattr(t, move)(buffer, peer, tag), finish, async_op, peer, tag)

    def _carry(self, call: Call, start, finish, async_op, peer=None, tag=0):
        words = f"{call.operation} number {call.key[-1]} over {call.axis} ({call.payload:,} bytes)"
        self._act(words)
        self.recorder.calls.append(call)
        work = self.clock.follow(self.transport, call, start(self.transport), peer, tag)
        if not async_op:
            work()
            result = finish()
            call.left = self.clock.now()
            self._act("computing")
            self.clock.keep_pace()
            return result
        call.left = self.clock.now()
        self._act("computing")

        def wait():
            call.wait_entered = self.clock.now()
            self._act(f"waiting for {words}")
            work()
            result = finish()
            call.wait_left = self.clock.now()
            self._act("computing")
            self.clock.keep_pace()
            return result

        return Handle(wait)

    def _ask_sizes(self, sizes: list[int]) -> list[int]:
        mine = torch.tensor(sizes, device=self.device)
        return self.all_to_all(mine, out_sizes=[1] * self.size, account=SCALAR).tolist()

    def _check_sizes(self, operation: str, sizes, length: int, shard: int | None = None) -> None:
        """All `sizes` must cover `length`, or shard number `shard` must be it."""
        covered = sum(sizes) if shard is None else sizes[shard]
        if len(sizes) != self.size or covered != length or min(sizes) < 0:
            whole = f"they must be {self.size} lengths that add up to {length}"
            mine = f"they must be {self.size} lengths, {length} for rank {shard}"
            raise ValueError(f"{operation}: sizes={list(sizes)} do not fit; {whole if shard is None else mine}")

    def _check_peer(self, operation: str, peer: int, other: bool = False) -> None:
        legal = [r for r in range(self.size) if not other or r != self.rank]
        if peer not in legal:
            raise ValueError(f"{operation}: rank {self.rank} has no peer {peer}; it can be {legal}")


def _landing(like, out, apart_from=None):
    """Where a result lands: the contiguous buffer to fill, and the function that hands the result over.

    The buffer does not share memory with `apart_from`, which a peer may still be reading while it fills.
    """
    _check_out(out, like.shape, like.dtype)
    result = torch.empty_like(like, memory_format=torch.contiguous_format) if out is None else out
    direct = result.is_contiguous() and not (apart_from is not None and _share_memory(result, apart_from))
    buffer = result if direct else torch.empty_like(like, memory_format=torch.contiguous_format)

    def finish():
        return result if buffer is result else result.copy_(buffer)

    return buffer.detach(), finish


def _share_memory(a, b) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _fill(buffer, x) -> None:
    """Copy `x` into `buffer`, which may be `x` itself, or share its memory in another order."""
    same_memory = _share_memory(buffer, x)
    if same_memory and (buffer.data_ptr(), buffer.stride()) == (x.data_ptr(), x.stride()):
        return
    buffer.copy_(x.detach().clone() if same_memory else x.detach())


def _check_dim(operation: str, x, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{operation}: a tensor {list(x.shape)} has no dim {dim}; it has {x.dim()}")


def _check_out(out, shape: list[int], dtype) -> None:
    if out is not None and (list(out.shape) != list(shape) or out.dtype != dtype):
        raise ValueError(f"out is {list(out.shape)} {out.dtype}; the result is {list(shape)} {dtype}")


def _side_by_side(parts, dim: int, out):
    return torch.cat(parts, dim) if out is None else torch.cat(parts, dim, out=out)


def _with_length(shape, dim: int, n: int) -> list[int]:
    shape = list(shape)
    shape[dim] = n
    return shape


def process_comm(rank, size, *, backend, directory, timeout, act=None, progress=None) -> Comm:
    """The Comm of one rank that is a process of its own; its peers find it through a file in `directory`."""
    from pcourse.transport.processes import TorchTransport

    transport = TorchTransport.start(rank, size, backend, timeout, directory=directory)
    return Comm(transport, act=act, progress=progress)


def torchrun_comm(*, timeout, progress=None) -> Comm:
    """The Comm of this process, one of those that torchrun has started."""
    from pcourse.transport.processes import TorchTransport

    return Comm(TorchTransport.start_under_torchrun(timeout), progress=progress)


def thread_comms(size, *, acts=None, progress=None):
    """The Comms of `size` ranks that are threads of this process, and a function `abort(reason)` that ends them all."""
    from pcourse.transport.threads import Exchange, ThreadTransport

    exchange = Exchange()
    acts = acts or [None] * size
    comms = [
        Comm(ThreadTransport(exchange, r, tuple(range(size))), act=acts[r], progress=progress) for r in range(size)
    ]
    return comms, exchange.abort
