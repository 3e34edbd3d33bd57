//! The log of measured points: one [`Sample`] per line of `samples.jsonl`, append-only.

use std::collections::BTreeMap;
use std::fmt;

pub use cluster_health_core::Pinned;
use cluster_health_core::{ByteSize, CpuId, DeviceId};
use serde::{Deserialize, Serialize};

/// What a point measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Sweep {
    /// Host to device copies, CPU × device.
    H2d,
    /// Device to host copies, CPU × device.
    D2h,
    /// Both directions at once, CPU × device.
    Bidirectional,
    /// All-gather of two ranks, rank-0 CPU × rank-1 CPU.
    CorePair,
}

impl Sweep {
    /// The word of the log and of `run.json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::H2d => "h2d",
            Self::D2h => "d2h",
            Self::Bidirectional => "bidirectional",
            Self::CorePair => "core_pair",
        }
    }

    /// True for the sweep whose cells are pairs of rank CPUs.
    #[must_use]
    pub const fn is_pair(self) -> bool {
        matches!(self, Self::CorePair)
    }
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How a point ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PointStatus {
    /// Timed; the only status whose times enter an estimate.
    Measured,
    /// Could not be started (a CPU that refuses binding, a rank that cannot take part).
    Skipped,
    /// Started and failed, or delivered wrong data.
    Failed,
    /// Timed, but faster than the path can be.
    Implausible,
}

/// Which clock timed the iterations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Timer {
    /// The host's monotonic clock around issue and wait.
    Host,
    /// Device events around the copy.
    Event,
    /// Device events around a batch of copies.
    EventBatch,
}

/// The part of a run that a point belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// The randomised complete blocks: the only phase that matrices and summaries use.
    Blocks,
    /// Small copies that identify the fixed cost.
    Probe,
    /// Visits that confirm or refute a suspicion.
    Confirm,
}

/// Result of comparing the destination with what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DataCheck {
    /// The data arrived.
    Ok,
    /// Something else arrived.
    Mismatch,
    /// Not compared.
    Off,
}

/// CPUs seen running the measuring thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(clippy::exhaustive_enums, reason = "the two shapes are the file format")]
#[non_exhaustive]
pub enum RanOn {
    /// Of the one measuring thread.
    Thread(Vec<CpuId>),
    /// Per rank, for pairs.
    Ranks(Vec<Vec<CpuId>>),
}

/// One measured, skipped or failed point: a line of `samples.jsonl`.
///
/// Times are nanoseconds. Fields of the other kind of sweep are left out of a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sample {
    /// 0,1,2… in order of measurement, also across resumes.
    pub seq: u64,
    /// Start of the point since the run's first bind; `None` in imports.
    pub t_ns: Option<u64>,
    /// What was measured.
    pub sweep: Sweep,
    /// Name of the load profile.
    pub load: String,
    /// Replicate, from 0.
    pub block: u32,
    /// CPU of an H2D cell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuId>,
    /// Device of an H2D cell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceId>,
    /// Rank 0's CPU of a pair cell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank0_cpu: Option<CpuId>,
    /// Rank 1's CPU of a pair cell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank1_cpu: Option<CpuId>,
    /// Devices of rank 0 and rank 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_pair: Option<[DeviceId; 2]>,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// How the point ended.
    pub status: PointStatus,
    /// Why it was not measured; `None` when it was.
    pub reason: Option<String>,
    /// Timed iterations: device events where the backend has them, else host clock; for pairs the
    /// maximum over ranks.
    pub iter_ns: Vec<u64>,
    /// Host clock beside device events; `None` when `timer` is the host clock.
    pub host_iter_ns: Option<Vec<u64>>,
    /// Which clock `iter_ns` comes from.
    pub timer: Timer,
    /// Pairs: one list per rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_ns: Option<Vec<Vec<u64>>>,
    /// Discarded transfers before the timed ones.
    #[serde(default)]
    pub warmup_ns: Vec<u64>,
    /// Arena work done for this point; 0 when the arena was there.
    #[serde(default)]
    pub touch_ns: u64,
    /// Binding and its read-back; 0 when the CPU did not change.
    #[serde(default)]
    pub bind_ns: u64,
    /// How the host memory is held.
    pub pinned: Option<Pinned>,
    /// Pages per NUMA node of at most 512 evenly spaced ones; `None` = unverified.
    pub page_nodes: Option<BTreeMap<u32, u32>>,
    /// CPUs seen running the measuring thread.
    pub ran_on: RanOn,
    /// True for the extra visits of the drift cells.
    #[serde(default)]
    pub sentinel: bool,
    /// Which part of the run.
    pub phase: Phase,
    /// Which of the node's arenas.
    pub arena: Option<u32>,
    /// False when warm-up ended without settling.
    #[serde(default = "yes")]
    pub settled: bool,
    /// Pairs: start skew between the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skew_ns: Option<u64>,
    /// Result of the data check.
    pub check: DataCheck,
}

fn yes() -> bool {
    true
}

impl Sample {
    /// A point of a cell that is not measured yet.
    #[must_use]
    pub fn new(seq: u64, sweep: Sweep, bytes: ByteSize) -> Self {
        Self {
            seq,
            t_ns: None,
            sweep,
            load: "idle".to_owned(),
            block: 0,
            cpu: None,
            device: None,
            rank0_cpu: None,
            rank1_cpu: None,
            device_pair: None,
            bytes,
            status: PointStatus::Measured,
            reason: None,
            iter_ns: Vec::new(),
            host_iter_ns: None,
            timer: Timer::Host,
            rank_ns: None,
            warmup_ns: Vec::new(),
            touch_ns: 0,
            bind_ns: 0,
            pinned: None,
            page_nodes: None,
            ran_on: RanOn::Thread(Vec::new()),
            sentinel: false,
            phase: Phase::Blocks,
            arena: None,
            settled: true,
            skew_ns: None,
            check: DataCheck::Off,
        }
    }

    /// Row and column ids of the point's cell: (CPU, device) or (rank-0 CPU, rank-1 CPU).
    #[must_use]
    pub fn cell(&self) -> Option<(u32, u32)> {
        if self.sweep.is_pair() {
            Some((self.rank0_cpu?.0, self.rank1_cpu?.0))
        } else {
            Some((self.cpu?.0, self.device?.0))
        }
    }

    /// Timed iterations by the host clock, whichever clock `iter_ns` comes from.
    #[must_use]
    pub fn host_times(&self) -> &[u64] {
        self.host_iter_ns.as_deref().unwrap_or(&self.iter_ns)
    }

    /// Whether all its times together stay below 2⁶² ns (146 years), so that no sum over one point
    /// overflows; no clock of a machine counts further.
    pub(crate) fn has_possible_times(&self) -> bool {
        let ranks = self.rank_ns.iter().flatten();
        let lists = [&self.iter_ns, &self.warmup_ns].into_iter().chain(&self.host_iter_ns);
        let single = [self.t_ns, Some(self.touch_ns), Some(self.bind_ns), self.skew_ns];
        let times = lists.chain(ranks).flatten().chain(single.iter().flatten());
        times.fold(0_u64, |sum, &time| sum.saturating_add(time)) < 1 << 62
    }

    /// True when the point's times enter matrices and summaries.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.status == PointStatus::Measured && self.is_matrix_point()
    }

    /// True for a first-class visit of a cell: no sentinel, probe or confirmation.
    #[must_use]
    pub fn is_matrix_point(&self) -> bool {
        self.phase == Phase::Blocks && !self.sentinel
    }
}
