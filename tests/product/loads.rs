//! Sweeps under load: what the files say of them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::support::{Folder, MIB, Place, QUIET, assert_whole, close, middle, names};

/// Records of `run.json` by profile.
fn records(folder: &Folder) -> BTreeMap<String, Value> {
    let list = folder.run["load_profiles"].as_array().unwrap();
    list.iter()
        .map(|record| (record["name"].as_str().unwrap().to_owned(), record.clone()))
        .collect()
}

#[test]
fn every_cell_is_measured_under_every_load_with_files_of_its_own() {
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 16MiB --load idle,cpu:2,cpu:1:stream,device");
    let loads = ["idle", "cpu:2", "cpu:1:stream", "device"];
    for load in loads {
        let of_load = folder.first_class().filter(|point| point.load == load);
        let cells: Vec<_> = of_load.map(|point| (point.block, point.cell())).collect();
        assert_eq!(cells.len(), 16 * 4 * 3, "{load}");
        assert_eq!(cells.iter().collect::<BTreeSet<_>>().len(), cells.len(), "{load}");
    }
    let files = names(&folder.dir);
    for stem in ["h2d-16MiB", "h2d-16MiB-cpu2", "h2d-16MiB-cpu1stream", "h2d-16MiB-device"] {
        for end in ["csv", "npy", "png"] {
            assert!(files.contains(&format!("{stem}.{end}")), "{stem}.{end}: {files:?}");
        }
        assert_eq!(folder.csv(stem).measured(), 16 * 4);
    }
    let summary = folder.run["summary"].as_array().unwrap();
    let rows: BTreeSet<&str> = summary.iter().map(|row| row["load"].as_str().unwrap()).collect();
    assert_eq!(rows, BTreeSet::from(loads));
    assert_eq!(folder.run["plan"]["h2d"]["loads"], json!(loads));
    let records = records(&folder);
    assert_eq!(records.len(), 4);
    let of = |name: &str, field: &str| records[name][field].clone();
    assert_eq!((of("cpu:2", "burners"), of("device", "burners")), (2.into(), 4.into()));
    assert_eq!(of("cpu:1:stream", "kind"), "stream");
    // Nothing burns in virtual time, and nothing is claimed to.
    assert!(records.values().all(|record| record["utilisation"].is_null()));
    // What a load does to all cells is told of loads; it is no effect that would have been found.
    let report = std::fs::read_to_string(folder.dir.join("report.md")).unwrap();
    let at = |text: &str| report.find(text).unwrap_or_else(|| panic!("{text}: {report}"));
    assert!(at("### 4. ") < at("h2d under cpu:2: × 1.000 of the idle machine's rate"));
}

#[test]
fn a_plan_of_the_idle_machine_is_written_as_ever() {
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 16MiB --load idle");
    assert!(folder.run["plan"]["h2d"].get("loads").is_none());
    assert!(folder.run.get("load_profiles").is_none());
    assert!(folder.points.iter().all(|point| point.load == "idle"));
}

/// CPU 5 is 5 % slower than the others while the CPUs around it work.
#[test]
fn a_fault_under_load_is_named_with_its_load() {
    let place = Place::with_machine(&format!(
        "{}[[fault]]\nkind = \"load_sensitive\"\nsweep = \"h2d\"\ncpus = \"5\"\nfactor = 0.95\n\
         load = \"cpu\"\n",
        QUIET.replace("noise = 0", "noise = 0.01")
    ));
    let folder = place.sweep(1, "--sizes 64MiB --load idle,cpu:2");
    let slow = |stem: &str| {
        let csv = folder.csv(stem);
        let rates = |cpu: u32| middle(&(0..4).map(|d| csv.at(cpu, d).unwrap()).collect::<Vec<_>>());
        rates(5) / rates(9)
    };
    assert!(close(slow("h2d-64MiB"), 1.0, 0.02), "{}", slow("h2d-64MiB"));
    assert!(close(slow("h2d-64MiB-cpu2"), 0.95, 0.02), "{}", slow("h2d-64MiB-cpu2"));
    let found = place.run("diagnose @out --json").json();
    let findings = found["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{findings:#?}");
    let finding = &findings[0];
    assert_eq!(finding["kind"], "load_sensitive");
    assert_eq!((&finding["load"], &finding["cpus"]), (&"cpu:2".into(), &json!([5])));
    let report = std::fs::read_to_string(folder.dir.join("report.md")).unwrap();
    assert!(report.contains("load_sensitive, CPU 5, in h2d under cpu:2"), "{report}");
}

/// A load needs CPUs that are not measured.
#[test]
fn loads_that_cannot_be_are_usage_errors() {
    let place = Place::with_machine(QUIET);
    for (load, parts) in [
        ("cpu:15", &["--load", "15 CPUs", "14 can be bound"][..]),
        ("idle,cpu", &["--load", "element 2", "'cpu'"]),
        ("idle,cpu:2,idle", &["--load", "element 3 (idle)", "duplicate"]),
        ("idle,", &["--load", "element 2"]),
    ] {
        let ran = place.run(&format!(
            "h2d --quiet --backend synthetic:@machine.toml --out @out --load {load}"
        ));
        assert_eq!(ran.code, Some(2), "{load}: {ran:?}");
        for part in parts {
            assert!(ran.stderr.contains(part), "{load}: {part}: {ran:?}");
        }
    }
    assert!(!place.path("out").exists());
}

#[test]
fn a_live_load_is_there_and_says_what_it_achieved() {
    let place = Place::new();
    let census = place.run("affinity --json").json();
    let cpus = census["cpus"].as_array().unwrap();
    let cores: BTreeSet<&str> = cpus
        .iter()
        .filter(|cpu| cpu["bindable"] == true)
        .map(|cpu| cpu["thread_siblings"].as_str().unwrap())
        .collect();
    if cores.len() < 2 {
        println!("skipped: needs two cores");
        return;
    }
    let ran = place.run(
        "h2d --quiet --backend host --devices 0 --sizes 4MiB --repeats 2 --load idle,cpu:1 --out @out",
    );
    assert_whole(&ran);
    let folder = Folder::read(&place.path("out"));
    let records = records(&folder);
    let (idle, loaded) = (&records["idle"], &records["cpu:1"]);
    assert_eq!((&idle["active_ns"], &idle["cpus"]), (&0.into(), &json!([])));
    // How much of its CPU it got is up to what else runs here.
    let number = |field: &str| loaded[field].as_f64().unwrap();
    assert!(number("utilisation") > 0.0 && number("utilisation") < 1.1, "{loaded}");
    assert!(number("flops") > 0.0 && number("bytes") > 0.0, "{loaded}");
    assert!(
        close(number("utilisation"), number("busy_ns") / number("active_ns"), 1e-6),
        "{loaded}"
    );
    assert!(number("starts") >= 2.0, "{loaded}");
    for load in ["idle", "cpu:1"] {
        let measured: Vec<_> = folder.first_class().filter(|point| point.load == load).collect();
        assert!(measured.len() >= 4 && measured.iter().all(|point| point.bytes == 4 * MIB));
    }
    if number("weak_points") > 0.0 {
        let notes = folder.run["notes"].to_string();
        assert!(notes.contains("burner of load cpu:1 (rank 0) had less than 90 %"), "{notes}");
    }
}
