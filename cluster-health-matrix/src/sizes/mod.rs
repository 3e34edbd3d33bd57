//! Rate and time over sizes, on one CPU per device and pair: fixed cost, asymptotic rate, and where
//! the straight line between them does not hold.
//!
//! ```
//! use cluster_health_core::{ByteSize, Machine, Scenario};
//! use cluster_health_matrix::sizes::{self, SizesPlan};
//! use cluster_health_matrix::visit::Operation;
//!
//! # fn main() -> cluster_health_matrix::Result<()> {
//! let scenario = "[machine]\ncpus = 4\ndevices = 2\n\
//!                 [h2d]\ngbps = 50\nlatency_us = 10\nnoise = 0\n";
//! let machine = Machine::synthetic(Scenario::parse(scenario, "scenario")?)?;
//! let sizes = sizes::progression(ByteSize(64), ByteSize::mib(64), 4)?;
//! let plan = SizesPlan::builder().sizes(sizes).build(&machine)?;
//! let sweep = sizes::measure(&machine, &plan, None, &mut ())?;
//! let h2d = sweep.series.iter().find(|series| series.operation == Operation::H2d);
//! let fit = h2d.and_then(|series| series.fit.as_ref());
//! assert!(fit.is_some_and(|fit| (fit.alpha_us - 10.0).abs() < 0.01));
//! assert!(fit.is_some_and(|fit| (fit.beta_gbps - 50.0).abs() < 0.01));
//! # Ok(())
//! # }
//! ```

mod import;
mod measure;
mod output;
mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{BackendKind, Bandwidth, ByteSize, CpuId, DeviceId, Machine};
use ndarray::Array2;
use serde::{Deserialize, Serialize};

use crate::calibrate::{AlphaBeta, fit, line};
use crate::error::{Error, Result};
use crate::estimate::relative_mad;
use crate::observer::Observer;
use crate::run::Tool;
use crate::stats::{median, median_ns, to_f64};
use crate::validate::cached;
use crate::visit::{self, Operation, Settings, Visit};

pub use import::import;
pub use output::{SIZES_CSV, SIZES_JSON, SIZES_PNG, markdown, text};
pub use session::{compare, follow, read, record, record_import, rewrite};

/// Smallest and largest size by default, and what they grow by.
pub const DEFAULT_FROM: ByteSize = ByteSize(8);
/// See [`DEFAULT_FROM`].
pub const DEFAULT_TO: ByteSize = ByteSize::gib(1);
/// See [`DEFAULT_FROM`].
pub const DEFAULT_FACTOR: u64 = 4;

/// Most sizes of a sweep.
const MOST_SIZES: usize = 1000;
/// A time that is shorter by more than this share, though more bytes were moved, is measured again.
const FALL: f64 = 0.05;
/// Relative residual above which a straight line is no description.
const CROOKED: f64 = 0.1;
/// Differences below the resolution of clocks are none.
const RESOLUTION_NS: f64 = 100.0;

/// Sizes from `from` to `to`, each `factor` times the one before; `to` is the last.
///
/// # Errors
/// Naming `--sizes-from`, `--sizes-to` or `--factor`.
pub fn progression(from: ByteSize, to: ByteSize, factor: u64) -> Result<Vec<ByteSize>> {
    if from.bytes() == 0 {
        return Err(Error::invalid("--sizes-from", "0: nothing to move"));
    }
    if to < from {
        return Err(Error::invalid("--sizes-to", format!("{to} is below --sizes-from {from}")));
    }
    if factor < 2 {
        return Err(Error::invalid("--factor", format!("{factor}: sizes grow by 2 or more")));
    }
    let steps = std::iter::successors(Some(from.bytes()), |size| size.checked_mul(factor));
    let mut sizes: Vec<ByteSize> =
        steps.take_while(|size| *size <= to.bytes()).map(ByteSize).collect();
    if sizes.last() != Some(&to) {
        sizes.push(to);
    }
    Ok(sizes)
}

