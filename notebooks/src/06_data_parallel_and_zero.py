# %% [markdown]
# # 06 · Data parallelism and ZeRO
#
# 50 minutes, after lesson 02. You need no GPU: the replicas are processes of this machine. Where tensor parallelism, stages or a
# tied matrix are named, lessons 03 to 05 tell what they are; nothing here needs them.
#
# **The model fits, the batch is too slow. So N ranks hold the same model, and each takes its share of the sequences. What
# must they tell each other? And why should each of them hold the same optimizer state?**

# %%
from pcourse import ModelConfig, ParallelConfig, TrainConfig, World, measure, prove
from pcourse.lab import Choose, Panel, Predict, bytes_text, plots, seconds_text, show_source

plots.replicas(2, sequences=8, title="Two replicas, one batch of 8 sequences")

# %% [markdown]
# A **replica** is a rank (later: a group of ranks) that holds a whole copy of the model. **Model states** are the parameters,
# their gradients, and what the optimizer remembers; AdamW remembers two numbers for each parameter. `dp` is the number of
# replicas; the papers call it N.
#
# ## Look at the shards
#
# First the sequences: five of them, two replicas, two micro-batches each. As even as can be is not always even.

# %%
from pcourse.train import Trainer

tiny = ModelConfig(layers=1, hidden=3, heads=1, vocab=11, sequence=4)


def taken(comm):
    trainer = Trainer(comm, tiny, ParallelConfig(dp=2, micro_batches=2), TrainConfig(batch=5))
    return [list(rows) for rows in trainer.micro_batches]


for rank, micro_batches in enumerate(World(2, backend="threads").run(taken)):
    print(f"replica {rank} takes sequences", *micro_batches)

# %% [markdown]
# Then the model. **ZeRO** (*zero redundancy optimizer*) lets each rank *own* 1/N of it, and step the optimizer for that
# alone. The parameters come in **units**: a layer, the embedding, the head; a tied matrix by itself. A unit's parameters lie
# side by side in one vector, and each rank owns a run of its elements.


# %%
def owned(comm):
    trainer = Trainer(comm, tiny, ParallelConfig(dp=2, zero=1), TrainConfig(batch=5))
    return {
        f"{unit.name}: {unit.numel} elements, shards of {unit.sizes}": [
            f"{s.name:<30}{s.start:>3} to {s.stop:>2} of {s.parameter.numel()}"
            for s in unit.segments
        ]
        for unit in trainer.replicas.units
    }


for rank, shards in enumerate(World(2, backend="threads").run(owned)):
    for unit, segments in shards.items():
        print(f"rank {rank}, {unit}")
        if unit.startswith("layer"):
            print(*(f"    {segment}" for segment in segments), sep="\n")

# %% [markdown]
# Look where rank 0's run ends: inside a matrix. AdamW steps each element by itself, so it does not care. What you see are the
# real objects: a `Unit`, and its `Segment`s, which the optimizer gets instead of the parameters.
#
# ## Two halves by hand
#
# Each replica knows the gradient of *its* tokens. The gradient of a sum is the sum of the gradients, so an all-reduce should
# do. Is it a sum, or a mean? Try both, on a batch that halves and on one that does not.

# %%
from pcourse.data import batch
from pcourse.model import build
from pcourse.split import shard_range

small = ModelConfig(layers=2, hidden=16, heads=2, vocab=64, sequence=8, dtype="float64")


def gradient(rows, total=None):
    """Of one weight: the loss of these sequences, divided by `total` tokens, or by their own."""
    model, (tokens, targets) = build(small), batch(small, TrainConfig(batch=5), 0, rows)
    (model.loss(tokens, targets) / (total or targets.numel())).backward()
    return model.blocks[0].mlp.up.weight.grad


def both_ways(comm, sequences):
    mine = shard_range(sequences, 2, comm.rank)
    rows = slice(mine.start, mine.stop)
    mean_of_means = comm.all_reduce(gradient(rows)) / comm.size
    return mean_of_means, comm.all_reduce(gradient(rows, total=sequences * small.sequence))


# %%
off = {}
for sequences in (4, 5):
    whole = gradient(slice(0, sequences))
    results = World(2, backend="threads").run(both_ways, sequences)[0]
    off[sequences] = [((g - whole).abs().max() / whole.abs().max()).item() for g in results]
    print(f"{sequences} sequences on two replicas, against the gradient of the whole:")
    print(f"    mean of the two means            off by {off[sequences][0]:.0e} of its largest")
    print(f"    sum, each divided by all tokens  off by {off[sequences][1]:.0e}")
