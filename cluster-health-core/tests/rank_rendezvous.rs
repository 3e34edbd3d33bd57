//! Launched ranks that meet, on one host and through TCP: late ones, strangers, leftovers.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankToken;
use cluster_health_core::{Error, RankEnvironment, RankFamily, RankGroup, Result};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(300);
/// What a busy machine may add to what takes no time; less than waiting for [`TIMEOUT`].
const SLACK: Duration = Duration::from_secs(4);

/// One of `size` ranks on this host that meet below `folder`.
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

/// One of `size` ranks that meet through TCP at `place`.
fn remote(place: &str, token: &str, rank: u32, size: u32) -> RankEnvironment {
    RankEnvironment {
        local_rank: Some(0),
        local_size: Some(1),
        rendezvous: Some(place.to_owned()),
        token: Some(RankToken::new(token)),
        ..local(Path::new("/nowhere"), rank, size)
    }
}

fn join(environment: RankEnvironment, timeout: Duration) -> JoinHandle<Result<RankGroup>> {
    thread::spawn(move || RankGroup::join(&environment, timeout))
}

fn joined(ranks: impl IntoIterator<Item = JoinHandle<Result<RankGroup>>>) -> Vec<RankGroup> {
    ranks.into_iter().map(|one| one.join().unwrap().unwrap()).collect()
}

/// All ranks compare, which needs every connection to rank 0 in both directions.
fn compare(groups: &[RankGroup]) {
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| group.all_equal("plan", "same").unwrap());
        }
    });
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

fn user_folder(base: &Path) -> PathBuf {
    base.join(format!("cluster-health-{}", rustix::process::geteuid().as_raw()))
}

/// The path of a rank's socket, once it listens.
fn socket(base: &Path, rank: u32) -> PathBuf {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < TIMEOUT, "rank {rank} does not listen");
        let jobs = fs::read_dir(user_folder(base)).into_iter().flatten().flatten();
        let mut paths = jobs.map(|job| job.path().join(format!("rank-{rank}.sock")));
        if let Some(path) = paths.find(|path| path.exists()) {
            return path;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// An address of this host that nobody listens at.
fn free_place() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn ranks_of_one_host_meet_in_any_order_and_leave_nothing() {
    let base = TempDir::new().unwrap();
    // Longer than the address of a Unix socket can be.
    let folder = base.path().join("x".repeat(120));
    fs::create_dir(&folder).unwrap();
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let starts = order.map(|rank| {
            thread::sleep(Duration::from_millis(15));
            join(local(&folder, rank, 4), TIMEOUT)
        });
        let groups = joined(starts);
        assert!(is_empty(&folder), "{order:?}");
        compare(&groups);
        let by_rank = |rank| groups.iter().find(|group| group.rank() == rank).unwrap();
        by_rank(1).send(3, b"from 1").unwrap();
        assert_eq!(by_rank(3).receive(1).unwrap(), b"from 1");
        let file = tempfile::tempfile().unwrap();
        by_rank(3).send_fd(2, 9, file.as_fd()).unwrap();
        by_rank(2).receive_fd(3, 9).unwrap();
        assert!(by_rank(0).same_host(3));
    }
}

#[test]
fn jobs_do_not_meet_each_other() {
    let base = TempDir::new().unwrap();
    let other = |rank| RankEnvironment { job: "another".to_owned(), ..local(base.path(), rank, 2) };
    let ranks = [
        join(local(base.path(), 0, 2), TIMEOUT),
        join(other(1), TIMEOUT),
        join(other(0), TIMEOUT),
        join(local(base.path(), 1, 2), TIMEOUT),
    ];
    let groups = joined(ranks);
    for (sender, receiver) in [(0_usize, 3_usize), (2, 1)] {
        groups[sender].send(1, &sender.to_le_bytes()).unwrap();
        assert_eq!(groups[receiver].receive(0).unwrap(), sender.to_le_bytes());
    }
    assert!(is_empty(base.path()));
}

