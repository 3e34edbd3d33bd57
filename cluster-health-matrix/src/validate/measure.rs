//! Who measures what, when, and what becomes a line.

use std::collections::BTreeMap;

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{
    BackendKind, Binding, ByteSize, CpuId, DataType, DeviceId, Machine, PointContext,
};
use serde::{Deserialize, Serialize};

use super::matmul::{self, DeviceProduct, flops};
use super::{Convention, Line, LineStatus, RankPlace, RankValue, Scope, Table, ValidatePlan};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::estimate::relative_mad;
use crate::observer::{Observer, Progress};
use crate::run::{SCHEMA_VERSION, Tool};
use crate::samples::Timer;
use crate::schedule::Random;
use crate::stats::{median, median_ns, to_f64};
use crate::visit::talk::{decode, encode, hear};
use crate::visit::{Copies, Fastest, Operation, Ranks, SyntheticRanks, Visit};

/// A copy between device buffers that is so many times faster than one far beyond every cache never
/// left the cache.
const CACHED: f64 = 1.5;
/// Far beyond every cache.
const BEYOND_CACHES: ByteSize = ByteSize::mib(128);

/// What a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    operation: Operation,
    data_type: Option<u8>,
    order: Option<u32>,
    bytes: Option<ByteSize>,
}

impl Key {
    fn of(operation: Operation, bytes: ByteSize) -> Self {
        Self { operation, data_type: None, order: None, bytes: Some(bytes) }
    }

    fn matmul(operation: Operation, kind: u8, order: u32) -> Self {
        Self { operation, data_type: Some(kind), order: Some(order), bytes: None }
    }

    fn data_type(&self) -> Option<DataType> {
        self.data_type.and_then(|kind| TYPES.get(usize::from(kind)).copied())
    }
}

/// Element types of matrices, by their place here.
const TYPES: [DataType; 3] = [DataType::Float32, DataType::Float64, DataType::Float16];
const F32: u8 = 0;
const F64: u8 = 1;
const F16: u8 = 2;

/// What one rank measured in one repetition.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Reading {
    key: Key,
    rank: u32,
    /// Median of this rank's iterations, nanoseconds.
    ns: Option<f64>,
    /// Of collectives: median over the iterations of the slowest rank.
    slowest_ns: Option<f64>,
    timer: Option<Timer>,
    settled: bool,
    memory: Option<String>,
    status: LineStatus,
    reason: Option<String>,
}

impl Reading {
    fn of(key: Key, rank: u32, visit: &Visit, memory: Option<&str>) -> Self {
        let own = visit.rank_ns.as_ref().and_then(|ranks| ranks.get(rank as usize));
        Self {
            key,
            rank,
            ns: Some(own.map_or_else(|| visit.median_ns(), |own| median_ns(own))),
            slowest_ns: own.map(|_| visit.median_ns()),
            timer: visit.timer,
            settled: visit.settled,
            memory: memory.map(str::to_owned),
            status: LineStatus::Measured,
            reason: None,
        }
    }

    fn without(key: Key, rank: u32, error: &Error) -> Self {
        let missing = error.kind() == "unavailable";
        Self {
            key,
            rank,
            ns: None,
            slowest_ns: None,
            timer: None,
            settled: true,
            memory: None,
            status: if missing { LineStatus::NotAvailable } else { LineStatus::Failed },
            reason: Some(error.to_string()),
        }
    }
}

/// What rank 0 tells the others.
#[derive(Debug, Serialize, Deserialize)]
enum Call {
    /// Measure your own operations.
    Own,
    /// Measure with all others what ranks do together.
    Together,
    /// Send what you have; nothing follows.
    Finish,
}

/// What a rank has when it is done.
#[derive(Debug, Serialize, Deserialize)]
struct Harvest {
    places: Vec<RankPlace>,
    readings: Vec<Reading>,
}

