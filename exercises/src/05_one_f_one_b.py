# %% [markdown]
# # Exercise: write 1F1B as a schedule
#
# 40 minutes, after lesson 05. You need no GPU: the ranks are threads of this notebook.
#
# It trains reading and writing a pipeline as what it is: for each stage, a list. The order of that list decides how
# many micro-batches a stage holds, and whether its bubble can be filled. You write three orders.

# %% [markdown]
# ## A schedule is a list
#
# `p` stages, numbered from 0, and `m` micro-batches. Your function is called once for each stage `i`, and returns the
# order of that stage's computes: `[forward(0), forward(1), backward(0), …]`. Nothing else.
#
# - *When* a compute begins follows from the order: its stage is free, and its input is there.
# - The *messages* follow too. A forward sends its activation to stage `i + 1`, a backward its gradient to stage `i − 1`.
# - A stage **holds** a micro-batch from its forward to the end of its backward. The most at once is what it needs
#   memory for: micro-batches *in flight*.
#
# A forward takes 1 unit of time, a backward 2, a message none.

# %%
from pcourse.checks import schedules
from pcourse.checks.schedules import backward, backward_input, backward_weight, forward, look

# %% [markdown]
# ## Part 1: GPipe, to warm up


# %%
def gpipe(i, p, m):
    """The order on stage i of p, for m micro-batches: all forwards, then all backwards.

    Returns a list of forward(k) and backward(k), each once for every k from 0 to m - 1.
    """
    ### BEGIN SOLUTION
    return [forward(k) for k in range(m)] + [backward(k) for k in range(m)]
    ### END SOLUTION


# %% [markdown]
# Look before you check. The picture is your lists, walked: the number on a compute is its micro-batch, and at the right
# stands how many micro-batches each stage holds at most.

# %%
look(gpipe, p=4, m=8)

# %% tags=["check"]
schedules.gpipe(gpipe)

# %% [markdown]
# <details><summary>Hint: what does the list depend on?</summary>
#
# Here only on `m`: every stage has the same list. That the later stages start later, you need not say. They wait for
# their input.
# </details>

# %% [markdown]
# ## Part 2: 1F1B
#
# GPipe holds all `m` micro-batches, on every stage. Yet stage 0 could run its first backward as soon as micro-batch 0
# has gone down the pipeline and its gradient has come back. **1F1B** gives a stage three phases:
#
# 1. **Warm-up**: forwards only, as few as keep the stage busy until its first gradient can be there.
# 2. **Steady state**: one forward, one backward, in turn.
# 3. **Cool-down**: the backwards that are left.


# %%
def one_f_one_b(i, p, m):
    """The order on stage i of p, for m micro-batches.

    Returns a list of forward(k) and backward(k), each once for every k from 0 to m - 1.
    Works for any m, also for m < p and m = 1.
    Stage i holds at most min(m, p - i) micro-batches at once.
    The step takes as long as GPipe's: 3(m + p - 1) units.
    """
    ### BEGIN SOLUTION
    warm_up = min(m, p - 1 - i)
    order = [forward(k) for k in range(warm_up)]
    for k in range(m - warm_up):
        order += [forward(warm_up + k), backward(k)]
    return order + [backward(k) for k in range(m - warm_up, m)]
    ### END SOLUTION


# %% [markdown]
# Both on one time axis. Compare the step, and what each stage holds.

# %%
look(gpipe, one_f_one_b, p=4, m=8)

# %% [markdown]
# Fewer micro-batches than stages must work too. Then change `m` and `p`: with `m = 40`, which number grows?

# %%
look(one_f_one_b, p=4, m=2)

# %% tags=["check"]
schedules.one_f_one_b(one_f_one_b)

# %% [markdown]
# <details><summary>Hint 1: how long is the warm-up on the last stage?</summary>
#
# There a backward can follow its forward at once: nothing comes after it. So the last stage runs none ahead:
# F0 B0 F1 B1 …
# </details>
#
# <details><summary>Hint 2: and on the stage before?</summary>
#
# While the last stage works on F0 B0, this one has no gradient yet. It can run one more forward: F0 F1 B0 F2 B1 …
# Each stage further from the end needs one more. Mind that the first pair of the steady state begins with a forward.
# </details>
#
# <details><summary>Hint 3: there is no forward of micro-batch 2</summary>
#
# Where `m` is smaller than the warm-up that you would like, all `m` forwards are the warm-up: take the smaller one.
# Then the steady state is empty, and the cool-down brings back all of them.
# </details>
#
# <details><summary>Hint 4: micro-batch 5 has no backward</summary>
#
# Count: a stage that runs `w` forwards ahead pairs `m − w` forwards with `m − w` backwards. `w` backwards are left.
# </details>

# %% [markdown]
# ## Part 3: fill the bubble
#
# 1F1B saved memory and left the bubble. Look at its picture again: a stage waits because the one after it is still in
# its backward. But a backward is two computes:
#
# - `backward_input(k)`, the gradient of the stage's input. The stage before waits for it. 1 unit, printed `B`.
# - `backward_weight(k)`, the gradient of its weights. *Nobody* waits for it, until the optimizer. 1 unit, printed `W`.
#
# So `W` may come later, and fill a gap. It has a price: the micro-batch is held until its `W` is done.


# %%
def zero_bubble(i, p, m):
    """The order on stage i of p, for m micro-batches, with each backward cut in two.

    Returns a list of forward(k), backward_input(k) and backward_weight(k), each once for every k.
    No stage holds more than min(m, p) micro-batches at once: as many as the first stage of 1F1B.
    The step takes 3m + p - 1 units where m >= p. 1F1B's takes 3m + 3(p - 1).
    """
    ### BEGIN SOLUTION
    order = []
    for action in one_f_one_b(i, p, m):
        k = action.micro_batch
        if action == forward(k):
            order.append(forward(k))
            continue
        order.append(backward_input(k))
        if k >= i:
            order.append(backward_weight(k - i))
    return order + [backward_weight(k) for k in range(max(0, m - i), m)]
    ### END SOLUTION


# %%
look(one_f_one_b, zero_bubble, p=4, m=8)

# %% tags=["check"]
schedules.zero_bubble(zero_bubble)

# %% [markdown]
# <details><summary>Hint 1: how much room is there?</summary>
#
# In 1F1B stage `i` holds `p − i` micro-batches, and it may hold `p`. That leaves room for `i` weight gradients that
# wait: none on stage 0, `p − 1` on the last.
# </details>
#
# <details><summary>Hint 2: an order to start from</summary>
#
# Take 1F1B. In place of each `backward(k)` write `backward_input(k)`, and then the weight gradient of a micro-batch that
# came `i` before it, if there is one: `k − i`.
# </details>
#
# <details><summary>Hint 3: micro-batch 7 has no backward or backward-weight</summary>
#
# The last `i` weight gradients are still owed when the input gradients have run out. They come at the end.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why GPipe and 1F1B have the same bubble, `(p − 1)/m` of the ideal, `(p − 1)/(m + p − 1)` of the wall clock.
# - Why 1F1B holds `p − i` micro-batches whatever `m` is, so that more micro-batches make the bubble small and cost no memory.
# - Why the first stage needs the most memory for activations.
# - What a deadlock looks like in a schedule: a stage whose backward waits for a forward that comes after it.
# - Why a weight gradient may wait and an input gradient may not, and what the waiting costs.
# - This last order is **ZB-H1** (Qi et al. 2024). In `pcourse/parallel/schedules.py` all three are the same four lines.
