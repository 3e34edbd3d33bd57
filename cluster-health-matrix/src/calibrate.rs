//! `calibration.json`: what a run measured as numbers for cost models.
//!
//! | field | axes and unit |
//! |---|---|
//! | `h2d_gbps_by_core_device` | matrices CPU × device, decimal GB/s |
//! | `d2d_alg_gbps_by_core_pair` | matrices rank-0 CPU × rank-1 CPU, algorithm bandwidth n·S/t, decimal GB/s |
//! | `affinity_bindable_cpus` | ids; null = unknown |
//! | `run` | where and how they were measured, so that a later run knows what it may compare |
//! | `load_profile_delta` | rate under load ÷ idle rate by class of cells; null = one load |
//! | `h2d_alpha_beta`, `pair_alpha_beta` | t = α + S/β by (NUMA node, device), by kind of pair |
//!
//! α and β are fitted block by block to the median times of the class at each size, weighted by
//! relative error (1/t²); the values are the means over the blocks, the standard errors theirs.
//! Probes count as a size. Where device events timed the copies, α comes from the host clock, which
//! has the submission in it, and β from the events.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use cluster_health_core::ByteSize;
use ndarray::{Array2, Array3, ArrayView2, Axis as Dimension};
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Serialize, Serializer};

use crate::blocks::Blocks;
use crate::classes::{ClassId, PAIR_CLASSES, PairClasses, of_axes};
use crate::compare::{Logs, Ratio};
use crate::matrix::Matrix;
use crate::report::Report;
use crate::run::{AffinityFile, Manifest, RunStatus, SCHEMA_VERSION, Tool};
use crate::samples::Sweep;
use crate::stats::median;
use crate::student::{Contrast, mean_and_spread, to_f64};

/// Name of the file.
pub const CALIBRATION: &str = "calibration.json";

/// Ranks of a pair.
const RANKS: f64 = 2.0;

/// The content of `calibration.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Calibration {
    /// Version of the file.
    pub schema_version: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// What the numbers mean.
    pub conventions: Conventions,
    /// What was measured, and how it ended.
    pub run: Origin,
    /// Host to device copies.
    pub h2d_gbps_by_core_device: Vec<Rates>,
    /// All-gathers of two ranks.
    pub d2d_alg_gbps_by_core_pair: PairRates,
    /// CPUs that could be bound; `None` when the run has no census that tried.
    pub affinity_bindable_cpus: Option<Vec<u32>>,
    /// Rates under load against those of the idle machine; `None` when one load was measured.
    pub load_profile_delta: Option<Vec<LoadDelta>>,
    /// Fixed cost and rate of copies, per NUMA node of the CPU and device.
    pub h2d_alpha_beta: Vec<CopyCost>,
    /// Fixed cost and rate of all-gathers of two ranks, per kind of pair; S is bytes per rank.
    pub pair_alpha_beta: Vec<PairCost>,
}

/// The run that the numbers come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Origin {
    /// `host`, `ascend`, `synthetic`; empty for an import.
    pub backend: String,
    /// Host name; `None` for a synthetic machine and imports.
    pub host: Option<String>,
    /// Processor model.
    pub cpu_model: Option<String>,
    /// Present CPUs; `None` without a census.
    pub cpus: Option<usize>,
    /// NUMA nodes of the CPUs; `None` without a census.
    pub numa_nodes: Option<usize>,
    /// Device names by physical id, unavailable ones included.
    pub devices: BTreeMap<u32, String>,
    /// True when every point of its plan was visited.
    pub complete: bool,
    /// How it was judged.
    pub verdict: Option<String>,
    /// UTC, RFC 3339.
    pub start: Option<String>,
}

impl Origin {
    /// What a run's manifest and census say.
    #[must_use]
    pub fn of(manifest: &Manifest, affinity: Option<&AffinityFile>) -> Self {
        let devices = &manifest.devices;
        Self {
            backend: manifest.environment.backend.clone(),
            host: manifest.environment.hostname.clone(),
            cpu_model: manifest.environment.cpu_model.clone(),
            cpus: affinity.map(|file| file.cpus.len()),
            numa_nodes: affinity.map(|file| {
                let nodes: BTreeSet<u32> = file.nodes().into_values().collect();
                nodes.len()
            }),
            devices: devices.iter().map(|device| (device.id, device.name.clone())).collect(),
            complete: manifest.status == RunStatus::Complete,
            verdict: manifest.verdict.clone(),
            start: manifest.segments.first().map(|segment| segment.start.clone()),
        }
    }
}

