//! A gate for launchers: is this node fit to start a job on?
//!
//! A sampled sweep of copies from host to device, within a budget of machine time, is judged as such, and
//! held against a known-good run where there is one. The answer is pass, fail or inconclusive with the
//! reasons; nothing passes by silence.
//!
//! | what | answer |
//! |---|---|
//! | a fault or structure that the baseline does not have as well, points that failed | fail |
//! | a size, device or NUMA node slower than the baseline by what counts (5 %), not by chance | fail |
//! | a CPU that the baseline could bind, a device that it had | fail |
//! | something undecided, a baseline of another machine, too much noise to exclude a slowdown that counts | inconclusive |
//! | artefacts of the measurement; faster than the baseline (a note) | pass |
//!
//! Not seen: what pairs of ranks show (collectives), other directions, loads, and single CPUs and cells
//! against the baseline: those are judged within the run.
//!
//! ```
//! use std::time::Duration;
//! use cluster_health_core::{Machine, Scenario};
//! use cluster_health_matrix::preflight::{Baseline, Gate, preflight};
//!
//! # fn main() -> cluster_health_matrix::Result<()> {
//! let scenario = Scenario::parse("[machine]\ncpus = 32\ndevices = 4\nnuma_nodes = 2", "inline")?;
//! let machine = Machine::synthetic(scenario)?;
//! let outcome = preflight(&machine, &Baseline::itself(), Duration::from_secs(2))?;
//! assert_eq!(outcome.verdict, Gate::Pass);
//! # Ok(())
//! # }
//! ```

mod baseline;
mod change;
mod ranks;
mod shape;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cluster_health_core::affinity::CpuRecord;
use cluster_health_core::rank::RankGroup;
use cluster_health_core::{Bandwidth, ByteSize, DeviceActivity, Machine};
use serde::{Deserialize, Serialize};

pub use baseline::Baseline;
pub use change::{Change, ChangeState};

use crate::analysis::{Finding, Kind};
use crate::calibrate::Origin;
use crate::compare::list;
use crate::error::{Error, Result};
use crate::observer::{Observer, Progress};
use crate::output::first_page::headline;
use crate::plan::{DEFAULT_MIN_EFFECT, H2dPlan, Sampling};
use crate::report::Report;
use crate::run::{AffinityFile, Manifest, PlanRecord, RunStatus, SCHEMA_VERSION, write_json};
use crate::samples::Sample;
use crate::session::{RecordOptions, record_h2d};
use crate::sweep;
use change::Common;
use shape::Shape;

/// Time that a preflight may take by plan, unless it is told otherwise.
pub const DEFAULT_BUDGET: Duration = Duration::from_secs(10);
/// Smallest slowdown against the baseline that counts, unless a preflight is told otherwise.
pub const DEFAULT_MIN_CHANGE: f64 = 0.05;
/// Name of the answer's file in the result folder.
pub const PREFLIGHT: &str = "preflight.json";

/// Sizes without a baseline, MiB: large enough for the link, small enough to be touched quickly.
const SIZES: [u64; 2] = [16, 64];
/// Larger ones of a baseline take too much of the time, while there are smaller ones.
const LARGEST: ByteSize = ByteSize::mib(64);
/// Blocks of a machine that is small enough to be measured in full.
const REPEATS: u32 = 12;
/// Share of the budget that is planned with: the time of a point is an estimate.
const PLANNED: f64 = 0.95;
/// Share of the budget that the sweep has, whatever touching memory takes: less would tell nothing.
const LEAST_SWEEP: f64 = 0.5;

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Gate {
    /// Nothing speaks against the node, and what was looked for would have been seen.
    Pass,
    /// Nothing was shown, but something could not be told.
    Inconclusive,
    /// Something is wrong with the node.
    Fail,
}

