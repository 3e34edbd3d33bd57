"""What the package promises beside its results: its types, its size, its documentation."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import cluster_health
from conftest import DOCS, HERE


def test_types_hold_for_package_and_users(tmp_path):
    package = pathlib.Path(cluster_health.__file__).parent
    assert HERE.parent not in package.parents, "the sources are tested, not the wheel"
    assert (package / "py.typed").exists()
    user = tmp_path / "user.py"
    user.write_text(
        "import numpy as np\n"
        "from numpy.typing import NDArray\n"
        "from tqdm import tqdm\n"
        "import cluster_health as ch\n"
        "result = ch.h2d(cpus='0-3', sizes=[65536, '1MiB'], progress=tqdm, cpu=3)\n"
        "ch.h2d(cpus=np.arange(3), devices=range(2), progress=lambda done, total: None)\n"
        "rates: NDArray[np.float64] = result.gbps\n"
        "word: int = result.findings\n"
        "pairs = ch.core_pair(sizes=8)\n"
        "if pairs is not None:\n"
        "    columns: list[str] = list(pairs.to_frame().columns)\n"
    )
    clean, found = (
        subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", *what],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        for what in [["-p", "cluster_health"], [user]]
    )
    assert clean.returncode == 0, clean.stdout + clean.stderr
    complaints = [line for line in found.stdout.splitlines() if ": error: " in line]
    # The two mistakes, and nothing else.
    assert len(complaints) == 2, found.stdout + found.stderr
    assert 'Unexpected keyword argument "cpu"' in complaints[0]
    assert "Incompatible types in assignment" in complaints[1]


def test_the_stub_is_that_of_the_module():
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "cluster_health._native"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout


def test_everything_public_is_documented():
    for name in cluster_health.__all__:
        assert getattr(cluster_health, name).__doc__, name


def test_the_wheel_is_small():
    wheel = os.environ.get("CLUSTER_HEALTH_WHEEL")
    if not wheel:
        pytest.skip("CLUSTER_HEALTH_WHEEL does not name the wheel")
    assert os.path.getsize(wheel) <= 10_000_000


def blocks():
    text = (DOCS / "embedding.md").read_text()
    section = text.split("\n## Python\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_the_documented_code_runs(number, tmp_path):
    code = blocks()[number]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_all_documented_code_is_run():
    assert len(blocks()) == 3
