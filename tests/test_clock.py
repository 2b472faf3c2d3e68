"""The paced and the virtual clock: the logical times of a run on a described machine, and when they come for real."""

import json
import math
import threading
import time

import pytest
import torch

from pcourse import cli
from pcourse.assemble import Recording, StepRecord, assemble
from pcourse.clock import LogicalClock, WallClock, described_time
from pcourse.comm import thread_comms
from pcourse.config import ConfigError, ModelConfig, ParallelConfig, TrainConfig
from pcourse.cost.cluster import Cluster, Link
from pcourse.pace import Pace, PacedRanks, machine_of
from pcourse.report import MemoryLedger, Report
from pcourse.summary import summary
from pcourse.train import measure
from pcourse.world import RunCancelled, World

BACKENDS = ["threads", "gloo"]
MODEL = ModelConfig(layers=4, hidden=32, heads=4, sequence=16)
TRAIN = TrainConfig(batch=4, steps=3, warmup=1)
CLUSTER = Cluster("two nodes", 1e9, 0.5, Link(1e6, 1e-3), ranks_per_node=2, network=Link(1e5, 0.01))


def ranks_at(pace, **degrees) -> PacedRanks:
    return PacedRanks(Pace.of(pace), ParallelConfig(**degrees))


def on_virtual_time(program, machine, size: int, backend: str = "threads"):
    """`program(comm)` on every rank, on the virtual clock of `machine`."""

    def run(comm):
        with described_time(comm, machine, paced=False):
            return program(comm)

    return World(size, backend).run(run, timeout=30)


# --- what is described -------------------------------------------------------------------------------------------


def test_a_pace_of_t_is_t_forward_and_2t_backward():
    pace = Pace.of(0.02)
    assert pace == Pace(0.02, 0.02, 0.02) == Pace.of(pace) == Pace.parse("20ms")
    assert (pace.seconds("forward", 0), pace.seconds("backward", 3), pace.seconds("optimizer", 0)) == (0.02, 0.04, 0)
    assert [pace.seconds(f"backward-{half}", 0, chunks=2) for half in ("input", "weight")] == [0.01, 0.01]
    assert pace.seconds("recompute", 0, chunks=2) == 0.01
    assert str(pace) == "20 ms forward, 40 ms backward a stage"


def test_a_pace_can_differ_by_stage_and_by_half():
    pace = Pace((0.01, 0.02), 0.01, [0.01, 0.03], transfer=0.0005)
    assert pace.seconds("backward", 1) == 0.04 and pace.seconds("forward", 1) == 0.02
    assert str(pace) == (
        "10/20 ms forward, 20/40 ms backward (10 ms for inputs, 10/30 ms for weights) a stage, 500 µs a message"
    )
    assert Pace.parse("500us, 1.5s") == Pace.of([0.0005, 1.5])


def test_messages_take_the_time_of_the_link_between_neighbours():
    pace = Pace(1, 1, 1, transfer=(0.1, 0.2, 0.3))
    assert [pace.transfer_seconds(a, b, 3) for a, b in ((0, 1), (1, 0), (2, 1), (2, 0), (0, 2))] == [
        0.1, 0.1, 0.2, 0.3, 0.3,
    ]  # fmt: skip
    assert pace.transfer_seconds(1, 1, 3) == 0 and Pace(1, 1, 1, 0.5).transfer_seconds(0, 2, 4) == 0
    assert Pace(1, 1, 1, (0.1, 0.2)).transfer_seconds(1, 0, 2) == 0.1


def test_ranks_of_a_stage_share_its_pace():
    ranks = ranks_at([0.01, 0.02], tp=2, pp=2, dp=2)
    assert [ranks.parallel.stage_of(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert ranks.compute_seconds(1e9, "forward", rank=6) == 0.02


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "20ms", [], [0.1, 0], None])
def test_a_pace_that_is_no_time_is_refused(value):
    with pytest.raises(ConfigError, match="forward=.* must be seconds, 1e-09 to 1,000,000"):
        Pace(value, 0.1, 0.1)


