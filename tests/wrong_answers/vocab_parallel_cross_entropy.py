"""Wrong answers to exercise 03, the vocabulary-parallel cross-entropy."""

import torch
import torch.nn.functional as F

from . import right, wrong

CHECKS = "pcourse.checks.cross_entropy"
EXERCISE = "03_vocab_parallel_cross_entropy"
CHECK = "vocab_parallel_cross_entropy"


class Sum(torch.autograd.Function):
    """All-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumInBoth(Sum):
    """All-reduce forward and backward."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad), None


def shifted_logits(comm, z):
    """z less the token's largest logit, over all ranks."""
    return z - comm.all_reduce(z.detach().amax(-1), "max").unsqueeze(-1)


def find(z, targets, first_row):
    """This rank's row of each target (0 where there is none), and whether it has one."""
    row = targets - first_row
    mine = (row >= 0) & (row < z.shape[-1])
    return row.masked_fill(~mine, 0), mine


def target_logit(z, targets, first_row):
    row, mine = find(z, targets, first_row)
    return z.gather(-1, row.unsqueeze(-1)).squeeze(-1) * mine


def put_together(comm, z, target, targets, reduce=Sum):
    """The loss from shifted logits and this rank's target logits."""
    total, target = reduce.apply(torch.stack([z.exp().sum(-1), target]), comm)
    return ((total.log() - target) * (targets != -100)).sum()


@right(CHECK)
def composed(comm, logits, targets, first_row):
    """No autograd.Function of its own."""
    z = shifted_logits(comm, logits)
    return put_together(comm, z, target_logit(z, targets, first_row), targets)


@right(CHECK)
def three_all_reduces(comm, logits, targets, first_row):
    """One all-reduce for each number, and unshifted target logits."""
    largest = comm.all_reduce(logits.detach().amax(-1), "max")
    total = Sum.apply((logits - largest.unsqueeze(-1)).exp().sum(-1), comm)
    target = Sum.apply(target_logit(logits, targets, first_row), comm)
    return (total.log() + largest - target)[targets != -100].sum()


# --- the loss ------------------------------------------------------------------------------------------------------


@wrong(CHECK, "logits up to ±10000", "exp overflows", "largest logit, over all ranks")
def no_maximum(comm, logits, targets, first_row):
    """Nothing is subtracted before exp: right for small logits."""
    return put_together(comm, logits, target_logit(logits, targets, first_row), targets)


@wrong(CHECK, "the maximum is each rank's own", "all-reduce the maximum first, with op='max'")
def local_maximum(comm, logits, targets, first_row):
    """Every rank subtracts the maximum of its own shard."""
    z = logits - logits.detach().amax(-1, keepdim=True)
    return put_together(comm, z, target_logit(z, targets, first_row), targets)


@wrong(CHECK, "the maximum is rank 0's own", "op='max'")
def local_maximum_added_again(comm, logits, targets, first_row):
    """Every rank subtracts its own maximum, and adds it again after the log."""
    largest = logits.detach().amax(-1)
    total = Sum.apply((logits - largest.unsqueeze(-1)).exp().sum(-1), comm)
    target = Sum.apply(target_logit(logits, targets, first_row), comm)
    return ((total.log() + largest - target) * (targets != -100)).sum()


@wrong(CHECK, "every exp vanishes", "Maxima combine by op='max'")
def sum_of_maxima(comm, logits, targets, first_row):
    """all_reduce without "max"."""
    z = logits - comm.all_reduce(logits.detach().amax(-1)).unsqueeze(-1)
    return put_together(comm, z, target_logit(z, targets, first_row), targets)


@wrong(CHECK, "subtracted in the exponentials and not from the target's logit")
def target_not_shifted(comm, logits, targets, first_row):
    """The target's logit is read from the logits as they came."""
    z = shifted_logits(comm, logits)
    return put_together(comm, z, target_logit(logits, targets, first_row), targets)


@wrong(CHECK, "counted on every rank", "add 0, and not row 0")
def target_on_every_rank(comm, logits, targets, first_row):
    """Where the target is another rank's, row 0 is read and not taken out."""
    z = shifted_logits(comm, logits)
    row, _ = find(z, targets, first_row)
    return put_together(comm, z, z.gather(-1, row.unsqueeze(-1)).squeeze(-1), targets)


@wrong(CHECK, "counted on every rank", "clamped")
def target_clamped(comm, logits, targets, first_row):
    """Where the target is another rank's, the nearest row is read."""
    z = shifted_logits(comm, logits)
    row = (targets - first_row).clamp(0, z.shape[-1] - 1)
    return put_together(comm, z, z.gather(-1, row.unsqueeze(-1)).squeeze(-1), targets)


@wrong(CHECK, "counted on every rank", "modulo")
def target_modulo(comm, logits, targets, first_row):
    """Where the target is another rank's, the row wraps round."""
    z = shifted_logits(comm, logits)
    row = (targets - first_row) % z.shape[-1]
    return put_together(comm, z, z.gather(-1, row.unsqueeze(-1)).squeeze(-1), targets)


