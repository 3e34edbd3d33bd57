//! Matrices as CSV: the first line holds the column ids, every other line a row id and its rates.
//!
//! | sweep | first cell | rows | columns |
//! |---|---|---|---|
//! | H2D | `cpu` | CPU | device |
//! | core pair | `rank0\rank1` | rank-0 CPU | rank-1 CPU |
//!
//! Rates are decimal GB/s with as many digits as it takes to read the same number back; an empty
//! cell was not measured. A sampled sweep has two files more: `…-predicted.csv`, where the cells that
//! were not visited have the rate of its model (single precision), and `…-error.csv`, where they have
//! its 95 % half-width as a share of that rate and all others are empty.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::path::Path;

use ndarray::Array2;

use crate::error::{Error, Result};
use crate::matrix::Slice;
use crate::output::predicted::predicted;

/// The most rows, and the most columns, that a matrix may have.
pub const MAX_AXIS: usize = 65_536;
/// The most cells that a matrix may have.
pub const MAX_CELLS: usize = 1 << 26;
/// The largest file that is read.
const MAX_BYTES: u64 = 2 << 30;

/// Writes one matrix: measured rates.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    table(slice, out, |out, row, column| rate_cell(out, slice.gbps[[row, column]]))
}

/// Writes the measured rate of every cell, else the one that the model of a sampled sweep predicts.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_predicted(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    table(slice, out, |out, row, column| match predicted(slice, row, column) {
        Some((rate, _)) => write!(out, "{rate}"),
        None => rate_cell(out, slice.gbps[[row, column]]),
    })
}

/// Writes of every predicted cell the half-width of the 95 % interval, as a share of its rate.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_error(slice: &Slice<'_>, out: &mut impl Write) -> io::Result<()> {
    table(slice, out, |out, row, column| match predicted(slice, row, column) {
        Some((_, error)) if error.is_finite() => write!(out, "{error}"),
        _ => Ok(()),
    })
}

fn rate_cell(out: &mut impl Write, rate: f64) -> io::Result<()> {
    if rate.is_finite() { write!(out, "{rate}") } else { Ok(()) }
}

fn table<W: Write>(
    slice: &Slice<'_>,
    out: &mut W,
    cell: impl Fn(&mut W, usize, usize) -> io::Result<()>,
) -> io::Result<()> {
    out.write_all(if slice.sweep.is_pair() { b"rank0\\rank1" } else { b"cpu" })?;
    for id in &slice.columns.ids {
        write!(out, ",{id}")?;
    }
    for (row, id) in slice.rows.ids.iter().enumerate() {
        write!(out, "\n{id}")?;
        for column in 0..slice.columns.len() {
            out.write_all(b",")?;
            cell(out, row, column)?;
        }
    }
    out.write_all(b"\n")
}

/// A matrix as it stands in a CSV file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CsvMatrix {
    /// The first cell of the first line, which says what the ids are.
    pub corner: String,
    /// Column ids in file order.
    pub columns: Vec<u32>,
    /// Row ids in file order.
    pub rows: Vec<u32>,
    /// Rows × columns, decimal GB/s, NaN = not measured.
    pub values: Array2<f64>,
    /// Line of each row in the file, from 1.
    pub lines: Vec<u64>,
}

/// Reads the matrix of a file.
///
/// # Errors
/// When the file cannot be read, is larger than 2 GiB, or is no matrix; the error names the line
/// and the column.
pub fn read(path: &Path) -> Result<CsvMatrix> {
    let file = File::open(path).map_err(|error| Error::io("opening", path, error))?;
    from_reader(limited(file, path)?, &path.display().to_string())
}

/// Reads a matrix from text; `place` names it in errors.
///
/// # Errors
/// When the text is no matrix; the error names the line and the column.
pub fn parse(text: &str, place: &str) -> Result<CsvMatrix> {
    from_reader(text.as_bytes(), place)
}

/// The file up to the largest size that is read, or an error when it is known to be larger.
pub(crate) fn limited(file: File, path: &Path) -> Result<impl Read> {
    let length = file.metadata().map_err(|error| Error::io("reading", path, error))?.len();
    if length > MAX_BYTES {
        return Err(Error::format(
            path.display().to_string(),
            format!("{length} bytes; files above {MAX_BYTES} bytes are not read"),
        ));
    }
    Ok(file.take(MAX_BYTES))
}

