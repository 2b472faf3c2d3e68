"""Checks of exercise 05, 1F1B as a schedule: GPipe to warm up, 1F1B, then one with its weight gradients put off.

An answer is a function of (i, p, m): the order of computes on stage i of p, for m micro-batches. What is wrong shows in
the schedule itself: whole and in order, free of deadlock (`parallel/schedule_check.py`), how many micro-batches each
stage holds, how long the step takes. Only then does it run, on thread ranks, beside the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from IPython.display import display

from pcourse.checks import fail, on_ranks, require
from pcourse.comm import Comm
from pcourse.config import ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.simulate import Simulation, simulate
from pcourse.data import batch
from pcourse.lab import plots
from pcourse.lab.check import CheckFailed, Scoreboard, check
from pcourse.model import GPT, build
from pcourse.parallel.partition import stages_of
from pcourse.parallel.pipeline import Pipeline
from pcourse.parallel.schedule_check import ScheduleError, check_schedule
from pcourse.parallel.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    make_schedule,
)
from pcourse.parallel.stage import Stage
from pcourse.proof import roughen
from pcourse.wording import count_text

TIMES = {"forward": 1, "backward_input": 1, "backward_weight": 1}  # of one micro-batch on one stage
STEP = sum(TIMES.values())  # what a micro-batch takes a stage, forward and backward
SOURCE = "predicted from a walk of your schedule, forward 1 and backward 2 units; gradients from ranks that are threads"


# --- what a learner writes a schedule with -------------------------------------------------------------------------


def forward(k: int) -> Action:
    """The forward pass of micro-batch k; printed Fk."""
    return Action(FORWARD, k)


def backward(k: int) -> Action:
    """The whole backward pass of micro-batch k: the gradients of its input and of the weights; printed Bk."""
    return Action(BACKWARD, k)


def backward_input(k: int) -> Action:
    """The half of backward that the stage before waits for, the gradient of the input; printed Bk too."""
    return Action(BACKWARD_INPUT, k)


def backward_weight(k: int) -> Action:
    """The half that nobody waits for, the gradient of the weights; printed Wk."""
    return Action(BACKWARD_WEIGHT, k)


def look(*functions, p: int = 4, m: int = 8) -> None:
    """Print the orders that each function gives for `p` stages and `m` micro-batches, and draw them on one time axis.

    What cannot run is printed with the reason, and not drawn.
    """
    runs = []
    for function in functions:
        try:
            schedule = _schedule(function, Case(p, m))
        except NotImplementedError:
            print(f"Nothing to see of {function.__name__} yet: write it in its cell above, then run this cell again.")
        except CheckFailed as error:
            print(error)
        else:
            print(schedule)
            try:
                check_schedule(schedule)
                runs.append(simulate(schedule, **TIMES))
            except ScheduleError as error:
                print(f"It cannot run. {error}")
    if runs:
        display(plots.pipeline(*runs))


# --- what every schedule must be -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """So many stages and micro-batches."""

    p: int
    m: int

    def __str__(self) -> str:
        return f"{count_text(self.p, 'stage')}, {count_text(self.m, 'micro-batch')}"


CASES = [Case(4, 8), Case(4, 2), Case(3, 1), Case(2, 3), Case(3, 5), Case(4, 4), Case(1, 3), Case(1, 1)]
RUNS = [Case(4, 8), Case(3, 2)]


def _schedule(function, case: Case) -> Schedule:
    """The learner's orders for all stages."""
    orders = tuple(tuple(_order(function, i, case)) for i in range(case.p))
    return Schedule(function.__name__, case.p, case.m, 1, orders)


def _order(function, i: int, case: Case) -> list[Action]:
    order = function(i, case.p, case.m)
    if order is None:
        fail(str(case), f"{function.__name__}({i}, {case.p}, {case.m}) returns None: is a `return` missing?")
    known = isinstance(order, Iterable) and not isinstance(order, (str, Action))
    require(known, str(case), f"{function.__name__} returns a {type(order).__name__}, and not a list of computes")
    order = list(islice(order, 9 * case.m + 9))  # a generator may have no end
    for place, entry in enumerate(order):
        if not isinstance(entry, Action):
            words = f"entry {place} on stage {i} is a {type(entry).__name__}; forward(k) and backward(k) make entries"
            rule = ": lists are put together with +, or with extend"
            fail(str(case), words + rule * isinstance(entry, list))
    return order


