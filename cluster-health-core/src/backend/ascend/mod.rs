//! The Ascend backend: NPUs through the ACL runtime, opened at run time.
//!
//! A thread needs a context of the device before almost any call. Every call here makes the
//! device current on its own thread first, so that the public types work from any thread.
//! Devices are opened by their first use, which takes seconds, and never reset; the runtime is
//! never finalised: other users of it may live in the same process.
#![allow(unsafe_code, reason = "calls of C functions, and raw addresses of host and device memory")]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ascend_sys::status::acl as codes;
use ascend_sys::{acl as abi, function};

use self::acl::{Runtime, not_started};
pub(crate) use self::acl::{missing, text_of};
use crate::activity::DeviceActivity;
use crate::backend::host::{alloc_host, free_host, monotonic_ns};
use crate::backend::{
    BackendKind, CopyRequest, DeviceCopy, Direction, Driver, RawDevice, RawEvent, RawHost, RawSide,
    RawStream, memory,
};
use crate::buffer::{Pinned, Tag, TagPattern};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::id::{DeviceId, NodeId};
use crate::inventory::AscendSoftware;
use crate::units::ByteSize;
use crate::watch;

mod acl;
mod dcmi;
pub(crate) mod inventory;
pub(crate) mod matmul;

/// The NPUs of this process.
#[derive(Debug)]
pub(crate) struct AscendDriver {
    runtime: Runtime,
    /// Positions are the runtime's own ("user") device ids.
    devices: Vec<DeviceInfo>,
}

impl AscendDriver {
    /// Opens the runtime and lists the devices; opens none of them.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with every path tried, or the code that the runtime answered, and
    /// what to do.
    pub(crate) fn load() -> Result<Self> {
        let runtime = Runtime::start().map_err(not_started)?;
        Ok(Self { runtime, devices: runtime.devices()? })
    }

    fn id(&self, device: usize) -> Option<DeviceId> {
        self.devices.get(device).map(|info| info.id)
    }

    fn user_of(&self, device: usize) -> Result<(i32, DeviceId)> {
        let found = i32::try_from(device).ok().zip(self.id(device));
        found.ok_or_else(|| Error::invalid("device", format!("position {device} does not exist")))
    }

    /// Makes the device current on this thread, whatever others did meanwhile.
    fn enter(&self, device: usize) -> Result<()> {
        let (user, id) = self.user_of(device)?;
        self.runtime.enter(user, id)
    }

    /// Makes a call that is timed, on a thread that most likely has the device already.
    #[inline]
    fn with_context(
        &self,
        name: &'static str,
        device: usize,
        call: impl Fn() -> i32,
    ) -> Result<()> {
        let (user, id) = self.user_of(device)?;
        self.runtime.with_context(name, user, id, call)
    }

    #[inline]
    fn check(&self, call: &'static str, code: i32, device: usize) -> Result<()> {
        self.runtime.check(call, code, self.id(device))
    }

    /// Page-locked memory of the runtime, every byte zero and touched by the calling thread.
    fn malloc_host(&self, len: usize) -> Result<*mut u8> {
        let device = self.runtime.any_device(self.devices.len());
        self.enter(device)?;
        let malloc = function!(self.runtime.acl, aclrtMallocHost).map_err(missing)?;
        let mut address: *mut c_void = std::ptr::null_mut();
        let call = watch::enter("aclrtMallocHost", self.id(device));
        // SAFETY:
        // * The pointer is to a live pointer of ours; this thread has a context.
        let code = unsafe { malloc(&raw mut address, len) };
        drop(call);
        self.check("aclrtMallocHost", code, device)?;
        if address.is_null() {
            return Err(Error::Unavailable {
                what: format!("{} of page-locked memory", ByteSize(len as u64)),
                message: "aclrtMallocHost succeeded without an address".to_owned(),
            });
        }
        let address: *mut u8 = address.cast();
        // SAFETY:
        // * The runtime handed out `len` bytes at this address just now, and only to us.
        unsafe { address.write_bytes(0, len) };
        Ok(address)
    }

