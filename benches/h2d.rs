//! What the library itself costs: everything here but the copies is its own work.
//!
//! `cargo bench -p cluster-health-benches`; with `-- --test` every bench runs once.

use std::hint::black_box;
use std::time::Duration;

use cluster_health_benches::DeviceTime;
use cluster_health_core::affinity::{BindScope, PinGuard};
use cluster_health_core::{
    ByteSize, DeviceBuffer, HostBuffer, HostMemory, Machine, Scenario, Stream, Transfer,
};
use cluster_health_matrix::matrix::{Axis, Matrix};
use cluster_health_matrix::output::png::{Style, render};
use cluster_health_matrix::plan::{H2dPlan, Order};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::samples::Sweep;
use cluster_health_matrix::session::{RecordOptions, record_h2d};
use cluster_health_matrix::{Result, sweep};
use criterion::{Criterion, Throughput};

/// Most blocks of a plan.
const MOST_REPEATS: u64 = 10_000;

/// One point of 64 KiB on an unchanged core: 1 warm-up, 3 timed copies, both data checks. The time
/// is the sweep's own, first bind to last sample, over its points.
fn point(c: &mut Criterion, machine: &Machine) -> Result<()> {
    let cpu = machine.census()?.bindable()[0].0;
    let plan = |repeats: u64| {
        H2dPlan::builder()
            .cpus([cpu])
            .devices([machine.devices()[0].id().0])
            .sizes([ByteSize::kib(64)])
            .warmup(Some(1))
            .repeats(u32::try_from(repeats).unwrap_or(u32::MAX))
            .build(machine)
    };
    // A plan that cannot be measured fails here, not inside the timing loop.
    sweep::h2d(machine, &plan(1)?, &mut ())?;
    c.bench_function("host: point of 64 KiB", |bencher| {
        bencher.iter_custom(|wanted| {
            let (mut nanoseconds, mut points) = (0, 0);
            while points < wanted {
                let repeats = (wanted - points).min(MOST_REPEATS);
                let end = plan(repeats)
                    .and_then(|plan| sweep::h2d(machine, &plan, &mut ()))
                    .expect("it could be measured before")
                    .end;
                nanoseconds += end.timings.wall_ns;
                points += end.points;
            }
            // Sentinel visits make it a few points more than asked for.
            let share = u128::from(nanoseconds) * u128::from(wanted) / u128::from(points);
            Duration::from_nanos(u64::try_from(share).unwrap_or(u64::MAX))
        });
    });
    Ok(())
}

/// Bare copies by the device's clock: what the points above consist of.
fn copies(machine: &Machine) -> Result<()> {
    let timeout = Duration::from_secs(30);
    let device = machine.devices().swap_remove(0);
    let stream = Stream::new(&device)?;
    let time = DeviceTime::new(&stream, timeout)?;
    let mut criterion = Criterion::default().with_measurement(time).configure_from_args();
    let mut group = criterion.benchmark_group("host: bare copy");
    for size in [ByteSize::kib(64), ByteSize::mib(16)] {
        let source = HostBuffer::new(machine, size, HostMemory::PageLocked)?;
        let mut target = DeviceBuffer::new(&device, size)?;
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, timeout)?;
        group.throughput(Throughput::BytesDecimal(size.bytes()));
        group.bench_function(size.to_string(), |bencher| {
            bencher.iter(|| {
                copy.issue().and_then(|()| copy.wait()).expect("it was prepared for this");
            });
        });
    }
    group.finish();
    Ok(())
}

fn bind(c: &mut Criterion, machine: &Machine) -> Result<()> {
    let cpu = machine.census()?.bindable()[0];
    let mut guard = PinGuard::bind(cpu, BindScope::Thread)?;
    c.bench_function("bind to the same CPU, verified", |bencher| {
        bencher.iter(|| guard.move_to(black_box(cpu)).expect("it could be bound before"));
    });
    Ok(())
}

fn synthetic(cpus: u32, devices: u32) -> Result<Machine> {
    let text = format!("[machine]\ncpus = {cpus}\ndevices = {devices}\n");
    Ok(Machine::synthetic(Scenario::parse(&text, "bench")?)?)
}

/// A whole sweep of 64 CPUs × 4 devices in virtual time: schedule, warm-up rule, estimates.
fn synthetic_sweep(c: &mut Criterion) -> Result<()> {
    let machine = synthetic(64, 4)?;
    let plan = H2dPlan::builder().sizes([ByteSize::mib(16)]).build(&machine)?;
    c.bench_function("synthetic: sweep of 64 × 4, 3 blocks", |bencher| {
        bencher
            .iter(|| sweep::h2d(&machine, &plan, &mut ()).expect("nothing fails in virtual time"));
    });
    Ok(())
}

/// Reading a log of 640 × 16 cells and 3 sizes: 30,720 points, as probes and sentinels come with
/// blocks only.
fn report(c: &mut Criterion) -> Result<()> {
    let machine = synthetic(640, 16)?;
    let plan = H2dPlan::builder().repeats(1).order(Order::Sequential).build(&machine)?;
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("run");
    let report = record_h2d("bench", &machine, &plan, &path, &RecordOptions::default(), &mut ())?;
    let name = format!("report: read {} points", report.manifest.points.measured);
    c.bench_function(&name, |bencher| {
        bencher.iter(|| Report::read(&path).expect("it was written just now"));
    });
    Ok(())
}

fn picture(c: &mut Criterion) {
    let axis =
        |name| Axis::new(name, (0..640).collect(), (0..640).map(|id| Some(id / 80)).collect());
    let sizes = vec![ByteSize::mib(8)];
    let mut matrix =
        Matrix::new(Sweep::CorePair, "idle", sizes, axis("rank-0 cpu"), axis("rank-1 cpu"));
    for (index, cell) in (0_u32..).zip(matrix.gbps.iter_mut()) {
        *cell = 13.0 + f64::from(index % 97) / 97.0;
    }
    c.bench_function("png: render 640 × 640", |bencher| {
        bencher.iter(|| render(&matrix.slice(0), &Style::default()).expect("an encoder in memory"));
    });
}

fn main() -> Result<()> {
    let mut criterion = Criterion::default().configure_from_args();
    let machine = Machine::host()?;
    point(&mut criterion, &machine)?;
    copies(&machine)?;
    bind(&mut criterion, &machine)?;
    synthetic_sweep(&mut criterion)?;
    report(&mut criterion)?;
    picture(&mut criterion);
    criterion.final_summary();
    Ok(())
}
