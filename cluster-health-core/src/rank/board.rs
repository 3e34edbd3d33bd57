//! Shared memory in which the ranks of one host show each other small messages.
//!
//! Every rank has two slots. In its k-th exchange a rank writes its message into slot k mod 2 and
//! then stores k into the slot's sequence cell; the others wait for that k and read. A rank starts
//! exchange k only after it has seen everybody's k − 1, and everybody published k − 1 only after
//! reading all of k − 2: so the slot that k overwrites has no reader any more.
#![allow(unsafe_code, reason = "memory shared between ranks")]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::affinity::current_cpu;
use crate::backend::memory::Mapping;
use crate::error::{Error, Result};
use crate::id::CpuId;
use crate::rank::RankGroup;

/// Longest message of one exchange, bytes.
pub(crate) const LONGEST: usize = SLOT - HEADER;

const SLOT: usize = 8192;
const HEADER: usize = 16;
const LINE: usize = 128;
const SEQUENCE: usize = 0;
const LENGTH: usize = 8;

/// Cells of a rank's own line: they change rarely.
const CPU: usize = 0;
const GONE: usize = 8;

/// Cells of a pair of ranks: what the receiver posted in one line, the sender's answer in the next.
const POSTED: usize = 0;
const BUFFER: usize = 8;
const BYTES: usize = 16;
const DONE: usize = LINE;
const PAIR: usize = 2 * LINE;

/// A rank runs on no CPU that is known.
const NO_CPU: u64 = u64::MAX;

/// Looks at the other rank's cell so often before the processor is given away.
const SPINS: u32 = 4000;
/// The first of these looks follow each other without a pause.
const EAGER_SPINS: u32 = 500;
/// A nap ends up to twice as late as asked for, and a rank that naps inside a collective adds that
/// to its time: it only naps when that is a small part of what it has waited already.
const NAP: Duration = Duration::from_micros(50);
const AWAKE: Duration = Duration::from_millis(10);

/// Shared memory in which the ranks of one host show each other short messages: a control channel
/// that costs no system call, beside the device's own collectives.
///
/// All ranks make the same exchanges in the same order. Waiting ranks that share a CPU give it away
/// at once, others spin briefly, then give it away, then sleep. Every wait is bounded, and its error
/// names the rank that is missing.
#[derive(Debug)]
pub struct Board<'g> {
    group: &'g RankGroup,
    mapping: Mapping,
    rank: usize,
    size: usize,
    /// Number of the last exchange that was published.
    sequence: u64,
    timeout: Cell<Duration>,
    /// The ranks no longer agree where they are, or this one said its last word.
    ended: bool,
}

/// Places of a pair's cells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PairCells {
    pub(crate) posted: usize,
    pub(crate) id: usize,
    pub(crate) length: usize,
    pub(crate) done: usize,
}

/// One rank's message, while the exchange is open.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Message<'a> {
    /// What kind of message the sender says it is.
    pub kind: u32,
    /// Its content.
    pub bytes: &'a [u8],
}

impl<'g> Board<'g> {
    /// Longest message of one exchange, bytes.
    pub const LONGEST: usize = LONGEST;

    /// Made by all ranks together: rank 0 allocates, the others map what it sends them under `tag`,
    /// which names this board among the descriptors that ranks send each other.
    ///
    /// # Errors
    /// When a rank is missing or on another host, or the memory cannot be had.
    pub fn new(group: &'g RankGroup, tag: u64) -> Result<Self> {
        let (rank, size) = (group.rank() as usize, group.size() as usize);
        if let Some(far) = (0..group.size()).find(|peer| !group.same_host(*peer)) {
            return Err(Error::Unavailable {
                what: "shared memory between ranks".to_owned(),
                message: format!("rank {far} runs on another host"),
            });
        }
        let len = size * (LINE + 2 * SLOT) + size * size * PAIR;
        let mapping = if rank == 0 {
            let mapping = Mapping::shared(len)?;
            // Pages are there before the first exchange, so that none has to wait for one.
            mapping.reserve()?;
            mapping.touch();
            for peer in 1..group.size() {
                group.send_fd(peer, tag, mapping.file()?)?;
            }
            mapping
        } else {
            Mapping::of_file(group.receive_fd(0, tag)?, len)?
        };
        let board = Self {
            group,
            mapping,
            rank,
            size,
            sequence: 0,
            timeout: Cell::new(group.timeout()),
            ended: false,
        };
        board.cell(board.line(rank) + CPU).store(NO_CPU, Ordering::Relaxed);
        Ok(board)
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn group(&self) -> &'g RankGroup {
        self.group
    }

