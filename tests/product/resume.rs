//! Interrupted runs, and folders that are in use or hold something else.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

use crate::support::{Folder, Place, Point, QUIET, assert_whole, contents, json, names};

/// A machine with noise whose sweep takes long enough to be interrupted.
const LARGE: &str = "[machine]\ncpus = 640\ndevices = 16\nnuma_nodes = 8\npoint_us = 1\n";
/// An exact warm-up, because one that settles may differ where a run goes on: that point finds
/// its CPU just bound.
const LARGE_SWEEP: &str = "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB,4MiB \
                           --repeats 1 --warmup 1 --seed 9";

fn send(child: &Child, signal: libc::c_int) {
    let id = libc::pid_t::try_from(child.id()).unwrap();
    // SAFETY:
    // * The process is our child and not yet waited for, so its id is not reused; kill takes no
    //   pointers.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
}

/// Starts a sweep and signals it once its log has some lines; true when it ended by that.
fn interrupt(place: &Place, line: &str, signal: libc::c_int) -> (Option<i32>, String) {
    let log = place.path("out/samples.jsonl");
    let mut child =
        place.command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while fs::metadata(&log).map_or(0, |data| data.len()) < 20_000 {
        assert!(start.elapsed() < Duration::from_secs(60), "no samples");
        assert!(child.try_wait().unwrap().is_none(), "ended before its first samples");
        std::thread::sleep(Duration::from_millis(1));
    }
    send(&child, signal);
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// What an interruption may not change: all but the time, and the bind where the run went on.
fn comparable(points: &[Point], went_on_at: u64) -> Vec<Point> {
    points
        .iter()
        .cloned()
        .map(|mut point| {
            point.t_ns = 0;
            if point.seq == went_on_at {
                point.bind_ns = 0;
            }
            point
        })
        .collect()
}

fn uninterrupted(place: &Place) -> Folder {
    let ran = place.run(&format!("{LARGE_SWEEP} --out @whole"));
    assert_whole(&ran);
    Folder::read(&place.path("whole"))
}

fn assert_resumes_to(place: &Place, whole: &Folder, went_on_at: u64) {
    let ran = place.run(&format!("{LARGE_SWEEP} --out @out --resume"));
    assert_whole(&ran);
    let folder = Folder::read(&place.path("out"));
    assert_eq!(folder.points.len(), whole.points.len());
    assert!(comparable(&folder.points, went_on_at) == comparable(&whole.points, went_on_at));
    assert!(folder.points.is_sorted_by(|a, b| a.t_ns < b.t_ns));
    assert_eq!(folder.run["status"], "complete");
    assert_eq!(folder.run["summary"], whole.run["summary"]);
    assert_eq!(folder.run["points"], whole.run["points"]);
    let segments = folder.run["segments"].as_array().unwrap();
    assert_eq!(segments.last().unwrap()["first_seq"], went_on_at);
    for name in ["h2d-1MiB.csv", "h2d-4MiB.csv", "h2d-1MiB.npy", "h2d-4MiB.png"] {
        let read = |dir: &Path| fs::read(dir.join(name)).unwrap();
        assert!(read(&folder.dir) == read(&whole.dir), "{name}");
    }
}

#[test]
fn a_killed_run_goes_on_to_the_same_samples() {
    let place = Place::with_machine(LARGE);
    let whole = uninterrupted(&place);
    let (code, _) = interrupt(&place, &format!("{LARGE_SWEEP} --out @out"), libc::SIGKILL);
    assert_eq!(code, None, "killed");
    let text = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    let lines = text.matches('\n').count();
    assert!(lines > 10 && lines < whole.points.len(), "{lines}");
    assert_eq!(json(&place.path("out/run.json"))["status"], "running");
    assert_resumes_to(&place, &whole, lines as u64);
}

#[test]
fn ctrl_c_ends_with_everything_that_was_measured() {
    let place = Place::with_machine(LARGE);
    let whole = uninterrupted(&place);
    let (code, stderr) = interrupt(&place, &format!("{LARGE_SWEEP} --out @out"), libc::SIGINT);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("--resume"), "{stderr}");
    let folder = Folder::read(&place.path("out"));
    assert_eq!(folder.run["status"], "interrupted");
    assert!(folder.run["segments"][0]["end"].is_string());
    let measured = folder.points.len();
    assert!(measured > 10 && measured < whole.points.len());
    assert_eq!(folder.count("measured"), measured as u64);
    let mut all = names(&whole.dir);
    assert_eq!(names(&folder.dir), all, "every output is there");
    all.retain(|name| name.ends_with(".csv"));
    for name in all {
        assert!(folder.csv(name.trim_end_matches(".csv")).measured() > 0);
    }
    assert_resumes_to(&place, &whole, measured as u64);
}

