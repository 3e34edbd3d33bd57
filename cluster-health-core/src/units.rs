//! Bytes, rates and durations, with the units written out.
//!
//! | quantity | unit | text |
//! |---|---|---|
//! | [`ByteSize`] | exact bytes | `8B 4KiB 16MiB 1GiB` binary, `4KB 16MB 1GB` decimal, bare = bytes |
//! | [`Bandwidth`] | bytes per second | shown and written in decimal GB/s (10⁹ bytes/s) |
//! | [`parse_duration`] | [`Duration`] | `500ms 30s 2m` |

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An exact number of bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl ByteSize {
    /// `n` × 2¹⁰ bytes, saturating.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(KIB))
    }

    /// `n` × 2²⁰ bytes, saturating.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(MIB))
    }

    /// `n` × 2³⁰ bytes, saturating.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(GIB))
    }

    /// The number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The number of bytes as a length in memory.
    ///
    /// # Errors
    /// When the size does not fit the address space.
    pub fn as_len(self) -> Result<usize> {
        usize::try_from(self.0)
            .map_err(|_| Error::invalid("size", format!("{self} is larger than the address space")))
    }
}

/// Shortest exact text with a binary unit: `16MiB`, `1536KiB`, `1000B`.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        match n {
            0 => f.write_str("0B"),
            _ if n.is_multiple_of(GIB) => write!(f, "{}GiB", n / GIB),
            _ if n.is_multiple_of(MIB) => write!(f, "{}MiB", n / MIB),
            _ if n.is_multiple_of(KIB) => write!(f, "{}KiB", n / KIB),
            _ => write!(f, "{n}B"),
        }
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    /// Reads `16MiB`, `4KB`, `0.125MiB`, `65536`.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::invalid("size", format!("'{text}': {why}"));
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" => KIB,
            "mib" => MIB,
            "gib" => GIB,
            "tib" => GIB << 10,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => {
                return Err(bad(
                    "unknown unit; use B, KiB, MiB, GiB, TiB (binary) or KB, MB, GB, TB (decimal)",
                ));
            }
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return Err(bad("a number is missing"));
        }
        if fraction.contains('.') || fraction.len() > 18 {
            return Err(bad("not a number"));
        }
        let parse = |digits: &str| -> Result<u128> {
            if digits.is_empty() { Ok(0) } else { digits.parse().map_err(|_| bad("not a number")) }
        };
        let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or_default());
        let scaled = parse(whole)?
            .checked_mul(scale)
            .and_then(|n| n.checked_add(parse(fraction).ok()?))
            .and_then(|n| n.checked_mul(u128::from(unit)))
            .ok_or_else(|| bad("too large"))?;
        if scaled % scale != 0 {
            return Err(bad("not a whole number of bytes"));
        }
        u64::try_from(scaled / scale).map(Self).map_err(|_| bad("too large"))
    }
}

/// A rate in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bandwidth(f64);

impl Bandwidth {
    /// From bytes per second.
    #[must_use]
    pub const fn bytes_per_second(rate: f64) -> Self {
        Self(rate)
    }

    /// From decimal GB/s (10⁹ bytes per second).
    #[must_use]
    pub const fn gb_per_second(rate: f64) -> Self {
        Self(rate * 1e9)
    }

    /// `bytes` moved in `nanoseconds`; NaN when no time passed.
    #[must_use]
    pub fn of(bytes: ByteSize, nanoseconds: f64) -> Self {
        if nanoseconds > 0.0 {
            #[allow(clippy::cast_precision_loss, reason = "sizes stay far below 2^53 bytes")]
            let bytes = bytes.0 as f64;
            Self(bytes / nanoseconds * 1e9)
        } else {
            Self(f64::NAN)
        }
    }

    /// Decimal GB/s.
    #[must_use]
    pub fn as_gb_per_second(self) -> f64 {
        self.0 / 1e9
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} GB/s", self.as_gb_per_second())
    }
}

impl FromStr for Bandwidth {
    type Err = Error;

