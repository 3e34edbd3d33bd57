//! The plan of a core-pair sweep.

use std::collections::BTreeMap;
use std::time::Duration;

use cluster_health_core::load::LoadProfile;
use cluster_health_core::{BackendKind, Bandwidth, ByteSize, CpuId, Device, DeviceId, Machine};
use serde::{Deserialize, Serialize};

use super::{
    CheckPolicy, Cost, Order, PROBE_SIZE, Sampling, Settings, cpus_of_list, device_of, fits_device,
    fits_memory, load_memory, noise_of_visits, require_places, require_usable, settings_setters,
    smallest_effect, to_f64,
};
use crate::error::{Error, Result};
use crate::output::csv::MAX_CELLS;

/// Ranks of a pair.
const RANKS: u64 = 2;

/// A plan of a core-pair sweep: an all-gather of two ranks on two fixed devices, rank-0 CPU ×
/// rank-1 CPU × bytes per rank.
///
/// Build it with [`CorePairPlan::builder`]; it is serialised into `run.json` and compared on
/// resume.
///
/// ```
/// use cluster_health_core::{ByteSize, Machine, Scenario};
/// use cluster_health_matrix::plan::CorePairPlan;
///
/// # fn main() -> cluster_health_matrix::Result<()> {
/// let scenario = Scenario::parse("[machine]\ncpus = 8\nnuma_nodes = 2\ndevices = 2\n", "example")?;
/// let machine = Machine::synthetic(scenario)?;
/// let plan = CorePairPlan::builder().rank0_cpus(0..4).build(&machine)?;
/// assert_eq!((plan.cells(), plan.sizes.as_slice()), (4 * 8, &[ByteSize::mib(8)][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CorePairPlan {
    /// Devices of rank 0 and rank 1.
    pub device_pair: [DeviceId; 2],
    /// CPUs of rank 0 in the order of the rows.
    pub rank0_cpus: Vec<CpuId>,
    /// CPUs of rank 1 in the order of the columns.
    pub rank1_cpus: Vec<CpuId>,
    /// Bytes per rank, ascending.
    pub sizes: Vec<ByteSize>,
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
    /// A part of the pairs is measured, the others are predicted; `None` = all pairs, in every
    /// block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sampling>,
    /// Seed of all orders.
    pub seed: u64,
    /// What is compared.
    pub check: CheckPolicy,
    /// Bound of every wait, nanoseconds.
    pub timeout_ns: u64,
    /// Declared rate per rank; a measured one above 1.25 × it is implausible.
    pub expect: Option<Bandwidth>,
    /// Smallest difference that counts as a fault, as a share of the rate.
    #[serde(
        default = "super::default_min_effect",
        skip_serializing_if = "super::is_default_min_effect"
    )]
    pub min_effect: f64,
    /// Load profiles under which every cell is measured.
    #[serde(default = "super::only_idle", skip_serializing_if = "super::is_only_idle")]
    pub loads: Vec<LoadProfile>,
    /// CPUs of rank 0 that cannot be measured, with the reason; their points are skipped.
    pub unusable_rank0_cpus: BTreeMap<CpuId, String>,
    /// CPUs of rank 1 that cannot be measured, with the reason; their points are skipped.
    pub unusable_rank1_cpus: BTreeMap<CpuId, String>,
}

impl CorePairPlan {
    /// A builder with the defaults: the first two available devices (a single one twice), all
    /// bindable CPUs for both ranks, 8 MiB per rank, 3 iterations, warm-up until settled, 3 blocks.
    pub fn builder() -> CorePairPlanBuilder {
        CorePairPlanBuilder::default()
    }

