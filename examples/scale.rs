//! What a cell costs from small matrices to large ones: gathering, the matrix, picture and numbers.
//!
//! `cargo run --release -p cluster-health-examples --example scale -- 100 640 2048 4096`
//!
//! The arguments are sides of square matrices of pairs, 100 and 640 without any. Nothing is measured
//! but the library itself.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::io::Write;
use std::time::Instant;

use cluster_health_core::{ByteSize, CpuId};
use cluster_health_matrix::estimate::Estimates;
use cluster_health_matrix::matrix::{Axis, Slice};
use cluster_health_matrix::output::png::{Style, render};
use cluster_health_matrix::output::{csv, npy};
use cluster_health_matrix::samples::{Sample, Sweep};
use cluster_health_matrix::{Error, Result};

const SIZE: ByteSize = ByteSize::mib(8);

/// Takes bytes like a file that costs nothing. (`std::io::sink` would not even have them formatted.)
struct Counted(usize);

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Resident memory at its highest so far, MiB.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    kib.unwrap_or(0_u64) / 1024
}

/// Nanoseconds per cell of what is done with a matrix of `side` × `side` cells: gathering, the matrix,
/// the picture, csv and npy.
fn costs(side: u32) -> Result<[f64; 4]> {
    let axis =
        |name| Axis::new(name, (0..side).collect(), (0..side).map(|id| Some(id / 64)).collect());
    let (rows, columns) = (axis("rank-0 cpu"), axis("rank-1 cpu"));
    let mut estimates = Estimates::new(Sweep::CorePair, "idle", vec![SIZE], rows, columns);
    let mut sample = Sample::new(0, Sweep::CorePair, SIZE);
    sample.iter_ns = vec![0; 3];
    let cells = f64::from(side) * f64::from(side);
    let start = Instant::now();
    let lap = || start.elapsed().as_secs_f64() * 1e9 / cells;
    let mut laps = [0.0; 4];
    for rank0 in 0..side {
        for rank1 in 0..side {
            (sample.rank0_cpu, sample.rank1_cpu) = (Some(CpuId(rank0)), Some(CpuId(rank1)));
            let noise = u64::from((rank0 * 7919 + rank1 * 104_729) % 2003);
            sample.iter_ns.fill(200_000 + noise);
            estimates.add(&sample);
        }
    }
    laps[0] = lap();
    let matrix = estimates.into_matrix();
    laps[1] = lap();
    let slice: Slice<'_> = matrix.slice(0);
    let picture = render(&slice, &Style::default()).map(drop);
    laps[2] = lap();
    let mut sink = Counted(0);
    let written = csv::write(&slice, &mut sink).and_then(|()| npy::write(&slice, &mut sink));
    laps[3] = lap();
    picture.and(written).map_err(|error| Error::output("memory", error.to_string()))?;
    Ok([laps[0], laps[1] - laps[0], laps[2] - laps[1], laps[3] - laps[2]])
}

fn main() -> Result<()> {
    let mut sides: Vec<u32> =
        std::env::args().skip(1).filter_map(|side| side.parse().ok()).collect();
    if sides.is_empty() {
        sides = vec![100, 640];
    }
    println!(
        "{:>11} {:>9} {:>9} {:>9} {:>9}   ns per cell; MiB resident at most",
        "cells", "gather", "matrix", "picture", "csv, npy"
    );
    for side in sides {
        let [gather, matrix, picture, numbers] = costs(side)?;
        println!(
            "{:>11} {gather:>9.1} {matrix:>9.1} {picture:>9.1} {numbers:>9.1}   {}",
            u64::from(side) * u64::from(side),
            peak_mib()
        );
    }
    Ok(())
}
