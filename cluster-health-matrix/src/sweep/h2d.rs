//! The sweep of copies between host and device: CPU core × device, by the bound core from or to its
//! node's arenas.

use std::collections::BTreeMap;

use cluster_health_core::load::{LoadGenerator, LoadProfile, LoadRecord};
use cluster_health_core::{
    BackendKind, Binding, ByteSize, CpuId, DeviceId, EventTimer, HostBuffer, HostMemory, Machine,
    NodeId, PointContext, TagPattern,
};
use ndarray::{ArrayView2, ArrayView3};

use super::SweepEnd;
use super::beside::Beside;
use super::copies::{Ends, Path, host_buffers};
use super::engine::{
    Accounts, Course, Extent, Gathered, Points, RunClock, Stage, check_recalled, core_of, drive,
    loads_of, mark_implausible, point_tags, records_of, reset,
};
use super::warmup::{Best, Verdict, Warmup};
use crate::analysis::Table;
use crate::error::{Error, Result};
use crate::estimate::{Estimates, axes_of_plan};
use crate::matrix::{CellStatus, Matrix};
use crate::observer::Observer;
use crate::plan::{ArenaPolicy, Direction, H2dPlan, Order, PROBE_SIZE};
use crate::samples::{DataCheck, PointStatus, RanOn, Sample, Timer};
use crate::schedule::{Cell, PlannedPoint, Schedule};

/// Result of an H2D sweep.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct H2dMatrix {
    /// Rates, statuses and spread, sizes × CPUs × devices, under the plan's first load profile.
    pub matrix: Matrix,
    /// The same under its other load profiles, in their order.
    pub under_loads: Vec<Matrix>,
    /// What burned beside the measurement; empty for a plan of the idle machine alone.
    pub loads: Vec<LoadRecord>,
    /// How the sweep ended.
    pub end: SweepEnd,
    /// What a reader should know before trusting the numbers, one line each.
    pub notes: Vec<String>,
}

impl H2dMatrix {
    /// Rates: sizes × CPUs × devices, decimal GB/s, NaN = not measured.
    #[must_use]
    pub fn gbps(&self) -> ArrayView3<'_, f64> {
        self.matrix.gbps()
    }

    /// Rates of one size: CPUs × devices, decimal GB/s, NaN = not measured; `None` when the size
    /// was not part of the plan.
    #[must_use]
    pub fn gbps_at(&self, size: ByteSize) -> Option<ArrayView2<'_, f64>> {
        let index = self.matrix.sizes.iter().position(|candidate| *candidate == size)?;
        Some(self.matrix.gbps.index_axis(ndarray::Axis(0), index))
    }

    /// How each cell came out: sizes × CPUs × devices.
    #[must_use]
    pub fn status(&self) -> ArrayView3<'_, CellStatus> {
        self.matrix.status.view()
    }
}

/// Measures a plan from its first point.
///
/// The calling thread is bound to one CPU after another and restored at the end.
///
/// # Errors
/// When buffers cannot be had or the observer fails. A cell that cannot be measured is a cell
/// status, not an error.
///
/// # Thread binding
/// Call it from a thread whose binding does not matter meanwhile.
pub fn h2d(machine: &Machine, plan: &H2dPlan, observer: &mut dyn Observer) -> Result<H2dMatrix> {
    h2d_from(machine, plan, &mut std::iter::empty(), 0, observer)
}

/// Goes on with an interrupted sweep: `before` are its samples, in order, `start_ns` the time from
/// its first bind to now.
///
/// # Errors
/// As [`h2d`]; also when the samples are not the beginning of this plan's schedule.
pub fn h2d_from(
    machine: &Machine,
    plan: &H2dPlan,
    before: &mut dyn Iterator<Item = Result<Sample>>,
    start_ns: u64,
    observer: &mut dyn Observer,
) -> Result<H2dMatrix> {
    machine.advance_virtual_time(start_ns);
    let mut clock = RunClock::new(start_ns);
    h2d_in(machine, plan, &mut Course { before, clock: &mut clock, first_seq: 0, observer })
}

