# %% [markdown]
# # 02 · Talking between ranks
#
# 25 minutes, after lesson 00. You need no GPU: messages between processes are real messages.
#
# **Ranks hold parts of one thing. To put it together they must talk. What does a message cost, and does it cost more with
# more ranks?**

# %%
import torch

from pcourse import World
from pcourse.lab import (
    Choose,
    Messages,
    Panel,
    Predict,
    bytes_text,
    plots,
    seconds_text,
    show_source,
)

plots.ring(4)

# %% [markdown]
# ## The collectives, by shape
#
# A **collective** is a call that every rank of a group makes. These five carry the whole course. Below, three ranks run
# each of them; look at the shapes before the names.


# %%
def by_shape(comm):
    r = comm.rank
    same = (
        torch.tensor([1.0, 2.0, 3.0]) * 10**r
    )  # rank 0: 1 2 3, rank 1: 10 20 30, rank 2: 100 200 300
    own = torch.tensor([r + 1.0])
    return {
        "all_reduce      sum, on every rank": (same, comm.all_reduce(same)),
        "reduce_scatter  sum, a shard each": (same, comm.reduce_scatter(same)),
        "all_gather      side by side, on every rank": (own, comm.all_gather(own)),
        "broadcast       rank 0's, on every rank": (own, comm.broadcast(own, src=0)),
        "all_to_all      element q goes to rank q": (same, comm.all_to_all(same)),
    }


with World(3, backend="threads") as world:
    ranks = world.run(by_shape)
for name in ranks[0]:
    print(name)
    for r, result in enumerate(ranks):
        before, after = (str([int(v) for v in t.tolist()]) for t in result[name])
        print(f"    rank {r}   {before:<16} → {after}")

# %% [markdown]
# Two of them put together: all-reduce is reduce-scatter, then all-gather. The next cell checks that. Remember it: later
# lessons do something *between* the two halves.


# %%
def in_two_halves(comm):
    x = torch.arange(12.0) * (comm.rank + 1)
    halves = comm.all_gather(comm.reduce_scatter(x))
    return torch.equal(halves, comm.all_reduce(x))


assert all(World(4, backend="threads").run(in_two_halves))
print("all_gather(reduce_scatter(x)) == all_reduce(x), on 4 ranks")

# %% [markdown]
# ## How an all-reduce travels
#
# The obvious way: everyone sends to rank 0, rank 0 adds up and sends the sum back. With N ranks and S bytes rank 0
# receives and sends (N − 1)·S. It becomes the bottleneck, and the more ranks, the worse.
#
# The **ring**: every rank sends to its right neighbour only, one chunk of S/N at a time. First the
# chunks are summed on their way round (reduce-scatter), then the finished ones go round once more (all-gather).

# %%
plots.ring(4)

# %% [markdown]
# The same from messages alone. `comm.send` returns when the other rank has received, `comm.recv` when something has come.
# (`isend` and `irecv` only start; you `wait()` for them later. The exercise needs them.)

# %%
from pcourse.parallel.ring import ring_all_reduce


def star_all_reduce(comm, x):
    if comm.rank:
        comm.send(x, 0)
        return comm.recv(torch.empty_like(x), 0)
    parts = [comm.recv(torch.empty_like(x), r) for r in range(1, comm.size)]
    total = sum(parts, x)
    for r in range(1, comm.size):
        comm.send(total, r)
    return total


def watched(comm):
    """The ring on [1, 1, 1, 1] times 10^rank: a digit for each rank that a chunk has in it."""
    seen = []
    x = torch.full((comm.size,), 10**comm.rank)
    ring_all_reduce(comm, x, watch=lambda step, chunks: seen.append([int(c) for c in chunks]))
    return seen


for step, states in enumerate(zip(*World(4, backend="threads").run(watched), strict=True)):
    print(
        f"after step {step - 1}:" if step else "at the start:",
        "   ".join(" ".join(f"{c:04}" for c in state) for state in states),
    )

# %% [markdown]
# Each column block is a rank, each number one of its chunks. `1111` is complete: all four ranks are in it. Find the step
# after which each rank has exactly one complete chunk.
#
# Before the next cell: how much does one rank *send*?

# %%
guess = Predict(
    "Ring all-reduce of 1,000,000 bytes over 4 ranks: how many bytes does each rank send?",
    unit="bytes",
    name="bytes of a ring",
)
guess


# %% tags=["answer"]
def bytes_sent(comm, all_reduce):
    x = torch.zeros(250_000)
    comm.recorder.take()
    all_reduce(comm, x)
    return sum(call.wire for call in comm.recorder.take()[0])


