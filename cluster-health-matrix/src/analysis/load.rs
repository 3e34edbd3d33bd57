//! What a load changes: each cell under a profile against the same cell on the idle machine, paired
//! within blocks.
//!
//! A block measures a cell under all profiles within a short time and in alternating order. Their
//! ratio is free of what the cell, the core, the device and the time have in common, so that what is
//! left is the load: its general slowdown, which is no fault, and members that it slows down more.
//! Those are looked for, confirmed and judged like any other slow rows, columns and rectangles, in a
//! table whose times are the idle machine's × that ratio.

use std::collections::{BTreeMap, HashMap};

use cluster_health_core::load::LoadProfile;

use super::finding::{Effect, Finding, Kind};
use super::judge::{self, effect_of};
use super::table::{Obs, Table};
use super::{Fitted, suspect};
use crate::run::Manifest;
use crate::samples::{Phase, Sweep};
use crate::schedule::Cell;
use crate::stats::median;

/// The profile that the others are compared with.
const IDLE: &str = "idle";

/// A visit to a cell at one size, whatever the load.
type Visit = (u8, u16, u16, u16, bool);

fn visit_of(obs: &Obs) -> Option<Visit> {
    let counts = !obs.sentinel && obs.phase != Phase::Probe;
    counts.then_some((obs.size, obs.block, obs.row, obs.col, obs.is_confirm()))
}

/// Differences of logarithmic times (load − idle) of the cells that both tables visited in one block.
fn differences<'a>(idle: &Table, loaded: &'a Table) -> Vec<(&'a Obs, f64, bool)> {
    let reference: HashMap<Visit, &Obs> =
        idle.obs.iter().filter_map(|obs| Some((visit_of(obs)?, obs))).collect();
    let pair = |obs: &'a Obs| {
        let idle = reference.get(&visit_of(obs)?)?;
        Some((obs, f64::from(obs.ln) - f64::from(idle.ln), obs.settled && idle.settled))
    };
    loaded.obs.iter().filter_map(pair).collect()
}

/// The loaded table with every time replaced by the idle machine's typical time × the ratio of this
/// cell in this block.
fn relative(idle: &Table, loaded: &Table) -> Table {
    let typical: Vec<f64> = (0..idle.sizes.len())
        .map(|size| {
            let times =
                idle.obs.iter().filter(|obs| obs.is_block() && usize::from(obs.size) == size);
            median(&mut times.map(|obs| f64::from(obs.ln)).collect::<Vec<f64>>())
        })
        .collect();
    let mut table = loaded.empty();
    table.obs = differences(idle, loaded)
        .into_iter()
        .filter_map(|(obs, difference, settled)| {
            let ln = typical.get(usize::from(obs.size))? + difference;
            #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
            let ln = ln as f32;
            ln.is_finite().then_some(Obs { ln, settled, lead_ns: 0.0, ..*obs })
        })
        .collect();
    table
}

/// The visits that confirm or refute what the tables of one sweep, one per load profile, make
/// suspicious: in themselves and against the idle one. The cells of each round are visited under
/// all profiles.
pub(super) fn confirmation(
    tables: Vec<Table>,
    min_effect: f64,
    seed: u64,
    usable: &dyn Fn(usize, usize) -> bool,
) -> Vec<Vec<Cell>> {
    let mut compared = Vec::new();
    if let Some(idle) = tables.iter().find(|table| table.load == IDLE) {
        let others = tables.iter().filter(|table| table.load != IDLE);
        compared.extend(others.map(|table| relative(idle, table)));
    }
    let mut all: Vec<std::collections::BTreeSet<Cell>> = Vec::new();
    for (at, table) in (0..).zip(tables.into_iter().chain(compared)) {
        let seed = seed.wrapping_add(at << 32);
        let rounds = super::confirmation_of(table, min_effect, seed, usable);
        all.resize_with(all.len().max(rounds.len()), Default::default);
        for (cells, round) in all.iter_mut().zip(rounds) {
            cells.extend(round);
        }
    }
    all.into_iter().map(|cells| cells.into_iter().collect()).collect()
}

/// What the loads of a run change.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// Members that a load slows down more than the others.
    findings: Vec<Finding>,
    /// How much each load slows down everything.
    pub(super) tested: Vec<String>,
}

