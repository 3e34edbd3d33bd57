//! A sweep recorded into a result folder: manifest, log, resume, outputs.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster_health_core::Machine;
use cluster_health_core::affinity::Census;
use cluster_health_core::load::{FULL_UTILISATION, LoadRecord};
use cluster_health_core::rank::RankGroup;
use serde::{Deserialize, Serialize};

use crate::environment::{ActivityWatch, Environment};
use crate::error::{Error, Result};
use crate::observer::{Observer, Progress};
use crate::older::import::{ImportRequest, Imported};
use crate::plan::{CorePairPlan, H2dPlan};
use crate::report::{Report, ReportOptions};
use crate::run::{
    FolderLock, ImportPlan, LoadProfileRecord, MANIFEST, Manifest, OpenMode, Opened, PlanRecord,
    RunFolder, RunStatus, SampleReader, Segment, timings_of_log, utc_now, write_json,
};
use crate::samples::{Sample, Sweep};
use crate::sweep::{Course, RunClock, Timings, core_pair_in, h2d_in, not_this_plan};

/// What to do with the folder.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct RecordOptions {
    /// How the folder is opened.
    pub mode: OpenMode,
    /// How the outputs look.
    pub report: ReportOptions,
}

impl RecordOptions {
    /// Opens the folder in this mode.
    #[must_use]
    pub const fn with_mode(mut self, mode: OpenMode) -> Self {
        self.mode = mode;
        self
    }

    /// Writes outputs that look so.
    #[must_use]
    pub const fn with_report(mut self, report: ReportOptions) -> Self {
        self.report = report;
        self
    }
}

/// Passes every sample to the log before the caller's observer sees it.
struct Recorder<'a, 'machine> {
    folder: &'a mut RunFolder,
    watch: &'a mut ActivityWatch<'machine>,
    inner: &'a mut dyn Observer,
}

impl Observer for Recorder<'_, '_> {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.folder.append(sample)?;
        self.inner.sample(sample)
    }

    fn between_visits(&mut self, progress: &Progress) {
        self.watch.during(progress.done >= progress.total);
        self.inner.between_visits(progress);
    }

    fn is_cancelled(&self) -> bool {
        self.inner.is_cancelled()
    }
}

/// Runs an H2D sweep into `dir` and writes every output, see [`record`].
///
/// # Errors
/// As [`record`].
pub fn record_h2d(
    command: &str,
    machine: &Machine,
    plan: &H2dPlan,
    dir: &Path,
    options: &RecordOptions,
    observer: &mut dyn Observer,
) -> Result<Report> {
    let plan = PlanRecord::of_h2d(plan.clone());
    record(command, machine, &plan, &mut no_ranks, Vec::new(), dir, options, observer)
}

fn no_ranks() -> Result<Arc<RankGroup>> {
    Err(Error::invalid("ranks", "this sweep needs none"))
}

/// Runs a core-pair sweep into `dir` and writes every output, see [`record`].
///
/// # Errors
/// As [`record`].
pub fn record_core_pair(
    command: &str,
    machine: &Machine,
    plan: &CorePairPlan,
    ranks: StartRanks<'_>,
    dir: &Path,
    options: &RecordOptions,
    observer: &mut dyn Observer,
) -> Result<Report> {
    let plan = PlanRecord::of_core_pair(plan.clone());
    record(command, machine, &plan, ranks, Vec::new(), dir, options, observer)
}

/// Gives rank 0 its group when the pair sweep begins; never called for a synthetic machine, nor when
/// nothing of the sweep is left to measure: ranks that wait in [`follow`] are then to be told with
/// [`dismiss`].
pub type StartRanks<'a> = &'a mut dyn FnMut() -> Result<Arc<RankGroup>>;

/// A rank that waits for rank 0 looks so often whether it was asked to end.
const LOOK_UP: Duration = Duration::from_millis(200);

/// What rank 0 tells the others when the pair sweep begins.
#[derive(Debug, Serialize, Deserialize)]
struct Start {
    plan: CorePairPlan,
    first_seq: u64,
    /// Points of the sweep that the log has already.
    before: u64,
    dir: PathBuf,
}

