//! What all sweeps share: the loop over blocks and points, resume, cancellation, progress and the
//! accounts.

use std::collections::{BTreeMap, BTreeSet};

use cluster_health_core::load::{LoadGenerator, LoadProfile, LoadRecord};
use cluster_health_core::{Bandwidth, ByteSize, CpuId, Device, Machine, TagPattern};

use super::sampling::sampled;
use super::{SweepEnd, Timings};
use crate::analysis::{Table, confirmation, sampled_prediction};
use crate::error::{Error, Result};
use crate::estimate::Estimates;
use crate::matrix::Matrix;
use crate::observer::{Observer, Progress};
use crate::plan::{CheckPolicy, MAX_BLOCKS, Sampling};
use crate::samples::{DataCheck, PointStatus, Sample, Timer};
use crate::schedule::{Blocks, Cell, PlannedPoint};
use crate::stats::to_f64;

/// Time since the first bind of a run, over all its sweeps.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RunClock {
    /// The machine's clock at the first bind of this call.
    origin: Option<u64>,
    /// What an interrupted run had spent before this call.
    start_ns: u64,
}

impl RunClock {
    pub(crate) fn new(start_ns: u64) -> Self {
        Self { origin: None, start_ns }
    }

    /// `t_ns` of a point that begins now.
    pub(super) fn begin(&mut self, now: u64) -> u64 {
        let origin = *self.origin.get_or_insert(now);
        self.start_ns + now.saturating_sub(origin)
    }

    fn elapsed(&self, now: u64) -> u64 {
        self.origin.map_or(0, |origin| now.saturating_sub(origin))
    }
}

/// What a sweep is given by the run that it is a part of.
pub(crate) struct Course<'a> {
    /// This sweep's samples of an interrupted run, in order.
    pub(crate) before: &'a mut dyn Iterator<Item = Result<Sample>>,
    pub(crate) clock: &'a mut RunClock,
    /// Place of the sweep's first point in the run.
    pub(crate) first_seq: u64,
    pub(crate) observer: &'a mut dyn Observer,
}

/// Where the time of a sweep went so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Accounts {
    pub(super) timings: Timings,
    bytes: u64,
    first_begin: Option<u64>,
    last_end: u64,
}

impl Accounts {
    /// Books a point that ran from `began` to `ended` on the machine's clock.
    pub(super) fn add(&mut self, sample: &Sample, began: u64, ended: u64) {
        let timings = &mut self.timings;
        timings.iterations_ns += sample.host_times().iter().sum::<u64>();
        timings.warmup_ns += sample.warmup_ns.iter().sum::<u64>();
        timings.touch_ns += sample.touch_ns;
        timings.bind_ns += sample.bind_ns;
        let transfers = (sample.iter_ns.len() + sample.warmup_ns.len()) as u64;
        self.bytes += transfers * sample.bytes.bytes();
        self.first_begin.get_or_insert(began);
        self.last_end = ended;
    }

    fn timings(&self) -> Timings {
        let wall_ns = self.first_begin.map_or(0, |first| self.last_end.saturating_sub(first));
        Timings { wall_ns, ..self.timings }
    }
}

/// What one kind of sweep does at its points.
pub(super) trait Points {
    /// Called once before the first point that is measured, not when all are in the log already.
    fn prepare(&mut self) -> Result<()>;

    /// Takes over a point of an interrupted run; an error when it is not the planned one.
    fn recall(&mut self, point: &PlannedPoint, sample: &Sample) -> Result<()>;

    /// False for a cell whose points are skipped anyway.
    fn is_usable(&self, cell: Cell) -> bool;

    /// True when the observer may draw before this point: a thread leaves its core anyway.
    fn may_pause(&mut self, point: &PlannedPoint) -> bool;

    /// Measures one point into a reused sample. An error ends the sweep.
    fn measure(&mut self, point: &PlannedPoint, clock: &mut RunClock) -> Result<&Sample>;

    /// The sweep ends before its last point because this side was asked to.
    fn stop(&mut self) {}

    /// Rank 0's value on all ranks: what depends on time must not be decided by each for itself.
    fn agree(&mut self, value: u64) -> Result<u64> {
        Ok(value)
    }

    fn accounts(&self) -> &Accounts;

    fn now_ns(&self) -> u64;
}

/// What a sweep is given by its plan, beside its points.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Blocks.
    pub(super) repeats: u32,
    /// Half-width of the intervals that more blocks are added for.
    pub(super) ci: Option<f64>,
    /// Smallest difference that is a fault; `None` when nothing is to be confirmed.
    pub(super) confirm: Option<f64>,
    pub(super) seed: u64,
    /// A part of the cells is to be measured.
    pub(super) sample: Option<Sampling>,
}