/// The sweep as a part of a run.
pub(crate) fn h2d_in(
    machine: &Machine,
    plan: &H2dPlan,
    course: &mut Course<'_>,
) -> Result<H2dMatrix> {
    let (rows, columns) = axes_of_plan(
        plan,
        |cpu| machine.node_of(CpuId(cpu)).map(|node| node.0),
        |id| machine.device(DeviceId(id)).and_then(|device| device.info().node).map(|node| node.0),
    );
    let sweep = plan.direction.sweep();
    let core_of = |cpu| core_of(machine, cpu);
    let gathered = |load: &LoadProfile| {
        let (load, sizes, axes) = (load.to_string(), || plan.sizes.clone(), (&rows, &columns));
        let (rows, columns) = (axes.0.clone(), axes.1.clone());
        let axes = (rows.clone(), columns.clone());
        let mut table = Table::new(sweep, &load, sizes(), axes, core_of);
        table.sampled = plan.sample.is_some();
        Gathered {
            table: Some(table),
            estimates: Estimates::new(sweep, &load, sizes(), rows, columns),
        }
    };
    let mut gathered: Vec<Gathered> = plan.loads.iter().map(gathered).collect();
    let mut engine = Engine::new(machine, plan);
    let mut schedule = Schedule::new(plan, machine);
    let extent = Extent {
        repeats: plan.repeats,
        ci: plan.ci,
        confirm: (plan.order == Order::Blocks).then_some(plan.min_effect),
        seed: plan.seed,
        sample: plan.sample,
    };
    let end = drive(&mut engine, &mut schedule, extent, &mut gathered, course)?;
    let loads = records_of(engine.loads.as_ref());
    let refused = engine.refused.map(|reason| format!("host memory is pageable: {reason}"));
    let mut notes: Vec<String> = refused.into_iter().collect();
    notes.extend(engine.beside.as_ref().map(Beside::describe));
    if plan.direction == Direction::Bidirectional && machine.backend() == BackendKind::Host {
        notes.push(
            "host backend: one thread makes both copies of an iteration, one after the other, so \
             that each has at most half the rate that it has alone"
                .to_owned(),
        );
    }
    let mut matrices = gathered.into_iter().map(|load| load.into_matrix(plan.min_effect));
    let matrix =
        matrices.next().unwrap_or_else(|| Matrix::new(sweep, "idle", Vec::new(), rows, columns));
    Ok(H2dMatrix { matrix, under_loads: matrices.collect(), loads, end, notes })
}

/// Host memory that copies start from or end in.
struct Arena {
    buffer: HostBuffer,
    page_nodes: Option<BTreeMap<u32, u32>>,
}

impl Arena {
    fn new(machine: &Machine, size: ByteSize) -> Result<Self> {
        let buffer = HostBuffer::new(machine, size, HostMemory::PageLocked)?;
        let page_nodes = buffer
            .page_nodes()
            .map(|nodes| nodes.into_iter().map(|(node, pages)| (node.0, pages)).collect());
        Ok(Self { buffer, page_nodes })
    }
}

/// One device's end of the copies.
struct Lane {
    ends: Ends,
    /// Around each timed copy, where events carry the device's own time; none where there are copies
    /// on two streams.
    timer: Option<EventTimer>,
    /// Copies between two events by size, chosen at its first point; `None` where the device's
    /// clock is too coarse for any number.
    batches: BTreeMap<ByteSize, Option<u32>>,
}

/// What a point needs between its checks: buffers, streams, the bound thread and the clock.
struct Engine<'a> {
    machine: &'a Machine,
    plan: &'a H2dPlan,
    /// Two per node, exchanged between blocks: speed can belong to a buffer.
    arenas: BTreeMap<Option<NodeId>, [Arena; 2]>,
    /// The arenas of `--arena core`: one, or one for each direction.
    own: Vec<Arena>,
    /// Why host memory is not page-locked.
    refused: Option<String>,
    lanes: Vec<Result<Lane, String>>,
    /// What devices that hang may still use.
    left: Vec<(Lane, Vec<Arena>)>,
    /// The other devices of `--concurrent`.
    beside: Option<Beside>,
    binding: Option<Binding>,
    bound: Option<CpuId>,
    visit: Option<u64>,
    /// Fastest transfers so far, timed or not, by load and size.
    best: BTreeMap<(usize, ByteSize), Best>,
    /// Reused for every point, so that measuring does not allocate.
    sample: Sample,
    accounts: Accounts,
    /// Names of the plan's load profiles, and what makes them.
    load_names: Vec<String>,
    loads: Option<LoadGenerator>,
}