/// Rank 0's message to the others.
#[derive(Debug, Serialize, Deserialize)]
enum Call {
    Begin(Box<Start>),
    /// Nothing is to be measured now; whether the run is complete.
    Nothing(bool),
}

impl Call {
    fn send(&self, group: &RankGroup, plan: &CorePairPlan) -> Result<()> {
        let message = serde_json::to_vec(self)
            .map_err(|error| Error::format("the plan", error.to_string()))?;
        for rank in 1..group.size() {
            group.send(rank, &message)?;
        }
        Ok(group.all_equal("the plan", &plan_text(plan)?)?)
    }
}

/// Tells the ranks that wait in [`follow`] for a sweep of `plan` that there is nothing to measure,
/// because the run is complete or ended before its pair sweep. For a rank 0 whose group is still
/// unused when [`record`] returns.
///
/// # Errors
/// When the ranks were asked for different things, or one of them is lost or hangs.
pub fn dismiss(group: &RankGroup, plan: &CorePairPlan, complete: bool) -> Result<()> {
    Call::Nothing(complete).send(group, plan)
}

/// What rank 0 does before the pair sweep, and so how long [`follow`] waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RankZero {
    /// Nothing: it must begin within the group's timeout.
    Begins,
    /// It measures other things first: as long as it lives.
    MeasuresFirst,
}

/// Takes part in the pair sweep that rank 0 records: the other rank of [`record_core_pair`] and
/// [`record`]. `own` is what this rank was asked for; rank 0 must have been asked for the same.
/// Waits for rank 0 as long as that lives and `observer` is not cancelled. True when the sweep came to its end, or had before.
///
/// # Errors
/// When the ranks were asked for different things, or one of them is lost or hangs.
pub fn follow(
    machine: &Machine,
    own: &CorePairPlan,
    group: &mut RankGroup,
    after: RankZero,
    observer: &mut dyn Observer,
) -> Result<bool> {
    let timeout = group.timeout();
    let began = Instant::now();
    // Rank 0 may measure other things first.
    group.set_timeout(LOOK_UP);
    let message = loop {
        match group.receive(0) {
            Err(cluster_health_core::Error::Rank { timed_out: true, .. }) => {
                if observer.is_cancelled() {
                    return Ok(false);
                }
                if after == RankZero::Begins && began.elapsed() > timeout {
                    break Err(cluster_health_core::Error::rank_timeout(0, timeout));
                }
            }
            received => break received,
        }
    };
    group.set_timeout(timeout);
    let message = message?;
    group.all_equal("the plan", &plan_text(own)?)?;
    let call = serde_json::from_slice(&message)
        .map_err(|error| Error::format("rank 0's plan", error.to_string()))?;
    let start = match call {
        Call::Begin(start) => start,
        Call::Nothing(complete) => return Ok(complete),
    };
    let log = if start.before > 0 { Some(SampleReader::open(&start.dir)?) } else { None };
    let mut before = log
        .into_iter()
        .flatten()
        .filter(|sample| sample.as_ref().map_or(true, |sample| sample.sweep.is_pair()))
        .take(usize::try_from(start.before).unwrap_or(usize::MAX));
    let mut clock = RunClock::new(0);
    let first_seq = start.first_seq;
    let mut course = Course { before: &mut before, clock: &mut clock, first_seq, observer };
    Ok(core_pair_in(machine, &start.plan, Some(group), &mut course)?.end.complete)
}

/// The text that ranks compare.
fn plan_text(plan: &CorePairPlan) -> Result<String> {
    serde_json::to_string_pretty(plan).map_err(|error| Error::format("the plan", error.to_string()))
}

