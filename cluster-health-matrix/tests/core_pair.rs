//! The command line of the core-pair sweep.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const MACHINE: &str = "[machine]\ncpus = 8\nsmt = 2\nnuma_nodes = 2\ndevices = 6\n";

/// Runs the program on a scenario into `out` below `dir`.
fn run(dir: &Path, scenario: &str, words: &str) -> Output {
    let file = dir.join("machine.toml");
    fs::write(&file, scenario).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cluster-health"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CLUSTER_HEALTH_") {
            command.env_remove(name);
        }
    }
    command.args(words.split_whitespace());
    command.arg("--backend").arg(format!("synthetic:{}", file.display()));
    if !words.starts_with("plan") {
        command.arg("--out").arg(dir.join("out"));
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn manifest(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("out/run.json")).unwrap()).unwrap()
}

fn samples(dir: &Path) -> Vec<Value> {
    let log = fs::read_to_string(dir.join("out/samples.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_pair_sweep_keeps_the_order_of_devices_and_cpus() {
    let folder = tempfile::tempdir().unwrap();
    let words = "core-pair --device-pair 5,0 --rank0-cpus 3,1 --rank1-cpus 0-2 --sizes 1MiB --json";
    let output = run(folder.path(), MACHINE, words);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["summary"][0]["sweep"], "core_pair");
    assert_eq!(answer["summary"][0]["rate"], "per_rank");
    assert_eq!(answer["summary"][0]["count"], 6);
    let manifest = manifest(folder.path());
    assert_eq!(manifest["command"], "core-pair");
    assert_eq!(manifest["plan"]["core_pair"]["device_pair"], serde_json::json!([5, 0]));
    assert!(manifest["plan"].get("h2d").is_none());
    for sample in samples(folder.path()) {
        assert_eq!(sample["device_pair"], serde_json::json!([5, 0]));
        assert_eq!(sample["skew_ns"], 0);
        assert!(sample.get("cpu").is_none() && sample.get("device").is_none());
    }
    let csv = fs::read_to_string(folder.path().join("out/core-pair-1MiB.csv")).unwrap();
    let lines: Vec<&str> = csv.lines().map(|line| line.split_once(',').unwrap().0).collect();
    assert_eq!(lines, ["rank0\\rank1", "3", "1"]);
}

#[test]
fn an_offline_cpu_is_skipped_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let scenario = MACHINE.replace("devices", "offline = \"6\"\ndevices");
    let output = run(folder.path(), &scenario, "core-pair --rank0-cpus 0,1 --rank1-cpus 5-7");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let reason = "rank 1: CPU 6 cannot be bound: offline";
    assert!(text(&output.stderr).contains(&format!("warning: {reason}")), "{output:?}");
    assert!(text(&output.stdout).contains(reason), "{output:?}");
    for sample in samples(folder.path()) {
        let skipped = sample["rank1_cpu"] == 6;
        assert_eq!(sample["status"], if skipped { "skipped" } else { "measured" });
        assert_eq!(sample["reason"].is_null(), !skipped);
    }
    let points = manifest(folder.path())["points"].clone();
    assert_eq!(points["skipped"], 3 * 2, "{points}");
    // The rest of a row is where it belongs.
    let csv = fs::read_to_string(folder.path().join("out/core-pair-8MiB.csv")).unwrap();
    for line in csv.lines().skip(1) {
        let cells: Vec<bool> = line.split(',').skip(1).map(str::is_empty).collect();
        assert_eq!(cells, [false, true, false], "{line}");
    }
}

#[test]
fn bad_options_are_named() {
    for (words, option) in [
        ("--device-pair 0", "--device-pair"),
        ("--device-pair 0,1,2", "--device-pair"),
        ("--device-pair 0,x", "--device-pair"),
        ("--device-pair 0,9", "--device-pair"),
        ("--rank0-cpus 0,0", "--rank0-cpus"),
        ("--rank1-cpus 77", "--rank1-cpus"),
        ("--sizes 0B", "--sizes"),
        ("--load cpu:3", "--load"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let output = run(folder.path(), MACHINE, &format!("core-pair --json {words}"));
        assert_eq!(output.status.code(), Some(2), "{words}: {output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["error"]["kind"], "invalid", "{words}");
        assert!(answer["error"]["message"].as_str().unwrap().starts_with(option), "{answer}");
        assert!(!folder.path().join("out").exists(), "{words}");
    }
}

#[test]
fn a_dead_rank_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let failure = "[[failure]]\nkind = \"rank_dead\"\nrank = 1\nat_point = 20\n";
    let output = run(folder.path(), &format!("{MACHINE}{failure}"), "core-pair --json");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&answer["error"]["rank"], &answer["error"]["kind"]),
        (&1.into(), &"backend".into())
    );
    assert_eq!(samples(folder.path()).len(), 20);
    assert_eq!(manifest(folder.path())["status"], "interrupted");
}

