//! What the first transfer of a point took beyond the others: visits, new buffers, checkpoints.

use super::{LEAST, LEAST_Z};
use crate::analysis::finding::{Finding, Kind};
use crate::analysis::table::{Obs, Table};
use crate::stats::{median, robust_sd};

/// Of a median, in standard deviations ÷ √count.
const OF_MEDIAN: f64 = 1.25;
/// Fewest points that tell a level.
const FEWEST: usize = 8;

/// Points of one size, or the probes.
struct Group<'a> {
    obs: Vec<&'a Obs>,
    /// Typical transfer, nanoseconds.
    usual_ns: f64,
    /// What a first transfer takes longer without any cause, and its spread.
    base_ns: f64,
    sd_ns: f64,
}

fn groups(table: &Table) -> Vec<Group<'_>> {
    (0..=table.sizes.len())
        .filter_map(|size| {
            let obs: Vec<&Obs> =
                table.obs.iter().filter(|obs| usize::from(obs.size) == size).collect();
            if obs.len() < FEWEST {
                return None;
            }
            let usual_ns = median(&mut times(&obs));
            let still: Vec<f64> = leads_of(&obs, |obs| !obs.moved);
            let calm = if still.len() >= FEWEST { still } else { leads_of(&obs, |_| true) };
            let typical = median(&mut calm.clone());
            let sd_ns = robust_sd(&calm, typical).max(1e-3 * usual_ns);
            // Where every point follows a change there is nothing to compare with but 0.
            let base_ns =
                if obs.iter().filter(|obs| !obs.moved).count() >= FEWEST { typical } else { 0.0 };
            Some(Group { obs, usual_ns, base_ns, sd_ns })
        })
        .collect()
}

fn times(obs: &[&Obs]) -> Vec<f64> {
    obs.iter().map(|obs| f64::from(obs.ln).exp()).collect()
}

fn leads_of(obs: &[&Obs], wanted: impl Fn(&Obs) -> bool) -> Vec<f64> {
    obs.iter().filter(|obs| wanted(obs)).map(|obs| f64::from(obs.lead_ns)).collect()
}