@pytest.mark.parametrize("text", ["20", "ms", "", "-3ms", "nans", "infs", "1ms,,2ms", "3 min"])
def test_a_text_that_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="it can be 20ms"):
        Pace.parse(text)


def test_collectives_on_a_cluster_take_the_ring_s_time():
    """2(n-1)·latency + 2(n-1)/n·S/bandwidth for an all-reduce, on the slowest link (formulas B.5)."""
    wire = 2 * 3 / 4 * 1e6
    assert CLUSTER.collective_seconds("all_reduce", wire, (0, 1, 2, 3)) == 6 * 0.01 + wire / 1e5
    assert CLUSTER.collective_seconds("all_gather", wire / 2, (0, 1)) == 1e-3 + wire / 2 / 1e6
    assert CLUSTER.collective_seconds("reduce_scatter", 0, (2,)) == 0
    assert CLUSTER.link_between(0, 1) == CLUSTER.link_between(3, 2) == CLUSTER.link
    assert CLUSTER.link_between(1, 2) == CLUSTER.network
    assert CLUSTER.compute_seconds(1e9) == 2.0
    assert str(CLUSTER) == (
        "two nodes (0.001 TFLOP/s at 50%, links of 0.001 GB/s and 1000 µs, nodes of 2 ranks joined by 0.0001 GB/s and "
        "1e+04 µs)"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_flops": 0},
        {"efficiency": 1.5},
        {"slow_motion": -1},
        {"link": 3},
        {"network": None},
        {"ranks_per_node": 0},
    ],
)
def test_a_cluster_that_cannot_be_is_refused(wrong):
    fields = {"name": "c", "peak_flops": 1e9, "efficiency": 0.5, "link": Link(1, 0), "ranks_per_node": 2}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Cluster(**{**fields, "network": Link(1, 0), **wrong})


