"""The memory meter is exact to the byte, and the same from run to run."""

from dataclasses import replace

import pytest
import torch

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.meter import MemoryMeter
from pcourse.report import CATEGORIES
from pcourse.train import measure, memory_pass
from pcourse.world import World

MODEL = ModelConfig(layers=2, hidden=32, heads=4, vocab=64, sequence=16)
PARAMETERS = 2 * (12 * 32**2 + 13 * 32) + (64 + 16) * 32 + 2 * 32


def ledger(model=MODEL, parallel=ParallelConfig(), train=TrainConfig(batch=2), backend="threads"):
    return World(parallel.ranks, backend).run(memory_pass, model, parallel, train, lambda: None, timeout=60)


def test_model_states_are_exact():
    (adam,) = ledger()
    assert adam.parameters == adam.gradients == 4 * PARAMETERS
    assert adam.optimizer == 2 * 4 * PARAMETERS
    (sgd,) = ledger(train=TrainConfig(batch=2, optimizer="sgd"))
    assert sgd.optimizer == 0


@pytest.mark.parametrize("dropout, mask", [(0.0, 0), (0.1, 1)])
def test_activations_of_a_layer_as_korthikanti_counts_them(dropout, mask):
    """Their equation 1 at 4 bytes an element: 8·sbh + 5·as²b halves become 16 + masks, 2 + masks (dropout on)."""
    s, b, h, a, e = 16, 2, 32, 4, 4
    two, three = (ledger(replace(MODEL, layers=n, dropout=dropout))[0].activations for n in (2, 3))
    scores = a * s * s * b * ((2 * e + mask) if dropout else e)  # without dropout softmax and its input to V are one
    norms = 2 * 2 * s * b * 4
    causal = s * s
    assert three - two == s * b * h * (16 * e + 2 * mask) + scores + norms + causal


def test_the_same_bytes_again_and_on_processes():
    first = ledger(parallel=ParallelConfig(tp=2))
    assert ledger(parallel=ParallelConfig(tp=2)) == first
    on_processes = ledger(parallel=ParallelConfig(tp=2), backend="gloo")
    assert on_processes == ledger(parallel=ParallelConfig(tp=2), backend="gloo") == first


def test_tensor_parallelism_shards_what_it_should():
    (whole,), halves = ledger(), ledger(parallel=ParallelConfig(tp=2))
    replicated = 2 * (4 * 32 + 2 * 32) + 16 * 32 + 2 * 32  # LayerNorms, row biases, positions, the last LayerNorm
    for half in halves:
        assert half.parameters == 4 * ((PARAMETERS - replicated) // 2 + replicated)
        assert half.optimizer == 2 * half.parameters
        assert whole.activations / 2 < half.activations < whole.activations


def test_categories_of_a_small_program():
    with MemoryMeter() as meter:
        w = torch.ones(10, requires_grad=True)
        meter.claim("parameters", [w])
        x = torch.ones(10)
        with meter.saving():
            y = (w * x).exp()  # keeps w, x and its own result
        assert meter.bytes == {**dict.fromkeys(CATEGORIES, 0), "parameters": 40, "activations": 80}
        w.register_post_accumulate_grad_hook(lambda p: meter.see(p.grad, "gradients"))
        y.sum().backward()
        assert meter.bytes["gradients"] == 40
        del y, x
        assert meter.bytes == {**dict.fromkeys(CATEGORIES, 0), "parameters": 40, "gradients": 40}
        ledger = meter.ledger()
        assert ledger.activations == 80 and ledger.peak == sum(ledger.at_peak.values())
        meter.reset_peaks()
        assert meter.ledger().activations == 0


def test_resized_storages_are_seen():
    with MemoryMeter() as meter:
        x = torch.ones(100)
        x.resize_(10_000)
        assert meter.bytes["temporary"] == 40_000
        del x
        assert meter.bytes["temporary"] == 0


def test_a_report_holds_the_ledger():
    report = measure(MODEL, ParallelConfig(tp=2), TrainConfig(batch=2, steps=1, warmup=0), World(2, "threads"))
    assert [rank.memory for rank in report.ranks] == ledger(parallel=ParallelConfig(tp=2))
    for rank in report.ranks:  # activations are largest when backward begins, and the sum with them
        assert rank.memory.at_peak["activations"] > 0.8 * rank.memory.activations
