//! The visits that confirm or refute suspicions: which cells, and what they say.

use std::collections::BTreeSet;

use super::fit::Fit;
use super::suspect::{AxisLevels, Shape, Suspect};
use super::table::{Kinship, Obs, Table};
use crate::schedule::{Cell, Random};
use crate::stats::{median, robust_sd};

/// Fresh visits of every suspect.
pub(crate) const ROUNDS: usize = 6;
/// Visits of which must show the effect.
pub(crate) const ROUNDS_SEEN: usize = 5;

/// Fewest lines that suspects are compared with, where there are as many.
const LEAST_CONTROLS: usize = 6;
/// First transfers that take so much longer than the timed ones had not settled, share of the time.
const STILL_FALLS: f64 = 0.1;
/// Smaller changes of the rest's time are none, logarithm.
const LEAST_CHANGE: f64 = 0.01;

/// How many cells stand for what is confirmed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Cells that stand for a whole line in one round.
    across: usize,
    /// Rows and columns of a rectangle and CPUs of a class, in one round.
    part: usize,
    /// Members of a node.
    node: usize,
    /// Suspected lines of one axis that are visited; others that are like them are judged with them.
    lines: usize,
    /// More lines to compare with are no use.
    controls: usize,
}

impl Effort {
    /// That of a full sweep.
    pub(crate) const FULL: Self = Self { across: 4, part: 4, node: 4, lines: 48, controls: 24 };

    /// Of a sample: from the most to the least that still tells.
    pub(crate) const ALL: [Self; 4] = [
        // The rows and columns of a sample are not known well: more of them stand for a node.
        Self { across: 4, part: 4, node: 12, lines: 48, controls: 24 },
        Self { across: 3, part: 4, node: 12, lines: 32, controls: 12 },
        Self { across: 2, part: 3, node: 8, lines: 24, controls: 8 },
        Self { across: 2, part: 2, node: 8, lines: 12, controls: 6 },
    ];
}

/// The cells of each round, row-major, for suspects of a table.
pub(crate) fn rounds(
    table: &Table,
    suspects: &[Suspect],
    effort: Effort,
    usable: &dyn Fn(usize, usize) -> bool,
    random: &mut Random,
) -> Vec<Vec<Cell>> {
    let part = effort.part;
    if suspects.is_empty() {
        return Vec::new();
    }
    let shape = table.shape();
    let lines: [Vec<Vec<usize>>; 2] = [0, 1].map(|axis| tested_lines(suspects, axis, effort.lines));
    let suspected: [BTreeSet<usize>; 2] = [0, 1].map(|axis| all_lines(suspects, axis));
    let controls: [Vec<usize>; 2] = [0, 1].map(|axis| {
        let mut free: Vec<usize> =
            (0..shape[axis]).filter(|at| !suspected[axis].contains(at)).collect();
        random.shuffle(&mut free);
        let tested: usize = lines[axis].iter().map(|group| group.len().min(part)).sum();
        free.truncate(tested.clamp(LEAST_CONTROLS, effort.controls));
        free
    });
    (0..ROUNDS)
        .map(|_| {
            let mut cells = BTreeSet::new();
            for axis in [0, 1] {
                if lines[axis].is_empty() {
                    continue;
                }
                let mut across: Vec<usize> =
                    (0..shape[1 - axis]).filter(|at| !suspected[1 - axis].contains(at)).collect();
                if across.is_empty() {
                    across = (0..shape[1 - axis]).collect();
                }
                random.shuffle(&mut across);
                across.truncate(effort.across);
                let mut chosen = controls[axis].clone();
                for group in &lines[axis] {
                    let mut group = group.clone();
                    random.shuffle(&mut group);
                    group.truncate(effort.node);
                    chosen.extend(group);
                }
                for line in chosen {
                    for &at in &across {
                        cells.insert(if axis == 0 { (line, at) } else { (at, line) });
                    }
                }
            }
            for suspect in suspects {
                match &suspect.shape {
                    Shape::Block { rows, cols } => {
                        block_cells(&mut cells, shape, &suspected, (rows, cols), part, random);
                    }
                    Shape::Class(kinship) => class_cells(&mut cells, table, *kinship, part, random),
                    Shape::Lines { .. } => {}
                }
            }
            cells
                .into_iter()
                .filter(|&(row, col)| usable(row, col))
                .map(|(row, column)| Cell { row, column })
                .collect()
        })
        .collect()
}

