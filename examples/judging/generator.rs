//! Machines drawn from a seed.
//!
//! | drawn | range |
//! |---|---|
//! | CPUs | 2 to 640, log-uniform; 1 or 2 threads per core, both layouts |
//! | NUMA nodes, devices | 1 to 8 (at most one per core), 1 to 16 |
//! | noise | up to 4 % per iteration, up to 1 % per visit |
//! | healthy spread | up to 1.6 % (standard deviation) between cores and between devices |
//! | dips | half of the machines, up to 1 % of the points |
//! | faults | 0 to 3 of different kinds, without a common cell |
//! | artefacts | 0 to 3 of different kinds |
//! | sizes | two, from 256 KiB to 256 MiB |
//!
//! One machine in ten is measured the old way: sequentially, without warm-up, in one block, with
//! artefacts only.
//!
//! A fault covers at most a third of its axis, its axis has at least four members, no row or column
//! that is not wholly part of one is affected in more than 40 % of its cells, and a slow cell is
//! not in line with a slow block, and two faults of whole rows (or columns) differ in effect, because
//! one finding stands for each kind and effect: beyond that "the rest" and the kind are matters of taste.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use cluster_health_core::{Bandwidth, ByteSize, Machine, Scenario};
use cluster_health_matrix::plan::{ArenaPolicy, CheckPolicy, CorePairPlan, H2dPlan, Order};
use cluster_health_matrix::run::PlanRecord;
use cluster_health_matrix::samples::Sweep;

use super::Result;

/// Blocks of a plan that is not of the old way.
const BLOCKS: u32 = 3;
/// Timed iterations per visit.
const ITERATIONS: u32 = 3;
/// The smallest axis on which something can be compared with the rest.
const SMALLEST_AXIS: usize = 4;

/// A machine and how it is measured.
pub(crate) struct Case {
    pub(crate) seed: u64,
    /// The scenario as a file.
    pub(crate) text: String,
    pub(crate) scenario: Scenario,
    pub(crate) sweep: Sweep,
    pub(crate) plan: PlanRecord,
    /// CPUs, or CPUs of rank 0.
    pub(crate) rows: Vec<u32>,
    /// Devices, or CPUs of rank 1.
    pub(crate) columns: Vec<u32>,
    pub(crate) largest: ByteSize,
    pub(crate) blocks: u32,
    pub(crate) old_way: bool,
    pub(crate) planted: Vec<Planted>,
    pub(crate) artefacts: Vec<&'static str>,
    /// Core and NUMA node of each CPU.
    pub(crate) places: BTreeMap<u32, (u32, u32)>,
}

/// A fault of the machine.
pub(crate) struct Planted {
    /// Kinds that name it rightly; more than one where the kinds' boundaries leave it open.
    pub(crate) kinds: Vec<&'static str>,
    pub(crate) shape: Shape,
    /// The affected cells, row by row.
    pub(crate) cells: Vec<bool>,
    /// The NUMA nodes that differ; empty when none does as a whole.
    pub(crate) nodes: Vec<u32>,
    /// True when it costs the same time at all sizes.
    pub(crate) is_fixed: bool,
    /// Logarithm of the intended ratio of rates at the largest size.
    pub(crate) log_ratio: f64,
}

/// What the members of a fault are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Whole rows with the other rows.
    Rows,
    /// Whole columns with the other columns.
    Columns,
    /// Cells with what their rows and columns let expect.
    Cells,
}

impl Case {
    /// Position of a cell in row-by-row order.
    pub(crate) fn at(&self, row: usize, column: usize) -> usize {
        row * self.columns.len() + column
    }

    /// The cells of these rows and columns.
    pub(crate) fn cells(
        &self,
        rows: impl Fn(usize) -> bool,
        columns: impl Fn(usize) -> bool,
    ) -> Vec<bool> {
        let (n, m) = (self.rows.len(), self.columns.len());
        (0..n * m).map(|at| rows(at / m) && columns(at % m)).collect()
    }

    /// The cells whose ranks share a CPU (`same_core`) or a core only (`smt_sibling`).
    pub(crate) fn related(&self, kind: &str) -> Vec<bool> {
        let (n, m) = (self.rows.len(), self.columns.len());
        if !self.sweep.is_pair() {
            return vec![false; n * m];
        }
        let core = |cpu: u32| self.places.get(&cpu).map(|place| place.0);
        (0..n * m)
            .map(|at| {
                let (a, b) = (self.rows[at / m], self.columns[at % m]);
                if kind == "same_core" { a == b } else { a != b && core(a) == core(b) }
            })
            .collect()
    }

