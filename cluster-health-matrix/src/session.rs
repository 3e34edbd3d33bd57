//! A sweep recorded into a result folder: manifest, log, resume, outputs.

use std::path::Path;
use std::time::Instant;

use cluster_health_core::Machine;
use cluster_health_core::affinity::Census;

use crate::error::{Error, Result};
use crate::observer::{Observer, Progress};
use crate::older::import::{ImportRequest, Imported};
use crate::plan::H2dPlan;
use crate::report::{Report, ReportOptions};
use crate::run::{
    ImportPlan, Manifest, OpenMode, Opened, PlanRecord, RunFolder, RunStatus, SampleReader,
    Segment, utc_now,
};
use crate::samples::Sample;
use crate::sweep::h2d_from;

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
struct Recorder<'a> {
    folder: &'a mut RunFolder,
    inner: &'a mut dyn Observer,
}

impl Observer for Recorder<'_> {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.folder.append(sample)?;
        self.inner.sample(sample)
    }

    fn between_visits(&mut self, progress: &Progress) {
        self.inner.between_visits(progress);
    }

    fn is_cancelled(&self) -> bool {
        self.inner.is_cancelled()
    }
}

/// Runs an H2D sweep into `dir` and writes every output. `command` is what the manifest says made
/// the folder.
///
/// A complete run of the same plan is left as it is with [`OpenMode::Resume`].
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), or the sweep or an output fails (what
/// was measured before stays in the log and `--resume` goes on).
pub fn record_h2d(
    command: &str,
    machine: &Machine,
    plan: &H2dPlan,
    dir: &Path,
    options: &RecordOptions,
    observer: &mut dyn Observer,
) -> Result<Report> {
    let wanted = Manifest::of_machine(command, PlanRecord::of_h2d(plan.clone()), machine);
    let (mut folder, mut manifest) = match RunFolder::open(dir, options.mode, &wanted)? {
        Opened::Complete(_) => return Report::read(dir),
        Opened::Fresh(folder) => (folder, wanted),
        Opened::Interrupted(folder, manifest) => (folder, *manifest),
    };
    folder.write_affinity(machine.census()?)?;
    let resumed = folder.next_seq() > 0;
    manifest.status = RunStatus::Running;
    manifest.segments.push(Segment {
        start: utc_now(),
        end: None,
        first_seq: folder.next_seq(),
        wall_ns: 0,
        host_ns: 0,
    });
    folder.write_manifest(&manifest)?;

    let began = Instant::now();
    let start_ns = if resumed { folder.elapsed_ns(machine)? } else { 0 };
    let mut before: Box<dyn Iterator<Item = Result<Sample>>> =
        if resumed { Box::new(SampleReader::open(dir)?) } else { Box::new(std::iter::empty()) };
    let mut recorder = Recorder { folder: &mut folder, inner: observer };
    let result = h2d_from(machine, plan, &mut before, start_ns, &mut recorder);

    if let Some(segment) = manifest.segments.last_mut() {
        segment.end = Some(utc_now());
        segment.host_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        manifest.host_ns += segment.host_ns;
        if let Ok(sweep) = &result {
            segment.wall_ns = sweep.end.timings.wall_ns;
            manifest.wall_ns += segment.wall_ns;
            manifest.timings += sweep.end.timings;
            for note in &sweep.notes {
                if !manifest.notes.contains(note) {
                    manifest.notes.push(note.clone());
                }
            }
        }
    }
    let complete = result.as_ref().is_ok_and(|sweep| sweep.end.complete);
    manifest.status = if complete { RunStatus::Complete } else { RunStatus::Interrupted };
    let synced = folder.sync();
    let written = folder.write_manifest(&manifest);
    // The sweep's own error comes first: the others are most likely its consequence.
    result.map(|_| ())?;
    synced?;
    written?;
    let mut report = Report::read(dir)?;
    report.write(dir, &options.report)?;
    Ok(report)
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
        h2d: None,
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
