//! Which rows, columns, classes, rectangles and cells look slow: what the confirmation visits again.
//!
//! Suspecting is generous: a finding rests on the visits that follow, not on these estimates,
//! which are the largest of many and therefore biased.

use std::collections::BTreeSet;

use super::fit::{Fit, Groups};
use super::sparse_suspect;
use super::table::{Kinship, Table};
use crate::stats::{median, quantile, robust_sd};

/// What a suspicion or a finding covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Whole rows (axis 0) or columns (axis 1) by position; `node` when they are all of one.
    Lines { axis: usize, members: Vec<usize>, node: Option<u32> },
    /// Rows × columns.
    Block { rows: Vec<usize>, cols: Vec<usize> },
    /// All pairs whose CPUs share so much.
    Class(Kinship),
}

impl Shape {
    pub(crate) fn has(&self, table: &Table, row: usize, col: usize) -> bool {
        match self {
            Self::Lines { axis: 0, members, .. } => members.binary_search(&row).is_ok(),
            Self::Lines { members, .. } => members.binary_search(&col).is_ok(),
            Self::Block { rows, cols } => {
                rows.binary_search(&row).is_ok() && cols.binary_search(&col).is_ok()
            }
            Self::Class(kinship) => table.kinship(row, col) == *kinship,
        }
    }
}

/// A suspicion.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Suspect {
    pub(crate) shape: Shape,
    /// Logarithm of the time against the rest, from the blocks: positive is slow.
    pub(crate) effect: f64,
    /// Position of the size that shows it.
    pub(crate) size: usize,
}

/// Lines of an axis against the others of it.
#[derive(Debug, Clone)]
pub(crate) struct AxisLevels {
    /// Deviation of each line from the level of the healthy ones, nodes' effects removed; NaN
    /// without data.
    pub(crate) level: Vec<f64>,
    /// Standard error of a level from between visits.
    pub(crate) se: f64,
    /// Standard deviation of the healthy lines' true levels.
    pub(crate) spread: f64,
    /// What a line must exceed to be no healthy one.
    pub(crate) threshold: f64,
    /// Lines that the others are compared with.
    pub(crate) healthy: usize,
    /// The level of the healthy lines in the fit, which puts the middle of all lines at zero.
    pub(crate) center: f64,
    /// NUMA nodes that differ as a whole, with their effects.
    pub(crate) nodes: Vec<(u32, f64)>,
}

impl AxisLevels {
    /// What one line's distance from the level of the others adds to its spread.
    pub(crate) fn uncertain(&self) -> f64 {
        (1.0 + 1.0 / self.healthy as f64).sqrt()
    }
}

/// Share of a node's lines that must be on its side of the middle.
const NODE_SHARE: f64 = 0.85;

/// Fewer lines of a node are single CPUs.
pub(crate) const LEAST_NODE: usize = 3;

/// A healthy spread is not known from a few lines: so many lines of this spread are added to them.
const PRIOR_LINES: f64 = 6.0;
const PRIOR_SPREAD: f64 = 0.014;
/// Deviations beyond this are no healthy ones.
const WIDEST_HEALTHY: f64 = 0.045;

/// Standard deviations of the healthy spread that a line must leave: healthy ones stay within 2.3 of
/// what is observed of them, see `HEALTHY_RANGE` in the judging, and that is known from so many and
/// the prior ones.
fn spread_z(lines: usize) -> f64 {
    2.3 * (1.0 + 1.8 / (2.0 * (lines as f64 + PRIOR_LINES)).sqrt())
}

/// Standard deviation of healthy lines, from their deviations, of which `se` is measuring noise.
fn healthy_spread(deviations: &[f64], se: f64) -> f64 {
    let healthy = || deviations.iter().filter(|deviation| deviation.abs() < WIDEST_HEALTHY);
    let lines = healthy().count() as f64;
    let square: f64 = healthy().map(|deviation| deviation * deviation).sum();
    let own = (square - lines * se * se).max(0.0);
    ((own + PRIOR_LINES * PRIOR_SPREAD * PRIOR_SPREAD) / (lines + PRIOR_LINES)).sqrt()
}

