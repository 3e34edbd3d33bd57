//! Streams and events of one device.
#![allow(unsafe_code, reason = "calls into the driver trait")]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::backend::{RawEvent, RawStream};
use crate::device::Device;
use crate::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct StreamInner {
    pub(crate) raw: RawStream,
    pub(crate) device: Device,
    /// Set while the last wait ended by its time limit.
    late: AtomicBool,
    /// Somebody else's: never destroyed here.
    borrowed: bool,
}

/// How long an accessor or a drop waits for work that was left in flight.
const SETTLE_BOUND: Duration = Duration::from_secs(30);
/// The same where the stream was waited for in vain already.
const LATE_BOUND: Duration = Duration::from_millis(10);

impl StreamInner {
    pub(crate) fn synchronize(&self, timeout: Duration) -> Result<()> {
        // SAFETY:
        // * The stream came from this driver and lives as long as this value.
        let result = unsafe {
            self.device.driver().stream_synchronize(self.device.index(), self.raw, timeout)
        };
        let late = matches!(&result, Err(Error::Backend(error)) if error.timed_out);
        self.late.store(late, Ordering::Relaxed);
        result
    }

    /// Waits for what was left in flight: for long only once, so that a stream that hangs does
    /// not hold up everything that it was used with.
    pub(crate) fn settle(&self) -> Result<()> {
        let late = self.late.load(Ordering::Relaxed);
        self.synchronize(if late { LATE_BOUND } else { SETTLE_BOUND })
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.borrowed {
            // What was left in flight on it holds a reference to this value, so nothing is.
            // SAFETY:
            // * From this driver, borrowed, not used again.
            unsafe { self.device.driver().stream_return(self.raw) };
            return;
        }
        // A stream that does not become idle is left behind: destroying it would be unsound.
        if self.settle().is_ok() {
            // SAFETY:
            // * From this driver, destroyed once, idle.
            unsafe { self.device.driver().stream_destroy(self.raw) };
        }
    }
}

/// An in-order queue of work for one device.
///
/// On the host backend a copy is done by the calling thread when it is issued; on an accelerator
/// it goes on after the call.
#[derive(Debug, Clone)]
pub struct Stream(pub(crate) Arc<StreamInner>);

impl Stream {
    /// A stream of `device`.
    ///
    /// # Errors
    /// When the device is unavailable or refuses.
    pub fn new(device: &Device) -> Result<Self> {
        device.require_available()?;
        let raw = device.driver().stream_create(device.index())?;
        Ok(Self::of(device, raw, false))
    }

    /// Around an existing `aclrtStream`, for example a framework's; it is borrowed, never
    /// destroyed. With [`Communicator::from_raw_hccl`](crate::Communicator::from_raw_hccl) a
    /// framework measures on its own stream and communicator.
    ///
    /// # Errors
    /// When the device is unavailable or not one of the Ascend backend, or the stream is null (the
    /// default stream, which HCCL does not take).
    ///
    /// # Safety
    /// * `stream` is an `aclrtStream` of this device and of the ACL runtime that this process has
    ///   loaded, made in the context that `aclrtSetDevice` makes current, not in one of
    ///   `aclrtCreateContext`.
    /// * It outlives the result and its clones, every [`Event`] that was recorded in it, and every
    ///   buffer of a copy or collective that failed on it or whose
    ///   [`Transfer`](crate::Transfer) was leaked: all of them may wait for it.
    ///
    /// Others may go on using it: what they queue between two operations of this crate is waited
    /// for, and timed, with them.
    pub unsafe fn from_raw_acl(device: &Device, stream: *mut c_void) -> Result<Self> {
        device.require_available()?;
        if stream.is_null() {
            return Err(Error::invalid("stream", "a null stream"));
        }
        // SAFETY:
        // * Forwarded to the caller.
        let raw = unsafe { device.driver().stream_borrow(device.index(), stream)? };
        Ok(Self::of(device, raw, true))
    }

    fn of(device: &Device, raw: RawStream, borrowed: bool) -> Self {
        let (device, late) = (device.clone(), AtomicBool::new(false));
        Self(Arc::new(StreamInner { raw, device, late, borrowed }))
    }

    /// The device that the stream belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Waits until everything issued before is done.
    ///
    /// # Errors
    /// A timeout that names the device after `timeout`, or the device's own error.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        self.0.synchronize(timeout)
    }
}

/// A mark in a stream that carries a time stamp once it is reached.
#[derive(Debug)]
pub struct Event {
    raw: RawEvent,
    /// The device, and the stream it was recorded in last: kept alive until the event is done.
    device: Device,
    recorded: Option<Arc<StreamInner>>,
}

impl Event {
    /// An event of `device`, not recorded yet.
    ///
    /// # Errors
    /// When the device is unavailable or refuses.
    pub fn new(device: &Device) -> Result<Self> {
        device.require_available()?;
        let raw = device.driver().event_create(device.index())?;
        Ok(Self { raw, device: device.clone(), recorded: None })
    }

    /// Puts the mark behind everything issued to `stream` so far.
    ///
    /// # Errors
    /// When the stream belongs to another device, or the device refuses.
    pub fn record(&mut self, stream: &Stream) -> Result<()> {
        if !self.device.same(stream.device()) {
            return Err(Error::invalid("stream", "belongs to another device than the event"));
        }
        // SAFETY:
        // * Event and stream came from this driver and are alive.
        unsafe { self.device.driver().event_record(self.raw, stream.0.raw)? };
        self.recorded = Some(Arc::clone(&stream.0));
        Ok(())
    }

    /// Nanoseconds from `earlier` to this event; both must be reached (synchronise the stream).
    ///
    /// # Errors
    /// When either was not recorded, belongs to another device, or is not reached yet.
    pub fn nanoseconds_since(&self, earlier: &Self) -> Result<f64> {
        if !self.device.same(&earlier.device) {
            return Err(Error::invalid("event", "the two events belong to different devices"));
        }
        if self.recorded.is_none() || earlier.recorded.is_none() {
            return Err(Error::invalid("event", "was never recorded"));
        }
        // SAFETY:
        // * Both events came from this driver and are alive.
        unsafe { self.device.driver().event_elapsed_ns(earlier.raw, self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let idle = self.recorded.as_ref().is_none_or(|stream| stream.settle().is_ok());
        if idle {
            // SAFETY:
            // * From this driver, destroyed once, and its stream is idle.
            unsafe { self.device.driver().event_destroy(self.raw) };
        }
    }
}
