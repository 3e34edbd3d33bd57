//! The description of a synthetic machine: a TOML file with a machine, two links, and what is
//! wrong with them.
//!
//! ```
//! use cluster_health_core::Scenario;
//!
//! let scenario = Scenario::parse(
//!     r#"
//!     [machine]
//!     cpus = 16
//!     smt = 2
//!     numa_nodes = 2
//!     devices = 4
//!     [[fault]]
//!     kind = "slow_device"
//!     devices = "3"
//!     factor = 0.5
//!     "#,
//!     "example.toml",
//! )?;
//! assert_eq!(scenario.cpu_places().len(), 16);
//! # Ok::<(), cluster_health_core::Error>(())
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Error, Result};
use crate::id::{CpuId, NodeId};

const MAX_TEXT: usize = 1 << 20;
const MAX_CPUS: usize = 65_536;
const MAX_ID: u32 = (1 << 20) - 1;
const MAX_DEVICES: u32 = 1_024;
const MAX_ENTRIES: usize = 1_024;
/// Ranks of the pair sweep; failures can only name these.
pub(super) const RANKS: u32 = 2;

/// A set of CPU or device ids, written as `"0-3,8"` or as an array of integers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdList(Vec<u32>);

impl IdList {
    /// The ids, ascending.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.0
    }

    /// True when `id` is listed.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.0.binary_search(&id).is_ok()
    }

    /// Reads inclusive ranges, numbered from 1 in messages.
    fn read(ranges: impl Iterator<Item = Result<(u32, u32), String>>) -> Result<Self, String> {
        let mut ids = BTreeSet::new();
        for (entry, range) in ranges.enumerate() {
            let at = |why: String| format!("entry {}: {why}", entry + 1);
            let (first, last) = range.map_err(at)?;
            if last < first {
                return Err(at(format!("the range {first}-{last} runs backwards")));
            }
            if last > MAX_ID {
                return Err(at(format!("{last} is above {MAX_ID}, the largest id")));
            }
            for id in first..=last {
                if !ids.insert(id) {
                    return Err(at(format!("{id} is listed twice")));
                }
                if ids.len() > MAX_CPUS {
                    return Err(at(format!("more than {MAX_CPUS} ids")));
                }
            }
        }
        Ok(Self(ids.into_iter().collect()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let id = |digits: &str| -> Result<u32, String> {
            let digits = digits.trim();
            if digits.bytes().all(|byte| byte.is_ascii_digit()) {
                digits.parse().map_err(|_| format!("'{digits}' is not an id"))
            } else {
                Err(format!("'{digits}' is not an id"))
            }
        };
        Self::read(text.split(',').map(|item| {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            Ok((id(first)?, id(last)?))
        }))
        .map_err(|why| format!("'{text}': {why}"))
    }
}

impl FromStr for IdList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text).map_err(|why| Error::invalid("list", why))
    }
}

impl fmt::Display for IdList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match run {
                [] => {}
                [id] => write!(f, "{comma}{id}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl Serialize for IdList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

struct ListVisitor;

impl<'de> Visitor<'de> for ListVisitor {
    type Value = IdList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list such as \"0-3,8\" or an array of ids")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<IdList, E> {
        IdList::parse(text).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<IdList, A::Error> {
        let mut failure = None;
        let ranges = std::iter::from_fn(|| match seq.next_element::<u32>() {
            Ok(id) => id.map(|id| Ok((id, id))),
            Err(error) => {
                failure = Some(error);
                None
            }
        });
        let list = IdList::read(ranges);
        failure.map_or_else(|| list.map_err(serde::de::Error::custom), Err)
    }
}

impl<'de> Deserialize<'de> for IdList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor)
    }
}

/// The CPUs that a machine has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cpus {
    /// The ids 0…n−1.
    Count(u32),
    /// These ids. In the formulas of the layout a CPU's position in the list stands for its id.
    List(IdList),
}

impl Serialize for Cpus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Count(count) => serializer.serialize_u32(*count),
            Self::List(list) => list.serialize(serializer),
        }
    }
}

struct CpusVisitor;

impl<'de> Visitor<'de> for CpusVisitor {
    type Value = Cpus;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of CPUs, a list such as \"0-3,8\" or an array of ids")
    }

    fn visit_u64<E: serde::de::Error>(self, count: u64) -> Result<Cpus, E> {
        u32::try_from(count).map(Cpus::Count).map_err(|_| E::custom(format!("{count} is too many")))
    }

    fn visit_i64<E: serde::de::Error>(self, count: i64) -> Result<Cpus, E> {
        u32::try_from(count)
            .map(Cpus::Count)
            .map_err(|_| E::custom(format!("{count} is not a number of CPUs")))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Cpus, E> {
        ListVisitor.visit_str(text).map(Cpus::List)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Cpus, A::Error> {
        ListVisitor.visit_seq(seq).map(Cpus::List)
    }
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CpusVisitor)
    }
}

/// An enum whose variants are words of the file.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant),+
        }

        impl $name {
            /// The word of the file.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }
    };
}

words! {
    /// How SMT siblings are numbered.
    SmtLayout {
        /// Core = CPU ÷ smt: siblings follow each other.
        Adjacent = "adjacent",
        /// Core = CPU mod cores: the siblings of k are k and k + cores.
        Split = "split",
    }
}

words! {
    /// The sweep whose transfers a fault changes.
    FaultSweep {
        /// Copies between host and device, in any direction.
        H2d = "h2d",
        /// All-gathers of two ranks.
        CorePair = "core_pair",
    }
}

words! {
    /// What is wrong.
    FaultKind {
        /// The link of the listed devices.
        SlowDevice = "slow_device",
        /// The listed `cpus`, copies only.
        SlowCore = "slow_core",
        /// Rank 0 on the CPUs of `rank0`.
        SlowRank0Core = "slow_rank0_core",
        /// Rank 1 on the CPUs of `rank1`.
        SlowRank1Core = "slow_rank1_core",
        /// The rectangle `cpus` × `devices`, or `rank0` × `rank1`.
        SlowBlock = "slow_block",
        /// Both ranks on one CPU.
        SameCore = "same_core",
        /// The ranks on two threads of one core.
        SmtSibling = "smt_sibling",
        /// Single cells, given like a rectangle.
        SlowCell = "slow_cell",
        /// Everything listed, under every load but `idle`, or under `load` alone.
        LoadSensitive = "load_sensitive",
        /// Everything listed delivers wrong data.
        DataCorruption = "data_corruption",
        /// Everything listed, by default every transfer of the sweep.
        NodeCeiling = "node_ceiling",
    }
}

words! {
    /// What disturbs a measurement without being a fault of the machine.
    ArtefactKind {
        /// In total `extra_ms`, shared by the first `over` copies out of a new host buffer.
        AllocationStall = "allocation_stall",
        /// `extra_us` on the first transfer after the bound CPU changed.
        FirstVisit = "first_visit",
        /// Rate × exp(`per_hour` × hours).
        Drift = "drift",
        /// Rate × `factor` for `for_s` in every `every_s`, phase from the seed.
        Burst = "burst",
        /// `extra_us` on the first transfer of each `every_points`-th point after the first.
        Checkpoint = "checkpoint",
        /// From the point `at_point` on, rate × `factor` or `extra_ms` per iteration.
        TimeStep = "time_step",
    }
}

