//! Visits to lines: rates, and ratios to the unbound thread with what blocks say about them.

use std::collections::BTreeMap;

use cluster_health_core::NodeId;
use cluster_health_core::affinity::CpuSet;

use super::measure::{Cell, Reading};
use super::{
    Claim, Memory, PoliciesPlan, Policy, PolicyLine, PolicyRank, PolicySeat, PolicyStatus,
    PolicyVisit, ToNone,
};
use crate::estimate::relative_mad;
use crate::stats::{median, median_ns, to_f64};
use crate::student::{Contrast, holm};
use crate::validate::Convention;
use crate::visit::Operation;

/// Probability of one wrong claim or more in a sweep without any difference.
const LEVEL: f64 = 0.05;

/// What was read, by cell and rank.
pub(super) type Readings = BTreeMap<Cell, BTreeMap<u32, Vec<Reading>>>;

/// Rates by block.
type Blocks = BTreeMap<u32, f64>;

pub(super) fn lines(
    plan: &PoliciesPlan,
    seats: &[PolicySeat],
    mut readings: Readings,
) -> Vec<PolicyLine> {
    let mut cells = plan.cells();
    cells.sort_unstable();
    let none = plan.policies.iter().position(|policy| *policy == Policy::None);
    let base = |cell: &Cell| none.map(|policy| Cell { policy, ..*cell });
    let mut of_ranks = BTreeMap::<(Cell, u32), Blocks>::new();
    let mut of_lines = BTreeMap::<Cell, Blocks>::new();
    for (cell, ranks) in &readings {
        for (rank, readings) in ranks {
            of_ranks.insert((*cell, *rank), blocks(readings, |visit| own_rate(cell, *rank, visit)));
        }
        let over = ranks.keys().map(|rank| &of_ranks[&(*cell, *rank)]);
        of_lines.insert(
            *cell,
            match (cell.operation, ranks.values().next()) {
                // Every rank has the times of all.
                (Operation::AllGather, Some(readings)) => {
                    blocks(readings, |visit| whole_rate(cell, visit))
                }
                _ => middle_over(over),
            },
        );
    }
    let mut lines = Vec::new();
    let mut contrasts = Vec::new();
    for cell in &cells {
        let ranks = readings.remove(cell).unwrap_or_default();
        let host_memory = ranks.values().flatten().find_map(|reading| reading.host_memory.clone());
        let (ratio, contrast) = match base(cell).filter(|base| base != cell) {
            Some(base) => to_none(of_lines.get(cell), of_lines.get(&base)),
            None => (None, None),
        };
        if let Some(contrast) = contrast {
            contrasts.push((lines.len(), contrast));
        }
        let per_rank: Vec<PolicyRank> = ranks
            .into_iter()
            .map(|(rank, readings)| {
                let base = base(cell).filter(|base| base != cell);
                let ratio = base.and_then(|base| {
                    to_none(of_ranks.get(&(*cell, rank)), of_ranks.get(&(base, rank))).0
                });
                let seat = seats.iter().find(|seat| seat.rank == rank);
                let node = seat.and_then(|seat| seat.policies.get(cell.policy)?.memory_node);
                let mut rates: Vec<f64> = of_ranks
                    .get(&(*cell, rank))
                    .into_iter()
                    .flat_map(|b| b.values().copied())
                    .collect();
                per_rank(cell, rank, (ratio, node), &mut rates, readings)
            })
            .collect();
        let gathers: Option<Vec<f64>> = (cell.operation == Operation::AllGather)
            .then(|| of_lines.get(cell).into_iter().flat_map(|b| b.values().copied()).collect());
        let line = line(plan, cell, ratio, per_rank, gathers);
        lines.push(PolicyLine { host_memory, ..line });
    }
    claim(&mut lines, &contrasts);
    lines
}

/// Rates of the visits with times.
fn blocks(readings: &[Reading], rate: impl Fn(&PolicyVisit) -> f64) -> Blocks {
    let rates = readings.iter().map(|reading| (reading.visit.block, rate(&reading.visit)));
    rates.filter(|(_, rate)| rate.is_finite()).collect()
}

fn own_rate(cell: &Cell, rank: u32, visit: &PolicyVisit) -> f64 {
    let Some(times) = &visit.times else { return f64::NAN };
    let own = times.rank_ns.as_ref().and_then(|ranks| ranks.get(rank as usize));
    let ns = own.map_or_else(|| times.median_ns(), |own| median_ns(own));
    to_f64(cell.bytes.bytes()) / ns
}

fn whole_rate(cell: &Cell, visit: &PolicyVisit) -> f64 {
    visit.times.as_ref().map_or(f64::NAN, |times| to_f64(cell.bytes.bytes()) / times.median_ns())
}

/// Block by block the median over the ranks.
fn middle_over<'a, I: Iterator<Item = &'a Blocks>>(ranks: I) -> Blocks {
    let mut all = BTreeMap::<u32, Vec<f64>>::new();
    for (block, rate) in ranks.flatten() {
        all.entry(*block).or_default().push(*rate);
    }
    all.into_iter().map(|(block, mut rates)| (block, median(&mut rates))).collect()
}

