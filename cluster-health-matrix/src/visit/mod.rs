//! One visit of one operation at one size: warm-up until settled, then timed iterations.
//!
//! Sweeps visit many CPUs; [`validate`](crate::validate) and [`sizes`](crate::sizes) stay on one CPU
//! per rank and visit many operations and sizes, [`policies`](crate::policies) lets the rank run on sets
//! of CPUs. The rule that ends a warm-up is the same.

mod copies;
pub(crate) mod folder;
mod ranks;
mod synthetic;
pub(crate) mod talk;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cluster_health_core::affinity::parse_id_list;
use cluster_health_core::{BackendKind, Bandwidth, ByteSize, CpuId, DeviceId, Machine, NodeId};
use serde::{Deserialize, Serialize};

pub(crate) use copies::Copies;
pub(crate) use ranks::{Ranks, SKEW_REPEATS, START_MARGIN_NS, is_skewed};
pub(crate) use synthetic::SyntheticRanks;

use crate::error::{Error, Result};
use crate::samples::Timer;
use crate::stats::median_ns;
use crate::sweep::warmup::{Verdict, Warmup};

/// Most timed iterations of one visit: their times fit one message between ranks.
pub const MOST_ITERS: u32 = 64;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Operation {
    /// A matrix product on one CPU.
    CpuMatmul,
    /// A matrix product on a device.
    DeviceMatmul,
    /// Host memory to device memory.
    H2d,
    /// Device memory to host memory.
    D2h,
    /// Between two buffers of one device.
    D2dSameDevice,
    /// From one device's memory to another's.
    DeviceToDevice,
    /// Every rank gets every rank's bytes.
    AllGather,
    /// The first rank of a pair sends, the second receives.
    SendReceive,
}

impl Operation {
    /// The name as files have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CpuMatmul => "cpu_matmul",
            Self::DeviceMatmul => "device_matmul",
            Self::H2d => "h2d",
            Self::D2h => "d2h",
            Self::D2dSameDevice => "d2d_same_device",
            Self::DeviceToDevice => "device_to_device",
            Self::AllGather => "all_gather",
            Self::SendReceive => "send_receive",
        }
    }

    /// True for what several ranks do together.
    #[must_use]
    pub const fn is_collective(self) -> bool {
        matches!(self, Self::AllGather | Self::SendReceive)
    }
}

/// The times of one visit, nanoseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Visit {
    /// Discarded warm-up, by the host clock.
    pub warmup_ns: Vec<u64>,
    /// False when the warm-up ended without settling.
    pub settled: bool,
    /// Timed iterations; of collectives the maximum over the ranks that took part.
    pub iter_ns: Vec<u64>,
    /// Of collectives: one list per rank, empty for a rank that did not take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_ns: Option<Vec<Vec<u64>>>,
    /// What the iterations were timed with.
    pub timer: Option<Timer>,
    /// The host clock beside device events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_iter_ns: Option<Vec<u64>>,
    /// Of collectives: the largest distance between the ranks' starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skew_ns: Option<u64>,
    /// CPUs that this rank's thread was seen on, looked up after each timed iteration; ascending.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub ran_on: BTreeSet<CpuId>,
}

impl Visit {
    /// Median of the timed iterations, nanoseconds; NaN without any.
    #[must_use]
    pub fn median_ns(&self) -> f64 {
        median_ns(&self.iter_ns)
    }

    /// The fastest transfer by the clock that warm-ups are timed with.
    fn fastest(&self) -> Option<u64> {
        let timed = self.host_iter_ns.as_ref().unwrap_or(&self.iter_ns);
        self.warmup_ns.iter().chain(timed).min().copied()
    }
}

/// How a visit is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) iters: u32,
    pub(crate) warmup: Option<u32>,
    pub(crate) timeout: Duration,
}

impl Settings {
    /// An error that names the option.
    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=MOST_ITERS).contains(&self.iters) {
            let message = format!("{}: a visit has 1 to {MOST_ITERS} timed iterations", self.iters);
            return Err(Error::invalid("--iters", message));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("--timeout", "0: every wait would end at once"));
        }
        Ok(())
    }
}

