//! Visits in random order within blocks, on every rank.

use std::collections::BTreeMap;

use cluster_health_core::affinity::CpuSet;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{ByteSize, CpuId, DeviceId, Machine, NodeId, Placement, PointContext};
use serde::{Deserialize, Serialize};

use super::evaluate::{Readings, lines};
use super::policy::{Local, Memory, Resolved, usable_on};
use super::{PoliciesPlan, PolicySeat, PolicyStatus, PolicySweep, PolicyVisit, RankPolicy};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::observer::{Observer, Progress};
use crate::run::{SCHEMA_VERSION, Tool};
use crate::schedule::Random;
use crate::validate::local_rank;
use crate::visit::talk::{decode, encode, hear};
use crate::visit::{Copies, Fastest, Operation, Ranks, SyntheticRanks, Visit};

/// What a line is about; in the order of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Cell {
    pub(super) operation: Operation,
    pub(super) bytes: ByteSize,
    pub(super) memory: Option<Memory>,
    /// Its place in the plan's list.
    pub(super) policy: usize,
}

impl PoliciesPlan {
    pub(super) fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &operation in &self.operations {
            let memories: Vec<Option<Memory>> = match operation {
                Operation::H2d => self.memory.iter().copied().map(Some).collect(),
                // There is no host memory in it.
                _ => vec![None],
            };
            for &bytes in &self.sizes {
                for &memory in &memories {
                    cells.extend((0..self.policies.len()).map(|policy| Cell {
                        operation,
                        bytes,
                        memory,
                        policy,
                    }));
                }
            }
        }
        cells
    }
}

/// One visit as a rank made it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Reading {
    pub(super) visit: PolicyVisit,
    pub(super) host_memory: Option<String>,
}

/// Which visit it is.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Turn {
    cell: Cell,
    block: u32,
    seq: u64,
}

/// What rank 0 tells the others.
#[derive(Debug, Serialize, Deserialize)]
enum Call {
    /// Copy by yourself and send the reading.
    Own(Turn),
    /// Place your thread for what follows and say whether that can be.
    Place(Turn),
    /// All are placed: gather, and send the reading.
    Gather { turn: Turn, crowded: bool },
    /// Nothing follows.
    Finish,
}

/// Why a visit cannot be made.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Problem {
    status: PolicyStatus,
    reason: String,
    errno: Option<i64>,
}

impl Problem {
    fn refused(error: &Error) -> Self {
        let errno = match error {
            Error::Core(error) => error.code(),
            _ => None,
        };
        Self { status: PolicyStatus::Skipped, reason: error.to_string(), errno }
    }

    fn of(error: &Error) -> Self {
        let status = match error.kind() {
            "unavailable" => PolicyStatus::NotAvailable,
            _ => PolicyStatus::Failed,
        };
        Self { status, reason: error.to_string(), errno: None }
    }

    fn failed(reason: impl Into<String>) -> Self {
        Self { status: PolicyStatus::Failed, reason: reason.into(), errno: None }
    }
}

/// A rank that is placed.
type Placed = Result<CpuSet, Problem>;

fn shared_text(plan: &PoliciesPlan) -> Result<String> {
    // Devices are those of each host.
    let plan = PoliciesPlan { devices: Vec::new(), ..plan.clone() };
    serde_json::to_string_pretty(&plan)
        .map_err(|error| Error::format("the plan", error.to_string()))
}

