"""Ring all-reduce from messages alone: what nccl-tests' byte counts and the course's `wire` describe.

S bytes over N ranks: every rank sends 2(N-1) chunks of S/N, to its right neighbour only, whatever N is (Patarasu and
Yuan 2009; NVIDIA nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

import torch

from pcourse.comm import Comm
from pcourse.split import ring_chunk, shard_sizes


def ring_all_reduce(comm: Comm, x: torch.Tensor, watch=lambda step, chunks: None) -> torch.Tensor:
    """The sum of the ranks' `x`, on every rank, bit for bit the same. `watch(step, chunks)` sees the chunks change."""
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    result = x.clone(memory_format=torch.contiguous_format)
    chunks = list(result.view(-1).split(shard_sizes(x.numel(), n)))
    watch(0, chunks)
    for step in range(n - 1):  # reduce-scatter: what arrives is added, chunk r ends complete on rank r
        sent, received = ring_chunk(n, comm.rank, step), ring_chunk(n, left, step)
        chunks[received] += _shift(comm, chunks[sent], torch.empty_like(chunks[received]), right, left)
        watch(step + 1, chunks)
    for step in range(n - 1, 2 * n - 2):  # all-gather: what arrives is complete, and replaces
        sent, received = ring_chunk(n, comm.rank, step), ring_chunk(n, left, step)
        _shift(comm, chunks[sent], chunks[received], right, left)
        watch(step + 1, chunks)
    return result


def _shift(comm: Comm, outgoing, landing, right: int, left: int):
    """Send one chunk to the right while one comes in from the left."""
    sending = comm.isend(outgoing, right)
    comm.recv(landing, left)
    sending.wait()
    return landing
