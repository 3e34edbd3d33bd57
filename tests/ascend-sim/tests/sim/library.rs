//! A private copy of the simulator and typed access to its symbols.

use std::{
    ffi::{CStr, CString, c_char, c_void},
    path::Path,
};

use libloading::{Library, Symbol};
use tempfile::TempDir;

use crate::support::{NOT_IN_8_1_RC1, install, remove_symbols};

pub(crate) type Ptr = *mut c_void;

pub(crate) struct Sim {
    library: Library,
    _folder: TempDir,
}

impl Sim {
    pub(crate) fn new(settings: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = install(folder.path(), &[]);
        let sim = Self::open(&file, folder);
        for (key, value) in settings {
            sim.set(key, value);
        }
        sim
    }

    pub(crate) fn open(file: &Path, folder: TempDir) -> Self {
        // SAFETY:
        // * the initialisers of the simulator are those of the Rust standard library
        let library = unsafe { Library::new(file) }.unwrap();
        Self { library, _folder: folder }
    }

    /// A simulator with `aclInit` done and device 0 set in this thread.
    pub(crate) fn ready(settings: &[(&str, &str)]) -> Self {
        let sim = Self::new(settings);
        assert_eq!(sim.aclInit(std::ptr::null()), 0);
        assert_eq!(sim.aclrtSetDevice(0), 0);
        sim
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        // SAFETY:
        // * the symbol is not used
        unsafe { self.library.get::<unsafe extern "C" fn()>(name) }.is_ok()
    }

    /// The function `name`, of the type the caller says it has.
    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY:
        // * used by the wrappers below only, which state the type of the vendor's headers
        let symbol: Symbol<'_, T> = unsafe { self.library.get(name) }.unwrap();
        *symbol
    }

    pub(crate) fn set(&self, key: &str, value: &str) {
        let (k, v) = (CString::new(key).unwrap(), CString::new(value).unwrap());
        assert_eq!(self.ascend_sim_configure(k.as_ptr(), v.as_ptr()), 0, "{key}={value}");
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        self.ascend_sim_counter(name.as_ptr())
    }

    /// The recent message of this thread; empty when there is none.
    pub(crate) fn message(&self) -> String {
        let text = self.aclGetRecentErrMsg();
        if text.is_null() {
            return String::new();
        }
        // SAFETY:
        // * a C string of the simulator, valid until the next call of this function
        let text = unsafe { CStr::from_ptr(text) };
        text.to_str().unwrap().to_owned()
    }

    pub(crate) fn malloc(&self, size: usize) -> Ptr {
        let mut ptr = std::ptr::null_mut();
        assert_eq!(self.aclrtMalloc(&raw mut ptr, size, 0), 0);
        ptr
    }

    pub(crate) fn malloc_host(&self, size: usize) -> Ptr {
        let mut ptr = std::ptr::null_mut();
        assert_eq!(self.aclrtMallocHost(&raw mut ptr, size), 0);
        ptr
    }

    pub(crate) fn stream(&self) -> Ptr {
        let mut ptr = std::ptr::null_mut();
        assert_eq!(self.aclrtCreateStream(&raw mut ptr), 0);
        ptr
    }

    pub(crate) fn event(&self) -> Ptr {
        let mut ptr = std::ptr::null_mut();
        assert_eq!(self.aclrtCreateEvent(&raw mut ptr), 0);
        ptr
    }

    pub(crate) fn upload(&self, bytes: &[u8]) -> Ptr {
        let device = self.malloc(bytes.len());
        self.write(device, bytes);
        device
    }

    pub(crate) fn write(&self, device: Ptr, bytes: &[u8]) {
        let source = bytes.as_ptr().cast();
        assert_eq!(self.aclrtMemcpy(device, bytes.len(), source, bytes.len(), H2D), 0);
    }

    pub(crate) fn download(&self, device: Ptr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0_u8; len];
        let to = bytes.as_mut_ptr().cast();
        assert_eq!(self.aclrtMemcpy(to, len, device, len, D2H), 0, "{}", self.message());
        bytes
    }
}

pub(crate) const H2H: u32 = 0;
pub(crate) const H2D: u32 = 1;
pub(crate) const D2H: u32 = 2;
pub(crate) const D2D: u32 = 3;

