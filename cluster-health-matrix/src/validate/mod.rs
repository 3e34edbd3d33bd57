//! The base table of a machine: what its CPUs compute and what its links carry, rank by rank.
//!
//! A rank is a device with a CPU of the device's NUMA node. Its own operations are measured one rank
//! after the other, so that a row shows an idle link; what ranks do together they do all at once. Every
//! repetition visits ranks and operations in a fresh order.
//!
//! ```
//! use cluster_health_core::{ByteSize, Machine};
//! use cluster_health_matrix::validate::{self, ValidatePlan};
//!
//! # fn main() -> cluster_health_matrix::Result<()> {
//! let machine = Machine::host()?;
//! let plan = ValidatePlan::builder()
//!     .devices([machine.devices()[0].id().0])
//!     .sizes([ByteSize::mib(1)])
//!     .orders([32])
//!     .repeats(2)
//!     .build(&machine)?;
//! // One rank: what ranks do together is not measured, and says so.
//! let table = validate::measure(&machine, &plan, None, &mut ())?;
//! assert!(table.lines.iter().any(|line| line.median.is_some_and(|rate| rate > 0.0)));
//! # Ok(())
//! # }
//! ```

mod matmul;
mod measure;
mod output;
mod session;

use std::time::Duration;

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{BackendKind, Bandwidth, ByteSize, CpuId, DataType, DeviceId, Machine};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::run::Tool;
use crate::samples::Timer;
use crate::visit::{self, Operation, Settings};

pub(crate) use measure::{cached, local_rank};
pub use output::{VALIDATE_CSV, VALIDATE_JSON, VALIDATE_XLSX, markdown, text};
pub use session::{follow, record, rewrite};

/// Load profile of the machine as it is.
pub const IDLE: &str = "idle";

/// Bytes of copies and collectives, as far as they fit into memory. The last is far beyond every
/// cache, the first is not.
const SIZES: [ByteSize; 3] = [ByteSize::mib(1), ByteSize::mib(16), ByteSize::mib(256)];
/// Orders of matrices of CPUs and devices.
const ORDERS: [u32; 2] = [256, 1024];
const DEVICE_ORDERS: [u32; 2] = [1024, 8192];
const LARGEST_ORDER: u32 = 16_384;

/// What a validation measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ValidatePlan {
    /// Load profile; its name goes into every line.
    pub load: String,
    /// The device of each rank of this host.
    pub devices: Vec<DeviceId>,
    /// The CPU of each rank of this host.
    pub cpus: Vec<CpuId>,
    /// Bytes of copies, and per rank of collectives.
    pub sizes: Vec<ByteSize>,
    /// Orders n of the n × n matrices that CPUs multiply.
    pub orders: Vec<u32>,
    /// Orders of the matrices that devices multiply.
    pub device_orders: Vec<u32>,
    /// Timed iterations per visit.
    pub iters: u32,
    /// Exactly so many discarded ones; `None`: until settled.
    pub warmup: Option<u32>,
    /// Visits of each operation.
    pub repeats: u32,
    /// Seed of all orders.
    pub seed: u64,
    /// Bound of every wait, milliseconds.
    pub timeout_ms: u64,
    /// What the memory of a device can carry at most, reading and writing together.
    pub expect_hbm: Option<Bandwidth>,
}

impl ValidatePlan {
    /// A plan with default values.
    #[must_use]
    pub fn builder() -> ValidatePlanBuilder {
        ValidatePlanBuilder::default()
    }

    fn settings(&self) -> Settings {
        let timeout = Duration::from_millis(self.timeout_ms);
        Settings { iters: self.iters, warmup: self.warmup, timeout }
    }

    fn largest(&self) -> ByteSize {
        self.sizes.iter().copied().max().unwrap_or_default()
    }

    /// Number of ranks on this host.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.devices.len()
    }
}

/// Makes a [`ValidatePlan`].
#[derive(Debug, Clone, Default)]
pub struct ValidatePlanBuilder {
    load: Option<String>,
    devices: Option<Vec<u32>>,
    cpus: Option<Vec<u32>>,
    sizes: Option<Vec<ByteSize>>,
    orders: Option<Vec<u32>>,
    device_orders: Option<Vec<u32>>,
    iters: Option<u32>,
    warmup: Option<u32>,
    repeats: Option<u32>,
    seed: Option<u64>,
    timeout: Option<Duration>,
    expect_hbm: Option<Bandwidth>,
}

