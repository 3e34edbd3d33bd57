//! Artefacts of a scan that kept one time per point: they show in those times themselves.

use super::super::artefact::{self, time};
use super::super::finding::{Finding, Kind, Replicates, sorted};
use super::super::fit::step;
use super::recur::Recurrence;
use super::scan::Grid;
use super::{Undecided, View};
use crate::stats::{median, robust_sd};

/// The first pair after a change of NUMA node in the inner loop.
pub(super) fn first_visit(view: &View<'_>) -> Option<Finding> {
    let table = view.table();
    let hops = view.scan.hops();
    let firsts: Vec<usize> = (0..hops.len()).filter(|&line| hops[line]).collect();
    // Where nearly all are first, being first is nothing special.
    if !table.sweep.is_pair() || firsts.len() < 3 || firsts.len() * 4 > hops.len() {
        return None;
    }
    let axis = view.scan.inner_axis();
    let grid = view.scan.grids.last()?;
    // Against the others of the same node.
    let mates = |first: usize| -> f64 {
        let mut levels: Vec<f64> = (0..hops.len())
            .filter(|&line| !hops[line] && axis.nodes[line] == axis.nodes[first])
            .map(|line| grid.line[line])
            .filter(|level| level.is_finite())
            .collect();
        median(&mut levels)
    };
    let mut by_slot: Vec<Vec<f64>> = vec![Vec::new(); view.scan.slots.len()];
    let mut extras = Vec::new();
    for &first in &firsts {
        let usual = mates(first);
        let series = grid.of_line(first);
        if usual.is_nan() || series.is_empty() {
            continue;
        }
        let mut own: Vec<f64> = series.iter().map(|(_, value)| value - usual).collect();
        extras.push((median(&mut own), axis.ids[first]));
        for (slot, value) in series {
            by_slot[slot].push(value - usual);
        }
    }
    let series: Vec<(usize, f64)> = by_slot
        .iter_mut()
        .enumerate()
        .filter(|(_, values)| !values.is_empty())
        .map(|(slot, values)| (slot, median(values)))
        .collect();
    let recurrence = Recurrence::of(&series, view.scan.slots.len(), 0.0)?;
    let slower = extras.iter().filter(|(extra, _)| *extra > 0.0).count();
    if recurrence.effect < 0.01
        || recurrence.effect < 5.0 * recurrence.error
        || recurrence.why.is_some()
        || (slower as f64) < 0.8 * extras.len() as f64
    {
        return None;
    }
    let usual_us = grid.usual_ns() / 1e3;
    let microseconds = |extra: f64| usual_us * (extra.exp() - 1.0);
    extras.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut finding = Finding::new(Kind::FirstVisit, Some(table.sweep), Some(&table.load));
    finding.extra_us = Some(microseconds(recurrence.effect));
    finding.effect = Some(time::effect(recurrence.effect, recurrence.error));
    finding.replicates = Some(Replicates {
        seen: u32::try_from(slower).unwrap_or(0),
        of: u32::try_from(extras.len()).unwrap_or(0),
    });
    let list: Vec<String> = extras
        .iter()
        .map(|(extra, id)| format!("{id} ({:+.1} µs)", microseconds(*extra)))
        .collect();
    finding.facts.push(format!(
        "the first {} after each change of NUMA node in the inner loop takes longer than the \
         others of its node: {}",
        axis.name,
        list.join(", ")
    ));
    finding.inference = format!(
        "The first transfer after a change of node pays for it, whichever CPU it is. In this order \
         the first of each node always comes after another node, so this scan cannot tell whether \
         the {} themselves are slow; nothing says so.",
        axis.name
    );
    finding.next =
        "Measure in random order with warm-up (cluster-health core-pair --repeats 3).".to_owned();
    Some(finding)
}

/// From when on a line of the inner loop is slow, at one size.
struct Onset {
    grid: usize,
    slot: usize,
    /// The slot from which on it is as before, where it does not last.
    until: Option<usize>,
    seq: u32,
    /// Time before and after, nanoseconds more than the rest.
    before_ns: f64,
    after_ns: f64,
    /// Logarithm of the change.
    delta: f64,
    error: f64,
}

