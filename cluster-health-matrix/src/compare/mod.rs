//! Two runs of the same plan against each other, or a pod of them.
//!
//! Pod against pod, before against after: what is compared are logarithms of rates, so that every
//! difference is a ratio B ÷ A.
//!
//! * **Unit.** A block. Each block gives one value per class of cells: the mean over its cells of
//!   the logarithm of the rate against a reference that both runs share (the middle of their two
//!   estimates of the cell), single cells limited to ± 5 noise deviations around their own run's
//!   estimate (not where single CPUs and cells are tested). What disturbs many cells of a block at
//!   once, drift included, is thus part of the variation between blocks, from which all intervals
//!   come: Welch's interval for the difference of the block means of two runs. With fewer than two
//!   blocks on a side the units are eighths of the rows, paired; classes of rows then have no
//!   interval, because row and time are one.
//! * **Classes.** Devices, NUMA nodes, kinds of pairs, CPUs. A class is tested against the median
//!   class of its axis in the same block (of two classes: against the other one), which removes
//!   what a whole block has in common; its variance is shared with that of the other classes of the
//!   axis, of two with that of single CPUs (as many degrees of freedom as those have, at most 8).
//!   It counts as changed when its own ratio *and* that against the median class are beyond the
//!   smallest effect, the test rejects, and at least 60 % of its cells share more than half of the
//!   effect; of two classes only the one that is farther from 1. Differences of changed devices,
//!   nodes and kinds of pairs are taken out before CPUs are tested, those of CPUs before cells.
//! * **Cells.** Needs three blocks on either side: every block of B beyond every block of A, and a
//!   normal test with the larger of the pooled and the cell's own spread, against what the cells
//!   have in common.
//! * **Level.** Family-wise 1 % over everything that is tested: 0.35 % each for the overall ratios
//!   and for devices with nodes and kinds of pairs, 0.25 % for CPUs, 0.05 % for cells, divided by
//!   the number of matrices; within a matrix Holm's procedure.
//!
//! Assumed: blocks are exchangeable but for drift (which widens the intervals), and the noise of a
//! cell is about normal but for single outliers.

mod pod;
mod setup;
mod text;

use std::collections::BTreeMap;

use cluster_health_core::ByteSize;
use ndarray::{Array2, ArrayView2, Axis as Dimension};
use serde::Serialize;

use crate::blocks::Blocks;
pub use crate::classes::ClassId;
use crate::classes::{ClassAxis, of_axes};
use crate::matrix::{Axis, Matrix, Memory};
use crate::report::Report;
use crate::run::{RunStatus, SCHEMA_VERSION};
use crate::samples::Sweep;
use crate::stats::{median, robust_sd};
use crate::student::{Contrast, Spread, holm, mean_and_spread, to_f64, two_sided_p};
pub use pod::{NodeClass, NodeMatrix, NodeRow, PodMap, pod};
pub(crate) use setup::list;

/// What counts as a difference.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct CompareOptions {
    /// Differences below this share of the rate do not count.
    pub min_effect: f64,
    /// Family-wise error of all tests together.
    pub level: f64,
    /// Compare although the set-ups differ; the result is marked.
    pub force: bool,
}

impl Default for CompareOptions {
    fn default() -> Self {
        Self { min_effect: 0.03, level: 0.01, force: false }
    }
}

impl CompareOptions {
    /// The smallest effect that counts, as a share of the rate.
    #[must_use]
    pub const fn with_min_effect(mut self, share: f64) -> Self {
        self.min_effect = share;
        self
    }

    /// Whether differences of the set-up are overridden.
    #[must_use]
    pub const fn with_force(mut self, force: bool) -> Self {
        self.force = force;
        self
    }

    /// The smallest logarithm that counts.
    fn smallest(&self) -> f64 {
        -(1.0 - self.min_effect.clamp(0.0, 0.99)).ln()
    }
}

/// How a comparison came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CompareVerdict {
    /// Nothing beyond the smallest effect, and the overall ratios are known well enough to say so.
    NoDifference,
    /// Something differs.
    Differences,
    /// Nothing was shown, but an overall ratio beyond the smallest effect cannot be excluded.
    Inconclusive,
    /// The set-ups differ.
    Refused,
}

impl CompareVerdict {
    /// In words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoDifference => "no difference",
            Self::Differences => "differences",
            Self::Inconclusive => "inconclusive",
            Self::Refused => "refused",
        }
    }
}

/// Which run a side is.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunInfo {
    /// What the caller calls it, for example its folder.
    pub name: String,
    /// Host name, where the run has one.
    pub host: Option<String>,
    /// UTC, RFC 3339.
    pub start: Option<String>,
    /// Whether every point of its plan was visited.
    pub complete: bool,
}