/// Rank 0, or the only process.
pub(super) fn lead(
    machine: &Machine,
    plan: &PoliciesPlan,
    group: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<PolicySweep> {
    let mut worker = Worker::new(machine, plan, group)?;
    let mut seats = worker.describe();
    let others = group.map_or(1, RankGroup::size);
    if let Some(group) = group {
        group.all_equal("the plan", &shared_text(plan)?)?;
        for rank in 1..others {
            let Some(message) = hear(group, rank, observer)? else { continue };
            seats.extend(decode::<Vec<PolicySeat>>(rank, &message)?);
        }
    }
    seats.sort_by_key(|seat| seat.rank);
    let ranks: Vec<u32> = seats.iter().map(|seat| seat.rank).collect();
    let mut readings = Readings::new();
    let cells = plan.cells();
    let total = u64::from(plan.repeats) * cells.len() as u64;
    let (began, mut done, mut seq, mut complete) = (machine.now_ns(), 0, 0, true);
    'blocks: for block in 0..plan.repeats {
        let mut random = Random::new(plan.seed.wrapping_add(u64::from(block) << 32));
        let mut order = cells.clone();
        random.shuffle(&mut order);
        for cell in order {
            if observer.is_cancelled() {
                complete = false;
                break 'blocks;
            }
            let elapsed_ns = machine.now_ns() - began;
            observer.between_visits(&Progress { done, total, bytes: worker.bytes, elapsed_ns });
            if cell.operation == Operation::AllGather {
                let turn = Turn { cell, block, seq };
                seq += 1;
                for (rank, reading) in worker.together(turn, &ranks, observer)? {
                    readings.entry(cell).or_default().entry(rank).or_default().push(reading);
                }
            } else {
                // One rank after the other: a line shows idle links.
                let mut turns = ranks.clone();
                random.shuffle(&mut turns);
                for rank in turns {
                    let turn = Turn { cell, block, seq };
                    seq += 1;
                    let reading = worker.of_rank(rank, turn, observer)?;
                    readings.entry(cell).or_default().entry(rank).or_default().push(reading);
                }
            }
            done += 1;
        }
    }
    if let Some(group) = group {
        for rank in 1..others {
            group.send(rank, &encode(&Call::Finish)?)?;
        }
    }
    // The thread has its own mask again before anything is written.
    drop(worker);
    Ok(PolicySweep {
        schema_version: SCHEMA_VERSION,
        tool: Tool { version: env!("CARGO_PKG_VERSION").to_owned() },
        complete,
        lines: lines(plan, &seats, readings),
        ranks: seats,
    })
}

/// Every other rank; false when it was asked to end.
pub(super) fn follow(
    machine: &Machine,
    plan: &PoliciesPlan,
    group: &RankGroup,
    observer: &mut dyn Observer,
) -> Result<bool> {
    let mut worker = Worker::new(machine, plan, Some(group))?;
    group.all_equal("the plan", &shared_text(plan)?)?;
    group.send(0, &encode(&worker.describe())?)?;
    loop {
        let Some(message) = hear(group, 0, observer)? else { return Ok(false) };
        let reply = match decode(0, &message)? {
            Call::Own(turn) => encode(&worker.own(0, turn))?,
            Call::Place(turn) => encode(&worker.place_live(turn))?,
            Call::Gather { turn, crowded } => encode(&worker.gather(turn, crowded))?,
            Call::Finish => return Ok(true),
        };
        group.send(0, &reply)?;
    }
}

/// A rank that this process plays.
struct Seat<'a> {
    rank: u32,
    device: DeviceId,
    policies: Vec<Resolved>,
    copies: Option<Result<Copies<'a>, String>>,
    /// Warm-ups are compared with visits under the same policy and memory only.
    fastest: BTreeMap<(usize, Option<Memory>), Fastest>,
    /// A wait ended by its time limit: nothing more is asked of the device.
    hangs: Option<String>,
}

/// Ranks together, as this process has them.
enum Together<'a> {
    NotYet,
    Live(Box<Ranks<'a>>),
    Synthetic(SyntheticRanks),
    Impossible(Problem),
}

struct Worker<'a> {
    machine: &'a Machine,
    plan: &'a PoliciesPlan,
    group: Option<&'a RankGroup>,
    seats: Vec<Seat<'a>>,
    placement: Placement,
    inherited: CpuSet,
    together: Together<'a>,
    fastest: BTreeMap<usize, Fastest>,
    bytes: u64,
}

