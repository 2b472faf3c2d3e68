"""Wrong mends of exercise 06's three broken training steps. The fault that each comes with is no wrong answer but a
stub."""

import torch
import torch.nn.functional as F

from pcourse.split import shard_range, shard_sizes

from . import right, wrong

CHECKS = "pcourse.checks.training"
EXERCISE = "06_broken_training"


# --- A: clipping ---------------------------------------------------------------------------------------------------


def squares(gradients):
    return sum(g.square().sum() for g in gradients)


def scale(gradients, factor):
    for g in gradients:
        g *= factor


def clip(comm, shards, replicas, limit, norm=None, returned=None):
    """Right, but for the norm that it clips by and the one that it returns."""
    norm = (comm.all_reduce(squares(shards)) + squares(replicas)).sqrt() if norm is None else norm
    if norm > limit:
        scale([*shards, *replicas], limit / norm)
    return float(norm if returned is None else returned)


@right("clip_gradients")
def shares_of_the_replicas(comm, shards, replicas, limit):
    """Each rank gives 1/N of the replicas' squares."""
    return clip(comm, shards, replicas, limit, comm.all_reduce(squares(shards) + squares(replicas) / comm.size).sqrt())


@right("clip_gradients")
def replicas_from_rank_0(comm, shards, replicas, limit):
    """Rank 0 alone gives the replicas' squares."""
    mine = squares(shards) + (squares(replicas) if comm.rank == 0 else 0)
    return clip(comm, shards, replicas, limit, comm.all_reduce(mine).sqrt())


@wrong("clip_gradients", "its own shards alone are in it", "each rank clips by another norm")
def no_all_reduce(comm, shards, replicas, limit):
    """The all-reduce is left out."""
    return clip(comm, shards, replicas, limit, squares([*shards, *replicas]).sqrt())


@wrong("clip_gradients", "the sum is divided by 4, the shards with it, which are in it once already")
def mean_of_squares(comm, shards, replicas, limit):
    """The sum of squares, divided by N."""
    return clip(comm, shards, replicas, limit, (comm.all_reduce(squares([*shards, *replicas])) / comm.size).sqrt())


@wrong("clip_gradients", "the norm is divided by 4")
def norm_over_n(comm, shards, replicas, limit):
    """The norm, divided by N."""
    return clip(comm, shards, replicas, limit, comm.all_reduce(squares([*shards, *replicas])).sqrt() / comm.size)


@wrong("clip_gradients", "the replicas are not in it")
def forgets_the_replicas(comm, shards, replicas, limit):
    """Only what is cut is counted."""
    return clip(comm, shards, replicas, limit, comm.all_reduce(squares(shards)).sqrt())


@wrong("clip_gradients", "the replicas are in it 1/4 times", "divide by N only what N ranks add up")
def divides_replicas_that_are_counted_once(comm, shards, replicas, limit):
    """The replicas are added once, and divided by N all the same."""
    return clip(
        comm, shards, replicas, limit, (comm.all_reduce(squares(shards)) + squares(replicas) / comm.size).sqrt()
    )


@wrong("clip_gradients", "it is the sum of squares", "its root")
def no_root(comm, shards, replicas, limit):
    """No square root."""
    return clip(comm, shards, replicas, limit, comm.all_reduce(squares(shards)) + squares(replicas))


@wrong("clip_gradients", "the sum of the ranks' norms", "Squares add up, norms do not")
def adds_norms(comm, shards, replicas, limit):
    """Each rank's norm is added."""
    return clip(comm, shards, replicas, limit, comm.all_reduce(squares([*shards, *replicas]).sqrt()))


@wrong("clip_gradients", "the largest of the ranks' norms")
def largest_norm(comm, shards, replicas, limit):
    """The largest of the ranks' norms."""
    return clip(comm, shards, replicas, limit, comm.all_reduce(squares([*shards, *replicas]).sqrt(), "max"))


@wrong("clip_gradients", "the norm after clipping", "asks for the one before")
def norm_after_clipping(comm, shards, replicas, limit):
    """Returns what is left."""
    norm = (comm.all_reduce(squares(shards)) + squares(replicas)).sqrt()
    return clip(comm, shards, replicas, limit, norm, min(limit, norm))


@wrong("clip_gradients", "the norm is right", "the shards are scaled", "times, not")
def mends_what_it_returns(comm, shards, replicas, limit):
    """The norm is right where it is returned, and the gradients are still clipped by the other."""
    inflated = (comm.all_reduce(squares(shards)) + comm.size * squares(replicas)).sqrt()
    norm = (inflated**2 - (comm.size - 1) * squares(replicas)).sqrt()
    return clip(comm, shards, replicas, limit, inflated, norm)


