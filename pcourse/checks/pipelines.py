"""Checks of exercise 05, three broken pipelines: which number betrays a fault, and whether it has been mended.

Each program is one step of a rank that holds one linear layer. It is compared with the unsplit model on the whole
batch. A gradient is read as a sum: how often is each micro-batch in it (`shares`), and of a tied table also each of its
two uses? A loss that is not divided, a sum that is halved and a lost message each leave their own pattern.

A program that still has the fault it came with is not solved yet; one with another fault is wrong.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from pcourse.checks import ITEM, calls_of, fail, listed, not_mended, on_ranks, random, require, shares, times
from pcourse.comm import Comm
from pcourse.lab.check import CheckFailed, Scoreboard, check
from pcourse.recorder import Call
from pcourse.wording import aligned_text, count_text, number_text

HIDDEN, VOCAB = 5, 7
SOURCE = "on ranks that are threads of this process"
LOSS, FACTOR, ONE, STUCK = SYMPTOMS = (
    "the loss of the first step",
    "every gradient, all by one factor",
    "the gradient of one parameter, the others are right",
    "no number, as the step never ends",
)
_BECAUSE = {
    LOSS: "",
    FACTOR: "SGD takes steps that are too long, and clipping sets in too early. Adam divides the factor away.",
    ONE: "The loss of the first step is right. Only from the second on does the wrong parameter spoil it, a little.",
    STUCK: "Threads see it at once. Ranks that are processes wait until somebody's timeout.",
}


# --- the model, whole ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`stages` stages of one layer each, and `rows` rows in micro-batches of `size`; the last may be shorter."""

    stages: int
    rows: int
    size: int
    tied: bool = False

    def __str__(self) -> str:
        stages = count_text(self.stages, "stage")
        row = "token" if self.tied else "row"
        if len(set(self.sizes)) > 1:
            return f"{stages}, micro-batches of {listed(self.sizes)} {row}s"
        return f"{stages}, {count_text(self.m, 'micro-batch')} of {count_text(self.size, row)}"

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in torch.empty(self.rows).split(self.size)]

    @property
    def m(self) -> int:
        return len(self.sizes)

    def inputs(self) -> torch.Tensor:
        return torch.arange(self.rows) * 3 % VOCAB if self.tied else random(70, self.rows, HIDDEN)

    def targets(self) -> torch.Tensor:
        return (torch.arange(self.rows) * 2 + 1) % VOCAB if self.tied else random(71, self.rows, HIDDEN)

    def table(self) -> torch.Tensor:
        return random(72, VOCAB, HIDDEN)

    def layer(self, stage: int) -> Layer:
        layer = Layer(HIDDEN, HIDDEN, device="meta", dtype=torch.float64).to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.copy_(random(50 + stage, HIDDEN, HIDDEN) / 2)
            layer.bias.copy_(random(60 + stage, HIDDEN) / 2)
        return layer


class Layer(nn.Linear):
    """A linear layer that counts how many of its outputs wait for their backward: `most` at once."""

    held = most = 0

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            self.held += 1
            self.most = max(self.most, self.held)
            y.register_hook(self._leave)
        return y

    def _leave(self, grad) -> None:
        self.held -= 1


@dataclass(frozen=True)
class _Whole:
    """What the unsplit model gives: the loss, and of each gradient the parts that it is the sum of."""

    loss: float
    parts: dict[tuple[int, str], list[torch.Tensor]]  # (stage, parameter) -> one for each micro-batch

    def gradient(self, stage: int, name: str) -> torch.Tensor:
        return sum(self.parts[stage, name])