    /// Positions of an axis by the NUMA node of their CPUs.
    fn nodes(&self, shape: Shape) -> BTreeMap<u32, Vec<usize>> {
        let axis = if shape == Shape::Rows { &self.rows } else { &self.columns };
        let mut nodes = BTreeMap::<u32, Vec<usize>>::new();
        for (at, cpu) in axis.iter().enumerate() {
            nodes.entry(self.places[cpu].1).or_default().push(at);
        }
        nodes
    }

    fn link(&self) -> &cluster_health_core::backend::synthetic::LinkSpec {
        if self.sweep.is_pair() { &self.scenario.all_gather } else { &self.scenario.h2d }
    }
}

/// Random numbers that are the same in every version (`SplitMix64`): a seed names a machine.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        // The schedule draws from the same generator with small seeds.
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x6a75_6467_696e_6721)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    fn log_between(&mut self, low: f64, high: f64) -> f64 {
        self.between(low.ln(), high.ln()).exp()
    }

    /// Low to high, both included.
    fn count(&mut self, low: usize, high: usize) -> usize {
        low + (self.unit() * (high.max(low) - low + 1) as f64) as usize
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.count(0, items.len() - 1)]
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.count(0, at));
        }
    }

    /// Position of a weight.
    fn weighted(&mut self, weights: &[f64]) -> usize {
        let mut left = self.between(0.0, weights.iter().sum());
        for (at, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return at;
            }
        }
        weights.len() - 1
    }

    /// So many of the numbers below `of`, ascending: neighbours or scattered ones.
    fn some(&mut self, count: usize, of: usize) -> Vec<usize> {
        if self.chance(0.3) {
            let first = self.count(0, of - count);
            return (first..first + count).collect();
        }
        let mut all: Vec<usize> = (0..of).collect();
        self.shuffle(&mut all);
        all.truncate(count);
        all.sort_unstable();
        all
    }
}

/// The machine of a seed. A seed has its own sweep unless one is wanted.
///
/// # Errors
/// When a drawn machine is not a valid scenario: a mistake in here.
pub(crate) fn generate(seed: u64, wanted: Option<Sweep>) -> Result<Case> {
    generate_way(seed, wanted, false)
}

/// The same, with `old_only` always measured the old way.
///
/// # Errors
/// As [`generate`].
pub(crate) fn generate_way(seed: u64, wanted: Option<Sweep>, old_only: bool) -> Result<Case> {
    let mut draw = Draw::new(seed);
    let own = if draw.chance(0.5) { Sweep::H2d } else { Sweep::CorePair };
    let sweep = wanted.unwrap_or(own);
    let old_way = draw.chance(0.1) || old_only;
    let text = machine(&mut draw, seed, sweep);
    let scenario = Scenario::parse(&text, "the generator")?;
    let places = scenario
        .cpu_places()
        .iter()
        .map(|place| (place.cpu.0, (place.core, place.node.0)))
        .collect();
    let (rows, columns) = axes(&mut draw, &scenario, sweep);
    let (plan, largest) = plan(&mut draw, &scenario, sweep, (&rows, &columns), old_way)?;
    let machine = Machine::synthetic(scenario.clone())?;
    let mut case = Case {
        seed,
        text,
        scenario,
        sweep,
        plan,
        rows,
        columns,
        largest,
        blocks: if old_way { 1 } else { BLOCKS },
        old_way,
        planted: Vec::new(),
        artefacts: Vec::new(),
        places,
    };
    if !old_way {
        plant_faults(&mut draw, &mut case);
    }
    plant_artefacts(&mut draw, &mut case, &machine);
    case.scenario = Scenario::parse(&case.text, "the generator")?;
    Ok(case)
}

