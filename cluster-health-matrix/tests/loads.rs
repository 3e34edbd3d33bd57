//! Sweeps under load: what they record, what they find, and that nothing of a load stays behind.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster_health_core::load::LoadProfile;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{ByteSize, Machine, Scenario};
use cluster_health_matrix::analysis::{Diagnosis, Finding, Kind, Verdict};
use cluster_health_matrix::plan::{CorePairPlan, H2dPlan};
use cluster_health_matrix::run::PlanRecord;
use cluster_health_matrix::samples::Sample;
use cluster_health_matrix::session::{RecordOptions, record};
use cluster_health_matrix::{Error, Observer, Result, sweep};

fn profiles(names: &[&str]) -> Vec<LoadProfile> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn machine(text: &str) -> Machine {
    Machine::synthetic(Scenario::parse(text, "test").unwrap()).unwrap()
}

/// 32 CPUs, 8 devices, with the healthy differences that machines have.
fn node(more: &str) -> Machine {
    machine(&format!(
        "[machine]\ncpus = 32\nsmt = 2\nnuma_nodes = 4\ndevices = 8\n\
         [h2d]\ngbps = 50\ncore_spread = 0.004\ndevice_spread = 0.004\nvisit_noise = 0.003\n\
         [all_gather]\nnoise = 0.015\nlatency_us = 10\n{more}"
    ))
}

fn no_ranks() -> Result<Arc<RankGroup>> {
    Err(Error::invalid("ranks", "a synthetic machine needs none"))
}

/// Measures and judges.
fn diagnosis(machine: &Machine, plan: &PlanRecord) -> Diagnosis {
    let folder = tempfile::tempdir().unwrap();
    let options = RecordOptions::default();
    record("test", machine, plan, &mut no_ranks, Vec::new(), folder.path(), &options, &mut ())
        .unwrap()
        .diagnosis
}

fn h2d(machine: &Machine, loads: &[&str]) -> PlanRecord {
    let sizes = [16, 64].map(ByteSize::mib);
    let plan = H2dPlan::builder().sizes(sizes).loads(profiles(loads)).build(machine).unwrap();
    PlanRecord::of_h2d(plan)
}

/// The only finding, which must be of a load.
fn only(diagnosis: &Diagnosis) -> &Finding {
    assert_eq!(diagnosis.verdict, Verdict::Findings);
    let [finding] = diagnosis.findings.as_slice() else { panic!("{diagnosis:#?}") };
    assert_eq!(finding.kind, Kind::LoadSensitive);
    finding
}

#[test]
fn a_device_that_a_load_slows_down_by_5_per_cent_is_found_with_the_load() {
    let machine = node(
        "[[fault]]\nkind = \"load_sensitive\"\nsweep = \"h2d\"\ndevices = \"3\"\nfactor = 0.95\n\
         load = \"cpu:2\"\n",
    );
    let diagnosis = diagnosis(&machine, &h2d(&machine, &["idle", "cpu:2", "device"]));
    let finding = only(&diagnosis);
    assert_eq!((finding.load.as_deref(), finding.devices.as_slice()), (Some("cpu:2"), &[3][..]));
    assert!(finding.cpus.is_empty());
    let effect = finding.effect.unwrap();
    assert!(effect.low < 0.95 && 0.95 < effect.high, "{effect:?}");
    assert!((effect.ratio - 0.95).abs() < 0.01, "{effect:?}");
    assert_eq!(finding.scales_with_bytes, Some(true));
}

#[test]
fn a_core_that_a_load_slows_down_is_found_although_another_fault_is_always_there() {
    let machine = node(
        "[[fault]]\nkind = \"load_sensitive\"\nsweep = \"h2d\"\ncpus = \"12\"\nfactor = 0.92\n\
         load = \"device\"\n\
         [[fault]]\nkind = \"slow_device\"\ndevices = \"5\"\nfactor = 0.9\n",
    );
    let diagnosis = diagnosis(&machine, &h2d(&machine, &["idle", "device"]));
    let found: Vec<_> = diagnosis
        .findings
        .iter()
        .map(|f| (f.kind, f.load.as_deref().unwrap(), f.devices.as_slice(), f.cpus.as_slice()))
        .collect();
    // One cause is one finding, under however many loads it is seen.
    let device = (Kind::SlowDevice, "idle", &[5][..], &[][..]);
    let core = (Kind::LoadSensitive, "device", &[][..], &[12][..]);
    assert!(found.contains(&device) && found.contains(&core) && found.len() == 2, "{found:?}");
    let device = diagnosis.findings.iter().find(|f| f.kind == Kind::SlowDevice).unwrap();
    assert!(device.facts.iter().any(|fact| fact.starts_with("also under device")), "{device:?}");
}

