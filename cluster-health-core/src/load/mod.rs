//! Load beside a measurement: burners on CPUs and devices that say what they achieved.
//!
//! | profile | burners of a rank | work |
//! |---|---|---|
//! | `idle` | none | |
//! | `cpu:N` | N threads on the NUMA node of its measured core, never on a measured core | matrix products and a stream of copies in turn (`cpu:N:matmul`, `cpu:N:stream`: one of them) |
//! | `device` | a thread per device | host backend: the same work in the memory of the device's node; Ascend: `aclnnMatmul` in a stream of its own |
//!
//! Burners start with their first use, rest between uses and are joined when the
//! [`LoadGenerator`] is dropped, so also on an error and when the stack unwinds. On a synthetic
//! machine nothing burns: its scenario says what a load does.

mod burner;
mod clock;
mod place;
mod work;

pub(crate) use self::work::{Achieved, Work};

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::burner::{Burner, Place, Reading};
use self::place::Placer;
use crate::backend::BackendKind;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id::{CpuId, NodeId};
use crate::machine::Machine;

pub use self::work::STREAM_BYTES;

/// A burner below this share of its CPU (or device) is no full load.
pub const FULL_UTILISATION: f64 = 0.9;

/// Most burners of one rank.
const MOST_BURNERS: u32 = 4096;

/// What CPU burners do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[non_exhaustive]
pub enum CpuWork {
    /// Matrix products and streams of copies in turn.
    #[default]
    Both,
    /// Matrix products that fit into the first cache.
    Matmul,
    /// Copies within [`STREAM_BYTES`] of the node's memory.
    Stream,
}

impl CpuWork {
    /// The word of profile names and of `run.json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Matmul => "matmul",
            Self::Stream => "stream",
        }
    }
}

/// What runs beside the measurement. Its text is the name in every file.
///
/// ```
/// use cluster_health_core::load::LoadProfile;
///
/// let profile: LoadProfile = "cpu:2".parse()?;
/// assert_eq!(profile.to_string(), "cpu:2");
/// assert!("cpu:0".parse::<LoadProfile>().is_err());
/// # Ok::<(), cluster_health_core::Error>(())
/// ```
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum LoadProfile {
    /// Nothing.
    #[default]
    Idle,
    /// Threads that compute and copy.
    Cpu {
        /// Threads per rank.
        burners: u32,
        /// What they do.
        work: CpuWork,
    },
    /// Work on each device of the rank.
    Device,
}

impl LoadProfile {
    /// True when nothing burns.
    #[must_use]
    pub const fn is_idle(self) -> bool {
        matches!(self, Self::Idle)
    }

    /// The kind of work as `run.json` has it: `none`, `both`, `matmul`, `stream` or `device`.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Idle => "none",
            Self::Cpu { work, .. } => work.as_str(),
            Self::Device => "device",
        }
    }

    /// Burners of a rank that measures so many devices.
    #[must_use]
    pub fn burners(self, devices: usize) -> usize {
        match self {
            Self::Idle => 0,
            Self::Cpu { burners, .. } => usize::try_from(burners).unwrap_or(usize::MAX),
            Self::Device => devices,
        }
    }
}

impl fmt::Display for LoadProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.pad("idle"),
            Self::Cpu { burners, work: CpuWork::Both } => write!(f, "cpu:{burners}"),
            Self::Cpu { burners, work } => write!(f, "cpu:{burners}:{}", work.as_str()),
            Self::Device => f.pad("device"),
        }
    }
}