words! {
    /// What fails.
    FailureKind {
        /// The kernel refuses to bind `rank` (to `cpus`, or to any CPU; from `at_point` on).
        BindRefused = "bind_refused",
        /// `rank` is gone from `at_point` on.
        RankDead = "rank_dead",
        /// The transfers of `at_point` do not return.
        Hang = "hang",
        /// The transfers of `at_point` fail with `call` and `code`.
        Error = "error",
    }
}

/// CPUs, NUMA nodes and devices, and what their set-up costs in virtual time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct MachineSpec {
    /// Present CPUs, at most 65,536; with the split layout a multiple of `smt`.
    pub cpus: Cpus,
    /// Threads per core.
    pub smt: u32,
    /// How siblings are numbered.
    pub smt_layout: SmtLayout,
    /// NUMA nodes: contiguous ranges of cores, at most one node per core.
    pub numa_nodes: u32,
    /// Devices 0…n−1, at most 1,024.
    pub devices: u32,
    /// Present CPUs that are offline.
    pub offline: IdList,
    /// Online CPUs that the kernel refuses to bind to.
    pub refuse_bind: IdList,
    /// Cost of a bind, in microseconds.
    pub bind_us: f64,
    /// Rate of touching fresh pages, in decimal GB/s.
    pub touch_gbps: f64,
    /// Rate of page-locking touched memory, in decimal GB/s.
    pub register_gbps: f64,
    /// Cost of an allocation on the host or on a device, in microseconds.
    pub alloc_us: f64,
    /// Cost of starting a point, in microseconds.
    pub point_us: f64,
}

impl Default for MachineSpec {
    fn default() -> Self {
        Self {
            cpus: Cpus::Count(640),
            smt: 2,
            smt_layout: SmtLayout::Adjacent,
            numa_nodes: 8,
            devices: 16,
            offline: IdList::default(),
            refuse_bind: IdList::default(),
            bind_us: 50.0,
            touch_gbps: 4.0,
            register_gbps: 20.0,
            alloc_us: 200.0,
            point_us: 5.0,
        }
    }
}

/// How long transfers of a healthy machine take.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LinkSpec {
    /// Asymptotic rate in decimal GB/s; per rank in collectives.
    pub gbps: f64,
    /// Fixed time of an iteration, in microseconds.
    pub latency_us: f64,
    /// Standard deviation of ln(time) between iterations.
    pub noise: f64,
    /// Standard deviation of ln(time) between visits of a core.
    pub visit_noise: f64,
    /// Standard deviation of ln(rate) between healthy cores.
    pub core_spread: f64,
    /// Standard deviation of ln(rate) between healthy devices.
    pub device_spread: f64,
    /// Chance that a whole point runs at `dip_factor` of its rate.
    pub dip_probability: f64,
    /// Factor on the rate of a dipped point.
    pub dip_factor: f64,
}

impl LinkSpec {
    const fn healthy(gbps: f64, latency_us: f64, noise: f64) -> Self {
        Self {
            gbps,
            latency_us,
            noise,
            visit_noise: 0.0,
            core_spread: 0.0,
            device_spread: 0.0,
            dip_probability: 0.0,
            dip_factor: 0.3,
        }
    }

    const fn h2d() -> Self {
        Self::healthy(58.5, 12.0, 0.015)
    }

    const fn all_gather() -> Self {
        Self::healthy(46.0, 180.0, 0.03)
    }
}

/// The two links differ in their defaults only, so what a file leaves out is filled in afterwards.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LinkFile {
    gbps: Option<f64>,
    latency_us: Option<f64>,
    noise: Option<f64>,
    visit_noise: Option<f64>,
    core_spread: Option<f64>,
    device_spread: Option<f64>,
    dip_probability: Option<f64>,
    dip_factor: Option<f64>,
}

impl LinkFile {
    fn over(self, default: &LinkSpec) -> LinkSpec {
        LinkSpec {
            gbps: self.gbps.unwrap_or(default.gbps),
            latency_us: self.latency_us.unwrap_or(default.latency_us),
            noise: self.noise.unwrap_or(default.noise),
            visit_noise: self.visit_noise.unwrap_or(default.visit_noise),
            core_spread: self.core_spread.unwrap_or(default.core_spread),
            device_spread: self.device_spread.unwrap_or(default.device_spread),
            dip_probability: self.dip_probability.unwrap_or(default.dip_probability),
            dip_factor: self.dip_factor.unwrap_or(default.dip_factor),
        }
    }
}

fn h2d_link<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LinkSpec, D::Error> {
    LinkFile::deserialize(deserializer).map(|file| file.over(&LinkSpec::h2d()))
}

fn all_gather_link<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LinkSpec, D::Error> {
    LinkFile::deserialize(deserializer).map(|file| file.over(&LinkSpec::all_gather()))
}

/// A fault of the machine. It changes the transfers of one sweep; every list given narrows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Fault {
    /// What is wrong.
    pub kind: FaultKind,
    /// The sweep; without it `core_pair` for a kind or a list of ranks, else `h2d`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<FaultSweep>,
    /// Bound CPUs of copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<IdList>,
    /// Devices; a pair counts when either of its devices is listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<IdList>,
    /// CPUs of rank 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank0: Option<IdList>,
    /// CPUs of rank 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank1: Option<IdList>,
    /// Factor on the asymptotic rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// Fixed time added to each iteration, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_us: Option<f64>,
    /// The only load profile under which it shows: `cpu:2`, or `cpu` for every `cpu:N`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<String>,
    /// Chance per point that it shows; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probability: Option<f64>,
}

impl Fault {
    /// The sweep whose transfers it changes.
    #[must_use]
    pub fn resolved_sweep(&self) -> FaultSweep {
        let of_pairs = matches!(
            self.kind,
            FaultKind::SlowRank0Core
                | FaultKind::SlowRank1Core
                | FaultKind::SameCore
                | FaultKind::SmtSibling
        ) || self.rank0.is_some()
            || self.rank1.is_some();
        self.sweep.unwrap_or(if of_pairs { FaultSweep::CorePair } else { FaultSweep::H2d })
    }
}

/// A disturbance of the measurement. Which fields count depends on the kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Artefact {
    /// What disturbs.
    pub kind: ArtefactKind,
    /// Added time in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_ms: Option<f64>,
    /// Added time in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_us: Option<f64>,
    /// Transfers that share a stall; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<u32>,
    /// Change of ln(rate) per hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_hour: Option<f64>,
    /// Factor on the rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    /// Period in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_s: Option<f64>,
    /// Length of the window within a period, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_s: Option<f64>,
    /// Period in points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_points: Option<u64>,
    /// The first disturbed point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_point: Option<u64>,
    /// The devices disturbed; all when absent. A pair counts when either is listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<IdList>,
}