assert max(off[4]) < 1e-12 and off[5][1] < 1e-12 < 1e-2 < off[5][0]

# %% [markdown]
# A mean of means is right only where all have as many tokens. Divide by the tokens *of all*, then sum: that is right always.
# The loss of padded text, of which each replica has another amount, is where training codes get this wrong.
#
# ## Predict
#
# Here is the model that you will train. It is float32, so four bytes for a parameter, four for its gradient, eight for AdamW.

# %%
from pcourse.cost.units import units

model = ModelConfig(layers=4, hidden=128, heads=8, sequence=32)
train = TrainConfig(batch=16, steps=5, warmup=2)
weights = units(model, ParallelConfig(), train)
P = sum(weights.values())
print(f"{P:,} parameters, {bytes_text(4 * P)}: of each layer {weights['layer 0']:,}")
sent = Predict(
    f"Plain data parallelism, N = 2, {P:,} parameters in float32: "
    "how many bytes does each rank send in a step?",
    unit="bytes",
    name="bytes of data parallelism",
)
sent

# %% [markdown]
# Now ZeRO, in three stages. **Stage 1**: each rank keeps the optimizer's state of its own shards. It needs the summed
# gradient of those alone; but after the step all need the new weights. **Stage 2**: gradients, too, are kept only of the own
# shards. **Stage 3**: so are the parameters. A layer's are gathered when the layer computes, and let go of at once.

# %%
stage_1 = Choose(
    "ZeRO-1 at the same N: each rank sends, against plain data parallelism,",
    ["more", "the same", "less"],
    name="bytes of ZeRO-1",
)
held = {
    zero: Predict(
        f"Stage {zero}, N = 4: how many bytes of model states does each rank hold "
        "for each of the P parameters?",
        unit="bytes a parameter",
        name=f"states of stage {zero}",
    )
    for zero in (1, 3)
}
for question in (stage_1, *held.values()):
    display(question)

# %% [markdown]
# ## Run
#
# Every setting really runs, a process for each replica. `zero=0` is plain data parallelism. With `micro_batches` each replica
# takes its share of the sequences in so many parts, one after the other, and adds up their gradients before it steps.

# %% tags=["answer"]
from pcourse.cost.communication import communication
from pcourse.cost.memory import memory

for question in (stage_1, *held.values()):
    question.require()


def draw(report, panel):
    settings = report.model, report.parallel, report.train
    theory = [communication(*settings, rank=rank.rank) for rank in report.ranks]
    return [
        plots.communication(report, theory),
        plots.ledger(report, memory),
        plots.timeline(report),
    ]


panel = Panel(
    model,
    ParallelConfig(dp=2),
    train,
    controls={"dp": [1, 2, 4], "zero": [0, 1, 2, 3], "micro_batches": [1, 2, 4]},
    draw=draw,
    after=sent,
    title="Replicas, measured",
)
panel

# %% [markdown]
# Turn `zero` from 0 to 3 at `dp=2`, then `dp` to 4, then `micro_batches`. The last table collects what you have measured:
# bytes sent and memory against time. In the middle, the paler bar of each pair is the formula.
#
# ## Explain: bytes
#
# The next cell measures what you turned: four stages, and 1, 2 and 4 replicas. That takes about a quarter of a minute.

# %% tags=["answer"]
await panel.finished()
three_steps = TrainConfig(batch=16, steps=3, warmup=1)
grid = {
    (n, zero): measure(model, ParallelConfig(dp=n, zero=zero), three_steps)
    for n in (1, 2, 4)
    for zero in (0, 1, 2, 3)
}
wire = {key: report.ranks[0].wire("dp") for key, report in grid.items()}
sent.score(
    wire[2, 0],
    {
        P: "That is elements. A float32 is four bytes.",
        8 * P: "2P elements would be for many ranks: 2P(N − 1)/N, and N is 2.",
        2 * P: "That is the reduce-scatter alone. The all-gather sends as much again.",
    },
    source=grid[2, 0],
)
stage_1.score(
    "the same" if wire[2, 1] == wire[2, 0] else "more" if wire[2, 1] > wire[2, 0] else "less",
    f"{wire[2, 0]:,} bytes plain, {wire[2, 1]:,} with ZeRO-1",
    source=grid[2, 1],
)

