"""Wrong answers to exercise 07, recompute."""

import torch

from . import right, wrong

CHECKS = "pcourse.checks.recompute"
EXERCISE = "07_recompute"


def again(ctx, grad, state=None, grads=True):
    """The second run from `state`, and the gradients of what needs one."""
    needed = ctx.needs_input_grad[1:]
    inputs = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needed, strict=True)]
    if state is not None:
        torch.set_rng_state(state)
    with torch.enable_grad():
        y = ctx.function(*inputs)
    gradients = iter(torch.autograd.grad(y, [t for t in inputs if t.requires_grad], grad))
    return None, *(next(gradients) if need else None for need in needed)


class Right(torch.autograd.Function):
    """Right."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(x, *weights)
        return function(x, *weights)

    @staticmethod
    def backward(ctx, grad):
        found = torch.get_rng_state()
        gradients = again(ctx, grad, ctx.state)
        torch.set_rng_state(found)
        return gradients


# --- without dropout -----------------------------------------------------------------------------------------------

CHECK = "keeps_only_the_input"


@wrong(CHECK, "the activations inside the block are kept", "keep x alone")
class KeepsTheGraph(Right):
    """Forward runs with a graph and keeps it: no recompute at all."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        inputs = [t.detach().requires_grad_() for t in (x, *weights)]
        with torch.enable_grad():
            y = function(*inputs)
        ctx.inputs, ctx.y = inputs, y
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        gradients = torch.autograd.grad(ctx.y, ctx.inputs, grad)
        return None, *(g if need else None for g, need in zip(gradients, ctx.needs_input_grad[1:], strict=True))


@wrong(CHECK, "the activations inside the block are kept")
class RunsAgainAndKeepsTheGraph(Right):
    """Runs again, and keeps the graph of forward all the same."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        y = Right.forward(ctx, lambda *inputs: inputs[0], x, *weights)
        inputs = [t.detach().requires_grad_() for t in (x, *weights)]
        ctx.function = function
        with torch.enable_grad():
            y = ctx.y = function(*inputs)
        return y.detach()


@wrong(CHECK, "a copy of x", "Keep x itself")
class CopiesInput(Right):
    """Keeps a clone of x."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        y = Right.forward(ctx, function, x, *weights)
        ctx.save_for_backward(x.clone(), *weights)
        return y


@wrong(CHECK, "it raised RuntimeError: element 0 of tensors does not require grad", "torch.enable_grad()")
class WithoutGraph(Right):
    """The second run has no graph, as backward records none."""

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        return None, *torch.autograd.grad(ctx.function(*inputs), inputs, grad)


@wrong(CHECK, "w2 gets no gradient", "one for each input that needs it")
class ForgetsTheWeights(Right):
    """Returns dx alone."""

    @staticmethod
    def backward(ctx, grad):
        _, dx, *weights = Right.backward(ctx, grad)
        return None, dx, *(None for _ in weights)


@wrong(CHECK, "x gets no gradient")
class ForgetsTheInput(Right):
    """Returns the weights' gradients alone."""

    @staticmethod
    def backward(ctx, grad):
        _, _, *weights = Right.backward(ctx, grad)
        return None, None, *weights


@wrong(CHECK, "the gradient of w2 is 2 times what it should be", ".backward() adds it to .grad", "torch.autograd.grad")
class AccumulatesAndReturns(Right):
    """Calls backward() on the weights themselves, and returns their gradients too."""

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(x, *weights).backward(grad)
        return None, x.grad, *(w.grad for w in weights)


@wrong(CHECK, "it is the gradient of y's sum", "Multiply by the gradient that flows into backward")
class IgnoresGradient(Right):
    """backward as if dy were 1."""

    @staticmethod
    def backward(ctx, grad):
        return Right.backward(ctx, torch.ones_like(grad))


@wrong(CHECK, "the function runs 3 times, and twice is due")
class RunsThreeTimes(Right):
    """A run for each kind of gradient."""

    @staticmethod
    def backward(ctx, grad):
        found = torch.get_rng_state()
        _, dx, *_ = again(ctx, grad, ctx.state)
        _, _, *weights = again(ctx, grad, ctx.state)
        torch.set_rng_state(found)
        return None, dx, *weights


@wrong(CHECK, "One of the differentiated Tensors does not require grad", "the others get None")
class NeedsEveryInput(Right):
    """Asks for the gradient of inputs that need none."""

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        return None, *torch.autograd.grad(y, inputs, grad)


@wrong(CHECK, "an input that needs no gradient: it raised", "see ctx.needs_input_grad")
class OnlyAsManyAsTheInput(Right):
    """The second run's weights need a gradient only where x does."""

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_(ctx.saved_tensors[0].requires_grad) for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        return None, *torch.autograd.grad(y, inputs, grad)