impl FromStr for LoadProfile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(
                "load",
                format!(
                    "'{text}' {why}; profiles are idle, cpu:N, cpu:N:matmul, cpu:N:stream, device"
                ),
            )
        };
        let mut parts = text.trim().split(':');
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some("idle"), None, ..) => Ok(Self::Idle),
            (Some("device"), None, ..) => Ok(Self::Device),
            (Some("cpu"), Some(count), work, None) => {
                let burners = count
                    .parse()
                    .ok()
                    .filter(|burners| (1..=MOST_BURNERS).contains(burners))
                    .ok_or_else(|| bad("has no number of burners from 1 to 4096"))?;
                let work = match work {
                    None | Some("both") => CpuWork::Both,
                    Some("matmul") => CpuWork::Matmul,
                    Some("stream") => CpuWork::Stream,
                    Some(_) => return Err(bad("names no kind of work")),
                };
                Ok(Self::Cpu { burners, work })
            }
            _ => Err(bad("is no load profile")),
        }
    }
}

impl TryFrom<String> for LoadProfile {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<LoadProfile> for String {
    fn from(profile: LoadProfile) -> Self {
        profile.to_string()
    }
}

/// What the burners of one profile on one rank did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadRecord {
    /// Name of the profile.
    pub name: String,
    /// Kind of its work, see [`LoadProfile::kind`].
    pub kind: String,
    /// The rank that they belonged to.
    pub rank: u32,
    /// Burners at a time.
    pub burners: u32,
    /// CPUs that they were bound to at some time, ascending.
    pub cpus: Vec<CpuId>,
    /// Time that they were to burn, summed over the burners, nanoseconds.
    pub active_ns: u64,
    /// Of that the CPU time that they got; of Ascend devices the time of their products.
    pub busy_ns: u64,
    /// `busy_ns` ÷ `active_ns`; `None` without either, as on a synthetic machine.
    pub utilisation: Option<f64>,
    /// Floating-point operations of matrix products.
    pub flops: u64,
    /// Bytes copied by streams.
    pub bytes: u64,
    /// Changes to this profile.
    pub starts: u64,
    /// The longest time that one of them took, without the first, which makes threads and memory,
    /// nanoseconds.
    pub longest_switch_ns: u64,
    /// Points beside which a burner had less than [`FULL_UTILISATION`].
    pub weak_points: u64,
    /// `seq` of the first of them.
    pub weak_seqs: Vec<u64>,
}

/// More points are counted, but not listed.
const LISTED: usize = 100;

impl LoadRecord {
    fn new(profile: LoadProfile, rank: u32, burners: usize) -> Self {
        Self {
            name: profile.to_string(),
            kind: profile.kind().to_owned(),
            rank,
            burners: u32::try_from(burners).unwrap_or(u32::MAX),
            cpus: Vec::new(),
            active_ns: 0,
            busy_ns: 0,
            utilisation: None,
            flops: 0,
            bytes: 0,
            starts: 0,
            longest_switch_ns: 0,
            weak_points: 0,
            weak_seqs: Vec::new(),
        }
    }

    /// Notes CPUs of burners.
    pub fn note_cpus(&mut self, cpus: &[CpuId]) {
        for cpu in cpus {
            if let Err(at) = self.cpus.binary_search(cpu) {
                self.cpus.insert(at, *cpu);
            }
        }
    }

    /// Its figures so far, for another rank; [`take_figures`](Self::take_figures) reads them.
    #[must_use]
    pub fn figures(&self) -> [u64; 7] {
        [
            self.active_ns,
            self.busy_ns,
            self.flops,
            self.bytes,
            self.starts,
            self.longest_switch_ns,
            self.weak_points,
        ]
    }

    /// Takes over the figures that another rank told after the point `seq`.
    pub fn take_figures(&mut self, figures: [u64; 7], seq: u64) {
        let weak;
        [
            self.active_ns,
            self.busy_ns,
            self.flops,
            self.bytes,
            self.starts,
            self.longest_switch_ns,
            weak,
        ] = figures;
        if weak > self.weak_points {
            self.note_weak(seq);
        }
        self.set_utilisation();
    }