#[test]
fn a_late_rank_is_a_timeout_that_names_it() {
    let base = TempDir::new().unwrap();
    let start = Instant::now();
    let zero = join(local(base.path(), 0, 2), SHORT);
    thread::sleep(SHORT * 2);
    let one = join(local(base.path(), 1, 2), SHORT);
    let error = zero.join().unwrap().unwrap_err();
    assert!(start.elapsed() < SHORT * 2 + SLACK);
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(1)), "{error}");
    assert!(error.to_string().contains("rank 1 of 2 was not there within 300 ms"), "{error}");
    // Rank 0 is gone by then.
    let start = Instant::now();
    let error = one.join().unwrap().unwrap_err();
    assert!(start.elapsed() < SHORT + SLACK);
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(0)), "{error}");
    assert!(is_empty(base.path()));
    // Late, but within the bound.
    let zero = join(local(base.path(), 0, 2), TIMEOUT);
    thread::sleep(SHORT);
    compare(&joined([zero, join(local(base.path(), 1, 2), TIMEOUT)]));
}

#[test]
fn all_missing_ranks_are_listed() {
    let base = TempDir::new().unwrap();
    let zero = join(local(base.path(), 0, 4), SHORT);
    let two = join(local(base.path(), 2, 4), SHORT * 2);
    let error = zero.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("ranks 1, 3 of 4"), "{error}");
    let error = two.join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(1)), "{error}");
    assert!(is_empty(base.path()));
}

#[test]
fn strangers_are_turned_away_and_the_wait_goes_on() {
    let base = TempDir::new().unwrap();
    let zero = join(local(base.path(), 0, 3), TIMEOUT);
    let path = socket(base.path(), 0);
    let silent = UnixStream::connect(&path).unwrap();
    let mut wrong = UnixStream::connect(&path).unwrap();
    wrong.write_all(&[b'x'; 200]).unwrap();
    let mut partly = UnixStream::connect(&path).unwrap();
    partly.write_all(b"CLHEALTH\0\0\0\x01").unwrap();
    drop(partly);
    // A rank of another group size is told so.
    let error = RankGroup::join(&local(base.path(), 2, 5), TIMEOUT).unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("rank", Some(0)));
    assert!(error.to_string().contains("5 ranks"), "{error}");
    // So is a second process with the rank of one that is there already.
    let two = join(local(base.path(), 2, 3), TIMEOUT);
    thread::sleep(Duration::from_millis(100));
    let error = RankGroup::join(&local(base.path(), 2, 3), TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("already rank 2"), "{error}");
    let one = join(local(base.path(), 1, 3), TIMEOUT);
    compare(&joined([zero, one, two]));
    // The stranger was hung up on: at its end comes the challenge, then the end.
    wrong.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut rest = Vec::new();
    drop(wrong.read_to_end(&mut rest));
    assert!(rest.len() <= 44, "{rest:?}");
    drop(silent);
    assert!(is_empty(base.path()));
}

#[test]
fn strangers_are_mentioned_when_nobody_else_comes() {
    let base = TempDir::new().unwrap();
    let zero = join(local(base.path(), 0, 2), SHORT);
    let mut stranger = UnixStream::connect(socket(base.path(), 0)).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let error = zero.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("1 connections were turned away"), "{error}");
    assert!(error.contains("another kind or version"), "{error}");
}

#[test]
fn sockets_of_a_dead_run_are_replaced() {
    let base = TempDir::new().unwrap();
    let zero = join(local(base.path(), 0, 2), SHORT);
    let path = socket(base.path(), 0);
    zero.join().unwrap().unwrap_err();
    assert!(!path.exists());
    // What a killed rank leaves: its folders and a socket that nobody listens at.
    let folder = path.parent().unwrap();
    for part in [folder.parent().unwrap(), folder] {
        fs::create_dir(part).unwrap();
        fs::set_permissions(part, fs::Permissions::from_mode(0o700)).unwrap();
    }
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let ranks = [1, 0].map(|rank| join(local(base.path(), rank, 2), TIMEOUT));
    compare(&joined(ranks));
    assert!(is_empty(base.path()));
}

