//! Every output of a result folder, made again from its log.
//!
//! | file | content |
//! |---|---|
//! | `h2d-16MiB.csv` | rows = CPUs, columns = devices, decimal GB/s, empty = not measured |
//! | `core-pair-8MiB.csv` | rows = rank-0 CPUs, columns = rank-1 CPUs, decimal GB/s per rank |
//! | `….npy` | the same as float64, NaN = not measured |
//! | `…-predicted.csv`, `.npy` | of a sampled sweep: measured rates, else those of its model |
//! | `…-error.csv`, `.npy` | their 95 % half-width, a share of the rate; empty or NaN where measured |
//! | `….png` | heatmap (feature `png`) |
//! | `matrices.xlsx` | heat sheets, Summary, Affinity, Environment (feature `xlsx`) |
//! | `report.md` | the verdict and what it rests on, what was not tested, and the numbers |
//! | `run.json` | summary, counts and verdict brought up to date |
//! | `calibration.json` | matrices, fixed costs and rates for cost models, [`calibrate`](crate::calibrate) |
//! | `placement.json` | which cores should feed which device, [`placement`](crate::placement) |

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::Path;

use cluster_health_core::load::LoadProfile;
use cluster_health_core::{Bandwidth, CpuId};

use crate::analysis::{Axes, Diagnosis, Evidence};
use crate::blocks::{Blocks, ProbeTime};
use crate::calibrate::{CALIBRATION, Calibration};
use crate::error::{Error, Result};
use crate::estimate::{Estimates, axes_of_plan, pair_axes};
use crate::matrix::{Axis, Matrix, Memory, Slice};
use crate::output::{csv, markdown, npy};
use crate::placement::{PLACEMENT, Placement};
use crate::run::{
    AFFINITY, AffinityFile, Manifest, PlanRecord, PointCounts, SampleReader, SummaryRow, read_json,
    write_by_rename, write_json,
};
use crate::samples::{Phase, PointStatus, Sample, Sweep};
use crate::stats::quantiles;

/// How outputs look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ReportOptions {
    /// The older tool's red–yellow–green instead of the colour-blind-safe default.
    pub classic_palette: bool,
}

impl ReportOptions {
    /// The older tool's palette, or the default one.
    #[must_use]
    pub const fn with_classic_palette(mut self, classic: bool) -> Self {
        self.classic_palette = classic;
        self
    }
}

/// What a result folder holds.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// Its manifest, with summary and counts of the log.
    pub manifest: Manifest,
    /// One matrix per sweep, load and memory kind.
    pub matrices: Vec<Matrix>,
    /// What each block measured, in the order of [`matrices`](Self::matrices).
    pub blocks: Vec<Blocks>,
    /// NUMA nodes of the sampled pages of host memory: by the node of the CPU that copied, by the
    /// node of the pages, how many; unverified memory is not in it.
    pub pages: BTreeMap<u32, BTreeMap<u32, u64>>,
    /// The census, where the folder has one.
    pub affinity: Option<AffinityFile>,
    /// Lines of the log that are not samples of this run, or a second one of a point, with their
    /// numbers; nothing else here counts them.
    pub bad_lines: Vec<String>,
    /// Reasons of skipped, failed and implausible points, with how many points each explains.
    pub reasons: BTreeMap<String, u64>,
    /// Points whose warm-up did not settle.
    pub unsettled: u64,
    /// What the numbers mean.
    pub diagnosis: Diagnosis,
    /// Points whose memory was not on the CPU's node, by the kernel's own word.
    pub misplaced: u64,
}

/// Most cells that a folder may claim to have.
const MOST_CELLS: usize = 1 << 27;

/// Most numbers that the estimates of a folder may take: every line of a log could claim the memory
/// of a whole matrix for a block or load of its own. Times by the host clock may take as many again.
const MOST_NUMBERS: usize = 1 << 27;

/// Estimates by sweep, load and kind of memory.
type Groups = BTreeMap<(Sweep, String, Memory), Estimates>;

impl Report {
    /// Reads a result folder.
    ///
    /// # Errors
    /// When manifest or log cannot be read. Single bad lines are named in
    /// [`bad_lines`](Self::bad_lines), not an error.
    pub fn read(dir: &Path) -> Result<Self> {
        Self::read_expecting(dir, None)
    }

