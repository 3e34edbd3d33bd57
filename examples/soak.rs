//! One process that sweeps again and again: nothing of it may grow.
//!
//! ```text
//! cargo run --release -p cluster-health-examples --example soak -- [--minutes N]
//! ```
//!
//! A round is a dozen sweeps: copies on this machine and pairs of ranks that are threads and child
//! processes, in virtual time, on the simulator of the Ascend runtime with a device that fails;
//! complete, cancelled, refused by the observer, ended by its panic, left by a rank; recorded, judged
//! and reported. After each round the process looks at itself: resident memory, open files,
//! threads, mappings, children. Prints a line per minute. Exit code 1 where the last quarter has more of
//! anything than the second; without arguments after ten seconds.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankGroup;
use cluster_health_core::watch::Watchdog;
use cluster_health_core::{ByteSize, LoadProfile, Machine, Scenario};
use cluster_health_matrix::plan::{CorePairPlan, H2dPlan, Sampling};
use cluster_health_matrix::report::{Report, ReportOptions};
use cluster_health_matrix::run::OpenMode;
use cluster_health_matrix::samples::Sample;
use cluster_health_matrix::session::{
    RankZero, RecordOptions, follow, record_core_pair, record_h2d,
};
use cluster_health_matrix::{Observer, Result, sweep};

type Failure = Box<dyn Error + Send + Sync>;

/// Where this program, started again, finds the simulator.
const SIMULATOR: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";
/// What is freed goes back to the kernel at once: by itself the allocator keeps some of it, more or
/// less from round to round, so that resident memory would say little.
const TUNABLES: &str = "GLIBC_TUNABLES";
const RETURN_MEMORY: &str = "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072:glibc.malloc.arena_max=2";
const TIMEOUT: Duration = Duration::from_secs(20);
const SCENARIO: &str = "[machine]\ncpus = 32\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n\
    [[fault]]\nkind = \"slow_core\"\ncpus = [5]\nfactor = 0.7\n";

/// Counts what this program has allocated and not freed; what the allocator keeps of it is another
/// matter.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY:
// * Forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY:
        // * Forwarded to the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How a sweep ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Complete,
    Cancelled,
    Refused,
    Panicked,
}

const WAYS: [Way; 4] = [Way::Complete, Way::Cancelled, Way::Refused, Way::Panicked];

struct Host {
    way: Way,
    seen: usize,
}

impl Observer for Host {
    fn sample(&mut self, _sample: &Sample) -> Result<()> {
        self.seen += 1;
        match self.way {
            Way::Refused if self.seen == 3 => Err(cluster_health_matrix::Error::io(
                "writing",
                "a sample",
                std::io::Error::other("full"),
            )),
            // Without the hook, which would print.
            Way::Panicked if self.seen == 3 => resume_unwind(Box::new("the host's")),
            _ => Ok(()),
        }
    }

    fn is_cancelled(&self) -> bool {
        self.way == Way::Cancelled && self.seen >= 3
    }
}

/// Runs a sweep that has to end in this way.
fn ends<T>(
    way: Way,
    work: impl FnOnce(&mut Host) -> Result<T>,
) -> std::result::Result<(), Failure> {
    let mut host = Host { way, seen: 0 };
    let ended = catch_unwind(AssertUnwindSafe(|| work(&mut host)));
    match (way, ended) {
        (Way::Complete | Way::Cancelled, Ok(Ok(_)))
        | (Way::Refused, Ok(Err(_)))
        | (Way::Panicked, Err(_)) => Ok(()),
        (_, Ok(Err(error))) => Err(error.into()),
        (_, Ok(Ok(_))) => Err(format!("a sweep that was to be {way:?} ended well").into()),
        (_, Err(panic)) => resume_unwind(panic),
    }
}

fn copies(machine: &Machine) -> Result<H2dPlan> {
    H2dPlan::builder()
        .sizes([ByteSize::kib(64), ByteSize::mib(1)])
        .repeats(1)
        .timeout(TIMEOUT)
        .build(machine)
}

fn pairs(machine: &Machine) -> Result<CorePairPlan> {
    CorePairPlan::builder()
        .sizes([ByteSize(8), ByteSize::kib(64)])
        .repeats(1)
        .timeout(TIMEOUT)
        .build(machine)
}

fn options() -> RecordOptions {
    RecordOptions::default().with_mode(OpenMode::Force)
}

