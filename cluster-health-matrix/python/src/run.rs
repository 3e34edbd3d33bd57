//! The calls that Python makes.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cluster_health_core::rank::{RankEnvironment, RankGroup};
use cluster_health_core::{BackendKind, Bandwidth, LoadProfile, Machine, Scenario};
use cluster_health_matrix::compare::{self as comparing, CompareOptions, CompareVerdict};
use cluster_health_matrix::matrix::Matrix;
use cluster_health_matrix::output::first_page;
use cluster_health_matrix::plan::{CorePairPlan, H2dPlan, PlanRequest, SweepPlan};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::run::{AffinityFile, OpenMode, RunStatus};
use cluster_health_matrix::session::{
    RankZero, RecordOptions, dismiss, follow, record_core_pair, record_h2d,
};
use cluster_health_matrix::{Error, Observer, Result, sweep};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{checked, fields, json};
use crate::watcher::{CancelToken, Watcher};

/// What a sweep runs on.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct On {
    backend: String,
    /// A file, or the text itself.
    scenario: Option<String>,
}

impl On {
    fn machine(&self) -> Result<Machine> {
        match (self.scenario.as_deref(), self.backend.as_str()) {
            (Some(scenario), "auto" | "synthetic") => {
                let scenario = if scenario.contains('\n') {
                    Scenario::parse(scenario, "scenario")?
                } else {
                    Scenario::load(scenario.as_ref())?
                };
                Ok(Machine::synthetic(scenario)?)
            }
            (Some(_), other) => {
                let message = format!("describes a synthetic machine, but backend is '{other}'");
                Err(Error::invalid("scenario", message))
            }
            (None, "synthetic") => {
                Err(Error::invalid("scenario", "missing: the text or the file of a scenario"))
            }
            (None, name) => Ok(Machine::by_name(name)?),
        }
    }
}

/// Where the results go, and where the ranks of pairs come from.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Setting {
    out: Option<PathBuf>,
    resume: bool,
    force: bool,
    ranks: String,
}

impl Setting {
    fn options(&self) -> Result<RecordOptions> {
        let mode = match (self.resume, self.force) {
            (true, true) => {
                let message = "cannot be used with force: one goes on, the other starts anew";
                return Err(Error::invalid("resume", message));
            }
            (true, _) => OpenMode::Resume,
            (_, true) => OpenMode::Force,
            _ => OpenMode::New,
        };
        Ok(RecordOptions::default().with_mode(mode))
    }
}

/// What a sweep gave.
struct Measured {
    /// That of the plan's first load comes first.
    matrices: Vec<Matrix>,
    complete: bool,
    notes: Vec<String>,
    /// Of a recorded one.
    report: Option<Judged>,
}

/// What a result folder says.
struct Judged {
    diagnosis: String,
    text: String,
    bad_lines: Vec<String>,
}

impl Measured {
    /// A recorded sweep.
    fn of_sweep(report: Report, loads: &[LoadProfile]) -> Result<Self> {
        if report.manifest.status != RunStatus::Complete && report.matrices.is_empty() {
            // Stopped before its first point.
            return Err(Error::Cancelled);
        }
        if let Some(nothing) = report.nothing_measured() {
            return Err(nothing);
        }
        let mut measured = Self::of_report(report)?;
        if let Some(first) = loads.first().map(ToString::to_string) {
            measured.matrices.sort_by_key(|matrix| matrix.load != first);
        }
        Ok(measured)
    }

    fn of_report(report: Report) -> Result<Self> {
        let judged = Judged {
            diagnosis: json("the diagnosis", &report.diagnosis)?,
            text: first_page::render(&report),
            bad_lines: report.bad_lines,
        };
        Ok(Self {
            matrices: report.matrices,
            complete: report.manifest.status == RunStatus::Complete,
            notes: report.manifest.notes,
            report: Some(judged),
        })
    }

    fn into_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dict = PyDict::new(py);
        let matrices = self.matrices.into_iter().map(|matrix| fields(py, matrix));
        dict.set_item("matrices", matrices.collect::<PyResult<Vec<_>>>()?)?;
        dict.set_item("complete", self.complete)?;
        dict.set_item("notes", self.notes)?;
        if let Some(report) = self.report {
            dict.set_item("diagnosis", report.diagnosis)?;
            dict.set_item("text", report.text)?;
            dict.set_item("bad_lines", report.bad_lines)?;
        }
        Ok(dict)
    }
}

/// Measures `plan`, a JSON object as `PlanRequest` reads it; `None` on a rank that another one
/// reports for.
#[pyfunction]
#[pyo3(signature = (plan, on, setting, progress, cancel))]
pub(crate) fn measure<'py>(
    py: Python<'py>,
    plan: &str,
    on: On,
    setting: Setting,
    progress: Option<Py<PyAny>>,
    cancel: Option<&Bound<'py, CancelToken>>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let token = cancel.map(|cancel| cancel.get().token()).unwrap_or_default();
    let mut watcher = Watcher::new(progress, token);
    let observer = &mut watcher;
    let result = py.detach(move || run(plan, &on, &setting, observer));
    if let Some(raised) = watcher.into_raised() {
        return Err(raised);
    }
    checked(py, result)?.map(|measured| measured.into_dict(py)).transpose()
}

