//! The host backend: one device per NUMA memory node, copies by the calling thread.
#![allow(
    unsafe_code,
    reason = "the host driver copies through raw addresses and owns boxed handles"
)]

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::memory::{self, Mapping};
use crate::backend::{
    BackendKind, CopyRequest, DeviceCopy, Direction, Driver, RawDevice, RawEvent, RawHost, RawSide,
    RawStream,
};
use crate::buffer::{Pinned, TagPattern};
use crate::device::DeviceInfo;
use crate::error::{Result, errno_text};
use crate::id::{DeviceId, NodeId};
use crate::topology::Topology;
use crate::units::ByteSize;

/// Nanoseconds of the system's monotonic clock, which all processes of the machine share.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY:
    // * The pointer is to a live timespec of ours; CLOCK_MONOTONIC exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[derive(Debug)]
pub(crate) struct HostDriver {
    devices: Vec<DeviceInfo>,
}

impl HostDriver {
    /// One device per NUMA node with memory; a machine without NUMA information has device 0.
    pub(crate) fn new(topology: &Topology) -> Self {
        let mut devices: Vec<DeviceInfo> = topology
            .nodes
            .iter()
            .filter(|node| node.mem_total > 0)
            .map(|node| {
                let id = DeviceId(node.id.0);
                let mut info = DeviceInfo::new(
                    id,
                    i64::from(node.id.0),
                    format!("NUMA node {} memory", node.id),
                );
                info.node = Some(node.id);
                info.memory = Some(ByteSize(node.mem_total));
                if topology.mems.as_ref().is_some_and(|mems| !mems.contains(&node.id)) {
                    info.unavailable =
                        Some("outside the memory nodes of this process's cpuset".to_owned());
                } else if node.cpus.is_empty() {
                    // A node without CPUs can only be reached by binding to it: try one page.
                    let trial = Mapping::anonymous(memory::page_size())
                        .and_then(|page| page.bind_to(node.id));
                    info.unavailable = trial.err().map(|error| error.to_string());
                }
                info
            })
            .collect();
        if devices.is_empty() {
            devices.push(DeviceInfo::new(DeviceId(0), 0, "host memory"));
        }
        Self { devices }
    }
}

/// Takes a mapping apart into an address that [`unmap`] puts together again.
fn into_raw(mapping: Mapping) -> (*mut u8, u64) {
    let address = mapping.address();
    let boxed: *mut Mapping = Box::into_raw(Box::new(mapping));
    (address, boxed.expose_provenance() as u64)
}

/// # Safety
/// `handle` came from [`into_raw`] and is not used again.
unsafe fn unmap(handle: u64) {
    let Ok(address) = usize::try_from(handle) else { return };
    let boxed: *mut Mapping = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY:
    // * The caller vouches that this is a box from `into_raw` that is given back once.
    drop(unsafe { Box::from_raw(boxed) });
}

/// Anonymous memory, touched here and page-locked when asked and allowed.
pub(crate) fn alloc_host(len: usize, lock: bool) -> Result<RawHost> {
    let mapping = Mapping::anonymous(len)?;
    mapping.touch();
    let mut pinned = Pinned::Pageable;
    let mut refused = None;
    if lock {
        match mapping.lock() {
            Ok(()) => pinned = Pinned::Registered,
            Err(errno) => {
                refused = Some(format!(
                    "mlock of {} refused: {}; raise the limit (ulimit -l, RLIMIT_MEMLOCK)",
                    ByteSize(len as u64),
                    errno_text(errno)
                ));
            }
        }
    }
    let (address, handle) = into_raw(mapping);
    Ok(RawHost { address, len, pinned, refused, handle })
}

/// Address space without pages: for machines on which nothing is really copied.
pub(crate) fn reserve_host(len: usize) -> Result<RawHost> {
    let (address, handle) = into_raw(Mapping::anonymous(len)?);
    Ok(RawHost { address, len, pinned: Pinned::Pageable, refused: None, handle })
}

/// # Safety
/// `memory` came from [`alloc_host`] or [`reserve_host`] and is not used again.
pub(crate) unsafe fn free_host(memory: &RawHost) {
    // SAFETY:
    // * Forwarded to the caller.
    unsafe { unmap(memory.handle) };
}

/// Events of backends whose work is done when the call returns: a time stamp of the clock.
pub(crate) fn clock_event() -> RawEvent {
    RawEvent(Box::into_raw(Box::new(AtomicU64::new(0))).expose_provenance() as u64)
}

fn stamp_of(event: RawEvent) -> *mut AtomicU64 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(event.0).unwrap_or_default())
}

/// # Safety
/// `event` came from [`clock_event`] and is not used again.
pub(crate) unsafe fn free_clock_event(event: RawEvent) {
    // SAFETY:
    // * The caller vouches that this is a box from `clock_event` that is given back once.
    drop(unsafe { Box::from_raw(stamp_of(event)) });
}

/// # Safety
/// `event` came from [`clock_event`] and is alive.
pub(crate) unsafe fn stamp_clock_event(event: RawEvent, now_ns: u64) {
    // SAFETY:
    // * The caller vouches that this is a live box from `clock_event`.
    let stamp = unsafe { &*stamp_of(event) };
    stamp.store(now_ns, Ordering::Release);
}

