//! `compare`, `calibration.json` and `placement.json` on machines of which the truth is known.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Csv, MIB, Place, Ran, close};

/// 16 CPUs in 8 cores, two nodes, four devices, with noise and drift as a real machine has them.
fn noisy(seed: u64, gbps: f64, more: &str) -> String {
    format!(
        "seed = {seed}\n[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n\
         [h2d]\ngbps = {gbps}\nnoise = 0.015\nvisit_noise = 0.005\n\
         [all_gather]\ngbps = 46\nlatency_us = 20\nnoise = 0.015\n{more}"
    )
}

fn fault(kind: &str, place: &str, factor: f64) -> String {
    format!("[[fault]]\nkind = \"{kind}\"\n{place}\nfactor = {factor}\n")
}

/// Measures a scenario into the folder `name`.
fn measure(place: &Place, name: &str, scenario: &str, command: &str) {
    let file = format!("{name}.toml");
    fs::write(place.path(&file), scenario).unwrap();
    let ran = place.run(&format!(
        "{command} --quiet --backend synthetic:@{file} --sizes 16MiB,64MiB --out @{name}"
    ));
    assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
}

fn compare(place: &Place, line: &str) -> Ran {
    place.run(&format!("compare {line} --json"))
}

/// What changed, as `bytes: axis id`, with `cell row,column` and `all`.
fn changes(document: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for matrix in document["matrices"].as_array().unwrap() {
        let place = format!("{} {}", matrix["sweep"].as_str().unwrap(), matrix["bytes"]);
        for class in matrix["classes"].as_array().unwrap() {
            if class["changed"] == true {
                found.insert(format!(
                    "{place}: {} {}",
                    class["axis"].as_str().unwrap(),
                    class["id"]
                ));
            }
        }
        for cell in matrix["changed_cells"].as_array().unwrap() {
            found.insert(format!("{place}: cell {},{}", cell["row"], cell["column"]));
        }
        let explained = matrix["rest"].is_object() && matrix["rest"]["changed"] == false;
        if matrix["overall"]["changed"] == true && !explained {
            found.insert(format!("{place}: all"));
        }
    }
    found
}

fn both_sizes(what: &str) -> BTreeSet<String> {
    [16 * MIB, 64 * MIB].map(|bytes| format!("h2d {bytes}: {what}")).into()
}

#[test]
fn planted_changes_are_found_where_they_are_and_nothing_else() {
    let place = Place::new();
    measure(&place, "a", &noisy(1, 58.5, ""), "h2d");
    // Ratio of the asymptotic rate; a fixed latency of 12 us makes that of 16 MiB a little smaller.
    let cases = [
        ("device", fault("slow_device", "devices = \"2\"", 0.9), "device 2", 0.9),
        ("node", fault("slow_core", "sweep = \"h2d\"\ncpus = \"8-15\"", 0.9), "numa_node 1", 0.9),
        ("core", fault("slow_core", "sweep = \"h2d\"\ncpus = \"5\"", 0.8), "cpu 5", 0.8),
        ("cell", fault("slow_cell", "cpus = \"3\"\ndevices = \"1\"", 0.8), "cell 3,1", 0.8),
    ];
    for (seed, (name, more, wanted, factor)) in (2..).zip(cases) {
        measure(&place, name, &noisy(seed, 58.5, &more), "h2d");
        let ran = compare(&place, &format!("@a @{name}"));
        let found = ran.json();
        assert_eq!((ran.code, &found["verdict"]), (Some(1), &json!("differences")), "{name}");
        assert_eq!(changes(&found), both_sizes(wanted), "{name}");
        for matrix in found["matrices"].as_array().unwrap() {
            let classes = matrix["classes"].as_array().unwrap();
            let cells = matrix["changed_cells"].as_array().unwrap();
            let mut all = classes.iter().filter(|class| class["changed"] == true).chain(cells);
            let ratio = all.next().unwrap()["ratio"].as_f64().unwrap();
            assert!(close(ratio, factor, 0.03), "{name}: {ratio}");
        }
        // The other way round it is a gain.
        let back = compare(&place, &format!("@{name} @a")).json();
        assert_eq!(changes(&back), both_sizes(wanted), "{name}, back");
    }
}

