"""A training run saved by one split and continued by another is the run that nobody interrupted."""

import pytest
import torch

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.launch.errors import RankError
from pcourse.state import load, save
from pcourse.train import Trainer
from pcourse.world import World

MODEL = ModelConfig(layers=3, hidden=12, heads=2, ffn=20, vocab=19, sequence=8, dtype="float64")
TRAIN = TrainConfig(batch=6, weight_decay=0.1, learning_rate=0.01)
SPLITS = {
    "one rank": ParallelConfig(),
    "dp=3, zero=1": ParallelConfig(dp=3, zero=1),
    "dp=2, zero=3, tp=2": ParallelConfig(dp=2, zero=3, tp=2),
    "dp=2, zero=2, pp=2": ParallelConfig(dp=2, zero=2, pp=2, micro_batches=2),
}


def steps(parallel, directory, first, last, model=MODEL, train=TRAIN, resume=False, prepare=None):
    """Losses and norms of steps `first` to `last` on a new world, which resumes from `directory` or saves there."""

    def program(comm):
        trainer = Trainer(comm, model, parallel, train, prepare=prepare)
        if resume:
            assert load(trainer, directory) == first
        results = [trainer.step(number) for number in range(first, last)]
        if not resume:
            save(trainer, directory, last)
        return results

    return World(parallel.ranks, backend="threads").run(program)[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return steps(ParallelConfig(), tmp_path_factory.mktemp("unused"), 0, 4)


@pytest.mark.parametrize("before", SPLITS)
def test_another_split_goes_on(tmp_path, before, uninterrupted):
    steps(SPLITS[before], tmp_path, 0, 2)
    for after in SPLITS.values():
        resumed = steps(after, tmp_path, 2, 4, resume=True)
        assert torch.allclose(torch.tensor(resumed), torch.tensor(uninterrupted[2:]), rtol=1e-10, atol=0)


def test_master_weights_are_what_is_saved(tmp_path):
    """Steps smaller than 16 bits can tell from 1 survive."""
    model = ModelConfig(layers=1, hidden=8, heads=2, vocab=11, sequence=8, dtype="bfloat16")
    train = TrainConfig(batch=4, learning_rate=1e-4)
    split = ParallelConfig(dp=2, zero=1, master_weights=True, grad_dtype="float32")
    uninterrupted = steps(split, tmp_path / "unused", 0, 6, model, train)
    steps(split, tmp_path / "state", 0, 3, model, train)
    assert steps(split, tmp_path / "state", 3, 6, model, train, resume=True) == uninterrupted[3:]


def test_frozen_weights_come_along(tmp_path):
    def frozen(model):
        model.blocks[0].requires_grad_(False)
        return model

    def other(model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        return frozen(model)

    split = ParallelConfig(dp=2, zero=3)
    uninterrupted = steps(split, tmp_path / "unused", 0, 4, prepare=frozen)
    steps(split, tmp_path / "state", 0, 2, prepare=frozen)
    resumed = steps(split, tmp_path / "state", 2, 4, resume=True, prepare=other)
    assert torch.allclose(torch.tensor(resumed), torch.tensor(uninterrupted[2:]), rtol=1e-10, atol=0)


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(RankError, match="holds no state"):
        steps(ParallelConfig(), tmp_path / "nowhere", 0, 1, resume=True)
    steps(ParallelConfig(dp=2), tmp_path, 0, 1)
    with pytest.raises(RankError, match="save to an empty folder"):
        steps(ParallelConfig(), tmp_path, 0, 1)
    with pytest.raises(RankError, match="another model: vocab=19, not 23"):
        steps(ParallelConfig(), tmp_path, 0, 1, model=MODEL.but(vocab=23), resume=True)
    one = (tmp_path / "rank-1-of-2.pt").read_bytes()
    steps(ParallelConfig(dp=2), tmp_path, 0, 2)
    (tmp_path / "rank-1-of-2.pt").write_bytes(one)
    with pytest.raises(RankError, match="files of steps 1, 2: a save was cut short"):
        steps(ParallelConfig(), tmp_path, 1, 2, resume=True)
    (tmp_path / "rank-1-of-2.pt").unlink()
    with pytest.raises(RankError, match="without that of rank 1"):
        steps(ParallelConfig(), tmp_path, 0, 1, resume=True)


def test_what_was_trained_may_be_frozen_from_then_on(tmp_path):
    steps(ParallelConfig(), tmp_path, 0, 1)

    def freeze(model):
        model.embed.requires_grad_(False)
        return model

    ((loss, _),) = steps(ParallelConfig(dp=2, zero=3), tmp_path, 1, 2, resume=True, prepare=freeze)
    assert loss > 0