/// Units and conventions, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Conventions {
    /// Of every field with gbps in its name.
    pub gbps: &'static str,
    /// Of every field with bytes in its name, and of sizes.
    pub bytes: &'static str,
    /// Of every field with us in its name.
    pub us: &'static str,
    /// What null stands for.
    pub null: &'static str,
    /// The model behind alpha and beta.
    pub alpha_beta: &'static str,
    /// Of fields with se in their name.
    pub se: &'static str,
    /// Which devices ids name.
    pub device: &'static str,
}

const CONVENTIONS: Conventions = Conventions {
    gbps: "decimal, 1e9 bytes per second",
    bytes: "exact; per copy, per rank in collectives",
    us: "microseconds",
    null: "not measured, or not known",
    alpha_beta: "t = alpha + S/beta, S bytes per copy (per rank in collectives), fitted with weights 1/t²",
    se: "standard error, from between blocks",
    device: "physical id",
};

/// What the rates of pairs are called.
const ALGORITHM_BANDWIDTH: &str =
    "algorithm bandwidth = n·S/t, n = 2 ranks, S = bytes per rank, t = the slower rank";

/// One matrix of rates.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Rates {
    /// Load profile.
    pub load: String,
    /// Kind of memory, as in `run.json`.
    pub memory: &'static str,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// What timed them: `host`, or `event` of the devices.
    pub clock: &'static str,
    /// Blocks that visited half of the measured cells or more.
    pub blocks: usize,
    /// Standard deviation between those blocks of their mean rate over the cells, as a share of it; NaN (null)
    /// with fewer than two.
    pub block_sd: f64,
    /// What rows and columns are.
    pub axes: [&'static str; 2],
    /// Ids of the rows.
    #[serde(serialize_with = "on_one_line")]
    pub rows: Vec<u32>,
    /// Ids of the columns.
    #[serde(serialize_with = "on_one_line")]
    pub columns: Vec<u32>,
    /// rows × columns, decimal GB/s, NaN (null) = not measured; six decimals in the file.
    #[serde(serialize_with = "row_by_row")]
    pub gbps: Array2<f64>,
}

/// Matrices of pairs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PairRates {
    /// What the rates are.
    pub convention: &'static str,
    /// Devices of rank 0 and rank 1.
    pub device_pair: Option<[u32; 2]>,
    /// One per size and load.
    pub matrices: Vec<Rates>,
}

/// Rates of a class of cells under a load ÷ those of the idle machine, from paired blocks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadDelta {
    /// What was measured.
    pub sweep: Sweep,
    /// Kind of memory, as in `run.json`.
    pub memory: &'static str,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// The load.
    pub load: String,
    /// The load that it is compared with.
    pub baseline: String,
    /// `all`, `device`, `numa_node`, `pair_class`, `rank0_numa_node`, `rank1_numa_node`.
    pub axis: &'static str,
    /// Which one of the axis; `None` for all cells.
    pub id: Option<ClassId>,
    /// Number of pairs of blocks.
    pub blocks: usize,
    /// Geometric mean over the cells with its 95 % interval.
    #[serde(flatten)]
    pub ratio: Ratio,
}

/// t = α + S/β of a class.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AlphaBeta {
    /// Fixed cost α, microseconds; NaN (null) when it is not identified.
    pub alpha_us: f64,
    /// Its standard error; NaN (null) with one block.
    pub alpha_se_us: f64,
    /// Asymptotic rate β, decimal GB/s; NaN (null) when time does not grow with bytes.
    pub beta_gbps: f64,
    /// Its standard error; NaN (null) with one block.
    pub beta_se_gbps: f64,
    /// False when α's standard error is unknown or exceeds it.
    pub alpha_identified: bool,
    /// Sizes of the fit, ascending.
    #[serde(serialize_with = "on_one_line")]
    pub sizes: Vec<ByteSize>,
    /// Blocks of the fit.
    pub blocks: usize,
    /// Root mean square of the relative residuals of the mean times; NaN (null) with two sizes,
    /// which leave none.
    pub residual: f64,
    /// What limits the fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl AlphaBeta {
    /// Takes α from the fit to host times: events hide the submission, which is part of it.
    pub(crate) fn take_alpha(&mut self, host: &Self) {
        self.alpha_us = host.alpha_us;
        self.alpha_se_us = host.alpha_se_us;
        self.alpha_identified = host.alpha_identified;
        let told = self.note.take().map(|note| note + "; ").unwrap_or_default();
        self.note = Some(told + "alpha by the host clock, beta by device events");
    }
}