    /// Reads a result folder and judges it against a rate that its link should have, whatever its
    /// plan expected.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_expecting(dir: &Path, expect: Option<Bandwidth>) -> Result<Self> {
        let manifest = Manifest::read(dir)?;
        let path = dir.join(AFFINITY);
        let affinity: Option<AffinityFile> =
            if path.exists() { Some(read_json(&path)?) } else { None };
        let place = dir.join(crate::run::MANIFEST).display().to_string();
        Self::gather(manifest, affinity, &place, expect, |take| {
            SampleReader::open(dir)?
                .for_each_line(&mut |line| take(line.map_err(|bad| bad.reason.as_str())))
        })
    }

    /// The error of a run without a measured point, with the reasons of the others.
    #[must_use]
    pub fn nothing_measured(&self) -> Option<Error> {
        let reasons: Vec<&str> = self.reasons.keys().map(String::as_str).take(3).collect();
        let why =
            if reasons.is_empty() { "the log has no point".to_owned() } else { reasons.join("; ") };
        let is_empty = self.manifest.points.measured == 0;
        is_empty.then(|| Error::output("nothing could be measured", why))
    }

    /// A run that was kept in memory, as if its folder were read.
    pub(crate) fn of_samples(
        manifest: Manifest,
        affinity: Option<AffinityFile>,
        samples: &[Sample],
    ) -> Result<Self> {
        Self::gather(manifest, affinity, "the plan", None, |take| {
            samples.iter().for_each(|sample| take(Ok(sample)));
            Ok(())
        })
    }

    /// Judges the samples that `feed` gives, each or why it is none.
    fn gather(
        mut manifest: Manifest,
        affinity: Option<AffinityFile>,
        place: &str,
        expect: Option<Bandwidth>,
        feed: impl FnOnce(&mut dyn FnMut(Result<&Sample, &str>)) -> Result<()>,
    ) -> Result<Self> {
        let nodes = affinity.as_ref().map(AffinityFile::nodes).unwrap_or_default();
        let cores = affinity.as_ref().map(AffinityFile::cores).unwrap_or_default();
        let mut gathering = Gathering::new(&manifest, nodes, cores, place)?;
        let mut number = 0_u64;
        feed(&mut |line| {
            number += 1;
            let found = match line {
                Ok(sample) => gathering.add(sample),
                Err(reason) => Err(reason.to_owned()),
            };
            if let Err(reason) = found {
                gathering.bad_lines.push(format!("line {number}: {reason}"));
            }
        })?;
        let mut points = gathering.points;
        merge_unstarted(&mut gathering.groups, gathering.unstarted);
        for estimates in gathering.groups.values_mut() {
            let dropped = estimates.drop_implausible();
            points.measured = points.measured.saturating_sub(dropped);
            points.implausible += dropped;
            if dropped > 0 {
                let reason = "faster than 2 × the 99th percentile of its size".to_owned();
                *gathering.reasons.entry(reason).or_insert(0) += dropped;
            }
        }
        manifest.points = points;
        // Judging needs most memory: the matrices are made when it has given it back.
        let (diagnosis, mut predictions) = gathering.evidence.judge(&manifest, expect);
        manifest.verdict = Some(diagnosis.verdict.as_str().to_owned());
        let mut matrices = Vec::new();
        let mut all_blocks = Vec::new();
        for (key, estimates) in gathering.groups {
            let (mut matrix, mut blocks) = estimates.into_parts();
            matrix.memory = key.2;
            matrix.predicted = predictions.remove(&(matrix.sweep, matrix.load.clone()));
            if let Some(host) = gathering.host_groups.remove(&key) {
                blocks.host_gbps = host.finish_with_blocks().2.gbps;
            }
            blocks.probes = gathering.probes.remove(&key).unwrap_or_default();
            all_blocks.push(blocks);
            matrices.push(matrix);
        }
        manifest.summary = matrices
            .iter()
            .flat_map(Matrix::slices)
            .filter_map(|slice| summary_of(&slice))
            .collect();
        Ok(Self {
            manifest,
            matrices,
            blocks: all_blocks,
            pages: gathering.pages,
            affinity,
            bad_lines: gathering.bad_lines,
            reasons: gathering.reasons,
            unsettled: gathering.unsettled,
            diagnosis,
            misplaced: gathering.misplaced,
        })
    }

    /// Writes every output of the folder, the workbook on a thread of its own.
    ///
    /// # Errors
    /// When a file cannot be written; the others may be new or missing.
    pub fn write(&mut self, dir: &Path, options: &ReportOptions) -> Result<()> {
        #[cfg(feature = "xlsx")]
        {
            let report = &*self;
            // It takes as long as all other files together.
            let (workbook, others) = std::thread::scope(|scope| {
                let workbook = scope.spawn(|| report.write_workbook(dir));
                let others = report.write_numbers(dir, options);
                (workbook.join(), others)
            });
            others?;
            let notes = workbook.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            self.manifest.notes.retain(|note| !note.starts_with(WORKBOOK_NOTE));
            self.manifest
                .notes
                .extend(notes.into_iter().map(|note| format!("{WORKBOOK_NOTE}{note}")));
        }
        #[cfg(not(feature = "xlsx"))]
        self.write_numbers(dir, options)?;
        write_by_rename(&dir.join("report.md"), |out| {
            out.write_all(markdown::render(self).as_bytes())
        })?;
        write_json(&dir.join(crate::run::MANIFEST), &self.manifest)
    }

    /// Everything that no other output tells about.
    fn write_numbers(&self, dir: &Path, options: &ReportOptions) -> Result<()> {
        for slice in self.matrices.iter().flat_map(Matrix::slices) {
            let stem = slice.stem();
            let path = |end: &str| dir.join(format!("{stem}{end}"));
            write_by_rename(&path(".csv"), |out| csv::write(&slice, out))?;
            write_by_rename(&path(".npy"), |out| npy::write(&slice, out))?;
            if slice.predicted.is_some() {
                write_by_rename(&path("-predicted.csv"), |out| csv::write_predicted(&slice, out))?;
                write_by_rename(&path("-predicted.npy"), |out| npy::write_predicted(&slice, out))?;
                write_by_rename(&path("-error.csv"), |out| csv::write_error(&slice, out))?;
                write_by_rename(&path("-error.npy"), |out| npy::write_error(&slice, out))?;
            }
            #[cfg(feature = "png")]
            {
                let picture =
                    crate::output::png::render(&slice, &style(options, &self.manifest))
                        .map_err(|error| Error::output(format!("{stem}.png"), error.to_string()))?;
                write_by_rename(&path(".png"), |out| out.write_all(&picture))?;
            }
        }
        let _ = options;
        let calibration = Calibration::of(self);
        write_by_rename(&dir.join(CALIBRATION), |out| calibration.write(out))?;
        write_json(&dir.join(PLACEMENT), &Placement::of(self))
    }

    #[cfg(feature = "xlsx")]
    fn write_workbook(&self, dir: &Path) -> Result<Vec<String>> {
        use crate::output::xlsx::{Workbook, write_by_rename};
        let tables = surroundings(self.affinity.as_ref(), &self.manifest);
        let book = Workbook::new(self.matrices.iter().collect(), tables).of_run(&self.manifest);
        write_by_rename(dir, "matrices.xlsx", &book)
    }
}

