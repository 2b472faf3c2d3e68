"""Wrong answers to exercise 02. Those of a whole all-reduce use the right phases unless their fault is in one."""

import torch

from pcourse.split import shard_sizes

from . import right, wrong

CHECKS = "pcourse.checks.collectives"
EXERCISE = "02_ring_all_reduce"


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def exchange(comm, outgoing, arriving):
    """One right step of the ring: send to the right while receiving from the left."""
    right, left = neighbours(comm)
    sending = comm.isend(outgoing, right)
    comm.recv(arriving, left)
    sending.wait()
    return arriving


def reduce_scatter(comm, chunks, steps=None):
    """Right, for as many steps as are due."""
    for step in range(comm.size - 1 if steps is None else steps):
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        mine += exchange(comm, chunks[(comm.rank - 1 - step) % comm.size], torch.empty_like(mine))


def all_gather(comm, chunks):
    """Right."""
    for step in range(comm.size - 1):
        exchange(comm, chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - 1 - step) % comm.size])


def flat_chunks(comm, x):
    result = x.clone(memory_format=torch.contiguous_format)
    return result, result.view(-1).split(shard_sizes(x.numel(), comm.size))


@right("ring_reduce_scatter")
def one_rank_receives_first(comm, chunks):
    """Blocking calls, and no deadlock: rank 0 receives first, and so the chain comes loose."""
    right, left = neighbours(comm)
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        arriving = torch.empty_like(mine)
        if comm.rank == 0:
            comm.recv(arriving, left)
        comm.send(chunks[(comm.rank - 1 - step) % comm.size], right)
        if comm.rank != 0:
            comm.recv(arriving, left)
        mine += arriving


@right("ring_all_reduce")
def skips_empty_messages(comm, x):
    """A chunk without elements need not be sent."""
    result, chunks = flat_chunks(comm, x)
    right, left = neighbours(comm)
    for step in range(2 * (comm.size - 1)):
        outgoing = chunks[(comm.rank - 1 - step) % comm.size]
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        arriving = torch.empty_like(mine)
        handles = [comm.isend(outgoing, right)] if outgoing.numel() else []
        handles += [comm.irecv(arriving, left)] if arriving.numel() else []
        for handle in handles:
            handle.wait()
        mine.copy_(arriving) if step >= comm.size - 1 else mine.add_(arriving)
    return result


# --- the first phase -----------------------------------------------------------------------------------------------


@wrong("ring_reduce_scatter", "ends with the sum of chunk 1", "the contract gives it chunk 0", "index is off")
def own_chunk_first(comm, chunks):
    """Sends chunk r first, as many textbooks do: the finished sum of chunk r + 1 ends on rank r."""
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 1 - step) % comm.size]
        mine += exchange(comm, chunks[(comm.rank - step) % comm.size], torch.empty_like(mine))


@wrong("ring_reduce_scatter", "lacks this rank's own x", "must be added", "replaces")
def receives_into_its_own_chunk(comm, chunks):
    """What arrives overwrites the rank's own numbers."""
    for step in range(comm.size - 1):
        exchange(comm, chunks[(comm.rank - 1 - step) % comm.size], chunks[(comm.rank - 2 - step) % comm.size])


@wrong("ring_reduce_scatter", "puts a new tensor into the list", "in place")
def not_in_place(comm, chunks):
    """chunks[c] = chunks[c] + arriving: right here, and no use to the whole, whose result the chunks are views of."""
    for step in range(comm.size - 1):
        mine = (comm.rank - 2 - step) % comm.size
        outgoing = chunks[(comm.rank - 1 - step) % comm.size]
        chunks[mine] = chunks[mine] + exchange(comm, outgoing, torch.empty_like(chunks[mine]))


@wrong("ring_reduce_scatter", "still this rank's own x", "messages sent: 1, where 2 steps")
def one_step_too_few(comm, chunks):
    """range(N - 2): the ring does not go round."""
    reduce_scatter(comm, chunks, steps=max(0, comm.size - 2))


@wrong("ring_reduce_scatter", "sends 3 messages", "takes 2 steps")
def one_step_too_many(comm, chunks):
    """range(N): the step too many adds a whole sum to a chunk that nobody needs, and costs a message."""
    reduce_scatter(comm, chunks, steps=comm.size if comm.size > 1 else 0)


