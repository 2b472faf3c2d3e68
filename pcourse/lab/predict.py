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
from pcourse.lab.palette import CSS_BAD, CSS_INK, CSS_MUTED, GREEN, ORANGE
from pcourse.wording import bytes_text, number_text, seconds_text, sources_text

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


def measured_text(value: float, unit: str) -> str:
    """A number with its unit; bytes and seconds also as people say them."""
    if unit == "bytes":
        return f"{number_text(value)} bytes" + (f" ({bytes_text(value)})" if abs(value) >= 1000 else "")
    if unit == "seconds":
        return seconds_text(value)
    return f"{number_text(value)} {unit}".strip()


class Comparison:
    """A locked number beside a measured one, as bars and in words."""

    def __init__(self, guess: Predict, measured: float, words, source: str, spread=None):
        self.guess, self.measured, self.source, self.spread = guess, measured, source, spread
        self.extra = _fitting(words, guess.value) or ""

    @property
    def verdict(self) -> str:
        """One honest line: exact, close, or off, and by how much."""
        if not self.guess.locked:
            return "No prediction was locked, so there is nothing to compare."
        if self.spread and self.spread[0] <= self.guess.value <= self.spread[1]:
            return "Within what the noise of this measurement leaves open."
        return verdict_text(self.guess.value, self.measured, self.guess.unit)

    @property
    def text(self) -> str:
        shown = [f"measured: {measured_text(self.measured, self.guess.unit)}{self._range}"]
        if self.guess.locked:
            shown.insert(0, f"you said: {measured_text(self.guess.value, self.guess.unit)}")
        lines = [self.guess.question, ", ".join(shown), self.verdict, self.extra, self.source]
        return "\n".join(line for line in lines if line)

    @property
    def _range(self) -> str:
        return f" from {self.spread[0]:.3g} to {self.spread[1]:.3g}" if self.spread else ""

    @property
    def html(self) -> str:
        rows = [("measured", self.measured, GREEN)]
        if self.guess.locked:
            rows.insert(0, ("you said", self.guess.value, ORANGE))
        longest = max(abs(value) for _, value, _ in rows) or 1
        bars = "".join(_bar(name, value, abs(value) / longest, self.guess.unit, c) for name, value, c in rows)
        noise = f"By its quartiles the measurement may be anything{self._range}." if self.spread else ""
        extra = "".join(f'<div style="color:{CSS_INK}">{html.escape(w)}</div>' for w in (noise, self.extra) if w)
        foot = f'<div style="color:{CSS_MUTED};font-size:12px;font-style:italic">{html.escape(self.source)}</div>'
        return (
            '<div style="font-size:13px;line-height:1.6;margin:6px 0;max-width:730px">'
            f'<div style="color:{CSS_MUTED}">{html.escape(self.guess.question)}</div>{bars}'
            f'<div style="color:{CSS_INK};font-weight:600">{html.escape(self.verdict)}</div>{extra}'
            f"{foot if self.source else ''}</div>"
        )

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        return {"text/html": self.html, "text/plain": self.text}


def _fitting(words, guess) -> str | None:
    """The sentence that fits the locked number."""
    if not isinstance(words, Mapping):
        return words
    if guess is None:
        return None
    return next((text for number, text in words.items() if math.isclose(number, guess, rel_tol=0.01)), None)


def verdict_text(guess: float, measured: float, unit: str = "") -> str:
    """What to make of `guess` now that it was measured."""
    if math.isclose(guess, measured, rel_tol=1e-9):
        return "Exactly right."
    high = guess > measured
    if measured == 0 or guess / measured <= 0:
        return f"Off by {measured_text(abs(guess - measured), unit)}: you said too {'much' if high else 'little'}."
    factor = guess / measured if abs(guess) > abs(measured) else measured / guess
    if factor <= 1.1:
        return f"Close: {100 * abs(guess / measured - 1):.2g} % too {'high' if high else 'low'}."
    return f"Off by a factor of {number_text(float(f'{factor:.3g}'))}: you said too {'much' if high else 'little'}."


def _bar(name: str, value: float, share: float, unit: str, colour: str) -> str:
    words = html.escape(measured_text(value, unit))
    return (
        '<div style="display:flex;align-items:center;gap:8px">'
        f'<span style="flex:0 0 76px;color:{CSS_MUTED}">{name}</span>'
        f'<span style="flex:0 0 {max(0.4, 40 * share):.1f}%;height:12px;background:{colour};border-radius:2px"></span>'
        f'<span style="color:{CSS_INK};font-variant-numeric:tabular-nums">{words}</span>'
        "</div>"
    )


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


class Verdict:
    """A locked verdict beside the true one."""

    def __init__(self, choice: Choose, truth: str, because: str, source: str):
        self.choice, self.truth, self.because, self.source = choice, truth, because, source

    @property
    def verdict(self) -> str:
        if not self.choice.locked:
            return f"No verdict was locked. It is: {self.truth}."
        if self.choice.value == self.truth:
            return f"Right: {self.truth}."
        return f"You said: {self.choice.value}. It is: {self.truth}."

    @property
    def text(self) -> str:
        return "\n".join(s for s in (self.choice.question, self.verdict, self.because, self.source) if s)

    @property
    def html(self) -> str:
        def line(words, style):
            return f'<div style="{style}">{html.escape(words)}</div>' if words else ""

        return (
            '<div style="font-size:13px;line-height:1.6;margin:6px 0;max-width:730px">'
            + line(self.choice.question, f"color:{CSS_MUTED}")
            + line(self.verdict, f"color:{CSS_INK};font-weight:600")
            + line(self.because, f"color:{CSS_INK}")
            + line(self.source, f"color:{CSS_MUTED};font-size:12px;font-style:italic")
            + "</div>"
        )

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None, **_):
        return {"text/html": self.html, "text/plain": self.text}
