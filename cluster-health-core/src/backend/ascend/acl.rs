//! The ACL runtime below the driver: start, contexts of threads, ids and errors.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use ascend_sys::load::{Acl, MissingSymbol};
use ascend_sys::status::{Family, Status, acl as codes};
use ascend_sys::{acl, function};
use once_cell::sync::OnceCell;

use crate::activity::FailedCall;
use crate::device::DeviceInfo;
use crate::error::{BackendError, Error, Result};
use crate::id::{DeviceId, NodeId};
use crate::units::ByteSize;
use crate::watch;

thread_local! {
    /// The device that this thread's context belongs to, as far as this module set it.
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The device that any thread of this process used last; -1 before the first use.
static LAST_USED: AtomicI32 = AtomicI32::new(-1);

/// Where the kernel describes PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// The loaded and initialised runtime.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runtime {
    pub(super) acl: &'static Acl,
}

/// A function that this release of the toolkit lacks.
pub(crate) fn missing(symbol: MissingSymbol) -> Error {
    Error::Unavailable { what: symbol.name.to_owned(), message: symbol.to_string() }
}

/// The error of a failed start, as that of a backend that is not there.
pub(super) fn not_started(error: Error) -> Error {
    match error {
        Error::Backend(_) => unavailable(error.to_string()),
        other => other,
    }
}

fn unavailable(message: impl Into<String>) -> Error {
    Error::Unavailable { what: "the Ascend backend".to_owned(), message: message.into() }
}

impl Runtime {
    /// Opens the library and initialises the runtime, once per process.
    ///
    /// `aclFinalize` is never called: it ends the runtime for everybody in the process whatever
    /// the number of users, and at process exit the libraries below it may be gone already.
    pub(super) fn start() -> Result<Self> {
        let acl = ascend_sys::load::acl().map_err(|error| unavailable(error.to_string()))?;
        let runtime = Self { acl };
        static STARTED: OnceCell<()> = OnceCell::new();
        STARTED.get_or_try_init(|| runtime.initialise())?;
        Ok(runtime)
    }

    fn initialise(self) -> Result<()> {
        let init = function!(self.acl, aclInit).map_err(missing)?;
        let call = watch::enter("aclInit", None);
        // SAFETY:
        // * A null path is the documented way to say "no configuration file".
        let code = unsafe { init(std::ptr::null()) };
        drop(call);
        // A host process that uses the runtime too has initialised it before.
        if code == codes::ACL_ERROR_REPEAT_INITIALIZE {
            return Ok(());
        }
        self.check("aclInit", code, None)
    }

    /// The devices that this process may use, in the order of the runtime.
    pub(super) fn devices(self) -> Result<Vec<DeviceInfo>> {
        let count = self.device_count().map_err(|error| unavailable(error.to_string()))?;
        if count == 0 {
            return Err(unavailable(
                "aclrtGetDeviceCount reports no device; look at npu-smi info, the driver, the \
                 devices given to this container and ASCEND_RT_VISIBLE_DEVICES",
            ));
        }
        let count = i32::try_from(count).unwrap_or(i32::MAX);
        let name = self.model().unwrap_or_else(|| "Ascend NPU".to_owned());
        let asked = (0..count).map(|user| self.physical_id(user)).collect::<Result<_>>().ok();
        let listed = std::env::var("ASCEND_RT_VISIBLE_DEVICES").ok();
        let ids = physical_ids(asked, listed.as_deref(), count.unsigned_abs());
        let info = |(user, id): (i32, u32)| {
            let mut info = DeviceInfo::new(DeviceId(id), i64::from(user), name.clone());
            info.memory = self.memory_size(user);
            info.node = self
                .pci_address(user)
                .ok()
                .and_then(|address| numa_node(Path::new(PCI_DEVICES), &address));
            info
        };
        Ok((0..count).zip(ids).map(info).collect())
    }

    pub(super) fn device_count(self) -> Result<u32> {
        let mut count = 0_u32;
        let get = function!(self.acl, aclrtGetDeviceCount).map_err(missing)?;
        let _call = watch::enter("aclrtGetDeviceCount", None);
        // SAFETY:
        // * The pointer is to a live integer of ours.
        let code = unsafe { get(&raw mut count) };
        self.check("aclrtGetDeviceCount", code, None)?;
        Ok(count)
    }

    /// Version of the interface.
    pub(super) fn version(self) -> Result<String> {
        let get = function!(self.acl, aclrtGetVersion).map_err(missing)?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY:
        // * The pointers are to live integers of ours.
        let code = unsafe { get(&raw mut major, &raw mut minor, &raw mut patch) };
        self.check("aclrtGetVersion", code, None)?;
        Ok(format!("{major}.{minor}.{patch}"))
    }

