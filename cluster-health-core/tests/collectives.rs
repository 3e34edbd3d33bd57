//! Collectives of the host backend between threads, against a plain computation of the same thing.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    reason = "a test of small numbers: what goes wrong must panic"
)]

use std::process::Command;
use std::time::Duration;

use cluster_health_core::rank::{Board, RankGroup};
use cluster_health_core::{
    ByteSize, Communicator, DataType, DeviceBuffer, Machine, ReduceOp, Result, Stream,
};

/// One rank's things.
struct Rank<'g> {
    communicator: Communicator<'g>,
    machine: Machine,
    stream: Stream,
}

impl Rank<'_> {
    fn buffer(&self, bytes: &[u8]) -> DeviceBuffer {
        let size = ByteSize(bytes.len().max(1) as u64);
        let mut buffer = DeviceBuffer::new(self.stream.device(), size).unwrap();
        buffer.write(0, bytes).unwrap();
        buffer
    }

    fn empty(&self, len: usize) -> DeviceBuffer {
        self.buffer(&vec![0xEE; len])
    }
}

fn content(buffer: &DeviceBuffer, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// Runs `work` on every rank of a group of threads; its results in rank order.
fn on_ranks<T: Send>(size: u32, work: impl Fn(&mut Rank<'_>) -> T + Sync) -> Vec<T> {
    let groups = RankGroup::threads(size).unwrap();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                scope.spawn(move || {
                    group.set_timeout(Duration::from_secs(20));
                    let machine = Machine::host().unwrap();
                    let device = machine.devices().remove(0);
                    let communicator = Communicator::new(&group, &device).unwrap();
                    let stream = Stream::new(&device).unwrap();
                    work(&mut Rank { communicator, machine, stream })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Bytes that tell rank and place.
fn pattern(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + rank * 31 + i / 256) as u8).collect()
}

const SIZES: [u32; 4] = [1, 2, 3, 5];
/// Nothing, odd, inside a message, just above, several pages, streamed past the caches.
const COUNTS: [usize; 7] = [0, 1, 13, 4096, 4097, 70_001, (1 << 20) + 5];

#[test]
fn all_gather_gives_every_rank_all_blocks() {
    for size in SIZES {
        on_ranks(size, |rank| {
            let (me, n) = (rank.communicator.rank() as usize, size as usize);
            for count in COUNTS {
                let expected: Vec<u8> = (0..n).flat_map(|r| pattern(r, count)).collect();
                let send = rank.buffer(&pattern(me, count));
                let mut receive = rank.empty(n * count);
                let comm = &mut rank.communicator;
                comm.all_gather(&send, &mut receive, count, DataType::UInt8, &rank.stream).unwrap();
                assert_eq!(content(&receive, n * count), expected, "{count} of {n}");

                let mut own = vec![0xEE; n * count];
                own[me * count..(me + 1) * count].copy_from_slice(&pattern(me, count));
                let mut buffer = rank.buffer(&own);
                let comm = &mut rank.communicator;
                comm.all_gather_in_place(&mut buffer, count, DataType::Int8, &rank.stream).unwrap();
                assert_eq!(content(&buffer, n * count), expected, "{count} of {n}, in place");
            }
        });
    }
}

#[test]
fn a_buffer_is_used_again_and_again() {
    on_ranks(2, |rank| {
        let me = rank.communicator.rank() as usize;
        let mut receive = rank.empty(2 * 10_000);
        for turn in 0..200 {
            for count in [8, 10_000] {
                let send = rank.buffer(&pattern(me + turn, count));
                let comm = &mut rank.communicator;
                comm.all_gather(&send, &mut receive, count, DataType::UInt8, &rank.stream).unwrap();
                let expected = [pattern(turn, count), pattern(turn + 1, count)].concat();
                assert_eq!(content(&receive, 2 * count), expected, "turn {turn}");
            }
        }
    });
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

#[test]
fn reductions_equal_the_sum_in_rank_order() {
    for size in SIZES {
        let value = |rank: usize, i: usize| (rank + 1) as f32 * 0.1 + i as f32;
        on_ranks(size, |rank| {
            let (me, n) = (rank.communicator.rank() as usize, size as usize);
            for count in [0, 1, 7, 1000, 40_001] {
                // Element i over all ranks, added in rank order as every rank must.
                let sums: Vec<f32> = (0..n * count)
                    .map(|i| (1..n).fold(value(0, i), |sum, r| sum + value(r, i)))
                    .collect();
                let own: Vec<f32> = (0..n * count).map(|i| value(me, i)).collect();
                let send = rank.buffer(&floats(&own));

                let mut receive = rank.empty(4 * count);
                let (comm, op) = (&mut rank.communicator, ReduceOp::Sum);
                comm.reduce_scatter(
                    &send,
                    &mut receive,
                    count,
                    DataType::Float32,
                    op,
                    &rank.stream,
                )
                .unwrap();
                let mine = floats(&sums[me * count..(me + 1) * count]);
                assert_eq!(content(&receive, 4 * count), mine, "reduce_scatter {count} of {n}");

                let mut receive = rank.empty(4 * count);
                let comm = &mut rank.communicator;
                comm.all_reduce(&send, &mut receive, count, DataType::Float32, op, &rank.stream)
                    .unwrap();
                assert_eq!(content(&receive, 4 * count), floats(&sums[..count]), "all_reduce");

                let mut buffer = rank.buffer(&floats(&own[..count]));
                let comm = &mut rank.communicator;
                comm.all_reduce_in_place(&mut buffer, count, DataType::Float32, op, &rank.stream)
                    .unwrap();
                assert_eq!(content(&buffer, 4 * count), floats(&sums[..count]), "in place");
            }
        });
    }
}

#[test]
fn reduce_operations_and_types() {
    // Rank 0 has -3, rank 1 has 5.
    let cases = [
        (ReduceOp::Sum, 2.0_f64),
        (ReduceOp::Prod, -15.0),
        (ReduceOp::Max, 5.0),
        (ReduceOp::Min, -3.0),
    ];
    on_ranks(2, |rank| {
        let own = [-3.0_f64, 5.0][rank.communicator.rank() as usize];
        for (op, expected) in cases {
            let mut check = |data_type: DataType, bytes: &[u8], result: &[u8]| {
                let send = rank.buffer(bytes);
                let mut receive = rank.empty(bytes.len());
                let comm = &mut rank.communicator;
                comm.all_reduce(&send, &mut receive, 1, data_type, op, &rank.stream).unwrap();
                assert_eq!(content(&receive, bytes.len()), result, "{data_type:?} {op:?}");
            };
            check(DataType::Float64, &own.to_ne_bytes(), &expected.to_ne_bytes());
            check(DataType::Int8, &(own as i8).to_ne_bytes(), &(expected as i8).to_ne_bytes());
            check(DataType::Int16, &(own as i16).to_ne_bytes(), &(expected as i16).to_ne_bytes());
            check(DataType::Int32, &(own as i32).to_ne_bytes(), &(expected as i32).to_ne_bytes());
            check(DataType::Int64, &(own as i64).to_ne_bytes(), &(expected as i64).to_ne_bytes());
            // 16-bit patterns of these values, written down: IEEE half and brain float.
            let half = |v: f64| {
                [(2.0, 0x4000), (-15.0, 0xCB80), (5.0, 0x4500), (-3.0, 0xC200)]
                    .iter()
                    .find(|(x, _)| *x == v)
                    .map(|(_, bits)| u16::to_ne_bytes(*bits))
                    .unwrap()
            };
            check(DataType::Float16, &half(own), &half(expected));
            let brain = |v: f64| {
                [(2.0, 0x4000), (-15.0, 0xC170), (5.0, 0x40A0), (-3.0, 0xC040)]
                    .iter()
                    .find(|(x, _)| *x == v)
                    .map(|(_, bits)| u16::to_ne_bytes(*bits))
                    .unwrap()
            };
            check(DataType::BFloat16, &brain(own), &brain(expected));
        }
    });
}

#[test]
fn broadcast_all_to_all_and_point_to_point() {
    for size in SIZES {
        on_ranks(size, |rank| {
            let (me, n) = (rank.communicator.rank() as usize, size as usize);
            for count in COUNTS {
                for root in 0..size {
                    let mut buffer = rank.buffer(&pattern(me, count));
                    let comm = &mut rank.communicator;
                    comm.broadcast(&mut buffer, count, DataType::UInt8, root, &rank.stream)
                        .unwrap();
                    assert_eq!(content(&buffer, count), pattern(root as usize, count));
                }
                let block = |from: usize, to: usize| pattern(from * 10 + to, count);
                let send: Vec<u8> = (0..n).flat_map(|to| block(me, to)).collect();
                let expected: Vec<u8> = (0..n).flat_map(|from| block(from, me)).collect();
                let send = rank.buffer(&send);
                let mut receive = rank.empty(n * count);
                let comm = &mut rank.communicator;
                comm.all_to_all(&send, &mut receive, count, DataType::UInt8, &rank.stream).unwrap();
                assert_eq!(content(&receive, n * count), expected, "all_to_all {count} of {n}");

                // A ring: every rank sends to the next one; even ranks send first.
                if n > 1 && n.is_multiple_of(2) {
                    let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
                    let send = rank.buffer(&pattern(me, count));
                    let mut receive = rank.empty(count);
                    let comm = &mut rank.communicator;
                    let (next, previous) = (next as u32, previous as u32);
                    let kind = DataType::UInt8;
                    if me.is_multiple_of(2) {
                        comm.send(&send, count, kind, next, &rank.stream).unwrap();
                        comm.receive(&mut receive, count, kind, previous, &rank.stream).unwrap();
                    } else {
                        comm.receive(&mut receive, count, kind, previous, &rank.stream).unwrap();
                        comm.send(&send, count, kind, next, &rank.stream).unwrap();
                    }
                    assert_eq!(content(&receive, count), pattern(previous as usize, count));
                }
            }
            rank.communicator.barrier().unwrap();
        });
    }
}

#[test]
fn ranks_on_one_cpu_and_on_their_own() {
    on_ranks(2, |rank| {
        let cpus = rank.machine.census().unwrap().bindable();
        let me = rank.communicator.rank() as usize;
        for cpu in [cpus[0], cpus[me % cpus.len()]] {
            let _binding = rank.machine.bind(cpu).unwrap();
            rank.communicator.note_cpu(cpu);
            let mut receive = rank.empty(2 * 5000);
            for count in [8, 5000] {
                let send = rank.buffer(&pattern(me, count));
                for _ in 0..50 {
                    let comm = &mut rank.communicator;
                    comm.all_gather(&send, &mut receive, count, DataType::UInt8, &rank.stream)
                        .unwrap();
                }
                let expected = [pattern(0, count), pattern(1, count)].concat();
                assert_eq!(content(&receive, 2 * count), expected);
            }
        }
    });
}

fn error_text(result: Result<()>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn ranks_in_different_calls_are_found_out() {
    let texts = on_ranks(2, |rank| {
        let send = rank.buffer(&[1; 64]);
        let mut receive = rank.empty(128);
        let count = if rank.communicator.rank() == 0 { 64 } else { 32 };
        let comm = &mut rank.communicator;
        let first =
            error_text(comm.all_gather(&send, &mut receive, count, DataType::UInt8, &rank.stream));
        let again = error_text(comm.barrier());
        (first, again)
    });
    for (rank, (first, again)) in texts.iter().enumerate() {
        assert!(first.contains(&format!("rank {}", 1 - rank)), "{first}");
        assert!(first.contains("another call"), "{first}");
        assert!(again.contains("failed before"), "{again}");
    }
}

#[test]
fn a_missing_rank_is_named_within_the_timeout() {
    let over = std::sync::Barrier::new(3);
    let texts = on_ranks(3, |rank| {
        rank.communicator.set_timeout(Duration::from_millis(300));
        let began = std::time::Instant::now();
        let is_missing = rank.communicator.rank() == 1;
        let ended = if is_missing { Ok(()) } else { rank.communicator.barrier() };
        let waited = began.elapsed();
        over.wait();
        // Less than the group's own timeout, with room for a busy machine.
        assert!(waited < Duration::from_secs(5), "{waited:?}");
        if is_missing { String::new() } else { error_text(ended) }
    });
    for rank in [0, 2] {
        // Rank 0 waits for rank 1 first; rank 2 for rank 0, which is there, then for rank 1.
        assert!(texts[rank].contains("rank 1: timeout"), "{}", texts[rank]);
    }
}

#[test]
fn a_rank_that_left_is_named_at_once() {
    let texts = on_ranks(2, |rank| {
        if rank.communicator.rank() == 1 {
            return String::new();
        }
        let began = std::time::Instant::now();
        let text = error_text(rank.communicator.barrier());
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        text
    });
    assert!(texts[0].starts_with("rank 1: "), "{}", texts[0]);
    assert!(!texts[0].contains("timeout"), "{}", texts[0]);
}

#[test]
fn misuse_is_a_typed_error() {
    on_ranks(2, |rank| {
        let send = rank.buffer(&[1; 8]);
        let mut receive = rank.empty(8);
        let comm = &mut rank.communicator;
        let kind = DataType::Int64;
        // Refused before anything is said to the other rank, so the communicator stays usable.
        let text = error_text(comm.all_gather(&send, &mut receive, 1, kind, &rank.stream));
        assert!(text.contains("2 × 8 bytes in a buffer of 8 bytes"), "{text}");
        let text = error_text(comm.broadcast(&mut receive, 1, kind, 2, &rank.stream));
        assert!(text.contains("no rank 2"), "{text}");
        let me = comm.rank();
        let text = error_text(comm.send(&send, 1, kind, me, &rank.stream));
        assert!(text.contains("this rank itself"), "{text}");
        let text = error_text(comm.all_gather(&send, &mut receive, usize::MAX, kind, &rank.stream));
        assert!(text.contains("larger than the address space"), "{text}");
        comm.barrier().unwrap();
    });
}

/// Set where this program runs as the process of one test.
const INNER: &str = "COLLECTIVES_TEST_INNER";

/// True in a process in which the test `name` is all that happens; elsewhere runs it there first.
fn is_alone(name: &str) -> bool {
    if std::env::var_os(INNER).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(INNER, "1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}{said}", output.status);
    assert!(text.contains("1 passed"), "{name} did not run: {text}");
    false
}

#[test]
fn buffers_come_and_go() {
    if !is_alone("buffers_come_and_go") {
        return;
    }
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap();
    let counts = on_ranks(3, |rank| {
        let me = rank.communicator.rank() as usize;
        let len = 5000;
        let mut counts = Vec::new();
        // Made first, used in between and last: other ranks let go of it and map it anew.
        let mut old = rank.empty(3 * len);
        for turn in 0..300 {
            let expected: Vec<u8> = (0..3).flat_map(|r| pattern(r + turn, len)).collect();
            let send = rank.buffer(&pattern(me + turn, len));
            let mut fresh = rank.empty(3 * len);
            let receive = if turn % 100 == 99 { &mut old } else { &mut fresh };
            let (comm, kind) = (&mut rank.communicator, DataType::UInt8);
            comm.all_gather(&send, receive, len, kind, &rank.stream).unwrap();
            assert_eq!(content(receive, 3 * len), expected, "turn {turn}");

            let mut buffer = rank.buffer(&pattern(me + turn, len));
            let (comm, root) = (&mut rank.communicator, (turn % 3) as u32);
            comm.broadcast(&mut buffer, len, kind, root, &rank.stream).unwrap();
            assert_eq!(content(&buffer, len), pattern(root as usize + turn, len), "turn {turn}");

            let mut sum = rank.empty(len);
            let comm = &mut rank.communicator;
            comm.all_reduce(&send, &mut sum, len, kind, ReduceOp::Max, &rank.stream).unwrap();
            comm.reduce_scatter(&buffer, &mut sum, 0, kind, ReduceOp::Max, &rank.stream).unwrap();
            // Every rank holds the same buffers at these places, and has mapped all it may.
            if [60, 120, 180, 240].contains(&turn) {
                comm.barrier().unwrap();
                counts.push((open(), mapped().matches("memfd:cluster-health").count()));
                comm.barrier().unwrap();
            }
        }
        counts
    });
    // Nothing else happens in this process. Of 6 pairs of ranks 32 buffers stay mapped, each rank has
    // 5 of its own here (`old`, `send`, `fresh`, `buffer`, `sum`) and the board.
    for count in &counts {
        for (at, (files, mappings)) in count.iter().enumerate() {
            assert!(files.abs_diff(count[0].0) <= 2, "descriptors at {at}: {counts:?}");
            assert_eq!(*mappings, 6 * 32 + 3 * (5 + 1), "mappings at {at}: {counts:?}");
        }
    }
}

#[test]
fn a_board_is_of_no_use_after_a_failed_exchange_or_a_farewell() {
    let groups = RankGroup::threads(2).unwrap();
    let texts: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let mut board = Board::new(&group, 9).unwrap();
                    board.exchange(1, &[1], |_, _| Ok(())).unwrap();
                    if group.rank() == 0 {
                        board.leave(2, b"bye");
                        board.leave(3, b"again");
                        return error_text(board.exchange(1, &[], |_, _| Ok(())));
                    }
                    let mut last = Vec::new();
                    let refused = board.exchange(1, &[], |rank, message| {
                        if rank == 0 {
                            last = message.bytes.to_vec();
                        }
                        group.receive(7).map(drop)
                    });
                    assert_eq!(last, b"bye");
                    refused.unwrap_err();
                    error_text(board.exchange(1, &[], |_, _| Ok(())))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| text.contains("make a new one")), "{texts:?}");
}
