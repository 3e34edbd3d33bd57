//! The state of a synthetic machine in virtual time.
//!
//! One iteration takes
//!
//! ```text
//! [latency + extra_us + bytes ÷ (gbps · Π factor · spread)] × exp(noise·N) × exp(visit_noise·N')
//! ```
//!
//! | part | comes from |
//! |---|---|
//! | latency, gbps, noise | the sweep's link |
//! | `extra_us`, factor | every fault that matches the cell, the load and the point's draw |
//! | further factors of the rate | a dip of the whole point, drift, bursts, time steps |
//! | spread | per core and per device, drawn from the seed; for pairs the cores of both ranks (one core twice counts twice) and the unordered pair of devices |
//! | N | (seed, seq, iteration), where the iterations of a point count its warm-ups too |
//! | N' | (seed, visit) |
//!
//! What artefacts add (stalls, first visits, checkpoints, time steps in milliseconds) is added
//! after the noise, so that it adds up to exactly what the scenario says. Every draw is a hash of
//! its key and none depends on the order of execution. Rates are decimal: 1 GB/s is 1 byte/ns.

use std::f64::consts::TAU;
use std::time::Duration;

use super::scenario::{
    ArtefactKind, CpuPlace, Failure, FailureKind, Fault, FaultKind, FaultSweep, IdList, LinkSpec,
    RANKS, Scenario,
};
use crate::error::{BackendError, Error, Result};
use crate::id::{CpuId, DeviceId};

/// The point that the next transfers belong to.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "built by the caller for every point")]
pub struct PointContext<'a> {
    /// Number of the point in order of measurement.
    pub seq: u64,
    /// `seq` of the first point of the run of points on one bound core (or pair of cores).
    pub visit: u64,
    /// True when the point's own transfers are all-gathers. What belongs to a point (dips, first
    /// visits, checkpoints, failures) leaves copies inside such a point alone, and vice versa.
    pub sweep_is_pair: bool,
    /// Name of the load profile.
    pub load: &'a str,
}

/// How one iteration went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyOutcome {
    /// Its time in nanoseconds; for pairs that of either rank.
    pub ns: u64,
    /// True when something else than what was sent arrived.
    pub corrupted: bool,
}

/// A synthetic machine: its clock, where its ranks run, and what a transfer takes.
///
/// The clock starts at 0 and moves only by these calls.
#[derive(Debug)]
pub struct World {
    scenario: Scenario,
    seed: u64,
    now_ns: u64,
    places: Vec<CpuPlace>,
    /// Position of the CPU that unbound ranks run on.
    home: usize,
    ranks: [Rank; RANKS as usize],
    point: Point,
    /// Indexed by [`index`].
    links: [Link; 2],
    artefacts: Artefacts,
    /// Copies made so far out of each host buffer.
    buffer_copies: Vec<u64>,
    buffer: Option<usize>,
    cell: Cell,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rank {
    bound: Option<usize>,
    moved: bool,
}

#[derive(Debug, Default)]
struct Point {
    seq: u64,
    visit: u64,
    is_pair: bool,
    load: String,
    /// Transfers made so far, by sweep.
    transfers: [u64; 2],
}

/// What stays the same for all transfers of one point and one binding.
#[derive(Debug, Default)]
struct Cell {
    valid_for: Option<FaultSweep>,
    /// Rules that match but for the device.
    rules: Vec<usize>,
    failure: Option<usize>,
    /// gbps · spread of the cores · dip.
    gbps: f64,
    visit_ln: f64,
}

#[derive(Debug)]
struct Link {
    spec: LinkSpec,
    /// By core and, for copies, by device; empty when all are 1.
    core_spread: Vec<f64>,
    device_spread: Vec<f64>,
    rules: Vec<Rule>,
}

/// A fault, prepared for one look-up per list.
#[derive(Debug)]
struct Rule {
    /// Position in the scenario, which keys its draws.
    index: u64,
    /// The bound CPU, or rank 0's.
    first: Mask,
    /// Rank 1's CPU.
    second: Mask,
    devices: Mask,
    relation: Relation,
    load: Option<String>,
    spares_idle: bool,
    probability: f64,
    factor: f64,
    extra_ns: f64,
    corrupts: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    Any,
    SameCpu,
    Siblings,
}

#[derive(Debug, Default)]
struct Artefacts {
    /// Nanoseconds per copy, and how many copies of a buffer pay it.
    stalls: Vec<(f64, u64)>,
    first_visit_ns: f64,
    drift_per_ns: f64,
    bursts: Vec<Burst>,
    /// Period in points and nanoseconds.
    checkpoints: Vec<(u64, f64)>,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Burst {
    period_ns: u64,
    window_ns: u64,
    phase_ns: u64,
    factor: f64,
}

#[derive(Debug)]
struct Step {
    at_point: u64,
    factor: f64,
    extra_ns: f64,
    devices: Mask,
}

/// A set of positions; `None` holds them all.
#[derive(Debug, Clone)]
struct Mask(Option<Box<[u64]>>);

impl Mask {
    fn new(len: usize, list: Option<&IdList>, position: impl Fn(u32) -> Option<usize>) -> Self {
        Self(list.map(|list| {
            let mut words = vec![0_u64; len.div_ceil(64)].into_boxed_slice();
            for position in list.ids().iter().filter_map(|id| position(*id)) {
                if let Some(word) = words.get_mut(position / 64) {
                    *word |= 1 << (position % 64);
                }
            }
            words
        }))
    }

    fn has(&self, position: usize) -> bool {
        self.0.as_ref().is_none_or(|words| {
            words.get(position / 64).is_some_and(|word| word >> (position % 64) & 1 == 1)
        })
    }
}

/// What a draw is for; part of its key.
#[derive(Clone, Copy)]
enum Draw {
    Noise = 1,
    Visit,
    Dip,
    Fault,
    CoreSpread,
    DeviceSpread,
    PairSpread,
    Phase,
    PairNoise,
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of `SplitMix64` (Steele, Lea and Flood 2014).
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const fn key(seed: u64, draw: Draw, a: u64, b: u64) -> u64 {
    let h = mix(seed.wrapping_add((draw as u64).wrapping_mul(GOLDEN)));
    let h = mix(h.wrapping_add(GOLDEN) ^ a);
    mix(h.wrapping_add(GOLDEN) ^ b)
}

/// In (0, 1].
fn uniform(key: u64) -> f64 {
    ((key >> 11) + 1) as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// Standard normal, by Box and Muller.
fn normal(key: u64) -> f64 {
    let radius = (-2.0 * uniform(mix(key.wrapping_add(GOLDEN))).ln()).sqrt();
    radius * (TAU * uniform(mix(key.wrapping_add(GOLDEN.wrapping_mul(2))))).cos()
}

/// A healthy deviation: exp of a normal draw, cut at two standard deviations.
fn spread(sd: f64, key: u64) -> f64 {
    if sd > 0.0 { (sd * normal(key).clamp(-2.0, 2.0)).exp() } else { 1.0 }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float-to-integer cast saturates, which is what a clock should do"
)]
fn whole_ns(ns: f64) -> u64 {
    ns.round() as u64
}

const fn index(sweep: FaultSweep) -> usize {
    match sweep {
        FaultSweep::H2d => 0,
        FaultSweep::CorePair => 1,
    }
}

/// True when a fault under the load `wanted` shows under the profile `load`: the same name (`cpu:2`
/// is also written `cpu2`), or the name without its number.
fn is_load(wanted: &str, load: &str) -> bool {
    let same =
        |load: &str| wanted.chars().filter(|c| *c != ':').eq(load.chars().filter(|c| *c != ':'));
    same(load) || same(load.trim_end_matches(|c: char| c.is_ascii_digit()))
}

impl World {
    /// A machine at time 0, its ranks not bound. `seed` replaces the scenario's.
    ///
    /// # Errors
    /// [`Error::Format`] when the scenario is not valid.
    pub fn new(scenario: Scenario, seed: Option<u64>) -> Result<Self> {
        scenario.validate()?;
        let seed = seed.unwrap_or(scenario.seed);
        let places = scenario.cpu_places();
        let home = places.iter().position(|place| place.online).unwrap_or_default();
        let build = Build { scenario: &scenario, seed, places: &places };
        let links = [build.link(FaultSweep::H2d), build.link(FaultSweep::CorePair)];
        let artefacts = build.artefacts();
        let most_rules = links.iter().map(|link| link.rules.len()).max().unwrap_or_default();
        Ok(Self {
            cell: Cell { rules: Vec::with_capacity(most_rules), ..Cell::default() },
            seed,
            now_ns: 0,
            home,
            ranks: Default::default(),
            point: Point { load: "idle".to_owned(), ..Point::default() },
            links,
            artefacts,
            buffer_copies: Vec::new(),
            buffer: None,
            places,
            scenario,
        })
    }

