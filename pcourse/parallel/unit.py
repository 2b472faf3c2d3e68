"""A rank's parameters in units: one message reduces a unit's gradients, one gathers its weights where they are sharded.

Each transformer layer is a unit, so are the embedding and the head; a tied matrix is one by itself, because both ends
of the model use it. A unit's parameters lie side by side in one flat vector; of its elements each rank of the
data-parallel group owns a run, as long as the others' or one longer, which may begin and end within a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pcourse.parallel.stage import Stage
from pcourse.split import shard_range, shard_sizes


class Segment:
    """Elements `start` to `stop` of a flattened parameter: what this rank owns of it, and its optimizer steps.

    `stored` is their place in the memory of the weights, `weight` what the optimizer steps, `gradient` what it steps
    along, reduced over all replicas: None where none of them used the parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter, start: int, stop: int, at: slice):
        self.name, self.parameter = name, parameter
        self.start, self.stop = start, stop
        self.at = at  # where it lies in what the rank owns of the unit
        self.stored: torch.Tensor | None = None
        self.weight: nn.Parameter | None = None
        self.gradient: torch.Tensor | None = None


class Unit:
    """Trainable `parameters`, by name, of which this rank owns the elements `own`: all of them, if it is one of 1.

    `module` is the one that uses it; None if several do.
    """

    def __init__(self, name: str, module, parameters: dict[str, nn.Parameter], ranks: int = 1, rank: int = 0):
        self.name, self.module = name, module
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.lengths = [p.numel() for p in self.parameters]
        self.numel = sum(self.lengths)
        self.sizes = shard_sizes(self.numel, ranks)
        own = shard_range(self.numel, ranks, rank)
        self.own = slice(own.start, own.stop)
        self.segments = list(self._segments())
        # Of this step: which parameters this replica has used, and the gradient of what is owned, reduced.
        self.used = [False] * len(self.parameters)
        self.gradient: torch.Tensor | None = None
        # With ZeRO: the whole weights side by side, what is owned of them; with stage 3 who holds the whole, and a
        # gather under way.
        self.weights: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.holders, self.arriving = 0, None

    def _segments(self) -> Iterator[Segment]:
        offset = 0
        for name, p, length in zip(self.names, self.parameters, self.lengths, strict=True):
            first, last = max(offset, self.own.start), min(offset + length, self.own.stop)
            if first < last:
                at = slice(first - self.own.start, last - self.own.start)
                yield Segment(name, p, first - offset, last - offset, at)
            offset += length

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in `flat`, which is as long as the unit."""
        return [part.view(p.shape) for part, p in zip(flat.split(self.lengths), self.parameters, strict=True)]

    def flat(self, tensors, dtype: torch.dtype) -> torch.Tensor:
        """A new vector of one tensor for each parameter; zeros for None."""
        flat = self.parameters[0].new_empty(self.numel, dtype=dtype)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach())
        return flat


def segments_of(units: list[Unit]) -> list[Segment]:
    """What this rank owns of `units`."""
    return [segment for unit in units for segment in unit.segments]


def units_of(stage: Stage, ranks: int = 1, rank: int = 0) -> dict[nn.Module, list[Unit]]:
    """For each module that runs as one (embedding, layers, head), in the order of the model, the units that it uses.

    The tied matrix is one unit, in the list of the embedding and in that of the head. Frozen parameters belong to no
    unit: nothing is to be reduced of them, and each rank keeps them whole.
    """
    names = {id(p): name for name, p in stage.named_parameters()}
    tied = []
    if stage.config.tied:
        tied = [e.weight for e in (stage.embed and stage.embed.tokens, stage.head and stage.head.output) if e][:1]

    def unit(name, module, parameters) -> list[Unit]:
        chosen = {names[id(p)]: p for p in parameters if p.requires_grad}
        return [Unit(name, module, chosen, ranks, rank)] if chosen else []

    shared = unit("tied matrix", None, tied)
    uses = {}
    if stage.embed is not None:
        own = [p for p in stage.embed.parameters() if not any(p is t for t in tied)]
        uses[stage.embed] = unit("embedding", stage.embed, own) + shared
    for i, block in stage.blocks.items():
        uses[block] = unit(f"layer {i}", block, block.parameters())
    if stage.head is not None:
        own = [p for p in stage.head.parameters() if not any(p is t for t in tied)]
        uses[stage.head] = unit("head", stage.head, own) + shared
    return uses
