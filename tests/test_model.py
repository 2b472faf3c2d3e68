"""The plain model: sizes of the papers, grouped heads, dropout by position, real text."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pcourse.config import ModelConfig, TrainConfig
from pcourse.data import batch, corpus
from pcourse.dropout import Dropout, position_hash, seed_dropout
from pcourse.model import build

TINY = ModelConfig(layers=2, hidden=32, heads=4, vocab=64, sequence=12)


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@settings(deadline=None)
@given(layers=st.integers(1, 3), width=st.integers(1, 6), vocab=st.integers(1, 90), sequence=st.integers(1, 20))
def test_parameters_as_the_papers_count_them(layers, width, vocab, sequence):
    h = 4 * width
    config = ModelConfig(layers=layers, hidden=h, heads=4, vocab=vocab, sequence=sequence)
    assert count(build(config)) == layers * (12 * h * h + 13 * h) + (vocab + sequence) * h + 2 * h
    assert count(build(replace(config, tied=False))) - count(build(config)) == vocab * h


def test_explicit_and_fused_attention_agree():
    tokens, targets = batch(TINY, TrainConfig(batch=2), 0)
    for kv_heads in (4, 2, 1):
        explicit, fused = (
            build(replace(TINY, kv_heads=kv_heads, attention=a, dtype="float64")) for a in ("explicit", "fused")
        )
        assert torch.allclose(explicit.loss(tokens, targets), fused.loss(tokens, targets), rtol=1e-12)


def test_a_token_sees_no_later_one():
    model = build(replace(TINY, dtype="float64"))
    tokens, _ = batch(TINY, TrainConfig(batch=1), 0)
    changed = tokens.clone()
    changed[0, 6:] = 0
    assert torch.equal(model(tokens)[0, :6], model(changed)[0, :6])
    assert not torch.equal(model(tokens)[0, 6:], model(changed)[0, 6:])


def test_targets_of_minus_100_are_left_out():
    model = build(TINY)
    tokens, targets = batch(TINY, TrainConfig(batch=1), 0)
    some = targets.clone()
    some[0, 4:] = -100
    logits = model(tokens)
    assert torch.allclose(model.loss(tokens, some), F.cross_entropy(logits[0, :4], targets[0, :4], reduction="sum"))


def test_weights_depend_on_the_seed_alone():
    torch.rand(7)
    a = build(TINY, seed=1)
    torch.rand(9)
    b, c = build(TINY, seed=1), build(TINY, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.blocks[0].mlp.up.weight, c.blocks[0].mlp.up.weight)
    assert a.head.output.weight is a.embed.tokens.weight


@settings(deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 6)] * 3),
    origin=st.tuples(*[st.integers(0, 9)] * 3),
    seed=st.integers(0, 2**40),
)
def test_the_mask_of_a_shard_is_the_shard_of_the_mask(shape, origin, seed):
    whole = position_hash([o + n for o, n in zip(origin, shape, strict=True)], {}, seed, "cpu")
    part = position_hash(shape, dict(enumerate(origin)), seed, "cpu")
    assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in zip(origin, shape, strict=True))])


def test_dropout_is_fair():
    drop = Dropout(0.3, site=5)
    seed_dropout(drop, step_seed=1, first_sequence=0)
    x = torch.ones(64, 64, 256)
    first = drop(x)
    assert abs((first == 0).float().mean() - 0.3) < 0.002
    assert abs(first.mean() - 1) < 0.002
    for dim in range(3):  # no more rows or columns alike than chance has it
        kept = (first != 0).float().flatten() - 0.7
        assert abs((kept * kept.view(x.shape).roll(1, dim).flatten()).mean() / 0.21) < 0.005
    seed_dropout(drop, step_seed=2, first_sequence=0)
    kept = (first != 0).float() - 0.7
    assert abs((kept * ((drop(x) != 0).float() - 0.7)).mean() / 0.21) < 0.005
    assert torch.equal(drop.eval()(x), x)


def test_the_corpus_is_text_that_every_split_sees_alike():
    assert len(corpus()) > 500_000 and b"def " in corpus()[:200_000].numpy().tobytes()
    train = TrainConfig(batch=5)
    tokens, targets = batch(TINY, train, 3)
    assert torch.equal(batch(TINY, train, 3, slice(2, 4))[0], tokens[2:4])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(batch(TINY, train, 4)[0], tokens)
    assert tokens.max() < TINY.vocab


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_loss_falls(optimizer):
    train = TrainConfig(batch=4, optimizer=optimizer)
    model = build(replace(TINY, vocab=256))
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    step = kinds[optimizer](model.parameters(), lr=train.learning_rate)
    losses = []
    for number in range(6):
        tokens, targets = batch(replace(TINY, vocab=256), train, number)
        loss = model.loss(tokens, targets) / targets.numel()
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