#[test]
fn a_whole_run_that_is_slower_is_told_with_its_interval() {
    let place = Place::new();
    let quiet =
        |seed, gbps| noisy(seed, gbps, "").replace("visit_noise = 0.005", "visit_noise = 0");
    measure(&place, "a", &quiet(1, 58.5), "h2d");
    measure(&place, "b", &quiet(2, 58.5 * 0.96), "h2d");
    let ran = compare(&place, "@a @b");
    let found = ran.json();
    assert_eq!(ran.code, Some(1), "{found:#}");
    assert_eq!(changes(&found), both_sizes("all"));
    for matrix in found["matrices"].as_array().unwrap() {
        // t = 12 us + S ÷ rate on either side.
        let time = |gbps: f64| 12e3 + matrix["bytes"].as_f64().unwrap() / gbps;
        let truth = time(58.5) / time(58.5 * 0.96);
        let at = |key: &str| matrix["overall"][key].as_f64().unwrap();
        assert!(close(at("ratio"), truth, 0.005), "{} for {truth}", at("ratio"));
        assert!(at("low") <= at("ratio") && at("ratio") <= at("high"), "{matrix:#}");
        assert!(at("high") < 0.99 && at("low") > 0.93, "{matrix:#}");
    }
    let text = place.run("compare @a @b").stdout;
    let parts = ["Facts", "Inference", "Verdict: differences"].map(|part| text.find(part).unwrap());
    assert!(parts.is_sorted(), "{text}");
}

