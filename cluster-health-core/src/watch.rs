//! Calls into a driver that do not return: which, on which device, for how long.
//!
//! Waits of this crate have bounds, but a driver may keep a thread inside a call that should not wait
//! at all. Nothing can take the thread back then; what can be done is to say so. Every call of the
//! Ascend backend that could block notes itself before and after, with a few stores, and a
//! [`Watchdog`] looks at the notes from a thread of its own.
//!
//! What becomes of an overdue call is the host's decision: the command line ends its process. A
//! library in somebody else's process cannot; the thread stays behind and is counted
//! ([`left_behind`]).
#![allow(unsafe_code, reason = "the kernel's number of a thread")]

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{self, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::affinity::{CpuSet, set_thread_affinity, thread_affinity};
use crate::error::{Error, Result};
use crate::id::{CpuId, DeviceId};

mod note;

use note::{Note, device_of};

/// Threads whose calls can be noted at once; those of further threads are not watched.
const SLOTS: usize = 256;

/// Between looks: often enough for short bounds, rarely enough to disturb nobody.
const LOOKS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// Waits that have a bound of their own return so long after it at most.
const GRACE: Duration = Duration::from_millis(300);
/// A look that comes so late says that this process was stopped, and its calls with it.
const STOPPED: Duration = Duration::from_millis(500);

/// What one thread is doing, on a cache line of its own.
#[repr(align(128))]
struct Slot {
    taken: AtomicBool,
    note: Note,
    /// The kernel's number of the thread.
    thread: AtomicU64,
    /// Calls that were noted here before the thread took it, so that their numbers do not come again.
    calls: AtomicU32,
}

static THREADS: [Slot; SLOTS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        note: Note {
            name: AtomicPtr::new(std::ptr::null_mut()),
            bound_ms: AtomicU64::new(0),
            call: AtomicU64::new(0),
        },
        thread: AtomicU64::new(0),
        calls: AtomicU32::new(0),
    }
}; SLOTS];

/// Calls that were overdue at the last look of any watchdog.
static LEFT_BEHIND: AtomicUsize = AtomicUsize::new(0);

/// What a thread knows about its slot.
#[derive(Clone, Copy)]
enum Place {
    Unknown,
    Slot(&'static Slot),
    /// All are taken, or somebody else bounds the calls of this thread.
    Unwatched,
}

struct Own {
    place: Cell<Place>,
    count: Cell<u32>,
}

impl Drop for Own {
    fn drop(&mut self) {
        if let Place::Slot(slot) = self.place.replace(Place::Unwatched) {
            slot.note.clear();
            slot.calls.store(self.count.get(), Ordering::Relaxed);
            slot.taken.store(false, Ordering::Release);
        }
    }
}

thread_local! {
    static OWN: Own = const { Own { place: Cell::new(Place::Unknown), count: Cell::new(0) } };
}

/// A call that is being made; over when this is dropped.
pub(crate) struct Watched {
    slot: Option<&'static Slot>,
    /// Notes belong to the thread that made them.
    _thread: PhantomData<*const ()>,
}

impl Drop for Watched {
    #[inline]
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.note.clear();
        }
    }
}

/// Notes that this thread is about to make a call that should not wait.
#[inline]
pub(crate) fn enter(call: &'static str, device: Option<DeviceId>) -> Watched {
    enter_wait(call, device, 0)
}

/// Notes that this thread is about to make a call that waits so long at most.
#[inline]
pub(crate) fn enter_wait(call: &'static str, device: Option<DeviceId>, bound_ms: u64) -> Watched {
    let slot = OWN.try_with(|own| {
        let slot = match own.place.get() {
            Place::Slot(slot) => slot,
            Place::Unwatched => return None,
            Place::Unknown => claim(own)?,
        };
        let count = own.count.get().wrapping_add(1);
        own.count.set(count);
        slot.note.set(count, device.map(|device| device.0), call, bound_ms);
        Some(slot)
    });
    Watched { slot: slot.ok().flatten(), _thread: PhantomData }
}

#[cold]
fn claim(own: &Own) -> Option<&'static Slot> {
    let free = THREADS.iter().find(|slot| {
        slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    });
    // SAFETY:
    // * The call has no preconditions.
    let id = unsafe { libc::gettid() };
    if let Some(slot) = free {
        slot.thread.store(u64::from(id.unsigned_abs()), Ordering::Relaxed);
        own.count.set(slot.calls.load(Ordering::Relaxed));
    }
    own.place.set(free.map_or(Place::Unwatched, Place::Slot));
    free
}

