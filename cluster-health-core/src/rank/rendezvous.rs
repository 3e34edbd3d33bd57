//! How launched ranks find each other.
//!
//! On one host each rank listens at `cluster-health-UID/JOB/rank-N.sock` below the first usable
//! folder, connects to all lower ranks, then waits for all higher ones. Folders belong to the
//! user, are closed to others and are used through their descriptor, so neither a symbolic link
//! nor a long path gets in the way. Between hosts rank 0 listens on TCP, and the others connect
//! to it only.
//!
//! Both use one handshake. The listener sends a nonce; the connecting rank answers with its rank,
//! the number of ranks, a nonce of its own and an HMAC-SHA256 over all of it; the listener checks
//! it and answers with its HMAC. The key is the token, or the job between ranks on one host, where
//! the folder and the peer's credentials are the protection.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, openat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::sockopt::{set_tcp_nodelay, socket_peercred};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, connect, listen, recv, send, socket_with,
};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

use super::channel::{Peer, after, left, wait_ready};
use super::environment::{MAX_RANKS, RankEnvironment};
use crate::error::{Error, Result};

/// Magic and version of the protocol.
const PROLOGUE: [u8; 12] = *b"CLHEALTH\0\0\0\x01";
const MAGIC: usize = 8;
const NONCE: usize = 32;
const MAC: usize = 32;
/// Listener: prologue and nonce.
const CHALLENGE: usize = PROLOGUE.len() + NONCE;
/// Connecting rank: prologue, rank, number of ranks, nonce, MAC.
const HELLO: usize = PROLOGUE.len() + 8 + NONCE + MAC;
/// Listener: what it thinks of the hello, and its MAC.
const ANSWER: usize = 1 + MAC;

const WELCOME: u8 = 0;
const WRONG_KEY: u8 = 1;
const WRONG_SIZE: u8 = 2;
const WRONG_RANK: u8 = 3;

/// Connections that have not said who they are; beyond it the oldest are closed.
const MAX_PENDING: usize = 256;
/// Connections that are taken before those that were taken are listened to: who connects without a
/// pause keeps neither the others nor the deadline waiting.
const MAX_ACCEPTED: usize = 64;
/// Missing ranks that an error names.
const NAMED: usize = 20;
const BACKLOG: i32 = 1024;
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Longest attempt to connect to a host; dropped packets are sent again by then.
const TCP_ATTEMPT: Duration = Duration::from_secs(2);

/// Connects this rank to the others, by rank.
pub(super) fn meet(environment: &RankEnvironment, timeout: Duration) -> Result<Vec<Option<Peer>>> {
    let &RankEnvironment { rank, size, .. } = environment;
    if rank >= size {
        return Err(Error::invalid("rank", format!("{rank}, but there are {size} ranks")));
    }
    if size > MAX_RANKS {
        return Err(Error::invalid("ranks", format!("{size}; at most {MAX_RANKS}")));
    }
    let local = environment.is_local();
    let found = if size == 1 {
        BTreeMap::new()
    } else if local {
        meet_locally(environment, timeout)?
    } else {
        meet_through_tcp(environment, timeout)?
    };
    let mut peers: Vec<_> = (0..size).map(|_| None).collect();
    for (rank, socket) in found {
        if let Some(place) = usize::try_from(rank).ok().and_then(|rank| peers.get_mut(rank)) {
            *place = Some(Peer::new(socket, local));
        }
    }
    Ok(peers)
}

/// Why a connection is given up.
enum Attempt {
    /// Nobody there yet, or not the right one; worth another try.
    Again(String),
    Never(Error),
}

struct Handshake<'a> {
    key: &'a [u8],
    rank: u32,
    size: u32,
    local: bool,
    place: String,
    timeout: Duration,
    deadline: Instant,
}

/// A connection whose rank is not known yet.
struct Pending {
    socket: OwnedFd,
    nonce: [u8; NONCE],
    /// The bytes of the hello so far.
    hello: Vec<u8>,
}

impl<'a> Handshake<'a> {
    fn new(
        environment: &RankEnvironment,
        key: &'a [u8],
        local: bool,
        place: String,
        timeout: Duration,
    ) -> Self {
        let &RankEnvironment { rank, size, .. } = environment;
        Self { key, rank, size, local, place, timeout, deadline: after(timeout) }
    }