/// Cost of copies from a class of cores to a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CopyCost {
    /// Load profile.
    pub load: String,
    /// Kind of memory, as in `run.json`.
    pub memory: &'static str,
    /// Core class: NUMA node of the CPU; `None` = unknown.
    pub numa_node: Option<u32>,
    /// Physical id.
    pub device: u32,
    /// The fit.
    #[serde(flatten)]
    pub fit: AlphaBeta,
}

/// Cost of all-gathers of two ranks of a kind of pair.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PairCost {
    /// Load profile.
    pub load: String,
    /// `same_cpu`, `smt_sibling`, `same_node`, `other_node`.
    pub pair_class: &'static str,
    /// The fit.
    #[serde(flatten)]
    pub fit: AlphaBeta,
}

fn on_one_line<T: Serialize, S: Serializer>(values: &T, serializer: S) -> Result<S::Ok, S::Error> {
    let text = serde_json::value::to_raw_value(values).map_err(serde::ser::Error::custom)?;
    text.serialize(serializer)
}

fn row_by_row<S: Serializer>(rates: &Array2<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    let mut rows = serializer.serialize_seq(Some(rates.nrows()))?;
    for row in rates.rows() {
        // More digits than any clock resolves would only make the file larger.
        let row: Vec<f64> = row.iter().map(|rate| (rate * 1e6).round() / 1e6).collect();
        let text = serde_json::value::to_raw_value(&row).map_err(serde::ser::Error::custom)?;
        rows.serialize_element(&text)?;
    }
    rows.end()
}

impl Calibration {
    /// The calibration of a run.
    #[must_use]
    pub fn of(report: &Report) -> Self {
        let cores = report.affinity.as_ref().map(AffinityFile::cores).unwrap_or_default();
        let plan = &report.manifest.plan;
        let device_pair = plan
            .core_pair
            .as_ref()
            .map(|plan| plan.device_pair.map(|device| device.0))
            .or_else(|| plan.import.as_ref()?.device_pair);
        // A cost model wants the link that nothing else uses.
        let is_shared = plan.is_concurrent();
        let is_meant = move |sweep: Sweep| sweep.is_pair() || (sweep == Sweep::H2d && !is_shared);
        let of_sweep = |sweep: Sweep, factor: f64| -> Vec<Rates> {
            let is_wanted = move |matrix: &Matrix| matrix.sweep == sweep && is_meant(sweep);
            let matrices = report.matrices.iter().zip(&report.blocks);
            let wanted = matrices.filter(|(matrix, _)| is_wanted(matrix));
            wanted.flat_map(move |(matrix, blocks)| rates(matrix, blocks, factor)).collect()
        };
        let mut copies = Vec::new();
        let mut pairs = Vec::new();
        for (matrix, blocks) in report.matrices.iter().zip(&report.blocks) {
            match matrix.sweep {
                Sweep::H2d if is_meant(Sweep::H2d) => copies.extend(copy_costs(matrix, blocks)),
                Sweep::CorePair => pairs.extend(pair_costs(matrix, blocks, &cores)),
                Sweep::H2d | Sweep::D2h | Sweep::Bidirectional => {}
            }
        }
        Self {
            schema_version: SCHEMA_VERSION,
            tool: report.manifest.tool.clone(),
            conventions: CONVENTIONS,
            run: Origin::of(&report.manifest, report.affinity.as_ref()),
            h2d_gbps_by_core_device: of_sweep(Sweep::H2d, 1.0),
            d2d_alg_gbps_by_core_pair: PairRates {
                convention: ALGORITHM_BANDWIDTH,
                device_pair,
                matrices: of_sweep(Sweep::CorePair, RANKS),
            },
            affinity_bindable_cpus: report.affinity.as_ref().and_then(bindable),
            load_profile_delta: load_deltas(report, &cores),
            h2d_alpha_beta: copies,
            pair_alpha_beta: pairs,
        }
    }

