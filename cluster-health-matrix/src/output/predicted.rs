//! Cells that a sampled sweep did not visit, as outputs see them.

use crate::matrix::{CellStatus, Slice};
use crate::stats::median;

/// The rate that a model gives a cell, decimal GB/s, and its 95 % half-width as a share. `None` for
/// cells that were visited: one that failed has no rate, whatever its neighbours say.
pub(crate) fn predicted(slice: &Slice<'_>, row: usize, column: usize) -> Option<(f32, f32)> {
    let at = [row, column];
    if slice.gbps[at].is_finite()
        || !matches!(slice.status[at], CellStatus::NotVisited | CellStatus::Measured)
    {
        return None;
    }
    let predicted = slice.predicted?;
    Some((predicted.gbps[at], predicted.error[at])).filter(|(rate, _)| rate.is_finite())
}

/// How much of a sampled slice was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampled {
    /// Cells with a measured rate.
    pub(crate) measured: usize,
    /// Cells with a predicted one.
    pub(crate) predicted: usize,
    /// Median 95 % half-width of the predicted cells, a share of the rate; NaN without any.
    pub(crate) error: f64,
}

impl Sampled {
    /// `None` where all cells were to be measured.
    pub(crate) fn of(slice: &Slice<'_>) -> Option<Self> {
        slice.predicted?;
        let mut errors = Vec::new();
        let mut predicted_cells = 0;
        for (row, column) in ndarray::indices_of(&slice.gbps) {
            if let Some((_, error)) = predicted(slice, row, column) {
                predicted_cells += 1;
                errors.extend(Some(f64::from(error)).filter(|error| error.is_finite()));
            }
        }
        Some(Self {
            measured: slice.measured().count(),
            predicted: predicted_cells,
            error: median(&mut errors),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use cluster_health_core::ByteSize;

    use super::*;
    use crate::matrix::{Axis, Matrix, Prediction};
    use crate::samples::Sweep;

    /// Every `stride`-th cell measured, the rest predicted 1 below with an error of 2 %.
    pub(crate) fn sampled(rows: u32, columns: u32, stride: usize) -> Matrix {
        let axis = |name, count| Axis::new(name, (0..count).collect(), vec![]);
        let (rows, columns) = (axis("rank-0 cpu", rows), axis("rank-1 cpu", columns));
        let sizes = vec![ByteSize::mib(8)];
        let mut matrix = Matrix::new(Sweep::CorePair, "idle", sizes, rows, columns);
        let mut prediction = Prediction::new(matrix.gbps.dim());
        let (mut rate, mut at) = (40.0_f32, 0);
        for (place, cell) in matrix.gbps.indexed_iter_mut() {
            if at % stride == 0 {
                *cell = f64::from(rate);
                matrix.status[place] = CellStatus::Measured;
            } else {
                prediction.gbps[place] = rate - 1.0;
                prediction.error[place] = 0.02;
            }
            rate = if rate > 41.0 { 40.0 } else { rate + 0.125 };
            at += 1;
        }
        matrix.predicted = Some(prediction);
        matrix
    }

    #[test]
    fn only_cells_that_were_not_visited_are_predicted() {
        let mut matrix = sampled(4, 4, 4);
        let prediction = matrix.predicted.as_mut().unwrap();
        // A rate for a measured and for a failed cell, and nothing for another.
        prediction.gbps[[0, 0, 0]] = 1.0;
        prediction.gbps[[0, 1, 1]] = f32::NAN;
        prediction.error[[0, 2, 2]] = 0.5;
        matrix.status[[0, 3, 3]] = CellStatus::Failed;
        let slice = matrix.slice(0);
        assert_eq!(predicted(&slice, 0, 0), None);
        assert_eq!(predicted(&slice, 1, 1), None);
        assert_eq!(predicted(&slice, 3, 3), None);
        assert_eq!(predicted(&slice, 0, 1), Some((39.125, 0.02)));
        let counted = Sampled::of(&slice).unwrap();
        assert_eq!((counted.measured, counted.predicted), (4, 10));
        assert!((counted.error - 0.02).abs() < 1e-6, "{}", counted.error);
        matrix.predicted = None;
        assert_eq!(Sampled::of(&matrix.slice(0)), None);
    }
}
