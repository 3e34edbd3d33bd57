//! This run's copies against those of the baseline, cell by cell at the same sizes.
//!
//! What is compared are logarithms of the rate now ÷ the rate then, so that the noise of both is in
//! their scatter. A class of cells (a size, a device, a NUMA node) has their mean; its interval comes from the
//! largest of the variations between its CPUs, between its devices, and between blocks, each taken as
//! independent units (with the cluster-robust variance of a mean, and Student's t). Three units are the
//! fewest.

use std::collections::{BTreeMap, BTreeSet};

use cluster_health_core::ByteSize;
use ndarray::{Array3, Axis as Dimension};
use serde::{Deserialize, Serialize};

use super::baseline::{Known, KnownRates};
use crate::analysis::Finding;
use crate::blocks::Blocks;
use crate::calibrate::clock_of;
use crate::matrix::Matrix;
use crate::report::Report;
use crate::samples::Sweep;
use crate::stats::{median, robust_sd};
use crate::student::{Contrast, holm, mean_and_spread, to_f64};

/// Family-wise error of all tests together.
const LEVEL: f64 = 0.01;
/// Fewest independent units that give an interval.
const FEWEST_UNITS: usize = 3;
/// A cell farther than this many standard deviations from the median of its class counts as so far: single
/// disturbed visits are no change of a class.
const CLIP: f64 = 5.0;
/// Fewest cells whose scatter says what is far.
const FEWEST_CLIPPED: usize = 8;

/// What became of a class of cells since the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ChangeState {
    /// A slowdown that counts is excluded.
    Unchanged,
    /// Slower by more than counts, and not by chance.
    Slower,
    /// Faster by more than counts, and not by chance: no fault, but the baseline is another one.
    Faster,
    /// Neither shown nor excluded.
    Unknown,
}

/// A class of cells now against then.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Change {
    /// `size`, `device` or `numa_node`.
    pub axis: String,
    /// Bytes per copy, physical id, node.
    pub id: u64,
    /// Cells that both runs measured, of all sizes together where the axis is not `size`.
    pub cells: usize,
    /// Geometric mean of rate now ÷ rate then; `None` without cells.
    pub ratio: Option<f64>,
    /// Lower end of its 95 % interval; `None` = not known.
    pub low: Option<f64>,
    /// Upper end of its 95 % interval; `None` = not known.
    pub high: Option<f64>,
    /// What follows.
    pub state: ChangeState,
}

impl Change {
    /// The class in words.
    #[must_use]
    pub fn name(&self) -> String {
        match self.axis.as_str() {
            "size" => format!("copies of {}", ByteSize(self.id)),
            "device" => format!("device {}", self.id),
            _ => format!("NUMA node {}", self.id),
        }
    }

    /// The ratio in words.
    #[must_use]
    pub fn numbers(&self) -> String {
        match (self.ratio, self.low, self.high) {
            (Some(ratio), Some(low), Some(high)) => {
                format!("× {ratio:.3} of the baseline's rate (95 % interval {low:.3} to {high:.3})")
            }
            (Some(ratio), ..) => format!(
                "× {ratio:.3} of the baseline's rate, from {} cells: too few for an interval",
                self.cells
            ),
            _ => "no cell that both runs measured".to_owned(),
        }
    }
}

/// A cell that both runs measured.
#[derive(Debug, Clone, Copy)]
struct Cell {
    cpu: u32,
    node: Option<u32>,
    device: u32,
    bytes: ByteSize,
    /// ln of rate now ÷ rate then.
    log: f64,
}

/// Everything that both runs measured the same way.
#[derive(Debug, Default)]
pub(super) struct Common {
    cells: Vec<Cell>,
    /// The same block by block of this run.
    blocks: BTreeMap<u32, Vec<Cell>>,
    /// Classes of this run, whether or not they have cells.
    devices: BTreeSet<u32>,
    nodes: BTreeSet<u32>,
    sizes: BTreeSet<ByteSize>,
    /// Blocks of the baseline, and the standard deviation between them where it tells.
    known_blocks: usize,
    known_sd: Option<f64>,
    /// Why matrices of this run have no counterpart.
    pub(super) why_not: Vec<String>,
}

