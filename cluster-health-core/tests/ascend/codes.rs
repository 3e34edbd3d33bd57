//! Status codes as a user meets them.

use super::*;

/// Code, its name in the vendor's headers, and what the advice has to speak of.
const MET: &[(i64, &str, &str)] = &[
    (100_000, "ACL_ERROR_INVALID_PARAM", "argument"),
    (100_002, "ACL_ERROR_REPEAT_INITIALIZE", "before"),
    (100_037, "ACL_ERROR_REPEAT_FINALIZE", "twice"),
    (100_039, "ACL_ERROR_COMPILING_STUB_MODE", "LD_LIBRARY_PATH"),
    (107_000, "ACL_ERROR_RT_PARAM_INVALID", "argument"),
    (107_001, "ACL_ERROR_RT_INVALID_DEVICEID", "ASCEND_RT_VISIBLE_DEVICES"),
    (107_002, "ACL_ERROR_RT_CONTEXT_NULL", "no device selected"),
    (107_003, "ACL_ERROR_RT_STREAM_CONTEXT", "context"),
    (107_019, "ACL_ERROR_RT_WAIT_TIMEOUT", "in time"),
    (107_020, "ACL_ERROR_RT_TASK_TIMEOUT", "in time"),
    (200_000, "ACL_ERROR_BAD_ALLOC", "memory"),
    (200_001, "ACL_ERROR_API_NOT_SUPPORT", "does not offer"),
    (200_006, "ACL_ERROR_FEATURE_UNSUPPORTED", "does not offer"),
    (207_000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT", "does not offer"),
    (207_001, "ACL_ERROR_RT_MEMORY_ALLOCATION", "memory"),
    (207_004, "ACL_ERROR_RT_NO_DEVICE", "no device is visible"),
    (207_005, "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL", "resources"),
    (207_006, "ACL_ERROR_RT_NO_PERMISSION", "HwHiAiUser"),
    (207_007, "ACL_ERROR_RT_NO_EVENT_RESOURCE", "events"),
    (207_008, "ACL_ERROR_RT_NO_STREAM_RESOURCE", "streams"),
    (207_018, "ACL_ERROR_RT_DEVICE_OOM", "memory"),
    (207_020, "ACL_ERROR_RT_TIMEOUT", "in time"),
    (507_001, "ACL_ERROR_RT_TS_ERROR", "scheduler"),
    (507_010, "ACL_ERROR_RT_LOST_HEARTBEAT", "firmware"),
    (507_013, "ACL_ERROR_RT_SYS_DMA", "DMA"),
    (507_014, "ACL_ERROR_RT_AICORE_TIMEOUT", "core"),
    (507_015, "ACL_ERROR_RT_AICORE_EXCEPTION", "core"),
    (507_017, "ACL_ERROR_RT_AICPU_TIMEOUT", "core"),
    (507_018, "ACL_ERROR_RT_AICPU_EXCEPTION", "core"),
    (507_033, "ACL_ERROR_RT_DEV_SETUP_ERROR", "set up"),
    (507_034, "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", "core"),
    (507_035, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION", "core"),
    (507_046, "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT", "in time"),
    (507_047, "ACL_ERROR_RT_EVENT_SYNC_TIMEOUT", "in time"),
    (507_053, "ACL_ERROR_RT_DEVICE_MEM_ERROR", "memory"),
    (507_054, "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR", "ecc"),
    (507_055, "ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR", "memory"),
    (507_056, "ACL_ERROR_RT_LINK_ERROR", "link"),
    (507_057, "ACL_ERROR_RT_SUSPECT_REMOTE_ERROR", "other side"),
    (507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR", "driver"),
    (507_901, "ACL_ERROR_RT_SOCKET_CLOSE", "connection"),
    (507_904, "ACL_ERROR_RT_COMM_OP_RETRY_FAIL", "collective"),
    (507_910, "ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "registered"),
    (507_911, "ACL_ERROR_HOST_MEMORY_NOT_REGISTERED", "registered"),
];

const TIMEOUTS: [i64; 5] = [107_019, 107_020, 207_020, 507_046, 507_047];

#[test]
fn every_code_that_users_meet_is_said_with_call_name_device_and_advice() {
    for call in ["aclrtMalloc", "aclrtMemcpyAsync"] {
        let fault = |(place, (code, ..)): (usize, &(i64, &str, &str))| {
            format!("{call}:{}:{code}", place + 1)
        };
        let faults: Vec<String> = MET.iter().enumerate().map(fault).collect();
        run(
            "codes",
            &[
                ("ASCEND_SIM_FAULTS", &faults.join(";")),
                ("ASCEND_RT_VISIBLE_DEVICES", "1,3"),
                (EXPECTED, call),
            ],
        );
    }
}

pub(super) fn codes() {
    let machine = machine();
    let device = machine.devices().remove(1);
    let size = ByteSize::kib(4);
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    let stream = Stream::new(&device).unwrap();
    let call = std::env::var(EXPECTED).unwrap();
    let mut target = (call != "aclrtMalloc").then(|| DeviceBuffer::new(&device, size).unwrap());
    for (code, name, words) in MET {
        let error = match &mut target {
            None => DeviceBuffer::new(&device, size).unwrap_err(),
            Some(target) => {
                let copy = Transfer::to_device(&stream, &source, target, size, BOUND);
                copy.unwrap().issue().unwrap_err()
            }
        };
        assert_eq!(error.call(), Some(call.as_str()));
        assert_eq!(error.code(), Some(*code));
        assert_eq!(error.device(), Some(DeviceId(3)));
        assert!(error.advice().unwrap().contains(words), "{code}: {error}");
        let kind = if TIMEOUTS.contains(code) { "timeout" } else { "backend" };
        assert_eq!(error.kind(), kind, "{code}");
        let text = error.to_string();
        let head = format!("{call} failed on device 3: code {code} ({name})");
        assert!(text.starts_with(&head), "{text}");
        assert!(text.ends_with(error.advice().unwrap()), "{text}");
    }
    // A failure is of its call only.
    drop(DeviceBuffer::new(&device, size).unwrap());
}

#[test]
fn runtime_that_somebody_else_initialised_is_used() {
    run("initialised_before", &[("ASCEND_SIM_FAULTS", "aclInit:2:100002")]);
}

/// As in a program that uses the runtime itself.
pub(super) fn initialised_before() {
    // SAFETY:
    // * The simulator's initialisers have no preconditions.
    let library = unsafe { libloading::Library::new(folder().join("libascendcl.so")) }.unwrap();
    // SAFETY:
    // * The signature is that of the vendor's headers.
    let init =
        unsafe { library.get::<unsafe extern "C" fn(*const u8) -> i32>(b"aclInit\0") }.unwrap();
    // SAFETY:
    // * A null path means no configuration file.
    assert_eq!(unsafe { init(std::ptr::null()) }, 0);
    let device = machine().devices().remove(0);
    drop(DeviceBuffer::new(&device, ByteSize::kib(4)).unwrap());
}
