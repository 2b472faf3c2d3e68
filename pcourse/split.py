"""How n things are divided over ranks: as even as can be, the larger shards first. Nothing here imports torch."""

from __future__ import annotations


def shard_sizes(n: int, parts: int) -> list[int]:
    """The lengths of the `parts` shards of `n`; they add up to `n`, and some are 0 where `n` is below `parts`."""
    return [n // parts + (r < n % parts) for r in range(parts)]


def shard_range(n: int, parts: int, r: int) -> range:
    """The indices that shard `r` of `parts` holds."""
    start = sum(shard_sizes(n, parts)[:r])
    return range(start, start + shard_sizes(n, parts)[r])


def micro_batches(batch: int, replicas: int, replica: int, parts: int) -> list[range]:
    """The sequences of the global batch that `replica` takes in each of its `parts` micro-batches."""
    mine = shard_range(batch, replicas, replica)
    return [mine[rows.start : rows.stop] for rows in (shard_range(len(mine), parts, k) for k in range(parts))]


def ring_wire(operation: str, n: int, parts: int, r: int) -> int:
    """Elements that rank `r` sends when `operation` runs over a ring on `n` elements in even shards.

    Reduce-scatter n - shard(r), all-gather n - shard(r+1), all-reduce the sum of both (nccl-tests, PERFORMANCE.md:
    2n(N-1)/N where N divides n). Raises KeyError for another operation.
    """
    shards = shard_sizes(n, parts)
    reduce_scatter, all_gather = n - shards[r], n - shards[(r + 1) % parts]
    return {
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "all_reduce": reduce_scatter + all_gather,
    }[operation]


def ring_chunk(n: int, rank: int, step: int) -> int:
    """The chunk that `rank` sends to `rank` + 1 in `step` of a ring all-reduce over `n` ranks.

    In the first n - 1 steps (reduce-scatter) what arrives is added, and rank r ends with the sum of chunk r. In the
    n - 1 after them (all-gather) it replaces.
    """
    first = rank - 1 if step < n - 1 else rank
    return (first - step % (n - 1)) % n
