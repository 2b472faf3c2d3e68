"""Predictions and verdicts that are locked before the measurement is seen.

What a learner locked is kept as long as the kernel lives, under the question's name: running the cell again shows
it, and cannot change it.
"""

from __future__ import annotations

import datetime
import html
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import ipywidgets as W
from IPython.display import display

from pcourse.lab.front_end import PredictFirst, front_end
from pcourse.lab.keys import keep_keys
from pcourse.lab.palette import CSS_BAD, CSS_INK, CSS_MUTED
from pcourse.lab.score import Comparison, Verdict, measured_text
from pcourse.wording import number_text, sources_text

# The value of a text field reaches the kernel in a message of its own, perhaps in another thread than the click's.
SETTLE = 0.2  # seconds


class Locked:
    """What was locked under one name: shared by every view of the question."""

    def __init__(self):
        self.value = None
        self.at: datetime.datetime | None = None
        self._listeners: list[Callable[[], None]] = []
        self._mutex = threading.Lock()

    def set(self, value) -> None:
        """Lock `value`, unless something is locked already; then tell who asked to be told."""
        with self._mutex:
            if self.at is not None:
                return
            self.value, self.at = value, datetime.datetime.now()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_locked(self, listener: Callable[[], None]) -> None:
        """Call `listener` once it is locked: now, or later, on whichever thread that happens."""
        with self._mutex:
            waiting = self.at is None
            if waiting:
                self._listeners.append(listener)
        if not waiting:
            listener()


_kept: dict[str, Locked] = {}


class _Commitment:
    """A question whose answer is locked before it is compared: what Predict and Choose share."""

    hint, flow, align = "", "row wrap", "center"

    def __init__(self, question: str, name: str | None):
        self.question, self.name = question, name or question
        self._lock = _kept.setdefault(self.name, Locked())
        self._field = self._make_field()
        self._button = W.Button(description="Lock", icon="lock", tooltip="Lock your answer; it cannot be changed after")
        self._button.on_click(lambda _: self._lock_soon())
        self._message = W.HTML()
        layout = W.Layout(align_items=self.align, flex_flow=self.flow)
        row = W.Box([*self._beside(), self._button], layout=layout)
        words = (
            f'<div style="color:{CSS_INK};font-weight:600;font-size:14px;line-height:1.5">{html.escape(question)}</div>'
        )
        self.widget = keep_keys(W.VBox([W.HTML(words), row, self._message], layout=W.Layout(margin="8px 0")))
        self._say(self.hint, CSS_MUTED)
        self._lock.when_locked(self._show_locked)

    @property
    def locked(self) -> bool:
        """Whether an answer is locked."""
        return self._lock.at is not None

    @property
    def value(self):
        """The locked answer; None before."""
        return self._lock.value

    def when_locked(self, listener: Callable[[], None]) -> None:
        """Call `listener` once an answer is locked: now, or later, on any thread."""
        self._lock.when_locked(listener)

    def require(self) -> None:
        """Raise PredictFirst, one friendly line, where a person has not locked an answer yet."""
        if not self.locked and front_end():
            raise PredictFirst(f"Lock your {self.kind} above, then run this cell again.")

    def lock(self, answer) -> None:
        """Lock `answer`, as the button does. A second one changes nothing; a bad one raises ValueError."""
        self._lock.set(self._parse(answer))

    def _lock_soon(self) -> None:
        timer = threading.Timer(SETTLE, self._lock_field)
        timer.daemon = True
        timer.start()

    def _lock_field(self) -> None:
        try:
            self.lock(self._field.value)
        except ValueError as error:  # an exception in a callback is shown nowhere
            self._say(str(error), CSS_BAD)

    def _show_locked(self) -> None:
        self._show_answer()
        self._field.disabled = self._button.disabled = True
        self._button.description = "Locked"
        self._say(f"Locked at {self._lock.at:%H:%M}: {self._words(self.value)}. It cannot be changed now.", CSS_MUTED)

    def _say(self, words: str, colour: str) -> None:
        style = f"color:{colour};font-size:13px;line-height:1.5"
        self._message.value = f'<div role="status" aria-live="polite" style="{style}">{html.escape(words)}</div>'

    def __repr__(self) -> str:
        state = self._words(self.value) if self.locked else "not locked yet"
        return f"{self.question} ({state})"

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        data = dict(self.widget._repr_mimebundle_())
        data["text/plain"] = f"{self.question} (run this cell to answer)"
        return data