macro_rules! api {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $result:ty;)*) => {
        impl Sim {$(
            pub(crate) fn $name(&self, $($arg: $ty),*) -> $result {
                let function: unsafe extern "C" fn($($ty),*) -> $result =
                    self.symbol(stringify!($name));
                // SAFETY:
                // * the type is that of the function of this name in the vendor's headers
                // * the tests pass pointers to live variables of the right type, or wrong addresses
                //   that the simulator is to recognise without access to them
                unsafe { function($($arg),*) }
            }
        )*}
    };
}

api! {
    fn ascend_sim_configure(key: *const c_char, value: *const c_char) -> i32;
    fn ascend_sim_counter(name: *const c_char) -> u64;
    fn aclInit(path: *const c_char) -> i32;
    fn aclFinalize() -> i32;
    fn aclGetRecentErrMsg() -> *const c_char;
    fn aclrtGetLastError(level: u32) -> i32;
    fn aclrtPeekAtLastError(level: u32) -> i32;
    fn aclrtGetRunMode(mode: *mut u32) -> i32;
    fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) -> i32;
    fn aclrtGetSocName() -> *const c_char;
    fn aclrtGetDeviceCount(count: *mut u32) -> i32;
    fn aclrtSetDevice(device: i32) -> i32;
    fn aclrtGetDevice(device: *mut i32) -> i32;
    fn aclrtResetDevice(device: i32) -> i32;
    fn aclrtResetDeviceForce(device: i32) -> i32;
    fn aclrtSynchronizeDeviceWithTimeout(timeout: i32) -> i32;
    fn aclrtGetDeviceInfo(device: u32, attr: u32, value: *mut i64) -> i32;
    fn aclrtDeviceGetPCIBusId(device: i32, text: *mut c_char, len: i32) -> i32;
    fn aclrtGetPhyDevIdByUserDevId(user: i32, phy: *mut i32) -> i32;
    fn aclrtGetUserDevIdByPhyDevId(phy: i32, user: *mut i32) -> i32;
    fn aclrtGetLogicDevIdByUserDevId(user: i32, logic: *mut i32) -> i32;
    fn aclrtGetPhyDevIdByLogicDevId(logic: i32, phy: *mut i32) -> i32;
    fn aclrtGetDeviceUtilizationRate(device: i32, info: *mut [i32; 6]) -> i32;
    fn aclrtCreateContext(context: *mut Ptr, device: i32) -> i32;
    fn aclrtDestroyContext(context: Ptr) -> i32;
    fn aclrtSetCurrentContext(context: Ptr) -> i32;
    fn aclrtGetCurrentContext(context: *mut Ptr) -> i32;
    fn aclrtCreateStream(stream: *mut Ptr) -> i32;
    fn aclrtDestroyStream(stream: Ptr) -> i32;
    fn aclrtDestroyStreamForce(stream: Ptr) -> i32;
    fn aclrtSynchronizeStream(stream: Ptr) -> i32;
    fn aclrtSynchronizeStreamWithTimeout(stream: Ptr, timeout: i32) -> i32;
    fn aclrtStreamQuery(stream: Ptr, status: *mut u32) -> i32;
    fn aclrtStreamWaitEvent(stream: Ptr, event: Ptr) -> i32;
    fn aclrtCreateEvent(event: *mut Ptr) -> i32;
    fn aclrtCreateEventWithFlag(event: *mut Ptr, flag: u32) -> i32;
    fn aclrtCreateEventExWithFlag(event: *mut Ptr, flag: u32) -> i32;
    fn aclrtDestroyEvent(event: Ptr) -> i32;
    fn aclrtRecordEvent(event: Ptr, stream: Ptr) -> i32;
    fn aclrtResetEvent(event: Ptr, stream: Ptr) -> i32;
    fn aclrtQueryEvent(event: Ptr, status: *mut u32) -> i32;
    fn aclrtQueryEventStatus(event: Ptr, status: *mut u32) -> i32;
    fn aclrtSynchronizeEvent(event: Ptr) -> i32;
    fn aclrtSynchronizeEventWithTimeout(event: Ptr, timeout: i32) -> i32;
    fn aclrtEventElapsedTime(ms: *mut f32, start: Ptr, end: Ptr) -> i32;
    fn aclrtMalloc(ptr: *mut Ptr, size: usize, policy: u32) -> i32;
    fn aclrtFree(ptr: Ptr) -> i32;
    fn aclrtMemset(ptr: Ptr, max: usize, value: i32, count: usize) -> i32;
    fn aclrtMemsetAsync(ptr: Ptr, max: usize, value: i32, count: usize, stream: Ptr) -> i32;
    fn aclrtGetMemInfo(attr: u32, free: *mut usize, total: *mut usize) -> i32;
    fn aclrtMallocHost(ptr: *mut Ptr, size: usize) -> i32;
    fn aclrtFreeHost(ptr: Ptr) -> i32;
    fn aclrtHostRegister(ptr: Ptr, size: u64, kind: u32, device: *mut Ptr) -> i32;
    fn aclrtHostRegisterV2(ptr: Ptr, size: u64, flag: u32) -> i32;
    fn aclrtHostUnregister(ptr: Ptr) -> i32;
    fn aclrtPointerGetAttributes(ptr: *const c_void, attributes: *mut [u32; 7]) -> i32;
    fn aclrtMemcpy(dst: Ptr, max: usize, src: *const c_void, count: usize, kind: u32) -> i32;
    fn aclrtMemcpyAsync(
        dst: Ptr,
        max: usize,
        src: *const c_void,
        count: usize,
        kind: u32,
        stream: Ptr,
    ) -> i32;
    fn aclrtMemcpy2d(
        dst: Ptr,
        dpitch: usize,
        src: *const c_void,
        spitch: usize,
        width: usize,
        height: usize,
        kind: u32,
    ) -> i32;
    fn aclrtDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) -> i32;
    fn aclrtDeviceEnablePeerAccess(peer: i32, flags: u32) -> i32;
    fn HcclGetRootInfo(info: *mut [u8; 4108]) -> i32;
    fn HcclCommInitRootInfo(ranks: u32, info: *const [u8; 4108], rank: u32, comm: *mut Ptr) -> i32;
    fn HcclCommInitRootInfoConfig(
        ranks: u32,
        info: *const [u8; 4108],
        rank: u32,
        config: *const u8,
        comm: *mut Ptr,
    ) -> i32;
    fn HcclCommInitAll(count: u32, devices: *const i32, comms: *mut Ptr) -> i32;
    fn HcclCommDestroy(comm: Ptr) -> i32;
    fn HcclGetRankId(comm: Ptr, rank: *mut u32) -> i32;
    fn HcclGetRankSize(comm: Ptr, ranks: *mut u32) -> i32;
    fn HcclGetCommName(comm: Ptr, name: *mut c_char) -> i32;
    fn HcclGetCommAsyncError(comm: Ptr, error: *mut i32) -> i32;
    fn HcclGetErrorString(code: i32) -> *const c_char;
    fn HcclAllReduce(
        send: Ptr,
        recv: Ptr,
        count: u64,
        data_type: u32,
        op: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclAllGather(
        send: Ptr,
        recv: Ptr,
        count: u64,
        data_type: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclReduceScatter(
        send: Ptr,
        recv: Ptr,
        count: u64,
        data_type: u32,
        op: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclBroadcast(
        buf: Ptr,
        count: u64,
        data_type: u32,
        root: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclAlltoAll(
        send: *const c_void,
        send_count: u64,
        send_type: u32,
        recv: *const c_void,
        recv_count: u64,
        recv_type: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclSend(
        buf: Ptr,
        count: u64,
        data_type: u32,
        to: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclRecv(
        buf: Ptr,
        count: u64,
        data_type: u32,
        from: u32,
        comm: Ptr,
        stream: Ptr,
    ) -> i32;
    fn HcclBatchSendRecv(items: *const SendRecv, count: u32, comm: Ptr, stream: Ptr) -> i32;
    fn HcclBarrier(comm: Ptr, stream: Ptr) -> i32;
    fn dcmi_init() -> i32;
    fn dcmi_get_driver_version(text: *mut c_char, len: u32) -> i32;
    fn dcmi_get_card_list(count: *mut i32, list: *mut i32, len: i32) -> i32;
    fn dcmi_get_device_health(card: i32, chip: i32, health: *mut u32) -> i32;
    fn dcmi_get_device_pcie_info_v2(card: i32, chip: i32, info: *mut [u32; 16]) -> i32;
    fn dcmi_get_device_resource_info(
        card: i32,
        chip: i32,
        list: *mut [ProcMem; 32],
        count: *mut i32,
    ) -> i32;
    fn dcmi_get_topo_info_by_device_id(
        card: i32,
        chip: i32,
        other_card: i32,
        other_chip: i32,
        kind: *mut i32,
    ) -> i32;
    fn dcmi_get_card_id_device_id_from_phyid(card: *mut i32, chip: *mut i32, phy: u32) -> i32;
    fn dcmiv2_init() -> i32;
    fn dcmiv2_get_device_list(list: *mut i32, count: *mut i32, len: i32) -> i32;
    fn dcmiv2_get_device_health(device: i32, health: *mut u32) -> i32;
    fn dcmiv2_get_device_utilization_rate(device: i32, kind: i32, percent: *mut u32) -> i32;
    fn dcmiv2_get_device_proc_mem_info(
        device: i32,
        list: *mut [ProcMem; 32],
        count: *mut i32,
    ) -> i32;
    fn dcmiv2_get_dev_id_by_chip_phy_id(phy: u32, device: *mut u32) -> i32;
    fn aclCreateTensor(
        dims: *const i64,
        count: u64,
        data_type: i32,
        strides: *const i64,
        offset: i64,
        format: i32,
        storage: *const i64,
        storage_count: u64,
        data: Ptr,
    ) -> Ptr;
    fn aclDestroyTensor(tensor: Ptr) -> i32;
    fn aclSetAclOpExecutorRepeatable(executor: Ptr) -> i32;
    fn aclDestroyAclOpExecutor(executor: Ptr) -> i32;
    fn aclnnMatmulGetWorkspaceSize(
        a: Ptr,
        b: Ptr,
        out: Ptr,
        math: i8,
        size: *mut u64,
        executor: *mut Ptr,
    ) -> i32;
    fn aclnnMatmul(workspace: Ptr, size: u64, executor: Ptr, stream: Ptr) -> i32;
}

/// `HcclSendRecvItem`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendRecv {
    pub(crate) kind: i32,
    pub(crate) buf: Ptr,
    pub(crate) count: u64,
    pub(crate) data_type: i32,
    pub(crate) remote: u32,
}

/// `dcmi_proc_mem_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcMem {
    pub(crate) pid: i32,
    pub(crate) bytes: u64,
}

#[test]
fn an_older_toolkit_lacks_symbols_and_keeps_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = install(folder.path(), &["libascendcl.so"]);
    remove_symbols(&file, &NOT_IN_8_1_RC1);
    let sim = Sim::open(&file, folder);
    for name in NOT_IN_8_1_RC1 {
        assert!(!sim.has(name), "{name}");
    }
    assert!(sim.has("aclrtHostRegister"));
    assert_eq!(sim.aclInit(std::ptr::null()), 0);
    assert_eq!(sim.aclrtSetDevice(0), 0);
}

#[test]
fn two_names_of_one_file_share_a_state() {
    let folder = tempfile::tempdir().unwrap();
    install(folder.path(), &["libascendcl.so", "libhccl.so"]);
    let acl = Sim::open(&folder.path().join("libascendcl.so"), tempfile::tempdir().unwrap());
    let hccl = Sim::open(&folder.path().join("libhccl.so"), tempfile::tempdir().unwrap());
    assert_eq!(acl.aclInit(std::ptr::null()), 0);
    assert_eq!(acl.aclrtSetDevice(0), 0);
    // A communicator needs the device that was set through the other name.
    let mut info = [0; 4108];
    assert_eq!(hccl.HcclGetRootInfo(&raw mut info), 0);
    let strange = Sim::new(&[]);
    assert_eq!(strange.HcclGetRootInfo(&raw mut info), 15);
}