def _require_whole(case: Case, schedule: Schedule) -> None:
    """Every stage does everything once, in an order that its messages allow."""
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        first, second, *more = [*str(error).split("; "), ""]  # of a deadlock: who waits for what, stage by stage
        words = f"{first}; {second}; and so on" if any(more) else str(error)
        fail(str(case), f"{words}{_clue(case, schedule, words)}")


def _clue(case: Case, schedule: Schedule, words: str) -> str:
    """What the whole of a schedule that cannot run says about the fault."""
    p, m = case.p, case.m
    if all(action.kind == FORWARD for order in schedule.orders for action in order):
        return ". There is no backward at all"
    ahead, due = _ahead(schedule), [min(m, p - i) for i in range(p)]
    if "there is no" in words and m < p:
        return f": with fewer micro-batches than stages, no stage can run ahead by more than all {m}"
    if "has no backward" in words:
        missing = [m - sum(a.kind in (BACKWARD, BACKWARD_WEIGHT) for a in order) for order in schedule.orders]
        split = any(a.kind == BACKWARD_INPUT for order in schedule.orders for a in order)
        rule = "what was put off must still come" if split else "what ran ahead in the warm-up must still come back"
        return f". The stages leave out {', '.join(map(str, missing))}: {rule}, at the end"
    if "agree which gradient" in words:
        first = [next(a.micro_batch for a in order if a.kind != FORWARD) for order in schedule.orders]
        rule = "all stages must bring micro-batches back in one order"
        return f". The stages' first backwards are of {', '.join(map(str, first))}: {rule}"
    if "deadlock" not in words or p == 1:
        return ""
    begin = f". The stages begin with {', '.join(map(str, ahead))} forwards"
    if ahead == due[::-1]:
        return f"{begin}: counted from the wrong end. The first stage waits longest for its first gradient"
    return f"{begin}; a stage's first backward needs a forward on every stage after it"


def _ahead(schedule: Schedule) -> list[int]:
    """How many forwards each stage runs before its first backward."""
    return [next((n for n, a in enumerate(order) if a.kind != FORWARD), len(order)) for order in schedule.orders]


def _require_whole_backwards(case: Case, schedule: Schedule) -> None:
    split = [i for i, order in enumerate(schedule.orders) for a in order if a.kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)]
    require(not split, str(case), f"stage {[*split, 0][0]} cuts its backward in two: that is part 3, here it is whole")


def _require_gradients(function) -> int:
    """The schedule runs on thread ranks, and gives the unsplit model's gradients; how many tensors were compared."""
    compared = []
    for case in RUNS:
        schedule, model = _schedule(function, case), _model(case)
        whole = dict(_unsplit(case, model).named_parameters(remove_duplicate=False))
        gradients = on_ranks(f"{case}, run on {case.p} thread ranks", case.p, _run, schedule, model)
        for i, stage in enumerate(gradients):
            for name, grad in stage.items():
                words = f"the gradient of {name} on stage {i} is not the unsplit model's"
                require(torch.allclose(grad, whole[name].grad, rtol=1e-9, atol=1e-12), str(case), words)
        compared.append(sum(map(len, gradients)))
    return compared[0]


def _model(case: Case) -> ModelConfig:
    return ModelConfig(layers=case.p, hidden=8, heads=2, vocab=13, sequence=3, dtype="float64")


def _load(case: Case, model: ModelConfig, rows: range):
    return batch(model, TrainConfig(batch=case.m), 0, slice(rows.start, rows.stop))


def _unsplit(case: Case, model: ModelConfig) -> GPT:
    whole = roughen(build(model))
    (whole.loss(*_load(case, model, range(case.m))) / (case.m * model.sequence)).backward()
    return whole


