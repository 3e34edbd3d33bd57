//! What cannot be done as asked: exit code 2, a message that names option and place, nothing
//! created or changed.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::support::{Place, QUIET, Ran, assert_whole, run};

/// Held against both ways to tell it: one line on stderr, and with `--json` one document on stdout.
fn assert_refused(place: &Place, line: &str, kind: &str, parts: &[&str]) -> Value {
    let before = tree(place);
    let plain = place.run(line);
    assert_eq!((plain.code, plain.stdout.as_str()), (Some(2), ""), "{line}: {plain:?}");
    let ran = place.run(&format!("{line} --json"));
    assert_eq!(ran.code, Some(2), "{line}");
    let document = ran.json();
    let keys: BTreeSet<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["error", "schema_version"].into());
    assert_eq!(document["schema_version"], 1);
    let error = &document["error"];
    let keys: BTreeSet<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
    let wanted = ["advice", "call", "code", "device", "kind", "message", "rank"];
    assert_eq!(keys, wanted.into());
    assert_eq!(error["kind"], kind, "{line}: {error}");
    let message = error["message"].as_str().unwrap();
    // A library that cannot be opened lists every path that was tried, a line each.
    assert!(kind == "unavailable" || !message.contains('\n'), "{message}");
    assert!(ran.stderr.contains(message), "{line}: {}", ran.stderr);
    for text in [message, &plain.stderr] {
        for part in parts {
            assert!(text.contains(part), "{line}: no '{part}' in: {text}");
        }
    }
    assert_eq!(tree(place), before, "{line} changed something");
    error.clone()
}

/// Every path below the test's folder.
fn tree(place: &Place) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![place.path("")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path.clone());
            }
            found.insert(path.display().to_string());
        }
    }
    found
}

#[test]
fn values_that_cannot_be_are_named_with_their_place() {
    let place = Place::with_machine(QUIET);
    let cases: &[(&str, &[&str])] = &[
        ("--cpus 0-3,99", &["--cpus", "CPU 99 does not exist", "0-15"]),
        ("--devices 9", &["--devices", "device 9 does not exist", "0,1,2,3"]),
        ("--cpus 0-3,8,2", &["--cpus", "element 3", "repeats 2"]),
        ("--devices 1,1", &["--devices", "element 2", "repeats 1"]),
        ("--cpus 4-2", &["--cpus", "element 1", "'4-2'", "2-4"]),
        ("--cpus 1,x", &["--cpus", "element 2", "'x'"]),
        ("--cpus 0-99999999", &["--cpus", "element 1", "1048575"]),
        ("--devices 1,", &["--devices", "element 2", "empty"]),
        ("--sizes 1MiB,1024KiB", &["--sizes", "element 2", "1MiB", "duplicate"]),
        ("--sizes 0", &["--sizes", "0 bytes"]),
        ("--sizes 1MiB,5XB", &["--sizes", "element 2", "'5XB'", "unknown unit"]),
        ("--sizes 1MiB,-1", &["--sizes", "element 2", "'-1'"]),
        ("--sizes 8388608TiB", &["--sizes", "larger than any memory"]),
        ("--sizes 99999999TiB", &["--sizes", "element 1", "too large"]),
        ("--iters 0", &["--iters", "at least one"]),
        ("--iters 4000000000", &["--iters", "100000"]),
        ("--repeats 0", &["--repeats", "between 1 and 10000"]),
        ("--repeats 10001", &["--repeats", "between 1 and 10000"]),
        ("--timeout 0s", &["--timeout", "'0s'"]),
        ("--timeout soon", &["--timeout", "'soon'"]),
        ("--timeout 3d", &["--timeout", "'3d'", "unit"]),
        ("--ci 0", &["--ci", "between 0 and 1"]),
        ("--ci 150%", &["--ci", "between 0 and 1"]),
        ("--ci wide", &["--ci", "'wide'"]),
        ("--ci NaN", &["--ci"]),
        ("--expect fast", &["--expect", "'fast'"]),
        ("--expect 0", &["--expect", "above 0"]),
    ];
    for (options, parts) in cases {
        let line = format!("all --backend synthetic:@machine.toml --out @out {options}");
        assert_refused(&place, &line, "invalid", parts);
        let line = format!("plan --backend synthetic:@machine.toml {options}");
        assert_refused(&place, &line, "invalid", parts);
    }
}

