# %% [markdown]
# # 01 · Where memory goes
#
# 40 minutes, after lesson 00. One process, no GPU. Bytes are counted, so a busy machine changes none of them.
#
# **You train a model that barely fits. Which bytes fill the device in one training step, how many of them could you have
# told beforehand, and when are they most?** Every later lesson cuts some of these bytes into pieces. So first: what are they?

# %%
import torch

from pcourse import ModelConfig, ParallelConfig, TrainConfig, World, measure
from pcourse.lab import Choose, Panel, Predict, bytes_text, plots, show_source

model, alone = ModelConfig(layers=4, hidden=128, heads=8, sequence=128), ParallelConfig()
train = TrainConfig(batch=4, steps=3)
report = measure(model, alone, train)
plots.ledger(report)

# %% [markdown]
# This is the **ledger** of one step of a small GPT. Five categories:
#
# - **parameters**: the weights,
# - **gradients**: one number for each parameter,
# - **optimizer**: what AdamW remembers of earlier steps. These three are the **model states**.
# - **activations**: what the forward pass leaves behind, because the backward pass needs it,
# - **temporary**: all else. It lives inside one operation, or a few.
#
# Each category stands at its own peak. They do not peak together, so the black line, the peak of their sum, is lower.

# %% [markdown]
# ## Look at what there is
#
# Nothing is cut yet, so these are whole. The first layer's matrices, the gradient of each, and what AdamW keeps beside it:

# %%
from pcourse.data import batch
from pcourse.model import build

plain = build(model)
adam = torch.optim.AdamW(plain.parameters(), lr=1e-3)
tokens, targets = batch(model, train, step=0)
plain.loss(tokens, targets).backward()
adam.step()
for name, p in plain.named_parameters():
    if name.startswith("blocks.0") and p.dim() == 2:
        state = ", ".join(f"{key} {bytes_text(s.nbytes)}" for key, s in adam.state[p].items())
        matrix, own, grad = name.split(".")[-2], bytes_text(p.nbytes), bytes_text(p.grad.nbytes)
        print(f"{matrix:<5}{list(p.shape)!s:<11}{own:>9} | gradient {grad:>8} | {state}")

# %%
parameters = sum(p.numel() for p in plain.parameters())
total = sum(p.nbytes for p in plain.parameters())
print(f"{parameters:,} parameters, {bytes_text(total)} in float32")
print(f"the ledger's parameters: {bytes_text(report.ranks[0].memory.parameters)}, {report.source}")
assert total == report.ranks[0].memory.parameters == 4 * parameters

# %% [markdown]
# `exp_avg` is a running mean of the gradient, `exp_avg_sq` one of its square. Each has the shape of the parameter. `step` is a
# counter; the ledger leaves it out.
#
# ## Predict
#
# Two numbers. For the second, think of what attention makes: for each of `a` heads, each of `s` tokens gets a **score** for
# each of `s` tokens. With *explicit* attention these `b·a·s²` numbers are kept for backward.

# %%
states = Predict(
    "All in float32, with AdamW: how many bytes of model states for one parameter?",
    unit="bytes",
    name="bytes of states per parameter",
)
longer = Predict(
    "Sequences of 256 instead of 128, explicit attention: by what factor do activations grow?",
    unit="times",
    name="activations from s 128 to 256",
)
display(states, longer)

# %% [markdown]
# ## Run
#
# Lock both. Every setting really runs, the last two steps with a meter on. The paler bar is a formula: `=` means equal to the
# byte, `≈` near. The table below says what activations are made of.

# %%
from pcourse.cost.memory import activations, memory
from pcourse.lab.table import table


def made_of(model, *others):
    kept = activations(model, *others)
    scores = "b·a·s²" if model.attention == "explicit" else "b·a·s, their sums"
    grows = {"attention: scores": scores, "logits: loss": "b·s·V", "embedding": "b·s"}
    rows = [
        [part, bytes_text(n), f"{n / kept.total:.0%}", grows.get(part, "b·s·h")]
        for part, n in kept.parts.items()
    ]
    head, source = ["part", "bytes", "share", "grows as"], "predicted from pcourse.cost.memory"
    return table("What activations are made of", head, rows, source)


