//! Rows, columns, classes and time of one size, fitted together by robust backfitting.
//!
//! ln t = μ + row + column + class + time(seq) + steps of single devices + rest. Rows and columns
//! are quantiles on the fast side, so that a slow rectangle that covers most of a row leaves the
//! row's own level alone; time is a running median in the order of measurement, which randomised
//! orders make independent of the cells.

use super::sparse::Sampled;
use super::table::{Kinship, Obs, Table};
use crate::stats::{median, quantile, robust_sd};

/// From this time on (in order of measurement) a device's time changed by `delta` (logarithm).
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceStep {
    pub(crate) col: usize,
    pub(crate) seq: u32,
    pub(crate) delta: f64,
    /// Standard error of `delta`: few visits before it leave the device's own level uncertain.
    pub(crate) se: f64,
    /// Told by few points near an end of the run, see [`short_steps`].
    pub(crate) is_short: bool,
}

/// The fit of one size.
#[derive(Debug, Clone)]
pub(crate) struct Fit {
    pub(crate) mu: f64,
    /// Deviations, logarithm of time: positive is slow. Their medians are 0.
    pub(crate) row: Vec<f64>,
    pub(crate) col: Vec<f64>,
    /// By [`Kinship`].
    pub(crate) class: [f64; 3],
    /// Positions in the table's points, in order of measurement.
    pub(crate) which: Vec<u32>,
    /// Positions in `which` of the confirming points.
    pub(crate) confirming: Vec<u32>,
    /// Effect of time on each of `which`.
    pub(crate) time: Vec<f32>,
    pub(crate) steps: Vec<DeviceStep>,
    /// Where (by seq) the time of everything changed for good or for long.
    pub(crate) cuts: Vec<u32>,
    /// Standard deviation of a point about the fit, robust.
    pub(crate) point_sd: f64,
    /// Of a visit's level about its row's; of a point for pairs.
    pub(crate) visit_sd: f64,
    /// Visits per cell: the blocks, of a sampled sweep those of the cells that have any.
    pub(crate) replicates: f64,
    /// Of a size of which few cells were visited.
    pub(crate) sampled: Option<Sampled>,
}

impl Fit {
    /// Standard error of what the steps of device `col` come to.
    pub(crate) fn steps_se(&self, col: usize) -> f64 {
        let steps = self.steps.iter().filter(|step| step.col == col);
        steps.map(|step| step.se * step.se).sum::<f64>().sqrt()
    }

    /// What the steps of device `col` until `seq` come to.
    pub(crate) fn steps(&self, col: usize, seq: u32) -> f64 {
        let steps = self.steps.iter().filter(|step| step.col == col && seq >= step.seq);
        steps.map(|step| step.delta).sum()
    }
}

/// Rounds of backfitting.
const ROUNDS: usize = 5;

/// The quantile of a group of so many: the faster part, see the module. Of two the faster one.
fn fast_quantile(count: usize) -> f64 {
    match count {
        0..=2 => 0.0,
        3..=4 => 0.25,
        _ => 0.35,
    }
}

/// Positions of members of each group, one after another.
pub(crate) struct Groups {
    start: Vec<u32>,
    members: Vec<u32>,
}

impl Groups {
    pub(crate) fn new(count: usize, of: impl Iterator<Item = Option<usize>> + Clone) -> Self {
        let mut start = vec![0_u32; count + 1];
        for group in of.clone().flatten() {
            start[group + 1] += 1;
        }
        for at in 0..count {
            start[at + 1] += start[at];
        }
        let mut next = start.clone();
        let mut members = vec![0; start[count] as usize];
        for (at, group) in (0_u32..).zip(of) {
            if let Some(group) = group {
                members[next[group] as usize] = at;
                next[group] += 1;
            }
        }
        Self { start, members }
    }

    pub(crate) fn of(&self, group: usize) -> &[u32] {
        &self.members[self.start[group] as usize..self.start[group + 1] as usize]
    }
}

/// Cells that tell nothing about their rows and columns.
pub(crate) type Mask<'a> = &'a (dyn Fn(usize, usize) -> bool + Sync);