impl RunInfo {
    fn of(name: &str, report: &Report) -> Self {
        Self {
            name: name.to_owned(),
            host: report.manifest.environment.hostname.clone(),
            start: report.manifest.segments.first().map(|segment| segment.start.clone()),
            complete: report.manifest.status == RunStatus::Complete,
        }
    }
}

/// A ratio of rates B ÷ A with its 95 % interval; NaN (null) = cannot be told.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Ratio {
    /// B ÷ A.
    pub ratio: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Ratio {
    pub(crate) fn of(contrast: &Contrast) -> Self {
        let (low, high) = contrast.interval();
        Self { ratio: contrast.difference.exp(), low: low.exp(), high: high.exp() }
    }
}

/// The ratio of all cells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Overall {
    /// Geometric mean over the cells.
    #[serde(flatten)]
    pub ratio: Ratio,
    /// Probability of a ratio as far from 1 by chance.
    pub p: f64,
    /// Beyond the smallest effect, and not by chance.
    pub changed: bool,
}

/// The ratio of a class of cells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ClassRatio {
    /// `device`, `numa_node`, `pair_class`, `rank0_numa_node`, `rank1_numa_node`, `cpu`,
    /// `rank0_cpu`, `rank1_cpu`.
    pub axis: &'static str,
    /// Which one of the axis.
    pub id: ClassId,
    /// Number of its cells.
    pub cells: usize,
    /// Geometric mean over its cells.
    #[serde(flatten)]
    pub ratio: Ratio,
    /// The same ÷ that of the median class of the axis, block by block.
    pub relative: Ratio,
    /// Probability of a relative ratio as far from 1 by chance.
    pub p: f64,
    /// Different from the rest, see the module.
    pub changed: bool,
}

/// A cell that changed on its own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CellRatio {
    /// CPU, or CPU of rank 0.
    pub row: u32,
    /// Device, or CPU of rank 1.
    pub column: u32,
    /// Its estimate in A, decimal GB/s.
    pub a_gbps: f64,
    /// Its estimate in B, decimal GB/s.
    pub b_gbps: f64,
    /// B ÷ A.
    pub ratio: f64,
    /// Probability of a ratio as far from the common one by chance.
    pub p: f64,
}

/// What one run says about one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SideFacts {
    /// Median over the common cells, decimal GB/s.
    pub median_gbps: f64,
    /// Number of blocks.
    pub blocks: usize,
    /// Relative standard deviation of a visit between blocks, mean over cells (each up to five times
    /// their median); NaN (null) with one block.
    pub noise: f64,
    /// Rate of the last block ÷ that of the first; NaN (null) with one block.
    pub drift: f64,
}

/// One matrix (sweep, load, memory, size) compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MatrixComparison {
    /// What was measured.
    pub sweep: Sweep,
    /// Load profile.
    pub load: String,
    /// Kind of memory, as in `run.json`.
    pub memory: &'static str,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// Where the intervals come from: `block`, or `eighth of the rows`.
    pub unit: &'static str,
    /// Cells that both runs measured.
    pub cells: usize,
    /// Cells that only A measured.
    pub only_a: usize,
    /// Cells that only B measured.
    pub only_b: usize,
    /// A's facts.
    pub a: SideFacts,
    /// B's facts.
    pub b: SideFacts,
    /// All common cells.
    pub overall: Overall,
    /// Common cells of no changed class; absent when no class changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rest: Option<Overall>,
    /// Classes: all coarse ones, and the CPUs that changed.
    pub classes: Vec<ClassRatio>,
    /// Cells that changed on their own.
    pub changed_cells: Vec<CellRatio>,
    /// False when there were too few blocks to test single cells.
    pub cells_tested: bool,
}

impl MatrixComparison {
    fn has_change(&self) -> bool {
        self.overall.changed
            || self.rest.is_some_and(|rest| rest.changed)
            || self.classes.iter().any(|class| class.changed)
            || !self.changed_cells.is_empty()
    }
}

/// Two runs compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// Version of the document.
    pub schema_version: u32,
    /// How it came out.
    pub verdict: CompareVerdict,
    /// The run that the other is compared with.
    pub a: RunInfo,
    /// The run whose rates are in the numerator.
    pub b: RunInfo,
    /// Differences below this share of the rate do not count.
    pub min_effect: f64,
    /// Family-wise error of all tests together.
    pub level: f64,
    /// Compared although the set-ups differ.
    pub forced: bool,
    /// Why the runs should not be compared.
    pub differences: Vec<String>,
    /// What else a reader should know: versions that changed, incomplete runs.
    pub notes: Vec<String>,
    /// One entry per sweep, load, memory kind and size.
    pub matrices: Vec<MatrixComparison>,
    /// What follows, in words.
    pub inference: Vec<String>,
    /// What was not compared.
    pub not_tested: Vec<String>,
}

