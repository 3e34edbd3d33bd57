//! Ranks: processes, or threads of this process, that measure together, and the channel on which
//! they agree.
//!
//! A [`RankGroup`] is one rank's membership. It comes from a launcher's environment
//! ([`RankGroup::from_environment`]), from child processes of this one ([`RankGroup::lead`],
//! [`RankGroup::from_parent`]) or from threads ([`RankGroup::threads`]). The channel is for
//! agreement, not for bulk data: messages of at most 16 MiB, and descriptors between ranks of one
//! host. Every wait is bounded, and its error names the rank that is missing.
//!
//! | ranks | sockets | descriptors |
//! |---|---|---|
//! | threads, children | socket pairs, each rank to each | yes |
//! | launched on one host | Unix sockets in a private folder, each rank to each | yes |
//! | launched on several hosts | TCP, rank 0 to each | no |
//!
//! A program that may be any of them asks in this order:
//!
//! ```no_run
//! use std::{process::Command, time::Duration};
//! use cluster_health_core::RankGroup;
//!
//! let timeout = Duration::from_secs(30);
//! let group = match RankGroup::from_parent(timeout)? {
//!     Some(group) => group,
//!     None => match RankGroup::from_environment(timeout)? {
//!         Some(group) => group,
//!         None => {
//!             let mut command = Command::new(std::env::current_exe()?);
//!             command.args(std::env::args_os().skip(1));
//!             RankGroup::lead(command, 2, timeout)?
//!         }
//!     },
//! };
//! group.all_equal("plan", "{\n  \"seed\": 7\n}")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod board;
mod channel;
mod children;
mod environment;
mod rendezvous;
pub(crate) mod slots;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

pub use board::Board;
use channel::{Failure, Inbox, MAX_MESSAGE, Mesh, Peer};
use children::{Children, Rows};
pub use environment::{RankEnvironment, RankFamily, RankToken};
pub use slots::Message;

use crate::error::{Error, Result};

/// The first message of a child to rank 0.
const HELLO: &[u8] = b"cluster-health child 1";
/// How much longer than rank 0 the others wait for its verdict, so that they learn which rank
/// rank 0 misses.
const VERDICT_GRACE: Duration = Duration::from_millis(500);
/// Longest part of a differing line in an error.
const SHOWN: usize = 200;

/// One rank's membership in a group of ranks: its number and a connection to the others.
///
/// All calls take `&self` and may come from several threads, but messages from one rank go to
/// whichever thread asks first, so ranks should speak from one thread.
///
/// Dropping it closes the connections. The rank that started the others as children then gives
/// them 200 ms to end by themselves, kills those that do not, and reaps all.
pub struct RankGroup {
    rank: u32,
    size: u32,
    timeout: Duration,
    // Dropped in this order: children see their sockets close before they are waited for.
    mesh: Mesh,
    children: Option<Children>,
}

impl fmt::Debug for RankGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, timeout, .. } = self;
        f.debug_struct("RankGroup")
            .field("rank", rank)
            .field("size", size)
            .field("timeout", timeout)
            .finish_non_exhaustive()
    }
}

impl RankGroup {
    /// Joins the ranks that a launcher started; `None` when no launcher started this process as
    /// one of several ranks.
    ///
    /// # Errors
    /// As [`RankEnvironment::detect`] and [`RankGroup::join`].
    pub fn from_environment(timeout: Duration) -> Result<Option<Self>> {
        RankEnvironment::detect()?
            .filter(|environment| environment.size > 1)
            .map(|environment| Self::join(&environment, timeout))
            .transpose()
    }

    /// Meets the other ranks of a job and waits until they are all there, at most for `timeout`,
    /// which then is the bound of every wait of the group.
    ///
    /// Ranks on one host meet in a folder that only their user may enter. Between hosts rank 0
    /// listens at [`RankEnvironment::rendezvous`] and both sides prove that they know the token;
    /// the messages themselves are neither encrypted nor authenticated, and ranks other than 0
    /// have no connection to each other. Strangers are turned away and the wait goes on.
    ///
    /// # Errors
    /// [`Error::Rank`] naming a rank that is missing or refused this one; [`Error::Invalid`] for a
    /// missing token or an unusable address; [`Error::Unavailable`] when the folder is not safe;
    /// [`Error::Busy`] when another process is this rank; [`Error::System`] for everything else,
    /// for example a port that is taken.
    pub fn join(environment: &RankEnvironment, timeout: Duration) -> Result<Self> {
        let mesh = rendezvous::meet(environment, timeout)?;
        Ok(Self {
            rank: environment.rank,
            size: environment.size,
            timeout,
            mesh: Mesh::new(mesh),
            children: None,
        })
    }

