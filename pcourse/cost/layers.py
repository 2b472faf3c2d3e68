"""What each piece of the model weighs, by formula: parameters, floating-point operations, activations.

The pieces are where a pipeline may cut: the embedding, each transformer layer, the head (final norm, output matrix and
loss). Symbols: b sequences in a micro-batch, s their length, h hidden, a heads, f ffn, V vocabulary, t tensor-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcourse.config import ModelConfig
from pcourse.cost.activations import Sizes, kept_by_embedding, kept_by_head, kept_by_layer, sizes, total_kept
from pcourse.cost.states import model_states


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


def piece_bytes(piece: Piece, model: ModelConfig, *, in_flight: float = 1, optimizer: str = "adamw") -> float:
    """Bytes of `piece`: its model states, and the activations of `in_flight` micro-batches."""
    return model_states(piece.parameters, model.dtype, optimizer) + in_flight * piece.activations


def _embedding(model: ModelConfig, own: Sizes) -> Piece:
    """A look-up multiplies nothing."""
    parameters = (own.vocab + model.sequence) * own.hidden
    return Piece("embedding", parameters, 0, 0, 0, total_kept(kept_by_embedding(model, own)))


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
        activations=total_kept(kept_by_layer(model, own, recompute)),
    )


def _head(model: ModelConfig, own: Sizes) -> Piece:
    """Logits 2bshV."""
    product = 2 * own.tokens * own.hidden * own.vocab
    parameters = (own.vocab + 2) * own.hidden
    return Piece("head", parameters, product, product, product, total_kept(kept_by_head(model, own)))
