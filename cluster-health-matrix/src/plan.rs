//! What to measure: validated before anything is allocated or bound.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use cluster_health_core::affinity::CensusSummary;
use cluster_health_core::backend::synthetic::LinkSpec;
use cluster_health_core::load::{LoadGenerator, LoadProfile, STREAM_BYTES};
use cluster_health_core::{
    BackendKind, Bandwidth, ByteSize, CpuId, Device, DeviceId, Machine, NodeId,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::samples::Sweep;

mod core_pair;
mod request;

pub use core_pair::{CorePairPlan, CorePairPlanBuilder, PairDetectable, allows_same_device};
pub use request::{PlanRequest, SweepPlan};

/// Size of the copies that identify the fixed cost of a transfer.
pub const PROBE_SIZE: ByteSize = ByteSize::kib(64);

/// Most blocks that adaptive precision adds up to.
pub const MAX_BLOCKS: u32 = 20;

/// Smallest difference that counts as a fault, unless a plan says otherwise.
pub const DEFAULT_MIN_EFFECT: f64 = 0.03;

fn default_min_effect() -> f64 {
    DEFAULT_MIN_EFFECT
}

/// A plan that keeps to the default is written without it.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_min_effect(share: &f64) -> bool {
    share.total_cmp(&DEFAULT_MIN_EFFECT).is_eq()
}

fn only_idle() -> Vec<LoadProfile> {
    vec![LoadProfile::Idle]
}

/// A plan of the idle machine alone is written without its loads.
fn is_only_idle(loads: &[LoadProfile]) -> bool {
    matches!(loads, [LoadProfile::Idle])
}

/// Order of the points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Order {
    /// Randomised complete blocks with probes and sentinels.
    #[default]
    Blocks,
    /// CPU (rank-0 CPU), then size ascending, then device (rank-1 CPU); only to reproduce old runs.
    Sequential,
}

/// When host memory is touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ArenaPolicy {
    /// Two arenas per NUMA node, touched once before the first bind.
    #[default]
    Node,
    /// A new arena at every visit to a core.
    Core,
}

/// What is compared after the copies of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CheckPolicy {
    /// Tag words at up to 4,096 places and both ends.
    #[default]
    Tags,
    /// Every byte.
    Full,
    /// Nothing.
    Off,
}

/// Which way the copies between host and device go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Direction {
    /// Host to device.
    #[default]
    H2d,
    /// Device to host.
    D2h,
    /// One copy each way, issued together on two streams; an iteration lasts until both are done.
    Bidirectional,
}

impl Direction {
    /// The sweep that the points belong to.
    #[must_use]
    pub const fn sweep(self) -> Sweep {
        match self {
            Self::H2d => Sweep::H2d,
            Self::D2h => Sweep::D2h,
            Self::Bidirectional => Sweep::Bidirectional,
        }
    }

    /// Copies of one iteration.
    const fn copies(self) -> u64 {
        match self {
            Self::H2d | Self::D2h => 1,
            Self::Bidirectional => 2,
        }
    }
}

/// A plan written before there were other directions is one of copies to the device.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_to_device(direction: &Direction) -> bool {
    matches!(direction, Direction::H2d)
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// A sweep that measures a part of its cells, chosen as it goes, and predicts the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sampling {
    /// Most machine time of the sweep, first bind to last sample, nanoseconds.
    pub budget_ns: u64,
    /// Enough is measured when nine of ten rows and columns are known to ± this share of their rate
    /// (95 % intervals); `None` = when the share of the budget that is not kept for confirming is
    /// used up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
}

impl Sampling {
    /// Usual budget of copies between host and device.
    pub const COPIES: Duration = Duration::from_secs(30);
    /// And of pairs of ranks.
    pub const PAIRS: Duration = Duration::from_secs(8);

    /// Within this time.
    #[must_use]
    pub fn within(budget: Duration) -> Self {
        let budget_ns = u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX);
        Self { budget_ns, target: None }
    }

    /// The same, ended early when nine of ten rows and columns are known to ± this share.
    #[must_use]
    pub const fn with_target(mut self, target: Option<f64>) -> Self {
        self.target = target;
        self
    }

    /// The budget.
    #[must_use]
    pub const fn budget(self) -> Duration {
        Duration::from_nanos(self.budget_ns)
    }

    /// Or why a plan cannot be one.
    fn check(self, order: Order, ci: Option<f64>, loads: &[LoadProfile]) -> Result<()> {
        if self.budget_ns < 10_000_000 {
            return Err(Error::invalid("--budget", "at least 10ms: a few points must fit"));
        }
        if self.target.is_some_and(|target| !(target > 0.0 && target < 1.0)) {
            return Err(Error::invalid("--target", "a share between 0 and 1, such as 0.03 or 3%"));
        }
        if order == Order::Sequential {
            return Err(Error::invalid(
                "--sample",
                "needs random order: not with --order sequential",
            ));
        }
        if ci.is_some() {
            return Err(Error::invalid("--ci", "is for full sweeps; with --sample use --target"));
        }
        if !is_only_idle(loads) {
            return Err(Error::invalid(
                "--sample",
                "measures the idle machine; with --load measure fewer --cpus in full",
            ));
        }
        Ok(())
    }
}

