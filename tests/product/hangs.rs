//! Calls into a driver that never return, and what is left of the process then.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ranks::{Running, SLACK, assert_nothing_left_within, pair_points, two_cpus};
use crate::simulator;
use crate::support::{Folder, Place, Ran, assert_whole, json, points};

const TIMEOUT: Duration = Duration::from_secs(1);
/// What the issue grants beyond it, and what a loaded machine may take.
const MORE: Duration = Duration::from_secs(1);

/// Runs the program on simulated devices with these faults; how long it took.
fn run(place: &Place, line: &str, faults: &str) -> (Ran, Duration) {
    let folder = place.path("lib");
    if !folder.exists() {
        std::fs::create_dir(&folder).unwrap();
        simulator::install(&folder, &simulator::LIBRARIES);
    }
    let mut command = place.command(line);
    command.env("CLUSTER_HEALTH_ASCEND_LIB_DIR", folder).env("ASCEND_SIM_FAULTS", faults);
    let began = Instant::now();
    let ran = Running::start(place, "run", command).end_within(Duration::from_secs(60));
    (ran, began.elapsed())
}

fn error(call: &str, ran: &Ran) -> Value {
    assert_eq!(ran.code, Some(2), "{call}: {ran:?}");
    ran.json()["error"].clone()
}

const H2D: &str = "h2d --quiet --json --backend ascend --sizes 64KiB --iters 2 --warmup 1 \
                   --repeats 400 --timeout 1s --out @out";

#[test]
fn a_call_that_never_returns_ends_the_run_with_its_name_and_keeps_the_points() {
    // Those of the set-up come before.
    for (call, at) in [
        ("aclrtMemcpyAsync", 150),
        ("aclrtRecordEvent", 900),
        ("aclrtSynchronizeStreamWithTimeout", 900),
    ] {
        let place = Place::new();
        let (ran, took) = run(&place, H2D, &format!("{call}@1:{at}:hang"));
        let error = error(call, &ran);
        assert_eq!(error["kind"], "timeout", "{error}");
        assert_eq!((&error["call"], &error["device"]), (&call.into(), &1.into()), "{error}");
        assert!(error["message"].as_str().unwrap().contains("has not returned"), "{error}");
        assert!(ran.stderr.contains(error["message"].as_str().unwrap()), "{ran:?}");
        assert!(took < TIMEOUT + MORE + SLACK, "{took:?}");
        assert_nothing_left_within(&place, MORE);

        // What was measured before is there, and the run can go on.
        let kept = points(&place.path("out"));
        assert!(kept.len() >= 5, "{call}: {}", kept.len());
        assert!(kept.iter().all(|point| point.status == "measured"), "{kept:?}");
        let manifest = json(&place.path("out/run.json"));
        assert_eq!(manifest["status"], "interrupted");
        let notes = manifest["notes"].to_string();
        assert!(notes.contains(call), "{notes}");
        // Shown by the run itself, and by `report` where that had no time for it.
        let outputs =
            ["report.md", "matrices.xlsx", "h2d-64KiB.csv", "h2d-64KiB.npy", "h2d-64KiB.png"];
        let output = |name: &str| std::fs::read(place.path("out").join(name)).unwrap_or_default();
        if ran.stderr.contains("report.md shows it") {
            assert!(outputs.iter().all(|name| !output(name).is_empty()), "{call}");
        } else {
            println!("{call}: no time for the outputs: {}", ran.stderr);
        }
        let before = output("h2d-64KiB.csv");
        for name in outputs {
            std::fs::remove_file(place.path("out").join(name)).ok();
        }
        assert_eq!(place.run("report @out").code, Some(0));
        assert!(outputs.iter().all(|name| !output(name).is_empty()), "{call}");
        assert!(before.is_empty() || before == output("h2d-64KiB.csv"), "{call}");
        let (ran, _) = run(&place, &format!("{H2D} --resume"), "");
        assert_whole(&ran);
        let folder = Folder::read(&place.path("out"));
        assert_eq!(folder.run["status"], "complete");
        assert_eq!(folder.points[..kept.len()], kept);
    }
}