/// Groups of suspected lines of an axis: each line alone, nodes together.
fn tested_lines(suspects: &[Suspect], axis: usize, most: usize) -> Vec<Vec<usize>> {
    let mut single: Vec<(f64, Vec<usize>)> = Vec::new();
    let mut groups = Vec::new();
    for suspect in suspects {
        if let Shape::Lines { axis: own, members, node } = &suspect.shape
            && *own == axis
        {
            if node.is_some() {
                groups.push(members.clone());
            } else {
                single.push((suspect.effect, members.clone()));
            }
        }
    }
    single.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    groups.extend(single.into_iter().take(most).map(|(_, members)| members));
    groups
}

fn all_lines(suspects: &[Suspect], axis: usize) -> BTreeSet<usize> {
    suspects
        .iter()
        .filter_map(|suspect| match &suspect.shape {
            Shape::Lines { axis: own, members, .. } if *own == axis => Some(members),
            _ => None,
        })
        .flatten()
        .copied()
        .collect()
}

/// Some cells of a rectangle, and as many of its rows and columns outside of it.
fn block_cells(
    cells: &mut BTreeSet<(usize, usize)>,
    shape: [usize; 2],
    suspected: &[BTreeSet<usize>; 2],
    (rows, cols): (&[usize], &[usize]),
    part: usize,
    random: &mut Random,
) {
    let mut pick = |members: &[usize], most: usize| {
        let mut members = members.to_vec();
        random.shuffle(&mut members);
        members.truncate(most);
        members
    };
    let inside = [pick(rows, part), pick(cols, part)];
    let outside: [Vec<usize>; 2] = [(0, rows), (1, cols)].map(|(axis, members)| {
        let free: Vec<usize> = (0..shape[axis])
            .filter(|at| members.binary_search(at).is_err() && !suspected[axis].contains(at))
            .collect();
        pick(&free, LEAST_CONTROLS)
    });
    for &row in &inside[0] {
        cells.extend(inside[1].iter().chain(&outside[1]).map(|&col| (row, col)));
    }
    for &row in &outside[0] {
        cells.extend(inside[1].iter().map(|&col| (row, col)));
    }
}

/// All pairs of a few CPUs that share what the class shares.
fn class_cells(
    cells: &mut BTreeSet<(usize, usize)>,
    table: &Table,
    kinship: Kinship,
    part: usize,
    random: &mut Random,
) {
    let [rows, cols] = table.shape();
    let mut members: Vec<(usize, usize)> = (0..rows)
        .flat_map(|row| (0..cols).map(move |col| (row, col)))
        .filter(|&(row, col)| table.kinship(row, col) == kinship)
        .collect();
    random.shuffle(&mut members);
    members.truncate(part);
    for &(row, _) in &members {
        cells.extend(members.iter().map(|&(_, col)| (row, col)));
    }
    // A class that has one member here still needs something to be compared with.
    for &(row, col) in members.iter().take(2) {
        for step in 1..=LEAST_CONTROLS {
            cells.insert((row, (col + step) % cols));
            cells.insert(((row + step) % rows, col));
        }
    }
}

/// What the confirming visits say about a shape at one size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Estimate {
    /// Logarithm of the members' time against the rest.
    pub(crate) effect: f64,
    /// Its standard error, from between visits and between the lines of the rest.
    pub(crate) se: f64,
    /// From between visits alone: what a test of "no difference" needs.
    pub(crate) noise: f64,
    pub(crate) seen: usize,
    pub(crate) of: usize,
    /// Typical time of the rest while this was confirmed, nanoseconds.
    pub(crate) rest_ns: f64,
    /// Typical time of the rest as the run began, before time changed anything, nanoseconds.
    pub(crate) nominal_ns: f64,
    /// Most of the members' points had not settled although others had: no ground of a finding.
    pub(crate) unsettled: bool,
}

/// Everything about one size that judging needs.
#[derive(Debug)]
pub(crate) struct SizeView<'a> {
    pub(crate) table: &'a Table,
    pub(crate) fit: &'a Fit,
    /// Of its rows and columns.
    pub(crate) levels: &'a [AxisLevels; 2],
    /// All suspects: none of them is a control.
    pub(crate) suspects: &'a [Suspect],
    /// See [`rest_times`].
    pub(crate) rest_times: (f64, f64),
}

