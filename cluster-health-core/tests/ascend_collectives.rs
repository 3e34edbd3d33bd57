//! Collectives of the Ascend backend between two processes, against the simulator that cargo
//! builds beside this test, or the libraries in the folder that `CLUSTER_HEALTH_ASCEND_LIB_DIR`
//! names.
//!
//! Every case runs in a process of its own, this executable again, which starts its second rank.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a test of small numbers: what goes wrong must panic"
)]

#[path = "../../tests/ascend-sim/support.rs"]
mod support;

use std::ffi::c_void;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{
    ByteSize, Communicator, DataType, DeviceBuffer, Error, Machine, ReduceOp, Result, Stream,
    TagPattern,
};
use tempfile::TempDir;

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
const CASE: &str = "ASCEND_TEST_CASE";
/// What a case is to find.
const EXPECTED: &str = "ASCEND_TEST_EXPECTED";
const BOUND: Duration = Duration::from_secs(30);

fn run(case: &str, variables: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let place = std::env::var_os(FOLDER).map_or_else(
        || {
            support::install(folder.path(), &support::LIBRARIES);
            folder.path().to_owned()
        },
        PathBuf::from,
    );
    check(case, &child(case, &place, variables));
}

fn check(case: &str, output: &Output) {
    assert!(
        output.status.success(),
        "{case}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{case} did not run");
}

/// This program again, as the test that plays a rank.
fn this() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "one_rank", "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

fn child(case: &str, folder: &std::path::Path, variables: &[(&str, &str)]) -> Output {
    this()
        .env(CASE, case)
        .env(FOLDER, folder)
        .env("ASCEND_SIM_DEVICES", "2")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// What the other tests start, twice each.
#[test]
#[ignore = "runs in the processes that the other tests start"]
fn one_rank() {
    let group = RankGroup::from_parent(BOUND).unwrap();
    let group = group.unwrap_or_else(|| RankGroup::lead(this(), 2, BOUND).unwrap());
    match std::env::var(CASE).as_deref() {
        Ok("operations") => operations(&group),
        Ok("borrowed") => borrowed(&group),
        Ok("failure") => failure(&group),
        Ok("stall") => stall(&group),
        Ok("dead") => dead(&group),
        Ok("unusable") => unusable(&group),
        other => panic!("no case {other:?}"),
    }
    if std::env::var(CASE).as_deref() == Ok("dead") {
        return;
    }
    // Rank 0 must not end before the other one, which would end with it.
    if group.rank() == 0 {
        assert_eq!(group.receive(1).unwrap(), b"passed");
    } else {
        group.send(0, b"passed").unwrap();
    }
}

/// One rank's things; dropped in this order.
struct Rank<'g> {
    communicator: Communicator<'g>,
    stream: Stream,
    me: usize,
}

impl<'g> Rank<'g> {
    fn new(group: &'g RankGroup) -> Result<Self> {
        let me = group.rank() as usize;
        let device = Machine::ascend().unwrap().devices().remove(me);
        let communicator = Communicator::new(group, &device)?;
        Ok(Self { communicator, stream: Stream::new(&device).unwrap(), me })
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

/// Bytes that tell rank and place.
fn pattern(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + rank * 31 + i / 256) as u8).collect()
}

/// A reduction of two values.
type Plain = fn(i32, i32) -> i32;

fn words(values: impl Iterator<Item = i32>) -> Vec<u8> {
    values.flat_map(i32::to_ne_bytes).collect()
}

#[test]
fn operations_give_every_rank_what_they_should() {
    run("operations", &[]);
    // Physical ids that are not the runtime's.
    run("operations", &[("ASCEND_SIM_DEVICES", "4"), ("ASCEND_RT_VISIBLE_DEVICES", "1,3")]);
    run("operations", &[("ASCEND_SIM_DESTROY_AGAIN", "3")]);
}

