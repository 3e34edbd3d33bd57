//! What a program that embeds the library meets on the Ascend backend, on the simulator: its own
//! streams and communicators, threads, registered memory, copies between devices, coarse clocks.
//!
//! A library is opened once per process and its settings are environment variables, so every case
//! runs in a process of its own: this executable again, with the case's name.
#![allow(unsafe_code, reason = "a host program calls the runtime itself")]

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ascend_sys::function;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{
    ByteSize, Communicator, DataType, Device, DeviceBuffer, DeviceId, Error, Event, EventTimer,
    HostBuffer, HostMemory, Machine, Pinned, Scenario, Stream, TagPattern, Transfer,
};
use tempfile::TempDir;

use crate::simulator;

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
const CASE: &str = "ASCEND_CORE_CASE";
/// What a case is to find.
const EXPECTED: &str = "ASCEND_CORE_EXPECTED";
const BOUND: Duration = Duration::from_secs(30);
/// What a test waits for in vain.
const SHORT: Duration = Duration::from_millis(400);

fn run(case: &str, variables: &[(&str, &str)]) {
    run_without(&[], case, variables);
}

/// Runs a case in a process whose libraries lack these functions.
fn run_without(symbols: &[&str], case: &str, variables: &[(&str, &str)]) {
    let folder = TempDir::new().unwrap();
    let file = simulator::install(folder.path(), &simulator::LIBRARIES);
    if !symbols.is_empty() {
        simulator::remove_symbols(&file, symbols);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ASCEND_") {
            command.env_remove(name);
        }
    }
    let output = command
        .args(["--exact", "ascend_core::one_case", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .env(FOLDER, folder.path())
        .env("ASCEND_SIM_DEVICES", "4")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case} without {symbols:?}: {}\n{text}{said}", output.status);
    assert!(text.contains("1 passed"), "{case} did not run");
}

