//! A policy sweep as files and as text.

use std::fmt::Write as _;
use std::io;

use super::{Claim, PolicyLine, PolicyRank, PolicySweep, ToNone};

/// Name of the JSON file.
pub const POLICIES_JSON: &str = "policies.json";
/// Name of the CSV file.
pub const POLICIES_CSV: &str = "policies.csv";
/// Name of the workbook.
pub const POLICIES_XLSX: &str = "policies.xlsx";
/// Name of the picture.
pub const POLICIES_PNG: &str = "policies.png";

const COLUMNS: [&str; 24] = [
    "operation",
    "bytes",
    "memory",
    "policy",
    "load",
    "unit",
    "convention",
    "host_memory",
    "ranks",
    "repetitions",
    "min",
    "median",
    "max",
    "spread",
    "collective",
    "to_none",
    "low",
    "high",
    "blocks",
    "claim",
    "ran_on",
    "status",
    "errno",
    "reason",
];

fn number(value: Option<f64>, empty: &str) -> String {
    match value {
        None => empty.to_owned(),
        Some(value) if value.abs() >= 1.0 => format!("{value:.3}"),
        Some(value) => format!("{value:.6}"),
    }
}

fn memory(line: &PolicyLine) -> &'static str {
    line.memory.map_or("", |memory| memory.as_str())
}

fn claim(ratio: Option<&ToNone>) -> &'static str {
    ratio.and_then(|ratio| ratio.claim).map_or("", Claim::as_str)
}

/// CPUs that any rank was seen on.
fn ran_on(line: &PolicyLine) -> String {
    let seen = line.per_rank.iter().flat_map(|rank| rank.ran_on.iter());
    seen.collect::<cluster_health_core::affinity::CpuSet>().to_string()
}

pub(super) fn write_csv(sweep: &PolicySweep, out: impl io::Write) -> io::Result<()> {
    let mut csv = csv::Writer::from_writer(out);
    csv.write_record(COLUMNS)?;
    for line in &sweep.lines {
        let ratio = line.to_none.as_ref();
        csv.write_record([
            line.operation.as_str(),
            &line.bytes.bytes().to_string(),
            memory(line),
            &line.policy.to_string(),
            &line.load,
            &line.unit,
            line.convention.as_str(),
            line.host_memory.as_deref().unwrap_or_default(),
            &line.ranks.to_string(),
            &line.repetitions.to_string(),
            &number(line.min, ""),
            &number(line.median, ""),
            &number(line.max, ""),
            &number(line.spread, ""),
            &number(line.collective, ""),
            &number(ratio.map(|ratio| ratio.ratio), ""),
            &number(ratio.and_then(|ratio| ratio.low), ""),
            &number(ratio.and_then(|ratio| ratio.high), ""),
            &ratio.map(|ratio| ratio.blocks.to_string()).unwrap_or_default(),
            claim(ratio),
            &ran_on(line),
            line.status.as_str(),
            &line.errno.map(|errno| errno.to_string()).unwrap_or_default(),
            line.reason.as_deref().unwrap_or_default(),
        ])?;
    }
    csv.flush()
}