/// Ranks that are threads; rank 1 may leave before its sweep.
fn threads(way: Way, leaves: bool) -> std::result::Result<(), Failure> {
    let machine = Machine::host()?;
    let plan = pairs(&machine)?;
    thread::scope(|scope| {
        let ranks = RankGroup::threads(2)?.into_iter().map(|group| {
            let (machine, plan) = (&machine, &plan);
            scope.spawn(move || {
                if leaves && group.rank() == 1 {
                    return Ok(());
                }
                let way = if leaves { Way::Refused } else { way };
                // An error or a panic of rank 0's host is a lost rank to rank 1.
                if group.rank() == 0 || matches!(way, Way::Complete | Way::Cancelled) {
                    let way = if group.rank() == 0 { way } else { Way::Complete };
                    return ends(way, |host| sweep::core_pair(machine, plan, Some(&group), host));
                }
                sweep::core_pair(machine, plan, Some(&group), &mut ()).ok();
                Ok(())
            })
        });
        for rank in ranks.collect::<Vec<_>>() {
            rank.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        }
        Ok(())
    })
}

/// Ranks that are processes: this one and a child.
fn processes(dir: &Path) -> std::result::Result<(), Failure> {
    let machine = Machine::host()?;
    let plan = pairs(&machine)?;
    let mut ranks = || {
        let this = std::env::current_exe()
            .map_err(|error| cluster_health_matrix::Error::io("finding", "this program", error))?;
        Ok(Arc::new(RankGroup::lead(Command::new(this), 2, TIMEOUT)?))
    };
    record_core_pair("soak", &machine, &plan, &mut ranks, dir, &options(), &mut ())?;
    Ok(())
}

/// In virtual time: every cell, and a sample of the cells, both judged.
fn synthetic(dir: &Path) -> std::result::Result<(), Failure> {
    let machine = Machine::synthetic(Scenario::parse(SCENARIO, "the example")?)?;
    let mut none = || unreachable!("a synthetic machine has its ranks");
    for sample in [None, Some(Sampling::within(Duration::from_secs(5)))] {
        let plan = H2dPlan::builder().sample(sample).repeats(2).build(&machine)?;
        record_h2d("soak", &machine, &plan, dir, &options(), &mut ())?;
        if Report::read(dir)?.diagnosis.findings.is_empty() {
            return Err("the planted core was not found".into());
        }
        let plan = CorePairPlan::builder().sample(sample).repeats(1).build(&machine)?;
        record_core_pair("soak", &machine, &plan, &mut none, dir, &options(), &mut ())?;
    }
    Ok(())
}

/// On the simulator, whose device 1 fails soon, with a watchdog.
fn simulator(dir: &Path, way: Way) -> std::result::Result<(), Failure> {
    let _watchdog = Watchdog::start(TIMEOUT, |_| ())?;
    let machine = Machine::ascend()?;
    let plan = copies(&machine)?;
    ends(way, |host| record_h2d("soak", &machine, &plan, dir, &options(), host))
}

/// Every kind of sweep once; their number.
fn round(dir: &Path, way: Way) -> std::result::Result<u64, Failure> {
    let machine = Machine::host()?;
    let plan = copies(&machine)?;
    record_h2d("soak", &machine, &plan, dir, &options(), &mut ())?;
    Report::read(dir)?.write(dir, &ReportOptions::default())?;
    ends(way, |host| record_h2d("soak", &machine, &plan, dir, &options(), host))?;
    let loaded = H2dPlan::builder()
        .sizes([ByteSize::kib(64)])
        .repeats(1)
        .loads([LoadProfile::Idle, "cpu:1".parse()?])
        .build(&machine)?;
    ends(way, |host| sweep::h2d(&machine, &loaded, host))?;
    threads(Way::Complete, false)?;
    threads(way, false)?;
    threads(way, true)?;
    processes(dir)?;
    synthetic(dir)?;
    simulator(dir, way)?;
    Ok(12)
}

/// What the kernel says that this process has.
#[derive(Debug, Clone, Copy)]
struct Process {
    resident_kib: u64,
    allocated_kib: u64,
    files: u64,
    threads: u64,
    mappings: u64,
    children: u64,
}

impl Process {
    /// `record` bytes of what is allocated are not counted: the list of these.
    fn now(record: usize) -> std::io::Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        // Of those without access are guards, and what the simulator keeps of the last freed addresses.
        let maps = fs::read_to_string("/proc/self/maps")?;
        let mut children = 0;
        for task in fs::read_dir("/proc/self/task")? {
            // One that ends just now has none.
            let list = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            children += list.split_whitespace().count() as u64;
        }
        Ok(Self {
            resident_kib: number("VmRSS:"),
            allocated_kib: ALLOCATED.load(Ordering::Relaxed).saturating_sub(record) as u64 / 1024,
            files: fs::read_dir("/proc/self/fd")?.count() as u64,
            threads: number("Threads:"),
            mappings: maps.lines().filter(|line| !line.contains(" ---p ")).count() as u64,
            children,
        })
    }

    fn figures(&self) -> [u64; 6] {
        [
            self.resident_kib,
            self.allocated_kib,
            self.files,
            self.threads,
            self.mappings,
            self.children,
        ]
    }
}

