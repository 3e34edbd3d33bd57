//! The synthetic backend: CPUs and devices that do not exist, in virtual time.
//!
//! It prices binds, touches, registrations, allocations and points as well as copies, and holds no
//! data: a buffer remembers which tag pattern was last written or copied into it, so that the data
//! check works, but [`DeviceBuffer::read`](crate::DeviceBuffer::read) refuses.
#![allow(unsafe_code, reason = "implements the driver trait, whose calls are unsafe")]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::host::{
    clock_event, clock_event_elapsed_ns, free_clock_event, free_host, reserve_host,
    stamp_clock_event,
};
use crate::backend::{
    BackendKind, CopyRequest, Direction, Driver, RawDevice, RawEvent, RawHost, RawSide, RawStream,
};
use crate::buffer::{Pinned, TagPattern};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::id::{CpuId, DeviceId, NodeId};

#[forbid(unsafe_code)]
mod scenario;
#[forbid(unsafe_code)]
mod world;

use crate::affinity::{Census, CpuRecord, CpuSet};
use crate::topology::{CpuInfo, NodeInfo, Topology};
use crate::units::ByteSize;

pub use scenario::{
    Artefact, ArtefactKind, CpuPlace, Cpus, Failure, FailureKind, Fault, FaultKind, FaultSweep,
    IdList, LinkSpec, MachineSpec, Scenario, SmtLayout,
};
pub(crate) use world::RANK_DEAD;
pub use world::{CopyOutcome, PointContext, World};

/// What a buffer holds: the pattern it got last, and whether a copy spoilt it.
#[derive(Debug, Clone, Copy)]
struct Content {
    pattern: TagPattern,
    spoilt: bool,
}

#[derive(Debug)]
struct State {
    world: World,
    next_handle: u64,
    next_stream: u64,
    /// When streams with work end it, on the world's clock: what is on two of them goes on at once.
    busy_until: HashMap<u64, u64>,
    contents: HashMap<u64, Content>,
    host_buffers: HashMap<u64, HostPlace>,
}

/// What the world knows about a host buffer.
#[derive(Debug, Clone, Copy)]
struct HostPlace {
    /// The world's number for it: stalls belong to a buffer.
    number: usize,
    /// Node of the CPU that touched it.
    node: Option<NodeId>,
}

#[derive(Debug)]
pub(crate) struct SyntheticDriver {
    devices: Vec<DeviceInfo>,
    scenario: Scenario,
    state: Mutex<State>,
}

