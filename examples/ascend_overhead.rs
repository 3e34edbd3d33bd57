//! What our types add to the calls of the Ascend runtime that a timed copy consists of.
//!
//! `cargo run --release -p cluster-health-examples --example ascend_overhead`
//!
//! Runs on the simulator that cargo builds beside it, in virtual time, so that copies take no time;
//! or on the libraries in the folder that `CLUSTER_HEALTH_ASCEND_LIB_DIR` names. One round is two
//! event records around a copy of 64 bytes, then the wait for the stream: through `Transfer` and
//! `Event`, and through the function pointers of `ascend-sys` alone, in turns.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::ffi::c_void;
use std::process::{Command, ExitCode};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ascend_sys::{acl, function};
use cluster_health_core::{
    ByteSize, DeviceBuffer, Event, HostBuffer, HostMemory, Machine, Stream, Transfer,
};

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
const BOUND: Duration = Duration::from_secs(10);
const SIZE: usize = 64;
const ROUNDS: u32 = 200;
const BATCHES: usize = 301;

/// Counts what this program allocates; the libraries have allocators of their own.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY:
// * Forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Nanoseconds of one round: until all is submitted, and of the wait.
#[derive(Clone, Copy)]
struct Times {
    submit: f64,
    wait: f64,
}

/// Times a batch of rounds.
fn batch<E>(
    mut submit: impl FnMut() -> Result<(), E>,
    mut wait: impl FnMut() -> Result<(), E>,
) -> Result<Times, E> {
    let (mut submitting, mut waiting) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        submit()?;
        let middle = Instant::now();
        wait()?;
        submitting += middle - start;
        waiting += middle.elapsed();
    }
    let each = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(ROUNDS);
    Ok(Times { submit: each(submitting), wait: each(waiting) })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(what: &str, calls: f64, pairs: &[(Times, Times)], part: fn(&Times) -> f64) {
    let ours = median(pairs.iter().map(|(ours, _)| part(ours)).collect());
    let direct = median(pairs.iter().map(|(_, direct)| part(direct)).collect());
    let added = median(pairs.iter().map(|(ours, direct)| part(ours) - part(direct)).collect());
    println!(
        "{what}: ours {ours:.0} ns, direct {direct:.0} ns, added {added:.0} ns = {:.1} ns per call",
        added / calls
    );
}

fn check(code: i32) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("code {code}")) }
}

fn measure() -> Result<(), Box<dyn Error>> {
    let machine = Machine::ascend()?;
    let device = machine.devices().remove(0);
    let size = ByteSize(SIZE as u64);
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked)?;
    let mut target = DeviceBuffer::new(&device, size)?;
    let stream = Stream::new(&device)?;
    let (mut before, mut after) = (Event::new(&device)?, Event::new(&device)?);
    let copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND)?;
    let copy = std::cell::RefCell::new(copy);

    let library = ascend_sys::load::acl()?;
    let malloc_host = function!(library, aclrtMallocHost)?;
    let malloc = function!(library, aclrtMalloc)?;
    let create_stream = function!(library, aclrtCreateStreamWithConfig)?;
    let create_event = function!(library, aclrtCreateEventExWithFlag)?;
    let record = function!(library, aclrtRecordEvent)?;
    let copy_async = function!(library, aclrtMemcpyAsync)?;
    let synchronize = function!(library, aclrtSynchronizeStreamWithTimeout)?;
    let (mut host, mut remote, mut queue) = (null_mut::<c_void>(), null_mut(), null_mut());
    let mut marks = [null_mut(); 2];
    // SAFETY:
    // * The pointer is to a live pointer of ours; this thread has a device, for all calls here.
    check(unsafe { malloc_host(&raw mut host, SIZE) })?;
    // SAFETY:
    // * As above.
    check(unsafe { malloc(&raw mut remote, SIZE, acl::ACL_MEM_MALLOC_HUGE_FIRST) })?;
    let flags = acl::ACL_STREAM_FAST_LAUNCH | acl::ACL_STREAM_FAST_SYNC;
    // SAFETY:
    // * As above.
    check(unsafe { create_stream(&raw mut queue, 0, flags) })?;
    for mark in &mut marks {
        let flags = acl::ACL_EVENT_SYNC | acl::ACL_EVENT_TIME_LINE;
        // SAFETY:
        // * As above.
        check(unsafe { create_event(mark, flags) })?;
    }

    let mut pairs = Vec::with_capacity(BATCHES);
    let mut allocations = 0;
    for _ in 0..BATCHES {
        let allocated = ALLOCATIONS.load(Ordering::Relaxed);
        let ours = batch(
            || {
                before.record(&stream)?;
                copy.borrow_mut().issue()?;
                after.record(&stream)
            },
            || copy.borrow_mut().wait(),
        )?;
        allocations += ALLOCATIONS.load(Ordering::Relaxed) - allocated;
        let direct = batch(
            || {
                // SAFETY:
                // * Event and stream are alive and of this thread's device.
                check(unsafe { record(marks[0], queue) })?;
                let kind = acl::ACL_MEMCPY_HOST_TO_DEVICE;
                // SAFETY:
                // * Both sides are `SIZE` bytes long, and nothing else accesses them.
                check(unsafe { copy_async(remote, SIZE, host, SIZE, kind, queue) })?;
                // SAFETY:
                // * As for the first event.
                check(unsafe { record(marks[1], queue) })
            },
            // SAFETY:
            // * The stream is alive.
            || check(unsafe { synchronize(queue, 10_000) }),
        )?;
        pairs.push((ours, direct));
    }
    report("two records and a copy", 3.0, &pairs, |times| times.submit);
    report("wait", 1.0, &pairs, |times| times.wait);
    println!("allocations in {} of our rounds: {allocations}", BATCHES * ROUNDS as usize);
    Ok(())
}

/// Starts this program again with the simulator as the machine's libraries.
fn on_simulator() -> Result<ExitCode, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let profile = this.parent().and_then(|folder| folder.parent()).ok_or("no build folder")?;
    let simulator = profile.join("deps/libascend_sim.so");
    let folder = std::env::temp_dir().join(format!("ascend-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    std::os::unix::fs::symlink(simulator, folder.join("libascendcl.so"))?;
    let status = Command::new(this).env(FOLDER, &folder).env("ASCEND_SIM_VIRTUAL", "1").status();
    std::fs::remove_dir_all(&folder)?;
    Ok(if status?.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    if std::env::var_os(FOLDER).is_none() {
        return on_simulator();
    }
    measure()?;
    Ok(ExitCode::SUCCESS)
}
