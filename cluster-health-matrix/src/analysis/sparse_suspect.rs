//! Which lines, nodes, classes and rectangles of a sampled size look slow, and which cells would tell
//! more about them.

use std::collections::BTreeMap;

use super::fit::Fit;
use super::sparse::{self, Sampled, rests};
use super::suspect::{AxisLevels, Shape, Suspect, axis_levels};
use super::table::{Kinship, Table};
use crate::schedule::{Cell, Random};

/// Suspected lines of an axis, at most.
const MOST_LINES: usize = 32;
/// Standard errors by which a line must be slow to be visited six times more.
const LINE_Z: f64 = 2.6;
/// And classes.
const CLASS_Z: f64 = 3.0;

/// All suspicions of one size.
pub(crate) fn find(table: &Table, fit: &Fit, min_effect: f64) -> Vec<Suspect> {
    let Some(Sight { mut lines, grid, .. }) = look(table, fit, min_effect) else {
        return Vec::new();
    };
    let shape = table.shape();
    for rectangle in grid.rectangles(min_effect, Grid::is_sure) {
        let effect = rectangle.effect;
        let (rows, cols) = grid.members(&rectangle);
        // What spans an axis are lines.
        if rows.len() < shape[0] && cols.len() < shape[1] {
            lines.push(Suspect { shape: Shape::Block { rows, cols }, effect, size: 0 });
        }
    }
    lines
}

/// What is seen of one size.
struct Sight {
    /// By the cells outside of rectangles, which would shift the levels of their rows and columns.
    fit: Fit,
    /// Suspected lines, nodes and classes.
    lines: Vec<Suspect>,
    grid: Grid,
}

fn look(table: &Table, fit: &Fit, min_effect: f64) -> Option<Sight> {
    let mut fit = fit.clone();
    let mut lines = find_lines(table, &fit, min_effect);
    // Lines of few visits may owe their level to a rectangle.
    let known: Vec<Suspect> =
        lines.iter().filter(|suspect| is_well_known(&fit, &suspect.shape)).cloned().collect();
    let mut grid = Grid::new(table, &fit, &known, true);
    let sure = grid.rectangles(min_effect, Grid::is_sure);
    if !sure.is_empty() {
        let shape = table.shape();
        let mut is_masked = vec![false; shape[0] * shape[1]];
        for rectangle in &sure {
            let [rows, cols] = [0, 1].map(|axis| {
                // Its edges are not known yet.
                let (first, end) = rectangle.bins[axis];
                let end = (end + 1).min(grid.bins(axis));
                grid.edge(axis, first.saturating_sub(1))..grid.edge(axis, end)
            });
            for row in rows {
                for col in cols.clone() {
                    is_masked[grid.order[0][row] * shape[1] + grid.order[1][col]] = true;
                }
            }
        }
        let size = usize::from(table.obs[*fit.which.first()? as usize].size);
        let mask = |row: usize, col: usize| is_masked[row * shape[1] + col];
        fit = sparse::fit(table, size, Some(&mask), false)?;
        lines = find_lines(table, &fit, min_effect);
    }
    grid = Grid::new(table, &fit, &lines, false);
    Some(Sight { fit, lines, grid })
}

/// Visits from which a line's level is its own.
const WELL_KNOWN: u32 = 6;

fn is_well_known(fit: &Fit, shape: &Shape) -> bool {
    match (shape, &fit.sampled) {
        (Shape::Lines { axis, members, node: None }, Some(sampled)) => {
            members.iter().all(|&line| sampled.seen[*axis][line] >= WELL_KNOWN)
        }
        _ => true,
    }
}

/// Suspected lines, nodes and classes.
fn find_lines(table: &Table, fit: &Fit, min_effect: f64) -> Vec<Suspect> {
    let Some(sampled) = &fit.sampled else { return Vec::new() };
    let mut found = Vec::new();
    for axis in [0, 1] {
        if table.shape()[axis] < 2 {
            continue;
        }
        let levels = axis_levels(table, fit, axis, min_effect);
        let nodes = table.nodes(axis);
        for (node, effect) in &levels.nodes {
            let members = nodes.get(node).cloned().unwrap_or_default();
            let shape = Shape::Lines { axis, members, node: Some(*node) };
            found.push(Suspect { shape, effect: *effect, size: 0 });
        }
        let mut slow: Vec<(f64, f64, usize)> = own_levels(fit, sampled, &levels, axis)
            .into_iter()
            .enumerate()
            .filter(|&(line, own)| {
                let least = (0.8 * levels.threshold).max(LINE_Z * sampled.error(axis, line));
                sampled.seen[axis][line] >= 2 && own > least && !sampled.is_partial[axis][line]
            })
            .map(|(line, own)| (own / sampled.error(axis, line), own, line))
            .collect();
        slow.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
        found.extend(slow.into_iter().take(MOST_LINES).map(|(_, effect, line)| {
            let shape = Shape::Lines { axis, members: vec![line], node: None };
            Suspect { shape, effect, size: 0 }
        }));
    }
    for kinship in [Kinship::SameCpu, Kinship::Siblings] {
        let visits = visits_of(table, fit, kinship);
        let effect = fit.class[kinship as usize];
        let error = 1.25 * fit.point_sd / (visits.max(1) as f64).sqrt();
        if visits > 0 && effect > (0.7 * min_effect).max(CLASS_Z * error) {
            found.push(Suspect { shape: Shape::Class(kinship), effect, size: 0 });
        }
    }
    found
}