impl<'a> Engine<'a> {
    fn new(machine: &'a Machine, plan: &'a H2dPlan) -> Self {
        let mut sample = Sample::new(0, plan.direction.sweep(), ByteSize(0));
        sample.iter_ns.reserve(plan.iters as usize);
        sample.warmup_ns.reserve(plan.warmup.unwrap_or(32) as usize);
        Self {
            machine,
            plan,
            arenas: BTreeMap::new(),
            own: Vec::new(),
            refused: None,
            lanes: Vec::new(),
            left: Vec::new(),
            beside: None,
            binding: None,
            bound: None,
            visit: None,
            best: BTreeMap::new(),
            sample,
            accounts: Accounts::default(),
            load_names: plan.loads.iter().map(ToString::to_string).collect(),
            loads: None,
        }
    }

    /// Lets the load of this point run; true when another one did before.
    fn switch_load(&mut self, point: &PlannedPoint) -> Result<bool> {
        let cpu = self.plan.cpus[point.cell.row];
        match &mut self.loads {
            Some(loads) if !self.plan.unusable_cpus.contains_key(&cpu) => {
                Ok(loads.switch(point.load, &[cpu])?)
            }
            _ => Ok(false),
        }
    }

    fn lane(machine: &Machine, id: DeviceId, size: ByteSize, plan: &H2dPlan) -> Result<Lane> {
        let ends = Ends::new(machine, id, size, plan.direction)?;
        let is_one_way = plan.direction != Direction::Bidirectional;
        let timer = if is_one_way && machine.has_device_events() {
            Some(EventTimer::new(&ends.stream, plan.timeout())?)
        } else {
            None
        };
        Ok(Lane { ends, timer, batches: BTreeMap::new() })
    }

    /// Notes how a measured point's warm-up ended and the fastest of its times.
    fn note_best(&mut self, point: &PlannedPoint, settled: bool, fastest: Option<u64>) {
        let (devices, cells) = (self.plan.devices.len(), self.plan.cells());
        let best = self.best.entry((point.load, point.bytes));
        let best = best.or_insert_with(|| Best::new(devices, cells));
        best.ended(point.cell.column, settled);
        if let Some(time) = fastest {
            best.note(point.cell.column, point.cell.row * devices + point.cell.column, time);
        }
    }

