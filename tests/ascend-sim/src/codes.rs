//! The status codes the simulator returns, by their names in the vendor's headers.

pub(crate) const ACL_ERROR_INVALID_PARAM: i32 = 100_000;
pub(crate) const ACL_ERROR_UNINITIALIZE: i32 = 100_001;
pub(crate) const ACL_ERROR_REPEAT_INITIALIZE: i32 = 100_002;
pub(crate) const ACL_ERROR_INVALID_FILE: i32 = 100_003;
pub(crate) const ACL_ERROR_REPEAT_FINALIZE: i32 = 100_037;
pub(crate) const ACL_ERROR_COMPILING_STUB_MODE: i32 = 100_039;
pub(crate) const RT_PARAM_INVALID: i32 = 107_000;
pub(crate) const RT_INVALID_DEVICEID: i32 = 107_001;
pub(crate) const RT_CONTEXT_NULL: i32 = 107_002;
pub(crate) const RT_STREAM_CONTEXT: i32 = 107_003;
pub(crate) const RT_EVENT_TIMESTAMP_INVALID: i32 = 107_006;
pub(crate) const RT_EVENT_TIMESTAMP_REVERSAL: i32 = 107_007;
pub(crate) const RT_ADDR_UNALIGNED: i32 = 107_008;
pub(crate) const RT_INVALID_HANDLE: i32 = 107_017;
pub(crate) const RT_TASK_TIMEOUT: i32 = 107_020;
pub(crate) const ACL_ERROR_FEATURE_UNSUPPORTED: i32 = 200_006;
pub(crate) const RT_FEATURE_NOT_SUPPORT: i32 = 207_000;
pub(crate) const RT_MEMORY_ALLOCATION: i32 = 207_001;
pub(crate) const RT_NO_DEVICE: i32 = 207_004;
pub(crate) const RT_NO_EVENT_RESOURCE: i32 = 207_007;
pub(crate) const RT_NO_STREAM_RESOURCE: i32 = 207_008;
pub(crate) const ACL_ERROR_INTERNAL_ERROR: i32 = 500_000;
pub(crate) const RT_SYS_DMA: i32 = 507_013;
pub(crate) const RT_STREAM_SYNC_TIMEOUT: i32 = 507_046;
pub(crate) const RT_EVENT_SYNC_TIMEOUT: i32 = 507_047;
pub(crate) const RT_DRV_INTERNAL_ERROR: i32 = 507_899;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: i32 = 507_910;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: i32 = 507_911;

pub(crate) const HCCL_E_PARA: i32 = 1;
pub(crate) const HCCL_E_PTR: i32 = 2;
pub(crate) const HCCL_E_MEMORY: i32 = 3;
pub(crate) const HCCL_E_INTERNAL: i32 = 4;
pub(crate) const HCCL_E_NOT_SUPPORT: i32 = 5;
pub(crate) const HCCL_E_NOT_FOUND: i32 = 6;
pub(crate) const HCCL_E_SYSCALL: i32 = 8;
pub(crate) const HCCL_E_TIMEOUT: i32 = 9;
pub(crate) const HCCL_E_TCP_CONNECT: i32 = 11;
pub(crate) const HCCL_E_RUNTIME: i32 = 15;
pub(crate) const HCCL_E_AGAIN: i32 = 20;

pub(crate) const DCMI_PARAMETER: i32 = -8001;
pub(crate) const DCMI_DEVICE_NOT_EXIST: i32 = -8008;
pub(crate) const DCMI_NOT_READY: i32 = -8012;
pub(crate) const DCMI_NOT_SUPPORT: i32 = -8255;

pub(crate) const ACLNN_ERR_PARAM_NULLPTR: i32 = 161_001;
pub(crate) const ACLNN_ERR_PARAM_INVALID: i32 = 161_002;
