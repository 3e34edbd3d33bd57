//! Reading the older tool's results, and matrices as CSV, as samples.
//!
//! Every recorded rate becomes one sample with one iteration of bytes ÷ rate, rounded to whole
//! nanoseconds (16 MiB at 58 GB/s: a relative error of at most 1.7 × 10⁻⁶). What the files do not
//! say stays null. An empty cell of a matrix was not measured and becomes no sample.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use cluster_health_core::affinity::CpuRecord;
use cluster_health_core::{ByteSize, CpuId, DeviceId, NodeId};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::ScanOrder;
use crate::error::{Error, Result};
use crate::output::csv::{self, MAX_AXIS, MAX_CELLS};
use crate::samples::{Pinned, PointStatus, RanOn, Sample, Sweep};

/// What kind of files the sources are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SourceFormat {
    /// `results.json`, `rank_00000.json`, their `partial` forms, a folder with them, or the older
    /// tool's workbook.
    ClusterHealthDetect,
    /// One matrix per file.
    Csv,
}

impl SourceFormat {
    /// The word of the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterHealthDetect => "clusterhealthdetect",
            Self::Csv => "csv",
        }
    }
}

/// What to import.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ImportRequest {
    /// What the sources are.
    pub format: SourceFormat,
    /// [`Sweep::H2d`] or [`Sweep::CorePair`].
    pub sweep: Sweep,
    /// The files.
    pub sources: Vec<PathBuf>,
    /// The census of the machine, CSV or JSON.
    pub affinity: Option<PathBuf>,
    /// Bytes per copy (per rank), where one CSV file does not say it in its name.
    pub size: Option<ByteSize>,
    /// The order of measurement, where it is known.
    pub scan_order: Option<ScanOrder>,
}

impl ImportRequest {
    /// A request that leaves everything else to the files.
    #[must_use]
    pub fn new(format: SourceFormat, sweep: Sweep, sources: Vec<PathBuf>) -> Self {
        Self { format, sweep, sources, affinity: None, size: None, scan_order: None }
    }
}

/// What was read.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Imported {
    /// One sample per recorded cell, in `scan_order`, `seq` from 0.
    pub samples: Vec<Sample>,
    /// The order of the samples.
    pub scan_order: ScanOrder,
    /// True when nothing but convention says so: findings that rest on it must state it.
    pub scan_order_assumed: bool,
    /// Row ids in the order of the files, measured or not.
    pub rows: Vec<u32>,
    /// Column ids in the order of the files, measured or not.
    pub columns: Vec<u32>,
    /// The census, where one was given or found beside the results.
    pub affinity: Option<Vec<CpuRecord>>,
    /// Pairs: the devices of rank 0 and rank 1, where the files say.
    pub device_pair: Option<[u32; 2]>,
    /// What was left out or concluded, one line each.
    pub notes: Vec<String>,
}

/// Reads all sources.
///
/// # Errors
/// [`Error::Invalid`] for a request that cannot be met, naming the option; [`Error::Io`] for files
/// that cannot be read; [`Error::Format`] for content that cannot be, naming the file and the
/// line, cell or metric, and for one cell that is recorded twice, naming both places.
pub fn read(request: &ImportRequest) -> Result<Imported> {
    if !matches!(request.sweep, Sweep::H2d | Sweep::CorePair) {
        return Err(Error::invalid("--sweep", "only h2d and core-pair can be imported"));
    }
    if request.sources.is_empty() {
        return Err(Error::invalid("SRC", "no file to import"));
    }
    if request.size.is_some() && request.format != SourceFormat::Csv {
        return Err(Error::invalid("--size", "only for CSV; these files carry their sizes"));
    }
    if request.size.is_some() && request.sources.len() > 1 {
        return Err(Error::invalid(
            "--size",
            "names the size of one file; several must carry theirs in their names (…-16MiB.csv)",
        ));
    }
    let mut collected = Collected::new(request.sweep);
    for path in &request.sources {
        match request.format {
            SourceFormat::Csv => collected.csv(path, request.size)?,
            SourceFormat::ClusterHealthDetect => collected.older(path)?,
        }
    }
    if let Some(path) = &request.affinity {
        collected.affinity = Some(affinity(path)?);
    }
    collected.finish(request.scan_order)
}

