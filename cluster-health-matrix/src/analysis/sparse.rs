//! The model of a sampled sweep: a level, NUMA nodes, rows, columns and what CPUs share, fitted to the
//! few cells of a size that were visited.
//!
//! ln t = μ + node(row) + row + node(column) + column + class + time(seq) + rest. Rows and columns are
//! drawn towards their node as far as their number of visits says (best linear unbiased predictors);
//! the variances come from products of rests that share a row, or a column, which visits that share
//! neither do not bias. Lines that are far out are left where they are.

use super::finding::{Finding, Kind};
use super::fit::{Fit, Mask, smooth};
use super::suspect::{Shape, Suspect};
use super::table::{Kinship, Table};
use crate::matrix::Prediction;
use crate::schedule::Cell;
use crate::stats::{median, quantile, robust_sd};

/// What a fit of few visited cells knows about its lines, rows (0) and columns (1).
#[derive(Debug, Clone)]
pub(crate) struct Sampled {
    /// Visits of each line.
    pub(crate) seen: [Vec<u32>; 2],
    /// Levels of the lines by their own visits alone, comparable with those of the fit.
    pub(crate) raw: [Vec<f64>; 2],
    /// What the fit gave each line beyond its node.
    pub(crate) own: [Vec<f64>; 2],
    /// Lines of which some visits are slow and others are not: something else crosses them.
    pub(crate) is_partial: [Vec<bool>; 2],
    /// Standard deviation of the lines about their node.
    pub(crate) spread: [f64; 2],
    /// Of one visit about the model.
    pub(crate) sd: f64,
}

impl Sampled {
    /// Variance of a line's level in the fit.
    pub(crate) fn variance(&self, axis: usize, line: usize) -> f64 {
        let spread = self.spread[axis].powi(2);
        let own = self.sd.powi(2) / f64::from(self.seen[axis][line].max(1));
        if self.seen[axis][line] == 0 { spread } else { spread * own / (spread + own).max(1e-12) }
    }

    /// The same of a typical line.
    pub(crate) fn typical_variance(&self, axis: usize) -> f64 {
        let mut all: Vec<f64> =
            (0..self.seen[axis].len()).map(|line| self.variance(axis, line)).collect();
        let typical = median(&mut all);
        if typical.is_finite() { typical } else { 0.0 }
    }

    /// Standard error of a typical line's own visits; infinite where a line has none.
    pub(crate) fn typical_error(&self, axis: usize) -> f64 {
        let error =
            |&seen: &u32| if seen == 0 { f64::INFINITY } else { self.sd / f64::from(seen).sqrt() };
        median(&mut self.seen[axis].iter().map(error).collect::<Vec<f64>>())
    }

    /// Standard error of a line's own visits.
    pub(crate) fn error(&self, axis: usize, line: usize) -> f64 {
        self.sd / f64::from(self.seen[axis][line].max(1)).sqrt()
    }
}

/// Above this share of visited cells a size is fitted like one of a full sweep.
const DENSE: f64 = 0.6;

/// Visits per cell of a size, where it has any, and the share of cells that have.
pub(crate) fn coverage(table: &Table, size: usize) -> (f64, f64) {
    let [rows, cols] = table.shape();
    let mut cells: Vec<u32> = table
        .obs
        .iter()
        .filter(|obs| usize::from(obs.size) == size && obs.is_block())
        .map(|obs| {
            u32::from(obs.row) * u32::try_from(cols).unwrap_or(u32::MAX) + u32::from(obs.col)
        })
        .collect();
    let visits = cells.len();
    cells.sort_unstable();
    cells.dedup();
    let share = cells.len() as f64 / (rows * cols) as f64;
    (visits as f64 / cells.len().max(1) as f64, share)
}

/// True when few cells of a size were visited.
pub(crate) fn is_sparse(table: &Table, size: usize) -> bool {
    coverage(table, size).1 < DENSE
}

/// Rests beyond so many standard deviations count as that many.
const CLIP: f64 = 3.5;
const ROUNDS: usize = 10;
/// And a line nearer than this to the others is none that is far out.
const LEAST_OUT: f64 = 0.02;
/// Fewest visits that give a node a level of its own.
const LEAST_OF_NODE: usize = 8;

