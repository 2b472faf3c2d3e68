"""What each piece of the model weighs, by formula: parameters, floating-point operations, activations.

The pieces are where a pipeline may cut: the embedding, each transformer layer, the head (final norm, output matrix and
loss). Symbols: b sequences in a micro-batch, s their length, h hidden, a heads, f ffn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcourse.config import BYTES, ConfigError, ModelConfig, listed

INDEX = 8  # bytes of a token, a position or a target: int64
OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}  # numbers of state for each parameter, in its own dtype


@dataclass(frozen=True)
class Piece:
    """One piece's `parameters` (a count), and for one micro-batch its FLOPs and the bytes autograd keeps.

    A piece keeps its own input, so that what crosses a boundary weighs on the part that receives it.
    """

    name: str
    parameters: int
    forward: int
    backward_input: int
    backward_weight: int
    activations: int

    @property
    def flops(self) -> int:
        return self.forward + self.backward_input + self.backward_weight


def pieces(model: ModelConfig, sequences: int = 1) -> tuple[Piece, ...]:
    """The embedding, each layer and the head, in model order, for a micro-batch of `sequences`.

    A tied output matrix counts in the embedding *and* in the head: on two stages it is two copies.
    """
    layers = (_layer(model, sequences, f"layer {i}") for i in range(model.layers))
    return (_embedding(model, sequences), *layers, _head(model, sequences))


def model_states(parameters: int, dtype: str, optimizer: str) -> int:
    """Bytes of the parameters, their gradients and the optimizer's state, all in `dtype`.

    Raises ConfigError for a dtype or optimizer that is not known.
    """
    for name, value, legal in (("dtype", dtype, BYTES), ("optimizer", optimizer, OPTIMIZER_COPIES)):
        if value not in legal:
            raise ConfigError(f"{name}={value!r} is not known; {name} can be {listed(legal)}")
    return (2 + OPTIMIZER_COPIES[optimizer]) * BYTES[dtype] * parameters


def piece_bytes(piece: Piece, model: ModelConfig, *, in_flight: float = 1, optimizer: str = "adamw") -> float:
    """Bytes of `piece`: its model states, and the activations of `in_flight` micro-batches."""
    return model_states(piece.parameters, model.dtype, optimizer) + in_flight * piece.activations


def _embedding(model: ModelConfig, b: int) -> Piece:
    """A look-up multiplies nothing; it keeps the indices that it looked up."""
    tokens = b * model.sequence
    kept = INDEX * (tokens + model.sequence) + _mask(model) * tokens * model.hidden
    return Piece("embedding", (model.vocab + model.sequence) * model.hidden, 0, 0, 0, kept)


def _layer(model: ModelConfig, b: int, name: str) -> Piece:
    """Forward 24bsh² + 4bs²h FLOPs at f = 4h and kv_heads = heads (Narayanan et al. 2021, appendix).

    Both operands of Q·Kᵀ and of scores·V are activations: backward-input takes two products for each, and nothing is
    left for backward-weight. The causal half is multiplied too; what a fused kernel computes again is not counted.
    """
    h, f = model.hidden, model.ffn
    qkv = h + 2 * model.kv_heads * model.head_width
    weights = h * qkv + h * h + 2 * h * f
    biases, norms = qkv + h + f + h, 4 * h
    linear = 2 * b * model.sequence * weights
    attention = 4 * b * model.sequence**2 * h
    return Piece(
        name,
        parameters=weights + biases + norms,
        forward=linear + attention,
        backward_input=linear + 2 * attention,
        backward_weight=linear,
        activations=_layer_activations(model, b),
    )


def _layer_activations(model: ModelConfig, b: int) -> int:
    """Bytes that autograd keeps of one layer: the 34sbh + 5as²b of Korthikanti et al. 2022 (equation 1), as built here.

    Both norms keep input, output, mean and deviation, `out` its input, `up` and `down` what GeLU reads and writes.
    A dropout keeps its mask, one byte an element.
    """
    tokens, h = b * model.sequence, model.hidden
    numbers = tokens * (5 * h + 2 * model.ffn + 4) + _attention_numbers(model, b)
    masks = 2 * _mask(model) * tokens * h
    if model.attention == "fused":
        logsumexp = b * model.heads * model.sequence * max(BYTES[model.dtype], 4)  # in float32 or better
        return BYTES[model.dtype] * numbers + masks + logsumexp
    masks += model.sequence**2 + _mask(model) * b * model.heads * model.sequence**2  # causal, dropout's
    return BYTES[model.dtype] * numbers + masks


def _attention_numbers(model: ModelConfig, b: int) -> int:
    """Numbers kept between the projection to q, k, v `[b, s, (a + 2·kv_heads)·h/a]` and the attention's output."""
    tokens, h = b * model.sequence, model.hidden
    projected = tokens * (h + 2 * model.kv_heads * model.head_width)
    repeated = 2 * tokens * h  # k and v, as many heads of each as of q
    grouped = model.kv_heads < model.heads
    if model.attention == "fused":
        return projected + (repeated if grouped else 0)  # q is a view of the projection, which it keeps whole
    # A batched product copies k and v, and the projection is freed, unless they can be read where they are.
    in_place = not grouped and (b == 1 or model.heads == 1)
    scores = b * model.heads * model.sequence**2
    dropped = scores if model.dropout else 0  # else what multiplies V is the softmax itself
    return tokens * h + (projected if in_place else repeated) + scores + dropped


def _head(model: ModelConfig, b: int) -> Piece:
    """Logits 2bshV. The loss keeps the log-softmax, in float32 or better, the targets and one number, their count."""
    tokens, width = b * model.sequence, BYTES[model.dtype]
    product = 2 * tokens * model.hidden * model.vocab
    norm = tokens * (2 * model.hidden + 2) * width
    loss = (tokens * model.vocab + 1) * max(width, 4) + tokens * INDEX
    return Piece("head", (model.vocab + 2) * model.hidden, product, product, product, norm + loss)


def _mask(model: ModelConfig) -> int:
    return 1 if model.dropout else 0