    /// Writes it as JSON with one line per row of a matrix.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        out.write_all(b"\n")
    }
}

fn bindable(affinity: &AffinityFile) -> Option<Vec<u32>> {
    affinity.cpus.iter().any(|cpu| cpu.bindable.is_some()).then(|| {
        let can = affinity.cpus.iter().filter(|cpu| cpu.bindable == Some(true));
        can.map(|cpu| cpu.cpu.0).collect()
    })
}

fn rates(matrix: &Matrix, blocks: &Blocks, factor: f64) -> impl Iterator<Item = Rates> {
    matrix.slices().enumerate().map(move |(size, slice)| {
        let means = block_means(&slice.gbps, blocks, size);
        let (_, spread) = mean_and_spread(&means);
        Rates {
            load: slice.load.to_owned(),
            memory: slice.memory.as_str(),
            bytes: slice.bytes,
            clock: clock_of(blocks),
            blocks: means.len(),
            block_sd: spread.variance.sqrt(),
            axes: [slice.rows.name, slice.columns.name],
            rows: slice.rows.ids.clone(),
            columns: slice.columns.ids.clone(),
            gbps: slice.gbps.mapv(|rate| rate * factor),
        }
    })
}

/// The word for what timed a matrix.
pub(crate) fn clock_of(blocks: &Blocks) -> &'static str {
    if blocks.host_gbps.is_empty() { "host" } else { "event" }
}

/// By block, the mean logarithm of the rates against `reference` (rows × columns, NaN = none); only blocks
/// that visited half of its cells or more, because a mean over few other cells is another quantity.
pub(crate) fn block_means(
    reference: &ArrayView2<'_, f64>,
    blocks: &Blocks,
    size: usize,
) -> Vec<f64> {
    let cells = reference.iter().filter(|rate| rate.is_finite()).count();
    let mean = |block: &Array3<f64>| {
        let logs: Vec<f64> = block
            .index_axis(Dimension(0), size)
            .iter()
            .zip(reference)
            .map(|(rate, reference)| (rate / reference).ln())
            .filter(|log| log.is_finite())
            .collect();
        (2 * logs.len() >= cells.max(1)).then(|| logs.iter().sum::<f64>() / to_f64(logs.len()))
    };
    blocks.gbps.iter().filter_map(mean).collect()
}

/// Times of every class by size and block.
struct Times {
    sizes: Vec<ByteSize>,
    blocks: usize,
    /// (class × sizes + size) × blocks + block; nanoseconds.
    ns: Vec<Vec<f64>>,
}

/// Gathers the times of a matrix and its probes by class of cell; `by_host` takes the host clock.
fn times(
    matrix: &Matrix,
    blocks: &Blocks,
    classes: usize,
    by_host: bool,
    class_of: &dyn Fn(usize, usize) -> Option<usize>,
) -> Times {
    let mut sizes = matrix.sizes.clone();
    sizes.extend(blocks.probes.iter().map(|probe| probe.bytes));
    sizes.sort_unstable();
    sizes.dedup();
    let count = blocks.len();
    let mut ns = vec![Vec::new(); classes * sizes.len() * count];
    let place = |class: usize, bytes: ByteSize, block: usize| {
        let size = sizes.binary_search(&bytes).unwrap_or_default();
        (class * sizes.len() + size) * count + block
    };
    let kept = if by_host { &blocks.host_gbps } else { &blocks.gbps };
    for (block, rates) in kept.iter().enumerate().take(count) {
        for (slice, bytes) in rates.axis_iter(Dimension(0)).zip(&matrix.sizes) {
            for ((row, column), rate) in slice.indexed_iter() {
                if rate.is_finite()
                    && let Some(class) = class_of(row, column)
                {
                    ns[place(class, *bytes, block)].push(bytes_f64(*bytes) / rate);
                }
            }
        }
    }
    let index = |ids: &[u32]| -> BTreeMap<u32, usize> {
        ids.iter().enumerate().map(|(at, id)| (*id, at)).collect()
    };
    let (rows, columns) = (index(&matrix.rows.ids), index(&matrix.columns.ids));
    for probe in &blocks.probes {
        let cell = rows.get(&probe.row).zip(columns.get(&probe.column));
        if let Some((row, column)) = cell
            && let Some(class) = class_of(*row, *column)
            && let Ok(block) = blocks.numbers.binary_search(&probe.block)
        {
            let time = if by_host { probe.host_ns } else { probe.ns };
            ns[place(class, probe.bytes, block)].push(time);
        }
    }
    Times { sizes, blocks: count, ns }
}