# %% tags=["answer"]
for zero in (0, 1):
    for row in grid[2, zero].ranks[0].communication:
        if row.axis == "dp":
            print(f"stage {zero}: {row.calls} × {row.operation:<15}{row.wire:>10,} bytes sent")

# %% [markdown]
# An all-reduce *is* a reduce-scatter, then an all-gather (lesson 02). Between the two halves every rank has the complete
# gradient of one shard. ZeRO-1 does the optimizer's step right there: it reduce-scatters gradients, steps, and all-gathers
# *weights* instead of gradients. The bytes are the same, and each way there is one message for each unit.
#
# Stages 2 and 3 have gradients reduced after every micro-batch, as nobody keeps them whole until the next. With `m`
# micro-batches:

# %% tags=["answer"]
four = {z: measure(model, ParallelConfig(dp=2, zero=z, micro_batches=4), train) for z in range(4)}
layers = model.layers * weights["layer 0"]
print("sent by each of 2 ranks, in units of P(N − 1)/N:   m = 1    m = 4")
for zero in range(4):
    counted = [wire[2, zero], four[zero].ranks[0].wire("dp")]
    print(f"    stage {zero}" + " " * 36 + "".join(f"{2 * n / (4 * P):9.3f}" for n in counted))
    for m, n in zip((1, 4), counted):
        times = {0: 2 * P, 1: 2 * P, 2: (m + 1) * P, 3: 3 * m * layers + 2 * m * (P - layers)}
        assert n == 4 * times[zero] // 2  # (N − 1)/N is a half
print(four[3].source)

# %% [markdown]
# | stage | gradients | weights | elements sent by each rank |
# |---|---|---|---|
# | 0 | all-reduce, once | | `2P(N − 1)/N` |
# | 1 | reduce-scatter, once | all-gather, once | `2P(N − 1)/N` |
# | 2 | reduce-scatter, m times | all-gather, once | `(m + 1)P(N − 1)/N` |
# | 3 | reduce-scatter, m times | all-gather, 2m times | `3mP(N − 1)/N` |
#
# Stage 3 gathers a layer before its forward and again before its backward. The embedding, the head and the tied matrix stay
# in between: theirs is `2m`, so the whole comes a little below `3m`. Is each number of the grid the one of the formula, on
# every rank?

# %% tags=["answer"]
compared = 0
for report in (*grid.values(), *four.values()):
    for rank in report.ranks:
        expected = communication(report.model, report.parallel, report.train, rank.rank)
        for (axis, operation), row in expected.items():
            measured = rank.row(axis, operation)
            assert (measured.calls, measured.wire) == (row["calls"], row["wire"])
            compared += 1
print(f"{compared} rows of {len(grid) + len(four)} runs, equal to the byte")

# %% [markdown]
# ## Explain: memory


# %% tags=["answer"]
def states_of(report):
    ledger = report.ranks[0].memory
    return ledger.parameters + ledger.gradients + ledger.optimizer


words = {
    1: {4: "That is stage 3. Here parameters and gradients are whole.",
        16: "That is one rank alone. Of the optimizer's 8 bytes a quarter is left.",
        7: "That is stage 2. Stage 1 keeps gradients whole."},
    3: {16: "That is one rank alone. All of it is shared out.",
        1: "A parameter, its gradient and AdamW's state are 16 bytes, not 4.",
        10: "That is stage 1. Here parameters and gradients are shared out, too."},
}  # fmt: skip
for zero, question in held.items():
    question.score(states_of(grid[4, zero]) / P, words[zero], source=grid[4, zero])

# %% tags=["answer"]
plots.replicas(4, (0, 1, 2, 3))

# %% [markdown]
# Each unit is cut so by itself. What is left of a rank alone, as N grows? Lines are the formula; circles are your runs.

# %% tags=["answer"]
from pcourse.cost.memory import states

ns = [1, 2, 4, 8, 16, 32, 64]
curves = {
    f"stage {zero}": [
        sum(states(model, ParallelConfig(dp=n, zero=zero), TrainConfig(batch=64))) for n in ns
    ]
    for zero in range(4)
}
for (n, zero), report in grid.items():
    assert states_of(report) == curves[f"stage {zero}"][ns.index(n)]
plots.tradeoff(
    ns,
    curves,
    x="N, replicas",
    y="model states of rank 0",
    unit="bytes",
    marks=[(n, states_of(report), "") for (n, _), report in grid.items()],
    source="lines predicted from 16P, 8P + 8P/N, 4P + 12P/N, 16P/N; circles " + grid[4, 0].source,
    title="Shared out over more replicas",
)