impl ValidatePlanBuilder {
    visit::visit_setters!();
    visit::setters! {
        /// What the memory of a device can carry at most, reading and writing together: a copy
        /// within the device that is faster came from its cache.
        expect_hbm: Option<Bandwidth> => expect_hbm;
        /// One rank per device, in this order; default: all devices, a single one of the host
        /// backend or of a synthetic machine twice, because that is what a pair needs.
        devices: impl Into<Vec<u32>> => Some(devices.into());
        /// The CPU of each rank; default: one on the device's NUMA node.
        cpus: impl Into<Vec<u32>> => Some(cpus.into());
        /// Bytes of copies, and per rank of collectives; default: 1, 16 and 256 MiB as far as they
        /// fit into memory.
        sizes: impl Into<Vec<ByteSize>> => Some(sizes.into());
        /// Orders of the matrices that devices multiply, where they can; default 1024 and 8192.
        device_orders: impl Into<Vec<u32>> => Some(device_orders.into());
        /// Orders of the matrices that CPUs multiply; default 256 and 1024.
        orders: impl Into<Vec<u32>> => Some(orders.into());
    }

    /// Checks the plan against a machine.
    ///
    /// # Errors
    /// When an option cannot be used; the error names it.
    pub fn build(self, machine: &Machine) -> Result<ValidatePlan> {
        let devices = visit::choose_rank_devices(machine, self.devices.as_deref())?;
        let cpus = visit::choose_cpus(machine, &devices, self.cpus.as_deref())?;
        let orders = self.orders.unwrap_or_else(|| ORDERS.to_vec());
        check_orders("--matmul-sizes", &orders)?;
        let device_orders = self.device_orders.unwrap_or_else(|| DEVICE_ORDERS.to_vec());
        check_orders("--device-matmul-sizes", &device_orders)?;
        let sizes = self.sizes.unwrap_or_else(|| default_sizes(machine, devices.len()));
        visit::check_sizes("--sizes", &sizes)?;
        let timeout = self.timeout.unwrap_or(Duration::from_secs(30));
        let plan = ValidatePlan {
            load: self.load.unwrap_or_else(|| IDLE.to_owned()),
            devices,
            cpus,
            sizes,
            orders,
            device_orders,
            iters: self.iters.unwrap_or(3),
            warmup: self.warmup,
            repeats: self.repeats.unwrap_or(3),
            seed: self.seed.unwrap_or(1),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            expect_hbm: self.expect_hbm,
        };
        visit::check_plan(plan.settings(), plan.repeats, plan.expect_hbm)?;
        let (needed, available) = memory(machine, plan.ranks(), plan.largest());
        if available.is_some_and(|available| needed > available) {
            let message = format!(
                "{} needs {} MiB of memory for {} ranks, {} MiB may be used; choose smaller sizes",
                plan.largest(),
                needed >> 20,
                plan.ranks(),
                available.unwrap_or(0) >> 20
            );
            return Err(Error::invalid("--sizes", message));
        }
        Ok(plan)
    }
}

fn check_orders(option: &str, orders: &[u32]) -> Result<()> {
    for (index, order) in orders.iter().enumerate() {
        if !(1..=LARGEST_ORDER).contains(order) || orders[..index].contains(order) {
            let message = format!(
                "element {}: {order}: orders are different numbers from 1 to {LARGEST_ORDER}",
                index + 1
            );
            return Err(Error::invalid(option, message));
        }
    }
    Ok(())
}

/// Bytes of this machine's memory that ranks need for copies and collectives of `largest`, and how
/// many they may use, where that is known.
pub(crate) fn memory(machine: &Machine, ranks: usize, largest: ByteSize) -> (u64, Option<u64>) {
    let ranks = ranks as u64;
    // Source, device buffers of a copy, and what a collective sends and receives.
    let buffers = match machine.backend() {
        BackendKind::Host => 5 + ranks,
        _ => 1,
    };
    let needed = largest.bytes().saturating_mul(buffers).saturating_mul(ranks);
    (needed, visit::usable_memory(machine))
}

fn default_sizes(machine: &Machine, ranks: usize) -> Vec<ByteSize> {
    let fits = |size: &ByteSize| {
        let (needed, available) = memory(machine, ranks, *size);
        // What is not asked for must not fill the machine.
        available.is_none_or(|available| needed <= available / 2)
    };
    let sizes: Vec<ByteSize> = SIZES.into_iter().filter(fits).collect();
    if sizes.is_empty() { vec![SIZES[0]] } else { sizes }
}

/// Whether a line has numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LineStatus {
    /// On every rank that it concerns.
    Measured,
    /// The machine or its software has no such thing.
    NotAvailable,
    /// There is nothing to measure it between, or it was not reached.
    NotMeasured,
    /// It failed on a rank; the numbers are of the others.
    Failed,
}

