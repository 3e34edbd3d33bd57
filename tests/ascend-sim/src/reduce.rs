//! Reductions over bytes of HCCL data types, and the narrow floating point types.

const SUM: u32 = 0;
const PROD: u32 = 1;
const MAX: u32 = 2;

pub(crate) fn supports(data_type: u32) -> bool {
    data_type <= 11
}

/// `into` becomes the reduction of `into` and `other`, element by element.
pub(crate) fn combine(into: &mut [u8], other: &[u8], data_type: u32, op: u32) {
    macro_rules! integers {
        ($ty:ty) => {
            each(into, other, |a, b| {
                let (a, b) = (<$ty>::from_le_bytes(a), <$ty>::from_le_bytes(b));
                let c = match op {
                    SUM => a.wrapping_add(b),
                    PROD => a.wrapping_mul(b),
                    MAX => a.max(b),
                    _ => a.min(b),
                };
                c.to_le_bytes()
            })
        };
    }
    match data_type {
        0 => integers!(i8),
        1 => integers!(i16),
        2 => integers!(i32),
        3 => each(into, other, |a, b| {
            let (a, b) = (half(u16::from_le_bytes(a)), half(u16::from_le_bytes(b)));
            to_half(float(f64::from(a), f64::from(b), op)).to_le_bytes()
        }),
        4 => each(into, other, |a, b| {
            let (a, b) = (f32::from_le_bytes(a), f32::from_le_bytes(b));
            narrow(float(f64::from(a), f64::from(b), op)).to_le_bytes()
        }),
        5 => integers!(i64),
        6 => integers!(u64),
        7 => integers!(u8),
        8 => integers!(u16),
        9 => integers!(u32),
        10 => each(into, other, |a, b| {
            float(f64::from_le_bytes(a), f64::from_le_bytes(b), op).to_le_bytes()
        }),
        _ => each(into, other, |a, b| {
            let (a, b) = (brain(u16::from_le_bytes(a)), brain(u16::from_le_bytes(b)));
            to_brain(float(f64::from(a), f64::from(b), op)).to_le_bytes()
        }),
    }
}

fn each<const N: usize>(
    into: &mut [u8],
    other: &[u8],
    combine: impl Fn([u8; N], [u8; N]) -> [u8; N],
) {
    let (into, _) = into.as_chunks_mut::<N>();
    let (other, _) = other.as_chunks::<N>();
    for (a, b) in into.iter_mut().zip(other) {
        *a = combine(*a, *b);
    }
}

fn float(a: f64, b: f64, op: u32) -> f64 {
    match op {
        SUM => a + b,
        PROD => a * b,
        MAX => a.max(b),
        _ => a.min(b),
    }
}

#[allow(clippy::cast_possible_truncation, reason = "rounding to the type of the elements")]
fn narrow(x: f64) -> f32 {
    x as f32
}

/// An IEEE half as a float.
pub(crate) fn half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f32::from(bits & 0x3ff));
    sign * match exponent {
        0 => fraction * 2_f32.powi(-24),
        31 if bits & 0x3ff == 0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * 2_f32.powi(exponent - 25),
    }
}

/// The nearest IEEE half, ties to even.
pub(crate) fn to_half(x: f64) -> u16 {
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let size = x.abs();
    if size.is_nan() {
        return 0x7e00;
    }
    if size >= 65_520.0 {
        return sign | 0x7c00;
    }
    // Counting the steps of the binade: an overflow of the fraction carries into the exponent.
    let exponent = (14..=29).rev().chain((0..14).rev()).map(|e| e - 14);
    let exponent = exponent.into_iter().find(|&e| size >= 2_f64.powi(e)).unwrap_or(-14);
    let steps = (size / 2_f64.powi(exponent - 10)).round_ties_even();
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and 2048 by the choice of the exponent"
    )]
    let steps = steps as u16;
    let biased = u16::try_from(exponent + 14).unwrap_or(0);
    sign | (biased * 1024 + steps)
}

/// A bfloat16 as a float.
pub(crate) fn brain(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16, ties to even.
pub(crate) fn to_brain(x: f64) -> u16 {
    let bits = narrow(x).to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    u16::try_from(rounded >> 16).unwrap_or(0)
}
