//! Operations of several ranks: this process is one of them, the others do the same.
//!
//! As in the pair sweep, only agreement travels between the ranks: before every iteration an instant
//! to start at, after the last one the times. All ranks judge the same numbers, so all come to the
//! same verdict.

use std::collections::{BTreeMap, BTreeSet};

use cluster_health_core::rank::{Board, RankGroup};
use cluster_health_core::timer::Batch;
use cluster_health_core::{
    ByteSize, Communicator, CpuId, DataType, DeviceBuffer, DeviceId, EventTimer, Machine, Stream,
    TagPattern,
};

use super::{Fastest, Operation, Settings, Visit, warm_up, whole_ns};
use crate::error::{Error, Result};
use crate::samples::Timer;
use crate::stats::to_f64;

/// Names the control board among what ranks send each other.
const CONTROL_TAG: u64 = u64::MAX - 2;
/// An agreed start lies so far ahead that the latest rank has read it by then.
pub(crate) const START_MARGIN_NS: u64 = 500;
/// A start skew above both is measured again, so often at most.
const SKEW_NS: u64 = 2_000;
const SKEW_SHARE: f64 = 0.05;
pub(crate) const SKEW_REPEATS: u32 = 3;

/// Whether ranks started too far apart for times of which `fastest` is the shortest.
pub(crate) fn is_skewed(skew: u64, fastest: u64) -> bool {
    skew > SKEW_NS && to_f64(skew) > SKEW_SHARE * to_f64(fastest)
}

const READY: u32 = 1;
const START: u32 = 2;
const WARMED: u32 = 3;
const TIMES: u32 = 4;
const CHECKED: u32 = 5;
const SET_UP: u32 = 6;
const GONE: u32 = 7;

/// In place of a batch: the devices' clock is too coarse for this size.
const BY_HOST: u32 = 0;

/// One iteration on this rank: its start, the whole by the host's clock, one operation by the
/// device's.
#[derive(Debug, Clone, Copy, Default)]
struct Time {
    start: u64,
    host: u64,
    device: f64,
}

/// This rank's end of the operations.
pub(crate) struct Ranks<'g> {
    machine: &'g Machine,
    settings: Settings,
    rank: usize,
    size: usize,
    control: Board<'g>,
    communicator: Communicator<'g>,
    stream: Stream,
    send: DeviceBuffer,
    receive: DeviceBuffer,
    timer: Option<EventTimer>,
    /// The coarsest of the ranks' clocks, nanoseconds.
    resolution_ns: f64,
    batches: BTreeMap<(Operation, u64), u32>,
    /// Each rank's CPU: ranks that share one cannot start together.
    cpus: Vec<u64>,
    /// Whether they share one where they may run on several, as the caller knows.
    crowded: Option<bool>,
    ran_on: BTreeSet<CpuId>,
    fastest: Fastest,
    /// Why no further operation is possible.
    broken: Option<String>,
}

