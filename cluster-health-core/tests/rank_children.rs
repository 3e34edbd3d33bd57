//! Ranks that are child processes: whoever dies, in whatever order, nobody and nothing is left.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cluster_health_core::{Error, RankGroup};
use rustix::process::{Pid, Signal, kill_process};

const TIMEOUT: Duration = Duration::from_secs(5);
/// What a busy machine may add to what takes no time; less than waiting for [`TIMEOUT`].
const SLACK: Duration = Duration::from_secs(4);
/// What a child is to do, and where a leader writes down its children.
const MODE: &str = "RANK_TEST_MODE";
const NOTE: &str = "RANK_TEST_NOTE";

/// Tests of this file exclude each other; at the end of each there are as many descriptors as
/// before, and no child process, not even a dead one.
struct Alone {
    _lock: MutexGuard<'static, ()>,
    descriptors: usize,
}

impl Alone {
    fn new() -> Self {
        static LOCK: Mutex<()> = Mutex::new(());
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        Self { _lock: lock, descriptors: descriptors() }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if !thread::panicking() {
            assert_eq!(descriptors(), self.descriptors, "descriptors before and after");
            assert_eq!(children(), Vec::<String>::new());
        }
    }
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// State and parent of a process, from the kernel.
fn stat(pid: &str) -> Option<(String, String)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = text.rsplit_once(") ")?.1.split(' ');
    Some((words.next()?.to_owned(), words.next()?.to_owned()))
}

fn children() -> Vec<String> {
    let me = std::process::id().to_string();
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|pid| stat(pid).is_some_and(|(_, parent)| parent == me))
        .collect()
}

/// Whether a process is gone, or dead and only not reaped by whoever inherited it.
fn is_dead(pid: &str) -> bool {
    stat(pid).is_none_or(|(state, _)| state == "Z" || state == "X")
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn signal(pid: &str, signal: Signal) {
    kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), signal).unwrap();
}

/// This program again, as the test that plays the child.
fn child(mode: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "child_main", "--nocapture"]);
    command.env(MODE, mode).stderr(Stdio::null());
    command
}

fn lead(mode: &str, size: u32) -> RankGroup {
    RankGroup::lead(child(mode), size, TIMEOUT).unwrap()
}

fn pid_of(group: &RankGroup, rank: u32) -> String {
    group.send(rank, b"pid").unwrap();
    String::from_utf8(group.receive(rank).unwrap()).unwrap()
}

/// Not a test: what the child processes of the tests run.
#[test]
#[ignore = "started by the other tests"]
fn child_main() {
    match std::env::var(MODE).as_deref() {
        Ok("answer") => answer(&RankGroup::from_parent(TIMEOUT).unwrap().unwrap(), false),
        Ok("deaf") => answer(&RankGroup::from_parent(TIMEOUT).unwrap().unwrap(), true),
        Ok("print") => {
            println!("on the output");
            drop(RankGroup::from_parent(TIMEOUT).unwrap().unwrap().receive(0));
        }
        Ok("launched") => {
            let group = RankGroup::from_environment(TIMEOUT).unwrap().unwrap();
            group.all_equal("plan", "same").unwrap();
            let note = std::env::var(NOTE).unwrap();
            fs::write(format!("{note}-{}", group.rank()), "met").unwrap();
            let error = group.receive(1 - group.rank()).unwrap_err();
            fs::write(format!("{note}-end"), error.to_string()).unwrap();
        }
        Ok("silent") => thread::sleep(TIMEOUT * 2),
        Ok("leader") => {
            let group = lead("deaf", 3);
            let pids = [pid_of(&group, 1), pid_of(&group, 2)];
            let note = std::env::var(NOTE).unwrap();
            fs::write(format!("{note}.part"), pids.join(" ")).unwrap();
            fs::rename(format!("{note}.part"), note).unwrap();
            thread::sleep(TIMEOUT * 2);
        }
        _ => {}
    }
}

fn answer(group: &RankGroup, deaf: bool) {
    assert_eq!(RankGroup::from_parent(TIMEOUT).unwrap_err().kind(), "busy");
    while let Ok(question) = group.receive(0) {
        match question.as_slice() {
            b"pid" => group.send(0, std::process::id().to_string().as_bytes()).unwrap(),
            b"sockets" => {
                let sockets = fs::read_dir("/proc/self/fd")
                    .unwrap()
                    .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
                    .filter(|link| link.to_string_lossy().starts_with("socket:"))
                    .count();
                group.send(0, sockets.to_string().as_bytes()).unwrap();
            }
            b"file" => {
                let mut file = File::from(group.receive_fd(0, 5).unwrap());
                file.write_all(b"from the child").unwrap();
                group.send(0, b"done").unwrap();
            }
            b"next" => group.send(group.rank() + 1, b"hello").unwrap(),
            b"previous" => {
                let heard = group.receive(group.rank() - 1).unwrap();
                group.send(0, &heard).unwrap();
            }
            b"stop" => return,
            b"panic" => panic!("asked to"),
            other => panic!("unknown question {other:?}"),
        }
        if deaf {
            thread::sleep(TIMEOUT * 2);
        }
    }
}

