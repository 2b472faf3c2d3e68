# %% [markdown]
# # 05 · Filling the pipeline
#
# 30 minutes, after lesson 04. You need no GPU, and no core for each stage: one of the clocks below sees to that.
#
# **p stages, one batch: each stage waits for the one before it. How do you keep them all busy?**

# %%
from pcourse import ModelConfig, ParallelConfig, TrainConfig, World, measure, prove
from pcourse.cost.simulate import simulate
from pcourse.lab import Choose, Panel, Predict, bytes_text, plots, seconds_text, show_source
from pcourse.parallel.schedules import make_schedule


def walk(schedule, p, m, chunks=1):
    """`schedule`, walked with a forward of 1 unit a stage and a backward of 2."""
    return simulate(make_schedule(schedule, p, m, chunks), 1, 1, 1)


plots.pipeline(walk("naive", 4, 4), title="One micro-batch at a time")

# %% [markdown]
# A row is a stage, a number a micro-batch. The batch is cut into four, and each goes all the way forward and all the way back
# before the next one starts: one of the two articles that this course grew from prints this
# as its pseudo-code, and says that it keeps every card computing.
# What is pale is idle; the words above the rows, *bubble* and *in flight*, are what this lesson is about.
#
# ## Look: a schedule is a list
#
# Nothing forces that order. A **schedule** says for each stage what it does, in which order: `F2` is the forward pass of
# micro-batch 2, `B2` its backward pass. When a compute starts follows from that: its stage is free, and its input is there.

# %%
from pcourse.parallel.schedule_check import check_schedule

for name in ("naive", "gpipe", "1f1b"):
    schedule = make_schedule(name, 4, 6)
    check_schedule(schedule)  # whole, in order, and free of deadlock
    print(schedule, "\n")
print("1f1b on stage 1, with its messages:", *schedule.programs[1])

# %% [markdown]
# - **GPipe**: all forwards, then all backwards.
# - **1F1B**: stage i runs `p − 1 − i` forwards ahead, then one forward, one backward, in turn.
#
# `rx`, `sx` receive and send an activation, `rg`, `sg` a gradient. A receive is *posted* (announced, with
# memory for the message to land in) three computes ahead, so that the message travels meanwhile. This one list is printed here, run below, and *walked*: simulated, each compute
# taking a time that you give. The picture above was walked.
#
# ## Predict
#
# The time that stages stand idle because the pipeline fills and drains is the **bubble**.

# %%
guess = Predict(
    "1F1B, p = 4 stages, m = 8 micro-batches, backward twice as long as forward: "
    "what share of the step's wall clock does a stage stand idle?",
    unit="%",
    name="bubble at p 4, m 8",
)
guess

# %% [markdown]
# ## Run
#
# Four stages on two cores get in each other's way, and what you would see is your machine and not the schedule. So this panel
# runs **paced**: real processes, real messages, real gradients and memory. Only the *time* of each compute is set: whoever
# is done early sleeps until its time is over. Whether a rank came too late for that stands below the table.
#
# The batch stays the same, 16 sequences. Its forward pass through the whole model is set to take 640 ms, its backward pass
# twice that; `p` stages and `m` micro-batches share it out. Perfect would be 1.92 s divided by p.

# %%
model = ModelConfig(layers=8, hidden=64, heads=4, sequence=32)
train = TrainConfig(batch=16, steps=1, warmup=1)
unpaced = {}


def pace(parallel):
    """Seconds of one forward on one stage."""
    return 0.640 / parallel.pp / parallel.micro_batches


def both(model, parallel, train, **how):
    unpaced[parallel] = measure(model, parallel, train, **how)
    return measure(model, parallel, train, clock="paced", pace=pace(parallel), **how)


# %% [markdown]
# The panel shows the paced run, with the same list walked on the same axis below it; a table; and the unpaced run.

# %% tags=["answer"]
from pcourse.cost.stage_times import schedule_of
from pcourse.lab.table import table
from pcourse.parallel.schedule_check import peak_in_flight


