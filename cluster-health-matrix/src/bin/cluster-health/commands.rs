//! What each command does: thin calls into the library, words for people around them.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster_health_core::affinity::Census;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::topology::Topology;
use cluster_health_core::{
    BackendKind, Bandwidth, ByteSize, CpuId, DeviceActivity, LoadProfile, Machine, Watchdog,
};
use cluster_health_matrix::analysis::Verdict;
use cluster_health_matrix::compare::{self, CompareVerdict};
use cluster_health_matrix::environment::Environment;
use cluster_health_matrix::older::ScanOrder;
use cluster_health_matrix::older::export::{ExportMeta, export};
use cluster_health_matrix::older::import::{ImportRequest, SourceFormat, read};
use cluster_health_matrix::output::{first_page, markdown};
use cluster_health_matrix::plan::{
    CorePairPlan, Cost, H2dPlan, Order, Sampling, allows_same_device,
};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::run::{
    AffinityFile, FolderLock, Manifest, OpenMode, PlanRecord, RunStatus, SAMPLES, SampleReader,
    unix_seconds, utc_now,
};
use cluster_health_matrix::samples::{Sample, Sweep};
use cluster_health_matrix::session::{RankZero, dismiss, follow, record, record_import};
use cluster_health_matrix::sweep::core_pair_ready;
use cluster_health_matrix::{CancelToken, Error, Result};
use cluster_health_matrix::{policies, sizes, validate};
use serde_json::{Value, json};

use crate::args::{
    AffinityArgs, AllArgs, Command, CompareArgs, DiagnoseArgs, ExportArgs, FolderArgs, FormatArg,
    H2dSweepArgs, ImportArgs, ImportSweepArg, PairSweepArgs, PlanArgs, RanksArg, ReportArgs,
    ScanArg, SweepArg,
};
use crate::progress::Terminal;
use crate::{base, bundle, gate, guard, print_json, print_text};

/// How a command ended when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Done {
    Clean,
    /// There are findings or doubts, some points have no number, or the run was interrupted.
    Wanting,
    /// The runs differ, or that cannot be told.
    Differences,
    /// The runs must not be compared; the differences were shown.
    Refused,
}

pub(crate) fn run(command: &Command) -> Result<Done> {
    match command {
        Command::All(args) => all(args),
        Command::H2d(args) => h2d(args),
        Command::CorePair(args) => core_pair(args),
        Command::Affinity(args) => affinity(args),
        Command::Env(args) => bundle::env(args),
        Command::Validate(args) => base::validate(args),
        Command::Sizes(args) => base::sizes(args),
        Command::Policies(args) => base::policies(args),
        Command::Preflight(args) => gate::preflight(args),
        Command::Plan(args) => plan(args),
        Command::Diagnose(args) => diagnose(args),
        Command::Report(args) => report(args),
        Command::Compare(args) => compare(args),
        Command::Import(args) => import(args),
        Command::Export(args) => export_older(args),
    }
}

/// Visits that confirm or refute a suspicion.
const CONFIRMING_VISITS: usize = 6;

/// `all` measures whole matrices where one is expected to take at most so long, else it samples them.
const WHOLE_SECONDS: f64 = 180.0;

fn h2d(args: &H2dSweepArgs) -> Result<Done> {
    let common = &args.common;
    let watchdog = guard::watch(&common.backend, common.timeout()?, args.folder.output.json)?;
    let machine = args.common.backend.machine()?;
    let plan = args.h2d.plan(&args.common, Some(&args.copies), &machine)?;
    keep_off(watchdog.as_ref(), plan.cpus.iter().copied());
    let membership = Membership::find(args.common.ranks, args.common.timeout()?)?;
    if let Some(group) = membership.follower() {
        log!("rank {} has nothing to do: rank 0 measures H2D", group.rank());
        return Ok(Done::Clean);
    }
    record_run("h2d", &machine, &PlanRecord::of_h2d(plan), membership, Vec::new(), &args.folder)
}

fn core_pair(args: &PairSweepArgs) -> Result<Done> {
    let common = &args.common;
    let watchdog = guard::watch(&common.backend, common.timeout()?, args.folder.output.json)?;
    let machine = args.common.backend.machine()?;
    let membership = Membership::find(args.common.ranks, args.common.timeout()?)?;
    let plan = args.pair.plan(&args.common, None, false, &machine)?;
    keep_off(watchdog.as_ref(), plan.rank0_cpus.iter().chain(&plan.rank1_cpus).copied());
    let plan = PlanRecord::of_core_pair(plan);
    record_run("core-pair", &machine, &plan, membership, Vec::new(), &args.folder)
}