/// The same of a fit; one of few visits knows the spread of its lines, which it drew together.
fn spread_of(fit: &Fit, axis: usize, deviations: &[f64], se: f64) -> f64 {
    let Some(sampled) = &fit.sampled else { return healthy_spread(deviations, se) };
    let lines = deviations.len() as f64;
    let own = lines * sampled.spread[axis].min(WIDEST_HEALTHY).powi(2);
    ((own + PRIOR_LINES * PRIOR_SPREAD * PRIOR_SPREAD) / (lines + PRIOR_LINES)).sqrt()
}

/// The levels of one axis.
pub(crate) fn axis_levels(table: &Table, fit: &Fit, axis: usize, min_effect: f64) -> AxisLevels {
    let [rows, cols] = table.shape();
    let blocks = fit.replicates;
    let is_pair = table.sweep.is_pair();
    let (mut level, se) = match (&fit.sampled, axis) {
        (Some(sampled), _) => {
            let levels = if axis == 0 { &fit.row } else { &fit.col };
            (levels.clone(), sampled.typical_variance(axis).sqrt())
        }
        (None, 0) => {
            let se = if is_pair {
                1.5 * fit.point_sd / (blocks * cols as f64).sqrt()
            } else {
                1.25 * fit.visit_sd / blocks.sqrt()
            };
            (fit.row.clone(), se)
        }
        (None, _) => (fit.col.clone(), 1.5 * fit.point_sd / (blocks * rows as f64).sqrt()),
    };
    let mut present = vec![false; level.len()];
    for at in &fit.which {
        let obs = &table.obs[*at as usize];
        present[usize::from(if axis == 0 { obs.row } else { obs.col })] |= obs.is_block();
    }
    for (level, present) in level.iter_mut().zip(&present) {
        if !present {
            *level = f64::NAN;
        }
    }
    let mut nodes = Vec::new();
    if axis == 0 || is_pair {
        nodes = node_effects(table, fit, axis, &mut level, se, min_effect);
    }
    let lines = level.iter().filter(|level| level.is_finite()).count();
    let mut threshold = min_effect;
    let mut spread = 0.0;
    let mut healthy = lines;
    let mut all_centers = 0.0;
    for _ in 0..4 {
        let mut rest: Vec<f64> = level
            .iter()
            .copied()
            .filter(|level| level.is_finite() && (healthy == lines || *level < threshold))
            .collect();
        if rest.is_empty() {
            break;
        }
        healthy = rest.len().min(lines.saturating_sub(1)).max(1);
        // Of two lines the faster one is the rest.
        let half = if lines <= 4 { 0.34 } else { 0.5 };
        let center = quantile(&mut rest, if lines == 2 { 0.0 } else { half });
        all_centers += center;
        level.iter_mut().for_each(|level| *level -= center);
        rest.iter_mut().for_each(|level| *level -= center);
        spread = spread_of(fit, axis, &rest, se);
        let uncertain = (1.0 + 1.0 / healthy as f64).sqrt();
        threshold = min_effect.max(spread_z(healthy) * spread * uncertain);
    }
    AxisLevels { level, center: all_centers, se, spread, threshold, healthy, nodes }
}