/// A call that fails. Which fields count depends on the kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Failure {
    /// What fails.
    pub kind: FailureKind,
    /// The rank it happens to, 0 or 1; copies are made by rank 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The point it happens at, or from which on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_point: Option<u64>,
    /// The CPUs that a bind is refused to; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<IdList>,
    /// The call named by the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// The code named by the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i64>,
}

/// A synthetic machine and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct Scenario {
    /// Decides every draw.
    pub seed: u64,
    /// CPUs, nodes, devices and costs.
    pub machine: MachineSpec,
    /// Copies between host and device.
    #[serde(deserialize_with = "h2d_link")]
    pub h2d: LinkSpec,
    /// All-gathers of two ranks.
    #[serde(deserialize_with = "all_gather_link")]
    pub all_gather: LinkSpec,
    /// Faults of the machine.
    pub fault: Vec<Fault>,
    /// Disturbances of the measurement.
    pub artefact: Vec<Artefact>,
    /// Calls that fail.
    pub failure: Vec<Failure>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            seed: 7,
            machine: MachineSpec::default(),
            h2d: LinkSpec::h2d(),
            all_gather: LinkSpec::all_gather(),
            fault: Vec::new(),
            artefact: Vec::new(),
            failure: Vec::new(),
        }
    }
}

/// Where a CPU lies and whether it can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuPlace {
    /// The CPU.
    pub cpu: CpuId,
    /// Its core, counted over the whole machine from 0.
    pub core: u32,
    /// Its NUMA node.
    pub node: NodeId,
    /// Its package: two nodes form one, so that 8 nodes are 4 packages and 1 node is 1.
    pub package: u32,
    /// False when listed as offline.
    pub online: bool,
    /// True when the kernel refuses to bind to it.
    pub refuses_bind: bool,
}

impl Scenario {
    /// Reads a scenario; `place` names it in errors, for example its file name.
    ///
    /// # Errors
    /// [`Error::Format`] that names the key and, as `place:LINE`, its line: bad TOML, an unknown
    /// key or kind, a key that is missing or does not belong to its kind, a value out of range, or
    /// a CPU or device that the machine does not have.
    pub fn parse(text: &str, place: &str) -> Result<Self> {
        if text.len() > MAX_TEXT {
            return Err(Error::format(place, "a scenario is at most 1 MiB long"));
        }
        let at_line = |offset: Option<usize>| match offset {
            Some(offset) => {
                let newlines = text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
                format!("{place}:{}", newlines + 1)
            }
            None => place.to_owned(),
        };
        let scenario: Self = toml::from_str(text).map_err(|error| {
            let offset = error.span().map(|span| span.start);
            let key = offset.and_then(|offset| key_at(text, offset));
            let key = key.map(|key| format!("{key}: ")).unwrap_or_default();
            Error::format(at_line(offset), format!("{key}{}", error.message()))
        })?;
        scenario
            .check()
            .map_err(|problem| Error::format(at_line(problem.find(text)), problem.to_string()))?;
        Ok(scenario)
    }

    /// Reads a scenario file.
    ///
    /// # Errors
    /// [`Error::System`] when the file cannot be read, else as [`Scenario::parse`].
    pub fn load(path: &Path) -> Result<Self> {
        let place = path.display().to_string();
        let failed = |call: &'static str, error: &std::io::Error| {
            let errno = error.raw_os_error().unwrap_or_default();
            Error::system(call, errno, format!("reading scenario {place}"))
        };
        let file = std::fs::File::open(path).map_err(|error| failed("open", &error))?;
        let mut bytes = Vec::new();
        // One byte past the limit is enough to refuse an endless file.
        file.take(MAX_TEXT as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| failed("read", &error))?;
        let text = String::from_utf8(bytes)
            .map_err(|error| Error::format(place.as_str(), error.utf8_error().to_string()))?;
        Self::parse(&text, &place)
    }

    /// Checks what the types cannot: ranges, ids, and the keys of each kind.
    ///
    /// # Errors
    /// [`Error::Format`] that names the key.
    pub fn validate(&self) -> Result<()> {
        self.check().map_err(|problem| Error::format("scenario", problem.to_string()))
    }

    /// Ids of the present CPUs, ascending.
    #[must_use]
    pub fn present_cpus(&self) -> Vec<u32> {
        match &self.machine.cpus {
            Cpus::Count(count) => (0..*count).collect(),
            Cpus::List(list) => list.ids().to_vec(),
        }
    }

    /// The present CPUs with their places, ascending.
    #[must_use]
    pub fn cpu_places(&self) -> Vec<CpuPlace> {
        let machine = &self.machine;
        let ids = self.present_cpus();
        let smt = (machine.smt as usize).max(1);
        // The last core of an adjacent layout may have fewer threads.
        let cores = ids.len().div_ceil(smt).max(1);
        let place = |(position, &id): (usize, &u32)| {
            let core = match machine.smt_layout {
                SmtLayout::Adjacent => position / smt,
                SmtLayout::Split => position % cores,
            };
            let node = small(core * machine.numa_nodes as usize / cores);
            CpuPlace {
                cpu: CpuId(id),
                core: small(core),
                node: NodeId(node),
                package: node / 2,
                online: !machine.offline.contains(id),
                refuses_bind: machine.refuse_bind.contains(id),
            }
        };
        ids.iter().enumerate().map(place).collect()
    }

    /// The threads of `cpu`'s core, itself included, ascending; empty when it is not present.
    #[must_use]
    pub fn siblings(&self, cpu: CpuId) -> Vec<CpuId> {
        let places = self.cpu_places();
        let core = places.iter().find(|place| place.cpu == cpu).map(|place| place.core);
        places.iter().filter(|place| Some(place.core) == core).map(|place| place.cpu).collect()
    }

    fn check(&self) -> Result<(), Problem> {
        self.check_machine()?;
        self.h2d.check("h2d")?;
        self.all_gather.check("all_gather")?;
        for (section, count) in [
            ("fault", self.fault.len()),
            ("artefact", self.artefact.len()),
            ("failure", self.failure.len()),
        ] {
            if count > MAX_ENTRIES {
                let at = At { section, index: None };
                return Err(at.problem("", format!("{count} entries, at most {MAX_ENTRIES}")));
            }
        }
        let cpus = self.present_cpus();
        for (index, fault) in self.fault.iter().enumerate() {
            let at = At { section: "fault", index: Some(index) };
            fault.check(at)?;
            for (key, list) in
                [("cpus", &fault.cpus), ("rank0", &fault.rank0), ("rank1", &fault.rank1)]
            {
                at.members(key, list.as_ref(), "CPU", |id| cpus.binary_search(&id).is_ok())?;
            }
            at.members("devices", fault.devices.as_ref(), "device", |id| self.has_device(id))?;
        }
        for (index, artefact) in self.artefact.iter().enumerate() {
            let at = At { section: "artefact", index: Some(index) };
            artefact.check(at)?;
            at.members("devices", artefact.devices.as_ref(), "device", |id| self.has_device(id))?;
        }
        for (index, failure) in self.failure.iter().enumerate() {
            let at = At { section: "failure", index: Some(index) };
            failure.check(at)?;
            at.members("cpus", failure.cpus.as_ref(), "CPU", |id| cpus.binary_search(&id).is_ok())?;
        }
        Ok(())
    }

    fn has_device(&self, id: u32) -> bool {
        id < self.machine.devices
    }

    fn check_machine(&self) -> Result<(), Problem> {
        let machine = &self.machine;
        let at = At { section: "machine", index: None };
        let count = match &machine.cpus {
            Cpus::Count(count) => *count as usize,
            Cpus::List(list) => list.ids().len(),
        };
        if count == 0 || count > MAX_CPUS {
            return Err(at.problem("cpus", format!("{count} CPUs; must be 1 to {MAX_CPUS}")));
        }
        let smt = machine.smt as usize;
        let divides = smt > 0 && count.is_multiple_of(smt);
        if smt == 0 || (machine.smt_layout == SmtLayout::Split && !divides) {
            let why = format!("{smt} threads per core do not divide {count} CPUs");
            return Err(at.problem("smt", why));
        }
        // More nodes than cores leave some without CPUs, as memory-only nodes are.
        let nodes = machine.numa_nodes;
        if nodes == 0 || nodes as usize > MAX_CPUS {
            let why = format!("{nodes} nodes; must be 1 to {MAX_CPUS}");
            return Err(at.problem("numa_nodes", why));
        }
        if machine.devices == 0 || machine.devices > MAX_DEVICES {
            let why = format!("{} devices; must be 1 to {MAX_DEVICES}", machine.devices);
            return Err(at.problem("devices", why));
        }
        let cpus = self.present_cpus();
        for (key, list) in [("offline", &machine.offline), ("refuse_bind", &machine.refuse_bind)] {
            let list = Some(list).filter(|list| !list.ids().is_empty());
            at.members(key, list, "CPU", |id| cpus.binary_search(&id).is_ok())?;
        }
        if machine.offline.ids().len() == count {
            return Err(at.problem("offline", "at least one CPU must be online".to_owned()));
        }
        at.at_least_zero("bind_us", Some(machine.bind_us))?;
        at.at_least_zero("alloc_us", Some(machine.alloc_us))?;
        at.at_least_zero("point_us", Some(machine.point_us))?;
        at.above_zero("touch_gbps", Some(machine.touch_gbps))?;
        at.above_zero("register_gbps", Some(machine.register_gbps))
    }
}

