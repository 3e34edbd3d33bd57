//! The order of a core-pair sweep: all points of a block shuffled together.

use std::collections::BTreeMap;

use cluster_health_core::{ByteSize, CpuId, Machine};

use super::{Blocks, Cell, PlannedPoint, Random, SENTINEL_CELLS, Sequence, Wanted};
use crate::plan::{CorePairPlan, Order, PROBE_SIZE};
use crate::samples::Phase;

/// Points that are measured under one load profile before the next one.
const STRETCH: usize = 64;

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
        let loads = plan.loads.len();
        let sequence = Sequence::new(random, plan.order, first_seq, sentinels, &plan.sizes, loads);
        Self { plan, sequence, last: None, probes }
    }

    /// Points of one complete block without sentinels.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.points_of_one_load() * self.plan.loads.len()
    }

    fn points_of_one_load(&self) -> usize {
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
    /// made while they are taken; a block in waiting costs 4 bytes per point, 5 under several loads.
    ///
    /// Of several load profiles each measures 64 points before the next one measures the same.
    pub fn next_block(
        &mut self,
        wanted: Option<&dyn Fn(Cell, ByteSize) -> bool>,
    ) -> PairBlock<'_, 'a> {
        self.sequence.begin_block();
        let count = u32::try_from(self.points_of_one_load()).unwrap_or(u32::MAX);
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
        let loads =
            if self.plan.loads.len() > 1 { self.interleave(&mut order) } else { Vec::new() };
        PairBlock { schedule: self, order, loads, taken: 0, after_sentinel: false }
    }

    /// Repeats every stretch of the order under all load profiles; the profile of each point.
    fn interleave(&mut self, order: &mut Vec<u32>) -> Vec<u8> {
        let count = order.len() * self.plan.loads.len();
        let (mut all, mut loads) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for stretch in order.chunks_mut(STRETCH) {
            for load in self.sequence.profiles() {
                if self.sequence.is_shuffled() {
                    self.sequence.random.shuffle(stretch);
                }
                all.extend_from_slice(stretch);
                loads.resize(all.len(), u8::try_from(load).unwrap_or(u8::MAX));
            }
        }
        *order = all;
        loads
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

    fn sequence(&mut self) -> &mut Sequence {
        &mut self.sequence
    }

    fn sizes(&self) -> &[ByteSize] {
        &self.plan.sizes
    }

    fn visit(
        &mut self,
        mut visits: Vec<(Cell, ByteSize)>,
        phase: Phase,
    ) -> impl Iterator<Item = PlannedPoint> {
        let mut points = Vec::with_capacity(visits.len() * self.plan.loads.len());
        for load in self.sequence.profiles() {
            self.sequence.load = load;
            self.sequence.random.shuffle(&mut visits);
            for &(cell, bytes) in &visits {
                let moves = self.last != Some(cell);
                self.last = Some(cell);
                points.push(self.sequence.point(cell, bytes, phase, moves));
            }
        }
        points.into_iter()
    }
}

/// The points of one block.
#[derive(Debug)]
pub struct PairBlock<'s, 'a> {
    schedule: &'s mut PairSchedule<'a>,
    order: Vec<u32>,
    /// The load profile of each; empty when there is one.
    loads: Vec<u8>,
    taken: usize,
    after_sentinel: bool,
}

impl Iterator for PairBlock<'_, '_> {
    type Item = PlannedPoint;

    fn next(&mut self) -> Option<PlannedPoint> {
        let index = *self.order.get(self.taken)?;
        let schedule = &mut *self.schedule;
        schedule.sequence.load = self.loads.get(self.taken).copied().map_or(0, usize::from);
        // The point that a sentinel came before is not asked about again.
        let sentinel = if self.after_sentinel { None } else { schedule.sequence.due_sentinel() };
        self.after_sentinel = sentinel.is_some();
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use cluster_health_core::Scenario;

    use super::*;
    use crate::plan::{CorePairPlanBuilder, H2dPlan};
    use crate::schedule::Schedule;

    fn machine(cpus: u32, nodes: u32) -> Machine {
        let text = format!("[machine]\ncpus = {cpus}\nnuma_nodes = {nodes}\ndevices = 3\n");
        Machine::synthetic(Scenario::parse(&text, "test").unwrap()).unwrap()
    }

    fn plan(machine: &Machine) -> CorePairPlanBuilder {
        assert!(machine.has_virtual_time());
        CorePairPlan::builder().sizes([ByteSize::mib(1), ByteSize::mib(8)]).seed(7)
    }

    fn cell(point: &PlannedPoint) -> (usize, usize) {
        (point.cell.row, point.cell.column)
    }

    /// seq, visit, row, column, bytes, sentinel.
    type Row = (u64, u64, usize, usize, u64, bool);

    #[test]
    fn h2d_schedules_are_those_of_the_first_version() {
        // Printed by the version that had H2D alone, for this machine and plan.
        const KIB: u64 = 1024;
        const MIB: u64 = 1024 * KIB;
        let expected: [&[Row]; 2] = [
            &[
                (0, 0, 2, 0, MIB, false),
                (1, 0, 2, 2, MIB, false),
                (2, 0, 2, 2, 4 * MIB, false),
                (3, 0, 2, 1, MIB, false),
                (4, 0, 2, 1, 4 * MIB, false),
                (5, 0, 2, 0, 4 * MIB, false),
                (6, 0, 2, 0, 64 * KIB, false),
                (7, 7, 6, 2, 4 * MIB, false),
            ],
            &[
                (56, 56, 0, 1, MIB, false),
                (57, 56, 0, 1, 64 * KIB, false),
                (58, 56, 0, 2, 4 * MIB, false),
                (59, 56, 0, 1, 4 * MIB, false),
                (60, 56, 0, 2, MIB, false),
                (61, 56, 0, 0, 4 * MIB, false),
                (62, 62, 1, 0, 4 * MIB, true),
                (63, 63, 0, 0, MIB, false),
            ],
        ];
        let machine = machine(8, 2);
        let plan = H2dPlan::builder()
            .sizes([ByteSize::mib(1), ByteSize::mib(4)])
            .seed(7)
            .build(&machine)
            .unwrap();
        let mut schedule = Schedule::new(&plan, &machine);
        for (expected, len) in expected.into_iter().zip([56, 57]) {
            let points = schedule.next_block(None);
            assert_eq!(points.len(), len);
            let found: Vec<Row> = points
                .iter()
                .take(8)
                .map(|p| (p.seq, p.visit, p.cell.row, p.cell.column, p.bytes.bytes(), p.sentinel))
                .collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_block_visits_every_cell_once_and_probes_every_cpu() {
        let machine = machine(12, 3);
        let plan = plan(&machine).rank0_cpus(0..12).rank1_cpus([7, 3, 11, 0]).build(&machine);
        let plan = plan.unwrap();
        let mut schedule = PairSchedule::new(&plan, &machine, 1000);
        assert_eq!(schedule.block_len(), 12 * 4 * 2 + 12);
        let mut orders = Vec::new();
        let mut next = 1000;
        for block in 0..3 {
            let planned = schedule.next_block(None);
            assert_eq!(planned.size_hint().0, 12 * 4 * 2 + 12);
            let points: Vec<PlannedPoint> = planned.collect();
            assert!(points.iter().all(|point| point.block == block));
            for point in &points {
                assert_eq!(point.seq, next);
                next += 1;
            }
            let blocks: Vec<_> = points
                .iter()
                .filter(|point| point.phase == Phase::Blocks && !point.sentinel)
                .map(|point| (cell(point), point.bytes))
                .collect();
            assert_eq!(blocks.len(), 12 * 4 * 2);
            assert_eq!(blocks.iter().collect::<BTreeSet<_>>().len(), 12 * 4 * 2);
            let probes: Vec<_> = points.iter().filter(|p| p.phase == Phase::Probe).collect();
            assert_eq!(probes.len(), 12);
            assert!(probes.iter().all(|point| point.bytes == ByteSize::kib(64)));
            let rows: BTreeSet<usize> = probes.iter().map(|point| point.cell.row).collect();
            let columns: BTreeSet<usize> = probes.iter().map(|point| point.cell.column).collect();
            assert_eq!((rows.len(), columns.len()), (12, 4));
            orders.push(blocks);
        }
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[1], orders[2]);
        // Shuffled entirely: rows, columns and sizes change all the time.
        let order: Vec<[u64; 3]> = orders[0]
            .iter()
            .map(|((row, column), bytes)| [*row as u64, *column as u64, bytes.bytes()])
            .collect();
        let changes =
            |key: usize| order.windows(2).filter(|pair| pair[0][key] != pair[1][key]).count();
        // Of 95 transitions 11 of 12, 3 of 4 and half would change: 87, 71 and 48.
        assert!(changes(0) > 75);
        assert!(changes(1) > 55);
        assert!(changes(2) > 30);
    }

    #[test]
    fn loads_measure_stretches_of_the_same_pairs_in_turn() {
        let machine = machine(12, 3);
        let loads = ["idle", "cpu:2"].map(|name| name.parse().unwrap());
        let plan = plan(&machine).loads(loads).build(&machine).unwrap();
        let mut schedule = PairSchedule::new(&plan, &machine, 0);
        let points_of_one_load = 12 * 12 * 2 + 12;
        assert_eq!(schedule.block_len(), 2 * points_of_one_load);
        let points: Vec<PlannedPoint> =
            schedule.next_block(None).filter(|point| !point.sentinel).collect();
        let mut first = Vec::new();
        for stretch in points.chunks(2 * STRETCH) {
            let (before, after) = stretch.split_at(stretch.len() / 2);
            let key = |points: &[PlannedPoint]| -> Vec<((usize, usize), u64)> {
                let mut keys: Vec<_> =
                    points.iter().map(|point| (cell(point), point.bytes.bytes())).collect();
                keys.sort_unstable();
                keys
            };
            assert_eq!(key(before), key(after));
            assert!(before.iter().all(|point| point.load == before[0].load));
            assert!(after.iter().all(|point| point.load == 1 - before[0].load));
            first.push(before[0].load);
        }
        // Every order is followed by its reverse.
        assert_eq!(first.len(), 5);
        assert!(first.chunks_exact(2).all(|pair| pair[0] != pair[1]), "{first:?}");
        let confirmed: Vec<_> = schedule.confirm(&[Cell { row: 1, column: 2 }]).collect();
        assert_eq!(confirmed.len(), 4);
        assert_eq!(confirmed.iter().filter(|point| point.load == 1).count(), 2);
    }

    #[test]
    fn the_order_depends_on_the_seed_alone() {
        let machine = machine(8, 2);
        let order = |seed| {
            let plan = plan(&machine).seed(seed).build(&machine).unwrap();
            PairSchedule::new(&plan, &machine, 0).next_block(None).collect::<Vec<_>>()
        };
        assert_eq!(order(7), order(7));
        assert_ne!(order(7), order(8));
    }

    #[test]
    fn sentinels_come_every_48_to_80_points_on_four_cells_off_the_diagonal() {
        let machine = machine(32, 4);
        let plan = plan(&machine).build(&machine).unwrap();
        let mut schedule = PairSchedule::new(&plan, &machine, 0);
        let mut gaps = Vec::new();
        let mut cells = Vec::new();
        let mut gap = 0;
        for _ in 0..2 {
            for point in schedule.next_block(None) {
                if point.sentinel {
                    gaps.push(gap);
                    cells.push(cell(&point));
                    assert_eq!(point.phase, Phase::Blocks);
                    assert_eq!(point.bytes, ByteSize::mib(8));
                    gap = 0;
                } else {
                    gap += 1;
                }
            }
        }
        // 2 × (32 × 32 × 2 + 32) points at 64 on average.
        assert!((52..=86).contains(&gaps.len()), "{}", gaps.len());
        assert!(gaps.iter().all(|gap| (48..=80).contains(gap)), "{gaps:?}");
        assert!(gaps.iter().collect::<BTreeSet<_>>().len() > 15, "{gaps:?}");
        assert_eq!(cells[..4], cells[4..8]);
        let distinct: BTreeSet<_> = cells[..4].iter().collect();
        assert_eq!(distinct.len(), 4);
        // Here row and column are CPU numbers, 8 on each node.
        let nodes = |pick: fn(&(usize, usize)) -> usize| {
            cells[..4].iter().map(|cell| pick(cell) / 8).collect::<BTreeSet<_>>().len()
        };
        assert_eq!((nodes(|cell| cell.0), nodes(|cell| cell.1)), (4, 4));
        assert!(cells.iter().all(|cell| cell.0 / 8 != cell.1 / 8));
    }

    #[test]
    fn few_cpus_leave_what_there_is_for_sentinels() {
        let machine = machine(4, 1);
        for (rank0, rank1, expected) in [(vec![2], vec![2], (2, 2)), (vec![2], vec![2, 3], (2, 3))]
        {
            let plan = plan(&machine).rank0_cpus(rank0).rank1_cpus(rank1).build(&machine).unwrap();
            let cells = sentinel_pairs(&plan, &machine, &mut Random::new(1));
            let found: BTreeSet<_> = cells
                .iter()
                .map(|at| (plan.rank0_cpus[at.row].0, plan.rank1_cpus[at.column].0))
                .collect();
            assert_eq!(found, BTreeSet::from([expected]));
        }
    }

    #[test]
    fn a_visit_lasts_as_long_as_both_cpus_stay() {
        let machine = machine(2, 1);
        let plan = plan(&machine).rank0_cpus([0]).rank1_cpus([0, 1]).build(&machine).unwrap();
        let mut schedule = PairSchedule::new(&plan, &machine, 5);
        let mut last: Option<PlannedPoint> = None;
        let mut lasting = 0;
        for _ in 0..20 {
            for point in schedule.next_block(None) {
                let expected = match last {
                    Some(last) if last.cell == point.cell => {
                        lasting += 1;
                        last.visit
                    }
                    _ => point.seq,
                };
                assert_eq!(point.visit, expected);
                last = Some(point);
            }
        }
        assert!(lasting > 10);
    }

    #[test]
    fn small_sizes_are_their_own_probes() {
        let machine = machine(4, 1);
        for (kib, probes) in [(64, 0), (65, 4)] {
            let plan = plan(&machine).sizes([ByteSize::kib(kib)]).build(&machine).unwrap();
            let points = PairSchedule::new(&plan, &machine, 0).next_block(None).collect::<Vec<_>>();
            let count = points.iter().filter(|point| point.phase == Phase::Probe).count();
            assert_eq!(count, probes, "{kib} KiB");
        }
    }

    #[test]
    fn sequential_is_rank_0_then_size_then_rank_1() {
        let machine = machine(4, 1);
        let plan = plan(&machine)
            .order(Order::Sequential)
            .rank0_cpus([3, 1])
            .rank1_cpus([2, 0])
            .build(&machine)
            .unwrap();
        let mut schedule = PairSchedule::new(&plan, &machine, 0);
        let found: Vec<_> = schedule
            .next_block(None)
            .map(|p| {
                assert!(!p.sentinel && p.phase == Phase::Blocks);
                let cpus = (plan.rank0_cpus[p.cell.row].0, plan.rank1_cpus[p.cell.column].0);
                (cpus.0, p.bytes.bytes() >> 20, cpus.1)
            })
            .collect();
        let expected = [
            (3, 1, 2),
            (3, 1, 0),
            (3, 8, 2),
            (3, 8, 0),
            (1, 1, 2),
            (1, 1, 0),
            (1, 8, 2),
            (1, 8, 0),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_limited_block_has_the_wanted_cells_and_no_probes() {
        let machine = machine(8, 2);
        let plan = plan(&machine).build(&machine).unwrap();
        let mut schedule = PairSchedule::new(&plan, &machine, 0);
        let wanted = |cell: Cell, bytes: ByteSize| cell.row == 3 && bytes == ByteSize::mib(8);
        let mut found = BTreeMap::<_, u32>::new();
        for point in schedule.next_block(Some(&wanted)).filter(|point| !point.sentinel) {
            assert_eq!((point.cell.row, point.bytes), (3, ByteSize::mib(8)));
            *found.entry(point.cell.column).or_default() += 1;
        }
        assert_eq!(found, (0..8).map(|column| (column, 1)).collect());
    }
}
