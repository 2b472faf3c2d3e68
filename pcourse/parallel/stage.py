"""What one rank of a pipeline holds: its parts of the unsplit model, under the model's own names."""

from __future__ import annotations

from torch import nn

from pcourse.model import GPT
from pcourse.parallel.partition import Part


class Chunk(nn.Module):
    """The model between two cuts: tokens `[b, s]` or an activation `[b, s, h]` in; an activation out, or after the
    head the summed loss of `targets`."""

    def __init__(self, model: GPT, part: Part):
        super().__init__()
        self.embed = model.embed if part.embedding else None
        self.blocks = nn.ModuleList(model.blocks[i] for i in part.layers)
        self.head = model.head if part.head else None
        self.token_loss = model.token_loss if part.head else None

    def forward(self, x, targets=None):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.token_loss(self.head(x), targets)


class Stage(nn.Module):
    """A rank's `chunks`, in the order of the model, and their parameters by the names that the unsplit model has."""

    def __init__(self, model: GPT, parts: list[Part]):
        super().__init__()
        self.config, self.parts = model.config, tuple(parts)
        # In a tuple, so that no parameter is registered under a second name.
        self.chunks = tuple(Chunk(model, part) for part in parts)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for part in parts for i in part.layers})
        self.embed = model.embed if any(part.embedding for part in parts) else None
        self.head = model.head if any(part.head for part in parts) else None
        if self.tied_weight is not None:
            self.tied_weight.is_copy = self.embed is None  # of the two the norm counts the embedding's

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The matrix that another stage holds a copy of, if there is one here."""
        if not self.config.tied or (self.embed is None) == (self.head is None):
            return None
        return self.head.output.weight if self.embed is None else self.embed.tokens.weight

    @property
    def tied_gradient(self):
        """Its gradient, if it has one."""
        return None if self.tied_weight is None else self.tied_weight.grad
