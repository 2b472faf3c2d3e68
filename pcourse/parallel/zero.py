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
        self._publishing = []
        for unit in self.units:
            unit.weights = unit.flat(unit.parameters, unit.parameters[0].dtype)
            unit.shard = unit.weights[unit.own]
            for p, view in zip(unit.parameters, unit.views(unit.weights), strict=True):
                p.data = view
            for segment in unit.segments:
                segment.stored = unit.shard[segment.at]

    def _reduce(self, unit: Unit) -> None:
        flat = self._take_gradient(unit)
        self._see_gradient(flat)
        own = flat[unit.own]
        handle = self.comm.reduce_scatter(flat, sizes=unit.sizes, out=own, async_op=True, label=unit.name)
        self._under_way.append((unit, flat, handle))  # outside the own shard it is of no more use

    def publish(self, unit: Unit) -> None:
        super().publish(unit)
        self._publishing.append(self._gather(unit))

    def end(self) -> None:
        super().end()
        while self._publishing:
            self._publishing.pop(0).wait()

    def _gather(self, unit: Unit):
        """Start to put a unit's weights together from the ranks' shards."""
        return self.comm.all_gather(unit.shard, sizes=unit.sizes, out=unit.weights, async_op=True, label=unit.name)

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        whole = {}
        for unit in self.units:
            own = torch.zeros(unit.sizes[self.comm.rank], dtype=self.reduce_dtype, device=self.comm.device)
            for segment in unit.segments:
                if segment.gradient is not None:
                    own[segment.at] = segment.gradient
            flat = self.comm.all_gather(own, sizes=unit.sizes, account="check")
            whole |= zip(unit.names, unit.views(flat), strict=True)
        return whole


class ShardedGradients(ShardedOptimizer):
    """Stage 2: gradients, too, are those of the rank's shards; a unit's whole gradient is temporary."""

    reduces_each = True

    def _reduce(self, unit: Unit) -> None:
        self._land_all()  # one at a time, so that no more than two units' gradients are whole
        flat = self._take_gradient(unit)
        handle = self.comm.reduce_scatter(flat, sizes=unit.sizes, async_op=True, label=unit.name)
        self._under_way.append((unit, None, handle))

    def _land(self, unit: Unit, flat, handle) -> None:
        shard = handle.wait()
        unit.gradient = shard if unit.gradient is None else unit.gradient.add_(shard)
        self._see_gradient(unit.gradient)


class ShardedParameters(ShardedGradients):
    """Stage 3: parameters, too. A unit's whole weights are there while a module uses them, and shortly before."""

    def _lay_out(self) -> None:
        super()._lay_out()
        for unit in self.units:
            unit.shard = unit.shard.clone()
            unit.users, unit.arriving = 0, None
            for segment in unit.segments:
                segment.stored = unit.shard[segment.at]
            self._resize(unit, 0)
        blocks = set(self.stage.blocks.values())
        self._stays = {m: m not in blocks or not self.parallel.reshard for m in self.units_of}
        self._next = {m: after for modules in self.modules for m, after in zip(modules, modules[1:], strict=False)}
        self._previous = {after: m for m, after in self._next.items()}

    def publish(self, unit: Unit) -> None:
        """Only the own shard: the others gather it when they next need it."""
        DataParallel.publish(self, unit)

    def _claim(self) -> None:
        super()._claim()
        self.meter.claim("parameters", (unit.shard for unit in self.units))

    # --- a module's weights: asked for, there, free --------------------------------------------------------------

    def _ask(self, module: nn.Module | None) -> None:
        """Start to gather what `module` uses and is not there."""
        for unit in self.units_of.get(module, ()):
            if unit.weights.untyped_storage().nbytes() == 0:
                self._resize(unit, unit.numel)
                unit.arriving = self._gather(unit)

    def _have(self, module: nn.Module) -> None:
        self._ask(module)
        for unit in self.units_of[module]:
            self._await(unit)

    def _await(self, unit: Unit) -> None:
        if unit.arriving is not None:
            unit.arriving.wait()
            unit.arriving = None

    def _free(self, unit: Unit) -> None:
        self._await(unit)
        self._resize(unit, 0)

    def _resize(self, unit: Unit, length: int) -> None:
        """Free the memory of the whole weights, or take it again; everything that views them views the new memory."""
        unit.weights.untyped_storage().resize_(length * unit.weights.element_size())
        if self.meter is not None:
            self.meter.see_gathered(unit.weights)

    # --- when ----------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, chunk: int):
        for unit in self._staying(chunk):
            unit.users += 1
        yield

    def before_forward(self, module: nn.Module) -> None:
        self._have(module)
        self._ask(self._next.get(module))

    def after_forward(self, module: nn.Module) -> None:
        self._leave_alone(module)

    @contextmanager
    def backward(self, chunk: int, kind: str, last: bool):
        with super().backward(chunk, kind, last):
            yield
        if kind == BACKWARD_WEIGHT:  # which needs inputs and output gradients, and no weights
            return
        for module in self.modules[chunk]:
            self._leave_alone(module)  # where no gradient of its input has told that it is done
        for unit in self._staying(chunk):
            unit.users -= 1
            if unit.users == 0:
                self._free(unit)

    def before_backward(self, module: nn.Module) -> None:
        self._have(module)
        self._ask(self._previous.get(module))

    def after_backward(self, module: nn.Module) -> None:
        self._leave_alone(module)

    def _leave_alone(self, module: nn.Module) -> None:
        if not self._stays[module]:
            for unit in self.units_of[module]:
                self._free(unit)

    def _staying(self, chunk: int) -> list[Unit]:
        """The units whose weights stay from a micro-batch's forward to its backward."""
        modules = [m for m in self.modules[chunk] if self._stays[m]]
        return list(dict.fromkeys(unit for m in modules for unit in self.units_of[m]))

    @contextmanager
    def whole_weights(self):
        for module in self.units_of:
            self._have(module)
        yield
        for unit in self.units:
            self._free(unit)


ZERO_STAGES = (DataParallel, ShardedOptimizer, ShardedGradients, ShardedParameters)