fn run(
    plan: &str,
    on: &On,
    setting: &Setting,
    observer: &mut dyn Observer,
) -> Result<Option<Measured>> {
    let request = PlanRequest::from_json(plan)?;
    let machine = on.machine()?;
    match request.build(&machine)? {
        SweepPlan::H2d(plan) => h2d(&machine, &plan, setting, observer).map(Some),
        SweepPlan::CorePair(plan) => core_pair(&machine, &plan, setting, observer),
        _ => Err(Error::invalid("sweep", "this package cannot run it")),
    }
}

fn h2d(
    machine: &Machine,
    plan: &H2dPlan,
    setting: &Setting,
    observer: &mut dyn Observer,
) -> Result<Measured> {
    if let Some(out) = &setting.out {
        let report = record_h2d("h2d", machine, plan, out, &setting.options()?, observer)?;
        return Measured::of_sweep(report, &plan.loads);
    }
    let mut result = sweep::h2d(machine, plan, observer)?;
    let mut matrices = vec![result.matrix];
    matrices.append(&mut result.under_loads);
    Ok(Measured { matrices, complete: result.end.complete, notes: result.notes, report: None })
}

/// The ranks of a pair sweep.
enum Ranks {
    /// A synthetic machine has both.
    Simulated,
    /// This process is one of a launcher's.
    Launched(RankGroup),
    /// The other one is a thread.
    Threads,
}

impl Ranks {
    fn find(wanted: &str, machine: &Machine, timeout: Duration) -> Result<Self> {
        if !["auto", "env", "local"].contains(&wanted) {
            let message = format!("'{wanted}' is none of auto, env, local");
            return Err(Error::invalid("ranks", message));
        }
        if machine.scenario().is_some() {
            return Ok(Self::Simulated);
        }
        let environment = match wanted {
            "local" => None,
            _ => RankEnvironment::detect()?.filter(|environment| environment.size > 1),
        };
        match environment {
            Some(environment) if environment.size != 2 => Err(Error::invalid(
                "ranks",
                format!(
                    "a pair has two ranks, {} started {}; start two, or measure with ranks='local' in \
                     one of them",
                    environment.family, environment.size
                ),
            )),
            Some(environment) => Ok(Self::Launched(RankGroup::join(&environment, timeout)?)),
            None if wanted == "env" => Err(Error::invalid(
                "ranks",
                "env: no launcher's environment (torchrun, Open MPI, PMI, Slurm) was found",
            )),
            None if machine.backend() == BackendKind::Host => Ok(Self::Threads),
            // Runtimes of accelerators keep state per process.
            None => Err(cluster_health_core::Error::Unavailable {
                what: "a second rank".to_owned(),
                message: format!(
                    "on the {} backend ranks are processes: start this program with torchrun \
                     --nproc_per_node 2, mpirun -n 2 or srun -n 2",
                    machine.backend()
                ),
            }
            .into()),
        }
    }
}

fn core_pair(
    machine: &Machine,
    plan: &CorePairPlan,
    setting: &Setting,
    observer: &mut dyn Observer,
) -> Result<Option<Measured>> {
    let options = setting.options()?;
    let ranks = Ranks::find(&setting.ranks, machine, plan.timeout())?;
    let Some(out) = &setting.out else { return pair_in_memory(machine, plan, ranks, observer) };
    let report = match ranks {
        Ranks::Simulated => {
            let mut ranks = || Err(Error::invalid("ranks", "a synthetic machine has its own"));
            record_core_pair("core-pair", machine, plan, &mut ranks, out, &options, observer)?
        }
        Ranks::Launched(mut group) if group.rank() > 0 => {
            follow(machine, plan, &mut group, RankZero::Begins, observer)?;
            return Ok(None);
        }
        Ranks::Launched(group) => {
            let group = Arc::new(group);
            let mut unused = Some(Arc::clone(&group));
            let mut ranks =
                || unused.take().ok_or_else(|| Error::invalid("ranks", "already in use"));
            let report =
                record_core_pair("core-pair", machine, plan, &mut ranks, out, &options, observer)?;
            if unused.is_some() {
                // Whoever is gone says so itself; the results stand.
                dismiss(&group, plan, report.manifest.status == RunStatus::Complete).ok();
            }
            report
        }
        Ranks::Threads => thread::scope(|scope| {
            let mut ranks = || {
                let [group, mut other] = two_threads(plan.timeout())?;
                thread::Builder::new()
                    .spawn_scoped(scope, move || {
                        follow(machine, plan, &mut other, RankZero::Begins, &mut ())
                    })
                    .map_err(no_thread)?;
                Ok(Arc::new(group))
            };
            record_core_pair("core-pair", machine, plan, &mut ranks, out, &options, observer)
        })?,
    };
    Measured::of_sweep(report, &plan.loads).map(Some)
}