/// A plan of a sweep of copies between host and device: CPU × device × size.
///
/// Build it with [`H2dPlan::builder`]; it is serialised into `run.json` and compared on resume.
///
/// ```
/// use cluster_health_core::{ByteSize, Machine};
/// use cluster_health_matrix::plan::H2dPlan;
///
/// # fn main() -> cluster_health_matrix::Result<()> {
/// let machine = Machine::host()?;
/// let plan = H2dPlan::builder().sizes([ByteSize::mib(1)]).repeats(2).build(&machine)?;
/// assert_eq!(plan.cells(), plan.cpus.len() * plan.devices.len());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct H2dPlan {
    /// CPUs in the order of the rows.
    pub cpus: Vec<CpuId>,
    /// Devices in the order of the columns.
    pub devices: Vec<DeviceId>,
    /// Bytes per copy, ascending.
    pub sizes: Vec<ByteSize>,
    /// Which way the copies go.
    #[serde(default, skip_serializing_if = "is_to_device")]
    pub direction: Direction,
    /// All other devices of the plan copy, too, while one is measured.
    #[serde(default, skip_serializing_if = "is_false")]
    pub concurrent: bool,
    /// Timed iterations per visit.
    pub iters: u32,
    /// Exactly so many warm-up transfers; `None` = until settled.
    pub warmup: Option<u32>,
    /// Blocks.
    pub repeats: u32,
    /// Relative half-width of a cell's 95 % interval that adds blocks; `None` = off.
    pub ci: Option<f64>,
    /// Order of the points.
    pub order: Order,
    /// A part of the cells is measured, the others are predicted; `None` = all cells, in every
    /// block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sampling>,
    /// Seed of all orders.
    pub seed: u64,
    /// When host memory is touched.
    pub arena: ArenaPolicy,
    /// What is compared.
    pub check: CheckPolicy,
    /// Bound of every wait, nanoseconds.
    pub timeout_ns: u64,
    /// Declared rate; a measured one above 1.25 × it is implausible.
    pub expect: Option<Bandwidth>,
    /// Smallest difference that counts as a fault, as a share of the rate.
    #[serde(default = "default_min_effect", skip_serializing_if = "is_default_min_effect")]
    pub min_effect: f64,
    /// Load profiles under which every cell is measured.
    #[serde(default = "only_idle", skip_serializing_if = "is_only_idle")]
    pub loads: Vec<LoadProfile>,
    /// CPUs of the list that cannot be measured, with the reason; their points are skipped.
    pub unusable_cpus: BTreeMap<CpuId, String>,
    /// Devices of the list that cannot be measured, with the reason; their points are skipped.
    pub unusable_devices: BTreeMap<DeviceId, String>,
}

impl H2dPlan {
    /// A builder with the defaults: all bindable CPUs, all available devices, 16, 64 and 256 MiB,
    /// 3 iterations, warm-up until settled, 3 blocks.
    pub fn builder() -> H2dPlanBuilder {
        H2dPlanBuilder::default()
    }

    /// Number of cells per size.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.cpus.len() * self.devices.len()
    }

    /// The largest copy.
    #[must_use]
    pub fn largest(&self) -> ByteSize {
        self.sizes.last().copied().unwrap_or_default()
    }

    /// Bound of every wait.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_ns)
    }

    /// True when small probes accompany the blocks: not when a size of the plan is as small.
    #[must_use]
    pub fn has_probes(&self) -> bool {
        self.order == Order::Blocks && self.sizes.first().is_some_and(|size| *size > PROBE_SIZE)
    }

    /// NUMA nodes of the plan's usable CPUs, with the CPUs that can touch memory there.
    pub(crate) fn nodes(&self, machine: &Machine) -> BTreeMap<Option<NodeId>, Vec<CpuId>> {
        let mut nodes = BTreeMap::<_, Vec<CpuId>>::new();
        for &cpu in self.cpus.iter().filter(|cpu| !self.unusable_cpus.contains_key(cpu)) {
            nodes.entry(machine.node_of(cpu)).or_default().push(cpu);
        }
        nodes
    }

    /// Expected cost on this machine.
    #[must_use]
    pub fn cost(&self, machine: &Machine, rate: Bandwidth) -> Cost {
        let usable_cells = (self.cpus.len() - self.unusable_cpus.len())
            * (self.devices.len() - self.unusable_devices.len());
        let blocks = u64::from(self.repeats);
        // Saturating: the cost of a plan that no machine can hold is asked for, too.
        let size_sum = self.sizes.iter().fold(0, |sum: u64, size| sum.saturating_add(size.bytes()));
        let visits = blocks.saturating_mul(usable_cells as u64);
        let visits = visits.saturating_mul(self.loads.len() as u64);
        let points = visits.saturating_mul(self.sizes.len() as u64);
        // Settled points take one or two warm-up transfers.
        let transfers = u64::from(self.iters) + u64::from(self.warmup.unwrap_or(1));
        // The rate is that of one direction, and both take the same time.
        let timed_bytes = visits.saturating_mul(size_sum).saturating_mul(transfers);
        let copies = self.direction.copies();
        let bytes = timed_bytes.saturating_mul(copies);
        let devices = (self.devices.len() - self.unusable_devices.len()) as u64;
        let beside = if self.concurrent { devices } else { 0 };
        // Both directions use both arenas of a node.
        let arenas = match self.arena {
            ArenaPolicy::Node => 2 * self.nodes(machine).len() as u64,
            ArenaPolicy::Core => copies,
        } + copies * beside;
        let host_memory = self.largest().bytes().saturating_mul(arenas);
        let buffers = copies * (self.devices.len() as u64 + beside);
        let device_memory = self.largest().bytes().saturating_mul(buffers);
        let (bind_us, fixed_us, touch) = match machine.scenario() {
            Some(scenario) => (
                scenario.machine.bind_us,
                scenario.machine.point_us + scenario.h2d.latency_us * to_f64(transfers),
                Bandwidth::gb_per_second(scenario.machine.touch_gbps),
            ),
            None => (80.0, 5.0, Bandwidth::gb_per_second(2.5)),
        };
        let touches = match self.arena {
            ArenaPolicy::Node => 0.0,
            ArenaPolicy::Core => {
                to_f64(blocks * self.cpus.len() as u64) * to_f64(self.largest().bytes())
                    / touch.as_gb_per_second()
                    / 1e9
            }
        };
        let binds = to_f64(blocks * self.cpus.len() as u64);
        let seconds = to_f64(timed_bytes) / (rate.as_gb_per_second() * 1e9)
            + binds * bind_us * 1e-6
            + to_f64(points) * fixed_us * 1e-6
            + touches;
        Cost {
            points,
            bytes: ByteSize(bytes),
            host_memory: ByteSize(host_memory),
            device_memory: ByteSize(device_memory),
            setup_seconds: to_f64(host_memory) / (touch.as_gb_per_second() * 1e9),
            seconds,
            rate,
        }
    }
}