@wrong("ring_reduce_scatter", "deadlock", "rank 0 waits in send to rank 1", "send returns only when", "isend")
def both_send_first(comm, chunks):
    """Every rank sends before it receives."""
    right, left = neighbours(comm)
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        comm.send(chunks[(comm.rank - 1 - step) % comm.size], right)
        mine += comm.recv(torch.empty_like(mine), left)


@wrong("ring_reduce_scatter", "deadlock", "rank 0 waits in recv from rank 2", "Nobody sends", "no send to rank 0")
def both_receive_first(comm, chunks):
    """Every rank receives before it sends."""
    right, left = neighbours(comm)
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        arriving = comm.recv(torch.empty_like(mine), left)
        comm.isend(chunks[(comm.rank - 1 - step) % comm.size], right).wait()
        mine += arriving


@wrong("ring_reduce_scatter", "rank 0 sends to rank 2", "right neighbour")
def straight_to_the_owner(comm, chunks):
    """Each chunk goes to its owner in one hop: the same bytes, but every pair of ranks needs a link."""
    for shift in range(1, comm.size):
        owner, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
        sending = comm.isend(chunks[owner], owner)
        chunks[comm.rank] += comm.recv(torch.empty_like(chunks[comm.rank]), source)
        sending.wait()


@wrong("ring_reduce_scatter", "never calls wait() on 2 of its handles", "send to rank 1")
def does_not_wait_for_its_sends(comm, chunks):
    """isend's handle is dropped."""
    right, left = neighbours(comm)
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        comm.isend(chunks[(comm.rank - 1 - step) % comm.size], right)
        mine += comm.recv(torch.empty_like(mine), left)


@wrong("ring_reduce_scatter", "never calls wait()", "recv from rank 2", "may not have arrived")
def reads_before_it_has_arrived(comm, chunks):
    """irecv's buffer is added at once."""
    right, left = neighbours(comm)
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 2 - step) % comm.size]
        arriving = torch.zeros_like(mine)
        sending = comm.isend(chunks[(comm.rank - 1 - step) % comm.size], right)
        comm.irecv(arriving, left)
        sending.wait()
        mine += arriving


# --- the second phase ----------------------------------------------------------------------------------------------


@wrong("ring_all_gather", "rank 2's values from before they were finished", "own chunk r first")
def gathers_off_by_one(comm, chunks):
    """Sends chunk r + 1 first: right after a reduce-scatter that ends there, wrong after this one."""
    for step in range(comm.size - 1):
        exchange(comm, chunks[(comm.rank + 1 - step) % comm.size], chunks[(comm.rank - step) % comm.size])


@wrong("ring_all_gather", "plus what lay there before", "replaces")
def adds_in_the_all_gather(comm, chunks):
    """The first phase's += again."""
    for step in range(comm.size - 1):
        mine = chunks[(comm.rank - 1 - step) % comm.size]
        mine += exchange(comm, chunks[(comm.rank - step) % comm.size], torch.empty_like(mine))


@wrong("ring_all_gather", "chunk 1 on rank 0 holds what belongs in chunk 2", "index is off")
def own_chunk_again_and_again(comm, chunks):
    """Sends its own chunk in every step, so that only the left neighbour's arrives, N - 1 times."""
    for step in range(comm.size - 1):
        exchange(comm, chunks[comm.rank], chunks[(comm.rank - 1 - step) % comm.size])


@wrong("ring_all_gather", "chunk 1 on rank 0 was never filled", "messages sent: 1, where 2 steps")
def gathers_one_step_too_few(comm, chunks):
    """range(N - 2)."""
    for step in range(comm.size - 2):
        exchange(comm, chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - 1 - step) % comm.size])


# --- the whole -----------------------------------------------------------------------------------------------------


@wrong("ring_all_reduce", "divided by 3", "a mean, where the contract asks for the sum")
def mean_instead_of_sum(comm, x):
    """Divides by the number of ranks."""
    result, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return result / comm.size


@wrong("ring_all_reduce", "the last 3 of 27 elements are not summed", "drop the tail")
def drops_the_tail(comm, x):
    """Chunks by floor division: the last S mod N elements take no part."""
    result = x.clone(memory_format=torch.contiguous_format)
    size = x.numel() // comm.size
    chunks = [result.view(-1)[c * size : (c + 1) * size] for c in range(comm.size)]
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return result


