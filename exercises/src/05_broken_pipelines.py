# %% [markdown]
# # Exercise: three broken pipelines
#
# 40 minutes, after lesson 05. You need no GPU: the ranks are threads of this notebook.
#
# It trains knowing a fault by the number that it spoils. Below are three training steps, each with *one* fault. None of
# the three raises an error, and each fault is of a kind that has been reported for libraries that you may use.

# %% [markdown]
# ## How to work
#
# 1. Read the program. Each rank is one stage: a linear layer and a tanh. All ranks run the same step.
# 2. **Predict** which number betrays the fault, and lock it. The yardstick is the unsplit model: the same layers on one
#    device, and all rows at once.
# 3. Run it beside the unsplit model.
# 4. Mend the program where it stands, run its cell, and check it. A mend takes a few lines.

# %%
import torch
import torch.nn.functional as F

from pcourse.checks import pipelines
from pcourse.checks.pipelines import SYMPTOMS, compare
from pcourse.lab import Choose

# %% [markdown]
# ## Program A: GPipe


# %%
def gpipe_step(comm, layer, inputs, targets, size):
    """One step of a pipeline of comm.size stages: all forwards, then all backwards.

    layer: this stage's nn.Linear(h, h). Its gradients end in layer.weight.grad and layer.bias.grad.
    inputs[B, h], targets[B, h]: the whole batch.
    Micro-batches have `size` rows, the last one perhaps fewer.
    The loss is the mean squared error over the whole batch; returns it on the last stage.
    """
    ### BEGIN SOLUTION
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    kept, losses = [], []
    for x, target in zip(inputs.split(size), targets.split(size)):
        if not first:
            x = comm.recv(torch.empty_like(x), comm.rank - 1).requires_grad_()
        y = torch.tanh(layer(x))
        if last:
            y = F.mse_loss(y, target, reduction="sum") / targets.numel()
            losses.append(y.item())
        else:
            comm.send(y, comm.rank + 1)
        kept.append((x, y))
    for x, y in kept:
        y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
        if not first:
            comm.send(x.grad, comm.rank - 1)
    return sum(losses) if last else None
    ### END SOLUTION
    ### STUB first, last = comm.rank == 0, comm.rank == comm.size - 1
    ### STUB kept, losses = [], []
    ### STUB for x, target in zip(inputs.split(size), targets.split(size)):
    ### STUB     if not first:
    ### STUB         x = comm.recv(torch.empty_like(x), comm.rank - 1).requires_grad_()
    ### STUB     y = torch.tanh(layer(x))
    ### STUB     if last:
    ### STUB         y = F.mse_loss(y, target)
    ### STUB         losses.append(y.item())
    ### STUB     else:
    ### STUB         comm.send(y, comm.rank + 1)
    ### STUB     kept.append((x, y))
    ### STUB for x, y in kept:
    ### STUB     y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
    ### STUB     if not first:
    ### STUB         comm.send(x.grad, comm.rank - 1)
    ### STUB return sum(losses) / len(losses) if last else None


# %%
guess_a = Choose("Program A, 3 micro-batches of 4 rows. Which number is wrong?", SYMPTOMS, name="program A")
guess_a

# %%
compare(gpipe_step, guess_a)

# %% tags=["check"]
pipelines.gpipe_step(gpipe_step)

# %% [markdown]
# <details><summary>Hint 1: where does the factor come from?</summary>
#
# `backward` *adds* to `.grad`. Each of the `m` micro-batches adds the gradient of its own mean. What is the unsplit
# model's loss, in terms of these means?
# </details>
#
# <details><summary>Hint 2: I divided by the number of micro-batches, and one case is still wrong</summary>
#
# 10 rows in micro-batches of 4 are 4, 4 and 2 rows. A mean of their means lets each row of the last one count twice as
# much as another. Let each row add its own error, and divide by the size of the *whole* batch:
# `reduction="sum"`, `targets.numel()`.
# </details>
#
# <details><summary>Hint 3: the gradients are right, and the loss is not</summary>
#
# Then it is divided twice: look at what is returned.
# </details>

