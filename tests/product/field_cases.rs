//! Reports from people who do this job, each reduced to the smallest input of its kind and named
//! after it. Cases of one module are tested there; docs/reliability.md maps all of them.

use std::fs;

use serde_json::{Value, json};

use crate::limits::{limit, refuse};
use crate::support::{Csv, Folder, MIB, Place, QUIET, Ran, assert_whole, close, contents, names};

#[test]
fn f8_a_sandbox_that_hides_where_pages_are() {
    let place = Place::new();
    let mut command =
        place.command("h2d --quiet --backend host --devices 0 --sizes 1MiB --repeats 2 --out @out");
    // As container runtimes do.
    let calls = [libc::SYS_mbind, libc::SYS_move_pages, libc::SYS_get_mempolicy];
    refuse(&mut command, &calls, libc::EPERM);
    let ran = Ran::of(&mut command);
    let plan = place.run("plan --backend host --sizes 1MiB --json").json();
    let nodes = plan["plan"]["devices"].as_array().unwrap().len();
    if nodes > 1 {
        // Memory that cannot be placed on its device's node would be a label without a meaning.
        assert_eq!(ran.code, Some(2), "{ran:?}");
        return;
    }
    assert_whole(&ran);
    let folder = Folder::read(&place.path("out"));
    assert!(!folder.points.is_empty());
    for point in &folder.points {
        assert_eq!((point.status.as_str(), &point.page_nodes), ("measured", &None));
    }
}

#[test]
fn f10_memory_that_may_not_be_locked() {
    for options in ["", "--arena core"] {
        let place = Place::new();
        let mut command = place.command(&format!(
            "h2d --backend host --sizes 1MiB,32KiB --repeats 2 {options} --out @out"
        ));
        limit(&mut command, libc::RLIMIT_MEMLOCK, 65_536);
        let ran = Ran::of(&mut command);
        assert_whole(&ran);
        let folder = Folder::read(&place.path("out"));
        assert!(folder.points.iter().all(|p| p.pinned.as_deref() == Some("pageable")));

        // Kept apart from page-locked results by name and in the summary.
        let csv: Vec<_> =
            names(&folder.dir).into_iter().filter(|name| name.ends_with(".csv")).collect();
        assert_eq!(csv, ["h2d-1MiB-pageable.csv", "h2d-32KiB-pageable.csv"]);
        let rows = folder.run["summary"].as_array().unwrap();
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(|row| row["memory"] == "pageable"));
        assert_eq!(folder.run["environment"]["memlock_bytes"], 65_536);

        // And why, where people look.
        let notes = folder.run["notes"].as_array().unwrap();
        let note = notes.iter().filter_map(Value::as_str).find(|note| note.contains("pageable"));
        let note = note.unwrap();
        assert!(note.contains("mlock of 1MiB") && note.contains("RLIMIT_MEMLOCK"), "{note}");
        let report = fs::read_to_string(folder.dir.join("report.md")).unwrap();
        assert!(report.contains(note), "{report}");
        assert!(ran.stderr.contains(note), "{}", ran.stderr);
    }
}

/// Rewrites the log of a folder line by line.
fn edit_log(place: &Place, mut edit: impl FnMut(&mut Value)) {
    let path = place.path("out/samples.jsonl");
    let mut text = String::new();
    for line in fs::read_to_string(&path).unwrap().lines() {
        let mut sample: Value = serde_json::from_str(line).unwrap();
        edit(&mut sample);
        text.push_str(&sample.to_string());
        text.push('\n');
    }
    fs::write(path, text).unwrap();
}