/// Measures (or recalls) all points of a plan's blocks, those that `ci` adds, and the visits that
/// confirm what the blocks made suspicious.
pub(super) fn drive<P: Points>(
    points: &mut P,
    schedule: &mut impl Blocks,
    extent: Extent,
    gathered: &mut [Gathered],
    course: &mut Course<'_>,
) -> Result<SweepEnd> {
    let Extent { repeats, ci, confirm, seed, sample } = extent;
    let loads = gathered.len().max(1);
    for load in gathered.iter_mut() {
        match (confirm, &mut load.table) {
            (Some(_), Some(table)) => {
                table.reserve(schedule.block_len().saturating_mul(repeats as usize) / loads);
            }
            _ => load.table = None,
        }
    }
    let total = schedule.block_len() as u64 * u64::from(repeats);
    let mut run = Drive::new(points, gathered, course, total);
    if let Some(sample) = sample {
        return sampled(run, schedule, extent, sample);
    }
    for block in 0..repeats.max(if ci.is_some() { MAX_BLOCKS } else { 0 }) {
        let wanted = match ci {
            // A cell that needs it under one load is visited under all.
            Some(width) if block >= repeats => {
                let wide = run.gathered.iter().map(|load| load.estimates.wider_than(width));
                Some(wide.flatten().collect::<BTreeSet<_>>())
            }
            _ => None,
        };
        if wanted.as_ref().is_some_and(BTreeSet::is_empty) {
            break;
        }
        let is_wanted = |cell: Cell, bytes: ByteSize| {
            wanted.as_ref().is_none_or(|wanted| wanted.contains(&(bytes, cell.row, cell.column)))
        };
        let planned = schedule.block(wanted.is_some().then_some(&is_wanted));
        if !run.measure_all(planned)? {
            return Ok(run.end);
        }
    }
    if let Some(min_effect) = confirm {
        let usable = |row: usize, column: usize| run.points.is_usable(Cell { row, column });
        // Nothing of the sweep is judged after this: the tables are handed over.
        let tables = run.gathered.iter_mut().filter_map(|load| load.table.take());
        let rounds = confirmation(tables.collect(), min_effect, seed, &usable);
        for cells in &rounds {
            if !run.measure_all(schedule.confirm(cells))? {
                return Ok(run.end);
            }
        }
    }
    run.finish()
}

/// What is gathered under one load profile.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) estimates: Estimates,
    /// While there is something to be confirmed.
    pub(super) table: Option<Table>,
}

impl Gathered {
    /// The matrix, with what a sampled sweep predicts of the cells that it left out.
    pub(super) fn into_matrix(self, min_effect: f64) -> Matrix {
        let mut matrix = self.estimates.into_matrix();
        if let Some(table) = self.table.filter(|table| table.sampled) {
            matrix.predicted = Some(sampled_prediction(table, min_effect));
        }
        matrix
    }

    fn add(&mut self, sample: &Sample) {
        self.estimates.add(sample);
        if let Some(table) = &mut self.table {
            table.add(sample);
        }
    }
}

/// The loads of a sweep on one rank; `None` where the plan has none but idle.
pub(super) fn loads_of(
    machine: &Machine,
    profiles: &[LoadProfile],
    devices: &[Vec<Device>],
    rank: usize,
) -> Result<Option<LoadGenerator>> {
    if let [LoadProfile::Idle] = profiles {
        return Ok(None);
    }
    Ok(Some(LoadGenerator::new(machine, profiles, devices, rank)?))
}

/// What the burners did; nothing for a plan without.
pub(super) fn records_of(loads: Option<&LoadGenerator>) -> Vec<LoadRecord> {
    loads.map(LoadGenerator::records).unwrap_or_default()
}

/// A sweep on its way.
pub(super) struct Drive<'r, 'c, P> {
    pub(super) points: &'r mut P,
    pub(super) gathered: &'r mut [Gathered],
    course: &'r mut Course<'c>,
    pub(super) end: SweepEnd,
    prepared: bool,
    /// The samples may come from the log that the observer appends to: its end is where it was.
    log_ended: bool,
    next: u64,
    total: u64,
    pub(super) spent: Spent,
}

/// What points took so far, as the log tells it: what a sampled sweep decides by. Once the time beside the
/// transfers is known, from the first points, it is taken as that of all: a run that goes on binds anew
/// where an uninterrupted one need not, and must come to the same decisions.
#[derive(Debug, Clone, Default)]
pub(super) struct Spent {
    first_ns: Option<u64>,
    last_ns: u64,
    /// Transfers of the last point, and of all.
    last_transfers_ns: u64,
    transfers_ns: u64,
    points: u64,
    /// Time beside its transfers of each point until that is known, and then of all.
    beside: Vec<u64>,
    beside_ns: Option<u64>,
    /// By size points and the time of their transfers.
    by_size: BTreeMap<ByteSize, (u64, u64)>,
    /// That of the first points of each size.
    first: BTreeMap<ByteSize, Vec<u64>>,
}