#[test]
fn library_without_configurations_of_communicators_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let file = support::install(folder.path(), &support::LIBRARIES);
    support::remove_symbols(&file, &["HcclCommInitRootInfoConfig"]);
    check("operations", &child("operations", folder.path(), &[]));
}

fn operations(group: &RankGroup) {
    let mut rank = Rank::new(group).unwrap();
    let me = rank.me;
    assert_eq!((rank.communicator.rank() as usize, rank.communicator.size()), (me, 2));
    for count in [1, 13, 4096, 70_001] {
        let gathered = [pattern(0, count), pattern(1, count)].concat();
        let send = rank.buffer(&pattern(me, count));
        let mut receive = rank.buffer(&vec![0xEE; 2 * count]);
        let comm = &mut rank.communicator;
        comm.all_gather(&send, &mut receive, count, DataType::UInt8, &rank.stream).unwrap();
        assert_eq!(content(&receive), gathered, "{count}");

        let mut own = vec![0xEE; 2 * count];
        own[me * count..(me + 1) * count].copy_from_slice(&pattern(me, count));
        let mut buffer = rank.buffer(&own);
        let comm = &mut rank.communicator;
        comm.all_gather_in_place(&mut buffer, count, DataType::Int8, &rank.stream).unwrap();
        assert_eq!(content(&buffer), gathered, "{count}, in place");

        let value = |rank: usize, i: usize| (i as i32 - 50) * (rank as i32 * 2 + 1);
        let all = |op: Plain, range: std::ops::Range<usize>| {
            words(range.map(|i| op(value(0, i), value(1, i))))
        };
        let both = rank.buffer(&words((0..2 * count).map(|i| value(me, i))));
        let mut part = rank.buffer(&vec![0xEE; 4 * count]);
        let (comm, stream) = (&mut rank.communicator, &rank.stream);
        let (int, sum) = (DataType::Int32, ReduceOp::Sum);
        comm.reduce_scatter(&both, &mut part, count, int, sum, stream).unwrap();
        assert_eq!(content(&part), all(|a, b| a + b, me * count..(me + 1) * count), "{count}");

        let ops: [(ReduceOp, Plain); 3] =
            [(sum, |a, b| a + b), (ReduceOp::Max, i32::max), (ReduceOp::Min, i32::min)];
        for (op, plain) in ops {
            let mut whole = rank.buffer(&vec![0xEE; 8 * count]);
            let (comm, stream) = (&mut rank.communicator, &rank.stream);
            comm.all_reduce(&both, &mut whole, 2 * count, int, op, stream).unwrap();
            assert_eq!(content(&whole), all(plain, 0..2 * count), "{count} {op:?}");
        }
        let mut whole = rank.buffer(&words((0..2 * count).map(|i| value(me, i))));
        let (comm, stream) = (&mut rank.communicator, &rank.stream);
        comm.all_reduce_in_place(&mut whole, 2 * count, int, sum, stream).unwrap();
        assert_eq!(content(&whole), all(|a, b| a + b, 0..2 * count), "{count}, in place");

        let sends = rank.buffer(&pattern(me, 2 * count));
        let mut got = rank.buffer(&vec![0xEE; 2 * count]);
        let (comm, stream) = (&mut rank.communicator, &rank.stream);
        comm.all_to_all(&sends, &mut got, count, DataType::UInt8, stream).unwrap();
        let block = |from: usize| pattern(from, 2 * count)[me * count..(me + 1) * count].to_vec();
        assert_eq!(content(&got), [block(0), block(1)].concat(), "{count}");

        for root in [0, 1] {
            let mut buffer = rank.buffer(&pattern(me, count));
            let (comm, stream) = (&mut rank.communicator, &rank.stream);
            comm.broadcast(&mut buffer, count, DataType::UInt8, root, stream).unwrap();
            assert_eq!(content(&buffer), pattern(root as usize, count), "{count} of {root}");
        }
        for from in [0, 1] {
            let mut buffer = rank.buffer(&pattern(me, count));
            let (comm, stream) = (&mut rank.communicator, &rank.stream);
            if me == from {
                comm.send(&buffer, count, DataType::UInt8, 1 - from as u32, stream).unwrap();
            } else {
                comm.receive(&mut buffer, count, DataType::UInt8, from as u32, stream).unwrap();
            }
            assert_eq!(content(&buffer), pattern(from, count), "{count} from {from}");
        }
        rank.communicator.barrier().unwrap();
    }
    // Tags at an offset are what the other rank wrote at its start.
    let size = ByteSize(300_001);
    let tags = [1, 2].map(|seed| TagPattern::sparse(seed, size));
    let mut send = rank.buffer(&vec![0; 300_001]);
    send.write_tags(&tags[me]).unwrap();
    let mut receive = rank.buffer(&vec![0; 600_002]);
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    comm.all_gather(&send, &mut receive, 300_001, DataType::UInt8, stream).unwrap();
    assert!(receive.check_tags_at(0, &tags[0]).unwrap());
    assert!(receive.check_tags_at(300_001, &tags[1]).unwrap());
    assert!(!receive.check_tags_at(300_001, &tags[0]).unwrap());

    // Arguments are checked before anything is submitted.
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    let error = comm.all_gather(&send, &mut receive, 300_002, DataType::UInt8, stream);
    assert!(matches!(error, Err(Error::Invalid { .. })), "{error:?}");
    let error = comm.send(&send, 1, DataType::UInt8, me as u32, stream);
    assert!(matches!(error, Err(Error::Invalid { .. })), "{error:?}");
    comm.barrier().unwrap();
}

