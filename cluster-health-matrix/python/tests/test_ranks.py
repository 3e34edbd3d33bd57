"""Two processes with the variables that torchrun sets (torch itself is too large to install here);
they meet, measure and part as they would below it."""

import os
import signal
import time

import pytest

RANK = """
import os, sys, cluster_health
result = cluster_health.core_pair(
    backend="host", sizes="64KiB", repeats=2, timeout=20, out=sys.argv[1] or None)
again = cluster_health.core_pair(backend="host", sizes="1KiB", repeats=1, timeout=20)
if os.environ["RANK"] == "0":
    assert result.per_rank_gbps.shape[0] == 1 and (result.per_rank_gbps > 0).all()
    assert (again.per_rank_gbps > 0).all()
    print(result)
else:
    assert result is None and again is None
    print("nothing")
"""


def variables(rank, size, job):
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@pytest.mark.parametrize("recorded", [False, True])
def test_two_workers_are_the_two_ranks(start, tmp_path, recorded):
    out = tmp_path / "out"
    job = f"{os.getpid()}-{recorded}"
    workers = [
        start(RANK, out if recorded else "", env=variables(rank, 2, job)) for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[0][0].startswith("<core_pair: 1 × ") and outputs[1][0] == "nothing\n", outputs
    assert out.exists() == recorded and (not recorded or (out / "core-pair-64KiB.npy").exists())


def test_other_numbers_of_workers_are_refused(start):
    code = """
import cluster_health
try:
    cluster_health.core_pair(backend="host", sizes="1KiB")
except cluster_health.InvalidError as error:
    print(error)
"""
    alone = start(code, env=variables(2, 3, f"{os.getpid()}-three"))
    printed, _ = alone.communicate(timeout=20)
    assert printed.startswith("ranks: a pair has two ranks, torchrun started 3"), printed


def test_a_worker_that_never_comes_is_named(start):
    code = """
import cluster_health
try:
    cluster_health.core_pair(backend="host", sizes="1KiB", timeout=0.5)
except cluster_health.Error as error:
    print(error.kind, error.rank, isinstance(error, TimeoutError))
"""
    began = time.monotonic()
    alone = start(code, env=variables(0, 2, f"{os.getpid()}-alone"))
    printed, errors = alone.communicate(timeout=20)
    assert printed == "timeout 1 True\n", (printed, errors)
    assert time.monotonic() - began < 15


def test_ctrl_c_on_one_worker_ends_both(start):
    code = """
import os, signal, threading, cluster_health
before = os.sched_getaffinity(0)
def begun(done, total):
    if done and not started:
        started.append(done)
        print("begun", flush=True)
started = []
try:
    cluster_health.core_pair(
        backend="host", sizes="1MiB", repeats=10_000, timeout=20, progress=begun)
    print("stopped")
except KeyboardInterrupt:
    print("interrupted")
assert os.sched_getaffinity(0) == before
"""
    job = f"{os.getpid()}-ctrl-c"
    workers = [start(code, env=variables(rank, 2, job)) for rank in range(2)]
    for worker in workers:
        assert worker.stdout.readline() == "begun\n", worker.stderr.read()
    workers[1].send_signal(signal.SIGINT)
    outputs = [worker.communicate(timeout=30) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert [printed for printed, _ in outputs] == ["stopped\n", "interrupted\n"], outputs
