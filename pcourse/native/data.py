"""Data parallelism of the same GPT through PyTorch's own classes, one for each of our ways to share out a replica.

    zero  reshard   PyTorch's
      0             DistributedDataParallel (Li et al. 2020, "PyTorch Distributed")
      1             the same, and ZeroRedundancyOptimizer: each rank steps whole parameters, and broadcasts them
      3     True    fully_shard, which is FSDP2 (Zhao et al. 2023, "PyTorch FSDP"): each parameter cut along its rows
      3     False   the same, with reshard_after_forward=False

They average gradients where ours are summed, each replica's loss being divided by the tokens of all: so the loss that
they go backward from is N times ours.
"""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from pcourse.comm import SCALAR, Comm
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.data import batch
from pcourse.dropout import dropout_seed, seed_dropout
from pcourse.model import DTYPE, GPT, build
from pcourse.split import micro_batches
from pcourse.train import Trainer

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class TorchReplica:
    """One rank's replica of `model`, which PyTorch shares out over all ranks as `parallel` says, and its optimizer.

    Raises ConfigError for what PyTorch does not have.
    """

    def __init__(self, comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, prepare=None):
        _require(comm, parallel, train)
        self.comm, self.config, self.train = comm, model, train
        parts = micro_batches(train.batch, comm.size, comm.rank, parallel.micro_batches)
        self.micro_batches = [slice(rows.start, rows.stop) for rows in parts]
        gpt = build(model, train.seed, comm.device)
        self.gpt = prepare(gpt) if prepare else gpt
        if parallel.zero == 3:
            self.model = sharded(self.gpt, comm, parallel.reshard)
            self.not_yet = contextlib.nullcontext  # like ZeRO's stages 2 and 3, it reduces after each micro-batch
        else:
            # Gradients lie in the buckets: without that, each is held twice.
            self.model = DistributedDataParallel(self.gpt, gradient_as_bucket_view=True)
            self.not_yet = self.model.no_sync
        kind, settings = OPTIMIZERS[train.optimizer], {"lr": train.learning_rate, "weight_decay": train.weight_decay}
        if parallel.zero == 1:
            self.optimizer = ZeroRedundancyOptimizer(
                self.gpt.parameters(), kind, parameters_as_bucket_view=True, **settings
            )
        else:
            self.optimizer = kind(self.gpt.parameters(), **settings)

    def forward_backward(self, tokens, targets, number: int = 0) -> torch.Tensor:
        """Gradients of the mean loss per token of the whole batch `[b, s]` of step `number`; returns the loss, on every
        rank."""
        dtype = torch.promote_types(DTYPE[self.config.dtype], torch.float32)
        total = torch.zeros((), dtype=dtype, device=self.comm.device)
        for k, rows in enumerate(self.micro_batches):
            if self.config.dropout:
                seed_dropout(self.gpt, dropout_seed(self.train, number), rows.start)
            last = k == len(self.micro_batches) - 1
            with contextlib.nullcontext() if last else self.not_yet():
                loss = self.gpt.token_loss(self.model(tokens[rows]), targets[rows]) / targets.numel()
                (loss * self.comm.size).backward()
            total += loss.detach()
        return self.comm.all_reduce(total, out=total, label="loss", account=SCALAR)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharded(model: GPT, comm: Comm, reshard: bool) -> GPT:
    """Cut `model`, in place, over all ranks of a process world: each layer is a unit of FSDP2, and all else is one.

    That one is the root's: the embedding and the head, which must be together where they share the tied matrix. Unless
    told otherwise, FSDP2 keeps the root's weights from forward to backward, as ours are kept.
    """
    mesh = init_device_mesh(comm.device.type, (comm.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def data_sides(comm: Comm, model: ModelConfig, train: TrainConfig, parallel: ParallelConfig):
    """What `beside` takes turns with: ours and PyTorch's, on the same tokens, each with its own optimizer."""

    def ours():
        return our_step(Trainer(comm, model, parallel, train))

    def theirs():
        replica = TorchReplica(comm, model, parallel, train)
        tokens, targets = batch(model, train, 0, device=comm.device)

        def step():
            loss = replica.forward_backward(tokens, targets)
            replica.update()
            return loss

        return step

    return ours, theirs


def our_step(trainer: Trainer):
    """A function that takes a whole step on the batch of step 0, and returns its loss."""
    tokens, targets = batch(trainer.config, trainer.train, 0, device=trainer.comm.device)

    def load(rows: range):
        return tokens[rows.start : rows.stop], targets[rows.start : rows.stop]

    def step():
        loss = trainer.accumulate(load, targets.numel(), dropout_seed(trainer.train, 0))
        trainer.update(norm=None)  # which only clipping needs
        return loss

    return step


def _require(comm: Comm, parallel: ParallelConfig, train: TrainConfig) -> None:
    if comm.size != parallel.dp:
        raise ConfigError(f"here the replicas are all {comm.size} ranks, not dp={parallel.dp}")
    if parallel.zero == 2:
        raise ConfigError("PyTorch shares out the optimizer's state, or parameters too: zero=2 can be 0, 1 or 3")
    if parallel.recompute != "none":
        raise ConfigError(f"recompute={parallel.recompute!r} stands beside PyTorch's in native/recompute.py, on 1 rank")
    if parallel.grad_dtype != "same" or parallel.master_weights:
        raise ConfigError("here PyTorch's gradients and weights are in the model's own dtype")
    if train.clip is not None:
        raise ConfigError(f"neither side clips here: clip={train.clip} must be None")