/// Levels of the lines by their own visits, against the healthy ones of their axis.
fn own_levels(fit: &Fit, sampled: &Sampled, levels: &AxisLevels, axis: usize) -> Vec<f64> {
    let fitted = if axis == 0 { &fit.row } else { &fit.col };
    let own = sampled.raw[axis].iter().zip(fitted).zip(&levels.level);
    own.map(|((raw, fitted), level)| raw - fitted + level).collect()
}

fn visits_of(table: &Table, fit: &Fit, kinship: Kinship) -> usize {
    fit.which
        .iter()
        .map(|&at| &table.obs[at as usize])
        .filter(|obs| {
            obs.is_block() && table.kinship(usize::from(obs.row), usize::from(obs.col)) == kinship
        })
        .count()
}

/// Bins per axis that rectangles are sought over.
const BINS: usize = 64;
/// Fewest visits that make a rectangle.
const LEAST_VISITS: usize = 3;
/// Rectangles looked for, and tries to find them.
const MOST_RECTANGLES: usize = 6;
const MOST_TRIES: usize = 24;
/// Evidence from which more visits are worth their time, and beyond the logarithm of the number of
/// rectangles that a sure one has.
const WORTH: f64 = 8.0;
const MARGIN: f64 = 7.0;

/// Logarithm of how much likelier a rectangle ends at a border of NUMA nodes than anywhere else.
const BORDER: f64 = 4.0;

/// A range of bins of each axis, as first and one past the last, with what its visits say.
#[derive(Debug, Clone, Copy)]
struct Rectangle {
    bins: [(usize, usize); 2],
    visits: usize,
    effect: f64,
    /// Half the square of its z.
    evidence: f64,
}

/// The rests of all visits over the lines of both axes, in the order of nodes.
struct Grid {
    /// Positions in the axes in the order of their nodes.
    order: [Vec<usize>; 2],
    /// Places where another node begins.
    borders: [Vec<usize>; 2],
    /// Place, place, rest.
    visits: Vec<(usize, usize, f64)>,
    sd: f64,
}

impl Grid {
    /// With `levels` the rests contain what the fit gave to lines of few visits.
    fn new(table: &Table, fit: &Fit, known: &[Suspect], levels: bool) -> Self {
        let shape = table.shape();
        let order = [0, 1].map(|axis| {
            let nodes = if axis == 0 { &table.rows.nodes } else { &table.cols.nodes };
            let mut order: Vec<usize> = (0..shape[axis]).collect();
            order.sort_by_key(|&line| (nodes[line], line));
            order
        });
        let place = [0, 1].map(|axis| {
            let mut place = vec![0; shape[axis]];
            (0..).zip(&order[axis]).for_each(|(at, &line)| place[line] = at);
            place
        });
        let borders = [0, 1].map(|axis| {
            let nodes = if axis == 0 { &table.rows.nodes } else { &table.cols.nodes };
            let own: &Vec<usize> = &order[axis];
            (1..own.len()).filter(|&at| nodes[own[at]] != nodes[own[at - 1]]).collect()
        });
        let limit = 4.0 * fit.point_sd + 0.3;
        let is_known = |row: usize, col: usize| {
            known.iter().any(|suspect| {
                !matches!(suspect.shape, Shape::Block { .. }) && suspect.shape.has(table, row, col)
            })
        };
        let visits = rests(table, fit)
            .into_iter()
            .filter(|&(row, col, _)| !is_known(row, col))
            .map(|(row, col, rest)| {
                let own = |axis: usize, line: usize| match &fit.sampled {
                    Some(sampled) if levels && sampled.seen[axis][line] < WELL_KNOWN => {
                        sampled.own[axis][line]
                    }
                    _ => 0.0,
                };
                let rest = rest + own(0, row) + own(1, col);
                (place[0][row], place[1][col], rest.min(limit))
            })
            .collect();
        Self { order, borders, visits, sd: fit.point_sd }
    }

