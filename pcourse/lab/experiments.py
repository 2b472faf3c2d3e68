"""What a panel can run: a training step of any configuration, or messages of many sizes.

An experiment turns the controls' values into settings (hashable: a result is kept under them), says how many ranks they
need, and runs them. A result is anything with a `source`, the line that says where its numbers are from.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pcourse.config import ModelConfig, ParallelConfig, TrainConfig, validate


class Training:
    """Training steps; its controls are the fields of the three configurations."""

    def __init__(self, model=None, parallel=None, train=None, measure: Callable | None = None):
        self.base = (model or ModelConfig(), parallel or ParallelConfig(), train or TrainConfig())
        self._measure = measure or _measure

    def default(self, name: str, options: Sequence):
        """The value of a control before it is moved."""
        names = [field.name for config in self.base for field in dataclasses.fields(config)]
        value = next((getattr(config, name) for config in self.base if hasattr(config, name)), None)
        return _among(options, name, value, names)

    def settings(self, values: Mapping):
        """Raises ConfigError for what cannot run."""
        settings = changed(self.base, values)
        validate(*settings)
        return settings

    def ranks_of(self, settings) -> int:
        return settings[1].ranks

    def run(self, settings, world, progress):
        return self._measure(*settings, world=world, progress=progress)


@dataclass(frozen=True)
class Messages:
    """One operation over some ranks, timed for messages of `sizes` bytes; its controls are `operation` and `ranks`."""

    operation: str = "all_reduce"
    ranks: int = 2
    sizes: tuple[int, ...] = tuple(4**k for k in range(5, 13))
    repetitions: int = 15

    def default(self, name: str, options: Sequence):
        values = {"operation": self.operation, "ranks": self.ranks}
        return _among(options, name, values.get(name), list(values))

    def settings(self, values: Mapping):
        return values.get("operation", self.operation), values.get("ranks", self.ranks)

    def ranks_of(self, settings) -> int:
        return settings[1]

    def run(self, settings, world, progress):
        from pcourse.cost.calibrate import measure_messages

        return measure_messages(*settings, self.sizes, self.repetitions, world=world, progress=progress)


def changed(base, values: Mapping):
    """The configurations with the fields in `values` changed, and those that follow them (ffn, learning rate)."""
    model, parallel, train = base
    mine = {config: {n: v for n, v in values.items() if hasattr(config, n)} for config in base}
    if "optimizer" in mine[train] and train.learning_rate == TrainConfig(optimizer=train.optimizer).learning_rate:
        mine[train].setdefault("learning_rate", None)
    return (
        model.but(**mine[model]),
        dataclasses.replace(parallel, **mine[parallel]),
        dataclasses.replace(train, **mine[train]),
    )


def _among(options: Sequence, name: str, value, names: list[str]):
    """`value`, which must be one of a control's options, if there is such a control."""
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it can be {', '.join(names)}"
        raise ValueError(f"this experiment has no setting {name!r} to control; {hint}")
    if value not in options:
        raise ValueError(f"{name}={value!r} is the panel's own setting, so it must be among {name}'s {list(options)}")
    return value


def _measure(*settings, **how):
    """`pcourse.train.measure`, imported when it is first needed: it loads torch, and a kernel must start quickly."""
    from pcourse.train import measure

    return measure(*settings, **how)
