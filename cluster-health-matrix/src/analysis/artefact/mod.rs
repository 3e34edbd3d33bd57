//! Effects of when and how was measured: they explain differences, and are no faults.

mod bimodal;
mod lead;
pub(super) mod time;

pub(super) use bimodal::bimodal;
pub(super) use lead::{describe_checkpoint, leads, periodic};

use super::Fitted;
use super::finding::Finding;

/// Smallest change of time that is worth a word, logarithm.
const LEAST: f64 = 0.01;
/// Standard errors that an artefact needs.
const LEAST_Z: f64 = 5.0;

/// The artefacts of a run in randomised blocks.
pub(super) fn find(fitted: &Fitted) -> Vec<Finding> {
    let mut found = time::find(fitted);
    found.extend(leads(&fitted.table));
    found
}

#[cfg(test)]
mod tests;
