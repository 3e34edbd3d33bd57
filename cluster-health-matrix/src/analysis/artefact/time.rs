//! What time did to everything, or to single devices: steps, drift, bursts.

use super::{LEAST, LEAST_Z};
use crate::analysis::Fitted;
use crate::analysis::finding::{Effect, Finding, Kind, Replicates};
use crate::analysis::fit::step;
use crate::analysis::table::Table;
use crate::stats::{median, robust_sd};

/// The level of all that was measured at some time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Level {
    pub(crate) seq: u32,
    /// Seconds since the first bind; NaN when not known.
    pub(crate) t_s: f64,
    /// Logarithm of the time against the rest of the run.
    pub(crate) value: f64,
}

/// What explains a series of levels.
#[derive(Debug, Clone, Default)]
pub(crate) struct Course {
    /// Where (by position) the level changed, by how much, with the standard error.
    pub(crate) steps: Vec<(usize, f64, f64)>,
    /// Change of the logarithm over the whole series, with its standard error.
    pub(crate) drift: Option<(f64, f64)>,
    pub(crate) bursts: Option<Bursts>,
    /// The level that all this gives at each position.
    pub(crate) model: Vec<f64>,
}

/// Windows in which everything was slower.
#[derive(Debug, Clone)]
pub(crate) struct Bursts {
    pub(crate) windows: Vec<std::ops::Range<usize>>,
    /// Logarithm of the time inside against outside, with its standard error.
    pub(crate) depth: f64,
    pub(crate) error: f64,
}

/// Share of what steps explain that a trend must explain to be preferred.
const TREND_SHARE: f64 = 0.7;
/// Fewest levels that a course is sought in.
const FEWEST: usize = 8;

impl Course {
    /// Steps, drift and bursts that change the level by at least `least`.
    pub(crate) fn of(levels: &[Level], least: f64) -> Self {
        let values: Vec<f64> = levels.iter().map(|level| level.value).collect();
        // Drift goes with time where it is known, else with the position.
        let timed = levels.iter().all(|level| level.t_s.is_finite());
        let times: Vec<f64> = levels
            .iter()
            .zip(0_u32..)
            .map(|(level, at)| if timed { level.t_s } else { f64::from(at) })
            .collect();
        Self::of_series(&values, &times, least)
    }

    fn of_series(values: &[f64], times: &[f64], least: f64) -> Self {
        let count = values.len();
        let mut course = Self { model: vec![0.0; count], ..Self::default() };
        if count < FEWEST {
            return course;
        }
        let differences: Vec<f64> = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let sd = (robust_sd(&differences, 0.0) / std::f64::consts::SQRT_2).max(1e-5);
        course.bursts = bursts(values, sd, least);
        let mut calm = vec![true; count];
        for window in course.bursts.iter().flat_map(|bursts| &bursts.windows) {
            calm[window.clone()].iter_mut().for_each(|calm| *calm = false);
        }
        let kept: Vec<usize> = (0..count).filter(|&at| calm[at]).collect();
        let series: Vec<(f64, f64)> = kept.iter().map(|&at| (times[at], values[at])).collect();
        let left = |cuts: &[usize], slope: f64| -> f64 {
            let levels = levels_with(&series, cuts, slope);
            series.iter().zip(&levels).map(|((_, value), level)| (value - level).abs()).sum()
        };
        // A slow trend looks like steps, and steps like a trend: whatever leaves less, where each
        // step is one more number that fits the noise.
        let trend = slope(&series, &[]);
        let (slope, cuts, _): (f64, Vec<usize>, f64) = [0.0, trend]
            .into_iter()
            .map(|trend| {
                let flat: Vec<f64> =
                    series.iter().map(|(time, value)| value - trend * time).collect();
                let mut cuts = Vec::new();
                cut(&flat, 0, 3, 3, &mut cuts);
                cuts.sort_unstable();
                let slope = slope(&series, &cuts);
                let cost = left(&cuts, slope) * (1.0 + 0.04 * cuts.len() as f64);
                (slope, cuts, cost)
            })
            .min_by(|a, b| a.2.total_cmp(&b.2))
            .unwrap_or_default();
        // Where the trend alone explains most of what steps do, it is the simpler word for it.
        let base = left(&[], 0.0);
        let explains = base - left(&[], trend) > TREND_SHARE * (base - left(&cuts, slope));
        let (slope, cuts) = if explains { (trend, Vec::new()) } else { (slope, cuts) };
        let range = |part: std::ops::Range<usize>| series[part.end - 1].0 - series[part.start].0;
        let longest = segments(series.len(), &cuts)
            .max_by(|a, b| range(a.clone()).total_cmp(&range(b.clone())))
            .unwrap_or(0..series.len());
        let all = range(0..series.len());
        // Of a line through the longest stretch, with noise that neighbours share a little.
        let error = 2.0 * sd * 12.0_f64.sqrt() / (longest.len() as f64).sqrt() * all
            / range(longest).max(1e-9);
        let total = slope * all;
        let drifts = total.abs() > least && total.abs() > LEAST_Z * error;
        let slope = if drifts { slope } else { 0.0 };
        course.drift = drifts.then_some((total, error));
        let model = levels_with(&series, &cuts, slope);
        for (place, &at) in cuts.iter().enumerate() {
            let before = if place == 0 { 0 } else { cuts[place - 1] };
            let after = cuts.get(place + 1).copied().unwrap_or(series.len());
            let delta = model[at] - model[at - 1] - slope * (series[at].0 - series[at - 1].0);
            let error = 1.25 * sd * (1.0 / (at - before) as f64 + 1.0 / (after - at) as f64).sqrt();
            if delta.abs() > least && delta.abs() > LEAST_Z * error {
                course.steps.push((kept[at], delta, error));
            }
        }
        let mut next = 0;
        for at in 0..count {
            while next + 1 < kept.len() && kept[next + 1] <= at {
                next += 1;
            }
            course.model[at] = model.get(next).copied().unwrap_or(0.0);
        }
        course
    }
}

