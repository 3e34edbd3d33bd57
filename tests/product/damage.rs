//! Logs and folders that something happened to: what is good is used, the rest is named.

use std::fs;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::ranks::Running;
use crate::support::{Folder, Place, QUIET, contents, json as read};

const SWEEP: &str = "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --warmup 1 \
                     --repeats 2";

/// A complete run in `out`, and its lines.
fn complete() -> (Place, Vec<String>) {
    let place = Place::with_machine(QUIET);
    assert_eq!(place.run(&format!("{SWEEP} --out @out")).code, Some(0));
    let text = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    (place, text.lines().map(str::to_owned).collect())
}

/// The same with one field changed.
fn changed(line: &str, field: &str, value: Value) -> String {
    let mut sample: Value = serde_json::from_str(line).unwrap();
    assert_ne!(sample[field], value);
    sample[field] = value;
    sample.to_string()
}

#[test]
fn good_lines_are_used_and_others_named_with_their_numbers() {
    let (place, lines) = complete();
    let csv = fs::read(place.path("out/h2d-1MiB.csv")).unwrap();
    let judged = place.run("diagnose @out --json").stdout;
    // A line per kind of damage, among good ones in reverse order.
    let mut mixed: Vec<String> = lines.iter().rev().cloned().collect();
    let count = mixed.len();
    let damage = [
        (3, lines[5][..40].to_owned(), "EOF"),
        (9, String::new(), "EOF"),
        (14, "no JSON at all".to_owned(), "expected"),
        (20, "\u{0}\u{0}\u{0}\u{0}".to_owned(), "expected"),
        (25, lines[count - 1].clone(), "was there before"),
        (30, changed(&lines[7], "cpu", json!(99)), "cpu 99 is not of this run"),
        (31, changed(&lines[7], "device", json!(77)), "device 77 is not of this run"),
        (40, changed(&lines[7], "sweep", json!("d2h")), "a point of a d2h sweep"),
        (41, changed(&lines[7], "load", json!("cpu:2")), "load cpu:2 is not of this run"),
        (50, changed(&lines[7], "seq", json!(-1)), "integer `-1`"),
        (51, changed(&lines[7], "iter_ns", json!("fast")), "string \"fast\""),
        (52, "{\"seq\":1,\"seq\":2}".to_owned(), "seq"),
    ];
    for (number, line, _) in &damage {
        mixed.insert(number - 1, line.clone());
    }
    let torn = mixed.len() + 1;
    let text = mixed.join("\n") + "\n" + &lines[0][..30];
    fs::write(place.path("out/samples.jsonl"), &text).unwrap();
    for line in ["diagnose @out --json", "report @out"] {
        let ran = place.run(line);
        assert!(ran.code == Some(0), "{ran:?}");
        let told: Vec<&str> = ran.stderr.lines().collect();
        for (number, _, words) in
            damage.iter().map(|(n, line, w)| (*n, line, *w)).chain([(torn, &lines[0], "no end")])
        {
            let named = format!("samples.jsonl, line {number}: ");
            let line = told.iter().find(|line| line.contains(&named));
            assert!(line.is_some_and(|line| line.contains(words)), "{number} {words}: {told:#?}");
        }
        assert_eq!(told.len(), damage.len() + 1, "{told:#?}");
    }
    // As if nothing had happened.
    assert_eq!(place.run("diagnose @out --json").stdout, judged);
    assert!(fs::read(place.path("out/h2d-1MiB.csv")).unwrap() == csv);
    let run = read(&place.path("out/run.json"));
    assert_eq!(run["points"]["measured"], count);
    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    assert!(report.contains("samples.jsonl, line 3: "), "{report}");
    assert_eq!(fs::read_to_string(place.path("out/samples.jsonl")).unwrap(), text);
}

#[test]
fn a_damaged_log_is_not_gone_on_with_but_named() {
    let (place, lines) = complete();
    let mut run = read(&place.path("out/run.json"));
    run["status"] = "interrupted".into();
    fs::write(place.path("out/run.json"), run.to_string()).unwrap();
    let mut twice = lines.clone();
    twice.insert(11, lines[10].clone());
    let mut swapped = lines.clone();
    swapped.swap(20, 21);
    let mut foreign = lines.clone();
    foreign[30] = changed(&lines[30], "cpu", json!(99));
    for (damaged, words) in [(twice, "line 12"), (swapped, "line 21"), (foreign, "seq 30")] {
        fs::write(place.path("out/samples.jsonl"), damaged.join("\n") + "\n").unwrap();
        let before = contents(&place.path("out"));
        let ran = place.run(&format!("{SWEEP} --out @out --resume"));
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains("samples.jsonl") && ran.stderr.contains(words), "{ran:?}");
        let mut after = contents(&place.path("out"));
        // The log is what was measured; the manifest may say that somebody tried.
        assert_eq!(after["samples.jsonl"], before["samples.jsonl"]);
        after.retain(|name, _| !before.contains_key(name));
        assert!(after.is_empty(), "{:?}", after.keys());
    }
}