/// Where something stands in the sources.
#[derive(Debug, Clone, Copy)]
pub(super) enum At {
    Metric(usize),
    Text {
        line: u64,
        column: usize,
    },
    #[cfg(feature = "xlsx")]
    Sheet {
        sheet: usize,
        row: u32,
        column: u32,
    },
}

/// How one recorded visit of a cell came out.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    /// Decimal GB/s, finite.
    Rate(f64),
    Not(PointStatus, String),
}

#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) source: usize,
    pub(super) at: At,
    pub(super) row: u32,
    pub(super) column: u32,
    pub(super) bytes: ByteSize,
    pub(super) repeat: u32,
    pub(super) pinned: Option<bool>,
    pub(super) ran_on: Vec<CpuId>,
    pub(super) rank: Option<u32>,
    pub(super) device_pair: Option<[u32; 2]>,
    pub(super) outcome: Outcome,
}

impl Record {
    pub(super) fn new(
        source: usize,
        at: At,
        cell: (u32, u32),
        bytes: ByteSize,
        outcome: Outcome,
    ) -> Self {
        Self {
            source,
            at,
            row: cell.0,
            column: cell.1,
            bytes,
            repeat: 0,
            pinned: None,
            ran_on: Vec::new(),
            rank: None,
            device_pair: None,
            outcome,
        }
    }

    /// Duration of one transfer in whole nanoseconds, or why there is none.
    fn nanoseconds(&self) -> Result<u64, (PointStatus, String)> {
        let rate = match &self.outcome {
            Outcome::Rate(rate) => *rate,
            Outcome::Not(status, reason) => return Err((*status, reason.clone())),
        };
        #[allow(clippy::cast_precision_loss, reason = "sizes stay far below 2^53 bytes")]
        let exact = self.bytes.bytes() as f64 / rate;
        // The upper bound is 29 years, which also keeps the conversion exact enough.
        if rate > 0.0 && (0.5..9e17).contains(&exact) {
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "within 0.5 and 9e17"
            )]
            return Ok(exact.round() as u64);
        }
        Err((
            PointStatus::Implausible,
            format!("{} at {rate} GB/s is no possible duration", self.bytes),
        ))
    }
}

/// Ids in order of first appearance.
#[derive(Debug, Default)]
struct Ids {
    list: Vec<u32>,
    positions: HashMap<u32, usize>,
}

impl Ids {
    fn add(&mut self, id: u32) {
        let next = self.list.len();
        self.positions.entry(id).or_insert_with(|| {
            self.list.push(id);
            next
        });
    }

    fn position(&self, id: u32) -> usize {
        self.positions.get(&id).copied().unwrap_or(usize::MAX)
    }
}

pub(super) struct Collected {
    pub(super) sweep: Sweep,
    /// Names of the files read, as errors show them.
    pub(super) files: Vec<String>,
    /// Sheet names of workbooks.
    #[cfg(feature = "xlsx")]
    pub(super) sheets: Vec<String>,
    records: Vec<Record>,
    rows: Ids,
    columns: Ids,
    pub(super) affinity: Option<Vec<CpuRecord>>,
    device_pair: Option<[u32; 2]>,
    pub(super) notes: Vec<String>,
    /// Files list points in the order of measurement.
    listed_in_order: bool,
    /// Files carry times that confirm it.
    timed: bool,
}

impl Collected {
    fn new(sweep: Sweep) -> Self {
        Self {
            sweep,
            files: Vec::new(),
            #[cfg(feature = "xlsx")]
            sheets: Vec::new(),
            records: Vec::new(),
            rows: Ids::default(),
            columns: Ids::default(),
            affinity: None,
            device_pair: None,
            notes: Vec::new(),
            listed_in_order: true,
            timed: true,
        }
    }

    pub(super) fn place(&self, source: usize, at: At) -> String {
        let file = self.files.get(source).map_or("", String::as_str);
        match at {
            At::Metric(number) => format!("{file}: metric {number}"),
            At::Text { line, column } => format!("{file}:{line}, column {column}"),
            #[cfg(feature = "xlsx")]
            At::Sheet { sheet, row, column } => format!(
                "{file}: sheet {}, cell {}",
                self.sheets.get(sheet).map_or("", String::as_str),
                super::workbook::cell_name(row, column)
            ),
        }
    }

    /// Registers a label that the file gives, measured or not.
    pub(super) fn label(&mut self, row: Option<u32>, column: Option<u32>) {
        if let Some(row) = row {
            self.rows.add(row);
        }
        if let Some(column) = column {
            self.columns.add(column);
        }
    }