# %% tags=["answer"]
states.require()
panel = Panel(
    model,
    alone,
    TrainConfig(batch=4, steps=1),
    controls={
        "batch": [2, 4, 8],
        "sequence": [64, 128, 256],
        "hidden": [64, 128, 256],
        "attention": ["explicit", "fused"],
        "dtype": ["float32", "bfloat16"],
        "optimizer": ["adamw", "sgd"],
    },
    draw=lambda r, _: [plots.ledger(r, memory), made_of(r.model, r.parallel, r.train)],
    after=longer,
    title="The ledger of one step",
)
panel

# %% [markdown]
# Try: `batch` twice as large. Then `hidden` twice as large. Which categories follow which? Then `sgd`, then `fused`.
#
# ## Explain: model states
#
# Count the parameters, and divide. Does it matter how the model is shaped, or how much it is fed?

# %% tags=["answer"]
await panel.finished()
once = TrainConfig(batch=4, steps=1, warmup=0)
measured = {
    "as above": report,
    "hidden 64": measure(model.but(hidden=64), alone, once),
    "8 layers": measure(model.but(layers=8), alone, once),
    "batch 8": measure(model, alone, TrainConfig(batch=8, steps=1, warmup=0)),
}
each = []
for name, r in measured.items():
    count, held = sum(p.numel() for p in build(r.model).parameters()), r.ranks[0].memory
    by = [n / count for n in (held.parameters, held.gradients, held.optimizer)]
    each.append(sum(by))
    print(f"{name:<10}{count:>10,} parameters: {by[0]:g} + {by[1]:g} + {by[2]:g} bytes for each")
states.score(
    each[0],
    {4: "That is the parameter alone.",
     8: "That is parameter and gradient. AdamW keeps two numbers more.",
     12: "AdamW keeps two numbers for each parameter, not one."},
    source=list(measured.values()),
)  # fmt: skip
assert set(each) == {16}

# %% [markdown]
# So for states you need no run: multiply. In float32 a billion parameters are 16 GB, before the first token.
#
# ## Explain: activations
#
# They depend on the work. The points, joined by lines, are measured; the dashed curve is the formula, which need not be straight
# between them.

# %% tags=["answer"]
lengths = [64, 128, 256, 512]
runs = {
    kind: [measure(model.but(sequence=s, attention=kind), alone, once) for s in lengths]
    for kind in ("explicit", "fused")
}
kept = {kind: [r.ranks[0].memory.activations for r in row] for kind, row in runs.items()}
plots.tradeoff(
    lengths,
    kept,
    x="sequence",
    y="activations",
    unit="bytes",
    formula=(
        "formula, explicit",
        lambda s: activations(model.but(sequence=round(s)), alone, once).total,
    ),
    source=[r for row in runs.values() for r in row],
    title="Activations against sequence",
)

# %% tags=["answer"]
explicit, fused = (
    [b / a for a, b in zip(kept[k], kept[k][1:], strict=False)] for k in ("explicit", "fused")
)
longer.score(
    explicit[1],
    {2: "All but the scores double. The scores grow fourfold.",
     4: "Only the scores grow fourfold. All else doubles."},
    source=runs["explicit"][2],
)  # fmt: skip
for name, growth in (("explicit", explicit), ("fused", fused)):
    print(f"{name:<9} s 64 → 128 → 256 → 512:", ", ".join(f"{g:.2f} times" for g in growth))
assert explicit == sorted(explicit) and min(explicit) > 2 and max(explicit) < 4
assert all(1.95 < g < 2.05 for g in fused)

# %% [markdown]
# Each doubling of `s` costs more than the one before: the scores' `b·a·s²` overtake the rest, `b·s·h`. *Fused* attention
# (FlashAttention's way) computes scores tile by tile, keeps none, and computes them again in backward. Then twice the sequence
# is twice the activations. So is twice the batch:

# %% tags=["answer"]
wider = measured["batch 8"]
twice, single = wider.ranks[0].memory.activations, kept["explicit"][1]
print(f"batch 4 → 8: {twice / single:.3f} times, {wider.source}")
assert 1.99 < twice / single < 2.01 and twice == activations(model, alone, wider.train).total
layer = activations(model, alone, train).pieces["layer 0"]
b, s, h, a = train.batch, model.sequence, model.hidden, model.heads
print(
    f"by formula a layer keeps {layer / (4 * b * s * h):.2f} × bsh numbers, {a * s / h:g} of them scores"
)