@cache
def _whole(case: Case) -> _Whole:
    """The loss is the mean over the rows; a micro-batch's part of it is its rows' share of that mean.

    The tied table's parts are those of the embedding, micro-batch by micro-batch, and then those of the head.
    """
    loss, parts = 0.0, {}
    p = case.stages
    for x, target in zip(case.inputs().split(case.size), case.targets().split(case.size), strict=True):
        layers = [case.layer(stage) for stage in range(p)]
        embedding, head = (case.table().requires_grad_() for _ in range(2))
        x = embedding[x] if case.tied else x
        for layer in layers:
            x = torch.tanh(layer(x))
        if case.tied:
            part = F.cross_entropy(x @ head.T, target, reduction="sum") / case.rows
        else:
            part = F.mse_loss(x, target, reduction="sum") / case.targets().numel()
        part.backward()
        loss += part.item()
        for stage, layer in enumerate(layers):
            for name, value in layer.named_parameters():
                parts.setdefault((stage, name), []).append(value.grad)
        if case.tied:
            parts.setdefault((0, "embedding"), []).append(embedding.grad)
            parts.setdefault((0, "head"), []).append(head.grad)
    if case.tied:
        both = parts.pop((0, "embedding")) + parts.pop((0, "head"))
        parts[0, "table"] = parts[p - 1, "table"] = both
    return _Whole(loss, parts)


# --- one step on ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What one step of the learner's program left on one rank."""

    loss: object
    gradients: dict[str, torch.Tensor | None]
    most: int  # micro-batches in flight
    calls: list[Call]


class _Deadlock(CheckFailed):
    """The ranks wait for each other for ever; `asynchronous`: isend or irecv was called."""

    def __init__(self, message: str, asynchronous: bool):
        super().__init__(message)
        self.asynchronous = asynchronous


def _steps(function, case: Case) -> list[_Seen]:
    """One step on every rank. Raises _Deadlock."""
    posted: list[str] = []
    try:
        return on_ranks(str(case), case.stages, _program, function, case, posted)
    except CheckFailed as error:
        if "deadlock: " in str(error):
            raise _Deadlock(str(error), bool(posted)) from None
        said, inplace, _ = str(error).partition("one of the variables needed for gradient computation")
        if inplace:
            rule = "what a backward still needs has been overwritten; receive each into a tensor of its own"
            raise CheckFailed(f"{said}{rule}") from None
        raise


def _program(comm: Comm, function, case: Case, posted: list[str]) -> _Seen:
    for name in ("isend", "irecv"):
        setattr(comm, name, _noted(getattr(comm, name), name, posted))
    layer = case.layer(comm.rank)
    held = dict(layer.named_parameters())
    inputs, targets = case.inputs(), case.targets()
    if case.tied:
        at_an_end = comm.rank in (0, comm.size - 1)
        table = nn.Parameter(case.table()) if at_an_end else None
        held |= {"table": table} if at_an_end else {}
        loss = function(comm, table, layer, inputs, targets, case.size)
    else:
        loss = function(comm, layer, inputs, targets, case.size)
    return _Seen(loss, {name: p.grad for name, p in held.items()}, layer.most, calls_of(comm))


def _noted(call, name: str, posted: list[str]):
    def noting(*args, **options):
        posted.append(name)
        return call(*args, **options)

    return noting


def _same(got, expected: torch.Tensor) -> bool:
    return got is not None and got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-6, atol=1e-9)


def _all(counts, expected) -> bool:
    return counts is not None and all(abs(a - b) < 1e-5 for a, b in zip(counts, expected, strict=True))


def _require_loss(case: Case, seen: list[_Seen]) -> None:
    ratio = _loss_ratio(case, seen)
    if abs(ratio - 1) > 1e-6:
        words = f"the gradients are right, and the loss that the last stage returns is {times(ratio, of=True)} it"
        why = ": what is added up has been divided already" if abs(ratio * case.m - 1) < 1e-5 else ""
        fail(str(case), words + why)


def _loss_ratio(case: Case, seen: list[_Seen]) -> float:
    """The loss that the last stage returns over the unsplit model's."""
    loss = seen[-1].loss
    known = isinstance(loss, (int, float)) or isinstance(loss, torch.Tensor) and loss.numel() == 1
    require(known, str(case), f"the last stage returns {type(loss).__name__}, and it must return the loss of the step")
    return float(loss) / _whole(case).loss


