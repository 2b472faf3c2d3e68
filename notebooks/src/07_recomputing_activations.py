# %% [markdown]
# # 07 · Recomputing activations
#
# 50 minutes, after lesson 01. You need no GPU: one rank does most of it, two ranks the rest.
#
# **The backward pass needs what the forward pass made. Keep it, or make it again?**

# %%
from statistics import quantiles

import torch

from pcourse import ModelConfig, ParallelConfig, TrainConfig, World, measure, prove
from pcourse.lab import Choose, Panel, Predict, bytes_text, plots, show_source
from pcourse.meter import MemoryMeter
from pcourse.model import build
from pcourse.train import Trainer

model = ModelConfig(layers=8, hidden=128, heads=4, sequence=256)
train = TrainConfig(batch=2)
b, s, h, a, L = train.batch, model.sequence, model.hidden, model.heads, model.layers

# %% [markdown]
# **Activations** are what autograd keeps between the two passes. The next cell takes one step of a model of eight layers, and
# notes how much is kept: after each layer's forward pass, then twice for each layer's backward pass, at its fullest and at its
# end.


# %%
def over_a_step(comm, policy):
    """Bytes kept for backward, at the moments of one step."""
    with MemoryMeter() as meter:
        trainer = Trainer(comm, model, ParallelConfig(recompute=policy), train, meter)
        seen = [0]

        def note(*call):
            backward = len(seen) > L
            seen.extend([meter.ledger().activations] * backward + [meter.bytes["activations"]])
            meter.reset_peaks()

        for block in trainer.model.blocks.values():
            block.register_forward_hook(note)
            block.register_full_backward_hook(note)
        trainer.forward_backward(0)
    return seen


# %%
moments = {"none": World(1, "threads").run(over_a_step, "none")[0]}
when = f"measured on 1 CPU rank: {L} layers, hidden {h}, {b} sequences of {s}, float32"


def draw_moments(title):
    x = "1 to 8: after a layer's forward.  9 to 24: within and after a layer's backward"
    how = {"x": x, "y": "kept for backward", "unit": "bytes", "source": when, "title": title}
    return plots.tradeoff(range(3 * L + 1), moments, **how)


draw_moments("Forward fills the memory, backward empties it")

# %% [markdown]
# The first layer's activations wait longest: they are made first and needed last. A deeper model, a longer sequence or a larger
# batch makes the mountain higher.
#
# ## Look at what a layer keeps
#
# Every operation in autograd's graph has its own list of saved tensors. So walk the graph of one layer, and collect them.


# %%
def kept(y):
    """{storage: (tensor, the operations whose backward reads it)} of all that `y` keeps alive."""
    found, nodes = {}, [y.grad_fn]
    for node in nodes:
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
        for name in dir(node):
            tensor = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                _, readers = found.setdefault(tensor.untyped_storage()._cdata, (tensor, []))
                readers.append(node.name().removesuffix("Backward0"))
    return found


# %%
def activations_of(block, x):
    """(bytes, tensor, readers) of what one run of `block` keeps, weights left out, largest first."""
    own = {p.untyped_storage()._cdata for p in block.parameters()}
    found = [entry for storage, entry in kept(block(x)).items() if storage not in own]
    sized = [(tensor.untyped_storage().nbytes(), tensor, readers) for tensor, readers in found]
    return sorted(sized, key=lambda entry: -entry[0])


# %%
block, x = build(model).blocks[0], torch.randn(b, s, h, requires_grad=True)
layer = activations_of(block, x)
for size, tensor, readers in layer:
    mark = "   <- the layer's input" if tensor.data_ptr() == x.data_ptr() else ""
    print(
        f"{bytes_text(size):>9}  {str(list(tensor.shape)):<15} read by {', '.join(readers)}{mark}"
    )
whole_layer = sum(size for size, _, _ in layer)
print(f"together {bytes_text(whole_layer)}, of which the layer's input is {bytes_text(x.nbytes)}")

# %% [markdown]
# `Bmm` is a batched product, of queries and keys or of scores and values, `Addmm` a linear layer. The largest tensor is the
# softmax of the scores, `b·a·s²` numbers: the only one that grows with the *square* of the sequence. All the others are made from
# the layer's input, and could be made from it again.
#
# ## By hand
#
# Forward without a graph: nothing is kept but `x`. When the gradient `dy` comes back: forward once more, now with a graph, and
# backward through it at once. Here one layer with dropout, and the gradient of one of its matrices:


# %%
block.dropout1 = block.dropout2 = torch.nn.Dropout(0.5)
dy, weight = torch.randn(b, s, h), block.mlp.up.weight


def by_hand(same_masks):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.no_grad():
        y = block(x)  # keeps nothing
    if same_masks:
        torch.set_rng_state(state)
    again = x.detach().requires_grad_()
    y_again = block(again)
    return y, torch.autograd.grad(y_again, weight, dy)[0]


