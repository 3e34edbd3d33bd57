//! Costs per transfer that begin at some time: added to every size alike, they change every ratio,
//! and must be taken out of the times before ratios are compared.

use super::fit::Fit;
use super::table::{Obs, Table};
use crate::stats::median;

/// From `seq` on every transfer (to the device, if one is named) took `ns` longer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Additive {
    pub(crate) seq: u32,
    pub(crate) col: Option<usize>,
    pub(crate) ns: f64,
}

impl Additive {
    /// True for a point that has it.
    pub(crate) fn is_in(&self, obs: &Obs) -> bool {
        obs.seq >= self.seq && self.col.is_none_or(|col| col == usize::from(obs.col))
    }
}

/// Share of the time of the smallest size that such a cost must have.
const LEAST_SHARE: f64 = 0.02;

/// The costs that steps of the smallest size stand for, as far as a larger size has the same.
pub(crate) fn find(table: &Table, fits: &[Option<Fit>]) -> Vec<Additive> {
    let mut present = fits.iter().enumerate().filter_map(|(size, fit)| Some((size, fit.as_ref()?)));
    let Some((small_size, small)) = present.next() else { return Vec::new() };
    let large = present.next_back();
    let mut found = Vec::new();
    let growth = match large {
        Some((size, _)) => {
            table.sizes[size].bytes() as f64 / table.sizes[small_size].bytes() as f64
        }
        // The probes tell what the one size alone cannot.
        None => table.sizes[small_size].bytes() as f64 / crate::plan::PROBE_SIZE.bytes() as f64,
    };
    if growth < 1.5 {
        return found;
    }
    let mut check = |cut: (u32, u32, u32), col: Option<usize>| {
        let small_ns = shift(table, small, cut, col);
        let other_ns = match large {
            Some((_, large)) => shift(table, large, cut, col),
            None => shift_of_probes(table, cut, col),
        };
        let (Some(small_ns), Some(other_ns)) = (small_ns, other_ns) else { return };
        let (low, high) = if large.is_some() { (small_ns, other_ns) } else { (other_ns, small_ns) };
        // The same at both sizes, or growing with the bytes: whichever is nearer.
        let is_fixed = low * high > 0.0 && high / low < growth.sqrt();
        if is_fixed && low.abs() > LEAST_SHARE * small.mu.exp().min(high.abs() / LEAST_SHARE) {
            found.push(Additive { seq: cut.1, col, ns: low });
        }
    };
    for (at, &cut) in small.cuts.iter().enumerate() {
        let before = if at == 0 { 0 } else { small.cuts[at - 1] };
        let after = small.cuts.get(at + 1).copied().unwrap_or(u32::MAX);
        check((before, cut, after), None);
    }
    // Few points do not tell a cost from a factor.
    for step in small.steps.iter().filter(|step| !step.is_short) {
        check((0, step.seq, u32::MAX), Some(step.col));
    }
    found
}

/// Change of the typical time at a cut between two others, nanoseconds.
fn shift(
    table: &Table,
    fit: &Fit,
    (before, cut, after): (u32, u32, u32),
    col: Option<usize>,
) -> Option<f64> {
    let mut sides = [Vec::new(), Vec::new()];
    for (&at, &time) in fit.which.iter().zip(&fit.time) {
        let obs = &table.obs[at as usize];
        let own = usize::from(obs.col);
        if obs.seq < before || obs.seq >= after || col.is_some_and(|col| col != own) {
            continue;
        }
        let kinship = table.kinship(usize::from(obs.row), own);
        let level = f64::from(obs.ln)
            - fit.row[usize::from(obs.row)]
            - fit.col[own]
            - fit.class[kinship as usize]
            - if col.is_some() { f64::from(time) } else { 0.0 };
        sides[usize::from(obs.seq >= cut)].push(level);
    }
    let [mut early, mut late] = sides;
    if early.len() < 2 || late.len() < 2 {
        return None;
    }
    Some(median(&mut late).exp() - median(&mut early).exp())
}

fn shift_of_probes(
    table: &Table,
    (before, cut, after): (u32, u32, u32),
    col: Option<usize>,
) -> Option<f64> {
    let mut sides = [Vec::new(), Vec::new()];
    for obs in &table.obs {
        let is_probe = usize::from(obs.size) == table.sizes.len();
        let is_other = col.is_some_and(|col| col != usize::from(obs.col));
        if is_probe && !is_other && obs.seq >= before && obs.seq < after {
            sides[usize::from(obs.seq >= cut)].push(f64::from(obs.ln));
        }
    }
    let [mut early, mut late] = sides;
    if early.len() < 3 || late.len() < 3 {
        return None;
    }
    Some(median(&mut late).exp() - median(&mut early).exp())
}

/// Takes the costs out of the times.
pub(crate) fn remove(table: &mut Table, costs: &[Additive]) {
    for obs in &mut table.obs {
        let cost: f64 = costs.iter().filter(|cost| cost.is_in(obs)).map(|cost| cost.ns).sum();
        if cost.abs() > 0.0 {
            let time = f64::from(obs.ln).exp();
            #[allow(clippy::cast_possible_truncation, reason = "a millionth is enough")]
            let ln = (time - cost).max(0.1 * time).ln() as f32;
            obs.ln = ln;
        }
    }
    table.costs.extend_from_slice(costs);
}
