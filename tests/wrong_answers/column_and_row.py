"""Wrong answers to exercise 03, the column + row pair. A wrong f or g must be refused alone, and within the MLP."""

import torch
import torch.nn.functional as F

from . import right, wrong

CHECKS = "pcourse.checks.tensor"
EXERCISE = "03_column_and_row"


class Copy(torch.autograd.Function):
    """f, right."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad), None


class Reduce(torch.autograd.Function):
    """g, right."""

    @staticmethod
    def forward(ctx, partial, comm):
        return comm.all_reduce(partial)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mlp(comm, x, w1, b1, w2, b2, f=Copy, g=Reduce):
    """Right, but for its f and g."""
    return g.apply(F.gelu(f.apply(x, comm) @ w1 + b1) @ w2, comm) + b2


# --- f -------------------------------------------------------------------------------------------------------------


@wrong("copy_to_ranks", "dX on rank 0 holds only rank 0's part", "f's backward must all-reduce")
class CopyWithoutAllReduce(Copy):
    """f's backward forgets the all-reduce."""

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@wrong("copy_to_ranks", "dX on rank 0 is 1/2 of", "a mean over the ranks", "where the sum is due")
class CopyWithMean(Copy):
    """f's backward takes the mean over the ranks, as data parallelism would."""

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad) / ctx.comm.size, None


@wrong("copy_to_ranks", "x 2 times", "f's forward passes x on as it is")
class CopyThatReducesForward(Copy):
    """f all-reduces in both directions."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_reduce(x)


@wrong("copy_to_ranks", "forward on rank 0 calls broadcast", "whole on every rank, so nothing is sent")
class CopyThatBroadcasts(Copy):
    """f sends X, which every rank has."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.broadcast(x)


@wrong("copy_to_ranks", "incorrect number of gradients (expected 2, got 1)")
class CopyWithoutNone(Copy):
    """f's backward returns no None for comm."""

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad)


@wrong("copy_to_ranks", "backward on rank 0 calls all_gather", "exactly one all_reduce")
class CopyThatGathers(Copy):
    """f's backward gathers all parts and adds them: right, but with N/2 times the bytes."""

    @staticmethod
    def backward(ctx, grad):
        size = ctx.comm.size
        return ctx.comm.all_gather(grad[None], sizes=[1] * size).sum(0), None


# --- g -------------------------------------------------------------------------------------------------------------


@wrong("reduce_from_ranks", "only rank 0's own partial result", "g's forward must all-reduce")
class ReduceNothing(Reduce):
    """g's forward forgets the all-reduce."""

    @staticmethod
    def forward(ctx, partial, comm):
        return partial.view_as(partial)


@wrong("reduce_from_ranks", "is 2 times what it should be", "g's backward passes dY on", "has the whole dY already")
class ReduceInBoth(Reduce):
    """g all-reduces in both directions, as torch.distributed.nn's all_reduce does."""

    @staticmethod
    def forward(ctx, partial, comm):
        ctx.comm = comm
        return comm.all_reduce(partial)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad), None


@wrong("reduce_from_ranks", "divided by 2", "a mean, where g gives the sum")
class ReduceToMean(Reduce):
    """g's forward takes the mean."""

    @staticmethod
    def forward(ctx, partial, comm):
        return comm.all_reduce(partial) / comm.size


@wrong("reduce_from_ranks", "has shape [3, 8]", "a gather", "partial sums are added")
class GatherInsteadOfReduce(Reduce):
    """g puts the partial sums side by side."""

    @staticmethod
    def forward(ctx, partial, comm):
        return comm.all_gather(partial, dim=-1, sizes=[partial.shape[-1]] * comm.size)


@wrong("reduce_from_ranks", "is 1/2 of", "g's backward passes dY on as it is")
class ReduceWithShareOfGradient(Reduce):
    """g's backward divides dY among the ranks."""

    @staticmethod
    def forward(ctx, partial, comm):
        ctx.comm = comm
        return comm.all_reduce(partial)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.comm.size, None


@right("reduce_from_ranks")
class ReduceInPlace(Reduce):
    """g sums in place, and tells autograd so: one tensor of Y's size less."""

    @staticmethod
    def forward(ctx, partial, comm):
        ctx.mark_dirty(partial)
        return comm.all_reduce(partial, out=partial)


# --- the MLP -------------------------------------------------------------------------------------------------------


@wrong("parallel_mlp", "b2 is in it 2 times", "added on every rank before the sum")
def bias_added_tp_times(comm, x, w1, b1, w2, b2):
    """The row linear's bias is added before the sum, on every rank."""
    return Reduce.apply(F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2 + b2, comm)


@wrong("parallel_mlp", "db2 on rank 0 is 1/2 of", "b2/2 in the sum gives the right Y and the wrong gradient")
def bias_divided_by_tp(comm, x, w1, b1, w2, b2):
    """b2/tp before the sum: forward right, its gradient 1/tp."""
    return Reduce.apply(F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2 + b2 / comm.size, comm)


