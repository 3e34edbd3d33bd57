//! Backends: what really allocates, copies and times, behind one crate-private trait.
//!
//! Bounds, same-device rules, waiting and drop order are checked once, in the public types
//! ([`HostBuffer`](crate::HostBuffer), [`DeviceBuffer`](crate::DeviceBuffer),
//! [`Stream`](crate::Stream), [`Transfer`](crate::Transfer)); a backend only translates.
#![allow(unsafe_code, reason = "the driver trait, and raw memory that moves between threads")]

use std::ffi::c_void;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::activity::DeviceActivity;
use crate::buffer::{Pinned, TagPattern};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::id::NodeId;
use crate::inventory::AscendSoftware;

pub(crate) mod ascend;
pub(crate) mod host;
pub(crate) mod memory;
pub mod synthetic;

/// The kinds of backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BackendKind {
    /// Huawei Ascend NPUs through ACL and HCCL.
    Ascend,
    /// Plain host memory: one device per NUMA memory node.
    Host,
    /// A machine that does not exist, in virtual time.
    Synthetic,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ascend => "ascend",
            Self::Host => "host",
            Self::Synthetic => "synthetic",
        })
    }
}

/// Direction of a copy between host and device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Direction {
    /// Host memory to device memory.
    HostToDevice,
    /// Device memory to host memory.
    DeviceToHost,
}

/// Host memory as a driver handed it out.
#[derive(Debug)]
pub(crate) struct RawHost {
    pub(crate) address: *mut u8,
    pub(crate) len: usize,
    pub(crate) pinned: Pinned,
    /// Why it is not what was asked for.
    pub(crate) refused: Option<String>,
    pub(crate) handle: u64,
}

/// Device memory as a driver handed it out; `address` means something only to the driver.
#[derive(Debug)]
pub(crate) struct RawDevice {
    pub(crate) address: *mut u8,
    pub(crate) len: usize,
    pub(crate) handle: u64,
}

// SAFETY:
// * Memory is not tied to the thread that allocated it, and this value is its only owner.
unsafe impl Send for RawHost {}
// SAFETY:
// * Shared references only give out the address. Every access is an obligation of the caller,
//   which the front types meet: a copy into a buffer borrows it mutably, a leaked one is waited
//   for.
unsafe impl Sync for RawHost {}
// SAFETY:
// * As for `RawHost`.
unsafe impl Send for RawDevice {}
// SAFETY:
// * As for `RawHost`.
unsafe impl Sync for RawDevice {}

/// Either side of a copy, for the data check.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RawSide<'a> {
    Host(&'a RawHost),
    Device(&'a RawDevice),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawStream(pub(crate) u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawEvent(pub(crate) u64);

/// One bounded copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyRequest<'a> {
    pub(crate) direction: Direction,
    pub(crate) host: &'a RawHost,
    pub(crate) device: &'a RawDevice,
    pub(crate) bytes: usize,
    /// Position of the device in [`Driver::devices`].
    pub(crate) device_index: usize,
}

/// One bounded copy from device to device memory; indices are positions in [`Driver::devices`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceCopy<'a> {
    pub(crate) source: &'a RawDevice,
    pub(crate) source_index: usize,
    pub(crate) target: &'a RawDevice,
    pub(crate) target_index: usize,
    pub(crate) bytes: usize,
    /// The device of the stream: one of the two.
    pub(crate) stream_index: usize,
}

/// What a backend does, in the vocabulary of the C runtimes.
///
/// # Safety
/// Implementors return memory that is valid for reads and writes of `len` bytes until it is freed
/// (host memory; device memory only for the driver itself), and never touch a buffer after
/// [`stream_synchronize`](Self::stream_synchronize) reported the stream idle.
///
/// Device positions are indices into [`devices`](Self::devices).
pub(crate) unsafe trait Driver: fmt::Debug + Send + Sync {
    fn kind(&self) -> BackendKind;
    fn devices(&self) -> &[DeviceInfo];
    /// What the devices are busy with; empty where devices have no management interface.
    fn activity(&self) -> Vec<DeviceActivity> {
        Vec::new()
    }
    /// The vendor's software below the backend.
    fn software(&self) -> Option<AscendSoftware> {
        None
    }
    /// True when events carry the device's own time stamps.
    fn has_device_events(&self) -> bool;
    /// The clock that points are timed with: monotonic, nanoseconds.
    fn now_ns(&self) -> u64;

    /// Allocates, touches from the calling thread and, when `lock`, page-locks host memory.
    /// A refused page-lock is recorded in the result, not an error.
    fn host_alloc(&self, len: usize, lock: bool) -> Result<RawHost>;
    /// Ordinary memory, touched by the calling thread, then registered with the driver. What
    /// cannot be registered is page-locked otherwise, or pageable, and says why.
    fn host_register(&self, len: usize) -> Result<RawHost> {
        self.host_alloc(len, true)
    }
    /// # Safety
    /// `memory` came from this driver, is freed once, and nothing uses it any more.
    unsafe fn host_free(&self, memory: &RawHost);
    /// NUMA nodes of at most 512 evenly spaced pages, `None` where that cannot be read.
    fn host_page_nodes(&self, memory: &RawHost) -> Option<Vec<(NodeId, u32)>>;

