"""Checks of exercise 07, recompute: first without dropout, then with it.

A block runs beside itself without recompute, from the same random state. What is kept is counted, in bytes, and so is
how often the block runs. Gradients under another mask are recomputed here from the states that the usual faults leave,
so that a wrong gradient can be told by the mask that it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from pcourse.checks import close, explained, fail, on_ranks, random, require, require_autograd_function, shares, times
from pcourse.lab.check import CheckFailed, Scoreboard, check
from pcourse.meter import MemoryMeter
from pcourse.wording import bytes_text, count_text

ROWS, HIDDEN, FFN = 64, 32, 128
NAMES = ("w1", "w2")


@dataclass(frozen=True)
class Case:
    """`blocks` residual blocks one after the other, x + dropout(GeLU(x W1), p) W2; `frozen` need no gradient."""

    words: str
    p: float
    blocks: int = 1
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.words


WITHOUT = [
    Case("one block without dropout", 0.0),
    Case("two blocks without dropout", 0.0, blocks=2),
    Case("an input that needs no gradient", 0.0, frozen=("x",)),
    Case("a block whose w1 is frozen", 0.0, frozen=("w1",)),
]
WITH = [
    Case("one block, dropout 0.5", 0.5),
    Case("two blocks, dropout 0.5", 0.5, blocks=2),
    Case("an input that needs no gradient, dropout 0.5", 0.5, frozen=("x",)),
]


class Block:
    """x[B, h] -> x + dropout(GeLU(x W1), p) W2. Counts its runs."""

    def __init__(self, p: float):
        self.p, self.runs = p, 0

    def __call__(self, x, w1, w2):
        self.runs += 1
        return x + F.dropout(F.gelu(x @ w1), self.p) @ w2


@dataclass
class _Seen:
    """What the blocks did. `states` are the random state before each block and after the last, before backward, after.

    `kept`: bytes alive after forward beside the input and the output of each block and the weights.
    """

    y: torch.Tensor
    attached: bool = False
    kept: int = 0
    runs: list[int] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    states: list[torch.Tensor] = field(default_factory=list)


def _output_gradient() -> torch.Tensor:
    return random(110, ROWS, HIDDEN)


def _leaves(case: Case) -> dict[str, torch.Tensor]:
    leaves = {"x": random(100, ROWS, HIDDEN)}
    for k in range(case.blocks):
        leaves[_name(case, "w1", k)] = random(101 + 2 * k, HIDDEN, FFN) / 4
        leaves[_name(case, "w2", k)] = random(102 + 2 * k, FFN, HIDDEN) / 8
    return {name: leaf.requires_grad_(name not in case.frozen) for name, leaf in leaves.items()}


def _name(case: Case, name: str, block: int) -> str:
    return f"{name} of block {block}" if case.blocks > 1 else name


def _program(comm, apply, case: Case) -> _Seen:
    torch.manual_seed(7)
    leaves, gradient = _leaves(case), _output_gradient()
    blocks = [Block(case.p) for _ in range(case.blocks)]
    states = [torch.get_rng_state()]
    with MemoryMeter() as meter:
        meter.claim("parameters", [*leaves.values(), gradient])
        y = leaves["x"]
        for k, block in enumerate(blocks):
            y = apply(block, y, *(leaves[_name(case, name, k)] for name in NAMES))
            if not isinstance(y, torch.Tensor):
                return _Seen(y)
            meter.claim("activations", [y])
            states.append(torch.get_rng_state())
        kept = meter.bytes["temporary"]
    seen = _Seen(y.detach(), y.requires_grad, kept)
    torch.rand(3)  # somebody draws between forward and backward
    states.append(torch.get_rng_state())
    if seen.attached and y.shape == gradient.shape:
        y.backward(gradient)
    seen.states = [*states, torch.get_rng_state()]
    seen.runs = [block.runs for block in blocks]
    seen.gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
    return seen


def _run(cls, case: Case) -> _Seen:
    """What the learner's class does, on one thread that ends in time."""
    require_autograd_function(cls, "Recompute")
    ungraphed = "Inside backward autograd records nothing unless it is told to: run it under torch.enable_grad()"
    if case.frozen:
        ungraphed = "Which inputs of the second run need a gradient is not the same for all: see ctx.needs_input_grad"
    needless = "Ask torch.autograd.grad for the inputs that need a gradient alone; the others get None"
    clues = {
        "does not require grad and does not have a grad_fn": ungraphed,
        "One of the differentiated Tensors does not require grad": needless,
        "appears to not have been used in the graph": "Differentiate by the tensors that the second run was given",
    }
    with torch.random.fork_rng(devices=[]):  # the learner's own random state stays as it is
        try:
            return on_ranks(str(case), 1, _program, cls.apply, case)[0]
        except CheckFailed as error:
            words = str(error).replace("rank 0 raised", "it raised", 1)
            raise explained(CheckFailed(words), clues) from None


