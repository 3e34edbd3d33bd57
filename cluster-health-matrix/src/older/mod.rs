//! Files of the older tool (`ClusterHealthDetect`) and matrices as CSV: read as samples, and
//! samples written for the older tool's readers.
//!
//! In these files "MB" is 2²⁰ bytes, rates are decimal GB/s.

pub mod export;
pub mod import;
#[cfg(test)]
mod tests;
#[cfg(feature = "xlsx")]
mod workbook;

use std::fmt;

/// The order in which the cells of imported files were measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScanOrder {
    /// Row by row; in a row size by size, ascending; column by column.
    RowMajor,
    /// Column by column; in a column size by size, ascending; row by row.
    ColumnMajor,
    /// Not known: `seq` is a number and no time.
    Unknown,
}

impl ScanOrder {
    /// The word of the command line, and after `imported-` of `run.json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RowMajor => "row-major",
            Self::ColumnMajor => "column-major",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for ScanOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