#[test]
fn children_answer_and_have_only_their_own_sockets() {
    let _alone = Alone::new();
    let group = lead("answer", 4);
    assert_eq!((group.rank(), group.size()), (0, 4));
    for rank in 1..4 {
        group.check_alive(rank).unwrap();
        assert!(children().contains(&pid_of(&group, rank)));
        group.send(rank, b"sockets").unwrap();
        assert_eq!(group.receive(rank).unwrap(), b"3");
    }
    // Between the children, too.
    group.send(1, b"next").unwrap();
    group.send(2, b"previous").unwrap();
    assert_eq!(group.receive(2).unwrap(), b"hello");
    // The same file on both sides.
    let mut file = tempfile::tempfile().unwrap();
    group.send(3, b"file").unwrap();
    group.send_fd(3, 5, file.as_fd()).unwrap();
    assert_eq!(group.receive(3).unwrap(), b"done");
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "from the child");
    // Parent first: the children end by themselves, long before they would be killed.
    let start = Instant::now();
    drop(group);
    assert!(start.elapsed() < SLACK);
}

#[test]
fn children_outlive_the_thread_that_asked_for_them() {
    let _alone = Alone::new();
    let group = thread::spawn(|| lead("answer", 2)).join().unwrap();
    thread::sleep(Duration::from_millis(100));
    group.check_alive(1).unwrap();
    let pid = pid_of(&group, 1);
    // Child first.
    group.send(1, b"stop").unwrap();
    wait_until("the child has ended", || group.check_alive(1).is_err());
    let error = group.receive(1).unwrap_err().to_string();
    assert!(error.contains(&format!("its process {pid} exited with status 0")), "{error}");
}

#[test]
fn a_killed_child_is_reported_at_once() {
    let _alone = Alone::new();
    let group = lead("answer", 3);
    // Before a receive.
    let pid = pid_of(&group, 1);
    signal(&pid, Signal::KILL);
    let start = Instant::now();
    let error = group.receive(1).unwrap_err();
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
    assert_eq!((error.kind(), error.rank()), ("rank", Some(1)));
    assert!(error.to_string().contains("killed by signal 9 (SIGKILL"), "{error}");
    let error = group.check_alive(1).unwrap_err();
    assert!(error.to_string().contains("killed by signal 9"), "{error}");
    assert_eq!(group.send(1, b"pid").unwrap_err().rank(), Some(1));
    // During a receive.
    let pid = pid_of(&group, 2);
    group.check_alive(2).unwrap();
    let start = Instant::now();
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        signal(&pid, Signal::KILL);
    });
    let error = group.receive(2).unwrap_err();
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
    assert!(error.to_string().contains("rank 2 closed its connection"), "{error}");
    assert!(error.to_string().contains("killed by signal 9"), "{error}");
    killer.join().unwrap();
    // Whoever compares learns it as well.
    assert_eq!(group.all_equal("plan", "x").unwrap_err().rank(), Some(1));
}

#[test]
fn a_child_that_fails_tells_its_exit_status() {
    let _alone = Alone::new();
    let group = lead("answer", 2);
    group.send(1, b"panic").unwrap();
    let error = group.receive(1).unwrap_err().to_string();
    assert!(error.contains("exited with status 101"), "{error}");
}

#[test]
fn a_stopped_child_is_a_timeout_and_does_not_outlive_the_group() {
    let _alone = Alone::new();
    let mut group = lead("answer", 2);
    let pid = pid_of(&group, 1);
    signal(&pid, Signal::STOP);
    wait_until("the child is stopped", || stat(&pid).is_some_and(|(state, _)| state == "T"));
    group.set_timeout(Duration::from_millis(300));
    let start = Instant::now();
    let error = group.receive(1).unwrap_err();
    assert!(start.elapsed() >= group.timeout() && start.elapsed() < SLACK, "{:?}", start.elapsed());
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(1)));
    assert!(error.to_string().contains(&format!("its process {pid} is stopped")), "{error}");
    let start = Instant::now();
    drop(group);
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
    assert!(is_dead(&pid));
}

#[test]
fn children_of_a_killed_parent_die_also_when_stopped() {
    let _alone = Alone::new();
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("pids");
    let mut leader = child("leader").env(NOTE, &note).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the leader has its children", || note.exists());
    let pids = fs::read_to_string(&note).unwrap();
    let pids: Vec<_> = pids.split(' ').collect();
    assert_eq!(pids.len(), 2);
    assert!(pids.iter().all(|pid| !is_dead(pid)));
    signal(pids[1], Signal::STOP);
    leader.kill().unwrap();
    leader.wait().unwrap();
    wait_until("the children are dead", || pids.iter().all(|pid| is_dead(pid)));
}

