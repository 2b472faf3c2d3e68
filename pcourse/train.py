"""One training step of any legal ParallelConfig, and `measure`, which runs it on real ranks and reports its cost."""

from __future__ import annotations

import contextlib
import datetime

import torch

from pcourse.assemble import Recording, StepRecord, assemble
from pcourse.comm import SCALAR, Comm
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, validate
from pcourse.data import batch
from pcourse.dropout import dropout_seed, seed_dropout
from pcourse.meter import MemoryMeter
from pcourse.model import build
from pcourse.parallel.shard import shard_of
from pcourse.parallel.tensor import tensor_parallel
from pcourse.report import MemoryLedger, Report
from pcourse.split import shard_sizes
from pcourse.world import World


class Trainer:
    """One rank's model, split as `parallel` says, and the steps that it takes.

    `meter`, if given, was entered before, so that it sees the model being built. `prepare` may change the unsplit
    model before it is cut.
    """

    def __init__(
        self, comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, meter=None, prepare=None
    ):
        self.comm, self.config, self.parallel, self.train, self.meter = comm, model, parallel, train, meter
        self.mesh = comm.split(dp=parallel.dp, pp=parallel.pp, cp=parallel.cp, tp=parallel.tp)
        unsplit = build(model, train.seed, comm.device)
        self.model = tensor_parallel(prepare(unsplit) if prepare else unsplit, self.mesh.tp)
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        self.optimizer = kinds[train.optimizer](
            self.model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay
        )
        if meter is not None:
            meter.attach(self.model, self.optimizer)

    def step(self, number: int) -> tuple[float, float]:
        """Step `number` on its batch: mean loss per token, and the gradient norm before clipping."""
        loss = self.forward_backward(number)
        with self.comm.compute("optimizer"):
            norm = self.gradient_norm()
            self.update(norm)
        return loss.item(), norm.item()

    def forward_backward(self, number: int) -> torch.Tensor:
        """Gradients of the batch's mean loss per token, whose micro-batches may differ in size; returns the loss."""
        total = self.train.batch * self.config.sequence
        loss, first = 0.0, 0
        for k, rows in enumerate(shard_sizes(self.train.batch, self.parallel.micro_batches)):
            tokens, targets = batch(self.config, self.train, number, slice(first, first + rows), self.comm.device)
            seed_dropout(self.model, dropout_seed(self.train, number), first)
            with self.comm.compute("forward", micro_batch=k), self._saving():
                part = self.model.loss(tokens, targets) / total  # by tokens, so that micro-batches weigh as they should
            with self.comm.compute("backward", micro_batch=k):
                part.backward()
            loss, first = loss + part.detach(), first + rows
        return loss

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the unsplit model's gradient: each shard counts, each replicated parameter counts once."""
        tp = self.mesh.tp
        squares = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        for p in self.model.parameters():
            if p.grad is not None and (shard_of(p) is not None or tp.rank == 0):
                squares += (
                    torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.dtype, torch.float32)).double() ** 2
                )
        if tp.size > 1:
            tp.all_reduce(squares, out=squares, label="gradient norm", account=SCALAR)
        return squares.sqrt()

    def update(self, norm: torch.Tensor) -> None:
        """Clip to the norm `train.clip`, if there is one, as torch.nn.utils.clip_grad_norm_ does; step."""
        if self.train.clip is not None:
            factor = (self.train.clip / (norm + 1e-6)).clamp(max=1.0)
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor.to(p.grad.dtype))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _saving(self):
        return self.meter.saving() if self.meter is not None else contextlib.nullcontext()


def time_pass(
    comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, on_step
) -> list[StepRecord]:
    """The warm-up steps, then `train.steps` recorded ones."""
    trainer = Trainer(comm, model, parallel, train)
    records = []
    for number in range(train.warmup + train.steps):
        comm.barrier()  # the ranks start each step together
        comm.recorder.take()
        start = comm.clock.now()
        loss, norm = trainer.step(number)
        end = comm.clock.now()
        calls, computes = comm.recorder.take()
        if number >= train.warmup:
            records.append(StepRecord(comm.clock.seconds(start), comm.clock.seconds(end), calls, computes, loss, norm))
        on_step()
    return records


def memory_pass(comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, on_step) -> MemoryLedger:
    """The ledger of one step in the steady state, when the optimizer's state exists."""
    with MemoryMeter() as meter:
        trainer = Trainer(comm, model, parallel, train, meter)
        trainer.step(0)
        on_step()
        meter.reset_peaks()
        if comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(comm.device)
        trainer.step(1)
        on_step()
        return meter.ledger()


def record(comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> Recording:
    """The rank program of `measure`. Time and memory take separate passes, so that the one does not spoil the other."""
    done, of = 0, train.warmup + train.steps + 2

    def on_step():
        nonlocal done
        done += 1
        if comm.rank == 0:
            comm.progress(done, of)

    steps = time_pass(comm, model, parallel, train, on_step)
    ledger = memory_pass(comm, model, parallel, train, on_step)
    allocated = torch.cuda.max_memory_allocated(comm.device) if comm.device.type == "cuda" else None
    return Recording(comm.describe(), steps, ledger, comm.clock.uncertainty, allocated)


def measure(
    model: ModelConfig | None = None,
    parallel: ParallelConfig | None = None,
    train: TrainConfig | None = None,
    world: World | None = None,
    *,
    clock: str = "wall",
    progress=None,
    timeout: float = 600,
) -> Report:
    """Run this configuration on real ranks and report its time, memory and messages.

    `world` has `parallel.ranks` ranks; left out, one that fits is made. `progress(step, of)` is called as steps end.
    Runs that measure take turns on a machine. Raises ConfigError, before any process starts, for what cannot run, and
    RankError where a rank fails.
    """
    model, parallel, train = model or ModelConfig(), parallel or ParallelConfig(), train or TrainConfig()
    validate(model, parallel, train)
    if clock != "wall":
        raise ConfigError(f"clock={clock!r} is not built yet in this version; clock can be 'wall'")
    world = world or World(parallel.ranks)
    require_ranks(world, parallel)
    with world.take_turns(_announcer(progress)):
        recordings = world.run(record, model, parallel, train, timeout=timeout, progress=progress)
    return assemble(recordings, model, parallel, train, made_at=datetime.datetime.now().isoformat(timespec="seconds"))


def require_ranks(world, parallel: ParallelConfig) -> None:
    if world.size != parallel.ranks:
        raise ConfigError(f"this world has {world.size} ranks and the configuration needs {parallel.ranks}")


def _announcer(progress):
    return print if progress is None else lambda words: progress(0, 1, note=words)