fn row(minute: u64, rounds: u64, sweeps: u64, process: &Process) {
    let [resident, allocated, files, threads, mappings, children] = process.figures();
    println!(
        "{minute:>6} {rounds:>7} {sweeps:>7} {resident:>8} {allocated:>9} {files:>6} {threads:>8} {mappings:>9} \
         {children:>9}"
    );
}

/// The least and the most of each figure.
fn range(rounds: &[Process]) -> [(u64, u64); 6] {
    std::array::from_fn(|figure| {
        let values = || rounds.iter().map(|process| process.figures()[figure]);
        (values().min().unwrap_or(0), values().max().unwrap_or(0))
    })
}

/// True where the last quarter of the rounds has no more than the second. Threads, and their mappings,
/// are gone a moment after they were joined, and allocators keep some memory, so that the middle of a
/// quarter is what counts, not its highest round.
fn is_flat(rounds: &[Process]) -> bool {
    let middle = rounds.len() / 2;
    let typical = |rounds: &[Process], figure: usize| {
        let mut values: Vec<u64> = rounds.iter().map(|process| process.figures()[figure]).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    let (before, after) = (&rounds[rounds.len() / 4..middle], &rounds[rounds.len() * 3 / 4..]);
    // A hundredth of resident memory and half a MiB, 4 KiB allocated and two mappings are noise.
    let slack = [typical(before, 0) / 100 + 512, 4, 0, 0, 2, 0];
    let names = ["KiB resident", "KiB allocated", "files", "threads", "mappings", "children"];
    let spread = range(after);
    let mut is_flat = true;
    for (figure, name) in names.into_iter().enumerate() {
        let (from, to) = (typical(before, figure), typical(after, figure));
        let (low, high) = spread[figure];
        let flat = to <= from + slack[figure];
        is_flat &= flat;
        println!(
            "{name}: {from} in the second quarter, {to} in the last ({low} to {high}): {}",
            if flat { "flat" } else { "GROWS" }
        );
    }
    is_flat
}

fn soak(length: Duration) -> std::result::Result<bool, Failure> {
    let scratch = tempfile::tempdir()?;
    let dir = scratch.path().join("results");
    let began = Instant::now();
    let (mut sweeps, mut minute) = (0, 0);
    // More than there will be, so that the record itself does not grow.
    let mut rounds = Vec::with_capacity(1 << 16);
    println!("minute  rounds  sweeps  RSS KiB  heap KiB  files  threads  mappings  children");
    // Quarters of few rounds say little, but a machine that does other things must not take for ever.
    let is_over = |rounds: usize| match rounds {
        0..4 => false,
        4..16 => began.elapsed() > 12 * length,
        _ => began.elapsed() > length,
    };
    while !is_over(rounds.len()) {
        sweeps += round(&dir, WAYS[rounds.len() % WAYS.len()])?;
        // Joined threads are gone for the kernel a moment later.
        thread::sleep(Duration::from_millis(5));
        let process = Process::now(rounds.capacity() * size_of::<Process>())?;
        rounds.push(process);
        let minutes = began.elapsed().as_secs() / 60;
        if rounds.len() == 1 || minutes > minute {
            minute = minutes;
            row(minute, rounds.len() as u64, sweeps, &process);
        }
    }
    let flat = is_flat(&rounds);
    println!("{sweeps} sweeps in {} rounds, {} s", rounds.len(), began.elapsed().as_secs());
    Ok(flat)
}

/// Starts this program again with the simulator as the machine's libraries.
fn on_simulator() -> std::result::Result<ExitCode, Failure> {
    let this = std::env::current_exe()?;
    let profile = this.parent().and_then(|folder| folder.parent()).ok_or("no build folder")?;
    let folder = tempfile::tempdir()?;
    let library = profile.join("deps/libascend_sim.so");
    std::os::unix::fs::symlink(library, folder.path().join("libascendcl.so"))?;
    let mut command = Command::new(this);
    command
        .args(std::env::args_os().skip(1))
        .env(SIMULATOR, folder.path())
        .env("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:9+:507899");
    if std::env::var_os(TUNABLES).is_none() {
        command.env(TUNABLES, RETURN_MEMORY);
    }
    let status = command.status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> std::result::Result<ExitCode, Failure> {
    if let Some(mut group) = RankGroup::from_parent(TIMEOUT)? {
        let machine = Machine::host()?;
        follow(&machine, &pairs(&machine)?, &mut group, RankZero::Begins, &mut ())?;
        return Ok(ExitCode::SUCCESS);
    }
    if std::env::var_os(SIMULATOR).is_none() {
        return on_simulator();
    }
    let mut words = std::env::args().skip(1);
    let length = match (words.next().as_deref(), words.next()) {
        (None, _) => Duration::from_secs(10),
        (Some("--minutes"), Some(minutes)) => Duration::from_secs(60 * minutes.parse::<u64>()?),
        _ => return Err("usage: soak [--minutes N]".into()),
    };
    Ok(if soak(length)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