def _run(comm: Comm, schedule: Schedule, model: ModelConfig) -> dict[str, torch.Tensor]:
    """One step of the learner's schedule on this rank: its gradients."""
    case = Case(schedule.stages, schedule.micro_batches)
    _, parts = stages_of(model, ParallelConfig(pp=case.p, micro_batches=case.m), TrainConfig(batch=case.m))
    stage = Stage(roughen(build(model)), [parts[comm.rank]])
    pipeline = Pipeline(comm, schedule, stage)
    rows = [range(k, k + 1) for k in range(case.m)]
    pipeline.run(rows, lambda some: _load(case, model, some), case.m * model.sequence)
    pipeline.sum_tied(stage.tied_gradient)
    return {name: p.grad for name, p in stage.named_parameters()}


def _scoreboard(function, name: str, beside: Schedule) -> Scoreboard:
    """What the learner's schedule costs, beside the schedule that is the target."""
    case = RUNS[0]
    compared = _require_gradients(function)
    mine, target = _walk(_schedule(function, case)), _walk(beside)
    board = Scoreboard(f"{name}: {case}", SOURCE)
    board.add("step", mine.step_seconds, target.step_seconds, "units")
    board.add("bubble, of the wall clock", *_percents(mine, target, "bubble_of_step"), "%")
    board.add("bubble, of the ideal", *_percents(mine, target, "bubble_of_ideal"), "%")
    for i, (held, most) in enumerate(zip(mine.peak_in_flight, target.peak_in_flight, strict=True)):
        board.add(f"most micro-batches in flight, stage {i}", held, most)
    board.add("gradients equal to the unsplit model's", compared, compared, at_most=False)
    return board


def _walk(schedule: Schedule) -> Simulation:
    return simulate(schedule, **TIMES)


def _percents(mine: Simulation, target: Simulation, name: str) -> list[float]:
    return [round(100 * getattr(run, name), 6) for run in (mine, target)]


# --- part 1: GPipe -------------------------------------------------------------------------------------------------


@check
def gpipe(function):
    """All forwards, then all backwards: on threads it gives the unsplit model's gradients."""
    for case in CASES:
        schedule = _schedule(function, case)
        _require_whole_backwards(case, schedule)
        _require_whole(case, schedule)
        for i, ahead in enumerate(_ahead(schedule)):
            words = f"stage {i} begins a backward after {ahead} of {case.m} forwards: GPipe runs all forwards first"
            require(ahead == case.m, str(case), words)
    return _scoreboard(function, "GPipe", make_schedule("gpipe", RUNS[0].p, RUNS[0].m))


# --- part 2: 1F1B --------------------------------------------------------------------------------------------------


@check
def one_f_one_b(function):
    """GPipe's bubble, and stage i never holds more than p - i micro-batches."""
    for case in CASES:
        schedule = _schedule(function, case)
        _require_whole_backwards(case, schedule)
        _require_whole(case, schedule)
        _require_few_in_flight(case, schedule)
        _require_1f1b_step(case, schedule)
    return _scoreboard(function, "1F1B", make_schedule("1f1b", RUNS[0].p, RUNS[0].m))


def _require_few_in_flight(case: Case, schedule: Schedule) -> None:
    p, m = case.p, case.m
    held, due = _walk(schedule).peak_in_flight, [min(m, p - i) for i in range(p)]
    over = [i for i in range(p) if held[i] > due[i]]
    if not over:
        return
    i = over[0]
    words = f"stage {i} holds {count_text(round(held[i]), 'micro-batch')} at once, and 1F1B min(m, p - i) = {due[i]}"
    if all(h == m for h in held) and all(ahead == m for ahead in _ahead(schedule)):
        words = f"""{words}: all forwards come first. This is GPipe: the bubble is 1F1B's, and the memory grows with m.
            After the warm-up each forward must be followed by a backward"""
    elif all(held[i] == min(m, due[i] + 1) for i in range(p)):
        words += ": one forward too many before the first backward. The first pair brings a forward of its own"
    elif p > 1 and len(set(_ahead(schedule))) == 1:
        words += f""": every stage begins with {_ahead(schedule)[0]} forwards. The nearer a stage is to the end, the
            sooner its first gradient is back, and the fewer it needs to run ahead"""
    fail(str(case), words)