    pub(super) fn push(&mut self, record: Record) -> Result<()> {
        if self.records.len() >= MAX_CELLS {
            return Err(Error::format(
                self.place(record.source, record.at),
                format!("more than {MAX_CELLS} points"),
            ));
        }
        self.label(Some(record.row), Some(record.column));
        self.records.push(record);
        Ok(())
    }

    pub(super) fn no_order(&mut self) {
        self.listed_in_order = false;
        self.timed = false;
    }

    fn csv(&mut self, path: &Path, size: Option<ByteSize>) -> Result<()> {
        let bytes = match size {
            Some(size) => size,
            None => self.size_from_name(path)?,
        };
        if bytes.bytes() == 0 {
            return Err(Error::invalid("--size", "must be above 0"));
        }
        if path.extension().is_some_and(|extension| extension == "xz" || extension == "gz") {
            return Err(Error::invalid(
                "SRC",
                format!("{} is compressed; unpack it first", path.display()),
            ));
        }
        let source = self.files.len();
        self.files.push(path.display().to_string());
        let matrix = csv::read(path)?;
        let (fits, other) = if self.sweep.is_pair() {
            (matches!(matrix.corner.as_str(), "rank0\\rank1" | "rank0_cpu" | "cpu"), "h2d")
        } else {
            (matrix.corner == "cpu", "core-pair")
        };
        if !fits {
            return Err(Error::format(
                self.place(source, At::Text { line: 1, column: 1 }),
                format!(
                    "'{}' heads no {} matrix; for {other} pass --sweep {other}",
                    matrix.corner, self.sweep
                ),
            ));
        }
        for id in &matrix.columns {
            self.label(None, Some(*id));
        }
        let mut empty = 0_usize;
        for (index, row) in matrix.rows.iter().enumerate() {
            self.label(Some(*row), None);
            for (cell, column) in matrix.columns.iter().enumerate() {
                let rate = matrix.values[[index, cell]];
                if rate.is_nan() {
                    empty += 1;
                    continue;
                }
                let at = At::Text { line: matrix.lines[index], column: cell + 2 };
                self.push(Record::new(source, at, (*row, *column), bytes, Outcome::Rate(rate)))?;
            }
        }
        if empty > 0 {
            self.notes.push(format!("{}: {empty} empty cells, not measured", path.display()));
        }
        self.no_order();
        Ok(())
    }

    /// The size in a file name: `h2d-16MiB.csv`, or as older files write it `…-16MB.csv`, where
    /// MB is 2²⁰.
    fn size_from_name(&mut self, path: &Path) -> Result<ByteSize> {
        let stem = path.file_stem().map(|stem| stem.to_string_lossy()).unwrap_or_default();
        let mut found: Vec<(ByteSize, &str)> = Vec::new();
        for part in stem.split(['-', '_']) {
            let unit = part.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
            let binary = match unit.to_ascii_lowercase().as_str() {
                "kb" => "KiB",
                "mb" => "MiB",
                "gb" => "GiB",
                "b" | "kib" | "mib" | "gib" => unit,
                _ => continue,
            };
            let number = part.strip_suffix(unit).unwrap_or_default();
            if let Ok(size) = format!("{number}{binary}").parse::<ByteSize>() {
                found.push((size, part));
            }
        }
        found.dedup_by_key(|(size, _)| *size);
        match found.as_slice() {
            [(size, part)] => {
                if size.to_string() != *part {
                    self.notes.push(format!("{}: {part} read as {size}", path.display()));
                }
                Ok(*size)
            }
            [] => Err(Error::invalid(
                "--size",
                format!("{}: its name carries no size (…-16MiB.csv); pass --size", path.display()),
            )),
            several => Err(Error::invalid(
                "--size",
                format!(
                    "{}: its name carries {} sizes ({}); pass --size",
                    path.display(),
                    several.len(),
                    several.iter().map(|(_, part)| *part).collect::<Vec<_>>().join(", ")
                ),
            )),
        }
    }