def _counts(case: Case, seen: list[_Seen], name: str = "weight") -> list[list[float]]:
    """For each stage, how often each micro-batch is in the gradient of its layer."""
    counts = []
    for stage, rank in enumerate(seen):
        got, parts = rank.gradients[name], _whole(case).parts[stage, name]
        rule = "no gradient arrives there. A backward needs the gradient that the stage after it sends"
        require(got is not None, str(case), f"layer.{name} on stage {stage} has no gradient: {rule}")
        found = shares(got, parts)
        words = f"the gradient of layer.{name} on stage {stage} is no sum of the micro-batches' gradients"
        require(found is not None, str(case), f"{words}: does each backward get its own micro-batch's gradient?")
        counts.append(found)
    return counts


def _require_each_once(case: Case, seen: list[_Seen]) -> None:
    """Every micro-batch once in every layer's gradient."""
    counts = _counts(case, seen)
    for stage, found in enumerate(counts):
        missing = [k for k, count in enumerate(found) if count == 0]
        words = f"the gradient of stage {stage} lacks micro-batch{'es' * (len(missing) > 1)} {listed(missing or [0])}"
        require(not missing, str(case), f"{words}: left out, or set to 0 again by what came after?")
        if not _all(found, [1] * case.m):
            fail(str(case), f"stage {stage}'s gradient {_told(case, found)}")
    for stage, rank in enumerate(seen):
        for name in ("weight", "bias"):
            words = f"the gradient of layer.{name} on stage {stage} is not the unsplit model's"
            require(_same(rank.gradients[name], _whole(case).gradient(stage, name)), str(case), words)


def _told(case: Case, counts: list[float]) -> str:
    """A gradient in words, from how often each micro-batch is in it."""
    if _all(counts, [1] * case.m):
        return "is right"
    if len(set(counts)) == 1:
        return f"is {times(counts[0], of=True)} what it should be"
    return f"has the micro-batches in it {listed(times(count) for count in counts)}"


# --- a: GPipe ------------------------------------------------------------------------------------------------------

AVERAGED = [Case(2, 12, 4), Case(3, 12, 3), Case(2, 10, 4), Case(1, 7, 3), Case(2, 5, 5), Case(3, 7, 2)]


@check
def gpipe_step(function):
    """The loss is the mean over the rows, however they are cut into micro-batches."""
    for case in AVERAGED:
        seen = _steps(function, case)
        _require_averaged(function, case, seen)
        _require_each_once(case, seen)
        _require_loss(case, seen)
    board = Scoreboard("gradient norm over the unsplit model's, 3 stages", f"measured {SOURCE}")
    for size in (12, 5, 1):
        case = Case(3, 12, size)
        board.add(f"micro-batches of {listed(sorted(set(case.sizes), reverse=True))} rows", _ratio(function, case), 1)
    return board


def _ratio(function, case: Case) -> float:
    seen = _steps(function, case)
    got = [rank.gradients[name] for rank in seen for name in ("weight", "bias")]
    whole = [_whole(case).gradient(stage, name) for stage in range(case.stages) for name in ("weight", "bias")]
    return round(_norm(got) / _norm(whole), 6)


def _norm(tensors) -> float:
    return sum(t.square().sum().item() for t in tensors if t is not None) ** 0.5


def _require_averaged(function, case: Case, seen: list[_Seen]) -> None:
    m = case.m
    counts = _counts(case, seen)
    means = [case.rows / n for n in case.sizes]  # what each micro-batch's own mean has too much
    factor = counts[-1][0]
    if any(not _all(found, counts[-1]) for found in counts):
        _different_stages(case, counts)
    elif _all(counts[0], means) and m > 1:
        words = f"every gradient is {m} times the unsplit model's, on all stages"
        if abs(_loss_ratio(case, seen) - 1) > 1e-6:
            fail(str(case), f"{words}: only the loss that is returned is divided, and backward begins from another")
        not_mended(function, case, f"the loss is right, and {words}")
    elif _all(counts[0], [mean / m for mean in means]) and len(set(case.sizes)) > 1:
        told = listed(times(count) for count in counts[0])
        fail(
            str(case),
            f"""the micro-batches are in the gradient {told}: a mean of means, in which a row of the short micro-batch
            weighs more than another. Divide the sum over all rows by the size of the whole batch""",
        )
    elif len(set(counts[0])) == 1 and factor not in (0, 1):
        fail(str(case), f"every gradient is {times(factor, of=True)} what it should be{_why_factor(case, factor)}")


