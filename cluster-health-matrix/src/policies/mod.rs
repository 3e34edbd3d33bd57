//! What binding a rank's thread is worth: copies and all-gathers under one policy of CPUs and memory
//! after another.
//!
//! Each block visits every combination of policy, memory, operation and size once, in a fresh order, so
//! that time is not a policy. A rate is compared with that of the unbound thread block by block.
//!
//! ```
//! use cluster_health_core::{ByteSize, Machine, Scenario};
//! use cluster_health_matrix::policies::{self, PoliciesPlan, Policy, parse_policies};
//!
//! # fn main() -> cluster_health_matrix::Result<()> {
//! let scenario = "[machine]\ncpus = 8\nnuma_nodes = 2\ndevices = 1\n[h2d]\nnoise = 0\n\
//!                 [[fault]]\nkind = \"slow_core\"\ncpus = \"4-7\"\nfactor = 0.5\n";
//! let machine = Machine::synthetic(Scenario::parse(scenario, "scenario")?)?;
//! let plan = PoliciesPlan::builder()
//!     .policies(parse_policies("policies", "none,numa:1")?)
//!     .sizes([ByteSize::gib(1)])
//!     .build(&machine)?;
//! let sweep = policies::measure(&machine, &plan, None, &mut ())?;
//! let slow = sweep.lines.iter().find(|line| matches!(line.policy, Policy::Numa(_)));
//! let ratio = slow.and_then(|line| line.to_none.as_ref());
//! assert!(ratio.is_some_and(|ratio| (ratio.ratio - 0.5).abs() < 0.01));
//! # Ok(())
//! # }
//! ```

mod evaluate;
mod measure;
mod output;
mod policy;
mod session;

use std::collections::BTreeMap;
use std::time::Duration;

use cluster_health_core::affinity::CpuSet;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{BackendKind, ByteSize, DeviceId, Machine, NodeId};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::run::Tool;
use crate::validate::{Convention, IDLE};
use crate::visit::{self, Operation, Settings, Visit};

pub use output::{POLICIES_CSV, POLICIES_JSON, POLICIES_PNG, POLICIES_XLSX, markdown, text};
pub use policy::{Memory, Policy, parse_policies};
pub use session::{follow, record, rewrite};

use policy::{element, usable_on};

/// A copy far beyond its fixed cost, and one that is little else.
const SIZES: [ByteSize; 2] = [ByteSize(64 << 10), ByteSize::mib(16)];
/// What can be measured under policies.
const OPERATIONS: [Operation; 3] = [Operation::H2d, Operation::D2dSameDevice, Operation::AllGather];

/// Reads `h2d,d2d,all_gather`.
///
/// # Errors
/// Naming `option` and the number of the element, from 1.
pub fn parse_operations(option: &str, text: &str) -> Result<Vec<Operation>> {
    let read = |(index, word): (usize, &str)| match word.trim() {
        "h2d" => Ok(Operation::H2d),
        "d2d" | "d2d_same_device" => Ok(Operation::D2dSameDevice),
        "all_gather" => Ok(Operation::AllGather),
        other => Err(element(option, index, &format!("'{other}' is none of h2d, d2d, all_gather"))),
    };
    text.split(',').enumerate().map(read).collect()
}

/// Reads `bound,first-touch`.
///
/// # Errors
/// Naming `option` and the number of the element, from 1.
pub fn parse_memory(option: &str, text: &str) -> Result<Vec<Memory>> {
    let read = |(index, word): (usize, &str)| match word.trim() {
        "bound" => Ok(Memory::Bound),
        "first-touch" | "first_touch" => Ok(Memory::FirstTouch),
        other => Err(element(option, index, &format!("'{other}' is none of bound, first-touch"))),
    };
    text.split(',').enumerate().map(read).collect()
}

