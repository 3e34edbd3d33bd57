//! Judging: which differences are faults, which are artefacts of the measurement, and what was not
//! tested.

mod additive;
mod artefact;
mod confirm;
mod evidence;
mod finding;
mod fit;
mod judge;
mod later;
mod load;
mod one_block;
mod sparse;
mod sparse_suspect;
mod suspect;
mod table;
mod whole_nodes;

use std::path::Path;

pub(crate) use evidence::{Axes, Evidence};
pub use finding::{Diagnosis, Effect, Finding, Kind, Replicates, Verdict};
pub(crate) use load::is_comparison;
pub(crate) use table::{Kinship, Table};

use crate::error::Result;
use crate::matrix::Prediction;
use crate::report::Report;
use crate::schedule::{Cell, Random};

/// Judges a result folder.
///
/// # Errors
/// When its manifest or log cannot be read.
pub fn diagnose_folder(dir: &Path) -> Result<Diagnosis> {
    Ok(Report::read(dir)?.diagnosis)
}

/// A table in order of measurement with the fits of all its sizes.
#[derive(Debug)]
struct Fitted {
    table: Table,
    fits: Vec<Option<fit::Fit>>,
    /// Costs per transfer that began at some time, taken out of the table.
    additive: Vec<additive::Additive>,
}

impl Fitted {
    fn new(table: Table) -> Self {
        let mut fitted = Self::plain(table);
        fitted.additive = additive::find(&fitted.table, &fitted.fits);
        if !fitted.additive.is_empty() {
            additive::remove(&mut fitted.table, &fitted.additive);
            fitted.fits = fits_of(&fitted.table, None);
        }
        fitted
    }

    /// With nothing taken out of the table: in a fixed order, time and place are one.
    fn plain(mut table: Table) -> Self {
        table.arrange();
        let fits = fits_of(&table, None);
        Self { table, fits, additive: Vec::new() }
    }

    /// Fits again without the cells that suspicion singles out, which would shift the levels of
    /// their rows and columns.
    fn refit(&mut self, suspects: &[suspect::Suspect]) {
        let [rows, cols] = self.table.shape();
        let mut masked = vec![false; rows * cols];
        for suspect in suspects {
            if let suspect::Shape::Block { rows: in_rows, cols: in_cols } = &suspect.shape
                && 2 * in_rows.len() <= rows
                && 2 * in_cols.len() <= cols
            {
                for row in in_rows {
                    in_cols.iter().for_each(|col| masked[row * cols + col] = true);
                }
            }
        }
        // A row or column that is hardly left is better known with them.
        let left = |at: &mut dyn Iterator<Item = usize>, of: usize| {
            4 * at.filter(|&at| !masked[at]).count() >= of
        };
        let row_left: Vec<bool> =
            (0..rows).map(|row| left(&mut (row * cols..(row + 1) * cols), cols)).collect();
        let col_left: Vec<bool> =
            (0..cols).map(|col| left(&mut (0..rows).map(|row| row * cols + col), rows)).collect();
        let mask =
            |row: usize, col: usize| masked[row * cols + col] && row_left[row] && col_left[col];
        self.fits = fits_of(&self.table, Some(&mask));
    }
}

/// Points from which each size is fitted on a thread of its own.
const MANY_POINTS: usize = 100_000;

/// The fit of one size, by the model for few visited cells where there are few.
fn fit_of(
    table: &Table,
    size: usize,
    mask: Option<fit::Mask<'_>>,
    known: &[(usize, u32)],
) -> Option<fit::Fit> {
    if table.sampled && sparse::is_sparse(table, size) {
        sparse::fit(table, size, mask, false)
    } else {
        fit::fit(table, size, mask, known)
    }
}