/// Two machines that differ by nothing but their noise, which drift through the run by several per
/// cent; more than one false alarm in fifty would be more than chance.
#[test]
fn identical_machines_do_not_differ() {
    let place = Place::new();
    // The run takes about 1.2 s of virtual time: 1 to 2 % less at its end.
    let drifting = "[[artefact]]\nkind = \"drift\"\nper_hour = -45\n";
    measure(&place, "a", &noisy(100, 58.5, drifting), "h2d");
    let mut drift = Vec::new();
    let mut wrong = Vec::new();
    for seed in 0..50 {
        measure(&place, "b", &noisy(seed, 58.5, drifting), "h2d --force");
        let ran = compare(&place, "@a @b");
        let found = ran.json();
        drift.push(found["matrices"][0]["b"]["drift"].as_f64().unwrap());
        if ran.code != Some(0) {
            wrong.push((seed, found["inference"].clone()));
        }
    }
    drift.sort_by(f64::total_cmp);
    assert!(drift[25] < 0.995, "no drift to be dealt with: {}", drift[25]);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn pairs_are_compared_by_kind_and_rank() {
    let place = Place::new();
    measure(&place, "a", &noisy(1, 58.5, ""), "all");
    let more = fault("smt_sibling", "", 0.8)
        + &fault("slow_rank1_core", "rank1 = \"11\"", 0.85)
        + &fault("slow_block", "rank0 = \"0-7\"\nrank1 = \"0-15\"\nsweep = \"core_pair\"", 0.9);
    measure(&place, "b", &noisy(2, 58.5, &more), "all");
    let found = compare(&place, "@a @b").json();
    let bytes = 8 * MIB;
    let wanted = ["pair_class \"smt_sibling\"", "rank0_numa_node 0", "rank1_cpu 11"];
    let wanted = wanted.map(|what| format!("core_pair {bytes}: {what}"));
    assert_eq!(changes(&found), wanted.into(), "{:#}", found["inference"]);
}

#[test]
fn different_runs_are_refused_with_all_differences() {
    let place = Place::new();
    measure(&place, "a", &noisy(1, 58.5, ""), "h2d");
    measure(
        &place,
        "b",
        &noisy(1, 58.5, "").replace("numa_nodes = 2", "numa_nodes = 4"),
        "h2d \
             --cpus 0-7 --iters 5 --check off",
    );
    let ran = compare(&place, "@a @b");
    let found = ran.json();
    assert_eq!((ran.code, &found["verdict"]), (Some(2), &json!("refused")));
    assert_eq!((&found["matrices"], &found["error"]["kind"]), (&json!([]), &json!("refused")));
    let told: Vec<&str> = found["differences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line.as_str().unwrap())
        .collect();
    for wanted in [
        "CPUs: 0-15 in A, 0-7 in B",
        "iterations: 3 in A, 5 in B",
        "data check: tags in A, off in B",
        "NUMA nodes: 2 in A, 4 in B",
    ] {
        assert!(told.contains(&wanted), "{wanted} in {told:#?}");
        assert!(ran.stderr.contains(wanted), "{}", ran.stderr);
    }
    assert_eq!(told.len(), 4, "{told:#?}");

    let forced = compare(&place, "@a @b --force").json();
    assert_eq!((&forced["forced"], &forced["differences"]), (&json!(true), &found["differences"]));
    assert_eq!(forced["matrices"][0]["cells"], 8 * 4);
    let text = place.run("compare @a @b --force").stdout;
    assert!(text.contains("--force") && text.contains("NUMA nodes: 2 in A, 4 in B"), "{text}");

    // A seed and the number of blocks make no other plan.
    measure(&place, "c", &noisy(9, 58.5, ""), "h2d --seed 9 --repeats 4");
    assert_eq!(compare(&place, "@a @c").code, Some(0));
    assert_eq!(compare(&place, "@a @nowhere").code, Some(2));
    let bad = compare(&place, "@a @c --min-effect 0");
    assert_eq!((bad.code, &bad.json()["error"]["kind"]), (Some(2), &json!("invalid")));
}

#[test]
fn a_cell_that_has_no_rate_any_more_is_a_difference() {
    let place = Place::new();
    measure(&place, "a", &noisy(1, 58.5, ""), "h2d --cpus 0-15");
    let refused = noisy(2, 58.5, "").replace("cpus = 16", "cpus = 16\nrefuse_bind = \"7\"");
    measure(&place, "b", &refused, "h2d --cpus 0-15");
    let ran = compare(&place, "@a @b");
    let found = ran.json();
    assert_eq!((ran.code, &found["matrices"][0]["only_a"]), (Some(1), &json!(4)), "{found:#}");
}

#[test]
fn the_map_of_a_pod_names_the_odd_node() {
    let place = Place::new();
    for node in 0..6 {
        let (gbps, more) = match node {
            2 => (58.5 * 0.9, String::new()),
            4 => (58.5, fault("slow_device", "devices = \"3\"", 0.85)),
            _ => (58.5, String::new()),
        };
        measure(&place, &format!("n{node}"), &noisy(node, gbps, &more), "h2d");
    }
    let ran = compare(&place, "@n0 @n1 @n2 @n3 @n4 @n5");
    let found = ran.json();
    let path = |name: &str| place.path(name).display().to_string();
    assert_eq!(ran.code, Some(1));
    assert_eq!(found["odd"], json!([path("n2"), path("n4")]), "{:#}", found["inference"]);
    for matrix in found["matrices"].as_array().unwrap() {
        let nodes = matrix["nodes"].as_array().unwrap();
        assert!(close(nodes[2]["ratio"].as_f64().unwrap(), 0.9, 0.02));
        let odd = |node: &Value| -> Vec<Value> {
            let classes = node["classes"].as_array().unwrap().iter();
            classes.filter(|class| class["odd"] == true).map(|class| class["id"].clone()).collect()
        };
        assert_eq!((odd(&nodes[4]), odd(&nodes[2])), (vec![json!(3)], vec![]));
        assert_eq!((&nodes[2]["odd"], &nodes[4]["odd"]), (&json!(true), &json!(false)));
    }
    assert_eq!(compare(&place, "@n0 @n1 @n3 @n5").code, Some(0));
}

/// Without noise time is α + S/β to the nanosecond: 12 us and 58.5 GB/s, 20 us and 46 GB/s.
#[test]
fn calibration_finds_what_the_machine_was_made_of() {
    let place = Place::with_machine(
        "[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\nrefuse_bind = \"9\"\n\
         [h2d]\ngbps = 58.5\nlatency_us = 12\nnoise = 0\n\
         [all_gather]\ngbps = 46\nlatency_us = 20\nnoise = 0\n\
         [[fault]]\nkind = \"slow_device\"\ndevices = \"1\"\nfactor = 0.8\n\
         [[fault]]\nkind = \"slow_core\"\nsweep = \"h2d\"\ncpus = \"8-15\"\nextra_us = 5\n",
    );
    let ran = place.run(
        "all --quiet --backend synthetic:@machine.toml --cpus 0-15 --sizes 16MiB,64MiB --out @out",
    );
    assert_eq!(ran.code, Some(1), "CPU 9 cannot be bound: {ran:?}");
    let found = read(&place.path("out/calibration.json"));
    assert_eq!(found["schema_version"], 1);
    let bindable: Vec<u32> = (0..16).filter(|cpu| *cpu != 9).collect();
    assert_eq!(found["affinity_bindable_cpus"], json!(bindable));
    assert_eq!(found["load_profile_delta"], Value::Null);

    let copies = found["h2d_alpha_beta"].as_array().unwrap();
    assert_eq!(copies.len(), 2 * 4);
    for copy in copies {
        let alpha = if copy["numa_node"] == 1 { 17.0 } else { 12.0 };
        let beta = if copy["device"] == 1 { 0.8 * 58.5 } else { 58.5 };
        let at = |key: &str| copy[key].as_f64().unwrap();
        assert!(close(at("alpha_us"), alpha, 1e-3), "{copy:#}");
        assert!(close(at("beta_gbps"), beta, 1e-4), "{copy:#}");
        assert!(at("alpha_se_us") < 1e-3 && at("beta_se_gbps") < 1e-3, "{copy:#}");
        assert!(copy["alpha_identified"] == true && at("residual") < 1e-4, "{copy:#}");
    }
    let pairs = found["pair_alpha_beta"].as_array().unwrap();
    let kinds: BTreeSet<&str> =
        pairs.iter().map(|pair| pair["pair_class"].as_str().unwrap()).collect();
    assert!(kinds.contains("same_node") && kinds.contains("other_node"), "{kinds:?}");
    for pair in pairs {
        assert!(close(pair["alpha_us"].as_f64().unwrap(), 20.0, 1e-3), "{pair:#}");
        assert!(close(pair["beta_gbps"].as_f64().unwrap(), 46.0, 1e-4), "{pair:#}");
        assert_eq!((&pair["sizes"], &pair["residual"]), (&json!([65536, 8 * MIB]), &Value::Null));
    }

    // The matrices are those of the csv files; pairs carry both ranks' bytes.
    let copies = &found["h2d_gbps_by_core_device"];
    assert_eq!(copies[0]["axes"], json!(["cpu", "device"]));
    assert_matrix(&copies[0], &Csv::read(&place.path("out/h2d-16MiB.csv")), 1.0);
    assert_matrix(&copies[1], &Csv::read(&place.path("out/h2d-64MiB.csv")), 1.0);
    let pairs = &found["d2d_alg_gbps_by_core_pair"];
    assert!(pairs["convention"].as_str().unwrap().contains("n·S/t"), "{}", pairs["convention"]);
    assert_eq!(pairs["device_pair"], json!([0, 1]));
    assert_matrix(&pairs["matrices"][0], &Csv::read(&place.path("out/core-pair-8MiB.csv")), 2.0);
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn assert_matrix(found: &Value, csv: &Csv, factor: f64) {
    assert_eq!((&found["rows"], &found["columns"]), (&json!(csv.rows), &json!(csv.columns)));
    for (row, wanted) in csv.cells.iter().enumerate() {
        for (column, wanted) in wanted.iter().enumerate() {
            match (found["gbps"][row][column].as_f64(), wanted) {
                (Some(rate), Some(wanted)) => assert!(close(rate, wanted * factor, 1e-6)),
                (None, None) => {}
                other => panic!("{row} {column}: {other:?}"),
            }
        }
    }
}

#[test]
fn placement_ranks_what_differs_and_says_any_otherwise() {
    let place = Place::new();
    let more = fault("slow_block", "sweep = \"h2d\"\ncpus = \"0-7\"\ndevices = \"3\"", 0.9)
        + &fault("slow_core", "sweep = \"h2d\"\ncpus = \"10\"", 0.8);
    let machine = noisy(1, 58.5, &more).replace("cpus = 16", "cpus = 16\nrefuse_bind = \"6\"");
    measure(&place, "out", &machine, "h2d --repeats 5");
    let found = read(&place.path("out/placement.json"));
    let devices = found["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 4);
    for device in devices {
        let differs = device["device"] == 3;
        assert_eq!(device["differences_exceed_noise"], differs, "{device:#}");
        let wanted = if differs { "8-9,11-15" } else { "any" };
        assert_eq!(device["cores"], wanted, "{device:#}");
        let avoid = device["avoid"].as_array().unwrap();
        let avoid: Vec<(u64, &str)> = avoid
            .iter()
            .map(|avoid| (avoid["cpu"].as_u64().unwrap(), avoid["kind"].as_str().unwrap()))
            .collect();
        assert_eq!(avoid, [(6, "unbindable"), (10, "slow")], "{device:#}");
        for group in device["ranking"].as_array().unwrap() {
            assert_eq!(group["memory_node"], group["numa_node"]);
        }
    }
    let ranking = &devices[3]["ranking"];
    assert_eq!((&ranking[0]["numa_node"], &ranking[1]["numa_node"]), (&json!(1), &json!(0)));
    assert_eq!((&ranking[0]["cpus"], &ranking[1]["cpus"]), (&json!("8-15"), &json!("0-5,7")));
    assert_eq!(ranking[0]["one_per_core"], "8,10,12,14");
    assert!(close(ranking[1]["to_best"]["ratio"].as_f64().unwrap(), 0.9, 0.02), "{ranking:#}");
    assert_eq!(ranking[1]["as_good_as_best"], false);
}

/// The recordings of the older tool, one block each, in fixed order.
#[test]
fn recordings_of_the_older_tool_are_compared_as_far_as_one_block_goes() {
    const NAME: &str = "a3-182-h2d-clean-20260707-64MB.csv";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(NAME);
    let Ok(text) = fs::read_to_string(path) else {
        println!("skipped: no recorded data");
        return;
    };
    let place = Place::new();
    // Device 11 at 0.9, CPU and everything else as recorded.
    let slower: String = text
        .lines()
        .enumerate()
        .map(|(at, line)| {
            let mut cells: Vec<String> = line.split(',').map(str::to_owned).collect();
            if at > 0 {
                cells[12] = (0.9 * cells[12].parse::<f64>().unwrap()).to_string();
            }
            cells.join(",") + "\n"
        })
        .collect();
    for (name, text) in [("a", &text), ("b", &slower)] {
        fs::write(place.path(&format!("{name}-64MiB.csv")), text).unwrap();
        let ran = place.run(&format!(
            "import --format csv --sweep h2d --quiet @{name}-64MiB.csv --out @{name}"
        ));
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(place.path(name).join("placement.json").exists());
    }
    let same = compare(&place, "@a @a");
    assert_eq!((same.code, &same.json()["verdict"]), (Some(0), &json!("no_difference")));
    let ran = compare(&place, "@a @b");
    let found = ran.json();
    assert_eq!(ran.code, Some(1));
    assert_eq!(changes(&found), [format!("h2d {}: device 11", 64 * MIB)].into());
    assert_eq!(found["matrices"][0]["unit"], "eighth of the rows");
    let told = found["not_tested"].to_string();
    assert!(told.contains("one block") && told.contains("three blocks"), "{told}");

    let found = read(&place.path("a/placement.json"));
    for device in found["devices"].as_array().unwrap() {
        assert_eq!((&device["cores"], &device["blocks"]), (&json!("any"), &json!(1)));
    }
}
