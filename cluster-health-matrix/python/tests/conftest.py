import os
import pathlib
import signal
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parents[2] / "docs"

SCENARIO = """
[machine]
cpus = 8
numa_nodes = 2
devices = 3

[h2d]
noise = 0.01
"""


@pytest.fixture(autouse=True)
def interruptible():
    """A shell that starts a job in the background makes it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def scenario():
    return SCENARIO


@pytest.fixture
def program():
    """The command line, where CI has built it."""
    path = os.environ.get("CLUSTER_HEALTH_PROGRAM")
    if not path:
        pytest.skip("CLUSTER_HEALTH_PROGRAM does not name the program")
    return path


@pytest.fixture
def start():
    """Starts Python processes that do not outlive their test."""
    started = []

    def start(code, *arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
