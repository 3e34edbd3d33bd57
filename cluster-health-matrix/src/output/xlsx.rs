//! The workbook of a run: one heat sheet per matrix and size, then `Summary` where there are any, the
//! tables of the caller (`Affinity`, `Environment`), and `Notes` where something did not fit.
//!
//! | sheet | content |
//! |---|---|
//! | `H2D_16MiB`, `PAIR_8MiB`, `H2D_16MiB_cpu2` … | A1 title, row 1 from B the column ids, column A the CPUs, body decimal GB/s under a live colour scale; empty = not measured |
//! | `Summary` | count, min, p10, median, p90, max of the measured cells, over all cells, per column, per NUMA node; how many others are predicted, and the measured share |
//! | tables | a header row and the rows |
//!
//! The cells that a sampled sweep predicts are in italic grey, and A1 says so; no line of `Summary` has
//! them in its rates.
//!
//! Excel holds 1,048,576 rows, 16,384 columns, 32,767 characters in a cell and 31 in a sheet name.
//! What is longer is split over sheets or cut, and a note says so. So it does when a matrix is left out
//! because the workbook would have more than 4,000,000 rates; `Summary` has that matrix, too.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use rust_xlsxwriter::{
    ConditionalFormat3ColorScale, ConditionalFormatType, DocProperties, ExcelDateTime, Format,
    Workbook as ExcelFile, Worksheet, XlsxError,
};

use crate::error::{Error, Result};
use crate::matrix::{Matrix, Slice};
use crate::output::predicted::predicted;
use crate::samples::Sweep;
use crate::stats::quantiles;

const MAX_ROWS: usize = 1_048_576;
const MAX_COLUMNS: usize = 16_384;
const MAX_TEXT: usize = 32_767;
const MAX_NAME: usize = 31;
/// Most rates of a workbook: above, programs take minutes to open it.
const MOST_CELLS: usize = 4_000_000;
/// The digits of rates are noise: what a higher level saves of them takes longer than everything else.
const COMPRESSION: u8 = 2;
/// Font of predicted rates: sRGB.
const GREY: u32 = 0x59_59_59;

/// What goes into a workbook.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Workbook<'a> {
    /// The matrices; each size becomes a heat sheet and a part of `Summary`.
    pub matrices: Vec<&'a Matrix>,
    /// Further sheets, in this order, after `Summary`.
    pub tables: Vec<Table>,
    /// When the data were measured, seconds since 1970: the date of the document, so that the same data
    /// make the same bytes.
    pub created: i64,
}

impl<'a> Workbook<'a> {
    /// A workbook of these matrices and tables.
    #[must_use]
    pub fn new(matrices: Vec<&'a Matrix>, tables: Vec<Table>) -> Self {
        Self { matrices, tables, created: 0 }
    }

    /// With the start of this run as its date.
    #[must_use]
    pub fn of_run(mut self, manifest: &crate::run::Manifest) -> Self {
        let start = manifest.segments.first();
        self.created =
            start.and_then(|segment| crate::run::unix_seconds(&segment.start)).unwrap_or(0);
        self
    }
}

/// A sheet of rows.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Table {
    /// Name of the sheet, for example `Affinity`.
    pub name: String,
    /// The first row.
    pub header: Vec<String>,
    /// The rows; they may differ in length.
    pub rows: Vec<Vec<Value>>,
}

impl Table {
    /// A sheet of these rows.
    #[must_use]
    pub fn new(name: &str, header: &[&str], rows: Vec<Vec<Value>>) -> Self {
        let header = header.iter().map(|&text| text.to_owned()).collect();
        Self { name: name.to_owned(), header, rows }
    }
}

/// One cell of a [`Table`].
#[derive(Debug, Clone, PartialEq, Default)]
#[allow(clippy::exhaustive_enums, reason = "what a spreadsheet cell can hold")]
pub enum Value {
    /// Text, never taken for a formula.
    Text(String),
    /// A number; one that is not finite leaves the cell empty.
    Number(f64),
    /// TRUE or FALSE.
    Bool(bool),
    /// Nothing.
    #[default]
    Empty,
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Number(f64::from(number))
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Empty, Into::into)
    }
}

/// Writes the workbook and returns what had to be split or cut; the same notes stand in its
/// `Notes` sheet. Rows go through temporary files in the folder of `path`, so that memory does
/// not grow with the sheets.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, book: &Workbook<'_>) -> Result<Vec<String>> {
    write_at_most(path, book, MOST_CELLS)
}