fn keep_off(watchdog: Option<&Watchdog>, cpus: impl Iterator<Item = CpuId>) {
    if let Some(watchdog) = watchdog {
        watchdog.keep_off(cpus);
    }
}

/// This process's place among ranks.
pub(crate) enum Membership {
    /// Alone, or the one that starts the other ranks.
    Alone { timeout: Duration },
    /// One of a launcher's or a parent's ranks.
    Rank(RankGroup),
}

impl Membership {
    pub(crate) fn find(ranks: Option<RanksArg>, timeout: Duration) -> Result<Self> {
        let found = Self::find_any(ranks, timeout)?;
        if let Self::Rank(group) = &found {
            guard::is_rank(group.rank());
        }
        Ok(found)
    }

    fn find_any(ranks: Option<RanksArg>, timeout: Duration) -> Result<Self> {
        if let Some(group) = RankGroup::from_parent(timeout)? {
            return Ok(Self::Rank(group));
        }
        let found = match ranks {
            Some(RanksArg::Local) => None,
            _ => RankGroup::from_environment(timeout)?,
        };
        match (found, ranks) {
            (Some(group), _) if group.size() > 1 => Ok(Self::Rank(group)),
            (None, Some(RanksArg::Env)) => Err(Error::invalid(
                "--ranks",
                "env: no launcher's environment (torchrun, Open MPI, PMI, Slurm) was found",
            )),
            _ => Ok(Self::Alone { timeout }),
        }
    }

    /// The group of a rank that is not the one that records.
    pub(crate) fn follower(&self) -> Option<&RankGroup> {
        match self {
            Self::Rank(group) if group.rank() > 0 => Some(group),
            _ => None,
        }
    }

    /// Rank 0's group, when the pair sweep begins.
    fn lead(&mut self) -> Result<Arc<RankGroup>> {
        self.lead_of(2)
    }

    /// The group of this rank; without one it starts `size` − 1 other ranks.
    pub(crate) fn lead_of(&mut self, size: u32) -> Result<Arc<RankGroup>> {
        let alone = Self::Alone { timeout: Duration::ZERO };
        match std::mem::replace(self, alone) {
            Self::Rank(group) => Ok(Arc::new(group)),
            Self::Alone { timeout } => {
                let program = std::env::current_exe()
                    .map_err(|error| Error::io("finding", "this program", error))?;
                let mut command = std::process::Command::new(program);
                command.args(std::env::args_os().skip(1));
                guard::is_rank(0);
                Ok(Arc::new(RankGroup::lead(command, size, timeout)?))
            }
        }
    }
}

fn all(args: &AllArgs) -> Result<Done> {
    let common = &args.common;
    let watchdog = guard::watch(&common.backend, common.timeout()?, args.folder.output.json)?;
    let machine = args.common.backend.machine()?;
    let membership = Membership::find(args.common.ranks, args.common.timeout()?)?;
    let mut h2d = args.h2d.plan(&args.common, None, &machine)?;
    keep_off(watchdog.as_ref(), h2d.cpus.iter().copied());
    let (pair, mut notes) = pair_of_all(args, &machine, &h2d)?;
    // A fixed rate: what is measured just now may differ when the run is resumed, and with it the
    // plan.
    let rate = machine.scenario().map_or(20.0, |scenario| scenario.h2d.gbps);
    let seconds = h2d.cost(&machine, Bandwidth::gb_per_second(rate)).seconds;
    let whole = h2d.order == Order::Sequential || h2d.ci.is_some() || h2d.loads.len() > 1;
    if h2d.sample.is_none() && seconds > WHOLE_SECONDS && !whole && !args.h2d.names_cpus() {
        h2d.sample = Some(Sampling::within(Sampling::COPIES));
        notes.push(sampled_note("h2d", "--cpus", seconds, Sampling::COPIES));
    }
    let plan = PlanRecord::of_h2d(h2d).with_core_pair(pair);
    record_run("all", &machine, &plan, membership, notes, &args.folder)
}

