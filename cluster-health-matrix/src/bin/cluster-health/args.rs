//! Raw options of the command line, and their checked meaning.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use cluster_health_core::affinity::parse_id_list;
use cluster_health_core::{Bandwidth, ByteSize, LoadProfile, Machine, parse_duration};
use cluster_health_matrix::compare::CompareOptions;
use cluster_health_matrix::plan::{
    ArenaPolicy, CheckPolicy, CorePairPlan, Direction, H2dPlan, Order, Sampling,
};
use cluster_health_matrix::report::ReportOptions;
use cluster_health_matrix::run::OpenMode;
use cluster_health_matrix::session::RecordOptions;
use cluster_health_matrix::{Error, Result};

use crate::base::{PoliciesArgs, SizesArgs, ValidateArgs};
use crate::gate::PreflightArgs;

/// Measures the path from CPU cores to accelerators as matrices, says which differences are faults
/// and which are artefacts, and writes JSON, CSV, npy, xlsx, PNG heatmaps and a report.
///
/// Results go to stdout, progress and warnings to stderr. Exit code of sweeps, `all` and
/// `diagnose`: 0 healthy, 1 findings, something undecided, points skipped or failed, or the run was
/// interrupted, 2 a usage error or nothing could be measured. Of other commands: 0 done, 2 error.
#[derive(Debug, Parser)]
#[command(name = "cluster-health", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Everything about this machine: census, H2D matrix, core-pair matrix, diagnosis, report.
    ///
    /// Start here: `cluster-health all --out results`, then open results/report.md,
    /// results/matrices.xlsx and the pictures. A matrix that would take more than about three minutes
    /// is sampled, and a note says so; `h2d` and `core-pair`, or lists of CPUs here, measure as many
    /// cells as you like.
    All(AllArgs),
    /// Which CPUs can really be bound, and why not where they cannot.
    ///
    /// Every present CPU is tried from a thread of its own; the table says online, allowed (by the
    /// cpuset), bindable, NUMA node, package, core, SMT siblings and the reason.
    Affinity(AffinityArgs),
    /// CPU core × device: bandwidth of copies by a thread bound to each core, to the device unless
    /// --direction says otherwise.
    ///
    /// Every core visits every device and size in randomised blocks. Each point binds, warms up
    /// until two transfers agree, times every iteration on its own and checks that the data
    /// arrived.
    H2d(H2dSweepArgs),
    /// Rank-0 core × rank-1 core: bandwidth of an all-gather of two ranks on two fixed devices.
    ///
    /// All pairs of cores are visited in randomised blocks. At each point both ranks bind, warm up
    /// until two all-gathers agree, and time every iteration; the point's time is that of the
    /// slower rank. Rates are per rank: bytes per rank ÷ time.
    CorePair(PairSweepArgs),
    /// The base table, rank by rank: matrix products, copies, collectives.
    ///
    /// A rank is a device with a CPU of its NUMA node. CPU and device TFLOPS, host to device, device
    /// to host, within a device, between devices, all-gather and send/receive of this host's ranks:
    /// each with minimum, median and maximum over the ranks and the spread between repetitions. What
    /// the machine does not have is said, and is no fault.
    Validate(ValidateArgs),
    /// Rate and time over sizes from bytes to GiB: copies of a device, all-gather of a pair.
    ///
    /// One CPU per device and pair. Every block visits everything in a fresh order; points that take
    /// less time than fewer bytes are measured again. Each series is fitted as t = α + S/β. The
    /// picture is sizes.png; --compare draws several runs into one.
    Sizes(SizesArgs),
    /// What binding is worth: copies and all-gathers under one CPU and memory policy after another.
    ///
    /// Unbound, all CPUs, the rank's share, a NUMA node, its share of one, a list of CPUs; host memory
    /// on the policy's node or where the thread touches it first. All combinations come in a fresh order
    /// in every block; a line has the ratio to the unbound thread with its 95 % interval, and says
    /// faster or slower only where that is beyond chance.
    Policies(PoliciesArgs),
    /// Is this node fit to start a job on? Pass, fail or inconclusive within ten seconds.
    ///
    /// Copies to all devices are sampled within --budget and judged, and held against a known-good
    /// run (--baseline). Inside a launcher one rank of each host measures and all ranks end with the
    /// same answer. Exit code: 0 pass, 1 fail or inconclusive, 2 nothing could be measured.
    Preflight(PreflightArgs),
    /// What a sweep would cost: points, bytes, memory, time. Measures nothing.
    Plan(PlanArgs),
    /// What this machine has: a bundle to send along with a report that something does not work.
    ///
    /// Versions, kernel and limits, Ascend libraries with every path tried and every function found
    /// or missing, devices by all their numbers, other processes on them, and the codes of calls
    /// that failed. Opens no device. Values of variables that may be secret are left out; look it
    /// through before you send it. Missing software is no error here.
    Env(EnvArgs),
    /// What a result folder says: faults, artefacts, doubts, and what was not tested.
    ///
    /// Reads samples.jsonl and run.json, measures nothing and changes nothing. Prints the first page
    /// of report.md; its first three lines can be pasted into a ticket.
    Diagnose(DiagnoseArgs),
    /// Every output of a result folder again, from its samples.jsonl.
    Report(ReportArgs),
    /// Two runs of the same plan against each other, or three and more as the map of a pod.
    ///
    /// Before against after, pod against pod: ratios B ÷ A with 95 % intervals, overall and by
    /// device, NUMA node and kind of pair, and the cells that changed. Runs of different plans or
    /// machines are refused with the differences. Exit code: 0 no difference beyond --min-effect,
    /// 1 differences or inconclusive, 2 refused.
    Compare(CompareArgs),
    /// Turns measurements of the older tool (results.json, workbooks) or CSV matrices into a
    /// result folder.
    Import(ImportArgs),
    /// Writes a result folder in the older tool's format (results.json, affinity.json).
    Export(ExportArgs),
}