fn write_at_most(path: &Path, book: &Workbook<'_>, most_cells: usize) -> Result<Vec<String>> {
    let file = crate::files::create(path).map_err(|error| Error::io("writing", path, error))?;
    let failed = |message: String| Error::output(path.display().to_string(), message);
    // The writer panics instead of returning an error when a temporary file cannot be written.
    catch_unwind(AssertUnwindSafe(|| Writer::new(path, most_cells)?.write(file, book)))
        .map_err(|_| failed("a temporary file beside it could not be written".to_owned()))?
        .map_err(|error| failed(error.to_string()))
}

/// As [`write()`] of `dir/name`, which is complete or not there.
pub(crate) fn write_by_rename(dir: &Path, name: &str, book: &Workbook<'_>) -> Result<Vec<String>> {
    let path = dir.join(name);
    let temporary = dir.join(format!("{name}.tmp"));
    let notes = write(&temporary, book).inspect_err(|_| {
        std::fs::remove_file(&temporary).ok();
    })?;
    std::fs::rename(&temporary, &path).map_err(|error| Error::io("writing", &path, error))?;
    Ok(notes)
}

struct Writer {
    file: ExcelFile,
    names: HashSet<String>,
    notes: Vec<String>,
    title: Format,
    rate: Format,
    predicted: Format,
    /// How many rates more the workbook takes.
    room: usize,
}

impl Writer {
    fn new(path: &Path, room: usize) -> Result<Self, XlsxError> {
        let mut file = ExcelFile::new();
        file.set_zip_compression_level(COMPRESSION);
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        file.set_tempdir(folder.unwrap_or(Path::new(".")))?;
        Ok(Self {
            file,
            names: HashSet::new(),
            notes: Vec::new(),
            title: Format::new().set_bold(),
            rate: Format::new().set_num_format("0.000"),
            predicted: Format::new().set_num_format("0.000").set_italic().set_font_color(GREY),
            room,
        })
    }

    fn write(mut self, file: File, book: &Workbook<'_>) -> Result<Vec<String>, XlsxError> {
        // Claimed first: the sheets of a run carry their plain names, whatever else is in it.
        for name in ["Summary", "Notes"] {
            self.names.insert(name.to_lowercase());
        }
        let slices = || book.matrices.iter().flat_map(|matrix| matrix.slices());
        for slice in slices() {
            self.heat(&slice)?;
        }
        if !book.matrices.is_empty() {
            self.table(&summary(&mut slices()), "Summary".to_owned())?;
        }
        for table in &book.tables {
            let name = self.sheet_name(&table.name);
            self.table(table, name)?;
        }
        if !self.notes.is_empty() {
            let rows = self.notes.iter().map(|note| vec![note.as_str().into()]).collect();
            let kept = self.notes.len();
            self.table(&Table::new("Notes", &["note"], rows), "Notes".to_owned())?;
            self.notes.truncate(kept);
        }
        let created = ExcelDateTime::from_timestamp(book.created)?;
        let properties = DocProperties::new().set_creation_datetime(&created);
        self.file.set_properties(&properties);
        self.file.save_to_writer(file)?;
        Ok(self.notes)
    }

    fn heat(&mut self, slice: &Slice<'_>) -> Result<(), XlsxError> {
        let title = title(slice);
        let wanted = heat_name(slice);
        let cells = slice.gbps.len();
        let Some(room) = self.room.checked_sub(cells) else {
            self.notes.push(format!(
                "{wanted}: left out, its {cells} cells are more than the {} that the workbook still \
                 takes; {stem}.csv and {stem}.npy have them",
                self.room,
                stem = slice.stem()
            ));
            return Ok(());
        };
        self.room = room;
        let (height, width) = (MAX_ROWS - 1, MAX_COLUMNS - 1);
        let parts =
            slice.rows.len().div_ceil(height).max(1) * slice.columns.len().div_ceil(width).max(1);
        let mut names = Vec::new();
        let mut top = 0;
        loop {
            let rows = top..(top + height).min(slice.rows.len());
            let mut left = 0;
            loop {
                let columns = left..(left + width).min(slice.columns.len());
                let name = self.sheet_name(&wanted);
                self.heat_part(&name, &title, slice, rows.clone(), columns.clone())?;
                names.push(name);
                left = columns.end;
                if left >= slice.columns.len() {
                    break;
                }
            }
            top = rows.end;
            if top >= slice.rows.len() {
                break;
            }
        }
        if parts > 1 {
            self.notes.push(format!(
                "{title}: {} rows and {} columns do not fit one sheet; split over {}",
                slice.rows.len(),
                slice.columns.len(),
                names.join(", ")
            ));
        }
        Ok(())
    }