/// The pair matrix of `all`, as far as this machine has one and there is time for it.
fn pair_of_all(
    args: &AllArgs,
    machine: &Machine,
    h2d: &H2dPlan,
) -> Result<(Option<CorePairPlan>, Vec<String>)> {
    let usable = h2d.devices.len() - h2d.unusable_devices.len();
    if usable == 1 && !allows_same_device(machine.backend()) {
        return Ok((None, vec!["pair matrix skipped: one device".to_owned()]));
    }
    if let Err(error) = core_pair_ready(machine) {
        return Ok((None, vec![format!("pair matrix skipped: {error}")]));
    }
    let mut plan = args.pair.plan(&args.common, Some(&args.h2d), true, machine)?;
    let rate = machine.scenario().map_or(5.0, |scenario| scenario.all_gather.gbps);
    let seconds = plan.cost(machine, Bandwidth::gb_per_second(rate)).seconds;
    let whole = plan.order == Order::Sequential || plan.ci.is_some() || plan.loads.len() > 1;
    if plan.sample.is_some() || seconds <= WHOLE_SECONDS || whole || args.pair.names_cpus() {
        return Ok((Some(plan), Vec::new()));
    }
    plan.sample = Some(Sampling::within(Sampling::PAIRS));
    let note = sampled_note("core-pair", "--rank0-cpus and --rank1-cpus", seconds, Sampling::PAIRS);
    Ok((Some(plan), vec![note]))
}

/// What a reader should know about a matrix that `all` does not measure whole.
fn sampled_note(command: &str, lists: &str, seconds: f64, budget: Duration) -> String {
    format!(
        "{command}: a part of the matrix is measured within {}, the rest predicted; all of it would \
         take about {}. Left out: single slow cells. Whole: cluster-health {command} --out DIR, or \
         {lists} here",
        duration(budget.as_secs_f64()),
        duration(seconds)
    )
}

/// Announces, runs, records and shows the sweeps of a plan.
fn record_run(
    command: &str,
    machine: &Machine,
    plan: &PlanRecord,
    mut membership: Membership,
    notes: Vec<String>,
    args: &FolderArgs,
) -> Result<Done> {
    let mut cancel = CancelToken::new();
    stop_on_signals(&cancel)?;
    if let Membership::Rank(group) = &mut membership
        && group.rank() > 0
    {
        let after = if plan.h2d.is_some() || machine.has_virtual_time() {
            RankZero::MeasuresFirst
        } else {
            RankZero::Begins
        };
        return match &plan.core_pair {
            Some(plan) if follow(machine, plan, group, after, &mut cancel)? => Ok(Done::Clean),
            Some(_) => Ok(Done::Wanting),
            None => Ok(Done::Clean),
        };
    }
    if !args.output.quiet {
        announce(machine, plan, &notes, &args.out);
    }
    let mut terminal = Terminal::new(args.output.quiet, cancel.clone());
    let options = args.record_options()?;
    let mut ranks = || membership.lead();
    guard::records(&args.out, Some(options.report));
    let result =
        record(command, machine, plan, &mut ranks, notes, &args.out, &options, &mut terminal);
    terminal.finish();
    let report = result?;
    if let (Membership::Rank(group), Some(plan)) = (&membership, &plan.core_pair) {
        // Whoever is gone or was asked for something else says so itself; the results stand.
        dismiss(group, plan, report.manifest.status == RunStatus::Complete).ok();
    }
    if !args.output.quiet {
        for note in &report.manifest.notes {
            log!("note: {note}");
        }
    }
    if report.manifest.status == RunStatus::Interrupted {
        log!("interrupted; what was measured is in {}, --resume goes on", args.out.display());
    }
    if report.manifest.status == RunStatus::Complete
        && let Some(nothing) = report.nothing_measured()
    {
        return Err(nothing);
    }
    show(&report, &args.out, args.output.json);
    Ok(outcome(&report))
}

/// Healthy is what was measured to its end without a finding, a doubt or a hole.
fn outcome(report: &Report) -> Done {
    let manifest = &report.manifest;
    let is_whole = manifest.points.all_measured() && manifest.status == RunStatus::Complete;
    if is_whole && report.diagnosis.verdict == Verdict::Healthy {
        Done::Clean
    } else {
        Done::Wanting
    }
}

fn diagnose(args: &DiagnoseArgs) -> Result<Done> {
    let report = Report::read_expecting(&args.dir, args.expect()?)?;
    if let Some(nothing) = report.nothing_measured() {
        return Err(nothing);
    }
    for line in &report.bad_lines {
        log!("warning: {}, {line}", args.dir.join(SAMPLES).display());
    }
    if args.output.json {
        print_json(&serde_json::to_value(&report.diagnosis).unwrap_or_default());
    } else {
        print_text(&first_page::render(&report));
    }
    Ok(outcome(&report))
}

