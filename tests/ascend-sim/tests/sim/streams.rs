//! Order, time, events, time-outs.

use std::{
    ptr,
    time::{Duration, Instant},
};

use crate::library::{D2H, H2D, H2H, Sim};

const SIZE: usize = 1 << 20;

/// 1 MiB at 1.048576 GB/s and 4 ms: 5 ms.
const FIVE_MS: &str = "h2d,gbps=1.048576,us=4000";

#[test]
fn virtual_time_is_exactly_what_the_links_say() {
    let sim = Sim::ready(&[("VIRTUAL", "1"), ("LINKS", FIVE_MS)]);
    let (stream, host, device) = (sim.stream(), sim.malloc_host(SIZE), sim.malloc(SIZE));
    let (start, end) = (sim.event(), sim.event());
    assert_eq!(sim.aclrtRecordEvent(start, stream), 0);
    for _ in 0..3 {
        assert_eq!(sim.aclrtMemcpyAsync(device, SIZE, host, SIZE, H2D, stream), 0);
    }
    assert_eq!(sim.aclrtRecordEvent(end, stream), 0);
    assert_eq!(sim.aclrtSynchronizeStream(stream), 0);
    let mut ms = 0.0;
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, start, end), 0);
    assert!((ms - 15.0).abs() < 1e-4, "{ms}");
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, end, start), 107_007);
    sim.set("TICK_NS", "10000000");
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, start, end), 0);
    assert!((ms - 10.0).abs() < 1e-4 || (ms - 20.0).abs() < 1e-4, "whole ticks: {ms}");
}

#[test]
fn wall_time_is_at_least_what_the_links_say() {
    let sim = Sim::ready(&[("LINKS", FIVE_MS)]);
    let (stream, host, device) = (sim.stream(), sim.malloc_host(SIZE), sim.malloc(SIZE));
    let (start, end) = (sim.event(), sim.event());
    let before = Instant::now();
    assert_eq!(sim.aclrtRecordEvent(start, stream), 0);
    assert_eq!(sim.aclrtMemcpyAsync(device, SIZE, host, SIZE, H2D, stream), 0);
    assert_eq!(sim.aclrtRecordEvent(end, stream), 0);
    let mut status = 7;
    assert_eq!(sim.aclrtQueryEventStatus(end, &raw mut status), 0);
    assert_eq!(status, 0, "not ready is 0 here");
    assert_eq!(sim.aclrtQueryEvent(end, &raw mut status), 0);
    assert_eq!(status, 1, "and 1 there");
    let mut ms = 0.0;
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, start, end), 107_006);
    assert_eq!(sim.aclrtStreamQuery(stream, &raw mut status), 0);
    assert_eq!(status, 1);
    assert_eq!(sim.aclrtSynchronizeEvent(end), 0);
    let waited = before.elapsed();
    assert_eq!(sim.aclrtQueryEventStatus(end, &raw mut status), 0);
    assert_eq!(status, 1);
    assert_eq!(sim.aclrtSynchronizeStream(stream), 0);
    assert_eq!(sim.aclrtStreamQuery(stream, &raw mut status), 0);
    assert_eq!(status, 0);
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, start, end), 0);
    assert!(f64::from(ms) >= 4.99 && f64::from(ms) * 1e-3 <= waited.as_secs_f64(), "{ms}");
}

#[test]
fn pageable_memory_makes_a_copy_synchronous() {
    let sim = Sim::ready(&[("LINKS", FIVE_MS)]);
    let (stream, pinned, device) = (sim.stream(), sim.malloc_host(SIZE), sim.malloc(SIZE));
    let bytes = vec![7_u8; SIZE];
    let start = Instant::now();
    assert_eq!(sim.aclrtMemcpyAsync(device, SIZE, pinned, SIZE, H2D, stream), 0);
    let source = bytes.as_ptr().cast();
    assert_eq!(sim.aclrtMemcpyAsync(device, SIZE, source, SIZE, H2D, stream), 0);
    assert!(start.elapsed() >= Duration::from_millis(10), "both copies are over");
    drop(bytes);
    assert_eq!(sim.download(device, 4), [7; 4]);
    assert_eq!(sim.aclrtMemcpyAsync(pinned, 8, pinned, 8, H2H, stream), 0, "dst is src");
    let other = pinned.wrapping_byte_add(64);
    assert_eq!(sim.aclrtMemcpyAsync(pinned, 8, other, 8, H2H, stream), 207_000);
}

