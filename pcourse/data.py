"""Real text without a download: the bytes of the learner's own Python standard library."""

from __future__ import annotations

import functools
import pathlib
import sysconfig

import torch

from pcourse.config import ModelConfig, TrainConfig

CORPUS_BYTES = 2_000_000


@functools.cache
def corpus() -> torch.Tensor:
    """The first 2 MB of the standard library's modules, in alphabetical order: bytes `[n]`, uint8.

    Raises FileNotFoundError where Python came without its sources.
    """
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(stdlib.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {stdlib}: the corpus is the standard library's own text")
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batch(model: ModelConfig, train: TrainConfig, step: int, rows: slice = slice(None), device="cpu"):
    """Sequences `rows` of the global batch of `step`: tokens and targets, `[rows, s]` int64 each.

    The batch depends on the seed and the step alone, so every split sees the same text. A token is a byte; a
    vocabulary below 256 folds the bytes into itself.
    """
    text = corpus()
    generator = torch.Generator().manual_seed(train.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - model.sequence - 1, (train.batch,), generator=generator)[rows]
    window = text[starts[:, None] + torch.arange(model.sequence + 1)].long() % model.vocab
    window = window.to(device)
    # Copied even where that is contiguous, of one sequence: so what is kept of a batch does not depend on its size.
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in (window[:, :-1], window[:, 1:]))
