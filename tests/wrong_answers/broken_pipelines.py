"""Wrong mends of exercise 05's three broken pipelines. The fault that each comes with is no wrong answer but a stub."""

import torch
import torch.nn.functional as F

from . import right, wrong

CHECKS = "pcourse.checks.pipelines"
EXERCISE = "05_broken_pipelines"


def ends_of(comm):
    return comm.rank == 0, comm.rank == comm.size - 1


def mean_over_the_batch(y, target, targets):
    return F.mse_loss(y, target, reduction="sum") / targets.numel()


def gpipe(comm, layer, inputs, targets, size, loss=mean_over_the_batch, came_back=lambda grad: grad, before=None):
    """Right, but for its `loss`, what it does with a gradient that came back, and what it does before a backward."""
    first, last = ends_of(comm)
    kept, losses = [], []
    for x, target in zip(inputs.split(size), targets.split(size), strict=True):
        x = x if first else comm.recv(torch.empty_like(x), comm.rank - 1).requires_grad_()
        y = torch.tanh(layer(x))
        if last:
            y = loss(y, target, targets)
            losses.append(y.item())
        else:
            comm.send(y, comm.rank + 1)
        kept.append((x, y))
    for x, y in kept:
        if before:
            before()
        y.backward(None if last else came_back(comm.recv(torch.empty_like(y), comm.rank + 1)))
        if not first:
            comm.send(x.grad, comm.rank - 1)
    return sum(losses) if last else None


def micro_batches(inputs, size):
    return len(inputs.split(size))


# --- A: the loss of a step -----------------------------------------------------------------------------------------


@right("gpipe_step")
def weighs_each_mean(comm, layer, inputs, targets, size):
    """Each micro-batch's mean, times its share of the rows."""
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t) * len(t) / len(ts))


@right("gpipe_step")
def divides_the_gradients_on_every_stage(comm, layer, inputs, targets, size):
    """Sums, and each stage divides its own gradients at the end."""
    loss = gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t, reduction="sum"))
    for p in layer.parameters():
        p.grad /= targets.numel()
    return loss and loss / targets.numel()


@wrong("gpipe_step", "micro-batches of 4, 4 and 2 rows", "5/6 times, 5/6 times and 5/3 times", "a mean of means")
def divides_by_the_number_of_micro_batches(comm, layer, inputs, targets, size):
    """The means divided by m: right while all micro-batches are equally long."""
    m = micro_batches(inputs, size)
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t) / m)


@wrong("gpipe_step", "every gradient is 1/3 of what it should be", "once too often")
def divides_twice(comm, layer, inputs, targets, size):
    """By the batch, and by m as well."""
    m = micro_batches(inputs, size)
    return gpipe(comm, layer, inputs, targets, size, lambda *args: mean_over_the_batch(*args) / m)


@wrong("gpipe_step", "stage 0's gradient is 3 times what", "stage 1's gradient is right", "before backward begins")
def divides_the_last_stage_s_gradients(comm, layer, inputs, targets, size):
    """Only the last stage divides its gradients."""
    m = micro_batches(inputs, size)
    loss = gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t))
    for p in layer.parameters() if comm.rank == comm.size - 1 else ():
        p.grad /= m
    return loss and loss / m


@wrong("gpipe_step", "stage 0's gradient is 1/3 of what", "what comes over a cut has been divided already")
def divides_at_every_cut(comm, layer, inputs, targets, size):
    """Each stage divides the gradient that comes back to it, as the last one divides the loss."""
    m = micro_batches(inputs, size)
    return gpipe(comm, layer, inputs, targets, size, came_back=lambda grad: grad / m)


@wrong("gpipe_step", "every gradient is 3/2 times what it should be", "divided by 2, the number of stages")
def divides_by_the_number_of_stages(comm, layer, inputs, targets, size):
    """By p, not by m."""
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t) / comm.size)


@wrong("gpipe_step", "every gradient is 1/4 of what it should be", "a mean over a micro-batch's rows, divided by their")
def divides_means_by_the_batch(comm, layer, inputs, targets, size):
    """A mean, divided by the rows of the batch."""
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t) / len(ts))