/// What a policy sweep measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PoliciesPlan {
    /// Load profile; its name goes into every line.
    pub load: String,
    /// The device of each rank of this host.
    pub devices: Vec<DeviceId>,
    /// Where the ranks' threads may run.
    pub policies: Vec<Policy>,
    /// Where host memory lies.
    pub memory: Vec<Memory>,
    /// What is timed.
    pub operations: Vec<Operation>,
    /// Bytes of copies, and per rank of all-gathers.
    pub sizes: Vec<ByteSize>,
    /// Timed iterations per visit.
    pub iters: u32,
    /// Exactly so many discarded ones; `None`: until settled.
    pub warmup: Option<u32>,
    /// Blocks: each visits everything once, in a fresh order.
    pub repeats: u32,
    /// Seed of all orders.
    pub seed: u64,
    /// Bound of every wait, milliseconds.
    pub timeout_ms: u64,
}

impl PoliciesPlan {
    /// A plan with default values.
    #[must_use]
    pub fn builder() -> PoliciesPlanBuilder {
        PoliciesPlanBuilder::default()
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

/// Makes a [`PoliciesPlan`].
#[derive(Debug, Clone, Default)]
pub struct PoliciesPlanBuilder {
    load: Option<String>,
    devices: Option<Vec<u32>>,
    policies: Option<Vec<Policy>>,
    memory: Option<Vec<Memory>>,
    operations: Option<Vec<Operation>>,
    sizes: Option<Vec<ByteSize>>,
    iters: Option<u32>,
    warmup: Option<u32>,
    repeats: Option<u32>,
    seed: Option<u64>,
    timeout: Option<Duration>,
}

impl PoliciesPlanBuilder {
    visit::visit_setters!();
    visit::setters! {
        /// One rank per device, in this order; default: all devices, a single one of the host
        /// backend or of a synthetic machine twice, because that is what an all-gather needs.
        devices: impl Into<Vec<u32>> => Some(devices.into());
        /// Default: `none`, `all`, `local_rank`, `numa:N` of every node with usable CPUs, and
        /// `numa:N:shard` where there are several ranks.
        policies: impl Into<Vec<Policy>> => Some(policies.into());
        /// Default: both.
        memory: impl Into<Vec<Memory>> => Some(memory.into());
        /// H2D, D2D within the device and all-gather; default: all three.
        operations: impl Into<Vec<Operation>> => Some(operations.into());
        /// Bytes of copies, and per rank of all-gathers; default: 64 KiB and 16 MiB.
        sizes: impl Into<Vec<ByteSize>> => Some(sizes.into());
    }

    /// Checks the plan against a machine.
    ///
    /// # Errors
    /// When an option cannot be used; the error names it.
    pub fn build(self, machine: &Machine) -> Result<PoliciesPlan> {
        let devices = visit::choose_rank_devices(machine, self.devices.as_deref())?;
        let policies = match self.policies {
            Some(policies) => policies,
            None => default_policies(machine, devices.len())?,
        };
        check_list("--policies", &policies, ToString::to_string)?;
        for (index, policy) in policies.iter().enumerate() {
            if let Err(message) = policy.check(machine)? {
                return Err(element("--policies", index, &message));
            }
        }
        let memory = self.memory.unwrap_or_else(|| vec![Memory::Bound, Memory::FirstTouch]);
        check_list("--memory", &memory, |memory| memory.as_str().to_owned())?;
        let operations = self.operations.unwrap_or_else(|| OPERATIONS.to_vec());
        let name = |operation: &Operation| operation.as_str().to_owned();
        check_list("--operations", &operations, name)?;
        if let Some(at) = operations.iter().position(|one| !OPERATIONS.contains(one)) {
            let message = format!("{} is not measured under policies", operations[at].as_str());
            return Err(element("--operations", at, &message));
        }
        let sizes = self.sizes.unwrap_or_else(|| SIZES.to_vec());
        visit::check_sizes("--sizes", &sizes)?;
        let timeout = self.timeout.unwrap_or(Duration::from_secs(30));
        let plan = PoliciesPlan {
            load: self.load.unwrap_or_else(|| IDLE.to_owned()),
            devices,
            policies,
            memory,
            operations,
            sizes,
            iters: self.iters.unwrap_or(3),
            warmup: self.warmup,
            repeats: self.repeats.unwrap_or(3),
            seed: self.seed.unwrap_or(1),
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
        };
        visit::check_plan(plan.settings(), plan.repeats, None)?;
        plan.check_memory(machine)?;
        Ok(plan)
    }
}

impl PoliciesPlan {
    fn check_memory(&self, machine: &Machine) -> Result<()> {
        let ranks = self.ranks() as u64;
        // Host memory, old and new; of a device that is memory two buffers for copies, one to send
        // from and one to receive into.
        let buffers = match machine.backend() {
            BackendKind::Host => 5 + ranks,
            _ => 2,
        };
        let needed = self.largest().bytes().saturating_mul(buffers).saturating_mul(ranks);
        match visit::usable_memory(machine) {
            Some(available) if needed > available => {
                let message = format!(
                    "{} needs {} MiB of memory for {ranks} ranks, {} MiB may be used; choose smaller \
                     sizes",
                    self.largest(),
                    needed >> 20,
                    available >> 20
                );
                Err(Error::invalid("--sizes", message))
            }
            _ => Ok(()),
        }
    }
}

fn default_policies(machine: &Machine, ranks: usize) -> Result<Vec<Policy>> {
    let mut policies = vec![Policy::None, Policy::All, Policy::LocalRank];
    let mut nodes = Vec::new();
    for node in &machine.topology().nodes {
        if !usable_on(machine, node.id)?.is_empty() {
            nodes.push(node.id);
        }
    }
    policies.extend(nodes.iter().copied().map(Policy::Numa));
    if ranks > 1 {
        policies.extend(nodes.into_iter().map(Policy::NumaShard));
    }
    Ok(policies)
}

/// A list of different elements, at least one.
fn check_list<T: PartialEq>(option: &str, list: &[T], name: impl Fn(&T) -> String) -> Result<()> {
    if list.is_empty() {
        return Err(Error::invalid(option, "the list is empty"));
    }
    match (1..list.len()).find(|at| list[..*at].contains(&list[*at])) {
        Some(at) => Err(element(option, at, &format!("{} is there twice", name(&list[at])))),
        None => Ok(()),
    }
}

/// How a visit, or a line of them, ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PolicyStatus {
    /// With numbers.
    Measured,
    /// The kernel refused the policy, on a rank at least.
    Skipped,
    /// It failed, on a rank at least.
    Failed,
    /// The machine or its software has no such thing.
    NotAvailable,
    /// It was not reached.
    NotMeasured,
}

impl PolicyStatus {
    /// The name as files have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Skipped => "skipped",
            Self::Failed => "failed",
            Self::NotAvailable => "not_available",
            Self::NotMeasured => "not_measured",
        }
    }
}

