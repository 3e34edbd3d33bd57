//! The border to C: argument types, the guard around every exported call, per-thread errors.
//!
//! [`Out`], [`In`] and [`Text`] are built by C callers only, in the argument list of an exported
//! function. The ABI of ACL, HCCL and DCMI obliges the caller to pass null or a pointer that is
//! valid for the call; that obligation is what the unsafe blocks below rest on.

use std::{
    cell::{Cell, RefCell},
    ffi::{CStr, CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    codes::{
        ACL_ERROR_COMPILING_STUB_MODE, ACL_ERROR_INTERNAL_ERROR, ACL_ERROR_INVALID_PARAM,
        ACLNN_ERR_PARAM_NULLPTR, DCMI_NOT_SUPPORT, DCMI_PARAMETER, HCCL_E_INTERNAL, HCCL_E_PTR,
    },
    config::{self, Action},
};

/// Which library a call belongs to: the same misuse has a different code in each.
#[derive(Clone, Copy)]
pub(crate) enum Family {
    Acl,
    Hccl,
    Dcmi,
    Aclnn,
}

impl Family {
    const fn null(self) -> i32 {
        match self {
            Self::Acl => ACL_ERROR_INVALID_PARAM,
            Self::Hccl => HCCL_E_PTR,
            Self::Dcmi => DCMI_PARAMETER,
            Self::Aclnn => ACLNN_ERR_PARAM_NULLPTR,
        }
    }

    const fn internal(self) -> i32 {
        match self {
            Self::Acl | Self::Aclnn => ACL_ERROR_INTERNAL_ERROR,
            Self::Hccl => HCCL_E_INTERNAL,
            Self::Dcmi => DCMI_NOT_SUPPORT,
        }
    }

    const fn stub(self) -> i32 {
        match self {
            Self::Acl | Self::Aclnn => ACL_ERROR_COMPILING_STUB_MODE,
            Self::Hccl | Self::Dcmi => self.internal(),
        }
    }
}

/// What a failed call returns and what `aclGetRecentErrMsg` says about it.
#[derive(Debug)]
pub(crate) struct Fail {
    /// `None`: a null pointer, whose code depends on the library.
    pub(crate) code: Option<i32>,
    pub(crate) text: String,
}

pub(crate) type Outcome = Result<(), Fail>;

pub(crate) fn fail<T>(code: i32, text: impl Into<String>) -> Result<T, Fail> {
    Err(Fail { code: Some(code), text: text.into() })
}

pub(crate) fn null<T>(what: &str) -> Result<T, Fail> {
    Err(Fail { code: None, text: format!("{what} is null") })
}

/// One exported function: its name and how often it was called.
pub(crate) struct Site {
    name: &'static str,
    calls: AtomicU64,
    listed: AtomicBool,
}

static SITES: Mutex<Vec<&'static Site>> = Mutex::new(Vec::new());

impl Site {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, calls: AtomicU64::new(0), listed: AtomicBool::new(false) }
    }

    pub(crate) fn count(&'static self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.listed.swap(true, Ordering::Relaxed) {
            lock(&SITES).push(self);
        }
    }
}

/// Calls of the exported function `name` so far.
pub(crate) fn calls(name: &str) -> Option<u64> {
    lock(&SITES).iter().find(|site| site.name == name).map(|s| s.calls.load(Ordering::Relaxed))
}

/// A task of one stream may panic while it holds a lock; the simulator goes on with what is there.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static LAST: Cell<i32> = const { Cell::new(0) };
    static MESSAGE: RefCell<Messages> = const { RefCell::new(Messages { recent: None, given: None }) };
    static MARK: Cell<Option<Mark>> = const { Cell::new(None) };
}

struct Messages {
    recent: Option<CString>,
    /// The text last handed to the caller: it stays valid until the next one is asked for.
    given: Option<CString>,
}

/// A fault that lets a call through and spoils the work it puts on a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Stall,
    Corrupt,
}

/// The mark the fault list put on the current call.
pub(crate) fn mark() -> Option<Mark> {
    MARK.get()
}

pub(crate) fn last_error(clear: bool) -> i32 {
    LAST.try_with(|last| if clear { last.replace(0) } else { last.get() }).unwrap_or(0)
}

pub(crate) fn recent_message() -> *const c_char {
    MESSAGE
        .try_with(|messages| {
            let mut messages = messages.borrow_mut();
            messages.given = messages.recent.take();
            messages.given.as_ref().map_or(ptr::null(), |text| text.as_ptr())
        })
        .unwrap_or(ptr::null())
}

