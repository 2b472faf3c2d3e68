"""Pipeline parallelism: one rank's part in any schedule.

With the model cut between layers, what crosses a cut is an activation X[b,s,h] forward and its gradient dX[b,s,h]
backward, for each micro-batch and each direction one message:

    forward     … ─ chunk ─ X ─ send ─► receive ─ X ─ chunk ─ …
    backward    … ◄ receive ─ dX ◄─ send ─ dX ─ chunk ◄ …

In which order is the schedule's affair (`schedules.py`): `run` does what it says, action by action. Receives are posted
ahead and sends are asynchronous, so that messages travel while the stage computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch.autograd.graph import get_gradient_edge

from pcourse.comm import SCALAR, Comm
from pcourse.cost.layers import pieces
from pcourse.dropout import seed_dropout
from pcourse.model import DTYPE
from pcourse.parallel.data import DataParallel
from pcourse.parallel.put_off import PutOff
from pcourse.parallel.schedules import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Schedule,
)
from pcourse.parallel.stage import Stage

_TAG = {ACTIVATION: 0, GRADIENT: 1}


class Pipeline:
    """This rank's `stage`, and what it does in a step of `schedule` over the ranks of `comm`.

    `replicas` reduces the gradients over those of the stage's copies; `meter` is a MemoryMeter that shall know what is
    kept for backward; `tp` is over how many ranks each layer's work is cut.
    """

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule,
        stage: Stage,
        replicas: DataParallel | None = None,
        meter=None,
        tp: int = 1,
    ):
        self.comm, self.schedule, self.stage, self.meter, self.tp = comm, schedule, stage, meter, tp
        self.replicas = replicas
        self.config = stage.config
        self.message = cache(partial(schedule.message, comm.rank))
        self.flops = [_flops(part.pieces(pieces(self.config)), tp) for part in stage.parts]
        order = schedule.orders[comm.rank]
        self.split = {(k, c) for kind, k, c in order if kind == BACKWARD_INPUT}
        # The passes after which a chunk's gradients are complete: the last of each chunk in the order.
        self.last = {a.chunk: a for a in order if a.kind in (BACKWARD, BACKWARD_WEIGHT)}
        self.backward_of: Action | None = None  # the backward under way
        # One way for each kind of message up the ranks, and one down, so that none holds another up.
        self.ways = {(what, up): comm.duplicate() for what in _TAG for up in (True, False)}
        self.sum_tied = TiedGradients(comm, schedule, stage)

    def run(self, rows: list[range], load: Callable, total: int, dropout_seed: int = 0) -> torch.Tensor:
        """Add one step's gradients, those of the loss summed over all targets and divided by `total`.

        `rows[k]` are the sequences of micro-batch k, `load(rows[k])` its tokens and targets. Returns the loss, on
        every rank. `sum_tied(stage.tied_gradient)` follows once, after the last `run` of a step.
        """
        self.rows, self.load, self.total, self.dropout_seed = rows, load, total, dropout_seed
        dtype = torch.promote_types(DTYPE[self.config.dtype], torch.float32)
        self.loss = torch.zeros((), dtype=dtype, device=self.comm.device)
        self.made, self.awaited = {}, {}  # message -> a tensor that was made here, a receive that was posted
        self.graphs, self.put_off = {}, {}  # (micro-batch, chunk) -> what its backward needs, and what that leaves
        self.under_way = {}  # channel -> the last send on it
        for action in self.schedule.programs[self.comm.rank]:
            _DO[action.kind](self, action)
        while self.under_way:
            self.under_way.popitem()[1].wait()
        if self.comm.size > 1:
            self.comm.all_reduce(self.loss, out=self.loss, label="loss", account=SCALAR)
        return self.loss

    # --- what crosses the cuts ---------------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        """Post the receive of an activation or a gradient; the compute that needs it will wait for it."""
        message = self.message(action)
        shape = len(self.rows[action.micro_batch]), self.config.sequence, self.config.hidden
        buffer = torch.empty(shape, dtype=DTYPE[self.config.dtype], device=self.comm.device)
        way, tag = self.ways[message.what, message.source < message.target], _TAG[message.what]
        self.awaited[message] = way.irecv(buffer, message.source, tag=tag, label=message.what)

    def _send(self, action: Action) -> None:
        """Start to send what has just been made, once the send before it on this channel is over."""
        message = self.message(action)
        if message.channel in self.under_way:
            self.under_way.pop(message.channel).wait()
        way, tag = self.ways[message.what, message.source < message.target], _TAG[message.what]
        value = self.made.pop(message)
        self.under_way[message.channel] = way.isend(value, message.target, tag=tag, label=message.what)

    # --- what a stage computes ---------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        k, c = action.micro_batch, action.chunk
        x, targets = self._input(action), None
        if self.stage.parts[c].embedding or self.stage.parts[c].head:
            tokens, targets = self.load(self.rows[k])
            x = tokens if x is None else x
        self._seed(k, c)
        with self._compute(action), self._saving(), self._putting_off(k, c):
            y = self.stage.chunks[c](x, targets)
            if self.stage.parts[c].head:
                y = y / self.total  # once, by tokens: so micro-batches weigh as they should, however many there are
                self.loss += y.detach()
        # Backward needs no more of y than its place in the graph. Where all weights are frozen there is none.
        self.graphs[k, c] = x, get_gradient_edge(y) if y.requires_grad else None
        self._hand_on(action._replace(kind=SEND_ACTIVATION), y.detach())

    def _backward(self, action: Action) -> None:
        """Both gradients; with PutOff in the forward pass, that of the input and of all but linear weights."""
        x, y = self.graphs.pop((action.micro_batch, action.chunk))
        grad = self._take(action._replace(kind=RECV_GRADIENT))
        self.backward_of = action
        self._seed(action.micro_batch, action.chunk)  # for what is run again
        with self._compute(action), self._reducing(action):
            if y is not None:
                torch.autograd.backward(y, torch.ones_like(self.loss) if grad is None else grad)
        self._hand_on(action._replace(kind=SEND_GRADIENT), x.grad)

    def _backward_weight(self, action: Action) -> None:
        with self._compute(action), self._reducing(action):
            self.put_off.pop((action.micro_batch, action.chunk)).compute()

    @contextlib.contextmanager
    def again(self, flops: float, share: float) -> Iterator[None]:
        """Around a second run of a piece of a chunk, in the backward that needs it: as the first run was.

        It takes `flops` for one sequence, and is that `share` of the chunk's forward.
        """
        _, k, c = self.backward_of
        putting_off = self.put_off.get((k, c), contextlib.nullcontext())
        work = {"micro_batch": k, "flops": flops * len(self.rows[k]) / self.tp, "share": share}
        with self.comm.compute("recompute", **work), putting_off:
            yield

    def _input(self, action: Action):
        x = self._take(action._replace(kind=RECV_ACTIVATION))
        return None if x is None else x.requires_grad_()

    def _take(self, action: Action):
        """The tensor that comes over a cut, waited for if it comes from another stage; None at the model's ends."""
        message = self.message(action)
        if message is None:
            return None
        return self.awaited.pop(message).wait() if message in self.awaited else self.made.pop(message)

    def _hand_on(self, action: Action, value) -> None:
        """Keep what has been made for its send, or for the next chunk if that is on this very stage."""
        message = self.message(action)
        if message is not None:
            self.made[message] = value

    def _seed(self, k: int, c: int) -> None:
        if self.config.dropout:
            seed_dropout(self.stage.chunks[c], self.dropout_seed, self.rows[k].start)

    def _reducing(self, action: Action):
        if self.replicas is None:
            return contextlib.nullcontext()
        return self.replicas.backward(action.chunk, action.kind, last=self.last[action.chunk] == action)

    def _saving(self):
        return self.meter.saving() if self.meter is not None else contextlib.nullcontext()

    def _putting_off(self, k: int, c: int):
        if (k, c) not in self.split:
            return contextlib.nullcontext()
        self.put_off[k, c] = PutOff(self.meter)
        return self.put_off[k, c]

    def _compute(self, action: Action):
        kind, k, c = action
        flops = len(self.rows[k]) * self.flops[c][kind]
        label = f"chunk {c}" if self.schedule.chunks > 1 else ""
        return self.comm.compute(kind, label, micro_batch=k, flops=flops)


