"""Checks of exercise 04, a partition that meets a memory limit: the bytes of a stage, then the cut.

A wrong number of bytes is held against what the usual faults count, a wrong cut against the cuts that are best when
memory is counted by one of these faults, or when something else than the slowest stage is made small.
"""

from __future__ import annotations

import ctypes
import operator
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from numbers import Integral, Real
from typing import NoReturn

from pcourse.checks import fail, require
from pcourse.config import ModelConfig
from pcourse.cost.layers import Piece, pieces
from pcourse.lab.check import Scoreboard, check
from pcourse.lab.plots import Picture
from pcourse.lab.plots import partition as partition_picture
from pcourse.parallel.partition import partition as cut_by
from pcourse.parallel.partition import parts_of
from pcourse.wording import bytes_text, number_text

PARAMETER = 16  # bytes: itself, its gradient and AdamW's two numbers, in float32
PATIENCE = 5.0  # seconds that one cut may take; the dynamic program needs a few hundredths
INFINITY = float("inf")

Cut = tuple[range, ...]


# --- the bytes of a stage ------------------------------------------------------------------------------------------


@check
def stage_bytes(function):
    """A stage is its model states, once for a tied matrix, and the activations of all micro-batches in flight."""
    chance = random.Random(4)
    for _ in range(12):
        row, tied = list(_row(chance, chance.randint(1, 6))), chance.randint(2, 9)
        for first, last in ((1, len(row) - 1), (0, 2), (len(row) - 2, len(row)), (0, len(row))):
            _require_stage_bytes(function, row[first:last], chance.randint(2, 5), chance.choice([0, tied]))
    model = ModelConfig(layers=12, hidden=128, heads=8, sequence=64, vocab=8192)
    board = Scoreboard("bytes of the model of lesson 04 on one stage, 4 micro-batches in flight", "by formula")
    all_pieces, matrix = list(pieces(model)), model.vocab * model.hidden
    board.add("stage bytes", function(all_pieces, 4, matrix), _bytes(all_pieces, 4, matrix), unit="bytes")
    return board


def _bytes(held: Sequence[Piece], in_flight: float, tied: int) -> float:
    shared = tied if _has_both_ends(held) else 0
    parameters = sum(piece.parameters for piece in held) - shared
    return PARAMETER * parameters + in_flight * sum(piece.activations for piece in held)


def _has_both_ends(held: Sequence[Piece]) -> bool:
    return {"embedding", "head"} <= {piece.name for piece in held}


def _require_stage_bytes(function, held: list[Piece], in_flight: int, tied: int) -> None:
    given, due = list(held), _bytes(held, in_flight, tied)
    got = function(given, in_flight, tied)
    case = f"stage_bytes of {_names(held)}, in_flight={in_flight}, tied={tied}"
    require(got is not None, case, "it gives None: is a `return` missing?")
    number = isinstance(got, Real) and not isinstance(got, bool)
    require(number, case, f"it gives {type(got).__name__}, and bytes are a number")
    require(given == held, case, "it changes the list that it was given: whoever calls still needs it")
    if abs(got - due) > 1e-6 * due:
        reason = _bytes_fault(held, in_flight, tied, got)
        fail(case, f"it gives {number_text(got)} bytes, and it is {number_text(due)}{reason}")


def _bytes_fault(held: list[Piece], in_flight: int, tied: int, got: float) -> str:
    parameters, kept = sum(p.parameters for p in held), sum(p.activations for p in held)
    both = _has_both_ends(held)
    once = parameters - (tied if both else 0)
    end = next((p.name for p in held if p.name in ("embedding", "head")), "")
    states = "a parameter is itself, its gradient and AdamW's two numbers: 16 bytes in float32"
    copies = "on a stage that has only one of its ends the matrix is a whole copy"
    found = [
        (PARAMETER * once + kept, f"one micro-batch's activations are in it, and {in_flight} are in flight "
         "at the peak"),
        (in_flight * (PARAMETER * once + kept), "in_flight multiplies the model states too: "
         "micro-batches share them, only activations are kept for each"),
        (PARAMETER * once, "the activations are not in it"),
        (in_flight * kept, "the model states are not in it"),
        (4 * once + in_flight * kept, f"only the parameters themselves are in it; {states}"),
        (8 * once + in_flight * kept, f"8 bytes a parameter: its gradient, or AdamW's numbers, are missing; {states}"),
        (12 * once + in_flight * kept, f"12 bytes a parameter: its gradient is missing; {states}"),
        (PARAMETER * parameters + in_flight * kept, "the tied matrix is counted twice: embedding and head share it "
         "where both are on one stage"),
        (PARAMETER * (parameters - tied) + in_flight * kept, f"the tied matrix is taken away from a stage with "
         f"{'its ' + end + ' alone' if end else 'neither end'}: {copies if end else 'there is none here'}"),
        (PARAMETER * (parameters - 2 * tied) + in_flight * kept, "the tied matrix is not in it at all: "
         "both ends take it away, and one of them must keep it"),
        (PARAMETER * parameters - tied + in_flight * kept, "of the tied matrix one byte a number is taken away, "
         "and each number is 16 bytes"),
        (PARAMETER * parameters - 4 * tied + in_flight * kept, "of the tied matrix 4 bytes a number are taken away: "
         "its second gradient and second optimizer state do not exist either"),
    ]  # fmt: skip
    words = next((words for value, words in found if abs(value - got) <= 1e-6 * max(1, abs(value))), None)
    return f": {words}" if words else f" = {PARAMETER}·parameters + in_flight·activations"


