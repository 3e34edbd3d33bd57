//! `preflight`: is this node fit to start a job on?

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args};
use cluster_health_core::parse_duration;
use cluster_health_matrix::preflight::{Baseline, Gate, Preflight};
use cluster_health_matrix::report::ReportOptions;
use cluster_health_matrix::run::OpenMode;
use cluster_health_matrix::session::RecordOptions;
use cluster_health_matrix::{CancelToken, Result};

use crate::args::{BackendArg, Output, RanksArg, named, parse_list, parse_ratio, parse_sizes};
use crate::commands::{Done, Membership, stop_on_signals};
use crate::progress::Terminal;
use crate::{guard, print_json, print_text};

#[derive(Debug, Args)]
pub(crate) struct PreflightArgs {
    #[command(flatten)]
    backend: BackendArg,
    /// A known-good run of the same kind of machine: its calibration.json, or its result folder.
    /// Without one the node is held against itself, which cannot see what all its parts have in common.
    #[arg(long, env = "CLUSTER_HEALTH_BASELINE", value_name = "FILE|DIR")]
    baseline: Option<PathBuf>,
    /// Most machine time by plan, touching host memory included: 5s, 2m.
    #[arg(long, env = "CLUSTER_HEALTH_BUDGET", default_value = "10s", value_name = "D")]
    budget: String,
    /// Smallest slowdown against the baseline that counts.
    #[arg(long, env = "CLUSTER_HEALTH_MIN_CHANGE", default_value = "5%", value_name = "P")]
    min_change: String,
    /// Smallest difference within the node that counts as a fault.
    #[arg(long, env = "CLUSTER_HEALTH_MIN_EFFECT", default_value = "3%", value_name = "P")]
    min_effect: String,
    /// CPUs: auto (all bindable ones) or a list such as 0-3,8.
    #[arg(long, env = "CLUSTER_HEALTH_CPUS", default_value = "auto", value_name = "LIST")]
    cpus: String,
    /// Devices by physical id: auto or a list such as 5,0.
    #[arg(long, env = "CLUSTER_HEALTH_DEVICES", default_value = "auto", value_name = "LIST")]
    devices: String,
    /// Bytes per copy. Default: those of the baseline up to 64MiB, else its smallest; without a
    /// baseline 16MiB,64MiB.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES", value_name = "LIST")]
    sizes: Option<String>,
    /// Seed of all orders.
    #[arg(long, env = "CLUSTER_HEALTH_SEED", default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Bound of every wait for a device or, beyond the budget, for a rank: 500ms, 30s, 2m.
    #[arg(long, env = "CLUSTER_HEALTH_TIMEOUT", default_value = "30s", value_name = "D")]
    timeout: String,
    /// Where ranks come from: env = a launcher (torchrun, mpirun, srun) started this process as one
    /// of them; local = this process is alone. Default: env inside a launcher, else local.
    #[arg(long, env = "CLUSTER_HEALTH_RANKS", value_enum)]
    ranks: Option<RanksArg>,
    /// Keep the run in this result folder; must be absent or empty unless --force is given.
    #[arg(long, env = "CLUSTER_HEALTH_OUT", value_name = "DIR")]
    out: Option<PathBuf>,
    /// Replace the results that are in the folder.
    #[arg(long, env = "CLUSTER_HEALTH_FORCE", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    force: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl PreflightArgs {
    fn timeout(&self) -> Result<Duration> {
        named("--timeout", parse_duration(&self.timeout))
    }

    fn preflight(&self) -> Result<Preflight> {
        let mut preflight = Preflight::new()
            .budget(named("--budget", parse_duration(&self.budget))?)
            .min_change(parse_ratio("--min-change", &self.min_change)?)
            .min_effect(parse_ratio("--min-effect", &self.min_effect)?)
            .seed(self.seed)
            .timeout(self.timeout()?);
        if let Some(cpus) = parse_list("--cpus", &self.cpus)? {
            preflight = preflight.cpus(cpus);
        }
        if let Some(devices) = parse_list("--devices", &self.devices)? {
            preflight = preflight.devices(devices);
        }
        if let Some(sizes) = &self.sizes {
            preflight = preflight.sizes(parse_sizes(sizes)?);
        }
        if let Some(out) = &self.out {
            let mode = if self.force { OpenMode::Force } else { OpenMode::New };
            preflight = preflight.out(out, RecordOptions::default().with_mode(mode));
        }
        Ok(preflight)
    }
}

/// Measures, or waits for the rank that does; all ranks end the same way.
pub(crate) fn preflight(args: &PreflightArgs) -> Result<Done> {
    let watchdog = guard::watch(&args.backend, args.timeout()?, args.output.json)?;
    let preflight = args.preflight()?;
    let membership = Membership::find(args.ranks, args.timeout()?)?;
    // From here on the other ranks see it when this one fails.
    let baseline = match &args.baseline {
        Some(path) => Baseline::read(path)?,
        None => Baseline::itself(),
    };
    let machine = args.backend.machine()?;
    if let Some(watchdog) = &watchdog {
        watchdog.keep_off(preflight.plan(&machine, &baseline)?.cpus);
    }
    let cancel = CancelToken::new();
    stop_on_signals(&cancel)?;
    let (mut group, rank) = match membership {
        Membership::Rank(group) => {
            let rank = group.rank();
            (Some(group), rank)
        }
        Membership::Alone { .. } => (None, 0),
    };
    // Of several ranks it is not known yet which one writes.
    if let (Some(out), None) = (&args.out, &group) {
        guard::records(out, Some(ReportOptions::default()));
    }
    let mut terminal = Terminal::new(args.output.quiet || rank > 0, cancel);
    let outcome = preflight.run(&machine, &baseline, group.as_mut(), &mut terminal);
    terminal.finish();
    let outcome = outcome?;
    if rank > 0 {
        if !args.output.quiet {
            log!("rank {rank}: preflight: {}", outcome.verdict);
        }
    } else if args.output.json {
        print_json(&serde_json::to_value(&outcome).unwrap_or_default());
    } else {
        print_text(&outcome.to_string());
    }
    Ok(if outcome.verdict == Gate::Pass { Done::Clean } else { Done::Wanting })
}
