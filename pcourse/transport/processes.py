"""Messages between ranks that are processes: torch.distributed over gloo or NCCL.

Each operation is started and returns the function that waits for it. gloo lacks two things that the course needs:
a true reduce-scatter (its own is an all-reduce) and shards of unequal length; both are made here from what it has.
Where ranks share a GPU, which NCCL refuses, messages go through host memory and gloo.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import time
import weakref

import torch
import torch.distributed as dist

from pcourse.comm import PeerLost

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchTransport:
    """One rank's way to the others of its group, over a torch.distributed process group."""

    groups_made = 0  # by this rank, the first one left out
    joined = 0  # runs that this process has been in under torchrun

    def __init__(self, group, rank: int, members: tuple[int, ...], device: torch.device, backend: str):
        self.group, self.rank, self.members = group, rank, members
        self.device, self.backend, self.size = device, backend, len(members)

    @classmethod
    def start(cls, rank: int, size: int, backend: str, timeout: float, *, directory) -> TorchTransport:
        """Join the other ranks of this machine through a file in `directory`.

        `backend` "auto" is NCCL if there is a GPU for each rank. Raises ValueError where NCCL is asked for and there
        are fewer GPUs than ranks.
        """
        store = dist.FileStore(os.path.join(directory, "store"), size)
        how = {"store": store, "rank": rank, "world_size": size, "timeout": datetime.timedelta(seconds=timeout)}
        return cls._join(rank, size, backend, how)

    @classmethod
    def start_under_torchrun(cls, timeout: float) -> TorchTransport:
        """Join the ranks that torchrun has started, which tells each who it is in its environment."""
        local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        limit = datetime.timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        cls.joined += 1  # the store keeps what an earlier run wrote into it
        store = dist.PrefixStore(f"run {cls.joined}", store)
        how = {"store": store, "rank": rank, "world_size": size, "timeout": limit}
        return cls._join(local_rank, local_size, "auto", how)

    @classmethod
    def _join(cls, local_rank: int, local_size: int, backend: str, how: dict) -> TorchTransport:
        gpus = torch.cuda.device_count()
        if backend == "nccl" and gpus < local_size:
            raise ValueError(f"NCCL needs a GPU for each of {local_size} ranks and sees {gpus}; backend can be gloo")
        if backend == "auto":
            backend = "nccl" if gpus >= local_size else "gloo"
        device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        cls.groups_made = 0
        dist.init_process_group(backend, **how)
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls(dist.group.WORLD, rank, tuple(range(size)), device, backend)

    def subgroup(self, groups: list[list[int]], name: str) -> TorchTransport:
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        members = tuple(self.members[r] for r in ranks)
        # Only its members create a group: the ranks outside may be in another split, or in none.
        self._number_alike()
        group = None
        if len(members) > 1:
            group = self._new_group(list(members))
        return TorchTransport(group, ranks.index(self.rank), members, self.device, self.backend)

    def _number_alike(self) -> None:
        """torch names a group by its members and by how many groups they have made, which must be one number: whoever
        was in fewer splits than the others makes up for it."""
        made = torch.tensor([TorchTransport.groups_made], device=self.device)
        self.all_reduce(made, "max")()
        for _ in range(made.item() - TorchTransport.groups_made):
            self._new_group([self.members[self.rank]])

    def _new_group(self, ranks: list[int]):
        TorchTransport.groups_made += 1
        return dist.new_group(ranks, use_local_synchronization=True)

    def duplicate(self) -> TorchTransport:
        """NCCL knows no tags, and moves what a pair sends within one group in order: traffic that is to overtake other
        traffic needs a group of its own, which here opens the links between neighbours at once, in one order."""
        if self.backend != "nccl" or self.size == 1:
            return self
        apart = self.subgroup([list(range(self.size))], "")
        token = torch.zeros(1, device=self.device)
        for source in range(self.size):
            target = (source + 1) % self.size
            for here, there in ((source, target), (target, source)):
                if self.rank == here:
                    apart.isend(token, there, 0)()
                elif self.rank == there:
                    apart.irecv(token, here, 0)()
        return apart

    def all_reduce(self, x, op):
        return self._start(lambda outs, ins: dist.all_reduce(outs[0], _OPS[op], self.group, async_op=True), [x], [x])

    def all_gather(self, outs, x):
        if self.size == 2 and self.backend == "gloo":  # whose own goes through a buffer as long as the result
            self._keep(outs, x)
            out = outs[1 - self.rank]
            return self._exchange(out.view(-1), [out.numel()] * 2, [x, x])
        longest = max(out.numel() for out in outs)
        if all(out.shape == x.shape for out in outs):
            return self._start(lambda outs, ins: dist.all_gather(outs, ins[0], self.group, async_op=True), outs, [x])
        padded = x.new_zeros(longest)
        padded[: x.numel()].copy_(x.view(-1))
        rows = [x.new_empty(longest) for _ in outs]
        wait = self.all_gather(rows, padded)

        def finish():
            wait()
            for out, row in zip(outs, rows, strict=True):
                out.copy_(row[: out.numel()].view_as(out))

        return finish

    def reduce_scatter(self, out, parts):
        # Of two ranks the one's part is received where the sum will be.
        shape = (self.size - 1, *out.shape)
        received = out.view(shape) if self.size == 2 else out.new_empty(shape)
        wait = self._exchange(received.view(-1), [out.numel()] * self.size, parts)

        def finish():
            wait()
            rows = [*received[: self.rank], parts[self.rank], *received[self.rank :]]
            total = functools.reduce(lambda a, b: torch.add(a, b, out=out), rows)
            if total is not out:  # of one rank
                out.copy_(total)

        return finish

    def all_to_all(self, outs, parts):
        self._keep(outs, parts[self.rank])
        lengths = [0 if q == self.rank else out.numel() for q, out in enumerate(outs)]
        received = outs[0].new_empty(sum(lengths))
        wait = self._exchange(received, lengths, parts)

        def finish():
            wait()
            for q, piece in enumerate(received.split(lengths)):
                if q != self.rank:
                    outs[q].copy_(piece.view_as(outs[q]))

        return finish

    def _keep(self, outs, x) -> None:
        """The rank's own part stays here."""
        if outs[self.rank].data_ptr() != x.data_ptr():
            outs[self.rank].copy_(x)

    def _exchange(self, received, lengths, parts):
        """Part q goes to each other rank q, of which `lengths[q]` elements come, side by side in `received`."""
        if self.size == 1:
            return lambda: None
        others = [q for q in range(self.size) if q != self.rank]
        sent = _in_one([parts[q] for q in others])
        lengths = [0 if q == self.rank else n for q, n in enumerate(lengths)]
        sizes = [0 if q == self.rank else part.numel() for q, part in enumerate(parts)]

        def call(outs, ins):
            return dist.all_to_all_single(outs[0], ins[0], lengths, sizes, group=self.group, async_op=True)

        return self._start(call, [received], [sent])

    def broadcast(self, x, src):
        src = self.members[src]
        return self._start(lambda outs, ins: dist.broadcast(outs[0], src, self.group, async_op=True), [x], [x])

    def barrier(self):
        return self._start(lambda outs, ins: dist.barrier(self.group, async_op=True), [], [])

    def isend(self, x, dst, tag):
        dst = self.members[dst]
        return self._start(lambda outs, ins: dist.isend(ins[0], dst, self.group, tag), [], [x])

    def irecv(self, out, src, tag):
        src = self.members[src]
        return self._start(lambda outs, ins: dist.irecv(outs[0], src, self.group, tag), [out], [])

    def describe(self) -> str:
        ranks = f"{self.size} {{}} rank{'s' if self.size > 1 else ''} over {self.backend.replace('nccl', 'NCCL')}"
        if self.device.type == "cpu":
            return ranks.format("CPU") + f" ({os.cpu_count()} cores, {platform.machine()})"
        shared = ", sharing GPUs, through host memory" if self.backend == "gloo" else ""
        return f"{ranks.format('GPU')} ({torch.cuda.get_device_name(self.device)}{shared})"

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # the world ends processes, asleep or not

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _start(self, call, outs, ins):
        """Start `call(outs, ins)`; returns the function that waits until the outs are filled."""
        if self.size == 1:
            return lambda: [out.copy_(x) for out, x in zip(outs, ins, strict=True) if out is not x]
        staged = self.device.type == "cuda" and self.backend == "gloo"
        lent = {id(t): torch.empty_like(t, device="cpu") if staged else t.detach() for t in outs}
        lent |= {id(t): t.cpu() if staged else t.detach() for t in ins}
        released = [weakref.ref(t) for t in lent.values()]
        try:
            work = call([lent[id(t)] for t in outs], [lent[id(t)] for t in ins])
        except RuntimeError as e:
            raise PeerLost(str(e)) from e

        def wait():
            nonlocal work
            try:
                work.wait()
            except RuntimeError as e:
                raise PeerLost(str(e)) from e
            if staged:
                for out in outs:
                    out.copy_(lent[id(out)])
            work = None
            lent.clear()
            if self.backend == "gloo":
                _await_release(released)

        return wait


def _in_one(parts) -> torch.Tensor:
    """The elements of `parts` in one flat tensor; without a copy, if they already lie side by side in memory."""
    filled = [part for part in parts if part.numel()]
    ends = [part.data_ptr() + part.nbytes for part in filled]
    memory = {part.untyped_storage().data_ptr() for part in filled}
    side_by_side = len(memory) == 1 and all(part.is_contiguous() for part in filled)
    if side_by_side and ends[:-1] == [part.data_ptr() for part in filled[1:]]:
        return filled[0].as_strided((sum(part.numel() for part in filled),), (1,))
    return torch.cat([part.reshape(-1) for part in parts])


def _await_release(tensors, patience: float = 0.05) -> None:
    """gloo's thread lets go of its tensors a moment after the call is done: a rank's memory would differ by chance."""
    end = time.monotonic() + patience
    while any(t() is not None for t in tensors) and time.monotonic() < end:
        time.sleep(0)
