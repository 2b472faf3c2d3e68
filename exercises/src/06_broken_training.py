# %% [markdown]
# # Exercise: three broken training steps
#
# 40 minutes, after lesson 06. You need no GPU: the ranks are threads of this notebook.
#
# It trains knowing a fault by the number that it spoils. Below are three pieces of a data-parallel training step, each
# with *one* fault. None of the three raises an error, and each fault is of a kind that has been reported for libraries
# that you may use.

# %% [markdown]
# ## How to work
#
# 1. Read the program. All ranks run the same one.
# 2. **Predict** which number betrays the fault, and lock it. The yardstick is one device that has the whole batch, all
#    gradients, and float32 weights.
# 3. Run it beside that.
# 4. Mend the program where it stands, run its cell, and check it. A mend takes a few lines.

# %%
import torch
import torch.nn.functional as F

from pcourse.checks import training
from pcourse.checks.training import SYMPTOMS, compare
from pcourse.lab import Choose

# %% [markdown]
# ## Program A: clipping
#
# ZeRO cuts the large gradients into shards. Small ones, such as those of biases and norms, are not worth a cut: every
# rank has them whole, and they are the same everywhere, as they have been averaged before.


# %%
def clip_gradients(comm, shards, replicas, limit):
    """Scale the gradients so that their global norm is at most `limit`; returns the norm that they had, a float.

    shards: a list of tensors [n], this rank's shards of the large gradients. Every element is on one rank only.
    replicas: a list of tensors [n], the small gradients, whole and the same on every rank.
    Both are scaled in place, by limit/norm where the norm is above the limit.
    The global norm is the square root of the sum of the squares of all gradients, each parameter of the model once.
    Communicates: one all-reduce of one number.
    """
    ### BEGIN SOLUTION
    squares = comm.all_reduce(sum(g.square().sum() for g in shards))
    norm = (squares + sum(g.square().sum() for g in replicas)).sqrt().item()
    if norm > limit:
        for g in [*shards, *replicas]:
            g *= limit / norm
    return norm
    ### END SOLUTION
    ### STUB squares = sum(g.square().sum() for g in [*shards, *replicas])
    ### STUB norm = comm.all_reduce(squares).sqrt().item()
    ### STUB if norm > limit:
    ### STUB     for g in [*shards, *replicas]:
    ### STUB         g *= limit / norm
    ### STUB return norm


# %%
guess_a = Choose("Program A, on 4 ranks. Which number is wrong?", SYMPTOMS, name="program A of training")
guess_a

# %%
compare(clip_gradients, guess_a)

# %% tags=["check"]
training.clip_gradients(clip_gradients)

# %% [markdown]
# <details><summary>Hint 1: how often is each gradient in the sum?</summary>
#
# The all-reduce adds what the ranks give it. A shard is given by one rank. By how many is a replica?
# </details>
#
# <details><summary>Hint 2: I divide by N, and the norm is too small now</summary>
#
# The shards are in the sum once already. Only the replicas are in it N times.
# </details>
#
# <details><summary>Hint 3: I left out the all-reduce, and the ranks' norms differ</summary>
#
# Each rank then counts its own shards alone. Sum over the ranks what is cut, and count what is whole once.
# </details>

# %% [markdown]
# ## Program B: tokens without a target
#
# The targets of padding and of prompts are `-100`, and `F.cross_entropy` leaves such tokens out: it is the mean over
# the *valid* ones. Each rank has as many tokens as the others, and not as many valid ones.


# %%
def token_step(comm, layer, inputs, targets):
    """Forward and backward of one data-parallel step; returns the loss of the step on every rank, a number.

    layer: an nn.Linear(h, V), the same on every rank. Its gradients end in .grad, whole, the same on every rank.
    inputs[n, h], targets[n]: this rank's tokens. A target of -100 does not count; a rank may have no valid token.
    The loss is the mean cross-entropy over the valid tokens of all ranks: what one device would have for the batch.
    Communicates: an all-reduce of each gradient, and of numbers.
    """
    ### BEGIN SOLUTION
    valid = comm.all_reduce((targets != -100).sum())
    loss = F.cross_entropy(layer(inputs), targets, reduction="sum") / valid
    loss.backward()
    for p in layer.parameters():
        comm.all_reduce(p.grad, out=p.grad)
    return comm.all_reduce(loss.detach()).item()
    ### END SOLUTION
    ### STUB loss = F.cross_entropy(layer(inputs), targets)
    ### STUB loss.backward()
    ### STUB for p in layer.parameters():
    ### STUB     comm.all_reduce(p.grad, out=p.grad)
    ### STUB     p.grad /= comm.size
    ### STUB return comm.all_reduce(loss.detach()).item() / comm.size


