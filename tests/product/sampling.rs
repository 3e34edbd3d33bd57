//! Sampled sweeps: what they find within their budget, what they predict, what they leave alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::ranks::{lines, pair_points};
use crate::support::{Csv, Folder, MIB, Place, close, json, names};

/// The usual simulated node.
const NODE: &str = "[machine]\ncpus = 640\nsmt = 2\nnuma_nodes = 8\ndevices = 16\n";
/// Small enough to be measured often, too large to be measured in full within a second.
const SMALL_NODE: &str = "[machine]\ncpus = 64\nsmt = 2\nnuma_nodes = 4\ndevices = 8\n";
const SECOND: u64 = 1_000_000_000;

/// A sweep into `out`, with its result.
struct Sampled {
    dir: std::path::PathBuf,
    code: Option<i32>,
    result: Value,
}

impl Sampled {
    fn run(place: &Place, out: &str, sweep: &str) -> Self {
        let line = format!("{sweep} --quiet --json --backend synthetic:@machine.toml --out @{out}");
        let ran = place.run(&line);
        Self { dir: place.path(out), code: ran.code, result: ran.json() }
    }

    fn wall_ns(&self) -> u64 {
        json(&self.dir.join("run.json"))["wall_ns"].as_u64().unwrap()
    }

    fn findings(&self) -> &[Value] {
        self.result["findings"].as_array().unwrap()
    }

    /// Kind and members of everything that is said of the machine: CPUs, devices, CPUs of the ranks,
    /// NUMA nodes.
    fn faults(&self) -> BTreeSet<(String, [Vec<u32>; 5])> {
        let undecided = ["inconclusive", "confounded", "underpowered"];
        self.findings()
            .iter()
            .filter(|finding| finding["is_artefact"] == false)
            .filter(|finding| !undecided.contains(&finding["kind"].as_str().unwrap()))
            .map(|finding| {
                let members = ["cpus", "devices", "rank0_cpus", "rank1_cpus", "numa_nodes"]
                    .map(|name| serde_json::from_value(finding[name].clone()).unwrap());
                (finding["kind"].as_str().unwrap().to_owned(), members)
            })
            .collect()
    }

    fn assert_healthy(&self, of: &str) {
        assert!(self.findings().is_empty(), "{of}: {}", self.result);
        assert_eq!((self.code, &self.result["verdict"]), (Some(0), &"healthy".into()), "{of}");
    }

    fn map(&self, stem: &str) -> Map {
        let read = |end: &str| Csv::read(&self.dir.join(format!("{stem}{end}.csv")));
        Map { measured: read(""), predicted: read("-predicted"), error: read("-error") }
    }
}

/// What is known of one size.
struct Map {
    measured: Csv,
    predicted: Csv,
    error: Csv,
}

impl Map {
    /// Row, column, predicted rate and its error, of the cells that were not measured. Every cell is
    /// the one or the other.
    fn predictions(&self) -> Vec<(u32, u32, f64, f64)> {
        let mut all = Vec::new();
        for csv in [&self.predicted, &self.error] {
            assert_eq!((&csv.rows, &csv.columns), (&self.measured.rows, &self.measured.columns));
        }
        for (row, cpu) in self.measured.rows.iter().enumerate() {
            for (column, other) in self.measured.columns.iter().enumerate() {
                let [measured, predicted, error] = [&self.measured, &self.predicted, &self.error]
                    .map(|csv| csv.cells[row][column]);
                match (measured, error) {
                    // Predictions are of single precision.
                    (Some(rate), None) => assert!(close(predicted.unwrap(), rate, 1e-6)),
                    (None, Some(error)) => all.push((*cpu, *other, predicted.unwrap(), error)),
                    _ => panic!("{cpu}, {other}: measured {measured:?}, error {error:?}"),
                }
            }
        }
        all
    }
}

fn fault(kind: &str, members: &str) -> String {
    format!("[[fault]]\nkind = \"{kind}\"\n{members}\n")
}

fn range(first: u32, last: u32) -> Vec<u32> {
    (first..=last).collect()
}

