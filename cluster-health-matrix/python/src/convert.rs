//! Results and errors as Python sees them.

use cluster_health_matrix::error::as_fields;
use cluster_health_matrix::matrix::Matrix;
use cluster_health_matrix::{Error, Result};
use numpy::PyArray3;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

/// The exception for an error, of the class that `cluster_health` has for its kind.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let core = match error {
        Error::Core(core) => Some(core),
        _ => None,
    };
    let make = || {
        let details = PyDict::new(py);
        details.set_item("call", core.and_then(|core| core.call()))?;
        details.set_item("code", code(error))?;
        details.set_item("device", core.and_then(|core| core.device()).map(|device| device.0))?;
        details.set_item("rank", core.and_then(|core| core.rank()))?;
        details.set_item("advice", core.and_then(|core| core.advice()).map(as_fields))?;
        py.import("cluster_health._errors")?.call_method(
            "of_kind",
            (error.kind(), as_fields(&error.to_string())),
            Some(&details),
        )
    };
    // What makes the exception may fail itself.
    make().map_or_else(|failed| failed, PyErr::from_value)
}

fn code(error: &Error) -> Option<i64> {
    match error {
        Error::Core(core) => core.code(),
        Error::Io { source, .. } => source.raw_os_error().map(i64::from),
        _ => None,
    }
}

/// The interpreter's side of [`Result`].
pub(crate) fn checked<T>(py: Python<'_>, result: Result<T>) -> PyResult<T> {
    result.map_err(|error| raise(py, &error))
}

/// A document for `json.loads`.
pub(crate) fn json(what: &str, value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::format(what, error.to_string()))
}

/// The fields of `cluster_health.Matrix`; the arrays become numpy's without being copied.
pub(crate) fn fields<'py>(py: Python<'py>, matrix: Matrix) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("sweep", matrix.sweep.as_str())?;
    fields.set_item("load", matrix.load)?;
    let sizes: Vec<u64> = matrix.sizes.iter().map(|size| size.bytes()).collect();
    fields.set_item("sizes", sizes)?;
    fields.set_item("rows", matrix.rows.ids)?;
    fields.set_item("row_nodes", matrix.rows.nodes)?;
    fields.set_item("columns", matrix.columns.ids)?;
    fields.set_item("column_nodes", matrix.columns.nodes)?;
    fields.set_item("gbps", PyArray3::from_owned_array(py, matrix.gbps))?;
    fields.set_item("spread", PyArray3::from_owned_array(py, matrix.spread))?;
    // The numbers of `cluster_health.Status`; the one array that is a copy.
    let status = matrix.status.mapv(|status| status as u8);
    fields.set_item("status", PyArray3::from_owned_array(py, status))?;
    let predicted = matrix.predicted.map(|predicted| {
        (
            PyArray3::from_owned_array(py, predicted.gbps),
            PyArray3::from_owned_array(py, predicted.error),
        )
    });
    let (rate, error) = predicted.unzip();
    fields.set_item("predicted_gbps", rate)?;
    fields.set_item("predicted_error", error)?;
    Ok(fields)
}
