//! The report for people: the first page, then what was measured, and the numbers.

use std::fmt::Write as _;

use ndarray::ArrayView1;

use super::first_page;
use crate::classes::PairClasses;
use crate::matrix::{Axis, CellStatus, Matrix, Slice};
use crate::output::predicted::Sampled;
use crate::report::{Report, summary_of};
use crate::run::{AffinityFile, RunStatus};
use crate::samples::Sweep;
use crate::stats::median;

/// Most rows of a table for people; the full numbers are in the csv and npy files.
const MOST_ROWS: usize = 32;

/// The text of `report.md`.
#[must_use]
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    write_report(&mut text, report).ok();
    super::printable(text)
}

fn write_report(out: &mut String, report: &Report) -> std::fmt::Result {
    let manifest = &report.manifest;
    let points = &manifest.points;
    let state = match manifest.status {
        RunStatus::Complete => "complete",
        RunStatus::Interrupted => "interrupted: go on with --resume",
        RunStatus::Running => "unfinished: killed or still running",
    };
    out.push_str(&first_page::render(report));
    writeln!(
        out,
        "## What was measured: cluster-health {} on {}\n",
        manifest.command,
        first_page::place(manifest)
    )?;
    writeln!(
        out,
        "- Run {state}: {} points measured, {} skipped, {} failed, {} implausible.",
        points.measured, points.skipped, points.failed, points.implausible
    )?;
    for row in &manifest.summary {
        writeln!(
            out,
            "- {} {} {} {}: median {} GB/s over {} cells, {} … {}.",
            title(row.sweep),
            row.bytes,
            row.load,
            row.memory.replace('_', "-"),
            rate(row.median),
            row.count,
            rate(row.min),
            rate(row.max)
        )?;
    }
    writeln!(out)?;
    sampled(out, report)?;
    facts(out, report)?;
    for matrix in &report.matrices {
        for slice in matrix.slices() {
            section(out, &slice, report)?;
        }
        if !matrix.sizes.is_empty() {
            writeln!(
                out,
                "Every rate is bytes ÷ time of {}{}, decimal GB/s; a cell is the median over blocks of \
                 the median of its iterations.\n",
                match matrix.sweep {
                    Sweep::CorePair => "one copy per rank",
                    Sweep::Bidirectional => {
                        "one copy each way, issued together: bytes of one direction, time until \
                         both are done"
                    }
                    Sweep::H2d | Sweep::D2h => "one copy",
                },
                if !matrix.sweep.is_pair() && manifest.plan.is_concurrent() {
                    " while all other devices copied, too"
                } else {
                    ""
                }
            )?;
        }
    }
    Ok(())
}

/// What a sampled sweep measured, and what it only predicts.
fn sampled(out: &mut String, report: &Report) -> std::fmt::Result {
    let slices = report.matrices.iter().flat_map(Matrix::slices);
    let mut sampled = slices
        .filter_map(|slice| Some((slice.stem(), slice.gbps.len(), Sampled::of(&slice)?)))
        .peekable();
    if sampled.peek().is_none() {
        return Ok(());
    }
    writeln!(out, "## Measured and predicted cells\n")?;
    for (stem, cells, Sampled { measured, predicted, error }) in sampled {
        let share = 100.0 * ratio(measured, cells);
        write!(
            out,
            "- {stem}: {measured} of {cells} cells were measured ({share:.1} %), {predicted} are \
             predicted"
        )?;
        if error.is_finite() {
            write!(out, " with a median error of ± {:.1} % (95 %)", 100.0 * error)?;
        }
        let rest = cells - measured - predicted;
        if rest > 0 {
            write!(out, ", {rest} are neither")?;
        }
        writeln!(
            out,
            ": [rates]({stem}-predicted.csv), [errors]({stem}-error.csv), [npy]({stem}-predicted.npy)."
        )?;
    }
    writeln!(
        out,
        "\nNo finding rests on predicted cells: judging sees measured points only, and so do all \
         numbers below.\n"
    )
}

#[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn ratio(part: usize, all: usize) -> f64 {
    part as f64 / all as f64
}

fn title(sweep: Sweep) -> &'static str {
    match sweep {
        Sweep::H2d => "H2D",
        Sweep::D2h => "D2H",
        Sweep::Bidirectional => "bidirectional",
        Sweep::CorePair => "all_gather per rank",
    }
}