    /// Both roles, ranks and nonces go into each MAC, so that none can be used for another.
    fn mac(
        &self,
        role: &[u8],
        listener: u32,
        caller: u32,
        nonces: [&[u8]; 2],
    ) -> Result<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key)
            .map_err(|error| Error::invalid("CLUSTER_HEALTH_TOKEN", error.to_string()))?;
        mac.update(&PROLOGUE);
        mac.update(role);
        for number in [listener, caller, self.size] {
            mac.update(&number.to_le_bytes());
        }
        nonces.iter().for_each(|nonce| mac.update(nonce));
        Ok(mac)
    }

    /// Says on a new connection who this is, and makes sure who the listener is.
    fn introduce(&self, socket: &OwnedFd, listener: u32) -> Result<(), Attempt> {
        if self.local && !of_this_user(socket) {
            return Err(Attempt::Again("a process of another user listens there".to_owned()));
        }
        let challenge: [u8; CHALLENGE] = self.read(socket)?;
        let (prologue, theirs) = challenge.split_at(PROLOGUE.len());
        if prologue[..MAGIC] != PROLOGUE[..MAGIC] {
            return Err(Attempt::Again("a program of another kind listens there".to_owned()));
        }
        if prologue != PROLOGUE {
            return Err(self.refused(listener, "it is another version of this program"));
        }
        let ours = nonce().map_err(Attempt::Never)?;
        let nonces = [theirs, &ours];
        let mac = |role| self.mac(role, listener, self.rank, nonces).map_err(Attempt::Never);
        let mut hello = Vec::with_capacity(HELLO);
        hello.extend_from_slice(&PROLOGUE);
        hello.extend_from_slice(&self.rank.to_le_bytes());
        hello.extend_from_slice(&self.size.to_le_bytes());
        hello.extend_from_slice(&ours);
        hello.extend_from_slice(&mac(b"hello")?.finalize().into_bytes());
        // What is sent here fits into any socket's buffer.
        match send(socket, &hello, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == hello.len() => {}
            Ok(_) => return Err(Attempt::Again("the connection is stuck".to_owned())),
            Err(errno) => return Err(Attempt::Again(errno.to_string())),
        }
        let answer: [u8; ANSWER] = self.read(socket)?;
        match answer[0] {
            WELCOME => {}
            WRONG_KEY if self.local => {
                return Err(self.refused(listener, "it belongs to another job"));
            }
            WRONG_KEY => {
                let why = "its CLUSTER_HEALTH_TOKEN is another one; set the same on every host";
                return Err(self.refused(listener, why));
            }
            WRONG_SIZE => {
                let why = format!("it does not count {} ranks; start all alike", self.size);
                return Err(self.refused(listener, &why));
            }
            WRONG_RANK => {
                let why = format!(
                    "another process is already rank {}; each rank must be started once",
                    self.rank
                );
                return Err(self.refused(listener, &why));
            }
            other => return Err(Attempt::Again(format!("it answered {other}"))),
        }
        mac(b"welcome")?
            .verify_slice(&answer[1..])
            .map_err(|_| Attempt::Again("it does not know the token".to_owned()))
    }

    fn refused(&self, listener: u32, why: &str) -> Attempt {
        let message = format!("rank {listener} ({}) refused rank {}: {why}", self.place, self.rank);
        Attempt::Never(Error::Rank { rank: listener, message, timed_out: false })
    }

    /// Exactly N bytes, so that nothing of what follows the handshake is taken.
    fn read<const N: usize>(&self, socket: &OwnedFd) -> Result<[u8; N], Attempt> {
        let mut bytes = [0; N];
        let mut filled = 0;
        while filled < N {
            match recv(socket, &mut bytes[filled..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Attempt::Again("it hung up".to_owned())),
                Ok((received, _)) => filled += received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let silent = || Attempt::Again("it listens but does not answer".to_owned());
                    let bound = left(self.deadline).ok_or_else(silent)?;
                    wait_ready(&mut [PollFd::new(socket, PollFlags::IN)], bound)
                        .map_err(|errno| Attempt::Again(errno.to_string()))?;
                }
                Err(errno) => return Err(Attempt::Again(errno.to_string())),
            }
        }
        Ok(bytes)
    }

    /// Connects to a rank, again and again until it is there.
    fn reach(
        &self,
        listener: u32,
        connect: impl Fn(Duration) -> Result<OwnedFd, Attempt>,
    ) -> Result<OwnedFd> {
        let mut pause = FIRST_PAUSE;
        let mut why = String::from("not tried");
        while let Some(bound) = left(self.deadline) {
            let met = connect(bound)
                .and_then(|socket| self.introduce(&socket, listener).map(|()| socket));
            match met {
                Ok(socket) => return Ok(socket),
                Err(Attempt::Never(error)) => return Err(error),
                Err(Attempt::Again(text)) => why = text,
            }
            thread::sleep(pause.min(left(self.deadline).unwrap_or_default()));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        let message = format!(
            "timeout: rank {listener} was not there within {} ms ({}: {why}); look whether it was \
             started, and whether all ranks have the same environment, or raise --timeout",
            self.timeout.as_millis(),
            self.place
        );
        Err(Error::Rank { rank: listener, message, timed_out: true })
    }

    /// Waits until all ranks of `wanted` have connected.
    fn gather(
        &self,
        listener: BorrowedFd<'_>,
        wanted: Range<u32>,
    ) -> Result<BTreeMap<u32, OwnedFd>> {
        let mut found = BTreeMap::new();
        let mut pending: Vec<Pending> = Vec::new();
        let mut strangers = 0_u32;
        let mut last = String::new();
        while found.len() < wanted.len() {
            let Some(bound) = left(self.deadline) else {
                return Err(self.missing(&wanted, &found, strangers, &last));
            };
            let mut watched = vec![PollFd::from_borrowed_fd(listener, PollFlags::IN)];
            watched.extend(pending.iter().map(|one| PollFd::new(&one.socket, PollFlags::IN)));
            wait_ready(&mut watched, bound).map_err(|errno| self.failed("poll", errno))?;
            let mut turn_away = |why: String| {
                strangers = strangers.saturating_add(1);
                last = why;
            };
            self.accept(listener, &mut pending, &mut turn_away)?;
            let mut index = 0;
            while let Some(one) = pending.get_mut(index) {
                match one.read() {
                    Ok(false) => {
                        index += 1;
                        continue;
                    }
                    Ok(true) => {
                        let one = pending.swap_remove(index);
                        match self.judge(&one, &wanted, &found)? {
                            Ok(rank) => drop(found.insert(rank, one.socket)),
                            Err(why) => turn_away(why),
                        }
                    }
                    Err(why) => {
                        drop(pending.swap_remove(index));
                        turn_away(why);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Takes the connections that wait and sends each a challenge.
    fn accept(
        &self,
        listener: BorrowedFd<'_>,
        pending: &mut Vec<Pending>,
        turn_away: &mut impl FnMut(String),
    ) -> Result<()> {
        for _ in 0..MAX_ACCEPTED {
            let socket = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                // Strangers may hold all descriptors that this process can have.
                Err(Errno::MFILE | Errno::NFILE) if !pending.is_empty() => {
                    drop(pending.remove(0));
                    turn_away("too many open files".to_owned());
                    continue;
                }
                Err(errno) => return Err(self.failed("accept4", errno)),
            };
            if self.local && !of_this_user(&socket) {
                turn_away("a process of another user".to_owned());
                continue;
            }
            if !self.local {
                without_delay(&socket);
            }
            let nonce = nonce()?;
            let challenge = [&PROLOGUE[..], &nonce].concat();
            if send(&socket, &challenge, SendFlags::NOSIGNAL) != Ok(CHALLENGE) {
                turn_away("it hung up".to_owned());
                continue;
            }
            if pending.len() >= MAX_PENDING {
                drop(pending.remove(0));
                turn_away("it said nothing".to_owned());
            }
            pending.push(Pending { socket, nonce, hello: Vec::with_capacity(HELLO) });
        }
        Ok(())
    }

    /// Whether a complete hello comes from a rank that is wanted; answers it in any case.
    fn judge(
        &self,
        one: &Pending,
        wanted: &Range<u32>,
        found: &BTreeMap<u32, OwnedFd>,
    ) -> Result<Result<u32, String>> {
        let (body, their_mac) = one.hello.split_at(HELLO - MAC);
        let (prologue, rest) = body.split_at(PROLOGUE.len());
        let Some((&[r0, r1, r2, r3, s0, s1, s2, s3], theirs)) = rest.split_first_chunk::<8>()
        else {
            return Ok(Err("its hello is incomplete".to_owned()));
        };
        let rank = u32::from_le_bytes([r0, r1, r2, r3]);
        let size = u32::from_le_bytes([s0, s1, s2, s3]);
        let nonces = [&one.nonce[..], theirs];
        if prologue != PROLOGUE {
            return Ok(Err("a program of another kind or version".to_owned()));
        }
        // The caller's MAC is over the number of ranks that it counts.
        let caller = Handshake { size, place: String::new(), ..*self };
        let known = caller.mac(b"hello", self.rank, rank, nonces)?.verify_slice(their_mac).is_ok();
        let (answer, why) = if !known {
            (WRONG_KEY, "its token or job is another one".to_owned())
        } else if size != self.size {
            (WRONG_SIZE, format!("rank {rank} counts {size} ranks, this one {}", self.size))
        } else if !wanted.contains(&rank) || found.contains_key(&rank) {
            (WRONG_RANK, format!("a second rank {rank}"))
        } else {
            (WELCOME, String::new())
        };
        let mac = match answer {
            WELCOME => {
                self.mac(b"welcome", self.rank, rank, nonces)?.finalize().into_bytes().into()
            }
            _ => [0; MAC],
        };
        let answer_text = [&[answer][..], &mac].concat();
        let sent = send(&one.socket, &answer_text, SendFlags::NOSIGNAL) == Ok(ANSWER);
        Ok(match answer {
            WELCOME if sent => Ok(rank),
            WELCOME => Err(format!("rank {rank} hung up")),
            _ => Err(why),
        })
    }

    fn failed(&self, call: &'static str, errno: Errno) -> Error {
        Error::system(call, errno.raw_os_error(), format!("waiting for ranks at {}", self.place))
    }

    fn missing(
        &self,
        wanted: &Range<u32>,
        found: &BTreeMap<u32, OwnedFd>,
        strangers: u32,
        last: &str,
    ) -> Error {
        let missing: Vec<_> = wanted.clone().filter(|rank| !found.contains_key(rank)).collect();
        let mut list: Vec<_> = missing.iter().take(NAMED).map(u32::to_string).collect();
        if let Some(more) = missing.len().checked_sub(NAMED).filter(|&more| more > 0) {
            list.push(format!("… ({more} more)"));
        }
        let list = list.join(", ");
        let (ranks, were) = if missing.len() == 1 { ("rank", "was") } else { ("ranks", "were") };
        let turned_away = match strangers {
            0 => String::new(),
            _ => format!("; {strangers} connections were turned away, the last because: {last}"),
        };
        let message = format!(
            "timeout: {ranks} {list} of {} {were} not there within {} ms ({}{turned_away}); look \
             whether they were started, and whether all ranks have the same environment, or raise \
             --timeout",
            self.size,
            self.timeout.as_millis(),
            self.place
        );
        Error::Rank { rank: missing.first().copied().unwrap_or_default(), message, timed_out: true }
    }
}

impl Pending {
    /// Reads what is there; whether the hello is complete.
    fn read(&mut self) -> Result<bool, String> {
        let mut bytes = [0; HELLO];
        while self.hello.len() < HELLO {
            let rest = HELLO - self.hello.len();
            match recv(&self.socket, &mut bytes[..rest], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err("it hung up".to_owned()),
                Ok((received, _)) => self.hello.extend_from_slice(&bytes[..received]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno.to_string()),
            }
            let start = self.hello.len().min(PROLOGUE.len());
            if self.hello[..start] != PROLOGUE[..start] {
                return Err("a program of another kind or version".to_owned());
            }
        }
        Ok(true)
    }
}

fn nonce() -> Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(NONCE) => Ok(bytes),
        Ok(_) => Err(Error::system("getrandom", 0, "making a nonce")),
        Err(errno) => Err(Error::system("getrandom", errno.raw_os_error(), "making a nonce")),
    }
}

fn of_this_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == geteuid())
}

