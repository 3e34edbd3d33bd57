//! `validate`, `sizes` and `policies`: options, and what the commands do.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{Bandwidth, ByteSize, Machine, Watchdog};
use cluster_health_matrix::policies::{self, PoliciesPlan, PolicyStatus, PolicySweep};
use cluster_health_matrix::run::OpenMode;
use cluster_health_matrix::session::StartRanks;
use cluster_health_matrix::sizes::{self, Series, SizeSweep, SizesPlan};
use cluster_health_matrix::validate::{self, LineStatus, Table, ValidatePlan};
use cluster_health_matrix::{CancelToken, Error, Result};
use serde_json::json;

use crate::args::{
    BackendArg, FolderArgs, ImportArgs, RanksArg, named, parse_list, parse_pair, parse_sizes,
};
use crate::commands::{Done, Membership, stop_on_signals};
use crate::progress::Terminal;
use crate::{guard, print_json, print_text};

/// How to measure with few ranks.
#[derive(Debug, Clone, Args)]
pub(crate) struct FewArgs {
    #[command(flatten)]
    pub(crate) backend: BackendArg,
    /// Where the ranks come from: env = a launcher (torchrun, mpirun, srun) started this process as
    /// one of them; local = this process starts the others. Default: env inside a launcher, else
    /// local.
    #[arg(long, env = "CLUSTER_HEALTH_RANKS", value_enum)]
    pub(crate) ranks: Option<RanksArg>,
    /// Devices by physical id: auto or a list such as 5,0; its order is kept.
    #[arg(long, env = "CLUSTER_HEALTH_DEVICES", default_value = "auto", value_name = "LIST")]
    pub(crate) devices: String,
    /// Timed iterations per visit.
    #[arg(long, env = "CLUSTER_HEALTH_ITERS", default_value_t = 3, value_name = "N")]
    pub(crate) iters: u32,
    /// Exactly N discarded iterations before the timed ones. Without it warm-up runs until settled,
    /// at most 32 or 100 ms.
    #[arg(long, env = "CLUSTER_HEALTH_WARMUP", value_name = "N")]
    pub(crate) warmup: Option<u32>,
    /// Visits of everything, each time in a fresh order.
    #[arg(long, env = "CLUSTER_HEALTH_REPEATS", default_value_t = 3, value_name = "N")]
    pub(crate) repeats: u32,
    /// Seed of all orders.
    #[arg(long, env = "CLUSTER_HEALTH_SEED", default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,
    /// Load profile. This command measures the idle machine only.
    #[arg(long, env = "CLUSTER_HEALTH_LOAD", default_value = "idle", value_name = "NAME")]
    load: String,
    /// Bound of every wait: 500ms, 30s, 2m.
    #[arg(long, env = "CLUSTER_HEALTH_TIMEOUT", default_value = "30s", value_name = "D")]
    timeout: String,
}

/// What only commands with a fixed CPU per rank have.
#[derive(Debug, Clone, Args)]
pub(crate) struct FixedArgs {
    /// One CPU for each rank: auto (on the NUMA node of its device) or a list such as 0,80.
    #[arg(long, env = "CLUSTER_HEALTH_CPUS", default_value = "auto", value_name = "LIST")]
    cpus: String,
    /// What the memory of a device can carry, reading and writing together, for example 1600GB/s: a
    /// copy within the device that is faster came from its cache.
    #[arg(long, env = "CLUSTER_HEALTH_EXPECT_HBM", value_name = "RATE")]
    expect_hbm: Option<String>,
}

impl FixedArgs {
    fn expect_hbm(&self) -> Result<Option<Bandwidth>> {
        self.expect_hbm.as_deref().map(|text| named("--expect-hbm", text.parse())).transpose()
    }
}

impl FewArgs {
    pub(crate) fn timeout(&self) -> Result<Duration> {
        named("--timeout", cluster_health_core::parse_duration(&self.timeout))
    }