/// NUMA nodes whose lines differ from those of the other nodes as a whole; their effects are taken
/// out of the levels.
fn node_effects(
    table: &Table,
    fit: &Fit,
    axis: usize,
    level: &mut [f64],
    se: f64,
    min_effect: f64,
) -> Vec<(u32, f64)> {
    let mut nodes: Vec<(u32, Vec<usize>)> = table
        .nodes(axis)
        .into_iter()
        .map(|(node, mut members)| {
            members.retain(|&at| level[at].is_finite());
            (node, members)
        })
        .filter(|(_, members)| !members.is_empty())
        .collect();
    if nodes.len() < 2 {
        return Vec::new();
    }
    let median_of = |members: &[usize], level: &[f64]| {
        median(&mut members.iter().map(|&at| level[at]).collect::<Vec<f64>>())
    };
    let mut found = Vec::new();
    // The strongest first: it must not be part of what the others are compared with.
    while nodes.len() >= 2 {
        let mut best: Option<(usize, f64, f64)> = None;
        let all: Vec<usize> = nodes.iter().flat_map(|(_, members)| members.clone()).collect();
        let middle = median_of(&all, level);
        for (index, (_, members)) in nodes.iter().enumerate() {
            let others: Vec<usize> = nodes
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != index)
                .flat_map(|(_, (_, members))| members.iter().copied())
                .collect();
            let own = median_of(members, level);
            let center = median_of(&others, level);
            let effect = own - center;
            let deviations: Vec<f64> = others.iter().map(|&at| level[at] - center).collect();
            let spread = spread_of(fit, axis, &deviations, se);
            let cores = |members: &[usize]| {
                let ids = if axis == 0 { &table.row_cores } else { &table.col_cores };
                let named: BTreeSet<u32> = members.iter().filter_map(|&at| ids[at]).collect();
                if named.is_empty() { members.len() as f64 } else { named.len() as f64 }
            };
            let (own_cores, other_cores) = (cores(members), cores(&others));
            let uncertain = (1.0 / own_cores + 1.0 / other_cores).sqrt();
            let threshold =
                min_effect.max(spread_z(others.len()) * spread * uncertain) - 1.5 * se * uncertain;
            let beyond = members
                .iter()
                .filter(|&&at| (level[at] - center) * effect.signum() > effect.abs() / 2.0)
                .count();
            let share = beyond as f64 / members.len() as f64;
            let is_slower_of_two = nodes.len() > 2 || effect > 0.0;
            // A node that is as most lines are is not fast: others are slow.
            let is_apart = effect > 0.0 || own - middle < effect / 2.0;
            if members.len() >= LEAST_NODE
                && effect.abs() > threshold.max(0.6 * min_effect)
                && share >= NODE_SHARE
                && is_slower_of_two
                && is_apart
                && best.is_none_or(|(_, strongest, _)| effect.abs() > strongest.abs())
            {
                best = Some((index, effect, center));
            }
        }
        let Some((index, effect, _)) = best else { break };
        let (node, members) = nodes.remove(index);
        for at in members {
            level[at] -= effect;
        }
        found.push((node, effect));
    }
    found
}

/// What is left of each cell after rows, columns, classes and time: rows × columns, NaN without
/// data.
pub(crate) struct Residuals {
    pub(crate) values: Vec<f32>,
    pub(crate) cols: usize,
    /// Standard error of one.
    pub(crate) se: f64,
}

impl Residuals {
    pub(crate) fn at(&self, row: usize, col: usize) -> f64 {
        f64::from(self.values[row * self.cols + col])
    }
}

/// Fewest columns from which a visit's own level is known apart from its cells.
const OWN_LEVEL_COLS: usize = 4;

/// What the fit leaves of each of its points, for H2D with several devices less the level of the
/// visit.
pub(crate) fn rests(table: &Table, fit: &Fit) -> Vec<f32> {
    let [_, cols] = table.shape();
    let mut rests: Vec<f32> = fit
        .which
        .iter()
        .zip(&fit.time)
        .map(|(&at, &time)| {
            let obs = &table.obs[at as usize];
            let (row, col) = (usize::from(obs.row), usize::from(obs.col));
            let steps = fit.steps(col, obs.seq);
            let class = fit.class[table.kinship(row, col) as usize];
            #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
            let rest =
                (f64::from(obs.ln) - fit.mu - fit.row[row] - fit.col[col] - class - steps) as f32;
            rest - time
        })
        .collect();
    if !table.sweep.is_pair() && cols >= OWN_LEVEL_COLS {
        let visit = |at: usize| table.obs[fit.which[at] as usize].visit;
        let mut start = 0;
        for at in 1..=rests.len() {
            if at == rests.len() || visit(at) != visit(start) {
                let points = &mut rests[start..at];
                // A visit to a few cells only tells about these.
                if points.len() >= OWN_LEVEL_COLS && 2 * points.len() > cols {
                    let mut values: Vec<f64> = points.iter().map(|&rest| f64::from(rest)).collect();
                    #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
                    let level = median(&mut values) as f32;
                    points.iter_mut().for_each(|rest| *rest -= level);
                }
                start = at;
            }
        }
    }
    rests
}

