//! Measuring.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;

use cluster_health_core::RankGroup;
use cluster_health_matrix::plan::{CorePairPlan, SweepPlan};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::run::{OpenMode, RunStatus};
use cluster_health_matrix::session::{
    RankZero, RecordOptions, dismiss, follow, record_core_pair, record_h2d,
};
use cluster_health_matrix::{CancelToken, Observer, sweep};

use crate::error::{Failure, Status, guard, guard_or};
use crate::plan::Plan;
use crate::ranks::Group;
use crate::result::SweepResult;
use crate::text::{self, cleared, required};

/// How far a sweep is.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Progress {
    /// Points done.
    pub done: u64,
    /// Points known to be needed; some may be added.
    pub total: u64,
    /// Bytes moved by this call.
    pub bytes: u64,
    /// Nanoseconds of the machine's clock since the first bind of this call.
    pub elapsed_ns: u64,
}

/// Stops sweeps.
#[derive(Debug, Default)]
pub struct Cancel(CancelToken);

/// What goes with a sweep. Set everything that is not used to 0: `clh_options options = {0};`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Options<'a> {
    /// May be NULL. Called between visits to CPUs, on the thread that measures and outside of what is
    /// timed, with `user` below and how far the sweep is. Anything but 0 stops the sweep as a token
    /// does. It must return: neither an exception nor longjmp may leave it.
    pub progress:
        Option<unsafe extern "C-unwind" fn(user: *mut c_void, progress: &Progress) -> c_int>,
    /// Given to `progress`.
    pub user: *mut c_void,
    /// Stops the sweep; may be NULL.
    pub cancel: Option<&'a Cancel>,
    /// This rank of a pair. NULL for "h2d" and on a synthetic machine, which has both ranks of a pair
    /// in one process.
    pub group: Option<&'a Group>,
}

/// What to do with what is in a result folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum RecordMode {
    /// The folder must be absent or empty.
    New = 0,
    /// Results of an earlier run in it are replaced.
    Force = 1,
    /// An interrupted run of the same plan goes on; a complete one is left as it is; absent or empty
    /// = start.
    Resume = 2,
}

/// Asks C.
struct Watcher<'a> {
    progress: Option<unsafe extern "C-unwind" fn(*mut c_void, &Progress) -> c_int>,
    user: *mut c_void,
    cancel: Option<&'a Cancel>,
    stopped: bool,
}

impl<'a> Watcher<'a> {
    fn new(options: Option<&Options<'a>>) -> Self {
        Self {
            progress: options.and_then(|options| options.progress),
            user: options.map_or(std::ptr::null_mut(), |options| options.user),
            cancel: options.and_then(|options| options.cancel),
            stopped: false,
        }
    }
}

impl Observer for Watcher<'_> {
    fn between_visits(&mut self, progress: &cluster_health_matrix::Progress) {
        let Some(call) = self.progress else { return };
        let progress = Progress {
            done: progress.done,
            total: progress.total,
            bytes: progress.bytes,
            elapsed_ns: progress.elapsed_ns,
        };
        // SAFETY:
        // * The caller of `clh_sweep` or `clh_record` gave a function of this type, and `user` that it
        //   can use until that call returns.
        // * It runs on the thread of that call.
        // * An exception that leaves it all the same ends the process: nothing here can catch it.
        let answer = unsafe { call(self.user, &progress) };
        self.stopped |= answer != 0;
    }

    fn is_cancelled(&self) -> bool {
        self.stopped || self.cancel.is_some_and(|cancel| cancel.0.is_cancelled())
    }
}

/// Makes a token; never NULL. One token may stop several sweeps and stays cancelled.
#[unsafe(no_mangle)]
pub extern "C" fn clh_cancel_new() -> Option<Box<Cancel>> {
    guard_or(None, || Some(Box::default()))
}

/// Stops the sweeps that were given this token, each before its next point; they return
/// `CLH_STATUS_CANCELLED`. From any thread or signal handler; NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn clh_cancel_now(cancel: Option<&Cancel>) {
    if let Some(cancel) = cancel {
        cancel.0.cancel();
    }
}

/// Frees a token that no sweep uses any more; NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn clh_cancel_free(cancel: Option<Box<Cancel>>) {
    guard_or((), || drop(cancel));
}

/// The group of a pair on a real machine; nothing else has one.
fn group_of<'a>(plan: &Plan, options: Option<&Options<'a>>) -> Result<Option<&'a Group>, Failure> {
    let group = options.and_then(|options| options.group);
    let is_pair = matches!(plan.sweep, SweepPlan::CorePair(_));
    let message = match (is_pair && !plan.machine.has_virtual_time(), group) {
        (true, None) => {
            "group is NULL: core_pair on a real machine takes two ranks; see clh_group_threads"
        }
        (false, Some(_)) if is_pair => {
            "group: a synthetic machine has both ranks in one process; leave it NULL"
        }
        (false, Some(_)) => "group: h2d has no ranks; leave it NULL",
        _ => return Ok(group),
    };
    Err(Failure::bad_call(message))
}

fn ended(complete: bool) -> Result<Status, Failure> {
    if complete {
        return Ok(Status::Ok);
    }
    Err(Failure::new(Status::Cancelled, "cancelled; the result holds what was measured"))
}

