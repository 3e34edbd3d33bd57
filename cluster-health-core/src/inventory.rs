//! What this machine has of Ascend software and devices: for a run's record, and for a report of
//! a machine where something does not work.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::activity::FailedCall;
use crate::backend::ascend;

/// A library and what came of opening it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LibraryRecord {
    /// File name that is looked for first.
    pub name: String,
    /// The files that were opened; empty when it cannot be used.
    pub paths: Vec<PathBuf>,
    /// Why it cannot be used, with every path tried and what to do.
    pub problem: Option<String>,
    /// Paths that were tried in vain, each with what was wrong.
    pub tried: Vec<(PathBuf, String)>,
    /// Functions that it has of those looked for.
    pub found: Vec<String>,
    /// Functions that it lacks of those looked for.
    pub missing: Vec<String>,
}

/// Versions and files of the Ascend software in use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AscendSoftware {
    /// Version of the driver.
    pub driver: Option<String>,
    /// Version of the runtime's interface.
    pub runtime: Option<String>,
    /// Versions of the toolkit's packages by their names.
    pub packages: BTreeMap<String, String>,
    /// Name of the chips.
    pub soc: Option<String>,
    /// File of each library in use.
    pub libraries: BTreeMap<String, PathBuf>,
}

/// A device by the numbers that others know it by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AscendDevice {
    /// The runtime's number in this process.
    pub runtime_id: i32,
    /// Physical id, where the runtime tells.
    pub physical_id: Option<u32>,
    /// PCI address, where the runtime tells.
    pub pci_address: Option<String>,
}

/// The whole record.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AscendInventory {
    /// Versions and files.
    pub software: AscendSoftware,
    /// Every library that could be used.
    pub libraries: Vec<LibraryRecord>,
    /// Devices of the runtime.
    pub devices: Vec<AscendDevice>,
    /// Cards that the driver's management interface knows, each with its number of chips.
    pub cards: Vec<[i32; 2]>,
    /// Calls that failed.
    pub failures: Vec<FailedCall>,
}

impl AscendInventory {
    /// Opens every library, and asks those that opened. No device is opened. Nothing is an error:
    /// what is missing is what the record is for.
    #[must_use]
    pub fn take() -> Self {
        ascend::inventory::take()
    }
}