/// Times of the rest while suspects were confirmed, and as the run began, before time changed
/// anything.
pub(crate) fn rest_times(table: &Table, fit: &Fit) -> (f64, f64) {
    let mut confirming = Vec::new();
    let mut first = Vec::new();
    // A stretch of a few points at the start is a disturbance.
    let least = (fit.which.len() / 25).max(2);
    let until =
        fit.cuts.iter().copied().find(|&cut| {
            fit.which.partition_point(|&at| table.obs[at as usize].seq < cut) >= least
        });
    for (&at, &time) in fit.which.iter().zip(&fit.time) {
        let obs = &table.obs[at as usize];
        if obs.is_confirm() {
            confirming.push(f64::from(time));
        }
        if until.is_none_or(|until| obs.seq < until) {
            first.push(f64::from(time));
        }
    }
    // What drifts is extrapolated from the thirds of the stretch to its beginning.
    let third = first.len() / 3;
    let start = if third >= 4 {
        let [early, late] =
            [&first[..third], &first[first.len() - third..]].map(|part| median(&mut part.to_vec()));
        early - (late - early) / 4.0
    } else {
        median(&mut first)
    };
    let now = if confirming.is_empty() { start } else { median(&mut confirming) };
    // A per cent is noise of the fit.
    let start = if (now - start).abs() < LEAST_CHANGE { now } else { start };
    ((fit.mu + now).exp(), (fit.mu + start).exp())
}

/// One confirming point with what is known about its place.
#[derive(Debug, Clone, Copy)]
struct Point {
    row: usize,
    col: usize,
    round: usize,
    visit: u32,
    /// ln t − μ − column − class − steps: still with row and time.
    level: f64,
    time: f64,
}