/// Checks what all such plans have; an error names the option.
pub(crate) fn check_plan(
    settings: Settings,
    repeats: u32,
    expect_hbm: Option<Bandwidth>,
) -> Result<()> {
    settings.check()?;
    if repeats == 0 {
        return Err(Error::invalid("--repeats", "0: nothing would be measured"));
    }
    if expect_hbm.is_some_and(|rate| rate.as_gb_per_second() <= 0.0) {
        return Err(Error::invalid("--expect-hbm", "is not above 0"));
    }
    Ok(())
}

/// Bytes of this machine's memory that may be used; `None` where that is not known.
pub(crate) fn usable_memory(machine: &Machine) -> Option<u64> {
    if machine.has_virtual_time() {
        return None;
    }
    machine.topology().mem_available().ok().map(|bytes| bytes / 10 * 9)
}

/// Setters of a builder, each with its documentation.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $value:expr;)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $value;
            self
        })*
    };
}
pub(crate) use setters;

/// The setters that builders of plans of visits share.
macro_rules! visit_setters {
    () => {
        $crate::visit::setters! {
            /// Name of the load profile that the caller holds while this is measured; default `idle`.
            load: impl Into<String> => Some(load.into());
            /// Timed iterations per visit; default 3.
            iters: u32 => Some(iters);
            /// Exactly so many discarded iterations; default: until settled.
            warmup: Option<u32> => warmup;
            /// Blocks, each of which visits everything once, in a fresh order; default 3.
            repeats: u32 => Some(repeats);
            /// Seed of all orders; default 1.
            seed: u64 => Some(seed);
            /// Bound of every wait; default 30 s.
            timeout: Duration => Some(timeout);
        }
    };
}
pub(crate) use visit_setters;

/// The fastest transfers so far, by operation and size (or order of a matrix).
#[derive(Debug, Default)]
pub(crate) struct Fastest(BTreeMap<(Operation, u64), u64>);

impl Fastest {
    pub(crate) fn of(&self, operation: Operation, size: u64) -> Option<u64> {
        self.0.get(&(operation, size)).copied()
    }

    pub(crate) fn note(&mut self, operation: Operation, size: u64, visit: &Visit) {
        if let Some(fastest) = visit.fastest() {
            let best = self.0.entry((operation, size)).or_insert(fastest);
            *best = fastest.min(*best);
        }
    }
}

/// Discards transfers until they settle; `once` does one and returns its nanoseconds. Whether it
/// settled.
pub(crate) fn warm_up(
    exactly: Option<u32>,
    best: Option<u64>,
    times: &mut Vec<u64>,
    mut once: impl FnMut() -> Result<u64>,
) -> Result<bool> {
    let warmup = Warmup::new(exactly, true);
    if warmup.is_empty() {
        return Ok(true);
    }
    loop {
        times.push(once()?);
        match warmup.verdict(times, best) {
            Verdict::Again => {}
            Verdict::Settled => return Ok(true),
            Verdict::GiveUp => return Ok(false),
        }
    }
}

/// The devices that a command uses: those asked for, else all that can be used.
///
/// # Errors
/// For a device that does not exist, is named twice or cannot be used, and when there is none.
pub(crate) fn choose_devices(machine: &Machine, asked: Option<&[u32]>) -> Result<Vec<DeviceId>> {
    const OPTION: &str = "--devices";
    let all = machine.devices();
    let Some(asked) = asked else {
        let usable: Vec<DeviceId> = all
            .iter()
            .filter(|device| device.info().unavailable.is_none())
            .map(|device| device.id())
            .collect();
        if usable.is_empty() {
            let reason = all.iter().find_map(|device| device.info().unavailable.clone());
            let reason = reason.unwrap_or_else(|| "the machine has none".to_owned());
            return Err(Error::invalid(OPTION, format!("no device can be used: {reason}")));
        }
        return Ok(usable);
    };
    if asked.is_empty() {
        return Err(Error::invalid(OPTION, "the list is empty"));
    }
    asked
        .iter()
        .map(|&id| {
            let device = machine
                .device(DeviceId(id))
                .ok_or_else(|| Error::invalid(OPTION, format!("device {id} does not exist")))?;
            match &device.info().unavailable {
                None => Ok(device.id()),
                Some(why) => {
                    Err(Error::invalid(OPTION, format!("device {id} cannot be used: {why}")))
                }
            }
        })
        .collect()
}