fn machine(draw: &mut Draw, seed: u64, sweep: Sweep) -> String {
    let smt = draw.count(1, 2);
    let cpus = (draw.log_between(2.0, 641.0) as usize).clamp(2, 640) / smt * smt;
    let cores = cpus / smt;
    let layout = if draw.chance(0.5) { "adjacent" } else { "split" };
    let nodes = draw.count(1, cores.min(8));
    let devices = draw.count(1, 16);
    let (section, gbps, latency) = if sweep.is_pair() {
        ("all_gather", draw.between(15.0, 60.0), draw.between(30.0, 250.0))
    } else {
        ("h2d", draw.between(10.0, 60.0), draw.between(4.0, 25.0))
    };
    let noise = draw.between(0.002, 0.04);
    let visit_noise = draw.between(0.0, 0.01);
    let core_spread = draw.between(0.0, 0.016);
    let device_spread = draw.between(0.0, 0.016);
    let dips = if draw.chance(0.5) { draw.between(0.0, 0.01) } else { 0.0 };
    let dip_factor = draw.between(0.2, 0.6);
    format!(
        "seed = {seed}\n[machine]\ncpus = {cpus}\nsmt = {smt}\nsmt_layout = \"{layout}\"\n\
         numa_nodes = {nodes}\ndevices = {devices}\n[{section}]\ngbps = {gbps:.2}\n\
         latency_us = {latency:.2}\nnoise = {noise:.4}\nvisit_noise = {visit_noise:.4}\n\
         core_spread = {core_spread:.4}\ndevice_spread = {device_spread:.4}\n\
         dip_probability = {dips:.4}\ndip_factor = {dip_factor:.2}\n"
    )
}

/// Ids of the rows and columns.
fn axes(draw: &mut Draw, scenario: &Scenario, sweep: Sweep) -> (Vec<u32>, Vec<u32>) {
    let cpus = scenario.present_cpus();
    if !sweep.is_pair() {
        let rows = if draw.chance(0.8) {
            cpus
        } else {
            let count = draw.count(2, cpus.len());
            draw.some(count, cpus.len()).into_iter().map(|at| cpus[at]).collect()
        };
        return (rows, (0..scenario.machine.devices).collect());
    }
    let rank0 = pair_axis(draw, scenario, &cpus);
    let rank1 = if draw.chance(0.6) { rank0.clone() } else { pair_axis(draw, scenario, &cpus) };
    (rank0, rank1)
}

/// CPUs of one rank: seldom more than 40, so that thousands of machines are measured in minutes.
fn pair_axis(draw: &mut Draw, scenario: &Scenario, cpus: &[u32]) -> Vec<u32> {
    let most = if draw.chance(0.04) { 96 } else { 40 };
    let count = draw.count(SMALLEST_AXIS, most).min(cpus.len());
    if count == cpus.len() {
        return cpus.to_vec();
    }
    if draw.chance(0.5) {
        return draw.some(count, cpus.len()).into_iter().map(|at| cpus[at]).collect();
    }
    // The first cores of every node, with all their threads.
    let places = scenario.cpu_places();
    let mut cores = BTreeMap::<(u32, u32), Vec<u32>>::new();
    for place in &places {
        cores.entry((place.node.0, place.core)).or_default().push(place.cpu.0);
    }
    let mut by_node = BTreeMap::<u32, Vec<Vec<u32>>>::new();
    for ((node, _), threads) in cores {
        by_node.entry(node).or_default().push(threads);
    }
    let mut kept = Vec::new();
    let deepest = by_node.values().map(Vec::len).max().unwrap_or(0);
    'full: for depth in 0..deepest {
        for node in by_node.values() {
            kept.extend(node.get(depth).into_iter().flatten());
            if kept.len() >= count {
                break 'full;
            }
        }
    }
    kept.sort_unstable();
    kept
}