def _why_factor(case: Case, factor: float) -> str:
    m, p = case.m, case.stages
    if abs(factor - 1 / m) < 1e-5:
        return f": the loss is divided by {m}, the number of micro-batches, once too often"
    if abs(factor - m / p) < 1e-5:
        return f": the loss is divided by {p}, the number of stages, where there are {m} micro-batches"
    if abs(factor - case.rows * HIDDEN) < 1e-5:
        return f": the sum over all {case.rows} · {HIDDEN} elements, which is not divided"
    if abs(factor * case.sizes[0] - 1) < 1e-5:
        return ": a mean over a micro-batch's rows, divided by their number in the whole batch once more"
    if abs(factor - HIDDEN) < 1e-5:
        return f": the sum is divided by the rows alone, and the mean is over rows and their {HIDDEN} elements"
    return ""


def _different_stages(case: Case, counts: list[list[float]]) -> None:
    told = "; ".join(f"stage {stage}'s gradient {_told(case, found)}" for stage, found in enumerate(counts))
    rule = "the loss is divided, once, before backward begins; what comes over a cut has been divided already"
    fail(str(case), f"{told}: {rule}")


# --- b: tied -------------------------------------------------------------------------------------------------------

TIED = [Case(3, 6, 2, tied=True), Case(2, 6, 3, tied=True), Case(4, 5, 2, tied=True)]


@check
def tied_step(function):
    """Both copies of the table have the sum of both gradients, to the bit, and so they stay equal."""
    for case in TIED:
        try:
            seen = _steps(function, case)
        except _Deadlock as stuck:
            collective = any(name in str(stuck) for name in ("all_reduce", "broadcast"))
            clue = ". The stages between hold no table: sum it over the first and the last alone" if collective else ""
            raise CheckFailed(f"{stuck}{clue}") from None
        _require_tied(function, case, seen)
        _require_each_once(case, seen)
        _require_loss(case, seen)
        first, last = seen[0].gradients["table"], seen[-1].gradients["table"]
        words = "the two gradients differ in their last bits, and so will the two copies: give both ends one sum"
        require(torch.equal(first, last), str(case), words)
    case, nbytes = TIED[0], VOCAB * HIDDEN * ITEM
    board = Scoreboard(f"tied table[{VOCAB}, {HIDDEN}]: {case}", f"counted {SOURCE}")
    for stage, rank in enumerate(_steps(function, case)):
        crossing = case.rows * HIDDEN * ITEM * (2 if 0 < stage < case.stages - 1 else 1)
        extra = sum(call.wire for call in rank.calls) - crossing
        target = 0 if 0 < stage < case.stages - 1 else nbytes
        board.add(f"bytes that stage {stage} sends for the table", extra, target, unit="bytes")
    return board


def _require_tied(function, case: Case, seen: list[_Seen]) -> None:
    m = case.m
    found = {}
    for stage in (0, case.stages - 1):
        got = seen[stage].gradients["table"]
        require(got is not None, str(case), f"the table on stage {stage} has no gradient at all")
        counts = shares(got, _whole(case).parts[stage, "table"])
        words = f"the table's gradient on stage {stage} is no sum of its gradients as embedding and as head"
        require(counts is not None, str(case), words)
        found[stage] = counts[:m], counts[m:]
    (first, last) = found.values()
    _require_own_layers(case, seen)
    one, none = [1] * m, [0] * m
    end = case.stages - 1
    if _all(first[0], one) and _all(first[1], none) and _all(last[0], none) and _all(last[1], one):
        extra = [c.operation for rank in seen for c in rank.calls if c.operation not in ("send", "recv")]
        words = f"stage 0's table has only its gradient as embedding, stage {end}'s only that as head"
        if extra:
            rule = "a collective leaves its input alone. Assign its result, or take out=table.grad"
            fail(str(case), f"{words}. {extra[0]} is called, and what it returns is not in table.grad: {rule}")
        not_mended(
            function, str(case), f"the loss is right, and {words}: the copies part with the first optimizer step"
        )
    for stage, (embedding, head) in found.items():
        if not (_all(embedding, one) and _all(head, one)):
            fail(str(case), f"the table on stage {stage} {_tied_words(case, stage, embedding, head, found)}")


