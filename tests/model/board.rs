//! The exchanges of a board, and its messages from one rank to one other.

#![allow(unsafe_code, reason = "the memory that the protocol asks for")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};

use super::check;
use slots::{Memory, Slots, bytes_for};

#[path = "../../cluster-health-core/src/rank/slots.rs"]
#[allow(dead_code, unreachable_pub, reason = "made for its crate")]
mod slots;

/// What is wrong with the memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// Both slots of a rank are the same.
    OneSlot,
    /// Stores do not carry what was written before them.
    RelaxedStores,
    /// Loads do not see what was written before the store.
    RelaxedLoads,
}

/// A message is one number here.
const BYTES: usize = 8;

/// Ordinary memory, of which loom checks that nobody uses it while somebody writes it.
#[derive(Debug, Default)]
struct Word(UnsafeCell<u64>);

// SAFETY:
// * loom runs one thread at a time, and ends the run where two would use it at once.
unsafe impl Sync for Word {}

impl Word {
    fn set(&self, value: u64) {
        // SAFETY:
        // * As above.
        self.0.with_mut(|place| unsafe { *place = value });
    }

    fn get(&self) -> u64 {
        // SAFETY:
        // * As above.
        self.0.with(|place| unsafe { *place })
    }
}

/// What ranks share, at the places that the protocol uses.
struct Shared {
    cells: BTreeMap<usize, AtomicU64>,
    /// Cells of relaxed accesses only: that they need no order by themselves is checked, too.
    plain: BTreeMap<usize, Word>,
    messages: BTreeMap<usize, Word>,
    fault: Fault,
}

impl Shared {
    /// The places are learnt from ranks that note them.
    fn new(size: usize, fault: Fault) -> Self {
        let places = Places::default();
        for rank in 0..size {
            let mut slots = Slots::new(&places, rank, size);
            for _ in 0..2 {
                slots.publish(0, &[0; BYTES]);
                slots.ready_next();
            }
            for other in 0..size {
                slots.post(other, 0, 0, 0);
                slots.deliver(other, 0);
            }
        }
        let [cells, plain, messages] =
            [places.cells, places.plain, places.messages].map(RefCell::into_inner);
        assert!(cells.iter().chain(&plain).all(|at| at % 8 == 0 && at + 8 <= bytes_for(size)));
        assert!(cells.is_disjoint(&plain));
        let words =
            |places: BTreeSet<_>| places.into_iter().map(|at| (at, Word::default())).collect();
        Self {
            cells: cells.into_iter().map(|at| (at, AtomicU64::new(0))).collect(),
            plain: words(plain),
            messages: words(messages),
            fault,
        }
    }
}

/// Notes what is stored where.
#[derive(Default)]
struct Places {
    cells: RefCell<BTreeSet<usize>>,
    plain: RefCell<BTreeSet<usize>>,
    messages: RefCell<BTreeSet<usize>>,
}

impl Memory for &Places {
    type Error = Infallible;

    fn load(&self, _cell: usize, _order: Ordering) -> u64 {
        0
    }

    fn store(&self, cell: usize, _value: u64, order: Ordering) {
        let places = if order == Ordering::Relaxed { &self.plain } else { &self.cells };
        places.borrow_mut().insert(cell);
    }

    unsafe fn write(&self, offset: usize, _bytes: &[u8]) {
        self.messages.borrow_mut().insert(offset);
    }

    unsafe fn read(&self, _offset: usize, _len: usize) -> &[u8] {
        &[]
    }

    fn wait(&self, _rank: usize, _cell: usize, _value: u64) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A rank's view of it.
#[derive(Clone)]
struct View(Arc<Shared>);

impl View {
    /// With one slot the first one's place stands for the second one's.
    fn place(&self, place: usize) -> usize {
        let slots: Vec<usize> = self.0.messages.keys().copied().collect();
        let is_second =
            slots.iter().skip(1).step_by(2).any(|slot| place + 16 >= *slot && place < slot + BYTES);
        if self.0.fault == Fault::OneSlot && is_second {
            place + slots[0] - slots[1]
        } else {
            place
        }
    }

    fn order(&self, order: Ordering) -> Ordering {
        match (self.0.fault, order) {
            (Fault::RelaxedStores, Ordering::Release)
            | (Fault::RelaxedLoads, Ordering::Acquire) => Ordering::Relaxed,
            _ => order,
        }
    }
}

impl Memory for View {
    type Error = Infallible;

    fn load(&self, cell: usize, order: Ordering) -> u64 {
        let place = self.place(cell);
        match order {
            Ordering::Relaxed => self.0.plain[&place].get(),
            order => self.0.cells[&place].load(self.order(order)),
        }
    }

    fn store(&self, cell: usize, value: u64, order: Ordering) {
        let place = self.place(cell);
        match order {
            Ordering::Relaxed => self.0.plain[&place].set(value),
            order => self.0.cells[&place].store(value, self.order(order)),
        }
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        let value = u64::from_ne_bytes(bytes.try_into().unwrap());
        self.0.messages[&self.place(offset)].set(value);
    }