    /// Number of cells per size.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.rank0_cpus.len() * self.rank1_cpus.len()
    }

    /// The largest all-gather.
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

    /// The reason why a pair of CPUs cannot be measured, by position.
    pub(crate) fn unusable(&self, row: usize, column: usize) -> Option<&str> {
        let rank0 = self.unusable_rank0_cpus.get(&self.rank0_cpus[row]);
        let rank1 = || self.unusable_rank1_cpus.get(&self.rank1_cpus[column]);
        rank0.or_else(rank1).map(String::as_str)
    }

    /// Expected cost on this machine, when the ranks reach `rate` each.
    #[must_use]
    pub fn cost(&self, machine: &Machine, rate: Bandwidth) -> Cost {
        let usable = [
            self.rank0_cpus.len() - self.unusable_rank0_cpus.len(),
            self.rank1_cpus.len() - self.unusable_rank1_cpus.len(),
        ];
        let cells = (usable[0] * usable[1]) as u64;
        let blocks = u64::from(self.repeats);
        // Saturating: the cost of a plan that no machine can hold is asked for, too.
        let size_sum = self.sizes.iter().fold(0, |sum: u64, size| sum.saturating_add(size.bytes()));
        let visits = blocks.saturating_mul(cells).saturating_mul(self.loads.len() as u64);
        let points = visits.saturating_mul(self.sizes.len() as u64);
        // Points on a fresh pair of CPUs need two warm-up transfers that agree.
        let transfers = u64::from(self.iters) + u64::from(self.warmup.unwrap_or(2));
        let bytes = visits.saturating_mul(size_sum).saturating_mul(transfers);
        let (bind_us, fixed_us) = match machine.scenario() {
            Some(scenario) => (
                // The ranks of a synthetic machine are bound one after the other.
                to_f64(RANKS) * scenario.machine.bind_us,
                scenario.machine.point_us + scenario.all_gather.latency_us * to_f64(transfers),
            ),
            None => (80.0, 10.0),
        };
        let seconds = to_f64(bytes) / (rate.as_gb_per_second() * 1e9)
            + to_f64(points) * (bind_us + fixed_us) * 1e-6;
        Cost {
            points,
            bytes: ByteSize(bytes),
            host_memory: ByteSize(0),
            // What a rank sends, and what it receives from all.
            device_memory: ByteSize(
                (RANKS * (1 + RANKS)).saturating_mul(self.largest().max(PROBE_SIZE).bytes()),
            ),
            setup_seconds: 0.0,
            seconds,
            rate,
        }
    }

    /// The smallest slowdowns that this plan finds at one size with 95 % power, at a family-wise
    /// error of 0.1 % over all rows, columns and cells (Bonferroni), for independent normal visits.
    ///
    /// The noise is the scenario's on a synthetic machine, else 3 % per visit. Unlike in an H2D
    /// sweep the visits to one core are spread over the block, so all of them count.
    #[must_use]
    pub fn detectable(&self, machine: &Machine) -> PairDetectable {
        let noise = machine
            .scenario()
            .map_or(0.03, |scenario| noise_of_visits(&scenario.all_gather, self.iters));
        let (rows, columns) = (self.rank0_cpus.len(), self.rank1_cpus.len());
        let blocks = f64::from(self.repeats);
        let effect = smallest_effect(noise, rows, columns);
        PairDetectable {
            assumed_noise: noise,
            rank0_core: effect(blocks * to_f64(columns as u64)),
            rank1_core: effect(blocks * to_f64(rows as u64)),
            cell: effect(blocks),
        }
    }

    /// The devices that a load burns on, by rank.
    pub(crate) fn load_devices(&self, machine: &Machine) -> Vec<Vec<Device>> {
        self.device_pair.iter().map(|id| machine.device(*id).into_iter().collect()).collect()
    }

    /// Pairs of usable CPUs of which one leaves the fewest CPUs to the burners: those that share
    /// nothing, where there are any.
    fn widest_pairs<'a>(
        &'a self,
        machine: &'a Machine,
    ) -> impl Iterator<Item = Vec<CpuId>> + Clone + 'a {
        let usable = |cpus: &'a [CpuId], unusable: &'a BTreeMap<CpuId, String>| {
            cpus.iter().copied().filter(|cpu| !unusable.contains_key(cpu))
        };
        usable(&self.rank0_cpus, &self.unusable_rank0_cpus).filter_map(move |rank0| {
            let siblings = machine.topology().cpu(rank0).map(|info| &info.siblings);
            let shares = move |cpu: CpuId| {
                cpu == rank0 || siblings.is_some_and(|siblings| siblings.contains(cpu))
            };
            let mut others = usable(&self.rank1_cpus, &self.unusable_rank1_cpus);
            let first = others.clone().next()?;
            Some(vec![rank0, others.find(|cpu| !shares(*cpu)).unwrap_or(first)])
        })
    }

    fn fits(&self, machine: &Machine) -> Result<()> {
        let cost = self.cost(machine, Bandwidth::gb_per_second(1.0));
        let loads = load_memory(machine, &self.loads, &self.load_devices(machine));
        let needed = cost.device_memory.bytes();
        if machine.backend() == BackendKind::Ascend {
            let what = format!("a send and a receive buffer, {} MiB of HCCL", hccl_memory() >> 20);
            let own = (needed / RANKS).saturating_add(hccl_memory());
            for id in self.device_pair {
                fits_device(machine, id, self.largest(), own, &what)?;
            }
        }
        fits_memory(
            machine,
            self.largest(),
            needed.saturating_add(loads),
            "both ranks' send and receive buffers",
            "smaller sizes",
        )
    }
}