    pub(crate) fn check_load(&self) -> Result<()> {
        if self.load.trim() == "idle" {
            return Ok(());
        }
        let message = format!("'{}': this command measures the idle machine only", self.load);
        Err(Error::invalid("--load", message))
    }
}

/// A builder with these options; the builders have no type in common.
macro_rules! with_few {
    ($builder:expr, $few:expr) => {{
        let few: &FewArgs = $few;
        let mut builder = $builder
            .iters(few.iters)
            .warmup(few.warmup)
            .repeats(few.repeats)
            .seed(few.seed)
            .timeout(few.timeout()?);
        if let Some(devices) = parse_list("--devices", &few.devices)? {
            builder = builder.devices(devices);
        }
        builder
    }};
}

/// The same with a fixed CPU per rank.
macro_rules! with_fixed {
    ($builder:expr, $few:expr, $fixed:expr) => {{
        let fixed: &FixedArgs = $fixed;
        let mut builder = with_few!($builder, $few).expect_hbm(fixed.expect_hbm()?);
        if let Some(cpus) = parse_list("--cpus", &fixed.cpus)? {
            builder = builder.cpus(cpus);
        }
        builder
    }};
}

#[derive(Debug, Args)]
pub(crate) struct ValidateArgs {
    #[command(flatten)]
    pub(crate) few: FewArgs,
    #[command(flatten)]
    fixed: FixedArgs,
    /// Bytes of copies, per rank of collectives: 8B, 4KiB, 16MiB, 1GiB are binary, 4KB, 16MB
    /// decimal, bare numbers bytes. Default: 1MiB,16MiB,256MiB as far as they fit into memory.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES", value_name = "LIST")]
    sizes: Option<String>,
    /// Orders n of the n × n matrices that a CPU multiplies. Default: 256,1024.
    #[arg(long, env = "CLUSTER_HEALTH_MATMUL_SIZES", value_name = "LIST")]
    matmul_sizes: Option<String>,
    /// Orders of the matrices that an accelerator multiplies. Default: 1024,8192.
    #[arg(long, env = "CLUSTER_HEALTH_DEVICE_MATMUL_SIZES", value_name = "LIST")]
    device_matmul_sizes: Option<String>,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

impl ValidateArgs {
    fn plan(&self, machine: &Machine) -> Result<ValidatePlan> {
        let few = &self.few;
        few.check_load()?;
        let mut builder = with_fixed!(ValidatePlan::builder(), few, &self.fixed);
        if let Some(sizes) = &self.sizes {
            builder = builder.sizes(parse_sizes(sizes)?);
        }
        if let Some(orders) = &self.matmul_sizes {
            builder = builder.orders(parse_orders("--matmul-sizes", orders)?);
        }
        if let Some(orders) = &self.device_matmul_sizes {
            builder = builder.device_orders(parse_orders("--device-matmul-sizes", orders)?);
        }
        builder.build(machine)
    }
}

fn parse_orders(option: &str, text: &str) -> Result<Vec<u32>> {
    let number = |(index, part): (usize, &str)| {
        part.trim().parse().map_err(|_| {
            let message = format!("element {}: '{part}' is no number such as 1024", index + 1);
            Error::invalid(option, message)
        })
    };
    text.split(',').enumerate().map(number).collect()
}

fn watch(few: &FewArgs, folder: &FolderArgs) -> Result<Option<Watchdog>> {
    guard::watch(&few.backend, few.timeout()?, folder.output.json)
}

/// Measures with `ranks` ranks as far as they are needed: follows rank 0, or records.
fn measured<T>(
    machine: &Machine,
    few: &FewArgs,
    folder: &FolderArgs,
    ranks: usize,
    follow: impl FnOnce(&RankGroup, &mut CancelToken) -> Result<bool>,
    record: impl FnOnce(Option<StartRanks<'_>>, OpenMode, &mut Terminal) -> Result<T>,
) -> Result<ControlFlow<Done, T>> {
    let mut cancel = CancelToken::new();
    stop_on_signals(&cancel)?;
    let mode = folder.mode()?;
    let mut membership = Membership::find(few.ranks, few.timeout()?)?;
    if let Some(group) = membership.follower() {
        let whole = follow(group, &mut cancel)?;
        return Ok(ControlFlow::Break(if whole { Done::Clean } else { Done::Wanting }));
    }
    let is_launched = matches!(membership, Membership::Rank(_));
    let needed = is_launched || (ranks > 1 && !machine.has_virtual_time());
    let mut start = || membership.lead_of(u32::try_from(ranks).unwrap_or(u32::MAX));
    let mut terminal = Terminal::new(folder.output.quiet, cancel);
    guard::records(&folder.out, None);
    let result = record(if needed { Some(&mut start) } else { None }, mode, &mut terminal);
    terminal.finish();
    result.map(ControlFlow::Continue)
}

fn tell_interrupted(complete: bool) {
    if !complete {
        log!("interrupted: not everything was measured; --resume begins anew");
    }
}

pub(crate) fn validate(args: &ValidateArgs) -> Result<Done> {
    let _watchdog = watch(&args.few, &args.folder)?;
    let machine = args.few.backend.machine()?;
    let plan = args.plan(&machine)?;
    let (out, output) = (&args.folder.out, &args.folder.output);
    let table = measured(
        &machine,
        &args.few,
        &args.folder,
        plan.ranks(),
        |group, cancel| validate::follow(&machine, &plan, group, cancel),
        |ranks, mode, terminal| validate::record(&machine, &plan, ranks, out, mode, terminal),
    )?;
    let table = match table {
        ControlFlow::Continue(table) => table,
        ControlFlow::Break(done) => return Ok(done),
    };
    if table.count(LineStatus::Measured) == 0 {
        let reason = table.lines.iter().find_map(|line| line.reason.clone());
        return Err(Error::output("nothing could be measured", reason.unwrap_or_default()));
    }
    show_table(&table, output.json);
    tell_interrupted(table.complete);
    let whole = table.complete && table.count(LineStatus::Failed) == 0;
    Ok(if whole { Done::Clean } else { Done::Wanting })
}

pub(crate) fn show_table(table: &Table, as_json: bool) {
    if as_json {
        print_json(&serde_json::to_value(table).unwrap_or_else(|_| json!({})));
    } else {
        print_text(&validate::text(table));
    }
}

#[derive(Debug, Args)]
pub(crate) struct SizesArgs {
    #[command(flatten)]
    few: FewArgs,
    #[command(flatten)]
    fixed: FixedArgs,
    /// Smallest size. Default: 8B.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES_FROM", value_name = "S")]
    sizes_from: Option<String>,
    /// Largest size. Default: 1GiB, as far as it fits into memory.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES_TO", value_name = "S")]
    sizes_to: Option<String>,
    /// What sizes grow by. Default: 4.
    #[arg(long, env = "CLUSTER_HEALTH_FACTOR", value_name = "N")]
    factor: Option<u64>,
    /// These sizes instead: 8B, 4KiB, 16MiB, 1GiB are binary, 4KB, 16MB decimal, bare numbers bytes.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES", value_name = "LIST")]
    sizes: Option<String>,
    /// Devices of the two ranks of the all-gather, such as 5,0. Default: the first two, a single one
    /// twice where the backend allows that.
    #[arg(long, env = "CLUSTER_HEALTH_DEVICE_PAIR", value_name = "A,B")]
    device_pair: Option<String>,
    /// CPUs of the two ranks: auto (on the NUMA nodes of their devices) or two such as 0,80.
    #[arg(long, env = "CLUSTER_HEALTH_PAIR_CPUS", default_value = "auto", value_name = "LIST")]
    pair_cpus: String,
    /// Measure nothing: one table and one picture of these runs' size sweeps, into --out.
    #[arg(long, env = "CLUSTER_HEALTH_COMPARE", num_args = 1.., value_name = "DIR")]
    compare: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

impl SizesArgs {
    fn sizes(&self) -> Result<Option<Vec<ByteSize>>> {
        let (from, to) = (&self.sizes_from, &self.sizes_to);
        let range = from.is_some() || to.is_some() || self.factor.is_some();
        match (&self.sizes, range) {
            (Some(_), true) => {
                let message = "is a list of its own: leave out --sizes-from, --sizes-to, --factor";
                Err(Error::invalid("--sizes", message))
            }
            (Some(list), false) => parse_sizes(list).map(Some),
            (None, false) => Ok(None),
            (None, true) => {
                let size = |option, text: &Option<String>, default| match text {
                    Some(text) => named(option, text.parse()),
                    None => Ok(default),
                };
                let from = size("--sizes-from", from, sizes::DEFAULT_FROM)?;
                let to = size("--sizes-to", to, sizes::DEFAULT_TO)?;
                sizes::progression(from, to, self.factor.unwrap_or(sizes::DEFAULT_FACTOR)).map(Some)
            }
        }
    }

    fn plan(&self, machine: &Machine) -> Result<SizesPlan> {
        let few = &self.few;
        few.check_load()?;
        let mut builder = with_fixed!(SizesPlan::builder(), few, &self.fixed);
        if let Some(pair) = &self.device_pair {
            builder = builder.pair(parse_pair(pair)?);
        }
        if let Some(cpus) = parse_list("--pair-cpus", &self.pair_cpus)? {
            builder = builder.pair_cpus(cpus);
        }
        if let Some(sizes) = self.sizes()? {
            builder = builder.sizes(sizes);
        }
        builder.build(machine)
    }
}

pub(crate) fn sizes(args: &SizesArgs) -> Result<Done> {
    if !args.compare.is_empty() {
        let files = sizes::compare(&args.compare, &args.folder.out)?;
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        if args.folder.output.json {
            print_json(&json!({"schema_version": 1, "files": files}));
        } else {
            print_text(&(files.join("\n") + "\n"));
        }
        return Ok(Done::Clean);
    }
    let _watchdog = watch(&args.few, &args.folder)?;
    let machine = args.few.backend.machine()?;
    let plan = args.plan(&machine)?;
    let (out, output) = (&args.folder.out, &args.folder.output);
    let sweep = measured(
        &machine,
        &args.few,
        &args.folder,
        if plan.pair.is_some() { 2 } else { 1 },
        |group, cancel| sizes::follow(&machine, &plan, group, cancel),
        |ranks, mode, terminal| sizes::record(&machine, &plan, ranks, out, mode, terminal),
    )?;
    let sweep = match sweep {
        ControlFlow::Continue(sweep) => sweep,
        ControlFlow::Break(done) => return Ok(done),
    };
    if sweep.measured() == 0 {
        let reasons = sweep.series.iter().find_map(|series| {
            let of_visits = series.visits.iter().find_map(|visit| visit.reason.clone());
            series.reason.clone().or(of_visits)
        });
        return Err(Error::output("nothing could be measured", reasons.unwrap_or_default()));
    }
    show_sizes(&sweep, output.json);
    tell_interrupted(sweep.complete);
    let whole = sweep.complete && !sweep.series.iter().any(Series::has_failures);
    Ok(if whole { Done::Clean } else { Done::Wanting })
}

pub(crate) fn show_sizes(sweep: &SizeSweep, as_json: bool) {
    if as_json {
        print_json(&serde_json::to_value(sweep).unwrap_or_else(|_| json!({})));
    } else {
        print_text(&sizes::text(sweep));
    }
}

#[derive(Debug, Args)]
pub(crate) struct PoliciesArgs {
    #[command(flatten)]
    few: FewArgs,
    /// Where the ranks' threads may run: `none` (unbound), `all` (every usable CPU), `local_rank` (the
    /// rank's share of them), `numa:N` (node N's), `numa:N:shard` (the rank's share of node N's),
    /// `cpu:LIST` (these, such as cpu:0-3,8). Default: the first three, `numa:N` of every node, and with
    /// several ranks `numa:N:shard`.
    #[arg(long, env = "CLUSTER_HEALTH_POLICIES", value_name = "LIST")]
    policies: Option<String>,
    /// Host memory of copies: `bound` (on the policy's node, or the device's where the policy has
    /// several), `first-touch` (touched by the thread under the policy).
    #[arg(
        long,
        env = "CLUSTER_HEALTH_MEMORY",
        default_value = "bound,first-touch",
        value_name = "LIST"
    )]
    memory: String,
    /// What is measured: `h2d`, `d2d` (within the device), `all_gather`.
    #[arg(
        long,
        env = "CLUSTER_HEALTH_OPERATIONS",
        default_value = "h2d,d2d,all_gather",
        value_name = "LIST"
    )]
    operations: String,
    /// Bytes of copies, per rank of all-gathers: 8B, 4KiB, 16MiB, 1GiB are binary, 4KB, 16MB decimal,
    /// bare numbers bytes. Default: 64KiB,16MiB.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES", value_name = "LIST")]
    sizes: Option<String>,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

