//! Device and pinned memory: who owns which addresses, and the raw accesses to them.
//!
//! A device pointer lies in a reserved range without access rights; the bytes live elsewhere. So a
//! client that dereferences a device pointer on the host is killed, as it would be in earnest.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::c_void,
    ptr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use crate::{
    codes::{
        ACL_ERROR_INVALID_PARAM, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED,
        RT_ADDR_UNALIGNED, RT_FEATURE_NOT_SUPPORT, RT_MEMORY_ALLOCATION, RT_PARAM_INVALID,
    },
    config, device,
    ffi::{Fail, In, Out, Outcome, exports, fail, lock, null},
};

const PAGE: usize = 4096;
/// Freed ranges that stay reserved, so that a use after free is not a use of something newer.
const QUARANTINE: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory of the device with this logic id.
    Device(u32),
    Pinned,
    Registered,
    /// The device's view of registered host memory.
    Mapped,
    /// Ordinary host memory: unknown to the runtime.
    Pageable,
}

#[derive(Debug)]
struct Region {
    base: usize,
    size: usize,
    reserved: usize,
    data: usize,
    kind: Kind,
    charged: u64,
    live: AtomicBool,
    /// Device view that goes with a registration.
    view: Option<usize>,
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.kind {
            Kind::Device(_) | Kind::Pinned => unmap(self.data, pages(self.size)),
            Kind::Registered | Kind::Mapped | Kind::Pageable => {}
        }
        // The visible range of device memory is given back by the quarantine.
    }
}

static REGIONS: RwLock<BTreeMap<usize, Arc<Region>>> = RwLock::new(BTreeMap::new());
static FREED: Mutex<VecDeque<(usize, usize)>> = Mutex::new(VecDeque::new());
pub(crate) static VIOLATIONS: AtomicU64 = AtomicU64::new(0);

fn pages(size: usize) -> usize {
    size.div_ceil(PAGE) * PAGE
}

fn at(addr: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(addr)
}

fn map(len: usize, access: i32) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY:
    // * a new anonymous mapping at an address of the kernel's choice touches nothing that exists
    let start = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance())
}

fn unmap(addr: usize, len: usize) {
    // SAFETY:
    // * the range is a whole mapping made by `map`, and its last owner gives it up
    unsafe { libc::munmap(at(addr), len) };
}

/// An address range that a check of [`locate`] or of the caller has found accessible.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    region: Option<Arc<Region>>,
    data: usize,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
}

