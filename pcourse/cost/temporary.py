"""What lives only inside an operation or while a message is under way: the residual of the memory formulas, by name.

These are the large ones of each part of the model, of each unit that is gathered or reduced, and of the optimizer's
step; what is left out is a few vectors of a LayerNorm or a bias. They are not kept, so two of them seldom add up:
`cost.memory` takes the largest at each moment of a step. Symbols as in `cost.activations`.
"""

from __future__ import annotations

from typing import NamedTuple

from pcourse.config import BYTES, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.activations import Sizes
from pcourse.cost.units import ENDS, TIED
from pcourse.split import shard_sizes

HASH = 3 * 4  # bytes for each element while a dropout draws its mask: three int32 (pcourse/dropout.py)


class Passing(NamedTuple):
    """Bytes that a part of a piece takes beyond what it keeps, forward and backward; and how many weights it has, whose
    gradient is there from then on."""

    forward: int = 0
    backward: int = 0
    weights: int = 0


def passing(piece: str, model: ModelConfig, own: Sizes) -> dict[str, Passing]:
    """{part: Passing} of a piece: the embedding, a layer, the head.

    Backward holds the gradient of an operation's output and of its input at once; a linear layer also makes its
    weight's gradient before that is added to the others. Where the residual stream's gradient waits beside them,
    that is not in.
    """
    return {"embedding": _embedding, "head": _head}.get(piece, _layer)(model, own)


def _layer(model: ModelConfig, own: Sizes) -> dict[str, Passing]:
    h, w = own.hidden, own.width
    projected, query, ffn = own.query + 2 * own.key, own.query, own.ffn
    stream, tokens = own.stream * h * w, own.tokens * w
    mask = (HASH + w) * own.stream * h if model.dropout else 0
    dropped = stream if model.dropout else 0

    def linear(forward: int, gradients: int, weights: int) -> Passing:
        return Passing(forward, gradients + weights * w, weights)

    return {
        "norm": Passing(2 * stream, 2 * stream, 2 * h),
        "attention: projection": linear(tokens * projected, stream + tokens * projected, (h + 1) * projected),
        "attention: q, k, v": Passing(tokens * projected, tokens * (projected + 3 * query)),
        "attention: scores": _scores(model, own),
        "attention: output": linear(max(stream, mask), dropped + tokens * query, (query + 1) * h),
        "mlp: up": linear(0, stream + tokens * ffn, (h + 1) * ffn),
        "mlp: GeLU": Passing(tokens * ffn, 2 * tokens * ffn),
        "mlp: down": linear(max(stream, mask), dropped + tokens * ffn, (ffn + 1) * h),
    }


def _scores(model: ModelConfig, own: Sizes) -> Passing:
    """Explicit scores: raw, masked, and after softmax; backward, after softmax and before."""
    query = own.tokens * own.query * own.width
    if model.attention == "fused":
        return Passing(query, 4 * query)
    each = own.scores * own.width
    drawing = own.scores * (HASH + own.width) if model.dropout else 0
    return Passing(max(3 * each, drawing) + 3 * query, query + 2 * each)


def _embedding(model: ModelConfig, own: Sizes) -> dict[str, Passing]:
    """Forward the two rows and their sum; backward the whole matrix's gradient, however few rows were looked up."""
    stream = own.stream * own.hidden * own.width
    mask = HASH * own.stream * own.hidden if model.dropout else 0
    return {"embedding": Passing(2 * stream + max(stream, mask), own.vocab * own.hidden * own.width)}


def _head(model: ModelConfig, own: Sizes) -> dict[str, Passing]:
    """Forward the logits, in 16 bits their float32 copy too, and the log-softmax; backward the gradients of the last
    two, of which the cut loss makes one."""
    stream, logits = own.stream * own.hidden * own.width, own.tokens * own.vocab
    copy = own.loss_width if own.loss_width > own.width else 0
    gradients = 1 if own.vocab < model.vocab else 2
    return {
        "norm": Passing(2 * stream, 2 * stream),
        "logits: input": Passing(logits * own.width, logits * own.width + own.vocab * own.hidden * own.width + stream),
        "logits: loss": Passing(logits * (own.width + copy + own.loss_width), gradients * logits * own.loss_width),
    }


def gathered(here: list[str], at: int, step: int, held: dict[str, int], model, parallel: ParallelConfig) -> int:
    """Bytes of whole weights that ZeRO-3 has on a rank while it is at piece `at` of those `here`, in the model's order,
    and goes on by `step`: what stays from forward to backward (all but the layers; without reshard all), the layer in
    use, and the next, which is arriving.
    """
    if parallel.zero < 3:
        return 0
    at_loss = step < 0 and here[at] == "head"  # where the head takes most, the layer before it is not yet asked for
    in_use = {here[i] for i in (at, at + (0 if at_loss else step)) if 0 <= i < len(here)}
    whole = sum(n for name, n in held.items() if name in in_use or name in (*ENDS, TIED) or not parallel.reshard)
    return BYTES[model.dtype] * whole


class Unreduced(NamedTuple):
    """Bytes of a unit's gradient beyond what the rank keeps of it, one after the other."""

    adding_up: int = 0  # with ZeRO-2 and 3, all of it
    copies: int = 0  # while it is written side by side into one vector
    reducing: int = 0  # that vector, until it is reduced


def unreduced(unit: int, model: ModelConfig, parallel: ParallelConfig) -> Unreduced:
    w, wide = BYTES[model.dtype], BYTES["float32"]
    vector = unit * (w if parallel.grad_dtype == "same" else wide)
    if parallel.zero >= 2:
        return Unreduced(unit * (wide if parallel.grad_dtype == "float32" else w), vector, vector)
    acts = parallel.dp > 1 or parallel.zero or parallel.grad_dtype == "both"
    return Unreduced(copies=vector) if acts else Unreduced()


def tied_gradient(held: dict[str, int], model: ModelConfig) -> int:
    """Bytes of the tied matrix's gradient from the head, which waits for that from the embedding if both are here."""
    return BYTES[model.dtype] * held[TIED] if {TIED, "embedding", "head"} <= held.keys() else 0


def optimizer_step(
    held: dict[str, int], model: ModelConfig, own: Sizes, parallel: ParallelConfig, train: TrainConfig
) -> int:
    """Bytes of AdamW's step: the root of the second moment, and that with ε, of one matrix at a time.

    Master weights step along float32, to which 16-bit gradients are copied, of one unit at a time.
    """
    h, width = own.hidden, BYTES["float32"] if parallel.master_weights else BYTES[model.dtype]
    shares = {name: shard_sizes(unit, parallel.dp if parallel.zero else 1)[0] for name, unit in held.items()}
    matrices = {"embedding": max(model.sequence, 0 if model.tied else own.vocab) * h, TIED: own.vocab * h}
    matrices["head"] = (1 if model.tied else own.vocab) * h
    layer = h * max(own.query + 2 * own.key, own.ffn)
    roots = (2 if train.optimizer == "adamw" else 0) * width
    copies = width if parallel.master_weights and parallel.grad_dtype == "same" else 0
    return max(roots * min(matrices.get(name, layer), share) + copies * share for name, share in shares.items())
