"""On a synthetic machine everything is known beforehand."""

import json
import subprocess

import numpy as np
import pytest

import cluster_health


def sweep(scenario, **options):
    return cluster_health.h2d(scenario=scenario, sizes="16MiB,64MiB", seed=7, **options)


def test_arrays_are_those_of_the_program(tmp_path, program, scenario):
    machine = tmp_path / "machine.toml"
    machine.write_text(scenario)
    common = ["--backend", f"synthetic:{machine}", "--seed", "7", "--quiet"]

    copies = tmp_path / "copies"
    subprocess.run(
        [program, "h2d", *common, "--sizes", "16MiB,64MiB", "--devices", "2,0", "--out", copies],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    result = sweep(machine, devices=[2, 0])
    assert result.gbps.shape == (2, 8, 2)
    for size, name in enumerate(["16MiB", "64MiB"]):
        np.testing.assert_array_equal(result.gbps[size], np.load(copies / f"h2d-{name}.npy"))

    pairs = tmp_path / "pairs"
    subprocess.run(
        [program, "core-pair", *common, "--rank0-cpus", "0-3", "--sizes", "8MiB", "--out", pairs],
        # 1: something was found.
        check=False,
        stdout=subprocess.DEVNULL,
    )
    result = cluster_health.core_pair(scenario=machine, rank0_cpus="0-3", sizes="8MiB", seed=7)
    assert result.per_rank_gbps.shape == (1, 4, 8)
    written = np.load(pairs / "core-pair-8MiB.npy")
    np.testing.assert_array_equal(result.per_rank_gbps[0], written)
    assert result.rank0_cpus == [0, 1, 2, 3] and result.rank1_cpus == list(range(8))
    np.testing.assert_array_equal(result.alg_gbps[0], 2 * written)
    np.testing.assert_array_equal(result.bus_gbps[0], written)


def test_a_recorded_sweep_is_the_same_and_has_findings(tmp_path, scenario):
    slow = scenario + "\n[[fault]]\nkind = 'slow_device'\ndevices = '1'\nfactor = 0.8\n"
    out = tmp_path / "out"
    recorded = sweep(slow, out=out)
    np.testing.assert_array_equal(recorded.gbps, sweep(slow).gbps)
    np.testing.assert_array_equal(np.load(out / "h2d-64MiB.npy"), recorded.gbps[1])
    assert sweep(slow).findings is None

    [finding] = [found for found in recorded.findings if found["kind"].startswith("slow")]
    assert finding["kind"] == "slow_device" and finding["devices"] == [1]
    assert 0.75 < finding["effect"]["ratio"] < 0.85
    assert "findings" in repr(recorded)

    read = cluster_health.diagnose(out)
    assert read.findings == recorded.findings and read.verdict == "findings"
    assert read.complete and not read.bad_lines
    np.testing.assert_array_equal(read.matrices[0].gbps, recorded.gbps)
    assert "Verdict: findings" in str(read)
    # A link that should be four times as fast.
    demanding = cluster_health.diagnose(out, expect=4 * float(np.nanmedian(recorded.gbps)))
    assert len(demanding.findings) > len(read.findings)


def test_the_program_goes_on_where_python_stopped(tmp_path, program, scenario):
    machine = tmp_path / "machine.toml"
    machine.write_text(scenario)
    out = tmp_path / "out"
    cancel = cluster_health.CancelToken()

    def stop(done, total):
        if done:
            cancel.cancel()

    # In virtual time there are visits enough within the shortest time between two calls.
    part = cluster_health.h2d(
        scenario=machine, sizes="16MiB", repeats=1000, out=out, progress=stop, cancel=cancel
    )
    assert not part.complete and "interrupted" in repr(part)
    points = len((out / "samples.jsonl").read_text().splitlines())
    assert 0 < points < 1000 * 8 * 3
    subprocess.run(
        [program, "h2d", "--backend", f"synthetic:{machine}", "--sizes", "16MiB", "--repeats"]
        + ["1000", "--resume", "--quiet", "--out", out],
        check=False,
        stdout=subprocess.DEVNULL,
    )
    assert json.loads((out / "run.json").read_text())["status"] == "complete"
    assert len((out / "samples.jsonl").read_text().splitlines()) > 1000 * 8 * 3


def test_every_option_arrives(tmp_path, scenario):
    out = tmp_path / "out"
    cluster_health.h2d(
        scenario=scenario,
        cpus=np.array([5, 1]),
        devices=range(2),
        sizes=["4KiB", 65536],
        direction="d2h",
        iters=2,
        repeats=4,
        warmup=1,
        seed=11,
        min_effect="5%",
        order="sequential",
        check="full",
        timeout=7,
        expect="900GB/s",
        arena="core",
        out=out,
    )
    plan = json.loads((out / "run.json").read_text())["plan"]["h2d"]
    assert (plan["cpus"], plan["devices"], plan["sizes"]) == ([5, 1], [0, 1], [4096, 65536])
    assert (plan["iters"], plan["repeats"], plan["warmup"], plan["seed"]) == (2, 4, 1, 11)
    assert (plan["direction"], plan["order"], plan["check"]) == ("d2h", "sequential", "full")
    assert (plan["min_effect"], plan["timeout_ns"], plan["arena"]) == (0.05, 7e9, "core")
    assert plan["expect"] == pytest.approx(900e9)

    cluster_health.h2d(scenario=scenario, budget="5s", target=0.04, out=out, force=True)
    plan = json.loads((out / "run.json").read_text())["plan"]["h2d"]
    assert plan["sample"] == {"budget_ns": 5_000_000_000, "target": 0.04}

    with pytest.raises(cluster_health.InvalidError, match="^ci: "):
        cluster_health.h2d(scenario=scenario, sample=True, ci=0.02)
    loads = cluster_health.h2d(scenario=scenario, load=["idle", "cpu:1"], sizes="16MiB", repeats=1)
    assert [loads.matrix.load, *(m.load for m in loads.other_matrices)] == ["idle", "cpu:1"]


def test_a_sampled_sweep_predicts_what_it_left_out():
    wide = "[machine]\ncpus = 128\nnuma_nodes = 2\ndevices = 8\n"
    result = cluster_health.h2d(scenario=wide, sizes="64MiB", budget="1s")
    matrix = result.matrix
    left_out = matrix.status == cluster_health.Status.NOT_VISITED
    assert left_out.any() and not left_out.all()
    np.testing.assert_array_equal(np.isnan(result.gbps), left_out)
    np.testing.assert_array_equal(np.isfinite(matrix.predicted_gbps), left_out)
    assert matrix.predicted_gbps.dtype == np.float32
    frame = result.to_frame()
    assert frame["predicted_gbps"].notna().sum() == left_out.sum()


def test_what_cannot_be_measured_is_nan_with_a_status(scenario):
    refused = scenario + "\n[[failure]]\nkind = 'bind_refused'\nrank = 1\ncpus = '3'\n"
    result = cluster_health.core_pair(scenario=refused, sizes="1MiB", repeats=1)
    rates = result.per_rank_gbps
    assert np.isnan(rates[:, :, 3]).all() and np.isfinite(np.delete(rates, 3, axis=2)).all()
    np.testing.assert_array_equal(result.status != cluster_health.Status.MEASURED, np.isnan(rates))
    assert "56 of 64 cells" in repr(result)


def test_frames_have_a_row_per_cell(scenario):
    result = sweep(scenario, cpus="4-6", load="idle,cpu:1", repeats=2)
    frame = result.to_frame()
    assert len(frame) == 2 * 2 * 3 * 3
    assert list(frame.columns) == ["load", "size", "cpu", "device", "gbps", "spread", "status"]
    idle = frame[frame.load == "idle"]
    row = idle[(idle["size"] == 64 << 20) & (idle.cpu == 5) & (idle.device == 2)]
    assert row.gbps.item() == result.gbps[1, 1, 2]
    assert set(frame.status) == {"measured"}
    wide = idle[idle["size"] == 16 << 20].pivot(index="cpu", columns="device", values="gbps")
    np.testing.assert_array_equal(wide.to_numpy(), result.gbps[0])

    pairs = cluster_health.core_pair(scenario=scenario, sizes="1MiB", repeats=1).to_frame()
    assert {"rank0_cpu", "rank1_cpu"} < set(pairs.columns) and len(pairs) == 64


def test_runs_compare(tmp_path, scenario):
    slow = scenario + "\n[[fault]]\nkind = 'slow_device'\ndevices = '1'\nfactor = 0.7\n"
    for name, machine in {"a": scenario, "b": scenario, "c": slow}.items():
        sweep(machine, out=tmp_path / name)
    same = cluster_health.compare(tmp_path / "a", tmp_path / "b")
    assert same.verdict == "no difference"
    other = cluster_health.compare(tmp_path / "a", tmp_path / "c")
    assert other.verdict == "differences" and "device 1" in str(other)
    assert other.document["verdict"] == "differences" and other.document["inference"]
    pod = cluster_health.compare(*(tmp_path / name for name in "abc"))
    assert len(pod.document["runs"]) == 3 and str(pod)

    cluster_health.h2d(scenario=scenario, sizes="1MiB", out=tmp_path / "d")
    with pytest.raises(cluster_health.InvalidError, match="must not be compared: .*force=True"):
        cluster_health.compare(tmp_path / "a", tmp_path / "d")
    cluster_health.compare(tmp_path / "a", tmp_path / "d", force=True)


def test_census(scenario):
    census = cluster_health.census(scenario=scenario, backend="synthetic")
    assert census.bindable == list(range(8)) and len(census.to_frame()) == 8