#[test]
fn empty_values_are_named() {
    let place = Place::with_machine(QUIET);
    let backend = format!("synthetic:{}", place.path("machine.toml").display());
    for option in ["--cpus", "--devices", "--sizes", "--timeout", "--ci"] {
        let ran = run(["plan", "--backend", &backend, option, "", "--json"]);
        assert_eq!(ran.code, Some(2), "{option}");
        let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(option), "{message}");
    }
    let ran = run(["h2d", "--backend", &backend, "--out", "", "--json"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.json()["error"]["message"].as_str().unwrap().contains("--out"), "{ran:?}");
}

#[test]
fn sizes_beyond_the_memory_are_refused_before_anything_is_allocated() {
    let place = Place::new();
    for size in ["1TiB", "1000000TiB"] {
        let line = format!("h2d --backend host --sizes 1MiB,{size} --out @out");
        assert_refused(&place, &line, "invalid", &["--sizes"]);
    }
}

#[test]
fn folders_that_cannot_be_written_are_named() {
    let place = Place::with_machine(QUIET);
    fs::write(place.path("file"), "").unwrap();
    let sweep = "h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 1";
    for out in ["@file", "@file/out"] {
        let path = place.path(&out[1..]).display().to_string();
        assert_refused(&place, &format!("{sweep} --out {out}"), "io", &["--out", &path]);
    }
    let parts = ["--out", "/proc/cluster-health"];
    assert_refused(&place, &format!("{sweep} --out /proc/cluster-health"), "io", &parts);
}

#[test]
fn backends_that_are_not_here_are_named() {
    let place = Place::with_machine(QUIET);
    for command in ["all --out @out", "h2d --out @out", "plan", "affinity"] {
        let unknown = format!("{command} --backend gpu");
        assert_refused(&place, &unknown, "invalid", &["--backend", "'gpu'", "synthetic:FILE"]);
        let missing = format!("{command} --backend synthetic:@none.toml");
        let error = assert_refused(&place, &missing, "system", &["none.toml", "ENOENT"]);
        assert_eq!((&error["call"], &error["code"]), (&"open".into(), &2.into()));
    }
}

#[test]
fn scenario_errors_name_file_and_line() {
    let place = Place::new();
    let cases = [
        ("[machine]\ncpus = 4\nspeed = 3\n", "bad.toml:3", "speed"),
        ("[machine]\ncpus = 5\nsmt_layout = \"split\"\nsmt = 2\n", "bad.toml:4", "smt"),
        ("seed = 1\n[[fault]]\nkind = \"sleepy\"\n", "bad.toml:3", "sleepy"),
        ("[machine]\n\ndevices = 0\n", "bad.toml:3", "devices"),
        ("[h2d]\nnoise = \"loud\"\n", "bad.toml:2", "noise"),
        ("[machine\n", "bad.toml:1", ""),
        ("[[failure]]\nkind = \"bind_refused\"\nrank = 7\n", "bad.toml:3", "rank"),
    ];
    for (text, at, what) in cases {
        fs::write(place.path("bad.toml"), text).unwrap();
        let line = "h2d --backend synthetic:@bad.toml --out @out";
        assert_refused(&place, line, "format", &[at, what]);
    }
}

#[test]
fn usage_errors_are_documents_too() {
    let place = Place::with_machine(QUIET);
    for (line, parts) in [
        ("h2d --out @out --frobnicate", &["--frobnicate"][..]),
        ("h2d", &["required"][..]),
        ("h2d --out @out --order random", &["random", "--order"]),
        ("h2d --out @out --arena numa", &["numa", "--arena"]),
        ("h2d --out @out --check some", &["some", "--check"]),
        ("h2d --out @out --palette pink", &["pink", "--palette"]),
        ("h2d --out @out --seed -1", &["-1"]),
        ("h2d --out @out --iters many", &["many", "--iters"]),
        ("import --format xml --sweep h2d @a --out @out", &["xml", "--format"]),
        ("report", &["required"]),
        ("measure", &["measure"]),
    ] {
        assert_refused(&place, line, "usage", parts);
    }
    // Not a matter of syntax: a variable that says no conflicts with nothing.
    assert_refused(&place, "h2d --out @out --resume --force", "invalid", &["--resume", "--force"]);
    let bare = run::<&str>([]);
    assert_eq!((bare.code, bare.stdout.as_str()), (Some(2), ""));
    assert!(bare.stderr.contains("Usage"), "{}", bare.stderr);
}

