//! Status codes: integers with a table of names, and what a user can do about the common ones.
//!
//! Every release adds codes, so they are never an enum: a code without a name prints as its number.

use std::fmt;

/// Which library a code comes from: the same number means different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// The runtime, `aclError`.
    Acl,
    /// The collectives, `HcclResult`.
    Hccl,
    /// The device management, negative `int`.
    Dcmi,
    /// The operators, `aclnnStatus`; they pass on codes of the runtime too.
    Aclnn,
}

/// A code and where it comes from; prints as its name and number.
///
/// ```
/// use ascend_sys::status::{Family, Status};
///
/// let status = Status::new(Family::Acl, 107_002);
/// assert_eq!(status.to_string(), "ACL_ERROR_RT_CONTEXT_NULL (107002)");
/// assert_eq!(Status::new(Family::Acl, 424_242).to_string(), "424242");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status {
    family: Family,
    code: i64,
}

impl Status {
    /// The code `code` of `family`; HCCL's unsigned results convert without loss.
    #[must_use]
    pub fn new(family: Family, code: impl Into<i64>) -> Self {
        Self { family, code: code.into() }
    }

    /// Where the code comes from.
    #[must_use]
    pub const fn family(self) -> Family {
        self.family
    }

    /// The number.
    #[must_use]
    pub const fn code(self) -> i64 {
        self.code
    }

    /// Whether the call succeeded.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.code == 0
    }

    /// Name of the code in the headers of the vendor.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        let code = i32::try_from(self.code).ok()?;
        let find = |table: &[(i32, &'static str)]| {
            let index = table.binary_search_by_key(&code, |&(code, _)| code).ok()?;
            table.get(index).map(|&(_, name)| name)
        };
        match self.family {
            Family::Acl => find(acl::TABLE),
            Family::Hccl => find(hccl::TABLE),
            Family::Dcmi => find(dcmi::TABLE),
            Family::Aclnn => find(aclnn::TABLE).or_else(|| find(acl::TABLE)),
        }
    }

    /// What the code means for whoever runs the program and what to do about it, where there is
    /// something to say.
    #[must_use]
    pub fn advice(self) -> Option<&'static str> {
        let code = i32::try_from(self.code).ok()?;
        match self.family {
            Family::Acl => acl_advice(code),
            Family::Hccl => hccl_advice(code),
            Family::Dcmi => dcmi_advice(code),
            Family::Aclnn => aclnn_advice(code),
        }
    }

    /// Whether a wait ended because its time was over, as opposed to a failure.
    #[must_use]
    pub const fn is_timeout(self) -> bool {
        match self.family {
            Family::Acl | Family::Aclnn => {
                matches!(self.code, 107_019 | 107_020 | 207_020 | 507_046 | 507_047)
            }
            Family::Hccl => self.code == 9,
            Family::Dcmi => self.code == -8006,
        }
    }

    /// Whether the library that answered is one to link against only: see [`is_stub`].
    #[must_use]
    pub const fn is_stub(self) -> bool {
        matches!(self.family, Family::Acl | Family::Aclnn) && self.code == STUB
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.code),
            None => write!(f, "{}", self.code),
        }
    }
}

const STUB: i64 = 100_039;

/// Whether `code` says that a stub library was loaded: those of the folders `devlib` and `stub`
/// load like the real ones, and every call returns this code.
#[must_use]
pub fn is_stub(code: i32) -> bool {
    i64::from(code) == STUB
}