fn without_delay(socket: &OwnedFd) {
    // Only costs time where it is refused.
    let _refused = set_tcp_nodelay(socket, true);
}

/// The folder of a job's sockets.
struct Folder {
    job: OwnedFd,
}

/// Removes the folders when the last rank is done with them; those in use stay.
struct Paths {
    user: PathBuf,
    /// The name of the job's folder in that of the user.
    job: String,
    /// Ranks that may have been killed and left their sockets; 0 once all have met.
    suspects: u32,
}

impl Drop for Paths {
    fn drop(&mut self) {
        let Ok(user) = open_folder(CWD, &self.user) else { return };
        if private(&user, &self.user).is_err() {
            return;
        }
        if let Ok(job) = open_folder(&user, Path::new(&self.job)) {
            let folder = Folder { job };
            // What is there, rather than every rank that may have been: a job may have many.
            let names = std::fs::read_dir(self.folder()).into_iter().flatten().flatten();
            let ranks = names.filter_map(|entry| rank_of_socket(entry.file_name().to_str()?));
            for rank in ranks.filter(|&rank| rank < self.suspects) {
                let _in_use = folder.locked(|| folder.remove_dead(rank));
            }
        }
        // Both fail while somebody else is in there.
        let _in_use = unlinkat(&user, &self.job, AtFlags::REMOVEDIR);
        let _in_use = unlinkat(CWD, &self.user, AtFlags::REMOVEDIR);
    }
}