fn facts(out: &mut String, report: &Report) -> std::fmt::Result {
    let manifest = &report.manifest;
    let environment = &manifest.environment;
    writeln!(out, "## How it was measured\n")?;
    if let Some(segment) = manifest.segments.first() {
        writeln!(
            out,
            "- Started {}, order {}, seed {}.",
            segment.start, manifest.order, manifest.seed
        )?;
    } else {
        writeln!(out, "- Order {}.", manifest.order)?;
    }
    let timings = &manifest.timings;
    let copies = timings.iterations_ns + timings.warmup_ns;
    if copies > 0 {
        writeln!(
            out,
            "- {} on the machine's clock from first bind to last sample: {} of timed copies, {} of \
             discarded ones, {} of binding, {} of arena work, {} of data checks.",
            seconds(manifest.wall_ns),
            seconds(timings.iterations_ns),
            seconds(timings.warmup_ns),
            seconds(timings.bind_ns),
            seconds(timings.touch_ns),
            seconds(timings.check_ns)
        )?;
    }
    for (name, value) in [
        ("kernel", &environment.kernel),
        ("processor", &environment.cpu_model),
        ("cpuset", &environment.cpuset),
        ("isolated CPUs", &environment.isolated),
        ("numa_balancing", &environment.numa_balancing),
        ("transparent huge pages", &environment.transparent_hugepage),
    ] {
        if let Some(value) = value {
            writeln!(out, "- {name}: {value}")?;
        }
    }
    if let Some(affinity) = &report.affinity {
        let bindable = affinity.cpus.iter().filter(|cpu| cpu.bindable == Some(true)).count();
        writeln!(out, "- {bindable} of {} present CPUs can be bound.", affinity.cpus.len())?;
        let not = affinity.cpus.iter().filter(|cpu| cpu.bindable == Some(false));
        for cpu in not.take(MOST_ROWS) {
            let reason = cpu.reason.as_deref().unwrap_or("no reason known");
            writeln!(out, "  - CPU {}: {reason}", cpu.cpu)?;
        }
    }
    if report.unsettled > 0 {
        writeln!(out, "- {} points did not settle in their warm-up.", report.unsettled)?;
    }
    if report.misplaced > 0 {
        writeln!(
            out,
            "- {} points copied from memory that is not on the CPU's NUMA node.",
            report.misplaced
        )?;
    }
    for note in &manifest.notes {
        writeln!(out, "- Note: {note}")?;
    }
    for line in report.bad_lines.iter().take(MOST_ROWS) {
        writeln!(out, "- samples.jsonl, {line}")?;
    }
    if !report.reasons.is_empty() {
        writeln!(out, "\nPoints without a number:\n")?;
        for (reason, count) in report.reasons.iter().take(MOST_ROWS) {
            writeln!(out, "- {count} × {reason}")?;
        }
    }
    writeln!(out)
}

/// A rate with three decimals, or as many more as a small message needs to show three digits.
#[must_use]
pub fn rate(gbps: f64) -> String {
    let decimals = if gbps > 0.0 && gbps < 0.1 {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 1 and a dozen; the cast saturates"
        )]
        let zeros = (-gbps.log10()).floor() as usize;
        (zeros + 3).min(12)
    } else {
        3
    };
    format!("{gbps:.decimals$}")
}

fn seconds(nanoseconds: u64) -> String {
    #[allow(clippy::cast_precision_loss, reason = "shown with three digits")]
    let seconds = nanoseconds as f64 / 1e9;
    format!("{seconds:.3} s")
}

fn section(out: &mut String, slice: &Slice<'_>, report: &Report) -> std::fmt::Result {
    let stem = slice.stem();
    let Some(row) = summary_of(slice) else {
        return writeln!(out, "## {stem}\n\nNothing was measured.\n");
    };
    writeln!(out, "## {stem}\n")?;
    writeln!(out, "{}\n", links(&stem))?;
    let (latency, head, rule) = match row.latency_us() {
        Some(us) => (format!(" {us:.2} |"), " median time, µs |", "---:|"),
        None => (String::new(), "", ""),
    };
    writeln!(out, "| | cells | min | p10 | median | p90 | max | spread between blocks |{head}")?;
    writeln!(out, "|---|---:|---:|---:|---:|---:|---:|---:|{rule}")?;
    let mut spread: Vec<f64> = slice.spread.iter().copied().filter(|s| s.is_finite()).collect();
    let spread = if spread.is_empty() {
        "one block".to_owned()
    } else {
        format!("{:.2} %", 100.0 * median(&mut spread))
    };
    let [min, p10, median, p90, max] = [row.min, row.p10, row.median, row.p90, row.max].map(rate);
    writeln!(
        out,
        "| all | {} | {min} | {p10} | {median} | {p90} | {max} | {spread} |{latency}\n",
        row.count
    )?;
    let holes = slice.status.iter().filter(|status| **status != CellStatus::Measured).count();
    let holes = holes - Sampled::of(slice).map_or(0, |sampled| sampled.predicted).min(holes);
    if holes > 0 {
        writeln!(out, "{holes} cells have no number.\n")?;
    }
    lines(out, slice.columns.name, &slice.columns.ids, |index| slice.gbps.column(index).to_vec())?;
    node_lines(out, slice.rows, |row| slice.gbps.row(row))?;
    if slice.sweep.is_pair() {
        node_lines(out, slice.columns, |column| slice.gbps.column(column))?;
        pair_lines(out, slice, report)?;
    }
    Ok(())
}