impl Common {
    /// What `report` and `known` have in common.
    pub(super) fn of(report: &Report, known: &Known) -> Self {
        let mut common = Self { known_blocks: usize::MAX, ..Self::default() };
        for (matrix, blocks) in report.matrices.iter().zip(&report.blocks) {
            if matrix.sweep != Sweep::H2d {
                continue;
            }
            let (clock, memory) = (clock_of(blocks), matrix.memory.as_str());
            common.devices.extend(&matrix.columns.ids);
            common.nodes.extend(matrix.rows.nodes.iter().flatten());
            for (size, &bytes) in matrix.sizes.iter().enumerate() {
                common.sizes.insert(bytes);
                let mut of_size =
                    known.rates.iter().filter(|rates| rates.bytes == bytes).peekable();
                if of_size.peek().is_none() {
                    common.why_not.push(format!("the baseline has no copies of {bytes}"));
                    continue;
                }
                let same = of_size.clone().find(|rates| {
                    let same_clock = rates.clock.as_deref().is_none_or(|known| known == clock);
                    rates.memory == memory && same_clock
                });
                let Some(rates) = same else {
                    let of_size = of_size.map(|rates| {
                        format!("{} memory by {}", rates.memory, clock_name(rates.clock.as_deref()))
                    });
                    common.why_not.push(format!(
                        "copies of {bytes}: {memory} memory by {} here, {} in the baseline",
                        clock_name(Some(clock)),
                        of_size.collect::<Vec<_>>().join(" and ")
                    ));
                    continue;
                };
                common.add(matrix, blocks, size, rates);
            }
        }
        common
    }

    fn add(&mut self, matrix: &Matrix, blocks: &Blocks, size: usize, rates: &KnownRates) {
        let cells = |gbps: &Array3<f64>| -> Vec<Cell> {
            let slice = gbps.index_axis(Dimension(0), size);
            let cell = |((row, column), rate): ((usize, usize), &f64)| {
                let (cpu, device) = (matrix.rows.ids[row], matrix.columns.ids[column]);
                let log = (rate / rates.at(cpu, device)).ln();
                let node = matrix.rows.nodes[row];
                let bytes = matrix.sizes[size];
                log.is_finite().then_some(Cell { cpu, node, device, bytes, log })
            };
            slice.indexed_iter().filter_map(cell).collect()
        };
        self.cells.extend(cells(&matrix.gbps));
        for (number, gbps) in blocks.numbers.iter().zip(&blocks.gbps) {
            self.blocks.entry(*number).or_default().extend(cells(gbps));
        }
        self.known_blocks = self.known_blocks.min(rates.blocks.unwrap_or(1).max(1));
        if let Some(sd) = rates.block_sd {
            self.known_sd = Some(self.known_sd.map_or(sd, |known| known.max(sd)));
        }
    }

    /// Cells that both runs measured.
    pub(super) fn cells(&self) -> usize {
        self.cells.len()
    }

    /// Mean logarithm of the cells that are `of` the class with its error; NaN where it is not known.
    fn contrast(&self, of: &dyn Fn(&Cell) -> bool) -> (usize, Contrast) {
        let mut cells: Vec<Cell> = self.cells.iter().copied().filter(of).collect();
        clip(&mut cells);
        let mean = cells.iter().map(|cell| cell.log).sum::<f64>() / to_f64(cells.len());
        let mut found = Contrast::without_error(mean);
        let mut widest = 0.0;
        let by_line = [clustered(&cells, mean, |cell| cell.cpu), {
            clustered(&cells, mean, |cell| cell.device)
        }];
        for contrast in by_line.into_iter().chain([self.between_blocks(of, mean, cells.len())]) {
            let Some(contrast) = contrast else { continue };
            let width = contrast.interval().1 - contrast.difference;
            if width >= widest {
                (widest, found) = (width, contrast);
            }
        }
        (cells.len(), found)
    }

