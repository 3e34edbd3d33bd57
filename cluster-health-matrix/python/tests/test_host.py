"""Sweeps of this machine: what the process is like meanwhile and afterwards."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
import tqdm

import cluster_health


def mask():
    """The CPUs of every thread of this process."""
    masks = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            masks[task] = frozenset(os.sched_getaffinity(int(task)))
    return masks


def is_as(before):
    """No thread more than before, and no mask changed; the kernel may take a while to end a thread."""
    deadline = time.monotonic() + 10
    while not mask().items() <= before.items():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# A sweep that takes very much longer than a test waits.
LONG = {"backend": "host", "sizes": "4MiB", "repeats": 3_000}


@contextlib.contextmanager
def later(function, *arguments):
    """Calls it from another thread while the block runs, unless that ends before."""
    timer = threading.Timer(0.3, function, arguments)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_a_matrix_of_this_machine():
    before = mask()
    result = cluster_health.h2d(backend="host", sizes=["64KiB", "1MiB"], repeats=2)
    assert is_as(before)
    assert result.cpus == cluster_health.census().bindable
    assert result.gbps.shape == (2, len(result.cpus), len(result.devices))
    assert result.gbps.dtype == np.float64 and (result.gbps > 0).all()
    assert (result.status == cluster_health.Status.MEASURED).all()
    assert result.sizes == [65536, 1048576] and result.complete
    assert "GB/s" in repr(result)
    # What an all-gather and a copy of one size have in common is no rate, but an order of magnitude.
    pairs = cluster_health.core_pair(backend="host", sizes="1MiB", repeats=2)
    assert is_as(before)
    assert pairs.per_rank_gbps.shape == (1, len(result.cpus), len(result.cpus))
    assert (pairs.per_rank_gbps > 0).all()


def test_arrays_are_numpys_own_and_not_copied():
    result = cluster_health.h2d(backend="host", sizes="64KiB", repeats=1)
    assert result.gbps is result.matrix.gbps
    # The memory belongs to what the sweep returned: no array below it, and it may be written.
    assert not isinstance(result.gbps.base, np.ndarray) and result.gbps.base is not None
    assert result.gbps.flags.c_contiguous and result.gbps.flags.writeable


def test_pairs_are_recorded(tmp_path):
    out = tmp_path / "out"
    result = cluster_health.core_pair(backend="host", sizes="64KiB", repeats=2, out=out)
    written = np.load(out / "core-pair-64KiB.npy")
    np.testing.assert_array_equal(result.per_rank_gbps[0], written)
    # A complete run is left as it is: no ranks are started.
    again = cluster_health.core_pair(
        backend="host", sizes="64KiB", repeats=2, out=out, resume=True
    )
    np.testing.assert_array_equal(again.per_rank_gbps, result.per_rank_gbps)


def test_other_threads_run_meanwhile():
    counted = 0
    running = True

    def count():
        nonlocal counted
        while running:
            counted += 1
            time.sleep(0.0001)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        # One call of some hundred milliseconds; a thread that holds the interpreter lets nobody count.
        before = counted
        began = time.monotonic()
        cluster_health.h2d(backend="host", sizes="16MiB", repeats=3)
        took = time.monotonic() - began
        during = counted - before
    finally:
        running = False
        counter.join()
    assert during > 20 * took, (during, took)


@pytest.mark.parametrize("kind", ["h2d", "core_pair"])
def test_ctrl_c_stops_a_sweep(kind, tmp_path):
    measure = getattr(cluster_health, kind)
    before = mask()
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), later(os.kill, os.getpid(), signal.SIGINT):
        measure(**LONG, out=out)
    assert is_as(before)
    # What was measured until then is there, and readable.
    found = cluster_health.diagnose(out)
    assert not found.complete and np.isfinite(found.matrices[0].gbps).any()


def test_ctrl_c_stops_a_sweep_that_is_not_recorded():
    with pytest.raises(KeyboardInterrupt), later(os.kill, os.getpid(), signal.SIGINT):
        cluster_health.h2d(**LONG)


def test_another_thread_stops_a_sweep():
    cancel = cluster_health.CancelToken()
    assert not cancel.cancelled
    with later(cancel.cancel):
        result = cluster_health.h2d(**LONG, cancel=cancel)
    assert cancel.cancelled and not result.complete
    assert np.isfinite(result.gbps).any() and "interrupted" in repr(result)


def test_progress_is_told_and_its_exceptions_stop_the_sweep():
    seen = []
    result = cluster_health.h2d(
        backend="host", sizes="64KiB", repeats=2, progress=lambda *now: seen.append(now)
    )
    assert seen and all(0 <= done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen) and result.complete

    class Enough(Exception):
        pass

    def stop(done, total):
        if done:
            raise Enough

    with pytest.raises(Enough):
        cluster_health.h2d(**LONG, progress=stop)


def test_tqdm_shows_the_points(capsys):
    made = []

    class Bar(tqdm.tqdm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, mininterval=0, **options)
            made.append(self)

    cluster_health.h2d(backend="host", sizes="64KiB", repeats=2, progress=Bar)
    [bar] = made
    assert bar.n == bar.total > 0 and bar.disable  # closed
    assert f"{bar.n}/{bar.total}" in capsys.readouterr().err
    cluster_health.h2d(backend="host", sizes="64KiB", repeats=1, progress=tqdm.tqdm)


def test_it_runs_beside_the_main_thread():
    results = []
    worker = threading.Thread(
        target=lambda: results.append(cluster_health.h2d(backend="host", sizes="64KiB", repeats=1))
    )
    worker.start()
    worker.join()
    assert results[0].complete
