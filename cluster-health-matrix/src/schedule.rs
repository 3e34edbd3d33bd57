//! In which order points are measured: randomised complete blocks, with probes and sentinels.
//!
//! The order depends on the plan and its seed alone, so that an interrupted run can go on where
//! it stopped. The generator is our own (splitmix64, Fisher–Yates) because a schedule must be the
//! same in every version.

use cluster_health_core::{ByteSize, Machine};

use crate::plan::{H2dPlan, Order, PROBE_SIZE};
use crate::samples::Phase;

mod pairs;

pub use pairs::{PairBlock, PairSchedule};

/// A cell by positions in the plan's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Cell {
    /// Position in the plan's CPUs, or rank-0 CPUs.
    pub row: usize,
    /// Position in the plan's devices, or rank-1 CPUs.
    pub column: usize,
}

/// One planned point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedPoint {
    /// Place in the whole run.
    pub seq: u64,
    /// `seq` of the first point of this run of points on one bound core or pair of cores.
    pub visit: u64,
    /// Replicate.
    pub block: u32,
    /// Where.
    pub cell: Cell,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// Blocks or probe.
    pub phase: Phase,
    /// An extra visit of a drift cell.
    pub sentinel: bool,
    /// Position in the plan's load profiles.
    pub load: usize,
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

/// A sentinel visit comes after so many points, drawn afresh each time: a fixed period would
/// resonate with periodic disturbances.
const SENTINEL_GAP: std::ops::RangeInclusive<usize> = 48..=80;

/// One cell would miss the drift of a single device.
const SENTINEL_CELLS: usize = 4;

/// Which cells and sizes a block is limited to.
pub(crate) type Wanted<'a> = &'a dyn Fn(Cell, ByteSize) -> bool;

/// What the loop of a sweep needs of its schedule.
pub(crate) trait Blocks {
    /// Points of one complete block without sentinels.
    fn block_len(&self) -> usize;

    /// The points of the next block: of all cells, or of those that `wanted` names. At least as
    /// many follow as the lower bound of its size hint says.
    fn block(&mut self, wanted: Option<Wanted<'_>>) -> impl Iterator<Item = PlannedPoint>;

    /// Its random numbers and the numbers of its points.
    fn sequence(&mut self) -> &mut Sequence;

    /// The points that follow are another replicate.
    fn begin_block(&mut self) {
        self.sequence().begin_block();
    }

    /// Brings things into an order of its own random numbers.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        self.sequence().random.shuffle(items);
    }

    /// Visits to these cells in fresh order, without sentinels, in the block that has begun.
    fn visit(
        &mut self,
        visits: Vec<(Cell, ByteSize)>,
        phase: Phase,
    ) -> impl Iterator<Item = PlannedPoint>;

    /// Bytes of all sizes, ascending.
    fn sizes(&self) -> &[ByteSize];

    /// One round of confirming visits to these cells, all sizes, in fresh order.
    fn confirm(&mut self, cells: &[Cell]) -> impl Iterator<Item = PlannedPoint> {
        self.begin_block();
        let visits = all_sizes(cells, self.sizes());
        self.visit(visits, Phase::Confirm)
    }
}

/// Every cell at every size.
pub(crate) fn all_sizes(cells: &[Cell], sizes: &[ByteSize]) -> Vec<(Cell, ByteSize)> {
    cells.iter().flat_map(|&cell| sizes.iter().map(move |&bytes| (cell, bytes))).collect()
}

/// What every schedule has: its random numbers, the numbers of its points, its sentinels.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    random: Random,
    order: Order,
    next_seq: u64,
    visit: u64,
    begun_blocks: u32,
    sentinels: Vec<Cell>,
    sentinel_bytes: ByteSize,
    next_sentinel: usize,
    until_sentinel: usize,
    profiles: Profiles,
    /// The profile of the points that come now.
    load: usize,
}