/// Adds the steps of values that begin at `first`, at most `most` deep.
fn cut(values: &[f64], first: usize, most: usize, shortest: usize, cuts: &mut Vec<usize>) {
    if most == 0 {
        return;
    }
    if let Some((at, _)) = step(values, shortest) {
        cuts.push(first + at);
        cut(&values[..at], first, most - 1, shortest, cuts);
        cut(&values[at..], first + at, most - 1, shortest, cuts);
    }
}

fn segments(count: usize, cuts: &[usize]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain(std::iter::once(count));
    starts.zip(ends).map(|(start, end)| start..end)
}

/// The level of each (time, value), given steps and a slope.
fn levels_with(series: &[(f64, f64)], cuts: &[usize], slope: f64) -> Vec<f64> {
    let mut levels = Vec::with_capacity(series.len());
    for segment in segments(series.len(), cuts) {
        let part = &series[segment];
        let mut flat: Vec<f64> = part.iter().map(|(time, value)| value - slope * time).collect();
        let level = median(&mut flat);
        levels.extend(part.iter().map(|(time, _)| level + slope * time));
    }
    levels
}

/// Change with time inside the stretches between cuts: the median of the slopes between the
/// levels of their parts (Theil and Sen).
fn slope(series: &[(f64, f64)], cuts: &[usize]) -> f64 {
    let width = (series.len() / 64).max(1);
    let mut slopes = Vec::new();
    for segment in segments(series.len(), cuts) {
        let parts: Vec<(f64, f64)> = series[segment]
            .chunks(width)
            .map(|chunk| {
                (
                    median(&mut chunk.iter().map(|(time, _)| *time).collect::<Vec<_>>()),
                    median(&mut chunk.iter().map(|(_, value)| *value).collect::<Vec<_>>()),
                )
            })
            .collect();
        for (at, a) in parts.iter().enumerate() {
            let later = parts[at + 1..].iter().filter(|b| b.0 > a.0);
            slopes.extend(later.map(|b| (b.1 - a.1) / (b.0 - a.0)));
        }
    }
    let slope = median(&mut slopes);
    if slope.is_nan() { 0.0 } else { slope }
}

/// Most of the time that bursts may take, or they are the rule.
const MOST_BURSTS: f64 = 0.4;