/// Compares run `b` with run `a`; each comes with what the caller calls it.
#[must_use]
pub fn compare(a: (&str, &Report), b: (&str, &Report), options: &CompareOptions) -> Comparison {
    let setup = setup::check(a.1, b.1);
    let mut result = Comparison {
        schema_version: SCHEMA_VERSION,
        verdict: CompareVerdict::Refused,
        a: RunInfo::of(a.0, a.1),
        b: RunInfo::of(b.0, b.1),
        min_effect: options.min_effect,
        level: options.level,
        forced: false,
        differences: setup.differences,
        notes: setup.notes,
        matrices: Vec::new(),
        inference: Vec::new(),
        not_tested: Vec::new(),
    };
    if !result.differences.is_empty() {
        if !options.force {
            return result;
        }
        result.forced = true;
    }
    let cores = a.1.affinity.as_ref().map(crate::run::AffinityFile::cores).unwrap_or_default();
    let mut pairs = Vec::new();
    for (index, matrix) in a.1.matrices.iter().enumerate() {
        let same = |other: &&Matrix| identity(other) == identity(matrix);
        let Some(other) = b.1.matrices.iter().position(|other| same(&other)) else { continue };
        for (size, bytes) in matrix.sizes.iter().enumerate() {
            if let Ok(other_size) = b.1.matrices[other].sizes.binary_search(bytes) {
                let left = Side { matrix, blocks: &a.1.blocks[index], size };
                let right = Side {
                    matrix: &b.1.matrices[other],
                    blocks: &b.1.blocks[other],
                    size: other_size,
                };
                pairs.push((left, right));
            }
        }
    }
    let level = options.level / to_f64(pairs.len().max(1));
    for (left, right) in &pairs {
        if let Some(compared) = compare_matrices(left, right, &cores, options, level) {
            result.matrices.push(compared);
        }
    }
    let lost = |matrix: &MatrixComparison| matrix.only_a + matrix.only_b > 0;
    let whole = result.a.complete && result.b.complete && !result.forced;
    let changed = result.matrices.iter().any(MatrixComparison::has_change)
        || (whole && result.matrices.iter().any(lost));
    let smallest = options.smallest();
    let within =
        |ratio: Ratio| ratio.low.ln() > -smallest - 1e-12 && ratio.high.ln() < smallest + 1e-12;
    result.verdict = if changed {
        CompareVerdict::Differences
    } else if !result.matrices.is_empty()
        && result.matrices.iter().all(|matrix| within(matrix.overall.ratio))
    {
        CompareVerdict::NoDifference
    } else {
        CompareVerdict::Inconclusive
    };
    result.inference = text::inference(&result);
    result.not_tested = text::not_tested(&result);
    result
}

fn identity(matrix: &Matrix) -> (Sweep, &str, Memory) {
    (matrix.sweep, &matrix.load, matrix.memory)
}

/// One size of one run's matrix.
struct Side<'a> {
    matrix: &'a Matrix,
    blocks: &'a Blocks,
    size: usize,
}

/// Positions of an id on the axes of A and B.
type Places = (usize, usize);

/// Positions of the ids that both axes have, in the order of the first.
fn common(a: &Axis, b: &Axis) -> Vec<Places> {
    let places: BTreeMap<u32, usize> = b.ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
    let place = |(at, id): (usize, &u32)| Some((at, *places.get(id)?));
    a.ids.iter().enumerate().filter_map(place).collect()
}

fn axis_of(axis: &Axis, places: &[Places]) -> Axis {
    let ids = places.iter().map(|place| axis.ids[place.0]).collect();
    Axis::new(axis.name, ids, places.iter().map(|place| axis.nodes[place.0]).collect())
}

/// Values of one side on the common axes.
fn pick(values: &ArrayView2<'_, f64>, rows: &[usize], columns: &[usize]) -> Array2<f64> {
    Array2::from_shape_fn((rows.len(), columns.len()), |(row, column)| {
        values[[rows[row], columns[column]]]
    })
}

/// Noise limits within which a block's value of a cell is believed.
const LIMIT: f64 = 5.0;

/// Logarithms of one run on the common cells.
pub(crate) struct Logs {
    /// Of the cell estimates; NaN = not measured.
    pub(crate) cells: Array2<f64>,
    /// Of every block, limited around the cell's estimate.
    pub(crate) blocks: Vec<Array2<f64>>,
    /// The same as measured: where most blocks of a cell were disturbed, limits would hide the rest.
    raw: Vec<Array2<f64>>,
    /// Relative spread of every cell between blocks.
    pub(crate) spread: Array2<f64>,
    /// Mean of them, see [`SideFacts::noise`].
    pub(crate) noise: f64,
}