@wrong(CHECK, "only known where rank 0 holds the target", "all-reduce it")
def target_not_reduced(comm, logits, targets, first_row):
    """Only the sum of exponentials is all-reduced."""
    z = shifted_logits(comm, logits)
    total = Sum.apply(z.exp().sum(-1), comm)
    return ((total.log() - target_logit(z, targets, first_row)) * (targets != -100)).sum()


@wrong(CHECK, "the sum of exponentials is that of rank 0's shard alone", "take the log after")
def local_softmax(comm, logits, targets, first_row):
    """Only the target's logit is all-reduced."""
    z = shifted_logits(comm, logits)
    target = Sum.apply(target_logit(z, targets, first_row), comm)
    return ((z.exp().sum(-1).log() - target) * (targets != -100)).sum()


@wrong(CHECK, "each rank's log of its own sum is added", "take the log after")
def log_before_the_sum(comm, logits, targets, first_row):
    """log of each rank's sum, then the sum over the ranks."""
    z = shifted_logits(comm, logits)
    pieces = torch.stack([z.exp().sum(-1).log(), target_logit(z, targets, first_row)])
    total, target = Sum.apply(pieces, comm)
    return ((total - target) * (targets != -100)).sum()


@wrong(CHECK, "only tokens whose target rank 0 holds are in it")
def own_targets_only(comm, logits, targets, first_row):
    """Tokens whose target is another rank's are left out, as if they were -100."""
    z = shifted_logits(comm, logits)
    _, mine = find(z, targets, first_row)
    total, target = Sum.apply(torch.stack([z.exp().sum(-1), target_logit(z, targets, first_row)]), comm)
    return ((total.log() - target) * mine).sum()


@wrong(CHECK, "first row of a shard is not found", "off by one")
def off_by_one_at_the_first_row(comm, logits, targets, first_row):
    """row > 0 in place of row >= 0."""
    z = shifted_logits(comm, logits)
    row, mine = find(z, targets, first_row)
    target = z.gather(-1, row.unsqueeze(-1)).squeeze(-1) * (mine & (row > 0))
    return put_together(comm, z, target, targets)


@wrong(CHECK, "last row of a shard is not found", "off by one")
def off_by_one_at_the_last_row(comm, logits, targets, first_row):
    """row < V/tp - 1."""
    z = shifted_logits(comm, logits)
    row, mine = find(z, targets, first_row)
    target = z.gather(-1, row.unsqueeze(-1)).squeeze(-1) * (mine & (row < z.shape[-1] - 1))
    return put_together(comm, z, target, targets)


@wrong(CHECK, "index 6 is out of bounds")
def one_row_too_many(comm, logits, targets, first_row):
    """row <= V/tp: the next rank's first row is taken for one's own."""
    z = shifted_logits(comm, logits)
    row = targets - first_row
    mine = (row >= 0) & (row <= z.shape[-1])
    target = z.gather(-1, row.masked_fill(~mine, 0).unsqueeze(-1)).squeeze(-1) * mine
    return put_together(comm, z, target, targets)


@wrong(CHECK, "shards of [5, 4, 4]", "taken to be equally long", "first_row says")
def equal_shards(comm, logits, targets, first_row):
    """The first row as rank * V/tp."""
    z = shifted_logits(comm, logits)
    return put_together(comm, z, target_logit(z, targets, comm.rank * z.shape[-1]), targets)


@wrong(CHECK, "4 of the targets -100", "-100 marks a token that is left out", "its loss is counted")
def ignored_counted(comm, logits, targets, first_row):
    """-100 is taken for a target that no rank holds."""
    z = shifted_logits(comm, logits)
    total, target = Sum.apply(torch.stack([z.exp().sum(-1), target_logit(z, targets, first_row)]), comm)
    return (total.log() - target).sum()


@wrong(CHECK, "a mean over the tokens, and the contract asks for the sum")
def mean_of_tokens(comm, logits, targets, first_row):
    """The mean, as F.cross_entropy gives if nothing is said."""
    return composed(comm, logits, targets, first_row) / (targets != -100).sum().clamp(min=1)


@wrong(CHECK, "2 times the loss", "do not sum it over the ranks")
def loss_summed_over_ranks(comm, logits, targets, first_row):
    """The loss, which every rank has, is all-reduced once more."""
    return Sum.apply(composed(comm, logits, targets, first_row), comm)


@wrong(CHECK, "has shape [2, 6]", "one number")
def one_loss_for_each_token(comm, logits, targets, first_row):
    """Not summed over the tokens."""
    z = shifted_logits(comm, logits)
    total, target = Sum.apply(torch.stack([z.exp().sum(-1), target_logit(z, targets, first_row)]), comm)
    return (total.log() - target) * (targets != -100)


