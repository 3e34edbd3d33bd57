//! Collectives between ranks, each with the device memory of its own rank.
//!
//! | here | HCCL | NCCL |
//! |---|---|---|
//! | [`Communicator::new`] | `HcclCommInitRootInfo` | `ncclCommInitRank` |
//! | [`Communicator::of_threads`] | `HcclCommInitAll` | `ncclCommInitAll` |
//! | [`Communicator::all_gather`] | `HcclAllGather` | `ncclAllGather` |
//! | [`Communicator::all_reduce`] | `HcclAllReduce` | `ncclAllReduce` |
//! | [`Communicator::reduce_scatter`] | `HcclReduceScatter` | `ncclReduceScatter` |
//! | [`Communicator::broadcast`] | `HcclBroadcast` | `ncclBroadcast` |
//! | [`Communicator::all_to_all`] | `HcclAlltoAll` | `ncclAllToAll` |
//! | [`Communicator::send`], [`Communicator::receive`] | `HcclSend`, `HcclRecv` | `ncclSend`, `ncclRecv` |
//! | [`Communicator::barrier`] | `HcclBarrier` | none |
//!
//! Counts are elements; a size is what one rank contributes. On the host backend each rank writes
//! its block straight into the others' memory, one copy per byte and receiver; blocks of up to 4 KiB
//! travel inside the message that announces them. A call returns when this rank's memory holds the
//! result; on Ascend the work is queued on `stream`, which is then waited for. A failed operation
//! leaves the communicator unusable.
//!
//! All ranks call the same operations in the same order with the same arguments. A rank that does
//! not is found out and named.

use std::time::Duration;

use crate::backend::BackendKind;
use crate::buffer::DeviceBuffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id::CpuId;
use crate::rank::RankGroup;
use crate::stream::Stream;
use crate::timer::EventTimer;

mod ascend;
mod copy;
mod host;
mod types;

pub use types::{DataType, ReduceOp};

use ascend::AscendCollectives;
use host::HostCollectives;

/// This rank's end of a group's collectives.
///
/// # Thread binding
/// Operations run on the calling thread (host backend) or are submitted by it; bind it first.
#[derive(Debug)]
pub struct Communicator<'g> {
    device: Device,
    ranks: Ranks<'g>,
}

