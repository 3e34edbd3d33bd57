//! Sweeps of a plan in JSON, timed from the machine to the matrix: what a program in another language
//! asks for, without that language. Without arguments once; with a plan once per line of its input, so
//! that somebody else's sweeps can take turns with it.
//!
//! `cargo run --release -p cluster-health-examples --example plan_from_json`
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::io::BufRead as _;
use std::time::Instant;

use cluster_health_core::Machine;
use cluster_health_matrix::plan::{PlanRequest, SweepPlan};
use cluster_health_matrix::{Error, Result, sweep};

const PLAN: &str = r#"{"sweep": "h2d", "sizes": ["64KiB", "1MiB"], "repeats": 2}"#;

fn nanoseconds(plan: &str) -> Result<u128> {
    let began = Instant::now();
    let request = PlanRequest::from_json(plan)?;
    let machine = Machine::host()?;
    let SweepPlan::H2d(plan) = request.build(&machine)? else {
        return Err(Error::invalid("sweep", "only h2d is timed here"));
    };
    let result = sweep::h2d(&machine, &plan, &mut ())?;
    let took = began.elapsed().as_nanos();
    if result.gbps().iter().any(|rate| rate.is_nan()) {
        return Err(Error::output("the matrix", "cells of this machine could not be measured"));
    }
    Ok(took)
}

fn main() -> Result<()> {
    let Some(plan) = std::env::args().nth(1) else {
        println!("{} ns", nanoseconds(PLAN)?);
        return Ok(());
    };
    for line in std::io::stdin().lock().lines() {
        line.map_err(|error| Error::io("reading", "standard input", error))?;
        println!("{}", nanoseconds(&plan)?);
    }
    Ok(())
}
