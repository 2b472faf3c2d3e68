"""Ranks that torchrun has started, on one machine or on many: this process is one of them."""

from __future__ import annotations

import contextlib
import os


class TorchrunWorld:
    """Has World's `run`, on every rank alike; torchrun itself watches over the processes.

    `TorchrunWorld.here()` is None in a process that torchrun did not start.
    """

    def __init__(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    @classmethod
    def here(cls) -> TorchrunWorld | None:
        return cls() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def run(self, program, *args, timeout: float = 60, progress=None) -> list:
        """`program(comm, *args)` on this rank; returns all ranks' results, on every rank."""
        import torch
        import torch.distributed as dist

        from pcourse.clock import align_clocks
        from pcourse.comm import torchrun_comm

        torch.set_num_threads(1)
        comm = torchrun_comm(timeout=timeout, progress=progress)
        if self.machines > 1:
            align_clocks(comm)
        results = [None] * self.size
        dist.all_gather_object(results, program(comm, *args))
        comm.barrier()  # a rank that leaves early would cut the others off
        comm.close()
        return results

    def take_turns(self, announce):
        """torchrun's ranks measure together: a lock that one of them held would stop the others."""
        return contextlib.nullcontext()