#[test]
fn faults_of_copies_are_found_within_the_budget() {
    let place = Place::with_machine(
        &[
            NODE,
            &fault("slow_device", "devices = \"5\"\nfactor = 0.8"),
            &fault("slow_core", "cpus = \"101,333,334\"\nfactor = 0.7"),
            &fault("slow_core", "cpus = \"480-559\"\nfactor = 0.88"),
            &fault("slow_block", "cpus = \"160-239\"\ndevices = \"8-11\"\nfactor = 0.75"),
        ]
        .concat(),
    );
    let sampled = Sampled::run(&place, "out", "h2d --sample");
    assert_eq!(sampled.code, Some(1), "{}", sampled.result);
    let none = Vec::new;
    let wanted = [
        ("numa_effect", [range(480, 559), none(), none(), none(), vec![6]]),
        ("slow_block", [range(160, 239), range(8, 11), none(), none(), none()]),
        ("slow_core", [vec![101, 333, 334], none(), none(), none(), none()]),
        ("slow_device", [none(), vec![5], none(), none(), none()]),
    ];
    assert_eq!(sampled.faults(), wanted.map(|(kind, members)| (kind.to_owned(), members)).into());
    // They rest on visits that were made for them, and so do their ratios.
    for (kind, planted) in
        [("numa_effect", 0.88), ("slow_block", 0.75), ("slow_core", 0.7), ("slow_device", 0.8)]
    {
        let finding = sampled.findings().iter().find(|finding| finding["kind"] == kind).unwrap();
        assert!(finding["replicates"]["of"].as_u64().unwrap() >= 5, "{finding}");
        let ratio = finding["effect"]["ratio"].as_f64().unwrap();
        assert!(close(ratio, planted, 0.03), "{finding}");
    }
    assert!(sampled.wall_ns() <= 30 * SECOND, "{}", sampled.wall_ns());
    // No sentinels and no probes.
    let folder = Folder::read(&sampled.dir);
    let phases: BTreeSet<&str> = folder.points.iter().map(|point| point.phase.as_str()).collect();
    assert_eq!(phases, ["blocks", "confirm"].into());
    assert!(folder.points.iter().all(|point| !point.sentinel));
}

/// Neighbours that are slow across are lines, not a rectangle, on a machine so quiet that rests are clipped
/// to far less than they are slow by.
#[test]
fn slow_neighbours_are_all_found_and_predicted() {
    let place = Place::with_machine(&format!(
        "{NODE}[all_gather]\nnoise = 0.001\nlatency_us = 20\ncore_spread = 0.002\n{}",
        fault("slow_rank1_core", "rank1 = \"200-207\"\nfactor = 0.88"),
    ));
    let sampled = Sampled::run(&place, "out", "core-pair --sample");
    let wanted =
        [("slow_rank1_core", [Vec::new(), Vec::new(), Vec::new(), range(200, 207), Vec::new()])];
    assert_eq!(sampled.faults(), wanted.map(|(kind, members)| (kind.to_owned(), members)).into());
    let bytes = 8.0 * MIB as f64;
    assert_near(&sampled.map("core-pair-8MiB").predictions(), |_, rank1| {
        let factor = if (200..208).contains(&rank1) { 0.88 } else { 1.0 };
        bytes / (20e3 + bytes / (46.0 * factor))
    });
}

#[test]
fn faults_of_pairs_are_found_within_the_budget() {
    let place = Place::with_machine(
        &[
            NODE,
            &fault("slow_rank0_core", "rank0 = \"101,333,500\"\nfactor = 0.7"),
            &fault("same_core", "factor = 0.6"),
            &fault("slow_block", "rank0 = \"160-239\"\nrank1 = \"400-479\"\nfactor = 0.75"),
        ]
        .concat(),
    );
    let sampled = Sampled::run(&place, "out", "core-pair --sample");
    assert_eq!(sampled.code, Some(1), "{}", sampled.result);
    let none = Vec::new;
    let wanted = [
        ("same_core", [none(), none(), none(), none(), none()]),
        ("slow_block", [none(), none(), range(160, 239), range(400, 479), none()]),
        ("slow_rank0_core", [none(), none(), vec![101, 333, 500], none(), none()]),
    ];
    assert_eq!(sampled.faults(), wanted.map(|(kind, members)| (kind.to_owned(), members)).into());
    assert_eq!(sampled.findings().len(), 3, "no artefacts: {}", sampled.result);
    assert!(sampled.wall_ns() <= 8 * SECOND, "{}", sampled.wall_ns());
    assert!(
        pair_points(&sampled.dir).iter().all(|point| !point.sentinel && point.phase != "probe")
    );

    // Noise-free times: 180 us, and the bytes at 46 GB/s by the factors of the scenario.
    let bytes = 8.0 * MIB as f64;
    let rate = |rank0: u32, rank1: u32| {
        let mut factor = if [101, 333, 500].contains(&rank0) { 0.7 } else { 1.0 };
        factor *= if rank0 == rank1 { 0.6 } else { 1.0 };
        let is_in_block = (160..240).contains(&rank0) && (400..480).contains(&rank1);
        factor *= if is_in_block { 0.75 } else { 1.0 };
        bytes / (180e3 + bytes / (46.0 * factor))
    };
    let predictions = sampled.map("core-pair-8MiB").predictions();
    assert!(predictions.len() > 400_000, "{}", predictions.len());
    assert_near(&predictions, rate);
}