#[test]
fn samples_without_their_manifest_are_not_overwritten() {
    let (place, _) = complete();
    for name in contents(&place.path("out")).keys().filter(|name| *name != "samples.jsonl") {
        fs::remove_file(place.path("out").join(name)).unwrap();
    }
    let before = contents(&place.path("out"));
    for option in ["", "--resume"] {
        let ran = place.run(&format!("{SWEEP} --out @out {option}"));
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(contents(&place.path("out")) == before);
    }
}

#[test]
fn what_is_left_of_a_run_that_was_killed_at_its_start_is_a_start() {
    let place = Place::with_machine(QUIET);
    fs::create_dir(place.path("out")).unwrap();
    for name in ["samples.jsonl", "affinity.json", "run.json.tmp"] {
        fs::write(place.path("out").join(name), "").unwrap();
    }
    let ran = place.run(&format!("{SWEEP} --out @out --resume"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!place.path("out/run.json.tmp").exists());
}

#[test]
fn older_schemas_are_read_and_newer_ones_refused_by_their_version() {
    let (place, _) = complete();
    let run = read(&place.path("out/run.json"));
    let write = |run: &Value| fs::write(place.path("out/run.json"), run.to_string()).unwrap();
    let judged = place.run("diagnose @out --json").stdout;

    // Before these fields there were runs without them.
    let mut older = run.clone();
    older["schema_version"] = 0.into();
    for field in ["notes", "device_activity", "load_profiles"] {
        older.as_object_mut().unwrap().remove(field);
    }
    write(&older);
    let ran = place.run("diagnose @out --json");
    assert_eq!((ran.code, ran.stdout), (Some(0), judged));
    assert_eq!(place.run("report @out").code, Some(0));

    let mut newer = run;
    newer["schema_version"] = 2.into();
    newer["status"] = "interrupted".into();
    write(&newer);
    let before = contents(&place.path("out"));
    for line in [
        "diagnose @out",
        "report @out",
        "compare @out @out",
        "export @out --format clusterhealthdetect --out @older",
        &format!("{SWEEP} --out @out --resume"),
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {ran:?}");
        assert!(ran.stderr.contains("schema version 2"), "{line}: {ran:?}");
        assert!(contents(&place.path("out")) == before, "{line}");
    }
}

#[test]
fn the_second_of_two_runs_into_one_folder_is_refused() {
    let place = Place::new();
    let line = "h2d --quiet --backend host --sizes 64KiB --repeats 2000 --out @out";
    let mut first = Running::start(&place, "first", place.command(line));
    first.wait_for_points(3);
    for option in ["", "--resume", "--force"] {
        let ran = place.run(&format!("{line} {option} --json"));
        assert_eq!(ran.code, Some(2), "{option}: {ran:?}");
        let error = &ran.json()["error"];
        if !option.is_empty() {
            assert_eq!(error["kind"], "busy", "{error}");
            assert!(error["message"].as_str().unwrap().contains("in use"), "{error}");
        }
    }
    // And did it no harm.
    assert!(first.is_running());
    let count = fs::read_to_string(place.path("out/samples.jsonl")).unwrap().lines().count();
    first.wait_for_points(count + 3);
    crate::ranks::signal(first.id(), libc::SIGINT);
    assert_eq!(first.end().code, Some(1));
    let folder = Folder::read(&place.path("out"));
    assert!(folder.points.iter().enumerate().all(|(at, point)| point.seq == at as u64));
}

#[test]
fn a_folder_that_is_removed_in_mid_run_is_an_error_at_its_end() {
    let place = Place::new();
    let line = "h2d --quiet --json --backend host --sizes 64KiB --repeats 400 --out @out";
    let mut running = Running::start(&place, "run", place.command(line));
    running.wait_for_points(3);
    fs::remove_dir_all(place.path("out")).unwrap();
    let ran = running.end();
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let error = &ran.json()["error"];
    assert_eq!(error["kind"], "io", "{error}");
    assert!(error["message"].as_str().unwrap().contains("run.json"), "{error}");
    assert!(!place.path("out").exists(), "it is not made again behind the user's back");
}

/// The times of points are of the monotonic clock; what the calendar says is only written down.
#[test]
fn a_clock_that_was_set_back_changes_no_point() {
    let (place, lines) = complete();
    let mut run = read(&place.path("out/run.json"));
    run["status"] = "interrupted".into();
    // The first segment lies in the future, as does the log.
    run["segments"][0]["start"] = "2099-01-01T00:00:00Z".into();
    run["segments"][0]["end"] = "2099-01-01T00:00:10Z".into();
    fs::write(place.path("out/run.json"), run.to_string()).unwrap();
    let half = lines[..lines.len() / 2].join("\n") + "\n";
    let log = place.path("out/samples.jsonl");
    fs::write(&log, half).unwrap();
    let future = std::time::SystemTime::now() + Duration::from_secs(1 << 31);
    fs::File::options().write(true).open(&log).unwrap().set_modified(future).unwrap();
    let ran = place.run(&format!("{SWEEP} --out @out --resume"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let folder = Folder::read(&place.path("out"));
    assert_eq!(folder.points.len(), lines.len());
    assert!(folder.points.is_sorted_by(|a, b| a.t_ns < b.t_ns));
    assert_eq!(folder.run["status"], "complete");

    // The same on a real clock, where the pause is the calendar's.
    let host = Place::new();
    let line = "h2d --quiet --backend host --sizes 64KiB --repeats 300 --out @out";
    let mut running = Running::start(&host, "run", host.command(line));
    running.wait_for_points(5);
    running.signal_group(libc::SIGKILL);
    running.end();
    thread::sleep(Duration::from_millis(10));
    let log = host.path("out/samples.jsonl");
    fs::File::options().write(true).open(&log).unwrap().set_modified(future).unwrap();
    let ran = host.run(&format!("{line} --resume"));
    assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
    let folder = Folder::read(&host.path("out"));
    assert!(folder.points.is_sorted_by(|a, b| a.t_ns < b.t_ns));
}

/// A run that was killed while it wrote its outputs has every point and lacks files.
#[test]
fn outputs_that_a_killed_run_did_not_write_are_written_when_it_is_resumed() {
    let (place, _) = complete();
    let whole = contents(&place.path("out"));
    let mut run = read(&place.path("out/run.json"));
    run["verdict"] = Value::Null;
    fs::write(place.path("out/run.json"), run.to_string()).unwrap();
    for name in ["h2d-1MiB.npy", "report.md", "placement.json"] {
        fs::remove_file(place.path("out").join(name)).unwrap();
    }
    fs::write(place.path("out/matrices.xlsx.tmp"), "half").unwrap();
    let ran = place.run(&format!("{SWEEP} --out @out --resume"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let again = contents(&place.path("out"));
    assert!(whole.keys().eq(again.keys()), "{:?}", again.keys());
    for name in ["h2d-1MiB.npy", "report.md", "placement.json", "samples.jsonl", "run.json"] {
        assert!(whole[name] == again[name], "{name}");
    }

    for command in ["sizes --sizes 64KiB", "validate --sizes 64KiB --matmul-sizes 8", "policies"] {
        let place = Place::with_machine(QUIET);
        let line = format!("{command} --quiet --backend synthetic:@machine.toml --out @out");
        let first = place.run(&line);
        assert!(matches!(first.code, Some(0 | 1)), "{command}: {first:?}");
        let whole = contents(&place.path("out"));
        let lost: Vec<&String> = whole
            .keys()
            .filter(|name| ["csv", "xlsx", "png", "md"].iter().any(|end| name.ends_with(end)))
            .collect();
        assert!(lost.len() > 1, "{lost:?}");
        for name in &lost {
            fs::remove_file(place.path("out").join(name)).unwrap();
        }
        let again = place.run(&format!("{line} --resume"));
        assert_eq!(
            (again.code, &again.stdout),
            (first.code, &first.stdout),
            "{command}: {again:?}"
        );
        let again = contents(&place.path("out"));
        assert!(whole.keys().eq(again.keys()), "{command}: {:?}", again.keys());
        for name in lost.into_iter().filter(|name| !name.ends_with("xlsx")) {
            assert!(whole[name] == again[name], "{command}: {name}");
        }
    }
}

#[test]
fn a_folder_does_not_steer_the_terminal_of_who_reads_it() {
    let (place, mut lines) = complete();
    let path = place.path("out/run.json");
    let mut manifest = read(&path);
    // Clear the screen, in both spellings, and go back to the start of the line.
    manifest["notes"] = json!(["\u{1b}]0;title\u{7}", "\u{9b}2J\rhealthy"]);
    fs::write(&path, manifest.to_string()).unwrap();
    lines[0] = changed(&lines[0], "status", "skipped".into());
    lines[0] = changed(&lines[0], "reason", "no\u{1b}[31m".into());
    fs::write(place.path("out/samples.jsonl"), lines.join("\n") + "\n").unwrap();
    let controls = |text: &str| text.chars().filter(|c| c.is_control() && *c != '\n').count();
    for command in ["diagnose @out", "diagnose @out --json", "report @out", "report @out --json"] {
        let ran = place.run(command);
        assert!(ran.code.is_some_and(|code| code < 2), "{ran:?}");
        assert_eq!((controls(&ran.stdout), controls(&ran.stderr)), (0, 0), "{command}: {ran:?}");
    }
    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    assert_eq!(controls(&report), 0);
    assert!(report.contains(r"\u{1b}]0;title\u{7}"), "{report}");
    // What is for programs keeps what the file said.
    let ran = place.run("diagnose @out --json --quiet");
    assert!(serde_json::from_str::<Value>(&ran.stdout).is_ok());
}