fn plan(
    draw: &mut Draw,
    scenario: &Scenario,
    sweep: Sweep,
    (rows, columns): (&[u32], &[u32]),
    old_way: bool,
) -> Result<(PlanRecord, ByteSize)> {
    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    let machine = Machine::synthetic(scenario.clone())?;
    let seed = draw.next() >> 12;
    let (order, warmup, blocks) =
        if old_way { (Order::Sequential, Some(0), 1) } else { (Order::Blocks, None, BLOCKS) };
    if sweep.is_pair() {
        let sizes =
            [(512 * KIB, 4 * MIB), (MIB, 8 * MIB), (8 * MIB, 32 * MIB), (8 * MIB, 64 * MIB)];
        let (small, large) = *draw.pick(&sizes);
        let plan = CorePairPlan::builder()
            .rank0_cpus(rows.iter().copied())
            .rank1_cpus(columns.iter().copied())
            .sizes([small, large].map(ByteSize))
            .iters(ITERATIONS)
            .repeats(blocks)
            .order(order)
            .warmup(warmup)
            .check(CheckPolicy::Off)
            .seed(seed)
            .build(&machine)?;
        return Ok((PlanRecord::default().with_core_pair(Some(plan)), ByteSize(large)));
    }
    let sizes = [
        (256 * KIB, 4 * MIB),
        (MIB, 16 * MIB),
        (4 * MIB, 16 * MIB),
        (16 * MIB, 64 * MIB),
        (64 * MIB, 256 * MIB),
    ];
    let (small, large) = sizes[draw.weighted(&[1.0, 1.0, 1.0, 4.0, 1.0])];
    let core = old_way && draw.chance(0.5);
    let plan = H2dPlan::builder()
        .cpus(rows.iter().copied())
        .devices(columns.iter().copied())
        .sizes([small, large].map(ByteSize))
        .iters(ITERATIONS)
        .repeats(blocks)
        .order(order)
        .warmup(warmup)
        .arena(if core { ArenaPolicy::Core } else { ArenaPolicy::Node })
        .check(CheckPolicy::Off)
        .seed(seed)
        .build(&machine)?;
    Ok((PlanRecord::of_h2d(plan), ByteSize(large)))
}

/// A fault that was found a place.
struct Site {
    planted: Planted,
    /// Lines of the scenario that say where.
    place: String,
    may_be_faster: bool,
}

fn plant_faults(draw: &mut Draw, case: &mut Case) {
    let count = draw.weighted(&[0.35, 0.30, 0.20, 0.15]);
    let mut kinds = if case.sweep.is_pair() {
        vec![
            "slow_rank0_core",
            "slow_rank1_core",
            "slow_block",
            "slow_cell",
            "same_core",
            "smt_sibling",
            "numa_effect",
        ]
    } else {
        vec!["slow_device", "slow_core", "slow_block", "slow_cell", "numa_effect"]
    };
    draw.shuffle(&mut kinds);
    if case.sweep.is_pair() && draw.chance(0.3) {
        // Few axes have siblings: where there are some, they are not to be rare.
        kinds.sort_by_key(|kind| *kind != "smt_sibling");
    }
    for kind in kinds {
        if case.planted.len() == count {
            break;
        }
        let site = (0..20).find_map(|_| site(draw, case, kind).filter(|site| fits(case, site)));
        if let Some(mut site) = site {
            // Two of one kind and one effect are one finding to anybody who does not know.
            let effect = (0..20).find_map(|_| {
                let effect = effect(draw, case, &mut site);
                case.planted.iter().all(|other| is_apart(other, &site.planted)).then_some(effect)
            });
            if let Some(effect) = effect {
                let _ = write!(case.text, "[[fault]]\n{}{effect}", site.place);
                case.planted.push(site.planted);
            }
        }
    }
}

/// True unless both are whole rows, or whole columns, of about the same effect.
fn is_apart(a: &Planted, b: &Planted) -> bool {
    let (small, large) =
        (a.log_ratio.abs().min(b.log_ratio.abs()), a.log_ratio.abs().max(b.log_ratio.abs()));
    a.shape != b.shape || a.shape == Shape::Cells || large - small > (0.3 * large).max(0.1)
}

/// Lines of the scenario that say how slow.
fn effect(draw: &mut Draw, case: &Case, site: &mut Site) -> String {
    let link = case.link();
    let fixed_us = link.latency_us;
    let bytes_us = case.largest.bytes() as f64 / (link.gbps * 1e3);
    let total = fixed_us + bytes_us;
    let faster = site.may_be_faster && draw.chance(0.25);
    let ratio = if faster {
        draw.between(1.04, 1.25)
    } else if draw.chance(0.1) {
        draw.between(0.95, 0.985)
    } else {
        1.0 - draw.log_between(0.05, 0.6)
    };
    site.planted.is_fixed = !faster && draw.chance(0.35);
    let slowed = total / ratio;
    site.planted.log_ratio = ratio.ln();
    if site.planted.is_fixed {
        return format!("extra_us = {:.3}\n", slowed - total);
    }
    // What is left for the bytes; a latency that is most of the time cannot be outrun.
    let left = (slowed - fixed_us).max(0.2 * bytes_us);
    format!("factor = {:.4}\n", bytes_us / left)
}