def _require_1f1b_step(case: Case, schedule: Schedule) -> None:
    p, m = case.p, case.m
    run, due = _walk(schedule), STEP * (m + p - 1)
    if run.step_seconds <= due:
        return
    words = f"the step takes {run.step_seconds:g} units, and 1F1B (m + p - 1) · {STEP} = {due}"
    if run.step_seconds == STEP * m * p:
        words += ": one micro-batch at a time goes through all stages, and nobody works beside it. Run forwards ahead"
    else:
        ahead = _ahead(schedule)
        i = next(i for i in range(p) if ahead[i] < min(m, p - i) or i == p - 1)
        words += f""". Stage {i} begins with {count_text(ahead[i], "forward")} and holds {run.peak_in_flight[i]:g} of
            the {min(m, p - i)} micro-batches that it may: too few to have work until its first gradient is back"""
    fail(str(case), words)


# --- part 3: weight gradients put off ------------------------------------------------------------------------------


@check
def zero_bubble(function):
    """The weight gradients fill the bubble, and no stage holds more micro-batches than the first does in 1F1B."""
    for case in CASES:
        schedule = _schedule(function, case)
        _require_split_backwards(case, schedule)
        _require_whole(case, schedule)
        _require_put_off(case, schedule)
    return _scoreboard(function, "weight gradients put off", make_schedule("zb-h1", RUNS[0].p, RUNS[0].m))


def _require_split_backwards(case: Case, schedule: Schedule) -> None:
    whole = [i for i, order in enumerate(schedule.orders) for action in order if action.kind == BACKWARD]
    words = f"""stage {[*whole, 0][0]} has a whole backward, and so the stage before waits for weight gradients that it
        does not need: write backward_input(k), and backward_weight(k) where it suits"""
    require(not whole, str(case), words)


def _require_put_off(case: Case, schedule: Schedule) -> None:
    """No more in flight than the first stage of 1F1B holds, and as short a step as ZB-H1's."""
    p, m = case.p, case.m
    run = _walk(schedule)
    most = max(run.peak_in_flight)
    off = [_put_off(order) for order in schedule.orders]
    put = f"Stages 0 to {p - 1} put a weight gradient off by up to {', '.join(map(str, off))} input gradients"
    if most > min(m, p):
        i = run.peak_in_flight.index(most)
        words = f"""stage {i} holds {most:g} micro-batches at once, and none may hold more than min(m, p) =
            {min(m, p)}: a micro-batch is held until its weight gradient is done"""
        if all(number == m - 1 for number in off):
            words += ". All weight gradients wait for the end, so that all m micro-batches are held"
        elif _ahead(schedule)[i] > min(m, p - i):
            words += f". It begins with {_ahead(schedule)[i]} forwards, where 1F1B begins with p - i"
        elif p > 1 and off == list(range(p - 1, -1, -1)):
            words += f". {put}: counted from the wrong end, as stage 0 holds the most already"
        else:
            words += f". {put}"
        fail(str(case), words)
    due = _walk(make_schedule("zb-h1", p, m)).step_seconds
    if run.step_seconds > due:
        words = f"""the step takes {run.step_seconds:g} units, {due:g} are possible, and 1F1B takes
            {STEP * (m + p - 1)}"""
        if not any(off):
            words += """. No weight gradient is put off: each comes at once after its input gradient, while the next
                stage's work is waited for"""
        else:
            words += f". {put}: some stage still waits in the cool-down, and has no weight gradient left to fill it"
        fail(str(case), words)


def _put_off(order: tuple[Action, ...]) -> int:
    """The most input gradients that come between a micro-batch's own and its weight gradient."""
    inputs = [action.micro_batch for action in order if action.kind == BACKWARD_INPUT]
    most = done = 0
    for action in order:
        done += action.kind == BACKWARD_INPUT
        if action.kind == BACKWARD_WEIGHT:
            most = max(most, done - 1 - inputs.index(action.micro_batch))
    return most
