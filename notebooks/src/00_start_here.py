# %% [markdown]
# # 00 · Start here
#
# 15 minutes. You need no GPU, and nothing beyond Python and a little PyTorch.
#
# **Into how fine pieces do I cut my model, and what does each cut cost me in memory, communication and idle time?**
#
# There is no answer for every machine: it depends on how fast the devices are, how much they hold, and how they are
# connected. So this course never just tells. In each lesson you **predict** a number, **run** the split on the devices
# that you have, and **explain** the difference.
#
# Run a cell with Shift+Enter. Try it on the next one.

# %%
import torch

from pcourse import ModelConfig, ParallelConfig, RankError, TrainConfig, World, measure
from pcourse.lab import Panel, Predict, bytes_text, plots

print("ready, with torch", torch.__version__)

# %% [markdown]
# ## What is attached
#
# A **rank** is one process that computes on one device. A run has several, numbered from 0, and they send each other
# messages. What carries the messages depends on what you have:

# %%
for ranks in (1, 2, 4):
    with World(ranks) as world:
        print(f"{ranks} ranks:", world.run(lambda comm: comm.describe())[0])

# %% [markdown]
# - **NCCL**, NVIDIA's library for messages between GPUs, where there is a GPU for each rank,
# - **gloo**, a library for messages between CPUs, otherwise. Real processes and real messages all the same.
#
# Everything in the course runs on any of these. Times differ, and each lesson tells you how to read yours.

# %% [markdown]
# ## A first run
#
# A rank program is a function that gets a `comm`, its end of the line to the other ranks. Every rank runs the same
# function. `comm.all_reduce` adds up what the ranks hold and gives the sum to all of them.


# %%
def hello(comm):
    mine = torch.tensor([10.0 + comm.rank])
    total = comm.all_reduce(mine)
    print(
        f"I am rank {comm.rank} of {comm.size}: I had {mine.item()}, together we have {total.item()}"
    )
    return total.item()


with World(2) as world:
    results = world.run(hello)
print("returned, in rank order:", results)
assert results == [21.0, 21.0]

# %% [markdown]
# The two ranks were processes of their own, started for this run and gone now. The same program also runs with its ranks
# as threads inside this notebook: slower to compute, good to read, print and debug.

# %%
with World(3, backend="threads") as world:
    results = world.run(hello)
assert results == [33.0, 33.0, 33.0]

# %% [markdown]
# ## When a rank fails
#
# It will. A run ends within seconds, the cell shows *that* rank's own lines, and the next run works. Below, rank 1
# multiplies vectors that do not fit.


# %%
def misfit(comm):
    x = torch.ones(3 + comm.rank)
    return comm.all_reduce(x @ torch.ones(3))


try:
    World(2).run(misfit)
except RankError as error:
    print(error)
else:
    raise AssertionError("rank 1 should have failed")

# %% [markdown]
# The stop button ends a run as well, and so does shutting down the notebook's kernel: no rank stays behind.

# %% [markdown]
# ## Three kinds of number
#
# Each number in this course says where it is from.
#
# - **measured**: a machine did it. The line says on what, and when. Outputs that you find saved in a notebook were
#   measured on its authors' machine, at the time they say; run a cell, and they are yours.
# - **paced**: real processes, real messages, slowed down to the speeds of a cluster that you describe, for what needs more
#   devices than you have. Lesson 05 does that.
# - **predicted**: a formula or a simulation says so. The line says which.
#
# Here is a number of two kinds. A small GPT is trained for a few steps on the text of your own Python's standard library.
# Its parameters can be counted on paper: 12h² a layer for the matrices, 13h for its biases and LayerNorms, (V + s)h for the
# embeddings of V bytes and s positions, 2h for the last LayerNorm.

# %%
model = ModelConfig(layers=2, hidden=128, heads=8, sequence=64)
train = TrainConfig(batch=4, steps=5)
report = measure(model, ParallelConfig(), train)

