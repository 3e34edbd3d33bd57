//! The result folder of a validation.

use std::path::Path;

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;

#[cfg(feature = "xlsx")]
use super::output::VALIDATE_XLSX;
use super::output::{VALIDATE_CSV, VALIDATE_JSON, write_csv};
use super::{LineStatus, Table, ValidatePlan, markdown, measure};
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::run::{FolderLock, MANIFEST, Manifest, OpenMode, PlanRecord, write_by_rename};
use crate::session::StartRanks;
use crate::visit::folder::{self, Outcome};

/// Measures the table into a result folder: `run.json`, `affinity.json`, `validate.json`,
/// `validate.csv`, `validate.xlsx` (feature `xlsx`), `report.md`. `samples.jsonl` stays empty. `ranks` gives the group of all ranks,
/// this one rank 0, once the folder can be used; without it this process measures alone.
///
/// With [`OpenMode::Resume`] a complete run is left as it is, an interrupted one begins anew.
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), a rank is lost, or a file cannot be
/// written.
///
/// # Thread binding
/// The calling thread is bound meanwhile.
pub fn record(
    machine: &Machine,
    plan: &ValidatePlan,
    ranks: Option<StartRanks<'_>>,
    dir: &Path,
    mode: OpenMode,
    observer: &mut dyn Observer,
) -> Result<Table> {
    let record = PlanRecord { validate: Some(plan.clone()), ..PlanRecord::default() };
    let mut manifest = Manifest::of_machine("validate", record, machine);
    manifest.seed = plan.seed;
    let table = folder::record(machine, manifest, ranks, dir, mode, |group| {
        measure::lead(machine, plan, group, observer)
    })?;
    table.map_or_else(|| folder::read(dir), Ok)
}

impl Outcome for Table {
    const FILE: &'static str = VALIDATE_JSON;

    fn account(&self, manifest: &mut Manifest) -> bool {
        manifest.points.measured = self.count(LineStatus::Measured) as u64;
        manifest.points.failed = self.count(LineStatus::Failed) as u64;
        self.complete
    }

    fn write_outputs(&self, dir: &Path, manifest: &Manifest) -> Result<()> {
        write_by_rename(&dir.join(VALIDATE_CSV), |out| write_csv(self, out))?;
        #[cfg(feature = "xlsx")]
        folder::write_workbook(dir, VALIDATE_XLSX, manifest, super::output::sheets(self))?;
        folder::write_report(dir, "validate", manifest, &markdown(self))
    }
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

/// Makes `validate.csv`, `validate.xlsx` and `report.md` again from `validate.json`.
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
    let table: Table = folder::read(dir)?;
    table.write_outputs(dir, &manifest)?;
    Ok(table)
}
