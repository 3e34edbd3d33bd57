//! Live ranks: this process is one of two, the other one does the same at the same point.
//!
//! Both ranks know the schedule, so that only agreement travels between them: before every point
//! "ready" or "cannot, because", after every warm-up its time, before every iteration an instant to
//! start at, after the last one the times. All of it goes through the control board, beside the
//! device's own collectives.

use std::collections::BTreeMap;

use cluster_health_core::load::{LoadGenerator, LoadRecord};
use cluster_health_core::rank::{Board, RankGroup};
use cluster_health_core::timer::Batch;
use cluster_health_core::{
    BackendKind, Binding, ByteSize, Communicator, CpuId, DataType, DeviceBuffer, EventTimer,
    Machine, Stream, TagPattern,
};

use super::{PairRunner, PlannedPair, ran_on};
use crate::error::{Error, Result};
use crate::plan::CorePairPlan;
use crate::samples::{DataCheck, PointStatus, Sample, Timer};
use crate::schedule::PlannedPoint;
use crate::sweep::engine::{Stage, loads_of, point_tags, records_of};
use crate::sweep::warmup::{Verdict, Warmup};
use crate::visit::{SKEW_REPEATS, START_MARGIN_NS, is_skewed, whole_ns};

/// Names the control board among what ranks send each other.
const CONTROL_TAG: u64 = u64::MAX - 1;

/// Iterations whose times fit one message.
const CHUNK: usize = 64;

/// Longest reason that a rank gives for not taking part.
const LONGEST_REASON: usize = 1024;

/// States before a point.
const READY: u32 = 1;
const CANNOT: u32 = 2;
const STOP: u32 = 3;
/// Other messages.
const WARMED: u32 = 4;
const START: u32 = 5;
const TIMES: u32 = 6;
const END: u32 = 7;
const CLOCK: u32 = 8;
/// In place of a state before a point: this rank's load cannot run, and why.
const NO_LOAD: u32 = 9;
/// A number of rank 0 that all ranks go by.
const DECIDED: u32 = 10;

/// One iteration (a batch of all-gathers where the devices' clock is coarse) on this rank.
#[derive(Debug, Clone, Copy)]
struct Time {
    start: u64,
    /// By the host's clock, the whole batch.
    host: u64,
    /// One all-gather by the device's clock; 0 without one.
    device: f64,
}

/// What became of the timed iterations.
enum Timed {
    Good,
    /// The ranks started too far apart.
    Skewed,
    /// With another batch, agreed now.
    Again,
}

/// In place of a batch: the devices' clock is too coarse for this size.
const BY_HOST: u32 = 0;

/// Whether live ranks can be had on this machine.
///
/// # Errors
/// Why not.
pub(super) fn ready(machine: &Machine) -> Result<()> {
    match machine.backend() {
        BackendKind::Host => Ok(()),
        // HCCL takes one rank per device.
        BackendKind::Ascend if machine.devices().len() >= 2 => Ok(()),
        BackendKind::Ascend => {
            Err(Error::output("the pair sweep", "the ascend backend needs two devices"))
        }
        kind => Err(Error::output("the pair sweep", format!("the {kind} backend has no ranks"))),
    }
}

/// One of the two ranks.
pub(super) struct LivePair<'a> {
    machine: &'a Machine,
    plan: &'a CorePairPlan,
    rank: usize,
    control: Board<'a>,
    communicator: Communicator<'a>,
    stream: Stream,
    send: DeviceBuffer,
    receive: DeviceBuffer,
    /// Where events carry the device's own time.
    timer: Option<EventTimer>,
    /// The coarser of both ranks' clocks, nanoseconds.
    resolution_ns: f64,
    /// All-gathers between two events, by bytes; the same on both ranks.
    batches: BTreeMap<usize, u32>,
    binding: Option<Binding>,
    bound: Option<CpuId>,
    /// Both ranks' CPUs at the last point.
    last: Option<[CpuId; 2]>,
    /// This rank's iterations.
    times: Vec<Time>,
    /// Reused for every message.
    message: Vec<u8>,
    /// Writing and comparing tags, so far.
    check_ns: u64,
    stopped: bool,
    /// This rank's; `None` when the plan has no load.
    loads: Option<LoadGenerator>,
    /// The same of the other rank, as it last told.
    other_loads: Vec<LoadRecord>,
}