/// One device for each rank of this host: as [`choose_devices`], but a single one that was not asked for
/// is that of two ranks where the backend allows it, because that is what a pair needs.
///
/// # Errors
/// As [`choose_devices`], and for a device of the Ascend backend that is named twice.
pub(crate) fn choose_rank_devices(
    machine: &Machine,
    asked: Option<&[u32]>,
) -> Result<Vec<DeviceId>> {
    let mut devices = choose_devices(machine, asked)?;
    let ascend = machine.backend() == BackendKind::Ascend;
    if let ([only], true) = (devices.as_slice(), asked.is_none() && !ascend) {
        devices = vec![*only; 2];
    }
    match (1..devices.len()).find(|at| devices[..*at].contains(&devices[*at])) {
        Some(at) if ascend => {
            let message =
                format!("device {} is there twice: every rank needs its own", devices[at]);
            Err(Error::invalid("--devices", message))
        }
        _ => Ok(devices),
    }
}

/// One CPU for each device of the list, on the device's NUMA node where that has any: a core of its
/// own for each as far as there are enough, whole cores before their second threads.
///
/// # Errors
/// For a CPU that cannot be bound, a list of another length than the devices', and a machine without
/// bindable CPUs.
pub(crate) fn choose_cpus(
    machine: &Machine,
    devices: &[DeviceId],
    asked: Option<&[u32]>,
) -> Result<Vec<CpuId>> {
    const OPTION: &str = "--cpus";
    let census = machine.census()?;
    if let Some(asked) = asked {
        if asked.len() != devices.len() {
            let message =
                format!("{} CPUs for {} ranks: one is needed for each", asked.len(), devices.len());
            return Err(Error::invalid(OPTION, message));
        }
        return asked
            .iter()
            .map(|&id| {
                let record = census.record(CpuId(id));
                let why = match record {
                    None => "is not present".to_owned(),
                    Some(record) if record.bindable != Some(true) => {
                        record.reason.clone().unwrap_or_else(|| "cannot be bound".to_owned())
                    }
                    Some(_) => return Ok(CpuId(id)),
                };
                Err(Error::invalid(OPTION, format!("CPU {id}: {why}")))
            })
            .collect();
    }
    let bindable = census.bindable();
    if bindable.is_empty() {
        return Err(Error::invalid(OPTION, "no CPU of this machine can be bound"));
    }
    // How many CPUs of its core come before a CPU: first threads are taken first.
    let place_in_core = |cpu: CpuId| {
        let siblings = census.record(cpu).map(|record| record.thread_siblings.as_str());
        let ids = siblings.and_then(|list| parse_id_list("thread_siblings", list).ok());
        ids.map_or(0, |ids| ids.iter().filter(|id| **id < cpu.0).count())
    };
    let mut taken = BTreeMap::<CpuId, usize>::new();
    let chosen = devices.iter().map(|&id| {
        let node: Option<NodeId> = machine.device(id).and_then(|device| device.info().node);
        let on_node = |cpu: &CpuId| node.is_some() && machine.node_of(*cpu) == node;
        let near = bindable.iter().copied().any(|cpu| on_node(&cpu));
        let cpu = bindable
            .iter()
            .copied()
            .filter(|cpu| !near || on_node(cpu))
            .min_by_key(|&cpu| (taken.get(&cpu).copied().unwrap_or(0), place_in_core(cpu), cpu))
            .unwrap_or(bindable[0]);
        *taken.entry(cpu).or_insert(0) += 1;
        cpu
    });
    Ok(chosen.collect())
}

/// Nanoseconds of a device's clock as files hold them; 0 for what is no time.
pub(crate) fn whole_ns(nanoseconds: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and negative or undefined times become 0"
    )]
    let whole = nanoseconds.round() as u64;
    whole
}

/// Checks sizes of a list: an error names the element.
pub(crate) fn check_sizes(option: &str, sizes: &[ByteSize]) -> Result<()> {
    if sizes.is_empty() {
        return Err(Error::invalid(option, "the list is empty"));
    }
    for (index, size) in sizes.iter().enumerate() {
        let place = format!("element {}: {size}", index + 1);
        if size.bytes() == 0 {
            return Err(Error::invalid(option, format!("{place}: nothing to move")));
        }
        if sizes[..index].contains(size) {
            return Err(Error::invalid(option, format!("{place} is there twice")));
        }
    }
    Ok(())
}
