//! The pair sweep with two live ranks that are threads of this process.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{ByteSize, CpuId, Machine};
use cluster_health_matrix::matrix::CellStatus;
use cluster_health_matrix::plan::{CorePairPlan, CorePairPlanBuilder};
use cluster_health_matrix::run::{OpenMode, RunStatus, SampleReader};
use cluster_health_matrix::samples::{DataCheck, PointStatus, RanOn, Sample};
use cluster_health_matrix::session::{RankZero, RecordOptions, dismiss, follow, record_core_pair};
use cluster_health_matrix::sweep::{self, CorePairMatrix};
use cluster_health_matrix::{Error, Observer, Result};

/// Long before any wait of a plan ends by its bound, also on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Up to two CPUs that can be bound.
fn cpus(machine: &Machine) -> Vec<u32> {
    let census = machine.census().unwrap();
    let bindable = census.cpus.iter().filter(|cpu| cpu.bindable == Some(true));
    bindable.map(|cpu| cpu.cpu.0).take(2).collect()
}

fn plan() -> CorePairPlanBuilder {
    let cpus = cpus(&Machine::host().unwrap());
    let sizes = [ByteSize(8), ByteSize(1000), ByteSize::kib(64)];
    CorePairPlan::builder().rank0_cpus(cpus.clone()).rank1_cpus(cpus).sizes(sizes)
}

fn build(builder: CorePairPlanBuilder) -> CorePairPlan {
    builder.build(&Machine::host().unwrap()).unwrap()
}

/// Keeps every sample; asks for the end, or fails, when it has so many.
#[derive(Debug, Default)]
struct Watcher {
    samples: Vec<Sample>,
    cancel_at: Option<usize>,
    fail_at: Option<usize>,
}

impl Observer for Watcher {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.samples.push(sample.clone());
        match self.fail_at {
            Some(count) if self.samples.len() >= count => Err(Error::output("a disk", "full")),
            _ => Ok(()),
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel_at.is_some_and(|count| self.samples.len() >= count)
    }
}

/// Runs a plan on two threads that watch; results in the order of ranks.
fn run(plan: &CorePairPlan, watchers: [Watcher; 2]) -> [(Result<CorePairMatrix>, Vec<Sample>); 2] {
    let ranks = RankGroup::threads(2).unwrap().into_iter().zip(watchers);
    let ranks: Vec<_> = ranks
        .map(|(group, mut watcher)| {
            let plan = plan.clone();
            thread::spawn(move || {
                let machine = Machine::host().unwrap();
                let result = sweep::core_pair(&machine, &plan, Some(&group), &mut watcher);
                (result, watcher.samples)
            })
        })
        .collect();
    let ended: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    ended.try_into().unwrap()
}

/// A sample without what each rank reads from its own clock.
fn shared(sample: &Sample) -> Sample {
    let mut sample = sample.clone();
    sample.t_ns = None;
    sample
}

fn assert_same(ranks: [&[Sample]; 2]) {
    let [first, second] = ranks.map(|samples| samples.iter().map(shared).collect::<Vec<_>>());
    assert_eq!(first, second);
}

fn assert_measured(sample: &Sample) {
    assert_eq!((sample.status, sample.check), (PointStatus::Measured, DataCheck::Ok));
    let cpus = [sample.rank0_cpu, sample.rank1_cpu].map(|cpu| vec![cpu.unwrap()]);
    assert_eq!(sample.ran_on, RanOn::Ranks(cpus.to_vec()));
    let ranks = sample.rank_ns.as_ref().unwrap();
    for (place, time) in sample.iter_ns.iter().enumerate() {
        assert_eq!(ranks.iter().map(|times| times[place]).max(), Some(*time));
    }
}

/// Cells that blocks visited, each with its number of visits.
fn visits(samples: &[Sample]) -> BTreeMap<u32, BTreeMap<(u64, u32, u32), u32>> {
    let mut blocks = BTreeMap::<_, BTreeMap<_, u32>>::new();
    for sample in samples.iter().filter(|sample| sample.is_matrix_point()) {
        let (row, column) = sample.cell().unwrap();
        let block = blocks.entry(sample.block).or_default();
        *block.entry((sample.bytes.bytes(), row, column)).or_default() += 1;
    }
    blocks
}

