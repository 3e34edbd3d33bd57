//! The core-pair sweep: an all-gather of two ranks on fixed devices, rank-0 CPU × rank-1 CPU.

mod live;
mod synthetic;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cluster_health_core::load::{LoadProfile, LoadRecord};
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{ByteSize, CpuId, Machine};
use ndarray::{Array3, ArrayView2, ArrayView3};

use self::synthetic::SyntheticRanks;
use super::SweepEnd;
use super::engine::{
    Accounts, Course, Extent, Gathered, Points, RunClock, check_recalled, core_of, drive,
    mark_implausible, reset,
};
use super::warmup::Best;
use crate::analysis::{Kinship, Table};
use crate::error::{Error, Result};
use crate::estimate::{Estimates, pair_axes};
use crate::matrix::{CellStatus, Matrix};
use crate::observer::Observer;
use crate::plan::{CorePairPlan, Order};
use crate::samples::{PointStatus, RanOn, Sample, Sweep};
use crate::schedule::{Cell, PairSchedule, PlannedPoint};

/// Ranks of a pair; n in the formulas below.
const RANKS: f64 = 2.0;

/// Drawing progress takes a rank off its core: at most once in this time.
const PROGRESS_GAP: Duration = Duration::from_millis(100);

/// Result of a core-pair sweep.
///
/// For n ranks that contribute S bytes each and take t, as NVIDIA's nccl-tests define the
/// bandwidths of an all-gather (`doc/PERFORMANCE.md` there):
///
/// | method | rate | for n = 2 |
/// |---|---|---|
/// | [`per_rank_gbps`](Self::per_rank_gbps) | S ÷ t | what files, summaries and pictures carry |
/// | [`alg_gbps`](Self::alg_gbps) | n·S ÷ t, "algorithm bandwidth" | twice that |
/// | [`bus_gbps`](Self::bus_gbps) | (n−1)·S ÷ t, "bus bandwidth" | the same number |
///
/// t is the maximum over the ranks.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CorePairMatrix {
    /// Rates per rank, statuses and spread, sizes × rank-0 CPUs × rank-1 CPUs, under the plan's
    /// first load profile.
    pub matrix: Matrix,
    /// The same under its other load profiles, in their order.
    pub under_loads: Vec<Matrix>,
    /// What burned beside the measurement, of both ranks on rank 0, of its own elsewhere; empty for a
    /// plan of the idle machine alone.
    pub loads: Vec<LoadRecord>,
    /// How the sweep ended.
    pub end: SweepEnd,
}

impl CorePairMatrix {
    /// Bytes per rank ÷ time: sizes × rank-0 CPUs × rank-1 CPUs, decimal GB/s, NaN = not measured.
    #[must_use]
    pub fn per_rank_gbps(&self) -> ArrayView3<'_, f64> {
        self.matrix.gbps()
    }

    /// As [`per_rank_gbps`](Self::per_rank_gbps) for one size: rank-0 CPUs × rank-1 CPUs; `None`
    /// when the size was not part of the plan.
    #[must_use]
    pub fn per_rank_gbps_at(&self, size: ByteSize) -> Option<ArrayView2<'_, f64>> {
        let index = self.matrix.sizes.iter().position(|candidate| *candidate == size)?;
        Some(self.matrix.gbps.index_axis(ndarray::Axis(0), index))
    }

    /// Algorithm bandwidth, all ranks' bytes ÷ time: sizes × rank-0 CPUs × rank-1 CPUs, decimal
    /// GB/s, NaN = not measured.
    #[must_use]
    pub fn alg_gbps(&self) -> Array3<f64> {
        self.matrix.gbps.mapv(|rate| RANKS * rate)
    }

    /// Bus bandwidth, the bytes that each rank receives from the others ÷ time: sizes × rank-0
    /// CPUs × rank-1 CPUs, decimal GB/s, NaN = not measured.
    #[must_use]
    pub fn bus_gbps(&self) -> Array3<f64> {
        self.matrix.gbps.mapv(|rate| (RANKS - 1.0) * rate)
    }

    /// How each cell came out: sizes × rank-0 CPUs × rank-1 CPUs.
    #[must_use]
    pub fn status(&self) -> ArrayView3<'_, CellStatus> {
        self.matrix.status.view()
    }
}

