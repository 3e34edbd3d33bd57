//! The driver's management interface: health, other processes, use. It knows devices by card and
//! chip, newer drivers by their logic ids, and is optional: what it does not tell is unknown.
//!
//! A driver in trouble may not answer at all, so every call runs on a thread of its own that is
//! left behind when it does not return.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread;
use std::time::Duration;

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

/// A healthy driver answers in milliseconds.
const BOUND: Duration = Duration::from_secs(3);

/// The loaded and initialised interface.
#[derive(Debug, Clone, Copy)]
pub(super) struct Management {
    dcmi: &'static Dcmi,
    generations: Generations,
}

/// Which names of functions can be used. A driver may have both and refuse one for its chips.
#[derive(Debug, Clone, Copy)]
struct Generations {
    /// `dcmi_`, by card and chip.
    first: bool,
    /// `dcmiv2_`, by logic id.
    second: bool,
}

/// A device as the interface names it.
#[derive(Debug, Clone, Copy)]
struct Place {
    id: DeviceId,
    name: Name,
}

#[derive(Debug, Clone, Copy)]
enum Name {
    Chip { card: c_int, chip: c_int },
    Device(c_int),
}

/// A call that did not return in time.
struct Unanswered {
    /// What was asked about; `None` for all.
    device: Option<DeviceId>,
    call: &'static str,
    /// Held by its thread.
    thread: Weak<()>,
}

static UNANSWERED: Mutex<Vec<Unanswered>> = Mutex::new(Vec::new());

/// The call about this device, or about all, that has not returned yet.
fn unanswered(device: Option<DeviceId>) -> Option<&'static str> {
    let mut list = UNANSWERED.lock().unwrap_or_else(PoisonError::into_inner);
    list.retain(|earlier| earlier.thread.strong_count() > 0);
    let about = |earlier: &&Unanswered| earlier.device.is_none() || earlier.device == device;
    list.iter().find(about).map(|earlier| earlier.call)
}