/// A visit that the fit rests on.
#[derive(Debug, Clone, Copy)]
struct Visit {
    /// Place among the points of the size.
    place: usize,
    lines: [usize; 2],
    class: Kinship,
    ln: f64,
    /// Chosen by chance, not for what it would decide.
    by_chance: bool,
}

/// Fits the visited cells of one size; `with_confirming` also by the confirming visits, which judging
/// must not look at, but predictions should.
pub(crate) fn fit(
    table: &Table,
    size: usize,
    mask: Option<Mask<'_>>,
    with_confirming: bool,
) -> Option<Fit> {
    let shape = table.shape();
    let which: Vec<u32> = (0_u32..)
        .zip(&table.obs)
        .filter(|(_, obs)| usize::from(obs.size) == size)
        .map(|(at, _)| at)
        .collect();
    let obs = |place: usize| &table.obs[which[place] as usize];
    let is_masked = |row, col| mask.is_some_and(|mask| mask(row, col));
    let visits: Vec<Visit> = (0..which.len())
        .filter_map(|place| {
            let obs = obs(place);
            let lines = [usize::from(obs.row), usize::from(obs.col)];
            let counts = obs.is_block() || with_confirming && obs.is_confirm();
            (counts && !is_masked(lines[0], lines[1])).then(|| Visit {
                place,
                lines,
                class: table.kinship(lines[0], lines[1]),
                ln: f64::from(obs.ln),
                by_chance: obs.is_block() && obs.block == 0,
            })
        })
        .collect();
    if visits.is_empty() {
        return None;
    }
    let nodes = [0, 1].map(|axis| {
        let mut of = vec![0_usize; shape[axis]];
        let mut count = 1;
        // Each device has a link of its own, wherever it is.
        let is_cpus = axis == 0 || table.sweep.is_pair();
        for members in table.nodes(axis).values().filter(|_| is_cpus) {
            members.iter().for_each(|&line| of[line] = count);
            count += 1;
        }
        (of, count)
    });
    let mut mu = median(&mut visits.iter().map(|visit| visit.ln).collect::<Vec<f64>>());
    let mut class = [0.0; 3];
    let mut node = [vec![0.0; nodes[0].1], vec![0.0; nodes[1].1]];
    let mut line = [vec![0.0; shape[0]], vec![0.0; shape[1]]];
    let mut raw = line.clone();
    let mut spread = [0.0; 2];
    let mut sd = 0.0;
    let mut time = vec![0.0_f64; which.len()];
    let mut cuts = Vec::new();
    let mut seen = [vec![0_u32; shape[0]], vec![0_u32; shape[1]]];
    for visit in &visits {
        seen[0][visit.lines[0]] += 1;
        seen[1][visit.lines[1]] += 1;
    }
    let mut is_out = [vec![false; shape[0]], vec![false; shape[1]]];
    let mut scratch = Vec::new();
    let mut rest = vec![0.0; visits.len()];
    for round in 0..ROUNDS {
        // Without lines: for nodes, classes and the variances.
        for (rest, visit) in rest.iter_mut().zip(&visits) {
            *rest = visit.ln - mu - time[visit.place];
        }
        for axis in [0, 1] {
            let (of, count) = &nodes[axis];
            let other = 1 - axis;
            let mut members = vec![Vec::new(); *count];
            for (rest, visit) in rest.iter().zip(&visits) {
                let beside = node[other][nodes[other].0[visit.lines[other]]]
                    + line[other][visit.lines[other]]
                    + class[visit.class as usize];
                members[of[visit.lines[axis]]].push(rest - beside);
            }
            for (level, members) in node[axis].iter_mut().zip(&mut members) {
                *level = if members.len() < LEAST_OF_NODE { 0.0 } else { median(members) };
            }
        }
        let centers = [0, 1].map(|axis| {
            let per_line = (0..shape[axis]).map(|at| node[axis][nodes[axis].0[at]]);
            median(&mut per_line.collect::<Vec<f64>>())
        });
        for axis in [0, 1] {
            node[axis].iter_mut().for_each(|level| *level -= centers[axis]);
            mu += centers[axis];
        }
        let base = |visit: &Visit, mu: f64, node: &[Vec<f64>; 2]| {
            mu + node[0][nodes[0].0[visit.lines[0]]] + node[1][nodes[1].0[visit.lines[1]]]
        };
        for kinship in [Kinship::Siblings, Kinship::SameCpu] {
            scratch.clear();
            scratch.extend(visits.iter().filter(|visit| visit.class == kinship).map(|visit| {
                visit.ln
                    - base(visit, mu, &node)
                    - time[visit.place]
                    - line[0][visit.lines[0]]
                    - line[1][visit.lines[1]]
            }));
            class[kinship as usize] = if scratch.is_empty() { 0.0 } else { median(&mut scratch) };
        }
        for (rest, visit) in rest.iter_mut().zip(&visits) {
            let class = class[visit.class as usize];
            *rest = visit.ln - base(visit, mu, &node) - time[visit.place] - class;
        }
        let center = median(&mut rest.clone());
        mu += center;
        rest.iter_mut().for_each(|rest| *rest -= center);
        let all = robust_sd(&rest, 0.0).max(1e-6);
        let whole = rest.clone();
        rest.iter_mut().for_each(|rest| *rest = rest.clamp(-CLIP * all, CLIP * all));
        let of_axis = [0, 1].map(|axis| shared(&visits, &rest, axis, shape[axis], &is_out[axis]));
        let chance = || {
            let is_plain =
                |visit: &Visit| [0, 1].iter().all(|&axis| !is_out[axis][visit.lines[axis]]);
            rest.iter().zip(&visits).filter(move |(_, visit)| visit.by_chance && is_plain(visit))
        };
        let total =
            chance().map(|(rest, _)| rest * rest).sum::<f64>() / (chance().count().max(1) as f64);
        spread = of_axis.map(|variance| variance.max(0.0).sqrt());
        let own = total - spread[0].powi(2) - spread[1].powi(2);
        sd = own.max(0.04 * total).sqrt().max(1e-6);
        for _ in 0..4 {
            for axis in [0, 1] {
                let mut sums = vec![0.0; shape[axis]];
                let mut own = vec![Vec::new(); shape[axis]];
                for ((rest, whole), visit) in rest.iter().zip(&whole).zip(&visits) {
                    let beside = line[1 - axis][visit.lines[1 - axis]];
                    let at = visit.lines[axis];
                    sums[at] += (rest - beside).clamp(-CLIP * all, CLIP * all);
                    own[at].push(whole - beside);
                }
                for at in 0..shape[axis] {
                    let count = f64::from(seen[axis][at]);
                    if count == 0.0 {
                        line[axis][at] = 0.0;
                        raw[axis][at] = f64::NAN;
                        continue;
                    }
                    raw[axis][at] = sums[at] / count;
                    let error = sd * sd / count;
                    let between = spread[axis].powi(2);
                    let expected = (between + error).sqrt();
                    // By what rests are before they are clipped, which one stall does not move.
                    let middle = median(&mut own[at]);
                    is_out[axis][at] =
                        count >= 3.0 && middle.abs() > (CLIP * expected).max(LEAST_OUT);
                    if is_out[axis][at] {
                        raw[axis][at] = middle;
                    }
                    let weight =
                        if is_out[axis][at] { 1.0 } else { between / (between + error).max(1e-12) };
                    line[axis][at] = weight * raw[axis][at];
                }
            }
        }
        if round + 1 == ROUNDS {
            break;
        }
        // What is left in the order of measurement, of visits chosen by chance: the others are mostly
        // slow, and not for when they were made.
        let chance: Vec<&Visit> = visits.iter().filter(|visit| visit.by_chance).collect();
        let width = (chance.len() / 128).clamp(4, 16);
        let levels: Vec<f64> = chance
            .chunks(width)
            .map(|visits| {
                scratch.clear();
                scratch.extend(visits.iter().map(|visit| {
                    visit.ln
                        - base(visit, mu, &node)
                        - class[visit.class as usize]
                        - line[0][visit.lines[0]]
                        - line[1][visit.lines[1]]
                }));
                median(&mut scratch)
            })
            .collect();
        if levels.is_empty() {
            continue;
        }
        let (mut levels, steps) = smooth(&levels, round > 0);
        let center = median(&mut levels.clone());
        levels.iter_mut().for_each(|level| *level -= center);
        cuts = steps.into_iter().map(|bin| obs(chance[bin * width].place).seq).collect();
        let mut at = 0;
        for (place, time) in time.iter_mut().enumerate() {
            while at + 1 < chance.len() && chance[at].place < place {
                at += 1;
            }
            *time = levels[at / width];
        }
    }
    // Lines that are far out are beyond what rests are clipped to.
    let mut is_partial = [vec![false; shape[0]], vec![false; shape[1]]];
    for axis in [0, 1] {
        let other = 1 - axis;
        // Where the other line is far out, too, the two costs need not be factors.
        let plain: Vec<&Visit> =
            visits.iter().filter(|visit| !is_out[other][visit.lines[other]]).collect();
        let own = own_rests(&plain, axis, shape[axis], |visit| {
            let base = node[0][nodes[0].0[visit.lines[0]]] + node[1][nodes[1].0[visit.lines[1]]];
            let beside = line[other][visit.lines[other]] + class[visit.class as usize];
            visit.ln - mu - time[visit.place] - base - beside
        });
        for (at, mut own) in own.into_iter().enumerate() {
            let count = own.len();
            if count < 3 {
                // One or two visits: beyond what rests are clipped to, as long as it is no stall.
                if count > 0 {
                    raw[axis][at] = (own.iter().sum::<f64>() / count as f64).clamp(-0.7, 0.7);
                }
                continue;
            }
            let level = median(&mut own);
            let mean = own.iter().sum::<f64>() / count as f64;
            // The part that is nearer to the others.
            let near = quantile(&mut own, if mean > 0.0 { 0.25 } else { 0.75 });
            is_partial[axis][at] = mean.abs() > 4.0 * sd / (count as f64).sqrt()
                && near / mean < 0.3
                && (mean - near).abs() > 2.5 * sd;
            if is_out[axis][at] {
                raw[axis][at] = if is_partial[axis][at] { near } else { level };
                line[axis][at] = raw[axis][at];
            }
        }
    }
    let levels = [0, 1].map(|axis| -> Vec<f64> {
        (0..shape[axis]).map(|at| node[axis][nodes[axis].0[at]] + line[axis][at]).collect()
    });
    for axis in [0, 1] {
        for at in 0..shape[axis] {
            raw[axis][at] += node[axis][nodes[axis].0[at]];
        }
    }
    #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
    let time = time.iter().map(|&level| level as f32).collect();
    let confirming = (0_u32..).zip(&which).filter(|(_, at)| table.obs[**at as usize].is_confirm());
    let confirming = confirming.map(|(place, _)| place).collect();
    let visit_sd = if table.sweep.is_pair() { sd } else { spread[0].max(sd) };
    let [row, col] = levels;
    Some(Fit {
        mu,
        row,
        col,
        class,
        confirming,
        time,
        steps: Vec::new(),
        cuts,
        point_sd: sd,
        visit_sd,
        replicates: coverage(table, size).0,
        which,
        sampled: Some(Sampled { seen, raw, own: line, is_partial, spread, sd }),
    })
}