fn bursts(values: &[f64], sd: f64, least: f64) -> Option<Bursts> {
    let count = values.len();
    // Steps for long are no bursts, and a running median is wrong beside them.
    let mut cuts = Vec::new();
    cut(values, 0, 2, (count / 8).max(3), &mut cuts);
    cuts.sort_unstable();
    let flat: Vec<f64> = segments(count, &cuts)
        .flat_map(|segment| {
            let level = median(&mut values[segment.clone()].to_vec());
            values[segment].iter().map(move |value| value - level)
        })
        .collect();
    let values = flat.as_slice();
    let half = (count / 10).max(7);
    let stride = (half / 8).max(1);
    let base: Vec<f64> = (0..count)
        .step_by(stride)
        .map(|at| median(&mut values[at.saturating_sub(half)..(at + half + 1).min(count)].to_vec()))
        .collect();
    let above: Vec<f64> =
        values.iter().enumerate().map(|(at, value)| value - base[at / stride]).collect();
    let mut slow = vec![false; count];
    for width in [1, 3, 9] {
        let threshold = (5.0 * sd / (width as f64).sqrt()).max(1.5 * least);
        for start in 0..(count + 1).saturating_sub(width) {
            let window = &above[start..start + width];
            let clipped: f64 = window.iter().map(|value| value.min(6.0 * sd)).sum();
            let share = window.iter().filter(|value| **value > threshold / 2.0).count() as f64;
            if clipped / width as f64 > threshold && share >= 0.7 * width as f64 {
                slow[start..start + width].iter_mut().for_each(|slow| *slow = true);
            }
        }
    }
    let mut windows: Vec<std::ops::Range<usize>> = Vec::new();
    for at in (0..count).filter(|&at| slow[at]) {
        match windows.last_mut() {
            Some(window) if window.end == at => window.end = at + 1,
            _ => windows.push(at..at + 1),
        }
    }
    // Alone it is a dip.
    windows.retain(|window| window.len() >= 2);
    let inside: usize = windows.iter().map(ExactSizeIterator::len).sum();
    if windows.len() < 2 || inside as f64 > MOST_BURSTS * count as f64 {
        return None;
    }
    let mut depths: Vec<f64> =
        windows.iter().flat_map(|window| &above[window.clone()]).copied().collect();
    let depth = median(&mut depths);
    let error = 1.25 * sd / (inside as f64).sqrt();
    (depth > least && depth > LEAST_Z * error).then_some(Bursts { windows, depth, error })
}

/// Artefacts of time of a run in randomised blocks.
pub(super) fn find(fitted: &Fitted) -> Vec<Finding> {
    let table = &fitted.table;
    let levels = levels_of(fitted);
    let mut found = Vec::new();
    let mut additive: Vec<(u32, Vec<u32>, f64)> = Vec::new();
    let last = table.obs.last().map_or(0, |obs| obs.seq);
    // The points of a device before and after a change are a visit apart.
    let visit = if table.sweep.is_pair() { 0 } else { table.cols.len() * (table.sizes.len() + 1) };
    let apart = (last / 50).max(u32::try_from(visit).unwrap_or(0));
    let near = |a: u32, b: u32| a.abs_diff(b) <= apart;
    for cost in &fitted.additive {
        let device = cost.col.map(|col| table.cols.ids[col]);
        let same = additive.iter_mut().find(|(seq, devices, ns)| {
            near(*seq, cost.seq)
                && devices.is_empty() == device.is_none()
                && (*ns - cost.ns).abs() < 0.3 * ns.abs()
        });
        match same {
            Some((_, devices, _)) => devices.extend(device),
            None => additive.push((cost.seq, device.into_iter().collect(), cost.ns)),
        }
    }
    for (seq, mut devices, ns) in additive {
        devices.sort_unstable();
        devices.dedup();
        let mut finding = step_finding(table, seq);
        finding.devices = devices;
        finding.extra_us = Some(ns / 1e3);
        finding.scales_with_bytes = Some(false);
        finding.facts.push(format!(
            "every transfer takes {:+.1} µs from there on, the same at all sizes",
            ns / 1e3
        ));
        found.push(finding);
    }
    let course = Course::of(&levels, LEAST);
    found.extend(findings(table, &levels, &course));
    found.extend(device_steps(fitted, near));
    found
}

