//! How well the judging is: machines drawn from a seed, the truth about each, and scores of what
//! was found on them. Used by the example `judging` (thousands of machines) and by the test of the
//! same name (some hundred).
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts of CPUs and machines, and statistics of them"
)]
#![allow(dead_code, reason = "the example and the test use different parts")]

pub(crate) mod generator;
pub(crate) mod judge;
pub(crate) mod score;
pub(crate) mod truth;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cluster_health_matrix::samples::Sweep;

use self::generator::Case;
use self::judge::Diagnosis;
use self::score::{Outcome, Summary};
use self::truth::Truth;

/// What can go wrong here ends the machine it happened on.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Everything about one machine.
pub(crate) struct Judged {
    pub(crate) case: Case,
    pub(crate) truths: Vec<Truth>,
    pub(crate) diagnosis: Diagnosis,
    pub(crate) outcome: Outcome,
}

/// Draws the machine of a seed, measures it in virtual time and scores what is found.
pub(crate) fn one(seed: u64, sweep: Option<Sweep>, old_only: bool) -> Result<Judged> {
    let case = generator::generate_way(seed, sweep, old_only)?;
    let truths = truth::of(&case)?;
    let diagnosis = judge::judge(&case)?;
    let outcome = score::score(&case, &truths, &diagnosis);
    Ok(Judged { case, truths, diagnosis, outcome })
}

/// Scores the machines of the seeds `first..first + machines` on `jobs` threads; `observe` sees
/// each, in the order in which they come to their end.
pub(crate) fn many(
    first: u64,
    machines: u64,
    (sweep, old_only): (Option<Sweep>, bool),
    jobs: usize,
    observe: &(dyn Fn(&Judged) + Sync),
) -> Summary {
    let next = AtomicU64::new(0);
    let summary = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= machines {
                        break;
                    }
                    let seed = first + index;
                    let judged = one(seed, sweep, old_only);
                    let Ok(mut summary) = summary.lock() else { break };
                    match judged {
                        Ok(judged) => {
                            summary.add(&judged.outcome);
                            drop(summary);
                            observe(&judged);
                        }
                        Err(error) => summary.add_error(seed, error.to_string()),
                    }
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_default();
    summary.sort();
    summary
}