impl Gate {
    /// The word of the JSON output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Inconclusive => "inconclusive",
            Self::Fail => "fail",
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A finding with what it means here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Judged {
    /// As in `diagnose --json`.
    #[serde(flatten)]
    pub finding: Finding,
    /// The baseline shows the same, to less than what counts.
    pub in_baseline: bool,
    /// True where it alone is a reason to fail.
    pub fails: bool,
}

/// The run against a baseline.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Against {
    /// What the baseline is called.
    pub name: String,
    /// Where it was measured.
    pub host: Option<String>,
    /// And when: UTC, RFC 3339.
    pub start: Option<String>,
    /// Why it cannot speak for this machine; where there is something, nothing was compared.
    pub differences: Vec<String>,
    /// Cells that both runs measured, all sizes together.
    pub cells: usize,
    /// Sizes, devices and NUMA nodes now against then.
    pub changes: Vec<Change>,
}

/// What one node was found to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeOutcome {
    /// Host name; `None` for a synthetic machine.
    pub host: Option<String>,
    /// The rank that measured it; 0 without ranks.
    pub rank: u32,
    /// `host`, `ascend` or `synthetic`.
    pub backend: String,
    /// Of this node.
    pub verdict: Gate,
    /// Why not pass, a line each, reasons to fail first; empty when it passed.
    pub reasons: Vec<String>,
    /// Everything that was found, artefacts too.
    pub findings: Vec<Judged>,
    /// Against the baseline; `None` without one.
    pub baseline: Option<Against>,
    /// What a reader should know, a line each; no reasons.
    pub notes: Vec<String>,
    /// Points that were measured.
    pub points: u64,
    /// Machine time of the sweep, first bind to last sample.
    pub wall_ns: u64,
    /// Real time from the plan to the verdict.
    pub host_ns: u64,
}

/// The answer of a preflight; the same on all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Outcome {
    /// Version of the document.
    pub schema_version: u32,
    /// The worst of the nodes.
    pub verdict: Gate,
    /// Why not pass, a line each; empty when it passed.
    pub reasons: Vec<String>,
    /// Machine time that a node's preflight might take by plan.
    pub budget_ns: u64,
    /// Smallest slowdown against the baseline that counts, as a share of the rate.
    pub min_change: f64,
    /// By the rank that measured.
    pub nodes: Vec<NodeOutcome>,
}

impl Outcome {
    fn of(preflight: &Preflight, nodes: Vec<NodeOutcome>) -> Self {
        let of_node = |node: &NodeOutcome| {
            let place = match &node.host {
                Some(host) if nodes.len() > 1 => format!("{host}: "),
                None if nodes.len() > 1 => format!("rank {}: ", node.rank),
                _ => String::new(),
            };
            let verdict = node.verdict;
            let reasons = node.reasons.iter().map(move |reason| format!("{place}{reason}"));
            reasons.map(move |reason| (verdict, reason)).collect::<Vec<_>>()
        };
        let mut reasons: Vec<(Gate, String)> = nodes.iter().flat_map(of_node).collect();
        reasons.sort_by_key(|(verdict, _)| std::cmp::Reverse(*verdict));
        Self {
            schema_version: SCHEMA_VERSION,
            verdict: nodes.iter().map(|node| node.verdict).max().unwrap_or(Gate::Inconclusive),
            reasons: reasons.into_iter().map(|(_, reason)| reason).collect(),
            budget_ns: nanoseconds(preflight.budget),
            min_change: preflight.min_change,
            nodes,
        }
    }