fn acl_advice(code: i32) -> Option<&'static str> {
    Some(match code {
        100_000 | 107_000 => {
            "an argument is not acceptable, for example a size of zero or a copy larger than its \
             destination; please report it"
        }
        100_001 => "the runtime is not initialised; please report it",
        100_002 => "the runtime was initialised before, by this or by another library: harmless",
        100_037 => "the runtime was finalised twice; please report it",
        100_039 => {
            "this is a stub library, good for linking only: remove devlib and stub folders from \
             LD_LIBRARY_PATH and source set_env.sh of the toolkit"
        }
        107_001 => {
            "there is no device of that number: compare it with ASCEND_RT_VISIBLE_DEVICES, which \
             renumbers devices from 0, and with npu-smi info"
        }
        107_002 => "this thread has no device selected; please report it",
        107_003 => "a stream or event was used outside the context that made it; please report it",
        107_006 => "an event carries no time stamp: it was not recorded, or not to measure time",
        107_007 => "the second event was recorded before the first; please report it",
        107_019 | 107_020 | 207_020 | 507_046 | 507_047 => {
            "the device did not finish in time: it hangs, is far busier than expected, or the \
             time limit is too short; npu-smi info shows its state"
        }
        200_000 | 207_001 | 207_018 => {
            "memory is exhausted: free the device (npu-smi info lists processes), or measure \
             smaller sizes; a communicator takes twice HCCL_BUFFSIZE as well"
        }
        200_001 | 200_006 | 207_000 => {
            "this chip, driver or toolkit does not offer the function; a newer one may"
        }
        207_004 => {
            "no device is visible: check that the driver is loaded (npu-smi info), that \
             /dev/davinci* exist here, and that ASCEND_RT_VISIBLE_DEVICES is a rising list of \
             numbers"
        }
        207_005 | 207_007 | 207_008 => {
            "the driver has no resources, events or streams left: another program may hold them; \
             close it and try again"
        }
        207_006 => {
            "access is denied: the user has to be in the group HwHiAiUser, and a container needs \
             /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc"
        }
        507_001 | 507_010 => {
            "the task scheduler of the device does not answer: its firmware hangs; reset the \
             device or the server"
        }
        507_013 => "a DMA transfer failed: a bad address, or the link to the device is at fault",
        507_014 | 507_015 | 507_017 | 507_018 | 507_034 | 507_035 => {
            "a core of the device failed or timed out while it computed; the device log names it"
        }
        507_033 => {
            "the device could not be set up: it is in use by another program, or driver and \
             firmware do not match"
        }
        507_053..=507_055 => {
            "the memory of the device is faulty or suspect: run npu-smi info -t ecc, take the \
             device out of service"
        }
        507_056 | 507_057 => {
            "a link between devices failed, or the other side did: check cables and both devices"
        }
        507_899 => "the driver failed inside; its log and dmesg say more",
        507_901 => "the connection to the device was closed: the device was reset or has crashed",
        507_904 => "a collective was repeated and failed again: check the links between devices",
        507_910 => "this host memory is registered already; please report it",
        507_911 => "this host memory is not registered; please report it",
        _ => return None,
    })
}

fn hccl_advice(code: i32) -> Option<&'static str> {
    Some(match code {
        1 | 2 => "an argument is not acceptable; please report it",
        3 | 24 => {
            "memory is exhausted: every communicator takes twice HCCL_BUFFSIZE (200 MB unless \
             set) on its device; lower it or free the device"
        }
        5 => "this chip, driver or toolkit does not offer the function; a newer one may",
        7 => "a resource is not available: another program may hold the device",
        9 => {
            "a rank did not answer in time: one has failed, or hangs, or was started late; \
             HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT set the limits"
        }
        11 | 13 => {
            "the ranks cannot reach each other over TCP: set HCCL_IF_IP or HCCL_SOCKET_IFNAME to \
             the right network card, and check firewall and ports"
        }
        12 | 14 => "the RoCE network failed: check the network card of the device with hccn_tool",
        15 | 16 => "the runtime or the driver failed below the collective; see the log of ACL",
        19 => "the network failed: check cables, switches and hccn_tool",
        20 => "the communicator is still busy: finish its operations and try again",
        21 => "a remote rank or the link to it failed: check the devices of all ranks",
        22 => "the communicator is being suspended",
        23 => "a collective was repeated and failed again: check the links between devices",
        _ => return None,
    })
}

fn dcmi_advice(code: i32) -> Option<&'static str> {
    Some(match code {
        -8002 => "access is denied: run as root or as a member of the group HwHiAiUser",
        -8006 => "the driver did not answer in time",
        -8007 | -8008 => "there is no such device here: npu-smi info -l lists cards and chips",
        -8012 => "the device is not ready: it is starting or being reset",
        -8013 => "not offered inside a container: ask on the host",
        -8020 => "the resource is in use",
        -8255 => "this chip or driver does not offer the function",
        _ => return None,
    })
}

fn aclnn_advice(code: i32) -> Option<&'static str> {
    match code {
        161_001 | 161_002 => Some("the operator does not accept its arguments; please report it"),
        _ => acl_advice(code),
    }
}

