"""Each part's parameters, FLOPs and bytes by formula are those of the running model; partitions are the best ones."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.layers import pieces
from pcourse.cost.states import model_states
from pcourse.meter import MemoryMeter
from pcourse.model import build
from pcourse.parallel.partition import Part, balance, part_bytes, part_flops, part_parameters, partition, stages_of
from pcourse.train import memory_pass
from pcourse.world import World

MODEL = ModelConfig(layers=3, hidden=32, heads=4, vocab=50, sequence=16)
LARGE_VOCABULARY = ModelConfig(layers=8, hidden=64, heads=4, vocab=5000, sequence=32)


@st.composite
def models(draw):
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return ModelConfig(
        layers=draw(st.integers(1, 3)),
        hidden=heads * draw(st.integers(1, 9)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=draw(st.integers(1, 40)),
        vocab=draw(st.integers(2, 50)),
        sequence=draw(st.integers(1, 20)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        tied=draw(st.booleans()),
        attention=draw(st.sampled_from(["explicit", "fused"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float64"])),
    )


def modules(model):
    """The running model's pieces, each a function of what the one before gave; the head's is the loss."""

    def loss(x):
        return model.token_loss(model.head(x), torch.zeros(x.shape[:2], dtype=torch.long))

    return [model.embed, *model.blocks, loss]


def tokens_of(model, sequences):
    return torch.randint(model.vocab, (sequences, model.sequence))


@settings(max_examples=60, deadline=None)
@given(model=models(), sequences=st.integers(1, 3))
def test_activations_are_what_autograd_keeps_to_the_byte(model, sequences):
    with MemoryMeter() as meter:
        built = build(model)
        meter.claim("parameters", built.parameters())
        x, before = tokens_of(model, sequences), 0
        for run, piece in zip(modules(built), pieces(model, sequences), strict=True):
            with meter.saving():
                x = run(x)
            assert meter.bytes["activations"] - before == piece.activations, piece.name
            before = meter.bytes["activations"]


@settings(max_examples=30, deadline=None)
@given(model=models())
def test_parameters_are_those_of_the_model(model):
    def count(module):
        return sum(p.numel() for p in module.parameters())

    built = build(model)
    real = [count(m) for m in (built.embed, *built.blocks, built.head)]
    assert [piece.parameters for piece in pieces(model)] == real
    (whole,) = partition(model, 1)
    assert part_parameters(whole, model) == count(built)
    if model.layers > 1:
        assert sum(part_parameters(part, model) for part in partition(model, 2)) == sum(real)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"ffn": 77, "dropout": 0.1}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("sequences", [1, 3])
def test_flops_are_what_the_counter_counts(changes, sequences):
    model = MODEL.but(**changes)
    built = build(model)
    forward, x = [], tokens_of(model, sequences)
    for run in modules(built):
        with FlopCounterMode(display=False) as counter:
            x = run(x)
        forward.append(counter.get_total_flops())
    each = pieces(model, sequences)
    assert [piece.forward for piece in each] == forward
    with FlopCounterMode(display=False) as counter:
        x.backward()
    assert sum(piece.backward_input + piece.backward_weight for piece in each) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:  # with frozen weights, no backward-weight
        hidden = torch.ones(sequences, model.sequence, model.hidden, dtype=built.embed.tokens.weight.dtype)
        block = built.blocks[0].requires_grad_(False)
        block(hidden.requires_grad_()).sum().backward()
    assert each[1].forward + each[1].backward_input == counter.get_total_flops()


def test_flops_of_the_papers_layer():
    layer, head = pieces(MODEL, 2)[1], pieces(MODEL, 2)[-1]
    b, s, h = 2, MODEL.sequence, MODEL.hidden
    assert layer.forward == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert layer.flops == 3 * layer.forward
    assert head.forward == 2 * b * s * h * MODEL.vocab


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bytes_are_those_of_a_training_step(optimizer):
    train = TrainConfig(batch=2, optimizer=optimizer)
    (ledger,) = World(1, "threads").run(memory_pass, MODEL, ParallelConfig(), train, lambda: None, timeout=60)
    (whole,) = partition(MODEL, 1)
    measured = ledger.parameters + ledger.gradients + ledger.optimizer + ledger.activations
    assert part_bytes(whole, MODEL, sequences=2, optimizer=optimizer) == measured


@pytest.mark.parametrize("rule", ["uniform", "compute", "memory"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_each_part_with_its_micro_batches(rule, dtype):
    model, in_flight = LARGE_VOCABULARY.but(layers=4, dtype=dtype), (3, 2, 1)
    for held, part in zip(in_flight, partition(model, 3, rule, sequences=2, in_flight=in_flight)):
        with MemoryMeter() as meter:
            built = build(model)
            mine = part.pieces((built.embed, *built.blocks, built.head))
            weights = [p for module in mine for p in module.parameters()]
            states = [torch.empty_like(p) for p in weights for _ in range(3)]  # gradient and the two of AdamW
            meter.claim("parameters", [*weights, *states])
            graphs = []
            for _ in range(held):
                hidden = torch.ones(2, model.sequence, model.hidden, dtype=weights[0].dtype, requires_grad=True)
                x = tokens_of(model, 2) if part.embedding else hidden
                with meter.saving():
                    for run in part.pieces(modules(built)):
                        x = run(x)
                graphs.append(x)
            measured = meter.bytes["parameters"] + meter.bytes["activations"]
        assert measured == part_bytes(part, model, sequences=2, in_flight=held), str(part)


@settings(deadline=None)
@given(
    layers=st.integers(1, 9),
    vocab=st.sampled_from([10, 300, 20000]),
    parts=st.integers(1, 11),
    rule=st.sampled_from(["uniform", "compute", "memory"]),
)
def test_every_piece_is_on_one_part_in_order(layers, vocab, parts, rule):
    model = ModelConfig(layers=layers, hidden=16, heads=2, vocab=vocab, sequence=8)
    parts = min(parts, layers if rule == "uniform" else layers + 2)
    cut = partition(model, parts, rule)
    assert len(cut) == parts
    assert [i for part in cut for i in part.layers] == list(range(layers))
    assert [part.embedding for part in cut] == [True] + [False] * (parts - 1)
    assert [part.head for part in cut] == [False] * (parts - 1) + [True]
    assert all(part.pieces(pieces(model)) for part in cut)
    assert sum((part.pieces(pieces(model)) for part in cut), ()) == pieces(model)


@settings(deadline=None)
@given(layers=st.integers(1, 40), parts=st.integers(1, 40))
def test_uniform_is_even_and_spares_the_ends(layers, parts):
    parts = min(parts, layers)
    sizes = [len(part.layers) for part in partition(MODEL.but(layers=layers), parts)]
    assert max(sizes) - min(sizes) <= 1
    more = [i for i, size in enumerate(sizes) if size > min(sizes)]
    if len(more) <= parts - 2:
        assert 0 not in more and parts - 1 not in more
    assert sizes[-1] == min(sizes)  # the head multiplies; the embedding only looks up


def every_cut(n, parts):
    for cuts in combinations(range(1, n), parts - 1):
        yield tuple(range(start, stop) for start, stop in pairwise((0, *cuts, n)))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), per_part=st.booleans())
def test_balance_is_the_best_of_all_cuts(data, per_part):
    n = data.draw(st.integers(1, 8))
    parts = data.draw(st.integers(1, n))
    numbers = st.integers(0, 9)
    cost = st.lists(numbers, min_size=parts, max_size=parts) if per_part else numbers
    costs = data.draw(st.lists(cost, min_size=n, max_size=n))

    def weight(runs):
        each = [sum(costs[i][k] if per_part else costs[i] for i in run) for k, run in enumerate(runs)]
        return max(each), sum(c * c for c in each), [run.stop for run in runs]

    assert balance(costs, parts) == min(every_cut(n, parts), key=weight)


def test_balance_prefers_the_even_cut():
    assert balance([9, 1, 1, 1, 1], 3) == (range(0, 1), range(1, 3), range(3, 5))
    assert balance([1.5, 1.5, 3.0], 2) == (range(0, 2), range(2, 3))


@pytest.mark.parametrize("rule, cost", [("compute", part_flops), ("memory", part_bytes)])
def test_a_rule_beats_every_other_cut_by_its_own_measure(rule, cost):
    best = max(cost(part, LARGE_VOCABULARY) for part in partition(LARGE_VOCABULARY, 3, rule))
    n = LARGE_VOCABULARY.layers
    for i, j in combinations(range(n + 1), 2):
        cut = Part(True, range(0, i), False), Part(False, range(i, j), False), Part(False, range(j, n), True)
        assert best <= max(cost(part, LARGE_VOCABULARY) for part in cut)


def test_the_embedding_beside_several_layers_fills_the_first_part():
    """5000·64 parameters are those of 6.4 layers: counted by layers, the ends weigh more than twice a middle part."""
    in_flight = (4, 3, 2, 1)
    uniform, memory = (partition(LARGE_VOCABULARY, 4, rule, in_flight=in_flight) for rule in ("uniform", "memory"))
    assert [str(part) for part in uniform] == ["embedding, layers 0-1", "layers 2-3", "layers 4-5", "layers 6-7, head"]
    assert (str(memory[0]), str(memory[3])) == ("embedding", "head")

    def fill(cut):
        return [part_bytes(part, LARGE_VOCABULARY, in_flight=n) for part, n in zip(cut, in_flight)]

    assert min(fill(uniform)[0], fill(uniform)[3]) > 2 * max(fill(uniform)[1:3])
    assert max(fill(memory)) < 0.85 * max(fill(uniform))


def test_more_micro_batches_in_flight_move_layers_to_later_parts():
    model = ModelConfig(layers=8, hidden=32, heads=4, vocab=32, sequence=64)
    even, skewed = (partition(model, 2, "memory", in_flight=held) for held in (None, (8, 1)))
    assert len(even[0].layers) == 4 and len(skewed[0].layers) < 3


def test_parts_read_well():
    (whole,) = partition(MODEL, 1)
    assert str(whole) == "embedding, layers 0-2, head"
    assert [str(part) for part in partition(MODEL, 3)] == ["embedding, layer 0", "layer 1", "layer 2, head"]
    assert [str(part) for part in partition(MODEL, 5, "compute")] == [
        "embedding",
        "layer 0",
        "layer 1",
        "layer 2",
        "head",
    ]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: partition(MODEL.but(layers=2), 4), "2 layers cannot fill 4 parts; parts can be 1 to 2, or 1 to 4 by"),
        (
            lambda: partition(MODEL, 6, "memory"),
            "3 layers, embedding and head cannot fill 6 parts; parts can be 1 to 5",
        ),
        (lambda: partition(MODEL, 0), "parts=0 must be a whole number, 1 or more"),
        (lambda: partition(MODEL, 2.0), "whole number"),
        (lambda: partition(MODEL, 2, "even"), "partition can be uniform, compute, memory"),
        (lambda: partition(MODEL, 2, "memory", in_flight=[1]), "in_flight has 1 numbers for 2 parts"),
        (lambda: partition(MODEL, 2, "memory", optimizer="lion"), "optimizer can be adamw, sgd"),
        (lambda: model_states(1, "fp8", "sgd"), "dtype can be float32, bfloat16, float64"),
        (lambda: balance([1, 2], 3), "2 costs do not fill parts=3; parts can be 1 to 2"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, words):
    with pytest.raises(ConfigError if "costs" not in words else ValueError, match=words):
        make()


def test_by_memory_of_what_a_split_leaves():
    """Recomputed layers keep next to nothing, so that the head with its logits weighs more beside them."""
    model, train = LARGE_VOCABULARY.but(vocab=1000), TrainConfig(batch=32)
    split = {"pp": 2, "micro_batches": 4, "partition": "memory", "schedule": "gpipe"}

    def last(**how):
        return len(stages_of(model, ParallelConfig(**split, **how), train)[1][-1].layers)

    assert last(recompute="full") < last(recompute="full", recompute_every=2) < last()