/// `Policies`, one row per line as in the CSV, and `Ranks`, one per line and rank.
#[cfg(feature = "xlsx")]
pub(super) fn sheets(sweep: &PolicySweep) -> Vec<crate::output::xlsx::Table> {
    use crate::output::xlsx::{Table, Value};
    use crate::stats::to_f64;
    let text = |text: &str| Value::from(Some(text).filter(|text| !text.is_empty()));
    let start = |line: &PolicyLine| -> Vec<Value> {
        vec![
            line.operation.as_str().into(),
            to_f64(line.bytes.bytes()).into(),
            text(memory(line)),
            line.policy.to_string().as_str().into(),
            line.load.as_str().into(),
            line.unit.as_str().into(),
            line.convention.as_str().into(),
        ]
    };
    let ratio = |ratio: Option<&ToNone>| -> [Value; 4] {
        [
            ratio.map(|ratio| ratio.ratio).into(),
            ratio.and_then(|ratio| ratio.low).into(),
            ratio.and_then(|ratio| ratio.high).into(),
            ratio.map(|ratio| ratio.blocks).into(),
        ]
    };
    let (mut lines, mut ranks) = (Vec::new(), Vec::new());
    for line in &sweep.lines {
        let mut row = start(line);
        row.extend([
            text(line.host_memory.as_deref().unwrap_or_default()),
            line.ranks.into(),
            line.repetitions.into(),
            line.min.into(),
            line.median.into(),
            line.max.into(),
            line.spread.into(),
            line.collective.into(),
        ]);
        row.extend(ratio(line.to_none.as_ref()));
        let errno = line.errno.and_then(|errno| u32::try_from(errno).ok());
        row.extend([
            text(claim(line.to_none.as_ref())),
            text(&ran_on(line)),
            line.status.as_str().into(),
            errno.into(),
            text(line.reason.as_deref().unwrap_or_default()),
        ]);
        lines.push(row);
        for rank in &line.per_rank {
            let mut row = start(line);
            row.extend([rank.rank.into(), rank.value.into(), rank.spread.into()]);
            row.extend(ratio(rank.to_none.as_ref()));
            row.extend([
                text(&rank.ran_on.to_string()),
                rank.unsettled.into(),
                rank.misplaced.into(),
            ]);
            ranks.push(row);
        }
    }
    let mut of_ranks = COLUMNS[..7].to_vec();
    of_ranks.extend(["rank", "value", "spread", "to_none", "low", "high", "blocks", "ran_on"]);
    of_ranks.extend(["unsettled", "misplaced"]);
    vec![Table::new("Policies", &COLUMNS, lines), Table::new("Ranks", &of_ranks, ranks)]
}

/// `0.513 (0.480 to 0.549) slower`.
fn ratio_words(ratio: Option<&ToNone>) -> String {
    let Some(ratio) = ratio else { return "-".to_owned() };
    let mut words = format!("{:.3}", ratio.ratio);
    if let (Some(low), Some(high)) = (ratio.low, ratio.high) {
        write!(words, " ({low:.3} to {high:.3})").ok();
    }
    if let Some(claim) = ratio.claim {
        words.push(' ');
        words.push_str(claim.as_str());
    }
    words
}

/// State and what a reader should know.
fn remarks(line: &PolicyLine) -> String {
    let mut words = line.status.as_str().replace('_', " ");
    if let Some(reason) = &line.reason {
        write!(words, ": {reason}").ok();
    }
    let sum = |count: fn(&PolicyRank) -> u32| -> u64 {
        line.per_rank.iter().map(|rank| u64::from(count(rank))).sum()
    };
    let misplaced = sum(|rank| rank.misplaced);
    if misplaced > 0 {
        write!(words, "; {misplaced} visits with pages on another node").ok();
    }
    let unsettled = sum(|rank| rank.unsettled);
    if unsettled > 0 {
        write!(words, "; {unsettled} warm-ups did not settle").ok();
    }
    if line.host_memory.as_deref() == Some("pageable") {
        words.push_str("; pageable memory");
    }
    words
}