/// What `body` returns beside a code of success, within [`BOUND`]. While an earlier call about the
/// device has not returned, nothing is called.
fn bounded<T: Send + 'static>(
    call: &'static str,
    device: Option<DeviceId>,
    body: impl FnOnce() -> (c_int, T) + Send + 'static,
) -> Result<T> {
    let unavailable = |message| Error::Unavailable { what: call.to_owned(), message };
    if let Some(earlier) = unanswered(device) {
        return Err(unavailable(format!("not called, because {earlier} has not returned yet")));
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let alive = Arc::new(());
    let thread = Arc::downgrade(&alive);
    let run = move || {
        // Nobody waits for it any more when this fails.
        let _sent = sender.send(body());
        drop(alive);
    };
    thread::Builder::new().name("dcmi".to_owned()).spawn(run).map_err(|error| {
        Error::system("clone", error.raw_os_error().unwrap_or_default(), format!("for {call}"))
    })?;
    let Ok((code, value)) = receiver.recv_timeout(BOUND) else {
        let mut list = UNANSWERED.lock().unwrap_or_else(PoisonError::into_inner);
        list.push(Unanswered { device, call, thread });
        let seconds = BOUND.as_secs();
        let message = format!(
            "it has not returned for {seconds} s; look whether npu-smi info answers, and at the \
             kernel log for the driver"
        );
        return Err(unavailable(message));
    };
    check(call, code, device)?;
    Ok(value)
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

/// Asks about a device by the names of either generation: `$argument`s follow the device's name, and
/// `$out`, first `$value`, is the answer.
macro_rules! ask {
    ($self:ident, $place:ident, $first:ident | $second:ident,
     $value:expr, |$out:ident| $($argument:expr),+) => {
        match $place.name {
            Name::Chip { card, chip } => {
                let get = function!($self.dcmi, $first).map_err(missing)?;
                bounded(stringify!($first), Some($place.id), move || {
                    let mut $out = $value;
                    // SAFETY:
                    // * The pointers are to live memory of ours, of the driver's layout and as
                    //   much as the call writes at most.
                    let code = unsafe { get(card, chip, $($argument),+) };
                    (code, $out)
                })
            }
            Name::Device(device) => {
                let get = function!($self.dcmi, $second).map_err(missing)?;
                bounded(stringify!($second), Some($place.id), move || {
                    let mut $out = $value;
                    // SAFETY:
                    // * As above.
                    let code = unsafe { get(device, $($argument),+) };
                    (code, $out)
                })
            }
        }
    };
}

/// Calls a function that has nothing but one answer about all devices.
macro_rules! call {
    ($self:ident, $name:ident, $value:expr, |$out:ident| $($argument:expr),*) => {{
        let get = function!($self.dcmi, $name).map_err(missing)?;
        bounded(stringify!($name), None, move || {
            let mut $out = $value;
            // SAFETY:
            // * The pointers are to live memory of ours, and lengths passed are those of it.
            let code = unsafe { get($($argument),*) };
            (code, $out)
        })
    }};
}

impl Management {
    /// Opens the library and initialises it, once per process.
    pub(super) fn start() -> Result<Self> {
        let dcmi = ascend_sys::load::dcmi().map_err(|error| Error::Unavailable {
            what: "the device management interface".to_owned(),
            message: error.to_string(),
        })?;
        static STARTED: OnceCell<Generations> = OnceCell::new();
        let generations =
            STARTED.get_or_try_init(|| match (first_init(dcmi), second_init(dcmi)) {
                (Err(error), Err(_)) => Err(error),
                (first, second) => Ok(Generations { first: first.is_ok(), second: second.is_ok() }),
            })?;
        Ok(Self { dcmi, generations: *generations })
    }

    /// The answer of the generation that has one; the first error where none has.
    fn either<T>(
        self,
        first: impl FnOnce() -> Result<T>,
        second: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match self.generations {
            Generations { first: true, second: true } => {
                first().or_else(|error| second().map_err(|_| error))
            }
            Generations { second: true, .. } => second(),
            Generations { .. } => first(),
        }
    }

    pub(super) fn driver_version(self) -> Result<String> {
        // One byte more than the length that is passed, so that it ends in a zero.
        const EMPTY: [c_char; 256] = [0; 256];
        let first = || call!(self, dcmi_get_driver_version, EMPTY, |text| text.as_mut_ptr(), 255);
        let second =
            || call!(self, dcmiv2_get_driver_version, EMPTY, |text| text.as_mut_ptr(), 255);
        let text = self.either(first, second)?;
        // SAFETY:
        // * The buffer is ours and its last byte is zero.
        let text = unsafe { text_of(text.as_ptr()) };
        Ok(text.unwrap_or_default())
    }

    /// Card numbers and how many chips each has; by logic id, each device is one of one chip.
    pub(super) fn cards(self) -> Result<Vec<[i32; 2]>> {
        const EMPTY: ([c_int; 64], c_int) = ([0; 64], 0);
        let listed = |(list, count): ([c_int; 64], c_int)| {
            list.into_iter().take(usize::try_from(count).unwrap_or(0))
        };
        let first = || {
            let list = call!(
                self,
                dcmi_get_card_list,
                EMPTY,
                |out| &raw mut out.1,
                out.0.as_mut_ptr(),
                64
            )?;
            let chips = |card| {
                let chips = call!(self, dcmi_get_device_num_in_card, 0, |out| card, &raw mut out)?;
                Ok([card, chips])
            };
            listed(list).map(chips).collect()
        };
        let second = || {
            let list = call!(
                self,
                dcmiv2_get_device_list,
                EMPTY,
                |out| out.0.as_mut_ptr(),
                &raw mut out.1,
                64
            )?;
            Ok(listed(list).map(|device| [device, 1]).collect())
        };
        self.either(first, second)
    }

    fn place(self, id: DeviceId) -> Result<Place> {
        let first = || self.chip(id).or_else(|error| self.chip_by_logic_id(id).map_err(|_| error));
        let name = self.either(first, || self.logic_device(id))?;
        Ok(Place { id, name })
    }

    fn chip(self, id: DeviceId) -> Result<Name> {
        let find = function!(self.dcmi, dcmi_get_card_id_device_id_from_phyid).map_err(missing)?;
        bounded("dcmi_get_card_id_device_id_from_phyid", Some(id), move || {
            let (mut card, mut chip): (c_int, c_int) = (-1, -1);
            // SAFETY:
            // * Both pointers are to live integers of ours; an unknown id is an error code.
            let code = unsafe { find(&raw mut card, &raw mut chip, id.0) };
            (code, Name::Chip { card, chip })
        })
    }

    /// As [`chip`](Self::chip), for drivers that lack its function.
    fn chip_by_logic_id(self, id: DeviceId) -> Result<Name> {
        let logic = function!(self.dcmi, dcmi_get_device_logicid_from_phyid).map_err(missing)?;
        let find =
            function!(self.dcmi, dcmi_get_card_id_device_id_from_logicid).map_err(missing)?;
        let logic = bounded("dcmi_get_device_logicid_from_phyid", Some(id), move || {
            let mut found: c_uint = 0;
            // SAFETY:
            // * The pointer is to a live integer of ours; an unknown id is an error code.
            let code = unsafe { logic(id.0, &raw mut found) };
            (code, found)
        })?;
        bounded("dcmi_get_card_id_device_id_from_logicid", Some(id), move || {
            let (mut card, mut chip): (c_int, c_int) = (-1, -1);
            // SAFETY:
            // * As for the physical id.
            let code = unsafe { find(&raw mut card, &raw mut chip, logic) };
            (code, Name::Chip { card, chip })
        })
    }

    fn logic_device(self, id: DeviceId) -> Result<Name> {
        const CALL: &str = "dcmiv2_get_dev_id_by_chip_phy_id";
        let find = function!(self.dcmi, dcmiv2_get_dev_id_by_chip_phy_id)
            .or_else(|symbol| {
                function!(self.dcmi, dcmiv2_get_dev_id_from_chip_phyid).map_err(|_| symbol)
            })
            .map_err(missing)?;
        let logic = bounded(CALL, Some(id), move || {
            let mut found: c_uint = 0;
            // SAFETY:
            // * The pointer is to a live integer of ours; an unknown id is an error code.
            let code = unsafe { find(id.0, &raw mut found) };
            (code, found)
        })?;
        let device = c_int::try_from(logic).map_err(|_| Error::Format {
            place: format!("{CALL} of {id}"),
            message: format!("{logic} is no logic id"),
        })?;
        Ok(Name::Device(device))
    }

    /// All that is known about a device; what fails is listed in it.
    pub(super) fn activity(self, id: DeviceId) -> DeviceActivity {
        let mut activity = DeviceActivity { device: id.0, ..DeviceActivity::default() };
        let failures = &mut activity.failures;
        let Some(place) = known(self.place(id), id, failures) else { return activity };
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
        const NONE: abi::dcmi_proc_mem_info =
            abi::dcmi_proc_mem_info { proc_id: 0, proc_mem_usage: 0 };
        // Room for more than the 32 entries that are written at most.
        let (list, count) = ask!(
            self,
            place,
            dcmi_get_device_resource_info | dcmiv2_get_device_proc_mem_info,
            ([NONE; PROCESSES], 0),
            |out| out.0.as_mut_ptr(),
            &raw mut out.1
        )?;
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
        ask!(self, place, dcmi_get_device_health | dcmiv2_get_device_health, 0, |out| &raw mut out)
    }

    fn utilisation(self, place: Place) -> Result<u32> {
        const KIND: c_int = abi::DCMI_UTILIZATION_RATE_AICORE.cast_signed();
        ask!(
            self,
            place,
            dcmi_get_device_utilization_rate | dcmiv2_get_device_utilization_rate,
            0,
            |out| KIND,
            &raw mut out
        )
    }

    /// Bytes of high-bandwidth memory in use and altogether.
    fn memory(self, place: Place) -> Result<(u64, u64)> {
        const NONE: abi::dcmi_hbm_info = abi::dcmi_hbm_info {
            memory_size: 0,
            freq: 0,
            memory_usage: 0,
            temp: 0,
            bandwith_util_rate: 0,
        };
        let info = ask!(
            self,
            place,
            dcmi_get_device_hbm_info | dcmiv2_get_device_hbm_info,
            NONE,
            |out| &raw mut out
        )?;
        let bytes = |megabytes: u64| megabytes.saturating_mul(1 << 20);
        Ok((bytes(info.memory_usage), bytes(info.memory_size)))
    }
}

fn first_init(dcmi: &'static Dcmi) -> Result<()> {
    let init = function!(dcmi, dcmi_init).map_err(missing)?;
    // SAFETY:
    // * The call has no preconditions.
    bounded("dcmi_init", None, move || (unsafe { init() }, ()))
}

fn second_init(dcmi: &'static Dcmi) -> Result<()> {
    let init = function!(dcmi, dcmiv2_init).map_err(missing)?;
    // SAFETY:
    // * The call has no preconditions.
    bounded("dcmiv2_init", None, move || (unsafe { init() }, ()))
}

fn known<T>(result: Result<T>, id: DeviceId, failures: &mut Vec<FailedCall>) -> Option<T> {
    let failed = |error: Error| {
        let call = match &error {
            Error::Unavailable { what, .. } => what,
            _ => "dcmi",
        };
        FailedCall { device: Some(id.0), ..FailedCall::of(call, &error) }
    };
    result.map_err(|error| failures.push(failed(error))).ok()
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