#[test]
fn a_rank_0_core_of_pairs_that_a_load_slows_down_is_found() {
    let machine = node(
        "[[fault]]\nkind = \"load_sensitive\"\nsweep = \"core_pair\"\nrank0 = \"6\"\nfactor = 0.95\n",
    );
    let plan = CorePairPlan::builder().loads(profiles(&["idle", "cpu:4"])).build(&machine).unwrap();
    let diagnosis = diagnosis(&machine, &PlanRecord::of_core_pair(plan));
    let finding = only(&diagnosis);
    assert_eq!((finding.load.as_deref(), finding.rank0_cpus.as_slice()), (Some("cpu:4"), &[6][..]));
    assert!(finding.rank1_cpus.is_empty(), "{finding:?}");
    assert!((finding.effect.unwrap().ratio - 0.95).abs() < 0.015);
}

#[test]
fn what_a_load_costs_everything_is_no_fault() {
    let machine = node("[[fault]]\nkind = \"load_sensitive\"\nsweep = \"h2d\"\nfactor = 0.8\n");
    let diagnosis = diagnosis(&machine, &h2d(&machine, &["idle", "cpu:1"]));
    assert_eq!(diagnosis.verdict, Verdict::Healthy, "{:#?}", diagnosis.findings);
    let line = diagnosis.tested.iter().find(|line| line.contains("of the idle machine's rate"));
    assert!(line.unwrap().contains("h2d under cpu:1: × 0.8"), "{line:?}");
}

/// A fixed order of the profiles fails this. Rates fall by a tenth during the run: in whatever order the profiles come, neither may
/// seem faster.
#[test]
fn drift_makes_no_load_faster_than_the_idle_machine() {
    let mut outside = 0;
    for seed in 1..=50 {
        let machine = machine(&format!(
            "seed = {seed}\n[machine]\ncpus = 12\nsmt = 1\nnuma_nodes = 2\ndevices = 4\n\
             [h2d]\ngbps = 50\nnoise = 0.01\n[[artefact]]\nkind = \"drift\"\nper_hour = -300\n"
        ));
        let plan = H2dPlan::builder()
            .sizes([ByteSize::mib(64)])
            .seed(seed)
            .loads(profiles(&["idle", "cpu:1"]))
            .build(&machine)
            .unwrap();
        let diagnosis = diagnosis(&machine, &PlanRecord::of_h2d(plan));
        for finding in &diagnosis.findings {
            assert_ne!(finding.kind, Kind::LoadSensitive, "seed {seed}: {finding:?}");
            let faster = finding.effect.is_some_and(|effect| effect.ratio > 1.0);
            assert!(
                finding.load.as_deref() != Some("cpu:1") || !faster,
                "seed {seed}: {finding:?}"
            );
        }
        let line =
            diagnosis.tested.iter().find(|line| line.starts_with("h2d under cpu:1")).unwrap();
        let number = |before: &str| -> f64 {
            let rest = line.split(before).nth(1).unwrap();
            rest.split([' ', ')']).next().unwrap().parse().unwrap()
        };
        let (ratio, low, high) = (number("× "), number("interval "), number(" to "));
        assert!((ratio - 1.0).abs() < 0.005, "seed {seed}: {line}");
        outside += usize::from(!(low..=high).contains(&1.0));
    }
    // 95 % intervals: 2.5 of 50 on average; 9 or more have a probability of 0.1 %.
    assert!(outside < 9, "{outside} of 50");
}

#[test]
fn a_load_without_cpus_is_an_error_of_the_plan() {
    let machine = machine("[machine]\ncpus = 4\nsmt = 2\nnuma_nodes = 1\ndevices = 2\n");
    let cpus = |names: &[&str]| H2dPlan::builder().loads(profiles(names)).build(&machine);
    assert!(cpus(&["idle", "cpu:2"]).is_ok());
    let error = cpus(&["idle", "cpu:3"]).unwrap_err();
    assert!(error.is_usage());
    let text = error.to_string();
    assert!(text.starts_with("--load: load cpu:3") && text.contains("needs 3 CPUs"), "{text}");
    // Each rank of a pair has its own, and both their cores are measured.
    let pairs = |names: &[&str]| CorePairPlan::builder().loads(profiles(names)).build(&machine);
    assert!(pairs(&["cpu:1"]).unwrap_err().to_string().contains("0 can be bound"));
}