impl<'a> Worker<'a> {
    fn new(
        machine: &'a Machine,
        plan: &'a PoliciesPlan,
        group: Option<&'a RankGroup>,
    ) -> Result<Self> {
        let seat = |at: usize, rank: u32, size: usize| {
            let device = plan.devices[at % plan.devices.len()];
            let near = machine.device(device).and_then(|device| device.info().node);
            let local = Local { rank: at, size };
            let policies = plan.policies.iter().map(|policy| policy.resolve(machine, local, near));
            Ok(Seat {
                rank,
                device,
                policies: policies.collect::<Result<_>>()?,
                copies: None,
                fastest: BTreeMap::new(),
                hangs: None,
            })
        };
        let planned = plan.devices.len();
        let seats: Result<Vec<Seat<'_>>> = match group {
            Some(group) => {
                let here = (0..group.size()).filter(|peer| group.same_host(*peer)).count();
                vec![seat(local_rank(group), group.rank(), here)].into_iter().collect()
            }
            // One process can be all ranks of a synthetic machine, and one of any other.
            None if machine.has_virtual_time() => {
                (0..planned).zip(0..).map(|(at, rank)| seat(at, rank, planned)).collect()
            }
            None => vec![seat(0, 0, planned)].into_iter().collect(),
        };
        let mut placement = machine.placement()?;
        let inherited = placement.allowed()?;
        Ok(Self {
            machine,
            plan,
            group,
            seats: seats?,
            placement,
            inherited,
            together: Together::NotYet,
            fastest: BTreeMap::new(),
            bytes: 0,
        })
    }

    fn describe(&self) -> Vec<PolicySeat> {
        let host = Environment::of(self.machine).hostname;
        let describe = |seat: &Seat<'_>| PolicySeat {
            rank: seat.rank,
            host: host.clone(),
            device: seat.device,
            numa_node: self.machine.device(seat.device).and_then(|device| device.info().node),
            inherited: self.inherited.clone(),
            policies: self
                .plan
                .policies
                .iter()
                .zip(&seat.policies)
                .map(|(policy, resolved)| RankPolicy {
                    policy: policy.clone(),
                    cpus: resolved.cpus.clone(),
                    memory_node: resolved.node,
                })
                .collect(),
        };
        self.seats.iter().map(describe).collect()
    }

    /// A reading of one rank by itself.
    fn of_rank(&mut self, rank: u32, turn: Turn, observer: &dyn Observer) -> Result<Reading> {
        if let Some(at) = self.seats.iter().position(|seat| seat.rank == rank) {
            return Ok(self.own(at, turn));
        }
        let missing = || Error::output("ranks", format!("rank {rank} is not in this group"));
        let group = self.group.ok_or_else(missing)?;
        group.send(rank, &encode(&Call::Own(turn))?)?;
        let message = hear(group, rank, observer)?.ok_or(Error::Cancelled)?;
        decode(rank, &message)
    }

    /// The thread where a policy has it; what the kernel then allows.
    fn place(&mut self, at: usize, policy: usize) -> Placed {
        let placed = match &self.seats[at].policies[policy].cpus {
            None => self.placement.release(),
            Some(cpus) => self.placement.allow(cpus),
        };
        placed
            .and_then(|()| self.placement.allowed())
            .map_err(|error| Problem::refused(&error.into()))
    }

    /// A copy of this process's rank `at`.
    fn own(&mut self, at: usize, turn: Turn) -> Reading {
        let mut host_memory = None;
        let mut page_nodes = None;
        let placed = self.prepare_copy(at, turn);
        let mut allowed = None;
        let times = placed.and_then(|cpus| {
            allowed = Some(cpus);
            self.copy(at, turn)
        });
        if let (Some(Ok(copies)), Some(_)) = (&self.seats[at].copies, turn.cell.memory) {
            if allowed.is_some() {
                page_nodes = copies.page_nodes();
            }
            host_memory = Some(copies.memory().to_owned());
        }
        let visit = visit(turn, allowed, page_nodes, times);
        Reading { visit, host_memory }
    }

    /// Memory where the cell wants it, then the thread.
    fn prepare_copy(&mut self, at: usize, turn: Turn) -> Placed {
        let (machine, plan, cell) = (self.machine, self.plan, turn.cell);
        let load = plan.load.as_str();
        let context = PointContext { seq: turn.seq, visit: turn.seq, sweep_is_pair: false, load };
        machine.begin_point(&context);
        if let Some(reason) = &self.seats[at].hangs {
            return Err(Problem::failed(format!("the device hung at an earlier visit: {reason}")));
        }
        if self.seats[at].copies.is_none() {
            // Unbound: whatever threads a runtime starts here keep the mask that is theirs now.
            self.placement.release().map_err(|error| Problem::refused(&error.into()))?;
            let device = self.seats[at].device;
            let made = Copies::new(machine, device, None, plan.largest(), plan.settings());
            self.seats[at].copies = Some(made.map_err(|error| error.to_string()));
        }
        if cell.memory == Some(Memory::Bound) {
            let node = self.seats[at].policies[cell.policy].node;
            let cpus = match node {
                Some(node) => usable_on(machine, node).map_err(|error| Problem::of(&error))?,
                None => Vec::new(),
            };
            let cpus: CpuSet = cpus.into_iter().collect();
            if cpus.is_empty() {
                let reason = match node {
                    Some(node) => format!("no usable CPU touches memory on NUMA node {node}"),
                    None => "this machine has no NUMA nodes".to_owned(),
                };
                return Err(Problem { status: PolicyStatus::NotAvailable, reason, errno: None });
            }
            self.placement.allow(&cpus).map_err(|error| Problem::refused(&error.into()))?;
            self.renew(at)?;
        }
        let placed = self.place(at, cell.policy)?;
        if cell.memory == Some(Memory::FirstTouch) {
            self.renew(at)?;
        }
        Ok(placed)
    }

    /// New host memory for every visit: speed can belong to a buffer.
    fn renew(&mut self, at: usize) -> Result<(), Problem> {
        match &mut self.seats[at].copies {
            Some(Ok(copies)) => copies.renew_host().map_err(|error| Problem::of(&error)),
            _ => Ok(()),
        }
    }

    fn copy(&mut self, at: usize, turn: Turn) -> Result<Visit, Problem> {
        let cell = turn.cell;
        let seat = &mut self.seats[at];
        let copies = match &mut seat.copies {
            Some(Ok(copies)) => copies,
            Some(Err(reason)) => return Err(Problem::failed(format!("memory: {reason}"))),
            None => return Err(Problem::failed("memory was not allocated")),
        };
        let fastest = seat.fastest.entry((cell.policy, cell.memory)).or_default();
        std::mem::swap(copies.fastest(), fastest);
        let result = copies.visit(cell.operation, cell.bytes, self.plan.seed ^ turn.seq << 24);
        std::mem::swap(copies.fastest(), fastest);
        match result {
            Ok(visit) => {
                let copies = (visit.warmup_ns.len() + visit.iter_ns.len()) as u64;
                self.bytes += copies * cell.bytes.bytes();
                Ok(visit)
            }
            Err(error) => {
                if error.kind() == "timeout" {
                    seat.hangs = Some(error.to_string());
                }
                Err(Problem::of(&error))
            }
        }
    }

    /// One visit of all ranks together; each one's reading.
    fn together(
        &mut self,
        turn: Turn,
        ranks: &[u32],
        observer: &dyn Observer,
    ) -> Result<Vec<(u32, Reading)>> {
        if self.machine.has_virtual_time() {
            return Ok(self.together_synthetic(turn));
        }
        let mut placed: Vec<(u32, Placed)> = Vec::new();
        let others: Vec<u32> = ranks.iter().copied().filter(|rank| *rank != 0).collect();
        if let Some(group) = self.group {
            for &rank in &others {
                group.send(rank, &encode(&Call::Place(turn))?)?;
            }
        }
        placed.push((0, self.place_live(turn)));
        if let Some(group) = self.group {
            for &rank in &others {
                let message = hear(group, rank, observer)?.ok_or(Error::Cancelled)?;
                placed.push((rank, decode(rank, &message)?));
            }
        }
        if placed.iter().any(|(_, placed)| placed.is_err()) {
            return Ok(nobody(turn, placed));
        }
        let union = placed.iter().filter_map(|(_, placed)| placed.as_ref().ok());
        let union = union.fold(CpuSet::new(), |all, cpus| all.union(cpus));
        let crowded = union.len() < ranks.len();
        if let Some(group) = self.group {
            for &rank in &others {
                group.send(rank, &encode(&Call::Gather { turn, crowded })?)?;
            }
        }
        let mut readings = vec![(0, self.gather(turn, crowded))];
        if let Some(group) = self.group {
            for &rank in &others {
                let message = hear(group, rank, observer)?.ok_or(Error::Cancelled)?;
                readings.push((rank, decode(rank, &message)?));
            }
        }
        Ok(readings)
    }

    /// This process's rank in its place for a gather.
    fn place_live(&mut self, turn: Turn) -> Placed {
        self.join();
        match &self.together {
            Together::Impossible(problem) => Err(problem.clone()),
            _ => self.place(0, turn.cell.policy),
        }
    }

    /// Meets the other ranks, all of them at the same time.
    fn join(&mut self) {
        if !matches!(self.together, Together::NotYet) {
            return;
        }
        let settings = self.plan.settings();
        let unavailable = |reason: &str| {
            Together::Impossible(Problem {
                status: PolicyStatus::NotAvailable,
                reason: reason.to_owned(),
                errno: None,
            })
        };
        self.together = match (self.group, self.machine.synthetic_pair()) {
            (_, Some(pair)) if self.seats.len() > 1 => {
                let devices = [self.seats[0].device, self.seats[1].device];
                // Every visit says where they are.
                Together::Synthetic(SyntheticRanks::new(pair, devices, [CpuId(0); 2], settings))
            }
            (Some(group), None) if group.size() > 1 => {
                let device = self.seats[0].device;
                let made = self
                    .placement
                    .release()
                    .and_then(|()| self.machine.running_cpu())
                    .map_err(Error::from)
                    .and_then(|cpu| {
                        let largest = self.plan.largest();
                        Ranks::new(self.machine, group, device, cpu, largest, settings)
                    });
                match made {
                    Ok(ranks) => Together::Live(Box::new(ranks)),
                    Err(error) => Together::Impossible(Problem::of(&error)),
                }
            }
            _ => unavailable("there is one rank"),
        };
    }

    /// This process's part of a gather, placed before.
    fn gather(&mut self, turn: Turn, crowded: bool) -> Reading {
        let (cell, seed) = (turn.cell, self.plan.seed ^ turn.seq << 20);
        let allowed = self.placement.allowed().ok();
        let result = match &mut self.together {
            Together::Live(ranks) => {
                let fastest = self.fastest.entry(cell.policy).or_default();
                std::mem::swap(ranks.fastest(), fastest);
                let result = self.machine.running_cpu().map_err(Error::from).and_then(|cpu| {
                    ranks.moved_to(cpu, crowded);
                    ranks.visit(cell.operation, cell.bytes, seed)
                });
                std::mem::swap(ranks.fastest(), fastest);
                result.map_err(|error| Problem::of(&error))
            }
            _ => Err(Problem::failed("the ranks did not meet")),
        };
        if let Ok(visit) = &result {
            let gathers = (visit.warmup_ns.len() + visit.iter_ns.len()) as u64;
            self.bytes += gathers * cell.bytes.bytes();
        }
        Reading { visit: visit(turn, allowed, None, result), host_memory: None }
    }

    /// Both ranks of a synthetic machine.
    fn together_synthetic(&mut self, turn: Turn) -> Vec<(u32, Reading)> {
        self.join();
        let (machine, plan, cell) = (self.machine, self.plan, turn.cell);
        let (ranks, pair) = match (&mut self.together, machine.synthetic_pair()) {
            (Together::Synthetic(ranks), Some(pair)) => (ranks, pair),
            (Together::Impossible(problem), _) => {
                return nobody(turn, vec![(0, Err(problem.clone()))]);
            }
            _ => return Vec::new(),
        };
        let load = plan.load.as_str();
        let context = PointContext { seq: turn.seq, visit: turn.seq, sweep_is_pair: true, load };
        machine.begin_point(&context);
        let place = |rank: u32, seat: &Seat<'_>| {
            let cpus = &seat.policies[cell.policy].cpus;
            let placed = match cpus {
                None => pair.release(rank),
                Some(cpus) => pair.allow(rank, cpus),
            };
            let placed = placed.and_then(|()| pair.running_cpu(rank));
            let problem = |error: cluster_health_core::Error| Problem::refused(&error.into());
            let allowed = cpus.clone().unwrap_or_else(|| self.inherited.clone());
            placed.map(|cpu| (cpu, allowed)).map_err(problem)
        };
        let (zero, one) = match (place(0, &self.seats[0]), place(1, &self.seats[1])) {
            (Ok(zero), Ok(one)) => (zero, one),
            (zero, one) => {
                let placed = [zero, one].map(|placed| placed.map(|(_, allowed)| allowed));
                return nobody(turn, (0..).zip(placed).collect());
            }
        };
        ranks.move_to([zero.0, one.0]);
        let fastest = self.fastest.entry(cell.policy).or_default();
        std::mem::swap(ranks.fastest(), fastest);
        let result = ranks.visit(machine, cell.operation, cell.bytes, (turn.seq, load));
        std::mem::swap(ranks.fastest(), fastest);
        let result = result.map_err(|error| Problem::of(&error));
        if let Ok(visit) = &result {
            let gathers = (visit.warmup_ns.len() + visit.iter_ns.len()) as u64;
            self.bytes += gathers * cell.bytes.bytes();
        }
        (0..)
            .zip([zero, one])
            .map(|(rank, (cpu, allowed))| {
                let result = result.clone().map(|mut visit| {
                    visit.ran_on = [cpu].into();
                    visit
                });
                let visit = visit(turn, Some(allowed), None, result);
                (rank, Reading { visit, host_memory: None })
            })
            .collect()
    }
}