    /// Versions of the toolkit's packages: by name, else (older releases) by number.
    pub(super) fn package_versions(
        self,
        failures: &mut Vec<FailedCall>,
    ) -> BTreeMap<String, String> {
        let by_name =
            self.acl.symbols().any(|(symbol, found)| found && symbol.name == "aclsysGetVersionStr");
        let packages = [
            (c"runtime", acl::ACL_PKG_NAME_RUNTIME),
            (c"toolkit", acl::ACL_PKG_NAME_TOOLKIT),
            (c"hccl", acl::ACL_PKG_NAME_HCCL),
        ];
        let mut versions = BTreeMap::new();
        for (name, number) in packages {
            let version =
                if by_name { self.named_version(name) } else { self.numbered_version(number) };
            match version {
                Ok(version) => {
                    versions.insert(name.to_string_lossy().into_owned(), version);
                }
                Err(error) => failures.push(FailedCall::of("aclsysGetCANNVersion", &error)),
            }
        }
        versions
    }

    fn named_version(self, name: &CStr) -> Result<String> {
        let get = function!(self.acl, aclsysGetVersionStr).map_err(missing)?;
        // The call takes a pointer to something it could change.
        let mut name = name.to_bytes_with_nul().to_vec();
        // Twice what the call writes at most, the last byte always zero.
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY:
        // * Both buffers are ours; the name ends in a zero, and the version has 128 bytes at most.
        let code = unsafe { get(name.as_mut_ptr().cast(), text.as_mut_ptr()) };
        self.check("aclsysGetVersionStr", code, None)?;
        // SAFETY:
        // * The buffer is ours and its last byte is zero.
        let text = unsafe { text_of(text.as_ptr()) };
        Ok(text.unwrap_or_default())
    }

