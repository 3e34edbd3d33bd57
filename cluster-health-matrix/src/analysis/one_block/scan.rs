//! A scan in a fixed order: slots of time, the outer loop, by lines of the inner loop.

use super::super::table::{Kinship, Table};
use super::level;
use crate::matrix::Axis;
use crate::stats::{median, robust_sd};

/// One pass of the inner loop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// Position in the scan.
    pub(super) at: usize,
    /// Line of the outer axis.
    pub(super) line: usize,
    pub(super) seq: u32,
    pub(super) t_s: f64,
}

/// The scan of a table.
pub(super) struct Scan<'a> {
    pub(super) table: &'a Table,
    /// The axis of the outer loop.
    pub(super) outer: usize,
    pub(super) slots: Vec<Slot>,
    /// Lines of the inner loop in the order of their first visit.
    pub(super) visited: Vec<usize>,
    /// One per size that was measured, ascending.
    pub(super) grids: Vec<Grid>,
}

/// The points of one size.
pub(super) struct Grid {
    /// Position in the table's sizes.
    pub(super) size: usize,
    inner: usize,
    /// Logarithm of the time, slots × inner lines, NaN where not measured.
    ln: Vec<f32>,
    /// Number of each point in order of measurement, as `ln`.
    seq: Vec<u32>,
    pub(super) level: Vec<f64>,
    /// Of the inner lines, their middle 0; NaN without points.
    pub(super) line: Vec<f64>,
    class: [f64; 3],
    mu: f64,
    pub(super) point_sd: f64,
}

const ROUNDS: usize = 4;

impl<'a> Scan<'a> {
    /// `None` without points. The table is in order of measurement.
    pub(super) fn new(table: &'a Table) -> Option<Self> {
        let obs: Vec<_> = table
            .obs
            .iter()
            .filter(|obs| obs.is_block() && usize::from(obs.size) < table.sizes.len())
            .collect();
        let changes =
            |of: &dyn Fn(usize) -> u16| (1..obs.len()).filter(|&at| of(at) != of(at - 1)).count();
        let by_row = changes(&|at| obs[at].row);
        let by_col = changes(&|at| obs[at].col);
        let outer = usize::from(by_col < by_row);
        let place = |row: u16, col: u16| {
            if outer == 0 { (row.into(), col.into()) } else { (col.into(), row.into()) }
        };
        let inner = table.shape()[1 - outer];
        let mut slots: Vec<Slot> = Vec::new();
        let mut visited = Vec::new();
        let mut seen = vec![false; inner];
        let mut last = None;
        let mut slot_of = Vec::with_capacity(obs.len());
        for obs in &obs {
            let (line, at): (usize, usize) = place(obs.row, obs.col);
            if last != Some((obs.block, line)) {
                last = Some((obs.block, line));
                let t_s = f64::from(obs.t_s);
                slots.push(Slot { at: slots.len(), line, seq: obs.seq, t_s });
            }
            slot_of.push(slots.len() - 1);
            if !std::mem::replace(&mut seen[at], true) {
                visited.push(at);
            }
        }
        let mut scan = Self { table, outer, slots, visited, grids: Vec::new() };
        for size in 0..table.sizes.len() {
            let count = scan.slots.len() * inner;
            let mut grid = Grid {
                size,
                inner,
                ln: vec![f32::NAN; count],
                seq: vec![0; count],
                level: vec![0.0; scan.slots.len()],
                line: vec![0.0; inner],
                class: [0.0; 3],
                mu: 0.0,
                point_sd: 0.0,
            };
            let mut any = false;
            for (obs, &slot) in obs.iter().zip(&slot_of) {
                if usize::from(obs.size) == size {
                    let (_, at): (usize, usize) = place(obs.row, obs.col);
                    grid.ln[slot * inner + at] = obs.ln;
                    grid.seq[slot * inner + at] = obs.seq;
                    any = true;
                }
            }
            if any {
                grid.fit(&scan);
                scan.grids.push(grid);
            }
        }
        (!scan.grids.is_empty()).then_some(scan)
    }

    pub(super) fn inner(&self) -> usize {
        self.table.shape()[1 - self.outer]
    }

    pub(super) fn outer_axis(&self) -> &Axis {
        if self.outer == 0 { &self.table.rows } else { &self.table.cols }
    }

    pub(super) fn inner_axis(&self) -> &Axis {
        if self.outer == 0 { &self.table.cols } else { &self.table.rows }
    }

    fn kinship(&self, slot: usize, inner: usize) -> Kinship {
        let outer = self.slots[slot].line;
        if self.outer == 0 {
            self.table.kinship(outer, inner)
        } else {
            self.table.kinship(inner, outer)
        }
    }

    /// Lines of the inner loop that come first or after one of another NUMA node.
    pub(super) fn hops(&self) -> Vec<bool> {
        let nodes = &self.inner_axis().nodes;
        let mut hops = vec![false; self.inner()];
        let mut last = None;
        for &line in &self.visited {
            hops[line] = last.is_none_or(|last: usize| nodes[last] != nodes[line]);
            last = Some(line);
        }
        hops
    }
}