class Predict(_Commitment):
    """A number that the learner commits to before the instrument opens.

    `unit` is a word written after it, or "bytes" or "seconds". Accepted: 2000, 2,000, 1e6, 7/8, with or without the
    unit. `name` is what the answer is kept under; without it, the question.
    """

    kind = "prediction"

    def __init__(self, question: str, unit: str = "", name: str | None = None):
        self.unit = unit
        self.hint = "Write a number, such as 2000, 2,000, 1e6 or 7/8, and lock it."
        super().__init__(question, name)

    def _make_field(self):
        field = W.Text(description="Your prediction", continuous_update=False, layout=W.Layout(width="260px"))
        field.style.description_width = "initial"
        field.on_msg(lambda _, content, __: content.get("event") == "submit" and self._lock_soon())  # Enter
        return field

    def _beside(self):
        return [
            self._field,
            W.HTML(f'<span style="color:{CSS_MUTED};margin-right:8px">{html.escape(self.unit)}</span>'),
        ]

    def _parse(self, answer) -> float:
        return answer if isinstance(answer, (int, float)) else parse_number(answer, self.unit)

    def _show_answer(self) -> None:
        self._field.value = number_text(self.value)

    def _words(self, value: float) -> str:
        return measured_text(value, self.unit)

    def compare(self, measured: float, words=None, source="", spread=None) -> Comparison:
        """The locked number beside `measured`; see `score`, which shows it."""
        return Comparison(self, measured, words, sources_text(source), spread)

    def score(self, measured: float, words: str | Mapping[float, str] | None = None, source="", spread=None) -> None:
        """Show the locked number beside the measured one, the factor between them, and what to make of it.

        `words` is a sentence to add, or one for each number that somebody may well have locked: {2: "You counted the
        forward pass alone."}. `source` is a report, or words that say where `measured` is from. `spread` is the range,
        low and high, that noise leaves open.
        """
        display(self.compare(measured, words, source, spread))


def parse_number(text: str, unit: str = "") -> float:
    """The number in `text`: "2,000", "1e6", "7/8", "50 %". Raises ValueError with the forms that would do."""
    bare = text.strip().removesuffix(unit).strip() if unit else text.strip()
    wrong = f"“{text.strip()}” is not a number I can read: write it like 2000, 2,000, 1e6 or 7/8."
    if not bare:
        raise ValueError("There is nothing to lock yet: write a number first.")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", bare):
        bare = bare.replace(",", "")
    try:
        value = float(Fraction(bare.replace(" ", ""))) if "/" in bare else float(bare)
    except (ValueError, ZeroDivisionError):
        raise ValueError(wrong) from None
    if not math.isfinite(value):
        raise ValueError(wrong)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


class Choose(_Commitment):
    """A verdict that the learner commits to: one of `options`, locked before the cell that decides it."""

    kind = "verdict"
    hint, flow, align = "Choose, and lock it.", "column", "flex-start"

    def __init__(self, question: str, options: Sequence[str], name: str | None = None):
        self.options = list(options)
        super().__init__(question, name)

    def _make_field(self):
        field = W.RadioButtons(options=self.options, value=None, layout=W.Layout(width="max-content"))
        return field

    def _beside(self):
        return [self._field]

    def _parse(self, answer) -> str:
        if answer not in self.options:
            said = "Choose one first" if answer is None else f"“{answer}” is not among the answers"
            raise ValueError(f"{said}: {', '.join(self.options)}.")
        return answer

    def _show_answer(self) -> None:
        self._field.value = self.value

    def _words(self, value: str) -> str:
        return str(value)

    def score(self, truth: str, because: str = "", source="") -> None:
        """Show the locked verdict beside the one that the run gave, and why."""
        display(Verdict(self, truth, because, sources_text(source)))