    /// The exit code of a program that does nothing else: 0 pass, 1 fail or inconclusive.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self.verdict {
            Gate::Pass => 0,
            Gate::Inconclusive | Gate::Fail => 1,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "preflight: {}", self.verdict)?;
        for reason in &self.reasons {
            writeln!(f, "  {reason}")?;
        }
        for node in &self.nodes {
            let host = node.host.as_deref().unwrap_or("this machine");
            write!(f, "{host}: {} points, ", node.points)?;
            #[allow(clippy::cast_precision_loss, reason = "shown with one digit")]
            let seconds = node.wall_ns as f64 / 1e9;
            write!(f, "{seconds:.1} s of machine time")?;
            match &node.baseline {
                None => writeln!(f, "; held against itself alone")?,
                Some(known) => {
                    writeln!(f, "; {} cells as in {}", known.cells, known.name)?;
                    let sizes = known.changes.iter().filter(|change| change.axis == "size");
                    for change in sizes {
                        writeln!(f, "  {}: {}", change.name(), change.numbers())?;
                    }
                }
            }
            for note in &node.notes {
                writeln!(f, "  note: {note}")?;
            }
        }
        Ok(())
    }
}

/// Where results go.
#[derive(Debug, Clone)]
struct Folder {
    dir: PathBuf,
    options: RecordOptions,
}

/// How a preflight is made; every setting has a default.
#[derive(Debug, Clone)]
#[must_use]
pub struct Preflight {
    budget: Duration,
    min_change: f64,
    min_effect: f64,
    cpus: Option<Vec<u32>>,
    devices: Option<Vec<u32>>,
    sizes: Option<Vec<ByteSize>>,
    seed: u64,
    timeout: Duration,
    out: Option<Folder>,
}

impl Default for Preflight {
    fn default() -> Self {
        Self {
            budget: DEFAULT_BUDGET,
            min_change: DEFAULT_MIN_CHANGE,
            min_effect: DEFAULT_MIN_EFFECT,
            cpus: None,
            devices: None,
            sizes: None,
            seed: 1,
            timeout: Duration::from_secs(30),
            out: None,
        }
    }
}

/// Is this node fit to start a job on? Measures for at most `budget` of machine time.
///
/// Inside a launcher ([`RankGroup::from_environment`]) every rank calls this at the same point with the
/// same budget, before it starts threads of its own, and every rank gets the same answer: one rank of each
/// host measures, the others wait. [`Preflight`] has more settings.
///
/// # Errors
/// As [`Preflight::run`], and when the ranks do not come together within 30 s.
pub fn preflight(machine: &Machine, baseline: &Baseline, budget: Duration) -> Result<Outcome> {
    let preflight = Preflight::new().budget(budget);
    let mut group = RankGroup::from_environment(preflight.timeout)?;
    preflight.run(machine, baseline, group.as_mut(), &mut ())
}

impl Preflight {
    /// All CPUs and devices, 10 s, 5 % against the baseline, 3 % within the run.
    pub fn new() -> Self {
        Self::default()
    }

    /// Machine time that it may take by plan: touching host memory, and first bind to last sample.
    pub fn budget(mut self, budget: Duration) -> Self {
        self.budget = budget;
        self
    }

    /// Smallest slowdown against the baseline that counts, as a share of the rate.
    pub fn min_change(mut self, share: f64) -> Self {
        self.min_change = share;
        self
    }

    /// Smallest difference within the run that counts as a fault, as a share of the rate.
    pub fn min_effect(mut self, share: f64) -> Self {
        self.min_effect = share;
        self
    }

    /// CPUs; default: all bindable ones.
    pub fn cpus(mut self, cpus: impl IntoIterator<Item = u32>) -> Self {
        self.cpus = Some(cpus.into_iter().collect());
        self
    }

    /// Physical ids of devices; default: all available ones.
    pub fn devices(mut self, devices: impl IntoIterator<Item = u32>) -> Self {
        self.devices = Some(devices.into_iter().collect());
        self
    }

    /// Bytes per copy; default: those of the baseline up to 64 MiB, else its smallest, without one 16 and
    /// 64 MiB.
    pub fn sizes(mut self, sizes: impl IntoIterator<Item = ByteSize>) -> Self {
        self.sizes = Some(sizes.into_iter().collect());
        self
    }

