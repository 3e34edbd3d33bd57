//! What each block measured: the unit from which everything judged takes its uncertainty.

use cluster_health_core::ByteSize;
use ndarray::Array3;

use crate::samples::Sample;
use crate::stats::median_ns;

/// One copy (or all-gather) of a size outside the matrix that identifies the fixed cost.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ProbeTime {
    /// Block that it accompanied.
    pub block: u32,
    /// Row id: CPU, or CPU of rank 0.
    pub row: u32,
    /// Column id: device, or CPU of rank 1.
    pub column: u32,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// Median iteration in nanoseconds, by the clock of the matrix.
    pub ns: f64,
    /// The same by the host clock.
    pub host_ns: f64,
}

impl ProbeTime {
    pub(crate) fn of(sample: &Sample) -> Option<Self> {
        let (row, column) = sample.cell()?;
        let ns = median_ns(&sample.iter_ns);
        let host_ns = median_ns(sample.host_times());
        let usable = ns > 0.0 && host_ns > 0.0;
        usable.then_some(Self {
            block: sample.block,
            row,
            column,
            bytes: sample.bytes,
            ns,
            host_ns,
        })
    }
}

/// The rates of one matrix block by block, and the probes beside them.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Blocks {
    /// Number of each block, ascending.
    pub numbers: Vec<u32>,
    /// Of each block sizes × rows × columns in decimal GB/s; NaN = not measured in it.
    pub gbps: Vec<Array3<f64>>,
    /// The same by the host clock, where device events timed the matrix; else empty.
    pub host_gbps: Vec<Array3<f64>>,
    /// The probes.
    pub probes: Vec<ProbeTime>,
}

impl Blocks {
    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// True when nothing was measured.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }
}
