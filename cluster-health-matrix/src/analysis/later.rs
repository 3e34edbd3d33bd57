//! Devices that became slow during a run: what began with time is no property of theirs.
//!
//! Each of their points is held against the median of the other devices in the same visit, so that what
//! time does to all of them cancels out, and against two hypotheses: as slow as the confirming visits
//! found them, or not slow. Points of all sizes and of all devices of a finding count together, because
//! few visits of a small machine come before an early step.

use std::collections::BTreeSet;

use super::fit::Fit;
use super::table::Table;
use crate::stats::median;

/// Logarithm of how much more likely the first points must be without the effect than with it.
const EVIDENCE: f64 = 16.0;
/// What one point counts at most: single fast points are no step.
const OF_POINT: f64 = 10.0;

/// The point (by seq) before which the devices at `members` were not slow; `None` when they always were.
/// `effects` are those of the confirming visits by size, logarithm of the time.
pub(super) fn began(
    table: &Table,
    fits: &[Option<Fit>],
    suspected: &BTreeSet<usize>,
    members: &BTreeSet<usize>,
    effects: &[Option<f64>],
) -> Option<u32> {
    let mut series: Vec<(u32, f64)> = Vec::new();
    for (fit, effect) in fits.iter().zip(effects) {
        let (Some(fit), Some(effect)) = (fit, *effect) else { continue };
        let obs = |place: usize| &table.obs[fit.which[place] as usize];
        let mut start = 0;
        for end in 1..=fit.which.len() {
            if end < fit.which.len() && obs(end).visit == obs(start).visit {
                continue;
            }
            let level = |place: usize| {
                let col = usize::from(obs(place).col);
                (col, f64::from(obs(place).ln) - fit.steps(col, obs(place).seq))
            };
            let mut others: Vec<f64> = (start..end)
                .map(level)
                .filter(|(col, _)| !suspected.contains(col) && !members.contains(col))
                .map(|(col, level)| level - fit.col[col])
                .collect();
            // One of them may be a dip.
            if others.len() >= 2 {
                let variance = fit.point_sd.powi(2) * (1.0 + 1.57 / others.len() as f64);
                let rest = median(&mut others);
                for place in start..end {
                    let (col, level) = level(place);
                    if members.contains(&col) {
                        let rest = level - rest;
                        let odds = effect * (effect / 2.0 - rest) / variance.max(1e-8);
                        series.push((obs(place).seq, odds.clamp(-OF_POINT, OF_POINT)));
                    }
                }
            }
            start = end;
        }
    }
    series.sort_unstable_by_key(|(seq, _)| *seq);
    let mut sum = 0.0;
    let mut best = (EVIDENCE, None);
    for (at, (_, odds)) in series.iter().enumerate() {
        sum += odds;
        if sum > best.0 {
            best = (sum, series.get(at + 1).map(|(seq, _)| *seq));
        }
    }
    best.1
}