#[test]
fn a_torn_tail_is_cut_off() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --warmup 1 --repeats 2";
    assert_eq!(place.run(&format!("{sweep} --out @whole")).code, Some(0));
    let whole = Folder::read(&place.path("whole"));
    let log = fs::read(place.path("whole/samples.jsonl")).unwrap();
    let ends: Vec<usize> = (1..=log.len()).filter(|at| log[at - 1] == b'\n').collect();
    let mut running: Value = whole.run.clone();
    running["status"] = "running".into();

    // Inside line 31, its last byte missing, at its end, and in the first line.
    for (cut, kept) in [(ends[30] - 40, 30), (ends[30] - 1, 30), (ends[30], 31), (10, 0), (0, 0)] {
        let out = place.path("out");
        fs::create_dir_all(&out).unwrap();
        fs::write(out.join("samples.jsonl"), &log[..cut]).unwrap();
        fs::write(out.join("run.json"), running.to_string()).unwrap();
        let ran = place.run(&format!("{sweep} --out @out --resume"));
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let folder = Folder::read(&out);
        assert!(comparable(&folder.points, kept) == comparable(&whole.points, kept), "{cut}");
        let segments = folder.run["segments"].as_array().unwrap();
        assert_eq!((segments.len(), &segments[1]["first_seq"]), (2, &kept.into()));
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_damaged_line_is_named_and_nothing_is_changed() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --repeats 1 --out @out";
    assert_eq!(place.run(sweep).code, Some(0));
    let mut run = json(&place.path("out/run.json"));
    run["status"] = "interrupted".into();
    fs::write(place.path("out/run.json"), run.to_string()).unwrap();
    let log = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    let mut lines: Vec<&str> = log.lines().collect();
    lines[6] = "{\"seq\":6,";
    fs::write(place.path("out/samples.jsonl"), lines.join("\n") + "\n").unwrap();
    let before = contents(&place.path("out"));
    let ran = place.run(&format!("{sweep} --resume"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("samples.jsonl, line 7"), "{}", ran.stderr);
    assert!(contents(&place.path("out")) == before);
}

/// Contents and times of change.
fn state(dir: &Path) -> BTreeMap<String, (Vec<u8>, SystemTime)> {
    contents(dir)
        .into_iter()
        .map(|(name, bytes)| {
            let changed = fs::metadata(dir.join(&name)).unwrap().modified().unwrap();
            (name, (bytes, changed))
        })
        .collect()
}

#[test]
fn a_complete_run_is_left_alone() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 2 --out @out";
    let first = place.run(&format!("{sweep} --resume"));
    assert_eq!(first.code, Some(0), "an absent folder is a start: {first:?}");
    let before = state(&place.path("out"));
    let again = place.run(&format!("{sweep} --resume"));
    assert_eq!((again.code, &again.stdout), (Some(0), &first.stdout));
    assert!(state(&place.path("out")) == before);
}

#[test]
fn an_empty_folder_is_a_start() {
    let place = Place::with_machine(QUIET);
    fs::create_dir(place.path("out")).unwrap();
    let folder = place.sweep(0, "--sizes 1MiB --repeats 1 --resume");
    assert_eq!(folder.run["status"], "complete");
}

#[test]
fn another_plan_seed_or_backend_is_refused_by_name() {
    let place = Place::with_machine(QUIET);
    fs::write(place.path("other.toml"), QUIET.replace("noise = 0", "noise = 0.1")).unwrap();
    let sweep = "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --repeats 2 --out @out";
    assert_eq!(place.run(sweep).code, Some(0));
    let before = state(&place.path("out"));
    for (line, parts) in [
        (format!("{sweep} --seed 2"), ["plan.h2d.seed", "1 then, 2 now"]),
        (format!("{sweep} --iters 4"), ["plan.h2d.iters", "3 then, 4 now"]),
        (sweep.replace("1MiB", "2MiB"), ["plan.h2d.sizes", "1048576"]),
        (format!("{sweep} --cpus 0-7"), ["plan.h2d.cpus", "7"]),
        (format!("{sweep} --devices 1,0"), ["plan.h2d.devices", "[1,0] now"]),
        (sweep.replace("machine.toml", "other.toml"), ["scenario", "changed"]),
        (sweep.replace("synthetic:@machine.toml", "host"), ["backend", "synthetic then, host now"]),
    ] {
        let ran = place.run(&format!("{line} --resume"));
        assert_eq!(ran.code, Some(2), "{line}: {ran:?}");
        assert!(ran.stderr.contains("--resume"), "{}", ran.stderr);
        assert!(parts.iter().all(|part| ran.stderr.contains(part)), "{line}: {}", ran.stderr);
        assert!(state(&place.path("out")) == before, "{line}");
    }
}

