//! Student's t, two-sample and paired contrasts, and Holm's procedure.

/// Logarithm of the gamma function for `x` > 0: recurrence up to 10, then Stirling's series
/// (relative error below 1e-10 there).
fn ln_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 10.0 {
        shift += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / x;
    let square = inverse * inverse;
    let series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square / 1260.0));
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - shift
}

/// Regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, evaluated after
/// Lentz).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    const TINY: f64 = 1e-300;
    if x <= 0.0 {
        return 0.0;
    }
    if x >= 1.0 {
        return 1.0;
    }
    // The fraction converges fast on this side only.
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (-x).ln_1p();
    let (mut c, mut d, mut fraction) = (1.0_f64, 0.0_f64, 1.0_f64);
    let mut m = 0.0;
    for step in 0..10_000 {
        let numerator = if step == 0 {
            1.0
        } else if step % 2 == 0 {
            m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m))
        } else {
            -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0))
        };
        if step % 2 == 1 {
            m += 1.0;
        }
        d = 1.0 + numerator * d;
        d = 1.0 / if d.abs() < TINY { TINY } else { d };
        c = 1.0 + numerator / c;
        c = if c.abs() < TINY { TINY } else { c };
        let delta = c * d;
        fraction *= delta;
        if step > 0 && (delta - 1.0).abs() < 1e-14 {
            break;
        }
    }
    // The first numerator is 1, so the fraction starts at 2 instead of 1.
    (front.exp() / a) * (fraction - 1.0)
}

/// Probability that |T| exceeds `t` with so many degrees of freedom, which need not be whole.
pub(crate) fn two_sided_p(t: f64, degrees: f64) -> f64 {
    if t.is_nan() || degrees.is_nan() || degrees <= 0.0 {
        return 1.0;
    }
    if t.is_infinite() {
        return 0.0;
    }
    incomplete_beta(degrees / 2.0, 0.5, degrees / (degrees + t * t))
}

/// The t that |T| exceeds with probability `p`.
pub(crate) fn two_sided_quantile(p: f64, degrees: f64) -> f64 {
    if degrees.is_nan() || degrees <= 0.0 {
        return f64::NAN;
    }
    let (mut low, mut high) = (0.0, 2.0);
    while two_sided_p(high, degrees) > p && high < 1e12 {
        high *= 2.0;
    }
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if two_sided_p(middle, degrees) > p {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// An estimate with its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Contrast {
    pub(crate) difference: f64,
    /// NaN when it cannot be told.
    pub(crate) error: f64,
    pub(crate) degrees: f64,
}

/// A variance of single units with its degrees of freedom, and how many units there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) variance: f64,
    pub(crate) degrees: f64,
    pub(crate) count: f64,
}

impl Contrast {
    /// A difference of which only the value is known.
    pub(crate) fn without_error(difference: f64) -> Self {
        Self { difference, error: f64::NAN, degrees: f64::NAN }
    }

    /// Difference of two means with the spreads of either side (Welch and Satterthwaite).
    pub(crate) fn between(difference: f64, sides: [Spread; 2]) -> Self {
        let parts = sides.map(|side| side.variance / side.count);
        let sum = parts[0] + parts[1];
        let weighted = parts[0].powi(2) / sides[0].degrees + parts[1].powi(2) / sides[1].degrees;
        let degrees =
            if weighted > 0.0 { sum * sum / weighted } else { sides[0].degrees + sides[1].degrees };
        Self { difference, error: sum.sqrt(), degrees }
    }

    /// b − a of two independent series of units; NaN units are left out.
    pub(crate) fn welch(a: &[f64], b: &[f64]) -> Self {
        let ((mean_a, spread_a), (mean_b, spread_b)) = (mean_and_spread(a), mean_and_spread(b));
        Self::between(mean_b - mean_a, [spread_a, spread_b])
    }

    /// Mean of differences of paired units; NaN units are left out.
    pub(crate) fn paired(differences: &[f64]) -> Self {
        let (mean, spread) = mean_and_spread(differences);
        let error = (spread.variance / spread.count).sqrt();
        Self { difference: mean, error, degrees: spread.degrees }
    }

