//! The C libraries of the Ascend runtime, simulated over host memory, for tests.
//!
//! One shared object exports the symbols of ACL, HCCL, DCMI and the aclnn matrix product with
//! their C signatures. Links to it named `libascendcl.so`, `libhccl.so`, `libdcmi.so`,
//! `libopapi.so` and `libnnopbase.so` in one folder are the libraries of a machine: the dynamic
//! loader sees one file, so they share one state. A link left out is a library not installed.
//!
//! What is simulated: threads with a current context; devices, their ids and memory (bounds, owner
//! and life of each pointer are checked; device pointers cannot be dereferenced on the host);
//! streams that are worker threads; events; copies that take the configured time; peer access;
//! communicators between threads and processes of one host; device management.
//!
//! # Settings
//!
//! Each is an environment variable `ASCEND_SIM_NAME`, read at the first call, and a key of
//! [`ascend_sim_configure`](#functions). With an environment that is not understood every call
//! fails. `ASCEND_RT_VISIBLE_DEVICES`, `HCCL_BUFFSIZE`, `HCCL_CONNECT_TIMEOUT` and
//! `HCCL_EXEC_TIMEOUT` mean what they mean to the vendor's libraries.
//!
//! | Name | Default | Meaning |
//! |---|---|---|
//! | `DEVICES` | 2 | devices of the machine |
//! | `PHY` | 0,1,… | physical ids by logic id |
//! | `SOC`, `VERSION`, `DRIVER` | `Ascend910B3`, 1.17.0, 25.0.rc1 | names and versions; `Ascend950…` is managed through `dcmiv2_` only, others through `dcmi_` |
//! | `HBM`, `HBM_USED` | 64G, 3G | bytes per device, and of them used by others |
//! | `STUB` | 0 | 1: every call is that of a stub library (100039) |
//! | `VIRTUAL` | 0 | 1: no waiting; events carry modelled time |
//! | `LINKS` | none | times of transfers, below |
//! | `TICK_NS` | 20 | resolution of event time stamps |
//! | `FAULTS` | none | calls that go wrong, below |
//! | `RELEASE` | | (key only) ends what hangs or stalls |
//! | `NO_PEER` | none | `0-1,…` logic ids without a path to each other |
//! | `PEER_REPEAT` | 0 | code of a repeated `aclrtDeviceEnablePeerAccess` |
//! | `HOST_REGISTER` | 1 | 0: only memory of `aclrtMallocHost` can be registered (old kernels) |
//! | `STREAMS`, `EVENTS` | 1984, 65536 | limits per device |
//! | `STATUS` | | `phy=value,…` of `aclrtQueryDeviceStatus` |
//! | `HEALTH`, `UTILIZATION` | | `phy=value,…` of DCMI |
//! | `PROCESSES` | | `phy=pid:bytes,…` of DCMI, beside this process where it uses the device |
//! | `TOPO` | all 3 | `phy-phy=kind,…`, numbers of DCMI |
//! | `CHIPS_PER_CARD` | 1 | chips of a DCMI card |
//! | `CONNECT_TIMEOUT_MS`, `EXEC_TIMEOUT_MS` | as HCCL | time-outs shorter than HCCL allows |
//! | `DESTROY_AGAIN` | 0 | how often `HcclCommDestroy` says "again" though nothing is queued |
//! | `ASYNC_ERROR` | 0 | what `HcclGetCommAsyncError` reports |
//! | `CAPABILITY` | 12 | what `HcclGetCommConfigCapability` returns |
//! | `WORKSPACE` | 64K | workspace a matrix product asks for |
//!
//! Sizes take `K`, `M`, `G` (powers of 1024).
//!
//! `LINKS` is a list of `kind,key=value,…;…` with kinds `h2d`, `d2h`, `d2d`, `peer`, `hccl`,
//! `matmul`; conditions `cpu=` (a CPU or a range `0-3` of the submitting thread), `dev=` and
//! `peer=` (logic ids; `peer` copies go from `dev` to `peer`; for `hccl` point-to-point `peer` is a
//! rank); effects `gbps=` (10^9 bytes per second; `tflops=` for `matmul`), `us=` (on the stream)
//! and `submit_us=` (in the calling thread). Later entries win. Without an entry a copy takes as
//! long as it takes, or a plausible time when time is virtual.
//!
//! `FAULTS` is a list of `call[@device]:when:action`: `when` is a number (the n-th such call since
//! the list was set), `n+` (from the n-th on) or `*`; `action` is a code, `hang` (the call does not
//! return), `crash` (abort), `stall` (the call returns, its stream stands still) or `corrupt` (one
//! bit of the result is wrong). `device` is the user id current in the calling thread.
//!
//! # Functions
//!
//! * `int ascend_sim_configure(const char *key, const char *value)`: 0, or 100000 and a message in
//!   `aclGetRecentErrMsg`.
//! * `uint64_t ascend_sim_counter(const char *name)`: calls of a function, or one of
//!   `device_allocations`, `device_bytes`, `host_allocations`, `host_bytes`, `registrations`,
//!   `contexts`, `streams`, `events`, `comms`, `tensors`, `executors` (alive now; default contexts
//!   count, default streams do not), `leaked` (device allocations that a reset had to free),
//!   `violations` (work that found its memory freed). Unknown names give 0.
//!
//! # Missing symbols
//!
//! An older toolkit is a copy of the shared object in which names were overwritten in the table of
//! dynamic symbols, so that the loader does not find them: see `support.rs`.
//!
//! # Choices where the vendor's behaviour is not known
//!
//! A client error is reported at the call, not at the next synchronisation: memory that is out of
//! bounds, freed or of another device is 107000, a peer copy without access 507013, a stale handle
//! 107017. Work that finds its memory freed or the collective of another rank different fails its
//! stream with 507899, a collective that waits too long with 107020. `aclInit` must come before
//! `aclrtSetDevice` (100001).

#![allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "the exported functions have the names and arguments of the vendor's headers"
)]

mod aclnn;
mod clock;
mod codes;
mod config;
mod dcmi;
mod device;
mod ffi;
mod hccl;
mod memory;
mod reduce;
mod shared;
mod stream;

use std::sync::atomic::Ordering;

use ffi::{Site, Text, exports, fail};

exports! { Acl;
    fn ascend_sim_configure(key: Text, value: Text) {
        let (key, value) = (key.required()?, value.required()?);
        config::set(&key, &value).or_else(|text| fail(codes::ACL_ERROR_INVALID_PARAM, text))
    }
}

#[unsafe(no_mangle)]
extern "C" fn ascend_sim_counter(name: Text) -> u64 {
    static SITE: Site = Site::new("ascend_sim_counter");
    ffi::value(&SITE, 0, || {
        let name = name.get().ok().flatten().unwrap_or_default();
        match name.as_str() {
            "device_allocations" => memory::live_device().0,
            "device_bytes" => memory::live_device().1,
            "host_allocations" => memory::live_host().0,
            "host_bytes" => memory::live_host().1,
            "registrations" => memory::live_registered(),
            "contexts" => device::live_contexts(),
            "streams" => stream::live_streams(),
            "events" => stream::live_events(),
            "comms" => hccl::live_comms(),
            "tensors" => aclnn::live_tensors(),
            "executors" => aclnn::live_executors(),
            "leaked" => device::LEAKED.load(Ordering::Relaxed),
            "violations" => memory::VIOLATIONS.load(Ordering::Relaxed),
            _ => ffi::calls(&name).unwrap_or(0),
        }
    })
}