@wrong("gpipe_step", "every gradient is 60 times what it should be", "which is not divided")
def a_sum(comm, layer, inputs, targets, size):
    """The sum of all errors, not divided."""
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t, reduction="sum"))


@wrong("gpipe_step", "every gradient is 5 times what it should be", "divided by the rows alone")
def divides_by_rows_alone(comm, layer, inputs, targets, size):
    """The sum divided by B, where the mean is over B·h elements."""
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t, reduction="sum") / len(ts))


@wrong("gpipe_step", "every gradient is 3 times the unsplit model's", "only the loss that is returned is divided")
def divides_what_it_reports(comm, layer, inputs, targets, size):
    """The returned number is divided, the loss that backward begins from is not."""
    m = micro_batches(inputs, size)
    loss = gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t))
    return loss and loss / m / m


@wrong("gpipe_step", "the gradients are right", "the loss that the last stage returns is 1/3 of it", "divided already")
def still_averages_what_it_reports(comm, layer, inputs, targets, size):
    """The loss is divided, and the report divides once more."""
    loss = gpipe(comm, layer, inputs, targets, size)
    return loss and loss / micro_batches(inputs, size)


@wrong("gpipe_step", "gradient of stage 0 lacks micro-batches 0 and 1", "set to 0 again")
def clears_the_gradients_each_time(comm, layer, inputs, targets, size):
    """zero_grad before each backward: nothing accumulates, so nothing is too large."""
    return gpipe(comm, layer, inputs, targets, size, lambda y, t, ts: F.mse_loss(y, t), before=layer.zero_grad)


@wrong("gpipe_step", "micro-batches of 4, 4 and 2 rows", "gradient of stage 0 lacks micro-batch 2", "left out")
def drops_the_short_micro_batch(comm, layer, inputs, targets, size):
    """Whole micro-batches only, as drop_last would."""
    rows = len(inputs) // size * size
    return gpipe(comm, layer, inputs[:rows], targets[:rows], size)


@wrong("gpipe_step", "the last stage returns NoneType", "must return the loss")
def returns_no_loss(comm, layer, inputs, targets, size):
    """The gradients are right, and the loss is nowhere."""
    gpipe(comm, layer, inputs, targets, size)


# --- B: the tied table ---------------------------------------------------------------------------------------------


def pipeline(comm, table, layer, tokens, targets, size, each=lambda: None):
    """The step as it comes, without a sum of the table's gradients. `each` is done after each backward."""
    first, last = ends_of(comm)
    kept, loss = [], 0.0
    for x, target in zip(tokens.split(size), targets.split(size), strict=True):
        empty = torch.empty(len(x), layer.in_features, dtype=layer.weight.dtype)
        x = table[x] if first else comm.recv(empty, comm.rank - 1).requires_grad_()
        y = torch.tanh(layer(x))
        if last:
            y = F.cross_entropy(y @ table.T, target, reduction="sum") / len(targets)
            loss += y.item()
        else:
            comm.send(y, comm.rank + 1)
        kept.append((x, y))
    for x, y in kept:
        y.backward(None if last else comm.recv(torch.empty_like(y), comm.rank + 1))
        if not first:
            comm.send(x.grad, comm.rank - 1)
        each()
    return loss if last else None


def group_of_the_ends(comm):
    return comm.groups([[0, comm.size - 1], *([rank] for rank in range(1, comm.size - 1))], "tied")


def others_gradient(comm, table):
    """What the other end has, by two messages."""
    arriving, other = torch.empty_like(table), comm.size - 1 - comm.rank
    sending = comm.isend(table.grad.clone(), other)
    comm.recv(arriving, other)
    sending.wait()
    return arriving


@right("tied_step")
def two_messages(comm, table, layer, *args):
    """The ends send each other their gradients, and add."""
    loss = pipeline(comm, table, layer, *args)
    if table is not None:
        table.grad += others_gradient(comm, table)
    return loss