#[cfg(feature = "xlsx")]
const WORKBOOK_NOTE: &str = "matrices.xlsx: ";

#[cfg(feature = "png")]
fn style(options: &ReportOptions, manifest: &Manifest) -> crate::output::png::Style {
    use crate::output::png::{Palette, Style};
    let mut style = Style::default();
    if options.classic_palette {
        style.palette = Palette::Classic;
    }
    style.note = match manifest.environment.backend.as_str() {
        "synthetic" => Some("simulated machine: no copy was made".to_owned()),
        "" => Some(format!("imported data, {}", manifest.order)),
        _ => manifest.plan.is_concurrent().then(|| "all devices at once".to_owned()),
    };
    style
}

/// Cells of points that were never started are holes of the matrix that the others made: of each
/// where there are two, and of a page-locked one where there is none.
fn merge_unstarted(groups: &mut Groups, unstarted: Groups) {
    for ((sweep, load, _), holes) in unstarted {
        let mut found = false;
        for ((other, other_load, _), estimates) in groups.iter_mut() {
            if *other == sweep && *other_load == load {
                estimates.absorb_statuses(&holes);
                found = true;
            }
        }
        if !found {
            groups.insert((sweep, load, Memory::PageLocked), holes);
        }
    }
}

/// Points that were seen, by their number: usually all from 0 on, in any order.
#[derive(Debug, Default)]
struct Seen {
    /// All below were seen.
    below: u64,
    beyond: BTreeSet<u64>,
}

impl Seen {
    /// False when the point was seen before.
    fn is_new(&mut self, seq: u64) -> bool {
        if seq != self.below {
            return seq > self.below && self.beyond.insert(seq);
        }
        self.below += 1;
        while self.beyond.remove(&self.below) {
            self.below += 1;
        }
        true
    }
}

/// What the plan says about all points of a sweep; imports have no plan.
#[derive(Debug, Default)]
struct Planned {
    /// Of copies and of pairs.
    sweeps: [Option<(Sweep, Vec<String>)>; 2],
}

impl Planned {
    fn of(plan: &PlanRecord) -> Self {
        let names = |loads: &[LoadProfile]| loads.iter().map(ToString::to_string).collect();
        let copies = plan.h2d.as_ref().map(|plan| (plan.direction.sweep(), names(&plan.loads)));
        let pairs = plan.core_pair.as_ref().map(|plan| (Sweep::CorePair, names(&plan.loads)));
        Self { sweeps: [copies, pairs] }
    }

    fn why_not(&self, sample: &Sample) -> Option<String> {
        let (sweep, loads) = self.sweeps[usize::from(sample.sweep.is_pair())].as_ref()?;
        if sample.sweep != *sweep {
            return Some(format!("a point of a {} sweep, which this run has not", sample.sweep));
        }
        let known = loads.contains(&sample.load);
        (!known).then(|| format!("load {} is not of this run", sample.load))
    }
}

/// Where a sample goes.
struct Place {
    key: (Sweep, String, Memory),
    block: u32,
    is_probe: bool,
    unstarted: bool,
}

