//! The order of a core-pair sweep: all points of a block shuffled together.

use std::collections::BTreeMap;

use cluster_health_core::{ByteSize, CpuId, Machine};

use super::{Blocks, Cell, PlannedPoint, Random, SENTINEL_CELLS, Sequence, Wanted};
use crate::plan::{CorePairPlan, Order, PROBE_SIZE};
use crate::samples::Phase;

/// Makes the blocks of a core-pair plan, one after another.
#[derive(Debug, Clone)]
pub struct PairSchedule<'a> {
    plan: &'a CorePairPlan,
    sequence: Sequence,
    last: Option<Cell>,
    /// Positions of the usable CPUs of each rank, in the order of this block's probes.
    probes: [Vec<u32>; 2],
}

impl<'a> PairSchedule<'a> {
    /// The schedule of `plan` on `machine`, before its first block; its points are numbered from
    /// `first_seq`, above 0 after another sweep of the same run.
    #[must_use]
    pub fn new(plan: &'a CorePairPlan, machine: &Machine, first_seq: u64) -> Self {
        let mut random = Random::new(plan.seed);
        let sentinels = sentinel_pairs(plan, machine, &mut random);
        let probes = if plan.has_probes() {
            [
                usable(&plan.rank0_cpus, &plan.unusable_rank0_cpus),
                usable(&plan.rank1_cpus, &plan.unusable_rank1_cpus),
            ]
        } else {
            Default::default()
        };
        let sequence = Sequence::new(random, plan.order, first_seq, sentinels, &plan.sizes);
        Self { plan, sequence, last: None, probes }
    }

    /// Points of one complete block without sentinels.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.matrix_points() + self.probe_count()
    }

    fn matrix_points(&self) -> usize {
        self.plan.cells() * self.plan.sizes.len()
    }

    /// Every usable CPU of either rank is probed at least once.
    fn probe_count(&self) -> usize {
        self.probes[0].len().max(self.probes[1].len())
    }

    /// The next block: of all cells, or without probes of those that `wanted` names. Points are
    /// made while they are taken; a block in waiting costs 4 bytes per point.
    pub fn next_block(
        &mut self,
        wanted: Option<&dyn Fn(Cell, ByteSize) -> bool>,
    ) -> PairBlock<'_, 'a> {
        self.sequence.begin_block();
        let count = u32::try_from(self.block_len()).unwrap_or(u32::MAX);
        let mut order: Vec<u32> = match self.plan.order {
            Order::Blocks => (0..count).collect(),
            Order::Sequential => self.sequential(),
        };
        if let Some(wanted) = wanted {
            order.retain(|&index| {
                let (cell, bytes, phase) = self.place(index);
                phase == Phase::Blocks && wanted(cell, bytes)
            });
        }
        if self.sequence.is_shuffled() {
            for positions in &mut self.probes {
                self.sequence.random.shuffle(positions);
            }
            self.sequence.random.shuffle(&mut order);
        }
        PairBlock { schedule: self, order, taken: 0 }
    }

    /// Rank-0 CPU outer, then size ascending, rank-1 CPU inner.
    fn sequential(&self) -> Vec<u32> {
        let (rows, columns) = (self.plan.rank0_cpus.len(), self.plan.rank1_cpus.len());
        let sizes = self.plan.sizes.len();
        (0..rows)
            .flat_map(|row| (0..sizes).map(move |size| (size * rows + row) * columns))
            .flat_map(|first| first..first + columns)
            .filter_map(|index| u32::try_from(index).ok())
            .collect()
    }

    /// What an index stands for: below [`matrix_points`](Self::matrix_points) a cell in the order
    /// of the matrix (size, row, column), above it a probe.
    fn place(&self, index: u32) -> (Cell, ByteSize, Phase) {
        let index = index as usize;
        let columns = self.plan.rank1_cpus.len();
        match index.checked_sub(self.matrix_points()) {
            None => {
                let cells = self.plan.cells();
                let place = index % cells;
                let cell = Cell { row: place / columns, column: place % columns };
                (cell, self.plan.sizes[index / cells], Phase::Blocks)
            }
            Some(probe) => {
                let [row, column] =
                    self.probes.each_ref().map(|list| list[probe % list.len()] as usize);
                (Cell { row, column }, PROBE_SIZE, Phase::Probe)
            }
        }
    }
}

