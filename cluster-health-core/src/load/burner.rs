//! One burner: a thread that burns where it is told to, and rests in between.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::clock::ThreadClock;
use super::work::{Achieved, Work};
use crate::affinity::{BindScope, PinGuard};
use crate::error::{Error, Result};
use crate::id::{CpuId, NodeId};

/// Where a burner burns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) cpu: CpuId,
    pub(crate) node: Option<NodeId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Rest,
    Burn(Place),
    End,
}

/// Orders and answers.
#[derive(Debug)]
struct Desk {
    order: Order,
    /// Of the latest order, and of the latest one that is carried out.
    number: u64,
    answered: u64,
    clock: Option<ThreadClock>,
    /// The thread is gone, or will not take an order any more.
    ended: bool,
    failure: Option<Error>,
}

#[derive(Debug)]
struct Shared {
    desk: Mutex<Desk>,
    ordered: Condvar,
    answered: Condvar,
    /// Set with every order, so that a burning thread looks at the desk.
    interrupt: AtomicBool,
    achieved: Achieved,
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, number: u64) {
        self.desk().answered = number;
        self.answered.notify_all();
    }

    /// The next order.
    fn next(&self, last: u64) -> (Order, u64) {
        let mut desk = self.desk();
        while desk.number == last {
            desk = self.ordered.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
        self.interrupt.store(false, Ordering::Relaxed);
        (desk.order, desk.number)
    }
}

/// What a burner did while it was to burn.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reading {
    pub(super) active_ns: u64,
    pub(super) busy_ns: u64,
    pub(super) flops: u64,
    pub(super) bytes: u64,
}

/// A stretch of burning: when it began and what the clock of its work said then.
#[derive(Debug, Clone, Copy)]
struct Mark {
    wall: Instant,
    busy_ns: u64,
}

/// A burner's thread, joined when this is dropped.
pub(super) struct Burner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Utilisation is that of a device, by its clock, not of a CPU.
    by_device: bool,
    place: Option<Place>,
    /// Stretches that ended.
    active: Duration,
    busy_ns: u64,
    began: Option<Mark>,
    looked: Option<Mark>,
}

impl fmt::Debug for Burner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Burner").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Utilisation over less time says nothing: of CPUs, and of devices, whose work is accounted for
/// by portions.
const CPU_LOOK: Duration = Duration::from_millis(1);
const DEVICE_LOOK: Duration = Duration::from_millis(50);

