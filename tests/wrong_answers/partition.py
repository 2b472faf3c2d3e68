"""Wrong answers to exercise 04, a partition that meets a memory limit."""

from itertools import combinations, pairwise

from . import right, wrong

CHECKS = "pcourse.checks.partition"
EXERCISE = "04_partition"


def stage_bytes(pieces, in_flight, tied):
    """Right."""
    parameters = sum(piece.parameters for piece in pieces)
    if {"embedding", "head"} <= {piece.name for piece in pieces}:
        parameters -= tied
    return 16 * parameters + in_flight * sum(piece.activations for piece in pieces)


def best_cut(pieces, stages, fits, cost, join=max):
    """Right, for any `fits(stage, held)` and any `cost(stage, held)`."""
    best = {0: (0, [])}
    for stage in range(stages):
        extended = {}
        for start, (value, ranges) in best.items():
            for stop in range(start + 1, len(pieces) + 1):
                held = pieces[start:stop]
                joined = join(value, cost(stage, held))
                if fits(stage, held) and (stop not in extended or joined < extended[stop][0]):
                    extended[stop] = joined, [*ranges, range(start, stop)]
        best = extended
    return best[len(pieces)][1] if len(pieces) in best else None


def cut_by_bytes(pieces, stages, limit, bytes_of):
    """The fastest cut by `bytes_of(stage, held)`."""
    return best_cut(pieces, stages, lambda stage, held: bytes_of(stage, held) <= limit, flops)


def flops(stage, held):
    return sum(piece.flops for piece in held)


# --- the bytes of a stage ------------------------------------------------------------------------------------------


@wrong("stage_bytes", "one micro-batch's activations are in it, and", "are in flight at the peak")
def in_flight_ignored(pieces, in_flight, tied):
    """Counts the activations of one micro-batch."""
    return stage_bytes(pieces, 1, tied)


@wrong("stage_bytes", "in_flight multiplies the model states too", "micro-batches share them")
def states_for_each_micro_batch(pieces, in_flight, tied):
    """Multiplies everything by in_flight."""
    return in_flight * stage_bytes(pieces, 1, tied)


@wrong("stage_bytes", "the activations are not in it")
def states_alone(pieces, in_flight, tied):
    """Forgets the activations."""
    return stage_bytes(pieces, 0, tied)


@wrong("stage_bytes", "only the parameters themselves are in it", "its gradient and AdamW's two numbers: 16 bytes")
def parameters_alone(pieces, in_flight, tied):
    """Forgets gradients and optimizer state."""
    return stage_bytes(pieces, 0, tied) / 4 + in_flight * sum(piece.activations for piece in pieces)


@wrong("stage_bytes", "12 bytes a parameter: its gradient is missing")
def no_gradients(pieces, in_flight, tied):
    """Forgets the gradients."""
    return stage_bytes(pieces, 0, tied) * 3 / 4 + in_flight * sum(piece.activations for piece in pieces)


@wrong("stage_bytes", "8 bytes a parameter", "AdamW's numbers, are missing")
def no_optimizer(pieces, in_flight, tied):
    """Forgets AdamW's two numbers."""
    return stage_bytes(pieces, 0, tied) / 2 + in_flight * sum(piece.activations for piece in pieces)


@wrong("stage_bytes", "the tied matrix is counted twice", "embedding and head share it")
def tied_matrix_counted_twice(pieces, in_flight, tied):
    """Both ends on one stage, and the matrix in both."""
    return stage_bytes(pieces, in_flight, 0)


@wrong("stage_bytes", "the tied matrix is taken away from a stage with", "a whole copy")
def tied_matrix_taken_from_one_end(pieces, in_flight, tied):
    """A stage with the head alone is said to hold no matrix, as it were the embedding's."""
    away = tied if any(piece.name == "head" for piece in pieces) else 0
    return stage_bytes(pieces, in_flight, 0) - 16 * away