@wrong(CHECK, "the gradient of x is 2 times what it should be", "into what came before x", "x.detach()")
class DoesNotDetach(Right):
    """The second run's graph goes on into the block before."""

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            ctx.function(x, *weights).backward(grad)
        return None, x.grad, *(None for _ in weights)


@wrong(CHECK, "y is cut off from autograd", "backward would never be called")
class CutsOff(Right):
    """y is marked as not differentiable."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        y = Right.forward(ctx, function, x, *weights)
        ctx.mark_non_differentiable(y)
        return y


@wrong(CHECK, "forward gives NoneType, not a tensor")
class ForgetsReturn(Right):
    """No return."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        Right.forward(ctx, function, x, *weights)


@wrong(CHECK, "incorrect number of gradients (expected 4, got 3)")
class NoNoneForTheFunction(Right):
    """backward returns nothing for the function."""

    @staticmethod
    def backward(ctx, grad):
        return Right.backward(ctx, grad)[1:]


# --- with dropout --------------------------------------------------------------------------------------------------

MASKS = "same_masks"


@wrong(MASKS, "belongs to another mask", "restore the one that forward began with")
class NoRandomState(Right):
    """The second run draws a new mask."""

    @staticmethod
    def backward(ctx, grad):
        return again(ctx, grad)


@wrong(MASKS, "belongs to another mask", "was saved after the function had drawn", "save it before the first run")
class SavesTooLate(Right):
    """The state is saved after the first run."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        y = Right.forward(ctx, function, x, *weights)
        ctx.state = torch.get_rng_state()
        return y


@wrong(MASKS, "another random state than it found: the one after forward", "drawn since will be drawn again")
class PutsNothingBack(Right):
    """The state stays where the second run has left it."""

    @staticmethod
    def backward(ctx, grad):
        return again(ctx, grad, ctx.state)


@wrong(MASKS, "another random state than it found: the one after forward", "Save the state as backward begins")
class PutsBackTheStateAfterForward(Right):
    """What is put back is what forward left, and not what backward found."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        y = Right.forward(ctx, function, x, *weights)
        ctx.after = torch.get_rng_state()
        return y

    @staticmethod
    def backward(ctx, grad):
        gradients = again(ctx, grad, ctx.state)
        torch.set_rng_state(ctx.after)
        return gradients


@wrong(MASKS, "the one before forward", "The masks of forward will be drawn again")
class PutsBackTheStateBeforeForward(Right):
    """The state of before forward is put back."""

    @staticmethod
    def backward(ctx, grad):
        gradients = again(ctx, grad, ctx.state)
        torch.set_rng_state(ctx.state)
        return gradients


@wrong(MASKS, "forward puts the random state back to where it began", "next block will draw the same mask")
class ForwardPutsBack(Right):
    """Forward restores the state, so that backward finds it: all blocks get one mask."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        y = Right.forward(ctx, function, x, *weights)
        torch.set_rng_state(ctx.state)
        return y


@wrong(MASKS, "after forward the random state is not where the function leaves it", "seed nothing")
class Seeds(Right):
    """Both runs begin from one seed: the same mask twice, and in every block and step."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        torch.manual_seed(0)
        return Right.forward(ctx, function, x, *weights)


@wrong(MASKS, "y is not function(x, *weights)", "another random state than the one that it finds")
class ForksAndSeeds(Right):
    """The same, hidden from the state outside."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        before = torch.get_rng_state()
        function(x, *weights)
        function.runs = 0
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.manual_seed(0)
        y = Right.forward(ctx, function, x, *weights)
        torch.set_rng_state(after)
        return y


@wrong(MASKS, "the one without dropout")
class SecondRunWithoutDropout(Right):
    """The second run is in evaluation mode."""

    @staticmethod
    def backward(ctx, grad):
        ctx.function.p, p = 0.0, ctx.function.p
        gradients = Right.backward(ctx, grad)
        ctx.function.p = p
        return gradients


@wrong(MASKS, "the activations inside the block are kept")
class KeepsTheGraphAndNoRandomState(KeepsTheGraph):
    """No second run, so no second mask: right gradients, and nothing saved."""


# --- right ---------------------------------------------------------------------------------------------------------


@right(CHECK)
@right(MASKS)
class Forks(Right):
    """fork_rng puts the state back."""

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]):
            return again(ctx, grad, ctx.state)


@right(CHECK)
@right(MASKS)
class Accumulates(Right):
    """The second run's backward() adds to the weights' .grad itself, as the reentrant checkpoint of torch does."""

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_(x.requires_grad)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            ctx.function(x, *weights).backward(grad)
        return None, x.grad, *(None for _ in weights)
