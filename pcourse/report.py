"""A Report: what one configuration took, measured or predicted, in one shape, so that the two compare field by field.

Nothing here imports torch. `to_json` and `from_json` are inverse to each other and use the names below.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig

PROVENANCE = ("measured", "paced", "predicted")
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary")
TIME_KINDS = ("compute", "communication", "waiting", "idle")
LATENESS_LIMIT = 0.01  # share of the step by which a paced run may end late and still stand for what it is paced to


def moment_text(iso: str) -> str:
    """An ISO 8601 time to the minute, with its day: a saved number must not pass for a new one."""
    return iso[:16].replace("T", " ")


@dataclass(frozen=True)
class Span:
    """One piece of a rank's time. `start` and `end` are seconds from the start of the step.

    `kind` is what the timeline colours: forward, backward, optimizer (compute), communication, or waiting (in a call
    before the peer is there). The gaps between spans are idle.
    """

    kind: str
    label: str
    start: float
    end: float
    micro_batch: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of one rank. Each category holds its own peak; `peak` is the peak of their sum, split in `at_peak`."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CommunicationRow:
    """One rank's calls of one operation over one axis, per step.

    `payload` is the full tensor in bytes (S of nccl-tests), `wire` the bytes this rank sends under the ring algorithm.
    `exposed` is the part of `seconds` in which the rank did nothing else. Sums of scalars (loss, gradient norm) stand
    in rows of their own, under the axis "scalar".
    """

    axis: str
    operation: str
    calls: int
    payload: int
    wire: int
    seconds: float
    exposed: float


@dataclass(frozen=True)
class RankReport:
    rank: int
    memory: MemoryLedger
    communication: tuple[CommunicationRow, ...]
    spans: tuple[Span, ...]
    seconds: dict[str, float]  # by TIME_KINDS, of the median step; they add up to it

    def row(self, axis: str, operation: str) -> CommunicationRow:
        """The row of `operation` over `axis`; a row of zeros where nothing was sent."""
        for row in self.communication:
            if (row.axis, row.operation) == (axis, operation):
                return row
        return CommunicationRow(axis, operation, 0, 0, 0, 0.0, 0.0)

    def wire(self, axis: str) -> int:
        """Bytes this rank sends over `axis` in a step, all operations together."""
        return sum(row.wire for row in self.communication if row.axis == axis)


@dataclass(frozen=True)
class Report:
    """What one configuration took. Times in seconds, memory and messages in bytes.

    `step_seconds` is the median of `step_times` (of an even number, the lower of the two in the middle, so that it is a
    step's own), `step_spread` their lower and upper quartile. `loss` (mean per token)
    and `gradient_norm` list the reported steps, warm-up left out.

    Of a paced run, `step_times` are what really passed, divided by the slow motion, while spans and seconds are those
    of the machine that it is paced to; `lateness` is by how much the median step ended after its time, as a share of
    what it was to take.
    """

    provenance: str
    device: str
    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    step_seconds: float
    step_spread: tuple[float, float]
    step_times: tuple[float, ...]
    tokens_per_second: float
    loss: tuple[float, ...]
    gradient_norm: tuple[float, ...]
    ranks: tuple[RankReport, ...]
    made_at: str = ""  # ISO 8601, local time
    notes: tuple[str, ...] = ()
    lateness: float | None = None  # of a paced run only

    @property
    def valid(self) -> bool:
        """Whether the numbers stand for what `provenance` says; those of a paced run that is late do not."""
        return self.lateness is None or self.lateness <= LATENESS_LIMIT

    @property
    def source(self) -> str:
        """What stands beside every number: where it is from, and when it was taken."""
        return f"{self.origin}, {moment_text(self.made_at)}" if self.made_at else self.origin

    @property
    def origin(self) -> str:
        """Where the numbers are from, without the time."""
        words = {"measured": "measured on", "paced": "paced to", "predicted": "predicted from"}[self.provenance]
        late = "" if self.valid else f", NOT VALID, {100 * self.lateness:,.0f} % late"
        return f"{words} {self.device}{late}"

    def to_dict(self) -> dict:
        return asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """JSON has no NaN or infinity: a loss that is not finite is null, and comes back as NaN."""
        data = self.to_dict()
        for name in ("loss", "gradient_norm"):
            data[name] = [value if math.isfinite(value) else None for value in data[name]]
        return json.dumps(data, indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        data = json.loads(text)
        for name in ("loss", "gradient_norm"):
            data[name] = [math.nan if value is None else value for value in data[name]]
        configs = {
            "model": ModelConfig(**data.pop("model")),
            "parallel": ParallelConfig(**data.pop("parallel")),
            "train": TrainConfig(**data.pop("train")),
        }
        ranks = tuple(
            RankReport(
                rank=r["rank"],
                memory=MemoryLedger(**r["memory"]),
                communication=tuple(CommunicationRow(**row) for row in r["communication"]),
                spans=tuple(Span(**span) for span in r["spans"]),
                seconds=r["seconds"],
            )
            for r in data.pop("ranks")
        )
        lists = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**lists, **configs, ranks=ranks)
