//! From suspicions and the visits that confirmed them to findings.

use std::collections::{BTreeSet, VecDeque};

use cluster_health_core::ByteSize;

use super::confirm::{Estimate, ROUNDS, ROUNDS_SEEN, SizeView, rest_times};
use super::finding::{Effect, Finding, Kind, Replicates, names, sorted};
use super::fit::Fit;
use super::suspect::{
    AxisLevels, LEAST_NODE, Residuals, Shape, Suspect, axis_levels, has_rectangles, normal_tail,
    residuals, rests,
};
use super::table::{Kinship, Obs, Table};
use super::{later, whole_nodes};
use crate::samples::Sweep;
use crate::stats::median;
use crate::student::holm;

/// Family-wise error of all structural findings of a run.
const FAMILY_WISE_ERROR: f64 = 0.001;

/// Rectangles of so many cells, and nodes of so many CPUs, are looked at one by one when they are not confirmed.
const MOST_CELLS: usize = 16;

/// A confirmed shape.
#[derive(Debug, Clone)]
pub(super) struct Confirmed {
    pub(super) shape: Shape,
    /// By size, where it was confirmed.
    pub(super) by_size: Vec<Option<Estimate>>,
    /// Position of the size that is reported.
    pub(super) size: usize,
    /// What its effect had to exceed.
    pub(super) threshold: f64,
}

/// An effect is so many of its standard errors, the differences of healthy lines included.
const LEAST_OF_ERROR: f64 = 1.5;

/// Logarithm of the odds at which a size contradicts a member.
const CONTRADICTS: f64 = -5.0;

/// Gives a rectangle the rows and columns that its effect, as the confirming visits saw it, explains
/// better than chance in the blocks of all sizes. A single cell stays one.
fn refine(
    shape: &mut Shape,
    all: [usize; 2],
    rests: &[Option<Residuals>],
    effects: &[Option<Estimate>],
) {
    let Shape::Block { rows, cols } = shape else { return };
    if rows.len() * cols.len() == 1 {
        return;
    }
    let known: Vec<(&Residuals, f64)> = rests
        .iter()
        .zip(effects)
        .filter_map(|(rest, effect)| Some((rest.as_ref()?, effect.as_ref()?.effect)))
        .filter(|(_, effect)| *effect > 0.0)
        .collect();
    if known.is_empty() {
        return;
    }
    // Logarithm of how much more likely a line is a member than none.
    let evidence = |axis: usize, line: usize, across: &[usize]| -> f64 {
        let by_size = known.iter().map(|(rest, effect)| {
            let cells = across
                .iter()
                .map(|&at| if axis == 0 { rest.at(line, at) } else { rest.at(at, line) });
            let limit = effect + 4.0 * rest.se;
            cells
                .filter(|value| value.is_finite())
                // A dip counts as a member at most.
                .map(|value| value.clamp(-limit, limit))
                .map(|value| effect * (value - effect / 2.0) / (rest.se * rest.se))
                .sum::<f64>()
        });
        // What one size contradicts was a disturbance at the other.
        by_size.fold(0.0, |sum, one| if one < CONTRADICTS { f64::NEG_INFINITY } else { sum + one })
    };
    for _ in 0..2 {
        for axis in [0, 1] {
            let (members, across) = if axis == 0 { (&*rows, &*cols) } else { (&*cols, &*rows) };
            let odds = ((all[axis] - members.len()) as f64 / members.len() as f64).max(1.0);
            let chosen: Vec<usize> =
                (0..all[axis]).filter(|&line| evidence(axis, line, across) > odds.ln()).collect();
            if chosen.is_empty() || chosen.len() == all[axis] {
                return;
            }
            if axis == 0 {
                *rows = chosen;
            } else {
                *cols = chosen;
            }
        }
    }
}

/// A fit whose cells were all visited: of the others there is nothing to be said one by one.
fn whole(fit: &Option<Fit>) -> Option<&Fit> {
    fit.as_ref().filter(|fit| fit.sampled.is_none())
}