#[test]
fn f21_a_machine_without_the_device_is_exit_2_and_a_status() {
    let place = Place::new();
    for command in ["all --out @out", "h2d --out @out", "plan", "affinity"] {
        let line = format!("{command} --backend ascend");
        assert_refused(
            &place,
            &line,
            "unavailable",
            &["Ascend", "libascendcl.so", "libacl_rt.so", "set_env.sh"],
        );
    }
}

#[test]
fn folders_without_results_are_named() {
    let place = Place::new();
    fs::create_dir(place.path("empty")).unwrap();
    for dir in ["empty", "none"] {
        let path = place.path(dir).display().to_string();
        assert_refused(&place, &format!("report @{dir}"), "io", &[&path]);
        let export = format!("export @{dir} --format clusterhealthdetect --out @out");
        assert_refused(&place, &export, "io", &[&path]);
    }
    fs::write(place.path("empty/samples.jsonl"), "").unwrap();
    for (text, part) in [
        ("{}", "schema_version"),
        ("{\"schema_version\":2}", "version 2 is newer"),
        ("{\"schema_version\":1,", "line 1"),
        ("{\"schema_version\":1}", "missing field"),
    ] {
        fs::write(place.path("empty/run.json"), text).unwrap();
        assert_refused(&place, "report @empty", "format", &["run.json", part]);
    }
}

#[test]
fn imports_name_file_line_and_column() {
    let place = Place::new();
    let csv = |text: &str| fs::write(place.path("m-1MiB.csv"), text).unwrap();
    let import = "import --format csv --sweep h2d @m-1MiB.csv --out @out";
    for (text, parts) in [
        ("cpu,0,1\n0,1.5,2\n1,fast,2\n", ["m-1MiB.csv:3, column 2", "'fast'"]),
        ("cpu,0,1\n0,1.5\n", ["m-1MiB.csv:2", "1 rates for 2"]),
        ("cpu,0,0\n", ["m-1MiB.csv:1, column 3", "already"]),
        ("", ["m-1MiB.csv", "empty"]),
    ] {
        csv(text);
        assert_refused(&place, import, "format", &parts);
    }
    csv("cpu,0\n0,1\n");
    let size = format!("{import} --size 5XB");
    assert_refused(&place, &size, "invalid", &["--size", "'5XB'"]);
    let two = "import --format csv --sweep h2d @m-1MiB.csv @n-1MiB.csv --out @out";
    assert_refused(&place, two, "io", &["n-1MiB.csv"]);
    let export = "export @none --format csv --out @out";
    assert_refused(&place, export, "invalid", &["--format", "csv"]);
}

#[test]
fn stdout_holds_results_and_stderr_the_rest() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 2 --force --out @out";
    let plain = place.run(sweep);
    assert_eq!(plain.code, Some(0));
    assert!(plain.stdout.contains("median") && plain.stdout.contains("1MiB"), "{plain:?}");
    assert!(plain.stderr.contains("2 blocks = 128 points"), "{}", plain.stderr);

    let ran = place.run(&format!("{sweep} --json"));
    let document = ran.json();
    assert_eq!((ran.code, &document["status"]), (Some(0), &"complete".into()));
    assert_eq!(document["schema_version"], 1);
    assert_eq!(document["summary"][0]["count"], 64);
    assert_eq!(ran.stderr, plain.stderr);

    for (options, stdout) in [("--quiet", plain.stdout.as_str()), ("--quiet --json", &ran.stdout)] {
        let quiet = place.run(&format!("{sweep} {options}"));
        let told = (timeless(&quiet.stdout), quiet.stderr.as_str());
        assert_eq!(told, (timeless(stdout), ""), "{options}");
    }
    // Warnings are logs: they go where progress goes.
    let warned = place.run(&format!("{sweep} --json --cpus 0-20"));
    assert_eq!(warned.code, Some(2));
    fs::write(place.path("machine.toml"), QUIET.replace("[h2d]", "offline = \"3\"\n[h2d]"))
        .unwrap();
    // Four cells and a probe in each of two blocks.
    let warned = place.run(&format!("{sweep} --json --cpus 0-7"));
    assert_eq!((warned.code, &warned.json()["points"]["skipped"]), (Some(1), &10.into()));
    assert!(warned.stderr.contains("offline"), "{}", warned.stderr);
}

