# %% [markdown]
# # 04 · Cutting a model into stages
#
# 25 minutes, after lesson 03. You need no GPU: two stages are two processes of this machine.
#
# **The model is too big for one device. Cut it *between* its layers, and give each rank a run of them: a stage. Where do you
# cut, and what does each cut cost?**

# %%
import torch

from pcourse import ModelConfig, ParallelConfig, TrainConfig, World, measure, prove
from pcourse.lab import Choose, Panel, Predict, bytes_text, plots, seconds_text, show_source
from pcourse.parallel.partition import partition

model = ModelConfig(layers=12, hidden=128, heads=8, sequence=64, vocab=1024)
plots.partition(model, {"4 stages": partition(model, 4)}, weight="parameters")

# %% [markdown]
# A **stage** is what one rank holds of the model when it is cut between layers. The number of stages is `pp`, the
# pipeline-parallel degree. The first stage also holds the embedding, the last one the head: the output matrix and the loss.
#
# ## Look at the shards
#
# Two stages, and what each holds. No matrix is cut: every parameter lies whole on one rank.

# %%
from pcourse.model import build
from pcourse.parallel.stage import Stage

parts = partition(model, 2)
for rank, part in enumerate(parts):
    stage = Stage(build(model), [part])
    count = sum(p.numel() for p in stage.parameters())
    print(f"stage {rank}: {part}: {count:,} parameters, {bytes_text(4 * count)}")
    kinds = f"blocks.{part.layers[0]}.mlp", "tokens", "output"
    for name, p in stage.named_parameters():
        if name.endswith("weight") and any(kind in name for kind in kinds):
            print(f"    {name:<24} {list(p.shape)}")
message = torch.empty(1, model.sequence, model.hidden)
print(f"over the cut: X[b, s, h] = {list(message.shape)}, {bytes_text(message.nbytes)}")

# %% [markdown]
# ## Two stages by hand
#
# Forward: the first stage sends what its last layer made. Backward: the second stage sends the gradient of what it got.
# That is all of pipeline parallelism; the rest is the order in which it is done.

# %%
from pcourse.data import batch

tokens, targets = batch(model, TrainConfig(batch=1), step=0)


def one_step(comm):
    chunk = Stage(build(model), [parts[comm.rank]]).chunks[0]
    if comm.rank == 0:
        y = chunk(tokens)
        comm.send(y.detach(), 1)
        y.backward(comm.recv(torch.empty_like(y), 1))
    else:
        x = comm.recv(torch.empty_like(message), 0).requires_grad_()
        loss = chunk(x, targets)
        loss.backward()
        comm.send(x.grad, 0)
    return chunk.blocks[0].mlp.up.weight.grad, None if comm.rank == 0 else loss.item()


(first, _), (_, split_loss) = World(2, backend="threads").run(one_step)

# %%
whole = build(model)
loss = whole.loss(tokens, targets)
loss.backward()
off = (first - whole.blocks[0].mlp.up.weight.grad).abs().max() / first.abs().max()
per_token = [value / targets.numel() for value in (loss.item(), split_loss)]
print(f"loss of a token: {per_token[0]:.4f} unsplit, {per_token[1]:.4f} from two stages")
print(f"layer 0's gradient on stage 0: off by {off:.0e} of its largest")
assert off < 1e-4 and abs(split_loss / loss.item() - 1) < 1e-5

# %% [markdown]
# One thing is not right yet. The embedding and the head use *the same matrix* here (tied weights), and now there are two
# copies of it, on two stages. It comes back in *Break it*.
#
# ## Predict
#
# While stage 1 works, stage 0 can take the next sequences. So a batch is cut into **micro-batches**, and each crosses the cut
# by itself. Lesson 05 is about their order.

# %%
guess = Predict(
    "pp = 2: a step of 4 micro-batches of 1 sequence, s = 64, h = 128, float32. "
    "How many bytes cross the cut, both ways together?",
    unit="bytes",
    name="bytes over a cut",
)
guess

