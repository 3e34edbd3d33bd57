//! Texts, handles and results on their way between C and here.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use crate::error::{Failure, guard_or};

/// What stands where something must stand.
pub(crate) fn required<T>(name: &str, value: Option<T>) -> Result<T, Failure> {
    value.ok_or_else(|| Failure::bad_call(format!("{name} is NULL")))
}

/// A place for a handle that is NULL until the call has come to its end, so that freeing it is
/// always right.
pub(crate) fn cleared<'a, T>(
    name: &str,
    out: Option<&'a mut MaybeUninit<Option<Box<T>>>>,
) -> Result<&'a mut Option<Box<T>>, Failure> {
    Ok(required(name, out)?.write(None))
}

/// The same for a text.
pub(crate) fn cleared_text<'a>(
    name: &str,
    out: Option<&'a mut MaybeUninit<*mut c_char>>,
) -> Result<&'a mut *mut c_char, Failure> {
    Ok(required(name, out)?.write(std::ptr::null_mut()))
}

/// Text without the NULs that would end it early in C.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// A value as JSON that the caller frees.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<*mut c_char, Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::new(crate::error::Status::Output, format!("JSON: {error}")))?;
    Ok(c_string(&text).into_raw())
}

/// The bytes of a C text; `None` for NULL.
///
/// # Safety
/// As the functions of the header that take texts.
unsafe fn bytes<'a>(text: *const c_char) -> Option<&'a CStr> {
    if text.is_null() {
        return None;
    }
    // SAFETY:
    // * It is not NULL, so the caller promises that it points to bytes that end with a NUL.
    // * They are not changed nor freed before the call returns, and nothing here keeps them longer.
    Some(unsafe { CStr::from_ptr(text) })
}

/// A text; `None` for NULL.
///
/// # Safety
/// As the functions of the header that take texts.
pub(crate) unsafe fn optional_text<'a>(
    name: &str,
    text: *const c_char,
) -> Result<Option<&'a str>, Failure> {
    // SAFETY:
    // * The caller's promise is the same.
    let text = unsafe { bytes(text) };
    let read = |text: &'a CStr| {
        text.to_str().map_err(|error| Failure::bad_call(format!("{name} is no UTF-8: {error}")))
    };
    text.map(read).transpose()
}

/// A text that must be there.
///
/// # Safety
/// As the functions of the header that take texts.
pub(crate) unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str, Failure> {
    // SAFETY:
    // * The caller's promise is the same.
    required(name, unsafe { optional_text(name, text) }?)
}

/// The path of a file or folder: any bytes but NUL.
///
/// # Safety
/// As the functions of the header that take texts.
pub(crate) unsafe fn path<'a>(name: &str, text: *const c_char) -> Result<&'a Path, Failure> {
    // SAFETY:
    // * The caller's promise is the same.
    let text = required(name, unsafe { bytes(text) })?;
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// Frees a text that a call gave away; NULL is fine.
///
/// # Safety
/// `text` is NULL or was given away by this library and not yet freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_string_free(text: *mut c_char) {
    if text.is_null() {
        return;
    }
    guard_or((), || {
        // SAFETY:
        // * It is not NULL, so the caller promises that `CString::into_raw` made it here and that it
        //   is given back once.
        drop(unsafe { CString::from_raw(text) });
    });
}