    /// Own pages, registered with the runtime: `aclrtHostRegisterV2` pins them, in older releases
    /// `aclrtHostRegister` maps them for the device.
    ///
    /// Copies take the host's address: the device's, which the older call gives too, is for
    /// kernels and not kept.
    fn register_pages(&self, len: usize) -> Result<RawHost> {
        let acl = self.runtime.acl;
        let what = || format!("registering {} of host memory", ByteSize(len as u64));
        let release = kernel_release();
        if !registers_own_pages(&release) {
            return Err(Error::Unavailable {
                what: what(),
                message: format!(
                    "Linux {release} is too old: up to 5.10 only memory of aclrtMallocHost can be"
                ),
            });
        }
        // What could not be undone is not begun.
        function!(acl, aclrtHostUnregister).map_err(missing)?;
        let pin = function!(acl, aclrtHostRegisterV2);
        let map = function!(acl, aclrtHostRegister);
        if let (Err(_), Err(symbol)) = (&pin, &map) {
            return Err(missing(*symbol));
        }
        let device = self.runtime.any_device(self.devices.len());
        self.enter(device)?;
        let memory = Unregistered(alloc_host(len, false)?);
        let address: *mut c_void = memory.0.address.cast();
        let mut refused = None;
        if let Ok(pin) = pin {
            let _call = watch::enter("aclrtHostRegisterV2", self.id(device));
            // SAFETY:
            // * The pages are ours, whole and alive until they are unregistered.
            let code = unsafe { pin(address, len as u64, abi::ACL_HOST_REG_PINNED) };
            refused = self.check("aclrtHostRegisterV2", code, device).err();
        }
        if (refused.is_some() || pin.is_err())
            && let Ok(map) = map
        {
            let mut view: *mut c_void = std::ptr::null_mut();
            let _call = watch::enter("aclrtHostRegister", self.id(device));
            // SAFETY:
            // * As above; the pointer is to a live pointer of ours.
            let code =
                unsafe { map(address, len as u64, abi::ACL_HOST_REGISTER_MAPPED, &raw mut view) };
            refused = self.check("aclrtHostRegister", code, device).err();
        }
        match refused {
            Some(error) => Err(error),
            None => Ok(RawHost { pinned: Pinned::Registered, ..memory.into_raw() }),
        }
    }

    fn unregister(&self, address: *mut u8) -> Result<()> {
        let device = self.runtime.any_device(self.devices.len());
        self.enter(device)?;
        let unregister = function!(self.runtime.acl, aclrtHostUnregister).map_err(missing)?;
        let _call = watch::enter("aclrtHostUnregister", self.id(device));
        // SAFETY:
        // * The address is one that was registered, idle.
        let code = unsafe { unregister(address.cast()) };
        self.check("aclrtHostUnregister", code, device)
    }

    /// Lets device `a` reach the memory of device `b`, once per process.
    fn enable_peer(&self, a: usize, b: usize, enabled: &mut BTreeSet<(i32, i32)>) -> Result<()> {
        let ((a_user, a_id), (b_user, b_id)) = (self.user_of(a)?, self.user_of(b)?);
        if enabled.contains(&(a_user, b_user)) {
            return Ok(());
        }
        let acl = self.runtime.acl;
        let ask = function!(acl, aclrtDeviceCanAccessPeer).map_err(missing)?;
        let mut reaches = 0_i32;
        // SAFETY:
        // * The pointer is to a live integer of ours.
        let code = unsafe { ask(&raw mut reaches, a_user, b_user) };
        let about = |error| about_peer(error, a_id, b_id);
        self.check("aclrtDeviceCanAccessPeer", code, a).map_err(about)?;
        if reaches == 0 {
            return Err(Error::Unavailable {
                what: format!("a copy between device {a_id} and device {b_id}"),
                message: format!(
                    "aclrtDeviceCanAccessPeer says that device {a_id} cannot reach the memory of \
                     device {b_id}; choose devices with a link, see npu-smi info -t topo"
                ),
            });
        }
        self.enter(a)?;
        let enable = function!(acl, aclrtDeviceEnablePeerAccess).map_err(missing)?;
        let _call = watch::enter("aclrtDeviceEnablePeerAccess", Some(a_id));
        // SAFETY:
        // * The call takes integers; this thread has the context of device `a`.
        let code = unsafe { enable(b_user, 0) };
        let result = self.check("aclrtDeviceEnablePeerAccess", code, a);
        // What a second call returns is the driver's own choice, and another user of the runtime in
        // this process may have made the first one.
        if result.is_err() && !self.peer_enabled(a_user, b_user) {
            return result.map_err(about);
        }
        enabled.insert((a_user, b_user));
        Ok(())
    }

    /// Whether the runtime says that the access was enabled already; older releases cannot tell.
    fn peer_enabled(&self, a: i32, b: i32) -> bool {
        let Ok(ask) = function!(self.runtime.acl, aclrtDevicePeerAccessStatus) else {
            return false;
        };
        let mut enabled = 0_i32;
        // SAFETY:
        // * The pointer is to a live integer of ours.
        let code = unsafe { ask(a, b, &raw mut enabled) };
        code == 0 && enabled == 1
    }

    /// A synchronous copy between host memory and a device that is current on this thread.
    ///
    /// # Safety
    /// Both sides are alive, idle and `count` bytes long.
    unsafe fn copy(
        &self,
        device: usize,
        to: *mut u8,
        from: *const u8,
        count: usize,
        direction: Direction,
    ) -> Result<()> {
        let copy = function!(self.runtime.acl, aclrtMemcpy).map_err(missing)?;
        let _call = watch::enter("aclrtMemcpy", self.id(device));
        // SAFETY:
        // * The caller vouches for both sides; this thread has the device's context.
        let code = unsafe { copy(to.cast(), count, from.cast(), count, kind_of(direction)) };
        self.check("aclrtMemcpy", code, device)
    }

