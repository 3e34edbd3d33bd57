//! The configuration of a communicator.

use core::ffi::c_char;

use crate::hccl::HcclCommConfig;

/// The first 300 bytes of `HcclCommConfig`, its version 5.
///
/// The structure grows with every release, and a library reads as many bytes as the smaller of its
/// own and the stated size, so this prefix is understood by all of them. The function that fills
/// it is inline in the headers of the vendor and exported by none of the libraries.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HcclCommConfigV5 {
    size: usize,
    magic: u32,
    version: u32,
    reserved: u64,
    /// Buffer of the communicator in MB.
    pub buffer_size: u32,
    /// 1 for bit-identical results.
    pub deterministic: u32,
    /// Name of the communicator, ended by a zero; empty for one that the library makes.
    pub comm_name: [c_char; 128],
    /// Description of the communicator, ended by a zero.
    pub udi: [c_char; 128],
    /// Where operators are orchestrated; 0 leaves it to the library.
    pub op_expansion_mode: u32,
    /// Traffic class of RDMA.
    pub rdma_traffic_class: u32,
    /// Service level of RDMA.
    pub rdma_service_level: u32,
}

impl HcclCommConfigV5 {
    /// Bytes that the library is told of; the padding at the end is not part of it.
    pub const SIZE: usize = 300;
    /// Version of the layout.
    pub const VERSION: u32 = 5;
    /// A field with this value takes the variable of the environment or the default.
    pub const NOT_SET: u32 = u32::MAX;

    /// A configuration that changes nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            size: Self::SIZE,
            magic: crate::hccl::HCCL_COMM_CONFIG_MAGIC_WORD,
            version: Self::VERSION,
            reserved: 0,
            buffer_size: Self::NOT_SET,
            deterministic: Self::NOT_SET,
            comm_name: [0; 128],
            udi: [0; 128],
            op_expansion_mode: 0,
            rdma_traffic_class: Self::NOT_SET,
            rdma_service_level: Self::NOT_SET,
        }
    }

    /// The pointer that `HcclCommInitRootInfoConfig` takes.
    #[must_use]
    pub const fn as_ptr(&self) -> *const HcclCommConfig {
        core::ptr::from_ref(self).cast()
    }
}

impl Default for HcclCommConfigV5 {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::HcclCommConfigV5 as Config;

    /// Offsets as the interface notes list them; tests/abi holds them against real headers.
    #[test]
    fn prefix_has_the_offsets_of_version_5() {
        let offsets = [
            (offset_of!(Config, size), 0),
            (offset_of!(Config, magic), 8),
            (offset_of!(Config, version), 12),
            (offset_of!(Config, reserved), 16),
            (offset_of!(Config, buffer_size), 24),
            (offset_of!(Config, deterministic), 28),
            (offset_of!(Config, comm_name), 32),
            (offset_of!(Config, udi), 160),
            (offset_of!(Config, op_expansion_mode), 288),
            (offset_of!(Config, rdma_traffic_class), 292),
            (offset_of!(Config, rdma_service_level), 296),
        ];
        for (ours, stated) in offsets {
            assert_eq!(ours, stated);
        }
        assert_eq!(offset_of!(Config, rdma_service_level) + 4, Config::SIZE);
        assert_eq!(Config::new().magic, 0xf0f0_f0f0);
    }
}