    /// One point; `switched` when another load ran before.
    fn point(&mut self, point: &PlannedPoint, switched: bool) -> Result<(), Fault> {
        let cpu = self.plan.cpus[point.cell.row];
        if let Some(reason) = self.plan.unusable_cpus.get(&cpu) {
            return Err(Fault::Skipped(reason.clone()));
        }
        if let Err(reason) = &self.lanes[point.cell.column] {
            return Err(Fault::Skipped(reason.clone()));
        }
        self.machine.begin_point(&PointContext {
            seq: point.seq,
            visit: point.visit,
            sweep_is_pair: false,
            load: &self.sample.load,
        });
        let mut cold = self.bind(cpu)? || switched;
        let node = self.machine.node_of(cpu);
        let (first, second) = match self.plan.arena {
            ArenaPolicy::Node => {
                // Neighbouring rows start with different arenas, and every block exchanges them.
                let which = (point.block as usize + point.cell.row) % 2;
                self.sample.arena = u32::try_from(which).ok();
                match self.arenas.get_mut(&node) {
                    Some([even, odd]) if which == 0 => (Some(even), Some(odd)),
                    Some([even, odd]) => (Some(odd), Some(even)),
                    None => (None, None),
                }
            }
            ArenaPolicy::Core => {
                if self.visit != Some(point.visit) || self.own.is_empty() {
                    cold = true;
                    self.own.clear();
                    let size = self.lanes[point.cell.column]
                        .as_ref()
                        .map_or(ByteSize(0), |lane| lane.ends.size());
                    let start = self.machine.now_ns();
                    for _ in 0..host_buffers(self.plan.direction) {
                        let arena = Arena::new(self.machine, size)?;
                        if self.refused.is_none() {
                            self.refused = arena.buffer.refused().map(str::to_owned);
                        }
                        self.own.push(arena);
                    }
                    self.sample.touch_ns = self.machine.now_ns() - start;
                }
                self.sample.arena = Some(0);
                let mut own = self.own.iter_mut();
                (own.next(), own.next())
            }
        };
        let second = second.filter(|_| self.plan.direction == Direction::Bidirectional);
        self.visit = Some(point.visit);
        let (Some(arena), Ok(lane)) = (first, &mut self.lanes[point.cell.column]) else {
            return Err(Fault::Skipped(format!("CPU {cpu} has no arena")));
        };
        self.sample.pinned = Some(arena.buffer.pinned());
        self.sample.page_nodes.clone_from(&arena.page_nodes);
        if let (Some(seen), Some(second)) = (&mut self.sample.page_nodes, &second) {
            for (node, pages) in second.page_nodes.iter().flatten() {
                *seen.entry(*node).or_default() += pages;
            }
        }
        let at = point.cell.row * self.plan.devices.len() + point.cell.column;
        let best = self.best.get(&(point.load, point.bytes));
        let best = best.and_then(|best| best.of(point.cell.column, at));
        let Lane { ends, timer, batches } = lane;
        let second_host = second.map(|arena| &mut arena.buffer);
        let mut run = PointRun {
            machine: self.machine,
            plan: self.plan,
            sample: &mut self.sample,
            path: Path { device: ends, host: &mut arena.buffer, second_host },
            timer,
            batches,
            check_ns: 0,
        };
        let begun = match &mut self.beside {
            Some(beside) => beside.begin(point.cell.column, cpu, point.bytes),
            None => Ok(()),
        };
        let result = match begun {
            Ok(()) => {
                let warmup =
                    Warmup::new(self.plan.warmup, cold).in_sample(self.plan.sample.is_some());
                run.run(point, &warmup, best, self.binding.as_ref())
            }
            Err(reason) => Err(Fault::Skipped(reason)),
        };
        self.accounts.timings.check_ns += run.check_ns;
        let ended = self.beside.as_mut().map_or(Ok(()), Beside::end);
        let result = match ended {
            Err(reason) if result.is_ok() => {
                Err(Fault::Failed(Error::output("copies at the same time", reason)))
            }
            _ => result,
        };
        if let Err(Fault::Failed(Error::Core(error))) = &result
            && error.kind() == "timeout"
            && !self.machine.has_virtual_time()
        {
            let reason = error.to_string();
            self.give_up(point, node, &reason);
        }
        result?;
        let RanOn::Thread(seen) = &self.sample.ran_on else { return Ok(()) };
        match seen.iter().find(|seen| **seen != cpu) {
            None => Ok(()),
            Some(seen) => {
                // Whatever moved it may have taken the CPU away: binding again tells.
                self.bound = None;
                let message = format!(
                    "bound to CPU {cpu}, but seen on CPU {seen}: something outside changed its \
                     affinity"
                );
                Err(Fault::Failed(Error::output("the measuring thread", message)))
            }
        }
    }

    /// Leaves out a device that hangs from here on, with the arena that it may still read: the
    /// other devices get a new one, touched by this thread on a CPU of the same node.
    fn give_up(&mut self, point: &PlannedPoint, node: Option<NodeId>, reason: &str) {
        let reason = format!("the device hung at an earlier point: {reason}");
        let lane = std::mem::replace(&mut self.lanes[point.cell.column], Err(reason));
        let arenas = match self.plan.arena {
            ArenaPolicy::Core => std::mem::take(&mut self.own),
            ArenaPolicy::Node => {
                let which = (point.block as usize + point.cell.row) % 2;
                let both = self.plan.direction == Direction::Bidirectional;
                let pair = self.arenas.get_mut(&node).into_iter().flatten().enumerate();
                let used = pair.filter(|(at, _)| both || *at == which);
                used.filter_map(|(_, arena)| {
                    let size = ByteSize(arena.buffer.len() as u64);
                    let new = Arena::new(self.machine, size).ok()?;
                    Some(std::mem::replace(arena, new))
                })
                .collect()
            }
        };
        if let Ok(lane) = lane {
            self.left.push((lane, arenas));
        }
    }