/// Measures a plan on the calling thread, which is bound to one CPU after another meanwhile and
/// gets its old mask back. `options` may be NULL. `*result` is NULL when the call fails; after
/// `CLH_STATUS_CANCELLED` it holds what was measured. Cells that could not be measured are no failure.
///
/// For `core_pair` on a real machine two ranks call it, and both get the whole result.
#[unsafe(no_mangle)]
pub extern "C" fn clh_sweep(
    plan: Option<&Plan>,
    options: Option<&Options<'_>>,
    result: Option<&mut MaybeUninit<Option<Box<SweepResult>>>>,
) -> Status {
    guard(|| {
        let result = cleared("result", result)?;
        let plan = required("plan", plan)?;
        let group = group_of(plan, options)?;
        let mut watcher = Watcher::new(options);
        let complete = match &plan.sweep {
            SweepPlan::H2d(h2d) => {
                let found = sweep::h2d(&plan.machine, h2d, &mut watcher)?;
                let matrices = std::iter::once(found.matrix).chain(found.under_loads);
                *result = Some(SweepResult::new(matrices, found.end.complete, &found.notes));
                found.end.complete
            }
            SweepPlan::CorePair(pair) => {
                let group = group.map(Group::claim).transpose()?;
                let group = group.as_ref().map(|group| &***group);
                let found = sweep::core_pair(&plan.machine, pair, group, &mut watcher)?;
                let matrices = std::iter::once(found.matrix).chain(found.under_loads);
                *result = Some(SweepResult::new(matrices, found.end.complete, &[]));
                found.end.complete
            }
            _ => return Err(Failure::new(Status::Other, "this sweep has no C interface")),
        };
        ended(complete)
    })
}

/// Measures a plan as `clh_sweep` does and keeps it in a result folder, with every output, as
/// the command line does. Every measured point is in the folder at once, whatever happens to the
/// process. `options` and `result` may be NULL; `result` gets the matrices of the folder, those of
/// an interrupted run before included.
///
/// For `core_pair` on a real machine rank 1 calls it, too; it writes nothing and its `*result` is
/// NULL.
///
/// # Safety
/// `dir` is NULL or points to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_record(
    plan: Option<&Plan>,
    dir: *const c_char,
    mode: i32,
    options: Option<&Options<'_>>,
    result: Option<&mut MaybeUninit<Option<Box<SweepResult>>>>,
) -> Status {
    guard(|| {
        let result = result.map(|result| result.write(None));
        let plan = required("plan", plan)?;
        // SAFETY:
        // * The caller's promise is the same.
        let dir = unsafe { text::path("dir", dir) }?;
        let mode = open_mode(mode)?;
        let group = group_of(plan, options)?;
        let mut watcher = Watcher::new(options);
        let record = RecordOptions::default().with_mode(mode);
        let report = match &plan.sweep {
            SweepPlan::H2d(h2d) => {
                record_h2d("clh_record", &plan.machine, h2d, dir, &record, &mut watcher)?
            }
            SweepPlan::CorePair(pair) => {
                let mut group = group.map(Group::claim).transpose()?;
                let group = group.as_deref_mut();
                match record_pair(plan, pair, group, dir, &record, &mut watcher)? {
                    Recorded::Here(report) => *report,
                    Recorded::ByRankZero { complete } => return ended(complete),
                }
            }
            _ => return Err(Failure::new(Status::Other, "this sweep has no C interface")),
        };
        let complete = report.manifest.status == RunStatus::Complete;
        if let Some(result) = result {
            *result = Some(SweepResult::new(report.matrices, complete, &report.manifest.notes));
        }
        ended(complete)
    })
}

/// An `int` of C may be any number.
fn open_mode(mode: i32) -> Result<OpenMode, Failure> {
    match mode {
        mode if mode == RecordMode::New as i32 => Ok(OpenMode::New),
        mode if mode == RecordMode::Force as i32 => Ok(OpenMode::Force),
        mode if mode == RecordMode::Resume as i32 => Ok(OpenMode::Resume),
        _ => Err(Failure::bad_call(format!("mode is {mode}, no CLH_MODE_… value"))),
    }
}

enum Recorded {
    Here(Box<Report>),
    ByRankZero { complete: bool },
}

fn record_pair(
    plan: &Plan,
    pair: &CorePairPlan,
    group: Option<&mut Arc<RankGroup>>,
    dir: &Path,
    options: &RecordOptions,
    watcher: &mut Watcher<'_>,
) -> Result<Recorded, Failure> {
    let machine = &plan.machine;
    let shared = match group {
        None => None,
        Some(group) if group.rank() == 0 => Some(Arc::clone(group)),
        Some(group) => {
            let group = Arc::get_mut(group)
                .ok_or_else(|| Failure::new(Status::Busy, "group: another call uses it"))?;
            let complete = follow(machine, pair, group, RankZero::Begins, watcher)?;
            return Ok(Recorded::ByRankZero { complete });
        }
    };
    let mut used = false;
    let mut ranks = || {
        used = true;
        shared.clone().ok_or_else(|| {
            cluster_health_matrix::Error::invalid("group", "is NULL: this sweep takes two ranks")
        })
    };
    let report = record_core_pair("clh_record", machine, pair, &mut ranks, dir, options, watcher);
    if let (false, Some(group)) = (used, &shared) {
        // Rank 1 waits; whether it is told or not, what happened here stands.
        let complete =
            report.as_ref().is_ok_and(|report| report.manifest.status == RunStatus::Complete);
        dismiss(group, pair, complete).ok();
    }
    Ok(Recorded::Here(Box::new(report?)))
}