/// For threads whose calls somebody waits for with a bound of his own.
pub(crate) fn leave_unwatched() {
    OWN.try_with(|own| own.place.set(Place::Unwatched)).ok();
}

/// A call into a driver that has not returned within its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overdue {
    /// The C call, for example `aclrtMemcpyAsync`.
    pub call: &'static str,
    /// The device that it is for.
    pub device: Option<DeviceId>,
    /// The kernel's number of the thread that is inside it.
    pub thread: u64,
    /// For how long, at least.
    pub waited: Duration,
}

impl Overdue {
    /// The same as an error: a timeout of the call, in `rank` where there are several.
    #[must_use]
    pub fn error(&self, rank: Option<u32>) -> Error {
        let mut error = Error::timeout(self.call, self.waited, self.device);
        if let Error::Backend(error) = &mut error {
            error.rank = rank;
            error.message = Some(format!(
                "the driver has not returned from the call after {} ms (thread {})",
                self.waited.as_millis(),
                self.thread
            ));
            error.advice = Some(
                "look for a hung device (npu-smi info, dmesg) and reset it, or raise --timeout"
                    .to_owned(),
            );
        }
        error
    }
}

/// Number of calls that were overdue when the living [`Watchdog`]s of this process looked last: threads
/// that are left behind inside a driver.
#[must_use]
pub fn left_behind() -> usize {
    LEFT_BEHIND.load(Ordering::Relaxed)
}