fn assert_complete_blocks(plan: &CorePairPlan, samples: &[Sample], count: u32) {
    let blocks = visits(samples);
    assert!(blocks.keys().copied().eq(0..count), "{blocks:?}");
    for visits in blocks.values() {
        assert_eq!(visits.len(), plan.cells() * plan.sizes.len());
        assert!(visits.values().all(|visits| *visits == 1), "{visits:?}");
    }
    assert!(samples.iter().map(|sample| sample.seq).eq(0..samples.len() as u64));
}

#[test]
fn both_ranks_have_the_same_blocks_and_numbers() {
    let plan = build(plan().repeats(3).iters(4));
    let [(first, samples0), (second, samples1)] = run(&plan, Default::default());
    let (first, second) = (first.unwrap(), second.unwrap());
    assert!(first.end.complete && second.end.complete);
    assert_complete_blocks(&plan, &samples0, 3);
    assert_same([&samples0, &samples1]);
    for sample in &samples0 {
        assert_measured(sample);
        assert_eq!(sample.iter_ns.len(), 4);
    }
    assert_eq!(first.per_rank_gbps(), second.per_rank_gbps());
    assert!(first.per_rank_gbps().iter().all(|rate| *rate > 0.0));
    // nccl-tests, doc/PERFORMANCE.md, for two ranks.
    assert_eq!(first.alg_gbps(), 2.0 * &first.per_rank_gbps());
    assert_eq!(first.bus_gbps(), first.per_rank_gbps());
}

#[test]
fn ci_adds_the_same_blocks_on_both_ranks() {
    // Only a cell whose blocks all have the same time on a coarse clock is as narrow as that.
    let tight = build(plan().sizes([ByteSize(8)]).repeats(3).ci(Some(1e-9)));
    let [(first, samples0), (second, samples1)] = run(&tight, Default::default());
    assert!(first.unwrap().end.complete && second.unwrap().end.complete);
    let blocks = visits(&samples0).len();
    assert!((4..=20).contains(&blocks), "{blocks}");
    assert_same([&samples0, &samples1]);

    // Which cells need more depends on what was measured.
    let loose = build(plan().repeats(3).ci(Some(0.3)));
    let [(first, samples0), (second, samples1)] = run(&loose, Default::default());
    assert!(first.unwrap().end.complete && second.unwrap().end.complete);
    assert!(visits(&samples0).len() >= 3);
    assert_same([&samples0, &samples1]);
}

#[test]
fn either_rank_can_end_the_sweep_for_both() {
    let plan = build(plan().repeats(100));
    for canceller in 0..2 {
        let mut watchers = [Watcher::default(), Watcher::default()];
        watchers[canceller].cancel_at = Some(11);
        let [(first, samples0), (second, samples1)] = run(&plan, watchers);
        for result in [first, second] {
            assert!(!result.unwrap().end.complete);
        }
        assert_eq!(samples0.len(), 11);
        assert_same([&samples0, &samples1]);
    }
}

#[test]
fn f16_a_cpu_of_one_rank_that_cannot_be_bound() {
    const ABSENT: u32 = 4000;
    for rank in 0..2 {
        let mut plan = build(plan().repeats(2));
        // Unknown to the census, so that only the kernel can refuse it.
        let cpus = if rank == 0 { &mut plan.rank0_cpus } else { &mut plan.rank1_cpus };
        cpus.insert(1, CpuId(ABSENT));
        let start = Instant::now();
        let [(first, samples0), (second, samples1)] = run(&plan, Default::default());
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_same([&samples0, &samples1]);
        assert_complete_blocks(&plan, &samples0, 2);
        let absent = |sample: &Sample| {
            let cpus = [sample.rank0_cpu, sample.rank1_cpu];
            cpus[rank] == Some(CpuId(ABSENT))
        };
        for sample in &samples0 {
            if !absent(sample) {
                assert_measured(sample);
                continue;
            }
            assert_eq!(sample.status, PointStatus::Skipped);
            let reason = sample.reason.as_ref().unwrap();
            assert!(reason.contains(&format!("rank {rank}: ")), "{reason}");
            assert!(!reason.contains(&format!("rank {}", 1 - rank)), "{reason}");
            assert!(reason.contains(&ABSENT.to_string()), "{reason}");
            assert!(sample.iter_ns.is_empty());
        }
        let skipped = samples0.iter().position(absent).unwrap();
        assert!(samples0[skipped..].iter().any(|sample| !absent(sample)), "later points are there");
        for result in [first.unwrap(), second.unwrap()] {
            assert!(result.end.complete);
            let axis = ndarray::Axis(1 + rank);
            let status = result.status();
            assert!(status.index_axis(axis, 1).iter().all(|cell| *cell == CellStatus::Skipped));
            assert!(status.index_axis(axis, 0).iter().all(|cell| *cell == CellStatus::Measured));
            assert!(result.per_rank_gbps().index_axis(axis, 1).iter().all(|rate| rate.is_nan()));
        }
    }
}

