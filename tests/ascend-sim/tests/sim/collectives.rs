//! Communicators between threads and between processes.

use std::{
    ffi::CStr,
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
    ptr, thread,
};

use crate::library::{Ptr, SendRecv, Sim};

const FP16: u32 = 3;
const FP32: u32 = 4;
const INT32: u32 = 2;
const SUM: u32 = 0;
const PROD: u32 = 1;
const MAX: u32 = 2;

fn ints(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// Runs `body` as every rank of a communicator of `ranks` threads.
fn with_ranks(sim: &Sim, ranks: u32, body: impl Fn(i32, Ptr, Ptr) + Sync) {
    assert_eq!(sim.aclInit(ptr::null()), 0);
    let devices: Vec<i32> = (0..i32::try_from(ranks).unwrap()).collect();
    let mut comms = vec![ptr::null_mut(); devices.len()];
    assert_eq!(sim.HcclCommInitAll(ranks, devices.as_ptr(), comms.as_mut_ptr()), 0);
    let comms: Vec<usize> = comms.into_iter().map(|comm: Ptr| comm.expose_provenance()).collect();
    thread::scope(|scope| {
        for (&rank, &comm) in devices.iter().zip(&comms) {
            let body = &body;
            scope.spawn(move || {
                assert_eq!(sim.aclrtSetDevice(rank), 0);
                let comm = ptr::with_exposed_provenance_mut(comm);
                body(rank, comm, sim.stream());
                assert_eq!(sim.HcclCommDestroy(comm), 0);
                assert_eq!(sim.aclrtResetDevice(rank), 0);
            });
        }
    });
    assert_eq!(sim.count("comms"), 0);
}

#[test]
fn collectives_give_every_rank_the_right_data() {
    let sim = Sim::new(&[("DEVICES", "3")]);
    with_ranks(&sim, 3, |rank, comm, stream| {
        let sync = || assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 0);
        let (mut id, mut size) = (9, 9);
        assert_eq!(sim.HcclGetRankId(comm, &raw mut id), 0);
        assert_eq!(sim.HcclGetRankSize(comm, &raw mut size), 0);
        assert_eq!((i32::try_from(id).unwrap(), size), (rank, 3));

        // Rank r holds r*100 + 0..5.
        let mine = sim.upload(&ints((0..6).map(|i| rank * 100 + i)));
        let big = sim.malloc(72);
        assert_eq!(sim.HcclAllGather(mine, big, 6, INT32, comm, stream), 0);
        sync();
        let gathered = ints((0..3).flat_map(|r| (0..6).map(move |i| r * 100 + i)));
        assert_eq!(sim.download(big, 72), gathered);

        let out = sim.malloc(24);
        assert_eq!(sim.HcclAllReduce(mine, out, 6, INT32, SUM, comm, stream), 0);
        sync();
        assert_eq!(sim.download(out, 24), ints((0..6).map(|i| 300 + 3 * i)));
        assert_eq!(sim.HcclAllReduce(mine, out, 6, INT32, MAX, comm, stream), 0);
        assert_eq!(sim.HcclReduceScatter(mine, out, 2, INT32, SUM, comm, stream), 0);
        sync();
        let both = ints((0..2).map(|i| 300 + 3 * (2 * rank + i)).chain((2..6).map(|i| 200 + i)));
        assert_eq!(sim.download(out, 24), both);

        assert_eq!(sim.HcclAlltoAll(mine, 2, INT32, out, 2, INT32, comm, stream), 0);
        sync();
        let exchanged = (0..3).flat_map(|r| (0..2).map(move |i| r * 100 + 2 * rank + i));
        assert_eq!(sim.download(out, 24), ints(exchanged));

        assert_eq!(sim.HcclBroadcast(mine, 6, INT32, 2, comm, stream), 0);
        assert_eq!(sim.HcclBarrier(comm, stream), 0);
        sync();
        assert_eq!(sim.download(mine, 24), ints(200..206));
    });
}

#[test]
fn narrow_floats_are_reduced_as_numbers() {
    let sim = Sim::new(&[]);
    with_ranks(&sim, 2, |rank, comm, stream| {
        // 1.5 and 2048 (halves); 2048 + 1.5 is rounded to 2050, the next number that is there.
        let half: u16 = if rank == 0 { 0x3e00 } else { 0x6800 };
        let (mine, out) = (sim.upload(&half.to_le_bytes()), sim.malloc(4));
        assert_eq!(sim.HcclAllReduce(mine, out, 1, FP16, SUM, comm, stream), 0);
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 0);
        assert_eq!(sim.download(out, 2), 0x6801_u16.to_le_bytes());
        let mine = sim.upload(&(if rank == 0 { 0.5_f32 } else { -3.0 }).to_le_bytes());
        assert_eq!(sim.HcclAllReduce(mine, out, 1, FP32, PROD, comm, stream), 0);
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 0);
        assert_eq!(sim.download(out, 4), (-1.5_f32).to_le_bytes());
        assert_eq!(sim.HcclAllReduce(mine, out, 1, 11, PROD, comm, stream), 5, "not for bfp16");
    });
}