#[test]
fn f12_pages_are_where_they_were_touched_and_a_stray_one_is_told() {
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 1MiB --repeats 2");
    for point in &folder.points {
        // CPUs 0 to 7 are the four cores of node 0.
        let node = point.cpu / 8;
        assert_eq!(point.page_nodes, Some([(node, 256)].into()), "{point:?}");
    }
    let report = || {
        assert_eq!(place.run("report @out").code, Some(0));
        fs::read_to_string(place.path("out/report.md")).unwrap()
    };
    assert!(!report().contains("not on the CPU's NUMA node"));
    edit_log(&place, |sample| {
        let other = if sample["cpu"].as_u64() < Some(8) { "1" } else { "0" };
        match sample["seq"].as_u64() {
            Some(3) => sample["page_nodes"] = json!({other: 256}),
            // One page astray is enough; pages that nobody could ask about are not.
            Some(4) => sample["page_nodes"] = json!({"0": 128, "1": 128}),
            Some(5) => sample["page_nodes"] = Value::Null,
            _ => {}
        }
    });
    let text = report();
    assert!(
        text.contains("2 points copied from memory that is not on the CPU's NUMA node"),
        "{text}"
    );
}

/// The findings of `out` as `diagnose` gives them.
fn findings(place: &Place) -> Vec<Value> {
    let ran = place.run("diagnose @out --json");
    assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
    ran.json()["findings"].as_array().unwrap().clone()
}

fn kinds(findings: &[Value]) -> Vec<&str> {
    findings.iter().map(|finding| finding["kind"].as_str().unwrap()).collect()
}

fn ids(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// Multiplies the times of every point.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "nanoseconds of a few milliseconds"
)]
fn stretch(sample: &mut Value, factor: f64) {
    for times in ["iter_ns", "warmup_ns"] {
        let stretched = sample[times].as_array().unwrap().iter();
        let stretched: Vec<u64> =
            stretched.map(|ns| (ns.as_u64().unwrap() as f64 * factor) as u64).collect();
        sample[times] = json!(stretched);
    }
}

#[test]
fn f13_a_stall_per_new_buffer_is_no_slow_link() {
    let place = Place::with_machine(&format!(
        "{}[[artefact]]\nkind = \"allocation_stall\"\nextra_ms = 25\n",
        QUIET.replace("noise = 0", "noise = 0.01")
    ));
    // In this order the first device of every core pays for its new buffer.
    let folder = place.sweep(
        1,
        "--sizes 4MiB,16MiB --repeats 3 --iters 1 --arena core --warmup 0 --order sequential",
    );
    let stalled = |p: &&crate::support::Point| p.iter_ns[0] > 25_000_000;
    assert!(folder.first_class().filter(stalled).count() >= 3 * 16);
    assert!(folder.first_class().filter(stalled).all(|point| point.device == 0));
    let findings = findings(&place);
    // A fixed order cannot tell more about the device that is first; it is not called slow.
    assert_eq!(kinds(&findings), ["confounded", "allocation_stall"], "{findings:#?}");
    let stall = findings.iter().find(|finding| finding["kind"] == "allocation_stall").unwrap();
    let text = stall["facts"].to_string();
    assert!(text.contains("4MiB: 25.00 ms per transfer"), "{stall:#}");
    assert_eq!(stall["scales_with_bytes"], false);
}

#[test]
fn f14_only_the_planted_pairs_are_found_among_random_dips() {
    let place = Place::with_machine(
        "[machine]\ncpus = 96\nsmt = 2\nnuma_nodes = 2\ndevices = 2\n\
         [all_gather]\nlatency_us = 1\nnoise = 0.01\ndip_probability = 0.005\n\
         [[fault]]\nkind = \"same_core\"\nsweep = \"core_pair\"\nfactor = 0.61\n\
         [[fault]]\nkind = \"slow_rank1_core\"\nsweep = \"core_pair\"\n\
         rank1 = \"3,9,14,20,27,31,38,45\"\nfactor = 0.95\n",
    );
    let ran = place.run(
        "core-pair --quiet --backend synthetic:@machine.toml --sizes 32MiB --repeats 3 --out @out",
    );
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let findings = findings(&place);
    let mut found = kinds(&findings);
    found.sort_unstable();
    assert_eq!(found, ["same_core", "slow_rank1_core"], "{findings:#?}");
    for finding in &findings {
        let ratio = finding["effect"]["ratio"].as_f64().unwrap();
        if finding["kind"] == "same_core" {
            assert!((ratio - 0.61).abs() < 0.02, "{finding:#}");
        } else {
            assert_eq!(ids(&finding["rank1_cpus"]), [3, 9, 14, 20, 27, 31, 38, 45]);
            assert!((ratio - 0.95).abs() < 0.01, "{finding:#}");
        }
    }
}