@wrong("stage_bytes", "the tied matrix is taken away from a stage with neither end")
def tied_matrix_always_taken_away(pieces, in_flight, tied):
    """The shared matrix is taken away wherever."""
    return stage_bytes(pieces, in_flight, 0) - 16 * tied


@wrong("stage_bytes", "of the tied matrix one byte a number is taken away, and each number is 16 bytes")
def numbers_taken_for_bytes(pieces, in_flight, tied):
    """Takes numbers away from bytes."""
    both = {"embedding", "head"} <= {piece.name for piece in pieces}
    return stage_bytes(pieces, in_flight, 0) - (tied if both else 0)


@wrong("stage_bytes", "it gives None: is a `return` missing?")
def no_return(pieces, in_flight, tied):
    """Forgets to return."""
    stage_bytes(pieces, in_flight, tied)


@wrong("stage_bytes", "it changes the list that it was given")
def consumes_its_pieces(pieces, in_flight, tied):
    """Empties the caller's list."""
    total = stage_bytes(pieces, in_flight, tied)
    pieces.clear()
    return total


# --- the cut: whole ------------------------------------------------------------------------------------------------


@wrong("cut", "is on no stage", "every piece has one stage, else another, smaller model is trained")
def remainder_lost(pieces, stages, in_flight, tied, limit):
    """As many pieces on each stage, rounded down: those left over are on none (Megatron-LM #468)."""
    each = len(pieces) // stages
    return [range(i * each, (i + 1) * each) for i in range(stages)]


@wrong("cut", "on no stage", "a range ends before its stop")
def last_of_each_stage_lost(pieces, stages, in_flight, tied, limit):
    """Takes a range's end for its last piece."""
    ranges = best_cut(pieces, stages, lambda stage, held: True, flops)
    return [*(range(held.start, held.stop - 1) if len(held) > 1 else held for held in ranges[:-1]), ranges[-1]]


@wrong("cut", "is on two stages", "the next stage begins where the one before it ends")
def layers_twice(pieces, stages, in_flight, tied, limit):
    """Each stage begins with the last piece of the one before."""
    ranges = best_cut(pieces, stages, lambda stage, held: True, flops)
    return [range(max(held.start - 1, 0), held.stop) for held in ranges]


@wrong("cut", "a stage holds neighbours", "in the order of the model")
def round_robin(pieces, stages, in_flight, tied, limit):
    """Deals the pieces out like cards."""
    return [list(range(i, len(pieces), stages)) for i in range(stages)]


@wrong("cut", "is empty in", "a rank would have no work")
def empty_stages(pieces, stages, in_flight, tied, limit):
    """Fills each stage as far as it goes, so that the last get nothing."""
    ranges, start = [], 0
    for stage in range(stages):
        stop = start
        while stop < len(pieces) and stage_bytes(pieces[start : stop + 1], in_flight[stage], tied) <= limit:
            stop += 1
        ranges.append(range(start, stop))
        start = stop
    return ranges if start == len(pieces) else None


@wrong("cut", "stages, and there are")
def one_stage_too_many(pieces, stages, in_flight, tied, limit):
    """As many cuts as stages."""
    return best_cut(pieces, min(stages + 1, len(pieces)), lambda stage, held: True, flops)


@wrong("cut", "it must be a list of ranges")
def where_to_cut(pieces, stages, in_flight, tied, limit):
    """Gives the places of the cuts and not the stages."""
    ranges = cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, in_flight[stage], tied))
    return ranges and [held.stop for held in ranges]


# --- the cut: it fits ----------------------------------------------------------------------------------------------


@wrong("cut", "and the limit is", "it is the fastest cut where memory is no matter")
def limit_ignored(pieces, stages, in_flight, tied, limit):
    """The fastest cut, whatever it holds; but None where nothing fits."""
    fitting = cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, in_flight[stage], tied))
    return fitting and best_cut(pieces, stages, lambda stage, held: True, flops)