impl Place {
    /// False when the memory was freed or unregistered after the work on it was queued.
    pub(crate) fn still_there(&self) -> bool {
        let there = self.region.as_ref().is_none_or(|region| region.live.load(Ordering::Acquire));
        if !there {
            VIOLATIONS.fetch_add(1, Ordering::Relaxed);
        }
        there
    }

    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Pinned | Kind::Registered | Kind::Pageable)
    }

    pub(crate) fn part(&self, offset: usize, len: usize) -> Self {
        debug_assert!(offset + len <= self.len);
        Self { data: self.data + offset, len, ..self.clone() }
    }

    pub(crate) fn copy_from(&self, source: &Self) {
        debug_assert_eq!(self.len, source.len);
        let (to, from): (*mut u8, *const u8) = (at(self.data).cast(), at(source.data).cast());
        // SAFETY:
        // * both ranges were checked against live allocations, which their places keep mapped;
        //   a pageable one is the client's, valid until the copy is done by the rules of ACL
        // * `copy` allows them to overlap
        unsafe { ptr::copy(from, to, self.len.min(source.len)) };
    }

    pub(crate) fn fill(&self, byte: u8) {
        let to: *mut u8 = at(self.data).cast();
        // SAFETY:
        // * the range was checked against a live allocation, which the place keeps mapped
        unsafe { ptr::write_bytes(to, byte, self.len) };
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0_u8; self.len];
        let from: *const u8 = at(self.data).cast();
        // SAFETY:
        // * the source as for `copy_from`
        // * the target is a vector of that length, newly made
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), self.len) };
        bytes
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        let to: *mut u8 = at(self.data).cast();
        // SAFETY:
        // * the target as for `copy_from`, at most its length is written
        // * a slice of Rust never overlaps memory of the client
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, self.len.min(bytes.len())) };
    }

    /// Flips one bit in the middle, as a fault would.
    pub(crate) fn spoil(&self) {
        let middle = self.part(self.len / 2, 1.min(self.len));
        middle.write(&middle.bytes().iter().map(|byte| byte ^ 0x10).collect::<Vec<_>>());
    }

    /// Writes the range to `file` at `offset`, or reads it from there.
    pub(crate) fn exchange(&self, file: i32, offset: u64, write: bool) -> std::io::Result<()> {
        let mut done = 0;
        while done < self.len {
            let (pointer, left) = (at(self.data + done), self.len - done);
            let to =
                i64::try_from(offset).unwrap_or(i64::MAX) + i64::try_from(done).unwrap_or(i64::MAX);
            let moved = if write {
                // SAFETY:
                // * the range was checked as for `copy_from`
                unsafe { libc::pwrite(file, pointer, left, to) }
            } else {
                // SAFETY:
                // * the range was checked as for `copy_from`
                unsafe { libc::pread(file, pointer, left, to) }
            };
            match usize::try_from(moved) {
                Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Ok(moved) => done += moved,
                Err(_) => {
                    let error = std::io::Error::last_os_error();
                    if error.kind() != std::io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

fn find(addr: usize) -> Option<Arc<Region>> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    let (_, region) = regions.range(..=addr).next_back()?;
    (addr < region.base + region.reserved.max(region.size)).then(|| Arc::clone(region))
}

fn is_freed(addr: usize) -> bool {
    lock(&FREED).iter().any(|&(base, len)| (base..base + len).contains(&addr))
}

/// Checks that `len` bytes at `addr` may be accessed, and finds out what they are.
pub(crate) fn locate(what: &str, addr: usize, len: usize) -> Result<Place, Fail> {
    if addr == 0 {
        return null(what);
    }
    let Some(region) = find(addr) else {
        if is_freed(addr) {
            return fail(RT_PARAM_INVALID, format!("{what} {addr:#x} was freed: use after free"));
        }
        return Ok(Place { region: None, data: addr, len, kind: Kind::Pageable });
    };
    let offset = addr - region.base;
    if len > region.size.saturating_sub(offset) {
        return fail(
            RT_PARAM_INVALID,
            format!(
                "{what}: {len} bytes from offset {offset} of an allocation of {} bytes: out of bounds",
                region.size
            ),
        );
    }
    let (data, kind) = (region.data + offset, region.kind);
    Ok(Place { region: Some(region), data, len, kind })
}

fn insert(region: Region) {
    let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
    regions.insert(region.base, Arc::new(region));
}

fn remove(base: usize) -> Option<Arc<Region>> {
    let region = REGIONS.write().unwrap_or_else(PoisonError::into_inner).remove(&base)?;
    region.live.store(false, Ordering::Release);
    if matches!(region.kind, Kind::Device(_) | Kind::Mapped) {
        let mut freed = lock(&FREED);
        freed.push_back((region.base, region.reserved));
        if freed.len() > QUARANTINE
            && let Some((base, len)) = freed.pop_front()
        {
            unmap(base, len);
        }
    }
    Some(region)
}

/// Live allocations and their bytes, by what `pick` selects.
fn tally(pick: impl Fn(Kind) -> bool) -> (u64, u64) {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    regions.values().filter(|region| pick(region.kind)).fold((0, 0), |(count, bytes), region| {
        (count + 1, bytes + u64::try_from(region.size).unwrap_or(0))
    })
}

pub(crate) fn live_device() -> (u64, u64) {
    tally(|kind| matches!(kind, Kind::Device(_)))
}

pub(crate) fn live_host() -> (u64, u64) {
    tally(|kind| kind == Kind::Pinned)
}

pub(crate) fn live_registered() -> u64 {
    tally(|kind| kind == Kind::Registered).0
}

/// Everything on a device goes when its last user resets it; returns how much was left.
pub(crate) fn release_device(logic: u32) -> u64 {
    let bases: Vec<usize> = {
        let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
        regions.values().filter(|r| r.kind == Kind::Device(logic)).map(|r| r.base).collect()
    };
    bases.iter().filter_map(|&base| remove(base)).count().try_into().unwrap_or(u64::MAX)
}

fn malloc(out: &Out<usize>, size: usize, policy: u32) -> Outcome {
    if out.is_null() {
        return null("devPtr");
    }
    if size == 0 {
        return fail(ACL_ERROR_INVALID_PARAM, "size is 0");
    }
    if policy & 0xff > 7 || policy & !(0x10_11ff) != 0 {
        return fail(RT_PARAM_INVALID, format!("policy {policy:#x} does not exist"));
    }
    let (_, logic) = device::current()?;
    // As on A2, A3 and 910: whole 32-byte units and one more.
    let charged = (size.div_ceil(32) as u64).saturating_add(1).saturating_mul(32);
    if !device::charge(logic, charged) {
        return fail(RT_MEMORY_ALLOCATION, format!("{size} bytes do not fit into the device"));
    }
    let reserved = pages(size) + PAGE;
    let made = map(pages(size), libc::PROT_READ | libc::PROT_WRITE)
        .and_then(|data| Some((data, map(reserved, libc::PROT_NONE)?)));
    let Some((data, base)) = made else {
        device::refund(logic, charged);
        return fail(RT_MEMORY_ALLOCATION, format!("mmap of {size} bytes failed"));
    };
    let kind = Kind::Device(logic);
    let live = AtomicBool::new(true);
    insert(Region { base, size, reserved, data, kind, charged, live, view: None });
    out.set(base)
}

fn malloc_host(out: &Out<usize>, size: usize) -> Outcome {
    if out.is_null() {
        return null("hostPtr");
    }
    if size == 0 {
        return fail(ACL_ERROR_INVALID_PARAM, "size is 0");
    }
    device::current()?;
    let Some(base) = map(pages(size), libc::PROT_READ | libc::PROT_WRITE) else {
        return fail(RT_MEMORY_ALLOCATION, format!("mmap of {size} bytes failed"));
    };
    let live = AtomicBool::new(true);
    let kind = Kind::Pinned;
    insert(Region { base, size, reserved: size, data: base, kind, charged: 0, live, view: None });
    out.set(base)
}

fn free(addr: usize, host: bool) -> Outcome {
    if addr == 0 {
        return null("the pointer");
    }
    let (_, logic) = device::current()?;
    let Some(region) = find(addr) else {
        let why = if is_freed(addr) { "double free" } else { "not allocated by the runtime" };
        return fail(RT_PARAM_INVALID, format!("{addr:#x}: {why}"));
    };
    if region.base != addr {
        return fail(RT_PARAM_INVALID, format!("{addr:#x} is inside an allocation, not its start"));
    }
    match (region.kind, host) {
        (Kind::Device(owner), false) if owner == logic => {}
        (Kind::Pinned, true) => {}
        (Kind::Device(owner), false) => {
            return fail(RT_PARAM_INVALID, format!("memory of device {owner}, current is {logic}"));
        }
        (kind, _) => return fail(RT_PARAM_INVALID, format!("{kind:?} memory is freed otherwise")),
    }
    // Of two threads that free the same memory one loses here.
    let Some(region) = remove(addr) else {
        return fail(RT_PARAM_INVALID, format!("{addr:#x}: double free"));
    };
    if let Kind::Device(owner) = region.kind {
        device::refund(owner, region.charged);
    }
    Ok(())
}

/// Two registrations of the same pages must not both pass the check.
static REGISTERING: Mutex<()> = Mutex::new(());

fn register(addr: usize, size: u64, mapped: bool, pinned: bool) -> Result<Option<usize>, Fail> {
    if addr == 0 {
        return null("ptr");
    }
    device::current()?;
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    if size == 0 || addr.checked_add(size).is_none() {
        return fail(RT_PARAM_INVALID, format!("size {size}"));
    }
    if !addr.is_multiple_of(PAGE) {
        return fail(RT_ADDR_UNALIGNED, format!("{addr:#x} is not aligned to {PAGE} bytes"));
    }
    let _guard: MutexGuard<'_, ()> = lock(&REGISTERING);
    let overlap = {
        let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
        let found = regions.range(..addr + size).next_back().map(|(_, region)| Arc::clone(region));
        found.filter(|region| region.base + region.size > addr)
    };
    match overlap.as_deref() {
        Some(region) if region.kind == Kind::Pinned && mapped && !pinned => {
            // The allocation keeps its own record; what is new is the device's view of it.
            let view = view(addr, size)?;
            return Ok(Some(view));
        }
        Some(_) => {
            return fail(HOST_MEMORY_ALREADY_REGISTERED, format!("{addr:#x} is already pinned"));
        }
        None => {}
    }
    if !config::get().host_register {
        return fail(
            RT_FEATURE_NOT_SUPPORT,
            "this kernel registers only memory of aclrtMallocHost",
        );
    }
    let view = if mapped { Some(view(addr, size)?) } else { None };
    let live = AtomicBool::new(true);
    let kind = Kind::Registered;
    insert(Region { base: addr, size, reserved: size, data: addr, kind, charged: 0, live, view });
    Ok(view)
}

fn view(addr: usize, size: usize) -> Result<usize, Fail> {
    let reserved = pages(size) + PAGE;
    let Some(base) = map(reserved, libc::PROT_NONE) else {
        return fail(RT_MEMORY_ALLOCATION, "no address range for the device's view");
    };
    let live = AtomicBool::new(true);
    let kind = Kind::Mapped;
    insert(Region { base, size, reserved, data: addr, kind, charged: 0, live, view: None });
    Ok(base)
}

fn view_of(host: usize) -> Option<usize> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    regions.values().find(|r| r.kind == Kind::Mapped && r.data == host).map(|r| r.base)
}

/// `aclrtMemLocation`, flattened into `aclrtPtrAttributes`.
#[repr(C)]
pub(crate) struct PtrAttributes {
    id: u32,
    location: u32,
    page_size: u32,
    rsv: [u32; 4],
}

/// `aclrtMallocConfig`: attributes the simulator has no use for.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MallocConfig {
    attrs: usize,
    count: usize,
}

fn check_config(config: &In<MallocConfig>) -> Outcome {
    if !config.is_null() {
        let config = config.get()?;
        if config.attrs == 0 && config.count > 0 {
            return null("cfg->attrs");
        }
    }
    Ok(())
}

exports! { Acl;
    fn aclrtMalloc(dev_ptr: Out<usize>, size: usize, policy: u32) {
        malloc(&dev_ptr, size, policy)
    }
    fn aclrtMallocAlign32(dev_ptr: Out<usize>, size: usize, policy: u32) {
        malloc(&dev_ptr, size, policy)
    }
    fn aclrtMallocCached(dev_ptr: Out<usize>, size: usize, policy: u32) {
        malloc(&dev_ptr, size, policy)
    }
    fn aclrtMallocWithCfg(
        dev_ptr: Out<usize>,
        size: usize,
        policy: u32,
        cfg: In<MallocConfig>,
    ) {
        check_config(&cfg)?;
        malloc(&dev_ptr, size, policy)
    }
    fn aclrtFree(dev_ptr: usize) { free(dev_ptr, false) }
    fn aclrtMemFlush(dev_ptr: usize, size: usize) { locate("devPtr", dev_ptr, size).map(drop) }
    fn aclrtMemInvalidate(dev_ptr: usize, size: usize) { locate("devPtr", dev_ptr, size).map(drop) }
    fn aclrtMallocHost(host_ptr: Out<usize>, size: usize) { malloc_host(&host_ptr, size) }
    fn aclrtMallocHostWithCfg(host_ptr: Out<usize>, size: u64, cfg: In<MallocConfig>) {
        check_config(&cfg)?;
        malloc_host(&host_ptr, usize::try_from(size).unwrap_or(usize::MAX))
    }
    fn aclrtFreeHost(host_ptr: usize) { free(host_ptr, true) }
    fn aclrtHostRegister(ptr: usize, size: u64, kind: u32, dev_ptr: Out<usize>) {
        if dev_ptr.is_null() {
            return null("devPtr");
        }
        if kind != 0 {
            return fail(RT_FEATURE_NOT_SUPPORT, format!("register type {kind} is reserved"));
        }
        match register(ptr, size, true, false)? {
            Some(view) => dev_ptr.set(view),
            None => fail(RT_PARAM_INVALID, "no device view"),
        }
    }
    fn aclrtHostRegisterV2(ptr: usize, size: u64, flag: u32) {
        const MAPPED: u32 = 0x2;
        const PINNED: u32 = 0x1000_0000;
        if flag == 0 || flag & !(MAPPED | PINNED) != 0 {
            return fail(RT_PARAM_INVALID, format!("flag {flag:#x}"));
        }
        register(ptr, size, flag & MAPPED != 0, flag & PINNED != 0).map(drop)
    }
    fn aclrtHostUnregister(ptr: usize) {
        if ptr == 0 {
            return null("ptr");
        }
        device::current()?;
        let _guard: MutexGuard<'_, ()> = lock(&REGISTERING);
        let view = view_of(ptr);
        let registered = find(ptr).filter(|r| r.kind == Kind::Registered && r.base == ptr);
        if view.is_none() && registered.is_none() {
            return fail(HOST_MEMORY_NOT_REGISTERED, format!("{ptr:#x} is not registered"));
        }
        if let Some(view) = view {
            drop(remove(view));
        }
        if registered.is_some() {
            drop(remove(ptr));
        }
        Ok(())
    }
    fn aclrtHostGetDevicePointer(host: usize, device: Out<usize>, flag: u32) {
        if host == 0 {
            return null("pHost");
        }
        if flag != 0 {
            return fail(RT_PARAM_INVALID, format!("flag {flag:#x} is reserved"));
        }
        match find(host).and_then(|region| region.view).or_else(|| view_of(host)) {
            Some(view) => device.set(view),
            None => fail(HOST_MEMORY_NOT_REGISTERED, format!("{host:#x} has no device view")),
        }
    }
    fn aclrtPointerGetAttributes(ptr: usize, attributes: Out<PtrAttributes>) {
        const HOST: u32 = 0;
        const DEVICE: u32 = 1;
        const UNREGISTERED: u32 = 2;
        if ptr == 0 {
            return null("ptr");
        }
        let (_, current) = device::current()?;
        let (id, location) = match find(ptr).map(|region| region.kind) {
            Some(Kind::Device(logic)) => (device::user_of(logic), DEVICE),
            Some(Kind::Mapped) => (device::user_of(current), DEVICE),
            Some(Kind::Pinned | Kind::Registered) => (device::user_of(current), HOST),
            Some(Kind::Pageable) | None => (device::user_of(current), UNREGISTERED),
        };
        attributes.set(PtrAttributes { id, location, page_size: 4096, rsv: [0; 4] })
    }
}