/// # Safety
/// Both events came from [`clock_event`] and are alive.
pub(crate) unsafe fn clock_event_elapsed_ns(start: RawEvent, end: RawEvent) -> f64 {
    // SAFETY:
    // * The caller vouches that this is a live box from `clock_event`.
    let start = unsafe { &*stamp_of(start) }.load(Ordering::Acquire);
    // SAFETY:
    // * As above.
    let end = unsafe { &*stamp_of(end) }.load(Ordering::Acquire);
    #[allow(clippy::cast_precision_loss, reason = "time differences stay far below 2^53 ns")]
    let elapsed = end.saturating_sub(start) as f64;
    elapsed
}

// SAFETY:
// * Memory comes from private or memfd mappings that live until they are freed.
// * Copies are finished when `copy_async` returns, so nothing is ever touched later.
unsafe impl Driver for HostDriver {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn has_device_events(&self) -> bool {
        false
    }

    fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn host_alloc(&self, len: usize, lock: bool) -> Result<RawHost> {
        alloc_host(len, lock)
    }

    unsafe fn host_free(&self, memory: &RawHost) {
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { free_host(memory) };
    }

    fn host_page_nodes(&self, memory: &RawHost) -> Option<Vec<(NodeId, u32)>> {
        memory::page_nodes(memory.address, memory.len)
    }

    fn device_alloc(&self, device: usize, len: usize) -> Result<RawDevice> {
        let mapping = Mapping::shared(len)?;
        if let Some(node) = self.devices[device].node
            && let Err(error) = mapping.bind_to(node)
        {
            // A sandbox that refuses mbind, on a machine where it would change nothing: any page
            // is on that node. Elsewhere the device would be a label without a meaning.
            if self.devices.len() > 1 {
                return Err(error);
            }
        }
        // Where memory runs out this is an error; a touch would be the end of the process.
        mapping.reserve()?;
        mapping.touch();
        let (address, handle) = into_raw(mapping);
        Ok(RawDevice { address, len, handle })
    }

    unsafe fn device_free(&self, _device: usize, memory: &RawDevice) {
        // SAFETY:
        // * Forwarded to the caller: the handle is from `into_raw` in `device_alloc`.
        unsafe { unmap(memory.handle) };
    }

    unsafe fn device_file<'a>(&self, memory: &'a RawDevice) -> Result<BorrowedFd<'a>> {
        let mapping: *const Mapping =
            std::ptr::with_exposed_provenance(usize::try_from(memory.handle).unwrap_or(0));
        // SAFETY:
        // * The caller vouches that the memory is alive, and its handle is a box from `into_raw`
        //   that lives as long.
        unsafe { &*mapping }.file()
    }

    fn stream_create(&self, device: usize) -> Result<RawStream> {
        Ok(RawStream(device as u64))
    }

    unsafe fn stream_destroy(&self, _stream: RawStream) {}

    unsafe fn stream_synchronize(&self, _: usize, _: RawStream, _: Duration) -> Result<()> {
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

    unsafe fn event_record(&self, event: RawEvent, _stream: RawStream) -> Result<()> {
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { stamp_clock_event(event, monotonic_ns()) };
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
        _stream: RawStream,
        _timeout: Duration,
    ) -> Result<()> {
        let (from, to) = match request.direction {
            Direction::HostToDevice => (request.host.address, request.device.address),
            Direction::DeviceToHost => (request.device.address, request.host.address),
        };
        // SAFETY:
        // * The caller vouches for `bytes` within both memories and for exclusive use.
        // * They are different mappings and cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, request.bytes) };
        Ok(())
    }

    unsafe fn copy_devices_async(
        &self,
        request: &DeviceCopy<'_>,
        _stream: RawStream,
    ) -> Result<()> {
        let (from, to) = (request.source.address, request.target.address);
        // SAFETY:
        // * The caller vouches for `bytes` within both memories and for exclusive use.
        // * They are different mappings and cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, request.bytes) };
        Ok(())
    }

    unsafe fn write_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<()> {
        let address = match side {
            RawSide::Host(memory) => memory.address,
            RawSide::Device(memory) => memory.address,
        };
        // SAFETY:
        // * The caller vouches that the memory is at least `pattern.bytes` long, idle and ours.
        unsafe { memory::write_tags(address, pattern) };
        Ok(())
    }

    unsafe fn check_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<bool> {
        let address = match side {
            RawSide::Host(memory) => memory.address,
            RawSide::Device(memory) => memory.address,
        };
        // SAFETY:
        // * The caller vouches that the memory is at least `pattern.bytes` long and idle.
        Ok(unsafe { memory::check_tags(address, pattern) })
    }

    unsafe fn device_write(&self, memory: &RawDevice, offset: usize, data: &[u8]) -> Result<()> {
        // SAFETY:
        // * The caller vouches that the range is inside the memory, which is idle.
        let target = unsafe { memory.address.add(offset) };
        // SAFETY:
        // * As above; `data` is borrowed memory elsewhere and cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target, data.len()) };
        Ok(())
    }

    unsafe fn device_read(&self, memory: &RawDevice, offset: usize, data: &mut [u8]) -> Result<()> {
        // SAFETY:
        // * The caller vouches that the range is inside the memory, which is idle.
        let source = unsafe { memory.address.add(offset) };
        // SAFETY:
        // * As above; `data` is borrowed memory elsewhere and cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(source, data.as_mut_ptr(), data.len()) };
        Ok(())
    }
}
