//! Matrices as numpy arrays: f64, C order, rows × columns, decimal GB/s, NaN = not measured.

use std::io::{self, Write};

use ndarray_npy::{WriteNpyError, WriteNpyExt as _};

use crate::matrix::Slice;

/// Writes the rates of one matrix, rows × columns.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    slice.gbps.as_standard_layout().write_npy(out).map_err(|error| match error {
        WriteNpyError::Io(error) => error,
        other => io::Error::other(other),
    })
}

#[cfg(test)]
mod tests {
    use cluster_health_core::ByteSize;
    use ndarray::ShapeBuilder as _;

    use super::*;
    use crate::matrix::{Axis, Matrix};
    use crate::samples::Sweep;

    /// The layout that numpy documents: magic, version, little-endian header length, a Python
    /// dictionary padded to 64 bytes, then the values row by row.
    #[test]
    fn bytes_follow_the_npy_format_even_from_a_column_major_array() {
        let rows = Axis::new("cpu", vec![4, 9], vec![]);
        let columns = Axis::new("device", vec![0, 1, 2], vec![]);
        let mut matrix = Matrix::new(Sweep::H2d, "idle", vec![ByteSize::mib(1)], rows, columns);
        matrix.gbps = ndarray::Array3::from_elem((1, 2, 3).f(), f64::NAN);
        matrix.gbps[[0, 0, 1]] = 1.5;
        matrix.gbps[[0, 1, 2]] = 0.25;
        let mut bytes = Vec::new();
        write(&matrix.slice(0), &mut bytes).unwrap();

        assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
        let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        assert_eq!((10 + header) % 64, 0);
        let text = std::str::from_utf8(&bytes[10..10 + header]).unwrap();
        for part in ["'descr': '<f8'", "'fortran_order': False", "'shape': (2, 3"] {
            assert!(text.contains(part), "{text}");
        }
        let (values, rest) = bytes[10 + header..].as_chunks::<8>();
        assert!(rest.is_empty());
        let values: Vec<Option<f64>> = values
            .iter()
            .map(|bytes| Some(f64::from_le_bytes(*bytes)).filter(|value| !value.is_nan()))
            .collect();
        assert_eq!(values, [None, Some(1.5), None, None, None, Some(0.25)]);
    }
}