# %% [markdown]
# Only stage 3 goes to zero. Stage 1 ends at 8 bytes a parameter, stage 2 at 4: what is not shared out stays.
#
# Large models are trained with 16-bit weights and gradients beside a float32 copy and float32 AdamW: 2 + 2 + 12, again 16
# bytes, but divided otherwise. So the paper's formulas are `4P + 12P/N`, `2P + 14P/N` and `16P/N`. For 7 billion parameters:

# %% tags=["answer"]
half = model.but(dtype="bfloat16")
print("GB on each rank   " + "".join(f"N = {n:<6}" for n in (1, 2, 4, 8, 64)))
for zero in range(4):
    row = []
    for n in (1, 2, 4, 8, 64):
        a_parameter = {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}[zero]
        split = ParallelConfig(dp=n, zero=zero, master_weights=True)
        assert sum(states(half, split, TrainConfig(batch=64))) == a_parameter * P
        row.append(7 * a_parameter)
    print(f"stage {zero}           " + "".join(f"{gigabytes:<10.1f}" for gigabytes in row))
print("predicted from the formulas, which give the package's own count for P =", f"{P:,}")

# %% [markdown]
# ## A higher stage, and more memory?
#
# States are not all. Users of DeepSpeed asked why a higher stage took *more* memory (issues 1302 and 6936). Here is the peak
# of the sum, for models of 2 and of 8 layers on two replicas. An arrow marks a stage whose peak is above that of the stage
# before it.

# %%
one_step = TrainConfig(batch=8, steps=1, warmup=0)
rose = []
for depth in (2, 8):
    deep, before = model.but(layers=depth), None
    for zero in range(4):
        ledger = measure(deep, ParallelConfig(dp=2, zero=zero), one_step).ranks[0].memory
        rose += [(depth, zero)] if before and ledger.peak > before else []
        mark = "  ▲" if (depth, zero) in rose else ""
        print(f"{depth} layers, stage {zero}: peak {bytes_text(ledger.peak):>9}, "
              f"temporary at its own peak {bytes_text(ledger.temporary):>9}{mark}")  # fmt: skip
        before = ledger.peak

# %% [markdown]
# What is gathered to be used, or whole until it is reduced, is **temporary**: weights of the layer that computes and of the
# next one, gradients of a layer or two, and buffers for messages. That is a few units, whatever the depth and whatever N. The
# states that a stage saves grow with the depth. Where an arrow stands, the few units were more than what was saved. And the
# peak lies near the turn from forward to backward (lesson 01), where few gradients are there to be saved: so stage 2 may gain
# little over stage 1. The paper's formulas (Rajbhandari et al. 2020) count states alone, each at its own peak.
#
# ## Overlap
#
# A layer's gradient is complete before the layer below it has begun its backward. So its reduction starts at once, and
# travels while the rest computes. Here is the step of two plain replicas.

# %%
plots.timeline(grid[2, 0])

# %% [markdown]
# Blue is cut where a rank *starts* a reduction, orange below it; then it goes on computing while the message travels, and
# that is not drawn. Orange and yellow after the last blue are what it waits for. All orange and yellow together is the
# **exposed** part; of the messages of `dp` alone, the next cell counts it.

# %%
print("                            exposed     of the step")
for zero in range(4):
    rows = [row for row in grid[2, zero].ranks[0].communication if row.axis == "dp"]
    exposed = sum(row.exposed for row in rows)
    share = exposed / grid[2, zero].step_seconds
    print(f"stage {zero}, rank 0 of 2   {seconds_text(exposed):>14}{share:>16.0%}")
print(grid[2, 3].source)

# %% [markdown]
# How much was hidden? What would a step take if each reduction were waited for at once? Both ways take turns in one run, for a
# small and a larger model.

# %%
from itertools import count

from pcourse.native.paired import interleave, ratio


def steps_of(comm, model, wait_at_once):
    trainer, number = Trainer(comm, model, ParallelConfig(dp=comm.size), train), count()
    replicas, start = trainer.replicas, trainer.replicas._reduce

    def start_and_wait(unit):
        start(unit)
        replicas._land_all()

    if wait_at_once:
        replicas._reduce = start_and_wait
    return lambda: trainer.step(next(number))


def in_turn(comm, model):
    both = steps_of(comm, model, True), steps_of(comm, model, False)
    return comm.describe(), interleave(comm, *both, pairs=12)


