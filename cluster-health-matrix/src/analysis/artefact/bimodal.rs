//! Recordings whose times have two modes that neither place nor time explains.

use crate::analysis::finding::{Finding, Kind};
use crate::analysis::fit::Fit;
use crate::analysis::table::Table;
use crate::stats::{median, robust_sd};

/// Share of the points that the smaller mode must have.
const SMALLEST_MODE: f64 = 0.15;
/// Fewest points of both modes.
const FEWEST: usize = 20;
/// Distance of the modes, in sums of their standard deviations.
const APART: f64 = 3.0;
/// Share of the points that may lie between the modes.
const BETWEEN: f64 = 0.03;
/// χ² per degree of freedom up to which membership is a matter of chance.
const CHANCE: f64 = 2.5;

/// A finding when the times of some size have two modes.
pub(crate) fn bimodal(table: &Table, fits: &[Option<Fit>]) -> Option<Finding> {
    let mut facts = Vec::new();
    for (size, fit) in fits.iter().enumerate() {
        let Some(modes) = fit.as_ref().and_then(|fit| modes(table, fit)) else { continue };
        facts.push(format!(
            "{}: {:.0} % of the times about {:.4} ms, {:.0} % about {:.4} ms, hardly any between \
             (a ratio of {:.2})",
            table.sizes[size],
            100.0 * (1.0 - modes.share),
            modes.fast_ms,
            100.0 * modes.share,
            modes.slow_ms,
            modes.slow_ms / modes.fast_ms
        ));
    }
    if facts.is_empty() {
        return None;
    }
    let mut finding = Finding::new(Kind::Inconclusive, Some(table.sweep), Some(&table.load));
    finding.facts = facts;
    finding.inference =
        "The times are bimodal: each transfer takes one of two times, whichever the \
                         CPU or device. A median of them describes neither mode. Memory pages that \
                         move between nodes (numa_balancing), two clock states or two routes do so."
            .to_owned();
    finding.next = "Look at numa_balancing in the manifest (run.json, environment) and switch it \
                    off (sysctl kernel.numa_balancing=0); fix the clocks; measure again."
        .to_owned();
    Some(finding)
}

struct Modes {
    fast_ms: f64,
    slow_ms: f64,
    share: f64,
}

fn modes(table: &Table, fit: &Fit) -> Option<Modes> {
    let points: Vec<_> =
        fit.which.iter().map(|&at| &table.obs[at as usize]).filter(|obs| obs.is_block()).collect();
    let count = points.len();
    if count < FEWEST {
        return None;
    }
    // Plain times: a fit takes modes for rows, columns or time when there are few points.
    let mut sorted: Vec<f64> = points.iter().map(|obs| f64::from(obs.ln)).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let split = split(&sorted)?;
    let (fast, slow) = sorted.split_at(split);
    let share = slow.len() as f64 / count as f64;
    if share.min(1.0 - share) < SMALLEST_MODE {
        return None;
    }
    let (low, high) = (median(&mut fast.to_vec()), median(&mut slow.to_vec()));
    let spread = |mode: &[f64], center: f64| robust_sd(mode, center).max(1e-4);
    let gap = high - low;
    if gap < APART * (spread(fast, low) + spread(slow, high)) || gap < 0.05 {
        return None;
    }
    let between =
        sorted.iter().filter(|value| (low + 0.3 * gap..low + 0.7 * gap).contains(*value)).count();
    if between as f64 > BETWEEN * count as f64 {
        return None;
    }
    let border = f64::midpoint(low, high);
    let is_slow: Vec<bool> = points.iter().map(|obs| f64::from(obs.ln) > border).collect();
    let by = |group: &dyn Fn(usize) -> usize, groups: usize| {
        excess(&is_slow, share, group, groups) < CHANCE
    };
    let [rows, cols] = table.shape();
    let is_chance = by(&|at| usize::from(points[at].row), rows)
        && by(&|at| usize::from(points[at].col), cols)
        && by(&|at| table.kinship(points[at].row.into(), points[at].col.into()) as usize, 3)
        && by(&|at| at * 16 / count, 16);
    is_chance.then(|| Modes { fast_ms: low.exp() / 1e6, slow_ms: high.exp() / 1e6, share })
}

/// Where to part sorted values so that the parts differ most from each other (Otsu's threshold).
fn split(sorted: &[f64]) -> Option<usize> {
    let total: f64 = sorted.iter().sum();
    let count = sorted.len() as f64;
    let mut before = 0.0;
    let mut best = (0.0, None);
    for at in 1..sorted.len() {
        before += sorted[at - 1];
        let (left, right) = (at as f64, count - at as f64);
        let distance = (total - before) / right - before / left;
        let between = left * right * distance * distance;
        if between > best.0 {
            best = (between, Some(at));
        }
    }
    best.1
}

/// χ² per degree of freedom of the members of each group against their overall share.
fn excess(is_member: &[bool], share: f64, group: &dyn Fn(usize) -> usize, groups: usize) -> f64 {
    let mut counts = vec![(0.0, 0.0); groups];
    for (at, &member) in is_member.iter().enumerate() {
        let count = &mut counts[group(at)];
        count.0 += f64::from(u8::from(member));
        count.1 += 1.0;
    }
    let present: Vec<&(f64, f64)> = counts.iter().filter(|(_, of)| *of > 0.0).collect();
    if present.len() < 2 {
        return 0.0;
    }
    let square: f64 = present
        .iter()
        .map(|(members, of)| (members - of * share).powi(2) / (of * share * (1.0 - share)))
        .sum();
    square / (present.len() - 1) as f64
}
