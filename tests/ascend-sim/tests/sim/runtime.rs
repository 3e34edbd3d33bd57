//! Initialisation, contexts, device ids, facts about devices.

use std::{ffi::CStr, ptr, thread};

use crate::library::Sim;

#[test]
fn initialising_and_finalising_twice_have_their_codes() {
    let sim = Sim::new(&[]);
    assert_eq!(sim.aclrtSetDevice(0), 100_001, "not initialised");
    assert_eq!(sim.aclInit(ptr::null()), 0);
    assert_eq!(sim.aclInit(ptr::null()), 100_002);
    assert_eq!(sim.aclFinalize(), 0, "the count goes to zero whatever it was");
    assert_eq!(sim.aclFinalize(), 100_037);
}

#[test]
fn a_new_thread_has_no_context_until_it_sets_a_device() {
    let sim = Sim::ready(&[]);
    let mut ptr = ptr::null_mut();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut ptr = ptr::null_mut();
            assert_eq!(sim.aclrtMalloc(&raw mut ptr, 64, 0), 107_002);
            assert!(sim.message().contains("no current context"));
            assert_eq!(sim.message(), "", "the message is cleared when it is read");
            assert_eq!(sim.aclrtSetDevice(1), 0);
            assert_eq!(sim.aclrtMalloc(&raw mut ptr, 64, 0), 0);
            assert_eq!(sim.aclrtFree(ptr), 0);
        });
    });
    assert_eq!(sim.message(), "", "messages belong to their thread");
    let mut device = -1;
    assert_eq!(sim.aclrtGetDevice(&raw mut device), 0);
    assert_eq!(device, 0, "another thread's device is not ours");
    assert_eq!(sim.aclrtMalloc(&raw mut ptr, 0, 0), 100_000);
    assert_eq!(sim.aclrtPeekAtLastError(0), 100_000);
    assert_eq!(sim.aclrtGetLastError(0), 100_000);
    assert_eq!(sim.aclrtGetLastError(0), 0);
}

#[test]
fn setting_a_device_is_counted() {
    let sim = Sim::ready(&[]);
    assert_eq!(sim.aclrtSetDevice(0), 0);
    let memory = sim.malloc(4096);
    assert_eq!(sim.aclrtResetDevice(0), 0);
    assert_eq!(sim.download(memory, 16).len(), 16, "one user is left");
    assert_eq!(sim.aclrtResetDevice(0), 0);
    let mut ptr = ptr::null_mut();
    assert_eq!(sim.aclrtMalloc(&raw mut ptr, 64, 0), 107_002);
    assert_eq!(sim.count("leaked"), 1);
    assert_eq!(sim.count("device_allocations"), 0);
    assert_eq!(sim.count("contexts"), 0);
    assert_eq!(sim.aclrtSetDevice(9), 107_001);
    for _ in 0..3 {
        assert_eq!(sim.aclrtSetDevice(0), 0);
    }
    assert_eq!(sim.aclrtResetDeviceForce(0), 0, "whatever the count");
    assert_eq!(sim.aclrtMalloc(&raw mut ptr, 64, 0), 107_002);
}

#[test]
fn streams_belong_to_the_context_they_were_made_in() {
    let sim = Sim::ready(&[]);
    let stream = sim.stream();
    let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(sim.aclrtGetCurrentContext(&raw mut first), 0);
    assert_eq!(sim.aclrtCreateContext(&raw mut second, 1), 0);
    let mut device = -1;
    assert_eq!(sim.aclrtGetDevice(&raw mut device), 0);
    assert_eq!(device, 1, "a new context is current");
    assert_eq!(sim.aclrtSynchronizeStream(stream), 107_003);
    assert_eq!(sim.aclrtDestroyStream(stream), 107_003);
    assert_eq!(sim.aclrtSetCurrentContext(first), 0);
    assert_eq!(sim.aclrtDestroyStream(stream), 0);
    assert_eq!(sim.aclrtSynchronizeStream(stream), 107_017, "a handle is never used again");
    assert_eq!(sim.aclrtDestroyContext(second), 0);
    assert_eq!(sim.aclrtSetCurrentContext(second), 107_017);
    assert_eq!(sim.aclrtDestroyContext(first), 107_000, "a default context is not destroyed");
}