#[test]
fn f15_rates_that_fall_along_the_scan_are_a_drift() {
    let place = Place::with_machine(&QUIET.replace("noise = 0", "noise = 0.005"));
    let folder = place.sweep(0, "--sizes 16MiB,64MiB --repeats 2 --order sequential");
    let count = folder.points.len() as f64;
    edit_log(&place, |sample| {
        let t = sample["seq"].as_u64().unwrap() as f64 / count;
        stretch(sample, 1.0 / (1.0 - 0.1 * t));
    });
    let findings = findings(&place);
    assert_eq!(kinds(&findings), ["drift"], "{findings:#?}");
    let ratio = findings[0]["effect"]["ratio"].as_f64().unwrap();
    assert!((ratio - 0.9).abs() < 0.01, "{findings:#?}");
}

#[test]
fn f20_the_order_of_the_lines_decides_nothing() {
    let place = Place::with_machine(&format!(
        "{}[[fault]]\nkind = \"slow_device\"\ndevices = \"2\"\nfactor = 0.8\n",
        QUIET.replace("noise = 0", "noise = 0.02")
    ));
    place.sweep(1, "--sizes 16MiB --repeats 3");
    let path = place.path("out/samples.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let wanted = place.run("diagnose @out --json");
    assert_eq!((wanted.code, wanted.stderr.as_str()), (Some(1), ""), "{wanted:?}");
    assert_eq!(kinds(&findings(&place)), ["slow_device"]);
    let mut state = 20_u64;
    let mut orders = std::collections::BTreeSet::new();
    for _ in 0..50 {
        // Fisher and Yates, with the numbers of Marsaglia's xorshift.
        for last in (1..lines.len()).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            lines.swap(last, usize::try_from(state % (last as u64 + 1)).unwrap());
        }
        let shuffled = lines.join("\n") + "\n";
        fs::write(&path, &shuffled).unwrap();
        assert!(orders.insert(shuffled));
        assert_eq!(place.run("diagnose @out --json").stdout, wanted.stdout);
    }
    // And every output, not only the findings.
    fs::write(&path, &text).unwrap();
    assert_eq!(place.run("report @out").code, Some(0));
    let mut before = contents(&place.path("out"));
    fs::write(&path, lines.join("\n") + "\n").unwrap();
    assert_eq!(place.run("report @out").code, Some(0));
    let mut after = contents(&place.path("out"));
    for files in [&mut before, &mut after] {
        files.remove("samples.jsonl");
    }
    assert!(before == after);
}

#[test]
fn f17_copies_that_are_too_fast_are_no_results() {
    // 128 MiB in about 0.5 us: a copy that returned before it was made.
    let place = Place::with_machine(&format!(
        "{QUIET}latency_us = 0.1\n[[fault]]\nkind = \"slow_cell\"\ncpus = \"6\"\ndevices = \"1\"\n\
         factor = 5600\n"
    ));
    let folder = place.sweep(1, "--sizes 128MiB --repeats 2");
    let fast: Vec<_> = folder.first_class().filter(|p| p.iter_ns[0] < 1_000).collect();
    assert_eq!(fast.len(), 2);
    assert_eq!(folder.count("implausible"), 2);
    assert_eq!(folder.count("measured") + 2, folder.points.len() as u64);
    let csv = folder.csv("h2d-128MiB");
    assert_eq!((csv.at(6, 1), csv.measured()), (None, 63));
    let row = &folder.run["summary"][0];
    assert_eq!(row["count"], 63);
    assert!(close(row["max"].as_f64().unwrap(), 58.5, 0.001), "{row}");
    let report = fs::read_to_string(folder.dir.join("report.md")).unwrap();
    assert!(report.contains("2 implausible"), "{report}");
}