/// What a communicator of HCCL allocates on its device: `HCCL_BUFFSIZE` MiB (200) twice.
fn hccl_memory() -> u64 {
    let asked = std::env::var("HCCL_BUFFSIZE").ok().and_then(|size| size.trim().parse().ok());
    2 * (u64::from(asked.unwrap_or(200_u32)) << 20)
}

/// The smallest slowdown of a kind that a core-pair plan finds with 95 % power, as a share of the
/// rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PairDetectable {
    /// Standard deviation of one visit's rate that the figures assume, relative.
    pub assumed_noise: f64,
    /// Of a rank-0 core against the others.
    pub rank0_core: f64,
    /// Of a rank-1 core against the others.
    pub rank1_core: f64,
    /// Of one cell against the others of its size.
    pub cell: f64,
}

/// Makes a [`CorePairPlan`]; every setter has a default.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct CorePairPlanBuilder {
    device_pair: Option<[u32; 2]>,
    rank0_cpus: Option<Vec<u32>>,
    rank1_cpus: Option<Vec<u32>>,
    settings: Settings,
}

impl CorePairPlanBuilder {
    /// Physical ids of the devices of rank 0 and rank 1; default: the first two available ones, a
    /// single one twice.
    pub fn device_pair(mut self, pair: [u32; 2]) -> Self {
        self.device_pair = Some(pair);
        self
    }

    /// CPUs of rank 0 in the order of the rows; default: all bindable ones.
    pub fn rank0_cpus(mut self, cpus: impl IntoIterator<Item = u32>) -> Self {
        self.rank0_cpus = Some(cpus.into_iter().collect());
        self
    }

    /// CPUs of rank 1 in the order of the columns; default: all bindable ones.
    pub fn rank1_cpus(mut self, cpus: impl IntoIterator<Item = u32>) -> Self {
        self.rank1_cpus = Some(cpus.into_iter().collect());
        self
    }

    settings_setters! {
        /// Bytes per rank; default: 8 MiB.
    }

