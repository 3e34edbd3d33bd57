//! Host and device memory, and the tags that prove that a copy arrived.
#![allow(unsafe_code, reason = "slices of driver memory, and calls into the driver trait")]

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::backend::{Driver, RawDevice, RawHost, RawSide};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id::NodeId;
use crate::machine::Machine;
use crate::stream::StreamInner;
use crate::units::ByteSize;

/// How host memory is held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pinned {
    /// Allocated page-locked by the driver.
    Pinned,
    /// Own pages, page-locked afterwards (`aclrtHostRegister` on Ascend, `mlock` on the host
    /// backend).
    Registered,
    /// Ordinary memory.
    Pageable,
}

impl Pinned {
    /// Page-locked and pageable results are never merged.
    #[must_use]
    pub const fn is_pageable(self) -> bool {
        matches!(self, Self::Pageable)
    }
}

/// What kind of host memory is asked for; what was got is [`HostBuffer::pinned`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HostMemory {
    /// Page-locked the way the backend does it best: by its driver (Ascend), or own pages, touched
    /// by the calling thread, then locked. Where that is refused the buffer is pageable and says
    /// why.
    #[default]
    PageLocked,
    /// Own pages, touched by the calling thread, then registered with the driver. Where they cannot
    /// be (Ascend: on Linux up to 5.10, with older toolkits) the buffer is page-locked by the
    /// driver, or pageable, and says why.
    Registered,
    /// Ordinary memory, touched by the calling thread.
    Pageable,
}

/// Streams whose copies may still use a buffer. An entry lives from the preparation of a
/// [`Transfer`](crate::Transfer) to its end, so that a leaked transfer cannot make a later access
/// race with the device.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    users: Mutex<Vec<(Arc<StreamInner>, Access)>>,
    /// Number of users, so that a buffer without any costs no lock.
    count: AtomicUsize,
}

/// What a copy does with a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl Pending {
    fn entries(&self) -> MutexGuard<'_, Vec<(Arc<StreamInner>, Access)>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for what excludes this access, then notes the new user.
    pub(crate) fn begin(&self, stream: &Arc<StreamInner>, access: Access) -> Result<()> {
        self.settle_for(access)?;
        let mut entries = self.entries();
        entries.push((Arc::clone(stream), access));
        self.count.store(entries.len(), Ordering::Release);
        Ok(())
    }

    /// Notes that work on this stream may still use the memory.
    pub(crate) fn leave(&self, stream: &Arc<StreamInner>, access: Access) {
        let mut entries = self.entries();
        entries.push((Arc::clone(stream), access));
        self.count.store(entries.len(), Ordering::Release);
    }

    /// One transfer on this stream ended and the stream is idle.
    pub(crate) fn end(&self, stream: &Arc<StreamInner>) {
        let mut entries = self.entries();
        if let Some(place) = entries.iter().position(|(user, _)| Arc::ptr_eq(user, stream)) {
            entries.swap_remove(place);
        }
        self.count.store(entries.len(), Ordering::Release);
    }

    /// Reading waits for copies that write, writing for all.
    #[inline]
    fn settle_for(&self, access: Access) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 { Ok(()) } else { self.wait_for_users(access) }
    }

    #[cold]
    fn wait_for_users(&self, access: Access) -> Result<()> {
        let mut entries = self.entries();
        let excludes = |user: Access| access == Access::Write || user == Access::Write;
        for (stream, user) in entries.iter() {
            if excludes(*user) {
                stream.settle()?;
            }
        }
        entries.retain(|(_, user)| !excludes(*user));
        self.count.store(entries.len(), Ordering::Release);
        Ok(())
    }
}

/// Host memory that copies start from or end in.
///
/// Its pages are touched by the thread that creates it: bind that thread to a CPU of the wanted
/// NUMA node first, and look at [`page_nodes`](Self::page_nodes) for where they really are.
#[derive(Debug)]
pub struct HostBuffer {
    pub(crate) raw: RawHost,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) pending: Pending,
    requested: HostMemory,
}