    fn older(&mut self, path: &Path) -> Result<()> {
        if path.is_dir() {
            let names = [
                "results.json",
                "rank_00000.json",
                "partial_results.json",
                "rank_00000_partial.json",
            ];
            let file = names.iter().map(|name| path.join(name)).find(|file| file.is_file());
            let file = file.ok_or_else(|| {
                Error::invalid(
                    "SRC",
                    format!("{} holds none of {}", path.display(), names.join(", ")),
                )
            })?;
            let census = path.join("affinity.json");
            if census.is_file() {
                self.affinity = Some(affinity(&census)?);
            }
            return self.older(&file);
        }
        let bytes = bytes(path)?;
        let source = self.files.len();
        self.files.push(path.display().to_string());
        if bytes.starts_with(b"PK") {
            #[cfg(feature = "xlsx")]
            return super::workbook::read(self, source, &bytes);
            #[cfg(not(feature = "xlsx"))]
            return Err(Error::invalid(
                "SRC",
                format!("{}: this build reads no workbooks (feature xlsx)", path.display()),
            ));
        }
        self.json(source, &bytes)
    }

    fn json(&mut self, source: usize, bytes: &[u8]) -> Result<()> {
        let document: Document<'_> = match serde_json::from_slice(bytes) {
            Ok(document) => document,
            Err(error) => {
                // Python writes NaN and Infinity, which JSON does not have.
                let Some(repaired) = without_python_numbers(bytes) else {
                    return Err(self.bad_json(source, &error));
                };
                let document: Document<'_> = serde_json::from_slice(&repaired)
                    .map_err(|error| self.bad_json(source, &error))?;
                return self.document(source, &document);
            }
        };
        self.document(source, &document)
    }

    fn bad_json(&self, source: usize, error: &serde_json::Error) -> Error {
        let file = self.files.get(source).cloned().unwrap_or_default();
        Error::format(file, format!("not a results file: {error}"))
    }

    fn document(&mut self, source: usize, document: &Document<'_>) -> Result<()> {
        let (rows, columns, test) = if self.sweep.is_pair() {
            ("rank0_cpus", "rank1_cpus", "core_pair_d2d_matrix")
        } else {
            ("cpu_ids", "device_ids", "core_h2d_matrix")
        };
        let list = |key: &str| -> Vec<u32> {
            let value = document.meta.get(key).cloned().unwrap_or_default();
            serde_json::from_value(value).unwrap_or_default()
        };
        for row in list(rows) {
            self.label(Some(row), None);
        }
        for column in list(columns) {
            self.label(None, Some(column));
        }
        if self.sweep.is_pair()
            && let [rank0, rank1] = list("device_pair")[..]
        {
            self.device_pair = Some([rank0, rank1]);
        }

        let (mut other, mut placeless, mut other_way) = (0_usize, 0_usize, 0_usize);
        let mut last = String::new();
        for (index, raw) in document.metrics.iter().enumerate() {
            let at = At::Metric(index + 1);
            let broken =
                |error: serde_json::Error| Error::format(self.place(source, at), error.to_string());
            let head: Head = serde_json::from_str(raw.get()).map_err(broken)?;
            if head.test.as_deref() != Some(test) {
                other += 1;
                continue;
            }
            let metric: Metric = serde_json::from_str(raw.get()).map_err(broken)?;
            if metric.direction.as_deref().is_some_and(|way| way != "host_to_device")
                && !self.sweep.is_pair()
            {
                other_way += 1;
                continue;
            }
            match metric.ts.as_ref() {
                // ISO 8601 in one time zone sorts as text.
                Some(ts) if *ts >= last => last.clone_from(ts),
                _ => self.timed = false,
            }
            match metric.record(self.sweep.is_pair(), source, at) {
                Ok(Some(record)) => self.push(record)?,
                Ok(None) => placeless += 1,
                Err(message) => return Err(Error::format(self.place(source, at), message)),
            }
        }
        let file = self.files.get(source).cloned().unwrap_or_default();
        if other + placeless + other_way == document.metrics.len() {
            return Err(Error::format(
                file,
                format!(
                    "{} metrics, none of test {test} with a cell; is --sweep {} right?",
                    document.metrics.len(),
                    self.sweep
                ),
            ));
        }
        for (count, what) in [
            (other, "of other tests"),
            (other_way, "of other directions"),
            (placeless, "that failed before they had a cell"),
        ] {
            if count > 0 {
                self.notes.push(format!("{file}: {count} metrics {what} left out"));
            }
        }
        if document.meta.get("partial") == Some(&Value::Bool(true)) {
            self.notes.push(format!("{file}: a partial result"));
        }
        Ok(())
    }

    /// Checks what was read as a whole, orders it and makes samples of it.
    fn finish(mut self, asked: Option<ScanOrder>) -> Result<Imported> {
        self.merge_duplicates()?;
        let mut sizes: Vec<ByteSize> = self.records.iter().map(|record| record.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let (rows, columns) = (self.rows.list.len(), self.columns.list.len());
        let cells = rows.saturating_mul(columns).saturating_mul(sizes.len());
        if rows > MAX_AXIS || columns > MAX_AXIS || cells > MAX_CELLS {
            return Err(Error::format(
                self.files.join(", "),
                format!(
                    "{} sizes × {rows} rows × {columns} columns; at most {MAX_AXIS} rows or \
                     columns and {MAX_CELLS} cells are read",
                    sizes.len()
                ),
            ));
        }
        if self.records.is_empty() {
            return Err(Error::format(self.files.join(", "), "no cell was measured"));
        }

        let row_major = |record: &Record| {
            (self.rows.position(record.row), record.bytes, self.columns.position(record.column))
        };
        let column_major = |record: &Record| {
            (self.columns.position(record.column), record.bytes, self.rows.position(record.row))
        };
        let (scan_order, scan_order_assumed) = match asked {
            Some(order) => (order, false),
            None if !self.listed_in_order => (ScanOrder::RowMajor, true),
            // Repeats lie inside each cell or around the whole scan.
            None if self.records.is_sorted_by_key(row_major)
                || self.records.is_sorted_by_key(|record| (record.repeat, row_major(record))) =>
            {
                (ScanOrder::RowMajor, !self.timed)
            }
            None if self.records.is_sorted_by_key(column_major)
                || self
                    .records
                    .is_sorted_by_key(|record| (record.repeat, column_major(record))) =>
            {
                (ScanOrder::ColumnMajor, !self.timed)
            }
            None => (ScanOrder::Unknown, false),
        };
        let mut records = std::mem::take(&mut self.records);
        // Files that list points as measured already are in the order that they imply.
        if asked.is_some() || !self.listed_in_order {
            match scan_order {
                ScanOrder::ColumnMajor => records.sort_by_key(column_major),
                ScanOrder::RowMajor => records.sort_by_key(row_major),
                ScanOrder::Unknown if self.listed_in_order => {}
                ScanOrder::Unknown => records.sort_by_key(row_major),
            }
        }
        let first = records.iter().map(|record| record.repeat).min().unwrap_or_default();
        let samples = (0..)
            .zip(records)
            .map(|(seq, record)| sample(seq, self.sweep, self.device_pair, record, first))
            .collect();
        Ok(Imported {
            samples,
            scan_order,
            scan_order_assumed,
            rows: self.rows.list,
            columns: self.columns.list,
            affinity: self.affinity,
            device_pair: self.device_pair,
            notes: self.notes,
        })
    }

    /// One point told by both ranks of a pair becomes the slower rank's; anything else that is
    /// there twice is an error.
    fn merge_duplicates(&mut self) -> Result<()> {
        let mut kept: Vec<Record> = Vec::with_capacity(self.records.len());
        let mut seen = HashMap::with_capacity(self.records.len());
        for record in std::mem::take(&mut self.records) {
            let key = (record.row, record.column, record.bytes, record.repeat, record.pinned);
            let next = kept.len();
            let index = *seen.entry(key).or_insert(next);
            let Some(first) = kept.get_mut(index) else {
                kept.push(record);
                continue;
            };
            if self.sweep.is_pair() && record.rank.is_some() && record.rank != first.rank {
                let slower = match (record.nanoseconds(), first.nanoseconds()) {
                    (Ok(this), Ok(that)) => this > that,
                    (Err(_), Ok(_)) => true,
                    (_, Err(_)) => false,
                };
                if slower {
                    first.outcome = record.outcome;
                }
                continue;
            }
            let place = self.place(record.source, record.at);
            let earlier = self.place(first.source, first.at);
            return Err(Error::format(
                place,
                format!(
                    "cell ({}, {}) at {} and repeat {} stands at {earlier} already",
                    record.row, record.column, record.bytes, record.repeat
                ),
            ));
        }
        self.records = kept;
        Ok(())
    }
}