    fn heat_part(
        &mut self,
        name: &str,
        title: &str,
        slice: &Slice<'_>,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
    ) -> Result<(), XlsxError> {
        let (bold, rate) = (self.title.clone(), self.rate.clone());
        let grey = self.predicted.clone();
        let sheet = self.sheet(name)?;
        let (last_row, last_column) = (row(rows.len())?, column(columns.len())?);
        sheet.write_string_with_format(0, 0, title, &bold)?;
        for (index, id) in slice.columns.ids[columns.clone()].iter().enumerate() {
            let at = column(index + 1)?;
            if slice.sweep.is_pair() {
                sheet.write_number_with_format(0, at, *id, &bold)?;
            } else {
                sheet.write_string_with_format(0, at, format!("device {id}"), &bold)?;
            }
        }
        for (index, line) in rows.clone().enumerate() {
            let at = row(index + 1)?;
            sheet.write_number_with_format(at, 0, slice.rows.ids[line], &bold)?;
            for (index, cell) in columns.clone().enumerate() {
                let value = slice.gbps[[line, cell]];
                if value.is_finite() {
                    sheet.write_number_with_format(at, column(index + 1)?, value, &rate)?;
                } else if let Some((value, _)) = predicted(slice, line, cell) {
                    sheet.write_number_with_format(at, column(index + 1)?, value, &grey)?;
                }
            }
        }
        sheet.set_column_width(0, 12)?;
        sheet.set_column_range_width(1, last_column.max(1), 9)?;
        sheet.set_freeze_panes(1, 1)?;
        if last_row > 0 && last_column > 0 {
            let scale = ConditionalFormat3ColorScale::new()
                .set_minimum(ConditionalFormatType::Percentile, 10)
                .set_midpoint(ConditionalFormatType::Percentile, 50)
                .set_maximum(ConditionalFormatType::Percentile, 90)
                .set_minimum_color("F8696B")
                .set_midpoint_color("FFEB84")
                .set_maximum_color("63BE7B");
            sheet.add_conditional_format(1, 1, last_row, last_column, &scale)?;
        }
        Ok(())
    }

    /// Writes a table from the sheet `name` (claimed by the caller) on.
    fn table(&mut self, table: &Table, name: String) -> Result<(), XlsxError> {
        let width = table.rows.iter().map(Vec::len).chain([table.header.len()]).max().unwrap_or(0);
        if width > MAX_COLUMNS {
            self.notes.push(format!(
                "{}: {} of {width} columns are left out, a sheet holds {MAX_COLUMNS}",
                table.name,
                width - MAX_COLUMNS
            ));
        }
        let body = MAX_ROWS - 1;
        let mut names = vec![name];
        let mut cut = Cut::default();
        let chunks: Vec<&[Vec<Value>]> =
            if table.rows.is_empty() { vec![&[]] } else { table.rows.chunks(body).collect() };
        for (index, rows) in chunks.into_iter().enumerate() {
            if index > 0 {
                names.push(self.sheet_name(&table.name));
            }
            let name = &names[index];
            let bold = self.title.clone();
            let sheet = self.sheet(name)?;
            for (at, text) in (0..).zip(table.header.iter().take(MAX_COLUMNS)) {
                let text = cut.text(text, name, 0, at);
                sheet.write_string_with_format(0, at, text, &bold)?;
            }
            for (at, cells) in (1..).zip(rows) {
                for (to, cell) in (0..).zip(cells.iter().take(MAX_COLUMNS)) {
                    match cell {
                        Value::Text(text) => {
                            sheet.write_string(at, to, cut.text(text, name, at, to))?;
                        }
                        Value::Number(number) if number.is_finite() => {
                            sheet.write_number(at, to, *number)?;
                        }
                        Value::Bool(value) => {
                            sheet.write_boolean(at, to, *value)?;
                        }
                        Value::Number(_) | Value::Empty => {}
                    }
                }
            }
            for (at, width) in (0..).zip(widths(table).take(MAX_COLUMNS)) {
                sheet.set_column_width(at, width)?;
            }
            sheet.set_freeze_panes(1, 0)?;
        }
        if names.len() > 1 {
            self.notes.push(format!(
                "{}: {} rows do not fit one sheet; continued on {}",
                table.name,
                table.rows.len(),
                names[1..].join(", ")
            ));
        }
        self.notes.extend(cut.note(&table.name));
        Ok(())
    }

    fn sheet(&mut self, name: &str) -> Result<&mut Worksheet, XlsxError> {
        let sheet = self.file.add_worksheet_with_constant_memory()?;
        sheet.set_name(name)?;
        Ok(sheet)
    }