fn announce(machine: &Machine, plan: &PlanRecord, notes: &[String], out: &Path) {
    for note in notes {
        log!("note: {note}");
    }
    if let Some(plan) = &plan.h2d {
        let cost = plan.cost(machine, assumed_rate(machine, plan.largest()));
        log!("{}; results in {}", describe(plan, &cost), out.display());
    }
    if let Some(plan) = &plan.core_pair {
        let cost = plan.cost(machine, assumed_pair_rate(machine, plan));
        log!("{}; results in {}", describe_pairs(plan, &cost), out.display());
    }
    let mut reasons = Environment::of(machine).disturbances(machine.topology().online().len());
    reasons.extend(machine.device_activity().iter().flat_map(DeviceActivity::disturbances));
    for reason in reasons {
        log!("warning: the node is not quiet: {reason}");
    }
    let h2d = plan
        .h2d
        .iter()
        .flat_map(|plan| plan.unusable_cpus.values().chain(plan.unusable_devices.values()));
    let pairs = plan.core_pair.iter().flat_map(|plan| {
        plan.unusable_rank0_cpus.values().chain(plan.unusable_rank1_cpus.values())
    });
    for reason in h2d.chain(pairs) {
        log!("warning: {reason}; its points will be skipped");
    }
}

/// The first Ctrl-C asks for the end, the second one ends at once.
pub(crate) fn stop_on_signals(cancel: &CancelToken) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, cancel.flag())
            .and_then(|_| signal_hook::flag::register(signal, cancel.flag()))
            .map_err(|error| Error::output("signal handler", error.to_string()))?;
    }
    Ok(())
}

/// Rate for the estimate: the scenario's, or a copy in ordinary memory just now.
fn assumed_rate(machine: &Machine, largest: ByteSize) -> Bandwidth {
    if let Some(scenario) = machine.scenario() {
        return Bandwidth::gb_per_second(scenario.h2d.gbps);
    }
    let bytes = usize::try_from(largest.bytes()).unwrap_or(usize::MAX).min(32 << 20);
    let source = vec![1_u8; bytes];
    let mut target = vec![0_u8; bytes];
    let mut best = u128::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        target.copy_from_slice(&source);
        std::hint::black_box(&mut target);
        best = best.min(start.elapsed().as_nanos().max(1));
    }
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    let rate = bytes as f64 / best as f64;
    Bandwidth::gb_per_second(rate)
}

/// Rate per rank for the estimate: both ranks copy two blocks at once.
fn assumed_pair_rate(machine: &Machine, plan: &CorePairPlan) -> Bandwidth {
    match machine.scenario() {
        Some(scenario) => Bandwidth::gb_per_second(scenario.all_gather.gbps),
        None => {
            let copy = assumed_rate(machine, plan.largest());
            Bandwidth::gb_per_second(copy.as_gb_per_second() / 2.0)
        }
    }
}

fn describe_pairs(plan: &CorePairPlan, cost: &Cost) -> String {
    format!(
        "core-pair: {} rank-0 CPUs × {} rank-1 CPUs on devices {},{} × {}{} × {} blocks = {} \
         points, about {} at {:.1} GB/s per rank, {} MiB of device memory",
        plan.rank0_cpus.len(),
        plan.rank1_cpus.len(),
        plan.device_pair[0],
        plan.device_pair[1],
        sizes(&plan.sizes),
        loads(&plan.loads),
        plan.repeats,
        cost.points,
        duration(cost.seconds),
        cost.rate.as_gb_per_second(),
        cost.device_memory.bytes().div_ceil(1 << 20),
    )
}

/// `2 sizes (16MiB,64MiB)`.
fn sizes(sizes: &[ByteSize]) -> String {
    let list: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    let plural = if list.len() == 1 { "" } else { "s" };
    format!("{} size{plural} ({})", list.len(), list.join(","))
}

/// ` × 2 loads (idle,cpu:2)`; nothing for the idle machine alone.
fn loads(loads: &[LoadProfile]) -> String {
    if let [LoadProfile::Idle] = loads {
        return String::new();
    }
    let list: Vec<String> = loads.iter().map(ToString::to_string).collect();
    let plural = if list.len() == 1 { "" } else { "s" };
    format!(" × {} load{plural} ({})", list.len(), list.join(","))
}

fn describe(plan: &H2dPlan, cost: &Cost) -> String {
    format!(
        "{}{}: {} CPUs × {} devices × {}{} × {} blocks = {} points, about {} at {:.1} GB/s, \
         {} MiB of host and {} MiB of device memory",
        plan.direction.sweep(),
        if plan.concurrent { ", all devices at once" } else { "" },
        plan.cpus.len(),
        plan.devices.len(),
        sizes(&plan.sizes),
        loads(&plan.loads),
        plan.repeats,
        cost.points,
        duration(cost.seconds + cost.setup_seconds),
        cost.rate.as_gb_per_second(),
        cost.host_memory.bytes().div_ceil(1 << 20),
        cost.device_memory.bytes().div_ceil(1 << 20),
    )
}

