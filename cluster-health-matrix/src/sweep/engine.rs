//! What all sweeps share: the loop over blocks and points, resume, cancellation, progress and the
//! accounts.

use cluster_health_core::{Bandwidth, ByteSize, TagPattern};

use super::{SweepEnd, Timings};
use crate::error::{Error, Result};
use crate::estimate::Estimates;
use crate::observer::{Observer, Progress};
use crate::plan::{CheckPolicy, MAX_BLOCKS};
use crate::samples::{DataCheck, PointStatus, Sample, Timer};
use crate::schedule::{Blocks, PlannedPoint};

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

    /// True when the observer may draw before this point: a thread leaves its core anyway.
    fn may_pause(&mut self, point: &PlannedPoint) -> bool;

    /// Measures one point into a reused sample. An error ends the sweep.
    fn measure(&mut self, point: &PlannedPoint, clock: &mut RunClock) -> Result<&Sample>;

    /// The sweep ends before its last point because this side was asked to.
    fn stop(&mut self) {}

    fn accounts(&self) -> &Accounts;

    fn now_ns(&self) -> u64;
}

/// Measures (or recalls) all points of a plan's blocks, and of those that `ci` adds.
pub(super) fn drive<P: Points>(
    points: &mut P,
    schedule: &mut impl Blocks,
    (repeats, ci): (u32, Option<f64>),
    estimates: &mut Estimates,
    course: &mut Course<'_>,
) -> Result<SweepEnd> {
    let Course { before, clock, first_seq, observer } = course;
    // The samples may come from the log that the observer appends to: its end is where it is now.
    let mut before = before.fuse();
    let mut end = SweepEnd::default();
    let mut prepared = false;
    let mut next = *first_seq;
    let mut total = next + schedule.block_len() as u64 * u64::from(repeats);
    let progress = |points: &P, clock: &RunClock, done, total| Progress {
        done,
        total,
        bytes: points.accounts().bytes,
        elapsed_ns: clock.elapsed(points.now_ns()),
    };
    for block in 0..repeats.max(if ci.is_some() { MAX_BLOCKS } else { 0 }) {
        let wanted = match ci {
            Some(width) if block >= repeats => Some(estimates.wider_than(width)),
            _ => None,
        };
        if wanted.as_ref().is_some_and(std::collections::BTreeSet::is_empty) {
            break;
        }
        let is_wanted = |cell: crate::schedule::Cell, bytes: ByteSize| {
            wanted.as_ref().is_none_or(|wanted| wanted.contains(&(bytes, cell.row, cell.column)))
        };
        let planned = schedule.block(wanted.is_some().then_some(&is_wanted));
        total = total.max(next + planned.size_hint().0 as u64);
        for point in planned {
            next = point.seq + 1;
            if let Some(sample) = before.next().transpose()? {
                points.recall(&point, &sample)?;
                estimates.add(&sample);
                continue;
            }
            if !prepared {
                points.prepare()?;
                prepared = true;
            }
            if observer.is_cancelled() {
                points.stop();
                end.timings = points.accounts().timings();
                return Ok(end);
            }
            if points.may_pause(&point) {
                observer.between_visits(&progress(points, clock, point.seq, total));
            }
            let sample = match points.measure(&point, clock) {
                Ok(sample) => sample,
                // Another rank was asked to end.
                Err(Error::Cancelled) => {
                    end.timings = points.accounts().timings();
                    return Ok(end);
                }
                Err(error) => return Err(error),
            };
            estimates.add(sample);
            observer.sample(sample)?;
            end.points += 1;
        }
    }
    if let Some(extra) = before.next().transpose()? {
        return Err(not_this_plan(&extra));
    }
    observer.between_visits(&progress(points, clock, next, next));
    end.complete = true;
    end.next_seq = next;
    end.timings = points.accounts().timings();
    Ok(end)
}

pub(crate) fn not_this_plan(sample: &Sample) -> Error {
    Error::format(
        format!("samples.jsonl, seq {}", sample.seq),
        "is not the point that this plan has there",
    )
}

/// An error unless `sample` is what became of `point` in the cell with these ids.
pub(super) fn check_recalled(
    point: &PlannedPoint,
    sample: &Sample,
    cell: (u32, u32),
) -> Result<()> {
    let found = (sample.seq, sample.bytes, sample.block, sample.phase, sample.sentinel);
    let planned = (point.seq, point.bytes, point.block, point.phase, point.sentinel);
    if sample.cell() == Some(cell) && found == planned {
        Ok(())
    } else {
        Err(not_this_plan(sample))
    }
}

/// Makes the reused sample that of `point`, with nothing measured; keeps its allocations.
pub(super) fn reset(sample: &mut Sample, point: &PlannedPoint) {
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

#[allow(clippy::cast_precision_loss, reason = "times stay far below 2^53 ns")]
fn to_f64(nanoseconds: u64) -> f64 {
    nanoseconds as f64
}