    /// Notes a point beside which the load was not full.
    pub fn note_weak(&mut self, seq: u64) {
        self.weak_points += 1;
        if self.weak_seqs.len() < LISTED {
            self.weak_seqs.push(seq);
        }
    }

    /// Adds what the same profile did on the same rank at another time.
    pub fn merge(&mut self, other: &Self) {
        // What stands in a file may be any number.
        let add = |sum: &mut u64, count: u64| *sum = sum.saturating_add(count);
        self.note_cpus(&other.cpus);
        add(&mut self.active_ns, other.active_ns);
        add(&mut self.busy_ns, other.busy_ns);
        add(&mut self.flops, other.flops);
        add(&mut self.bytes, other.bytes);
        add(&mut self.starts, other.starts);
        self.longest_switch_ns = self.longest_switch_ns.max(other.longest_switch_ns);
        add(&mut self.weak_points, other.weak_points);
        let room = LISTED.saturating_sub(self.weak_seqs.len());
        self.weak_seqs.extend(other.weak_seqs.iter().take(room));
        self.set_utilisation();
    }

    fn set_utilisation(&mut self) {
        #[allow(clippy::cast_precision_loss, reason = "times stay far below 2^53 ns")]
        let share = self.busy_ns as f64 / self.active_ns as f64;
        self.utilisation = (self.active_ns > 0).then_some(share);
    }
}

/// The loads of one rank of a sweep.
///
/// ```
/// use cluster_health_core::Machine;
/// use cluster_health_core::load::{LoadGenerator, LoadProfile};
///
/// # fn main() -> cluster_health_core::Result<()> {
/// let machine = Machine::host()?;
/// let measured = machine.census()?.bindable()[0];
/// let device = machine.devices().remove(0);
/// let profiles = [LoadProfile::Idle, "cpu:1".parse()?];
/// let mut loads = LoadGenerator::new(&machine, &profiles, &[vec![device]], 0)?;
/// if loads.check_places(1, &[measured]).is_ok() {
///     loads.switch(1, &[measured])?; // burns on another CPU from here on …
///     loads.switch(0, &[measured])?; // … to here
///     assert!(loads.records()[1].flops > 0);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LoadGenerator {
    machine: Machine,
    placer: Placer,
    profiles: Vec<LoadProfile>,
    /// Of every rank.
    devices: Vec<Vec<Device>>,
    rank: usize,
    timeout: Duration,
    crews: Vec<Crew>,
    current: Option<usize>,
    /// The CPUs that were measured at the last switch, and those of all ranks' burners.
    measured: Vec<CpuId>,
    places: Vec<Vec<CpuId>>,
}

/// The burners of one profile.
#[derive(Debug)]
struct Crew {
    burners: Vec<Burner>,
    record: LoadRecord,
}

impl Crew {
    fn record(&self) -> LoadRecord {
        let mut record = self.record.clone();
        for burner in &self.burners {
            let Reading { active_ns, busy_ns, flops, bytes } = burner.reading();
            record.active_ns += active_ns;
            record.busy_ns += busy_ns;
            record.flops += flops;
            record.bytes += bytes;
        }
        record.set_utilisation();
        record
    }
}

/// A burner that does not begin within this time hangs.
const START_BOUND: Duration = Duration::from_secs(60);

impl LoadGenerator {
    /// Loads for rank `rank` of the ranks that measure these devices; nothing burns yet.
    ///
    /// # Errors
    /// When the census cannot be taken, or there is no such rank.
    pub fn new(
        machine: &Machine,
        profiles: &[LoadProfile],
        devices: &[Vec<Device>],
        rank: usize,
    ) -> Result<Self> {
        let Some(own) = devices.get(rank) else {
            return Err(Error::invalid("rank", format!("{rank} of {} ranks", devices.len())));
        };
        let number = u32::try_from(rank).unwrap_or(u32::MAX);
        let crews = profiles
            .iter()
            .map(|profile| Crew {
                burners: Vec::new(),
                record: LoadRecord::new(*profile, number, profile.burners(own.len())),
            })
            .collect();
        Ok(Self {
            machine: machine.clone(),
            placer: Placer::new(machine)?,
            profiles: profiles.to_vec(),
            devices: devices.to_vec(),
            rank,
            timeout: START_BOUND,
            crews,
            current: None,
            measured: Vec::new(),
            places: Vec::new(),
        })
    }