    /// Probability of a difference as large where there is none; 1 when the error is unknown.
    pub(crate) fn p(&self) -> f64 {
        if self.difference == 0.0 {
            return 1.0;
        }
        two_sided_p((self.difference / self.error).abs(), self.degrees)
    }

    /// 95 % interval of the difference; NaN when the error is unknown.
    pub(crate) fn interval(&self) -> (f64, f64) {
        let half = two_sided_quantile(0.05, self.degrees) * self.error;
        (self.difference - half, self.difference + half)
    }
}

/// Mean of the units, and the variance of single ones; NaN without two of them.
pub(crate) fn mean_and_spread(units: &[f64]) -> (f64, Spread) {
    let finite = || units.iter().copied().filter(|unit| unit.is_finite());
    let count = to_f64(finite().count());
    let mean = finite().sum::<f64>() / count;
    let degrees = count - 1.0;
    let sum = finite().map(|unit| (unit - mean).powi(2)).sum::<f64>();
    let variance = if degrees >= 1.0 { sum / degrees } else { f64::NAN };
    (mean, Spread { variance, degrees, count })
}

/// Which hypotheses Holm's step-down procedure rejects at a family-wise error of `level`.
pub(crate) fn holm(p: &[f64], level: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&left, &right| p[left].total_cmp(&p[right]));
    let mut rejected = vec![false; p.len()];
    for (rank, &index) in order.iter().enumerate() {
        if p[index] > level / to_f64(p.len() - rank) {
            break;
        }
        rejected[index] = true;
    }
    rejected
}

/// A count as a number.
#[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
pub(crate) fn to_f64(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64, relative: f64) -> bool {
        (a - b).abs() <= relative * b.abs()
    }

    /// From printed tables of Student's distribution, two-sided.
    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (degrees, p, t) in [
            (1.0, 0.05, 12.706),
            (2.0, 0.05, 4.303),
            (4.0, 0.05, 2.776),
            (10.0, 0.05, 2.228),
            (30.0, 0.01, 2.750),
            (4.0, 0.001, 8.610),
            (120.0, 0.05, 1.980),
        ] {
            let found = two_sided_quantile(p, degrees);
            assert!(close(found, t, 3e-4), "{degrees} {p}: {found}");
        }
        // With one degree of freedom it is Cauchy's, with two t/√(2 + t²): closed forms.
        for t in [0.1, 1.0, 3.0, 50.0_f64] {
            let cauchy = 1.0 - 2.0 / std::f64::consts::PI * t.atan();
            assert!(close(two_sided_p(t, 1.0), cauchy, 1e-9), "{t}");
            let two = 1.0 - t / (2.0 + t * t).sqrt();
            assert!(close(two_sided_p(t, 2.0), two, 1e-9), "{t}");
        }
        // Two-sided normal tail at 5: 5.733e-7.
        assert!(close(two_sided_p(5.0, 1e6), 5.733e-7, 1e-3));
    }

    #[test]
    fn a_contrast_is_that_of_the_textbook() {
        // Means 2 and 5, variances 1 and 4, three units each: error √(5/3), degrees 2.94.
        let found = Contrast::welch(&[1.0, 2.0, 3.0], &[3.0, 5.0, 7.0]);
        assert!(close(found.difference, 3.0, 1e-12));
        assert!(close(found.error, (5.0_f64 / 3.0).sqrt(), 1e-12));
        assert!(close(found.degrees, 50.0 / 17.0, 1e-12));
        let one = Contrast::welch(&[1.0], &[2.0, 3.0]);
        assert!(one.error.is_nan() && close(one.p(), 1.0, 1e-12));
        let paired = Contrast::paired(&[1.0, 2.0, f64::NAN, 3.0]);
        assert!(close(paired.error, (1.0_f64 / 3.0).sqrt(), 1e-12));
    }

    #[test]
    fn holm_steps_down_until_the_first_that_stands() {
        // Limits 0.05 ÷ 4, ÷ 3, ÷ 2, ÷ 1: 0.01 passes, 0.015 > 0.0167 passes, 0.03 > 0.025 stops.
        assert_eq!(holm(&[0.03, 0.01, 0.04, 0.015], 0.05), [false, true, false, true]);
        assert_eq!(holm(&[], 0.05), Vec::<bool>::new());
    }
}