#[test]
fn a_rank_behind_a_shell_does_not_outlive_the_group() {
    let _alone = Alone::new();
    let inner = child("deaf");
    let mut shell = Command::new("sh");
    shell.args(["-c", "\"$0\" \"$@\"; exit 7"]).arg(inner.get_program()).args(inner.get_args());
    shell.env(MODE, "deaf").stderr(Stdio::null());
    let group = RankGroup::lead(shell, 2, TIMEOUT).unwrap();
    let pid = pid_of(&group, 1);
    assert!(!children().contains(&pid), "the shell is in between");
    drop(group);
    wait_until("the rank is dead", || is_dead(&pid));
}

#[test]
fn commands_that_are_no_rank() {
    let _alone = Alone::new();
    let start = Instant::now();
    let error = RankGroup::lead(Command::new("true"), 3, TIMEOUT).unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("rank", Some(1)));
    assert!(error.to_string().contains("exited with status 0"), "{error}");
    let error = RankGroup::lead(Command::new("/no/such/program"), 2, TIMEOUT).unwrap_err();
    assert_eq!((error.kind(), error.code()), ("system", Some(2)));
    assert!(error.to_string().contains("/no/such/program as rank 1"), "{error}");
    assert!(start.elapsed() < SLACK);
    let start = Instant::now();
    let error = RankGroup::lead(child("silent"), 2, Duration::from_millis(300)).unwrap_err();
    assert_eq!((error.kind(), error.rank()), ("timeout", Some(1)), "{error}");
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
}

#[test]
fn without_a_parent_there_is_no_group_and_a_lone_leader_needs_no_child() {
    let _alone = Alone::new();
    assert!(RankGroup::from_parent(TIMEOUT).unwrap().is_none());
    let group = RankGroup::lead(Command::new("/no/such/program"), 1, TIMEOUT).unwrap();
    assert_eq!((group.rank(), group.size()), (0, 1));
    assert!(matches!(
        RankGroup::lead(Command::new("true"), 0, TIMEOUT),
        Err(Error::Invalid { .. })
    ));
}

#[test]
fn output_of_children_goes_to_their_standard_error() {
    let _alone = Alone::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stderr");
    let mut command = child("print");
    command.stderr(File::create(&path).unwrap());
    drop(RankGroup::lead(command, 2, TIMEOUT).unwrap());
    assert!(fs::read_to_string(&path).unwrap().contains("on the output"));
}

/// Descriptors closed on the way, or a stray variable in an unrelated program.
#[test]
fn sockets_that_did_not_arrive_are_reported() {
    let _alone = Alone::new();
    let run = |variable: &str| {
        let mut command = child("answer");
        command.env("CLUSTER_HEALTH_PARENT", variable);
        let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        assert!(!output.status.success(), "{variable} was taken");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    for variable in ["1 1 2 0:77:123", "1 1 2 0:3:1"] {
        let text = run(variable);
        assert!(text.contains("is not the socket to another rank"), "{variable}: {text}");
    }
    for variable in [
        "",
        "2 1 2 0:77:1",
        "1 2 2 0:9:1",
        "1 1 4294967295 0:9:1",
        "1 1 3 0:9:1 2:9:1",
        "1 1 2 0:1:1",
    ] {
        let text = run(variable);
        assert!(text.contains("is not what a parent rank"), "{variable}: {text}");
    }
}

/// torchrun's variables inside a Slurm step that counts otherwise.
#[test]
fn processes_of_a_launcher_meet_and_see_each_other_die() {
    let _alone = Alone::new();
    let folder = tempfile::tempdir().unwrap();
    let sockets = tempfile::tempdir().unwrap();
    let note = folder.path().join("rank");
    let start = |rank: &str| {
        let mut command = child("launched");
        command.env(NOTE, &note).env("XDG_RUNTIME_DIR", sockets.path()).stdout(Stdio::null());
        command.envs([("RANK", rank), ("LOCAL_RANK", rank)]);
        command.envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]);
        command.env("TORCHELASTIC_RUN_ID", "none");
        command.envs([("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "64")]);
        command.spawn().unwrap()
    };
    let (mut zero, mut one) = (start("0"), start("1"));
    let path = |end: &str| folder.path().join(format!("rank-{end}"));
    wait_until("both ranks have met", || path("0").exists() && path("1").exists());
    assert_eq!(fs::read_dir(sockets.path()).unwrap().count(), 0);
    one.kill().unwrap();
    one.wait().unwrap();
    assert!(zero.wait().unwrap().success());
    let error = fs::read_to_string(path("end")).unwrap();
    assert!(error.contains("rank 1 closed its connection (died?)"), "{error}");
}