    /// Copies rows of `width` bytes synchronously, `pitch` apart in device memory and adjacent in
    /// host memory, between host memory and a device that is current on this thread.
    ///
    /// # Safety
    /// `(height - 1) * pitch + width` bytes of device memory and `height * width` bytes of host
    /// memory are alive and idle.
    unsafe fn copy_rows(&self, device: usize, rows: &Rows, direction: Direction) -> Result<()> {
        let Rows { host, remote, pitch, width, height } = *rows;
        if height == 1 || pitch == width {
            let (to, from) = ends(direction, host, remote);
            // SAFETY:
            // * Such rows are adjacent on both sides, so both are this long; the caller vouches
            //   for the rest.
            return unsafe { self.copy(device, to, from, width * height, direction) };
        }
        if let Ok(copy) = function!(self.runtime.acl, aclrtMemcpy2d) {
            let (to, from) = ends(direction, host, remote);
            let (to_pitch, from_pitch) = match direction {
                Direction::HostToDevice => (pitch, width),
                Direction::DeviceToHost => (width, pitch),
            };
            let kind = kind_of(direction);
            let _call = watch::enter("aclrtMemcpy2d", self.id(device));
            // SAFETY:
            // * The caller vouches for both sides; this thread has the device's context.
            let code =
                unsafe { copy(to.cast(), to_pitch, from.cast(), from_pitch, width, height, kind) };
            if code != codes::ACL_ERROR_RT_FEATURE_NOT_SUPPORT {
                return self.check("aclrtMemcpy2d", code, device);
            }
        }
        for row in 0..height {
            let host = host.wrapping_add(row * width);
            let (to, from) = ends(direction, host, remote.wrapping_add(row * pitch));
            // SAFETY:
            // * A row is within both sides, which the caller vouches for.
            unsafe { self.copy(device, to, from, width, direction)? };
        }
        Ok(())
    }
}

/// A mapping that goes again unless it is taken out.
struct Unregistered(RawHost);

impl Unregistered {
    fn into_raw(mut self) -> RawHost {
        let RawHost { address, len, pinned, handle, .. } = self.0;
        self.0.handle = 0;
        RawHost { address, len, pinned, refused: None, handle }
    }
}

impl Drop for Unregistered {
    fn drop(&mut self) {
        if self.0.handle != 0 {
            // SAFETY:
            // * From `alloc_host`, and nobody else has it.
            unsafe { free_host(&self.0) };
        }
    }
}

/// Pairs of devices whose access was enabled, by user ids: the runtime's state is per process.
static PEERS: Mutex<BTreeSet<(i32, i32)>> = Mutex::new(BTreeSet::new());

/// The same error with both devices.
#[cold]
fn about_peer(error: Error, a: DeviceId, b: DeviceId) -> Error {
    let Error::Backend(mut error) = error else { return error };
    let about = format!("between device {a} and device {b}");
    error.message = Some(match error.message.take() {
        Some(message) => format!("{message} ({about})"),
        None => about,
    });
    Error::Backend(error)
}

fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "of unknown version".to_owned(), |text| text.trim().to_owned())
}

/// Up to Linux 5.10 the driver registers memory of `aclrtMallocHost` only.
fn registers_own_pages(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) > (5, 10),
        _ => false,
    }
}

/// What collectives need of a device beside the driver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceContext {
    runtime: Runtime,
    user: i32,
    id: DeviceId,
}

impl DeviceContext {
    pub(crate) fn new(info: &DeviceInfo) -> Result<Self> {
        let user = i32::try_from(info.runtime_id)
            .map_err(|_| Error::invalid("device", "the runtime has no number for it"))?;
        Ok(Self { runtime: Runtime::start()?, user, id: info.id })
    }

    /// Makes the device current on this thread, whatever others did meanwhile.
    pub(crate) fn enter(&self) -> Result<()> {
        self.runtime.enter(self.user, self.id)
    }

    /// The device's physical id.
    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    /// The runtime's own number of the device.
    pub(crate) fn user(&self) -> i32 {
        self.user
    }

    /// The runtime's words about this thread's latest failure.
    pub(crate) fn recent_message(&self) -> Option<String> {
        self.runtime.recent_message()
    }
}

/// The runtime's own handle of a stream.
///
/// # Safety
/// The stream is from an [`AscendDriver`] and alive.
#[inline]
pub(crate) unsafe fn stream_of(stream: RawStream) -> *mut c_void {
    // SAFETY:
    // * Forwarded to the caller.
    unsafe { Handle::of(stream.0) }.address
}

/// Rows of bytes in device memory and where they are gathered.
#[derive(Debug, Clone, Copy)]
struct Rows {
    host: *mut u8,
    remote: *mut u8,
    pitch: usize,
    width: usize,
    height: usize,
}