impl SyntheticDriver {
    pub(crate) fn new(scenario: Scenario) -> Result<Self> {
        let (count, nodes) = (scenario.machine.devices, scenario.machine.numa_nodes);
        let devices = (0..count)
            .map(|device| {
                let mut info =
                    DeviceInfo::new(DeviceId(device), i64::from(device), "synthetic device");
                // Devices are spread evenly over the nodes, in order.
                info.node = Some(NodeId(device * nodes / count));
                info
            })
            .collect();
        let state = State {
            world: World::new(scenario.clone(), None)?,
            next_handle: 1,
            next_stream: 0,
            busy_until: HashMap::new(),
            contents: HashMap::new(),
            host_buffers: HashMap::new(),
        };
        Ok(Self { devices, scenario, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    pub(crate) fn bind(&self, rank: u32, cpu: CpuId) -> Result<()> {
        self.state().world.bind(rank, cpu)
    }

    /// The first of the CPUs that takes the rank.
    pub(crate) fn allow(&self, rank: u32, cpus: &CpuSet) -> Result<()> {
        let mut refused = Error::system(
            "sched_setaffinity",
            libc::EINVAL,
            format!("binding rank {rank}: no CPU"),
        );
        for cpu in cpus.iter() {
            match self.bind(rank, cpu) {
                Ok(()) => return Ok(()),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    pub(crate) fn release(&self, rank: u32) -> Result<()> {
        self.state().world.release(rank)
    }

    pub(crate) fn running_cpu(&self, rank: u32) -> Result<CpuId> {
        self.state().world.running_cpu(rank)
    }

    pub(crate) fn begin_point(&self, context: &PointContext<'_>) {
        self.state().world.begin_point(context);
    }

    pub(crate) fn all_gather(
        &self,
        device_pair: [DeviceId; 2],
        bytes: ByteSize,
        timeout: Duration,
    ) -> Result<CopyOutcome> {
        self.state().world.all_gather(device_pair, bytes.bytes(), timeout)
    }

    pub(crate) fn advance_ns(&self, nanoseconds: u64) {
        self.state().world.advance(nanoseconds);
    }
}

fn handle_of(side: RawSide<'_>) -> u64 {
    match side {
        RawSide::Host(memory) => memory.handle,
        RawSide::Device(memory) => memory.handle,
    }
}

// SAFETY:
// * Host memory is a real private mapping that lives until it is freed; device memory is never
//   accessed.
// * Copies move no bytes at all.
unsafe impl Driver for SyntheticDriver {
    fn kind(&self) -> BackendKind {
        BackendKind::Synthetic
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn has_device_events(&self) -> bool {
        false
    }

    fn now_ns(&self) -> u64 {
        self.state().world.now_ns()
    }

    fn host_alloc(&self, len: usize, lock: bool) -> Result<RawHost> {
        let mut memory = reserve_host(len)?;
        let mut state = self.state();
        let bytes = len as u64;
        let number = state.world.alloc_host(bytes);
        state.world.touch(bytes);
        if lock {
            state.world.register(bytes);
            memory.pinned = Pinned::Registered;
        }
        let node = state.world.running_cpu(0).ok().and_then(|cpu| {
            state.world.cpu_places().iter().find(|place| place.cpu == cpu).map(|place| place.node)
        });
        state.host_buffers.insert(memory.handle, HostPlace { number, node });
        Ok(memory)
    }

    unsafe fn host_free(&self, memory: &RawHost) {
        let mut state = self.state();
        state.contents.remove(&memory.handle);
        state.host_buffers.remove(&memory.handle);
        // SAFETY:
        // * Forwarded to the caller: the memory is from `reserve_host`.
        unsafe { free_host(memory) };
    }

    fn host_page_nodes(&self, memory: &RawHost) -> Option<Vec<(NodeId, u32)>> {
        let node = self.state().host_buffers.get(&memory.handle)?.node?;
        let pages = memory.len.div_ceil(4096).min(512);
        Some(vec![(node, u32::try_from(pages).unwrap_or(512))])
    }

    fn device_alloc(&self, _device: usize, len: usize) -> Result<RawDevice> {
        let mut state = self.state();
        state.world.alloc_device(len as u64);
        // Odd handles: those of host memory are addresses of boxes, which are even.
        let handle = state.next_handle;
        state.next_handle += 2;
        Ok(RawDevice { address: std::ptr::null_mut(), len, handle })
    }

    unsafe fn device_free(&self, _device: usize, memory: &RawDevice) {
        self.state().contents.remove(&memory.handle);
    }

    fn stream_create(&self, _device: usize) -> Result<RawStream> {
        let mut state = self.state();
        state.next_stream += 1;
        Ok(RawStream(state.next_stream))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) {
        self.state().busy_until.remove(&stream.0);
    }

    unsafe fn stream_synchronize(&self, _: usize, stream: RawStream, _: Duration) -> Result<()> {
        let mut state = self.state();
        if let Some(end) = state.busy_until.remove(&stream.0) {
            let now = state.world.now_ns();
            state.world.advance(end.saturating_sub(now));
        }
        Ok(())
    }

    fn event_create(&self, _device: usize) -> Result<RawEvent> {
        Ok(clock_event())
    }

    unsafe fn event_destroy(&self, event: RawEvent) {
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { free_clock_event(event) };
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let state = self.state();
        let end = state.busy_until.get(&stream.0).copied().unwrap_or(0);
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { stamp_clock_event(event, end.max(state.world.now_ns())) };
        Ok(())
    }

    unsafe fn event_elapsed_ns(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        // SAFETY:
        // * Forwarded to the caller.
        Ok(unsafe { clock_event_elapsed_ns(start, end) })
    }

    unsafe fn copy_async(
        &self,
        request: &CopyRequest<'_>,
        stream: RawStream,
        timeout: Duration,
    ) -> Result<()> {
        let (from, to) = match request.direction {
            Direction::HostToDevice => (request.host.handle, request.device.handle),
            Direction::DeviceToHost => (request.device.handle, request.host.handle),
        };
        let device = self.devices[request.device_index].id;
        let mut state = self.state();
        if let Some(place) = state.host_buffers.get(&request.host.handle).copied() {
            state.world.use_host_buffer(place.number);
        }
        let issued = state.world.now_ns();
        let outcome = state.world.copy(device, request.bytes as u64, timeout)?;
        // The stream is busy from here on, the thread is not.
        state.world.turn_back(issued);
        let free = state.busy_until.get(&stream.0).copied().unwrap_or(0);
        state.busy_until.insert(stream.0, free.max(issued) + outcome.ns);
        match state.contents.get(&from).copied() {
            Some(mut content) => {
                content.spoilt |= outcome.corrupted;
                state.contents.insert(to, content);
            }
            None => {
                state.contents.remove(&to);
            }
        }
        Ok(())
    }

    unsafe fn write_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<()> {
        let content = Content { pattern: *pattern, spoilt: false };
        self.state().contents.insert(handle_of(side), content);
        Ok(())
    }

    unsafe fn check_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<bool> {
        let state = self.state();
        let content = state.contents.get(&handle_of(side));
        Ok(content.is_some_and(|content| content.pattern == *pattern && !content.spoilt))
    }

    unsafe fn device_write(&self, _: &RawDevice, _: usize, _: &[u8]) -> Result<()> {
        Err(no_data())
    }

    unsafe fn device_read(&self, _: &RawDevice, _: usize, _: &mut [u8]) -> Result<()> {
        Err(no_data())
    }
}

fn no_data() -> Error {
    Error::Unavailable {
        what: "the memory of a synthetic device".to_owned(),
        message: "a synthetic machine holds no data; use the host backend".to_owned(),
    }
}

/// CPUs and nodes of a scenario as the kernel would show them.
pub(crate) fn topology_of(scenario: &Scenario) -> Topology {
    let places = scenario.cpu_places();
    let mut siblings = HashMap::<u32, CpuSet>::new();
    let mut nodes = std::collections::BTreeMap::<NodeId, CpuSet>::new();
    for place in &places {
        siblings.entry(place.core).or_default().insert(place.cpu);
        let node = nodes.entry(place.node).or_default();
        if place.online {
            node.insert(place.cpu);
        }
    }
    let cpus = places
        .iter()
        .map(|place| CpuInfo {
            cpu: place.cpu,
            online: place.online,
            node: Some(place.node),
            package: Some(i64::from(place.package)),
            core: Some(i64::from(place.core)),
            siblings: siblings.get(&place.core).cloned().unwrap_or_default(),
        })
        .collect();
    let nodes = nodes
        .into_iter()
        .map(|(id, cpus)| NodeInfo { id, cpus, mem_total: 0, mem_free: 0 })
        .collect();
    Topology::from_parts(cpus, nodes)
}

/// The census that a synthetic machine would give.
pub(crate) fn census_of(scenario: &Scenario, topology: &Topology) -> Census {
    let places = scenario.cpu_places();
    let records = topology
        .cpus
        .iter()
        .zip(&places)
        .map(|(info, place)| CpuRecord {
            cpu: info.cpu,
            online: info.online,
            allowed: info.online,
            bindable: Some(info.online && !place.refuses_bind),
            numa_node: info.node,
            socket_id: info.package,
            core_id: info.core,
            thread_siblings: comma_list(&info.siblings),
            reason: match (info.online, place.refuses_bind) {
                (false, _) => Some("offline".to_owned()),
                (true, true) => Some("refused by the synthetic machine: EPERM".to_owned()),
                (true, false) => None,
            },
        })
        .collect();
    Census::from_records(records)
}

fn comma_list(cpus: &CpuSet) -> String {
    let ids: Vec<String> = cpus.iter().map(|cpu| cpu.to_string()).collect();
    ids.join(",")
}