    /// Ranks that are threads of this process, one group for each; the timeout is 30 s at first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no rank, [`Error::System`] when there are too few descriptors.
    pub fn threads(size: u32) -> Result<Vec<Self>> {
        let rows = pairs(size)?;
        let timeout = Duration::from_secs(30);
        let group = |(row, rank)| Self::of_sockets(rank, size, row, timeout);
        Ok(rows.into_iter().zip(0..).map(group).collect())
    }

    /// Makes this process rank 0 and starts ranks 1 to `size` − 1 as its children with `command`,
    /// which must come to call [`RankGroup::from_parent`] within `timeout`.
    ///
    /// The children's standard input is empty and their standard output goes to their standard
    /// error, because the output belongs to this process. They start with the CPU mask of the
    /// calling thread. They end when this process ends, however it ends.
    ///
    /// # Errors
    /// [`Error::System`] when a child cannot be started, [`Error::Rank`] naming one that ended or
    /// did not report; no child is left behind then.
    pub fn lead(command: Command, size: u32, timeout: Duration) -> Result<Self> {
        let mut rows = pairs(size)?;
        let own = std::mem::take(&mut rows[0]);
        let deadline = channel::after(timeout);
        let mut group = Self::of_sockets(0, size, own, timeout);
        group.children = Some(Children::start(command, rows)?);
        for rank in 1..size {
            let hello = group.receive_until(rank, deadline)?;
            if hello != HELLO {
                let message = format!("rank {rank} is another version of this program");
                return Err(Error::Rank { rank, message, timed_out: false });
            }
        }
        Ok(group)
    }

    /// Joins the parent that started this process with [`RankGroup::lead`]; `None` without one.
    /// The kernel then ends this process together with the one that started it. One call per
    /// process.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the parent's sockets did not reach this process, [`Error::Busy`]
    /// at a second call, [`Error::Rank`] when the parent is gone.
    pub fn from_parent(timeout: Duration) -> Result<Option<Self>> {
        let Some((rank, sockets)) = children::inherited()? else { return Ok(None) };
        let size = u32::try_from(sockets.len())
            .map_err(|_| Error::invalid(children::VARIABLE, "too many ranks"))?;
        let group = Self::of_sockets(rank, size, sockets, timeout);
        group.send(0, HELLO)?;
        Ok(Some(group))
    }

    fn of_sockets(rank: u32, size: u32, row: Vec<Option<OwnedFd>>, timeout: Duration) -> Self {
        let peer = |socket: Option<OwnedFd>| socket.map(|socket| Peer::new(socket, true));
        let mesh = Mesh::new(row.into_iter().map(peer).collect());
        Self { rank, size, timeout, mesh, children: None }
    }

    /// This rank's number, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks, at least 1.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The bound of every wait.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the bound of every wait from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Whether descriptors can be passed to this rank: this one, or one connected through a Unix
    /// socket. Ranks that met through TCP are not, wherever they run.
    #[must_use]
    pub fn same_host(&self, peer: u32) -> bool {
        peer == self.rank || self.mesh.peer(peer).is_some_and(Peer::is_local)
    }

    /// Sends a message of at most 16 MiB; returns when the kernel or the other rank has taken it. A rank
    /// that holds more than 64 MiB of messages that nobody asked it for ends the connection.
    ///
    /// # Errors
    /// [`Error::Rank`] naming the rank when it is gone or takes nothing within the timeout;
    /// [`Error::Invalid`] for a message that is too long or a rank without connection.
    pub fn send(&self, to: u32, message: &[u8]) -> Result<()> {
        self.send_until(to, message, self.deadline())
    }

    fn send_until(&self, to: u32, message: &[u8], deadline: Instant) -> Result<()> {
        let peer = self.peer(to)?;
        if message.len() > MAX_MESSAGE {
            let text = format!("{} bytes; at most {MAX_MESSAGE} can be sent", message.len());
            return Err(Error::invalid("message", text));
        }
        self.mesh
            .send_message(peer, message, deadline)
            .map_err(|failure| self.error(to, failure, "took no message"))
    }

    /// The next message from a rank.
    ///
    /// # Errors
    /// [`Error::Rank`] naming the rank when it is gone or sends nothing within the timeout;
    /// [`Error::Invalid`] for a rank without connection.
    pub fn receive(&self, from: u32) -> Result<Vec<u8>> {
        self.receive_until(from, self.deadline())
    }

    fn receive_until(&self, from: u32, deadline: Instant) -> Result<Vec<u8>> {
        self.take(from, deadline, Inbox::next_message)
    }