def test_a_clock_has_what_it_needs_and_nothing_else():
    one = ParallelConfig()
    assert machine_of("wall", None, None, one) is None
    assert machine_of("paced", None, 0.02, one) == ranks_at(0.02)
    assert machine_of("virtual", CLUSTER, None, one) == CLUSTER
    for arguments, words in (
        (("sand", None, None, one), "clock can be wall, paced, virtual"),
        (("wall", None, 0.02, one), "takes no pace; with pace, clock can be paced or virtual"),
        (("paced", None, None, one), "from one of cluster and pace, and has neither"),
        (("virtual", CLUSTER, 0.02, one), "and has both"),
        (("virtual", "A100", None, one), "must be a pcourse.cost.cluster.Cluster"),
        (("paced", None, [0.1, 0.2], ParallelConfig(pp=3)), "has 2 numbers for pp=3; it can have 1 number, or 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            machine_of(*arguments)


# --- logical time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_of_computes_and_messages_takes_what_its_recursion_says(backend):
    """Micro-batch k is done on stage i when both k - 1 there and k on stage i - 1 (and its message) are."""
    pace = Pace((0.01, 0.03, 0.02), 1, 1, transfer=0.001)
    batches = 5

    def program(comm):
        x, done, sent = torch.zeros(4), [], []
        for k in range(batches):
            if comm.rank > 0:
                assert comm.irecv(x, comm.rank - 1).wait()[0] == k
            with comm.compute("forward", micro_batch=k):
                x.fill_(k)
            if comm.rank < comm.size - 1:
                sent.append(comm.isend(x, comm.rank + 1))
            done.append(comm.clock.now())
        for send in sent:
            send.wait()
        assert comm.clock.now() == done[-1], "sends take no time of the sender's"
        return done

    expected = [[0.0] * batches for _ in range(3)]
    for k in range(batches):
        for i in range(3):
            own = expected[i][k - 1] if k else 0.0
            there = expected[i - 1][k] + 0.001 if i else 0.0
            expected[i][k] = max(own, there) + pace.seconds("forward", i)
    assert on_virtual_time(program, ranks_at(pace, pp=3), 3, backend) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_occupy_the_link_of_a_cluster(backend):
    """Each takes bytes/bandwidth of the link, one after the other, and arrives the latency later."""
    size, latency = 4000 / 1e6, 1e-3

    def program(comm):
        x = torch.zeros(1000)
        if comm.rank == 0:
            first, second = comm.isend(x, 1), comm.isend(x, 1)
            issued = comm.clock.now()
            return [issued, *(handle.wait() is x and comm.clock.now() for handle in (first, second))]
        handles = [comm.irecv(x, 0), comm.irecv(x, 0)]
        return [handle.wait() is x and comm.clock.now() for handle in handles]

    sender, receiver = on_virtual_time(program, CLUSTER, 2, backend)
    assert sender == [0, size, 2 * size]
    assert receiver == [size + latency, 2 * size + latency]


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_wait_for_the_latest_rank(backend):
    def program(comm):
        with comm.compute("forward", flops=1e6 * (comm.rank + 1)):
            pass
        comm.all_reduce(torch.ones(1000))
        return comm.clock.now()

    wire = 2 * (1000 - 250) * 4
    last = 4e6 / 0.5e9
    assert on_virtual_time(program, CLUSTER, 4, backend) == [last + (6 * 0.01 + wire / 1e5)] * 4


def test_asynchronous_collectives_of_a_group_run_behind_compute_and_one_after_the_other():
    def program(comm):
        handles = [comm.all_gather(torch.ones(500), sizes=[500, 500], async_op=True) for _ in range(2)]
        assert comm.clock.now() == 0
        with comm.compute("forward", flops=0.5e6):  # 1 ms
            pass
        for handle in reversed(handles):
            handle.wait()
        return comm.clock.now()

    one = 1e-3 + 2000 / 1e6
    assert on_virtual_time(program, CLUSTER, 2) == [one + one] * 2


def test_a_described_send_is_over_when_its_bytes_have_left_whatever_the_receiver_does():
    def program(comm):
        x = torch.ones(10)
        if comm.rank == 0:
            comm.send(x, 1)
            x.zero_()
            with comm.compute("forward"):
                pass
            comm.send(x, 1)
        else:
            with comm.compute("forward"), comm.compute("forward"):
                pass
            return comm.recv(torch.empty(10), 0).sum().item(), comm.recv(torch.empty(10), 0).sum().item()
        return comm.clock.now()

    for backend in BACKENDS:
        assert on_virtual_time(program, ranks_at(0.5), 2, backend) == [0.5, (10.0, 0.0)]


def test_the_wall_clock_is_back_afterwards_in_all_groups():
    def program(comm):
        group = comm.split(tp=2).tp
        with described_time(comm, ranks_at(0.1), paced=False):
            with group.compute("forward"):
                pass
            assert group.clock is comm.clock and group.clock.now() == 0.1
        return type(group.clock) is WallClock and comm.clock is group.clock

    assert World(2, "threads").run(program, timeout=30) == [True, True]


def test_computes_inside_computes_take_their_own_time_and_count_once():
    def program(comm):
        with described_time(comm, ranks_at(0.1), paced=False):
            with comm.compute("step"), comm.compute("backward"):
                with comm.compute("attention"):
                    pass
                with comm.compute("recompute"):
                    pass
            end = comm.clock.now()
            calls, computes = comm.recorder.take()
        return Recording("here", [StepRecord(0.0, end, calls, computes, 0.0, 0.0)], MemoryLedger())

    recordings = World(1, "threads").run(program)
    report = assemble(recordings, MODEL, ParallelConfig(), TRAIN, clock="virtual", machine=ranks_at(0.1))
    spans = [(span.kind, span.start, span.end) for span in report.ranks[0].spans]
    assert spans == [("recompute", 0.0, 0.1), ("backward", 0.1, pytest.approx(0.3))]
    assert report.ranks[0].seconds == pytest.approx({"compute": 0.3, "communication": 0, "waiting": 0, "idle": 0})


# --- reports -----------------------------------------------------------------------------------------------------


def test_a_virtual_step_on_a_pace():
    report = measure(MODEL, ParallelConfig(tp=2), TRAIN, World(2, "threads"), clock="virtual", pace=0.01)
    assert report.step_times == pytest.approx([0.03] * 3, rel=1e-12)
    assert report.origin == "predicted from a run on the virtual clock with 10 ms forward, 20 ms backward a stage"
    assert report.lateness is None and report.valid and not report.notes
    assert report.ranks[0].row("tp", "all_reduce").calls > 0 and report.ranks[0].memory.peak > 0
    wall = measure(MODEL, ParallelConfig(tp=2), TRAIN, World(2, "threads"))
    assert report.loss == wall.loss and report.ranks[0].memory == wall.ranks[0].memory


def test_a_virtual_step_on_a_cluster():
    report = measure(MODEL, ParallelConfig(tp=2), TRAIN, World(2, "threads"), clock="virtual", cluster=CLUSTER)
    row = report.ranks[0].row("tp", "all_reduce")
    assert row.exposed == row.seconds == pytest.approx(row.calls * 2e-3 + row.wire / 1e6)
    seconds = report.ranks[0].seconds
    assert seconds["waiting"] == seconds["idle"] == pytest.approx(0)
    assert seconds["compute"] > 0, "the Trainer says how many FLOPs its computes take"
    assert "two nodes (" in report.source


def test_a_paced_rank_sleeps_to_its_deadline_and_owns_up_to_what_it_overslept(monkeypatch):
    """With a clock on the wall that only sleep moves: three computes of 1 s, the second woken 0.4 s late."""
    now, naps = [100.0], iter([(1, 0), (0.5, 0), (1, 0), (0.5, 0), (1, 0.4), (0.5, 0), (1, 0)])
    monkeypatch.setattr("pcourse.clock.time.perf_counter", lambda: now[0])

    def sleep(seconds):  # as long as it is told, half as long, or longer
        share, more = next(naps)
        now[0] += share * seconds + more

    clock = LogicalClock(ranks_at(1.0), 0, WallClock(torch.device("cpu")), True, sleep)
    (comm,), _ = thread_comms(1)
    clock.start(comm.transport)
    begun = now[0]
    for number, passed in ((1, 1.0), (2, 2.4), (3, 3.0)):
        clock.spend("forward", 0)
        clock.keep_pace()
        assert now[0] - begun == pytest.approx(passed), "never before its time, and what was late is made good"
        assert clock.due == number
        assert clock.finish()[1] == pytest.approx(passed - number)


@pytest.mark.parametrize("ended_by", ["cancel", "close"])
def test_a_paced_thread_ends_in_its_sleep(ended_by):
    world = World(2, "threads")
    begun = []

    def end_it():
        while not world._runs:  # it may have to wait for its turn to measure
            time.sleep(0.05)
        begun.append(time.monotonic())
        time.sleep(0.5)
        getattr(world, ended_by)()

    threading.Thread(target=end_it, daemon=True).start()
    with pytest.raises(RunCancelled) as ended:
        measure(MODEL, ParallelConfig(pp=2, micro_batches=2), TRAIN, world, clock="paced", pace=600.0)
    assert time.monotonic() - begun[0] < 20 and "cannot be ended" not in str(ended.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_paced_comes_when_it_is_due(backend):
    for _ in range(3):  # this machine may be busy with something else
        parallel = ParallelConfig(pp=2, micro_batches=4)
        report = measure(MODEL, parallel, TRAIN, World(2, backend), clock="paced", pace=0.02)
        assert report.provenance == "paced" and min(report.step_times) >= 0.3 * (1 - 1e-9)
        assert report.origin.startswith("paced to 20 ms forward, 40 ms backward a stage, on 2 ")
        assert [span.end for rank in report.ranks for span in rank.spans if span.kind == "forward"][0] == 0.02
        if report.valid:
            assert 0 <= report.lateness <= 0.01
            assert report.step_seconds <= 0.3 * 1.011
            assert "is valid" in report.notes[-1] and "valid: " in summary(report)
            return
    pytest.skip(f"this machine is too busy: {100 * report.lateness:.1f} % late")


@pytest.mark.parametrize("machine", [ranks_at(0.02), CLUSTER], ids=["pace", "cluster"])
def test_a_late_report_says_that_it_is_not_valid_and_what_would_do(machine):
    """The second rank was to end at 0.9 s, ended 0.5 s later, and took 0.7 s for what was due in 0.2 s. The step, which
    was to end at 1 s with the first rank, so ends 0.4 s late."""
    steps = [StepRecord(0.0, 1.0, [], [], 1.0, 1.0), StepRecord(0.0, 0.9, [], [], 1.0, 1.0, 0.5, 0.7)]
    recordings = [Recording("here", [step], MemoryLedger()) for step in steps]
    report = assemble(recordings, MODEL, ParallelConfig(tp=2), TRAIN, clock="paced", machine=machine)
    assert report.lateness == pytest.approx(0.4) and not report.valid and report.step_seconds == pytest.approx(1.4)
    # 0.7 s of work into (0.2 s + 1 % of 1 s) · 3.33, times 1.25: 4.2
    would_do = {"pace": "84 ms forward, 168 ms backward a stage", "cluster": "slow_motion=4.2"}
    assert report.notes[-1] == (
        "the paced run is NOT VALID: the step ended 40.00 % after its time, and 1 % is allowed; "
        f"{would_do['cluster' if machine is CLUSTER else 'pace']} would do"
    )
    assert "NOT VALID: 40.00 % of the step" in summary(report)
    assert Report.from_json(report.to_json()) == report
    old = json.loads(report.to_json())
    del old["lateness"]
    assert Report.from_json(json.dumps(old)).valid, "a report that was saved before there was a lateness"


def test_slow_motion_is_in_the_words_and_not_in_the_times():
    slow = CLUSTER.slower(4)
    report = measure(MODEL, ParallelConfig(), TRAIN, World(1, "threads"), clock="paced", cluster=slow)
    told = measure(MODEL, ParallelConfig(), TRAIN, World(1, "threads"), clock="virtual", cluster=CLUSTER)
    assert ", 4 times slower, on 1 thread" in report.device
    assert report.ranks[0].spans == told.ranks[0].spans
    assert report.step_seconds >= told.step_seconds * (1 - 1e-9)


def test_a_step_that_takes_the_machine_no_time_is_no_report():
    recordings = [Recording("here", [StepRecord(0.0, 0.0, [], [], 1.0, 1.0)], MemoryLedger())]
    with pytest.raises(ValueError, match="nothing in this step takes time on two nodes"):
        assemble(recordings, MODEL, ParallelConfig(), TRAIN, clock="virtual", machine=CLUSTER)


def test_a_rank_that_sleeps_is_not_taken_for_stuck(monkeypatch):
    """While it sleeps its act is that of a rank that waits for nobody (launch/acts.py)."""
    acts, asleep = [], []
    (comm,), _ = thread_comms(1, acts=[acts.append])
    monkeypatch.setattr(
        comm.transport, "sleep", lambda seconds: (asleep.append(acts[-1] if acts else "computing"), time.sleep(seconds))
    )
    with described_time(comm, ranks_at(0.05), paced=True), comm.compute("forward"):
        pass
    assert len(asleep) >= 2 and all(act.startswith("computing") for act in asleep)


# --- the command line --------------------------------------------------------------------------------------------

SMALL = ["--layers=2", "--hidden=32", "--heads=4", "--sequence=16", "--batch=2", "--steps=1", "--warmup=0"]


def test_run_keeps_a_pace(capsys):
    assert cli.main(["run", *SMALL, "--backend=threads", "--pace=5ms"]) == 0
    out = capsys.readouterr().out
    assert "paced to 5 ms forward, 10 ms backward a stage, on 1 thread" in out and "lateness" in out


def test_run_can_reckon_a_pace(capsys):
    assert cli.main(["run", *SMALL, "--backend=threads", "--pace=5ms", "--clock=virtual", "--json"]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert report.provenance == "predicted" and report.step_seconds == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pace=20"], "pace: '20' is not a time"),
        (["--pace=1ms,2ms"], "has 2 numbers for pp=1"),
        (["--clock=paced"], "needs the times to keep"),
        (["--clock=wall", "--pace=1ms"], "clock can be paced or virtual"),
    ],
)
def test_a_wrong_pace_or_clock_is_one_line_and_exit_code_2(options, words, capsys):
    assert cli.main(["run", *SMALL, *options]) == 2
    out, err = capsys.readouterr()
    assert not out and words in err and err.count("\n") == 1
