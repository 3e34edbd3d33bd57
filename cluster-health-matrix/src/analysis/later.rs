//! Devices that became slow during a run, and devices that only the fit made slow: what began with time is
//! no property of theirs.
//!
//! Each of their points is held against the median of the other devices in the same visit, as it was
//! measured, so that what time does to all of them cancels out. Points of all sizes and probes, and of
//! all devices of a finding, count together: few visits of a small machine come before an early step.

use std::collections::BTreeSet;

use cluster_health_core::ByteSize;

use super::additive::Additive;
use super::artefact;
use super::confirm::Estimate;
use super::finding::Finding;
use super::fit::{DeviceStep, Fit};
use super::judge::{Confirmed, effect_of, growth, ids, pooled};
use super::suspect::{Shape, Suspect};
use super::table::{Obs, Table};
use crate::stats::{median, robust_sd};

/// Logarithm of how much more likely the first points must be without the effect than with it.
const EVIDENCE: f64 = 16.0;
/// What one point counts at most: noise makes none so much faster than its device is. Where the others
/// are not as usual, less.
const OF_POINT: f64 = 17.0;
const OF_DISTURBED: f64 = 8.0;
/// The others are as usual within this, logarithm of the time, and a few standard deviations.
const USUAL: f64 = 0.03;
/// Probes are small: only a cost per transfer shows in them, from this effect on.
const LEAST_OF_PROBE: f64 = 0.1;

/// Points between which steps of devices are one.
const NEAR_IN_TIME: u32 = 40;

/// Part of a cost that its estimate may be wrong by.
const LEFT_OVER: f64 = 0.1;

/// Devices of one axis and what their confirming visits say.
#[derive(Debug)]
struct Claim<'a> {
    table: &'a Table,
    fits: &'a [Option<Fit>],
    /// All devices that are suspected of anything.
    suspected: &'a BTreeSet<usize>,
    members: BTreeSet<usize>,
    /// By size, logarithm of the time.
    effects: Vec<Option<f64>>,
    /// Smaller ones are none.
    least: f64,
    /// Nanoseconds of a cost per transfer, where it is one.
    extra_ns: Option<f64>,
}

/// A point of a member against the others of its visit.
#[derive(Debug, Clone, Copy)]
struct Contrast {
    seq: u32,
    is_confirm: bool,
    /// Logarithm of its time ÷ theirs.
    rest: f64,
    /// Expected of a device that is slow as claimed.
    effect: f64,
    sd: f64,
    is_usual: bool,
}

