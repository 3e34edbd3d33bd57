//! In which order points are measured: randomised complete blocks, with probes and sentinels.
//!
//! The order depends on the plan and its seed alone, so that an interrupted run can go on where
//! it stopped. The generator is our own (splitmix64, Fisher–Yates) because a schedule must be the
//! same in every version.

use cluster_health_core::{ByteSize, Machine};

use crate::plan::{H2dPlan, Order, PROBE_SIZE};
use crate::samples::Phase;

/// A cell by positions in the plan's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Cell {
    /// Position in the plan's CPUs.
    pub row: usize,
    /// Position in the plan's devices.
    pub column: usize,
}

/// One planned point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedPoint {
    /// Place in the whole run.
    pub seq: u64,
    /// `seq` of the first point of this run of points on one bound core.
    pub visit: u64,
    /// Replicate.
    pub block: u32,
    /// Where.
    pub cell: Cell,
    /// Bytes per copy.
    pub bytes: ByteSize,
    /// Blocks or probe.
    pub phase: Phase,
    /// An extra visit of a drift cell.
    pub sentinel: bool,
}

/// Deterministic random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Below `bound`, which is above 0; the bias of a 64-bit multiply is far below any use here.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let product = u128::from(self.next()) * bound as u128;
        usize::try_from(product >> 64).unwrap_or(0)
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index + 1));
        }
    }
}

/// Makes the blocks of a plan, one after another.
#[derive(Debug, Clone)]
pub struct Schedule<'a> {
    plan: &'a H2dPlan,
    random: Random,
    next_seq: u64,
    next_block: u32,
    sentinels: Vec<Cell>,
    next_sentinel: usize,
    until_sentinel: usize,
}

/// A sentinel visit comes after so many points, drawn afresh each time: a fixed period would
/// resonate with periodic disturbances.
const SENTINEL_GAP: std::ops::RangeInclusive<usize> = 48..=80;

/// One cell would miss the drift of a single device.
const SENTINEL_CELLS: usize = 4;

impl<'a> Schedule<'a> {
    /// The schedule of `plan` on `machine`, before its first block.
    #[must_use]
    pub fn new(plan: &'a H2dPlan, machine: &Machine) -> Self {
        let mut random = Random::new(plan.seed);
        let sentinels = sentinel_cells(plan, machine, &mut random);
        let until_sentinel = gap(&mut random);
        Self {
            plan,
            random,
            next_seq: 0,
            next_block: 0,
            sentinels,
            next_sentinel: 0,
            until_sentinel,
        }
    }

    /// Points of one complete block without sentinels.
    #[must_use]
    pub fn block_len(&self) -> usize {
        let probes = if self.plan.has_probes() {
            self.plan.cpus.len().max(self.plan.devices.len())
        } else {
            0
        };
        self.plan.cells() * self.plan.sizes.len() + probes
    }

    /// The next block: of all cells, or of those that `wanted` names.
    pub fn next_block(
        &mut self,
        wanted: Option<&dyn Fn(Cell, ByteSize) -> bool>,
    ) -> Vec<PlannedPoint> {
        let mut points = Vec::with_capacity(self.block_len() + self.block_len() / 40);
        let mut rows: Vec<usize> = (0..self.plan.cpus.len()).collect();
        let shuffled = self.plan.order == Order::Blocks;
        if shuffled {
            self.random.shuffle(&mut rows);
        }
        let mut probes = self.probes(&rows);
        for row in rows {
            let mut visit: Vec<(usize, ByteSize, Phase)> = Vec::new();
            for &bytes in &self.plan.sizes {
                for column in 0..self.plan.devices.len() {
                    if wanted.is_none_or(|wanted| wanted(Cell { row, column }, bytes)) {
                        visit.push((column, bytes, Phase::Blocks));
                    }
                }
            }
            if visit.is_empty() {
                continue;
            }
            let probes = probes.get_mut(row).map(std::mem::take).unwrap_or_default();
            visit.extend(probes.into_iter().map(|column| (column, PROBE_SIZE, Phase::Probe)));
            if shuffled {
                self.random.shuffle(&mut visit);
            }
            let mut first = true;
            for (column, bytes, phase) in visit {
                let cell = Cell { row, column };
                first |= self.sentinel(&mut points);
                self.push(&mut points, cell, bytes, phase, false, first);
                first = false;
            }
        }
        self.next_block += 1;
        points
    }

    /// Columns to probe per row: every core and every device gets at least one.
    fn probes(&mut self, rows: &[usize]) -> Vec<Vec<usize>> {
        if !self.plan.has_probes() {
            return Vec::new();
        }
        let mut columns: Vec<usize> = (0..self.plan.devices.len()).collect();
        self.random.shuffle(&mut columns);
        let mut probes = vec![Vec::new(); rows.len()];
        for index in 0..rows.len().max(columns.len()) {
            probes[rows[index % rows.len()]].push(columns[index % columns.len()]);
        }
        probes
    }

    /// A sentinel visit if it is due; true when the core must be bound again afterwards.
    fn sentinel(&mut self, points: &mut Vec<PlannedPoint>) -> bool {
        if self.plan.order != Order::Blocks {
            return false;
        }
        if self.until_sentinel > 0 {
            self.until_sentinel -= 1;
            return false;
        }
        // The ordinary point that follows this visit is the first of the gap.
        self.until_sentinel = gap(&mut self.random) - 1;
        let cell = self.sentinels[self.next_sentinel % self.sentinels.len()];
        self.next_sentinel += 1;
        let bytes = self.plan.sizes[self.plan.sizes.len() / 2];
        self.push(points, cell, bytes, Phase::Blocks, true, true);
        true
    }

    fn push(
        &mut self,
        points: &mut Vec<PlannedPoint>,
        cell: Cell,
        bytes: ByteSize,
        phase: Phase,
        sentinel: bool,
        starts_visit: bool,
    ) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let visit = match points.last() {
            Some(last) if !starts_visit => last.visit,
            _ => seq,
        };
        let block = self.next_block;
        points.push(PlannedPoint { seq, visit, block, cell, bytes, phase, sentinel });
    }
}

fn gap(random: &mut Random) -> usize {
    SENTINEL_GAP.start() + random.below(SENTINEL_GAP.end() - SENTINEL_GAP.start() + 1)
}

/// Up to four usable cells on different devices and NUMA nodes.
fn sentinel_cells(plan: &H2dPlan, machine: &Machine, random: &mut Random) -> Vec<Cell> {
    let mut by_node = std::collections::BTreeMap::<_, Vec<usize>>::new();
    for (row, cpu) in plan.cpus.iter().enumerate() {
        if !plan.unusable_cpus.contains_key(cpu) {
            by_node.entry(machine.node_of(*cpu)).or_default().push(row);
        }
    }
    let nodes: Vec<Vec<usize>> = by_node.into_values().collect();
    let columns: Vec<usize> = (0..plan.devices.len())
        .filter(|&column| !plan.unusable_devices.contains_key(&plan.devices[column]))
        .collect();
    let mut cells = Vec::new();
    for index in 0..SENTINEL_CELLS {
        let node = &nodes[index * nodes.len() / SENTINEL_CELLS];
        let cell = Cell {
            row: node[random.below(node.len())],
            column: columns[index * columns.len() / SENTINEL_CELLS],
        };
        if !cells.contains(&cell) {
            cells.push(cell);
        }
    }
    cells
}