/// What a size sweep measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SizesPlan {
    /// Load profile.
    pub load: String,
    /// Devices of the copies.
    pub devices: Vec<DeviceId>,
    /// The CPU of each device.
    pub cpus: Vec<CpuId>,
    /// Devices of rank 0 and 1 of the all-gather; `None`: there is no pair.
    pub pair: Option<[DeviceId; 2]>,
    /// Their CPUs.
    pub pair_cpus: Option<[CpuId; 2]>,
    /// Ascending.
    pub sizes: Vec<ByteSize>,
    /// Timed iterations per visit.
    pub iters: u32,
    /// Exactly so many discarded ones; `None`: until settled.
    pub warmup: Option<u32>,
    /// Blocks: each visits everything once, in a fresh order.
    pub repeats: u32,
    /// Seed of all orders.
    pub seed: u64,
    /// Bound of every wait, milliseconds.
    pub timeout_ms: u64,
    /// What the memory of a device can carry at most, reading and writing together.
    pub expect_hbm: Option<Bandwidth>,
}

impl SizesPlan {
    /// A plan with default values.
    #[must_use]
    pub fn builder() -> SizesPlanBuilder {
        SizesPlanBuilder::default()
    }

    pub(crate) fn settings(&self) -> Settings {
        let timeout = Duration::from_millis(self.timeout_ms);
        Settings { iters: self.iters, warmup: self.warmup, timeout }
    }

    pub(crate) fn largest(&self) -> ByteSize {
        self.sizes.last().copied().unwrap_or_default()
    }
}

/// Makes a [`SizesPlan`].
#[derive(Debug, Clone, Default)]
pub struct SizesPlanBuilder {
    load: Option<String>,
    devices: Option<Vec<u32>>,
    cpus: Option<Vec<u32>>,
    pair: Option<[u32; 2]>,
    pair_cpus: Option<Vec<u32>>,
    sizes: Option<Vec<ByteSize>>,
    iters: Option<u32>,
    warmup: Option<u32>,
    repeats: Option<u32>,
    seed: Option<u64>,
    timeout: Option<Duration>,
    expect_hbm: Option<Bandwidth>,
}

impl SizesPlanBuilder {
    visit::visit_setters!();
    visit::setters! {
        /// What the memory of a device can carry at most, reading and writing together: a copy
        /// within the device that is faster came from its cache.
        expect_hbm: Option<Bandwidth> => expect_hbm;
        /// Devices of the copies; default: the first one that can be used.
        devices: impl Into<Vec<u32>> => Some(devices.into());
        /// The CPU of each of these devices; default: one on its NUMA node.
        cpus: impl Into<Vec<u32>> => Some(cpus.into());
        /// Devices of the all-gather; default: the first two that can be used, a single one twice
        /// where the backend allows it.
        pair: [u32; 2] => Some(pair);
        /// CPUs of its ranks; default: on the devices' NUMA nodes, different ones where there are.
        pair_cpus: impl Into<Vec<u32>> => Some(pair_cpus.into());
        /// Sizes; default: 8 B to 1 GiB by factors of 4, as far as they fit into memory.
        sizes: impl Into<Vec<ByteSize>> => Some(sizes.into());
    }

    /// Checks the plan against a machine.
    ///
    /// # Errors
    /// When an option cannot be used; the error names it.
    pub fn build(self, machine: &Machine) -> Result<SizesPlan> {
        let usable = visit::choose_devices(machine, None);
        let devices = match &self.devices {
            Some(devices) => visit::choose_devices(machine, Some(devices))?,
            None => vec![usable?[0]],
        };
        if let Some(at) = (1..devices.len()).find(|at| devices[..*at].contains(&devices[*at])) {
            let message = format!("device {} is there twice", devices[at]);
            return Err(Error::invalid("--devices", message));
        }
        let cpus = visit::choose_cpus(machine, &devices, self.cpus.as_deref())?;
        let pair = self.pair_of(machine)?;
        let pair_cpus = match pair {
            None => None,
            Some(pair) => {
                let rename = |error| match error {
                    Error::Invalid { message, .. } => Error::invalid("--pair-cpus", message),
                    other => other,
                };
                let cpus = visit::choose_cpus(machine, &pair, self.pair_cpus.as_deref());
                let cpus = cpus.map_err(rename)?;
                Some([cpus[0], cpus[1]])
            }
        };
        let fits = |largest: ByteSize| {
            let (needed, available) = memory(machine, devices.len(), largest);
            available.map(|available| (needed, available))
        };
        let mut sizes = match self.sizes {
            Some(sizes) => sizes,
            None => {
                let mut to = DEFAULT_TO;
                while to > ByteSize::mib(1)
                    && fits(to).is_some_and(|(needed, available)| needed > available / 2)
                {
                    to = ByteSize(to.bytes() / 2);
                }
                progression(DEFAULT_FROM, to, DEFAULT_FACTOR)?
            }
        };
        visit::check_sizes("--sizes", &sizes)?;
        sizes.sort_unstable();
        if sizes.len() > MOST_SIZES {
            let message = format!("{} sizes; at most {MOST_SIZES}", sizes.len());
            return Err(Error::invalid("--sizes", message));
        }
        let timeout = self.timeout.unwrap_or(Duration::from_secs(30));
        let plan = SizesPlan {
            load: self.load.unwrap_or_else(|| crate::validate::IDLE.to_owned()),
            devices,
            cpus,
            pair,
            pair_cpus,
            sizes,
            iters: self.iters.unwrap_or(3),
            warmup: self.warmup,
            repeats: self.repeats.unwrap_or(3),
            seed: self.seed.unwrap_or(1),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            expect_hbm: self.expect_hbm,
        };
        visit::check_plan(plan.settings(), plan.repeats, plan.expect_hbm)?;
        if let Some((needed, available)) = memory_of(machine, &plan)
            && needed > available
        {
            let message = format!(
                "{} needs {} MiB of memory, {} MiB may be used; choose a smaller --sizes-to",
                plan.largest(),
                needed >> 20,
                available >> 20
            );
            return Err(Error::invalid("--sizes", message));
        }
        Ok(plan)
    }

