//! Copies between host and device memory or between devices, prepared once and issued many times.
#![allow(unsafe_code, reason = "calls into the driver trait")]

use std::time::Duration;

use crate::backend::{CopyRequest, DeviceCopy, Direction};
use crate::buffer::{Access, DeviceBuffer, HostBuffer, Pending};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::units::ByteSize;

/// A prepared copy that borrows its stream and both buffers.
///
/// All checks, allocations and locks happen when it is made; [`issue`](Self::issue) and
/// [`wait`](Self::wait) do nothing but the backend's calls. Like a persistent request, it can be
/// issued again after it was waited for.
///
/// Leaking a transfer (`std::mem::forget`) is sound: both buffers remember the stream, and their
/// next use waits for it.
#[derive(Debug)]
pub struct Transfer<'a> {
    stream: &'a Stream,
    request: Request<'a>,
    pending: [&'a Pending; 2],
    timeout: Duration,
    in_flight: bool,
}

#[derive(Debug)]
enum Request<'a> {
    Host(CopyRequest<'a>),
    Devices(DeviceCopy<'a>),
}

impl<'a> Transfer<'a> {
    /// Prepares a copy of the first `size` bytes of `source` to the start of `target`.
    ///
    /// `timeout` bounds every wait for it.
    ///
    /// # Errors
    /// When `size` is 0 or larger than a buffer, when stream and device memory belong to different
    /// devices, or when a copy that was left in flight does not end.
    pub fn to_device(
        stream: &'a Stream,
        source: &'a HostBuffer,
        target: &'a mut DeviceBuffer,
        size: ByteSize,
        timeout: Duration,
    ) -> Result<Self> {
        Self::with_host(stream, Direction::HostToDevice, source, target, size, timeout)
    }

    /// Prepares a copy of the first `size` bytes of `source` to the start of `target`.
    ///
    /// # Errors
    /// As [`to_device`](Self::to_device).
    pub fn to_host(
        stream: &'a Stream,
        source: &'a DeviceBuffer,
        target: &'a mut HostBuffer,
        size: ByteSize,
        timeout: Duration,
    ) -> Result<Self> {
        Self::with_host(stream, Direction::DeviceToHost, target, source, size, timeout)
    }

    /// Prepares a copy of the first `size` bytes of `source` to the start of `target`, which is
    /// memory of the same or of another device of the machine. The stream belongs to either.
    ///
    /// Two devices are given access to each other once per process.
    ///
    /// # Errors
    /// As [`to_device`](Self::to_device); also when the devices cannot reach each other, which
    /// names both, and on a synthetic machine, whose scenarios have no such links.
    pub fn between_devices(
        stream: &'a Stream,
        source: &'a DeviceBuffer,
        target: &'a mut DeviceBuffer,
        size: ByteSize,
        timeout: Duration,
    ) -> Result<Self> {
        let [from, to] = [source.device(), target.device()];
        let used = stream.device();
        if !from.same_driver(to) || !(used.same(from) || used.same(to)) {
            return Err(Error::invalid(
                "stream",
                format!(
                    "belongs to device {}, the copy is from device {} to device {}",
                    used.id(),
                    from.id(),
                    to.id()
                ),
            ));
        }
        let bytes = length(size, source.len(), target.len())?;
        if !from.same(to) {
            from.driver().peer_open(from.index(), to.index())?;
        }
        let request = DeviceCopy {
            source: &source.raw,
            source_index: from.index(),
            target: &target.raw,
            target_index: to.index(),
            bytes,
            stream_index: used.index(),
        };
        let users = [(&source.pending, Access::Read), (&target.pending, Access::Write)];
        Self::prepare(stream, Request::Devices(request), users, timeout)
    }

    fn with_host(
        stream: &'a Stream,
        direction: Direction,
        host: &'a HostBuffer,
        device: &'a DeviceBuffer,
        size: ByteSize,
        timeout: Duration,
    ) -> Result<Self> {
        if !device.device().same(stream.device()) {
            return Err(Error::invalid(
                "stream",
                format!(
                    "belongs to device {}, the memory to device {}",
                    stream.device().id(),
                    device.device().id()
                ),
            ));
        }
        let request = CopyRequest {
            direction,
            host: &host.raw,
            device: &device.raw,
            bytes: length(size, host.len(), device.len())?,
            device_index: device.device().index(),
        };
        let (host_access, device_access) = match direction {
            Direction::HostToDevice => (Access::Read, Access::Write),
            Direction::DeviceToHost => (Access::Write, Access::Read),
        };
        let users = [(&host.pending, host_access), (&device.pending, device_access)];
        Self::prepare(stream, Request::Host(request), users, timeout)
    }

    fn prepare(
        stream: &'a Stream,
        request: Request<'a>,
        users: [(&'a Pending, Access); 2],
        timeout: Duration,
    ) -> Result<Self> {
        let [(first, first_access), (second, second_access)] = users;
        first.begin(&stream.0, first_access)?;
        // The thread's device is looked at here, so that issuing, which is timed, need not.
        let ready = second
            .begin(&stream.0, second_access)
            .and_then(|()| stream.device().make_current().inspect_err(|_| second.end(&stream.0)));
        if let Err(error) = ready {
            first.end(&stream.0);
            return Err(error);
        }
        let pending = [first, second];
        Ok(Self { stream, request, pending, timeout, in_flight: false })
    }

    /// Starts the copy. On the host backend the calling thread does it here.
    ///
    /// # Errors
    /// When it is in flight already, or the backend refuses.
    ///
    /// # Thread binding
    /// The calling thread submits (host backend: does) the copy; bind it first.
    pub fn issue(&mut self) -> Result<()> {
        if self.in_flight {
            return Err(Error::Busy("this transfer is in flight; wait for it first".to_owned()));
        }
        self.submit()
    }

    /// Starts the copy `count` times, back to back: another quantity than copies that are waited
    /// for one by one, for clocks too coarse for a single one ([`EventTimer`](crate::EventTimer)).
    ///
    /// # Errors
    /// As [`issue`](Self::issue).
    ///
    /// # Thread binding
    /// As [`issue`](Self::issue).
    pub fn issue_batch(&mut self, count: u32) -> Result<()> {
        if self.in_flight {
            return Err(Error::Busy("this transfer is in flight; wait for it first".to_owned()));
        }
        (0..count).try_for_each(|_| self.submit())
    }

    #[inline]
    fn submit(&mut self) -> Result<()> {
        self.in_flight = true;
        let (driver, raw) = (self.stream.device().driver(), self.stream.0.raw);
        match &self.request {
            // SAFETY:
            // * Both memories are borrowed for as long as this value lives, and a leaked value
            //   leaves its mark in both `Pending` lists.
            // * The length was checked against both when the transfer was prepared, and stream and
            //   device memory belong to the same device.
            Request::Host(request) => unsafe { driver.copy_async(request, raw, self.timeout) },
            // SAFETY:
            // * As above; the stream belongs to one of the devices, and the target is borrowed
            //   mutably, so that it is not the source.
            Request::Devices(request) => unsafe { driver.copy_devices_async(request, raw) },
        }
    }

    /// The stream that it is issued to.
    #[must_use]
    pub fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// Waits until the copy is done.
    ///
    /// # Errors
    /// A timeout that names the device, or the device's own error. The copy is then still counted
    /// as in flight.
    pub fn wait(&mut self) -> Result<()> {
        self.stream.synchronize(self.timeout)?;
        self.in_flight = false;
        Ok(())
    }
}

/// The length of a copy, which both buffers must have.
fn length(size: ByteSize, one: usize, other: usize) -> Result<usize> {
    let bytes = size.as_len()?;
    let shorter = one.min(other);
    if bytes == 0 || bytes > shorter {
        return Err(Error::invalid(
            "size",
            format!("{bytes} bytes; the shorter buffer has {shorter}"),
        ));
    }
    Ok(bytes)
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        // When the stream does not become idle the marks stay, and the buffers leak instead of
        // being freed under the device's hands.
        if !self.in_flight || self.stream.0.settle().is_ok() {
            for pending in self.pending {
                pending.end(&self.stream.0);
            }
        }
    }
}