    fn numbered_version(self, number: acl::aclCANNPackageName) -> Result<String> {
        let get = function!(self.acl, aclsysGetCANNVersion).map_err(missing)?;
        let mut version = acl::aclCANNPackageVersion {
            version: [0; 128],
            majorVersion: [0; 64],
            minorVersion: [0; 64],
            releaseVersion: [0; 64],
            patchVersion: [0; 64],
            reserved: [0; 128],
        };
        // SAFETY:
        // * The pointer is to a live structure of ours.
        let code = unsafe { get(number, &raw mut version) };
        self.check("aclsysGetCANNVersion", code, None)?;
        let bytes = version.version.iter().take_while(|byte| **byte != 0);
        let bytes: Vec<u8> = bytes.map(|byte| byte.to_ne_bytes()[0]).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn model(self) -> Option<String> {
        let get = function!(self.acl, aclrtGetSocName).ok()?;
        // SAFETY:
        // * The call has no preconditions but the initialised runtime.
        let name = unsafe { get() };
        // SAFETY:
        // * The runtime returns null or a string of static lifetime.
        unsafe { text_of(name) }
    }

    pub(super) fn physical_id(self, user: i32) -> Result<u32> {
        let get = function!(self.acl, aclrtGetPhyDevIdByUserDevId).map_err(missing)?;
        let mut physical = -1_i32;
        // SAFETY:
        // * The pointer is to a live integer of ours; an unknown id is an error code.
        let code = unsafe { get(user, &raw mut physical) };
        self.check("aclrtGetPhyDevIdByUserDevId", code, None)?;
        u32::try_from(physical).map_err(|_| Error::Format {
            place: format!("aclrtGetPhyDevIdByUserDevId of {user}"),
            message: format!("{physical} is no physical id"),
        })
    }

    /// Without opening the device, which would take seconds and memory on every device of the
    /// machine; older releases cannot tell then.
    fn memory_size(self, user: i32) -> Option<ByteSize> {
        let get = function!(self.acl, aclrtGetDeviceInfo).ok()?;
        let mut value = 0_i64;
        let device = u32::try_from(user).ok()?;
        // SAFETY:
        // * The pointer is to a live integer of ours.
        let code = unsafe { get(device, acl::ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE, &raw mut value) };
        let bytes = u64::try_from(value).ok().filter(|bytes| *bytes > 0)?;
        (code == 0).then_some(ByteSize(bytes))
    }

    pub(super) fn pci_address(self, user: i32) -> Result<String> {
        let get = function!(self.acl, aclrtDeviceGetPCIBusId).map_err(missing)?;
        let mut text: [c_char; 64] = [0; 64];
        // SAFETY:
        // * The buffer has more than the 13 bytes that the call needs, and its length minus one
        //   is passed, so that it always ends in a zero.
        let code = unsafe { get(user, text.as_mut_ptr(), 63) };
        self.check("aclrtDeviceGetPCIBusId", code, None)?;
        // SAFETY:
        // * The buffer is ours and its last byte is zero.
        let text = unsafe { text_of(text.as_ptr()) };
        Ok(text.unwrap_or_default())
    }

    /// Free and total memory of the calling thread's device, which is `device`; `None` for chips
    /// without such memory, which answer 0 of 0.
    pub(super) fn memory_left(self, device: Option<DeviceId>) -> Result<Option<(usize, usize)>> {
        let get = function!(self.acl, aclrtGetMemInfo).map_err(missing)?;
        let (mut free, mut total) = (0_usize, 0_usize);
        let _call = watch::enter("aclrtGetMemInfo", device);
        // SAFETY:
        // * Both pointers are to live integers of ours.
        let code = unsafe { get(acl::ACL_HBM_MEM, &raw mut free, &raw mut total) };
        self.check("aclrtGetMemInfo", code, device)?;
        Ok((total > 0).then_some((free, total)))
    }

    /// Makes `user` the calling thread's device, as the runtime sees it. For calls that are not
    /// timed: another user of the runtime may have changed the device of this thread.
    pub(super) fn enter(self, user: i32, device: DeviceId) -> Result<()> {
        if self.is_current(user)? {
            note(user);
            return Ok(());
        }
        self.set_device(user, device)
    }

    /// Whether the runtime takes `user` for the calling thread's device.
    fn is_current(self, user: i32) -> Result<bool> {
        let get = function!(self.acl, aclrtGetDevice).map_err(missing)?;
        let mut current = -1_i32;
        let _call = watch::enter("aclrtGetDevice", None);
        // SAFETY:
        // * The pointer is to a live integer of ours; a thread without a device is an error code.
        let code = unsafe { get(&raw mut current) };
        Ok(code == 0 && current == user)
    }

    /// As [`enter`](Self::enter), without asking the runtime when this thread entered it last.
    #[inline]
    pub(super) fn enter_again(self, user: i32, device: DeviceId) -> Result<()> {
        if CURRENT.get() == Some(user) { Ok(()) } else { self.set_device(user, device) }
    }

    /// Makes a call that needs this thread to have the device's context. Where another user of the
    /// runtime changed the device since [`enter_again`](Self::enter_again) believed it, the
    /// runtime refuses the call without effect, and it is made once more: nobody pays for asking.
    #[inline]
    pub(super) fn with_context(
        self,
        name: &'static str,
        user: i32,
        device: DeviceId,
        call: impl Fn() -> i32,
    ) -> Result<()> {
        self.wait_with_context(name, user, device, 0, call)
    }

    /// As [`with_context`](Self::with_context), for a call that waits so many milliseconds at most.
    #[inline]
    pub(super) fn wait_with_context(
        self,
        name: &'static str,
        user: i32,
        device: DeviceId,
        bound_ms: u64,
        call: impl Fn() -> i32,
    ) -> Result<()> {
        self.enter_again(user, device)?;
        let watched = watch::enter_wait(name, Some(device), bound_ms);
        let code = call();
        drop(watched);
        if code == 0 { Ok(()) } else { self.call_again(name, user, device, code, bound_ms, call) }
    }

    #[cold]
    fn call_again(
        self,
        name: &'static str,
        user: i32,
        device: DeviceId,
        code: i32,
        bound_ms: u64,
        call: impl Fn() -> i32,
    ) -> Result<()> {
        // Said about this failure, and gone after the next call.
        let error = self.failure(name, code, Some(device));
        let lost =
            [codes::ACL_ERROR_RT_CONTEXT_NULL, codes::ACL_ERROR_RT_STREAM_CONTEXT].contains(&code);
        if !lost || self.is_current(user)? {
            return Err(error);
        }
        self.set_device(user, device)?;
        let _call = watch::enter_wait(name, Some(device), bound_ms);
        self.check(name, call(), Some(device))
    }

    /// The device is never reset: that would end it for the other users of this process.
    #[cold]
    fn set_device(self, user: i32, device: DeviceId) -> Result<()> {
        CURRENT.set(None);
        let set = function!(self.acl, aclrtSetDevice).map_err(missing)?;
        let watched = watch::enter("aclrtSetDevice", Some(device));
        // SAFETY:
        // * The call takes an integer; one out of range is an error code.
        let code = unsafe { set(user) };
        drop(watched);
        self.check("aclrtSetDevice", code, Some(device))?;
        note(user);
        Ok(())
    }

    /// A device to allocate host memory under: the calling thread's, else the last one used, so
    /// that no other device of the machine is opened for it.
    pub(super) fn any_device(self, count: usize) -> usize {
        let last = LAST_USED.load(Ordering::Relaxed);
        let user = CURRENT.get().unwrap_or(last);
        usize::try_from(user).ok().filter(|user| *user < count).unwrap_or(0)
    }

    /// Turns a code into an error with the runtime's words, read here because they belong to the
    /// thread and its latest failure.
    #[inline]
    pub(super) fn check(
        self,
        call: &'static str,
        code: i32,
        device: Option<DeviceId>,
    ) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(call, code, device)) }
    }

    #[cold]
    fn failure(self, call: &'static str, code: i32, device: Option<DeviceId>) -> Error {
        let status = Status::new(Family::Acl, code);
        Error::Backend(Box::new(BackendError {
            call: call.to_owned(),
            code: status.code(),
            name: status.name().unwrap_or("unknown code").to_owned(),
            message: self.recent_message(),
            device,
            rank: None,
            advice: status.advice().map(str::to_owned),
            timed_out: status.is_timeout(),
        }))
    }

    pub(super) fn recent_message(self) -> Option<String> {
        let get = function!(self.acl, aclGetRecentErrMsg).ok()?;
        // SAFETY:
        // * The call has no preconditions.
        let message = unsafe { get() };
        // SAFETY:
        // * The runtime returns null or a string that lives until this thread's next such call,
        //   and it is copied here.
        unsafe { text_of(message) }
    }
}