impl Paths {
    fn choose(environment: &RankEnvironment) -> Result<Self> {
        let name = format!("cluster-health-{}", geteuid().as_raw());
        let job: String = Sha256::digest(environment.job.as_bytes())
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let mut tried = Vec::new();
        for base in &environment.folders {
            let user = base.join(&name);
            match mkdirat(CWD, &user, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {
                    return Ok(Self { user, job, suspects: environment.size });
                }
                Err(errno) => tried.push(format!("{}: {errno}", base.display())),
            }
        }
        Err(Error::Unavailable {
            what: "a folder in which local ranks can meet".to_owned(),
            message: format!(
                "{}; set XDG_RUNTIME_DIR or TMPDIR to a folder that can be written",
                tried.join(", ")
            ),
        })
    }

    /// Opens the job's folder, making it where it is missing.
    fn open(&self) -> Result<Folder> {
        let mut errno = Errno::NOENT;
        // A rank that is done may remove a folder between two of these calls.
        for _ in 0..100 {
            let opened = make(CWD, &self.user).and_then(|user| {
                Ok(match private(&user, &self.user) {
                    Ok(()) => Ok(make(&user, Path::new(&self.job))?),
                    Err(error) => Err(error),
                })
            });
            match opened {
                Ok(job) => {
                    let job = job?;
                    private(&job, &self.folder())?;
                    return Ok(Folder { job });
                }
                Err(Errno::NOENT) => {}
                Err(other) => {
                    errno = other;
                    break;
                }
            }
        }
        let context = format!("opening the ranks' folder {}", self.folder().display());
        Err(Error::system("openat", errno.raw_os_error(), context)
            .with_advice("remove what is in the way, a symbolic link for example"))
    }