pub(crate) fn residuals(table: &Table, fit: &Fit) -> Residuals {
    let [rows, cols] = table.shape();
    let rests = rests(table, fit);
    let cells = Groups::new(
        rows * cols,
        fit.which.iter().map(|&at| {
            let obs = &table.obs[at as usize];
            obs.is_block().then(|| usize::from(obs.row) * cols + usize::from(obs.col))
        }),
    );
    let mut deviations = Vec::new();
    let mut scratch = Vec::new();
    let mut values: Vec<f32> = (0..rows * cols)
        .map(|cell| {
            let members = cells.of(cell);
            if members.is_empty() {
                return f32::NAN;
            }
            scratch.clear();
            scratch.extend(members.iter().map(|&at| f64::from(rests[at as usize])));
            // A median is one of the values: deviations from it would be too small.
            let differences = scratch.windows(2).map(|pair| pair[1] - pair[0]);
            deviations.extend(differences.map(|difference| difference / std::f64::consts::SQRT_2));
            #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
            let center = median(&mut scratch) as f32;
            center
        })
        .collect();
    let blocks = fit.replicates;
    // Where few cells have more than one visit the cells themselves tell, if most of them are healthy.
    let mut present: Vec<f64> =
        values.iter().filter(|value| value.is_finite()).map(|&value| f64::from(value)).collect();
    let center = median(&mut present);
    #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
    values.iter_mut().for_each(|value| *value -= center as f32);
    let sd = if 4 * deviations.len() < present.len() {
        robust_sd(&present, center)
    } else {
        robust_sd(&deviations, 0.0)
    };
    let factor = if blocks > 2.0 { 1.25 } else { 1.0 };
    Residuals { values, cols, se: (factor * sd / blocks.sqrt()).max(1e-6) }
}

/// All suspicions of a table, by its fits of each size.
pub(crate) fn find(table: &Table, fits: &[Option<Fit>], min_effect: f64) -> Vec<Suspect> {
    let mut found: Vec<Suspect> = Vec::new();
    // The largest size first: its effect is the one that is reported. Of a sampled sweep the one that
    // was looked at most.
    let mut sizes: Vec<(usize, &Fit)> = fits
        .iter()
        .enumerate()
        .rev()
        .filter_map(|(size, fit)| Some((size, fit.as_ref()?)))
        .collect();
    if table.sampled {
        sizes.sort_by_key(|(_, fit)| std::cmp::Reverse(fit.which.len() - fit.confirming.len()));
    }
    for (size, fit) in sizes {
        let of_size = match fit.sampled {
            Some(_) => sparse_suspect::find(table, fit, min_effect),
            None => of_size(table, fit, min_effect),
        };
        for mut suspect in of_size {
            suspect.size = size;
            // What a line or class explains is no rectangle, unless this adds more than that is.
            let known = found.iter().any(|other| {
                let adds = matches!(suspect.shape, Shape::Block { .. })
                    && !matches!(other.shape, Shape::Block { .. })
                    && suspect.effect > other.effect.abs();
                !adds && overlap(table, &other.shape, &suspect.shape)
            });
            if !known {
                found.push(suspect);
            }
        }
    }
    found
}

