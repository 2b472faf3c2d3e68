"""Pipeline schedules as data: for each stage, what it does in which order. Printed, drawn, checked, simulated and run.

A schedule says only the order. How long it takes, `cost/simulate.py` works out from times; `parallel/pipeline.py` runs
it; `parallel/schedule_check.py` proves that it cannot go wrong. All but one come from one function (`_order`): how many
forwards a stage runs ahead, and how long it puts its weight gradients off.

    naive        one micro-batch at a time through all stages                      (the baseline nobody should use)
    gpipe        all forwards, then all backwards                                  Huang et al. 2019
    1f1b         stage i runs p-1-i forwards ahead, then one forward, one backward Narayanan et al. 2021, section 2.2.1
    interleaved  1F1B over v chunks a stage                                        the same, section 2.2.2
    zb-h1        1F1B, the weight gradients put off by i micro-batches             Qi et al. 2024, section 2.1
    zb-h2        twice as far ahead, put off by 2i                                 the same
    zb-v         two chunks a stage in a V, so that memory is even                 the same, section 6
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Integral
from typing import NamedTuple

from pcourse.config import ConfigError, listed

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward", "backward-input", "backward-weight"
RECV_ACTIVATION, SEND_ACTIVATION = "recv-activation", "send-activation"
RECV_GRADIENT, SEND_GRADIENT = "recv-gradient", "send-gradient"
ACTIVATION, GRADIENT = "activation", "gradient"
MOST_COMPUTES = 4_000_000  # of a schedule, forwards alone
RECEIVES_AHEAD = 3  # each costs a buffer of b·s·h; with 1, steps of many small messages took a tenth longer over gloo
_LETTERS = {
    FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "B", BACKWARD_WEIGHT: "W",
    RECV_ACTIVATION: "rx", SEND_ACTIVATION: "sx", RECV_GRADIENT: "rg", SEND_GRADIENT: "sg",
}  # fmt: skip


class Action(NamedTuple):
    """One thing that a stage does with one micro-batch in one of its chunks.

    `backward` is both gradients; split, `backward-input` comes first and `backward-weight` whenever it suits. A `recv`
    posts the receive and does not wait: the compute that needs the message does. A `send` starts the send of what the
    chunk's compute has made; it waits only for the one before it on its way (see `schedule_check`).
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{_LETTERS.get(self.kind, self.kind)}{self.micro_batch}" + ("'" * self.chunk)


class Message(NamedTuple):
    """An activation or a gradient of one micro-batch on its way from one stage to another; `position` is where in the
    model it is awaited."""

    source: int
    target: int
    what: str
    position: int
    micro_batch: int

    @property
    def channel(self) -> tuple[int, int, str]:
        """Messages of one channel arrive in the order in which they are sent."""
        return self.source, self.target, self.what


