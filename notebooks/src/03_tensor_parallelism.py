# %% [markdown]
# # 03 · Tensor parallelism
#
# 25 minutes, after lesson 02. You need no GPU: two ranks are two processes of this machine.
#
# **A layer is too big for one device. Cut the matrix: along its rows, or along its columns? And what does the cut cost?**

# %%
import torch
import torch.nn.functional as F

from pcourse import ModelConfig, ParallelConfig, TrainConfig, World, measure, prove
from pcourse.lab import Choose, Panel, Predict, bytes_text, plots, show_source

plots.split_matrix(rows=4, columns=8, parts=2, along="pair")

# %% [markdown]
# In the picture the first matrix is cut by columns, the second by rows. What each rank can compute alone, and what is left to
# send, is this lesson.
#
# ## Look at the shards
#
# `W` has 4 rows and 8 columns. Two ranks each take half of it, one way or the other.
#
# - Cut between **columns**: rank r computes *some columns* of `Y`. It needs all of `X`.
# - Cut between **rows**: rank r computes *one term of a sum*. It needs only its columns of `X`.
#
# Written short: `Y[B, 8/tp]` is split along its second dim; `{partial over tp}` marks a sum over the ranks still to be made.

# %%
W = torch.arange(32.0).view(4, 8)
X = torch.ones(1, 4)


def both_cuts(comm):
    columns = W.chunk(comm.size, dim=1)[comm.rank]
    rows, x = W.chunk(comm.size, dim=0)[comm.rank], X.chunk(comm.size, dim=1)[comm.rank]
    me = f"rank {comm.rank}:"
    print(
        me,
        "column shard",
        list(columns.shape),
        bytes_text(columns.nbytes),
        " Y[1, 8/tp] =",
        (X @ columns).tolist(),
    )
    print(
        me,
        "row shard   ",
        list(rows.shape),
        bytes_text(rows.nbytes),
        " Y{partial}  =",
        (x @ rows).tolist(),
    )
    return comm.all_gather(X @ columns, dim=1), comm.all_reduce(x @ rows)


with World(2, backend="threads") as world:
    gathered, summed = world.run(both_cuts)[0]
print("put side by side (all-gather):", gathered.tolist())
print("summed (all-reduce):          ", summed.tolist())
assert torch.equal(gathered, X @ W) and torch.equal(summed, X @ W)

# %% [markdown]
# ## Why the two come as a pair
#
# An MLP is two matrices with a GeLU between them. Column first: GeLU acts on each column by itself, so each rank can go
# on with its own columns, and the row cut of the second matrix wants just those. **Nothing is sent in between.**
#
# Row first: each rank holds a *partial sum*, and GeLU of a sum is not the sum of the GeLUs. How far off?

# %%
torch.manual_seed(0)
x, w1, w2 = torch.randn(5, 16), torch.randn(16, 64) / 4, torch.randn(64, 16) / 8
whole = F.gelu(x @ w1) @ w2

column_then_row = sum(
    F.gelu(x @ a) @ b for a, b in zip(w1.chunk(2, 1), w2.chunk(2, 0), strict=True)
)
partials = [a @ b for a, b in zip(x.chunk(2, 1), w1.chunk(2, 0), strict=True)]
row_first = sum(F.gelu(p) for p in partials) @ w2  # GeLU before the sum: wrong

print(f"column then row, one sum at the end:  off by {(column_then_row - whole).abs().max():.1e}")
print(f"row first, GeLU before the sum:       off by {(row_first - whole).abs().max():.1e}")
assert torch.allclose(column_then_row, whole, atol=1e-5) and not torch.allclose(
    row_first, whole, atol=1e-1
)

# %% [markdown]
# ## Predict
#
# A transformer layer has two such pairs. The MLP, and attention: the matrix that makes queries, keys and values is cut by
# columns, so that each rank has whole heads, and the matrix after them by rows.
# Think of the forward pass first. Then of the backward pass: what does each rank know of the gradient of the pair's input?