    /// Passes a descriptor to a rank on the same host, with a tag that its receiver asks for. A rank that
    /// holds more than 256 that nobody asked it for ends the connection.
    ///
    /// # Errors
    /// As [`RankGroup::send`], and [`Error::Invalid`] when the rank is not on this host.
    pub fn send_fd(&self, to: u32, tag: u64, fd: BorrowedFd<'_>) -> Result<()> {
        let peer = self.peer(to)?;
        if !peer.is_local() {
            let text = format!("rank {to} is connected through TCP, which passes no descriptors");
            return Err(Error::invalid("rank", text));
        }
        self.mesh
            .send_descriptor(peer, tag, fd, self.deadline())
            .map_err(|failure| self.error(to, failure, "took no descriptor"))
    }

    /// The descriptor that a rank sent with this tag; the first of several. Messages and
    /// descriptors with other tags that arrive meanwhile are kept for later calls.
    ///
    /// # Errors
    /// As [`RankGroup::receive`].
    pub fn receive_fd(&self, from: u32, tag: u64) -> Result<OwnedFd> {
        self.take(from, self.deadline(), |inbox| {
            let index = inbox.tagged.iter().position(|entry| entry.0 == tag)?;
            Some(inbox.tagged.remove(index).1)
        })
    }

    /// Looks whether a rank is still connected, without waiting for anything it would do; about a
    /// microsecond. A rank that has finished and closed its connection counts as gone, so look
    /// for what it left behind *after* this fails, too. Ranks without a connection of their own
    /// (TCP, neither side rank 0) count as alive.
    ///
    /// # Errors
    /// [`Error::Rank`] naming the rank and, for a child of this process, how it ended.
    pub fn check_alive(&self, peer: u32) -> Result<()> {
        if let Some(ended) = self.children.as_ref().and_then(|children| children.ended(peer)) {
            return Err(gone(peer, Some(ended)));
        }
        let Some(connection) = self.mesh.peer(peer) else { return Ok(()) };
        match channel::is_closed(connection) {
            Ok(false) => Ok(()),
            Ok(true) => Err(self.error(peer, Failure::Closed, "")),
            Err(errno) => Err(self.error(peer, Failure::System("poll", errno), "")),
        }
    }