/// The readings of a gather that nobody made, because a rank at least could not.
fn nobody(turn: Turn, placed: Vec<(u32, Placed)>) -> Vec<(u32, Reading)> {
    let first = placed.iter().find_map(|(rank, placed)| Some((*rank, placed.as_ref().err()?)));
    let first = first.map(|(rank, problem)| Problem {
        reason: format!("rank {rank}: {}", problem.reason),
        ..problem.clone()
    });
    placed
        .into_iter()
        .map(|(rank, placed)| {
            let (allowed, problem) = match placed {
                Ok(allowed) => (Some(allowed), first.clone()),
                Err(problem) => (None, Some(problem)),
            };
            let problem = problem.unwrap_or_else(|| Problem::failed("it was not begun"));
            (rank, Reading { visit: visit(turn, allowed, None, Err(problem)), host_memory: None })
        })
        .collect()
}

fn visit(
    turn: Turn,
    allowed: Option<CpuSet>,
    page_nodes: Option<BTreeMap<NodeId, u32>>,
    times: Result<Visit, Problem>,
) -> PolicyVisit {
    let elsewhere = |visit: &Visit| {
        let allowed = allowed.as_ref()?;
        visit.ran_on.iter().find(|cpu| !allowed.contains(**cpu)).copied()
    };
    let times = times.and_then(|visit| match elsewhere(&visit) {
        Some(cpu) => Err(Problem::failed(format!(
            "the thread was seen on CPU {cpu}, which it must not use: something else binds it"
        ))),
        None => Ok(visit),
    });
    let (times, problem) = match times {
        Ok(times) => (Some(times), None),
        Err(problem) => (None, Some(problem)),
    };
    PolicyVisit {
        block: turn.block,
        seq: turn.seq,
        status: problem.as_ref().map_or(PolicyStatus::Measured, |problem| problem.status),
        allowed,
        page_nodes,
        times,
        errno: problem.as_ref().and_then(|problem| problem.errno),
        reason: problem.map(|problem| problem.reason),
    }
}