/// The order in which stretches of points are measured under the load profiles: random, then the
/// reverse, then random again, so that every profile comes as early as late and what drifts does not
/// look like a load.
#[derive(Debug, Clone)]
struct Profiles {
    count: usize,
    last: Vec<usize>,
    reversed: bool,
}

impl Profiles {
    fn new(count: usize) -> Self {
        Self { count, last: (0..count).collect(), reversed: true }
    }

    /// The order of the next stretch. A single profile draws nothing.
    fn next(&mut self, random: &mut Random, shuffled: bool) -> Vec<usize> {
        if self.count > 1 && shuffled {
            if self.reversed {
                random.shuffle(&mut self.last);
            } else {
                self.last.reverse();
            }
            self.reversed = !self.reversed;
        }
        self.last.clone()
    }
}

impl Sequence {
    fn new(
        mut random: Random,
        order: Order,
        first_seq: u64,
        sentinels: Vec<Cell>,
        sizes: &[ByteSize],
        loads: usize,
    ) -> Self {
        let until_sentinel = gap(&mut random);
        Self {
            random,
            order,
            next_seq: first_seq,
            visit: first_seq,
            begun_blocks: 0,
            sentinels,
            sentinel_bytes: sizes.get(sizes.len() / 2).copied().unwrap_or_default(),
            next_sentinel: 0,
            until_sentinel,
            profiles: Profiles::new(loads),
            load: 0,
        }
    }

    /// The order of profiles of the next stretch.
    fn profiles(&mut self) -> Vec<usize> {
        let shuffled = self.is_shuffled();
        self.profiles.next(&mut self.random, shuffled)
    }

    fn is_shuffled(&self) -> bool {
        self.order == Order::Blocks
    }

    fn begin_block(&mut self) {
        self.begun_blocks += 1;
    }

    /// The cell of a sentinel visit, if one is due before the next point.
    fn due_sentinel(&mut self) -> Option<Cell> {
        if !self.is_shuffled() {
            return None;
        }
        if self.until_sentinel > 0 {
            self.until_sentinel -= 1;
            return None;
        }
        // The ordinary point that follows this visit is the first of the gap.
        self.until_sentinel = gap(&mut self.random) - 1;
        let cell = self.sentinels.get(self.next_sentinel % self.sentinels.len().max(1)).copied();
        self.next_sentinel += 1;
        cell
    }

    fn sentinel(&mut self, cell: Cell, starts_visit: bool) -> PlannedPoint {
        let bytes = self.sentinel_bytes;
        PlannedPoint { sentinel: true, ..self.point(cell, bytes, Phase::Blocks, starts_visit) }
    }

    fn point(
        &mut self,
        cell: Cell,
        bytes: ByteSize,
        phase: Phase,
        starts_visit: bool,
    ) -> PlannedPoint {
        let seq = self.next_seq;
        self.next_seq += 1;
        if starts_visit {
            self.visit = seq;
        }
        let block = self.begun_blocks.saturating_sub(1);
        let (visit, load) = (self.visit, self.load);
        PlannedPoint { seq, visit, block, cell, bytes, phase, sentinel: false, load }
    }
}

/// Makes the blocks of an H2D plan, one after another.
#[derive(Debug, Clone)]
pub struct Schedule<'a> {
    plan: &'a H2dPlan,
    sequence: Sequence,
}

impl<'a> Schedule<'a> {
    /// The schedule of `plan` on `machine`, before its first block.
    #[must_use]
    pub fn new(plan: &'a H2dPlan, machine: &Machine) -> Self {
        let mut random = Random::new(plan.seed);
        let sentinels = sentinel_cells(plan, machine, &mut random);
        let loads = plan.loads.len();
        Self { plan, sequence: Sequence::new(random, plan.order, 0, sentinels, &plan.sizes, loads) }
    }

