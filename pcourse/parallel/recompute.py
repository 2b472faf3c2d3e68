"""Activation recompute: keep what a piece of the model reads, and run the piece again when backward needs the rest.

    forward     x ─ piece ─ y            kept: x, instead of all that the piece's backward reads
    backward    dy ─ x ─ piece again ─ (what backward reads) ─ backward ─ dx

Full recompute takes a whole transformer layer for a piece (Chen et al. 2016), selective recompute the attention between
q, k, v and its output: the part whose 5as²b bytes grow with the square of the sequence while its work is small
(Korthikanti et al. 2022, section 5). The second run draws the same dropout masks, sends the same messages, and ends
as soon as it has made the last tensor that backward reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from pcourse.config import ModelConfig, ParallelConfig
from pcourse.cost.layers import pieces
from pcourse.parallel.stage import Stage


class Recomputed:
    """`run`, a function of tensors, of which backward finds nothing kept but the arguments.

    `around()` gives the context of the second run, which must be as the first was: it seeds the dropout. `meter` is a
    MemoryMeter that shall know what is kept.
    """

    def __init__(self, run: Callable, around: Callable = contextlib.nullcontext, meter=None):
        self.run, self.around, self.meter = run, around, meter

    def __call__(self, *inputs: torch.Tensor):
        if not torch.is_grad_enabled():
            return self.run(*inputs)
        again = _Again(self, inputs)
        with saved_tensors_hooks(again.leave_out, again.give):
            return self.run(*inputs)


class _Again:
    """One call of a Recomputed: counts what the first run would have kept, and makes it when backward asks for it."""

    def __init__(self, piece: Recomputed, inputs):
        self.piece, self.left_out, self.made = piece, 0, None
        # Apart from the graph that the first run builds: each would keep the other alive.
        self.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        if piece.meter is not None:
            for x in self.inputs:
                piece.meter.keep(x)

    def leave_out(self, tensor) -> int:
        self.left_out += 1
        return self.left_out - 1

    def give(self, place: int):
        if self.made is None:
            self._run_again()
        return self.made.pop(place)

    def _run_again(self) -> None:
        self.made = {}
        hooks = saved_tensors_hooks(self._take, _nothing)
        with self.piece.around(), torch.enable_grad(), hooks, contextlib.suppress(_Complete):
            self.piece.run(*self.inputs)
        if len(self.made) != self.left_out:
            raise RuntimeError(
                f"the second run kept {len(self.made)} tensors for backward where the first kept {self.left_out}: "
                "a piece to be recomputed must do the same each time"
            )

    def _take(self, tensor):
        if self.piece.meter is not None:
            self.piece.meter.keep(tensor)
        self.made[len(self.made)] = tensor.detach()
        if len(self.made) == self.left_out:
            raise _Complete


class _Complete(Exception):
    """Backward has what it needs; the rest of the piece need not run."""


def _nothing(kept):
    raise RuntimeError("nobody goes back through the second run")


def recompute(stage: Stage, parallel: ParallelConfig, again: Callable, meter=None) -> None:
    """Have the layers of `stage` recomputed as `parallel` says; parameters and their names stay as they are.

    `again(flops, share)` is the context of a second run (see `Pipeline.again`).
    """
    if parallel.recompute == "none":
        return
    flops = run_again_flops(stage.config, parallel.recompute)
    # Of a layer's forward: what a pace, which knows only a stage's whole forward, counts it as.
    share = 1.0 if parallel.recompute == "full" else flops / pieces(stage.config)[1].forward
    for part in stage.parts:
        for layer in part.layers:
            if layer % parallel.recompute_every == 0:
                around = partial(again, flops, share / len(part.layers))
                if parallel.recompute == "full":
                    block = stage.blocks[str(layer)]
                    block.forward = Recomputed(block.forward, around, meter)
                else:
                    attention = stage.blocks[str(layer)].attention
                    attention.attend = Recomputed(attention.attend, around, meter)


def run_again_flops(model: ModelConfig, policy: str) -> int:
    """FLOPs of one layer's second run for one sequence, which leaves out the product after the last tensor kept.

    That is scores times values in the attention; in a layer the last linear one, unless a dropout follows it.
    """
    s, h = model.sequence, model.hidden
    if policy == "selective":
        return (2 if model.attention == "explicit" else 4) * s * s * h
    layer = pieces(model)[1].forward
    return layer if model.dropout else layer - 2 * s * model.ffn * h
