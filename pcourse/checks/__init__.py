"""The checks of the exercises: each runs a learner's function on ranks and says in one line what is wrong.

A check knows more than the right value. It knows what the usual faults produce, and so it can name the one it meets:
a mean instead of a sum, a bias that is in the sum once for every rank. Here is what all checks share: ranks that are
threads of the notebook's own process, failures told in one line, and a number told as a count of contributions.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NoReturn

import torch

from pcourse.comm import SCALAR, Comm
from pcourse.lab.check import CheckFailed, NotSolvedYet
from pcourse.launch.threads import Deadlock
from pcourse.recorder import Call
from pcourse.split import ring_wire
from pcourse.world import RankError, RunTimeout, World

TIMEOUT = 30.0  # seconds; what a check runs takes milliseconds, and a deadlock is known at once: this ends a loop
ITEM = 8  # bytes of a float64, in which the checks count
SOURCE = "counted on ranks that are threads of this process"

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(path)) for path in (os.path.dirname(__file__), torch.__file__))


def on_ranks(case: str, size: int, program, *args) -> list:
    """The results of `program(comm, *args)` on `size` thread ranks, in rank order.

    Raises CheckFailed, led by `case`, where a rank raises, where the ranks wait for each other for ever, and where a
    handle was never waited for. NotImplementedError passes as it is: that is an exercise not solved yet.
    """
    unwaited: list[list[Call]] = [[] for _ in range(size)]

    def watched(comm: Comm):
        for name in ("isend", "irecv"):
            setattr(comm, name, _noting(comm, getattr(comm, name), unwaited[comm.rank]))
        return program(comm, *args)

    try:
        results = World(size, backend="threads").run(watched, timeout=TIMEOUT)
    except Deadlock as stuck:
        raise CheckFailed(f"{case}: {stuck.words}") from None
    except RunTimeout as late:
        raise CheckFailed(f"{case}: {str(late).splitlines()[0]}: is there a loop without an end?") from None
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, (NotImplementedError, CheckFailed)):
            raise cause from None
        raise CheckFailed(f"{case}: {_raised(error, cause)}") from cause
    for rank, calls in enumerate(unwaited):
        if calls:
            rule = "until wait() returns, a message may not have arrived and a buffer that is sent may not change"
            raise CheckFailed(
                f"{case}: rank {rank} never calls wait() on {len(calls)} of its handles, "
                f"the first from {_words(calls[0])}: {rule}"
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


def wire_of(operation: str, elements: int, size: int, rank: int) -> int:
    """The bytes that `rank` sends when `operation` runs on so many float64 elements."""
    return ITEM * ring_wire(operation, elements, size, rank)


def require(condition, case: str, words: str) -> None:
    """CheckFailed, in one line, unless `condition` holds."""
    if not condition:
        fail(case, words)


def fail(case: str, words: str) -> NoReturn:
    """CheckFailed, in one line."""
    raise CheckFailed(f"{case}: {' '.join(words.split())}")


def not_mended(function, case, words: str) -> NoReturn:
    """NotSolvedYet: the fault that a broken program came with is still there. What it looks like, not what it is."""
    raise NotSolvedYet(
        f"Not mended yet. {case}: {' '.join(words.split())}. Find the fault, write the mend in {function.__name__} "
        "above, run it, then run this check again."
    )


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


def require_autograd_function(cls, name: str) -> None:
    """CheckFailed unless the learner's `cls` is an autograd Function."""
    known = isinstance(cls, type) and issubclass(cls, torch.autograd.Function)
    require(known, name, "it must be a class, torch.autograd.Function its base, with a static forward and backward")


def sent(calls: Sequence[Call]) -> int:
    """Bytes that a rank sends in `calls`, sums of scalars left out."""
    return sum(call.wire for call in calls if call.account != SCALAR)


def listed(values: Iterable) -> str:
    """ "4", "4 and 3", "4, 4 and 3"."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def ranks(numbers: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0 and 2"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def explained(error: CheckFailed, clues: dict[str, str]) -> CheckFailed:
    """`error`, which tells of an exception, with the clue whose key its words contain, in the same line."""
    sentence, *place = str(error).splitlines()
    clue = next((clue for words, clue in clues.items() if words in sentence), "")
    return CheckFailed("\n".join([f"{sentence}. {clue}" if clue else sentence, *place]))


def _noting(comm: Comm, post, unwaited: list[Call]):
    """`post`, which is isend or irecv; its calls stand in `unwaited` until their handles are waited for."""

    def posting(*args, **options):
        handle = post(*args, **options)
        call, wait = comm.recorder.calls[-1], handle.wait
        unwaited.append(call)

        def waiting():
            unwaited[:] = [other for other in unwaited if other is not call]
            return wait()

        handle.wait = waiting
        return handle

    return posting


def _words(call: Call) -> str:
    source, destination = call.key[1]
    return f"send to rank {destination}" if call.operation == "send" else f"recv from rank {source}"


def _raised(error: RankError, cause: BaseException | None) -> str:
    if cause is None:
        return str(error).splitlines()[0]
    words = " ".join(f"{type(cause).__name__}: {cause}".split())
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    place = f"\n  in {frames[-1].name}, line {frames[-1].lineno}:  {frames[-1].line}" if frames else ""
    return f"rank {error.rank} raised {words[:400]}{place}"