/// What one pass over the log gathers.
struct Gathering {
    seen: Seen,
    planned: Planned,
    evidence: Evidence,
    groups: Groups,
    /// By the host clock, of points that device events timed.
    host_groups: Groups,
    probes: BTreeMap<(Sweep, String, Memory), Vec<ProbeTime>>,
    pages: BTreeMap<u32, BTreeMap<u32, u64>>,
    /// Points that have no memory because they were never started.
    unstarted: Groups,
    /// Of the sweeps whose rows are CPUs and columns devices, and of the pairs.
    axes: [Option<Axes>; 2],
    /// How many more numbers the estimates may take, and what took some.
    room: usize,
    charged: BTreeSet<((Sweep, String, Memory), bool, u32)>,
    /// Where the last sample went: the next one mostly goes there, too.
    last: Option<Place>,
    nodes: BTreeMap<u32, u32>,
    points: PointCounts,
    reasons: BTreeMap<String, u64>,
    unsettled: u64,
    misplaced: u64,
    bad_lines: Vec<String>,
}

impl Gathering {
    fn new(
        manifest: &Manifest,
        nodes: BTreeMap<u32, u32>,
        cores: BTreeMap<u32, u32>,
        place: &str,
    ) -> Result<Self> {
        let device_nodes: BTreeMap<u32, u32> = manifest
            .devices
            .iter()
            .filter_map(|device| Some((device.id, device.numa_node?)))
            .collect();
        let node_of_cpu = |cpu: u32| nodes.get(&cpu).copied();
        let node_of_device = |id: u32| device_nodes.get(&id).copied();
        let plan = &manifest.plan;
        let mut axes = [None, None];
        if let Some(plan) = &plan.h2d {
            let (rows, columns) = axes_of_plan(plan, node_of_cpu, node_of_device);
            axes[0] = Some((plan.sizes.clone(), rows, columns));
        }
        if let Some(plan) = &plan.core_pair {
            let ids = |cpus: &[CpuId]| cpus.iter().map(|cpu| cpu.0).collect();
            let (rows, columns) =
                pair_axes(ids(&plan.rank0_cpus), ids(&plan.rank1_cpus), node_of_cpu);
            axes[1] = Some((plan.sizes.clone(), rows, columns));
        }
        if let Some(import) = &plan.import {
            axes[usize::from(import.sweep.is_pair())] = Some(imported_axes(
                import.sweep,
                import.sizes.clone(),
                &import.rows,
                &import.columns,
                node_of_cpu,
                node_of_device,
            ));
        }
        if axes.iter().all(Option::is_none) {
            return Err(Error::format(
                place,
                "the plan names no sweep; what validate, sizes and policies measured is in report.md",
            ));
        }
        let cells = axes.iter().flatten().fold(0_usize, |sum, (sizes, rows, columns)| {
            let cells = sizes.len().saturating_mul(rows.len()).saturating_mul(columns.len());
            sum.saturating_add(cells)
        });
        if cells > MOST_CELLS {
            return Err(Error::format(
                place,
                format!("a plan of {cells} cells is beyond {MOST_CELLS}"),
            ));
        }
        Ok(Self {
            seen: Seen::default(),
            planned: Planned::of(plan),
            evidence: Evidence::new(cores),
            groups: Groups::new(),
            host_groups: Groups::new(),
            probes: BTreeMap::new(),
            pages: BTreeMap::new(),
            unstarted: Groups::new(),
            axes,
            room: MOST_NUMBERS,
            charged: BTreeSet::new(),
            last: None,
            nodes,
            points: PointCounts::default(),
            reasons: BTreeMap::new(),
            unsettled: 0,
            misplaced: 0,
            bad_lines: Vec::new(),
        })
    }

    /// Why a sample cannot be one of this run.
    fn why_foreign(&self, sample: &Sample) -> Option<String> {
        let Some((sizes, rows, columns)) = &self.axes[usize::from(sample.sweep.is_pair())] else {
            return Some(format!("a point of a {} sweep, which this run has not", sample.sweep));
        };
        let Some((row, column)) = sample.cell() else {
            return Some("names no cell".to_owned());
        };
        if let Some(reason) = self.planned.why_not(sample) {
            return Some(reason);
        }
        // Probes and confirmations of other sizes are no cells of a matrix.
        if sample.phase == Phase::Blocks && !sizes.contains(&sample.bytes) {
            return Some(format!("{} is no size of this run", sample.bytes));
        }
        let outside = [(rows, row), (columns, column)].into_iter().find(|(axis, id)| {
            // Most ids are their positions or near them.
            let guess = usize::try_from(*id).ok().and_then(|at| axis.ids.get(at));
            guess != Some(id) && !axis.ids.contains(id)
        });
        outside.map(|(axis, id)| format!("{} {id} is not of this run", axis.name))
    }