def stages(report):
    held = [peak_in_flight(schedule_of(report), stage) for stage in range(report.parallel.pp)]
    rows = [
        [f"stage {rank.rank}", seconds_text(rank.seconds["compute"])]
        + [seconds_text(report.step_seconds - rank.seconds["compute"])]
        + [bytes_text(rank.memory.activations), f"{n:g}"]
        for rank, n in zip(report.ranks, held, strict=True)
    ]
    head = ["", "compute", "all else: it waits, idle", "activations kept", "in flight"]
    return table("What each stage did, and holds at most", head, rows, report.notes[-1])


def draw(report, panel):
    expected = simulate(schedule_of(report), *[pace(report.parallel)] * 3)
    return [
        plots.pipeline(report, expected, unit="seconds", title="Paced, and the same list walked"),
        stages(report),
        plots.pipeline(unpaced[report.parallel], title="Unpaced: as fast as this machine can"),
    ]


panel = Panel(
    model,
    ParallelConfig(pp=4, micro_batches=4),
    train,
    controls={
        "schedule": ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"],
        "pp": [1, 2, 4, 8],
        "micro_batches": [1, 2, 4, 8, 16],
        "chunks": [1, 2],
    },
    draw=draw,
    measure=both,
    after=guess,
    title="A pipeline, paced and unpaced",
)
panel

# %% [markdown]
# Turn `micro_batches` from 1 to 16, then `schedule` (what does not go together is refused, with what would). In the lower picture computes take what they take: with a core or a GPU
# for each stage that one is the real thing. The last four schedules, and `chunks`, come further down.
#
# ## Explain: one bubble, two names

# %% tags=["answer"]
await panel.finished()


def paced(p, m):
    parallel = ParallelConfig(pp=p, micro_batches=m)
    return measure(model, parallel, train, clock="paced", pace=pace(parallel))


eight = paced(4, 8)
busy = sum(rank.seconds["compute"] for rank in eight.ranks) / 4
guess.score(
    100 * (1 - busy / eight.step_seconds),
    {37.5: "3/8 is the same bubble over the *ideal* time. Of the wall clock it is less: see below.",
     75: "That is one micro-batch at a time: three stages of four wait.",
     27.3: "(p − 1)/(m + p − 1) = 3/11."},
    source=eight,
)  # fmt: skip
print(eight.notes[-1])

# %% [markdown]
# The first forward reaches the last stage after `(p − 1)·tf`. The last backward needs `(p − 1)·tb` from there to the first
# stage. That much each stage is idle in a step, **once**, however many micro-batches there are. Papers divide it by two things,
# and often do not say by which:
#
# - of the **ideal** time `m·(tf + tb)`: `(p − 1)/m`
# - of the **wall clock**: `(p − 1)/(m + p − 1)`

# %% tags=["answer"]
print("  p   m   idle, units   of the ideal   of the wall clock   of a micro-batch's whole way")
bubbles = {}
for p in (2, 4, 8):
    for m in (4, 8, 32):
        run = bubbles[p, m] = walk("1f1b", p, m)
        idle = run.step_seconds - run.busy[0]
        print(f"{p:3}{m:4}{idle:10g}{run.bubble_of_ideal:17.1%}", end="")
        print(f"{run.bubble_of_step:17.1%}{idle / (3 * p):20.1%}")
        assert idle == (p - 1) * 3
        assert abs(run.bubble_of_ideal - (p - 1) / m) < 1e-12
        assert abs(run.bubble_of_step - (p - 1) / (m + p - 1)) < 1e-12

# %% [markdown]
# More stages, more bubble; more micro-batches, less. But the unit is a stage's own time, and a stage of half the layers takes
# half as long. Measured by one micro-batch's way through the whole model (last column) a stage idles `1 − 1/p`: never more than
# one such way.
#
# Now the three schedules at m = 8, and two of them on one axis.

# %% tags=["answer"]
three = {name: walk(name, 4, 8) for name in ("naive", "gpipe", "1f1b")}
steps_of = [run.step_seconds for run in three.values()]
print(
    "steps of", ", ".join(f"{step:g}" for step in steps_of), "units; each stage computes 24 of them"
)
assert steps_of == [96, 33, 33]
plots.pipeline(three["gpipe"], three["1f1b"])

# %% [markdown]
# GPipe and 1F1B are equally fast: they fill and drain alike. So what is 1F1B for?
#
# ## Predict again: memory
#
# A stage keeps a micro-batch's activations from its forward to the end of its backward. Let each micro-batch be one sequence.