#[test]
fn who_gives_up_clears_away_what_killed_ranks_left() {
    let base = TempDir::new().unwrap();
    let zero = join(local(base.path(), 0, 3), SHORT);
    let path = socket(base.path(), 0);
    drop(UnixListener::bind(path.with_file_name("rank-1.sock")).unwrap());
    zero.join().unwrap().unwrap_err();
    assert!(is_empty(base.path()));
}

#[test]
fn a_second_process_with_the_same_rank_is_told_who_has_it() {
    let base = TempDir::new().unwrap();
    let first = join(local(base.path(), 0, 2), TIMEOUT);
    drop(socket(base.path(), 0));
    let error = RankGroup::join(&local(base.path(), 0, 2), SHORT).unwrap_err();
    assert_eq!(error.kind(), "busy");
    let owner = format!("process {} is rank 0", std::process::id());
    assert!(error.to_string().contains(&owner), "{error}");
    // The first one was not disturbed.
    compare(&joined([first, join(local(base.path(), 1, 2), TIMEOUT)]));
}

#[test]
fn folders_that_others_can_change_are_refused() {
    let base = TempDir::new().unwrap();
    let mine = user_folder(base.path());
    let refused = || {
        let start = Instant::now();
        let error = RankGroup::join(&local(base.path(), 0, 2), TIMEOUT).unwrap_err();
        assert!(start.elapsed() < SLACK, "{error}");
        error
    };
    fs::create_dir(&mine).unwrap();
    fs::set_permissions(&mine, fs::Permissions::from_mode(0o755)).unwrap();
    let error = refused();
    assert_eq!(error.kind(), "unavailable");
    assert!(error.to_string().contains("mode 0755"), "{error}");
    fs::remove_dir(&mine).unwrap();
    // A link, even to a folder that would do.
    let other = TempDir::new().unwrap();
    fs::set_permissions(other.path(), fs::Permissions::from_mode(0o700)).unwrap();
    symlink(other.path(), &mine).unwrap();
    let error = refused();
    assert_eq!(error.kind(), "system");
    assert!(error.to_string().contains("symbolic link"), "{error}");
    fs::remove_file(&mine).unwrap();
    // A folder of somebody else, which only the super-user can make here.
    if rustix::process::geteuid().is_root() {
        fs::create_dir(&mine).unwrap();
        fs::set_permissions(&mine, fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(&mine, Some(65_534), None).unwrap();
        let error = refused();
        assert!(error.to_string().contains("belongs to user 65534"), "{error}");
    }
}

#[test]
fn folders_that_cannot_be_used_are_passed_over() {
    let base = TempDir::new().unwrap();
    let missing = base.path().join("missing");
    let both = |rank| RankEnvironment {
        folders: vec![missing.clone(), base.path().to_owned()],
        ..local(base.path(), rank, 2)
    };
    compare(&joined([0, 1].map(|rank| join(both(rank), TIMEOUT))));
    let error = RankGroup::join(&local(&missing, 0, 2), TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), "unavailable");
    assert!(error.to_string().contains("XDG_RUNTIME_DIR"), "{error}");
}

#[test]
fn a_job_of_one_rank_meets_nobody() {
    let group = RankGroup::join(&local(Path::new("/nowhere"), 0, 1), TIMEOUT).unwrap();
    assert_eq!(group.size(), 1);
}

#[test]
fn tcp_connects_every_rank_to_rank_0() {
    let place = free_place();
    let ranks = [2, 0, 1].map(|rank| join(remote(&place, "secret", rank, 3), TIMEOUT));
    let groups = joined(ranks);
    compare(&groups);
    let (two, zero) = (&groups[0], &groups[1]);
    let long = vec![7; 16 << 20];
    thread::scope(|scope| {
        scope.spawn(|| two.send(0, &long).unwrap());
        assert_eq!(zero.receive(2).unwrap(), long);
    });
    assert!(!zero.same_host(2));
    assert!(matches!(two.send(1, b"x"), Err(Error::Invalid { .. })));
    two.check_alive(1).unwrap();
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(zero.send_fd(2, 1, file.as_fd()), Err(Error::Invalid { .. })));
    zero.check_alive(2).unwrap();
    drop(groups);
    // The port is free again.
    TcpListener::bind(&place).unwrap();
}