#[test]
fn an_event_orders_two_streams() {
    let sim = Sim::ready(&[("LINKS", "h2d,us=20000")]);
    let (first, second, event) = (sim.stream(), sim.stream(), sim.event());
    let (host, out, device) = (sim.malloc_host(SIZE), sim.malloc_host(SIZE), sim.malloc(SIZE));
    assert_eq!(sim.aclrtMemset(host, SIZE, 9, SIZE), 0);
    assert_eq!(sim.aclrtMemcpyAsync(device, SIZE, host, SIZE, H2D, first), 0);
    assert_eq!(sim.aclrtMemsetAsync(device, 1, 4, 1, first), 0);
    assert_eq!(sim.aclrtRecordEvent(event, first), 0);
    assert_eq!(sim.aclrtStreamWaitEvent(second, event), 0);
    assert_eq!(sim.aclrtMemcpyAsync(out, SIZE, device, SIZE, D2H, second), 0);
    assert_eq!(sim.aclrtSynchronizeStream(second), 0);
    // SAFETY:
    // * pinned memory of this size, no work on it is left
    let found = unsafe { out.cast::<[u8; 2]>().read() };
    assert_eq!(found, [4, 9], "the second stream waited for both tasks of the first");
}

#[test]
fn a_stalled_stream_times_out_and_goes_on_when_released() {
    let sim = Sim::ready(&[("FAULTS", "aclrtMemcpyAsync:2:stall")]);
    let (stream, event) = (sim.stream(), sim.event());
    let (host, device) = (sim.malloc_host(64), sim.malloc(64));
    assert_eq!(sim.aclrtMemcpyAsync(device, 64, host, 64, H2D, stream), 0);
    assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 5000), 0);
    assert_eq!(sim.aclrtMemcpyAsync(device, 64, host, 64, H2D, stream), 0);
    assert_eq!(sim.aclrtRecordEvent(event, stream), 0);
    assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 30), 507_046);
    assert_eq!(sim.aclrtSynchronizeEventWithTimeout(event, 30), 507_047);
    assert_eq!(sim.aclrtSynchronizeDeviceWithTimeout(30), 507_046);
    sim.set("RELEASE", "1");
    assert_eq!(sim.aclrtSynchronizeStreamWithTimeout(stream, 5000), 0);
    sim.set("FAULTS", "aclrtMemcpyAsync:1:stall");
    assert_eq!(sim.aclrtMemcpyAsync(device, 64, host, 64, H2D, stream), 0);
    assert_eq!(sim.aclrtDestroyStreamForce(stream), 0, "does not wait");
}

#[test]
fn memory_freed_under_a_copy_is_noticed() {
    let sim = Sim::ready(&[("LINKS", "h2d,us=30000")]);
    let stream = sim.stream();
    let (host, device) = (sim.malloc_host(64), sim.malloc(64));
    for _ in 0..2 {
        assert_eq!(sim.aclrtMemcpyAsync(device, 64, host, 64, H2D, stream), 0);
    }
    assert_eq!(sim.aclrtFree(device), 0, "free does not wait");
    assert_eq!(sim.aclrtSynchronizeStream(stream), 507_899);
    assert!(sim.count("violations") > 0);
    assert_eq!(sim.aclrtSynchronizeStream(stream), 0, "an error is reported once");
}

#[test]
fn kinds_of_events_differ() {
    let sim = Sim::ready(&[("EVENTS", "3"), ("STREAMS", "2")]);
    let stream = sim.stream();
    let (mut plain, mut extended) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(sim.aclrtCreateEventWithFlag(&raw mut plain, 0), 107_000);
    assert_eq!(sim.aclrtCreateEventWithFlag(&raw mut plain, 0x1), 0);
    assert_eq!(sim.aclrtCreateEventExWithFlag(&raw mut extended, 0x9), 0);
    let timed = sim.event();
    let mut none = ptr::null_mut();
    assert_eq!(sim.aclrtCreateEvent(&raw mut none), 207_007);
    for event in [plain, extended, timed] {
        assert_eq!(sim.aclrtRecordEvent(event, stream), 0);
    }
    assert_eq!(sim.aclrtSynchronizeStream(stream), 0);
    let (mut ms, mut status) = (0.0, 0);
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, plain, timed), 107_006, "no time line");
    assert_eq!(sim.aclrtEventElapsedTime(&raw mut ms, extended, timed), 0);
    assert_eq!(sim.aclrtQueryEvent(extended, &raw mut status), 207_000);
    assert_eq!(sim.aclrtResetEvent(extended, stream), 207_000);
    assert_eq!(sim.aclrtResetEvent(plain, stream), 0);
    assert_eq!(sim.aclrtDestroyEvent(plain), 0);
    assert_eq!(sim.aclrtDestroyEvent(plain), 107_017);
    assert_eq!(sim.count("events"), 2);
    sim.stream();
    assert_eq!(sim.aclrtCreateStream(&raw mut none), 207_008);
    assert_eq!(sim.count("streams"), 2);
}
