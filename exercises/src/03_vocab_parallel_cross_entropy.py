# %% [markdown]
# # Exercise: the vocabulary-parallel cross-entropy
#
# 40 minutes, after lesson 03. You need no GPU: the ranks are threads of this notebook.
#
# It trains reading a formula for what it needs from the other ranks. The head of a language model is a column linear:
# each rank has logits of its own rows of the vocabulary. Gathering them would send `B·S·V` numbers. Three numbers a
# token are enough.

# %% [markdown]
# ## The formula, taken apart
#
# For one token with logits `z[V]` and target `t`, with `m = max z`:
#
# ```
# loss = log Σ_v exp(z_v − m)  −  (z_t − m)
# d loss / d z_v = softmax_v − [v = t]
# ```
#
# Each rank holds `z` for rows `first_row … first_row + V/tp − 1`. Before you write, ask of `m`, of the sum and of
# `z_t`: what can one rank compute alone, and how do the ranks' answers combine?

# %%
import torch

from pcourse.checks import cross_entropy, look
from pcourse.parallel.tensor import ReduceFromRanks

# %% [markdown]
# ## Write it


# %%
def vocab_parallel_cross_entropy(comm, logits_shard, targets, first_row):
    """The cross-entropy summed over the tokens, one number [], the same on every rank.

    logits_shard[B, S, V/tp]: this rank's columns of the logits, for rows first_row on; shards may be uneven. It is left
        untouched. targets[B, S]: rows of the whole vocabulary, the same on every rank; -100 is left out of the loss.
    Stable: logits may be ±10,000, so the token's largest logit, over all ranks, is subtracted before exp.
    Communicates: forward three numbers a token, in two or three all-reduces; backward nothing.
    May call: comm.all_reduce(x, "max"), comm.all_reduce(x), and, if you compose it from what autograd knows,
        ReduceFromRanks.apply(partial, comm, ""): all-reduce forward, nothing backward (it works in place, on partial).
        Write it as a function, or as a torch.autograd.Function with a function that applies it.
    Every rank calls backward on the same loss.
    """
    ### BEGIN SOLUTION
    return CrossEntropy.apply(logits_shard, targets, first_row, comm)
    ### END SOLUTION


# %%
### BEGIN SOLUTION
class CrossEntropy(torch.autograd.Function):
    """Forward: all-reduce the maximum [B, S], then the sum of exponentials and the target's logit [2, B, S].
    Backward: nothing, softmax - onehot is local once the sum is known."""

    @staticmethod
    def forward(ctx, logits, targets, first_row, comm):
        largest = comm.all_reduce(logits.amax(-1), "max")
        shifted = logits - largest.unsqueeze(-1)
        row = targets - first_row
        mine = (row >= 0) & (row < logits.shape[-1])
        row = row.masked_fill(~mine, 0).unsqueeze(-1)
        target_logit = shifted.gather(-1, row).squeeze(-1) * mine
        softmax = shifted.exp_()  # in the same memory: shifted is not needed any more
        total, target_logit = comm.all_reduce(torch.stack([softmax.sum(-1), target_logit]))
        softmax /= total.unsqueeze(-1)
        counted = targets != -100
        ctx.save_for_backward(softmax, row, mine, counted)
        return ((total.log() - target_logit) * counted).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, row, mine, counted = ctx.saved_tensors
        gradient = softmax.scatter_add(-1, row, -mine.to(softmax.dtype).unsqueeze(-1))
        return gradient * (grad * counted).unsqueeze(-1), None, None, None


### END SOLUTION
### STUB # A place for your autograd.Function, if you choose to write one.

# %% [markdown]
# Look before you check: two tokens, six rows, on one rank and on three. All should say the same, and the gradient of a
# token adds up to 0 over the ranks.


# %%
def two_tokens(comm):
    z = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]])
    shard = z.chunk(comm.size, -1)[comm.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(comm, shard, torch.tensor([[5, 1]]), comm.rank * 6 // comm.size)
    loss.backward()
    gradient = [[round(value, 3) for value in token] for token in shard.grad[0].tolist()]
    return f"loss {loss.item():.4f}  gradient {gradient}"


for tp in (1, 3):
    look(tp, two_tokens)

# %% tags=["check"]
cross_entropy.vocab_parallel_cross_entropy(vocab_parallel_cross_entropy)

# %% [markdown]
# <details><summary>Hint 1: the three numbers</summary>
#
# The maximum combines by `max`, and has to be known first. The sum of exponentials combines by a sum. The target's
# logit is on one rank; where all the others add 0, a sum brings it to everyone. The last two fit into one all-reduce:
# `torch.stack`.
# </details>
#
# <details><summary>Hint 2: whose target is it?</summary>
#
# `row = targets - first_row` is in `0 … V/tp − 1` on the one rank that holds it. `gather` needs a legal index
# everywhere: put 0 where the target is another rank's, and *then* replace what was read by 0.
# -100 is no rank's.
# </details>
#
# <details><summary>Hint 3: the gradient</summary>
#
# As an autograd.Function: keep the softmax, the row and the masks in forward; backward needs no message.
# Composed: take the maximum of `logits_shard.detach()`, as the loss does not depend on it, and let
# `ReduceFromRanks.apply` do both sums. Its backward passes the gradient on, as every rank has the same loss.
# </details>
#
# <details><summary>Hint 4: memory</summary>
#
# The logits are the largest activation of a small model. `shifted`, its exponentials and the softmax can share one
# tensor of the shard's size: `exp_()` and `/=` work in place. A composed version keeps more.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why the bytes are `O(B·S)` and do not grow with the vocabulary, where a gather would send `B·S·V`.
# - Why the maximum must be the token's over all ranks: shards that subtract different numbers cannot be added.
# - Why backward needs no message at all, although every logit's gradient depends on every other logit.
# - What `-100`, uneven shards and a target in another rank's rows each ask of the index.
# - Why the sum over tokens is returned, and not the mean: micro-batches with different numbers of valid tokens can be
#   added exactly, and divided once.
