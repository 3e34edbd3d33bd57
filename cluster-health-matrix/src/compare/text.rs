//! Comparisons in words: facts, inference and what was not tested apart.

use std::fmt::{self, Write as _};

use super::{ClassRatio, CompareVerdict, Comparison, MatrixComparison, PodMap, Ratio, RunInfo};

/// Most lines of a kind in a text; the JSON document has all.
const MOST_LINES: usize = 12;

fn percent(ratio: f64) -> String {
    format!("{:+.1} %", 100.0 * (ratio - 1.0))
}

fn share(share: f64) -> String {
    if share.is_finite() { format!("{:.2} %", 100.0 * share) } else { "unknown".to_owned() }
}

fn ratio(ratio: &Ratio) -> String {
    if ratio.low.is_finite() && ratio.high.is_finite() {
        format!("{:.4} [{:.4}, {:.4}]", ratio.ratio, ratio.low, ratio.high)
    } else {
        format!("{:.4} [unknown]", ratio.ratio)
    }
}

fn name(matrix: &MatrixComparison) -> String {
    format!("{} {} {} {}", matrix.sweep, matrix.bytes, matrix.load, matrix.memory.replace('_', "-"))
}

fn cells(count: usize) -> String {
    if count == 1 { "1 cell".to_owned() } else { format!("{count} cells") }
}

fn rows_and_columns(matrix: &MatrixComparison) -> [&'static str; 2] {
    if matrix.sweep.is_pair() { ["rank-0 CPU", "rank-1 CPU"] } else { ["CPU", "device"] }
}

pub(super) fn inference(comparison: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    let smallest = 100.0 * comparison.min_effect;
    for matrix in &comparison.matrices {
        let place = name(matrix);
        let changed: Vec<_> = matrix.classes.iter().filter(|class| class.changed).collect();
        for class in changed.iter().take(MOST_LINES) {
            let axis = class.axis.replace('_', " ");
            let by = percent(class.ratio.ratio);
            lines.push(format!("{place}: {axis} {} changed by {by}", class.id));
        }
        if changed.len() > MOST_LINES {
            lines.push(format!("{place}: and {} classes more", changed.len() - MOST_LINES));
        }
        match (&matrix.rest, changed.is_empty()) {
            (Some(rest), false) if rest.changed => lines
                .push(format!("{place}: all other cells changed by {}", percent(rest.ratio.ratio))),
            (Some(_), false) => {
                lines.push(format!("{place}: no change was shown for the other cells together"));
            }
            _ if matrix.overall.changed => lines.push(format!(
                "{place}: B runs at {} of A as a whole, no class of cells apart from the others",
                format_args!("{:.4}", matrix.overall.ratio.ratio)
            )),
            _ => {}
        }
        if !matrix.changed_cells.is_empty() {
            lines.push(format!(
                "{place}: {} changed on their own",
                cells(matrix.changed_cells.len())
            ));
        }
        if matrix.only_a + matrix.only_b > 0 {
            lines.push(format!(
                "{place}: {} cells have no rate in B, {} none in A",
                matrix.only_a, matrix.only_b
            ));
        }
    }
    match comparison.verdict {
        CompareVerdict::NoDifference => {
            lines.push(format!("no difference beyond {smallest} %"));
        }
        CompareVerdict::Inconclusive => lines.push(format!(
            "no difference was shown, but one beyond {smallest} % cannot be excluded: more blocks \
             (--repeats) on a quiet machine would decide"
        )),
        CompareVerdict::Differences | CompareVerdict::Refused => {}
    }
    if comparison.forced {
        lines.push("the set-ups differ: every ratio above may come from that".to_owned());
    }
    lines
}

pub(super) fn not_tested(comparison: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    if comparison.matrices.is_empty() {
        lines.push("nothing: the runs have no measured cell in common".to_owned());
    }
    for matrix in &comparison.matrices {
        let place = name(matrix);
        if matrix.unit != "block" {
            lines.push(format!(
                "{place}: one block on a side, so intervals come from eighths of the rows; a \
                 disturbance of a whole run looks like a difference, and classes of rows have no \
                 interval"
            ));
        }
        if !matrix.cells_tested {
            lines.push(format!("{place}: single cells, which need three blocks on either side"));
        }
    }
    lines
}

fn side(out: &mut String, label: &str, run: &RunInfo) -> fmt::Result {
    write!(out, "{label}  {}", run.name)?;
    if let Some(host) = &run.host {
        write!(out, ", {host}")?;
    }
    if let Some(start) = &run.start {
        write!(out, ", {start}")?;
    }
    writeln!(out)
}