/// Compares all profiles of each sweep with its idle one; `settings` gives a sweep's smallest effect.
pub(super) fn compare(
    tables: &BTreeMap<(Sweep, String), Table>,
    manifest: &Manifest,
    min_effect: impl Fn(Sweep) -> f64,
) -> Loads {
    let mut loads = Loads::default();
    for ((sweep, load), table) in tables {
        let Some(idle) = tables.get(&(*sweep, IDLE.to_owned())).filter(|_| load != IDLE) else {
            continue;
        };
        if let Some(Effect { ratio, low, high }) = slowdown(idle, table) {
            loads.tested.push(format!(
                "{sweep} under {load}: × {ratio:.3} of the idle machine's rate (95 % interval \
                 {low:.3} to {high:.3}), cells paired within blocks"
            ));
        }
        let found = sensitive(idle, table, min_effect(*sweep));
        loads.findings.extend(found.into_iter().map(|mut finding| {
            finding.facts.extend(utilisation(manifest, *sweep, load));
            finding
        }));
    }
    loads
}

/// Whether a line of [`Diagnosis::tested`](super::Diagnosis::tested) says what a load does to all
/// cells, not what would have been found.
pub(crate) fn is_comparison(line: &str) -> bool {
    line.contains(" of the idle machine's rate (")
}

/// A line that names the load which it is about, unless that is none.
pub(super) fn under(line: String, load: &str) -> String {
    if load == IDLE { line } else { format!("{line}, under {load}") }
}

/// How busy the burners of a load really were.
fn utilisation(manifest: &Manifest, sweep: Sweep, load: &str) -> Vec<String> {
    let records = manifest.load_profiles.iter();
    let of_load = records.filter(|record| record.sweep == sweep && record.load.name == load);
    of_load
        .filter_map(|record| {
            let load = &record.load;
            Some(format!(
                "the {} burners of {} on rank {} had {:.1} % of their CPUs or devices",
                load.burners,
                load.name,
                load.rank,
                100.0 * load.utilisation?
            ))
        })
        .collect()
}

/// The rate under a load ÷ that of the idle machine over all cells, from the visits' means: as many
/// visits come after the idle ones as before them, so that drift averages out. `None` with fewer than
/// three visits.
fn slowdown(idle: &Table, loaded: &Table) -> Option<Effect> {
    let mut visits = BTreeMap::<(u16, u16), (f64, f64)>::new();
    for (obs, difference, _) in differences(idle, loaded) {
        if obs.is_block() {
            let (sum, count) = visits.entry((obs.block, obs.row)).or_default();
            *sum += difference;
            *count += 1.0;
        }
    }
    let mut means: Vec<f64> = visits.values().map(|(sum, count)| sum / count).collect();
    if means.len() < 3 {
        return None;
    }
    means.sort_unstable_by(f64::total_cmp);
    // Without the tails: stalls are none of the load.
    let cut = means.len() / 10;
    let kept = &means[cut..means.len() - cut];
    let count = kept.len() as f64;
    let mean = kept.iter().sum::<f64>() / count;
    let winsorised = means.iter().map(|value| value.clamp(kept[0], kept[kept.len() - 1]) - mean);
    let square: f64 = winsorised.map(|deviation| deviation * deviation).sum();
    let se = (square / (means.len() - 1) as f64).sqrt() * (means.len() as f64).sqrt() / count;
    Some(effect_of(mean, se))
}

/// Members that a load slows down more than the others, confirmed.
fn sensitive(idle: &Table, loaded: &Table, min_effect: f64) -> Vec<Finding> {
    let mut fitted = Fitted::new(relative(idle, loaded));
    let suspects = suspect::find(&fitted.table, &fitted.fits, min_effect);
    fitted.refit(&suspects);
    let Fitted { table, fits, .. } = &fitted;
    let (found, _) = judge::confirmed(table, fits, &suspects, min_effect);
    found.into_iter().filter_map(|finding| as_sensitive(table, finding)).collect()
}

/// The same finding as one about the load; `None` for members that it slows down less, for what began
/// with time, and for what ranks that share a core do, which is no place on the machine.
fn as_sensitive(table: &Table, finding: Finding) -> Option<Finding> {
    if matches!(finding.kind, Kind::SameCore | Kind::SmtSibling)
        || finding.is_artefact
        || finding.effect.is_none_or(|effect| effect.ratio >= 1.0)
    {
        return None;
    }
    let load = &table.load;
    let what = load.parse().map_or("this load", |profile| match profile {
        LoadProfile::Device => "work on the devices",
        _ => "work on the CPUs around them",
    });
    let mut finding = Finding { kind: Kind::LoadSensitive, ..finding };
    finding.facts.insert(
        0,
        format!("under {load}, each cell against itself on the idle machine in the same block:"),
    );
    finding.inference = format!(
        "Slow under {load} only, beyond what that load costs everything: {what} takes from these \
         members what it does not take from the others (shared memory channels, power or clock \
         limits, interrupts)."
    );
    finding.next = "Compare power, clock and memory-channel settings of these members with the \
                    others; measure again with more profiles (--load idle,cpu:1,cpu:4,device) to see \
                    what it grows with."
        .to_owned();
    Some(finding)
}