impl Logs {
    pub(crate) fn of(
        matrix: &Matrix,
        blocks: &Blocks,
        size: usize,
        rows: &[usize],
        columns: &[usize],
    ) -> Self {
        let at = |values: &ndarray::Array3<f64>| {
            pick(&values.index_axis(Dimension(0), size), rows, columns)
        };
        let cells = at(&matrix.gbps).mapv_into(f64::ln);
        let spread = at(&matrix.spread);
        let mut known: Vec<f64> =
            spread.iter().copied().filter(|value| value.is_finite()).collect();
        // A single cell's spread is so skewed that their median would be too small; few wild ones
        // must not count in full.
        let most = LIMIT * median(&mut known);
        let noise = mean_and_spread(&known.iter().map(|one| one.min(most)).collect::<Vec<_>>()).0;
        let raw: Vec<Array2<f64>> = blocks
            .gbps
            .iter()
            .map(|block| at(block).mapv_into(f64::ln))
            .filter(|logs| logs.iter().any(|value| value.is_finite()))
            .collect();
        let mut blocks = raw.clone();
        if noise.is_finite() {
            for logs in &mut blocks {
                logs.zip_mut_with(&cells, |value, center| {
                    *value = center + (*value - center).clamp(-LIMIT * noise, LIMIT * noise);
                });
            }
        }
        Self { cells, blocks, raw, spread, noise }
    }

    fn facts(&self, overall: &[f64]) -> SideFacts {
        let mut known: Vec<f64> =
            self.cells.iter().copied().filter(|log| log.is_finite()).collect();
        let ends = overall.first().zip(overall.last()).filter(|_| overall.len() > 1);
        SideFacts {
            median_gbps: median(&mut known).exp(),
            blocks: self.blocks.len(),
            noise: self.noise,
            drift: ends.map_or(f64::NAN, |(first, last)| (last - first).exp()),
        }
    }
}

/// Mean of the finite values; NaN unless they are at least half of what is expected.
fn mean_of(values: &Array2<f64>, expected: usize) -> f64 {
    let (mut sum, mut count) = (0.0, 0_usize);
    for value in values.iter().filter(|value| value.is_finite()) {
        sum += value;
        count += 1;
    }
    if 2 * count >= expected && count > 0 { sum / to_f64(count) } else { f64::NAN }
}

/// The two sides as units: logarithms against the common reference.
struct Units {
    /// Of either side, by unit.
    sides: [Vec<Array2<f64>>; 2],
    /// The units of both sides are the same stretches.
    paired: bool,
    /// Cells that both sides measured and that were not taken out.
    cells: usize,
}

impl Units {
    fn values(&self, side: usize, of: impl Fn(&Array2<f64>) -> f64) -> Vec<f64> {
        self.sides[side].iter().map(of).collect()
    }

    fn contrast(&self, a: &[f64], b: &[f64]) -> Contrast {
        if self.paired {
            let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| b - a).collect();
            Contrast::paired(&differences)
        } else {
            Contrast::welch(a, b)
        }
    }

    fn overall(&self) -> Contrast {
        let expected = if self.paired { 0 } else { self.cells };
        let of = |side| self.values(side, |values| mean_of(values, expected));
        self.contrast(&of(0), &of(1))
    }

    /// Takes an effect out of cells of B.
    fn subtract(&mut self, effect: f64, is_member: impl Fn(usize, usize) -> bool) {
        for values in &mut self.sides[1] {
            for ((row, column), value) in values.indexed_iter_mut() {
                if is_member(row, column) {
                    *value -= effect;
                }
            }
        }
    }
}

/// Shares of the level: for overall ratios and again for coarse classes, for CPUs, for cells.
const LEVEL_OF_FEW: f64 = 0.35;
const LEVEL_OF_CPUS: f64 = 0.25;
const LEVEL_OF_CELLS: f64 = 0.05;

/// Parts of the rows that stand in for blocks where there is only one.
const PARTS: usize = 8;

/// B − A of every cell, limited around the median of its column, in eighths of the rows.
fn eighths(differences: &Array2<f64>, cells: usize) -> Units {
    let mut limited = differences.clone();
    for mut column in limited.columns_mut() {
        let known: Vec<f64> = column.iter().copied().filter(|value| value.is_finite()).collect();
        let center = median(&mut known.clone());
        let limit = LIMIT * robust_sd(&known, center);
        if center.is_finite() {
            column.mapv_inplace(|value| center + (value - center).clamp(-limit, limit));
        }
    }
    let rows = limited.nrows();
    let parts = PARTS.min(rows);
    let part = |number: usize| {
        let range = number * rows / parts..(number + 1) * rows / parts;
        Array2::from_shape_fn(limited.dim(), |(row, column)| {
            if range.contains(&row) { limited[[row, column]] } else { f64::NAN }
        })
    };
    let b: Vec<Array2<f64>> = (0..parts).map(part).collect();
    let a = b.iter().map(|values| values.mapv(|value| value * 0.0)).collect();
    Units { sides: [a, b], paired: true, cells }
}

