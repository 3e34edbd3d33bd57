//! Safe types for what lies between a CPU core and an accelerator: CPUs and their binding,
//! devices, streams, buffers and copies, on real hardware or on a synthetic machine.
//!
//! | here | Ascend ACL | CUDA | host backend |
//! |---|---|---|---|
//! | [`Machine`] | process, `aclInit` | driver | this machine |
//! | [`Device`] | device id, context | device, context | memory of one NUMA node |
//! | [`Stream`] | `aclrtStream` | `cudaStream_t` | the calling thread |
//! | [`Event`] | `aclrtEvent` | `cudaEvent_t` | a time stamp |
//! | [`HostBuffer`] | `aclrtMallocHost`, `aclrtHostRegister` | `cudaHostAlloc`, `cudaHostRegister` | `mmap` + `mlock` |
//! | [`DeviceBuffer`] | `aclrtMalloc` | `cudaMalloc` | sealed memfd bound to the node |
//! | [`EventTimer`] | two `aclrtEvent`s | two `cudaEvent_t`s | two time stamps |
//! | [`Transfer`] | `aclrtMemcpyAsync` | `cudaMemcpyAsync` | `memcpy` by the bound CPU |
//! | [`DeviceMatmul`] | `aclnnMatmul` | `cublasGemmEx` | none |
//! | [`Communicator`] | `HcclComm` | `ncclComm_t` | ranks that write into each other's memfds |
//! | [`LoadGenerator`] | `aclnnMatmul` | cuBLAS | threads that compute and copy |
//! | [`Watchdog`] | any call that does not return | the same | none |
//! | [`RankGroup`] | the launcher's job, root info exchange | the launcher's job, `ncclUniqueId` exchange | socket pairs, or sockets in a private folder |
//!
//! The CUDA column names what the types stand for; this version has the Ascend, the host and the
//! synthetic backend, and collectives of the first two. [`Machine`] has an example that runs on
//! any Linux machine, [`rank`] one of starting and finding ranks.
//!
//! What it measures is what its callers time; it does not judge, print, install signal handlers or
//! exit.
#![deny(unsafe_code)]

pub mod activity;
pub mod affinity;
pub mod backend;
pub mod buffer;
pub mod collective;
pub mod device;
pub mod error;
pub mod id;
pub mod inventory;
pub mod load;
pub mod machine;
pub mod matmul;
pub mod rank;
pub mod stream;
pub mod timer;
pub mod topology;
pub mod transfer;
pub mod units;
pub mod watch;

pub use activity::{DeviceActivity, DeviceProcess};
pub use backend::synthetic::{PointContext, Scenario};
pub use backend::{BackendKind, Direction};
pub use buffer::{DeviceBuffer, HostBuffer, HostMemory, Pinned, TagPattern};
pub use collective::{Communicator, DataType, ReduceOp};
pub use device::{Device, DeviceInfo};
pub use error::{Error, Result};
pub use id::{CpuId, DeviceId, NodeId};
pub use inventory::AscendInventory;
pub use load::{LoadGenerator, LoadProfile, LoadRecord};
pub use machine::{Binding, Machine, Placement};
pub use matmul::DeviceMatmul;
pub use rank::{RankEnvironment, RankFamily, RankGroup};
pub use stream::{Event, Stream};
pub use timer::EventTimer;
pub use transfer::Transfer;
pub use units::{Bandwidth, ByteSize, parse_duration};
pub use watch::Watchdog;
