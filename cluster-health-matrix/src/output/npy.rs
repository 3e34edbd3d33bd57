//! Matrices as numpy arrays: f64, C order, rows × columns, decimal GB/s, NaN = not measured.

use std::io::{self, Write};

use ndarray::{Array2, CowArray, Ix2};
use ndarray_npy::{WriteNpyError, WriteNpyExt as _};

use crate::matrix::Slice;
use crate::output::predicted::predicted;

/// Writes the measured rates of one matrix, rows × columns.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    array(&slice.gbps.as_standard_layout(), out)
}

/// Writes the measured rate of every cell, else the one that the model of a sampled sweep predicts.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_predicted(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    let rate = |(row, column)| match predicted(slice, row, column) {
        Some((rate, _)) => f64::from(rate),
        None => slice.gbps[[row, column]],
    };
    array(&Array2::from_shape_fn(slice.gbps.dim(), rate).into(), out)
}

/// Writes of every predicted cell the half-width of the 95 % interval, as a share of its rate; NaN
/// elsewhere.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_error(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    let error = |(row, column)| {
        predicted(slice, row, column).map_or(f64::NAN, |(_, error)| f64::from(error))
    };
    array(&Array2::from_shape_fn(slice.gbps.dim(), error).into(), out)
}

fn array(values: &CowArray<'_, f64, Ix2>, out: &mut impl Write) -> io::Result<()> {
    values.write_npy(out).map_err(|error| match error {
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

    /// Another program reads the companions of a sampled sweep.
    #[test]
    fn numpy_reads_predictions_and_errors() {
        let folder = tempfile::tempdir().unwrap();
        let matrix = crate::output::predicted::tests::sampled(6, 5, 4);
        type Write = fn(&Slice<'_>, &mut std::fs::File) -> io::Result<()>;
        let files: [(&str, Write); 3] = [("m", write), ("p", write_predicted), ("e", write_error)];
        for (name, write) in files {
            let mut file = std::fs::File::create(folder.path().join(name)).unwrap();
            write(&matrix.slice(0), &mut file).unwrap();
        }
        let script = "import sys, numpy
m, p, e = (numpy.load(sys.argv[1] + '/' + name) for name in 'mpe')
gone = numpy.isnan(m)
print(m.dtype, p.dtype, e.dtype, p.shape, gone.sum(), numpy.isnan(p).sum(), (numpy.isnan(e) == gone).sum(),
      (p[~gone] == m[~gone]).all(), float(p[0, 1]), float(p[gone].min()), round(float(e[gone].max()), 6))";
        let run =
            std::process::Command::new("python3").arg("-c").arg(script).arg(folder.path()).output();
        match run {
            Ok(output) if output.status.success() => assert_eq!(
                String::from_utf8_lossy(&output.stdout).trim(),
                // 30 cells, every fourth measured: 8.
                "float64 float64 float64 (6, 5) 22 0 0 True 39.125 39.0 0.02"
            ),
            _ => println!("skipped: no python3 with numpy"),
        }
    }
}