macro_rules! codes {
    ($(#[$doc:meta])* $module:ident { $($name:ident = $code:expr,)* }) => {
        $(#[$doc])*
        pub mod $module {
            $(#[allow(missing_docs, reason = "the name is all the vendor says")]
            pub const $name: i32 = $code;)*

            /// Code and name, in rising order of the codes.
            pub const TABLE: &[(i32, &str)] = &[$(($code, stringify!($name)),)*];
        }
    };
}

codes! {
    /// Codes of the runtime, those of the newest release that was looked at.
    acl {
        ACL_ERROR_NONE = 0,
        ACL_ERROR_INVALID_PARAM = 100000,
        ACL_ERROR_UNINITIALIZE = 100001,
        ACL_ERROR_REPEAT_INITIALIZE = 100002,
        ACL_ERROR_INVALID_FILE = 100003,
        ACL_ERROR_WRITE_FILE = 100004,
        ACL_ERROR_INVALID_FILE_SIZE = 100005,
        ACL_ERROR_PARSE_FILE = 100006,
        ACL_ERROR_FILE_MISSING_ATTR = 100007,
        ACL_ERROR_FILE_ATTR_INVALID = 100008,
        ACL_ERROR_INVALID_DUMP_CONFIG = 100009,
        ACL_ERROR_INVALID_PROFILING_CONFIG = 100010,
        ACL_ERROR_INVALID_MODEL_ID = 100011,
        ACL_ERROR_DESERIALIZE_MODEL = 100012,
        ACL_ERROR_PARSE_MODEL = 100013,
        ACL_ERROR_READ_MODEL_FAILURE = 100014,
        ACL_ERROR_MODEL_SIZE_INVALID = 100015,
        ACL_ERROR_MODEL_MISSING_ATTR = 100016,
        ACL_ERROR_MODEL_INPUT_NOT_MATCH = 100017,
        ACL_ERROR_MODEL_OUTPUT_NOT_MATCH = 100018,
        ACL_ERROR_MODEL_NOT_DYNAMIC = 100019,
        ACL_ERROR_OP_TYPE_NOT_MATCH = 100020,
        ACL_ERROR_OP_INPUT_NOT_MATCH = 100021,
        ACL_ERROR_OP_OUTPUT_NOT_MATCH = 100022,
        ACL_ERROR_OP_ATTR_NOT_MATCH = 100023,
        ACL_ERROR_OP_NOT_FOUND = 100024,
        ACL_ERROR_OP_LOAD_FAILED = 100025,
        ACL_ERROR_UNSUPPORTED_DATA_TYPE = 100026,
        ACL_ERROR_FORMAT_NOT_MATCH = 100027,
        ACL_ERROR_BIN_SELECTOR_NOT_REGISTERED = 100028,
        ACL_ERROR_KERNEL_NOT_FOUND = 100029,
        ACL_ERROR_BIN_SELECTOR_ALREADY_REGISTERED = 100030,
        ACL_ERROR_KERNEL_ALREADY_REGISTERED = 100031,
        ACL_ERROR_INVALID_QUEUE_ID = 100032,
        ACL_ERROR_REPEAT_SUBSCRIBE = 100033,
        ACL_ERROR_STREAM_NOT_SUBSCRIBE = 100034,
        ACL_ERROR_THREAD_NOT_SUBSCRIBE = 100035,
        ACL_ERROR_WAIT_CALLBACK_TIMEOUT = 100036,
        ACL_ERROR_REPEAT_FINALIZE = 100037,
        ACL_ERROR_NOT_STATIC_AIPP = 100038,
        ACL_ERROR_COMPILING_STUB_MODE = 100039,
        ACL_ERROR_GROUP_NOT_SET = 100040,
        ACL_ERROR_GROUP_NOT_CREATE = 100041,
        ACL_ERROR_PROF_ALREADY_RUN = 100042,
        ACL_ERROR_PROF_NOT_RUN = 100043,
        ACL_ERROR_DUMP_ALREADY_RUN = 100044,
        ACL_ERROR_DUMP_NOT_RUN = 100045,
        ACL_ERROR_RT_PARAM_INVALID = 107000,
        ACL_ERROR_RT_INVALID_DEVICEID = 107001,
        ACL_ERROR_RT_CONTEXT_NULL = 107002,
        ACL_ERROR_RT_STREAM_CONTEXT = 107003,
        ACL_ERROR_RT_MODEL_CONTEXT = 107004,
        ACL_ERROR_RT_STREAM_MODEL = 107005,
        ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID = 107006,
        ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL = 107007,
        ACL_ERROR_RT_ADDR_UNALIGNED = 107008,
        ACL_ERROR_RT_FILE_OPEN = 107009,
        ACL_ERROR_RT_FILE_WRITE = 107010,
        ACL_ERROR_RT_STREAM_SUBSCRIBE = 107011,
        ACL_ERROR_RT_THREAD_SUBSCRIBE = 107012,
        ACL_ERROR_RT_GROUP_NOT_SET = 107013,
        ACL_ERROR_RT_GROUP_NOT_CREATE = 107014,
        ACL_ERROR_RT_STREAM_NO_CB_REG = 107015,
        ACL_ERROR_RT_INVALID_MEMORY_TYPE = 107016,
        ACL_ERROR_RT_INVALID_HANDLE = 107017,
        ACL_ERROR_RT_INVALID_MALLOC_TYPE = 107018,
        ACL_ERROR_RT_WAIT_TIMEOUT = 107019,
        ACL_ERROR_RT_TASK_TIMEOUT = 107020,
        ACL_ERROR_RT_SYSPARAMOPT_NOT_SET = 107021,
        ACL_ERROR_RT_DEVICE_TASK_ABORT = 107022,
        ACL_ERROR_RT_STREAM_ABORT = 107023,
        ACL_ERROR_RT_CAPTURE_DEPENDENCY = 107024,
        ACL_ERROR_RT_STREAM_UNJOINED = 107025,
        ACL_ERROR_RT_MODEL_CAPTURED = 107026,
        ACL_ERROR_RT_STREAM_CAPTURED = 107027,
        ACL_ERROR_RT_EVENT_CAPTURED = 107028,
        ACL_ERROR_RT_STREAM_NOT_CAPTURED = 107029,
        ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT = 107030,
        ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT = 107031,
        ACL_ERROR_STREAM_CAPTURE_CONFLICT = 107032,
        ACL_ERROR_STREAM_TASK_GROUP_STATUS = 107033,
        ACL_ERROR_STREAM_TASK_GROUP_INTR = 107034,
        ACL_ERROR_RT_TASK_ABORT_STOP = 107035,
        ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED = 107036,
        ACL_ERROR_RT_MODEL_RUNNING = 107037,
        ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD = 107038,
        ACL_ERROR_RT_INSUFFICIENT_INPUT_ARRAY = 107039,
        ACL_ERROR_RT_MODEL_UPDATE_FAILED = 107040,
        ACL_ERROR_RT_SYMBOL_NOT_FOUND = 107042,
        ACL_ERROR_RT_INVALID_SYMBOL = 107043,
        ACL_ERROR_RT_INVALID_DEVICE_FUNCTION = 107044,
        ACL_ERROR_RT_SUB_ACLGRAPH_IS_CAPTURING = 107045,
        ACL_ERROR_PROF_REPEAT_SUBSCRIBE = 148046,
        ACL_ERROR_PROF_API_CONFLICT = 148047,
        ACL_ERROR_INVALID_MAX_OPQUEUE_NUM_CONFIG = 148048,
        ACL_ERROR_INVALID_OPP_PATH = 148049,
        ACL_ERROR_OP_UNSUPPORTED_DYNAMIC = 148050,
        ACL_ERROR_RELATIVE_RESOURCE_NOT_CLEARED = 148051,
        ACL_ERROR_UNSUPPORTED_JPEG = 148052,
        ACL_ERROR_INVALID_BUNDLE_MODEL_ID = 148053,
        ACL_ERROR_BAD_ALLOC = 200000,
        ACL_ERROR_API_NOT_SUPPORT = 200001,
        ACL_ERROR_INVALID_DEVICE = 200002,
        ACL_ERROR_MEMORY_ADDRESS_UNALIGNED = 200003,
        ACL_ERROR_RESOURCE_NOT_MATCH = 200004,
        ACL_ERROR_INVALID_RESOURCE_HANDLE = 200005,
        ACL_ERROR_FEATURE_UNSUPPORTED = 200006,
        ACL_ERROR_PROF_MODULES_UNSUPPORTED = 200007,
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
        ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
        ACL_ERROR_RT_MEMORY_FREE = 207002,
        ACL_ERROR_RT_AICORE_OVER_FLOW = 207003,
        ACL_ERROR_RT_NO_DEVICE = 207004,
        ACL_ERROR_RT_RESOURCE_ALLOC_FAIL = 207005,
        ACL_ERROR_RT_NO_PERMISSION = 207006,
        ACL_ERROR_RT_NO_EVENT_RESOURCE = 207007,
        ACL_ERROR_RT_NO_STREAM_RESOURCE = 207008,
        ACL_ERROR_RT_NO_NOTIFY_RESOURCE = 207009,
        ACL_ERROR_RT_NO_MODEL_RESOURCE = 207010,
        ACL_ERROR_RT_NO_CDQ_RESOURCE = 207011,
        ACL_ERROR_RT_OVER_LIMIT = 207012,
        ACL_ERROR_RT_QUEUE_EMPTY = 207013,
        ACL_ERROR_RT_QUEUE_FULL = 207014,
        ACL_ERROR_RT_REPEATED_INIT = 207015,
        ACL_ERROR_RT_AIVEC_OVER_FLOW = 207016,
        ACL_ERROR_RT_OVER_FLOW = 207017,
        ACL_ERROR_RT_DEVICE_OOM = 207018,
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP = 207019,
        ACL_ERROR_RT_TIMEOUT = 207020,
        ACL_ERROR_RT_LINK_TYPE_NOT_SUPPORTED = 207021,
        ACL_ERROR_STORAGE_OVER_LIMIT = 300000,
        ACL_ERROR_INTERNAL_ERROR = 500000,
        ACL_ERROR_FAILURE = 500001,
        ACL_ERROR_GE_FAILURE = 500002,
        ACL_ERROR_RT_FAILURE = 500003,
        ACL_ERROR_DRV_FAILURE = 500004,
        ACL_ERROR_PROFILING_FAILURE = 500005,
        ACL_ERROR_RT_INTERNAL_ERROR = 507000,
        ACL_ERROR_RT_TS_ERROR = 507001,
        ACL_ERROR_RT_STREAM_TASK_FULL = 507002,
        ACL_ERROR_RT_STREAM_TASK_EMPTY = 507003,
        ACL_ERROR_RT_STREAM_NOT_COMPLETE = 507004,
        ACL_ERROR_RT_END_OF_SEQUENCE = 507005,
        ACL_ERROR_RT_EVENT_NOT_COMPLETE = 507006,
        ACL_ERROR_RT_CONTEXT_RELEASE_ERROR = 507007,
        ACL_ERROR_RT_SOC_VERSION = 507008,
        ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT = 507009,
        ACL_ERROR_RT_LOST_HEARTBEAT = 507010,
        ACL_ERROR_RT_MODEL_EXECUTE = 507011,
        ACL_ERROR_RT_REPORT_TIMEOUT = 507012,
        ACL_ERROR_RT_SYS_DMA = 507013,
        ACL_ERROR_RT_AICORE_TIMEOUT = 507014,
        ACL_ERROR_RT_AICORE_EXCEPTION = 507015,
        ACL_ERROR_RT_AICORE_TRAP_EXCEPTION = 507016,
        ACL_ERROR_RT_AICPU_TIMEOUT = 507017,
        ACL_ERROR_RT_AICPU_EXCEPTION = 507018,
        ACL_ERROR_RT_AICPU_DATADUMP_RSP_ERR = 507019,
        ACL_ERROR_RT_AICPU_MODEL_RSP_ERR = 507020,
        ACL_ERROR_RT_PROFILING_ERROR = 507021,
        ACL_ERROR_RT_IPC_ERROR = 507022,
        ACL_ERROR_RT_MODEL_ABORT_NORMAL = 507023,
        ACL_ERROR_RT_KERNEL_UNREGISTERING = 507024,
        ACL_ERROR_RT_RINGBUFFER_NOT_INIT = 507025,
        ACL_ERROR_RT_RINGBUFFER_NO_DATA = 507026,
        ACL_ERROR_RT_KERNEL_LOOKUP = 507027,
        ACL_ERROR_RT_KERNEL_DUPLICATE = 507028,
        ACL_ERROR_RT_DEBUG_REGISTER_FAIL = 507029,
        ACL_ERROR_RT_DEBUG_UNREGISTER_FAIL = 507030,
        ACL_ERROR_RT_LABEL_CONTEXT = 507031,
        ACL_ERROR_RT_PROGRAM_USE_OUT = 507032,
        ACL_ERROR_RT_DEV_SETUP_ERROR = 507033,
        ACL_ERROR_RT_VECTOR_CORE_TIMEOUT = 507034,
        ACL_ERROR_RT_VECTOR_CORE_EXCEPTION = 507035,
        ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION = 507036,
        ACL_ERROR_RT_CDQ_BATCH_ABNORMAL = 507037,
        ACL_ERROR_RT_DIE_MODE_CHANGE_ERROR = 507038,
        ACL_ERROR_RT_DIE_SET_ERROR = 507039,
        ACL_ERROR_RT_INVALID_DIEID = 507040,
        ACL_ERROR_RT_DIE_MODE_NOT_SET = 507041,
        ACL_ERROR_RT_AICORE_TRAP_READ_OVERFLOW = 507042,
        ACL_ERROR_RT_AICORE_TRAP_WRITE_OVERFLOW = 507043,
        ACL_ERROR_RT_VECTOR_CORE_TRAP_READ_OVERFLOW = 507044,
        ACL_ERROR_RT_VECTOR_CORE_TRAP_WRITE_OVERFLOW = 507045,
        ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046,
        ACL_ERROR_RT_EVENT_SYNC_TIMEOUT = 507047,
        ACL_ERROR_RT_FFTS_PLUS_TIMEOUT = 507048,
        ACL_ERROR_RT_FFTS_PLUS_EXCEPTION = 507049,
        ACL_ERROR_RT_FFTS_PLUS_TRAP_EXCEPTION = 507050,
        ACL_ERROR_RT_SEND_MSG = 507051,
        ACL_ERROR_RT_COPY_DATA = 507052,
        ACL_ERROR_RT_DEVICE_MEM_ERROR = 507053,
        ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR = 507054,
        ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR = 507055,
        ACL_ERROR_RT_LINK_ERROR = 507056,
        ACL_ERROR_RT_SUSPECT_REMOTE_ERROR = 507057,
        ACL_ERROR_RT_DRV_INTERNAL_ERROR = 507899,
        ACL_ERROR_RT_AICPU_INTERNAL_ERROR = 507900,
        ACL_ERROR_RT_SOCKET_CLOSE = 507901,
        ACL_ERROR_RT_AICPU_INFO_LOAD_RSP_ERR = 507902,
        ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED = 507903,
        ACL_ERROR_RT_COMM_OP_RETRY_FAIL = 507904,
        ACL_ERROR_SNAPSHOT_LOCK_TIMEOUT = 507905,
        ACL_ERROR_SNAPSHOT_LOCK_FAILED = 507906,
        ACL_ERROR_SNAPSHOT_UNLOCK_FAILED = 507907,
        ACL_ERROR_SNAPSHOT_BACKUP_FAILED = 507908,
        ACL_ERROR_SNAPSHOT_RESTORE_FAILED = 507909,
        ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 507910,
        ACL_ERROR_HOST_MEMORY_NOT_REGISTERED = 507911,
        ACL_ERROR_SNAPSHOT_CALLBACK_FAILED = 507912,
        ACL_ERROR_SNAPSHOT_REGISTER_CALLBACK_FAILED = 507913,
        ACL_ERROR_RT_L3_PORT_ERROR = 507914,
        ACL_ERROR_RT_CCU_TIMEOUT = 507915,
        ACL_ERROR_RT_CCU_EXCEPTION = 507916,
    }
}

codes! {
    /// Codes of the collectives.
    hccl {
        HCCL_SUCCESS = 0,
        HCCL_E_PARA = 1,
        HCCL_E_PTR = 2,
        HCCL_E_MEMORY = 3,
        HCCL_E_INTERNAL = 4,
        HCCL_E_NOT_SUPPORT = 5,
        HCCL_E_NOT_FOUND = 6,
        HCCL_E_UNAVAIL = 7,
        HCCL_E_SYSCALL = 8,
        HCCL_E_TIMEOUT = 9,
        HCCL_E_OPEN_FILE_FAILURE = 10,
        HCCL_E_TCP_CONNECT = 11,
        HCCL_E_ROCE_CONNECT = 12,
        HCCL_E_TCP_TRANSFER = 13,
        HCCL_E_ROCE_TRANSFER = 14,
        HCCL_E_RUNTIME = 15,
        HCCL_E_DRV = 16,
        HCCL_E_PROFILING = 17,
        HCCL_E_CCE = 18,
        HCCL_E_NETWORK = 19,
        HCCL_E_AGAIN = 20,
        HCCL_E_REMOTE = 21,
        HCCL_E_SUSPENDING = 22,
        HCCL_E_OPRETRY_FAIL = 23,
        HCCL_E_OOM = 24,
        HCCL_E_IN_STATUS = 1041,
    }
}

codes! {
    /// Codes of the device management.
    dcmi {
        DCMI_ERR_CODE_NOT_SUPPORT = -8255,
        DCMI_ERR_CODE_RESOURCE_OCCUPIED = -8020,
        DCMI_ERR_CODE_NOT_SUPPORT_IN_CONTAINER = -8013,
        DCMI_ERR_CODE_NOT_REDAY = -8012,
        DCMI_ERR_CODE_DEVICE_NOT_EXIST = -8008,
        DCMI_ERR_CODE_INVALID_DEVICE_ID = -8007,
        DCMI_ERR_CODE_TIME_OUT = -8006,
        DCMI_ERR_CODE_OPER_NOT_PERMITTED = -8002,
        DCMI_ERR_CODE_INVALID_PARAMETER = -8001,
        DCMI_OK = 0,
    }
}

codes! {
    /// Codes of the operators.
    aclnn {
        ACLNN_SUCCESS = 0,
        ACLNN_ERR_PARAM_NULLPTR = 161001,
        ACLNN_ERR_PARAM_INVALID = 161002,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sorted_and_names_unique() {
        for table in [acl::TABLE, hccl::TABLE, dcmi::TABLE, aclnn::TABLE] {
            assert!(table.is_sorted_by(|a, b| a.0 < b.0));
            let mut names: Vec<_> = table.iter().map(|&(_, name)| name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), table.len());
        }
    }

    #[test]
    fn same_number_has_a_name_per_family() {
        assert_eq!(Status::new(Family::Hccl, 9_u32).to_string(), "HCCL_E_TIMEOUT (9)");
        assert_eq!(Status::new(Family::Acl, 9).to_string(), "9");
        assert_eq!(
            Status::new(Family::Aclnn, 207_001).name(),
            Some("ACL_ERROR_RT_MEMORY_ALLOCATION")
        );
        assert_eq!(Status::new(Family::Dcmi, -8255).name(), Some("DCMI_ERR_CODE_NOT_SUPPORT"));
    }

    #[test]
    fn unknown_codes_print_as_numbers() {
        assert_eq!(Status::new(Family::Acl, -1).to_string(), "-1");
        assert_eq!(Status::new(Family::Hccl, u32::MAX).to_string(), "4294967295");
        assert_eq!(Status::new(Family::Hccl, u32::MAX).advice(), None);
    }

    /// The codes of the table "the ones a user meets" of the interface notes.
    #[test]
    fn codes_that_users_meet_have_advice() {
        let met = [
            100_002, 100_037, 100_039, 107_000, 100_000, 107_001, 107_002, 107_003, 107_019,
            107_020, 507_046, 507_047, 207_020, 207_000, 200_001, 200_006, 207_001, 207_018,
            200_000, 207_004, 207_005, 207_007, 207_008, 207_006, 507_001, 507_010, 507_013,
            507_014, 507_015, 507_017, 507_018, 507_034, 507_035, 507_033, 507_053, 507_054,
            507_055, 507_056, 507_057, 507_899, 507_901, 507_904, 507_910, 507_911,
        ];
        for code in met {
            let status = Status::new(Family::Acl, code);
            assert!(status.name().is_some(), "{code} has no name");
            assert!(status.advice().is_some(), "{code} has no advice");
        }
    }

    #[test]
    fn time_outs_and_stubs_are_told_apart() {
        assert!(Status::new(Family::Acl, acl::ACL_ERROR_RT_STREAM_SYNC_TIMEOUT).is_timeout());
        assert!(Status::new(Family::Hccl, hccl::HCCL_E_TIMEOUT).is_timeout());
        assert!(!Status::new(Family::Acl, hccl::HCCL_E_TIMEOUT).is_timeout());
        assert!(Status::new(Family::Acl, acl::ACL_ERROR_COMPILING_STUB_MODE).is_stub());
        assert!(!Status::new(Family::Hccl, 100_039).is_stub());
    }
}
