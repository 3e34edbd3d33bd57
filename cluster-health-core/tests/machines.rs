//! One suite for every kind of machine: what the public types promise holds on the host backend and
//! on the Ascend backend alike, the latter on the simulator that cargo builds beside this test or on
//! the libraries in the folder that `CLUSTER_HEALTH_ASCEND_LIB_DIR` names.
//!
//! Every case runs in a process of its own, this executable again; cases of two ranks start another.
#![allow(clippy::unwrap_used, reason = "a failed expectation ends a test")]

#[path = "../../tests/ascend-sim/support.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{
    ByteSize, Communicator, DataType, Device, DeviceBuffer, Event, HostBuffer, HostMemory, Machine,
    ReduceOp, Stream, TagPattern, Transfer,
};

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
const CASE: &str = "MACHINES_TEST_CASE";
const BACKEND: &str = "MACHINES_TEST_BACKEND";
const BOUND: Duration = Duration::from_secs(30);
/// Words, pages, odd ends.
const LENGTHS: [usize; 7] = [1, 8, 129, 4095, 4097, 70_001, (1 << 20) + 3];

/// This program again, as the test that plays a case or a rank of it.
fn this() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "one_case", "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

fn run_in(folder: &Path, backend: &str, case: &str, variables: &[(&str, &str)]) {
    let output = this()
        .env(CASE, case)
        .env(BACKEND, backend)
        .env(FOLDER, folder)
        .env("ASCEND_SIM_DEVICES", "2")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8(output.stderr));
    assert!(output.status.success(), "{case} on {backend}: {out}{}", err.unwrap());
    assert!(out.contains("1 passed"), "{case} on {backend} did not run: {out}");
}

fn run(backend: &str, case: &str, variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let place = std::env::var_os(FOLDER).map(PathBuf::from);
    if place.is_none() {
        support::install(folder.path(), &support::LIBRARIES);
    }
    run_in(place.as_deref().unwrap_or(folder.path()), backend, case, variables);
}

#[test]
fn memory_streams_and_events_keep_their_promises() {
    for backend in ["host", "ascend"] {
        run(backend, "machine", &[]);
    }
}

#[test]
fn collectives_of_two_ranks_keep_their_promises() {
    for backend in ["host", "ascend"] {
        run(backend, "ranks", &[]);
    }
}

#[test]
fn older_toolkit_that_lacks_functions_keeps_them_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = support::install(folder.path(), &support::LIBRARIES);
    support::remove_symbols(&file, &support::NOT_IN_8_1_RC1);
    run_in(folder.path(), "ascend", "machine", &[]);
    run_in(folder.path(), "ascend", "ranks", &[]);
}

/// What the other tests start.
#[test]
#[ignore = "runs in the processes that the other tests start"]
fn one_case() {
    let machine = Machine::by_name(&std::env::var(BACKEND).unwrap()).unwrap();
    let case = std::env::var(CASE).unwrap();
    if case == "machine" {
        for device in machine.devices() {
            copies(&machine, &device);
            events(&machine, &device);
            bounds(&machine, &device);
            threads(&machine, &device);
        }
        return;
    }
    let group = RankGroup::from_parent(BOUND).unwrap();
    let group = group.unwrap_or_else(|| RankGroup::lead(this(), 2, BOUND).unwrap());
    // The host backend has one device on most machines.
    let at = usize::try_from(group.rank()).unwrap() % machine.devices().len();
    let device = machine.devices().remove(at);
    if case == "ranks" {
        collectives(&group, &device);
    } else {
        stalled(&group, &device);
    }
    // Neither ends while the other one may wait for it: a rank that is gone is another error.
    let other = 1 - group.rank();
    group.send(other, b"passed").unwrap();
    assert_eq!(group.receive(other).unwrap(), b"passed");
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from((i * 7 + seed * 31 + i / 251) % 256).unwrap()).collect()
}

