//! The driver's management interface: health, other processes, use. It knows devices by card and
//! chip, and is optional: what it does not tell is unknown.

use std::ffi::{c_char, c_int, c_uint};

use ascend_sys::dcmi as abi;
use ascend_sys::function;
use ascend_sys::load::Dcmi;
use ascend_sys::status::{Family, Status};
use once_cell::sync::OnceCell;

use super::acl::{missing, text_of};
use crate::activity::{DeviceActivity, DeviceProcess, FailedCall, is_own, process_name};
use crate::error::{BackendError, Error, Result};
use crate::id::DeviceId;

/// More than the interface ever lists.
const PROCESSES: usize = 64;

/// The loaded and initialised interface.
#[derive(Debug, Clone, Copy)]
pub(super) struct Management {
    dcmi: &'static Dcmi,
}

/// A device as the interface names it.
#[derive(Debug, Clone, Copy)]
struct Place {
    id: DeviceId,
    card: c_int,
    chip: c_int,
}

fn check(call: &'static str, code: c_int, device: Option<DeviceId>) -> Result<()> {
    let status = Status::new(Family::Dcmi, code);
    if status.is_success() {
        return Ok(());
    }
    Err(Error::Backend(Box::new(BackendError {
        call: call.to_owned(),
        code: status.code(),
        name: status.name().unwrap_or("unknown code").to_owned(),
        message: None,
        device,
        rank: None,
        advice: status.advice().map(str::to_owned),
        timed_out: status.is_timeout(),
    })))
}

impl Management {
    /// Opens the library and initialises it, once per process.
    pub(super) fn start() -> Result<Self> {
        let dcmi = ascend_sys::load::dcmi().map_err(|error| Error::Unavailable {
            what: "the device management interface".to_owned(),
            message: error.to_string(),
        })?;
        static STARTED: OnceCell<()> = OnceCell::new();
        STARTED.get_or_try_init(|| {
            let init = function!(dcmi, dcmi_init).map_err(missing)?;
            // SAFETY:
            // * The call has no preconditions.
            check("dcmi_init", unsafe { init() }, None)
        })?;
        Ok(Self { dcmi })
    }

    pub(super) fn driver_version(self) -> Result<String> {
        let get = function!(self.dcmi, dcmi_get_driver_version).map_err(missing)?;
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY:
        // * The buffer is ours, and its length minus one is passed, so that it ends in a zero.
        let code = unsafe { get(text.as_mut_ptr(), 255) };
        check("dcmi_get_driver_version", code, None)?;
        // SAFETY:
        // * The buffer is ours and its last byte is zero.
        let text = unsafe { text_of(text.as_ptr()) };
        Ok(text.unwrap_or_default())
    }

    /// Card numbers and how many chips each has.
    pub(super) fn cards(self) -> Result<Vec<[i32; 2]>> {
        let list = function!(self.dcmi, dcmi_get_card_list).map_err(missing)?;
        let number = function!(self.dcmi, dcmi_get_device_num_in_card).map_err(missing)?;
        let mut count: c_int = 0;
        let mut cards: [c_int; 64] = [0; 64];
        // SAFETY:
        // * Both pointers are to live memory of ours; the list has as many places as passed, the
        //   most that the call takes.
        let code = unsafe { list(&raw mut count, cards.as_mut_ptr(), 64) };
        check("dcmi_get_card_list", code, None)?;
        let count = usize::try_from(count).unwrap_or(0);
        let mut found = Vec::new();
        for card in cards.into_iter().take(count) {
            let mut chips: c_int = 0;
            // SAFETY:
            // * The pointer is to a live integer of ours.
            let code = unsafe { number(card, &raw mut chips) };
            check("dcmi_get_device_num_in_card", code, None)?;
            found.push([card, chips]);
        }
        Ok(found)
    }

    fn place(self, id: DeviceId) -> Result<Place> {
        let find = function!(self.dcmi, dcmi_get_card_id_device_id_from_phyid).map_err(missing)?;
        let (mut card, mut chip): (c_int, c_int) = (-1, -1);
        // SAFETY:
        // * Both pointers are to live integers of ours; an unknown id is an error code.
        let code = unsafe { find(&raw mut card, &raw mut chip, id.0) };
        check("dcmi_get_card_id_device_id_from_phyid", code, Some(id))?;
        Ok(Place { id, card, chip })
    }