/// Findings of a table whose suspects were visited again, and suspects that nobody visited.
pub(crate) fn confirmed(
    table: &Table,
    fits: &[Option<Fit>],
    suspects: &[Suspect],
    min_effect: f64,
) -> (Vec<Finding>, Vec<Suspect>) {
    let mut tested: Vec<(f64, Confirmed)> = Vec::new();
    let mut unvisited = Vec::new();
    let mut doubtful = Vec::new();
    let rests: Vec<Option<Residuals>> =
        fits.iter().map(|fit| Some(residuals(table, whole(fit)?))).collect();
    let levels: Vec<Option<[AxisLevels; 2]>> = fits
        .iter()
        .map(|fit| {
            let fit = fit.as_ref()?;
            Some([0, 1].map(|axis| axis_levels(table, fit, axis, min_effect)))
        })
        .collect();
    // Of all points, so once.
    let times: Vec<Option<(f64, f64)>> = fits
        .iter()
        .map(|fit| fit.as_ref().filter(|_| !suspects.is_empty()).map(|fit| rest_times(table, fit)))
        .collect();
    let mut left: VecDeque<Suspect> = suspects.iter().cloned().collect();
    while let Some(mut suspect) = left.pop_front() {
        let views = || {
            fits.iter().zip(&levels).zip(&times).map(|((fit, levels), times)| {
                let (fit, levels, rest_times) = (fit.as_ref()?, levels.as_ref()?, (*times)?);
                Some(SizeView { table, fit, levels, suspects, rest_times })
            })
        };
        let whole = suspect.shape.clone();
        // What only chance had added to a rectangle shows nothing now.
        if let Some(view) = views().nth(suspect.size).flatten() {
            view.prune(&mut suspect.shape);
        }
        if matches!(suspect.shape, Shape::Block { .. }) {
            let effects: Vec<Option<Estimate>> =
                views().map(|view| view?.estimate(&suspect.shape)).collect();
            refine(&mut suspect.shape, table.shape(), &rests, &effects);
            if let Some(view) = views().nth(suspect.size).flatten() {
                view.prune(&mut suspect.shape);
            }
            // Slow cells that are no part of it may be slow on their own; one visit of a sample is too
            // little for that.
            if let (Shape::Block { rows, cols }, Some(Some(rest))) =
                (&whole, rests.get(suspect.size))
            {
                let least = min_effect.max(4.0 * rest.se);
                for (&row, &col) in
                    rows.iter().flat_map(|row| cols.iter().map(move |col| (row, col)))
                {
                    let is_left = !table.sampled && !suspect.shape.has(table, row, col);
                    if rest.at(row, col) > least && is_left {
                        let shape = Shape::Block { rows: vec![row], cols: vec![col] };
                        let effect = rest.at(row, col);
                        left.push_back(Suspect { shape, effect, size: suspect.size });
                    }
                }
            }
        }
        // Few visits let two suspicions of one rectangle grow apart.
        let is_known = |other: &Shape| {
            *other == suspect.shape || table.sampled && is_same(other, &suspect.shape)
        };
        if tested.iter().any(|(_, other)| is_known(&other.shape)) {
            continue;
        }
        let mut by_size: Vec<Option<Estimate>> =
            views().map(|view| view?.estimate(&suspect.shape)).collect();
        reconcile(table, &mut by_size);
        let thresholds = |size: usize| {
            let Some(Some(levels)) = levels.get(size) else {
                return (f64::INFINITY, f64::INFINITY);
            };
            thresholds_of(&suspect.shape, &|axis| levels[axis].clone(), min_effect)
        };
        // Of a sample the levels of rows and columns are not known well, and those of a few cells are
        // levels of few points.
        let knows_levels = !table.sampled && !matches!(suspect.shape, Shape::Block { .. });
        let error_of = |estimate: Estimate| if knows_levels { estimate.noise } else { estimate.se };
        // The largest size at which it shows.
        let shows = |size: usize| {
            by_size[size].is_some_and(|estimate| {
                let signed = match suspect.shape {
                    Shape::Lines { node: Some(_), .. } => estimate.effect.abs(),
                    _ => estimate.effect,
                };
                let (threshold, bound) = thresholds(size);
                let error = error_of(estimate);
                !estimate.unsettled
                    && signed > LEAST_OF_ERROR * estimate.se
                    && signed > threshold
                    && signed - 2.0 * error > bound
                    && estimate.seen >= needed(estimate.of)
            })
        };
        let contradicts = |size: usize| {
            matches!(suspect.shape, Shape::Block { .. })
                && (0..size).any(|smaller| is_contradicted(table, &by_size, smaller, size))
        };
        let Some(largest) = (0..by_size.len()).rev().find(|&size| by_size[size].is_some()) else {
            if suspects.contains(&suspect) {
                unvisited.push(suspect);
            }
            continue;
        };
        // Of a sample the size that raised the suspicion is known best: without it there is none.
        let is_refuted = table.sampled
            && by_size[suspect.size].is_some_and(|own| own.effect.abs() < 0.5 * min_effect);
        let shown = (0..by_size.len()).rev().find(|&size| !is_refuted && shows(size));
        let is_contradicted = shown.is_some_and(contradicts);
        let size = shown.filter(|_| !is_contradicted);
        // Once it is sure at one size, the largest one at which it is no trifle is reported.
        let size = size.map(|size| {
            let sign = by_size[size].map_or(0.0, |estimate| estimate.effect.signum());
            let counts = |other: &usize| {
                by_size[*other].is_some_and(|estimate| sign * estimate.effect > min_effect)
            };
            (size..by_size.len()).rev().find(counts).unwrap_or(size)
        });
        let p = by_size
            .iter()
            .flatten()
            .map(|&estimate| 2.0 * normal_tail(estimate.effect.abs() / error_of(estimate)))
            .fold(1.0, f64::min);
        // Every size is a try of its own.
        let p = (p * by_size.iter().flatten().count() as f64).min(1.0);
        if is_contradicted && p < FAMILY_WISE_ERROR {
            doubtful.push((suspect.shape.clone(), by_size.clone()));
        }
        let Some(size) = size else {
            // Few CPUs or cells of it may be slow, for which it is not.
            if let Shape::Lines { axis, members, node: Some(_) } = &suspect.shape
                && members.len() <= MOST_CELLS
            {
                for &member in members {
                    let shape = Shape::Lines { axis: *axis, members: vec![member], node: None };
                    left.push_back(Suspect { shape, ..suspect.clone() });
                }
            }
            if let Shape::Block { rows, cols } = &suspect.shape
                && !is_contradicted
                && (2..=MOST_CELLS).contains(&(rows.len() * cols.len()))
            {
                for (&row, &col) in
                    rows.iter().flat_map(|row| cols.iter().map(move |col| (row, col)))
                {
                    let shape = Shape::Block { rows: vec![row], cols: vec![col] };
                    left.push_back(Suspect { shape, ..suspect.clone() });
                }
            }
            // It was tested, and counts among the candidates.
            let confirmed = Confirmed {
                shape: suspect.shape.clone(),
                by_size,
                size: largest,
                threshold: f64::INFINITY,
            };
            tested.push((p, confirmed));
            continue;
        };
        let (threshold, _) = thresholds(size);
        tested.push((p, Confirmed { shape: suspect.shape.clone(), by_size, size, threshold }));
    }
    let passed = holm(&tested.iter().map(|(p, _)| *p).collect::<Vec<f64>>(), FAMILY_WISE_ERROR);
    let mut found: Vec<Confirmed> = tested
        .into_iter()
        .zip(passed)
        .filter(|((_, confirmed), passed)| *passed && confirmed.threshold.is_finite())
        .map(|((_, confirmed), _)| confirmed)
        .collect();
    absorb(&mut found);
    let middle = |size: usize, axis: usize, mates: &[usize]| -> Option<f64> {
        let (fit, levels) = (fits.get(size)?.as_ref()?, levels.get(size)?.as_ref()?);
        let level = if axis == 0 { &fit.row } else { &fit.col };
        let present = mates.iter().filter(|&&at| levels[axis].level[at].is_finite());
        let mut mates: Vec<f64> = present.map(|&at| level[at] - levels[axis].center).collect();
        (mates.len() >= LEAST_NODE - 1).then(|| median(&mut mates))
    };
    whole_nodes::leave_to_nodes(table, &mut found, &middle);
    let shapes: Vec<Shape> = found.iter().map(|confirmed| confirmed.shape.clone()).collect();
    found.retain(|confirmed| !shapes.iter().any(|other| is_part(&confirmed.shape, other)));
    found.sort_by_key(|confirmed| order(&confirmed.shape));
    let mut findings = Vec::new();
    let spread = [0, 1]
        .map(|axis| levels.iter().rev().flatten().next().map_or(0.0, |levels| levels[axis].spread));
    let mut groups = group(found, spread);
    whole_nodes::make_nodes(table, &mut groups, spread);
    for mut group in groups {
        findings.extend(later::take_out_steps(table, fits, suspects, &mut group, min_effect));
        join(&mut group, &mut unvisited);
        findings.extend(describe(table, fits, &group));
    }
    doubt_topology(&mut findings);
    findings.extend(doubts(table, &doubtful));
    (findings, unvisited)
}