/// Fits the points of one size; `None` when there are none. With a mask, rows and columns are
/// medians of the cells outside of it. Devices change at the `known` places (column and seq), too.
pub(crate) fn fit(
    table: &Table,
    size: usize,
    mask: Option<Mask<'_>>,
    known: &[(usize, u32)],
) -> Option<Fit> {
    let [rows, cols] = table.shape();
    let is_pair = table.sweep.is_pair();
    let which: Vec<u32> = (0_u32..)
        .zip(&table.obs)
        .filter(|(_, obs)| usize::from(obs.size) == size)
        .map(|(at, _)| at)
        .collect();
    let obs = |at: u32| &table.obs[which[at as usize] as usize];
    let count = u32::try_from(which.len()).ok()?;
    let block = |at: u32| {
        let is_masked =
            |row, col| mask.is_some_and(|mask| mask(usize::from(row), usize::from(col)));
        Some(obs(at)).filter(|obs| obs.is_block() && !is_masked(obs.row, obs.col))
    };
    let level_quantile = |count| if mask.is_some() { 0.5 } else { fast_quantile(count) };
    let by_row = Groups::new(rows, (0..count).map(|at| block(at).map(|obs| usize::from(obs.row))));
    let by_col = Groups::new(cols, (0..count).map(|at| block(at).map(|obs| usize::from(obs.col))));
    if by_row.members.is_empty() {
        return None;
    }
    let kinship: Vec<Kinship> = (0..count)
        .map(|at| table.kinship(usize::from(obs(at).row), usize::from(obs(at).col)))
        .collect();
    let mut kin = [Vec::new(), Vec::new()];
    for at in 0..count {
        match kinship[at as usize] {
            _ if !obs(at).is_block() => {}
            Kinship::Strangers => {}
            Kinship::Siblings => kin[0].push(at),
            Kinship::SameCpu => kin[1].push(at),
        }
    }
    let bins = bins(table, &which);
    let mut fit = Fit {
        mu: 0.0,
        row: vec![0.0; rows],
        col: vec![0.0; cols],
        class: [0.0; 3],
        time: vec![0.0; which.len()],
        steps: known
            .iter()
            .map(|&(col, seq)| DeviceStep { col, seq, delta: 0.0, se: 0.0, is_short: true })
            .collect(),
        cuts: Vec::new(),
        confirming: (0..count).filter(|&at| obs(at).is_confirm()).collect(),
        point_sd: 0.0,
        visit_sd: 0.0,
        replicates: table.replicates(size),
        sampled: None,
        which: Vec::new(),
    };
    let mut scratch = Vec::new();
    let ln: Vec<f64> = (0..count).map(|at| f64::from(obs(at).ln)).collect();
    scratch.extend(by_row.members.iter().map(|&at| ln[at as usize]));
    fit.mu = median(&mut scratch);
    let mut rest = vec![0.0; which.len()];
    // What is left of each point; updated after each step.
    let update = |fit: &Fit, rest: &mut Vec<f64>| {
        for at in 0..count {
            let (place, obs) = (at as usize, obs(at));
            let steps = fit.steps(usize::from(obs.col), obs.seq);
            rest[place] = ln[place]
                - fit.mu
                - fit.row[usize::from(obs.row)]
                - fit.col[usize::from(obs.col)]
                - fit.class[kinship[place] as usize]
                - f64::from(fit.time[place])
                - steps;
        }
    };
    for round in 0..ROUNDS {
        update(&fit, &mut rest);
        for index in 0..known.len() {
            let DeviceStep { col, seq, .. } = fit.steps[index];
            let sides = [false, true].map(|after| {
                let members = by_col.of(col).iter();
                let side = members.filter(|&&at| (obs(at).seq >= seq) == after);
                side.map(|&at| rest[at as usize]).collect::<Vec<f64>>()
            });
            let [mut before, mut after] = sides;
            if before.is_empty() || after.is_empty() {
                continue;
            }
            let counts = [before.len(), after.len()].map(|count| 1.0 / count as f64);
            fit.steps[index].delta += median(&mut after) - median(&mut before);
            fit.steps[index].se = (counts[0] + counts[1]).sqrt();
            update(&fit, &mut rest);
        }
        for (col, level) in fit.col.iter_mut().enumerate() {
            let members = by_col.of(col);
            scratch.clear();
            scratch.extend(members.iter().map(|&at| rest[at as usize]));
            if !scratch.is_empty() {
                *level += quantile(&mut scratch, level_quantile(rows));
            }
        }
        fit.mu += center(&mut fit.col, |col| !by_col.of(col).is_empty());
        for time in &mut fit.time {
            *time = 0.0;
        }
        update(&fit, &mut rest);
        let levels: Vec<f64> = bins
            .iter()
            .map(|bin| {
                scratch.clear();
                scratch.extend(bin.clone().map(|at| rest[at]));
                let q = if is_pair { 0.5 } else { level_quantile(cols).max(0.25) };
                quantile(&mut scratch, q)
            })
            .collect();
        // Before rows are known, a few slow ones together look like a disturbance.
        let (levels, cuts) = smooth(&levels, round > 0);
        fit.cuts =
            cuts.into_iter().map(|bin| table.obs[which[bins[bin].start] as usize].seq).collect();
        for (bin, level) in bins.iter().zip(levels) {
            for at in bin.clone() {
                #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
                let level = level as f32;
                fit.time[at] = level;
            }
        }
        update(&fit, &mut rest);
        for (row, level) in fit.row.iter_mut().enumerate() {
            let members = by_row.of(row);
            if members.is_empty() {
                continue;
            }
            if is_pair {
                scratch.clear();
                scratch.extend(members.iter().map(|&at| rest[at as usize]));
                *level += quantile(&mut scratch, level_quantile(cols));
            } else {
                let mut levels =
                    visit_levels(members, &rest, |at| obs(at).visit, (cols, level_quantile(cols)));
                *level += median(&mut levels);
            }
        }
        fit.mu += center(&mut fit.row, |row| !by_row.of(row).is_empty());
        for (class, members) in [(Kinship::Siblings, &kin[0]), (Kinship::SameCpu, &kin[1])] {
            update(&fit, &mut rest);
            scratch.clear();
            scratch.extend(members.iter().map(|&at| rest[at as usize]));
            if !scratch.is_empty() {
                fit.class[class as usize] += median(&mut scratch);
            }
        }
        // Not before rows and time are known from each other.
        if round > 0 && round + 2 < ROUNDS && !is_pair && cols > 1 {
            update(&fit, &mut rest);
            // Against the others of the same visit: what time does to all of them is no step.
            let mut start = 0;
            for at in 1..=count {
                if at == count || obs(at).visit != obs(start).visit {
                    let visit = &mut rest[start as usize..at as usize];
                    if visit.len() >= 4 {
                        let level = median(&mut visit.to_vec());
                        visit.iter_mut().for_each(|rest| *rest -= level);
                    }
                    start = at;
                }
            }
            fit.steps.extend(device_steps(&by_col, &rest, cols, |at| obs(at).seq));
        }
    }
    update(&fit, &mut rest);
    let blocks: Vec<f64> = by_row.members.iter().map(|&at| rest[at as usize]).collect();
    fit.point_sd = robust_sd(&blocks, median(&mut blocks.clone()));
    // In points until now.
    fit.steps.iter_mut().for_each(|step| step.se *= 1.25 * fit.point_sd);
    fit.visit_sd = if is_pair {
        fit.point_sd
    } else {
        // A row's level is one of its visits': deviations from it would be too small.
        let mut differences = Vec::new();
        for row in 0..rows {
            let q = level_quantile(cols);
            let levels = visit_levels(by_row.of(row), &rest, |at| obs(at).visit, (cols, q));
            differences.extend(levels.windows(2).map(|pair| pair[1] - pair[0]));
        }
        if differences.is_empty() {
            robust_sd(&fit.row, 0.0)
        } else {
            robust_sd(&differences, 0.0) / std::f64::consts::SQRT_2
        }
    };
    fit.which = which;
    Some(fit)
}

