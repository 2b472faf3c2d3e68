"""What each stage of a cut model weighs, by formula and as measured: the bars of the picture of a partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pcourse.config import BYTES, ModelConfig, listed
from pcourse.cost.layers import Piece, piece_bytes, pieces
from pcourse.cost.stage_times import stage_ranks, stage_times
from pcourse.parallel.partition import Part
from pcourse.report import Report
from pcourse.wording import bytes_text, number_text, seconds_text


@dataclass(frozen=True)
class Bar:
    """One stage under one rule: what its pieces weigh, what was measured (`mark`, on the axis of the bars)."""

    stage: int
    part: Part
    weights: dict[str, float]
    each_layer: tuple[float, ...]
    mark: float | None = None
    measured: str = ""

    @property
    def total(self) -> float:
        return sum(self.weights.values())


def _si_text(value: float) -> str:
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {prefix}"
    return number_text(round(value))


def _flops_text(value: float) -> str:
    words = _si_text(value)
    return f"{words}FLOP" if words[-1].isalpha() else f"{words} FLOP"


TEXTS: dict[str, Callable] = {"memory": bytes_text, "compute": _flops_text, "parameters": _si_text}


def require(cuts, weight, in_flight, measured, source) -> None:
    """Raises ValueError, with what would do, for what cannot be drawn."""
    if weight not in TEXTS:
        raise ValueError(f"weight={weight!r} is not known; weight can be {listed(TEXTS)}")
    if not cuts:
        raise ValueError('partition needs at least one cut, as {"uniform": partition(model, 4)}')
    for rule, parts in cuts.items():
        if in_flight is not None and len(in_flight) != len(parts):
            raise ValueError(f"in_flight has {len(in_flight)} numbers for the {len(parts)} stages of {rule!r}")
    for rule, given in measured.items():
        if rule not in cuts:
            raise ValueError(f"measured has {rule!r}, which is not among the cuts; they are {listed(cuts)}")
        count = given.parallel.pp if isinstance(given, Report) else len(given)
        if count != len(cuts[rule]):
            raise ValueError(f"measured has {count} stages for the {len(cuts[rule])} of {rule!r}")
        if not isinstance(given, Report) and not source:
            raise ValueError('say where the measured numbers are from, as source="measured on …"')
        if isinstance(given, Report) and given.parallel.tp > 1 and weight != "compute":
            raise ValueError(f"the bars are whole stages, and tp={given.parallel.tp} cuts them; measure with tp=1")


def bars_of(model: ModelConfig, parts, weight: str, in_flight, sequences: int, optimizer: str, measured) -> list[Bar]:
    """A bar for each part; `measured` is a Report, a number for each stage, or None."""
    held = in_flight if in_flight is not None else [1] * len(parts)
    each = pieces(model, sequences)
    bars = [
        _bar(model, stage, part, each, lambda piece, n=n: _weight(piece, model, weight, n, optimizer))
        for stage, (part, n) in enumerate(zip(parts, held, strict=True))
    ]
    if measured is None:
        return bars
    found = _measured(measured, weight, model)
    # Seconds and FLOPs have no common unit: both are shares of the same whole.
    scale = sum(bar.total for bar in bars) / (sum(found) or 1) if weight == "compute" else 1
    text = seconds_text if weight == "compute" else TEXTS[weight]
    return [replace(bar, mark=value * scale, measured=text(value)) for bar, value in zip(bars, found, strict=True)]


def _bar(model: ModelConfig, stage: int, part: Part, each, weigh) -> Bar:
    own = {piece.name: weigh(piece) for piece in part.pieces(each)}
    if part.embedding and part.head and model.tied:  # one matrix, not two
        shared = model.vocab * model.hidden
        own["head"] -= weigh(Piece("head", shared, 0, 0, 0, 0))
    layers = tuple(own[f"layer {i}"] for i in part.layers)
    found = {"embedding": own.get("embedding", 0), "layers": sum(layers), "head": own.get("head", 0)}
    return Bar(stage, part, found, layers)


def _weight(piece: Piece, model: ModelConfig, weight: str, in_flight: float, optimizer: str) -> float:
    if weight == "compute":
        return piece.flops
    if weight == "parameters":
        return piece.parameters
    return piece_bytes(piece, model, in_flight=in_flight, optimizer=optimizer)


def _measured(given: Report | Sequence[float], weight: str, model: ModelConfig) -> list[float]:
    if not isinstance(given, Report):
        return list(given)
    if weight == "compute":
        times = stage_times(given)
        return [sum(parts) for parts in zip(times["forward"], times["backward_input"], times["backward_weight"])]
    if weight == "parameters":
        return [rank.memory.parameters / BYTES[model.dtype] for rank in stage_ranks(given)]
    return [rank.memory.peak for rank in stage_ranks(given)]