#[test]
fn a_rank_that_fails_is_named_by_the_other() {
    let plan = build(plan().repeats(100).timeout(Duration::from_secs(60)));
    for failing in 0..2 {
        let mut watchers = [Watcher::default(), Watcher::default()];
        watchers[failing].fail_at = Some(7);
        let start = Instant::now();
        let ended = run(&plan, watchers).map(|(result, _)| result.unwrap_err());
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
        assert!(ended[failing].to_string().contains("disk"), "{}", ended[failing]);
        let Error::Core(other) = &ended[1 - failing] else { panic!("{ended:?}") };
        assert_eq!((other.kind(), other.rank()), ("rank", u32::try_from(failing).ok()), "{other}");
    }
}

/// Rank 0 records into `dir` while rank 1 follows; what was measured in this call.
fn session(plan: &CorePairPlan, dir: &Path, mut watchers: [Watcher; 2]) -> (RunStatus, bool) {
    let machine = Machine::host().unwrap();
    let options = RecordOptions::default().with_mode(OpenMode::Resume);
    let [group0, mut group1] = RankGroup::threads(2).unwrap().try_into().unwrap();
    let [watcher0, watcher1] = &mut watchers;
    thread::scope(|scope| {
        let follower = scope.spawn(move || {
            let machine = Machine::host().unwrap();
            follow(&machine, plan, &mut group1, RankZero::MeasuresFirst, watcher1).unwrap()
        });
        let mut unused = Some(group0);
        let mut ranks = || Ok(Arc::new(unused.take().unwrap()));
        let report =
            record_core_pair("core-pair", &machine, plan, &mut ranks, dir, &options, watcher0)
                .unwrap();
        let status = report.manifest.status;
        if let Some(group) = unused {
            dismiss(&group, plan, status == RunStatus::Complete).unwrap();
        }
        (status, follower.join().unwrap())
    })
}

#[test]
fn an_interrupted_sweep_goes_on_with_both_ranks() {
    let place = tempfile::TempDir::new().unwrap();
    let dir = place.path().join("out");
    // Large enough for probes, many enough for sentinels.
    let plan = build(plan().sizes([ByteSize::kib(128), ByteSize::kib(256)]).repeats(12));
    let read = || SampleReader::open(&dir).unwrap().collect::<Result<Vec<_>>>().unwrap();
    let until = |count| Watcher { cancel_at: Some(count), ..Watcher::default() };

    // Rank 0 ends it, then rank 1, then nobody; each counts what it sees itself.
    let ended = session(&plan, &dir, [until(10), Watcher::default()]);
    assert_eq!(ended, (RunStatus::Interrupted, false));
    let first = read();
    assert_eq!(first.len(), 10);
    let ended = session(&plan, &dir, [Watcher::default(), until(7)]);
    assert_eq!(ended, (RunStatus::Interrupted, false));
    let second = read();
    assert_eq!((second.len(), &second[..10]), (17, &first[..]));
    assert_eq!(session(&plan, &dir, Default::default()), (RunStatus::Complete, true));
    let samples = read();
    assert_eq!(samples[..17], second[..]);
    assert_complete_blocks(&plan, &samples, 12);
    samples.iter().for_each(assert_measured);
    assert!(samples.iter().map(|sample| sample.t_ns).is_sorted());

    // Nothing is left: rank 1 is told so, and the log stays.
    assert_eq!(session(&plan, &dir, Default::default()), (RunStatus::Complete, true));
    assert_eq!(read(), samples);
}
