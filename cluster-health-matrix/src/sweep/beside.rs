//! Devices that copy beside the measured one (`--concurrent`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use cluster_health_core::{Binding, ByteSize, CpuId, DeviceId, HostBuffer, HostMemory, Machine};

use super::copies::{Ends, Path, host_buffers};
use super::engine::core_of;
use crate::error::{Error, Result};
use crate::plan::{Direction, H2dPlan};

/// Beyond the bound of a copy a thread that does not answer is lost.
const GRACE: Duration = Duration::from_secs(5);

/// Page-locking gigabytes takes its time, and `--timeout` is not about that.
const LONGEST_SET_UP: Duration = Duration::from_secs(120);

/// What a worker is to do at a point.
#[derive(Debug, Clone, Copy)]
struct Order {
    cpu: CpuId,
    bytes: ByteSize,
}

/// What a worker says.
#[derive(Debug)]
enum Reply {
    /// Its memory is there, or its first copy of a point is done.
    Going,
    /// It copies no more.
    Ended(Result<(), String>),
}

/// A thread that copies for one device.
#[derive(Debug)]
struct Worker {
    device: DeviceId,
    column: usize,
    /// Where it copies, unless that CPU is the measured one.
    home: CpuId,
    orders: Option<Sender<Order>>,
    replies: Receiver<Reply>,
    stop: Arc<AtomicBool>,
    is_copying: bool,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// The next reply; an error when there is none, or when it is one.
    fn hear(&self, timeout: Duration) -> Result<Reply, String> {
        match self.replies.recv_timeout(timeout.saturating_add(GRACE)) {
            Ok(Reply::Ended(Err(reason))) => Err(reason),
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err("its thread does not answer".to_owned()),
            Err(RecvTimeoutError::Disconnected) => Err("its thread ended".to_owned()),
        }
    }
}

/// A thread per usable device of the plan. At a point all but that of the measured device copy, one
/// copy after another, from before its warm-up until after its last iteration.
#[derive(Debug)]
pub(super) struct Beside {
    workers: Vec<Worker>,
    timeout: Duration,
    /// Why nothing can be measured any more: a device that should copy does not.
    lost: Option<String>,
}

impl Beside {
    /// Starts the threads; each allocates its memory on the node of its CPU.
    pub(super) fn start(machine: &Machine, plan: &H2dPlan, size: ByteSize) -> Result<Self> {
        let mut beside = Self { workers: Vec::new(), timeout: plan.timeout(), lost: None };
        for (column, device, home) in homes(machine, plan) {
            let (orders, inbox) = channel();
            let (outbox, replies) = channel();
            let stop = Arc::new(AtomicBool::new(false));
            let post = Post { orders: inbox, replies: outbox, stop: Arc::clone(&stop) };
            let duty = Duty {
                machine: machine.clone(),
                device,
                home,
                size,
                direction: plan.direction,
                timeout: plan.timeout(),
            };
            let thread = std::thread::Builder::new()
                .name(format!("beside-{device}"))
                .spawn(move || duty.serve(&post))
                .map_err(|error| Error::io("starting", "a thread of --concurrent", error))?;
            let (orders, thread) = (Some(orders), Some(thread));
            let is_copying = false;
            beside.workers.push(Worker {
                device,
                column,
                home,
                orders,
                replies,
                stop,
                is_copying,
                thread,
            });
        }
        for worker in &beside.workers {
            worker.hear(plan.timeout().max(LONGEST_SET_UP)).map_err(|reason| {
                Error::invalid("--concurrent", format!("device {}: {reason}", worker.device))
            })?;
        }
        Ok(beside)
    }

    /// Which device copies from where, for the reader of the results.
    pub(super) fn describe(&self) -> String {
        let list: Vec<String> = self
            .workers
            .iter()
            .map(|worker| format!("device {} from CPU {}", worker.device, worker.home))
            .collect();
        format!(
            "every copy was timed while all other devices copied as many bytes at a time, one copy \
             after another: {}; a device whose CPU is the measured one copies from that of the \
             measured device",
            list.join(", ")
        )
    }