# %% [markdown]
# ## Program B: a tied table
#
# The first stage turns tokens into rows of `table`, and the last one multiplies by the same `table` to get the logits.
# The model has *one* such matrix; the pipeline has two copies, equal at the start.


# %%
def tied_step(comm, table, layer, tokens, targets, size):
    """One step of a pipeline of 2 stages or more: all forwards, then all backwards.

    table[V, h]: the embedding on the first stage, the head on the last; None on those between.
    layer: this stage's nn.Linear(h, h). tokens[B], targets[B]: the whole batch.
    All gradients must be the unsplit model's, that of the table on both of its stages.
    The loss is the mean cross-entropy over the whole batch; returns it on the last stage.
    """
    ### BEGIN SOLUTION
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    kept, loss = [], 0.0
    for x, target in zip(tokens.split(size), targets.split(size)):
        if first:
            x = table[x]
        else:
            arriving = torch.empty(len(x), layer.in_features, dtype=layer.weight.dtype)
            x = comm.recv(arriving, comm.rank - 1).requires_grad_()
        y = torch.tanh(layer(x))
        if last:
            y = F.cross_entropy(y @ table.T, target, reduction="sum") / len(targets)
            loss += y.item()
        else:
            comm.send(y, comm.rank + 1)
        kept.append((x, y))
    for x, y in kept:
        y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
        if not first:
            comm.send(x.grad, comm.rank - 1)
    middle = [[rank] for rank in range(1, comm.size - 1)]
    ends = comm.groups([[0, comm.size - 1], *middle], "tied")
    if first or last:
        ends.all_reduce(table.grad, out=table.grad)
    return loss if last else None
    ### END SOLUTION
    ### STUB first, last = comm.rank == 0, comm.rank == comm.size - 1
    ### STUB kept, loss = [], 0.0
    ### STUB for x, target in zip(tokens.split(size), targets.split(size)):
    ### STUB     if first:
    ### STUB         x = table[x]
    ### STUB     else:
    ### STUB         arriving = torch.empty(len(x), layer.in_features, dtype=layer.weight.dtype)
    ### STUB         x = comm.recv(arriving, comm.rank - 1).requires_grad_()
    ### STUB     y = torch.tanh(layer(x))
    ### STUB     if last:
    ### STUB         y = F.cross_entropy(y @ table.T, target, reduction="sum") / len(targets)
    ### STUB         loss += y.item()
    ### STUB     else:
    ### STUB         comm.send(y, comm.rank + 1)
    ### STUB     kept.append((x, y))
    ### STUB for x, y in kept:
    ### STUB     y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
    ### STUB     if not first:
    ### STUB         comm.send(x.grad, comm.rank - 1)
    ### STUB return loss if last else None


# %%
guess_b = Choose("Program B, on 3 stages. Which number is wrong?", SYMPTOMS, name="program B")
guess_b

# %%
compare(tied_step, guess_b)

# %% tags=["check"]
pipelines.tied_step(tied_step)

# %% [markdown]
# <details><summary>Hint 1: what is the gradient of a matrix that is used twice?</summary>
#
# The sum over its uses. On one device autograd adds them up. Here the two uses are on two ranks, and autograd does not
# see from one to the other.
# </details>
#
# <details><summary>Hint 2: when?</summary>
#
# After the last backward, and before the optimizer. After each micro-batch would be too early: `.grad` already holds
# what was summed before, and it would be summed again.
# </details>
#
# <details><summary>Hint 3: how can two of the ranks sum something?</summary>
#
# Two messages do. Or a group of their own, to which every rank has to belong, the middle ones each alone:
# `ends = comm.groups([[0, 2], [1]], "tied")` on 3 ranks, and on the two ends `ends.all_reduce(x, out=x)`.
# Without `out` an all-reduce leaves `x` alone and returns the sum.
# </details>

# %% [markdown]
# ## Program C: 1F1B