    /// The scenario.
    #[must_use]
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// The seed in use.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The present CPUs with their places, ascending.
    #[must_use]
    pub fn cpu_places(&self) -> &[CpuPlace] {
        &self.places
    }

    /// Nanoseconds since the machine was made.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Lets time pass.
    pub fn advance(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
    }

    /// Sets the clock back to where a transfer was issued that goes on by itself.
    pub(super) fn turn_back(&mut self, ns: u64) {
        self.now_ns = self.now_ns.min(ns);
    }

    fn spend_us(&mut self, us: f64) {
        self.advance(whole_ns(us * 1e3));
    }

    /// Starts a point. Its transfers count from 0.
    pub fn begin_point(&mut self, context: &PointContext<'_>) {
        self.spend_us(self.scenario.machine.point_us);
        let point = &mut self.point;
        point.seq = context.seq;
        point.visit = context.visit;
        point.is_pair = context.sweep_is_pair;
        point.load.clear();
        point.load.push_str(context.load);
        point.transfers = [0; 2];
        self.cell.valid_for = None;
    }

    fn rank_index(rank: u32) -> Result<usize> {
        usize::try_from(rank).ok().filter(|_| rank < RANKS).ok_or_else(|| {
            Error::invalid("rank", format!("{rank}: a synthetic machine has the ranks 0 and 1"))
        })
    }

    /// Binds a rank to a CPU; copies are made by rank 0. A refused bind costs its time too and
    /// leaves the rank where it was. Failures with `at_point` count from the point that
    /// [`World::begin_point`] named last.
    ///
    /// # Errors
    /// [`Error::System`] for a CPU that is not there or offline (EINVAL), or that the scenario
    /// refuses (EPERM); [`Error::Invalid`] for a rank other than 0 and 1.
    pub fn bind(&mut self, rank: u32, cpu: CpuId) -> Result<()> {
        let rank_index = Self::rank_index(rank)?;
        self.spend_us(self.scenario.machine.bind_us);
        let refused = |errno| {
            let context = format!("binding rank {rank} to CPU {cpu} of the synthetic machine");
            Err(Error::system("sched_setaffinity", errno, context))
        };
        let Ok(position) = self.places.binary_search_by_key(&cpu, |place| place.cpu) else {
            return refused(libc::EINVAL);
        };
        let place = self.places[position];
        if !place.online {
            return refused(libc::EINVAL);
        }
        let fails = self.scenario.failure.iter().any(|failure| {
            failure.kind == FailureKind::BindRefused
                && failure.rank == Some(rank)
                && failure.cpus.as_ref().is_none_or(|cpus| cpus.contains(cpu.0))
                && failure.at_point.is_none_or(|at| self.point.seq >= at)
        });
        if place.refuses_bind || fails {
            return refused(libc::EPERM);
        }
        let rank = &mut self.ranks[rank_index];
        if rank.bound != Some(position) {
            *rank = Rank { bound: Some(position), moved: true };
            self.cell.valid_for = None;
        }
        Ok(())
    }

    /// Lets a rank run anywhere, which is on the first online CPU.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank other than 0 and 1.
    pub fn release(&mut self, rank: u32) -> Result<()> {
        let rank = Self::rank_index(rank)?;
        self.spend_us(self.scenario.machine.bind_us);
        if self.position(rank) != self.home {
            self.ranks[rank].moved = true;
            self.cell.valid_for = None;
        }
        self.ranks[rank].bound = None;
        Ok(())
    }

    /// The CPU that a rank runs on; before its first bind the first online one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank other than 0 and 1.
    pub fn running_cpu(&self, rank: u32) -> Result<CpuId> {
        let rank = Self::rank_index(rank)?;
        Ok(self.places[self.position(rank)].cpu)
    }

    fn position(&self, rank: usize) -> usize {
        self.ranks[rank].bound.unwrap_or(self.home)
    }

    /// Allocates a host buffer, which the next copies come from, and returns its number for
    /// [`World::use_host_buffer`]. Its first copies pay the scenario's allocation stalls.
    pub fn alloc_host(&mut self, _bytes: u64) -> usize {
        self.spend_us(self.scenario.machine.alloc_us);
        let number = self.buffer_copies.len();
        self.buffer_copies.push(0);
        self.buffer = Some(number);
        number
    }

    /// Makes the next copies come from a buffer of [`World::alloc_host`]. Stalls belong to a
    /// buffer: one that was allocated long ago but never used still pays its own.
    pub fn use_host_buffer(&mut self, number: usize) {
        self.buffer = Some(number);
    }

    /// Touches fresh pages.
    pub fn touch(&mut self, bytes: u64) {
        self.advance(whole_ns(bytes as f64 / self.scenario.machine.touch_gbps));
    }

    /// Page-locks touched pages.
    pub fn register(&mut self, bytes: u64) {
        self.advance(whole_ns(bytes as f64 / self.scenario.machine.register_gbps));
    }

    /// Allocates device memory.
    pub fn alloc_device(&mut self, _bytes: u64) {
        self.spend_us(self.scenario.machine.alloc_us);
    }

    /// One copy between host and device, by rank 0 from the CPU it runs on.
    ///
    /// # Errors
    /// [`Error::Backend`] for a failure of the scenario, or after `timeout` for a copy that hangs
    /// or takes longer; [`Error::Invalid`] for a device that is not there.
    pub fn copy(&mut self, device: DeviceId, bytes: u64, timeout: Duration) -> Result<CopyOutcome> {
        self.transfer(FaultSweep::H2d, [device; 2], bytes, timeout)
    }

    /// One all-gather of `bytes` per rank, from the CPUs that the ranks run on. Both ranks may use
    /// one device.
    ///
    /// # Errors
    /// As [`World::copy`]; a failure of one rank names it.
    pub fn all_gather(
        &mut self,
        device_pair: [DeviceId; 2],
        bytes: u64,
        timeout: Duration,
    ) -> Result<CopyOutcome> {
        self.transfer(FaultSweep::CorePair, device_pair, bytes, timeout)
    }