# %%
more = {
    name: Predict(
        f"{name}, p = 4: from m = 4 to m = 16 micro-batches of one sequence each, "
        "by what factor do the first stage's activations grow?",
        unit="times",
        name=f"activations of {name}",
    )
    for name in ("GPipe", "1F1B")
}
for question in more.values():
    display(question)

# %% tags=["answer"]
for question in more.values():
    question.require()


def one_sequence_each(schedule, m, p=4):
    parallel = ParallelConfig(pp=p, micro_batches=m, schedule=schedule)
    return measure(model, parallel, TrainConfig(batch=m, steps=1, warmup=0))


ms = [4, 8, 16]
kept = {name: [one_sequence_each(name.lower(), m) for m in ms] for name in more}
words = {
    "GPipe": {1: "That is what 1F1B is for. GPipe keeps all m until the first backward."},
    "1F1B": {4: "That is GPipe. 1F1B takes a backward before it holds more than p."},
}
for name, question in more.items():
    first = [report.ranks[0].memory.activations for report in kept[name]]
    question.score(first[2] / first[0], words[name], source=kept[name][2])

# %% [markdown]
# How many micro-batches is that? The naive order never holds more than one. So divide by what it holds, stage by stage:

# %% tags=["answer"]
single = [rank.memory.activations for rank in one_sequence_each("naive", 4).ranks]
held = {}
for name, reports in kept.items():
    for m, report in zip(ms, reports, strict=True):
        held[name, m] = [
            rank.memory.activations / n for rank, n in zip(report.ranks, single, strict=True)
        ]
        print(
            f"{name:<6} m = {m:<3} in flight on stages 0 to 3:", *(f"{n:6g}" for n in held[name, m])
        )
for m in ms:
    assert held["GPipe", m] == [m] * 4
    assert held["1F1B", m] == [min(m, 4 - i) for i in range(4)]

# %% tags=["answer"]
plots.tradeoff(
    ms,
    {name: [r.ranks[0].memory.activations for r in reports] for name, reports in kept.items()},
    x="micro-batches of one sequence",
    y="activations kept by the first stage",
    unit="bytes",
    source=kept["GPipe"],
    title="Why 1F1B",
)

# %% [markdown]
# GPipe holds `m` on every stage. 1F1B holds `min(m, p − i)` on stage i: after that many it takes a backward before the next
# forward, and the backward frees what the forward needs. So with 1F1B more than p micro-batches cost no more memory.
#
# ## How many micro-batches?
#
# The same batch, cut into more and more. Lines are walked, circles are paced runs. Each line climbs towards its `p`,
# and never gets there.

# %%
import os

cuts = {2: [4, 8], 4: [1, 4, 16], 8: [4, 8]}
runs = {(p, m): paced(p, m) for p, each in cuts.items() for m in each}
runs[4, 8] = eight
alone = 3 * 0.640  # seconds of the batch on one stage
where = f"{os.cpu_count()} cores, {eight.made_at[:16].replace('T', ' ')}"
late = [f"p={p}, m={m}" for (p, m), run in runs.items() if not run.valid]
print("left out, as they came too late:", ", ".join(late) or "none")
xs = [1, 2, 4, 8, 16, 32, 64]
plots.tradeoff(
    xs,
    {f"p = {p}": [3 * m * p / walk("1f1b", p, m).step_seconds for m in xs] for p in (2, 4, 8)},
    x="micro-batches",
    y="times as fast as one stage",
    marks=[(m, alone / run.step_seconds, "") for (p, m), run in runs.items() if run.valid],
    source=f"lines predicted from a walk of 1F1B; circles paced to the same times, on {where}",
    title="Cut the batch finer: the pipeline fills",
)

# %% [markdown]
# One article says: *1F1B, micro-batches from 4 to 8: throughput +18 %, memory pressure up.* For which `p` would that be? A
# micro-batch takes `(m + p − 1)/m` of its time: `(p + 3)/4` at m = 4, `(p + 7)/8` at m = 8. So the gain is
# `2(p + 3)/(p + 7) − 1`.

