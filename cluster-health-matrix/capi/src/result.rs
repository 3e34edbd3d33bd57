//! What was measured, where C can read it.

use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;

use cluster_health_matrix::matrix;

use crate::error::{Failure, Status, guard, guard_or};
use crate::text::{c_string, required};

/// How the visits of a cell came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Cell {
    /// No visit (yet).
    NotVisited = 0,
    /// At least one block measured it: its rate is a number, in all other cases NaN.
    Measured = 1,
    /// Every visit was skipped.
    Skipped = 2,
    /// Visits failed and none was measured.
    Failed = 3,
    /// Only implausible rates were seen.
    Implausible = 4,
}

/// A view of one matrix, sizes x rows x columns. Arrays of cells have no gaps and are row-major:
/// cell (size, row, column) is at (size * `row_count` + row) * `column_count` + column. All pointers
/// live as long as the result and must not be freed.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Matrix {
    /// "h2d", "d2h", "bidirectional" or "core_pair".
    pub sweep: *const c_char,
    /// Name of the load profile, such as "idle".
    pub load: *const c_char,
    /// Memory of the copies: "page_locked", "pageable", "device" (pairs) or "unknown".
    pub memory: *const c_char,
    /// Number of sizes.
    pub size_count: usize,
    /// Number of CPUs; of rank 0 for pairs.
    pub row_count: usize,
    /// Number of devices; of CPUs of rank 1 for pairs.
    pub column_count: usize,
    /// `size_count` sizes in bytes, ascending: per copy, per rank for pairs.
    pub bytes: *const u64,
    /// `row_count` CPU ids, in the order of the plan.
    pub row_ids: *const u32,
    /// `column_count` ids of devices or CPUs, in the order of the plan.
    pub column_ids: *const u32,
    /// Decimal GB/s (10^9 bytes per second), per rank for pairs; NaN = not measured.
    pub gbps: *const f64,
    /// Spread between blocks as a share of the rate; NaN with fewer than two blocks.
    pub spread: *const f64,
    /// How each cell came out.
    pub status: *const Cell,
    /// Decimal GB/s of the cells that a sampled sweep left out, from its model, NaN where a cell was
    /// measured or nothing can be said. NULL when the sweep was not sampled.
    pub predicted_gbps: *const f32,
    /// Half-width of the 95 % interval of those, as a share of the rate. NULL as `predicted_gbps`.
    pub predicted_error: *const f32,
}

/// A matrix with the labels that C reads from it.
#[derive(Debug)]
struct Entry {
    matrix: matrix::Matrix,
    words: [CString; 3],
    bytes: Vec<u64>,
}

/// The matrices of a sweep or a result folder. Nothing changes it; may be used by several threads.
#[derive(Debug)]
pub struct SweepResult {
    entries: Vec<Entry>,
    complete: bool,
    notes: CString,
}

impl SweepResult {
    pub(crate) fn new(
        matrices: impl IntoIterator<Item = matrix::Matrix>,
        complete: bool,
        notes: &[String],
    ) -> Box<Self> {
        let entry = |matrix: matrix::Matrix| Entry {
            words: [matrix.sweep.as_str(), &matrix.load, matrix.memory.as_str()].map(c_string),
            bytes: matrix.sizes.iter().map(|size| size.bytes()).collect(),
            matrix,
        };
        let entries = matrices.into_iter().map(entry).collect();
        Box::new(Self { entries, complete, notes: c_string(&notes.join("\n")) })
    }
}

impl Entry {
    fn view(&self) -> Result<Matrix, Failure> {
        let matrix = &self.matrix;
        let [sweep, load, memory] = &self.words;
        let gap = || Failure::new(Status::Other, "a matrix is not in row-major order");
        let predicted = match &matrix.predicted {
            None => [std::ptr::null(); 2],
            Some(predicted) => [
                predicted.gbps.as_slice().ok_or_else(gap)?.as_ptr(),
                predicted.error.as_slice().ok_or_else(gap)?.as_ptr(),
            ],
        };
        Ok(Matrix {
            sweep: sweep.as_ptr(),
            load: load.as_ptr(),
            memory: memory.as_ptr(),
            size_count: self.bytes.len(),
            row_count: matrix.rows.len(),
            column_count: matrix.columns.len(),
            bytes: self.bytes.as_ptr(),
            row_ids: matrix.rows.ids.as_ptr(),
            column_ids: matrix.columns.ids.as_ptr(),
            gbps: matrix.gbps.as_slice().ok_or_else(gap)?.as_ptr(),
            spread: matrix.spread.as_slice().ok_or_else(gap)?.as_ptr(),
            status: matrix.status.as_slice().ok_or_else(gap)?.as_ptr().cast(),
            predicted_gbps: predicted[0],
            predicted_error: predicted[1],
        })
    }
}

/// Number of matrices: one per load profile of the plan, in its order; of a recorded run one per
/// sweep, load and kind of memory. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn clh_result_matrix_count(result: Option<&SweepResult>) -> usize {
    result.map_or(0, |result| result.entries.len())
}

/// Writes a view of the matrix with this number, from 0.
#[unsafe(no_mangle)]
pub extern "C" fn clh_result_matrix(
    result: Option<&SweepResult>,
    index: usize,
    matrix: Option<&mut MaybeUninit<Matrix>>,
) -> Status {
    guard(|| {
        let place = required("matrix", matrix)?;
        let entries = &required("result", result)?.entries;
        let entry = entries.get(index).ok_or_else(|| {
            Failure::bad_call(format!("index is {index}, there are {} matrices", entries.len()))
        })?;
        place.write(entry.view()?);
        Ok(Status::Ok)
    })
}

/// True when everything that the plan asked for was visited. False for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn clh_result_is_complete(result: Option<&SweepResult>) -> bool {
    result.is_some_and(|result| result.complete)
}

/// What to know before trusting the numbers, one line each; may be empty. Lives as long as the
/// result. NULL for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn clh_result_notes(result: Option<&SweepResult>) -> *const c_char {
    result.map_or(std::ptr::null(), |result| result.notes.as_ptr())
}

/// Frees a result; NULL is fine. Views of its matrices end with it.
#[unsafe(no_mangle)]
pub extern "C" fn clh_result_free(result: Option<Box<SweepResult>>) {
    guard_or((), || drop(result));
}

#[cfg(test)]
mod tests {
    use cluster_health_matrix::matrix::CellStatus;

    use super::Cell;

    #[test]
    fn cells_have_the_numbers_of_the_rust_interface() {
        for (cell, status) in [
            (Cell::NotVisited, CellStatus::NotVisited),
            (Cell::Measured, CellStatus::Measured),
            (Cell::Skipped, CellStatus::Skipped),
            (Cell::Failed, CellStatus::Failed),
            (Cell::Implausible, CellStatus::Implausible),
        ] {
            assert_eq!(cell as u8, status as u8);
        }
        assert_eq!(size_of::<Cell>(), size_of::<CellStatus>());
    }
}
