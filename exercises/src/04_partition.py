# %% [markdown]
# # Exercise: a partition that meets a memory limit
#
# 40 minutes, after lesson 04. You need no GPU and no ranks: this one is arithmetic, and a little search.
#
# It trains what a cut is made of: what a stage holds at its peak, why the fullest stage decides whether a model fits and the
# slowest how fast it is, and how the best cut is found without trying them all.

# %% [markdown]
# ## The pieces
#
# A model is a row of pieces, and a cut may run between any two of them: embedding, layers, head. Each knows its
# `parameters` (a count), its `flops` for one micro-batch, and the bytes of `activations` that one micro-batch leaves for
# backward.

# %%
from pcourse.checks import partition
from pcourse.checks.partition import look
from pcourse.config import ModelConfig
from pcourse.cost.layers import pieces

model = ModelConfig(layers=4, hidden=128, heads=8, sequence=64, vocab=8192)
for piece in pieces(model):
    print(
        f"{piece.name:<10}{piece.parameters:>10,} parameters {piece.flops:>12,} FLOPs{piece.activations:>10,} bytes kept"
    )

# %% [markdown]
# ## Part 1: the bytes of a stage


# %%
def stage_bytes(pieces, in_flight, tied):
    """Bytes that a stage holds at its peak: model states, and the activations of the micro-batches in flight.

    pieces: those of this stage, in the order of the model; the embedding's .name is "embedding", the head's "head".
    in_flight: for how many micro-batches the stage holds activations at once.
    tied: how many numbers the matrix has that embedding and head share; 0 where each has its own. Both pieces count it
        among their parameters. A stage with one of them holds a whole copy, a stage with both of them one in all.
    For each parameter, in float32: itself, its gradient, and two numbers of AdamW. Temporary memory is left out.
    """
    ### BEGIN SOLUTION
    parameters = sum(piece.parameters for piece in pieces)
    if {"embedding", "head"} <= {piece.name for piece in pieces}:
        parameters -= tied
    return 16 * parameters + in_flight * sum(piece.activations for piece in pieces)
    ### END SOLUTION


# %% tags=["check"]
partition.stage_bytes(stage_bytes)

# %% [markdown]
# <details><summary>Hint 1: how many bytes is a parameter?</summary>
#
# Four numbers of 4 bytes. They are there once, however many micro-batches are under way.
# </details>
#
# <details><summary>Hint 2: when is the tied matrix counted too often?</summary>
#
# Only where embedding *and* head are among the pieces. Elsewhere the stage's own copy is all it has, and it is really there.
# </details>

# %% [markdown]
# ## Part 2: the cut
#
# In the schedule 1F1B stage i of p holds up to `p − i` micro-batches. So the same layer weighs more on stage 0 than on the last
# one: you cannot weigh the pieces once and for all.


# %%
def cut(pieces, stages, in_flight, tied, limit):
    """The fastest cut that fits: a list of `stages` ranges of indices of `pieces`; None if no cut fits.

    Each stage holds neighbours, at least one piece; every piece is on one stage, in the order of the model.
    Fits: on every stage i, stage_bytes of its pieces with in_flight[i] is at most `limit`.
    Fastest: the slowest stage, by the sum of its pieces' .flops, is as fast as can be. Of several such cuts any will do.
    May call: stage_bytes. The check goes up to 34 pieces on 8 stages; that is 4 million cuts, too many to try.
    """
    ### BEGIN SOLUTION
    best = {0: (0, [])}  # pieces placed so far -> (the slowest stage's FLOPs, the ranges)
    for stage in range(stages):
        extended = {}
        for start, (slowest, ranges) in best.items():
            for stop in range(start + 1, len(pieces) + 1):
                held = pieces[start:stop]
                if stage_bytes(held, in_flight[stage], tied) > limit:
                    break  # with one piece more it would not fit either
                value = max(slowest, sum(piece.flops for piece in held))
                if stop not in extended or value < extended[stop][0]:
                    extended[stop] = value, [*ranges, range(start, stop)]
        best = extended
    return best[len(pieces)][1] if len(pieces) in best else None
    ### END SOLUTION


# %% [markdown]
# Look before you check: the model of lesson 04 on four stages, 32 MiB each. The package's two rules know of no limit: one
# breaks it, one is slower than need be. Does yours find the place between?

# %%
look(cut)

# %% tags=["check"]
partition.cut(cut)

# %% [markdown]
# <details><summary>Hint 1: where do I begin?</summary>
#
# With one stage: the first `stop` pieces are on it, for each `stop` that fits. Then add a second stage after each of them,
# and so on. Keep for every `stop` only the best way to get there.
# </details>
#
# <details><summary>Hint 2: why is it enough to keep the best?</summary>
#
# What the first k stages hold matters to the rest only by where they stop. Two ways to place the same pieces on the same
# stages can be continued in the same ways, and the one with the faster slowest stage is never worse.
# </details>
#
# <details><summary>Hint 3: the shape of the loops</summary>
#
# `best = {0: (0, [])}`: pieces placed → (slowest stage so far, ranges). For each stage, for each `start` in `best`, for each
# `stop` after it: does `pieces[start:stop]` fit on this stage? Then `max` of what was and what this stage takes. After the
# last stage, look at `best[len(pieces)]`, if it is there.
# </details>
#
# <details><summary>Hint 4: it gives None where the check has a cut</summary>
#
# Exactly the limit fits: `<=`. With one stage, embedding and head share the tied matrix. And a cut that is slower than the
# fastest of all may be the fastest that fits: do not give up on it.
# </details>

# %% [markdown]
# ## What you can now explain
#
# - Why the fullest stage, and not the mean, decides whether a model fits.
# - Why activations weigh by stage, and model states do not.
# - What a tied matrix costs in two copies, and when it is one.
# - Why the fastest cut and the leanest cut differ, and what lies between them.
# - Why the best of C(33, 7) = 4,272,048 cuts is found in a few thousand steps.