/// The sweep for a terminal.
#[must_use]
pub fn text(sweep: &PolicySweep) -> String {
    let mut out = format!(
        "{:<16} {:>8} {:<11} {:<16} {:>5} {:>6} {:>9} {:>9} {:>9} {:>8}  {:<32} {:<10} state\n",
        "operation",
        "bytes",
        "memory",
        "policy",
        "ranks",
        "blocks",
        "min",
        "median",
        "max",
        "spread",
        "to none (95 % interval)",
        "ran on",
    );
    for line in &sweep.lines {
        let spread =
            line.spread.map_or("-".to_owned(), |spread| format!("{:.2} %", 100.0 * spread));
        // Writing to a String cannot fail.
        writeln!(
            out,
            "{:<16} {:>8} {:<11} {:<16} {:>5} {:>6} {:>9} {:>9} {:>9} {spread:>8}  {:<32} {:<10} {}",
            line.operation.as_str(),
            line.bytes.to_string(),
            memory(line),
            line.policy.to_string(),
            line.ranks,
            line.repetitions,
            number(line.min, "-"),
            number(line.median, "-"),
            number(line.max, "-"),
            ratio_words(line.to_none.as_ref()),
            ran_on(line),
            remarks(line),
        )
        .ok();
    }
    out.push_str("rates: bytes ÷ time per rank, decimal GB/s\n");
    out
}

/// The section of `report.md`.
#[must_use]
pub fn markdown(sweep: &PolicySweep) -> String {
    let mut out = "## Policies\n\n".to_owned();
    if !sweep.complete {
        out.push_str("Interrupted: not all blocks were made.\n\n");
    }
    out.push_str("| rank | device | NUMA node | host | CPUs before | policies |\n");
    out.push_str("|---:|---:|---:|---|---|---|\n");
    for seat in &sweep.ranks {
        let node = seat.numa_node.map_or("-".to_owned(), |node| node.to_string());
        let host = seat.host.as_deref().unwrap_or("-");
        let policies: Vec<String> = seat
            .policies
            .iter()
            .filter_map(|of| Some(format!("{}: {}", of.policy, of.cpus.as_ref()?)))
            .collect();
        let policies = policies.join("; ");
        writeln!(
            out,
            "| {} | {} | {node} | {host} | {} | {policies} |",
            seat.rank, seat.device, seat.inherited
        )
        .ok();
    }
    out.push_str(
        "\n| operation | bytes | memory | policy | ranks | blocks | min | median | max | spread | to \
         none (95 % interval) | ran on | state |\n\
         |---|---:|---|---|---:|---:|---:|---:|---:|---:|---|---|---|\n",
    );
    for line in &sweep.lines {
        let spread =
            line.spread.map_or("-".to_owned(), |spread| format!("{:.2} %", 100.0 * spread));
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {spread} | {} | {} | {} |",
            line.operation.as_str(),
            line.bytes,
            memory(line).replace('_', " "),
            line.policy,
            line.ranks,
            line.repetitions,
            number(line.min, "-"),
            number(line.median, "-"),
            number(line.max, "-"),
            ratio_words(line.to_none.as_ref()),
            ran_on(line),
            remarks(line).replace('|', "\\|"),
        )
        .ok();
    }
    out.push_str(
        "\nRates are bytes ÷ time per rank, decimal GB/s; min, median and max are over the ranks, each by \
         the median of its blocks. \"To none\" is the rate against that of the unbound thread in the same \
         block (geometric mean over the blocks; of all-gathers by the slowest rank), its interval is from \
         between blocks. \"Faster\" and \"slower\" stand where that leaves out 1 and Holm's procedure over \
         all lines rejects equality at 5 %; elsewhere no difference is claimed.\n",
    );
    out
}

/// The picture: a row per line with a ratio.
#[cfg(feature = "png")]
pub(super) fn picture(title: &str, sweep: &PolicySweep) -> io::Result<Vec<u8>> {
    use crate::output::intervals::{Interval, render};
    let row = |line: &PolicyLine| {
        let ratio = line.to_none.as_ref()?;
        let memory = line.memory.map_or(String::new(), |memory| format!(" {}", memory.as_str()));
        let name = format!("{} {}{memory} {}", line.operation.as_str(), line.bytes, line.policy);
        let ends = ratio.low.zip(ratio.high);
        Some(Interval::new(name, ratio.ratio, ends, ratio.claim.is_some()))
    };
    let rows: Vec<Interval> = sweep.lines.iter().filter_map(row).collect();
    render(&format!("{title}: rate against the unbound thread"), &rows)
}
