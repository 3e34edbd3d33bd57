//! The simulator, called through its C symbols as a client would.
//!
//! Each test has a copy of the library, and so a machine of its own.
#![allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "the wrappers have the names and arguments of the C functions"
)]
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

mod collectives;
mod faults;
mod library;
mod management;
mod matmul;
mod memory;
mod runtime;
mod streams;
#[path = "../../support.rs"]
mod support;
mod witness;