/// Both directions, from memory of every kind, whole and in part.
fn copies(machine: &Machine, device: &Device) {
    for memory in [HostMemory::PageLocked, HostMemory::Pageable] {
        for len in LENGTHS {
            let size = ByteSize(len as u64);
            let mut source = HostBuffer::new(machine, size, memory).unwrap();
            let mut back = HostBuffer::new(machine, size, memory).unwrap();
            let mut target = DeviceBuffer::new(device, size).unwrap();
            let stream = Stream::new(device).unwrap();
            source.bytes_mut().unwrap().copy_from_slice(&pattern(len, len));
            back.bytes_mut().unwrap().fill(0xEE);
            for part in [len, len.div_ceil(2)] {
                let size = ByteSize(part as u64);
                target.write(0, &vec![0; len]).unwrap();
                let mut copy =
                    Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
                copy.issue().unwrap();
                // Issued is issued, until it is waited for.
                assert!(copy.issue().is_err());
                copy.wait().unwrap();
                drop(copy);
                let mut copy = Transfer::to_host(&stream, &target, &mut back, size, BOUND).unwrap();
                copy.issue().unwrap();
                copy.wait().unwrap();
                drop(copy);
                assert_eq!(back.bytes().unwrap()[..part], pattern(len, len)[..part], "{len}");
                let mut rest = vec![1; len - part];
                target.read(part, &mut rest).unwrap();
                assert!(rest.iter().all(|byte| *byte == 0), "{len}: wrote past {part}");
            }
            let tags = TagPattern::full(3, size);
            target.write_tags(&tags).unwrap();
            assert!(target.check_tags(&tags).unwrap());
            assert!(!target.check_tags(&TagPattern::full(4, size)).unwrap(), "{len}");
        }
    }
}

/// Times of marks follow the order of the stream.
fn events(machine: &Machine, device: &Device) {
    let size = ByteSize::mib(1);
    let source = HostBuffer::new(machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(device, size).unwrap();
    let stream = Stream::new(device).unwrap();
    let mut marks = [(); 3].map(|()| Event::new(device).unwrap());
    assert!(marks[1].nanoseconds_since(&marks[0]).is_err(), "not recorded yet");
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
    // Marks can be used again.
    for _ in 0..3 {
        marks[0].record(&stream).unwrap();
        copy.issue().unwrap();
        marks[1].record(&stream).unwrap();
        copy.wait().unwrap();
        marks[2].record(&stream).unwrap();
        stream.synchronize(BOUND).unwrap();
        let since =
            |later: usize, earlier: usize| marks[later].nanoseconds_since(&marks[earlier]).unwrap();
        let (copied, idle, all) = (since(1, 0), since(2, 1), since(2, 0));
        assert!(copied > 0.0 && idle >= 0.0, "{copied} {idle}");
        // Milliseconds in single precision, where the device counts those.
        assert!((copied + idle - all).abs() <= 1e-3 * all + 100.0, "{copied} + {idle}, not {all}");
    }
}

/// What does not fit is refused by name before anything is called, and does no harm.
fn bounds(machine: &Machine, device: &Device) {
    let (small, large) = (ByteSize(100), ByteSize(4096));
    let source = HostBuffer::new(machine, large, HostMemory::PageLocked).unwrap();
    let mut back = HostBuffer::new(machine, small, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(device, small).unwrap();
    let stream = Stream::new(device).unwrap();
    target.write(0, &[7; 100]).unwrap();
    let errors = [
        Transfer::to_device(&stream, &source, &mut target, ByteSize(101), BOUND).err(),
        Transfer::to_host(&stream, &target, &mut back, ByteSize(101), BOUND).err(),
        target.write(1, &[0; 100]).err(),
        target.write(101, &[]).err().or_else(|| target.write(usize::MAX, &[0]).err()),
        target.read(100, &mut [0]).err(),
        target.read(usize::MAX, &mut [0; 2]).err(),
        target.write_tags(&TagPattern::full(1, ByteSize(101))).err(),
    ];
    for (at, error) in errors.iter().enumerate() {
        let error = error.as_ref().unwrap_or_else(|| panic!("{at} was not refused"));
        assert_eq!(error.kind(), "invalid", "{at}: {error}");
    }
    let mut found = [0; 100];
    target.read(0, &mut found).unwrap();
    assert_eq!(found, [7; 100]);
}

/// Types are made in one thread, used in a second, waited for in a third, dropped in a fourth; a
/// stream at rest needs no time to be waited for.
fn threads(machine: &Machine, device: &Device) {
    let size = ByteSize::kib(64);
    let stream = Stream::new(device).unwrap();
    let mut source = HostBuffer::new(machine, size, HostMemory::PageLocked).unwrap();
    let mut target = DeviceBuffer::new(device, size).unwrap();
    let tags = TagPattern::sparse(9, size);
    let used = std::thread::spawn(move || {
        source.write_tags(&tags).unwrap();
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND).unwrap();
        copy.issue().unwrap();
        std::thread::scope(|scope| scope.spawn(|| copy.wait().unwrap()).join().unwrap());
        drop(copy);
        (stream, source, target)
    });
    let (stream, source, target) = used.join().unwrap();
    stream.synchronize(Duration::from_millis(1)).unwrap();
    assert!(target.check_tags(&tags).unwrap());
    std::thread::spawn(move || drop((target, source, stream))).join().unwrap();
}

/// A number as an element of this type. Half precision as written down from IEEE 754.
fn element(data_type: DataType, value: i8) -> Vec<u8> {
    let half = [
        (2, 0x4000_u16),
        (3, 0x4200),
        (5, 0x4500),
        (7, 0x4700),
        (8, 0x4800),
        (9, 0x4880),
        (14, 0x4B00),
        (15, 0x4B80),
    ];
    match data_type {
        DataType::Int8 | DataType::UInt8 => value.to_ne_bytes().to_vec(),
        DataType::Int16 | DataType::UInt16 => i16::from(value).to_ne_bytes().to_vec(),
        DataType::Int32 | DataType::UInt32 => i32::from(value).to_ne_bytes().to_vec(),
        DataType::Int64 | DataType::UInt64 => i64::from(value).to_ne_bytes().to_vec(),
        DataType::Float16 => {
            half.iter().find(|(number, _)| *number == value).unwrap().1.to_ne_bytes().to_vec()
        }
        DataType::Float32 => f32::from(value).to_ne_bytes().to_vec(),
        DataType::Float64 => f64::from(value).to_ne_bytes().to_vec(),
        // The upper half of single precision.
        DataType::BFloat16 => {
            let upper = u16::try_from(f32::from(value).to_bits() >> 16).unwrap();
            upper.to_ne_bytes().to_vec()
        }
        other => panic!("no element of {other:?}"),
    }
}

const TYPES: [DataType; 12] = [
    DataType::Int8,
    DataType::Int16,
    DataType::Int32,
    DataType::Int64,
    DataType::UInt8,
    DataType::UInt16,
    DataType::UInt32,
    DataType::UInt64,
    DataType::Float16,
    DataType::Float32,
    DataType::Float64,
    DataType::BFloat16,
];

struct Rank<'g> {
    communicator: Communicator<'g>,
    stream: Stream,
    me: usize,
}

