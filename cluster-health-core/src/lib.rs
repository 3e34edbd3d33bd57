//! Safe types for what lies between a CPU core and an accelerator: CPUs and their binding,
//! devices, streams, buffers and transfers, on real hardware or on a synthetic machine.

pub mod affinity;
pub mod error;
pub mod id;
pub mod topology;
pub mod units;

pub use error::{Error, Result};
pub use id::{CpuId, DeviceId, NodeId};
pub use units::{Bandwidth, ByteSize};