impl<'g> Ranks<'g> {
    /// Allocates this rank's buffers, of `largest` bytes per rank, and joins the others; all ranks
    /// call it together, bound to `cpu`.
    pub(crate) fn new(
        machine: &'g Machine,
        group: &'g RankGroup,
        device: DeviceId,
        cpu: CpuId,
        largest: ByteSize,
        settings: Settings,
    ) -> Result<Self> {
        let device = machine.device(device).ok_or_else(|| {
            Error::invalid("--devices", format!("device {device} does not exist"))
        })?;
        let (rank, size) = (group.rank() as usize, group.size() as usize);
        let mut control = Board::new(group, CONTROL_TAG)?;
        control.set_timeout(settings.timeout);
        control.note_cpu(cpu);
        let mut communicator = Communicator::new(group, &device)?;
        communicator.set_timeout(settings.timeout);
        communicator.note_cpu(cpu);
        let stream = Stream::new(&device)?;
        let whole = largest.bytes().saturating_mul(u64::from(group.size()));
        let send = DeviceBuffer::new(&device, largest)?;
        let mut receive = DeviceBuffer::new(&device, ByteSize(whole))?;
        // The ranks map each other's memory and fault its pages in here, not in the first visit.
        let count = largest.as_len()?;
        communicator.all_gather(&send, &mut receive, count, DataType::UInt8, &stream)?;
        let timer = if machine.has_device_events() {
            Some(EventTimer::new(&stream, settings.timeout)?)
        } else {
            None
        };
        let mut resolution_ns = timer.as_ref().and_then(EventTimer::resolution_ns).unwrap_or(0.0);
        let mut cpus = vec![0; size];
        let mut message = resolution_ns.to_bits().to_ne_bytes().to_vec();
        message.extend_from_slice(&u64::from(cpu.0).to_ne_bytes());
        control.exchange(SET_UP, &message, |rank, message| {
            expect(rank, message.kind, SET_UP)?;
            resolution_ns = resolution_ns.max(f64::from_bits(word(message.bytes, 0)));
            cpus[rank] = word(message.bytes, 1);
            Ok(())
        })?;
        Ok(Self {
            machine,
            settings,
            rank,
            size,
            control,
            communicator,
            stream,
            send,
            receive,
            timer,
            resolution_ns,
            batches: BTreeMap::new(),
            cpus,
            crowded: None,
            ran_on: BTreeSet::new(),
            fastest: Fastest::default(),
            broken: None,
        })
    }

    /// This rank now runs on `cpu`, and perhaps elsewhere; `crowded`, the same on all ranks, when
    /// they have fewer CPUs together than there are ranks, so that they cannot start together.
    pub(crate) fn moved_to(&mut self, cpu: CpuId, crowded: bool) {
        self.control.note_cpu(cpu);
        self.communicator.note_cpu(cpu);
        self.crowded = Some(crowded);
    }

    /// What warm-ups are compared with, to be exchanged for that of another class of visits, on all
    /// ranks alike.
    pub(crate) fn fastest(&mut self) -> &mut Fastest {
        &mut self.fastest
    }

    /// One visit, with the same arguments on every rank; all get the same result.
    ///
    /// # Errors
    /// When an operation fails on any rank: then the communicator cannot be used any more, and every
    /// later visit says so at once.
    pub(crate) fn visit(
        &mut self,
        operation: Operation,
        bytes: ByteSize,
        seed: u64,
    ) -> Result<Visit> {
        if let Some(reason) = &self.broken {
            return Err(Error::output(
                operation.as_str(),
                format!("after an earlier error: {reason}"),
            ));
        }
        self.measure(operation, bytes, seed).inspect_err(|error| {
            self.broken = Some(error.to_string());
            self.control.leave(GONE, &[]);
        })
    }

    /// Ranks that take part.
    fn takes_part(&self, operation: Operation, rank: usize) -> bool {
        operation == Operation::AllGather || rank < 2
    }