    /// Binds the thread to `cpu`; true when it came from elsewhere.
    fn bind(&mut self, cpu: CpuId) -> Result<bool, Fault> {
        if self.bound == Some(cpu) {
            return Ok(false);
        }
        let start = self.machine.now_ns();
        self.bound = None;
        let result = match &mut self.binding {
            Some(binding) => binding.move_to(cpu),
            None => self.machine.bind(cpu).map(|binding| self.binding = Some(binding)),
        };
        self.sample.bind_ns = self.machine.now_ns() - start;
        match result {
            Ok(()) => {
                self.bound = Some(cpu);
                Ok(true)
            }
            Err(error) => Err(Fault::Skipped(error.to_string())),
        }
    }
}

impl Points for Engine<'_> {
    fn is_usable(&self, cell: Cell) -> bool {
        !self.plan.unusable_cpus.contains_key(&self.plan.cpus[cell.row])
            && !self.plan.unusable_devices.contains_key(&self.plan.devices[cell.column])
    }

    /// Allocates and touches everything before the first bind.
    fn prepare(&mut self) -> Result<()> {
        let (machine, plan) = (self.machine, self.plan);
        let began = machine.now_ns();
        let size = if plan.has_probes() { plan.largest().max(PROBE_SIZE) } else { plan.largest() };
        if plan.arena == ArenaPolicy::Node {
            let mut refused = None;
            for (node, cpus) in plan.nodes(machine) {
                // Touched from a CPU of the node, so that the kernel places the pages there. A CPU
                // may have gone since the census: any other of its node serves as well.
                let mut binds = cpus.into_iter().map(|cpu| machine.bind(cpu));
                let binding =
                    binds.find_map(|bind| bind.map_err(|error| refused = Some(error)).ok());
                if binding.is_some() {
                    let pair = [Arena::new(machine, size)?, Arena::new(machine, size)?];
                    self.arenas.insert(node, pair);
                }
            }
            if let (true, Some(error)) = (self.arenas.is_empty(), refused) {
                return Err(error.into());
            }
        }
        for id in &plan.devices {
            self.lanes.push(match plan.unusable_devices.get(id) {
                Some(reason) => Err(reason.clone()),
                None => Self::lane(machine, *id, size, plan).map_err(|error| error.to_string()),
            });
        }
        if self.lanes.iter().all(Result::is_err) {
            let reasons: Vec<&str> = self
                .lanes
                .iter()
                .filter_map(|lane| lane.as_ref().err().map(String::as_str))
                .take(4)
                .collect();
            return Err(Error::invalid(
                "--devices",
                format!("nothing can be measured: {}", reasons.join("; ")),
            ));
        }
        self.refused = self
            .arenas
            .values()
            .flatten()
            .find_map(|arena| arena.buffer.refused().map(str::to_owned));
        if plan.concurrent {
            self.beside = Some(Beside::start(machine, plan, size)?);
        }
        self.loads = loads_of(machine, &plan.loads, &plan.load_devices(machine), 0)?;
        self.accounts.timings.setup_ns = machine.now_ns() - began;
        Ok(())
    }

    /// Takes over what an interrupted run knew about the speed of a device and size.
    fn recall(&mut self, point: &PlannedPoint, sample: &Sample) -> Result<()> {
        let cell = (self.plan.cpus[point.cell.row].0, self.plan.devices[point.cell.column].0);
        check_recalled(point, sample, cell, &self.load_names[point.load])?;
        if sample.status == PointStatus::Measured {
            let fastest = sample.warmup_ns.iter().chain(sample.host_times()).min().copied();
            self.note_best(point, sample.settled, fastest);
        }
        Ok(())
    }

    fn may_pause(&mut self, point: &PlannedPoint) -> bool {
        self.bound != Some(self.plan.cpus[point.cell.row])
    }

    fn measure(&mut self, point: &PlannedPoint, clock: &mut RunClock) -> Result<&Sample> {
        let switched = self.switch_load(point)?;
        let began = self.machine.now_ns();
        reset(&mut self.sample, point, &self.load_names[point.load]);
        self.sample.t_ns = Some(clock.begin(began));
        self.sample.cpu = Some(self.plan.cpus[point.cell.row]);
        self.sample.device = Some(self.plan.devices[point.cell.column]);
        match &mut self.sample.ran_on {
            RanOn::Thread(cpus) => cpus.clear(),
            RanOn::Ranks(_) => self.sample.ran_on = RanOn::Thread(Vec::new()),
        }
        let (status, reason) = match self.point(point, switched) {
            Ok(()) => (PointStatus::Measured, None),
            Err(Fault::Skipped(reason)) => (PointStatus::Skipped, Some(reason)),
            Err(Fault::Failed(error)) => (PointStatus::Failed, Some(error.to_string())),
        };
        self.sample.status = status;
        self.sample.reason = reason;
        mark_implausible(&mut self.sample, self.plan.expect);
        if self.sample.status == PointStatus::Measured {
            let times = self.sample.warmup_ns.iter().chain(self.sample.host_times());
            let fastest = times.min().copied();
            self.note_best(point, self.sample.settled, fastest);
        }
        self.accounts.add(&self.sample, began, self.machine.now_ns());
        if let Some(loads) = &mut self.loads {
            loads.check(point.seq)?;
        }
        Ok(&self.sample)
    }

    fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    fn now_ns(&self) -> u64 {
        self.machine.now_ns()
    }
}