    fn transfer(
        &mut self,
        sweep: FaultSweep,
        devices: [DeviceId; 2],
        bytes: u64,
        timeout: Duration,
    ) -> Result<CopyOutcome> {
        let count = self.scenario.machine.devices;
        if let Some(device) = devices.iter().find(|device| device.0 >= count) {
            let message = format!("{device}: this machine has the devices 0 to {}", count - 1);
            return Err(Error::invalid("device", message));
        }
        let positions = devices.map(|device| device.0 as usize);
        if self.cell.valid_for != Some(sweep) {
            self.enter_cell(sweep);
        }
        let iteration = self.point.transfers[index(sweep)];
        self.point.transfers[index(sweep)] += 1;
        let bound_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        if let Some(failure) = self.cell.failure {
            let failure = &self.scenario.failure[failure];
            let error = injected(failure, sweep, devices, timeout);
            if failure.kind == FailureKind::Hang {
                self.advance(bound_ns);
            }
            return Err(error);
        }

        let link = &self.links[index(sweep)];
        let mut rate = self.cell.gbps * link.device_factor(self.seed, sweep, positions);
        let mut fixed_ns = link.spec.latency_us * 1e3;
        let mut corrupted = false;
        for rule in self.cell.rules.iter().map(|&rule| &link.rules[rule]) {
            if rule.devices.has(positions[0]) || rule.devices.has(positions[1]) {
                rate *= rule.factor;
                fixed_ns += rule.extra_ns;
                corrupted |= rule.corrupts;
            }
        }
        let mut added_ns = 0.0;
        let artefacts = &self.artefacts;
        if artefacts.drift_per_ns != 0.0 {
            rate *= (artefacts.drift_per_ns * self.now_ns as f64).exp();
        }
        for burst in &artefacts.bursts {
            if self.now_ns.wrapping_add(burst.phase_ns) % burst.period_ns < burst.window_ns {
                rate *= burst.factor;
            }
        }
        for step in &artefacts.steps {
            let hit = step.devices.has(positions[0]) || step.devices.has(positions[1]);
            if self.point.seq >= step.at_point && hit {
                rate *= step.factor;
                added_ns += step.extra_ns;
            }
        }
        let is_own = self.point.is_pair == (sweep == FaultSweep::CorePair);
        if is_own {
            let ranks = if self.point.is_pair { &mut self.ranks[..] } else { &mut self.ranks[..1] };
            if ranks.iter().any(|rank| rank.moved) {
                added_ns += artefacts.first_visit_ns;
                ranks.iter_mut().for_each(|rank| rank.moved = false);
            }
            if iteration == 0 && self.point.seq > 0 {
                for (every, ns) in &artefacts.checkpoints {
                    if self.point.seq.is_multiple_of(*every) {
                        added_ns += ns;
                    }
                }
            }
        }
        if sweep == FaultSweep::H2d
            && let Some(copies) = self.buffer.and_then(|buffer| self.buffer_copies.get_mut(buffer))
        {
            let due = artefacts.stalls.iter().filter(|(_, over)| *copies < *over);
            added_ns += due.map(|(ns, _)| ns).sum::<f64>();
            *copies += 1;
        }

        let mut ln = self.cell.visit_ln;
        if link.spec.noise > 0.0 {
            let draw = match sweep {
                FaultSweep::H2d => Draw::Noise,
                FaultSweep::CorePair => Draw::PairNoise,
            };
            ln += link.spec.noise * normal(key(self.seed, draw, self.point.seq, iteration));
        }
        let ns = whole_ns((fixed_ns + bytes as f64 / rate) * ln.exp() + added_ns);
        self.advance(ns.min(bound_ns));
        if ns > bound_ns {
            return Err(Error::timeout(call(sweep), timeout, Some(devices[0])));
        }
        Ok(CopyOutcome { ns, corrupted })
    }

    /// Works out what all transfers of the point share.
    fn enter_cell(&mut self, sweep: FaultSweep) {
        let is_pair = sweep == FaultSweep::CorePair;
        let cpus = [self.position(0), self.position(1)];
        let cores = cpus.map(|position| self.places[position].core);
        let Self { seed, point, links, cell, scenario, .. } = self;
        let (seed, link) = (*seed, &links[index(sweep)]);
        let is_own = point.is_pair == is_pair;

        cell.rules.clear();
        for (position, rule) in link.rules.iter().enumerate() {
            let related = match rule.relation {
                Relation::Any => true,
                Relation::SameCpu => cpus[0] == cpus[1],
                Relation::Siblings => cores[0] == cores[1] && cpus[0] != cpus[1],
            };
            let loaded = match &rule.load {
                Some(wanted) => is_load(wanted, &point.load),
                None => !(rule.spares_idle && point.load == "idle"),
            };
            if related
                && loaded
                && rule.first.has(cpus[0])
                && (!is_pair || rule.second.has(cpus[1]))
                && (rule.probability >= 1.0
                    || uniform(key(seed, Draw::Fault, point.seq, rule.index)) <= rule.probability)
            {
                cell.rules.push(position);
            }
        }
        cell.failure = scenario.failure.iter().position(|failure| {
            let concerns = failure.rank.is_none_or(|rank| is_pair || rank == 0);
            let happens = failure.at_point.is_some_and(|at| match failure.kind {
                FailureKind::RankDead => point.seq >= at,
                FailureKind::Hang | FailureKind::Error => point.seq == at && is_own,
                FailureKind::BindRefused => false,
            });
            concerns && happens
        });
        let spread = |core: u32| link.core_spread.get(core as usize).copied().unwrap_or(1.0);
        cell.gbps = link.spec.gbps * spread(cores[0]);
        if is_pair {
            cell.gbps *= spread(cores[1]);
        }
        let dips = link.spec.dip_probability;
        if is_own && dips > 0.0 && uniform(key(seed, Draw::Dip, point.seq, 0)) <= dips {
            cell.gbps *= link.spec.dip_factor;
        }
        cell.visit_ln = if link.spec.visit_noise > 0.0 {
            link.spec.visit_noise * normal(key(seed, Draw::Visit, point.visit, 0))
        } else {
            0.0
        };
        cell.valid_for = Some(sweep);
    }
}

/// Name of the code of a rank's death.
pub(crate) const RANK_DEAD: &str = "rank dead";

/// The error of a transfer that the scenario makes fail.
fn injected(
    failure: &Failure,
    sweep: FaultSweep,
    devices: [DeviceId; 2],
    timeout: Duration,
) -> Error {
    let device = devices[usize::from(failure.rank == Some(1))];
    let mut error = match failure.kind {
        FailureKind::Hang => Error::timeout(call(sweep), timeout, Some(device)),
        FailureKind::RankDead | FailureKind::Error | FailureKind::BindRefused => {
            let (name, message) = if failure.kind == FailureKind::RankDead {
                (RANK_DEAD, "the rank ended")
            } else {
                ("injected", "the scenario makes this point fail")
            };
            Error::Backend(Box::new(BackendError {
                call: failure.call.clone().unwrap_or_else(|| call(sweep).to_owned()),
                code: failure.code.unwrap_or(i64::from(libc::ECONNRESET)),
                name: name.to_owned(),
                message: Some(message.to_owned()),
                device: Some(device),
                rank: None,
                advice: None,
                timed_out: false,
            }))
        }
    };
    if let Error::Backend(error) = &mut error {
        error.rank = failure.rank;
    }
    error
}

const fn call(sweep: FaultSweep) -> &'static str {
    match sweep {
        FaultSweep::H2d => "copy",
        FaultSweep::CorePair => "all_gather",
    }
}

impl Link {
    fn device_factor(&self, seed: u64, sweep: FaultSweep, devices: [usize; 2]) -> f64 {
        match sweep {
            FaultSweep::H2d => self.device_spread.get(devices[0]).copied().unwrap_or(1.0),
            FaultSweep::CorePair => {
                let (low, high) = (devices[0].min(devices[1]), devices[0].max(devices[1]));
                let key = key(seed, Draw::PairSpread, low as u64, high as u64);
                spread(self.spec.device_spread, key)
            }
        }
    }
}

/// Turns lists into masks, once.
struct Build<'a> {
    scenario: &'a Scenario,
    seed: u64,
    places: &'a [CpuPlace],
}

impl Build<'_> {
    fn cpus(&self, list: Option<&IdList>) -> Mask {
        Mask::new(self.places.len(), list, |id| {
            self.places.binary_search_by_key(&CpuId(id), |place| place.cpu).ok()
        })
    }