@wrong("cut", "no cut fits here, and it gives one", "Then it must give None")
def never_none(pieces, stages, in_flight, tied, limit):
    """Where nothing fits it gives the fastest cut of all."""
    fitting = cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, in_flight[stage], tied))
    return fitting or best_cut(pieces, stages, lambda stage, held: True, flops)


@wrong("cut", "it looks as if every stage had one micro-batch in flight")
def cut_with_one_in_flight(pieces, stages, in_flight, tied, limit):
    """Weighs every stage with one micro-batch."""
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, 1, tied))


@wrong("cut", "in_flight were turned round: stage 0 is the first of it")
def in_flight_turned_round(pieces, stages, in_flight, tied, limit):
    """Takes the last stage for the one that holds the most."""
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, in_flight[-1 - stage], tied))


@wrong("cut", "the in_flight of the stage after it")
def in_flight_of_the_next_stage(pieces, stages, in_flight, tied, limit):
    """Counts stages from 1: the last has nothing in flight."""
    held_by = [*in_flight[1:], 0]
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, held_by[stage], tied))


@wrong("cut", "as if every stage had as many micro-batches in flight as stage 0")
def in_flight_of_stage_0(pieces, stages, in_flight, tied, limit):
    """Every stage as if it were the first."""
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, in_flight[0], tied))


@wrong("cut", "as if the model states alone were weighed")
def cut_by_states_alone(pieces, stages, in_flight, tied, limit):
    """Weighs no activations."""
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: stage_bytes(held, 0, tied))


@wrong("cut", "the mean of the stages is below it, but each device has its own memory")
def limit_on_the_mean(pieces, stages, in_flight, tied, limit):
    """The limit holds for the mean of the stages: of the cuts that meet it so, the fastest."""

    def pair(stage, held):
        return flops(stage, held), stage_bytes(held, in_flight[stage], tied)

    found = []
    for cuts in combinations(range(1, len(pieces)), stages - 1) if len(pieces) < 12 else ():
        ranges = [range(*run) for run in pairwise((0, *cuts, len(pieces)))]
        weights = [pair(stage, pieces[held.start : held.stop]) for stage, held in enumerate(ranges)]
        if sum(size for _, size in weights) <= stages * limit:
            found.append((max(work for work, _ in weights), -max(size for _, size in weights), cuts, ranges))
    return min(found)[3] if found else None


# --- the cut: it is the fastest ------------------------------------------------------------------------------------


@wrong("cut", "it shares out the number of pieces, and pieces do not take the same time")
def balance_by_count(pieces, stages, in_flight, tied, limit):
    """As many pieces on each stage."""
    edges = [round(i * len(pieces) / stages) for i in range(stages + 1)]
    return [range(*edge) for edge in pairwise(edges)]


@wrong("cut", "each stage is filled until the next piece does not fit", "the goal is the slowest stage")
def greedy_fill(pieces, stages, in_flight, tied, limit):
    """Fills each stage to the limit, but leaves a piece for each stage to come."""
    ranges, start = [], 0
    for stage in range(stages):
        stop = start + 1
        while (
            stop < len(pieces) - (stages - 1 - stage)
            and stage_bytes(pieces[start : stop + 1], in_flight[stage], tied) <= limit
        ):
            stop += 1
        if stage_bytes(pieces[start:stop], in_flight[stage], tied) > limit:
            return None
        ranges.append(range(start, stop))
        start = stop
    return ranges if start == len(pieces) else None


@wrong("cut", "its fullest stage is as small as can be, but memory is the limit here and not the goal")
def balance_by_memory(pieces, stages, in_flight, tied, limit):
    """The leanest cut, not the fastest that fits."""

    def size(stage, held):
        return stage_bytes(held, in_flight[stage], tied)

    return best_cut(pieces, stages, lambda stage, held: size(stage, held) <= limit, size)