/// Cells that were slow at one size and not at a smaller one: no findings, but not nothing.
fn doubts(table: &Table, doubtful: &[(Shape, Vec<Option<Estimate>>)]) -> Option<Finding> {
    if doubtful.is_empty() {
        return None;
    }
    let mut finding = Finding::new(Kind::Inconclusive, Some(table.sweep), Some(&table.load));
    for (shape, by_size) in doubtful.iter().take(20) {
        let sizes: Vec<String> = by_size
            .iter()
            .zip(&table.sizes)
            .filter_map(|(estimate, bytes)| {
                let Estimate { effect, seen, of, .. } = (*estimate)?;
                let percent = 100.0 * (effect.exp() - 1.0);
                Some(format!("{percent:+.1} % at {bytes} (seen in {seen} of {of} visits)"))
            })
            .collect();
        finding.facts.push(format!(
            "{}: {} of the rest's time",
            name(table, shape),
            sizes.join(", ")
        ));
    }
    finding.inference =
        "What a path costs shows in smaller transfers, too: these were disturbed, or \
                         larger transfers take another way."
            .to_owned();
    finding.next = "Measure these cells again with --cpus, --devices and more --sizes.".to_owned();
    Some(finding)
}

/// CPUs that are not as the rest of their own node but exactly as another node: the topology that the
/// kernel tells may be wrong, as in virtual machines.
fn doubt_topology(findings: &mut [Finding]) {
    let lists = |finding: &Finding| {
        [&finding.cpus, &finding.rank0_cpus, &finding.rank1_cpus].map(Clone::clone)
    };
    let nodes: Vec<Finding> =
        findings.iter().filter(|finding| finding.kind == Kind::NumaEffect).cloned().collect();
    for finding in findings.iter_mut() {
        let is_lines =
            matches!(finding.kind, Kind::SlowCore | Kind::SlowRank0Core | Kind::SlowRank1Core);
        let Some(own) = finding.effect.filter(|_| is_lines) else { continue };
        let is_as = |node: &&Finding| {
            // Of the same axis, and none of them is in the node itself.
            let are_others = lists(node).iter().zip(lists(finding)).all(|(node, cpus)| {
                node.is_empty() == cpus.is_empty() && !cpus.iter().any(|cpu| node.contains(cpu))
            });
            are_others && node.effect.is_some_and(|node| own.low < node.high && node.low < own.high)
        };
        let Some(node) = nodes.iter().find(is_as) else { continue };
        let numbers: Vec<String> = node.numa_nodes.iter().map(u32::to_string).collect();
        finding.facts.push(format!(
            "these CPUs are not of NUMA node {} by the kernel's topology, but have its rate",
            numbers.join(",")
        ));
    }
}

/// Single lines that were not visited again, because there were too many or the blocks alone made
/// them suspicious only now, are members of a confirmed group that has their effect.
fn join(group: &mut Vec<Confirmed>, unvisited: &mut Vec<Suspect>) {
    let Some(first) = group.first().cloned() else { return };
    let Shape::Lines { axis, node: None, .. } = first.shape else { return };
    unvisited.retain(|suspect| {
        let Shape::Lines { axis: own, node: None, .. } = suspect.shape else { return true };
        let Some(Some(estimate)) = first.by_size.get(suspect.size) else { return true };
        let near = (estimate.effect - suspect.effect).abs();
        let joins = own == axis
            && suspect.effect > first.threshold
            && near <= 0.015_f64.max(0.2 * estimate.effect);
        if joins {
            let by_size = vec![None; first.by_size.len()];
            let (shape, threshold) = (suspect.shape.clone(), first.threshold);
            group.push(Confirmed { shape, by_size, size: 0, threshold });
        }
        !joins
    });
}

/// Standard errors by which a smaller size contradicts a larger one.
const CONTRADICTED_Z: f64 = 5.0;

/// True where a smaller size does not have even the part of a larger one's extra time that grows with the
/// bytes: what a path costs, large transfers pay and small ones do too, each by its bytes at least. What
/// one size alone shows of a few cells was a disturbance.
fn is_contradicted(
    table: &Table,
    by_size: &[Option<Estimate>],
    smaller: usize,
    size: usize,
) -> bool {
    let (Some(small), Some(large)) = (by_size[smaller], by_size[size]) else { return false };
    if large.effect <= 0.0 {
        return false;
    }
    let part = table.sizes[smaller].bytes() as f64 / table.sizes[size].bytes() as f64;
    let expected = (extra_ns(&large) * part / small.rest_ns).ln_1p();
    let error = small.se.hypot(large.se * expected / large.effect);
    small.effect < 0.2 * expected && expected - small.effect > CONTRADICTED_Z * error
}

/// Largest disagreement of two sizes with one explanation of both, squared standard errors.
const AGREE: f64 = 6.0;

