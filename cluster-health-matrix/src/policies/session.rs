//! The result folder of a policy sweep.

#[cfg(feature = "png")]
use std::io::Write as _;
use std::path::Path;

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;

#[cfg(feature = "png")]
use super::output::POLICIES_PNG;
#[cfg(feature = "xlsx")]
use super::output::POLICIES_XLSX;
use super::output::{POLICIES_CSV, POLICIES_JSON, markdown, write_csv};
use super::{PoliciesPlan, PolicyStatus, PolicySweep, measure};
use crate::error::{Error, Result};
use crate::observer::Observer;
use crate::run::{FolderLock, MANIFEST, Manifest, OpenMode, PlanRecord, write_by_rename};
use crate::session::StartRanks;
use crate::visit::folder::{self, Outcome};

/// Measures a policy sweep into a result folder: `run.json`, `affinity.json`, `policies.json`,
/// `policies.csv`, `policies.xlsx` (feature `xlsx`), `policies.png` (feature `png`), `report.md`.
/// `samples.jsonl` stays empty: every visit is in `policies.json`. `ranks` gives the group of all ranks,
/// this one rank 0, once the folder can be used; without it this process measures alone.
///
/// With [`OpenMode::Resume`] a complete run is left as it is, an interrupted one begins anew.
///
/// # Errors
/// When the folder cannot be used (nothing is measured then), a rank is lost, or a file cannot be
/// written.
///
/// # Thread binding
/// As [`measure`](super::measure()).
pub fn record(
    machine: &Machine,
    plan: &PoliciesPlan,
    ranks: Option<StartRanks<'_>>,
    dir: &Path,
    mode: OpenMode,
    observer: &mut dyn Observer,
) -> Result<PolicySweep> {
    let record = PlanRecord { policies: Some(plan.clone()), ..PlanRecord::default() };
    let mut manifest = Manifest::of_machine("policies", record, machine);
    manifest.seed = plan.seed;
    let sweep = folder::record(machine, manifest, ranks, dir, mode, |group| {
        measure::lead(machine, plan, group, observer)
    })?;
    sweep.map_or_else(|| folder::read(dir), Ok)
}

impl Outcome for PolicySweep {
    const FILE: &'static str = POLICIES_JSON;

    fn account(&self, manifest: &mut Manifest) -> bool {
        let visits = self.lines.iter().flat_map(|line| &line.per_rank).flat_map(|r| &r.visits);
        for visit in visits {
            match visit.status {
                PolicyStatus::Measured => manifest.points.measured += 1,
                PolicyStatus::Skipped => manifest.points.skipped += 1,
                PolicyStatus::Failed => manifest.points.failed += 1,
                PolicyStatus::NotAvailable | PolicyStatus::NotMeasured => {}
            }
        }
        self.complete
    }

    fn write_outputs(&self, dir: &Path, manifest: &Manifest) -> Result<()> {
        write_by_rename(&dir.join(POLICIES_CSV), |out| write_csv(self, out))?;
        #[cfg(feature = "xlsx")]
        folder::write_workbook(dir, POLICIES_XLSX, manifest, super::output::sheets(self))?;
        #[cfg(feature = "png")]
        {
            let title = crate::output::first_page::place(manifest);
            let picture = super::output::picture(&title, self)
                .map_err(|error| Error::output(POLICIES_PNG, error.to_string()))?;
            write_by_rename(&dir.join(POLICIES_PNG), |out| out.write_all(&picture))?;
        }
        let body = markdown(self) + "\n![rates against the unbound thread](policies.png)\n";
        folder::write_report(dir, "policies", manifest, &body)
    }
}

/// Every other rank of [`record`]; false when it was asked to end.
///
/// # Errors
/// When the ranks were asked for different things, or rank 0 is lost.
pub fn follow(
    machine: &Machine,
    plan: &PoliciesPlan,
    group: &RankGroup,
    observer: &mut dyn Observer,
) -> Result<bool> {
    measure::follow(machine, plan, group, observer)
}

/// Makes every output again from `policies.json`.
///
/// # Errors
/// When the folder holds no policy sweep, is in use or cannot be written.
pub fn rewrite(dir: &Path) -> Result<PolicySweep> {
    let _lock = FolderLock::take(dir)?;
    let manifest = Manifest::read(dir)?;
    if manifest.plan.policies.is_none() {
        let message = "the plan is that of another command";
        return Err(Error::format(dir.join(MANIFEST).display().to_string(), message));
    }
    let sweep: PolicySweep = folder::read(dir)?;
    sweep.write_outputs(dir, &manifest)?;
    Ok(sweep)
}