/// Measures a plan from its first point.
///
/// `ranks` is this process's (or thread's) membership in a group of two; both ranks call this with
/// the same plan and both get the result. A synthetic machine has its two ranks in one process and
/// needs none.
///
/// ```
/// use cluster_health_core::rank::RankGroup;
/// use cluster_health_core::{ByteSize, Machine};
/// use cluster_health_matrix::{plan::CorePairPlan, sweep};
///
/// # fn main() -> cluster_health_matrix::Result<()> {
/// let plan = CorePairPlan::builder().sizes([ByteSize::kib(4)]).repeats(1).build(&Machine::host()?)?;
/// // Two threads here; processes: `RankGroup::lead` or `RankGroup::from_environment`.
/// let ranks = RankGroup::threads(2)?.into_iter().map(|group| {
///     let plan = plan.clone();
///     std::thread::spawn(move || -> cluster_health_matrix::Result<_> {
///         sweep::core_pair(&Machine::host()?, &plan, Some(&group), &mut ())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     let result = rank.join().expect("a rank panicked")?;
///     assert!(result.per_rank_gbps().iter().all(|rate| *rate > 0.0));
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the ranks cannot be had, one of them is lost or hangs, or the observer fails. A cell that
/// cannot be measured is a cell status, not an error.
pub fn core_pair(
    machine: &Machine,
    plan: &CorePairPlan,
    ranks: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<CorePairMatrix> {
    core_pair_from(machine, plan, ranks, &mut std::iter::empty(), 0, observer)
}

/// Goes on with an interrupted sweep: `before` are its samples, in order, `start_ns` the time from
/// its first bind to now.
///
/// # Errors
/// As [`core_pair`]; also when the samples are not the beginning of this plan's schedule.
pub fn core_pair_from(
    machine: &Machine,
    plan: &CorePairPlan,
    ranks: Option<&RankGroup>,
    before: &mut dyn Iterator<Item = Result<Sample>>,
    start_ns: u64,
    observer: &mut dyn Observer,
) -> Result<CorePairMatrix> {
    machine.advance_virtual_time(start_ns);
    let mut clock = RunClock::new(start_ns);
    let mut course = Course { before, clock: &mut clock, first_seq: 0, observer };
    core_pair_in(machine, plan, ranks, &mut course)
}

/// Whether this machine's ranks can be had at all, found out without starting them.
///
/// # Errors
/// Why not.
pub fn core_pair_ready(machine: &Machine) -> Result<()> {
    if machine.synthetic_pair().is_some() { Ok(()) } else { live::ready(machine) }
}

/// The sweep as a part of a run.
pub(crate) fn core_pair_in(
    machine: &Machine,
    plan: &CorePairPlan,
    ranks: Option<&RankGroup>,
    course: &mut Course<'_>,
) -> Result<CorePairMatrix> {
    let (rows, columns) = pair_axes(
        plan.rank0_cpus.iter().map(|cpu| cpu.0).collect(),
        plan.rank1_cpus.iter().map(|cpu| cpu.0).collect(),
        |cpu| machine.node_of(CpuId(cpu)).map(|node| node.0),
    );
    let core_of = |cpu| core_of(machine, cpu);
    let gathered = |load: &LoadProfile| {
        let (load, sizes, axes) = (load.to_string(), || plan.sizes.clone(), (&rows, &columns));
        let (rows, columns) = (axes.0.clone(), axes.1.clone());
        let axes = (rows.clone(), columns.clone());
        let mut table = Table::new(Sweep::CorePair, &load, sizes(), axes, core_of);
        table.sampled = plan.sample.is_some();
        Gathered {
            table: Some(table),
            estimates: Estimates::new(Sweep::CorePair, &load, sizes(), rows, columns),
        }
    };
    let mut gathered: Vec<Gathered> = plan.loads.iter().map(gathered).collect();
    let mut schedule = PairSchedule::new(plan, machine, course.first_seq);
    let mut pairs = Pairs::new(machine, plan, ranks);
    let extent = Extent {
        repeats: plan.repeats,
        ci: plan.ci,
        confirm: (plan.order == Order::Blocks).then_some(plan.min_effect),
        seed: plan.seed,
        sample: plan.sample,
    };
    let end = drive(&mut pairs, &mut schedule, extent, &mut gathered, course)?;
    let loads = pairs.runner.as_ref().map(|runner| runner.loads()).unwrap_or_default();
    let mut matrices = gathered.into_iter().map(|load| load.into_matrix(plan.min_effect));
    let matrix = matrices
        .next()
        .unwrap_or_else(|| Matrix::new(Sweep::CorePair, "idle", Vec::new(), rows, columns));
    Ok(CorePairMatrix { matrix, under_loads: matrices.collect(), loads, end })
}

/// One point for the ranks; both CPUs are usable as far as the census tells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedPair {
    /// Number, visit, block, bytes per rank.
    pub(crate) point: PlannedPoint,
    /// CPUs of rank 0 and rank 1.
    pub(crate) cpus: [CpuId; 2],
}