#[test]
fn tcp_needs_a_token_and_a_place() {
    let place = free_place();
    let complete = remote(&place, "secret", 0, 2);
    for (environment, option) in [
        (RankEnvironment { token: None, ..complete.clone() }, "CLUSTER_HEALTH_TOKEN"),
        (remote(&place, "", 0, 2), "CLUSTER_HEALTH_TOKEN"),
        (RankEnvironment { rendezvous: None, ..complete.clone() }, "CLUSTER_HEALTH_RENDEZVOUS"),
        (remote("nonsense", "secret", 0, 2), "CLUSTER_HEALTH_RENDEZVOUS"),
        (remote("127.0.0.1:http", "secret", 0, 2), "CLUSTER_HEALTH_RENDEZVOUS"),
    ] {
        match RankGroup::join(&environment, TIMEOUT) {
            Err(Error::Invalid { option: named, .. }) => assert_eq!(named, option),
            other => panic!("{other:?}"),
        }
    }
    // Where the launcher does not tell how many ranks are here, nothing is guessed.
    let unknown = RankEnvironment { local_size: None, token: None, ..complete };
    let error = RankGroup::join(&unknown, TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("not known"), "{error}");
}

#[test]
fn a_wrong_token_is_refused_and_the_right_one_still_gets_in() {
    let place = free_place();
    let zero = join(remote(&place, "secret", 0, 2), TIMEOUT);
    let start = Instant::now();
    let error = RankGroup::join(&remote(&place, "guess", 1, 2), TIMEOUT).unwrap_err();
    assert!(start.elapsed() < SLACK);
    assert_eq!((error.kind(), error.rank()), ("rank", Some(0)));
    assert!(error.to_string().contains("CLUSTER_HEALTH_TOKEN"), "{error}");
    let mut browser = TcpStream::connect(&place).unwrap();
    browser.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let silent = TcpStream::connect(&place).unwrap();
    compare(&joined([zero, join(remote(&place, "secret", 1, 2), TIMEOUT)]));
    drop(silent);
}

/// Who listens must know the token as well, or it could take part as rank 0.
#[test]
fn a_false_rank_0_is_not_believed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap().to_string();
    let one = join(remote(&place, "secret", 1, 2), SHORT);
    // The first connection only: the next one finds nobody who answers.
    let (mut caller, _) = listener.accept().unwrap();
    caller.write_all(b"CLHEALTH\0\0\0\x01").unwrap();
    caller.write_all(&[5; 32]).unwrap();
    let mut hello = [0; 84];
    caller.read_exact(&mut hello).unwrap();
    // "Welcome", with a MAC that is made up.
    caller.write_all(&[0; 33]).unwrap();
    let error = one.join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(0)), "{error}");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = taken.local_addr().unwrap().to_string();
    let start = Instant::now();
    let error = RankGroup::join(&remote(&place, "secret", 0, 2), TIMEOUT).unwrap_err();
    assert!(start.elapsed() < SLACK);
    assert_eq!((error.kind(), error.call()), ("system", Some("bind")));
    assert!(error.to_string().contains(&place), "{error}");
    assert!(error.advice().unwrap().contains("CLUSTER_HEALTH_PORT"), "{error}");
    // Whoever has it is no rank 0.
    let error = RankGroup::join(&remote(&place, "secret", 1, 2), SHORT).unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(0)), "{error}");
}

#[test]
fn a_missing_rank_is_named_through_tcp_too() {
    let place = free_place();
    let start = Instant::now();
    let zero = join(remote(&place, "secret", 0, 3), SHORT);
    let two = join(remote(&place, "secret", 2, 3), SHORT);
    let error = zero.join().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(1)), "{error}");
    assert!(start.elapsed() < SHORT + SLACK);
    // It was welcome, and sees that rank 0 has given up.
    let two = two.join().unwrap().unwrap();
    assert_eq!(two.receive(0).unwrap_err().rank(), Some(0));
}
