//! The result folder of a validation.

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;

use super::output::{VALIDATE_CSV, VALIDATE_JSON, write_csv};
use super::{LineStatus, Table, ValidatePlan, markdown, measure};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::output::first_page;
use crate::run::{
    FolderLock, MANIFEST, Manifest, OpenMode, Opened, PlanRecord, RunFolder, RunStatus, Segment,
    read_json, utc_now, write_by_rename, write_json,
};

/// Measures the table into a result folder: `run.json`, `affinity.json`, `validate.json`,
/// `validate.csv`, `report.md`. `samples.jsonl` stays empty.
///
/// With [`OpenMode::Resume`] a complete run is left as it is, an interrupted one begins anew.
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), a rank is lost, or a file cannot be
/// written.
pub fn record(
    machine: &Machine,
    plan: &ValidatePlan,
    group: Option<&RankGroup>,
    dir: &Path,
    mode: OpenMode,
    observer: &mut dyn Observer,
) -> Result<Table> {
    let record = PlanRecord { validate: Some(plan.clone()), ..PlanRecord::default() };
    let mut manifest = Manifest::of_machine("validate", record, machine);
    manifest.seed = plan.seed;
    let folder = match RunFolder::open(dir, mode, &manifest)? {
        Opened::Complete(_) => return read_json(&dir.join(VALIDATE_JSON)),
        Opened::Fresh(folder) | Opened::Interrupted(folder, _) => folder,
    };
    folder.write_affinity(machine.census()?)?;
    let online = machine.topology().online().len();
    for reason in Environment::of(machine).disturbances(online) {
        manifest.notes.push(format!("the node was not quiet: {reason}"));
    }
    let segment = Segment { start: utc_now(), end: None, first_seq: 0, wall_ns: 0, host_ns: 0 };
    manifest.segments.push(segment);
    folder.write_manifest(&manifest)?;
    let (began, clock) = (Instant::now(), machine.now_ns());
    let result = measure::lead(machine, plan, group, observer);
    manifest.wall_ns = machine.now_ns().saturating_sub(clock);
    manifest.host_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    if let Some(segment) = manifest.segments.last_mut() {
        segment.end = Some(utc_now());
        segment.wall_ns = manifest.wall_ns;
        segment.host_ns = manifest.host_ns;
    }
    let complete = result.as_ref().is_ok_and(|table| table.complete);
    manifest.status = if complete { RunStatus::Complete } else { RunStatus::Interrupted };
    if let Ok(table) = &result {
        manifest.points.measured = table.count(LineStatus::Measured) as u64;
        manifest.points.failed = table.count(LineStatus::Failed) as u64;
    }
    folder.write_manifest(&manifest)?;
    let table = result?;
    write_json(&dir.join(VALIDATE_JSON), &table)?;
    write_outputs(dir, &manifest, &table)?;
    Ok(table)
}

/// Every other rank of [`record`]; false when it was asked to end.
///
/// # Errors
/// When the ranks were asked for different things, or rank 0 is lost.
pub fn follow(
    machine: &Machine,
    plan: &ValidatePlan,
    group: &RankGroup,
    observer: &mut dyn Observer,
) -> Result<bool> {
    measure::follow(machine, plan, group, observer)
}

/// Makes `validate.csv` and `report.md` again from `validate.json`.
///
/// # Errors
/// When the folder holds no validation, is in use or cannot be written.
pub fn rewrite(dir: &Path) -> Result<Table> {
    let _lock = FolderLock::take(dir)?;
    let manifest = Manifest::read(dir)?;
    if manifest.plan.validate.is_none() {
        let message = "the plan is that of another command";
        return Err(Error::format(dir.join(MANIFEST).display().to_string(), message));
    }
    let table: Table = read_json(&dir.join(VALIDATE_JSON))?;
    write_outputs(dir, &manifest, &table)?;
    Ok(table)
}

fn write_outputs(dir: &Path, manifest: &Manifest, table: &Table) -> Result<()> {
    write_by_rename(&dir.join(VALIDATE_CSV), |out| write_csv(table, out))?;
    let mut report = format!("# cluster-health validate on {}\n\n", first_page::place(manifest));
    for note in &manifest.notes {
        report.push_str(&format!("- Note: {note}.\n"));
    }
    if !manifest.notes.is_empty() {
        report.push('\n');
    }
    report.push_str(&markdown(table));
    write_by_rename(&dir.join("report.md"), |out| out.write_all(report.as_bytes()))
}
