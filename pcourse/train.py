"""One training step of any legal ParallelConfig, and `measure`, which runs it on real ranks and reports its cost."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence

import torch

from pcourse.assemble import Recording, StepRecord, assemble
from pcourse.clock import described_time
from pcourse.comm import SCALAR, Comm
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, validate
from pcourse.cost.cluster import Cluster
from pcourse.data import batch
from pcourse.dropout import dropout_seed
from pcourse.meter import MemoryMeter
from pcourse.model import build
from pcourse.pace import Pace, machine_of
from pcourse.parallel.partition import stages_of
from pcourse.parallel.pipeline import Pipeline
from pcourse.parallel.recompute import recompute
from pcourse.parallel.shard import is_copy, shard_of
from pcourse.parallel.stage import Stage
from pcourse.parallel.tensor import tensor_parallel
from pcourse.parallel.unit import Unit, segments_of
from pcourse.parallel.zero import ZERO_STAGES
from pcourse.report import MemoryLedger, Report
from pcourse.split import micro_batches
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
        unsplit = tensor_parallel(prepare(unsplit) if prepare else unsplit, self.mesh.tp)
        schedule, parts = stages_of(model, parallel, train)
        self.model = Stage(unsplit, [parts[place] for place in schedule.places(self.mesh.pp.rank)])
        self.replicas = ZERO_STAGES[parallel.zero](self.mesh.dp, self.model, parallel, meter)
        self.pipeline = Pipeline(self.mesh.pp, schedule, self.model, self.replicas, meter, parallel.tp)
        recompute(self.model, parallel, self.pipeline.again, meter)
        self.micro_batches = micro_batches(train.batch, parallel.dp, self.mesh.dp.rank, parallel.micro_batches)
        self.optimizers = [(self._optimizer(units), units) for units in self.replicas.stepped_together]

    def _optimizer(self, units: list[Unit]) -> torch.optim.Optimizer:
        """The optimizer of what this rank owns of `units`, which may be nothing."""
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[self.train.optimizer]
        weights = [segment.weight for segment in segments_of(units)]
        optimizer = kind([{"params": weights}], lr=self.train.learning_rate, weight_decay=self.train.weight_decay)
        if self.meter is not None:
            self.meter.watch(optimizer)
        return optimizer

    def step(self, number: int) -> tuple[float, float]:
        """Step `number` on its batch: mean loss per token, and the gradient norm before clipping."""
        loss = self.forward_backward(number)
        with self.comm.compute("optimizer"):
            norm = self.gradient_norm()
            self.update(norm)
        return loss.item(), norm.item()

    def forward_backward(self, number: int) -> torch.Tensor:
        """Gradients of the batch's mean loss per token, whose micro-batches may differ in size; returns the loss."""

        def load(rows: range):
            return batch(self.config, self.train, number, slice(rows.start, rows.stop), self.comm.device)

        return self.accumulate(load, self.train.batch * self.config.sequence, dropout_seed(self.train, number))

    def accumulate(self, load, total: int, dropout_seed: int = 0) -> torch.Tensor:
        """As `forward_backward`: `load(rows)` gives those sequences' tokens and targets, of which all ranks together
        have `total`. Gradients of a call before it, if any, are dropped."""
        self.replicas.drop_gradients()
        loss = self.pipeline.run(self.micro_batches, load, total, dropout_seed)
        loss = self.replicas.finish_backward(loss)
        tied = (s.gradient for s in self.replicas.segments if s.parameter is self.model.tied_weight)
        self.pipeline.sum_tied(next(tied, None))
        return loss

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the unsplit model's gradient: each shard counts, of each replica and each copy one counts."""
        squares = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        for s in self.replicas.segments:
            p, grad = s.parameter, s.gradient
            if grad is not None and not is_copy(p) and (shard_of(p) is not None or self.mesh.tp.rank == 0):
                dtype = torch.promote_types(grad.dtype, torch.float32)
                squares += torch.linalg.vector_norm(grad, dtype=dtype).double() ** 2
        for group in (self.mesh.tp, self.mesh.pp, *([self.mesh.dp] if self.replicas.shards else [])):
            group.all_reduce(squares, out=squares, label="gradient norm", account=SCALAR)
        return squares.sqrt()

    def update(self, norm: torch.Tensor) -> None:
        """Clip to the norm `train.clip`, if there is one, as torch.nn.utils.clip_grad_norm_ does; step."""
        if self.train.clip is not None:
            factor = (self.train.clip / (norm + 1e-6)).clamp(max=1.0)
            for s in self.replicas.segments:
                if s.gradient is not None:
                    s.gradient.mul_(factor)
        for optimizer, units in self.optimizers:
            for s in segments_of(units):
                s.weight.grad = None if s.gradient is None else s.gradient.view_as(s.weight).to(s.weight.dtype)
            optimizer.step()
            optimizer.zero_grad()
            for unit in units:
                self.replicas.use_new_weights(unit)
        self.replicas.finish_step()