/// Options that every command has.
#[derive(Debug, Clone, Args)]
pub(crate) struct Output {
    /// Print one JSON document on stdout, errors included.
    #[arg(long, env = "CLUSTER_HEALTH_JSON", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new(), help_heading = "Output")]
    pub(crate) json: bool,
    /// No progress on stderr.
    #[arg(long, env = "CLUSTER_HEALTH_QUIET", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new(), help_heading = "Output")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PaletteArg {
    Default,
    Classic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RanksArg {
    Env,
    Local,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OrderArg {
    Blocks,
    Sequential,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArenaArg {
    Node,
    Core,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CheckArg {
    Tags,
    Full,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DirectionArg {
    H2d,
    D2h,
    Bidirectional,
}

/// Which copies between host and device.
#[derive(Debug, Clone, Args)]
pub(crate) struct CopyArgs {
    /// Which way: to the device, to the host, or one copy each way at once. The rate of both at once
    /// is that of one direction: bytes of one copy ÷ time until both are done.
    #[arg(long, env = "CLUSTER_HEALTH_DIRECTION", value_enum, default_value_t = DirectionArg::H2d)]
    direction: DirectionArg,
    /// While a device is measured all others of --devices copy, too, each from a CPU of --cpus near
    /// to it, as in training. Not with --load, nor on a synthetic machine.
    #[arg(long, env = "CLUSTER_HEALTH_CONCURRENT", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    concurrent: bool,
}

/// Where to measure.
#[derive(Debug, Clone, Args)]
pub(crate) struct BackendArg {
    /// What to measure on: auto, host (one device per NUMA memory node), ascend, or
    /// synthetic:FILE (a simulated machine from a TOML scenario, in virtual time).
    #[arg(long, env = "CLUSTER_HEALTH_BACKEND", default_value = "auto", value_name = "NAME")]
    pub(crate) backend: String,
}

impl BackendArg {
    pub(crate) fn machine(&self) -> Result<Machine> {
        Ok(Machine::by_name(&self.backend)?)
    }
}

/// How to measure, whatever it is.
#[derive(Debug, Clone, Args)]
pub(crate) struct CommonArgs {
    #[command(flatten)]
    pub(crate) backend: BackendArg,
    /// Where the ranks of pairs come from: env = a launcher (torchrun, mpirun, srun) started this
    /// process as one of them; local = this process starts the other one. Default: env inside a
    /// launcher, else local.
    #[arg(long, env = "CLUSTER_HEALTH_RANKS", value_enum)]
    pub(crate) ranks: Option<RanksArg>,
    /// Bytes per copy, per rank in core-pair: 8B, 4KiB, 16MiB, 1GiB are binary, 4KB, 16MB decimal,
    /// bare numbers bytes. Default: 16MiB,64MiB,256MiB as far as they fit into memory, core-pair
    /// 8MiB; `all` uses this list for H2D and 8MiB for pairs.
    #[arg(long, env = "CLUSTER_HEALTH_SIZES", value_name = "LIST")]
    sizes: Option<String>,
    /// Timed iterations per visit; precision is bought with blocks, not with iterations.
    #[arg(long, env = "CLUSTER_HEALTH_ITERS", default_value_t = 3, value_name = "N")]
    iters: u32,
    /// Exactly N discarded transfers before the timed ones. Without it warm-up runs until
    /// settled, at most 32 transfers or 100 ms.
    #[arg(long, env = "CLUSTER_HEALTH_WARMUP", value_name = "N")]
    warmup: Option<u32>,
    /// Blocks: every cell is visited once per block, in a fresh order.
    #[arg(long, env = "CLUSTER_HEALTH_REPEATS", default_value_t = 3, value_name = "N")]
    repeats: u32,
    /// Add blocks until the 95 % interval of a cell's median has this relative half-width, for
    /// example 2%; at most 20 blocks.
    #[arg(long, env = "CLUSTER_HEALTH_CI", value_name = "W")]
    ci: Option<String>,
    /// Measure a part of the cells, chosen as it goes, and predict the others with their error:
    /// the map in seconds. Findings rest on measured cells only.
    #[arg(long, env = "CLUSTER_HEALTH_SAMPLE", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    pub(crate) sample: bool,
    /// Most machine time of a sampled sweep, first bind to last sample: 5s, 2m. Implies --sample.
    /// Default: 30s for copies, 8s for pairs.
    #[arg(long, env = "CLUSTER_HEALTH_BUDGET", value_name = "D")]
    pub(crate) budget: Option<String>,
    /// A sampled sweep may end early, when nine of ten rows and columns are known to ± P (95 %
    /// intervals). Implies --sample.
    #[arg(long, env = "CLUSTER_HEALTH_TARGET", value_name = "P")]
    target: Option<String>,
    /// Smallest difference that counts as a fault: healthy cores and devices differ a little, too.
    #[arg(long, env = "CLUSTER_HEALTH_MIN_EFFECT", default_value = "3%", value_name = "P")]
    min_effect: String,
    /// Order of the points; sequential exists only to reproduce old runs.
    #[arg(long, env = "CLUSTER_HEALTH_ORDER", value_enum, default_value_t = OrderArg::Blocks)]
    order: OrderArg,
    /// Seed of all orders.
    #[arg(long, env = "CLUSTER_HEALTH_SEED", default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Load profiles under which every cell is measured: idle, cpu:N (N threads per rank that
    /// compute and copy on the node of its core; cpu:N:matmul, cpu:N:stream: one of both), device
    /// (work on every measured device). Their order alternates within blocks.
    #[arg(long, env = "CLUSTER_HEALTH_LOAD", default_value = "idle", value_name = "LIST")]
    load: String,
    /// Data check: tag words, every byte, or nothing.
    #[arg(long, env = "CLUSTER_HEALTH_CHECK", value_enum, default_value_t = CheckArg::Tags)]
    check: CheckArg,
    /// Bound of every wait: 500ms, 30s, 2m.
    #[arg(long, env = "CLUSTER_HEALTH_TIMEOUT", default_value = "30s", value_name = "D")]
    timeout: String,
    /// Rate that the link should have, for example 58.5GB/s; above 1.25 × it a point is
    /// implausible.
    #[arg(long, env = "CLUSTER_HEALTH_EXPECT", value_name = "RATE")]
    expect: Option<String>,
}

/// What the H2D sweep measures.
#[derive(Debug, Clone, Args)]
pub(crate) struct H2dArgs {
    /// CPUs: auto (all bindable ones) or a list such as 0-3,8; its order is kept.
    #[arg(long, env = "CLUSTER_HEALTH_CPUS", default_value = "auto", value_name = "LIST")]
    cpus: String,
    /// Devices by physical id: auto or a list such as 5,0; its order is kept.
    #[arg(long, env = "CLUSTER_HEALTH_DEVICES", default_value = "auto", value_name = "LIST")]
    devices: String,
    /// Host memory: two arenas per NUMA node touched once, or a new one at every core visit.
    #[arg(long, env = "CLUSTER_HEALTH_ARENA", value_enum, default_value_t = ArenaArg::Node)]
    arena: ArenaArg,
}

/// What the core-pair sweep measures.
#[derive(Debug, Clone, Args)]
pub(crate) struct PairArgs {
    /// Devices of rank 0 and rank 1 by physical id, such as 5,0; the order is kept. Default: the
    /// first two (of --devices, where there is such a list), a single one twice where the backend
    /// allows that.
    #[arg(long, env = "CLUSTER_HEALTH_DEVICE_PAIR", value_name = "A,B")]
    device_pair: Option<String>,
    /// CPUs of rank 0: auto (all bindable ones, or --cpus where there is such a list) or a list
    /// such as 0-3,8; its order is kept.
    #[arg(long, env = "CLUSTER_HEALTH_RANK0_CPUS", default_value = "auto", value_name = "LIST")]
    rank0_cpus: String,
    /// CPUs of rank 1, as --rank0-cpus.
    #[arg(long, env = "CLUSTER_HEALTH_RANK1_CPUS", default_value = "auto", value_name = "LIST")]
    rank1_cpus: String,
}

/// `value` without its option's name in front: the command line names the option.
pub(crate) fn named<T>(option: &str, result: cluster_health_core::Result<T>) -> Result<T> {
    result.map_err(|error| Error::named(option, error))
}

pub(crate) fn parse_list(option: &str, text: &str) -> Result<Option<Vec<u32>>> {
    if text.trim() == "auto" { Ok(None) } else { Ok(Some(parse_id_list(option, text)?)) }
}

/// `16MiB,64MiB`: an error names the element.
pub(crate) fn parse_sizes(text: &str) -> Result<Vec<ByteSize>> {
    text.split(',')
        .enumerate()
        .map(|(index, part)| {
            let size: ByteSize = named("--sizes", part.parse()).map_err(|error| match error {
                Error::Invalid { option, message } => {
                    Error::invalid(option, format!("element {}: {message}", index + 1))
                }
                other => other,
            })?;
            Ok(size)
        })
        .collect()
}

/// `idle,cpu:2`: an error names the element.
fn parse_loads(text: &str) -> Result<Vec<LoadProfile>> {
    text.split(',')
        .enumerate()
        .map(|(index, part)| {
            named("--load", part.trim().parse()).map_err(|error| match error {
                Error::Invalid { option, message } => {
                    Error::invalid(option, format!("element {}: {message}", index + 1))
                }
                other => other,
            })
        })
        .collect()
}

/// `2%` or `0.02`.
pub(crate) fn parse_ratio(option: &str, text: &str) -> Result<f64> {
    let (number, scale) = match text.trim().strip_suffix('%') {
        Some(number) => (number, 0.01),
        None => (text.trim(), 1.0),
    };
    let value: f64 = number
        .trim()
        .parse()
        .map_err(|_| Error::invalid(option, format!("'{text}' is no number such as 0.02 or 2%")))?;
    Ok(value * scale)
}

fn parse_expect(text: Option<&str>) -> Result<Option<Bandwidth>> {
    text.map(|text| named("--expect", text.parse())).transpose()
}

/// `A,B`; unlike in a list of devices, one may stand there twice.
pub(crate) fn parse_pair(text: &str) -> Result<[u32; 2]> {
    const OPTION: &str = "--device-pair";
    let number = |part: &str| match parse_id_list(OPTION, part)?.as_slice() {
        [id] => Ok(*id),
        _ => Err(Error::invalid(OPTION, format!("'{text}' is no pair of devices such as 0,1"))),
    };
    match text.split_once(',') {
        Some((rank0, rank1)) if !rank1.contains(',') => Ok([number(rank0)?, number(rank1)?]),
        _ => Err(Error::invalid(OPTION, format!("'{text}' is no pair of devices such as 0,1"))),
    }
}

/// Gives the common options to a plan's builder.
macro_rules! with_common {
    ($builder:expr, $common:expr) => {{
        let common: &CommonArgs = $common;
        let ci = common.ci.as_deref().map(|text| parse_ratio("--ci", text)).transpose()?;
        $builder
            .iters(common.iters)
            .warmup(common.warmup)
            .repeats(common.repeats)
            .ci(ci)
            .min_effect(parse_ratio("--min-effect", &common.min_effect)?)
            .loads(parse_loads(&common.load)?)
            .order(match common.order {
                OrderArg::Blocks => Order::Blocks,
                OrderArg::Sequential => Order::Sequential,
            })
            .seed(common.seed)
            .check(match common.check {
                CheckArg::Tags => CheckPolicy::Tags,
                CheckArg::Full => CheckPolicy::Full,
                CheckArg::Off => CheckPolicy::Off,
            })
            .timeout(common.timeout()?)
    }};
}

impl CommonArgs {
    fn sizes(&self) -> Result<Option<Vec<ByteSize>>> {
        self.sizes.as_deref().map(parse_sizes).transpose()
    }

    pub(crate) fn timeout(&self) -> Result<Duration> {
        named("--timeout", parse_duration(&self.timeout))
    }

    fn expect(&self) -> Result<Option<Bandwidth>> {
        parse_expect(self.expect.as_deref())
    }

    /// How a sweep is sampled, if it is; within `usual` unless a budget was given.
    fn sampling(&self, usual: Duration) -> Result<Option<Sampling>> {
        if !self.sample && self.budget.is_none() && self.target.is_none() {
            return Ok(None);
        }
        let budget = self.budget.as_deref().map(|text| named("--budget", parse_duration(text)));
        let target = self.target.as_deref().map(|text| parse_ratio("--target", text));
        let sampling = Sampling::within(budget.transpose()?.unwrap_or(usual));
        Ok(Some(sampling.with_target(target.transpose()?)))
    }
}

impl H2dArgs {
    /// True when the CPUs were named: then all of them are measured.
    pub(crate) fn names_cpus(&self) -> bool {
        self.cpus.trim() != "auto"
    }

    /// Copies to one device at a time, unless `copies` says otherwise.
    pub(crate) fn plan(
        &self,
        common: &CommonArgs,
        copies: Option<&CopyArgs>,
        machine: &Machine,
    ) -> Result<H2dPlan> {
        let mut builder = with_common!(H2dPlan::builder(), common)
            .expect(common.expect()?)
            .sample(common.sampling(Sampling::COPIES)?)
            .arena(match self.arena {
                ArenaArg::Node => ArenaPolicy::Node,
                ArenaArg::Core => ArenaPolicy::Core,
            });
        if let Some(copies) = copies {
            builder = builder.concurrent(copies.concurrent).direction(match copies.direction {
                DirectionArg::H2d => Direction::H2d,
                DirectionArg::D2h => Direction::D2h,
                DirectionArg::Bidirectional => Direction::Bidirectional,
            });
        }
        if let Some(cpus) = parse_list("--cpus", &self.cpus)? {
            builder = builder.cpus(cpus);
        }
        if let Some(devices) = parse_list("--devices", &self.devices)? {
            builder = builder.devices(devices);
        }
        if let Some(sizes) = common.sizes()? {
            builder = builder.sizes(sizes);
        }
        builder.build(machine)
    }
}

impl PairArgs {
    /// True when the CPUs of a rank were named: then all of them are measured.
    pub(crate) fn names_cpus(&self) -> bool {
        [&self.rank0_cpus, &self.rank1_cpus].iter().any(|text| text.trim() != "auto")
    }

    /// The plan of the core-pair sweep. CPUs and devices of `h2d` are the default. `is_second` is
    /// true in a run whose --sizes and --expect are those of its H2D sweep.
    pub(crate) fn plan(
        &self,
        common: &CommonArgs,
        h2d: Option<&H2dArgs>,
        is_second: bool,
        machine: &Machine,
    ) -> Result<CorePairPlan> {
        let mut builder =
            with_common!(CorePairPlan::builder(), common).sample(common.sampling(Sampling::PAIRS)?);
        if !is_second {
            builder = builder.expect(common.expect()?);
            if let Some(sizes) = common.sizes()? {
                builder = builder.sizes(sizes);
            }
        }
        let cpus = h2d.map(|h2d| parse_list("--cpus", &h2d.cpus)).transpose()?.flatten();
        if let Some(cpus) = parse_list("--rank0-cpus", &self.rank0_cpus)?.or_else(|| cpus.clone()) {
            builder = builder.rank0_cpus(cpus);
        }
        if let Some(cpus) = parse_list("--rank1-cpus", &self.rank1_cpus)?.or(cpus) {
            builder = builder.rank1_cpus(cpus);
        }
        let devices = h2d.map(|h2d| parse_list("--devices", &h2d.devices)).transpose()?.flatten();
        if let Some(pair) = &self.device_pair {
            builder = builder.device_pair(parse_pair(pair)?);
        } else if let Some([first, rest @ ..]) = devices.as_deref() {
            builder = builder.device_pair([*first, *rest.first().unwrap_or(first)]);
        }
        builder.build(machine)
    }
}

/// Where the results go.
#[derive(Debug, Clone, Args)]
pub(crate) struct FolderArgs {
    /// Result folder; must be absent or empty unless --resume or --force is given.
    #[arg(long, env = "CLUSTER_HEALTH_OUT", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Go on with an interrupted run of the same plan; a complete one is left as it is.
    #[arg(long, env = "CLUSTER_HEALTH_RESUME", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    resume: bool,
    /// Replace the results that are in the folder.
    #[arg(long, env = "CLUSTER_HEALTH_FORCE", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    force: bool,
    #[command(flatten)]
    palette: PaletteArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl FolderArgs {
    /// What to do with what is in the folder.
    pub(crate) fn mode(&self) -> Result<OpenMode> {
        Ok(match (self.resume, self.force) {
            (true, true) => {
                let message = "cannot be used with --force: one goes on, the other starts anew";
                return Err(Error::invalid("--resume", message));
            }
            (true, _) => OpenMode::Resume,
            (_, true) => OpenMode::Force,
            _ => OpenMode::New,
        })
    }

    pub(crate) fn record_options(&self) -> Result<RecordOptions> {
        Ok(RecordOptions::default().with_mode(self.mode()?).with_report(self.palette.options()))
    }
}

#[derive(Debug, Args)]
pub(crate) struct AllArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) h2d: H2dArgs,
    #[command(flatten)]
    pub(crate) pair: PairArgs,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

#[derive(Debug, Args)]
pub(crate) struct H2dSweepArgs {
    #[command(flatten)]
    pub(crate) copies: CopyArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) h2d: H2dArgs,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PairSweepArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) pair: PairArgs,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PaletteArgs {
    /// Colours of the pictures: default is safe for colour-blind readers, classic the older
    /// tool's red–yellow–green.
    #[arg(long, env = "CLUSTER_HEALTH_PALETTE", value_enum, default_value_t = PaletteArg::Default,
          help_heading = "Output")]
    palette: PaletteArg,
}

impl PaletteArgs {
    pub(crate) fn options(&self) -> ReportOptions {
        ReportOptions::default().with_classic_palette(self.palette == PaletteArg::Classic)
    }
}

#[derive(Debug, Args)]
pub(crate) struct AffinityArgs {
    #[command(flatten)]
    pub(crate) backend: BackendArg,
    /// Read another machine's sys/ and proc/ below ROOT; nothing can be bound there, so bindable
    /// is null.
    #[arg(long, env = "CLUSTER_HEALTH_SYSFS", value_name = "ROOT")]
    pub(crate) sysfs: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    #[command(flatten)]
    pub(crate) backend: BackendArg,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Which sweep.
    #[arg(long, env = "CLUSTER_HEALTH_SWEEP", value_enum, default_value_t = SweepArg::H2d)]
    pub(crate) sweep: SweepArg,
    #[command(flatten)]
    pub(crate) copies: CopyArgs,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) h2d: H2dArgs,
    #[command(flatten)]
    pub(crate) pair: PairArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct DiagnoseArgs {
    /// Result folder.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Rate that the link should have, for example 58.5GB/s, instead of the plan's: of copies, or of
    /// pairs (per rank) in a folder of pairs alone.
    #[arg(long, env = "CLUSTER_HEALTH_EXPECT", value_name = "RATE")]
    expect: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl DiagnoseArgs {
    pub(crate) fn expect(&self) -> Result<Option<Bandwidth>> {
        parse_expect(self.expect.as_deref())
    }
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Result folder.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    #[command(flatten)]
    pub(crate) palette: PaletteArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Result folders: A and B, or the nodes of a pod.
    #[arg(required = true, num_args = 2.., value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Differences below this share of the rate do not count.
    #[arg(long, env = "CLUSTER_HEALTH_MIN_EFFECT", default_value = "3%", value_name = "P")]
    min_effect: String,
    /// Compare although plans or machines differ; the result is marked.
    #[arg(long, env = "CLUSTER_HEALTH_FORCE", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    force: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl CompareArgs {
    pub(crate) fn options(&self) -> Result<CompareOptions> {
        const OPTION: &str = "--min-effect";
        let share = parse_ratio(OPTION, &self.min_effect)?;
        if !(share > 0.0 && share < 1.0) {
            let message = format!("'{}' is not between 0 and 100 %", self.min_effect);
            return Err(Error::invalid(OPTION, message));
        }
        Ok(CompareOptions::default().with_min_effect(share).with_force(self.force))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// The older tool's results.json, per-rank files and workbooks.
    Clusterhealthdetect,
    /// One matrix per file: column ids in the first line, row ids in the first column.
    Csv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SweepArg {
    H2d,
    CorePair,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImportSweepArg {
    H2d,
    CorePair,
    Sizes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScanArg {
    RowMajor,
    ColumnMajor,
    Unknown,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Format of the sources.
    #[arg(long, env = "CLUSTER_HEALTH_FORMAT", value_enum)]
    pub(crate) format: FormatArg,
    /// What the sources hold; sizes = one size-sweep table of the older tool.
    #[arg(long, env = "CLUSTER_HEALTH_SWEEP", value_enum)]
    pub(crate) sweep: ImportSweepArg,
    /// Source files.
    #[arg(required = true, value_name = "SRC")]
    pub(crate) sources: Vec<PathBuf>,
    /// Census of the measured machine: affinity.json or its CSV.
    #[arg(long, env = "CLUSTER_HEALTH_AFFINITY", value_name = "FILE")]
    pub(crate) affinity: Option<PathBuf>,
    /// Bytes per copy of a CSV whose name does not tell.
    #[arg(long, env = "CLUSTER_HEALTH_SIZE", value_name = "S")]
    pub(crate) size: Option<String>,
    /// Order in which the cells were measured. Without it a CSV is taken as row-major (row, then
    /// size ascending, then column), and that is recorded as an assumption.
    #[arg(long, env = "CLUSTER_HEALTH_SCAN_ORDER", value_enum, value_name = "ORDER")]
    pub(crate) scan_order: Option<ScanArg>,
    /// Result folder; must be absent or empty unless --force is given.
    #[arg(long, env = "CLUSTER_HEALTH_OUT", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Replace the results that are in the folder.
    #[arg(long, env = "CLUSTER_HEALTH_FORCE", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) palette: PaletteArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl ImportArgs {
    pub(crate) fn size(&self) -> Result<Option<ByteSize>> {
        self.size.as_deref().map(|text| named("--size", text.parse())).transpose()
    }
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Result folder.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Format to write.
    #[arg(long, env = "CLUSTER_HEALTH_FORMAT", value_enum)]
    pub(crate) format: FormatArg,
    /// Folder for results.json and affinity.json; must be absent or empty unless --force is given.
    #[arg(long, env = "CLUSTER_HEALTH_OUT", value_name = "DIR2")]
    pub(crate) out: PathBuf,
    /// Replace results.json and affinity.json in the folder.
    #[arg(long, env = "CLUSTER_HEALTH_FORCE", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}
