//! Device events around work, and how much work their clock can resolve.

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::stream::{Event, Stream};
use crate::transfer::Transfer;

/// A time is believed when it is at least so many times as long as the clock's resolution: 2 %.
const TICKS: f64 = 50.0;

/// Most operations between two events. What is too short even so is left to the host's clock.
const MOST: u32 = 1000;

/// Measurements of which the shortest decides.
const ATTEMPTS: u32 = 3;

/// Bounds of looking for the resolution.
const FEWEST_ROUNDS: usize = 64;
const LOOK: Duration = Duration::from_millis(5);
const LONGEST_LOOK: Duration = Duration::from_millis(50);
/// More distinct intervals are not kept.
const MOST_INTERVALS: usize = 512;

/// Two events of a stream's device, and the resolution of their clock as it was seen.
///
/// Operations too short for that clock are put back to back between the events, so many that
/// together they take 50 times its resolution ([`choose`](Self::choose)): another quantity than
/// operations that are waited for one by one, to be named as such.
#[derive(Debug)]
pub struct EventTimer {
    marks: [Event; 2],
    resolution_ns: Option<f64>,
    batch: u32,
}

/// What a measured interval says about the number of operations between two events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Batch {
    /// Long enough.
    Enough,
    /// So many are needed, as far as can be told.
    More(u32),
    /// The clock is too coarse for any number.
    TooCoarse,
}

impl EventTimer {
    /// Two events of the stream's device; some milliseconds are spent on recording them without
    /// work in between, to see the resolution of their clock.
    ///
    /// # Errors
    /// When the device refuses, or the stream does not become idle within `timeout`.
    pub fn new(stream: &Stream, timeout: Duration) -> Result<Self> {
        let mut marks = [Event::new(stream.device())?, Event::new(stream.device())?];
        let resolution_ns = observe(&mut marks, stream, timeout)?;
        Ok(Self { marks, resolution_ns, batch: 1 })
    }

    /// The smallest difference between two intervals that was seen, nanoseconds; `None` where all
    /// were the same (virtual time), which limits nothing.
    #[must_use]
    pub fn resolution_ns(&self) -> Option<f64> {
        self.resolution_ns
    }

    /// Operations between the events; 1 at first.
    #[must_use]
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// Sets the number of operations between the events; 0 counts as 1.
    pub fn set_batch(&mut self, operations: u32) {
        self.batch = operations.max(1);
    }

    /// Records the first event.
    ///
    /// # Errors
    /// As [`Event::record`].
    #[inline]
    pub fn begin(&mut self, stream: &Stream) -> Result<()> {
        self.marks[0].record(stream)
    }

    /// Records the second event.
    ///
    /// # Errors
    /// As [`Event::record`].
    #[inline]
    pub fn end(&mut self, stream: &Stream) -> Result<()> {
        self.marks[1].record(stream)
    }

    /// Nanoseconds of one operation, once the stream was waited for.
    ///
    /// # Errors
    /// As [`Event::nanoseconds_since`].
    pub fn nanoseconds(&self) -> Result<f64> {
        Ok(self.marks[1].nanoseconds_since(&self.marks[0])? / f64::from(self.batch))
    }

    /// Issues a batch of a transfer and waits; nanoseconds of one copy.
    ///
    /// # Errors
    /// As [`Transfer::issue`] and [`Transfer::wait`].
    pub fn time(&mut self, transfer: &mut Transfer<'_>) -> Result<f64> {
        let stream = transfer.stream();
        self.begin(stream)?;
        transfer.issue_batch(self.batch)?;
        self.end(stream)?;
        transfer.wait()?;
        self.nanoseconds()
    }