/// The rests of each line's visits.
fn own_rests(
    visits: &[&Visit],
    axis: usize,
    lines: usize,
    rest: impl Fn(&Visit) -> f64,
) -> Vec<Vec<f64>> {
    let mut own = vec![Vec::new(); lines];
    for visit in visits {
        own[visit.lines[axis]].push(rest(visit));
    }
    own
}

/// Variance that visits of one line share, from the products of their rests.
fn shared(visits: &[Visit], rest: &[f64], axis: usize, lines: usize, is_out: &[bool]) -> f64 {
    let mut sums = vec![(0.0, 0.0, 0.0); lines];
    for (rest, visit) in rest.iter().zip(visits).filter(|(_, visit)| visit.by_chance) {
        let (sum, squares, count) = &mut sums[visit.lines[axis]];
        *sum += rest;
        *squares += rest * rest;
        *count += 1.0;
    }
    let (mut products, mut pairs) = (0.0, 0.0);
    for ((sum, squares, count), is_out) in sums.into_iter().zip(is_out) {
        if !is_out {
            products += sum * sum - squares;
            pairs += count * (count - 1.0);
        }
    }
    if pairs > 0.0 { products / pairs } else { 0.0 }
}

/// What a cell of one size is predicted to be: logarithm of its time, and the variance of one visit
/// about that.
fn predicted(table: &Table, fit: &Fit, row: usize, col: usize) -> (f64, f64) {
    let class = fit.class[table.kinship(row, col) as usize];
    let variance = fit.sampled.as_ref().map_or(fit.point_sd.powi(2), |sampled| {
        sampled.sd.powi(2) + sampled.variance(0, row) + sampled.variance(1, col)
    });
    (fit.mu + fit.row[row] + fit.col[col] + class, variance)
}