@wrong("ring_all_reduce", "x itself was changed in place", "work on a copy")
def reduces_in_place_into_the_input(comm, x):
    """The chunks are views of the caller's tensor."""
    chunks = x.reshape(-1).split(shard_sizes(x.numel(), comm.size))
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return torch.cat(chunks).view(x.shape)


@wrong("ring_all_reduce", "calls comm.all_reduce", "built from isend and irecv")
def calls_all_reduce(comm, x):
    """Lets the library do it."""
    return comm.all_reduce(x)


@wrong("ring_all_reduce", "sends 288 bytes, and the ring needs 192", "whole x goes round", "one chunk")
def gathers_everything_then_adds(comm, x):
    """Passes whole tensors round the ring and adds them: right, but (N - 1)S bytes."""
    passing = x.clone(memory_format=torch.contiguous_format)
    total = {comm.rank: passing}
    for step in range(1, comm.size):
        passing = exchange(comm, passing, torch.empty_like(passing))
        total[(comm.rank - step) % comm.size] = passing
    return sum(total[rank] for rank in range(comm.size))


@wrong("ring_all_reduce", "x[5, 4], a transposed view", "raised RuntimeError: view size is not compatible")
def views_a_non_contiguous_input(comm, x):
    """view(-1) of a transposed tensor."""
    result = x.view(-1).clone()
    chunks = result.split(shard_sizes(x.numel(), comm.size))
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return result.view(x.shape)


@wrong("ring_all_reduce", "4 ranks, x[3]", "raised IndexError")
def cuts_with_torch_chunk(comm, x):
    """torch.chunk returns fewer pieces than ranks for some lengths."""
    result = x.clone(memory_format=torch.contiguous_format)
    chunks = result.view(-1).chunk(comm.size)
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return result


@wrong("ring_all_reduce", "do you pad?", "[7, 7, 7, 6]")
def pads(comm, x):
    """Pads to a multiple of N: right, but the padding is sent too."""
    size = -(-x.numel() // comm.size)
    padded = x.new_zeros(size * comm.size)
    padded[: x.numel()] = x.reshape(-1)
    chunks = padded.split(size) if size else [padded] * comm.size
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return padded[: x.numel()].view(x.shape)


@wrong("ring_all_reduce", "returns shape [20]", "the shape of x, [4, 5]")
def forgets_the_shape(comm, x):
    """Returns the flat buffer."""
    result, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return result.view(-1)


@wrong("ring_all_reduce", "returns chunk 0 alone", "all-gather is missing")
def forgets_the_all_gather(comm, x):
    """A reduce-scatter."""
    _, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    return chunks[comm.rank]


@wrong("ring_all_reduce", "only chunk 0, this rank's own, is the sum on rank 0", "all-gather does not bring")
def returns_after_the_first_phase(comm, x):
    """Only the first half, whole buffer."""
    result, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    return result


@wrong("ring_all_reduce", "still this rank's own x", "puts a new tensor into the list")
def new_tensors_in_the_list(comm, x):
    """chunks[c] = chunks[c] + arriving puts a new tensor into the list, and the result never hears of it."""
    result, chunks = flat_chunks(comm, x)
    chunks = [chunk.clone() for chunk in chunks]
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return result


@wrong("ring_all_reduce", "counts rank 0's x 2 times")
def adds_its_own_twice(comm, x):
    """Starts the sum at x and then adds the all-reduced x."""
    result, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return x + result


@wrong("ring_all_reduce", "differ in the last bits", "summed once, by one rank")
def every_rank_adds_in_its_own_order(comm, x):
    """All messages are right, but the sum is made anew on every rank, from its own x on: other bits on other ranks."""
    result, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)
    return (result - x) + x


@wrong("ring_all_reduce", "returns NoneType", "`return`")
def forgets_to_return(comm, x):
    """No return."""
    _, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks)
    all_gather(comm, chunks)


@wrong("ring_all_reduce", "1 rank", "rank 0 has no peer 0")
def sends_to_itself(comm, x):
    """max(1, N - 1) steps: one rank alone sends to itself."""
    result, chunks = flat_chunks(comm, x)
    reduce_scatter(comm, chunks, steps=max(1, comm.size - 1))
    all_gather(comm, chunks)
    return result
