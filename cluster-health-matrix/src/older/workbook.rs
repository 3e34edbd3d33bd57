//! The older tool's workbooks: heat sheets `H2D_<n>MB` and `D2D_<n>MB`, and `Affinity`.

use std::collections::HashMap;
use std::io::{self, Cursor, Read as _};
use std::panic::{AssertUnwindSafe, catch_unwind};

use calamine::{DataRef, Reader as _, Xlsx};
use cluster_health_core::ByteSize;
use zip::ZipArchive;

use super::import::{At, Collected, Outcome, Record, affinity_row, affinity_rows};
use crate::error::{Error, Result};
use crate::output::csv::MAX_AXIS;
use crate::samples::PointStatus;

/// The most that the parts of a workbook may unpack to, together.
const MAX_UNPACKED: u64 = 256 << 20;
const MAX_PARTS: usize = 10_000;

/// A cell that is not empty: row and column from 0, and its text or number.
type Cells = Vec<(u32, u32, Content)>;

#[derive(Debug, Clone, PartialEq)]
enum Content {
    Number(f64),
    Text(String),
}

pub(super) fn read(into: &mut Collected, source: usize, bytes: &[u8]) -> Result<()> {
    let file = into.files.get(source).cloned().unwrap_or_default();
    let failed = |message: String| Error::format(file.as_str(), message);
    check_archive(bytes).map_err(failed)?;
    // The reader computes positions from the file unchecked, so that a damaged one can overflow.
    let sheets = catch_unwind(AssertUnwindSafe(|| sheets(bytes, into.sweep.is_pair())))
        .map_err(|_| failed("a damaged workbook".to_owned()))?
        .map_err(failed)?;
    let mut matrices = 0_usize;
    for (name, cells) in sheets {
        if name == "Affinity" {
            into.affinity = Some(affinity(&file, &cells)?);
        } else if let Some(bytes) = heat_size(&name, into.sweep.is_pair()) {
            matrices += 1;
            into.sheets.push(name);
            heat(into, source, bytes, cells)?;
        }
    }
    if matrices == 0 {
        return Err(failed(format!(
            "no sheet named {}_<n>MB; is --sweep {} right?",
            prefix(into.sweep.is_pair()),
            into.sweep
        )));
    }
    into.notes.push(format!("{file}: cells are medians over repeats"));
    into.no_order();
    Ok(())
}

fn prefix(pair: bool) -> &'static str {
    if pair { "D2D" } else { "H2D" }
}

/// The size of a heat sheet, from its name; MB is 2²⁰ there.
fn heat_size(name: &str, pair: bool) -> Option<ByteSize> {
    let number = name.strip_prefix(prefix(pair))?.strip_prefix('_')?.strip_suffix("MB")?;
    format!("{number}MiB").parse().ok().filter(|size: &ByteSize| size.bytes() > 0)
}

/// Refuses archives that unpack to more than is read. Sizes in an archive's directory are claims,
/// so every part is unpacked once and counted.
fn check_archive(bytes: &[u8]) -> Result<(), String> {
    let broken = |error: &dyn std::fmt::Display| format!("not a workbook: {error}");
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(|error| broken(&error))?;
    if archive.len() > MAX_PARTS {
        return Err(format!("{} parts; at most {MAX_PARTS} are read", archive.len()));
    }
    let mut left = MAX_UNPACKED;
    for index in 0..archive.len() {
        let part = archive.by_index(index).map_err(|error| broken(&error))?;
        let name = part.name().map_err(|error| broken(&error))?.to_ascii_lowercase();
        let strings = name.ends_with("sharedstrings.xml");
        let mut part = part.take(left + 1);
        let length = if strings {
            let mut text = Vec::new();
            part.read_to_end(&mut text).map_err(|error| broken(&error))?;
            check_strings(&text)?;
            u64::try_from(text.len()).unwrap_or(u64::MAX)
        } else {
            io::copy(&mut part, &mut io::sink()).map_err(|error| broken(&error))?
        };
        left = left.checked_sub(length).ok_or_else(|| {
            format!("unpacks to more than {} MiB, which is not read", MAX_UNPACKED >> 20)
        })?;
    }
    Ok(())
}

/// The reader reserves memory for as many strings as a file claims to have, before reading any.
fn check_strings(text: &[u8]) -> Result<(), String> {
    const CLAIM: &[u8] = b"uniqueCount";
    if text.contains(&0) {
        return Err("the shared strings are not UTF-8".to_owned());
    }
    for at in text.windows(CLAIM.len()).enumerate().filter(|(_, w)| *w == CLAIM).map(|(at, _)| at) {
        let digits = text[at + CLAIM.len()..]
            .iter()
            .skip_while(|byte| byte.is_ascii_whitespace() || b"=\"'+".contains(byte))
            .take_while(|byte| byte.is_ascii_digit());
        let claimed = digits.fold(0_usize, |number, digit| {
            number.saturating_mul(10).saturating_add(usize::from(digit - b'0'))
        });
        if claimed > text.len() {
            return Err(format!("claims {claimed} strings in {} bytes", text.len()));
        }
    }
    Ok(())
}

