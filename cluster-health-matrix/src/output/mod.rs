//! Showing results: one module per file format.

#[cfg(feature = "png")]
pub mod png;
