"""What each piece of the model weighs, by formula: parameters, floating-point operations, activations.

The pieces are where a pipeline may cut: the embedding, each transformer layer, the head (final norm, output matrix and
loss). Symbols: b sequences in a micro-batch, s their length, h hidden, a heads, f ffn, V vocabulary, t tensor-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pcourse.config import BYTES, ConfigError, ModelConfig, ParallelConfig, listed
from pcourse.cost.activations import Run, Sizes, kept_by_embedding, kept_by_head, kept_by_layer, sizes

OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}  # numbers of state for each parameter
FLOAT32 = BYTES["float32"]


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


def pieces(
    model: ModelConfig,
    sequences: int = 1,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    sequence_parallel: bool = False,
    recompute: str = "none",
    recompute_every: int = 1,
) -> tuple[Piece, ...]:
    """The embedding, each layer and the head, in model order, for a micro-batch of `sequences`: what rank `tp_rank` of
    the `tp` that share them holds, computes once, and keeps from forward to backward.

    A tied output matrix counts in the embedding *and* in the head: on two stages it is two copies.
    """
    own = sizes(model, sequences, tp=tp, tp_rank=tp_rank, sequence_parallel=sequence_parallel)
    policies = ("none" if i % recompute_every else recompute for i in range(model.layers))
    layers = (_layer(model, own, f"layer {i}", policy) for i, policy in enumerate(policies))
    return (_embedding(model, own), *layers, _head(model, own))


class StateBytes(NamedTuple):
    """Bytes of the model states: of one parameter, or of a rank."""

    parameters: int
    gradients: int
    optimizer: int


DIVIDED_FROM = StateBytes(parameters=3, gradients=2, optimizer=1)  # the ZeRO stage (Rajbhandari et al. 2020, section 5)


def bytes_per_parameter(
    dtype: str, optimizer: str = "adamw", grad_dtype: str = "same", master_weights: bool = False
) -> StateBytes:
    """What training keeps for one parameter of `dtype`, w bytes wide.

    Gradients are kept in w ("same"), in 4 bytes ("float32": autograd adds straight into float32) or in "both" (added up
    in w, copied to float32 to be reduced). AdamW keeps two numbers, SGD none: in w, or beside a master copy of the
    parameter in float32, which counts as the optimizer's. In bf16 with AdamW that makes 8 bytes; with master weights 16
    (Rajbhandari et al. 2020, section 3.1), with float32 gradients too 18, with both kinds of gradients 20.

    Raises ConfigError for a name that is not known.
    """
    _require_known("dtype", dtype, BYTES)
    _require_known("optimizer", optimizer, OPTIMIZER_COPIES)
    w = BYTES[dtype]
    gradients = {"same": w, "float32": FLOAT32, "both": w + FLOAT32}
    _require_known("grad_dtype", grad_dtype, gradients)
    copies = OPTIMIZER_COPIES[optimizer]
    return StateBytes(w, gradients[grad_dtype], FLOAT32 * (copies + 1) if master_weights else w * copies)


def bytes_on_a_replica(model: ModelConfig, parallel: ParallelConfig, optimizer: str) -> float:
    """Bytes of model states that one replica holds for each parameter, on average: what ZeRO leaves of them."""
    each = bytes_per_parameter(model.dtype, optimizer, parallel.grad_dtype, parallel.master_weights)
    return sum(n / (parallel.dp if parallel.zero >= stage else 1) for n, stage in zip(each, DIVIDED_FROM, strict=True))


def model_states(parameters: int, dtype: str, optimizer: str) -> int:
    """Bytes of the parameters, their gradients and the optimizer's state, all in `dtype`.

    Raises ConfigError for a dtype or optimizer that is not known.
    """
    return sum(bytes_per_parameter(dtype, optimizer)) * parameters


def piece_bytes(piece: Piece, model: ModelConfig, *, in_flight: float = 1, optimizer: str = "adamw") -> float:
    """Bytes of `piece`: its model states, and the activations of `in_flight` micro-batches."""
    return model_states(piece.parameters, model.dtype, optimizer) + in_flight * piece.activations


def _embedding(model: ModelConfig, own: Sizes) -> Piece:
    """A look-up multiplies nothing."""
    parameters = (own.vocab + model.sequence) * own.hidden
    return Piece("embedding", parameters, 0, 0, 0, _total(kept_by_embedding(model, own)))


def _layer(model: ModelConfig, own: Sizes, name: str, recompute: str) -> Piece:
    """Forward 24bsh² + 4bs²h FLOPs at f = 4h and kv_heads = heads (Narayanan et al. 2021, appendix).

    Both operands of Q·Kᵀ and of scores·V are activations: backward-input takes two products for each, and nothing is
    left for backward-weight. The causal half is multiplied too; what a fused kernel computes again is not counted.
    """
    h, qkv = own.hidden, own.query + 2 * own.key
    weights = h * qkv + own.query * h + 2 * h * own.ffn
    biases, norms = qkv + h + own.ffn + h, 4 * h
    linear = 2 * own.tokens * weights
    attention = 4 * own.scores * model.head_width
    return Piece(
        name,
        parameters=weights + biases + norms,
        forward=linear + attention,
        backward_input=linear + 2 * attention,
        backward_weight=linear,
        activations=_total(kept_by_layer(model, own, recompute)),
    )


def _head(model: ModelConfig, own: Sizes) -> Piece:
    """Logits 2bshV."""
    product = 2 * own.tokens * own.hidden * own.vocab
    parameters = (own.vocab + 2) * own.hidden
    return Piece("head", parameters, product, product, product, _total(kept_by_head(model, own)))


def _total(runs: tuple[Run, ...]) -> int:
    return sum(part.kept for run in runs for part in run)


def _require_known(name: str, value, legal) -> None:
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not known; {name} can be {listed(legal)}")
