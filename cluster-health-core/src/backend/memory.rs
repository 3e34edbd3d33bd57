//! Mapped memory of this process: anonymous or memfd-backed, with its placement on NUMA nodes.
//!
//! Everything here is plain Linux; drivers that hand out memory of their own do not use it.
#![allow(unsafe_code, reason = "system calls that map, place and lock memory, and raw addresses")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use crate::buffer::TagPattern;
use crate::error::{Error, Result};
use crate::id::NodeId;
use crate::units::ByteSize;

/// At most this many pages are asked for their node.
const SAMPLED_PAGES: usize = 512;

/// The page size of this machine.
pub(crate) fn page_size() -> usize {
    // SAFETY:
    // * sysconf takes no pointers and has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// A mapping that is unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
    /// The memfd behind a shared mapping, kept so that it can be passed to a peer.
    file: Option<OwnedFd>,
}

// SAFETY:
// * The mapping is owned by this value alone and mappings are not tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY:
// * Shared references only give out the address; every access is the caller's obligation.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private memory that has no pages yet.
    pub(crate) fn anonymous(len: usize) -> Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, None)
    }

    /// Shared memory behind a sealed memfd: it cannot shrink under a reader, needs no `/dev/shm`
    /// and vanishes with its last user.
    pub(crate) fn shared(len: usize) -> Result<Self> {
        let what = || format!("allocating {} of shared memory", ByteSize(len as u64));
        // SAFETY:
        // * The name is a valid NUL-terminated string.
        let fd = unsafe {
            libc::memfd_create(
                c"cluster-health".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            )
        };
        if fd < 0 {
            return Err(Error::last_os("memfd_create", what()));
        }
        // SAFETY:
        // * memfd_create returned this descriptor just now; nobody else owns it.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = libc::off_t::try_from(len)
            .map_err(|_| Error::invalid("size", "larger than a file can be"))?;
        // SAFETY:
        // * The descriptor is open and ours; ftruncate takes no pointers.
        if unsafe { libc::ftruncate(file.as_raw_fd(), size) } != 0 {
            return Err(Error::last_os("ftruncate", what()));
        }
        // SAFETY:
        // * The descriptor is open and ours; F_ADD_SEALS takes an integer.
        let sealed = unsafe {
            libc::fcntl(
                file.as_raw_fd(),
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK | libc::F_SEAL_GROW,
            )
        };
        if sealed != 0 {
            return Err(Error::last_os("fcntl(F_ADD_SEALS)", what()));
        }
        Self::map(len, libc::MAP_SHARED, Some(file))
    }

    /// All of a peer's shared memory.
    pub(crate) fn whole_file(file: OwnedFd) -> Result<Self> {
        let len = file_len(&file)?;
        Self::of_file(file, len)
    }

    /// A peer's shared memory.
    pub(crate) fn of_file(file: OwnedFd, len: usize) -> Result<Self> {
        // A file that is shorter, or becomes shorter, would be a SIGBUS later.
        let sealed = rustix::fs::fcntl_get_seals(&file)
            .is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
        if !sealed {
            return Err(Error::format("a peer's memory", "is not sealed against shrinking"));
        }
        if file_len(&file)? < len {
            return Err(Error::format("a peer's memory", "is shorter than it says"));
        }
        let mut mapping = Self::map(len, libc::MAP_SHARED, Some(file))?;
        // The mapping needs no descriptor, and a process has few of them.
        mapping.file = None;
        Ok(mapping)
    }

    /// The memfd of a shared mapping.
    pub(crate) fn file(&self) -> Result<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd).ok_or_else(|| Error::Unavailable {
            what: "this memory".to_owned(),
            message: "it is private to this process".to_owned(),
        })
    }

    /// Takes the frames of a shared mapping now, by its memory policy.
    pub(crate) fn reserve(&self) -> Result<()> {
        let what = || format!("reserving {} of shared memory", ByteSize(self.len as u64));
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(self.file()?, flags, 0, self.len as u64).map_err(|errno| {
            Error::system("fallocate", errno.raw_os_error(), what())
                .with_advice("use smaller --sizes")
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn map(len: usize, flags: libc::c_int, file: Option<OwnedFd>) -> Result<Self> {
        let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY:
        // * The kernel chooses the address, so no existing mapping is replaced.
        // * The descriptor is open (or -1 with MAP_ANONYMOUS).
        let address = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, 0) };
        match NonNull::new(address.cast::<u8>()) {
            Some(address) if address.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { address, len, file })
            }
            _ => Err(Error::last_os("mmap", format!("mapping {}", ByteSize(len as u64)))
                .with_advice("use smaller --sizes")),
        }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Writes one byte to every page, so that each gets a frame from the calling thread's policy.
    pub(crate) fn touch(&self) {
        let mut offset = 0;
        let step = page_size();
        while offset < self.len {
            // SAFETY:
            // * The offset is below the mapping's length.
            let place = unsafe { self.address.as_ptr().add(offset) };
            // SAFETY:
            // * The place is inside our mapping, which is writable and owned by this value.
            // * Volatile, because the write itself is the purpose.
            unsafe { place.write_volatile(0) };
            offset += step;
        }
    }

    /// Keeps the pages in memory; the errno when the kernel refuses.
    pub(crate) fn lock(&self) -> Result<(), i32> {
        // SAFETY:
        // * The range is exactly our mapping.
        if unsafe { libc::mlock(self.address.as_ptr().cast(), self.len) } == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error().raw_os_error().unwrap_or_default())
        }
    }

    /// Binds the pages that are not there yet to one node.
    pub(crate) fn bind_to(&self, node: NodeId) -> Result<()> {
        let bits = libc::c_ulong::BITS;
        let words = node.0 / bits + 1;
        let mut mask = vec![libc::c_ulong::MIN; words as usize];
        mask[(node.0 / bits) as usize] |= 1 << (node.0 % bits);
        // SAFETY:
        // * The range is our mapping; the mask has the length that is passed (the kernel reads
        //   maxnode - 1 bits, hence the one more).
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.address.as_ptr(),
                self.len,
                libc::MPOL_BIND,
                mask.as_ptr(),
                libc::c_ulong::from(words * bits + 1),
                0,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(Error::last_os("mbind", format!("placing memory on NUMA node {node}")))
        }
    }
}