fn record(site: &Site, code: i32, text: &str) {
    let text = CString::new(format!("E{code}: {}: {text}", site.name).replace('\0', "?")).ok();
    // A thread that is ending has no place left for a message, and nobody to read it.
    LAST.try_with(|last| last.set(code)).ok();
    MESSAGE.try_with(|messages| messages.borrow_mut().recent = text).ok();
}

/// Runs the body of an exported call: counts it, applies the fault list, keeps panics inside.
pub(crate) fn enter(site: &'static Site, family: Family, body: impl FnOnce() -> Outcome) -> i32 {
    let run = || {
        site.count();
        if let Some(text) = config::broken() {
            return fail(family.internal(), text);
        }
        if config::get().stub {
            return fail(family.stub(), "stub library");
        }
        match config::fault(site.name) {
            None => body(),
            Some(Action::Code(code)) => fail(code, "injected by the fault list"),
            Some(Action::Hang) => {
                config::hang();
                body()
            }
            Some(Action::Crash) => std::process::abort(),
            Some(Action::Mark(mark)) => {
                MARK.set(Some(mark));
                let outcome = body();
                MARK.set(None);
                outcome
            }
        }
    };
    let (code, text) = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return 0,
        Ok(Err(Fail { code, text })) => (code.unwrap_or(family.null()), text),
        Err(_) => (family.internal(), "the simulator panicked".to_owned()),
    };
    if code != 0 {
        record(site, code, &text);
    }
    code
}

/// Like [`enter`] for calls that return a value: `otherwise` when the stub or a panic is in the way.
pub(crate) fn value<T>(site: &'static Site, otherwise: T, body: impl FnOnce() -> T) -> T {
    let run = || {
        site.count();
        if config::get().stub { None } else { Some(body()) }
    };
    catch_unwind(AssertUnwindSafe(run)).ok().flatten().unwrap_or(otherwise)
}

/// Defines exported functions whose bodies are `Result<(), Fail>`.
macro_rules! exports {
    ($family:ident; $($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> i32 {
            static SITE: $crate::ffi::Site = $crate::ffi::Site::new(stringify!($name));
            $crate::ffi::enter(&SITE, $crate::ffi::Family::$family, || $body)
        }
    )*};
}
pub(crate) use exports;

/// A pointer to which the call writes its result.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn set(&self, value: T) -> Outcome {
        self.set_at(0, value)
    }

    /// Writes element `index` of an array the caller gave a length for.
    pub(crate) fn set_at(&self, index: usize, value: T) -> Outcome {
        if self.0.is_null() {
            return null("an output pointer");
        }
        let at = self.0.wrapping_add(index);
        // SAFETY:
        // * not null; the C caller passes room for one value, or for as many as it declared
        // * no Rust reference to the caller's variable exists
        unsafe { at.write(value) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes `text` and its terminator into a buffer of `room` bytes, cut where it does not fit.
    pub(crate) fn set_text(&self, text: &str, room: usize) -> Outcome {
        let kept = &text.as_bytes()[..text.len().min(room.saturating_sub(1))];
        for (index, &byte) in kept.iter().chain([&0]).take(room).enumerate() {
            self.set_at(index, c_char::from_ne_bytes([byte]))?;
        }
        Ok(())
    }
}

/// A pointer from which the call reads.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn get(&self) -> Result<T, Fail> {
        self.get_at(0)
    }

    pub(crate) fn get_at(&self, index: usize) -> Result<T, Fail> {
        if self.0.is_null() {
            return null("an input pointer");
        }
        let at = self.0.wrapping_add(index);
        // SAFETY:
        // * not null; the C caller passes one initialised value, or as many as it declared
        // * `T` is a C type for which every bit pattern is a value
        Ok(unsafe { at.read_unaligned() })
    }

    pub(crate) fn list(&self, count: usize) -> Result<Vec<T>, Fail> {
        (0..count).map(|index| self.get_at(index)).collect()
    }
}

/// A C string.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(&self) -> Result<Option<String>, Fail> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY:
        // * not null; the C caller passes a string with a terminator that lives during the call
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(Some(text.to_string_lossy().into_owned()))
    }

    pub(crate) fn required(&self) -> Result<String, Fail> {
        self.get()?.map_or_else(|| null("a string"), Ok)
    }
}
