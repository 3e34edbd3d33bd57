//! The gate as launchers meet it: its answer, its documents and its exit codes, alone and with ranks.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::launchers::torchrun;
use crate::ranks::{Running, SLACK, assert_nothing_left, meeting, signal};
use crate::support::{Place, Ran, json};

const NODE: &str = "[machine]\ncpus = 32\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n";
const SLOW: &str = "[[fault]]\nkind = \"slow_device\"\ndevices = \"2\"\nfactor = 0.8\n";

fn line(machine: &str, more: &str) -> String {
    format!("preflight --backend synthetic:@{machine} --budget 3s --json {more}")
}

/// A place with a healthy machine, a sick one, and a known-good run of the healthy one.
fn place() -> Place {
    let place = Place::with_machine(NODE);
    fs::write(place.path("sick.toml"), [NODE, SLOW].concat()).unwrap();
    let slower = format!("{NODE}[h2d]\ngbps = 52.65\n");
    fs::write(place.path("slower.toml"), slower).unwrap();
    let known = "h2d --quiet --backend synthetic:@machine.toml --sizes 16MiB --out @known";
    assert_eq!(place.run(known).code, Some(0));
    place
}

fn assert_says(ran: &Ran, code: i32, verdict: &str) -> Value {
    assert_eq!(ran.code, Some(code), "{ran:?}");
    let document = ran.json();
    assert_eq!((&document["verdict"], &document["schema_version"]), (&verdict.into(), &1.into()));
    let has_reasons = !document["reasons"].as_array().unwrap().is_empty();
    assert_eq!(has_reasons, verdict != "pass", "{document}");
    document
}

#[test]
fn a_node_passes_or_fails() {
    let place = place();
    assert_says(&place.run(&line("machine.toml", "")), 0, "pass");
    let sick = assert_says(&place.run(&line("sick.toml", "--out @out")), 1, "fail");
    let node = &sick["nodes"][0];
    let finding = &node["findings"][0];
    assert_eq!((&finding["kind"], &finding["fails"]), (&"slow_device".into(), &true.into()));
    assert_eq!(finding["devices"], serde_json::json!([2]));
    assert_eq!(node["baseline"], Value::Null);
    assert!(sick["reasons"][0].as_str().unwrap().starts_with("slow_device, device 2"), "{sick}");
    // The run is kept, and says the same.
    assert_eq!(json(&place.path("out/preflight.json")), sick);
    assert_eq!(json(&place.path("out/run.json"))["command"], "preflight");
    assert_eq!(place.run("diagnose @out --json").json()["findings"][0]["devices"][0], 2);
    let again = place.run(&line("sick.toml", "--out @out"));
    assert_eq!(again.code, Some(2), "not into the results of another run: {again:?}");
    assert_says(&place.run(&line("sick.toml", "--out @out --force")), 1, "fail");

    // For people: the answer comes first.
    let line = "preflight --quiet --backend synthetic:@sick.toml --budget 3s";
    let ran = place.run(line);
    assert!(ran.stdout.starts_with("preflight: fail\n  slow_device, device 2"), "{ran:?}");
}

#[test]
fn a_baseline_is_a_file_or_a_folder() {
    let place = place();
    for known in ["@known", "@known/calibration.json"] {
        let more = format!("--baseline {known}");
        let document = assert_says(&place.run(&line("machine.toml", &more)), 0, "pass");
        let compared = &document["nodes"][0]["baseline"];
        assert!(compared["cells"].as_u64().unwrap() > 0, "{compared}");
        assert_says(&place.run(&line("slower.toml", "")), 0, "pass");
        let document = assert_says(&place.run(&line("slower.toml", &more)), 1, "fail");
        let change = &document["nodes"][0]["baseline"]["changes"][0];
        assert_eq!((&change["axis"], &change["state"]), (&"size".into(), &"slower".into()));
        assert_eq!(change["id"], 16 << 20);
    }
    // 10 % do not count when 15 % are asked for.
    let more = "--baseline @known --min-change 15%";
    assert_says(&place.run(&line("slower.toml", more)), 0, "pass");
    fs::write(place.path("other.toml"), NODE.replace("cpus = 32", "cpus = 16")).unwrap();
    let more = "--baseline @known";
    let document = assert_says(&place.run(&line("other.toml", more)), 1, "inconclusive");
    assert!(document["reasons"][0].as_str().unwrap().contains("present CPUs: 16 here, 32"));
}

#[test]
fn a_baseline_that_is_none_is_an_error_with_its_place() {
    let place = place();
    let whole = fs::read_to_string(place.path("known/calibration.json")).unwrap();
    let mut newer: Value = serde_json::from_str(&whole).unwrap();
    newer["schema_version"] = 99.into();
    let mut ragged: Value = serde_json::from_str(&whole).unwrap();
    ragged["h2d_gbps_by_core_device"][0]["gbps"][3].as_array_mut().unwrap().pop();
    for (name, text, kind, wanted) in [
        ("torn", whole[..whole.len() / 2].to_owned(), "format", "line "),
        ("empty", String::new(), "format", "EOF"),
        ("foreign", "{\"schema_version\": 1, \"a\": []}".to_owned(), "format", "this is no calib"),
        ("newer", newer.to_string(), "format", "schema version 99 is newer"),
        ("ragged", ragged.to_string(), "format", "device[0]: gbps, row 3: 3 rates for 4 columns"),
    ] {
        fs::write(place.path(name), text).unwrap();
        let ran = place.run(&line("machine.toml", &format!("--baseline @{name}")));
        assert_eq!(ran.code, Some(2), "{name}: {ran:?}");
        let error = ran.json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert_eq!(error["kind"], kind, "{error}");
        assert!(message.contains(&format!("/{name}")) && message.contains(wanted), "{message}");
    }
    let ran = place.run(&line("machine.toml", "--baseline @nowhere --out @out"));
    assert_eq!((ran.code, ran.json()["error"]["kind"].as_str()), (Some(2), Some("io")), "{ran:?}");
    assert!(!place.path("out").exists(), "nothing was begun");
    for (option, value) in [("budget", "0s"), ("min-change", "100%"), ("min-effect", "x")] {
        let ran = place.run(&line("machine.toml", &format!("--{option} {value}")));
        assert_eq!(ran.code, Some(2), "{option}: {ran:?}");
        assert!(ran.json()["error"]["message"].as_str().unwrap().contains(option), "{ran:?}");
    }
}