# %%
for hidden in (64, 256):
    with World(2) as world, world.take_turns(print):
        device, times = world.run(in_turn, model.but(hidden=hidden))[0]
    r = ratio(times)
    verdict = "hides some" if r.low > 1 else "costs" if r.high < 1 else "within the noise"
    print(f"h = {hidden:<3} waiting at once {seconds_text(r.ours)}", end=", ")
    print(f"overlapped {seconds_text(r.theirs)}", end=": ")
    print(f"{r.median:.2f} times [{r.low:.2f}, {r.high:.2f}], {verdict}")
print(f"measured on {device}; median over {r.pairs} pairs of steps, with its 95 % interval")

# %% [markdown]
# Here gloo moves bytes with threads of the *same cores* that compute: what hides a message is slowed by it, and only the time
# in which one rank waits for the other is there to be won. A GPU has engines and links for messages besides. There a
# reduction hides wholly where the backward of a layer takes longer than its message. Compute grows with the tokens and the
# bytes do not, so **more tokens for each replica hide more**.
#
# ## What does it cost here?
#
# For times, runs one after the other are not good enough: the machine has moods. So the four stages take turns, step by step,
# in one run; and 1, 2 and 4 replicas take turns, twice. Median and quartiles, in milliseconds:

# %%
import time
from statistics import quantiles


def stages_in_turn(comm, rounds):
    splits = [ParallelConfig(dp=comm.size, zero=zero) for zero in range(4)]
    trainers, times = [Trainer(comm, model, split, train) for split in splits], [[], [], [], []]
    for number in range(rounds):
        for taken, trainer in zip(times, trainers):
            comm.barrier()
            start = time.perf_counter()
            trainer.step(number)
            taken.append(time.perf_counter() - start)
    return comm.describe(), [taken[1:] for taken in times]  # the first warms up


# %%
spent, where = {(n, zero): [] for n in (1, 2, 4) for zero in range(4)}, {}
with World(4) as world, world.take_turns(print):
    for n in 2 * (1, 2, 4):
        where[n], times = World(n).run(stages_in_turn, 7)[0]
        for zero in range(4):
            spent[n, zero] += times[zero]
print("       " + "".join(f"{f'N = {n}':>22}" for n in (1, 2, 4)))
for zero in range(4):
    cells = []
    for n in (1, 2, 4):
        low, middle, high = (1e3 * t for t in quantiles(spent[n, zero]))
        cells.append(f"{middle:.0f} [{low:.0f}, {high:.0f}]")
    print(f"stage {zero}" + "".join(f"{cell:>22}" for cell in cells))
print(f"measured on 1, 2 and {where[4]}")


# %%
def against(key, base):
    r = ratio(list(zip(spent[key], spent[base])))
    verdict = "slower" if r.low > 1 else "faster" if r.high < 1 else "within the noise"
    return f"{r.median:.2f} times the time [{r.low:.2f}, {r.high:.2f}], {verdict}"


for n in (2, 4):
    print(f"plain, N = {n}, against one rank:  {against((n, 0), (1, 0))}")
for zero in (1, 2, 3):
    print(f"N = 2, stage {zero}, against plain:   {against((2, zero), (2, 0))}")
print("ratio of steps taken in turn: the median, with its 95 % interval")

# %%
by_size = sorted((states_of(grid[2, zero]), zero) for zero in range(4))
plots.tradeoff(
    [size for size, _ in by_size],
    {"N = 2": [spent[2, zero] for _, zero in by_size]},
    x="model states of a rank, with stages " + ", ".join(str(zero) for _, zero in by_size),
    x_unit="bytes",
    y="time of a step",
    unit="seconds",
    source=f"measured on {where[2]}",
    title="Memory against time",
)

# %% [markdown]
# Replicas share a batch. With a core for each, compute falls as `1/N`, and the bytes stand against it; with more ranks than
# cores it cannot fall. Stage 1 sends the bytes of stage 0 in twice as many messages, stage 3 half as many bytes again.
# Whether you see that here depends on the noise of your machine. The picture is the trade of this lesson: to the left less
# memory, and what it costs.
#
# ## The code
#
# What each stage changes of the one before. `_reduce` is called when a unit's gradient is complete, `_share_new_weights` when
# the optimizer has stepped a unit. The last four are stage 3's, before and after each layer: `_hold` has its weights whole,
# `_prefetch` starts to gather the next one's, `_release` frees them; what is in `_stay` keeps them from forward to backward.
# Do the first exercise before you look.