    fn bins(&self, axis: usize) -> usize {
        self.order[axis].len().min(BINS)
    }

    fn bin(&self, axis: usize, place: usize) -> usize {
        place * self.bins(axis) / self.order[axis].len()
    }

    /// First place of a bin.
    fn edge(&self, axis: usize, bin: usize) -> usize {
        (bin * self.order[axis].len()).div_ceil(self.bins(axis))
    }

    fn count(&self) -> f64 {
        [0, 1].iter().map(|&axis| (self.bins(axis) * (self.bins(axis) + 1) / 2) as f64).product()
    }

    fn is_sure(&self, rectangle: &Rectangle) -> bool {
        rectangle.evidence > self.count().max(1.0).ln() + MARGIN
    }

    fn is_worth_more(&self, rectangle: &Rectangle) -> bool {
        rectangle.evidence > WORTH
    }

    /// The slowest rectangles, which do not overlap, the surest first.
    fn rectangles(
        &self,
        min_effect: f64,
        wanted: impl Fn(&Self, &Rectangle) -> bool,
    ) -> Vec<Rectangle> {
        let bins = [self.bins(0), self.bins(1)];
        let mut found: Vec<Rectangle> = Vec::new();
        // Lines that are hardly known would look like rectangles.
        let lines = self.order[0].len() + self.order[1].len();
        if bins[0] < 3 || bins[1] < 2 || 2 * self.visits.len() < lines {
            return found;
        }
        let mut left: Vec<&(usize, usize, f64)> = self.visits.iter().collect();
        for _ in 0..MOST_TRIES {
            let mut sums = vec![0.0; bins[0] * bins[1]];
            let mut counts = vec![0_u32; bins[0] * bins[1]];
            for &&(row, col, rest) in &left {
                let at = self.bin(0, row) * bins[1] + self.bin(1, col);
                sums[at] += rest;
                counts[at] += 1;
            }
            let Some(best) = best_rectangle(&sums, &counts, bins, self.sd, 0.7 * min_effect) else {
                break;
            };
            if found.len() == MOST_RECTANGLES || !wanted(self, &best) {
                break;
            }
            let within = |visit: &(usize, usize, f64), margin: usize| {
                [(0, visit.0), (1, visit.1)].into_iter().all(|(axis, place)| {
                    let (first, end) = best.bins[axis];
                    (first.saturating_sub(margin)..end + margin).contains(&self.bin(axis, place))
                })
            };
            let inside: Vec<&(usize, usize, f64)> =
                left.iter().copied().filter(|visit| within(visit, 0)).collect();
            // Lines beside each other are slow across, of which the bins of a rectangle are a part.
            let spanned = [0, 1].into_iter().find(|&axis| {
                let (first, end) = best.bins[1 - axis];
                4 * (end - first) > 3 * bins[1 - axis]
            });
            if let Some(axis) = spanned {
                let (first, end) = best.bins[axis];
                left.retain(|visit| {
                    !(first..end).contains(&self.bin(axis, [visit.0, visit.1][axis]))
                });
                continue;
            }
            match dominating(&inside) {
                // The same of a single line.
                Some((axis, line)) => {
                    left.retain(|visit| [visit.0, visit.1][axis] != line);
                }
                None => {
                    // Bins at its edges are partly of it.
                    left.retain(|visit| !within(visit, 1));
                    found.push(best);
                }
            }
        }
        found
    }

    /// Places of a rectangle, its edges where the visits say that it begins and ends.
    fn places(&self, rectangle: &Rectangle) -> [(usize, usize); 2] {
        let mut range = [0, 1].map(|axis| {
            let (first, end) = rectangle.bins[axis];
            (self.edge(axis, first), self.edge(axis, end))
        });
        for _ in 0..2 {
            for axis in [0, 1] {
                let other = range[1 - axis];
                let lines = self.order[axis].len();
                // How much more likely each line is a member than none.
                let mut odds = vec![0.0; lines];
                for &(row, col, rest) in &self.visits {
                    let (own, across) = if axis == 0 { (row, col) } else { (col, row) };
                    if (other.0..other.1).contains(&across) {
                        let effect = rectangle.effect;
                        let rest = rest.clamp(-effect, 2.0 * effect);
                        odds[own] += effect * (rest - effect / 2.0) / (self.sd * self.sd);
                    }
                }
                let margin = 2 * lines.div_ceil(self.bins(axis));
                let (first, end) = range[axis];
                let middle = usize::midpoint(first, end);
                // The edge that leaves most of the evidence inside; the nearest to the bin's of equals.
                // What ends at a border of nodes needs less of it.
                let prior = |edge: usize| {
                    let ends = edge == 0 || edge == lines;
                    if ends || self.borders[axis].contains(&edge) { BORDER } else { 0.0 }
                };
                let best_first = best_edge(first, margin, (0, middle), |edge| {
                    signed_sum(&odds, edge, first) + prior(edge)
                });
                let best_end = best_edge(end, margin, (middle + 1, lines), |edge| {
                    signed_sum(&odds, end, edge) + prior(edge)
                });
                range[axis] = (best_first, best_end);
            }
        }
        range
    }