impl HostBuffer {
    /// Allocates `size` bytes and touches every page from the calling thread.
    ///
    /// # Errors
    /// When the size is 0 or the memory cannot be had.
    pub fn new(machine: &Machine, size: ByteSize, memory: HostMemory) -> Result<Self> {
        if size.bytes() == 0 {
            return Err(Error::invalid("size", "a buffer of 0 bytes"));
        }
        let driver = machine.driver();
        let len = size.as_len()?;
        let raw = match memory {
            HostMemory::PageLocked => driver.host_alloc(len, true)?,
            HostMemory::Registered => driver.host_register(len)?,
            HostMemory::Pageable => driver.host_alloc(len, false)?,
        };
        Ok(Self { raw, driver, pending: Pending::default(), requested: memory })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.len
    }

    /// Never true: a buffer of 0 bytes is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.len == 0
    }

    /// What was asked for.
    #[must_use]
    pub fn requested(&self) -> HostMemory {
        self.requested
    }

    /// What was got.
    #[must_use]
    pub fn pinned(&self) -> Pinned {
        self.raw.pinned
    }

    /// Why the memory is not what was asked for.
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.raw.refused.as_deref()
    }

    /// Pages per NUMA node of at most 512 evenly spaced ones; `None` = unverified (no NUMA, or the
    /// kernel does not tell).
    #[must_use]
    pub fn page_nodes(&self) -> Option<BTreeMap<NodeId, u32>> {
        Some(self.driver.host_page_nodes(&self.raw)?.into_iter().collect())
    }

    /// The bytes; waits for a copy that was left in flight.
    ///
    /// # Errors
    /// When that copy does not end.
    pub fn bytes(&self) -> Result<&[u8]> {
        self.pending.settle_for(Access::Read)?;
        // SAFETY:
        // * The driver vouches for `len` readable bytes until the buffer is dropped.
        // * Copies into this buffer borrow it mutably; one left in flight was waited for.
        Ok(unsafe { slice_of(self.raw.address, self.raw.len) })
    }

    /// The bytes, writable; waits for a copy that was left in flight.
    ///
    /// # Errors
    /// When that copy does not end.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.pending.settle_for(Access::Write)?;
        // SAFETY:
        // * The driver vouches for `len` writable bytes until the buffer is dropped.
        // * `&mut self` excludes every other access; a copy left in flight was waited for.
        Ok(unsafe { slice_of_mut(self.raw.address, self.raw.len) })
    }

    /// Writes a tag pattern into the first `pattern.bytes` bytes.
    ///
    /// # Errors
    /// When the pattern is longer than the buffer, or a copy left in flight does not end.
    pub fn write_tags(&mut self, pattern: &TagPattern) -> Result<()> {
        pattern.fits(self.raw.len)?;
        self.pending.settle_for(Access::Write)?;
        // SAFETY:
        // * Alive, idle (settled), exclusively ours (`&mut`), long enough (checked).
        unsafe { self.driver.write_tags(RawSide::Host(&self.raw), pattern) }
    }

    /// True when the buffer holds the pattern.
    ///
    /// # Errors
    /// When the pattern is longer than the buffer, or a copy left in flight does not end.
    pub fn check_tags(&self, pattern: &TagPattern) -> Result<bool> {
        pattern.fits(self.raw.len)?;
        self.pending.settle_for(Access::Read)?;
        // SAFETY:
        // * Alive, idle (settled), long enough (checked).
        unsafe { self.driver.check_tags(RawSide::Host(&self.raw), pattern) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // A device that may still use the memory makes freeing it unsound: it is leaked instead.
        if self.pending.settle_for(Access::Write).is_ok() {
            // SAFETY:
            // * From this driver, freed once, idle, and nobody can reach it any more.
            unsafe { self.driver.host_free(&self.raw) };
        }
    }
}

/// Memory of one device.
#[derive(Debug)]
pub struct DeviceBuffer {
    pub(crate) raw: RawDevice,
    pub(crate) device: Device,
    pub(crate) pending: Pending,
    /// Different for every buffer of this process.
    id: u64,
}

