//! From samples to matrices: one estimate per cell, whatever order the samples come in.
//!
//! A cell's estimate is the median of its per-block medians; its spread comes from the variation
//! between blocks, never from iterations inside one point, which share that visit's stall.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cluster_health_core::{Bandwidth, ByteSize};
use ndarray::Array3;

use crate::blocks::Blocks;
use crate::matrix::{Axis, CellStatus, Matrix, Memory};
use crate::plan::H2dPlan;
use crate::samples::{PointStatus, Sample, Sweep};
use crate::stats::{SD_OF_MAD, median, quantile, to_f64};

/// Row and column axes of an H2D plan, with the NUMA nodes that the callbacks tell.
pub(crate) fn axes_of_plan(
    plan: &H2dPlan,
    node_of_cpu: impl Fn(u32) -> Option<u32>,
    node_of_device: impl Fn(u32) -> Option<u32>,
) -> (Axis, Axis) {
    let cpus: Vec<u32> = plan.cpus.iter().map(|cpu| cpu.0).collect();
    let devices: Vec<u32> = plan.devices.iter().map(|device| device.0).collect();
    let cpu_nodes = cpus.iter().map(|&cpu| node_of_cpu(cpu)).collect();
    let device_nodes = devices.iter().map(|&device| node_of_device(device)).collect();
    (Axis::new("cpu", cpus, cpu_nodes), Axis::new("device", devices, device_nodes))
}

/// Row and column axes of a core-pair sweep, with the NUMA nodes that the callback tells.
pub(crate) fn pair_axes(
    rank0_cpus: Vec<u32>,
    rank1_cpus: Vec<u32>,
    node_of_cpu: impl Fn(u32) -> Option<u32>,
) -> (Axis, Axis) {
    let nodes = |cpus: &[u32]| cpus.iter().map(|&cpu| node_of_cpu(cpu)).collect();
    let (rank0_nodes, rank1_nodes) = (nodes(&rank0_cpus), nodes(&rank1_cpus));
    (
        Axis::new("rank-0 cpu", rank0_cpus, rank0_nodes),
        Axis::new("rank-1 cpu", rank1_cpus, rank1_nodes),
    )
}

/// Gathers the samples of one sweep, load and memory kind: where the first measured point used
/// page-locked memory, points with pageable memory are left out, and the other way round.
///
/// Memory: 8 bytes per cell and block and 1 byte of status; of the matrix at the end 16 more.
#[derive(Debug, Clone)]
pub struct Estimates {
    sweep: Sweep,
    load: String,
    sizes: Vec<ByteSize>,
    rows: Axis,
    columns: Axis,
    row_of: HashMap<u32, usize>,
    column_of: HashMap<u32, usize>,
    /// By block a rate for every cell, NaN = none.
    blocks: BTreeMap<u32, Vec<f64>>,
    /// Whether the host memory of the first measured point was pageable; others are left out.
    pageable: Option<bool>,
    /// Rates of all visits where a block visited a cell more than once; its median counts.
    repeated: HashMap<(u32, usize), Vec<f64>>,
    status: Vec<CellStatus>,
    scratch: Vec<f64>,
}

impl Estimates {
    /// Nothing gathered yet.
    #[must_use]
    pub fn new(sweep: Sweep, load: &str, sizes: Vec<ByteSize>, rows: Axis, columns: Axis) -> Self {
        let index = |axis: &Axis| axis.ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let cells = sizes.len() * rows.len() * columns.len();
        Self {
            sweep,
            load: load.to_owned(),
            row_of: index(&rows),
            column_of: index(&columns),
            sizes,
            rows,
            columns,
            blocks: BTreeMap::new(),
            pageable: None,
            repeated: HashMap::new(),
            status: vec![CellStatus::NotVisited; cells],
            scratch: Vec::new(),
        }
    }

    fn cell(&self, sample: &Sample) -> Option<usize> {
        let (row, column) = sample.cell()?;
        let size = self.sizes.binary_search(&sample.bytes).ok()?;
        let row = place(&self.rows, &self.row_of, row)?;
        let column = place(&self.columns, &self.column_of, column)?;
        Some((size * self.rows.len() + row) * self.columns.len() + column)
    }