fn compare_matrices(
    left: &Side<'_>,
    right: &Side<'_>,
    cores: &BTreeMap<u32, u32>,
    options: &CompareOptions,
    level: f64,
) -> Option<MatrixComparison> {
    let rows = common(&left.matrix.rows, &right.matrix.rows);
    let columns = common(&left.matrix.columns, &right.matrix.columns);
    let firsts = |places: &[Places]| places.iter().map(|place| place.0).collect::<Vec<_>>();
    let seconds = |places: &[Places]| places.iter().map(|place| place.1).collect::<Vec<_>>();
    let a = Logs::of(left.matrix, left.blocks, left.size, &firsts(&rows), &firsts(&columns));
    let b = Logs::of(right.matrix, right.blocks, right.size, &seconds(&rows), &seconds(&columns));
    let mut differences = &b.cells - &a.cells;
    let cells = differences.iter().filter(|value| value.is_finite()).count();
    if cells == 0 {
        return None;
    }
    let only = |own: &Array2<f64>, other: &Array2<f64>| {
        own.iter().zip(other).filter(|(own, other)| own.is_finite() && !other.is_finite()).count()
    };
    let axes = of_axes(
        left.matrix.sweep,
        &axis_of(&left.matrix.rows, &rows),
        &axis_of(&left.matrix.columns, &columns),
        cores,
    );
    let by_blocks = a.blocks.len() >= 2 && b.blocks.len() >= 2;
    let units_of = |of: fn(&Logs) -> &[Array2<f64>]| {
        if !by_blocks {
            return eighths(&differences, cells);
        }
        let reference = (&a.cells + &b.cells) / 2.0;
        let sides = [&a, &b]
            .map(|side| of(side).iter().map(|block| block - &reference).collect::<Vec<_>>());
        Units { sides, paired: false, cells }
    };
    let mut units = units_of(|logs| &logs.blocks);
    let mut raw_units = units_of(|logs| &logs.raw);
    let by_block = |logs: &Logs| {
        logs.blocks
            .iter()
            .map(|block| mean_of(&(block - &logs.cells), cells))
            .filter(|mean| mean.is_finite())
            .collect::<Vec<_>>()
    };
    let facts = [a.facts(&by_block(&a)), b.facts(&by_block(&b))];

    let smallest = options.smallest();
    let original = differences.clone();
    let whole = units.overall();
    let coarse: Vec<&ClassAxis> = axes.iter().filter(|axis| !axis.is_fine).collect();
    let fine: Vec<&ClassAxis> = axes.iter().filter(|axis| axis.is_fine).collect();
    let mut classes = Vec::new();
    let found = stage(&coarse, &fine, &units, &differences, smallest, LEVEL_OF_FEW * level);
    let overall = Overall {
        ratio: Ratio::of(&whole),
        p: whole.p(),
        changed: whole.p() <= LEVEL_OF_FEW * level && whole.difference.abs() >= smallest,
    };
    let mut in_changed = Array2::from_elem(differences.dim(), false);
    take_out(&found, &coarse, [&mut units, &mut raw_units], &mut differences, &mut in_changed);
    classes.extend(found.into_iter().map(|found| found.ratio));
    let found = stage(&fine, &[], &raw_units, &differences, smallest, LEVEL_OF_CPUS * level);
    take_out(&found, &fine, [&mut units, &mut raw_units], &mut differences, &mut in_changed);
    classes.extend(found.into_iter().map(|found| found.ratio).filter(|class| class.changed));
    let rest = classes.iter().any(|class| class.changed).then(|| {
        for values in units.sides.iter_mut().flatten() {
            values.zip_mut_with(&in_changed, |value, hit| {
                if *hit {
                    *value = f64::NAN;
                }
            });
        }
        let left_over = in_changed.iter().zip(&original);
        units.cells = left_over.filter(|(hit, value)| !**hit && value.is_finite()).count();
        let contrast = units.overall();
        Overall {
            ratio: Ratio::of(&contrast),
            p: contrast.p(),
            changed: contrast.p() <= LEVEL_OF_FEW * level && contrast.difference.abs() >= smallest,
        }
    });
    let cells_tested = a.blocks.len() >= 3 && b.blocks.len() >= 3;
    let changed_cells = if cells_tested {
        let places = [rows.as_slice(), columns.as_slice()];
        changed_cells(
            left.matrix,
            places,
            [&a, &b],
            &original,
            &differences,
            smallest,
            LEVEL_OF_CELLS * level,
        )
    } else {
        Vec::new()
    };
    Some(MatrixComparison {
        sweep: left.matrix.sweep,
        load: left.matrix.load.clone(),
        memory: left.matrix.memory.as_str(),
        bytes: left.matrix.sizes[left.size],
        unit: if units.paired { "eighth of the rows" } else { "block" },
        cells,
        only_a: only(&a.cells, &b.cells),
        only_b: only(&b.cells, &a.cells),
        a: facts[0],
        b: facts[1],
        overall,
        rest,
        classes,
        changed_cells,
        cells_tested,
    })
}