/// Shifts the levels of groups that have members to a median of 0 and returns by how much.
fn center(levels: &mut [f64], has_members: impl Fn(usize) -> bool) -> f64 {
    let mut present: Vec<f64> =
        (0..levels.len()).filter(|&at| has_members(at)).map(|at| levels[at]).collect();
    let shift = median(&mut present);
    if shift.is_nan() {
        return 0.0;
    }
    levels.iter_mut().for_each(|level| *level -= shift);
    shift
}

/// The level of each visit among these points of a row, which come in order of measurement. Visits to
/// a few cells only (those that `--ci` and samples add) tell about these, not about the row.
fn visit_levels(
    members: &[u32],
    rest: &[f64],
    visit: impl Fn(u32) -> u32,
    (cols, q): (usize, f64),
) -> Vec<f64> {
    let visits = || members.chunk_by(|a, b| visit(*a) == visit(*b));
    let most = visits().map(<[u32]>::len).max().unwrap_or(0);
    visits()
        .filter(|points| 2 * points.len() > most.max(cols) || points.len() == most)
        .map(|points| {
            let mut values: Vec<f64> = points.iter().map(|&at| rest[at as usize]).collect();
            quantile(&mut values, q)
        })
        .collect()
}

/// Neighbours in time that count as one: the points of a visit, or a few pairs.
fn bins(table: &Table, which: &[u32]) -> Vec<std::ops::Range<usize>> {
    let mut bins = Vec::new();
    let width = match which.len() {
        0..=400 => 1,
        401..=4000 => 4,
        _ => 8,
    };
    let visit = |at: usize| table.obs[which[at] as usize].visit;
    let mut start = 0;
    for at in 1..=which.len() {
        let ends = at == which.len()
            || if table.sweep.is_pair() { at - start == width } else { visit(at) != visit(start) };
        if ends {
            bins.push(start..at);
            start = at;
        }
    }
    bins
}

