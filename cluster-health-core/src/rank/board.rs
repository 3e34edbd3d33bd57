//! Shared memory in which the ranks of one host show each other small messages: the mapping behind the
//! protocol of `slots`, and how a rank waits.
#![allow(unsafe_code, reason = "memory shared between ranks")]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::slots::{self, LONGEST, Memory, Message, Slots};
use crate::affinity::current_cpu;
use crate::backend::memory::Mapping;
use crate::error::{Error, Result};
use crate::id::CpuId;
use crate::rank::RankGroup;

/// Cells of a rank's own line: they change rarely.
const CPU: usize = 0;
const GONE: usize = 8;

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
    slots: Slots<Shared<'g>>,
    /// The ranks no longer agree where they are, or this one said its last word.
    ended: bool,
}

/// The memory, and what a wait for another rank needs to know.
#[derive(Debug)]
struct Shared<'g> {
    group: &'g RankGroup,
    mapping: Mapping,
    rank: usize,
    size: usize,
    timeout: Cell<Duration>,
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
        let len = slots::bytes_for(size);
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
        let timeout = Cell::new(group.timeout());
        let memory = Shared { group, mapping, rank, size, timeout };
        memory.store(slots::line(rank) + CPU, NO_CPU, Ordering::Relaxed);
        Ok(Self { slots: Slots::new(memory, rank, size), ended: false })
    }

    pub(crate) fn rank(&self) -> usize {
        self.slots.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.slots.size
    }

    pub(crate) fn group(&self) -> &'g RankGroup {
        self.slots.memory.group
    }

    pub(crate) fn slots(&self) -> &Slots<impl Memory<Error = Error> + use<'g>> {
        &self.slots
    }

    /// Bound of every wait.
    pub fn set_timeout(&self, timeout: Duration) {
        self.slots.memory.timeout.set(timeout);
    }

    /// Tells the others on which CPU this rank runs: two ranks that share one must not spin.
    pub fn note_cpu(&self, cpu: CpuId) {
        self.slots.memory.note_cpu(cpu);
    }

    /// As [`Slots::publish`].
    #[inline]
    pub(crate) fn publish(&mut self, kind: u32, message: &[u8]) {
        self.slots.publish(kind, message);
    }

    /// As [`Slots::message`].
    #[inline]
    pub(crate) fn message(&self, rank: usize) -> Result<Message<'_>> {
        self.slots.message(rank)
    }

    /// As [`Slots::ready_next`].
    #[inline]
    pub(crate) fn ready_next(&self) {
        self.slots.ready_next();
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
        for rank in 0..self.size() {
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
}

impl Shared<'_> {
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

    fn note_cpu(&self, cpu: CpuId) {
        self.store(slots::line(self.rank) + CPU, u64::from(cpu.0), Ordering::Relaxed);
    }

    /// True when another rank runs on this rank's CPU.
    fn shares_cpu(&self) -> bool {
        let cpu_of = |rank| self.load(slots::line(rank) + CPU, Ordering::Relaxed);
        let mine = cpu_of(self.rank);
        mine != NO_CPU && (0..self.size).any(|rank| rank != self.rank && cpu_of(rank) == mine)
    }

    /// An error when a rank left the group or died.
    fn is_gone(&self, rank: usize) -> Result<()> {
        let peer = u32::try_from(rank).unwrap_or(u32::MAX);
        if self.load(slots::line(rank) + GONE, Ordering::Acquire) != 0 {
            return Err(Error::rank_fault(peer, "left the group; its own error says why"));
        }
        self.group.check_alive(peer)
    }
}

impl Memory for Shared<'_> {
    type Error = Error;

    #[inline]
    fn load(&self, cell: usize, order: Ordering) -> u64 {
        self.cell(cell).load(order)
    }

    #[inline]
    fn store(&self, cell: usize, value: u64, order: Ordering) {
        self.cell(cell).store(value, order);
    }

    #[inline]
    unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY:
        // * A slot is inside the mapping.
        let place = unsafe { self.mapping.address().add(offset) };
        // SAFETY:
        // * They fit a slot and nobody uses it meanwhile, as the caller vouches; `bytes` is ordinary
        //   memory elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    #[inline]
    unsafe fn read(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY:
        // * A slot is inside the mapping.
        let place = unsafe { self.mapping.address().add(offset) };
        // SAFETY:
        // * In one slot, and not written meanwhile, as the caller vouches.
        unsafe { crate::buffer::slice_of(place, len) }
    }

    fn wait(&self, rank: usize, cell: usize, value: u64) -> Result<()> {
        let cell = self.cell(cell);
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
}

impl Drop for Board<'_> {
    fn drop(&mut self) {
        let own = slots::line(self.rank());
        self.slots.memory.store(own + GONE, 1, Ordering::Release);
    }
}