    /// Checks everything against the machine; nothing is allocated or bound.
    ///
    /// # Errors
    /// An unusable value, named as the command line names it; an unknown CPU or device; a device
    /// that is unavailable, or given twice where the backend refuses that; sizes that do not fit
    /// into memory; nothing left to measure.
    pub fn build(self, machine: &Machine) -> Result<CorePairPlan> {
        let device_pair = device_pair(machine, self.device_pair)?;
        let (rank0_cpus, unusable_rank0_cpus) = rank_cpus(machine, 0, self.rank0_cpus.as_deref())?;
        let (rank1_cpus, unusable_rank1_cpus) = rank_cpus(machine, 1, self.rank1_cpus.as_deref())?;
        let settings = self.settings;
        let timeout_ns = settings.check()?;
        let sizes = settings.sorted_sizes(&[ByteSize::mib(8)])?;
        let plan = CorePairPlan {
            device_pair,
            rank0_cpus,
            rank1_cpus,
            sizes,
            iters: settings.iters,
            warmup: settings.warmup,
            repeats: settings.repeats,
            ci: settings.ci,
            order: settings.order,
            sample: settings.sample,
            seed: settings.seed,
            check: settings.check,
            timeout_ns,
            expect: settings.expect,
            min_effect: settings.min_effect,
            loads: settings.loads,
            unusable_rank0_cpus,
            unusable_rank1_cpus,
        };
        let points = plan.cells().saturating_mul(plan.sizes.len());
        if points > MAX_CELLS {
            return Err(Error::invalid(
                "--rank0-cpus, --rank1-cpus, --sizes",
                format!("{points} cells; at most {MAX_CELLS} are measured in one run"),
            ));
        }
        require_places(
            machine,
            &plan.loads,
            &plan.load_devices(machine),
            &plan.widest_pairs(machine),
        )?;
        plan.fits(machine)?;
        Ok(plan)
    }
}

/// The CPUs of one rank; the reasons name it.
fn rank_cpus(
    machine: &Machine,
    rank: u32,
    list: Option<&[u32]>,
) -> Result<(Vec<CpuId>, BTreeMap<CpuId, String>)> {
    let option = format!("--rank{rank}-cpus");
    let (cpus, mut unusable) = cpus_of_list(machine, &option, list)?;
    for reason in unusable.values_mut() {
        reason.insert_str(0, &format!("rank {rank}: "));
    }
    require_usable(&option, cpus.len(), &unusable)?;
    Ok((cpus, unusable))
}

/// Whether both ranks of a pair may use one device on this backend.
#[must_use]
pub fn allows_same_device(backend: BackendKind) -> bool {
    backend != BackendKind::Ascend
}

/// The devices that were asked for, or the first two.
fn device_pair(machine: &Machine, asked: Option<[u32; 2]>) -> Result<[DeviceId; 2]> {
    const OPTION: &str = "--device-pair";
    let pair = if let Some(pair) = asked {
        pair.map(DeviceId)
    } else {
        let mut available = machine
            .devices()
            .into_iter()
            .filter(|device| device.info().unavailable.is_none())
            .map(|device| device.id());
        let Some(first) = available.next() else {
            return Err(Error::invalid(OPTION, "no device is available"));
        };
        [first, available.next().unwrap_or(first)]
    };
    for id in pair {
        let device = device_of(machine, OPTION, id)?;
        if let Some(reason) = &device.info().unavailable {
            return Err(Error::invalid(OPTION, format!("device {id} is unavailable: {reason}")));
        }
    }
    if pair[0] == pair[1] && !allows_same_device(machine.backend()) {
        return Err(Error::invalid(
            OPTION,
            format!("{0},{0}: the ascend backend needs two devices", pair[0]),
        ));
    }
    Ok(pair)
}

#[cfg(test)]
mod tests {
    use cluster_health_core::Scenario;

    use super::*;
    use crate::plan::H2dPlan;

    /// One node unless the scenario says otherwise.
    fn machine(text: &str) -> Machine {
        let nodes = if text.contains("numa_nodes") { "" } else { "numa_nodes = 1\n" };
        let text = text.replacen("[machine]\n", &format!("[machine]\n{nodes}"), 1);
        Machine::synthetic(Scenario::parse(&text, "test").unwrap()).unwrap()
    }

    fn ids(cpus: &[CpuId]) -> Vec<u32> {
        cpus.iter().map(|cpu| cpu.0).collect()
    }

    #[test]
    fn defaults_are_the_first_two_devices_all_cpus_and_8_mib() {
        let machine = machine("[machine]\ncpus = 8\ndevices = 4\noffline = \"3\"\n");
        let plan = CorePairPlan::builder().build(&machine).unwrap();
        assert_eq!(plan.device_pair, [DeviceId(0), DeviceId(1)]);
        assert_eq!(ids(&plan.rank0_cpus), [0, 1, 2, 4, 5, 6, 7]);
        assert_eq!(plan.rank0_cpus, plan.rank1_cpus);
        assert_eq!(plan.sizes, [ByteSize(8 << 20)]);
        assert_eq!((plan.iters, plan.warmup, plan.repeats, plan.seed), (3, None, 3, 1));
        assert!(plan.unusable_rank0_cpus.is_empty() && plan.unusable_rank1_cpus.is_empty());
    }