/// Why a point has no times.
enum Fault {
    Skipped(String),
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Fault {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// One point with its buffers at hand.
struct PointRun<'a> {
    machine: &'a Machine,
    plan: &'a H2dPlan,
    sample: &'a mut Sample,
    path: Path<'a>,
    timer: &'a mut Option<EventTimer>,
    batches: &'a mut BTreeMap<ByteSize, Option<u32>>,
    check_ns: u64,
}

impl PointRun<'_> {
    fn run(
        &mut self,
        point: &PlannedPoint,
        warmup: &Warmup,
        best: Option<u64>,
        binding: Option<&Binding>,
    ) -> Result<(), Fault> {
        let seed = point.seq ^ self.plan.seed;
        let tags = |stage| point_tags(self.plan.check, seed, stage, point.bytes);
        let (warm_tags, timed_tags) = (tags(Stage::WarmUp), tags(Stage::Timed));
        if !warmup.is_empty() {
            self.write_tags(warm_tags.as_ref())?;
            self.warm_up(point.bytes, warmup, best)?;
            self.check(warm_tags.as_ref(), "after the warm-up")?;
        }
        self.write_tags(timed_tags.as_ref())?;
        self.timed(point.bytes, binding)?;
        self.check(timed_tags.as_ref(), "after the last iteration")
    }

    fn write_tags(&mut self, tags: Option<&TagPattern>) -> Result<(), Fault> {
        let Some(tags) = tags else { return Ok(()) };
        let start = self.machine.now_ns();
        self.path.write_tags(tags)?;
        self.check_ns += self.machine.now_ns() - start;
        Ok(())
    }

    fn warm_up(
        &mut self,
        bytes: ByteSize,
        warmup: &Warmup,
        best: Option<u64>,
    ) -> Result<(), Fault> {
        let timeout = self.plan.timeout();
        let mut copies = self.path.prepare(bytes, timeout)?;
        loop {
            let start = self.machine.now_ns();
            copies.issue(1)?;
            copies.wait()?;
            self.sample.warmup_ns.push(self.machine.now_ns() - start);
            match warmup.verdict(&self.sample.warmup_ns, best) {
                Verdict::Again => {}
                Verdict::Settled => return Ok(()),
                Verdict::GiveUp => {
                    self.sample.settled = false;
                    return Ok(());
                }
            }
        }
    }