/// The part of a plan that all ranks must share; devices and CPUs are those of each host.
fn shared_text(plan: &ValidatePlan) -> Result<String> {
    let plan = ValidatePlan { devices: Vec::new(), cpus: Vec::new(), ..plan.clone() };
    serde_json::to_string_pretty(&plan)
        .map_err(|error| Error::format("the plan", error.to_string()))
}

/// Rank 0, or the only process.
pub(super) fn lead(
    machine: &Machine,
    plan: &ValidatePlan,
    group: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<Table> {
    let mut worker = Worker::new(machine, plan, group);
    let size = group.map_or(1, RankGroup::size);
    if let Some(group) = group {
        group.all_equal("the plan", &shared_text(plan)?)?;
    }
    let total = u64::from(plan.repeats) * u64::from(size.max(worker.count()));
    let began = machine.now_ns();
    let mut done = 0;
    let mut complete = true;
    'blocks: for block in 0..plan.repeats {
        let mut order: Vec<u32> = (0..size).collect();
        Random::new(plan.seed.wrapping_add(u64::from(block) << 32)).shuffle(&mut order);
        for rank in order {
            if observer.is_cancelled() {
                complete = false;
                break 'blocks;
            }
            let elapsed_ns = machine.now_ns() - began;
            observer.between_visits(&Progress { done, total, bytes: worker.bytes, elapsed_ns });
            match group {
                Some(group) if rank > 0 => {
                    group.send(rank, &encode(&Call::Own)?)?;
                    hear(group, rank, observer)?;
                    done += 1;
                }
                _ => {
                    worker.own();
                    done += u64::from(worker.count());
                }
            }
        }
        if let Some(group) = group {
            for rank in 1..size {
                group.send(rank, &encode(&Call::Together)?)?;
            }
        }
        worker.together();
    }
    let mut harvest = worker.finish();
    if let Some(group) = group {
        for rank in 1..size {
            group.send(rank, &encode(&Call::Finish)?)?;
            let Some(message) = hear(group, rank, observer)? else { continue };
            let theirs: Harvest = decode(rank, &message)?;
            harvest.places.extend(theirs.places);
            harvest.readings.extend(theirs.readings);
        }
    }
    Ok(table(machine, plan, group, harvest, complete))
}

/// Every other rank; false when it was asked to end.
pub(super) fn follow(
    machine: &Machine,
    plan: &ValidatePlan,
    group: &RankGroup,
    observer: &mut dyn Observer,
) -> Result<bool> {
    let mut worker = Worker::new(machine, plan, Some(group));
    group.all_equal("the plan", &shared_text(plan)?)?;
    loop {
        let Some(message) = hear(group, 0, observer)? else { return Ok(false) };
        match decode(0, &message)? {
            Call::Own => {
                worker.own();
                group.send(0, &[])?;
            }
            Call::Together => worker.together(),
            Call::Finish => {
                group.send(0, &encode(&worker.finish())?)?;
                return Ok(true);
            }
        }
    }
}

/// A rank that this process plays.
struct Seat<'a> {
    rank: u32,
    device: DeviceId,
    peer: Option<DeviceId>,
    cpu: CpuId,
    copies: Option<Result<Copies<'a>, String>>,
    fastest: Fastest,
    products: BTreeMap<Key, Result<DeviceProduct>>,
    /// A wait ended by its time limit: nothing more is asked of the device.
    hangs: Option<String>,
}

/// Ranks together, as this process has them.
enum Together<'a> {
    NotYet,
    Live(Box<Ranks<'a>>),
    Synthetic(SyntheticRanks),
    /// Why, and whether that is a fault.
    Impossible(String, bool),
}

/// What this process does.
struct Worker<'a> {
    machine: &'a Machine,
    plan: &'a ValidatePlan,
    group: Option<&'a RankGroup>,
    seats: Vec<Seat<'a>>,
    binding: Option<Binding>,
    together: Together<'a>,
    readings: Vec<Reading>,
    /// Visits so far: the number of the next one.
    visits: u64,
    block: u32,
    bytes: u64,
}