    /// Whether all ranks' burners of a profile find CPUs while these are measured, one per rank.
    ///
    /// # Errors
    /// [`Error::Unavailable`] that says how many CPUs are needed and how many are left.
    pub fn check_places(&self, profile: usize, measured: &[CpuId]) -> Result<()> {
        self.places(profile, measured).map(|_| ())
    }

    /// The CPUs of every rank's burners; all ranks find the same.
    fn places(&self, profile: usize, measured: &[CpuId]) -> Result<Vec<Vec<CpuId>>> {
        let kind = self.profiles[profile];
        let node = |rank: usize| {
            measured.get(rank).or(measured.first()).and_then(|cpu| self.machine.node_of(*cpu))
        };
        let homes: Vec<Vec<Option<NodeId>>> = self
            .devices
            .iter()
            .enumerate()
            .map(|(rank, devices)| match kind {
                LoadProfile::Idle => Vec::new(),
                LoadProfile::Cpu { .. } => vec![node(rank); kind.burners(devices.len())],
                LoadProfile::Device => devices.iter().map(|device| device.info().node).collect(),
            })
            .collect();
        self.placer.place(&kind, measured, &homes)
    }

    /// Makes a profile the one that runs while these CPUs (one per rank) are measured: starts its
    /// burners, or moves them, and rests those of the profile before. Returns once every burner has
    /// done a first portion of its work. True when the profile changed, so that caches are cold.
    ///
    /// # Errors
    /// When there are not enough CPUs, a burner cannot start (`device` on Ascend: aclnn is missing),
    /// or does not begin in time. Nothing burns then.
    ///
    /// # Panics
    /// When `profile` is not a position in the profiles.
    pub fn switch(&mut self, profile: usize, measured: &[CpuId]) -> Result<bool> {
        let same = self.current == Some(profile);
        if same && self.measured == measured {
            return Ok(false);
        }
        let began = Instant::now();
        let result = self.change(profile, same, measured);
        if result.is_err() {
            self.rest();
        }
        let changed = result?;
        let record = &mut self.crews[profile].record;
        if changed {
            record.starts += 1;
            let spent = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            if record.starts > 1 && !self.machine.has_virtual_time() {
                record.longest_switch_ns = record.longest_switch_ns.max(spent);
            }
        }
        Ok(changed)
    }

    fn change(&mut self, profile: usize, same: bool, measured: &[CpuId]) -> Result<bool> {
        if !same {
            self.rest();
        }
        self.places = self.places(profile, measured)?;
        let own = &self.places[self.rank];
        self.measured.clear();
        self.measured.extend_from_slice(measured);
        self.current = Some(profile);
        let crew = &mut self.crews[profile];
        crew.record.note_cpus(own);
        if !self.machine.has_virtual_time() {
            while crew.burners.len() < own.len() {
                let at = crew.burners.len();
                let name = format!("load {} {at}", self.profiles[profile]);
                let burner = match self.profiles[profile] {
                    LoadProfile::Cpu { work, .. } => {
                        Burner::start(&name, false, move || Ok(work::cpu(work)))?
                    }
                    _ => {
                        let device = self.devices[self.rank][at].clone();
                        let by_device = device.driver().kind() == BackendKind::Ascend;
                        let timeout = self.timeout;
                        Burner::start(&name, by_device, move || work::device(&device, timeout))?
                    }
                };
                crew.burners.push(burner);
            }
            let mut moved = Vec::new();
            for (at, &cpu) in own.iter().enumerate() {
                let place = Place { cpu, node: self.machine.node_of(cpu) };
                if crew.burners[at].burn(place) {
                    moved.push(at);
                }
            }
            // All of them begin at once, and are waited for together.
            for at in moved {
                crew.burners[at].wait(self.timeout)?;
            }
        }
        Ok(!same)
    }

