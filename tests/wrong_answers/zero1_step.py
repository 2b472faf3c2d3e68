"""Wrong answers to exercise 06, one step of ZeRO-1."""

import torch

from pcourse.split import shard_range, shard_sizes

from . import right, wrong

CHECKS = "pcourse.checks.zero1"
EXERCISE = "06_zero1_step"
CHECK = "zero1_step"


def own(comm, weights):
    """This rank's shard, as a slice."""
    mine = shard_range(len(weights), comm.size, comm.rank)
    return slice(mine.start, mine.stop)


def mean_of_shard(comm, weights, gradient):
    return comm.reduce_scatter(gradient, sizes=shard_sizes(len(weights), comm.size)) / comm.size


def velocity_of(state, like):
    if "velocity" not in state:
        state["velocity"] = torch.zeros_like(like)
    return state["velocity"]


def momentum_step(state, gradient, momentum):
    """The velocity of what `gradient` is of, after a step."""
    return velocity_of(state, gradient).mul_(momentum).add_(gradient)


def gather(comm, weights, shard):
    comm.all_gather(shard, sizes=shard_sizes(len(weights), comm.size), out=weights)


def step(comm, weights, gradient, state, learning_rate, momentum, mean=mean_of_shard, velocity=momentum_step):
    """Right, but for its mean gradient and its velocity."""
    shard = weights[own(comm, weights)]
    shard.sub_(learning_rate * velocity(state, mean(comm, weights, gradient), momentum))
    gather(comm, weights, shard)


# --- the mean ------------------------------------------------------------------------------------------------------


@wrong(CHECK, "moves by 2 times what it should", "the sum of the gradients", "Divide by N")
def sum_instead_of_mean(*args):
    """The sum that reduce_scatter returns, not divided."""
    return step(*args, mean=lambda comm, w, g: mean_of_shard(comm, w, g) * comm.size)


@wrong(CHECK, "moves by 1/2 of what it should", "divided by N once more")
def divides_twice(*args):
    """Divided before the reduce-scatter, and after it."""
    return step(*args, mean=lambda comm, w, g: mean_of_shard(comm, w, g / comm.size))


@wrong(CHECK, "moves by its own gradient alone", "the reduce-scatter", "is missing")
def own_gradient(*args):
    """No reduce-scatter: each rank steps its shard by its own gradient."""
    return step(*args, mean=lambda comm, w, g: g[own(comm, w)])


@wrong(CHECK, "step 1", "in it as rank 0's 3/2 times and rank 1's 1/2 times", "each is due 1/2 times")
def counts_itself_twice(*args):
    """Adds its own gradient to the reduced sum, which has it already."""
    return step(*args, mean=lambda comm, w, g: mean_of_shard(comm, w, g) + g[own(comm, w)])


@wrong(CHECK, "rank 0 sends 192 bytes a step", "are 128", "all_reduce, all_gather", "steps one shard", "half the bytes")
def all_reduces_the_gradient(*args):
    """An all-reduce where a reduce-scatter does: right, with half as many bytes again."""
    return step(*args, mean=lambda comm, w, g: (comm.all_reduce(g) / comm.size)[own(comm, w)])


@wrong(CHECK, "rank 0 sends 192 bytes", "all_gather, all_gather, where one reduce-scatter and one all-gather")
def gathers_all_gradients(comm, weights, gradient, *args):
    """Every rank gathers all gradients and averages its part of them: (N - 1)P elements instead of P(N - 1)/N."""

    def mean(comm, weights, gradient):
        return comm.all_gather(gradient[None], sizes=[1] * comm.size).mean(0)[own(comm, weights)]

    return step(comm, weights, gradient, *args, mean=mean)


@wrong(CHECK, "moves the wrong way", "against the gradient")
def climbs(comm, weights, gradient, *args):
    """Adds the step to the weights."""
    return step(comm, weights, -gradient, *args)


@wrong(CHECK, "the learning rate is missing")
def no_learning_rate(comm, weights, gradient, state, learning_rate, momentum):
    """Moves by the velocity itself."""
    return step(comm, weights, gradient, state, 1.0, momentum)


# --- the velocity --------------------------------------------------------------------------------------------------


@wrong(CHECK, "step 2", "0 and 1 times, and 0.75 and 1 are due", "velocity of the step before is lost", "`state`")
def forgets_the_velocity(*args):
    """A velocity that is a local variable."""
    return step(*args, velocity=lambda state, g, momentum: velocity_of(state, g) * momentum + g)


@wrong(CHECK, "step 2", "velocity of the step before is lost")
def clears_the_velocity(*args):
    """A velocity that begins at 0 in every step."""

    def velocity(state, gradient, momentum):
        state["velocity"] = torch.zeros_like(gradient)
        return momentum_step(state, gradient, momentum)

    return step(*args, velocity=velocity)