@wrong("clip_gradients", "the replicas are not scaled, and the others are")
def clips_the_shards_alone(comm, shards, replicas, limit):
    """The replicas are not scaled."""
    return clip(comm, shards, [g.clone() for g in replicas], limit)


@wrong("clip_gradients", "they are as before", "Scale them in place")
def clips_copies(comm, shards, replicas, limit):
    """g = g * factor."""
    return clip(comm, [g.clone() for g in shards], [g.clone() for g in replicas], limit)


@wrong("clip_gradients", "below the limit", "shorter, and never longer")
def normalises(comm, shards, replicas, limit):
    """Scales up as well."""
    norm = (comm.all_reduce(squares(shards)) + squares(replicas)).sqrt()
    scale([*shards, *replicas], limit / norm)
    return float(norm)


@wrong("clip_gradients", "communicates 216 bytes", "one number is enough")
def gathers_the_gradients(comm, shards, replicas, limit):
    """All shards are gathered for their norm."""
    whole = [comm.all_gather(g, sizes=shard_sizes(n, comm.size)) for g, n in zip(shards, (17, 10), strict=True)]
    return clip(comm, shards, replicas, limit, squares([*whole, *replicas]).sqrt())


@wrong("clip_gradients", "rank 0 returns NoneType", "must return the norm")
def returns_nothing(comm, shards, replicas, limit):
    """No return."""
    clip(comm, shards, replicas, limit)


# --- B: tokens without a target ------------------------------------------------------------------------------------


def number_valid(comm, targets):
    return comm.all_reduce((targets != -100).sum())


def backward(layer, inputs, targets, divisor):
    """Backward of the sum over the valid tokens, divided; returns the loss."""
    loss = F.cross_entropy(layer(inputs), targets, reduction="sum") / divisor
    loss.backward()
    return loss.detach()


def reduce(comm, layer, divisor=1):
    for p in layer.parameters():
        comm.all_reduce(p.grad, out=p.grad)
        p.grad /= divisor


def tokens(comm, layer, inputs, targets, divisor, after=1, returned=lambda total: total):
    """Right, but for what is divided by, before and after the sum over the ranks."""
    loss = backward(layer, inputs, targets, divisor)
    reduce(comm, layer, after)
    return returned(comm.all_reduce(loss) / after).item()


@right("token_step")
def weighs_each_mean(comm, layer, inputs, targets):
    """Each rank's mean, times its share of the valid tokens; a rank without any gives 0."""
    total, mine = number_valid(comm, targets), (targets != -100).sum()
    loss = F.cross_entropy(layer(inputs), targets) * mine / total if mine else layer(inputs).sum() * 0
    loss.backward()
    reduce(comm, layer)
    return comm.all_reduce(loss.detach()).item()


@right("token_step")
def mean_number_and_mean_gradient(comm, layer, inputs, targets):
    """Divided by the mean number of valid tokens, and then the mean over the ranks."""
    return tokens(comm, layer, inputs, targets, number_valid(comm, targets) / comm.size, comm.size)


@right("token_step")
def divides_at_the_end(comm, layer, inputs, targets):
    """Sums throughout, and divides the sums."""
    return tokens(comm, layer, inputs, targets, 1, number_valid(comm, targets))


@wrong("token_step", "is 1/2 of what it should be", "divided by their number, and it has been divided by all tokens")
def still_divides_by_n(comm, layer, inputs, targets):
    """By all valid tokens, and by N as well."""
    return tokens(comm, layer, inputs, targets, number_valid(comm, targets), comm.size)


@wrong("token_step", "is 2 times what it should be", "the mean number of valid tokens of a rank")
def mean_number(comm, layer, inputs, targets):
    """By the mean number of valid tokens, and then a sum."""
    return tokens(comm, layer, inputs, targets, number_valid(comm, targets) / comm.size)


@wrong("token_step", "rank 0's tokens 13/10 times and rank 1's tokens 13/3 times", "divides by its own valid tokens")
def sum_of_means(comm, layer, inputs, targets):
    """Each rank's mean, summed."""
    return tokens(comm, layer, inputs, targets, (targets != -100).sum())


@wrong("token_step", "divided by the number of all tokens", "Those of -100 do not count")
def all_tokens(comm, layer, inputs, targets):
    """By all tokens, with and without a target."""
    return tokens(comm, layer, inputs, targets, len(targets) * comm.size)


@wrong("token_step", "is 13 times what it should be", "which is not divided")
def not_divided(comm, layer, inputs, targets):
    """The sum."""
    return tokens(comm, layer, inputs, targets, 1)