# %%
torch.manual_seed(0)
y = block(x)
expected = torch.autograd.grad(y, weight, dy)[0]
errors = []
for same_masks in (True, False):
    first, got = by_hand(same_masks)
    errors.append(((got - expected).norm() / expected.norm()).item())
    what = "the first run's masks" if same_masks else "new masks"
    print(f"second run with {what:<22} off by {errors[-1]:.0%}; gradient norm {got.norm():.2f}")
    assert torch.equal(first, y) and first.grad_fn is None
print(f"{'kept instead of made again':<38} gradient norm {expected.norm():.2f}")
assert errors[0] == 0 and errors[1] > 0.5

# %% [markdown]
# With new masks the gradient is one of *another* network than the one whose output, and loss, you saw. No error is raised, and the
# loss is right. PyTorch's dropout draws from a random state, so the state must be saved and put back. This course's
# own (`pcourse/dropout.py`) makes its mask from an element's place and the step's number, so it needs the same *number*.
#
# ## Predict: the memory
#
# **Full recompute** does that to every layer, one after the other: forward keeps a layer's input, backward makes the rest again.

# %%
less = Predict(
    f"{L} layers, full recompute: by what factor do the activations kept at their peak fall?",
    unit="times",
    name="full recompute, peak",
)
less

# %% tags=["answer"]
less.require()
for policy in ("selective", "full"):
    moments[policy] = World(1, "threads").run(over_a_step, policy)[0]
peaks = {policy: max(seen) for policy, seen in moments.items()}
at_rest = {policy: seen[2] - seen[1] for policy, seen in moments.items()}  # the second layer's
resting = at_rest["none"] / at_rest["full"]
less.score(
    peaks["none"] / peaks["full"],
    {resting: (words := "That is a layer at rest. While it runs again, all of it is there."),
     round(resting): words,
     L: "One layer of them, if inputs weighed nothing. They do."},
    source=when,
)  # fmt: skip

# %% tags=["answer"]
draw_moments("The same step, three ways")

# %% tags=["answer"]
for policy, seen in moments.items():
    at = seen.index(max(seen))
    ends = {at <= L: "after a forward", at == L + 1: "in the first backward"}
    print(f"{policy:<10} a layer at rest {bytes_text(at_rest[policy]):>8},", end=" ")
    print(f"peak {bytes_text(max(seen)):>8} {ends.get(True, 'later')} (moment {at})")
top = L * at_rest["full"] + whole_layer - at_rest["full"]
print(
    f"{L} inputs and the rest of one layer: {bytes_text(top)}; with the head's {bytes_text(peaks['full'])}"
)
assert at_rest["none"] == whole_layer and at_rest["full"] == x.nbytes
assert 0 <= peaks["full"] - top < 0.05 * peaks["none"]

# %% [markdown]
# A layer at rest keeps its input alone. But when backward begins all inputs are there, and on top of them the *whole* of the
# layer that is made again: that moment is the peak. The deeper the model, the less the one layer on top matters.
#
# **Selective recompute** (Korthikanti et al. 2022) makes again only what lies between q, k, v and attention's output. That is where
# the `s²` is.
#
# ## Predict: the time
#
# In operations a backward pass is two forward passes, so a step is three, and full recompute makes it four.

# %%
slower = Predict(
    "Full recompute on this machine: how many percent longer does a step take?",
    unit="%",
    name="full recompute, time",
)
slower

# %% [markdown]
# ## Run
#
# `recompute_every` is k: only every k-th layer is recomputed. In the timeline, R is a layer that runs again. The circles are all
# that you measured with these sizes. (With `none` there is nothing to choose layers for: leave k at 1.)


# %%
def trade_off(points, xs, x, source):
    """Circles at {name: (time, bytes)}."""
    marks = [(time, nbytes, name) for name, (time, nbytes) in points.items()]
    how = {"y": "activations", "unit": "bytes", "title": "Memory against time"}
    return plots.tradeoff(xs, {}, x=x, marks=marks, source=source, **how)


# %%
from pcourse.cost.memory import memory


def draw(report, panel):
    alike = [r for r in (*panel.reports, report) if r.model == report.model]
    points = {}
    for r in alike:
        every = f", every {r.parallel.recompute_every}" * (r.parallel.recompute_every > 1)
        held = r.ranks[0].memory.activations
        points[r.parallel.recompute + every] = 1000 * r.step_seconds, held
    xs = range(0, int(max(time for time, _ in points.values())) + 100, 100)
    against = trade_off(points, xs, "step, milliseconds", alike)
    return [plots.ledger(report, memory), against, plots.timeline(report)]


# %% tags=["answer"]
panel = Panel(
    model,
    ParallelConfig(recompute="full"),
    train,
    controls={
        "recompute": ["none", "selective", "full"],
        "recompute_every": [1, 2, 4, 8],
        "sequence": [128, 256, 512],
        "attention": ["explicit", "fused"],
    },
    draw=draw,
    after=slower,
    title="Recompute, measured",
)
panel

