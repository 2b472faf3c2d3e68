"""The checks of the exercises: each runs a learner's function on ranks and says in one line what is wrong.

A check knows more than the right value. It knows what the usual faults produce, and so it can name the one it meets:
a mean instead of a sum, a bias that is in the sum once for every rank. Here is what all checks share: ranks that are
threads of the notebook's own process, a deadlock told in words, and a number told as a count of contributions.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Sequence
from fractions import Fraction
from typing import NoReturn

import torch

from pcourse.comm import Call, Comm
from pcourse.lab.check import CheckFailed
from pcourse.split import shard_sizes
from pcourse.world import RankError, RunCancelled, RunTimeout, World

TIMEOUT = 30.0  # seconds; what a check runs takes milliseconds, and a deadlock is seen at once: this ends a loop
TICK = 0.1  # seconds between two looks at where the ranks wait
ITEM = 8  # bytes of a float64, in which the checks count

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) for path in (os.path.dirname(__file__), torch.__file__))


def on_ranks(case: str, size: int, program, *args) -> list:
    """The results of `program(comm, *args)` on `size` thread ranks, in rank order.

    Raises CheckFailed, led by `case`, where a rank raises, where the ranks wait for each other for ever, and where a
    handle was never waited for. NotImplementedError passes as it is: that is an exercise not solved yet.
    """
    watches = [_Watch() for _ in range(size)]

    def watched(comm: Comm):
        watch = watches[comm.rank]
        watch.over(comm)
        result = program(comm, *args)
        watch.returned = True
        return result

    world, ended = World(size, backend="threads"), threading.Event()
    threading.Thread(target=_end_if_stuck, args=(world, watches, ended), name="pcourse-deadlock", daemon=True).start()
    try:
        results = world.run(watched, timeout=TIMEOUT)
    except (RunTimeout, RunCancelled):
        raise CheckFailed(f"{case}: {_stuck(watches)}") from None
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, (NotImplementedError, CheckFailed)):
            raise cause from None
        raise CheckFailed(f"{case}: {_raised(error, cause)}") from cause
    finally:
        ended.set()
    for rank, watch in enumerate(watches):
        if watch.unwaited:
            rule = "until wait() returns, a message may not have arrived and a buffer that is sent may not change"
            raise CheckFailed(
                f"{case}: rank {rank} never calls wait() on {len(watch.unwaited)} of its handles, "
                f"the first from {_words(watch.unwaited[0])}: {rule}"
            )
    return results


def look(size: int, program) -> None:
    """Run `program(comm)` on `size` thread ranks and print what each returns; before the exercise is solved, say so."""
    try:
        results = on_ranks(f"{size} ranks", size, program)
    except NotImplementedError:
        print("Nothing to see yet: write the function in the cell above, run it, then run this cell again.")
    except CheckFailed as error:
        print(error)
    else:
        for rank, result in enumerate(results):
            print(f"rank {rank}  {result}")


def random(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers, the same for the same seed; in float64, so that a sum can be read back (`shares`)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calls_of(comm: Comm) -> list[Call]:
    """What this rank has communicated since the last time it was asked."""
    return comm.recorder.take()[0]


def wire_of(elements: int, size: int, rank: int) -> int:
    """The bytes that `rank` sends in an all-reduce of so many float64 elements."""
    sizes = shard_sizes(elements, size)
    return ITEM * (2 * elements - sizes[rank] - sizes[(rank + 1) % size])


def require(condition, case: str, words: str) -> None:
    """CheckFailed, in one line, unless `condition` holds."""
    if not condition:
        fail(case, words)


def fail(case: str, words: str) -> NoReturn:
    """CheckFailed, in one line."""
    raise CheckFailed(f"{case}: {' '.join(words.split())}")


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for rounding, which differs with the order of a sum; float32 on the way is accurate enough."""
    return got.shape == expected.shape and torch.allclose(got, expected.to(got), rtol=1e-5, atol=1e-5)


