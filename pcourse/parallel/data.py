"""Data parallelism: each replica takes its share of the sequences, and their gradients are summed.

The loss of each is divided by the tokens of all, so that the sum over the replicas is the gradient of the mean over the
whole batch, however many tokens each of them has. With `{partial over dp}` for a sum still to be made,

    forward    layer 1 ─ layer 2 ─ … ─ loss                                            nothing is sent
    backward   … ◄─ layer 1 ◄─ layer 2 ◄─ …
                       │          └─ dW2{partial over dp} ─ all-reduce ─ dW2           while layer 1 computes
                       └──────────── dW1{partial over dp} ─ all-reduce ─ dW1

each rank sends 2P(N-1)/N elements a step, in as many messages as the model has units (`unit.py`), and only in the last
micro-batch's backward: before that, gradients add up where they are (Li et al. 2020, "PyTorch Distributed", 3.2).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from pcourse.comm import SCALAR, Comm
from pcourse.config import ParallelConfig
from pcourse.cost.layers import pieces
from pcourse.model import DTYPE
from pcourse.parallel.schedules import BACKWARD, BACKWARD_INPUT, FORWARD
from pcourse.parallel.stage import Stage
from pcourse.parallel.unit import Segment, Unit, segments_of, units_of


class DataParallel:
    """This rank's replica of `stage`; `comm` is the group of ranks that hold the same part of the model.

    All start from the weights of the first of them. `meter` is a MemoryMeter that shall know whose memory is what.
    `zero.py` changes what is owned, when gradients are reduced, and where weights are.

    A step: `backward(…)` around each backward pass, `finish_backward` after the last; then the optimizer steps every
    `segment.weight` along `segment.gradient`, `use_new_weights` tells of each unit that it has, `finish_step` ends it.
    """

    shards = False  # whether a rank owns only its shard of each unit
    reduces_each = False  # whether the gradients of each micro-batch are reduced, or the sum of them

    def __init__(self, comm: Comm, stage: Stage, parallel: ParallelConfig, meter=None):
        self.comm, self.stage, self.parallel, self.meter = comm, stage, parallel, meter
        dtype = DTYPE[stage.config.dtype]
        self.reduce_dtype = dtype if parallel.grad_dtype == "same" else torch.float32
        # Whether anything is to be done between a backward pass and the optimizer's step.
        self.reduces = self.shards or comm.size > 1 or parallel.grad_dtype == "both"
        for p in stage.parameters():
            comm.broadcast(p.detach(), out=p.detach(), label="weights", account="start-up")
            if p.requires_grad and parallel.grad_dtype == "float32":
                p.grad_dtype = torch.float32  # autograd itself then adds up in float32
        self.units_of = units_of(stage, *((comm.size, comm.rank) if self.shards else (1, 0)))
        self.units = list(dict.fromkeys(unit for units in self.units_of.values() for unit in units))
        self.segments = segments_of(self.units)
        self.modules = [[m for m in (c.embed, *c.blocks, c.head) if m is not None] for c in stage.chunks]
        self.next = {m: after for modules in self.modules for m, after in pairwise(modules)}
        self._lay_out()
        for segment in self.segments:
            segment.weight = self._weight(segment)
        self._parts = _parts(stage)
        self._kind = FORWARD  # of the pass under way
        self._to_reduce: list[Unit] = []  # of the pass under way, in order
        self._complete: set[Unit] = set()
        self._reducing: list = []  # reductions under way: (unit, its gradient, handle)
        if self.reduces:
            for module in self.units_of:
                module.register_forward_pre_hook(lambda module, _: self.before_forward(module))
                module.register_forward_hook(self._leave)
        if meter is not None:
            self._claim()

    # --- backward: what is complete is reduced, while the layers before it compute --------------------------------

    @contextmanager
    def backward(self, chunk: int, kind: str, last: bool):
        """Around a backward pass through one of the stage's chunks; `last` is the one after which the chunk's gradients
        of this step are complete."""
        self._complete, self._kind = set(), kind
        self._to_reduce = []
        if self.reduces and kind != BACKWARD_INPUT:  # which has put its weight gradients off
            self._to_reduce = [u for u in self._order(chunk) if self.reduces_each or (last and u.module is not None)]
        yield
        self._complete.update(self._to_reduce)
        self.comm.part_computed(1.0)
        self._reduce_complete()

    def _reached(self, module: nn.Module, grad) -> None:
        """Backward has come to `module`'s output: with the module after it it is done, and with that one's weights."""
        after = self.next.get(module)
        if after is not None:
            self.comm.part_computed(self._parts[self._kind][after])
            self.after_backward(after)
            self._complete.update(unit for unit in self.units_of[after] if unit.module is after)
            self._reduce_complete()
        self.before_backward(module)

    def _order(self, chunk: int) -> list[Unit]:
        """A chunk's units in the order in which its backward completes them; what both ends use, last."""
        units = [unit for module in reversed(self.modules[chunk]) for unit in self.units_of[module]]
        return sorted(dict.fromkeys(units), key=lambda unit: unit.module is None)

    def _reduce_complete(self) -> None:
        """Start what can start, in the same order on all ranks, as messages are matched by their order."""
        while self._to_reduce and self._to_reduce[0] in self._complete:
            self._start_reducing(self._to_reduce.pop(0))

    def _start_reducing(self, unit: Unit) -> None:
        unit.used = [was or p.grad is not None for was, p in zip(unit.used, unit.parameters, strict=True)]
        self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        flat = self._take_gradient(unit)
        self._see_gradient(flat)
        handle = self.comm.all_reduce(flat, out=flat, async_op=True, label=unit.name)
        self._reducing.append((unit, flat, handle))

    def _land(self, unit: Unit, flat: torch.Tensor, handle) -> None:
        unit.gradient = handle.wait()
        if self.parallel.grad_dtype != "both":
            for p, view in zip(unit.parameters, unit.views(flat), strict=True):
                p.grad = view  # whoever looks for a parameter's gradient finds the reduced one

    def _land_all(self) -> None:
        while self._reducing:
            self._land(*self._reducing.pop(0))

    def _take_gradient(self, unit: Unit) -> torch.Tensor:
        """The unit's gradient as one vector, in the dtype of the reduction, and no longer on the parameters."""
        flat = unit.flat([p.grad for p in unit.parameters], self.reduce_dtype)
        if self.parallel.grad_dtype != "both" or self.reduces_each:
            for p in unit.parameters:
                p.grad = None
        return flat

    def finish_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """After the last pass: every segment gets its reduced gradient. Returns the loss, summed over the replicas.

        With the loss goes which parameters were used. One that no replica used has no gradient, and not one of zeros,
        along which weight decay would move it.
        """
        if not self.reduces:
            for segment in self.segments:
                segment.gradient = segment.parameter.grad
            return loss
        for unit in self.units:
            if unit.module is None and not self.reduces_each:  # two chunks may use it: complete when both are
                self._start_reducing(unit)
        flags = [flag for unit in self.units for flag in unit.used]
        facts = torch.cat([loss.view(1), torch.tensor(flags, dtype=loss.dtype, device=loss.device)])
        handle = self.comm.all_reduce(facts, out=facts, async_op=True, label="loss", account=SCALAR)
        self._land_all()
        handle.wait()
        names = [name for unit in self.units for name in unit.names]
        self.unused = {name for name, users in zip(names, facts[1:].tolist(), strict=True) if not users}
        for unit in self.units:
            for segment in unit.segments:
                segment.gradient = None if segment.name in self.unused else unit.gradient[segment.at]
            for name, p in zip(unit.names, unit.parameters, strict=True):
                if name in self.unused:
                    p.grad = None
        return facts[0]

    # --- where ZeRO gathers weights, and frees them ----------------------------------------------------------------

    def _leave(self, module: nn.Module, arguments, y) -> None:
        self.comm.part_computed(self._parts[FORWARD][module])
        self.after_forward(module, y)
        if y.requires_grad:
            y.register_hook(partial(self._reached, module))

    def before_forward(self, module: nn.Module) -> None: ...

    def after_forward(self, module: nn.Module, y: torch.Tensor) -> None: ...

    def before_backward(self, module: nn.Module) -> None: ...

    def after_backward(self, module: nn.Module) -> None: ...

    # --- weights -------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Decide where the weights lie: as the model has them."""
        for segment in self.segments:
            segment.stored = segment.parameter.detach().view(-1)

    def _weight(self, segment: Segment) -> nn.Parameter:
        """What the optimizer steps: the weights where they lie, or a float32 copy (Micikevicius et al. 2018, section
        3.1: an update far smaller than its weight is lost in 16 bits)."""
        if self.parallel.master_weights:
            return nn.Parameter(segment.stored.float())
        plain = not self.shards and self.reduce_dtype == segment.stored.dtype
        return segment.parameter if plain else nn.Parameter(segment.stored)

    @property
    def stepped_together(self) -> list[list[Unit]]:
        """The units by how many are stepped at a time: all at once, if that takes no memory besides."""
        plain = all(segment.weight is segment.parameter for segment in self.segments)
        return [self.units] if plain else [[unit] for unit in self.units]

    def use_new_weights(self, unit: Unit) -> None:
        """The optimizer has stepped `unit`: from here on the model computes with that."""
        if self.parallel.master_weights:
            for segment in unit.segments:
                segment.stored.copy_(segment.weight.detach())

    def finish_step(self) -> None:
        """Every weight is up to date, and no gradient is left."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for unit in self.units:
            unit.gradient, unit.used = None, [False] * len(unit.used)
            for p in unit.parameters:
                p.grad = None
        for segment in self.segments:
            segment.gradient = None

    # --- for those who look --------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Tell the meter whose memory is what."""
        self.meter.claim("parameters", self.stage.parameters())
        self.meter.claim("parameters", self.stage.buffers())
        if self.parallel.master_weights:
            self.meter.claim("optimizer", (segment.weight for segment in self.segments))
        if not self.reduces_each:  # else it is temporary until it is reduced
            for p in self.stage.parameters():
                p.register_post_accumulate_grad_hook(lambda p: self._see_gradient(p.grad))

    def _see_gradient(self, gradient) -> None:
        if self.meter is not None and gradient is not None:  # autograd also tells of a gradient that has been put off
            self.meter.see(gradient, "gradients")

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        """After `finish_backward`: each parameter's reduced gradient, by its name. Every rank calls it."""
        if not self.reduces:
            return {s.name: s.gradient for s in self.segments}
        found = {}
        for unit in self.units:
            found |= zip(unit.names, unit.views(self._whole_gradient(unit)), strict=True)
        return found | dict.fromkeys(self.unused)

    def _whole_gradient(self, unit: Unit) -> torch.Tensor:
        return unit.gradient

    @contextmanager
    def whole_weights(self):
        """Inside, the stage's parameters are whole, whatever is shared out. Every rank enters."""
        yield


def _parts(stage: Stage) -> dict[str, dict[nn.Module, float]]:
    """Which part of a pass through its chunk each module is, by FLOPs: so that on a described machine a message that
    is sent in the middle of a pass is sent in the middle of its time."""
    each = {piece.name: piece for piece in pieces(stage.config)}
    counted = {
        FORWARD: ("forward",),
        BACKWARD: ("backward_input", "backward_weight"),
        BACKWARD_INPUT: ("backward_input",),
    }
    parts: dict = {kind: {} for kind in counted}
    for part, chunk in zip(stage.parts, stage.chunks, strict=True):
        named = {chunk.embed: "embedding", chunk.head: "head"}
        named |= {block: f"layer {i}" for i, block in zip(part.layers, chunk.blocks, strict=True)}
        for kind, fields in counted.items():
            taken = {m: sum(getattr(each[name], f) for f in fields) for m, name in named.items() if m is not None}
            parts[kind] |= {module: n / (sum(taken.values()) or 1) for module, n in taken.items()}
    return parts
