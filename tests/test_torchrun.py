"""The same measurement under torchrun, as on a cluster: here two agents stand for two machines."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys

SIZES = ["--layers=1", "--hidden=32", "--heads=4", "--sequence=16", "--batch=2", "--steps=2", "--warmup=0"]


def free_port() -> int:
    """Below the ports that the system hands out by itself, one of which may be gone again before torchrun takes it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def agents(
    nodes: int, ranks: int, *arguments: str, program=("-m", "pcourse", "run")
) -> list[subprocess.CompletedProcess]:
    port = free_port()
    base = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    base += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*base, f"--node-rank={node}", *program, *SIZES, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        for node in range(nodes)
    ]
    ended = []
    for process in started:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ended


def test_two_machines_of_one_rank():
    first, second = agents(2, 1, "--tp=2", "--json")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    report = json.loads(first.stdout)
    assert second.stdout == ""
    assert len(report["ranks"]) == 2 and report["provenance"] == "measured"
    assert report["ranks"][1]["communication"][-1]["axis"] == "tp"


def test_a_program_can_measure_twice(tmp_path):
    twice = tmp_path / "twice.py"
    twice.write_text(
        "import sys\n"
        "from pcourse.cli import main\n"
        "main(['run', *sys.argv[1:]])\n"
        "sys.exit(main(['run', *sys.argv[1:], '--micro-batches=2', '--timeout=30']))\n"
    )
    (only,) = agents(1, 2, "--tp=2", program=(str(twice),))
    assert only.returncode == 0 and only.stdout.count("measured on 2 CPU ranks") == 2, only.stderr


def test_clocks_of_several_machines_are_aligned(tmp_path):
    """The second machine's clock is an hour ahead; its times must still fit the first's."""
    late = tmp_path / "late.py"
    late.write_text(
        "import os, sys, time\n"
        "clock, ahead = time.perf_counter, 3600.0 * int(os.environ['GROUP_RANK'])\n"
        "time.perf_counter = lambda: clock() + ahead\n"
        "from pcourse.cli import main\n"
        "sys.exit(main(['run', *sys.argv[1:]]))\n"
    )
    first, second = agents(2, 1, "--tp=2", "--json", program=(str(late),))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    report = json.loads(first.stdout)
    assert report["step_seconds"] < 60 and "aligned to within" in report["notes"][0]
    for rank in report["ranks"]:
        assert all(-0.01 < span["start"] <= span["end"] < 60 for span in rank["spans"])


def test_ranks_that_do_not_fit_are_refused():
    (only,) = agents(1, 2, "--tp=4", "--json")
    assert only.returncode != 0 and "this world has 2 ranks and the configuration needs 4" in only.stderr
