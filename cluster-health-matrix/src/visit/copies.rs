//! Copies between the memories of one rank: its host memory, its device and a second device.

use std::collections::BTreeMap;

use cluster_health_core::{
    ByteSize, DeviceBuffer, DeviceId, EventTimer, HostBuffer, HostMemory, Machine, NodeId, Stream,
    TagPattern, Transfer,
};

use super::{Fastest, Operation, Settings, Visit, warm_up, whole_ns};
use crate::error::{Error, Result};
use crate::samples::Timer;

/// Buffers and stream of one rank. Made by the thread that measures, on the CPU that it is bound to,
/// so that the kernel places host memory there.
pub(crate) struct Copies<'a> {
    machine: &'a Machine,
    settings: Settings,
    stream: Stream,
    host: HostBuffer,
    near: DeviceBuffer,
    /// Why there is none is said by the visits that need it.
    second: Result<DeviceBuffer, String>,
    far: Result<DeviceBuffer, String>,
    timer: Option<EventTimer>,
    /// Copies between two events; `None` where the device's clock is too coarse for any number.
    batches: BTreeMap<(Operation, ByteSize), Option<u32>>,
    fastest: Fastest,
}

impl<'a> Copies<'a> {
    /// Memory for copies of up to `largest` bytes of `device`, and of `peer`, where there is one.
    pub(crate) fn new(
        machine: &'a Machine,
        device: DeviceId,
        peer: Option<DeviceId>,
        largest: ByteSize,
        settings: Settings,
    ) -> Result<Self> {
        let find = |id: DeviceId| {
            let missing = || Error::invalid("--devices", format!("device {id} does not exist"));
            machine.device(id).ok_or_else(missing)
        };
        let own = find(device)?;
        let stream = Stream::new(&own)?;
        let buffer = |id| Ok::<_, Error>(DeviceBuffer::new(&find(id)?, largest)?);
        let text = |error: Error| error.to_string();
        let far = match peer {
            Some(peer) => buffer(peer).map_err(text),
            None => Err("there is one device".to_owned()),
        };
        let timer = if machine.has_device_events() {
            Some(EventTimer::new(&stream, settings.timeout)?)
        } else {
            None
        };
        Ok(Self {
            machine,
            settings,
            host: HostBuffer::new(machine, largest, HostMemory::PageLocked)?,
            near: DeviceBuffer::new(&own, largest)?,
            second: buffer(device).map_err(text),
            far,
            stream,
            timer,
            batches: BTreeMap::new(),
            fastest: Fastest::default(),
        })
    }

