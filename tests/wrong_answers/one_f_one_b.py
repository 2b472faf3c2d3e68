"""Wrong answers to exercise 05, the schedules. A function of (i, p, m): the order of stage i of p, m micro-batches."""

from pcourse.checks.schedules import backward, backward_input, backward_weight, forward

from . import right, wrong

CHECKS = "pcourse.checks.schedules"
EXERCISE = "05_one_f_one_b"


def forwards(*some):
    return [forward(k) for k in range(*some)]


def backwards(*some):
    return [backward(k) for k in range(*some)]


def one_forward_one_backward(m, ahead):
    """Right but for `ahead`, the forwards before the first pair."""
    ahead = max(0, min(m, ahead))
    pairs = [action for k in range(m - ahead) for action in (forward(ahead + k), backward(k))]
    return forwards(ahead) + pairs + backwards(m - ahead, m)


def put_off(i, p, m, by, drain=True):
    """1F1B with each weight gradient put off `by` input gradients."""
    order, owed = [], []
    for action in one_forward_one_backward(m, p - 1 - i):
        k = action.micro_batch
        if action == forward(k):
            order.append(action)
            continue
        owed.append(k)
        order.append(backward_input(k))
        order += [backward_weight(owed.pop(0))] if len(owed) > by else []
    return order + [backward_weight(k) for k in owed if drain]


# --- GPipe ---------------------------------------------------------------------------------------------------------


@right("gpipe")
def last_in_first_out(i, p, m):
    """Backwards from the last micro-batch on, as GPipe's own figure has them, on every stage."""
    return forwards(m) + backwards(m)[::-1]


@wrong("gpipe", "begins a backward after 1 of 8 forwards", "GPipe runs all forwards first")
def naive_as_gpipe(i, p, m):
    """One micro-batch at a time."""
    return [action for k in range(m) for action in (forward(k), backward(k))]


@wrong("gpipe", "stage 0 begins a backward after 4 of 8 forwards", "GPipe runs all forwards first")
def one_f_one_b_as_gpipe(i, p, m):
    """1F1B."""
    return one_forward_one_backward(m, p - 1 - i)


@wrong("gpipe", "stage 0: backward of micro-batch 0 comes before its forward")
def backwards_first(i, p, m):
    """The two halves in the wrong order."""
    return backwards(m) + forwards(m)


@wrong("gpipe", "returns None", "is a `return` missing?")
def returns_nothing(i, p, m):
    """No return."""
    forwards(m) + backwards(m)


@wrong("gpipe", "entry 0 on stage 0 is a list", "lists are put together with +")
def a_list_of_lists(i, p, m):
    """Two lists in a list."""
    return [forwards(m), backwards(m)]


@wrong("gpipe", "stages 3 and 2 do not agree which gradient", "first backwards are of 0, 0, 0, 7", "in one order")
def only_the_last_stage_reversed(i, p, m):
    """The last stage goes back from its last micro-batch, the others from the first."""
    return forwards(m) + (backwards(m)[::-1] if i == p - 1 else backwards(m))


@wrong("gpipe", "micro-batch 0 has no backward", "There is no backward at all")
def forwards_alone(i, p, m):
    """Nothing comes back."""
    return forwards(m)


# --- 1F1B ----------------------------------------------------------------------------------------------------------


@right("one_f_one_b")
def backward_before_forward_in_the_pair(i, p, m):
    """p - i forwards, then one backward, one forward: the same list."""
    order = forwards(min(m, p - i))
    for k in range(m):
        order.append(backward(k))
        order += [forward(p - i + k)] if p - i + k < m else []
    return order


@right("one_f_one_b")
def yields(i, p, m):
    """A generator instead of a list."""
    yield from one_forward_one_backward(m, p - 1 - i)


@wrong("one_f_one_b", "stage 0 holds 5 micro-batches at once", "= 4", "one forward too many before the first backward")
def one_too_many_ahead(i, p, m):
    """A warm-up of p - i."""
    return one_forward_one_backward(m, p - i)


@wrong("one_f_one_b", "takes", "Stage 0 begins with 3 forwards and holds 3 of the 4", "too few to have work")
def one_too_few_ahead(i, p, m):
    """A warm-up of p - 2 - i."""
    return one_forward_one_backward(m, p - 2 - i)


