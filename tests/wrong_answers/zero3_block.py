"""Wrong answers to exercise 06, a layer of ZeRO-3: in its forward, and in its backward."""

import torch

from pcourse.split import shard_range, shard_sizes

from . import right, wrong

CHECKS = "pcourse.checks.zero3"
EXERCISE = "06_zero3_block"


def gathered(comm, shard, shape):
    """W from its shards."""
    return comm.all_gather(shard, sizes=shard_sizes(shape[0] * shape[1], comm.size)).view(shape)


def mean_shard(comm, dw):
    """This rank's shard of the mean over the ranks."""
    return comm.reduce_scatter(dw, sizes=shard_sizes(len(dw), comm.size)) / comm.size


def own(comm, flat):
    mine = shard_range(len(flat), comm.size, comm.rank)
    return flat[mine.start : mine.stop]


class Right(torch.autograd.Function):
    """Right."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.save_for_backward(x, shard)
        ctx.comm, ctx.shape = comm, shape
        return x @ gathered(comm, shard, shape).T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        dx = grad @ gathered(ctx.comm, shard, ctx.shape)
        return dx, mean_shard(ctx.comm, (grad.T @ x).flatten()), None, None


class KeepsWeight(Right):
    """Forward keeps W, and backward uses it."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        weight = gathered(comm, shard, shape)
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, mean_shard(ctx.comm, (grad.T @ x).flatten()), None, None


# --- forward -------------------------------------------------------------------------------------------------------


@wrong("forward", "keeps 192 bytes alive beside x, its shard and y", "the whole W is not released", "do not keep it")
class SavesWeight(KeepsWeight):
    """save_for_backward(x, W)."""


@wrong("forward", "keeps 192 bytes alive", "the whole W is not released")
class KeepsWeightInContext(Right):
    """ctx.weight = W."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.weight = gathered(comm, shard, shape)
        return x @ ctx.weight.T


@wrong("forward", "keeps 192 bytes alive", "the whole W is not released")
class KeepsRowOfWeight(Right):
    """A view of one row, which keeps the whole storage alive."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        weight = gathered(comm, shard, shape)
        ctx.save_for_backward(x, shard, weight[0])
        return x @ weight.T


CACHE: dict[int, torch.Tensor] = {}


@wrong("forward", "keeps 192 bytes alive", "the whole W is not released")
class CachesWeight(Right):
    """W in a table outside the layer."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        CACHE[comm.rank] = gathered(comm, shard, shape)
        return x @ CACHE[comm.rank].T


@wrong("forward", "keeps 144 bytes alive", "a copy of x", "Keep x itself")
class CopiesInput(Right):
    """save_for_backward of a clone of x."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.save_for_backward(x.clone(), shard)
        return x @ gathered(comm, shard, shape).T


@wrong("forward", "keeps 96 bytes alive", "a copy of the shard", "Keep the shard itself")
class CopiesShard(Right):
    """save_for_backward of a clone of the shard."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.save_for_backward(x, shard.clone())
        return x @ gathered(comm, shard, shape).T


def padded(comm, shard, shape):
    """W with zeros where the other ranks' shards belong."""
    flat = torch.zeros(shape[0] * shape[1], dtype=shard.dtype)
    own(comm, flat).copy_(shard.detach())
    return flat.view(shape)


@wrong("forward", "y on rank 0 is not", "only shard 0 of W is in it", "the all-gather is missing")
class ForwardWithoutGather(Right):
    """Zeros in place of the other ranks' shards."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        return x @ padded(comm, shard, shape).T


@wrong("forward", "raised RuntimeError: shape '[4, 6]' is invalid", "Shard r of the flat W has", "here 12 and 12")
class UsesShardAsWeight(Right):
    """The shard is given W's shape."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        return x @ shard.view(shape).T


@wrong("forward", "sends 192 bytes, and one all-gather of P elements are 96", "all_reduce", "for twice the bytes")
class AllReducesPaddedShards(Right):
    """A sum of padded shards: right, for twice the bytes."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        return x @ comm.all_reduce(padded(comm, shard, shape)).T


@wrong("forward", "it has shard 0 1/2 times and shard 1 1/2 times", "once each and undivided")
class AveragesShards(Right):
    """The gathered W is divided by N."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        return x @ gathered(comm, shard, shape).T / comm.size