    /// Seed of all orders.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Bound of every wait for a device or, beyond the budget, for a rank that measures.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Keeps the run as a result folder, with the answer as `preflight.json`; where several ranks
    /// measure, in a folder `rank-N` of it each. Without it nothing is written.
    pub fn out(mut self, dir: &Path, options: RecordOptions) -> Self {
        self.out = Some(Folder { dir: dir.to_owned(), options });
        self
    }

    /// What [`run`](Self::run) would measure.
    ///
    /// # Errors
    /// As [`H2dPlanBuilder::build`](crate::plan::H2dPlanBuilder::build), and for a share that is none.
    pub fn plan(&self, machine: &Machine, baseline: &Baseline) -> Result<H2dPlan> {
        if !(self.min_change > 0.0 && self.min_change < 1.0) {
            let message = format!("{}: must be above 0 and below 1, such as 5%", self.min_change);
            return Err(Error::invalid("--min-change", message));
        }
        let mut builder = H2dPlan::builder()
            .repeats(REPEATS)
            .seed(self.seed)
            .timeout(self.timeout)
            .min_effect(self.min_effect)
            .sample(Some(Sampling::within(self.budget)));
        if let Some(cpus) = &self.cpus {
            builder = builder.cpus(cpus.iter().copied());
        }
        if let Some(devices) = &self.devices {
            builder = builder.devices(devices.iter().copied());
        }
        if let Some(sizes) = &self.sizes {
            builder = builder.sizes(sizes.iter().copied());
        } else {
            let mut sizes = baseline.sizes();
            if sizes.first().is_some_and(|smallest| *smallest <= LARGEST) {
                sizes.retain(|size| *size <= LARGEST);
            } else {
                sizes.truncate(1);
            }
            if sizes.is_empty() {
                sizes = SIZES.map(ByteSize::mib).to_vec();
            }
            builder = builder.sizes(sizes);
        }
        let mut plan = builder.build(machine)?;
        let budget = self.budget.as_secs_f64();
        let sweep = (PLANNED * budget - setup_seconds(&plan, machine)).max(LEAST_SWEEP * budget);
        plan.sample = Some(Sampling::within(Duration::from_secs_f64(sweep)));
        Ok(plan)
    }

