//! Labelled matrices: sizes × rows × columns, with a status and a spread beside every rate.
//!
//! | sweep | rows | columns | rate in a cell |
//! |---|---|---|---|
//! | H2D | CPU | device | bytes ÷ time of one copy, decimal GB/s |
//! | core pair | rank-0 CPU | rank-1 CPU | bytes per rank ÷ time (`per_rank_gbps`), decimal GB/s |

use cluster_health_core::ByteSize;
use ndarray::{Array3, ArrayView2, ArrayView3, Axis as Dimension};

use crate::samples::Sweep;

/// How a cell came out over all its visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
#[non_exhaustive]
pub enum CellStatus {
    /// No visit (yet); its rate is NaN.
    #[default]
    NotVisited,
    /// At least one block measured it; its rate is a number.
    Measured,
    /// Every visit was skipped; its rate is NaN.
    Skipped,
    /// Visits failed and none was measured; its rate is NaN.
    Failed,
    /// Only implausible rates were seen; its rate is NaN.
    Implausible,
}

/// What kind of memory the copies of a matrix used, other than that of the device they go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Memory {
    /// Host memory that cannot be moved or swapped.
    PageLocked,
    /// Ordinary host memory.
    Pageable,
    /// Memory of the devices themselves: collectives.
    Device,
    /// An import does not say.
    Unknown,
}

impl Memory {
    /// The word of `run.json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PageLocked => "page_locked",
            Self::Pageable => "pageable",
            Self::Device => "device",
            Self::Unknown => "unknown",
        }
    }

    /// True for ordinary host memory, whose results have files of their own.
    #[must_use]
    pub const fn is_pageable(self) -> bool {
        matches!(self, Self::Pageable)
    }
}

/// One labelled axis of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Axis {
    /// What the ids are: `cpu`, `device`, `rank-0 cpu`, `rank-1 cpu`.
    pub name: &'static str,
    /// The ids, in the order of the axis.
    pub ids: Vec<u32>,
    /// The NUMA node of each id, where it is known; as long as `ids`.
    pub nodes: Vec<Option<u32>>,
}

impl Axis {
    /// An axis with its labels; nodes beyond `ids` are dropped, missing ones are unknown.
    #[must_use]
    pub fn new(name: &'static str, ids: Vec<u32>, mut nodes: Vec<Option<u32>>) -> Self {
        nodes.resize(ids.len(), None);
        Self { name, ids, nodes }
    }

    /// Number of labels.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True without labels.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// What the model of a sampled sweep says about the cells that it did not measure: sizes × rows ×
/// columns each, NaN where a cell was measured or nothing can be said.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Prediction {
    /// Decimal GB/s.
    pub gbps: Array3<f32>,
    /// Half-width of the 95 % interval in which one visit of the cell would lie, as a share of the
    /// predicted rate.
    pub error: Array3<f32>,
}

impl Prediction {
    /// Nothing predicted: all NaN.
    #[must_use]
    pub fn new(shape: (usize, usize, usize)) -> Self {
        Self { gbps: Array3::from_elem(shape, f32::NAN), error: Array3::from_elem(shape, f32::NAN) }
    }
}

/// The measured rates of one sweep under one load: sizes × rows × columns.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Matrix {
    /// What was measured.
    pub sweep: Sweep,
    /// Name of the load profile.
    pub load: String,
    /// What kind of memory the copies used; kinds are never merged.
    pub memory: Memory,
    /// Bytes per copy (per rank for pairs), ascending.
    pub sizes: Vec<ByteSize>,
    /// Row labels.
    pub rows: Axis,
    /// Column labels.
    pub columns: Axis,
    /// Decimal GB/s; NaN = not measured.
    pub gbps: Array3<f64>,
    /// Spread between blocks: median absolute deviation of the per-block medians ÷ their median,
    /// corrected for their number; NaN with fewer than two blocks.
    pub spread: Array3<f64>,
    /// How each cell came out.
    pub status: Array3<CellStatus>,
    /// The cells that a sampled sweep left out, from its model; `None` where all were to be
    /// measured.
    pub predicted: Option<Prediction>,
}

