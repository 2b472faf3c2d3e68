"""Plausible wrong answers to the exercises: one file for each exercise, one function or class for each fault.

    CHECKS = "pcourse.checks.collectives"  # the module whose checks refuse these answers
    EXERCISE = "02_ring_all_reduce"  # the source that they are wrong answers to

    @wrong("ring_all_reduce", "a mean, where the contract asks for the sum")
    def mean_instead_of_sum(comm, x):
        '''The name of the fault.'''

`wrong` takes the check's name, then words that the check's message must contain: those that name *this* fault.
`right` marks an answer that looks different from the course's and that the check must accept.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL: list[Wrong] = []
RIGHT: list[Wrong] = []  # accepted: no words


@dataclass(frozen=True)
class Wrong:
    """An answer that `check` must refuse with a message that contains every one of `words` (or accept: no words)."""

    answer: object
    check: str
    words: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.answer.__module__

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}-{self.answer.__name__}"


def wrong(check: str, *words: str):
    """Marks a wrong answer; see the module's docstring."""

    def mark(answer):
        ALL.append(Wrong(answer, check, words))
        return answer

    return mark


def right(check: str):
    """Marks a right answer that is not the course's own."""

    def mark(answer):
        RIGHT.append(Wrong(answer, check, ()))
        return answer

    return mark