/// Rates of the cells that were not visited. Of the rectangles among the suspects those count that are
/// findings.
pub(crate) fn predict(table: &Table, suspects: &[Suspect], found: &[Finding]) -> Prediction {
    let [rows, cols] = table.shape();
    let mut all = Prediction::new((table.sizes.len(), rows, cols));
    let rectangles: Vec<(&[usize], &[usize], f64)> = suspects
        .iter()
        .filter_map(|suspect| match &suspect.shape {
            Shape::Block { rows, cols } => {
                let is_found = found.iter().any(|finding| {
                    let of = |own: &[u32], pair: &[u32]| [own, pair].concat();
                    let (in_rows, in_cols) = (
                        of(&finding.cpus, &finding.rank0_cpus),
                        of(&finding.devices, &finding.rank1_cpus),
                    );
                    !in_rows.is_empty()
                        && !in_cols.is_empty()
                        && rows.iter().any(|&row| in_rows.contains(&table.rows.ids[row]))
                        && cols.iter().any(|&col| in_cols.contains(&table.cols.ids[col]))
                });
                is_found.then_some((&rows[..], &cols[..], suspect.effect))
            }
            _ => None,
        })
        .collect();
    let mask = |row: usize, col: usize| {
        rectangles.iter().any(|(rows, cols, _)| {
            rows.binary_search(&row).is_ok() && cols.binary_search(&col).is_ok()
        })
    };
    for (size, bytes) in table.sizes.iter().enumerate() {
        let Some(mut fit) =
            fit(table, size, Some(&mask), true).or_else(|| fit(table, size, None, true))
        else {
            continue;
        };
        found.iter().for_each(|finding| carry_over(table, &mut fit, finding));
        let mut extra = vec![0.0_f32; rows * cols];
        for (in_rows, in_cols, effect) in &rectangles {
            for &row in *in_rows {
                #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
                in_cols.iter().for_each(|col| extra[row * cols + col] = *effect as f32);
            }
        }
        let mut is_visited = vec![false; rows * cols];
        for obs in table.obs.iter().filter(|obs| usize::from(obs.size) == size && obs.is_block()) {
            is_visited[usize::from(obs.row) * cols + usize::from(obs.col)] = true;
        }
        for row in 0..rows {
            for col in 0..cols {
                let at = row * cols + col;
                if is_visited[at] {
                    continue;
                }
                let (ln, variance) = predicted(table, &fit, row, col);
                let rate = bytes.bytes() as f64 / (ln + f64::from(extra[at])).exp();
                #[allow(clippy::cast_possible_truncation, reason = "for people and pictures")]
                let (rate, error) = (rate as f32, (1.96 * variance.sqrt()).exp_m1() as f32);
                all.gbps[[size, row, col]] = rate;
                all.error[[size, row, col]] = error;
            }
        }
    }
    all
}

