"""Which part of an unsplit parameter a rank holds, kept on the parameter itself as `parameter.shard`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shard:
    """Rows (`dim=0`) or columns (`dim=1`) `index` of the unsplit parameter; the group's shards partition it."""

    dim: int
    index: torch.Tensor

    def of(self, full: torch.Tensor) -> torch.Tensor:
        return full.detach().index_select(self.dim, self.index.to(full.device))


def cut(full: nn.Parameter, dim: int, index) -> nn.Parameter:
    """The shard of `full` as a parameter of its own, with its own memory."""
    shard = Shard(dim, torch.as_tensor(index, dtype=torch.long))
    parameter = nn.Parameter(shard.of(full))
    parameter.shard = shard
    return parameter


def shard_of(parameter) -> Shard | None:
    """The parameter's Shard; None where every rank of the group holds a whole replica."""
    return getattr(parameter, "shard", None)


def is_copy(parameter) -> bool:
    """Whether another pipeline stage holds the same weights, and counts them."""
    return getattr(parameter, "is_copy", False)