/// Ids of device buffers, from 1.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl DeviceBuffer {
    /// Allocates `size` bytes on the device.
    ///
    /// # Errors
    /// When the size is 0 or the memory cannot be had.
    pub fn new(device: &Device, size: ByteSize) -> Result<Self> {
        if size.bytes() == 0 {
            return Err(Error::invalid("size", "a buffer of 0 bytes"));
        }
        device.require_available()?;
        let raw = device.driver().device_alloc(device.index(), size.as_len()?)?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Self { raw, device: device.clone(), pending: Pending::default(), id })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.len
    }

    /// Never true: a buffer of 0 bytes is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.len == 0
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.raw.address
    }

    /// Waits for copies that were left in flight.
    pub(crate) fn settle(&self) -> Result<()> {
        self.pending.settle_for(Access::Write)
    }

    /// The shared memory behind the buffer, where it is that.
    pub(crate) fn file(&self) -> Result<BorrowedFd<'_>> {
        // SAFETY:
        // * The memory is from this driver and alive as long as `self`.
        unsafe { self.device.driver().device_file(&self.raw) }
    }

    /// The device that the memory belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn range(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.raw.len => Ok(()),
            _ => Err(Error::invalid(
                "range",
                format!("{len} bytes at {offset} reach past the {} of the buffer", self.raw.len),
            )),
        }
    }

    /// Writes `data` at `offset`, synchronously.
    ///
    /// # Errors
    /// When the range reaches past the buffer or the copy fails. A synthetic machine holds no
    /// data and refuses.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Result<()> {
        self.range(offset, data.len())?;
        self.pending.settle_for(Access::Write)?;
        // SAFETY:
        // * In range (checked), alive, idle (settled) and exclusively ours (`&mut`).
        unsafe { self.device.driver().device_write(&self.raw, offset, data) }
    }

    /// Reads into `data` from `offset`, synchronously.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        self.range(offset, data.len())?;
        self.pending.settle_for(Access::Read)?;
        // SAFETY:
        // * In range (checked), alive and idle (settled).
        unsafe { self.device.driver().device_read(&self.raw, offset, data) }
    }

    /// Writes a tag pattern into the first `pattern.bytes` bytes.
    ///
    /// # Errors
    /// When the pattern is longer than the buffer or the device refuses.
    pub fn write_tags(&mut self, pattern: &TagPattern) -> Result<()> {
        pattern.fits(self.raw.len)?;
        self.pending.settle_for(Access::Write)?;
        // SAFETY:
        // * Alive, idle (settled), exclusively ours (`&mut`), long enough (checked).
        unsafe { self.device.driver().write_tags(RawSide::Device(&self.raw), pattern) }
    }

    /// True when the buffer holds the pattern from `offset` on.
    ///
    /// # Errors
    /// When the pattern reaches past the buffer or the device refuses.
    pub fn check_tags_at(&self, offset: usize, pattern: &TagPattern) -> Result<bool> {
        pattern.fits(self.raw.len.saturating_sub(offset))?;
        self.pending.settle_for(Access::Read)?;
        let part = RawDevice {
            address: self.raw.address.wrapping_add(offset),
            len: self.raw.len.saturating_sub(offset),
            handle: self.raw.handle,
        };
        // SAFETY:
        // * Alive, idle (settled), long enough from the offset on (checked).
        unsafe { self.device.driver().check_tags(RawSide::Device(&part), pattern) }
    }

    /// True when the buffer holds the pattern.
    ///
    /// # Errors
    /// When the pattern is longer than the buffer or the device refuses.
    pub fn check_tags(&self, pattern: &TagPattern) -> Result<bool> {
        pattern.fits(self.raw.len)?;
        self.pending.settle_for(Access::Read)?;
        // SAFETY:
        // * Alive, idle (settled), long enough (checked).
        unsafe { self.device.driver().check_tags(RawSide::Device(&self.raw), pattern) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.pending.settle_for(Access::Write).is_ok() {
            // SAFETY:
            // * From this driver, freed once, idle, and nobody can reach it any more.
            unsafe { self.device.driver().device_free(self.device.index(), &self.raw) };
        }
    }
}

/// # Safety
/// `address` is valid for reads of `len` bytes for `'a`, and nothing writes them meanwhile.
#[allow(clippy::disallowed_methods, reason = "the one place that documents the obligations")]
pub(crate) unsafe fn slice_of<'a>(address: *const u8, len: usize) -> &'a [u8] {
    // SAFETY:
    // * Forwarded to the caller.
    unsafe { std::slice::from_raw_parts(address, len) }
}

