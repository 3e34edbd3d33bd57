//! The protocol by which the ranks of one host show each other messages through shared memory.
//!
//! Every rank has two slots. In its k-th exchange a rank writes its message into slot k mod 2 and
//! then stores k into the slot's sequence cell; the others wait for that k and read. A rank starts
//! exchange k only after it has seen everybody's k − 1, and everybody published k − 1 only after
//! reading all of k − 2: so the slot that k overwrites has no reader any more.
//!
//! For a message from one rank to one other, the receiver posts where it wants it, the sender writes
//! there and says so.
//!
//! The memory is a parameter, so that a model checker can be the memory: `tests/model` compiles this
//! file, which therefore names nothing of the crate.
#![allow(unsafe_code, reason = "memory that others write")]

use std::sync::atomic::Ordering;

/// Longest message of one exchange, bytes.
pub(crate) const LONGEST: usize = SLOT - HEADER;

const SLOT: usize = 8192;
const HEADER: usize = 16;
const LINE: usize = 128;
const SEQUENCE: usize = 0;
const LENGTH: usize = 8;

/// Cells of a pair of ranks: what the receiver posted in one line, the sender's answer in the next.
const POSTED: usize = 0;
const BUFFER: usize = 8;
const BYTES: usize = 16;
const DONE: usize = LINE;
const PAIR: usize = 2 * LINE;

/// Memory that the ranks share, zero at first. Cells are 64 bits wide, at multiples of 8 below
/// [`bytes_for`] the number of ranks, and used as cells only.
pub(crate) trait Memory {
    /// Why a wait ended in vain.
    type Error;

    /// A cell's value.
    fn load(&self, cell: usize, order: Ordering) -> u64;

    /// Changes a cell.
    fn store(&self, cell: usize, value: u64, order: Ordering);

    /// Copies `bytes` to `offset`.
    ///
    /// # Safety
    /// They fit a slot, and no rank reads or writes there meanwhile.
    unsafe fn write(&self, offset: usize, bytes: &[u8]);

    /// `len` bytes at `offset`.
    ///
    /// # Safety
    /// They are in one slot, and no rank writes there while the result is used.
    unsafe fn read(&self, offset: usize, len: usize) -> &[u8];

    /// Waits until `rank` has stored `value` into a cell, and sees what it wrote before (acquire).
    ///
    /// # Errors
    /// When it does not come to that.
    fn wait(&self, rank: usize, cell: usize, value: u64) -> Result<(), Self::Error>;
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

/// Bytes of memory that so many ranks need.
pub(crate) const fn bytes_for(size: usize) -> usize {
    size * (LINE + 2 * SLOT) + size * size * PAIR
}

/// A rank's own line, whose cells the protocol does not use.
pub(crate) const fn line(rank: usize) -> usize {
    rank * LINE
}

/// One rank's side.
#[derive(Debug)]
pub(crate) struct Slots<M> {
    pub(crate) memory: M,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Number of the last exchange that was published.
    sequence: u64,
}

impl<M: Memory> Slots<M> {
    pub(crate) fn new(memory: M, rank: usize, size: usize) -> Self {
        Self { memory, rank, size, sequence: 0 }
    }

    fn slot(&self, rank: usize, sequence: u64) -> usize {
        let which = usize::from(sequence % 2 == 1);
        self.size * LINE + (rank * 2 + which) * SLOT
    }

    /// Shows this rank's message of the next exchange, cut to [`LONGEST`] bytes, without waiting for
    /// the others'. Whoever calls this reads everybody's before the next call, or never calls it
    /// again: a slow rank may still read the message before the last one.
    #[inline]
    pub(crate) fn publish(&mut self, kind: u32, message: &[u8]) {
        let length = message.len().min(LONGEST);
        self.sequence += 1;
        let slot = self.slot(self.rank, self.sequence);
        // SAFETY:
        // * `length` fits the slot; nobody reads it until the sequence is stored, nor any more what it
        //   held before (module comment).
        unsafe { self.memory.write(slot + HEADER, &message[..length]) };
        let head = u64::from(kind) << 32 | length as u64;
        self.memory.store(slot + LENGTH, head, Ordering::Relaxed);
        self.memory.store(slot + SEQUENCE, self.sequence, Ordering::Release);
    }

    /// Waits for another rank's message of the exchange that was published last.
    #[inline]
    pub(crate) fn message(&self, rank: usize) -> Result<Message<'_>, M::Error> {
        let slot = self.slot(rank, self.sequence);
        self.wait(rank, slot + SEQUENCE, self.sequence)?;
        let head = self.memory.load(slot + LENGTH, Ordering::Relaxed);
        let kind = u32::try_from(head >> 32).unwrap_or(0);
        let length = usize::try_from(head & u64::from(u32::MAX)).unwrap_or(0).min(LONGEST);
        // SAFETY:
        // * `length` is at most the slot's; the owner does not write it again before it has seen
        //   this rank's next message, which needs `&mut self` (module comment).
        let bytes = unsafe { self.memory.read(slot + HEADER, length) };
        Ok(Message { kind, bytes })
    }

    /// Called when every rank's message was read: fetches the line that the next message goes into,
    /// which its readers still hold, while nobody waits for it.
    #[inline]
    pub(crate) fn ready_next(&self) {
        let slot = self.slot(self.rank, self.sequence + 1);
        self.memory.store(slot + LENGTH, 0, Ordering::Relaxed);
    }

    #[inline]
    fn wait(&self, rank: usize, cell: usize, value: u64) -> Result<(), M::Error> {
        if self.memory.load(cell, Ordering::Acquire) == value {
            return Ok(());
        }
        self.memory.wait(rank, cell, value)
    }

    /// Cells of messages from one rank to one other.
    fn pair(&self, to: usize, from: usize) -> usize {
        self.size * (LINE + 2 * SLOT) + (to * self.size + from) * PAIR
    }

    /// Tells rank `from` that its `sequence`-th message to this rank, of `bytes`, goes into a buffer.
    pub(crate) fn post(&self, from: usize, sequence: u64, buffer: u64, bytes: u64) {
        let pair = self.pair(self.rank, from);
        self.memory.store(pair + BUFFER, buffer, Ordering::Relaxed);
        self.memory.store(pair + BYTES, bytes, Ordering::Relaxed);
        self.memory.store(pair + POSTED, sequence, Ordering::Release);
    }

    /// Waits until rank `from` has written the message that was posted for.
    pub(crate) fn delivered(&self, from: usize, sequence: u64) -> Result<(), M::Error> {
        self.wait(from, self.pair(self.rank, from) + DONE, sequence)
    }

    /// Waits until rank `to` takes this rank's `sequence`-th message; buffer and bytes that it posted.
    pub(crate) fn posted(&self, to: usize, sequence: u64) -> Result<(u64, u64), M::Error> {
        let pair = self.pair(to, self.rank);
        self.wait(to, pair + POSTED, sequence)?;
        let word = |cell| self.memory.load(pair + cell, Ordering::Relaxed);
        Ok((word(BUFFER), word(BYTES)))
    }

    /// Tells rank `to` that the message is where it wanted it.
    pub(crate) fn deliver(&self, to: usize, sequence: u64) {
        self.memory.store(self.pair(to, self.rank) + DONE, sequence, Ordering::Release);
    }
}