fn bytes_f64(bytes: ByteSize) -> f64 {
    crate::stats::to_f64(bytes.bytes())
}

impl Times {
    /// The fit of a class to its median times by size and block.
    fn fit(&mut self, class: usize) -> Option<AlphaBeta> {
        let sizes = self.sizes.len();
        let medians = Array2::from_shape_fn((sizes, self.blocks), |(size, block)| {
            median(&mut self.ns[(class * sizes + size) * self.blocks + block])
        });
        fit(&self.sizes, &medians)
    }
}

/// Least squares of t = α + S·slope with weights 1/t²; nanoseconds and nanoseconds per byte.
pub(crate) fn line(sizes: &[ByteSize], times: &[f64]) -> (f64, f64) {
    let (mut w, mut wx, mut wxx, mut wt, mut wxt) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (bytes, time) in sizes.iter().zip(times) {
        let (x, weight) = (bytes_f64(*bytes), 1.0 / (time * time));
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wt += weight * time;
        wxt += weight * x * time;
    }
    let determinant = w * wxx - wx * wx;
    ((wxx * wt - wx * wxt) / determinant, (w * wxt - wx * wt) / determinant)
}

/// Values over blocks: mean and its standard error.
fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let (mean, spread) = mean_and_spread(values);
    (mean, (spread.variance / spread.count).sqrt())
}

/// The fit of one class from its median times (sizes × blocks); `None` below two sizes.
pub(crate) fn fit(sizes: &[ByteSize], times: &Array2<f64>) -> Option<AlphaBeta> {
    // A size that few blocks have (probes of a rare kind of pair) must not cost the others their
    // blocks.
    let most = times.rows().into_iter().map(|row| finite(row.iter())).max()?;
    let used: Vec<usize> =
        (0..sizes.len()).filter(|size| 2 * finite(times.row(*size).iter()) > most).collect();
    let blocks: Vec<Vec<f64>> = times
        .columns()
        .into_iter()
        .map(|column| used.iter().map(|size| column[*size]).collect::<Vec<f64>>())
        .filter(|block| block.iter().all(|time| time.is_finite()))
        .collect();
    if used.len() < 2 || blocks.is_empty() {
        return None;
    }
    let sizes: Vec<ByteSize> = used.iter().map(|size| sizes[*size]).collect();
    let lines: Vec<(f64, f64)> = blocks.iter().map(|block| line(&sizes, block)).collect();
    let (alpha, alpha_error) = mean_and_error(&lines.iter().map(|line| line.0).collect::<Vec<_>>());
    let (slope, slope_error) = mean_and_error(&lines.iter().map(|line| line.1).collect::<Vec<_>>());
    let mut notes = Vec::new();
    let residual = if sizes.len() > 2 {
        let square = |(at, bytes): (usize, &ByteSize)| {
            let mean = blocks.iter().map(|block| block[at]).sum::<f64>() / to_f64(blocks.len());
            ((mean - alpha - slope * bytes_f64(*bytes)) / mean).powi(2)
        };
        (sizes.iter().enumerate().map(square).sum::<f64>() / to_f64(sizes.len())).sqrt()
    } else {
        notes.push("two sizes leave no residual".to_owned());
        f64::NAN
    };
    let identified = alpha_error <= alpha.abs();
    if blocks.len() < 2 {
        notes.push("one block: no standard errors".to_owned());
    }
    if !identified {
        notes.push(format!(
            "alpha not identified: {:.3} ± {:.3} us",
            alpha / 1e3,
            alpha_error / 1e3
        ));
    }
    if slope <= 0.0 {
        notes.push("time does not grow with bytes".to_owned());
    }
    let beta = if slope > 0.0 { 1.0 / slope } else { f64::NAN };
    Some(AlphaBeta {
        alpha_us: if identified { alpha / 1e3 } else { f64::NAN },
        alpha_se_us: alpha_error / 1e3,
        beta_gbps: beta,
        beta_se_gbps: beta * beta * slope_error,
        alpha_identified: identified,
        sizes,
        blocks: blocks.len(),
        residual,
        note: (!notes.is_empty()).then(|| notes.join("; ")),
    })
}