/// No common cell with another fault, and enough of the rest left in every row and column.
fn fits(case: &Case, site: &Site) -> bool {
    let (n, m) = (case.rows.len(), case.columns.len());
    let overlaps =
        |planted: &Planted| planted.cells.iter().zip(&site.planted.cells).any(|(a, b)| *a && *b);
    if case.planted.iter().any(overlaps) {
        return false;
    }
    // A cell in line with a block is a part of it to anybody who sees the two equally slow.
    let is_rectangle = |planted: &Planted| matches!(planted.kinds[0], "slow_block" | "slow_cell");
    if is_rectangle(&site.planted) {
        let touches = |cells: &[bool], line: &dyn Fn(usize) -> usize, at: usize| {
            (0..n * m).any(|other| cells[other] && line(other) == line(at))
        };
        let in_line = |planted: &&Planted| {
            (0..n * m).filter(|at| site.planted.cells[*at]).any(|at| {
                touches(&planted.cells, &|at| at / m, at)
                    || touches(&planted.cells, &|at| at % m, at)
            })
        };
        if case
            .planted
            .iter()
            .filter(|planted| is_rectangle(planted))
            .any(|planted| in_line(&planted))
        {
            return false;
        }
        // All pairs on one CPU, or on one core, are kinds of their own.
        for kind in ["same_core", "smt_sibling"] {
            let related = case.related(kind);
            let mut cells =
                related.iter().zip(&site.planted.cells).filter(|(related, _)| **related);
            if related.contains(&true) && cells.all(|(_, member)| *member) {
                return false;
            }
        }
    }
    let all = || case.planted.iter().chain(std::iter::once(&site.planted));
    let affected =
        |at: usize, by: Shape| all().any(|planted| planted.shape != by && planted.cells[at]);
    let whole =
        |at: usize, of: Shape| all().any(|planted| planted.shape == of && planted.cells[at]);
    let rows_left = (0..n).filter(|row| !whole(case.at(*row, 0), Shape::Rows)).all(|row| {
        (0..m).filter(|column| affected(case.at(row, *column), Shape::Rows)).count() * 5 <= 2 * m
    });
    let columns_left =
        (0..m).filter(|column| !whole(case.at(0, *column), Shape::Columns)).all(|column| {
            (0..n).filter(|row| affected(case.at(*row, column), Shape::Columns)).count() * 5
                <= 2 * n
        });
    rows_left && columns_left
}

/// Where a fault of this kind could be; `None` when the draw or the machine has no place for it.
fn site(draw: &mut Draw, case: &Case, kind: &'static str) -> Option<Site> {
    let axis_is_long = |shape| length(case, shape) >= SMALLEST_AXIS;
    match kind {
        "slow_device" => axis_is_long(Shape::Columns).then(|| devices(draw, case)),
        "slow_core" | "slow_rank0_core" => {
            axis_is_long(Shape::Rows).then(|| cores(draw, case, Shape::Rows, kind))?
        }
        "slow_rank1_core" => {
            axis_is_long(Shape::Columns).then(|| cores(draw, case, Shape::Columns, kind))?
        }
        "numa_effect" => {
            let rank1 = case.sweep.is_pair() && draw.chance(0.5);
            nodes(draw, case, if rank1 { Shape::Columns } else { Shape::Rows })
        }
        "slow_block" | "slow_cell" => {
            let is_large = axis_is_long(Shape::Rows) && axis_is_long(Shape::Columns);
            is_large.then(|| rectangle(draw, case, kind))?
        }
        _ => relation(case, kind),
    }
}

fn length(case: &Case, shape: Shape) -> usize {
    if shape == Shape::Rows { case.rows.len() } else { case.columns.len() }
}

fn lines(case: &Case, shape: Shape, members: &[usize]) -> Vec<bool> {
    let has = |at: usize| members.binary_search(&at).is_ok();
    if shape == Shape::Rows { case.cells(has, |_| true) } else { case.cells(|_| true, has) }
}

fn ids(axis: &[u32], members: &[usize]) -> Vec<u32> {
    members.iter().map(|at| axis[*at]).collect()
}

/// Usually one, at most a third of the axis.
fn few(draw: &mut Draw, of: usize) -> usize {
    if draw.chance(0.6) { 1 } else { draw.count(1, (of / 3).clamp(1, 8)) }
}