#[test]
fn every_command_is_quiet_when_asked() {
    let place = Place::with_machine(QUIET);
    fs::write(place.path("m-1MiB.csv"), "cpu,0\n0,1\n").unwrap();
    for line in [
        "h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 1 --out @out",
        "report @out",
        "export @out --format clusterhealthdetect --out @older",
        "plan --backend synthetic:@machine.toml",
        "affinity",
        "import --format csv --sweep h2d @m-1MiB.csv --out @imported",
    ] {
        let ran = place.run(&format!("{line} --quiet"));
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{line}");
    }
}

const COMMANDS: [&str; 7] = ["all", "affinity", "h2d", "plan", "report", "import", "export"];
const SWEEP_OPTIONS: [&str; 14] = [
    "--backend",
    "--cpus",
    "--devices",
    "--sizes",
    "--iters",
    "--warmup",
    "--repeats",
    "--ci",
    "--order",
    "--seed",
    "--load",
    "--arena",
    "--check",
    "--timeout",
];

fn help(command: &str) -> Ran {
    let ran = run([command, "--help"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{command}");
    ran
}

#[test]
fn help_names_every_option_with_its_variable() {
    let main = run(["--help"]);
    assert_eq!(main.code, Some(0));
    for command in COMMANDS {
        assert!(main.stdout.contains(&format!("  {command}")), "{command}");
        let text = help(command).stdout;
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let options: Vec<&str> = lines
            .iter()
            .filter_map(|line| line.strip_prefix("-h, ").or(Some(*line)))
            .filter_map(|line| line.strip_prefix("--"))
            .filter_map(|line| line.split([' ', '[', '=']).next())
            .filter(|name| *name != "help")
            .collect();
        assert!(options.contains(&"json") && options.contains(&"quiet"), "{command}: {options:?}");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for name in &options {
            let variable = format!("CLUSTER_HEALTH_{}", name.to_uppercase().replace('-', "_"));
            assert!(text.contains(&format!("[env: {variable}=")), "{command} --{name}");
        }
        if ["all", "h2d", "plan"].contains(&command) {
            for option in SWEEP_OPTIONS {
                assert!(options.contains(&&option[2..]), "{command} {option}");
            }
        }
        let folder = ["all", "h2d", "import", "export"].contains(&command);
        assert_eq!(options.contains(&"out"), folder, "{command}");
    }
    assert!(run(["--version"]).stdout.starts_with("cluster-health "));
}

#[test]
fn every_option_of_a_plan_has_its_variable() {
    let place = Place::with_machine(QUIET);
    let backend = format!("synthetic:{}", place.path("machine.toml").display());
    let cases = [
        ("CPUS", "3,1", "cpus", "[3,1]"),
        ("DEVICES", "2,0", "devices", "[2,0]"),
        ("SIZES", "2MiB,8KB", "sizes", "[8000,2097152]"),
        ("ITERS", "5", "iters", "5"),
        ("WARMUP", "2", "warmup", "2"),
        ("REPEATS", "7", "repeats", "7"),
        ("CI", "2%", "ci", "0.02"),
        ("ORDER", "sequential", "order", "\"sequential\""),
        ("SEED", "18446744073709551615", "seed", "18446744073709551615"),
        ("ARENA", "core", "arena", "\"core\""),
        ("CHECK", "full", "check", "\"full\""),
        ("TIMEOUT", "2m", "timeout_ns", "120000000000"),
        ("EXPECT", "50GB/s", "expect", "50000000000.0"),
        ("LOAD", "idle,cpu:2,device", "loads", "[\"idle\",\"cpu:2\",\"device\"]"),
    ];
    for (name, value, field, wanted) in cases {
        let ran = Ran::of(
            place
                .command("plan")
                .env("CLUSTER_HEALTH_BACKEND", &backend)
                .env("CLUSTER_HEALTH_JSON", "true")
                .env(format!("CLUSTER_HEALTH_{name}"), value),
        );
        assert_eq!(ran.code, Some(0), "{name}: {ran:?}");
        assert_eq!(ran.json()["plan"][field].to_string(), wanted, "{name}");
    }
    // The command line comes first.
    let ran = Ran::of(
        place
            .command("plan --json --seed 3 --backend synthetic:@machine.toml")
            .env("CLUSTER_HEALTH_SEED", "4"),
    );
    assert_eq!(ran.json()["plan"]["seed"], 3);
}

#[test]
fn flags_and_folders_have_their_variables() {
    let place = Place::with_machine(QUIET);
    let sweep = "h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 1";
    let with = |line: &str, variables: &[(&str, &str)]| {
        let mut command = place.command(line);
        for (name, value) in variables {
            command.env(format!("CLUSTER_HEALTH_{name}"), value);
        }
        Ran::of(&mut command)
    };
    let out = place.path("out").display().to_string();
    let first = with(sweep, &[("OUT", &out), ("QUIET", "1")]);
    assert_eq!((first.code, first.stderr.as_str()), (Some(0), ""));
    let sweep = format!("{sweep} --out @out");
    assert_eq!(with(&sweep, &[]).code, Some(2));
    for off in ["0", "false", ""] {
        assert_eq!(with(&sweep, &[("FORCE", off)]).code, Some(2), "'{off}'");
    }
    for on in ["1", "true"] {
        assert_eq!(with(&sweep, &[("RESUME", on)]).code, Some(0));
        assert_eq!(with(&sweep, &[("FORCE", on)]).code, Some(0));
        let error = with(&sweep, &[("JSON", on)]);
        assert_eq!((error.code, &error.json()["error"]["kind"]), (Some(2), &"invalid".into()));
    }
    let picture = || fs::read(place.path("out/h2d-1MiB.png")).unwrap();
    let default = picture();
    assert_eq!(with(&sweep, &[("FORCE", "1"), ("PALETTE", "classic")]).code, Some(0));
    assert!(picture() != default, "another palette");

    fs::write(place.path("m.csv"), "cpu,0\n0,1\n").unwrap();
    let ran = with(
        "import @m.csv --out @imported",
        &[
            ("FORMAT", "csv"),
            ("SWEEP", "core-pair"),
            ("SIZE", "1MiB"),
            ("SCAN_ORDER", "column-major"),
        ],
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let manifest = crate::support::json(&place.path("imported/run.json"));
    assert_eq!(manifest["order"], "imported-column-major");
    assert_eq!(manifest["plan"]["import"]["sweep"], "core_pair");
    assert_eq!(manifest["summary"][0]["bytes"], 1 << 20);
}

/// Variables are read by people too: their values must not end up with a secret in the folder.
#[test]
fn variables_are_recorded_but_no_secrets() {
    let place = Place::new();
    let mut command =
        place.command("h2d --quiet --backend host --sizes 128KiB --repeats 1 --out @out");
    command.env("HCCL_BUFFSIZE", "200").env("HCCL_AUTH_TOKEN", "do-not-tell");
    assert_whole(&Ran::of(&mut command));
    let text = fs::read_to_string(place.path("out/run.json")).unwrap();
    let run: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(run["environment"]["variables"]["HCCL_BUFFSIZE"], "200");
    assert!(!text.contains("do-not-tell"));
}

/// The text without the times of day in it.
fn timeless(text: &str) -> String {
    let parts = text.split(|c: char| c.is_whitespace() || matches!(c, '"' | ','));
    parts
        .filter(|part| !(part.starts_with("20") && part.contains('T')))
        .collect::<Vec<_>>()
        .join(" ")
}