impl<'a> LivePair<'a> {
    /// Allocates this rank's buffers and joins the other rank; both do it together.
    pub(super) fn new(
        machine: &'a Machine,
        plan: &'a CorePairPlan,
        group: &'a RankGroup,
    ) -> Result<Self> {
        if group.size() != 2 {
            return Err(Error::invalid(
                "--ranks",
                format!("a pair has two ranks, this group has {}", group.size()),
            ));
        }
        let rank = group.rank() as usize;
        let id = plan.device_pair[rank];
        let device = machine.device(id).ok_or_else(|| {
            Error::invalid("--device-pair", format!("device {id} does not exist"))
        })?;
        let loads = loads_of(machine, &plan.loads, &plan.load_devices(machine), rank)?;
        let other = loads_of(machine, &plan.loads, &plan.load_devices(machine), 1 - rank)?;
        let largest = plan.largest().bytes();
        let mut control = Board::new(group, CONTROL_TAG)?;
        let mut communicator = Communicator::new(group, &device)?;
        control.set_timeout(plan.timeout());
        communicator.set_timeout(plan.timeout());
        let stream = Stream::new(&device)?;
        let send = DeviceBuffer::new(&device, ByteSize(largest))?;
        let mut receive = DeviceBuffer::new(&device, ByteSize(largest.saturating_mul(2)))?;
        // The ranks map each other's memory and fault its pages in here, not in the first point of
        // a plan without warm-up.
        let (count, bytes) = (ByteSize(largest).as_len()?, DataType::UInt8);
        communicator.all_gather(&send, &mut receive, count, bytes, &stream)?;
        let timer = if machine.has_device_events() {
            Some(EventTimer::new(&stream, plan.timeout())?)
        } else {
            None
        };
        let own = timer.as_ref().and_then(EventTimer::resolution_ns).unwrap_or(0.0);
        let mut resolution_ns = own;
        control.exchange(CLOCK, &own.to_bits().to_ne_bytes(), |rank, message| {
            expect(rank, message.kind, CLOCK)?;
            resolution_ns = resolution_ns.max(f64::from_bits(word(message.bytes, 0)));
            Ok(())
        })?;
        Ok(Self {
            machine,
            plan,
            rank,
            control,
            communicator,
            stream,
            send,
            receive,
            timer,
            resolution_ns,
            batches: BTreeMap::new(),
            binding: None,
            bound: None,
            last: None,
            times: Vec::with_capacity(plan.iters as usize),
            message: Vec::with_capacity(8 + CHUNK * 24),
            check_ns: 0,
            stopped: false,
            loads,
            other_loads: records_of(other.as_ref()),
        })
    }

    fn bind(&mut self, cpu: CpuId) -> Result<(), String> {
        let unusable = if self.rank == 0 {
            &self.plan.unusable_rank0_cpus
        } else {
            &self.plan.unusable_rank1_cpus
        };
        if let Some(reason) = unusable.get(&cpu) {
            return Err(reason.clone());
        }
        if self.bound == Some(cpu) {
            return Ok(());
        }
        self.bound = None;
        let result = match &mut self.binding {
            Some(binding) => binding.move_to(cpu),
            None => self.machine.bind(cpu).map(|binding| self.binding = Some(binding)),
        };
        result.map_err(|error| error.to_string())?;
        self.bound = Some(cpu);
        self.control.note_cpu(cpu);
        self.communicator.note_cpu(cpu);
        Ok(())
    }

