"""What the way through Python costs: sweeps of 2 CPUs × 1 device × 3 sizes on the host backend, in turn
with the same sweeps by the Rust example plan_from_json, and the time from import to the first matrix.

    cargo build --release -p cluster-health-examples --example plan_from_json
    python cluster-health-matrix/python/tests/overhead.py target/release/examples/plan_from_json 100

It prints the median of the ratios of neighbours, Python ÷ Rust, with its 95 % interval (order statistics),
and the difference of the fastest of many very short sweeps, which other work on the machine hardly touches: what
a call costs whatever it measures. Both sides begin with the machine and its census.
"""

import json
import statistics
import subprocess
import sys
import time

PLAN = {"cpus": [0, 1], "devices": [0], "sizes": ["1MiB", "4MiB", "16MiB"], "repeats": 3}
SHORT = {**PLAN, "sizes": ["4KiB", "8KiB", "16KiB"], "repeats": 1, "warmup": 0, "iters": 1}

FIRST = """
import time
began = time.perf_counter()
import cluster_health
imported = time.perf_counter()
cluster_health.h2d(backend="host", sizes="1MiB", repeats=1)
done = time.perf_counter()
print(imported - began, done - began)
"""


def first_matrix() -> None:
    runs = [
        [
            float(seconds)
            for seconds in subprocess.run(
                [sys.executable, "-c", FIRST], check=True, capture_output=True, text=True
            ).stdout.split()
        ]
        for _ in range(10)
    ]
    imported, done = (1e3 * statistics.median(column) for column in zip(*runs))
    print(f"from import to the first matrix: {done:.0f} ms, {imported:.0f} ms of it the import")


def in_turn(program: str, options: dict[str, object], pairs: int) -> list[tuple[int, int]]:
    """Nanoseconds of Python and Rust."""
    import cluster_health

    plan = json.dumps({"sweep": "h2d", **options})
    rust = subprocess.Popen(
        [program, plan], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert rust.stdin is not None and rust.stdout is not None
    times = []
    for pair in range(pairs):
        took = {}
        # Who comes first alternates: the second of two neighbours finds warmer caches.
        for language in sorted(["python", "rust"], reverse=pair % 2 == 0):
            if language == "python":
                began = time.perf_counter_ns()
                cluster_health.h2d(backend="host", **options)
                took[language] = time.perf_counter_ns() - began
            else:
                rust.stdin.write("\n")
                took[language] = int(rust.stdout.readline())
        times.append((took["python"], took["rust"]))
    rust.stdin.close()
    rust.wait()
    return times


def overhead(program: str, pairs: int) -> None:
    short = in_turn(program, SHORT, 20 * pairs)
    python, rust = (min(times) / 1e3 for times in zip(*short))
    print(f"fastest very short sweep: Python {python:.0f} µs, Rust {rust:.0f} µs")
    ratios = sorted(python / rust for python, rust in in_turn(program, PLAN, pairs))
    below = max(0, int(pairs / 2 - 0.98 * pairs**0.5))
    print(
        f"Python / Rust: median {statistics.median(ratios):.4f}, 95 % interval {ratios[below]:.4f} "
        f"to {ratios[pairs - 1 - below]:.4f}, {pairs} pairs"
    )


if __name__ == "__main__":
    first_matrix()
    overhead(sys.argv[1], int(sys.argv[2]))
