"""How long each stage's work is to last, as the learner says it: the time table of a paced or a virtual run."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real

from pcourse.config import ConfigError, ParallelConfig
from pcourse.cost.cluster import Cluster
from pcourse.cost.simulate import link_between

CLOCKS = ("wall", "paced", "virtual")
SHORTEST, LONGEST = 1e-9, 1_000_000  # seconds that a pace can ask for
UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Pace:
    """Seconds of one micro-batch's whole pass through a stage, and of a message between neighbouring stages.

    Each is a number, or a tuple of one per stage. `transfer[i]` is the link between stage i and stage i + 1 (the last
    is joined to the first). The fields are the arguments of `simulate`.
    """

    forward: float | tuple[float, ...]
    backward_input: float | tuple[float, ...]
    backward_weight: float | tuple[float, ...]
    transfer: float | tuple[float, ...] = 0.0

    def __post_init__(self):
        for field in fields(self):
            value = _number_or_tuple(field.name, getattr(self, field.name), zero=field.name == "transfer")
            object.__setattr__(self, field.name, value)
        if len(set((lengths := self._lengths()).values())) > 1:
            words = ", ".join(f"{name} has {length} numbers" for name, length in lengths.items())
            raise ConfigError(f"{words}; each can be one number for all stages, or one for each stage")

    @classmethod
    def of(cls, value: Pace | float | Sequence[float]) -> Pace:
        """A pace as it is; of t seconds, or one t per stage: forward t, input gradients t, weight gradients t."""
        return value if isinstance(value, Pace) else cls(value, value, value)

    @classmethod
    def parse(cls, text: str) -> Pace:
        """The pace that "20ms" or "10ms,20ms" says; as `of`. Raises ConfigError for what is no time."""
        times = tuple(_seconds(part.strip()) for part in text.split(","))
        return cls.of(times if len(times) > 1 else times[0])

    def require_stages(self, stages: int) -> None:
        """Raises ConfigError where there is one number per stage and not as many as `stages`."""
        for name, length in self._lengths().items():
            if length != stages:
                number = "1 number" if stages == 1 else f"1 number, or {stages}, one for each stage"
                raise ConfigError(f"{name} of the pace has {length} numbers for pp={stages}; it can have {number}")

    def seconds(self, kind: str, stage: int, chunks: int = 1) -> float:
        """Seconds of a compute of `kind` on one of the `chunks` chunks of `stage`; 0 for a kind that is not paced."""
        times = self.forward, self.backward_input, self.backward_weight
        f, b, w = (_at(value, stage) / chunks for value in times)
        kinds = {"forward": f, "recompute": f, "backward": b + w, "backward-input": b, "backward-weight": w}
        return kinds.get(kind, 0.0)

    def transfer_seconds(self, stage_a: int, stage_b: int, stages: int) -> float:
        """Seconds of a message between two stages; 0 within a stage, and between stages that are not neighbours."""
        link = link_between(stage_a, stage_b, stages)
        return 0.0 if link is None else _at(self.transfer, link)

    def slower(self, factor: float) -> Pace:
        """The same pace in slower motion."""
        return Pace(*(_each(lambda t: t * factor, getattr(self, field.name)) for field in fields(self)))

    def _lengths(self) -> dict[str, int]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: len(value) for name, value in values.items() if isinstance(value, tuple)}

    def __str__(self) -> str:
        both = _each(operator.add, self.backward_input, self.backward_weight)
        words = f"{_time_text(self.forward)} forward, {_time_text(both)} backward"
        if self.backward_input != self.backward_weight:
            words += f" ({_time_text(self.backward_input)} for inputs, {_time_text(self.backward_weight)} for weights)"
        return f"{words} a stage" + (f", {_time_text(self.transfer)} a message" if self.transfer else "")


@dataclass(frozen=True)
class PacedRanks:
    """The ranks of a configuration that keep a pace: what a Cluster is for a described cluster."""

    pace: Pace
    parallel: ParallelConfig
    slow_motion = 1.0  # a pace says what is really to pass

    def compute_seconds(self, flops: float, kind: str, rank: int, share: float = 1) -> float:
        """`share` of the time that a whole pass through one of a stage's chunks takes."""
        return share * self.pace.seconds(kind, self.parallel.stage_of(rank), self.parallel.chunks)

    def transfer_seconds(self, sender: int, receiver: int, nbytes: float) -> tuple[float, float]:
        """A message occupies no link, so that the simulator, which knows of none, agrees to the last bit."""
        stages = self.parallel.stage_of(sender), self.parallel.stage_of(receiver)
        return 0.0, self.pace.transfer_seconds(*stages, self.parallel.pp)

    def collective_seconds(self, operation: str, wire_bytes: float, members: tuple[int, ...]) -> float:
        return 0.0

    def slower(self, factor: float) -> PacedRanks:
        return PacedRanks(self.pace.slower(factor), self.parallel)

    def pace_text(self) -> str:
        return str(self.pace)

    def __str__(self) -> str:
        return str(self.pace)