# %% [markdown]
# ## Run
#
# Every setting really runs, one process a stage. `partition` is the rule by which the cuts are chosen: as many layers on each
# stage (`uniform`), as much `compute`, or as much `memory`. Diamonds are measured, bars are formulas. *In flight* is how many
# micro-batches a stage holds at once.

# %% tags=["answer"]
from pcourse.cost.communication import communication
from pcourse.parallel.partition import stages_of

train = TrainConfig(batch=4, steps=5, warmup=2)


def draw(report, panel):
    settings = report.model, report.parallel, report.train
    _, parts = stages_of(*settings)
    held = [min(report.parallel.micro_batches, len(parts) - i) for i in range(len(parts))]
    rule = report.parallel.partition
    how = {"measured": {rule: report}, "in_flight": held}
    theory = [communication(*settings, rank=rank.rank) for rank in report.ranks]
    return [
        plots.partition(report.model, {rule: parts}, weight="memory", **how),
        plots.partition(report.model, {rule: parts}, weight="compute", **how),
        plots.communication(report, theory),
    ]


panel = Panel(
    model,
    ParallelConfig(pp=2, micro_batches=4),
    train,
    controls={
        "pp": [1, 2, 4, 8],
        "partition": ["uniform", "compute", "memory"],
        "vocab": [1024, 4096, 8192],
        "layers": [4, 8, 12],
    },
    draw=draw,
    after=guess,
    title="A model in stages, measured",
)
panel

# %% [markdown]
# Try `pp=8` with 4 layers: it is refused before a process starts. By `compute` or `memory` the embedding and the head may
# stand alone, so two more stages can be filled, but no stage may be empty:

# %%
from pcourse.config import ConfigError

for rule in ("uniform", "memory"):
    try:
        measure(model.but(layers=4), ParallelConfig(pp=8, partition=rule, micro_batches=4), train)
    except ConfigError as refusal:
        print(refusal)

# %% [markdown]
# ## Explain: what crosses a cut

# %% tags=["answer"]
await panel.finished()
two = measure(model, ParallelConfig(pp=2, micro_batches=4), train)
sends = [rank.row("pp", "send") for rank in two.ranks]
crossed = sum(row.wire for row in sends)
guess.score(
    crossed,
    {
        crossed / 2: "That is one direction. The gradients come back, and are as large.",
        crossed / 8: "That is one message. Each of 4 micro-batches crosses forward and backward.",
        crossed * 4: "The batch is cut into micro-batches: a message holds one sequence, not four.",
        crossed / 4: "In bytes, a float32 is four.",
    },
    source=two,
)
for what, row in zip(("activations, forward ", "gradients, backward "), sends, strict=True):
    print(f"{what} {row.calls} messages, {row.wire:,} bytes")
assert crossed == 2 * train.batch * model.sequence * model.hidden * 4

# %% [markdown]
# A cut costs `2·b·s·h` numbers for each micro-batch: the activation forward, its gradient backward. How many layers stand on
# either side does not matter. **recv** rows count no bytes: the sender counts them.
#
# The row **tied** is the sum of the two copies' gradients, once a step and not once a micro-batch.

# %% [markdown]
# ## PP moves little, TP much
#
# The same model over two ranks, cut through its layers as in lesson 03, or between them:

# %% tags=["answer"]
through = measure(model, ParallelConfig(tp=2, micro_batches=4), train)
for name, report, axis in (("tp=2", through, "tp"), ("pp=2", two, "pp")):
    calls = sum(row.calls for row in report.ranks[0].communication if row.axis == axis)
    sent = report.ranks[0].wire(axis)
    print(f"{name}: rank 0 sends {bytes_text(sent):>9} a step; it makes {calls} calls")
print(two.source)
assert through.ranks[0].wire("tp") > 10 * two.ranks[0].wire("pp")

# %% [markdown]
# Now both at once, three stages of two tp ranks each. A rank of the *middle* stage sends one activation onward and one gradient
# back, `2bsh`, and over tp `8bsh(t − 1)/t` for each of its layers. Their ratio should be `4·l·(t − 1)/t` for l layers on a
# stage: here l is `layers/3`, and t is 2.