/// The ranks have the same points, but rank 1 is to burn on more CPUs than there are.
#[test]
fn a_rank_without_its_load_ends_both_with_the_reason() {
    let plan_of = |second: &str| {
        let machine = Machine::host().unwrap();
        let cpu = machine.census().unwrap().bindable()[0].0;
        let builder = CorePairPlan::builder().rank0_cpus([cpu]).rank1_cpus([cpu]);
        let mut plan = builder.sizes([ByteSize::kib(4)]).repeats(1).build(&machine).unwrap();
        // As no builder would allow it.
        plan.loads = profiles(&["idle", second]);
        plan
    };
    let plans = [plan_of("idle"), plan_of("cpu:4096")];
    let ranks = RankGroup::threads(2).unwrap().into_iter().zip(plans).map(|(group, plan)| {
        std::thread::spawn(move || {
            let machine = Machine::host().unwrap();
            sweep::core_pair(&machine, &plan, Some(&group), &mut ())
                .map(|_| ())
                .map_err(|error| (error.kind(), error.to_string()))
        })
    });
    let ended: Vec<_> =
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
    let [Err((kind0, text0)), Err((kind1, text1))] = ended.as_slice() else { panic!("{ended:?}") };
    assert_eq!((*kind0, *kind1), ("rank", "unavailable"));
    assert!(text1.starts_with("load cpu:4096 is not available: it needs"), "{text1}");
    assert_eq!(text0, &format!("rank 1: {text1}"));
}

/// Fails, panics or asks for the end at its `left`-th sample.
struct Ending {
    left: usize,
    how: How,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Never,
    Error,
    Panic,
    Cancel,
}

impl Observer for Ending {
    fn sample(&mut self, _: &Sample) -> Result<()> {
        self.left = self.left.saturating_sub(1);
        match self.how {
            How::Error if self.left == 0 => Err(Error::output("the log", "planted")),
            How::Panic if self.left == 0 => {
                explode();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn is_cancelled(&self) -> bool {
        self.how == How::Cancel && self.left == 0
    }
}

fn explode() {
    panic!("planted");
}

/// Burners of this process.
fn burners() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
        .filter(|name| name.starts_with("load "))
        .count()
}

#[test]
fn burners_burn_beside_a_live_sweep_and_end_with_it_however_it_ends() {
    let machine = Machine::host().unwrap();
    let cpus = machine.census().unwrap().bindable();
    let plan = H2dPlan::builder()
        .cpus([cpus[0].0])
        .sizes([ByteSize::mib(16)])
        .repeats(8)
        .loads(profiles(&["idle", "cpu:1", "device"]))
        .build(&machine);
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => return println!("skipped: {error}"),
    };
    for how in [How::Never, How::Error, How::Cancel, How::Panic] {
        let mut observer = Ending { left: 8, how };
        let result = catch_unwind(AssertUnwindSafe(|| sweep::h2d(&machine, &plan, &mut observer)));
        match how {
            How::Never => {
                let result = result.unwrap().unwrap();
                let names: Vec<&str> = result.loads.iter().map(|load| load.name.as_str()).collect();
                assert_eq!(names, ["idle", "cpu:1", "device"]);
                assert_eq!(result.loads[0].active_ns, 0);
                for load in &result.loads[1..] {
                    // How much CPU time others leave to it is not ours to say.
                    assert!(load.utilisation.unwrap() > 0.0, "{load:?}");
                    assert!(load.busy_ns > 0 && load.flops > 0 && load.bytes > 0, "{load:?}");
                    assert!(!load.cpus.is_empty() && !load.cpus.contains(&cpus[0]), "{load:?}");
                }
                for matrix in [&result.matrix].into_iter().chain(&result.under_loads) {
                    assert!(matrix.gbps.iter().all(|rate| *rate > 0.0), "{}", matrix.load);
                }
                assert_eq!(result.under_loads[1].load, "device");
            }
            How::Error => assert!(result.unwrap().unwrap_err().to_string().contains("planted")),
            How::Cancel => assert!(!result.unwrap().unwrap().end.complete),
            How::Panic => assert!(result.is_err()),
        }
        // The kernel may list a thread for a moment after it was joined.
        let began = Instant::now();
        while burners() > 0 {
            assert!(began.elapsed() < Duration::from_secs(5), "{how:?}: a burner is still there");
        }
    }
}