/// What a rate is the quotient of, for n ranks with S bytes each in time t.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Convention {
    /// What one rank does: S ÷ t; 2·n³ ÷ t for a matrix product.
    PerRank,
    /// Algorithm bandwidth: n·S ÷ t.
    Alg,
    /// Bus bandwidth: (n − 1)·S ÷ t.
    Bus,
}

impl Convention {
    /// The name as files have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PerRank => "per_rank",
            Self::Alg => "alg",
            Self::Bus => "bus",
        }
    }
}

/// Which ranks take part in a line together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Scope {
    /// Each on its own.
    Rank,
    /// The first two of one host.
    LocalPair,
    /// All of one host.
    LocalHost,
    /// Two on different hosts.
    InterHostPair,
    /// All of all hosts.
    Global,
}

impl Scope {
    /// The name as files have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rank => "rank",
            Self::LocalPair => "local_pair",
            Self::LocalHost => "local_host",
            Self::InterHostPair => "inter_host_pair",
            Self::Global => "global",
        }
    }
}

/// What one rank contributes to a line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankValue {
    /// The rank.
    pub rank: u32,
    /// Median over the repetitions, in the unit of the line; by this rank's own times.
    pub value: Option<f64>,
    /// Relative standard deviation between the repetitions, from their median absolute deviation.
    pub spread: Option<f64>,
    /// Repetitions measured.
    pub repetitions: u32,
    /// What the iterations were timed with.
    pub timer: Option<Timer>,
    /// Repetitions whose warm-up ended without settling.
    pub unsettled: u32,
    /// Why a repetition has no number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Line {
    /// What was timed.
    pub operation: Operation,
    /// Between whom.
    pub scope: Scope,
    /// Load profile.
    pub load: String,
    /// Bytes of a copy, per rank of a collective.
    pub bytes: Option<ByteSize>,
    /// Order n of n × n matrices.
    pub order: Option<u32>,
    /// Elements of the matrices.
    pub data_type: Option<DataType>,
    /// `GB/s` (decimal) or `TFLOPS`.
    pub unit: String,
    /// What the rate is the quotient of.
    pub convention: Convention,
    /// `page_locked` or `pageable`: host memory of the copy.
    pub memory: Option<String>,
    /// Ranks with a number.
    pub ranks: u32,
    /// Fewest repetitions of a rank with a number.
    pub repetitions: u32,
    /// Slowest rank.
    pub min: Option<f64>,
    /// Median over the ranks.
    pub median: Option<f64>,
    /// Fastest rank.
    pub max: Option<f64>,
    /// Median over the ranks of their spread between repetitions; `None` with one repetition.
    pub spread: Option<f64>,
    /// Of collectives: the rate by the slowest rank of each iteration.
    pub collective: Option<f64>,
    /// Faster than the memory of the device can be: the data never left its cache.
    pub cached: bool,
    /// Whether there are numbers.
    pub status: LineStatus,
    /// Why not, or what limits them.
    pub reason: Option<String>,
    /// Rank by rank.
    pub per_rank: Vec<RankValue>,
}

/// Where a rank runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankPlace {
    /// The rank.
    pub rank: u32,
    /// Its host's name.
    pub host: Option<String>,
    /// Its device, physical id.
    pub device: DeviceId,
    /// The CPU it is bound to.
    pub cpu: CpuId,
    /// NUMA node of the CPU.
    pub numa_node: Option<u32>,
}

/// The content of `validate.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Table {
    /// Version of the file.
    pub schema_version: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// False when it was interrupted.
    pub complete: bool,
    /// Where the ranks ran.
    pub ranks: Vec<RankPlace>,
    /// The lines.
    pub lines: Vec<Line>,
}

impl Table {
    /// Number of lines with this status.
    #[must_use]
    pub fn count(&self, status: LineStatus) -> usize {
        self.lines.iter().filter(|line| line.status == status).count()
    }
}

/// Measures the table: on rank 0 of `group` the whole one, without a group that of one process, which
/// plays all ranks where that is possible (a synthetic machine) and is the only one elsewhere.
///
/// The other ranks call [`follow`].
///
/// # Errors
/// When a rank is lost. What cannot be measured is a status of its line.
///
/// # Thread binding
/// The calling thread is bound meanwhile.
pub fn measure(
    machine: &Machine,
    plan: &ValidatePlan,
    group: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<Table> {
    measure::lead(machine, plan, group, observer)
}
