"""Programs and results on their way between a notebook and its ranks.

cloudpickle carries functions and classes that exist only in a notebook cell. Two things it loses are kept
here: the source lines, without which a traceback shows a learner no code, and the notebook's classes, whose
methods it would overwrite when a result brings a class back.
"""

from __future__ import annotations

import inspect
import linecache
import marshal
import os
import pickle
from types import CodeType

import cloudpickle


def dump_program(program, file) -> list[type]:
    """Write `program`, any object, to `file`; returns the classes that travelled by value.

    Raises what pickling raises (TypeError, PicklingError …) where a part of it cannot be pickled.
    """
    pickler = _ProgramPickler(file)
    pickler.dump(program)
    # The same pickler again refers to what it has written, so that these are the program's own classes.
    pickler.dump((pickler.classes, pickler.sources))
    return pickler.classes


def load_program(file) -> tuple[object, list[type]]:
    """What `dump_program` wrote, and the classes that came with it. Its source lines go to `linecache`."""
    unpickler = pickle.Unpickler(file)
    program = unpickler.load()
    classes, sources = unpickler.load()
    for filename, lines in sources.items():
        # Without a modification time, linecache does not look for the file.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return program, classes


def dump_result(result, file, classes: list[type]) -> None:
    """Write a rank's `result`; of a class among `classes`, which the other side has, only its place there."""
    _ResultPickler(file, classes).dump(result)


def load_result(file, classes: list[type]):
    """What `dump_result` wrote, with this side's own `classes`."""
    return _ResultUnpickler(file, classes).load()


class _SourcePickler(cloudpickle.Pickler):
    """cloudpickle replaces a code object's file name; marshal keeps it. Both sides are one interpreter."""

    def reducer_override(self, obj):
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


class _ProgramPickler(_SourcePickler):
    def __init__(self, file):
        super().__init__(file)
        self.classes: list[type] = []
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj):
        if isinstance(obj, CodeType) and not os.path.exists(obj.co_filename):
            self.sources[obj.co_filename] = linecache.getlines(obj.co_filename)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and reduced is not NotImplemented:
            self.classes.append(obj)
        return reduced


class _ResultPickler(_SourcePickler):
    def __init__(self, file, classes: list[type]):
        super().__init__(file)
        self._places = {cls: place for place, cls in enumerate(classes)}

    def persistent_id(self, obj):
        return self._places.get(obj) if isinstance(obj, type) else None


class _ResultUnpickler(pickle.Unpickler):
    def __init__(self, file, classes: list[type]):
        super().__init__(file)
        self._classes = classes

    def persistent_load(self, place: int) -> type:
        return self._classes[place]


def unsendable(program, args) -> str:
    """Which part of a run cannot be pickled, in words: a variable that the program uses, or an argument."""
    parts = {f"argument {number}": value for number, value in enumerate(args, 1)}
    if inspect.isfunction(program):
        used = inspect.getclosurevars(program)
        parts |= {
            f"the variable {name}, which the program uses,": v for name, v in {**used.globals, **used.nonlocals}.items()
        }
    for words, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return words
    return "the program"
