"""Activation recompute of the same GPT through torch.utils.checkpoint."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from pcourse.comm import Comm
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.data import batch
from pcourse.model import GPT, build
from pcourse.native.data import our_step
from pcourse.train import Trainer


def checkpointed(model: GPT, parallel: ParallelConfig) -> GPT:
    """Have the layers of `model` recomputed as `parallel` says, each whole or its attention alone."""
    for block in model.blocks[:: parallel.recompute_every]:
        if parallel.recompute == "full":
            block.forward = _Checkpointed(block.forward)
        elif parallel.recompute == "selective":
            block.attention.attend = _Checkpointed(block.attention.attend)
    return model


class _Checkpointed:
    """`run`, of which torch keeps the arguments alone. Its dropout needs no random state, so none is put back."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *inputs):
        return checkpoint(self.run, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute_sides(comm: Comm, model: ModelConfig, train: TrainConfig, parallel: ParallelConfig):
    """What `beside` takes turns with, on one rank: ours and torch's, on the same tokens."""
    _require(comm, model, parallel)

    def ours():
        return our_step(Trainer(comm, model, parallel, train))

    def theirs():
        gpt = checkpointed(build(model, train.seed, comm.device), parallel)
        tokens, targets = (t[:] for t in batch(model, train, 0, device=comm.device))

        def forward_backward() -> torch.Tensor:
            loss = gpt.loss(tokens, targets) / targets.numel()
            loss.backward()
            return loss.detach()

        return gpt, forward_backward

    return ours, theirs


def _require(comm: Comm, model: ModelConfig, parallel: ParallelConfig) -> None:
    if comm.size != 1 or parallel.ranks != 1 or parallel.micro_batches != 1:
        raise ConfigError("here recompute is one rank's, in one micro-batch")
    if model.dropout:
        raise ConfigError(f"here the second run is not told what to drop: dropout={model.dropout} must be 0")