# %% [markdown]
# ## Explain: when is it most?
#
# A step has three parts: forward, backward, and the optimizer's step.

# %%
when = Choose(
    "When is the sum of all five largest?",
    [
        "in the middle of forward",
        "near the turn from forward to backward",
        "where backward ends, when all gradients are there",
        "in the optimizer's step",
    ],
    name="when is the peak",
)
when

# %% [markdown]
# The meter sees every operation of PyTorch. This one also writes down what it had counted after each:

# %%
from pcourse.meter import MemoryMeter
from pcourse.train import Trainer


class Diary(MemoryMeter):
    def __torch_dispatch__(self, *operation):
        result = super().__torch_dispatch__(*operation)
        self.pages.append((self.clock.now(), dict(self.bytes)))
        return result


def diary_of_a_step(comm, model, parallel, train):
    Diary.clock, Diary.pages = comm.clock, []
    with Diary() as diary:
        trainer = Trainer(comm, model, parallel, train, diary)
        trainer.step(0)  # makes the optimizer's state
        diary.pages.clear()
        comm.recorder.take()
        trainer.step(1)
    return diary.pages, comm.recorder.take()[1]


# %% tags=["answer"]
when.require()
here = "measured on a CPU rank in this process"
pages, passes = World(1, "threads").run(diary_of_a_step, model, alone, train)[0]
plots.course(pages, passes, here)

# %% tags=["answer"]
most, at, held = max((sum(held.values()), moment, held) for moment, held in pages)
forward, backward, step = passes
place = (at - forward.start) / (forward.end - forward.start)
if at > forward.end:
    place = 1 + (at - backward.start) / (backward.end - backward.start)
where = 0 if place < 0.75 else 1 if place < 1.5 else 2 if place < 2 else 3
split = ", ".join(f"{name} {bytes_text(n)}" for name, n in held.items())
when.score(when.options[where], f"{bytes_text(most)} = {split}", source=here)
assert most == report.ranks[0].memory.peak or "CPU" not in report.device

# %% [markdown]
# Forward piles activations up, layer by layer. Backward takes them down again, last layer first, and leaves gradients, which
# are smaller here. So the peak is near the turn. What stands right *at* the turn depends on the vocabulary. The same step with
# one of 8,192:

# %% tags=["answer"]
large = model.but(vocab=8192)
pages_large, passes_large = World(1, "threads").run(diary_of_a_step, large, alone, train)[0]
plots.course(
    pages_large, passes_large, here, "Memory over one step, with 8,192 tokens to choose from"
)

# %% tags=["answer"]
most_large, held_large = max(
    ((sum(held.values()), held) for _, held in pages_large), key=lambda page: page[0]
)
logits = 4 * train.batch * model.sequence * large.vocab
print(f"b·s·V numbers in float32 are {bytes_text(logits)}. At the peak, {here}:")
more = held_large["activations"] - max(held["activations"] for _, held in pages)
for name, n in (("temporary", held_large["temporary"]), ("more activations than above", more)):
    print(f"{name:<28}{bytes_text(n):>9}, {n / logits:.2f} × bsV numbers")
assert 1.99 < held_large["temporary"] / logits < 2.01 and 0.95 < more / logits < 1

# %% [markdown]
# The **logits** are one number for each token and each word of the vocabulary. Their log-softmax is kept: that is the step up.
# Then backward makes the gradient of that, and from it the gradient of the logits, each as large again: that is the spike.
#
# What else is temporary? The formula knows the large ones by name. They do not come at one time:

# %%
from pcourse.cost.memory import residual

both = [residual(m, alone, train) for m in (model, large)]
print(f"{'':<26}{'V = 256':>10}{'V = 8,192':>11}")
for what in both[0]:
    if any(named[what] for named in both):
        print(f"{what:<26}{bytes_text(both[0][what]):>10}{bytes_text(both[1][what]):>11}")