impl Grid {
    /// Levels of slots, lines and classes by turns.
    fn fit(&mut self, scan: &Scan<'_>) {
        let slots = scan.slots.len();
        let is_pair = scan.table.sweep.is_pair();
        let kin: Vec<(usize, Kinship)> = if is_pair {
            (0..slots)
                .flat_map(|slot| (0..self.inner).map(move |line| (slot, line)))
                .map(|(slot, line)| (slot * self.inner + line, scan.kinship(slot, line)))
                .filter(|(_, kinship)| *kinship != Kinship::Strangers)
                .collect()
        } else {
            Vec::new()
        };
        let mut own: Vec<f64> = self.ln.iter().map(|&ln| f64::from(ln)).collect();
        let mut all: Vec<f64> = own.iter().copied().filter(|ln| ln.is_finite()).collect();
        self.mu = median(&mut all);
        own.iter_mut().for_each(|ln| *ln -= self.mu);
        let mut scratch = Vec::new();
        for _ in 0..ROUNDS {
            for slot in 0..slots {
                scratch.clear();
                scratch.extend(
                    (0..self.inner)
                        .map(|line| own[slot * self.inner + line] - self.line[line])
                        .filter(|value| value.is_finite()),
                );
                self.level[slot] = level(&mut scratch);
            }
            for line in 0..self.inner {
                scratch.clear();
                scratch.extend(
                    (0..slots)
                        .map(|slot| own[slot * self.inner + line] - self.level[slot])
                        .filter(|value| value.is_finite()),
                );
                self.line[line] = median(&mut scratch);
            }
            scratch.clear();
            scratch.extend(self.line.iter().copied().filter(|line| line.is_finite()));
            let center = level(&mut scratch);
            self.line.iter_mut().for_each(|line| *line -= center);
            self.level.iter_mut().for_each(|level| *level += center);
            for class in [Kinship::Siblings, Kinship::SameCpu] {
                scratch.clear();
                scratch.extend(
                    kin.iter()
                        .filter(|(_, kinship)| *kinship == class)
                        .map(|(at, _)| {
                            own[*at] - self.level[at / self.inner] - self.line[at % self.inner]
                        })
                        .filter(|value| value.is_finite()),
                );
                if scratch.is_empty() {
                    continue;
                }
                let more = median(&mut scratch);
                self.class[class as usize] += more;
                for (at, _) in kin.iter().filter(|(_, kinship)| *kinship == class) {
                    own[*at] -= more;
                }
            }
        }
        let rest: Vec<f64> = (0..own.len())
            .map(|at| own[at] - self.level[at / self.inner] - self.line[at % self.inner])
            .filter(|value| value.is_finite())
            .collect();
        self.point_sd = robust_sd(&rest, 0.0);
    }

    /// Typical time of a transfer, nanoseconds.
    pub(super) fn usual_ns(&self) -> f64 {
        let mut levels: Vec<f64> =
            self.level.iter().copied().filter(|level| level.is_finite()).collect();
        (self.mu + median(&mut levels)).exp()
    }

    /// Logarithm of the longest time ÷ the shortest one.
    pub(super) fn range(&self) -> f64 {
        let present = || self.ln.iter().copied().filter(|ln| ln.is_finite());
        f64::from(present().fold(f32::MIN, f32::max) - present().fold(f32::MAX, f32::min))
    }

    /// Time of a slot's healthy lines, nanoseconds.
    pub(super) fn slot_ns(&self, slot: usize) -> f64 {
        (self.mu + self.level[slot]).exp()
    }

    /// A point against its slot.
    pub(super) fn against_slot(&self, slot: usize, line: usize) -> f64 {
        f64::from(self.ln[slot * self.inner + line]) - self.mu - self.level[slot]
    }

    pub(super) fn seq(&self, slot: usize, line: usize) -> u32 {
        self.seq[slot * self.inner + line]
    }

    /// A line against its slots, where it was measured.
    pub(super) fn of_line(&self, line: usize) -> Vec<(usize, f64)> {
        (0..self.level.len())
            .map(|slot| (slot, self.against_slot(slot, line)))
            .filter(|(_, value)| value.is_finite())
            .collect()
    }

    /// Pairs of a class against slot and line.
    pub(super) fn of_class(&self, scan: &Scan<'_>, class: Kinship) -> Vec<(usize, f64)> {
        if !scan.table.sweep.is_pair() {
            return Vec::new();
        }
        (0..self.level.len())
            .flat_map(|slot| (0..self.inner).map(move |line| (slot, line)))
            .filter(|&(slot, line)| scan.kinship(slot, line) == class)
            .map(|(slot, line)| (slot, self.against_slot(slot, line) - self.line[line]))
            .filter(|(_, value)| value.is_finite())
            .collect()
    }

    /// Middle of some lines against that of others, slot by slot.
    pub(super) fn difference(&self, members: &[usize], others: &[usize]) -> Vec<(usize, f64)> {
        let mut scratch = Vec::new();
        let mut level = |slot: usize, lines: &[usize]| {
            scratch.clear();
            scratch.extend(
                lines
                    .iter()
                    .map(|&line| self.against_slot(slot, line))
                    .filter(|value| value.is_finite()),
            );
            median(&mut scratch)
        };
        (0..self.level.len())
            .map(|slot| (slot, level(slot, members) - level(slot, others)))
            .filter(|(_, value)| value.is_finite())
            .collect()
    }

    /// What is left of a point after slot, line and class; NaN where not measured.
    pub(super) fn rest(&self, scan: &Scan<'_>, slot: usize, line: usize) -> f64 {
        self.against_slot(slot, line)
            - self.line[line]
            - self.class[scan.kinship(slot, line) as usize]
    }

    /// Points whose rest is beyond a border, and all.
    pub(super) fn count_beyond(&self, scan: &Scan<'_>, border: f64) -> (usize, usize) {
        let (mut beyond, mut all) = (0, 0);
        for slot in 0..self.level.len() {
            for line in 0..self.inner {
                let rest = self.rest(scan, slot, line);
                all += usize::from(rest.is_finite());
                beyond += usize::from(rest > border);
            }
        }
        (beyond, all)
    }
}