/// The fits of all sizes.
fn fits_of(table: &Table, mask: Option<fit::Mask<'_>>) -> Vec<Option<fit::Fit>> {
    let with = |known: &[(usize, u32)]| -> Vec<Option<fit::Fit>> {
        let sizes = 0..table.sizes.len();
        if table.obs.len() < MANY_POINTS {
            return sizes.map(|size| fit_of(table, size, mask, known)).collect();
        }
        std::thread::scope(|scope| {
            let fits: Vec<_> =
                sizes.map(|size| scope.spawn(move || fit_of(table, size, mask, known))).collect();
            let joined = fits.into_iter().map(std::thread::ScopedJoinHandle::join);
            joined.map(|fit| fit.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    };
    let fits = with(&[]);
    if table.sweep.is_pair() || fits.iter().flatten().any(|fit| fit.sampled.is_some()) {
        return fits;
    }
    let rests: Vec<Option<Vec<f32>>> =
        fits.iter().map(|fit| Some(suspect::rests(table, fit.as_ref()?))).collect();
    let known = fit::short_steps(table, &fits, &rests);
    if known.is_empty() { fits } else { with(&known) }
}

/// The confirming visits that the blocks of a sweep call for: the cells of each round. One table per
/// load profile.
pub(crate) fn confirmation(
    mut tables: Vec<Table>,
    min_effect: f64,
    seed: u64,
    usable: &dyn Fn(usize, usize) -> bool,
) -> Vec<Vec<Cell>> {
    match tables.pop() {
        Some(table) if tables.is_empty() => confirmation_of(table, min_effect, seed, usable),
        last => {
            tables.extend(last);
            load::confirmation(tables, min_effect, seed, usable)
        }
    }
}

fn confirmation_of(
    table: Table,
    min_effect: f64,
    seed: u64,
    usable: &dyn Fn(usize, usize) -> bool,
) -> Vec<Vec<Cell>> {
    let Fitted { table, fits, .. } = Fitted::new(table);
    let suspects = suspect::find(&table, &fits, min_effect);
    let random = &mut Random::new(seed ^ CONFIRM_SEED);
    confirm::rounds(&table, &suspects, confirm::Effort::FULL, usable, random)
}

/// Keeps the choice of confirming visits apart from other draws of the same seed.
const CONFIRM_SEED: u64 = 0x636f_6e66;

/// A single cell that was visited once is looked at again from this effect on, logarithm of the time.
const LEAST_OF_CELL: f64 = 0.15;

/// The confirming visits of a sampled sweep: as many as the time allows. `fits` tells of the cells of all
/// rounds whether they fit at two sizes (true) or at one (false). Fewer sizes give way before smaller
/// suspicions do; none are made where not even the strongest one fits.
pub(crate) fn sampled_confirmation(
    table: Table,
    min_effect: f64,
    seed: u64,
    usable: &dyn Fn(usize, usize) -> bool,
    fits: &dyn Fn(usize, bool) -> bool,
) -> (Vec<Vec<Cell>>, bool) {
    let Fitted { table, fits: of_sizes, .. } = Fitted::new(table);
    let [rows, cols] = table.shape();
    let cells = |suspect: &suspect::Suspect| match &suspect.shape {
        suspect::Shape::Lines { axis: 0, members, .. } => members.len() * cols,
        suspect::Shape::Lines { members, .. } => members.len() * rows,
        suspect::Shape::Block { rows, cols } => rows.len() * cols.len(),
        suspect::Shape::Class(_) => rows,
    };
    let mut suspects: Vec<(f64, suspect::Suspect)> = suspect::find(&table, &of_sizes, min_effect)
        .into_iter()
        .map(|suspect| (suspect.effect.abs() * (cells(&suspect) as f64).sqrt(), suspect))
        // One visit of a single cell tells nothing, unless it is far out.
        .filter(|(_, suspect)| cells(suspect) > 1 || suspect.effect > LEAST_OF_CELL)
        .collect();
    suspects.sort_by(|a, b| b.0.total_cmp(&a.0));
    while !suspects.is_empty() {
        let now: Vec<suspect::Suspect> = suspects.iter().map(|(_, own)| own.clone()).collect();
        let count = |rounds: &[Vec<Cell>]| rounds.iter().map(Vec::len).sum();
        let mut too_much = Vec::new();
        for effort in confirm::Effort::ALL {
            let random = &mut Random::new(seed ^ CONFIRM_SEED);
            let rounds = confirm::rounds(&table, &now, effort, usable, random);
            if fits(count(&rounds), true) {
                return (rounds, true);
            }
            too_much.push(rounds);
        }
        if let Some(rounds) = too_much.into_iter().find(|rounds| fits(count(rounds), false)) {
            return (rounds, false);
        }
        suspects.truncate(suspects.len() * 4 / 5);
    }
    (Vec::new(), true)
}

/// The structural findings of a table alone.
#[cfg(test)]
pub(crate) fn judge_table(table: Table, min_effect: f64) -> Vec<Finding> {
    let mut fitted = Fitted::new(table);
    let suspects = suspect::find(&fitted.table, &fitted.fits, min_effect);
    fitted.refit(&suspects);
    judge::confirmed(&fitted.table, &fitted.fits, &suspects, min_effect).0
}

/// What a sampled sweep says about the cells that it left out.
pub(crate) fn sampled_prediction(table: Table, min_effect: f64) -> Prediction {
    let mut fitted = Fitted::new(table);
    let suspects = suspect::find(&fitted.table, &fitted.fits, min_effect);
    fitted.refit(&suspects);
    let (found, _) = judge::confirmed(&fitted.table, &fitted.fits, &suspects, min_effect);
    sparse::predict(&fitted.table, &suspects, &found)
}

/// Half-width of the 95 % interval that nine of ten rows and columns are known to at one size, as a
/// share.
pub(crate) fn sampled_error(table: &Table, size: usize) -> f64 {
    let mut table = table.clone();
    table.arrange();
    sparse::fit(&table, size, None, false).map_or(f64::INFINITY, |fit| sparse::known_to(&fit))
}

/// The cells of one size whose visits would tell most about what a sampled sweep has seen so far.
pub(crate) fn sampled_next(
    table: &Table,
    size: usize,
    min_effect: f64,
    usable: &dyn Fn(usize, usize) -> bool,
    random: &mut Random,
) -> Option<Vec<Cell>> {
    if !sparse::is_sparse(table, size) {
        let Fitted { table, fits, .. } = Fitted::new(table.clone());
        let suspects = suspect::find(&table, &fits, min_effect);
        return Some(sparse::missing(&table, size, &suspects, usable));
    }
    let mut table = table.clone();
    table.arrange();
    let fit = sparse::fit(&table, size, None, false)?;
    Some(sparse_suspect::next_cells(&table, &fit, min_effect, usable, random))
}