fn sample(
    seq: u64,
    sweep: Sweep,
    device_pair: Option<[u32; 2]>,
    record: Record,
    first_repeat: u32,
) -> Sample {
    let mut sample = Sample::new(seq, sweep, record.bytes);
    sample.block = record.repeat - first_repeat;
    if sweep.is_pair() {
        sample.rank0_cpu = Some(CpuId(record.row));
        sample.rank1_cpu = Some(CpuId(record.column));
        sample.device_pair = record.device_pair.or(device_pair).map(|pair| pair.map(DeviceId));
    } else {
        sample.cpu = Some(CpuId(record.row));
        sample.device = Some(DeviceId(record.column));
    }
    match record.nanoseconds() {
        Ok(nanoseconds) => sample.iter_ns = vec![nanoseconds],
        Err((status, reason)) => {
            sample.status = status;
            sample.reason = Some(reason);
        }
    }
    sample.pinned =
        record.pinned.map(|pinned| if pinned { Pinned::Pinned } else { Pinned::Pageable });
    sample.ran_on = RanOn::Thread(record.ran_on);
    sample
}

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(default)]
    meta: serde_json::Map<String, Value>,
    #[serde(borrow)]
    metrics: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Head {
    test: Option<String>,
}

/// The fields of a metric that mean something here; the others are ignored.
#[derive(Deserialize)]
struct Metric {
    status: Option<String>,
    reason: Option<Value>,
    error: Option<Value>,
    ts: Option<String>,
    direction: Option<String>,
    host_cpu: Option<u32>,
    device_id: Option<u32>,
    rank0_cpu: Option<u32>,
    rank1_cpu: Option<u32>,
    device_pair: Option<[u32; 2]>,
    size_mb: Option<f64>,
    gbps: Option<f64>,
    alg_gbps: Option<f64>,
    repeat: Option<u32>,
    rank: Option<u32>,
    pinned: Option<bool>,
    bind_actual_cpus: Option<Vec<CpuId>>,
}

