//! Small robust statistics; everything else about numbers lives with its user.
//!
//! Quantiles are linear between order statistics ("type 7", numpy's default).

/// Rank below quantile `q` of values up to rank `last`, and the share of the way to the next one.
fn place(q: f64, last: usize) -> (usize, f64) {
    #[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    let position = q.clamp(0.0, 1.0) * last as f64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 <= position <= last"
    )]
    let below = position.floor() as usize;
    (below, position.fract())
}

/// Quantile `q` of sorted values, type 7; NaN when there are none.
///
/// # Panics
/// Never: `q` is clamped to 0…1.
#[must_use]
pub fn quantile_sorted(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let (below, fraction) = place(q, last);
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * fraction
}

/// Quantile `q` of values in any order, which are reordered, type 7; NaN when there are none.
pub(crate) fn quantile(values: &mut [f64], q: f64) -> f64 {
    let Some(last) = values.len().checked_sub(1) else { return f64::NAN };
    let (below, fraction) = place(q, last);
    let (_, low, rest) = values.select_nth_unstable_by(below, f64::total_cmp);
    let low = *low;
    if fraction <= 0.0 {
        return low;
    }
    let high = rest.iter().copied().min_by(f64::total_cmp).unwrap_or(low);
    low + (high - low) * fraction
}

/// Quantiles of values in any order, which are reordered, type 7; NaN when there are none.
pub(crate) fn quantiles<const N: usize>(values: &mut [f64], wanted: [f64; N]) -> [f64; N] {
    settle(values, &wanted, &[]);
    wanted.map(|q| quantile_sorted(values, q))
}

/// Brings to their place those values that [`quantile_sorted`] looks at for these quantiles, and those
/// of these ranks, as sorting would. Unlike sorting it costs the same per value however many there are.
pub(crate) fn settle(values: &mut [f64], quantiles: &[f64], ranks: &[usize]) {
    let Some(last) = values.len().checked_sub(1) else { return };
    let mut all: Vec<usize> = ranks.iter().map(|rank| (*rank).min(last)).collect();
    for q in quantiles {
        let (below, _) = place(*q, last);
        all.extend([below, (below + 1).min(last)]);
    }
    all.sort_unstable();
    all.dedup();
    settle_ranks(values, 0, &all);
}

/// `first` is the rank of the first value; ranks ascend.
fn settle_ranks(values: &mut [f64], first: usize, ranks: &[usize]) {
    let (left, right) = ranks.split_at(ranks.len() / 2);
    let Some((rank, right)) = right.split_first() else { return };
    let (below, _, above) = values.select_nth_unstable_by(rank - first, f64::total_cmp);
    settle_ranks(below, first, left);
    settle_ranks(above, rank + 1, right);
}

/// Median of values in any order, which are reordered; NaN when there are none.
#[must_use]
pub fn median(values: &mut [f64]) -> f64 {
    quantile(values, 0.5)
}

/// Median of times; NaN when there are none.
pub(crate) fn median_ns(times: &[u64]) -> f64 {
    median(&mut times.iter().map(|ns| to_f64(*ns)).collect::<Vec<_>>())
}

/// Median absolute deviation of normal values × this = their standard deviation.
pub(crate) const SD_OF_MAD: f64 = 1.4826;

/// Robust standard deviation: 1.4826 × the median absolute deviation from `center`.
pub(crate) fn robust_sd(values: &[f64], center: f64) -> f64 {
    let mut deviations: Vec<f64> = values.iter().map(|value| (value - center).abs()).collect();
    SD_OF_MAD * median(&mut deviations)
}

/// A time or a size as a number.
#[allow(clippy::cast_precision_loss, reason = "times and sizes stay far below 2^53")]
pub(crate) fn to_f64(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn settled_values_stand_where_sorting_puts_them(
            values in prop::collection::vec(-1e3..1e3_f64, 0..200),
            wanted in prop::collection::vec(0.0..=1.0_f64, 0..5),
            ranks in prop::collection::vec(0_usize..300, 0..4),
        ) {
            let mut sorted = values.clone();
            sorted.sort_unstable_by(f64::total_cmp);
            let mut settled = values.clone();
            settle(&mut settled, &wanted, &ranks);
            for q in &wanted {
                let [found, expected] = [&settled, &sorted].map(|all| quantile_sorted(all, *q));
                prop_assert_eq!(found.to_bits(), expected.to_bits());
            }
            for rank in ranks.into_iter().filter(|rank| *rank < values.len()) {
                prop_assert_eq!(settled[rank].to_bits(), sorted[rank].to_bits());
            }
            settled.sort_unstable_by(f64::total_cmp);
            prop_assert_eq!(settled, sorted);
        }
    }
}