fn finite<T: Borrow<f64>>(values: impl Iterator<Item = T>) -> usize {
    values.filter(|value| value.borrow().is_finite()).count()
}

/// The fits of all classes.
fn fits(
    matrix: &Matrix,
    blocks: &Blocks,
    classes: usize,
    class_of: &dyn Fn(usize, usize) -> Option<usize>,
) -> Vec<Option<AlphaBeta>> {
    let mut by_matrix = times(matrix, blocks, classes, false, class_of);
    let mut by_host =
        (!blocks.host_gbps.is_empty()).then(|| times(matrix, blocks, classes, true, class_of));
    (0..classes)
        .map(|class| {
            let mut found = by_matrix.fit(class)?;
            if let Some(host) = by_host.as_mut().and_then(|host| host.fit(class)) {
                found.take_alpha(&host);
            }
            Some(found)
        })
        .collect()
}

fn copy_costs(matrix: &Matrix, blocks: &Blocks) -> Vec<CopyCost> {
    let mut nodes = matrix.rows.nodes.clone();
    nodes.sort_unstable();
    nodes.dedup();
    let of_row: Vec<Option<usize>> =
        matrix.rows.nodes.iter().map(|node| nodes.binary_search(node).ok()).collect();
    let devices = matrix.columns.len();
    let class_of = |row: usize, column: usize| Some(of_row[row]? * devices + column);
    fits(matrix, blocks, nodes.len() * devices, &class_of)
        .into_iter()
        .enumerate()
        .filter_map(|(class, fit)| {
            Some(CopyCost {
                load: matrix.load.clone(),
                memory: matrix.memory.as_str(),
                numa_node: nodes[class / devices],
                device: matrix.columns.ids[class % devices],
                fit: fit?,
            })
        })
        .collect()
}

fn pair_costs(matrix: &Matrix, blocks: &Blocks, cores: &BTreeMap<u32, u32>) -> Vec<PairCost> {
    let classes = PairClasses::new(&matrix.rows, &matrix.columns, cores);
    fits(matrix, blocks, PAIR_CLASSES.len(), &|row, column| classes.of(row, column))
        .into_iter()
        .zip(PAIR_CLASSES)
        .filter_map(|(fit, pair_class)| {
            Some(PairCost { load: matrix.load.clone(), pair_class, fit: fit? })
        })
        .collect()
}

/// Every load against the idle machine (else the first load) of the same sweep and memory.
fn load_deltas(report: &Report, cores: &BTreeMap<u32, u32>) -> Option<Vec<LoadDelta>> {
    let all = || {
        let all = report.matrices.iter().zip(&report.blocks);
        all.filter(|(matrix, _)| matches!(matrix.sweep, Sweep::H2d | Sweep::CorePair))
    };
    let mut loads: Vec<&str> = all().map(|(matrix, _)| matrix.load.as_str()).collect();
    loads.sort_unstable();
    loads.dedup();
    if loads.len() < 2 {
        return None;
    }
    let baseline = if loads.contains(&"idle") { "idle" } else { loads[0] };
    let mut deltas = Vec::new();
    for (matrix, blocks) in all().filter(|(matrix, _)| matrix.load != baseline) {
        let idle = all().find(|(other, _)| {
            other.load == baseline && other.sweep == matrix.sweep && other.memory == matrix.memory
        });
        if let Some(idle) = idle {
            deltas.extend(deltas_of((matrix, blocks), idle, cores));
        }
    }
    Some(deltas)
}