@wrong(CHECK, "step 3", "0.562, 0 and 1 times", "what the velocity became in the last step is not kept in `state`")
def keeps_the_first_velocity(*args):
    """The velocity of the first step is kept, and decays; those after it are not."""

    def velocity(state, gradient, momentum):
        if "velocity" not in state:
            state["velocity"] = gradient
            return gradient
        state["velocity"] *= momentum
        return state["velocity"] + gradient

    return step(*args, velocity=velocity)


@wrong(CHECK, "step 2", "1 and 1 times", "the velocity is not multiplied by the momentum")
def no_momentum(comm, weights, gradient, state, learning_rate, momentum):
    """The velocity only grows."""
    return step(comm, weights, gradient, state, learning_rate, 1.0)


@wrong(CHECK, "(1 - momentum) of what it should", "adds the whole gradient")
def averages_the_velocity(*args):
    """The exponential average of Adam's first moment."""

    def velocity(state, gradient, momentum):
        return velocity_of(state, gradient).mul_(momentum).add_((1 - momentum) * gradient)

    return step(*args, velocity=velocity)


@wrong(CHECK, "that is Nesterov's step")
def nesterov(*args):
    """Nesterov's momentum."""
    return step(*args, velocity=lambda state, g, momentum: g + momentum * momentum_step(state, g, momentum))


# --- the shards ----------------------------------------------------------------------------------------------------


@wrong(
    CHECK, "shard 0, its own, is new, and the others are as they were", "the all-gather of the new shards is missing"
)
def forgets_the_all_gather(comm, weights, gradient, state, learning_rate, momentum):
    """Each rank steps its shard, and keeps it for itself."""
    velocity = momentum_step(state, mean_of_shard(comm, weights, gradient), momentum)
    weights[own(comm, weights)].sub_(learning_rate * velocity)


@wrong(CHECK, "its own, is new, and the others are as they were", "all-gathered before they are stepped")
def gathers_stale_shards(comm, weights, gradient, state, learning_rate, momentum):
    """The all-gather comes before the step of the shard."""
    velocity = momentum_step(state, mean_of_shard(comm, weights, gradient), momentum)
    gather(comm, weights, weights[own(comm, weights)].clone())
    weights[own(comm, weights)].sub_(learning_rate * velocity)


@wrong(CHECK, "what rank 0 returns is right, and `weights` itself is not", "out=weights")
def returns_new_weights(comm, weights, gradient, state, learning_rate, momentum):
    """The new weights are returned, the old ones stay."""
    weights = weights.clone()
    step(comm, weights, gradient, state, learning_rate, momentum)
    return weights


@wrong(CHECK, "no weight on rank 0 changes", "`weights = …` does not")
def gives_the_name_away(comm, weights, gradient, state, learning_rate, momentum):
    """`weights = comm.all_gather(…)`: the caller never sees it."""
    shard = weights[own(comm, weights)] - learning_rate * momentum_step(
        state, mean_of_shard(comm, weights, gradient), momentum
    )
    weights = comm.all_gather(shard, sizes=shard_sizes(len(weights), comm.size))


@wrong(CHECK, "no weight on rank 0 changes", "writes into the tensor that it is given")
def steps_nothing(comm, weights, gradient, state, learning_rate, momentum):
    """The velocity is right, and no weight is stepped by it."""
    momentum_step(state, mean_of_shard(comm, weights, gradient), momentum)


@wrong(
    CHECK, "4 ranks, 22 weights in shards of 6, 6, 5 and 5", "the last 2 of 22 weights do not change", "leave a tail"
)
def drops_the_tail(comm, weights, gradient, state, learning_rate, momentum):
    """N shards of P // N elements."""
    whole = len(weights) // comm.size * comm.size
    step(comm, weights[:whole], gradient[:whole], state, learning_rate, momentum)


@wrong(CHECK, "4 ranks, 22 weights", "shard 2 of the weights", "is made from the weights from 10 on", "begins at 12")
def equal_shards(comm, weights, gradient, state, learning_rate, momentum):
    """Shard r begins at r times its own length: wrong behind the first shorter one."""
    mean = mean_of_shard(comm, weights, gradient)
    start = comm.rank * len(mean)
    shard = weights[start : start + len(mean)] - learning_rate * momentum_step(state, mean, momentum)
    gather(comm, weights, shard)


@wrong(CHECK, "4 ranks, 22 weights", "raised RuntimeError", "Shard r is shard_range(P, N, r), here of 6, 6, 5 and 5")
def floor_shards(comm, weights, gradient, state, learning_rate, momentum):
    """Slices of P // N elements, beside a reduce-scatter of uneven shards."""
    n = len(weights) // comm.size
    shard = weights[comm.rank * n : (comm.rank + 1) * n]
    shard.sub_(learning_rate * momentum_step(state, mean_of_shard(comm, weights, gradient), momentum))
    gather(comm, weights, shard)