/// True when both are about the same cells.
fn overlap(table: &Table, a: &Shape, b: &Shape) -> bool {
    match (a, b) {
        (Shape::Lines { axis, members, .. }, Shape::Lines { axis: other, members: others, .. }) => {
            axis == other && others.iter().all(|at| members.binary_search(at).is_ok())
        }
        (Shape::Class(a), Shape::Class(b)) => a == b,
        (a, Shape::Block { rows, cols }) => {
            let cells = rows.len() * cols.len();
            let inside = rows
                .iter()
                .flat_map(|&row| cols.iter().map(move |&col| (row, col)))
                .filter(|&(row, col)| a.has(table, row, col))
                .count();
            2 * inside > cells
        }
        _ => false,
    }
}

fn of_size(table: &Table, fit: &Fit, min_effect: f64) -> Vec<Suspect> {
    let [rows, cols] = table.shape();
    let mut found = Vec::new();
    let rest = residuals(table, fit);
    let levels = [0, 1].map(|axis| axis_levels(table, fit, axis, min_effect));
    let slow: [Vec<usize>; 2] = [0, 1].map(|axis| {
        let levels = &levels[axis];
        let least = (levels.threshold - levels.se).max(0.8 * levels.threshold);
        (0..levels.level.len()).filter(|&at| levels.level[at] > least).collect()
    });
    // Lines that are slow themselves, or because their node is.
    let is_odd: [Vec<bool>; 2] = [0, 1].map(|axis| {
        let mut is_odd = vec![false; [rows, cols][axis]];
        slow[axis].iter().for_each(|&at| is_odd[at] = true);
        let nodes = table.nodes(axis);
        for members in levels[axis].nodes.iter().filter_map(|(node, _)| nodes.get(node)) {
            members.iter().for_each(|&at| is_odd[at] = true);
        }
        is_odd
    });
    for axis in [0, 1] {
        if [rows, cols][axis] < 2 {
            continue;
        }
        let nodes = table.nodes(axis);
        for (node, effect) in &levels[axis].nodes {
            let members = nodes.get(node).cloned().unwrap_or_default();
            let shape = Shape::Lines { axis, members, node: Some(*node) };
            found.push(Suspect { shape, effect: *effect, size: 0 });
        }
        let partial = split_partial(
            axis,
            &slow[axis],
            &levels[axis],
            &rest,
            (&is_odd[1 - axis], table.sampled),
        );
        found.extend(partial);
    }
    let blocks = fit.replicates;
    for kinship in [Kinship::SameCpu, Kinship::Siblings] {
        let cells = count_class(table, kinship) as f64;
        let effect = fit.class[kinship as usize];
        let se = 1.25 * fit.point_sd / (cells * blocks).sqrt();
        if cells > 0.0 && effect > 0.7 * min_effect && effect > 3.0 * se {
            found.push(Suspect { shape: Shape::Class(kinship), effect, size: 0 });
        }
    }
    if has_rectangles(table) {
        let known: Vec<Shape> = found.iter().map(|suspect| suspect.shape.clone()).collect();
        found.extend(rectangles(table, rest, &known, min_effect));
    }
    found
}

/// True where cells can be told from their rows and columns: of two CPUs the other one alone would
/// say what a cell should be, and a device that changes with time would be a slow cell.
pub(crate) fn has_rectangles(table: &Table) -> bool {
    let [rows, cols] = table.shape();
    rows > 2 && cols > 1 && (cols > 2 || !table.sweep.is_pair())
}

pub(crate) fn count_class(table: &Table, kinship: Kinship) -> usize {
    let [rows, cols] = table.shape();
    if !table.sweep.is_pair() {
        return 0;
    }
    let mut cells = 0;
    for row in 0..rows {
        cells += (0..cols).filter(|&col| table.kinship(row, col) == kinship).count();
    }
    cells
}