    /// Makes a device the calling thread's, whatever others did meanwhile. Calls that are timed
    /// trust that it still is.
    fn make_current(&self, device: usize) -> Result<()> {
        let _ = device;
        Ok(())
    }
    /// Free and total bytes of a device's memory; `None` where nobody counts them.
    fn device_memory(&self, device: usize) -> Result<Option<(u64, u64)>> {
        let _ = device;
        Ok(None)
    }

    fn device_alloc(&self, device: usize, len: usize) -> Result<RawDevice>;
    /// # Safety
    /// `memory` came from this driver, is freed once, and nothing uses it any more.
    unsafe fn device_free(&self, device: usize, memory: &RawDevice);

    /// The file behind device memory that other processes can map.
    ///
    /// # Safety
    /// `memory` came from this driver and is alive.
    unsafe fn device_file<'a>(&self, memory: &'a RawDevice) -> Result<BorrowedFd<'a>> {
        let _ = memory;
        Err(Error::Unavailable {
            what: format!("sharing memory of the {} backend", self.kind()),
            message: "it has none that another process can map".to_owned(),
        })
    }

    fn stream_create(&self, device: usize) -> Result<RawStream>;
    /// Takes a stream of the runtime that somebody else owns.
    ///
    /// # Safety
    /// It is alive and belongs to the device's default context.
    unsafe fn stream_borrow(&self, device: usize, stream: *mut c_void) -> Result<RawStream> {
        let _ = (device, stream);
        Err(Error::Unavailable {
            what: format!("streams of others on the {} backend", self.kind()),
            message: "it has no runtime that somebody else could use, too".to_owned(),
        })
    }
    /// Forgets a stream of [`stream_borrow`](Self::stream_borrow), which stays as it is.
    ///
    /// # Safety
    /// It came from this driver and is not used again.
    unsafe fn stream_return(&self, stream: RawStream) {
        let _ = stream;
    }
    /// # Safety
    /// `stream` came from this driver, is destroyed once and is idle.
    unsafe fn stream_destroy(&self, stream: RawStream);
    /// # Safety
    /// `stream` came from this driver and is alive.
    unsafe fn stream_synchronize(
        &self,
        device: usize,
        stream: RawStream,
        timeout: Duration,
    ) -> Result<()>;

    fn event_create(&self, device: usize) -> Result<RawEvent>;
    /// # Safety
    /// `event` came from this driver, is destroyed once and is not in use by a stream.
    unsafe fn event_destroy(&self, event: RawEvent);
    /// # Safety
    /// `event` and `stream` came from this driver and are alive.
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;
    /// Nanoseconds between two completed events.
    ///
    /// # Safety
    /// Both events came from this driver and are alive.
    unsafe fn event_elapsed_ns(&self, start: RawEvent, end: RawEvent) -> Result<f64>;

    /// Starts a copy; it may go on after the call returns.
    ///
    /// # Safety
    /// * Both memories are alive, `bytes` is within both, and the device memory and the stream
    ///   belong to `device_index`.
    /// * Nothing else accesses them until the stream was synchronised.
    unsafe fn copy_async(
        &self,
        request: &CopyRequest<'_>,
        stream: RawStream,
        timeout: Duration,
    ) -> Result<()>;

    /// Lets both devices reach each other's memory; done before the first copy of a pair.
    fn peer_open(&self, a: usize, b: usize) -> Result<()> {
        let _ = (a, b);
        Ok(())
    }
    /// Starts a copy between devices; it may go on after the call returns.
    ///
    /// # Safety
    /// * Both memories are alive and different, `bytes` is within both, they belong to the devices
    ///   named, and the stream belongs to `stream_index`.
    /// * Nothing else accesses them until the stream was synchronised.
    unsafe fn copy_devices_async(&self, request: &DeviceCopy<'_>, stream: RawStream) -> Result<()> {
        let _ = (request, stream);
        Err(Error::Unavailable {
            what: format!("copies between device memories of the {} backend", self.kind()),
            message: "it has none".to_owned(),
        })
    }

    /// Writes the pattern into the first `pattern.bytes` of one side.
    ///
    /// # Safety
    /// The memory is alive, idle, exclusively ours and at least `pattern.bytes` long.
    unsafe fn write_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<()>;
    /// True when one side holds the pattern.
    ///
    /// # Safety
    /// The memory is alive, idle and at least `pattern.bytes` long.
    unsafe fn check_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<bool>;

    /// Synchronous access to device memory from the host.
    ///
    /// # Safety
    /// `offset + data.len()` is within the memory, which is alive and idle.
    unsafe fn device_write(&self, memory: &RawDevice, offset: usize, data: &[u8]) -> Result<()>;
    /// # Safety
    /// As [`device_write`](Self::device_write).
    unsafe fn device_read(&self, memory: &RawDevice, offset: usize, data: &mut [u8]) -> Result<()>;
}