/// The level of each visit, or of a few pairs, without rows, columns and classes.
fn levels_of(fitted: &Fitted) -> Vec<Level> {
    let table = &fitted.table;
    let mut points: Vec<Level> = Vec::with_capacity(table.obs.len());
    let mut visits: Vec<u32> = Vec::with_capacity(table.obs.len());
    let mut all: Vec<(u32, f64, u32)> = Vec::with_capacity(table.obs.len());
    // A cost per transfer weighs more in small ones: of pairs, which mix the sizes, only one.
    let fits = fitted.fits.iter().rev().flatten();
    for fit in fits.take(if table.sweep.is_pair() { 1 } else { usize::MAX }) {
        for &at in &fit.which {
            let obs = &table.obs[at as usize];
            // Of a sample later blocks visit what looks slow, and are not slow for when that was.
            if !obs.is_block() || fit.sampled.is_some() && obs.block > 0 {
                continue;
            }
            let (row, col) = (usize::from(obs.row), usize::from(obs.col));
            let steps = fit.steps(col, obs.seq);
            let class = fit.class[table.kinship(row, col) as usize];
            all.push((
                at,
                f64::from(obs.ln) - fit.mu - fit.row[row] - fit.col[col] - class - steps,
                obs.visit,
            ));
        }
    }
    all.sort_unstable_by_key(|(at, ..)| *at);
    for (at, value, visit) in all {
        let obs = &table.obs[at as usize];
        points.push(Level { seq: obs.seq, t_s: f64::from(obs.t_s), value });
        visits.push(visit);
    }
    let is_pair = table.sweep.is_pair();
    let width = match points.len() {
        0..=400 => 1,
        401..=4000 => 4,
        _ => 8,
    };
    let mut levels = Vec::new();
    let mut start = 0;
    for at in 1..=points.len() {
        let ends = at == points.len()
            || if is_pair { at - start == width } else { visits[at] != visits[start] };
        if ends {
            let mut values: Vec<f64> = points[start..at].iter().map(|level| level.value).collect();
            levels.push(Level { value: median(&mut values), ..points[start] });
            start = at;
        }
    }
    levels
}

pub(crate) fn effect(delta: f64, error: f64) -> Effect {
    Effect {
        ratio: (-delta).exp(),
        low: (-delta - 1.96 * error).exp(),
        high: (-delta + 1.96 * error).exp(),
    }
}

/// The finding of a step without its size.
pub(crate) fn step_finding(table: &Table, seq: u32) -> Finding {
    let mut finding = Finding::new(Kind::TimeStep, Some(table.sweep), Some(&table.load));
    let last = table.obs.last().map_or(0, |obs| obs.seq);
    let t_s = table.obs.iter().find(|obs| obs.seq >= seq).map_or(f32::NAN, |obs| obs.t_s);
    let seconds =
        if t_s.is_finite() { format!(", {t_s:.3} s after the start") } else { String::new() };
    finding.facts.push(format!(
        "it changes at point {seq} of {}, {:.1} % of the run{seconds}",
        u64::from(last) + 1,
        100.0 * f64::from(seq) / f64::from(last.max(1))
    ));
    finding.inference =
        "Something happened at that time: what was measured before and after is not \
                         comparable, and no core or device differs because of it."
            .to_owned();
    finding.next = "Look what began then (another process, clocks, thermal limits: dmesg, device \
                    logs); measure again when it is over."
        .to_owned();
    finding
}

/// Findings of a course of everything.
pub(crate) fn findings(table: &Table, levels: &[Level], course: &Course) -> Vec<Finding> {
    let mut found = Vec::new();
    for &(at, delta, error) in &course.steps {
        let mut finding = step_finding(table, levels[at].seq);
        finding.effect = Some(effect(delta, error));
        finding.facts.push(format!("all rates × {:.3} from there on", (-delta).exp()));
        found.push(finding);
    }
    if let (Some((total, error)), Some(first), Some(last)) =
        (course.drift, levels.first(), levels.last())
    {
        let mut finding = Finding::new(Kind::Drift, Some(table.sweep), Some(&table.load));
        finding.effect = Some(effect(total, error));
        let percent = |total: f64| 100.0 * ((-total).exp() - 1.0);
        finding.facts.push(format!(
            "rates change by {:+.2} % over the run (95 % interval {:+.2} to {:+.2} %)",
            percent(total),
            percent(total + 1.96 * error),
            percent(total - 1.96 * error)
        ));
        let hours = (last.t_s - first.t_s) / 3600.0;
        if hours > 0.0 {
            finding.facts.push(format!(
                "{:+.2} % per hour (95 % interval {:+.2} to {:+.2}), as a logarithm",
                -100.0 * total / hours,
                -100.0 * (total + 1.96 * error) / hours,
                -100.0 * (total - 1.96 * error) / hours
            ));
        }
        finding.inference = "Everything becomes slower or faster together, slowly: temperature, \
                             clocks or a growing load, not single cores or devices."
            .to_owned();
        finding.next =
            "Watch temperature and clocks during the run; let the machine reach a steady \
                        state first; keep randomised blocks (--repeats 3)."
                .to_owned();
        found.push(finding);
    }
    if let Some(bursts) = &course.bursts {
        found.push(burst_finding(table, levels, bursts));
    }
    found
}

