//! Devices: what a machine can copy to.

use std::fmt;
use std::sync::Arc;

use crate::backend::Driver;
use crate::error::{Error, Result};
use crate::id::{DeviceId, NodeId};
use crate::units::{Bandwidth, ByteSize};

/// What is known about a device before anything is measured.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Physical id.
    pub id: DeviceId,
    /// The runtime's own number for it in this process, where that differs in kind.
    pub runtime_id: i64,
    /// Model name, or what stands for it (`NUMA node 0 memory`).
    pub name: String,
    /// NUMA node next to it.
    pub node: Option<NodeId>,
    /// Its memory.
    pub memory: Option<ByteSize>,
    /// Host to device rate that the link is built for.
    pub declared_h2d: Option<Bandwidth>,
    /// Why it cannot be used, where it cannot.
    pub unavailable: Option<String>,
}

impl DeviceInfo {
    pub(crate) fn new(id: DeviceId, runtime_id: i64, name: impl Into<String>) -> Self {
        Self {
            id,
            runtime_id,
            name: name.into(),
            node: None,
            memory: None,
            declared_h2d: None,
            unavailable: None,
        }
    }
}

/// A device of a [`Machine`](crate::Machine); cheap to clone.
#[derive(Clone)]
pub struct Device {
    driver: Arc<dyn Driver>,
    index: usize,
}

impl Device {
    pub(crate) fn new(driver: Arc<dyn Driver>, index: usize) -> Self {
        Self { driver, index }
    }

    /// What is known about it.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.driver.devices()[self.index]
    }

    /// Its physical id.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.info().id
    }

    /// Makes it the calling thread's current device, where the runtime below has such a thing.
    ///
    /// Every type of this crate does that by itself, but calls that are timed
    /// ([`Transfer::issue`](crate::Transfer::issue), [`Event::record`](crate::Event::record)) trust
    /// that the device they made current last still is, instead of asking. A program that uses the
    /// runtime itself (`aclrtSetDevice`) on a measuring thread costs one of them a second attempt;
    /// calling this before the timed window avoids that.
    ///
    /// # Errors
    /// When the device is unavailable or cannot be opened.
    pub fn make_current(&self) -> Result<()> {
        self.require_available()?;
        self.driver.make_current(self.index)
    }

    /// Free and total bytes of its memory right now; `None` where the backend does not count them.
    /// Opens the device where it is not open yet.
    ///
    /// # Errors
    /// When the device is unavailable or does not tell.
    pub fn memory(&self) -> Result<Option<(ByteSize, ByteSize)>> {
        self.require_available()?;
        let found = self.driver.device_memory(self.index)?;
        Ok(found.map(|(free, total)| (ByteSize(free), ByteSize(total))))
    }

    pub(crate) fn require_available(&self) -> Result<()> {
        match &self.info().unavailable {
            None => Ok(()),
            Some(reason) => Err(Error::Unavailable {
                what: format!("device {}", self.id()),
                message: reason.clone(),
            }),
        }
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Whether one backend serves both.
    pub(crate) fn same_driver(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.driver, &other.driver)
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        self.same_driver(other) && self.index == other.index
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(self.info()).finish()
    }
}
