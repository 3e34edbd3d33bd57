//! Machines and what they have.

use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;

use cluster_health_core::Scenario;
use cluster_health_matrix::run::AffinityFile;

use crate::error::{Failure, Status, guard, guard_or};
use crate::text::{self, cleared, cleared_text, required};

/// CPUs, devices and a clock: this machine's, or those of a scenario. May be used by several
/// threads.
#[derive(Debug)]
pub struct Machine {
    pub(crate) inner: cluster_health_core::Machine,
    backend: CString,
}

impl Machine {
    fn new(inner: cluster_health_core::Machine) -> Box<Self> {
        let backend = text::c_string(&inner.backend().to_string());
        Box::new(Self { inner, backend })
    }
}

/// Opens a machine by the name that the command line has for it: "host" (this machine's CPUs and
/// memory, one device per NUMA node with memory), "ascend" (its NPUs), "auto" (NPUs, else host), or
/// "synthetic:FILE" (a scenario in TOML, in virtual time).
///
/// # Safety
/// `name` is NULL or points to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_machine_open(
    name: *const c_char,
    machine: Option<&mut MaybeUninit<Option<Box<Machine>>>>,
) -> Status {
    guard(|| {
        let machine = cleared("machine", machine)?;
        // SAFETY:
        // * The caller's promise is the same.
        let name = unsafe { text::text("name", name) }?;
        *machine = Some(Machine::new(cluster_health_core::Machine::by_name(name)?));
        Ok(Status::Ok)
    })
}

/// Makes a machine of a scenario's text, see docs/synthetic-machines.md.
///
/// # Safety
/// `scenario` is NULL or points to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_machine_synthetic(
    scenario: *const c_char,
    machine: Option<&mut MaybeUninit<Option<Box<Machine>>>>,
) -> Status {
    guard(|| {
        let machine = cleared("machine", machine)?;
        // SAFETY:
        // * The caller's promise is the same.
        let scenario = unsafe { text::text("scenario", scenario) }?;
        let scenario = Scenario::parse(scenario, "scenario")?;
        *machine = Some(Machine::new(cluster_health_core::Machine::synthetic(scenario)?));
        Ok(Status::Ok)
    })
}

/// Frees a machine; NULL is fine. Plans that were made for it stay usable.
#[unsafe(no_mangle)]
pub extern "C" fn clh_machine_free(machine: Option<Box<Machine>>) {
    guard_or((), || drop(machine));
}

/// "host", "ascend" or "synthetic"; lives as long as the machine. NULL for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn clh_machine_backend(machine: Option<&Machine>) -> *const c_char {
    machine.map_or(std::ptr::null(), |machine| machine.backend.as_ptr())
}

/// Number of online CPUs; the census tells which of them can be bound. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn clh_machine_cpu_count(machine: Option<&Machine>) -> usize {
    guard_or(0, || machine.map_or(0, |machine| machine.inner.topology().online().len()))
}

/// Number of devices, unavailable ones included. 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn clh_machine_device_count(machine: Option<&Machine>) -> usize {
    guard_or(0, || machine.map_or(0, |machine| machine.inner.devices().len()))
}

/// Which CPUs can really be bound, and why not where they cannot: the JSON object that
/// `cluster-health affinity --json` prints, to be freed with `clh_string_free`. The first call for
/// a machine tries every CPU from a thread of its own.
#[unsafe(no_mangle)]
pub extern "C" fn clh_machine_census(
    machine: Option<&Machine>,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> Status {
    guard(|| {
        let json = cleared_text("json", json)?;
        let machine = required("machine", machine)?;
        let census = machine.inner.census().map_err(Failure::from)?;
        *json = text::json(&AffinityFile::of(census))?;
        Ok(Status::Ok)
    })
}
