//! Small robust statistics; everything else about numbers lives with its user.
//!
//! Quantiles are linear between order statistics ("type 7", numpy's default).

/// Quantile `q` of sorted values, type 7; NaN when there are none.
///
/// # Panics
/// Never: `q` is clamped to 0…1.
#[must_use]
pub fn quantile_sorted(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    let position = q.clamp(0.0, 1.0) * last as f64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 <= position <= last"
    )]
    let below = position.floor() as usize;
    let above = (below + 1).min(last);
    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    let fraction = position - below as f64;
    sorted[below] + (sorted[above] - sorted[below]) * fraction
}

/// Median of values in any order; NaN when there are none.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    quantile_sorted(values, 0.5)
}
