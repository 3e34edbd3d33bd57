//! The part of the Python package `cluster_health` that measures; what its users meet is written in
//! Python, in the folder `cluster_health`.
//!
//! | module | what |
//! |---|---|
//! | `run` | a plan in JSON, measured with the interpreter released, recorded where asked for |
//! | `watcher` | progress, signals and cancelling between visits |
//! | `convert` | matrices, reports and errors as Python sees them |
#![forbid(unsafe_code)]

mod convert;
mod run;
mod watcher;

#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::run::{census, compare, diagnose, measure};
    #[pymodule_export]
    use super::watcher::CancelToken;
}
