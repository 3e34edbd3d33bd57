//! Input from elsewhere: every kept input of the fuzz targets goes through the function that is fuzzed,
//! and what a fuzzer cannot reach (large files, links, other users of a folder) is tried here.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

#[path = "../../fuzz/src/bodies.rs"]
#[allow(clippy::missing_panics_doc, unreachable_pub, reason = "a panic is what is looked for")]
mod bodies;
mod corpus;
mod limits;
mod links;