/// Where one cost per byte, or one per transfer, explains the smallest and the largest size, both
/// sizes tell it together, and better than each alone.
fn reconcile(table: &Table, by_size: &mut [Option<Estimate>]) {
    let mut present = by_size.iter().enumerate().filter_map(|(size, e)| Some((size, (*e)?)));
    let (Some((first, small)), Some((last, large))) = (present.next(), present.next_back()) else {
        return;
    };
    let ratio = table.sizes[first].bytes() as f64 / table.sizes[last].bytes() as f64;
    let error = |e: &Estimate| e.rest_ns * e.effect.exp() * e.noise;
    // As costs of the largest size: a cost per byte and one per transfer.
    let explain = |scale: f64| {
        let (low, low_error) = (extra_ns(&small) / scale, error(&small) / scale);
        let (high, high_error) = (extra_ns(&large), error(&large));
        let (low_weight, high_weight) = (low_error.powi(-2), high_error.powi(-2));
        let both = (low * low_weight + high * high_weight) / (low_weight + high_weight);
        let misfit = (low - high).powi(2) / (low_error.powi(2) + high_error.powi(2));
        (misfit, both)
    };
    let (grows, fixed) = (explain(ratio), explain(1.0));
    let (scale, (misfit, extra)) = if grows.0 < fixed.0 { (ratio, grows) } else { (1.0, fixed) };
    if misfit > AGREE {
        return;
    }
    for (size, scale) in [(first, scale), (last, 1.0)] {
        let Some(estimate) = &mut by_size[size] else { continue };
        let share = (extra * scale / estimate.rest_ns).max(-0.9);
        // The sizes of one visit share its noise: the errors stay as they are.
        estimate.effect = share.ln_1p();
    }
}

/// Visits that must show the effect: all but one of all rounds, else all of them, at least two.
///
/// Written without branches: rustc 1.95 with optimisation takes `if of >= 6 { 5 } else { of.max(2) }` for
/// `of.max(2)`.
fn needed(of: usize) -> usize {
    of.max(2) - usize::from(of >= ROUNDS) * (ROUNDS - ROUNDS_SEEN)
}

/// What an effect must exceed, and what the lower end of its interval must: the smallest effect that
/// is a fault, and what healthy lines of this axis differ by.
fn thresholds_of(
    shape: &Shape,
    levels: &dyn Fn(usize) -> AxisLevels,
    min_effect: f64,
) -> (f64, f64) {
    match shape {
        Shape::Lines { axis, members, node } => {
            let levels = levels(*axis);
            if node.is_some() {
                let cores = (members.len() as f64 / 2.0).max(1.0).sqrt();
                let threshold = min_effect.max(2.8 * levels.spread / cores);
                (threshold, min_effect.max(HEALTHY_RANGE * levels.spread / cores))
            } else {
                (
                    levels.threshold,
                    min_effect.max(HEALTHY_RANGE * levels.spread * levels.uncertain()),
                )
            }
        }
        Shape::Block { .. } | Shape::Class(_) => (min_effect, min_effect),
    }
}

/// Healthy lines are within so many standard deviations of their spread: 2 of a normal distribution
/// that is cut there, whose own standard deviation is 0.88 of it, and a margin because few lines tell it.
const HEALTHY_RANGE: f64 = 3.0;

/// True for one shape, and for rectangles that are mostly one: of two suspicions that grew together only
/// one counts.
fn is_same(a: &Shape, b: &Shape) -> bool {
    let (Shape::Block { rows, cols }, Shape::Block { rows: b_rows, cols: b_cols }) = (a, b) else {
        return a == b;
    };
    let common =
        |a: &[usize], b: &[usize]| a.iter().filter(|at| b.binary_search(at).is_ok()).count();
    let smaller = (rows.len() * cols.len()).min(b_rows.len() * b_cols.len());
    2 * common(rows, b_rows) * common(cols, b_cols) > smaller
}

/// True for a rectangle inside another one.
fn is_part(shape: &Shape, of: &Shape) -> bool {
    let (Shape::Block { rows, cols }, Shape::Block { rows: of_rows, cols: of_cols }) = (shape, of)
    else {
        return false;
    };
    let inside = |few: &[usize], all: &[usize]| few.iter().all(|at| all.binary_search(at).is_ok());
    shape != of && inside(rows, of_rows) && inside(cols, of_cols)
}

/// Single cells that are confirmed on their own in each column of a rectangle are a row of it, and the
/// other way round.
fn absorb(found: &mut Vec<Confirmed>) {
    let cell = |confirmed: &Confirmed| match &confirmed.shape {
        Shape::Block { rows, cols } if rows.len() * cols.len() == 1 => Some((rows[0], cols[0])),
        _ => None,
    };
    let cells: BTreeSet<(usize, usize)> = found.iter().filter_map(cell).collect();
    let mut absorbed = BTreeSet::new();
    for confirmed in found.iter_mut() {
        let Shape::Block { rows, cols } = &mut confirmed.shape else { continue };
        if rows.len() * cols.len() == 1 {
            continue;
        }
        let new_rows: BTreeSet<usize> = cells
            .iter()
            .map(|&(row, _)| row)
            .filter(|row| cols.iter().all(|&col| cells.contains(&(*row, col))))
            .collect();
        absorbed.extend(new_rows.iter().flat_map(|&row| cols.iter().map(move |&col| (row, col))));
        let new_cols: BTreeSet<usize> = cells
            .iter()
            .map(|&(_, col)| col)
            .filter(|col| rows.iter().all(|&row| cells.contains(&(row, *col))))
            .collect();
        absorbed.extend(new_cols.iter().flat_map(|&col| rows.iter().map(move |&row| (row, col))));
        rows.extend(new_rows);
        cols.extend(new_cols);
        rows.sort_unstable();
        rows.dedup();
        cols.sort_unstable();
        cols.dedup();
    }
    found.retain(|confirmed| cell(confirmed).is_none_or(|cell| !absorbed.contains(&cell)));
}

