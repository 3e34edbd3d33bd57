//! Initialisation, devices and their ids, contexts, peer access, facts about devices.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    ffi::c_char,
    ptr,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    sync::{Arc, Mutex},
};

use crate::{
    codes::{
        ACL_ERROR_FEATURE_UNSUPPORTED, ACL_ERROR_INVALID_FILE, ACL_ERROR_INVALID_PARAM,
        ACL_ERROR_REPEAT_FINALIZE, ACL_ERROR_REPEAT_INITIALIZE, ACL_ERROR_UNINITIALIZE,
        RT_CONTEXT_NULL, RT_FEATURE_NOT_SUPPORT, RT_INVALID_DEVICEID, RT_INVALID_HANDLE,
        RT_NO_DEVICE, RT_PARAM_INVALID,
    },
    config::{self, Config},
    ffi::{self, Fail, Out, Outcome, Site, Text, exports, fail, lock, null},
    memory,
    stream::{self, Stream},
};

#[derive(Default)]
struct Device {
    users: u32,
    primary: Option<usize>,
    used: u64,
    peers: BTreeSet<u32>,
    saturation: u32,
}

struct Context {
    logic: u32,
    primary: bool,
    default_stream: Arc<Stream>,
}

#[derive(Default)]
struct Process {
    references: u64,
    finalized: bool,
    config_text: Option<String>,
}

static PROCESS: Mutex<Process> =
    Mutex::new(Process { references: 0, finalized: false, config_text: None });
static DEVICES: Mutex<BTreeMap<u32, Device>> = Mutex::new(BTreeMap::new());
static CONTEXTS: Mutex<BTreeMap<usize, Context>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);
/// Allocations that were still there when their device was reset.
pub(crate) static LEAKED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// User id of the current device, for the fault list: looked up without a lock.
    static USER: Cell<Option<u32>> = const { Cell::new(None) };
}

/// A new handle. Handles are numbers that no allocation has, and are never given out twice.
pub(crate) fn handle() -> usize {
    0x5A00_0000_0000_0000 | NEXT.fetch_add(0x10, Ordering::Relaxed)
}

fn visible(config: &Config) -> Result<Vec<u32>, Fail> {
    let Some(list) = &config.visible else { return Ok((0..config.devices).collect()) };
    let malformed = || Fail {
        code: Some(RT_NO_DEVICE),
        text: format!("ASCEND_RT_VISIBLE_DEVICES=\"{list}\" is not an ascending list of devices"),
    };
    let ids: Vec<u32> =
        list.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| malformed())?;
    let good = ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|&id| id < config.devices);
    if good { Ok(ids) } else { Err(malformed()) }
}

fn logic_of(user: i32) -> Result<u32, Fail> {
    let ids = visible(&config::get())?;
    let logic = usize::try_from(user).ok().and_then(|user| ids.get(user).copied());
    logic.map_or_else(
        || fail(RT_INVALID_DEVICEID, format!("device {user}: there are {}", ids.len())),
        Ok,
    )
}

pub(crate) fn logic_of_u32(user: u32) -> Result<u32, Fail> {
    logic_of(i32::try_from(user).unwrap_or(-1))
}

/// The user id of a device that is in use.
pub(crate) fn user_of(logic: u32) -> u32 {
    let ids = visible(&config::get()).unwrap_or_default();
    ids.iter().position(|&id| id == logic).and_then(|at| u32::try_from(at).ok()).unwrap_or(logic)
}

pub(crate) fn phy_of(config: &Config, logic: u32) -> u32 {
    usize::try_from(logic).ok().and_then(|at| config.phy.get(at).copied()).unwrap_or(logic)
}

/// The logic id of a physical one, without regard to what is visible.
pub(crate) fn logic_of_phy(config: &Config, phy: u32) -> Option<u32> {
    (0..config.devices).find(|&logic| phy_of(config, logic) == phy)
}

fn user_of_phy(phy: i32) -> Result<i32, Fail> {
    let config = config::get();
    let ids = visible(&config)?;
    let found = u32::try_from(phy)
        .ok()
        .and_then(|phy| logic_of_phy(&config, phy))
        .and_then(|logic| ids.iter().position(|&id| id == logic));
    found.and_then(|at| i32::try_from(at).ok()).map_or_else(
        || fail(RT_INVALID_DEVICEID, format!("no visible device has the physical id {phy}")),
        Ok,
    )
}

fn signed(id: u32) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}