fn planted(kinds: Vec<&'static str>, shape: Shape, cells: Vec<bool>) -> Planted {
    Planted { kinds, shape, cells, nodes: Vec::new(), is_fixed: false, log_ratio: 0.0 }
}

fn devices(draw: &mut Draw, case: &Case) -> Site {
    let count = few(draw, case.columns.len());
    let members = draw.some(count, case.columns.len());
    Site {
        place: format!("kind = \"slow_device\"\ndevices = {:?}\n", ids(&case.columns, &members)),
        planted: planted(
            vec!["slow_device"],
            Shape::Columns,
            lines(case, Shape::Columns, &members),
        ),
        may_be_faster: false,
    }
}

/// The key of the scenario, and the kind of its single CPUs.
fn words(case: &Case, shape: Shape) -> (&'static str, &'static str) {
    match (case.sweep.is_pair(), shape) {
        (false, _) => ("cpus", "slow_core"),
        (true, Shape::Rows) => ("rank0", "slow_rank0_core"),
        (true, _) => ("rank1", "slow_rank1_core"),
    }
}

/// NUMA nodes that have up to so many CPUs on an axis are single cores as well.
const SMALL_NODE: usize = 2;

fn cores(draw: &mut Draw, case: &Case, shape: Shape, kind: &'static str) -> Option<Site> {
    let of = length(case, shape);
    let count = few(draw, of);
    let members = draw.some(count, of);
    let nodes = case.nodes(shape);
    let is_member = |at: &usize| members.binary_search(at).is_ok();
    let whole: Vec<_> = nodes.iter().filter(|(_, cpus)| cpus.iter().all(is_member)).collect();
    let covered: usize = whole.iter().map(|(_, cpus)| cpus.len()).sum();
    let mut planted = planted(vec![kind], shape, lines(case, shape, &members));
    if covered > 0 {
        // Whole nodes are another kind, and nodes together with single CPUs are neither.
        if covered != count || whole.iter().any(|(_, cpus)| cpus.len() > SMALL_NODE) {
            return None;
        }
        planted.kinds.push("numa_effect");
        planted.nodes = whole.iter().map(|(node, _)| **node).collect();
    }
    let axis = if shape == Shape::Rows { &case.rows } else { &case.columns };
    let (key, _) = words(case, shape);
    let place = format!("kind = \"{kind}\"\n{key} = {:?}\n", ids(axis, &members));
    Some(Site { planted, place, may_be_faster: false })
}

fn nodes(draw: &mut Draw, case: &Case, shape: Shape) -> Option<Site> {
    let of = length(case, shape);
    let nodes = case.nodes(shape);
    let mut chosen: Vec<u32> = nodes.keys().copied().collect();
    if chosen.len() < 3 {
        return None;
    }
    draw.shuffle(&mut chosen);
    chosen.truncate(if draw.chance(0.85) { 1 } else { 2 });
    chosen.sort_unstable();
    let mut members: Vec<usize> = chosen.iter().flat_map(|node| nodes[node].clone()).collect();
    members.sort_unstable();
    if members.len() * 3 > of {
        return None;
    }
    let (key, single) = words(case, shape);
    let mut kinds = vec!["numa_effect"];
    if chosen.iter().all(|node| nodes[node].len() <= SMALL_NODE) {
        kinds.push(single);
    }
    let axis = if shape == Shape::Rows { &case.rows } else { &case.columns };
    let mut planted = planted(kinds, shape, lines(case, shape, &members));
    planted.nodes = chosen;
    let place = format!("kind = \"{single}\"\n{key} = {:?}\n", ids(axis, &members));
    let may_be_faster = planted.kinds.len() == 1;
    Some(Site { planted, place, may_be_faster })
}