@wrong(
    "token_step", "is 13/2 times what it should be", "by the number of ranks, where the number of valid tokens is due"
)
def only_by_n(comm, layer, inputs, targets):
    """The sum, divided by N."""
    return tokens(comm, layer, inputs, targets, 1, comm.size)


@wrong("token_step", "the largest rank's valid tokens")
def largest_number(comm, layer, inputs, targets):
    """By the largest of the ranks' numbers."""
    return tokens(comm, layer, inputs, targets, comm.all_reduce((targets != -100).sum(), "max"))


@wrong("token_step", "has its own tokens alone in it", "the all-reduce of the gradients is missing")
def forgets_the_all_reduce(comm, layer, inputs, targets):
    """Each rank goes on with its own tokens' part."""
    return comm.all_reduce(backward(layer, inputs, targets, number_valid(comm, targets))).item()


@wrong("token_step", "has its own tokens alone in it", "the all-reduce of the gradients is missing")
def drops_the_sum(comm, layer, inputs, targets):
    """all_reduce returns the sum, and leaves p.grad alone."""
    loss = backward(layer, inputs, targets, number_valid(comm, targets))
    for p in layer.parameters():
        comm.all_reduce(p.grad)
    return comm.all_reduce(loss).item()


@wrong(
    "token_step", "2 ranks with 6 and 0 valid tokens", "the gradients are right, and the loss on rank 0 is nan", "0/0"
)
def nan_of_an_empty_rank(comm, layer, inputs, targets):
    """Weighs each mean rightly, and 0 times nan is nan."""
    loss = F.cross_entropy(layer(inputs), targets) * (targets != -100).sum() / number_valid(comm, targets)
    loss.backward()
    reduce(comm, layer)
    return comm.all_reduce(loss.detach()).item()


@wrong("token_step", "the loss that is returned is right", "backward begins from another loss")
def mends_what_it_returns_of_the_loss(comm, layer, inputs, targets):
    """The loss is right where it is returned, and the gradients are still the mean of means."""
    loss = F.cross_entropy(layer(inputs), targets)
    loss.backward()
    reduce(comm, layer, comm.size)
    whole = F.cross_entropy(layer(inputs), targets, reduction="sum").detach()
    return comm.all_reduce(whole).item() / number_valid(comm, targets).item()


@wrong("token_step", "the gradients are right", "what this rank's tokens have in it", "Sum it over the ranks")
def returns_its_own_part(comm, layer, inputs, targets):
    """The loss is not summed over the ranks."""
    loss = backward(layer, inputs, targets, number_valid(comm, targets))
    reduce(comm, layer)
    return loss.item()


@wrong("token_step", "the gradients are right", "it is still the mean of the ranks' means")
def returns_the_mean_of_means(comm, layer, inputs, targets):
    """The gradients are mended, the report is not."""
    backward(layer, inputs, targets, number_valid(comm, targets))
    reduce(comm, layer)
    return comm.all_reduce(F.cross_entropy(layer(inputs), targets).detach()).item() / comm.size


@wrong("token_step", "the gradients are right", "divided by their number once more")
def still_averages_what_it_reports(comm, layer, inputs, targets):
    """The loss is divided already, and the report divides once more."""
    return tokens(comm, layer, inputs, targets, number_valid(comm, targets), returned=lambda loss: loss / comm.size)


# --- C: master weights ---------------------------------------------------------------------------------------------


def mean_of(comm, gradient):
    return comm.all_reduce(gradient.float()) / comm.size


def mixed(comm, weights, gradient, state, learning_rate, mean=mean_of, dtype=torch.float32, copy=torch.Tensor.copy_):
    """Right, but for the mean, the master copy's dtype, and how it gets back."""
    update = learning_rate * mean(comm, gradient)
    if "master" not in state:
        state["master"] = weights.clone().to(dtype)
    state["master"] -= update.to(dtype)
    copy(weights, state["master"])


@right("mixed_step")
def keeps_the_rest(comm, weights, gradient, state, learning_rate):
    """Keeps what rounding has cut off, and not the whole master copy."""
    master = weights.float() + state.get("rest", 0.0) - learning_rate * mean_of(comm, gradient)
    weights.copy_(master)
    state["rest"] = master - weights.float()


@right("mixed_step")
def zero_1(comm, weights, gradient, state, learning_rate):
    """The master copy is cut over the ranks, and bfloat16 is gathered."""
    sizes, span = shard_sizes(len(weights), comm.size), shard_range(len(weights), comm.size, comm.rank)
    if "master" not in state:
        state["master"] = weights[span.start : span.stop].float()
    state["master"] -= learning_rate * comm.reduce_scatter(gradient.float(), sizes=sizes) / comm.size
    comm.all_gather(state["master"].bfloat16(), sizes=sizes, out=weights)