#[test]
fn calls_of_the_set_up_that_never_return_are_named() {
    for (fault, call) in [
        ("aclInit:1:hang", "aclInit"),
        ("aclrtSetDevice:1:hang", "aclrtSetDevice"),
        ("aclrtMalloc:1:hang", "aclrtMalloc"),
        ("aclrtMallocHost:1:hang", "aclrtMallocHost"),
        ("aclrtMemcpy2d:1:hang", "aclrtMemcpy2d"),
        ("aclrtFree:1:hang", "aclrtFree"),
    ] {
        let place = Place::new();
        let line = H2D.replace("--repeats 400", "--repeats 1");
        let (ran, took) = run(&place, &line, fault);
        let error = error(call, &ran);
        assert_eq!((&error["kind"], &error["call"]), (&"timeout".into(), &call.into()), "{error}");
        assert!(took < TIMEOUT + MORE + SLACK, "{call}: {took:?}");
        println!("{call}: ended {took:?} after the start of the program");
        assert_nothing_left_within(&place, MORE);
    }
}

#[test]
fn other_commands_end_too() {
    for command in ["validate --sizes 64KiB", "sizes --sizes 64KiB", "policies --sizes 64KiB"] {
        let place = Place::new();
        let line = format!("{command} --quiet --json --backend ascend --timeout 1s --out @out");
        let (ran, took) = run(&place, &line, "aclrtMemcpyAsync:4+:hang");
        let error = error(command, &ran);
        assert!(["timeout", "rank"].contains(&error["kind"].as_str().unwrap()), "{error}");
        // Of whichever rank it was.
        let words = "aclrtMemcpyAsync failed on device";
        assert!(ran.stderr.contains(words), "{command}: {ran:?}");
        assert!(ran.stderr.contains("has not returned"), "{command}: {ran:?}");
        // Some have much to do before; `run` waits a minute at most.
        println!("{command}: ended {took:?} after the start of the program");
        assert_nothing_left_within(&place, MORE);
    }
}

#[test]
fn a_rank_whose_collective_never_returns_ends_and_so_does_the_other() {
    let Some([a, b]) = two_cpus() else { return };
    let line = format!(
        "core-pair --quiet --json --backend ascend --sizes 64KiB,8B --rank0-cpus {a},{b} \
         --rank1-cpus {a},{b} --iters 2 --warmup 1 --repeats 40 --timeout 1s --out @out"
    );
    // Devices 0 and 1 are those of rank 0 and 1.
    for device in [0, 1] {
        let place = Place::new();
        let (ran, took) = run(&place, &line, &format!("HcclAllGather@{device}:30:hang"));
        assert!(took < TIMEOUT + MORE + SLACK, "{took:?}");
        println!("HcclAllGather of rank {device}: both ended {took:?} after the start");
        assert_nothing_left_within(&place, MORE);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        let error = &ran.json()["error"];
        assert!(["timeout", "rank"].contains(&error["kind"].as_str().unwrap()), "{error}");
        // The rank that hung says what it was in, wherever its words go.
        let words = format!("HcclAllGather failed on device {device} (rank {device})");
        assert!(ran.stderr.contains(&words), "{ran:?}");
        assert!(ran.stderr.contains("has not returned"), "{ran:?}");
        let kept = pair_points(&place.path("out"));
        assert!(kept.len() > 2, "{}", kept.len());
        assert_eq!(json(&place.path("out/run.json"))["status"], "interrupted");
        assert_eq!(place.run("report @out").code, Some(0));
        let outputs = ["report.md", "matrices.xlsx", "core-pair-64KiB.csv"];
        assert!(outputs.iter().all(|name| place.path("out").join(name).exists()));
        let (ran, _) = run(&place, &format!("{line} --resume"), "");
        assert_whole(&ran);
        assert_eq!(pair_points(&place.path("out"))[..kept.len()], kept);
    }
}

#[test]
fn waits_with_a_bound_of_their_own_are_left_alone() {
    // A stream that stands still is the timeout of its wait, which costs its points and no run.
    let place = Place::new();
    let line = H2D.replace("--repeats 400", "--repeats 2");
    let (ran, _) = run(&place, &line, "aclrtMemcpyAsync@1:2:stall");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(!ran.stderr.contains("has not returned"), "{ran:?}");
    assert_eq!(json(&place.path("out/run.json"))["status"], "complete");
}