/// The smallest slowdown of a kind that a plan finds with 95 % power, as a share of the rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Detectable {
    /// Standard deviation of one visit's rate that the figures assume, relative.
    pub assumed_noise: f64,
    /// Of a whole device against the others.
    pub device: f64,
    /// Of a whole core against the others.
    pub core: f64,
    /// Of one cell against the others of its size.
    pub cell: f64,
}

impl H2dPlan {
    /// The smallest slowdowns that this plan finds at one size with 95 % power, at a family-wise
    /// error of 0.1 % over all devices, cores and cells (Bonferroni), for independent normal visits.
    ///
    /// The noise is the scenario's on a synthetic machine, else 1.5 % per visit.
    ///
    /// Visits to one core are contiguous in time, so a core counts as one observation per block.
    #[must_use]
    pub fn detectable(&self, machine: &Machine) -> Detectable {
        let noise =
            machine.scenario().map_or(0.015, |scenario| noise_of_visits(&scenario.h2d, self.iters));
        let rows = to_f64(self.cpus.len() as u64);
        let blocks = f64::from(self.repeats);
        let effect = smallest_effect(noise, self.cpus.len(), self.devices.len());
        Detectable {
            assumed_noise: noise,
            device: effect(blocks * rows),
            core: effect(blocks),
            cell: effect(blocks),
        }
    }
}

/// Relative standard deviation of the rate of one visit of `iters` iterations.
fn noise_of_visits(link: &LinkSpec, iters: u32) -> f64 {
    (link.noise.powi(2) / f64::from(iters) + link.visit_noise.powi(2)).sqrt()
}

/// The slowdown that so many independent visits show with 95 % power, among all rows, columns and
/// cells of a matrix at a family-wise error of 0.1 %.
fn smallest_effect(noise: f64, rows: usize, columns: usize) -> impl Fn(f64) -> f64 {
    let candidates = to_f64((rows + columns + rows * columns) as u64);
    // Both tails of the family-wise level, and 95 % power on one.
    let deviations = normal_tail(0.001 / (2.0 * candidates)) + 1.645;
    move |visits| 1.0 - (-deviations * noise / visits.sqrt()).exp()
}

/// The z above which a standard normal lies with probability `p` (p < 0.5); Abramowitz and Stegun
/// 26.2.23, absolute error below 4.5e-4.
fn normal_tail(p: f64) -> f64 {
    let t = (-2.0 * p.ln()).sqrt();
    let numerator = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let denominator = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    t - numerator / denominator
}

#[allow(clippy::cast_precision_loss, reason = "an estimate")]
fn to_f64(value: u64) -> f64 {
    value as f64
}

/// Expected cost of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Cost {
    /// Points of the blocks, without probes and sentinels (few in a hundred more).
    pub points: u64,
    /// Bytes moved; by each rank in collectives.
    pub bytes: ByteSize,
    /// Host memory of the arenas.
    pub host_memory: ByteSize,
    /// Device memory of all devices.
    pub device_memory: ByteSize,
    /// Touching the arenas before the first bind.
    pub setup_seconds: f64,
    /// First bind to last sample.
    pub seconds: f64,
    /// Rate that the estimate assumes.
    pub rate: Bandwidth,
}