@wrong("forward", "was read as [inputs, outputs]", "lies as W[outputs, inputs]")
class ReadsTransposed(Right):
    """The flat W is read as [I, O]."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        return x @ gathered(comm, shard, shape[::-1])


@wrong("forward", "it has the ranks' rows in it, rank 0's once and rank 1's once", "each rank's rows are its own")
class ReducesOutput(Right):
    """y is summed over the ranks, as tensor parallelism would."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        return comm.all_reduce(x @ gathered(comm, shard, shape).T)


@wrong("forward", "4 ranks, W[5, 5] in shards of 7, 6, 6 and 6", "do not fit", "here 7, 6, 6 and 6")
class EqualShards(Right):
    """All shards are taken to be P // N long."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        flat = comm.all_gather(shard, sizes=[shape[0] * shape[1] // comm.size] * comm.size)
        return x @ flat.view(shape).T


@wrong("forward", "sends 192 bytes, and one all-gather of P elements are 96", "all_gather, all_gather")
class GathersTwice(Right):
    """One all-gather more, whose W is dropped."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        gathered(comm, shard, shape)
        return x @ gathered(comm, shard, shape).T


@wrong("forward", "y on rank 0 is NoneType, not a tensor")
class ForgetsReturn(Right):
    """No return."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.y = x @ gathered(comm, shard, shape).T


# --- backward ------------------------------------------------------------------------------------------------------


def backward(function):
    """A layer that is right but for its backward, which returns `function(ctx, grad, x, shard)`."""

    class Layer(Right):
        @staticmethod
        def backward(ctx, grad):
            return function(ctx, grad, *ctx.saved_tensors)

    Layer.__name__, Layer.__doc__, Layer.__module__ = function.__name__, function.__doc__, function.__module__
    return Layer


def gradients(ctx, grad, x, shard):
    return Right.backward(ctx, grad)


@wrong("backward", "backward on rank 0 sends 96 bytes", "are 192", "not gathered again, so forward must have kept it")
class BackwardWithKeptWeight(KeepsWeight):
    """Backward uses the W that forward kept."""


@wrong("backward", "keeps 192 bytes alive beside x, its shard and y", "do not keep it")
class KeepsWeightAndGathersAgain(Right):
    """Forward keeps W, and backward gathers it all the same."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.weight = gathered(comm, shard, shape)
        return Right.forward(ctx, x, shard, comm, shape)


@wrong("backward", "dshard on rank 0 is 2 times what it should be", "the sum over the ranks", "asks for the mean")
@backward
def sum_instead_of_mean(ctx, grad, x, shard):
    """The sum over the ranks."""
    dx, dshard, *_ = gradients(ctx, grad, x, shard)
    return dx, dshard * ctx.comm.size, None, None


@wrong("backward", "dshard on rank 0 is 1/2 of what it should be", "divided by N once more")
@backward
def divides_twice(ctx, grad, x, shard):
    """Divided before the reduce-scatter, and after it."""
    dx, dshard, *_ = gradients(ctx, grad, x, shard)
    return dx, dshard / ctx.comm.size, None, None


@wrong("backward", "dx on rank 0 is 1/2 of what it should be", "only the gradient of W is averaged")
@backward
def divides_dy(ctx, grad, x, shard):
    """dy is divided by N, and dx with it."""
    dx, dshard, *_ = gradients(ctx, grad, x, shard)
    return dx / ctx.comm.size, dshard, None, None


@wrong("backward", "dx on rank 0 has other ranks' rows in it", "dx is not reduced")
@backward
def reduces_dx(ctx, grad, x, shard):
    """dx is averaged over the ranks too."""
    dx, dshard, *_ = gradients(ctx, grad, x, shard)
    return ctx.comm.all_reduce(dx) / ctx.comm.size, dshard, None, None


@wrong("backward", "dshard on rank 0 has the gradient through rank 0's own rows alone", "reduce-scatter is missing")
@backward
def own_rows(ctx, grad, x, shard):
    """No reduce-scatter: each rank cuts its shard out of its own gradient."""
    return grad @ gathered(ctx.comm, shard, ctx.shape), own(ctx.comm, (grad.T @ x).flatten()).clone(), None, None


@wrong("backward", "dshard on rank 0 has the gradient through rank 0's own rows alone, 1/2 times")
@backward
def share_of_own_rows(ctx, grad, x, shard):
    """The same, divided by N."""
    dshard = own(ctx.comm, (grad.T @ x).flatten()) / ctx.comm.size
    return grad @ gathered(ctx.comm, shard, ctx.shape), dshard, None, None


