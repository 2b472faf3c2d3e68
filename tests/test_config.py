"""Configurations refuse what cannot run, with the values that would do."""

import numpy as np
import pytest

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig, validate


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ModelConfig(heads=7), "heads can be 1, 2, 4, 8"),
        (lambda: ModelConfig(heads=8, kv_heads=3), "kv_heads can be 1, 2, 4, 8"),
        (lambda: ModelConfig(layers=0), "layers=0 must be a whole number, 1 or more"),
        (lambda: ModelConfig(hidden=2.5), "whole number"),
        (lambda: ModelConfig(dropout=1.0), "at least 0 and below 1"),
        (lambda: ModelConfig(dtype="fp8"), "dtype can be float32, bfloat16, float64"),
        (lambda: ModelConfig(attention="flash"), "attention can be explicit, fused"),
        (lambda: ParallelConfig(tp=True), "tp=True must be a whole number"),
        (lambda: ParallelConfig(zero=4), "zero can be 0, 1, 2, 3"),
        (lambda: TrainConfig(optimizer="lion"), "optimizer can be adamw, sgd"),
        (lambda: TrainConfig(clip=-1), "clip=-1 must be a number, at least 0"),
        (lambda: TrainConfig(learning_rate="fast"), "learning_rate='fast' must be a number"),
    ],
)
def test_a_bad_value_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    "parallel, train, words",
    [
        (ParallelConfig(cp=2), TrainConfig(), "cp=2 is not built yet in this version; cp can be 1"),
        (
            ParallelConfig(pp=9),
            TrainConfig(),
            "do not fill pp=9 stages by partition='uniform'; pp can be 1, 2, 3, 4, 5, 6, 7, 8",
        ),
        (ParallelConfig(pp=11, partition="memory"), TrainConfig(), "pp can be 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        (
            ParallelConfig(pp=5, schedule="zb-v", chunks=2),
            TrainConfig(),
            "layers=8 do not fill pp=5 stages of 2 chunks by partition='uniform'; pp can be 1, 2, 3, 4",
        ),
        (ParallelConfig(schedule="2f2b"), TrainConfig(), "schedule='2f2b' is not known; schedule can be naive, gpipe"),
        (ParallelConfig(pp=2, chunks=2), TrainConfig(), "1f1b has one chunk on each stage, not chunks=2"),
        (
            ParallelConfig(pp=4, chunks=2, schedule="interleaved", micro_batches=6),
            TrainConfig(),
            "needs micro_batches in whole rounds of 4, not 6; micro_batches can be 4, 8, 12",
        ),
        (ParallelConfig(pp=2, schedule="zb-v"), TrainConfig(), "chunks can be 2"),
        (ParallelConfig(sequence_parallel=True), TrainConfig(), "sequence_parallel=True is not built yet"),
        (ParallelConfig(tp=3), TrainConfig(), "8 heads do not split over tp=3; tp can be 1, 2, 4, 8"),
        (ParallelConfig(micro_batches=5), TrainConfig(batch=4), "micro_batches can be 1 to 4"),
    ],
)
def test_a_bad_combination_is_refused(parallel, train, words):
    with pytest.raises(ConfigError, match=words):
        validate(ModelConfig(), parallel, train)


def test_derived_sizes_follow():
    assert ModelConfig(hidden=64).ffn == 256
    assert ModelConfig(hidden=64).but(hidden=128).ffn == 512
    assert ModelConfig(hidden=64, ffn=100).but(hidden=128).ffn == 100
    assert ModelConfig(heads=8).but(heads=4).kv_heads == 4
    assert ModelConfig(heads=8, kv_heads=2).but(heads=4).kv_heads == 2
    assert ParallelConfig(tp=2, micro_batches=4).ranks == 2


def test_numpy_integers_are_whole_numbers():
    config = ModelConfig(layers=np.int64(3), heads=np.int32(4))
    assert config == ModelConfig(layers=3, heads=4) and type(config.layers) is int


def test_large_sizes_are_refused_at_once():
    with pytest.raises(ConfigError, match="heads can be 1, 2"):
        ModelConfig(hidden=400_000_000, heads=7)
    with pytest.raises(ConfigError, match="below 2³¹"):
        TrainConfig(seed=10**20)
    with pytest.raises(ConfigError, match="sequence can be 1 to 250,000"):
        validate(ModelConfig(sequence=3_000_000), ParallelConfig(), TrainConfig())


def test_configurations_in_the_wrong_place_are_named():
    with pytest.raises(ConfigError, match="ParallelConfig stands where a ModelConfig must"):
        validate(ParallelConfig(), ParallelConfig(), TrainConfig())
    with pytest.raises(ConfigError, match="tied='no' must be True or False"):
        ModelConfig(tied="no")