/// What the builders of all plans are told the same way.
#[derive(Debug, Clone)]
struct Settings {
    sizes: Option<Vec<ByteSize>>,
    iters: u32,
    warmup: Option<u32>,
    repeats: u32,
    ci: Option<f64>,
    order: Order,
    seed: u64,
    check: CheckPolicy,
    timeout: Duration,
    expect: Option<Bandwidth>,
    min_effect: f64,
    loads: Vec<LoadProfile>,
    sample: Option<Sampling>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            sizes: None,
            iters: 3,
            warmup: None,
            repeats: 3,
            ci: None,
            order: Order::default(),
            seed: 1,
            check: CheckPolicy::default(),
            timeout: Duration::from_secs(30),
            expect: None,
            min_effect: DEFAULT_MIN_EFFECT,
            loads: only_idle(),
            sample: None,
        }
    }
}

/// Most load profiles of a plan; every one of them is a sweep more.
const MOST_LOADS: usize = 16;

/// Most timed or discarded transfers of a point.
const MOST_ITERATIONS: u32 = 100_000;

impl Settings {
    /// The timeout in nanoseconds, or which value cannot be used.
    fn check(&self) -> Result<u64> {
        if self.iters == 0 {
            return Err(Error::invalid("--iters", "at least one iteration"));
        }
        if self.repeats == 0 || self.repeats > 10_000 {
            return Err(Error::invalid("--repeats", "between 1 and 10000 blocks"));
        }
        if self.iters > MOST_ITERATIONS || self.warmup.is_some_and(|most| most > MOST_ITERATIONS) {
            let message = format!("at most {MOST_ITERATIONS}: a point is one line of the log");
            return Err(Error::invalid("--iters, --warmup", message));
        }
        if self.ci.is_some_and(|width| !(width > 0.0 && width < 1.0)) {
            return Err(Error::invalid(
                "--ci",
                "a relative half-width between 0 and 1 (or 0% to 100%)",
            ));
        }
        if !(self.min_effect > 0.0 && self.min_effect < 1.0) {
            return Err(Error::invalid(
                "--min-effect",
                format!("{}: must be above 0 and below 1, such as 0.03 or 3%", self.min_effect),
            ));
        }
        if let Some(sample) = self.sample {
            sample.check(self.order, self.ci, &self.loads)?;
        }
        require_list("--load", &self.loads)?;
        if self.loads.len() > MOST_LOADS {
            return Err(Error::invalid("--load", format!("at most {MOST_LOADS} profiles")));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("--timeout", "must be above 0"));
        }
        u64::try_from(self.timeout.as_nanos()).map_err(|_| Error::invalid("--timeout", "too large"))
    }

    /// The sizes that were asked for, or these.
    fn sorted_sizes(&self, default: &[ByteSize]) -> Result<Vec<ByteSize>> {
        let mut sizes = self.sizes.clone().unwrap_or_else(|| default.to_vec());
        require_list("--sizes", &sizes)?;
        if sizes.contains(&ByteSize(0)) {
            return Err(Error::invalid("--sizes", "a copy of 0 bytes has no rate"));
        }
        sizes.sort_unstable();
        Ok(sizes)
    }
}