    fn pair_of(&self, machine: &Machine) -> Result<Option<[DeviceId; 2]>> {
        let ascend = machine.backend() == BackendKind::Ascend;
        let Some(asked) = self.pair else {
            let usable = visit::choose_devices(machine, None)?;
            return Ok(match usable.as_slice() {
                [first, second, ..] => Some([*first, *second]),
                [only] if !ascend => Some([*only; 2]),
                _ => None,
            });
        };
        if asked[0] == asked[1] && ascend {
            let message = format!("{0},{0}: every rank needs a device of its own", asked[0]);
            return Err(Error::invalid("--device-pair", message));
        }
        let found = visit::choose_devices(machine, Some(&asked)).map_err(|error| match error {
            Error::Invalid { message, .. } => Error::invalid("--device-pair", message),
            other => other,
        })?;
        Ok(Some([found[0], found[1]]))
    }
}

/// Bytes of this machine's memory that a sweep needs and how many it may use.
fn memory(machine: &Machine, devices: usize, largest: ByteSize) -> (u64, Option<u64>) {
    let devices = devices as u64;
    // Copies: host memory and two buffers of the device; two ranks with one and two buffers.
    let buffers = match machine.backend() {
        BackendKind::Host => 3 * devices + 6,
        _ => devices,
    };
    (largest.bytes().saturating_mul(buffers), visit::usable_memory(machine))
}

fn memory_of(machine: &Machine, plan: &SizesPlan) -> Option<(u64, u64)> {
    let (needed, available) = memory(machine, plan.devices.len(), plan.largest());
    Some((needed, available?))
}

/// One visit of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SizeVisit {
    /// Bytes; per rank of an all-gather.
    pub bytes: ByteSize,
    /// Block, from 0.
    pub block: u32,
    /// True for an extra visit of a point that was out of line.
    pub again: bool,
    /// Its times; `None` when it failed.
    pub times: Option<Visit>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What the visits of one size come to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SizePoint {
    /// Bytes; per rank of an all-gather.
    pub bytes: ByteSize,
    /// Median over the visits of their median iteration, nanoseconds; of an all-gather by the slower
    /// rank.
    pub ns: f64,
    /// Bytes ÷ time, decimal GB/s.
    pub gbps: f64,
    /// Relative standard deviation between visits, from their median absolute deviation; `None` with
    /// one visit.
    pub spread: Option<f64>,
    /// Visits.
    pub visits: u32,
    /// Visits whose warm-up did not settle.
    pub unsettled: u32,
    /// True when it was measured again because it was out of line.
    pub again: bool,
    /// True when it still takes less time than fewer bytes.
    pub non_monotone: bool,
    /// True when the data never left the device's cache: the fit is of the sizes above all such.
    pub cached: bool,
    /// (time − fit) ÷ time.
    pub residual: Option<f64>,
}

