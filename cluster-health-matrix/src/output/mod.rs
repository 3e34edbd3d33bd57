//! Showing results: one module per file format.

pub mod csv;
pub mod first_page;
#[cfg(feature = "png")]
pub mod intervals;
#[cfg(feature = "png")]
pub mod lines;
pub mod markdown;
pub mod npy;
#[cfg(feature = "png")]
pub mod png;
pub(crate) mod predicted;
#[cfg(feature = "xlsx")]
pub mod xlsx;
