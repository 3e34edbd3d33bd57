//! Errors as a code and a message; panics end here.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cluster_health_matrix::Error;
use cluster_health_matrix::error::as_fields;

use crate::text::c_string;

/// How a call ended. Everything but `CLH_STATUS_OK` has a message, see `clh_last_error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Stopped before its end, by a token, a callback or the other rank. Results hold what was
    /// measured until then.
    Cancelled = 1,
    /// The call itself is wrong: NULL where something must be, text that is no UTF-8, an index
    /// beyond the end.
    BadCall = 2,
    /// A value cannot be used; the message begins with the field or option at fault.
    Invalid = 3,
    /// A backend, device or file is not on this machine.
    Unavailable = 4,
    /// A call into an accelerator's libraries failed; the message has call, code and device.
    Backend = 5,
    /// A call into the operating system failed.
    System = 6,
    /// A file or folder could not be used.
    Io = 7,
    /// A file holds something that cannot be read.
    Format = 8,
    /// A folder, group or device is in use by somebody else.
    Busy = 9,
    /// A rank or device did not answer in time.
    Timeout = 10,
    /// Another rank is gone or was asked for something else.
    Rank = 11,
    /// An output could not be made, or there was nothing to make it from.
    Output = 12,
    /// A mistake in this library. Nothing that the call was given must be used again, but to free
    /// it.
    Panic = 13,
    /// None of these; the message says what.
    Other = 14,
}

/// What a call returns instead of going through.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn bad_call(message: impl Into<String>) -> Self {
        Self::new(Status::BadCall, message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error.kind() {
            "cancelled" => Status::Cancelled,
            "invalid" => Status::Invalid,
            "unavailable" => Status::Unavailable,
            "backend" => Status::Backend,
            "system" => Status::System,
            "io" => Status::Io,
            "format" => Status::Format,
            "busy" => Status::Busy,
            "timeout" => Status::Timeout,
            "rank" => Status::Rank,
            "output" => Status::Output,
            _ => Status::Other,
        };
        // Options of the command line are fields or arguments here.
        Self::new(status, as_fields(&error.to_string()))
    }
}

impl From<cluster_health_core::Error> for Failure {
    fn from(error: cluster_health_core::Error) -> Self {
        Error::from(error).into()
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn remember(message: &str) {
    // A thread that is ending has no place for it any more.
    LAST.try_with(|last| *last.borrow_mut() = c_string(message)).ok();
}

/// Message of the last call of this thread that did not return `CLH_STATUS_OK`, one line; empty before
/// the first. Valid until the next such call of this thread; do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn clh_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs a call; its failure and its panic become a status with a message.
pub(crate) fn guard(call: impl FnOnce() -> Result<Status, Failure>) -> Status {
    // What a panic may leave half done is freed by the caller and never read again.
    let failure = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(status)) => return status,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new(Status::Panic, describe(panic.as_ref())),
    };
    remember(&failure.message);
    failure.status
}

/// As [`guard`] for what has no status: `default` stands for a failure.
pub(crate) fn guard_or<T>(default: T, call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(default)
}

fn describe(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a mistake in the library, please report it: {}", text.unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::thread;

    use super::*;

    fn last() -> String {
        // SAFETY:
        // * The pointer is that of a C string of this thread, which makes no call meanwhile.
        unsafe { CStr::from_ptr(clh_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status_with_its_message() {
        assert_eq!(last(), "");
        assert_eq!(guard(|| panic!("no {}", "luck")), Status::Panic);
        assert!(last().ends_with("no luck"), "{}", last());
        assert_eq!(guard(|| std::panic::panic_any(7)), Status::Panic);
        assert!(last().ends_with("no message"), "{}", last());
        assert_eq!(guard_or(3, || panic!("again")), 3);
    }

    #[test]
    fn messages_are_those_of_their_thread_and_stay_until_the_next() {
        assert_eq!(guard(|| Err(Failure::bad_call("one\0two"))), Status::BadCall);
        thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(guard(|| Ok(Status::Ok)), Status::Ok);
        assert_eq!(last(), "one two");
    }

    #[test]
    fn errors_keep_their_kind() {
        let missing = cluster_health_core::Error::Busy("rank 1".to_owned());
        assert_eq!(Failure::from(missing).status, Status::Busy);
        let failure = Failure::from(Error::invalid("cpus", "the list is empty"));
        assert_eq!(
            (failure.status, &*failure.message),
            (Status::Invalid, "cpus: the list is empty")
        );
    }
}
