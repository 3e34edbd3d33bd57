//! For tests of this and other members: where the simulator is, and the variants of it.
//!
//! A member includes this file by its path; it needs nothing but the standard library.
#![allow(dead_code, reason = "not every member needs everything")]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The names by which clients look for the libraries.
pub(crate) const LIBRARIES: [&str; 5] =
    ["libascendcl.so", "libhccl.so", "libdcmi.so", "libopapi.so", "libnnopbase.so"];

/// What the simulator exports and toolkit 8.1.RC1 does not.
pub(crate) const NOT_IN_8_1_RC1: [&str; 37] = [
    "HcclGroupEnd",
    "HcclGroupStart",
    "aclFinalizeReference",
    "aclrtCtxGetCurrentDefaultStream",
    "aclrtDeviceGetByPCIBusId",
    "aclrtDeviceGetPCIBusId",
    "aclrtDeviceGetStreamPriorityRange",
    "aclrtDeviceGetUuid",
    "aclrtDevicePeerAccessStatus",
    "aclrtGetDeviceInfo",
    "aclrtGetDevicesTopo",
    "aclrtGetEventAvailNum",
    "aclrtGetEventId",
    "aclrtGetLogicDevIdByPhyDevId",
    "aclrtGetLogicDevIdByUserDevId",
    "aclrtGetMemUsageInfo",
    "aclrtGetPhyDevIdByLogicDevId",
    "aclrtGetPhyDevIdByUserDevId",
    "aclrtGetPrimaryCtxState",
    "aclrtGetStreamAvailableNum",
    "aclrtGetUserDevIdByLogicDevId",
    "aclrtGetUserDevIdByPhyDevId",
    "aclrtHostGetDevicePointer",
    "aclrtHostRegisterV2",
    "aclrtMemcpyBatch",
    "aclrtStreamWaitEventWithTimeout",
    "aclsysGetVersionNum",
    "aclsysGetVersionStr",
    "dcmiv2_get_dev_id_by_chip_phy_id",
    "dcmiv2_get_dev_id_from_chip_phyid",
    "dcmiv2_get_device_hbm_info",
    "dcmiv2_get_device_health",
    "dcmiv2_get_device_list",
    "dcmiv2_get_device_proc_mem_info",
    "dcmiv2_get_device_utilization_rate",
    "dcmiv2_get_driver_version",
    "dcmiv2_init",
];

/// The shared object that cargo has built beside this test.
pub(crate) fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let file = test.parent().unwrap().join("libascend_sim.so");
    assert!(file.exists(), "{} was not built", file.display());
    file
}

/// Makes `folder` hold the libraries of a machine; the names are links to one file.
pub(crate) fn install(folder: &Path, names: &[&str]) -> PathBuf {
    let file = folder.join("libascend_sim.so");
    fs::copy(built(), &file).unwrap();
    for name in names {
        std::os::unix::fs::symlink("libascend_sim.so", folder.join(name)).unwrap();
    }
    file
}

/// Overwrites the first letter of each symbol's name, so that the loader does not find it.
pub(crate) fn remove_symbols(file: &Path, names: &[&str]) {
    let mut bytes = fs::read(file).unwrap();
    let mut missing: Vec<&str> = names.to_vec();
    let (mut start, mut found) = (0, Vec::new());
    for word in bytes.split(|&byte| byte == 0) {
        if let Some(name) = names.iter().find(|name| name.as_bytes() == word) {
            found.push(start);
            missing.retain(|other| other != name);
        }
        start += word.len() + 1;
    }
    assert!(missing.is_empty(), "not symbols: {missing:?}");
    for at in found {
        bytes[at] = b'-';
    }
    fs::write(file, bytes).unwrap();
}