@wrong(
    "one_f_one_b",
    "stage 1 holds 4 micro-batches at once",
    "= 3",
    "every stage begins with 4 forwards",
    "fewer it needs",
)
def same_warm_up_on_every_stage(i, p, m):
    """A warm-up of p - 1, whatever the stage."""
    return one_forward_one_backward(m, p - 1)


@wrong("one_f_one_b", "deadlock", "begin with 1, 2, 3, 4 forwards", "counted from the wrong end")
def counted_from_the_wrong_end(i, p, m):
    """A warm-up of i."""
    return one_forward_one_backward(m, i)


@wrong("one_f_one_b", "stage 0 holds 8 micro-batches at once", "This is GPipe", "memory grows with m")
def gpipe_as_one_f_one_b(i, p, m):
    """GPipe: the bubble is right."""
    return forwards(m) + backwards(m)


@wrong("one_f_one_b", "takes 96 units", "= 33", "one micro-batch at a time", "Run forwards ahead")
def naive(i, p, m):
    """No warm-up at all."""
    return one_forward_one_backward(m, 0)


@wrong("one_f_one_b", "4 stages, 2 micro-batches", "there is no forward of micro-batch 2", "fewer micro-batches than")
def forgets_that_m_may_be_small(i, p, m):
    """A warm-up of p - 1 - i even where there are fewer micro-batches."""
    ahead = p - 1 - i
    pairs = [action for k in range(m - ahead) for action in (forward(ahead + k), backward(k))]
    return forwards(ahead) + pairs + backwards(max(0, m - ahead), m)


@wrong("one_f_one_b", "4 stages, 2 micro-batches", "there is no backward of micro-batch -1", "fewer micro-batches than")
def cool_down_from_below_zero(i, p, m):
    """The warm-up is cut to m, and the cool-down is not."""
    ahead = p - 1 - i
    pairs = [action for k in range(m - ahead) for action in (forward(ahead + k), backward(k))]
    return forwards(min(m, ahead)) + pairs + backwards(m - ahead, m)


@wrong("one_f_one_b", "stage 0: micro-batch 5 has no backward", "leave out 3, 2, 1, 0", "must still come back")
def no_cool_down(i, p, m):
    """Ends when the forwards end."""
    ahead = min(m, p - 1 - i)
    return one_forward_one_backward(m, ahead)[: 2 * m - ahead]


@wrong("one_f_one_b", "stage 0: micro-batch 7 has no forward")
def drops_the_last_micro_batch(i, p, m):
    """range(m - 1) forwards and backwards."""
    return one_forward_one_backward(m - 1, p - 1 - i)


@wrong("one_f_one_b", "stage 0: backward of micro-batch 7 comes before its forward")
def backwards_reversed(i, p, m):
    """The last micro-batch goes back first."""
    return [backward(m - 1 - a.micro_batch) if a.kind == "backward" else a for a in one_f_one_b_as_gpipe(i, p, m)]


@wrong("one_f_one_b", "stage 3: backward of micro-batch 0 comes before its forward")
def backward_first_in_the_pair(i, p, m):
    """One backward, one forward, after a warm-up of p - 1 - i."""
    ahead = min(m, p - 1 - i)
    pairs = [action for k in range(m - ahead) for action in (backward(k), forward(ahead + k))]
    return forwards(ahead) + pairs + backwards(m - ahead, m)


@wrong("one_f_one_b", "stage 0: forward of micro-batch 0 is done twice")
def pairs_start_at_zero(i, p, m):
    """The steady state runs the warm-up's forwards again."""
    ahead = min(m, p - 1 - i)
    return forwards(ahead) + [action for k in range(m) for action in (forward(k), backward(k))]


@wrong("one_f_one_b", "stage 0: backward of micro-batch 4 comes before its forward")
def backward_of_the_newest(i, p, m):
    """The pair's backward is that of the forward to come, ahead + 1 + k."""
    ahead = min(m, p - 1 - i)
    order = forwards(ahead)
    for k in range(ahead, m):
        order += [forward(k), backward((k + 1) % m)]
    return order + backwards(ahead)


@wrong("one_f_one_b", "stages 3 and 2 do not agree which gradient", "first backwards are of 3, 2, 1, 0", "in one order")
def backward_of_the_one_just_done(i, p, m):
    """The pair's backward is that of its own forward."""
    ahead = min(m, p - 1 - i)
    order = forwards(ahead)
    for k in range(ahead, m):
        order += [forward(k), backward(k)]
    return order + backwards(ahead)