    /// Bound of every wait.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    /// Cells of messages from one rank to one other.
    pub(crate) fn pair(&self, to: usize, from: usize) -> PairCells {
        let base = self.size * (LINE + 2 * SLOT) + (to * self.size + from) * PAIR;
        PairCells {
            posted: base + POSTED,
            id: base + BUFFER,
            length: base + BYTES,
            done: base + DONE,
        }
    }

    pub(crate) fn pair_cell(&self, offset: usize) -> &AtomicU64 {
        self.cell(offset)
    }

    /// Waits until another rank stored `value` into a cell.
    pub(crate) fn wait_until(&self, rank: usize, offset: usize, value: u64) -> Result<()> {
        let cell = self.cell(offset);
        if cell.load(Ordering::Acquire) == value {
            return Ok(());
        }
        self.wait_for(rank, cell, value)
    }

    fn line(&self, rank: usize) -> usize {
        rank * LINE
    }

    fn slot(&self, rank: usize, sequence: u64) -> usize {
        let which = usize::from(sequence % 2 == 1);
        self.size * LINE + (rank * 2 + which) * SLOT
    }

    fn cell(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= self.mapping.len());
        // SAFETY:
        // * Offsets are made from ranks below `size`, so they stay inside the mapping.
        let place = unsafe { self.mapping.address().add(offset) };
        #[allow(clippy::cast_ptr_alignment, reason = "offsets are multiples of 8 in a page")]
        let place = place.cast::<AtomicU64>();
        // SAFETY:
        // * Inside the mapping, aligned, alive as long as `self`, and only ever used as an atomic.
        unsafe { &*place }
    }

    /// Tells the others on which CPU this rank runs: two ranks that share one must not spin.
    pub fn note_cpu(&self, cpu: CpuId) {
        self.cell(self.line(self.rank) + CPU).store(u64::from(cpu.0), Ordering::Relaxed);
    }

    /// True when another rank runs on this rank's CPU.
    pub(crate) fn shares_cpu(&self) -> bool {
        let mine = self.cell(self.line(self.rank) + CPU).load(Ordering::Relaxed);
        mine != NO_CPU
            && (0..self.size).any(|rank| {
                rank != self.rank
                    && self.cell(self.line(rank) + CPU).load(Ordering::Relaxed) == mine
            })
    }

    /// Shows this rank's message of the next exchange, cut to [`LONGEST`](Self::LONGEST) bytes,
    /// without waiting for the others'. Whoever calls this reads everybody's before the next call,
    /// or never calls it again: a slow rank may still read the message before the last one.
    #[inline]
    pub(crate) fn publish(&mut self, kind: u32, message: &[u8]) {
        let length = message.len().min(LONGEST);
        self.sequence += 1;
        let slot = self.slot(self.rank, self.sequence);
        // SAFETY:
        // * The slot is inside the mapping.
        let place = unsafe { self.mapping.address().add(slot + HEADER) };
        // SAFETY:
        // * `length` fits the slot; nobody reads it until the sequence is stored (module comment),
        //   and the message is ordinary memory elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), place, length) };
        let head = u64::from(kind) << 32 | length as u64;
        self.cell(slot + LENGTH).store(head, Ordering::Relaxed);
        self.cell(slot + SEQUENCE).store(self.sequence, Ordering::Release);
    }

    /// Waits for another rank's message of the exchange that was published last.
    #[inline]
    pub(crate) fn message(&self, rank: usize) -> Result<Message<'_>> {
        let slot = self.slot(rank, self.sequence);
        let cell = self.cell(slot + SEQUENCE);
        if cell.load(Ordering::Acquire) != self.sequence {
            self.wait_for(rank, cell, self.sequence)?;
        }
        let head = self.cell(slot + LENGTH).load(Ordering::Relaxed);
        let kind = u32::try_from(head >> 32).unwrap_or(0);
        let length = usize::try_from(head & u64::from(u32::MAX)).unwrap_or(0).min(LONGEST);
        // SAFETY:
        // * The slot is inside the mapping.
        let place = unsafe { self.mapping.address().add(slot + HEADER) };
        // SAFETY:
        // * `length` is at most the slot's; the owner does not write it again before it has seen
        //   this rank's next message, which needs `&mut self` (module comment).
        let bytes = unsafe { crate::buffer::slice_of(place, length) };
        Ok(Message { kind, bytes })
    }

    /// Called when every rank's message was read: fetches the line that the next message goes into,
    /// which its readers still hold, while nobody waits for it.
    #[inline]
    pub(crate) fn ready_next(&self) {
        self.cell(self.slot(self.rank, self.sequence + 1) + LENGTH).store(0, Ordering::Relaxed);
    }

    /// One whole exchange: shows `message` (at most [`LONGEST`](Self::LONGEST) bytes), then visits
    /// every rank's in order, its own included.
    ///
    /// # Errors
    /// When a rank is missing, or what `visit` returns; [`Error::Busy`] after such an error and
    /// after [`leave`](Self::leave).
    pub fn exchange(
        &mut self,
        kind: u32,
        message: &[u8],
        mut visit: impl FnMut(usize, Message<'_>) -> Result<()>,
    ) -> Result<()> {
        if self.ended {
            let text = "an exchange of this board failed before; make a new one";
            return Err(Error::Busy(text.to_owned()));
        }
        // Until all have been read the slot of the exchange before may have readers.
        self.ended = true;
        self.publish(kind, message);
        for rank in 0..self.size {
            visit(rank, self.message(rank)?)?;
        }
        self.ready_next();
        self.ended = false;
        Ok(())
    }

    /// Shows a last message in the place of the next exchange and takes part in no further one.
    /// Nothing is shown after an exchange that failed.
    pub fn leave(&mut self, kind: u32, message: &[u8]) {
        if !self.ended {
            self.ended = true;
            self.publish(kind, message);
        }
    }

    fn wait_for(&self, rank: usize, cell: &AtomicU64, value: u64) -> Result<()> {
        let arrived = || cell.load(Ordering::Acquire) == value;
        if !self.shares_cpu() {
            for turn in 0..SPINS {
                if arrived() {
                    return Ok(());
                }
                // The pause that the hint asks for is longer than a message takes.
                if turn > EAGER_SPINS {
                    std::hint::spin_loop();
                }
            }
        }
        let began = Instant::now();
        let mut nap = false;
        let mut turns = 0_u32;
        let mut last_look = Duration::ZERO;
        loop {
            if arrived() {
                return Ok(());
            }
            if nap {
                std::thread::sleep(NAP);
            } else {
                std::thread::yield_now();
            }
            turns = turns.saturating_add(1);
            if turns.is_multiple_of(16) {
                let waited = began.elapsed();
                nap = waited > AWAKE;
                // A thread that nobody bound may have moved onto the other rank's CPU.
                if turns == 16
                    && let Ok(cpu) = current_cpu()
                {
                    self.note_cpu(cpu);
                }
                if waited > last_look + Duration::from_millis(1) {
                    last_look = waited;
                    let gone = self.is_gone(rank);
                    // What came just before the rank ended counts.
                    if arrived() {
                        return Ok(());
                    }
                    gone?;
                }
                if waited > self.timeout.get() {
                    let peer = u32::try_from(rank).unwrap_or(u32::MAX);
                    return Err(Error::rank_timeout(peer, self.timeout.get()));
                }
            }
        }
    }

    /// An error when a rank left the group or died.
    fn is_gone(&self, rank: usize) -> Result<()> {
        let peer = u32::try_from(rank).unwrap_or(u32::MAX);
        if self.cell(self.line(rank) + GONE).load(Ordering::Acquire) != 0 {
            return Err(Error::rank_fault(peer, "left the group; its own error says why"));
        }
        self.group.check_alive(peer)
    }
}

impl Drop for Board<'_> {
    fn drop(&mut self) {
        self.cell(self.line(self.rank) + GONE).store(1, Ordering::Release);
    }
}
