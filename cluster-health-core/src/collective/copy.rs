//! Copies between ranks: past the caches when the block would not stay in them anyway.
#![allow(
    unsafe_code,
    reason = "copies through raw addresses, past the caches where that is quicker"
)]

/// From this size on the destination is written past the caches: reading it first, as an ordinary
/// store does, costs a third of the memory traffic.
#[cfg(target_arch = "x86_64")]
const STREAM_FROM: usize = 1 << 20;

/// Copies `len` bytes.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `len` bytes, and they do not overlap.
#[inline]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY:
    // * Forwarded to the caller.
    unsafe { copy_part(from, to, len, len) };
}

/// What is read again this soon is still in the caches.
const PART: usize = 256 << 10;

/// Copies `len` bytes to two places, reading each part from memory once.
///
/// # Safety
/// As [`copy`], for both destinations, which do not overlap either.
pub(super) unsafe fn copy_to_both(from: *const u8, one: *mut u8, other: *mut u8, len: usize) {
    let mut done = 0;
    while done < len {
        let part = PART.min(len - done);
        let source = from.wrapping_add(done);
        for target in [one.wrapping_add(done), other.wrapping_add(done)] {
            // SAFETY:
            // * A part of the ranges that the caller vouches for.
            unsafe { copy_part(source, target, part, len) };
        }
        done += part;
    }
}

/// Copies a part of a block of `whole` bytes.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_part(from: *const u8, to: *mut u8, len: usize, whole: usize) {
    #[cfg(target_arch = "x86_64")]
    if whole >= STREAM_FROM {
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { stream(from, to, len) };
        return;
    }
    // SAFETY:
    // * Forwarded to the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(target_arch = "x86_64")]
unsafe fn stream(mut from: *const u8, mut to: *mut u8, mut len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const VECTOR: usize = 16;
    const BLOCK: usize = 4 * VECTOR;

    let head = to.align_offset(BLOCK).min(len);
    // SAFETY:
    // * `head` is at most `len`; the caller vouches for the ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    // Wrapping: they are only followed inside their ranges.
    (from, to) = (from.wrapping_add(head), to.wrapping_add(head));
    len -= head;
    while len >= BLOCK {
        #[allow(clippy::cast_ptr_alignment, reason = "loads are unaligned ones, stores aligned")]
        let (source, target) = (from.cast::<__m128i>(), to.cast::<__m128i>());
        #[allow(clippy::multiple_unsafe_ops_per_block, reason = "one block of loads and stores")]
        // SAFETY:
        // * BLOCK bytes are left in both ranges, and `to` is aligned to BLOCK.
        // * SSE2 is part of every x86-64 processor.
        unsafe {
            let a = _mm_loadu_si128(source);
            let b = _mm_loadu_si128(source.add(1));
            let c = _mm_loadu_si128(source.add(2));
            let d = _mm_loadu_si128(source.add(3));
            _mm_stream_si128(target, a);
            _mm_stream_si128(target.add(1), b);
            _mm_stream_si128(target.add(2), c);
            _mm_stream_si128(target.add(3), d);
        }
        (from, to) = (from.wrapping_add(BLOCK), to.wrapping_add(BLOCK));
        len -= BLOCK;
    }
    // SAFETY:
    // * The rest of both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    // Streamed stores are weakly ordered: they must be there before "done" is stored.
    // SAFETY:
    // * SSE is part of every x86-64 processor.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_exact_at_any_length_and_alignment() {
        for len in [0, 1, 15, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 77] {
            for shift in [0, 1, 13] {
                let from: Vec<u8> =
                    (0..len + shift).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
                let mut to = vec![0xEE_u8; len + 2 * shift + 1];
                // SAFETY:
                // * Both ranges lie inside their vectors.
                unsafe { copy(from[shift..].as_ptr(), to[shift..].as_mut_ptr(), len) };
                assert_eq!(to[shift..shift + len], from[shift..]);
                assert!(to[..shift].iter().chain(&to[shift + len..]).all(|byte| *byte == 0xEE));
            }
        }
    }
}