most_temporary = [max(held["temporary"] for _, held in diary) for diary in (pages, pages_large)]
print(
    f"{'measured, at most':<26}{bytes_text(most_temporary[0]):>10}{bytes_text(most_temporary[1]):>11}"
)
print("predicted from the formulas of pcourse.cost.temporary; the last line", here)
for named, seen in zip(both, most_temporary, strict=True):
    assert abs(seen / max(named.values()) - 1) < 0.01

# %% [markdown]
# ## Mixed precision
#
# A bfloat16 has two bytes, so what is kept in it is half as large. Activations are. What of the states?

# %%
mixed = Predict(
    "Weights and gradients in bfloat16; AdamW in float32, with a float32 copy of the weights: "
    "how many bytes of states for one parameter?",
    unit="bytes",
    name="bytes of states, mixed precision",
)
mixed

# %%
from pcourse.cost.states import bytes_per_parameter

recipes = {  # name: dtype, and what differs from the default
    "all in float32": ("float32", {}),
    "all in bfloat16": ("bfloat16", {}),
    "bf16, master copy": ("bfloat16", {"master_weights": True}),
    "… and float32 gradients": ("bfloat16", {"master_weights": True, "grad_dtype": "float32"}),
    "… and both gradients": ("bfloat16", {"master_weights": True, "grad_dtype": "both"}),
}

# %% tags=["answer"]
mixed.require()
precise, found = {}, {}
print(
    f"{'measured':<26}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'states':>9}{'formula':>9}"
)
for name, (dtype, how) in recipes.items():
    precise[name] = measure(model.but(dtype=dtype), ParallelConfig(**how), once)
    held, formula = precise[name].ranks[0].memory, bytes_per_parameter(dtype, "adamw", **how)
    by = [n / parameters for n in (held.parameters, held.gradients, held.optimizer)]
    found[name] = sum(by)
    print(f"{name:<26}{by[0]:>12g}{by[1]:>12g}{by[2]:>12g}{sum(by):>9g}{sum(formula):>9}")
    assert by == list(formula)
print("bytes for each parameter,", precise[name].source)

# %% tags=["answer"]
mixed.score(
    found["bf16, master copy"],
    {8: "That is all in bfloat16.",
     12: "Weight 2, gradient 2, AdamW's two numbers 8, and the copy is 4 more.",
     18: "That is with gradients in float32."},
    source=precise["bf16, master copy"],
)  # fmt: skip
for name in ("all in float32", "bf16, master copy"):
    held = precise[name].ranks[0].memory
    print(f"{name:<20} activations {bytes_text(held.activations)}, peak {bytes_text(held.peak)}")
whole, half = (precise[n].ranks[0].memory.activations for n in list(recipes)[:3:2])
assert found["bf16, master copy"] == found["all in float32"] and half < 0.55 * whole

# %% [markdown]
# With a master copy, mixed precision saves **no** states: it moves them. What it saves is activations, and time on hardware that
# is faster in 16 bits. Float32 gradients, which many systems use to add up micro-batches, cost 2 bytes more; if both
# kinds are held at once, 4.
#
# ## Why a master copy?
#
# All in bfloat16 takes half as much. What is lost? A bfloat16 has 8 binary digits. The next number after 1 is:

# %%
print("after 1 comes", 1 + torch.finfo(torch.bfloat16).eps, "in bfloat16")
narrow, wide = torch.ones((), dtype=torch.bfloat16), torch.ones(())
for _ in range(1000):
    narrow += 1e-4
    wide += 1e-4
print(f"1 + 1000 × 0.0001 = {narrow.item():.4f} in bfloat16, {wide.item():.4f} in float32")
assert narrow == 1 and abs(wide - 1.1) < 1e-3

# %% [markdown]
# Each sum is rounded back to 1. A weight that is stepped in bfloat16 stands still, as long as the steps are small beside it. Does
# training suffer? Three runs of 100 steps from the same weights on the same text, with a small learning rate:

# %%
small = ModelConfig(layers=2, hidden=64, heads=4, sequence=64)
slow = TrainConfig(batch=4, steps=100, warmup=0, learning_rate=1e-4)
losses = {}
for name in ("all in float32", "all in bfloat16", "bf16, master copy"):
    dtype, how = recipes[name]
    trained = measure(small.but(dtype=dtype), ParallelConfig(**how), slow)
    losses[name] = sum(trained.loss[-20:]) / 20
    gap = losses[name] - losses["all in float32"]
    print(f"{name:<20} loss of the last 20 steps {losses[name]:.4f}, {gap:+.4f} from float32")