# %% tags=["answer"]
from pcourse.parallel.data import DataParallel
from pcourse.parallel.zero import ShardedGradients, ShardedOptimizer, ShardedParameters

show_source(DataParallel._reduce, ShardedOptimizer._reduce, ShardedOptimizer._share_new_weights)
show_source(ShardedGradients)
show_source(ShardedParameters.before_forward, ShardedParameters.after_forward)
show_source(ShardedParameters.before_backward, ShardedParameters.after_backward)

# %% [markdown]
# ## Prove it
#
# Every stage, one to four replicas, nine sequences that do not divide: loss, gradients, norm, and the weights after three
# steps of SGD, against the unsplit model.

# %%
nine = TrainConfig(batch=9, clip=0.1)
print("worst difference   " + "".join(f"N = {n:<8}" for n in range(1, 5)))
for zero in range(4):
    proofs = [
        prove(small, ParallelConfig(dp=n, zero=zero, micro_batches=2), nine) for n in range(1, 5)
    ]
    print(f"stage {zero}            " + "".join(f"{proof.worst:<12.0e}" for proof in proofs))
    assert all(proof.holds for proof in proofs)
print(f"of {proofs[-1].parameters} tensors at most; {small.dtype}, on ranks that are threads")

# %% [markdown]
# And with AdamW in float32, as it was measured above: do the four stages learn alike, over five steps of four micro-batches?

# %%
for zero, report in four.items():
    print(f"stage {zero}: losses", ", ".join(f"{loss:.6f}" for loss in report.loss))
apart = max(
    max(losses) / min(losses) - 1
    for losses in zip(*(report.loss for report in four.values()), strict=True)
)
print(f"apart by {apart:.0e} at most; {four[0].source}")
assert apart < 1e-5

# %% [markdown]
# ## Break it
#
# Three faults that people really make, in plain data parallelism on two replicas. Predict which line betrays each. The norm
# that each rank computes stands last, as a multiple of the right one.

# %%
from types import SimpleNamespace
from unittest.mock import patch

reduce, land = DataParallel._reduce, DataParallel._land


def mean_not_sum(self, unit, flat, handle):
    land(self, unit, flat, handle)
    unit.gradient.div_(self.comm.size)


def norm_of_every_replica(self):
    squares = sum(s.gradient.square().sum() for s in self.replicas.segments)
    return self.mesh.dp.all_reduce(squares).sqrt()


def one_layer_forgotten(self, unit):
    if unit.name != "layer 1":
        return reduce(self, unit)
    flat = self._take_gradient(unit)
    land(self, unit, flat, SimpleNamespace(wait=lambda: flat))


# %%
two, eight = ParallelConfig(dp=2), TrainConfig(batch=8, clip=0.1)


def norm(comm):
    return Trainer(comm, small, two, eight).step(0)[1]


threads, betrayed = World(2, backend="threads"), []
right = threads.run(norm)[0]
for owner, name, fault in (
    (DataParallel, "_land", mean_not_sum),
    (Trainer, "gradient_norm", norm_of_every_replica),
    (DataParallel, "_reduce", one_layer_forgotten),
):
    with patch.object(owner, name, fault):
        broken, norms = prove(small, two, eight), threads.run(norm)
    print(f"{fault.__name__.replace('_', ' ')}:\n{broken}")
    print("  norm on each rank, of the right one ", *(f"{n / right:.4f}" for n in norms), "\n")
    numbers = broken.loss, broken.gradients, broken.gradient_norm, broken.weights
    betrayed.append([number > 1e-6 for number in numbers])
assert betrayed == [
    [False, True, True, False],
    [False, False, True, True],
    [False, True, True, True],
]

# %% [markdown]
# The loss of the first step betrays none of them: they all come after it. The factor tells them apart. A **mean** halves
# every gradient, and the norm with it. The weights come out right: clipping divides the scale away, as Adam does. A norm
# summed **over replicas that hold the same** is too large by √N, though every gradient is right; it does harm where clipping
# goes by it. A **forgotten** unit gives the ranks different norms: their weights drift apart from then on, and no error says
# so.
#
# ## Exercises
#
# - [One step of ZeRO-1](../exercises/06_zero1_step.ipynb), 25 minutes: put the optimizer between the two halves.
# - [A layer of ZeRO-3](../exercises/06_zero3_block.ipynb), 30 minutes: gather, use, let go, forward and backward.
# - [Three broken training steps](../exercises/06_broken_training.ipynb), 40 minutes: know a fault by the number that it spoils.