fn from_reader(input: impl Read, place: &str) -> Result<CsvMatrix> {
    let mut lines = Lines { input: BufReader::new(input), text: String::new(), number: 0 };
    let Some(header) = lines.next(place)? else {
        return Err(Error::format(
            place,
            "empty; a matrix starts with the line 'cpu,<column ids>'",
        ));
    };
    let at = |column: usize| format!("{place}:{}, column {column}", header.0);
    let mut cells = header.1.split(',').map(str::trim);
    let corner = cells.next().unwrap_or_default().to_owned();
    if corner.parse::<f64>().is_ok() {
        return Err(Error::format(
            at(1),
            format!("'{corner}'; the first line must be 'cpu,<column ids>'"),
        ));
    }
    let mut columns = Vec::new();
    let mut seen = HashMap::new();
    for (text, column) in cells.zip(2..) {
        let id = id(text).ok_or_else(|| Error::format(at(column), bad_id(text)))?;
        if let Some(first) = seen.insert(id, column) {
            return Err(Error::format(
                at(column),
                format!("id {id} stands in column {first} already"),
            ));
        }
        columns.push(id);
    }
    if columns.is_empty() {
        return Err(Error::format(at(1), "no column ids"));
    }
    if columns.len() > MAX_AXIS {
        return Err(Error::format(
            place,
            format!("{} columns; at most {MAX_AXIS} are read", columns.len()),
        ));
    }

    let mut rows = Vec::new();
    let mut line_numbers = Vec::new();
    let mut values = Vec::new();
    let mut seen = HashMap::new();
    while let Some((number, line)) = lines.next(place)? {
        let at = |column: usize| format!("{place}:{number}, column {column}");
        let mut cells = line.split(',').map(str::trim);
        let text = cells.next().unwrap_or_default();
        let row = id(text).ok_or_else(|| Error::format(at(1), bad_id(text)))?;
        if let Some(first) = seen.insert(row, number) {
            return Err(Error::format(at(1), format!("id {row} stands in line {first} already")));
        }
        let before = values.len();
        for (text, column) in cells.zip(2..) {
            values.push(rate(text).ok_or_else(|| {
                Error::format(
                    at(column),
                    format!("'{text}' is no rate; expected GB/s, or nothing when not measured"),
                )
            })?);
        }
        let found = values.len() - before;
        if found != columns.len() {
            return Err(Error::format(
                format!("{place}:{number}"),
                format!("{found} rates for {} column ids", columns.len()),
            ));
        }
        rows.push(row);
        line_numbers.push(number);
        if rows.len() > MAX_AXIS || values.len() > MAX_CELLS {
            return Err(Error::format(
                format!("{place}:{number}"),
                format!("too large; at most {MAX_AXIS} rows and {MAX_CELLS} cells are read"),
            ));
        }
    }
    let values = Array2::from_shape_vec((rows.len(), columns.len()), values)
        .map_err(|error| Error::format(place, error.to_string()))?;
    Ok(CsvMatrix { corner, columns, rows, values, lines: line_numbers })
}

/// The lines of a file that are not blank, with their numbers from 1.
struct Lines<R> {
    input: BufReader<R>,
    text: String,
    number: u64,
}

impl<R: Read> Lines<R> {
    fn next(&mut self, place: &str) -> Result<Option<(u64, &str)>> {
        loop {
            self.text.clear();
            self.number += 1;
            let read = self.input.read_line(&mut self.text).map_err(|error| {
                if error.kind() == io::ErrorKind::InvalidData {
                    Error::format(format!("{place}:{}", self.number), error.to_string())
                } else {
                    Error::io("reading", place, error)
                }
            })?;
            if read == 0 {
                return Ok(None);
            }
            if !self.text.trim().is_empty() {
                return Ok(Some((self.number, self.text.trim_start_matches('\u{feff}').trim())));
            }
        }
    }
}

fn id(text: &str) -> Option<u32> {
    // `parse` alone would accept a sign.
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn bad_id(text: &str) -> String {
    format!("'{text}' is no id; expected a whole number from 0")
}

/// A rate, NaN for an unmeasured cell.
fn rate(text: &str) -> Option<f64> {
    if text.is_empty() || text.eq_ignore_ascii_case("nan") {
        return Some(f64::NAN);
    }
    text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0)
}

#[cfg(test)]
mod tests {
    use cluster_health_core::ByteSize;
    use proptest::prelude::*;

    use super::*;
    use crate::matrix::{Axis, Matrix};
    use crate::samples::Sweep;

    fn matrix(sweep: Sweep, rates: &[f64]) -> Matrix {
        let rows = Axis::new("cpu", vec![7, 0], vec![]);
        let columns = Axis::new("device", vec![3, 1], vec![]);
        let mut matrix = Matrix::new(sweep, "idle", vec![ByteSize::mib(1)], rows, columns);
        for (cell, rate) in matrix.gbps.iter_mut().zip(rates) {
            *cell = *rate;
        }
        matrix
    }

