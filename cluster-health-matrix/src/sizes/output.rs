//! A size sweep as files and as text.

use std::fmt::Write as _;
use std::io;

use super::{Series, SizeSweep};

/// Name of the JSON file.
pub const SIZES_JSON: &str = "sizes.json";
/// Name of the CSV file.
pub const SIZES_CSV: &str = "sizes.csv";
/// Name of the picture.
pub const SIZES_PNG: &str = "sizes.png";

/// Four significant digits.
fn number(value: f64) -> String {
    if !value.is_finite() {
        "-".to_owned()
    } else if value.abs() >= 1000.0 {
        format!("{value:.0}")
    } else if value.abs() >= 1.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.5}")
    }
}

fn percent(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{:.2} %", 100.0 * value))
}

fn ids<T: ToString>(ids: &[T]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// One row per point; `runs` are named sweeps.
pub(super) fn write_csv(runs: &[(&str, &SizeSweep)], out: impl io::Write) -> io::Result<()> {
    let mut csv = csv::Writer::from_writer(out);
    csv.write_record([
        "run",
        "operation",
        "label",
        "load",
        "devices",
        "cpus",
        "memory",
        "bytes",
        "seconds",
        "gbps",
        "spread",
        "visits",
        "unsettled",
        "again",
        "non_monotone",
        "cached",
        "residual",
    ])?;
    for (run, sweep) in runs {
        for series in &sweep.series {
            for point in &series.points {
                let or_empty = |value: Option<f64>| {
                    value.map(|value| format!("{value:.6}")).unwrap_or_default()
                };
                let (seconds, gbps) = (point.ns / 1e9, point.gbps);
                csv.write_record([
                    *run,
                    series.operation.as_str(),
                    series.label.as_deref().unwrap_or_default(),
                    &series.load,
                    &ids(&series.devices),
                    &ids(&series.cpus),
                    series.memory.as_deref().unwrap_or_default(),
                    &point.bytes.bytes().to_string(),
                    &format!("{seconds:.6e}"),
                    &format!("{gbps:.6}"),
                    &or_empty(point.spread),
                    &point.visits.to_string(),
                    &point.unsettled.to_string(),
                    &point.again.to_string(),
                    &point.non_monotone.to_string(),
                    &point.cached.to_string(),
                    &or_empty(point.residual),
                ])?;
            }
        }
    }
    csv.flush()
}

fn fit_words(series: &Series) -> String {
    let Some(fit) = &series.fit else { return "no fit: fewer than two sizes".to_owned() };
    let alpha = if fit.alpha_identified {
        format!("α = {} ± {} µs", number(fit.alpha_us), number(fit.alpha_se_us))
    } else {
        "α not identified".to_owned()
    };
    let mut words = format!(
        "{alpha}, β = {} ± {} GB/s, residual {}",
        number(fit.beta_gbps),
        number(fit.beta_se_gbps),
        percent(Some(fit.residual).filter(|value| value.is_finite())),
    );
    if let Some(note) = &fit.note {
        words += &format!(" ({note})");
    }
    words
}

fn remarks(point: &super::SizePoint) -> String {
    let mut words = Vec::new();
    if point.cached {
        words.push("cached");
    }
    if point.again {
        words.push("measured again");
    }
    if point.non_monotone {
        words.push("takes less time than fewer bytes");
    }
    if point.unsettled > 0 {
        words.push("warm-up did not settle");
    }
    words.join(", ")
}

/// The sweep for a terminal.
#[must_use]
pub fn text(sweep: &SizeSweep) -> String {
    let mut out = String::new();
    for series in &sweep.series {
        // Writing to a String cannot fail.
        writeln!(out, "{} · {}", series.name(), series.load).ok();
        if let Some(reason) = &series.reason {
            writeln!(out, "  not measured: {reason}").ok();
        }
        for point in &series.points {
            writeln!(
                out,
                "  {:>10} {:>12} µs {:>10} GB/s {:>8} {:>9}  {}",
                point.bytes.to_string(),
                number(point.ns / 1e3),
                number(point.gbps),
                percent(point.spread),
                percent(point.residual),
                remarks(point)
            )
            .ok();
        }
        if !series.points.is_empty() {
            writeln!(out, "  {}", fit_words(series)).ok();
        }
    }
    out.push_str("columns: bytes, time, rate, spread between visits, residual of t = α + S/β\n");
    out
}

/// The section of `report.md`.
#[must_use]
pub fn markdown(sweep: &SizeSweep) -> String {
    let mut out = "## Size sweep\n\n".to_owned();
    if !sweep.complete {
        out.push_str("Interrupted: not all visits were made.\n\n");
    }
    for series in &sweep.series {
        writeln!(out, "### {} · {}\n", series.name(), series.load).ok();
        if let Some(reason) = &series.reason {
            writeln!(out, "Not measured: {reason}.\n").ok();
        }
        if series.points.is_empty() {
            continue;
        }
        writeln!(out, "{}.\n", fit_words(series)).ok();
        out.push_str(
            "| bytes | time, µs | rate, GB/s | spread | residual | |\n|---:|---:|---:|---:|---:|---|\n",
        );
        for point in &series.points {
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} |",
                point.bytes,
                number(point.ns / 1e3),
                number(point.gbps),
                percent(point.spread),
                percent(point.residual),
                remarks(point)
            )
            .ok();
        }
        out.push('\n');
    }
    out.push_str(
        "Rates are bytes ÷ time, of an all-gather per rank by the slower rank, decimal GB/s. The \
         spread is the relative standard deviation between visits; the residual is (time − fit) ÷ \
         time with t = α + S/β, weighted by relative error.\n",
    );
    out
}

/// The picture of one or several runs.
#[cfg(feature = "png")]
pub(super) fn picture(title: &str, runs: &[(&str, &SizeSweep)]) -> io::Result<Vec<u8>> {
    use crate::output::lines::{Curve, render};
    use crate::stats::to_f64;
    let many = runs.len() > 1;
    let mut curves = Vec::new();
    for (run, sweep) in runs {
        for series in sweep.series.iter().filter(|series| !series.points.is_empty()) {
            let name = series.name();
            curves.push(Curve {
                name: if many { format!("{run}: {name}") } else { name },
                points: series
                    .points
                    .iter()
                    .map(|point| (to_f64(point.bytes.bytes()), point.gbps, point.ns / 1e3))
                    .collect(),
            });
        }
    }
    render(title, &curves)
}
