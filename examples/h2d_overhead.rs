//! What an H2D sweep costs beyond its copies, on this machine's memory.
//!
//! `cargo run --release -p cluster-health-examples --example h2d_overhead`
//!
//! Prints the wall time ÷ the copies for 16, 64 and 256 MiB, recorded into a result folder, and the
//! fixed cost of a point for 64 KiB copies on an unchanged core, where copies leave the caches warm.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use cluster_health_core::{ByteSize, Machine};
use cluster_health_matrix::plan::{CheckPolicy, H2dPlan, H2dPlanBuilder};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::samples::Sample;
use cluster_health_matrix::session::{RecordOptions, record_h2d};
use cluster_health_matrix::{Observer, Result};

/// Time between points that no part of them accounts for.
#[derive(Default)]
struct Gaps {
    end_of_last: Option<u64>,
    nanoseconds: Vec<u64>,
}

impl Observer for Gaps {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        let Some(start) = sample.t_ns else { return Ok(()) };
        if let Some(end) = self.end_of_last
            && sample.bind_ns == 0
        {
            self.nanoseconds.push(start.saturating_sub(end));
        }
        let own: u64 = sample.iter_ns.iter().chain(&sample.warmup_ns).sum();
        self.end_of_last = Some(start + own + sample.bind_ns + sample.touch_ns);
        Ok(())
    }
}

fn record(builder: H2dPlanBuilder, observer: &mut dyn Observer) -> Result<Report> {
    let machine = Machine::host()?;
    let plan = builder.build(&machine)?;
    let dir = std::env::temp_dir().join(format!("cluster-health-overhead-{}", std::process::id()));
    let report = record_h2d("h2d", &machine, &plan, &dir, &RecordOptions::default(), observer);
    std::fs::remove_dir_all(&dir).ok();
    report
}

#[allow(clippy::cast_precision_loss, reason = "shown with three digits")]
fn ratio(whole: u64, parts: u64) -> f64 {
    whole as f64 / parts as f64
}

fn main() -> Result<()> {
    let sizes = [16, 64, 256].map(ByteSize::mib);
    let plan = H2dPlan::builder().sizes(sizes).warmup(Some(1)).repeats(4);
    let timings = record(plan, &mut ())?.manifest.timings;
    let copies = timings.iterations_ns + timings.warmup_ns;
    println!(
        "16, 64, 256 MiB: wall ÷ (copies + touches + binds) {:.3}, wall ÷ copies {:.3}",
        ratio(timings.wall_ns, copies + timings.touch_ns + timings.bind_ns),
        ratio(timings.wall_ns, copies)
    );
    for size in [ByteSize::kib(64), ByteSize::mib(16)] {
        let mut gaps = Gaps::default();
        let cpu = Machine::host()?.census()?.bindable()[0].0;
        let plan = H2dPlan::builder()
            .cpus([cpu])
            .sizes([size])
            .warmup(Some(1))
            .repeats(2000)
            .check(CheckPolicy::Off);
        record(plan, &mut gaps)?;
        gaps.nanoseconds.sort_unstable();
        println!(
            "{size}: fixed cost of a point beyond bind, touch and copies: median {} ns over {} points",
            gaps.nanoseconds[gaps.nanoseconds.len() / 2],
            gaps.nanoseconds.len()
        );
    }
    Ok(())
}