/// At least 99 % of the predictions are within 5 % of these rates.
fn assert_near(predictions: &[(u32, u32, f64, f64)], rate: impl Fn(u32, u32) -> f64) {
    let far = predictions
        .iter()
        .filter(|(row, column, predicted, _)| !close(*predicted, rate(*row, *column), 0.05))
        .count();
    assert!(100 * far <= predictions.len(), "{far} of {}", predictions.len());
}

#[test]
fn a_budget_is_kept() {
    let place = Place::with_machine(
        &[NODE, &fault("slow_device", "devices = \"5\"\nfactor = 0.8")].concat(),
    );
    let sampled = Sampled::run(&place, "out", "h2d --budget 5s");
    let wanted = ("slow_device".to_owned(), [vec![], vec![5], vec![], vec![], vec![]]);
    assert_eq!(sampled.faults(), [wanted].into());
    assert!(sampled.wall_ns() <= 5 * SECOND, "{}", sampled.wall_ns());
    // It is there to be used.
    assert!(sampled.wall_ns() > 2 * SECOND, "{}", sampled.wall_ns());

    // A small part is measured, the rest is predicted, and what is predicted is in no count.
    let run = json(&sampled.dir.join("run.json"));
    let rows = run["summary"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for (row, mib) in rows.iter().zip([16, 64, 256]) {
        let map = sampled.map(&format!("h2d-{mib}MiB"));
        let measured = map.measured.measured();
        assert!((16..5_000).contains(&measured), "{measured}");
        assert_eq!(map.predictions().len(), 10_240 - measured);
        assert_eq!(row["count"], measured);
    }
    let all = names(&sampled.dir);
    for end in ["predicted.csv", "predicted.npy", "error.csv", "error.npy"] {
        assert!(all.contains(&format!("h2d-64MiB-{end}")), "{all:?}");
    }
    let brief = Sampled::run(
        &place,
        "brief",
        "core-pair --rank0-cpus 0-159 --rank1-cpus 0-159 --budget 2s",
    );
    brief.assert_healthy("pairs know no device");
    assert!(brief.wall_ns() <= 2 * SECOND, "{}", brief.wall_ns());
}

#[test]
fn a_slow_device_is_predicted_to_be_slow() {
    for noise in [0.005, 0.015, 0.03] {
        let place = Place::with_machine(&format!(
            "{NODE}[h2d]\nnoise = {noise}\n{}",
            fault("slow_device", "devices = \"5\"\nfactor = 0.8")
        ));
        let sampled = Sampled::run(&place, "out", "h2d --budget 5s");
        assert_eq!(sampled.findings().len(), 1, "{}", sampled.result);
        for mib in [16, 64] {
            let bytes = (mib * MIB) as f64;
            assert_near(&sampled.map(&format!("h2d-{mib}MiB")).predictions(), |_, device| {
                bytes / (12e3 + bytes / if device == 5 { 58.5 * 0.8 } else { 58.5 })
            });
        }
    }
}

#[test]
fn even_copies_are_healthy() {
    for seed in 1..=4 {
        let place = Place::with_machine(&format!("seed = {seed}\n{NODE}"));
        let sweep = format!("h2d --budget 6s --seed {seed}");
        Sampled::run(&place, "out", &sweep).assert_healthy(&sweep);
    }
}

#[test]
fn even_pairs_are_healthy() {
    let cpus = "--rank0-cpus 0-99 --rank1-cpus 60-159";
    for seed in 1..=3 {
        let place = Place::with_machine(&format!("seed = {seed}\n{NODE}"));
        let sweep = format!("core-pair --budget 5s {cpus} --seed {seed}");
        let sampled = Sampled::run(&place, "out", &sweep);
        sampled.assert_healthy(&sweep);
        // Nothing was suspected.
        assert!(lines(&sampled.dir).iter().all(|line| line["phase"] == "blocks"));
    }
}

/// The share of predictions whose interval has the rate of a visit in another run.
fn covered(predictions: &[(u32, u32, f64, f64)], again: &Csv) -> f64 {
    let visits = predictions.iter().filter_map(|(row, column, predicted, error)| {
        let has = |ids: &[u32], id| ids.contains(id);
        (has(&again.rows, row) && has(&again.columns, column))
            .then(|| close(again.at(*row, *column).unwrap(), *predicted, *error))
    });
    let visits: Vec<bool> = visits.collect();
    assert!(visits.len() > 1000, "{}", visits.len());
    visits.iter().filter(|inside| **inside).count() as f64 / visits.len() as f64
}

/// Cores and devices that differ, and one visit of each cell in a run of its own: what the error is
/// said to be for.
#[test]
fn intervals_of_predictions_hold_a_further_visit() {
    let place = Place::with_machine(&format!(
        "seed = 3\n{NODE}[h2d]\ncore_spread = 0.008\ndevice_spread = 0.005\n\
         [all_gather]\ncore_spread = 0.008\n"
    ));
    let sampled = Sampled::run(&place, "h2d", "h2d --budget 5s --sizes 16MiB");
    let whole = "h2d --sizes 16MiB --repeats 1 --seed 99 --cpus 0-159";
    let whole = Sampled::run(&place, "whole", whole);
    let again = Csv::read(&whole.dir.join("h2d-16MiB.csv"));
    let share = covered(&sampled.map("h2d-16MiB").predictions(), &again);
    assert!((0.9..0.995).contains(&share), "copies: {share}");

    let cpus = "--rank0-cpus 0-99 --rank1-cpus 100-199";
    let sampled = Sampled::run(&place, "pairs", &format!("core-pair --budget 4s {cpus}"));
    let cpus = "--rank0-cpus 0-49 --rank1-cpus 100-149";
    let whole = format!("core-pair --repeats 1 --seed 99 {cpus}");
    let again = Csv::read(&Sampled::run(&place, "again", &whole).dir.join("core-pair-8MiB.csv"));
    let share = covered(&sampled.map("core-pair-8MiB").predictions(), &again);
    assert!((0.9..0.995).contains(&share), "pairs: {share}");
}

#[test]
fn what_was_not_visited_is_no_finding() {
    let place = Place::with_machine(NODE);
    let healthy = Sampled::run(&place, "healthy", "h2d --budget 3s");
    healthy.assert_healthy("nothing planted");
    let visited: BTreeSet<(u32, u32)> =
        Folder::read(&healthy.dir).points.iter().map(|point| (point.cpu, point.device)).collect();
    let cells = (0..640).flat_map(|cpu| (0..16).map(move |device| (cpu, device)));
    let (cpu, device) = cells.skip(5_000).find(|cell| !visited.contains(cell)).unwrap();

    let cell = format!("cpus = \"{cpu}\"\ndevices = \"{device}\"\nfactor = 0.3");
    fs::write(place.path("machine.toml"), format!("{NODE}{}", fault("slow_cell", &cell))).unwrap();
    let sampled = Sampled::run(&place, "out", "h2d --budget 3s");
    sampled.assert_healthy("one cell that no visit met");
    let log = |dir: &Path| fs::read(dir.join("samples.jsonl")).unwrap();
    assert!(log(&sampled.dir) == log(&healthy.dir), "the cell was not visited");
    // It is predicted as fast as all others, and nobody says that such a cell would have shown.
    let predictions = sampled.map("h2d-16MiB").predictions();
    let of_cell = predictions.iter().find(|(row, column, ..)| (*row, *column) == (cpu, device));
    assert!(close(of_cell.unwrap().2, 56.06, 0.05), "{of_cell:?}");
    let tested = sampled.result["tested"].to_string();
    assert!(tested.contains("single cpu") && !tested.contains("single cells"), "{tested}");
}

/// Points without what an interruption changes: the time, and the bind where the run went on.
fn comparable(dir: &Path, went_on_at: usize) -> Vec<Value> {
    let mut points = lines(dir);
    for (at, point) in points.iter_mut().enumerate() {
        point["t_ns"] = 0.into();
        if at == went_on_at {
            point["bind_ns"] = 0.into();
        }
    }
    points
}

/// Exact warm-ups, as one that settles may differ where the CPU was just bound again.
fn assert_goes_on(sweep: &str, fault: &str) {
    let place = Place::with_machine(&format!("{SMALL_NODE}{fault}"));
    let whole = Sampled::run(&place, "whole", sweep);
    assert_eq!(whole.faults().len(), 1, "{}", whole.result);
    let text = fs::read_to_string(whole.dir.join("samples.jsonl")).unwrap();
    let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at + 1).collect();
    let phases: Vec<Value> = lines(&whole.dir).iter().map(|line| line["phase"].clone()).collect();
    let confirming = phases.iter().position(|phase| phase == "confirm").unwrap();
    let mut running = json(&whole.dir.join("run.json"));
    running["status"] = "interrupted".into();
    // In the pilot, in the base, when cells are chosen by what is known, and in the confirmation.
    for kept in [5, confirming / 3, confirming - 3, ends.len() - 2] {
        let out = place.path("out");
        fs::create_dir_all(&out).unwrap();
        fs::write(out.join("samples.jsonl"), &text[..ends[kept - 1]]).unwrap();
        fs::write(out.join("run.json"), running.to_string()).unwrap();
        let resumed = Sampled::run(&place, "out", &format!("{sweep} --resume"));
        assert!(comparable(&resumed.dir, kept) == comparable(&whole.dir, kept), "{kept}");
        assert_eq!((resumed.code, resumed.faults()), (whole.code, whole.faults()));
        assert_eq!(resumed.result["summary"], whole.result["summary"]);
        let run = json(&out.join("run.json"));
        assert_eq!((&run["status"], &run["points"]), (&"complete".into(), &running["points"]));
        assert_eq!(names(&out), names(&whole.dir));
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn an_interrupted_sample_of_copies_goes_on_to_the_same_end() {
    let sweep = "h2d --budget 3s --sizes 16MiB,64MiB --warmup 1";
    assert_goes_on(sweep, &fault("slow_core", "cpus = \"9\"\nfactor = 0.7"));
}

#[test]
fn an_interrupted_sample_of_pairs_goes_on_to_the_same_end() {
    let sweep = "core-pair --budget 2s --warmup 1";
    assert_goes_on(sweep, &fault("slow_rank0_core", "rank0 = \"9\"\nfactor = 0.6"));
}

#[test]
fn a_small_machine_is_measured_in_full() {
    let place = Place::with_machine("[machine]\ncpus = 4\ndevices = 2\n");
    let sampled = Sampled::run(&place, "out", "h2d --sample");
    sampled.assert_healthy("4 CPUs and 2 devices");
    for stem in ["h2d-16MiB", "h2d-64MiB", "h2d-256MiB"] {
        let map = sampled.map(stem);
        assert_eq!((map.measured.measured(), map.predictions().len()), (8, 0), "{stem}");
    }
    let sampled = Sampled::run(&place, "pairs", "core-pair --sample");
    let map = sampled.map("core-pair-8MiB");
    assert_eq!((map.measured.measured(), map.predictions().len()), (16, 0));
}

#[test]
fn a_target_that_is_met_ends_the_sweep() {
    let place = Place::with_machine(&format!("{NODE}[h2d]\nnoise = 0.002\n"));
    let [free, ended] = ["h2d --sample", "h2d --target 2%"].map(|sweep| {
        let sampled =
            Sampled::run(&place, sweep.rsplit(' ').next().unwrap().trim_matches('-'), sweep);
        sampled.assert_healthy(sweep);
        sampled.wall_ns()
    });
    assert!(2 * ended < free, "{ended} of {free} ns");
}

#[test]
fn what_cannot_be_sampled_is_named_and_creates_nothing() {
    let place = Place::with_machine(NODE);
    for (options, parts) in [
        ("--budget 0s", ["--budget", "above 0"]),
        ("--budget 5ms", ["--budget", "at least 10ms"]),
        ("--budget 5d", ["--budget", "unit"]),
        ("--budget=-1s", ["--budget", "-1s"]),
        ("--target 0", ["--target", "between 0 and 1"]),
        ("--target 2", ["--target", "between 0 and 1"]),
        ("--target soon", ["--target", "'soon'"]),
        ("--sample --order sequential", ["--sample", "--order sequential"]),
        ("--sample --ci 2%", ["--ci", "--target"]),
        ("--budget 5s --ci 2%", ["--ci", "--target"]),
        ("--sample --load idle,cpu:1", ["--sample", "--load"]),
    ] {
        for command in ["h2d", "core-pair", "all"] {
            let line =
                format!("{command} --backend synthetic:@machine.toml --out @out --json {options}");
            let ran = place.run(&line);
            assert_eq!(ran.code, Some(2), "{line}: {ran:?}");
            for part in parts {
                assert!(ran.stderr.contains(part), "{line}: no '{part}' in: {}", ran.stderr);
            }
            assert!(ran.json()["error"]["message"].as_str().unwrap().contains(parts[0]), "{line}");
            assert!(!place.path("out").exists(), "{line}");
        }
    }
}
