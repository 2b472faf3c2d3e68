"""What must be true of a schedule, checked without running it: whole, in order, and free of deadlock.

Deadlock is looked for in a model of the channels, not by luck. A channel leads from one stage to another and carries
activations or gradients, in the order in which they are sent. A send is a rendezvous: it is over when its receive has
been posted. A stage sends ahead by one: it starts a send at once if the one before it on that channel is over, and
waits for that otherwise. Whoever waits, waits for good in this model, if the others cannot go on: so what passes here
passes with any speeds, as a stage's next step never depends on time.
"""

from __future__ import annotations

from collections import defaultdict

from pcourse.parallel.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Schedule,
)


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message says which stage, which micro-batch, and why."""


def check_schedule(schedule: Schedule) -> None:
    """Raises ScheduleError where a step is missing, done twice or too early, or where the stages would deadlock."""
    if len(schedule.orders) != schedule.stages:
        raise ScheduleError(f"there are orders for {len(schedule.orders)} stages and there must be {schedule.stages}")
    for stage in range(schedule.stages):
        _check_whole(schedule, stage)
    _check_channels(schedule)


def peak_in_flight(schedule: Schedule, stage: int) -> float:
    """The most micro-batches whose activations `stage` holds at once, a chunk counting 1/v.

    A chunk holds them from its forward to the end of its weight gradient.
    """
    held = peak = 0
    for action in schedule.orders[stage]:
        held += (action.kind == FORWARD) - (action.kind in (BACKWARD, BACKWARD_WEIGHT))
        peak = max(peak, held)
    return peak / schedule.chunks


def _check_whole(schedule: Schedule, stage: int) -> None:
    """Every chunk sees every micro-batch once forward and once backward, in that order."""
    done: set[Action] = set()
    for action in schedule.orders[stage]:
        kind, k, c = action
        known = kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        if not known or not 0 <= k < schedule.micro_batches or not 0 <= c < schedule.chunks:
            raise ScheduleError(
                f"stage {stage}: there is no {kind} of micro-batch {k}{_chunk(schedule, c)}; micro-batches are 0 to "
                f"{schedule.micro_batches - 1}"
            )
        twice = {action, Action(BACKWARD, k, c)} if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) else {action}
        if twice & done:
            raise ScheduleError(f"stage {stage}: {kind} of micro-batch {k}{_chunk(schedule, c)} is done twice")
        first = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}.get(kind)
        if first and Action(first, k, c) not in done:
            raise ScheduleError(
                f"stage {stage}: {kind} of micro-batch {k}{_chunk(schedule, c)} comes before its {first}"
            )
        if missing := _missing_beside(schedule, stage, action, done):
            raise ScheduleError(
                f"stage {stage}: {kind} of micro-batch {k}{_chunk(schedule, c)} comes before its {missing.kind} in "
                f"chunk {missing.chunk} of the same stage"
            )
        done.add(action)
    for c in range(schedule.chunks):
        for k in range(schedule.micro_batches):
            split = Action(BACKWARD_INPUT, k, c) in done
            for kind in (FORWARD, BACKWARD_WEIGHT if split else BACKWARD):
                if Action(kind, k, c) not in done:
                    raise ScheduleError(f"stage {stage}: micro-batch {k}{_chunk(schedule, c)} has no {kind}")


def _missing_beside(schedule: Schedule, stage: int, action: Action, done: set[Action]) -> Action | None:
    """What `action` needs of the neighbouring chunk, where that is on the same stage, and what has not been done."""
    kind, k, c = action
    source = schedule.source(stage, action)
    if source is None or schedule.holder(source)[0] != stage:
        return None
    kinds = (FORWARD,) if kind == FORWARD else (BACKWARD, BACKWARD_INPUT)
    needed = [Action(kind, k, schedule.holder(source)[1]) for kind in kinds]
    return None if done.intersection(needed) else needed[0]


def _check_channels(schedule: Schedule) -> None:
    """Walk all stages as far as they go; whoever is left over is in a deadlock."""
    sent, posted = defaultdict(list), defaultdict(list)  # channel -> its messages, in order
    at = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(schedule.programs):
            while at[stage] < len(program) and not _blocker(schedule, stage, program[at[stage]], sent, posted):
                _move(schedule, stage, program[at[stage]], sent, posted)
                at[stage] += 1
                moved = True
    stuck = [(i, program[at[i]]) for i, program in enumerate(schedule.programs) if at[i] < len(program)]
    if stuck:
        waits = [f"stage {i} before {_words(a)}: {_blocker(schedule, i, a, sent, posted)}" for i, a in stuck]
        raise ScheduleError(f"deadlock: {'; '.join(waits)}")


def _move(schedule: Schedule, stage: int, action: Action, sent, posted) -> None:
    """A message started or awaited; both ends of a channel must agree which one comes as its n-th."""
    if action.kind not in (SEND_ACTIVATION, SEND_GRADIENT, RECV_ACTIVATION, RECV_GRADIENT):
        return
    message = schedule.message(stage, action)
    sending = action.kind in (SEND_ACTIVATION, SEND_GRADIENT)
    ours, theirs = (sent, posted) if sending else (posted, sent)
    number = len(ours[message.channel])
    ours[message.channel].append(message)
    if number < len(theirs[message.channel]) and theirs[message.channel][number] != message:
        first, second = sent[message.channel][number], posted[message.channel][number]
        raise ScheduleError(
            f"stages {message.source} and {message.target} do not agree which {message.what} comes as number {number}: "
            f"micro-batch {first.micro_batch} is sent, micro-batch {second.micro_batch} expected"
        )


def _blocker(schedule: Schedule, stage: int, action: Action, sent, posted) -> str:
    """What `action` waits for, in words; empty if it can go on."""
    if action.kind in (SEND_ACTIVATION, SEND_GRADIENT):
        message = schedule.message(stage, action)
        if len(posted[message.channel]) < len(sent[message.channel]):
            return f"stage {message.target} has not posted the receive of the {message.what} sent before"
    elif needed := schedule.needs(stage, action):
        message = schedule.message(stage, needed)
        if posted[message.channel].index(message) >= len(sent[message.channel]):
            return f"stage {message.source} has not sent the {message.what} of micro-batch {message.micro_batch}"
    return ""


def _words(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.micro_batch}"


def _chunk(schedule: Schedule, chunk: int) -> str:
    return f" in chunk {chunk}" if schedule.chunks > 1 else ""