/// One operation over sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Series {
    /// What was timed.
    pub operation: Operation,
    /// Name where there are several of one operation: of the source's series, in imports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Load profile.
    pub load: String,
    /// The device, or those of both ranks.
    pub devices: Vec<DeviceId>,
    /// The CPU, or those of both ranks; empty where it is not known.
    pub cpus: Vec<CpuId>,
    /// `page_locked` or `pageable`: host memory of copies.
    pub memory: Option<String>,
    /// Every visit.
    pub visits: Vec<SizeVisit>,
    /// By size, ascending; only those with a number.
    #[serde(default)]
    pub points: Vec<SizePoint>,
    /// t = α + S/β over the sizes; `None` below two.
    #[serde(default, skip_deserializing)]
    pub fit: Option<AlphaBeta>,
    /// Why there is no number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// True when there is no such operation here, which is no fault.
    #[serde(default)]
    pub unavailable: bool,
}

impl Series {
    fn new(operation: Operation, load: &str, devices: Vec<DeviceId>, cpus: Vec<CpuId>) -> Self {
        Self {
            operation,
            label: None,
            load: load.to_owned(),
            devices,
            cpus,
            memory: None,
            visits: Vec::new(),
            points: Vec::new(),
            fit: None,
            reason: None,
            unavailable: false,
        }
    }

    /// `h2d device 0, CPU 3`.
    #[must_use]
    pub fn name(&self) -> String {
        let list = |ids: Vec<String>| ids.join(",");
        let mut name = self.label.clone().unwrap_or_else(|| self.operation.as_str().to_owned());
        if !self.devices.is_empty() {
            name +=
                &format!(" device {}", list(self.devices.iter().map(|d| d.to_string()).collect()));
        }
        if !self.cpus.is_empty() {
            name += &format!(", CPU {}", list(self.cpus.iter().map(|c| c.to_string()).collect()));
        }
        name
    }

    /// True when a visit failed.
    #[must_use]
    pub fn has_failures(&self) -> bool {
        !self.unavailable
            && (self.reason.is_some() || self.visits.iter().any(|v| v.times.is_none()))
    }