@right("tied_step")
def all_take_part(comm, table, layer, tokens, targets, size):
    """An all-reduce over all ranks, to which the middle ones add 0: right, at the price of more bytes."""
    loss = pipeline(comm, table, layer, tokens, targets, size)
    grad = torch.zeros(7, 5, dtype=layer.weight.dtype) if table is None else table.grad
    comm.all_reduce(grad, out=grad)
    return loss


@wrong("tied_step", "table on stage 0 has half the sum", "Two uses of one parameter add up")
def averages(comm, table, layer, *args):
    """The mean of the two gradients, as data parallelism would."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        table.grad = ends.all_reduce(table.grad) / 2
    return loss


@wrong("tied_step", "divided by 3, the number of stages", "undivided")
def averages_over_the_stages(comm, table, layer, *args):
    """The sum over {first, last}, divided by the number of ranks."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        table.grad = ends.all_reduce(table.grad) / comm.size
    return loss


@wrong("tied_step", "table on stage 0 has only its own gradient, as embedding", "other end has the sum", "or they part")
def sums_on_the_last_stage_alone(comm, table, layer, *args):
    """The first stage sends, the last one adds."""
    loss = pipeline(comm, table, layer, *args)
    if comm.rank == 0:
        comm.send(table.grad, comm.size - 1)
    elif table is not None:
        table.grad += comm.recv(torch.empty_like(table), 0)
    return loss


@wrong("tied_step", "table on stage 2 has only its own gradient, as head", "other end has the sum", "or they part")
def sums_on_the_first_stage_alone(comm, table, layer, *args):
    """The last stage sends, the first one adds."""
    loss = pipeline(comm, table, layer, *args)
    if comm.rank == 0:
        table.grad += comm.recv(torch.empty_like(table), comm.size - 1)
    elif table is not None:
        comm.send(table.grad, 0)
    return loss


@wrong("tied_step", "table on stage 0 has only the other end's gradient, as head", "added, and here it replaces")
def swaps(comm, table, layer, *args):
    """Each end takes the other's gradient in place of its own."""
    loss = pipeline(comm, table, layer, *args)
    if table is not None:
        table.grad = others_gradient(comm, table)
    return loss


@wrong("tied_step", "only its gradient as embedding, on both ends", "they agree, and the gradient as head is lost")
def broadcasts(comm, table, layer, *args):
    """The first stage's gradient on both: the copies stay equal."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        ends.broadcast(table.grad, 0, out=table.grad)
    return loss


@wrong("tied_step", "all_reduce is called, and what it returns is not in table.grad", "Assign its result, or take out=")
def drops_the_sum(comm, table, layer, *args):
    """all_reduce returns the sum and leaves its input alone."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        ends.all_reduce(table.grad)
    return loss


@wrong("tied_step", "deadlock", "rank 0 waits in all_reduce", "The stages between hold no table")
def all_reduces_over_all_ranks(comm, table, layer, *args):
    """An all-reduce over all ranks, which those between never join."""
    loss = pipeline(comm, table, layer, *args)
    if table is not None:
        comm.all_reduce(table.grad, out=table.grad)
    return loss


@wrong("tied_step", "as embedding 4 times, 2 times and once", "summed again after the next", "Sum once, at the end")
def sums_after_each_micro_batch(comm, table, layer, *args):
    """Inside the loop of backwards."""
    ends = group_of_the_ends(comm)
    each = (lambda: None) if table is None else lambda: ends.all_reduce(table.grad, out=table.grad)
    return pipeline(comm, table, layer, *args, each=each)


@wrong("tied_step", "table on stage 0 has 2 times the sum of both gradients", "summed again")
def sums_twice(comm, table, layer, *args):
    """Once by messages, and once more."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        for _ in range(2):
            ends.all_reduce(table.grad, out=table.grad)
    return loss


@wrong("tied_step", "layer.weight on stage 0 has the gradients of both ends' layers in it", "Only the table is")
def sums_the_layers_too(comm, table, layer, *args):
    """All parameters of both ends."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        for p in (table, *layer.parameters()):
            ends.all_reduce(p.grad, out=p.grad)
    return loss


