//! What judging sees of a sweep: every timed point, in order of measurement, by positions in the
//! axes.

use std::collections::{BTreeMap, HashMap};

use cluster_health_core::ByteSize;

use super::additive::Additive;
use crate::matrix::Axis;
use crate::samples::{Phase, PointStatus, Sample, Sweep};
use crate::stats::median;

/// What the CPUs of a pair share. Those that share a core take turns on it: their normal time is a
/// class of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kinship {
    Strangers,
    Siblings,
    SameCpu,
}

/// One timed point.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Obs {
    pub(crate) seq: u32,
    /// Number of the run of points on one bound core (H2D), or of the point (pairs).
    pub(crate) visit: u32,
    /// Natural logarithm of the median iteration in nanoseconds.
    pub(crate) ln: f32,
    /// First transfer (discarded or not) less the median iteration, nanoseconds.
    pub(crate) lead_ns: f32,
    pub(crate) row: u16,
    pub(crate) col: u16,
    pub(crate) block: u16,
    /// Position in the sizes; their number for a probe.
    pub(crate) size: u8,
    pub(crate) phase: Phase,
    pub(crate) sentinel: bool,
    pub(crate) settled: bool,
    /// A rank's CPU changed before the point.
    pub(crate) moved: bool,
    /// Memory was allocated or touched for the point.
    pub(crate) touched: bool,
    /// Start of the point since the first bind, seconds; NaN in imports.
    pub(crate) t_s: f32,
}

impl Obs {
    /// A first-class visit: what estimates come from.
    pub(crate) fn is_block(&self) -> bool {
        self.phase == Phase::Blocks && !self.sentinel
    }

    pub(crate) fn is_confirm(&self) -> bool {
        self.phase == Phase::Confirm
    }
}

/// Points that room is made for at most, 36 bytes each.
const MOST_RESERVED: usize = 1 << 22;

/// The points of one sweep and load.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    pub(crate) sweep: Sweep,
    pub(crate) load: String,
    /// Ascending.
    pub(crate) sizes: Vec<ByteSize>,
    pub(crate) rows: Axis,
    pub(crate) cols: Axis,
    /// Lowest CPU of each row's and column's core, where it is known.
    pub(crate) row_cores: Vec<Option<u32>>,
    pub(crate) col_cores: Vec<Option<u32>>,
    pub(crate) obs: Vec<Obs>,
    pub(crate) blocks: u16,
    /// Number of the first block of confirming visits.
    pub(crate) first_round: u16,
    /// Only a part of the cells was to be measured.
    pub(crate) sampled: bool,
    /// Costs that were taken out of the times.
    pub(crate) costs: Vec<Additive>,
    row_of: HashMap<u32, u16>,
    col_of: HashMap<u32, u16>,
    pageable: Option<bool>,
    scratch: Vec<f64>,
}

impl Table {
    /// Nothing gathered yet; `core_of` names the core of a CPU by its lowest one.
    pub(crate) fn new(
        sweep: Sweep,
        load: &str,
        sizes: Vec<ByteSize>,
        (rows, cols): (Axis, Axis),
        core_of: impl Fn(u32) -> Option<u32>,
    ) -> Self {
        let index = |axis: &Axis| {
            (0..=u16::MAX).zip(&axis.ids).map(|(at, id)| (*id, at)).collect::<HashMap<u32, u16>>()
        };
        let row_cores = rows.ids.iter().map(|&cpu| core_of(cpu)).collect();
        let col_cores = if sweep.is_pair() {
            cols.ids.iter().map(|&cpu| core_of(cpu)).collect()
        } else {
            vec![None; cols.len()]
        };
        Self {
            sweep,
            load: load.to_owned(),
            row_of: index(&rows),
            col_of: index(&cols),
            sizes,
            rows,
            cols,
            row_cores,
            col_cores,
            obs: Vec::new(),
            blocks: 0,
            first_round: u16::MAX,
            sampled: false,
            costs: Vec::new(),
            pageable: None,
            scratch: Vec::new(),
        }
    }

    /// The same axes without points.
    pub(crate) fn empty(&self) -> Self {
        Self { obs: Vec::new(), ..self.clone() }
    }

    /// Makes room for so many points, so that gathering them does not move what is there between two
    /// points that are measured. Where there is no such room it grows as it fills.
    pub(crate) fn reserve(&mut self, points: usize) {
        // Sentinels come on top.
        self.obs.try_reserve_exact(points.saturating_add(points / 40).min(MOST_RESERVED)).ok();
    }

