"""Dropout that every split draws alike: the mask is a function of an element's place in the *unsplit* tensor."""

from __future__ import annotations

import torch
from torch import nn

from pcourse.config import TrainConfig


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the others by 1/(1 - p).

    The mask depends on the place, on the step (`step_seed`, see `seed_dropout`) and on the `site`, the layer's number
    in the model, and on no random state. So a rank that holds a shard says where it begins (`origin`, per dim), and
    ranks that hold a replica agree without a message; a recomputed forward pass draws the same mask again.
    """

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site, self.step_seed, self.origin = p, site, 0, {}

    def forward(self, x):
        if self.p == 0 or not self.training:
            return x
        kept = position_hash(x.shape, self.origin, self.step_seed * 1_000_003 + self.site, x.device) >= self.p * 2**31
        return torch.where(kept, x / (1 - self.p), 0.0)


def position_hash(shape, origin: dict[int, int], seed: int, device) -> torch.Tensor:
    """A uniform int32 in [0, 2³¹) for each element of `shape`, which begins at `origin` in the whole tensor."""
    h = torch.full((), seed % 2**31, dtype=torch.int32, device=device)
    for dim, n in enumerate(shape):
        first = origin.get(dim, 0)
        index = torch.arange(first, first + n, dtype=torch.int32, device=device)
        h = _mix(h.unsqueeze(-1) ^ _mix(index + 0x9E3779B * (dim + 1)))
    return h & 0x7FFFFFFF


def _mix(h):
    # Rounds of xor-shift and odd multiplication (constants: Wellons, "Prospecting for Hash Functions", 2018).
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return h ^ ((h >> 16) & 0xFFFF)


def dropout_seed(train: TrainConfig, step: int) -> int:
    """What `step` of a training run seeds its masks with."""
    return train.seed * 1_000_003 + step


def seed_dropout(model: nn.Module, step_seed: int, first_sequence: int) -> None:
    """Before a forward pass: which step it is, and which sequence of the global batch comes first on this rank."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.step_seed = step_seed
            module.origin[0] = first_sequence