fn note(user: i32) {
    CURRENT.set(Some(user));
    LAST_USED.store(user, Ordering::Relaxed);
}

/// # Safety
/// `text` is null or a string ended by a zero that lives during the call.
pub(crate) unsafe fn text_of(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY:
    // * Not null; the caller vouches for the rest, and it is copied below.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Physical ids of `count` devices: as the runtime says, else as `ASCEND_RT_VISIBLE_DEVICES`
/// lists them, else their positions.
fn physical_ids(asked: Option<Vec<u32>>, listed: Option<&str>, count: u32) -> Vec<u32> {
    let distinct = |ids: &Vec<u32>| ids.iter().collect::<BTreeSet<_>>().len() == ids.len();
    let complete = |ids: &Vec<u32>| u32::try_from(ids.len()) == Ok(count) && distinct(ids);
    asked
        .filter(complete)
        .or_else(|| visible_devices(listed?).filter(complete))
        .unwrap_or_else(|| (0..count).collect())
}

/// The ids of `ASCEND_RT_VISIBLE_DEVICES` in their order; `None` when it is not a list of them.
fn visible_devices(list: &str) -> Option<Vec<u32>> {
    list.split(',').map(|id| id.trim().parse().ok()).collect()
}

/// NUMA node of a PCI device; `None` where the kernel knows none (it says -1 then).
fn numa_node(root: &Path, address: &str) -> Option<NodeId> {
    let file = root.join(address.to_ascii_lowercase()).join("numa_node");
    fs::read_to_string(file).ok()?.trim().parse().ok().map(NodeId)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_knows_physical_ids_best() {
        assert_eq!(physical_ids(Some(vec![5, 0]), Some("0,1"), 2), [5, 0]);
    }

    #[test]
    fn visible_devices_give_physical_ids_in_their_order() {
        assert_eq!(physical_ids(None, Some("5,0"), 2), [5, 0]);
        assert_eq!(physical_ids(None, Some(" 4, 7 ,6"), 3), [4, 7, 6]);
    }

    #[test]
    fn list_that_does_not_name_every_device_once_is_not_believed() {
        for listed in ["5", "5,0,1", "5,5", "a,b", "", "-1,0", "0-1"] {
            assert_eq!(physical_ids(None, Some(listed), 2), [0, 1], "{listed}");
        }
        assert_eq!(physical_ids(None, None, 3), [0, 1, 2]);
        assert_eq!(physical_ids(Some(vec![3, 3]), Some("6,2"), 2), [6, 2]);
    }

    #[test]
    fn numa_node_is_read_from_the_pci_device() {
        let root = tempfile::tempdir().unwrap();
        for (address, content) in [("0000:3d:00.0", "1\n"), ("0000:81:00.0", "-1\n")] {
            fs::create_dir(root.path().join(address)).unwrap();
            fs::write(root.path().join(address).join("numa_node"), content).unwrap();
        }
        assert_eq!(numa_node(root.path(), "0000:3D:00.0"), Some(NodeId(1)));
        assert_eq!(numa_node(root.path(), "0000:81:00.0"), None);
        assert_eq!(numa_node(root.path(), "0000:c1:00.0"), None);
    }
}