impl Claim<'_> {
    /// Devices that nothing is known of: what others are compared with.
    fn is_free(&self, col: usize) -> bool {
        !self.suspected.contains(&col) && !self.members.contains(&col)
    }

    /// True for a device that changed with time, as the fit saw it.
    fn has_steps(&self, col: usize) -> bool {
        let is_own = |step: &DeviceStep| step.col == col;
        self.fits.iter().flatten().any(|fit| fit.steps.iter().any(is_own))
            || self.table.costs.iter().any(|cost| cost.col == Some(col))
    }

    /// Those that did not change with time, where there are enough.
    fn others(&self) -> Vec<bool> {
        let cols = 0..self.table.cols.len();
        let free: Vec<bool> = cols.clone().map(|col| self.is_free(col)).collect();
        let steady: Vec<bool> = cols.map(|col| free[col] && !self.has_steps(col)).collect();
        if steady.iter().filter(|own| **own).count() >= 2 { steady } else { free }
    }

    /// True where steps of devices may have made the members slow.
    fn is_about_steps(&self) -> bool {
        let free: Vec<usize> =
            (0..self.table.cols.len()).filter(|&col| self.is_free(col)).collect();
        let changed = free.iter().filter(|&&col| self.has_steps(col)).count();
        2 * changed >= free.len().max(1) || self.members.iter().any(|&col| self.has_steps(col))
    }

    /// The points of one size, of visits with so many others.
    fn contrasts(
        &self,
        fit: &Fit,
        effect: f64,
        (is_other, fewest): (&[bool], usize),
    ) -> Vec<Contrast> {
        let table = self.table;
        let obs = |place: usize| &table.obs[fit.which[place] as usize];
        let mut found = Vec::new();
        let mut start = 0;
        for end in 1..=fit.which.len() {
            if end < fit.which.len() && obs(end).visit == obs(start).visit {
                continue;
            }
            let mut others: Vec<f64> = (start..end)
                .map(|place| (place, usize::from(obs(place).col)))
                .filter(|(_, col)| is_other[*col])
                .map(|(place, col)| table.ln_of_device(obs(place)) - fit.col[col])
                .collect();
            if others.len() >= fewest {
                let sd = fit.point_sd * (1.0 + 1.57 / others.len() as f64).sqrt();
                let level = median(&mut others);
                let row = usize::from(obs(start).row);
                let usual = fit.mu + fit.row[row] + f64::from(fit.time[start]);
                let is_usual = (level - usual).abs() < USUAL + 3.0 * fit.point_sd;
                found.extend((start..end).map(obs).filter(|obs| self.is_member(obs)).map(|obs| {
                    let rest = table.ln_of_device(obs) - level;
                    let is_confirm = obs.is_confirm();
                    Contrast { seq: obs.seq, is_confirm, rest, effect, sd, is_usual }
                }));
            }
            start = end;
        }
        found
    }

    fn is_member(&self, obs: &Obs) -> bool {
        self.members.contains(&usize::from(obs.col))
    }

    /// The same of the probes, of a cost per transfer.
    fn probes(&self, is_other: &[bool]) -> Vec<Contrast> {
        let table = self.table;
        let Some(extra_ns) = self.extra_ns else { return Vec::new() };
        let probes: Vec<&Obs> =
            table.obs.iter().filter(|obs| usize::from(obs.size) == table.sizes.len()).collect();
        let is_of_other = |obs: &&&Obs| is_other[usize::from(obs.col)];
        let ln = |obs: &Obs| table.ln_of_device(obs);
        let mut all: Vec<f64> = probes.iter().filter(is_of_other).map(|obs| ln(obs)).collect();
        if all.len() < 4 {
            return Vec::new();
        }
        let usual = median(&mut all);
        let sd = robust_sd(&all, usual).max(0.01);
        let effect = (extra_ns / usual.exp()).max(-0.9).ln_1p();
        if effect < LEAST_OF_PROBE {
            return Vec::new();
        }
        let mut found = Vec::new();
        for visit in probes.chunk_by(|a, b| a.visit == b.visit) {
            let mut others: Vec<f64> =
                visit.iter().filter(is_of_other).map(|obs| ln(obs)).collect();
            if others.len() >= 2 {
                let level = median(&mut others);
                let is_usual = (level - usual).abs() < USUAL + 3.0 * sd;
                found.extend(visit.iter().filter(|obs| self.is_member(obs)).map(|obs| Contrast {
                    seq: obs.seq,
                    is_confirm: false,
                    rest: ln(obs) - level,
                    effect,
                    sd,
                    is_usual,
                }));
            }
        }
        found
    }

    /// All points in order of measurement, each with the logarithm of how much more likely it is without
    /// the effect than with it.
    fn series(&self) -> Vec<(Contrast, f64)> {
        let is_other = self.others();
        let mut series = self.probes(&is_other);
        for (fit, effect) in self.fits.iter().zip(&self.effects) {
            if let (Some(fit), Some(effect)) = (fit, effect.filter(|effect| *effect > self.least)) {
                // One of the others may be a dip.
                series.extend(self.contrasts(fit, effect, (&is_other, 2)));
            }
        }
        series.sort_unstable_by_key(|contrast| contrast.seq);
        let odds = |own: &Contrast| {
            // What is faster than a healthy device says that the others are slow.
            if own.rest < -4.0 * own.sd - USUAL {
                return 0.0;
            }
            let odds = own.effect * (own.effect / 2.0 - own.rest) / (own.sd * own.sd).max(1e-8);
            odds.clamp(-OF_POINT, if own.is_usual { OF_POINT } else { OF_DISTURBED })
        };
        series.into_iter().map(|own| (own, odds(&own))).collect()
    }

    /// The last point (by seq) at which the devices were not slow; `None` when they always were.
    fn last_healthy(&self) -> Option<u32> {
        let series = self.series();
        let mut sum = 0.0;
        let mut best = (EVIDENCE, 0);
        for (at, (_, odds)) in series.iter().enumerate() {
            sum += odds;
            if sum > best.0 {
                best = (sum, at + 1);
            }
        }
        let before = &series[..best.1];
        // Less slow before a step is slow, too.
        let is_healthy = |(own, _): &&(Contrast, f64)| own.rest < 3.0 * own.sd + USUAL;
        let healthy = before.iter().filter(is_healthy).count();
        before.last().filter(|_| 4 * healthy > 3 * before.len()).map(|(own, _)| own.seq)
    }

    /// False when the points until `seq` are rather slow.
    fn may_be_healthy_until(&self, seq: u32) -> bool {
        let series = self.series();
        let until = series.iter().take_while(|(own, _)| own.seq <= seq);
        until.map(|(_, odds)| odds).sum::<f64>() >= 0.0
    }

    /// True where a large cost was taken out of the devices' times, and they are slow by what its estimate
    /// may be wrong by.
    fn is_left_over(&self) -> bool {
        let of_members = |cost: &&Additive| cost.col.is_some_and(|col| self.members.contains(&col));
        let costs = self.table.costs.iter().filter(of_members).map(|cost| cost.ns.abs());
        let largest = costs.fold(0.0, f64::max);
        self.extra_ns.is_some_and(|extra_ns| extra_ns.abs() < LEFT_OVER * largest)
    }

    /// False when the confirming visits, as they were measured, do not show at all sizes what the fit
    /// says of them: steps that it saw in these devices or the others made them slow.
    fn is_as_measured(&self) -> bool {
        if !self.is_about_steps() {
            return true;
        }
        let is_other = self.others();
        self.fits.iter().zip(&self.effects).all(|(fit, effect)| {
            let (Some(fit), Some(effect)) = (fit, *effect) else { return true };
            if effect < self.least {
                return true;
            }
            let contrasts = self.contrasts(fit, effect, (&is_other, 1));
            let confirming = contrasts.iter().filter(|own| own.is_confirm);
            let mut rests: Vec<f64> = confirming.map(|own| own.rest).collect();
            rests.is_empty() || median(&mut rests) > effect / 2.0
        })
    }
}