impl Burner {
    /// Starts the thread; it rests at first. `make` runs on it with the first order to burn.
    pub(super) fn start(
        name: &str,
        by_device: bool,
        make: impl FnOnce() -> Result<Box<dyn Work>> + Send + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            desk: Mutex::new(Desk {
                order: Order::Rest,
                number: 0,
                answered: 0,
                clock: None,
                ended: false,
                failure: None,
            }),
            ordered: Condvar::new(),
            answered: Condvar::new(),
            interrupt: AtomicBool::new(false),
            achieved: Achieved::default(),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let result = catch_unwind(AssertUnwindSafe(|| run(&own, make)));
                let failure = match result {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(error),
                    Err(_) => Some(dead("it panicked")),
                };
                let mut desk = own.desk();
                desk.ended = true;
                desk.failure = failure;
                drop(desk);
                own.answered.notify_all();
            })
            .map_err(|error| {
                let errno = error.raw_os_error().unwrap_or_default();
                Error::system("pthread_create", errno, "starting a burner of the load")
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
            by_device,
            place: None,
            active: Duration::ZERO,
            busy_ns: 0,
            began: None,
            looked: None,
        })
    }

    fn order(&self, order: Order) {
        let mut desk = self.shared.desk();
        desk.order = order;
        desk.number += 1;
        self.shared.interrupt.store(true, Ordering::Relaxed);
        drop(desk);
        self.shared.ordered.notify_all();
    }

    /// Orders it to burn here; false when it does already. [`wait`](Self::wait) tells when it does.
    pub(super) fn burn(&mut self, place: Place) -> bool {
        if self.place == Some(place) {
            return false;
        }
        self.pause();
        self.place = Some(place);
        self.order(Order::Burn(place));
        true
    }

    /// Orders it to rest.
    pub(super) fn rest(&mut self) {
        if self.place.take().is_some() {
            self.pause();
            self.order(Order::Rest);
        }
    }

    /// Waits until the latest order is carried out: the first portion is done, or it rests.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<()> {
        self.settle(timeout)?;
        self.alive()?;
        if self.place.is_some() {
            self.began = self.mark();
            self.looked = self.began;
        }
        Ok(())
    }

    /// As [`wait`](Self::wait), but a burner that died keeps its error for the next use.
    pub(super) fn settle(&self, timeout: Duration) -> Result<()> {
        let until = Instant::now() + timeout;
        let mut desk = self.shared.desk();
        while desk.answered != desk.number && !desk.ended {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::timeout("a burner of the load", timeout, None));
            }
            let waited = self.shared.answered.wait_timeout(desk, left);
            desk = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// An error once the thread ended by itself: what ended it, the first time.
    pub(super) fn alive(&mut self) -> Result<()> {
        let mut desk = self.shared.desk();
        if !desk.ended {
            return Ok(());
        }
        Err(desk.failure.take().unwrap_or_else(|| dead("it ended")))
    }

    fn mark(&self) -> Option<Mark> {
        let busy_ns = if self.by_device {
            self.shared.achieved.busy_ns.load(Ordering::Relaxed)
        } else {
            let clock = self.shared.desk().clock?;
            clock.nanoseconds()?
        };
        Some(Mark { wall: Instant::now(), busy_ns })
    }

    /// Ends the accounts of a stretch.
    fn pause(&mut self) {
        let Some(began) = self.began.take() else { return };
        self.looked = None;
        // A thread that ended has no clock any more.
        let now = self.mark();
        self.active += now.map_or_else(|| began.wall.elapsed(), |now| now.wall - began.wall);
        self.busy_ns += now.map_or(0, |now| now.busy_ns.saturating_sub(began.busy_ns));
    }

    /// Share of the CPU (of the device) since the last call that told one; `None` when that is too
    /// short a time, or it rests.
    pub(super) fn utilisation(&mut self) -> Option<f64> {
        let looked = self.looked?;
        let wall = looked.wall.elapsed();
        if wall < if self.by_device { DEVICE_LOOK } else { CPU_LOOK } {
            return None;
        }
        let now = self.mark()?;
        self.looked = Some(now);
        #[allow(clippy::cast_precision_loss, reason = "times stay far below 2^53 ns")]
        let busy = now.busy_ns.saturating_sub(looked.busy_ns) as f64;
        Some(busy / 1e9 / now.wall.duration_since(looked.wall).as_secs_f64())
    }

    pub(super) fn reading(&self) -> Reading {
        let mut active = self.active;
        let mut busy_ns = self.busy_ns;
        if let (Some(began), Some(now)) = (self.began, self.mark()) {
            active += now.wall.duration_since(began.wall);
            busy_ns += now.busy_ns.saturating_sub(began.busy_ns);
        }
        let achieved = &self.shared.achieved;
        Reading {
            active_ns: u64::try_from(active.as_nanos()).unwrap_or(u64::MAX),
            busy_ns,
            flops: achieved.flops.load(Ordering::Relaxed),
            bytes: achieved.bytes.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Burner {
    fn drop(&mut self) {
        self.order(Order::End);
        if let Some(thread) = self.thread.take() {
            // Its panics were caught.
            thread.join().ok();
        }
    }
}

#[cold]
fn dead(why: &str) -> Error {
    Error::Unavailable {
        what: "the load".to_owned(),
        message: format!("one of its burners died: {why}; measure again"),
    }
}

fn run(shared: &Shared, make: impl FnOnce() -> Result<Box<dyn Work>>) -> Result<()> {
    shared.desk().clock = Some(ThreadClock::of_this_thread()?);
    let mut make = Some(make);
    let mut work: Option<Box<dyn Work>> = None;
    let mut binding: Option<PinGuard> = None;
    let mut last = 0;
    loop {
        let (order, number) = shared.next(last);
        last = number;
        let place = match order {
            Order::End => return Ok(()),
            Order::Rest => {
                shared.answer(number);
                continue;
            }
            Order::Burn(place) => place,
        };
        match &mut binding {
            Some(binding) => binding.move_to(place.cpu)?,
            None => binding = Some(PinGuard::bind(place.cpu, BindScope::Thread)?),
        }
        if let Some(make) = make.take() {
            work = Some(make()?);
        }
        let Some(work) = &mut work else { return Ok(()) };
        work.arrive(place);
        work.portion(&shared.achieved)?;
        shared.answer(number);
        while !shared.interrupt.load(Ordering::Relaxed) {
            work.portion(&shared.achieved)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::CpuWork;
    use crate::load::work::cpu;
    use crate::machine::Machine;

    const BOUND: Duration = Duration::from_secs(30);

    fn place() -> Place {
        let machine = Machine::host().unwrap();
        let cpu = *machine.census().unwrap().bindable().last().unwrap();
        Place { cpu, node: machine.node_of(cpu) }
    }

    /// Work that goes wrong at its `left`-th portion.
    struct Failing {
        left: u32,
        panics: bool,
    }

    impl Failing {
        fn explode(&self) {
            panic!("planted after {} portions", self.left);
        }
    }

    impl Work for Failing {
        fn portion(&mut self, _: &Achieved) -> Result<()> {
            if self.left > 0 {
                self.left -= 1;
                return Ok(());
            }
            if self.panics {
                self.explode();
            }
            Err(Error::invalid("work", "planted"))
        }
    }

    fn failing(left: u32, panics: bool) -> Burner {
        Burner::start("test", false, move || Ok(Box::new(Failing { left, panics }))).unwrap()
    }

    /// Threads of this process that have this name.
    fn threads(name: &str) -> usize {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
            .filter(|comm| comm.trim() == name)
            .count()
    }

    /// The kernel may list a thread for a moment after it was joined.
    fn assert_gone(name: &str) {
        let began = Instant::now();
        while threads(name) > 0 {
            assert!(began.elapsed() < Duration::from_secs(5), "{name} is still there");
        }
    }

    #[test]
    fn a_burner_works_rests_and_is_gone_after_its_drop() {
        let mut burner = Burner::start("burner-drop", false, || Ok(cpu(CpuWork::Both))).unwrap();
        assert!(burner.burn(place()));
        assert!(!burner.burn(place()), "it burns there already");
        burner.wait(BOUND).unwrap();
        assert_eq!(threads("burner-drop"), 1);
        let began = Instant::now();
        let share = loop {
            if let Some(share) = burner.utilisation() {
                break share;
            }
            assert!(began.elapsed() < BOUND);
        };
        assert!(share <= 1.05, "{share}");
        while burner.reading().bytes < 8 << 20 {
            assert!(began.elapsed() < BOUND);
        }
        burner.rest();
        burner.wait(BOUND).unwrap();
        let rested = burner.reading();
        assert!(rested.busy_ns > 0 && rested.busy_ns <= rested.active_ns * 11 / 10, "{rested:?}");
        assert!(rested.flops > 0);
        std::thread::sleep(Duration::from_millis(20));
        let later = burner.reading();
        assert_eq!((later.flops, later.bytes), (rested.flops, rested.bytes));
        assert_eq!(later.active_ns, rested.active_ns);
        drop(burner);
        assert_gone("burner-drop");
    }

    #[test]
    fn what_kills_a_burner_is_told() {
        let mut burner = failing(0, false);
        burner.burn(place());
        assert_eq!(burner.wait(BOUND).unwrap_err().to_string(), "work: planted");

        let mut burner = failing(1, true);
        burner.burn(place());
        // The portion after the first one may come before this looks.
        let text = match burner.wait(BOUND) {
            Err(error) => error.to_string(),
            Ok(()) => loop {
                if let Err(error) = burner.alive() {
                    break error.to_string();
                }
            },
        };
        assert!(text.contains("panicked"), "{text}");
    }

    #[test]
    fn work_that_cannot_be_made_is_the_error_of_the_start() {
        let mut burner =
            Burner::start("test", false, || Err(Error::invalid("aclnn", "missing"))).unwrap();
        burner.burn(place());
        assert_eq!(burner.wait(BOUND).unwrap_err().to_string(), "aclnn: missing");
    }

    #[test]
    fn a_cpu_that_does_not_exist_is_an_error() {
        let mut burner = Burner::start("test", false, || Ok(cpu(CpuWork::Matmul))).unwrap();
        burner.burn(Place { cpu: CpuId(1_000_000), node: None });
        assert_eq!(burner.wait(BOUND).unwrap_err().kind(), "system");
    }

    #[test]
    fn an_unwinding_stack_joins_its_burners() {
        let result = catch_unwind(|| {
            let mut burner =
                Burner::start("burner-panic", false, || Ok(cpu(CpuWork::Both))).unwrap();
            burner.burn(place());
            burner.wait(BOUND).unwrap();
            panic!("planted");
        });
        assert!(result.is_err());
        assert_gone("burner-panic");
    }
}