impl Blocks for PairSchedule<'_> {
    fn block_len(&self) -> usize {
        Self::block_len(self)
    }

    fn block(&mut self, wanted: Option<Wanted<'_>>) -> impl Iterator<Item = PlannedPoint> {
        self.next_block(wanted)
    }
}

/// The points of one block.
#[derive(Debug)]
pub struct PairBlock<'s, 'a> {
    schedule: &'s mut PairSchedule<'a>,
    order: Vec<u32>,
    taken: usize,
}

impl Iterator for PairBlock<'_, '_> {
    type Item = PlannedPoint;

    fn next(&mut self) -> Option<PlannedPoint> {
        let index = *self.order.get(self.taken)?;
        let schedule = &mut *self.schedule;
        let sentinel = schedule.sequence.due_sentinel();
        let point = if let Some(cell) = sentinel {
            schedule.sequence.sentinel(cell, schedule.last != Some(cell))
        } else {
            self.taken += 1;
            let (cell, bytes, phase) = schedule.place(index);
            schedule.sequence.point(cell, bytes, phase, schedule.last != Some(cell))
        };
        schedule.last = Some(point.cell);
        Some(point)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.order.len() - self.taken, None)
    }
}

fn usable(cpus: &[CpuId], unusable: &BTreeMap<CpuId, String>) -> Vec<u32> {
    (0..).zip(cpus).filter(|(_, cpu)| !unusable.contains_key(cpu)).map(|(at, _)| at).collect()
}

/// Up to four usable cells, on different NUMA nodes for both ranks where there are several, and
/// off the diagonal where there is anything else: a pair on one CPU is no normal cell.
fn sentinel_pairs(plan: &CorePairPlan, machine: &Machine, random: &mut Random) -> Vec<Cell> {
    let by_node = |cpus: &[CpuId], unusable: &BTreeMap<CpuId, String>| -> Vec<Vec<usize>> {
        let mut nodes = BTreeMap::<_, Vec<usize>>::new();
        for position in usable(cpus, unusable) {
            let position = position as usize;
            nodes.entry(machine.node_of(cpus[position])).or_default().push(position);
        }
        nodes.into_values().collect()
    };
    let rows = by_node(&plan.rank0_cpus, &plan.unusable_rank0_cpus);
    let columns = by_node(&plan.rank1_cpus, &plan.unusable_rank1_cpus);
    let mut cells = Vec::new();
    if rows.is_empty() || columns.is_empty() {
        return cells;
    }
    for index in 0..SENTINEL_CELLS {
        let own = index * rows.len() / SENTINEL_CELLS;
        // Half the nodes further on.
        let other = (index * columns.len() / SENTINEL_CELLS + columns.len() / 2) % columns.len();
        let row = rows[own][random.below(rows[own].len())];
        let cpu = plan.rank0_cpus[row];
        let off_diagonal = |list: &mut dyn Iterator<Item = &usize>| -> Vec<usize> {
            list.copied().filter(|&column| plan.rank1_cpus[column] != cpu).collect()
        };
        let mut candidates = off_diagonal(&mut columns[other].iter());
        if candidates.is_empty() {
            candidates = off_diagonal(&mut columns.iter().flatten());
        }
        if candidates.is_empty() {
            candidates.clone_from(&columns[other]);
        }
        let cell = Cell { row, column: candidates[random.below(candidates.len())] };
        if !cells.contains(&cell) {
            cells.push(cell);
        }
    }
    cells
}
