# %% [markdown]
# # Exercise: the column + row pair, and its two autograd functions
#
# 40 minutes, after lesson 03. You need no GPU: the ranks are threads of this notebook.
#
# It trains the heart of tensor parallelism: what is sent in forward, what in backward, and why the two mirror each
# other. Autograd does not see a message between ranks. *You* say what its backward is.

# %% [markdown]
# ## The pair
#
# `{partial over tp}` is a tensor that is still to be summed over the `tp` ranks.
#
# ```
# forward    X[B, S, H] ── f ── GeLU(X · W1[H, F/tp] + B1[F/tp]) ── · W2[F/tp, H] ── Y{partial over tp} ── g ── + B2[H]
# backward   dX ◄── f ── dX{partial over tp} ◄────────────────────────────────── dY ◄── g ── dY
# ```
#
# - **f** stands where the replicated `X` enters the split part. Forward every rank reads the same `X`. Backward each
#   rank comes out with the gradient through its own columns only: a part of `dX`.
# - **g** stands where the partial sums leave it. Forward each rank has a part of `Y`. Backward every rank has the whole
#   `dY`, as what follows is replicated.

# %%
import torch
import torch.nn.functional as F

from pcourse.checks import look, tensor

# %% [markdown]
# ## Part 1: f


# %%
class CopyToRanks(torch.autograd.Function):
    """f, at the entrance of the split part.

    forward(ctx, x, comm): x[..], the same on every rank, as it is. Communicates nothing.
    backward(ctx, grad): grad[..]{partial over tp}, this rank's part of dX; returns the whole dX, and None for comm.
        Communicates one all-reduce of dX.
    May call: comm.all_reduce(x), which returns the sum over the ranks and leaves x alone.
    """

    @staticmethod
    def forward(ctx, x, comm):
        ### BEGIN SOLUTION
        ctx.comm = comm
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return ctx.comm.all_reduce(grad), None
        ### END SOLUTION


# %% [markdown]
# Look before you check. Rank `q` sends the gradient `10^q` into f, so the digits of what comes out name the ranks in
# it. On three ranks each should get `111`.


# %%
def through_f(comm):
    x = torch.ones(1, requires_grad=True)
    y = CopyToRanks.apply(x, comm)
    y.backward(torch.full((1,), 10.0**comm.rank))
    return f"x {x.item():g}  y {y.item():g}  dX {x.grad.item():03.0f}"


look(3, through_f)

# %% tags=["check"]
tensor.copy_to_ranks(CopyToRanks)

# %% [markdown]
# <details><summary>Hint 1: how does backward get at comm?</summary>
#
# Keep it: `ctx.comm = comm` in forward. `ctx.save_for_backward` is for tensors only.
# </details>
#
# <details><summary>Hint 2: how many values does backward return?</summary>
#
# One for each argument of forward after `ctx`. `comm` has no gradient, so `None`.
# </details>
#
# <details><summary>Hint 3: why a sum and not a mean?</summary>
#
# `X · W1` is cut by columns, and each column of the result adds its term to `dX`. The unsplit layer adds them all.
# </details>

# %% [markdown]
# ## Part 2: g


# %%
class ReduceFromRanks(torch.autograd.Function):
    """g, at the exit of the split part.

    forward(ctx, partial, comm): partial[..]{partial over tp}; returns the sum over the ranks.
        Communicates one all-reduce.
    backward(ctx, grad): grad[..], the whole dY, the same on every rank; returns what each partial sum's gradient is,
        and None for comm. Communicates nothing.
    """

    @staticmethod
    def forward(ctx, partial, comm):
        ### BEGIN SOLUTION
        return comm.all_reduce(partial)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


# %% tags=["check"]
tensor.reduce_from_ranks(ReduceFromRanks)

# %% [markdown]
# <details><summary>Hint: what is the gradient of one term of a sum?</summary>
#
# `Y = P0 + P1 + P2`. If `P1` moves by a little, `Y` moves by as much: `dP1 = dY`. Every rank has `dY` already. One more
# all-reduce would add it up `tp` times.
# </details>

# %% [markdown]
# ## Part 3: the MLP from its shards


# %%
def parallel_mlp(comm, x, w1, b1, w2, b2):
    """Y[B, S, H] = GeLU(X · W1 + B1) · W2 + B2, from the shards of W1, B1 and W2.

    x[B, S, H] and b2[H] are whole and the same on every rank; w1[H, F/tp], b1[F/tp] and w2[F/tp, H] are this rank's
    shards, perhaps uneven. GeLU is F.gelu as it is. Returns the whole Y on every rank.
    Communicates: one all-reduce of B·S·H elements forward, one backward.
    May call: CopyToRanks.apply(x, comm), ReduceFromRanks.apply(partial, comm), and torch.
    """
    ### BEGIN SOLUTION
    hidden = F.gelu(CopyToRanks.apply(x, comm) @ w1 + b1)
    return ReduceFromRanks.apply(hidden @ w2, comm) + b2
    ### END SOLUTION


# %% [markdown]
# The same MLP on 1, 2 and 4 ranks: the outputs should be one and the same row.


# %%
def one_row(comm):
    whole = torch.Generator().manual_seed(0)
    x, w1, b1, w2, b2 = (torch.randn(n, generator=whole) for n in [(1, 1, 3), (3, 8), (8,), (8, 3), (3,)])
    mine = slice(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size)
    y = parallel_mlp(comm, x, w1[:, mine], b1[mine], w2[mine], b2)
    return f"w1 {list(w1[:, mine].shape)}  y {[round(value, 4) for value in y.flatten().tolist()]}"


for tp in (1, 2, 4):
    print(f"tp = {tp}")
    look(tp, one_row)

# %% tags=["check"]
tensor.parallel_mlp(parallel_mlp)

# %% [markdown]
# <details><summary>Hint 1: where do f and g stand?</summary>
#
# f at the one place where something replicated enters the split part, g at the one place where it leaves.
# The weights are not replicated: their gradients are each rank's own.
# </details>
#
# <details><summary>Hint 2: my Y is off by a constant row</summary>
#
# How often is `b2` in the sum? Every rank has the whole `b2`. If each adds it before g, the sum holds it `tp` times.
# </details>
#
# <details><summary>Hint 3: b2 / tp before the sum gives the right Y</summary>
#
# It does. Then look at `db2`: it is `1/tp` of what it should be, on every rank.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why f and g are a pair: what one does forward, the other does backward.
# - Why one MLP costs one all-reduce forward and one backward, `4S(tp − 1)/tp` bytes a rank, `S` being the bytes of `Y`.
# - Why GeLU may act on a column shard, and not on a partial sum.
# - Why the bias of the row linear is added once, after the sum, and what its gradient is on each rank.
# - Which three faults leave the forward pass right and spoil the gradients. The loss of step 1 does not show them.