/// Neighbours on each side that tell the level of the time between them.
const NEAR: usize = 3;

/// What time does to a series of levels: steps, a slow trend, and where neighbours leave both
/// together, their level. A value never takes part in its own neighbourhood.
pub(super) fn smooth(levels: &[f64], with_trend: bool) -> (Vec<f64>, Vec<usize>) {
    let count = levels.len();
    let mut time = vec![0.0; count];
    let mut cuts = Vec::new();
    segments(levels, &mut time, 0, MOST_SEGMENTS, &mut cuts);
    cuts.sort_unstable();
    if count < 2 * NEAR + 2 || !with_trend {
        return (time, cuts);
    }
    let flat: Vec<f64> = levels.iter().zip(&time).map(|(level, time)| level - time).collect();
    let trend = trend(&flat);
    let around: Vec<f64> = flat.iter().zip(&trend).map(|(level, trend)| level - trend).collect();
    let sd = robust_sd(&around, 0.0);
    // Of a median of six, with 3 of its standard errors.
    let least = 3.0 * 1.25 * sd / (2.0 * NEAR as f64).sqrt();
    let mut near = Vec::with_capacity(2 * NEAR);
    for at in 0..count {
        let from = at.saturating_sub(NEAR).min(count - 2 * NEAR - 1);
        near.clear();
        near.extend((from..=from + 2 * NEAR).filter(|other| *other != at).map(|at| around[at]));
        let level = median(&mut near);
        time[at] += trend[at] + if level.abs() > least { level } else { 0.0 };
    }
    (time, cuts)
}

/// Steps that a series is cut at, at most.
const MOST_SEGMENTS: usize = 4;

/// Adds to `time` the level of each stretch between the steps of a series, which are noted in
/// `cuts`.
fn segments(levels: &[f64], time: &mut [f64], first: usize, most: usize, cuts: &mut Vec<usize>) {
    match step(levels, 3).filter(|_| most > 0) {
        Some((at, _)) => {
            cuts.push(first + at);
            let (before, after) = time.split_at_mut(at);
            segments(&levels[..at], before, first, most - 1, cuts);
            segments(&levels[at..], after, first + at, most - 1, cuts);
        }
        None => {
            let level = median(&mut levels.to_vec());
            time.iter_mut().for_each(|time| *time += level);
        }
    }
}

/// Running median over a tenth of the series, at least 15 values.
fn trend(levels: &[f64]) -> Vec<f64> {
    let count = levels.len();
    let half = (count / 20).max(7);
    let stride = (half / 4).max(1);
    let mut window = Vec::with_capacity(2 * half + 1);
    let knots: Vec<(usize, f64)> = (0..count)
        .step_by(stride)
        .map(|at| {
            window.clear();
            window.extend_from_slice(&levels[at.saturating_sub(half)..(at + half + 1).min(count)]);
            (at, median(&mut window))
        })
        .collect();
    (0..count)
        .map(|at| {
            let (left, low) = knots[at / stride];
            match knots.get(at / stride + 1) {
                Some((_, high)) => low + (high - low) * (at - left) as f64 / stride as f64,
                None => low,
            }
        })
        .collect()
}