/// Runs the sweeps of `plan`, first H2D, then core pairs, into `dir` and writes every output.
/// `command` is what the manifest says made the folder, `notes` what its reader should know.
///
/// A complete run of the same plan is left as it is with [`OpenMode::Resume`].
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), or a sweep or an output fails (what
/// was measured before stays in the log and `--resume` goes on).
#[allow(clippy::too_many_arguments, reason = "each is a thing of its own; most have one caller")]
pub fn record(
    command: &str,
    machine: &Machine,
    plan: &PlanRecord,
    ranks: StartRanks<'_>,
    notes: Vec<String>,
    dir: &Path,
    options: &RecordOptions,
    observer: &mut dyn Observer,
) -> Result<Report> {
    let mut wanted = Manifest::of_machine(command, plan.clone(), machine);
    wanted.notes = notes;
    let (mut folder, mut manifest) = match RunFolder::open(dir, options.mode, &wanted)? {
        Opened::Complete(found) => return finished(&found, dir, &options.report),
        Opened::Fresh(folder) => (folder, wanted),
        Opened::Interrupted(folder, mut manifest) => {
            account_for_crash(&mut manifest, dir)?;
            (folder, *manifest)
        }
    };
    folder.write_affinity(machine.census()?)?;
    manifest.status = RunStatus::Running;
    // Given with the outputs.
    manifest.verdict = None;
    manifest.segments.push(Segment {
        start: utc_now(),
        end: None,
        first_seq: folder.next_seq(),
        wall_ns: 0,
        host_ns: 0,
    });
    folder.write_manifest(&manifest)?;

    let quiet = Environment::of(machine).disturbances(machine.topology().online().len());
    for reason in quiet {
        note(&mut manifest, format!("the node was not quiet: {reason}"));
    }
    let mut watch = ActivityWatch::begin(machine);
    let throttled = machine.topology().read_nr_throttled().ok().flatten();
    let began = Instant::now();
    let mut timings = Timings::default();
    let mut found = Vec::new();
    let mut loads = Vec::new();
    let account =
        Account { timings: &mut timings, notes: &mut found, watch: &mut watch, loads: &mut loads };
    let result = measure(machine, plan, ranks, &mut folder, account, observer);
    let (activity, notes) = watch.end();
    manifest.device_activity.extend(activity);
    for (sweep, records) in loads {
        LoadProfileRecord::add(&mut manifest.load_profiles, sweep, records);
    }
    found.extend(notes);
    found.extend(load_notes(&manifest));
    for text in found {
        note(&mut manifest, text);
    }
    let after = machine.topology().read_nr_throttled().ok().flatten();
    if let (Some(before), Some(after)) = (throttled, after)
        && after > before
    {
        let times = after - before;
        note(
            &mut manifest,
            format!("the cgroup was throttled {times} times during the run: times include waiting"),
        );
    }
    if result.is_err() {
        // The sweep's own accounts went with it; the log has the same.
        let first_seq = manifest.segments.last().map_or(0, |segment| segment.first_seq);
        timings = timings_of_log(dir, first_seq).unwrap_or(timings);
    }
    let result = match result {
        // A Ctrl-C goes to all processes of a terminal, and ends a rank that is only starting.
        Err(Error::Core(cluster_health_core::Error::Rank { timed_out: false, .. }))
            if observer.is_cancelled() =>
        {
            Ok(false)
        }
        other => other,
    };

    if let Some(segment) = manifest.segments.last_mut() {
        segment.end = Some(utc_now());
        segment.host_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        segment.wall_ns = timings.wall_ns;
        manifest.host_ns = manifest.host_ns.saturating_add(segment.host_ns);
        manifest.wall_ns = manifest.wall_ns.saturating_add(segment.wall_ns);
        manifest.timings += timings;
    }
    let complete = result.as_ref().is_ok_and(|complete| *complete);
    manifest.status = if complete { RunStatus::Complete } else { RunStatus::Interrupted };
    let synced = folder.sync();
    let written = folder.write_manifest(&manifest);
    if let Err(error) = result {
        // It comes before any other: those are most likely its consequence. The outputs show what
        // was measured until then.
        if folder.next_seq() > 0
            && let Ok(mut report) = Report::read(dir)
        {
            report.write(dir, &options.report).ok();
        }
        return Err(error);
    }
    synced?;
    written?;
    let mut report = Report::read(dir)?;
    report.write(dir, &options.report)?;
    Ok(report)
}

/// Marks the run in `dir` as interrupted for `reason`: for a host that ends its process because a call
/// below [`record`] does not return. What was measured is in the log already; `--resume` goes on.
///
/// # Errors
/// When the manifest cannot be read or written.
pub fn abandon(dir: &Path, reason: &str) -> Result<()> {
    let mut manifest = Manifest::read(dir)?;
    if manifest.status != RunStatus::Running {
        return Ok(());
    }
    manifest.status = RunStatus::Interrupted;
    note(&mut manifest, format!("the run was ended: {reason}"));
    write_json(&dir.join(MANIFEST), &manifest)
}

/// The report of a run that has every point. One that was killed then lacks outputs, of which the
/// verdict in the manifest is the last.
fn finished(found: &Manifest, dir: &Path, options: &ReportOptions) -> Result<Report> {
    if found.verdict.is_some() {
        return Report::read(dir);
    }
    let _lock = FolderLock::take(dir)?;
    let mut report = Report::read(dir)?;
    report.write(dir, options)?;
    Ok(report)
}

/// What a reader should know about the loads of a run.
fn load_notes(manifest: &Manifest) -> Vec<String> {
    let mut notes = Vec::new();
    let records = &manifest.load_profiles;
    if let Some(quota) = manifest.environment.cpu_quota {
        for sweep in [Sweep::H2d, Sweep::D2h, Sweep::Bidirectional, Sweep::CorePair] {
            let of_sweep = records.iter().filter(|record| record.sweep == sweep);
            let ranks = of_sweep.clone().map(|record| record.load.rank + 1).max().unwrap_or(0);
            let burners =
                of_sweep.clone().map(|record| record.load.burners).max().unwrap_or(0) * ranks;
            if burners > 0 && f64::from(burners + ranks) > quota {
                notes.push(format!(
                    "{sweep}: the cgroup grants {quota} CPUs of time, {burners} burners of a load \
                     beside {ranks} measuring threads need {}: the load is throttled, and so is \
                     what is measured under it",
                    burners + ranks
                ));
            }
        }
    }
    for LoadProfileRecord { sweep, load } in records {
        if load.weak_points == 0 {
            continue;
        }
        let seqs: Vec<String> = load.weak_seqs.iter().take(5).map(ToString::to_string).collect();
        let more = if load.weak_points > 5 { ", …" } else { "" };
        notes.push(format!(
            "{sweep}: beside {} points a burner of load {} (rank {}) had less than {:.0} % of its \
             CPU or device (seq {}{more}; {:.1} % overall): other work runs there, or a quota \
             throttles it",
            load.weak_points,
            load.name,
            load.rank,
            100.0 * FULL_UTILISATION,
            seqs.join(", "),
            100.0 * load.utilisation.unwrap_or(0.0),
        ));
    }
    notes
}

fn note(manifest: &mut Manifest, text: String) {
    if !manifest.notes.contains(&text) {
        manifest.notes.push(text);
    }
}

/// Lets the other ranks begin the pair sweep.
fn begin(
    group: &RankGroup,
    plan: &CorePairPlan,
    first_seq: u64,
    before: u64,
    dir: &Path,
) -> Result<()> {
    let dir = std::path::absolute(dir).map_err(|error| Error::io("finding", dir, error))?;
    let start = Start { plan: plan.clone(), first_seq, before, dir };
    Call::Begin(Box::new(start)).send(group, plan)
}

/// A killed run left its last segment without end and accounts: the log has both.
fn account_for_crash(manifest: &mut Manifest, dir: &Path) -> Result<()> {
    let Some(segment) = manifest.segments.last_mut().filter(|segment| segment.end.is_none()) else {
        return Ok(());
    };
    let timings = timings_of_log(dir, segment.first_seq)?;
    segment.wall_ns = timings.wall_ns;
    manifest.wall_ns = manifest.wall_ns.saturating_add(timings.wall_ns);
    manifest.timings += timings;
    Ok(())
}

/// What is kept of the sweeps beside their samples.
struct Account<'a, 'machine> {
    /// What those took that did not fail.
    timings: &'a mut Timings,
    /// What they want a reader to know.
    notes: &'a mut Vec<String>,
    watch: &'a mut ActivityWatch<'machine>,
    /// What burned beside them.
    loads: &'a mut Vec<(Sweep, Vec<LoadRecord>)>,
}

/// Measures what is missing; true when nothing of the plan is left.
fn measure(
    machine: &Machine,
    plan: &PlanRecord,
    ranks: StartRanks<'_>,
    folder: &mut RunFolder,
    Account { timings, notes, watch, loads }: Account<'_, '_>,
    observer: &mut dyn Observer,
) -> Result<bool> {
    let resumed_at = folder.next_seq();
    let resumed = resumed_at > 0;
    let dir = folder.dir().to_owned();
    let start_ns = if resumed { folder.elapsed_ns(machine)? } else { 0 };
    let mut log = if resumed { Some(SampleReader::open(folder.dir())?) } else { None };
    let mut log = log.iter_mut().flatten().peekable();
    machine.advance_virtual_time(start_ns);
    let mut clock = RunClock::new(start_ns);
    let mut recorder = Recorder { folder, watch, inner: observer };
    let mut first_seq = 0;
    for is_pair in [false, true] {
        let mut before = std::iter::from_fn(|| {
            log.next_if(|next| !next.as_ref().is_ok_and(|next| next.sweep.is_pair() != is_pair))
        });
        let mut course =
            Course { before: &mut before, clock: &mut clock, first_seq, observer: &mut recorder };
        let end = match (is_pair, &plan.h2d, &plan.core_pair) {
            (false, Some(plan), _) => {
                let mut result = h2d_in(machine, plan, &mut course)?;
                notes.append(&mut result.notes);
                loads.push((plan.direction.sweep(), result.loads));
                result.end
            }
            (true, _, Some(plan)) => {
                let group = match machine.synthetic_pair() {
                    Some(_) => None,
                    None => Some(ranks()?),
                };
                if let Some(group) = &group {
                    let before = resumed_at.saturating_sub(first_seq);
                    begin(group, plan, first_seq, before, &dir)?;
                }
                let result = core_pair_in(machine, plan, group.as_deref(), &mut course)?;
                loads.push((Sweep::CorePair, result.loads));
                result.end
            }
            _ => continue,
        };
        *timings += end.timings;
        if !end.complete {
            return Ok(false);
        }
        first_seq = end.next_seq;
    }
    match log.next().transpose()? {
        Some(extra) => Err(not_this_plan(&extra)),
        None => Ok(true),
    }
}

/// Writes imported samples as a result folder, with every output.
///
/// # Errors
/// When the folder is not empty (unless replaced) or cannot be written.
pub fn record_import(
    request: &ImportRequest,
    imported: Imported,
    dir: &Path,
    mode: OpenMode,
    options: &ReportOptions,
) -> Result<Report> {
    let mut sizes: Vec<_> = imported.samples.iter().map(|sample| sample.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let plan = PlanRecord {
        import: Some(ImportPlan {
            format: request.format.as_str().to_owned(),
            sweep: request.sweep,
            sources: request.sources.iter().map(|path| file_name(path)).collect(),
            scan_order_assumed: imported.scan_order_assumed,
            rows: imported.rows,
            columns: imported.columns,
            sizes,
            device_pair: imported.device_pair,
        }),
        ..PlanRecord::default()
    };
    let order = format!("imported-{}", imported.scan_order);
    let mut manifest = Manifest::empty("import", plan, order);
    manifest.notes = imported.notes;
    if imported.scan_order_assumed {
        manifest.notes.push(format!(
            "the scan order {} is an assumption: the source does not tell",
            imported.scan_order
        ));
    }
    manifest.status = RunStatus::Complete;
    let Opened::Fresh(mut folder) = RunFolder::open(dir, mode, &manifest)? else {
        return Err(Error::invalid("--out", "an import cannot be resumed"));
    };
    if let Some(cpus) = imported.affinity {
        folder.write_affinity(&Census::from_records(cpus))?;
    }
    for sample in &imported.samples {
        folder.append(sample)?;
    }
    folder.write_manifest(&manifest)?;
    drop(imported.samples);
    let mut report = Report::read(dir)?;
    report.write(dir, options)?;
    Ok(report)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