/// The finding of bursts in these levels.
pub(crate) fn burst_finding(table: &Table, levels: &[Level], bursts: &Bursts) -> Finding {
    let mut finding = Finding::new(Kind::Burst, Some(table.sweep), Some(&table.load));
    finding.effect = Some(effect(bursts.depth, bursts.error));
    let windows = &bursts.windows;
    let inside: usize = windows.iter().map(ExactSizeIterator::len).sum();
    finding.replicates = Some(Replicates {
        seen: u32::try_from(windows.len()).unwrap_or(u32::MAX),
        of: u32::try_from(windows.len()).unwrap_or(u32::MAX),
    });
    finding.facts.push(format!(
        "{} windows with {:.1} % of the points, in which rates are × {:.3}; the first from point {}",
        windows.len(),
        100.0 * inside as f64 / levels.len() as f64,
        (-bursts.depth).exp(),
        levels[windows[0].start].seq
    ));
    let mut distances: Vec<f64> = windows
        .windows(2)
        .map(|pair| levels[pair[1].start].t_s - levels[pair[0].start].t_s)
        .collect();
    let distance = median(&mut distances);
    if distance > 0.0 {
        finding.facts.push(format!("{distance:.3} s from one to the next, in the middle"));
    }
    finding.inference = "Something takes part of the machine for short times, again and again: \
                         another process, a timer, housekeeping. It hits whatever is measured then."
        .to_owned();
    finding.next =
        "Look for periodic jobs (cron, monitoring, health checks) and stop them for the \
                    measurement; more blocks (--repeats) average what remains."
            .to_owned();
    finding
}

/// Steps of single devices, those of one time and size together.
fn device_steps(fitted: &Fitted, near: impl Fn(u32, u32) -> bool) -> Vec<Finding> {
    struct Found {
        seq: u32,
        devices: Vec<u32>,
        /// Logarithm of the time and its error by size.
        deltas: Vec<Option<(f64, f64)>>,
    }
    let table = &fitted.table;
    // Each device on its own: a cost per transfer differs between the sizes.
    let mut single: Vec<Found> = Vec::new();
    for (size, fit) in fitted.fits.iter().enumerate() {
        let Some(fit) = fit else { continue };
        let per_col = fit.which.len() as f64 / table.cols.len().max(1) as f64;
        let error = 1.25 * fit.point_sd * (4.0 / per_col.max(1.0)).sqrt();
        for step in &fit.steps {
            if step.delta.abs() < LEAST.max(LEAST_Z * error) {
                continue;
            }
            let devices = vec![table.cols.ids[step.col]];
            let known = single
                .iter_mut()
                .find(|known| known.devices == devices && near(known.seq, step.seq));
            let delta = Some((step.delta, error));
            match known {
                Some(known) => known.deltas[size] = delta,
                None => {
                    let mut deltas = vec![None; fitted.fits.len()];
                    deltas[size] = delta;
                    single.push(Found { seq: step.seq, devices, deltas });
                }
            }
        }
    }
    let sizes = fitted.fits.iter().flatten().count();
    // What changes a device's rate does so at more than one size.
    single.retain(|step| {
        let deltas = || step.deltas.iter().flatten();
        let slower = deltas().filter(|(delta, _)| *delta > 0.0).count();
        sizes < 2 || deltas().count() > 1 && (slower == 0 || slower == deltas().count())
    });
    let mut found: Vec<Found> = Vec::new();
    for step in single {
        let same = found.iter_mut().find(|known| {
            let mut both = known.deltas.iter().zip(&step.deltas);
            near(known.seq, step.seq)
                && both.all(|(a, b)| match (a, b) {
                    (Some((a, error)), Some((b, _))) => {
                        (a - b).abs() < (0.3 * a.abs()).max(LEAST_Z * error)
                    }
                    _ => true,
                })
        });
        match same {
            Some(known) => known.devices.extend(step.devices),
            None => found.push(step),
        }
    }
    let describe = |mut step: Found| {
        step.devices.sort_unstable();
        step.devices.dedup();
        let mut finding = step_finding(table, step.seq);
        finding.devices = step.devices;
        let by_size = step.deltas.iter().zip(&table.sizes);
        for (&(delta, error), bytes) in
            by_size.filter_map(|(delta, size)| delta.as_ref().zip(Some(size)))
        {
            // The largest size is the one that is reported.
            finding.effect = Some(effect(delta, error));
            finding.facts.push(format!(
                "rates of these devices × {:.3} from there on, at {bytes}",
                (-delta).exp()
            ));
        }
        finding
    };
    found.into_iter().map(describe).collect()
}
