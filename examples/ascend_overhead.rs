//! What our types add to the calls of the Ascend runtime that a timed copy consists of, against the
//! same calls from C.
//!
//! `cargo run --release -p cluster-health-examples --example ascend_overhead`
//!
//! Runs on the simulator that cargo builds beside it, in virtual time, so that copies take no time;
//! or on the libraries in the folder that `CLUSTER_HEALTH_ASCEND_LIB_DIR` names. One round is two
//! event records around a copy of 64 bytes, then the wait for the stream, which is idle by then:
//! through `Transfer` and `Event`, and in `ascend_overhead.c`, in turns. Fails where more than
//! 100 ns per call are added (built with optimisation), or anything is allocated.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::ffi::{CString, c_char, c_int};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cluster_health_core::{
    ByteSize, DeviceBuffer, Event, HostBuffer, HostMemory, Machine, Stream, Transfer,
};

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
const BOUND: Duration = Duration::from_secs(10);
const SIZE: usize = 64;
/// Without an argument that says otherwise.
const ROUNDS: usize = 30_000;
/// Before each wait, so that it finds the work done: it would be the wake-up of the simulator's
/// thread that is timed.
const PAUSE: Duration = Duration::from_micros(30);
/// What a call may cost more than from C.
const MOST_NS: f64 = 100.0;

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

unsafe extern "C" {
    fn overhead_open(library: *const c_char, bytes: usize) -> c_int;
    fn overhead_round(pause_ns: i64, submit_ns: *mut i64, wait_ns: *mut i64) -> c_int;
}

/// Nanoseconds of one round: until all is submitted, and of the wait.
#[derive(Clone, Copy)]
struct Times {
    submit: f64,
    wait: f64,
}

/// A round in C.
fn c_round() -> Result<Times, String> {
    let (mut submit, mut wait) = (0, 0);
    let pause = i64::try_from(PAUSE.as_nanos()).unwrap_or(i64::MAX);
    // SAFETY:
    // * Both pointers are to live integers of ours, and `overhead_open` has succeeded in this
    //   thread.
    check(unsafe { overhead_round(pause, &raw mut submit, &raw mut wait) })?;
    Ok(Times { submit: submit as f64, wait: wait as f64 })
}

fn check(code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("code {code} in C")) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints a comparison; what ours adds. The simulator's threads are woken in each round, at one of two
/// prices that change from time to time: rounds are compared with their neighbours.
fn report(what: &str, calls: f64, ours: &[Times], c: &[Times], part: fn(&Times) -> f64) -> f64 {
    let of = |rounds: &[Times]| median(rounds.iter().map(part).collect());
    let added = median(ours.iter().zip(c).map(|(ours, c)| part(ours) - part(c)).collect());
    let each = added / calls;
    println!("{what}: ours {:.0} ns, C {:.0} ns, added {each:.1} ns per call", of(ours), of(c));
    added
}

/// True when the bounds are kept.
fn measure(rounds: usize) -> Result<bool, Box<dyn Error>> {
    let machine = Machine::ascend()?;
    // The simulator's threads inherit the CPU: waking one elsewhere costs more, and more variably,
    // than all that is compared here.
    let cpu = machine.census()?.bindable().into_iter().next_back().ok_or("no CPU to bind to")?;
    let _binding = machine.bind(cpu)?;
    let device = machine.devices().remove(0);
    let size = ByteSize(SIZE as u64);
    let source = HostBuffer::new(&machine, size, HostMemory::PageLocked)?;
    let mut target = DeviceBuffer::new(&device, size)?;
    let stream = Stream::new(&device)?;
    let (mut before, mut after) = (Event::new(&device)?, Event::new(&device)?);
    let mut copy = Transfer::to_device(&stream, &source, &mut target, size, BOUND)?;

    let library = ascend_sys::load::acl()?;
    let library = library.libraries().first().ok_or("no library")?.path.as_os_str();
    let library = CString::new(library.as_encoded_bytes())?;
    // SAFETY:
    // * The path is a string that lives during the call, and this thread has a device.
    check(unsafe { overhead_open(library.as_ptr(), SIZE) })?;

    let (mut ours, mut c) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    let allocated = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..rounds {
        let start = Instant::now();
        before.record(&stream)?;
        copy.issue()?;
        after.record(&stream)?;
        let submitted = Instant::now();
        let mut resume = submitted;
        while resume < submitted + PAUSE {
            resume = Instant::now();
        }
        copy.wait()?;
        let wait = resume.elapsed().as_secs_f64() * 1e9;
        ours.push(Times { submit: (submitted - start).as_secs_f64() * 1e9, wait });
        c.push(c_round()?);
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - allocated;
    let submit = report("two records and a copy", 3.0, &ours, &c, |times| times.submit);
    let wait = report("wait", 1.0, &ours, &c, |times| times.wait);
    let added = (submit + wait) / 4.0;
    println!("allocations in {rounds} of our rounds: {allocations}");
    let kept = added <= MOST_NS && allocations == 0;
    let word = if kept { "kept" } else { "exceeded" };
    println!("added {added:.1} ns per call; bounds of {MOST_NS} and no allocation: {word}");
    Ok(kept)
}

/// Starts this program again with the simulator as the machine's libraries.
fn on_simulator() -> Result<ExitCode, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let profile = this.parent().and_then(|folder| folder.parent()).ok_or("no build folder")?;
    let simulator = profile.join("deps/libascend_sim.so");
    let folder = std::env::temp_dir().join(format!("ascend-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    std::os::unix::fs::symlink(simulator, folder.join("libascendcl.so"))?;
    let status = Command::new(this)
        .args(std::env::args_os().skip(1))
        .env(FOLDER, &folder)
        .env("ASCEND_SIM_VIRTUAL", "1")
        .status();
    std::fs::remove_dir_all(&folder)?;
    Ok(if status?.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    if std::env::var_os(FOLDER).is_none() {
        return on_simulator();
    }
    let rounds = std::env::args().nth(1).map_or(Ok(ROUNDS), |text| text.parse())?;
    // What is not optimised is measured but not judged.
    // Whoever else is on the machine may be in the way once, not each time.
    let mut kept = cfg!(debug_assertions);
    for _ in 0..3 {
        kept |= measure(rounds.max(1))?;
        if kept {
            break;
        }
    }
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
