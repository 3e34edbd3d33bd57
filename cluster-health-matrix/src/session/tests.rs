//! Runs of two sweeps, and of pairs alone, as result folders.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use cluster_health_core::{ByteSize, Scenario};

use super::*;
use crate::older::import::{SourceFormat, read};
use crate::plan::CorePairPlanBuilder;
use crate::samples::{Phase, Sweep};

const MACHINE: &str = "[machine]\ncpus = 8\nsmt = 2\nnuma_nodes = 2\ndevices = 3\n";

fn machine(more: &str) -> Machine {
    Machine::synthetic(Scenario::parse(&format!("{MACHINE}{more}"), "test").unwrap()).unwrap()
}

fn pairs() -> CorePairPlanBuilder {
    CorePairPlan::builder().repeats(2)
}

/// 2 blocks of 8 × 3 copies and 8 probes, then 2 blocks of 8 × 8 pairs and 8 probes, and sentinels.
fn both(machine: &Machine) -> PlanRecord {
    let h2d = H2dPlan::builder().repeats(2).sizes([ByteSize::mib(1)]).build(machine).unwrap();
    PlanRecord::of_h2d(h2d).with_core_pair(Some(pairs().build(machine).unwrap()))
}

/// Asks for the end after so many samples.
struct Stop(usize);

impl Observer for Stop {
    fn sample(&mut self, _: &Sample) -> Result<()> {
        self.0 -= 1;
        Ok(())
    }

    fn is_cancelled(&self) -> bool {
        self.0 == 0
    }
}

/// A synthetic machine has both ranks in itself.
fn no_group() -> Result<Arc<RankGroup>> {
    Err(Error::invalid("ranks", "nobody should ask for them"))
}

fn run(plan: &PlanRecord, more: &str, dir: &Path, observer: &mut dyn Observer) -> Result<Report> {
    let options = RecordOptions::default().with_mode(OpenMode::Resume);
    let notes = vec!["a note".to_owned()];
    record("all", &machine(more), plan, &mut no_group, notes, dir, &options, observer)
}

fn samples(dir: &Path) -> Vec<Sample> {
    SampleReader::open(dir).unwrap().collect::<Result<_>>().unwrap()
}

fn count(samples: &[Sample], sweep: Sweep) -> usize {
    samples.iter().filter(|sample| sample.sweep == sweep).count()
}

/// Where, what and how often, without the times of an interrupted machine.
fn places(samples: &[Sample]) -> Vec<impl PartialEq + std::fmt::Debug + use<>> {
    samples.iter().map(|s| (s.seq, s.sweep, s.cell(), s.bytes, s.block, s.sentinel)).collect()
}