/// A count that validation keeps small.
fn small(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl LinkSpec {
    fn check(&self, section: &'static str) -> Result<(), Problem> {
        let at = At { section, index: None };
        at.above_zero("gbps", Some(self.gbps))?;
        at.at_least_zero("latency_us", Some(self.latency_us))?;
        for (key, sd) in [
            ("noise", self.noise),
            ("visit_noise", self.visit_noise),
            ("core_spread", self.core_spread),
            ("device_spread", self.device_spread),
        ] {
            at.within(key, Some(sd), 0.0, 2.0)?;
        }
        at.within("dip_probability", Some(self.dip_probability), 0.0, 1.0)?;
        at.above_zero("dip_factor", Some(self.dip_factor))
    }
}

impl Fault {
    fn check(&self, at: At) -> Result<(), Problem> {
        let (kind, sweep) = (self.kind, self.resolved_sweep());
        let only = match kind {
            FaultKind::SlowCore => Some(FaultSweep::H2d),
            FaultKind::SlowRank0Core
            | FaultKind::SlowRank1Core
            | FaultKind::SameCore
            | FaultKind::SmtSibling => Some(FaultSweep::CorePair),
            _ => None,
        };
        if only.is_some_and(|only| only != sweep) {
            let key = if self.sweep.is_some() { "sweep" } else { "kind" };
            let why = format!("{} does not occur in the sweep {}", kind.as_str(), sweep.as_str());
            return Err(at.problem(key, why));
        }
        let foreign: [(&'static str, bool); 2] = match sweep {
            FaultSweep::H2d => [("rank0", self.rank0.is_some()), ("rank1", self.rank1.is_some())],
            FaultSweep::CorePair => [("cpus", self.cpus.is_some()), ("cpus", false)],
        };
        if let Some((key, _)) = foreign.into_iter().find(|(_, given)| *given) {
            let why = format!("does not belong to the sweep {}", sweep.as_str());
            return Err(at.problem(key, why));
        }
        let required: &[(&'static str, bool)] = match (kind, sweep) {
            (FaultKind::SlowDevice, _) => &[("devices", self.devices.is_some())],
            (FaultKind::SlowCore, _) => &[("cpus", self.cpus.is_some())],
            (FaultKind::SlowRank0Core, _) => &[("rank0", self.rank0.is_some())],
            (FaultKind::SlowRank1Core, _) => &[("rank1", self.rank1.is_some())],
            (FaultKind::SlowBlock | FaultKind::SlowCell, FaultSweep::H2d) => {
                &[("cpus", self.cpus.is_some()), ("devices", self.devices.is_some())]
            }
            (FaultKind::SlowBlock | FaultKind::SlowCell, FaultSweep::CorePair) => {
                &[("rank0", self.rank0.is_some()), ("rank1", self.rank1.is_some())]
            }
            (FaultKind::NodeCeiling, _) => &[("factor", self.factor.is_some())],
            _ => &[],
        };
        at.required(kind.as_str(), required)?;
        if kind != FaultKind::DataCorruption && self.factor.is_none() && self.extra_us.is_none() {
            let why = format!("factor or extra_us is missing, {} has no effect", kind.as_str());
            return Err(at.problem("kind", why));
        }
        if self.load.as_ref().is_some_and(String::is_empty) {
            return Err(at.problem("load", "is empty".to_owned()));
        }
        at.above_zero("factor", self.factor)?;
        at.at_least_zero("extra_us", self.extra_us)?;
        at.within("probability", self.probability, 0.0, 1.0)
    }
}

impl Artefact {
    fn check(&self, at: At) -> Result<(), Problem> {
        let given = [
            ("extra_ms", self.extra_ms.is_some()),
            ("extra_us", self.extra_us.is_some()),
            ("over", self.over.is_some()),
            ("per_hour", self.per_hour.is_some()),
            ("factor", self.factor.is_some()),
            ("every_s", self.every_s.is_some()),
            ("for_s", self.for_s.is_some()),
            ("every_points", self.every_points.is_some()),
            ("at_point", self.at_point.is_some()),
            ("devices", self.devices.is_some()),
        ];
        let (required, optional): (&[&str], &[&str]) = match self.kind {
            ArtefactKind::AllocationStall => (&["extra_ms"], &["over"]),
            ArtefactKind::FirstVisit => (&["extra_us"], &[]),
            ArtefactKind::Drift => (&["per_hour"], &[]),
            ArtefactKind::Burst => (&["factor", "every_s", "for_s"], &[]),
            ArtefactKind::Checkpoint => (&["extra_us", "every_points"], &[]),
            ArtefactKind::TimeStep => (&["at_point"], &["factor", "extra_ms", "devices"]),
        };
        at.keys(self.kind.as_str(), &given, required, optional)?;
        if self.kind == ArtefactKind::TimeStep && self.factor.is_some() == self.extra_ms.is_some() {
            let why = "time_step needs either factor or extra_ms".to_owned();
            return Err(at.problem("kind", why));
        }
        at.at_least_zero("extra_ms", self.extra_ms)?;
        at.at_least_zero("extra_us", self.extra_us)?;
        at.within("per_hour", self.per_hour, -1e3, 1e3)?;
        at.above_zero("factor", self.factor)?;
        at.within("every_s", self.every_s, 1e-6, LARGEST)?;
        at.within("for_s", self.for_s, 0.0, self.every_s.unwrap_or(LARGEST))?;
        if self.over == Some(0) {
            return Err(at.problem("over", "must be at least 1".to_owned()));
        }
        if self.every_points == Some(0) {
            return Err(at.problem("every_points", "must be at least 1".to_owned()));
        }
        Ok(())
    }
}

impl Failure {
    fn check(&self, at: At) -> Result<(), Problem> {
        let given = [
            ("rank", self.rank.is_some()),
            ("at_point", self.at_point.is_some()),
            ("cpus", self.cpus.is_some()),
            ("call", self.call.is_some()),
            ("code", self.code.is_some()),
        ];
        let (required, optional): (&[&str], &[&str]) = match self.kind {
            FailureKind::BindRefused => (&["rank"], &["cpus", "at_point"]),
            FailureKind::RankDead => (&["rank", "at_point"], &[]),
            FailureKind::Hang => (&["at_point"], &["rank"]),
            FailureKind::Error => (&["at_point", "call", "code"], &["rank"]),
        };
        at.keys(self.kind.as_str(), &given, required, optional)?;
        match self.rank {
            Some(rank) if rank >= RANKS => {
                Err(at.problem("rank", format!("{rank}; the ranks are 0 and 1")))
            }
            _ => Ok(()),
        }
    }
}

/// Keeps every product of a time and a unit far below 2^63 ns.
const LARGEST: f64 = 1e9;

/// A table of the file.
#[derive(Clone, Copy)]
struct At {
    section: &'static str,
    index: Option<usize>,
}

impl At {
    fn problem(self, key: &'static str, message: String) -> Problem {
        Problem { at: self, key, message }
    }

    fn above_zero(self, key: &'static str, value: Option<f64>) -> Result<(), Problem> {
        match value {
            Some(value) if !(value > 0.0 && value <= LARGEST) => {
                Err(self.problem(key, format!("{value}; must be above 0 and at most {LARGEST}")))
            }
            _ => Ok(()),
        }
    }

    fn at_least_zero(self, key: &'static str, value: Option<f64>) -> Result<(), Problem> {
        self.within(key, value, 0.0, LARGEST)
    }

    fn within(
        self,
        key: &'static str,
        value: Option<f64>,
        low: f64,
        high: f64,
    ) -> Result<(), Problem> {
        match value {
            Some(value) if !(low..=high).contains(&value) => {
                Err(self.problem(key, format!("{value}; must be {low} to {high}")))
            }
            _ => Ok(()),
        }
    }

    fn required(self, kind: &str, keys: &[(&'static str, bool)]) -> Result<(), Problem> {
        match keys.iter().find(|(_, given)| !given) {
            Some((key, _)) => Err(self.problem(key, format!("is missing, {kind} needs it"))),
            None => Ok(()),
        }
    }

    fn keys(
        self,
        kind: &str,
        given: &[(&'static str, bool)],
        required: &[&str],
        optional: &[&str],
    ) -> Result<(), Problem> {
        for &(key, given) in given {
            if given && !required.contains(&key) && !optional.contains(&key) {
                return Err(self.problem(key, format!("does not belong to {kind}")));
            }
            if !given && required.contains(&key) {
                return Err(self.problem(key, format!("is missing, {kind} needs it")));
            }
        }
        Ok(())
    }

    fn members(
        self,
        key: &'static str,
        list: Option<&IdList>,
        what: &str,
        exists: impl Fn(u32) -> bool,
    ) -> Result<(), Problem> {
        let Some(list) = list else { return Ok(()) };
        if list.ids().is_empty() {
            return Err(self.problem(key, "is empty; leave it out to mean all".to_owned()));
        }
        match list.ids().iter().find(|id| !exists(**id)) {
            Some(id) => Err(self.problem(key, format!("the machine has no {what} {id}"))),
            None => Ok(()),
        }
    }
}

/// A value that cannot be used, with the way to it.
struct Problem {
    at: At,
    key: &'static str,
    message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.at.section)?;
        if let Some(index) = self.at.index {
            write!(f, "[{index}]")?;
        }
        if !self.key.is_empty() {
            write!(f, ".{}", self.key)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl Problem {
    /// Where the key stands in `text`; its table when the key is missing.
    fn find(&self, text: &str) -> Option<usize> {
        let root = DeTable::parse(text).ok()?;
        let (section_at, section) = entry(root.get_ref(), self.at.section)?;
        let (table_at, table) = match (self.at.index, section.get_ref().as_array()) {
            (Some(index), Some(array)) => {
                let item = array.get(index)?;
                (item.span().start, item)
            }
            _ => (section_at, section),
        };
        let key = table.get_ref().as_table().and_then(|table| entry(table, self.key));
        Some(key.map_or(table_at, |(key_at, _)| key_at))
    }
}

fn entry<'t, 'i>(table: &'t DeTable<'i>, name: &str) -> Option<(usize, &'t Spanned<DeValue<'i>>)> {
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == name)?;
    Some((key.span().start, value))
}

/// The key that stands, or whose value stands, at an offset of `text`.
fn key_at(text: &str, offset: usize) -> Option<String> {
    let root = DeTable::parse(text).ok()?;
    let hit = |table: &DeTable<'_>| {
        let entry = table
            .iter()
            .find(|(key, value)| key.span().contains(&offset) || value.span().contains(&offset));
        entry.map(|(key, _)| key.get_ref().to_string())
    };
    for (name, value) in root.get_ref() {
        let name = name.get_ref();
        if let Some(key) = value.get_ref().as_table().and_then(hit) {
            return Some(format!("{name}.{key}"));
        }
        for (index, item) in value.get_ref().as_array().into_iter().flatten().enumerate() {
            if let Some(key) = item.get_ref().as_table().and_then(hit) {
                return Some(format!("{name}[{index}].{key}"));
            }
        }
    }
    hit(root.get_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Scenario {
        Scenario::parse(text, "test").unwrap()
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "literals arrive unchanged")]
    fn defaults_are_the_documented_machine() {
        let scenario = parse("");
        assert_eq!(scenario, Scenario::default());
        let machine = &scenario.machine;
        assert_eq!((scenario.seed, &machine.cpus), (7, &Cpus::Count(640)));
        assert_eq!((machine.smt, machine.smt_layout), (2, SmtLayout::Adjacent));
        assert_eq!((machine.numa_nodes, machine.devices), (8, 16));
        let costs = [
            machine.bind_us,
            machine.touch_gbps,
            machine.register_gbps,
            machine.alloc_us,
            machine.point_us,
        ];
        assert_eq!(costs, [50.0, 4.0, 20.0, 200.0, 5.0]);
        let link = |link: &LinkSpec| {
            [
                link.gbps,
                link.latency_us,
                link.noise,
                link.visit_noise,
                link.core_spread,
                link.device_spread,
                link.dip_probability,
                link.dip_factor,
            ]
        };
        assert_eq!(link(&scenario.h2d), [58.5, 12.0, 0.015, 0.0, 0.0, 0.0, 0.0, 0.3]);
        assert_eq!(link(&scenario.all_gather), [46.0, 180.0, 0.03, 0.0, 0.0, 0.0, 0.0, 0.3]);
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "literals arrive unchanged")]
    fn a_section_keeps_the_defaults_it_does_not_name() {
        let scenario = parse("[h2d]\ngbps = 20\n[all_gather]\nnoise = 0\n[machine]\nsmt = 1");
        assert_eq!((scenario.h2d.gbps, scenario.h2d.latency_us), (20.0, 12.0));
        let gather = &scenario.all_gather;
        assert_eq!((gather.gbps, gather.latency_us, gather.noise), (46.0, 180.0, 0.0));
        assert_eq!((scenario.machine.smt, scenario.machine.devices), (1, 16));
    }

    #[test]
    fn every_kind_is_read_with_its_keys() {
        let scenario = parse(
            r#"
            [[fault]]
            kind = "slow_device"
            devices = [3, 1]
            factor = 0.5
            [[fault]]
            kind = "slow_core"
            cpus = "0-3,8"
            extra_us = 4
            load = "cpu:2"
            probability = 0.5
            [[fault]]
            kind = "slow_rank0_core"
            rank0 = "1"
            factor = 0.9
            [[fault]]
            kind = "slow_rank1_core"
            rank1 = "228"
            factor = 0.97
            [[fault]]
            kind = "slow_block"
            sweep = "core_pair"
            rank0 = "0-79"
            rank1 = "80-159"
            factor = 0.9
            [[fault]]
            kind = "same_core"
            sweep = "core_pair"
            factor = 0.61
            [[fault]]
            kind = "smt_sibling"
            factor = 0.93
            [[fault]]
            kind = "slow_cell"
            cpus = "1"
            devices = "2"
            factor = 0.9
            [[fault]]
            kind = "load_sensitive"
            factor = 0.9
            [[fault]]
            kind = "data_corruption"
            [[fault]]
            kind = "node_ceiling"
            factor = 0.9
            [[artefact]]
            kind = "allocation_stall"
            extra_ms = 25
            over = 3
            [[artefact]]
            kind = "first_visit"
            extra_us = 40
            [[artefact]]
            kind = "drift"
            per_hour = -0.1
            [[artefact]]
            kind = "burst"
            factor = 0.5
            every_s = 10
            for_s = 1.5
            [[artefact]]
            kind = "checkpoint"
            extra_us = 700
            every_points = 32768
            [[artefact]]
            kind = "time_step"
            at_point = 100
            extra_ms = 10.9
            devices = "0"
            [[failure]]
            kind = "bind_refused"
            rank = 1
            cpus = "5"
            [[failure]]
            kind = "rank_dead"
            rank = 1
            at_point = 9
            [[failure]]
            kind = "hang"
            at_point = 9
            [[failure]]
            kind = "error"
            at_point = 9
            call = "aclrtMemcpy"
            code = 507899
            "#,
        );
        assert_eq!(scenario.fault.len(), 11);
        let sweeps: Vec<&str> =
            scenario.fault.iter().map(|fault| fault.resolved_sweep().as_str()).collect();
        let (h2d, pair) = ("h2d", "core_pair");
        assert_eq!(sweeps, [h2d, h2d, pair, pair, pair, pair, pair, h2d, h2d, h2d, h2d]);
        assert_eq!(scenario.fault[0].devices.as_ref().unwrap().ids(), [1, 3]);
        assert_eq!(scenario.fault[1].cpus.as_ref().unwrap().ids(), [0, 1, 2, 3, 8]);
        assert_eq!(scenario.artefact[0].over, Some(3));
        assert_eq!(scenario.failure[3].code, Some(507_899));

        let json = serde_json::to_string(&scenario).unwrap();
        assert_eq!(serde_json::from_str::<Scenario>(&json).unwrap(), scenario);
    }

    fn error(text: &str) -> (String, String) {
        match Scenario::parse(text, "machine.toml").unwrap_err() {
            Error::Format { place, message } => (place, message),
            other => panic!("{other}"),
        }
    }

    fn fields<const N: usize>(case: &str) -> [&str; N] {
        let fields: Vec<&str> = case.splitn(N, '|').map(str::trim).collect();
        fields.try_into().unwrap()
    }

    fn assert_error(text: &str, line: &str, words: &str) {
        let (place, message) = error(text);
        assert_eq!(place, format!("machine.toml:{line}"), "{text}: {message}");
        assert!(message.contains(words), "{text}: {message}");
    }

    #[test]
    fn errors_name_the_line_and_the_key() {
        // Line, words of the message, and the file with / for a new line.
        let cases = r#"
            1 | unknown field `sede` | sede = 7
            1 | seed | seed = -1
            3 | machine.cpu: unknown field | [machine]/smt = 2/cpu = 3
            2 | machine.cpus | [machine]/cpus = true
            2 | machine.cpus | [machine]/cpus = -4
            2 | machine.smt_layout: unknown variant `mixed` | [machine]/smt_layout = "mixed"
            2 | h2d.gbps | [h2d]/gbps = "fast"
            3 | all_gather.rate: unknown field | [all_gather]//rate = 3
            3 | fault[0].cpu: unknown field | [[fault]]/kind = "same_core"/cpu = 3
            2 | fault[0].kind: unknown variant `slow` | [[fault]]/kind = "slow"
            2 | artefact[0].kind: unknown variant `x` | [[artefact]]/kind = "x"
            2 | failure[0].kind: unknown variant `x` | [[failure]]/kind = "x"
            2 | missing field `kind` | seed = 1/[[fault]]/factor = 0.5
            2 | duplicate key | seed = 1/seed = 2
            2 |  | seed = 1/[machine
            1 | machine.oops: unknown field | machine = { cpus = 4, oops = 1 }
            2 | machine.offline: '3,1-4': entry 2: 3 is listed twice | [machine]/offline = "3,1-4"
            2 | machine.offline: entry 2: 3 is listed twice | [machine]/offline = [3, 3]
            2 | machine.offline: '4-1': entry 1: the range 4-1 runs | [machine]/offline = "4-1"
            2 | machine.offline: '1,': entry 2: '' is not an id | [machine]/offline = "1,"
            2 | machine.offline: '+1' | [machine]/offline = "+1"
            2 | machine.cpus: '0-4294967295' | [machine]/cpus = "0-4294967295"
            2 | machine.cpus: '0-999999': entry 1: more than 65536 | [machine]/cpus = "0-999999"
            2 | machine.cpus: 0 CPUs | [machine]/cpus = 0
            2 | machine.cpus: 65537 CPUs | [machine]/cpus = 65537
            2 | machine.smt | [machine]/smt = 3/smt_layout = "split"
            2 | machine.smt | [machine]/smt = 0
            4 | machine.numa_nodes: 65537 nodes | [machine]/cpus = 4/smt = 2/numa_nodes = 65537
            2 | machine.numa_nodes | [machine]/numa_nodes = 0
            2 | machine.devices | [machine]/devices = 0
            2 | machine.devices | [machine]/devices = 1025
            2 | machine.bind_us | [machine]/bind_us = -1
            2 | machine.alloc_us | [machine]/alloc_us = inf
            2 | machine.point_us | [machine]/point_us = nan
            2 | machine.touch_gbps | [machine]/touch_gbps = 0
            2 | machine.register_gbps | [machine]/register_gbps = 0
            2 | machine.offline: the machine has no CPU 640 | [machine]/offline = "640"
            3 | machine.refuse_bind: the machine has no CPU 2 | [machine]/cpus = "0-1,4-5"/refuse_bind = "2"/numa_nodes = 1
            3 | machine.offline: at least one | [machine]/cpus = 2/offline = "0-1"/numa_nodes = 1
            2 | h2d.gbps | [h2d]/gbps = 0
            2 | h2d.latency_us | [h2d]/latency_us = -1
            2 | h2d.noise | [h2d]/noise = 2.5
            2 | h2d.visit_noise | [h2d]/visit_noise = -0.1
            2 | all_gather.core_spread | [all_gather]/core_spread = -0.1
            2 | all_gather.device_spread | [all_gather]/device_spread = nan
            2 | h2d.dip_probability | [h2d]/dip_probability = 1.5
            2 | h2d.dip_factor | [h2d]/dip_factor = 0"#;
        for case in cases.lines().skip(1) {
            let [line, words, text] = fields(case);
            assert_error(&text.replace('/', "\n"), line, words);
        }
    }

    #[test]
    fn errors_in_entries_name_the_line_and_the_key() {
        // The same for the second entry of a section; its header is on line 4.
        let cases = r#"
            fault | 4 | fault[1].devices: is missing, slow_device | kind = "slow_device"/factor = 0.5
            fault | 4 | fault[1].cpus: is missing, slow_core | kind = "slow_core"/factor = 0.5
            fault | 4 | fault[1].rank0: is missing | kind = "slow_rank0_core"/factor = 0.5
            fault | 4 | fault[1].rank1: is missing | kind = "slow_rank1_core"/factor = 0.5
            fault | 4 | fault[1].cpus: is missing, slow_block | kind = "slow_block"/factor = 0.5
            fault | 4 | fault[1].rank1: is missing, slow_cell | kind = "slow_cell"/rank0 = "1"/factor = 0.5
            fault | 4 | fault[1].factor: is missing, node_ceiling | kind = "node_ceiling"/extra_us = 5
            fault | 5 | factor or extra_us is missing | kind = "same_core"
            fault | 6 | fault[1].sweep: slow_core does not occur | kind = "slow_core"/sweep = "core_pair"/cpus = "1"/factor = 1
            fault | 6 | fault[1].sweep: same_core does not occur | kind = "same_core"/sweep = "h2d"/factor = 1
            fault | 5 | fault[1].kind: slow_core does not occur | kind = "slow_core"/rank0 = "1"/factor = 1
            fault | 6 | fault[1].cpus: does not belong | kind = "slow_rank1_core"/cpus = "1"/factor = 1
            fault | 7 | fault[1].rank1: does not belong | kind = "node_ceiling"/sweep = "h2d"/rank1 = "1"/factor = 1
            fault | 6 | fault[1].devices: the machine has no device 16 | kind = "slow_device"/devices = "15-16"/factor = 1
            fault | 6 | fault[1].rank1: the machine has no CPU 700 | kind = "slow_rank1_core"/rank1 = "700"/factor = 1
            fault | 6 | fault[1].cpus: is empty | kind = "slow_core"/cpus = ""/factor = 1
            fault | 6 | fault[1].factor: 0; must be above 0 | kind = "same_core"/factor = 0
            fault | 6 | fault[1].extra_us | kind = "same_core"/extra_us = -3
            fault | 7 | fault[1].probability: 2; must be 0 to 1 | kind = "same_core"/factor = 1/probability = 2
            fault | 7 | fault[1].load | kind = "same_core"/factor = 1/load = ""
            artefact | 4 | artefact[1].extra_ms: is missing | kind = "allocation_stall"
            artefact | 7 | artefact[1].over | kind = "allocation_stall"/extra_ms = 1/over = 0
            artefact | 4 | artefact[1].extra_us: is missing | kind = "first_visit"
            artefact | 7 | artefact[1].devices: does not belong to first_visit | kind = "first_visit"/extra_us = 1/devices = "1"
            artefact | 4 | artefact[1].per_hour: is missing | kind = "drift"
            artefact | 6 | artefact[1].per_hour: 2000 | kind = "drift"/per_hour = 2000
            artefact | 4 | artefact[1].for_s: is missing | kind = "burst"/factor = 0.5/every_s = 1
            artefact | 8 | artefact[1].for_s: 3; must be 0 to 2 | kind = "burst"/factor = 0.5/every_s = 2/for_s = 3
            artefact | 7 | artefact[1].every_s: 0; | kind = "burst"/factor = 0.5/every_s = 0/for_s = 0
            artefact | 6 | artefact[1].factor | kind = "burst"/factor = -1/every_s = 2/for_s = 1
            artefact | 4 | artefact[1].every_points: is missing | kind = "checkpoint"/extra_us = 1
            artefact | 7 | artefact[1].every_points | kind = "checkpoint"/extra_us = 1/every_points = 0
            artefact | 4 | artefact[1].at_point: is missing | kind = "time_step"/factor = 0.5
            artefact | 5 | needs either factor or extra_ms | kind = "time_step"/at_point = 3
            artefact | 5 | needs either factor or extra_ms | kind = "time_step"/at_point = 3/factor = 1/extra_ms = 1
            artefact | 8 | artefact[1].devices: the machine has no device 16 | kind = "time_step"/at_point = 3/factor = 1/devices = [16]
            failure | 4 | failure[1].rank: is missing, bind_refused | kind = "bind_refused"
            failure | 7 | failure[1].cpus: the machine has no CPU 640 | kind = "bind_refused"/rank = 0/cpus = [640]
            failure | 4 | failure[1].at_point: is missing, rank_dead | kind = "rank_dead"/rank = 0
            failure | 4 | failure[1].at_point: is missing, hang | kind = "hang"
            failure | 7 | failure[1].code: does not belong to hang | kind = "hang"/at_point = 1/code = 3
            failure | 4 | failure[1].call: is missing, error | kind = "error"/at_point = 1/code = 3
            failure | 6 | failure[1].rank: 2; the ranks are 0 and 1 | kind = "hang"/rank = 2/at_point = 1"#;
        for case in cases.lines().skip(1) {
            let [section, line, words, entry] = fields(case);
            let first = match section {
                "fault" => "kind = \"data_corruption\"/",
                "artefact" => "kind = \"drift\"/per_hour = 1",
                _ => "kind = \"hang\"/at_point = 1",
            };
            let text = format!("[[{section}]]/{first}/[[{section}]]/{entry}");
            assert_error(&text.replace('/', "\n"), line, words);
        }
    }

    #[test]
    fn a_hostile_file_is_refused() {
        let long = format!("# {}\nseed = 1", "x".repeat(MAX_TEXT));
        assert!(error(&long).1.contains("1 MiB"));
        let deep = format!("seed = {}{}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(error(&deep).1.contains("recurs"), "{}", error(&deep).1);
        let many = "[[fault]]\nkind = \"data_corruption\"\n".repeat(MAX_ENTRIES + 1);
        assert!(error(&many).1.contains("fault: 1025 entries"), "{}", error(&many).1);
        let tables = format!("[{}]\nx = 1", vec!["a"; 500_000].join("."));
        assert!(error(&tables).1.contains("recurs"), "{}", error(&tables).1);
    }

    #[test]
    fn files_are_read_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("box.toml");
        std::fs::write(&path, "seed = 12\n").unwrap();
        assert_eq!(Scenario::load(&path).unwrap().seed, 12);
        std::fs::write(&path, "seed = 12\nseeds = 2\n").unwrap();
        let text = Scenario::load(&path).unwrap_err().to_string();
        assert!(text.contains("box.toml:2: seeds: unknown field"), "{text}");
        std::fs::write(&path, [b'#', 0xff]).unwrap();
        assert_eq!(Scenario::load(&path).unwrap_err().kind(), "format");
        let error = Scenario::load(&folder.path().join("none.toml")).unwrap_err();
        assert_eq!(error.code(), Some(i64::from(libc::ENOENT)));
        assert!(error.to_string().contains("none.toml"), "{error}");
        assert!(Scenario::load(Path::new("/dev/zero")).unwrap_err().to_string().contains("1 MiB"));
    }

    #[test]
    fn lists_print_as_they_are_read() {
        for text in ["", "0", "0-3,8", "0-1,5,7-9"] {
            assert_eq!(text.parse::<IdList>().unwrap().to_string(), text);
        }
        let list: IdList = " 8, 0-2 ,3".parse().unwrap();
        assert_eq!(list.to_string(), "0-3,8");
        assert!(list.contains(8) && !list.contains(4));
    }

    /// Core, node and package of a CPU.
    fn at(scenario: &Scenario, cpu: u32) -> (u32, u32, u32) {
        let places = scenario.cpu_places();
        let place = places.iter().find(|place| place.cpu.0 == cpu).unwrap();
        (place.core, place.node.0, place.package)
    }

    fn siblings(scenario: &Scenario, cpu: u32) -> Vec<u32> {
        scenario.siblings(CpuId(cpu)).into_iter().map(|cpu| cpu.0).collect()
    }

    #[test]
    fn adjacent_siblings_lie_as_on_the_recorded_machine() {
        let scenario = parse("");
        assert_eq!(at(&scenario, 5), (2, 0, 0));
        assert_eq!([79, 80, 480, 559, 639].map(|cpu| at(&scenario, cpu).1), [0, 1, 6, 6, 7]);
        assert_eq!([0, 159, 160, 639].map(|cpu| at(&scenario, cpu).2), [0, 0, 1, 3]);
        assert_eq!((siblings(&scenario, 8), siblings(&scenario, 9)), (vec![8, 9], vec![8, 9]));
        assert!(siblings(&scenario, 640).is_empty());
    }

    #[test]
    fn split_siblings_lie_as_on_two_socket_machines() {
        let scenario = parse("[machine]\ncpus = 96\nsmt_layout = \"split\"\nnuma_nodes = 2");
        assert_eq!((siblings(&scenario, 3), siblings(&scenario, 51)), (vec![3, 51], vec![3, 51]));
        let nodes = [0, 23, 24, 47, 48, 71, 72, 95].map(|cpu| at(&scenario, cpu).1);
        assert_eq!(nodes, [0, 0, 1, 1, 0, 0, 1, 1]);
        assert_eq!(at(&scenario, 95), (47, 1, 0));

        let four = parse("[machine]\ncpus = 16\nsmt = 4\nsmt_layout = \"split\"\nnuma_nodes = 1");
        assert_eq!(siblings(&four, 9), [1, 5, 9, 13]);
    }

    #[test]
    fn sparse_cpus_are_laid_out_by_position() {
        let text = "[machine]\ncpus = \"0-3,100-103\"\nnuma_nodes = 2\noffline = [101]\n\
                    refuse_bind = \"2\"\n";
        let adjacent = parse(text);
        assert_eq!(adjacent.present_cpus(), [0, 1, 2, 3, 100, 101, 102, 103]);
        assert_eq!(siblings(&adjacent, 100), [100, 101]);
        assert_eq!(at(&adjacent, 100), (2, 1, 0));
        let split = parse(&format!("{text}smt_layout = \"split\""));
        assert_eq!(siblings(&split, 1), [1, 101]);
        assert_eq!((at(&split, 101), at(&split, 102)), ((1, 0, 0), (2, 1, 0)));
        let usable: Vec<(u32, bool, bool)> = adjacent
            .cpu_places()
            .iter()
            .filter(|place| !place.online || place.refuses_bind)
            .map(|place| (place.cpu.0, place.online, place.refuses_bind))
            .collect();
        assert_eq!(usable, [(2, true, true), (101, false, false)]);
    }

    #[test]
    fn nodes_divide_cores_that_do_not_divide_evenly() {
        let scenario = parse("[machine]\ncpus = 10\nsmt = 1\nnuma_nodes = 3");
        // node = core · 3 ÷ 10, rounded down.
        let nodes: Vec<u32> = scenario.cpu_places().iter().map(|place| place.node.0).collect();
        assert_eq!(nodes, [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]);
    }

    #[test]
    fn small_machines_need_not_fill_the_default_shape() {
        // The defaults are 8 nodes and 2 threads per core.
        let nodes = |text: &str| -> Vec<(u32, u32)> {
            let places = parse(text).cpu_places();
            places.iter().map(|place| (place.core, place.node.0)).collect()
        };
        assert_eq!(nodes("[machine]\ncpus = 1"), [(0, 0)]);
        assert_eq!(nodes("[machine]\ncpus = 3"), [(0, 0), (0, 0), (1, 4)]);
        assert_eq!(nodes("[machine]\ncpus = 4"), [(0, 0), (0, 0), (1, 4), (1, 4)]);
    }
}
