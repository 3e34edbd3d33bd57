"""Misuse is an exception that says what to do, never a panic or an abort."""

import builtins
import subprocess
import sys

import pytest

import cluster_health as ch


@pytest.mark.parametrize(
    "options, begins",
    [
        ({"cpus": "0-x"}, "cpus: "),
        ({"cpus": [-1]}, "cpus: "),
        ({"cpus": [1 << 40]}, "cpus: "),
        ({"cpus": []}, "cpus: "),
        ({"cpus": [999_999]}, "cpus: "),
        ({"cpus": [0, 0]}, "cpus: "),
        ({"devices": "99"}, "devices: "),
        ({"sizes": "many"}, "sizes: "),
        ({"sizes": []}, "sizes: "),
        ({"sizes": 0}, "sizes: "),
        ({"sizes": 1 << 62}, "sizes"),
        ({"iters": 0}, "iters: "),
        ({"iters": 1 << 70}, "iters: "),
        ({"iters": "3"}, "iters: "),
        ({"repeats": -1}, "repeats: "),
        ({"seed": 1.5}, "seed: "),
        ({"ci": 7}, "ci: "),
        ({"ci": float("nan")}, ""),
        ({"direction": "up"}, "direction: "),
        ({"order": "random"}, "order: "),
        ({"timeout": -1}, "timeout: "),
        ({"timeout": "soon"}, "timeout: "),
        ({"budget": "0s"}, "budget: "),
        ({"load": "gpu"}, "load: "),
        ({"expect": "fast"}, "expect: "),
        ({"backend": "cuda"}, "backend: "),
        ({"backend": "host", "scenario": "[machine]\n"}, "scenario: "),
        ({"backend": "synthetic"}, "scenario: "),
        ({"scenario": "[machine]\ncpus = 'many'\n"}, "scenario"),
        ({"sizes": object()}, ""),
        ({"progress": 7}, "progress: "),
        ({"out": "out", "resume": True, "force": True}, "resume: "),
    ],
)
def test_bad_arguments_are_value_errors(options, begins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "scenario" not in options:
        options = {"backend": "host", **options}
    with pytest.raises(ValueError) as raised:
        ch.h2d(**options)
    assert isinstance(raised.value, ch.Error), raised.value
    assert str(raised.value).startswith(begins), raised.value
    assert raised.value.kind in ("invalid", "format")
    assert "--" not in str(raised.value), raised.value


def test_pairs_check_theirs():
    with pytest.raises(ch.InvalidError, match="^device_pair: "):
        ch.core_pair(backend="host", device_pair=[0, 1, 2])
    with pytest.raises(ch.InvalidError, match="^ranks: 'many' is none of auto, env, local"):
        ch.core_pair(backend="host", ranks="many")
    with pytest.raises(ch.InvalidError, match="^ranks: env: no launcher"):
        ch.core_pair(backend="host", ranks="env")
    with pytest.raises(TypeError):
        ch.core_pair(cpus="0")


def test_what_is_not_there(tmp_path):
    with pytest.raises(ch.Error) as raised:
        ch.h2d(backend="ascend")
    assert raised.value.kind == "unavailable" and isinstance(raised.value, ch.UnavailableError)
    with pytest.raises(ch.Error) as raised:
        ch.diagnose(tmp_path / "nowhere")
    assert raised.value.kind == "io" and "no result folder" in str(raised.value)
    with pytest.raises(ch.Error):
        ch.h2d(scenario=tmp_path / "nowhere.toml")
    with pytest.raises(ch.Error):
        ch.compare(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ch.InvalidError, match="^min_effect: "):
        ch.compare(tmp_path, tmp_path, min_effect=3)
    with pytest.raises(ch.InvalidError, match="^expect: "):
        ch.diagnose(tmp_path, expect="fast")


def test_folders_are_not_overwritten(tmp_path, scenario):
    options = {"scenario": scenario, "sizes": "1MiB", "repeats": 1, "out": tmp_path / "out"}
    ch.h2d(**options)
    with pytest.raises(ch.Error, match="force"):
        ch.h2d(**options)
    assert ch.h2d(**options, force=True).complete
    (tmp_path / "out" / "run.json").write_text("{")
    with pytest.raises(ch.FormatError) as raised:
        ch.diagnose(tmp_path / "out")
    assert isinstance(raised.value, ValueError)


def test_a_timeout_is_a_timeout():
    assert issubclass(ch.TimeoutError, builtins.TimeoutError)
    assert issubclass(ch.TimeoutError, ch.Error)


def test_frames_say_what_they_need(scenario):
    code = (
        "import sys\n"
        "sys.modules['pandas'] = None\n"
        "import cluster_health\n"
        "result = cluster_health.h2d(scenario=sys.argv[1], sizes='1MiB', repeats=1)\n"
        "try:\n"
        "    result.to_frame()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, scenario], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "to_frame() needs pandas: pip install pandas"


def test_importing_loads_numpy_only():
    code = (
        "import sys, cluster_health\n"
        "print(sorted({'pandas', 'tqdm', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