fn rectangle(draw: &mut Draw, case: &Case, kind: &'static str) -> Option<Site> {
    let (n, m) = (case.rows.len(), case.columns.len());
    let (height, width) = if kind == "slow_cell" {
        (1, 1)
    } else {
        (draw.count(1, (n / 3).min(24)), draw.count(1, (m / 3).min(24)))
    };
    if kind == "slow_block" && height * width < 2 {
        return None;
    }
    let (rows, columns) = (draw.some(height, n), draw.some(width, m));
    let cells =
        case.cells(|row| rows.binary_search(&row).is_ok(), |at| columns.binary_search(&at).is_ok());
    let keys = if case.sweep.is_pair() { ["rank0", "rank1"] } else { ["cpus", "devices"] };
    let place = format!(
        "kind = \"{kind}\"\n{} = {:?}\n{} = {:?}\n",
        keys[0],
        ids(&case.rows, &rows),
        keys[1],
        ids(&case.columns, &columns)
    );
    let planted = planted(vec![kind], Shape::Cells, cells);
    Some(Site { planted, place, may_be_faster: false })
}

fn relation(case: &Case, kind: &'static str) -> Option<Site> {
    let cells = case.related(kind);
    let count = cells.iter().filter(|cell| **cell).count();
    let is_long = case.rows.len().min(case.columns.len()) >= SMALLEST_AXIS;
    // One or two such pairs are a slow cell to anybody who does not know.
    (count >= 3 && is_long).then(|| Site {
        planted: planted(vec![kind], Shape::Cells, cells),
        place: format!("kind = \"{kind}\"\n"),
        may_be_faster: false,
    })
}

fn plant_artefacts(draw: &mut Draw, case: &mut Case, machine: &Machine) {
    let count = draw.weighted(&[0.30, 0.30, 0.25, 0.15]);
    let mut kinds = vec!["first_visit", "drift", "burst", "checkpoint", "time_step"];
    if !case.sweep.is_pair() {
        kinds.push("allocation_stall");
    }
    draw.shuffle(&mut kinds);
    kinds.truncate(count);
    let link = case.link();
    let rate = Bandwidth::gb_per_second(link.gbps);
    let cost = match (&case.plan.h2d, &case.plan.core_pair) {
        (Some(plan), _) => plan.cost(machine, rate),
        (_, Some(plan)) => plan.cost(machine, rate),
        _ => return,
    };
    let (seconds, points) = (cost.seconds, cost.points as f64);
    let usual_us = link.latency_us + case.largest.bytes() as f64 / (link.gbps * 1e3);
    for kind in kinds {
        let _ = writeln!(case.text, "[[artefact]]\nkind = \"{kind}\"");
        let text = &mut case.text;
        let _ = match kind {
            "allocation_stall" => {
                let (extra, over) = (draw.log_between(0.5, 60.0), draw.count(1, 4));
                writeln!(text, "extra_ms = {extra:.3}\nover = {over}")
            }
            "first_visit" => writeln!(text, "extra_us = {:.2}", draw.log_between(20.0, 3000.0)),
            "drift" => {
                let change = draw.between(0.01, 0.12) * if draw.chance(0.5) { 1.0 } else { -1.0 };
                // Warm-ups, stalls and confirmation make a run last about twice as long as its plan; a rate
                // that falls by the hour would otherwise never let it end.
                let per_hour = (change / (2.0 * seconds / 3600.0)).clamp(-1000.0, 1000.0);
                writeln!(text, "per_hour = {per_hour:.4}")
            }
            "burst" => {
                let period = (seconds / draw.log_between(2.0, 40.0)).max(1e-4);
                let length = period * draw.between(0.01, 0.15);
                let factor = draw.between(0.3, 0.95);
                writeln!(text, "factor = {factor:.3}\nevery_s = {period:.6}\nfor_s = {length:.6}")
            }
            "checkpoint" => {
                let (extra, every) = (draw.log_between(100.0, 20_000.0), draw.count(32, 1024));
                writeln!(text, "extra_us = {extra:.1}\nevery_points = {every}")
            }
            _ => {
                let at = (points * draw.between(0.05, 0.95)) as u64;
                let effect = if draw.chance(0.5) {
                    format!("factor = {:.3}", draw.between(0.6, 0.97))
                } else {
                    format!("extra_ms = {:.5}", usual_us * draw.between(0.03, 0.8) / 1e3)
                };
                let some = !case.sweep.is_pair() && case.columns.len() > 1 && draw.chance(0.3);
                let devices = if some {
                    let count = draw.count(1, case.columns.len() / 2);
                    format!("devices = {:?}\n", draw.some(count, case.columns.len()))
                } else {
                    String::new()
                };
                write!(text, "at_point = {at}\n{effect}\n{devices}")
            }
        };
        case.artefacts.push(kind);
    }
}