impl<'a> Worker<'a> {
    fn new(machine: &'a Machine, plan: &'a ValidatePlan, group: Option<&'a RankGroup>) -> Self {
        let seat = |at: usize, rank: u32| {
            let at = at % plan.devices.len().max(1);
            let next = plan.devices[(at + 1) % plan.devices.len()];
            Seat {
                rank,
                device: plan.devices[at],
                peer: (next != plan.devices[at]).then_some(next),
                cpu: plan.cpus[at],
                copies: None,
                fastest: Fastest::default(),
                products: BTreeMap::new(),
                hangs: None,
            }
        };
        let seats = match group {
            Some(group) => vec![seat(local_rank(group), group.rank())],
            // One process can be all ranks of a synthetic machine, and one of any other.
            None if machine.has_virtual_time() => {
                (0..plan.devices.len()).zip(0..).map(|(at, rank)| seat(at, rank)).collect()
            }
            None => vec![seat(0, 0)],
        };
        Self {
            machine,
            plan,
            group,
            seats,
            binding: None,
            together: Together::NotYet,
            readings: Vec::new(),
            visits: 0,
            block: 0,
            bytes: 0,
        }
    }

    fn count(&self) -> u32 {
        u32::try_from(self.seats.len()).unwrap_or(u32::MAX)
    }

    fn bind(&mut self, cpu: CpuId) -> Result<()> {
        match &mut self.binding {
            Some(binding) => binding.move_to(cpu)?,
            None => self.binding = Some(self.machine.bind(cpu)?),
        }
        Ok(())
    }

    /// One repetition of the operations of each rank of this process.
    fn own(&mut self) {
        let mut keys = Vec::new();
        for &order in &self.plan.orders {
            keys.extend([F32, F64].map(|kind| Key::matmul(Operation::CpuMatmul, kind, order)));
        }
        if self.machine.backend() == BackendKind::Ascend {
            for &order in &self.plan.device_orders {
                let kinds = [F16, F32];
                keys.extend(kinds.map(|kind| Key::matmul(Operation::DeviceMatmul, kind, order)));
            }
        }
        for &bytes in &self.plan.sizes {
            let copies = [
                Operation::H2d,
                Operation::D2h,
                Operation::D2dSameDevice,
                Operation::DeviceToDevice,
            ];
            keys.extend(copies.map(|operation| Key::of(operation, bytes)));
        }
        for at in 0..self.seats.len() {
            let (rank, cpu) = (self.seats[at].rank, self.seats[at].cpu);
            let seed = self.plan.seed ^ u64::from(self.block) << 40 ^ u64::from(rank) << 20;
            Random::new(seed).shuffle(&mut keys);
            let bound = self.bind(cpu);
            for key in &keys {
                let result = match &bound {
                    Ok(()) => self.one(at, *key),
                    Err(error) => Err(Error::output("binding", error.to_string())),
                };
                let memory = self.memory(at, *key);
                self.readings.push(match result {
                    Ok(visit) => Reading::of(*key, rank, &visit, memory),
                    Err(error) => Reading::without(*key, rank, &error),
                });
            }
        }
        self.block += 1;
    }