L, h, V, s = model.layers, model.hidden, model.vocab, model.sequence
predicted = 4 * (L * (12 * h**2 + 13 * h) + (V + s) * h + 2 * h)  # 4 bytes a float32
found = report.ranks[0].memory.parameters
print("parameters, predicted from L(12h² + 13h) + (V + s)h + 2h:", bytes_text(predicted))
print(f"parameters, {report.source}: {bytes_text(found)}")
print("the loss of each step, measured:", ", ".join(f"{loss:.2f}" for loss in report.loss))
assert found == predicted and report.loss[-1] < report.loss[0]

# %% [markdown]
# ## Predict, run, explain
#
# Now the rhythm of every lesson, once, in small. `tp` is how many ranks share each layer of that GPT: with two, each does
# about half the work. You will learn in lesson 03 how. Here, only guess.

# %%
guess = Predict(
    "On two ranks (tp = 2) at hidden = 128, how many times as fast is a step as on one?",
    unit="times",
    name="first guess",
)
guess

# %% [markdown]
# Write a number, lock it, and the panel below opens. Then press **Run**, or move `tp`. **Cancel** ends a run. A run takes
# two steps to warm up, five that are timed, and two more to count memory. Press Run again for a second opinion: what you see
# is the median of the five, and machines are noisy.

# %% tags=["answer"]
panel = Panel(
    model,
    ParallelConfig(tp=2),
    train,
    controls={"tp": [1, 2, 4], "hidden": [64, 128, 256]},
    draw=lambda report, panel: [plots.timeline(report), plots.ledger(report)],
    after=guess,
    title="One training step, measured",
)
panel

# %% [markdown]
# How to read it. The **timeline** is the median step: above what each rank computes, below when it communicates, or waits
# for the other to arrive; what is left is idle. The **memory** of each rank stands in five categories: parameters, their
# gradients, the optimizer's state, activations (what is kept for the backward pass), and temporary for all else. Each has its
# own peak; they do not peak together, so the line, the peak of their sum, lies below the top.

# %% tags=["answer"]
await panel.finished()
one, two = [measure(model, ParallelConfig(tp=tp), TrainConfig(batch=4, steps=15)) for tp in (1, 2)]
(one_low, one_high), (two_low, two_high) = one.step_spread, two.step_spread
guess.score(
    one.step_seconds / two.step_seconds, source=two, spread=(one_low / two_high, one_high / two_low)
)
print(f"{'':<14}{'on one rank':>14}{'on rank 0 of two':>20}")
for kind in ("compute", "communication", "waiting", "idle"):
    alone, shared = one.ranks[0].seconds[kind], two.ranks[0].seconds[kind]
    print(f"{kind:<14}{alone * 1e3:>11.2f} ms{shared * 1e3:>17.2f} ms")

# %% [markdown]
# The table explains your number. *Compute* is what was divided. If it did not halve, the two ranks were in each other's way:
# they share this machine's cores, caches and memory, with each other and with whatever else runs. *Communication* moves
# bytes, and *waiting* is for the other rank to arrive: one rank alone has neither. Turn `hidden` up in the panel, and compare
# the lines of its table.
#
# That is the course. Where it pays, where it stops paying, and why, lesson by lesson.

# %% [markdown]
# ## Good to know
#
# - A panel shows *"model not found"*, or stands still, after you reopen a notebook or restart its kernel: run its cell again.
# - *Run All* stops at the first prediction that is not locked. Lock it, then run on from there.
# - Only one run measures at a time on a machine, so that numbers stay clean. In a workshop a second one waits, and says so.
# - Each rank computes with one thread; `World(2, threads=4)` gives it more. With more ranks than cores, ranks take turns.
# - Nothing is downloaded, and ranks talk over this machine's own loopback only.
#
# **Next**: [01 · Where memory goes](01_where_memory_goes.ipynb), then in the order of their numbers to
# [07](07_recomputing_activations.ipynb).