impl Metric {
    /// The record; `None` for a failure that names no cell.
    fn record(self, pair: bool, source: usize, at: At) -> Result<Option<Record>, String> {
        let (names, row, column, rate_name, rate) = if pair {
            (["rank0_cpu", "rank1_cpu"], self.rank0_cpu, self.rank1_cpu, "alg_gbps", self.alg_gbps)
        } else {
            (["host_cpu", "device_id"], self.host_cpu, self.device_id, "gbps", self.gbps)
        };
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let why = self.reason.as_ref().or(self.error.as_ref()).map(text);
        let status = self.status.as_deref().unwrap_or("ok");
        let outcome = match (status, rate) {
            ("ok", Some(rate)) => Outcome::Rate(rate),
            ("ok", None) => Outcome::Not(
                PointStatus::Failed,
                format!("status ok, but {rate_name} is no number"),
            ),
            ("skip" | "skipped", _) => Outcome::Not(
                PointStatus::Skipped,
                why.unwrap_or_else(|| "skipped without a reason".to_owned()),
            ),
            ("error" | "failed", _) => Outcome::Not(
                PointStatus::Failed,
                why.unwrap_or_else(|| "failed without a reason".to_owned()),
            ),
            (other, _) => return Err(format!("status '{other}' is none of ok, skip, error")),
        };
        let (Some(row), Some(column), Some(size)) = (row, column, self.size_mb) else {
            if status == "ok" {
                return Err(format!("one of {}, {}, size_mb is missing", names[0], names[1]));
            }
            return Ok(None);
        };
        let bytes = size * 1_048_576.0;
        if !(1.0..9e15).contains(&bytes) || bytes.fract() != 0.0 {
            return Err(format!("size_mb {size} is no size in MiB"));
        }
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole and between 1 and 9e15"
        )]
        let bytes = ByteSize(bytes as u64);
        let mut record = Record::new(source, at, (row, column), bytes, outcome);
        record.repeat = self.repeat.unwrap_or_default();
        record.pinned = self.pinned;
        record.rank = self.rank;
        record.device_pair = self.device_pair;
        if !pair {
            record.ran_on = self.bind_actual_cpus.unwrap_or_default();
        }
        Ok(Some(record))
    }
}