    /// Claims the unused sheet name nearest to the wanted one, and notes when they differ in more
    /// than a number.
    fn sheet_name(&mut self, wanted: &str) -> String {
        let mut clean: String = wanted
            .chars()
            .map(|c| if c.is_control() || "[]:*?/\\'".contains(c) { '_' } else { c })
            .collect();
        if clean.is_empty() || clean.eq_ignore_ascii_case("history") {
            clean.insert_str(0, "Sheet_");
        }
        let mut name = utf16_prefix(&clean, MAX_NAME).trim_end().to_owned();
        for number in 2_u32.. {
            if self.names.insert(name.to_lowercase()) {
                break;
            }
            let tail = format!("_{number}");
            name = format!("{}{tail}", utf16_prefix(&clean, MAX_NAME - tail.len()));
        }
        if !name.starts_with(wanted) {
            self.notes.push(format!("sheet '{name}': named '{wanted}' in full"));
        }
        name
    }
}

/// Texts that were cut, told in one note per table.
#[derive(Default)]
struct Cut {
    count: usize,
    first: String,
}

impl Cut {
    /// The text as a cell can hold it.
    fn text(&mut self, text: &str, sheet: &str, row: u32, column: u16) -> String {
        // XML has no other control characters, and a file with them does not open.
        let clean = text.replace(
            |c: char| (c.is_control() && !"\t\n\r".contains(c)) || "\u{fffe}\u{ffff}".contains(c),
            "\u{fffd}",
        );
        let prefix = utf16_prefix(&clean, MAX_TEXT);
        if prefix.len() == clean.len() {
            return clean;
        }
        if self.count == 0 {
            self.first = format!(
                "'{sheet}'!{} had {}",
                rust_xlsxwriter::utility::row_col_to_cell(row, column),
                clean.chars().count()
            );
        }
        self.count += 1;
        format!("{}…", utf16_prefix(&clean, MAX_TEXT - 1))
    }

    fn note(self, table: &str) -> Option<String> {
        (self.count > 0).then(|| {
            format!(
                "{table}: {} texts are cut, a cell holds {MAX_TEXT} characters; the first, {}",
                self.count, self.first
            )
        })
    }
}

/// The longest prefix of at most `units` UTF-16 units, which is how Excel counts.
fn utf16_prefix(text: &str, units: usize) -> &str {
    let mut used = 0;
    for (at, c) in text.char_indices() {
        used += c.len_utf16();
        if used > units {
            return &text[..at];
        }
    }
    text
}

fn row(index: usize) -> Result<u32, XlsxError> {
    u32::try_from(index).map_err(|_| XlsxError::RowColumnLimitError)
}

fn column(index: usize) -> Result<u16, XlsxError> {
    u16::try_from(index).map_err(|_| XlsxError::RowColumnLimitError)
}

/// Column widths in characters, from the header and the first rows.
fn widths(table: &Table) -> impl Iterator<Item = f64> + '_ {
    let width = |at: usize| {
        let header = table.header.get(at).map_or(0, |text| text.chars().count());
        let body = table.rows.iter().take(100).filter_map(move |row| match row.get(at)? {
            Value::Text(text) => Some(text.chars().take(60).count()),
            Value::Number(_) => Some(9),
            Value::Bool(_) => Some(6),
            Value::Empty => None,
        });
        let widest = body.chain([header, 6]).max().unwrap_or_default().min(60);
        f64::from(u32::try_from(widest).unwrap_or(60) + 2)
    };
    (0..table.header.len()).map(width)
}

fn sweep_word(sweep: Sweep) -> &'static str {
    match sweep {
        Sweep::H2d => "H2D",
        Sweep::D2h => "D2H",
        Sweep::Bidirectional => "BIDI",
        Sweep::CorePair => "PAIR",
    }
}

fn heat_name(slice: &Slice<'_>) -> String {
    let mut name = format!("{}_{}", sweep_word(slice.sweep), slice.bytes);
    if slice.load != "idle" {
        name.push('_');
        name.extend(slice.load.chars().filter(|c| c.is_alphanumeric()));
    }
    if slice.memory.is_pageable() {
        name.push_str("_pageable");
    }
    name
}

fn title(slice: &Slice<'_>) -> String {
    let mut title = match slice.sweep {
        Sweep::H2d => "CPU -> device H2D GB/s".to_owned(),
        Sweep::D2h => "device -> CPU D2H GB/s".to_owned(),
        Sweep::Bidirectional => "CPU <-> device GB/s".to_owned(),
        Sweep::CorePair => "rank-0 CPU x rank-1 CPU all_gather GB/s per rank".to_owned(),
    };
    title.push_str(&format!(" ({}", slice.bytes));
    if slice.load != "idle" {
        title.push_str(&format!(", load {}", slice.load));
    }
    if slice.memory.is_pageable() {
        title.push_str(", pageable");
    }
    title.push(')');
    if slice.predicted.is_some() {
        title.push_str("; italic grey = predicted, not measured");
    }
    title
}

const SUMMARY: [&str; 16] = [
    "sweep",
    "size",
    "bytes",
    "load",
    "memory",
    "over",
    "id",
    "cells",
    "count",
    "min",
    "p10",
    "median",
    "p90",
    "max",
    "predicted",
    "measured_share",
];

