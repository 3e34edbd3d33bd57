//! The table as files and as text.

use std::fmt::Write as _;
use std::io;

use super::{Line, LineStatus, Table};

/// Name of the JSON file.
pub const VALIDATE_JSON: &str = "validate.json";
/// Name of the CSV file.
pub const VALIDATE_CSV: &str = "validate.csv";
/// Name of the workbook.
pub const VALIDATE_XLSX: &str = "validate.xlsx";

/// Columns of table and sheet; the sheet of ranks has others.
const COLUMNS: [&str; 19] = [
    "operation",
    "scope",
    "load",
    "bytes",
    "order",
    "data_type",
    "unit",
    "convention",
    "memory",
    "ranks",
    "repetitions",
    "min",
    "median",
    "max",
    "spread",
    "collective",
    "cached",
    "status",
    "reason",
];

fn number(value: Option<f64>, empty: &str) -> String {
    match value {
        None => empty.to_owned(),
        // Six significant digits at any magnitude.
        Some(value) if value.abs() >= 1000.0 => format!("{value:.1}"),
        Some(value) if value.abs() >= 1.0 => format!("{value:.3}"),
        Some(value) => format!("{value:.6}"),
    }
}

/// The status as files have it.
fn status(line: &Line) -> &'static str {
    if line.status == LineStatus::Measured { "measured" } else { state(line) }
}

/// One word for a line's state.
fn state(line: &Line) -> &'static str {
    match line.status {
        LineStatus::Measured if line.cached => "cached",
        LineStatus::Measured => "measured",
        LineStatus::NotAvailable => "not_available",
        LineStatus::NotMeasured => "not_measured",
        LineStatus::Failed => "failed",
    }
}

/// `1MiB`, or `1024 float32`.
fn size(line: &Line) -> String {
    if let Some(bytes) = line.bytes {
        return bytes.to_string();
    }
    let order = line.order.map(|order| order.to_string()).unwrap_or_default();
    let data_type = data_type(line);
    if data_type.is_empty() { order } else { format!("{order} {data_type}") }
}