#[test]
fn failed_call_is_a_readable_error() {
    run("failure", &[("ASCEND_SIM_FAULTS", "HcclAllGather:1:7")]);
}

fn failure(group: &RankGroup) {
    let mut rank = Rank::new(group).unwrap();
    let send = rank.buffer(&[1; 64]);
    let mut receive = rank.buffer(&[0; 128]);
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    let error = comm.all_gather(&send, &mut receive, 64, DataType::UInt8, stream).unwrap_err();
    assert_eq!(
        (error.kind(), error.call(), error.code()),
        ("backend", Some("HcclAllGather"), Some(7))
    );
    let text = error.to_string();
    let me = rank.me;
    assert!(
        text.starts_with(&format!(
            "HcclAllGather failed on device {me} (rank {me}): code 7 (HCCL_E_UNAVAIL)"
        )),
        "{text}"
    );
    // What other ranks have done is unknown after a failure.
    let again = comm.barrier().unwrap_err();
    assert!(matches!(again, Error::Busy(_)), "{again}");
}

#[test]
fn collective_that_stands_still_is_a_timeout_with_device_and_ranks() {
    run(
        "stall",
        &[
            ("ASCEND_SIM_FAULTS", "HcclAllGather:1:stall"),
            ("ASCEND_SIM_DEVICES", "4"),
            ("ASCEND_RT_VISIBLE_DEVICES", "1,3"),
        ],
    );
}