@dataclass(frozen=True)
class Schedule:
    """The order of computes on each of `stages` stages (p) for `micro_batches` (m) and `chunks` chunks a stage (v).

    The model is cut into p·v parts, counted along the model by their *position*. In the "loop" placement chunk c of
    stage i is at position c·p + i; in the "v" placement the second chunk comes back: 2p - 1 - i.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    orders: tuple[tuple[Action, ...], ...]
    placement: str = "loop"

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    @property
    def ends(self) -> list[int]:
        """The stages that hold the first and the last part; one, if it holds both."""
        return sorted({self.holder(0)[0], self.holder(self.parts - 1)[0]})

    def position(self, stage: int, chunk: int) -> int:
        """Where in the model chunk `chunk` of `stage` stands."""
        back = self.placement == "v" and chunk % 2
        return chunk * self.stages + (self.stages - 1 - stage if back else stage)

    def holder(self, position: int) -> tuple[int, int]:
        """The stage and the chunk that stand at `position`."""
        chunk, place = divmod(position, self.stages)
        back = self.placement == "v" and chunk % 2
        return (self.stages - 1 - place if back else place), chunk

    def places(self, stage: int) -> list[int]:
        """The positions of a stage's chunks."""
        return [self.position(stage, chunk) for chunk in range(self.chunks)]

    def source(self, stage: int, action: Action) -> int | None:
        """The position whose result a compute needs; None for a weight gradient, and at the model's two ends."""
        if action.kind == BACKWARD_WEIGHT:
            return None
        position = self.position(stage, action.chunk) + (-1 if action.kind == FORWARD else 1)
        return position if 0 <= position < self.parts else None

    def message(self, stage: int, action: Action) -> Message | None:
        """The message that a send or a receive of `stage` is about; None beyond the model's two ends."""
        what = ACTIVATION if action.kind in (SEND_ACTIVATION, RECV_ACTIVATION) else GRADIENT
        here, step = self.position(stage, action.chunk), 1 if what == ACTIVATION else -1
        source, target = (here, here + step) if action.kind.startswith("send") else (here - step, here)
        if not (0 <= source < self.parts and 0 <= target < self.parts):
            return None
        return Message(self.holder(source)[0], self.holder(target)[0], what, target, action.micro_batch)

    @cached_property
    def programs(self) -> tuple[tuple[Action, ...], ...]:
        """Each stage's order with its messages: sends right after the compute that makes them, receives posted
        RECEIVES_AHEAD computes before the one that needs them, so that a message travels while the stage computes."""
        return tuple(tuple(self._with_messages(stage)) for stage in range(self.stages))

    def _with_messages(self, stage: int) -> Iterator[Action]:
        order = self.orders[stage]
        unposted = iter(order)
        yield from filter(None, (self.needs(stage, action) for action in islice(unposted, RECEIVES_AHEAD)))
        for action in order:
            yield from filter(None, (self.needs(stage, later) for later in islice(unposted, 1)))
            yield action
            if made := self.makes(stage, action):
                yield made

    def needs(self, stage: int, action: Action) -> Action | None:
        """The receive that `action` needs, if its input comes from another stage."""
        kinds = {FORWARD: RECV_ACTIVATION, BACKWARD: RECV_GRADIENT, BACKWARD_INPUT: RECV_GRADIENT}
        return self._message(kinds, stage, action)

    def makes(self, stage: int, action: Action) -> Action | None:
        """The send that `action` makes possible, if its output goes to another stage."""
        kinds = {FORWARD: SEND_ACTIVATION, BACKWARD: SEND_GRADIENT, BACKWARD_INPUT: SEND_GRADIENT}
        return self._message(kinds, stage, action)

    def _message(self, kinds: dict, stage: int, action: Action) -> Action | None:
        if action.kind not in kinds:
            return None
        about = action._replace(kind=kinds[action.kind])
        message = self.message(stage, about)
        return about if message and message.source != message.target else None

    def __str__(self) -> str:
        lines = [" ".join([f"stage {i}:", *map(str, order)]) for i, order in enumerate(self.orders)]
        return "\n".join([f"{self.name}, {self.stages} stages, {self.micro_batches} micro-batches", *lines])