    fn memory(&self, at: usize, key: Key) -> Option<&'static str> {
        match (&self.seats[at].copies, key.operation) {
            (Some(Ok(copies)), Operation::H2d | Operation::D2h) => Some(copies.memory()),
            _ => None,
        }
    }

    fn one(&mut self, at: usize, key: Key) -> Result<Visit> {
        let (machine, plan, settings) = (self.machine, self.plan, self.plan.settings());
        let seq = self.visits;
        self.visits += 1;
        let load = plan.load.as_str();
        machine.begin_point(&PointContext { seq, visit: seq, sweep_is_pair: false, load });
        let seat = &mut self.seats[at];
        if let (Operation::CpuMatmul, Some(data_type), Some(order)) =
            (key.operation, key.data_type(), key.order)
        {
            if machine.has_virtual_time() {
                return Err(unavailable("a product", "a simulated CPU computes nothing"));
            }
            return matmul::visit(machine, settings, order, data_type, &mut seat.fastest);
        }
        if let Some(reason) = &seat.hangs {
            return Err(Error::output("the device", format!("hung at an earlier visit: {reason}")));
        }
        if let (Some(data_type), Some(order)) = (key.data_type(), key.order) {
            let made = seat.products.entry(key).or_insert_with(|| {
                DeviceProduct::new(machine, seat.device, order, data_type, settings)
            });
            let result = match made {
                Ok(product) => product.visit(machine, settings, (key.operation, order)),
                Err(error) if error.kind() == "unavailable" => {
                    let message = error.to_string();
                    return Err(unavailable("a product on the device", &message));
                }
                Err(error) => Err(Error::output("a product on the device", error.to_string())),
            };
            if let Err(error) = &result
                && error.kind() == "timeout"
            {
                seat.hangs = Some(error.to_string());
            }
            return result;
        }
        if key.operation == Operation::DeviceToDevice && seat.peer.is_none() {
            return Err(unavailable("a copy between devices", "there is one device"));
        }
        let bytes = key.bytes.unwrap_or_default();
        let (device, peer) = (seat.device, seat.peer);
        let made = seat.copies.get_or_insert_with(|| {
            Copies::new(machine, device, peer, plan.largest(), settings)
                .map_err(|error| error.to_string())
        });
        let copies = match made {
            Ok(copies) => copies,
            Err(reason) => return Err(Error::output("memory for copies", reason.clone())),
        };
        let result = copies.visit(key.operation, bytes, plan.seed ^ seq << 24);
        match &result {
            Err(error) if error.kind() == "timeout" => seat.hangs = Some(error.to_string()),
            Ok(visit) => {
                let copies = (visit.warmup_ns.len() + visit.iter_ns.len()) as u64;
                self.bytes += copies * bytes.bytes();
            }
            Err(_) => {}
        }
        result
    }

    /// One repetition of what ranks do together.
    fn together(&mut self) {
        let mut keys: Vec<Key> = Vec::new();
        for &bytes in &self.plan.sizes {
            keys.push(Key::of(Operation::AllGather, bytes));
            keys.push(Key::of(Operation::SendReceive, bytes));
        }
        // The same order on every rank.
        Random::new(self.plan.seed ^ u64::from(self.block) << 48).shuffle(&mut keys);
        self.prepare();
        for key in keys {
            let seq = self.visits;
            self.visits += 1;
            let bytes = key.bytes.unwrap_or_default();
            // Every rank counts its own visits: the tags come from what all have in common.
            let seed = self.plan.seed ^ u64::from(self.block) << 40 ^ bytes.bytes() << 8;
            let result = match &mut self.together {
                Together::Live(ranks) => ranks.visit(key.operation, bytes, seed),
                Together::Synthetic(ranks) => {
                    ranks.visit(self.machine, key.operation, bytes, (seq, &self.plan.load))
                }
                Together::Impossible(reason, true) => {
                    Err(Error::output("ranks together", reason.clone()))
                }
                Together::Impossible(reason, false) => Err(unavailable("ranks together", reason)),
                Together::NotYet => return,
            };
            let takes_part = |rank: u32| key.operation == Operation::AllGather || rank < 2;
            let ranks: Vec<u32> =
                self.seats.iter().map(|seat| seat.rank).filter(|rank| takes_part(*rank)).collect();
            let synthetic = matches!(self.together, Together::Synthetic(_));
            for rank in ranks.into_iter().filter(|rank| !synthetic || *rank < 2) {
                self.readings.push(match &result {
                    Ok(visit) => Reading::of(key, rank, visit, None),
                    Err(error) => Reading::without(key, rank, error),
                });
            }
        }
    }

    fn prepare(&mut self) {
        if !matches!(self.together, Together::NotYet) {
            return;
        }
        let settings = self.plan.settings();
        self.together = match (self.group, self.machine.synthetic_pair()) {
            (_, Some(pair)) if self.seats.len() > 1 => {
                let of = |at: usize| &self.seats[at];
                let devices = [of(0).device, of(1).device];
                let cpus = [of(0).cpu, of(1).cpu];
                Together::Synthetic(SyntheticRanks::new(pair, devices, cpus, settings))
            }
            (Some(group), None) if group.size() > 1 => {
                let (device, cpu) = (self.seats[0].device, self.seats[0].cpu);
                let largest = self.plan.largest();
                let made = self
                    .bind(cpu)
                    .and_then(|()| Ranks::new(self.machine, group, device, cpu, largest, settings));
                match made {
                    Ok(ranks) => Together::Live(Box::new(ranks)),
                    Err(error) => {
                        Together::Impossible(error.to_string(), error.kind() != "unavailable")
                    }
                }
            }
            _ => Together::Impossible("there is one rank".to_owned(), false),
        };
    }

    fn finish(self) -> Harvest {
        let host = Environment::of(self.machine).hostname;
        let place = |seat: &Seat<'_>| RankPlace {
            rank: seat.rank,
            host: host.clone(),
            device: seat.device,
            cpu: seat.cpu,
            numa_node: self.machine.node_of(seat.cpu).map(|node| node.0),
        };
        Harvest { places: self.seats.iter().map(place).collect(), readings: self.readings }
    }
}

