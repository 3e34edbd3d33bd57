//! What an all-gather between two processes and a point of the pair sweep cost on this machine.
//!
//! `cargo run --release -p cluster-health-examples --example pair_overhead`
//!
//! Needs two CPUs. Where `mpicc` and `mpirun` (Open MPI) are installed, the same all-gather runs
//! there too, right afterwards, from `benches/mpi/allgather.c`.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cluster_health_core::rank::{Board, RankGroup};
use cluster_health_core::{ByteSize, Communicator, CpuId, DataType, DeviceBuffer, Machine, Stream};
use cluster_health_matrix::plan::CorePairPlan;
use cluster_health_matrix::samples::Sample;
use cluster_health_matrix::session::{RankZero, RecordOptions, follow, record_core_pair};
use cluster_health_matrix::{Observer, Result};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes per rank and timed iterations.
const SIZES: [(usize, usize); 6] =
    [(8, 20_000), (4096, 20_000), (65_536, 5_000), (1 << 20, 500), (8 << 20, 60), (64 << 20, 12)];

/// Where the hypervisor puts two CPUs changes what lies between them, so both programs run in turn
/// and each keeps its best.
const ROUNDS: usize = 3;

fn main() -> Result<()> {
    if let Some(group) = RankGroup::from_parent(TIMEOUT)? {
        return rank(group, |_| ());
    }
    let this = std::env::current_exe()
        .map_err(|error| cluster_health_matrix::Error::io("finding", "this program", error))?;
    let program = compiled();
    let mut best = vec![[u64::MAX; 2]; SIZES.len()];
    rank(RankGroup::lead(Command::new(this), 2, TIMEOUT)?, |ours| {
        let theirs = program.as_deref().and_then(open_mpi).unwrap_or_default();
        for (index, best) in best.iter_mut().enumerate() {
            best[0] = best[0].min(ours[index]);
            best[1] = best[1].min(theirs.get(index).copied().unwrap_or(u64::MAX));
        }
    })?;
    println!(
        "all_gather, 2 processes on CPUs 0 and 1, out of place, median of the slower rank, best of \
         {ROUNDS} alternating rounds:"
    );
    for ((bytes, _), [ours, theirs]) in SIZES.iter().zip(best) {
        print!("{:>8}: {ours:>9} ns, {:>6.2} GB/s per rank", size(*bytes), rate(*bytes, ours));
        if theirs == u64::MAX {
            println!(" · no Open MPI here");
        } else {
            println!(
                " · Open MPI {theirs} ns, {:.2} GB/s · {:.1} × as fast",
                rate(*bytes, theirs),
                to_f64(theirs) / to_f64(ours)
            );
        }
    }
    if let Some(program) = program {
        std::fs::remove_file(program).ok();
    }
    Ok(())
}

fn size(bytes: usize) -> String {
    ByteSize(bytes as u64).to_string()
}

#[allow(clippy::cast_precision_loss, reason = "shown with few digits")]
fn to_f64(value: u64) -> f64 {
    value as f64
}

fn rate(bytes: usize, nanoseconds: u64) -> f64 {
    to_f64(bytes as u64) / to_f64(nanoseconds)
}

/// One rank: the rounds of all-gathers, then the points of two pair sweeps. `after_round` gets the
/// times of the slower rank per size.
fn rank(mut group: RankGroup, mut after_round: impl FnMut(&[u64])) -> Result<()> {
    for _ in 0..ROUNDS {
        after_round(&all_gathers(&group)?);
    }
    let machine = Machine::host()?;
    let unchanged = plan(&machine, [vec![0], vec![1]], 10_000)?;
    let product = plan(&machine, [vec![0, 1], vec![0, 1]], 5_000)?;
    if group.rank() > 0 {
        follow(&machine, &unchanged, &mut group, RankZero::Begins, &mut ())?;
        follow(&machine, &product, &mut group, RankZero::MeasuresFirst, &mut ())?;
        return Ok(());
    }
    let group = Arc::new(group);
    let starts = points(&machine, &group, &unchanged)?;
    println!("8 B points on an unchanged pair of CPUs: {:.0} points/s", per_second(&starts));
    let starts = points(&machine, &group, &product)?;
    println!("8 B points on the product of CPUs 0,1 × 0,1: {:.0} points/s", per_second(&starts));
    let mut costs: Vec<u64> = starts
        .windows(2)
        .filter(|pair| pair[0].distinct && pair[0].bind_ns > 0)
        .map(|pair| (pair[1].start_ns - pair[0].start_ns).saturating_sub(pair[0].bind_ns))
        .collect();
    costs.sort_unstable();
    println!(
        "8 B points on distinct CPUs, both newly bound: median {} ns beyond binding and its read-back",
        costs[costs.len() / 2]
    );
    Ok(())
}

