"""The state of a training run on disk: saved by the ranks of one split, loaded by those of any other.

Each rank writes what it owns (`parallel/unit.py`) to a file of its own; of replicas that share nothing out, the first.
What an element is called does not depend on the split: by its parameter's name in the unsplit model and its place in
that. So a state that 4 ranks have saved loads onto 3, or onto other axes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from pcourse.config import ConfigError, listed
from pcourse.model import GPT
from pcourse.parallel.shard import Shard, shard_of
from pcourse.parallel.unit import Segment, segments_of
from pcourse.train import Trainer

WEIGHT = "weight"  # beside the optimizer's own names: exp_avg, exp_avg_sq, step
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.pt")


def save(trainer: Trainer, directory: str | Path, step: int) -> None:
    """Write this rank's weights and optimizer state, after so many steps, to `directory`, which all ranks share.

    Every rank calls it. Of master weights and their 16-bit copies, the masters are written. Raises ConfigError where
    another number of ranks has saved there.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; save to a folder")
    directory.mkdir(parents=True, exist_ok=True)
    ranks, rank = trainer.comm.size, trainer.comm.rank
    if others := {size for _, size in _saved(directory)} - {ranks}:
        raise ConfigError(f"{directory} holds what {listed(others)} ranks saved, not {ranks}; save to an empty folder")
    pieces = []
    if trainer.replicas.shards or trainer.mesh.dp.rank == 0:
        for name, segment, optimizer in _owned(trainer):
            state = {} if optimizer is None else optimizer.state.get(segment.weight, {})
            values = {WEIGHT: segment.weight.detach(), **state}
            kept = {key: (value.flatten() if value.dim() else value).cpu() for key, value in values.items()}
            shard = shard_of(segment.parameter)
            pieces.append((name, shard and (shard.dim, shard.index), segment.start, segment.stop, kept))
    path = directory / f"rank-{rank}-of-{ranks}.pt"
    torch.save((step, _sizes(trainer), pieces), unfinished := path.with_suffix(".unfinished"))
    trainer.comm.barrier()
    os.replace(unfinished, path)  # all at once, when all are written: what was saved before stays whole until then
    trainer.comm.barrier()


def load(trainer: Trainer, directory: str | Path) -> int:
    """Put what `directory` holds into a trainer of the same model, split in any way; returns after how many steps it
    was saved. Every rank calls it.

    Each rank reads every file, and needs host memory for the whole state meanwhile. Raises ConfigError where files are
    missing, or are of another model or of different steps.
    """
    shapes = _shapes(trainer)
    step, whole = _whole(_files(Path(directory)), _sizes(trainer), shapes)
    for name, segment, optimizer in _owned(trainer):
        weight = segment.weight
        places = _places(shapes[name], shard_of(segment.parameter), segment.start, segment.stop)
        mine = {key: flat[places] if flat.dim() else flat.clone() for key, flat in whole[name].items()}
        with torch.no_grad():
            weight.copy_(mine.pop(WEIGHT).view_as(weight))
        if optimizer is not None:
            optimizer.state.pop(weight, None)
        if mine and optimizer is not None:
            optimizer.state[weight] = {
                key: value.view_as(weight).to(weight) if value.dim() else value for key, value in mine.items()
            }
    for unit in trainer.replicas.units:
        trainer.replicas.use_new_weights(unit)
    trainer.replicas.finish_step()
    return step


def _owned(trainer: Trainer) -> Iterator[tuple[str, Segment, torch.optim.Optimizer | None]]:
    """What this rank owns, its name, and its optimizer; of what is frozen, which nobody shares out, the whole.

    A tied matrix goes by the name that the unsplit model lists it under.
    """
    tied = {"head.output.weight": "embed.tokens.weight"} if trainer.config.tied else {}
    for optimizer, units in trainer.optimizers:
        for segment in segments_of(units):
            yield tied.get(segment.name, segment.name), segment, optimizer
    for name, p in trainer.model.named_parameters():
        if not p.requires_grad:
            segment = Segment(name, p, 0, p.numel(), slice(None))
            segment.weight = p
            yield tied.get(name, name), segment, None


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


def _whole(files: list[Path], sizes: dict, shapes: dict[str, torch.Size]) -> tuple[int, dict]:
    """The step, and every parameter's weights and optimizer state, flattened and whole; step counters as they are."""
    whole = {name: {} for name in shapes}
    missing = {name: shape.numel() for name, shape in shapes.items()}
    steps = set()
    for path in files:
        try:
            step, saved, pieces = torch.load(path, weights_only=True)
        except Exception as e:  # whatever torch makes of bytes that it did not write
            raise ConfigError(f"{path} cannot be read as a saved state: {e}") from e
        steps.add(step)
        if others := [f"{name}={saved[name]}, not {sizes[name]}" for name in sizes if saved[name] != sizes[name]]:
            raise ConfigError(f"{path} is of another model: {listed(others)}")
        for name, shard, start, stop, values in pieces:
            places = _places(shapes[name], shard and Shard(*shard), start, stop)
            for key, value in values.items():
                if value.dim():
                    flat = whole[name].setdefault(key, torch.zeros(shapes[name].numel(), dtype=value.dtype))
                    flat[places] = value
                    if key == WEIGHT:
                        missing[name] -= len(places)
                else:
                    whole[name][key] = value
    if len(steps) > 1:
        raise ConfigError(f"{files[0].parent} holds files of steps {listed(sorted(steps))}: a save was cut short")
    if lacking := [name for name, elements in missing.items() if elements > 0]:
        raise ConfigError(f"{files[0].parent} lacks elements of {lacking[0]}: its files are of different splits")
    return steps.pop(), whole


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