impl Matrix {
    /// An empty matrix: every cell NaN and not visited.
    #[must_use]
    pub fn new(sweep: Sweep, load: &str, sizes: Vec<ByteSize>, rows: Axis, columns: Axis) -> Self {
        let shape = (sizes.len(), rows.len(), columns.len());
        Self {
            sweep,
            load: load.to_owned(),
            memory: if sweep.is_pair() { Memory::Device } else { Memory::PageLocked },
            sizes,
            rows,
            columns,
            gbps: Array3::from_elem(shape, f64::NAN),
            spread: Array3::from_elem(shape, f64::NAN),
            status: Array3::from_elem(shape, CellStatus::NotVisited),
            predicted: None,
        }
    }

    /// Rates, sizes × rows × columns, decimal GB/s, NaN = not measured.
    #[must_use]
    pub fn gbps(&self) -> ArrayView3<'_, f64> {
        self.gbps.view()
    }

    /// The matrix of one size by its position in [`sizes`](Self::sizes).
    ///
    /// # Panics
    /// When `index` is not below the number of sizes.
    #[must_use]
    pub fn slice(&self, index: usize) -> Slice<'_> {
        Slice {
            sweep: self.sweep,
            load: &self.load,
            memory: self.memory,
            bytes: self.sizes[index],
            rows: &self.rows,
            columns: &self.columns,
            gbps: self.gbps.index_axis(Dimension(0), index),
            spread: self.spread.index_axis(Dimension(0), index),
            status: self.status.index_axis(Dimension(0), index),
            predicted: self.predicted.as_ref().map(|predicted| Predicted {
                gbps: predicted.gbps.index_axis(Dimension(0), index),
                error: predicted.error.index_axis(Dimension(0), index),
            }),
        }
    }

    /// The matrices of all sizes.
    pub fn slices(&self) -> impl Iterator<Item = Slice<'_>> {
        (0..self.sizes.len()).map(|index| self.slice(index))
    }
}

/// A view of one size of a [`Prediction`]: rows × columns.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Predicted<'a> {
    /// Decimal GB/s, NaN where the cell was measured or nothing can be said.
    pub gbps: ArrayView2<'a, f32>,
    /// Half-width of the 95 % interval, see [`Prediction::error`].
    pub error: ArrayView2<'a, f32>,
}

/// A view of one size: rows × columns.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Slice<'a> {
    /// What was measured.
    pub sweep: Sweep,
    /// Name of the load profile.
    pub load: &'a str,
    /// What kind of memory the copies used.
    pub memory: Memory,
    /// Bytes per copy (per rank for pairs).
    pub bytes: ByteSize,
    /// Row labels.
    pub rows: &'a Axis,
    /// Column labels.
    pub columns: &'a Axis,
    /// Decimal GB/s; NaN = not measured.
    pub gbps: ArrayView2<'a, f64>,
    /// Spread between blocks, see [`Matrix::spread`].
    pub spread: ArrayView2<'a, f64>,
    /// How each cell came out.
    pub status: ArrayView2<'a, CellStatus>,
    /// The cells that a sampled sweep left out; `None` where all were to be measured.
    pub predicted: Option<Predicted<'a>>,
}

impl Slice<'_> {
    /// File name without extension: `h2d-16MiB`, `core-pair-8MiB`, `h2d-16MiB-d2h`,
    /// `h2d-16MiB-cpu2`, `h2d-16MiB-pageable`.
    #[must_use]
    pub fn stem(&self) -> String {
        let mut stem = match self.sweep {
            Sweep::CorePair => format!("core-pair-{}", self.bytes),
            Sweep::H2d => format!("h2d-{}", self.bytes),
            other => format!("h2d-{}-{other}", self.bytes),
        };
        if self.load != "idle" {
            stem.push('-');
            stem.extend(self.load.chars().filter(char::is_ascii_alphanumeric));
        }
        if self.memory.is_pageable() {
            stem.push_str("-pageable");
        }
        stem
    }

    /// Measured rates in row-major order.
    pub fn measured(&self) -> impl Iterator<Item = f64> + '_ {
        self.gbps.iter().copied().filter(|rate| rate.is_finite())
    }
}