# --- the cut -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of pieces, in how many stages it is cut, and what fits: the arguments of the learner's `cut`."""

    row: tuple[Piece, ...]
    stages: int
    in_flight: tuple[float, ...]
    tied: int = 0
    limit: float = INFINITY

    def bytes_of(self, stage: int, held: range) -> float:
        return _bytes([self.row[i] for i in held], self.in_flight[stage], self.tied)

    def flops_of(self, held: range) -> int:
        return self._flops_up_to[held.stop] - self._flops_up_to[held.start]

    def slowest(self, cut: Cut) -> int:
        return max(map(self.flops_of, cut))

    def fullest(self, cut: Cut) -> float:
        return max(self.bytes_of(stage, held) for stage, held in enumerate(cut))

    @cached_property
    def _flops_up_to(self) -> list[int]:
        return list(accumulate((piece.flops for piece in self.row), initial=0))

    def __str__(self) -> str:
        return (
            f"{len(self.row)} pieces on {self.stages} stage{'s' * (self.stages > 1)}, "
            f"in_flight={list(self.in_flight)}, limit {_short(self.limit)}"
        )


@check
def cut(function):
    """Every stage fits, and no cut that fits has a faster slowest stage."""
    cases = list(_cases())
    for case in cases:
        _require_cut(function, case, cases)
    real = _real_case()
    got = _require_cut(function, real, cases)
    board = Scoreboard("32 layers of hidden 4,096, a vocabulary of 128,000, 8 stages", "by formula")
    board.add("slowest stage", real.slowest(got) / 1e12, real.slowest(best(real)) / 1e12, unit="TFLOP")
    board.add("fullest stage, against the limit", real.fullest(got), real.limit, unit="bytes")
    return board


def best(case: Case, bytes_of=None, cost=None, join=max, fits=operator.le) -> Cut | None:
    """The cut with the least `join` of the stages' `cost(stage, held)` among those whose stages fit; None without one.

    By default the slowest stage by FLOPs is made small, and `bytes_of(stage, held)` fits at or below the limit.
    """
    bytes_of, cost = bytes_of or case.bytes_of, cost or (lambda stage, held: case.flops_of(held))
    reached: dict = {0: (0, ())}  # pieces placed so far -> (value, the stages)
    for stage in range(case.stages):
        extended: dict = {}
        for start, (value, earlier) in reached.items():
            for stop in range(start + 1, len(case.row) + 1):
                held = range(start, stop)
                joined = join(value, cost(stage, held))
                if fits(bytes_of(stage, held), case.limit) and (stop not in extended or joined < extended[stop][0]):
                    extended[stop] = joined, (*earlier, held)
        reached = extended
    return reached[len(case.row)][1] if len(case.row) in reached else None


def _require_cut(function, case: Case, alike: list[Case]) -> Cut | None:
    """What `function` gives, if it is right; `alike` are cases on which a fault can be told from another."""
    got, due = _in_time(function, case), best(case)
    if got is None:
        if due is not None:
            _fail_cut(case, f"it gives None, and {_told(due)} fits", _fault(function, alike) or _why_none(case))
        return None
    _require_whole(got, case)
    got = _as_ranges(got)
    each = [case.bytes_of(stage, held) for stage, held in enumerate(got)]
    over = next((stage for stage, size in enumerate(each) if size > case.limit), None)
    if over is not None:
        words = f"stage {over} of {_told(got)} holds {_short(each[over])}, and the limit is {_short(case.limit)}"
        if due is None:
            _fail_cut(case, f"no cut fits here, and it gives one: {words}. Then it must give None")
        _fail_cut(case, words, _fault(function, alike) or _why_full(case, got, over))
    slow, least = case.slowest(got), case.slowest(due)
    if slow > least:
        words = (
            f"the slowest stage of {_told(got)} takes {_short(slow)} FLOPs, and with {_told(due)} it is {_short(least)}"
        )
        _fail_cut(case, words, _fault(function, alike))
    return got


