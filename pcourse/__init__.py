"""pcourse: how the training of a large model is split across devices.

Names load when they are used: `import pcourse` is fast, and torch is imported by what needs it.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "Cluster": "pcourse.cost.cluster",
    "ConfigError": "pcourse.config",
    "Link": "pcourse.cost.cluster",
    "ModelConfig": "pcourse.config",
    "Pace": "pcourse.pace",
    "ParallelConfig": "pcourse.config",
    "RankError": "pcourse.world",
    "Report": "pcourse.report",
    "TrainConfig": "pcourse.config",
    "World": "pcourse.world",
    "make_schedule": "pcourse.parallel.schedules",
    "measure": "pcourse.train",
    "prove": "pcourse.proof",
    "simulate": "pcourse.cost.simulate",
}

__all__ = [*_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'pcourse' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
