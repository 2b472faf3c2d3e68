"""ZeRO: data parallelism whose replicas share out what each would hold whole (Rajbhandari et al. 2020, section 5).

Each rank owns 1/N of every unit (`unit.py`) and steps the optimizer for that alone. What is shared out, and what is
sent for it by each rank, with P parameters and m micro-batches:

    stage    shared out           gradients                        weights
      1      optimizer state      reduce-scatter after the last    all-gather after the step         2P(N-1)/N
      2      and gradients        reduce-scatter after each        all-gather after the step    (m+1)P(N-1)/N
      3      and parameters       reduce-scatter after each        all-gather before each use      3mP(N-1)/N

Stage 3, one layer in one micro-batch; while it computes, the all-gather for the next one runs:

    forward     all-gather W ─ layer ─ free W
    backward    all-gather W ─ layer ─ free W ─ dW{partial over dp} ─ reduce-scatter ─ the own shard of dW

With `reshard=False` the weights stay from forward to backward, which saves the second all-gather (FSDP calls this
SHARD_GRAD_OP, the other FULL_SHARD). The embedding and the head stay in any case: they come to 2mP(N-1)/N.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch
from torch import nn

from pcourse.parallel.data import DataParallel
from pcourse.parallel.schedules import BACKWARD_WEIGHT
from pcourse.parallel.unit import Unit


class ShardedOptimizer(DataParallel):
    """Stage 1: weights and gradients are whole on each rank, and the optimizer's state is that of its shards."""

    shards = True

    def _lay_out(self) -> None:
        """Each unit's weights side by side, so that shards are gathered to where they are used."""
        self._gathering = []
        for unit in self.units:
            unit.weights = unit.flat(unit.parameters, unit.parameters[0].dtype)
            unit.shard = unit.weights[unit.own]
            for p, view in zip(unit.parameters, unit.views(unit.weights), strict=True):
                p.data = view
            for segment in unit.segments:
                segment.stored = unit.shard[segment.at]

    def _reduce(self, unit: Unit) -> None:
        self._land_all()  # one at a time, so that no more than one is received into memory besides
        flat = self._take_gradient(unit)
        self._see_gradient(flat)
        own = flat[unit.own]
        handle = self.comm.reduce_scatter(flat, sizes=unit.sizes, out=own, async_op=True, label=unit.name)
        self._reducing.append((unit, flat, handle))

    def _land(self, unit: Unit, flat: torch.Tensor, handle) -> None:
        unit.gradient = handle.wait()  # a view of `flat`, of which the rest stays, and is of no more use

    def use_new_weights(self, unit: Unit) -> None:
        super().use_new_weights(unit)
        self._share_new_weights(unit)

    def _share_new_weights(self, unit: Unit) -> None:
        self._gathering.append(self._gather(unit))

    def _gather(self, unit: Unit):
        """Start to put a unit's weights together from the ranks' shards."""
        return self.comm.all_gather(unit.shard, sizes=unit.sizes, out=unit.weights, async_op=True, label=unit.name)

    def finish_step(self) -> None:
        super().finish_step()
        while self._gathering:
            self._gathering.pop(0).wait()

    def _whole_gradient(self, unit: Unit) -> torch.Tensor:
        return self.comm.all_gather(unit.gradient, sizes=unit.sizes, account="check")


class ShardedGradients(ShardedOptimizer):
    """Stage 2: gradients, too, are those of the rank's shards; a unit's whole gradient is temporary."""

    reduces_each = True

    def _reduce(self, unit: Unit) -> None:
        self._land_all()  # one at a time, so that no more than two units' gradients are whole
        flat = self._take_gradient(unit)
        handle = self.comm.reduce_scatter(flat, sizes=unit.sizes, async_op=True, label=unit.name)
        self._reducing.append((unit, None, handle))

    def _land(self, unit: Unit, flat, handle) -> None:
        shard = handle.wait()
        unit.gradient = shard if unit.gradient is None else unit.gradient.add_(shard)
        self._see_gradient(unit.gradient)


class ShardedParameters(ShardedGradients):
    """Stage 3: parameters, too. A unit's weights are whole while somebody holds them, and shortly before."""

    def _lay_out(self) -> None:
        super()._lay_out()
        for unit in self.units:
            unit.shard = unit.shard.clone()
            for segment in unit.segments:
                segment.stored = unit.shard[segment.at]
            self._resize(unit, 0)
        layers = set(self.stage.blocks.values()) if self.parallel.reshard else ()
        self._stay = [m for m in self.units_of if m not in layers]  # from forward to backward
        self._previous = {after: m for m, after in self.next.items()}
        self._staying: Counter = Counter()  # modules -> micro-batches that they stay for
        self._open: list[nn.Module] = []  # of the backward pass under way: what holds its weights

    # --- one module, forward and backward -------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        self._hold(module)
        self._prefetch(self.next.get(module))

    def after_forward(self, module: nn.Module, y: torch.Tensor) -> None:
        if module in self._stay and y.requires_grad:  # else no backward follows
            self._staying[module] += 1
        else:
            self._release(module)

    def before_backward(self, module: nn.Module) -> None:
        if module not in self._stay:
            self._hold(module)
            self._open.append(module)
        self._prefetch(self._previous.get(module))

    def after_backward(self, module: nn.Module) -> None:
        self._open.remove(module)
        self._release(module)

    @contextmanager
    def backward(self, chunk: int, kind: str, last: bool):
        # That of the linear weights by themselves needs inputs and output gradients, and no weights.
        self._open = [m for m in self.modules[chunk] if self._staying[m] and kind != BACKWARD_WEIGHT]
        self._staying.subtract(self._open)
        with super().backward(chunk, kind, last):
            yield
            while self._open:  # with these backward is done, though it reached no output before them: the first module
                self._release(self._open.pop())

    # --- hold, release --------------------------------------------------------------------------------------------

    def _hold(self, module: nn.Module) -> None:
        """Have what `module` uses whole, until it is released as often as it was held."""
        self._prefetch(module)
        for unit in self.units_of[module]:
            unit.holders += 1
            self._await(unit)

    def _release(self, module: nn.Module) -> None:
        for unit in self.units_of[module]:
            unit.holders -= 1
            if unit.holders == 0:
                self._await(unit)
                self._resize(unit, 0)

    def _prefetch(self, module: nn.Module | None) -> None:
        """Start to gather what `module` uses and is not there."""
        for unit in self.units_of.get(module, ()):
            if unit.weights.untyped_storage().nbytes() == 0:
                self._resize(unit, unit.numel)
                unit.arriving = self._gather(unit)

    def _await(self, unit: Unit) -> None:
        if unit.arriving is not None:
            unit.arriving.wait()
            unit.arriving = None

    def _resize(self, unit: Unit, length: int) -> None:
        """Free the memory of the whole weights, or take it again; everything that views them views the new memory."""
        unit.weights.untyped_storage().resize_(length * unit.weights.element_size())
        if self.meter is not None:
            self.meter.see_gathered(unit.weights)

    def _share_new_weights(self, unit: Unit) -> None:
        """The others gather them when they next need them. What a forward without a backward has left whole is old."""
        unit.holders = 0
        self._await(unit)
        self._resize(unit, 0)
        self._staying.clear()

    def _claim(self) -> None:
        super()._claim()
        self.meter.claim("parameters", (unit.shard for unit in self.units))

    @contextmanager
    def whole_weights(self):
        for module in self.units_of:
            self._hold(module)
        try:
            yield
        finally:
            for module in self.units_of:
                self._release(module)


ZERO_STAGES = (DataParallel, ShardedOptimizer, ShardedGradients, ShardedParameters)
