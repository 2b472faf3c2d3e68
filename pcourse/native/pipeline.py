"""Pipeline parallelism of the same GPT through torch.distributed.pipelining."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from pcourse.comm import SCALAR, Comm
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, listed
from pcourse.data import batch
from pcourse.model import DTYPE, build
from pcourse.parallel.partition import stages_of
from pcourse.parallel.pipeline import TiedGradients
from pcourse.parallel.stage import Chunk, Stage
from pcourse.train import Trainer

# By our names. Its interleaved zero bubble is ZB1P, which over one chunk a stage is zb-h1, action for action.
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class TorchPipeline:
    """One rank's stage of `model`, cut where ours is, under torch's schedule of the same name.

    `schedule_class` takes another of torch's schedules over the same stages. torch computes the loss itself, from the
    last chunk's logits. It knows of no tied matrix: the gradients of its two copies are summed by hand, as ours are.
    Raises ConfigError for what torch does not have.
    """

    def __init__(
        self,
        comm: Comm,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        prepare=None,
        schedule_class: type | None = None,
    ):
        _require(comm, model, parallel, train)
        self.comm, self.dtype = comm, torch.promote_types(DTYPE[model.dtype], torch.float32)
        unsplit = build(model, train.seed, comm.device)
        unsplit = prepare(unsplit) if prepare else unsplit
        token_loss, tokens = unsplit.token_loss, train.batch * model.sequence
        unsplit.token_loss = _NoLoss()
        ours, parts = stages_of(model, parallel, train)
        places = ours.places(comm.rank)
        self.model = Stage(unsplit, [parts[place] for place in places])
        self.sum_tied = TiedGradients(comm, ours, self.model)
        rows = train.batch // parallel.micro_batches
        stages = [
            pipelining.PipelineStage(chunk, place, len(parts), comm.device, *_shapes(chunk, model, rows))
            for chunk, place in zip(self.model.chunks, places, strict=True)
        ]
        kind = schedule_class or SCHEDULES[parallel.schedule]
        self.schedule = kind(
            stages[0] if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else stages,
            parallel.micro_batches,
            loss_fn=lambda logits, targets: token_loss(logits, targets) / tokens,
            scale_grads=False,  # the loss is divided by all tokens already
        )

    def forward_backward(self, tokens, targets) -> torch.Tensor:
        """Gradients of the mean loss per token of a batch `[b, s]`; returns the loss, on every rank."""
        losses = []
        x = () if self.model.embed is None else (tokens,)
        y = {} if self.model.head is None else {"target": targets, "losses": losses}
        self.schedule.step(*x, **y, return_outputs=False)
        self.sum_tied(self.model.tied_gradient)
        loss = torch.zeros((), dtype=self.dtype, device=self.comm.device)
        for part in losses:
            loss += part.detach()
        return self.comm.all_reduce(loss, out=loss, label="loss", account=SCALAR)


def pipeline_sides(comm: Comm, model: ModelConfig, train: TrainConfig, parallel: ParallelConfig):
    """What `beside` takes turns with: ours and torch's, on the same tokens."""
    tokens, targets = batch(model, train, 0, device=comm.device)

    def load(rows: range):
        return tokens[rows.start : rows.stop], targets[rows.start : rows.stop]

    def ours():
        trainer = Trainer(comm, model, parallel, train)
        return trainer.model, lambda: trainer.accumulate(load, targets.numel())

    def theirs():
        split = TorchPipeline(comm, model, parallel, train)
        return split.model, lambda: split.forward_backward(tokens, targets)

    return ours, theirs


class _NoLoss(nn.Module):
    """In the place of the loss: the logits as they are."""

    def forward(self, logits, targets):
        return logits


def _shapes(chunk: Chunk, model: ModelConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What one micro-batch of `rows` sequences puts into and gets out of `chunk`, without memory: known beforehand, it
    need not be found out by a run."""
    shape, dtype = (rows, model.sequence), DTYPE[model.dtype]
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    activation = torch.empty(*shape, model.hidden, dtype=dtype, device="meta", requires_grad=True)
    logits = torch.empty(*shape, model.vocab, dtype=dtype, device="meta", requires_grad=True)
    return activation if chunk.embed is None else tokens, activation if chunk.head is None else logits


def _require(comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> None:
    if parallel.schedule not in SCHEDULES:
        raise ConfigError(f"torch has no schedule={parallel.schedule!r}; schedule can be {listed(SCHEDULES)}")
    if comm.size != parallel.pp:
        raise ConfigError(f"here the pipeline goes over all {comm.size} ranks, not pp={parallel.pp}")
    if train.batch % parallel.micro_batches:
        raise ConfigError(
            f"torch wants micro-batches of one size: micro_batches={parallel.micro_batches} must divide "
            f"batch={train.batch}"
        )
    if parallel.schedule == "1f1b" and parallel.micro_batches < parallel.pp:
        raise ConfigError(
            f"torch's 1F1B wants as many micro-batches as stages: micro_batches={parallel.micro_batches} must be "
            f"{parallel.pp} or more"
        )
    if model.dropout:
        raise ConfigError(
            f"torch's stages are not told which micro-batch they drop for: dropout={model.dropout} must be 0"
        )