/// # Safety
/// `address` is valid for reads and writes of `len` bytes for `'a`, and nothing else uses them.
#[allow(clippy::disallowed_methods, reason = "the one place that documents the obligations")]
pub(crate) unsafe fn slice_of_mut<'a>(address: *mut u8, len: usize) -> &'a mut [u8] {
    // SAFETY:
    // * Forwarded to the caller.
    unsafe { std::slice::from_raw_parts_mut(address, len) }
}

/// Words that depend on a seed and on their position, written into a source before a copy and
/// looked for in the destination afterwards.
///
/// Sparse patterns have one 8-byte word per 64 KiB (at least 16, at most 4,096) and both ends, so
/// their cost stays a small part of one copy; full ones cover every byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TagPattern {
    /// What the words depend on; different for every point.
    pub seed: u64,
    /// Length of the copy.
    pub bytes: u64,
    /// Every byte, not only some words.
    pub full: bool,
}

/// One tag: up to eight bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    value: [u8; 8],
    len: usize,
}

impl Tag {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.value[..self.len]
    }
}

const WORD: u64 = 8;
const SPACING: u64 = 64 << 10;

impl TagPattern {
    /// A sparse pattern for a copy of `size`.
    #[must_use]
    pub const fn sparse(seed: u64, size: ByteSize) -> Self {
        Self { seed, bytes: size.bytes(), full: false }
    }

    /// A pattern that covers every byte of a copy of `size`.
    #[must_use]
    pub const fn full(seed: u64, size: ByteSize) -> Self {
        Self { seed, bytes: size.bytes(), full: true }
    }

    fn fits(&self, len: usize) -> Result<()> {
        if self.bytes <= len as u64 {
            Ok(())
        } else {
            Err(Error::invalid(
                "pattern",
                format!("{} bytes in a buffer of {len} bytes", self.bytes),
            ))
        }
    }

    fn word_at(&self, offset: u64) -> [u8; 8] {
        // splitmix64's finaliser: neighbouring seeds and offsets give unrelated words.
        let mut x = self.seed ^ offset.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)).to_le_bytes()
    }

    /// Calls `visit` with every tag's offset until it returns false; false if it did.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(usize, Tag) -> bool) -> bool {
        let words = self.bytes / WORD;
        let count =
            if self.full { words } else { words.min((self.bytes / SPACING).clamp(16, 4096)) };
        let mut emit = |offset: u64, len: u64| {
            let tag = Tag { value: self.word_at(offset), len: usize::try_from(len).unwrap_or(0) };
            usize::try_from(offset).is_ok_and(|offset| visit(offset, tag))
        };
        for index in 0..count {
            // Evenly spaced from the first word to the last.
            let word = match count {
                1 => 0,
                _ if count == words => index,
                _ => index * (words - 1) / (count - 1),
            };
            if !emit(word * WORD, WORD) {
                return false;
            }
        }
        let rest = self.bytes % WORD;
        rest == 0 || emit(words * WORD, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_stay_inside_and_reach_both_ends() {
        for bytes in [1, 7, 8, 9, 100, 4096, 65_537, 1 << 20, (16 << 20) + 3] {
            for full in [false, true] {
                let pattern = TagPattern { seed: 3, bytes, full };
                let (mut first, mut end, mut count) = (u64::MAX, 0, 0_u64);
                pattern.for_each(|offset, tag| {
                    first = first.min(offset as u64);
                    end = end.max((offset + tag.bytes().len()) as u64);
                    count += 1;
                    true
                });
                assert_eq!((first, end), (0, bytes));
                assert!(full || count <= 4097, "{count} tags for {bytes} bytes");
                if full {
                    assert_eq!(count, bytes.div_ceil(8));
                }
            }
        }
    }

    #[test]
    fn tags_depend_on_seed_and_place() {
        let a = TagPattern::sparse(1, ByteSize::kib(64));
        let b = TagPattern::sparse(2, ByteSize::kib(64));
        assert_ne!(a.word_at(0), b.word_at(0));
        assert_ne!(a.word_at(0), a.word_at(8));
    }
}