def time_pass(
    comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, on_step
) -> list[StepRecord]:
    """The warm-up steps, then `train.steps` recorded ones, on the clock that `comm` keeps."""
    trainer = Trainer(comm, model, parallel, train)
    records = []
    for number in range(train.warmup + train.steps):
        comm.start_together(warm_up=number < train.warmup)
        start = comm.clock.now()
        loss, norm = trainer.step(number)
        end, *late = comm.finish_step()
        calls, computes = comm.recorder.take()
        if number >= train.warmup:
            times = comm.clock.seconds(start), comm.clock.seconds(end)
            records.append(StepRecord(*times, calls, computes, loss, norm, *late))
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


def record(
    comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, machine=None, paced: bool = False
) -> Recording:
    """The rank program of `measure`. Time and memory take separate passes, so that the one does not spoil the other.

    The time is that of `machine`, if there is one. Memory does not depend on time, so nobody sleeps for it.
    """
    done, of = 0, train.warmup + train.steps + 2

    def on_step():
        nonlocal done
        done += 1
        if comm.rank == 0:
            comm.progress(done, of)

    with described_time(comm, machine, paced) if machine is not None else contextlib.nullcontext():
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
    cluster: Cluster | None = None,
    pace: Pace | float | Sequence[float] | None = None,
    progress=None,
    timeout: float = 600,
) -> Report:
    """Run this configuration on real ranks and report its time, memory and messages.

    `clock` "wall" takes the time that this machine needs, "paced" lets that of a described machine pass, "virtual" only
    reckons it. The machine is a `cluster` or a `pace`: seconds of a stage's forward, a number or one per stage, its
    backward taking twice that, or a Pace.

    `world` has `parallel.ranks` ranks; left out, one that fits is made. `progress(step, of)` is called as steps end.
    Runs that take real time take turns on a machine. Raises ConfigError, before any process starts, for what cannot
    run, and RankError where a rank fails.
    """
    model, parallel, train = model or ModelConfig(), parallel or ParallelConfig(), train or TrainConfig()
    validate(model, parallel, train)
    machine = machine_of(clock, cluster, pace, parallel)
    world = world or World(parallel.ranks)
    require_ranks(world, parallel)
    turn = contextlib.nullcontext() if clock == "virtual" else world.take_turns(_announcer(progress))
    with turn:
        arguments = model, parallel, train, machine, clock == "paced"
        recordings = world.run(record, *arguments, timeout=timeout, progress=progress)
    made_at = datetime.datetime.now().isoformat(timespec="seconds")
    return assemble(recordings, model, parallel, train, made_at=made_at, clock=clock, machine=machine)


def require_ranks(world, parallel: ParallelConfig) -> None:
    if not hasattr(world, "run"):
        raise ConfigError(f"world={world!r} must be a World, or left out")
    if world.size != parallel.ranks:
        raise ConfigError(f"this world has {world.size} ranks and the configuration needs {parallel.ranks}")


def _announcer(progress):
    return print if progress is None else lambda words: progress(0, 1, note=words)
