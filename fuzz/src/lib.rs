//! The bodies of the fuzz targets; the ordinary test `untrusted` replays the kept corpora through the
//! same ones.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a panic is what is looked for")]

pub mod bodies;