/// Standard errors that a step of a device needs.
const STEP_Z: f64 = 7.0;
/// Smallest step of a device, logarithm of time.
const LEAST_STEP: f64 = 0.015;

fn device_steps(
    by_col: &Groups,
    rest: &[f64],
    cols: usize,
    seq: impl Fn(u32) -> u32,
) -> Vec<DeviceStep> {
    let mut steps = Vec::new();
    for col in 0..cols {
        let members = by_col.of(col);
        let values: Vec<f64> = members.iter().map(|&at| rest[at as usize]).collect();
        if let Some((at, delta)) = step(&values, 4) {
            let (before, after) = (at as f64, (values.len() - at) as f64);
            let se = (1.0 / before + 1.0 / after).sqrt();
            steps.push(DeviceStep { col, seq: seq(members[at]), delta, se, is_short: false });
        }
    }
    steps
}

/// Points at either end of a series that may be all there is before or after a step.
const SHORT_END: usize = 12;
/// Logarithm of how much more likely a step near an end must be than none.
const SHORT_END_EVIDENCE: f64 = 16.0;
/// What one point counts at most: a dip is none.
const POINT_EVIDENCE: f64 = 12.0;

/// Standard deviations by which another device has changed, too.
const COMMON_Z: f64 = 3.0;

/// Visits that must be slow before or after a step: a disturbance hits one or two.
const SLOW_VISITS: usize = 4;

/// How a point differs from the other visits to its cell.
#[derive(Debug, Clone, Copy)]
struct Change {
    seq: u32,
    visit: u32,
    size: usize,
    /// In units of `sd`.
    change: f64,
    sd: f64,
}

/// Steps of single devices with few points before or after them: too few of one size, enough of all
/// sizes and the confirming visits together. Column and seq; `rests` are those of each size's points.
pub(crate) fn short_steps(
    table: &Table,
    fits: &[Option<Fit>],
    rests: &[Option<Vec<f32>>],
) -> Vec<(usize, u32)> {
    let [rows, cols] = table.shape();
    if table.sweep.is_pair() || cols < 2 {
        return Vec::new();
    }
    // Against the other visits to the same cell: what a slow cell does is no step.
    let mut series: Vec<Vec<Change>> = vec![Vec::new(); cols];
    for (size, (fit, rests)) in fits.iter().zip(rests).enumerate() {
        let (Some(fit), Some(rests)) = (fit, rests) else { continue };
        let at = |place: u32| &table.obs[fit.which[place as usize] as usize];
        let cell = |obs: &Obs| usize::from(obs.row) * cols + usize::from(obs.col);
        let count = u32::try_from(rests.len()).unwrap_or(0);
        let of = (0..count).map(|place| at(place).is_block().then(|| cell(at(place))));
        let cells = Groups::new(rows * cols, of);
        let mut others = Vec::new();
        let mut own: Vec<Vec<Change>> = vec![Vec::new(); cols];
        for place in 0..count {
            let obs = at(place);
            if !obs.is_block() && !obs.is_confirm() {
                continue;
            }
            others.clear();
            let visits = cells.of(cell(obs)).iter().filter(|&&other| other != place);
            others.extend(visits.map(|&other| f64::from(rests[other as usize])));
            if !others.is_empty() {
                let change = f64::from(rests[place as usize]) - median(&mut others);
                own[usize::from(obs.col)].push(Change {
                    seq: obs.seq,
                    visit: obs.visit,
                    size,
                    change,
                    sd: 1.0,
                });
            }
        }
        let changes: Vec<f64> = own.iter().flatten().map(|own| own.change).collect();
        let sd = robust_sd(&changes, 0.0).max(1e-4);
        for (series, own) in series.iter_mut().zip(own) {
            series.extend(own.into_iter().map(|own| Change { change: own.change / sd, sd, ..own }));
        }
    }
    let all: Vec<(usize, Change)> = series
        .iter()
        .enumerate()
        .flat_map(|(col, series)| series.iter().map(move |own| (col, *own)))
        .collect();
    let mut found = Vec::new();
    for (col, series) in series.iter_mut().enumerate() {
        series.sort_by_key(|own| own.seq);
        if series.is_empty() {
            continue;
        }
        let level = median(&mut series.iter().map(|own| own.change).collect::<Vec<f64>>());
        for at_end in [false, true] {
            let end: Vec<Change> = {
                let of_level = |own: &Change| Change { change: own.change - level, ..*own };
                let rests = series.iter().map(of_level);
                let most = SHORT_END.min(series.len() / 3);
                if at_end { rests.rev().take(most).collect() } else { rests.take(most).collect() }
            };
            let mut best = (SHORT_END_EVIDENCE, 0);
            for count in 2..=end.len() {
                let points = &end[..count];
                // A cost per transfer differs between the sizes.
                let steps: Vec<f64> = (0..fits.len())
                    .map(|size| {
                        let of_size = points.iter().filter(|own| own.size == size);
                        median(&mut of_size.map(|own| own.change).collect::<Vec<f64>>())
                    })
                    .collect();
                let is_slow = |own: &Change| steps[own.size] > 0.0;
                let slow = points.iter().filter(|own| is_slow(own)).count();
                let beyond = |own: &&Change| {
                    let step = steps[own.size];
                    (own.change - step / 2.0) * step > 0.0
                };
                let beyond = points.iter().filter(beyond).count();
                // Slow visits are disturbances more often than steps.
                let visits =
                    1 + points.windows(2).filter(|two| two[0].visit != two[1].visit).count();
                let is_sure = slow == 0 && !at_end || visits >= SLOW_VISITS;
                let is_large =
                    points.iter().any(|own| steps[own.size].abs() * own.sd >= LEAST_STEP);
                let is_one = slow == 0 || slow == count;
                if !is_sure || !is_one || !is_large || 4 * beyond < 3 * count {
                    continue;
                }
                let evidence = |own: &Change| {
                    let (x, step) = (own.change, steps[own.size]);
                    ((x * x - (x - step).powi(2)) / 2.0).clamp(-POINT_EVIDENCE, POINT_EVIDENCE)
                };
                let sum: f64 = points.iter().map(evidence).sum();
                if sum > best.0 {
                    best = (sum, count);
                }
            }
            // What most of the others did, too, is no step of this one.
            let is_common = end[..best.1].last().is_some_and(|limit| {
                let is_there = |own: &Change| {
                    if at_end { own.seq >= limit.seq } else { own.seq <= limit.seq }
                };
                let others: Vec<f64> = all
                    .iter()
                    .filter(|(other, own)| *other != col && is_there(own))
                    .map(|(_, own)| own.change * limit.change.signum())
                    .collect();
                let changed = others.iter().filter(|change| **change > COMMON_Z).count();
                others.len() >= 2 && 2 * changed > others.len()
            });
            if best.1 > 0 && !is_common {
                let at = if at_end { series.len() - best.1 } else { best.1 };
                found.push((col, series[at].seq));
            }
        }
    }
    found
}