    /// Measures and answers. Of several ranks all call this with the same settings, each with its own
    /// `group`, and all get the same answer: the lowest rank of each host measures, the others wait.
    ///
    /// # Errors
    /// When nothing can be measured: an argument, a device or memory, the folder. On all ranks when one
    /// of them is lost or fails, naming it; [`Error::Cancelled`] on a rank that was asked to end while it
    /// waited. A rank that is asked to end while it measures answers inconclusive.
    ///
    /// # Thread binding
    /// As [`sweep::h2d`].
    pub fn run(
        &self,
        machine: &Machine,
        baseline: &Baseline,
        group: Option<&mut RankGroup>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome> {
        if let Some(group) = group.filter(|group| group.size() > 1) {
            return ranks::run(self, machine, baseline, group, &ranks::this_host(), observer);
        }
        let node = self.measure(machine, baseline, 0, self.out.as_ref(), observer)?;
        let outcome = Outcome::of(self, vec![node]);
        self.keep(&outcome, self.out.as_ref())?;
        Ok(outcome)
    }

    fn keep(&self, outcome: &Outcome, out: Option<&Folder>) -> Result<()> {
        out.map_or(Ok(()), |out| write_json(&out.dir.join(PREFLIGHT), outcome))
    }

    /// This rank's folder, where several measure.
    fn folder_of(&self, rank: u32) -> Option<Folder> {
        let out = self.out.as_ref()?;
        Some(Folder { dir: out.dir.join(format!("rank-{rank}")), options: out.options })
    }

    fn measure(
        &self,
        machine: &Machine,
        baseline: &Baseline,
        rank: u32,
        out: Option<&Folder>,
        observer: &mut dyn Observer,
    ) -> Result<NodeOutcome> {
        let began = Instant::now();
        let plan = self.plan(machine, baseline)?;
        let census = machine.census()?.clone();
        let affinity = AffinityFile::of(&census);
        let report = match out {
            Some(out) => record_h2d("preflight", machine, &plan, &out.dir, &out.options, observer)?,
            None => in_memory(machine, &plan, affinity.clone(), observer)?,
        };
        if report.manifest.status == RunStatus::Complete
            && let Some(nothing) = report.nothing_measured()
        {
            return Err(nothing);
        }
        let mut node = NodeOutcome {
            host: report.manifest.environment.hostname.clone(),
            rank,
            backend: report.manifest.environment.backend.clone(),
            verdict: Gate::Pass,
            reasons: Vec::new(),
            findings: Vec::new(),
            baseline: None,
            notes: report.manifest.notes.clone(),
            points: report.manifest.points.measured,
            wall_ns: report.manifest.wall_ns,
            host_ns: 0,
        };
        let mut reasons = Reasons::default();
        let setup = setup_seconds(&plan, machine);
        if setup > (PLANNED - LEAST_SWEEP) * self.budget.as_secs_f64() {
            node.notes.push(format!(
                "touching host memory may take {setup:.1} s beside the sweep, too much for the budget: \
                 fewer or smaller sizes need less"
            ));
        }
        let common = baseline.known.as_ref().map(|known| {
            let here = Origin::of(&report.manifest, Some(&affinity));
            let all = (self.cpus.is_none(), self.devices.is_none());
            let shape = Shape::of(machine, &plan, &here, known, all, &census.cpus);
            self.against(&mut node, &mut reasons, &report, known, shape)
        });
        let bindable = baseline.known.as_ref().and_then(|known| known.bindable.as_ref());
        self.judge(
            &mut node,
            &mut reasons,
            &report,
            common.flatten().as_ref(),
            (&census.cpus, bindable),
        );
        self.look_at_the_rest(&mut node, &mut reasons, machine, baseline, &census.cpus);
        let points = report.manifest.points;
        let why: Vec<&str> = report.reasons.keys().map(String::as_str).take(3).collect();
        let why = why.join("; ");
        if points.failed > 0 {
            reasons.fail.push(format!("{} points failed: {why}", points.failed));
        } else if points.skipped > 0 && reasons.fail.is_empty() {
            reasons.unclear.push(format!("{} points were skipped: {why}", points.skipped));
        }
        (node.verdict, node.reasons) = reasons.verdict();
        node.host_ns = nanoseconds(began.elapsed());
        Ok(node)
    }

    /// Devices and CPUs that are there and were not measured: nothing is left out by silence.
    fn look_at_the_rest(
        &self,
        node: &mut NodeOutcome,
        reasons: &mut Reasons,
        machine: &Machine,
        baseline: &Baseline,
        census: &[CpuRecord],
    ) {
        let known = baseline.known.as_ref();
        for device in machine.devices().iter().filter(|_| self.devices.is_none()) {
            let Some(why) = &device.info().unavailable else { continue };
            let text = format!("device {} is unavailable: {why}", device.id());
            match known {
                None => reasons.unclear.push(text),
                // One that the baseline has is lost, which is told where the two can be compared.
                Some(known) if known.has_device(device.id().0) => {
                    if node.baseline.as_ref().is_some_and(|known| !known.differences.is_empty()) {
                        reasons.unclear.push(text);
                    }
                }
                Some(_) => node.notes.push(format!("{text}; the baseline has it not either")),
            }
        }
        let offline: Vec<u32> =
            census.iter().filter(|cpu| !cpu.online).map(|cpu| cpu.cpu.0).collect();
        if self.cpus.is_none() && !offline.is_empty() {
            node.notes.push(format!("offline: CPU {}", list(&offline)));
        }
    }

    /// What the baseline says; the common cells where it can speak for this machine.
    fn against(
        &self,
        node: &mut NodeOutcome,
        reasons: &mut Reasons,
        report: &Report,
        known: &baseline::Known,
        shape: Shape,
    ) -> Option<Common> {
        let mut against = Against {
            name: known.name.clone(),
            host: known.run.as_ref().and_then(|run| run.host.clone()),
            start: known.run.as_ref().and_then(|run| run.start.clone()),
            differences: shape.differences,
            ..Against::default()
        };
        node.notes.extend(shape.notes);
        reasons.fail.extend(shape.lost_devices);
        if !shape.lost_cpus.is_empty() {
            let inference = "CPUs that could be bound in the baseline's run cannot be bound now.";
            let finding = shape::unbindable(&shape.lost_cpus, inference);
            reasons.fail.push(headline(&finding));
            node.findings.push(Judged { finding, in_baseline: false, fails: true });
        }
        let mut common = None;
        if against.differences.is_empty() {
            let found = Common::of(report, known);
            against.differences.extend(found.why_not.iter().cloned());
            against.cells = found.cells();
            if against.differences.is_empty() {
                against.changes = found.changes(self.min_change);
                self.tell(&against.changes, reasons, &mut node.notes);
                common = Some(found);
            }
        }
        let not_comparable = |why: &String| format!("not comparable with {}: {why}", known.name);
        reasons.unclear.extend(against.differences.iter().map(not_comparable));
        node.baseline = Some(against);
        common
    }

    /// Reasons that follow from changes: one for what all have in common.
    fn tell(&self, changes: &[Change], reasons: &mut Reasons, notes: &mut Vec<String>) {
        let in_state = |state| changes.iter().filter(move |change| change.state == state);
        let line = |change: &Change| format!("{}: {}", change.name(), change.numbers());
        let is_size = |change: &&Change| change.axis == "size";
        let slower = || in_state(ChangeState::Slower);
        reasons.fail.extend(slower().filter(is_size).map(line));
        // Devices and nodes that are no slower than the slowest size share its cause.
        let common = slower().filter(is_size).filter_map(|change| change.ratio);
        let common = common.fold(f64::INFINITY, f64::min);
        let common = if common.is_finite() { common } else { 1.0 };
        let is_own = |change: &&Change| {
            !is_size(change)
                && change.ratio.is_some_and(|ratio| ratio < common * (1.0 - self.min_change))
        };
        reasons.fail.extend(slower().filter(is_own).map(line));
        for change in in_state(ChangeState::Faster) {
            notes.push(format!(
                "faster than the baseline, which is of another time: {}",
                line(change)
            ));
        }
        let unknown: Vec<&Change> = in_state(ChangeState::Unknown).collect();
        let percent = 100.0 * self.min_change;
        for change in unknown.iter().take(3) {
            reasons
                .unclear
                .push(format!("a slowdown of {percent:.1} % cannot be excluded: {}", line(change)));
        }
        if unknown.len() > 3 {
            let more = unknown.len() - 3;
            reasons.unclear.push(format!("nor for {more} more: a larger --budget tells more"));
        }
    }

    /// What the run says by itself.
    fn judge(
        &self,
        node: &mut NodeOutcome,
        reasons: &mut Reasons,
        report: &Report,
        common: Option<&Common>,
        (census, bindable): (&[CpuRecord], Option<&BTreeSet<u32>>),
    ) {
        let told: Vec<u32> =
            node.findings.iter().flat_map(|judged| judged.finding.cpus.clone()).collect();
        let mut findings = report.diagnosis.findings.clone();
        for finding in &mut findings {
            if finding.kind == Kind::Unbindable {
                finding.cpus.retain(|cpu| !told.contains(cpu));
            }
        }
        findings.retain(|finding| finding.kind != Kind::Unbindable || !finding.cpus.is_empty());
        if self.cpus.is_none() {
            let refused = shape::refused(census);
            let (usual, refused): (Vec<_>, Vec<_>) = refused
                .into_iter()
                .filter(|(cpu, _)| !told.contains(cpu))
                .partition(|(cpu, _)| bindable.is_some_and(|bindable| !bindable.contains(cpu)));
            if !usual.is_empty() {
                let cpus: Vec<u32> = usual.iter().map(|(cpu, _)| *cpu).collect();
                let cpus = list(&cpus);
                node.notes.push(format!("as in the baseline: CPU {cpus} cannot be bound"));
            }
            if !refused.is_empty() {
                let inference = "The kernel has these CPUs in use and lets this process have them, \
                                 but no thread of it could be bound to them.";
                findings.push(shape::unbindable(&refused, inference));
            }
        }
        for finding in findings {
            let is_of_rates = finding.effect.is_some();
            let in_baseline = is_of_rates
                && !finding.is_artefact
                && common.is_some_and(|common| common.has(&finding, self.min_change));
            let decided = !finding.is_artefact && !finding.kind.is_undecided();
            let fails = decided && !in_baseline;
            if fails {
                reasons.fail.push(headline(&finding));
            } else if decided {
                node.notes.push(format!("as in the baseline: {}", headline(&finding)));
            } else if finding.kind.is_undecided() {
                let facts = finding.facts.first().map_or("", String::as_str);
                reasons.unclear.push(format!("{}: {facts}", headline(&finding)));
            }
            node.findings.push(Judged { finding, in_baseline, fails });
        }
    }
}

/// Why not pass.
#[derive(Debug, Default)]
struct Reasons {
    fail: Vec<String>,
    unclear: Vec<String>,
}

impl Reasons {
    fn verdict(mut self) -> (Gate, Vec<String>) {
        let verdict = if !self.fail.is_empty() {
            Gate::Fail
        } else if !self.unclear.is_empty() {
            Gate::Inconclusive
        } else {
            Gate::Pass
        };
        self.fail.append(&mut self.unclear);
        (verdict, self.fail)
    }
}

/// What touching host memory takes before the sweep, at a rate that every machine has.
fn setup_seconds(plan: &H2dPlan, machine: &Machine) -> f64 {
    plan.cost(machine, Bandwidth::gb_per_second(1.0)).setup_seconds
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Keeps the samples, where there is no folder for them.
struct Keeper<'a> {
    samples: Vec<Sample>,
    inner: &'a mut dyn Observer,
}

impl Observer for Keeper<'_> {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.samples.push(sample.clone());
        self.inner.sample(sample)
    }

    fn between_visits(&mut self, progress: &Progress) {
        self.inner.between_visits(progress);
    }

    fn is_cancelled(&self) -> bool {
        self.inner.is_cancelled()
    }
}

/// The run as [`record_h2d`] would judge it.
fn in_memory(
    machine: &Machine,
    plan: &H2dPlan,
    affinity: AffinityFile,
    observer: &mut dyn Observer,
) -> Result<Report> {
    let mut manifest = Manifest::of_machine("preflight", PlanRecord::of_h2d(plan.clone()), machine);
    let mut disturbances = manifest.environment.disturbances(machine.topology().online().len());
    disturbances.extend(machine.device_activity().iter().flat_map(DeviceActivity::disturbances));
    manifest.notes =
        disturbances.iter().map(|reason| format!("the node was not quiet: {reason}")).collect();
    let mut keeper = Keeper { samples: Vec::new(), inner: observer };
    let mut result = sweep::h2d(machine, plan, &mut keeper)?;
    manifest.notes.append(&mut result.notes);
    manifest.timings = result.end.timings;
    manifest.wall_ns = result.end.timings.wall_ns;
    manifest.status =
        if result.end.complete { RunStatus::Complete } else { RunStatus::Interrupted };
    Report::of_samples(manifest, Some(affinity), &keeper.samples)
}

#[cfg(test)]
mod tests;