/// One visit of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PolicyVisit {
    /// Block, from 0.
    pub block: u32,
    /// Its place in the order of measurement, from 0, the same for ranks that measure together.
    pub seq: u64,
    /// How it ended.
    pub status: PolicyStatus,
    /// CPUs that the kernel let the thread run on, read back after binding; `None` when refused.
    pub allowed: Option<CpuSet>,
    /// Pages of its host memory per NUMA node; `None` = unverified, or no host memory.
    pub page_nodes: Option<BTreeMap<NodeId, u32>>,
    /// Its times, and the CPUs that the thread was seen on.
    pub times: Option<Visit>,
    /// Why there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What the kernel said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<i64>,
}

/// A rate against that of the unbound thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ToNone {
    /// Geometric mean over the blocks of rate ÷ rate under `none` in the same block.
    pub ratio: f64,
    /// Lower end of its 95 % interval, from between blocks; `None` with one block.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// Blocks with both rates.
    pub blocks: u32,
    /// `faster` or `slower`, where the interval leaves out 1 and Holm's procedure over all lines of
    /// the sweep rejects equality at 5 %; else nothing is claimed.
    pub claim: Option<Claim>,
}

/// What a line claims about a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::exhaustive_enums, reason = "a difference has two signs")]
#[non_exhaustive]
pub enum Claim {
    /// Than the unbound thread.
    Faster,
    /// Than the unbound thread.
    Slower,
}