/// Takes devices out of a group that were not slow from the first, one by one and together, and those that
/// only steps in the fit made slow; the steps in time of the first are findings.
pub(super) fn take_out_steps(
    table: &Table,
    fits: &[Option<Fit>],
    suspects: &[Suspect],
    group: &mut Vec<Confirmed>,
    min_effect: f64,
) -> Vec<Finding> {
    let cols = |shape: &Shape| match shape {
        Shape::Lines { axis: 1, members, node: None } if !table.sweep.is_pair() => members.clone(),
        _ => Vec::new(),
    };
    let members = |group: &[Confirmed]| {
        group.iter().flat_map(|own| cols(&own.shape)).collect::<BTreeSet<_>>()
    };
    if members(group).is_empty() {
        return Vec::new();
    }
    let suspected: BTreeSet<usize> =
        suspects.iter().flat_map(|suspect| cols(&suspect.shape)).collect();
    let claim = |group: &[Confirmed]| {
        let estimates: Vec<Option<Estimate>> =
            (0..fits.len()).map(|size| pooled(group, size)).collect();
        let by_size: Vec<(ByteSize, Estimate)> = table
            .sizes
            .iter()
            .zip(&estimates)
            .filter_map(|(bytes, estimate)| Some((*bytes, (*estimate)?)))
            .collect();
        Claim {
            table,
            fits,
            suspected: &suspected,
            members: members(group),
            effects: estimates.iter().map(|estimate| Some((*estimate)?.effect)).collect(),
            least: min_effect / 2.0,
            extra_ns: growth(&by_size).1.map(|extra_us| 1e3 * extra_us),
        }
    };
    let mut steps: Vec<(u32, Vec<Confirmed>)> = Vec::new();
    group.retain(|own| {
        let Some(seq) = claim(std::slice::from_ref(own)).last_healthy() else { return true };
        match steps.iter_mut().find(|(other, _)| other.abs_diff(seq) <= NEAR_IN_TIME) {
            Some((_, members)) => members.push(own.clone()),
            None => steps.push((seq, vec![own.clone()])),
        }
        false
    });
    // Those of the same effect of which nothing earlier is known became slow with them.
    group.retain(|own| {
        let own_claim = claim(std::slice::from_ref(own));
        let joined = steps.iter_mut().find(|(seq, _)| own_claim.may_be_healthy_until(*seq));
        match joined {
            Some((_, members)) => {
                members.push(own.clone());
                false
            }
            None => true,
        }
    });
    if group.len() > 1
        && let Some(seq) = claim(group).last_healthy()
    {
        steps.push((seq, std::mem::take(group)));
    }
    group.retain(|own| {
        let claim = claim(std::slice::from_ref(own));
        claim.is_as_measured() && !claim.is_left_over()
    });
    let describe = |(seq, group): &(u32, Vec<Confirmed>)| {
        let size = group.iter().map(|own| own.size).max()?;
        let estimate = pooled(group, size)?;
        let mut finding = artefact::time::step_finding(table, *seq + 1);
        finding.devices = ids(&table.cols, members(group));
        finding.effect = Some(effect_of(estimate.effect, estimate.se));
        finding.facts.push(format!(
            "rates of these devices × {:.3} from there on, at {}",
            (-estimate.effect).exp(),
            table.sizes[size]
        ));
        Some(finding)
    };
    steps.iter().filter_map(describe).collect()
}
