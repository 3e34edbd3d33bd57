//! Ranks that are child processes of rank 0.
//!
//! The kernel kills a child when the *thread* that started it ends, so a thread of its own starts
//! all of them and lives as long as they do. It also covers a parent that is killed itself.
#![allow(
    unsafe_code,
    reason = "a hook between fork and exec, and descriptors that a parent left open"
)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::stdio::dup2_stdout;

use super::channel::lock;
use crate::error::{Error, Result};

/// Tells a child its rank and its sockets: `1 RANK SIZE PEER:DESCRIPTOR:INODE...`.
pub(super) const VARIABLE: &str = "CLUSTER_HEALTH_PARENT";
const FORMAT: &str = "1";

/// How long children may take to end by themselves once their sockets are closed.
const GRACE: Duration = Duration::from_millis(200);
/// How long to wait for the kernel to end a killed child.
const KILLED: Duration = Duration::from_secs(2);
/// How long a child whose socket is closed may take to become reapable.
const DYING: Duration = Duration::from_millis(100);

/// One row of sockets per rank: `rows[a][b]` leads to `rows[b][a]`.
pub(super) type Rows = Vec<Vec<Option<OwnedFd>>>;

/// The child processes with ranks 1 and up; killed and reaped when dropped.
#[derive(Debug)]
pub(super) struct Children {
    children: Vec<Mutex<Child>>,
    /// The spawner lives until this is dropped.
    release: Option<mpsc::Sender<()>>,
    spawner: Option<JoinHandle<()>>,
}

impl Children {
    /// Starts one child for each row but the first.
    pub(super) fn start(command: Command, rows: Rows) -> Result<Self> {
        let program = command.get_program().display().to_string();
        let failed = |error: &io::Error, rank| {
            let errno = error.raw_os_error().unwrap_or_default();
            Error::system("execve", errno, format!("starting {program} as rank {rank}"))
                .with_advice("look whether the program exists and may be run")
        };
        let size = rows.len();
        let (started, starting) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let spawner = thread::Builder::new()
            .name("rank spawner".to_owned())
            .spawn(move || {
                spawn(command, rows, &started);
                drop(started);
                // Nothing is ever sent: it ends when the group is dropped.
                let _released = released.recv();
            })
            .map_err(|error| failed(&error, 1))?;
        let mut children = Self {
            children: Vec::with_capacity(size),
            release: Some(release),
            spawner: Some(spawner),
        };
        for (child, rank) in starting.iter().zip(1..) {
            children.children.push(Mutex::new(child.map_err(|error| failed(&error, rank))?));
        }
        Ok(children)
    }

    fn child(&self, rank: u32) -> Option<&Mutex<Child>> {
        self.children.get(usize::try_from(rank.checked_sub(1)?).ok()?)
    }

    /// How the child with this rank ended, without waiting; `None` while it runs.
    pub(super) fn ended(&self, rank: u32) -> Option<String> {
        let mut child = lock(self.child(rank)?);
        let pid = child.id();
        match child.try_wait() {
            Ok(Some(status)) => Some(format!("its process {pid} {}", ending(status))),
            Ok(None) => None,
            Err(_) => Some(format!("its process {pid} is gone, and its exit status with it")),
        }
    }

