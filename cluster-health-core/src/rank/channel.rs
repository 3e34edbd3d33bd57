//! Framed messages and descriptors over the sockets to the other ranks.
//!
//! A frame is a header of 16 bytes (kind, length of the body, tag; little-endian) and a body. A
//! descriptor travels with the first byte of its frame, and the kernel never delivers descriptors
//! of two frames at once, so the n-th descriptor belongs to the n-th descriptor frame.
//!
//! Whoever waits, to send or to receive, reads what has arrived from *all* ranks: two ranks that
//! send each other more than the sockets hold would otherwise wait for each other.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The longest message in bytes.
pub(super) const MAX_MESSAGE: usize = 16 << 20;

/// The most that may wait for this rank to ask for it: bytes of messages from one rank, and
/// descriptors. A rank that sends more does not follow any of our protocols.
const MAX_WAITING: usize = 4 * MAX_MESSAGE;
const MAX_DESCRIPTORS: usize = 256;
/// What a message takes besides its bytes, roughly.
const OVERHEAD: usize = 64;

const HEADER: usize = 16;
const MESSAGE: u32 = 0x4348_0001;
const DESCRIPTOR: u32 = 0x4348_0002;
/// Bytes read at once.
const CHUNK: usize = 16 << 10;
/// Reads in one look at a rank's socket: who sends without a pause keeps nobody from its deadline.
const READS: usize = 256;
/// Longest sleep before looking again at what another thread may have read meanwhile.
const SLICE: Duration = Duration::from_millis(50);

/// Why nothing was sent or received.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// The other side's socket is closed.
    Closed,
    TimedOut,
    System(&'static str, Errno),
    /// What arrived, or was left half sent, is no sequence of frames.
    Broken(String),
}

/// What has arrived from one rank.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// Descriptors whose frame is not complete yet.
    descriptors: VecDeque<OwnedFd>,
    messages: VecDeque<Vec<u8>>,
    /// What `messages` takes.
    waiting: usize,
    pub(super) tagged: Vec<(u64, OwnedFd)>,
    end: Option<Failure>,
}

impl Inbox {
    /// Takes the oldest message.
    pub(super) fn next_message(&mut self) -> Option<Vec<u8>> {
        let message = self.messages.pop_front()?;
        self.waiting = self.waiting.saturating_sub(message.len() + OVERHEAD);
        Some(message)
    }

    /// Takes apart the complete frames.
    fn parse(&mut self) {
        let mut used = 0;
        while let Some(header) = self.bytes[used..].first_chunk::<HEADER>() {
            let [k0, k1, k2, k3, l0, l1, l2, l3, tag @ ..] = *header;
            let kind = u32::from_le_bytes([k0, k1, k2, k3]);
            let length = u32::from_le_bytes([l0, l1, l2, l3]);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if length > MAX_MESSAGE || !matches!(kind, MESSAGE | DESCRIPTOR) {
                self.end = Some(Failure::Broken("it sent what is no message".to_owned()));
                return;
            }
            let start = used + HEADER;
            let Some(body) = self.bytes.get(start..start + length) else { break };
            if kind == MESSAGE {
                self.messages.push_back(body.to_vec());
                self.waiting += length + OVERHEAD;
                if self.waiting > MAX_WAITING {
                    let text = format!("it sent more than {MAX_WAITING} bytes that nobody takes");
                    self.end = Some(Failure::Broken(text));
                    return;
                }
            } else if let Some(descriptor) = self.descriptors.pop_front() {
                self.tagged.push((u64::from_le_bytes(tag), descriptor));
            } else {
                let text = "a descriptor was lost on the way (is the limit of open files reached?)";
                self.end = Some(Failure::Broken(text.to_owned()));
                return;
            }
            used = start + length;
        }
        self.bytes.drain(..used);
    }
}

/// The connection to one rank.
#[derive(Debug)]
pub(super) struct Peer {
    socket: OwnedFd,
    /// A Unix socket, which carries descriptors.
    local: bool,
    inbox: Mutex<Inbox>,
    /// Held for a whole frame; the value tells that a frame was left half sent.
    outgoing: Mutex<bool>,
}

impl Peer {
    pub(super) fn new(socket: OwnedFd, local: bool) -> Self {
        Self { socket, local, inbox: Mutex::default(), outgoing: Mutex::new(false) }
    }

    pub(super) fn is_local(&self) -> bool {
        self.local
    }

