//! Sizes and offsets as the notes on the interface state them, and `Send + Sync` of what is shared.

use std::mem::{align_of, offset_of, size_of};

use ascend_sys::load::{Acl, Aclnn, Dcmi, Hccl, LoadError};
use ascend_sys::{acl, dcmi, hccl};

#[test]
fn sizes_are_those_of_the_interface() {
    let sizes = [
        ("aclrtUtilizationInfo", size_of::<acl::aclrtUtilizationInfo>(), 24),
        ("aclrtPtrAttributes", size_of::<acl::aclrtPtrAttributes>(), 28),
        ("aclrtMemLocation", size_of::<acl::aclrtMemLocation>(), 8),
        ("aclrtUuid", size_of::<acl::aclrtUuid>(), 16),
        ("aclCANNPackageVersion", size_of::<acl::aclCANNPackageVersion>(), 512),
        ("HcclRootInfo", size_of::<hccl::HcclRootInfo>(), 4108),
        ("HcclRootInfo, alignment", align_of::<hccl::HcclRootInfo>(), 1),
        ("HcclSendRecvItem", size_of::<hccl::HcclSendRecvItem>(), 32),
        ("buf", offset_of!(hccl::HcclSendRecvItem, buf), 8),
        ("count", offset_of!(hccl::HcclSendRecvItem, count), 16),
        ("dataType", offset_of!(hccl::HcclSendRecvItem, dataType), 24),
        ("remoteRank", offset_of!(hccl::HcclSendRecvItem, remoteRank), 28),
        ("dcmi_pcie_info_all", size_of::<dcmi::dcmi_pcie_info_all>(), 64),
        ("dcmi_hbm_info", size_of::<dcmi::dcmi_hbm_info>(), 32),
        ("memory_usage", offset_of!(dcmi::dcmi_hbm_info, memory_usage), 16),
        ("temp", offset_of!(dcmi::dcmi_hbm_info, temp), 24),
        ("bandwith_util_rate", offset_of!(dcmi::dcmi_hbm_info, bandwith_util_rate), 28),
        ("dcmi_proc_mem_info", size_of::<dcmi::dcmi_proc_mem_info>(), 16),
        ("proc_mem_usage", offset_of!(dcmi::dcmi_proc_mem_info, proc_mem_usage), 8),
    ];
    for (name, ours, stated) in sizes {
        assert_eq!(ours, stated, "{name}");
    }
}

#[test]
fn recorded_status_of_events_is_the_inverse_of_that_of_streams() {
    assert_eq!(acl::ACL_EVENT_RECORDED_STATUS_NOT_READY, acl::ACL_STREAM_STATUS_COMPLETE);
    assert_eq!(acl::ACL_EVENT_RECORDED_STATUS_COMPLETE, acl::ACL_STREAM_STATUS_NOT_READY);
}

#[test]
fn libraries_and_errors_cross_threads() {
    fn check<T: Send + Sync + 'static>() {}
    check::<Acl>();
    check::<Hccl>();
    check::<Dcmi>();
    check::<Aclnn>();
    check::<LoadError>();
}
