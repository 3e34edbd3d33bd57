//! What a measured node would take for a training step's copies and an all-gather: a small cost
//! model on top of `calibration.json`'s numbers.
//!
//! `cargo run --release -p cluster-health-examples --example cost_model [DIR]`
//!
//! DIR is a result folder with both sweeps; without it a small simulated machine is measured first.
//!
//! Two models, both lower bounds that leave out computing and everything that shares the path:
//!
//! * **Copies of a step.** A device needs `bytes` from the host per step in `copies` transfers:
//!   copies·α + bytes/β, with α and β of the core class that is fastest for this device.
//! * **All-gather over p ranks**, N bytes per rank, n = p·N bytes at the end (Hockney's model as
//!   HCCL documents it for its algorithms, b = 1/β the time per byte of one link):
//!
//! | algorithm | time |
//! |---|---|
//! | mesh | α + n·b/p: every rank sends to all others at once, over p − 1 links |
//! | ring | (p − 1)·α + (p − 1)/p·n·b |
//! | NHR | ⌈log2 p⌉·α + (p − 1)/p·n·b |
//!
//! For two ranks all three are α + N·b: just what the pair sweep measures, so its α and β (S = N
//! bytes per rank) are those of a link. That other links of the node are alike is an assumption;
//! links between nodes are not measured at all.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::path::{Path, PathBuf};

use cluster_health_core::{ByteSize, Machine, Scenario};
use cluster_health_matrix::Result;
use cluster_health_matrix::calibrate::{AlphaBeta, Calibration};
use cluster_health_matrix::plan::{CorePairPlan, H2dPlan};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::run::PlanRecord;
use cluster_health_matrix::session::{RecordOptions, record};

const SCENARIO: &str = "\
[machine]
cpus = 16
smt = 2
numa_nodes = 2
devices = 4
[h2d]
gbps = 58.5
latency_us = 12
noise = 0.005
[all_gather]
gbps = 46
latency_us = 20
noise = 0.005
";

/// A fixed cost in microseconds and a rate in GB/s.
#[derive(Debug, Clone, Copy)]
struct Cost {
    alpha_us: f64,
    beta_gbps: f64,
}

impl Cost {
    /// Without an identified fixed cost it is left out, which keeps the bound a lower one.
    fn of(fit: &AlphaBeta) -> Option<Self> {
        let alpha_us = if fit.alpha_identified { fit.alpha_us.max(0.0) } else { 0.0 };
        fit.beta_gbps.is_finite().then_some(Self { alpha_us, beta_gbps: fit.beta_gbps })
    }

    /// Microseconds for `steps` fixed costs and so many bytes.
    fn time_us(self, steps: f64, bytes: f64) -> f64 {
        // 1 GB/s is 1000 bytes per microsecond.
        steps * self.alpha_us + bytes / (1e3 * self.beta_gbps)
    }
}

/// Lower bound of a step's copies to one device, microseconds.
fn step_us(cost: Cost, bytes: f64, copies: f64) -> f64 {
    cost.time_us(copies, bytes)
}

/// All-gather of `bytes` per rank over `ranks` ranks in microseconds: mesh, ring, NHR.
fn all_gather_us(link: Cost, bytes: f64, ranks: u32) -> [f64; 3] {
    let p = f64::from(ranks);
    let total = p * bytes;
    let most = (p - 1.0) / p * total;
    [link.time_us(1.0, total / p), link.time_us(p - 1.0, most), link.time_us(p.log2().ceil(), most)]
}

/// Measures the simulated machine into `dir`.
fn simulated(dir: &Path) -> Result<Report> {
    let machine = Machine::synthetic(Scenario::parse(SCENARIO, "cost_model.rs")?)?;
    let h2d = H2dPlan::builder().sizes([16, 64].map(ByteSize::mib)).build(&machine)?;
    let pairs = CorePairPlan::builder().build(&machine)?;
    let plan = PlanRecord::of_h2d(h2d).with_core_pair(Some(pairs));
    let mut no_ranks =
        || Err(cluster_health_matrix::Error::invalid("ranks", "a simulated machine needs none"));
    let options = RecordOptions::default();
    record("all", &machine, &plan, &mut no_ranks, Vec::new(), dir, &options, &mut ())
}

fn main() -> Result<()> {
    let report = match std::env::args_os().nth(1) {
        Some(dir) => Report::read(&PathBuf::from(dir))?,
        None => {
            let name = format!("cluster-health-cost-model-{}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            let report = simulated(&dir);
            std::fs::remove_dir_all(&dir).ok();
            println!("a simulated machine; give a result folder for numbers that were measured");
            report?
        }
    };
    let calibration = Calibration::of(&report);

    let mut devices: Vec<u32> =
        calibration.h2d_alpha_beta.iter().map(|copies| copies.device).collect();
    devices.sort_unstable();
    devices.dedup();
    println!("copies of a step, 256 MiB in 32 transfers, from the fastest NUMA node:");
    for device in devices {
        let best = calibration
            .h2d_alpha_beta
            .iter()
            .filter(|copies| copies.device == device)
            .filter_map(|copies| {
                let time = step_us(Cost::of(&copies.fit)?, f64::from(256_u32 << 20), 32.0);
                Some((time, copies))
            })
            .min_by(|left, right| left.0.total_cmp(&right.0));
        if let Some((time, copies)) = best {
            let node = copies.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
            println!("  device {device}: at least {:.3} ms, node {node}", time / 1e3);
        }
    }

    // The usual kind of pair: other than SMT siblings or one CPU for both ranks.
    let apart = ["other_node", "same_node"];
    let link = apart.iter().find_map(|kind| {
        let mut costs = calibration.pair_alpha_beta.iter();
        costs.find(|pair| pair.pair_class == *kind).and_then(|pair| Cost::of(&pair.fit))
    });
    let Some(link) = link else {
        println!("no all-gather: the run has no pairs of at least two sizes");
        return Ok(());
    };
    println!(
        "all-gather of 8 MiB per rank, alpha {:.2} us, beta {:.2} GB/s per link:",
        link.alpha_us, link.beta_gbps
    );
    println!("  {:>5} {:>12} {:>12} {:>12}", "ranks", "mesh us", "ring us", "NHR us");
    for ranks in [2, 4, 8, 16] {
        let [mesh, ring, nhr] = all_gather_us(link, f64::from(8_u32 << 20), ranks);
        println!("  {ranks:>5} {mesh:>12.1} {ring:>12.1} {nhr:>12.1}");
    }
    Ok(())
}
