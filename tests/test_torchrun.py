"""The same measurement under torchrun, as on a cluster: here two agents stand for two machines."""

import json
import os
import socket
import subprocess
import sys

SIZES = ["--layers=1", "--hidden=32", "--heads=4", "--sequence=16", "--batch=2", "--steps=2", "--warmup=0"]


def agents(nodes: int, ranks: int, *arguments: str) -> list[subprocess.CompletedProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    base += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*base, f"--node-rank={node}", "-m", "pcourse", "run", *SIZES, *arguments],
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


def test_ranks_that_do_not_fit_are_refused():
    (only,) = agents(1, 2, "--tp=4", "--json")
    assert only.returncode != 0 and "this world has 2 ranks and the configuration needs 4" in only.stderr