    /// Adds a sample; sentinels, probes, confirmations and cells outside the axes are ignored.
    pub fn add(&mut self, sample: &Sample) {
        if !sample.is_matrix_point() {
            return;
        }
        let Some(cell) = self.cell(sample) else { return };
        if let Some(pinned) = sample.pinned
            && *self.pageable.get_or_insert(pinned.is_pageable()) != pinned.is_pageable()
        {
            return;
        }
        let status = match sample.status {
            PointStatus::Measured => CellStatus::Measured,
            PointStatus::Skipped => CellStatus::Skipped,
            PointStatus::Failed => CellStatus::Failed,
            PointStatus::Implausible => CellStatus::Implausible,
        };
        self.status[cell] = stronger(self.status[cell], status);
        if sample.status != PointStatus::Measured {
            return;
        }
        let (block, cells) = (sample.block, self.status.len());
        let rates = self.blocks.entry(block).or_insert_with(|| vec![f64::NAN; cells]);
        self.scratch.clear();
        self.scratch.extend(sample.iter_ns.iter().map(|&time| to_f64(time)));
        let rate = Bandwidth::of(sample.bytes, median(&mut self.scratch)).as_gb_per_second();
        if rates[cell].is_nan() {
            rates[cell] = rate;
        } else {
            let visits = self.repeated.entry((block, cell)).or_insert_with(|| vec![rates[cell]]);
            visits.push(rate);
            rates[cell] = median(&mut visits.clone());
        }
    }

    /// Takes over how the cells of another gathering with the same axes came out, as far as they
    /// have no stronger status here.
    pub(crate) fn absorb_statuses(&mut self, other: &Self) {
        for (own, status) in self.status.iter_mut().zip(&other.status) {
            *own = stronger(*own, *status);
        }
    }

    /// Cells (size, row, column) whose 95 % interval is wider than ± `width` of their median, or
    /// that have no interval yet.
    pub(crate) fn wider_than(&self, width: f64) -> BTreeSet<(ByteSize, usize, usize)> {
        let mut wanted = BTreeSet::new();
        let mut values = Vec::new();
        let per_size = self.rows.len() * self.columns.len();
        for (cell, status) in self.status.iter().enumerate() {
            if *status != CellStatus::Measured {
                continue;
            }
            self.block_values(cell, &mut values);
            if half_width(&mut values).is_none_or(|half| half > width) {
                let size = self.sizes[cell / per_size];
                let place = cell % per_size;
                wanted.insert((size, place / self.columns.len(), place % self.columns.len()));
            }
        }
        wanted
    }

    fn block_values(&self, cell: usize, values: &mut Vec<f64>) {
        values.clear();
        values
            .extend(self.blocks.values().map(|block| block[cell]).filter(|rate| rate.is_finite()));
    }

    /// Takes out what is faster than the path can be; the number of cells' block values.
    pub(crate) fn drop_implausible(&mut self) -> u64 {
        let per_size = self.rows.len() * self.columns.len();
        let mut dropped = 0;
        for size in 0..self.sizes.len() {
            let range = size * per_size..(size + 1) * per_size;
            let mut values: Vec<f64> = self
                .blocks
                .values()
                .flat_map(|block| block[range.clone()].iter().copied())
                .filter(|rate| rate.is_finite())
                .collect();
            let limit = implausible_above(&mut values);
            for block in self.blocks.values_mut() {
                for rate in &mut block[range.clone()] {
                    if *rate > limit {
                        *rate = f64::NAN;
                        dropped += 1;
                    }
                }
            }
        }
        dropped
    }

    /// The matrix, and how many block values were implausible beside those marked at once.
    #[must_use]
    pub fn finish(self) -> (Matrix, u64) {
        let (matrix, dropped, _) = self.finish_with_blocks();
        (matrix, dropped)
    }

    /// The same with the rates of every block, from which the matrix is made.
    pub(crate) fn finish_with_blocks(mut self) -> (Matrix, u64, Blocks) {
        let dropped = self.drop_implausible();
        let (matrix, blocks) = self.into_parts();
        (matrix, dropped, blocks)
    }

