# %% [markdown]
# # Exercise: build the ring all-reduce
#
# 40 minutes, after lesson 02. You need no GPU: the ranks are threads of this notebook, and messages are real.
#
# It trains the one algorithm under every number of this course that says "bytes". You write it from messages alone,
# and then you know where `2S(N − 1)/N` comes from.

# %% [markdown]
# ## The ring
#
# `N` ranks, each with a tensor `x` of `S` bytes. At the end every rank has the sum of all `N` tensors.
# Each rank cuts its `x` into `N` chunks and talks to two neighbours only: rank `r` sends to `r + 1` and receives from
# `r − 1`. All ranks send at the same time.
#
# 1. **Reduce-scatter**, `N − 1` steps. In each step a rank passes a chunk on, and *adds* what arrives to its own copy
#    of that chunk. At the end rank `r` has the finished sum of chunk `r`.
# 2. **All-gather**, `N − 1` steps. The finished chunks go round once more. What arrives *replaces*.
#
# What rank `r` sends, for `N = 3`:
#
# | step | reduce-scatter: rank 0 | rank 1 | rank 2 | all-gather: rank 0 | rank 1 | rank 2 |
# |---|---|---|---|---|---|---|
# | 0 | chunk 2 | chunk 0 | chunk 1 | chunk 0 | chunk 1 | chunk 2 |
# | 1 | chunk 1 | chunk 2 | chunk 0 | chunk 2 | chunk 0 | chunk 1 |

# %%
import torch

from pcourse.checks import collectives, look
from pcourse.split import shard_sizes

# %% [markdown]
# ## Part 1: reduce-scatter


# %%
def ring_reduce_scatter(comm, chunks):
    """Sum chunk r over the ranks onto rank r, in place, in comm.size - 1 steps.

    chunks: a list of comm.size tensors [n_c]. They are yours to change: afterwards chunks[comm.rank] is the sum over
        the ranks, and the others hold partial sums that nobody needs. Lengths may differ, and may be 0; chunk c has
        the same length on every rank.
    Communicates: one message a step, to rank r + 1; rank r sends every chunk but its own, S - S/N bytes.
    May call: comm.isend(x, dst), comm.irecv(out, src), their wait(), comm.send, comm.recv. Every handle is waited for.
    """
    ### BEGIN SOLUTION
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        outgoing = chunks[(comm.rank - 1 - step) % comm.size]
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        arriving = torch.empty_like(mine)
        sending = comm.isend(outgoing, right)
        comm.recv(arriving, left)
        sending.wait()
        mine += arriving
    ### END SOLUTION


# %% [markdown]
# Look before you check. Here rank `q` puts `10^q` into every chunk, so the digits of a sum name the ranks in it:
# `110` has ranks 1 and 2, `102` counts rank 0 twice. On rank `r`, chunk `r` should end as `111`.


# %%
def one_digit_for_each_rank(comm):
    chunks = [torch.tensor([10**comm.rank]) for _ in range(comm.size)]
    ring_reduce_scatter(comm, chunks)
    return "  ".join(f"chunk {c}: {chunk.item():03}" for c, chunk in enumerate(chunks))


look(3, one_digit_for_each_rank)

# %% tags=["check"]
collectives.ring_reduce_scatter(ring_reduce_scatter)

# %% [markdown]
# <details><summary>Hint 1: which chunk, in which step?</summary>
#
# Follow one chunk. Chunk `r` must *end* on rank `r`, after `N − 1` hops to the right. So it starts on rank `r + 1`, and
# rank `r` sends chunk `r − 1` first. In the next step a rank sends the chunk that it has just added to.
# </details>
#
# <details><summary>Hint 2: every rank waits and nothing happens</summary>
#
# `send` returns when its message has been received. If all ranks send first, nobody receives. `isend` starts the send
# and returns at once; then `recv`; then `wait()` on the send's handle.
# </details>
#
# <details><summary>Hint 3: where does a message land?</summary>
#
# Not in your chunk: your own numbers are in it, and they would be lost. Receive into `torch.empty_like(chunk)`, and
# add. Indices go round: Python's `%` gives `(−1) % 3 == 2`.
# </details>

# %% [markdown]
# ## Part 2: all-gather


