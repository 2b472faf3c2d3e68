"""The proof that a split is right: the unsplit model and the split one take the same steps, and every number agrees.

The reference is plain PyTorch on each rank, with no line in common with the split step beyond the model itself. Three
steps of SGD, not Adam: Adam divides a gradient's scale away, and with it the commonest faults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pcourse.comm import Comm
from pcourse.config import ModelConfig, ParallelConfig, TrainConfig, validate
from pcourse.data import batch
from pcourse.dropout import dropout_seed, seed_dropout
from pcourse.model import GPT, build
from pcourse.parallel.shard import shard_of
from pcourse.train import Trainer, require_ranks
from pcourse.world import World

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}
STEPS = 3


@dataclass(frozen=True)
class Proof:
    """The largest differences over all ranks and parameters: of the first step, and of the weights after three.

    A difference is relative to the largest magnitude of the reference's tensor (or to 1, if that is larger).
    """

    dtype: str
    loss: float
    gradients: float
    gradient_norm: float
    weights: float
    parameters: int  # parameter tensors compared, over all ranks

    @property
    def worst(self) -> float:
        return largest([self.loss, self.gradients, self.gradient_norm, self.weights])

    @property
    def holds(self) -> bool:
        """Whether the worst difference stays within TOLERANCE for the dtype."""
        return self.worst <= TOLERANCE[self.dtype]

    def __str__(self) -> str:
        verdict = "equal to" if self.holds else "NOT equal to"
        rows = (
            ("loss", self.loss),
            (f"gradients ({self.parameters} tensors)", self.gradients),
            ("gradient norm", self.gradient_norm),
            (f"weights after {STEPS} SGD steps", self.weights),
        )
        lines = [f"{verdict} the unsplit model within {TOLERANCE[self.dtype]:g} ({self.dtype})"]
        return "\n".join(lines + [f"  {name:<32} largest difference {value:.1e}" for name, value in rows])


def prove(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig | None = None,
    *,
    dtype: str = "float64",
    world: World | None = None,
    timeout: float = 120,
) -> Proof:
    """Take three SGD steps split and unsplit from the same weights, which are made unlike any default: every bias and
    LayerNorm differs from 0 and 1. `world` (threads if left out) has `parallel.ranks` ranks."""
    model = replace(model, dtype=dtype)
    train = replace(train or TrainConfig(batch=4), optimizer="sgd", learning_rate=0.1)
    validate(model, parallel, train)
    world = world or World(parallel.ranks, backend="threads")
    require_ranks(world, parallel)
    return _worst(world.run(compare, model, parallel, train, timeout=timeout), dtype)


def compare(comm: Comm, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> Proof:
    """The rank program of `prove`: this rank's part of the comparison."""
    trainer = Trainer(comm, model, parallel, train, prepare=roughen)
    reference = roughen(build(model, train.seed, comm.device))
    sgd = torch.optim.SGD(reference.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay)
    parameters = dict(trainer.model.named_parameters())
    shards = {name: shard_of(p) for name, p in parameters.items()}
    first = None
    for number in range(STEPS):
        loss, expected_loss = trainer.forward_backward(number), _reference_backward(reference, model, train, number)
        got = trainer.replicas.whole_gradients()
        gradients = _largest(got, shards, {n: p.grad for n, p in _named(reference)})
        norm = trainer.gradient_norm()
        expected_norm = torch.nn.utils.clip_grad_norm_(
            reference.parameters(), math.inf if train.clip is None else train.clip
        )
        first = first or (_difference(loss, expected_loss), gradients, _difference(norm, expected_norm))
        trainer.update(norm)
        sgd.step()
        sgd.zero_grad()
    with trainer.replicas.whole_weights():
        weights = _largest(parameters, shards, dict(_named(reference)))
    return Proof(model.dtype, *first, weights=weights, parameters=len(parameters))


def roughen(model: GPT) -> GPT:
    """Move every parameter off its default, the same way on every rank."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += (torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.05).to(p)
    return model


def _reference_backward(reference: GPT, model: ModelConfig, train: TrainConfig, number: int):
    tokens, targets = batch(model, train, number, device=next(reference.parameters()).device)
    seed_dropout(reference, dropout_seed(train, number), 0)
    loss = reference.loss(tokens, targets) / targets.numel()
    loss.backward()
    return loss.detach()


def _named(reference: GPT):
    return reference.named_parameters(remove_duplicate=False)  # a tied matrix under both of its names


def _largest(got: dict, shards: dict, expected: dict) -> float:
    """The largest difference of what each name stands for, of which this rank has a shard, or all."""
    differences = []
    for name, tensor in got.items():
        whole = expected[name]
        if tensor is None or whole is None:  # a parameter that is not used has no gradient on either side
            differences.append(0.0 if tensor is whole else math.inf)
            continue
        differences.append(_difference(tensor, whole if shards[name] is None else shards[name].of(whole)))
    return largest(differences)


def largest(differences: list[float]) -> float:
    """The largest, where NaN is larger than all: Python's max may pass over it, and NaN never proves anything."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    scale = max(1.0, expected.abs().max().item())
    return (got.detach().double() - expected.detach().double()).abs().max().item() / scale


def _worst(proofs: list[Proof], dtype: str) -> Proof:
    names = ("loss", "gradients", "gradient_norm", "weights")
    worst = {name: largest([getattr(proof, name) for proof in proofs]) for name in names}
    return Proof(dtype, **worst, parameters=sum(proof.parameters for proof in proofs))
