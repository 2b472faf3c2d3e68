"""pcourse: how the training of a large model is split across devices.

Names load when they are used: `import pcourse` is fast, and torch is imported by what needs it.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "ConfigError": "pcourse.config",
    "ModelConfig": "pcourse.config",
    "ParallelConfig": "pcourse.config",
    "RankError": "pcourse.world",
    "Report": "pcourse.report",
    "TrainConfig": "pcourse.config",
    "World": "pcourse.world",
    "measure": "pcourse.train",
    "prove": "pcourse.proof",
}

__all__ = [*_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'pcourse' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