    /// Says how this rank stands before a point and hears how the other does. The sample gets
    /// `bind_ns`; the result is why the point cannot be measured.
    fn agree(&mut self, own: &Result<(), String>, sample: &mut Sample) -> Result<Option<String>> {
        let state = if own.is_ok() { READY } else { CANNOT };
        self.message.clear();
        self.message.extend_from_slice(&sample.bind_ns.to_ne_bytes());
        if let Err(reason) = own {
            self.message.extend(reason.bytes().take(LONGEST_REASON));
        }
        let mut reasons = Vec::new();
        let mut stop = false;
        let mut no_load = None;
        self.control.exchange(state, &self.message, |rank, message| {
            match message.kind {
                STOP => stop = true,
                NO_LOAD => {
                    let rank = u32::try_from(rank).unwrap_or(u32::MAX);
                    let reason = String::from_utf8_lossy(message.bytes).into_owned();
                    no_load = Some(cluster_health_core::Error::rank_fault(rank, reason));
                }
                CANNOT => {
                    let reason = message.bytes.get(8..).unwrap_or_default();
                    reasons.push(format!("rank {rank}: {}", String::from_utf8_lossy(reason)));
                }
                kind => expect(rank, kind, READY)?,
            }
            sample.bind_ns = sample.bind_ns.max(word(message.bytes, 0));
            Ok(())
        })?;
        if stop {
            // The other rank was asked to end: this one ends at the same point.
            self.stopped = true;
            return Err(Error::Cancelled);
        }
        if let Some(error) = no_load {
            self.stopped = true;
            return Err(error.into());
        }
        Ok((!reasons.is_empty()).then(|| reasons.join("; ")))
    }

    /// Lets the load of this point run here; both ranks' agreement on the point follows, so that
    /// neither measures before the other's burners burn. True when another one did before.
    ///
    /// A rank whose load cannot run says so in place of that agreement, and both end.
    fn switch_load(&mut self, pair: &PlannedPair) -> Result<bool> {
        let Some(loads) = &mut self.loads else { return Ok(false) };
        let switched = loads.switch(pair.point.load, &pair.cpus);
        switched.map_err(|error| self.give_up_load(error))
    }

    #[cold]
    fn give_up_load(&mut self, error: cluster_health_core::Error) -> Error {
        if !self.stopped {
            self.stopped = true;
            let reason: Vec<u8> = error.to_string().bytes().take(LONGEST_REASON).collect();
            self.control.leave(NO_LOAD, &reason);
        }
        error.into()
    }

    /// The end of a point: whether each rank received what the other sent, and how its load did.
    /// The ranks whose data are spoilt.
    fn end(&mut self, intact: bool, point: &PlannedPoint) -> Result<Vec<usize>> {
        self.message.clear();
        self.message.push(u8::from(intact));
        let mut alive = Ok(());
        if let Some(loads) = &mut self.loads {
            alive = loads.check(point.seq).map(|_| ());
            let figures = loads.record(point.load).map(|record| record.figures());
            for figure in figures.unwrap_or_default() {
                self.message.extend_from_slice(&figure.to_ne_bytes());
            }
        }
        let mut spoilt = Vec::new();
        let (own, other_loads) = (self.rank, &mut self.other_loads);
        self.control.exchange(END, &self.message, |rank, message| {
            expect(rank, message.kind, END)?;
            if message.bytes.first() != Some(&1) {
                spoilt.push(rank);
            }
            if rank != own
                && let Some(record) = other_loads.get_mut(point.load)
            {
                let figure = |at: usize| word(message.bytes, 1 + 8 * at);
                record.take_figures(std::array::from_fn(figure), point.seq);
            }
            Ok(())
        })?;
        alive.map_err(|error| self.give_up_load(error))?;
        if let (Some(loads), Some(record)) = (&self.loads, self.other_loads.get_mut(point.load)) {
            record.note_cpus(loads.burner_cpus(1 - own));
        }
        Ok(spoilt)
    }

