//! What copies between host and device are made of, whichever way they go.

use std::time::Duration;

use cluster_health_core::{
    ByteSize, DeviceBuffer, DeviceId, HostBuffer, Machine, Stream, TagPattern, Transfer,
};

use crate::error::{Error, Result};
use crate::plan::Direction;

/// One device's end of the copies.
#[derive(Debug)]
pub(super) struct Ends {
    direction: Direction,
    pub(super) stream: Stream,
    memory: DeviceBuffer,
    /// Where the copies to the host start from when there are both at once.
    back: Option<(Stream, DeviceBuffer)>,
}

impl Ends {
    pub(super) fn new(
        machine: &Machine,
        id: DeviceId,
        size: ByteSize,
        direction: Direction,
    ) -> Result<Self> {
        let device = machine
            .device(id)
            .ok_or_else(|| Error::invalid("--devices", format!("device {id} does not exist")))?;
        let new = || Ok::<_, Error>((Stream::new(&device)?, DeviceBuffer::new(&device, size)?));
        let (stream, memory) = new()?;
        let back = if direction == Direction::Bidirectional { Some(new()?) } else { None };
        Ok(Self { direction, stream, memory, back })
    }

    /// Bytes that a copy can have.
    pub(super) fn size(&self) -> ByteSize {
        ByteSize(self.memory.len() as u64)
    }
}

/// Host buffers that copies of one direction need.
pub(super) const fn host_buffers(direction: Direction) -> usize {
    match direction {
        Direction::H2d | Direction::D2h => 1,
        Direction::Bidirectional => 2,
    }
}

/// Both ends of the copies of a point.
#[derive(Debug)]
pub(super) struct Path<'a> {
    pub(super) device: &'a mut Ends,
    pub(super) host: &'a mut HostBuffer,
    /// Where the copies to the host end when there are both at once.
    pub(super) second_host: Option<&'a mut HostBuffer>,
}

/// The tags of the way back differ: crossed copies would otherwise look right.
fn of_way_back(tags: &TagPattern) -> TagPattern {
    let mut tags = *tags;
    tags.seed = tags.seed.rotate_left(32) ^ 0x5555_5555_5555_5555;
    tags
}

impl Path<'_> {
    /// Prepares one copy, or one each way.
    pub(super) fn prepare(&mut self, bytes: ByteSize, timeout: Duration) -> Result<Copies<'_>> {
        let Ends { direction, stream, memory, back } = &mut *self.device;
        let stream = &*stream;
        let first = match direction {
            Direction::D2h => Transfer::to_host(stream, memory, self.host, bytes, timeout)?,
            Direction::H2d | Direction::Bidirectional => {
                Transfer::to_device(stream, self.host, memory, bytes, timeout)?
            }
        };
        let second = match (back, self.second_host.as_deref_mut()) {
            (Some((stream, memory)), Some(host)) => {
                Some(Transfer::to_host(stream, memory, host, bytes, timeout)?)
            }
            _ => None,
        };
        Ok(Copies { first, second })
    }

    /// Writes the tags where the copies start.
    pub(super) fn write_tags(&mut self, tags: &TagPattern) -> Result<()> {
        match self.device.direction {
            Direction::D2h => self.device.memory.write_tags(tags)?,
            Direction::H2d | Direction::Bidirectional => self.host.write_tags(tags)?,
        }
        if let Some((_, memory)) = &mut self.device.back {
            memory.write_tags(&of_way_back(tags))?;
        }
        Ok(())
    }

    /// The name of a destination that does not hold the tags; `None` when all do.
    pub(super) fn wrong_end(&self, tags: &TagPattern) -> Result<Option<&'static str>> {
        const DEVICE: &str = "the device's memory";
        const HOST: &str = "the host's memory";
        let (arrived, end) = match self.device.direction {
            Direction::D2h => (self.host.check_tags(tags)?, HOST),
            Direction::H2d | Direction::Bidirectional => {
                (self.device.memory.check_tags(tags)?, DEVICE)
            }
        };
        if !arrived {
            return Ok(Some(end));
        }
        match &self.second_host {
            Some(host) if !host.check_tags(&of_way_back(tags))? => Ok(Some(HOST)),
            _ => Ok(None),
        }
    }
}

/// The copies of one iteration.
#[derive(Debug)]
pub(super) struct Copies<'a> {
    pub(super) first: Transfer<'a>,
    second: Option<Transfer<'a>>,
}

impl Copies<'_> {
    /// Starts `count` copies of each way.
    pub(super) fn issue(&mut self, count: u32) -> Result<()> {
        self.first.issue_batch(count)?;
        Ok(self.second.as_mut().map_or(Ok(()), |second| second.issue_batch(count))?)
    }

    /// Waits until all are done.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.first.wait()?;
        Ok(self.second.as_mut().map_or(Ok(()), Transfer::wait)?)
    }
}