# %% [markdown]
# In the ledger each category stands at its own peak, measured beside the formulas. Recompute changes the activations, and nothing
# else that stays. *Temporary* is what lives within an operation.
#
# ## Explain: the time
#
# A machine does other things too, so two runs after each other are hard to compare. Below, the policies take turns, step by step,
# in one run; each round gives one ratio. The tokens of a step stay the same, 512: longer sequences, fewer of them.


# %%
def in_turn(comm, model, train, choices, rounds=7):
    """Seconds of a step of each of `choices`, which take turns, a row each round; two warm up."""
    trainers = [Trainer(comm, model, choice, train) for choice in choices]
    rows = []
    for number in range(rounds + 2):
        rows.append([])
        for trainer in trainers:
            comm.barrier()
            start = comm.clock.seconds(comm.clock.now())
            trainer.step(number)
            rows[-1].append(comm.clock.seconds(comm.clock.now()) - start)
    return rows[2:], f"measured on {comm.describe()}"


# %%
policies = {name: ParallelConfig(recompute=name) for name in ("none", "selective", "full")}


def over_first(rows, number):
    """Lower quartile, median and upper quartile of the ratio to the first choice."""
    return quantiles([row[number] / row[0] for row in rows], n=4, method="inclusive")


def time_text(quartiles):
    low, middle, high = quartiles
    return f"time {middle:.2f}, half of the rounds {low:.2f} to {high:.2f}"


# %% tags=["answer"]
await panel.finished()
from pcourse.cost.layers import pieces
from pcourse.parallel.recompute import run_again_flops

