//! Libraries, versions and devices as they are found, failures included.

use ascend_sys::load::{LoadError, Loaded, Table};

use super::acl::Runtime;
use super::dcmi::Management;
use crate::activity::FailedCall;
use crate::error::Result;
use crate::inventory::{AscendDevice, AscendInventory, AscendSoftware, LibraryRecord};

/// What the libraries in use say about themselves.
pub(super) fn software(failures: &mut Vec<FailedCall>) -> AscendSoftware {
    let mut software = AscendSoftware::default();
    let mut opened = Vec::new();
    if let Some(runtime) = keep("aclInit", Runtime::start(), failures) {
        opened.extend_from_slice(runtime.acl.libraries());
        software.runtime = keep("aclrtGetVersion", runtime.version(), failures);
        software.packages = runtime.package_versions(failures);
        software.soc = runtime.model();
        if software.soc.is_none() {
            failures.push(FailedCall {
                call: "aclrtGetSocName".to_owned(),
                device: None,
                code: None,
                message: "it returned no name".to_owned(),
            });
        }
    }
    if let Some(management) = keep("dcmi_init", Management::start(), failures) {
        software.driver = keep("dcmi_get_driver_version", management.driver_version(), failures);
    }
    if let Ok(dcmi) = ascend_sys::load::dcmi() {
        opened.extend_from_slice(dcmi.libraries());
    }
    software.libraries =
        opened.into_iter().map(|library| (library.name.to_owned(), library.path)).collect();
    software
}

pub(crate) fn take() -> AscendInventory {
    let mut inventory = AscendInventory {
        libraries: vec![
            library("libascendcl.so", ascend_sys::load::acl()),
            library("libhccl.so", ascend_sys::load::hccl()),
            library("libdcmi.so", ascend_sys::load::dcmi()),
            library("libopapi.so", ascend_sys::load::aclnn()),
        ],
        ..AscendInventory::default()
    };
    let failures = &mut inventory.failures;
    inventory.software = software(failures);
    if let Ok(runtime) = Runtime::start() {
        let count = keep("aclrtGetDeviceCount", runtime.device_count(), failures).unwrap_or(0);
        for user in 0..i32::try_from(count).unwrap_or(i32::MAX) {
            let physical = runtime.physical_id(user);
            let address = runtime.pci_address(user);
            inventory.devices.push(AscendDevice {
                runtime_id: user,
                physical_id: keep("aclrtGetPhyDevIdByUserDevId", physical, failures),
                pci_address: keep("aclrtDeviceGetPCIBusId", address, failures),
            });
        }
    }
    if let Ok(management) = Management::start() {
        inventory.cards =
            keep("dcmi_get_card_list", management.cards(), failures).unwrap_or_default();
    }
    inventory
}

fn library<T: Table + 'static>(
    name: &str,
    loaded: Result<&'static Loaded<T>, LoadError>,
) -> LibraryRecord {
    let mut record = LibraryRecord {
        name: name.to_owned(),
        paths: Vec::new(),
        problem: None,
        tried: Vec::new(),
        found: Vec::new(),
        missing: Vec::new(),
    };
    match loaded {
        Ok(library) => {
            record.paths = library.libraries().iter().map(|opened| opened.path.clone()).collect();
            for (symbol, found) in library.symbols() {
                let list = if found { &mut record.found } else { &mut record.missing };
                list.push(symbol.name.to_owned());
            }
        }
        Err(error) => {
            record.problem = Some(error.to_string());
            let tried = error.attempts.into_iter();
            record.tried = tried.map(|attempt| (attempt.path, attempt.problem)).collect();
        }
    }
    record
}

fn keep<T>(call: &str, result: Result<T>, failures: &mut Vec<FailedCall>) -> Option<T> {
    result.map_err(|error| failures.push(FailedCall::of(call, &error))).ok()
}