    #[test]
    fn a_single_device_stands_for_both_ranks_and_an_order_is_kept() {
        let one = machine("[machine]\ncpus = 2\ndevices = 1\n");
        let plan = CorePairPlan::builder().build(&one).unwrap();
        assert_eq!(plan.device_pair, [DeviceId(0), DeviceId(0)]);
        let many = machine("[machine]\ncpus = 4\ndevices = 8\n");
        let plan = CorePairPlan::builder()
            .device_pair([5, 0])
            .rank0_cpus([3, 1])
            .rank1_cpus([2, 0, 1])
            .sizes([ByteSize::mib(2), ByteSize::kib(1)])
            .build(&many)
            .unwrap();
        assert_eq!(plan.device_pair, [DeviceId(5), DeviceId(0)]);
        assert_eq!((ids(&plan.rank0_cpus), ids(&plan.rank1_cpus)), (vec![3, 1], vec![2, 0, 1]));
        assert_eq!(plan.sizes, [ByteSize::kib(1), ByteSize::mib(2)]);
        assert!(!plan.has_probes());
        assert!(!allows_same_device(BackendKind::Ascend));
    }

    #[test]
    fn cpus_that_cannot_be_bound_stay_with_their_reason_and_rank() {
        let machine =
            machine("[machine]\ncpus = 8\nsmt = 1\noffline = \"3\"\nrefuse_bind = \"5\"\n");
        let plan =
            CorePairPlan::builder().rank0_cpus([0, 5]).rank1_cpus([3, 1]).build(&machine).unwrap();
        assert_eq!(plan.cells(), 4);
        assert_eq!(
            plan.unusable_rank0_cpus.get(&CpuId(5)).map(String::as_str),
            Some("rank 0: CPU 5 cannot be bound: refused by the synthetic machine: EPERM")
        );
        assert_eq!(
            plan.unusable_rank1_cpus.get(&CpuId(3)).map(String::as_str),
            Some("rank 1: CPU 3 cannot be bound: offline")
        );
        assert_eq!(plan.unusable(0, 1), None);
        assert!(plan.unusable(0, 0).unwrap().starts_with("rank 1: CPU 3"));
        assert!(plan.unusable(1, 1).unwrap().starts_with("rank 0: CPU 5"));
    }

    #[test]
    fn what_cannot_be_measured_is_an_error_that_names_the_option() {
        let machine = machine("[machine]\ncpus = 8\ndevices = 2\noffline = \"3\"\n");
        let builder = CorePairPlan::builder;
        for (builder, option, words) in [
            (builder().device_pair([0, 7]), "--device-pair", "device 7 does not exist"),
            (builder().rank0_cpus([1, 1]), "--rank0-cpus", "element 2 (1) is a duplicate"),
            (builder().rank1_cpus([99]), "--rank1-cpus", "CPU 99 does not exist"),
            (builder().rank1_cpus([3]), "--rank1-cpus", "nothing can be measured: rank 1: CPU 3"),
            (builder().rank0_cpus([]), "--rank0-cpus", "the list is empty"),
            (builder().sizes([ByteSize(0)]), "--sizes", "0 bytes"),
            (builder().sizes([ByteSize(u64::MAX)]), "--sizes", "larger than any memory"),
            (builder().iters(0), "--iters", "at least one"),
            (builder().repeats(0), "--repeats", "between 1 and"),
            (builder().ci(Some(1.5)), "--ci", "between 0 and 1"),
            (builder().timeout(Duration::ZERO), "--timeout", "above 0"),
        ] {
            let error = builder.build(&machine).unwrap_err();
            assert!(error.is_usage(), "{error}");
            let text = error.to_string();
            assert!(text.starts_with(&format!("{option}: ")) && text.contains(words), "{text}");
        }
    }