    fn devices(&self, list: Option<&IdList>) -> Mask {
        Mask::new(self.scenario.machine.devices as usize, list, |id| Some(id as usize))
    }

    fn link(&self, sweep: FaultSweep) -> Link {
        let spec = match sweep {
            FaultSweep::H2d => self.scenario.h2d.clone(),
            FaultSweep::CorePair => self.scenario.all_gather.clone(),
        };
        let spreads = |draw: Draw, sd: f64, count: u64| -> Vec<f64> {
            if sd > 0.0 {
                (0..count).map(|id| spread(sd, key(self.seed, draw, id, 0))).collect()
            } else {
                Vec::new()
            }
        };
        let cores = self.places.iter().map(|place| u64::from(place.core) + 1).max();
        let devices = u64::from(self.scenario.machine.devices);
        let faults = self.scenario.fault.iter().enumerate();
        Link {
            core_spread: spreads(Draw::CoreSpread, spec.core_spread, cores.unwrap_or_default()),
            device_spread: spreads(Draw::DeviceSpread, spec.device_spread, devices),
            rules: faults
                .filter(|(_, fault)| fault.resolved_sweep() == sweep)
                .map(|(index, fault)| self.rule(index as u64, fault, sweep))
                .collect(),
            spec,
        }
    }

    fn rule(&self, index: u64, fault: &Fault, sweep: FaultSweep) -> Rule {
        let first = match sweep {
            FaultSweep::H2d => &fault.cpus,
            FaultSweep::CorePair => &fault.rank0,
        };
        Rule {
            index,
            first: self.cpus(first.as_ref()),
            second: self.cpus(fault.rank1.as_ref()),
            devices: self.devices(fault.devices.as_ref()),
            relation: match fault.kind {
                FaultKind::SameCore => Relation::SameCpu,
                FaultKind::SmtSibling => Relation::Siblings,
                _ => Relation::Any,
            },
            load: fault.load.clone(),
            spares_idle: fault.kind == FaultKind::LoadSensitive,
            probability: fault.probability.unwrap_or(1.0),
            factor: fault.factor.unwrap_or(1.0),
            extra_ns: fault.extra_us.unwrap_or_default() * 1e3,
            corrupts: fault.kind == FaultKind::DataCorruption,
        }
    }