/// Medians of the pairs by what their CPUs share.
fn pair_lines(out: &mut String, slice: &Slice<'_>, report: &Report) -> std::fmt::Result {
    let cores = report.affinity.as_ref().map(AffinityFile::cores).unwrap_or_default();
    let classes = PairClasses::new(slice.rows, slice.columns, &cores);
    let (mut same, mut siblings, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for ((row, column), rate) in slice.gbps.indexed_iter().filter(|(_, rate)| rate.is_finite()) {
        let kind = match classes.of(row, column) {
            Some(0) => &mut same,
            Some(1) => &mut siblings,
            _ => &mut rest,
        };
        kind.push(*rate);
    }
    let other = median(&mut rest);
    writeln!(out, "| CPUs of the two ranks | cells | median | ÷ other pairs |")?;
    writeln!(out, "|---|---:|---:|---:|")?;
    for (name, mut rates) in [
        ("one CPU (the diagonal)", same),
        ("SMT siblings of one core", siblings),
        ("other pairs", rest),
    ] {
        if !rates.is_empty() {
            let (count, median) = (rates.len(), median(&mut rates));
            let ratio =
                if other.is_nan() { String::new() } else { format!("{:.3}", median / other) };
            writeln!(out, "| {name} | {count} | {} | {ratio} |", rate(median))?;
        }
    }
    writeln!(out)?;
    if cores.is_empty() {
        writeln!(out, "Which CPUs are SMT siblings is not known: there is no census.\n")?;
    }
    let plan = &report.manifest.plan;
    let planned = plan.core_pair.as_ref().map(|plan| plan.device_pair.map(|id| id.0));
    let pair = planned.or(plan.import.as_ref().and_then(|import| import.device_pair));
    let devices = pair.map_or_else(String::new, |[rank0, rank1]| {
        format!("Rank 0 on device {rank0}, rank 1 on device {rank1}. ")
    });
    writeln!(
        out,
        "{devices}Rates are per rank: bytes per rank ÷ the time of the slower rank, decimal GB/s. \
         The algorithm bandwidth of nccl-tests is twice that for two ranks, its bus bandwidth the \
         same number.\n"
    )
}

fn links(stem: &str) -> String {
    let picture =
        if cfg!(feature = "png") { format!("[picture]({stem}.png), ") } else { String::new() };
    format!("{picture}[numbers]({stem}.csv), [npy]({stem}.npy)")
}

/// Median per column, for matrices with few of them.
fn lines(
    out: &mut String,
    name: &str,
    ids: &[u32],
    values: impl Fn(usize) -> Vec<f64>,
) -> std::fmt::Result {
    if ids.len() > MOST_ROWS {
        return Ok(());
    }
    writeln!(out, "| {name} | cells | median |\n|---|---:|---:|")?;
    for (index, id) in ids.iter().enumerate() {
        let mut rates: Vec<f64> = values(index).into_iter().filter(|r| r.is_finite()).collect();
        let count = rates.len();
        writeln!(out, "| {id} | {count} | {} |", rate(median(&mut rates)))?;
    }
    writeln!(out)
}

/// Median per NUMA node of an axis; `rates` are those of one of its labels.
fn node_lines<'a>(
    out: &mut String,
    axis: &Axis,
    rates: impl Fn(usize) -> ArrayView1<'a, f64>,
) -> std::fmt::Result {
    let mut nodes = std::collections::BTreeMap::<u32, Vec<f64>>::new();
    for (index, node) in axis.nodes.iter().enumerate() {
        if let Some(node) = node {
            let rates = rates(index);
            nodes.entry(*node).or_default().extend(rates.iter().filter(|rate| rate.is_finite()));
        }
    }
    if nodes.is_empty() {
        return Ok(());
    }
    writeln!(out, "| NUMA node of the {} | cells | median |\n|---|---:|---:|", axis.name)?;
    for (node, mut rates) in nodes {
        let count = rates.len();
        writeln!(out, "| {node} | {count} | {} |", rate(median(&mut rates)))?;
    }
    writeln!(out)
}