/// Target and source of a copy.
fn ends(direction: Direction, host: *mut u8, device: *mut u8) -> (*mut u8, *const u8) {
    match direction {
        Direction::HostToDevice => (device, host.cast_const()),
        Direction::DeviceToHost => (host, device.cast_const()),
    }
}

fn kind_of(direction: Direction) -> abi::aclrtMemcpyKind {
    match direction {
        Direction::HostToDevice => abi::ACL_MEMCPY_HOST_TO_DEVICE,
        Direction::DeviceToHost => abi::ACL_MEMCPY_DEVICE_TO_HOST,
    }
}

/// Tags that lie in rows of one pitch, up to a drift that stays within a row.
#[derive(Debug, Default)]
struct TagRows {
    tags: Vec<(usize, Tag)>,
    pitch: usize,
    drift: usize,
}

/// So many tags are moved at once.
const ROWS: usize = 16 << 10;

impl TagRows {
    /// Adds a tag if it is in the next row, at most `slack` bytes behind the first tag's column.
    ///
    /// The drift never decreases from row to row, so the last row ends where its tag does, and no
    /// row reaches past the pattern.
    fn push(&mut self, offset: usize, tag: Tag, slack: usize) -> bool {
        let len = tag.bytes().len();
        match self.tags.as_slice() {
            [] => self.drift = 0,
            [(first, same)] => {
                if same.bytes().len() != len {
                    return false;
                }
                self.pitch = offset - first;
                self.drift = 0;
            }
            [(first, same), ..] => {
                let column = first + self.tags.len() * self.pitch;
                let Some(drift) = offset.checked_sub(column) else { return false };
                let fits = drift >= self.drift && drift <= slack && drift + len <= self.pitch;
                if !fits || same.bytes().len() != len || self.tags.len() == ROWS {
                    return false;
                }
                self.drift = drift;
            }
        }
        self.tags.push((offset, tag));
        true
    }

    /// Where the rows begin, and the bytes of each.
    fn shape(&self) -> Option<(usize, usize)> {
        let (first, tag) = self.tags.first()?;
        Some((*first, self.drift + tag.bytes().len()))
    }

    /// Each tag with its place among the gathered rows.
    fn places(&self, first: usize, width: usize) -> impl Iterator<Item = (usize, &Tag)> {
        self.tags
            .iter()
            .enumerate()
            .map(move |(row, (offset, tag))| (row * width + offset - first - row * self.pitch, tag))
    }
}

/// Calls `visit` with groups of tags until it fails or returns false; false if it did.
fn for_each_group(
    pattern: &TagPattern,
    slack: usize,
    mut visit: impl FnMut(&TagRows) -> Result<bool>,
) -> Result<bool> {
    let mut rows = TagRows::default();
    let mut outcome = Ok(true);
    pattern.for_each(|offset, tag| {
        if !rows.push(offset, tag, slack) {
            outcome = visit(&rows);
            rows.tags.clear();
            rows.push(offset, tag, slack);
        }
        matches!(outcome, Ok(true))
    });
    if matches!(outcome, Ok(true)) && !rows.tags.is_empty() { visit(&rows) } else { outcome }
}

/// A stream or an event and the device that it belongs to.
#[derive(Debug, Clone, Copy)]
struct Handle {
    address: *mut c_void,
    device: usize,
}

impl Handle {
    fn into_raw(self) -> u64 {
        let boxed: *mut Self = Box::into_raw(Box::new(self));
        boxed.expose_provenance() as u64
    }

    fn pointer(raw: u64) -> *mut Self {
        std::ptr::with_exposed_provenance_mut(usize::try_from(raw).unwrap_or(0))
    }

    /// # Safety
    /// `raw` came from [`into_raw`](Self::into_raw) and was not given back.
    #[inline]
    unsafe fn of(raw: u64) -> Self {
        // SAFETY:
        // * The caller vouches that this is a live box, which nobody writes to.
        unsafe { *Self::pointer(raw) }
    }

    /// # Safety
    /// As [`of`](Self::of), and it is not used again.
    unsafe fn take(raw: u64) -> Self {
        // SAFETY:
        // * The caller vouches that this is a box from `into_raw` that is given back once.
        *unsafe { Box::from_raw(Self::pointer(raw)) }
    }
}

fn device_of(memory: &RawDevice) -> usize {
    usize::try_from(memory.handle).unwrap_or(usize::MAX)
}