    fn measure(&mut self, operation: Operation, bytes: ByteSize, seed: u64) -> Result<Visit> {
        let size = bytes.bytes();
        let count = bytes.as_len()?;
        let users = (0..self.size).filter(|rank| self.takes_part(operation, *rank));
        let cpus: Vec<u64> = users.map(|rank| self.cpus[rank]).collect();
        let alike = || cpus.iter().enumerate().any(|(at, cpu)| cpus[..at].contains(cpu));
        let shared = self.crowded.unwrap_or_else(alike);
        let best = self.fastest.of(operation, size);
        self.write_tags(bytes, seed)?;
        let mut visit = Visit::default();
        let exactly = self.settings.warmup;
        let mut warmup_ns = Vec::new();
        visit.settled = warm_up(exactly, best, &mut warmup_ns, || {
            self.start(shared)?;
            let time = self.once(operation, count, 1)?.host;
            self.slowest(WARMED, time)
        })?;
        visit.warmup_ns = warmup_ns;
        self.write_tags(bytes, !seed)?;
        let mut repeats = 0;
        let mut batch = self.batches.get(&(operation, size)).copied().unwrap_or(1);
        loop {
            let times = self.timed(operation, count, shared, batch)?;
            // All ranks judge the same numbers.
            if self.timer.is_some() && operation == Operation::AllGather && batch != BY_HOST {
                let shortest = times.iter().flatten().map(|time| time.device);
                let shortest = shortest.fold(f64::INFINITY, f64::min);
                let next = match EventTimer::judge(self.resolution_ns, batch, shortest) {
                    Batch::Enough if shortest > 0.0 => None,
                    Batch::More(more) => Some(more),
                    _ => Some(BY_HOST),
                };
                if let Some(next) = next {
                    batch = next;
                    self.batches.insert((operation, size), next);
                    continue;
                }
            }
            self.fill(operation, batch, &times, &mut visit);
            let fastest = visit.fastest().unwrap_or(0);
            if shared || !is_skewed(visit.skew_ns.unwrap_or(0), fastest) {
                break;
            }
            repeats += 1;
            if repeats > SKEW_REPEATS {
                break;
            }
        }
        self.check(operation, bytes, !seed)?;
        self.fastest.note(operation, size, &visit);
        Ok(visit)
    }

