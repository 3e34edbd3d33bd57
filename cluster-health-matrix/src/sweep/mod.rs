//! Sweeps: a plan measured on a machine, point by point.

mod beside;
mod copies;
mod core_pair;
mod engine;
mod h2d;
mod sampling;
pub(crate) mod warmup;

pub(crate) use core_pair::core_pair_in;
pub use core_pair::{CorePairMatrix, core_pair, core_pair_from, core_pair_ready};
pub(crate) use engine::{Course, RunClock, not_this_plan};
pub(crate) use h2d::h2d_in;
pub use h2d::{H2dMatrix, h2d, h2d_from};

/// How a sweep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SweepEnd {
    /// False when it was cancelled before its last point.
    pub complete: bool,
    /// Where the time went, in this call.
    pub timings: Timings,
    /// Points measured, skipped and failed in this call.
    pub points: u64,
    /// `seq` of whatever follows the sweep in its run; 0 unless it is complete.
    pub next_seq: u64,
}

/// Where the time of a sweep went, nanoseconds of the machine's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Timings {
    /// Timed iterations.
    pub iterations_ns: u64,
    /// Discarded transfers.
    pub warmup_ns: u64,
    /// Arena work between the first bind and the last sample.
    pub touch_ns: u64,
    /// Binding and its read-back.
    pub bind_ns: u64,
    /// Writing and comparing tags.
    pub check_ns: u64,
    /// First bind to last sample.
    pub wall_ns: u64,
    /// Arenas and device buffers before the first bind.
    pub setup_ns: u64,
}

impl std::ops::AddAssign for Timings {
    fn add_assign(&mut self, other: Self) {
        // What stands in a file may be any number.
        let add = |sum: &mut u64, time: u64| *sum = sum.saturating_add(time);
        add(&mut self.iterations_ns, other.iterations_ns);
        add(&mut self.warmup_ns, other.warmup_ns);
        add(&mut self.touch_ns, other.touch_ns);
        add(&mut self.bind_ns, other.bind_ns);
        add(&mut self.check_ns, other.check_ns);
        add(&mut self.wall_ns, other.wall_ns);
        add(&mut self.setup_ns, other.setup_ns);
    }
}
