"""The state of a training run on disk: saved by the ranks of one split, loaded by those of any other.

Each rank writes what it owns (`parallel/unit.py`) to a file of its own. What an element is called does not depend on
the split: by its parameter's name in the unsplit model and its place in that. So a state that 4 ranks have saved loads
onto 3, or onto other axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pcourse.config import ConfigError, listed
from pcourse.model import GPT
from pcourse.parallel.shard import Shard, shard_of
from pcourse.train import Trainer

WEIGHT = "weight"  # beside the optimizer's own names: exp_avg, exp_avg_sq, step
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.pt")


def save(trainer: Trainer, directory: str | Path) -> None:
    """Write this rank's weights and optimizer state to `directory`, which all ranks share. Every rank calls it.

    Of master weights and their 16-bit copies, the masters are written. Raises ConfigError where another number of ranks
    has saved there.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ranks, rank = trainer.comm.size, trainer.comm.rank
    if others := {size for _, size in _saved(directory)} - {ranks}:
        raise ConfigError(f"{directory} holds what {listed(others)} ranks saved, not {ranks}; save to an empty folder")
    pieces = []
    for piece in _owned(trainer):
        values = {WEIGHT: piece.weight.detach(), **piece.state}
        shard = piece.shard and (piece.shard.dim, piece.shard.index)
        kept = {key: (value.flatten() if value.dim() else value).cpu() for key, value in values.items()}
        pieces.append((piece.name, shard, piece.start, piece.stop, kept))
    torch.save((_sizes(trainer), pieces), directory / f"rank-{rank}-of-{ranks}.pt")
    trainer.comm.barrier()


def load(trainer: Trainer, directory: str | Path) -> None:
    """Put what `directory` holds into a trainer of the same model, split in any way. Every rank calls it.

    Each rank reads every file, and needs host memory for the whole state meanwhile. Raises ConfigError where files are
    missing, or are of another model.
    """
    shapes = _shapes(trainer)
    whole = _whole(_files(Path(directory)), _sizes(trainer), shapes)
    for piece in _owned(trainer):
        values = whole[piece.name]
        places = _places(shapes[piece.name], piece.shard, piece.start, piece.stop)
        mine = {key: flat[places] if flat.dim() else flat.clone() for key, flat in values.items()}
        with torch.no_grad():
            piece.weight.copy_(mine.pop(WEIGHT).view_as(piece.weight))
        if mine:
            weight = piece.weight
            piece.optimizer.state[weight] = {
                key: value.view_as(weight).to(weight) if value.dim() else value for key, value in mine.items()
            }
    for unit in trainer.replicas.units:
        trainer.replicas.publish(unit)
    trainer.replicas.end()


@dataclass
class _Piece:
    """Elements `start` to `stop` of a flattened parameter, or of the `shard` of it that this rank holds."""

    name: str
    shard: Shard | None
    start: int
    stop: int
    weight: torch.nn.Parameter
    optimizer: torch.optim.Optimizer | None  # None: it is frozen

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.optimizer is None else self.optimizer.state.get(self.weight, {})


def _owned(trainer: Trainer) -> Iterator[_Piece]:
    """What this rank owns. A tied matrix goes by the name that the unsplit model lists it under."""
    tied = {"head.output.weight": "embed.tokens.weight"} if trainer.config.tied else {}
    for optimizer, units in zip(trainer.optimizers, trainer.replicas.groups, strict=True):
        for s in (segment for unit in units for segment in unit.segments):
            yield _Piece(tied.get(s.name, s.name), shard_of(s.parameter), s.start, s.stop, s.weight, optimizer)
    for name, p in trainer.model.named_parameters():
        if not p.requires_grad:
            yield _Piece(tied.get(name, name), shard_of(p), 0, p.numel(), p, None)


def _sizes(trainer: Trainer) -> dict:
    """What two models must have in common to have the same parameters."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "tied")
    return {name: getattr(trainer.config, name) for name in names}


def _shapes(trainer: Trainer) -> dict[str, torch.Size]:
    """The unsplit model's, without its memory."""
    with torch.device("meta"):
        model = GPT(trainer.config)
    if trainer.config.tied:
        model.head.output.weight = model.embed.tokens.weight
    return {name: p.shape for name, p in model.named_parameters()}


def _places(shape: torch.Size, shard: Shard | None, start: int, stop: int) -> torch.Tensor:
    """Where elements `start` to `stop` of a shard, flattened, lie in the flattened whole."""
    places = torch.arange(shape.numel()).view(shape)
    return (places if shard is None else shard.of(places)).flatten()[start:stop]


def _whole(files: list[Path], sizes: dict, shapes: dict[str, torch.Size]) -> dict[str, dict[str, torch.Tensor]]:
    """Every parameter's weights and optimizer state, flattened and whole; step counters as they are."""
    whole = {name: {} for name in shapes}
    for path in files:
        saved, pieces = torch.load(path, weights_only=True)
        if others := [f"{name}={saved[name]}, not {sizes[name]}" for name in sizes if saved[name] != sizes[name]]:
            raise ConfigError(f"{path} is of another model: {listed(others)}")
        for name, shard, start, stop, values in pieces:
            places = _places(shapes[name], shard and Shard(*shard), start, stop)
            for key, value in values.items():
                if value.dim():
                    flat = whole[name].setdefault(key, torch.zeros(shapes[name].numel(), dtype=value.dtype))
                    flat[places] = value
                else:
                    whole[name][key] = value
    return whole


def _saved(directory: Path) -> list[tuple[int, int]]:
    """(rank, number of ranks) of each file of a state."""
    matches = [_FILE.fullmatch(path.name) for path in directory.iterdir()]
    return sorted((int(m[1]), int(m[2])) for m in matches if m)


def _files(directory: Path) -> list[Path]:
    saved = _saved(directory) if directory.is_dir() else []
    if not saved:
        raise ConfigError(f"{directory} holds no state; save one there first")
    ranks = saved[0][1]
    if missing := sorted(set(range(ranks)) - {rank for rank, _ in saved}):
        raise ConfigError(f"{directory} holds a state of {ranks} ranks, without that of rank {listed(missing)}")
    return [directory / f"rank-{rank}-of-{ranks}.pt" for rank in range(ranks)]