@wrong(CHECK, "calls all_gather", "the whole logits", "bytes grow with V", "three numbers a token")
def gathers_the_logits(comm, logits, targets, first_row):
    """Right, but B·S·V numbers go over the wire."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            sizes = comm.all_gather(torch.tensor([x.shape[-1]]), sizes=[1] * comm.size).tolist()
            ctx.mine = slice(first_row, first_row + x.shape[-1])
            return comm.all_gather(x, dim=-1, sizes=sizes)

        @staticmethod
        def backward(ctx, grad):
            return grad[..., ctx.mine]

    return F.cross_entropy(Gather.apply(logits).flatten(0, 1), targets.flatten(), reduction="sum")


@wrong(CHECK, "was changed in place", "belongs to the caller")
def shifts_in_place(comm, logits, targets, first_row):
    """The caller's logits are shifted."""
    logits.data -= comm.all_reduce(logits.detach().amax(-1), "max").unsqueeze(-1)
    return put_together(comm, logits, target_logit(logits, targets, first_row), targets)


# --- the gradient --------------------------------------------------------------------------------------------------


@wrong(CHECK, "cut off from autograd", "comm.all_reduce alone has no backward")
def all_reduce_outside_autograd(comm, logits, targets, first_row):
    """comm.all_reduce on tensors with a graph."""
    z = shifted_logits(comm, logits)
    total = comm.all_reduce(z.exp().sum(-1))
    target = comm.all_reduce(target_logit(z, targets, first_row))
    return ((total.log() - target) * (targets != -100)).sum()


@wrong(CHECK, "is the one-hot of the target alone", "nothing flows back through the sum of exponentials")
def half_outside_autograd(comm, logits, targets, first_row):
    """The sum of exponentials is all-reduced without a backward, the target's logit with one."""
    z = shifted_logits(comm, logits)
    total = comm.all_reduce(z.exp().sum(-1))
    target = Sum.apply(target_logit(z, targets, first_row), comm)
    return ((total.log() - target) * (targets != -100)).sum()


@wrong(CHECK, "is 2 times what it should be", "every rank back-propagates the same loss", "it needs no call")
def all_reduces_in_backward(comm, logits, targets, first_row):
    """The sum over the ranks is summed over the ranks again in backward."""
    z = shifted_logits(comm, logits)
    return put_together(comm, z, target_logit(z, targets, first_row), targets, reduce=SumInBoth)


class Loss(torch.autograd.Function):
    """Right; the faults are in the backward of its subclasses."""

    @staticmethod
    def forward(ctx, logits, targets, first_row, comm):
        z = shifted_logits(comm, logits)
        row, mine = find(z, targets, first_row)
        total, target = comm.all_reduce(torch.stack([z.exp().sum(-1), target_logit(z, targets, first_row)]))
        counted = targets != -100
        softmax = z.exp() / total.unsqueeze(-1)
        onehot = F.one_hot(row, z.shape[-1]).to(z.dtype)
        ctx.save_for_backward(softmax, onehot, mine.unsqueeze(-1), counted.unsqueeze(-1))
        ctx.size = comm.size
        return ((total.log() - target) * counted).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, onehot, mine, counted = ctx.saved_tensors
        return (softmax - onehot * mine) * counted * grad, None, None, None


def applied(function):
    def answer(comm, logits, targets, first_row):
        return function.apply(logits, targets, first_row, comm)

    answer.__name__, answer.__doc__, answer.__module__ = function.__name__, function.__doc__, __name__
    return answer


@wrong(CHECK, "ignores the gradient that flows into backward", "grad_output")
@applied
class IgnoresGradOutput(Loss):
    """backward does not multiply by the gradient that flows in."""

    @staticmethod
    def backward(ctx, grad):
        softmax, onehot, mine, counted = ctx.saved_tensors
        return (softmax - onehot * mine) * counted, None, None, None


@wrong(CHECK, "is not 0 for the tokens of -100")
@applied
class IgnoredTokensGetGradients(Loss):
    """backward forgets that -100 is left out."""

    @staticmethod
    def backward(ctx, grad):
        softmax, onehot, mine, counted = ctx.saved_tensors
        return (softmax - onehot * mine) * grad, None, None, None


@wrong(CHECK, "one-hot of foreign targets subtracted in row 0")
@applied
class OneHotOnEveryRank(Loss):
    """backward subtracts 1 in row 0 where the target is another rank's."""

    @staticmethod
    def backward(ctx, grad):
        softmax, onehot, mine, counted = ctx.saved_tensors
        return (softmax - onehot) * counted * grad, None, None, None


@wrong(CHECK, "is the softmax alone")
@applied
class NoOneHot(Loss):
    """backward is the softmax alone."""

    @staticmethod
    def backward(ctx, grad):
        softmax, _, _, counted = ctx.saved_tensors
        return softmax * counted * grad, None, None, None


@wrong(CHECK, "is 1/2 of what it should be", "needs the whole gradient")
@applied
class ShareOfTheGradient(Loss):
    """backward divides by the number of ranks, as if the loss were counted once a rank."""

    @staticmethod
    def backward(ctx, grad):
        softmax, onehot, mine, counted = ctx.saved_tensors
        return (softmax - onehot * mine) * counted * grad / ctx.size, None, None, None