# %%
guess = Predict(
    "One transformer layer, forward and backward, on tp = 2 ranks: how many all-reduces?",
    unit="all-reduces",
    name="all-reduces of a layer",
)
guess

# %% [markdown]
# ## Run
#
# The panel trains a small GPT on the text of your own Python's standard library. Every setting really runs, on as many
# processes as `tp` says. Move `tp` and see what halves, and what does not.

# %% tags=["answer"]
from pcourse.cost.communication import communication

model = ModelConfig(layers=2, hidden=128, heads=8, sequence=64)
train = TrainConfig(batch=4, steps=5, warmup=2)


def draw(report, panel):
    theory = communication(report.model, report.parallel, report.train)
    return [plots.communication(report, theory), plots.ledger(report), plots.timeline(report)]


panel = Panel(
    model,
    ParallelConfig(tp=2),
    train,
    controls={
        "tp": [1, 2, 4, 8],
        "hidden": [64, 128, 256],
        "sequence": [32, 64, 128],
        "batch": [2, 4, 8],
    },
    draw=draw,
    after=guess,
    title="Tensor parallelism, measured",
)
panel

# %% [markdown]
# In the table, **payload** is the full tensor, **wire** what the rank sends of it in a ring. **scalar** rows are sums of single
# numbers, such as the gradient norm, which are no part of the technique.
#
# ## Explain: where they come from
#
# One layer's calls are those of a model with three layers less those of a model with two. Below them, all of the three-layer
# model's calls by part.

# %% tags=["answer"]
from collections import Counter

await panel.finished()
two, three = [measure(model.but(layers=n), ParallelConfig(tp=2), train) for n in (2, 3)]
calls = [report.ranks[0].row("tp", "all_reduce").calls for report in (two, three)]
guess.score(
    calls[1] - calls[0],
    {
        1: "One pair's forward pass alone. There are two pairs, and a backward pass.",
        2: "Two is one direction only: the other pass costs as much.",
        8: "An all-reduce after every matrix would be eight. The pair needs one, not two.",
    },
    source=three,
)
spans = [span.label for span in three.ranks[0].spans if span.kind == "communication"]
for label, count in Counter(spans).items():
    print(f"{label:<26}{count}")
plots.layer_communication(tp=2)

# %% [markdown]
# - **g**, after the row cut: forward, the partial results are summed. Backward, nothing: every rank gets the same `dY`.
# - **f**, before the column cut: forward, nothing. Backward, each rank has the part of `dX` that came through *its*
#   columns, and the parts are summed.
#
# So f and g are each other's mirror. Two pairs, two directions: that is the count above. Outside the layers the embedding,
# the output head and the loss make a few more, once for the whole model.
#
# Now look at the memory in the panel. Parameters halve at `tp=2`, or nearly: which do not?

# %%
one, split = [measure(model, ParallelConfig(tp=tp), train) for tp in (1, 2)]
for name in ("parameters", "optimizer", "activations"):
    a, b = getattr(one.ranks[0].memory, name), getattr(split.ranks[0].memory, name)
    print(
        f"{name:<12} {bytes_text(a):>10} on one rank, {bytes_text(b):>10} on each of two: {b / a:.0%}"
    )
print(split.source)
shares = [
    getattr(split.ranks[0].memory, n) / getattr(one.ranks[0].memory, n)
    for n in ("parameters", "activations")
]
assert 0.5 < shares[0] < 0.53 < shares[1]

# %% [markdown]
# Parameters stay a little above a half: LayerNorms, positions and the row cuts' biases are whole on every rank.
# Activations stay well above it: what each LayerNorm takes in, and what it hands to f, is kept for backward *whole* on
# every rank. That is what sequence parallelism takes on.

# %%
from pcourse.model import build
from pcourse.parallel.tensor import tensor_parallel


def whole_on_every_rank(comm):
    split = tensor_parallel(build(model.but(layers=1)), comm)
    return [name for name, p in split.named_parameters() if not hasattr(p, "shard")]


print("whole on every rank:", ", ".join(World(2, backend="threads").run(whole_on_every_rank)[0]))