/// Slow lines as they are, or the rectangles that they are only a part of.
fn split_partial(
    axis: usize,
    slow: &[usize],
    levels: &AxisLevels,
    rest: &Residuals,
    (is_odd, is_sampled): (&[bool], bool),
) -> Vec<Suspect> {
    let across = is_odd.len();
    let profile = |line: usize, at: usize| {
        let residual = if axis == 0 { rest.at(line, at) } else { rest.at(at, line) };
        levels.level[line] + residual
    };
    let mut found = Vec::new();
    let mut partial: Vec<(usize, Vec<usize>)> = Vec::new();
    for &line in slow {
        let level = levels.level[line];
        let whole = Suspect {
            shape: Shape::Lines { axis, members: vec![line], node: None },
            effect: level,
            size: 0,
        };
        // The line's own level is that of its slow part.
        let slow_part: Vec<usize> =
            (0..across).filter(|&at| profile(line, at) > 0.45 * level).collect();
        // Where another line is slow, too, the two costs need not be factors; of a full sweep those
        // cells are known well enough to count.
        let counts = |at: &usize| !(is_sampled && is_odd[*at]) && profile(line, *at).is_finite();
        let present = (0..across).filter(counts).count();
        let healthy = present - slow_part.iter().copied().filter(counts).count();
        let expected = present as f64 * normal_tail(0.55 * level / rest.se);
        let least_healthy = |present: usize| {
            let share = 0.06 * present as f64;
            if is_sampled { share.max(1.0) } else { share }
        };
        if across > 2
            // One visit may be slow, or fast, for another reason.
            && healthy as f64 > least_healthy(present) + 2.0 * expected + 3.0 * expected.sqrt()
        {
            partial.push((line, slow_part));
        } else {
            found.push(whole);
        }
    }
    while let Some((first, part)) = partial.pop() {
        let mut lines = vec![first];
        let mut votes: Vec<usize> = vec![0; across];
        part.iter().for_each(|&at| votes[at] += 1);
        partial.retain(|(line, other)| {
            let common = other.iter().filter(|at| part.binary_search(at).is_ok()).count();
            let joins = 10 * common >= 7 * part.len().max(other.len());
            if joins {
                lines.push(*line);
                other.iter().for_each(|&at| votes[at] += 1);
            }
            !joins
        });
        lines.sort_unstable();
        let members: Vec<usize> = (0..across).filter(|&at| 2 * votes[at] > lines.len()).collect();
        let effect = lines.iter().map(|&line| levels.level[line]).sum::<f64>() / lines.len() as f64;
        let shape = if axis == 0 {
            Shape::Block { rows: lines, cols: members }
        } else {
            Shape::Block { rows: members, cols: lines }
        };
        found.push(Suspect { shape, effect, size: 0 });
    }
    found
}

