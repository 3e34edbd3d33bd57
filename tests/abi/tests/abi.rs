//! The declarations of `ascend-sys` against our own headers, and against those that the Python
//! package `torch_npu` carries.
//!
//! DCMI and aclnn functions have no headers there, so those are held against our own only.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test reports by failing and says what it skipped"
)]

use std::path::{Path, PathBuf};

use ascend_sys::config::HcclCommConfigV5;
use ascend_sys::hccl::HcclTable;
use ascend_sys::load::Table;
use ascend_sys::{acl::AclTable, status};
use cluster_health_abi::{Check, Headers, Report, checks_of, wheel_headers};

const ACL: &str = include_str!("../../../ascend-sys/src/acl.rs");
const HCCL: &str = include_str!("../../../ascend-sys/src/hccl.rs");
const ACLNN: &str = include_str!("../../../ascend-sys/src/aclnn.rs");
const DCMI: &str = include_str!("../../../ascend-sys/src/dcmi.rs");

fn bindings(files: &[&str]) -> Vec<Check> {
    files.iter().flat_map(|file| checks_of(file).unwrap()).collect()
}

/// Everything that we state about ACL, HCCL and the types of aclnn.
fn statements() -> Vec<Check> {
    let mut checks = bindings(&[ACL, HCCL, ACLNN]);
    let codes = status::acl::TABLE.iter().chain(status::hccl::TABLE);
    checks.extend(
        codes.map(|&(code, name)| Check::Constant { name: name.into(), value: code.into() }),
    );
    let prefix = [
        ("hcclBufferSize", std::mem::offset_of!(HcclCommConfigV5, buffer_size)),
        ("hcclDeterministic", std::mem::offset_of!(HcclCommConfigV5, deterministic)),
        ("hcclCommName", std::mem::offset_of!(HcclCommConfigV5, comm_name)),
        ("hcclUdi", std::mem::offset_of!(HcclCommConfigV5, udi)),
        ("hcclOpExpansionMode", std::mem::offset_of!(HcclCommConfigV5, op_expansion_mode)),
        ("hcclRdmaTrafficClass", std::mem::offset_of!(HcclCommConfigV5, rdma_traffic_class)),
        ("hcclRdmaServiceLevel", std::mem::offset_of!(HcclCommConfigV5, rdma_service_level)),
        // The first field of version 6 begins where version 5 ends.
        ("hcclWorldRankID", HcclCommConfigV5::SIZE),
    ];
    checks.extend(prefix.map(|(field, offset)| Check::Field {
        name: "HcclCommConfig".into(),
        field: field.into(),
        offset: offset.try_into().unwrap(),
        c_type: String::new(),
    }));
    checks
}

fn own_headers() -> Headers {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ascend-sys/include");
    let includes = ["acl_min.h", "hccl_min.h", "dcmi_min.h", "aclnn_min.h"];
    Headers { folders: vec![include], includes: includes.map(String::from).to_vec() }
}

fn real_headers(version: Option<&str>) -> Option<Headers> {
    match wheel_headers(version, &PathBuf::from(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(headers) => Some(headers),
        Err(reason) => {
            println!("skipped: no torch_npu headers: {reason}");
            None
        }
    }
}

fn compare(headers: &Headers, checks: &[Check]) -> Report {
    let report = headers.compare(checks).unwrap_or_else(|error| panic!("{error}"));
    println!("{} compared, absent:", report.compared);
    for check in &report.absent {
        println!("  {}", check.name());
    }
    report
}

fn required() -> Vec<&'static str> {
    let symbols = AclTable::SYMBOLS.iter().chain(HcclTable::SYMBOLS);
    symbols.filter(|symbol| symbol.required).map(|symbol| symbol.name).collect()
}

#[test]
fn bindings_agree_with_our_own_headers() {
    let report = compare(&own_headers(), &bindings(&[ACL, HCCL, ACLNN, DCMI]));
    assert!(report.absent.is_empty());
    assert!(report.compared > 300, "{}", report.compared);
}