/// The number of this rank among those of its host.
pub(crate) fn local_rank(group: &RankGroup) -> usize {
    let one_host = (0..group.size()).all(|peer| group.same_host(peer));
    let told = cluster_health_core::RankEnvironment::detect().ok().flatten();
    let local = told.and_then(|environment| environment.local_rank).filter(|_| !one_host);
    local.unwrap_or_else(|| group.rank()) as usize
}

fn unavailable(what: &str, message: &str) -> Error {
    Error::Core(cluster_health_core::Error::Unavailable {
        what: what.to_owned(),
        message: message.to_owned(),
    })
}

fn table(
    machine: &Machine,
    plan: &ValidatePlan,
    group: Option<&RankGroup>,
    mut harvest: Harvest,
    complete: bool,
) -> Table {
    harvest.places.sort_by_key(|place| place.rank);
    let mut by_key = BTreeMap::<Key, Vec<Reading>>::new();
    for reading in harvest.readings {
        by_key.entry(reading.key).or_default().push(reading);
    }
    let mut lines = Vec::new();
    for (key, readings) in &by_key {
        let ranks = match key.operation {
            Operation::AllGather if machine.has_virtual_time() => 2,
            Operation::AllGather => harvest.places.len(),
            Operation::SendReceive => 2,
            _ => 1,
        };
        let conventions: &[Convention] = match key.operation {
            Operation::AllGather => &[Convention::PerRank, Convention::Alg, Convention::Bus],
            _ => &[Convention::PerRank],
        };
        for convention in conventions {
            let mut line = line(plan, *key, readings, *convention, ranks);
            if key.operation == Operation::AllGather
                && machine.has_virtual_time()
                && harvest.places.len() > 2
            {
                line.scope = Scope::LocalPair;
            }
            lines.push(line);
        }
    }
    device_products(machine, plan, &mut lines);
    mark_cached(plan, &mut lines);
    lines.extend(between_hosts(plan, group));
    Table {
        schema_version: SCHEMA_VERSION,
        tool: Tool { version: env!("CARGO_PKG_VERSION").to_owned() },
        complete,
        ranks: harvest.places,
        lines,
    }
}

/// Rate of a reading.
fn rate(key: Key, convention: Convention, ranks: usize, ns: f64) -> f64 {
    let ranks = u32::try_from(ranks).map_or(f64::INFINITY, f64::from);
    let factor = match convention {
        Convention::PerRank => 1.0,
        Convention::Alg => ranks,
        Convention::Bus => ranks - 1.0,
    };
    match (key.order, key.bytes) {
        // Operations per nanosecond are 1e9 per second.
        (Some(order), _) => flops(order) / ns / 1e3,
        (_, Some(bytes)) => factor * to_f64(bytes.bytes()) / ns,
        _ => f64::NAN,
    }
}