    /// The error that blocks tell: those of this run, and as many of the baseline as it had.
    fn between_blocks(
        &self,
        of: &dyn Fn(&Cell) -> bool,
        mean: f64,
        cells: usize,
    ) -> Option<Contrast> {
        let of_block = |block: &Vec<Cell>| {
            let logs: Vec<f64> =
                block.iter().filter(|cell| of(cell)).map(|cell| cell.log).collect();
            // A mean over few other cells is another quantity.
            (2 * logs.len() >= cells).then(|| mean_and_spread(&logs).0)
        };
        let means: Vec<f64> = self.blocks.values().filter_map(of_block).collect();
        if means.len() < FEWEST_UNITS {
            return None;
        }
        let (_, own) = mean_and_spread(&means);
        // A baseline that does not tell is taken for as unsteady as this run.
        let known = self.known_sd.map_or(own.variance, |sd| sd * sd);
        let error = (own.variance / own.count + known / to_f64(self.known_blocks)).sqrt();
        Some(Contrast { difference: mean, error, degrees: own.degrees })
    }

    /// All classes, judged: a change below the share `min_change` of the rate does not count.
    pub(super) fn changes(&self, min_change: f64) -> Vec<Change> {
        let mut classes: Vec<(&str, u64, usize, Contrast)> = Vec::new();
        for &bytes in &self.sizes {
            let (cells, contrast) = self.contrast(&|cell| cell.bytes == bytes);
            classes.push(("size", bytes.bytes(), cells, contrast));
        }
        for &device in &self.devices {
            let (cells, contrast) = self.contrast(&|cell| cell.device == device);
            classes.push(("device", device.into(), cells, contrast));
        }
        for &node in self.nodes.iter().filter(|_| self.nodes.len() > 1) {
            let (cells, contrast) = self.contrast(&|cell| cell.node == Some(node));
            classes.push(("numa_node", node.into(), cells, contrast));
        }
        let p: Vec<f64> = classes.iter().map(|class| class.3.p()).collect();
        let rejected = holm(&p, LEVEL);
        let smallest = smallest_log(min_change);
        let judge = |(class, rejected): (&(&str, u64, usize, Contrast), bool)| {
            let &(axis, id, cells, contrast) = class;
            let (low, high) = contrast.interval();
            let state = if rejected && contrast.difference <= -smallest {
                ChangeState::Slower
            } else if rejected && contrast.difference >= smallest {
                ChangeState::Faster
            } else if low > -smallest {
                ChangeState::Unchanged
            } else {
                ChangeState::Unknown
            };
            let known = |log: f64| log.is_finite().then(|| log.exp());
            let [ratio, low, high] = [contrast.difference, low, high].map(known);
            Change { axis: axis.to_owned(), id, cells, ratio, low, high, state }
        };
        classes.iter().zip(rejected).map(judge).collect()
    }

    /// True when it is shown that the members of a finding stand to the rest as they did in the baseline,
    /// to less than the share `min_change`, and nothing else is shown at any size; where there is no
    /// rest, that they are as fast as they were.
    pub(super) fn has(&self, finding: &Finding, min_change: f64) -> bool {
        let is_of = |ids: &[u32], id: u32| ids.is_empty() || ids.contains(&id);
        let is_member =
            |cell: &Cell| is_of(&finding.cpus, cell.cpu) && is_of(&finding.devices, cell.device);
        // Slower is news of what is slow, faster of what is fast.
        let sign = if finding.effect.is_some_and(|effect| effect.ratio > 1.0) { -1.0 } else { 1.0 };
        // How much slower (faster) the members became than the rest, with the ends of its interval.
        let news = |bytes: Option<ByteSize>| {
            let counts = |cell: &Cell| bytes.is_none_or(|bytes| cell.bytes == bytes);
            let (count, members) = self.contrast(&|cell| counts(cell) && is_member(cell));
            let (others, rest) = self.contrast(&|cell| counts(cell) && !is_member(cell));
            let contrast = if others == 0 {
                members
            } else {
                Contrast {
                    difference: members.difference - rest.difference,
                    error: members.error.hypot(rest.error),
                    degrees: members.degrees.min(rest.degrees),
                }
            };
            let (low, high) = contrast.interval();
            let (least, most) = if sign > 0.0 { (-high, -low) } else { (low, high) };
            (count > 0).then_some((-sign * contrast.difference, least, most))
        };
        let smallest = smallest_log(min_change);
        let is_old = news(None).is_some_and(|(_, _, most)| most < smallest);
        let sizes: BTreeSet<ByteSize> = self.cells.iter().map(|cell| cell.bytes).collect();
        let is_new = |(more, least, _): (f64, f64, f64)| more >= smallest && least > 0.0;
        is_old && !sizes.into_iter().filter_map(|bytes| news(Some(bytes))).any(is_new)
    }
}