fn duration(seconds: f64) -> String {
    if seconds < 1.0 {
        "1 s".to_owned()
    } else if seconds < 120.0 {
        format!("{seconds:.0} s")
    } else {
        format!("{:.0} min", seconds / 60.0)
    }
}

fn show(report: &Report, dir: &Path, as_json: bool) {
    let manifest = &report.manifest;
    if as_json {
        return print_json(&json!({
            "schema_version": 1,
            "out": dir.display().to_string(),
            "status": manifest.status,
            "points": manifest.points,
            "summary": manifest.summary,
            "verdict": report.diagnosis.verdict,
            "findings": report.diagnosis.findings,
            "tested": report.diagnosis.tested,
            "not_tested": report.diagnosis.not_tested,
        }));
    }
    let mut text = format!(
        "{:<13} {:>8} {:>6} {:>11} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9}\n",
        "sweep", "bytes", "load", "memory", "cells", "min", "p10", "median", "p90", "max"
    );
    for row in &manifest.summary {
        // Writing to a String cannot fail.
        writeln!(
            text,
            "{:<13} {:>8} {:>6} {:>11} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9}{}",
            row.sweep.as_str(),
            row.bytes.to_string(),
            row.load,
            row.memory,
            row.count,
            markdown::rate(row.min),
            markdown::rate(row.p10),
            markdown::rate(row.median),
            markdown::rate(row.p90),
            markdown::rate(row.max),
            row.latency_us().map(|us| format!("   {us:.1} µs")).unwrap_or_default()
        )
        .ok();
    }
    let points = &manifest.points;
    writeln!(
        text,
        "decimal GB/s per cell · {} points measured, {} skipped, {} failed, {} implausible · {}",
        points.measured,
        points.skipped,
        points.failed,
        points.implausible,
        dir.join("report.md").display()
    )
    .ok();
    for (reason, count) in report.reasons.iter().take(8) {
        writeln!(text, "{count} × {reason}").ok();
    }
    text.push('\n');
    text.push_str(first_page::verdict(report).trim_end());
    text.push('\n');
    print_text(&text);
}

fn affinity(args: &AffinityArgs) -> Result<Done> {
    let census = match &args.sysfs {
        Some(root) => Census::inspect(&Topology::read(root)?),
        None => args.backend.machine()?.census()?.clone(),
    };
    let file = AffinityFile::of(&census);
    if args.output.json {
        print_json(&serde_json::to_value(&file).unwrap_or_default());
        return Ok(Done::Clean);
    }
    let mut text = format!(
        "{:>6} {:>6} {:>7} {:>8} {:>5} {:>7} {:>6} {:>9}  reason\n",
        "cpu", "online", "allowed", "bindable", "node", "package", "core", "siblings"
    );
    let yes = |value: bool| if value { "yes" } else { "no" };
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    for cpu in &census.cpus {
        writeln!(
            text,
            "{:>6} {:>6} {:>7} {:>8} {:>5} {:>7} {:>6} {:>9}  {}",
            cpu.cpu.to_string(),
            yes(cpu.online),
            yes(cpu.allowed),
            cpu.bindable.map_or("-", yes),
            or_dash(cpu.numa_node.map(|node| node.to_string())),
            or_dash(cpu.socket_id.map(|id| id.to_string())),
            or_dash(cpu.core_id.map(|id| id.to_string())),
            cpu.thread_siblings,
            cpu.reason.as_deref().unwrap_or_default()
        )
        .ok();
    }
    let count = |keep: fn(&cluster_health_core::affinity::CpuRecord) -> bool| {
        census.cpus.iter().filter(|cpu| keep(cpu)).count()
    };
    write!(
        text,
        "{} present, {} online, {} allowed, ",
        census.cpus.len(),
        count(|cpu| cpu.online),
        count(|cpu| cpu.allowed)
    )
    .ok();
    match args.sysfs {
        Some(_) => writeln!(text, "bindable unknown: not this machine"),
        None => writeln!(text, "{} bindable", count(|cpu| cpu.bindable == Some(true))),
    }
    .ok();
    if let Some(quota) = census.quota {
        writeln!(text, "the cgroup grants {quota} CPUs' worth of time").ok();
    }
    print_text(&text);
    Ok(Done::Clean)
}