/// A class with where it stands.
struct Found {
    axis: usize,
    class: usize,
    ratio: ClassRatio,
    relative: f64,
    total: f64,
}

/// Tests all classes of some axes; `singles` are the axes of single CPUs.
fn stage(
    axes: &[&ClassAxis],
    singles: &[&ClassAxis],
    units: &Units,
    differences: &Array2<f64>,
    smallest: f64,
    level: f64,
) -> Vec<Found> {
    let mut found = Vec::new();
    for (index, axis) in axes.iter().enumerate() {
        let single = singles.iter().find(|single| single.splits(axis)).or(singles.first()).copied();
        found.extend(classes_of(index, axis, single, units, differences));
    }
    let p: Vec<f64> = found.iter().map(|found| found.ratio.p).collect();
    let rejected = holm(&p, level);
    for (found, rejected) in found.iter_mut().zip(&rejected) {
        let large = found.relative.abs() >= smallest && found.total.abs() >= smallest;
        found.ratio.changed =
            *rejected && large && shared(axes[found.axis], found, differences) >= SHARED;
    }
    for index in 0..axes.len() {
        let own = || found.iter().enumerate().filter(move |(_, found)| found.axis == index);
        // Of two classes that differ from each other, the one that did less stayed.
        let less = if own().count() == 2 {
            own().min_by(|left, right| left.1.total.abs().total_cmp(&right.1.total.abs()))
        } else {
            own().next().filter(|_| own().count() == 1)
        };
        if let Some((stayed, _)) = less {
            found[stayed].ratio.changed = false;
        }
    }
    found
}

/// Share of the cells of a changed class that must have more than half of its effect.
const SHARED: f64 = 0.6;

fn shared(axis: &ClassAxis, found: &Found, differences: &Array2<f64>) -> f64 {
    let common = found.total - found.relative;
    let (mut members, mut alike) = (0_usize, 0_usize);
    for ((row, column), difference) in differences.indexed_iter() {
        if difference.is_finite() && axis.of(row, column) == Some(found.class) {
            members += 1;
            alike += usize::from((difference - common) / found.relative > 0.5);
        }
    }
    to_f64(alike) / to_f64(members.max(1))
}

/// Most degrees of freedom that the variance of a class takes from the others of its axis.
const MOST_SHARED_DEGREES: f64 = 8.0;

/// A class counts with at most so many times the median variance of an axis.
const MOST_OF_MEDIAN: f64 = 10.0;

/// The variance of a class with that of the other classes, which scales with their cells.
fn moderated(own: Spread, own_cells: f64, others: &[(Spread, f64)]) -> Spread {
    let known: Vec<&(Spread, f64)> =
        others.iter().filter(|(spread, _)| spread.variance.is_finite()).collect();
    if known.is_empty() || own.variance.is_nan() {
        return own;
    }
    let scaled: Vec<f64> = known.iter().map(|(spread, cells)| spread.variance * cells).collect();
    // A single disturbed class must not hide what the others do.
    let most = MOST_OF_MEDIAN * median(&mut scaled.clone());
    let sum: f64 = scaled.iter().map(|variance| variance.min(most)).sum();
    let prior = sum / to_f64(known.len()) / own_cells;
    let degrees: f64 = known.iter().map(|(spread, _)| spread.degrees).sum();
    let degrees = degrees.min(MOST_SHARED_DEGREES);
    let variance = (degrees * prior + own.degrees * own.variance) / (degrees + own.degrees);
    Spread { variance, degrees: degrees + own.degrees, count: own.count }
}

/// By class, its value in every unit of a side.
fn class_series(
    axis: &ClassAxis,
    units: &[Array2<f64>],
    cells: &[usize],
    paired: bool,
) -> Vec<Vec<f64>> {
    let mut series = vec![Vec::with_capacity(units.len()); axis.ids.len()];
    for unit in units {
        for (class, (mean, count)) in axis.means(unit).into_iter().enumerate() {
            let enough = paired || 2 * count >= cells[class];
            series[class].push(if enough { mean } else { f64::NAN });
        }
    }
    series
}