    fn folder(&self) -> PathBuf {
        self.user.join(&self.job)
    }

    fn socket(&self, rank: u32) -> String {
        self.folder().join(socket_name(rank)).display().to_string()
    }
}

fn make(parent: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    match mkdirat(&parent, path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    open_folder(parent, path)
}

fn open_folder(parent: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, path, flags, Mode::empty())
}

/// Refuses a folder that others could have put there or can change.
fn private(folder: &OwnedFd, path: &Path) -> Result<()> {
    let stat = fstat(folder).map_err(|errno| {
        Error::system("fstat", errno.raw_os_error(), format!("checking {}", path.display()))
    })?;
    let mode = stat.st_mode & 0o7777;
    let why = if stat.st_uid != geteuid().as_raw() {
        format!("it belongs to user {}", stat.st_uid)
    } else if mode & 0o077 != 0 {
        format!("others may use it (mode {mode:04o}, must be 0700)")
    } else {
        return Ok(());
    };
    Err(Error::Unavailable {
        what: format!("{} as a meeting place of local ranks", path.display()),
        message: format!("{why}; remove it, or set XDG_RUNTIME_DIR to a folder of your own"),
    })
}

fn socket_name(rank: u32) -> String {
    format!("rank-{rank}.sock")
}

fn rank_of_socket(name: &str) -> Option<u32> {
    name.strip_prefix("rank-")?.strip_suffix(".sock")?.parse().ok()
}