# %%
gains = {}
print("  p   walked   paced    first stage holds")
for p in (2, 3, 4, 8):
    few, many = walk("1f1b", p, 4), walk("1f1b", p, 8)
    gains[p] = 2 * few.step_seconds / many.step_seconds - 1
    pair = [runs[p, m].step_seconds for m in (4, 8) if (p, m) in runs and runs[p, m].valid]
    seen = f"{pair[0] / pair[1] - 1:+.1%}" if len(pair) == 2 else "not run"
    holds = f"{few.peak_in_flight[0]:g}, then {many.peak_in_flight[0]:g}"
    print(f"{p:3}{gains[p]:+9.1%}{seen:>9}    {holds}")
fitting = (7 * 1.18 - 6) / (2 - 1.18)
print(f"+18 % would be p = {fitting:.2f}")

# %% [markdown]
# No whole `p` gives 18 %. And memory rises only beyond `p = 4`, as 1F1B holds `min(m, p)`. Perhaps the article means the
# *size* of a micro-batch, 4 to 8 sequences? Then memory doubles, and a gain must come from the kernels. One rank, no
# pipeline:

# %%
sizes = {b: measure(model, ParallelConfig(), TrainConfig(batch=b, steps=9)) for b in (4, 8)}
speed = sizes[8].tokens_per_second / sizes[4].tokens_per_second
doubled = sizes[8].ranks[0].memory.activations / sizes[4].ranks[0].memory.activations
print(f"twice the size: {speed - 1:+.0%} tokens per second, {doubled:.2f} times the activations")
print(sizes[8].source)
assert 1.99 < doubled < 2.01

# %% [markdown]
# At a fixed batch `m` and size pull against each other: `batch = b · m`. More micro-batches, less bubble, but each smaller,
# and small matrices use a device badly. A rule says: `m` of 2 to 4 times `p`.

# %%
print("p = 8:", end=" ")
for factor in (2, 3, 4, 8):
    print(f"m = {factor}p idles {walk('1f1b', 8, 8 * factor).bubble_of_step:.0%}", end=";  ")

# %% [markdown]
# Does it matter for *learning* how a batch is cut? Each circle above was a real step on the same 16 sequences. Compare what
# came out of them:

# %%
apart = {}
for what in ("loss", "gradient_norm"):
    values = [getattr(run, what)[0] for run in runs.values()]
    apart[what] = max(values) / min(values) - 1
    print(f"{what:<14} {values[0]:.5f}; over {len(values)} ways to cut, apart by {apart[what]:.0e}")
assert max(apart.values()) < 1e-5

# %% [markdown]
# The same step, to the rounding of float32. Micro-batches *are* gradient accumulation: the optimizer sees `b · m · dp`
# sequences, and not their factors.
#
# ## Finer: chunks
#
# Give each stage `v` **chunks** of the model instead of one piece: with p = 4 and v = 2, of 8 layers stage 0 holds the first and
# the fifth. The pipeline fills `v` times as fast, since a chunk takes `1/v` of the time. This is the *interleaved* schedule.

# %%
plots.pipeline(walk("1f1b", 4, 8), walk("interleaved", 4, 8, 2))

# %% [markdown]
# What does it cost? These runs keep **virtual** time: the same program on real ranks, but nobody sleeps, the clock is only
# reckoned. So they are predictions, made by running; the walk must give the same number. Messages and memory are counted.


# %%
def virtual(schedule, chunks=1, layers=16, p=4, m=8):
    parallel = ParallelConfig(pp=p, micro_batches=m, schedule=schedule, chunks=chunks)
    few = TrainConfig(batch=m, steps=1, warmup=0)
    return measure(model.but(layers=layers), parallel, few, clock="virtual", pace=1.0)


finer = {v: virtual("interleaved", v) for v in (1, 2, 4)}
for v, report in finer.items():
    expected, sent = walk("interleaved", 4, 8, v), report.ranks[1].row("pp", "send")
    busy = report.ranks[0].seconds["compute"]
    print(
        f"v = {v}: bubble {report.step_seconds / busy - 1:6.2%} of the ideal, "
        f"in flight {expected.peak_in_flight[0]:4g}, "
        f"activations {bytes_text(report.ranks[0].memory.activations)}, "
        f"stage 1 sends {sent.calls} messages of {bytes_text(sent.wire // sent.calls)}"
    )
    assert abs(report.step_seconds - expected.step_seconds) < 1e-9
    assert abs(report.step_seconds / busy - 1 - 3 / (8 * v)) < 1e-9
    assert sent.calls == 16 * v
    assert v == 1 or expected.peak_in_flight[0] == 4 * (1 + 3 / (4 * v))