def _fail_cut(case: Case, words: str, reason: str = "") -> NoReturn:
    fail(str(case), f"{words}: {reason}" if reason else words)


def _in_time(function, case: Case):
    """What `function` gives, in a thread that is ended when it takes too long."""
    outcome: dict = {}

    def work():
        try:
            given = list(case.row), case.stages, list(case.in_flight), case.tied, case.limit
            outcome["cut"] = function(*given)
        except BaseException as error:  # noqa: BLE001  raised again where the check can explain it
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        rule = "the best cut of the first n pieces into k stages extends one of fewer pieces into k - 1"
        fail(str(case), f"no answer after {PATIENCE:g} seconds. Does it try every cut? There are too many: {rule}")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["cut"]


def _require_whole(got, case: Case) -> None:
    """Every stage holds pieces, and every piece is on one stage, in the order of the model."""
    name, count = str(case), len(case.row)
    runs = isinstance(got, Sequence) and not isinstance(got, str) and all(map(_is_run, got))
    require(runs, name, f"it gives {got!r:.80}, and it must be a list of ranges, as [range(0, 2), range(2, 5)]")
    words = f"it gives {len(got)} stages, and there are {case.stages}"
    require(len(got) == case.stages, name, f"{words}: {_told(got)}")
    empty = next((stage for stage, held in enumerate(got) if len(held) == 0), None)
    require(empty is None, name, f"stage {empty} is empty in {_told(got)}: a rank would have no work")
    placed = [i for held in got for i in held]
    beyond = next((i for i in placed if not 0 <= i < count), None)
    require(beyond is None, name, f"{_told(got)} has piece {beyond}, and the pieces are 0 to {count - 1}")
    lost = [i for i in range(count) if i not in placed]
    rule = "every piece has one stage, else another, smaller model is trained"
    rule = "a range ends before its stop" if len(lost) == case.stages - 1 and count - 1 in placed else rule
    require(not lost, name, f"{_pieces(case, lost)} on no stage in {_told(got)}: {rule}")
    twice = sorted({i for i in placed if placed.count(i) > 1})
    rule = "the next stage begins where the one before it ends"
    require(not twice, name, f"{_pieces(case, twice)} on two stages in {_told(got)}: {rule}")
    rule = "a stage holds neighbours, and the stages stand in the order of the model"
    require(placed == list(range(count)), name, f"{_told(got)}: {rule}, else activations go to and fro")


def _is_run(held) -> bool:
    return isinstance(held, (range, list)) and all(isinstance(i, Integral) for i in held)


def _as_ranges(got) -> Cut:
    return tuple(range(held[0], held[-1] + 1) for held in got)