@wrong("one_f_one_b", "stage 0 holds 5 micro-batches at once", "every stage begins with 5 forwards", "fewer it needs")
def warm_up_of_p(i, p, m):
    """A warm-up of p, whatever the stage."""
    return one_forward_one_backward(m, p)


@wrong("one_f_one_b", "stage 0 cuts its backward in two", "part 3")
def zero_bubble_as_one_f_one_b(i, p, m):
    """Part 3's answer."""
    return put_off(i, p, m, i)


# --- weight gradients put off --------------------------------------------------------------------------------------


@right("zero_bubble")
def from_the_back(i, p, m):
    """Each weight gradient as soon as p micro-batches are held, or nothing else is left."""
    order, held, owed = [], 0, []
    for action in one_forward_one_backward(m, p - 1 - i):
        k = action.micro_batch
        if action == forward(k):
            if held == p:
                order.append(backward_weight(owed.pop(0)))
                held -= 1
            order.append(action)
            held += 1
        else:
            order.append(backward_input(k))
            owed.append(k)
            if len(owed) > i:
                order.append(backward_weight(owed.pop(0)))
                held -= 1
    return order + [backward_weight(k) for k in owed]


@wrong("zero_bubble", "takes 30 units, 27 are possible", "1F1B takes 33", "No weight gradient is put off")
def nothing_put_off(i, p, m):
    """Each weight gradient right after its input gradient."""
    return put_off(i, p, m, 0)


@wrong("zero_bubble", "holds 8 micro-batches at once", "= 4", "wait for the end")
def all_at_the_end(i, p, m):
    """All weight gradients after the last input gradient."""
    return put_off(i, p, m, m)


@wrong("zero_bubble", "stage 0 holds 7 micro-batches at once", "3, 2, 1, 0", "counted from the wrong end")
def put_off_from_the_wrong_end(i, p, m):
    """Put off by p - 1 - i."""
    return put_off(i, p, m, p - 1 - i)


@wrong("zero_bubble", "stage 0 holds 5 micro-batches at once", "1, 2, 3, 4", "held until its weight gradient is done")
def put_off_one_too_many(i, p, m):
    """Put off by i + 1."""
    return put_off(i, p, m, i + 1)


@wrong("zero_bubble", "takes 28 units, 27 are possible", "0, 0, 1, 2", "some stage still waits in the cool-down")
def put_off_one_too_few(i, p, m):
    """Put off by i - 1."""
    return put_off(i, p, m, max(0, i - 1))


@wrong("zero_bubble", "stage 0 holds 7 micro-batches", "3, 3, 3, 3")
def put_off_the_same_everywhere(i, p, m):
    """Put off by p - 1 on every stage."""
    return put_off(i, p, m, p - 1)


@wrong("zero_bubble", "stage 1: micro-batch 7 has no backward-weight", "put off must still come")
def forgets_to_drain(i, p, m):
    """The last i weight gradients never come."""
    return put_off(i, p, m, i, drain=False)


@wrong("zero_bubble", "stage 0: backward-weight of micro-batch 0 comes before its backward-input")
def weight_before_input(i, p, m):
    """W before B, so that everybody waits for both."""
    swap = {"backward-input": backward_weight, "backward-weight": backward_input}
    return [swap[a.kind](a.micro_batch) if a.kind in swap else a for a in put_off(i, p, m, 0)]


@wrong("zero_bubble", "stage 0 has a whole backward", "write backward_input(k), and backward_weight(k)")
def one_f_one_b_as_zero_bubble(i, p, m):
    """1F1B, its backwards whole."""
    return one_forward_one_backward(m, p - 1 - i)


@wrong("zero_bubble", "stage 0 holds 7 micro-batches at once", "begins with 7 forwards, where 1F1B begins with p - i")
def twice_as_far_ahead(i, p, m):
    """ZB-H2: no bubble inside a stage's own span, for twice the memory."""
    order = []
    for action in one_forward_one_backward(m, 2 * (p - 1 - i)):
        k = action.micro_batch
        if action == forward(k):
            order.append(action)
            continue
        order.append(backward_input(k))
        order += [backward_weight(k - 2 * i)] if k >= 2 * i else []
    return order + [backward_weight(k) for k in range(max(0, m - 2 * i), m)]
