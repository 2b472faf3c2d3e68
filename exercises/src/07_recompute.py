# %% [markdown]
# # Exercise: recompute, with the right random state
#
# 30 minutes, after lesson 07. You need no GPU, and no ranks.
#
# It trains the trade of memory for time: forward keeps the input of a block alone, and backward runs the block again.
# With dropout there is a trap in it that raises no error.

# %% [markdown]
# ## The trade
#
# ```
# without     forward   x ── block ──► y           keeps x and everything inside the block
#             backward  dx ◄───────── dy
#
# recompute   forward   x ── block ──► y           keeps x
#             backward  x ── block ──► everything inside the block, for as long as this takes
#                       dx ◄───────── dy
# ```
#
# In PyTorch this is `torch.utils.checkpoint`. Here you write your own, as an autograd function.

# %%
import torch
import torch.nn.functional as F

from pcourse.checks import recompute
from pcourse.meter import MemoryMeter

# %% [markdown]
# ## The autograd function


# %%
class Recompute(torch.autograd.Function):
    """y = function(x, *weights), of which x alone is kept (Chen et al. 2016, arXiv:1604.06174).

    forward(ctx, function, x, *weights): x[B, h]; weights, tensors. Returns y[B, h]. Keeps x and the weights, which are
        alive anyway, and nothing that the function computes inside.
    backward(ctx, grad): grad[B, h] = dy. Runs the function once more, and returns None for the function, dx, and a
        gradient for each of the weights; None for one that needs no gradient (ctx.needs_input_grad says which: one
        entry for each argument of forward after ctx).
    x may need no gradient while the weights do: the first block of a model.
    The function may draw random numbers from torch's random state. Its second run draws the same ones; after backward
        the random state is the one that backward found, and after forward the one that the function left.
    May call: torch, without torch.utils.checkpoint.
    """

    @staticmethod
    def forward(ctx, function, x, *weights):
        ### BEGIN SOLUTION
        ctx.function, ctx.random_state = function, torch.get_rng_state()
        ctx.save_for_backward(x, *weights)
        return function(x, *weights)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        needed = ctx.needs_input_grad[1:]
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed)]
        found = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            y = ctx.function(*inputs)
        torch.set_rng_state(found)
        gradients = iter(torch.autograd.grad(y, [tensor for tensor in inputs if tensor.requires_grad], grad))
        return None, *(next(gradients) if need else None for need in needed)
        ### END SOLUTION


# %% [markdown]
# Look before you check: a block of an MLP, `x[64, 32]` of 16 KiB, without recompute and with it. What is alive after
# forward beside `x`, `y` and the weights is what autograd keeps.


# %%
def block(x, w1, w2, p=0.0):
    return x + F.dropout(F.gelu(x @ w1), p) @ w2


def look(apply, name, **options):
    torch.manual_seed(0)
    leaves = [torch.randn(n, dtype=torch.float64).requires_grad_() for n in [(64, 32), (32, 128), (128, 32)]]
    with MemoryMeter() as meter:
        meter.claim("parameters", leaves)
        y = apply(lambda *inputs: block(*inputs, **options), *leaves)
        meter.claim("activations", [y])
        kept = meter.bytes["temporary"]
    y.sum().backward()
    print(f"{name:<18} kept {kept / 1024:5.0f} KiB   gradient norm of x {leaves[0].grad.norm():.6f}")


look(lambda function, *inputs: function(*inputs), "without recompute")
try:
    look(Recompute.apply, "with recompute")
except NotImplementedError:
    print("with recompute     nothing to see yet: write Recompute above, run it, then run this cell again")

# %% [markdown]
# First without dropout: gradients, bytes, and how often the function runs.

# %% tags=["check"]
recompute.keeps_only_the_input(Recompute)

# %% [markdown]
# <details><summary>Hint 1: what does forward do?</summary>
#
# Almost nothing. Inside an autograd function's forward no graph is recorded, so `function(x, *weights)` keeps nothing.
# `ctx.save_for_backward(x, *weights)`, `ctx.function = function`.
# </details>
#
# <details><summary>Hint 2: "does not require grad and does not have a grad_fn"</summary>
#
# Inside backward no graph is recorded either. The second run needs one: `with torch.enable_grad():`.
# </details>
#
# <details><summary>Hint 3: from the second run to the gradients</summary>
#
# Run the function on *detached* copies of the inputs, so that the graph of the second run ends at them:
# `tensor.detach().requires_grad_(need)`. They share memory with the originals. Then
# `torch.autograd.grad(y, those that need one, grad)` gives the gradients, and adds nothing to any `.grad`.
# </details>
#
# <details><summary>Hint 4: why are the weights arguments?</summary>
#
# A Function is part of the graph if one of its tensor arguments needs a gradient. For the first block of a model `x`
# does not. If the weights were hidden inside the function, `y` would be cut off, and the block never trained.
# </details>

# %% [markdown]
# ## Dropout
#
# Dropout draws a mask from torch's random state, and the state moves on. Backward comes later, after other blocks have
# drawn theirs. Here is the same line as above, with `p=0.5`: are the norms equal?

# %%
look(lambda function, *inputs: function(*inputs), "without recompute", p=0.5)
try:
    look(Recompute.apply, "with recompute", p=0.5)
except NotImplementedError:
    print("with recompute     nothing to see yet: write Recompute above, run it, then run this cell again")

# %% tags=["check"]
recompute.same_masks(Recompute)

# %% [markdown]
# <details><summary>Hint 1: which state is the right one?</summary>
#
# The one that the *first run began with*: `torch.get_rng_state()` before the function draws. `torch.set_rng_state(…)`
# before the second run.
# </details>
#
# <details><summary>Hint 2: the gradients are right, and the random state is not</summary>
#
# Three moments matter. Forward: save. Backward, first: save what you find. Backward, after the second run: put back
# what you found. The state after forward is not it, as somebody may have drawn in between.
# </details>
#
# <details><summary>Hint 3: two blocks get the same mask</summary>
#
# Forward must not put anything back: the next block goes on from where this one stopped.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why recompute costs about one more forward pass, and what it saves: everything inside the block but its input.
# - Why a wrong mask raises no error: the gradient is one of *another* network than the one whose loss you see.
# - Why the state that you found must be put back: else the masks of later steps repeat earlier ones.
# - Why a block whose input needs no gradient is a case of its own. (In `torch.utils.checkpoint` it is one for
#   `use_reentrant=True`.)
# - What changes on a GPU: the mask is drawn from the device's own random state, so that one is saved as well.
# - Why this course's own dropout needs none of it: its mask is a function of the place and the step
#   (`pcourse/dropout.py`).
#
# Reports of this fault: [OLMo-core #828](https://github.com/allenai/OLMo-core/pull/828),
# [guided-diffusion #167](https://github.com/openai/guided-diffusion/issues/167). Which activations are worth the second
# run is the subject of Korthikanti et al. 2022 (arXiv:2205.05198).