    /// Lets the burners of the running profile rest; they keep their threads and memory.
    pub fn rest(&mut self) {
        let Some(current) = self.current.take() else { return };
        let crew = &mut self.crews[current];
        crew.burners.iter_mut().for_each(Burner::rest);
        for burner in &crew.burners {
            // One that hangs or died is reported when it is used again.
            burner.settle(self.timeout).ok();
        }
    }

    /// Looks after the running burners: to be called after every point, with its `seq`. `Some` is
    /// the least utilisation of one since it was looked at last, once that is long enough ago to be
    /// known.
    ///
    /// # Errors
    /// When a burner died, with what killed it.
    pub fn check(&mut self, seq: u64) -> Result<Option<f64>> {
        let Some(current) = self.current else { return Ok(None) };
        let crew = &mut self.crews[current];
        let mut least: Option<f64> = None;
        for burner in &mut crew.burners {
            burner.alive()?;
            if let Some(share) = burner.utilisation() {
                least = Some(least.map_or(share, |least| least.min(share)));
            }
        }
        if least.is_some_and(|least| least < FULL_UTILISATION) {
            crew.record.note_weak(seq);
        }
        Ok(least)
    }

    /// The CPUs of a rank's burners since the last switch.
    #[must_use]
    pub fn burner_cpus(&self, rank: usize) -> &[CpuId] {
        self.places.get(rank).map_or(&[], Vec::as_slice)
    }

    /// What a profile did so far; `None` when there is none at this position.
    #[must_use]
    pub fn record(&self, profile: usize) -> Option<LoadRecord> {
        self.crews.get(profile).map(Crew::record)
    }

    /// What every profile did so far, in their order.
    #[must_use]
    pub fn records(&self) -> Vec<LoadRecord> {
        self.crews.iter().map(Crew::record).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in ["idle", "device", "cpu:1", "cpu:12", "cpu:2:matmul", "cpu:3:stream"] {
            let profile: LoadProfile = name.parse().unwrap();
            assert_eq!(profile.to_string(), name);
            let json = serde_json::to_string(&profile).unwrap();
            assert_eq!(json, format!("\"{name}\""));
            assert_eq!(serde_json::from_str::<LoadProfile>(&json).unwrap(), profile);
        }
        assert_eq!("cpu:2:both".parse::<LoadProfile>().unwrap().to_string(), "cpu:2");
    }

    #[test]
    fn what_is_no_profile_is_named() {
        for name in
            ["", "cpu", "cpu:", "cpu:0", "cpu:-1", "cpu:4097", "cpu:2:disk", "gpu", "idle:1"]
        {
            let error = name.parse::<LoadProfile>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}'")) && error.contains("cpu:N"), "{error}");
        }
    }

    #[test]
    fn records_of_two_stretches_add_up() {
        let mut record = LoadRecord::new(LoadProfile::Device, 1, 2);
        let mut other = record.clone();
        (record.active_ns, record.busy_ns, record.cpus) = (100, 100, vec![CpuId(4)]);
        (other.active_ns, other.busy_ns, other.cpus) = (300, 100, vec![CpuId(1), CpuId(4)]);
        other.note_weak(7);
        record.merge(&other);
        assert_eq!(record.cpus, [CpuId(1), CpuId(4)]);
        assert_eq!((record.active_ns, record.busy_ns), (400, 200));
        assert!(record.utilisation.is_some_and(|share| (share - 0.5).abs() < 1e-12));
        assert_eq!((record.weak_points, record.weak_seqs), (1, vec![7]));
    }
}