    fn text(matrix: &Matrix) -> String {
        let mut bytes = Vec::new();
        write(&matrix.slice(0), &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn files_look_as_documented() {
        let rates = [58.125, f64::NAN, 0.1, 12.0];
        assert_eq!(text(&matrix(Sweep::H2d, &rates)), "cpu,3,1\n7,58.125,\n0,0.1,12\n");
        assert_eq!(
            text(&matrix(Sweep::CorePair, &[f64::INFINITY, 1.0, 2.0, 3.0])),
            "rank0\\rank1,3,1\n7,,1\n0,2,3\n"
        );
    }

    #[test]
    fn predictions_have_files_of_their_own() {
        let mut matrix = matrix(Sweep::CorePair, &[58.125, f64::NAN, f64::NAN, 12.0]);
        let mut prediction = crate::matrix::Prediction::new((1, 2, 2));
        // In single precision 0.1 is another number than in double precision.
        prediction.gbps[[0, 0, 1]] = 0.1;
        prediction.error[[0, 0, 1]] = 0.05;
        matrix.predicted = Some(prediction);
        assert_eq!(text(&matrix), "rank0\\rank1,3,1\n7,58.125,\n0,,12\n");
        let written = |write: fn(&Slice<'_>, &mut Vec<u8>) -> io::Result<()>| {
            let mut bytes = Vec::new();
            write(&matrix.slice(0), &mut bytes).unwrap();
            String::from_utf8(bytes).unwrap()
        };
        assert_eq!(written(write_predicted), "rank0\\rank1,3,1\n7,58.125,0.1\n0,,12\n");
        assert_eq!(written(write_error), "rank0\\rank1,3,1\n7,,0.05\n0,,\n");
    }

    #[test]
    fn blank_lines_and_line_ends_do_not_shift_line_numbers() {
        let read = parse("\u{feff}cpu,0,1\r\n\r\n5, 1.5 ,nan\r\n\r\n", "m.csv").unwrap();
        assert_eq!((read.corner.as_str(), read.columns.as_slice()), ("cpu", &[0, 1][..]));
        assert_eq!((read.rows.as_slice(), read.lines.as_slice()), (&[5][..], &[3][..]));
        assert_eq!(read.values[[0, 0]].to_bits(), 1.5_f64.to_bits());
        assert!(read.values[[0, 1]].is_nan());
    }

    #[test]
    fn errors_name_line_and_column() {
        for (text, place, word) in [
            ("\n", "m.csv:", "empty"),
            ("0,1\n", "m.csv:1, column 1:", "first line"),
            ("cpu\n0\n", "m.csv:1, column 1:", "no column"),
            ("cpu,0,x\n", "m.csv:1, column 3:", "'x'"),
            ("cpu,0,+1\n", "m.csv:1, column 3:", "'+1'"),
            ("cpu,2,2\n", "m.csv:1, column 3:", "column 2"),
            ("cpu,0\n1,2\n-1,2\n", "m.csv:3, column 1:", "'-1'"),
            ("cpu,0\n1,2\n\n1,2\n", "m.csv:4, column 1:", "line 2"),
            ("cpu,0,1\n1,2\n", "m.csv:2:", "1 rates"),
            ("cpu,0\n1,2,3\n", "m.csv:2:", "2 rates"),
            ("cpu,0\n1,fast\n", "m.csv:2, column 2:", "'fast'"),
            ("cpu,0\n1,inf\n", "m.csv:2, column 2:", "'inf'"),
            ("cpu,0\n1,-3\n", "m.csv:2, column 2:", "'-3'"),
            ("cpu,0\n4294967296,3\n", "m.csv:2, column 1:", "4294967296"),
        ] {
            let error = parse(text, "m.csv").unwrap_err().to_string();
            assert!(error.starts_with(place) && error.contains(word), "{text:?}: {error}");
        }
    }

    #[test]
    fn oversized_and_binary_files_are_refused() {
        let mut header = "cpu".to_owned();
        for id in 0..=MAX_AXIS {
            header.push_str(&format!(",{id}"));
        }
        let error = parse(&header, "m.csv").unwrap_err().to_string();
        assert!(error.contains("65537 columns"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.csv");
        std::fs::write(&path, b"cpu,0\n1,\xff\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("m.csv:2: ") && error.contains("UTF-8"), "{error}");
        let error = read(folder.path()).unwrap_err();
        assert_eq!(error.kind(), "io", "{error}");
    }

    proptest! {
        #[test]
        fn rates_survive_to_the_last_bit(rates in proptest::array::uniform4(0.0..1e6_f64)) {
            let read = parse(&text(&matrix(Sweep::H2d, &rates)), "m.csv").unwrap();
            let bits = |rates: &[f64]| rates.iter().map(|r| r.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(read.values.as_slice().unwrap()), bits(&rates));
        }

        #[test]
        fn no_text_panics(text in "(cpu|[0-9,.\n\"]){0,40}") {
            drop(parse(&text, "m.csv"));
        }
    }
}