fn block(out: &mut String, title: &str, lines: &[String]) -> fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{title}")?;
    lines.iter().try_for_each(|line| writeln!(out, "  {line}"))
}

fn set_ups(
    out: &mut String,
    forced: bool,
    differences: &[String],
    notes: &[String],
) -> fmt::Result {
    let title = if forced {
        "The set-ups differ; compared all the same because of --force"
    } else {
        "The set-ups differ; --force compares all the same"
    };
    block(out, title, differences)?;
    block(out, "Also different or to be known", notes)
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        side(&mut out, "A", &self.a)?;
        side(&mut out, "B", &self.b)?;
        set_ups(&mut out, self.forced, &self.differences, &self.notes)?;
        if self.verdict != CompareVerdict::Refused {
            writeln!(out, "\nFacts (B ÷ A, 95 % intervals)")?;
            for matrix in &self.matrices {
                facts(&mut out, matrix)?;
            }
            block(&mut out, "Inference", &self.inference)?;
            block(&mut out, "Not tested", &self.not_tested)?;
        }
        writeln!(out, "\nVerdict: {}", self.verdict.as_str())?;
        f.write_str(&out)
    }
}

/// Nothing where two classes have no median one to be compared with.
fn against_the_rest(class: &ClassRatio) -> String {
    if class.relative == class.ratio {
        String::new()
    } else {
        format!("  against the rest {}", ratio(&class.relative))
    }
}

fn facts(out: &mut String, matrix: &MatrixComparison) -> fmt::Result {
    writeln!(
        out,
        "  {}: {} over {} cells; median A {:.3}, B {:.3} GB/s; noise of a visit A {}, B {}; \
         last ÷ first block A {:.4}, B {:.4}",
        name(matrix),
        ratio(&matrix.overall.ratio),
        matrix.cells,
        matrix.a.median_gbps,
        matrix.b.median_gbps,
        share(matrix.a.noise),
        share(matrix.b.noise),
        matrix.a.drift,
        matrix.b.drift
    )?;
    for class in matrix.classes.iter().take(4 * MOST_LINES) {
        writeln!(
            out,
            "    {:<16} {:<12} {}{}{}",
            class.axis.replace('_', " "),
            class.id.to_string(),
            ratio(&class.ratio),
            against_the_rest(class),
            if class.changed { "  changed" } else { "" }
        )?;
    }
    if matrix.classes.len() > 4 * MOST_LINES {
        let more = matrix.classes.len() - 4 * MOST_LINES;
        writeln!(out, "    and {more} classes more, see --json")?;
    }
    let [row, column] = rows_and_columns(matrix);
    for cell in matrix.changed_cells.iter().take(MOST_LINES) {
        writeln!(
            out,
            "    {row} {} × {column} {}: {:.3} → {:.3} GB/s, {:.4}",
            cell.row, cell.column, cell.a_gbps, cell.b_gbps, cell.ratio
        )?;
    }
    if matrix.changed_cells.len() > MOST_LINES {
        let more = matrix.changed_cells.len() - MOST_LINES;
        writeln!(out, "    and {more} cells more, see --json")?;
    }
    Ok(())
}

impl fmt::Display for PodMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        set_ups(&mut out, self.forced, &self.differences, &self.notes)?;
        for matrix in &self.matrices {
            let place = format!(
                "{} {} {} {}",
                matrix.sweep,
                matrix.bytes,
                matrix.load,
                matrix.memory.replace('_', "-")
            );
            writeln!(out, "\nFacts: {place}, pod's median {:.3} GB/s", matrix.median_gbps)?;
            writeln!(out, "  {:<24} {:>9} {:>8} {:>8}", "node", "GB/s", "÷ pod", "noise")?;
            for node in &matrix.nodes {
                writeln!(
                    out,
                    "  {:<24} {:>9.3} {:>8.4} {:>8}{}",
                    node.name,
                    node.median_gbps,
                    node.ratio,
                    share(node.noise),
                    if node.odd { "  odd" } else { "" }
                )?;
                for class in node.classes.iter().filter(|class| class.odd).take(MOST_LINES) {
                    writeln!(
                        out,
                        "    {} {}: {:.3} GB/s, {:.4} of the pod's  odd",
                        class.axis.replace('_', " "),
                        class.id,
                        class.median_gbps,
                        class.ratio
                    )?;
                }
            }
        }
        block(&mut out, "Inference", &self.inference)?;
        block(&mut out, "Not tested", &self.not_tested)?;
        writeln!(out, "\nVerdict: {}", self.verdict.as_str())?;
        f.write_str(&out)
    }
}