fn plan(args: &PlanArgs) -> Result<Done> {
    let machine = args.common.backend.machine()?;
    match args.sweep {
        SweepArg::H2d => plan_h2d(args, &machine),
        SweepArg::CorePair => plan_pairs(args, &machine),
    }
}

/// Most points that the visits of suspects after the blocks can cost: of every cell at every size.
fn most_confirming(cells: usize, sizes: usize, order: Order) -> usize {
    if order == Order::Blocks { CONFIRMING_VISITS * cells * sizes } else { 0 }
}

/// What a plan says of those visits, and of differences that are none.
fn confirming(most: usize, min_effect: f64) -> String {
    let visits = match most {
        0 => "nothing is visited again after a sequential sweep".to_owned(),
        most => format!(
            "what the blocks make suspicious is visited {CONFIRMING_VISITS} more times beside \
             others to compare with: no or few points on an even machine, hundreds to thousands where \
             there are faults, never more than {most}"
        ),
    };
    format!("{visits}; differences below {:.2} % are no faults (--min-effect)", 100.0 * min_effect)
}

fn plan_pairs(args: &PlanArgs, machine: &Machine) -> Result<Done> {
    let plan = args.pair.plan(&args.common, Some(&args.h2d), false, machine)?;
    if let Some(sample) = plan.sample {
        let whole = plan.cost(machine, assumed_pair_rate(machine, &plan));
        let noise = plan.detectable(machine).assumed_noise;
        let shape = [plan.rank0_cpus.len(), plan.rank1_cpus.len()];
        let of_cell = seconds_of_smallest(&whole, &plan.sizes);
        return plan_sample(args, &json!(plan), sample, &whole, (noise, shape, of_cell));
    }
    let cost = plan.cost(machine, assumed_pair_rate(machine, &plan));
    let effects = plan.detectable(machine);
    let cells = plan.rank0_cpus.len() * plan.rank1_cpus.len();
    let most = most_confirming(cells * plan.loads.len(), plan.sizes.len(), plan.order);
    if args.output.json {
        print_json(&json!({
            "schema_version": 1, "plan": plan, "cost": cost, "detectable": effects,
            "confirming_points_at_most": most,
        }));
        return Ok(Done::Clean);
    }
    let mut text = describe_pairs(&plan, &cost);
    writeln!(
        text,
        "\neach rank moves {:.1} GB; sentinels add about one point in sixty-five, probes one per \
         CPU and block; smallest slowdown found with 95 % power, assuming {:.1} % noise per visit: \
         a rank-0 core {:.2} %, a rank-1 core {:.2} %, a single pair {:.2} %",
        bytes_gb(cost.bytes.bytes()),
        100.0 * effects.assumed_noise,
        100.0 * effects.rank0_core,
        100.0 * effects.rank1_core,
        100.0 * effects.cell
    )
    .ok();
    writeln!(text, "{}", confirming(most, plan.min_effect)).ok();
    print_text(&text);
    Ok(Done::Clean)
}

fn plan_h2d(args: &PlanArgs, machine: &Machine) -> Result<Done> {
    let plan = args.h2d.plan(&args.common, Some(&args.copies), machine)?;
    if let Some(sample) = plan.sample {
        let whole = plan.cost(machine, assumed_rate(machine, plan.largest()));
        let noise = plan.detectable(machine).assumed_noise;
        let shape = [plan.cpus.len(), plan.devices.len()];
        let of_cell = seconds_of_smallest(&whole, &plan.sizes);
        return plan_sample(args, &json!(plan), sample, &whole, (noise, shape, of_cell));
    }
    let cost = plan.cost(machine, assumed_rate(machine, plan.largest()));
    let effects = plan.detectable(machine);
    let cells = plan.cpus.len() * plan.devices.len();
    let most = most_confirming(cells * plan.loads.len(), plan.sizes.len(), plan.order);
    if args.output.json {
        print_json(&json!({
            "schema_version": 1, "plan": plan, "cost": cost, "detectable": effects,
            "confirming_points_at_most": most,
        }));
        return Ok(Done::Clean);
    }
    let mut text = describe(&plan, &cost);
    writeln!(
        text,
        "\nmoves {:.1} GB; {} before the first bind, {} from first bind to last sample; probes and \
         sentinels come on top, one to three points per core visit",
        bytes_gb(cost.bytes.bytes()),
        duration(cost.setup_seconds),
        duration(cost.seconds)
    )
    .ok();
    writeln!(
        text,
        "smallest slowdown found with 95 % power, assuming {:.1} % noise per visit: a device {:.2} %, \
         a core {:.2} %, a single cell {:.2} %",
        100.0 * effects.assumed_noise,
        100.0 * effects.device,
        100.0 * effects.core,
        100.0 * effects.cell
    )
    .ok();
    writeln!(text, "{}", confirming(most, plan.min_effect)).ok();
    print_text(&text);
    Ok(Done::Clean)
}

