//! The result folder of what is measured in visits rather than in points of a log.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::output::{first_page, printable};
use crate::run::{
    FolderLock, Manifest, OpenMode, Opened, RunFolder, RunStatus, Segment, read_json, utc_now,
    write_by_rename, write_json,
};
use crate::session::StartRanks;

/// The output that is written last.
const REPORT: &str = "report.md";

/// What a folder holds beside its manifest.
pub(crate) trait Outcome: Serialize {
    /// Name of the JSON file that all other outputs are made from.
    const FILE: &'static str;

    /// Counts the points; false when it was interrupted.
    fn account(&self, manifest: &mut Manifest) -> bool;

    /// Writes the outputs beside that file.
    ///
    /// # Errors
    /// When a file cannot be written.
    fn write_outputs(&self, dir: &Path, manifest: &Manifest) -> Result<()>;
}

/// Measures into a result folder with the group that `ranks` gives, if any. Its `samples.jsonl` stays
/// empty. `None` when the run in it is complete; an interrupted one begins anew.
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), `measure` fails, or a file cannot be
/// written.
pub(crate) fn record<T: Outcome + DeserializeOwned>(
    machine: &Machine,
    mut manifest: Manifest,
    ranks: Option<StartRanks<'_>>,
    dir: &Path,
    mode: OpenMode,
    measure: impl FnOnce(Option<&RankGroup>) -> Result<T>,
) -> Result<Option<T>> {
    let folder = match RunFolder::open(dir, mode, &manifest)? {
        Opened::Complete(found) => {
            // The last of the outputs: without it the run was killed while it wrote them.
            if !dir.join(REPORT).exists() {
                let _lock = FolderLock::take(dir)?;
                read::<T>(dir)?.write_outputs(dir, &found)?;
            }
            return Ok(None);
        }
        Opened::Fresh(folder) => folder,
        Opened::Interrupted(folder, _) => {
            fs::remove_file(dir.join(REPORT)).ok();
            folder
        }
    };
    folder.write_affinity(machine.census()?)?;
    for reason in Environment::of(machine).disturbances(machine.topology().online().len()) {
        manifest.notes.push(format!("the node was not quiet: {reason}"));
    }
    let mut segment = Segment { start: utc_now(), end: None, first_seq: 0, wall_ns: 0, host_ns: 0 };
    manifest.segments = vec![segment.clone()];
    folder.write_manifest(&manifest)?;
    let group = ranks.map(|start| start()).transpose();
    let (began, clock) = (Instant::now(), machine.now_ns());
    let result = group.and_then(|group| measure(group.as_deref()));
    manifest.wall_ns = machine.now_ns().saturating_sub(clock);
    manifest.host_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    segment.end = Some(utc_now());
    segment.wall_ns = manifest.wall_ns;
    segment.host_ns = manifest.host_ns;
    manifest.segments = vec![segment];
    manifest.status = RunStatus::Interrupted;
    if let Ok(outcome) = &result {
        if outcome.account(&mut manifest) {
            manifest.status = RunStatus::Complete;
        }
        // Before the manifest: a folder that says complete has its results.
        write_json(&dir.join(T::FILE), outcome)?;
    }
    folder.write_manifest(&manifest)?;
    let outcome = result?;
    outcome.write_outputs(dir, &manifest)?;
    Ok(Some(outcome))
}

/// Reads what [`record`] wrote.
///
/// # Errors
/// When it is missing or cannot be read.
pub(crate) fn read<T: Outcome + DeserializeOwned>(dir: &Path) -> Result<T> {
    let path = dir.join(T::FILE);
    if !path.exists() {
        let message = "is missing: the run ended before its results were written; measure it again \
                       with --resume";
        return Err(Error::format(path.display().to_string(), message));
    }
    read_json(&path)
}

/// Writes `report.md`: the title, the notes of the run, and `body`.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn write_report(
    dir: &Path,
    command: &str,
    manifest: &Manifest,
    body: &str,
) -> Result<()> {
    let place = first_page::place(manifest);
    let mut text = format!("# cluster-health {command} on {place}\n\n");
    for note in &manifest.notes {
        text.push_str(&format!("- Note: {note}.\n"));
    }
    if !manifest.notes.is_empty() {
        text.push('\n');
    }
    text.push_str(body);
    let text = printable(text);
    write_by_rename(&dir.join(REPORT), |out| out.write_all(text.as_bytes()))
}

/// Writes a workbook of these tables, each a name, a header and rows, then the census and the environment.
///
/// # Errors
/// When it cannot be written, or `affinity.json` cannot be read.
#[cfg(feature = "xlsx")]
pub(crate) fn write_workbook(
    dir: &Path,
    name: &str,
    manifest: &Manifest,
    mut tables: Vec<crate::output::xlsx::Table>,
) -> Result<()> {
    use crate::output::xlsx::{Workbook, write_by_rename};
    use crate::run::AFFINITY;
    let path = dir.join(AFFINITY);
    let affinity = if path.exists() { Some(read_json(&path)?) } else { None };
    tables.extend(crate::report::surroundings(affinity.as_ref(), manifest));
    // What it cuts or splits stands in its own sheet of notes.
    write_by_rename(dir, name, &Workbook::new(Vec::new(), tables).of_run(manifest))?;
    Ok(())
}