/// Measures one point; implemented by the synthetic machine (one process, virtual time) and by live
/// ranks.
pub(crate) trait PairRunner {
    /// Lets the load of the point run on both ranks, binds both, warms up ([`Warmup`](super::warmup::Warmup)), times the plan's iterations
    /// and checks the data.
    ///
    /// `best` is the fastest all-gather of this size and cell so far, before the cell's first visit
    /// that of its [`Kinship`]. The sample comes with the point's names, `t_ns` unset, everything
    /// that was measured before empty, and one empty list per rank in `rank_ns` and `ran_on`. The
    /// runner sets `t_ns` to the start of the point on its own clock, `status`, `reason` and
    /// `check`, `settled` and `bind_ns` where they are not true and 0, and fills `iter_ns`,
    /// `rank_ns`, `warmup_ns`, `skew_ns` and `ran_on`; with device events also `timer` and
    /// `host_iter_ns`.
    ///
    /// # Errors
    /// When the run cannot go on: a rank is dead, lost or does not answer in time. A point that
    /// cannot be measured is a status.
    fn measure(&mut self, pair: &PlannedPair, best: Option<u64>, sample: &mut Sample)
    -> Result<()>;

    /// The clock of `t_ns`.
    fn now_ns(&self) -> u64;

    /// Time that writing and comparing tags took so far, nanoseconds.
    fn check_ns(&self) -> u64 {
        0
    }

    /// Tells the other rank that no further point comes.
    fn stop(&mut self) {}

    /// Rank 0's value, on all ranks.
    ///
    /// # Errors
    /// As [`measure`](Self::measure).
    fn agree(&mut self, value: u64) -> Result<u64> {
        Ok(value)
    }

    /// What burned so far, of all ranks as far as this one knows.
    fn loads(&self) -> Vec<LoadRecord>;
}

/// Of each rank the CPUs that it was seen on, in a sample that [`Pairs`] made.
fn ran_on(sample: &mut Sample) -> &mut [Vec<CpuId>] {
    match &mut sample.ran_on {
        RanOn::Ranks(ranks) => ranks,
        RanOn::Thread(_) => &mut [],
    }
}

/// Values of [`Kinship`]. Against the best of all pairs the first visit of one that shares a core
/// would never settle.
const KINSHIPS: usize = 3;

/// The pairs of a plan.
struct Pairs<'a> {
    machine: &'a Machine,
    plan: &'a CorePairPlan,
    ranks: Option<&'a RankGroup>,
    runner: Option<Box<dyn PairRunner + 'a>>,
    /// Fastest all-gathers by load and size; their classes are those of [`Kinship`].
    best: BTreeMap<(usize, ByteSize), Best>,
    /// Reused for every point, so that measuring does not allocate.
    sample: Sample,
    accounts: Accounts,
    drawn: Option<Instant>,
    load_names: Vec<String>,
}

impl<'a> Pairs<'a> {
    fn new(machine: &'a Machine, plan: &'a CorePairPlan, ranks: Option<&'a RankGroup>) -> Self {
        let mut sample = Sample::new(0, Sweep::CorePair, ByteSize(0));
        sample.device_pair = Some(plan.device_pair);
        sample.iter_ns.reserve(plan.iters as usize);
        sample.warmup_ns.reserve(plan.warmup.unwrap_or(32) as usize);
        Self {
            machine,
            plan,
            ranks,
            runner: None,
            best: BTreeMap::new(),
            sample,
            accounts: Accounts::default(),
            drawn: None,
            load_names: plan.loads.iter().map(ToString::to_string).collect(),
        }
    }

    fn cpus(&self, point: &PlannedPoint) -> [CpuId; 2] {
        [self.plan.rank0_cpus[point.cell.row], self.plan.rank1_cpus[point.cell.column]]
    }

    fn kinship(&self, cpus: [CpuId; 2]) -> Kinship {
        let info = self.machine.topology().cpu(cpus[0]);
        if cpus[0] == cpus[1] {
            Kinship::SameCpu
        } else if info.is_some_and(|info| info.siblings.contains(cpus[1])) {
            Kinship::Siblings
        } else {
            Kinship::Strangers
        }
    }

    /// Class and number of a point's cell.
    fn place(&self, point: &PlannedPoint) -> (usize, usize) {
        let cell = point.cell.row * self.plan.rank1_cpus.len() + point.cell.column;
        (self.kinship(self.cpus(point)) as usize, cell)
    }