def _plain(case: Case) -> _Seen:
    """The same without recompute."""
    with torch.random.fork_rng(devices=[]):
        return on_ranks(str(case), 1, _program, lambda block, *inputs: block(*inputs), case)[0]


# --- without dropout -----------------------------------------------------------------------------------------------


@check
def keeps_only_the_input(cls):
    """The gradients are those without recompute, the block runs twice, and between its runs only its input is kept."""
    for case in WITHOUT:
        seen, plain = _run(cls, case), _plain(case)
        _require_output(case, seen, plain)
        _require_kept(case, seen)
        _require_runs(case, seen)
        for name, expected in reversed(plain.gradients.items()):  # from the loss on
            _require_gradient(case, name, seen.gradients[name], expected, plain)
    return _scoreboard(cls, Case(f"x[{ROWS}, {HIDDEN}], FFN {FFN}, without dropout", 0.0))


def _require_output(case: Case, seen: _Seen, plain: _Seen) -> None:
    got = seen.y
    if not isinstance(got, torch.Tensor):
        fail(str(case), f"forward gives {type(got).__name__}, not a tensor: is a `return` missing?")
    words = "y is cut off from autograd, although an input needs a gradient: backward would never be called"
    require(seen.attached, str(case), words)
    words = "y is not function(x, *weights)"
    if case.p:
        words += ": forward draws its mask from another random state than the one that it finds"
    require(close(got, plain.y), str(case), words)


def _require_kept(case: Case, seen: _Seen) -> None:
    x, inner = ROWS * HIDDEN * 8, ROWS * FFN * 8
    allowed = 2 * case.blocks * len(torch.get_rng_state())  # a random state or two
    words = f"""after forward {bytes_text(seen.kept)} are alive beside each block's input and output and the weights
        (x has {bytes_text(x)}, x W1 {bytes_text(inner)})"""
    if seen.kept >= inner:
        words += ": the activations inside the block are kept. Forward runs without a graph; keep x alone"
    elif seen.kept >= x:
        words += ": a copy of x. Keep x itself, which is alive anyway"
    require(seen.kept <= allowed, str(case), words)


def _require_runs(case: Case, seen: _Seen) -> None:
    for k, runs in enumerate(seen.runs):
        which = f"block {k}" if case.blocks > 1 else "the function"
        words = f"{which} runs {count_text(runs, 'time')}, and twice is due: once in forward, once in backward"
        if runs < 2:
            words += ". Backward needs the activations again, and nobody has kept them"
        require(runs == 2, str(case), words)


def _require_gradient(case: Case, name: str, got, expected: torch.Tensor, plain: _Seen) -> None:
    if got is None:
        fail(str(case), f"{name} gets no gradient: backward returns one for each input that needs it")
    if close(got, expected):
        return
    ratio = shares(got, [expected])
    words = f"the gradient of {name} is not the one without recompute"
    if ratio and abs(ratio[0] - 2) < 1e-5 and name != "x":
        words = f"""the gradient of {name} is 2 times what it should be: .backward() adds it to .grad already, and what
            backward returns is added once more. Take torch.autograd.grad"""
    elif ratio and abs(ratio[0] - 2) < 1e-5:
        words = """the gradient of x is 2 times what it should be: the graph of the second run goes on into what came
            before x, and adds its gradient there already. Run the function on x.detach()"""
    elif ratio:
        words = f"the gradient of {name} is {times(ratio[0], of=True)} what it should be"
    elif case.blocks == 1:
        words += _other_gradient(case, name, got, plain)
    fail(str(case), words)


