//! Measures a drawn machine in virtual time and has it judged.
//!
//! Findings come back as the JSON that `diagnose --json` prints, so that what is scored is what
//! others get.

use std::path::Path;

use cluster_health_core::Machine;
use cluster_health_matrix::observer::Observer;
use cluster_health_matrix::run::{Manifest, OpenMode, Opened, RunFolder, RunStatus};
use cluster_health_matrix::samples::Sample;
use cluster_health_matrix::sweep;
use serde::{Deserialize, Serialize};

use super::Result;
use super::generator::Case;

/// Verdict and findings.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Diagnosis {
    pub(crate) verdict: String,
    pub(crate) findings: Vec<Finding>,
}

/// The fields of a finding that are scored.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Finding {
    pub(crate) kind: String,
    pub(crate) sweep: Option<String>,
    pub(crate) devices: Vec<u32>,
    pub(crate) cpus: Vec<u32>,
    pub(crate) rank0_cpus: Vec<u32>,
    pub(crate) rank1_cpus: Vec<u32>,
    pub(crate) numa_nodes: Vec<u32>,
    pub(crate) effect: Option<Effect>,
    pub(crate) extra_us: Option<f64>,
    pub(crate) scales_with_bytes: Option<bool>,
    pub(crate) is_artefact: bool,
    pub(crate) facts: Vec<String>,
    pub(crate) inference: Option<String>,
}

/// Rate of the members ÷ rate of the rest, with its 95 % interval.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Effect {
    pub(crate) ratio: Option<f64>,
    pub(crate) low: Option<f64>,
    pub(crate) high: Option<f64>,
}

/// Measures the machine into a folder and has it judged.
pub(crate) fn judge(case: &Case) -> Result<Diagnosis> {
    // Memory, where there is some: the log is as large as a real one.
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }?;
    measure(case, folder.path())?;
    Ok(serde_json::from_value(diagnose(folder.path())?)?)
}

/// The diagnosis as JSON: the one call into the judging.
fn diagnose(dir: &Path) -> Result<serde_json::Value> {
    Ok(serde_json::to_value(cluster_health_matrix::analysis::diagnose_folder(dir)?)?)
}

/// Appends every sample to the log.
struct Log(RunFolder);

impl Observer for Log {
    fn sample(&mut self, sample: &Sample) -> cluster_health_matrix::Result<()> {
        self.0.append(sample)
    }
}

/// Measures into a result folder without outputs.
pub(crate) fn measure(case: &Case, dir: &Path) -> Result<()> {
    let machine = Machine::synthetic(case.scenario.clone())?;
    let mut manifest = Manifest::of_machine("judging", case.plan.clone(), &machine);
    let Opened::Fresh(folder) = RunFolder::open(dir, OpenMode::New, &manifest)? else {
        return Err("a fresh folder is not fresh".into());
    };
    folder.write_affinity(machine.census()?)?;
    let mut log = Log(folder);
    if let Some(plan) = &case.plan.h2d {
        manifest.wall_ns = sweep::h2d(&machine, plan, &mut log)?.end.timings.wall_ns;
    }
    if let Some(plan) = &case.plan.core_pair {
        manifest.wall_ns = sweep::core_pair(&machine, plan, None, &mut log)?.end.timings.wall_ns;
    }
    manifest.status = RunStatus::Complete;
    log.0.write_manifest(&manifest)?;
    Ok(())
}