impl Folder {
    /// The address of a rank's socket, through the folder's descriptor: no length limit, and no
    /// other folder in its place.
    fn address(&self, rank: u32) -> Result<SocketAddrUnix, Errno> {
        let folder = self.job.as_raw_fd();
        SocketAddrUnix::new(format!("/proc/self/fd/{folder}/{}", socket_name(rank)))
    }

    fn connect(&self, rank: u32) -> Result<OwnedFd, Errno> {
        let socket = unix_socket()?;
        connect(&socket, &self.address(rank)?)?;
        Ok(socket)
    }

    /// Makes one step of several, among all ranks; `AGAIN` while another is in such a step.
    fn locked<T>(&self, step: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        // Where the file system has no locks, ranks that start at the same instant may fail.
        if flock(&self.job, FlockOperation::NonBlockingLockExclusive) == Err(Errno::AGAIN) {
            return Err(Errno::AGAIN);
        }
        let done = step();
        let _unlocked = flock(&self.job, FlockOperation::Unlock);
        done
    }

    /// Removes a socket that nobody listens at; only when locked, because a new one does not
    /// listen at first either.
    fn remove_dead(&self, rank: u32) -> Result<(), Errno> {
        match self.connect(rank) {
            Err(Errno::CONNREFUSED) => unlinkat(&self.job, socket_name(rank), AtFlags::empty()),
            _ => Ok(()),
        }
    }
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// A rank's listening socket; its name goes away with it.
struct Listening {
    socket: OwnedFd,
    folder: Folder,
    rank: u32,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // The name is this socket's own as long as it listens: only dead ones are replaced.
        let _gone = unlinkat(&self.folder.job, socket_name(self.rank), AtFlags::empty());
    }
}

impl Listening {
    fn start(paths: &Paths, handshake: &Handshake<'_>) -> Result<Self> {
        let rank = handshake.rank;
        loop {
            let folder = paths.open()?;
            match Self::bind(&folder, rank) {
                Ok(Some(socket)) => return Ok(Self { socket, folder, rank }),
                Ok(None) => {}
                Err(errno) => return Err(handshake.failed("bind", errno)),
            }
            // Somebody listens there: a second process with this rank, or the last moments of an
            // earlier run.
            if left(handshake.deadline).is_none() {
                let owner = folder.connect(rank).and_then(socket_peercred).map_or_else(
                    |_| "another process".to_owned(),
                    |it| format!("process {}", it.pid),
                );
                return Err(Error::Busy(format!(
                    "{}: {owner} is rank {rank} of this job already; start each rank once, or set \
                     CLUSTER_HEALTH_JOB to tell jobs apart",
                    handshake.place
                )));
            }
            thread::sleep(FIRST_PAUSE);
        }
    }