@wrong("tied_step", "all_reduce is called, and what it returns is not in table.grad")
def averages_the_weights(comm, table, layer, *args):
    """The copies are made equal before the optimizer takes them apart."""
    loss, ends = pipeline(comm, table, layer, *args), group_of_the_ends(comm)
    if table is not None:
        table.data = ends.all_reduce(table.data) / 2
    return loss


# --- C: send and receive -------------------------------------------------------------------------------------------


class Messages:
    """Right: a send that is waited for when what it caused has come back."""

    def __init__(self, comm):
        self.comm, self.handles = comm, []

    def forward_recv(self, like):
        return self.comm.recv(torch.empty_like(like), self.comm.rank - 1)

    def forward_send(self, y):
        self.handles.append(self.comm.isend(y, self.comm.rank + 1))

    def backward_recv(self, like):
        return self.comm.recv(torch.empty_like(like), self.comm.rank + 1)

    def backward_send(self, grad):
        self.comm.send(grad, self.comm.rank - 1)

    def end(self):
        for handle in self.handles:
            handle.wait()


def one_f_one_b(comm, layer, inputs, targets, size, messages=Messages, warm_up=None, newest=False, tail=True):
    """Right, but for its messages, its warm-up, which micro-batch goes back and whether the last ones do."""
    first, last = ends_of(comm)
    inputs, targets, total = inputs.split(size), targets.split(size), targets.numel()
    warm_up = comm.size - 1 - comm.rank if warm_up is None else warm_up
    kept, losses, messages = [], [], messages(comm)
    for k in range(len(inputs) + (warm_up if tail else 0)):
        if k < len(inputs):
            x = inputs[k] if first else messages.forward_recv(inputs[k]).requires_grad_()
            y = torch.tanh(layer(x))
            if last:
                y = F.mse_loss(y, targets[k], reduction="sum") / total
                losses.append(y.item())
            else:
                messages.forward_send(y)
            kept.append((x, y))
        if k >= warm_up:
            x, y = kept.pop() if newest else kept.pop(0)
            y.backward(None if last else messages.backward_recv(y))
            if not first:
                messages.backward_send(x.grad)
    messages.end()
    return sum(losses) if last else None


@right("one_f_one_b_step")
def gradients_give_way(*args):
    """The gradient's send does not wait, the activation's does."""

    class Other(Messages):
        def forward_send(self, y):
            self.comm.send(y, self.comm.rank + 1)

        def backward_send(self, grad):
            self.handles.append(self.comm.isend(grad, self.comm.rank - 1))

    return one_f_one_b(*args, messages=Other)


@right("one_f_one_b_step")
def every_other_rank_gives_way(*args):
    """Ranks 1, 3, … send without waiting, the others as before."""

    class Parity(Messages):
        def forward_send(self, y):
            handle = self.comm.isend(y, self.comm.rank + 1)
            self.handles.append(handle) if self.comm.rank % 2 else handle.wait()

        def backward_send(self, grad):
            handle = self.comm.isend(grad, self.comm.rank - 1)
            self.handles.append(handle) if self.comm.rank % 2 else handle.wait()

    return one_f_one_b(*args, messages=Parity)


@right("one_f_one_b_step")
def nobody_waits_for_a_send(*args):
    """All sends are waited for at the end."""

    class Never(Messages):
        def backward_send(self, grad):
            self.handles.append(self.comm.isend(grad, self.comm.rank - 1))

    return one_f_one_b(*args, messages=Never)


@wrong("one_f_one_b_step", "deadlock", "All of them send first", "waits like a send", "after the receive")
def waits_at_once(*args):
    """isend, and wait() in the same line."""

    class AtOnce(Messages):
        def forward_send(self, y):
            self.comm.isend(y, self.comm.rank + 1).wait()

    return one_f_one_b(*args, messages=AtOnce)