    /// As [`Self::ended`] for a child whose socket is closed: the kernel closes files shortly
    /// before a process can be reaped.
    pub(super) fn ending(&self, rank: u32) -> Option<String> {
        let deadline = Instant::now() + DYING;
        loop {
            let ended = self.ended(rank);
            if ended.is_some() || self.child(rank).is_none() || Instant::now() >= deadline {
                return ended;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// What a silent child does.
    pub(super) fn state(&self, rank: u32) -> Option<String> {
        if let Some(ended) = self.ended(rank) {
            return Some(ended);
        }
        let pid = lock(self.child(rank)?).id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let state = match stat.rsplit_once(") ")?.1.chars().next()? {
            'T' | 't' => "is stopped (SIGSTOP or a debugger)",
            'D' => "waits in the kernel (D state)",
            _ => "still runs",
        };
        Some(format!("its process {pid} {state}"))
    }

    /// Waits at most `bound` until all have ended, and reaps them.
    fn reap(&self, bound: Duration) -> bool {
        let deadline = Instant::now() + bound;
        loop {
            if self.children.iter().all(|child| !matches!(lock(child).try_wait(), Ok(None))) {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        if !self.reap(GRACE) {
            for child in &self.children {
                // Fails only for a child that has ended meanwhile.
                drop(lock(child).kill());
            }
            self.reap(KILLED);
        }
        drop(self.release.take());
        if let Some(spawner) = self.spawner.take() {
            drop(spawner.join());
        }
    }
}

/// Starts the children from the calling thread, up to the first that cannot be started.
fn spawn(mut command: Command, rows: Rows, started: &mpsc::Sender<io::Result<Child>>) {
    let size = rows.len();
    let rows = Arc::new(rows);
    let current = Arc::new(AtomicUsize::new(0));
    let parent = getpid();
    let hook = {
        let (rows, current) = (Arc::clone(&rows), Arc::clone(&current));
        move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            if getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            for socket in rows[current.load(Ordering::Relaxed)].iter().flatten() {
                fcntl_setfd(socket, FdFlags::empty())?;
            }
            // The standard output belongs to the parent's results; without a standard error it
            // stays empty.
            let _closed = dup2_stdout(io::stderr());
            Ok(())
        }
    };
    // SAFETY:
    // - between fork and exec the hook only makes system calls, reads an atomic and indexes
    //   memory that nobody changes: no allocation, no lock, no destructor;
    // - it changes the descriptor flags of the child only, whose table is a copy.
    unsafe { command.pre_exec(hook) };
    command.stdin(Stdio::null()).stdout(Stdio::null());
    for rank in 1..size {
        current.store(rank, Ordering::Relaxed);
        let child =
            describe(rank, size, &rows[rank]).and_then(|text| command.env(VARIABLE, text).spawn());
        let failed = child.is_err();
        if started.send(child).is_err() || failed {
            return;
        }
    }
}

fn describe(rank: usize, size: usize, row: &[Option<OwnedFd>]) -> io::Result<String> {
    let mut text = format!("{FORMAT} {rank} {size}");
    for (peer, socket) in row.iter().enumerate() {
        if let Some(socket) = socket {
            let inode = rustix::fs::fstat(socket)?.st_ino;
            text.push_str(&format!(" {peer}:{}:{inode}", socket.as_raw_fd()));
        }
    }
    Ok(text)
}

/// The rank and the sockets that the parent handed to this process; `None` when it has no such
/// parent.
pub(super) fn inherited() -> Result<Option<(u32, Vec<Option<OwnedFd>>)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let Ok(text) = std::env::var(VARIABLE) else { return Ok(None) };
    let (rank, row) = parse(&text).ok_or_else(|| {
        Error::invalid(VARIABLE, format!("{text:?} is not what a parent rank of this version sets"))
    })?;
    for &(descriptor, inode) in row.iter().flatten() {
        // The number alone could be another file by now, in a process further down.
        let same = std::fs::metadata(format!("/proc/self/fd/{descriptor}"))
            .is_ok_and(|found| found.ino() == inode);
        if !same {
            return Err(Error::invalid(
                VARIABLE,
                format!(
                    "descriptor {descriptor} is not the socket to another rank: the command in \
                     between must keep descriptors open, and a program that is no rank must be \
                     started without this variable"
                ),
            ));
        }
    }
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Error::Busy("this process has joined its parent's ranks before".to_owned()));
    }
    let mut sockets = Vec::with_capacity(row.len());
    for entry in row {
        let Some((descriptor, _)) = entry else {
            sockets.push(None);
            continue;
        };
        // SAFETY:
        // - the descriptor is open: its inode was just read;
        // - nothing else owns it: the parent left it open for this call, and the flag above lets
        //   one call only come here.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        fcntl_setfd(&socket, FdFlags::CLOEXEC).map_err(|errno| {
            Error::system("fcntl", errno.raw_os_error(), "keeping a rank's socket from children")
        })?;
        sockets.push(Some(socket));
    }
    // Again, because a wrapper that started this process does not pass the setting on.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|errno| {
        Error::system("prctl", errno.raw_os_error(), "asking to end together with the parent")
    })?;
    Ok(Some((rank, sockets)))
}

/// A rank's row: descriptor and inode of the socket to each other rank.
type Row = Vec<Option<(RawFd, u64)>>;

fn parse(text: &str) -> Option<(u32, Row)> {
    let mut words = text.strip_prefix(FORMAT)?.strip_prefix(' ')?.split(' ');
    let rank: usize = words.next()?.parse().ok()?;
    let size: usize = words.next()?.parse().ok()?;
    let entries: Vec<_> = words.collect();
    // Checked before anything of that size is allocated.
    if rank >= size || entries.len() != size - 1 {
        return None;
    }
    let mut row = vec![None; size];
    for entry in entries {
        let mut parts = entry.split(':');
        let peer: usize = parts.next()?.parse().ok()?;
        let descriptor: RawFd = parts.next()?.parse().ok()?;
        let inode = parts.next()?.parse().ok()?;
        let free = row.get_mut(peer).filter(|place| peer != rank && place.is_none())?;
        if descriptor <= libc::STDERR_FILENO || parts.next().is_some() {
            return None;
        }
        *free = Some((descriptor, inode));
    }
    // Each descriptor gets one owner.
    let mut descriptors: Vec<_> = row.iter().flatten().map(|entry| entry.0).collect();
    descriptors.sort_unstable();
    if descriptors.windows(2).any(|two| two[0] == two[1]) {
        return None;
    }
    Some((u32::try_from(rank).ok()?, row))
}

fn ending(status: ExitStatus) -> String {
    if let Some(code) = status.code() {
        return format!("exited with status {code}");
    }
    let signal = status.signal().unwrap_or_default();
    let name = match signal {
        libc::SIGHUP => " (SIGHUP)",
        libc::SIGINT => " (SIGINT)",
        libc::SIGQUIT => " (SIGQUIT)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGFPE => " (SIGFPE)",
        libc::SIGKILL => " (SIGKILL: by hand, or by the kernel for want of memory)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGPIPE => " (SIGPIPE)",
        libc::SIGTERM => " (SIGTERM)",
        _ => "",
    };
    format!("was killed by signal {signal}{name}")
}