fn initialized() -> Outcome {
    if lock(&PROCESS).references == 0 {
        return fail(ACL_ERROR_UNINITIALIZE, "aclInit was not called");
    }
    Ok(())
}

/// Context and logic device of the calling thread.
pub(crate) fn current() -> Result<(usize, u32), Fail> {
    let context = CURRENT.try_with(Cell::get).unwrap_or(0);
    match lock(&CONTEXTS).get(&context) {
        Some(found) => Ok((context, found.logic)),
        None => fail(RT_CONTEXT_NULL, "this thread has no current context"),
    }
}

pub(crate) fn current_user() -> Option<u32> {
    USER.try_with(Cell::get).ok().flatten()
}

pub(crate) fn default_stream() -> Result<Arc<Stream>, Fail> {
    let (context, _) = current()?;
    let contexts = lock(&CONTEXTS);
    contexts.get(&context).map_or_else(
        || fail(RT_CONTEXT_NULL, "the context was destroyed"),
        |found| Ok(Arc::clone(&found.default_stream)),
    )
}

fn make_current(context: usize, logic: Option<u32>) {
    CURRENT.set(context);
    USER.set(logic.map(user_of));
}

/// Takes memory of a device into account; false when it does not fit.
pub(crate) fn charge(logic: u32, bytes: u64) -> bool {
    let config = config::get();
    let mut devices = lock(&DEVICES);
    let device = devices.entry(logic).or_default();
    let fits = config.hbm_used.saturating_add(device.used).saturating_add(bytes) <= config.hbm;
    if fits {
        device.used += bytes;
    }
    fits
}

pub(crate) fn refund(logic: u32, bytes: u64) {
    let mut devices = lock(&DEVICES);
    let device = devices.entry(logic).or_default();
    device.used = device.used.saturating_sub(bytes);
}

/// Bytes this process holds on a device, when it uses the device at all.
pub(crate) fn in_use(logic: u32) -> Option<u64> {
    let devices = lock(&DEVICES);
    devices.get(&logic).filter(|device| device.users > 0).map(|device| device.used)
}

pub(crate) fn live_contexts() -> u64 {
    lock(&CONTEXTS).len() as u64
}

/// Whether the current device may reach into another one.
pub(crate) fn peer_enabled(logic: u32, peer: u32) -> bool {
    lock(&DEVICES).get(&logic).is_some_and(|device| device.peers.contains(&peer))
}

fn can_access(config: &Config, a: u32, b: u32) -> bool {
    a != b && !config.no_peer.contains(&(a, b)) && !config.no_peer.contains(&(b, a))
}

fn new_context(logic: u32, primary: bool) -> Result<usize, Fail> {
    let context = handle();
    let default_stream = Stream::start(context, logic)?;
    lock(&CONTEXTS).insert(context, Context { logic, primary, default_stream });
    Ok(context)
}

fn end_context(context: usize) {
    let removed = lock(&CONTEXTS).remove(&context);
    stream::end_context(context);
    if let Some(removed) = removed {
        removed.default_stream.abort();
    }
}

fn set_device(user: i32) -> Outcome {
    initialized()?;
    let logic = logic_of(user)?;
    let known = lock(&DEVICES).entry(logic).or_default().primary;
    let context = match known {
        Some(context) => context,
        None => {
            let made = new_context(logic, true)?;
            // Another thread may have been faster.
            let kept = *lock(&DEVICES).entry(logic).or_default().primary.get_or_insert(made);
            if kept != made {
                end_context(made);
            }
            kept
        }
    };
    lock(&DEVICES).entry(logic).or_default().users += 1;
    make_current(context, Some(logic));
    Ok(())
}

fn reset_device(user: i32, force: bool) -> Outcome {
    let logic = logic_of(user)?;
    let primary = {
        let mut devices = lock(&DEVICES);
        let device = devices.entry(logic).or_default();
        if device.users == 0 {
            return fail(RT_CONTEXT_NULL, format!("device {user} is not set"));
        }
        device.users = if force { 0 } else { device.users - 1 };
        if device.users > 0 {
            return Ok(());
        }
        device.peers.clear();
        device.primary.take()
    };
    let contexts: Vec<usize> =
        lock(&CONTEXTS).iter().filter(|(_, c)| c.logic == logic).map(|(&h, _)| h).collect();
    for context in contexts.into_iter().chain(primary) {
        end_context(context);
    }
    let left = memory::release_device(logic);
    LEAKED.fetch_add(left, Ordering::Relaxed);
    if let Some(device) = lock(&DEVICES).get_mut(&logic) {
        device.used = 0;
    }
    if current().is_err() {
        make_current(0, None);
    }
    Ok(())
}