    /// Visits of one line in these places of the other axis.
    fn visits_within(&self, axis: usize, place: usize, across: (usize, usize)) -> usize {
        let of = |&&(row, col, _): &&(usize, usize, f64)| {
            let (own, at) = if axis == 0 { (row, col) } else { (col, row) };
            own == place && (across.0..across.1).contains(&at)
        };
        self.visits.iter().filter(of).count()
    }

    /// Positions in the axes.
    fn members(&self, rectangle: &Rectangle) -> (Vec<usize>, Vec<usize>) {
        let [rows, cols] = self.places(rectangle);
        let of = |axis: usize, (first, end): (usize, usize)| {
            let mut members = self.order[axis][first..end].to_vec();
            members.sort_unstable();
            members
        };
        (of(0, rows), of(1, cols))
    }
}

/// The row (0) or column (1), by place, that most of the slowness of these visits is of.
fn dominating(inside: &[&(usize, usize, f64)]) -> Option<(usize, usize)> {
    let total: f64 = inside.iter().map(|visit| visit.2.max(0.0)).sum();
    [0, 1].into_iter().find_map(|axis| {
        let mut by_line = BTreeMap::<usize, f64>::new();
        for visit in inside {
            *by_line.entry([visit.0, visit.1][axis]).or_default() += visit.2.max(0.0);
        }
        let share = if by_line.len() < 3 { 0.34 } else { 0.5 };
        by_line.into_iter().find(|(_, own)| *own > share * total).map(|(line, _)| (axis, line))
    })
}

/// Sum of odds from `from` to `to`, negative when `to` lies before.
fn signed_sum(odds: &[f64], from: usize, to: usize) -> f64 {
    if from <= to { odds[from..to].iter().sum() } else { -odds[to..from].iter().sum::<f64>() }
}

fn best_edge(
    edge: usize,
    margin: usize,
    (least, most): (usize, usize),
    gain: impl Fn(usize) -> f64,
) -> usize {
    let candidates = edge.saturating_sub(margin).max(least)..=(edge + margin).min(most);
    candidates
        .max_by(|&a, &b| {
            let (gain_a, gain_b) = (gain(a), gain(b));
            gain_a.total_cmp(&gain_b).then(b.abs_diff(edge).cmp(&a.abs_diff(edge)))
        })
        .unwrap_or(edge)
}

/// The range of bins with the largest z whose mean is large enough; none that spans an axis.
fn best_rectangle(
    sums: &[f64],
    counts: &[u32],
    [rows, cols]: [usize; 2],
    sd: f64,
    least: f64,
) -> Option<Rectangle> {
    let mut best: Option<Rectangle> = None;
    let mut sum = vec![0.0; cols];
    let mut count = vec![0_u32; cols];
    for first in 0..rows {
        sum.fill(0.0);
        count.fill(0);
        for end in first + 1..=rows {
            for col in 0..cols {
                sum[col] += sums[(end - 1) * cols + col];
                count[col] += counts[(end - 1) * cols + col];
            }
            if end - first == rows {
                continue;
            }
            for left in 0..cols {
                let (mut total, mut visits) = (0.0, 0_u32);
                for right in left + 1..=cols {
                    total += sum[right - 1];
                    visits += count[right - 1];
                    if (visits as usize) < LEAST_VISITS || right - left == cols {
                        continue;
                    }
                    let mean = total / f64::from(visits);
                    let evidence = total * mean / (2.0 * sd * sd);
                    if mean > least && best.is_none_or(|best| evidence > best.evidence) {
                        best = Some(Rectangle {
                            bins: [(first, end), (left, right)],
                            visits: visits as usize,
                            effect: mean,
                            evidence,
                        });
                    }
                }
            }
        }
    }
    best
}

