//! Copies between host and device memory, prepared once and issued many times.
#![allow(unsafe_code, reason = "calls into the driver trait")]

use std::time::Duration;

use crate::backend::{CopyRequest, Direction, RawDevice, RawHost};
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
    host: (&'a RawHost, &'a Pending),
    device: (&'a RawDevice, &'a Pending),
    direction: Direction,
    bytes: usize,
    timeout: Duration,
    in_flight: bool,
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
        Self::prepare(stream, Direction::HostToDevice, source, target, size, timeout)
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
        Self::prepare(stream, Direction::DeviceToHost, target, source, size, timeout)
    }

    fn prepare(
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
        let bytes = size.as_len()?;
        let shorter = host.len().min(device.len());
        if bytes == 0 || bytes > shorter {
            return Err(Error::invalid(
                "size",
                format!("{bytes} bytes; the shorter buffer has {shorter}"),
            ));
        }
        let (host_access, device_access) = match direction {
            Direction::HostToDevice => (Access::Read, Access::Write),
            Direction::DeviceToHost => (Access::Write, Access::Read),
        };
        host.pending.begin(&stream.0, host_access)?;
        if let Err(error) = device.pending.begin(&stream.0, device_access) {
            host.pending.end(&stream.0);
            return Err(error);
        }
        Ok(Self {
            stream,
            host: (&host.raw, &host.pending),
            device: (&device.raw, &device.pending),
            direction,
            bytes,
            timeout,
            in_flight: false,
        })
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
        let device = self.stream.device();
        let request = CopyRequest {
            direction: self.direction,
            host: self.host.0,
            device: self.device.0,
            bytes: self.bytes,
            device_index: device.index(),
        };
        self.in_flight = true;
        // SAFETY:
        // * Both memories are borrowed for as long as this value lives, and a leaked value leaves
        //   its mark in both `Pending` lists.
        // * The length was checked against both when the transfer was prepared, and stream and
        //   device memory belong to the same device.
        unsafe { device.driver().copy_async(&request, self.stream.0.raw, self.timeout) }
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

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        // When the stream does not become idle the marks stay, and the buffers leak instead of
        // being freed under the device's hands.
        if !self.in_flight || self.stream.0.settle().is_ok() {
            self.host.1.end(&self.stream.0);
            self.device.1.end(&self.stream.0);
        }
    }
}