/// What the fit leaves of each visit of the blocks: row, column, rest.
pub(super) fn rests(table: &Table, fit: &Fit) -> Vec<(usize, usize, f64)> {
    (0..fit.which.len())
        .filter_map(|place| {
            let obs = &table.obs[fit.which[place] as usize];
            let (row, col) = (usize::from(obs.row), usize::from(obs.col));
            let expected = fit.mu
                + fit.row[row]
                + fit.col[col]
                + fit.class[table.kinship(row, col) as usize]
                + f64::from(fit.time[place]);
            obs.is_block().then(|| (row, col, f64::from(obs.ln) - expected))
        })
        .collect()
}

/// Lines differ by so much even where the visits show no difference, for what is said to be known.
const LEAST_SPREAD: f64 = 0.005;

/// Visits of a line at a size from which it speaks for itself there.
const ENOUGH: u32 = 6;

/// Lines that were found to differ, at a size that was looked at closely, differ where they have few
/// visits, too: by as much time, or in proportion to the bytes.
fn carry_over(table: &Table, fit: &mut Fit, finding: &Finding) {
    let Some(effect) = finding.effect else { return };
    let is_line = matches!(
        finding.kind,
        Kind::SlowDevice
            | Kind::SlowCore
            | Kind::SlowRank0Core
            | Kind::SlowRank1Core
            | Kind::NumaEffect
    );
    let Some(sampled) = fit.sampled.as_ref().filter(|_| is_line) else { return };
    let delta = match (finding.scales_with_bytes, finding.extra_us) {
        (Some(false), Some(extra_us)) => (extra_us * 1e3 / fit.mu.exp()).ln_1p(),
        _ => -effect.ratio.ln(),
    };
    let lists = [
        [&finding.cpus[..], &finding.rank0_cpus].concat(),
        [&finding.devices[..], &finding.rank1_cpus].concat(),
    ];
    let axes = [(&table.rows, &mut fit.row), (&table.cols, &mut fit.col)];
    for (axis, ((labels, levels), list)) in axes.into_iter().zip(&lists).enumerate() {
        for (line, id) in labels.ids.iter().enumerate() {
            if list.contains(id) && sampled.seen[axis][line] < ENOUGH {
                levels[line] = delta;
            }
        }
    }
}