    /// The matrix and the rates of every block, from which it is made; the caller has dropped
    /// implausible ones.
    pub(crate) fn into_parts(mut self) -> (Matrix, Blocks) {
        let shape = (self.sizes.len(), self.rows.len(), self.columns.len());
        let mut gbps = Array3::from_elem(shape, f64::NAN);
        let mut spread = Array3::from_elem(shape, f64::NAN);
        let mut values = Vec::new();
        for (cell, (gbps, spread)) in gbps.iter_mut().zip(&mut spread).enumerate() {
            self.block_values(cell, &mut values);
            if values.is_empty() {
                if self.status[cell] == CellStatus::Measured {
                    self.status[cell] = CellStatus::Implausible;
                }
                continue;
            }
            *gbps = median(&mut values);
            if values.len() > 1 {
                *spread = relative_mad(&mut values, *gbps);
            }
        }
        let mut blocks = Blocks::default();
        for (number, rates) in self.blocks {
            if let Ok(rates) = Array3::from_shape_vec(shape, rates) {
                blocks.numbers.push(number);
                blocks.gbps.push(rates);
            }
        }
        let memory = match self.pageable {
            Some(true) => Memory::Pageable,
            _ if self.sweep.is_pair() => Memory::Device,
            _ => Memory::PageLocked,
        };
        let matrix = Matrix {
            sweep: self.sweep,
            load: self.load,
            memory,
            sizes: self.sizes,
            rows: self.rows,
            columns: self.columns,
            gbps,
            spread,
            status: Array3::from_shape_vec(shape, self.status).unwrap_or_default(),
            predicted: None,
        };
        (matrix, blocks)
    }

    /// The matrix alone.
    #[must_use]
    pub fn into_matrix(self) -> Matrix {
        self.finish().0
    }
}

/// Position of an id in an axis. Most axes are 0, 1, 2 …, which needs no look into the map.
fn place(axis: &Axis, places: &HashMap<u32, usize>, id: u32) -> Option<usize> {
    let same = usize::try_from(id).ok().filter(|&at| axis.ids.get(at) == Some(&id));
    same.or_else(|| places.get(&id).copied())
}

/// What a cell is when some of its visits ended one way and some another.
fn stronger(old: CellStatus, new: CellStatus) -> CellStatus {
    let rank = |status| match status {
        CellStatus::Measured => 4,
        CellStatus::Implausible => 3,
        CellStatus::Failed => 2,
        CellStatus::Skipped => 1,
        CellStatus::NotVisited => 0,
    };
    if rank(new) > rank(old) { new } else { old }
}

/// No memory of any machine is this fast: decimal GB/s.
const FASTER_THAN_ANYTHING: f64 = 100_000.0;

/// Fewer values than this say nothing about each other: one of two may be the healthy one.
const ENOUGH_TO_COMPARE: usize = 10;

/// Rates above this are implausible: twice the 99th percentile of the values without their fastest
/// hundredth (at least one), so that a few outliers cannot excuse themselves. The fastest hundredth
/// is all that can be found so, which a healthy minority among slow cells is not.
fn implausible_above(values: &mut [f64]) -> f64 {
    if values.len() < ENOUGH_TO_COMPARE {
        return FASTER_THAN_ANYTHING;
    }
    let suspects = (values.len() / 100).max(1);
    let kept = values.len() - suspects;
    let (rest, _, _) = values.select_nth_unstable_by(kept, f64::total_cmp);
    (2.0 * quantile(rest, 0.99)).min(FASTER_THAN_ANYTHING)
}

/// Expected median absolute deviation of n normal values ÷ their standard deviation falls below
/// its limit for few values; these factors make it an estimate of that standard deviation.
/// (Croux and Rousseeuw 1992 give the same corrections for n = 2 … 9.)
fn mad_factor(count: usize) -> f64 {
    const SMALL: [f64; 8] = [1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107];
    let correction = match count {
        0 | 1 => f64::NAN,
        2..=9 => SMALL[count - 2],
        _ => {
            let n = to_f64(count as u64);
            n / (n - 0.8)
        }
    };
    SD_OF_MAD * correction
}