#[derive(Debug)]
enum Ranks<'g> {
    Host(HostCollectives<'g>),
    Ascend(AscendCollectives<'g>),
}

impl Communicator<'static> {
    /// One communicator per device for threads of this process, in the order of the devices, which
    /// is that of the ranks: each goes to a thread of its own, and all of them call the same
    /// operations. `timeout` bounds the set-up, and every wait at first.
    ///
    /// ```no_run
    /// # use cluster_health_core::{Communicator, Machine};
    /// # use std::time::Duration;
    /// # fn main() -> cluster_health_core::Result<()> {
    /// let devices = Machine::ascend()?.devices();
    /// let communicators = Communicator::of_threads(&devices, Duration::from_secs(120))?;
    /// std::thread::scope(|scope| {
    ///     for mut communicator in communicators {
    ///         scope.spawn(move || communicator.barrier());
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When there is no device, one is named twice or is not of the Ascend backend (ranks of the
    /// host backend that are threads: [`RankGroup::threads`]), or HCCL cannot be opened or fails.
    pub fn of_threads(devices: &[Device], timeout: Duration) -> Result<Vec<Self>> {
        if devices.is_empty() {
            return Err(Error::invalid("devices", "the list is empty"));
        }
        for (index, device) in devices.iter().enumerate() {
            device.require_available()?;
            if device.driver().kind() != BackendKind::Ascend {
                return Err(Error::invalid(
                    "devices",
                    format!("device {} is not one of the Ascend backend", device.id()),
                ));
            }
            if devices[..index].iter().any(|other| other.id() == device.id()) {
                return Err(Error::invalid(
                    "devices",
                    format!("device {} is named twice", device.id()),
                ));
            }
        }
        let ranks = AscendCollectives::of_threads(devices, timeout)?;
        let one = |(ranks, device): (_, &Device)| Self {
            device: device.clone(),
            ranks: Ranks::Ascend(ranks),
        };
        Ok(ranks.into_iter().zip(devices).map(one).collect())
    }
}

impl<'g> Communicator<'g> {
    /// Joins the collectives of `group` with memory of `device`; all ranks call it together.
    ///
    /// On Ascend every rank needs a device of its own; HCCL is opened here, and its set-up is
    /// bounded by the group's timeout, on a thread of its own. A call that does not return by then
    /// is left behind.
    ///
    /// # Errors
    /// When a rank is missing or on another host (host backend), when HCCL cannot be opened or
    /// fails on any rank, or when the backend has no collectives.
    pub fn new(group: &'g RankGroup, device: &Device) -> Result<Self> {
        device.require_available()?;
        let ranks = match device.driver().kind() {
            BackendKind::Host => Ranks::Host(HostCollectives::new(group)?),
            BackendKind::Ascend => Ranks::Ascend(AscendCollectives::new(group, device)?),
            BackendKind::Synthetic => {
                return Err(Error::Unavailable {
                    what: "collectives of the synthetic backend".to_owned(),
                    message: "it moves no data".to_owned(),
                });
            }
        };
        Ok(Self { device: device.clone(), ranks })
    }

    /// Around an existing communicator of HCCL, for example a framework's; it is borrowed, never
    /// destroyed. The timeout is 30 s at first.
    ///
    /// # Errors
    /// When the device is not one of the Ascend backend, HCCL cannot be opened, or the
    /// communicator does not tell its rank.
    ///
    /// # Safety
    /// * `comm` is an `HcclComm` of this device and of the HCCL that this process has loaded, and
    ///   outlives the result.
    /// * Nothing else uses it during a call.
    #[allow(unsafe_code, reason = "takes a raw handle")]
    pub unsafe fn from_raw_hccl(device: &Device, comm: *mut std::ffi::c_void) -> Result<Self> {
        if device.driver().kind() != BackendKind::Ascend {
            return Err(Error::invalid("device", "is not one of the Ascend backend"));
        }
        // SAFETY:
        // * Forwarded to the caller.
        let ascend = unsafe { AscendCollectives::from_raw(device, comm)? };
        Ok(Self { device: device.clone(), ranks: Ranks::Ascend(ascend) })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        match &self.ranks {
            Ranks::Host(host) => host.group().rank(),
            Ranks::Ascend(ascend) => ascend.rank(),
        }
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        match &self.ranks {
            Ranks::Host(host) => host.group().size(),
            Ranks::Ascend(ascend) => ascend.size(),
        }
    }

    /// Bound of every wait for another rank.
    pub fn set_timeout(&mut self, timeout: Duration) {
        match &mut self.ranks {
            Ranks::Host(host) => host.set_timeout(timeout),
            Ranks::Ascend(ascend) => ascend.set_timeout(timeout),
        }
    }

    /// Tells the other ranks on which CPU this one runs: ranks that share a CPU give it away while
    /// they wait instead of spinning. Found out by itself where this is not called, after a wait.
    /// HCCL has no use for it.
    pub fn note_cpu(&self, cpu: CpuId) {
        if let Ranks::Host(host) = &self.ranks {
            host.note_cpu(cpu);
        }
    }

    fn check(&self, buffers: &[&DeviceBuffer], stream: &Stream) -> Result<()> {
        if !self.device.same(stream.device()) {
            return Err(Error::invalid(
                "stream",
                "belongs to another device than the communicator",
            ));
        }
        for buffer in buffers {
            if !self.device.same(buffer.device()) {
                return Err(Error::invalid(
                    "buffer",
                    "belongs to another device than the communicator",
                ));
            }
            buffer.settle()?;
        }
        Ok(())
    }

    /// Every rank gets every rank's `count` elements, in rank order: `receive` holds
    /// `size × count` elements.
    ///
    /// # Errors
    /// When a buffer is too short, a rank is missing (its number is named), or ranks disagree about
    /// the call.
    pub fn all_gather(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[send, receive], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.all_gather(Some(send), receive, count, data_type),
            Ranks::Ascend(ascend) => {
                ascend.all_gather(Some(send), receive, count, data_type, stream, None)
            }
        }
    }

    /// As many [`all_gather`](Self::all_gather)s as the timer's batch, back to back between its two
    /// events, whose [`nanoseconds`](EventTimer::nanoseconds) are then those of one. All ranks use
    /// the same batch.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn timed_all_gather(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        stream: &Stream,
        timer: &mut EventTimer,
    ) -> Result<()> {
        self.check(&[send, receive], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => {
                timer.begin(stream)?;
                for _ in 0..timer.batch() {
                    host.all_gather(Some(send), receive, count, data_type)?;
                }
                timer.end(stream)
            }
            Ranks::Ascend(ascend) => {
                ascend.all_gather(Some(send), receive, count, data_type, stream, Some(timer))
            }
        }
    }

    /// [`all_gather`](Self::all_gather) in place: this rank's elements stand at `rank × count` of
    /// `buffer` already.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_in_place(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[buffer], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.all_gather(None, buffer, count, data_type),
            Ranks::Ascend(ascend) => {
                ascend.all_gather(None, buffer, count, data_type, stream, None)
            }
        }
    }

    /// Every rank gets the combination of all ranks' `count` elements; the host backend
    /// combines ranks in ascending order, so that all get the same bits.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_reduce(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[send, receive], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.all_reduce(Some(send), receive, count, data_type, op),
            Ranks::Ascend(ascend) => {
                ascend.all_reduce(Some(send), receive, count, data_type, op, stream)
            }
        }
    }

    /// [`all_reduce`](Self::all_reduce) in place.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_reduce_in_place(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[buffer], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.all_reduce(None, buffer, count, data_type, op),
            Ranks::Ascend(ascend) => ascend.all_reduce(None, buffer, count, data_type, op, stream),
        }
    }

    /// Rank r gets the combination of the r-th `count` elements of all ranks: `send` holds
    /// `size × count` elements.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[send, receive], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.reduce_scatter(send, receive, count, data_type, op),
            Ranks::Ascend(ascend) => {
                ascend.reduce_scatter(send, receive, count, data_type, op, stream)
            }
        }
    }

    /// Every rank's `buffer` gets the `count` elements of `root`'s.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); also when there is no rank `root`.
    pub fn broadcast(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[buffer], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.broadcast(buffer, count, data_type, root),
            Ranks::Ascend(ascend) => ascend.broadcast(buffer, count, data_type, root, stream),
        }
    }

    /// Rank r gets the r-th `count` elements of every rank, in rank order; both buffers hold
    /// `size × count` elements.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_to_all(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[send, receive], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.all_to_all(send, receive, count, data_type),
            Ranks::Ascend(ascend) => ascend.all_to_all(send, receive, count, data_type, stream),
        }
    }

    /// Sends `count` elements to rank `to`, which calls [`receive`](Self::receive); returns when
    /// they are there.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); also when there is no such other rank.
    pub fn send(
        &mut self,
        buffer: &DeviceBuffer,
        count: usize,
        data_type: DataType,
        to: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[buffer], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.send(buffer, count, data_type, to),
            Ranks::Ascend(ascend) => ascend.send(buffer, count, data_type, to, stream),
        }
    }

    /// Receives `count` elements from rank `from`, which calls [`send`](Self::send).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn receive(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        from: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&[buffer], stream)?;
        match &mut self.ranks {
            Ranks::Host(host) => host.receive(buffer, count, data_type, from),
            Ranks::Ascend(ascend) => ascend.receive(buffer, count, data_type, from, stream),
        }
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// When a rank is missing; its number is named.
    pub fn barrier(&mut self) -> Result<()> {
        match &mut self.ranks {
            Ranks::Host(host) => host.barrier(),
            Ranks::Ascend(ascend) => ascend.barrier(),
        }
    }
}