guess.require()
for n in (2, 4, 8):
    star, ring = (
        World(n, backend="threads").run(bytes_sent, f) for f in (star_all_reduce, ring_all_reduce)
    )
    print(
        f"{n} ranks: star: rank 0 sends {star[0]:>9,}, rank 1 {star[1]:>9,}    ring: every rank {ring[0]:>9,}"
    )
    assert star[0] == (n - 1) * 1_000_000 and ring == [2 * 1_000_000 * (n - 1) // n] * n
ring_of_four = World(4, backend="threads").run(bytes_sent, ring_all_reduce)[0]
guess.score(
    ring_of_four,
    {
        1_000_000: "One trip round would be half an all-reduce. There are two.",
        750_000: "That is the reduce-scatter. The all-gather sends as much again.",
        2_000_000: "That is the limit for many ranks: 2S(N − 1)/N.",
        3_000_000: "That is rank 0 of the star.",
    },
    source="counted on 4 threads of this process",
)

# %% [markdown]
# `2S(N − 1)/N`: with more ranks a rank sends hardly more. All bytes in this course are counted that way, as NVIDIA's
# nccl-tests count them, whatever carries the message. What a backend really sends may differ. On Linux you can look: every
# byte between processes of one machine passes the loopback device, which keeps count.

# %%
from pathlib import Path

import torch.distributed as dist


def loopback_bytes():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split()[9])  # transmitted


def really_sent(comm):
    """Bytes on the loopback device while two ranks reduce-scatter 16 MiB, the course's way and gloo's own."""
    x, out, sent = torch.zeros(2**22), torch.zeros(2**21), {}
    for name, call in {
        "the course's reduce-scatter": lambda: comm.reduce_scatter(x),
        "gloo's own reduce-scatter": lambda: dist.reduce_scatter(out, list(x.chunk(2))),
        "all-reduce": lambda: comm.all_reduce(x),
    }.items():
        comm.barrier()
        before = loopback_bytes()
        call()
        comm.barrier()
        sent[name] = loopback_bytes() - before
    return sent


if Path("/proc/net/dev").exists():
    for name, nbytes in World(2, backend="gloo").run(really_sent)[0].items():
        print(f"{name:<28} {bytes_text(nbytes):>9} over both ranks")

# %% [markdown]
# The ring's count is (N − 1)S over all ranks for a reduce-scatter, here 16 MiB, and twice that for an all-reduce. Compare
# the middle line: is gloo's own reduce-scatter one? That is why the course makes its own, from an all-to-all.
#
# ## What a message costs
#
# Bytes are not time. Turn the operation and the number of ranks, and see what a message costs *here*, from 1 KiB to 16 MiB.

# %%
start = Predict(
    "An all-reduce of 1 KiB over 2 ranks, and one of 4 KiB: how many times as long does the second take?",
    unit="times",
    name="4 KiB against 1 KiB",
)
start


# %% tags=["answer"]
def draw(cost, panel):
    line = cost.line
    fit = f"{seconds_text(line.latency)} + bytes / {line.bandwidth / 1e9:.2f} GB/s"
    return [
        plots.tradeoff(
            cost.sizes,
            {cost.operation: cost.times},
            x="bytes of the full tensor",
            y="time",
            unit="seconds",
            x_unit="bytes",
            log=True,
            formula=("fitted line", line.seconds),
            source=cost,
            title=f"{cost.operation} over {cost.ranks} ranks, fitted by {fit}",
        )
    ]


panel = Panel(
    experiment=Messages(),
    controls={"operation": ["all_reduce", "reduce_scatter", "all_gather", "send"], "ranks": [2, 4]},
    draw=draw,
    after=start,
    title="The cost of a message, measured",
)
panel

# %% tags=["answer"]
from statistics import quantiles

cost = await panel.finished()
small, larger = (
    quantiles(times) for times in cost.times[:2]
)  # lower quartile, median, upper quartile
start.score(
    cost.medians[1] / cost.medians[0],
    {4: "Four times the bytes is not four times the time: a small message costs its latency."},
    source=cost,
    spread=(larger[0] / small[2], larger[2] / small[0]),
)
line = cost.line
print(f"latency   {seconds_text(line.latency)}: what every call costs, however small")
print(f"bandwidth {line.bandwidth / 1e9:.2f} GB/s: what large messages approach")
alone, together = 1000 * line.seconds(1024), line.seconds(1000 * 1024)
print(
    f"1,000 messages of 1 KiB: {seconds_text(alone)}; the same as one message: {seconds_text(together)}"
)
print(
    f"the two are equal at {bytes_text(line.latency * line.bandwidth)}; the line is off by {line.worst:.0%} at worst"
)

# %% [markdown]
# Where the curve is flat, a message costs the **latency**, whatever its size. Where it climbs, it costs its bytes: the
# **bandwidth**. The line `t = latency + bytes / bandwidth` is fitted to your own medians, small and large ones weighing
# alike. Cutting finer makes messages *smaller and more*: below the size at which the two are equal it brings mostly calls.
#
# With more ranks than cores the latency is that of the scheduler: ranks wait for their turn. Compare `ranks` 2 and 4.
#
# ## Bus bandwidth
#
# How good is that, against what the wire can do? Divide S by the time and you get the **algorithm bandwidth**. It falls
# with N even on perfect links, as a rank sends `2(N − 1)/N` times S. nccl-tests therefore multiply by that factor: the
# **bus bandwidth** is what a link carries in one direction.

