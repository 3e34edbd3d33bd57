//! What one thread is doing, written by it and read by another without a lock.
//!
//! The number of a call tells whether name and bound belong to it: it is taken back before they
//! change and set after; a reader that finds the same number before and after reading them has those
//! of that call. `tests/model` compiles this file with the atomics of a model checker.
#![allow(unsafe_code, reason = "names of calls are kept as their address and length")]

use super::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A thread's note of the call that it is in.
pub(crate) struct Note {
    /// Where the name of the call is.
    pub(crate) name: AtomicPtr<u8>,
    /// The call's own bound in milliseconds; 0 = it should not wait at all.
    pub(crate) bound_ms: AtomicU64,
    /// 0 = none; else how many calls there were before (32 bits), the device and 1 (24 bits), and
    /// the length of the name (8 bits).
    pub(crate) call: AtomicU64,
}

impl Note {
    /// Notes a call; `count` differs from that of the calls before.
    #[inline]
    pub(crate) fn set(&self, count: u32, device: Option<u32>, name: &'static str, bound_ms: u64) {
        let device = device.map_or(0, |device| (u64::from(device) + 1) & 0xff_ffff);
        let length = name.len().min(255) as u64;
        self.call.store(0, Ordering::Relaxed);
        // Whoever sees one of these sees that the call before is over.
        self.name.store(name.as_ptr().cast_mut(), Ordering::Release);
        self.bound_ms.store(bound_ms, Ordering::Release);
        self.call.store(u64::from(count) << 32 | device << 8 | length, Ordering::Release);
    }

    /// The call is over.
    #[inline]
    pub(crate) fn clear(&self) {
        self.call.store(0, Ordering::Relaxed);
    }

    /// The call that the thread is in; 0 = none.
    pub(crate) fn call(&self) -> u64 {
        self.call.load(Ordering::Acquire)
    }

    /// Name and bound of a call that [`call`](Self::call) has returned, unless it is over by now.
    pub(crate) fn details(&self, call: u64) -> Option<(&'static str, u64)> {
        let name = self.name.load(Ordering::Acquire);
        let bound_ms = self.bound_ms.load(Ordering::Acquire);
        let length = usize::try_from(call & 0xff).unwrap_or(0);
        if self.call.load(Ordering::Relaxed) != call || name.is_null() {
            return None;
        }
        // SAFETY:
        // * Address and length are those of one `&'static str`: the address is at least as new as the
        //   call, and not newer, as the call would be taken back then; numbers of calls come back
        //   after 2^32 calls only.
        // * Shortened to 255 bytes it may end inside a character, which the check below notices.
        #[allow(clippy::disallowed_methods, reason = "the bytes of a string of static lifetime")]
        let bytes: &'static [u8] = unsafe { std::slice::from_raw_parts(name, length) };
        Some((std::str::from_utf8(bytes).unwrap_or("a call"), bound_ms))
    }
}

/// The device that a call is for.
pub(crate) fn device_of(call: u64) -> Option<u32> {
    u32::try_from(call >> 8 & 0xff_ffff).unwrap_or(0).checked_sub(1)
}