impl Claim {
    /// The name as files have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
        }
    }
}

/// What one rank contributes to a line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PolicyRank {
    /// The rank.
    pub rank: u32,
    /// Median over the blocks, decimal GB/s, by this rank's own times.
    pub value: Option<f64>,
    /// Relative standard deviation between blocks, from their median absolute deviation.
    pub spread: Option<f64>,
    /// Against the rank's own rate under `none`.
    pub to_none: Option<ToNone>,
    /// CPUs that the thread was seen on, in any visit.
    pub ran_on: CpuSet,
    /// Visits whose warm-up ended without settling.
    pub unsettled: u32,
    /// Visits whose host memory had pages on another node than `bound` asks for.
    pub misplaced: u32,
    /// Every visit, in the order of measurement.
    pub visits: Vec<PolicyVisit>,
}

/// One line: a policy with one operation at one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PolicyLine {
    /// Where the threads might run.
    pub policy: Policy,
    /// Where host memory was; `None` for what uses none.
    pub memory: Option<Memory>,
    /// What was timed.
    pub operation: Operation,
    /// Load profile.
    pub load: String,
    /// Bytes of a copy, per rank of an all-gather.
    pub bytes: ByteSize,
    /// `GB/s`, decimal.
    pub unit: String,
    /// What the rate is the quotient of.
    pub convention: Convention,
    /// `page_locked` or `pageable`.
    pub host_memory: Option<String>,
    /// Ranks with a number.
    pub ranks: u32,
    /// Fewest blocks of a rank with a number.
    pub repetitions: u32,
    /// Slowest rank.
    pub min: Option<f64>,
    /// Median over the ranks.
    pub median: Option<f64>,
    /// Fastest rank.
    pub max: Option<f64>,
    /// Median over the ranks of their spread between blocks; `None` with one block.
    pub spread: Option<f64>,
    /// Of all-gathers: the rate by the slowest rank of each iteration.
    pub collective: Option<f64>,
    /// Against `none`, block by block: of copies the median over the ranks, of all-gathers the rate by
    /// the slowest rank. `None` for `none` itself and without it.
    pub to_none: Option<ToNone>,
    /// Whether there are numbers.
    pub status: PolicyStatus,
    /// Why not.
    pub reason: Option<String>,
    /// What the kernel said where it refused.
    pub errno: Option<i64>,
    /// Rank by rank.
    pub per_rank: Vec<PolicyRank>,
}

/// A policy on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankPolicy {
    /// The policy.
    pub policy: Policy,
    /// The CPUs that it names here; `None` for `none`.
    pub cpus: Option<CpuSet>,
    /// Node that `bound` memory is touched on.
    pub memory_node: Option<NodeId>,
}

/// A rank of a policy sweep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PolicySeat {
    /// The rank.
    pub rank: u32,
    /// Its host's name.
    pub host: Option<String>,
    /// Its device, physical id.
    pub device: DeviceId,
    /// NUMA node of the device, where it is known.
    pub numa_node: Option<NodeId>,
    /// The CPUs that its thread might use before anything was bound.
    pub inherited: CpuSet,
    /// What the policies mean for it.
    pub policies: Vec<RankPolicy>,
}

/// The content of `policies.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PolicySweep {
    /// Version of the file.
    pub schema_version: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// False when it was interrupted.
    pub complete: bool,
    /// The ranks.
    pub ranks: Vec<PolicySeat>,
    /// The lines: by operation, size and memory, policies in the order of the plan.
    pub lines: Vec<PolicyLine>,
}

impl PolicySweep {
    /// Number of lines with this status.
    #[must_use]
    pub fn count(&self, status: PolicyStatus) -> usize {
        self.lines.iter().filter(|line| line.status == status).count()
    }
}