/// Distribution of the measured cells (decimal GB/s, type-7 quantiles): over all cells, per
/// column, per NUMA node of the rows, and for pairs per NUMA node of the columns.
fn summary(slices: &mut dyn Iterator<Item = Slice<'_>>) -> Table {
    let mut rows = Vec::new();
    for slice in slices {
        let (all_rows, all_columns) = (slice.rows.len(), slice.columns.len());
        let mut add = |over: &str, id: Value, cells: &mut dyn Iterator<Item = (usize, usize)>| {
            rows.push(summary_row(&slice, over, id, cells));
        };
        let in_row = |row: usize| (0..all_columns).map(move |column| (row, column));
        let in_column = |column: usize| (0..all_rows).map(move |row| (row, column));
        add("all", Value::Empty, &mut (0..all_rows).flat_map(in_row));
        for (column, id) in slice.columns.ids.iter().enumerate() {
            add(slice.columns.name, (*id).into(), &mut in_column(column));
        }
        let by_node = |nodes: &[Option<u32>]| {
            let mut groups = BTreeMap::<_, Vec<usize>>::new();
            for (index, node) in nodes.iter().enumerate() {
                if let Some(node) = node {
                    groups.entry(*node).or_default().push(index);
                }
            }
            groups
        };
        for (node, members) in by_node(&slice.rows.nodes) {
            let mut cells = members.into_iter().flat_map(in_row);
            add(&format!("NUMA node of {}", slice.rows.name), node.into(), &mut cells);
        }
        if slice.sweep.is_pair() {
            for (node, members) in by_node(&slice.columns.nodes) {
                let mut cells = members.into_iter().flat_map(in_column);
                add(&format!("NUMA node of {}", slice.columns.name), node.into(), &mut cells);
            }
        }
    }
    Table::new("Summary", &SUMMARY, rows)
}