impl<'g> Rank<'g> {
    fn new(group: &'g RankGroup, device: &Device) -> Self {
        let communicator = Communicator::new(group, device).unwrap();
        let stream = Stream::new(device).unwrap();
        Self { communicator, stream, me: usize::try_from(group.rank()).unwrap() }
    }

    fn buffer(&self, bytes: &[u8]) -> DeviceBuffer {
        let size = ByteSize(bytes.len() as u64);
        let mut buffer = DeviceBuffer::new(self.stream.device(), size).unwrap();
        buffer.write(0, bytes).unwrap();
        buffer
    }
}

fn content(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

fn collectives(group: &RankGroup, device: &Device) {
    let mut rank = Rank::new(group, device);
    let me = rank.me;
    let byte = DataType::UInt8;
    for count in LENGTHS {
        let blocks = [pattern(0, count), pattern(1, count)];
        let send = rank.buffer(&blocks[me]);
        let mut receive = rank.buffer(&vec![0xEE; 2 * count]);
        let (comm, stream) = (&mut rank.communicator, &rank.stream);
        comm.all_gather(&send, &mut receive, count, byte, stream).unwrap();
        assert_eq!(content(&receive), blocks.concat(), "all_gather of {count}");

        // Block b of rank r is pattern 10 + 2r + b.
        let block = |from: usize, to: usize| pattern(10 + 2 * from + to, count);
        let send = rank.buffer(&[block(me, 0), block(me, 1)].concat());
        let (comm, stream) = (&mut rank.communicator, &rank.stream);
        comm.all_to_all(&send, &mut receive, count, byte, stream).unwrap();
        assert_eq!(content(&receive), [block(0, me), block(1, me)].concat(), "all_to_all");

        for other in [0, 1] {
            let mut buffer = rank.buffer(&blocks[me]);
            let (comm, stream) = (&mut rank.communicator, &rank.stream);
            let root = u32::try_from(other).unwrap();
            comm.broadcast(&mut buffer, count, byte, root, stream).unwrap();
            assert_eq!(content(&buffer), blocks[other], "broadcast of {count}");

            let mut buffer = rank.buffer(&blocks[me]);
            let (comm, stream) = (&mut rank.communicator, &rank.stream);
            if me == other {
                comm.send(&buffer, count, byte, 1 - root, stream).unwrap();
            } else {
                comm.receive(&mut buffer, count, byte, root, stream).unwrap();
            }
            assert_eq!(content(&buffer), blocks[other], "message of {count}");
        }
    }
    // Rank 0 has 3 and 2, rank 1 has 5 and 7.
    let own = [[3, 2], [5, 7]][me];
    let reductions = [
        (ReduceOp::Sum, [8, 9]),
        (ReduceOp::Prod, [15, 14]),
        (ReduceOp::Max, [5, 7]),
        (ReduceOp::Min, [3, 2]),
    ];
    for kind in TYPES {
        let elements = |values: [i8; 2]| values.map(|value| element(kind, value)).concat();
        for (op, expected) in reductions {
            // The two that HCCL has no product of.
            let narrow = matches!(kind, DataType::Int16 | DataType::BFloat16);
            if narrow && op == ReduceOp::Prod {
                continue;
            }
            let send = rank.buffer(&elements(own));
            let mut all = rank.buffer(&vec![0xEE; 2 * kind.size()]);
            let mut part = rank.buffer(&vec![0xEE; kind.size()]);
            let (comm, stream) = (&mut rank.communicator, &rank.stream);
            comm.all_reduce(&send, &mut all, 2, kind, op, stream).unwrap();
            assert_eq!(content(&all), elements(expected), "{kind:?} {op:?}");
            comm.reduce_scatter(&send, &mut part, 1, kind, op, stream).unwrap();
            assert_eq!(content(&part), element(kind, expected[me]), "{kind:?} {op:?}");
        }
    }
    // What does not fit is refused on every rank, and the communicator stays usable.
    let send = rank.buffer(&[1; 8]);
    let mut receive = rank.buffer(&[0; 8]);
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    let refused = [
        comm.all_gather(&send, &mut receive, 8, byte, stream),
        comm.all_reduce(&send, &mut receive, usize::MAX, DataType::Int64, ReduceOp::Sum, stream),
        comm.broadcast(&mut receive, 8, byte, 2, stream),
        comm.send(&send, 8, byte, u32::try_from(me).unwrap(), stream),
    ];
    for refused in refused {
        assert_eq!(refused.unwrap_err().kind(), "invalid");
    }
    comm.barrier().unwrap();
}

#[test]
fn message_that_stands_still_is_a_timeout_that_names_the_other_rank() {
    for call in ["HcclSend", "HcclRecv"] {
        let fault = format!("{call}:1:stall");
        let variables = [("ASCEND_SIM_FAULTS", &*fault), ("ASCEND_SIM_ASYNC_ERROR", "21")];
        run("ascend", call, &variables);
    }
}

fn stalled(group: &RankGroup, device: &Device) {
    let mut rank = Rank::new(group, device);
    let mut buffer = rank.buffer(&[1; 64]);
    let bound = 300;
    rank.communicator.set_timeout(Duration::from_millis(bound));
    let start = Instant::now();
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    let (name, other) = [("HcclSend", 1), ("HcclRecv", 0)][rank.me];
    let result = if rank.me == 0 {
        comm.send(&buffer, 64, DataType::UInt8, other, stream)
    } else {
        comm.receive(&mut buffer, 64, DataType::UInt8, other, stream)
    };
    let error = result.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(error.kind(), "timeout", "{error}");
    let text = error.to_string();
    let device = device.id();
    assert!(text.contains(&format!("on device {device} (rank {})", rank.me)), "{text}");
    let words = format!("{name} with rank {other} not finished after {bound} ms");
    assert!(text.contains(&words), "{text}");
    // What HCCL itself knows about it.
    assert!(text.contains("the communicator reports HCCL_E_REMOTE (21)"), "{text}");
    drop((rank, buffer));
}
