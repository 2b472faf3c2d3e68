# %% [markdown]
# # Exercise: a layer of ZeRO-3
#
# 30 minutes, after lesson 06. You need no GPU: the ranks are threads of this notebook.
#
# It trains the last step of ZeRO: the weights themselves are cut. A layer gathers its weights when it needs them and
# lets go of them at once, forward and backward. FSDP does this.

# %% [markdown]
# ## The layer
#
# A linear layer without bias, `y = x · Wᵀ`. Each rank has rows `x` of its own, as in all data parallelism. `W` lies
# flat, and each rank holds a shard of it, cut anywhere.
#
# ```
# forward    shard ── all-gather ──► W     y = x · Wᵀ                    W is released
# backward   shard ── all-gather ──► W     dx = dy · W                   W is released
#            dshard ◄── reduce-scatter, mean ── dW = dyᵀ · x             dW is released
# ```
#
# Between forward and backward the other layers have their turn. All that this one keeps is `x` and its shard.

# %%
import torch

from pcourse.checks import look, zero3
from pcourse.split import shard_range, shard_sizes

# %% [markdown]
# ## Forward and backward


# %%
class Zero3Linear(torch.autograd.Function):
    """y = x · Wᵀ, W[O, I] flat and cut over the ranks (ZeRO stage 3: Rajbhandari et al. 2020).

    forward(ctx, x, shard, comm, shape): x[B, I], this rank's rows; shard[n], this rank's shard of the flat W, n =
        shard_sizes(O · I, N)[r], perhaps 0; shape = (O, I). Returns y[B, O].
        Communicates one all-gather of P = O · I elements. Keeps x and shard, and nothing of W's size.
    backward(ctx, grad): grad[B, O] = dy, of the mean loss of this rank's rows. Returns dx[B, I]; dshard[n], this rank's
        shard of the *mean* over the ranks of dW; and None for comm and for shape.
        Communicates one all-gather and one reduce-scatter of P elements. Nothing of W's size is alive afterwards.
    May call: comm.all_gather(x, sizes=...), which returns all shards side by side, comm.reduce_scatter(x, sizes=...),
        which returns this rank's shard of the sum, and torch.
    """

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, shard)
        ctx.comm, ctx.shape = comm, shape
        return x @ gathered(comm, shard, shape).T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        x, shard = ctx.saved_tensors
        dx = grad @ gathered(ctx.comm, shard, ctx.shape)
        dw = (grad.T @ x).flatten()
        dshard = ctx.comm.reduce_scatter(dw, sizes=shard_sizes(len(dw), ctx.comm.size)) / ctx.comm.size
        return dx, dshard, None, None
        ### END SOLUTION


### BEGIN SOLUTION
def gathered(comm, shard, shape):
    """W[O, I] from the ranks' shards."""
    outputs, inputs = shape
    return comm.all_gather(shard, sizes=shard_sizes(outputs * inputs, comm.size)).view(outputs, inputs)


### END SOLUTION
### STUB # Both need W from its shards: a function of your own here spares you writing it twice.

# %% [markdown]
# Look before you check: `W[3, 5]` on 1, 2 and 4 ranks. All ranks have the same row here, so the outputs should be one
# and the same. What autograd keeps should be of the sizes of `x` and the shard.


# %%
def one_row(comm):
    whole = torch.Generator().manual_seed(0)
    x, flat = torch.randn(1, 5, generator=whole), torch.randn(15, generator=whole)
    mine = shard_range(15, comm.size, comm.rank)
    shard = flat[mine.start : mine.stop].clone().requires_grad_()
    y = Zero3Linear.apply(x, shard, comm, (3, 5))
    kept = [list(tensor.shape) for tensor in y.grad_fn.saved_tensors]
    return f"shard {list(shard.shape)}  y {[round(value, 4) for value in y.flatten().tolist()]}  kept {kept}"


for dp in (1, 2, 4):
    print(f"dp = {dp}")
    look(dp, one_row)

# %% [markdown]
# First forward. The check counts every byte that is still alive after it.

# %% tags=["check"]
zero3.forward(Zero3Linear)

# %% [markdown]
# <details><summary>Hint 1: from the shard to W</summary>
#
# `comm.all_gather(shard, sizes=shard_sizes(outputs * inputs, comm.size))` is the flat `W`; `.view(outputs, inputs)`
# gives it its shape, without a copy.
# </details>
#
# <details><summary>Hint 2: the whole W is still alive</summary>
#
# What holds it? `ctx.save_for_backward(…, weight)`, `ctx.weight = weight`, and any view of it: a view keeps the whole
# storage alive. Keep the shard instead. It is alive anyway.
# </details>

# %% [markdown]
# Then backward.

# %% tags=["check"]
zero3.backward(Zero3Linear)

# %% [markdown]
# <details><summary>Hint 1: where does backward get W from?</summary>
#
# From where forward got it: gather it again. That is the third `P(N − 1)/N`, and the price of not keeping it.
# </details>
#
# <details><summary>Hint 2: which of the two gradients is reduced?</summary>
#
# `dW` is, as all ranks share `W` and each has seen its own rows only. `dx` is not: it belongs to this rank's rows.
# </details>
#
# <details><summary>Hint 3: the shapes</summary>
#
# `dx = grad @ W` is `[B, I]`. `grad.T @ x` is `[O, I]`, like `W`. Flatten it, and reduce-scatter it in the sizes of the
# shards. `reduce_scatter` returns a sum, and the contract asks for the mean.
# </details>
#
# <details><summary>Hint 4: how many values does backward return?</summary>
#
# One for each argument of forward after `ctx`: `dx, dshard, None, None`.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why ZeRO-3 sends `3P(N − 1)/N` elements a rank where ZeRO-1 sends `2P(N − 1)/N`: backward gathers again.
# - Why it costs more with gradient accumulation: each micro-batch gathers anew, unless `W` is kept in between.
#   (FSDP2's `reshard_after_forward=False` keeps it from forward to backward.)
# - Why ZeRO-3 is data parallelism and not tensor parallelism, although `W` is cut: every rank computes with all of `W`.
# - Why only `dW` is averaged, and what happens to the layers before if `dx` is divided too.
# - What to gather *ahead*: while this layer computes, the next one's all-gather can be under way.
