//! Measured matrices of CPU core × accelerator bandwidth: planning, measuring, result folders,
//! reports.
#![forbid(unsafe_code)]

pub mod matrix;
pub mod output;
pub mod samples;
pub mod stats;