    /// Notes how fast the cell of a measured point can be.
    fn note(&mut self, point: &PlannedPoint, settled: bool, fastest: u64) {
        let (class, cell) = self.place(point);
        let cells = self.plan.cells();
        let best = self.best.entry((point.load, point.bytes));
        let best = best.or_insert_with(|| Best::new(KINSHIPS, cells));
        best.ended(class, settled);
        best.note(class, cell, fastest);
    }
}

/// The fastest all-gather of a measured point, timed or not, by the host's clock: that is the one
/// that warm-ups are timed with.
fn fastest(sample: &Sample) -> Option<u64> {
    let measured = sample.status == PointStatus::Measured;
    let times = sample.warmup_ns.iter().chain(sample.host_times());
    times.min().copied().filter(|_| measured)
}

impl Points for Pairs<'_> {
    fn is_usable(&self, cell: Cell) -> bool {
        self.plan.unusable(cell.row, cell.column).is_none()
    }

    fn prepare(&mut self) -> Result<()> {
        let began = self.machine.now_ns();
        self.runner = Some(match self.machine.synthetic_pair() {
            Some(ranks) => Box::new(SyntheticRanks::new(self.machine, self.plan, ranks)?),
            None => {
                live::ready(self.machine)?;
                let ranks = self.ranks.ok_or_else(|| {
                    Error::invalid("ranks", "two live ranks are needed, this process has no group")
                })?;
                Box::new(live::LivePair::new(self.machine, self.plan, ranks)?)
            }
        });
        self.accounts.timings.setup_ns = self.machine.now_ns() - began;
        Ok(())
    }

    fn recall(&mut self, point: &PlannedPoint, sample: &Sample) -> Result<()> {
        let cpus = self.cpus(point);
        check_recalled(point, sample, (cpus[0].0, cpus[1].0), &self.load_names[point.load])?;
        if let Some(fastest) = fastest(sample) {
            self.note(point, sample.settled, fastest);
        }
        Ok(())
    }

    /// Nearly every pair changes a CPU, so that time decides.
    fn may_pause(&mut self, _: &PlannedPoint) -> bool {
        let due = self.drawn.is_none_or(|drawn| drawn.elapsed() >= PROGRESS_GAP);
        if due {
            self.drawn = Some(Instant::now());
        }
        due
    }

    fn measure(&mut self, point: &PlannedPoint, clock: &mut RunClock) -> Result<&Sample> {
        let cpus = self.cpus(point);
        let (class, cell) = self.place(point);
        let best = self.best.get(&(point.load, point.bytes));
        let best = best.and_then(|best| best.of(class, cell));
        let Some(runner) = &mut self.runner else { return Err(Error::Cancelled) };
        let sample = &mut self.sample;
        reset(sample, point, &self.load_names[point.load]);
        [sample.rank0_cpu, sample.rank1_cpu] = cpus.map(Some);
        sample.t_ns = None;
        sample.skew_ns = None;
        sample.rank_ns.get_or_insert_with(|| vec![Vec::new(); 2]).iter_mut().for_each(Vec::clear);
        match &mut sample.ran_on {
            RanOn::Ranks(ranks) => ranks.iter_mut().for_each(Vec::clear),
            RanOn::Thread(_) => sample.ran_on = RanOn::Ranks(vec![Vec::new(); 2]),
        }
        if let Some(reason) = self.plan.unusable(point.cell.row, point.cell.column) {
            sample.t_ns = Some(runner.now_ns());
            sample.status = PointStatus::Skipped;
            sample.reason = Some(reason.to_owned());
        } else {
            runner.measure(&PlannedPair { point: *point, cpus }, best, sample)?;
        }
        self.accounts.timings.check_ns = runner.check_ns();
        let ended = runner.now_ns();
        let began = sample.t_ns.unwrap_or(ended);
        sample.t_ns = Some(clock.begin(began));
        mark_implausible(sample, self.plan.expect);
        self.accounts.add(sample, began, ended);
        if let Some(fastest) = fastest(&self.sample) {
            self.note(point, self.sample.settled, fastest);
        }
        Ok(&self.sample)
    }

    fn stop(&mut self) {
        if let Some(runner) = &mut self.runner {
            runner.stop();
        }
    }

    fn agree(&mut self, value: u64) -> Result<u64> {
        self.runner.as_mut().map_or(Ok(value), |runner| runner.agree(value))
    }

    fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    fn now_ns(&self) -> u64 {
        self.runner.as_ref().map_or_else(|| self.machine.now_ns(), |runner| runner.now_ns())
    }
}
