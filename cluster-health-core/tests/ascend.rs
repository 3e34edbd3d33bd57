//! The Ascend backend against the simulator that cargo builds beside this test, or against the
//! libraries in the folder that `CLUSTER_HEALTH_ASCEND_LIB_DIR` names.
//!
//! A library is opened once per process and its settings are environment variables, so every case
//! runs in a process of its own: this executable again, with the case's name.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a failed expectation ends a test")]

#[path = "../../tests/ascend-sim/support.rs"]
mod support;

#[path = "ascend/codes.rs"]
mod codes;
#[path = "ascend/sequences.rs"]
mod sequences;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cluster_health_core::load::{LoadGenerator, LoadProfile};
use cluster_health_core::{
    AscendInventory, BackendKind, ByteSize, DeviceBuffer, DeviceId, Error, Event, HostBuffer,
    HostMemory, Machine, Pinned, Stream, TagPattern, Transfer,
};

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
const CASE: &str = "ASCEND_TEST_CASE";
/// What a case is to find.
const EXPECTED: &str = "ASCEND_TEST_EXPECTED";
/// A program that runs the cases, for example a memory checker, with its arguments.
const RUNNER: &str = "ASCEND_TEST_RUNNER";
const BOUND: Duration = Duration::from_secs(30);

/// Runs a case in a new process with these variables.
fn run(case: &str, variables: &[(&str, &str)]) {
    let output = child(case, variables);
    assert!(
        output.status.success(),
        "{case}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{case} did not run");
}

/// The folder with the libraries.
fn folder() -> PathBuf {
    static INSTALLED: OnceLock<tempfile::TempDir> = OnceLock::new();
    if let Some(folder) = std::env::var_os(FOLDER) {
        return folder.into();
    }
    let folder = INSTALLED.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        support::install(folder.path(), &support::LIBRARIES);
        folder
    });
    folder.path().to_owned()
}