    /// Where a sample goes, if into an estimate; takes the room for it.
    ///
    /// # Errors
    /// When there is no room any more.
    fn place_in_estimates(&mut self, sample: &Sample) -> Result<Option<Place>, String> {
        let is_probe = sample.phase == Phase::Probe && sample.status == PointStatus::Measured;
        if sample.sentinel || !(is_probe || sample.is_matrix_point()) {
            return Ok(None);
        }
        let memory = match sample.pinned {
            _ if sample.sweep.is_pair() => Memory::Device,
            Some(pinned) if pinned.is_pageable() => Memory::Pageable,
            Some(_) => Memory::PageLocked,
            None => Memory::Unknown,
        };
        // A point that was never started used no memory: it belongs to those that were.
        let unstarted = memory == Memory::Unknown && sample.status != PointStatus::Measured;
        let last = self.last.take_if(|last| {
            (last.key.0, last.key.2) == (sample.sweep, memory)
                && (last.block, last.is_probe, last.unstarted)
                    == (sample.block, is_probe, unstarted)
                && last.key.1 == sample.load
        });
        if last.is_some() {
            return Ok(last);
        }
        let key = (sample.sweep, sample.load.clone(), memory);
        let groups = if unstarted { &self.unstarted } else { &self.groups };
        let axes = &self.axes[usize::from(sample.sweep.is_pair())];
        let charge = (key.clone(), unstarted, sample.block);
        if let Some((sizes, rows, columns)) = axes.as_ref().filter(|_| !is_probe)
            && !self.charged.contains(&charge)
        {
            let cells = sizes.len() * rows.len() * columns.len();
            // The first block's also has its status, and what the matrix takes at the end.
            let numbers = if groups.contains_key(&key) { 1 } else { 3 };
            self.room = self.room.checked_sub(numbers * cells).ok_or_else(|| {
                format!(
                    "block {} of load {} does not fit: at most {MOST_NUMBERS} numbers are held",
                    sample.block, sample.load
                )
            })?;
            self.charged.insert(charge);
        }
        Ok(Some(Place { key, block: sample.block, is_probe, unstarted }))
    }

    /// # Errors
    /// Why the sample is not counted.
    fn add(&mut self, sample: &Sample) -> Result<(), String> {
        if let Some(reason) = self.why_foreign(sample) {
            return Err(reason);
        }
        if !self.seen.is_new(sample.seq) {
            return Err(format!("point {} was there before", sample.seq));
        }
        let place = self.place_in_estimates(sample)?;
        self.points.add(sample.status);
        self.evidence.add(sample, self.axes[usize::from(sample.sweep.is_pair())].as_ref());
        if let Some(reason) = &sample.reason
            && (self.reasons.len() < 1000 || self.reasons.contains_key(reason))
        {
            *self.reasons.entry(reason.clone()).or_insert(0) += 1;
        }
        self.unsettled += u64::from(!sample.settled);
        let home = sample.cpu.and_then(|cpu| self.nodes.get(&cpu.0));
        if let (Some(home), Some(pages)) = (home, &sample.page_nodes) {
            let elsewhere = pages.iter().any(|(node, count)| node != home && *count > 0);
            self.misplaced += u64::from(elsewhere);
            let seen = self.pages.entry(*home).or_default();
            for (node, count) in pages {
                *seen.entry(*node).or_insert(0) += u64::from(*count);
            }
        }
        let Some(place) = place else { return Ok(()) };
        if place.is_probe {
            self.probes.entry(place.key.clone()).or_default().extend(ProbeTime::of(sample));
            self.last = Some(place);
            return Ok(());
        }
        let groups = if place.unstarted { &mut self.unstarted } else { &mut self.groups };
        let Some((sizes, rows, columns)) = &self.axes[usize::from(sample.sweep.is_pair())] else {
            return Ok(());
        };
        let add = |groups: &mut Groups, sample: &Sample| match groups.get_mut(&place.key) {
            Some(group) => group.add(sample),
            None => {
                let (sweep, load) = (sample.sweep, &sample.load);
                let axes = (sizes.clone(), rows.clone(), columns.clone());
                let empty = Estimates::new(sweep, load, axes.0, axes.1, axes.2);
                groups.entry(place.key.clone()).or_insert(empty).add(sample);
            }
        };
        if let Some(times) = &sample.host_iter_ns {
            let by_host = Sample { iter_ns: times.clone(), ..sample.clone() };
            add(&mut self.host_groups, &by_host);
        }
        add(groups, sample);
        self.last = Some(place);
        Ok(())
    }
}

fn imported_axes(
    sweep: Sweep,
    sizes: Vec<cluster_health_core::ByteSize>,
    rows: &[u32],
    columns: &[u32],
    node_of_cpu: impl Fn(u32) -> Option<u32>,
    node_of_device: impl Fn(u32) -> Option<u32>,
) -> Axes {
    let (rows, columns) = if sweep.is_pair() {
        pair_axes(rows.to_vec(), columns.to_vec(), node_of_cpu)
    } else {
        let cpu_nodes = rows.iter().map(|&id| node_of_cpu(id)).collect();
        let device_nodes = columns.iter().map(|&id| node_of_device(id)).collect();
        let rows = Axis::new("cpu", rows.to_vec(), cpu_nodes);
        (rows, Axis::new("device", columns.to_vec(), device_nodes))
    };
    (sizes, rows, columns)
}