    unsafe fn read(&self, offset: usize, len: usize) -> &[u8] {
        assert_eq!(len, BYTES);
        let value = self.0.messages[&self.place(offset)].get();
        // A few bytes of each run: loom's places cannot be lent.
        Box::leak(Box::new(value.to_ne_bytes()))
    }

    fn wait(&self, _rank: usize, cell: usize, value: u64) -> Result<(), Infallible> {
        // The protocol has looked just before.
        loop {
            loom::thread::yield_now();
            if self.load(cell, Ordering::Acquire) == value {
                return Ok(());
            }
        }
    }
}

/// What rank `rank` says in exchange `turn`.
fn word(rank: usize, turn: usize) -> u64 {
    (10 * turn + rank + 1) as u64
}

/// Runs one thread per rank.
fn on_ranks(size: usize, fault: Fault, work: impl Fn(&mut Slots<View>) + Send + Sync + 'static) {
    let memory = Arc::new(Shared::new(size, fault));
    let work = std::sync::Arc::new(work);
    let start = |rank| {
        let mut slots = Slots::new(View(Arc::clone(&memory)), rank, size);
        let work = std::sync::Arc::clone(&work);
        move || work(&mut slots)
    };
    let others: Vec<_> = (1..size).map(|rank| loom::thread::spawn(start(rank))).collect();
    start(0)();
    others.into_iter().for_each(|other| other.join().unwrap());
}

/// Exchanges as `Board::exchange` and the collectives make them.
fn exchanges(size: usize, turns: usize, fault: Fault) {
    on_ranks(size, fault, move |slots| {
        for turn in 1..=turns {
            let kind = u32::try_from(turn).unwrap();
            slots.publish(kind, &word(slots.rank, turn).to_ne_bytes());
            for rank in (0..size).filter(|rank| *rank != slots.rank) {
                let Ok(message) = slots.message(rank);
                let found = (message.kind, message.bytes);
                assert_eq!(found, (kind, &word(rank, turn).to_ne_bytes()[..]));
            }
            slots.ready_next();
        }
    });
}

#[test]
fn two_ranks_exchange_three_times() {
    check(None, || exchanges(2, 3, Fault::Nothing));
}

/// Threads change only where one waits: with interruptions it would be too many.
#[test]
fn three_ranks_exchange_twice() {
    check(Some(0), || exchanges(3, 2, Fault::Nothing));
}

/// A barrier is an exchange without words: what a rank did before it, all see after it.
#[test]
fn what_was_done_before_a_barrier_is_seen_after_it() {
    check(None, || barrier(Fault::Nothing));
}

fn barrier(fault: Fault) {
    let done: Arc<Vec<_>> = Arc::new((0..2).map(|_| Word::default()).collect());
    on_ranks(2, fault, move |slots| {
        done[slots.rank].set(7);
        slots.publish(0, &[0; BYTES]);
        let Ok(_) = slots.message(1 - slots.rank);
        assert_eq!(done[1 - slots.rank].get(), 7);
    });
}

/// Two messages from rank 0 to rank 1, into one buffer.
fn messages(fault: Fault) {
    let buffer = Arc::new(Word::default());
    on_ranks(2, fault, move |slots| {
        for sequence in 1..=2 {
            if slots.rank == 0 {
                let Ok(posted) = slots.posted(1, sequence);
                assert_eq!(posted, (30 + sequence, 40 + sequence));
                buffer.set(50 + sequence);
                slots.deliver(1, sequence);
            } else {
                slots.post(0, sequence, 30 + sequence, 40 + sequence);
                let Ok(()) = slots.delivered(0, sequence);
                assert_eq!(buffer.get(), 50 + sequence);
            }
        }
    });
}

#[test]
fn messages_arrive_where_they_are_wanted() {
    check(None, || messages(Fault::Nothing));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_slot_is_found_to_be_too_few() {
    check(None, || exchanges(2, 3, Fault::OneSlot));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_slot_is_found_to_be_too_few_for_three() {
    check(Some(0), || exchanges(3, 2, Fault::OneSlot));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_stores_are_found() {
    check(None, || exchanges(2, 1, Fault::RelaxedStores));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_loads_are_found() {
    check(None, || exchanges(2, 1, Fault::RelaxedLoads));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_barrier_of_relaxed_stores_is_found() {
    check(None, || barrier(Fault::RelaxedStores));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn messages_through_relaxed_stores_are_found() {
    check(None, || messages(Fault::RelaxedStores));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_barrier_of_relaxed_loads_is_found() {
    check(None, || barrier(Fault::RelaxedLoads));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn messages_through_relaxed_loads_are_found() {
    check(None, || messages(Fault::RelaxedLoads));
}