print(trained.source)
stuck, copied = (losses[n] - losses["all in float32"] for n in list(recipes)[1:3])
assert stuck > 0.01 and stuck > 5 * abs(copied)

# %% [markdown]
# Here it does: without the copy the model learns more slowly. With it the loss is that of float32, nearly. And learning
# rates fall towards the end of a training: the steps get smaller, and more of them are lost.

# %% [markdown]
# ## The code
#
# The meter's heart: what each operation returns is counted when it is born, and taken off when its memory is freed. Autograd
# tells what it keeps. Then the formulas: what one layer keeps, part by part, and what the states of one parameter take.

# %%
from pcourse.cost.activations import kept_by_layer

show_source(MemoryMeter.__torch_dispatch__, MemoryMeter.see, MemoryMeter.keep, MemoryMeter.saving)
show_source(kept_by_layer)

# %% tags=["answer"]
show_source(bytes_per_parameter)

# %% [markdown]
# ## Prove it
#
# Seven settings. Parameters, gradients, optimizer and activations must equal the formula to the byte. Temporary memory and the
# peak need not: the formula names the large parts alone.

# %%
from pcourse.train import memory_pass

tried = {
    "as above": (model, {}, {}),
    "fused": (model.but(attention="fused"), {}, {}),
    "bf16, master copy": (model.but(dtype="bfloat16"), recipes["bf16, master copy"][1], {}),
    "sgd": (model, {}, {"optimizer": "sgd"}),
    "dropout": (model.but(dropout=0.1), {}, {}),
    "4 heads, 2 key heads": (model.but(heads=4, kv_heads=2), {}, {}),
    "4 micro-batches of 2": (model, {"micro_batches": 4}, {"batch": 8}),
}
for name, (m, how, steps) in tried.items():
    settings = m, ParallelConfig(**how), TrainConfig(**{"batch": 4} | steps)
    counted = World(1, "threads").run(memory_pass, *settings, lambda: None)[0]
    formula = memory(*settings)
    for exact in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(counted, exact) == getattr(formula, exact), (name, exact)
    off = {n: getattr(counted, n) / getattr(formula, n) - 1 for n in ("temporary", "peak")}
    print(
        f"{name:<22} four categories equal; temporary {off['temporary']:+.1%}, peak {off['peak']:+.1%}"
    )
    assert max(abs(n) for n in off.values()) < 0.05
print(here, "against the formulas of pcourse.cost")

# %% [markdown]
# What does the meter *not* see? Whatever is not a PyTorch tensor: Python and the libraries, the workspace of one operation, and
# memory that an allocator holds in reserve. The operating system sees all of it:

# %%
import resource
import sys