    /// One all-gather, or a batch of them; its start and duration here.
    #[inline]
    fn all_gather(&mut self, bytes: usize, batch: u32) -> Result<Time> {
        let (send, receive, stream) = (&self.send, &mut self.receive, &self.stream);
        let start = self.machine.now_ns();
        match self.timer.as_mut().filter(|_| batch != BY_HOST) {
            None => {
                let u8 = DataType::UInt8;
                self.communicator.all_gather(send, receive, bytes, u8, stream)?;
                Ok(Time { start, host: self.machine.now_ns() - start, device: 0.0 })
            }
            Some(timer) => {
                timer.set_batch(batch);
                let u8 = DataType::UInt8;
                self.communicator.timed_all_gather(send, receive, bytes, u8, stream, timer)?;
                let host = self.machine.now_ns() - start;
                Ok(Time { start, host, device: timer.nanoseconds()? })
            }
        }
    }

    fn warm_up(
        &mut self,
        bytes: usize,
        best: Option<u64>,
        (cold, shared): (bool, bool),
        sample: &mut Sample,
    ) -> Result<()> {
        let warmup = Warmup::new(self.plan.warmup, cold).in_sample(self.plan.sample.is_some());
        if warmup.is_empty() {
            return Ok(());
        }
        loop {
            // Started like the timed ones, so that their times can be compared.
            if !shared {
                self.start_together()?;
            }
            let time = self.all_gather(bytes, 1)?.host;
            let mut slowest = 0;
            self.control.exchange(WARMED, &time.to_ne_bytes(), |rank, message| {
                expect(rank, message.kind, WARMED)?;
                slowest = slowest.max(word(message.bytes, 0));
                Ok(())
            })?;
            sample.warmup_ns.push(slowest);
            // Both ranks judge the same times, so both come to the same verdict.
            match warmup.verdict(&sample.warmup_ns, best) {
                Verdict::Again => {}
                Verdict::Settled => return Ok(()),
                Verdict::GiveUp => {
                    sample.settled = false;
                    return Ok(());
                }
            }
        }
    }

