//! Every interleaving, and every value that the memory model allows a load to see, of the protocols in
//! `cluster-health-core`: the files themselves are compiled here, with loom as their memory.
//!
//! ```text
//! cargo test -p cluster-health-model --features loom
//! ```
//!
//! Where a model has too many interleavings, those are tried in which a thread is interrupted a few
//! times where it need not be. That the checks can fail is shown by planted faults.
#![cfg(all(test, feature = "loom"))]
#![allow(
    clippy::duplicate_mod,
    reason = "once with the atomics that are needed and once with weaker ones"
)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests: what goes wrong must panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

mod board;
mod notes;
mod sound;
mod weak;

/// Runs all interleavings, or those with so many interruptions at most, and prints how many they are.
fn check(interruptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = interruptions;
    builder.max_branches = 10_000;
    let (runs, began) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let count = Arc::clone(&runs);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} interleavings, {:?}", runs.load(Ordering::Relaxed), began.elapsed());
}