#[test]
fn one_folder_holds_both_sweeps() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("out");
    let plan = both(&machine(""));
    let report = run(&plan, "", &dir, &mut ()).unwrap();
    let manifest = &report.manifest;
    assert_eq!((manifest.status, manifest.command.as_str()), (RunStatus::Complete, "all"));
    assert_eq!((manifest.seed, manifest.order.as_str()), (1, "blocks"));
    assert_eq!(manifest.notes, ["a note"]);
    assert_eq!(manifest.plan, plan);
    let rows: Vec<_> = manifest
        .summary
        .iter()
        .map(|row| (row.sweep, row.rate.as_str(), row.memory.as_str(), row.count))
        .collect();
    assert_eq!(
        rows,
        [(Sweep::H2d, "h2d", "page_locked", 24), (Sweep::CorePair, "per_rank", "device", 64)]
    );

    let samples = samples(&dir);
    assert!((0..).zip(&samples).all(|(seq, sample)| sample.seq == seq));
    assert!(samples.windows(2).all(|pair| pair[0].t_ns.unwrap() < pair[1].t_ns.unwrap()));
    assert_eq!(samples[0].t_ns, Some(0));
    let of_pairs = samples.iter().position(|sample| sample.sweep == Sweep::CorePair).unwrap();
    assert!(samples[of_pairs..].iter().all(|sample| sample.sweep == Sweep::CorePair));
    // 8 × 3 + 8 and 8 × 8 + 8 points a block, and a sentinel after 48 to 80.
    let planned = |part: &[Sample]| part.iter().filter(|s| s.phase != Phase::Confirm).count();
    let (copies, gathers) = samples.split_at(of_pairs);
    assert!((64..=65).contains(&planned(copies)), "{}", planned(copies));
    assert!((145..=147).contains(&planned(gathers)), "{}", planned(gathers));
    for part in [copies, gathers] {
        assert!(part.is_sorted_by_key(|s| s.phase == Phase::Confirm), "what confirms comes last");
    }

    // From each sweep's first point to the end of its last.
    let end = |sample: &Sample| {
        let spent: u64 = sample.warmup_ns.iter().chain(&sample.iter_ns).sum();
        sample.t_ns.unwrap() + spent + sample.bind_ns + 5_000
    };
    let wall = |part: &[Sample]| end(&part[part.len() - 1]) - part[0].t_ns.unwrap();
    assert_eq!(manifest.wall_ns, wall(&samples[..of_pairs]) + wall(&samples[of_pairs..]));
    assert_eq!(manifest.timings.wall_ns, manifest.wall_ns);

    for name in ["h2d-1MiB", "core-pair-8MiB"] {
        for extension in ["csv", "npy", "png"] {
            assert!(dir.join(format!("{name}.{extension}")).exists(), "{name}.{extension}");
        }
    }
    let csv = fs::read_to_string(dir.join("core-pair-8MiB.csv")).unwrap();
    assert!(csv.starts_with("rank0\\rank1,0,1,2,3,4,5,6,7\n0,"), "{csv}");
    let text = fs::read_to_string(dir.join("report.md")).unwrap();
    assert!(text.contains("## h2d-1MiB") && text.contains("## core-pair-8MiB"), "{text}");

    // Nothing is left to do; and other pairs are another run.
    run(&plan, "", &dir, &mut Stop(1)).unwrap();
    let other = plan.clone().with_core_pair(Some(pairs().iters(7).build(&machine("")).unwrap()));
    let error = run(&other, "", &dir, &mut ()).unwrap_err().to_string();
    assert!(error.contains("plan.core_pair.iters: 3 then, 7 now"), "{error}");
}

#[test]
fn a_run_goes_on_across_the_sweeps() {
    let folder = tempfile::tempdir().unwrap();
    let plan = both(&machine(""));
    let whole = folder.path().join("whole");
    run(&plan, "", &whole, &mut ()).unwrap();
    let whole = samples(&whole);
    let of_pairs = count(&whole, Sweep::H2d);
    for stop in [10, of_pairs - 1, of_pairs, of_pairs + 1, whole.len() - 1] {
        let dir = folder.path().join(stop.to_string());
        let report = run(&plan, "", &dir, &mut Stop(stop)).unwrap();
        assert_eq!(report.manifest.status, RunStatus::Interrupted);
        assert_eq!(samples(&dir).len(), stop);
        let report = run(&plan, "", &dir, &mut ()).unwrap();
        assert_eq!(report.manifest.status, RunStatus::Complete);
        assert_eq!(report.manifest.segments.len(), 2);
        assert_eq!(report.manifest.segments[1].first_seq, stop as u64);
        let found = samples(&dir);
        assert_eq!(places(&found), places(&whole), "{stop}");
        assert!(found.windows(2).all(|pair| pair[0].t_ns.unwrap() < pair[1].t_ns.unwrap()));
        let walls: u64 = report.manifest.segments.iter().map(|segment| segment.wall_ns).sum();
        assert_eq!(report.manifest.wall_ns, walls);
        if stop >= of_pairs {
            // The H2D sweep was not set up a second time: 2 buffers of 1 MiB on each of 2 nodes and
            // 3 devices' buffers were allocated once.
            let once = run(&plan, "", &folder.path().join("whole"), &mut ()).unwrap();
            assert_eq!(report.manifest.timings.setup_ns, once.manifest.timings.setup_ns);
        }
    }
}

#[test]
fn a_log_that_does_not_fit_the_plan_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let plan = both(&machine(""));
    run(&plan, "", folder.path(), &mut Stop(30)).unwrap();
    let log = folder.path().join("samples.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    // A pair where copies are still missing.
    let line = r#"{"seq":30,"t_ns":1,"sweep":"core_pair","load":"idle","block":0,"rank0_cpu":0,"rank1_cpu":1,"device_pair":[0,1],"bytes":8388608,"status":"measured","reason":null,"iter_ns":[1],"host_iter_ns":null,"timer":"host","pinned":null,"page_nodes":null,"ran_on":[[0],[1]],"phase":"blocks","arena":null,"check":"ok"}"#;
    fs::write(&log, format!("{text}{line}\n")).unwrap();
    let error = run(&plan, "", folder.path(), &mut ()).unwrap_err().to_string();
    assert!(error.contains("goes on with point 31, not 30"), "{error}");
}