    /// Reads everything that is there, without waiting.
    fn pump(&self) {
        let mut inbox = lock(&self.inbox);
        let mut chunk = [0; CHUNK];
        for _ in 0..READS {
            if inbox.end.is_some() {
                break;
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let parts = &mut [IoSliceMut::new(&mut chunk)];
            match recvmsg(&self.socket, parts, &mut ancillary, flags) {
                Ok(received) if received.bytes == 0 => inbox.end = Some(Failure::Closed),
                Ok(received) => {
                    for message in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                            inbox.descriptors.extend(descriptors);
                        }
                    }
                    inbox.bytes.extend_from_slice(&chunk[..received.bytes]);
                    inbox.parse();
                    if inbox.descriptors.len() + inbox.tagged.len() > MAX_DESCRIPTORS {
                        let text = "it sent descriptors that nobody takes";
                        inbox.end = Some(Failure::Broken(text.to_owned()));
                    }
                    if received.flags.contains(ReturnFlags::CTRUNC) && inbox.end.is_none() {
                        let text =
                            "a descriptor did not arrive (is the limit of open files reached?)";
                        inbox.end = Some(Failure::Broken(text.to_owned()));
                    }
                    // A short read emptied the socket, or stopped behind a descriptor; the next
                    // look tells which.
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => inbox.end = Some(Failure::Closed),
                Err(errno) => inbox.end = Some(Failure::System("recvmsg", errno)),
            }
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the mutexes here guard is consistent at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of a bound that starts now.
pub(super) fn after(bound: Duration) -> Instant {
    // Bounds that no clock can hold are as good as a year.
    let now = Instant::now();
    now.checked_add(bound).unwrap_or_else(|| now + Duration::from_secs(365 * 86_400))
}

/// The time left until `deadline`, `None` when it has passed.
pub(super) fn left(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

/// Waits until one of `descriptors` is ready or `bound` has passed. Being interrupted counts as
/// ready: callers look again anyway.
pub(super) fn wait_ready(descriptors: &mut [PollFd<'_>], bound: Duration) -> Result<(), Errno> {
    let bound = Timespec::try_from(bound).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    match poll(descriptors, Some(&bound)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// The connections of one rank, by rank; none to itself.
#[derive(Debug)]
pub(super) struct Mesh(Vec<Option<Peer>>);

impl Mesh {
    pub(super) fn new(peers: Vec<Option<Peer>>) -> Self {
        Self(peers)
    }

    pub(super) fn peer(&self, rank: u32) -> Option<&Peer> {
        self.0.get(usize::try_from(rank).ok()?)?.as_ref()
    }

    /// Reads what has arrived from all, after at most a slice of the time until `deadline`.
    fn wait(&self, deadline: Instant, writing: Option<&Peer>) -> Result<(), Failure> {
        let bound = left(deadline).ok_or(Failure::TimedOut)?.min(SLICE);
        let mut watched: Vec<_> = self
            .0
            .iter()
            .flatten()
            .filter(|peer| lock(&peer.inbox).end.is_none())
            .map(|peer| PollFd::new(&peer.socket, PollFlags::IN))
            .collect();
        if let Some(peer) = writing {
            watched.push(PollFd::new(&peer.socket, PollFlags::OUT));
        }
        wait_ready(&mut watched, bound).map_err(|errno| Failure::System("poll", errno))?;
        self.0.iter().flatten().for_each(Peer::pump);
        Ok(())
    }

    pub(super) fn send_message(
        &self,
        peer: &Peer,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.send(peer, MESSAGE, 0, body, None, deadline)
    }

    pub(super) fn send_descriptor(
        &self,
        peer: &Peer,
        tag: u64,
        descriptor: BorrowedFd<'_>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        self.send(peer, DESCRIPTOR, tag, &[], Some(descriptor), deadline)
    }

    fn send(
        &self,
        peer: &Peer,
        kind: u32,
        tag: u64,
        body: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let mut half_sent = lock(&peer.outgoing);
        if *half_sent {
            return Err(Failure::Broken("an earlier message was sent only in part".to_owned()));
        }
        let length = u32::try_from(body.len())
            .map_err(|_| Failure::Broken("the message is too long".to_owned()))?;
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[8..].copy_from_slice(&tag.to_le_bytes());
        let total = HEADER + body.len();
        let mut sent = 0;
        while sent < total {
            let descriptors = descriptor.filter(|_| sent == 0);
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.as_slice().is_empty()
                && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors.as_slice()))
            {
                return Err(Failure::Broken("no room for a descriptor".to_owned()));
            }
            let parts = [
                IoSlice::new(&header[sent.min(HEADER)..]),
                IoSlice::new(&body[sent.saturating_sub(HEADER)..]),
            ];
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let failure = match sendmsg(&peer.socket, &parts, &mut ancillary, flags) {
                Ok(bytes) => {
                    sent += bytes;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => match self.wait(deadline, Some(peer)) {
                    Ok(()) => continue,
                    Err(failure) => failure,
                },
                Err(Errno::PIPE | Errno::CONNRESET) => Failure::Closed,
                Err(errno) => Failure::System("sendmsg", errno),
            };
            *half_sent = sent > 0;
            return Err(failure);
        }
        Ok(())
    }

    /// Waits until `pick` finds what it looks for among what arrived from `peer`.
    pub(super) fn receive<T>(
        &self,
        peer: &Peer,
        deadline: Instant,
        mut pick: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Result<T, Failure> {
        peer.pump();
        loop {
            {
                let mut inbox = lock(&peer.inbox);
                if let Some(found) = pick(&mut inbox) {
                    return Ok(found);
                }
                if let Some(end) = &inbox.end {
                    return Err(end.clone());
                }
            }
            self.wait(deadline, None)?;
        }
    }
}

/// Whether the other side has closed the socket, also when what it sent before is not read yet.
pub(super) fn is_closed(peer: &Peer) -> Result<bool, Errno> {
    let mut watched = [PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::RDHUP)];
    wait_ready(&mut watched, Duration::ZERO)?;
    Ok(watched[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR))
}
