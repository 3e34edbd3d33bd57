//! Whether something recurs through a whole scan.

use crate::stats::{median, robust_sd};

/// Why a series decides nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Why {
    /// Not enough of it.
    Short,
    /// An eighth of the scan, from 0, that does not show it.
    Eighth(usize),
    /// It is not there before this slot.
    Before(usize),
    /// It is not there from this slot on.
    After(usize),
    /// A step could hide in the noise.
    Noisy,
}

/// An effect that is looked for in every part of a scan.
#[derive(Debug, Clone)]
pub(super) struct Recurrence {
    /// Logarithm of the time against the rest.
    pub(super) effect: f64,
    pub(super) error: f64,
    /// In each eighth of the scan.
    pub(super) eighths: Vec<f64>,
    pub(super) why: Option<Why>,
}

/// Standard errors with which a stretch without the effect must stand out.
const STEP_Z: f64 = 6.0;
/// Share of the scan in which a step may hide at either end.
const HIDDEN: usize = 25;

impl Recurrence {
    /// Of values at slots of a scan that has so many; `None` without any.
    pub(super) fn of(series: &[(usize, f64)], slots: usize, shared: f64) -> Option<Self> {
        if series.is_empty() {
            return None;
        }
        let values: Vec<f64> = series.iter().map(|(_, value)| *value).collect();
        let count = values.len() as f64;
        let effect = median(&mut values.clone());
        let sd = robust_sd(&values, effect).max(1e-5);
        let mut eighths = Vec::new();
        let mut missing = None;
        for eighth in 0..8 {
            let mut part: Vec<f64> = series
                .iter()
                .filter(|(slot, _)| slot * 8 / slots.max(1) == eighth)
                .map(|(_, value)| *value)
                .collect();
            let level = median(&mut part);
            // Less of it may be there at times, but some; a part without members does not show it.
            let error = 1.25 * sd / (part.len() as f64).sqrt();
            let shows = level * effect.signum() > (effect.abs() / 5.0).max(3.0 * error);
            if !shows && missing.is_none() {
                missing = Some(if part.is_empty() { Why::Short } else { Why::Eighth(eighth) });
            }
            eighths.push(level);
        }
        let why = if slots < 8 || series.len() < 8 {
            Some(Why::Short)
        } else {
            step(series, effect, sd).or(missing)
        };
        let error = (1.25 * sd / count.sqrt()).hypot(shared);
        Some(Self { effect, error, eighths, why })
    }

    /// The mean of several.
    pub(super) fn pooled(all: &[&Self]) -> Option<Self> {
        let count = all.len() as f64;
        let first = all.first()?;
        let mean = |of: &dyn Fn(&Self) -> f64| all.iter().map(|r| of(r)).sum::<f64>() / count;
        Some(Self {
            effect: mean(&|r| r.effect),
            error: mean(&|r| r.error),
            eighths: (0..first.eighths.len()).map(|at| mean(&|r| r.eighths[at])).collect(),
            why: None,
        })
    }
}

/// A stretch from either end of the scan that does not show the effect.
fn step(series: &[(usize, f64)], effect: f64, sd: f64) -> Option<Why> {
    let shortest = (STEP_Z * sd / effect.abs()).powi(2).ceil().max(1.0);
    if shortest > (series.len() / HIDDEN).max(1) as f64 {
        return Some(Why::Noisy);
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and the length of the series"
    )]
    let shortest = shortest as usize;
    let limit = effect.abs();
    let clipped = |value: f64| (value * effect.signum()).clamp(-limit, 2.0 * limit);
    let longest_without = |values: &mut dyn Iterator<Item = f64>| {
        let mut sum = 0.0;
        let mut longest = 0;
        for (at, value) in values.enumerate() {
            sum += clipped(value);
            if at + 1 >= shortest && sum < limit / 2.0 * (at + 1) as f64 {
                longest = at + 1;
            }
        }
        longest
    };
    let before = longest_without(&mut series.iter().map(|(_, value)| *value));
    let after = longest_without(&mut series.iter().rev().map(|(_, value)| *value));
    if before > 0 {
        // Half of a stretch without may already have it.
        let border = border(series, before, limit / 2.0 * effect.signum());
        return Some(Why::Before(border));
    }
    (after > 0).then(|| Why::After(series[series.len() - after].0))
}

/// The first slot from which on more values are beyond a level than not.
fn border(series: &[(usize, f64)], until: usize, level: f64) -> usize {
    let shows = |value: f64| if level > 0.0 { value > level } else { value < level };
    let mut best = (0_i64, 0);
    let mut without = 0_i64;
    for (at, (_, value)) in series.iter().enumerate().take(until) {
        without += if shows(*value) { -1 } else { 1 };
        if without > best.0 {
            best = (without, at + 1);
        }
    }
    series.get(best.1).or(series.last()).map_or(0, |(slot, _)| *slot)
}