def make_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name. Raises ConfigError, with the values that would do, where there is none."""
    p, m, v = stages, micro_batches, chunks
    check_sizes(name, p, m, v)
    if name == "zb-v":
        return Schedule(name, p, m, v, tuple(tuple(_v_order(p, m, i)) for i in range(p)), placement="v")
    forwards, backwards, orders = _looped(FORWARD, p, m, v), _looped(BACKWARD, p, m, v), []
    for i in range(p):
        ahead = {
            "naive": 0,
            "gpipe": m,
            "zb-h2": 2 * (p - 1 - i),
            "interleaved": 2 * (p - 1 - i) + (v - 1) * p if v > 1 else p - 1 - i,
        }.get(name, p - 1 - i)
        put_off = {"zb-h1": i, "zb-h2": 2 * i}.get(name)
        orders.append(tuple(_order(forwards, backwards, ahead, put_off)))
    return Schedule(name, p, m, v, tuple(orders))


def check_sizes(name: str, stages: int, micro_batches: int, chunks: int = 1, batch: int | None = None) -> None:
    """Raises ConfigError where there is no schedule of that name for these sizes, in a batch of `batch` sequences."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r} is not known; schedule can be {listed(SCHEDULES)}")
    for what, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ConfigError(f"{what}={value!r} must be a whole number, 1 or more")
    if stages * micro_batches * chunks > MOST_COMPUTES:
        raise ConfigError(
            f"stages={stages}, chunks={chunks} and micro_batches={micro_batches} make a schedule too long to write "
            f"down; their product can be 1 to {MOST_COMPUTES:,}"
        )
    if name == "zb-v" and chunks != 2:
        raise ConfigError(f"zb-v places two chunks on each stage, not chunks={chunks}; chunks can be 2")
    if name not in ("interleaved", "zb-v") and chunks != 1:
        raise ConfigError(
            f"{name} has one chunk on each stage, not chunks={chunks}; chunks can be 1, or take schedule='interleaved'"
        )
    if name == "interleaved" and chunks > 1 and micro_batches % stages:
        rounds = [k for k in (stages, 2 * stages, 3 * stages) if batch is None or k <= batch]
        legal = f"micro_batches can be {listed(rounds)}" + (", …" if len(rounds) == 3 else "")
        raise ConfigError(
            f"interleaved over {stages} stages needs micro_batches in whole rounds of {stages}, not {micro_batches}; "
            + (legal if rounds else f"batch can be {stages} or more")
        )


def _order(forwards: list[Action], backwards: list[Action], ahead: int, put_off: int | None = None) -> Iterator[Action]:
    """`ahead` forwards first, then one forward, one backward. With `put_off`, a backward is cut in two, and each
    weight gradient waits until so many more input gradients are done."""
    yield from forwards[:ahead]
    for k, backward in enumerate(backwards):
        yield from forwards[ahead + k : ahead + k + 1]
        if put_off is None:
            yield backward
            continue
        yield backward._replace(kind=BACKWARD_INPUT)
        if k >= put_off:
            yield backwards[k - put_off]._replace(kind=BACKWARD_WEIGHT)
    if put_off:
        yield from (b._replace(kind=BACKWARD_WEIGHT) for b in backwards[-put_off:])


def _looped(kind: str, p: int, m: int, v: int) -> list[Action]:
    """All of a stage's forwards, or backwards, in the order of interleaving: p micro-batches through its first chunk,
    the same through the next, and so on, then the next p. Backwards take the chunks from the last."""
    rounds = p if v > 1 else m
    chunks = range(v) if kind == FORWARD else range(v - 1, -1, -1)
    return [Action(kind, k, c) for first in range(0, m, rounds) for c in chunks for k in range(first, first + rounds)]


def _v_order(p: int, m: int, i: int) -> Iterator[Action]:
    """ZB-V's order on stage i, the handcrafted one: written for 2p - 1 micro-batches or more; of fewer, those beyond m
    are left out."""
    total = max(m, 2 * p - 1)
    counts = {(kind, c): 0 for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) for c in (0, 1)}

    def take(*steps: tuple[str, int]) -> Iterator[Action]:
        for kind, chunk in steps:
            k = counts[kind, chunk]
            counts[kind, chunk] += 1
            if k < m:
                yield Action(kind, k, chunk)

    down, up = (FORWARD, 0), (FORWARD, 1)
    back = {c: ((BACKWARD_INPUT, c), (BACKWARD_WEIGHT, c)) for c in (0, 1)}
    yield from take(*[down] * (2 * (p - i) - 1))  # until the first micro-batch comes back up
    yield from take(*[up, down] * i)
    yield from take(*[up, *back[1]] * (p - i))
    while counts[up] < counts[down] or counts[down] < total:
        yield from take(*[down] * (counts[down] < total), *back[0], up, *back[1])
    yield from take(*[(BACKWARD_INPUT, 0), (BACKWARD_INPUT, 1)] * i)  # the upstream stages wait for these
    yield from take(*back[0] * (p - i))
    for c in (1, 0):
        yield from take(*[(BACKWARD_WEIGHT, c)] * (total - counts[BACKWARD_WEIGHT, c]))