/// Setters of a builder's `settings`.
macro_rules! settings_setters {
    ($(#[$sizes:meta])*) => {
        $(#[$sizes])*
        pub fn sizes(mut self, sizes: impl IntoIterator<Item = ByteSize>) -> Self {
            self.settings.sizes = Some(sizes.into_iter().collect());
            self
        }

        /// Timed iterations per visit.
        pub fn iters(mut self, iters: u32) -> Self {
            self.settings.iters = iters;
            self
        }

        /// Exactly so many warm-up transfers; `None` = until settled.
        pub fn warmup(mut self, warmup: Option<u32>) -> Self {
            self.settings.warmup = warmup;
            self
        }

        /// Blocks.
        pub fn repeats(mut self, repeats: u32) -> Self {
            self.settings.repeats = repeats;
            self
        }

        /// Relative half-width of a cell's 95 % interval that adds blocks.
        pub fn ci(mut self, ci: Option<f64>) -> Self {
            self.settings.ci = ci;
            self
        }

        /// Order of the points.
        pub fn order(mut self, order: Order) -> Self {
            self.settings.order = order;
            self
        }

        /// Measures a part of the cells and predicts the others; default: all cells.
        pub fn sample(mut self, sample: Option<Sampling>) -> Self {
            self.settings.sample = sample;
            self
        }

        /// Seed of all orders.
        pub fn seed(mut self, seed: u64) -> Self {
            self.settings.seed = seed;
            self
        }

        /// What is compared.
        pub fn check(mut self, check: CheckPolicy) -> Self {
            self.settings.check = check;
            self
        }

        /// Bound of every wait.
        pub fn timeout(mut self, timeout: Duration) -> Self {
            self.settings.timeout = timeout;
            self
        }

        /// Declared rate.
        pub fn expect(mut self, expect: Option<Bandwidth>) -> Self {
            self.settings.expect = expect;
            self
        }

        /// Smallest difference that counts as a fault, as a share of the rate.
        pub fn min_effect(mut self, share: f64) -> Self {
            self.settings.min_effect = share;
            self
        }

        /// Load profiles under which every cell is measured; default: idle alone.
        pub fn loads(mut self, loads: impl IntoIterator<Item = LoadProfile>) -> Self {
            self.settings.loads = loads.into_iter().collect();
            self
        }
    };
}
use settings_setters;

/// Makes an [`H2dPlan`]; every setter has a default.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct H2dPlanBuilder {
    cpus: Option<Vec<u32>>,
    devices: Option<Vec<u32>>,
    direction: Direction,
    concurrent: bool,
    arena: ArenaPolicy,
    settings: Settings,
}

impl H2dPlanBuilder {
    /// CPUs in the order of the rows; default: all bindable ones.
    pub fn cpus(mut self, cpus: impl IntoIterator<Item = u32>) -> Self {
        self.cpus = Some(cpus.into_iter().collect());
        self
    }

    /// Physical ids of devices in the order of the columns; default: all available ones.
    pub fn devices(mut self, devices: impl IntoIterator<Item = u32>) -> Self {
        self.devices = Some(devices.into_iter().collect());
        self
    }

    /// Which way the copies go; default: to the device.
    pub fn direction(mut self, direction: Direction) -> Self {
        self.direction = direction;
        self
    }

    /// All other devices of the plan copy, too, while one is measured: each from a thread of its
    /// own on a CPU of the plan.
    pub fn concurrent(mut self, concurrent: bool) -> Self {
        self.concurrent = concurrent;
        self
    }

    /// When host memory is touched.
    pub fn arena(mut self, arena: ArenaPolicy) -> Self {
        self.arena = arena;
        self
    }

    settings_setters! {
        /// Bytes per copy; default: 16, 64 and 256 MiB as far as they fit into memory.
    }

    /// Checks everything against the machine; nothing is allocated or bound. Ascend devices are
    /// opened to ask for their free memory.
    ///
    /// # Errors
    /// An unusable value, named as the command line names it; an unknown CPU or device; sizes that
    /// do not fit into memory; nothing left to measure.
    pub fn build(self, machine: &Machine) -> Result<H2dPlan> {
        let (cpus, unusable_cpus) = cpus_of_list(machine, "--cpus", self.cpus.as_deref())?;
        let known = machine.devices();
        let devices: Vec<DeviceId> = match &self.devices {
            None => known
                .iter()
                .filter(|device| device.info().unavailable.is_none())
                .map(Device::id)
                .collect(),
            Some(list) => list.iter().copied().map(DeviceId).collect(),
        };
        require_list("--devices", &devices)?;
        let mut unusable_devices = BTreeMap::new();
        for &id in &devices {
            let device = device_of(machine, "--devices", id)?;
            if let Some(reason) = &device.info().unavailable {
                unusable_devices.insert(id, format!("device {id} is unavailable: {reason}"));
            }
        }
        let settings = self.settings;
        let timeout_ns = settings.check()?;
        let explicit_sizes = settings.sizes.is_some();
        let sizes = settings.sorted_sizes(&[16, 64, 256].map(ByteSize::mib))?;
        let mut plan = H2dPlan {
            cpus,
            devices,
            sizes,
            direction: self.direction,
            concurrent: self.concurrent,
            iters: settings.iters,
            warmup: settings.warmup,
            repeats: settings.repeats,
            ci: settings.ci,
            order: settings.order,
            sample: settings.sample,
            seed: settings.seed,
            arena: self.arena,
            check: settings.check,
            timeout_ns,
            expect: settings.expect,
            min_effect: settings.min_effect,
            loads: settings.loads,
            unusable_cpus,
            unusable_devices,
        };
        require_usable("--cpus", plan.cpus.len(), &plan.unusable_cpus)?;
        require_usable("--devices", plan.devices.len(), &plan.unusable_devices)?;
        plan.require_concurrency(machine)?;
        let usable = plan.cpus.iter().filter(|cpu| !plan.unusable_cpus.contains_key(cpu));
        require_places(
            machine,
            &plan.loads,
            &plan.load_devices(machine),
            &usable.map(|cpu| vec![*cpu]),
        )?;
        while let Err(error) = plan.fits(machine) {
            // Default sizes give way on a small machine; sizes that were asked for do not.
            if explicit_sizes || plan.sizes.len() == 1 {
                return Err(error);
            }
            plan.sizes.pop();
        }
        Ok(plan)
    }
}

impl H2dPlan {
    /// The devices that a load burns on: those that are measured.
    pub(crate) fn load_devices(&self, machine: &Machine) -> Vec<Vec<Device>> {
        let usable = self.devices.iter().filter(|id| !self.unusable_devices.contains_key(id));
        vec![usable.filter_map(|id| machine.device(*id)).collect()]
    }

    /// An error when the devices cannot copy all at once, or not each from a CPU of its own.
    fn require_concurrency(&self, machine: &Machine) -> Result<()> {
        if !self.concurrent {
            return Ok(());
        }
        const OPTION: &str = "--concurrent";
        if machine.has_virtual_time() {
            return Err(Error::invalid(
                OPTION,
                "a synthetic machine has no model of devices that share a path; use a real one",
            ));
        }
        if !is_only_idle(&self.loads) {
            return Err(Error::invalid(
                OPTION,
                "the copies of the other devices are the load; leave --load out",
            ));
        }
        let devices = self.devices.len() - self.unusable_devices.len();
        let cpus = self.cpus.len() - self.unusable_cpus.len();
        if devices < 2 {
            return Err(Error::invalid(OPTION, "needs two devices or more"));
        }
        // A device's thread gives way to the measured one: there is one CPU more to go to.
        if cpus < devices {
            return Err(Error::invalid(
                OPTION,
                format!("{devices} devices copy from as many CPUs; --cpus has {cpus} usable ones"),
            ));
        }
        Ok(())
    }

    /// Asked before anything is allocated: a machine that starts to swap measures nothing.
    fn fits(&self, machine: &Machine) -> Result<()> {
        let largest =
            if self.has_probes() { self.largest().max(PROBE_SIZE) } else { self.largest() };
        for id in self.devices.iter().filter(|id| !self.unusable_devices.contains_key(id)) {
            let buffers = self.direction.copies() * if self.concurrent { 2 } else { 1 };
            let needed = largest.bytes().saturating_mul(buffers);
            let what = if buffers == 1 { "one buffer" } else { "its buffers" };
            fits_device(machine, *id, self.largest(), needed, what)?;
        }
        let cost = self.cost(machine, Bandwidth::gb_per_second(1.0));
        let loads = load_memory(machine, &self.loads, &self.load_devices(machine));
        let needed = cost.host_memory.bytes().saturating_add(cost.device_memory.bytes());
        let needed = needed.saturating_add(loads);
        fits_memory(
            machine,
            self.largest(),
            needed,
            "arenas and host devices",
            "smaller sizes, fewer NUMA nodes or --arena core",
        )
    }
}

/// Memory of all burners on this machine, which keep it for the sweep: those of CPUs on every node
/// where they were.
fn load_memory(machine: &Machine, loads: &[LoadProfile], devices: &[Vec<Device>]) -> u64 {
    let nodes = machine.topology().nodes.len().max(1) as u64;
    let burners = |load: &LoadProfile| {
        let count: usize = devices.iter().map(|own| load.burners(own.len())).sum();
        count as u64 * if matches!(load, LoadProfile::Device) { 1 } else { nodes }
    };
    loads.iter().map(burners).sum::<u64>().saturating_mul(STREAM_BYTES.bytes())
}

/// An error unless every load finds CPUs for its burners whichever of these CPUs (one per rank) are
/// measured.
fn require_places(
    machine: &Machine,
    loads: &[LoadProfile],
    devices: &[Vec<Device>],
    measured: &(impl Iterator<Item = Vec<CpuId>> + Clone),
) -> Result<()> {
    if is_only_idle(loads) {
        return Ok(());
    }
    let generator = LoadGenerator::new(machine, loads, devices, 0)?;
    for load in 0..loads.len() {
        for cpus in measured.clone() {
            generator
                .check_places(load, &cpus)
                .map_err(|error| Error::invalid("--load", error.to_string()))?;
        }
    }
    Ok(())
}

/// An error when `needed` bytes for copies of the size `largest` are more than this machine has.
fn fits_memory(
    machine: &Machine,
    largest: ByteSize,
    needed: u64,
    what: &str,
    advice: &str,
) -> Result<()> {
    if usize::try_from(largest.bytes()).is_err() || largest.bytes() > i64::MAX as u64 / 4096 {
        return Err(Error::invalid("--sizes", format!("{largest} is larger than any memory")));
    }
    if machine.backend() != BackendKind::Host {
        return Ok(());
    }
    let Ok(available) = machine.topology().mem_available() else { return Ok(()) };
    let limit = available - available / 10;
    if needed > limit {
        return Err(Error::invalid(
            "--sizes",
            format!(
                "{largest} needs {} MiB ({what}), {} MiB of this machine's memory may be used; \
                 use {advice}",
                needed >> 20,
                limit >> 20
            ),
        ));
    }
    Ok(())
}

/// An error when a device with memory of its own has less than `needed` bytes left now. A device
/// that does not tell is no reason to refuse the others: it fails at its points.
fn fits_device(
    machine: &Machine,
    id: DeviceId,
    largest: ByteSize,
    needed: u64,
    what: &str,
) -> Result<()> {
    let memory = machine.device(id).map(|device| device.memory());
    let Some(Ok(Some((free, total)))) = memory else { return Ok(()) };
    if needed <= free.bytes() {
        return Ok(());
    }
    Err(Error::invalid(
        "--sizes",
        format!(
            "{largest} needs {} MiB of the memory of device {id} ({what}), {} MiB of {} MiB are \
             free; use smaller sizes, or end what else uses the device",
            needed.div_ceil(1 << 20),
            free.bytes() >> 20,
            total.bytes() >> 20
        ),
    ))
}

/// The CPUs of a list, or all bindable ones, with the reasons why some cannot be measured.
fn cpus_of_list(
    machine: &Machine,
    option: &str,
    list: Option<&[u32]>,
) -> Result<(Vec<CpuId>, BTreeMap<CpuId, String>)> {
    let census = machine.census()?;
    let cpus: Vec<CpuId> = match list {
        None => match census.bindable() {
            none if none.is_empty() => return Err(no_cpu(option, &census.summary())),
            found => found,
        },
        Some(list) => list.iter().copied().map(CpuId).collect(),
    };
    require_list(option, &cpus)?;
    let mut unusable = BTreeMap::new();
    for &cpu in &cpus {
        let Some(record) = census.record(cpu) else {
            return Err(Error::invalid(
                option,
                format!("CPU {cpu} does not exist; present: {}", machine.topology().present()),
            ));
        };
        if record.bindable != Some(true) {
            let reason = record.reason.clone().unwrap_or_else(|| "not bindable".to_owned());
            unusable.insert(cpu, format!("CPU {cpu} cannot be bound: {reason}"));
        }
    }
    Ok((cpus, unusable))
}

fn device_of(machine: &Machine, option: &str, id: DeviceId) -> Result<Device> {
    machine.device(id).ok_or_else(|| {
        let list: Vec<String> =
            machine.devices().iter().map(|device| device.id().to_string()).collect();
        Error::invalid(
            option,
            format!(
                "device {id} does not exist on the {} backend; there are: {}",
                machine.backend(),
                list.join(",")
            ),
        )
    })
}

/// An error with some of the reasons when nothing of a list can be measured.
fn require_usable<T>(option: &str, count: usize, unusable: &BTreeMap<T, String>) -> Result<()> {
    if unusable.len() < count {
        return Ok(());
    }
    let reasons: Vec<&str> = unusable.values().map(String::as_str).take(4).collect();
    Err(Error::invalid(option, format!("nothing can be measured: {}", reasons.join("; "))))
}

/// No CPU at all, with the kernel's reasons.
fn no_cpu(option: &str, summary: &CensusSummary) -> Error {
    let reasons: Vec<String> = summary
        .not_bindable
        .iter()
        .map(|entry| format!("CPU {}: {}", entry.cpus, entry.reason))
        .collect();
    Error::invalid(option, format!("no CPU can be bound: {}", reasons.join("; ")))
}

fn require_list<T: std::hash::Hash + Eq + std::fmt::Display>(
    option: &str,
    list: &[T],
) -> Result<()> {
    if list.is_empty() {
        return Err(Error::invalid(option, "the list is empty"));
    }
    let mut seen = HashSet::with_capacity(list.len());
    for (index, item) in list.iter().enumerate() {
        if !seen.insert(item) {
            return Err(Error::invalid(
                option,
                format!("element {} ({item}) is a duplicate", index + 1),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cluster_health_core::backend::synthetic::Scenario;

    use super::*;

    fn machine(more: &str) -> Machine {
        let text = format!("[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n{more}");
        Machine::synthetic(Scenario::parse(&text, "test").unwrap()).unwrap()
    }

    #[test]
    fn defaults_are_those_of_the_contract() {
        let machine = machine("offline = \"3\"\n");
        let plan = H2dPlan::builder().build(&machine).unwrap();
        assert_eq!((plan.cpus.len(), plan.devices.len(), plan.cells()), (15, 4, 60));
        assert_eq!(plan.sizes, [16, 64, 256].map(ByteSize::mib));
        assert_eq!((plan.iters, plan.warmup, plan.repeats, plan.ci), (3, None, 3, None));
        assert_eq!((plan.order, plan.seed), (Order::Blocks, 1));
        assert_eq!((plan.arena, plan.check), (ArenaPolicy::Node, CheckPolicy::Tags));
        assert_eq!(plan.timeout(), Duration::from_secs(30));
        assert!(plan.unusable_cpus.is_empty() && plan.has_probes());
    }

    #[test]
    fn lists_keep_their_order_and_sizes_ascend() {
        let builder = H2dPlan::builder().cpus([5, 0, 9]).devices([3, 1]);
        let sizes = [ByteSize::mib(4), ByteSize::kib(64)];
        let plan = builder.sizes(sizes).build(&machine("")).unwrap();
        assert_eq!(plan.cpus, [5, 0, 9].map(CpuId));
        assert_eq!(plan.devices, [3, 1].map(DeviceId));
        assert_eq!(plan.sizes, [ByteSize::kib(64), ByteSize::mib(4)]);
        assert_eq!(plan.largest(), ByteSize::mib(4));
        assert!(!plan.has_probes(), "a size is as small as the probes");
    }

    #[test]
    fn unusable_cpus_of_a_list_stay_with_their_reason() {
        let machine = machine("offline = \"3\"\nrefuse_bind = \"5\"\n");
        let plan = H2dPlan::builder().cpus([3, 4, 5]).build(&machine).unwrap();
        let reasons: Vec<_> = plan.unusable_cpus.iter().map(|(cpu, why)| (cpu.0, why)).collect();
        assert_eq!(reasons.len(), 2);
        assert!(reasons[0].0 == 3 && reasons[0].1.contains("offline"), "{reasons:?}");
        assert!(reasons[1].0 == 5 && reasons[1].1.contains("EPERM"), "{reasons:?}");
        // Memory is touched by a CPU of the plan that can be bound.
        let nodes: Vec<_> = plan.nodes(&machine).into_iter().collect();
        assert_eq!(nodes, [(Some(NodeId(0)), vec![CpuId(4)])]);
    }

    #[test]
    fn what_cannot_be_is_named_as_the_command_line_names_it() {
        let machine = machine("offline = \"3\"\n");
        let build = |change: fn(H2dPlanBuilder) -> H2dPlanBuilder| {
            let error = change(H2dPlan::builder()).build(&machine).unwrap_err();
            assert!(error.is_usage(), "{error}");
            error.to_string()
        };
        for (message, parts) in [
            (build(|b| b.cpus([1, 16])), ["--cpus", "CPU 16"]),
            (build(|b| b.cpus([1, 2, 1])), ["--cpus", "element 3 (1)"]),
            (build(|b| b.cpus([])), ["--cpus", "empty"]),
            (build(|b| b.cpus([3])), ["--cpus", "offline"]),
            (build(|b| b.devices([4])), ["--devices", "device 4"]),
            (build(|b| b.devices([2, 2])), ["--devices", "element 2 (2)"]),
            (build(|b| b.sizes([])), ["--sizes", "empty"]),
            (build(|b| b.sizes([ByteSize(0)])), ["--sizes", "0 bytes"]),
            (build(|b| b.sizes([ByteSize(u64::MAX)])), ["--sizes", "any memory"]),
            (build(|b| b.iters(0)), ["--iters", "one"]),
            (build(|b| b.warmup(Some(100_001))), ["--warmup", "100000"]),
            (build(|b| b.repeats(0)), ["--repeats", "1"]),
            (build(|b| b.ci(Some(f64::NAN))), ["--ci", "0"]),
            (build(|b| b.ci(Some(1.0))), ["--ci", "1"]),
            (build(|b| b.loads([])), ["--load", "empty"]),
            (build(|b| b.loads([LoadProfile::Device; 2])), ["--load", "element 2 (device)"]),
            (build(|b| b.loads(["cpu:14".parse().unwrap()])), ["--load", "14 CPUs"]),
            (build(|b| b.timeout(Duration::ZERO)), ["--timeout", "above 0"]),
            (build(|b| b.timeout(Duration::MAX)), ["--timeout", "large"]),
        ] {
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    /// 2 blocks × 16 CPUs × 4 devices × (1 + 3) MiB × (2 iterations + 1 warm-up).
    #[test]
    fn the_cost_is_points_bytes_and_memory() {
        let machine = machine("touch_gbps = 4\n");
        let builder = H2dPlan::builder().sizes([1, 3].map(ByteSize::mib)).iters(2).repeats(2);
        let rate = Bandwidth::gb_per_second(50.0);
        let cost = builder.clone().build(&machine).unwrap().cost(&machine, rate);
        assert_eq!(cost.points, 2 * 16 * 4 * 2);
        assert_eq!(cost.bytes, ByteSize::mib(2 * 16 * 4 * 4 * 3));
        assert_eq!(cost.host_memory, ByteSize::mib(2 * 2 * 3));
        assert_eq!(cost.device_memory, ByteSize::mib(4 * 3));
        let setup = 12.0 * 1_048_576.0 / 4e9;
        assert!((cost.setup_seconds / setup - 1.0).abs() < 1e-9);

        let own = builder.arena(ArenaPolicy::Core).build(&machine).unwrap().cost(&machine, rate);
        assert_eq!(own.host_memory, ByteSize::mib(3));
        // Every core touches its arena in every block.
        let touches = 2.0 * 16.0 * 3.0 * 1_048_576.0 / 4e9;
        assert!(((own.seconds - cost.seconds) / touches - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_cost_of_the_impossible_saturates() {
        let machine = machine("");
        let mut plan = H2dPlan::builder().repeats(10_000).build(&machine).unwrap();
        plan.sizes.push(ByteSize(u64::MAX));
        let cost = plan.cost(&machine, Bandwidth::gb_per_second(1.0));
        assert_eq!((cost.bytes, cost.host_memory), (ByteSize(u64::MAX), ByteSize(u64::MAX)));
    }

    /// Published values of the upper tail of the standard normal.
    #[test]
    fn normal_tails_are_the_published_ones() {
        for (p, z) in [(0.25, 0.674_490), (0.05, 1.644_854), (0.025, 1.959_964), (1e-6, 4.753_424)]
        {
            assert!((normal_tail(p) - z).abs() < 4.5e-4, "{p}");
        }
    }

    #[test]
    fn a_plan_is_the_same_after_json() {
        let plan = H2dPlan::builder()
            .ci(Some(0.02))
            .expect(Some(Bandwidth::gb_per_second(58.5)))
            .cpus([3, 4])
            .build(&machine("offline = \"3\"\n"))
            .unwrap();
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<H2dPlan>(&text).unwrap(), plan);
        // Runs of before there were other directions still go on.
        assert!(!text.contains("direction") && !text.contains("concurrent"), "{text}");
        let plan = H2dPlan::builder().direction(Direction::D2h).build(&machine("")).unwrap();
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<H2dPlan>(&text).unwrap(), plan);
    }
}