fn bus_id(phy: u32) -> String {
    format!("0000:{:02x}:00.0", (0x10 + phy) & 0xff)
}

fn version_parts() -> [i32; 3] {
    let config = config::get();
    let mut parts = config.version.split('.').map(|part| part.parse().unwrap_or(0));
    std::array::from_fn(|_| parts.next().unwrap_or(0))
}

fn synchronize(timeout: i32) -> Outcome {
    let (_, logic) = current()?;
    default_stream()?.synchronize(timeout)?;
    stream::of_device(logic).iter().try_for_each(|stream| stream.synchronize(timeout))
}

fn hbm_like(attr: u32) -> Result<bool, Fail> {
    match attr {
        1 | 4 | 5 | 8 | 9 | 10 => Ok(true),
        0 | 2 | 3 | 6 | 7 | 11..=20 => Ok(false),
        _ => fail(RT_PARAM_INVALID, format!("memory attribute {attr} does not exist")),
    }
}

/// `aclrtUtilizationInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UtilizationInfo {
    cube: i32,
    vector: i32,
    aicpu: i32,
    memory: i32,
    extend: usize,
}

/// `aclCANNPackageVersion`.
#[repr(C)]
pub(crate) struct PackageVersion {
    version: [u8; 128],
    major: [u8; 64],
    minor: [u8; 64],
    release: [u8; 64],
    patch: [u8; 64],
    reserved: [u8; 128],
}

/// `aclrtMemUsageInfo`.
#[repr(C)]
pub(crate) struct MemUsageInfo {
    name: [u8; 32],
    current: u64,
    peak: u64,
    reserved: [usize; 8],
}

/// `aclrtUuid`.
#[repr(C)]
pub(crate) struct Uuid([u8; 16]);

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut room = [0; N];
    for (to, from) in room.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from;
    }
    room
}

