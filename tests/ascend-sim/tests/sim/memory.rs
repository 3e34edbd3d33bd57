//! Memory and synchronous copies: right data, and the codes of wrong pointers.

use std::ptr;

use crate::library::{D2D, D2H, H2D, H2H, Ptr, Sim};

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at % 251).unwrap() ^ seed).collect()
}

/// A page-aligned piece of ordinary memory, leaked.
fn aligned(pages: usize) -> Ptr {
    let layout = std::alloc::Layout::from_size_align(pages * 4096, 4096).unwrap();
    // SAFETY:
    // * the layout has a size
    unsafe { std::alloc::alloc_zeroed(layout) }.cast()
}

#[test]
fn data_survives_the_way_over_two_devices() {
    let sim = Sim::ready(&[]);
    let bytes = pattern(100_000, 3);
    let first = sim.upload(&bytes);
    assert_eq!(sim.aclrtSetDevice(1), 0);
    let second = sim.malloc(bytes.len());
    assert_eq!(sim.aclrtMemcpy(second, bytes.len(), first, bytes.len(), D2D), 507_013);
    assert_eq!(sim.aclrtDeviceEnablePeerAccess(0, 0), 0);
    assert_eq!(sim.aclrtMemcpy(second, bytes.len(), first, bytes.len(), D2D), 0);
    assert_eq!(sim.download(second, bytes.len()), bytes);
}

#[test]
fn wrong_pointers_have_their_codes() {
    let sim = Sim::ready(&[]);
    let mut bytes = pattern(256, 1);
    let host: Ptr = bytes.as_mut_ptr().cast();
    let device = sim.malloc(128);
    let inside: Ptr = device.wrapping_byte_add(64);
    assert_eq!(sim.aclrtMemcpy(device, 128, host, 129, H2D), 107_000, "destMax");
    assert_eq!(sim.aclrtMemcpy(device, 256, host, 129, H2D), 107_000, "out of bounds");
    assert_eq!(sim.aclrtMemcpy(inside, 128, host, 65, H2D), 107_000, "out of bounds");
    assert_eq!(sim.aclrtMemcpy(inside, 64, host, 64, H2D), 0);
    assert_eq!(sim.aclrtMemcpy(device, 128, host, 128, D2H), 107_000, "kind");
    assert_eq!(sim.aclrtMemcpy(ptr::null_mut(), 8, host, 8, H2D), 100_000);
    assert_eq!(sim.aclrtMemcpy(host, 8, host.wrapping_byte_add(8), 8, H2H), 0);
    assert_eq!(sim.aclrtMemset(host, 8, 0, 8), 107_000, "memory the runtime does not know");
    assert_eq!(sim.aclrtFree(inside), 107_000, "not the start");
    assert_eq!(sim.aclrtFree(host), 107_000, "not of the runtime");
    assert_eq!(sim.aclrtFreeHost(device), 107_000, "the other function");
    assert_eq!(sim.aclrtFree(ptr::null_mut()), 100_000);
    assert_eq!(sim.aclrtSetDevice(1), 0);
    assert_eq!(sim.aclrtMemcpy(device, 128, host, 128, H2D), 107_000, "another device's");
    assert!(sim.message().contains("device 0"));
    assert_eq!(sim.aclrtFree(device), 107_000, "another device's");
    assert_eq!(sim.aclrtSetDevice(0), 0);
    assert_eq!(sim.aclrtFree(device), 0);
    assert_eq!(sim.aclrtFree(device), 107_000);
    assert!(sim.message().contains("double free"));
    assert_eq!(sim.aclrtMemcpy(host, 8, device, 8, D2H), 107_000);
    assert!(sim.message().contains("use after free"));
    let mut out = ptr::null_mut();
    assert_eq!(sim.aclrtMalloc(&raw mut out, 8, 0x99), 107_000, "policy");
    assert_eq!(sim.aclrtMalloc(ptr::null_mut(), 8, 0), 100_000);
}

#[test]
fn device_memory_cannot_be_read_by_the_host() {
    let sim = Sim::ready(&[]);
    let device = sim.malloc(4096);
    let pinned = sim.malloc_host(4096);
    let mut pipe = [0; 2];
    // SAFETY:
    // * room for two descriptors
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    // SAFETY:
    // * the kernel checks the address and answers EFAULT, which is what is tested
    assert_eq!(unsafe { libc::write(pipe[1], device, 16) }, -1);
    // SAFETY:
    // * memory that the simulator has mapped for the host
    assert_eq!(unsafe { libc::write(pipe[1], pinned, 16) }, 16);
}