@wrong("mixed_step", "The master copy in `state` has: it is never copied back", "weights.copy_(master)")
def never_copied_back(*args):
    """The master copy is stepped, and the model never sees it."""
    mixed(*args, copy=lambda weights, master: None)


@wrong("mixed_step", "The master copy in `state` has: it is never copied back")
def gives_the_name_away(comm, weights, gradient, state, learning_rate):
    """`weights = master.bfloat16()`: the caller never sees it."""
    mixed(comm, weights, gradient, state, learning_rate, copy=lambda weights, master: None)
    weights = state["master"].bfloat16()


@wrong("mixed_step", "The master copy in `state` is bfloat16", "must be float32")
def master_in_bfloat16(*args):
    """The master copy rounds too."""
    mixed(*args, dtype=torch.bfloat16)


@wrong("mixed_step", "made anew from the rounded weights in each step", "Make it once")
def made_anew(comm, weights, gradient, state, learning_rate):
    """The master copy is kept, and overwritten from the weights in the next step."""
    state["master"] = weights.float()
    mixed(comm, weights, gradient, state, learning_rate)


@wrong("mixed_step", "The float32 copy in `state` has not either", "made anew from the rounded weights")
def refreshed_after_the_step(comm, weights, gradient, state, learning_rate):
    """After each step the master copy is set to the rounded weights."""
    mixed(comm, weights, gradient, state, learning_rate)
    state["master"] = weights.float()


@wrong("mixed_step", "the weights on rank 0 are float32 after the step", "weights.copy_(master) rounds")
def weights_in_float32(comm, weights, gradient, state, learning_rate):
    """The model's own weights become float32."""
    weights.data = weights.float() - learning_rate * mean_of(comm, gradient)


@wrong("mixed_step", "move by 2 times what they should", "the sum of the ranks' gradients")
def sum_instead_of_mean(*args):
    """The sum of the gradients."""
    mixed(*args, mean=lambda comm, gradient: comm.all_reduce(gradient.float()))


@wrong("mixed_step", "move by 1/2 of what they should", "divided by N once more")
def divides_twice(*args):
    """Divided by N two times."""
    mixed(*args, mean=lambda comm, gradient: mean_of(comm, gradient) / comm.size)


@wrong("mixed_step", "move by this rank's own gradient alone", "the all-reduce is missing")
def own_gradient(*args):
    """No all-reduce."""
    mixed(*args, mean=lambda comm, gradient: gradient.float())


@wrong("mixed_step", "move the wrong way")
def climbs(*args):
    """Adds the gradient."""
    mixed(*args, mean=lambda comm, gradient: -mean_of(comm, gradient))


@wrong("mixed_step", "a master copy that begins at 0")
def begins_at_0(comm, weights, gradient, state, learning_rate):
    """The master copy begins as zeros."""
    if "master" not in state:
        state["master"] = torch.zeros_like(weights, dtype=torch.float32)
    mixed(comm, weights, gradient, state, learning_rate)


@wrong("mixed_step", "one step behind", "before it is stepped")
def copies_before_the_step(comm, weights, gradient, state, learning_rate):
    """The weights are copied from the master copy, and then it is stepped."""
    if "master" not in state:
        state["master"] = weights.float()
    weights.copy_(state["master"])
    state["master"] -= learning_rate * mean_of(comm, gradient)


@wrong("mixed_step", "are not float32's, rounded", "and rounding leaves half a step")
def larger_learning_rate(comm, weights, gradient, state, learning_rate):
    """No master copy, and steps that are large enough to be seen."""
    weights.copy_(weights.float() - 8 * learning_rate * mean_of(comm, gradient))


@wrong("mixed_step", "are not float32's, rounded", "and rounding leaves half a step")
def adds_up_in_bfloat16(comm, weights, gradient, state, learning_rate):
    """The gradients are added up, in bfloat16, until they are large enough: their sum is rounded as well."""
    if not state:
        state |= {"sum": torch.zeros_like(weights), "first": weights.clone()}
    state["sum"] += mean_of(comm, gradient).bfloat16()
    weights.copy_(state["first"].float() - learning_rate * state["sum"].float())


@wrong("mixed_step", "are not float32's, rounded")
def rounds_at_random(comm, weights, gradient, state, learning_rate):
    """Stochastic rounding: right on average, and another technique."""
    master = weights.float() - learning_rate * mean_of(comm, gradient)
    generator = state.setdefault("generator", torch.Generator().manual_seed(0))
    noise = torch.randint(0, 2**16, master.shape, generator=generator, dtype=torch.int32)
    weights.copy_(((master.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32))
