//! The result folder of a size sweep, and several of them beside each other.

#[cfg(feature = "png")]
use std::io::Write as _;
use std::path::{Path, PathBuf};

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;

use super::output::{SIZES_CSV, SIZES_JSON, SIZES_PNG, markdown, write_csv};
use super::{SizeSweep, SizesPlan, measure};
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::output::first_page;
use crate::run::{
    FolderLock, MANIFEST, Manifest, OpenMode, Opened, PlanRecord, RunFolder, RunStatus,
    SizesRecord, write_by_rename, write_json,
};
use crate::session::StartRanks;
use crate::visit::folder::{self, Outcome};

/// Measures a size sweep into a result folder: `run.json`, `affinity.json`, `sizes.json`,
/// `sizes.csv`, `sizes.png` (feature `png`), `report.md`. `samples.jsonl` stays empty: every visit
/// is in `sizes.json`. `ranks` gives the group of two ranks, this one rank 0, once the folder can be
/// used; without it a real machine's all-gather is not measured.
///
/// With [`OpenMode::Resume`] a complete run is left as it is, an interrupted one begins anew.
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), the other rank is lost, or a file
/// cannot be written.
///
/// # Thread binding
/// The calling thread is bound meanwhile.
pub fn record(
    machine: &Machine,
    plan: &SizesPlan,
    ranks: Option<StartRanks<'_>>,
    dir: &Path,
    mode: OpenMode,
    observer: &mut dyn Observer,
) -> Result<SizeSweep> {
    let sizes = Some(SizesRecord::Measured(plan.clone()));
    let record = PlanRecord { sizes, ..PlanRecord::default() };
    let mut manifest = Manifest::of_machine("sizes", record, machine);
    manifest.seed = plan.seed;
    let sweep = folder::record(machine, manifest, ranks, dir, mode, |group| {
        measure::lead(machine, plan, group, observer)
    })?;
    sweep.map_or_else(|| read(dir), Ok)
}

impl Outcome for SizeSweep {
    const FILE: &'static str = SIZES_JSON;

    fn account(&self, manifest: &mut Manifest) -> bool {
        for visit in self.series.iter().flat_map(|series| &series.visits) {
            match visit.times {
                Some(_) => manifest.points.measured += 1,
                None => manifest.points.failed += 1,
            }
        }
        self.complete
    }

    fn write_outputs(&self, dir: &Path, manifest: &Manifest) -> Result<()> {
        let runs = [("", self)];
        write_by_rename(&dir.join(SIZES_CSV), |out| write_csv(&runs, out))?;
        write_picture(&dir.join(SIZES_PNG), &first_page::place(manifest), &runs)?;
        let body = markdown(self) + "\n![rate and time over bytes](sizes.png)\n";
        folder::write_report(dir, "sizes", manifest, &body)
    }
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
    write_json(&dir.join(SIZES_JSON), sweep)?;
    folder.write_manifest(&manifest)?;
    sweep.write_outputs(dir, &manifest)
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
    let mut sweep: SizeSweep = folder::read(dir)?;
    if let Some(series) = sweep.series.iter().find(|series| !series.is_reasonable()) {
        let message = format!("{} has too many sizes and visits", series.name());
        return Err(Error::format(dir.join(SIZES_JSON).display().to_string(), message));
    }
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
    sweep.write_outputs(dir, &Manifest::read(dir)?)?;
    Ok(sweep)
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