# %% [markdown]
# ## Predict again: finer
#
# Each all-reduce is of `b·s·h` elements (batch, sequence, hidden), whatever `tp` is.

# %%
finer = Predict(
    "From tp = 2 to tp = 4: by what factor do the bytes grow that one rank sends?",
    unit="times",
    name="bytes from tp 2 to 4",
)
finer

# %% tags=["answer"]
finer.require()
degrees = [2, 4, 8]
reports = [
    measure(model, ParallelConfig(tp=tp), TrainConfig(batch=4, steps=1, warmup=0)) for tp in degrees
]
sent = [report.ranks[0].wire("tp") for report in reports]
finer.score(
    sent[1] / sent[0],
    {2: "The message does not grow with tp; only the share of it that is somebody else's does.",
     4: "A ring sends each chunk to one neighbour, not the whole message to everyone."},
    source=reports[1],
)  # fmt: skip

# %% [markdown]
# Of a message of S bytes a ring all-reduce sends `2S(tp − 1)/tp`, as in lesson 02: the limit is `2S`, however fine you cut.
# The curve is the formula, the points are what your ranks sent.

# %% tags=["answer"]
payload = reports[0].ranks[0].row("tp", "all_reduce").payload
plots.tradeoff(
    degrees,
    {"sent by rank 0": sent},
    x="tp",
    y="bytes sent in a step",
    unit="bytes",
    formula=("2S(tp − 1)/tp", lambda tp: 2 * payload * (tp - 1) / tp),
    source=reports,
    title="Finer cuts: the bytes saturate",
)

