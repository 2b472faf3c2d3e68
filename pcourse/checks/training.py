"""Checks of exercise 06, three broken training steps: which number betrays a fault, and whether it has been mended.

Each program has a module of its own, which knows its faults; here is what they share: the symptoms, and a run beside
one device. A program that still has the fault it came with is not solved yet; one with another fault is wrong.
"""

from __future__ import annotations

import inspect
from math import isfinite

from pcourse.checks import clipping, master_weights, times, token_mean
from pcourse.checks.clipping import clip_gradients
from pcourse.checks.master_weights import mixed_step
from pcourse.checks.token_mean import token_step
from pcourse.lab.check import CheckFailed
from pcourse.wording import aligned_text, number_text

__all__ = ["SYMPTOMS", "clip_gradients", "compare", "mixed_step", "token_step"]

LOSS, NORM, STILL, PART = SYMPTOMS = (
    "the loss of the first step, and the gradient with it",
    "the gradient norm: the loss and the gradients are right",
    "the weights: the loss, the gradients and their norm are right",
    "the ranks' gradients or weights: they are no longer equal",
)
_BECAUSE = {
    LOSS: "A token weighs more on a rank that has few valid ones. The loss still falls, towards something else.",
    NORM: "Clipping sets in too early and takes off too much. It looks like a learning rate that is too small.",
    STILL: "Each update is lost in rounding. Larger weights are the first to stand still.",
    PART: "",
}
_PROGRAMS = {"shards": (clipping, NORM), "targets": (token_mean, LOSS), "state": (master_weights, STILL)}


def compare(function, guess=None) -> None:
    """Run a program beside one device, print number by number, and score the symptom locked in `guess`."""
    if guess is not None:
        guess.require()
    names = [name for name in inspect.signature(function).parameters if name in _PROGRAMS]
    if len(names) != 1:
        print(f"{function.__name__} must take the arguments that it came with: put their names back")
        return
    module, symptom = _PROGRAMS[names[0]]
    try:
        title, numbers, right, agree = module.numbers(function)
    except CheckFailed as error:
        print(error)
        return
    print(f"{function.__name__} on ranks that are threads, beside one device: {title}")
    rows = [_row(*row) for row in numbers] + [["the ranks agree", "yes" if agree else "no", "yes", ""]]
    print(aligned_text([["", "ranks", "one device", ""], *rows], ["left", "right", "right", "left"]))
    if right and agree:
        print("All is as on one device.")
    elif guess is not None:
        truth = symptom if agree else PART
        guess.score(truth, _BECAUSE[truth])


def _row(label: str, got: float, expected: float, words: str = "") -> list[str]:
    if not isfinite(got):
        return [label, str(got), number_text(expected), "not a number"]
    equal = "equal" if abs(got - expected) <= 1e-6 * abs(expected) else times(got / expected)
    return [label, number_text(got), number_text(expected), words or equal]