fn order(shape: &Shape) -> (u8, Vec<usize>) {
    match shape {
        Shape::Lines { axis, members, node: Some(_) } => (u8::from(*axis == 1), members.clone()),
        Shape::Lines { axis, members, .. } => (2 + u8::from(*axis == 1), members.clone()),
        Shape::Class(kinship) => (4 + *kinship as u8, Vec::new()),
        Shape::Block { rows, cols } => (8, [rows.clone(), cols.clone()].concat()),
    }
}

/// Shapes of one kind with one effect are one finding.
fn group(found: Vec<Confirmed>, spread: [f64; 2]) -> Vec<Vec<Confirmed>> {
    let mut groups: Vec<Vec<Confirmed>> = Vec::new();
    let mut lines: [Vec<Confirmed>; 4] = Default::default();
    for confirmed in found {
        match &confirmed.shape {
            Shape::Lines { axis, node, .. } => {
                lines[axis * 2 + usize::from(node.is_some())].push(confirmed);
            }
            Shape::Block { .. } | Shape::Class(_) => groups.push(vec![confirmed]),
        }
    }
    for (at, mut members) in lines.into_iter().enumerate() {
        let healthy = 4.0 * spread[at / 2];
        let effect = |confirmed: &Confirmed| {
            confirmed.by_size.iter().flatten().next().map_or(0.0, |e| e.effect)
        };
        members.sort_by(|a, b| effect(a).total_cmp(&effect(b)));
        let mut current: Vec<Confirmed> = Vec::new();
        for confirmed in members {
            let is_apart = |last: &Confirmed| !alike(&last.by_size, &confirmed.by_size, healthy);
            if current.last().is_some_and(is_apart) {
                groups.push(std::mem::take(&mut current));
            }
            current.push(confirmed);
        }
        if !current.is_empty() {
            groups.push(current);
        }
    }
    groups
}

/// True when two lines have one effect at every size, as far as healthy lines are alike.
pub(super) fn alike(a: &[Option<Estimate>], b: &[Option<Estimate>], healthy: f64) -> bool {
    a.iter().zip(b).all(|(a, b)| match (a, b) {
        (Some(a), Some(b)) => {
            let (a_effect, b_effect) = (a.effect, b.effect);
            let opposite = a_effect * b_effect < 0.0 && a_effect.abs().max(b_effect.abs()) > 0.04;
            let largest = a_effect.abs().max(b_effect.abs());
            let gap = (0.2 * largest).max(healthy).max(0.03).max(3.0 * a.noise.hypot(b.noise));
            (a_effect - b_effect).abs() <= gap && !opposite
        }
        _ => true,
    })
}

/// The mean effect of a group at one size, its standard error included.
pub(super) fn pooled(group: &[Confirmed], size: usize) -> Option<Estimate> {
    let estimates: Vec<Estimate> = group
        .iter()
        .filter_map(|confirmed| confirmed.by_size.get(size).copied().flatten())
        .collect();
    let count = estimates.len() as f64;
    let first = *estimates.first()?;
    let mean = |of: &dyn Fn(&Estimate) -> f64| estimates.iter().map(of).sum::<f64>() / count;
    // What the members share (the rest they are compared with) does not average out.
    let shared = mean(&|e| e.se.powi(2) - e.noise.powi(2)).max(0.0);
    let noise = mean(&|e| e.noise.powi(2)) / count;
    Some(Estimate {
        effect: mean(&|e| e.effect),
        se: (noise + shared).sqrt(),
        noise: noise.sqrt(),
        seen: estimates.iter().map(|e| e.seen).min().unwrap_or(first.seen),
        of: first.of,
        rest_ns: first.rest_ns,
        nominal_ns: first.nominal_ns,
        unsettled: estimates.iter().all(|e| e.unsettled),
    })
}

/// 95 % of a t distribution with about as many degrees of freedom as six visits give.
const T95: f64 = 2.6;

pub(crate) fn effect_of(effect: f64, se: f64) -> Effect {
    Effect {
        ratio: (-effect).exp(),
        low: (-effect - T95 * se).exp(),
        high: (-effect + T95 * se).exp(),
    }
}

fn describe(table: &Table, fits: &[Option<Fit>], group: &[Confirmed]) -> Option<Finding> {
    let first = group.first()?;
    let size = group.iter().map(|confirmed| confirmed.size).max()?;
    let mut finding = place(table, group)?;
    let mut by_size: Vec<(ByteSize, Estimate)> = (0..fits.len())
        .filter_map(|size| Some((table.sizes[size], pooled(group, size)?)))
        .collect();
    let (scales, extra_us) = growth(&by_size);
    to_nominal(&mut by_size, scales);
    let (_, estimate) = *by_size.iter().find(|(bytes, _)| *bytes == table.sizes[size])?;
    finding.effect = Some(effect_of(estimate.effect, estimate.se));
    finding.replicates = Some(Replicates {
        seen: u32::try_from(estimate.seen).unwrap_or(0),
        of: u32::try_from(estimate.of).unwrap_or(0),
    });
    finding.scales_with_bytes = scales;
    finding.extra_us = extra_us;
    for (bytes, estimate) in &by_size {
        let Effect { ratio, low, high } = effect_of(estimate.effect, estimate.se);
        let extra = estimate.nominal_ns * (estimate.effect.exp() - 1.0) / 1e3;
        finding.facts.push(format!(
            "{bytes}: × {ratio:.3} of the rest's rate (95 % interval {low:.3} to {high:.3}), \
             {extra:+.1} µs per transfer; seen in {} of {} visits made to confirm it",
            estimate.seen, estimate.of
        ));
    }
    let of = fits.get(first.size).and_then(Option::as_ref)?;
    finding.facts.push(format!(
        "between visits {:.2} %, between points {:.2} % standard deviation at {}",
        100.0 * of.visit_sd,
        100.0 * of.point_sd,
        table.sizes[first.size]
    ));
    explain(&mut finding);
    Some(finding)
}

fn extra_ns(estimate: &Estimate) -> f64 {
    estimate.rest_ns * (estimate.effect.exp() - 1.0)
}