/// Time of one point of the smallest size, as if all of it were that of the bytes.
fn seconds_of_smallest(whole: &Cost, sizes: &[ByteSize]) -> f64 {
    let all: u64 = sizes.iter().map(|size| size.bytes()).sum();
    let share = to_f64(sizes[0].bytes()) * to_f64(sizes.len() as u64) / to_f64(all);
    whole.seconds / to_f64(whole.points.max(1)) * share
}

/// What a sampled sweep costs and finds: its budget is the cost.
fn plan_sample(
    args: &PlanArgs,
    plan: &Value,
    sample: Sampling,
    whole: &Cost,
    (noise, [rows, columns], seconds_per_cell): (f64, [usize; 2], f64),
) -> Result<Done> {
    let cells = to_f64((rows * columns) as u64);
    // Half of the budget goes to cells chosen by chance, mostly at one size.
    let base = (0.4 * sample.budget().as_secs_f64() / seconds_per_cell.max(1e-9)).min(cells);
    // A line is suspected from 2.6 standard errors on; 1.645 more for 95 % power.
    let line = |lines: usize| {
        let visits = (base / to_f64(lines as u64)).max(1.0) + 4.0;
        1.0 - (-(2.6 + 1.645) * noise / visits.sqrt()).exp()
    };
    let effects = [line(rows), line(columns)];
    let seconds = sample.budget().as_secs_f64().min(whole.seconds);
    if args.output.json {
        print_json(&json!({
            "schema_version": 1, "plan": plan, "whole": whole,
            "cost": { "seconds": seconds, "cells_by_chance": base },
            "detectable": {
                "assumed_noise": noise, "row": effects[0], "column": effects[1], "cell": null,
            },
        }));
        return Ok(Done::Clean);
    }
    print_text(&format!(
        "sampled: at most {} from first bind to last sample, about {base:.0} of {cells:.0} cells at one \
         size and what looks suspicious again; all cells would take {} and {:.1} GB\n\
         smallest slowdown found with 95 % power, assuming {:.1} % noise per visit: a row {:.1} %, a \
         column {:.1} %; single cells are beyond a sample\n",
        duration(sample.budget().as_secs_f64()),
        duration(whole.seconds),
        bytes_gb(whole.bytes.bytes()),
        100.0 * noise,
        100.0 * effects[0].max(0.03),
        100.0 * effects[1].max(0.03),
    ));
    Ok(Done::Clean)
}

#[allow(clippy::cast_precision_loss, reason = "shown with few digits")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

#[allow(clippy::cast_precision_loss, reason = "shown with one digit")]
fn bytes_gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

fn report(args: &ReportArgs) -> Result<Done> {
    let plan = Manifest::read(&args.dir)?.plan;
    if plan.validate.is_some() {
        base::show_table(&validate::rewrite(&args.dir)?, args.output.json);
        return Ok(Done::Clean);
    }
    if plan.sizes.is_some() {
        base::show_sizes(&sizes::rewrite(&args.dir)?, args.output.json);
        return Ok(Done::Clean);
    }
    if plan.policies.is_some() {
        base::show_policies(&policies::rewrite(&args.dir)?, args.output.json);
        return Ok(Done::Clean);
    }
    let _lock = FolderLock::take(&args.dir)?;
    let mut report = Report::read(&args.dir)?;
    for line in &report.bad_lines {
        log!("warning: {}, {line}", args.dir.join(SAMPLES).display());
    }
    report.write(&args.dir, &args.palette.options())?;
    show(&report, &args.dir, args.output.json);
    Ok(Done::Clean)
}