    fn timed(&mut self, bytes: ByteSize, binding: Option<&Binding>) -> Result<(), Fault> {
        let timeout = self.plan.timeout();
        let mut copies = self.path.prepare(bytes, timeout)?;
        let stream = copies.first.stream();
        let batches = &mut *self.batches;
        let Sample { iter_ns, host_iter_ns, timer: clock, ran_on, .. } = &mut *self.sample;
        let RanOn::Thread(ran_on) = ran_on else { return Ok(()) };
        let mut timer = self.timer.as_mut();
        if let Some(events) = &mut timer {
            let batch = match batches.get(&bytes) {
                Some(batch) => *batch,
                None => {
                    let found = events.choose(|events| events.time(&mut copies.first))?;
                    let batch = found.then(|| events.batch());
                    batches.insert(bytes, batch);
                    batch
                }
            };
            events.set_batch(batch.unwrap_or(1));
            if let Some(batch) = batch {
                *clock = if batch == 1 { Timer::Event } else { Timer::EventBatch };
                *host_iter_ns = Some(Vec::with_capacity(self.plan.iters as usize));
            }
        }
        let mut timer = timer.filter(|_| host_iter_ns.is_some());
        let batch = timer.as_ref().map_or(1, |timer| timer.batch());
        for _ in 0..self.plan.iters {
            let start = self.machine.now_ns();
            if let Some(timer) = &mut timer {
                timer.begin(stream)?;
            }
            copies.issue(batch)?;
            if let Some(timer) = &mut timer {
                timer.end(stream)?;
            }
            copies.wait()?;
            let end = self.machine.now_ns();
            match (&timer, host_iter_ns.as_mut()) {
                (Some(timer), Some(host_ns)) => {
                    host_ns.push((end - start) / u64::from(batch));
                    iter_ns.push(whole_ns(timer.nanoseconds()?));
                }
                _ => iter_ns.push(end - start),
            }
            let cpu = binding.and_then(|binding| binding.running_cpu().ok());
            if let Some(cpu) = cpu
                && !ran_on.contains(&cpu)
            {
                ran_on.push(cpu);
            }
        }
        // Events that show no time at all say nothing about the copy.
        if iter_ns.contains(&0)
            && let Some(host_ns) = host_iter_ns.take()
        {
            *iter_ns = host_ns;
            *clock = Timer::Host;
        }
        Ok(())
    }

    fn check(&mut self, tags: Option<&TagPattern>, when: &str) -> Result<(), Fault> {
        let Some(tags) = tags else { return Ok(()) };
        let start = self.machine.now_ns();
        let wrong = self.path.wrong_end(tags)?;
        self.check_ns += self.machine.now_ns() - start;
        let Some(end) = wrong else {
            self.sample.check = DataCheck::Ok;
            return Ok(());
        };
        self.sample.check = DataCheck::Mismatch;
        Err(Fault::Failed(Error::output(
            "data check",
            format!("the destination, {end}, does not hold what was sent ({when})"),
        )))
    }
}

/// Nanoseconds of a device's clock as a sample holds them; 0 for what is no time.
fn whole_ns(nanoseconds: f64) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and negative or undefined times become 0"
    )]
    let whole = nanoseconds.round() as u64;
    whole
}

#[cfg(test)]
mod tests {
    use cluster_health_core::affinity::{CpuSet, set_thread_affinity};

    use super::*;

    /// Moves the measuring thread behind the sweep's back, as a cpuset change would.
    struct Mover(Vec<(PointStatus, Option<String>)>);

    impl Observer for Mover {
        fn sample(&mut self, sample: &Sample) -> Result<()> {
            self.0.push((sample.status, sample.reason.clone()));
            if self.0.len() == 1 {
                let cpu = sample.cpu.unwrap();
                let all = Machine::host()?.census()?.bindable();
                let others: CpuSet = all.into_iter().filter(|other| *other != cpu).collect();
                set_thread_affinity(&others)?;
            }
            Ok(())
        }
    }

    #[test]
    fn a_point_that_ran_elsewhere_is_failed_and_the_next_one_binds_anew() {
        let machine = Machine::host().unwrap();
        let cpus = machine.census().unwrap().bindable();
        if cpus.len() < 2 {
            println!("skipped: needs two CPUs");
            return;
        }
        let plan = H2dPlan::builder()
            .cpus([cpus[0].0])
            .sizes([ByteSize::kib(64)])
            .repeats(3)
            .build(&machine)
            .unwrap();
        let mut mover = Mover(Vec::new());
        h2d(&machine, &plan, &mut mover).unwrap();
        let statuses: Vec<PointStatus> = mover.0.iter().map(|(status, _)| *status).collect();
        let devices = plan.devices.len();
        assert_eq!(statuses[0], PointStatus::Measured);
        assert_eq!(statuses[1], PointStatus::Failed);
        assert!(mover.0[1].1.as_ref().unwrap().contains("something outside"), "{:?}", mover.0[1]);
        assert!(statuses[2..].iter().all(|status| *status == PointStatus::Measured), "{devices}");
    }
}