/// Ratios as they were when the run began: where time changed everything before the confirmation, a
/// fixed cost weighs more or less in it, and so does a slower link beside a cost per call.
fn to_nominal(by_size: &mut [(ByteSize, Estimate)], scales: Option<bool>) {
    let (Some((small_bytes, small)), Some((large_bytes, large)), Some(scales)) =
        (by_size.first().copied(), by_size.last().copied(), scales)
    else {
        return;
    };
    let span = large_bytes.bytes() as f64 - small_bytes.bytes() as f64;
    if span <= 0.0 {
        return;
    }
    // The part of the rest's time that does not grow with the bytes.
    let fixed = |small_ns: f64, large_ns: f64| {
        let per_byte = (large_ns - small_ns) / span;
        (small_ns - per_byte * small_bytes.bytes() as f64).clamp(0.0, 0.9 * small_ns)
    };
    let fixed_now = fixed(small.rest_ns, large.rest_ns);
    let fixed_nominal = fixed(small.nominal_ns, large.nominal_ns);
    for (_, estimate) in by_size {
        if (estimate.rest_ns / estimate.nominal_ns).ln().abs() < 1e-9 {
            continue;
        }
        let extra = extra_ns(estimate);
        let nominal = if scales {
            extra / (estimate.rest_ns - fixed_now) * (estimate.nominal_ns - fixed_nominal)
        } else {
            extra
        };
        let effect = (nominal / estimate.nominal_ns).max(-0.9).ln_1p();
        let weight = if estimate.effect.abs() > 1e-6 { effect / estimate.effect } else { 1.0 };
        estimate.se *= weight.abs().clamp(0.2, 5.0);
        estimate.effect = effect;
    }
}

/// Whether the extra time grows with the bytes, and how much it is when it does not.
pub(crate) fn growth(by_size: &[(ByteSize, Estimate)]) -> (Option<bool>, Option<f64>) {
    let (Some((small_bytes, small)), Some((large_bytes, large))) =
        (by_size.first(), by_size.last())
    else {
        return (None, None);
    };
    if small_bytes == large_bytes {
        return (None, None);
    }
    let ratio = small_bytes.bytes() as f64 / large_bytes.bytes() as f64;
    let error = |e: &Estimate| e.rest_ns * e.effect.exp() * e.se;
    let (low, high) = (extra_ns(small), extra_ns(large));
    let (low_error, high_error) = (error(small), error(large));
    let grows = (low - high * ratio).abs() / low_error.hypot(high_error * ratio);
    let fixed = (low - high).abs() / low_error.hypot(high_error);
    if grows.min(fixed) > 5.0 {
        // Neither alone: both a slower link and a cost of its own, or something else.
        let alpha = (low - high * ratio) / (1.0 - ratio);
        return (Some(alpha < high / 2.0), None);
    }
    if (grows - fixed).abs() < 1.0 {
        return (None, None);
    }
    if grows < fixed {
        return (Some(true), None);
    }
    let (low_weight, high_weight) = (low_error.powi(-2), high_error.powi(-2));
    let extra = (low * low_weight + high * high_weight) / (low_weight + high_weight);
    (Some(false), Some(extra / 1e3))
}

pub(super) fn ids(
    axis: &crate::matrix::Axis,
    positions: impl IntoIterator<Item = usize>,
) -> Vec<u32> {
    sorted(positions.into_iter().map(|at| axis.ids[at]))
}

/// Kind and members of a group.
fn place(table: &Table, group: &[Confirmed]) -> Option<Finding> {
    let sweep = table.sweep;
    let new = |kind| Finding::new(kind, Some(sweep), Some(&table.load));
    let first = group.first()?;
    Some(match &first.shape {
        Shape::Lines { axis, node, .. } => {
            let members = group.iter().flat_map(|confirmed| match &confirmed.shape {
                Shape::Lines { members, .. } => members.clone(),
                _ => Vec::new(),
            });
            let of = if *axis == 0 { &table.rows } else { &table.cols };
            let ids = ids(of, members);
            let mut finding = match (node, axis, sweep) {
                (Some(_), ..) => {
                    let mut finding = new(Kind::NumaEffect);
                    finding.numa_nodes = group
                        .iter()
                        .filter_map(|confirmed| match confirmed.shape {
                            Shape::Lines { node, .. } => node,
                            _ => None,
                        })
                        .collect();
                    finding.numa_nodes.sort_unstable();
                    finding
                }
                (None, 0, Sweep::CorePair) => new(Kind::SlowRank0Core),
                (None, _, Sweep::CorePair) => new(Kind::SlowRank1Core),
                (None, 0, _) => new(Kind::SlowCore),
                (None, ..) => new(Kind::SlowDevice),
            };
            match (axis, sweep) {
                (0, Sweep::CorePair) => finding.rank0_cpus = ids,
                (_, Sweep::CorePair) => finding.rank1_cpus = ids,
                (0, _) => finding.cpus = ids,
                _ => finding.devices = ids,
            }
            finding
        }
        Shape::Class(kinship) => new(match kinship {
            Kinship::SameCpu => Kind::SameCore,
            _ => Kind::SmtSibling,
        }),
        Shape::Block { rows, cols } => {
            let mut finding =
                new(if rows.len() * cols.len() == 1 { Kind::SlowCell } else { Kind::SlowBlock });
            let rows = ids(&table.rows, rows.iter().copied());
            let cols = ids(&table.cols, cols.iter().copied());
            if sweep.is_pair() {
                (finding.rank0_cpus, finding.rank1_cpus) = (rows, cols);
            } else {
                (finding.cpus, finding.devices) = (rows, cols);
            }
            finding
        }
    })
}

