"""The frame for exercise checks: one line when the answer is right, a few that help when it is not.

A check is a function that takes the learner's function(s), asserts with messages in the field's words, and carries
`@check`. Its docstring's first line is what a right answer reads. It may return a `Scoreboard`.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from IPython.display import display

from pcourse.course import STUB_WORDS
from pcourse.lab.draw.communication import difference_text
from pcourse.lab.picture import Picture
from pcourse.lab.table import Cell, table
from pcourse.wording import bytes_text, number_text, seconds_text

BOLD, GREEN, PLAIN = "\x1b[1m", "\x1b[1;32m", "\x1b[0m"  # bold rather than red: errors stand on red already


class Friendly(Exception):
    """An exception that a notebook shows as its message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        first, *rest = str(self).splitlines() or [""]
        return [f"{BOLD}{first}{PLAIN}", *rest]


class CheckFailed(Friendly):
    """The answer is not right yet; the message says what is wrong."""


class NotSolvedYet(Friendly):
    """The stub still stands where the answer goes."""


def check(function: Callable) -> Callable:
    """Make a function that asserts about its arguments, the learner's functions, a check.

    It prints one line when nothing is wrong. Else it raises NotSolvedYet for a stub, and CheckFailed with the
    assertion's message, or with the learner's own line where the learner's code raised.
    """

    @functools.wraps(function)
    def run(*answers, **named):
        given = [*answers, *named.values()]
        try:
            board = function(*answers, **named)
        except Friendly:
            raise
        except Exception as error:  # noqa: BLE001  whatever an answer raises
            raise _explained(error, function.__code__, given) from None
        first_line = (inspect.getdoc(function) or function.__name__).splitlines()[0]
        print(f"{GREEN}Right.{PLAIN} {first_line}")
        if board is not None:
            display(board)

    return run


def _explained(error: Exception, check_code, answers: list) -> Exception:
    """What the learner reads instead of `error`."""
    causes = list(_causes(error))
    if any(isinstance(cause, NotImplementedError) and str(cause) == STUB_WORDS for cause in causes):
        return NotSolvedYet(f"Not solved yet: write {_names(answers)} above, run it, then run this check again.")
    for cause in reversed(causes):
        line = _learners_line(cause, check_code, answers)
        if line:
            return CheckFailed(f"{_names(answers)} raised {type(cause).__name__}{_where(error)}: {cause}\n{line}")
    if hasattr(error, "_render_traceback_"):  # a run that failed explains itself
        return error
    if isinstance(error, AssertionError):
        return CheckFailed(str(error) or "The answer is not right yet.")
    return CheckFailed(f"This check could not use what {_names(answers)} gave back: {type(error).__name__}: {error}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from: a rank's own exception stands behind the run's."""
    while error is not None:
        yield error
        error = error.__cause__


def _where(error: BaseException) -> str:
    rank, size = getattr(error, "rank", None), getattr(error, "size", None)
    return "" if rank is None else f" on rank {rank} of {size}"


def _names(answers: list) -> str:
    names = [answer.__name__ for answer in answers if hasattr(answer, "__name__")]
    return " and ".join(names) or "your answer"


def _learners_line(error: BaseException, check_code, answers: list) -> str:
    """Where in the learner's own code `error` passed last; "" if it was raised elsewhere."""
    files = {file for answer in answers for file in _files(answer)}
    own = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename in files and frame.f_code is not check_code
    ]
    if not own:
        return ""
    code, line = own[-1]
    return f"  in {code.co_name}, line {line}:  {linecache.getline(code.co_filename, line).strip()}"


def _files(answer) -> set[str]:
    """The files, or cells, in which a function or a class's methods are written."""
    functions = [answer, *vars(answer).values()] if inspect.isclass(answer) else [answer]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f)]
    return {code.co_filename for code in codes if code is not None}


@dataclass(frozen=True)
class Score:
    """One row of a scoreboard. `unit` is "bytes", "seconds" or a word; `at_most`: less is better."""

    quantity: str
    yours: float
    target: float
    unit: str = ""
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.yours <= self.target if self.at_most else self.yours >= self.target

    @property
    def mark(self) -> str:
        if self.yours == self.target:
            return "= target"
        words = difference_text(self.yours, self.target, self.text, "the target")
        return words if not self.met else f"better: {words}"

    def text(self, value: float) -> str:
        known = {"": number_text, "bytes": bytes_text, "seconds": seconds_text}
        return known[self.unit](value) if self.unit in known else f"{number_text(value)} {self.unit}"


class Scoreboard:
    """What the learner's solution costs, beside the target: shown as a table, or printed.

    board = Scoreboard("ring all-reduce over 4 ranks")
    board.add("bytes sent by each rank", 49152, 49152, unit="bytes")
    """

    def __init__(self, title: str = "Scoreboard", source: str = ""):
        self.title, self.source = title, source
        self.rows: list[Score] = []

    def add(self, quantity: str, yours: float, target: float, unit: str = "", at_most: bool = True) -> None:
        """A row more: `yours` should be `target` or less (`at_most=False`: or more)."""
        self.rows.append(Score(quantity, yours, target, unit, at_most))

    @property
    def met(self) -> bool:
        """Whether every row reaches its target."""
        return all(row.met for row in self.rows)

    @property
    def picture(self) -> Picture:
        cells = [
            [
                row.quantity,
                row.text(row.yours),
                row.text(row.target),
                Cell(row.mark, "good" if row.met else "bad"),
            ]
            for row in self.rows
        ]
        return table(self.title, ["", "yours", "target", ""], cells, self.source)

    @property
    def html(self) -> str:
        return self.picture.html

    def __repr__(self) -> str:
        return self.picture.alt

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        return self.picture._repr_mimebundle_()