# %% [markdown]
# The bubble falls as `1/v`. In return there are `v` times as many messages, each as large as before, and the first stage
# holds `p(1 + (p − 1)/(pv))` micro-batches, more than 1F1B's `p`. Here messages took no time. Now let one take `c` forwards
# of a stage:

# %%
print("     c " + "".join(f"   v = {v}" for v in (1, 2, 4)))
with_messages = {}
for c in (0, 0.1, 0.2, 0.5):
    orders = {v: make_schedule("interleaved", 4, 8, v) for v in (1, 2, 4)}
    with_messages[c] = {v: simulate(s, 1, 1, 1, transfer=c).step_seconds for v, s in orders.items()}
    best = min(with_messages[c], key=with_messages[c].get)
    print(
        f"{c:6g} " + "".join(f"{t:8.2f}" for t in with_messages[c].values()), f"   best: v = {best}"
    )
lost = (with_messages[0.5][1] - with_messages[0][1]) / 0.5
print(f"1F1B waits for {lost:g} messages; to fill and to drain would be 2(p − 1) = 6")

# %% [markdown]
# Short messages: the finest cut wins. Longer ones: a coarser. Even plain 1F1B waits for more messages than fill and drain it:
# one forward, one backward is a to and fro between neighbours. The formula `(m + p − 1)(tf + tb)` knows nothing of that; a walk
# does.
#
# ## Zero bubble: cut the backward pass
#
# A backward pass makes two gradients: of the input, which the stage before waits for, and of the weights, which nobody waits
# for. So put the second off, and fill the bubble with it (Qi et al. 2024). The next cell shows how it is put off here.

# %%
from pcourse.parallel import put_off

show_source(put_off.PutOff, put_off._Linear)

# %%
zero = {name: walk(name, 4, 8) for name in ("1f1b", "zb-h1", "zb-h2")}
zero["zb-v"] = walk("zb-v", 4, 8, chunks=2)
plots.pipeline(*zero.values())

# %% [markdown]
# - **ZB-H1**: 1F1B's order, stage i puts its weight gradients off by i micro-batches.
# - **ZB-H2**: twice as far ahead. No stage stands idle between its own first and last compute. Memory pays for it. Here every
#   step ends for all at once, so it gains nothing over H1; the paper lets a stage begin its next step at once, and then it does.
# - **ZB-V**: two chunks a stage, the second on the way *back* (a V): the first stage also holds the end.
#
# The paper counts a bubble from a stage's *own* first compute to its own last, a third convention: it leaves out that later
# stages start later. Both stand in this table. It was walked, and run on the virtual clock; memory was measured.

# %%
ran = {name: virtual(name, run.schedule.chunks, layers=8) for name, run in zero.items()}
most = ran["1f1b"].ranks[0].memory.activations
print(
    f"{'':<7}{'step':>6}{'own span':>10}{'wall clock':>12}   activations by stage, of 1F1B's first"
)
for name, run in zero.items():
    kept_by = [rank.memory.activations / most for rank in ran[name].ranks]
    print(
        f"{name:<7}{run.step_seconds:6g}{run.bubble:10.1%}{run.bubble_of_step:12.1%}   ",
        *(f"{share:5.2f}" for share in kept_by),
    )
    assert abs(ran[name].step_seconds - run.step_seconds) < 1e-9  # the run and the walk agree
print(f"time: {ran['zb-h1'].source}; memory: measured in the same runs")

# %% [markdown]
# That is with equal times. Real ones are not, and a weight gradient that is shorter fills less. Is this walk the
# authors' own? They printed the times that they profiled, and the bubbles that they computed from them:

