//! A bench of your own copy or collective by the device's clock: copy this file and `lib.rs`, and put your
//! operation where `issue` stands.
//!
//! `cargo bench -p cluster-health-benches --bench own_copy`; `CLUSTER_HEALTH_BACKEND=ascend` for an
//! accelerator. A framework that has a stream already wraps it with
//! `Stream::from_raw_acl`, and whatever it issues on it between the events is timed.
//!
//! A collective is waited for by all ranks: every rank runs the same benches with a fixed
//! `sample_size` and `iter_custom` with an agreed number of iterations, because criterion chooses its numbers
//! by each rank's own clock.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use std::time::Duration;

use cluster_health_benches::DeviceTime;
use cluster_health_core::{
    ByteSize, DeviceBuffer, HostBuffer, HostMemory, Machine, Result, Stream, Transfer,
};
use criterion::{Criterion, Throughput};

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    let backend = std::env::var("CLUSTER_HEALTH_BACKEND").unwrap_or_else(|_| "host".to_owned());
    let machine = Machine::by_name(&backend)?;
    let device = machine.devices().swap_remove(0);
    let stream = Stream::new(&device)?;
    let time = DeviceTime::new(&stream, TIMEOUT)?;
    let beside = time.beside();
    let resolution = time.resolution_ns();
    let mut criterion = Criterion::default().with_measurement(time).configure_from_args();

    let mut group = criterion.benchmark_group("own copy");
    group.sample_size(10).measurement_time(Duration::from_secs(1));
    for size in [ByteSize::mib(1), ByteSize::mib(16)] {
        let source = HostBuffer::new(&machine, size, HostMemory::PageLocked)?;
        let mut target = DeviceBuffer::new(&device, size)?;
        let mut copy = Transfer::to_device(&stream, &source, &mut target, size, TIMEOUT)?;
        // In the decimal unit that links are sold by.
        group.throughput(Throughput::BytesDecimal(size.bytes()));
        group.bench_function(format!("{size}, waited for"), |bencher| {
            bencher.iter(|| {
                copy.issue().and_then(|()| copy.wait()).expect("the device takes it");
            });
        });
        let times = beside.take();
        println!("{size}: the host's clock says {:.3} of the device's time", times.ratio());
    }
    group.finish();
    if let Some(resolution) = resolution {
        println!("resolution of the device's clock: {resolution:.0} ns");
    }
    criterion.final_summary();
    Ok(())
}