#[test]
fn this_machine_is_held_against_its_own_run() {
    let place = Place::new();
    let small = "--backend host --sizes 64KiB,1MiB";
    let ran = place.run(&format!("h2d --quiet {small} --repeats 3 --out @known"));
    assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
    let ran = place.run(&format!("preflight {small} --budget 2s --json --baseline @known"));
    // It is shared with others, so any answer may be right.
    let document = ran.json();
    let wanted = if document["verdict"] == "pass" { 0 } else { 1 };
    assert_eq!(ran.code, Some(wanted), "{document}");
    let compared = &document["nodes"][0]["baseline"];
    assert_eq!(compared["differences"], serde_json::json!([]), "{document}");
    assert!(compared["cells"].as_u64().unwrap() > 0, "{document}");
    assert_eq!(fs::read_dir(place.path(".")).unwrap().count(), 1, "nothing was written");
}

/// Both ranks as torchrun starts them.
fn both(place: &Place, line: &str) -> [Running; 2] {
    [0, 1].map(|rank| Running::start(place, &rank.to_string(), torchrun(place, rank, line)))
}

#[test]
fn torchrun_ranks_get_one_answer() {
    let place = place();
    for (machine, code, verdict) in [("machine.toml", 0, "pass"), ("sick.toml", 1, "fail")] {
        let [rank0, rank1] = both(&place, &line(machine, "--out @out --force")).map(Running::end);
        let document = assert_says(&rank0, code, verdict);
        assert_eq!(rank1.code, Some(code), "{rank1:?}");
        assert!(rank1.stdout.is_empty(), "one document: {rank1:?}");
        assert!(rank1.stderr.contains(&format!("rank 1: preflight: {verdict}")), "{rank1:?}");
        // One host, measured once.
        assert_eq!(document["nodes"].as_array().unwrap().len(), 1);
        assert_eq!(json(&place.path("out/preflight.json")), document);
        assert_nothing_left(&place);
    }
}

#[test]
fn mpirun_ranks_get_one_answer() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: no mpirun");
        return;
    }
    let place = place();
    for (machine, verdict) in [("machine.toml", "pass"), ("sick.toml", "fail")] {
        let rank = place.command(&line(machine, ""));
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", "2"]);
        command.arg(rank.get_program()).args(rank.get_args());
        command.env("XDG_RUNTIME_DIR", meeting(&place));
        let ran = Ran::of(&mut command);
        assert_says(&ran, i32::from(verdict != "pass"), verdict);
        assert!(ran.stderr.contains(&format!("rank 1: preflight: {verdict}")), "{ran:?}");
        assert_nothing_left(&place);
    }
}

#[test]
fn a_rank_that_is_lost_is_an_error_of_the_others() {
    // Enough to simulate for some seconds.
    let place = Place::with_machine("[machine]\ncpus = 640\nnuma_nodes = 8\ndevices = 16\n");
    for victim in [0_u32, 1] {
        let line = line("machine.toml", "--timeout 20s").replace("--budget 3s", "--budget 400s");
        let [rank0, rank1] = both(&place, &line);
        // Both are there once rank 1 waits for the answer; a moment is enough, or the test sees
        // the same error earlier.
        thread::sleep(Duration::from_millis(1500));
        let ids = [rank0.id(), rank1.id()];
        signal(ids[victim as usize], libc::SIGKILL);
        let mut ended = [rank0.end_within(SLACK), rank1.end_within(SLACK)];
        let other = &mut ended[1 - victim as usize];
        assert_eq!(other.code, Some(2), "{other:?}");
        let error = other.json()["error"].clone();
        assert_eq!((&error["kind"], &error["rank"]), (&"rank".into(), &victim.into()), "{error}");
        assert_nothing_left(&place);
    }
}

#[test]
fn a_rank_that_cannot_begin_is_an_error_of_the_others() {
    let place = place();
    // Rank 1 reads another file, which is not there.
    let ranks = [("@known", 0), ("@nowhere", 1)].map(|(baseline, rank)| {
        let line = line("machine.toml", &format!("--baseline {baseline} --timeout 20s"));
        Running::start(&place, &rank.to_string(), torchrun(&place, rank, &line))
    });
    let [rank0, rank1] = ranks.map(Running::end);
    assert_eq!((rank0.code, rank1.code), (Some(2), Some(2)), "{rank0:?} {rank1:?}");
    assert_eq!(rank0.json()["error"]["rank"], 1, "{rank0:?}");
    assert_eq!(rank1.json()["error"]["kind"], "io", "{rank1:?}");
}