/// Points of a size whose times are kept.
const FIRST_POINTS: usize = 16;

impl Spent {
    fn add(&mut self, sample: &Sample) {
        let Some(start) = sample.t_ns else { return };
        let transfers = sample.warmup_ns.iter().chain(sample.host_times()).sum::<u64>();
        if self.first_ns.is_some() && self.beside_ns.is_none() {
            let passed = start.saturating_sub(self.last_ns);
            self.beside.push(passed.saturating_sub(self.last_transfers_ns));
        }
        self.first_ns.get_or_insert(start);
        self.last_ns = start;
        self.last_transfers_ns = transfers;
        self.transfers_ns += transfers;
        self.points += 1;
        let (points, time) = self.by_size.entry(sample.bytes).or_default();
        *points += 1;
        *time += transfers;
        let first = self.first.entry(sample.bytes).or_default();
        if first.len() < FIRST_POINTS {
            first.push(transfers);
        }
    }

    /// From the first point's start to the last one's, by the clock.
    pub(super) fn clock_ns(&self) -> u64 {
        self.first_ns.map_or(0, |first| self.last_ns.saturating_sub(first))
    }

    /// From now on the time beside transfers is that of the points so far: their median, because the point
    /// at which a run went on is another.
    pub(super) fn settle(&mut self) {
        self.beside.sort_unstable();
        self.beside_ns = Some(self.beside.get(self.beside.len() / 2).copied().unwrap_or(0));
    }

    /// From the first point's start to the last one's end.
    pub(super) fn total_ns(&self) -> u64 {
        match self.beside_ns {
            Some(beside) => self.transfers_ns + self.points * beside,
            None => self.clock_ns() + self.last_transfers_ns,
        }
    }

    /// Median transfers of the first points of this size.
    pub(super) fn typical(&self, bytes: ByteSize) -> u64 {
        let mut first = self.first.get(&bytes).cloned().unwrap_or_default();
        first.sort_unstable();
        first.get(first.len() / 2).copied().unwrap_or(0)
    }

    /// Of one point of this size.
    pub(super) fn of_point(&self, bytes: ByteSize) -> u64 {
        let of = |(points, time): &(u64, u64)| time / (*points).max(1);
        let largest = || self.by_size.values().map(of).max().unwrap_or(0);
        let transfers = self.by_size.get(&bytes).map_or_else(largest, of);
        transfers + self.beside_ns.unwrap_or(0)
    }
}

impl<'r, 'c, P: Points> Drive<'r, 'c, P> {
    fn new(
        points: &'r mut P,
        gathered: &'r mut [Gathered],
        course: &'r mut Course<'c>,
        total: u64,
    ) -> Self {
        let first_seq = course.first_seq;
        Self {
            points,
            gathered,
            course,
            end: SweepEnd::default(),
            prepared: false,
            log_ended: false,
            next: first_seq,
            total: first_seq + total,
            spent: Spent::default(),
        }
    }

    /// At least so many points are still to come.
    pub(super) fn expect(&mut self, points: usize) {
        self.total = self.next + points as u64;
    }

    /// Rank 0's value on all ranks. Before the first point that is measured each has the same log.
    pub(super) fn agree(&mut self, value: u64) -> Result<u64> {
        if self.prepared { self.points.agree(value) } else { Ok(value) }
    }

    fn progress(&self, done: u64) -> Progress {
        Progress {
            done,
            total: self.total,
            bytes: self.points.accounts().bytes,
            elapsed_ns: self.course.clock.elapsed(self.points.now_ns()),
        }
    }

    fn recalled(&mut self) -> Result<Option<Sample>> {
        if self.log_ended {
            return Ok(None);
        }
        let sample = self.course.before.next().transpose()?;
        self.log_ended = sample.is_none();
        Ok(sample)
    }