/// New visits of a line, a rectangle, an edge of one.
const MORE_OF_LINE: usize = 3;
const MORE_OF_RECTANGLE: usize = 12;
const MORE_OF_EDGE: usize = 3;
/// What a rectangle's edge is worth, as evidence: less than finding another fault.
const WORTH_OF_EDGE: f64 = 3.0;
/// Visits of a line that cannot all have met a stall.
const SURE_OF_LINE: u32 = 4;
/// Enough visits of a line, a rectangle.
const ENOUGH_OF_LINE: u32 = 12;
const ENOUGH_OF_RECTANGLE: usize = 24;

/// The cells whose visits would tell most about one size: of lines that may be slow, of rectangles
/// that may be, and at the edges of those that are, the most telling ones first; none when nothing is
/// left to be asked.
pub(crate) fn next_cells(
    table: &Table,
    fit: &Fit,
    min_effect: f64,
    usable: &dyn Fn(usize, usize) -> bool,
    random: &mut Random,
) -> Vec<Cell> {
    let Some(Sight { fit, grid, .. }) = look(table, fit, min_effect) else { return Vec::new() };
    let Some(sampled) = &fit.sampled else { return Vec::new() };
    let fit = &fit;
    let shape = table.shape();
    let mut wanted = BTreeMap::<(usize, usize), f64>::new();
    let mut want = |cell: (usize, usize), worth: f64| {
        let known = wanted.entry(cell).or_insert(worth);
        *known = known.max(worth);
    };
    let mut visited = BTreeMap::<(usize, usize), u32>::new();
    for obs in fit.which.iter().map(|&at| &table.obs[at as usize]).filter(|obs| obs.is_block()) {
        *visited.entry((usize::from(obs.row), usize::from(obs.col))).or_default() += 1;
    }
    for axis in [0, 1] {
        if shape[axis] < 2 || shape[1 - axis] < 2 {
            continue;
        }
        let levels = axis_levels(table, fit, axis, min_effect);
        for (line, own) in own_levels(fit, sampled, &levels, axis).into_iter().enumerate() {
            let error = sampled.error(axis, line);
            // One of a fault that is well above the smallest would have this level with 98 %.
            let may_be_slow = own > (5.0 / 3.0 * min_effect - 2.0 * error).max(0.5 * min_effect);
            let seen = sampled.seen[axis][line];
            // What is far from being healthy is confirmed as it is.
            let is_sure = seen >= SURE_OF_LINE && own - LINE_Z * error > levels.threshold;
            if !may_be_slow || is_sure || seen >= ENOUGH_OF_LINE {
                continue;
            }
            for _ in 0..MORE_OF_LINE {
                let across = random.below(shape[1 - axis]);
                want(
                    if axis == 0 { (line, across) } else { (across, line) },
                    // The less is known the more a visit tells.
                    (own / error).powi(2) / 2.0 / f64::from(seen.max(1)),
                );
            }
        }
    }
    for rectangle in grid.rectangles(min_effect, Grid::is_worth_more) {
        let places = grid.places(&rectangle);
        let pick = |axis: usize, (first, end): (usize, usize), random: &mut Random| {
            grid.order[axis][first + random.below((end - first).max(1))]
        };
        if rectangle.visits < ENOUGH_OF_RECTANGLE {
            for _ in 0..MORE_OF_RECTANGLE {
                let cell = (pick(0, places[0], random), pick(1, places[1], random));
                want(cell, rectangle.evidence);
            }
        }
        if !grid.is_sure(&rectangle) {
            continue;
        }
        for axis in [0, 1] {
            let lines = grid.order[axis].len();
            let margin = lines.div_ceil(grid.bins(axis));
            let (first, end) = places[axis];
            for edge in [first, end] {
                if edge == 0 || edge == lines {
                    continue;
                }
                for place in edge.saturating_sub(margin)..(edge + margin).min(lines) {
                    if grid.visits_within(axis, place, places[1 - axis]) >= MORE_OF_EDGE {
                        continue;
                    }
                    let line = grid.order[axis][place];
                    for _ in 0..MORE_OF_EDGE {
                        let at = pick(1 - axis, places[1 - axis], random);
                        want(if axis == 0 { (line, at) } else { (at, line) }, WORTH_OF_EDGE);
                    }
                }
            }
        }
    }
    let mut wanted: Vec<(f64, (usize, usize))> = wanted
        .into_iter()
        .filter(|&((row, col), _)| usable(row, col))
        // A cell that was visited twice tells little more.
        .filter(|(cell, _)| visited.get(cell).is_none_or(|visits| *visits < 2))
        .map(|(cell, worth)| (worth, cell))
        .collect();
    wanted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    wanted.into_iter().map(|(_, (row, column))| Cell { row, column }).collect()
}