@wrong("one_f_one_b_step", "deadlock", "rank 0 waits in recv from rank 1", "one must have its send under way")
def both_receive_first(*args):
    """Each send is put off until the next receive is over, on both sides of a cut."""

    class Later(Messages):
        put_off = None

        def receive(self, like, src, then):
            arrived = self.comm.recv(torch.empty_like(like), src)
            self.flush()
            return arrived

        def flush(self):
            if self.put_off:
                self.comm.send(*self.put_off)
            self.put_off = None

        def forward_recv(self, like):
            return self.receive(like, self.comm.rank - 1, None)

        def backward_recv(self, like):
            return self.receive(like, self.comm.rank + 1, None)

        def forward_send(self, y):
            self.put_off = y, self.comm.rank + 1

        def backward_send(self, grad):
            self.put_off = grad, self.comm.rank - 1

        def end(self):
            self.flush()

    return one_f_one_b(*args, messages=Later)


@wrong("one_f_one_b_step", "stage 0 holds 3 micro-batches at once", "where p - i = 2", "as in GPipe")
def gpipe_instead(comm, layer, inputs, targets, size):
    """All forwards first: no two sends meet, and memory grows with m."""
    return one_f_one_b(comm, layer, inputs, targets, size, warm_up=len(inputs.split(size)) - 1)


@wrong("one_f_one_b_step", "stage 0 holds 1 micro-batch at once", "up to p - i = 2 ahead", "the stages take turns")
def one_at_a_time(*args):
    """No warm-up: each send finds its receiver waiting."""
    return one_f_one_b(*args, warm_up=0)


@wrong("one_f_one_b_step", "layer.weight on stage 0 has no gradient", "A backward needs the gradient that")
def drops_the_gradient(comm, layer, inputs, targets, size):
    """No gradient crosses a cut: what is not sent cannot block."""
    first, last = ends_of(comm)
    losses = []
    for x, target in zip(inputs.split(size), targets.split(size), strict=True):
        x = x if first else comm.recv(torch.empty_like(x), comm.rank - 1)
        y = torch.tanh(layer(x))
        if last:
            loss = mean_over_the_batch(y, target, targets)
            loss.backward()
            losses.append(loss.item())
        else:
            comm.send(y, comm.rank + 1)
    return sum(losses) if last else None


@wrong("one_f_one_b_step", "rank 0 never calls wait() on 3 of its handles", "send to rank 1")
def never_waits(*args):
    """isend's handle is dropped."""

    class Dropped(Messages):
        def end(self):
            pass

    return one_f_one_b(*args, messages=Dropped)


@wrong("one_f_one_b_step", "rank 1 raised RuntimeError", "overwritten", "receive each into a tensor of its own")
def one_buffer_for_all(*args):
    """What arrives is received into the same tensor each time, which backward still needs."""

    class Reused(Messages):
        def forward_recv(self, like):
            if not hasattr(self, "buffer"):
                self.buffer = torch.empty_like(like)
            return self.comm.recv(self.buffer, self.comm.rank - 1)

    return one_f_one_b(*args, messages=Reused, warm_up=args[0].size - args[0].rank)


@wrong("one_f_one_b_step", "deadlock", "rank 0 has returned", "rank 1 waits in send to rank 0", "must come back")
def no_cool_down(*args):
    """Ends with the forwards."""
    return one_f_one_b(*args, tail=False)


@wrong("one_f_one_b_step", "layer.weight on stage 0 is no sum of the micro-batches' gradients", "its own micro-batch's")
def the_newest_goes_back(*args):
    """kept.pop() instead of kept.pop(0): another micro-batch's gradient."""
    return one_f_one_b(*args, newest=True)


@wrong("one_f_one_b_step", "deadlock", "rank 0 waits in recv from rank 1", "has another tag")
def tags_on_one_side(*args):
    """Gradients are sent with a tag of their own, and received without."""

    class Tagged(Messages):
        def backward_send(self, grad):
            self.comm.send(grad, self.comm.rank - 1, tag=1)

    return one_f_one_b(*args, messages=Tagged)