#[test]
fn a_lost_rank_leaves_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let failure = "[[failure]]\nkind = \"rank_dead\"\nrank = 1\nat_point = 100\n";
    let plan = PlanRecord::of_core_pair(pairs().build(&machine(failure)).unwrap());
    let error = run(&plan, failure, dir, &mut ()).unwrap_err();
    assert!(error.to_string().contains("rank 1"), "{error}");
    assert_eq!(samples(dir).len(), 100);
    let manifest = Manifest::read(dir).unwrap();
    assert_eq!(manifest.status, RunStatus::Interrupted);
    assert_eq!(manifest.points.measured, 100);
    assert!(dir.join("core-pair-8MiB.csv").exists() && dir.join("report.md").exists());
}

#[test]
fn pairs_are_shown_by_what_their_cpus_share() {
    let folder = tempfile::tempdir().unwrap();
    let quiet = "[all_gather]\nnoise = 0\nlatency_us = 0\ngbps = 20\n\
                 [[fault]]\nkind = \"same_core\"\nfactor = 0.5\n\
                 [[fault]]\nkind = \"smt_sibling\"\nfactor = 0.8\n\
                 [[fault]]\nkind = \"slow_rank1_core\"\nrank1 = \"4-7\"\nfactor = 0.9\n";
    let machine = machine(quiet);
    let plan = pairs().device_pair([2, 0]).build(&machine).unwrap();
    let options = RecordOptions::default();
    let report = record_core_pair(
        "core-pair",
        &machine,
        &plan,
        &mut no_group,
        folder.path(),
        &options,
        &mut (),
    )
    .unwrap();
    assert_eq!(report.manifest.plan.core_pair.as_ref(), Some(&plan));
    let text = fs::read_to_string(folder.path().join("report.md")).unwrap();
    // Half of the CPUs are 10 % slower as rank 1, so that the median of any group is 0.95 of its
    // rate: 8 pairs on one CPU, 8 of siblings, 48 others.
    for line in [
        "| one CPU (the diagonal) | 8 | 9.500 | 0.500 |",
        "| SMT siblings of one core | 8 | 15.200 | 0.800 |",
        "| other pairs | 48 | 19.000 | 1.000 |",
        "| NUMA node of the rank-1 cpu | cells | median |",
        "Rank 0 on device 2, rank 1 on device 0.",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let nodes = text.split("| NUMA node of the rank-1 cpu").nth(1).unwrap();
    assert!(nodes.contains("| 0 | 32 | 20.000 |\n| 1 | 32 | 18.000 |"), "{nodes}");
}

#[test]
fn the_recorded_pair_matrix_makes_a_whole_folder() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data");
    let packed = data.join("a3-182-allgather-pair05-8MB-clean-20260707.csv.xz");
    let xz = Command::new("xz").arg("-dc").arg(&packed).output();
    let (true, Ok(output)) = (packed.exists(), xz) else {
        println!("skipped: no recorded data");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("pair05-8MB.csv");
    fs::write(&path, output.stdout).unwrap();
    let mut request = ImportRequest::new(SourceFormat::Csv, Sweep::CorePair, vec![path]);
    request.affinity = Some(data.join("a3-182-h2d-clean-20260707-affinity.csv"));
    let imported = read(&request).unwrap();
    let dir = folder.path().join("out");
    let options = ReportOptions::default();
    let report = record_import(&request, imported, &dir, OpenMode::New, &options).unwrap();
    let [row] = &report.manifest.summary[..] else { panic!("{:?}", report.manifest.summary) };
    assert_eq!((row.sweep, row.rate.as_str(), row.count), (Sweep::CorePair, "per_rank", 409_600));
    // Published: 0.196 13.000 13.714 14.409 15.967; numpy finds these in the recovered file.
    let found = [row.min, row.p10, row.median, row.p90, row.max].map(|rate| format!("{rate:.3}"));
    assert_eq!(found, ["0.196", "12.998", "13.714", "14.409", "15.967"]);
    let text = fs::read_to_string(dir.join("report.md")).unwrap();
    // The recording's own account: both ranks on one core × 0.61, siblings × 0.93.
    for line in ["| one CPU (the diagonal) | 640 | 8.452 |", "| SMT siblings of one core | 640 |"] {
        assert!(text.contains(line), "{line}");
    }
}

#[test]
fn loads_of_both_sweeps_are_recorded_and_added_up_across_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    let machine_ = machine("");
    let loads = || ["idle", "cpu:1"].map(|name| name.parse().unwrap());
    let h2d = H2dPlan::builder().repeats(2).sizes([ByteSize::mib(1)]).loads(loads());
    let h2d = h2d.build(&machine_).unwrap();
    let plan = PlanRecord::of_h2d(h2d)
        .with_core_pair(Some(pairs().rank0_cpus([0, 2]).loads(loads()).build(&machine_).unwrap()));
    run(&plan, "", dir.path(), &mut Stop(37)).unwrap();
    let report = run(&plan, "", dir.path(), &mut ()).unwrap();
    let found: Vec<_> = report
        .manifest
        .load_profiles
        .iter()
        .map(|record| (record.sweep, record.load.name.as_str(), record.load.rank))
        .collect();
    let expected = [
        (Sweep::H2d, "idle", 0),
        (Sweep::H2d, "cpu:1", 0),
        (Sweep::CorePair, "idle", 0),
        (Sweep::CorePair, "cpu:1", 0),
        (Sweep::CorePair, "idle", 1),
        (Sweep::CorePair, "cpu:1", 1),
    ];
    assert_eq!(found, expected);
    for record in &report.manifest.load_profiles {
        assert_eq!(record.load.cpus.is_empty(), record.load.name == "idle", "{record:?}");
        assert_eq!(record.load.utilisation, None, "nothing burns in virtual time");
    }
    let whole = tempfile::tempdir().unwrap();
    run(&plan, "", whole.path(), &mut ()).unwrap();
    // The order is that of a run in one go.
    let order = |dir: &Path| -> Vec<_> {
        let copies = samples(dir).into_iter().filter(|sample| sample.sweep == Sweep::H2d);
        let planned = copies.filter(|sample| sample.phase != Phase::Confirm);
        planned.map(|sample| (sample.seq, sample.load.clone(), sample.cell())).collect()
    };
    assert!(order(dir.path()) == order(whole.path()));
}