    /// False when the sweep ends before the last of these points.
    pub(super) fn measure_all(
        &mut self,
        planned: impl Iterator<Item = PlannedPoint>,
    ) -> Result<bool> {
        self.total = self.total.max(self.next + planned.size_hint().0 as u64);
        for point in planned {
            self.next = point.seq + 1;
            if let Some(sample) = self.recalled()? {
                self.points.recall(&point, &sample)?;
                self.spent.add(&sample);
                self.gathered[point.load].add(&sample);
                continue;
            }
            if !self.prepared {
                self.points.prepare()?;
                self.prepared = true;
            }
            if self.course.observer.is_cancelled() {
                self.points.stop();
                self.end.timings = self.points.accounts().timings();
                return Ok(false);
            }
            if self.points.may_pause(&point) {
                let progress = self.progress(point.seq);
                self.course.observer.between_visits(&progress);
            }
            let sample = match self.points.measure(&point, self.course.clock) {
                Ok(sample) => sample,
                // Another rank was asked to end.
                Err(Error::Cancelled) => {
                    self.end.timings = self.points.accounts().timings();
                    return Ok(false);
                }
                Err(error) => return Err(error),
            };
            self.gathered[point.load].add(sample);
            self.spent.add(sample);
            self.course.observer.sample(sample)?;
            self.end.points += 1;
        }
        Ok(true)
    }

    /// The end of a sweep that was asked to end.
    pub(super) fn cancelled(mut self) -> SweepEnd {
        self.end.timings = self.points.accounts().timings();
        self.end
    }

    pub(super) fn finish(mut self) -> Result<SweepEnd> {
        if let Some(extra) = self.recalled()? {
            return Err(not_this_plan(&extra));
        }
        self.total = self.next;
        let progress = self.progress(self.next);
        self.course.observer.between_visits(&progress);
        self.end.complete = true;
        self.end.next_seq = self.next;
        self.end.timings = self.points.accounts().timings();
        Ok(self.end)
    }
}

/// The core of a CPU, named by its lowest thread.
pub(super) fn core_of(machine: &Machine, cpu: u32) -> Option<u32> {
    machine.topology().cpu(CpuId(cpu))?.siblings.iter().next().map(|cpu| cpu.0)
}

pub(crate) fn not_this_plan(sample: &Sample) -> Error {
    Error::format(
        format!("samples.jsonl, seq {}", sample.seq),
        "is not the point that this plan has there",
    )
}

/// An error unless `sample` is what became of `point` in the cell with these ids under this load.
pub(super) fn check_recalled(
    point: &PlannedPoint,
    sample: &Sample,
    cell: (u32, u32),
    load: &str,
) -> Result<()> {
    let found = (sample.seq, sample.bytes, sample.block, sample.phase, sample.sentinel);
    let planned = (point.seq, point.bytes, point.block, point.phase, point.sentinel);
    if sample.cell() == Some(cell) && sample.load == load && found == planned {
        Ok(())
    } else {
        Err(not_this_plan(sample))
    }
}

/// Makes the reused sample that of `point`, with nothing measured; keeps its allocations.
pub(super) fn reset(sample: &mut Sample, point: &PlannedPoint, load: &str) {
    sample.load.clear();
    sample.load.push_str(load);
    sample.seq = point.seq;
    sample.block = point.block;
    sample.bytes = point.bytes;
    sample.phase = point.phase;
    sample.sentinel = point.sentinel;
    sample.reason = None;
    sample.iter_ns.clear();
    sample.host_iter_ns = None;
    sample.warmup_ns.clear();
    sample.touch_ns = 0;
    sample.bind_ns = 0;
    sample.pinned = None;
    sample.page_nodes = None;
    sample.timer = Timer::Host;
    sample.arena = None;
    sample.settled = true;
    sample.check = DataCheck::Off;
}

/// The part of a point that tags belong to. Both parts have tags of their own: the destination of
/// the timed copies would otherwise hold the right ones before the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    WarmUp,
    Timed,
}

/// What the source holds in one part of a point; `None` when nothing is compared.
pub(super) fn point_tags(
    check: CheckPolicy,
    seed: u64,
    stage: Stage,
    bytes: ByteSize,
) -> Option<TagPattern> {
    let seed = match stage {
        Stage::WarmUp => seed,
        Stage::Timed => !seed,
    };
    match check {
        CheckPolicy::Off => None,
        CheckPolicy::Tags => Some(TagPattern::sparse(seed, bytes)),
        CheckPolicy::Full => Some(TagPattern::full(seed, bytes)),
    }
}

/// Marks a measured point that is faster than the declared rate allows.
pub(super) fn mark_implausible(sample: &mut Sample, expect: Option<Bandwidth>) {
    if sample.status != PointStatus::Measured {
        return;
    }
    let fastest = sample.iter_ns.iter().min().copied().unwrap_or(0);
    if fastest == 0 {
        sample.status = PointStatus::Implausible;
        sample.reason = Some("a copy that took no time on this clock".to_owned());
        return;
    }
    let Some(expect) = expect else { return };
    let rate = Bandwidth::of(sample.bytes, to_f64(fastest));
    if rate.as_gb_per_second() > 1.25 * expect.as_gb_per_second() {
        sample.status = PointStatus::Implausible;
        sample.reason = Some(format!("{rate} is above 1.25 × the declared {expect}"));
    }
}