fn per_second(starts: &[Start]) -> f64 {
    let span = starts[starts.len() - 1].start_ns - starts[0].start_ns;
    to_f64(starts.len() as u64 - 1) / to_f64(span) * 1e9
}

fn all_gathers(group: &RankGroup) -> Result<Vec<u64>> {
    let machine = Machine::host()?;
    let cpu = CpuId(group.rank());
    let _binding = machine.bind(cpu)?;
    let device = machine.devices().swap_remove(0);
    let stream = Stream::new(&device)?;
    let mut communicator = Communicator::new(group, &device)?;
    let mut control = Board::new(group, 1 << 40)?;
    communicator.note_cpu(cpu);
    control.note_cpu(cpu);
    let send = DeviceBuffer::new(&device, ByteSize::mib(64))?;
    let mut receive = DeviceBuffer::new(&device, ByteSize::mib(128))?;
    let mut medians = Vec::new();
    for (bytes, iterations) in SIZES {
        let mut times = Vec::with_capacity(iterations);
        for iteration in 0..iterations + iterations / 10 + 2 {
            // As in the MPI program: both ranks start at an agreed instant of their common clock.
            let mut start = 0;
            control.exchange(0, &machine.now_ns().to_ne_bytes(), |_, message| {
                start = start.max(word(message.bytes));
                Ok(())
            })?;
            while machine.now_ns() < start + 2000 {}
            let start = machine.now_ns();
            communicator.all_gather(&send, &mut receive, bytes, DataType::UInt8, &stream)?;
            let time = machine.now_ns() - start;
            let mut slower = 0;
            control.exchange(1, &time.to_ne_bytes(), |_, message| {
                slower = slower.max(word(message.bytes));
                Ok(())
            })?;
            if iteration >= iterations / 10 + 2 {
                times.push(slower);
            }
        }
        times.sort_unstable();
        medians.push(times[times.len() / 2]);
    }
    Ok(medians)
}

fn word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

/// When a point began and what binding took of it.
struct Start {
    start_ns: u64,
    bind_ns: u64,
    distinct: bool,
}

struct Starts(Vec<Start>);

impl Observer for Starts {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        let distinct = sample.rank0_cpu != sample.rank1_cpu;
        let start_ns = sample.t_ns.unwrap_or(0);
        self.0.push(Start { start_ns, bind_ns: sample.bind_ns, distinct });
        Ok(())
    }
}

fn plan(machine: &Machine, [rank0, rank1]: [Vec<u32>; 2], blocks: u32) -> Result<CorePairPlan> {
    CorePairPlan::builder()
        .rank0_cpus(rank0)
        .rank1_cpus(rank1)
        .sizes([ByteSize(8)])
        .repeats(blocks)
        .build(machine)
}

fn points(machine: &Machine, group: &Arc<RankGroup>, plan: &CorePairPlan) -> Result<Vec<Start>> {
    let mut starts = Starts(Vec::new());
    let dir = scratch("points");
    let mut ranks = || Ok(Arc::clone(group));
    let options = RecordOptions::default();
    let result =
        record_core_pair("core-pair", machine, plan, &mut ranks, &dir, &options, &mut starts);
    std::fs::remove_dir_all(&dir).ok();
    result.map(|_| starts.0)
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("cluster-health-{name}-{}", std::process::id()))
}

/// The MPI program, where it can be compiled.
fn compiled() -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/mpi/allgather.c");
    let program = scratch("allgather");
    let status = Command::new("mpicc").arg("-O2").arg("-o").arg(&program).arg(source).status();
    status.is_ok_and(|status| status.success()).then_some(program)
}

/// The same sizes through Open MPI, nanoseconds.
fn open_mpi(program: &Path) -> Option<Vec<u64>> {
    let sizes = SIZES.iter().map(|(bytes, iterations)| format!("{bytes}:{iterations}"));
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--bind-to", "core", "-n", "2"])
        .arg(program)
        .args(sizes)
        .output();
    let text = String::from_utf8(output.ok()?.stdout).ok()?;
    text.lines().map(|line| line.split_whitespace().nth(1)?.parse().ok()).collect()
}