fn load_record(name: &str, rank: u32, burners: u32) -> LoadProfileRecord {
    serde_json::from_value(serde_json::json!({
        "sweep": "core_pair", "name": name, "kind": "both", "rank": rank, "burners": burners,
        "cpus": [1], "active_ns": 100, "busy_ns": 43, "utilisation": 0.43, "flops": 1, "bytes": 1,
        "starts": 1, "longest_switch_ns": 0, "weak_points": 0, "weak_seqs": [],
    }))
    .unwrap()
}

/// A container with half a CPU of time, whatever CPUs it may run on.
#[test]
fn f9_a_quota_that_throttles_the_load_is_named() {
    let mut manifest = Manifest::empty("test", PlanRecord::default(), "blocks".to_owned());
    manifest.load_profiles = [0, 1].map(|rank| load_record("cpu:2", rank, 2)).into();
    assert!(load_notes(&manifest).is_empty(), "without a quota");
    manifest.environment.cpu_quota = Some(6.0);
    assert!(load_notes(&manifest).is_empty(), "4 burners and 2 ranks fit into 6 CPUs");
    manifest.environment.cpu_quota = Some(0.5);
    let notes = load_notes(&manifest);
    assert_eq!(notes.len(), 1);
    for part in ["grants 0.5 CPUs", "4 burners", "2 measuring threads need 6", "throttled"] {
        assert!(notes[0].contains(part), "{part}: {notes:?}");
    }
}

#[test]
fn points_without_their_whole_load_are_named() {
    let mut manifest = Manifest::empty("test", PlanRecord::default(), "blocks".to_owned());
    let mut record = load_record("cpu:2", 1, 2);
    (record.load.weak_points, record.load.weak_seqs) = (7, (10..17).collect());
    manifest.load_profiles = vec![record, load_record("device", 1, 1)];
    let notes = load_notes(&manifest);
    assert_eq!(notes.len(), 1);
    for part in
        ["beside 7 points", "cpu:2 (rank 1)", "90 %", "seq 10, 11, 12, 13, 14, …;", "43.0 %"]
    {
        assert!(notes[0].contains(part), "{part}: {notes:?}");
    }
}