    /// Adds a point that was timed; others, and those of another kind of memory, are left out.
    pub(crate) fn add(&mut self, sample: &Sample) {
        if sample.status != PointStatus::Measured || sample.load != self.load {
            return;
        }
        if let Some(pinned) = sample.pinned
            && *self.pageable.get_or_insert(pinned.is_pageable()) != pinned.is_pageable()
        {
            return;
        }
        let Some((row, col)) = sample.cell() else { return };
        let (Some(&row), Some(&col)) = (self.row_of.get(&row), self.col_of.get(&col)) else {
            return;
        };
        let size = match (sample.phase, self.sizes.binary_search(&sample.bytes)) {
            (Phase::Probe, _) => self.sizes.len(),
            (_, Ok(size)) => size,
            (_, Err(_)) => return,
        };
        let (Ok(size), Ok(seq)) = (u8::try_from(size), u32::try_from(sample.seq)) else { return };
        self.scratch.clear();
        self.scratch.extend(sample.iter_ns.iter().map(|&time| time as f64));
        let time = median(&mut self.scratch);
        if time.is_nan() || time <= 0.0 {
            return;
        }
        let first = sample.warmup_ns.first().or(sample.host_times().first()).copied().unwrap_or(0);
        let block = u16::try_from(sample.block).unwrap_or(u16::MAX);
        if sample.is_matrix_point() {
            self.blocks = self.blocks.max(block.saturating_add(1));
        }
        if sample.phase == Phase::Confirm {
            self.first_round = self.first_round.min(block);
        }
        self.obs.push(Obs {
            seq,
            visit: 0,
            #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
            ln: time.ln() as f32,
            #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
            lead_ns: (first as f64 - time) as f32,
            row,
            col,
            block,
            size,
            phase: sample.phase,
            sentinel: sample.sentinel,
            settled: sample.settled,
            moved: sample.bind_ns > 0,
            touched: sample.touch_ns > 0,
            #[allow(clippy::cast_possible_truncation, reason = "milliseconds of a day are enough")]
            t_s: sample.t_ns.map_or(f32::NAN, |t_ns| (t_ns as f64 / 1e9) as f32),
        });
    }

    /// Brings the points into their order of measurement, whatever order they came in, and numbers
    /// the visits.
    pub(crate) fn arrange(&mut self) {
        self.obs.sort_unstable_by_key(|obs| obs.seq);
        self.obs.dedup_by_key(|obs| obs.seq);
        let is_pair = self.sweep.is_pair();
        let mut visit = 0;
        let mut last = None;
        for obs in &mut self.obs {
            let place = (obs.row, obs.block, obs.phase == Phase::Confirm);
            if last.is_some_and(|last| is_pair || last != place) {
                visit += 1;
            }
            last = Some(place);
            obs.visit = visit;
        }
    }

    /// Natural logarithm of a point's time with what was taken out of the times of its device alone.
    pub(crate) fn ln_of_device(&self, obs: &Obs) -> f64 {
        let costs = self.costs.iter().filter(|cost| cost.col.is_some() && cost.is_in(obs));
        let cost: f64 = costs.map(|cost| cost.ns).sum();
        let ln = f64::from(obs.ln);
        if cost.abs() > 0.0 { (ln.exp() + cost).max(1.0).ln() } else { ln }
    }

    /// What the CPUs of a cell share; always `Strangers` for H2D.
    pub(crate) fn kinship(&self, row: usize, col: usize) -> Kinship {
        if !self.sweep.is_pair() {
            Kinship::Strangers
        } else if self.rows.ids[row] == self.cols.ids[col] {
            Kinship::SameCpu
        } else if self.row_cores[row].is_some() && self.row_cores[row] == self.col_cores[col] {
            Kinship::Siblings
        } else {
            Kinship::Strangers
        }
    }

    /// The cells of pairs that share so much.
    pub(crate) fn cells_of(&self, kinship: Kinship) -> impl Iterator<Item = (usize, usize)> + '_ {
        let [rows, cols] = if self.sweep.is_pair() { self.shape() } else { [0, 0] };
        (0..rows)
            .flat_map(move |row| (0..cols).map(move |col| (row, col)))
            .filter(move |&(row, col)| self.kinship(row, col) == kinship)
    }

    /// Positions of each NUMA node of the rows (`axis` 0) or columns (1) that the data have.
    pub(crate) fn nodes(&self, axis: usize) -> BTreeMap<u32, Vec<usize>> {
        let axis = if axis == 0 { &self.rows } else { &self.cols };
        let mut nodes = BTreeMap::<u32, Vec<usize>>::new();
        for (at, node) in axis.nodes.iter().enumerate() {
            if let Some(node) = node {
                nodes.entry(*node).or_default().push(at);
            }
        }
        nodes
    }

    /// Visits per cell of a size that judging counts on.
    pub(crate) fn replicates(&self, size: usize) -> f64 {
        if self.sampled {
            super::sparse::coverage(self, size).0
        } else {
            f64::from(self.blocks.max(1))
        }
    }

    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.rows.len(), self.cols.len()]
    }
}