pub(crate) fn relative_mad(values: &mut [f64], center: f64) -> f64 {
    let factor = mad_factor(values.len());
    for value in values.iter_mut() {
        *value = (*value - center).abs();
    }
    factor * median(values) / center
}

/// Relative half-width of the 95 % interval of the median of block values; `None` below two.
fn half_width(values: &mut [f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let n = to_f64(values.len() as u64);
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    // The median of normal values has π/2 of the variance of their mean.
    let error = (variance * std::f64::consts::FRAC_PI_2 / n).sqrt();
    Some(student_95(values.len() - 1) * error / median(values))
}

/// Two-sided 95 % quantile of Student's t.
fn student_95(degrees: usize) -> f64 {
    const TABLE: [f64; 19] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
    ];
    TABLE.get(degrees.saturating_sub(1)).copied().unwrap_or(1.96)
}

#[cfg(test)]
mod tests {
    use cluster_health_core::{CpuId, DeviceId};
    use proptest::prelude::*;

    use super::*;
    use crate::samples::Phase;

    const SIZE: ByteSize = ByteSize(1000);

    /// CPUs 0 to 3 and devices 0 and 1, one size.
    fn empty() -> Estimates {
        let axis = |name, ids: &[u32]| Axis::new(name, ids.to_vec(), Vec::new());
        let (rows, columns) = (axis("cpu", &[0, 1, 2, 3]), axis("device", &[0, 1]));
        Estimates::new(Sweep::H2d, "idle", vec![SIZE], rows, columns)
    }

    /// A visit that took these times; 1,000 bytes in t ns are 1000 ÷ t GB/s.
    fn visit(cell: (u32, u32), block: u32, times: &[u64]) -> Sample {
        let mut sample = Sample::new(0, Sweep::H2d, SIZE);
        (sample.cpu, sample.device) = (Some(CpuId(cell.0)), Some(DeviceId(cell.1)));
        sample.block = block;
        sample.iter_ns = times.to_vec();
        sample
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs()
    }

    #[test]
    fn a_cell_is_the_median_over_blocks_of_the_median_iteration() {
        let mut estimates = empty();
        // Medians 200, 400, 100: rates 5, 2.5, 10.
        for (block, times) in [(0, [100, 200, 900]), (1, [400, 400, 1]), (2, [100, 90, 5000])] {
            estimates.add(&visit((2, 1), block, &times));
        }
        let (matrix, dropped) = estimates.finish();
        assert!(close(matrix.gbps[[0, 2, 1]], 5.0));
        assert_eq!((dropped, matrix.status[[0, 2, 1]]), (0, CellStatus::Measured));
        // Deviations 0, 2.5, 5 of the median 5; for three values the factor is 1.4826 × 1.495.
        assert!(close(matrix.spread[[0, 2, 1]], 1.4826 * 1.495 * 0.5));
        assert!(matrix.gbps[[0, 0, 0]].is_nan());
        assert_eq!(matrix.status[[0, 0, 0]], CellStatus::NotVisited);
    }

    #[test]
    fn visits_that_are_no_first_class_ones_are_ignored() {
        let mut estimates = empty();
        let mut add = |change: fn(&mut Sample)| {
            let mut sample = visit((0, 0), 0, &[100]);
            change(&mut sample);
            estimates.add(&sample);
        };
        add(|sample| sample.sentinel = true);
        add(|sample| sample.phase = Phase::Probe);
        add(|sample| sample.phase = Phase::Confirm);
        add(|sample| sample.cpu = Some(CpuId(9)));
        add(|sample| sample.device = None);
        add(|sample| sample.bytes = ByteSize(999));
        let (matrix, _) = estimates.finish();
        assert!(matrix.status.iter().all(|status| *status == CellStatus::NotVisited));
    }