# %%
from pcourse.cost.calibrate import BUS_FACTOR, measure_messages

for operation in ("all_reduce", "all_gather", "send"):
    print(
        f"factor of {operation:<12}", {n: round(BUS_FACTOR[operation](n), 2) for n in (2, 4, 8, 64)}
    )
large = [2**20, 2**23]
for operation in ("all_reduce", "all_gather", "send"):
    c = measure_messages(operation, 2, sizes=large, repetitions=10)
    for size, t, bus in zip(c.sizes, c.medians, c.bus_bandwidth(), strict=True):
        print(
            f"{operation:<12} {bytes_text(size):>9}: {seconds_text(t):>8}, bus bandwidth {bus / 1e9:5.2f} GB/s"
        )
print(c.source)

# %% [markdown]
# On paper an all-gather is half an all-reduce: its factor says so. Is it in time, here? A formula counts what must be sent. A
# backend also copies, and sends in an order of its own; only measuring tells.

# %% [markdown]
# ## Waiting is not moving
#
# A collective ends when the last rank has come. A late rank makes the others *wait*; that is not the wire's fault. Each
# call is split so: until the last rank enters, it is waiting; from then on, bytes move. Here rank 1 is late by 20 ms.

# %%
import time


def one_is_late(comm):
    x = torch.zeros(1_000_000)
    comm.all_reduce(x)  # the first call also sets up the connection
    comm.barrier()
    comm.recorder.take()
    if comm.rank == 1:
        time.sleep(0.020)
    comm.all_reduce(x)
    return comm.recorder.take()[0][0]


calls = World(2).run(one_is_late)
last = max(call.entered for call in calls)
for r, call in enumerate(calls):
    waited, moved = last - call.entered, call.left - last
    print(f"rank {r}: in the call for {seconds_text(call.left - call.entered)} = {seconds_text(waited)} waiting"
          f" + {seconds_text(moved)} moving bytes")  # fmt: skip
assert last - calls[0].entered > 0.015, "rank 0 waited for rank 1"

# %% [markdown]
# ## Exercise
#
# [Build the ring all-reduce](../exercises/02_ring_all_reduce.ipynb), 40 minutes: from `isend` and `recv` alone. Do it
# before you open the next cell, which shows the package's own.

# %% tags=["answer"]
show_source(ring_all_reduce)

# %% [markdown]
# ## In production
#
# | here | PyTorch | NCCL |
# |---|---|---|
# | `comm.all_reduce(x)` | `dist.all_reduce(x)`, in place | `ncclAllReduce` |
# | `comm.reduce_scatter(x)` | `dist.reduce_scatter(out, shards)` | `ncclReduceScatter` |
# | `comm.all_gather(x)` | `dist.all_gather(outs, x)` | `ncclAllGather` |
# | `comm.isend`, `comm.irecv` | `dist.isend`, `dist.irecv`, `dist.batch_isend_irecv` | `ncclSend`, `ncclRecv` in a group |
# | the panel above | | `all_reduce_perf -b 1K -e 16M -f 4` of nccl-tests |
#
# For a plan of yours take the *bus* bandwidth that `all_reduce_perf` prints, at the size of message that you will send. The
# number on the box counts both directions, and no algorithm reaches it.

# %% [markdown]
# ## The articles said
#
# This course grew from two articles on splitting models. Here and in later lessons you judge their sentences. Lock your
# verdict first.

# %%
A03 = Choose(
    "A03 “The operation that concatenates the partial results is called all-reduce.”",
    ["holds", "wrong"],
    name="A03",
)
A03


# %% tags=["answer"]
def shapes(comm):
    x = torch.ones(2)
    return list(comm.all_reduce(x).shape), list(comm.all_gather(x).shape)


A03.require()
reduced, gathered = World(2, backend="threads").run(shapes)[0]
A03.score(
    "holds" if reduced == [4] else "wrong",
    f"two tensors [2]: all-reduce gives {reduced}, their sum; all-gather gives {gathered}, side by side",
)

# %% [markdown]
# ## Three questions
#
# **1.** A model has 1,000 small gradients to all-reduce. One by one, or copied into one tensor first?
# <details><summary>Answer</summary>
#
# Into one: the cell under the panel printed both times, from your own fitted line. That is why gradients travel in buckets.
# </details>
#
# **2.** From 8 to 64 ranks, at the same S: how much more does a rank send in an all-reduce?
# <details><summary>Answer</summary>
#
# 2·63/64 over 2·7/8: 1.125 times. The steps go from 14 to 126, so the *latency* grows nine times.
# </details>
#
# **3.** Both ranks call `comm.send` first and `comm.recv` second. What happens, and what would cure it?
# <details><summary>Answer</summary>
#
# Each waits for the other to receive: a deadlock. The run is ended, and says what each rank was last doing. Post the
# receive first (`irecv`), or let one send be `isend`, as the ring does. Try it.
# </details>
#
# **Next**: [03 · Tensor parallelism](03_tensor_parallelism.ipynb).