@wrong("backward", "backward on rank 0 sends 288 bytes", "are 192", "all_gather, all_reduce", "needs its shard")
@backward
def all_reduces_dw(ctx, grad, x, shard):
    """An all-reduce where a reduce-scatter does."""
    dw = ctx.comm.all_reduce
    dx = grad @ gathered(ctx.comm, shard, ctx.shape)
    return dx, own(ctx.comm, dw((grad.T @ x).flatten()) / ctx.comm.size).clone(), None, None


@wrong("backward", "got [24] but expected shape compatible with [12]", "reduce-")
@backward
def whole_dw(ctx, grad, x, shard):
    """The whole gradient of W in place of the shard's."""
    dx = grad @ gathered(ctx.comm, shard, ctx.shape)
    return dx, ctx.comm.all_reduce((grad.T @ x).flatten()) / ctx.comm.size, None, None


@wrong("backward", "cut from xᵀ dy", "dW = dyᵀ x")
@backward
def transposed_dw(ctx, grad, x, shard):
    """dW with its dims exchanged."""
    dx = grad @ gathered(ctx.comm, shard, ctx.shape)
    return dx, mean_shard(ctx.comm, (x.T @ grad).flatten()), None, None


@wrong("backward", "dx on rank 0 comes from shard 0 of W alone", "gather W again before you use it")
@backward
def dx_from_own_shard(ctx, grad, x, shard):
    """Backward uses its own shard, the rest being 0."""
    dx = grad @ padded(ctx.comm, shard, ctx.shape)
    return dx, mean_shard(ctx.comm, (grad.T @ x).flatten()), None, None


@wrong("backward", "dx on rank 0 is missing", "the layers before this one get no gradient")
@backward
def forgets_dx(ctx, grad, x, shard):
    """No gradient for x."""
    return None, gradients(ctx, grad, x, shard)[1], None, None


@wrong("backward", "dshard on rank 0 is missing", "never be stepped")
@backward
def forgets_dshard(ctx, grad, x, shard):
    """No gradient for the shard."""
    return gradients(ctx, grad, x, shard)[0], None, None, None


@wrong("backward", "incorrect number of gradients (expected 4, got 2)")
@backward
def forgets_none(ctx, grad, x, shard):
    """No None for comm and shape."""
    return gradients(ctx, grad, x, shard)[:2]


@wrong("backward", "after backward rank 0 keeps 192 bytes alive", "the whole W, or its gradient, is not released")
@backward
def releases_too_little(ctx, grad, x, shard):
    """W of backward stays in a table outside the layer."""
    CACHE[ctx.comm.rank] = gathered(ctx.comm, shard, ctx.shape)
    return grad @ CACHE[ctx.comm.rank], mean_shard(ctx.comm, (grad.T @ x).flatten()), None, None


@wrong("backward", "after backward rank 0 keeps 192 bytes alive")
@backward
def keeps_dw(ctx, grad, x, shard):
    """dW of full size stays."""
    dw = CACHE[ctx.comm.rank] = (grad.T @ x).flatten()
    return grad @ gathered(ctx.comm, shard, ctx.shape), mean_shard(ctx.comm, dw), None, None


@wrong("backward", "dshard on rank 0 is the gradient of shard 1, and not of its own")
@backward
def next_shard(ctx, grad, x, shard):
    """The gradients' shards are off by one rank."""
    dw = (grad.T @ x).flatten().roll(grad.shape[1] * x.shape[1] // ctx.comm.size)
    return grad @ gathered(ctx.comm, shard, ctx.shape), mean_shard(ctx.comm, dw), None, None


# --- right ---------------------------------------------------------------------------------------------------------


@right("forward")
@right("backward")
class AsksForTheSizes(Right):
    """The all-gather asks for the shards' sizes, and the shard is kept as an attribute."""

    @staticmethod
    def forward(ctx, x, shard, comm, shape):
        ctx.save_for_backward(x)
        ctx.shard, ctx.comm, ctx.shape = shard, comm, shape
        return torch.nn.functional.linear(x, comm.all_gather(shard).view(shape))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        dw = (grad.T @ x).reshape(-1).div_(ctx.comm.size)
        return grad @ ctx.comm.all_gather(ctx.shard).view(ctx.shape), ctx.comm.reduce_scatter(dw), None, None
