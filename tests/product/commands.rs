//! The commands beside the sweeps.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{
    MIB, Place, QUIET, Ran, assert_summary, assert_whole, close, contents, json, quantile, rates,
    summary,
};

/// The recorded data lie beside the checkout.
fn recorded(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(name);
    if !path.exists() {
        println!("skipped: no recorded data");
        return None;
    }
    Some(path)
}

/// min, p10, median, p90, max of each size with three decimals, as they were published.
fn published(run: &Value) -> Vec<String> {
    let row = |row: &Value| {
        let number = |name: &str| format!("{:.3}", row[name].as_f64().unwrap());
        ["min", "p10", "median", "p90", "max"].map(number).join(" ")
    };
    run["summary"].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn recorded_matrices_reproduce_their_published_statistics() {
    let place = Place::new();
    let mut command = place.command("import --format csv --sweep h2d --quiet --out @out");
    for size in ["64MB", "256MB", "16MB"] {
        let Some(path) = recorded(&format!("a3-182-h2d-clean-20260707-{size}.csv")) else { return };
        command.arg(path);
    }
    command.arg("--affinity").arg(recorded("a3-182-h2d-clean-20260707-affinity.csv").unwrap());
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let run = json(&place.path("out/run.json"));
    let wanted = [
        "1.297 6.531 56.132 57.240 58.503",
        "4.739 37.252 58.376 58.848 59.356",
        "15.791 58.404 59.129 59.621 59.926",
    ];
    assert_eq!(published(&run), wanted);
    for row in run["summary"].as_array().unwrap() {
        assert_eq!((&row["count"], &row["rate"]), (&10_240.into(), &"h2d".into()));
    }
    assert_eq!(run["order"], "imported-row-major");
    let notes = run["notes"].to_string();
    assert!(notes.contains("row-major is an assumption"), "{notes}");
    assert!(notes.contains("16MB read as 16MiB"), "{notes}");
    let census = json(&place.path("out/affinity.json"));
    assert_eq!(census["cpus"].as_array().unwrap().len(), 640);
    assert_eq!(census["cpus"][639]["numa_node"], 7);
}

/// 3 × 7 rates 1, 2, …, 21 in a scrambled order, and their quantiles as numpy gives them:
/// `numpy.quantile(range(1, 22), [0, .1, .5, .9, 1])` is 1, 3, 11, 19, 21; without the largest
/// (one cell empty) 1, 2.9, 10.5, 18.1, 20.
#[test]
fn imported_matrices_have_the_quantiles_of_their_cells() {
    let place = Place::new();
    let write = |hole: bool| {
        let mut text = "cpu,4,0,9,1,2,3,6\n".to_owned();
        for row in 0..3 {
            text.push_str(&(10 * row + 2).to_string());
            for column in 0..7 {
                let rate = (row * 7 + column) * 8 % 21 + 1;
                if hole && rate == 21 {
                    text.push(',');
                } else {
                    text.push_str(&format!(",{rate}"));
                }
            }
            text.push('\n');
        }
        fs::write(place.path("m-16MiB.csv"), text).unwrap();
    };
    for (hole, count, wanted) in
        [(false, 21, [1.0, 3.0, 11.0, 19.0, 21.0]), (true, 20, [1.0, 2.9, 10.5, 18.1, 20.0])]
    {
        write(hole);
        let line = "import --format csv --sweep h2d --force @m-16MiB.csv --out @out --json";
        let ran = place.run(line);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        // Times are whole nanoseconds: 16 MiB at 21 GB/s take 798,915.
        let wanted = [(16 * MIB, (count, wanted))].into();
        assert_summary(&ran.json(), &wanted, 1e-6);
        assert_summary(&json(&place.path("out/run.json")), &wanted, 1e-6);
        let csv = crate::support::Csv::read(&place.path("out/h2d-16MiB.csv"));
        assert_eq!((csv.rows.as_slice(), csv.columns.len()), (&[2, 12, 22][..], 7));
        assert_eq!(csv.measured() as u64, count);
        assert!(close(csv.at(2, 0).unwrap(), 9.0, 1e-6));
    }
    let samples = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    for line in samples.lines() {
        let sample: Value = serde_json::from_str(line).unwrap();
        assert_eq!((&sample["t_ns"], &sample["pinned"]), (&Value::Null, &Value::Null));
    }
}

#[test]
fn imported_pairs_are_pairs() {
    let place = Place::new();
    fs::write(place.path("p-8MiB.csv"), "rank0\\rank1,0,1\n0,8,12\n1,,14\n").unwrap();
    let ran = place
        .run("import --format csv --sweep core-pair @p-8MiB.csv --scan-order unknown --out @out");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let run = json(&place.path("out/run.json"));
    assert_eq!(run["order"], "imported-unknown");
    let row = &run["summary"][0];
    assert_eq!((&row["sweep"], &row["rate"]), (&"core_pair".into(), &"per_rank".into()));
    let text = fs::read_to_string(place.path("out/core-pair-8MiB.csv")).unwrap();
    assert!(text.starts_with("rank0\\rank1,0,1\n"), "{text}");
    for name in ["core-pair-8MiB.npy", "core-pair-8MiB.png", "matrices.xlsx", "report.md"] {
        assert!(place.path("out").join(name).exists(), "{name}");
    }
}

#[test]
fn an_import_replaces_nothing_unasked() {
    let place = Place::new();
    fs::write(place.path("m-1MiB.csv"), "cpu,0\n0,8\n").unwrap();
    let line = "import --format csv --sweep h2d --quiet @m-1MiB.csv --out @out";
    assert_eq!(place.run(line).code, Some(0));
    let before = contents(&place.path("out"));
    let again = place.run(line);
    assert_eq!(again.code, Some(2));
    assert!(again.stderr.contains("not empty"), "{}", again.stderr);
    assert!(contents(&place.path("out")) == before);
}

#[test]
fn report_makes_the_same_files_again() {
    let place =
        Place::with_machine("[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\noffline = \"3\"\n");
    place.sweep(1, "--cpus 0-15 --sizes 1MiB,4MiB --repeats 3");
    let out = place.path("out");
    let outputs = || {
        let mut files = contents(&out);
        // A workbook carries the time it was made.
        files.remove("matrices.xlsx");
        files
    };
    let first = outputs();
    for _ in 0..2 {
        let ran = place.run("report @out");
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
        for (name, bytes) in outputs() {
            assert!(bytes == first[&name], "{name} differs");
        }
        for name in first.keys().filter(|name| name.starts_with("h2d-")) {
            fs::remove_file(out.join(name)).unwrap();
        }
        fs::remove_file(out.join("report.md")).unwrap();
        fs::remove_file(out.join("matrices.xlsx")).unwrap();
    }
}

#[test]
fn report_counts_what_the_log_says() {
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 1MiB --repeats 3");
    let path = place.path("out/samples.jsonl");
    let mut lines: Vec<Value> = fs::read_to_string(&path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    // Sentinels, probes and confirmations a thousand times too slow change no matrix.
    for (phase, sentinel) in [("blocks", true), ("probe", false), ("confirm", false)] {
        let mut extra = lines[0].clone();
        extra["seq"] = lines.len().into();
        extra["phase"] = phase.into();
        extra["sentinel"] = sentinel.into();
        extra["iter_ns"] = json!([300_000_000, 300_000_000, 300_000_000]);
        lines.push(extra);
    }
    // A cell with one failed block keeps the others.
    let victim = folder.first_class().find(|p| p.block == 1).unwrap().clone();
    let at = usize::try_from(victim.seq).unwrap();
    lines[at]["status"] = "failed".into();
    lines[at]["reason"] = "a reason of its own".into();
    lines[at]["iter_ns"] = json!([]);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&path, format!("{text}not a sample\n")).unwrap();

    let ran = place.run("report @out --json");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let line = lines.len() + 1;
    assert!(ran.stderr.contains(&format!("line {line}")), "{}", ran.stderr);
    let after = json(&place.path("out/run.json"));
    assert_eq!(after["points"]["failed"], 1);
    assert_eq!(after["points"]["measured"], lines.len() - 1);
    let cells = rates(folder.first_class().filter(|p| p.seq != victim.seq));
    assert_eq!(cells.len(), 64);
    assert_summary(&after, &summary(&cells), 1e-12);
    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    assert!(report.contains("1 × a reason of its own"), "{report}");
    assert!(report.contains(&format!("samples.jsonl, line {line}")), "{report}");
}

#[test]
fn readers_ignore_fields_they_do_not_know() {
    let place = Place::with_machine(QUIET);
    place.sweep(0, "--sizes 1MiB --repeats 1");
    let before = json(&place.path("out/run.json"));
    let mut run = before.clone();
    run["novelty"] = json!({"a": 1});
    run["plan"]["h2d"]["novelty"] = 2.into();
    fs::write(place.path("out/run.json"), run.to_string()).unwrap();
    let path = place.path("out/samples.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("{\"seq\"", "{\"novelty\":[],\"seq\"")).unwrap();
    assert_eq!(place.run("report @out").code, Some(0));
    let after = json(&place.path("out/run.json"));
    assert_eq!((&after["summary"], &after["points"]), (&before["summary"], &before["points"]));
}

#[test]
fn an_exported_run_imports_with_the_same_summary() {
    let place = Place::with_machine("[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\n");
    let folder = place.sweep(0, "--sizes 1MiB,4MiB --repeats 3");
    let ran = place.run("export @out --format clusterhealthdetect --out @older --json");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.json()["notes"].to_string().contains("sentinel, probe"), "{ran:?}");
    let older = json(&place.path("older/results.json"));
    assert_eq!(older["metrics"].as_array().unwrap().len(), 16 * 4 * 2 * 3);
    assert_eq!(json(&place.path("older/affinity.json"))["cpus"].as_array().unwrap().len(), 16);

    let ran = place.run("import --format clusterhealthdetect --sweep h2d @older --out @back");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let back = json(&place.path("back/run.json"));
    assert_summary(&back, &summary(&rates(folder.first_class())), 1e-5);
    assert_eq!(back["plan"]["import"]["format"], "clusterhealthdetect");

    let refused = place.run("export @out --format clusterhealthdetect --out @older");
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("not empty"), "{}", refused.stderr);
    let forced = place.run("export @out --format clusterhealthdetect --out @older --force --quiet");
    assert_eq!(forced.code, Some(0));
    assert_eq!(json(&place.path("older/results.json"))["metrics"], older["metrics"]);
}