// SAFETY:
// * Host memory comes from the runtime or from private mappings and lives until it is freed.
// * The runtime touches memory only for work that was issued to a stream, and reports the stream
//   idle when all of it is done.
unsafe impl Driver for AscendDriver {
    fn kind(&self) -> BackendKind {
        BackendKind::Ascend
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn activity(&self) -> Vec<DeviceActivity> {
        dcmi::activity(self.devices.iter().map(|info| info.id))
    }

    fn software(&self) -> Option<AscendSoftware> {
        Some(inventory::software(&mut Vec::new()))
    }

    fn has_device_events(&self) -> bool {
        true
    }

    fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn host_alloc(&self, len: usize, lock: bool) -> Result<RawHost> {
        // A handle of 0 stands for memory of the runtime; mappings have their address.
        let refused = match lock.then(|| self.malloc_host(len)) {
            Some(Ok(address)) => {
                let pinned = Pinned::Pinned;
                return Ok(RawHost { address, len, pinned, refused: None, handle: 0 });
            }
            Some(Err(error)) => Some(error.to_string()),
            None => None,
        };
        Ok(RawHost { refused, ..alloc_host(len, false)? })
    }

    fn host_register(&self, len: usize) -> Result<RawHost> {
        let refused = match self.register_pages(len) {
            Ok(memory) => return Ok(memory),
            Err(error) => error.to_string(),
        };
        let instead = self.host_alloc(len, true)?;
        let refused = match &instead.refused {
            Some(more) => format!("{refused}; {more}"),
            None => refused,
        };
        Ok(RawHost { refused: Some(refused), ..instead })
    }

    unsafe fn host_free(&self, memory: &RawHost) {
        if memory.handle != 0 {
            // Pages that the driver may still map stay where they are.
            if memory.pinned == Pinned::Registered && self.unregister(memory.address).is_err() {
                return;
            }
            // SAFETY:
            // * Only mappings of `alloc_host` have a handle; the caller vouches for the rest.
            unsafe { free_host(memory) };
            return;
        }
        // Memory that cannot be given back is left behind: there is nobody to tell.
        let device = self.runtime.any_device(self.devices.len());
        let Ok(free) = function!(self.runtime.acl, aclrtFreeHost) else { return };
        if self.enter(device).is_ok() {
            let _call = watch::enter("aclrtFreeHost", self.id(device));
            // SAFETY:
            // * The address is from aclrtMallocHost and given back once, idle.
            unsafe { free(memory.address.cast()) };
        }
    }

    fn host_page_nodes(&self, memory: &RawHost) -> Option<Vec<(NodeId, u32)>> {
        memory::page_nodes(memory.address, memory.len)
    }

    fn make_current(&self, device: usize) -> Result<()> {
        self.enter(device)
    }

    fn device_memory(&self, device: usize) -> Result<Option<(u64, u64)>> {
        self.enter(device)?;
        let left = self.runtime.memory_left(self.id(device))?;
        Ok(left.map(|(free, total)| (free as u64, total as u64)))
    }

    fn device_alloc(&self, device: usize, len: usize) -> Result<RawDevice> {
        self.enter(device)?;
        let malloc = function!(self.runtime.acl, aclrtMalloc).map_err(missing)?;
        let mut address: *mut c_void = std::ptr::null_mut();
        let _call = watch::enter("aclrtMalloc", self.id(device));
        // SAFETY:
        // * The pointer is to a live pointer of ours; this thread has the device's context.
        let code = unsafe { malloc(&raw mut address, len, abi::ACL_MEM_MALLOC_HUGE_FIRST) };
        let result = self.check("aclrtMalloc", code, device);
        if let Err(Error::Backend(error)) = &result
            && let Ok(Some((free, total))) = self.runtime.memory_left(self.id(device))
        {
            let mut error = error.clone();
            let left = format!(
                "{} asked for, {} MiB of {} MiB free",
                ByteSize(len as u64),
                free >> 20,
                total >> 20
            );
            error.message = Some(match error.message.take() {
                Some(message) => format!("{message} ({left})"),
                None => left,
            });
            return Err(Error::Backend(error));
        }
        result?;
        Ok(RawDevice { address: address.cast(), len, handle: device as u64 })
    }

    unsafe fn device_free(&self, device: usize, memory: &RawDevice) {
        let Ok(free) = function!(self.runtime.acl, aclrtFree) else { return };
        if self.enter(device).is_ok() {
            let _call = watch::enter("aclrtFree", self.id(device));
            // SAFETY:
            // * The address is from aclrtMalloc and given back once, idle.
            unsafe { free(memory.address.cast()) };
        }
    }

    fn stream_create(&self, device: usize) -> Result<RawStream> {
        self.enter(device)?;
        let create = function!(self.runtime.acl, aclrtCreateStreamWithConfig).map_err(missing)?;
        let mut address: *mut c_void = std::ptr::null_mut();
        // A wait that polls ends without the wake-up of a sleeping thread, which would be timed.
        let flags = abi::ACL_STREAM_FAST_LAUNCH | abi::ACL_STREAM_FAST_SYNC;
        let _call = watch::enter("aclrtCreateStreamWithConfig", self.id(device));
        // SAFETY:
        // * The pointer is to a live pointer of ours; this thread has the device's context.
        let code = unsafe { create(&raw mut address, 0, flags) };
        self.check("aclrtCreateStreamWithConfig", code, device)?;
        Ok(RawStream(Handle { address, device }.into_raw()))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) {
        // SAFETY:
        // * Forwarded to the caller: the stream is from `stream_create` and not used again.
        let Handle { address, device } = unsafe { Handle::take(stream.0) };
        let Ok(destroy) = function!(self.runtime.acl, aclrtDestroyStream) else { return };
        if self.enter(device).is_ok() {
            let _call = watch::enter("aclrtDestroyStream", self.id(device));
            // SAFETY:
            // * The stream is alive, idle, and given back once, in its device's context.
            unsafe { destroy(address) };
        }
    }

    unsafe fn stream_borrow(&self, device: usize, stream: *mut c_void) -> Result<RawStream> {
        self.enter(device)?;
        // A handle that is none, or of another device, is found out here where the runtime looks.
        let query = function!(self.runtime.acl, aclrtStreamQuery).map_err(missing)?;
        let mut status: abi::aclrtStreamStatus = abi::ACL_STREAM_STATUS_RESERVED;
        let _call = watch::enter("aclrtStreamQuery", self.id(device));
        // SAFETY:
        // * The caller vouches for the stream; the pointer is to a live value of ours.
        let code = unsafe { query(stream, &raw mut status) };
        self.check("aclrtStreamQuery", code, device)?;
        Ok(RawStream(Handle { address: stream, device }.into_raw()))
    }

    unsafe fn stream_return(&self, stream: RawStream) {
        // SAFETY:
        // * Forwarded to the caller: the handle is from `stream_borrow` and not used again.
        let _: Handle = unsafe { Handle::take(stream.0) };
    }

    unsafe fn stream_synchronize(
        &self,
        device: usize,
        stream: RawStream,
        timeout: Duration,
    ) -> Result<()> {
        let wait =
            function!(self.runtime.acl, aclrtSynchronizeStreamWithTimeout).map_err(missing)?;
        let bound = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY:
        // * Forwarded to the caller: the stream is alive.
        let stream = unsafe { Handle::of(stream.0) };
        let (user, id) = self.user_of(device)?;
        let (name, bound_ms) =
            ("aclrtSynchronizeStreamWithTimeout", u64::from(bound.unsigned_abs()));
        let mut result = self.runtime.wait_with_context(name, user, id, bound_ms, || {
            // SAFETY:
            // * The stream is alive, and this thread has its device's context.
            unsafe { wait(stream.address, bound) }
        });
        if let Err(Error::Backend(error)) = &mut result
            && error.timed_out
        {
            error.message.get_or_insert_with(|| format!("not finished after {bound} ms"));
        }
        result
    }

    fn event_create(&self, device: usize) -> Result<RawEvent> {
        self.enter(device)?;
        // These can be recorded again and again without a reset.
        let create = function!(self.runtime.acl, aclrtCreateEventExWithFlag).map_err(missing)?;
        let mut address: *mut c_void = std::ptr::null_mut();
        let flags = abi::ACL_EVENT_SYNC | abi::ACL_EVENT_TIME_LINE;
        let _call = watch::enter("aclrtCreateEventExWithFlag", self.id(device));
        // SAFETY:
        // * The pointer is to a live pointer of ours; this thread has the device's context.
        let code = unsafe { create(&raw mut address, flags) };
        self.check("aclrtCreateEventExWithFlag", code, device)?;
        Ok(RawEvent(Handle { address, device }.into_raw()))
    }

    unsafe fn event_destroy(&self, event: RawEvent) {
        // SAFETY:
        // * Forwarded to the caller: the event is from `event_create` and not used again.
        let Handle { address, device } = unsafe { Handle::take(event.0) };
        let Ok(destroy) = function!(self.runtime.acl, aclrtDestroyEvent) else { return };
        if self.enter(device).is_ok() {
            let _call = watch::enter("aclrtDestroyEvent", self.id(device));
            // SAFETY:
            // * The event is alive, in no stream, and given back once.
            unsafe { destroy(address) };
        }
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY:
        // * Forwarded to the caller: the event is alive.
        let event = unsafe { Handle::of(event.0) };
        // SAFETY:
        // * Forwarded to the caller: the stream is alive.
        let stream = unsafe { Handle::of(stream.0) };
        let record = function!(self.runtime.acl, aclrtRecordEvent).map_err(missing)?;
        self.with_context("aclrtRecordEvent", event.device, || {
            // SAFETY:
            // * Both are alive, and this thread has their device's context.
            unsafe { record(event.address, stream.address) }
        })
    }

    unsafe fn event_elapsed_ns(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        // SAFETY:
        // * Forwarded to the caller: the event is alive.
        let start = unsafe { Handle::of(start.0) };
        // SAFETY:
        // * As above.
        let end = unsafe { Handle::of(end.0) };
        let elapsed = function!(self.runtime.acl, aclrtEventElapsedTime).map_err(missing)?;
        let milliseconds = Cell::new(0_f32);
        self.with_context("aclrtEventElapsedTime", end.device, || {
            // SAFETY:
            // * Both events are alive, and the pointer is to a live number of ours.
            unsafe { elapsed(milliseconds.as_ptr(), start.address, end.address) }
        })?;
        Ok(f64::from(milliseconds.get()) * 1e6)
    }

    unsafe fn copy_async(
        &self,
        request: &CopyRequest<'_>,
        stream: RawStream,
        timeout: Duration,
    ) -> Result<()> {
        let CopyRequest { direction, host, device, bytes, device_index } = *request;
        let (to, from) = ends(direction, host.address, device.address);
        if host.pinned.is_pageable() {
            // The runtime does the same with memory that is not page-locked, except below old
            // drivers, where it would not wait: so it is done here.
            // SAFETY:
            // * Forwarded to the caller: the stream is alive.
            unsafe { self.stream_synchronize(device_index, stream, timeout)? };
            // SAFETY:
            // * The caller vouches for both sides, which nothing else accesses.
            return unsafe { self.copy(device_index, to, from, bytes, direction) };
        }
        let copy = function!(self.runtime.acl, aclrtMemcpyAsync).map_err(missing)?;
        // SAFETY:
        // * Forwarded to the caller: the stream is alive.
        let stream = unsafe { Handle::of(stream.0) };
        let kind = kind_of(direction);
        self.with_context("aclrtMemcpyAsync", device_index, || {
            // SAFETY:
            // * The caller vouches that both sides are alive and `bytes` long, that nothing else
            //   accesses them until the stream is idle, and that all belong to this device, whose
            //   context this thread has.
            unsafe { copy(to.cast(), bytes, from.cast(), bytes, kind, stream.address) }
        })
    }

    fn peer_open(&self, a: usize, b: usize) -> Result<()> {
        // Held over both, so that no other thread asks the driver twice.
        let mut enabled = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
        self.enable_peer(a, b, &mut enabled)?;
        self.enable_peer(b, a, &mut enabled)
    }

    unsafe fn copy_devices_async(&self, request: &DeviceCopy<'_>, stream: RawStream) -> Result<()> {
        let DeviceCopy { source, source_index, target, target_index, bytes, stream_index } =
            *request;
        let copy = function!(self.runtime.acl, aclrtMemcpyAsync).map_err(missing)?;
        // SAFETY:
        // * Forwarded to the caller: the stream is alive.
        let stream = unsafe { Handle::of(stream.0) };
        let (to, from): (*mut c_void, *const c_void) =
            (target.address.cast(), source.address.cast_const().cast());
        let kind = abi::ACL_MEMCPY_DEVICE_TO_DEVICE;
        let result = self.with_context("aclrtMemcpyAsync", stream_index, || {
            // SAFETY:
            // * The caller vouches that both memories are alive and `bytes` long, and that nothing
            //   else accesses them until the stream is idle; this thread has the context of the
            //   stream's device.
            unsafe { copy(to, bytes, from, bytes, kind, stream.address) }
        });
        match (self.id(source_index), self.id(target_index)) {
            (Some(a), Some(b)) if a != b => result.map_err(|error| about_peer(error, a, b)),
            _ => result,
        }
    }

    unsafe fn write_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<()> {
        let memory = match side {
            RawSide::Host(memory) => {
                // SAFETY:
                // * The caller vouches that the memory is at least `pattern.bytes` long, idle and
                //   ours.
                unsafe { memory::write_tags(memory.address, pattern) };
                return Ok(());
            }
            RawSide::Device(memory) => memory,
        };
        let device = device_of(memory);
        self.enter(device)?;
        let mut staged = Vec::new();
        // Without slack, because what is between the tags must stay as it is.
        for_each_group(pattern, 0, |group| {
            let Some((first, width)) = group.shape() else { return Ok(true) };
            staged.clear();
            for (_, tag) in &group.tags {
                staged.extend_from_slice(tag.bytes());
            }
            let rows = Rows {
                host: staged.as_mut_ptr(),
                remote: memory.address.wrapping_add(first),
                pitch: group.pitch,
                width,
                height: group.tags.len(),
            };
            // SAFETY:
            // * The rows cover exactly the tags of the group, which are within the pattern; the
            //   caller vouches for memory of that length, idle and ours.
            // * The staging area holds one tag of `width` bytes per row.
            unsafe { self.copy_rows(device, &rows, Direction::HostToDevice)? };
            Ok(true)
        })?;
        Ok(())
    }

    unsafe fn check_tags(&self, side: RawSide<'_>, pattern: &TagPattern) -> Result<bool> {
        let memory = match side {
            RawSide::Host(memory) => {
                // SAFETY:
                // * The caller vouches that the memory is at least `pattern.bytes` long and idle.
                return Ok(unsafe { memory::check_tags(memory.address, pattern) });
            }
            RawSide::Device(memory) => memory,
        };
        let device = device_of(memory);
        self.enter(device)?;
        let mut staged = Vec::new();
        // Tags are evenly spaced up to rounding: a little slack makes long groups of them.
        for_each_group(pattern, 56, |group| {
            let Some((first, width)) = group.shape() else { return Ok(true) };
            staged.clear();
            staged.resize(width * group.tags.len(), 0_u8);
            let rows = Rows {
                host: staged.as_mut_ptr(),
                remote: memory.address.wrapping_add(first),
                pitch: group.pitch,
                width,
                height: group.tags.len(),
            };
            // SAFETY:
            // * The last row ends with the last tag of the group, which is within the pattern;
            //   the caller vouches for memory of that length, idle.
            // * The staging area has `width` bytes per row.
            unsafe { self.copy_rows(device, &rows, Direction::DeviceToHost)? };
            Ok(group.places(first, width).all(|(place, tag)| {
                staged.get(place..place + tag.bytes().len()) == Some(tag.bytes())
            }))
        })
    }

    unsafe fn device_write(&self, memory: &RawDevice, offset: usize, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let device = device_of(memory);
        self.enter(device)?;
        let to = memory.address.wrapping_add(offset);
        // SAFETY:
        // * The caller vouches that the range is inside the memory, which is idle; `data` is
        //   borrowed for the duration of this synchronous copy.
        unsafe { self.copy(device, to, data.as_ptr(), data.len(), Direction::HostToDevice) }
    }

    unsafe fn device_read(&self, memory: &RawDevice, offset: usize, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let device = device_of(memory);
        self.enter(device)?;
        let from = memory.address.wrapping_add(offset);
        // SAFETY:
        // * The caller vouches that the range is inside the memory, which is idle; `data` is
        //   borrowed for the duration of this synchronous copy.
        unsafe { self.copy(device, data.as_mut_ptr(), from, data.len(), Direction::DeviceToHost) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets and values of a pattern, and the same gathered from memory in rows.
    fn gathered(pattern: &TagPattern, slack: usize) -> (usize, bool) {
        let mut memory = vec![0_u8; usize::try_from(pattern.bytes).unwrap()];
        pattern.for_each(|offset, tag| {
            memory[offset..offset + tag.bytes().len()].copy_from_slice(tag.bytes());
            true
        });
        let (mut groups, mut tags, mut same) = (0, 0, true);
        for_each_group(pattern, slack, |group| {
            let (first, width) = group.shape().unwrap();
            groups += 1;
            tags += group.tags.len();
            let mut staged = Vec::new();
            for row in 0..group.tags.len() {
                let start = first + row * group.pitch;
                // Out of bounds here is out of bounds on the device.
                staged.extend_from_slice(&memory[start..start + width]);
            }
            for ((place, tag), (offset, _)) in group.places(first, width).zip(&group.tags) {
                let len = tag.bytes().len();
                same &= staged[place..place + len] == memory[*offset..*offset + len];
            }
            Ok(true)
        })
        .unwrap();
        let mut expected = 0;
        pattern.for_each(|_, _| {
            expected += 1;
            true
        });
        (groups, same && tags == expected)
    }

    #[test]
    fn groups_hold_every_tag_and_stay_inside() {
        for bytes in [1, 7, 8, 9, 15, 100, 200, 4096, 65_537, 1 << 20, (16 << 20) + 3] {
            for full in [false, true] {
                for slack in [0, 56] {
                    let pattern = TagPattern { seed: 5, bytes, full };
                    assert!(gathered(&pattern, slack).1, "{bytes} {full} {slack}");
                }
            }
        }
    }

    #[test]
    fn few_copies_gather_the_tags_of_a_large_buffer() {
        let pattern = TagPattern { seed: 5, bytes: 64 << 20, full: false };
        let (groups, _) = gathered(&pattern, 56);
        assert!(groups <= 256, "{groups}");
    }

    #[test]
    fn old_kernels_register_no_pages_of_ours() {
        for release in ["5.11.0", "5.15.0-91-generic", "6.6.0-28.oe2403.aarch64", "10.1"] {
            assert!(registers_own_pages(release), "{release}");
        }
        let old =
            ["5.10.0-60.18.0.50.oe2203.aarch64", "4.19.90-2003.4.0.0036.oe1", "5.9", "3.10.0"];
        for release in old.into_iter().chain(["", "of unknown version"]) {
            assert!(!registers_own_pages(release), "{release}");
        }
    }

    #[test]
    fn check_ends_at_the_first_difference() {
        let pattern = TagPattern { seed: 5, bytes: 16 << 20, full: false };
        let mut calls = 0;
        let outcome = for_each_group(&pattern, 0, |_| {
            calls += 1;
            Ok(false)
        });
        assert!(!outcome.unwrap());
        assert_eq!(calls, 1);
    }
}
