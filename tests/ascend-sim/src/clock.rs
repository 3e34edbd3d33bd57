//! Time: the shared monotonic clock, or a virtual one that moves only with modelled work.

use std::{
    hint,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::config;

static VIRTUAL: AtomicU64 = AtomicU64::new(1_000_000);

/// Nanoseconds of `CLOCK_MONOTONIC`, comparable between processes.
pub(crate) fn monotonic() -> u64 {
    let mut now: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY:
    // * `now` is a live timespec
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Time as the host sees it.
pub(crate) fn host_now() -> u64 {
    if config::get().virtual_time { VIRTUAL.load(Ordering::Acquire) } else { monotonic() }
}

/// The host has waited for something that ended at `end`.
pub(crate) fn host_reached(end: u64) {
    VIRTUAL.fetch_max(end, Ordering::AcqRel);
}

/// The host spends `ns` itself.
pub(crate) fn host_spends(start: u64, ns: u64) {
    if config::get().virtual_time {
        VIRTUAL.fetch_add(ns, Ordering::AcqRel);
    } else if ns > 0 {
        wait_until(start + ns, || false);
    }
}

/// Waits for a moment of the monotonic clock: sleeps while it is far, yields when it is near.
pub(crate) fn wait_until(due: u64, cancelled: impl Fn() -> bool) {
    loop {
        let left = due.saturating_sub(monotonic());
        if left == 0 || cancelled() {
            return;
        }
        if left > 200_000 {
            thread::sleep(Duration::from_nanos((left - 120_000).min(50_000_000)));
        } else if left > 20_000 {
            thread::yield_now();
        } else {
            hint::spin_loop();
        }
    }
}

/// The CPU the calling thread runs on.
pub(crate) fn cpu() -> u32 {
    // SAFETY:
    // * no arguments, no memory
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).unwrap_or(0)
}

/// Polls with growing patience; one per wait.
#[derive(Default)]
pub(crate) struct Patience(u32);

impl Patience {
    pub(crate) fn pause(&mut self) {
        let round = self.0;
        self.0 = round.saturating_add(1);
        if round < 200 {
            thread::yield_now();
        } else {
            thread::sleep(Duration::from_micros(if round < 2_000 { 20 } else { 500 }));
        }
    }
}