    /// Waits for an instant that all ranks agree on.
    fn start(&mut self, shared: bool) -> Result<()> {
        if shared {
            return Ok(());
        }
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

    fn slowest(&mut self, kind: u32, own: u64) -> Result<u64> {
        let mut slowest = 0;
        self.control.exchange(kind, &own.to_ne_bytes(), |rank, message| {
            expect(rank, message.kind, kind)?;
            slowest = slowest.max(word(message.bytes, 0));
            Ok(())
        })?;
        Ok(slowest)
    }

    /// One operation, or a batch of them, on this rank.
    fn once(&mut self, operation: Operation, count: usize, batch: u32) -> Result<Time> {
        let kind = DataType::UInt8;
        let (send, receive, stream) = (&self.send, &mut self.receive, &self.stream);
        let start = self.machine.now_ns();
        let mut device = 0.0;
        match (operation, self.rank) {
            (Operation::AllGather, _) => match self.timer.as_mut().filter(|_| batch != BY_HOST) {
                Some(timer) => {
                    timer.set_batch(batch);
                    let communicator = &mut self.communicator;
                    communicator.timed_all_gather(send, receive, count, kind, stream, timer)?;
                    device = timer.nanoseconds()?;
                }
                None => self.communicator.all_gather(send, receive, count, kind, stream)?,
            },
            (_, 0) => self.communicator.send(send, count, kind, 1, stream)?,
            (_, 1) => self.communicator.receive(receive, count, kind, 0, stream)?,
            _ => return Ok(Time { start, ..Time::default() }),
        }
        Ok(Time { start, host: self.machine.now_ns() - start, device })
    }

    /// The timed iterations of all ranks: rank by rank.
    fn timed(
        &mut self,
        operation: Operation,
        count: usize,
        shared: bool,
        batch: u32,
    ) -> Result<Vec<Vec<Time>>> {
        self.slowest(READY, 0)?;
        let mut message = Vec::new();
        self.ran_on.clear();
        for _ in 0..self.settings.iters {
            self.start(shared)?;
            let time = self.once(operation, count, batch)?;
            self.ran_on.insert(self.machine.running_cpu()?);
            for word in [time.start, time.host, time.device.to_bits()] {
                message.extend_from_slice(&word.to_ne_bytes());
            }
        }
        let mut times = vec![Vec::new(); self.size];
        self.control.exchange(TIMES, &message, |rank, message| {
            expect(rank, message.kind, TIMES)?;
            times[rank] = (0..message.bytes.len() / 24)
                .map(|at| Time {
                    start: word(message.bytes, 3 * at),
                    host: word(message.bytes, 3 * at + 1),
                    device: f64::from_bits(word(message.bytes, 3 * at + 2)),
                })
                .collect();
            Ok(())
        })?;
        for (rank, times) in times.iter_mut().enumerate() {
            if !self.takes_part(operation, rank) {
                times.clear();
            }
        }
        Ok(times)
    }

    fn fill(&self, operation: Operation, batch: u32, times: &[Vec<Time>], visit: &mut Visit) {
        let by_events =
            self.timer.is_some() && operation == Operation::AllGather && batch != BY_HOST;
        let operations = u64::from(batch.max(1));
        let own = |time: &Time| {
            if by_events { whole_ns(time.device) } else { time.host }
        };
        let slowest = |value: &dyn Fn(&Time) -> u64| -> Vec<u64> {
            (0..self.settings.iters as usize)
                .map(|at| {
                    times.iter().filter_map(|rank| rank.get(at)).map(value).max().unwrap_or(0)
                })
                .collect()
        };
        visit.iter_ns = slowest(&own);
        visit.host_iter_ns = by_events.then(|| slowest(&|time| time.host / operations));
        visit.timer = Some(match (by_events, operations) {
            (false, _) => Timer::Host,
            (true, 1) => Timer::Event,
            (true, _) => Timer::EventBatch,
        });
        visit.rank_ns = Some(times.iter().map(|rank| rank.iter().map(own).collect()).collect());
        let skews = (0..self.settings.iters as usize).map(|at| {
            let starts = || times.iter().filter_map(|rank| rank.get(at)).map(|time| time.start);
            starts().max().unwrap_or(0) - starts().min().unwrap_or(0)
        });
        visit.skew_ns = skews.max();
        visit.ran_on.clone_from(&self.ran_on);
    }

    fn write_tags(&mut self, bytes: ByteSize, seed: u64) -> Result<()> {
        let tags = TagPattern::sparse(tag_seed(seed, self.rank), bytes);
        Ok(self.send.write_tags(&tags)?)
    }

    /// Every rank looks at what it received, and all hear of it.
    fn check(&mut self, operation: Operation, bytes: ByteSize, seed: u64) -> Result<()> {
        let count = bytes.as_len()?;
        let mut intact = true;
        let blocks: Vec<(usize, usize)> = match (operation, self.rank) {
            (Operation::AllGather, _) => (0..self.size).map(|rank| (rank, rank * count)).collect(),
            (_, 1) => vec![(0, 0)],
            _ => Vec::new(),
        };
        for (rank, offset) in blocks {
            let tags = TagPattern::sparse(tag_seed(seed, rank), bytes);
            intact = intact && self.receive.check_tags_at(offset, &tags)?;
        }
        let mut spoilt = Vec::new();
        self.control.exchange(CHECKED, &[u8::from(intact)], |rank, message| {
            expect(rank, message.kind, CHECKED)?;
            if message.bytes.first() != Some(&1) {
                spoilt.push(rank);
            }
            Ok(())
        })?;
        if spoilt.is_empty() {
            return Ok(());
        }
        let message = format!("what rank {spoilt:?} holds is not what was sent");
        Err(Error::output("data check", message))
    }
}

fn tag_seed(seed: u64, rank: usize) -> u64 {
    seed ^ (rank as u64 + 1) << 48
}

/// The other rank must be in the same step.
fn expect(rank: usize, found: u32, expected: u32) -> cluster_health_core::Result<()> {
    if found == expected {
        return Ok(());
    }
    let words = if found == GONE {
        "gave up: an operation failed there"
    } else {
        "is at another step of the visit than this rank"
    };
    Err(cluster_health_core::Error::rank_fault(u32::try_from(rank).unwrap_or(u32::MAX), words))
}

/// The eight bytes at this place of a message; 0 where it is too short.
fn word(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(8 * at..8 * at + 8).and_then(|part| part.try_into().ok());
    part.map_or(0, u64::from_ne_bytes)
}
