//! The C interface of `cluster-health-matrix`; `include/cluster_health.h` is made from this crate
//! and is its documentation.
//!
//! Handles are boxes: C holds them as pointers to types that it cannot look into, which here are
//! `Option<&T>` (borrowed for the call, NULL is `None`), `Option<Box<T>>` (given back) and
//! `Option<&mut MaybeUninit<…>>` (a place to write to). So what C passes needs no unsafe code,
//! with two exceptions that are each in one place: texts ([`text`]) and the call back to C
//! (`sweep::Watcher`). Every function that does more than read a field goes through
//! `error::guard`, so that no panic reaches C.
#![allow(clippy::doc_markdown, reason = "the documentation of items is that of a C header")]

pub mod error;
pub mod machine;
pub mod plan;
pub mod ranks;
pub mod result;
pub mod sweep;
pub mod text;
pub mod verdict;

use std::ffi::c_char;

/// Counts up when a program has to be compiled anew; the number in the library's SONAME.
pub const CLH_ABI_VERSION: u32 = 0;

/// Version of the library, such as "0.1.0"; lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn clh_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