exports! { Acl;
    fn aclInit(config_path: Text) {
        let text = match config_path.get()?.filter(|path| !path.is_empty()) {
            Some(path) => match std::fs::read_to_string(&path) {
                Ok(text) => Some(text),
                Err(error) => return fail(ACL_ERROR_INVALID_FILE, format!("{path}: {error}")),
            },
            None => None,
        };
        let mut process = lock(&PROCESS);
        if process.references > 0 {
            if process.config_text != text {
                return fail(ACL_ERROR_INVALID_PARAM, "aclInit with another configuration");
            }
            process.references += 1;
            return fail(ACL_ERROR_REPEAT_INITIALIZE, "already initialised");
        }
        *process = Process { references: 1, finalized: false, config_text: text };
        Ok(())
    }
    fn aclFinalize() {
        let mut process = lock(&PROCESS);
        if process.references == 0 {
            let (code, text) = if process.finalized {
                (ACL_ERROR_REPEAT_FINALIZE, "already finalised")
            } else {
                (ACL_ERROR_UNINITIALIZE, "aclInit was not called")
            };
            return fail(code, text);
        }
        process.references = 0;
        process.finalized = true;
        Ok(())
    }
    fn aclFinalizeReference(count: Out<u64>) {
        let mut process = lock(&PROCESS);
        if process.references == 0 {
            return fail(ACL_ERROR_REPEAT_FINALIZE, "nothing to finalise");
        }
        process.references -= 1;
        process.finalized = process.references == 0;
        if count.is_null() { Ok(()) } else { count.set(process.references) }
    }
    fn aclrtGetRunMode(mode: Out<u32>) { mode.set(1) }
    fn aclrtGetVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) {
        let [a, b, c] = version_parts();
        major.set(a)?;
        minor.set(b)?;
        patch.set(c)
    }
    fn aclsysGetVersionStr(package: Text, version: Out<c_char>) {
        package.required()?;
        version.set_text(&config::get().version, 128)
    }
    fn aclsysGetVersionNum(package: Text, version: Out<i32>) {
        package.required()?;
        let [a, b, c] = version_parts();
        version.set(a * 10_000_000 + b * 100_000 + c * 1_000)
    }
    fn aclsysGetCANNVersion(name: u32, version: Out<PackageVersion>) {
        if name > 7 {
            return fail(ACL_ERROR_INVALID_PARAM, format!("package {name} does not exist"));
        }
        let text = config::get().version.clone();
        let [a, b, c] = version_parts();
        version.set(PackageVersion {
            version: padded(&text),
            major: padded(&a.to_string()),
            minor: padded(&b.to_string()),
            release: padded(&c.to_string()),
            patch: padded(""),
            reserved: [0; 128],
        })
    }
    fn aclrtGetDeviceCount(count: Out<u32>) {
        let found = visible(&config::get())?.len();
        if found == 0 {
            return fail(RT_NO_DEVICE, "no device");
        }
        count.set(u32::try_from(found).unwrap_or(u32::MAX))
    }
    fn aclrtSetDevice(user: i32) { set_device(user) }
    fn aclrtGetDevice(user: Out<i32>) {
        let (_, logic) = current()?;
        user.set(signed(user_of(logic)))
    }
    fn aclrtResetDevice(user: i32) { reset_device(user, false) }
    fn aclrtResetDeviceForce(user: i32) { reset_device(user, true) }
    fn aclrtSynchronizeDevice() { synchronize(-1) }
    fn aclrtSynchronizeDeviceWithTimeout(timeout: i32) { synchronize(timeout) }
    fn aclrtQueryDeviceStatus(user: i32, status: Out<u32>) {
        let logic = logic_of(user)?;
        let config = config::get();
        status.set(config.status.get(&phy_of(&config, logic)).copied().unwrap_or(0))
    }
    fn aclrtGetDeviceUtilizationRate(user: i32, info: Out<UtilizationInfo>) {
        let logic = logic_of(user)?;
        let config = config::get();
        let percent = config.utilization.get(&phy_of(&config, logic)).copied().unwrap_or(0);
        let percent = signed(percent);
        info.set(UtilizationInfo { cube: percent, vector: percent, aicpu: 0, memory: -1, extend: 0 })
    }
    fn aclrtGetDeviceInfo(user: u32, attr: u32, value: Out<i64>) {
        let logic = logic_of_u32(user)?;
        let config = config::get();
        value.set(match attr {
            1 => 7,
            101 | 102 => 20,
            201 => 40,
            301 => i64::try_from(config.hbm).unwrap_or(i64::MAX),
            302 => 192 << 20,
            401 | 403..=405 | 407..=409 | 501 => 0,
            402 => i64::from(phy_of(&config, logic)),
            601 => 2201,
            _ => return fail(RT_PARAM_INVALID, format!("attribute {attr} does not exist")),
        })
    }
    fn aclGetDeviceCapability(user: u32, info: u32, value: Out<i64>) {
        logic_of_u32(user)?;
        value.set(match info {
            0 => 20,
            1 => 40,
            2 => 192 << 20,
            _ => return fail(ACL_ERROR_INVALID_PARAM, format!("capability {info} does not exist")),
        })
    }
    fn aclrtGetDevicesTopo(user: u32, other: u32, value: Out<u64>) {
        let (a, b) = (logic_of_u32(user)?, logic_of_u32(other)?);
        if a == b {
            return fail(RT_PARAM_INVALID, "a device has no link to itself");
        }
        let config = config::get();
        // DCMI's kinds, as configured, in the bits of ACL.
        let kind = config.topo.get(&(phy_of(&config, a), phy_of(&config, b))).copied();
        value.set(match kind.unwrap_or(3) {
            1 => 0x10,
            2 => 0x8,
            4 => 0x4,
            5 => 0x2,
            6 => 0x20,
            7 => 0x40,
            _ => 0x1,
        })
    }
    fn aclrtDeviceGetUuid(user: i32, uuid: Out<Uuid>) {
        let logic = logic_of(user)?;
        let phy = phy_of(&config::get(), logic).to_le_bytes();
        let mut bytes = *b"ASCENDSIM\0\0\0\0\0\0\0";
        bytes[12..].copy_from_slice(&phy);
        uuid.set(Uuid(bytes))
    }
    fn aclrtDeviceGetPCIBusId(user: i32, text: Out<c_char>, len: i32) {
        let logic = logic_of(user)?;
        if text.is_null() {
            return null("pciBusId");
        }
        if len < 13 {
            return fail(RT_PARAM_INVALID, format!("len {len}: 13 bytes are needed"));
        }
        text.set_text(&bus_id(phy_of(&config::get(), logic)), 13)
    }
    fn aclrtDeviceGetByPCIBusId(text: Text, user: Out<i32>) {
        let wanted = text.required()?;
        let config = config::get();
        let ids = visible(&config)?;
        let found = ids.iter().position(|&id| bus_id(phy_of(&config, id)).eq_ignore_ascii_case(&wanted));
        match found.and_then(|at| i32::try_from(at).ok()) {
            Some(at) => user.set(at),
            None => fail(RT_INVALID_DEVICEID, format!("no device at {wanted}")),
        }
    }
    fn aclrtDeviceGetBareTgid(pid: Out<i32>) { pid.set(signed(std::process::id())) }
    fn aclrtGetPrimaryCtxState(user: i32, flags: Out<u32>, active: Out<i32>) {
        let logic = logic_of(user)?;
        let on = lock(&DEVICES).get(&logic).is_some_and(|device| device.primary.is_some());
        if !flags.is_null() {
            flags.set(0)?;
        }
        active.set(i32::from(on))
    }
    fn aclrtSetTsDevice(id: u32) {
        current()?;
        if id > 1 { fail(RT_PARAM_INVALID, format!("task scheduler {id}")) } else { Ok(()) }
    }
    fn aclrtSetDeviceSatMode(mode: u32) {
        let (_, logic) = current()?;
        if mode > 1 {
            return fail(ACL_ERROR_INVALID_PARAM, format!("mode {mode}"));
        }
        lock(&DEVICES).entry(logic).or_default().saturation = mode;
        Ok(())
    }
    fn aclrtGetDeviceSatMode(mode: Out<u32>) {
        let (_, logic) = current()?;
        let found = lock(&DEVICES).get(&logic).map_or(0, |device| device.saturation);
        mode.set(found)
    }
    fn aclrtSetOpExecuteTimeOut(_seconds: u32) { current().map(drop) }
    fn aclrtSetOpWaitTimeout(_seconds: u32) { current().map(drop) }
    fn aclrtGetMemInfo(attr: u32, free: Out<usize>, total: Out<usize>) {
        let (_, logic) = current()?;
        let config = config::get();
        let (left, all) = if hbm_like(attr)? {
            let used = config.hbm_used + in_use(logic).unwrap_or(0);
            (config.hbm.saturating_sub(used), config.hbm)
        } else {
            (0, 0)
        };
        free.set(usize::try_from(left).unwrap_or(usize::MAX))?;
        total.set(usize::try_from(all).unwrap_or(usize::MAX))
    }
    fn aclrtGetMemUsageInfo(user: i32, infos: Out<MemUsageInfo>, room: usize, count: Out<usize>) {
        let logic = logic_of(user)?;
        if room == 0 {
            return fail(RT_PARAM_INVALID, "inputNum is 0");
        }
        let current = in_use(logic).unwrap_or(0);
        infos.set(MemUsageInfo { name: padded("APP"), current, peak: current, reserved: [0; 8] })?;
        count.set(1)
    }

    fn aclrtGetLogicDevIdByUserDevId(user: i32, logic: Out<i32>) {
        logic.set(signed(logic_of(user)?))
    }
    fn aclrtGetUserDevIdByLogicDevId(logic: i32, user: Out<i32>) {
        let ids = visible(&config::get())?;
        match ids.iter().position(|&id| signed(id) == logic).and_then(|at| i32::try_from(at).ok()) {
            Some(at) => user.set(at),
            None => fail(RT_INVALID_DEVICEID, format!("logic device {logic} is not visible")),
        }
    }
    fn aclrtGetPhyDevIdByUserDevId(user: i32, phy: Out<i32>) {
        phy.set(signed(phy_of(&config::get(), logic_of(user)?)))
    }
    fn aclrtGetUserDevIdByPhyDevId(phy: i32, user: Out<i32>) { user.set(user_of_phy(phy)?) }
    /// In spite of its name it speaks of user ids, as the documentation admits.
    fn aclrtGetLogicDevIdByPhyDevId(phy: i32, user: Out<i32>) { user.set(user_of_phy(phy)?) }
    /// In spite of its name it speaks of user ids, as the documentation admits.
    fn aclrtGetPhyDevIdByLogicDevId(user: i32, phy: Out<i32>) {
        phy.set(signed(phy_of(&config::get(), logic_of(user)?)))
    }

    fn aclrtCreateContext(context: Out<usize>, user: i32) {
        initialized()?;
        if context.is_null() {
            return null("context");
        }
        let logic = logic_of(user)?;
        let made = new_context(logic, false)?;
        make_current(made, Some(logic));
        context.set(made)
    }
    fn aclrtDestroyContext(context: usize) {
        match lock(&CONTEXTS).get(&context) {
            None if context == 0 => return null("context"),
            None => return fail(RT_INVALID_HANDLE, format!("{context:#x} is not a context")),
            Some(found) if found.primary => {
                return fail(RT_PARAM_INVALID, "a default context ends with its device");
            }
            Some(_) => {}
        }
        end_context(context);
        if CURRENT.get() == context {
            make_current(0, None);
        }
        Ok(())
    }
    fn aclrtSetCurrentContext(context: usize) {
        let found = lock(&CONTEXTS).get(&context).map(|found| found.logic);
        match found {
            Some(logic) => {
                make_current(context, Some(logic));
                Ok(())
            }
            None if context == 0 => null("context"),
            None => fail(RT_INVALID_HANDLE, format!("{context:#x} is not a context")),
        }
    }
    fn aclrtGetCurrentContext(context: Out<usize>) { context.set(current()?.0) }
    fn aclrtCtxGetCurrentDefaultStream(stream: Out<usize>) { stream.set(default_stream()?.handle) }

    fn aclrtDeviceCanAccessPeer(can: Out<i32>, user: i32, peer: i32) {
        let (a, b) = (logic_of(user)?, logic_of(peer)?);
        can.set(i32::from(can_access(&config::get(), a, b)))
    }
    fn aclrtDeviceEnablePeerAccess(peer: i32, flags: u32) {
        if flags != 0 {
            return fail(ACL_ERROR_FEATURE_UNSUPPORTED, format!("flags {flags:#x} are reserved"));
        }
        let (_, logic) = current()?;
        let other = logic_of(peer)?;
        if other == logic {
            return fail(ACL_ERROR_INVALID_PARAM, "a device is not its own peer");
        }
        let config = config::get();
        if !can_access(&config, logic, other) {
            return fail(RT_FEATURE_NOT_SUPPORT, format!("no path from {logic} to {other}"));
        }
        let fresh = lock(&DEVICES).entry(logic).or_default().peers.insert(other);
        if !fresh && config.peer_repeat != 0 {
            return fail(config.peer_repeat, "peer access is already enabled");
        }
        Ok(())
    }
    fn aclrtDeviceDisablePeerAccess(peer: i32) {
        let (_, logic) = current()?;
        let other = logic_of(peer)?;
        if lock(&DEVICES).entry(logic).or_default().peers.remove(&other) {
            Ok(())
        } else {
            fail(RT_PARAM_INVALID, format!("access to device {peer} is not enabled"))
        }
    }
    fn aclrtDevicePeerAccessStatus(user: i32, peer: i32, status: Out<i32>) {
        let (a, b) = (logic_of(user)?, logic_of(peer)?);
        status.set(i32::from(peer_enabled(a, b)))
    }
}