/// Measures the sweep: on rank 0 of `group` the whole one, without a group that of one process, which
/// plays all ranks of a synthetic machine and is the only one elsewhere.
///
/// The other ranks call [`follow`].
///
/// # Errors
/// When a rank is lost. What cannot be measured is a status of its line.
///
/// # Thread binding
/// The calling thread is bound and unbound meanwhile; in the end it has the mask that it had before.
pub fn measure(
    machine: &Machine,
    plan: &PoliciesPlan,
    group: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<PolicySweep> {
    measure::lead(machine, plan, group, observer)
}

#[cfg(test)]
mod tests {
    use cluster_health_core::Scenario;
    use cluster_health_core::affinity::thread_affinity;

    use super::*;

    fn two_nodes(extra: &str) -> Machine {
        let text = format!("[machine]\ncpus = 8\nnuma_nodes = 2\ndevices = 2\n{extra}");
        Machine::synthetic(Scenario::parse(&text, "scenario").unwrap()).unwrap()
    }

    #[test]
    fn default_policies_are_those_of_the_nodes_that_can_be_used() {
        let list = |machine: &Machine, devices: &[u32]| {
            let plan = PoliciesPlan::builder().devices(devices).build(machine).unwrap();
            plan.policies.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        let machine = two_nodes("");
        assert_eq!(list(&machine, &[1]), "none all local_rank numa:0 numa:1");
        assert_eq!(
            list(&machine, &[0, 1]),
            "none all local_rank numa:0 numa:1 numa:0:shard numa:1:shard"
        );
        let machine = two_nodes("offline = \"0-3\"\n");
        assert_eq!(list(&machine, &[0]), "none all local_rank numa:1");
    }

    #[test]
    fn bound_memory_lies_on_the_policys_node_else_on_the_devices() {
        let machine = two_nodes("[h2d]\nnoise = 0\n");
        let plan = PoliciesPlan::builder()
            .policies(parse_policies("p", "none,all,numa:0,cpu:2-5,cpu:6").unwrap())
            .operations([Operation::H2d])
            .sizes([ByteSize::mib(1)])
            .devices([1])
            .build(&machine)
            .unwrap();
        let sweep = measure(&machine, &plan, None, &mut ()).unwrap();
        // Device 1 is on node 1. A synthetic thread runs on the first CPU of its set.
        for (policy, bound, touched) in
            [("none", 1, 0), ("all", 1, 0), ("numa:0", 0, 0), ("cpu:2-5", 1, 0), ("cpu:6", 1, 1)]
        {
            for (memory, node) in [(Memory::Bound, bound), (Memory::FirstTouch, touched)] {
                let line = sweep
                    .lines
                    .iter()
                    .find(|line| line.policy.to_string() == policy && line.memory == Some(memory))
                    .unwrap();
                let rank = &line.per_rank[0];
                assert_eq!((rank.misplaced, rank.visits.len()), (0, 3));
                for visit in &rank.visits {
                    let nodes: Vec<NodeId> =
                        visit.page_nodes.as_ref().unwrap().keys().copied().collect();
                    assert_eq!(nodes, [NodeId(node)], "{policy} {memory:?}");
                }
            }
        }
    }

    #[test]
    fn the_threads_own_mask_is_there_again_in_the_end() {
        std::thread::scope(|scope| {
            let work = || {
                let machine = Machine::host().unwrap();
                let before = thread_affinity().unwrap();
                let first = before.first().unwrap();
                let plan = PoliciesPlan::builder()
                    .policies([Policy::Cpus(vec![first]), Policy::None])
                    .sizes([ByteSize(4096)])
                    .repeats(1)
                    .build(&machine)
                    .unwrap();
                let sweep = measure(&machine, &plan, None, &mut ()).unwrap();
                let allowed = |policy: &Policy| {
                    let line = sweep.lines.iter().find(|line| line.policy == *policy).unwrap();
                    line.per_rank[0].visits[0].allowed.clone().unwrap()
                };
                assert_eq!(allowed(&plan.policies[0]), CpuSet::from_iter([first]));
                assert_eq!(allowed(&Policy::None), before);
                assert_eq!(thread_affinity().unwrap(), before);
            };
            scope.spawn(work).join().unwrap();
        });
    }
}