fn stall(group: &RankGroup) {
    let mut rank = Rank::new(group).unwrap();
    let send = rank.buffer(&[1; 64]);
    let mut receive = rank.buffer(&[0; 128]);
    rank.communicator.set_timeout(Duration::from_millis(300));
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    let start = Instant::now();
    let error = comm.all_gather(&send, &mut receive, 64, DataType::UInt8, stream).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(error.kind(), "timeout", "{error}");
    let text = error.to_string();
    let (device, me) = ([1, 3][rank.me], rank.me);
    assert!(text.contains(&format!("on device {device} (rank {me})")), "{text}");
    let words = format!("HcclAllGather with rank {} not finished after 300 ms", 1 - me);
    assert!(text.contains(&words), "{text}");
    // Memory that may still be in use is not freed, and nobody waits long for it.
    let start = Instant::now();
    drop((rank, send, receive));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn rank_that_is_gone_is_named_before_the_bound() {
    run("dead", &[]);
}

fn dead(group: &RankGroup) {
    let mut rank = Rank::new(group).unwrap();
    if rank.me == 1 {
        std::process::abort();
    }
    let send = rank.buffer(&[1; 64]);
    let mut receive = rank.buffer(&[0; 128]);
    let (comm, stream) = (&mut rank.communicator, &rank.stream);
    let start = Instant::now();
    let error = comm.all_gather(&send, &mut receive, 64, DataType::UInt8, stream).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let text = error.to_string();
    assert!(text.contains("rank 1"), "{text}");
}

#[test]
fn missing_hccl_is_said_with_every_path_tried() {
    let folder: TempDir = tempfile::tempdir().unwrap();
    support::install(folder.path(), &["libascendcl.so"]);
    let words = format!("{}/libhccl.so|set_env.sh", folder.path().display());
    let output = child("unusable", folder.path(), &[(EXPECTED, &words)]);
    check("unusable", &output);
}

#[test]
fn failure_of_rank_0_reaches_the_other_rank_at_once() {
    run(
        "unusable",
        &[
            ("ASCEND_SIM_FAULTS", "HcclGetRootInfo:1:11"),
            (EXPECTED, "HcclGetRootInfo failed on device 0 (rank 0)|code 11 (HCCL_E_TCP_CONNECT)"),
        ],
    );
}

fn unusable(group: &RankGroup) {
    let start = Instant::now();
    let error = Rank::new(group).err().unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let text = error.to_string();
    for words in std::env::var(EXPECTED).unwrap().split('|') {
        assert!(text.contains(words), "'{words}' is not in '{text}'");
    }
}

#[test]
fn communicator_of_a_host_process_is_used_and_left_alone() {
    run("borrowed", &[]);
}

#[allow(unsafe_code, reason = "makes a communicator as a host process would")]
fn borrowed(group: &RankGroup) {
    use ascend_sys::hccl::HcclRootInfo;

    let rank = Rank::new(group).unwrap();
    let hccl = ascend_sys::load::hccl().unwrap();
    let mut root = HcclRootInfo { internal: [0; 4108] };
    if rank.me == 0 {
        let get = ascend_sys::function!(hccl, HcclGetRootInfo).unwrap();
        // SAFETY:
        // * The pointer is to a live value.
        assert_eq!(unsafe { get(&raw mut root) }, 0);
        let bytes: Vec<u8> = root.internal.iter().map(|byte| byte.cast_unsigned()).collect();
        group.send(1, &bytes).unwrap();
    } else {
        for (place, byte) in root.internal.iter_mut().zip(group.receive(0).unwrap()) {
            *place = byte.cast_signed();
        }
    }
    let mut comm: *mut c_void = std::ptr::null_mut();
    let init = ascend_sys::function!(hccl, HcclCommInitRootInfo).unwrap();
    // SAFETY:
    // * The pointers are to live values; `Rank::new` made the device current on this thread.
    assert_eq!(unsafe { init(2, &raw const root, rank.me as u32, &raw mut comm) }, 0);
    for _ in 0..2 {
        // SAFETY:
        // * The communicator is of this device, alive, and used by nobody else.
        let mut ours = unsafe { Communicator::from_raw_hccl(rank.stream.device(), comm) }.unwrap();
        assert_eq!((ours.rank() as usize, ours.size()), (rank.me, 2));
        let send = rank.buffer(&pattern(rank.me, 64));
        let mut receive = rank.buffer(&[0; 128]);
        ours.all_gather(&send, &mut receive, 64, DataType::UInt8, &rank.stream).unwrap();
        assert_eq!(content(&receive), [pattern(0, 64), pattern(1, 64)].concat());
    }
    let destroy = ascend_sys::function!(hccl, HcclCommDestroy).unwrap();
    // SAFETY:
    // * Still alive: the two above have not destroyed it.
    assert_eq!(unsafe { destroy(comm) }, 0);
}