/// Single devices whose time changes during the scan.
pub(super) fn device_steps(
    view: &View<'_>,
    structural: &[Finding],
    undecided: &mut Vec<Undecided>,
) -> Vec<Finding> {
    let table = view.table();
    if table.sweep.is_pair() || view.scan.outer != 0 || view.scan.inner() < 3 {
        return Vec::new();
    }
    let mut steps: Vec<(Vec<u32>, Vec<Onset>)> = Vec::new();
    let near = view.scan.slots.len() / 100;
    for line in 0..view.scan.inner() {
        let device = table.cols.ids[line];
        let is_decided = structural
            .iter()
            .any(|finding| finding.kind == Kind::SlowDevice && finding.devices.contains(&device));
        if is_decided {
            continue;
        }
        let onsets: Vec<Onset> =
            (0..view.scan.grids.len()).filter_map(|grid| onset(view, grid, line)).collect();
        let Some(last) = onsets.last() else { continue };
        let same = steps.iter_mut().find(|(_, known)| {
            known.last().is_some_and(|known| {
                known.grid == last.grid
                    && known.until.is_some() == last.until.is_some()
                    && known.slot.abs_diff(last.slot) <= near
                    && (known.delta - last.delta).abs() < 0.3 * known.delta.abs()
            })
        });
        match same {
            Some((devices, _)) => devices.push(device),
            None => steps.push((vec![device], onsets)),
        }
    }
    steps
        .into_iter()
        .map(|(devices, onsets)| {
            if onsets.iter().any(|onset| onset.delta > 0.0)
                && !undecided.iter().any(|known| known.devices == devices)
            {
                undecided.push(Undecided {
                    what: format!("device {}", names(&devices)),
                    devices: devices.clone(),
                    why: "slow in a part of the scan only".to_owned(),
                });
            }
            describe(view, devices, &onsets)
        })
        .collect()
}