    fn artefacts(&self) -> Artefacts {
        let mut all = Artefacts::default();
        for (index, artefact) in self.scenario.artefact.iter().enumerate() {
            let extra_ns = artefact.extra_us.unwrap_or_default() * 1e3
                + artefact.extra_ms.unwrap_or_default() * 1e6;
            let factor = artefact.factor.unwrap_or(1.0);
            match artefact.kind {
                ArtefactKind::AllocationStall => {
                    let over = artefact.over.unwrap_or(1);
                    all.stalls.push((extra_ns / f64::from(over), u64::from(over)));
                }
                ArtefactKind::FirstVisit => all.first_visit_ns += extra_ns,
                ArtefactKind::Drift => {
                    all.drift_per_ns += artefact.per_hour.unwrap_or_default() / 3.6e12;
                }
                ArtefactKind::Burst => {
                    let period = artefact.every_s.unwrap_or(1.0) * 1e9;
                    let phase = uniform(key(self.seed, Draw::Phase, index as u64, 0));
                    all.bursts.push(Burst {
                        period_ns: whole_ns(period).max(1),
                        window_ns: whole_ns(artefact.for_s.unwrap_or_default() * 1e9),
                        phase_ns: whole_ns(period * phase),
                        factor,
                    });
                }
                ArtefactKind::Checkpoint => {
                    all.checkpoints.push((artefact.every_points.unwrap_or(1), extra_ns));
                }
                ArtefactKind::TimeStep => all.steps.push(Step {
                    at_point: artefact.at_point.unwrap_or_default(),
                    factor,
                    extra_ns,
                    devices: self.devices(artefact.devices.as_ref()),
                }),
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const LONG: Duration = Duration::from_secs(3600);
    /// 16 CPUs, cores of two adjacent threads, 2 nodes, 4 devices, no noise.
    const QUIET: &str = "[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n\
                         [h2d]\nnoise = 0\n[all_gather]\nnoise = 0\n";

    fn world(text: &str) -> World {
        World::new(Scenario::parse(text, "test").unwrap(), None).unwrap()
    }

    fn quiet(more: &str) -> World {
        world(&format!("{QUIET}{more}"))
    }

    fn begin(world: &mut World, seq: u64, sweep_is_pair: bool, load: &str) {
        world.begin_point(&PointContext { seq, visit: seq, sweep_is_pair, load });
    }

    fn copy(world: &mut World, device: u32) -> u64 {
        world.copy(DeviceId(device), 16 * MIB, LONG).unwrap().ns
    }

    /// One copy of 16 MiB at a fresh point.
    fn h2d(world: &mut World, cpu: u32, device: u32) -> u64 {
        begin(world, 1, false, "idle");
        world.bind(0, CpuId(cpu)).unwrap();
        copy(world, device)
    }

    /// One all-gather of 8 MiB on devices 0 and 1 at a fresh point.
    fn pair(world: &mut World, cpu0: u32, cpu1: u32) -> u64 {
        begin(world, 1, true, "idle");
        world.bind(0, CpuId(cpu0)).unwrap();
        world.bind(1, CpuId(cpu1)).unwrap();
        world.all_gather([DeviceId(0), DeviceId(1)], 8 * MIB, LONG).unwrap().ns
    }

    // By hand: 12 us + 16,777,216 B at 58.5 B/ns (286,790.02 ns), at half the rate (573,580.03 ns);
    // 180 us + 8,388,608 B at 46 B/ns (182,361.04 ns), at half the rate (364,722.09 ns).
    const H2D: u64 = 298_790;
    const H2D_HALF: u64 = 585_580;
    const PAIR: u64 = 362_361;
    const PAIR_HALF: u64 = 544_722;

    #[test]
    fn a_healthy_transfer_takes_latency_plus_bytes_over_rate() {
        let mut world = quiet("");
        assert_eq!(h2d(&mut world, 0, 0), H2D);
        assert_eq!(h2d(&mut world, 15, 3), H2D);
        assert_eq!(pair(&mut world, 0, 9), PAIR);
        let before = world.now_ns();
        assert_eq!(
            world.copy(DeviceId(1), 0, LONG).unwrap(),
            CopyOutcome { ns: 12_000, corrupted: false }
        );
        assert_eq!(world.now_ns() - before, 12_000);
    }

    #[test]
    fn set_up_costs_virtual_time() {
        let mut world = quiet("");
        let mut spent = |call: &mut dyn FnMut(&mut World)| {
            let before = world.now_ns();
            call(&mut world);
            world.now_ns() - before
        };
        assert_eq!(spent(&mut |world| world.bind(0, CpuId(3)).unwrap()), 50_000);
        assert_eq!(spent(&mut |world| assert!(world.bind(0, CpuId(99)).is_err())), 50_000);
        assert_eq!(spent(&mut |world| begin(world, 0, false, "idle")), 5_000);
        assert_eq!(spent(&mut |world| assert_eq!(world.alloc_host(MIB), 0)), 200_000);
        assert_eq!(spent(&mut |world| world.alloc_device(MIB)), 200_000);
        assert_eq!(spent(&mut |world| world.touch(4_000_000)), 1_000_000);
        assert_eq!(spent(&mut |world| world.register(4_000_000)), 200_000);
        assert_eq!(spent(&mut |world| world.advance(17)), 17);
    }

    /// Mean and standard deviation.
    fn moments(values: &[f64]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean, variance.sqrt())
    }

    /// 20,000 normal draws: the mean is within 4 standard errors (4/√n = 0.028 sd), the standard
    /// deviation within 4 of its own (4/√2n = 0.02).
    fn assert_normal(values: &[f64], sd: f64) {
        assert_eq!(values.len(), 20_000);
        let (mean, found) = moments(values);
        assert!(mean.abs() < 0.028 * sd, "mean {mean} of sd {sd}");
        assert!((found / sd - 1.0).abs() < 0.02, "sd {found}, wanted {sd}");
        let beyond = values.iter().filter(|x| x.abs() > 1.96 * sd).count();
        // 5 % of 20,000, with the binomial's 4 standard deviations.
        assert!((877..=1123).contains(&beyond), "{beyond} beyond 1.96 sd");
    }

    fn ln_ratio(ns: u64, of: u64) -> f64 {
        (ns as f64 / of as f64).ln()
    }

    #[test]
    fn noise_is_log_normal_within_and_between_points() {
        let mut world = world("[h2d]\nnoise = 0.015\n[all_gather]\nnoise = 0.03\n");
        begin(&mut world, 5, false, "idle");
        let within: Vec<f64> = (0..20_000).map(|_| ln_ratio(copy(&mut world, 0), H2D)).collect();
        assert_normal(&within, 0.015);
        let between: Vec<f64> = (0..20_000)
            .map(|seq| {
                begin(&mut world, seq, true, "idle");
                let pair = [DeviceId(0), DeviceId(1)];
                ln_ratio(world.all_gather(pair, 8 * MIB, LONG).unwrap().ns, PAIR)
            })
            .collect();
        assert_normal(&between, 0.03);
        let (_, lagged) = moments(&within.windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>());
        // Independent draws differ by √2 sd.
        assert!((lagged / (0.015 * 2_f64.sqrt()) - 1.0).abs() < 0.03, "{lagged}");
    }

    #[test]
    fn visit_noise_is_shared_by_the_points_of_a_visit() {
        let mut world = quiet("");
        world.links[0].spec.visit_noise = 0.1;
        let mut at = |seq, visit| {
            world.begin_point(&PointContext { seq, visit, sweep_is_pair: false, load: "idle" });
            [copy(&mut world, 0), copy(&mut world, 1)]
        };
        let first = at(10, 10);
        assert_eq!(first[0], first[1]);
        assert_eq!(at(11, 10), first);
        assert_ne!(at(12, 12), first);
        let visits: Vec<f64> = (0..20_000).map(|n| ln_ratio(at(n, n)[0], H2D)).collect();
        assert_normal(&visits, 0.1);
    }

    #[test]
    fn draws_do_not_depend_on_the_order_of_execution() {
        let text = "[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\n\
                    [h2d]\nvisit_noise = 0.05\ncore_spread = 0.02\ndevice_spread = 0.02\n\
                    dip_probability = 0.2\n\
                    [[fault]]\nkind = \"node_ceiling\"\nfactor = 0.5\nprobability = 0.5\n";
        let run = |order: &[u64]| {
            let mut world = world(text);
            let mut times = vec![Vec::new(); order.len()];
            for &seq in order {
                begin(&mut world, seq, false, "idle");
                world.bind(0, CpuId(u32::try_from(seq % 16).unwrap())).unwrap();
                times[usize::try_from(seq).unwrap()] =
                    (0..4).map(|device| copy(&mut world, device)).collect();
            }
            times
        };
        let forward: Vec<u64> = (0..200).collect();
        let shuffled: Vec<u64> = (0..200).map(|i| i * 77 % 200).collect();
        let times = run(&forward);
        assert_eq!(times, run(&shuffled));
        let distinct: std::collections::BTreeSet<_> = times.iter().flatten().collect();
        assert!(distinct.len() > 780, "{} of 800 differ", distinct.len());
    }

    #[test]
    fn the_seed_decides_and_can_be_replaced() {
        let scenario = Scenario::parse("seed = 3", "test").unwrap();
        let first = |seed| {
            let mut world = World::new(scenario.clone(), seed).unwrap();
            (world.seed(), copy(&mut world, 0))
        };
        assert_eq!(first(None), first(Some(3)));
        assert_ne!(first(None).1, first(Some(4)).1);
    }

    #[test]
    fn spreads_belong_to_cores_and_devices_and_are_cut() {
        let text = "[machine]\ncpus = 8192\ndevices = 1024\n[h2d]\nnoise = 0\nlatency_us = 0\n\
                    core_spread = 0.04\n[all_gather]\nnoise = 0\ncore_spread = 0.04\n\
                    latency_us = 0\n";
        let mut by_core = world(text);
        let ln = |ns| -ln_ratio(ns, 286_790);
        let cores: Vec<f64> = (0..8192).map(|cpu| ln(h2d(&mut by_core, cpu, 0))).collect();
        assert!(cores.chunks(2).all(|threads| threads[0].to_bits() == threads[1].to_bits()));
        assert_eq!(h2d(&mut by_core, 6, 900), h2d(&mut by_core, 7, 3));
        let largest = cores.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        assert!((largest - 0.08).abs() < 1e-5, "cut at 2 sd: {largest}");
        // Of a normal variable limited to ±2 sd the standard deviation is 0.9595 sd:
        // 1 - 2·2·φ(2) - 2·Q(2) + 2·4·Q(2) = 0.9206 = 0.9595².
        let (mean, sd) = moments(&cores);
        assert!(mean.abs() < 0.0025 && (sd / 0.04 - 0.9595).abs() < 0.045, "{mean} {sd}");

        // 8,388,608 B at 46 B/ns; the deviations of both cores add up in ln(rate).
        let both = -ln_ratio(pair(&mut by_core, 10, 21), 182_361);
        assert!((both - cores[10] - cores[21]).abs() < 1e-4, "{both}");

        let mut by_device = world(&text.replace("core_spread", "device_spread"));
        let devices: Vec<f64> =
            (0..1024).map(|device| ln(h2d(&mut by_device, 5, device))).collect();
        assert_eq!(h2d(&mut by_device, 5, 9), h2d(&mut by_device, 700, 9));
        let (mean, sd) = moments(&devices);
        assert!(mean.abs() < 0.005 && (sd / 0.04 - 0.9595).abs() < 0.09, "{mean} {sd}");
        let mut gather =
            |a, b| by_device.all_gather([DeviceId(a), DeviceId(b)], MIB, LONG).unwrap().ns;
        assert_eq!(gather(3, 4), gather(4, 3));
        assert_ne!(gather(3, 4), gather(3, 5));
    }

    #[test]
    fn a_dip_takes_whole_points() {
        let mut world = quiet("");
        world.links[0].spec.dip_probability = 0.25;
        let mut dips = 0;
        for seq in 0..4000 {
            begin(&mut world, seq, false, "idle");
            let times = [copy(&mut world, 0), copy(&mut world, 2)];
            // 12,000 + 286,790.02 ÷ 0.3 = 967,967.
            assert!(times == [H2D; 2] || times == [967_967; 2], "{times:?}");
            dips += u32::from(times[0] != H2D);
        }
        // 1,000 ± 4 binomial standard deviations.
        assert!((890..=1110).contains(&dips), "{dips}");
    }

    /// Cells of a sweep of 16 × 4 (or 16 × 16) that take `slow` where all others take `normal`.
    fn slow_cells(world: &mut World, pairs: bool, normal: u64, slow: u64) -> Vec<(u32, u32)> {
        let mut cells = Vec::new();
        for row in 0..16 {
            for column in 0..if pairs { 16 } else { 4 } {
                let ns = if pairs { pair(world, row, column) } else { h2d(world, row, column) };
                if ns == slow {
                    cells.push((row, column));
                } else {
                    assert_eq!(ns, normal, "cell {row}, {column}");
                }
            }
        }
        cells
    }

    fn rectangle(rows: impl Iterator<Item = u32>, columns: &[u32]) -> Vec<(u32, u32)> {
        rows.flat_map(|row| columns.iter().map(move |&column| (row, column))).collect()
    }

    #[test]
    fn faults_of_copies_hit_exactly_their_cells() {
        for (fault, cells) in [
            ("kind = \"slow_device\"\ndevices = \"2\"", rectangle(0..16, &[2])),
            ("kind = \"slow_core\"\ncpus = [5, 9]", rectangle([5, 9].into_iter(), &[0, 1, 2, 3])),
            (
                "kind = \"slow_block\"\ncpus = \"8-15\"\ndevices = \"2-3\"",
                rectangle(8..16, &[2, 3]),
            ),
            ("kind = \"slow_cell\"\ncpus = \"3\"\ndevices = \"1\"", vec![(3, 1)]),
            ("kind = \"node_ceiling\"", rectangle(0..16, &[0, 1, 2, 3])),
            ("kind = \"node_ceiling\"\ncpus = \"0-7\"", rectangle(0..8, &[0, 1, 2, 3])),
        ] {
            let mut world = quiet(&format!("[[fault]]\n{fault}\nfactor = 0.5\n"));
            assert_eq!(slow_cells(&mut world, false, H2D, H2D_HALF), cells, "{fault}");
            assert_eq!(slow_cells(&mut world, true, PAIR, PAIR_HALF), [], "{fault}");
        }
    }

    #[test]
    fn faults_of_pairs_hit_exactly_their_cells() {
        let all: Vec<u32> = (0..16).collect();
        for (fault, cells) in [
            ("kind = \"slow_rank0_core\"\nrank0 = \"5\"", rectangle(5..6, &all)),
            ("kind = \"slow_rank1_core\"\nrank1 = \"5,7\"", rectangle(0..16, &[5, 7])),
            ("kind = \"slow_block\"\nrank0 = \"0-3\"\nrank1 = \"8-9\"", rectangle(0..4, &[8, 9])),
            ("kind = \"slow_cell\"\nrank0 = \"3\"\nrank1 = \"11\"", vec![(3, 11)]),
            ("kind = \"same_core\"", (0..16).map(|cpu| (cpu, cpu)).collect()),
            ("kind = \"smt_sibling\"", (0..16).map(|cpu| (cpu, cpu ^ 1)).collect()),
            (
                "kind = \"slow_device\"\nsweep = \"core_pair\"\ndevices = \"1\"",
                rectangle(0..16, &all),
            ),
            ("kind = \"slow_device\"\nsweep = \"core_pair\"\ndevices = \"2\"", vec![]),
            ("kind = \"node_ceiling\"\nsweep = \"core_pair\"", rectangle(0..16, &all)),
        ] {
            let mut world = quiet(&format!("[[fault]]\n{fault}\nfactor = 0.5\n"));
            assert_eq!(slow_cells(&mut world, true, PAIR, PAIR_HALF), cells, "{fault}");
            assert_eq!(slow_cells(&mut world, false, H2D, H2D_HALF), [], "{fault}");
        }
    }

    #[test]
    fn effects_multiply_the_rate_and_add_fixed_time() {
        let mut world = quiet(
            "[[fault]]\nkind = \"slow_device\"\ndevices = \"2\"\nfactor = 0.8\nextra_us = 30\n\
             [[fault]]\nkind = \"slow_core\"\ncpus = \"4\"\nfactor = 0.5\n",
        );
        // 42,000 + 286,790.02 ÷ 0.8 and 42,000 + 286,790.02 ÷ 0.4.
        assert_eq!(h2d(&mut world, 0, 2), 400_488);
        assert_eq!(h2d(&mut world, 4, 2), 758_975);
        assert_eq!(h2d(&mut world, 4, 1), H2D_HALF);
    }

    #[test]
    fn loads_decide_where_a_fault_shows() {
        let shows = |fault: &str| {
            let mut world = quiet(&format!("[[fault]]\n{fault}\nfactor = 0.5\n"));
            ["idle", "cpu:2", "cpu:12", "device"].map(|load| {
                begin(&mut world, 1, false, load);
                copy(&mut world, 0) == H2D_HALF
            })
        };
        assert_eq!(shows("kind = \"load_sensitive\""), [false, true, true, true]);
        assert_eq!(shows("kind = \"load_sensitive\"\nload = \"cpu\""), [false, true, true, false]);
        assert_eq!(shows("kind = \"node_ceiling\""), [true; 4]);
        assert_eq!(shows("kind = \"node_ceiling\"\nload = \"cpu:2\""), [false, true, false, false]);
        assert_eq!(shows("kind = \"node_ceiling\"\nload = \"idle\""), [true, false, false, false]);
    }

    #[test]
    fn a_probability_is_drawn_per_point_and_fault() {
        let fault = "[[fault]]\nkind = \"slow_device\"\nprobability = 0.5\nfactor = 0.5\n";
        let mut world = quiet(&format!("{fault}devices = \"0\"\n{fault}devices = \"1\"\n"));
        let mut seen = [[0; 2]; 2];
        for seq in 0..4000 {
            begin(&mut world, seq, false, "idle");
            let hit = [0, 1].map(|device| usize::from(copy(&mut world, device) == H2D_HALF));
            assert_eq!(usize::from(copy(&mut world, 0) == H2D_HALF), hit[0], "point {seq}");
            seen[hit[0]][hit[1]] += 1;
        }
        // Four equally likely outcomes: 1,000 ± 4 binomial standard deviations.
        assert!(seen.iter().flatten().all(|n| (890..=1110).contains(n)), "{seen:?}");
    }

    #[test]
    fn corruption_is_reported_where_it_is() {
        let mut world = quiet(
            "[[fault]]\nkind = \"data_corruption\"\ndevices = \"1\"\n\
             [[fault]]\nkind = \"data_corruption\"\nrank0 = \"4\"\n\
             [[fault]]\nkind = \"data_corruption\"\ndevices = \"3\"\nprobability = 0.5\n",
        );
        let corrupted = |world: &mut World, device| {
            let outcome = world.copy(DeviceId(device), 16 * MIB, LONG).unwrap();
            assert_eq!(outcome.ns, H2D);
            outcome.corrupted
        };
        assert_eq!([0, 1, 2].map(|device| corrupted(&mut world, device)), [false, true, false]);
        let mut bad = 0;
        for seq in 0..1000 {
            begin(&mut world, seq, false, "idle");
            bad += u32::from(corrupted(&mut world, 3));
        }
        assert!((436..=564).contains(&bad), "{bad}");
        let gather = |world: &mut World| {
            world.all_gather([DeviceId(0), DeviceId(2)], MIB, LONG).unwrap().corrupted
        };
        assert!(!gather(&mut world));
        world.bind(0, CpuId(4)).unwrap();
        assert!(gather(&mut world));
    }

    #[test]
    fn a_stall_belongs_to_the_first_copies_of_a_buffer() {
        let stall = "[[artefact]]\nkind = \"allocation_stall\"\nextra_ms = 25\n";
        let mut world = quiet(stall);
        assert_eq!(copy(&mut world, 0), H2D);
        let (first, second) = (world.alloc_host(MIB), world.alloc_host(MIB));
        assert_eq!([0, 1].map(|device| copy(&mut world, device)), [H2D + 25_000_000, H2D]);
        world.use_host_buffer(first);
        assert_eq!([0, 1].map(|device| copy(&mut world, device)), [H2D + 25_000_000, H2D]);
        world.use_host_buffer(second);
        assert_eq!(copy(&mut world, 0), H2D);
        world.alloc_host(MIB);
        world.all_gather([DeviceId(0); 2], MIB, LONG).unwrap();
        assert_eq!(copy(&mut world, 3), H2D + 25_000_000);

        let mut world = quiet(&format!("{stall}over = 4\n"));
        world.alloc_host(MIB);
        let times = [0; 6].map(|device| copy(&mut world, device) - H2D);
        assert_eq!(times, [6_250_000, 6_250_000, 6_250_000, 6_250_000, 0, 0]);
    }

    #[test]
    fn a_first_visit_costs_once_per_change_of_cpu() {
        let mut world = quiet("[[artefact]]\nkind = \"first_visit\"\nextra_us = 40\n");
        assert_eq!(copy(&mut world, 0), H2D);
        for (cpu, extra) in [(3, 40_000), (3, 0), (4, 40_000), (3, 40_000)] {
            assert_eq!(h2d(&mut world, cpu, 0), H2D + extra);
            assert_eq!(copy(&mut world, 1), H2D);
        }
        for (cpu0, cpu1, extra) in
            [(3, 7, 40_000), (3, 7, 0), (3, 8, 40_000), (4, 8, 40_000), (5, 9, 40_000)]
        {
            assert_eq!(pair(&mut world, cpu0, cpu1), PAIR + extra, "{cpu0} {cpu1}");
        }
    }

    #[test]
    fn drift_follows_the_clock() {
        let mut world = quiet("[[artefact]]\nkind = \"drift\"\nper_hour = -0.1\n");
        assert_eq!(copy(&mut world, 0), H2D);
        world.advance(2 * 3_600_000_000_000 - world.now_ns());
        // 12,000 + 286,790.02 × exp(0.2) = 12,000 + 286,790.02 × 1.22140276.
        assert_eq!(copy(&mut world, 0), 362_286);
    }

    #[test]
    fn bursts_return_with_their_period() {
        let text = "[[artefact]]\nkind = \"burst\"\nfactor = 0.5\nevery_s = 10\nfor_s = 2\n";
        let starts = |seed: u64| {
            let scenario = Scenario::parse(&format!("{QUIET}{text}"), "test").unwrap();
            let mut world = World::new(scenario, Some(seed)).unwrap();
            let mut slow = Vec::new();
            for tick in 0..400_u64 {
                world.advance(tick * 100_000_000 - world.now_ns());
                match copy(&mut world, 0) {
                    H2D_HALF => slow.push(tick),
                    ns => assert_eq!(ns, H2D),
                }
            }
            slow
        };
        let slow = starts(7);
        assert_eq!(slow.len(), 80, "2 s of every 10 s of 40 s, seen every 0.1 s");
        let phases: std::collections::BTreeSet<u64> = slow.iter().map(|tick| tick % 100).collect();
        assert_eq!(phases.len(), 20);
        assert_ne!(slow, starts(8));
    }

    #[test]
    fn checkpoints_cost_the_first_transfer_of_their_point() {
        let mut world =
            quiet("[[artefact]]\nkind = \"checkpoint\"\nextra_us = 700\nevery_points = 3\n");
        for seq in 0..10 {
            begin(&mut world, seq, false, "idle");
            let extra = if [3, 6, 9].contains(&seq) { 700_000 } else { 0 };
            assert_eq!([0, 0].map(|device| copy(&mut world, device)), [H2D + extra, H2D], "{seq}");
        }
    }

    #[test]
    fn steps_last_and_may_concern_one_device() {
        let mut world = quiet(
            "[[artefact]]\nkind = \"time_step\"\nat_point = 5\nfactor = 0.5\n\
             [[artefact]]\nkind = \"time_step\"\nat_point = 8\nextra_ms = 2\ndevices = [1]\n",
        );
        for (seq, expected) in [
            (4, [H2D, H2D]),
            (5, [H2D_HALF, H2D_HALF]),
            (7, [H2D_HALF, H2D_HALF]),
            (8, [H2D_HALF, H2D_HALF + 2_000_000]),
            (900, [H2D_HALF, H2D_HALF + 2_000_000]),
        ] {
            begin(&mut world, seq, false, "idle");
            assert_eq!([0, 1].map(|device| copy(&mut world, device)), expected, "point {seq}");
        }
    }

    #[test]
    fn binds_that_the_kernel_refuses_leave_the_rank_in_place() {
        let text =
            QUIET.replace("devices = 4", "devices = 4\noffline = \"0,7\"\nrefuse_bind = [8]");
        let mut world = world(&format!(
            "{text}[[failure]]\nkind = \"bind_refused\"\nrank = 1\ncpus = \"4-5\"\n\
             [[failure]]\nkind = \"bind_refused\"\nrank = 1\nat_point = 9\n"
        ));
        assert_eq!(world.running_cpu(0).unwrap(), CpuId(1), "the first online CPU");
        world.bind(0, CpuId(3)).unwrap();
        for (rank, cpu, errno) in [
            (0, 7, libc::EINVAL),
            (0, 16, libc::EINVAL),
            (0, 8, libc::EPERM),
            (1, 4, libc::EPERM),
            (1, 5, libc::EPERM),
        ] {
            let error = world.bind(rank, CpuId(cpu)).unwrap_err();
            assert_eq!(error.call(), Some("sched_setaffinity"));
            assert_eq!(error.code(), Some(i64::from(errno)), "{error}");
            assert!(error.to_string().contains(&format!("rank {rank} to CPU {cpu}")), "{error}");
        }
        assert_eq!(world.running_cpu(0).unwrap(), CpuId(3));
        world.bind(0, CpuId(4)).unwrap();
        world.bind(1, CpuId(6)).unwrap();
        begin(&mut world, 9, true, "idle");
        assert!(world.bind(1, CpuId(6)).is_err());
        world.bind(0, CpuId(6)).unwrap();
        assert_eq!(world.bind(2, CpuId(6)).unwrap_err().kind(), "invalid");
        assert_eq!(world.release(2).unwrap_err().kind(), "invalid");
        assert_eq!(world.running_cpu(1).unwrap(), CpuId(6));
        assert!(world.running_cpu(2).is_err());
        world.release(0).unwrap();
        assert_eq!(world.running_cpu(0).unwrap(), CpuId(1), "anywhere is the first online CPU");
    }

    fn gather_error(world: &mut World, seq: u64, timeout: Duration) -> Option<Error> {
        begin(world, seq, true, "idle");
        world.all_gather([DeviceId(2), DeviceId(3)], MIB, timeout).err()
    }

    #[test]
    fn an_injected_error_names_call_code_and_rank() {
        let mut world = quiet(
            "[[failure]]\nkind = \"error\"\nat_point = 4\ncall = \"aclrtMemcpyAsync\"\n\
             code = 507899\nrank = 1\n\
             [[failure]]\nkind = \"error\"\nat_point = 6\ncall = \"other\"\ncode = -3\n",
        );
        let error = gather_error(&mut world, 4, LONG).unwrap();
        assert_eq!((error.kind(), error.call()), ("backend", Some("aclrtMemcpyAsync")));
        assert_eq!((error.code(), error.rank()), (Some(507_899), Some(1)));
        assert_eq!(error.device(), Some(DeviceId(3)), "rank 1's device");
        assert!(gather_error(&mut world, 5, LONG).is_none());
        begin(&mut world, 4, false, "idle");
        assert!(world.copy(DeviceId(0), MIB, LONG).is_ok(), "rank 1 makes no copies");
        begin(&mut world, 6, false, "idle");
        let error = world.copy(DeviceId(1), MIB, LONG).unwrap_err();
        assert_eq!((error.code(), error.rank()), (Some(-3), None));
        assert_eq!(error.device(), Some(DeviceId(1)));
        assert!(world.copy(DeviceId(1), MIB, LONG).is_err(), "the whole point fails");
    }

    #[test]
    fn a_hang_lasts_as_long_as_the_caller_waits() {
        let mut world = quiet("[[failure]]\nkind = \"hang\"\nat_point = 4\nrank = 0\n");
        assert!(gather_error(&mut world, 3, LONG).is_none());
        let before = world.now_ns();
        let error = gather_error(&mut world, 4, Duration::from_millis(1500)).unwrap();
        assert_eq!((error.kind(), error.rank()), ("timeout", Some(0)));
        assert_eq!(world.now_ns() - before, 5_000 + 1_500_000_000);
        assert!(gather_error(&mut world, 5, LONG).is_none());
    }

    #[test]
    fn a_dead_rank_stays_dead() {
        let mut world = quiet("[[failure]]\nkind = \"rank_dead\"\nrank = 1\nat_point = 4\n");
        assert!(gather_error(&mut world, 3, LONG).is_none());
        for seq in [4, 5, 900] {
            let error = gather_error(&mut world, seq, LONG).unwrap();
            assert_eq!((error.kind(), error.rank()), ("backend", Some(1)));
            assert!(error.to_string().contains("rank 1"), "{error}");
        }
        assert_eq!(h2d(&mut world, 0, 0), H2D);
    }

    #[test]
    fn a_transfer_longer_than_the_timeout_is_not_awaited() {
        let mut world = quiet("");
        assert!(world.copy(DeviceId(0), 16 * MIB, Duration::from_nanos(H2D)).is_ok());
        let before = world.now_ns();
        let error = world.copy(DeviceId(0), 16 * MIB, Duration::from_nanos(H2D - 1)).unwrap_err();
        assert_eq!((error.kind(), error.device()), ("timeout", Some(DeviceId(0))));
        assert_eq!(world.now_ns() - before, H2D - 1);
    }

    #[test]
    fn a_device_that_is_not_there_is_refused() {
        let mut world = quiet("");
        let error = world.copy(DeviceId(4), MIB, LONG).unwrap_err().to_string();
        assert!(error.contains("4: this machine has the devices 0 to 3"), "{error}");
        assert!(world.all_gather([DeviceId(0), DeviceId(9)], MIB, LONG).is_err());
    }

    #[test]
    fn copies_inside_a_pair_point_leave_its_draws_alone() {
        let text = format!(
            "{}[[artefact]]\nkind = \"first_visit\"\nextra_us = 40\n",
            QUIET.replace("noise = 0", "noise = 0.02")
        );
        let mut alone = world(&text);
        let mut staged = world(&text);
        begin(&mut staged, 1, true, "idle");
        staged.bind(0, CpuId(1)).unwrap();
        copy(&mut staged, 0);
        staged.bind(1, CpuId(2)).unwrap();
        let gathered = staged.all_gather([DeviceId(0), DeviceId(1)], 8 * MIB, LONG).unwrap().ns;
        assert_eq!(pair(&mut alone, 1, 2), gathered);
    }

    #[test]
    fn a_scenario_changed_in_code_is_checked() {
        let mut scenario = Scenario::default();
        scenario.machine.devices = 0;
        let error = World::new(scenario, None).unwrap_err().to_string();
        assert!(error.contains("machine.devices"), "{error}");
    }

    /// `cargo test --release -p cluster-health-core -- --ignored --nocapture million`
    #[test]
    #[ignore = "a timing, meaningful in a release build only"]
    fn a_million_copies_take_a_fraction_of_a_second() {
        let mut text = "[h2d]\nvisit_noise = 0.01\ncore_spread = 0.01\ndevice_spread = 0.01\n\
             dip_probability = 0.01\n\
             [[artefact]]\nkind = \"drift\"\nper_hour = 0.1\n\
             [[artefact]]\nkind = \"burst\"\nfactor = 0.5\nevery_s = 10\nfor_s = 2\n"
            .to_owned();
        for core in 0..20 {
            text += &format!("[[fault]]\nkind = \"slow_core\"\ncpus = \"{core}\"\nfactor = 0.9\n");
        }
        let mut world = world(&text);
        let start = std::time::Instant::now();
        for seq in 0..250_000_u64 {
            begin(&mut world, seq, false, "idle");
            world.bind(0, CpuId(u32::try_from(seq / 16 % 640).unwrap())).unwrap();
            for _ in 0..4 {
                copy(&mut world, u32::try_from(seq % 16).unwrap());
            }
        }
        let spent = start.elapsed();
        println!("{} ns per copy, points and binds included", spent.as_nanos() / 1_000_000);
        assert!(spent < Duration::from_millis(300), "{spent:?}");
    }
}