/// The summary row of one matrix; `None` when nothing was measured.
#[must_use]
pub fn summary_of(slice: &Slice<'_>) -> Option<SummaryRow> {
    let mut rates: Vec<f64> = slice.measured().collect();
    let [min, p10, median, p90, max] = quantiles(&mut rates, [0.0, 0.1, 0.5, 0.9, 1.0]);
    (!rates.is_empty()).then(|| SummaryRow {
        sweep: slice.sweep,
        bytes: slice.bytes,
        load: slice.load.to_owned(),
        rate: match slice.sweep {
            Sweep::CorePair => "per_rank",
            Sweep::Bidirectional => "per_direction",
            one_way => one_way.as_str(),
        }
        .to_owned(),
        memory: slice.memory.as_str().to_owned(),
        count: rates.len() as u64,
        min,
        p10,
        median,
        p90,
        max,
    })
}

/// The sheets that every workbook ends with.
#[cfg(feature = "xlsx")]
pub(crate) fn surroundings(
    affinity: Option<&AffinityFile>,
    manifest: &Manifest,
) -> Vec<crate::output::xlsx::Table> {
    let mut tables: Vec<_> = affinity.map(affinity_table).into_iter().collect();
    tables.push(environment_table(manifest));
    tables
}

#[cfg(feature = "xlsx")]
fn affinity_table(affinity: &AffinityFile) -> crate::output::xlsx::Table {
    use crate::output::xlsx::{Table, Value};
    let number = |value: Option<f64>| value.map_or(Value::Empty, Value::Number);
    #[allow(clippy::cast_precision_loss, reason = "ids are small")]
    let wide = |value: Option<i64>| number(value.map(|value| value as f64));
    let rows = affinity
        .cpus
        .iter()
        .map(|cpu| {
            vec![
                number(Some(f64::from(cpu.cpu.0))),
                Value::Bool(cpu.online),
                Value::Bool(cpu.allowed),
                cpu.bindable.map_or(Value::Empty, Value::Bool),
                number(cpu.numa_node.map(|node| f64::from(node.0))),
                wide(cpu.socket_id),
                wide(cpu.core_id),
                Value::Text(cpu.thread_siblings.clone()),
                cpu.reason.clone().map_or(Value::Empty, Value::Text),
            ]
        })
        .collect();
    let header = [
        "cpu",
        "online",
        "allowed",
        "bindable",
        "numa_node",
        "socket_id",
        "core_id",
        "thread_siblings",
        "reason",
    ];
    Table::new("Affinity", &header, rows)
}