fn compare(args: &CompareArgs) -> Result<Done> {
    let options = args.options()?;
    let mut reports = Vec::new();
    for dir in &args.runs {
        let report = Report::read(dir)?;
        for line in &report.bad_lines {
            log!("warning: {}, {line}", dir.join("samples.jsonl").display());
        }
        reports.push((dir.display().to_string(), report));
    }
    let runs: Vec<(&str, &Report)> =
        reports.iter().map(|(name, report)| (name.as_str(), report)).collect();
    let (verdict, differences, text, document) = match runs.as_slice() {
        [a, b] => {
            let found = compare::compare(*a, *b, &options);
            let text = found.to_string();
            (found.verdict, found.differences.clone(), text, serde_json::to_value(found))
        }
        _ => {
            let found = compare::pod(&runs, &options);
            let text = found.to_string();
            (found.verdict, found.differences.clone(), text, serde_json::to_value(found))
        }
    };
    if args.output.json {
        let mut document = document.unwrap_or_default();
        if verdict == CompareVerdict::Refused {
            let message = format!("the runs must not be compared: {}", differences.join("; "));
            let advice = "--force compares all the same";
            document["error"] = json!({
                "kind": "refused", "message": message, "call": null, "code": null,
                "device": null, "rank": null, "advice": advice,
            });
        }
        print_json(&document);
    } else {
        print_text(&text);
    }
    Ok(match verdict {
        CompareVerdict::NoDifference => Done::Clean,
        CompareVerdict::Refused => {
            for difference in &differences {
                log!("cluster-health: {difference}");
            }
            log!("cluster-health: the runs must not be compared; --force does it all the same");
            Done::Refused
        }
        _ => Done::Differences,
    })
}

fn import(args: &ImportArgs) -> Result<Done> {
    let format = match args.format {
        FormatArg::Clusterhealthdetect => SourceFormat::ClusterHealthDetect,
        FormatArg::Csv => SourceFormat::Csv,
    };
    let sweep = match args.sweep {
        ImportSweepArg::H2d => Sweep::H2d,
        ImportSweepArg::CorePair => Sweep::CorePair,
        ImportSweepArg::Sizes => return base::import_sizes(args),
    };
    let mut request = ImportRequest::new(format, sweep, args.sources.clone());
    request.affinity.clone_from(&args.affinity);
    request.size = args.size()?;
    request.scan_order = args.scan_order.map(|order| match order {
        ScanArg::RowMajor => ScanOrder::RowMajor,
        ScanArg::ColumnMajor => ScanOrder::ColumnMajor,
        ScanArg::Unknown => ScanOrder::Unknown,
    });
    let imported = read(&request)?;
    if !args.output.quiet {
        for note in &imported.notes {
            log!("note: {note}");
        }
    }
    let mode = if args.force { OpenMode::Force } else { OpenMode::New };
    let report = record_import(&request, imported, &args.out, mode, &args.palette.options())?;
    show(&report, &args.out, args.output.json);
    Ok(Done::Clean)
}

fn export_older(args: &ExportArgs) -> Result<Done> {
    if args.format == FormatArg::Csv {
        return Err(Error::invalid(
            "--format",
            "csv: the result folder holds its matrices as csv already; only clusterhealthdetect \
             can be exported",
        ));
    }
    if !args.force && args.out.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Error::invalid(
            "--out",
            format!("{} is not empty; use --force to replace its results", args.out.display()),
        ));
    }
    let report = Report::read(&args.dir)?;
    let samples: Vec<Sample> = SampleReader::open(&args.dir)?.collect::<Result<_>>()?;
    let manifest = &report.manifest;
    let mut meta = ExportMeta::default();
    let first = manifest.segments.first();
    meta.started = first.and_then(|segment| unix_seconds(&segment.start));
    meta.finished = manifest
        .segments
        .last()
        .and_then(|segment| unix_seconds(segment.end.as_deref().unwrap_or(&segment.start)));
    meta.argv = vec!["cluster-health".to_owned(), manifest.command.clone()];
    meta.env.clone_from(&manifest.environment.variables);
    let ascend = manifest.environment.backend == BackendKind::Ascend.to_string();
    meta.device_kind = if ascend { "npu" } else { "cpu" }.to_owned();
    meta.collective_backend = if ascend { "hccl" } else { "host" }.to_owned();
    meta.host = manifest.environment.hostname.clone().unwrap_or_default();
    meta.complete = manifest.status == RunStatus::Complete;
    let affinity: Option<Value> =
        report.affinity.as_ref().and_then(|file| serde_json::to_value(file).ok());
    let notes = export(&args.out, &samples, &meta, affinity.as_ref())?;
    if !args.output.quiet {
        for note in &notes {
            log!("note: {note}");
        }
    }
    if args.output.json {
        print_json(&json!({
            "schema_version": 1, "out": args.out.display().to_string(), "notes": notes,
            "created_at": utc_now(),
        }));
    } else {
        print_text(&format!("{}\n", args.out.join("results.json").display()));
    }
    Ok(Done::Clean)
}