/// A thread that looks for overdue calls of all threads of this process; it ends when this is dropped.
#[derive(Debug)]
pub struct Watchdog {
    /// CPUs to keep off; dropped to end the thread.
    orders: Option<Sender<CpuSet>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts it. `report` is called on the watching thread, once for each call that takes longer than
    /// `bound`, or a little longer than the bound that the call has of its own.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(
        bound: Duration,
        mut report: impl FnMut(&Overdue) + Send + 'static,
    ) -> Result<Self> {
        let (orders, received) = channel::<CpuSet>();
        let work = move || {
            let mut watch = Watch::new(bound);
            let pause = (bound / 20).clamp(LOOKS.0, LOOKS.1);
            loop {
                match received.recv_timeout(pause) {
                    Ok(measured) => keep_off(&measured),
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                for overdue in watch.look(Instant::now(), pause) {
                    report(&overdue);
                }
            }
        };
        let thread = thread::Builder::new().name("watchdog".to_owned()).spawn(work);
        let thread = thread.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or_default();
            Error::system("pthread_create", errno, "the thread that watches calls")
        })?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    /// Keeps the watching thread off CPUs that are about to be measured, if this process may use
    /// others.
    pub fn keep_off(&self, measured: impl IntoIterator<Item = CpuId>) {
        if let Some(orders) = &self.orders {
            orders.send(measured.into_iter().collect()).ok();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Takes the calling thread off these CPUs, if that leaves it any.
fn keep_off(measured: &CpuSet) {
    let Ok(allowed) = thread_affinity() else { return };
    let others: CpuSet = allowed.iter().filter(|cpu| !measured.contains(*cpu)).collect();
    if !others.is_empty() {
        set_thread_affinity(&others).ok();
    }
}

/// What a watchdog has seen.
struct Watch {
    bound: Duration,
    /// The note in each slot, since when, and whether it was reported.
    seen: Vec<(u64, Instant, bool)>,
    last: Instant,
    overdue: usize,
}

impl Watch {
    fn new(bound: Duration) -> Self {
        let now = Instant::now();
        Self { bound, seen: vec![(0, now, false); SLOTS], last: now, overdue: 0 }
    }

    /// The calls that are overdue and were not at the last look.
    fn look(&mut self, now: Instant, pause: Duration) -> Vec<Overdue> {
        let stopped = now.duration_since(self.last) > pause + STOPPED;
        self.last = now;
        let mut overdue = 0;
        let mut new = Vec::new();
        for (slot, seen) in THREADS.iter().zip(&mut self.seen) {
            let call = slot.note.call();
            if call == 0 || call != seen.0 {
                *seen = (call, now, false);
                continue;
            }
            if stopped && !seen.2 {
                seen.1 = now;
            }
            let waited = now.duration_since(seen.1);
            let Some((name, bound_ms)) = slot.note.details(call) else { continue };
            let bound = match bound_ms {
                0 => self.bound,
                own => Duration::from_millis(own).saturating_add(GRACE),
            };
            if waited < bound {
                continue;
            }
            overdue += 1;
            if !std::mem::replace(&mut seen.2, true) {
                new.push(Overdue {
                    call: name,
                    device: device_of(call).map(DeviceId),
                    thread: slot.thread.load(Ordering::Relaxed),
                    waited,
                });
            }
        }
        LEFT_BEHIND.fetch_add(overdue, Ordering::Relaxed);
        LEFT_BEHIND.fetch_sub(self.overdue, Ordering::Relaxed);
        self.overdue = overdue;
        new
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        LEFT_BEHIND.fetch_sub(self.overdue, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_millis(200);

    #[test]
    fn a_call_that_does_not_return_is_reported_once_and_counted() {
        let (sender, reports) = channel();
        let watchdog = Watchdog::start(BOUND, move |overdue| {
            sender.send(*overdue).ok();
        });
        let watchdog = watchdog.unwrap();
        watchdog.keep_off([CpuId(0)]);
        let (release, hung) = channel::<()>();
        let began = Instant::now();
        let caller = thread::spawn(move || {
            // Many that return.
            for _ in 0..1000 {
                let _call = enter("aclrtQuick", Some(DeviceId(1)));
            }
            let _call = enter("aclrtMemcpyAsync", Some(DeviceId(70_000)));
            hung.recv().ok();
        });
        let report = reports.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(began.elapsed() >= BOUND);
        assert_eq!((report.call, report.device), ("aclrtMemcpyAsync", Some(DeviceId(70_000))));
        assert!(report.waited >= BOUND && report.thread > 0);
        assert!(left_behind() > 0);
        let error = report.error(Some(3));
        assert_eq!(
            (error.kind(), error.rank(), error.call()),
            ("timeout", Some(3), Some(report.call))
        );
        assert!(error.to_string().contains("device 70000 (rank 3)"), "{error}");
        assert!(reports.recv_timeout(2 * BOUND).is_err(), "reported once");

        release.send(()).unwrap();
        caller.join().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while left_behind() > 0 {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(5));
        }
        drop(watchdog);
        assert!(reports.recv().is_err(), "its thread is gone");
    }

    #[test]
    fn waits_have_their_own_bounds() {
        thread::spawn(|| {
            let _call = enter_wait("aclrtSynchronizeStreamWithTimeout", Some(DeviceId(8)), 1000);
            let mut watch = Watch::new(BOUND);
            let pause = Duration::from_millis(100);
            let start = watch.last + pause;
            let late = (0..=15_u32).find(|looks| {
                let found = watch.look(start + *looks * pause, pause);
                found.iter().any(|found| found.device == Some(DeviceId(8)))
            });
            assert_eq!(late, Some(13));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn slots_are_given_back_and_bounded_threads_stay_out() {
        for _ in 0..3 * SLOTS {
            thread::spawn(|| assert!(enter("aclInit", None).slot.is_some())).join().unwrap();
        }
        thread::spawn(|| {
            leave_unwatched();
            assert!(enter("aclInit", None).slot.is_none());
        })
        .join()
        .unwrap();
    }

    /// Threads that make the same call one after the other are not one call that hangs.
    #[test]
    fn calls_of_threads_that_follow_each_other_are_different() {
        let note = || {
            let call = enter("aclrtSetDevice", Some(DeviceId(4)));
            let slot = call.slot.unwrap();
            (std::ptr::from_ref(slot).addr(), slot.note.call())
        };
        let mut notes: Vec<_> =
            (0..3 * SLOTS).map(|_| thread::spawn(note).join().unwrap()).collect();
        notes.sort_unstable();
        notes.dedup();
        assert_eq!(notes.len(), 3 * SLOTS);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        thread::spawn(|| {
            let call = enter("aclrtMalloc", Some(DeviceId(9)));
            let mut watch = Watch::new(BOUND);
            let pause = Duration::from_millis(10);
            let start = watch.last;
            // Nobody looked for a minute.
            let after = start + Duration::from_secs(60);
            let looks = [start + pause, after, after + pause, after + BOUND / 2, after + BOUND];
            let mut own = |now| {
                let found = watch.look(now, pause);
                found.iter().filter(|found| found.device == Some(DeviceId(9))).count()
            };
            assert_eq!(looks.map(&mut own), [0, 0, 0, 0, 1]);
            drop(call);
            assert_eq!(own(after + 2 * BOUND), 0);
        })
        .join()
        .unwrap();
    }
}