    /// Waits for an instant that both ranks agree on. Ranks that share a CPU cannot start together.
    #[inline]
    fn start_together(&mut self) -> Result<()> {
        let mut latest = 0;
        let now = self.machine.now_ns();
        self.control.exchange(START, &now.to_ne_bytes(), |rank, message| {
            expect(rank, message.kind, START)?;
            latest = latest.max(word(message.bytes, 0));
            Ok(())
        })?;
        let start = latest + START_MARGIN_NS;
        while self.machine.now_ns() < start {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// The timed iterations of both ranks.
    fn timed(&mut self, bytes: usize, shared: bool, sample: &mut Sample) -> Result<Timed> {
        let batch = self.batches.get(&bytes).copied().unwrap_or(1);
        self.times.clear();
        for _ in 0..self.plan.iters {
            if !shared {
                self.start_together()?;
            }
            let time = self.all_gather(bytes, batch)?;
            self.times.push(time);
        }
        let by_events = self.timer.is_some() && batch != BY_HOST;
        let operations = u64::from(batch.max(1));
        let running = self.binding.as_ref().and_then(|binding| binding.running_cpu().ok());
        let mut host_ns = sample.host_iter_ns.take().unwrap_or_default();
        host_ns.clear();
        host_ns.resize(self.times.len(), 0);
        sample.iter_ns.clear();
        for times in rank_ns(sample).iter_mut() {
            times.clear();
        }
        let (mut skew, mut shortest) = (0, f64::INFINITY);
        let mut index = 0;
        while index < self.times.len() || index == 0 {
            let end = (index + CHUNK).min(self.times.len());
            self.message.clear();
            let cpu = running.map_or(u64::MAX, |cpu| u64::from(cpu.0));
            self.message.extend_from_slice(&cpu.to_ne_bytes());
            for time in &self.times[index..end] {
                for word in [time.start, time.host, time.device.to_bits()] {
                    self.message.extend_from_slice(&word.to_ne_bytes());
                }
            }
            let mut starts = [(u64::MAX, 0_u64); CHUNK];
            self.control.exchange(TIMES, &self.message, |rank, message| {
                expect(rank, message.kind, TIMES)?;
                let cpu = u32::try_from(word(message.bytes, 0)).ok().map(CpuId);
                if let (Some(cpu), Some(list)) = (cpu, ran_on(sample).get_mut(rank)) {
                    note_cpu(list, cpu);
                }
                let Some(list) = rank_ns(sample).get_mut(rank) else { return Ok(()) };
                let places = (0..end - index).zip(&mut starts).zip(&mut host_ns[index..end]);
                for ((place, (earliest, latest)), slowest) in places {
                    let start = word(message.bytes, 8 + place * 24);
                    *earliest = start.min(*earliest);
                    *latest = start.max(*latest);
                    let host = word(message.bytes, 16 + place * 24);
                    *slowest = host.max(*slowest);
                    let device = f64::from_bits(word(message.bytes, 24 + place * 24));
                    shortest = device.min(shortest);
                    list.push(if by_events { whole_ns(device) } else { host });
                }
                Ok(())
            })?;
            for (earliest, latest) in &starts[..end - index] {
                skew = skew.max(latest - earliest);
            }
            index = end.max(1);
        }
        for place in 0..self.times.len() {
            let slowest = rank_ns(sample).iter().filter_map(|list| list.get(place)).max();
            let slowest = slowest.copied().unwrap_or(0);
            sample.iter_ns.push(slowest);
        }
        sample.skew_ns = Some(skew);
        let fastest = host_ns.iter().min().copied().unwrap_or(0);
        sample.timer = Timer::Host;
        if by_events {
            // Both ranks judge the same numbers.
            let next = match EventTimer::judge(self.resolution_ns, batch, shortest) {
                Batch::Enough if shortest > 0.0 => None,
                Batch::More(more) => Some(more),
                _ => Some(BY_HOST),
            };
            if let Some(next) = next {
                self.batches.insert(bytes, next);
                return Ok(Timed::Again);
            }
            for time in &mut host_ns {
                *time /= operations;
            }
            sample.host_iter_ns = Some(host_ns);
            sample.timer = if batch == 1 { Timer::Event } else { Timer::EventBatch };
        }
        let skewed = !shared && is_skewed(skew, fastest);
        Ok(if skewed { Timed::Skewed } else { Timed::Good })
    }

    fn write_tags(&mut self, tags: Option<&[TagPattern; 2]>) -> Result<()> {
        let Some(tags) = tags else { return Ok(()) };
        let began = self.machine.now_ns();
        self.send.write_tags(&tags[self.rank])?;
        self.check_ns += self.machine.now_ns() - began;
        Ok(())
    }

    /// Compares what came from the other rank.
    fn arrived(&mut self, tags: Option<&[TagPattern; 2]>, bytes: usize) -> Result<bool> {
        let Some(tags) = tags else { return Ok(true) };
        let began = self.machine.now_ns();
        let mut intact = true;
        for (rank, pattern) in tags.iter().enumerate() {
            intact = intact && self.receive.check_tags_at(rank * bytes, pattern)?;
        }
        self.check_ns += self.machine.now_ns() - began;
        Ok(intact)
    }
}

impl PairRunner for LivePair<'_> {
    fn measure(
        &mut self,
        pair: &PlannedPair,
        best: Option<u64>,
        sample: &mut Sample,
    ) -> Result<()> {
        let point = &pair.point;
        let bytes = point.bytes.as_len()?;
        let switched = self.switch_load(pair)?;
        let began = self.machine.now_ns();
        sample.t_ns = Some(began);
        // Both ranks must call a point cold, or they would judge its warm-up differently.
        let cold = self.last != Some(pair.cpus) || switched;
        self.last = Some(pair.cpus);
        let own = self.bind(pair.cpus[self.rank]);
        sample.bind_ns = self.machine.now_ns() - began;
        let seeds = [0, 1].map(|rank: u64| point.seq ^ self.plan.seed ^ (rank + 1) << 56);
        let tags = |stage| {
            let [rank0, rank1] = seeds;
            let of = |seed| point_tags(self.plan.check, seed, stage, point.bytes);
            Some([of(rank0)?, of(rank1)?])
        };
        let (warm_tags, timed_tags) = (tags(Stage::WarmUp), tags(Stage::Timed));
        if own.is_ok() {
            self.write_tags(warm_tags.as_ref())?;
        }
        if let Some(reason) = self.agree(&own, sample)? {
            // One rank may have moved although the other did not.
            self.last = None;
            sample.status = PointStatus::Skipped;
            sample.reason = Some(reason);
            return Ok(());
        }
        let shared = pair.cpus[0] == pair.cpus[1];
        self.warm_up(bytes, best, (cold, shared), sample)?;
        let mut intact = sample.warmup_ns.is_empty() || self.arrived(warm_tags.as_ref(), bytes)?;
        self.write_tags(timed_tags.as_ref())?;
        let mut repeats = 0;
        loop {
            match self.timed(bytes, shared, sample)? {
                Timed::Again => {}
                Timed::Skewed if repeats < SKEW_REPEATS => repeats += 1,
                Timed::Skewed | Timed::Good => break,
            }
        }
        intact &= self.arrived(timed_tags.as_ref(), bytes)?;
        let spoilt = self.end(intact, point)?;
        sample.check = match (&timed_tags, spoilt.is_empty()) {
            (None, _) => DataCheck::Off,
            (Some(_), true) => DataCheck::Ok,
            (Some(_), false) => DataCheck::Mismatch,
        };
        let strayed = pair.cpus.iter().zip(ran_on(sample)).enumerate().find_map(|(rank, pair)| {
            let (bound, seen) = pair;
            seen.iter().find(|cpu| *cpu != bound).map(|cpu| (rank, *bound, *cpu))
        });
        let reason = if !spoilt.is_empty() {
            Some(format!("data check: what rank {spoilt:?} holds is not what was sent"))
        } else if let Some((rank, bound, seen)) = strayed {
            // Whatever moved it may have taken the CPU away: binding again tells.
            self.bound = None;
            self.last = None;
            Some(format!(
                "rank {rank}: bound to CPU {bound}, but seen on CPU {seen}: something outside \
                 changed its affinity"
            ))
        } else {
            None
        };
        sample.status = if reason.is_some() { PointStatus::Failed } else { PointStatus::Measured };
        sample.reason = reason;
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.machine.now_ns()
    }

    fn check_ns(&self) -> u64 {
        self.check_ns
    }

    fn agree(&mut self, value: u64) -> Result<u64> {
        let (mut decided, mut stop) = (value, false);
        self.control.exchange(DECIDED, &value.to_ne_bytes(), |rank, message| {
            if message.kind == STOP {
                stop = true;
                return Ok(());
            }
            expect(rank, message.kind, DECIDED)?;
            if rank == 0 {
                decided = word(message.bytes, 0);
            }
            Ok(())
        })?;
        if stop {
            self.stopped = true;
            return Err(Error::Cancelled);
        }
        Ok(decided)
    }

    fn stop(&mut self) {
        if !self.stopped {
            self.stopped = true;
            self.control.leave(STOP, &[]);
        }
    }

    fn loads(&self) -> Vec<LoadRecord> {
        let mut records = records_of(self.loads.as_ref());
        let other = self.other_loads.iter().cloned();
        if self.rank == 0 {
            records.extend(other);
        }
        records
    }
}

/// The other rank must be in the same step.
fn expect(rank: usize, found: u32, expected: u32) -> cluster_health_core::Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(cluster_health_core::Error::rank_fault(
        u32::try_from(rank).unwrap_or(u32::MAX),
        "is at another step of the point than this rank",
    ))
}

/// The times of both ranks.
fn rank_ns(sample: &mut Sample) -> &mut Vec<Vec<u64>> {
    sample.rank_ns.get_or_insert_with(|| vec![Vec::new(); 2])
}

/// Eight bytes of a message; 0 where it is too short.
fn word(bytes: &[u8], offset: usize) -> u64 {
    let mut raw = [0; 8];
    if let Some(part) = bytes.get(offset..offset + 8) {
        raw.copy_from_slice(part);
    }
    u64::from_ne_bytes(raw)
}

fn note_cpu(list: &mut Vec<CpuId>, cpu: CpuId) {
    if !list.contains(&cpu) {
        list.push(cpu);
    }
}
