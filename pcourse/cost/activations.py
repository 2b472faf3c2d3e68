"""What autograd keeps of each piece of the model for backward, by formula: exact to the byte.

Symbols: b sequences in a micro-batch, s their length, h hidden, a heads, f ffn, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from pcourse.config import BYTES, ModelConfig
from pcourse.split import shard_sizes

INDEX = 8  # bytes of a token, a position or a target: int64
FLAG = 1  # bytes of an element of a mask: bool


class Sizes(NamedTuple):
    """What one tensor-parallel rank has of one micro-batch. Where t ranks share, it is this rank's share."""

    tokens: int  # b·s, which the cut matrices multiply
    stream: int  # tokens of the residual stream, LayerNorms and dropouts: b·s too, shared with sequence parallelism
    scores: int  # b·a·s² / t: elements of all its heads' score matrices
    hidden: int  # h
    heads: int  # a / t
    query: int  # width of its heads' queries together: h / t
    key: int  # width of its heads' keys, or values, together: h / t with as many of them as of queries
    ffn: int  # f / t
    vocab: int  # V / t
    width: int  # bytes of a number
    loss_width: int  # bytes of a number in the loss and in the fused attention's statistics: float32 or better


def sizes(
    model: ModelConfig, sequences: int = 1, *, tp: int = 1, tp_rank: int = 0, sequence_parallel: bool = False
) -> Sizes:
    def share(n: int) -> int:
        return shard_sizes(n, tp)[tp_rank]

    heads = share(model.heads)
    return Sizes(
        tokens=sequences * model.sequence,
        stream=sequences * (share(model.sequence) if sequence_parallel else model.sequence),
        scores=sequences * heads * model.sequence**2,
        hidden=model.hidden,
        heads=heads,
        query=heads * model.head_width,
        key=share(model.kv_heads) * model.head_width,
        ffn=share(model.ffn),
        vocab=share(model.vocab),
        width=BYTES[model.dtype],
        loss_width=max(BYTES[model.dtype], BYTES["float32"]),
    )


class Kept(NamedTuple):
    """What autograd keeps of one `part` of a piece, in bytes; parts stand in the order of the forward pass.

    `again` is what comes on top when backward runs a recomputed part again, to be freed with the rest. `later` is what
    a backward-input leaves for a weight gradient that is put off: the matrix's input, and the gradient of its output.
    """

    part: str
    kept: int
    again: int = 0
    later: int = 0


Run = tuple[Kept, ...]  # parts that backward runs again together, if it does


def total_kept(runs: tuple[Run, ...]) -> int:
    """Bytes from forward to backward, of all parts."""
    return sum(part.kept for run in runs for part in run)


def kept_by_layer(model: ModelConfig, own: Sizes, recompute: str = "none") -> tuple[Run, ...]:
    """What one layer keeps, as Korthikanti et al. 2022 (section 4.1) take it apart, under a recompute policy.

    Theirs is 34sbh + 5as²b bytes, at 16 bits with dropout, f = 4h, as many keys as queries: 4sbh norms, 11sbh + 5as²b
    attention, 19sbh MLP. The norms' mean and deviation, and the causal mask, come on top here. Tensor parallelism
    leaves 10sbh whole and shares the other 24sbh + 5as²b (equation 2), with sequence parallelism it shares all
    (equation 4). Selective recompute leaves the scores out (equation 6); full recompute keeps the layer's input alone,
    2sbh.
    """
    h, w = own.hidden, own.width
    stream, mask = own.stream * h * w, _mask(model) * own.stream * h
    query, projected, ffn, sums = (own.tokens * n * w for n in (own.query, own.query + 2 * own.key, own.ffn, h))
    made, scores, projection_stays = _attend(model, own, query)
    norm = Kept("norm", stream + 2 * own.stream * w)  # input, mean and deviation
    before = norm, Kept("attention: projection", stream, later=stream + projected)
    core = (
        Kept("attention: q, k, v", made + projected * projection_stays),
        Kept("attention: scores", scores),
    )
    after = (
        Kept("attention: output", query + mask, later=query + sums),
        norm,
        Kept("mlp: up", stream, later=stream + ffn),
        Kept("mlp: GeLU", ffn),
        Kept("mlp: down", ffn + mask, later=ffn + sums),
    )
    if recompute == "full":
        first, *others = (_again(part) for part in before + core + after)
        return ((Kept("layer input", stream), first._replace(again=norm.kept - stream), *others),)
    if recompute == "selective":
        # q, k, v stay. A fused output, which `out` has kept of the first run, is there twice.
        made += query if model.attention == "fused" else 0
        q_k_v, scored = core
        return before, (q_k_v._replace(kept=projected, again=made), _again(scored)), after
    return (before + core + after,)


def _again(part: Kept) -> Kept:
    return part._replace(kept=0, again=part.kept)


def _attend(model: ModelConfig, own: Sizes, query: int) -> tuple[int, int, bool]:
    """From q, k, v to the product of the scores with v: bytes kept of what is made of q, k and v, bytes kept of the
    scores, and whether the projection that q, k, v are views of is kept, too. A query of each token has `query`."""
    grouped = own.key < own.query
    copies = 2 * query  # of k and v, as many of each as of q
    if model.attention == "fused":  # of the scores only their logarithmic sums
        return copies * grouped, own.tokens * own.heads * own.loss_width, True
    # A batched product copies k and v unless they can be read where they are; q is copied when it is scaled.
    in_place = not grouped and (own.tokens == model.sequence or own.heads == 1)
    dropout = own.scores * (own.width + FLAG) if model.dropout else 0  # what it leaves, and its mask
    softmax, causal_mask = own.scores * own.width, FLAG * model.sequence**2
    return query + copies * (not in_place), softmax + dropout + causal_mask, in_place


def kept_by_embedding(model: ModelConfig, own: Sizes) -> tuple[Run, ...]:
    """The indices that were looked up, and where V is cut, which are other ranks'; a dropout's mask."""
    foreign = FLAG * own.tokens if own.vocab < model.vocab else 0
    mask = _mask(model) * own.stream * own.hidden
    return ((Kept("embedding", INDEX * (own.tokens + model.sequence) + foreign + mask),),)


def kept_by_head(model: ModelConfig, own: Sizes) -> tuple[Run, ...]:
    """The norm, what the output matrix reads, and the log-softmax of the logits in float32 or better, with the targets.

    The whole loss keeps one number besides, how many targets count; the cut loss, which are its own and which count.
    """
    stream = own.stream * own.hidden * own.width
    others = 2 * FLAG * own.tokens if own.vocab < model.vocab else own.loss_width
    run = (
        Kept("norm", stream + 2 * own.stream * own.width),
        Kept("logits: input", stream, later=stream + own.tokens * own.vocab * own.width),
        Kept("logits: loss", own.tokens * (own.vocab * own.loss_width + INDEX) + others),
    )
    return (run,)


def _mask(model: ModelConfig) -> int:
    return FLAG if model.dropout else 0