    #[test]
    fn one_measured_block_is_enough_and_the_strongest_reason_is_kept_otherwise() {
        let mut estimates = empty();
        for (cell, statuses) in [
            ((0, 0), [PointStatus::Failed, PointStatus::Measured]),
            ((1, 0), [PointStatus::Skipped, PointStatus::Failed]),
            ((2, 0), [PointStatus::Skipped, PointStatus::Skipped]),
            ((3, 0), [PointStatus::Implausible, PointStatus::Failed]),
        ] {
            for (block, status) in (0..).zip(statuses) {
                let mut sample = visit(cell, block, &[100]);
                sample.status = status;
                estimates.add(&sample);
            }
        }
        let (matrix, _) = estimates.finish();
        let found: Vec<CellStatus> = (0..4).map(|row| matrix.status[[0, row, 0]]).collect();
        let wanted = [
            CellStatus::Measured,
            CellStatus::Failed,
            CellStatus::Skipped,
            CellStatus::Implausible,
        ];
        assert_eq!(found, wanted);
        assert_eq!(matrix.gbps.iter().filter(|rate| rate.is_finite()).count(), 1);
    }

    #[test]
    fn f17_rates_beyond_twice_the_99th_percentile_are_dropped() {
        let mut estimates = empty();
        for block in 0..2 {
            for cpu in 0..4 {
                for device in 0..2 {
                    let fast = (cpu, device, block) == (3, 1, 0);
                    estimates.add(&visit((cpu, device), block, &[if fast { 1 } else { 100 }]));
                }
            }
        }
        let (matrix, dropped) = estimates.finish();
        assert_eq!(dropped, 1);
        assert_eq!(matrix.status[[0, 3, 1]], CellStatus::Measured, "its other block counts");
        assert!(matrix.gbps.iter().all(|rate| close(*rate, 10.0)));
    }

    #[test]
    fn only_the_fastest_hundredth_is_under_suspicion() {
        let limit = |slow: usize, fast: usize| {
            let mut values = [vec![1.0; slow], vec![50.0; fast]].concat();
            implausible_above(&mut values)
        };
        assert!(close(limit(99, 1), 2.0));
        assert!(close(limit(198, 2), 2.0));
        // A healthy minority, and too few values to compare.
        assert!(close(limit(90, 10), 100.0));
        assert!(limit(8, 1) > 1e4 && limit(0, 0) > 1e4);
        // No memory is that fast, whatever the others say.
        assert!(implausible_above(&mut [263_172.0; 20]) < 263_172.0);
    }

    /// By hand: 9, 10, 11 have the standard deviation 1; 4.303 × √(π ÷ 2 ÷ 3) ÷ 10.
    #[test]
    fn intervals_come_from_between_blocks() {
        let half = half_width(&mut [11.0, 9.0, 10.0]).unwrap();
        assert!(close(half, 4.303 * (std::f64::consts::PI / 6.0).sqrt() / 10.0));
        assert_eq!(half_width(&mut [1.0]), None);

        let mut estimates = empty();
        for block in 0..3 {
            // Iterations inside a point vary as much, which says nothing.
            estimates.add(&visit((0, 0), block, &[50, 100, 900]));
            estimates.add(&visit((1, 0), block, &[100 + 20 * u64::from(block)]));
        }
        estimates.add(&visit((2, 0), 0, &[100]));
        let wanted = [(SIZE, 1, 0), (SIZE, 2, 0)];
        assert_eq!(estimates.wider_than(0.1), wanted.into());
        assert_eq!(estimates.wider_than(0.9), [wanted[1]].into(), "one block has no interval");
    }

    proptest! {
        /// The order of the samples decides nothing, down to the last bit.
        #[test]
        fn f20_estimates_do_not_depend_on_the_order_of_the_samples(
            samples in prop::collection::vec(
                ((0_u32..4, 0_u32..2), 0_u32..4, prop::collection::vec(1_u64..1000, 1..4)), 1..60,
            ),
            seed in any::<u64>(),
        ) {
            let mut shuffled = samples.clone();
            crate::schedule::Random::new(seed).shuffle(&mut shuffled);
            let matrix = |samples: &[((u32, u32), u32, Vec<u64>)]| {
                let mut estimates = empty();
                for (cell, block, times) in samples {
                    estimates.add(&visit(*cell, *block, times));
                }
                let (matrix, dropped) = estimates.finish();
                let bits: Vec<u64> =
                    matrix.gbps.iter().chain(&matrix.spread).map(|x| x.to_bits()).collect();
                (bits, matrix.status, dropped)
            };
            prop_assert_eq!(matrix(&samples), matrix(&shuffled));
        }
    }
}