/// The sheets that matter, with their cells. Read cell by cell: a range would be allocated from
/// corner to corner, however few cells it has.
fn sheets(bytes: &[u8], pair: bool) -> Result<Vec<(String, Cells)>, String> {
    let text = |error: calamine::XlsxError| format!("not a workbook: {error}");
    let mut book: Xlsx<_> = Xlsx::new(Cursor::new(bytes)).map_err(text)?;
    let mut sheets = Vec::new();
    for name in book.sheet_names() {
        if name != "Affinity" && heat_size(&name, pair).is_none() {
            continue;
        }
        let mut cells = Cells::new();
        let mut reader = book.worksheet_cells_reader(&name).map_err(text)?;
        while let Some(cell) = reader.next_cell().map_err(text)? {
            let content = match cell.get_value() {
                DataRef::Empty => continue,
                #[allow(clippy::cast_precision_loss, reason = "ids and rates are far below 2^53")]
                DataRef::Int(number) => Content::Number(*number as f64),
                DataRef::Float(number) => Content::Number(*number),
                DataRef::Bool(value) => Content::Text(value.to_string()),
                DataRef::String(text) => Content::Text(text.clone()),
                DataRef::SharedString(text) => Content::Text((*text).to_owned()),
                other => Content::Text(format!("{other:?}")),
            };
            if content == Content::Text(String::new()) {
                continue;
            }
            let (row, column) = cell.get_position();
            cells.push((row, column, content));
        }
        sheets.push((name, cells));
    }
    Ok(sheets)
}

fn heat(into: &mut Collected, source: usize, bytes: ByteSize, mut cells: Cells) -> Result<()> {
    let sheet = into.sheets.len() - 1;
    cells.sort_by_key(|(row, column, _)| (*row, *column));
    let (mut rows, mut columns) = (HashMap::new(), HashMap::new());
    let mut measured = Vec::new();
    let mut previous = None;
    for (row, column, content) in cells {
        let at = At::Sheet { sheet, row, column };
        let fail = |message: String| Err(Error::format(into.place(source, at), message));
        if previous.replace((row, column)) == Some((row, column)) {
            return fail("there twice".to_owned());
        }
        if (row, column) == (0, 0) {
            continue;
        }
        if row as usize > MAX_AXIS || column as usize > MAX_AXIS {
            return fail(format!("at most {MAX_AXIS} rows and columns are read"));
        }
        if row == 0 || column == 0 {
            let Some(id) = id(&content) else {
                return fail(format!("{content:?} is no id"));
            };
            let (axis, index) = if row == 0 { (&mut columns, column) } else { (&mut rows, row) };
            axis.insert(index, id);
            into.label((column == 0).then_some(id), (row == 0).then_some(id));
        } else {
            measured.push((at, row, column, content));
        }
    }
    for (at, row, column, content) in measured {
        let fail = |message: &str| Err(Error::format(into.place(source, at), message));
        let Content::Number(rate) = content else {
            return fail("text where a rate belongs");
        };
        let (Some(row), Some(column)) = (rows.get(&row), columns.get(&column)) else {
            return fail("a rate without an id in row 1 or column A");
        };
        let outcome = if rate.is_finite() {
            Outcome::Rate(rate)
        } else {
            Outcome::Not(PointStatus::Failed, "the rate is no number".to_owned())
        };
        into.push(Record::new(source, at, (*row, *column), bytes, outcome))?;
    }
    Ok(())
}

/// `npu:3`, `3` or the number 3.
fn id(content: &Content) -> Option<u32> {
    match content {
        Content::Text(text) => text.rsplit(':').next()?.trim().parse().ok(),
        Content::Number(number) => {
            let text = number.to_string();
            text.parse().ok()
        }
    }
}

fn affinity(file: &str, cells: &Cells) -> Result<Vec<cluster_health_core::affinity::CpuRecord>> {
    let mut names = HashMap::new();
    let mut rows: std::collections::BTreeMap<u32, HashMap<u32, String>> = Default::default();
    for (row, column, content) in cells {
        let text = match content {
            Content::Text(text) => text.clone(),
            Content::Number(number) => number.to_string(),
        };
        if *row == 0 {
            names.insert(text, *column);
        } else {
            rows.entry(*row).or_default().insert(*column, text);
        }
    }
    affinity_rows(rows.into_iter().map(|(row, cells)| {
        let cell = |name: &str| {
            names.get(name).and_then(|column| cells.get(column)).cloned().unwrap_or_default()
        };
        (format!("{file}: sheet Affinity, row {}", row + 1), affinity_row(cell))
    }))
}

/// `B3` of row 2 and column 1, both from 0.
pub(super) fn cell_name(row: u32, column: u32) -> String {
    let mut letters = Vec::new();
    let mut left = u64::from(column) + 1;
    while left > 0 {
        left -= 1;
        letters.push(char::from(b'A' + u8::try_from(left % 26).unwrap_or_default()));
        left /= 26;
    }
    letters.iter().rev().collect::<String>() + &(u64::from(row) + 1).to_string()
}
