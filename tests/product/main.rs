//! The program as its users meet it: commands, files, exit codes.
//!
//! Speeds are never asserted; only structure, counts, ratios and virtual time are.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

#[path = "../ascend-sim/support.rs"]
mod simulator;

mod ascend_cli;
mod ascend_core;
mod ascend_pairs;
mod bad_input;
mod commands;
mod compare;
mod diagnose;
mod directions;
mod env;
mod field_cases;
mod folder;
mod full_disk;
mod launchers;
mod loads;
mod pairs;
mod policies;
mod ranks;
mod recorded;
mod resume;
mod sampling;
mod support;
mod synthetic;
mod tables;