impl SizeView<'_> {
    fn points(&self, wanted: impl Fn(&Obs) -> Option<usize>) -> Vec<Point> {
        let (table, fit) = (self.table, self.fit);
        fit.confirming
            .iter()
            .filter_map(|&place| {
                let time = fit.time[place as usize];
                let obs = &table.obs[fit.which[place as usize] as usize];
                let round = wanted(obs)?;
                let (row, col) = (usize::from(obs.row), usize::from(obs.col));
                let steps = fit.steps(col, obs.seq);
                let class = fit.class[table.kinship(row, col) as usize];
                Some(Point {
                    row,
                    col,
                    round,
                    visit: obs.visit,
                    level: f64::from(obs.ln) - fit.mu - fit.col[col] - class - steps,
                    time: f64::from(time),
                })
            })
            .collect()
    }

    fn is_suspect(&self, except: &Shape, row: usize, col: usize) -> bool {
        // A node that a line is looked at for does not exclude it.
        let is_of = |other: &Shape| match (other, except) {
            (
                Shape::Lines { axis, members, node: Some(_) },
                Shape::Lines { axis: own, members: lines, node: None },
            ) => axis == own && lines.iter().all(|line| members.binary_search(line).is_ok()),
            _ => other == except,
        };
        self.suspects
            .iter()
            .any(|other| !is_of(&other.shape) && other.shape.has(self.table, row, col))
    }

    /// The confirming points that count for a shape, and whether its own had not settled although
    /// others had. Where nothing settles, because the whole machine became slower, all points are as
    /// good as each other.
    fn confirming(&self, shape: &Shape) -> (Vec<Point>, bool) {
        let first = self.table.first_round;
        let has = |obs: &Obs| shape.has(self.table, usize::from(obs.row), usize::from(obs.col));
        // Of these points those inside or outside, and how many of them had not settled.
        let unsettled = |points: &mut dyn Iterator<Item = &Obs>, inside: bool| {
            let (mut all, mut unsettled) = (0_usize, 0);
            for obs in points.filter(|obs| has(obs) == inside) {
                all += 1;
                unsettled += usize::from(!obs.settled);
            }
            2 * unsettled > all
        };
        let at = |place: &u32| &self.table.obs[self.fit.which[*place as usize] as usize];
        let confirming = || self.fit.confirming.iter().map(at);
        let members = unsettled(&mut confirming(), true);
        let others = unsettled(&mut confirming(), false);
        let points = self.points(|obs| {
            (obs.is_confirm() && (members || others || obs.settled))
                .then(|| usize::from(obs.block.saturating_sub(first)))
        });
        let mut blocks = self
            .fit
            .which
            .iter()
            .map(|&at| &self.table.obs[at as usize])
            .filter(|obs| obs.is_block());
        // Slow from the first transfer on is slow, not unsettled.
        let mut leads: Vec<f64> = confirming()
            .filter(|obs| has(obs))
            .map(|obs| f64::from(obs.lead_ns) / f64::from(obs.ln).exp())
            .collect();
        let still_falls = !leads.is_empty() && median(&mut leads) > STILL_FALLS;
        (points, members && !others && still_falls && unsettled(&mut blocks, true))
    }

    /// The estimate for a shape; `None` when its cells or controls were not confirmed at this size.
    pub(crate) fn estimate(&self, shape: &Shape) -> Option<Estimate> {
        let (points, unsettled) = self.confirming(shape);
        Some(Estimate { unsettled, ..self.estimate_of(shape, &points)? })
    }

    /// Takes rows and columns out of a rectangle that show less than half of its effect in the
    /// confirming visits.
    pub(crate) fn prune(&self, shape: &mut Shape) {
        let Some(effect) = self.estimate(shape).map(|estimate| estimate.effect) else { return };
        let (points, _) = self.confirming(shape);
        let [all_rows, all_cols] = self.table.shape();
        let whole = shape.clone();
        let mut rest: Vec<f64> = points
            .iter()
            .filter(|point| {
                !whole.has(self.table, point.row, point.col)
                    && !self.is_suspect(&whole, point.row, point.col)
            })
            .map(|point| point.level - point.time - self.fit.row[point.row])
            .collect();
        let offset = if rest.is_empty() { 0.0 } else { median(&mut rest) };
        let Shape::Block { rows, cols } = shape else { return };
        let kept = |axis: usize, members: &[usize]| -> Vec<usize> {
            let own = |point: &Point| if axis == 0 { point.row } else { point.col };
            let keeps = |&member: &usize| {
                let mut levels: Vec<f64> = points
                    .iter()
                    .filter(|point| {
                        own(point) == member && whole.has(self.table, point.row, point.col)
                    })
                    .map(|point| point.level - point.time - self.fit.row[point.row] - offset)
                    .collect();
                levels.len() < 4 || median(&mut levels) > 0.4 * effect
            };
            members.iter().copied().filter(keeps).collect()
        };
        let (new_rows, new_cols) = (kept(0, rows), kept(1, cols));
        let is_whole_axis = new_rows.len() == all_rows || new_cols.len() == all_cols;
        if !new_rows.is_empty() && !new_cols.is_empty() && !is_whole_axis {
            (*rows, *cols) = (new_rows, new_cols);
        }
    }

    fn estimate_of(&self, shape: &Shape, points: &[Point]) -> Option<Estimate> {
        let (table, fit) = (self.table, self.fit);
        let is_pair = table.sweep.is_pair();
        let inside = |point: &Point| shape.has(table, point.row, point.col);
        // The member's own effect stays in its level.
        let own = |point: &Point| match shape {
            Shape::Lines { axis: 1, .. } if inside(point) => {
                fit.col[point.col] - self.levels[1].center
            }
            Shape::Class(kinship) if inside(point) => fit.class[*kinship as usize],
            _ => 0.0,
        };
        let by_visit = !is_pair && !matches!(shape, Shape::Lines { axis: 0, .. });
        let row_level = |point: &Point| match shape {
            Shape::Lines { axis: 0, .. } if inside(point) => 0.0,
            _ => fit.row[point.row] - self.levels[0].center,
        };
        let mut members: Vec<(usize, f64)> = Vec::new();
        let mut controls: Vec<f64> = Vec::new();
        let mut units = 0_usize;
        let mut control_lines = BTreeSet::new();
        // Whether each visit to a member told its own level.
        let mut has_level = true;
        for visit in points.chunk_by(|a, b| a.visit == b.visit) {
            // A rectangle is judged by all its cells; a line without the rectangles in it.
            let usable: Vec<&Point> = visit
                .iter()
                .filter(|point| {
                    let is_block = matches!(shape, Shape::Block { .. });
                    is_block && inside(point) || !self.is_suspect(shape, point.row, point.col)
                })
                .collect();
            let others: Vec<f64> = usable
                .iter()
                .filter(|point| !inside(point))
                .map(|point| point.level - point.time - row_level(point))
                .collect();
            for point in usable.iter().filter(|point| !inside(point)) {
                control_lines.insert(match shape {
                    Shape::Lines { axis: 0, .. } => point.row,
                    _ => point.col,
                });
            }
            // Points of one visit share its level, which cancels against the others of it.
            let level =
                if by_visit && others.len() >= 3 { median(&mut others.clone()) } else { 0.0 };
            has_level &=
                !by_visit || others.len() >= 3 || !usable.iter().any(|point| inside(point));
            if by_visit {
                controls.extend(others.iter().map(|value| value - level));
                for point in usable.iter().filter(|point| inside(point)) {
                    let value = point.level - point.time - row_level(point) - level + own(point);
                    members.push((point.round, value));
                    units += 1;
                }
            } else if is_pair {
                controls.extend(&others);
                for point in usable.iter().filter(|point| inside(point)) {
                    members.push((
                        point.round,
                        point.level - point.time - row_level(point) + own(point),
                    ));
                    units += 1;
                }
            } else {
                // A whole visit of a core is one observation.
                let values: Vec<f64> = usable
                    .iter()
                    .filter(|point| inside(point))
                    .map(|point| point.level - point.time)
                    .collect();
                if !values.is_empty() {
                    members.push((visit[0].round, median(&mut values.clone())));
                    units += 1;
                }
                if !others.is_empty() {
                    controls.push(median(&mut others.clone()));
                }
            }
        }
        if members.is_empty() || controls.len() < 2 {
            return None;
        }
        let offset = median(&mut controls.clone());
        let sd = robust_sd(&controls, offset);
        let per_round: Vec<f64> = (0..ROUNDS)
            .filter_map(|round| {
                let mut values: Vec<f64> = members
                    .iter()
                    .filter(|(own, _)| *own == round)
                    .map(|(_, value)| value - offset)
                    .collect();
                (!values.is_empty()).then(|| median(&mut values))
            })
            .collect();
        self.combine(
            shape,
            per_round,
            (sd, units, controls.len()),
            (control_lines.len(), has_level),
        )
    }

    fn combine(
        &self,
        shape: &Shape,
        mut rounds: Vec<f64>,
        (sd, units, controls): (f64, usize, usize),
        (lines, has_level): (usize, bool),
    ) -> Option<Estimate> {
        let (table, fit) = (self.table, self.fit);
        let of = rounds.len();
        rounds.sort_by(f64::total_cmp);
        // The extremes of five or more may be disturbances.
        let kept = if of >= 5 { &rounds[1..of - 1] } else { &rounds[..] };
        if kept.is_empty() {
            return None;
        }
        let effect = kept.iter().sum::<f64>() / kept.len() as f64;
        let sign = effect.signum();
        let seen = rounds.iter().filter(|&&round| round * sign > effect.abs() / 2.0).count();
        let own_sd = if of >= 3 {
            let mean = rounds.iter().sum::<f64>() / of as f64;
            let square: f64 = kept.iter().map(|round| (round - mean).powi(2)).sum();
            (square / (kept.len().max(2) - 1) as f64).sqrt()
        } else {
            0.0
        };
        let per_round = (units as f64 / of as f64).max(1.0);
        let pooled = 1.25 * sd / (1.0_f64).max(per_round).sqrt();
        // The suspect's own scatter is known from four values only; the controls' from many.
        let round_sd = if controls >= 12 { pooled.max(0.7 * own_sd) } else { pooled.max(own_sd) };
        let noise = (round_sd.powi(2) / (0.93 * of as f64) + (1.25 * sd).powi(2) / controls as f64)
            .sqrt()
            .max(1e-6);
        let noise = match shape {
            Shape::Lines { axis: 1, members, .. } => {
                let steps = members.iter().map(|&col| fit.steps_se(col)).fold(0.0, f64::max);
                noise.hypot(steps)
            }
            _ => noise,
        };
        let blocks = fit.replicates;
        let [all_rows, all_cols] = table.shape();
        // Levels of rows and columns come from the blocks and have errors of their own.
        let level_variance = |axis: usize, across: usize| match &fit.sampled {
            Some(sampled) => sampled.typical_variance(axis),
            None => (1.5 * fit.point_sd).powi(2) / (blocks * across as f64),
        };
        let (row_variance, col_variance) =
            (level_variance(0, all_cols), level_variance(1, all_rows));
        let lines = lines.max(1) as f64;
        let variance = match shape {
            Shape::Lines { axis, members, node } => {
                let levels = &self.levels[usize::from(*axis == 1)];
                let mut variance =
                    levels.spread.powi(2) / levels.healthy as f64 + levels.se.powi(2) / lines;
                if node.is_some() {
                    variance += levels.spread.powi(2) / members.len() as f64;
                }
                if *axis == 1 {
                    variance += col_variance / lines;
                }
                variance
            }
            Shape::Block { rows, cols } => {
                let of_rows = if table.sweep.is_pair() {
                    row_variance * (1.0 / rows.len() as f64)
                } else if has_level {
                    0.0
                } else {
                    (1.25 * fit.visit_sd).powi(2) / (blocks * rows.len() as f64)
                };
                col_variance * (1.0 / cols.len() as f64 + 1.0 / lines) + of_rows
            }
            Shape::Class(_) => fit.point_sd.powi(2) / fit.which.len() as f64,
        };
        let rest = variance.sqrt();
        let (rest_ns, nominal_ns) = self.rest_times;
        Some(Estimate {
            effect,
            se: noise.hypot(rest),
            noise,
            seen,
            of,
            rest_ns,
            nominal_ns,
            unsettled: false,
        })
    }
}