    #[test]
    fn a_plan_reads_back_and_h2d_plans_are_written_as_before() {
        let machine = machine("[machine]\ncpus = 2\nsmt = 1\ndevices = 2\n");
        let plan = CorePairPlan::builder().device_pair([1, 0]).build(&machine).unwrap();
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(
            text,
            "{\"device_pair\":[1,0],\"rank0_cpus\":[0,1],\"rank1_cpus\":[0,1],\"sizes\":[8388608],\
             \"iters\":3,\"warmup\":null,\"repeats\":3,\"ci\":null,\"order\":\"blocks\",\"seed\":1,\
             \"check\":\"tags\",\"timeout_ns\":30000000000,\"expect\":null,\
             \"unusable_rank0_cpus\":{},\"unusable_rank1_cpus\":{}}"
        );
        assert_eq!(serde_json::from_str::<CorePairPlan>(&text).unwrap(), plan);
        let h2d = H2dPlan::builder().sizes([ByteSize::mib(1)]).build(&machine).unwrap();
        assert_eq!(
            serde_json::to_string(&h2d).unwrap(),
            "{\"cpus\":[0,1],\"devices\":[0,1],\"sizes\":[1048576],\"iters\":3,\"warmup\":null,\
             \"repeats\":3,\"ci\":null,\"order\":\"blocks\",\"seed\":1,\"arena\":\"node\",\
             \"check\":\"tags\",\"timeout_ns\":30000000000,\"expect\":null,\"unusable_cpus\":{},\
             \"unusable_devices\":{}}"
        );
    }

    #[test]
    fn costs_are_those_of_all_visits() {
        let machine = machine(
            "[machine]\ncpus = 4\nsmt = 1\nbind_us = 50\npoint_us = 5\noffline = \"3\"\n\
             [all_gather]\nlatency_us = 180\n",
        );
        let plan = CorePairPlan::builder()
            .rank0_cpus(0..3)
            .rank1_cpus(0..4)
            .sizes([ByteSize(1_000_000), ByteSize(2_000_000)])
            .iters(3)
            .warmup(Some(1))
            .repeats(2)
            .build(&machine)
            .unwrap();
        let cost = plan.cost(&machine, Bandwidth::gb_per_second(40.0));
        // 2 blocks × 3 × 3 usable cells, of each size once.
        assert_eq!(cost.points, 36);
        // 18 visits of 3 MB, 4 all-gathers each.
        assert_eq!(cost.bytes, ByteSize(216_000_000));
        // Each of two ranks sends S and receives 2 S of 2 MB.
        assert_eq!(cost.device_memory, ByteSize(12_000_000));
        // 216 MB at 40 GB/s; 36 points of 5 µs, two binds and 4 × 180 µs.
        let seconds = 5.4e-3 + 36.0 * (5.0 + 100.0 + 720.0) * 1e-6;
        assert!((cost.seconds / seconds - 1.0).abs() < 1e-9, "{}", cost.seconds);
    }

    #[test]
    fn more_visits_find_smaller_slowdowns() {
        let machine = machine("[machine]\ncpus = 32\n[all_gather]\nnoise = 0.03\n");
        let builder = CorePairPlan::builder().iters(1).repeats(4);
        let plan = builder.rank0_cpus(0..32).rank1_cpus(0..8).build(&machine).unwrap();
        let effects = plan.detectable(&machine);
        assert!((effects.assumed_noise - 0.03).abs() < 1e-12);
        // z of 0.001 / (2 × (32 + 8 + 256)) by Python's NormalDist: 4.6464; 95 % power: 1.6449.
        let expected = |visits: f64| 1.0 - (-(4.6464 + 1.6449) * 0.03 / visits.sqrt()).exp();
        for (found, visits) in
            [(effects.rank0_core, 32.0), (effects.rank1_core, 128.0), (effects.cell, 4.0)]
        {
            assert!((found / expected(visits) - 1.0).abs() < 2e-3, "{found} {visits}");
        }
    }
}