    /// Lets all devices but the one of `column` copy, and returns when each has done so once.
    pub(super) fn begin(
        &mut self,
        column: usize,
        cpu: CpuId,
        bytes: ByteSize,
    ) -> Result<(), String> {
        if let Some(reason) = &self.lost {
            return Err(reason.clone());
        }
        let own = self.workers.iter().find(|worker| worker.column == column);
        let free = own.map(|worker| worker.home);
        for worker in self.workers.iter_mut().filter(|worker| worker.column != column) {
            let home = if worker.home == cpu { free.unwrap_or(cpu) } else { worker.home };
            worker.stop.store(false, Ordering::Release);
            let order = Order { cpu: home, bytes };
            worker.is_copying = worker.orders.as_ref().is_some_and(|to| to.send(order).is_ok());
        }
        for worker in self.workers.iter_mut().filter(|worker| worker.column != column) {
            if let Err(reason) = worker.hear(self.timeout) {
                worker.is_copying = false;
                self.lost = Some(lost(worker.device, &reason));
            }
        }
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// Ends the copies that [`begin`](Self::begin) started; an error when one failed meanwhile.
    pub(super) fn end(&mut self) -> Result<(), String> {
        for worker in &self.workers {
            worker.stop.store(true, Ordering::Release);
        }
        for worker in self.workers.iter_mut().filter(|worker| worker.is_copying) {
            worker.is_copying = false;
            if let Err(reason) = worker.hear(self.timeout) {
                self.lost = Some(lost(worker.device, &reason));
            }
        }
        self.lost.clone().map_or(Ok(()), Err)
    }
}

fn lost(device: DeviceId, reason: &str) -> String {
    format!("device {device}, which should copy at the same time, does not: {reason}")
}

impl Drop for Beside {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.stop.store(true, Ordering::Release);
            worker.orders = None;
        }
        for worker in &mut self.workers {
            // A thread that panicked has nothing left to give back.
            worker.thread.take().map(JoinHandle::join);
        }
    }
}

/// A CPU of the plan for each usable device: of the device's node where there is one, on cores of
/// their own as far as there are enough.
fn homes(machine: &Machine, plan: &H2dPlan) -> Vec<(usize, DeviceId, CpuId)> {
    let usable = |cpu: &&CpuId| !plan.unusable_cpus.contains_key(*cpu);
    let mut free: Vec<CpuId> = plan.cpus.iter().filter(usable).copied().collect();
    let mut cores = BTreeSet::new();
    let mut homes = Vec::new();
    for (column, &device) in plan.devices.iter().enumerate() {
        if plan.unusable_devices.contains_key(&device) {
            continue;
        }
        let node = machine.device(device).and_then(|device| device.info().node);
        let worst = |cpu: &CpuId| {
            let is_far = node.is_some() && machine.node_of(*cpu) != node;
            let core = core_of(machine, cpu.0).unwrap_or(cpu.0);
            (cores.contains(&core), is_far)
        };
        // The first of the best: min_by_key returns it.
        let Some(at) = (0..free.len()).min_by_key(|&at| worst(&free[at])) else { break };
        let cpu = free.remove(at);
        cores.insert(core_of(machine, cpu.0).unwrap_or(cpu.0));
        homes.push((column, device, cpu));
    }
    homes
}

/// A worker's side of its channels.
struct Post {
    orders: Receiver<Order>,
    replies: Sender<Reply>,
    stop: Arc<AtomicBool>,
}

/// What a worker does for the whole sweep.
struct Duty {
    machine: Machine,
    device: DeviceId,
    home: CpuId,
    size: ByteSize,
    direction: Direction,
    timeout: Duration,
}

impl Duty {
    fn serve(&self, post: &Post) {
        let (mut binding, mut ends, mut hosts) = match self.set_up() {
            Ok(ready) => ready,
            Err(error) => {
                post.replies.send(Reply::Ended(Err(error.to_string()))).ok();
                return;
            }
        };
        let mut alive = post.replies.send(Reply::Going).is_ok();
        while alive && let Ok(order) = post.orders.recv() {
            let result = self.copy(order, &mut binding, &mut ends, &mut hosts, post);
            let result = result.map_err(|error| error.to_string());
            alive = result.is_ok();
            post.replies.send(Reply::Ended(result)).ok();
        }
    }

    fn set_up(&self) -> Result<(Binding, Ends, Vec<HostBuffer>)> {
        let binding = self.machine.bind(self.home)?;
        let ends = Ends::new(&self.machine, self.device, self.size, self.direction)?;
        let hosts = (0..host_buffers(self.direction))
            .map(|_| HostBuffer::new(&self.machine, self.size, HostMemory::PageLocked))
            .collect::<Result<_, _>>()?;
        Ok((binding, ends, hosts))
    }

    fn copy(
        &self,
        order: Order,
        binding: &mut Binding,
        device: &mut Ends,
        hosts: &mut [HostBuffer],
        post: &Post,
    ) -> Result<()> {
        binding.move_to(order.cpu)?;
        let [host, others @ ..] = hosts else { return Ok(()) };
        let second_host = others.first_mut();
        let mut path = Path { device, host, second_host };
        let mut copies = path.prepare(order.bytes, self.timeout)?;
        let mut has_told = false;
        while !has_told || !post.stop.load(Ordering::Acquire) {
            copies.issue(1)?;
            copies.wait()?;
            if !has_told {
                has_told = true;
                post.replies.send(Reply::Going).ok();
            }
        }
        Ok(())
    }
}