/// Inference and next step of a structural finding.
pub(crate) fn explain(finding: &mut Finding) {
    let nature = match finding.scales_with_bytes {
        Some(true) => "The extra time grows with the bytes: a slower path, not a cost per call. ",
        Some(false) => {
            "The extra time is the same for all sizes: a cost per transfer, not a slow link. "
        }
        None => "",
    };
    let (cause, next) = match finding.kind {
        Kind::SlowDevice => (
            "The device's own link is slower from every core.",
            "Check its PCIe or HCCS link width and speed, errors and temperature; swap slots if it \
             stays with the device.",
        ),
        Kind::SlowCore | Kind::SlowRank0Core | Kind::SlowRank1Core => (
            "These CPUs are slower than their neighbours on the same node.",
            "Look for interrupts, isolated or throttled cores and processes pinned there; keep \
             ranks off them meanwhile (placement.json).",
        ),
        Kind::NumaEffect => (
            "The whole node differs: distance to the device or memory bandwidth, not single cores.",
            "Prefer the faster node for the ranks of these devices; see placement.json.",
        ),
        Kind::SlowBlock => (
            "Only this combination is slow: the way between them, not either end.",
            "Check the interconnect between these CPUs and the other end.",
        ),
        Kind::SlowCell => (
            "Only this one combination is slow.",
            "Measure it again with --cpus and --devices of this cell and its neighbours.",
        ),
        Kind::SameCore => (
            "Two ranks on one CPU take turns.",
            "Give every rank a core of its own; a launcher that binds two ranks to one CPU shows so.",
        ),
        Kind::SmtSibling => (
            "Two ranks on the SMT threads of one core share it.",
            "Spread ranks over cores rather than threads.",
        ),
        _ => ("", ""),
    };
    finding.inference = format!("{nature}{cause}");
    finding.next = next.to_owned();
}

/// Suspects that no visit confirmed, because the run ended before: no findings, but not nothing.
/// What only a fit with the confirming visits makes suspicious in a complete run is left out, unless
/// it is far beyond its limit.
pub(crate) fn unconfirmed(
    table: &Table,
    fits: &[Option<Fit>],
    suspects: &[Suspect],
    (min_effect, is_complete): (f64, bool),
) -> Option<Finding> {
    let is_large = |suspect: &&Suspect| {
        let Some(Some(fit)) = fits.get(suspect.size) else { return false };
        let levels = |axis| axis_levels(table, fit, axis, min_effect);
        let (threshold, _) = thresholds_of(&suspect.shape, &levels, min_effect);
        !is_complete || suspect.effect.abs() > 2.0 * threshold.max(3.0 * fit.point_sd)
    };
    let suspects: Vec<&Suspect> = suspects.iter().filter(is_large).collect();
    if suspects.is_empty() {
        return None;
    }
    let mut finding = Finding::new(Kind::Inconclusive, Some(table.sweep), Some(&table.load));
    for suspect in suspects.iter().take(20) {
        finding.facts.push(format!(
            "{}: {:+.1} % of the rest's time in the blocks",
            name(table, &suspect.shape),
            100.0 * (suspect.effect.exp() - 1.0)
        ));
    }
    finding.inference = format!(
        "{} suspicions were not visited again: the largest of many estimates is large by chance, \
         too.",
        suspects.len()
    );
    finding.next = "Let the run come to its end (--resume), or measure again.".to_owned();
    Some(finding)
}

fn name(table: &Table, shape: &Shape) -> String {
    let list = |axis: &crate::matrix::Axis, members: &[usize]| {
        format!("{} {}", axis.name, names(members.iter().map(|&at| axis.ids[at])))
    };
    match shape {
        Shape::Lines { axis: 0, members, .. } => list(&table.rows, members),
        Shape::Lines { members, .. } => list(&table.cols, members),
        Shape::Block { rows, cols } => {
            format!("{} × {}", list(&table.rows, rows), list(&table.cols, cols))
        }
        Shape::Class(Kinship::SameCpu) => "both ranks on one CPU".to_owned(),
        Shape::Class(_) => "ranks on SMT siblings".to_owned(),
    }
}

/// Share of a line's points that are slow now and then, from which it is told.
const UNSTEADY_SHARE: f64 = 0.2;
/// Visits that have such points: a disturbance hits a few only.
const UNSTEADY_VISITS: usize = 6;
/// How much slower such a point is at least, logarithm of the time.
const UNSTEADY_EFFECT: f64 = 0.1;

/// Rows and columns of which many points are slow and many are not, other than of the rest: no median
/// shows that, and it is not healthy.
pub(crate) fn unsteady(table: &Table, fits: &[Option<Fit>], suspects: &[Suspect]) -> Vec<Finding> {
    let Some(fit) = fits.iter().rev().flatten().next() else { return Vec::new() };
    let least = UNSTEADY_EFFECT.max(6.0 * fit.point_sd);
    let shape = table.shape();
    let mut counts: [Vec<(u32, u32)>; 2] = shape.map(|lines| vec![(0, 0); lines]);
    let mut visits: [Vec<BTreeSet<u32>>; 2] = shape.map(|lines| vec![BTreeSet::new(); lines]);
    let is_known = |obs: &Obs| {
        suspects.iter().any(|suspect| {
            let (row, col) = (usize::from(obs.row), usize::from(obs.col));
            matches!(suspect.shape, Shape::Block { .. }) && suspect.shape.has(table, row, col)
        })
    };
    for (&at, rest) in fit.which.iter().zip(rests(table, fit)) {
        let obs = &table.obs[at as usize];
        if !obs.is_block() {
            continue;
        }
        let is_slow = f64::from(rest) > least && !is_known(obs);
        for (axis, line) in [obs.row, obs.col].into_iter().enumerate() {
            let (all, slow) = &mut counts[axis][usize::from(line)];
            *all += 1;
            if is_slow {
                *slow += 1;
                visits[axis][usize::from(line)].insert(obs.visit);
            }
        }
    }
    let mut findings = Vec::new();
    for ((counts, visits), axis) in counts.iter().zip(&visits).zip([&table.rows, &table.cols]) {
        let share = |&(all, slow): &(u32, u32)| f64::from(slow) / f64::from(all.max(1));
        let usual = median(&mut counts.iter().map(share).collect::<Vec<f64>>());
        let limit = UNSTEADY_SHARE.max(4.0 * usual);
        let unsteady: Vec<usize> = (0..counts.len())
            .filter(|&line| {
                counts[line].0 >= 20
                    && share(&counts[line]) > limit
                    && visits[line].len() >= UNSTEADY_VISITS
            })
            .collect();
        // Where most of an axis is unsteady, it is not the lines.
        if unsteady.is_empty() || 3 * unsteady.len() > counts.len() {
            continue;
        }
        let mut finding = Finding::new(Kind::Inconclusive, Some(table.sweep), Some(&table.load));
        let members = ids(axis, unsteady.iter().copied());
        for &line in &unsteady {
            finding.facts.push(format!(
                "{} {}: {:.0} % of its points take at least {:.0} % longer than its others; of the \
                 rest {:.1} %",
                axis.name,
                axis.ids[line],
                100.0 * share(&counts[line]),
                100.0 * (least.exp() - 1.0),
                100.0 * usual
            ));
        }
        match (axis.name, table.sweep.is_pair()) {
            ("device", _) => finding.devices = members,
            ("rank-1 cpu", _) => finding.rank1_cpus = members,
            (_, true) => finding.rank0_cpus = members,
            _ => finding.cpus = members,
        }
        finding.inference =
            "Slow now and then, at no fixed time: a link that retries, or something that shares it."
                .to_owned();
        finding.next =
            "Measure these again with more blocks (--repeats), and look at error counters."
                .to_owned();
        findings.push(finding);
    }
    findings
}