    /// Reads a decimal rate: `58.5`, `58.5GB/s`, `58.5 GB/s`, `585MB/s`, `2GiB/s`; bare = GB/s.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::invalid("rate", format!("'{text}': {why}"));
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "gb/s" => 1e9,
            "mb/s" => 1e6,
            "kb/s" => 1e3,
            "tb/s" => 1e12,
            "gib/s" => 1024.0 * 1024.0 * 1024.0,
            "mib/s" => 1024.0 * 1024.0,
            _ => return Err(bad("unknown unit; use GB/s, MB/s, GiB/s or MiB/s")),
        };
        let number: f64 = number.parse().map_err(|_| bad("not a number"))?;
        let rate = number * unit;
        if rate > 0.0 && rate.is_finite() {
            Ok(Self(rate))
        } else {
            Err(bad("a rate must be above 0 and finite"))
        }
    }
}

/// Reads `500us`, `500ms`, `30s`, `2m`, `1h`; bare = seconds.
///
/// # Errors
/// When the text is not a positive number with one of these units.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad = |why: &str| Error::invalid("duration", format!("'{text}': {why}"));
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let seconds = match unit.trim() {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad("unknown unit; use us, ms, s, m or h")),
    };
    let number: f64 = number.parse().map_err(|_| bad("not a number"))?;
    let duration = Duration::try_from_secs_f64(number * seconds).map_err(|_| bad("too large"))?;
    // Also what is less than a nanosecond.
    if duration.is_zero() {
        return Err(bad("must be above 0"));
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_documented() {
        let size = |text: &str| text.parse::<ByteSize>().map(ByteSize::bytes);
        assert_eq!(size("8B").unwrap(), 8);
        assert_eq!(size("4KiB").unwrap(), 4096);
        assert_eq!(size("4KB").unwrap(), 4000);
        assert_eq!(size("16MiB").unwrap(), 16_777_216);
        assert_eq!(size("16MB").unwrap(), 16_000_000);
        assert_eq!(size("1GiB").unwrap(), 1_073_741_824);
        assert_eq!(size("0.125MiB").unwrap(), 131_072);
        assert_eq!(size("0.1KB").unwrap(), 100);
        assert_eq!(size("65536").unwrap(), 65_536);
        assert_eq!(size("0").unwrap(), 0);
        for text in ["", "MiB", "-1", "1.5B", "1..5KiB", "1XB", "1e3", "0.3B", "99999999999GiB"] {
            let error = size(text).unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")), "{error}");
        }
    }

    #[test]
    fn sizes_print_exactly_and_shortest() {
        for (bytes, text) in [
            (0, "0B"),
            (1000, "1000B"),
            (4096, "4KiB"),
            (1_572_864, "1536KiB"),
            (16 << 20, "16MiB"),
            (1 << 30, "1GiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
            assert_eq!(text.parse::<ByteSize>().unwrap().bytes(), bytes);
        }
    }

    #[test]
    fn rates_are_decimal() {
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b;
        assert!(close(Bandwidth::of(ByteSize(1_000_000), 1e6).as_gb_per_second(), 1.0));
        assert!(Bandwidth::of(ByteSize(1), 0.0).as_gb_per_second().is_nan());
        assert!(close("58.5GB/s".parse::<Bandwidth>().unwrap().as_gb_per_second(), 58.5));
        assert!(close("500MB/s".parse::<Bandwidth>().unwrap().as_gb_per_second(), 0.5));
        assert!("0".parse::<Bandwidth>().is_err());
        // A number that only its unit makes infinite.
        assert!(format!("{}TB/s", "9".repeat(300)).parse::<Bandwidth>().is_err());
        assert!("fast".parse::<Bandwidth>().is_err());
    }

    #[test]
    fn durations_read_as_documented() {
        assert_eq!(parse_duration("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(parse_duration("30s").unwrap(), Duration::from_secs(30));
        assert_eq!(parse_duration("2m").unwrap(), Duration::from_secs(120));
        assert_eq!(parse_duration("0.001us").unwrap(), Duration::from_nanos(1));
        for text in ["", "0s", "-1s", "1d", "s", "0.0000000001us", "9999999999999999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
