//! Judging: which differences are faults, which are artefacts of the measurement, and what was not
//! tested.

mod artefact;
mod confirm;
mod evidence;
mod finding;
mod fit;
mod judge;
mod one_block;
mod suspect;
mod table;

use std::path::Path;

pub(crate) use evidence::{Axes, Evidence};
pub use finding::{Diagnosis, Effect, Finding, Kind, Replicates, Verdict};
pub(crate) use table::Table;

use crate::error::Result;
use crate::report::Report;
use crate::schedule::{Cell, Random};

/// Judges a result folder.
///
/// # Errors
/// When its manifest or log cannot be read.
pub fn diagnose_folder(dir: &Path) -> Result<Diagnosis> {
    Ok(Report::read(dir)?.diagnosis)
}

/// Fits of all sizes.
fn fits(table: &Table) -> Vec<Option<fit::Fit>> {
    (0..table.sizes.len()).map(|size| fit::fit(table, size)).collect()
}

/// The confirming visits that the blocks of a table call for: the cells of each round.
pub(crate) fn confirmation(
    table: &mut Table,
    min_effect: f64,
    seed: u64,
    usable: &dyn Fn(usize, usize) -> bool,
) -> Vec<Vec<Cell>> {
    table.arrange();
    let suspects = suspect::find(table, &fits(table), min_effect);
    confirm::rounds(table, &suspects, usable, &mut Random::new(seed ^ 0x636f_6e66))
}