class TiedGradients:
    """Called after a step's last backward: the tied matrix's gradient is the sum of both copies', on both.

    The first stage embeds with the matrix, the last one ends with it; so the two copies stay equal. Where replicas
    share gradients out, it is that of their shard.
    """

    def __init__(self, comm: Comm, schedule: Schedule, stage: Stage):
        self.group = None
        if stage.config.tied and len(schedule.ends) == 2:
            alone = [[i] for i in range(comm.size) if i not in schedule.ends]
            self.group = comm.groups([schedule.ends, *alone], "tied")

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if self.group is not None and gradient is not None:
            self.group.all_reduce(gradient, out=gradient, label="tied embedding")


def _flops(held, tp: int) -> dict[str, float]:
    """What each kind of compute on these pieces takes for one sequence, on each of `tp` ranks."""
    forward, b, w = (sum(getattr(p, n) for p in held) / tp for n in ("forward", "backward_input", "backward_weight"))
    return {FORWARD: forward, BACKWARD: b + w, BACKWARD_INPUT: b, BACKWARD_WEIGHT: w}


_DO = {
    FORWARD: Pipeline._forward,
    BACKWARD: Pipeline._backward,
    BACKWARD_INPUT: Pipeline._backward,
    BACKWARD_WEIGHT: Pipeline._backward_weight,
    RECV_ACTIVATION: Pipeline._receive,
    RECV_GRADIENT: Pipeline._receive,
    SEND_ACTIVATION: Pipeline._send,
    SEND_GRADIENT: Pipeline._send,
}