#[unsafe(no_mangle)]
extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    static SITE: Site = Site::new("aclGetRecentErrMsg");
    ffi::value(&SITE, ptr::null(), ffi::recent_message)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetLastError(level: u32) -> i32 {
    static SITE: Site = Site::new("aclrtGetLastError");
    ffi::value(
        &SITE,
        0,
        || if level == 0 { ffi::last_error(true) } else { ACL_ERROR_INVALID_PARAM },
    )
}

#[unsafe(no_mangle)]
extern "C" fn aclrtPeekAtLastError(level: u32) -> i32 {
    static SITE: Site = Site::new("aclrtPeekAtLastError");
    ffi::value(
        &SITE,
        0,
        || if level == 0 { ffi::last_error(false) } else { ACL_ERROR_INVALID_PARAM },
    )
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetSocName() -> *const c_char {
    static SITE: Site = Site::new("aclrtGetSocName");
    // The name is asked for again and again but changes only in tests: each text is kept for good.
    static NAMES: Mutex<Vec<&'static std::ffi::CStr>> = Mutex::new(Vec::new());
    ffi::value(&SITE, ptr::null(), || {
        let config = config::get();
        let mut names = lock(&NAMES);
        let known = names.iter().find(|name| ***name == *config.soc).copied();
        let name = known.unwrap_or_else(|| {
            let made: &'static std::ffi::CStr = Box::leak(config.soc.clone().into_boxed_c_str());
            names.push(made);
            made
        });
        name.as_ptr()
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclDataTypeSize(data_type: i32) -> usize {
    static SITE: Site = Site::new("aclDataTypeSize");
    ffi::value(&SITE, 0, || match data_type {
        2 | 4 | 12 => 1,
        1 | 6 | 7 | 27 => 2,
        0 | 3 | 8 => 4,
        9..=11 => 8,
        _ => 0,
    })
}