/// Share of a normal distribution above `z`.
pub(crate) fn normal_tail(z: f64) -> f64 {
    // Abramowitz and Stegun 26.2.17, absolute error below 1e-7.
    let x = z.abs();
    let t = 1.0 / (1.0 + 0.231_641_9 * x);
    let polynomial = t
        * (0.319_381_530
            + t * (-0.356_563_782
                + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let tail = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * polynomial;
    if z >= 0.0 { tail } else { 1.0 - tail }
}

/// Most rectangles and cells that a table's confirmation looks at.
const MOST_RECTANGLES: usize = 48;
/// What the evidence for a rectangle must be above that of the best of all its size.
const MARGIN: f64 = 7.0;
/// And those of a single cell, which is one of many.
const CELL_Z: f64 = 4.0;

/// Rectangles and single cells that are slower than their rows and columns.
fn rectangles(
    table: &Table,
    mut rest: Residuals,
    known: &[Shape],
    min_effect: f64,
) -> Vec<Suspect> {
    let [rows, cols] = table.shape();
    for shape in known {
        if let Shape::Block { rows, cols: block_cols } = shape {
            for &row in rows {
                for &col in block_cols {
                    rest.values[row * cols + col] = f32::NAN;
                }
            }
        }
    }
    let mut found = Vec::new();
    let least_cell = (0.8 * min_effect).max(CELL_Z * rest.se);
    while found.len() < MOST_RECTANGLES {
        let mut best: Option<(f64, Vec<usize>, Vec<usize>, f64)> = None;
        for axis in [1, 0] {
            for seed in seeds(&rest, [rows, cols], axis) {
                let Some((lines, across, effect)) =
                    grow(&rest, [rows, cols], axis, seed, min_effect)
                else {
                    continue;
                };
                let cells = (lines.len() * across.len()) as f64;
                let z = effect * cells.sqrt() / rest.se;
                let choices = ln_choose(rows, lines.len()) + ln_choose(cols, across.len());
                if z * z / 2.0 > choices + MARGIN && best.as_ref().is_none_or(|best| z > best.0) {
                    best = Some((z, lines, across, effect));
                }
            }
        }
        let Some((_, rows_in, cols_in, effect)) = best else { break };
        for &row in &rows_in {
            for &col in &cols_in {
                rest.values[row * cols + col] = f32::NAN;
            }
        }
        let shape = Shape::Block { rows: rows_in, cols: cols_in };
        found.push(Suspect { shape, effect, size: 0 });
    }
    merge(&mut found);
    let mut cells: Vec<(f64, usize)> = (0..rest.values.len())
        .filter(|&at| f64::from(rest.values[at]) > least_cell)
        .map(|at| (f64::from(rest.values[at]), at))
        .collect();
    cells.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    for (effect, at) in cells.into_iter().take(MOST_RECTANGLES) {
        let shape = Shape::Block { rows: vec![at / cols], cols: vec![at % cols] };
        found.push(Suspect { shape, effect, size: 0 });
    }
    found
}

/// Rectangles of one effect that share their columns or their rows are one.
fn merge(found: &mut Vec<Suspect>) {
    let mut at = 0;
    while at < found.len() {
        let other =
            (at + 1..found.len()).find(|&other| joined(&found[at], &found[other]).is_some());
        match other {
            Some(other) => {
                if let Some(joined) = joined(&found[at], &found[other]) {
                    found[at] = joined;
                }
                found.remove(other);
            }
            None => at += 1,
        }
    }
}

fn joined(a: &Suspect, b: &Suspect) -> Option<Suspect> {
    let (Shape::Block { rows, cols }, Shape::Block { rows: b_rows, cols: b_cols }) =
        (&a.shape, &b.shape)
    else {
        return None;
    };
    let alike = (a.effect - b.effect).abs() < 0.25 * a.effect.max(b.effect);
    let union = |a: &[usize], b: &[usize]| -> Vec<usize> {
        a.iter().chain(b).copied().collect::<BTreeSet<usize>>().into_iter().collect()
    };
    let shape = if cols == b_cols {
        Shape::Block { rows: union(rows, b_rows), cols: cols.clone() }
    } else if rows == b_rows {
        Shape::Block { rows: rows.clone(), cols: union(cols, b_cols) }
    } else {
        return None;
    };
    let (own, other) = ((rows.len() * cols.len()) as f64, (b_rows.len() * b_cols.len()) as f64);
    let effect = (a.effect * own + b.effect * other) / (own + other);
    alike.then_some(Suspect { shape, effect, size: a.size })
}

/// Logarithm of the number of ways to choose `few` of `all`.
fn ln_choose(all: usize, few: usize) -> f64 {
    (0..few.min(all)).map(|at| ((all - at) as f64 / (at + 1) as f64).ln()).sum()
}

/// Lines of `axis` that have too many slow cells for chance, the most suspicious first.
fn seeds(rest: &Residuals, shape: [usize; 2], axis: usize) -> Vec<usize> {
    let (lines, across) = (shape[axis], shape[1 - axis]);
    let get = |line: usize, at: usize| {
        if axis == 0 { rest.at(line, at) } else { rest.at(at, line) }
    };
    let mut scored: Vec<(f64, usize)> = (0..lines)
        .filter_map(|line| {
            let present = (0..across).filter(|&at| get(line, at).is_finite()).count() as f64;
            let slow = (0..across).filter(|&at| get(line, at) > 2.0 * rest.se).count() as f64;
            let strong = (0..across).filter(|&at| get(line, at) > 4.0 * rest.se).count();
            // Tails are heavier than a normal's: 4 % above two deviations is nothing.
            let expected = 0.04 * present;
            let z = (slow - expected) / (expected + 1.0).sqrt();
            (z > 0.5 || strong >= 2).then_some((z, line))
        })
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    scored.truncate(12);
    scored.into_iter().map(|(_, line)| line).collect()
}

/// The rectangle around a seed line of `axis`: rows, columns, mean effect.
fn grow(
    rest: &Residuals,
    shape: [usize; 2],
    axis: usize,
    seed: usize,
    min_effect: f64,
) -> Option<(Vec<usize>, Vec<usize>, f64)> {
    let mean = |rows: &[usize], cols: &[usize]| {
        let mut sum = 0.0;
        let mut count = 0_usize;
        for &row in rows {
            for &col in cols {
                let value = rest.at(row, col);
                if value.is_finite() {
                    // One dip must not carry a whole line.
                    sum += value.min(12.0 * rest.se + 0.3);
                    count += 1;
                }
            }
        }
        if count == 0 { (f64::NEG_INFINITY, 0) } else { (sum / count as f64, count) }
    };
    let all = |axis: usize| (0..shape[axis]).collect::<Vec<usize>>();
    let line_mean = |axis: usize, line: usize, across: &[usize]| {
        if axis == 0 { mean(&[line], across) } else { mean(across, &[line]) }
    };
    let first = (0.8 * min_effect).max(1.2 * rest.se);
    let mut across: Vec<usize> = all(1 - axis)
        .into_iter()
        .filter(|&at| line_mean(1 - axis, at, &[seed]).0 > first)
        .collect();
    let mut lines = vec![seed];
    for round in 0..6 {
        if across.is_empty() {
            return None;
        }
        let chosen: Vec<(usize, f64, usize)> = all(axis)
            .into_iter()
            .map(|line| {
                let (mean, count) = line_mean(axis, line, &across);
                (line, mean, count)
            })
            .collect();
        let effect = {
            let (effect, _) = if axis == 0 { mean(&lines, &across) } else { mean(&across, &lines) };
            effect
        };
        // First of all lines that share anything with the seed, then by what is more likely.
        lines = chosen
            .into_iter()
            .filter(|&(line, mean, count)| {
                let se = rest.se / (count.max(1) as f64).sqrt();
                let limit = if round == 0 {
                    (4.0 * se).max(0.4 * min_effect)
                } else {
                    likely(effect, se, shape[axis])
                };
                line == seed && round == 0 || mean > limit
            })
            .map(|(line, _, _)| line)
            .collect();
        if lines.is_empty() {
            return None;
        }
        let effect = if axis == 0 { mean(&lines, &across) } else { mean(&across, &lines) }.0;
        let next: Vec<usize> = all(1 - axis)
            .into_iter()
            .filter(|&at| {
                let (mean, count) = line_mean(1 - axis, at, &lines);
                let se = rest.se / (count.max(1) as f64).sqrt();
                mean > likely(effect, se, shape[1 - axis])
            })
            .collect();
        let settled = next == across;
        across = next;
        if settled && round > 0 {
            break;
        }
    }
    if across.is_empty() {
        return None;
    }
    let (rows, cols) = if axis == 0 { (lines, across) } else { (across, lines) };
    // A rectangle is narrower than both axes; a single cell is not one.
    if rows.len() == shape[0] || cols.len() == shape[1] || rows.len() * cols.len() < 2 {
        return None;
    }
    let (effect, _) = mean(&rows, &cols);
    (effect > 0.8 * min_effect).then_some((rows, cols, effect))
}

/// Where a mean of this standard error is more likely a member's (`effect`) than none (0), when
/// members are few among so many.
fn likely(effect: f64, se: f64, lines: usize) -> f64 {
    if effect <= 0.0 {
        return f64::INFINITY;
    }
    effect / 2.0 + se * se / effect * (lines as f64 / 4.0).max(1.0).ln()
}