fn pair_in_memory(
    machine: &Machine,
    plan: &CorePairPlan,
    ranks: Ranks,
    observer: &mut dyn Observer,
) -> Result<Option<Measured>> {
    let mut result = match ranks {
        Ranks::Simulated => sweep::core_pair(machine, plan, None, observer)?,
        Ranks::Launched(group) => {
            let result = sweep::core_pair(machine, plan, Some(&group), observer)?;
            if group.rank() > 0 {
                return Ok(None);
            }
            result
        }
        Ranks::Threads => {
            let [group, other] = two_threads(plan.timeout())?;
            thread::scope(|scope| {
                thread::Builder::new()
                    .spawn_scoped(scope, move || {
                        sweep::core_pair(machine, plan, Some(&other), &mut ())
                    })
                    .map_err(no_thread)?;
                let result = sweep::core_pair(machine, plan, Some(&group), observer);
                // So that the other rank does not wait for one that failed.
                drop(group);
                result
            })?
        }
    };
    let mut matrices = vec![result.matrix];
    matrices.append(&mut result.under_loads);
    let complete = result.end.complete;
    Ok(Some(Measured { matrices, complete, notes: Vec::new(), report: None }))
}

fn two_threads(timeout: Duration) -> Result<[RankGroup; 2]> {
    let mut groups = RankGroup::threads(2)?;
    groups.iter_mut().for_each(|group| group.set_timeout(timeout));
    groups.try_into().map_err(|_| Error::invalid("ranks", "no pair of threads"))
}

fn no_thread(error: std::io::Error) -> Error {
    Error::io("starting", "the thread of rank 1", error)
}

/// Reads and judges a result folder.
#[pyfunction]
pub(crate) fn diagnose<'py>(
    py: Python<'py>,
    folder: PathBuf,
    expect: Option<&str>,
) -> PyResult<Bound<'py, PyDict>> {
    let read = move || {
        let expect: Option<Bandwidth> =
            expect.map(str::parse).transpose().map_err(|error| Error::named("expect", error))?;
        let report = Report::read_expecting(&folder, expect)?;
        report.nothing_measured().map_or_else(|| Measured::of_report(report), Err)
    };
    let read = py.detach(read);
    checked(py, read)?.into_dict(py)
}

/// Two runs against each other, or more as the map of a pod.
#[pyfunction]
pub(crate) fn compare<'py>(
    py: Python<'py>,
    runs: Vec<PathBuf>,
    min_effect: f64,
    force: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let (verdict, text, document) =
        checked(py, py.detach(move || compared(&runs, min_effect, force)))?;
    let dict = PyDict::new(py);
    dict.set_item("verdict", verdict)?;
    dict.set_item("text", text)?;
    dict.set_item("document", document)?;
    Ok(dict)
}

fn compared(
    runs: &[PathBuf],
    min_effect: f64,
    force: bool,
) -> Result<(&'static str, String, String)> {
    if !(min_effect > 0.0 && min_effect < 1.0) {
        let message = format!("{min_effect} is no share between 0 and 1, such as 0.03");
        return Err(Error::invalid("min_effect", message));
    }
    let options = CompareOptions::default().with_min_effect(min_effect).with_force(force);
    let reports = runs
        .iter()
        .map(|dir| Ok((dir.display().to_string(), Report::read(dir)?)))
        .collect::<Result<Vec<_>>>()?;
    let named: Vec<_> = reports.iter().map(|(name, report)| (name.as_str(), report)).collect();
    let (verdict, differences, text, document) = match named[..] {
        [a, b] => {
            let found = comparing::compare(a, b, &options);
            let document = json("the comparison", &found)?;
            (found.verdict, found.differences.join("; "), found.to_string(), document)
        }
        _ => {
            let found = comparing::pod(&named, &options);
            let document = json("the comparison", &found)?;
            (found.verdict, found.differences.join("; "), found.to_string(), document)
        }
    };
    if verdict == CompareVerdict::Refused {
        let message =
            format!("must not be compared: {differences}; force=True does it all the same");
        return Err(Error::invalid("the runs", message));
    }
    Ok((verdict.as_str(), text, document))
}

/// Which CPUs can really be bound, as the JSON of `affinity.json`.
#[pyfunction]
pub(crate) fn census(py: Python<'_>, on: On) -> PyResult<String> {
    let census = py.detach(move || {
        let machine = on.machine()?;
        json("the census", &AffinityFile::of(machine.census()?))
    });
    checked(py, census)
}