fn line(
    plan: &ValidatePlan,
    key: Key,
    readings: &[Reading],
    convention: Convention,
    ranks: usize,
) -> Line {
    let mut by_rank = BTreeMap::<u32, Vec<&Reading>>::new();
    for reading in readings {
        by_rank.entry(reading.rank).or_default().push(reading);
    }
    let some = |value: f64| value.is_finite().then_some(value);
    let per_rank: Vec<RankValue> = by_rank
        .into_iter()
        .map(|(rank, readings)| {
            let mut values: Vec<f64> = readings
                .iter()
                .filter_map(|reading| reading.ns)
                .map(|ns| rate(key, convention, ranks, ns))
                .collect();
            let repetitions = u32::try_from(values.len()).unwrap_or(u32::MAX);
            let value = median(&mut values);
            RankValue {
                rank,
                value: some(value),
                spread: some(relative_mad(&mut values, value)),
                repetitions,
                timer: readings.iter().find_map(|reading| reading.timer),
                unsettled: readings.iter().map(|reading| u32::from(!reading.settled)).sum(),
                reason: readings.iter().find_map(|reading| reading.reason.clone()),
            }
        })
        .collect();
    let mut values: Vec<f64> = per_rank.iter().filter_map(|rank| rank.value).collect();
    let mut spreads: Vec<f64> = per_rank.iter().filter_map(|rank| rank.spread).collect();
    let middle = median(&mut values);
    let slowest: Vec<f64> = readings.iter().filter_map(|reading| reading.slowest_ns).collect();
    let mut collective: Vec<f64> =
        slowest.into_iter().map(|ns| rate(key, convention, ranks, ns)).collect();
    let has = |status: LineStatus| readings.iter().any(|reading| reading.status == status);
    let status = if has(LineStatus::Failed) {
        LineStatus::Failed
    } else if has(LineStatus::Measured) {
        LineStatus::Measured
    } else {
        LineStatus::NotAvailable
    };
    Line {
        operation: key.operation,
        scope: match key.operation {
            Operation::AllGather => Scope::LocalHost,
            Operation::SendReceive => Scope::LocalPair,
            _ => Scope::Rank,
        },
        load: plan.load.clone(),
        bytes: key.bytes,
        order: key.order,
        data_type: key.data_type(),
        unit: if key.order.is_some() { "TFLOPS" } else { "GB/s" }.to_owned(),
        convention,
        memory: readings.iter().find_map(|reading| reading.memory.clone()),
        ranks: u32::try_from(values.len()).unwrap_or(u32::MAX),
        repetitions: per_rank
            .iter()
            .map(|rank| rank.repetitions)
            .filter(|count| *count > 0)
            .min()
            .unwrap_or(0),
        min: values.iter().copied().reduce(f64::min),
        median: some(middle),
        max: values.iter().copied().reduce(f64::max),
        spread: some(median(&mut spreads)),
        collective: some(median(&mut collective)),
        cached: false,
        status,
        reason: readings.iter().find_map(|reading| reading.reason.clone()),
        per_rank,
    }
}

/// The lines of products on devices.
fn device_products(machine: &Machine, plan: &ValidatePlan, lines: &mut Vec<Line>) {
    if lines.iter().any(|line| line.operation == Operation::DeviceMatmul) {
        return;
    }
    let device_at = lines.iter().take_while(|line| line.operation == Operation::CpuMatmul).count();
    if machine.backend() == BackendKind::Host {
        // The CPU is what computes on the memory that is the device here.
        let cpu: Vec<Line> = lines
            .iter()
            .filter(|line| line.operation == Operation::CpuMatmul)
            .map(|line| Line {
                operation: Operation::DeviceMatmul,
                reason: Some("host backend: the CPU's own, measured once".to_owned()),
                ..line.clone()
            })
            .collect();
        lines.splice(device_at..device_at, cpu);
        return;
    }
    for (&order, at) in plan.device_orders.iter().zip(device_at..) {
        let key = Key::matmul(Operation::DeviceMatmul, F16, order);
        let reason = "a simulated device computes nothing";
        lines.insert(at, empty(plan, key, Scope::Rank, LineStatus::NotAvailable, reason));
    }
}

