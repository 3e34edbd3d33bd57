//! Measures this machine: every CPU × every NPU where there are any, else × every NUMA memory node,
//! as an ndarray.
//!
//! `cargo run --release -p cluster-health-examples --example h2d_matrix`
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use cluster_health_core::{ByteSize, Machine};
use cluster_health_matrix::plan::H2dPlan;
use cluster_health_matrix::{Result, sweep};

fn main() -> Result<()> {
    let machine = Machine::detect()?;
    let size = ByteSize::mib(16);
    let plan = H2dPlan::builder().sizes([size]).build(&machine)?;
    let result = sweep::h2d(&machine, &plan, &mut ())?;
    if let Some(gbps) = result.gbps_at(size) {
        println!("{size}, rows {:?}, columns {:?}, GB/s:\n{gbps:.2}", plan.cpus, plan.devices);
    }
    Ok(())
}