/// Blocks are the units: what they have in common cancels, what varies between them is the error.
fn to_none(here: Option<&Blocks>, base: Option<&Blocks>) -> (Option<ToNone>, Option<Contrast>) {
    let (Some(here), Some(base)) = (here, base) else { return (None, None) };
    let logs: Vec<f64> =
        here.iter().filter_map(|(block, rate)| Some((rate / base.get(block)?).ln())).collect();
    if logs.is_empty() {
        return (None, None);
    }
    let contrast = Contrast::paired(&logs);
    let (low, high) = contrast.interval();
    let end = |log: f64| log.is_finite().then(|| log.exp());
    let ratio = ToNone {
        ratio: contrast.difference.exp(),
        low: end(low),
        high: end(high),
        blocks: u32::try_from(logs.len()).unwrap_or(u32::MAX),
        claim: None,
    };
    (Some(ratio), (logs.len() > 1).then_some(contrast))
}

fn claim(lines: &mut [PolicyLine], contrasts: &[(usize, Contrast)]) {
    let p: Vec<f64> = contrasts.iter().map(|(_, contrast)| contrast.p()).collect();
    for ((at, _), rejected) in contrasts.iter().zip(holm(&p, LEVEL)) {
        let Some(ratio) = &mut lines[*at].to_none else { continue };
        ratio.claim = match (rejected, ratio.low, ratio.high) {
            (true, Some(low), _) if low > 1.0 => Some(Claim::Faster),
            (true, _, Some(high)) if high < 1.0 => Some(Claim::Slower),
            _ => None,
        };
    }
}

fn per_rank(
    cell: &Cell,
    rank: u32,
    (to_none, node): (Option<ToNone>, Option<NodeId>),
    rates: &mut [f64],
    readings: Vec<Reading>,
) -> PolicyRank {
    let value = median(rates);
    let times = || readings.iter().filter_map(|reading| reading.visit.times.as_ref());
    let elsewhere = |reading: &Reading| {
        let nodes = reading.visit.page_nodes.as_ref();
        cell.memory == Some(Memory::Bound)
            && nodes.is_some_and(|nodes| nodes.keys().any(|found| Some(*found) != node))
    };
    PolicyRank {
        rank,
        value: value.is_finite().then_some(value),
        spread: Some(relative_mad(rates, value)).filter(|spread| spread.is_finite()),
        to_none,
        ran_on: times().flat_map(|visit| visit.ran_on.iter().copied()).collect::<CpuSet>(),
        unsettled: times().map(|visit| u32::from(!visit.settled)).sum(),
        misplaced: readings.iter().map(|reading| u32::from(elsewhere(reading))).sum(),
        visits: readings.into_iter().map(|reading| reading.visit).collect(),
    }
}

fn line(
    plan: &PoliciesPlan,
    cell: &Cell,
    to_none: Option<ToNone>,
    per_rank: Vec<PolicyRank>,
    gathers: Option<Vec<f64>>,
) -> PolicyLine {
    let visits = || per_rank.iter().flat_map(|rank| &rank.visits);
    let mut values: Vec<f64> = per_rank.iter().filter_map(|rank| rank.value).collect();
    let mut spreads: Vec<f64> = per_rank.iter().filter_map(|rank| rank.spread).collect();
    let some = |value: f64| value.is_finite().then_some(value);
    let measured =
        |rank: &PolicyRank| rank.visits.iter().filter(|visit| visit.times.is_some()).count();
    let worst = [PolicyStatus::Failed, PolicyStatus::Skipped, PolicyStatus::Measured]
        .into_iter()
        .find(|status| visits().any(|visit| visit.status == *status));
    let status = worst.unwrap_or(if per_rank.is_empty() {
        PolicyStatus::NotMeasured
    } else {
        PolicyStatus::NotAvailable
    });
    PolicyLine {
        policy: plan.policies[cell.policy].clone(),
        memory: cell.memory,
        operation: cell.operation,
        load: plan.load.clone(),
        bytes: cell.bytes,
        unit: "GB/s".to_owned(),
        convention: Convention::PerRank,
        host_memory: None,
        ranks: u32::try_from(values.len()).unwrap_or(u32::MAX),
        repetitions: per_rank
            .iter()
            .map(measured)
            .filter(|count| *count > 0)
            .min()
            .and_then(|count| u32::try_from(count).ok())
            .unwrap_or(0),
        min: values.iter().copied().reduce(f64::min),
        max: values.iter().copied().reduce(f64::max),
        median: some(median(&mut values)),
        spread: some(median(&mut spreads)),
        collective: gathers.and_then(|mut rates| some(median(&mut rates))),
        to_none,
        status,
        reason: visits().find_map(|visit| visit.reason.clone()),
        errno: visits().find_map(|visit| visit.errno),
        per_rank,
    }
}
