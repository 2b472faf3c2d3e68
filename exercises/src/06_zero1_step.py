# %% [markdown]
# # Exercise: one step of ZeRO-1
#
# 25 minutes, after lesson 06. You need no GPU: the ranks are threads of this notebook.
#
# It trains the step from data parallelism to ZeRO. An all-reduce is a reduce-scatter and then an all-gather. You put
# the optimizer between the two, and it needs the state of one shard only.

# %% [markdown]
# ## Where the optimizer stands
#
# `N` ranks hold the same `P` weights. Each has a gradient from its own part of the batch. Their mean is what the
# unsplit step uses.
#
# ```
# data parallel   gradient ── all-reduce ──────────────► mean of all P ── step of all P weights
# ZeRO-1          gradient ── reduce-scatter ──► mean of my shard ── step of my shard ── all-gather ──► all P weights
# ```
#
# The optimizer here is SGD with momentum, and its state is one number for each weight, the *velocity*:
#
# ```
# velocity = momentum · velocity + mean gradient
# weights  = weights − learning_rate · velocity
# ```
#
# Adam keeps two numbers for each weight. What is sent is the same.

# %%
import torch

from pcourse.checks import look, zero1
from pcourse.split import shard_range, shard_sizes

# %% [markdown]
# ## The step


# %%
def zero1_step(comm, weights, gradient, state, learning_rate, momentum):
    """One step of SGD with momentum, its state cut over the ranks (ZeRO stage 1: Rajbhandari et al. 2020).

    weights[P]: all weights, the same on every rank. Changed in place, to the unsplit step's on every rank.
    gradient[P]: of the mean loss of this rank's rows. Every rank has as many rows, so the step's gradient is the mean
        over the ranks. Yours to overwrite.
    state: a dict, empty before the first step. What the optimizer keeps from step to step is kept here, and that is
        the velocity of this rank's shard alone. Before the first step the velocity is 0.
    Shard r is shard_range(P, N, r), of shard_sizes(P, N)[r] elements: uneven where N does not divide P, perhaps empty.
    Communicates: one reduce-scatter and one all-gather of P elements.
    May call: comm.reduce_scatter(x, sizes=...), which returns this rank's shard of the sum, comm.all_gather(x,
        sizes=...), which returns all shards side by side, or writes them into out=..., and torch.
    """
    ### BEGIN SOLUTION
    sizes = shard_sizes(len(weights), comm.size)
    mine = shard_range(len(weights), comm.size, comm.rank)
    shard = weights[mine.start : mine.stop]
    if "velocity" not in state:
        state["velocity"] = torch.zeros_like(shard)
    velocity = state["velocity"]
    mean = comm.reduce_scatter(gradient, sizes=sizes) / comm.size
    velocity.mul_(momentum).add_(mean)
    shard.sub_(learning_rate * velocity)
    comm.all_gather(shard, sizes=sizes, out=weights)
    ### END SOLUTION


# %% [markdown]
# Look before you check. Seven weights begin at 0 on three ranks. Rank `q` has the gradient `3 · 10^q` everywhere, so
# the digits of the mean name the ranks in it. With a learning rate of 1, every weight should end as `-111` on every
# rank.


# %%
def one_digit_for_each_rank(comm):
    weights, state = torch.zeros(7), {}
    zero1_step(comm, weights, torch.full((7,), 3 * 10.0**comm.rank), state, learning_rate=1, momentum=0)
    kept = {name: list(value.shape) for name, value in state.items()}
    return f"weights {weights.int().tolist()}  state {kept}"


look(3, one_digit_for_each_rank)

# %% tags=["check"]
zero1.zero1_step(zero1_step)

# %% [markdown]
# <details><summary>Hint 1: which elements are mine?</summary>
#
# `mine = shard_range(len(weights), comm.size, comm.rank)` is a range. `weights[mine.start : mine.stop]` is a view: what
# you change in it changes in `weights`.
# </details>
#
# <details><summary>Hint 2: the velocity of the first step</summary>
#
# `state` is empty then. Put zeros of your shard's size into it. Change them in place (`mul_`, `add_`), or put the new
# tensor back: `velocity = …` alone gives a name to a tensor that is gone after the step.
# </details>
#
# <details><summary>Hint 3: everything moves N times too far</summary>
#
# `reduce_scatter` returns a sum. The contract asks for the mean.
# </details>
#
# <details><summary>Hint 4: the values are right, and the bytes are too many</summary>
#
# An all-reduce of the gradient is a reduce-scatter *and* an all-gather. With your own all-gather of the weights that
# makes three halves. Leave out the one that brings gradients that nobody here needs.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why ZeRO-1 sends what data parallelism sends, `2P(N − 1)/N` elements a rank, and keeps `1/N` of the optimizer state.
# - Why the shards may be cut anywhere, through the middle of a matrix as well: the step acts on each weight by itself.
# - Which optimizers this is not true of: those that look at a whole matrix, or at its norm, to step one weight.
# - Why ZeRO-2 is a small change from here: after the reduce-scatter nobody needs the rest of the gradient.
# - What a rank that misses the all-gather does: it goes on with old weights, and no error says so.