#[test]
fn affinity_reads_another_machine_without_binding() {
    let place = Place::new();
    let write = |path: &str, text: &str| {
        let path = place.path("root").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let cpu = "sys/devices/system/cpu";
    write(&format!("{cpu}/present"), "0-5\n");
    write(&format!("{cpu}/online"), "0-2,4-5\n");
    for id in [0, 1, 2, 4, 5] {
        write(&format!("{cpu}/cpu{id}/topology/physical_package_id"), &format!("{}\n", id / 4));
        write(&format!("{cpu}/cpu{id}/topology/core_id"), &format!("{}\n", id % 4 / 2));
        let even = id / 2 * 2;
        let siblings = format!("{even}-{}\n", even + 1);
        write(&format!("{cpu}/cpu{id}/topology/thread_siblings_list"), &siblings);
    }
    write("sys/devices/system/node/node0/cpulist", "0-2\n");
    write("sys/devices/system/node/node1/cpulist", "4-5\n");
    write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-4\n");

    let ran = place.run("affinity --json --sysfs @root");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let cpus = ran.json()["cpus"].as_array().unwrap().clone();
    assert_eq!(cpus.len(), 6);
    for (id, record) in cpus.iter().enumerate() {
        assert_eq!(record["cpu"], id);
        assert_eq!(
            (&record["online"], &record["allowed"]),
            (&(id != 3).into(), &([0, 1, 2, 4].contains(&id)).into())
        );
        assert_eq!(
            (&record["bindable"], &record["reason"]),
            (&Value::Null, &"not this machine".into())
        );
    }
    assert_eq!((&cpus[4]["numa_node"], &cpus[4]["socket_id"]), (&1.into(), &1.into()));
    assert!(["4,5", "4-5"].contains(&cpus[4]["thread_siblings"].as_str().unwrap()));
    assert!(ran.json()["summary"]["bindable"].is_null());

    let table = place.run("affinity --sysfs @root");
    assert_eq!((table.code, table.stdout.lines().count()), (Some(0), 8));
    let last = table.stdout.lines().last().unwrap();
    assert_eq!(last, "6 present, 5 online, 4 allowed, bindable unknown: not this machine");

    let none = place.run("affinity --sysfs @none --json");
    assert_eq!(none.code, Some(2));
    assert!(none.json()["error"]["message"].as_str().unwrap().contains("none"), "{none:?}");
}

#[test]
fn affinity_of_this_machine_says_what_the_folder_says() {
    let place = Place::new();
    let census = place.run("affinity --json").json();
    let sweep = "h2d --quiet --backend host --sizes 128KiB --repeats 1 --out @out";
    assert_whole(&place.run(sweep));
    let file = json(&place.path("out/affinity.json"));
    assert_eq!((&census["cpus"], &census["summary"]), (&file["cpus"], &file["summary"]));
}

#[test]
fn plan_measures_nothing_and_tells_the_cost() {
    let place = Place::with_machine(QUIET);
    let options = "--backend synthetic:@machine.toml --sizes 16MiB,64MiB --repeats 5 --iters 2 \
                   --warmup 1 --order sequential";
    let ran = place.run(&format!("plan {options} --json"));
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert_eq!(crate::support::names(&place.path("")), ["machine.toml".to_owned()].into());
    let document = ran.json();
    let cost = &document["cost"];
    let points = 5 * 16 * 4 * 2;
    assert_eq!(cost["points"], points);
    assert_eq!(cost["bytes"], 5 * 16 * 4 * (16 + 64) * MIB * 3);
    assert_eq!(cost["host_memory"], 2 * 2 * 64 * MIB);
    assert_eq!(cost["device_memory"], 4 * 64 * MIB);

    // What was foretold is what it costs.
    let folder = place.sweep(0, options.split_once("toml").unwrap().1);
    assert_eq!(folder.points.len(), points);
    assert_eq!(folder.run["plan"]["h2d"], document["plan"]);
    let wall = folder.run["wall_ns"].as_u64().unwrap() as f64 / 1e9;
    let foretold = cost["seconds"].as_f64().unwrap();
    assert!(close(foretold, wall, 0.02), "{foretold} s foretold, {wall} s virtual");

    let text = place.run(&format!("plan {options}")).stdout;
    assert!(text.contains("16 CPUs × 4 devices × 2 sizes (16MiB,64MiB) × 5 blocks"), "{text}");
}

/// The slowdown that a plan says it finds shrinks with blocks as 1 ÷ √blocks.
#[test]
fn plan_tells_the_effect_it_can_detect() {
    let place = Place::with_machine("[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\n");
    let detectable = |blocks: u32| {
        let line = format!("plan --backend synthetic:@machine.toml --repeats {blocks} --json");
        let document = place.run(&line).json();
        ["device", "core", "cell"].map(|kind| document["detectable"][kind].as_f64().unwrap())
    };
    let (three, twelve) = (detectable(3), detectable(12));
    for (few, many) in three.iter().zip(&twelve) {
        assert!(close((1.0 - few).ln(), 2.0 * (1.0 - many).ln(), 1e-9), "{few} and {many}");
        assert!(*few > 0.0 && *few < 0.2);
    }
    assert!(three[0] < three[2], "a device is seen from every core");
}

#[test]
fn quantiles_of_this_suite_are_numpys() {
    // numpy.quantile([1, 2, 3, 4, 5, 6, 7, 8], q)
    let sorted: Vec<f64> = (1..=8).map(f64::from).collect();
    for (q, wanted) in [(0.0, 1.0), (0.1, 1.7), (0.5, 4.5), (0.9, 7.3), (1.0, 8.0)] {
        assert!(close(quantile(&sorted, q), wanted, 1e-12), "{q}");
    }
}