/// What the other tests start.
#[test]
#[ignore = "runs in the processes that the other tests start"]
fn one_case() {
    match std::env::var(CASE).as_deref() {
        Ok("thread_ranks") => thread_ranks(),
        Ok("thread_ranks_refused") => thread_ranks_refused(),
        Ok("thread_ranks_fail") => thread_ranks_fail(),
        Ok("set_up_hangs") => set_up_hangs(),
        Ok("framework") => framework(),
        Ok("foreign_streams_refused") => foreign_streams_refused(),
        Ok("registered") => registered(),
        Ok("not_registered") => not_registered(),
        Ok("not_given_back") => not_given_back(),
        Ok("between_devices") => between_devices(),
        Ok("no_peer") => no_peer(),
        Ok("enabled_before") => enabled_before(),
        Ok("clock") => clock(),
        Ok("hopeless_clock") => hopeless_clock(),
        Ok("everything") => everything(),
        Ok("required") => required(),
        Ok("device_changed") => device_changed(),
        Ok("memory") => memory(),
        other => panic!("no case {other:?}"),
    }
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

fn devices() -> Vec<Device> {
    Machine::ascend().unwrap().devices()
}

fn expected() -> Vec<String> {
    std::env::var(EXPECTED).unwrap().split('|').map(str::to_owned).collect()
}

fn assert_says(error: &Error, words: &[impl AsRef<str>]) {
    let text = error.to_string();
    for words in words {
        assert!(text.contains(words.as_ref()), "'{}' is not in '{text}'", words.as_ref());
    }
}

/// A function of the simulator itself.
fn simulator_function<T: Copy>(name: &str) -> T {
    // SAFETY:
    // * The simulator is loaded already, and its initialisers have run.
    let library = unsafe { libloading::Library::new(folder().join("libascendcl.so")) }.unwrap();
    // SAFETY:
    // * The callers below give the signatures of the simulator's documentation.
    *unsafe { library.get::<T>(name.as_bytes()) }.unwrap()
}

/// Calls of a function, or what is alive.
fn count(name: &str) -> u64 {
    let counter: unsafe extern "C" fn(*const c_char) -> u64 =
        simulator_function("ascend_sim_counter");
    let name = CString::new(name).unwrap();
    // SAFETY:
    // * The name is ended by a zero and lives during the call.
    unsafe { counter(name.as_ptr()) }
}

fn configure(key: &str, value: &str) {
    let configure: unsafe extern "C" fn(*const c_char, *const c_char) -> i32 =
        simulator_function("ascend_sim_configure");
    let (key, value) = (CString::new(key).unwrap(), CString::new(value).unwrap());
    // SAFETY:
    // * Both are ended by a zero and live during the call.
    assert_eq!(unsafe { configure(key.as_ptr(), value.as_ptr()) }, 0);
}

/// Makes a device current as a program does that knows nothing of this library.
fn set_device(user: i32) {
    let set = function!(ascend_sys::load::acl().unwrap(), aclrtSetDevice).unwrap();
    // SAFETY:
    // * The call takes an integer.
    assert_eq!(unsafe { set(user) }, 0);
}

fn filled(device: &Device, bytes: &[u8]) -> DeviceBuffer {
    let mut buffer = DeviceBuffer::new(device, ByteSize(bytes.len() as u64)).unwrap();
    buffer.write(0, bytes).unwrap();
    buffer
}

fn content(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// Bytes that tell rank and place.
fn pattern(rank: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| u8::try_from((index * 7 + rank * 31 + index / 256) % 251).unwrap())
        .collect()
}

/// One all-gather of this rank, whose result every rank knows.
fn gather(communicator: &mut Communicator<'_>, stream: &Stream, len: usize) {
    let (rank, size) = (communicator.rank() as usize, communicator.size() as usize);
    let send = filled(stream.device(), &pattern(rank, len));
    let mut receive = filled(stream.device(), &vec![0xEE; size * len]);
    communicator.all_gather(&send, &mut receive, len, DataType::UInt8, stream).unwrap();
    let all: Vec<u8> = (0..size).flat_map(|rank| pattern(rank, len)).collect();
    assert_eq!(content(&receive), all, "{len} bytes on rank {rank}");
}

#[test]
fn threads_of_one_process_have_a_communicator_each() {
    run("thread_ranks", &[("ASCEND_RT_VISIBLE_DEVICES", "1,2,3"), ("ASCEND_SIM_PHY", "7,6,5,4")]);
    run("thread_ranks", &[("ASCEND_SIM_DESTROY_AGAIN", "2")]);
}

fn thread_ranks() {
    let devices: Vec<Device> = devices().into_iter().take(3).collect();
    let communicators = Communicator::of_threads(&devices, BOUND).unwrap();
    assert_eq!(count("HcclCommInitAll"), 1);
    assert_eq!(communicators.len(), 3);
    thread::scope(|scope| {
        for (rank, mut communicator) in communicators.into_iter().enumerate() {
            let device = &devices[rank];
            scope.spawn(move || {
                assert_eq!((communicator.rank() as usize, communicator.size()), (rank, 3));
                let stream = Stream::new(device).unwrap();
                for len in [1, 4096, 70_001] {
                    gather(&mut communicator, &stream, len);
                }
                communicator.barrier().unwrap();
            });
        }
    });
    assert_eq!((count("comms"), count("violations")), (0, 0));
}

#[test]
fn devices_without_a_communicator_are_named() {
    run("thread_ranks_refused", &[("ASCEND_SIM_PHY", "7,6,5,4")]);
}

fn thread_ranks_refused() {
    let devices = devices();
    let twice = [devices[0].clone(), devices[1].clone(), devices[0].clone()];
    assert_says(&Communicator::of_threads(&twice, BOUND).unwrap_err(), &["device 7", "twice"]);
    assert_says(&Communicator::of_threads(&[], BOUND).unwrap_err(), &["empty"]);
    let host = Machine::host().unwrap().devices();
    assert_says(&Communicator::of_threads(&host, BOUND).unwrap_err(), &["Ascend"]);
    assert_eq!(count("HcclCommInitAll"), 0);
}

#[test]
fn failure_of_the_set_up_names_call_and_devices() {
    run(
        "thread_ranks_fail",
        &[
            ("ASCEND_SIM_PHY", "7,6,5,4"),
            ("ASCEND_SIM_FAULTS", "HcclCommInitAll:1:11"),
            (EXPECTED, "HcclCommInitAll failed|code 11 (HCCL_E_TCP_CONNECT)|devices 6, 4"),
        ],
    );
    run(
        "thread_ranks_fail",
        &[
            ("ASCEND_SIM_PHY", "7,6,5,4"),
            ("ASCEND_SIM_FAULTS", "HcclCommInitAll:1:hang"),
            (EXPECTED, "HcclCommInitAll failed on device 6|not finished after 400 ms|devices 6, 4"),
        ],
    );
}

fn thread_ranks_fail() {
    let devices = devices();
    let two = [devices[1].clone(), devices[3].clone()];
    let began = Instant::now();
    let error = Communicator::of_threads(&two, SHORT).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_says(&error, &expected());
    // What comes too late is destroyed by nobody but us.
    configure("RELEASE", "1");
    wait_for_no_communicator();
    Communicator::of_threads(&two, BOUND).unwrap();
}

fn wait_for_no_communicator() {
    let began = Instant::now();
    while count("comms") > 0 {
        assert!(began.elapsed() < BOUND, "{} communicators are left", count("comms"));
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn set_up_that_hangs_is_a_timeout_with_call_device_and_rank() {
    for (fault, words) in [
        (
            "HcclCommInitRootInfoConfig@1:1:hang",
            "HcclCommInitRootInfoConfig failed on device 1 (rank 1)",
        ),
        ("HcclGetRootInfo:1:hang", "HcclGetRootInfo failed on device 0 (rank 0)"),
    ] {
        run("set_up_hangs", &[("ASCEND_SIM_FAULTS", fault), (EXPECTED, words)]);
    }
    run_without(
        &["HcclCommInitRootInfoConfig"],
        "set_up_hangs",
        &[
            ("ASCEND_SIM_FAULTS", "HcclCommInitRootInfo@1:1:hang"),
            (EXPECTED, "HcclCommInitRootInfo failed on device 1 (rank 1)"),
        ],
    );
}

fn set_up_hangs() {
    let devices = devices();
    let began = Instant::now();
    let errors: Vec<Error> = thread::scope(|scope| {
        let ranks: Vec<_> = RankGroup::threads(2)
            .unwrap()
            .into_iter()
            .zip(&devices)
            .map(|(mut group, device)| {
                group.set_timeout(SHORT);
                scope.spawn(move || Communicator::new(&group, device).unwrap_err())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let expected = expected();
    let hung = errors.iter().find(|error| error.to_string().contains(&expected[0]));
    let hung = hung.unwrap_or_else(|| panic!("{errors:?}"));
    assert_eq!((hung.kind(), hung.rank().is_some()), ("timeout", true), "{hung}");
    assert_says(hung, &["not finished after 400 ms", "--timeout"]);
    assert!(errors.iter().any(|error| error.kind() == "timeout"));
    configure("RELEASE", "1");
    wait_for_no_communicator();
}

/// What a framework has: a stream and a communicator that it made itself.
struct Framework {
    stream: *mut c_void,
    comm: *mut c_void,
}

// SAFETY:
// * Handles of C are numbers; each is used by one thread at a time here.
unsafe impl Send for Framework {}

#[test]
fn streams_and_communicators_of_a_framework_are_used_and_left_alone() {
    run("framework", &[("ASCEND_RT_VISIBLE_DEVICES", "1,3")]);
}

fn framework() {
    let devices = devices();
    let acl = ascend_sys::load::acl().unwrap();
    let hccl = ascend_sys::load::hccl().unwrap();
    let mut comms: [*mut c_void; 2] = [std::ptr::null_mut(); 2];
    let mut users = [0, 1];
    set_device(0);
    let init = function!(hccl, HcclCommInitAll).unwrap();
    // SAFETY:
    // * Both lists have two elements.
    assert_eq!(unsafe { init(2, users.as_mut_ptr(), comms.as_mut_ptr()) }, 0);
    let create = function!(acl, aclrtCreateStream).unwrap();
    let theirs = comms.into_iter().zip(0..).map(|(comm, user)| {
        set_device(user);
        let mut stream = std::ptr::null_mut();
        // SAFETY:
        // * The pointer is to a live pointer, and the thread has a device.
        assert_eq!(unsafe { create(&raw mut stream) }, 0);
        Framework { stream, comm }
    });
    let theirs: Vec<Framework> = theirs.collect();
    let ranks: Vec<Framework> = thread::scope(|scope| {
        let threads: Vec<_> = theirs
            .into_iter()
            .zip(&devices)
            .map(|(theirs, device)| {
                scope.spawn(move || {
                    measure_on(&theirs, device);
                    theirs
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((count("streams"), count("comms"), count("events")), (2, 2, 0));
    let destroy = function!(acl, aclrtDestroyStream).unwrap();
    let end = function!(hccl, HcclCommDestroy).unwrap();
    for (theirs, user) in ranks.into_iter().zip(0..) {
        set_device(user);
        // SAFETY:
        // * Still alive: this library has not destroyed it.
        assert_eq!(unsafe { destroy(theirs.stream) }, 0);
        // SAFETY:
        // * As above.
        assert_eq!(unsafe { end(theirs.comm) }, 0);
    }
}

fn measure_on(theirs: &Framework, device: &Device) {
    let machine = Machine::ascend().unwrap();
    for _ in 0..2 {
        // SAFETY:
        // * The stream is of this device and its default context, and lives longer than this.
        let stream = unsafe { Stream::from_raw_acl(device, theirs.stream) }.unwrap();
        // SAFETY:
        // * The communicator is of this device, alive, and used by nobody else.
        let mut comm = unsafe { Communicator::from_raw_hccl(device, theirs.comm) }.unwrap();
        gather(&mut comm, &stream, 4097);

        let size = ByteSize::kib(64);
        let mut source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
        let mut target = DeviceBuffer::new(device, size).unwrap();
        let tags = TagPattern::full(3, size);
        source.write_tags(&tags).unwrap();
        let mut timer = EventTimer::new(&stream, BOUND).unwrap();
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
        timer.time(&mut copy).unwrap();
        drop(copy);
        assert!(target.check_tags(&tags).unwrap());
        // Left in flight on a stream that is not ours: the buffers wait for it.
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
        copy.issue().unwrap();
        drop(copy);
        drop((stream, source, target));
    }
}

#[test]
fn what_is_no_stream_of_the_device_is_refused() {
    run("foreign_streams_refused", &[]);
}

fn foreign_streams_refused() {
    let devices = devices();
    let borrow = |device: &Device, stream: *mut c_void| {
        // SAFETY:
        // * None of these is used beyond the call, which is to refuse it; the simulator looks
        //   handles up.
        unsafe { Stream::from_raw_acl(device, stream) }
    };
    let error = borrow(&devices[0], std::ptr::null_mut()).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let error = borrow(&devices[0], std::ptr::without_provenance_mut(0x1230)).unwrap_err();
    assert_says(&error, &["aclrtStreamQuery failed on device 0", "107017"]);
    let acl = ascend_sys::load::acl().unwrap();
    set_device(1);
    let mut stream = std::ptr::null_mut();
    let create = function!(acl, aclrtCreateStream).unwrap();
    // SAFETY:
    // * The pointer is to a live pointer, and the thread has a device.
    assert_eq!(unsafe { create(&raw mut stream) }, 0);
    assert_says(&borrow(&devices[0], stream).unwrap_err(), &["on device 0", "107003"]);
    let host = Machine::host().unwrap().devices().remove(0);
    assert!(matches!(borrow(&host, stream).unwrap_err(), Error::Unavailable { .. }));
}

#[test]
fn own_pages_are_registered() {
    run("registered", &[(EXPECTED, "aclrtHostRegisterV2")]);
    // What 8.1.RC1 has.
    run_without(&simulator::NOT_IN_8_1_RC1, "registered", &[(EXPECTED, "aclrtHostRegister")]);
    // A driver that knows the older call only.
    run(
        "registered",
        &[("ASCEND_SIM_FAULTS", "aclrtHostRegisterV2:*:207000"), (EXPECTED, "aclrtHostRegister")],
    );
}

fn registered() {
    let machine = Machine::ascend().unwrap();
    let device = machine.devices().remove(2);
    let stream = Stream::new(&device).unwrap();
    for bytes in [1, 4096, (1 << 20) + 3] {
        let size = ByteSize(bytes);
        let mut source = HostBuffer::new(&machine, size, HostMemory::Registered).unwrap();
        let mut back = HostBuffer::new(&machine, size, HostMemory::Registered).unwrap();
        assert_eq!((source.pinned(), source.refused()), (Pinned::Registered, None));
        assert_eq!((source.requested(), source.len() as u64), (HostMemory::Registered, bytes));
        assert!(source.page_nodes().is_none_or(|nodes| nodes.values().sum::<u32>() > 0));
        assert_eq!(count("registrations"), 2);
        let mut target = DeviceBuffer::new(&device, size).unwrap();
        let tags = TagPattern::full(bytes, size);
        source.write_tags(&tags).unwrap();
        let before = ["aclrtMemcpy", "aclrtMemcpyAsync"].map(count);
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
        copy.issue().unwrap();
        copy.wait().unwrap();
        drop(copy);
        let mut copy = Transfer::to_host(&stream, &target, &mut back, size, BOUND).unwrap();
        copy.issue().unwrap();
        copy.wait().unwrap();
        drop(copy);
        // Not the synchronous way of pageable memory.
        let after = ["aclrtMemcpy", "aclrtMemcpyAsync"].map(count);
        assert_eq!(after, [before[0], before[1] + 2]);
        assert!(back.check_tags(&tags).unwrap());
    }
    assert!(expected().iter().all(|call| count(call) >= 6));
    assert_eq!((count("registrations"), count("host_allocations")), (0, 0));
    assert_eq!(count("violations"), 0);
}

#[test]
fn pages_that_cannot_be_registered_are_page_locked_or_pageable_and_say_why() {
    // An old kernel below a toolkit that lets it decide.
    let refused = "aclrtHostRegister failed|code 207000|aclrtMallocHost";
    run("not_registered", &[("ASCEND_SIM_HOST_REGISTER", "0"), (EXPECTED, refused)]);
    let symbols = ["aclrtHostRegister", "aclrtHostRegisterV2"];
    run_without(&symbols, "not_registered", &[(EXPECTED, "has no aclrtHostRegister")]);
    // What could not be undone is not begun.
    let symbols = ["aclrtHostUnregister"];
    run_without(&symbols, "not_registered", &[(EXPECTED, "has no aclrtHostUnregister")]);
    run(
        "not_registered",
        &[
            ("ASCEND_SIM_HOST_REGISTER", "0"),
            ("ASCEND_SIM_FAULTS", "aclrtMallocHost:*:207001"),
            (EXPECTED, "aclrtHostRegister failed|aclrtMallocHost failed|207001"),
        ],
    );
}

fn not_registered() {
    let machine = Machine::ascend().unwrap();
    let mut buffer = HostBuffer::new(&machine, ByteSize::mib(1), HostMemory::Registered).unwrap();
    let refused = buffer.refused().unwrap().to_owned();
    for words in expected() {
        assert!(refused.contains(&words), "'{words}' is not in '{refused}'");
    }
    let locked = !refused.contains("aclrtMallocHost failed");
    assert_eq!(buffer.pinned(), if locked { Pinned::Pinned } else { Pinned::Pageable });
    buffer.bytes_mut().unwrap().fill(7);
    drop(buffer);
    assert_eq!((count("registrations"), count("host_allocations")), (0, 0));
}

#[test]
fn pages_that_are_not_given_back_stay_where_they_are() {
    run("not_given_back", &[("ASCEND_SIM_FAULTS", "aclrtHostUnregister:1:507899")]);
}

fn not_given_back() {
    let machine = Machine::ascend().unwrap();
    let new = || HostBuffer::new(&machine, ByteSize::kib(64), HostMemory::Registered).unwrap();
    let first = new();
    let address = first.bytes().unwrap().as_ptr();
    drop(first);
    assert_eq!(count("registrations"), 1);
    let second = new();
    assert_ne!(second.bytes().unwrap().as_ptr(), address, "pages in use were given away");
    assert_eq!(second.pinned(), Pinned::Registered);
}

/// Whether a copy of whole buffers on this stream arrives.
fn copy_between(stream: &Stream, from: &Device, to: &Device) -> Result<bool, Error> {
    let size = ByteSize(70_001);
    let bytes = pattern(usize::try_from(from.id().0).unwrap(), 70_001);
    let source = filled(from, &bytes);
    let mut target = filled(to, &vec![0xEE; 70_001]);
    let mut copy = Transfer::between_devices(stream, &source, &mut target, size, BOUND)?;
    copy.issue()?;
    copy.wait()?;
    drop(copy);
    Ok(content(&target) == bytes)
}

#[test]
fn copies_between_devices_arrive() {
    run("between_devices", &[("ASCEND_SIM_PHY", "7,6,5,4")]);
}

fn between_devices() {
    let devices = devices();
    let streams: Vec<Stream> = devices.iter().map(|device| Stream::new(device).unwrap()).collect();
    for _ in 0..2 {
        assert!(copy_between(&streams[0], &devices[0], &devices[0]).unwrap());
        for (from, to) in [(0, 1), (1, 0), (2, 1)] {
            // On either side's stream, and from another thread.
            assert!(copy_between(&streams[from], &devices[from], &devices[to]).unwrap());
            thread::scope(|scope| {
                scope.spawn(|| {
                    assert!(copy_between(&streams[to], &devices[from], &devices[to]).unwrap());
                });
            });
        }
    }
    // Two pairs, both directions, once each.
    assert_eq!(count("aclrtDeviceEnablePeerAccess"), 4);
    let error = copy_between(&streams[3], &devices[0], &devices[1]).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert_says(&error, &["device 4", "device 7", "device 6"]);
    assert_eq!(count("violations"), 0);

    let host = Machine::host().unwrap().devices().remove(0);
    let stream = Stream::new(&host).unwrap();
    assert!(copy_between(&stream, &host, &host).unwrap());
    copy_between(&stream, &devices[0], &host).unwrap_err();
    let scenario = Scenario::parse("[machine]\ncpus = 2\nnuma_nodes = 1\ndevices = 1\n", "test");
    let device = Machine::synthetic(scenario.unwrap()).unwrap().devices().remove(0);
    let (stream, size) = (Stream::new(&device).unwrap(), ByteSize::kib(64));
    let source = DeviceBuffer::new(&device, size).unwrap();
    let mut target = DeviceBuffer::new(&device, size).unwrap();
    let copy = Transfer::between_devices(&stream, &source, &mut target, size, BOUND);
    let error = copy.unwrap().issue().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

#[test]
fn devices_that_cannot_reach_each_other_are_both_named() {
    let phy = ("ASCEND_SIM_PHY", "7,6,5,4");
    for (variable, value, words) in [
        ("ASCEND_SIM_NO_PEER", "0-1", "device 7|device 6|cannot reach"),
        (
            "ASCEND_SIM_FAULTS",
            "aclrtDeviceEnablePeerAccess:1:507899",
            "aclrtDeviceEnablePeerAccess failed on device 7|between device 7 and device 6",
        ),
        (
            "ASCEND_SIM_FAULTS",
            "aclrtMemcpyAsync:1:507013",
            "aclrtMemcpyAsync failed on device 7|between device 7 and device 6",
        ),
    ] {
        run("no_peer", &[phy, (variable, value), (EXPECTED, words)]);
    }
}

fn no_peer() {
    let devices = devices();
    let streams = [0, 2].map(|index| Stream::new(&devices[index]).unwrap());
    let error = copy_between(&streams[0], &devices[0], &devices[1]).unwrap_err();
    assert_says(&error, &expected());
    // The others still work.
    assert!(copy_between(&streams[1], &devices[2], &devices[3]).unwrap());
}

#[test]
fn access_that_another_user_enabled_is_no_error() {
    run("enabled_before", &[("ASCEND_SIM_PEER_REPEAT", "507899"), (EXPECTED, "works")]);
    // An older release does not tell whether it is enabled.
    run_without(
        &["aclrtDevicePeerAccessStatus"],
        "enabled_before",
        &[("ASCEND_SIM_PEER_REPEAT", "507899"), (EXPECTED, "device 0|device 1|507899")],
    );
}

fn enabled_before() {
    let devices = devices();
    let stream = Stream::new(&devices[0]).unwrap();
    let enable = function!(ascend_sys::load::acl().unwrap(), aclrtDeviceEnablePeerAccess).unwrap();
    for (user, peer) in [(0, 1), (1, 0)] {
        set_device(user);
        // SAFETY:
        // * The call takes integers.
        assert_eq!(unsafe { enable(peer, 0) }, 0);
    }
    match copy_between(&stream, &devices[0], &devices[1]) {
        Ok(arrived) => assert_eq!((arrived, expected()), (true, vec!["works".to_owned()])),
        Err(error) => assert_says(&error, &expected()),
    }
}

#[test]
fn batches_are_as_long_as_the_clock_is_coarse() {
    // 100 µs per copy: 50 ticks of 1 ms are 500 copies, longer than any stall of a busy machine;
    // 50 of 20 ns are less than one.
    let links = ("ASCEND_SIM_LINKS", "h2d,us=100");
    run("clock", &[links, ("ASCEND_SIM_TICK_NS", "1000000"), (EXPECTED, "1000000|batch")]);
    run("clock", &[links, ("ASCEND_SIM_TICK_NS", "20"), (EXPECTED, "20|single")]);
    // In virtual time two intervals never differ.
    run("clock", &[links, ("ASCEND_SIM_VIRTUAL", "1"), (EXPECTED, "none|single")]);
}

fn clock() {
    let machine = Machine::ascend().unwrap();
    let device = machine.devices().remove(0);
    let size = ByteSize::kib(4);
    let stream = Stream::new(&device).unwrap();
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(&device, size).unwrap();
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
    let mut timer = EventTimer::new(&stream, BOUND).unwrap();
    let [tick, kind] = &*expected() else { panic!("two words") };
    match tick.parse::<f64>() {
        Err(_) => assert_eq!(timer.resolution_ns(), None),
        // Of fine clocks not every step is seen; none is finer than the clock.
        Ok(tick) => {
            let found = timer.resolution_ns().unwrap();
            assert!(found > 0.99 * tick && found < 10.0 * tick.max(100.0), "{found} ns");
        }
    }
    assert!(timer.choose(|timer| timer.time(&mut copy)).unwrap());
    let before = count("aclrtMemcpyAsync");
    let time = timer.time(&mut copy).unwrap();
    let copies = count("aclrtMemcpyAsync") - before;
    assert_eq!(copies, u64::from(timer.batch()));
    // Each copy occupies the stream for so long at least; one tick in fifty may be lost.
    assert!(time > 97_000.0, "{time} ns");
    match kind.as_str() {
        "single" => assert_eq!(copies, 1),
        _ => assert!((2..=1000).contains(&copies), "{copies} copies"),
    }
}

#[test]
fn clock_that_no_batch_helps_is_left_to_the_host() {
    run("hopeless_clock", &[("ASCEND_SIM_TICK_NS", "10000000")]);
}

fn hopeless_clock() {
    let device = devices().remove(0);
    let stream = Stream::new(&device).unwrap();
    let mut timer = EventTimer::new(&stream, BOUND).unwrap();
    assert!(timer.resolution_ns().unwrap() > 9e6, "{timer:?}");
    // An operation of a microsecond, as that clock sees a batch of it.
    let mut batches = Vec::new();
    let found = timer.choose(|timer| {
        batches.push(timer.batch());
        Ok::<_, Error>(0.0)
    });
    assert!(!found.unwrap());
    assert!(batches.is_sorted() && batches.len() < 16, "{batches:?}");
    assert_eq!((batches[0], timer.batch()), (1, 1));
}

/// Every optional function of the runtime, each missing alone, then all that 8.1.RC1 lacks.
#[test]
fn release_without_an_optional_function_works() {
    let folder = TempDir::new().unwrap();
    simulator::install(folder.path(), &simulator::LIBRARIES);
    let search = ascend_sys::load::Search::in_folder(folder.path());
    let acl = ascend_sys::load::Acl::load(&search).unwrap();
    let optional: Vec<&str> = acl
        .symbols()
        .filter(|(symbol, _)| !symbol.required)
        .map(|(symbol, found)| {
            assert!(found, "the simulator lacks {}", symbol.name);
            symbol.name
        })
        .collect();
    assert!(optional.contains(&"aclrtMemcpy2d") && optional.len() > 20, "{optional:?}");
    for name in &optional {
        run_without(&[name], "everything", &[]);
    }
    run_without(&optional, "everything", &[]);
    run_without(&["aclrtMalloc", "aclrtFree"], "required", &[]);
}

fn everything() {
    let machine = Machine::ascend().unwrap();
    let devices = machine.devices();
    assert_eq!(devices.len(), 4);
    let size = ByteSize((4 << 20) + 3);
    let stream = Stream::new(&devices[0]).unwrap();
    for memory in [HostMemory::PageLocked, HostMemory::Registered, HostMemory::Pageable] {
        let mut source = HostBuffer::new(&machine, size, memory).unwrap();
        let mut target = DeviceBuffer::new(&devices[0], size).unwrap();
        let [sparse, full] = [TagPattern::sparse(3, size), TagPattern::full(4, size)];
        for tags in [sparse, full] {
            source.write_tags(&tags).unwrap();
            let mut timer = EventTimer::new(&stream, BOUND).unwrap();
            let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
            assert!(timer.time(&mut copy).unwrap() >= 0.0);
            drop(copy);
            assert!(target.check_tags(&tags).unwrap());
        }
        target.write_tags(&sparse).unwrap();
        assert!(target.check_tags(&sparse).unwrap());
        assert!(!target.check_tags(&full).unwrap());
    }
    assert!(copy_between(&stream, &devices[0], &devices[1]).unwrap());
    let (free, total) = devices[0].memory().unwrap().unwrap();
    assert!(free < total && total == ByteSize(64 << 30), "{free} of {total}");
    let mut event = Event::new(&devices[3]).unwrap();
    event.record(&Stream::new(&devices[3]).unwrap()).unwrap();
    drop(event);
    assert_eq!(machine.device_activity().len(), 4);
    assert!(machine.ascend_software().is_some());
}

fn required() {
    let error = Machine::ascend().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert_says(&error, &["aclrtMalloc, aclrtFree", "8.1.RC1"]);
}

#[test]
fn device_that_a_host_program_changes_is_noticed() {
    run("device_changed", &[]);
}

fn device_changed() {
    let machine = Machine::ascend().unwrap();
    let devices = machine.devices();
    let size = ByteSize::kib(64);
    for memory in [HostMemory::PageLocked, HostMemory::Pageable] {
        let stream = Stream::new(&devices[0]).unwrap();
        let mut source = HostBuffer::new(&machine, size, memory).unwrap();
        let mut target = DeviceBuffer::new(&devices[0], size).unwrap();
        let tags = TagPattern::full(3, size);
        source.write_tags(&tags).unwrap();
        let mut events = [Event::new(&devices[0]).unwrap(), Event::new(&devices[0]).unwrap()];
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
        for _ in 0..3 {
            set_device(1);
            events[0].record(&stream).unwrap();
            set_device(2);
            copy.issue().unwrap();
            set_device(1);
            events[1].record(&stream).unwrap();
            set_device(3);
            copy.wait().unwrap();
            set_device(2);
            assert!(events[1].nanoseconds_since(&events[0]).unwrap() >= 0.0);
        }
        drop(copy);
        set_device(1);
        assert!(target.check_tags(&tags).unwrap());
        set_device(1);
        drop((source, target, stream, events));
    }
    let pairs = Communicator::of_threads(&devices[..2], BOUND).unwrap();
    thread::scope(|scope| {
        for (mut communicator, device) in pairs.into_iter().zip(&devices) {
            scope.spawn(move || {
                let stream = Stream::new(device).unwrap();
                for _ in 0..3 {
                    set_device(3);
                    gather(&mut communicator, &stream, 1000);
                    set_device(2);
                    communicator.barrier().unwrap();
                }
                set_device(3);
            });
        }
    });
    for kind in ["device_allocations", "host_allocations", "streams", "events", "comms"] {
        assert_eq!(count(kind), 0, "{kind}");
    }
    assert_eq!(count("violations"), 0);

    // Nobody pays for it where nothing changes: no timed call asks for the device.
    let stream = Stream::new(&devices[0]).unwrap();
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(&devices[0], size).unwrap();
    let mut event = Event::new(&devices[0]).unwrap();
    set_device(1);
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
    let before = ["aclrtGetDevice", "aclrtSetDevice"].map(count);
    let begun = count("aclrtMemcpyAsync");
    for _ in 0..50 {
        event.record(&stream).unwrap();
        copy.issue().unwrap();
        copy.wait().unwrap();
    }
    assert_eq!(["aclrtGetDevice", "aclrtSetDevice"].map(count), before);
    // The preparation had looked, so no call had to be made twice either.
    assert_eq!(count("aclrtMemcpyAsync") - begun, 50);
}

#[test]
fn free_memory_of_a_device_is_told() {
    run("memory", &[("ASCEND_SIM_HBM", "1G"), ("ASCEND_SIM_HBM_USED", "256M")]);
}

fn memory() {
    let device = devices().remove(1);
    assert_eq!(device.id(), DeviceId(1));
    let mib = |(free, total): (ByteSize, ByteSize)| (free.bytes() >> 20, total.bytes() >> 20);
    assert_eq!(device.memory().unwrap().map(mib), Some((768, 1024)));
    let buffer = DeviceBuffer::new(&device, ByteSize::mib(512)).unwrap();
    // The allocation takes a few bytes more than it has.
    assert_eq!(device.memory().unwrap().map(mib), Some((255, 1024)));
    drop(buffer);
    assert_eq!(device.memory().unwrap().map(mib), Some((768, 1024)));
    assert_eq!(Machine::host().unwrap().devices()[0].memory().unwrap(), None);
}