impl PoliciesArgs {
    fn plan(&self, machine: &Machine) -> Result<PoliciesPlan> {
        let few = &self.few;
        few.check_load()?;
        let mut builder = with_few!(PoliciesPlan::builder(), few)
            .memory(policies::parse_memory("--memory", &self.memory)?)
            .operations(policies::parse_operations("--operations", &self.operations)?);
        if let Some(list) = &self.policies {
            builder = builder.policies(policies::parse_policies("--policies", list)?);
        }
        if let Some(sizes) = &self.sizes {
            builder = builder.sizes(parse_sizes(sizes)?);
        }
        builder.build(machine)
    }
}

pub(crate) fn policies(args: &PoliciesArgs) -> Result<Done> {
    let _watchdog = watch(&args.few, &args.folder)?;
    let machine = args.few.backend.machine()?;
    let plan = args.plan(&machine)?;
    let (out, output) = (&args.folder.out, &args.folder.output);
    let sweep = measured(
        &machine,
        &args.few,
        &args.folder,
        plan.ranks(),
        |group, cancel| policies::follow(&machine, &plan, group, cancel),
        |ranks, mode, terminal| policies::record(&machine, &plan, ranks, out, mode, terminal),
    )?;
    let sweep = match sweep {
        ControlFlow::Continue(sweep) => sweep,
        ControlFlow::Break(done) => return Ok(done),
    };
    if !sweep.lines.iter().any(|line| line.median.is_some()) {
        let reason = sweep.lines.iter().find_map(|line| line.reason.clone());
        return Err(Error::output("nothing could be measured", reason.unwrap_or_default()));
    }
    show_policies(&sweep, output.json);
    tell_interrupted(sweep.complete);
    let bad = [PolicyStatus::Failed, PolicyStatus::Skipped];
    let whole = sweep.complete && bad.into_iter().all(|status| sweep.count(status) == 0);
    Ok(if whole { Done::Clean } else { Done::Wanting })
}

pub(crate) fn show_policies(sweep: &PolicySweep, as_json: bool) {
    if as_json {
        print_json(&serde_json::to_value(sweep).unwrap_or_else(|_| json!({})));
    } else {
        print_text(&policies::text(sweep));
    }
}

pub(crate) fn import_sizes(args: &ImportArgs) -> Result<Done> {
    let [source] = args.sources.as_slice() else {
        return Err(Error::invalid("SRC", "a size sweep is one file"));
    };
    let sweep = sizes::import(source)?;
    let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mode = if args.force { OpenMode::Force } else { OpenMode::New };
    sizes::record_import(&sweep, vec![name], &args.out, mode)?;
    show_sizes(&sweep, args.output.json);
    Ok(Done::Clean)
}