fn file_len(file: &OwnedFd) -> Result<usize> {
    let status = rustix::fs::fstat(file)
        .map_err(|errno| Error::system("fstat", errno.raw_os_error(), "mapping a peer's memory"))?;
    Ok(usize::try_from(status.st_size).unwrap_or(0))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY:
        // * The range is exactly our mapping and this value was its only owner.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// NUMA nodes of at most 512 evenly spaced pages, ascending, with their counts; `None` when the
/// kernel does not tell (no NUMA, refused by a sandbox).
pub(crate) fn page_nodes(address: *mut u8, len: usize) -> Option<Vec<(NodeId, u32)>> {
    let page = page_size();
    let pages = len.div_ceil(page);
    let count = pages.min(SAMPLED_PAGES);
    let mut places: Vec<*mut libc::c_void> =
        (0..count).map(|index| address.wrapping_add(index * pages / count * page).cast()).collect();
    let mut nodes = vec![libc::c_int::MIN; count];
    // SAFETY:
    // * Both arrays have `count` entries; with a null `nodes` argument the call only reads where
    //   the pages are and writes the status array.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            count,
            places.as_mut_ptr(),
            ptr::null::<libc::c_int>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    if result != 0 {
        return None;
    }
    let mut counts = BTreeMap::new();
    for node in nodes {
        // A negative status is an errno for that page (not present, for example).
        let node = u32::try_from(node).ok()?;
        *counts.entry(NodeId(node)).or_insert(0) += 1;
    }
    Some(counts.into_iter().collect())
}

/// Writes a tag pattern into ordinary memory.
///
/// # Safety
/// `address` is valid for writes of `pattern.bytes` bytes.
pub(crate) unsafe fn write_tags(address: *mut u8, pattern: &TagPattern) {
    pattern.for_each(|offset, value| {
        let bytes = value.bytes();
        // SAFETY:
        // * The pattern's offsets stay below `pattern.bytes`, which the caller vouches for.
        let target = unsafe { address.add(offset) };
        // SAFETY:
        // * Offset and length stay within `pattern.bytes`; the source is on our stack and cannot
        //   overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        true
    });
}

/// True when ordinary memory holds the pattern.
///
/// # Safety
/// `address` is valid for reads of `pattern.bytes` bytes.
pub(crate) unsafe fn check_tags(address: *const u8, pattern: &TagPattern) -> bool {
    pattern.for_each(|offset, value| {
        let expected = value.bytes();
        let mut found = [0_u8; 8];
        // SAFETY:
        // * The pattern's offsets stay below `pattern.bytes`, which the caller vouches for.
        let source = unsafe { address.add(offset) };
        // SAFETY:
        // * Offset and length stay within `pattern.bytes`, and a tag is at most eight bytes long.
        unsafe { ptr::copy_nonoverlapping(source, found.as_mut_ptr(), expected.len()) };
        found[..expected.len()] == *expected
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_that_cannot_shrink_is_mapped() {
        let shared = Mapping::shared(8192).unwrap();
        let file = shared.file().unwrap().try_clone_to_owned().unwrap();
        assert_eq!(Mapping::whole_file(file).unwrap().len(), 8192);
        let file = shared.file().unwrap().try_clone_to_owned().unwrap();
        assert!(Mapping::of_file(file, 8193).unwrap_err().to_string().contains("shorter"));
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let loose = rustix::fs::memfd_create("loose", flags).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        assert!(Mapping::whole_file(loose).unwrap_err().to_string().contains("not sealed"));
    }
}
