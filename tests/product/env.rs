//! `env`, and what a run records of other work on its devices; Ascend is the simulator.

use std::fs;
use std::process::Command;

use crate::simulator;
use crate::support::{Place, QUIET, Ran, assert_whole, cluster_health, json};

/// No process has this id.
const NOBODY: i32 = 999_999_999;

/// A command on a machine with the simulator's libraries, of which these are installed.
fn ascend(place: &Place, line: &str, libraries: &[&str]) -> Command {
    let folder = place.path("lib");
    if !folder.exists() {
        fs::create_dir(&folder).unwrap();
        simulator::install(&folder, libraries);
    }
    let mut command = place.command(line);
    command.env("CLUSTER_HEALTH_ASCEND_LIB_DIR", folder);
    command
}

#[test]
fn without_ascend_it_says_what_is_missing() {
    let place = Place::new();
    fs::create_dir(place.path("empty")).unwrap();
    for backend in ["auto", "host", "ascend"] {
        let mut command = place.command(&format!("env --backend {backend} --json"));
        command.env("CLUSTER_HEALTH_ASCEND_LIB_DIR", place.path("empty"));
        let ran = Ran::of(&mut command);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let bundle = ran.json();
        assert_eq!(bundle["schema_version"], 1);
        assert!(
            bundle["tool"]["version"].is_string() && bundle["environment"]["kernel"].is_string()
        );
        let libraries = bundle["ascend"]["libraries"].as_array().unwrap();
        assert_eq!(libraries.len(), 4);
        for library in libraries {
            let tried = library["tried"][0][0].as_str().unwrap();
            assert!(tried.starts_with(place.path("empty").to_str().unwrap()), "{library}");
        }
        let problem = bundle["problem"].as_str();
        assert_eq!(
            problem.is_some_and(|text| text.contains("libascendcl.so")),
            backend == "ascend"
        );
        assert_eq!(bundle["devices"].as_array().unwrap().is_empty(), backend == "ascend");
    }
    let mut command = place.command("env");
    command.env("CLUSTER_HEALTH_ASCEND_LIB_DIR", place.path("empty"));
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.contains("libascendcl.so cannot be used: it was not found"), "{ran:?}");
}

#[test]
fn synthetic_machine_and_unknown_backend() {
    let place = Place::with_machine(QUIET);
    let bundle = place.run("env --backend synthetic:@machine.toml --json").json();
    assert_eq!(bundle["environment"]["backend"], "synthetic");
    assert_eq!(bundle["devices"].as_array().unwrap().len(), 4);
    assert_eq!(place.run("env --backend nothing").code, Some(2));
    assert_eq!(place.run("env --backend synthetic:@absent.toml").code, Some(2));
}

#[test]
fn bundle_has_versions_ids_symbols_and_codes_and_no_secrets() {
    let place = Place::new();
    let run = |line: &str| {
        let mut command = ascend(&place, line, &["libascendcl.so", "libdcmi.so"]);
        command
            .env("ASCEND_SIM_DEVICES", "3")
            .env("ASCEND_SIM_PHY", "6,2,4")
            .env("ASCEND_SIM_SOC", "Ascend910B2")
            .env("ASCEND_SIM_VERSION", "1.9.1")
            .env("ASCEND_SIM_DRIVER", "25.0.rc9")
            .env("ASCEND_SIM_PROCESSES", format!("4={NOBODY}:1G"))
            .env("ASCEND_SIM_FAULTS", "aclrtDeviceGetPCIBusId:*:507899")
            .env("CLUSTER_HEALTH_TOKEN", "do-not-tell")
            .env("HCCL_PRIVATE_KEY", "do-not-tell");
        Ran::of(&mut command)
    };
    let ran = run("env --json");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.stdout.contains("do-not-tell"), "{ran:?}");
    let bundle = ran.json();
    assert_eq!(bundle["environment"]["variables"]["HCCL_PRIVATE_KEY"], "(not recorded)");
    let software = &bundle["ascend"]["software"];
    assert_eq!(software["driver"], "25.0.rc9");
    assert_eq!(software["runtime"], "1.9.1");
    assert_eq!(software["soc"], "Ascend910B2");
    let ids: Vec<_> = bundle["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|device| (device["id"].as_u64().unwrap(), device["runtime_id"].as_i64().unwrap()))
        .collect();
    assert_eq!(ids, [(6, 0), (2, 1), (4, 2)]);
    assert_eq!(bundle["device_activity"][2]["processes"][0]["pid"], NOBODY);
    let failures = bundle["ascend"]["failures"].as_array().unwrap();
    assert_eq!(failures.len(), 3, "{failures:?}");
    assert_eq!(failures[0]["call"], "aclrtDeviceGetPCIBusId");
    assert_eq!(failures[0]["code"], 507_899);
    let found = bundle["ascend"]["libraries"][0]["found"].as_array().unwrap();
    assert!(found.contains(&"aclrtMemcpyAsync".into()));

    let ran = run("env");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.stdout.contains("do-not-tell"), "{ran:?}");
    for part in ["25.0.rc9", "Ascend910B2", "507899", "999999999 (1024 MiB)", "libhccl.so"] {
        assert!(ran.stdout.contains(part), "{part}: {ran:?}");
    }
}

#[test]
fn run_records_other_processes_and_warns() {
    let place = Place::new();
    let line = "h2d --backend ascend --sizes 64KiB --repeats 1 --iters 1 --cpus 0 --out @out";
    let mut command = ascend(&place, line, &simulator::LIBRARIES);
    command.env("ASCEND_SIM_PROCESSES", format!("1={NOBODY}:2G"));
    let ran = Ran::of(&mut command);
    assert_whole(&ran);
    let what = format!("other processes on device 1: {NOBODY} (2048 MiB)");
    assert!(ran.stderr.contains(&format!("warning: the node is not quiet: {what}")), "{ran:?}");
    let run = json(&place.path("out/run.json"));
    let notes: Vec<_> = run["notes"].as_array().unwrap().iter().collect();
    let wanted = format!("{what}; after, before, during the run");
    let sorted = |note: &str| {
        let (text, when) = note.rsplit_once("; ").unwrap_or((note, ""));
        let mut when: Vec<_> = when.trim_end_matches(" the run").split(", ").collect();
        when.sort_unstable();
        format!("{text}; {} the run", when.join(", "))
    };
    assert!(notes.iter().any(|note| sorted(note.as_str().unwrap()) == wanted), "{notes:?}");
    let moments: Vec<_> = run["device_activity"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| record["moment"].as_str().unwrap())
        .collect();
    assert_eq!(moments, ["before", "during", "after"]);
    let software = &run["environment"]["ascend"];
    assert_eq!(software["driver"], "25.0.rc1");
    assert!(software["libraries"]["libascendcl.so"].is_string());
    assert!(software["libraries"]["libdcmi.so"].is_string());

    // Nobody else there, nothing to say; the run itself does not count.
    let line = format!("{line} --force");
    let ran = Ran::of(&mut ascend(&place, &line, &simulator::LIBRARIES));
    assert_whole(&ran);
    let run = json(&place.path("out/run.json"));
    assert!(!run["notes"].to_string().contains("other processes"), "{run}");
    assert!(!ran.stderr.contains("other processes"), "{ran:?}");
}

#[test]
fn help_lists_the_command() {
    let ran = Ran::of(cluster_health().arg("--help"));
    assert!(ran.stdout.contains("\n  env "), "{ran:?}");
}