    /// Points of one complete block without sentinels.
    #[must_use]
    pub fn block_len(&self) -> usize {
        let probes = if self.plan.has_probes() {
            self.plan.cpus.len().max(self.plan.devices.len())
        } else {
            0
        };
        (self.plan.cells() * self.plan.sizes.len() + probes) * self.plan.loads.len()
    }

    /// The next block: of all cells, or of those that `wanted` names. A core is measured under one
    /// load profile after another.
    pub fn next_block(
        &mut self,
        wanted: Option<&dyn Fn(Cell, ByteSize) -> bool>,
    ) -> Vec<PlannedPoint> {
        self.sequence.begin_block();
        let mut points = Vec::with_capacity(self.block_len() + self.block_len() / 40);
        let mut rows: Vec<usize> = (0..self.plan.cpus.len()).collect();
        let shuffled = self.sequence.is_shuffled();
        if shuffled {
            self.sequence.random.shuffle(&mut rows);
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
            let mut first = true;
            for load in self.sequence.profiles() {
                self.sequence.load = load;
                if shuffled {
                    self.sequence.random.shuffle(&mut visit);
                }
                for &(column, bytes, phase) in &visit {
                    if let Some(cell) = self.sequence.due_sentinel() {
                        points.push(self.sequence.sentinel(cell, true));
                        first = true;
                    }
                    points.push(self.sequence.point(Cell { row, column }, bytes, phase, first));
                    first = false;
                }
            }
        }
        points
    }

    /// Columns to probe per row: every core and every device gets at least one.
    fn probes(&mut self, rows: &[usize]) -> Vec<Vec<usize>> {
        if !self.plan.has_probes() {
            return Vec::new();
        }
        let mut columns: Vec<usize> = (0..self.plan.devices.len()).collect();
        self.sequence.random.shuffle(&mut columns);
        let mut probes = vec![Vec::new(); rows.len()];
        for index in 0..rows.len().max(columns.len()) {
            probes[rows[index % rows.len()]].push(columns[index % columns.len()]);
        }
        probes
    }
}