#[cfg(feature = "xlsx")]
fn environment_table(manifest: &Manifest) -> crate::output::xlsx::Table {
    use crate::output::xlsx::{Table, Value};
    let mut rows = Vec::new();
    let mut push = |key: String, value: &serde_json::Value| {
        let text = match value {
            serde_json::Value::Null => return,
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        rows.push(vec![Value::Text(key), Value::Text(text)]);
    };
    push("tool version".to_owned(), &manifest.tool.version.clone().into());
    push("command".to_owned(), &manifest.command.clone().into());
    push("order".to_owned(), &manifest.order.clone().into());
    push("seed".to_owned(), &manifest.seed.into());
    let tree = |value: Result<serde_json::Value, serde_json::Error>| match value {
        Ok(serde_json::Value::Object(map)) => map,
        _ => serde_json::Map::new(),
    };
    for (key, value) in tree(serde_json::to_value(&manifest.environment)) {
        push(key, &value);
    }
    for (key, value) in tree(serde_json::to_value(&manifest.plan)) {
        for (field, value) in tree(Ok(value)) {
            push(format!("plan.{key}.{field}"), &value);
        }
    }
    for device in &manifest.devices {
        let value = serde_json::to_value(device).unwrap_or_default();
        push(format!("device {}", device.id), &value);
    }
    Table::new("Environment", &["key", "value"], rows)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use cluster_health_core::{ByteSize, CpuId, DeviceId};

    use super::*;
    use crate::run::{ImportPlan, MANIFEST, PlanRecord, SAMPLES};
    use crate::samples::{Pinned, PointStatus};

    /// A folder of 2 CPUs × 2 devices with this log.
    fn folder(samples: &[Sample]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let plan: ImportPlan = serde_json::from_value(serde_json::json!({
            "format": "csv", "sweep": "h2d", "sources": [], "scan_order_assumed": false,
            "rows": [4, 2], "columns": [0, 1], "sizes": [1000], "device_pair": null,
        }))
        .unwrap();
        let plan = PlanRecord { import: Some(plan), ..PlanRecord::default() };
        let manifest = Manifest::empty("import", plan, "blocks".to_owned());
        write_json(&dir.path().join(MANIFEST), &manifest).unwrap();
        let line = |(seq, sample): (u64, &Sample)| {
            let sample = Sample { seq, ..sample.clone() };
            serde_json::to_string(&sample).unwrap() + "\n"
        };
        let lines: String = (0..).zip(samples).map(line).collect();
        fs::write(dir.path().join(SAMPLES), lines).unwrap();
        dir
    }

    fn sample(cpu: u32, device: u32, time: u64) -> Sample {
        let mut sample = Sample::new(0, Sweep::H2d, ByteSize(1000));
        (sample.cpu, sample.device) = (Some(CpuId(cpu)), Some(DeviceId(device)));
        sample.iter_ns = vec![time];
        sample
    }

    #[test]
    fn pageable_and_page_locked_results_never_meet() {
        let held = |pinned, time| {
            let mut sample = sample(2, 1, time);
            sample.pinned = Some(pinned);
            sample
        };
        let dir = folder(&[
            held(Pinned::Pinned, 100),
            held(Pinned::Registered, 100),
            held(Pinned::Pageable, 400),
        ]);
        let report = Report::read(dir.path()).unwrap();
        let rows = report.manifest.summary.iter();
        let rows: Vec<String> =
            rows.map(|row| format!("{} {} {:.3}", row.memory, row.count, row.median)).collect();
        assert_eq!(rows, ["page_locked 1 10.000", "pageable 1 2.500"]);
        let stems: Vec<String> =
            report.matrices.iter().flat_map(Matrix::slices).map(|slice| slice.stem()).collect();
        assert_eq!(stems, ["h2d-1000B", "h2d-1000B-pageable"]);
    }

    #[test]
    fn what_is_predicted_has_files_of_its_own_and_is_in_no_other_number() {
        let measured = [sample(4, 0, 100), sample(4, 1, 100), sample(2, 0, 200)];
        let dir = folder(&measured);
        let mut report = Report::read(dir.path()).unwrap();
        report.write(dir.path(), &ReportOptions::default()).unwrap();
        let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
        let files = ["h2d-1000B.csv", "h2d-1000B.npy", CALIBRATION, PLACEMENT];
        let before = files.map(read);
        let summary = report.manifest.summary.clone();
        let text = String::from_utf8(read("report.md")).unwrap();
        assert!(text.contains("1 cells have no number") && !text.contains("predicted"), "{text}");
        assert!(!dir.path().join("h2d-1000B-predicted.csv").exists());

        let mut prediction = crate::matrix::Prediction::new((1, 2, 2));
        // Rows as planned: CPU 4, CPU 2.
        prediction.gbps[[0, 1, 1]] = 7.5;
        prediction.error[[0, 1, 1]] = 0.034;
        report.matrices[0].predicted = Some(prediction);
        report.write(dir.path(), &ReportOptions::default()).unwrap();
        assert_eq!(before, files.map(read));
        assert_eq!(summary, report.manifest.summary);
        let csv = |name: &str| String::from_utf8(read(name)).unwrap();
        assert_eq!(csv("h2d-1000B-predicted.csv"), "cpu,0,1\n4,10,10\n2,5,7.5\n");
        assert_eq!(csv("h2d-1000B-error.csv"), "cpu,0,1\n4,,\n2,,0.034\n");
        assert!(read("h2d-1000B-predicted.npy").ends_with(&7.5_f64.to_le_bytes()));
        assert!(read("h2d-1000B-error.npy").ends_with(&f64::from(0.034_f32).to_le_bytes()));
        let text = String::from_utf8(read("report.md")).unwrap();
        for part in [
            "h2d-1000B: 3 of 4 cells were measured (75.0 %), 1 are predicted with a median error of \
             ± 3.4 % (95 %)",
            "No finding rests on predicted cells",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("have no number"), "{text}");
    }

    #[test]
    fn pairs_use_no_host_memory() {
        let axis = |name| Axis::new(name, vec![0], vec![None]);
        let mut matrix =
            Matrix::new(Sweep::CorePair, "idle", vec![ByteSize(8)], axis("a"), axis("b"));
        matrix.gbps.fill(1.0);
        matrix.status.fill(crate::matrix::CellStatus::Measured);
        let memory: Vec<String> =
            matrix.slices().filter_map(|slice| summary_of(&slice)).map(|row| row.memory).collect();
        assert_eq!(memory, ["device"]);
    }

    #[test]
    fn reasons_are_counted_and_damaged_lines_told() {
        let mut skipped = sample(4, 0, 1);
        (skipped.status, skipped.reason) = (PointStatus::Skipped, Some("offline".to_owned()));
        skipped.iter_ns.clear();
        let mut unsettled = sample(2, 0, 100);
        unsettled.settled = false;
        let dir = folder(&[skipped.clone(), unsettled, skipped]);
        let path = dir.path().join(SAMPLES);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text + "[]\n{\"seq\":").unwrap();

        let report = Report::read(dir.path()).unwrap();
        assert_eq!(report.reasons, [("offline".to_owned(), 2)].into());
        assert_eq!(report.unsettled, 1);
        let points = report.manifest.points;
        assert_eq!((points.measured, points.skipped), (1, 2));
        let places: Vec<&str> = report.bad_lines.iter().map(|line| &line[..7]).collect();
        assert_eq!(places, ["line 4:", "line 5:"]);
    }

    #[test]
    fn what_another_run_measured_and_what_comes_twice_is_told_and_left_out() {
        let dir = folder(&[sample(4, 0, 100), sample(2, 0, 100), sample(4, 1, 100)]);
        let path = dir.path().join(SAMPLES);
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let pair = lines[1].replace("\"h2d\"", "\"core_pair\"");
        let cpu = lines[1].replace("\"cpu\":2", "\"cpu\":3");
        let size = lines[1].replace("1000", "1001");
        for foreign in [&pair, &cpu, &size] {
            assert_ne!(foreign, lines[1]);
        }
        // Backwards, the first line again at the end.
        let mixed = [lines[2], &pair, lines[1], &cpu, lines[0], &size, lines[2]];
        fs::write(&path, mixed.join("\n") + "\n").unwrap();
        let report = Report::read(dir.path()).unwrap();
        assert_eq!(report.manifest.points.measured, 3);
        assert_eq!(report.matrices[0].gbps.iter().filter(|rate| !rate.is_nan()).count(), 3);
        let told = [
            "line 2: a point of a core_pair sweep, which this run has not",
            "line 4: cpu 3 is not of this run",
            "line 6: 1001B is no size of this run",
            "line 7: point 2 was there before",
        ];
        assert_eq!(report.bad_lines, told);
    }

    #[test]
    fn f17_what_is_too_fast_changes_the_counts_too() {
        let mut samples = Vec::new();
        for block in 0..3 {
            for (cpu, device) in [(4, 0), (4, 1), (2, 0), (2, 1)] {
                let mut sample = sample(cpu, device, 100);
                sample.block = block;
                samples.push(sample);
            }
        }
        samples[7].iter_ns = vec![1];
        let report = Report::read(folder(&samples).path()).unwrap();
        let points = report.manifest.points;
        assert_eq!((points.measured, points.implausible), (11, 1));
        assert_eq!(report.manifest.summary[0].count, 4, "the other blocks measured the cell");
        assert_eq!(report.reasons.len(), 1);
    }

    #[test]
    fn blocks_and_loads_of_a_log_cannot_claim_all_memory() {
        let dir = folder(&[]);
        let manifest = Manifest::read(dir.path()).unwrap();
        let mut gathering =
            Gathering::new(&manifest, BTreeMap::new(), BTreeMap::new(), "test").unwrap();
        // 4 cells: 12 numbers for a matrix and its first block, 4 for each further one.
        gathering.room = 12 + 4 + 12;
        let mut seq = 0;
        let mut add = |load: &str, block| {
            let mut sample = Sample::new(seq, Sweep::H2d, ByteSize(1000));
            (sample.cpu, sample.device) = (Some(CpuId(4)), Some(DeviceId(0)));
            (sample.load, sample.block, sample.iter_ns) = (load.to_owned(), block, vec![10]);
            sample.host_iter_ns = Some(vec![11]);
            seq += 1;
            gathering.add(&sample)
        };
        for (load, block) in [("idle", 7), ("idle", 7), ("idle", u32::MAX), ("cpu:1", 0)] {
            assert_eq!(add(load, block), Ok(()), "{load} {block}");
        }
        let error = add("idle", 8).unwrap_err();
        assert_eq!(error, "block 8 of load idle does not fit: at most 134217728 numbers are held");
        assert!(add("cpu:1", 1).is_err() && add("cpu:2", 0).is_err());
        assert_eq!(add("cpu:1", 0), Ok(()));
        // Points without a time take room once, not each.
        for (seq, block) in (100..).zip([7, 0, 7, 0, 7, 0]) {
            let mut sample = Sample::new(seq, Sweep::H2d, ByteSize(1000));
            (sample.cpu, sample.device) = (Some(CpuId(4)), Some(DeviceId(0)));
            let load = if block == 7 { "idle" } else { "cpu:1" };
            (sample.load, sample.block) = (load.to_owned(), block);
            (sample.status, sample.reason) = (PointStatus::Failed, Some("no".to_owned()));
            sample.pinned = None;
            let unstarted_room = if seq < 102 { 12 } else { 0 };
            gathering.room += unstarted_room;
            assert_eq!(gathering.add(&sample), Ok(()), "{seq}");
        }
        assert_eq!((gathering.points.measured, gathering.room), (5, 0));
    }

    #[test]
    fn a_folder_without_a_number_has_no_summary() {
        let report = Report::read(folder(&[]).path()).unwrap();
        assert!(report.manifest.summary.is_empty() && report.matrices.is_empty());
        assert_eq!(report.manifest.points, PointCounts::default());
    }
}