fn deltas_of(
    (matrix, blocks): (&Matrix, &Blocks),
    (idle, idle_blocks): (&Matrix, &Blocks),
    cores: &BTreeMap<u32, u32>,
) -> Vec<LoadDelta> {
    let mut deltas = Vec::new();
    let axes = of_axes(matrix.sweep, &matrix.rows, &matrix.columns, cores);
    let rows: Vec<usize> = (0..matrix.rows.len()).collect();
    let columns: Vec<usize> = (0..matrix.columns.len()).collect();
    // One run, one plan: both have the same axes and sizes.
    for (size, bytes) in matrix.sizes.iter().enumerate() {
        let loaded = Logs::of(matrix, blocks, size, &rows, &columns);
        let base = Logs::of(idle, idle_blocks, size, &rows, &columns);
        let differences: Vec<Array2<f64>> =
            loaded.blocks.iter().zip(&base.blocks).map(|(loaded, base)| loaded - base).collect();
        let mut push = |axis, id, series: &[f64]| {
            let contrast = Contrast::paired(series);
            if contrast.difference.is_finite() {
                deltas.push(LoadDelta {
                    sweep: matrix.sweep,
                    memory: matrix.memory.as_str(),
                    bytes: *bytes,
                    load: matrix.load.clone(),
                    baseline: idle.load.clone(),
                    axis,
                    id,
                    blocks: series.iter().filter(|value| value.is_finite()).count(),
                    ratio: Ratio::of(&contrast),
                });
            }
        };
        let whole: Vec<f64> = differences
            .iter()
            .map(|block| {
                let count = finite(block.iter());
                block.iter().filter(|value| value.is_finite()).sum::<f64>() / to_f64(count)
            })
            .collect();
        push("all", None, &whole);
        for axis in axes.iter().filter(|axis| !axis.is_fine) {
            let means: Vec<Vec<(f64, usize)>> =
                differences.iter().map(|block| axis.means(block)).collect();
            for (class, id) in axis.ids.iter().enumerate() {
                let series: Vec<f64> = means.iter().map(|means| means[class].0).collect();
                push(axis.name, Some(*id), &series);
            }
        }
    }
    deltas
}

#[cfg(test)]
mod tests {
    use std::fs;

    use cluster_health_core::{CpuId, DeviceId};

    use super::*;
    use crate::run::{MANIFEST, PlanRecord, SAMPLES, write_json};
    use crate::samples::Sample;

    fn close(a: f64, b: f64, relative: f64) -> bool {
        (a - b).abs() <= relative * b.abs()
    }

    /// α 12 µs and β 50 GB/s: 1 MB takes 12,000 + 20,000 ns.
    fn time(bytes: f64) -> f64 {
        12_000.0 + bytes / 50.0
    }

    #[test]
    fn a_line_without_noise_is_found() {
        let sizes = [ByteSize(65_536), ByteSize(1_000_000), ByteSize(64_000_000)];
        let times = Array2::from_shape_fn((3, 2), |(size, _)| time(bytes_f64(sizes[size])));
        let found = fit(&sizes, &times).unwrap();
        assert!(close(found.alpha_us, 12.0, 1e-9) && close(found.beta_gbps, 50.0, 1e-9));
        assert!(found.alpha_se_us < 1e-9 && found.residual < 1e-12 && found.alpha_identified);
        assert_eq!((found.blocks, found.note), (2, None));
    }

    #[test]
    fn errors_come_from_between_blocks() {
        // α is 10, 12 and 14 µs in three blocks: mean 12, standard error 2 ÷ √3.
        let sizes = [ByteSize(0), ByteSize(50_000_000)];
        let alphas = [10_000.0, 12_000.0, 14_000.0];
        let times = Array2::from_shape_fn((2, 3), |(size, block)| {
            alphas[block] + bytes_f64(sizes[size]) / 50.0
        });
        let found = fit(&sizes, &times).unwrap();
        assert!(close(found.alpha_us, 12.0, 1e-9) && close(found.beta_gbps, 50.0, 1e-9));
        assert!(close(found.alpha_se_us, 2.0 / 3.0_f64.sqrt(), 1e-9));
        assert!(found.residual.is_nan());
        assert_eq!(found.note.unwrap(), "two sizes leave no residual");
    }

