//! The result folder of a size sweep, and several of them beside each other.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;

use super::output::{SIZES_CSV, SIZES_JSON, SIZES_PNG, markdown, write_csv};
use super::{SizeSweep, SizesPlan, measure};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::output::first_page;
use crate::run::{
    FolderLock, MANIFEST, Manifest, OpenMode, Opened, PlanRecord, RunFolder, RunStatus, Segment,
    SizesRecord, read_json, utc_now, write_by_rename, write_json,
};

/// Measures a size sweep into a result folder: `run.json`, `affinity.json`, `sizes.json`,
/// `sizes.csv`, `sizes.png`, `report.md`. `samples.jsonl` stays empty: every visit is in `sizes.json`.
///
/// With [`OpenMode::Resume`] a complete run is left as it is, an interrupted one begins anew.
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), the other rank is lost, or a file
/// cannot be written.
pub fn record(
    machine: &Machine,
    plan: &SizesPlan,
    group: Option<&RankGroup>,
    dir: &Path,
    mode: OpenMode,
    observer: &mut dyn Observer,
) -> Result<SizeSweep> {
    let sizes = Some(SizesRecord::Measured(plan.clone()));
    let record = PlanRecord { sizes, ..PlanRecord::default() };
    let mut manifest = Manifest::of_machine("sizes", record, machine);
    manifest.seed = plan.seed;
    let folder = match RunFolder::open(dir, mode, &manifest)? {
        Opened::Complete(_) => return read(dir),
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
    let complete = result.as_ref().is_ok_and(|sweep| sweep.complete);
    manifest.status = if complete { RunStatus::Complete } else { RunStatus::Interrupted };
    if let Ok(sweep) = &result {
        for visit in sweep.series.iter().flat_map(|series| &series.visits) {
            match visit.times {
                Some(_) => manifest.points.measured += 1,
                None => manifest.points.failed += 1,
            }
        }
    }
    folder.write_manifest(&manifest)?;
    let sweep = result?;
    write_json(&dir.join(SIZES_JSON), &sweep)?;
    write_outputs(dir, &manifest, &sweep)?;
    Ok(sweep)
}

/// The other rank of [`record`]; false when it was asked to end.
///
/// # Errors
/// When the ranks were asked for different things, or rank 0 is lost.
pub fn follow(
    machine: &Machine,
    plan: &SizesPlan,
    group: &RankGroup,
    observer: &mut dyn Observer,
) -> Result<bool> {
    measure::follow(machine, plan, group, observer)
}

/// Writes an imported sweep as a result folder; `sources` are the names of its files.
///
/// # Errors
/// When the folder cannot be written.
pub fn record_import(
    sweep: &SizeSweep,
    sources: Vec<String>,
    dir: &Path,
    mode: OpenMode,
) -> Result<()> {
    let sizes = Some(SizesRecord::Imported { sources });
    let plan = PlanRecord { sizes, ..PlanRecord::default() };
    let mut manifest = Manifest::empty("import", plan, "imported-ascending".to_owned());
    manifest.status = RunStatus::Complete;
    manifest.points.measured = sweep.measured() as u64;
    let Opened::Fresh(folder) = RunFolder::open(dir, mode, &manifest)? else {
        return Err(Error::invalid("--out", "an import cannot be resumed"));
    };
    folder.write_manifest(&manifest)?;
    write_json(&dir.join(SIZES_JSON), sweep)?;
    write_outputs(dir, &manifest, sweep)
}

/// Reads the size sweep of a result folder.
///
/// # Errors
/// When the folder holds none.
pub fn read(dir: &Path) -> Result<SizeSweep> {
    let manifest = Manifest::read(dir)?;
    if manifest.plan.sizes.is_none() {
        let message = "holds no size sweep: the plan is that of another command";
        return Err(Error::format(dir.join(MANIFEST).display().to_string(), message));
    }
    let mut sweep: SizeSweep = read_json(&dir.join(SIZES_JSON))?;
    sweep.evaluate();
    Ok(sweep)
}

/// Makes `sizes.csv`, `sizes.png` and `report.md` again from `sizes.json`.
///
/// # Errors
/// When the folder holds no size sweep, is in use or cannot be written.
pub fn rewrite(dir: &Path) -> Result<SizeSweep> {
    let _lock = FolderLock::take(dir)?;
    let sweep = read(dir)?;
    write_outputs(dir, &Manifest::read(dir)?, &sweep)?;
    Ok(sweep)
}

fn write_outputs(dir: &Path, manifest: &Manifest, sweep: &SizeSweep) -> Result<()> {
    let runs = [("", sweep)];
    write_by_rename(&dir.join(SIZES_CSV), |out| write_csv(&runs, out))?;
    write_picture(&dir.join(SIZES_PNG), &first_page::place(manifest), &runs)?;
    let mut report = format!("# cluster-health sizes on {}\n\n", first_page::place(manifest));
    for note in &manifest.notes {
        report.push_str(&format!("- Note: {note}.\n"));
    }
    if !manifest.notes.is_empty() {
        report.push('\n');
    }
    report.push_str(&markdown(sweep));
    report.push_str("\n![rate and time over bytes](sizes.png)\n");
    write_by_rename(&dir.join("report.md"), |out| out.write_all(report.as_bytes()))
}

fn write_picture(path: &Path, title: &str, runs: &[(&str, &SizeSweep)]) -> Result<()> {
    #[cfg(feature = "png")]
    {
        let bytes = super::output::picture(title, runs)
            .map_err(|error| Error::output(SIZES_PNG, error.to_string()))?;
        write_by_rename(path, |out| out.write_all(&bytes))?;
    }
    let _ = (path, title, runs);
    Ok(())
}

/// Writes the sweeps of several folders into one table and one picture, `sizes-compare.csv` and
/// `sizes-compare.png` in `out`, which is made where it is missing; the files written.
///
/// # Errors
/// When a folder holds no size sweep, or `out` cannot be written.
pub fn compare(dirs: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>> {
    let mut sweeps = Vec::new();
    for dir in dirs {
        sweeps.push((dir.display().to_string(), read(dir)?));
    }
    let runs: Vec<(&str, &SizeSweep)> =
        sweeps.iter().map(|(name, sweep)| (name.as_str(), sweep)).collect();
    std::fs::create_dir_all(out).map_err(|error| Error::io("--out: creating", out, error))?;
    let table = out.join("sizes-compare.csv");
    write_by_rename(&table, |file| write_csv(&runs, file))?;
    let picture = out.join("sizes-compare.png");
    write_picture(&picture, &format!("{} size sweeps", runs.len()), &runs)?;
    Ok([table, picture].into_iter().filter(|path| path.exists()).collect())
}