#[test]
fn messages_arrive_in_order_and_both_ways() {
    let sim = Sim::new(&[]);
    with_ranks(&sim, 2, |rank, comm, stream| {
        let peer = u32::try_from(1 - rank).unwrap();
        let (first, second) = (sim.upload(&ints([rank, 1])), sim.upload(&ints([rank, 2])));
        let (a, b) = (sim.malloc(8), sim.malloc(8));
        if rank == 0 {
            assert_eq!(sim.HcclSend(first, 2, INT32, peer, comm, stream), 0);
            assert_eq!(sim.HcclSend(second, 2, INT32, peer, comm, stream), 0);
        } else {
            assert_eq!(sim.HcclRecv(a, 2, INT32, peer, comm, stream), 0);
            assert_eq!(sim.HcclRecv(b, 2, INT32, peer, comm, stream), 0);
        }
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 0);
        if rank == 1 {
            assert_eq!(sim.download(a, 8), ints([0, 1]));
            assert_eq!(sim.download(b, 8), ints([0, 2]));
        }
        let item = |kind, buf| SendRecv { kind, buf, count: 2, data_type: 2, remote: peer };
        let items = [item(0, second), item(1, a)];
        assert_eq!(sim.HcclBatchSendRecv(items.as_ptr(), 2, comm, stream), 0);
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 0);
        assert_eq!(sim.download(a, 8), ints([1 - rank, 2]));
    });
}

#[test]
fn misuse_of_a_collective_has_codes() {
    let sim = Sim::new(&[("EXEC_TIMEOUT_MS", "200"), ("ASYNC_ERROR", "21")]);
    with_ranks(&sim, 2, |rank, comm, stream| {
        let buffer = sim.malloc(64);
        let gather = |buffer, count| sim.HcclAllGather(buffer, buffer, count, INT32, comm, stream);
        assert_eq!(gather(ptr::null_mut(), 4), 2);
        assert_eq!(gather(buffer, 0), 1);
        assert_eq!(gather(buffer, 9), 1, "the result would be out of bounds");
        assert_eq!(gather(sim.malloc_host(64), 4), 1, "not device memory");
        assert_eq!(sim.HcclAllGather(buffer, buffer, 4, 77, comm, stream), 1);
        assert_eq!(sim.HcclAllReduce(buffer, buffer, 4, INT32, 4, comm, stream), 1);
        assert_eq!(sim.HcclBroadcast(buffer, 4, INT32, 2, comm, stream), 1);
        let mut error = 0;
        assert_eq!(sim.HcclGetCommAsyncError(comm, &raw mut error), 0);
        assert_eq!(error, 21);
        // The ranks do not agree about the count.
        assert_eq!(gather(buffer, if rank == 0 { 4 } else { 8 }), 0);
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 507_899);
        // One rank does not come at all.
        if rank == 0 {
            assert_eq!(gather(buffer, 4), 0);
            assert_eq!(sim.HcclCommDestroy(comm), 20, "busy: again");
            assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 107_020);
        }
    });
}

/// The 300 bytes of version 5 with nothing set.
fn config() -> [u8; 300] {
    let mut bytes = [0; 300];
    bytes[0..8].copy_from_slice(&300_u64.to_le_bytes());
    bytes[8..12].copy_from_slice(&0xf0f0_f0f0_u32.to_le_bytes());
    bytes[12..16].copy_from_slice(&5_u32.to_le_bytes());
    bytes[24..32].fill(0xff);
    bytes[292..300].fill(0xff);
    bytes
}

