//! Measured matrices of CPU core × accelerator bandwidth: planning, measuring, result folders,
//! reports.
//!
//! | activity | modules |
//! |---|---|
//! | planning | [`plan`], [`schedule`] |
//! | measuring | [`sweep`], [`samples`], [`estimate`], [`validate`], [`sizes`], [`policies`], [`visit`] |
//! | judging | [`analysis`], [`compare`], [`preflight`] |
//! | telling | [`calibrate`], [`placement`], [`blocks`] |
//! | keeping | [`session`], [`run`], [`environment`] |
//! | showing | [`matrix`], [`report`], [`output`] |
//! | the older tool's files | [`older`] |
//!
//! ```
//! use cluster_health_core::{ByteSize, Machine};
//! use cluster_health_matrix::{plan::H2dPlan, sweep};
//!
//! # fn main() -> cluster_health_matrix::Result<()> {
//! let machine = Machine::host()?;
//! let plan = H2dPlan::builder().sizes([ByteSize::mib(1)]).repeats(2).build(&machine)?;
//! let result = sweep::h2d(&machine, &plan, &mut ())?;
//! let gbps = result.gbps(); // sizes × cpus × devices, NaN = not measured
//! assert_eq!(gbps.shape(), [1, plan.cpus.len(), plan.devices.len()]);
//! assert!(gbps.iter().all(|rate| *rate > 0.0));
//! # Ok(())
//! # }
//! ```
//!
//! The library prints nothing, installs no signal handler and does not exit; it takes an
//! [`Observer`] and a [`CancelToken`].
#![forbid(unsafe_code)]

pub mod analysis;
pub mod blocks;
pub mod calibrate;
mod classes;
pub mod compare;
pub mod environment;
pub mod error;
pub mod estimate;
mod files;
mod line;
pub mod matrix;
pub mod observer;
pub mod older;
pub mod output;
pub mod placement;
pub mod plan;
pub mod policies;
pub mod preflight;
pub mod report;
pub mod run;
pub mod samples;
pub mod schedule;
pub mod session;
pub mod sizes;
pub mod stats;
mod student;
pub mod sweep;
pub mod validate;
pub mod visit;

pub use error::{Error, Result};
pub use observer::{CancelToken, Observer, Progress};