# --- which fault it is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """`find(case)` is what one makes of a case who has this fault; `same(case, cut)` is equal for cuts that are equally
    good in his eyes."""

    words: str
    find: Callable[[Case], Cut | None]
    same: Callable[[Case, Cut], object] = Case.slowest

    def explains(self, case: Case, got: Cut | None) -> bool:
        found = self.find(case)
        if got is None or found is None:
            return got is found
        return self.same(case, got) == self.same(case, found)


def _fault(function, cases: list[Case]) -> str:
    """The words of the fault that explains all that `function` makes of these cases; "" if none does."""
    answers = []
    for case in cases:
        try:
            got = _in_time(function, case)
            if got is not None:
                _require_whole(got, case)
                got = _as_ranges(got)
        except Exception:  # noqa: BLE001  that case tells nothing; it comes up by itself if there is nothing else
            continue
        answers.append((case, got))
    return next((f.words for f in _FAULTS if all(f.explains(case, got) for case, got in answers)), "")


def _misweighed(words: str, weigh: Callable[[Case, int, list[Piece]], float]) -> Fault:
    """The fastest cut by another count of bytes."""

    def find(case: Case) -> Cut | None:
        return best(case, bytes_of=lambda stage, held: weigh(case, stage, [case.row[i] for i in held]))

    return Fault(words, find)


def _even(case: Case) -> Cut | None:
    return best(case, bytes_of=lambda stage, held: 0, cost=lambda stage, held: len(held) ** 2, join=operator.add)


def _evenest(case: Case) -> Cut | None:
    return best(case, cost=lambda stage, held: case.flops_of(held) ** 2, join=operator.add)


def _careless(case: Case) -> Cut | None:
    """The fastest cut of all."""
    return best(case, bytes_of=lambda stage, held: 0)


def _sum_of_squares(case: Case, cut: Cut) -> int:
    return sum(case.flops_of(held) ** 2 for held in cut)


_FAULTS = (
    Fault("a stage that holds exactly the limit fits", lambda case: best(case, fits=operator.lt)),
    _misweighed(
        "it looks as if every stage had one micro-batch in flight: stage i has in_flight[i]",
        lambda case, stage, held: _bytes(held, 1, case.tied),
    ),
    _misweighed(
        "it looks as if every stage had as many micro-batches in flight as stage 0: stage i has in_flight[i]",
        lambda case, stage, held: _bytes(held, case.in_flight[0], case.tied),
    ),
    _misweighed(
        "it looks as if in_flight were turned round: stage 0 is the first of it, and holds the most",
        lambda case, stage, held: _bytes(held, case.in_flight[-1 - stage], case.tied),
    ),
    _misweighed(
        "it looks as if stage i had the in_flight of the stage after it: stage i has in_flight[i]",
        lambda case, stage, held: _bytes(held, [*case.in_flight, 0][stage + 1], case.tied),
    ),
    _misweighed(
        "it looks as if the model states alone were weighed: activations must fit too",
        lambda case, stage, held: _bytes(held, 0, case.tied),
    ),
    _misweighed(
        "it looks as if in_flight multiplied the model states too: activations only are kept for each micro-batch",
        lambda case, stage, held: case.in_flight[stage] * _bytes(held, 1, case.tied),
    ),
    _misweighed(
        "the tied matrix is counted twice where one stage holds both ends",
        lambda case, stage, held: _bytes(held, case.in_flight[stage], 0),
    ),
    Fault(
        "it is the fastest cut where memory is no matter. Of the cuts that fit the fastest is asked for",
        lambda case: _careless(case) if best(case) else None,
    ),
    Fault("it is the fastest cut where memory is no matter, and the limit is not looked at", _careless),
    Fault(
        "the fastest cut of all does not fit, but a slower one does: look for the fastest among those that fit",
        lambda case: fast if (fast := _careless(case)) and case.fullest(fast) <= case.limit else None,
    ),
    Fault(
        "it shares out the number of pieces, and pieces do not take the same time",
        _even,
        lambda case, cut: sum(len(held) ** 2 for held in cut),
    ),
    Fault(
        "its fullest stage is as small as can be, but memory is the limit here and not the goal",
        lambda case: best(case, cost=case.bytes_of),
        Case.fullest,
    ),
    Fault(
        "it has the least sum of squares, and the slowest stage alone sets the pace",
        _evenest,
        _sum_of_squares,
    ),
    Fault(
        "each stage is filled until the next piece does not fit, and the last takes what is left. "
        "Memory is the limit; the goal is the slowest stage",
        lambda case: _filled(case),
        lambda case, cut: cut,
    ),
)


def _why_full(case: Case, got: Cut, stage: int) -> str:
    each = [case.bytes_of(stage, held) for stage, held in enumerate(got)]
    if sum(each) / len(each) <= case.limit:
        return "the mean of the stages is below it, but each device has its own memory, and the fullest must fit"
    return "every stage must fit"


def _why_none(case: Case) -> str:
    fast = _careless(case)
    slower = fast is not None and case.fullest(fast) > case.limit
    return "the fastest cut of all does not fit, but a slower one does" if slower else ""


def _filled(case: Case) -> Cut | None:
    """Each stage filled up to the limit, from the first on, with a piece left for each stage to come."""
    runs, start, count = [], 0, len(case.row)
    for stage in range(case.stages):
        stop, most = start + 1, count - (case.stages - 1 - stage)
        while stop < most and case.bytes_of(stage, range(start, stop + 1)) <= case.limit:
            stop += 1
        if start >= most or case.bytes_of(stage, range(start, stop)) > case.limit:
            return None
        runs.append(range(start, stop))
        start = stop
    return tuple(runs) if start == count else None


def _told(got) -> str:
    """A cut in few words: [0-3 | 4-5 | 6-9], or [0,2 | 1,3] where a stage holds no neighbours."""

    def run(held):
        held = list(held)
        if not held:
            return "-"
        if held != list(range(held[0], held[-1] + 1)):
            return ",".join(map(str, held[:6]))
        return f"{held[0]}" if len(held) == 1 else f"{held[0]}-{held[-1]}"

    return f"[{' | '.join(run(held) for held in got)}]"


def _short(number: float) -> str:
    return "none" if number == INFINITY else bytes_text(number) if number > 1e6 else number_text(number)


def _pieces(case: Case, indices: Sequence[int]) -> str:
    names = [case.row[i].name for i in indices]
    return f"{', '.join(names[:3])}{', …' * (len(names) > 3)} {'are' if len(names) > 1 else 'is'}"


def _names(held: Sequence[Piece]) -> str:
    names = [piece.name for piece in held]
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, …, {names[-1]}"


# --- what is cut ---------------------------------------------------------------------------------------------------


def _row(chance: random.Random, layers: int, ends: int = 60) -> tuple[Piece, ...]:
    """A small model with whole numbers that can be checked by hand; its layers differ, as chance has it."""

    def piece(name, parameters, flops, activations):
        return Piece(name, parameters, flops, 0, 0, activations)

    first = piece("embedding", chance.randint(20, ends), 0, chance.randint(1, 9))
    last = piece("head", chance.randint(20, ends), chance.randint(3, 12), chance.randint(5, 30))
    between = [
        piece(f"layer {i}", chance.randint(5, 12), chance.randint(2, 9), chance.randint(10, 60)) for i in range(layers)
    ]
    return (first, *between, last)


def _cases():
    """Small cases, the plain ones first: without a limit, with one that decides, with one that is met exactly, and such
    that nothing meets."""
    chance = random.Random(5)
    for stages in (2, 3, 4):
        yield Case(_row(chance, 7), stages, tuple(range(stages, 0, -1)))
    loose = []
    for stages in (2, 3, 4) * 5:
        case = Case(_row(chance, 8, ends=90), stages, tuple(range(stages, 0, -1)), chance.choice([0, 15]))
        least, most = case.fullest(best(case, cost=case.bytes_of)), case.fullest(best(case))
        loose.append((case, least, most))
    yield _uneven(chance)
    for share in (1.1, 0.5, 0.2, 0.8):
        for case, least, most in loose:
            if least < most:
                yield replace(case, limit=int(least + share * (most - least)))
    for case, least, _ in loose:
        yield replace(case, limit=least - 1)
    row = _row(chance, 3)
    yield Case(row, 1, (1,), 15, _bytes(row, 1, 15) + 100)  # both ends on one stage
    for case, least, _ in loose:
        yield replace(case, limit=least)
    yield Case(row, 5, (5, 4, 3, 2, 1))  # one piece each
    yield Case(row, 6, (6, 5, 4, 3, 2, 1))  # more stages than pieces


def _uneven(chance: random.Random) -> Case:
    """A case in which the evenest cut, by the sum of squares, is not the fastest."""
    while True:
        case = Case(_row(chance, 7), 4, (4, 3, 2, 1))
        if case.slowest(_evenest(case)) > case.slowest(best(case)):
            return case


def _real_case() -> Case:
    """34 pieces on 8 stages: 4 million cuts, and a limit that the fastest of them does not meet."""
    model = _REAL
    case = Case(pieces(model), 8, tuple(range(8, 0, -1)), model.vocab * model.hidden)
    fast, small = best(case), best(case, cost=case.bytes_of)
    return replace(case, limit=(case.fullest(fast) + 2 * case.fullest(small)) // 3)


_REAL = ModelConfig(layers=32, hidden=4096, heads=32, vocab=128_000, sequence=4096, attention="fused")


def look(function) -> Picture | None:
    """The learner's cut of the model of lesson 04, beside the package's two rules, and the limit."""
    model = ModelConfig(layers=12, hidden=128, heads=8, sequence=64, vocab=8192)
    case = Case(pieces(model), 4, (4, 3, 2, 1), model.vocab * model.hidden, 32 * 2**20)
    try:
        got = _in_time(function, case)
    except NotImplementedError:
        print("Nothing to see yet: write the function in the cell above, run it, then run this cell again.")
        return None
    if got is None:
        print("It says that no cut fits within 32 MiB. Does it?")
        return None
    mine = parts_of(got, model)
    rules = {rule: cut_by(model, 4, rule, in_flight=case.in_flight) for rule in ("compute", "memory")}
    for rule, parts in {**rules, "yours": mine}.items():
        flops = [sum(piece.flops for piece in part.pieces(case.row)) for part in parts]
        print(f"{rule:<8} slowest stage {max(flops) / 1e6:4.0f} MFLOP")
    return partition_picture(model, {**rules, "yours": mine}, in_flight=case.in_flight, limit=case.limit)