fn child(case: &str, variables: &[(&str, &str)]) -> Output {
    let this = std::env::current_exe().unwrap();
    let runner = std::env::var(RUNNER).unwrap_or_default();
    let mut words = runner.split_whitespace();
    let mut command = match words.next() {
        None => Command::new(this),
        Some(program) => {
            let mut command = Command::new(program);
            command.args(words).arg(this);
            command
        }
    };
    command
        .args(["--exact", "one_case", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .env(FOLDER, folder())
        .env("ASCEND_SIM_DEVICES", "4")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// What the other tests start.
#[test]
#[ignore = "runs in the processes that the other tests start"]
fn one_case() {
    match std::env::var(CASE).as_deref() {
        Ok("devices") => devices(),
        Ok("copies") => copies(),
        Ok("threads") => threads(),
        Ok("pageable") => pageable(),
        Ok("events") => events(),
        Ok("stall") => stall(),
        Ok("failure") => failure(),
        Ok("unknown_code") => unknown_code(),
        Ok("no_pages") => no_pages(),
        Ok("no_memory") => no_memory(),
        Ok("unusable") => unusable(),
        Ok("corrupt") => corrupt(),
        Ok("codes") => codes::codes(),
        Ok("initialised_before") => codes::initialised_before(),
        Ok("sequences") => sequences::sequences(),
        Ok("activity") => activity(),
        Ok("generation") => generation(),
        Ok("hang") => hang(),
        Ok("hung_start") => hung_start(),
        Ok("others") => others(),
        Ok("inventory") => inventory(),
        Ok("no_management") => no_management(),
        Ok("stub") => stub(),
        Ok("load") => load(),
        Ok("load_fails") => load_fails(),
        other => panic!("no case {other:?}"),
    }
}

fn machine() -> Machine {
    Machine::ascend().unwrap()
}

#[test]
fn columns_are_physical_ids_in_the_order_of_the_runtime() {
    run(
        "devices",
        &[
            ("ASCEND_SIM_PHY", "3,5,0,7"),
            ("ASCEND_SIM_SOC", "Ascend910B3"),
            ("ASCEND_RT_VISIBLE_DEVICES", "1,2"),
            (EXPECTED, "5,0"),
        ],
    );
}

#[test]
fn older_toolkit_has_the_ids_of_the_variable() {
    let folder = folder();
    // Without its name a symbol is not found.
    let name = b"\0aclrtGetPhyDevIdByUserDevId\0";
    let mut library = std::fs::read(folder.join("libascendcl.so")).unwrap();
    let places: Vec<_> = (0..library.len() - name.len())
        .filter(|place| library[*place..].starts_with(name))
        .collect();
    assert!(!places.is_empty());
    for place in places {
        library[place + 1] = b'_';
    }
    let older = tempfile::tempdir().unwrap();
    std::fs::write(older.path().join("libascendcl.so"), library).unwrap();
    run(
        "devices",
        &[
            (FOLDER, older.path().to_str().unwrap()),
            ("ASCEND_RT_VISIBLE_DEVICES", "1,3"),
            (EXPECTED, "1,3"),
        ],
    );
}

fn devices() {
    let machine = machine();
    assert_eq!(machine.backend(), BackendKind::Ascend);
    let devices = machine.devices();
    let ids: Vec<_> = devices.iter().map(|device| device.id().to_string()).collect();
    assert_eq!(ids.join(","), std::env::var(EXPECTED).unwrap());
    assert_eq!(devices[0].info().runtime_id, 0);
    assert_eq!(devices[1].info().runtime_id, 1);
    assert_eq!(devices[0].info().name, "Ascend910B3");
    assert!(machine.has_device_events());
    assert_eq!(Machine::ascend_status(), None);
    assert_eq!(Machine::detect().unwrap().backend(), BackendKind::Ascend);
    drop(Stream::new(&devices[1]).unwrap());
}

#[test]
fn other_processes_are_found_on_the_physical_device() {
    run(
        "activity",
        &[
            ("ASCEND_SIM_DEVICES", "4"),
            ("ASCEND_SIM_PHY", "3,5,0,7"),
            ("ASCEND_SIM_CHIPS_PER_CARD", "2"),
            ("ASCEND_RT_VISIBLE_DEVICES", "1,2"),
            ("ASCEND_SIM_PROCESSES", "5=999999999:1G,5=999999998:3M,3=77:1K"),
            ("ASCEND_SIM_HEALTH", "0=2"),
            ("ASCEND_SIM_UTILIZATION", "5=64"),
            ("ASCEND_SIM_HBM", "32G"),
            ("ASCEND_SIM_HBM_USED", "3G"),
        ],
    );
}

fn activity() {
    let machine = machine();
    let activity = machine.device_activity();
    let [five, zero] = activity.as_slice() else { panic!("{activity:?}") };
    assert_eq!((five.device, zero.device), (5, 0));
    let found: Vec<_> = five.processes.as_ref().unwrap().iter().collect();
    let found: Vec<_> = found.iter().map(|process| (process.pid, process.memory_bytes)).collect();
    assert_eq!(found, [(999_999_999, 1 << 30), (999_999_998, 3 << 20)]);
    assert_eq!((five.health, zero.health), (Some(0), Some(2)));
    assert_eq!((five.utilisation_percent, zero.utilisation_percent), (Some(64), Some(0)));
    assert_eq!((five.memory_used_bytes, five.memory_bytes), (Some(3 << 30), Some(32 << 30)));
    assert_eq!(
        five.disturbances(),
        ["other processes on device 5: 999999999 (1024 MiB), 999999998 (3 MiB)"]
    );
    assert_eq!(zero.disturbances(), ["device 0 reports health 2: a major alarm"]);

    // What this process does there is no news.
    let device = machine.device(DeviceId(0)).unwrap();
    let buffer = DeviceBuffer::new(&device, ByteSize::mib(64)).unwrap();
    let after = machine.device_activity();
    assert_eq!(after[1].processes.as_deref(), Some([].as_slice()));
    assert_eq!(after[1].memory_used_bytes, Some((3 << 30) + (64 << 20)));
    drop(buffer);
}

/// The same questions, whatever the driver calls its functions.
#[test]
fn activity_is_known_where_a_driver_lacks_functions() {
    let chips = ["Ascend910B3", "Ascend950PR"];
    // Chips of the one generation do not answer to the names of the other.
    let cases: [(&[&str], [bool; 2]); 5] = [
        (&["dcmi_get_card_id_device_id_from_phyid"], [true, true]),
        (
            &["dcmi_get_card_id_device_id_from_phyid", "dcmi_get_device_logicid_from_phyid"],
            [false, true],
        ),
        (&["dcmi_init"], [false, true]),
        (&["dcmiv2_get_dev_id_by_chip_phy_id"], [true, true]),
        (&["dcmiv2_init"], [true, false]),
    ];
    for (names, known) in cases {
        let folder = tempfile::tempdir().unwrap();
        let file = support::install(folder.path(), &["libascendcl.so", "libdcmi.so"]);
        support::remove_symbols(&file, names);
        for (soc, known) in chips.into_iter().zip(known) {
            run(
                "generation",
                &[
                    (FOLDER, folder.path().to_str().unwrap()),
                    ("ASCEND_SIM_SOC", soc),
                    ("ASCEND_SIM_PHY", "3,5,0,7"),
                    ("ASCEND_RT_VISIBLE_DEVICES", "1,2"),
                    ("ASCEND_SIM_PROCESSES", "5=999999999:1G"),
                    ("ASCEND_SIM_HEALTH", "0=1"),
                    ("ASCEND_SIM_UTILIZATION", "5=64"),
                    (EXPECTED, if known { "known" } else { "unknown" }),
                ],
            );
        }
    }
}

fn generation() {
    let machine = machine();
    let activity = machine.device_activity();
    let [five, zero] = activity.as_slice() else { panic!("{activity:?}") };
    if std::env::var(EXPECTED).unwrap() == "unknown" {
        assert_eq!((five.health, &five.processes), (None, &None));
        return assert!(!five.failures.is_empty(), "{five:?}");
    }
    assert_eq!((five.device, zero.device), (5, 0));
    assert_eq!(five.processes.as_ref().unwrap()[0].pid, 999_999_999);
    assert_eq!((five.health, zero.health), (Some(0), Some(1)));
    assert_eq!((five.utilisation_percent, zero.utilisation_percent), (Some(64), Some(0)));
    assert_eq!((five.memory_used_bytes, five.memory_bytes), (Some(3 << 30), Some(64 << 30)));
    assert!(five.failures.is_empty() && zero.failures.is_empty(), "{activity:?}");
    let software = machine.ascend_software().unwrap();
    assert_eq!(software.driver.as_deref(), Some("25.0.rc1"));
    // By cards of the first generation, by logic ids of the second.
    let second = machine.devices()[0].info().name.starts_with("Ascend950");
    let cards = if second { [0, 1, 2, 3] } else { [0, 3, 5, 7] };
    assert_eq!(AscendInventory::take().cards, cards.map(|card| [card, 1]));
}

#[test]
fn management_call_that_hangs_is_unknown_by_name_and_asked_once() {
    run("hang", &[("ASCEND_SIM_FAULTS", "dcmi_get_device_health:2:hang")]);
}

fn hang() {
    let machine = machine();
    let start = Instant::now();
    let activity = machine.device_activity();
    let first = start.elapsed();
    for (device, answers) in activity.iter().zip([true, false, true, true]) {
        assert!(device.processes.is_some(), "{device:?}");
        assert_eq!(device.health.is_some(), answers, "{device:?}");
        assert_eq!(device.memory_bytes.is_some(), answers, "{device:?}");
        assert_eq!(device.failures.is_empty(), answers, "{device:?}");
    }
    let [health, utilisation, memory] = activity[1].failures.as_slice() else { panic!() };
    assert_eq!((health.call.as_str(), health.code), ("dcmi_get_device_health", None));
    assert_eq!(health.device, Some(1));
    assert!(health.message.contains("has not returned for"), "{health:?}");
    for later in [utilisation, memory] {
        assert!(later.message.contains("dcmi_get_device_health has not returned"), "{later:?}");
    }
    // It is not waited for again; what hangs is left behind when this process ends.
    let start = Instant::now();
    let again = machine.device_activity();
    assert!(start.elapsed() * 2 < first, "{:?} after {first:?}", start.elapsed());
    assert_eq!((again[1].health, again[0].health), (None, Some(0)));
}

#[test]
fn start_of_the_management_that_hangs_leaves_all_unknown() {
    run("hung_start", &[("ASCEND_SIM_FAULTS", "dcmi_init:1:hang")]);
}

fn hung_start() {
    let activity = machine().device_activity();
    assert_eq!(activity.len(), 4);
    for device in activity {
        assert_eq!(device.health, None);
        assert!(device.failures[0].message.contains("dcmi_init"), "{device:?}");
        assert!(device.failures[0].message.contains("has not returned"), "{device:?}");
    }
}

#[test]
fn ranks_that_a_launcher_started_beside_this_one_are_no_others() {
    let torchrun = |rank, job| [("RANK", rank), ("WORLD_SIZE", "3"), ("TORCHELASTIC_RUN_ID", job)];
    let idle = |variables: &[(&str, &str)]| {
        let mut command = Command::new("sleep");
        command.arg("60").envs(variables.iter().copied());
        command.spawn().unwrap()
    };
    let mut idle = [
        idle(&torchrun("1", "ours")),
        idle(&torchrun("1", "theirs")),
        idle(&torchrun("2", "ours")),
        idle(&[]),
    ];
    let on = |child: &std::process::Child| format!("0={}:1M", child.id());
    let processes = idle.iter().map(on).collect::<Vec<_>>().join(",");
    let others = format!("{},{}", idle[1].id(), idle[3].id());
    let mut variables = torchrun("0", "ours").to_vec();
    variables.extend([("ASCEND_SIM_PROCESSES", &*processes), (EXPECTED, &*others)]);
    let ran = child("others", &variables);
    for process in &mut idle {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

fn others() {
    let activity = machine().device_activity();
    let found = activity[0].processes.as_ref().unwrap().iter();
    let found: Vec<_> = found.map(|process| process.pid.to_string()).collect();
    assert_eq!(found.join(","), std::env::var(EXPECTED).unwrap());
}

#[test]
fn without_management_interface_activity_is_unknown() {
    let folder = tempfile::tempdir().unwrap();
    support::install(folder.path(), &["libascendcl.so"]);
    run("no_management", &[(FOLDER, folder.path().to_str().unwrap())]);
}

fn no_management() {
    let activity = machine().device_activity();
    assert_eq!(activity.len(), 4);
    for device in activity {
        assert_eq!((device.processes.as_ref(), device.health), (None, None));
        assert!(device.disturbances().is_empty());
        assert!(device.failures[0].message.contains("libdcmi.so"), "{device:?}");
        assert_eq!(device.failures[0].code, None);
    }
    let software = machine().ascend_software().unwrap();
    assert_eq!((software.driver, software.runtime.as_deref()), (None, Some("1.17.0")));
    let inventory = AscendInventory::take();
    assert_eq!(inventory.devices.len(), 4);
    assert_eq!(inventory.libraries[0].problem, None);
    assert!(inventory.libraries[2].problem.as_deref().unwrap().contains("libdcmi.so"));
}

#[test]
fn inventory_of_what_lacks_symbols_has_versions_and_codes() {
    let folder = tempfile::tempdir().unwrap();
    let file = support::install(folder.path(), &["libascendcl.so", "libdcmi.so"]);
    support::remove_symbols(&file, &support::NOT_IN_8_1_RC1);
    run(
        "inventory",
        &[
            (FOLDER, folder.path().to_str().unwrap()),
            ("ASCEND_SIM_VERSION", "1.8.2"),
            ("ASCEND_SIM_DRIVER", "24.1.rc3"),
            ("ASCEND_SIM_SOC", "Ascend910B1"),
        ],
    );
}

fn inventory() {
    let inventory = AscendInventory::take();
    let software = &inventory.software;
    assert_eq!(software.driver.as_deref(), Some("24.1.rc3"));
    assert_eq!(software.runtime.as_deref(), Some("1.8.2"));
    assert_eq!(software.soc.as_deref(), Some("Ascend910B1"));
    assert_eq!(software.packages["toolkit"], "1.8.2");
    assert!(software.libraries["libdcmi.so"].starts_with(std::env::var(FOLDER).unwrap()));
    let [acl, hccl, dcmi, aclnn] = inventory.libraries.as_slice() else { panic!() };
    assert!(acl.missing.contains(&"aclrtGetPhyDevIdByUserDevId".to_owned()), "{acl:?}");
    assert!(acl.found.contains(&"aclrtMemcpyAsync".to_owned()));
    assert!(dcmi.missing.iter().all(|name| name.starts_with("dcmiv2_")), "{dcmi:?}");
    assert_eq!((dcmi.missing.len(), &dcmi.problem), (9, &None));
    for absent in [hccl, aclnn] {
        assert!(absent.paths.is_empty() && !absent.tried.is_empty(), "{absent:?}");
    }
    assert_eq!(inventory.devices.len(), 4);
    assert_eq!(inventory.devices[3].physical_id, None);
    assert_eq!(inventory.cards, [[0, 1], [1, 1], [2, 1], [3, 1]]);
    let calls: Vec<_> = inventory.failures.iter().map(|failure| failure.call.as_str()).collect();
    assert!(calls.contains(&"aclrtGetPhyDevIdByUserDevId"), "{calls:?}");
    // Two functions of the older release, on four devices; everything else it answers.
    assert_eq!(calls.len(), 8, "{calls:?}");
}

#[test]
fn inventory_of_a_stub_has_its_code() {
    run("stub", &[("ASCEND_SIM_STUB", "1")]);
}

fn stub() {
    let inventory = AscendInventory::take();
    assert!(inventory.devices.is_empty());
    let failure = &inventory.failures[0];
    assert_eq!(failure.code, Some(100_039), "{failure:?}");
}

#[test]
fn copies_arrive_in_both_directions() {
    run("copies", &[]);
}

fn copies() {
    let machine = machine();
    for device in machine.devices() {
        for bytes in [1, 8, 100, 4096, 65_537, (4 << 20) + 3] {
            let size = ByteSize(bytes);
            let mut source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
            assert_eq!(source.pinned(), Pinned::Pinned);
            assert!(source.bytes().unwrap().iter().all(|byte| *byte == 0));
            let mut back = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
            let mut target = DeviceBuffer::new(&device, size).unwrap();
            let stream = Stream::new(&device).unwrap();
            let byte = |index: u64| u8::try_from((index * 7 + bytes) % 251).unwrap();
            for (place, index) in source.bytes_mut().unwrap().iter_mut().zip(0..) {
                *place = byte(index);
            }
            let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
            copy.issue().unwrap();
            copy.wait().unwrap();
            drop(copy);
            let mut copy = Transfer::to_host(&stream, &target, &mut back, size, BOUND).unwrap();
            copy.issue().unwrap();
            copy.wait().unwrap();
            drop(copy);
            assert!(back.bytes().unwrap().iter().zip(0..).all(|(b, index)| *b == byte(index)));

            // Tags written on either side are what plain reads and the other side's check find.
            for make in [TagPattern::sparse, TagPattern::full] {
                let (pattern, other) = (make(bytes, size), make(bytes + 1, size));
                source.write_tags(&pattern).unwrap();
                let expected = source.bytes().unwrap().to_vec();
                target.write(0, &vec![0x5a; expected.len()]).unwrap();
                assert!(!target.check_tags(&pattern).unwrap());
                target.write(0, &expected).unwrap();
                assert!(target.check_tags(&pattern).unwrap());
                assert!(!target.check_tags(&other).unwrap());
                target.write_tags(&other).unwrap();
                assert!(target.check_tags(&other).unwrap());
                source.write_tags(&other).unwrap();
                let mut found = vec![0; expected.len()];
                target.read(0, &mut found).unwrap();
                assert_eq!(found, source.bytes().unwrap());
            }
        }
    }
}

#[test]
fn types_work_from_any_thread() {
    run("threads", &[]);
}

fn threads() {
    let machine = machine();
    let devices = machine.devices();
    let size = ByteSize::mib(1);
    let stream = Stream::new(&devices[1]).unwrap();
    let mut target = DeviceBuffer::new(&devices[1], size).unwrap();
    let mut source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    // The last device of this thread is another one now.
    let elsewhere = DeviceBuffer::new(&devices[2], size).unwrap();
    let tags = TagPattern::sparse(3, size);
    source.write_tags(&tags).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut before = Event::new(&devices[1]).unwrap();
            let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
            before.record(&stream).unwrap();
            copy.issue().unwrap();
            copy.wait().unwrap();
            drop(copy);
            assert!(target.check_tags(&tags).unwrap());
            drop(elsewhere);
        });
    });
    assert!(target.check_tags(&tags).unwrap());
    let moved = std::thread::spawn(move || drop((stream, target, source)));
    moved.join().unwrap();
}

#[test]
fn pageable_memory_is_copied_and_says_so() {
    run("pageable", &[]);
}

fn pageable() {
    let machine = machine();
    let device = machine.devices().remove(0);
    let size = ByteSize::mib(1);
    let mut source = HostBuffer::new(&machine, size, HostMemory::Pageable).unwrap();
    assert_eq!(source.pinned(), Pinned::Pageable);
    let mut target = DeviceBuffer::new(&device, size).unwrap();
    let stream = Stream::new(&device).unwrap();
    let tags = TagPattern::full(3, size);
    source.write_tags(&tags).unwrap();
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
    copy.issue().unwrap();
    copy.wait().unwrap();
    drop(copy);
    assert!(target.check_tags(&tags).unwrap());
}

#[test]
fn events_carry_the_time_of_the_device() {
    run("events", &[("ASCEND_SIM_VIRTUAL", "1"), ("ASCEND_SIM_LINKS", "h2d,gbps=10,us=10")]);
}

fn events() {
    let machine = machine();
    let device = machine.devices().remove(3);
    let size = ByteSize(10_000_000);
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(&device, size).unwrap();
    let stream = Stream::new(&device).unwrap();
    let (mut before, mut after) = (Event::new(&device).unwrap(), Event::new(&device).unwrap());
    assert!(after.nanoseconds_since(&before).is_err());
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
    for _ in 0..3 {
        before.record(&stream).unwrap();
        copy.issue().unwrap();
        after.record(&stream).unwrap();
        copy.wait().unwrap();
        // 10 MB at 10 GB/s and 10 µs.
        let time = after.nanoseconds_since(&before).unwrap();
        assert!((time - 1_010_000.0).abs() < 1_000.0, "{time}");
    }
}

#[test]
fn stream_that_stands_still_is_a_timeout_that_names_the_device() {
    run(
        "stall",
        &[("ASCEND_RT_VISIBLE_DEVICES", "2"), ("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync:1:stall")],
    );
}

fn stall() {
    let machine = machine();
    let device = machine.devices().remove(0);
    let size = ByteSize::kib(64);
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(&device, size).unwrap();
    let stream = Stream::new(&device).unwrap();
    let bound = Duration::from_millis(200);
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, bound).unwrap();
    let start = Instant::now();
    copy.issue().unwrap();
    let error = copy.wait().unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(error.kind(), "timeout");
    assert_eq!(error.code(), Some(507_046));
    assert_eq!(error.device(), Some(DeviceId(2)));
    let text = error.to_string();
    assert!(text.contains("aclrtSynchronizeStreamWithTimeout failed on device 2"), "{text}");
    assert!(text.contains("ACL_ERROR_RT_STREAM_SYNC_TIMEOUT"), "{text}");
    // What hangs is left behind instead of waited for again and again.
    drop(copy);
    drop((source, target, stream));
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn failed_call_names_call_code_device_and_advice() {
    run(
        "failure",
        &[
            ("ASCEND_RT_VISIBLE_DEVICES", "1,3"),
            ("ASCEND_SIM_FAULTS", "aclrtCreateEventExWithFlag:1:207003"),
        ],
    );
}

fn failure() {
    let machine = machine();
    let device = machine.devices().remove(1);
    let error = Event::new(&device).unwrap_err();
    assert_eq!(error.kind(), "backend");
    assert_eq!(error.call(), Some("aclrtCreateEventExWithFlag"));
    assert_eq!(error.code(), Some(207_003));
    assert_eq!(error.device(), Some(DeviceId(3)));
    let text = error.to_string();
    assert!(text.contains("code 207003 (ACL_ERROR_RT_"), "{text}");
    // The next one works: a failure is of its call only.
    Event::new(&device).unwrap();
}

#[test]
fn unknown_code_is_a_number() {
    run("unknown_code", &[("ASCEND_SIM_FAULTS", "aclrtMalloc:1:424242")]);
}

fn unknown_code() {
    let device = machine().devices().remove(0);
    let error = DeviceBuffer::new(&device, ByteSize::mib(1)).unwrap_err();
    assert_eq!(error.code(), Some(424_242));
    assert!(error.to_string().contains("code 424242 (unknown code)"), "{error}");
}

#[test]
fn refused_page_lock_is_recorded() {
    run("no_pages", &[("ASCEND_SIM_FAULTS", "aclrtMallocHost:1:207001")]);
}

fn no_pages() {
    let machine = machine();
    let buffer = HostBuffer::new(&machine, ByteSize::mib(1), HostMemory::PageLocked).unwrap();
    assert_eq!(buffer.pinned(), Pinned::Pageable);
    let reason = buffer.refused().unwrap();
    assert!(reason.contains("aclrtMallocHost failed") && reason.contains("207001"), "{reason}");
}

/// A load needs a CPU beside the measured one.
fn two_cpus(machine: &Machine) -> Option<cluster_health_core::CpuId> {
    let cpus = machine.census().unwrap().bindable();
    let first = *cpus.first()?;
    let siblings = &machine.topology().cpu(first)?.siblings;
    let found = cpus.iter().any(|cpu| *cpu != first && !siblings.contains(*cpu));
    if !found {
        eprintln!("skipped: needs two cores");
    }
    found.then_some(first)
}

fn device_load(machine: &Machine) -> LoadGenerator {
    let device = machine.devices().remove(1);
    let profiles = [LoadProfile::Idle, LoadProfile::Device];
    LoadGenerator::new(machine, &profiles, &[vec![device]], 0).unwrap()
}

#[test]
fn load_of_a_device_is_matrix_products_in_a_stream_of_its_own() {
    run("load", &[]);
}

fn load() {
    let machine = machine();
    let Some(cpu) = two_cpus(&machine) else { return };
    let mut loads = device_load(&machine);
    assert!(loads.switch(1, &[cpu]).unwrap());
    let began = Instant::now();
    while loads.record(1).unwrap().busy_ns == 0 {
        loads.check(0).unwrap();
        assert!(began.elapsed() < BOUND);
    }
    // Others use the device meanwhile.
    let device = machine.devices().remove(1);
    let stream = Stream::new(&device).unwrap();
    let source = HostBuffer::new(&machine, ByteSize::kib(64), HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(&device, ByteSize::kib(64)).unwrap();
    let mut copy =
        Transfer::to_device(&stream, &source, &mut target, ByteSize::kib(64), BOUND).unwrap();
    copy.issue().unwrap();
    copy.wait().unwrap();
    assert!(loads.switch(0, &[cpu]).unwrap());
    let record = loads.record(1).unwrap();
    // Products of 128 rows at least, of two operations per element of the sum.
    assert!(record.flops > 0 && record.flops.is_multiple_of(2 * 128_u64.pow(3)), "{record:?}");
    assert_eq!((record.bytes, record.burners), (0, 1));
    assert!(record.utilisation.unwrap() > 0.0, "{record:?}");
    assert!(!record.cpus.contains(&cpu));
}

#[test]
fn load_that_a_device_cannot_have_is_an_error_that_names_the_call() {
    run("load_fails", &[("ASCEND_SIM_FAULTS", "aclnnMatmul:1:161002")]);
    let folder = tempfile::tempdir().unwrap();
    support::install(folder.path(), &["libascendcl.so"]);
    run("load_fails", &[(FOLDER, folder.path().to_str().unwrap()), (EXPECTED, "no library")]);
}

fn load_fails() {
    let machine = machine();
    let Some(cpu) = two_cpus(&machine) else { return };
    let mut loads = device_load(&machine);
    let error = loads.switch(1, &[cpu]).unwrap_err();
    let text = error.to_string();
    if std::env::var(EXPECTED).is_ok() {
        assert_eq!(error.kind(), "unavailable");
        assert!(text.contains("load device") && text.contains("libopapi.so"), "{text}");
    } else {
        assert_eq!(error.call(), Some("aclnnMatmul"), "{text}");
        assert_eq!((error.code(), error.device()), (Some(161_002), Some(DeviceId(1))));
    }
    // Whoever asks again is told that it is gone.
    assert!(loads.switch(1, &[cpu]).is_err());
    assert!(loads.switch(0, &[cpu]).unwrap());
}

#[test]
fn lack_of_device_memory_tells_how_much_there_is() {
    run("no_memory", &[("ASCEND_SIM_HBM", "1G"), ("ASCEND_SIM_HBM_USED", "256M")]);
}

fn no_memory() {
    let device = machine().devices().remove(0);
    let error = DeviceBuffer::new(&device, ByteSize::mib(2048)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("aclrtMalloc failed on device 0"), "{text}");
    assert!(text.contains("768 MiB of 1024 MiB free"), "{text}");
}

#[test]
fn damaged_copy_is_found() {
    run("corrupt", &[("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync:1:corrupt")]);
}

fn corrupt() {
    let machine = machine();
    let device = machine.devices().remove(0);
    let size = ByteSize::kib(256);
    let mut source = HostBuffer::new(&machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(&device, size).unwrap();
    let stream = Stream::new(&device).unwrap();
    let tags = TagPattern::full(9, size);
    source.write_tags(&tags).unwrap();
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
    copy.issue().unwrap();
    copy.wait().unwrap();
    drop(copy);
    assert!(!target.check_tags(&tags).unwrap());
}

#[test]
fn unusable_runtime_is_said_with_what_to_do() {
    run("unusable", &[("ASCEND_SIM_STUB", "1"), (EXPECTED, "aclInit failed|100039|set_env.sh")]);
    run(
        "unusable",
        &[
            ("ASCEND_SIM_FAULTS", "aclrtGetDeviceCount:*:107001"),
            (EXPECTED, "aclrtGetDeviceCount failed|code 107001 (ACL_ERROR_RT_INVALID_DEVICEID)"),
        ],
    );
    run(
        "unusable",
        &[("ASCEND_SIM_DEVICES", "0"), (EXPECTED, "aclrtGetDeviceCount|ASCEND_RT_VISIBLE_DEVICES")],
    );
}

#[test]
fn missing_library_is_said_with_every_path_tried() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let words = format!("{path}/libascendcl.so|{path}/libacl_rt.so|set_env.sh");
    let output = child("unusable", &[(FOLDER, path), (EXPECTED, &words)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn unusable() {
    let error = Machine::ascend().unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    let text = error.to_string();
    for words in std::env::var(EXPECTED).unwrap().split('|') {
        assert!(text.contains(words), "'{words}' is not in '{text}'");
    }
    assert_eq!(Machine::ascend_status(), Some(text));
    // Nobody asked for Ascend by name.
    assert_eq!(Machine::by_name("auto").unwrap().backend(), BackendKind::Host);
}
