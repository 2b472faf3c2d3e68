"""World: what it brings back, what it says when it cannot, and what it leaves behind (nothing)."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest

from pcourse.launch.words import name_cells
from pcourse.world import RankError, RunCancelled, RunTimeout, World, machine_lock, warm_up

ROOT = Path(__file__).resolve().parents[1]
both = pytest.mark.parametrize("backend", ["gloo", "threads"])


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert multiprocessing.active_children() == []


def failure(program, *args, size=2, backend="gloo", timeout=30) -> RankError:
    with pytest.raises(RankError) as caught:
        World(size, backend).run(program, *args, timeout=timeout)
    return caught.value


def wait_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


@contextlib.contextmanager
def started(target):
    """`target` in a thread that ends with the block; yields the list that gets what it returns or raises."""
    outcome = []

    def run():
        try:
            outcome.append(target())
        except BaseException as e:
            outcome.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(30)
        assert not thread.is_alive()


# --- results --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [1, 2, 8])
def test_results_come_in_rank_order(backend, size):
    def program(comm, factor):
        import torch

        return comm.rank * factor, comm.all_reduce(torch.ones(3)).sum().item()

    assert World(size, backend).run(program, 10) == [(10 * r, 3.0 * size) for r in range(size)]


@both
def test_tensors_come_back(backend):
    import torch

    def program(comm):
        w = torch.arange(3.0, requires_grad=True)
        (w * comm.rank).sum().backward()
        return {"grad": w.grad, "bf16": torch.ones(2, dtype=torch.bfloat16)}

    results = World(2, backend).run(program)
    assert torch.equal(results[1]["grad"], torch.ones(3))
    assert results[0]["bf16"].dtype == torch.bfloat16


def test_a_rank_starts_from_todays_environment_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PCOURSE_TEST", "today")
    monkeypatch.chdir(tmp_path)
    found = World(1).run(lambda comm: (os.environ.get("PCOURSE_TEST"), os.getcwd()))
    assert found == [("today", str(tmp_path))]


def test_nothing_stays_from_one_run_to_the_next():
    import torch

    def spoil(comm):
        torch.set_default_dtype(torch.float64)

    world = World(2)
    world.run(spoil)
    assert world.run(lambda comm: torch.zeros(1).dtype) == [torch.float32] * 2


def test_a_class_of_this_program_stays_itself():
    class Point:
        def where(self):
            return "here"

    method = Point.where
    point, same = World(1).run(lambda comm: (Point(), Point))[0]
    assert type(point) is Point and same is Point
    assert Point.where is method, "loading a result must not replace the methods of a class"


@both
def test_several_threads_run_at_once(backend):
    world, results = World(2, backend), {}

    def run(number):
        results[number] = world.run(lambda comm: (number, comm.rank))

    with contextlib.ExitStack() as threads:
        for number in range(4):
            threads.enter_context(started(lambda number=number: run(number)))
    assert results == {n: [(n, 0), (n, 1)] for n in range(4)}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="1 or more"):
        World(size)


def test_a_wrong_backend_is_refused():
    with pytest.raises(ValueError, match="backend can be auto, gloo, nccl, threads"):
        World(2, "mpi")


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "5", None])
def test_a_wrong_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="seconds"):
        World(1).run(print, timeout=timeout)


def test_a_program_that_was_called_already_is_refused():
    with pytest.raises(TypeError, match="must be a function"):
        World(1).run(None)


def test_a_closed_world_says_so():
    with World(3) as world:
        pass
    with pytest.raises(RuntimeError, match=r"closed; make a new one: World\(3\)"):
        world.run(print)


def test_arguments_that_cannot_be_sent():
    with pytest.raises(TypeError, match="cannot be sent to ranks: .*lock"):
        World(2).run(lambda comm, lock: None, threading.Lock())


# --- failures -------------------------------------------------------------------------------------


def join_peer(comm):
    import torch

    return comm.all_reduce(torch.ones(2))


@both
@pytest.mark.parametrize("size, culprit", [(2, 1), (2, 0), (4, 2)])
def test_the_rank_that_raised_is_named(backend, size, culprit):
    def program(comm):
        comm.barrier()  # all have started
        if comm.rank == culprit:
            raise ValueError("oops\nand more")
        import torch

        comm.all_reduce(torch.ones(2))

    error = failure(program, size=size, backend=backend)
    assert (error.rank, error.size) == (culprit, size)
    text = str(error)
    assert text.startswith(f"rank {culprit} of {size} raised ValueError: oops\n")
    assert 'raise ValueError("oops\\nand more")' in text and "in program" in text
    assert "pcourse/world.py" not in text and "pcourse/launch" not in text
    assert f"rank {(culprit + 1) % size} lost its peer in all_reduce number 2 over world" in text


@both
def test_raising_in_backward(backend):
    def program(comm):
        import torch

        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                raise ArithmeticError("backward broke")

        Broken.apply(torch.ones(1, requires_grad=True)).sum().backward()

    error = failure(program, backend=backend)
    assert "raised ArithmeticError: backward broke" in str(error)
    assert 'raise ArithmeticError("backward broke")' in str(error)


@pytest.mark.parametrize(
    "end, words",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of 2 was ended by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank 1 of 2 was ended by SIGTERM"),
        (lambda: os._exit(3), "rank 1 of 2 left with exit code 3 before its program returned"),
        (lambda: os._exit(0), "rank 1 of 2 left with exit code 0 before its program returned"),
        (lambda: sys.exit(3), "rank 1 of 2 left with exit code 3 before its program returned"),
    ],
)
def test_a_rank_that_dies_is_named(end, words):
    def program(comm):
        import torch

        if comm.rank == 1:
            print("last words")
            end()
        comm.all_reduce(torch.ones(2))

    error = failure(program)
    assert str(error).startswith(words)
    assert error.rank == 1 and "rank 0" in str(error)


def test_what_a_dead_rank_wrote_is_shown():
    def program(comm):
        os.write(2, b"terminate called: collective mismatch\n")
        os.abort()

    error = failure(program, size=1)
    assert "was ended by SIGABRT" in str(error)
    assert "collective mismatch" in str(error) and "in program" in str(error)


def test_leaving_from_a_thread():
    error = failure(lambda comm: sys.exit(3), size=1, backend="threads")
    assert "rank 0 of 1 left with exit code 3" in str(error)


@both
def test_sizes_that_do_not_fit(backend):
    def program(comm):
        import torch

        comm.all_reduce(torch.ones(1000 if comm.rank else 2))

    text = str(failure(program, backend=backend))
    assert "all_reduce" in text and "in program" in text


@both
def test_a_rank_that_never_arrives(backend):
    gate = threading.Event() if backend == "threads" else None

    def program(comm):
        import torch

        if comm.rank == 1:
            while not (gate and gate.is_set()):
                time.sleep(0.01)
        comm.all_reduce(torch.ones(2))

    try:
        error = failure(program, backend=backend, timeout=0.5)
    finally:
        if gate:
            gate.set()
    assert isinstance(error, RunTimeout)
    first, *rest = str(error).splitlines()
    assert first.startswith("the run did not finish within 0.5 s; rank 0 was last in all_reduce number 1")
    assert first.endswith("rank 1 was computing")
    assert "time.sleep(0.01)" in "".join(rest) and "comm.all_reduce(torch.ones(2))" in "".join(rest)
    if gate:
        assert rest[-1].startswith("rank 1 is still running and cannot be ended: threads never can; restart the kernel")


@both
def test_a_rank_that_leaves_the_others_waiting(backend, monkeypatch):
    monkeypatch.setattr("pcourse.launch.run.STUCK_WITH_A_RANK_GONE", 0.4)

    def program(comm):
        if comm.rank == 0:
            import torch

            comm.all_reduce(torch.ones(2))

    error = failure(program, backend=backend)
    assert isinstance(error, RunTimeout) and "the run is stuck" in str(error)
    assert "rank 0 was last in all_reduce number 1" in str(error) and "rank 1 had finished" in str(error)


@both
def test_ranks_that_all_wait(backend, monkeypatch):
    monkeypatch.setattr("pcourse.launch.run.STUCK", 0.4)

    def program(comm):
        import torch

        comm.recv(torch.ones(2), 1 - comm.rank)

    assert "the run is stuck" in str(failure(program, backend=backend))


def test_a_rank_that_computes_is_not_stuck(monkeypatch):
    monkeypatch.setattr("pcourse.launch.run.STUCK", 0.2)
    monkeypatch.setattr("pcourse.launch.run.STUCK_WITH_A_RANK_GONE", 0.2)

    def program(comm):
        if comm.rank:
            time.sleep(1.5)

    assert World(2).run(program) == [None, None]


@both
def test_a_lost_peer_is_blamed_only_alone(backend):
    def program(comm, lonely):
        from pcourse.comm import PeerLost

        if comm.rank == 0:
            raise PeerLost("nobody there")
        if not lonely:
            time.sleep(0.1)
            raise KeyError("the cause")

    error = failure(program, False, backend=backend)
    assert str(error).startswith("rank 1 of 2 raised KeyError: 'the cause'")
    assert failure(program, True, backend=backend).rank == 0


def test_a_result_that_cannot_be_sent():
    error = failure(lambda comm: threading.Lock() if comm.rank else 1)
    assert str(error).startswith("the result of rank 1 cannot be pickled: TypeError: cannot pickle")
    assert error.rank == 1


def test_a_result_that_cannot_be_read_back():
    def program(comm):
        class Trap:
            def __reduce__(self):
                return (int, ("not a number",))

        return Trap()

    assert "the result of rank 0 cannot be read back: ValueError" in str(failure(program, size=1))


@both
def test_a_world_works_again_after_a_failure(backend):
    world = World(2, backend)
    with pytest.raises(RankError):
        world.run(lambda comm: 1 / comm.rank)
    begun = time.monotonic()
    assert world.run(lambda comm: comm.rank) == [0, 1]
    assert time.monotonic() - begun < 5


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(RankError("words", 1, 2)))
    assert (str(error), error.rank, error.size) == ("words", 1, 2)


# --- cancel, close, interrupt ---------------------------------------------------------------------


def endless(comm):
    for step in range(10**6):
        comm.progress(step, 10**6)
        comm.barrier()
        time.sleep(0.01)


@both
@pytest.mark.parametrize("stop", ["cancel", "close"])
def test_cancel_from_another_thread(backend, stop):
    world, steps = World(2, backend), []
    with started(lambda: world.run(endless, progress=lambda step, of: steps.append(step))) as outcome:
        wait_until(lambda: steps)
        begun = time.monotonic()
        getattr(world, stop)()
    assert isinstance(outcome[0], RunCancelled)
    assert time.monotonic() - begun < 5
    if stop == "cancel":
        assert world.run(lambda comm: comm.rank) == [0, 1]


def test_cancel_from_progress():
    world = World(2)
    with pytest.raises(RunCancelled):
        world.run(endless, progress=lambda step, of: world.cancel())


def test_cancel_without_a_run_does_nothing():
    world = World(1)
    world.cancel()
    assert world.run(lambda comm: comm.size) == [1]


def test_a_spinning_thread_is_named():
    world, gate, begun = World(2, "threads"), threading.Event(), threading.Event()

    def program(comm):
        begun.set()
        while comm.rank == 1 and not gate.is_set():
            pass
        comm.barrier()

    with started(lambda: world.run(program)) as outcome:
        begun.wait()
        world.cancel()
        wait_until(lambda: outcome)
        gate.set()
    assert "rank 1 is still running and cannot be ended: threads never can" in str(outcome[0])
    assert "rank 0" not in str(outcome[0])


@both
def test_an_interrupt_ends_the_ranks_and_goes_on(backend):
    world = World(2, backend)

    def interrupt(step, of):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        world.run(endless, progress=interrupt)
    assert multiprocessing.active_children() == []
    assert world.run(lambda comm: comm.rank) == [0, 1]


def test_an_error_in_progress_ends_the_run():
    def progress(step, of):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        World(2).run(endless, progress=progress)


# --- output and progress --------------------------------------------------------------------------


def test_what_ranks_print_comes_in_rank_order(capfd):
    def program(comm):
        time.sleep(0.1 * (1 - comm.rank))
        print("one\ntwo")
        os.write(2, b"from C\n")
        print("no end", end="")

    World(2).run(program)
    lines = ["one", "two", "from C", "no end"]
    assert capfd.readouterr().out.splitlines() == [f"rank {r} │ {line}" for r in range(2) for line in lines]


def test_a_failing_run_shows_what_was_printed(capsys):
    def program(comm):
        print("before")
        raise ValueError

    failure(program, size=1)
    assert capsys.readouterr().out == "rank 0 │ before\n"


def test_output_appears_during_a_long_run(monkeypatch):
    shown = []
    monkeypatch.setattr("builtins.print", lambda *words, **options: shown.append((time.monotonic(), *words)))

    def program(comm):
        sys.stdout.write("at once\n")
        time.sleep(1.5)
        return time.monotonic()

    (ended,) = World(1).run(program)
    assert shown[0][1] == "rank 0 │ at once" and shown[0][0] < ended


def test_endless_output_is_cut(capsys, monkeypatch):
    monkeypatch.setattr("pcourse.launch.rank_files.MOST_OUTPUT", 100)
    World(1).run(lambda comm: print("\n".join("many words" for _ in range(1000))))
    out = capsys.readouterr().out
    assert len(out) < 400 and "more than 100 bytes: the rest is not shown" in out


def test_a_progress_bar_is_one_line(capsys):
    World(1).run(lambda comm: print("1 %\r50 %\r100 %"))
    assert capsys.readouterr().out == "rank 0 │ 100 %\n"


@both
def test_progress_arrives_in_order_and_in_this_thread(backend):
    seen = []

    def program(comm):
        if comm.rank == 0:
            for step in range(1, 4):
                comm.progress(step, 3, loss=1 / step)

    def progress(step, of, loss):
        seen.append((step, of, loss, threading.current_thread() is threading.main_thread()))

    World(2, backend).run(program, progress=progress)
    assert seen == [(step, 3, 1 / step, True) for step in (1, 2, 3)]


# --- worlds in worlds, scripts, kernels -----------------------------------------------------------


def test_threads_within_a_rank():
    def program(comm):
        return World(2, "threads").run(lambda inner: (comm.rank, inner.rank))

    assert World(2).run(program) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_processes_within_a_rank_are_refused():
    error = failure(lambda comm: World(2).run(print))
    assert "a rank cannot start a World of processes" in str(error)


def test_processes_within_a_thread():
    def program(comm):
        return World(2).run(lambda inner: inner.rank) if comm.rank else None

    assert World(2, "threads").run(program) == [None, [0, 1]]


def test_a_rank_starts_no_fork_server_of_its_own():
    def program(comm):
        from multiprocessing import forkserver

        warm_up()
        return forkserver._forkserver._forkserver_pid

    assert World(1).run(program) == [None]


def run_script(text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_script(tmp_path):
    done = run_script(
        """
        import sys
        from pcourse.world import World, warm_up
        warm_up()
        class Answer:
            pass
        def program(comm):
            return Answer()
        if __name__ == "__main__":
            print(isinstance(World(1).run(program)[0], Answer), "torch" in sys.modules)
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("True False\n", "")


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    done = run_script("from pcourse.world import World\nWorld(2).run(print)", tmp_path)
    assert done.returncode == 1
    assert 'put the lines that start runs under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def execute(*cells):
    """The cells' printed text and errors, from a real kernel."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    sources = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=sources)
    client = nbclient.NotebookClient(notebook, timeout=60, allow_errors=True, kernel_name="python3")
    client.execute(cwd=ROOT)
    return notebook.cells


def test_in_a_kernel():
    cells = execute(
        "from pcourse.world import World",
        """
        from dataclasses import dataclass
        @dataclass
        class Answer:
            number: int
            def plus(self):
                return self.number + step
        step = 1
        class Wrong(Exception):
            pass
        """,
        """
        def broken(comm):
            x = {"shape": None}
            return comm.rank + x["shape"][0] + 1
        World(2).run(broken)
        """,
        """
        def program(comm):
            print("on", comm.rank)
            return Answer(comm.rank)
        answers = World(2).run(program)
        step = 10
        print(isinstance(answers[1], Answer), answers == [Answer(0), Answer(1)], answers[1].plus())
        """,
        """
        def program(comm):
            raise Wrong("own class")
        World(2, "threads").run(program)
        """,
    )
    broken, answers, threads = cells[2:]
    error = broken.outputs[-1]
    assert error.ename == "RankError" and " of 2 raised TypeError" in error.evalue
    shown = "\n".join(error.traceback)
    assert 'return comm.rank + x["shape"][0] + 1' in shown and "~~~~~~~~~~^^^" in shown
    assert "pcourse/" not in shown and "results(" not in shown
    printed = "".join(output.text for output in answers.outputs)
    assert printed == "rank 0 │ on 0\nrank 1 │ on 1\nTrue True 11\n"
    assert 'raise Wrong("own class")' in "\n".join(threads.outputs[-1].traceback)


def test_a_kernels_cells_have_their_names():
    cells = execute(
        "from pcourse.world import World",
        """
        def late(comm):
            import traceback
            try:
                1 / 0
            except ZeroDivisionError:
                traceback.print_exc()
                while True: pass
        World(1).run(late, timeout=0.5)
        """,
        """
        def broken(comm):
            try:
                1 / 0
            except ZeroDivisionError as e:
                raise KeyError from e
        World(2, "threads").run(broken)
        """,
        """
        def nested(comm):
            World(2, "threads").run(broken)
        World(1).run(nested)
        """,
    )
    late, broken, nested = ("".join(o.get("text", "") for o in c.outputs) + c.outputs[-1].evalue for c in cells[1:])
    assert "  Cell In[2], line 4, in late\n" in late and "  Cell In[2], line 7, in late\n" in late
    for shown in (broken, nested):
        assert "  Cell In[3], line 3, in broken\n" in shown and "  Cell In[3], line 5, in broken\n" in shown
    assert "  Cell In[4], line 2, in nested\n" in nested
    assert "ipykernel" not in late + broken + nested


def test_a_cell_that_the_kernel_does_not_know(monkeypatch):
    text = 'File "/tmp/ipykernel_7/12.py", line 3, in f\n  File "/home/me/model.py", line 4, in g'
    assert name_cells(text) == text
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))
    assert name_cells(text) == text.replace('File "/tmp/ipykernel_7/12.py"', "this notebook")


# --- the machine's lock ---------------------------------------------------------------------------


def test_one_measuring_run_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    order, words = [], []

    def second():
        with machine_lock(words.append):
            order.append("second")

    with contextlib.ExitStack() as after, machine_lock(words.append):
        assert words == []
        after.enter_context(started(second))
        wait_until(lambda: words)
        order.append("first")
    assert order == ["first", "second"]
    assert words == ["another run is measuring on this machine; waiting for it"]
    assert (tmp_path / "pcourse-measuring.lock").stat().st_mode & 0o777 == 0o666


def test_the_lock_is_given_back_after_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(ValueError), machine_lock():
        raise ValueError
    words = []
    with machine_lock(words.append):
        assert words == []


def test_a_child_that_a_rank_has_forked_gives_no_result_and_does_not_stay():
    def program(comm):
        sleeper = subprocess.Popen(["sleep", "600"])
        child = os.fork()
        if child == 0:
            return "the child"
        os.waitpid(child, 0)
        return sleeper.pid

    pids = World(2).run(program, timeout=30)
    assert all(isinstance(pid, int) for pid in pids)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline, "what a rank has started outlives it"
        time.sleep(0.05)


def test_what_cannot_be_sent_is_named():
    world = World(2)

    def program(comm):
        return world.size

    with pytest.raises(TypeError, match="the variable world, which the program uses, cannot be sent to ranks"):
        world.run(program)
    with pytest.raises(TypeError, match="argument 1 cannot be sent to ranks"):
        world.run(lambda comm, lock: None, threading.Lock())