    /// All that is known about a device; what fails is listed in it.
    pub(super) fn activity(self, id: DeviceId) -> DeviceActivity {
        let mut activity = DeviceActivity { device: id.0, ..DeviceActivity::default() };
        let place = match self.place(id) {
            Ok(place) => place,
            Err(error) => {
                activity.failures.push(FailedCall::of("dcmi", &error));
                return activity;
            }
        };
        let failures = &mut activity.failures;
        activity.processes = known(self.processes(place), id, failures);
        activity.health = known(self.health(place), id, failures);
        activity.utilisation_percent = known(self.utilisation(place), id, failures);
        if let Some((used, total)) = known(self.memory(place), id, failures) {
            activity.memory_used_bytes = Some(used);
            activity.memory_bytes = Some(total);
        }
        activity
    }

    fn processes(self, place: Place) -> Result<Vec<DeviceProcess>> {
        let get = function!(self.dcmi, dcmi_get_device_resource_info).map_err(missing)?;
        let none = abi::dcmi_proc_mem_info { proc_id: 0, proc_mem_usage: 0 };
        let mut list = [none; PROCESSES];
        let mut count: c_int = 0;
        // SAFETY:
        // * Both pointers are to live memory of ours; the list is longer than the 32 entries that
        //   the call writes at most.
        let code = unsafe { get(place.card, place.chip, list.as_mut_ptr(), &raw mut count) };
        check("dcmi_get_device_resource_info", code, Some(place.id))?;
        let count = usize::try_from(count).unwrap_or(0);
        let others = list.iter().take(count).filter(|process| !is_own(process.proc_id));
        let process = |process: &abi::dcmi_proc_mem_info| DeviceProcess {
            pid: process.proc_id,
            memory_bytes: process.proc_mem_usage,
            name: process_name(process.proc_id),
        };
        Ok(others.map(process).collect())
    }

    fn health(self, place: Place) -> Result<u32> {
        let get = function!(self.dcmi, dcmi_get_device_health).map_err(missing)?;
        let mut health: c_uint = 0;
        // SAFETY:
        // * The pointer is to a live integer of ours.
        let code = unsafe { get(place.card, place.chip, &raw mut health) };
        check("dcmi_get_device_health", code, Some(place.id))?;
        Ok(health)
    }

    fn utilisation(self, place: Place) -> Result<u32> {
        let get = function!(self.dcmi, dcmi_get_device_utilization_rate).map_err(missing)?;
        let kind = abi::DCMI_UTILIZATION_RATE_AICORE.cast_signed();
        let mut percent: c_uint = 0;
        // SAFETY:
        // * The pointer is to a live integer of ours.
        let code = unsafe { get(place.card, place.chip, kind, &raw mut percent) };
        check("dcmi_get_device_utilization_rate", code, Some(place.id))?;
        Ok(percent)
    }

    /// Bytes of high-bandwidth memory in use and altogether.
    fn memory(self, place: Place) -> Result<(u64, u64)> {
        let get = function!(self.dcmi, dcmi_get_device_hbm_info).map_err(missing)?;
        let mut info = abi::dcmi_hbm_info {
            memory_size: 0,
            freq: 0,
            memory_usage: 0,
            temp: 0,
            bandwith_util_rate: 0,
        };
        // SAFETY:
        // * The pointer is to a live structure of ours, laid out as the driver's.
        let code = unsafe { get(place.card, place.chip, &raw mut info) };
        check("dcmi_get_device_hbm_info", code, Some(place.id))?;
        let bytes = |megabytes: u64| megabytes.saturating_mul(1 << 20);
        Ok((bytes(info.memory_usage), bytes(info.memory_size)))
    }
}

fn known<T>(result: Result<T>, id: DeviceId, failures: &mut Vec<FailedCall>) -> Option<T> {
    result
        .map_err(|error| {
            failures.push(FailedCall { device: Some(id.0), ..FailedCall::of("dcmi", &error) });
        })
        .ok()
}

/// Activity of these devices, each unknown for the same reason where the interface is not there.
pub(super) fn activity(ids: impl Iterator<Item = DeviceId>) -> Vec<DeviceActivity> {
    let management = Management::start();
    ids.map(|id| match &management {
        Ok(management) => management.activity(id),
        Err(error) => DeviceActivity {
            device: id.0,
            failures: vec![FailedCall { device: Some(id.0), ..FailedCall::of("dcmi_init", error) }],
            ..DeviceActivity::default()
        },
    })
    .collect()
}