/// Variance of the difference of the two classes of an axis as far as it comes from single CPUs:
/// those that the classes consist of, or in each of which both classes have cells.
fn spread_by_singles(
    axis: &ClassAxis,
    single: &ClassAxis,
    units: &[Array2<f64>],
    differences: &Array2<f64>,
) -> Option<(Spread, f64)> {
    // By CPU and class, how many cells.
    let mut counts = vec![vec![0_usize; axis.ids.len()]; single.ids.len()];
    let places = |(row, column): (usize, usize)| single.of(row, column).zip(axis.of(row, column));
    for (place, _) in differences.indexed_iter().filter(|(_, value)| value.is_finite()) {
        if let Some((one, class)) = places(place) {
            counts[one][class] += 1;
        }
    }
    let mut series = vec![vec![vec![f64::NAN; units.len()]; axis.ids.len()]; single.ids.len()];
    for (unit, values) in units.iter().enumerate() {
        let mut sums = vec![vec![(0.0, 0_usize); axis.ids.len()]; single.ids.len()];
        for (place, value) in values.indexed_iter().filter(|(_, value)| value.is_finite()) {
            if let Some((one, class)) = places(place) {
                sums[one][class].0 += value;
                sums[one][class].1 += 1;
            }
        }
        for ((one, sums), counts) in series.iter_mut().zip(sums).zip(&counts) {
            for ((class, (sum, count)), cells) in one.iter_mut().zip(sums).zip(counts) {
                if count > 0 && 2 * count >= *cells {
                    class[unit] = sum / to_f64(count);
                }
            }
        }
    }
    let within = counts.iter().any(|counts| counts.iter().filter(|count| **count > 0).count() > 1);
    let mut common = vec![0.0; units.len()];
    if !within {
        for (unit, common) in common.iter_mut().enumerate() {
            let all: Vec<f64> = series.iter().flatten().map(|values| values[unit]).collect();
            *common = mean_and_spread(&all).0;
        }
    }
    let mut found = Vec::new();
    let mut of_class = vec![0.0; axis.ids.len()];
    for one in &series {
        let mut classes = one.iter().enumerate().filter(|(_, values)| values[0].is_finite());
        let Some((class, first)) = classes.next() else { continue };
        let other = if within { classes.next().map(|(_, values)| values) } else { Some(&common) };
        let Some(other) = other else { continue };
        of_class[class] += 1.0;
        let values: Vec<f64> = first.iter().zip(other).map(|(own, other)| own - other).collect();
        found.push(mean_and_spread(&values).1);
    }
    let known: Vec<&Spread> = found.iter().filter(|spread| spread.variance.is_finite()).collect();
    let scale: f64 = of_class.iter().filter(|count| **count > 0.0).map(|count| 1.0 / count).sum();
    let variance = known.iter().map(|spread| spread.variance).sum::<f64>() / to_f64(known.len());
    let degrees = known.iter().map(|spread| spread.degrees).sum();
    let spread = Spread { variance: variance * scale, degrees, count: to_f64(units.len()) };
    (!known.is_empty()).then_some((spread, 1.0))
}

fn classes_of(
    index: usize,
    axis: &ClassAxis,
    single: Option<&ClassAxis>,
    units: &Units,
    differences: &Array2<f64>,
) -> Vec<Found> {
    let means = axis.means(differences);
    let cells: Vec<usize> = means.iter().map(|mean| mean.1).collect();
    let present: Vec<usize> = (0..cells.len()).filter(|class| cells[*class] > 0).collect();
    let series = [0, 1].map(|side| class_series(axis, &units.sides[side], &cells, units.paired));
    // What the median class did in the same unit; of two classes the other one.
    let center = |side: usize, class: usize, unit: usize| {
        let others = present.iter().filter(|other| present.len() != 2 || **other != class);
        let mut values: Vec<f64> = others
            .map(|other| series[side][*other][unit])
            .filter(|value| value.is_finite())
            .collect();
        median(&mut values)
    };
    let medians = [0, 1].map(|side| {
        let units = 0..units.sides[side].len();
        if present.len() == 2 {
            Vec::new()
        } else {
            units.map(|unit| center(side, usize::MAX, unit)).collect::<Vec<f64>>()
        }
    });
    let centered = [0, 1].map(|side| {
        let of_class = |(class, values): (usize, &Vec<f64>)| {
            let at = |(unit, value): (usize, &f64)| {
                let common = medians[side].get(unit).copied();
                value - common.unwrap_or_else(|| center(side, class, unit))
            };
            values.iter().enumerate().map(at).collect()
        };
        series[side].iter().enumerate().map(of_class).collect::<Vec<Vec<f64>>>()
    });
    let spreads = [0, 1].map(|side| {
        let spread =
            |class: &usize| (mean_and_spread(&centered[side][*class]).1, to_f64(cells[*class]));
        present.iter().map(spread).collect::<Vec<_>>()
    });
    let of_singles = match single {
        Some(single) if present.len() == 2 && !units.paired => {
            [0, 1].map(|side| spread_by_singles(axis, single, &units.sides[side], differences))
        }
        _ => [None, None],
    };
    let by_time = units.paired && axis.is_by_row();
    let make = |(at, &class): (usize, &usize)| {
        let (total, relative) = if by_time {
            let known = Contrast::without_error(means[class].0);
            (known, known)
        } else if present.len() < 2 {
            let total = units.contrast(&series[0][class], &series[1][class]);
            (total, total)
        } else if units.paired {
            let total = units.contrast(&series[0][class], &series[1][class]);
            (total, units.contrast(&centered[0][class], &centered[1][class]))
        } else {
            let total = units.contrast(&series[0][class], &series[1][class]);
            let mean = |side: usize| mean_and_spread(&centered[side][class]).0;
            let sides = [0, 1].map(|side| {
                let (own, own_cells) = spreads[side][at];
                if present.len() == 2 {
                    return moderated(own, 1.0, &of_singles[side].into_iter().collect::<Vec<_>>());
                }
                // Classes of this axis but the one itself.
                let others: Vec<(Spread, f64)> = spreads[side]
                    .iter()
                    .enumerate()
                    .filter(|(other, _)| *other != at)
                    .map(|(_, spread)| *spread)
                    .collect();
                moderated(own, own_cells, &others)
            });
            (total, Contrast::between(mean(1) - mean(0), sides))
        };
        Found {
            axis: index,
            class,
            total: total.difference,
            relative: relative.difference,
            ratio: ClassRatio {
                axis: axis.name,
                id: axis.ids[class],
                cells: cells[class],
                ratio: Ratio::of(&total),
                relative: Ratio::of(&relative),
                p: relative.p(),
                changed: false,
            },
        }
    };
    present.iter().enumerate().map(make).collect()
}