def _other_gradient(case: Case, name: str, got: torch.Tensor, plain: _Seen) -> str:
    """What a wrong gradient is the gradient of; "" if nothing known."""
    before, after, at_backward, _ = plain.states
    candidates = {}
    if case.p:
        another = ": it belongs to another mask"
        candidates = {
            f"""{another}. Backward draws from the random state that it finds: restore the one that forward began with,
                before the second run""": (at_backward, case.p),
            f"""{another}. The random state that is restored was saved after the function had drawn: save it before the
                first run""": (after, case.p),
            ": it is the one without dropout, which the second run must have as well": (before, 0.0),
        }
    for words, (state, p) in candidates.items():
        if close(got, _gradient_from(case, state, p, _output_gradient())[name]):
            return words
    for ones in (torch.ones(ROWS, HIDDEN, dtype=torch.float64), torch.ones(ROWS, HIDDEN, dtype=torch.float64) / ROWS):
        if close(got, _gradient_from(case, before, case.p, ones)[name]):
            return ": it is the gradient of y's sum. Multiply by the gradient that flows into backward"
    return f" (largest difference {(got - plain.gradients[name]).abs().max():.2g})"


def _gradient_from(case: Case, state: torch.Tensor, p: float, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of one block whose mask is drawn from `state`."""
    leaves = {name: leaf.requires_grad_() for name, leaf in _leaves(case).items()}
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        y = Block(p)(*leaves.values())
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), gradient)))


# --- with dropout --------------------------------------------------------------------------------------------------


@check
def same_masks(cls):
    """Both runs draw the same mask, and the random state goes on as if there were no second run."""
    for case in WITH:
        seen, plain = _run(cls, case), _plain(case)
        _require_state_after_forward(case, seen, plain)
        _require_output(case, seen, plain)
        _require_kept(case, seen)
        _require_runs(case, seen)
        for name, expected in reversed(plain.gradients.items()):
            _require_gradient(case, name, seen.gradients[name], expected, plain)
        _require_state_after_backward(case, seen)
    return _scoreboard(cls, Case(f"x[{ROWS}, {HIDDEN}], FFN {FFN}, dropout 0.5", 0.5))


def _require_state_after_forward(case: Case, seen: _Seen, plain: _Seen) -> None:
    if len(seen.states) < 2:
        return
    first, after = seen.states[:2]
    words = "forward puts the random state back to where it began, and the next block will draw the same mask again"
    require(not torch.equal(first, after), str(case), f"{words}. Leave it where the function has brought it")
    words = "after forward the random state is not where the function leaves it"
    require(torch.equal(after, plain.states[1]), str(case), f"{words}: seed nothing, and draw nothing yourself")


def _require_state_after_backward(case: Case, seen: _Seen) -> None:
    *forward, found, left = seen.states
    if torch.equal(left, found):
        return
    first, after = forward[0], forward[1]
    words = "backward leaves another random state than it found"
    if torch.equal(left, after):
        words += ": the one after forward. What has been drawn since will be drawn again"
    elif torch.equal(left, first):
        words += ": the one before forward. The masks of forward will be drawn again"
    fail(str(case), f"{words}. Save the state as backward begins, and put that one back after the second run")


def _scoreboard(cls, case: Case) -> Scoreboard:
    seen, plain = _run(cls, case), _plain(case)
    board = Scoreboard(f"recompute: {case}", "counted in this process")
    x = ROWS * HIDDEN * 8
    board.add("bytes kept for backward, x", x + seen.kept, x, "bytes")
    board.add("runs of the function", seen.runs[0], 2)
    largest = max((seen.gradients[name] - plain.gradients[name]).abs().max().item() for name in plain.gradients)
    board.add("largest difference of a gradient to the one without recompute", largest, 0)
    return board