impl Loads {
    /// All findings of a run: a member that is slow under a load only is sensitive to it, and what
    /// is found on the idle machine and under a load is one finding.
    pub(super) fn join(self, findings: Vec<Finding>) -> Vec<Finding> {
        let (mut all, under): (Vec<Finding>, Vec<Finding>) = findings
            .into_iter()
            .partition(|finding| finding.load.as_deref().is_none_or(|load| load == IDLE));
        for finding in under {
            if let Some(idle) = all.iter_mut().find(|other| is_same(other, &finding)) {
                idle.facts.extend(also_under(&finding));
                continue;
            }
            if !self.findings.iter().any(|sensitive| explains(sensitive, &finding)) {
                all.push(finding);
            }
        }
        all.extend(self.findings);
        all
    }
}

fn also_under(finding: &Finding) -> Option<String> {
    let load = finding.load.as_deref()?;
    Some(match finding.effect {
        Some(effect) => format!("also under {load}: × {:.3}", effect.ratio),
        None => format!("also under {load}"),
    })
}

/// Ids of a place: devices, CPUs, CPUs of either rank, nodes.
fn places(finding: &Finding) -> [&[u32]; 5] {
    let Finding { devices, cpus, rank0_cpus, rank1_cpus, numa_nodes, .. } = finding;
    [devices, cpus, rank0_cpus, rank1_cpus, numa_nodes]
}

/// Most of the smaller list is in the other one; nothing restricts as nothing does.
fn mostly(a: &[u32], b: &[u32]) -> bool {
    let (few, many) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    let shared = few.iter().filter(|id| many.contains(id)).count();
    few.is_empty() == many.is_empty() && 2 * shared >= few.len() && 4 * few.len() >= many.len()
}

/// The same kind at the same place of the same sweep: one cause.
fn is_same(a: &Finding, b: &Finding) -> bool {
    (a.kind, a.sweep) == (b.kind, b.sweep)
        && places(a).iter().zip(places(b)).all(|(a, b)| mostly(a, b))
}

/// Whether a finding of slow members under a load is what a sensitivity to it looks like.
fn explains(sensitive: &Finding, finding: &Finding) -> bool {
    let is_structure = matches!(
        finding.kind,
        Kind::SlowDevice
            | Kind::SlowCore
            | Kind::SlowRank0Core
            | Kind::SlowRank1Core
            | Kind::SlowBlock
            | Kind::SlowCell
            | Kind::NumaEffect
            | Kind::Underpowered
            | Kind::Inconclusive
    );
    // A rectangle may be found with or without its last row.
    let overlap =
        |a: &[u32], b: &[u32]| a.is_empty() || b.is_empty() || a.iter().any(|id| b.contains(id));
    is_structure
        && (&sensitive.sweep, &sensitive.load) == (&finding.sweep, &finding.load)
        && places(sensitive).iter().zip(places(finding)).take(4).all(|(a, b)| overlap(a, b))
}

#[cfg(test)]
mod tests {
    use cluster_health_core::ByteSize;

    use super::*;
    use crate::matrix::Axis;

    #[test]
    fn what_began_with_time_is_not_the_loads_doing() {
        let axis = Axis { name: "cpu", ids: vec![0], nodes: vec![None] };
        let sizes = vec![ByteSize::mib(4)];
        let table = Table::new(Sweep::H2d, "cpu:2", sizes, (axis.clone(), axis), |_| None);
        let sensitive = |kind| {
            let mut finding = Finding::new(kind, Some(Sweep::H2d), Some("cpu:2"));
            finding.effect = Some(effect_of(0.2, 0.01));
            as_sensitive(&table, finding).map(|finding| finding.kind)
        };
        assert_eq!(sensitive(Kind::SlowDevice), Some(Kind::LoadSensitive));
        assert_eq!(sensitive(Kind::TimeStep), None);
    }
}