#[test]
fn memory_is_finite_and_counted() {
    let sim = Sim::ready(&[("HBM", "1G"), ("HBM_USED", "256M")]);
    let (mut free, mut total) = (0, 0);
    assert_eq!(sim.aclrtGetMemInfo(1, &raw mut free, &raw mut total), 0);
    assert_eq!((free, total), (768 << 20, 1 << 30));
    assert_eq!(sim.aclrtGetMemInfo(0, &raw mut free, &raw mut total), 0);
    assert_eq!((free, total), (0, 0), "no DDR on this chip");
    let mut big = ptr::null_mut();
    assert_eq!(sim.aclrtMalloc(&raw mut big, 768 << 20, 0), 207_001);
    assert_eq!(sim.aclrtMalloc(&raw mut big, 700 << 20, 0), 0);
    let mut more = ptr::null_mut();
    assert_eq!(sim.aclrtMalloc(&raw mut more, 100 << 20, 0), 207_001);
    assert_eq!(sim.aclrtFree(big), 0);
    assert_eq!(sim.aclrtMalloc(&raw mut more, 100 << 20, 0), 0);
    assert_eq!(sim.count("device_bytes"), 100 << 20);
    assert_eq!(sim.aclrtFree(more), 0);
    assert_eq!(sim.count("device_allocations"), 0);
    assert_eq!(sim.count("aclrtMalloc"), 4);
}

#[test]
fn host_memory_is_registered_once() {
    let sim = Sim::ready(&[]);
    let memory = aligned(4);
    let mut device = ptr::null_mut();
    let unaligned = memory.wrapping_byte_add(64);
    assert_eq!(sim.aclrtHostRegister(unaligned, 4096, 0, &raw mut device), 107_008);
    assert_eq!(sim.aclrtHostRegister(memory, 8192, 0, &raw mut device), 0);
    let second = memory.wrapping_byte_add(4096);
    assert_eq!(sim.aclrtHostRegisterV2(second, 4096, 0x1000_0000), 507_910);
    let mut attributes = [9; 7];
    assert_eq!(sim.aclrtPointerGetAttributes(memory, &raw mut attributes), 0);
    assert_eq!(attributes[1], 0, "host");
    assert_eq!(sim.aclrtPointerGetAttributes(device, &raw mut attributes), 0);
    assert_eq!(attributes[1], 1, "device");
    // The device's view is the same memory.
    assert_eq!(sim.aclrtMemset(memory, 4096, 0x5a, 4096), 0);
    assert_eq!(sim.download(device, 4096), vec![0x5a; 4096]);
    assert_eq!(sim.aclrtHostUnregister(second), 507_911);
    assert_eq!(sim.aclrtHostUnregister(memory), 0);
    assert_eq!(sim.aclrtHostUnregister(memory), 507_911);
    assert_eq!(sim.aclrtPointerGetAttributes(memory, &raw mut attributes), 0);
    assert_eq!(attributes[1], 2, "unregistered");
    assert_eq!(sim.aclrtHostRegisterV2(memory, 8192, 0x4), 107_000, "reserved flag");
    assert_eq!(sim.aclrtHostRegisterV2(memory, 8192, 0x1000_0000), 0);
    assert_eq!(sim.aclrtHostUnregister(memory), 0);
    sim.set("HOST_REGISTER", "0");
    assert_eq!(sim.aclrtHostRegister(memory, 8192, 0, &raw mut device), 207_000);
    let pinned = sim.malloc_host(4096);
    assert_eq!(sim.aclrtHostRegister(pinned, 4096, 0, &raw mut device), 0);
    assert_eq!(sim.aclrtHostRegisterV2(pinned, 4096, 0x1000_0000), 507_910);
    assert_eq!(sim.aclrtHostUnregister(pinned), 0);
    assert_eq!(sim.aclrtFreeHost(pinned), 0);
    assert_eq!(sim.count("registrations"), 0);
    assert_eq!(sim.count("host_allocations"), 0);
}

#[test]
fn rows_are_copied_with_their_pitches() {
    let sim = Sim::ready(&[]);
    let bytes = pattern(10 * 7, 0);
    let device = sim.malloc(16 * 7);
    assert_eq!(sim.aclrtMemset(device, 16 * 7, 0xee, 16 * 7), 0);
    let source = bytes.as_ptr().cast();
    assert_eq!(sim.aclrtMemcpy2d(device, 16, source, 10, 8, 7, H2D), 0);
    let mut expected = vec![0xee; 16 * 7];
    for row in 0..7 {
        expected[row * 16..row * 16 + 8].copy_from_slice(&bytes[row * 10..row * 10 + 8]);
    }
    assert_eq!(sim.download(device, 16 * 7), expected);
    assert_eq!(sim.aclrtMemcpy2d(device, 16, source, 10, 11, 7, H2D), 107_000, "over the pitch");
    assert_eq!(sim.aclrtMemcpy2d(device, 17, source, 10, 8, 7, H2D), 0, "the last row is short");
    assert_eq!(sim.aclrtMemcpy2d(device, 18, source, 10, 8, 7, H2D), 107_000, "out of bounds");
}