#[test]
fn all_measures_both_matrices() {
    let folder = tempfile::tempdir().unwrap();
    // 1 MiB at 58.5 GB/s and 12 us of latency is 35.0 GB/s.
    let words = "all --sizes 1MiB --cpus 1,4-5 --devices 4,2 --repeats 2 --expect 36GB/s";
    let output = run(folder.path(), MACHINE, words);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let manifest = manifest(folder.path());
    let plan = &manifest["plan"]["core_pair"];
    // What is named for the H2D sweep holds for the pairs, but for its sizes and its rate.
    assert_eq!(plan["rank0_cpus"], serde_json::json!([1, 4, 5]));
    assert_eq!(plan["rank1_cpus"], serde_json::json!([1, 4, 5]));
    assert_eq!(plan["device_pair"], serde_json::json!([4, 2]));
    assert_eq!((&plan["sizes"], &plan["expect"]), (&serde_json::json!([8 << 20]), &Value::Null));
    assert_eq!(manifest["notes"], serde_json::json!([]));
    let rates: Vec<&Value> =
        manifest["summary"].as_array().unwrap().iter().map(|row| &row["rate"]).collect();
    assert_eq!(rates, ["h2d", "per_rank"]);
    for name in ["h2d-1MiB.png", "core-pair-8MiB.png", "matrices.xlsx", "report.md"] {
        assert!(folder.path().join("out").join(name).exists(), "{name}");
    }
}

#[test]
fn all_samples_what_would_take_long_unless_told() {
    let folder = tempfile::tempdir().unwrap();
    let large = "[machine]\ncpus = 256\nsmt = 2\nnuma_nodes = 4\ndevices = 2\n";
    let words = "all --sizes 64KiB --cpus 0-255 --repeats 3";
    let output = run(folder.path(), large, words);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let first = manifest(folder.path());
    let note = first["notes"][0].as_str().unwrap();
    assert!(note.starts_with("core-pair: a part of the matrix is measured within 8 s"), "{note}");
    assert!(note.contains("cluster-health core-pair --out DIR"), "{note}");
    assert!(text(&output.stderr).contains(note), "{output:?}");
    // 65,536 pairs three times take minutes, 512 copies of 64 KiB do not.
    assert_eq!(first["plan"]["core_pair"]["sample"]["budget_ns"], 8_000_000_000_u64);
    assert_eq!(first["plan"]["h2d"]["sample"], Value::Null);
    assert!(folder.path().join("out/core-pair-8MiB-predicted.csv").exists());

    let words = "all --sizes 64KiB --cpus 0-3 --rank0-cpus 0-255 --rank1-cpus 0-255 --repeats 1 \
                 --iters 8 --warmup 8 --force";
    let output = run(folder.path(), large, words);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let second = manifest(folder.path());
    assert_eq!(second["notes"], serde_json::json!([]));
    assert_eq!(second["plan"]["core_pair"]["rank1_cpus"].as_array().unwrap().len(), 256);
}

#[test]
fn a_plan_tells_what_pairs_would_cost() {
    let folder = tempfile::tempdir().unwrap();
    let words = "plan --sweep core-pair --device-pair 1,0 --sizes 8MiB --repeats 2";
    let output = run(folder.path(), MACHINE, words);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let told = text(&output.stdout);
    assert!(told.contains("8 rank-0 CPUs × 8 rank-1 CPUs on devices 1,0"), "{told}");
    assert!(told.contains("= 128 points"), "{told}");
    let output = run(folder.path(), MACHINE, &format!("{words} --json"));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["plan"]["device_pair"], serde_json::json!([1, 0]));
    assert_eq!(answer["cost"]["points"], 128);
    assert!(answer["detectable"]["rank1_core"].as_f64().unwrap() > 0.0);
    // Without a word it is about H2D.
    let answer = run(folder.path(), MACHINE, "plan --sizes 1MiB --json");
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert!(answer["plan"].get("devices").is_some());
}