#[test]
fn visible_devices_are_renumbered_and_checked() {
    let settings = [("DEVICES", "4"), ("PHY", "8,9,10,11"), ("ASCEND_RT_VISIBLE_DEVICES", "1,3")];
    let sim = Sim::ready(&settings);
    let mut count = 0;
    assert_eq!(sim.aclrtGetDeviceCount(&raw mut count), 0);
    assert_eq!(count, 2);
    let mut id = -1;
    assert_eq!(sim.aclrtGetPhyDevIdByUserDevId(1, &raw mut id), 0);
    assert_eq!(id, 11);
    assert_eq!(sim.aclrtGetLogicDevIdByUserDevId(1, &raw mut id), 0);
    assert_eq!(id, 3);
    assert_eq!(sim.aclrtGetUserDevIdByPhyDevId(9, &raw mut id), 0);
    assert_eq!(id, 0);
    assert_eq!(sim.aclrtGetUserDevIdByPhyDevId(8, &raw mut id), 107_001);
    assert_eq!(sim.aclrtGetPhyDevIdByLogicDevId(0, &raw mut id), 0);
    assert_eq!(id, 9, "this function takes user ids in spite of its name");
    let mut text = [0; 16];
    assert_eq!(sim.aclrtDeviceGetPCIBusId(0, text.as_mut_ptr(), 12), 107_000);
    assert_eq!(sim.aclrtDeviceGetPCIBusId(0, text.as_mut_ptr(), 13), 0);
    assert_eq!(text.map(|c| c.to_ne_bytes()[0])[..13], *b"0000:19:00.0\0");
    for malformed in ["", "a", "3,1", "1,1", "1;2", "0,4"] {
        sim.set("ASCEND_RT_VISIBLE_DEVICES", malformed);
        assert_eq!(sim.aclrtGetDeviceCount(&raw mut count), 207_004, "{malformed:?}");
    }
}

#[test]
fn devices_tell_what_was_configured() {
    let settings = [("SOC", "Ascend910_9362"), ("VERSION", "1.18.2"), ("HBM", "8G")];
    let sim = Sim::ready(&settings);
    let name = sim.aclrtGetSocName();
    // SAFETY:
    // * a static C string of the simulator
    let name = unsafe { CStr::from_ptr(name) };
    assert_eq!(name, c"Ascend910_9362");
    let mut parts = [0; 3];
    let [major, minor, patch] = &mut parts;
    assert_eq!(sim.aclrtGetVersion(major, minor, patch), 0);
    assert_eq!(parts, [1, 18, 2]);
    let mut mode = 0;
    assert_eq!(sim.aclrtGetRunMode(&raw mut mode), 0);
    assert_eq!(mode, 1, "the host side of a card");
    let mut value = 0;
    assert_eq!(sim.aclrtGetDeviceInfo(0, 301, &raw mut value), 0);
    assert_eq!(value, 8 << 30);
    let mut info = [7; 6];
    sim.set("UTILIZATION", "0=35");
    assert_eq!(sim.aclrtGetDeviceUtilizationRate(0, &raw mut info), 0);
    assert_eq!(info, [35, 35, 0, -1, 0, 0], "memory utilisation is not supported");
    let (mut can, one) = (0, 1);
    assert_eq!(sim.aclrtDeviceCanAccessPeer(&raw mut can, 0, one), 0);
    assert_eq!(can, 1);
    sim.set("NO_PEER", "0-1");
    assert_eq!(sim.aclrtDeviceCanAccessPeer(&raw mut can, one, 0), 0);
    assert_eq!(can, 0);
    assert_eq!(sim.aclrtDeviceEnablePeerAccess(1, 1), 200_006);
    assert_eq!(sim.aclrtDeviceEnablePeerAccess(0, 0), 100_000);
    assert_eq!(sim.aclrtDeviceEnablePeerAccess(1, 0), 207_000);
}