# %%
def ring_all_gather(comm, chunks):
    """Bring every rank's own chunk to every rank, in place, in comm.size - 1 steps.

    chunks: a list of comm.size tensors [n_c]. On rank r, chunks[r] is finished; the others are to be filled.
    Communicates: one message a step, to rank r + 1; rank r sends every chunk but r + 1's, S - S/N bytes.
    May call: as above.
    """
    ### BEGIN SOLUTION
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        sending = comm.isend(chunks[(comm.rank - step) % comm.size], right)
        comm.recv(chunks[(comm.rank - 1 - step) % comm.size], left)
        sending.wait()
    ### END SOLUTION


# %% [markdown]
# Each rank starts with its own chunk, and `-1` where something has to arrive.


# %%
def own_chunk_only(comm):
    chunks = [torch.tensor([c if c == comm.rank else -1]) for c in range(comm.size)]
    ring_all_gather(comm, chunks)
    return [chunk.item() for chunk in chunks]


look(3, own_chunk_only)

# %% tags=["check"]
collectives.ring_all_gather(ring_all_gather)

# %% [markdown]
# <details><summary>Hint 1: which chunk, in which step?</summary>
#
# First your own, chunk `r`: it is the only one that you have. Then always the one that has just arrived.
# </details>
#
# <details><summary>Hint 2: do you need a buffer?</summary>
#
# No. What arrives is finished, so it may land where it belongs.
# </details>

# %% [markdown]
# ## Part 3: the whole
#
# The two phases are done. What is left is the cutting: `x` has any shape, its length need not be a multiple of `N`, and
# the caller keeps `x`.


# %%
def ring_all_reduce(comm, x):
    """The sum of x over the ranks, on every rank, to the bit the same.

    x: any shape, any length, not always contiguous; it is left untouched. Returns a new tensor of its shape and dtype.
    The chunks are shard_sizes(x.numel(), comm.size) elements of the flattened x: as even as can be, without padding.
    Communicates: 2(N - 1) messages, 2S(N - 1)/N bytes from each rank where the chunks are even.
    May call: the two functions above.
    """
    ### BEGIN SOLUTION
    result = x.clone(memory_format=torch.contiguous_format)
    chunks = result.view(-1).split(shard_sizes(x.numel(), comm.size))
    ring_reduce_scatter(comm, chunks)
    ring_all_gather(comm, chunks)
    return result
    ### END SOLUTION


# %%
def sum_of_a_grid(comm):
    x = torch.arange(6).view(2, 3) * 10**comm.rank
    total = ring_all_reduce(comm, x)
    return f"x {x.tolist()}  sum {total.tolist() if total is not None else None}"


look(4, sum_of_a_grid)

# %% tags=["check"]
collectives.ring_all_reduce(ring_all_reduce)

# %% [markdown]
# <details><summary>Hint 1: cutting</summary>
#
# `flat.split(sizes)` takes a list of lengths, and its pieces are *views*: what you write into a piece lands in `flat`.
# `torch.chunk` would do for some lengths only: it may return fewer pieces than you asked for.
# </details>
#
# <details><summary>Hint 2: x is left untouched</summary>
#
# Copy once, at the start: `x.clone(memory_format=torch.contiguous_format)`. A contiguous tensor can be flattened with
# `view(-1)` without another copy. That is why the target for memory is `S + 2S/N`: the result, the chunk that arrives,
# and the one before it, which Python keeps until its name is used again.
# </details>
#
# <details><summary>Hint 3: the result is your own x</summary>
#
# `chunks[c] = chunks[c] + arriving` puts a *new* tensor into the list, and `flat` never hears of it. `chunks[c] += …`
# on a list does both; `chunk.add_(…)` writes in place.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why an all-reduce costs `2S(N − 1)/N` bytes a rank, and why this hardly grows with `N`.
# - Why it takes `2(N − 1)` steps, so that for small tensors the time grows with `N` all the same: latency.
# - Why every rank gets the same bits: each chunk is summed once, by a chain of ranks in one order, and then copied.
# - Why a reduce-scatter and an all-gather are each half of it. ZeRO and sequence parallelism
#   put work between the two halves.
# - Why two ranks that both `send` first wait for ever.