# %%
def one_f_one_b_step(comm, layer, inputs, targets, size):
    """One step of a pipeline of comm.size stages in the order of 1F1B.

    Arguments and result as in program A. Stage i holds at most min(m, p - i) micro-batches at once.
    May call: comm.send, comm.recv, and comm.isend, comm.irecv, which return a handle to wait() for.
    """
    ### BEGIN SOLUTION
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    inputs, targets, total = inputs.split(size), targets.split(size), targets.numel()
    warm_up, kept, losses = comm.size - 1 - comm.rank, [], []
    for k in range(len(inputs) + warm_up):
        if k < len(inputs):  # one forward
            x = inputs[k]
            if not first:
                x = comm.recv(torch.empty_like(x), comm.rank - 1).requires_grad_()
            y = torch.tanh(layer(x))
            sending = None
            if last:
                y = F.mse_loss(y, targets[k], reduction="sum") / total
                losses.append(y.item())
            else:
                sending = comm.isend(y, comm.rank + 1)
            kept.append((x, y, sending))
        if k >= warm_up:  # one backward
            x, y, sending = kept.pop(0)
            y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
            if sending:
                sending.wait()  # its gradient is back, so it has arrived
            if not first:
                comm.send(x.grad, comm.rank - 1)
    return sum(losses) if last else None
    ### END SOLUTION
    ### STUB first, last = comm.rank == 0, comm.rank == comm.size - 1
    ### STUB inputs, targets, total = inputs.split(size), targets.split(size), targets.numel()
    ### STUB warm_up, kept, losses = comm.size - 1 - comm.rank, [], []
    ### STUB for k in range(len(inputs) + warm_up):
    ### STUB     if k < len(inputs):  # one forward
    ### STUB         x = inputs[k]
    ### STUB         if not first:
    ### STUB             x = comm.recv(torch.empty_like(x), comm.rank - 1).requires_grad_()
    ### STUB         y = torch.tanh(layer(x))
    ### STUB         if last:
    ### STUB             y = F.mse_loss(y, targets[k], reduction="sum") / total
    ### STUB             losses.append(y.item())
    ### STUB         else:
    ### STUB             comm.send(y, comm.rank + 1)
    ### STUB         kept.append((x, y))
    ### STUB     if k >= warm_up:  # one backward
    ### STUB         x, y = kept.pop(0)
    ### STUB         y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
    ### STUB         if not first:
    ### STUB             comm.send(x.grad, comm.rank - 1)
    ### STUB return sum(losses) if last else None


# %%
guess_c = Choose("Program C, 3 micro-batches of 4 rows. Which number is wrong?", SYMPTOMS, name="program C")
guess_c

# %%
compare(one_f_one_b_step, guess_c)

# %% tags=["check"]
pipelines.one_f_one_b_step(one_f_one_b_step)

# %% [markdown]
# <details><summary>Hint 1: who waits for whom?</summary>
#
# `send` returns when its message has been received. After the warm-up a stage sends an activation to the right, and at
# the same moment the stage on its right sends a gradient to the left. Write down what each does next.
# </details>
#
# <details><summary>Hint 2: which of the two must give way?</summary>
#
# Either. Start one of them with `isend`, go on to the receive, and wait() for the handle only after it. An `isend` whose
# wait() comes at once is a `send`.
# </details>
#
# <details><summary>Hint 3: when is it safe to wait for an activation's handle?</summary>
#
# When its gradient has come back, it has surely arrived. So keep the handle beside `x` and `y`.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why the loss of the first step is right in B, and in A as long as all micro-batches are of one size: it takes a
#   gradient, or a second step.
# - Why A hides behind Adam and not behind SGD or clipping: ask for the gradient norm when you change the split.
# - Why a mean of means is wrong for unequal micro-batches, and so for unequal numbers of valid tokens.
# - Why a tied matrix costs one more sum a step, over the first and the last stage, and is a sum and not a mean.
# - Why an order that is right on paper can still block, and which send must not wait.
#
# Reports of the same kinds: A in
# [torchtitan #2972](https://github.com/pytorch/torchtitan/issues/2972) and
# [DeepSpeed #7773](https://github.com/deepspeedai/DeepSpeed/issues/7773), B in
# [Megatron-LM #844](https://github.com/NVIDIA/Megatron-LM/issues/844), C in
# [PyTorch #172668](https://github.com/pytorch/pytorch/issues/172668).