@wrong("cut", "the slowest stage alone sets the pace")
def least_squares(pieces, stages, in_flight, tied, limit):
    """The evenest cut: the least sum of squares."""
    return best_cut(
        pieces, stages, lambda stage, held: stage_bytes(held, in_flight[stage], tied) <= limit,
        lambda stage, held: flops(stage, held) ** 2, lambda a, b: a + b,
    )  # fmt: skip


@wrong("cut", "a stage that holds exactly the limit fits")
def below_the_limit(pieces, stages, in_flight, tied, limit):
    """Below the limit, and not at most."""
    return best_cut(pieces, stages, lambda stage, held: stage_bytes(held, in_flight[stage], tied) < limit, flops)


@wrong("cut", "it gives None", "the fastest cut of all does not fit, but a slower one does")
def gives_up(pieces, stages, in_flight, tied, limit):
    """Finds the fastest cut first, and gives up if it does not fit."""
    ranges = best_cut(pieces, stages, lambda stage, held: True, flops)
    if ranges is None:
        return None
    sizes = [stage_bytes(pieces[held.start : held.stop], n, tied) for held, n in zip(ranges, in_flight, strict=True)]
    return ranges if max(sizes) <= limit else None


@wrong("cut", "it gives None", "the tied matrix is counted twice where one stage holds both ends")
def weighs_pieces_one_by_one(pieces, stages, in_flight, tied, limit):
    """Weighs each piece once: so a stage with both ends has the tied matrix twice."""
    each = [[stage_bytes([piece], n, tied) for piece in pieces] for n in in_flight]
    index = {id(piece): i for i, piece in enumerate(pieces)}
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: sum(each[stage][index[id(piece)]] for piece in held))


@wrong("cut", "as if in_flight multiplied the model states too")
def cut_with_states_multiplied(pieces, stages, in_flight, tied, limit):
    """Multiplies everything by in_flight."""
    return cut_by_bytes(pieces, stages, limit, lambda stage, held: in_flight[stage] * stage_bytes(held, 1, tied))


@wrong("cut", "no answer after", "Does it try every cut?", "extends one of fewer pieces")
def tries_every_cut(pieces, stages, in_flight, tied, limit):
    """Right, for small models: there are C(n - 1, p - 1) cuts."""
    found = []
    for cuts in combinations(range(1, len(pieces)), stages - 1):
        ranges = [range(*run) for run in pairwise((0, *cuts, len(pieces)))]
        parts = [pieces[held.start : held.stop] for held in ranges]
        if all(stage_bytes(part, n, tied) <= limit for part, n in zip(parts, in_flight, strict=True)):
            found.append((max(flops(0, part) for part in parts), cuts, ranges))
    return min(found)[2] if found else None


@right("cut")
def halves_the_time(pieces, stages, in_flight, tied, limit):
    """Searches for the time: within a given one, each stage reaches as far as it may. Lists of indices, not ranges."""

    def within(time):
        runs, start = [], 0
        for stage in range(stages):
            stop, most = start, len(pieces) - (stages - 1 - stage)
            while stop < most and flops(0, pieces[start : stop + 1]) <= time and (
                stage_bytes(pieces[start : stop + 1], in_flight[stage], tied) <= limit
            ):  # fmt: skip
                stop += 1
            runs.append(list(range(start, stop)))
            start = stop
        return runs if start == len(pieces) and all(runs) else None

    times = sorted({flops(0, pieces[i:j]) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1)})
    low, high = 0, len(times) - 1
    if within(times[high]) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if within(times[middle]) else (middle + 1, high)
    return within(times[low])


@right("stage_bytes")
def piece_by_piece(pieces, in_flight, tied):
    """Adds up piece by piece, and takes the shared matrix away at the end."""
    total = sum(16 * piece.parameters + in_flight * piece.activations for piece in pieces)
    return total - 16 * tied * (pieces[0].name == "embedding" and pieces[-1].name == "head")