/// The oldest headers that there are; what they lack is what the notes on the interface say.
#[test]
fn declarations_agree_with_the_wheel_of_2_7_1() {
    let Some(headers) = real_headers(Some("2.7.1")) else { return };
    let report = compare(&headers, &statements());
    let mut absent = report.absent_functions();
    absent.retain(|name| !ACLNN.contains(&format!("pub {name}: Result")));
    absent.sort_unstable();
    let mut stated = [
        "aclsysGetVersionStr",
        "aclrtSynchronizeDeviceWithTimeout",
        "aclrtQueryDeviceStatus",
        "aclrtGetDeviceInfo",
        "aclrtGetDevicesTopo",
        "aclrtDeviceGetUuid",
        "aclrtDeviceGetPCIBusId",
        "aclrtGetLogicDevIdByUserDevId",
        "aclrtGetPhyDevIdByUserDevId",
        "aclrtGetUserDevIdByPhyDevId",
        "aclrtGetPhyDevIdByLogicDevId",
        "aclrtGetLogicDevIdByPhyDevId",
        "aclrtStreamAbort",
        "aclrtSynchronizeEventWithTimeout",
        "aclrtEventGetTimestamp",
        "aclrtHostRegister",
        "aclrtHostRegisterV2",
        "aclrtHostUnregister",
        "aclrtHostGetDevicePointer",
        "aclrtPointerGetAttributes",
        "aclrtDevicePeerAccessStatus",
        "HcclCommInitRootInfoConfig",
        "HcclGetRankSize",
        "HcclGetRankId",
        "HcclGetErrorString",
        "HcclBarrier",
    ];
    stated.sort_unstable();
    assert_eq!(absent, stated);

    // Trimmed headers: the libraries of this release have them, as 8.1.RC1 shows.
    let trimmed = ["HcclGetRankSize", "HcclGetRankId", "HcclGetErrorString", "HcclBarrier"];
    for name in required() {
        assert!(!absent.contains(&name) || trimmed.contains(&name), "{name} is required");
    }
}

#[test]
fn declarations_agree_with_the_newest_wheel() {
    let Some(headers) = real_headers(None) else { return };
    let report = compare(&headers, &statements());
    let absent = report.absent_functions();
    for name in required() {
        assert!(!absent.contains(&name), "{name} is required but no longer declared");
    }
    assert!(report.compared > 500, "{}", report.compared);
}

/// Changes the first check that `change` accepts, and expects the compiler to name it.
fn plant(headers: &Headers, change: impl Fn(&mut Check) -> bool, named: &str) {
    let mut checks = statements();
    // Ours leave this structure open.
    if headers.includes.iter().any(|header| header == "hccl_min.h") {
        checks.retain(|check| check.name() != "HcclCommConfig");
    }
    headers.compare(&checks).expect("nothing is wrong before");
    assert!(checks.iter_mut().any(change), "there is nothing to change");
    let error = headers.compare(&checks).expect_err("the planted error went unnoticed");
    assert!(error.contains(&format!("abi: {named}")), "{error}");
}

fn plant_all(headers: &Headers) {
    let constant = |check: &mut Check| match check {
        Check::Constant { name, value } if name == "ACL_MEMCPY_DEVICE_TO_HOST" => {
            *value += 1;
            true
        }
        _ => false,
    };
    plant(headers, constant, "ACL_MEMCPY_DEVICE_TO_HOST");

    let offset = |check: &mut Check| match check {
        Check::Field { field, offset, .. } if field == "utilizationExtend" => {
            *offset += 8;
            true
        }
        _ => false,
    };
    plant(headers, offset, "aclrtUtilizationInfo::utilizationExtend");

    let field_type = |check: &mut Check| match check {
        Check::Field { field, c_type, .. } if field == "vectorUtilization" => {
            *c_type = "uint32_t".into();
            true
        }
        _ => false,
    };
    plant(headers, field_type, "aclrtUtilizationInfo::vectorUtilization");

    let size = |check: &mut Check| match check {
        Check::Layout { name, size, .. } if name == "aclrtUtilizationInfo" => {
            *size += 8;
            true
        }
        _ => false,
    };
    plant(headers, size, "size of aclrtUtilizationInfo");

    let parameter = |check: &mut Check| match check {
        Check::Function { name, parameters, .. } if name == "aclrtMalloc" => {
            parameters[1] = "uint32_t".into();
            true
        }
        _ => false,
    };
    plant(headers, parameter, "aclrtMalloc");

    let result = |check: &mut Check| match check {
        Check::Function { name, result, .. } if name == "HcclAllGather" => {
            *result = "void".into();
            true
        }
        _ => false,
    };
    plant(headers, result, "HcclAllGather");

    let alias = |check: &mut Check| match check {
        Check::Alias { name, c_type } if name == "aclDataType" => {
            *c_type = "unsigned int".into();
            true
        }
        _ => false,
    };
    plant(headers, alias, "aclDataType");
}

#[test]
fn planted_errors_fail_against_our_own_headers() {
    plant_all(&own_headers());
}

#[test]
fn planted_errors_fail_against_real_headers() {
    let Some(headers) = real_headers(Some("2.7.1")) else { return };
    plant_all(&headers);
}

/// The code table has no header of ours, so this needs the real ones.
#[test]
fn planted_status_code_and_configuration_offset_fail_against_real_headers() {
    let Some(headers) = real_headers(Some("2.7.1")) else { return };
    let code = |check: &mut Check| match check {
        Check::Constant { name, value } if name == "ACL_ERROR_RT_CONTEXT_NULL" => {
            *value += 1;
            true
        }
        _ => false,
    };
    plant(&headers, code, "ACL_ERROR_RT_CONTEXT_NULL");
    let offset = |check: &mut Check| match check {
        Check::Field { field, offset, .. } if field == "hcclOpExpansionMode" => {
            *offset += 4;
            true
        }
        _ => false,
    };
    plant(&headers, offset, "HcclCommConfig::hcclOpExpansionMode");
}