# %% [markdown]
# ## In production
#
# | here | PyTorch | DeepSpeed | Megatron-LM |
# |---|---|---|---|
# | `zero=0` | `DistributedDataParallel`; FSDP's `ShardingStrategy.NO_SHARD` | `"stage": 0` | without further flags |
# | `zero=1` | `ZeroRedundancyOptimizer` beside DDP | `"stage": 1` | `--use-distributed-optimizer` |
# | `zero=2` | | `"stage": 2` | |
# | `zero=3, reshard=False` | `SHARD_GRAD_OP`; `fully_shard(…, reshard_after_forward=False)` | | |
# | `zero=3` | `FULL_SHARD`; `fully_shard(…, reshard_after_forward=True)` | `"stage": 3` | |
# | summed once for `m` micro-batches | `no_sync()` around all but the last, forward *and* backward | `gradient_accumulation_steps` | |
#
# DeepSpeed's stage stands under `"zero_optimization"`. FSDP2 is the name of `fully_shard`. It cuts every parameter along its
# first dim, where ours cuts a unit's flat vector. The same model and the same step through PyTorch's own, beside ours:

# %%
from functools import partial

from pcourse.native.beside import beside
from pcourse.native.data import data_sides

theirs = {0: "DDP", 1: "ZeroRedundancy", 3: "FSDP2"}
for zero, name in theirs.items():
    sides = partial(data_sides, parallel=ParallelConfig(dp=2, zero=zero))
    with World(2, backend="gloo") as world, world.take_turns(print):
        result = world.run(beside, model, train, 10, sides, timeout=120)[0]
    print(f"zero = {zero}\n{result.table(name)}\n")
    assert abs((result.sent[1] - result.sent[0]) / P - (0.5 if zero else 0)) < 0.001

# %% [markdown]
# *Elements sent* are counted where the backend takes them, the sum of the loss among them. DDP makes fewer calls: it puts
# gradients together in buckets, ours makes a message of each unit. The buckets stay from step to step, and so count at the
# peak. `ZeroRedundancyOptimizer` reduces as DDP does, then broadcasts whole parameters: half as much again as ours, which
# never makes the second half of that all-reduce. FSDP2 sends more only because gloo has no reduce-scatter: PyTorch makes it
# there from an all-reduce.
#
# ## The articles said
#
# Five sentences from the two articles that this course grew from. Lock your verdicts; the next cells compute them.

# %%
said = {
    "A14": "“A 13B model on one node of eight 80 GB cards: TP = 8 is the natural choice.”",
    "A27": "“FSDP's FullShard shards everything, its ShardGradOp only the gradient.”",
    "A28": "“FSDP is coarse-grained, one of the 2D/2.5D parallelisms.”",
    "A31": "“Split over 2 cards: half the memory pressure. Over 4: less still.”",
    "A36": "“Data parallelism if it fits, else tensor, then pipeline parallelism; ZeRO and FSDP last.”",
}
claims = {
    name: Choose(f"{name} {words}", ["holds", "in part", "wrong"], name=name)
    for name, words in said.items()
}
for claim in claims.values():
    display(claim)

# %% [markdown]
# For A14 the formulas alone: bytes that each of the eight holds and sends, in bfloat16 with float32 master weights.

# %% tags=["answer"]
for claim in claims.values():
    claim.require()

big = ModelConfig(layers=40, hidden=5120, heads=40, vocab=50304, sequence=2048, dtype="bfloat16")
on_eight = {}
for split in ({"tp": 8}, {"dp": 8, "zero": 1}, {"dp": 8, "zero": 2}, {"dp": 8, "zero": 3}):
    settings = big, ParallelConfig(**split, master_weights=True), TrainConfig(batch=8)
    sends = sum(row["wire"] for row in communication(*settings).values())
    on_eight[str(split)] = sum(states(*settings)) / 1e9, sends / 1e9
    print(
        f"{split!s:<22} states {sum(states(*settings)) / 1e9:5.1f} GB, sends {sends / 1e9:5.1f} GB"
    )
(tp_states, tp_sends), *_, (fsdp_states, fsdp_sends) = on_eight.values()
crossing = fsdp_sends / (tp_sends / (8 * big.sequence))
print(f"in a step of {8 * big.sequence:,} tokens. Tensor parallelism's bytes grow with the tokens,")
print(f"ZeRO-3's do not: above {crossing:,.0f} tokens a step it sends less")