@wrong(CHECK, "4 ranks, 22 weights", "do not fit", "Shard r is shard_range(P, N, r), here of 6, 6, 5 and 5")
def even_sizes(comm, weights, gradient, state, learning_rate, momentum):
    """sizes=[P // N] * N for the reduce-scatter."""
    mean = comm.reduce_scatter(gradient, sizes=[len(weights) // comm.size] * comm.size) / comm.size
    step(comm, weights, gradient, state, learning_rate, momentum, mean=lambda *_: mean)


@wrong(CHECK, "shard 0 of the weights on rank 0 moves by the gradient of the weights from 8 on")
def next_rank_s_gradient(*args):
    """The gradients' shards are off by one rank."""

    def mean(comm, weights, gradient):
        return mean_of_shard(comm, weights, gradient.roll(len(weights) // comm.size))

    return step(*args, mean=mean)


# --- the state -----------------------------------------------------------------------------------------------------


@wrong(CHECK, "holds 16 elements of velocity, and its shard has 8", "state for all weights on every rank")
def data_parallel(comm, weights, gradient, state, learning_rate, momentum):
    """Plain data parallelism: right, as many bytes, and the state of all weights on every rank."""
    weights.sub_(learning_rate * momentum_step(state, comm.all_reduce(gradient) / comm.size, momentum))


@wrong(CHECK, "holds 16 elements of velocity, and its shard has 8", "state for all weights on every rank")
def state_of_full_size(comm, weights, gradient, state, learning_rate, momentum):
    """A velocity of P elements, of which each rank uses its shard."""
    mine = own(comm, weights)
    velocity = velocity_of(state, weights)[mine].mul_(momentum).add_(mean_of_shard(comm, weights, gradient))
    weights[mine].sub_(learning_rate * velocity)
    gather(comm, weights, weights[mine])


@wrong(CHECK, "holds a view of 8 elements", "keeps alive the 128 bytes of the whole tensor", "clone() the view")
def view_of_a_full_state(comm, weights, gradient, state, *args):
    """The velocity is a slice of a tensor of P elements."""
    if not state:
        state["velocity"] = torch.zeros_like(weights)[own(comm, weights)]
    return step(comm, weights, gradient, state, *args)


@wrong(CHECK, "8 elements of mean and 8 elements of velocity, and its shard has 8", "and nothing else")
def keeps_the_gradient(comm, weights, gradient, state, *args):
    """The reduced gradient stays in the state."""
    state["mean"] = mean_of_shard(comm, weights, gradient)
    step(comm, weights, gradient, state, *args, mean=lambda *_: state["mean"])


HIDDEN: dict[int, torch.Tensor] = {}


@wrong(CHECK, "bytes are still alive on rank 0 after the step", "state is kept in `state`")
def state_in_a_global(comm, weights, gradient, state, learning_rate, momentum):
    """A velocity of P elements in a variable outside the function."""
    key = id(state)
    if key not in HIDDEN or len(HIDDEN[key]) != len(weights):
        HIDDEN[key] = torch.zeros_like(weights)
    velocity = HIDDEN[key].mul_(momentum).add_(comm.all_reduce(gradient) / comm.size)
    weights.sub_(learning_rate * velocity)


@wrong(CHECK, "rank 0 called all_gather", "rank 1 called reduce_scatter", "must make the same calls")
def only_rank_0_gathers(comm, weights, gradient, state, learning_rate, momentum):
    """One rank joins an all-gather that the others do not."""
    velocity = momentum_step(state, mean_of_shard(comm, weights, gradient), momentum)
    weights[own(comm, weights)].sub_(learning_rate * velocity)
    if comm.rank == 0:
        gather(comm, weights, weights[own(comm, weights)])


# --- right ---------------------------------------------------------------------------------------------------------


@right(CHECK)
def gathers_the_velocity(comm, weights, gradient, state, learning_rate, momentum):
    """The velocities are gathered, and every rank steps all weights by them: as many bytes."""
    velocity = momentum_step(state, mean_of_shard(comm, weights, gradient), momentum)
    weights.sub_(learning_rate * comm.all_gather(velocity))


@right(CHECK)
def all_to_all(*args):
    """Each rank is sent its shard of every gradient and adds them up: a reduce-scatter by hand."""

    def mean(comm, weights, gradient):
        sizes = shard_sizes(len(weights), comm.size)
        parts = comm.all_to_all(gradient, sizes=sizes, out_sizes=[sizes[comm.rank]] * comm.size)
        return parts.view(comm.size, -1).mean(0)

    return step(*args, mean=mean)