fn names(devices: &[u32]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn describe(view: &View<'_>, devices: Vec<u32>, onsets: &[Onset]) -> Finding {
    let table = view.table();
    let axis = view.scan.outer_axis();
    let slots = view.scan.slots.len();
    let mut finding = Finding::new(Kind::TimeStep, Some(table.sweep), Some(&table.load));
    finding.devices = devices;
    for onset in onsets {
        let grid = &view.scan.grids[onset.grid];
        finding.facts.push(format!(
            "{}: from {} {} {} (position {} of {slots} in the scan, point {}, {:.1} % of it) {:+.3} \
             ms per transfer against the other devices, before {:+.3} ms",
            table.sizes[grid.size],
            axis.name,
            axis.ids[view.scan.slots[onset.slot].line],
            onset.until.map_or_else(
                || "on".to_owned(),
                |until| format!("to before {}", axis.ids[view.scan.slots[until].line])
            ),
            onset.slot,
            onset.seq,
            100.0 * onset.slot as f64 / slots as f64,
            onset.after_ns / 1e6,
            onset.before_ns / 1e6
        ));
    }
    if let Some(last) = onsets.last() {
        finding.effect = Some(time::effect(last.delta, last.error));
    }
    if let (Some(first), Some(last)) = (onsets.first(), onsets.last())
        && onsets.len() > 1
    {
        let bytes = |onset: &Onset| table.sizes[view.scan.grids[onset.grid].size].bytes() as f64;
        let growth = bytes(last) / bytes(first);
        let extra = (last.after_ns - last.before_ns) / (first.after_ns - first.before_ns);
        finding.scales_with_bytes =
            Some(extra > growth.sqrt()).filter(|_| extra.is_finite() && extra > 0.0);
        finding.facts.push(format!("the bytes grow × {growth:.0}, the extra time × {extra:.2}"));
    }
    finding.inference = format!(
        "The device ran as fast as the others before, so it is not slow by itself: something \
         changed at that time. The scan went {} by {}, so the same places belong to the same times.",
        axis.name, axis.name
    );
    finding.next = format!(
        "Measure again in random order: cluster-health h2d --devices {} --repeats 3 --out DIR; if \
         only transfers after a new buffer are slow, it is the allocation.",
        names(&finding.devices)
    );
    finding
}

/// Log-likelihood ratio that a change of the share of slow points needs.
const LEAST_LIKELIHOOD: f64 = 10.0;

fn onset(view: &View<'_>, at: usize, line: usize) -> Option<Onset> {
    let grid = &view.scan.grids[at];
    let series = grid.of_line(line);
    let values: Vec<f64> = series.iter().map(|(_, value)| *value).collect();
    let count = values.len();
    if count < 8 {
        return None;
    }
    let typical = robust_sd(&values, median(&mut values.clone()));
    let noise = grid.point_sd.min(typical).max(1e-4);
    let border = view.min_effect.max(6.0 * noise);
    let (mut from, until) = window(&values, border, view.min_effect)?;
    let outside: Vec<f64> = values[..from].iter().chain(&values[until..]).copied().collect();
    // What was before tells most, if there was something.
    let before = if from >= 3 { &values[..from] } else { &outside[..] };
    let inside = &values[from..until];
    let (low, high) = (median(&mut before.to_vec()), median(&mut inside.to_vec()));
    let delta = high - low;
    let spread = |part: &[f64], center: f64| robust_sd(part, center) / (part.len() as f64).sqrt();
    let error =
        1.25 * spread(before, low).hypot(spread(inside, high)).max(noise / (count as f64).sqrt());
    if delta.abs() < view.min_effect || delta.abs() < 4.0 * error {
        return None;
    }
    // The first ones may have less of it.
    let beyond = border.max(8.0 * robust_sd(before, low)).max(0.3 * delta.abs()) * delta.signum();
    while from > 0 && (values[from - 1] - low - beyond) * delta.signum() > 0.0 {
        from -= 1;
    }
    let slot = series[from].0;
    let usual = grid.usual_ns();
    Some(Onset {
        grid: at,
        slot,
        until: (until < count).then(|| series[until].0),
        seq: grid.seq(slot, line),
        before_ns: usual * (low.exp() - 1.0),
        after_ns: usual * (high.exp() - 1.0),
        delta,
        error,
    })
}

/// Where a series changes: from when on, and until when.
fn window(values: &[f64], border: f64, least: f64) -> Option<(usize, usize)> {
    // Where the level jumps about, the share of slow points tells more than the level.
    let cut = |values: &[f64]| {
        step(values, 3).filter(|(_, delta)| delta.abs() > least).map(|(cut, _)| cut).or_else(|| {
            change_of_share(&values.iter().map(|value| *value > border).collect::<Vec<_>>())
        })
    };
    let at = cut(values)?;
    let slow = |part: &[f64]| {
        part.iter().filter(|value| **value > border).count() as f64 / part.len().max(1) as f64
    };
    let (before, after) = values.split_at(at);
    if slow(before) <= slow(after) {
        return Some((at, values.len()));
    }
    // It ends here; it may have begun meanwhile.
    match cut(before) {
        Some(from) if slow(&before[..from]) < slow(&before[from..]) => Some((from, at)),
        _ => Some((at, values.len())),
    }
}

/// Where the share of members of a series changes most.
fn change_of_share(members: &[bool]) -> Option<usize> {
    let count = members.len() as f64;
    let all = members.iter().filter(|member| **member).count() as f64;
    let likelihood = |hits: f64, of: f64| {
        let term = |part: f64| if part > 0.0 { part * (part / of).ln() } else { 0.0 };
        term(hits) + term(of - hits)
    };
    let base = likelihood(all, count);
    let mut hits = 0.0;
    let mut best = (LEAST_LIKELIHOOD, None);
    for at in 1..members.len() {
        hits += f64::from(u8::from(members[at - 1]));
        let of = at as f64;
        let gain = likelihood(hits, of) + likelihood(all - hits, count - of) - base;
        if at >= 3 && members.len() - at >= 3 && gain > best.0 {
            best = (gain, Some(at));
        }
    }
    best.1
}

/// Devices beyond these many from the first one do not use a buffer first.
const MOST_FIRST: usize = 4;

/// A fixed cost per new buffer, which the devices that are visited first pay together.
pub(super) fn stall(view: &View<'_>) -> Option<Finding> {
    let table = view.table();
    let scan = &view.scan;
    if table.sweep.is_pair() || scan.outer != 0 || scan.grids.len() < 2 || scan.inner() < 4 {
        return None;
    }
    // Excess of each line at each size, milliseconds: mean over the scan, without the few worst.
    let excess = |grid: &Grid, line: usize| -> f64 {
        let mut values: Vec<f64> = grid
            .of_line(line)
            .into_iter()
            .map(|(slot, value)| grid.slot_ns(slot) * (value.exp() - 1.0) / 1e6)
            .collect();
        values.sort_unstable_by(f64::total_cmp);
        let kept = &values[values.len() / 20..values.len() - values.len() / 20];
        kept.iter().sum::<f64>() / kept.len().max(1) as f64
    };
    let of_size: Vec<Vec<f64>> = scan
        .grids
        .iter()
        .map(|grid| (0..scan.inner()).map(|line| excess(grid, line)).collect())
        .collect();
    let usual_ms = |grid: &Grid| grid.usual_ns() / 1e6;
    // Who pays: more than a tenth of a transfer at some size.
    let pays = |line: usize| {
        scan.grids.iter().zip(&of_size).any(|(grid, of)| of[line] > 0.1 * usual_ms(grid))
    };
    let payers: Vec<usize> = scan.visited.iter().copied().filter(|&line| pays(line)).collect();
    let first = scan.visited.iter().take(MOST_FIRST.min(scan.inner() / 2));
    let firsts: Vec<usize> = first.copied().collect();
    if payers.is_empty()
        || !payers.contains(&firsts[0])
        || !payers.iter().all(|p| firsts.contains(p))
    {
        return None;
    }
    let sums: Vec<f64> =
        of_size.iter().map(|of| payers.iter().map(|&line| of[line]).sum()).collect();
    let (small, large) = (scan.grids.first()?, scan.grids.last()?);
    let bytes = |grid: &Grid| table.sizes[grid.size].bytes() as f64;
    let growth = bytes(large) / bytes(small);
    let (low, high) = (*sums.first()?, *sums.last()?);
    // The same at all sizes, or with the bytes: whichever is nearer.
    if low <= 0.0 || high <= 0.0 || high / low > growth.sqrt() || low < 0.1 * usual_ms(small) {
        return None;
    }
    let mut finding = Finding::new(Kind::AllocationStall, Some(table.sweep), Some(&table.load));
    finding.devices = sorted(payers.iter().map(|&line| table.cols.ids[line]));
    finding.extra_us = Some(1e3 * median(&mut sums.clone()));
    finding.scales_with_bytes = Some(false);
    let iterations = view.manifest.plan.h2d.as_ref().map(|plan| plan.iters);
    for ((grid, of), sum) in scan.grids.iter().zip(&of_size).zip(&sums) {
        let shares: Vec<String> = payers
            .iter()
            .map(|&line| format!("{} pays {:.2} ms", table.cols.ids[line], of[line]))
            .collect();
        finding.facts.push(format!(
            "{}: {:.2} ms per transfer in sum over the devices visited first; in that order {}",
            table.sizes[grid.size],
            sum,
            shares.join(", ")
        ));
    }
    let of_three: Vec<String> = sums.iter().map(|sum| format!("{:.1}", 3.0 * sum)).collect();
    finding.facts.push(match iterations {
        Some(iterations) => {
            let all: Vec<String> =
                sums.iter().map(|sum| format!("{:.1}", f64::from(iterations) * sum)).collect();
            format!("{} ms per new buffer, with {iterations} transfers a point", all.join(", "))
        }
        None => format!(
            "the record does not say how many transfers a point has; with three it is {} ms per \
             new buffer",
            of_three.join(", ")
        ),
    });
    finding.facts.push(format!(
        "the bytes grow × {growth:.0}, the sum × {:.2}; the first-visited device is {}",
        high / low,
        table.cols.ids[firsts[0]]
    ));
    finding.inference = "A fixed number of milliseconds per new host buffer, whatever its size, is \
                         charged to the devices that use it first. A slow link would cost time in \
                         proportion to the bytes; a cost per transfer would not depend on the order."
        .to_owned();
    finding.next = "Measure again with buffers that are kept and devices in random order: \
                    cluster-health h2d --repeats 3 --out DIR (arenas are allocated before the first \
                    transfer)."
        .to_owned();
    Some(finding)
}

/// Points at regular distances that are slow.
pub(super) fn checkpoint(view: &View<'_>) -> Option<Finding> {
    let scan = &view.scan;
    let table = view.table();
    let mut slow: Vec<(u32, f64, f64)> = Vec::new();
    for grid in &scan.grids {
        let border = (4.0 * grid.point_sd).max(0.05);
        let usual = grid.usual_ns();
        for slot in 0..scan.slots.len() {
            for line in 0..scan.inner() {
                let rest = grid.rest(scan, slot, line);
                if rest > border {
                    let share = rest.exp() - 1.0;
                    slow.push((grid.seq(slot, line), usual * share, share));
                }
            }
        }
    }
    slow.sort_unstable_by_key(|(seq, ..)| *seq);
    let seqs: Vec<u32> = slow.iter().map(|(seq, ..)| *seq).collect();
    let last = table.obs.last()?.seq;
    let periodic = artefact::periodic(&seqs, last, |seq| {
        table.obs.binary_search_by_key(&seq, |obs| obs.seq).is_ok()
    })?;
    // A line of the scan, or a few of them, recur at regular distances by themselves.
    let pass = u32::try_from(scan.inner() * scan.grids.len()).unwrap_or(u32::MAX);
    if periodic.every % pass == 0 || pass % periodic.every == 0 {
        return None;
    }
    let of = |value: &dyn Fn(&(u32, f64, f64)) -> f64| {
        let mut values: Vec<f64> = slow
            .iter()
            .filter(|(seq, ..)| seq % periodic.every == periodic.phase)
            .map(value)
            .collect();
        median(&mut values)
    };
    Some(artefact::describe_checkpoint(table, &periodic, of(&|s| s.1), of(&|s| s.2)))
}
