//! What strangers and broken ranks can do to a meeting and to the channel: nothing that lasts longer
//! than the timeout or takes more memory than a bound.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankToken;
use cluster_health_core::{RankEnvironment, RankFamily, RankGroup, Result};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(500);
/// What a machine with other work may add to a timeout.
const MARGIN: Duration = Duration::from_secs(5);

fn local(folder: &Path, rank: u32, size: u32) -> RankEnvironment {
    RankEnvironment {
        rank,
        size,
        local_rank: Some(rank),
        local_size: Some(size),
        family: RankFamily::Torchrun,
        job: "a job".to_owned(),
        rendezvous: None,
        token: None,
        folders: vec![folder.to_owned()],
    }
}

fn remote(place: &str, token: &str, rank: u32) -> RankEnvironment {
    RankEnvironment {
        local_rank: Some(0),
        local_size: Some(1),
        rendezvous: Some(place.to_owned()),
        token: Some(RankToken::new(token)),
        ..local(Path::new("/nowhere"), rank, 2)
    }
}

fn join(
    environment: RankEnvironment,
    timeout: Duration,
) -> JoinHandle<(Result<RankGroup>, Duration)> {
    thread::spawn(move || {
        let began = Instant::now();
        (RankGroup::join(&environment, timeout), began.elapsed())
    })
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A connection to a listener that is about to be there.
fn reach<T>(connect: impl Fn() -> std::io::Result<T>) -> T {
    let began = Instant::now();
    loop {
        match connect() {
            Ok(stream) => return stream,
            Err(error) => assert!(began.elapsed() < TIMEOUT, "{error}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The socket that rank 0 of a job listens at, once it does.
fn socket(base: &Path) -> PathBuf {
    reach(|| {
        let users = fs::read_dir(base)?.flatten().flat_map(|user| fs::read_dir(user.path()));
        let mut sockets = users.flatten().flatten().map(|job| job.path().join("rank-0.sock"));
        sockets.find(|path| path.exists()).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    })
}

#[test]
fn silent_and_slow_strangers_hold_nobody_up() {
    let place = format!("127.0.0.1:{}", free_port());
    for comes in [false, true] {
        let zero = join(remote(&place, "the secret", 0), if comes { TIMEOUT } else { SHORT });
        let silent: Vec<TcpStream> = (0..3).map(|_| reach(|| TcpStream::connect(&place))).collect();
        let mut slow = reach(|| TcpStream::connect(&place));
        let one = comes.then(|| join(remote(&place, "the secret", 1), TIMEOUT));
        // A byte of a hello that never becomes whole, again and again.
        for byte in b"CLHEALTH\0\0\0\x01".iter().chain(&[0; 60]) {
            if slow.write_all(&[*byte]).is_err() || zero.is_finished() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let (met, took) = zero.join().unwrap();
        match one {
            None => {
                let error = met.unwrap_err();
                assert_eq!((error.kind(), error.rank()), ("timeout", Some(1)), "{error}");
                assert!((SHORT..SHORT + MARGIN).contains(&took), "{took:?}");
            }
            Some(one) => {
                assert!(met.is_ok() && one.join().unwrap().0.is_ok());
                assert!(took < TIMEOUT);
            }
        }
        drop(silent);
    }
}

#[test]
fn a_flood_of_connections_keeps_out_no_rank_and_holds_up_none() {
    let stop = AtomicBool::new(false);
    for comes in [false, true] {
        let base = TempDir::new().unwrap();
        let zero = join(local(base.path(), 0, 2), if comes { TIMEOUT } else { SHORT });
        let path = socket(base.path());
        stop.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut held = std::collections::VecDeque::new();
                    while !stop.load(Ordering::Relaxed) {
                        // Refused once the meeting is over.
                        let Ok(stream) = UnixStream::connect(&path) else { break };
                        held.push_back(stream);
                        // The limit of open files is one for all tests of this process.
                        if held.len() > 30 {
                            drop(held.pop_front());
                        }
                    }
                });
            }
            let one = comes.then(|| {
                thread::sleep(Duration::from_millis(100));
                join(local(base.path(), 1, 2), TIMEOUT)
            });
            let (met, took) = zero.join().unwrap();
            stop.store(true, Ordering::Relaxed);
            match one {
                None => {
                    let error = met.unwrap_err();
                    assert_eq!(error.kind(), "timeout", "{error}");
                    assert!(error.to_string().contains("were turned away"), "{error}");
                    assert!(took < SHORT + MARGIN, "{took:?}");
                }
                Some(one) => assert!(met.is_ok() && one.join().unwrap().0.is_ok()),
            }
        });
    }
}

#[test]
fn rank_0_listens_at_the_given_interface_only() {
    let port = free_port();
    let zero = join(remote(&format!("127.0.0.1:{port}"), "the secret", 0), Duration::from_secs(2));
    let mut stranger = reach(|| TcpStream::connect(("127.0.0.1", port)));
    for elsewhere in ["127.0.0.2", "127.255.255.254"] {
        let error = TcpStream::connect((elsewhere, port)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{elsewhere}");
    }
    // What a stranger hears is a challenge that says nothing of the secret or the job.
    let mut challenge = [0; 44];
    stranger.read_exact(&mut challenge).unwrap();
    assert_eq!(&challenge[..12], b"CLHEALTH\0\0\0\x01");
    drop(stranger);
    assert_eq!(zero.join().unwrap().0.unwrap_err().kind(), "timeout");
}

#[test]
fn tokens_that_are_nearly_right_are_wrong() {
    let right = "0123456789abcdef0123456789abcdef";
    assert_eq!(RankToken::new(right), RankToken::new(right));
    for wrong in [&right[1..], &right[..31], "0123456789abcdef0123456789abcdeF", "", " "] {
        assert_ne!(RankToken::new(right), RankToken::new(wrong));
        let place = format!("127.0.0.1:{}", free_port());
        let zero = join(remote(&place, right, 0), SHORT);
        let (met, _) = join(remote(&place, wrong, 1), SHORT).join().unwrap();
        assert!(met.is_err(), "{wrong:?}");
        assert!(zero.join().unwrap().0.is_err(), "{wrong:?}");
    }
}

#[test]
fn numbers_of_ranks_beyond_any_job_are_refused_at_once() {
    let base = TempDir::new().unwrap();
    for size in [65_537, u32::MAX] {
        let (met, took) = join(local(base.path(), 0, size), TIMEOUT).join().unwrap();
        let error = met.unwrap_err();
        assert_eq!(error.kind(), "invalid", "{error}");
        assert!(error.to_string().contains("at most 65536"), "{error}");
        assert!(took < MARGIN, "{took:?}");
        let variables = |name: &str| match name {
            "RANK" => Some("1".to_owned()),
            "WORLD_SIZE" => Some(size.to_string()),
            _ => None,
        };
        let error = RankEnvironment::from_variables(variables).unwrap_err().to_string();
        assert!(error.starts_with("WORLD_SIZE: ") && error.contains("at most 65536"), "{error}");
    }
    // Of many that are missing a few are named.
    let (met, took) = join(local(base.path(), 0, 65_536), SHORT).join().unwrap();
    let error = met.unwrap_err().to_string();
    assert!(error.contains("1, 2, 3") && error.contains("20, … (65515 more) of"), "{error}");
    assert!(error.len() < 1000 && took < SHORT + MARGIN, "{took:?}: {error}");
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}

/// Rank 1 sends what nobody asks for until it is told that nobody takes it.
fn unasked(send: impl Fn(&RankGroup) -> Result<()> + Sync) -> (Duration, String, u32) {
    let mut groups = RankGroup::threads(3).unwrap();
    groups.iter_mut().for_each(|group| group.set_timeout(Duration::from_secs(2)));
    let [zero, one, _two] = <[RankGroup; 3]>::try_from(groups).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if send(&one).is_err() {
                    break;
                }
            }
        });
        let began = Instant::now();
        let error = zero.receive(2).unwrap_err();
        assert_eq!((error.kind(), error.rank()), ("timeout", Some(2)), "{error}");
        let took = began.elapsed();
        let mut taken = 0;
        let error = loop {
            match zero.receive(1) {
                Ok(_) => taken += 1,
                Err(error) => break error,
            }
        };
        stop.store(true, Ordering::Relaxed);
        (took, error.to_string(), taken)
    })
}

#[test]
fn messages_that_nobody_takes_are_bounded_and_delay_nobody() {
    let large = vec![7; 16 << 20];
    let (took, error, taken) = unasked(|one| one.send(0, &large));
    assert!(took < Duration::from_secs(2) + MARGIN, "{took:?}");
    assert!(error.contains("rank 1") && error.contains("that nobody takes"), "{error}");
    assert_eq!(taken, 4, "three and the one that was beyond 64 MiB");
    // Small ones count 64 bytes more than they have.
    let (took, error, taken) = unasked(|one| one.send(0, &large[..1024]));
    assert!(took < Duration::from_secs(2) + MARGIN, "{took:?}");
    assert!(error.contains("that nobody takes"), "{error}");
    assert_eq!(taken, (64 << 20) / (1024 + 64) + 1);
}

#[test]
fn descriptors_that_nobody_takes_are_bounded() {
    let file = tempfile::tempfile().unwrap();
    let (_, error, taken) = unasked(|one| one.send_fd(0, 3, file.as_fd()));
    assert!(error.contains("descriptors that nobody takes"), "{error}");
    assert_eq!(taken, 0);
}