/// What the blocks of a table could have shown.
#[derive(Debug)]
pub(crate) struct Power {
    /// Of what.
    kind: String,
    is_line: bool,
    /// The smallest slowdown that shows with 95 % probability, logarithm of the time.
    least: f64,
    /// Standard error of one such line or cell.
    se: f64,
}

pub(crate) fn powers(table: &Table, fits: &[Option<Fit>], min_effect: f64) -> Vec<Power> {
    // Of a sampled sweep the size that was looked at most.
    let visits = |fit: &Fit| if table.sampled { fit.which.len() } else { 0 };
    let fits = fits.iter().enumerate().filter_map(|(size, fit)| Some((size, fit.as_ref()?)));
    let Some((size, fit)) = fits.max_by_key(|(_, fit)| visits(fit)) else { return Vec::new() };
    let bytes = table.sizes[size];
    let [rows, cols] = table.shape();
    let mut powers = Vec::new();
    for (axis, count) in [(0, rows), (1, cols)] {
        if count < 2 {
            continue;
        }
        let levels = axis_levels(table, fit, axis, min_effect);
        let se = fit.sampled.as_ref().map_or(levels.se, |sampled| sampled.typical_error(axis));
        let axis = if axis == 0 { &table.rows } else { &table.cols };
        powers.push(Power {
            kind: format!("{} {bytes}, single {}", table.sweep, axis.name),
            is_line: true,
            least: levels.threshold + 1.645 * se,
            se,
        });
    }
    // One visit of a part of the cells says nothing about single ones.
    if has_rectangles(table) && !(table.sampled && fit.replicates < 1.5) {
        let se = residuals(table, fit).se;
        powers.push(Power {
            kind: format!("{} {bytes}, single cells", table.sweep),
            is_line: false,
            least: (4.0 * se).max(min_effect) + 1.645 * se,
            se,
        });
    }
    powers
}

fn percent_slower(effect: f64) -> f64 {
    100.0 * (1.0 - (-effect).exp())
}

/// How small an effect of each kind the blocks would have shown.
pub(crate) fn power(powers: &[Power]) -> Vec<String> {
    powers
        .iter()
        .map(|power| match power.least.is_finite() {
            true => {
                format!("{}: slower by {:.1} % or more", power.kind, percent_slower(power.least))
            }
            false => format!("{}: nothing, too few were visited", power.kind),
        })
        .collect()
}

/// Whole rows or columns that are slower by so much must not go unseen because visits vary.
const WANTED_POWER: f64 = 0.105;

/// A finding when noise would have hidden even large effects on whole rows or columns.
pub(crate) fn underpowered(table: &Table, powers: &[Power]) -> Option<Finding> {
    let blind: Vec<&Power> = powers
        .iter()
        // Also where an error is not known at all.
        .filter(|power| {
            power.is_line && (power.se.is_nan() || (2.0 + 1.645) * power.se > WANTED_POWER)
        })
        .collect();
    if blind.is_empty() {
        return None;
    }
    let mut finding = Finding::new(Kind::Underpowered, Some(table.sweep), Some(&table.load));
    finding.facts = blind
        .iter()
        .map(|power| {
            if !power.least.is_finite() {
                return format!("{}: too few of them were visited", power.kind);
            }
            format!(
                "{}: only what is slower by {:.1} % or more shows; one of them is known to ± {:.1} %",
                power.kind,
                percent_slower(power.least),
                200.0 * power.se
            )
        })
        .collect();
    finding.inference =
        "What is not reported here is not healthy: the visits vary too much.".to_owned();
    finding.next = "Quiet the node, or add blocks (--repeats).".to_owned();
    Some(finding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::Axis;

    /// At 4 and 16 MiB, 100 and 400 us of the rest.
    fn contradicted(small: f64, large: f64) -> bool {
        let axis = Axis { name: "cpu", ids: vec![0], nodes: vec![None] };
        let sizes = vec![ByteSize::mib(4), ByteSize::mib(16)];
        let table = Table::new(Sweep::H2d, "idle", sizes, (axis.clone(), axis), |_| None);
        let estimate = |effect: f64, rest_ns: f64| {
            let (se, noise, seen, of) = (0.005, 0.005, 6, 6);
            let unsettled = false;
            Some(Estimate { effect, se, noise, seen, of, rest_ns, nominal_ns: rest_ns, unsettled })
        };
        is_contradicted(&table, &[estimate(small, 1e5), estimate(large, 4e5)], 0, 1)
    }

    #[test]
    fn a_smaller_size_contradicts_what_it_lacks_altogether() {
        assert!(contradicted(0.0, 0.1));
        // A cost per byte, one per transfer, a part of it, within the error, a faster path.
        for (small, large) in [(0.1, 0.1), (0.35, 0.1), (0.04, 0.1), (0.0, 0.02), (0.0, -0.1)] {
            assert!(!contradicted(small, large), "{small} {large}");
        }
    }
}