/// Takes the effects of changed classes out of what is tested next.
fn take_out(
    found: &[Found],
    axes: &[&ClassAxis],
    mut units: [&mut Units; 2],
    differences: &mut Array2<f64>,
    in_changed: &mut Array2<bool>,
) {
    for found in found.iter().filter(|found| found.ratio.changed) {
        let is_member =
            |row: usize, column: usize| axes[found.axis].of(row, column) == Some(found.class);
        for units in &mut units {
            units.subtract(found.relative, is_member);
        }
        for ((row, column), difference) in differences.indexed_iter_mut() {
            if is_member(row, column) {
                *difference -= found.relative;
                in_changed[[row, column]] = true;
            }
        }
    }
}

fn changed_cells(
    matrix: &Matrix,
    [rows, columns]: [&[Places]; 2],
    sides: [&Logs; 2],
    original: &Array2<f64>,
    differences: &Array2<f64>,
    smallest: f64,
    level: f64,
) -> Vec<CellRatio> {
    let known: Vec<f64> = differences.iter().copied().filter(|value| value.is_finite()).collect();
    let center = median(&mut known.clone());
    let floor = robust_sd(&known, center);
    // A median of n normal values has at most π/2 of the variance of their mean.
    let variance = |side: &Logs, place: (usize, usize)| {
        let own = side.spread[place];
        let spread = if own > side.noise { own } else { side.noise };
        spread * spread * std::f64::consts::FRAC_PI_2 / to_f64(side.blocks.len())
    };
    // Extremes of a side's blocks, what both share taken out of B.
    let ends = |side: &Logs, place: (usize, usize), shift: f64| {
        side.raw
            .iter()
            .map(|block| block[place] - shift)
            .filter(|value| value.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY, 0), |(low, high, count), value| {
                (value.min(low), value.max(high), count + 1)
            })
    };
    let mut candidates = Vec::new();
    let mut p = Vec::new();
    let mut tested = 0_usize;
    for (place, &difference) in differences.indexed_iter() {
        if !difference.is_finite() {
            continue;
        }
        tested += 1;
        let own = difference - center;
        if own.abs() < smallest || original[place].abs() < smallest {
            continue;
        }
        let (low_a, high_a, count_a) = ends(sides[0], place, 0.0);
        let (low_b, high_b, count_b) = ends(sides[1], place, original[place] - own);
        if count_a < 3 || count_b < 3 || !(low_b > high_a || high_b < low_a) {
            continue;
        }
        let error = (variance(sides[0], place) + variance(sides[1], place)).sqrt().max(floor);
        let chance = two_sided_p(own.abs() / error, NORMAL_DEGREES);
        p.push(chance);
        candidates.push(CellRatio {
            row: matrix.rows.ids[rows[place.0].0],
            column: matrix.columns.ids[columns[place.1].0],
            a_gbps: sides[0].cells[place].exp(),
            b_gbps: sides[1].cells[place].exp(),
            ratio: original[place].exp(),
            p: chance,
        });
    }
    // Cells that are no candidates have been tested, too.
    p.resize(tested.max(p.len()), 1.0);
    let rejected = holm(&p, level);
    candidates
        .into_iter()
        .zip(rejected)
        .filter(|(_, rejected)| *rejected)
        .map(|(cell, _)| cell)
        .collect()
}

/// Degrees of freedom from which Student's t is taken as normal.
const NORMAL_DEGREES: f64 = 1000.0;
