//! What the ranks of a communicator share: a memfd of the process that made the root info.
//!
//! Its first part is a table of counters, mapped by every rank; behind it each rank, and each
//! ordered pair of ranks, has a region of its own for data, written and read with `pwrite` and
//! `pread`. Regions are far apart and cost memory only where they were written.

use std::{
    ffi::c_void,
    fs::{File, OpenOptions},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

pub(crate) const MAX_RANKS: usize = 256;
const RANK_CELLS: usize = 16;
const PAIR_CELLS: usize = 4;
const FIRST_RANK: usize = 16;
const FIRST_PAIR: usize = FIRST_RANK + MAX_RANKS * RANK_CELLS;
const CELLS: usize = FIRST_PAIR + MAX_RANKS * MAX_RANKS * PAIR_CELLS;
const TABLE_BYTES: usize = CELLS * size_of::<AtomicU64>();
const REGION: u64 = 1 << 36;

/// The cells of the table that belong to no rank.
pub(crate) const COOKIE: usize = 0;
pub(crate) const RANKS: usize = 1;
pub(crate) const JOINED: usize = 2;

/// The cells of a rank.
pub(crate) const PRESENT: usize = 0;
pub(crate) const POSTED: usize = 1;
pub(crate) const DONE: usize = 2;
pub(crate) const START: usize = 3;
pub(crate) const WHAT: usize = 4;
pub(crate) const COUNT: usize = 5;

/// The cells of an ordered pair.
pub(crate) const SENT: usize = 0;
pub(crate) const TAKEN: usize = 1;
pub(crate) const BYTES: usize = 2;
pub(crate) const SENT_AT: usize = 3;

#[derive(Debug)]
pub(crate) struct Shared {
    file: File,
    table: usize,
}

impl Shared {
    pub(crate) fn create() -> std::io::Result<Self> {
        // SAFETY:
        // * the name is a C string that lives during the call
        let fd = unsafe { libc::memfd_create(c"ascend-sim".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY:
        // * a descriptor just made, owned by nobody else
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(TABLE_BYTES as u64)?;
        Self::map(file)
    }

    pub(crate) fn open(path: &str) -> std::io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < TABLE_BYTES as u64 {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        Self::map(file)
    }

    /// The path under which processes of this user find the file while this one has it open.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    fn map(file: File) -> std::io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY:
        // * a new mapping at an address of the kernel's choice; the file is at least that long and
        //   no code shortens it
        let start =
            unsafe { libc::mmap(ptr::null_mut(), TABLE_BYTES, access, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { file, table: start.expose_provenance() })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    pub(crate) fn cell(&self, index: usize) -> &AtomicU64 {
        assert!(index < CELLS, "a cell of the table");
        let cell: *mut u64 =
            ptr::with_exposed_provenance_mut(self.table + index * size_of::<AtomicU64>());
        // SAFETY:
        // * inside the mapping, which lives as long as `self`, and aligned
        // * every process accesses the table through atomics only
        unsafe { AtomicU64::from_ptr(cell) }
    }

    pub(crate) fn rank(&self, rank: usize, cell: usize) -> &AtomicU64 {
        self.cell(FIRST_RANK + rank * RANK_CELLS + cell)
    }

    pub(crate) fn pair(&self, from: usize, to: usize, cell: usize) -> &AtomicU64 {
        self.cell(FIRST_PAIR + (from * MAX_RANKS + to) * PAIR_CELLS + cell)
    }

    pub(crate) fn cookie(&self) -> u64 {
        self.cell(COOKIE).load(Ordering::Acquire)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let start: *mut c_void = ptr::with_exposed_provenance_mut(self.table);
        // SAFETY:
        // * the whole mapping made by `map`, whose references end with `self`
        unsafe { libc::munmap(start, TABLE_BYTES) };
    }
}

pub(crate) fn rank_region(rank: usize) -> u64 {
    (1 + rank as u64) * REGION
}

pub(crate) fn pair_region(from: usize, to: usize) -> u64 {
    (1 + MAX_RANKS as u64 + from as u64 * MAX_RANKS as u64 + to as u64) * REGION
}