fn clock_name(clock: Option<&str>) -> &str {
    match clock {
        Some("event") => "device events",
        Some(_) => "the host clock",
        None => "an unknown clock",
    }
}

/// The logarithm of a slowdown by a share of the rate, without its sign.
fn smallest_log(share: f64) -> f64 {
    -(1.0 - share).ln()
}

fn clip(cells: &mut [Cell]) {
    if cells.len() < FEWEST_CLIPPED {
        return;
    }
    let mut logs: Vec<f64> = cells.iter().map(|cell| cell.log).collect();
    let center = median(&mut logs);
    let far = CLIP * robust_sd(&logs, center);
    if far > 0.0 {
        cells.iter_mut().for_each(|cell| cell.log = cell.log.clamp(center - far, center + far));
    }
}

/// A mean over cells, lines of which belong together; `None` with too few lines.
fn clustered(cells: &[Cell], mean: f64, line: impl Fn(&Cell) -> u32) -> Option<Contrast> {
    let mut sums = BTreeMap::<u32, f64>::new();
    for cell in cells {
        *sums.entry(line(cell)).or_default() += cell.log - mean;
    }
    let (units, count) = (to_f64(sums.len()), to_f64(cells.len()));
    let squares: f64 = sums.values().map(|sum| sum * sum).sum();
    let variance = squares / (count * count) * units / (units - 1.0);
    let contrast = Contrast { difference: mean, error: variance.sqrt(), degrees: units - 1.0 };
    (sums.len() >= FEWEST_UNITS).then_some(contrast)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Effect;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs().max(1e-9)
    }

    fn cells(logs: &[(u32, u32, f64)]) -> Vec<Cell> {
        let cell = |&(cpu, device, log)| Cell {
            cpu,
            node: Some(cpu / 4),
            device,
            bytes: ByteSize(1000),
            log,
        };
        logs.iter().map(cell).collect()
    }

    /// One cell per line: the textbook's standard error of a mean, √(4 ÷ 4).
    #[test]
    fn single_cells_per_line_are_independent_units() {
        let cells = cells(&[(0, 0, 1.0), (1, 0, 3.0), (2, 0, 3.0), (3, 0, 5.0)]);
        let found = clustered(&cells, 3.0, |cell| cell.cpu).unwrap();
        assert!(close(found.error, (8.0_f64 / 3.0 / 4.0).sqrt()), "{found:?}");
        assert!(close(found.degrees, 3.0));
        assert!(clustered(&cells, 3.0, |cell| cell.device).is_none());
    }

    /// Twice the same values on the same lines are no more evidence.
    #[test]
    fn more_cells_of_a_line_are_not_more_lines() {
        let once = [(0, 0, 1.0), (1, 0, 3.0), (2, 0, 5.0)];
        let twice: Vec<_> =
            once.iter().flat_map(|&(cpu, _, log)| [(cpu, 0, log), (cpu, 1, log)]).collect();
        let error =
            |logs: &[(u32, u32, f64)]| clustered(&cells(logs), 3.0, |cell| cell.cpu).unwrap().error;
        assert!(close(error(&once), error(&twice)));
    }

    /// 16 CPUs × 4 devices, everything by `log`.
    fn common(log: impl Fn(u32, u32) -> f64) -> Common {
        let all: Vec<_> = (0..16_u32)
            .flat_map(|cpu| (0..4).map(move |device| (cpu, device)))
            .map(|(cpu, device)| {
                // A scatter of 0.2 % that has no pattern.
                let noise = f64::from((cpu * 7 + device * 13) % 11) - 5.0;
                (cpu, device, log(cpu, device) + 6e-4 * noise)
            })
            .collect();
        Common {
            cells: cells(&all),
            devices: (0..4).collect(),
            nodes: (0..4).collect(),
            sizes: [ByteSize(1000)].into(),
            known_blocks: 1,
            ..Common::default()
        }
    }

    fn states(changes: &[Change], state: ChangeState) -> Vec<(&str, u64)> {
        let with = changes.iter().filter(|change| change.state == state);
        with.map(|change| (change.axis.as_str(), change.id)).collect()
    }

    #[test]
    fn a_class_is_slower_only_beyond_what_counts() {
        let changes = common(|_, _| 0.0).changes(0.05);
        assert_eq!(states(&changes, ChangeState::Unchanged).len(), 9, "{changes:?}");
        let changes = common(|_, device| if device == 2 { -0.1 } else { 0.0 }).changes(0.05);
        assert_eq!(states(&changes, ChangeState::Slower), [("device", 2)]);
        let ratio = changes.iter().find(|change| change.axis == "device" && change.id == 2);
        assert!((ratio.unwrap().ratio.unwrap() - (-0.1_f64).exp()).abs() < 2e-3);
        let changes = common(|cpu, _| if cpu / 4 == 1 { -0.1 } else { 0.0 }).changes(0.05);
        assert_eq!(states(&changes, ChangeState::Slower), [("numa_node", 1)]);
        let changes = common(|_, _| -0.03).changes(0.05);
        assert_eq!(states(&changes, ChangeState::Unchanged).len(), 9, "{changes:?}");
        let changes = common(|_, _| 0.1).changes(0.05);
        assert_eq!(states(&changes, ChangeState::Faster).len(), 9, "{changes:?}");
    }

    #[test]
    fn what_is_not_known_is_not_unchanged() {
        let mut common = common(|_, _| 0.0);
        common.cells.retain(|cell| cell.device != 3 && cell.cpu / 4 != 2);
        common.cells.push(Cell { cpu: 0, ..cells(&[(0, 3, 0.0)])[0] });
        let changes = common.changes(0.05);
        assert_eq!(
            states(&changes, ChangeState::Unknown),
            [("device", 3), ("numa_node", 2)],
            "{changes:?}"
        );
        assert!(changes[4].numbers().contains("1 cells: too few"), "{}", changes[4].numbers());
    }

    #[test]
    fn single_disturbed_visits_are_no_change() {
        let changes = common(|cpu, device| if (cpu, device) == (3, 1) { -1.2 } else { 0.0 });
        let changes = changes.changes(0.05);
        assert_eq!(states(&changes, ChangeState::Unchanged).len(), 9, "{changes:?}");
    }

    #[test]
    fn what_the_baseline_has_too_is_no_news() {
        let mut finding = Finding::new(crate::analysis::Kind::SlowDevice, Some(Sweep::H2d), None);
        finding.devices = vec![2];
        // The cells now ÷ then do not show it: it was there.
        assert!(common(|_, _| 0.0).has(&finding, 0.05));
        assert!(!common(|_, device| if device == 2 { -0.1 } else { 0.0 }).has(&finding, 0.05));
        // All are slower, it as much as the others.
        assert!(common(|_, _| -0.2).has(&finding, 0.05));
        // Slower at one of two sizes, of which the mean would count as usual.
        let mut of_sizes = common(|_, _| 0.0);
        let large = common(|_, device| if device == 2 { -0.08 } else { 0.0 }).cells;
        of_sizes.cells.extend(large.into_iter().map(|cell| Cell { bytes: ByteSize(9000), ..cell }));
        assert!(!of_sizes.has(&finding, 0.05));
        // What is fast is news where it became faster.
        let fast = common(|_, device| if device == 2 { 0.1 } else { 0.0 });
        assert!(fast.has(&finding, 0.05));
        finding.effect = Some(Effect { ratio: 1.1, low: 1.09, high: 1.11 });
        assert!(!fast.has(&finding, 0.05) && common(|_, _| 0.0).has(&finding, 0.05));
        finding.effect = None;
        finding.devices.clear();
        assert!(!common(|_, _| -0.2).has(&finding, 0.05));
        assert!(!Common::default().has(&finding, 0.05));
    }
}