#[test]
fn f17_copies_that_take_no_time_are_no_results() {
    let place = Place::with_machine(
        "[machine]\ncpus = 4\ndevices = 2\nnuma_nodes = 1\n\
         [h2d]\nnoise = 0\nlatency_us = 0\ngbps = 1e9\n",
    );
    let ran = place.run("h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --out @out");
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let folder = Folder::read(&place.path("out"));
    assert!(folder.points.iter().all(|p| p.status == "implausible" && p.iter_ns == [0, 0, 0]));
    assert_eq!(folder.csv("h2d-1MiB").measured(), 0);
}

#[test]
fn f18_what_was_not_measured_stays_so_through_json() {
    let place = Place::with_machine(&QUIET.replace("[h2d]", "offline = \"2\"\n[h2d]"));
    let folder = place.sweep(1, "--cpus 0-3 --devices 0,1 --sizes 1MiB --repeats 2");
    let csv = folder.csv("h2d-1MiB");
    assert_eq!(csv.cells[2], [None, None]);
    assert_eq!(csv.measured(), 6);
    let export = "export @out --format clusterhealthdetect --out @older";
    let ran = place.run(export);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let import = "import --format clusterhealthdetect --sweep h2d @older --out @back";
    let ran = place.run(import);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let back = Csv::read(&place.path("back/h2d-1MiB.csv"));
    assert_eq!(back.cells[2], [None, None]);
    assert_eq!((back.rows, back.columns), (csv.rows, csv.columns));
    for (found, wanted) in back.cells.iter().flatten().zip(csv.cells.iter().flatten()) {
        match (found, wanted) {
            (Some(found), Some(wanted)) => assert!(close(*found, *wanted, 1e-5)),
            (None, None) => {}
            other => panic!("{other:?}"),
        }
    }
    // Nothing but JSON: NaN and infinity have no place in it.
    for name in ["out/run.json", "older/results.json", "back/run.json"] {
        let text = fs::read_to_string(place.path(name)).unwrap();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{name}");
    }
}

#[test]
fn f22_columns_carry_the_ids_in_the_order_that_was_asked_for() {
    let place = Place::with_machine(
        "[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 8\n[h2d]\nnoise = 0\n\
         [[fault]]\nkind = \"slow_device\"\ndevices = \"5\"\nfactor = 0.5\n",
    );
    let folder = place.sweep(1, "--devices 5,0 --sizes 16MiB --repeats 1");
    let text = fs::read_to_string(folder.dir.join("h2d-16MiB.csv")).unwrap();
    assert!(text.starts_with("cpu,5,0\n"), "{text}");
    let csv = folder.csv("h2d-16MiB");
    for row in &csv.cells {
        assert!(row[0].unwrap() < 0.55 * row[1].unwrap(), "device 5 is the slow one");
    }
    assert!(folder.points.iter().all(|p| [5, 0].contains(&p.device)));
    assert_eq!(folder.run["plan"]["h2d"]["devices"].to_string(), "[5,0]");
    assert_eq!(folder.points.iter().map(|p| p.bytes).max(), Some(16 * MIB));
}

/// A group of processes with a tenth of a CPU's time: more than that it gets even on a busy machine; gone when dropped. `None` where this
/// process may not make one.
struct LittleTime(std::path::PathBuf);

impl LittleTime {
    fn new() -> Option<Self> {
        let name = format!("cluster-health-quota-{}", std::process::id());
        let v1 = std::path::Path::new("/sys/fs/cgroup/cpu");
        let v2 = std::path::Path::new("/sys/fs/cgroup");
        let (folder, file, text) = if v1.join("cpu.cfs_quota_us").exists() {
            (v1.join(name), "cpu.cfs_quota_us", "10000")
        } else {
            (v2.join(name), "cpu.max", "10000 100000")
        };
        let made = fs::create_dir(&folder).map(|()| Self(folder.clone()));
        let made = made.and_then(|group| fs::write(folder.join(file), text).map(|()| group));
        made.inspect_err(|error| println!("skipped: no quota can be set here: {error}")).ok()
    }
}

