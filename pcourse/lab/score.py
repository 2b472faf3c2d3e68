"""What was locked beside what came out: a number beside its measurement, a verdict beside what decides it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping

from pcourse.lab.palette import CSS_INK, CSS_MUTED, GREEN, ORANGE
from pcourse.report import PROVENANCE
from pcourse.wording import bytes_text, number_text, seconds_text


def measured_text(value: float, unit: str) -> str:
    """A number with its unit; bytes and seconds also as people say them."""
    if unit == "bytes":
        return f"{number_text(value)} bytes" + (f" ({bytes_text(value)})" if abs(value) >= 1000 else "")
    if unit == "seconds":
        return seconds_text(value)
    return f"{number_text(value)} {unit}".strip()


class Comparison:
    """The number locked in a Predict beside a measured one, as bars and in words."""

    def __init__(self, guess, measured: float, words, source: str, spread=None):
        self.guess, self.measured, self.source, self.spread = guess, measured, source, spread
        self.extra = _fitting(words, guess.value) or ""

    @property
    def kind(self) -> str:
        """How the other number came about, as its source says: measured, paced or predicted."""
        return next((kind for kind in PROVENANCE if self.source.startswith(kind)), PROVENANCE[0])

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
        shown = [f"{self.kind}: {measured_text(self.measured, self.guess.unit)}{self._range}"]
        if self.guess.locked:
            shown.insert(0, f"you said: {measured_text(self.guess.value, self.guess.unit)}")
        lines = [self.guess.question, ", ".join(shown), self.verdict, self.extra, self.source]
        return "\n".join(line for line in lines if line)

    @property
    def _range(self) -> str:
        return f" from {self.spread[0]:.3g} to {self.spread[1]:.3g}" if self.spread else ""

    @property
    def html(self) -> str:
        rows = [(self.kind, self.measured, GREEN)]
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


class Verdict:
    """The verdict locked in a Choose beside the true one."""

    def __init__(self, choice, truth: str, because: str, source: str):
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