/// The text with Python's NaN, Infinity and −Infinity outside strings turned into null; `None`
/// when there are none.
fn without_python_numbers(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len());
    let (mut rest, mut quoted, mut found) = (bytes, false, false);
    while let Some((&byte, tail)) = rest.split_first() {
        if quoted && byte == b'\\' {
            let (escape, tail) = rest.split_at(rest.len().min(2));
            out.extend_from_slice(escape);
            rest = tail;
            continue;
        }
        quoted ^= byte == b'"';
        let words: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
        match words.iter().find(|word| !quoted && rest.starts_with(word)) {
            Some(word) => {
                found = true;
                out.extend_from_slice(b"null");
                rest = &rest[word.len()..];
            }
            None => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    found.then_some(out)
}

fn bytes(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|error| Error::io("opening", path, error))?;
    let mut bytes = Vec::new();
    csv::limited(file, path)?
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io("reading", path, error))?;
    Ok(bytes)
}

/// Reads a census: `affinity.json`, or CSV with the same names in its first line.
fn affinity(path: &Path) -> Result<Vec<CpuRecord>> {
    let bytes = bytes(path)?;
    let place = path.display().to_string();
    let start = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    if matches!(start, Some(b'{' | b'[')) {
        let document: Value = serde_json::from_slice(&bytes)
            .map_err(|error| Error::format(place.as_str(), format!("not a census: {error}")))?;
        let list = document.get("cpus").unwrap_or(&document);
        let list = list
            .as_array()
            .ok_or_else(|| Error::format(place.as_str(), "not a census: no list 'cpus'"))?;
        let rows = list.iter().enumerate().map(|(index, row)| {
            let cell = |name: &str| row.get(name).map(plain).unwrap_or_default();
            (format!("{place}: CPU entry {}", index + 1), affinity_row(cell))
        });
        return affinity_rows(rows);
    }
    let mut reader =
        ::csv::ReaderBuilder::new().trim(::csv::Trim::All).from_reader(bytes.as_slice());
    let broken = |error: &::csv::Error| {
        let line = error.position().map_or(0, ::csv::Position::line);
        Error::format(format!("{place}:{line}"), error.to_string())
    };
    let names = reader.headers().map_err(|error| broken(&error))?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| broken(&error))?;
        let cell = |name: &str| {
            let at = names.iter().position(|column| column == name);
            at.and_then(|at| record.get(at)).unwrap_or_default().to_owned()
        };
        let line = record.position().map_or(0, ::csv::Position::line);
        rows.push((format!("{place}:{line}"), affinity_row(cell)));
    }
    affinity_rows(rows)
}

/// A JSON value as a CSV cell would hold it.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// The rows, or the first error with its place; a CPU that is there twice is one.
pub(super) fn affinity_rows(
    rows: impl IntoIterator<Item = (String, Result<CpuRecord, String>)>,
) -> Result<Vec<CpuRecord>> {
    let mut list = Vec::new();
    let mut seen: HashMap<CpuId, String> = HashMap::new();
    for (place, row) in rows {
        let row = row.map_err(|message| Error::format(place.as_str(), message))?;
        if let Some(first) = seen.get(&row.cpu) {
            return Err(Error::format(place, format!("CPU {} stands at {first} already", row.cpu)));
        }
        seen.insert(row.cpu, place);
        list.push(row);
    }
    Ok(list)
}

/// One CPU from its cells by name; an empty cell is unknown.
pub(super) fn affinity_row(cell: impl Fn(&str) -> String) -> Result<CpuRecord, String> {
    let number = |name: &str| match cell(name).as_str() {
        "" => Ok(None),
        text => text.parse::<i64>().map(Some).map_err(|_| format!("{name} '{text}' is no number")),
    };
    let truth = |name: &str| match cell(name).to_ascii_lowercase().as_str() {
        "" => Ok(None),
        "true" | "1" => Ok(Some(true)),
        "false" | "0" => Ok(Some(false)),
        other => Err(format!("{name} '{other}' is neither true nor false")),
    };
    let cpu = number("cpu")?.ok_or("no cpu")?;
    let online = truth("online")?.unwrap_or(true);
    Ok(CpuRecord {
        cpu: CpuId(u32::try_from(cpu).map_err(|_| format!("cpu {cpu} is no CPU"))?),
        // The kernel says −1 where there is no node.
        numa_node: number("numa_node")?.and_then(|node| u32::try_from(node).ok()).map(NodeId),
        socket_id: number("socket_id")?,
        core_id: number("core_id")?,
        online,
        allowed: truth("allowed")?.unwrap_or(online),
        bindable: truth("bindable")?,
        thread_siblings: cell("thread_siblings"),
        reason: Some(cell("reason")).filter(|reason| !reason.is_empty()),
    })
}