def so_far():
    """The most bytes that this process has held, as the system counts them; Linux does in KiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def resident(comm):
    before, peak = so_far(), memory_pass(comm, model, alone, train, lambda: None).peak
    return before, so_far(), peak


before, after, peak = World(1).run(resident)[0]
print(
    f"a rank's process holds {bytes_text(before)} before there is a model, at most {bytes_text(after)} in two steps"
)
print(f"the meter's peak: {bytes_text(peak)}; measured on one CPU rank")
assert before > peak

# %% [markdown]
# ## In production
#
# On a GPU people quote three numbers for "memory", and they are three different things:
#
# | number | counts | here |
# |---|---|---|
# | `torch.cuda.max_memory_allocated()` | live tensors at their most, each rounded up to whole blocks | `peak`, nearly |
# | `torch.cuda.max_memory_reserved()` | what PyTorch's allocator took from the driver: live tensors, and free blocks it keeps | not in the ledger |
# | `nvidia-smi` | that, and the CUDA context, libraries such as NCCL, and every other process on the GPU | like the process above |
#
# So `nvidia-smi` can say *full* while the allocator has free blocks; and only the first can be held against a formula.
# The saved outputs of this lesson are from a machine without a GPU. On one with a GPU, a report's notes have the
# allocator's own peak beside the meter's:

# %%
for line in report.notes or ["no GPU here: " + report.source]:
    print(line)

# %% [markdown]
# What others call it:
#
# - *the ledger, by formula*: `report_theoretical_memory` in Megatron-LM; in DeepSpeed
#   `estimate_zero3_model_states_mem_needs_all_live`, which is states alone, and leaves activations to you.
# - *the ledger, measured*: `report_memory` in Megatron-LM, `see_memory_usage` in DeepSpeed, and in PyTorch
#   `torch.cuda.memory._record_memory_history`, whose snapshots can be drawn over time.
# - *master_weights=True*: `--bf16` in Megatron-LM, `"bf16": {"enabled": true}` in DeepSpeed. In FSDP2 the parameters
#   themselves stay float32, and `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` casts them for use.
# - *grad_dtype="float32"*: `--accumulate-allreduce-grads-in-fp32` in Megatron-LM, `"data_types": {"grad_accum_dtype":
#   "fp32"}` in DeepSpeed, `MixedPrecisionPolicy(reduce_dtype=torch.float32)` in FSDP2.
#
# Is our meter right? Here is a count of activations that shares no code with it: PyTorch's own hook, on a plain model and a plain
# forward pass. It notes each storage that autograd saves, once.

# %%
saved = {}


def note(tensor):
    storage = tensor.untyped_storage()
    saved[storage.data_ptr()] = storage  # kept, so that no other storage gets its address
    return tensor


fresh = build(model)
tokens, targets = batch(model, train, step=1)
with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
    loss = fresh.loss(tokens, targets)
weights = {p.untyped_storage().data_ptr() for p in fresh.parameters()}
by_hand = sum(storage.nbytes() for at, storage in saved.items() if at not in weights)
by_meter = max(held["activations"] for _, held in pages)
print(f"activations by PyTorch's hook: {by_hand:,} B; by the meter: {by_meter:,} B")
assert by_hand == by_meter

# %% [markdown]
# ## The articles said
#
# Four sentences from the two articles that this course grew from. Lock your verdicts; the cells after them compute each.

# %%
verdicts = ["holds", "in part", "wrong"]
asked = {
    "A30": ("“7B with Adam needs at least about 56 GB on one card.” Of what are these 56 GB?",
            list(recipes)),
    "A15": ("“A single A100 with 80 GB cannot hold a 13B model.”", verdicts),
    "A24": ("“Above 4,096 tokens activations can exceed the weights.”", verdicts),
    "A43": ("“Embedding and output head are the memory hogs.”", verdicts),
}  # fmt: skip
claims = {
    name: Choose(f"{name} {words}", options, name=f"{name}, in bytes")
    for name, (words, options) in asked.items()
}
display(*claims.values())

# %% [markdown]
# First the two about states: bytes for each parameter, as you measured them above, times the parameters.

# %% tags=["answer"]
claims["A30"].require()
claims["A15"].require()
gigabytes = {name: [size * each for size in (7, 13)] for name, each in found.items()}
print(f"{'GB of model states':<26}{'7B':>6}{'13B':>6}")
for name, (seven, thirteen) in gigabytes.items():
    print(f"{name:<26}{seven:>6g}{thirteen:>6g}")
of_56 = [name for name, (seven, _) in gigabytes.items() if seven == 56]
least = min(thirteen for _, thirteen in gigabytes.values())
weights = 2 * 13
claims["A30"].score(
    of_56[0],
    f"8 bytes each. With a master copy 7B takes {gigabytes['bf16, master copy'][0]:g} GB or more; "
    "activations come on top",
)
claims["A15"].score(
    "in part" if weights < 80 < least else "wrong" if least < 80 else "holds",
    f"the weights are {weights} GB in bfloat16, and fit; to train them takes {least:g} GB at the least",
    source="bytes for each parameter as measured above, times 13·10⁹",
)

# %% [markdown]
# Then activations beside weights, of our own GPT at published sizes: one sequence, all in bfloat16, no dropout. They are
# too large to run here; the formula is the one that you have just proved.

# %% tags=["answer"]
from pcourse.cost.memory import states as states_of

claims["A24"].require()
sizes = {"7B": (32, 4096, 32, 32_000), "175B": (96, 12288, 96, 50_257)}  # layers, hidden, heads, V
one, ratio = TrainConfig(batch=1), {}
for s in (2048, 4096, 8192):
    for name, (layers, h, a, vocab) in sizes.items():
        for kind in ("explicit", "fused"):
            big = ModelConfig(
                layers, h, a, vocab=vocab, sequence=s, attention=kind, dtype="bfloat16"
            )
            acts, held = activations(big, alone, one).total, states_of(big, alone, one)
            ratio[name, kind, s] = acts / held.parameters
    row = (f"{name} {kind} {ratio[name, kind, s]:.2f}" for name, kind, at in ratio if at == s)
    print(f"s = {s}: activations over weights:", ", ".join(row))
claims["A24"].score(
    "in part" if ratio["7B", "fused", 4096] > 1 > ratio["175B", "fused", 4096] else "holds",
    f"with fused attention {ratio['7B', 'fused', 4096]:.2f} times the weights for 7B, "
    f"{ratio['175B', 'fused', 4096]:.2f} for 175B; and twice the batch doubles both",
    source="predicted from the formulas of pcourse.cost.memory",
)

# %% [markdown]
# Last the hogs. What the vocabulary costs has two parts: the matrices, which are states, and the logits, which are activations
# and temporary memory.

# %% tags=["answer"]
claims["A43"].require()
published = {  # layers, hidden, heads, key heads, ffn, vocabulary, matrices of V·h
    "GPT-3": (96, 12288, 96, 96, 49152, 50_257, 1),
    "Llama-2-7B": (32, 4096, 32, 32, 11008, 32_000, 2),
    "Llama-3-8B": (32, 4096, 32, 8, 14336, 128_256, 2),
}
share = {}
for name, (layers, h, a, kv, ffn, vocab, matrices) in published.items():
    layer = 2 * h * h + 2 * h * h // a * kv + (2 if name == "GPT-3" else 3) * h * ffn
    share[name] = matrices * vocab * h / (matrices * vocab * h + layers * layer)
    ours = ModelConfig(layers, h, a, kv, ffn, vocab, 4096, attention="fused", dtype="bfloat16")
    keeps = activations(ours, alone, one).pieces["layer 0"]
    print(
        f"{name:<12}{share[name]:6.1%} of the states; of one sequence of 4,096 the layers keep"
        f" {bytes_text(layers * keeps)}, and 3 × bsV in float32 are {bytes_text(12 * 4096 * vocab)}"
    )
matrix, spike = 12 * large.vocab * large.hidden, more + held_large["temporary"]
print(
    f"measured above, V = 8,192, h = 128: {matrix / most_large:.0%} of the peak is the matrix with"
    f" AdamW's numbers, {spike / most_large:.0%} comes from the logits"
)
claims["A43"].score(
    "in part" if min(share.values()) < 0.05 < max(share.values()) else "holds",
    ", ".join(f"{name} {part:.1%}" for name, part in share.items())
    + "; the logits come on top, for a moment",
    source="predicted from the published sizes, of the matrices alone",
)

# %% [markdown]
# To place them apart, as the sentence goes on to advise, is a question of stages: lesson 04.
#
# ## Three questions
#
# **1.** You halve the batch, and the peak falls by far less than half. Why, and what would tell you so beforehand?
# <details><summary>Answer</summary>
#
# Only activations and temporary memory follow the batch. The states stay. Look at the ledger first: if states are most of it,
# a smaller batch will not save you. Sharing them out may: lesson 06.
# </details>
#
# **2.** You change from AdamW to SGD. What falls, and what does the peak do?
# <details><summary>Answer</summary>
#
# The optimizer's state is gone: 8 bytes for each parameter in float32. It is there all through a step, so here the
# peak falls by as much. Set `sgd` in the panel and compare the lines of its table.
# </details>
#
# **3.** `nvidia-smi` says 78 of 80 GB. Does the next, slightly longer sequence fit?
# <details><summary>Answer</summary>
#
# That number cannot tell you. It counts the free blocks that PyTorch's allocator holds, too. `torch.cuda.memory_allocated` is
# what is in use, and its `max_` what was needed; the formula says what the longer sequence adds.
# </details>
#
# **Next**: [02 · Talking between ranks](02_talking_between_ranks.ipynb). Then the cuts: 03 and 04 cut the weights and what is
# kept of them, 06 shares the states out over replicas, 07 drops activations and computes them again.