def _require_own_layers(case: Case, seen: list[_Seen]) -> None:
    """The ends' own layers must not be summed: they are different layers of the model."""
    for name in ("weight", "bias"):
        ends = [_whole(case).gradient(stage, name) for stage in (0, case.stages - 1)]
        for stage in (0, case.stages - 1):
            got = seen[stage].gradients[name]
            if _same(got, sum(ends)) or _same(got, sum(ends) / 2):
                words = f"layer.{name} on stage {stage} has the gradients of both ends' layers in it"
                fail(str(case), f"{words}: these are two layers. Only the table is one parameter in two places")


def _tied_words(case: Case, stage: int, embedding, head, found) -> str:
    m, p = case.m, case.stages
    both = [*embedding, *head]
    alike = len(set(both)) == 1
    own, other = (embedding, head) if stage == 0 else (head, embedding)
    uses = ("embedding", "head") if stage == 0 else ("head", "embedding")
    if alike and abs(both[0] - 0.5) < 1e-5:
        return "has half the sum: a mean of both copies' gradients. Two uses of one parameter add up"
    if alike and abs(both[0] * p - 1) < 1e-5:
        return f"has the sum divided by {p}, the number of stages. Two uses of one parameter add up, undivided"
    if alike:
        return f"has {times(both[0], of=True)} the sum of both gradients: is it summed again after it was summed?"
    if found[0] == found[p - 1] and _all(own, [1] * m) and _all(other, [0] * m):
        return f"has only its gradient as {uses[0]}, on both ends: they agree, and the gradient as {uses[1]} is lost"
    if _all(own, [1] * m) and _all(other, [0] * m):
        return f"has only its own gradient, as {uses[0]}, and the other end has the sum: both need it, or they part"
    if _all(own, [0] * m) and _all(other, [1] * m):
        return f"has only the other end's gradient, as {uses[1]}: what arrives must be added, and here it replaces"
    counts = listed(f"{times(c)}" for c in embedding), listed(f"{times(c)}" for c in head)
    told = f"has the micro-batches as embedding {counts[0]}, as head {counts[1]}"
    if all(a >= b for row in (embedding, head) for a, b in zip(row, row[1:], strict=False)) and max(both) > 1:
        return f"{told}: what is summed after one micro-batch is summed again after the next. Sum once, at the end"
    return told


# --- c: 1F1B -------------------------------------------------------------------------------------------------------

ORDERED = [Case(2, 9, 3), Case(3, 8, 2), Case(4, 6, 2), Case(2, 4, 4), Case(3, 2, 1), Case(3, 11, 2)]


@check
def one_f_one_b_step(function):
    """No order of the ranks can block it, and stage i still holds at most p - i micro-batches."""
    for case in ORDERED:
        try:
            seen = _steps(function, case)
        except _Deadlock as stuck:
            _say_stuck(function, case, stuck)
        _require_each_once(case, seen)
        _require_loss(case, seen)
        _require_1f1b(case, seen)
    case = Case(4, 16, 2)
    board = Scoreboard(f"1F1B: {case}", f"counted {SOURCE}")
    for stage, rank in enumerate(_steps(function, case)):
        board.add(f"most micro-batches in flight, stage {stage}", rank.most, min(case.m, case.stages - stage))
        sends = sum(call.operation == "send" for call in rank.calls)
        board.add(f"messages that stage {stage} sends", sends, case.m * (2 if 0 < stage < case.stages - 1 else 1))
    return board


