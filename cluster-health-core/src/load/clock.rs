//! The CPU time of a thread, readable from any thread of the process.
#![allow(unsafe_code, reason = "the C library's clocks of threads")]

use crate::error::{Error, Result};

/// The CPU-time clock of one thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// That of the calling thread.
    pub(super) fn of_this_thread() -> Result<Self> {
        let mut id = 0;
        // SAFETY:
        // * The call takes nothing, cannot fail and only returns a handle.
        let thread = unsafe { libc::pthread_self() };
        // SAFETY:
        // * The thread is the calling one, so alive; the pointer is to a live integer of ours.
        let errno = unsafe { libc::pthread_getcpuclockid(thread, &raw mut id) };
        if errno == 0 {
            Ok(Self(id))
        } else {
            Err(Error::system("pthread_getcpuclockid", errno, "timing a burner of the load"))
        }
    }

    /// CPU time that the thread has had, nanoseconds; `None` once it ended.
    pub(super) fn nanoseconds(self) -> Option<u64> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY:
        // * The pointer is to a live timespec of ours; a clock that is gone is an error code.
        let status = unsafe { libc::clock_gettime(self.0, &raw mut time) };
        if status != 0 {
            return None;
        }
        let seconds = u64::try_from(time.tv_sec).ok()?;
        Some(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn work_counts_and_sleep_does_not() {
        let clock = ThreadClock::of_this_thread().unwrap();
        let began = clock.nanoseconds().unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let slept = clock.nanoseconds().unwrap() - began;
        assert!(slept < 20_000_000, "{slept}");
        let watch = Instant::now();
        while clock.nanoseconds().unwrap() - began < 5_000_000 {
            assert!(watch.elapsed() < Duration::from_secs(20));
        }
    }

    #[test]
    fn the_clock_of_another_thread_is_its_own() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            sender.send(ThreadClock::of_this_thread().unwrap()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        });
        let clock = receiver.recv().unwrap();
        let own = ThreadClock::of_this_thread().unwrap();
        let watch = Instant::now();
        while own.nanoseconds().unwrap() < 10_000_000 && watch.elapsed() < Duration::from_secs(5) {}
        assert!(clock.nanoseconds().is_none_or(|spent| spent < 10_000_000));
        thread.join().unwrap();
    }
}