timed, flops = {}, {}
for length in (128, 256, 512):
    sized, steps = model.but(sequence=length), TrainConfig(batch=512 // length)
    with World(1, backend="gloo") as world, world.take_turns(print):
        rows, timed_source = world.run(in_turn, sized, steps, list(policies.values()), timeout=120)[
            0
        ]
    once = sum(piece.flops for piece in pieces(sized))
    for number, name in enumerate(policies):
        timed[length, name] = over_first(rows, number)
        again = run_again_flops(sized, name) if number else 0
        flops[length, name] = 1 + again * L / once

# %% tags=["answer"]
low, middle, high = (100 * (ratio - 1) for ratio in timed[256, "full"])
slower.score(
    middle,
    {33: "One forward of three. Not all of the forward runs again: see below.",
     50: "Backward is two forwards, so a step is three of them.",
     100: "Only the forward pass runs twice, and backward is the longer one."},
    source=timed_source,
    spread=(low, high),
)  # fmt: skip

# %% tags=["answer"]
for (length, name), quartiles in timed.items():
    if name != "none":
        operations = f"operations {flops[length, name]:.2f} (predicted)"
        print(f"s = {length:<4}{name:<10} {operations}   {time_text(quartiles)}")
print(timed_source)
if any(timed[length, "full"][0] < 1 for length in (128, 256, 512)):
    print("Too noisy: something else kept this machine busy. Run the two cells above again later.")

# %% [markdown]
# By operations, full recompute costs less than a third more here, for two reasons. The head does not run again. And the second run
# *ends as soon as it has made the last tensor that backward reads*: that is what GeLU leaves, so the layer's last product is
# left out. Only if a dropout follows that product must it run, too. PyTorch can count that:

# %%
from torch.utils.flop_counter import FlopCounterMode


def counted_flops(comm, model, policy):
    trainer = Trainer(comm, model, ParallelConfig(recompute=policy), TrainConfig(batch=1))
    with FlopCounterMode(display=False) as counter:
        trainer.forward_backward(0)
    return counter.get_total_flops()


# %%
grew = {}
for dropout in (0.0, 0.1):
    some = model.but(dropout=dropout, layers=2)
    counts = {name: World(1, "threads").run(counted_flops, some, name)[0] for name in policies}
    for name in ("selective", "full"):
        more = counts[name] - counts["none"]
        grew[dropout, name] = more / (2 * pieces(some)[1].flops)  # of the two layers alone
        print(f"dropout {dropout}: {name:<10} {grew[dropout, name]:+.1%} of a layer's operations")
        assert more == 2 * run_again_flops(some, name)
assert abs(grew[0.1, "full"] - 1 / 3) < 1e-9

# %% [markdown]
# Of a layer that is exactly a third with dropout. Without, the last product is missing.
#
# Selective recompute is another matter: few operations, but they need not be quick. Softmax and mask do almost no arithmetic, and
# go through all the scores in memory, again and again. Compare operations and time in the table: they are not the same thing. How
# far they are apart depends on the device and on `s/h`, so measure it on yours. If full recompute takes *far* longer than a third
# more, then more than a forward pass is being paid for: [somebody saw 3.75
# times](https://github.com/QwenLM/Qwen-Image/issues/69), and asked why.
#
# ## Explain: the bytes
#
# The paper counts a layer's activations, at 16 bits and with dropout, as `34·sbh + 5·as²b` bytes. Selective recompute takes the
# second term away, full recompute leaves `2·sbh`. Does it count as your layer does?

# %%
half = model.but(dtype="bfloat16", dropout=0.1)
half_block = build(half).blocks[0]
half_x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
counted = sum(size for size, _, _ in activations_of(half_block, half_x))
paper, statistics, causal_mask = 34 * s * b * h + 5 * a * s * s * b, 4 * 2 * s * b, s * s
print(
    f"counted {counted:,} = paper {paper:,} + norms' statistics {statistics:,} + mask {causal_mask:,}"
)
print(
    f"the second term is {5 * a * s * s * b / paper:.0%} of the paper's; the input is {half_x.nbytes / paper:.1%}"
)
assert counted == paper + statistics + causal_mask and half_x.nbytes == 2 * s * b * h

# %% [markdown]
# In float32 and without dropout the numbers differ, the shape does not: a part that grows with `s`, and one with `s²`. At a fixed
# number of tokens `sb` the first part stays. The curves of a whole model:

# %% tags=["answer"]
from pcourse.train import memory_pass


def ledgers(model, parallel, train=train):
    """The measured memory of each rank, over a step; nothing is timed."""
    world = World(parallel.ranks, "threads")
    return world.run(memory_pass, model, parallel, train, lambda: None)


# %% tags=["answer"]
lengths, curves = [128, 256, 512], {}
for name, parallel in policies.items():
    steps = [(model.but(sequence=n), parallel, TrainConfig(batch=512 // n)) for n in lengths]
    curves[name] = [ledgers(*step)[0].activations for step in steps]
    for measured, step in zip(curves[name], steps, strict=True):
        assert abs(measured / memory(*step).activations - 1) < 1e-3  # as by formula
x_name, y_name = "sequence, at 512 tokens in a step", "activations at their peak"
how = {"x": x_name, "y": y_name, "unit": "bytes", "source": "measured on 1 CPU rank"}
plots.tradeoff(lengths, curves, title="What the square of the sequence costs", **how)

# %% [markdown]
# ## Between the two ends
#
# You need not recompute every layer. Take every k-th, and memory and time should lie between the two ends.

# %% tags=["answer"]
ks = [8, 4, 2, 1]
choices = [ParallelConfig(), *(ParallelConfig(recompute="full", recompute_every=k) for k in ks)]
choices.append(policies["selective"])
held = [ledgers(model, choice)[0].activations for choice in choices]
with World(1, backend="gloo") as world, world.take_turns(print):
    rows, source = world.run(in_turn, model, train, choices, 5, timeout=120)[0]
recomputed = [0, *(L // k for k in ks)]
line = ("a straight line", lambda n: held[0] + (held[3] - held[0]) * n / 4)
how = {"x": "layers recomputed, of 8", "y": "activations at their peak", "unit": "bytes"}
plots.tradeoff(recomputed, {"measured": held[:5]}, formula=line, source=when, **how)

# %% tags=["answer"]
ratios = [[row[i] / row[0] for row in rows] for i in range(5)]
per_layer = (flops[256, "full"] - 1) / L
line = ("by operations", lambda n: 1 + per_layer * n)
how = {"x": "layers recomputed, of 8", "y": "step over that of none"}
plots.tradeoff(recomputed, {"measured": ratios}, formula=line, source=source, **how)

# %% tags=["answer"]
points = {
    name: (over_first(rows, number)[1], held[number])
    for number, name in ((0, "none"), (3, "every 2nd"), (4, "full"), (5, "selective"))
}
each = [(held[0] - held[i]) / recomputed[i] for i in range(1, 5)]
print("saved for each recomputed layer, of 1, 2, 4, 8:", ", ".join(map(bytes_text, each)))
assert max(each[:3]) - min(each[:3]) < 1 and each[3] < each[0]
tenths = range(8, round(10 * max(time for time, _ in points.values())) + 2)
trade_off(points, [n / 10 for n in tenths], "step over that of none", source)

# %% [markdown]
# Each layer saves the same bytes, and costs its own second run: the ends are joined by a line, as far as the noise of time lets you
# see it. With all eight the last one saves less, as one layer must be whole at the peak. So recompute just as many as you need
# to fit.
#
# The other granularity is the *size of a piece*: two layers, or four, that run again together from one input. Fewer inputs at
# rest, but more at once when the piece runs again:

# %% tags=["answer"]
from pcourse.parallel.recompute import Recomputed


def in_pieces(blocks, size):
    with MemoryMeter() as meter:
        meter.claim("parameters", blocks.parameters())
        y = torch.randn(b, s, h).requires_grad_()
        for first in range(0, L, size):
            piece = torch.nn.Sequential(*blocks[first : first + size])
            y = Recomputed(piece.forward, meter=meter)(y)
        y.sum().backward()
        return meter.ledger().activations


# %% tags=["answer"]
for size in (1, 2, 4, 8):
    peak = in_pieces(build(model).blocks, size)
    formula = L // size * x.nbytes + size * whole_layer - x.nbytes
    print(
        f"pieces of {size}, {L // size} inputs: {bytes_text(peak):>8}, formula {bytes_text(formula)}"
    )
    assert abs(peak / formula - 1) < 0.02
print(when)

# %% [markdown]
# `L/k` inputs and `k` layers: smallest where `k` is the root of `L·input/layer`. For the eight layers here that is below one, so
# pieces of one layer are best. One piece of all layers saves nothing at all: at its peak everything is there.
#
# ## Predict: fused attention
#
# A **fused** attention kernel (FlashAttention) never writes the scores to memory. It makes them anew, block by block, in its
# own backward pass.

# %%
saves = Predict(
    "With fused attention, selective recompute saves how many percent, to the nearest whole, of the activations at "
    "their peak?",
    unit="%",
    name="selective and fused",
)
saves

# %% tags=["answer"]
saves.require()
fused = model.but(attention="fused")
kept_at_peak = {
    (kind, name): ledgers(m, policies[name])[0].activations
    for kind, m in (("explicit", model), ("fused", fused))
    for name in policies
}
plain, chosen = (kept_at_peak["fused", name] for name in ("none", "selective"))
saves.score(
    round(100 * (1 - chosen / plain)),
    {100 * (1 - kept_at_peak["explicit", "selective"] / kept_at_peak["explicit", "none"]):
     "That is without the fused kernel: then there are scores to save.",
     54: "So much is the s² term of the paper's layer. A fused kernel keeps no scores."},
    source=when,
)  # fmt: skip

# %% tags=["answer"]
print(f"{'at their peak':<14}" + "".join(f"{name:>12}" for name in policies))
for kind in ("explicit", "fused"):
    print(f"{kind:<14}" + "".join(f"{bytes_text(kept_at_peak[kind, n]):>12}" for n in policies))
with World(1, backend="gloo") as world, world.take_turns(print):
    rows, source = world.run(in_turn, fused, train, list(policies.values()), 5, timeout=120)[0]
for number, name in ((1, "selective"), (2, "full")):
    print(f"fused, {name:<10} {time_text(over_first(rows, number))}")
print(source)
assert chosen > 0.95 * plain and plain < kept_at_peak["explicit", "none"]

# %% [markdown]
# The kernel *is* selective recompute, and a cheaper one. With it, the second run of attention buys nothing.
# [Somebody who expected 70 %](https://github.com/NVIDIA/Megatron-LM/issues/1225), as in the paper, saw 25.52 GB become 24.94. Full
# recompute still saves, as the `34sbh` are still there.
#
# ## The published numbers
#
# Korthikanti et al. 2022 (arXiv:2205.05198), table 4: one layer of a 22-billion-parameter model on A100s, tensor-parallel over
# eight, sequence 2,048, in milliseconds. Beside it your machine:

# %%
table_4 = {"none": (7.7, 11.9), "selective": (7.7, 13.2), "full": (7.7, 19.5)}  # forward, backward
forward, backward = table_4["none"]
theirs = {name: sum(pair) / (forward + backward) - 1 for name, pair in table_4.items()}
for name in ("selective", "full"):
    longer = table_4[name][1] - backward
    print(
        f"{name:<10} theirs {theirs[name]:+.0%}: backward {longer:.1f} ms longer; measured here",
        end=" ",
    )
    print(", ".join(f"{timed[n, name][1] - 1:+.0%} at s = {n}" for n in lengths))
print(f"their backward is {backward / forward:.2f} forwards, and a second forward {forward} ms")
assert [round(100 * theirs[name]) for name in ("selective", "full")] == [7, 39]

# %% [markdown]
# Theirs pays for nearly the whole forward again, all-reduces included, and its backward is shorter than two forwards. So it is 39 %
# and not 33 %. Selective keeps `34/(34 + 5as/h)` of a layer. With their 64 heads and h = 6,144:

# %%
for length in (1024, 2048, 4096):
    square = 5 * 64 * length / 6144
    print(f"s = {length}: 5as/h = {square:.0f}, selective saves {square / (34 + square):.0%}, "
          f"full {1 - 2 / (34 + square):.0%} of a layer")  # fmt: skip
print("predicted from the paper's formula, without tensor parallelism")

# %% [markdown]
# ## With the other splits
#
# For those who have taken lessons 03 to 06; if you have not, go on at *In production*, and come back.
#
# **Tensor parallelism.** A layer's forward pass has two all-reduces, so what runs again sends again. How many more for each layer,
# one or two? The last of them belongs to the layer's last product.

# %% tags=["answer"]
from pcourse.cost.communication import communication

once = TrainConfig(batch=2, steps=1, warmup=0)
for dropout in (0.0, 0.1):
    small = model.but(layers=2, sequence=64, dropout=dropout)
    for name in policies:
        settings = small, ParallelConfig(tp=2, recompute=name), once
        split = measure(*settings, world=World(2, "threads"), clock="virtual", pace=1.0)
        row, theory = split.ranks[0].row("tp", "all_reduce"), communication(*settings)
        calls = (row.calls - 4) / 2  # four belong to the embedding, the head and the loss
        print(
            f"dropout {dropout}  {name:<10} {calls:g} all-reduces a layer, {bytes_text(row.wire)} sent"
        )
        again = 0 if name != "full" else 2 if dropout else 1
        assert calls == 4 + again and row.calls == theory["tp", "all_reduce"]["calls"]
        assert row.wire == theory["tp", "all_reduce"]["wire"]

# %% [markdown]
# Papers count six for full recompute: that is the whole forward again. Selective recompute sends nothing again: no all-reduce
# lies between q, k, v and attention's output. And what full recompute keeps, the layer's input, is *whole on every rank* of tp:

# %%
for name in ("none", "full"):
    one, two = (
        ledgers(model, ParallelConfig(tp=tp, recompute=name))[0].activations for tp in (1, 2)
    )
    print(
        f"{name:<6} {bytes_text(one):>8} on one rank, {bytes_text(two):>8} on each of two, {two / one:.0%}"
    )
    assert two > one / 2

# %% [markdown]
# **A pipeline.** The first stage holds `p` micro-batches in flight, the last stage one (lesson 05). What each of them keeps is what
# recompute makes small, so it is worth most at the front. Four micro-batches of one sequence:

# %% tags=["answer"]
saved = {}
for p in (2, 4):
    stages = [
        ledgers(model, ParallelConfig(pp=p, micro_batches=4, recompute=name), TrainConfig(batch=4))
        for name in ("none", "full")
    ]
    for stage, (keeps, makes) in enumerate(zip(*stages, strict=True)):
        saved[p, stage] = keeps.activations - makes.activations
        print(f"pp = {p}, stage {stage}: {bytes_text(keeps.activations):>8} without, "
              f"{bytes_text(makes.activations):>8} with: {bytes_text(saved[p, stage]):>8} saved")  # fmt: skip
print("measured on 2 and on 4 CPU ranks, threads of one process")
assert saved[2, 0] > 2 * saved[2, 1] and saved[4, 0] > 4 * saved[4, 3]
assert max(m.activations for m in stages[1]) < 1.3 * min(m.activations for m in stages[1])

# %% [markdown]
# The micro-batches in flight rest; only one layer of one of them is whole at a time. So the first stage shrinks most, and the
# stages come out nearly even.
#
# ## The code
#
# The exercise [Recompute, with the right random state](../exercises/07_recompute.ipynb), 30 minutes, is to write a recompute
# yourself. Now is the best time for it. What ran above takes another way: hooks on what autograd saves. In the first run they
# count and keep nothing; when backward asks for the first tensor, the piece runs again, and they collect.

# %% tags=["answer"]
from pcourse.parallel import recompute as code

show_source(code.Recomputed, code._Again, code.recompute)

# %% [markdown]
# And where the second run is made as the first was: backward sets the masks of *its* micro-batch, and `again` surrounds the run.

# %%
from pcourse.parallel.pipeline import Pipeline

show_source(Pipeline._backward, Pipeline.again)

# %% [markdown]
# ## Prove it
#
# With dropout, which would betray a wrong second run: loss, every gradient, the norm and the weights after three steps, against the
# model that keeps everything.

# %%
tiny = ModelConfig(layers=4, hidden=32, heads=4, sequence=16, vocab=64, dropout=0.3)
ways = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "every 2nd": {"recompute": "full", "recompute_every": 2},
}
splits = {
    "alone": {"micro_batches": 2}, "tp": {"tp": 2}, "pp": {"pp": 2, "micro_batches": 4},
    "zero": {"dp": 2, "zero": 3},
}  # fmt: skip
for way, options in ways.items():
    proofs = {n: prove(tiny, ParallelConfig(**options, **split)) for n, split in splits.items()}
    print(f"{way:<10}", ", ".join(f"{n} {proof.worst:.0e}" for n, proof in proofs.items()))
    assert all(proof.holds for proof in proofs.values())
print(proofs["pp"])

# %% [markdown]
# ## Break it
#
# Two faults of the second run's dropout. The first takes another step's masks. The second does not set the masks at all, and so
# takes those of whichever micro-batch ran last. Predict which lines betray each, on one rank and on a pipeline.

# %%
from unittest.mock import patch

from pcourse.dropout import seed_dropout

before = set()  # the forward passes that have set their masks


def other_masks(chunk, seed, first_sequence):
    again = (chunk, seed, first_sequence) in before
    before.add((chunk, seed, first_sequence))
    seed_dropout(chunk, seed + again, first_sequence)


def not_set(chunk, seed, first_sequence):
    if (chunk, seed, first_sequence) not in before:
        other_masks(chunk, seed, first_sequence)


# %%
betrayed = {}
for fault in (other_masks, not_set):
    for name in ("alone", "pp"):
        with patch("pcourse.parallel.pipeline.seed_dropout", fault):
            broken = prove(tiny, ParallelConfig(recompute="full", **splits[name]))
        print(f"{fault.__name__.replace('_', ' ')}, {name}:\n{broken}\n")
        lines = broken.loss, broken.gradients, broken.gradient_norm
        betrayed[fault.__name__, name] = [difference > 1e-6 for difference in lines]
seen, unseen = [False, True, True], [False, False, False]
assert list(betrayed.values()) == [seen, seen, unseen, seen]

# %% [markdown]
# The loss is right in all four: it is the first run's. The gradients and their norm are wrong. The second fault hides on one rank,
# where each backward follows its own forward, and shows as soon as a stage holds two micro-batches. So prove on the split that
# you use.
#
# A second run that does something *different*, and not only with other numbers, can be noticed. Here dropout is off in it:


# %%
from contextlib import contextmanager


@contextmanager
def no_dropout(self, flops, share):
    self.stage.eval()
    yield
    self.stage.train()


with patch.object(Pipeline, "again", no_dropout):
    try:
        prove(tiny, ParallelConfig(recompute="full"))
    except Exception as error:
        print(str(error).strip().splitlines()[-1])

# %% [markdown]
# ## Exercise
#
# [Recompute, with the right random state](../exercises/07_recompute.ipynb), 30 minutes: your own autograd function, its bytes, and
# the masks of its second run.
#
# ## In production
#
# | here | Megatron-LM | PyTorch |
# |---|---|---|
# | `recompute="full"` | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1` | `checkpoint(layer, x, use_reentrant=False)`, or `checkpoint_wrapper` around each layer |
# | pieces of k layers | `--recompute-method uniform --recompute-num-layers k` | `checkpoint_sequential` |
# | some layers | `--recompute-method block --recompute-num-layers n`: the first n of a stage | wrap those that you choose (`apply_activation_checkpointing`) |
# | `recompute="selective"` | `--recompute-granularity selective` | a policy: `create_selective_checkpoint_contexts` |
# | the same masks | CUDA random states, one for each kind of region | `preserve_rng_state=True`, the default |
# | ends early | | `set_checkpoint_early_stop`, on by default |
#
# PyTorch's selective policies choose by *operation*: keep what matrix products made, run the rest again.
#
# `torch.utils.checkpoint` around the same layers, beside ours, in one run:

# %%
from functools import partial

from pcourse.native.beside import beside
from pcourse.native.recompute import recompute_sides

results = {}
for name in ("full", "selective"):
    sides = partial(recompute_sides, parallel=policies[name])
    with World(1, backend="gloo") as world, world.take_turns(print):
        results[name] = world.run(beside, model, train, 11, sides, timeout=120)[0]

# %%
print(f"{'':<10}{'ours':>12}{'PyTorch':>12}   ratio{'':17}peak, ours   PyTorch")
for name, result in results.items():
    r, (ours, theirs_peak) = result.ratio, map(bytes_text, result.peak)
    both = f"{1e3 * r.ours:>9.1f} ms{1e3 * r.theirs:>9.1f} ms"
    print(f"{name:<10}{both}{r.median:>8.2f} [{r.low:.2f}, {r.high:.2f}]", end="")
    print(f"{ours:>14}{theirs_peak:>12}")
    assert result.loss_difference < 1e-4
print("ratio: ours / PyTorch's, the median over pairs of steps, with its 95 % interval")
print(f"measured on {result.device}")

# %% [markdown]
# ## Memory is full: what first?
#
# An article gives an order: *recompute, then ZeRO or FSDP, then another tp, then a smaller batch, then sequence parallelism*. Two
# ranks, each with a replica (`dp=2`), and what each step of that order saves at the peak, and costs:

# %% tags=["answer"]
options = {
    "as it was": {"dp": 2},
    "full recompute": {"dp": 2, "recompute": "full"},
    "ZeRO-1": {"dp": 2, "zero": 1},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "tp=2 for dp=2": {"tp": 2},
    "micro-batches of half the size": {"dp": 2, "micro_batches": 2},
}
shorter, eight = model.but(sequence=128), TrainConfig(batch=8)
configs = [ParallelConfig(**fields) for fields in options.values()]
fullest = [max(rank.peak for rank in ledgers(shorter, c, eight)) for c in configs]
with World(2, backend="gloo") as world, world.take_turns(print):
    rows, two_ranks = world.run(in_turn, shorter, eight, configs, timeout=200)[0]

# %% tags=["answer"]
saved_by = {name: fullest[0] - fullest[number] for number, name in enumerate(options)}
added = {name: over_first(rows, number)[1] - 1 for number, name in enumerate(options)}
for number, name in sorted(enumerate(options), key=lambda entry: added[entry[1]]):
    if number:
        print(
            f"{name:<31} saves {bytes_text(saved_by[name]):>8};  {time_text(over_first(rows, number))}"
        )
print(f"as it was: a peak of {bytes_text(fullest[0])}; {two_ranks}")

# %% tags=["answer"]
from pcourse.cost.activations import kept_by_layer, sizes

shares = []
for sequence_parallel in (False, True):
    own = sizes(shorter, 8, tp=2, sequence_parallel=sequence_parallel)
    shares.append(sum(part.kept for run in kept_by_layer(shorter, own) for part in run))
sequence_share = shares[1] / shares[0]
print(
    f"sequence parallelism on top of tp=2: a layer keeps {sequence_share:.0%} of that (predicted)"
)

# %% [markdown]
# Smaller micro-batches cost no second run. ZeRO-1 touches nothing that is computed. Sequence parallelism, once you have tp,
# divides what tp leaves whole, for the same bytes sent (the paper's section 4.2.2). Full recompute is the one that computes more.
# So take first what costs little; if that is not enough, recompute as many layers as it takes.
#
# ## The articles said
#
# Three sentences. You have the numbers by now: lock your verdict, then let the next cell compute it.

# %%
said = {
    "A25": "“Recompute from each layer's input cuts activation memory by more than half.”",
    "A26": "“Recompute costs about 20 % to 30 %.”",
    "A40": "“Out of memory: first recompute, then ZeRO or FSDP, then tp, then the batch, then sequence parallelism.”",
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

cuts = {k: 1 - kept_at_peak[k, "full"] / kept_at_peak[k, "none"] for k in ("explicit", "fused")}
claims["A25"].score(
    "holds" if min(cuts.values()) > 0.5 else "in part",
    f"a layer at rest keeps {at_rest['full'] / at_rest['none']:.0%}; at the peak of {L} layers it cuts "
    + " and ".join(f"{cut:.0%} with {kind} attention" for kind, cut in cuts.items()),
    source=when,
)
costs = {name: flops[256, name] - 1 for name in ("full", "selective")}
costs["full with dropout, of a layer"] = grew[0.1, "full"]
within = [0.2 <= cost <= 0.3 for cost in costs.values()]

# %% tags=["answer"]
in_time = ", ".join(f"{name} {timed[256, name][1] - 1:+.0%}" for name in ("full", "selective"))
claims["A26"].score(
    "holds" if all(within) else "in part" if any(within) else "wrong",
    "in operations " + ", ".join(f"{name} {cost:+.0%}" for name, cost in costs.items())
    + f"; in time here {in_time}; in the paper {theirs['full']:+.0%} and {theirs['selective']:+.0%}",
    source=timed_source,
)  # fmt: skip
later = ("ZeRO-1", "tp=2 for dp=2", "micro-batches of half the size")
cheaper = [n for n in later if saved_by[n] > 0 and added[n] < added["full recompute"]]
claims["A40"].score(
    "holds"
    if not cheaper
    else "in part"
    if saved_by["full recompute"] == max(saved_by.values())
    else "wrong",
    f"full recompute saves {bytes_text(saved_by['full recompute'])} and adds {added['full recompute']:+.0%} to the "
    "step; cheaper, and later in that list: "
    + ", ".join(f"{n} {added[n]:+.0%} for {bytes_text(saved_by[n])}" for n in cheaper)
    + f"; and sequence parallelism leaves {sequence_share:.0%} of what tp keeps of a layer (predicted)",
    source=two_ranks,
)

# %% [markdown]
# ## Three questions
#
# **1.** The layers are twice as many, and recomputed in full. What happens to the activations at their peak?
# <details><summary>Answer</summary>
#
# They grow by as many inputs, and by nothing else: the one layer that is whole at the peak is one as before. So the factor that
# you predicted grows with the depth. Try `model.but(layers=16)`.
# </details>
#
# **2.** Your model does not fit by 10 %. Full recompute, or something less?
# <details><summary>Answer</summary>
#
# Less: recompute as many layers as it takes, or the attention alone if it writes its scores. Each layer saves its bytes and costs
# its second run, one by one; which of the two is cheaper, your pictures above tell of your machine.
# </details>
#
# **3.** Why does the second run of a *stage with tensor parallelism* need no new agreement between the ranks?
# <details><summary>Answer</summary>
#
# All ranks of tp recompute the same layer at the same moment, as their backward passes go in step, so its all-reduces meet. And the
# masks depend on place and step alone. Where dropout draws from a random state, each rank must put back two: the one that it
# shares with the others, and the one that is its own.
# </details>
#
# **Next**, in a later version: sequence and context parallelism, which divide what recompute would have to make again.