fn empty(plan: &ValidatePlan, key: Key, scope: Scope, status: LineStatus, reason: &str) -> Line {
    let mut line = line(plan, key, &[], Convention::PerRank, 1);
    line.scope = scope;
    line.status = status;
    line.reason = Some(reason.to_owned());
    line
}

/// What would need another host.
fn between_hosts(plan: &ValidatePlan, group: Option<&RankGroup>) -> Vec<Line> {
    let spans = group.is_some_and(|group| (0..group.size()).any(|peer| !group.same_host(peer)));
    let reason = if spans {
        "this version measures collectives among the ranks of one host"
    } else {
        "one host"
    };
    let largest = plan.largest();
    [(Operation::AllGather, Scope::Global), (Operation::SendReceive, Scope::InterHostPair)]
        .map(|(operation, scope)| {
            empty(plan, Key::of(operation, largest), scope, LineStatus::NotMeasured, reason)
        })
        .into()
}

/// Marks copies between buffers of one device that its memory cannot have carried.
fn mark_cached(plan: &ValidatePlan, lines: &mut [Line]) {
    let of = |line: &Line| match (line.operation, line.bytes, line.median) {
        (Operation::D2dSameDevice, Some(bytes), Some(rate)) => Some((bytes, rate)),
        _ => None,
    };
    let points: Vec<(ByteSize, f64)> = lines.iter().filter_map(of).collect();
    for line in lines.iter_mut() {
        if let Some((bytes, rate)) = of(line)
            && let Some(reason) = cached(&points, bytes, rate, plan.expect_hbm_gbps())
        {
            line.cached = true;
            line.reason = Some(reason);
        }
    }
}

impl ValidatePlan {
    fn expect_hbm_gbps(&self) -> Option<f64> {
        self.expect_hbm.map(|rate| rate.as_gb_per_second())
    }
}

/// Why a copy of `bytes` at `rate` GB/s between buffers of one device is a cache's; `points` are all
/// sizes with their rates, `peak` what the memory can carry, reading and writing together.
pub(crate) fn cached(
    points: &[(ByteSize, f64)],
    bytes: ByteSize,
    rate: f64,
    peak: Option<f64>,
) -> Option<String> {
    if let Some(peak) = peak
        && 2.0 * rate > peak
    {
        return Some(format!(
            "cached: reads and writes {:.1} GB/s together, the memory carries {peak:.1}",
            2.0 * rate
        ));
    }
    let (largest, beyond) = points.iter().copied().max_by_key(|point| point.0)?;
    (largest >= BEYOND_CACHES && largest > bytes && rate > CACHED * beyond).then(|| {
        format!("cached: {:.1} × the rate at {largest}, beyond every cache", rate / beyond)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Same-device copies of the node "180" as published: 16 to 64 MiB came from the cache.
    #[test]
    fn what_is_far_above_the_plateau_is_cached() {
        let rates = [
            (8, 657.6),
            (16, 1281.8),
            (32, 1791.6),
            (64, 2168.2),
            (128, 599.2),
            (256, 603.2),
            (1024, 620.5),
        ];
        let points = rates.map(|(mib, rate)| (ByteSize::mib(mib), rate));
        let marked = |peak| -> Vec<u64> {
            points
                .iter()
                .filter(|(bytes, rate)| cached(&points, *bytes, *rate, peak).is_some())
                .map(|point| point.0.bytes() >> 20)
                .collect()
        };
        assert_eq!(marked(None), [16, 32, 64]);
        // 1,600 GB/s read and written: 800 GB/s of copies.
        assert_eq!(marked(Some(1600.0)), [16, 32, 64]);
        assert_eq!(marked(Some(1200.0)), [8, 16, 32, 64, 256, 1024]);
        // Nothing to compare with below the size that no cache holds.
        let points = points.map(|(bytes, rate)| (ByteSize(bytes.bytes() / 16), rate));
        assert_eq!(cached(&points, points[3].0, points[3].1, None), None);
    }
}