/// Half-width of the 95 % interval that nine of ten lines of a fit are known to, as a share.
pub(crate) fn known_to(fit: &Fit) -> f64 {
    let Some(sampled) = &fit.sampled else { return 0.0 };
    let mut errors: Vec<f64> = [0, 1]
        .iter()
        .flat_map(|&axis| {
            let spread = sampled.spread[axis].max(LEAST_SPREAD).powi(2);
            (0..sampled.seen[axis].len()).map(move |line| {
                let visits = f64::from(sampled.seen[axis][line]);
                (1.0 / (1.0 / spread + visits / sampled.sd.powi(2).max(1e-12))).sqrt()
            })
        })
        .collect();
    (1.96 * quantile(&mut errors, 0.9)).exp_m1()
}

/// Cells in line with suspected rectangles that were not visited: they tell where those begin and end.
pub(crate) fn missing(
    table: &Table,
    size: usize,
    suspects: &[Suspect],
    usable: &dyn Fn(usize, usize) -> bool,
) -> Vec<Cell> {
    let [all_rows, all_cols] = table.shape();
    let mut is_wanted = vec![false; all_rows * all_cols];
    for suspect in suspects {
        // Single cells are what chance makes.
        if let Shape::Block { rows, cols } = &suspect.shape
            && rows.len() * cols.len() > 2
        {
            for &col in cols {
                (0..all_rows).for_each(|row| is_wanted[row * all_cols + col] = true);
            }
            for &row in rows {
                (0..all_cols).for_each(|col| is_wanted[row * all_cols + col] = true);
            }
        }
    }
    for obs in table.obs.iter().filter(|obs| usize::from(obs.size) == size && obs.is_block()) {
        is_wanted[usize::from(obs.row) * all_cols + usize::from(obs.col)] = false;
    }
    (0..all_rows * all_cols)
        .filter(|&at| is_wanted[at])
        .map(|at| Cell { row: at / all_cols, column: at % all_cols })
        .filter(|cell| usable(cell.row, cell.column))
        .collect()
}