# %%
guess_b = Choose("Program B, 10 and 3 valid tokens. Which number is wrong?", SYMPTOMS, name="program B of training")
guess_b

# %%
compare(token_step, guess_b)

# %% tags=["check"]
training.token_step(token_step)

# %% [markdown]
# <details><summary>Hint 1: what is averaged?</summary>
#
# Each rank's loss is a mean over its own valid tokens, and then the means are averaged. A token on a rank with few of
# them weighs more than another.
# </details>
#
# <details><summary>Hint 2: by what is to be divided?</summary>
#
# Let each token add its own error, `reduction="sum"`, and divide by the number of valid tokens on *all* ranks. That is
# one number more to all-reduce, before backward. The sum over the ranks is then the mean: do not divide it again.
# </details>
#
# <details><summary>Hint 3: a rank without a valid token gives nan</summary>
#
# A mean over no tokens is 0/0. A sum over none is 0.
# </details>

# %% [markdown]
# ## Program C: small updates
#
# The model computes with bfloat16 weights, which have 8 significant bits: after 1 comes 1.0078. So the step is made in
# float32, on a *master copy* of the weights, and the model gets it rounded.


# %%
def mixed_step(comm, weights, gradient, state, learning_rate):
    """One step of SGD of a model in bfloat16, with master weights in float32 (Micikevicius et al. 2018).

    weights[P]: bfloat16, what the model computes with, the same on every rank. Changed in place.
    gradient[P]: bfloat16, of the mean loss of this rank's rows; every rank has as many, so their mean is due.
    state: a dict, empty before the first step, of what the optimizer keeps from step to step.
    After any number of steps `weights` are the float32 weights of a float32 run with these gradients, rounded once.
    Communicates: one all-reduce of the gradient in float32.
    """
    ### BEGIN SOLUTION
    mean = comm.all_reduce(gradient.float()) / comm.size
    if "master" not in state:
        state["master"] = weights.float()
    state["master"] -= learning_rate * mean
    weights.copy_(state["master"])
    ### END SOLUTION
    ### STUB mean = comm.all_reduce(gradient.float()) / comm.size
    ### STUB master = weights.float()
    ### STUB master -= learning_rate * mean
    ### STUB weights.copy_(master)


# %%
guess_c = Choose("Program C, 64 small steps. Which number is wrong?", SYMPTOMS, name="program C of training")
guess_c

# %%
compare(mixed_step, guess_c)

# %% tags=["check"]
training.mixed_step(mixed_step)

# %% [markdown]
# <details><summary>Hint 1: where does a small update go?</summary>
#
# Follow one weight of value 1 through two steps of 0.001. What is the master copy after the first step, what is the
# weight, and what is the master copy at the start of the second step made from?
# </details>
#
# <details><summary>Hint 2: what must outlive the step?</summary>
#
# What rounding has cut off. `weights` cannot hold it; `state` can. Make the float32 copy once, in the first step.
# </details>
#
# <details><summary>Hint 3: the master copy moves, and the model does not</summary>
#
# `weights.copy_(master)`, after each step. `weights = …` gives the name to another tensor.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why the loss of the first step is right in A and in C, and why a norm and a distance must be watched as well.
# - Why A clips too early, the more so the more ranks there are, and looks like training that has become slower.
# - Why a mean of means is right only as long as all ranks have as many valid tokens, and which ranks then weigh too much.
# - Why a master copy is part of the optimizer's state, 4 bytes a weight, and must be saved with it: one that is made
#   anew from rounded weights has lost what it was there for.
# - Why weights near 1, such as those of norms, stand still first: an update below 1/512 of its weight is rounded away.
#
# Reports of the same kinds: A in
# [hyper-parallel #526](https://github.com/mindspore-ai/hyper-parallel/issues/526) and
# [TransformerEngine #715](https://github.com/ROCm/TransformerEngine/pull/715), B in
# [torchtitan #2206](https://github.com/pytorch/torchtitan/pull/2206) and
# [torchtitan #4167](https://github.com/pytorch/torchtitan/pull/4167), C in
# [speculators #765](https://github.com/vllm-project/speculators/pull/765) and
# [Model-Optimizer #2322](https://github.com/NVIDIA/Model-Optimizer/pull/2322).