#[test]
fn a_communicator_is_configured_by_the_prefix_of_version_5() {
    let sim = Sim::ready(&[("HBM", "4G"), ("HBM_USED", "0"), ("CONNECT_TIMEOUT_MS", "50")]);
    let mut info = [0; 4108];
    let init = |info: &mut [u8; 4108], ranks, rank, config: &[u8], comm: &mut Ptr| {
        assert_eq!(sim.HcclGetRootInfo(info), 0);
        sim.HcclCommInitRootInfoConfig(ranks, info, rank, config.as_ptr(), comm)
    };
    let mut comm = ptr::null_mut();
    let mut named = config();
    named[32..36].copy_from_slice(b"ring");
    named[24..28].copy_from_slice(&100_u32.to_le_bytes());
    assert_eq!(init(&mut info, 1, 0, &named, &mut comm), 0, "{}", sim.message());
    let mut name = [0; 128];
    assert_eq!(sim.HcclGetCommName(comm, name.as_mut_ptr()), 0);
    // SAFETY:
    // * the simulator has written a terminator
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"ring");
    let (mut free, mut total) = (0, 0);
    assert_eq!(sim.aclrtGetMemInfo(1, &raw mut free, &raw mut total), 0);
    assert_eq!(total - free, 200 << 20, "twice the buffer");
    sim.set("DESTROY_AGAIN", "1");
    assert_eq!(sim.HcclCommDestroy(comm), 0, "the setting is for communicators to come");
    assert_eq!(init(&mut info, 1, 0, &config(), &mut comm), 0);
    assert_eq!(sim.HcclCommDestroy(comm), 20);
    assert_eq!(sim.HcclCommDestroy(comm), 0);
    assert_eq!(sim.HcclCommDestroy(comm), 6, "not a communicator any more");
    for (at, what) in [(8, "magic"), (12, "version 4 bytes larger"), (24, "buffer of 0")] {
        let mut wrong = config();
        wrong[at..at + 4].copy_from_slice(&(if at == 12 { 6_u32 } else { 0 }).to_le_bytes());
        assert_eq!(init(&mut info, 1, 0, &wrong, &mut comm), 1, "{what}");
    }
    assert_eq!(init(&mut info, 2, 2, &config(), &mut comm), 1, "rank 2 of 2");
    assert_eq!(init(&mut info, 2, 1, &config(), &mut comm), 9);
    assert!(sim.message().contains("[0]"), "names the rank that is missing");
    info[0] ^= 1;
    assert_eq!(sim.HcclCommInitRootInfo(1, &raw const info, 0, &raw mut comm), 1);
    // SAFETY:
    // * a static C string of the simulator
    assert_eq!(unsafe { CStr::from_ptr(sim.HcclGetErrorString(9)) }, c"timeout");
}

#[test]
#[ignore = "a rank in a process of its own, started by the test below"]
fn child_rank() {
    let variable = |name| std::env::var(name).unwrap();
    let rank: i32 = variable("SIM_TEST_RANK").parse().unwrap();
    let sim = Sim::new(&[]);
    assert_eq!(sim.aclInit(ptr::null()), 0);
    assert_eq!(sim.aclrtSetDevice(rank), 0);
    let mut info = [0_u8; 4108];
    if rank == 0 {
        assert_eq!(sim.HcclGetRootInfo(&raw mut info), 0);
        let hex: String = info.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("\nROOT {hex}");
    } else {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        for (to, pair) in info.iter_mut().zip(line.trim().as_bytes().chunks(2)) {
            *to = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        }
    }
    let mut comm = ptr::null_mut();
    let rank_id = u32::try_from(rank).unwrap();
    assert_eq!(sim.HcclCommInitRootInfo(2, &raw const info, rank_id, &raw mut comm), 0);
    let stream = sim.stream();
    // Large enough for several writes, and more than once.
    let words = 300_000;
    let (mine, all) = (sim.malloc(4 * words), sim.malloc(8 * words));
    for round in 0..5 {
        let word = |r: i32| (0..300_000).map(move |i| i * 7 + r * 1_000_003 + round);
        sim.write(mine, &ints(word(rank)));
        let count = u64::try_from(words).unwrap();
        assert_eq!(sim.HcclAllGather(mine, all, count, INT32, comm, stream), 0);
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 60_000), 0, "{}", sim.message());
        assert!(sim.download(all, 8 * words) == ints(word(0).chain(word(1))), "round {round}");
    }
    assert_eq!(sim.HcclCommDestroy(comm), 0);
    println!("\nGATHERED");
}

#[test]
fn two_processes_gather() {
    let start = |rank: &str| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "collectives::child_rank", "--ignored", "--nocapture"])
            .env("SIM_TEST_RANK", rank)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let (mut zero, mut one) = (start("0"), start("1"));
    let mut from_zero = BufReader::new(zero.stdout.take().unwrap()).lines();
    let root = from_zero
        .by_ref()
        .map(Result::unwrap)
        .find_map(|line| line.strip_prefix("ROOT ").map(str::to_owned));
    writeln!(one.stdin.take().unwrap(), "{}", root.unwrap()).unwrap();
    // To the end: the harness of the child fails when nobody reads its last words.
    let rest: Vec<String> = from_zero.map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line == "GATHERED"), "{rest:?}");
    let output = one.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("GATHERED"));
    assert!(zero.wait().unwrap().success());
}

#[test]
fn a_collective_takes_the_time_of_its_link() {
    let sim = Sim::new(&[("VIRTUAL", "1"), ("LINKS", "hccl,gbps=2,us=1000")]);
    with_ranks(&sim, 2, |_, comm, stream| {
        let (mine, all) = (sim.malloc(2_000_000), sim.malloc(4_000_000));
        let (start, end) = (sim.event(), sim.event());
        assert_eq!(sim.HcclBarrier(comm, stream), 0);
        assert_eq!(sim.aclrtRecordEvent(start, stream), 0);
        assert_eq!(sim.HcclAllGather(mine, all, 500_000, FP32, comm, stream), 0);
        assert_eq!(sim.aclrtRecordEvent(end, stream), 0);
        assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 20_000), 0);
        let mut ms = 0.0;
        assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, start, end), 0);
        assert!((ms - 2.0).abs() < 1e-4, "1 ms and 2 MB from the other rank at 2 GB/s: {ms}");
    });
}