def shares(got: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[float] | None:
    """How often each of `parts` is in `got`, if `got` is a sum of multiples of them; None if it is none.

    Also None where `got` has too few elements to tell, or where the parts cannot be told apart.
    """
    if any(part.shape != got.shape for part in parts) or got.numel() <= len(parts):
        return None
    columns = torch.stack([part.detach().double().flatten() for part in parts], dim=1)
    target = got.detach().double().flatten()
    if not target.isfinite().all() or torch.linalg.matrix_rank(columns) < len(parts):
        return None
    counts = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution.flatten()
    scale = max(1.0, columns.abs().max().item(), target.abs().max().item())
    if (columns @ counts - target).abs().max() > 1e-6 * scale:
        return None
    return [round(count, 6) for count in counts.tolist()]


def times(count: float, *, of: bool = False) -> str:
    """A multiple in words: "once", "2 times", "1/3 times"; `of` something: "2 times", "1/3 of"."""
    if abs(count - 1) < 1e-5 and not of:
        return "once"
    fraction = Fraction(count).limit_denominator(12)
    number = f"{fraction}" if abs(float(fraction) - count) < 1e-5 else f"{count:.3g}"
    return f"{number} of" if of and 0 < count < 1 else f"{number} times"


def many(size: int) -> str:
    """A number of ranks in words."""
    return "1 rank" if size == 1 else f"{size} ranks"


def operations(calls: list[Call]) -> str:
    """What was called, in order, in words."""
    return ", ".join(call.operation for call in calls) or "nothing"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0 and 2"."""
    *most, last = [str(number) for number in numbers]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


# --- what a rank did, and where it waits ---------------------------------------------------------------------------


class _Watch:
    """What one rank has posted and not waited for, and which call it is in."""

    def __init__(self):
        self.recorder, self.returned = None, False
        self.unwaited: list[Call] = []

    def over(self, comm: Comm) -> None:
        self.recorder = comm.recorder
        for name in ("isend", "irecv"):
            setattr(comm, name, self._posting(getattr(comm, name)))

    def _posting(self, post):
        def posting(*args, **options):
            handle = post(*args, **options)
            call, wait = self.recorder.calls[-1], handle.wait
            self.unwaited.append(call)

            def waiting():
                if call in self.unwaited:
                    self.unwaited.remove(call)
                return wait()

            handle.wait = waiting
            return handle

        return posting

    def open_call(self) -> Call | None:
        """The call in which the rank stands: a blocking one that has not returned, or a wait() that has not."""
        for call in self.recorder.calls if self.recorder else ():
            if call.left == 0.0 or (call.wait_entered is not None and call.wait_left is None):
                return call
        return None


def _end_if_stuck(world: World, watches: list[_Watch], ended: threading.Event) -> None:
    """Cancel the run once no rank can ever move again.

    That is certain, however slow the machine: at two looks all ranks stood in the same calls, so that none posted
    anything in between, and not one of these calls had been joined by all of its ranks.
    """
    before = None
    while not ended.wait(TICK):
        waiting = {rank: watch.open_call() for rank, watch in enumerate(watches) if not watch.returned}
        held = bool(waiting) and all(call and not _complete(call, watches) for call in waiting.values())
        now = {rank: id(call) for rank, call in waiting.items()} if held else None
        if now and now == before:
            world.cancel()
            return
        before = now


def _complete(call: Call, watches: list[_Watch]) -> bool:
    """Whether every rank that takes part in `call` has made its own: the members' calls have one key."""
    return all(any(call.key == other.key for other in watches[rank].recorder.calls) for rank in call.key[1])


def _words(call: Call) -> str:
    if call.operation not in ("send", "recv"):
        return call.operation
    source, destination = call.key[1]
    return f"send to rank {destination}" if call.operation == "send" else f"recv from rank {source}"


def _stuck(watches: list[_Watch]) -> str:
    waiting = {rank: call for rank, watch in enumerate(watches) if (call := watch.open_call())}
    if not waiting:
        return f"no end after {TIMEOUT:g} s, and no rank waits in a call: is there a loop without an end?"
    doing = ", ".join(
        f"rank {rank} waits in {_words(waiting[rank])}" if rank in waiting
        else f"rank {rank} has {'returned' if watch.returned else 'made no call that waits'}"
        for rank, watch in enumerate(watches)
    )  # fmt: skip
    return f"deadlock: {doing}. {_why_stuck(waiting)}"


def _why_stuck(waiting: dict[int, Call]) -> str:
    if all(call.operation == "send" for call in waiting.values()):
        rule = "a send returns only when its message has been received, and nobody has posted a receive"
        return f"Both ends send first: {rule}. Post the send with isend, then receive, then wait()"
    rank, call = next(item for item in waiting.items() if item[1].operation != "send")
    if call.operation == "recv":
        source = call.key[1][0]
        return f"Nobody sends what rank {rank} waits for: rank {source} has no send to rank {rank} under way"
    return f"{call.operation} ends only when every rank of the group calls it"


def _raised(error: RankError, cause: BaseException | None) -> str:
    if cause is None:
        return str(error).splitlines()[0]
    words = " ".join(f"{type(cause).__name__}: {cause}".split())
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    place = f"\n  in {frames[-1].name}, line {frames[-1].lineno}:  {frames[-1].line}" if frames else ""
    return f"rank {error.rank} raised {words[:400]}{place}"
