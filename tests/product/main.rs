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
mod crashes;
mod damage;
mod diagnose;
mod directions;
mod embedding;
mod env;
mod field_cases;
mod folder;
mod full_disk;
mod hangs;
mod launchers;
mod limits;
mod loads;
mod pairs;
mod policies;
mod preflight;
mod ranks;
mod recorded;
mod resume;
mod sampling;
mod support;
mod synthetic;
mod tables;