    /// Makes sure that all ranks have the same text, for example the plan as pretty JSON. Every
    /// rank calls this at the same point; rank 0 compares and tells the others.
    ///
    /// # Errors
    /// [`Error::Invalid`] on all ranks, naming `what`, the first rank that differs and the first
    /// line that does; [`Error::Rank`] on all ranks that are left when one is missing.
    pub fn all_equal(&self, what: &str, text: &str) -> Result<()> {
        if self.rank != 0 {
            self.send(0, text.as_bytes())?;
            let verdict = self.receive_until(0, self.deadline() + VERDICT_GRACE)?;
            return Verdict::decode(&verdict).map_or_else(
                || {
                    let message = "rank 0 answered a comparison with something else".to_owned();
                    Err(Error::Rank { rank: 0, message, timed_out: false })
                },
                |verdict| verdict.into_result(what),
            );
        }
        let deadline = self.deadline();
        let mut verdict = Verdict::Equal;
        for rank in 1..self.size {
            match self.receive_until(rank, deadline) {
                Ok(theirs) if theirs == text.as_bytes() => {}
                Ok(theirs) => {
                    let theirs = String::from_utf8_lossy(&theirs);
                    verdict = verdict.or_differs(rank, text, &theirs);
                }
                Err(Error::Rank { rank, message, timed_out }) => {
                    verdict = Verdict::Missing { rank, message, timed_out };
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        // A rank that is only late finds the verdict when it comes.
        let encoded = verdict.encode();
        let deadline = deadline.max(channel::after(VERDICT_GRACE));
        let mut told = Ok(());
        for rank in 1..self.size {
            told = told.and(self.send_until(rank, &encoded, deadline));
        }
        verdict.into_result(what).and(told)
    }

    fn deadline(&self) -> Instant {
        channel::after(self.timeout)
    }

    fn peer(&self, rank: u32) -> Result<&Peer> {
        self.mesh.peer(rank).ok_or_else(|| {
            let why = if rank >= self.size {
                format!("there is no rank {rank} among {}", self.size)
            } else if rank == self.rank {
                format!("rank {rank} is this one, which has no connection to itself")
            } else {
                format!(
                    "rank {} has no connection to rank {rank}: between hosts there are only \
                     those to rank 0",
                    self.rank
                )
            };
            Error::invalid("rank", why)
        })
    }

    fn take<T>(
        &self,
        from: u32,
        deadline: Instant,
        pick: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Result<T> {
        let peer = self.peer(from)?;
        self.mesh
            .receive(peer, deadline, pick)
            .map_err(|failure| self.error(from, failure, "sent nothing"))
    }

    /// What a failed exchange with `peer` means.
    fn error(&self, peer: u32, failure: Failure, silent: &str) -> Error {
        let children = self.children.as_ref();
        match failure {
            Failure::Closed => gone(peer, children.and_then(|children| children.ending(peer))),
            Failure::TimedOut => {
                let state = children
                    .and_then(|children| children.state(peer))
                    .map_or_else(String::new, |state| format!(" ({state})"));
                let message = format!(
                    "timeout: rank {peer} {silent} for {} ms{state}; look what it does, or raise \
                     --timeout",
                    self.timeout.as_millis()
                );
                Error::Rank { rank: peer, message, timed_out: true }
            }
            Failure::System(call, errno) => {
                Error::system(call, errno.raw_os_error(), format!("talking to rank {peer}"))
            }
            Failure::Broken(why) => {
                let message = format!("the connection to rank {peer} is unusable: {why}");
                Error::Rank { rank: peer, message, timed_out: false }
            }
        }
    }
}

fn gone(rank: u32, ended: Option<String>) -> Error {
    let message = match ended {
        Some(ended) => format!("rank {rank} closed its connection: {ended}"),
        None => format!("rank {rank} closed its connection (died?); look at its output"),
    };
    Error::Rank { rank, message, timed_out: false }
}

/// Socket pairs between all ranks.
fn pairs(size: u32) -> Result<Rows> {
    if size == 0 {
        return Err(Error::invalid("ranks", "0; a group has at least one rank"));
    }
    let mut rows = Rows::new();
    for _ in 0..size {
        let mut row = Vec::new();
        for earlier in &mut rows {
            let pair =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
            let (left, right) = pair.map_err(|errno| {
                let context = format!("connecting {size} ranks to each other");
                Error::system("socketpair", errno.raw_os_error(), context)
                    .with_advice("ask for fewer ranks or raise the limit of open files (ulimit -n)")
            })?;
            earlier.push(Some(left));
            row.push(Some(right));
        }
        row.push(None);
        rows.push(row);
    }
    Ok(rows)
}

/// What rank 0 found when it compared the texts.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Equal,
    Differs(String),
    Missing { rank: u32, message: String, timed_out: bool },
}

impl Verdict {
    /// The first rank that differs is the one that is named.
    fn or_differs(self, rank: u32, text: &str, theirs: &str) -> Self {
        match self {
            Self::Equal => Self::Differs(difference(rank, text, theirs)),
            found => found,
        }
    }

    fn into_result(self, what: &str) -> Result<()> {
        match self {
            Self::Equal => Ok(()),
            Self::Differs(message) => Err(Error::invalid(what, message)),
            Self::Missing { rank, message, timed_out } => {
                Err(Error::Rank { rank, message, timed_out })
            }
        }
    }

    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Equal => "equal\n".to_owned(),
            Self::Differs(message) => format!("differs\n{message}"),
            Self::Missing { rank, message, timed_out: true } => format!("late {rank}\n{message}"),
            Self::Missing { rank, message, timed_out: false } => format!("gone {rank}\n{message}"),
        }
        .into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, message) = std::str::from_utf8(bytes).ok()?.split_once('\n')?;
        let message = message.to_owned();
        match head.split_once(' ') {
            None if head == "equal" => Some(Self::Equal),
            None if head == "differs" => Some(Self::Differs(message)),
            Some((word @ ("late" | "gone"), rank)) => {
                let rank = rank.parse().ok()?;
                Some(Self::Missing { rank, message, timed_out: word == "late" })
            }
            _ => None,
        }
    }
}

/// The first line in which rank 0's text and another rank's differ.
fn difference(rank: u32, first: &str, other: &str) -> String {
    let show = |line: Option<&str>| match line {
        Some(line) if line.trim().chars().count() > SHOWN => {
            format!("`{}…`", line.trim().chars().take(SHOWN).collect::<String>())
        }
        Some(line) => format!("`{}`", line.trim()),
        None => "missing".to_owned(),
    };
    let (mut ours, mut theirs) = (first.lines(), other.lines());
    let mut number = 1_u64;
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => break,
            (our, their) if our == their => number += 1,
            (our, their) => {
                return format!(
                    "rank {rank} differs from rank 0 in line {number}: {} on rank 0, {} on rank \
                     {rank}; start all ranks with the same options",
                    show(our),
                    show(their)
                );
            }
        }
    }
    format!("rank {rank} differs from rank 0 in line ends; start all ranks with the same options")
}