    /// Works out points and fit from the visits.
    fn evaluate(&mut self, expect_hbm: Option<f64>) {
        let mut sizes: Vec<ByteSize> = self.visits.iter().map(|visit| visit.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        self.points = sizes.iter().filter_map(|bytes| self.point(*bytes)).collect();
        for at in falls(&self.points) {
            self.points[at].non_monotone = true;
        }
        if self.operation == Operation::D2dSameDevice {
            let rates: Vec<(ByteSize, f64)> =
                self.points.iter().map(|point| (point.bytes, point.gbps)).collect();
            for point in &mut self.points {
                point.cached = cached(&rates, point.bytes, point.gbps, expect_hbm).is_some();
            }
        }
        self.fit = self.fitted(false);
        let has_host = self.times().any(|(_, visit)| visit.host_iter_ns.is_some());
        if let (true, Some(host), Some(found)) = (has_host, self.fitted(true), self.fit.as_mut()) {
            found.take_alpha(&host);
        }
        let left_out = self.in_cache();
        if let Some(found) = &mut self.fit {
            let mut notes: Vec<String> = found.note.take().into_iter().collect();
            if let Some(bytes) = left_out {
                notes.push(format!(
                    "sizes up to {bytes}, which stay in the device's cache, are left out"
                ));
            }
            if found.residual > CROOKED {
                notes.push("a straight line does not describe these times".to_owned());
            }
            found.note = (!notes.is_empty()).then(|| notes.join("; "));
        }
        let used: Vec<usize> =
            (0..self.points.len()).filter(|at| Some(self.points[*at].bytes) > left_out).collect();
        if used.len() >= 2 {
            let sizes: Vec<ByteSize> = used.iter().map(|at| self.points[*at].bytes).collect();
            let times: Vec<f64> = used.iter().map(|at| self.points[*at].ns).collect();
            let (alpha, slope) = line(&sizes, &times);
            for at in used {
                let point = &mut self.points[at];
                let expected = alpha + slope * to_f64(point.bytes.bytes());
                point.residual = Some((point.ns - expected) / point.ns);
            }
        }
    }

    /// The largest size that stays in the device's cache: smaller ones do, too, whatever their rate.
    fn in_cache(&self) -> Option<ByteSize> {
        self.points.iter().filter(|point| point.cached).map(|point| point.bytes).max()
    }

    fn times(&self) -> impl Iterator<Item = (&SizeVisit, &Visit)> {
        self.visits.iter().filter_map(|visit| Some((visit, visit.times.as_ref()?)))
    }

    fn point(&self, bytes: ByteSize) -> Option<SizePoint> {
        let found: Vec<(&SizeVisit, &Visit)> =
            self.times().filter(|(visit, _)| visit.bytes == bytes).collect();
        let mut times: Vec<f64> = found.iter().map(|(_, times)| times.median_ns()).collect();
        let visits = u32::try_from(times.len()).unwrap_or(u32::MAX);
        let ns = median(&mut times);
        let spread = relative_mad(&mut times, ns);
        ns.is_finite().then(|| SizePoint {
            bytes,
            ns,
            gbps: to_f64(bytes.bytes()) / ns,
            spread: spread.is_finite().then_some(spread),
            visits,
            unsettled: found.iter().map(|(_, times)| u32::from(!times.settled)).sum(),
            again: found.iter().any(|(visit, _)| visit.again),
            non_monotone: false,
            cached: false,
            residual: None,
        })
    }

    /// Numbers of the blocks, ascending: a file may have any.
    fn blocks(&self) -> Vec<u32> {
        let blocks: BTreeSet<u32> = self.visits.iter().map(|visit| visit.block).collect();
        blocks.into_iter().collect()
    }

    /// Whether sizes and blocks of a file are no more than can be worked out in reasonable time.
    fn is_reasonable(&self) -> bool {
        let sizes: BTreeSet<ByteSize> = self.visits.iter().map(|visit| visit.bytes).collect();
        let table = sizes.len().saturating_mul(self.blocks().len());
        sizes.len().saturating_mul(self.visits.len()).max(table) <= MOST_TIMES
    }

    /// The fit of calibration.json: block by block, weighted by relative error.
    fn fitted(&self, by_host: bool) -> Option<AlphaBeta> {
        let left_out = self.in_cache();
        let sizes: Vec<ByteSize> = self
            .points
            .iter()
            .map(|point| point.bytes)
            .filter(|bytes| Some(*bytes) > left_out)
            .collect();
        let blocks = self.blocks();
        // What was measured again stands beside the block's own visit.
        let mut found: BTreeMap<(ByteSize, u32), Vec<f64>> = BTreeMap::new();
        for (of, visit) in self.times() {
            let time = match (&visit.host_iter_ns, by_host) {
                (Some(host), true) => median_ns(host),
                _ => visit.median_ns(),
            };
            found.entry((of.bytes, of.block)).or_default().push(time);
        }
        let times = Array2::from_shape_fn((sizes.len(), blocks.len()), |(size, block)| {
            found.get_mut(&(sizes[size], blocks[block])).map_or(f64::NAN, |times| median(times))
        });
        fit(&sizes, &times)
    }
}

/// Most sizes × visits of a series; a sweep of 100 sizes in 20 blocks has 200,000.
const MOST_TIMES: usize = 1 << 26;

/// Points that take less time than the one before, beyond the noise of both.
fn falls(points: &[SizePoint]) -> Vec<usize> {
    (1..points.len())
        .filter(|at| {
            let (before, here) = (&points[at - 1], &points[*at]);
            let noise = before.spread.unwrap_or(0.0).max(here.spread.unwrap_or(0.0));
            let fall = before.ns - here.ns;
            fall > RESOLUTION_NS && fall > before.ns * FALL.max(3.0 * noise)
        })
        .collect()
}

/// The content of `sizes.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SizeSweep {
    /// Version of the file.
    pub schema_version: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// False when it was interrupted.
    pub complete: bool,
    /// What the memory of a device can carry, where that was given; decimal GB/s.
    pub expect_hbm_gbps: Option<f64>,
    /// The operations.
    pub series: Vec<Series>,
}

impl SizeSweep {
    fn evaluate(&mut self) {
        for series in &mut self.series {
            series.evaluate(self.expect_hbm_gbps);
        }
    }

    /// Number of points with a number.
    #[must_use]
    pub fn measured(&self) -> usize {
        self.series.iter().map(|series| series.points.len()).sum()
    }
}

/// Measures a size sweep: as rank 0 of `group` with the all-gather, whose other rank calls
/// [`follow`]; without a group on a real machine without.
///
/// # Errors
/// When the other rank is lost. What cannot be measured is said by its series.
///
/// # Thread binding
/// The calling thread is bound meanwhile.
pub fn measure(
    machine: &Machine,
    plan: &SizesPlan,
    group: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<SizeSweep> {
    measure::lead(machine, plan, group, observer)
}