fn data_type(line: &Line) -> String {
    let value = line.data_type.and_then(|kind| serde_json::to_value(kind).ok());
    value.and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

pub(super) fn write_csv(table: &Table, out: impl io::Write) -> io::Result<()> {
    let mut csv = csv::Writer::from_writer(out);
    csv.write_record(COLUMNS)?;
    for line in &table.lines {
        let or_empty =
            |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
        csv.write_record([
            line.operation.as_str(),
            line.scope.as_str(),
            &line.load,
            &or_empty(line.bytes.map(|bytes| bytes.bytes())),
            &or_empty(line.order.map(u64::from)),
            &data_type(line),
            &line.unit,
            line.convention.as_str(),
            line.memory.as_deref().unwrap_or_default(),
            &line.ranks.to_string(),
            &line.repetitions.to_string(),
            &number(line.min, ""),
            &number(line.median, ""),
            &number(line.max, ""),
            &number(line.spread, ""),
            &number(line.collective, ""),
            if line.cached { "true" } else { "false" },
            status(line),
            line.reason.as_deref().unwrap_or_default(),
        ])?;
    }
    csv.flush()
}

/// `Validate`, one row per line as in the CSV, and `Ranks`, one per line and rank.
#[cfg(feature = "xlsx")]
pub(super) fn sheets(table: &Table) -> Vec<crate::output::xlsx::Table> {
    use crate::output::xlsx::{Table as Sheet, Value};
    use crate::stats::to_f64;
    let text = |text: Option<&str>| Value::from(text.filter(|text| !text.is_empty()));
    let whole = |value: Option<u64>| Value::from(value.map(to_f64));
    let start = |line: &Line| -> Vec<Value> {
        vec![
            line.operation.as_str().into(),
            line.scope.as_str().into(),
            line.load.as_str().into(),
            whole(line.bytes.map(|bytes| bytes.bytes())),
            line.order.into(),
            text(Some(&data_type(line))),
            line.unit.as_str().into(),
            line.convention.as_str().into(),
        ]
    };
    let mut lines = Vec::new();
    let mut ranks = Vec::new();
    for line in &table.lines {
        let mut row = start(line);
        row.extend([
            text(line.memory.as_deref()),
            line.ranks.into(),
            line.repetitions.into(),
            line.min.into(),
            line.median.into(),
            line.max.into(),
            line.spread.into(),
            line.collective.into(),
            line.cached.into(),
            status(line).into(),
            text(line.reason.as_deref()),
        ]);
        lines.push(row);
        for rank in &line.per_rank {
            let mut row = start(line);
            row.extend([
                rank.rank.into(),
                rank.value.into(),
                rank.spread.into(),
                rank.repetitions.into(),
                rank.unsettled.into(),
                text(rank.reason.as_deref()),
            ]);
            ranks.push(row);
        }
    }
    let mut of_ranks = COLUMNS[..8].to_vec();
    of_ranks.extend(["rank", "value", "spread", "repetitions", "unsettled", "reason"]);
    vec![Sheet::new("Validate", &COLUMNS, lines), Sheet::new("Ranks", &of_ranks, ranks)]
}

/// The table for a terminal.
#[must_use]
pub fn text(table: &Table) -> String {
    let mut out = format!(
        "{:<16} {:<15} {:<5} {:>15} {:>6} {:<8} {:>5} {:>4} {:>10} {:>10} {:>10} {:>7}  state\n",
        "operation",
        "scope",
        "load",
        "size",
        "unit",
        "rate",
        "ranks",
        "reps",
        "min",
        "median",
        "max",
        "spread"
    );
    for line in &table.lines {
        let spread =
            line.spread.map_or("-".to_owned(), |spread| format!("{:.2} %", 100.0 * spread));
        // Writing to a String cannot fail.
        writeln!(
            out,
            "{:<16} {:<15} {:<5} {:>15} {:>6} {:<8} {:>5} {:>4} {:>10} {:>10} {:>10} {:>7}  {}{}",
            line.operation.as_str(),
            line.scope.as_str(),
            line.load,
            size(line),
            line.unit,
            line.convention.as_str(),
            line.ranks,
            line.repetitions,
            number(line.min, "-"),
            number(line.median, "-"),
            number(line.max, "-"),
            spread,
            state(line),
            line.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default(),
        )
        .ok();
    }
    out
}

/// The section of `report.md`.
#[must_use]
pub fn markdown(table: &Table) -> String {
    let mut out = "## Base table\n\n".to_owned();
    if !table.complete {
        out.push_str("Interrupted: not all repetitions were made.\n\n");
    }
    out.push_str("| rank | device | CPU | NUMA node | host |\n|---:|---:|---:|---:|---|\n");
    for place in &table.ranks {
        let node = place.numa_node.map_or("-".to_owned(), |node| node.to_string());
        let host = place.host.as_deref().unwrap_or("-");
        writeln!(out, "| {} | {} | {} | {node} | {host} |", place.rank, place.device, place.cpu)
            .ok();
    }
    out.push_str(
        "\n| operation | scope | load | size | rate | ranks | repetitions | min | median | max | \
         spread | state |\n|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|---|\n",
    );
    for line in &table.lines {
        let spread =
            line.spread.map_or("-".to_owned(), |spread| format!("{:.2} %", 100.0 * spread));
        let reason = line.reason.as_ref().map(|reason| reason.replace('|', "\\|"));
        writeln!(
            out,
            "| {} | {} | {} | {} | {}, {} | {} | {} | {} | {} | {} | {spread} | {}{} |",
            line.operation.as_str(),
            line.scope.as_str().replace('_', " "),
            line.load,
            size(line),
            line.unit,
            line.convention.as_str(),
            line.ranks,
            line.repetitions,
            number(line.min, "-"),
            number(line.median, "-"),
            number(line.max, "-"),
            state(line).replace('_', " "),
            reason.map(|reason| format!(": {reason}")).unwrap_or_default(),
        )
        .ok();
    }
    out.push_str(
        "\nmin, median and max are over the ranks, each rank by the median of its repetitions; the \
         spread is the relative standard deviation between repetitions. Rates of n ranks with S \
         bytes each in time t: per_rank S ÷ t, alg n·S ÷ t, bus (n − 1)·S ÷ t; matrix products \
         2·n³ ÷ t.\n",
    );
    out
}