# %% tags=["answer"]
assert sent == [2 * payload * (tp - 1) // tp for tp in degrees]
assert sent[2] / sent[1] < sent[1] / sent[0] < 2
print(
    "growth per doubling of tp:",
    " then ".join(f"{b / a:.2f} times" for a, b in zip(sent, sent[1:], strict=False)),
)

# %% [markdown]
# ## The code
#
# The next cell shows what ran: f and g, forward and backward, and the two linear layers made of them. It is also the answer
# to the exercise [The column and row pair](../exercises/03_column_and_row.ipynb), 40 minutes, in which you write f and g
# yourself. Now is the best time for it.

# %% tags=["answer"]
from pcourse.parallel import tensor

show_source(
    tensor.CopyToRanks,
    tensor.ReduceFromRanks,
    tensor.ColumnParallelLinear,
    tensor.RowParallelLinear,
)

# %% [markdown]
# ## Does it pay here?
#
# Each rank computes less and sends more. Three sizes, three degrees, on this machine: about half a minute. Below the dashed
# line the split is *faster* than one rank. The scale is logarithmic; whiskers reach from the lower to the upper quartile.

# %%
import os

grid = {
    hidden: [
        measure(model.but(hidden=hidden), ParallelConfig(tp=tp), TrainConfig(batch=4, steps=5))
        for tp in (1, 2, 4)
    ]
    for hidden in (64, 256, 1024)
}
plots.tradeoff(
    [1, 2, 4],
    {
        f"h = {hidden}": [[t / row[0].step_seconds for t in report.step_times] for report in row]
        for hidden, row in grid.items()
    },
    x="tp",
    y="step time over that of one rank",
    log=True,
    formula=("as fast as one rank", lambda tp: 1.0),
    source=[report for row in grid.values() for report in row],
    title="Time against tp",
)

# %%
pays = []
for hidden, (alone, pair, _) in grid.items():
    gain = alone.step_seconds / pair.step_seconds
    (alone_low, alone_high), (pair_low, pair_high) = alone.step_spread, pair.step_spread
    verdict = (
        "pays"
        if pair_high < alone_low
        else "costs"
        if pair_low > alone_high
        else "within the noise"
    )
    pays += [hidden] if verdict == "pays" else []
    work, shared = (report.ranks[0].seconds["compute"] for report in (alone, pair))
    away = pair.ranks[0].seconds["communication"] + pair.ranks[0].seconds["waiting"]
    print(
        f"h = {hidden:<5}{gain:5.2f} times as fast ({verdict}): compute fell to {shared / work:.0%}, "
        f"messages and waiting took {away / pair.step_seconds:.0%} of the step"
    )
turn = (
    f"tp=2 first pays at h = {pays[0]}" if pays else f"up to h = {hidden} tp=2 does not surely pay"
)
print(f"on this machine, with {os.cpu_count()} cores for its ranks, {turn}")

# %% [markdown]
# A rank's matrix work falls as `1/tp`; its LayerNorms and residuals do not. If compute fell by less than that, the ranks were
# in each other's way: they share cores, caches and memory here. The bytes do not fall, and every call has a latency that no
# cut makes smaller. So the larger the layer, the better a cut pays; the finer the cut, the larger the layer must be. With a
# GPU for each rank the same cell may tell another story.

# %% [markdown]
# ## Prove it
#
# A split that is nearly right trains, too. So: the loss, every gradient, the gradient norm, and the weights after three
# steps of SGD, from the same weights, against the unsplit model. SGD and not Adam, which would hide a wrong scale.

# %%
proof = prove(model, ParallelConfig(tp=4), TrainConfig(batch=3))
print(proof)
assert proof.holds

# %% [markdown]
# ## Break it
#
# Three faults that people really make. Predict for each which line betrays it; then run the cell.

# %%
from unittest.mock import patch

from pcourse.train import Trainer


def bias_on_every_rank(self, x):
    return tensor.ReduceFromRanks.apply(F.linear(x, self.weight, self.bias), self.comm, "")


def mean_in_backward(ctx, grad):
    return ctx.comm.all_reduce(grad) / ctx.comm.size, None, None


def norm_of_everything(self):
    squares = sum((p.grad.double() ** 2).sum() for p in self.model.parameters())
    return self.mesh.tp.all_reduce(squares).sqrt()


betrayed = {}
for fault, where, name, broken in (
    (
        "the row cut's bias is added on every rank, before the sum",
        tensor.RowParallelLinear,
        "forward",
        bias_on_every_rank,
    ),
    (
        "f takes the mean in backward",
        tensor.CopyToRanks,
        "backward",
        staticmethod(mean_in_backward),
    ),
    (
        "the norm counts replicated parameters tp times",
        Trainer,
        "gradient_norm",
        norm_of_everything,
    ),
):
    with patch.object(where, name, broken):
        broken_proof = prove(model, ParallelConfig(tp=2), TrainConfig(batch=2, clip=0.1))
    print(f"{fault}:\n{broken_proof}\n")
    betrayed[fault] = [
        d > 1e-6 for d in (broken_proof.loss, broken_proof.gradients, broken_proof.gradient_norm)
    ]
assert list(betrayed.values()) == [[True, True, True], [False, True, True], [False, False, True]]

# %% [markdown]
# Read the lines: a forward fault is in the loss already. A backward fault leaves the loss alone and shows in the gradients.
# A norm fault leaves every gradient right and shows in the norm, and in the weights only where clipping uses it:

# %%
with patch.object(Trainer, "gradient_norm", norm_of_everything):
    unclipped = prove(model, ParallelConfig(tp=2), TrainConfig(batch=2))
print(unclipped)
assert unclipped.weights < 1e-10 < unclipped.gradient_norm

# %% [markdown]
# ## Exercises
#
# - [The column and row pair](../exercises/03_column_and_row.ipynb), 40 minutes: f and g with their own backward.
# - [Vocabulary-parallel cross-entropy](../exercises/03_vocab_parallel_cross_entropy.ipynb), 40 minutes: a loss over
#   logits that no rank ever has in full.

# %% [markdown]
# ## In production
#
# | here | Megatron-LM | PyTorch |
# |---|---|---|
# | `tp=2` | `--tensor-model-parallel-size 2` | a device mesh with a dim of 2 |
# | `ColumnParallelLinear` | `ColumnParallelLinear` | `ColwiseParallel()` |
# | `RowParallelLinear` | `RowParallelLinear` | `RowwiseParallel()` |
# | f and g | `copy_to_…`, `reduce_from_tensor_model_parallel_region` | `Replicate()` → `Shard`, `Partial()` → `Replicate()` |
# | vocabulary-parallel loss | `vocab_parallel_cross_entropy` | `loss_parallel()` |
#
# The same model and the same step through PyTorch's DTensor, beside ours, in one run:

# %%
from pcourse.native.beside import beside

with World(2, backend="gloo") as world, world.take_turns(print):
    result = world.run(beside, model, train, 15, timeout=120)[0]
print(result.table("DTensor"))

# %% [markdown]
# They send the same but for the loss, which DTensor sums in one more call. In time it works out at every operation how its result
# should be laid out; ours has that written down. The larger the layer, the less that matters.

# %% [markdown]
# ## The articles said
#
# Five sentences from the two articles that this course grew from. You have the numbers by now: lock your verdict, then let
# the next cell compute it.

# %%
said = {
    "A02": "“Row split suits certain activation functions.”",
    "A04": "“Tensor parallelism does one all-reduce per layer.”",
    "A13": "“Fine granularity raises communication exponentially.”",
    "A23": "“Tensor parallelism shares out activation memory.”",
    "A51": "“Split W by columns: each card stores half of it.”",
}
claims = {
    name: Choose(f"{name} {words}", ["holds", "in part", "wrong"], name=name)
    for name, words in said.items()
}
for claim in claims.values():
    display(claim)

# %% [markdown]
# Each verdict below is computed from a number of this lesson.

# %% tags=["answer"]
for claim in claims.values():
    claim.require()

row_first_error = (row_first - whole).abs().max().item()
per_layer, growth = calls[1] - calls[0], [b / a for a, b in zip(sent, sent[1:], strict=False)]
weight = torch.nn.Linear(8, 8).weight
half = World(2, backend="threads").run(
    lambda comm: (
        tensor.ColumnParallelLinear(torch.nn.Linear(8, 8), comm).weight.nbytes / weight.nbytes
    )
)[0]

claims["A02"].score(
    "wrong" if row_first_error > 1e-3 else "holds",
    f"an activation after a row cut acts on partial sums: off by {row_first_error:.2f}",
)
claims["A04"].score(
    "holds" if per_layer == 1 else "wrong",
    f"{per_layer}: two pairs, forward and backward",
    source=three,
)
claims["A13"].score(
    "holds" if growth[1] >= growth[0] else "wrong",
    f"tp 2 → 4 → 8 multiplies the bytes by {growth[0]:.2f}, then by {growth[1]:.2f}",
    source=reports[2],
)
claims["A23"].score(
    "holds" if shares[1] < 0.51 else "in part" if shares[1] < 1 else "wrong",
    f"each of 2 ranks keeps {shares[1]:.0%} of them: what lies outside the pairs is whole on both",
    source=split,
)
claims["A51"].score(
    "holds" if half == 0.5 else "wrong", f"each of 2 ranks holds {half:.0%} of the weight"
)

# %% [markdown]
# ## Three questions
#
# **1.** Your model has 12 heads. Which `tp` can you use, and what happens at `tp=8`?
# <details><summary>Answer</summary>
#
# 1, 2, 3, 4, 6 or 12: a rank holds whole heads. Anything else is refused before a process starts. Try
# `measure(ModelConfig(hidden=48, heads=12), ParallelConfig(tp=8))`. Vocabulary and ffn need not divide.
# </details>
#
# **2.** Twice the batch, same `tp`: what happens to the bytes of a step, and what to the number of calls?
# <details><summary>Answer</summary>
#
# The bytes double, as each message is `b·s·h`. The calls stay. So larger batches make the latency matter less. Turn
# `batch` in the panel and compare.
# </details>
#
# **3.** The gradients of a LayerNorm are never all-reduced here. Why are they right all the same?
# <details><summary>Answer</summary>
#
# What flows into it, forward and backward, is replicated: f has already summed `dX`. Each rank computes the same gradient
# of the same parameter.
# </details>
#
# **Next**: [04 Cutting into stages](04_cutting_into_stages.ipynb), *between* layers instead of through them.