impl Drop for LittleTime {
    fn drop(&mut self) {
        // The kernel needs a moment after its last process.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn f9_a_run_that_was_throttled_says_so() {
    let Some(group) = LittleTime::new() else { return };
    let place = Place::new();
    let script = format!("echo $$ > {}/cgroup.procs || exit 77; exec \"$@\"", group.0.display());
    // Far more work than that is in one period.
    let sweep = place.command(
        "h2d --quiet --backend host --devices 0 --sizes 16MiB --iters 20 --repeats 2 --out @out",
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(sweep.get_program()).args(sweep.get_args());
    let ran = Ran::of(&mut command);
    if ran.code == Some(77) {
        println!("skipped: no process can be moved here: {}", ran.stderr);
        return;
    }
    assert_whole(&ran);
    let run = crate::support::json(&place.path("out").join("run.json"));
    assert_eq!(run["environment"]["cpu_quota"], 0.1);
    let notes: Vec<&str> =
        run["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(notes.iter().any(|note| note.contains("was throttled")), "{notes:?}");
    assert!(notes.iter().any(|note| note.contains("quota of 0.1 CPUs")), "{notes:?}");
}

#[test]
fn f24_times_of_two_modes_are_told_with_both() {
    let place = Place::with_machine(QUIET);
    // 64 MiB at 58.5 GB/s: 1.159 ms.
    let folder = place.sweep(0, "--sizes 64MiB --repeats 3");
    let copy = folder.points.iter().find(|p| p.bytes == 64 * MIB).unwrap().iter_ns[0] as f64;
    edit_log(&place, |sample| {
        let mut seed = sample["seq"].as_u64().unwrap().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        seed ^= seed >> 29;
        let mode = if seed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 63 == 0 { 2.1 } else { 3.2 };
        let jitter = 1.0 + (seed % 1000) as f64 * 1e-6;
        stretch(sample, mode * 1e6 / copy * jitter);
    });
    let findings = findings(&place);
    // Such times hide effects up to a fifth, and that is told, too.
    assert_eq!(kinds(&findings), ["inconclusive", "underpowered"], "{findings:#?}");
    let finding = &findings[0];
    assert!(finding["inference"].as_str().unwrap().contains("bimodal"), "{finding:#}");
    let fact = finding["facts"][0].as_str().unwrap();
    assert!(fact.contains("about 2.1") && fact.contains("about 3.2"), "{fact}");
    assert!(finding["next"].as_str().unwrap().contains("numa_balancing"), "{finding:#}");

    // The setting that makes such times is in the manifest of a run on a real machine.
    let host = Place::new();
    let ran = host.run("h2d --quiet --backend host --sizes 64KiB --repeats 1 --out @out");
    assert_whole(&ran);
    let run = crate::support::json(&host.path("out/run.json"));
    let kernel = fs::read_to_string("/proc/sys/kernel/numa_balancing").ok();
    let wanted = kernel.map_or(Value::Null, |text| text.trim().into());
    assert_eq!(run["environment"]["numa_balancing"], wanted);
}

/// The table of docs/reliability.md names a test of every case, which exists.
#[test]
fn every_field_case_has_its_tests() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = fs::read_to_string(root.join("docs/reliability.md")).unwrap();
    let mut cases = std::collections::BTreeMap::<u32, u32>::new();
    for line in text.lines().filter(|line| line.starts_with("| F")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let number: u32 = cells[1][1..].parse().unwrap();
        let file = cells[4].trim_matches('`');
        let source = fs::read_to_string(root.join(file)).unwrap();
        for test in cells[3].split(',').map(|name| name.trim().trim_matches('`')) {
            assert!(test.starts_with(&format!("f{number}_")), "{line}");
            let (before, _) = source
                .split_once(&format!("fn {test}("))
                .unwrap_or_else(|| panic!("{test} is not in {file}"));
            assert!(before.trim_end().ends_with("#[test]"), "{test} of {file} is no test");
            *cases.entry(number).or_default() += 1;
        }
    }
    assert_eq!(cases.keys().copied().collect::<Vec<_>>(), (1..=24).collect::<Vec<_>>());
}