def machine_of(clock: str, cluster: Cluster | None, pace, parallel: ParallelConfig) -> Cluster | PacedRanks | None:
    """The described machine whose time `clock` keeps; None for the wall clock.

    Raises ConfigError for a clock that is not known, or that has not what it needs.
    """
    if clock not in CLOCKS:
        raise ConfigError(f"clock={clock!r} is not known; clock can be {', '.join(CLOCKS)}")
    given = [name for name, value in (("cluster", cluster), ("pace", pace)) if value is not None]
    if clock == "wall":
        if given:
            raise ConfigError(
                f"clock='wall' measures this machine and takes no {' or '.join(given)}; with {given[0]}, clock can be "
                "paced or virtual"
            )
        return None
    if len(given) != 1:
        raise ConfigError(
            f"clock={clock!r} needs the times to keep from one of cluster and pace, and has "
            f"{'both' if given else 'neither'}; a pace can be 0.02, say, for forwards of 20 ms"
        )
    if pace is None:
        if not isinstance(cluster, Cluster):
            raise ConfigError(f"cluster={cluster!r} must be a pcourse.cost.cluster.Cluster")
        return cluster
    pace = Pace.of(pace)
    pace.require_stages(parallel.pp)
    return PacedRanks(pace, parallel)


def _number_or_tuple(name: str, value, zero: bool):
    """`value` as a float, or as a tuple of them."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = tuple(value) if several else (value,)
    for number in numbers or (value,):
        real = isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)
        if not real or not (SHORTEST <= number <= LONGEST or (zero and number == 0)):
            limit = f"{SHORTEST:g} to {LONGEST:,}" + (", or 0" if zero else "")
            raise ConfigError(f"{name}={value!r} of a pace must be seconds, {limit}, or a list of one per stage")
    return tuple(map(float, numbers)) if several else float(value)


def _seconds(text: str) -> float:
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")  # "s" comes last: it ends them all
    try:
        seconds = float(text.removesuffix(unit)) * UNITS[unit]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"pace: {text!r} is not a time above 0; it can be 20ms, 500us or 1.5s, or 10ms,20ms by stage")
    return seconds


def _at(value, stage: int) -> float:
    return value[stage] if isinstance(value, tuple) else value


def _each(function, *values):
    """`function` of numbers, or stage by stage where one of the values has a number per stage."""
    stages = max((len(value) for value in values if isinstance(value, tuple)), default=None)
    if stages is None:
        return function(*values)
    return tuple(function(*(_at(value, stage) for value in values)) for stage in range(stages))


def _time_text(value) -> str:
    """ "20 ms", or "10/20 ms" by stage; in the unit that suits the shortest."""
    times = sorted({*value}) if isinstance(value, tuple) else [value]
    shown = value if len(times) > 1 else times
    shortest = min((t for t in times if t > 0), default=0.0)
    unit = "s" if shortest >= 1 else "ms" if shortest >= 1e-3 or not shortest else "µs"
    return "/".join(f"{t / UNITS[unit]:.4g}" for t in shown) + f" {unit}"