    /// Finds the batch that the clock can resolve. `measure` does one and returns the nanoseconds
    /// of one operation; it is called three times per batch tried, because a stall must not pass
    /// for a long operation, and not at all where the resolution is unknown. False when no number
    /// helps: use the host's clock.
    ///
    /// # Errors
    /// Those of `measure`.
    pub fn choose<E>(
        &mut self,
        mut measure: impl FnMut(&mut Self) -> Result<f64, E>,
    ) -> Result<bool, E> {
        self.batch = 1;
        let Some(resolution_ns) = self.resolution_ns else { return Ok(true) };
        loop {
            let mut one = measure(self)?;
            for _ in 1..ATTEMPTS {
                one = one.min(measure(self)?);
            }
            match Self::judge(resolution_ns, self.batch, one) {
                Batch::Enough => return Ok(true),
                Batch::More(more) => self.batch = more,
                Batch::TooCoarse => {
                    self.batch = 1;
                    return Ok(false);
                }
            }
        }
    }

    /// What a batch of `count` operations of `one_ns` each says, by a clock of this resolution.
    /// Ranks that give the same numbers get the same answer.
    #[must_use]
    pub fn judge(resolution_ns: f64, count: u32, one_ns: f64) -> Batch {
        let wanted = TICKS * resolution_ns;
        if one_ns * f64::from(count) >= wanted {
            return Batch::Enough;
        }
        if count >= MOST {
            return Batch::TooCoarse;
        }
        // What was seen is wrong by up to one tick; a little more spares another attempt.
        let one = one_ns.max(resolution_ns / f64::from(count));
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates, and the number is limited"
        )]
        let more = (1.2 * wanted / one).ceil() as u32;
        Batch::More(more.max(count.saturating_mul(2)).min(MOST))
    }
}

fn observe(marks: &mut [Event; 2], stream: &Stream, timeout: Duration) -> Result<Option<f64>> {
    let mut seen: Vec<f64> = Vec::new();
    let began = Instant::now();
    marks[0].record(stream)?;
    stream.synchronize(timeout)?;
    for round in 1.. {
        marks.swap(0, 1);
        marks[0].record(stream)?;
        stream.synchronize(timeout)?;
        let interval = marks[0].nanoseconds_since(&marks[1])?;
        if seen.len() < MOST_INTERVALS && !seen.iter().any(|known| is_same(*known, interval)) {
            seen.push(interval);
        }
        let spent = began.elapsed();
        let enough = round >= FEWEST_ROUNDS && seen.len() > 1 && spent >= LOOK;
        if enough || spent >= LONGEST_LOOK {
            break;
        }
    }
    Ok(resolution(&mut seen))
}

/// Events come as single-precision milliseconds.
fn is_same(a: f64, b: f64) -> bool {
    (a - b).abs() <= (2e-7 * a.max(b)).max(0.5)
}

fn resolution(seen: &mut [f64]) -> Option<f64> {
    seen.sort_by(f64::total_cmp);
    seen.windows(2).map(|pair| pair[1] - pair[0]).min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolution_is_the_smallest_step() {
        assert_eq!(resolution(&mut [3000.0, 0.0, 1000.0]), Some(1000.0));
        assert_eq!(resolution(&mut [420.0]), None);
        assert!(is_same(1e7, 1e7 + 1.0) && !is_same(1000.0, 1020.0));
    }

    #[test]
    fn batches_reach_fifty_ticks() {
        let judge = EventTimer::judge;
        assert_eq!(judge(20.0, 1, 1000.0), Batch::Enough);
        assert_eq!(judge(1000.0, 1, 10_000.0), Batch::More(6));
        assert_eq!(judge(1000.0, 6, 9_000.0), Batch::Enough);
        // Below one tick the interval tells nothing but that.
        assert_eq!(judge(1000.0, 1, 0.0), Batch::More(60));
        assert_eq!(judge(1e6, MOST, 1000.0), Batch::TooCoarse);
        // It ends whatever the clock says.
        let mut count = 1;
        for _ in 0..16 {
            match judge(1e9, count, 0.0) {
                Batch::More(more) => count = more,
                other => return assert_eq!(other, Batch::TooCoarse),
            }
        }
        panic!("no end");
    }
}