# %%
# Qi et al., arXiv:2401.10241, table 9 (forward, input and weight gradient, message; ms) and table 5
published = {
    ("1.5B", 8, 24): ((18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    ("6.2B", 8, 32): ((29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    ("14.6B", 16, 64): ((11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
}
for (size, p, m), (times, theirs) in published.items():
    names = ("1f1b", "zb-h1", "zb-h2")
    ours = [round(simulate(make_schedule(name, p, m), *times).bubble, 4) for name in names]
    print(f"{size:>5}, p = {p:2}, m = {m}: ", *(f"{n} {b:.4f}" for n, b in zip(names, ours)))
    assert ours == list(theirs)
print("all nine as printed in table 5")

# %% [markdown]
# ## A real machine
#
# Nothing paced now: two stages on two cores, a larger model, real time. Below it the same list, walked with the median
# times of this very run. (Of uneven stages the two names of the bubble differ in kind, too: *of the ideal* looks at the busiest
# stage alone, *of the wall clock* at the mean of all.)

# %%
from pcourse.cost.stage_times import resimulate, stage_times

larger = ModelConfig(layers=8, hidden=128, heads=8, sequence=64)
real = measure(larger, ParallelConfig(pp=2, micro_batches=8), TrainConfig(batch=16, steps=5))
again = resimulate(real)
plots.pipeline(real, again, title="Measured, and walked with its own times")

# %%
spans = [span for rank in real.ranks for span in rank.spans]
end = max(span.end for span in spans if span.kind == "backward")
optimizer = max(
    sum(span.seconds for span in rank.spans if span.kind == "optimizer") for rank in real.ranks
)
print(
    f"the step took {seconds_text(real.step_seconds)}, the walk {seconds_text(again.step_seconds)}"
)
print(
    f"up to the last backward: {seconds_text(end)}, so {end / again.step_seconds - 1:+.0%} for "
    "computes longer than their median, and what lies between them"
)
print(
    f"after it: {seconds_text(real.step_seconds - end)}, of which the optimizer "
    f"{seconds_text(optimizer)}; the rest sums the tied matrix, the loss and the norm"
)

# %% [markdown]
# So trust a walk for what it knows: which order, how many micro-batches, how many chunks. What lies between computes, and what
# stages on shared cores do to each other, it does not know.
#
# How long is a backward pass, against a forward? All pictures so far took twice. Counted in operations, and by the clock:

# %%
from pcourse.cost.layers import pieces

layer, times = pieces(larger)[1], stage_times(real)
counted = (layer.backward_input + layer.backward_weight) / layer.forward
ratios = [b / f for f, b in zip(times["forward"], times["backward_input"], strict=True)]
print(f"operations of a layer's matrices: 1 : {counted:g}")
print("by the clock:", ", ".join(f"stage {i} 1 : {ratio:.2f}" for i, ratio in enumerate(ratios)))
print(real.source)
assert counted == 2

# %% [markdown]
# ## The code
#
# One rank's part in any schedule, forward and backward. `run` goes through the list; a receive only posts, and the compute
# that needs the message waits for it. `graphs` holds what backward needs, `made` and `awaited` what is on its way in or out,
# `under_way` the last send to each neighbour.

# %%
from pcourse.parallel.pipeline import Pipeline

show_source(Pipeline.run, Pipeline._forward, Pipeline._backward, Pipeline._send, Pipeline._receive)

# %% [markdown]
# ## Prove it
#
# The order of micro-batches, and backward passes cut in two, must change nothing.

# %%
split = ParallelConfig(pp=2, micro_batches=4, schedule="zb-h1")
proof = prove(model, split, TrainConfig(batch=8))
print(proof)
assert proof.holds

# %% [markdown]
# ## Break it
#
# The commonest fault of pipelines: the division by `m`. Above, `_forward` divides once, by all the batch's tokens. Predict
# which lines betray each of these; then run the cell.

# %%
from unittest.mock import patch

as_it_is = Pipeline.run


def divided_twice(self, rows, load, total, *seed):
    return as_it_is(self, rows, load, total * len(rows), *seed)


def not_divided(self, rows, load, total, *seed):
    return as_it_is(self, rows, load, total / len(rows), *seed)


def only_the_gradients(self, rows, load, total, *seed):
    loss = as_it_is(self, rows, load, total, *seed)  # what is printed is right
    for p in self.stage.parameters():
        p.grad *= len(rows)
    return loss


betrayed = []
for fault in (divided_twice, not_divided, only_the_gradients):
    with patch.object(Pipeline, "run", fault):
        broken = prove(model, split, TrainConfig(batch=8))
    print(f"{fault.__name__.replace('_', ' ')}:\n{broken}\n")
    betrayed.append([d > 1e-6 for d in (broken.loss, broken.gradients, broken.gradient_norm)])
assert betrayed == [[True, True, True], [True, True, True], [False, True, True]]

# %% [markdown]
# The third prints a right loss. Would training show it? Four steps, right and wrong, with SGD and with Adam:

# %%
from pcourse.train import Trainer


def train_a_little(comm, steps):
    trainer = Trainer(comm, model, split, steps)
    return [trainer.step(number)[0] for number in range(4)][-1]


for optimizer in ("sgd", "adamw"):
    steps, threads = TrainConfig(batch=8, optimizer=optimizer), World(2, "threads")
    right = threads.run(train_a_little, steps)[0]
    with patch.object(Pipeline, "run", only_the_gradients):
        wrong = threads.run(train_a_little, steps)[0]
    print(f"{optimizer:<6} loss of the fourth step: right {right:.5f}, wrong {wrong:.5f}")
    assert abs(right - wrong) < 1e-3 if optimizer == "adamw" else abs(right - wrong) > 1e-2

# %% [markdown]
# Adam divides a gradient's scale away, and hides the fault. The gradient norm above does not, nor does clipping, which goes by
# it. So prove with SGD.
#
# ## Exercises
#
# - [1F1B as a schedule](../exercises/05_one_f_one_b.ipynb), 40 minutes: write the orders yourself, zero bubble too.
# - [Three broken pipelines](../exercises/05_broken_pipelines.ipynb), 40 minutes: know a fault by the number that it spoils.

# %% [markdown]
# ## In production
#
# | here | Megatron-LM | DeepSpeed |
# |---|---|---|
# | `pp=4` | `--pipeline-model-parallel-size 4` | `PipelineModule(layers, num_stages=4)` |
# | `micro_batches=8` | `--global-batch-size` ÷ (`--micro-batch-size` · dp) | `gradient_accumulation_steps: 8` |
# | `"1f1b"` | without further flags | `TrainSchedule` |
# | `"interleaved", chunks=2` | `--num-virtual-stages-per-pipeline-rank 2`, or `--num-layers-per-virtual-pipeline-stage` | |
#
# PyTorch's own is `torch.distributed.pipelining`: a `PipelineStage` on each rank, and one of these schedules (it has no ZB-H2).
# The same run through it, beside ours:

# %%
from functools import partial

from pcourse.native.beside import beside
from pcourse.native.pipeline import SCHEDULES, pipeline_sides

for ours, theirs in SCHEDULES.items():
    print(f'"{ours}"'.ljust(15), theirs.__name__)
sides = partial(pipeline_sides, parallel=ParallelConfig(pp=2, micro_batches=4))
with World(2, backend="gloo") as world, world.take_turns(print):
    result = world.run(beside, larger, TrainConfig(batch=8), 15, sides, timeout=120)[0]

# %%
print(result.table("1F1B of torch"))

# %% [markdown]
# ## The articles said
#
# Eight sentences from the two articles. Lock your verdicts; the next cell computes them.

# %%
said = {
    "A17": "“Accumulation steps × pipeline micro-batches = global batch: better convergence.”",
    "A20": "“Coarser: fewer stages, one longer bubble. Finer: bubbles more frequent.”",
    "A21": "“Forward to backward compute is about 1 : 2.”",
    "A22": "“1F1B, micro-batches 4 → 8: throughput +18 %, memory pressure up.”",
    "A44": "“The longer the pipeline, the bigger the bubble.”",
    "A45": "“(One micro-batch at a time) keeps every card computing.”",
    "A46": "“Too many micro-batches increase memory, as their intermediates are cached.”",
    "A47": "“Use 2 to 4 times as many micro-batches as stages.”",
}
claims = {
    name: Choose(f"{name} {words}", ["holds", "in part", "wrong"], name=name)
    for name, words in said.items()
}
for claim in claims.values():
    display(claim)

# %% tags=["answer"]
for claim in claims.values():
    claim.require()

same = max(apart.values())
claims["A17"].score(
    "wrong" if same < 1e-5 else "holds",
    "micro-batches are the accumulation, not a factor beside it: "
    f"one batch cut {len(runs)} ways gave one step, apart by {same:.0e}",
    source=runs[8, 8],
)
idle = {p: runs[p, 8].step_seconds - runs[p, 8].ranks[0].seconds["compute"] for p in (2, 4, 8)}
pieces_of_idle = {}
for p in (2, 8):
    row = walk("1f1b", p, 8).spans[0]
    pieces_of_idle[p] = sum(b.start > a.end for a, b in zip(row, row[1:], strict=False))
right = (idle[2] > idle[8]) + (pieces_of_idle[8] > pieces_of_idle[2])  # of the sentence's halves
claims["A20"].score(
    ["wrong", "in part", "holds"][right],
    "idle per stage and step, at m = 8: "
    + ", ".join(f"{seconds_text(t)} with {p} stages" for p, t in idle.items())
    + f". On 1F1B's first stage in {pieces_of_idle[2]} pieces with 2 stages, "
    f"in {pieces_of_idle[8]} with 8; GPipe has it in one",
    source=runs[8, 8],
)

# %% tags=["answer"]
claims["A21"].score(
    "in part" if counted == 2 else "wrong",
    f"1 : {counted:g} in operations, and 1 : {counted + 1:g} where backward does the forward pass again; "
    "here by the clock " + ", ".join(f"1 : {ratio:.2f}" for ratio in ratios),
    source=real,
)
claims["A22"].score(
    "holds" if any(round(100 * gain) == 18 for gain in gains.values()) else "in part",
    "faster, yes: "
    + ", ".join(f"{gain:+.0%} at p = {p}" for p, gain in gains.items())
    + "; memory rises only where p > 4",
    source="predicted from the walk of 1F1B above",
)
share = {p: bubbles[p, 8].bubble_of_step for p in (2, 4, 8)}
claims["A44"].score(
    "holds" if share[2] < share[4] < share[8] else "wrong",
    "at m = 8, of the wall clock: " + ", ".join(f"p = {p} {s:.0%}" for p, s in share.items()),
    source="predicted from the walk of 1F1B above",
)

# %% tags=["answer"]
used = three["naive"].busy[0] / three["naive"].step_seconds
claims["A45"].score(
    "holds" if used == 1 else "wrong",
    f"each of 4 stages computes {used:.0%} of the time: "
    f"{steps_of[0]:g} units where {steps_of[1]:g} would do",
    source="predicted from the walks above",
)
grows = {name: held[name, 16][0] / held[name, 4][0] for name in ("GPipe", "1F1B")}
claims["A46"].score(
    "holds" if min(grows.values()) > 1 else "in part" if max(grows.values()) > 1 else "wrong",
    f"from m = 4 to 16: GPipe {grows['GPipe']:g} times, 1F1B {grows['1F1B']:g} times",
    source=kept["1F1B"][2],
)
rule = [walk("1f1b", 8, 8 * factor).bubble_of_step for factor in (2, 4)]
claims["A47"].score(
    "holds" if rule[0] < 0.05 else "in part",
    f"at p = 8 that leaves {rule[0]:.0%} to {rule[1]:.0%} of the wall clock idle",
    source="predicted from the walk of 1F1B",
)

# %% [markdown]
# ## Three questions
#
# **1.** Batch 64, micro-batches of one sequence, pp = 4, dp = 2. You get twice the devices and set dp = 4. What happens to the
# bubble?
# <details><summary>Answer</summary>
#
# Each replica now has 16 micro-batches, not 32: 3/19 of the wall clock is idle instead of 3/35. Data parallelism takes
# micro-batches away from the pipeline.
# </details>
#
# **2.** You keep the batch and cut it into more micro-batches. Does GPipe's memory grow?
# <details><summary>Answer</summary>
#
# No: it holds all `m`, but each is `batch/m`, so it holds the batch. 1F1B's falls, as it holds at most p of them. Turn
# `micro_batches` in the panel, whose batch is fixed.
# </details>
#
# **3.** Why not one chunk for each layer?
# <details><summary>Answer</summary>
#
# `v` times the messages, and each is waited for once in a while: the table with `c` shows where that turns. Small computes have
# their own overhead too. And interleaving wants `m` in whole rounds of `p`.
# </details>
#
# **Next**: [06 Data parallelism and ZeRO](06_data_parallel_and_zero.ipynb), replicas of the model that each take a part of
# the batch.
