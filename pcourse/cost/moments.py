"""One rank's memory through a training step, moment by moment, by formula.

The walk goes by the rank's schedule. A forward pass adds what it keeps, part by part (`cost.activations`); a backward
pass, from the last part to the first, runs again what is recomputed, and frees. Beside that stands at each moment what
is temporary (`cost.temporary`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import NamedTuple

from pcourse.config import BYTES, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.activations import Run, Sizes, kept_by_embedding, kept_by_head, kept_by_layer, sizes
from pcourse.cost.temporary import Passing, gathered, passing, tied_gradient, unreduced
from pcourse.cost.units import ENDS, TIED, units
from pcourse.parallel.partition import Part, stages_of
from pcourse.parallel.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
)
from pcourse.split import micro_batches


class Moment(NamedTuple):
    """A moment of `action`, in a part of a piece: what is `kept` for backward, and what is `temporary`, in bytes."""

    action: Action
    piece: str
    part: str
    kept: int
    temporary: int
    by_part: Counter  # what is kept, by (piece, part); it changes as the walk goes on
    in_flight: float  # micro-batches of which something is kept, a chunk of v counting 1/v
    with_gradient: frozenset[str]  # units


class PieceMemory(NamedTuple):
    name: str
    runs: tuple[Run, ...]
    passing: dict[str, Passing]

    def takes(self, part: str) -> Passing:
        return self.passing.get(part, Passing())


class Walk:
    """The moments of a step, in their order, up to the optimizer's."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int = 0):
        self.model, self.parallel, self.stage = model, parallel, parallel.stage_of(rank)
        self.schedule, parts = stages_of(model, parallel, train)
        self.held = units(model, parallel, train, rank)
        self.sizes = sizes_on(model, parallel, train, rank)
        self.width = BYTES[model.dtype]
        places = self.schedule.places(self.stage)
        self.pieces = cache(lambda chunk, own: tuple(pieces_of(parts[places[chunk]], model, parallel, own)))

    def __iter__(self) -> Iterator[Moment]:
        self.by_part, self.kept, self.in_flight = Counter(), 0, 0
        self.with_gradient: frozenset[str] = frozenset()
        self.messages: dict = {}  # under way: each that is awaited, and the last one sent on each channel
        for action in self.schedule.programs[self.stage]:
            if action.kind in (RECV_ACTIVATION, RECV_GRADIENT):
                self.messages[self.schedule.message(self.stage, action)] = self._message(action)
            elif action.kind in (SEND_ACTIVATION, SEND_GRADIENT):
                self.messages[self.schedule.message(self.stage, action).channel] = self._message(action)
            else:
                if needed := self.schedule.needs(self.stage, action):
                    del self.messages[self.schedule.message(self.stage, needed)]
                self.in_flight += action.kind == FORWARD
                yield from self._compute(action)
                self.in_flight -= action.kind not in (FORWARD, BACKWARD_INPUT)

    def _message(self, action: Action) -> int:
        return self.sizes[action.micro_batch].tokens * self.model.hidden * self.width

    def _compute(self, action: Action) -> Iterator[Moment]:
        here = self.pieces(action.chunk, self.sizes[action.micro_batch])
        forward = action.kind == FORWARD
        reducing = 0  # of the piece before; it is over when this one's begins
        for piece in here if forward else reversed(here):
            gradient = unreduced(self.held[piece.name], self.model, self.parallel)
            beside = self._beside(action, here, piece)
            weights = 0  # whose gradients have been added up
            for part, change, temporary in changes(action.kind, piece):
                self.by_part[piece.name, part] += change
                self.kept += change
                adding_up = gradient.adding_up * weights // self.held[piece.name]
                yield self._moment(action, piece, part, beside + reducing + adding_up + temporary)
                if not forward and change < 0:
                    weights += piece.takes(part).weights
            if action.kind not in (FORWARD, BACKWARD_INPUT):
                self.with_gradient |= self._complete(piece.name, here)
                yield self._moment(action, piece, "gradient", beside + gradient.adding_up + gradient.copies)
                reducing = gradient.reducing

    def _moment(self, action: Action, piece: PieceMemory, part: str, temporary: int) -> Moment:
        in_flight = self.in_flight / self.schedule.chunks
        return Moment(action, piece.name, part, self.kept, temporary, self.by_part, in_flight, self.with_gradient)

    def _beside(self, action: Action, here: tuple[PieceMemory, ...], piece: PieceMemory) -> int:
        """What is temporary through all parts of a piece."""
        beside = sum(self.messages.values())
        if action.kind == BACKWARD_WEIGHT:  # needs no weights, and no gradient of the stream
            return beside
        step = 1 if action.kind == FORWARD else -1
        beside += gathered([p.name for p in here], here.index(piece), step, self.held, self.model, self.parallel)
        if action.kind == FORWARD or piece.name == "head":
            return beside
        stream_gradient = self.sizes[action.micro_batch].stream * self.model.hidden * self.width
        return beside + stream_gradient + (tied_gradient(self.held, self.model) if both_ends(here) else 0)

    def _complete(self, name: str, here: tuple[PieceMemory, ...]) -> set[str]:
        """The units whose gradient is there after the backward of piece `name`."""
        tied = TIED in self.held and name in ENDS and (name == "embedding" or not both_ends(here))
        return {name, TIED} if tied else {name}


def both_ends(here: tuple[PieceMemory, ...]) -> bool:
    return {piece.name for piece in here}.issuperset(ENDS)


def pieces_of(part: Part, model: ModelConfig, parallel: ParallelConfig, own: Sizes) -> Iterator[PieceMemory]:
    """The pieces of one part of the model, in its order, with what each keeps and takes of one micro-batch."""
    if part.embedding:
        yield PieceMemory("embedding", kept_by_embedding(model, own), passing("embedding", model, own))
    for layer in part.layers:
        policy = parallel.recompute if layer % parallel.recompute_every == 0 else "none"
        yield PieceMemory(f"layer {layer}", kept_by_layer(model, own, policy), passing("layer", model, own))
    if part.head:
        yield PieceMemory("head", kept_by_head(model, own), passing("head", model, own))


def changes(kind: str, piece: PieceMemory) -> Iterator[tuple[str, int, int]]:
    """(part, what it adds to what is kept, what it takes in passing), in the order of one compute."""
    if kind == FORWARD:
        for part in chain(*piece.runs):
            yield part.part, 0, piece.takes(part.part).forward
            yield part.part, part.kept, 0
    elif kind == BACKWARD_WEIGHT:
        for part in chain(*piece.runs):
            yield part.part, -part.later, 0
    else:
        for run in reversed(piece.runs):
            for part in run:
                yield part.part, 0, piece.takes(part.part).forward if part.again else 0
                yield part.part, part.again, 0
            for part in reversed(run):
                yield part.part, 0, piece.takes(part.part).backward
                yield part.part, (part.later if kind == BACKWARD_INPUT else 0) - part.kept - part.again, 0


def sizes_on(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, rank: int) -> list[Sizes]:
    """The sizes of each micro-batch on `rank`, the largest first."""
    share = {"tp": parallel.tp, "tp_rank": rank % parallel.tp, "sequence_parallel": parallel.sequence_parallel}
    taken = micro_batches(train.batch, parallel.dp, parallel.replica_of(rank), parallel.micro_batches)
    return [sizes(model, len(rows), **share) for rows in taken]