/// What first transfers tell.
pub(crate) fn leads(table: &Table) -> Vec<Finding> {
    let groups = groups(table);
    // One transfer per point has no first one.
    if groups.iter().all(|group| group.obs.iter().all(|obs| obs.lead_ns.abs() < 0.5)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    found.extend(allocation_stall(table, &groups));
    found.extend(first_visit(table, &groups));
    found.extend(checkpoint(table, &groups));
    found
}

/// The fixed cost of the points in question, from the group that tells it best: its median, its
/// standard error, its share of a transfer and how many points.
fn cost(groups: &[Group<'_>], wanted: impl Fn(&Obs) -> bool) -> Option<(f64, f64, f64, usize)> {
    groups
        .iter()
        .filter_map(|group| {
            let mut values = leads_of(&group.obs, &wanted);
            let count = values.len();
            if count == 0 {
                return None;
            }
            let extra = median(&mut values) - group.base_ns;
            let sd = robust_sd(&values, extra + group.base_ns).max(group.sd_ns);
            Some((extra, OF_MEDIAN * sd / (count as f64).sqrt(), extra / group.usual_ns, count))
        })
        .min_by(|a, b| a.1.total_cmp(&b.1))
}

fn first_visit(table: &Table, groups: &[Group<'_>]) -> Option<Finding> {
    let (extra, error, share, count) = cost(groups, |obs| obs.moved && !obs.touched)?;
    if count < FEWEST || extra < LEAST_Z * error || share < LEAST {
        return None;
    }
    // A cost of a percent or more of what is measured.
    let relevant = groups.iter().filter(|group| extra > LEAST * group.usual_ns).count();
    let mut finding = Finding::new(Kind::FirstVisit, Some(table.sweep), Some(&table.load));
    finding.extra_us = Some(extra / 1e3);
    finding.scales_with_bytes = Some(false);
    finding.facts.push(format!(
        "the first transfer after a change of CPU takes {:+.1} µs (± {:.1}) more than the others \
         of its point, {:.1} % of a transfer; {count} such points, seen at {relevant} of {} sizes",
        extra / 1e3,
        2.0 * error / 1e3,
        100.0 * share,
        groups.len()
    ));
    finding.inference = "A new core starts with cold caches and an idle path: a cost of visiting, \
                         not of the core."
        .to_owned();
    finding.next =
        "Nothing, as long as first transfers are discarded (do not use --warmup 0).".to_owned();
    Some(finding)
}

fn allocation_stall(table: &Table, groups: &[Group<'_>]) -> Option<Finding> {
    // Pairs have no host buffers.
    if table.sweep.is_pair() {
        return None;
    }
    let touched = table.obs.iter().filter(|obs| obs.touched).count();
    // Buffers that are made before the first bind are new in the first points of the run.
    let early = table.obs.iter().take(4).map(|obs| obs.seq).max()?;
    let is_new = |obs: &Obs| if touched > 0 { obs.touched } else { obs.seq <= early };
    let mut worst: Option<(f64, f64)> = None;
    let mut stalled = 0;
    let mut of = 0;
    let mut extras = Vec::new();
    for group in groups {
        for obs in group.obs.iter().filter(|obs| is_new(obs)) {
            of += 1;
            let extra = f64::from(obs.lead_ns) - group.base_ns;
            if extra > 10.0 * group.sd_ns && extra > 0.3 * group.usual_ns && extra > 1e5 {
                stalled += 1;
                extras.push(extra);
                let share = extra / group.usual_ns;
                if worst.is_none_or(|(most, _)| share > most) {
                    worst = Some((share, extra));
                }
            }
        }
    }
    let (share, _) = worst?;
    if touched > 0 && 2 * stalled < of {
        return None;
    }
    // Any change of CPU that costs as much is no matter of buffers.
    if touched == 0
        && let Some((extra, ..)) = cost(groups, |obs| obs.moved && obs.seq > early)
        && median(&mut extras.clone()) < 3.0 * extra
    {
        return None;
    }
    let extra = median(&mut extras);
    let mut finding = Finding::new(Kind::AllocationStall, Some(table.sweep), Some(&table.load));
    finding.extra_us = Some(extra / 1e3);
    finding.scales_with_bytes = Some(false);
    let place = if touched > 0 {
        format!("{stalled} of {of} points that follow an allocation")
    } else {
        format!("{stalled} of the first {of} points of the run")
    };
    finding.facts.push(format!(
        "the first transfer takes {:.3} ms longer in {place}, up to {:.1} × a transfer",
        extra / 1e6,
        share
    ));
    finding.inference = "A new host buffer stalls the first transfers out of it: a cost of \
                         allocating, charged to whatever is measured first."
        .to_owned();
    finding.next =
        "Keep buffers for the whole run (--arena node) and warm up; in training, allocate staging \
         buffers once."
            .to_owned();
    Some(finding)
}

fn checkpoint(table: &Table, groups: &[Group<'_>]) -> Option<Finding> {
    let mut slow: Vec<(u32, f64, f64)> = Vec::new();
    for group in groups {
        for is_moved in [false, true] {
            let wanted = |obs: &Obs| obs.moved == is_moved;
            let values = leads_of(&group.obs, wanted);
            if values.is_empty() {
                continue;
            }
            let typical = median(&mut values.clone());
            let sd = robust_sd(&values, typical).max(group.sd_ns);
            slow.extend(group.obs.iter().filter(|obs| wanted(obs)).filter_map(|obs| {
                let extra = f64::from(obs.lead_ns) - typical;
                (extra > 6.0 * sd && extra > 2.0 * LEAST * group.usual_ns).then_some((
                    obs.seq,
                    extra,
                    extra / group.usual_ns,
                ))
            }));
        }
    }
    slow.sort_unstable_by_key(|(seq, ..)| *seq);
    let seqs: Vec<u32> = slow.iter().map(|(seq, ..)| *seq).collect();
    let last = table.obs.last()?.seq;
    let Periodic { every, phase, hits, of } =
        periodic(&seqs, last, |seq| table.obs.binary_search_by_key(&seq, |obs| obs.seq).is_ok())?;
    let at = |seq: u32| seq % every == phase;
    let mut extras: Vec<f64> = slow.iter().filter(|(seq, ..)| at(*seq)).map(|s| s.1).collect();
    let mut shares: Vec<f64> = slow.iter().filter(|(seq, ..)| at(*seq)).map(|s| s.2).collect();
    Some(describe_checkpoint(
        table,
        &Periodic { every, phase, hits, of },
        median(&mut extras),
        median(&mut shares),
    ))
}

/// A checkpoint finding: points at this distance cost so many nanoseconds more, that share of a
/// transfer.
pub(crate) fn describe_checkpoint(
    table: &Table,
    periodic: &Periodic,
    extra_ns: f64,
    share: f64,
) -> Finding {
    let Periodic { every, phase, hits, of } = periodic;
    let mut finding = Finding::new(Kind::Checkpoint, Some(table.sweep), Some(&table.load));
    finding.extra_us = Some(extra_ns / 1e3);
    finding.scales_with_bytes = Some(false);
    finding.replicates = Some(crate::analysis::finding::Replicates {
        seen: u32::try_from(*hits).unwrap_or(u32::MAX),
        of: u32::try_from(*of).unwrap_or(u32::MAX),
    });
    finding.facts.push(format!(
        "every {every} points (those whose number leaves {phase}) one is slow: {hits} of {of}, by \
         {:.1} µs, {:.0} % of a transfer, in the middle",
        extra_ns / 1e3,
        100.0 * share
    ));
    finding.inference =
        "Something is done at regular distances in points, such as writing results: \
                         it disturbs the point that follows, whichever it is."
            .to_owned();
    finding.next =
        "Write results between measurements on another CPU; discard the first transfer.".to_owned();
    finding
}

/// Events at regular distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Periodic {
    pub(crate) every: u32,
    pub(crate) phase: u32,
    pub(crate) hits: usize,
    pub(crate) of: usize,
}

/// Distances below this are a pattern of the plan, not of something beside it.
const SHORTEST: u32 = 8;
/// Share of the points at that distance that must be events.
const MOST_MISSES: f64 = 0.8;
/// Probability by chance, all distances together.
const CHANCE: f64 = 1e-4;

/// The distance at which events recur, counted from the first point: after each `every` points
/// the next one is an event, or the last of them. `None` when chance would explain it.
pub(crate) fn periodic(
    events: &[u32],
    last: u32,
    exists: impl Fn(u32) -> bool,
) -> Option<Periodic> {
    if events.len() < 3 || last < 4 * SHORTEST {
        return None;
    }
    let mut is_event = vec![false; last as usize + 1];
    for &event in events {
        if let Some(at) = is_event.get_mut(event as usize) {
            *at = true;
        }
    }
    let chance = events.len() as f64 / (f64::from(last) + 1.0);
    let tries = 2.0 * f64::from(last) / 3.0;
    let mut best: Option<(f64, Periodic)> = None;
    for every in SHORTEST..=last / 3 {
        for phase in [0, every - 1] {
            let first = if phase == 0 { every } else { phase };
            let (mut hits, mut of) = (0_u32, 0_u32);
            for at in (first..=last).step_by(every as usize) {
                // Four in a row that are none: it is not this distance.
                if of >= 4 && hits == 0 {
                    break;
                }
                if is_event[at as usize] {
                    hits += 1;
                    of += 1;
                } else if exists(at) {
                    of += 1;
                }
            }
            if hits < 3 || f64::from(hits) < MOST_MISSES * f64::from(of) {
                continue;
            }
            // At least so many of so many, each by chance: a bound of the binomial tail.
            let (hits_f, of_f) = (f64::from(hits), f64::from(of));
            let log_p = hits_f * (chance * of_f / hits_f * std::f64::consts::E).min(1.0).ln();
            if log_p + tries.ln() > CHANCE.ln() {
                continue;
            }
            let found = Periodic { every, phase, hits: hits as usize, of: of as usize };
            if best.is_none_or(|(least, _)| log_p < least) {
                best = Some((log_p, found));
            }
        }
    }
    best.map(|(_, found)| found)
}