#[test]
fn a_folder_in_use_is_refused() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 1 --out @out --json";
    assert_eq!(place.run(sweep).code, Some(0));
    let log = fs::File::open(place.path("out/samples.jsonl")).unwrap();
    // SAFETY:
    // * The descriptor is open; flock takes no pointers.
    assert_eq!(unsafe { libc::flock(log.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }, 0);
    let before = state(&place.path("out"));
    for line in
        [format!("{sweep} --resume"), format!("{sweep} --force"), "report @out --json".to_owned()]
    {
        let ran = place.run(&line);
        assert_eq!(ran.code, Some(2), "{line}");
        let error = &ran.json()["error"];
        assert_eq!(error["kind"], "busy", "{line}");
        assert!(error["message"].as_str().unwrap().contains("in use"), "{error}");
        assert!(state(&place.path("out")) == before, "{line}");
    }
    drop(log);
    assert_eq!(place.run(&format!("{sweep} --force")).code, Some(0));
}

#[test]
fn a_folder_with_something_in_it_is_refused() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --repeats 1 --out @out";
    fs::create_dir(place.path("out")).unwrap();
    fs::write(place.path("out/notes.txt"), "mine").unwrap();
    for option in ["", "--resume"] {
        let ran = place.run(&format!("{sweep} {option}"));
        assert_eq!(ran.code, Some(2));
        assert!(ran.stderr.contains("not empty"), "{}", ran.stderr);
        assert_eq!(names(&place.path("out")), ["notes.txt".to_owned()].into());
    }
}

#[test]
fn force_replaces_our_files_and_no_others() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --quiet --backend synthetic:@machine.toml --repeats 1 --out @out";
    assert_eq!(place.run(&format!("{sweep} --sizes 2MiB")).code, Some(0));
    for name in ["notes.txt", "run.json.bak", "data.csv"] {
        fs::write(place.path("out").join(name), "mine").unwrap();
    }
    fs::create_dir(place.path("out/more")).unwrap();
    fs::write(place.path("out/more/run.json"), "mine").unwrap();

    assert_eq!(place.run(&format!("{sweep} --sizes 2MiB")).code, Some(2));
    assert_eq!(place.run(&format!("{sweep} --sizes 1MiB --force")).code, Some(0));
    let mut found = Vec::new();
    for entry in fs::read_dir(place.path("out")).unwrap() {
        found.push(entry.unwrap().file_name().into_string().unwrap());
    }
    found.sort();
    let wanted = [
        "affinity.json",
        "calibration.json",
        "data.csv",
        "h2d-1MiB.csv",
        "h2d-1MiB.npy",
        "h2d-1MiB.png",
        "matrices.xlsx",
        "more",
        "notes.txt",
        "placement.json",
        "report.md",
        "run.json",
        "run.json.bak",
        "samples.jsonl",
    ];
    assert_eq!(found, wanted, "the 2 MiB matrix belongs to the replaced run");
    for name in ["notes.txt", "run.json.bak", "data.csv", "more/run.json"] {
        assert_eq!(fs::read_to_string(place.path("out").join(name)).unwrap(), "mine");
    }
}

#[test]
fn a_bad_call_with_force_replaces_nothing() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --quiet --backend synthetic:@machine.toml --repeats 1 --out @out";
    assert_eq!(place.run(&format!("{sweep} --sizes 2MiB")).code, Some(0));
    let before = state(&place.path("out"));
    for bad in ["--sizes 0", "--cpus 99", "--resume", "--frobnicate"] {
        assert_eq!(place.run(&format!("{sweep} --force {bad}")).code, Some(2));
        assert!(state(&place.path("out")) == before, "{bad}");
    }
}

/// The host's own clock: time goes on while nothing runs.
#[test]
fn a_host_run_goes_on_after_ctrl_c() {
    let place = Place::new();
    let sweep = "h2d --quiet --backend host --sizes 1MiB --repeats 400 --out @out";
    let (code, _) = interrupt(&place, sweep, libc::SIGINT);
    assert_eq!(code, Some(1));
    let before = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    let ran = place.run(&format!("{sweep} --resume"));
    assert_whole(&ran);
    let after = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    assert!(after.len() > before.len() && after.starts_with(&before), "what was there stays");
    let folder = Folder::read(&place.path("out"));
    assert!(folder.points.iter().enumerate().all(|(at, point)| point.seq == at as u64));
    assert!(folder.points.is_sorted_by(|a, b| a.t_ns < b.t_ns));
    let segments = folder.run["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 2);
    assert_eq!(segments[1]["first_seq"], before.lines().count());
    for name in ["wall_ns", "host_ns"] {
        let sum: u64 = segments.iter().map(|segment| segment[name].as_u64().unwrap()).sum();
        assert_eq!(folder.run[name], sum);
    }
}