    #[test]
    fn a_fixed_cost_smaller_than_its_error_is_not_told() {
        let sizes = [ByteSize(1_000_000), ByteSize(50_000_000)];
        let alphas = [-20_000.0, 1_000.0, 20_000.0];
        let times =
            Array2::from_shape_fn((2, 3), |(size, block)| alphas[block] + bytes_f64(sizes[size]));
        let found = fit(&sizes, &times).unwrap();
        assert!(found.alpha_us.is_nan() && !found.alpha_identified);
        assert!(found.note.unwrap().contains("alpha not identified: 0.333 ± "));
        let one = Array2::from_elem((1, 3), 1_000.0);
        assert!(fit(&sizes[..1], &one).is_none());
    }

    #[test]
    fn a_size_of_few_blocks_does_not_cost_the_others_theirs() {
        let sizes = [ByteSize(65_536), ByteSize(1_000_000), ByteSize(64_000_000)];
        let times = Array2::from_shape_fn((3, 4), |(size, block)| {
            if (size, block) == (0, 0) || size > 0 {
                time(bytes_f64(sizes[size]))
            } else {
                f64::NAN
            }
        });
        let found = fit(&sizes, &times).unwrap();
        assert_eq!((found.sizes.as_slice(), found.blocks), (&sizes[1..], 4));
    }

    /// A folder of 2 CPUs × 2 devices, measured under two loads in three blocks: time of a copy of
    /// 1000 bytes by block, device and load.
    fn report(time: impl Fn(u32, u32, bool) -> u64) -> Report {
        let dir = tempfile::tempdir().unwrap();
        let plan = serde_json::from_value(serde_json::json!({
            "format": "csv", "sweep": "h2d", "sources": [], "scan_order_assumed": false,
            "rows": [0, 1], "columns": [0, 1], "sizes": [1000], "device_pair": null,
        }));
        let plan = PlanRecord { import: Some(plan.unwrap()), ..PlanRecord::default() };
        let manifest = Manifest::empty("h2d", plan, "blocks".to_owned());
        write_json(&dir.path().join(MANIFEST), &manifest).unwrap();
        let mut lines = String::new();
        let mut seqs = 0..;
        for block in 0..3 {
            for (cpu, device) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for (load, loaded) in [("idle", false), ("cpu:2", true)] {
                    let seq = seqs.next().unwrap();
                    let mut sample = Sample::new(seq, Sweep::H2d, ByteSize(1000));
                    (sample.cpu, sample.device) = (Some(CpuId(cpu)), Some(DeviceId(device)));
                    (sample.load, sample.block) = (load.to_owned(), block);
                    sample.iter_ns = vec![time(block, device, loaded)];
                    lines += &(serde_json::to_string(&sample).unwrap() + "\n");
                }
            }
        }
        fs::write(dir.path().join(SAMPLES), lines).unwrap();
        Report::read(dir.path()).unwrap()
    }

    /// Blocks drift to half of their rate, which pairs of blocks do not see; under load device 1 is
    /// at half of its rate, device 0 as idle.
    #[test]
    fn loads_are_compared_block_by_block() {
        let report = report(|block, device, loaded| {
            10_000 * u64::from(1 + block) * if loaded && device == 1 { 2 } else { 1 }
        });
        let deltas = Calibration::of(&report).load_profile_delta.unwrap();
        let found: Vec<(&str, Option<ClassId>, usize)> =
            deltas.iter().map(|delta| (delta.axis, delta.id, delta.blocks)).collect();
        let device = |id| ("device", Some(ClassId::Number(id)), 3);
        assert_eq!(found, [("all", None, 3), device(0), device(1)]);
        for (delta, wanted) in deltas.iter().zip([0.5_f64.sqrt(), 1.0, 0.5]) {
            for found in [delta.ratio.ratio, delta.ratio.low, delta.ratio.high] {
                assert!(close(found, wanted, 1e-9), "{delta:?}");
            }
            assert_eq!((delta.load.as_str(), delta.baseline.as_str()), ("cpu:2", "idle"));
        }
    }

    #[test]
    fn what_is_not_measured_is_null_in_the_file() {
        let mut report = report(|_, _, _| 1000);
        report.matrices[0].gbps[[0, 1, 0]] = f64::NAN;
        let mut text = Vec::new();
        Calibration::of(&report).write(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("[null,1.0]"), "{text}");
        assert!(text.contains("\"affinity_bindable_cpus\": null"), "{text}");
    }
}