impl Blocks for Schedule<'_> {
    fn block_len(&self) -> usize {
        Self::block_len(self)
    }

    fn block(&mut self, wanted: Option<Wanted<'_>>) -> impl Iterator<Item = PlannedPoint> {
        self.next_block(wanted).into_iter()
    }

    fn sequence(&mut self) -> &mut Sequence {
        &mut self.sequence
    }

    fn sizes(&self) -> &[ByteSize] {
        &self.plan.sizes
    }

    /// As in the blocks the visits to a core are contiguous; `visits` come by rows.
    fn visit(
        &mut self,
        visits: Vec<(Cell, ByteSize)>,
        phase: Phase,
    ) -> impl Iterator<Item = PlannedPoint> {
        let mut rows: Vec<&[(Cell, ByteSize)]> =
            visits.chunk_by(|a, b| a.0.row == b.0.row).collect();
        self.sequence.random.shuffle(&mut rows);
        let mut points = Vec::with_capacity(visits.len() * self.plan.loads.len());
        for visit in rows {
            let mut visit = visit.to_vec();
            let mut first = true;
            for load in self.sequence.profiles() {
                self.sequence.load = load;
                self.sequence.random.shuffle(&mut visit);
                for &(cell, bytes) in &visit {
                    points.push(self.sequence.point(cell, bytes, phase, first));
                    first = false;
                }
            }
        }
        points.into_iter()
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use cluster_health_core::backend::synthetic::Scenario;
    use proptest::prelude::*;

    use super::*;

    fn machine(cpus: usize, devices: usize, nodes: usize) -> Machine {
        let text = format!(
            "[machine]\ncpus = {cpus}\nsmt = 1\nnuma_nodes = {nodes}\ndevices = {devices}\n"
        );
        Machine::synthetic(Scenario::parse(&text, "test").unwrap()).unwrap()
    }

    fn plan(machine: &Machine, seed: u64) -> H2dPlan {
        let sizes = [ByteSize::mib(1), ByteSize::mib(4)];
        H2dPlan::builder().sizes(sizes).seed(seed).build(machine).unwrap()
    }

    fn blocks(plan: &H2dPlan, machine: &Machine, count: usize) -> Vec<Vec<PlannedPoint>> {
        let mut schedule = Schedule::new(plan, machine);
        (0..count).map(|_| schedule.next_block(None)).collect()
    }

    /// The published test vector of splitmix64 for the seed 1234567.
    #[test]
    fn the_generator_is_splitmix64() {
        let mut random = Random::new(1_234_567);
        let drawn: Vec<u64> = (0..3).map(|_| random.next()).collect();
        let wanted =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(drawn, wanted);
    }

    #[test]
    fn shuffles_reach_every_order_equally_often() {
        let mut random = Random::new(1);
        let mut seen = BTreeMap::<[u8; 4], u32>::new();
        for _ in 0..24_000 {
            let mut items = [0, 1, 2, 3];
            random.shuffle(&mut items);
            *seen.entry(items).or_default() += 1;
        }
        // 1,000 each; the binomial's standard deviation is 31.
        assert_eq!(seen.len(), 24);
        assert!(seen.values().all(|count| (850..=1150).contains(count)), "{seen:?}");
    }

    #[test]
    fn visits_number_the_runs_on_one_core() {
        let machine = machine(40, 4, 4);
        let plan = plan(&machine, 3);
        let points: Vec<PlannedPoint> = blocks(&plan, &machine, 2).concat();
        assert!(points.iter().any(|point| point.sentinel));
        let mut visit = 0;
        for (at, point) in points.iter().enumerate() {
            assert_eq!(point.seq, at as u64);
            let before = at.checked_sub(1).map(|at| &points[at]);
            let starts = before.is_none_or(|before| {
                point.sentinel
                    || before.sentinel
                    || before.cell.row != point.cell.row
                    || before.block != point.block
            });
            if starts {
                visit = point.seq;
            }
            assert_eq!(point.visit, visit, "{point:?}");
        }
    }

    #[test]
    fn a_part_block_has_the_wanted_cells_and_their_probes() {
        let machine = machine(40, 4, 4);
        let plan = plan(&machine, 3);
        let mut schedule = Schedule::new(&plan, &machine);
        schedule.next_block(None);
        let wanted = |cell: Cell, bytes: ByteSize| cell.row % 10 == 3 && bytes == ByteSize::mib(4);
        let points = schedule.next_block(Some(&wanted));
        let (cells, probes): (Vec<&PlannedPoint>, Vec<&PlannedPoint>) =
            points.iter().filter(|p| !p.sentinel).partition(|p| p.phase == Phase::Blocks);
        assert_eq!(cells.len(), 4 * 4);
        assert!(cells.iter().all(|p| wanted(p.cell, p.bytes) && p.block == 1));
        let rows = |points: &[&PlannedPoint]| -> BTreeSet<usize> {
            points.iter().map(|p| p.cell.row).collect()
        };
        assert_eq!(rows(&probes), rows(&cells));
    }

    #[test]
    fn loads_measure_the_same_cells_in_turn_and_each_as_early_as_late() {
        let machine = machine(40, 4, 4);
        let loads = ["idle", "cpu:2", "device"].map(|name| name.parse().unwrap());
        let sizes = [ByteSize::mib(1), ByteSize::mib(4)];
        let plan = H2dPlan::builder().sizes(sizes).loads(loads).build(&machine).unwrap();
        let mut schedule = Schedule::new(&plan, &machine);
        assert_eq!(schedule.block_len(), (40 * 4 * 2 + 40) * 3);
        for _ in 0..3 {
            let points = schedule.next_block(None);
            let ordinary: Vec<&PlannedPoint> = points.iter().filter(|p| !p.sentinel).collect();
            assert_eq!(ordinary.len(), schedule.block_len());
            // A core is measured under one load, then the next one, at the same cells.
            let visits: Vec<&[&PlannedPoint]> =
                ordinary.chunk_by(|a, b| a.cell.row == b.cell.row).collect();
            assert_eq!(visits.len(), 40);
            let mut orders = Vec::new();
            for visit in visits {
                let stretches: Vec<&[&PlannedPoint]> =
                    visit.chunk_by(|a, b| a.load == b.load).collect();
                assert_eq!(stretches.len(), 3);
                let cells = |stretch: &[&PlannedPoint]| -> BTreeSet<(Cell, ByteSize)> {
                    stretch.iter().map(|point| (point.cell, point.bytes)).collect()
                };
                assert!(stretches.iter().all(|other| cells(other) == cells(stretches[0])));
                orders.push([stretches[0][0].load, stretches[1][0].load, stretches[2][0].load]);
            }
            for pair in orders.chunks(2) {
                assert!(pair[0].iter().eq(pair[1].iter().rev()), "{pair:?}");
            }
            assert!(orders.iter().collect::<BTreeSet<_>>().len() > 3, "{orders:?}");
        }
    }

    #[test]
    fn confirming_visits_are_made_under_every_load() {
        let machine = machine(8, 4, 1);
        let loads = ["idle", "cpu:2"].map(|name| name.parse().unwrap());
        let plan =
            H2dPlan::builder().sizes([ByteSize::mib(1)]).loads(loads).build(&machine).unwrap();
        let cells = [(1, 0), (1, 2), (5, 3)].map(|(row, column)| Cell { row, column });
        let points: Vec<_> = Schedule::new(&plan, &machine).confirm(&cells).collect();
        for load in 0..2 {
            let visited = points.iter().filter(|point| point.load == load).map(|point| point.cell);
            assert_eq!(visited.collect::<BTreeSet<_>>(), BTreeSet::from(cells));
        }
        assert_eq!(points.len(), 6);
    }

    #[test]
    fn small_copies_of_the_plan_are_their_own_probes() {
        let machine = machine(8, 2, 1);
        let sizes = [PROBE_SIZE, ByteSize::mib(1)];
        let plan = H2dPlan::builder().sizes(sizes).build(&machine).unwrap();
        assert_eq!(Schedule::new(&plan, &machine).block_len(), 8 * 2 * 2);
        let points = blocks(&plan, &machine, 1).concat();
        assert!(points.iter().all(|point| point.phase == Phase::Blocks));
    }

    proptest! {
        #[test]
        fn every_shape_has_complete_blocks_even_gaps_and_probes(
            cpus in 1_usize..60, devices in 1_usize..12, seed in any::<u64>(),
        ) {
            let machine = machine(cpus, devices, 1 + cpus / 10);
            let plan = plan(&machine, seed);
            let all = blocks(&plan, &machine, 3);
            let length = Schedule::new(&plan, &machine).block_len();
            for (number, points) in all.iter().enumerate() {
                let mut cells = BTreeSet::new();
                let (mut rows, mut columns) = (BTreeSet::new(), BTreeSet::new());
                for point in points.iter().filter(|point| !point.sentinel) {
                    prop_assert_eq!(point.block as usize, number);
                    if point.phase == Phase::Probe {
                        rows.insert(point.cell.row);
                        columns.insert(point.cell.column);
                    } else {
                        prop_assert!(cells.insert((point.cell, point.bytes)));
                    }
                }
                prop_assert_eq!(cells.len(), cpus * devices * 2);
                prop_assert_eq!((rows.len(), columns.len()), (cpus, devices));
                prop_assert_eq!(points.iter().filter(|point| !point.sentinel).count(), length);
            }
            let mut gap = 0;
            for point in all.concat() {
                if point.sentinel {
                    prop_assert!((48..=80).contains(&gap), "{}", gap);
                    gap = 0;
                } else {
                    gap += 1;
                }
            }
            prop_assert!(gap <= 80);
            prop_assert_eq!(all, blocks(&plan, &machine, 3));
        }
    }
}