/// The most significant change of level of a series between stretches of at least `shortest`
/// values: where it begins and by how much.
pub(crate) fn step(values: &[f64], shortest: usize) -> Option<(usize, f64)> {
    step_above(values, shortest, STEP_Z)
}

/// As [`step`], with so many standard errors.
pub(crate) fn step_above(values: &[f64], shortest: usize, least_z: f64) -> Option<(usize, f64)> {
    let count = values.len();
    if count < 2 * shortest {
        return None;
    }
    // From differences of neighbours, which a step hardly touches.
    let differences: Vec<f64> = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let sd = (robust_sd(&differences, 0.0) / std::f64::consts::SQRT_2).max(1e-6);
    let center = median(&mut values.to_vec());
    let spread = robust_sd(values, center).max(sd);
    let clip = |value: f64| (value - center).clamp(-4.0 * spread, 4.0 * spread);
    let total: f64 = values.iter().map(|&value| clip(value)).sum();
    let mut before = 0.0;
    let mut best = (0.0, 0);
    for at in 1..count {
        before += clip(values[at - 1]);
        if at < shortest || count - at < shortest {
            continue;
        }
        let (left, right) = (at as f64, (count - at) as f64);
        let z = ((total - before) / right - before / left).abs()
            / (sd * (1.0 / left + 1.0 / right).sqrt());
        if z > best.0 {
            best = (z, at);
        }
    }
    let (z, at) = best;
    if z < least_z {
        return None;
    }
    let delta = median(&mut values[at..].to_vec()) - median(&mut values[..at].to_vec());
    (delta.abs() > LEAST_STEP && delta.abs() > 1.5 * sd).then_some((at, delta))
}