fn summary_row(
    slice: &Slice<'_>,
    over: &str,
    id: Value,
    cells: &mut dyn Iterator<Item = (usize, usize)>,
) -> Vec<Value> {
    let (mut all, mut not_measured) = (0_usize, 0_usize);
    let mut rates = Vec::new();
    for (row, column) in cells {
        all += 1;
        let rate = slice.gbps[[row, column]];
        if rate.is_finite() {
            rates.push(rate);
        } else {
            not_measured += usize::from(predicted(slice, row, column).is_some());
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "counts and sizes stay far below 2^53")]
    let number = |count: usize| count as f64;
    #[allow(clippy::cast_precision_loss, reason = "counts and sizes stay far below 2^53")]
    let bytes = Value::Number(slice.bytes.bytes() as f64);
    let mut row = vec![
        sweep_word(slice.sweep).into(),
        slice.bytes.to_string().as_str().into(),
        bytes,
        slice.load.into(),
        if slice.memory.is_pageable() { "pageable".into() } else { Value::Empty },
        over.into(),
        id,
        number(all).into(),
        number(rates.len()).into(),
    ];
    row.extend(quantiles(&mut rates, [0.0, 0.1, 0.5, 0.9, 1.0]).map(Value::from));
    row.extend([number(not_measured), number(rates.len()) / number(all)].map(Value::from));
    row
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use cluster_health_core::ByteSize;

    use super::*;
    use crate::matrix::Axis;

    /// Runs Python with openpyxl over `script`; `None`, with a message, where it is missing.
    fn openpyxl(script: &str, arguments: &[&Path]) -> Option<serde_json::Value> {
        let python = |code: &str| {
            let mut command = Command::new("python3");
            command.arg("-c").arg(code).args(arguments);
            command.output()
        };
        if !python("import openpyxl").is_ok_and(|output| output.status.success()) {
            println!("skipped: no python3 with openpyxl");
            return None;
        }
        let output = python(&format!("import sys, json, openpyxl\n{script}")).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(serde_json::from_slice(&output.stdout).unwrap())
    }

    fn libreoffice(path: &Path, folder: &Path) -> Option<String> {
        let profile = format!("-env:UserInstallation=file://{}", folder.join("profile").display());
        let run = Command::new("soffice")
            .args([
                &profile,
                "--headless",
                "--convert-to",
                "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,false,true,false,false,false,-1",
            ])
            .arg("--outdir")
            .arg(folder)
            .arg(path)
            .output();
        let Ok(output) = run else {
            println!("skipped: no soffice");
            return None;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// 4 CPUs on two nodes × 3 devices, one cell not measured.
    fn h2d() -> Matrix {
        let rows = Axis::new("cpu", vec![0, 1, 4, 5], vec![Some(0), Some(0), Some(1), Some(1)]);
        let columns = Axis::new("device", vec![2, 0, 7], vec![]);
        let sizes = vec![ByteSize::mib(16), ByteSize::mib(64)];
        let mut matrix = Matrix::new(Sweep::H2d, "idle", sizes, rows, columns);
        for ((size, row, column), rate) in matrix.gbps.indexed_iter_mut() {
            *rate =
                [50.125, 60.25][size] + [0.0, 1.0, 2.0, 4.0][row] * 0.5 - [0.0, 0.125, 8.0][column];
        }
        matrix.gbps[[0, 2, 1]] = f64::NAN;
        matrix
    }

    #[test]
    fn another_program_reads_the_same_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("matrices.xlsx");
        let idle = h2d();
        let mut loaded = h2d();
        loaded.load = "cpu:2".to_owned();
        loaded.memory = crate::matrix::Memory::Pageable;
        let mut pairs = h2d();
        pairs.sweep = Sweep::CorePair;
        pairs.columns.nodes = vec![Some(3), None, Some(3)];
        let affinity = Table::new(
            "Affinity",
            &["cpu", "numa_node", "online", "reason"],
            vec![
                vec![0.into(), Some(1).into(), true.into(), "=1+1".into()],
                vec![
                    1.into(),
                    Value::from(None::<u32>),
                    false.into(),
                    "\u{1b}[1m off\tline".into(),
                ],
            ],
        );
        let book = Workbook::new(vec![&idle, &loaded, &pairs], vec![affinity]);
        assert_eq!(write(&path, &book).unwrap(), Vec::<String>::new());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "temporary files remain");

        let Some(read) = openpyxl(
            "book = openpyxl.load_workbook(sys.argv[1])
sheets = {s.title: [list(r) for r in s.iter_rows(values_only=True)] for s in book}
heat = book['H2D_16MiB']
rule = list(heat.conditional_formatting)[0]
print(json.dumps({'names': book.sheetnames, 'sheets': sheets, 'freeze': heat.freeze_panes,
 'format': heat['B2'].number_format, 'range': str(rule.sqref), 'width': heat.column_dimensions['A'].width,
 'anchors': [[a.type, float(a.val)] for a in rule.rules[0].colorScale.cfvo],
 'formulas': [c.coordinate for c in book['Affinity']['D'] if c.data_type == 'f']}))",
            &[&path],
        ) else {
            return;
        };
        assert_eq!(
            read["names"],
            serde_json::json!([
                "H2D_16MiB",
                "H2D_64MiB",
                "H2D_16MiB_cpu2_pageable",
                "H2D_64MiB_cpu2_pageable",
                "PAIR_16MiB",
                "PAIR_64MiB",
                "Summary",
                "Affinity",
            ])
        );
        assert_eq!(
            read["sheets"]["H2D_16MiB"],
            serde_json::json!([
                ["CPU -> device H2D GB/s (16MiB)", "device 2", "device 0", "device 7"],
                [0, 50.125, 50, 42.125],
                [1, 50.625, 50.5, 42.625],
                [4, 51.125, null, 43.125],
                [5, 52.125, 52, 44.125],
            ])
        );
        assert_eq!(read["sheets"]["PAIR_64MiB"][0][1], 2);
        assert_eq!((&read["freeze"], &read["format"]), (&"B2".into(), &"0.000".into()));
        assert_eq!(read["range"], "B2:D5");
        let percentile = |at: f64| serde_json::json!(["percentile", at]);
        assert_eq!(
            read["anchors"],
            serde_json::json!([percentile(10.0), percentile(50.0), percentile(90.0)])
        );
        assert!(read["width"].as_f64().unwrap() > 10.0);
        assert_eq!(read["formulas"], serde_json::json!([]));
        assert_eq!(
            read["sheets"]["Affinity"],
            serde_json::json!([
                ["cpu", "numa_node", "online", "reason"],
                [0, 1, true, "=1+1"],
                [1, null, false, "\u{fffd}[1m off\tline"],
            ])
        );

        let summary = read["sheets"]["Summary"].as_array().unwrap();
        assert_eq!(summary[0], serde_json::json!(SUMMARY));
        // H2D: all + 3 devices + 2 nodes; pairs: one known column node more; two sizes each.
        assert_eq!(summary.len(), 1 + 2 * (6 + 6 + 7));
        // By hand: 42.125 42.625 43.125 44.125 50 50.125 50.5 50.625 51.125 52 52.125, position
        // 1.0 is p10 and 9.0 p90.
        assert_eq!(
            summary[1],
            serde_json::json!([
                "H2D",
                "16MiB",
                16_777_216,
                "idle",
                null,
                "all",
                null,
                12,
                11,
                42.125,
                42.625,
                50.125,
                52,
                52.125,
                0,
                11.0 / 12.0
            ])
        );
        // Device 0: 50 50.5 52: p10 at 0.2, p90 at 1.8.
        assert_eq!(
            summary[3],
            serde_json::json!([
                "H2D", "16MiB", 16_777_216, "idle", null, "device", 0, 4, 3, 50, 50.1, 50.5, 51.7,
                52, 0, 0.75
            ])
        );
        // Node 1: 43.125 44.125 51.125 52 52.125.
        assert_eq!(
            summary[6],
            serde_json::json!([
                "H2D",
                "16MiB",
                16_777_216,
                "idle",
                null,
                "NUMA node of cpu",
                1,
                6,
                5,
                43.125,
                43.525,
                51.125,
                52.075,
                52.125,
                0,
                5.0 / 6.0
            ])
        );
        // Columns 2 and 7 of the pairs lie on node 3.
        let node = &summary[1 + 12 + 12 + 6].as_array().unwrap()[5..9];
        assert_eq!(serde_json::json!(node), serde_json::json!(["NUMA node of device", 3, 8, 8]));
    }

    #[test]
    fn predicted_cells_are_marked_and_in_no_rate_of_the_summary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sampled.xlsx");
        let matrix = crate::output::predicted::tests::sampled(6, 6, 4);
        write(&path, &Workbook::new(vec![&matrix], vec![])).unwrap();
        let Some(read) = openpyxl(
            "book = openpyxl.load_workbook(sys.argv[1])
heat = book['PAIR_8MiB']
cells = [c for row in heat.iter_rows(min_row=2, min_col=2) for c in row]
grey = [c for c in cells if c.font.i and c.font.color.rgb == 'FF595959']
plain = [c for c in cells if not c.font.i]
summary = list(book['Summary'].iter_rows(values_only=True))
print(json.dumps({'title': heat['A1'].value, 'grey': [len(grey), grey[0].coordinate, grey[0].value],
 'plain': [len(plain), plain[0].coordinate, plain[0].value], 'formats': sorted({c.number_format for c in cells}),
 'all': summary[1][7:], 'column': summary[2][7:9] + summary[2][14:]}))",
            &[&path],
        ) else {
            return;
        };
        assert_eq!(
            read["title"],
            "rank-0 CPU x rank-1 CPU all_gather GB/s per rank (8MiB); italic grey = predicted, not \
             measured"
        );
        assert_eq!(read["grey"], serde_json::json!([27, "C2", 39.125]));
        assert_eq!(read["plain"], serde_json::json!([9, "B2", 40]));
        assert_eq!(read["formats"], serde_json::json!(["0.000"]));
        // Every fourth of a cycle of ten from 40 by 0.125: 40, 40.5, 41, 40.25, 40.75 and the first four
        // again; p10 is position 0.8 of the sorted ones, p90 7.2.
        assert_eq!(read["all"], serde_json::json!([36, 9, 40, 40, 40.5, 41, 41, 27, 0.25]));
        // Rows of six: of the first column rows 0, 2 and 4 are measured.
        assert_eq!(read["column"], serde_json::json!([6, 3, 3, 0.5]));
    }

    /// Field case F19: more rows than a sheet holds, a text longer than a cell holds, a name
    /// longer than Excel allows.
    #[test]
    fn f19_what_excel_cannot_hold_is_split_or_cut_with_a_note() {
        const ROWS: u32 = 1_228_800;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f19.xlsx");
        let long = Table::new("Samples", &["seq"], (0..ROWS).map(|i| vec![i.into()]).collect());
        let name = "Environment of host node-0182: [HCCL]/ASCEND";
        let text = "é".repeat(40 << 10);
        let wide: Vec<Value> = (0..16_400_u32).map(Value::from).collect();
        let environment =
            Table::new(name, &["key", "value"], vec![vec!["e".into(), text.as_str().into()], wide]);
        let again = Table::new(name, &["key"], vec![vec![Value::Number(f64::NAN)]]);
        let clash = Table::new("SUMMARY", &["key"], vec![]);
        let book = Workbook::new(vec![], vec![long, environment, again, clash]);
        let notes = write(&path, &book).unwrap();

        let Some(read) = openpyxl(
            "book = openpyxl.load_workbook(sys.argv[1], read_only=True)
out = {'names': book.sheetnames, 'rows': {}, 'cut': None}
for s in book:
    rows = list(s.iter_rows(values_only=True)) if s.title != 'Samples' else None
    if rows is None:
        n = total = 0
        for r in s.iter_rows(values_only=True, min_row=2):
            n += 1; total += r[0]
        out['rows'][s.title] = [n, total]
    else:
        out['rows'][s.title] = rows if s.title == 'Notes' else len(rows)
        if s.title == 'Samples_2':
            out['second'] = [rows[0][0], rows[1][0], rows[-1][0]]
        if s.title.startswith('Env') and not s.title.endswith('_2'):
            out['cut'] = [len(rows[1][1]), rows[1][1][:2], rows[1][1][-2:]]
            out['width'] = len(rows[2])
print(json.dumps(out))",
            &[&path],
        ) else {
            return;
        };
        let names: Vec<&str> =
            read["names"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
        assert_eq!(names.len(), 6);
        // Without a matrix there is nothing to sum up.
        assert_eq!(
            names,
            [
                "Samples",
                "Samples_2",
                "Environment of host node-0182_",
                "Environment of host node-0182_2",
                "SUMMARY_2",
                "Notes"
            ]
        );
        let first = u64::from(ROWS).min(1_048_575);
        assert_eq!(read["rows"]["Samples"], serde_json::json!([first, first * (first - 1) / 2]));
        assert_eq!(read["rows"]["Samples_2"], u64::from(ROWS) - first + 1);
        assert_eq!(read["second"], serde_json::json!(["seq", first, ROWS - 1]));
        assert_eq!(read["cut"], serde_json::json!([32_767, "éé", "é…"]));
        assert_eq!(read["width"], 16_384);
        let sheet: Vec<&str> = read["rows"]["Notes"].as_array().unwrap()[1..]
            .iter()
            .map(|row| row[0].as_str().unwrap())
            .collect();
        assert_eq!(sheet, notes);
        for part in ["1228800 rows", "Samples_2", "40960", "B2", name, "16 of 16400 columns"] {
            assert!(notes.iter().any(|note| note.contains(part)), "{part}: {notes:?}");
        }

        if libreoffice(&path, folder.path()).is_some() {
            let lines = |sheet: &str| {
                let text = std::fs::read_to_string(folder.path().join(format!("f19-{sheet}.csv")));
                text.unwrap().lines().count()
            };
            assert_eq!(lines("Samples"), 1_048_576);
            assert_eq!(lines("Samples_2"), 180_226);
        }
    }

    #[test]
    fn a_matrix_wider_than_a_sheet_is_split() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wide.xlsx");
        let columns = Axis::new("rank-1 cpu", (0..20_000).collect(), vec![]);
        let rows = Axis::new("rank-0 cpu", vec![3], vec![]);
        let mut wide = Matrix::new(Sweep::CorePair, "idle", vec![ByteSize::mib(8)], rows, columns);
        wide.gbps.fill(1.5);
        let notes = write(&path, &Workbook::new(vec![&wide], vec![])).unwrap();
        assert_eq!(notes.len(), 1);
        assert!(
            notes[0].contains("20000 columns") && notes[0].contains("PAIR_8MiB_2"),
            "{notes:?}"
        );
        if let Some(read) = openpyxl(
            "book = openpyxl.load_workbook(sys.argv[1], read_only=True)
print(json.dumps([list(list(book[n].iter_rows(values_only=True))[0][-1:]) for n in book.sheetnames[:2]]))",
            &[&path],
        ) {
            assert_eq!(read, serde_json::json!([[16_382], [19_999]]));
        }
    }

    #[test]
    fn a_matrix_too_large_for_a_workbook_is_left_out_with_a_note() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.xlsx");
        let (mut large, small) = (h2d(), crate::output::predicted::tests::sampled(2, 2, 1));
        large.load = "cpu:2".to_owned();
        // Two sizes of 12 cells, then 4: the second size does not fit.
        let notes = write_at_most(&path, &Workbook::new(vec![&large, &small], vec![]), 17).unwrap();
        assert_eq!(
            notes,
            ["H2D_64MiB_cpu2: left out, its 12 cells are more than the 5 that the workbook still \
              takes; h2d-64MiB-cpu2.csv and h2d-64MiB-cpu2.npy have them"]
        );
        if let Some(read) = openpyxl(
            "book = openpyxl.load_workbook(sys.argv[1])
print(json.dumps([book.sheetnames, [r[0].value for r in book['Notes']], len(list(book['Summary']))]))",
            &[&path],
        ) {
            assert_eq!(read[0], serde_json::json!(["H2D_16MiB_cpu2", "PAIR_8MiB", "Summary", "Notes"]));
            assert_eq!(read[1][1], notes[0]);
            // The matrix that was left out is in the summary: 6 lines of each size, 3 of the pairs.
            assert_eq!(read[2], 1 + 6 + 6 + 3);
        }
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing").join("matrices.xlsx");
        let error = write(&path, &Workbook::default()).unwrap_err();
        assert_eq!(error.kind(), "io");
        assert!(error.to_string().contains("matrices.xlsx"), "{error}");
    }
}
