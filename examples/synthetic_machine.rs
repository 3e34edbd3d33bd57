//! Plans and measures a machine that exists only as a scenario: what would a sweep of a 640-CPU
//! node cost, what would it find, and do the planted faults show?
//!
//! `cargo run --release -p cluster-health-examples --example synthetic_machine`
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use cluster_health_core::{Bandwidth, ByteSize, Machine, Scenario};
use cluster_health_matrix::plan::H2dPlan;
use cluster_health_matrix::stats::median;
use cluster_health_matrix::{Result, sweep};

fn main() -> Result<()> {
    let scenario = Scenario::parse(include_str!("scenarios/a3.toml"), "a3.toml")?;
    let link = Bandwidth::gb_per_second(scenario.h2d.gbps);
    let machine = Machine::synthetic(scenario)?;
    let plan = H2dPlan::builder().sizes([16, 64].map(ByteSize::mib)).build(&machine)?;

    let (cost, effects) = (plan.cost(&machine, link), plan.detectable(&machine));
    println!("planned: {} points, {:.0} s from first bind", cost.points, cost.seconds);
    println!(
        "detectable: a device {:.2} %, a core {:.2} % slower",
        100.0 * effects.device,
        100.0 * effects.core
    );

    let result = sweep::h2d(&machine, &plan, &mut ())?;
    #[allow(clippy::cast_precision_loss, reason = "shown without digits")]
    let seconds = result.end.timings.wall_ns as f64 / 1e9;
    println!("measured: {} points, {seconds:.0} s of virtual time", result.end.points);
    if let Some(gbps) = result.gbps_at(ByteSize::mib(64)) {
        println!("device  median GB/s of 64 MiB copies, simulated");
        for (device, column) in plan.devices.iter().zip(gbps.columns()) {
            println!("{device:>6}  {:.2}", median(&mut column.to_vec()));
        }
    }
    Ok(())
}