@wrong("parallel_mlp", "db2 on rank 1 is missing", "Every rank has the whole b2 and adds it once, after g")
def bias_on_one_rank(comm, x, w1, b1, w2, b2):
    """b2 is added on rank 0 before the sum: forward right, and the other replicas of b2 get no gradient."""
    partial = F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2
    return Reduce.apply(partial + b2 if comm.rank == 0 else partial, comm)


@wrong("parallel_mlp", "GeLU is applied to each rank's partial result", "of a partial sum it would be wrong")
def gelu_of_the_partial_sums(comm, x, w1, b1, w2, b2):
    """GeLU after the second matrix, before the sum."""
    return Reduce.apply(F.gelu((Copy.apply(x, comm) @ w1 + b1) @ w2), comm) + b2


@wrong("parallel_mlp", "GeLU is applied after the sum of the partial results")
def gelu_after_the_sum(comm, x, w1, b1, w2, b2):
    """GeLU after the second matrix, after the sum."""
    return F.gelu(Reduce.apply((Copy.apply(x, comm) @ w1 + b1) @ w2, comm)) + b2


@wrong("parallel_mlp", "it has ReLU where the contract asks for GeLU")
def relu(comm, x, w1, b1, w2, b2):
    """ReLU."""
    return Reduce.apply(F.relu(Copy.apply(x, comm) @ w1 + b1) @ w2, comm) + b2


@wrong("parallel_mlp", "b2 is not in it")
def forgets_b2(comm, x, w1, b1, w2, b2):
    """No second bias."""
    return Reduce.apply(F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2, comm)


@wrong("parallel_mlp", "only rank 0's own partial result is in it", "the all-reduce, is missing")
def forgets_g(comm, x, w1, b1, w2, b2):
    """No g."""
    return F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2 + b2


@wrong("parallel_mlp", "dx on rank 0 holds only rank 0's part", "f's backward must all-reduce")
def forgets_f(comm, x, w1, b1, w2, b2):
    """No f: each rank goes on with its own part of dX."""
    return Reduce.apply(F.gelu(x @ w1 + b1) @ w2, comm) + b2


@wrong("parallel_mlp", "dx on rank 0 holds only rank 0's part", "f's backward must all-reduce")
def f_without_all_reduce(*args):
    """f's backward forgets the all-reduce."""
    return mlp(*args, f=CopyWithoutAllReduce)


@wrong("parallel_mlp", "dx on rank 0 is 1/2 of what it should be: a mean over the ranks")
def f_with_mean(*args):
    """f's backward takes the mean."""
    return mlp(*args, f=CopyWithMean)


@wrong("parallel_mlp", "X was multiplied by 2 on its way in", "f's forward must pass X on as it is")
def f_that_reduces_forward(*args):
    """f all-reduces in both directions."""
    return mlp(*args, f=CopyThatReducesForward)


@wrong("parallel_mlp", "dw2 on rank 0 is 2 times what it should be", "g's backward passes dY on")
def g_that_reduces_in_both(*args):
    """g all-reduces in both directions."""
    return mlp(*args, g=ReduceInBoth)


@wrong("parallel_mlp", "divided by 2", "a mean, where g gives the sum")
def g_with_mean(*args):
    """g's forward takes the mean."""
    return mlp(*args, g=ReduceToMean)


@wrong("parallel_mlp", "cut off from autograd", "comm.all_reduce alone has no backward", "ReduceFromRanks")
def all_reduce_outside_autograd(comm, x, w1, b1, w2, b2):
    """comm.all_reduce on a tensor with a graph: the graph ends there."""
    return comm.all_reduce(F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2) + b2.detach()


@wrong("parallel_mlp", "dw2 on rank 0 is missing", "does not see comm.all_reduce", "apply ReduceFromRanks")
def all_reduce_outside_autograd_before_the_bias(comm, x, w1, b1, w2, b2):
    """The same, and the bias keeps a graph of its own, so that backward runs and reaches nothing else."""
    return comm.all_reduce(F.gelu(Copy.apply(x, comm) @ w1 + b1) @ w2) + b2


@wrong("parallel_mlp", "forward on rank 0 calls all_reduce, all_reduce", "exactly one all_reduce")
def reduces_x_too(comm, x, w1, b1, w2, b2):
    """One all-reduce more, for an X that every rank has."""
    x = x + 0 * comm.all_reduce(x.detach(), "max")
    return mlp(comm, x, w1, b1, w2, b2)


@wrong("parallel_mlp", "forward on rank 0 calls all_gather", "exactly one all_reduce", "gathered to be added")
def gathers_the_partial_sums(comm, x, w1, b1, w2, b2):
    """Gathers all partial sums and adds them: right, but more bytes."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, partial, comm):
            return comm.all_gather(partial[None], sizes=[1] * comm.size).sum(0)

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    return mlp(comm, x, w1, b1, w2, b2, g=Gather)


@wrong("parallel_mlp", "dw1 on rank 0 is wrong", "Backward calls all_reduce, all_reduce", "f belongs on x alone")
def f_on_the_weights(comm, x, w1, b1, w2, b2):
    """f on w1 too, as if it were replicated: its gradient is summed with those of other columns."""
    hidden = F.gelu(Copy.apply(x, comm) @ Copy.apply(w1, comm) + b1)
    return Reduce.apply(hidden @ w2, comm) + b2