    /// `page_locked` or `pageable`.
    pub(crate) fn memory(&self) -> &'static str {
        if self.host.pinned().is_pageable() { "pageable" } else { "page_locked" }
    }

    /// New host memory in place of the old, touched by the calling thread where it is now.
    pub(crate) fn renew_host(&mut self) -> Result<()> {
        let size = ByteSize(self.host.len() as u64);
        self.host = HostBuffer::new(self.machine, size, HostMemory::PageLocked)?;
        Ok(())
    }

    /// Pages of the host memory per NUMA node; `None` = unverified.
    pub(crate) fn page_nodes(&self) -> Option<BTreeMap<NodeId, u32>> {
        self.host.page_nodes()
    }

    /// What warm-ups are compared with, exchanged for that of another class of visits.
    pub(crate) fn fastest(&mut self) -> &mut Fastest {
        &mut self.fastest
    }

    /// One visit; `seed` is another one each time, so that what an earlier visit left behind is not
    /// taken for data that arrived.
    pub(crate) fn visit(
        &mut self,
        operation: Operation,
        bytes: ByteSize,
        seed: u64,
    ) -> Result<Visit> {
        let best = self.fastest.of(operation, bytes.bytes());
        let mut visit = Visit::default();
        // Timed copies carry other tags than the warm-up: what that left behind would pass.
        let tags = TagPattern::sparse(seed, bytes);
        self.write_tags(operation, &tags)?;
        visit.settled = {
            let machine = self.machine;
            let exactly = self.settings.warmup;
            let mut copy = self.parts().transfer(operation, bytes)?;
            warm_up(exactly, best, &mut visit.warmup_ns, || {
                let start = machine.now_ns();
                copy.issue()?;
                copy.wait()?;
                Ok(machine.now_ns() - start)
            })?
        };
        let tags = TagPattern::sparse(!seed, bytes);
        self.write_tags(operation, &tags)?;
        self.timed(operation, bytes, &mut visit)?;
        if !self.target(operation)?(&tags)? {
            let message = "the destination does not hold what was sent";
            return Err(Error::output("data check", message));
        }
        self.fastest.note(operation, bytes.bytes(), &visit);
        Ok(visit)
    }

    fn parts(&mut self) -> Parts<'_> {
        Parts {
            stream: &self.stream,
            host: &mut self.host,
            near: &mut self.near,
            second: &mut self.second,
            far: &mut self.far,
            timeout: self.settings.timeout,
        }
    }

    fn write_tags(&mut self, operation: Operation, tags: &TagPattern) -> Result<()> {
        match operation {
            Operation::H2d => Ok(self.host.write_tags(tags)?),
            _ => Ok(self.near.write_tags(tags)?),
        }
    }

    /// The check of where an operation copies to.
    #[allow(clippy::type_complexity, reason = "one use")]
    fn target(
        &self,
        operation: Operation,
    ) -> Result<Box<dyn Fn(&TagPattern) -> cluster_health_core::Result<bool> + '_>> {
        Ok(match operation {
            Operation::D2h => Box::new(|tags| self.host.check_tags(tags)),
            Operation::D2dSameDevice => {
                let buffer = self.second.as_ref().map_err(|reason| missing(reason))?;
                Box::new(|tags| buffer.check_tags(tags))
            }
            Operation::DeviceToDevice => {
                let buffer = self.far.as_ref().map_err(|reason| missing(reason))?;
                Box::new(|tags| buffer.check_tags(tags))
            }
            _ => Box::new(|tags| self.near.check_tags(tags)),
        })
    }

    fn timed(&mut self, operation: Operation, bytes: ByteSize, visit: &mut Visit) -> Result<()> {
        let mut timer = self.timer.take();
        let result = self.timed_with(&mut timer, operation, bytes, visit);
        self.timer = timer;
        result
    }

    fn timed_with(
        &mut self,
        timer: &mut Option<EventTimer>,
        operation: Operation,
        bytes: ByteSize,
        visit: &mut Visit,
    ) -> Result<()> {
        let (machine, iters) = (self.machine, self.settings.iters);
        let known = self.batches.get(&(operation, bytes)).copied();
        let stream = self.stream.clone();
        let mut copy = self.parts().transfer(operation, bytes)?;
        let mut batch = Some(1);
        if let Some(events) = timer {
            batch = match known {
                Some(batch) => batch,
                None => {
                    let found = events.choose(|events| events.time(&mut copy))?;
                    found.then(|| events.batch())
                }
            };
            events.set_batch(batch.unwrap_or(1));
        }
        let by_events = timer.is_some() && batch.is_some();
        let count = if by_events { batch.unwrap_or(1) } else { 1 };
        let mut host_ns = Vec::new();
        for _ in 0..iters {
            let start = machine.now_ns();
            match timer {
                Some(events) if by_events => {
                    events.begin(&stream)?;
                    copy.issue_batch(count)?;
                    events.end(&stream)?;
                    copy.wait()?;
                    host_ns.push((machine.now_ns() - start) / u64::from(count));
                    visit.iter_ns.push(whole_ns(events.nanoseconds()?));
                }
                _ => {
                    copy.issue()?;
                    copy.wait()?;
                    visit.iter_ns.push(machine.now_ns() - start);
                }
            }
            visit.ran_on.insert(machine.running_cpu()?);
        }
        drop(copy);
        visit.timer = Some(match (by_events, count) {
            (false, _) => Timer::Host,
            (true, 1) => Timer::Event,
            (true, _) => Timer::EventBatch,
        });
        if by_events && visit.iter_ns.contains(&0) {
            // Events that show no time at all say nothing about the copy.
            visit.iter_ns = host_ns;
            visit.timer = Some(Timer::Host);
        } else if by_events {
            visit.host_iter_ns = Some(host_ns);
        }
        if timer.is_some() {
            self.batches.insert((operation, bytes), batch);
        }
        Ok(())
    }
}

/// What a copy needs, borrowed one by one.
struct Parts<'a> {
    stream: &'a Stream,
    host: &'a mut HostBuffer,
    near: &'a mut DeviceBuffer,
    second: &'a mut Result<DeviceBuffer, String>,
    far: &'a mut Result<DeviceBuffer, String>,
    timeout: std::time::Duration,
}

impl<'a> Parts<'a> {
    fn transfer(self, operation: Operation, bytes: ByteSize) -> Result<Transfer<'a>> {
        let Self { stream, host, near, second, far, timeout } = self;
        Ok(match operation {
            Operation::H2d => Transfer::to_device(stream, host, near, bytes, timeout)?,
            Operation::D2h => Transfer::to_host(stream, near, host, bytes, timeout)?,
            Operation::D2dSameDevice => {
                let second = second.as_mut().map_err(|reason| missing(reason))?;
                Transfer::between_devices(stream, near, second, bytes, timeout)?
            }
            Operation::DeviceToDevice => {
                let far = far.as_mut().map_err(|reason| missing(reason))?;
                Transfer::between_devices(stream, near, far, bytes, timeout)?
            }
            other => {
                return Err(Error::invalid("operation", format!("{} is no copy", other.as_str())));
            }
        })
    }
}

/// A buffer that could not be had, as what it means for the operation.
fn missing(reason: &str) -> Error {
    Error::Core(cluster_health_core::Error::Unavailable {
        what: "the other end of the copy".to_owned(),
        message: reason.to_owned(),
    })
}