# %% tags=["answer"]
claims["A14"].score(
    "in part" if fsdp_states <= 1.01 * tp_states and crossing < 100_000 else "holds",
    f"it fits, {tp_states:.0f} GB of states each. So does ZeRO-3, {fsdp_states:.0f} GB, "
    f"and it sends less from {crossing:,.0f} tokens a step on",
    source="predicted from the formulas above",
)
keeps = measure(model, ParallelConfig(dp=2, zero=3, reshard=False), train)
gathers = [r.ranks[0].row("dp", "all_gather").calls for r in (grid[2, 3], keeps)]
kept = [getattr(keeps.ranks[0].memory, what) / getattr(grid[1, 0].ranks[0].memory, what)
        for what in ("parameters", "gradients", "optimizer")]  # fmt: skip
claims["A27"].score(
    "holds" if kept[0] == kept[2] == 1 else "wrong",
    "with reshard=False each of 2 keeps, of parameters, gradients, optimizer state, "
    + ", ".join(f"{share:.0%}" for share in kept)
    + ". What differs is when gathered weights go: "
    + f"{gathers[0]} all-gathers a step, or {gathers[1]}",
    source=keeps,
)

# %% tags=["answer"]
growth = {}
for split in (ParallelConfig(dp=2, zero=3), ParallelConfig(tp=2)):
    few, many = (
        sum(row["wire"] for row in communication(model, split, TrainConfig(batch=b)).values())
        for b in (16, 32)
    )
    growth[split.tp] = many / few
claims["A28"].score(
    "wrong" if growth[1] == 1 < growth[2] else "in part",
    "2D and 2.5D cut the matrices of one layer over a grid of ranks, which exchange activations. "
    "FSDP's ranks exchange weights and gradients, and compute whole layers: with twice the batch "
    f"they send {growth[1]:g} times the bytes, tensor-parallel ranks {growth[2]:g} times. "
    "It is data parallelism",
    source="predicted from the formulas, which the runs above equal",
)
left = {z: [states_of(grid[n, z]) / states_of(grid[1, z]) for n in (2, 4)] for z in (1, 2, 3)}
claims["A31"].score(
    "holds" if all(share[0] <= 0.5 for share in left.values()) else "in part",
    "of the model states "
    + "; ".join(f"stage {z} leaves {a:.0%}, then {b:.0%}" for z, (a, b) in left.items()),
    source=grid[4, 3],
)
more = four[3].ranks[0].wire("dp") / four[0].ranks[0].wire("dp")
free = all(wire[n, 1] == wire[n, 0] for n in (2, 4)) and left[1][1] < 1
claims["A36"].score(
    "in part" if free else "holds",
    "stage 1 sends what plain data parallelism sends, to the byte, and holds less: it comes first. "
    f"Stage 3 sends {more:.1f} times as much at 4 micro-batches, as a pipeline has them: "
    "there it does come last",
    source=four[3],
)

# %% [markdown]
# ## Three questions
#
# **1.** You accumulate over 4 micro-batches with DDP. You put `no_sync()` around the first three backward passes, but not
# around their forward passes. What do you get?
# <details><summary>Answer</summary>
#
# Four all-reduces instead of one. DDP decides *in the forward pass* whether the backward pass will reduce. The gradients come
# out right all the same, so only the clock tells. Count the calls.
# </details>
#
# **2.** From N = 8 to N = 64 with stage 1, the batch for each replica unchanged: what happens to the bytes that a rank sends,
# and to what it holds?
# <details><summary>Answer</summary>
#
# Sent: 2P·63/64 instead of 2P·7/8, 1.125 times. Held: in float32 8P + 8P/64 instead of 8P + 8P/8, so 8.1 bytes a parameter
# instead of 9. Nearly all that stage 1 can give, eight replicas give.
# </details>
#
# **3.** Your model's states fit with stage 3, and you use 16 micro-batches to keep activations small. Each step is slow. What
# would you try first?
# <details><summary>Answer</summary>
#
# Fewer, larger micro-batches, as stage 3 sends `3mP(N − 1)/N`: activations grow, bytes fall. If they do not fit, recompute
# them (lesson 07). Stage 2 sends `(m + 1)P(N − 1)/N` if its states fit.
# </details>
#
# **Next**: [07 · Recomputing activations](07_recomputing_activations.ipynb): less memory on each rank, without another rank.