def _say_stuck(function, case: Case, stuck: _Deadlock):
    words = str(stuck).removeprefix(f"{case}: ")
    clue = ""
    if "has returned" in words:
        words = words.partition(". All of them")[0]
        clue = ". A rank has ended before it had received all that is sent to it: every micro-batch must come back"
    elif "All of them send first" in words:
        if not stuck.asynchronous:
            not_mended(function, case, words.partition(". All of them")[0])
        clue = ". An isend whose wait() follows at once waits like a send: wait for it after the receive"
        words = words.partition(": a send returns only")[0]
    elif "has no send" in words:
        clue = ". Of two neighbours one must have its send under way before both wait to receive"
    raise CheckFailed(f"{case}: {words}{clue}") from None


def _require_1f1b(case: Case, seen: list[_Seen]) -> None:
    p, m = case.stages, case.m
    due = [min(m, p - stage) for stage in range(p)]
    for stage, rank in enumerate(seen):
        held = count_text(rank.most, "micro-batch")
        words = f"the deadlock is gone, and so is 1F1B: stage {stage} holds {held} at once"
        if rank.most > due[stage]:
            gpipe = ". All forwards come before the first backward, as in GPipe" if rank.most == m else ""
            fail(str(case), f"{words}, where p - i = {due[stage]} is its most{gpipe}. Mend the messages, not the order")
        if rank.most < due[stage]:
            serial = ". Each waits for a gradient before its next forward, so that the stages take turns"
            fail(str(case), f"{words}, where it runs up to p - i = {due[stage]} ahead{serial}")


# --- to look at ----------------------------------------------------------------------------------------------------


def compare(function, guess=None) -> None:
    """Run one step beside the unsplit model, print number by number, and score the symptom locked in `guess`."""
    if guess is not None:
        guess.require()
    tied = "table" in inspect.signature(function).parameters
    case = Case(3, 6, 2, tied=True) if tied else Case(2, 12, 4)
    print(f"{function.__name__} on ranks that are threads, beside the unsplit model: {case}")
    try:
        truth = _print_numbers(case, _steps(function, case))
    except _Deadlock as stuck:
        print(str(stuck).removeprefix(f"{case}: ").partition(". All of them")[0])
        truth = STUCK
    except CheckFailed as error:
        print(error)
        return
    if truth is None:
        print("Every number is the unsplit model's.")
    elif guess is not None:
        guess.score(truth, _BECAUSE[truth])


def _print_numbers(case: Case, seen: list[_Seen]) -> str | None:
    """The numbers in columns; returns the symptom."""
    whole = _whole(case)
    loss = float("nan") if seen[-1].loss is None else float(seen[-1].loss)
    rows = [["", "split", "unsplit", ""], _row("loss", loss, whole.loss)]
    ratios = []
    for stage, rank in enumerate(seen):
        for name, got in rank.gradients.items():
            expected = whole.gradient(stage, name)
            label = f"gradient norm of {name if name == 'table' else f'layer.{name}'}, stage {stage}"
            if got is None:
                rows.append([label, "none", number_text(_norm([expected])), "no gradient"])
                ratios.append(None)
                continue
            ratio = 1.0 if _same(got, expected) else (shares(got, [expected]) or [None])[0]
            rows.append(_row(label, _norm([got]), _norm([expected]), ratio))
            ratios.append(ratio)
    if case.tied:
        first, last = (case.table() - 0.1 * seen[s].gradients["table"] for s in (0, -1))
        apart = (first - last).abs().max().item()
        verdict = "equal" if apart == 0 else "they part"
        rows.append(["the two tables' largest difference after a step of SGD", number_text(apart), "0", verdict])
    print(aligned_text(rows, ["left", "right", "right", "left"]))
    if abs(loss - whole.loss) > 1e-6 * abs(whole.loss):
        return LOSS
    if all(ratio is not None and abs(ratio - 1) < 1e-6 for ratio in ratios):
        return None
    return FACTOR if len(set(ratios)) == 1 and None not in ratios else ONE


def _row(label: str, got: float, expected: float, ratio: float | None = None) -> list[str]:
    if ratio is None and abs(got - expected) <= 1e-6 * abs(expected):
        ratio = 1.0 if label == "loss" else None
    words = "different" if ratio is None else "equal" if abs(ratio - 1) < 1e-6 else times(ratio)
    return [label, number_text(got), number_text(expected), words]