    /// A listening socket with this rank's name; `None` where to try again later.
    fn bind(folder: &Folder, rank: u32) -> Result<Option<OwnedFd>, Errno> {
        let address = folder.address(rank)?;
        let bound = folder.locked(|| {
            folder.remove_dead(rank)?;
            let socket = unix_socket()?;
            bind(&socket, &address)?;
            listen(&socket, BACKLOG)?;
            Ok(socket)
        });
        match bound {
            Ok(socket) => Ok(Some(socket)),
            // The name is taken, somebody else has the lock, or the folder was removed by a rank
            // that is done.
            Err(Errno::ADDRINUSE | Errno::AGAIN | Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

fn meet_locally(
    environment: &RankEnvironment,
    timeout: Duration,
) -> Result<BTreeMap<u32, OwnedFd>> {
    let &RankEnvironment { rank, size, .. } = environment;
    let mut paths = Paths::choose(environment)?;
    let mut handshake =
        Handshake::new(environment, environment.job.as_bytes(), true, paths.socket(rank), timeout);
    // The highest rank waits for nobody.
    let listening =
        if rank + 1 < size { Some(Listening::start(&paths, &handshake)?) } else { None };
    let mut found = BTreeMap::new();
    for lower in 0..rank {
        handshake.place = paths.socket(lower);
        let socket = handshake.reach(lower, |_| {
            // Anew each time: a folder of an earlier run may go away.
            let folder = paths.open().map_err(Attempt::Never)?;
            folder.connect(lower).map_err(|errno| Attempt::Again(errno.to_string()))
        })?;
        found.insert(lower, socket);
    }
    if let Some(listening) = &listening {
        handshake.place = paths.socket(rank);
        found.extend(handshake.gather(listening.socket.as_fd(), rank + 1..size)?);
    }
    // Sockets first, then the folders.
    drop(listening);
    paths.suspects = 0;
    Ok(found)
}

fn meet_through_tcp(
    environment: &RankEnvironment,
    timeout: Duration,
) -> Result<BTreeMap<u32, OwnedFd>> {
    let &RankEnvironment { rank, size, local_size, .. } = environment;
    let span = match local_size {
        Some(here) => format!("{here} of {size} ranks are on this host"),
        None => format!("how many of the {size} ranks are on this host is not known"),
    };
    let Some(token) = environment.token.as_ref().filter(|token| !token.as_bytes().is_empty())
    else {
        return Err(Error::invalid(
            "CLUSTER_HEALTH_TOKEN",
            format!(
                "not set, but {span}: set it to the same secret of 32 random characters for all \
                 ranks"
            ),
        ));
    };
    let Some(place) = &environment.rendezvous else {
        return Err(Error::invalid(
            "CLUSTER_HEALTH_RENDEZVOUS",
            format!("not set, but {span}: set it to HOST:PORT of rank 0 for all ranks"),
        ));
    };
    let handshake = Handshake::new(environment, token.as_bytes(), false, place.clone(), timeout);
    let addresses = resolve(place, handshake.deadline)?;
    if rank > 0 {
        let socket = handshake.reach(0, |bound| call(&addresses, bound))?;
        return Ok(BTreeMap::from([(0, socket)]));
    }
    let listener = TcpListener::bind(&addresses[..])
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|error| {
            let errno = error.raw_os_error().unwrap_or_default();
            let advice = match error.kind() {
                io::ErrorKind::AddrInUse => {
                    "another program has this port: choose a free one with \
                     CLUSTER_HEALTH_RENDEZVOUS or CLUSTER_HEALTH_PORT"
                }
                _ => "the address must be one of the host that rank 0 runs on",
            };
            Error::system("bind", errno, format!("listening for ranks at {place}"))
                .with_advice(advice)
        })?;
    handshake.gather(listener.as_fd(), 1..size)
}

fn call(addresses: &[SocketAddr], bound: Duration) -> Result<OwnedFd, Attempt> {
    let mut why = String::new();
    for address in addresses {
        match TcpStream::connect_timeout(address, bound.min(TCP_ATTEMPT)) {
            // Without a listener a connection to a local port can meet itself.
            Ok(stream) if stream.local_addr().ok() == Some(*address) => {
                why = "nobody listens there".to_owned();
            }
            Ok(stream) => {
                let socket = OwnedFd::from(stream);
                without_delay(&socket);
                return Ok(socket);
            }
            Err(error) => why = error.to_string(),
        }
    }
    Err(Attempt::Again(why))
}

/// Looks an address up, on a thread of its own because the look-up has no bound.
fn resolve(place: &str, deadline: Instant) -> Result<Vec<SocketAddr>> {
    let wrong = |why: &str| {
        let message = format!("{place:?} is no HOST:PORT that can be used: {why}");
        Error::invalid("CLUSTER_HEALTH_RENDEZVOUS", message)
    };
    let (sender, receiver) = mpsc::channel();
    let text = place.to_owned();
    thread::Builder::new()
        .name("rank address".to_owned())
        .spawn(move || {
            let found = text.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // Nobody waits any more once the bound has passed.
            let _late = sender.send(found);
        })
        .map_err(|error| wrong(&error.to_string()))?;
    match receiver.recv_timeout(left(deadline).unwrap_or_default()) {
        Ok(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Ok(Ok(_)) => Err(wrong("it has no address")),
        Ok(Err(error)) => Err(wrong(&error.to_string())),
        Err(_) => Err(wrong("looking it up took longer than --timeout")),
    }
}