# %%
once, six = TrainConfig(batch=4, steps=1, warmup=0), ParallelConfig(tp=2, pp=3, micro_batches=4)
ratios = {}
for layers in (3, 6, 12):
    threads = World(6, backend="threads")  # bytes are counted, so threads will do
    both = measure(model.but(layers=layers), six, once, world=threads)
    middle = both.ranks[2]  # ranks 2 and 3 are stage 1
    ratios[layers // 3] = middle.wire("tp") / middle.wire("pp")
for count, ratio in ratios.items():
    print(f"{count} layer(s) on the middle stage: tp sends {ratio:g} times what pp sends")
assert all(ratio == 4 * count * (2 - 1) / 2 for count, ratio in ratios.items())

# %% [markdown]
# So tp stays where links are fast, inside a node, and pp crosses between nodes. Bytes are not all that a cut costs: a stage
# that has nothing to do waits. That is lesson 05.
#
# ## The embedding trap
#
# In the first picture the embedding weighs less than a layer: there are only 1,024 tokens. Real vocabularies have tens of
# thousands. Here are the pieces at 8,192:

# %%
from pcourse.cost.layers import pieces

large = model.but(vocab=8192)
rows = {piece.name: piece for piece in pieces(large)}
layer = rows["layer 0"]
for name in ("embedding", "layer 0", "head"):
    piece = rows[name]
    print(
        f"{name:<10}{piece.parameters:>10,} parameters ({piece.parameters / layer.parameters:.1f} layers)"
        f"{piece.flops / 1e6:>8.0f} MFLOP ({piece.flops / layer.flops:.1f} layers)"
        f"   kept for backward {bytes_text(piece.activations)}"
    )

# %% [markdown]
# A parameter costs 16 bytes here: itself, its gradient and AdamW's two numbers, 4 bytes each. A micro-batch in flight costs what
# it keeps for backward; of 4 micro-batches, stages 0 to 3 hold 4, 3, 2, 1 at once (below you count them). And for a moment
# AdamW's step needs twice the bytes of the matrix that it works on. Four stages, three layers on each:

# %%
which = Choose(
    "pp = 4, uniform, vocabulary 8,192: which stage is the fullest at its peak?",
    ["stage 0", "stage 1 or 2", "stage 3", "stages 0 and 3, within 5 % of each other"],
    name="fullest stage",
)
factor = Predict(
    "The fullest stage's peak: how many times the mean of the four?",
    unit="times",
    name="fullest over mean",
)
display(which, factor)

# %% tags=["answer"]
which.require()
factor.require()
cut = {
    rule: measure(large, ParallelConfig(pp=4, partition=rule, micro_batches=4), train)
    for rule in ("uniform", "compute", "memory")
}
peaks = {rule: [rank.memory.peak for rank in report.ranks] for rule, report in cut.items()}
full = peaks["uniform"]
top = max(full)
fullest = ["stage 0", "stage 1 or 2", "stage 1 or 2", "stage 3"][full.index(top)]
fullest = which.options[3] if min(full[0], full[3]) > 0.95 * top else fullest
which.score(fullest, "peaks: " + ", ".join(map(bytes_text, full)), source=cut["uniform"])
factor.score(
    4 * top / sum(full),
    {
        1.47: "So says the formula of states and activations. The peak has temporary memory too.",
        1: "As many layers on each stage is not as many bytes on each.",
    },
    source=cut["uniform"],
)
assert 2 * max(full[1:3]) < top

# %% [markdown]
# The ends hold the vocabulary's matrix, each its own copy, beside as many layers as the others. The head also makes the
# **logits**, `b·s·V` numbers, and keeps what becomes of them until backward. When two ranks are full, the other
# two are not half full; and the model is too big as soon as the *fullest* does not fit.
#
# Two better rules, by the smallest possible slowest stage, and by the smallest possible fullest one:

# %% tags=["answer"]
held = [4, 3, 2, 1]  # micro-batches that each stage holds at once
parts_of = {rule: stages_of(large, r.parallel, r.train)[1] for rule, r in cut.items()}
plots.partition(large, parts_of, weight="memory", in_flight=held, measured=cut)

# %% tags=["answer"]
plots.partition(large, parts_of, weight="compute")

# %% tags=["answer"]
from pcourse.parallel.partition import part_bytes, part_flops

score = {}
for rule, parts in parts_of.items():
    flops, full = [part_flops(part, large) for part in parts], peaks[rule]
    score[rule] = max(full), max(flops)
    print(
        f"{rule:<8} fullest: {bytes_text(max(full))}, {4 * max(full) / sum(full):.2f} × the mean"
        f"   slowest: {max(flops) / 1e6:.0f} MFLOP, {4 * max(flops) / sum(flops):.2f} × the mean"
    )
assert score["memory"][0] < score["uniform"][0] < score["compute"][0]
assert score["compute"][1] < score["memory"][1] < score["uniform"][1]

# %% [markdown]
# The two goals pull apart. Of one matrix the embedding only looks rows up: bytes, and no FLOPs. The head multiplies by the
# same matrix: `2bshV` FLOPs forward and twice that backward. So `compute` packs layers beside the embedding, and makes that
# stage the fullest of all. `memory` clears it, and its slowest stage works longer.
#
# What is between bar and diamond? Bars are model states and activations; the peak also has *temporary* memory.

# %% tags=["answer"]
for rule in ("compute", "memory"):
    for rank, part in zip(cut[rule].ranks, parts_of[rule], strict=True):
        memory, formula = rank.memory, part_bytes(part, large, in_flight=held[rank.rank])
        kept = memory.parameters + memory.gradients + memory.optimizer + memory.activations
        assert abs(kept - formula) < 1000  # each at its own peak
        now = {name: bytes_text(memory.at_peak[name]) for name in ("activations", "temporary")}
        print(
            f"{rule:<8} stage {rank.rank}: bar {bytes_text(formula)}, peak {bytes_text(memory.peak)}; "
            f"at that moment {now['activations']:>8} activations, {now['temporary']:>8} temporary"
        )
print(
    f"the vocabulary's matrix: {bytes_text(4 * large.vocab * large.hidden)} · {cut['memory'].source}"
)

# %% [markdown]
# Each category reaches what the bar says (the cell asserts it), but not all at one moment. Where activations are 0 B at the
# peak, that is in the optimizer's step: AdamW's intermediate results are as large as the matrix it works on. Where the peak
# lies *below* the bar, some activations were gone before the last gradient was there.
#
# A second copy costs messages, too:

# %% tags=["answer"]
tied = cut["uniform"].ranks[0].row("tied", "all_reduce").wire
print(f"over one cut:        {bytes_text(crossed)} a step, both ways")
print(f"of the tied matrix:  {bytes_text(tied)} a step from each of its two ends")
assert tied == 4 * large.vocab * large.hidden > crossed

# %% [markdown]
# `V·h` numbers, once a step: a larger batch makes the first number larger, and not the second.
#
# ## Explain: memory has a second imbalance
#
# The pictures above held 4, 3, 2, 1 micro-batches on stages 0 to 3. The schedule 1F1B sends work into the pipeline until
# the first backward comes back: the first stage has to wait longest for it. Count it from the measured activations:

# %%
counted = []
for rank, part in zip(cut["uniform"].ranks, parts_of["uniform"], strict=True):
    one = sum(piece.activations for piece in part.pieces(pieces(large)))
    counted.append(rank.memory.activations / one)
    print(f"stage {rank.rank} ({part}): {bytes_text(rank.memory.activations)} kept at its peak, "
          f"{counted[-1]:.2f} micro-batches of {bytes_text(one)}")  # fmt: skip
print(cut["uniform"].source)
assert [round(n, 2) for n in counted] == [4, 3, 2, 1] == held

# %% [markdown]
# ## Explain: the slowest stage sets the pace
#
# Where it stands matters little. Below, four stages work on 8 micro-batches; forward takes 1, backward 2, and one stage takes
# twice as long. First it is stage 0, then stage 3. Who waits?

# %%
from pcourse.cost.simulate import simulate
from pcourse.parallel.schedules import make_schedule


def with_slow(stage):
    times = [2.0 if i == stage else 1.0 for i in range(4)]
    return simulate(make_schedule("1f1b", 4, 8), times, times, times)


slow = [with_slow(stage) for stage in range(4)]
plots.pipeline(
    slow[0], slow[3], names=["stage 0 is slow", "stage 3 is slow"], unit="forwards of a fast stage",
    title="The slowest stage sets the pace",
)  # fmt: skip

# %%
even = with_slow(None).step_seconds
print(f"no stage slow: a step takes {even:g}")
for stage, run in enumerate(slow):
    idle = [1 - busy / run.step_seconds for busy in run.busy]
    shares = ", ".join(f"{share:.0%}" for share in idle)
    print(f"stage {stage} slow: a step takes {run.step_seconds:g}; stages 0 to 3 are idle {shares}")
    assert (
        run.step_seconds > 1.5 * even
        and min(idle[:stage] + idle[stage + 1 :]) > 0.5 > 0.2 > idle[stage]
    )
print("predicted from a walk of the schedule")

# %% [markdown]
# *All* the others wait, before and after it. The step takes more than half as long again, though three of four ranks have no
# more to do than before. Is that so in a run? Below, four real processes with real messages, *paced*: each compute sleeps until
# its time is over, 10 ms forward and 20 ms backward, and twice that on one stage.

# %%
thin, step = model.but(layers=4, hidden=32, sequence=16), TrainConfig(batch=8, steps=1, warmup=0)
four = ParallelConfig(pp=4, micro_batches=8)
for stage in (None, 0, 3):
    pace = [0.02 if i == stage else 0.01 for i in range(4)]
    run = measure(thin, four, step, clock="paced", pace=pace)
    walked = (even if stage is None else slow[stage].step_seconds) * 0.01
    print(f"stage {stage} slow: {seconds_text(run.step_seconds)}, walked {seconds_text(walked)}")
    assert not run.valid or abs(run.step_seconds / walked - 1) < 0.02
print(run.source)

# %% [markdown]
# And in your own unpaced runs, what each stage computed for a micro-batch:

# %% tags=["answer"]
from pcourse.cost.stage_times import stage_times

for rule, report in cut.items():
    times = stage_times(report)
    busy = [sum(both) for both in zip(times["forward"], times["backward_input"], strict=True)]
    shares = ", ".join(map(seconds_text, busy))
    print(f"{rule:<8} stages 0 to 3: {shares}; slowest {4 * max(busy) / sum(busy):.2f} × the mean")
    print(f"{'':<8} step {seconds_text(report.step_seconds)}")
print(cut["memory"].source)

# %% [markdown]
# If your machine has fewer cores than stages, they take turns on them, and its step says little about four devices.
#
# ## What is heavy in a layer?
#
# You cut *between* layers, so what is inside one does not change the cut. Still, an article says that attention is the heavy
# part. PyTorch can count the FLOPs of a real forward pass:

# %%
from torch.utils.flop_counter import FlopCounterMode


def counted_flops(module, x):
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()


heavier = {}
for s in (64, 256, 512):
    block, x = build(model.but(sequence=s)).blocks[0], torch.randn(1, s, model.hidden)
    flops = {name: counted_flops(getattr(block, name), x) for name in ("attention", "mlp")}
    heavier[s / model.hidden] = flops["attention"] / flops["mlp"]
    h = model.hidden
    assert flops == {"attention": 8 * s * h * h + 4 * s * s * h, "mlp": 16 * s * h * h}
    print(
        f"s = {s / h:g} h: attention {flops['attention'] / 1e6:6.1f} MFLOP, MLP {flops['mlp'] / 1e6:6.1f}"
    )

# %% [markdown]
# Attention takes `8sh² + 4s²h`, the MLP `16sh²`: they are equal at `s = 2h`. With h = 4,096 that is a context of 8,192.
#
# And how heavy is a real vocabulary? One embedding, in layers, from the published sizes:

# %%
published = {  # layers, hidden, heads, kv_heads, ffn, vocabulary
    "Llama-2-7B": (32, 4096, 32, 32, 11008, 32_000),
    "Llama-3-8B": (32, 4096, 32, 8, 14336, 128_256),
    "Llama-3-70B": (80, 8192, 64, 8, 28672, 128_256),
}
weighs = {}
for name, (layers, h, heads, kv, ffn, vocab) in published.items():
    layer = 2 * h * h + 2 * h * (h // heads) * kv + 3 * h * ffn + 2 * h
    weighs[name] = vocab * h / layer
    share = vocab * h / (2 * vocab * h + layers * layer + h)
    logits = 4 * 4096 * vocab  # one sequence of 4,096 in float32
    print(
        f"{name:<12} one embedding = {weighs[name]:.2f} layers, {share:.1%} of the model; logits {bytes_text(logits)}"
    )
print("predicted from the published sizes; embedding and head are not tied")
assert min(weighs.values()) < 1 < max(weighs.values())

# %% [markdown]
# It depends on the model: below one layer, or more than two. That is why people give the first and the last stage a layer
# fewer, and why a rule that weighs beats one that counts.
#
# ## The code
#
# A chunk is the model between two cuts. A message leaves as soon as it is made and arrives while the stage computes.

# %%
from pcourse.parallel.pipeline import Pipeline, TiedGradients
from pcourse.parallel.stage import Chunk

show_source(Chunk, Pipeline._receive, Pipeline._send, TiedGradients)

# %% [markdown]
# ## Prove it
#
# The embedding stage, the head stage, uneven micro-batches, a tied matrix in two copies: loss, every gradient, the norm and
# the weights after three steps, against the unsplit model.

# %%
small = ModelConfig(layers=4, hidden=32, heads=4, sequence=16, vocab=512)
split = ParallelConfig(pp=2, partition="memory", micro_batches=3)
_, small_parts = stages_of(small, split, TrainConfig(batch=5))
print(" | ".join(map(str, small_parts)))
proof = prove(small, split, TrainConfig(batch=5))  # micro-batches of 2, 2 and 1 sequences
print(proof)
assert proof.holds

# %% [markdown]
# ## Break it
#
# Three faults that people really make. Predict for each which line betrays it; then run the cell.

# %%
from dataclasses import replace
from unittest.mock import patch


def loses_a_layer(*settings):
    schedule, (first, *others) = stages_of(*settings)
    return schedule, (replace(first, layers=first.layers[:-1]), *others)


faults = {
    "the layer before the cut is on no stage": ("pcourse.train.stages_of", loses_a_layer),
    "the two copies' gradients are not summed": (
        "pcourse.parallel.pipeline.TiedGradients.__call__", lambda self, gradient: None),
    "the norm counts both copies": ("pcourse.train.is_copy", lambda parameter: False),
}  # fmt: skip
betrayed = {}
for fault, (where, broken) in faults.items():
    with patch(where, broken):
        broken_proof = prove(small, split, TrainConfig(batch=5))
    print(f"{fault}:\n{broken_proof}\n")
    lines = broken_proof.loss, broken_proof.gradients, broken_proof.gradient_norm
    betrayed[fault] = [difference > 1e-6 for difference in lines]
assert list(betrayed.values()) == [[True, True, True], [False, True, True], [False, False, True]]

# %% [markdown]
# A layer lost is in the loss already. A tied matrix whose gradients are not summed leaves the first loss alone: each copy has
# only the gradient of its own end, and from the first step on the two drift apart. A norm that counts a copy shows nowhere
# else, until you clip.
#
# ## Exercise
#
# [A partition that meets a memory limit](../exercises/04_partition.ipynb), 40 minutes: the fastest cut that fits. Do it
# before you open the next cell: the package's own rule is a relative of the answer.

# %% tags=["answer"]
from pcourse.parallel import partition as rules

show_source(rules.balance, rules._best_cuts)

# %% [markdown]
# ## In production
#
# | here | Megatron-LM | DeepSpeed | PyTorch |
# |---|---|---|---|
# | `pp=4` | `--pipeline-model-parallel-size 4` | `PipelineModule(…, num_stages=4)` | a stage for each rank |
# | `Chunk` | `TransformerBlock` | `PipelineModule` | `PipelineStage` |
# | `uniform` | the default | `partition_method="uniform"` | |
# | by weight | `--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split` | `partition_method="parameters"`, the default | |
# | by hand | `--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers` | | `pipeline(…, split_spec={"layers.4": SplitPoint.BEGINNING})` |
# | tied matrix | summed over the embedding group | `TiedLayerSpec` | yours to sum |
#
# Megatron's two `account-for` flags count the embedding, and the loss, as one layer each: you saw that it may be less than
# one, or five. The same stages through `torch.distributed.pipelining`, beside ours, in one run:

# %%
from functools import partial

from pcourse.native.beside import beside
from pcourse.native.pipeline import pipeline_sides

sides = partial(pipeline_sides, parallel=ParallelConfig(pp=2, micro_batches=4, partition="memory"))
with World(2, backend="gloo") as world, world.take_turns(print):
    result = world.run(beside, model, train, 15, sides, timeout=120)[0]
print(result.table("torch's, stage 0"))

# %% [markdown]
# ## The articles said
#
# Five sentences. You have the numbers by now: lock your verdict, then let the next cell compute it.

# %%
said = {
    "A09": "“Pipeline parallelism transfers an activation once per micro-batch.”",
    "A10": "“Uneven stages leave the early cards busy and the later cards idle.”",
    "A42": "“Split by compute: attention is heavy, LayerNorm is light.”",
    "A43": "“Embedding and output head are the memory hogs: place them separately.”",
    "A48": "“Tensor parallelism moves much, pipeline parallelism little: only activations.”",
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

messages = crossed / (train.batch * model.sequence * model.hidden * 4)
claims["A09"].score(
    "holds" if messages == 1 else "in part",
    f"{messages:g} × b·s·h cross a cut for each micro-batch: the activation, and its gradient back",
    source=two,
)
late, early = slow[0].busy[3] / slow[0].step_seconds, slow[3].busy[0] / slow[3].step_seconds
claims["A10"].score(
    "in part" if late < 0.5 and early < 0.5 else "holds",
    f"stage 0 slow: stage 3 idles {1 - late:.0%}; stage 3 slow: stage 0 idles {1 - early:.0%}",
    source="predicted from a walk of the schedule",
)
claims["A42"].score(
    "in part" if min(heavier.values()) < 1 < max(heavier.values()) else "wrong",
    f"attention/MLP: {heavier[0.5]:.2f} at s = h/2, {heavier[2]:.2f} at 2h, {heavier[4]:.2f} at 4h; "
    f"and you cut between layers: a head of {rows['head'].flops / rows['layer 0'].flops:.1f} layers weighs more",
)
claims["A43"].score(
    "in part" if min(weighs.values()) < 1 < max(weighs.values()) else "holds",
    ", ".join(f"{name}: {count:.2f} layers" for name, count in weighs.items()),
)
claims["A48"].score(
    "holds" if min(ratios.values()) > 1 and tied < crossed else "in part",
    ", ".join(f"{ratio:g} times with {count} layer(s) a stage" for count, ratio in ratios.items())
    + f"; but not only activations: their gradients, and of a tied matrix {bytes_text(tied)}",
)

# %% [markdown]
# ## Three questions
#
# **1.** 12 layers on 5 stages, `uniform`: which stages get three layers, and why those?
# <details><summary>Answer</summary>
#
# Two in the middle: the ends hold the embedding and the head already. Try
# `[str(part) for part in partition(model, 5)]`.
# </details>
#
# **2.** You double the number of micro-batches and halve their size. What happens to the bytes over a cut, and to the calls?
# <details><summary>Answer</summary>
#
# The bytes stay: every sequence crosses once each way. The messages are twice as many and half as large, so latency weighs
# more. Stage 0 still holds `min(m, p)` micro-batches, each half as large.
# </details>
#
# **3.** Stage 0 does not fit. You move a layer from it to stage 2, and the step gets no slower. When is that so?
# <details><summary>Answer</summary>
#
# When stage 2 stays at or below the slowest stage. Only the slowest sets the pace, so every other stage has slack that costs
# nothing to use. The exercise looks for just that.
# </details>
#
# **Next**, lesson 05: in which order the stages work, and how much of the time they wait.
