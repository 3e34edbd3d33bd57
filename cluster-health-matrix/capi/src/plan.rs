//! What to measure.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use cluster_health_core::Machine as Inner;
use cluster_health_matrix::plan::{PlanRequest, SweepPlan};

use crate::error::{Status, guard, guard_or};
use crate::machine::Machine;
use crate::text::{self, cleared, cleared_text, required};

/// A sweep, checked against the machine that it is for. May be used by several threads.
#[derive(Debug)]
pub struct Plan {
    /// Cheap, and so that no plan meets a machine that it was not checked against.
    pub(crate) machine: Inner,
    pub(crate) sweep: SweepPlan,
}

/// Makes a plan of a JSON object such as
/// {"sweep": "h2d", "cpus": "0-7", "devices": "0,1", "sizes": ["16MiB"], "repeats": 3, "seed": 1}
/// and checks it against the machine. Only "sweep" is required, "h2d" or "core_pair"; all fields,
/// their values and defaults are in the documentation of Rust's `plan::PlanRequest`. A field that
/// does not exist or does not fit the sweep is an error that names it.
///
/// # Safety
/// `json` is NULL or points to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_plan_from_json(
    machine: Option<&Machine>,
    json: *const c_char,
    plan: Option<&mut MaybeUninit<Option<Box<Plan>>>>,
) -> Status {
    guard(|| {
        let plan = cleared("plan", plan)?;
        let machine = required("machine", machine)?.inner.clone();
        // SAFETY:
        // * The caller's promise is the same.
        let request = PlanRequest::from_json(unsafe { text::text("json", json) }?)?;
        let sweep = request.build(&machine)?;
        *plan = Some(Box::new(Plan { machine, sweep }));
        Ok(Status::Ok)
    })
}

/// Frees a plan; NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn clh_plan_free(plan: Option<Box<Plan>>) {
    guard_or((), || drop(plan));
}

/// The whole plan, defaults and all, as the object that a result folder's run.json has of it; to be
/// freed with `clh_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn clh_plan_json(
    plan: Option<&Plan>,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> Status {
    guard(|| {
        let json = cleared_text("json", json)?;
        *json = text::json(&required("plan", plan)?.sweep)?;
        Ok(Status::Ok)
    })
}
