//! The first page of the report, which is also what `diagnose` prints: the verdict in three lines,
//! then facts, inference and what was not tested, each by itself.

use std::fmt::Write as _;

use crate::analysis::{Diagnosis, Finding, Kind, Verdict, is_comparison};
use crate::matrix::{Matrix, Slice};
use crate::report::Report;
use crate::run::{Manifest, RunStatus};
use crate::samples::Sweep;

/// Most pieces of a list of ids; beyond, their number is said.
const MOST_RANGES: usize = 12;
/// Most facts of one finding.
const MOST_FACTS: usize = 24;

/// The stages of triage, in the order in which a node is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Communication,
    HostPath,
    Placement,
    Load,
    Framework,
}

impl Stage {
    const ALL: [Self; 5] =
        [Self::Communication, Self::HostPath, Self::Placement, Self::Load, Self::Framework];

    const fn title(self) -> &'static str {
        match self {
            Self::Communication => "Bare communication (pairs of ranks)",
            Self::HostPath => "Host path (host to device)",
            Self::Placement => "Placement (NUMA nodes, cores, CPUs)",
            Self::Load => "Training-state load",
            Self::Framework => "Framework",
        }
    }

    /// Where a finding belongs.
    fn of(finding: &Finding) -> Self {
        match finding.kind {
            Kind::LoadSensitive => Self::Load,
            Kind::NumaEffect
            | Kind::SameCore
            | Kind::SmtSibling
            | Kind::SlowRank0Core
            | Kind::SlowRank1Core
            | Kind::Unbindable => Self::Placement,
            _ if finding.sweep.is_some_and(Sweep::is_pair) => Self::Communication,
            _ => Self::HostPath,
        }
    }
}

/// The text; its first three lines can be pasted into a ticket as they are.
#[must_use]
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    write_page(&mut text, report).ok();
    text
}

/// The verdict in three lines.
#[must_use]
pub fn verdict(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    three_lines(&mut text, report).ok();
    text
}

fn write_page(out: &mut String, report: &Report) -> std::fmt::Result {
    three_lines(out, report)?;
    facts(out, report)?;
    inference(out, &report.diagnosis)?;
    not_tested(out, report)
}

/// What was measured on, in words.
pub(crate) fn place(manifest: &Manifest) -> String {
    let backend = &manifest.environment.backend;
    match (&manifest.environment.hostname, backend.as_str()) {
        (Some(host), _) => format!("{host} ({backend} backend)"),
        (None, "") => "imported data".to_owned(),
        (None, _) => format!("a {backend} machine"),
    }
}

fn three_lines(out: &mut String, report: &Report) -> std::fmt::Result {
    let (manifest, diagnosis) = (&report.manifest, &report.diagnosis);
    let started = manifest
        .segments
        .first()
        .map_or_else(String::new, |segment| format!(" of {}", segment.start));
    let unfinished = match manifest.status {
        RunStatus::Complete => "",
        _ => ", unfinished",
    };
    writeln!(
        out,
        "**Verdict: {}** on {}, cluster-health {}{started}{unfinished}: {}.  ",
        diagnosis.verdict.as_str(),
        place(manifest),
        manifest.command,
        counts(&diagnosis.findings)
    )?;
    match diagnosis.findings.first() {
        Some(finding) => writeln!(
            out,
            "**Strongest:** {} ([facts](#finding-1){}).  ",
            headline(finding),
            figures(report, finding.sweep, finding.load.as_deref())
                .last()
                .map_or_else(String::new, |link| format!(", {link}"))
        )?,
        None => {
            writeln!(out, "**Strongest:** nothing; {}.  ", would_have_shown(diagnosis))?;
        }
    }
    let next = match diagnosis.findings.first() {
        Some(finding) if diagnosis.verdict != Verdict::Healthy && !finding.next.is_empty() => {
            finding.next.as_str()
        }
        _ => "Nothing.",
    };
    let missing: Vec<&str> = diagnosis.not_tested.iter().map(|line| subject(line)).collect();
    writeln!(out, "**Do:** {next} **Not tested:** {}.\n", missing.join(", "))
}

/// The least that each sweep would have shown of a single cell, or of what was tested last.
fn would_have_shown(diagnosis: &Diagnosis) -> String {
    let sweep = |line: &String| line.split(' ').next().map(str::to_owned);
    let limits: Vec<&String> =
        diagnosis.tested.iter().filter(|line| !is_comparison(line)).collect();
    let last: Vec<&str> = limits
        .chunk_by(|a, b| sweep(a) == sweep(b))
        .filter_map(|lines| lines.last().map(|line| line.as_str()))
        .collect();
    if last.is_empty() {
        "no difference could be tested".to_owned()
    } else {
        format!("it would have shown {}", last.join("; "))
    }
}

/// What a line about something says it is about.
fn subject(line: &str) -> &str {
    line.split_once(':').map_or(line, |(subject, _)| subject)
}

fn counts(findings: &[Finding]) -> String {
    let of = |keep: fn(&Finding) -> bool| findings.iter().filter(|finding| keep(finding)).count();
    let plural = |count: usize, word: &str| match count {
        1 => format!("1 {word}"),
        count => format!("{count} {word}s"),
    };
    let undecided = of(|finding| finding.kind.is_undecided());
    let artefacts = of(|finding| finding.is_artefact);
    let mut parts = vec![plural(findings.len() - undecided - artefacts, "finding")];
    if undecided > 0 {
        parts.push(format!("{undecided} undecided"));
    }
    if artefacts > 0 {
        parts.push(plural(artefacts, "artefact"));
    }
    parts.join(", ")
}

/// Kind, place and size in one sentence without its end.
pub(crate) fn headline(finding: &Finding) -> String {
    let mut text = finding.kind.as_str().to_owned();
    let at = members(finding);
    if !at.is_empty() {
        write!(text, ", {at}").ok();
    }
    if let Some(sweep) = finding.sweep {
        write!(text, ", in {sweep}").ok();
    }
    if let Some(load) = finding.load.as_deref().filter(|load| *load != "idle") {
        write!(text, " under {load}").ok();
    }
    if let Some(effect) = finding.effect {
        write!(
            text,
            ": × {:.3} of the rest's rate (95 % interval {:.3} to {:.3})",
            effect.ratio, effect.low, effect.high
        )
        .ok();
    }
    if let Some(extra) = finding.extra_us {
        write!(text, ", {extra:+.1} µs per transfer whatever its size").ok();
    }
    if let Some(replicates) = finding.replicates {
        write!(text, ", seen in {} of {} replicates", replicates.seen, replicates.of).ok();
    }
    text
}

fn members(finding: &Finding) -> String {
    let mut parts = Vec::new();
    for (one, many, ids) in [
        ("NUMA node", "NUMA nodes", &finding.numa_nodes),
        ("device", "devices", &finding.devices),
        ("CPU", "CPUs", &finding.cpus),
        ("rank-0 CPU", "rank-0 CPUs", &finding.rank0_cpus),
        ("rank-1 CPU", "rank-1 CPUs", &finding.rank1_cpus),
    ] {
        match ids.len() {
            0 => {}
            1 => parts.push(format!("{one} {}", ids[0])),
            _ => parts.push(format!("{many} {}", ranges(ids))),
        }
    }
    parts.join(" × ")
}

/// `0-3,8`, cut after some pieces.
fn ranges(ids: &[u32]) -> String {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let pieces: Vec<String> = sorted
        .chunk_by(|a, b| a.checked_add(1) == Some(*b))
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run.first().map_or_else(String::new, ToString::to_string),
        })
        .collect();
    if pieces.len() <= MOST_RANGES {
        return pieces.join(",");
    }
    format!("{},… ({} in all)", pieces[..MOST_RANGES].join(","), sorted.len())
}

/// The slices that a claim about a sweep and load rests on.
fn slices<'a>(
    report: &'a Report,
    sweep: Option<Sweep>,
    load: Option<&'a str>,
) -> impl Iterator<Item = Slice<'a>> {
    report
        .matrices
        .iter()
        .filter(move |matrix| sweep == Some(matrix.sweep))
        .filter(move |matrix| load.is_none_or(|load| load == matrix.load))
        .flat_map(Matrix::slices)
}

/// Link to the picture of a matrix, or to its numbers where pictures are not made.
fn figure(slice: &Slice<'_>) -> String {
    let stem = slice.stem();
    let extension = if cfg!(feature = "png") { "png" } else { "csv" };
    format!("[{stem}]({stem}.{extension})")
}

fn figures(report: &Report, sweep: Option<Sweep>, load: Option<&str>) -> Vec<String> {
    slices(report, sweep, load).map(|slice| figure(&slice)).collect()
}

/// The figure that a sentence is about: the one of the size that it begins with.
fn figure_of(report: &Report, sweep: Option<Sweep>, load: Option<&str>, line: &str) -> String {
    slices(report, sweep, load)
        .find(|slice| {
            let bytes = slice.bytes.to_string();
            line.strip_prefix(bytes.as_str()).is_some_and(|rest| rest.starts_with([':', ',']))
        })
        .map_or_else(String::new, |slice| format!(" ({})", figure(&slice)))
}

fn facts(out: &mut String, report: &Report) -> std::fmt::Result {
    let diagnosis = &report.diagnosis;
    writeln!(out, "## Facts\n")?;
    for (index, stage) in Stage::ALL.into_iter().enumerate() {
        writeln!(out, "### {}. {}\n", index + 1, stage.title())?;
        let mut is_empty = true;
        for (number, finding) in (1..).zip(&diagnosis.findings) {
            if Stage::of(finding) == stage {
                fact(out, report, number, finding)?;
                is_empty = false;
            }
        }
        let sweeps: &[Sweep] = match stage {
            Stage::Communication => &[Sweep::CorePair],
            Stage::HostPath => &[Sweep::H2d, Sweep::D2h, Sweep::Bidirectional],
            _ => &[],
        };
        let mut tested = false;
        for sweep in sweeps {
            let prefix = format!("{sweep} ");
            let limits = diagnosis.tested.iter().filter(|line| !is_comparison(line));
            for line in limits.filter_map(|line| line.strip_prefix(&prefix)) {
                if !tested {
                    writeln!(out, "What would have been found with 95 % probability:\n")?;
                }
                writeln!(out, "- {sweep} {line}{}", figure_of(report, Some(*sweep), None, line))?;
                tested = true;
            }
        }
        let loads = diagnosis.tested.iter().filter(|line| is_comparison(line));
        for line in loads.filter(|_| stage == Stage::Load) {
            writeln!(out, "- {line}")?;
            tested = true;
        }
        if tested {
            writeln!(out)?;
        } else if is_empty {
            writeln!(out, "{}\n", nothing(report, stage))?;
        }
    }
    Ok(())
}

/// What is said of a stage without a finding.
fn nothing(report: &Report, stage: Stage) -> String {
    let measured = |pair: bool| report.matrices.iter().any(|matrix| matrix.sweep.is_pair() == pair);
    let loads = |report: &Report| {
        let mut loads: Vec<&str> = report.matrices.iter().map(|m| m.load.as_str()).collect();
        loads.sort_unstable();
        loads.dedup();
        loads.len()
    };
    let is_tested = match stage {
        Stage::Communication => measured(true),
        Stage::HostPath => measured(false),
        Stage::Placement => !report.matrices.is_empty(),
        Stage::Load => loads(report) > 1,
        Stage::Framework => false,
    };
    if is_tested {
        "Nothing was found.".to_owned()
    } else {
        "[Not tested](#not-tested).".to_owned()
    }
}

fn fact(out: &mut String, report: &Report, number: usize, finding: &Finding) -> std::fmt::Result {
    writeln!(out, "#### Finding {number}\n")?;
    let nature = if finding.is_artefact {
        " (an artefact, no fault)"
    } else if finding.kind.is_undecided() {
        " (undecided)"
    } else {
        ""
    };
    let (sweep, load) = (finding.sweep, finding.load.as_deref());
    writeln!(out, "**{}**{nature}\n", headline(finding))?;
    for line in finding.facts.iter().take(MOST_FACTS) {
        writeln!(out, "- {line}{}", figure_of(report, sweep, load, line))?;
    }
    if finding.facts.len() > MOST_FACTS {
        writeln!(out, "- … {} more in `diagnose --json`", finding.facts.len() - MOST_FACTS)?;
    }
    let figures = figures(report, sweep, load);
    if !figures.is_empty() {
        writeln!(out, "- Figures: {}", figures.join(", "))?;
    }
    writeln!(out)
}

fn inference(out: &mut String, diagnosis: &Diagnosis) -> std::fmt::Result {
    writeln!(out, "## Inference\n")?;
    if diagnosis.findings.is_empty() {
        return writeln!(
            out,
            "The paths that were tested are as even as they should be, down to the differences named \
             above; smaller ones would not have been seen.\n"
        );
    }
    for (number, finding) in (1..).zip(&diagnosis.findings) {
        write!(out, "- [Finding {number}](#finding-{number}), {}: ", finding.kind.as_str())?;
        writeln!(out, "{} *Next:* {}", finding.inference, finding.next)?;
    }
    writeln!(out)
}

fn not_tested(out: &mut String, report: &Report) -> std::fmt::Result {
    writeln!(out, "## Not tested\n")?;
    for line in &report.diagnosis.not_tested {
        writeln!(out, "- {line}")?;
    }
    if report.matrices.iter().any(|matrix| matrix.sweep.is_pair()) {
        writeln!(out, "- collectives other than an all-gather of two ranks")?;
    }
    writeln!(out, "- other directions than host to device, and several transfers at once")?;
    let devices = match report.manifest.environment.backend.as_str() {
        "host" => "- accelerators: the devices here are this machine's NUMA memory nodes\n",
        "synthetic" => "- a real machine: this one is simulated, no copy was made\n",
        _ => "",
    };
    out.push_str(devices);
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_shown_as_ranges_and_cut() {
        assert_eq!(ranges(&[3, 1, 2, 9, u32::MAX]), "1-3,9,4294967295");
        let odd: Vec<u32> = (0..40).map(|id| 2 * id).collect();
        assert_eq!(ranges(&odd), "0,2,4,6,8,10,12,14,16,18,20,22,… (40 in all)");
    }

    #[test]
    fn findings_are_counted_by_what_they_are() {
        let of = |kinds: &[Kind]| -> Vec<Finding> {
            kinds.iter().map(|kind| Finding::new(*kind, None, None)).collect()
        };
        assert_eq!(counts(&of(&[])), "0 findings");
        let kinds = [Kind::SlowCore, Kind::Confounded, Kind::Drift, Kind::Burst];
        assert_eq!(counts(&of(&kinds)), "1 finding, 1 undecided, 2 artefacts");
    }

    #[test]
    fn triage_begins_with_bare_communication() {
        let stage = |kind, sweep| Stage::of(&Finding::new(kind, sweep, None));
        assert_eq!(stage(Kind::SlowBlock, Some(Sweep::CorePair)), Stage::Communication);
        assert_eq!(stage(Kind::SlowCore, Some(Sweep::H2d)), Stage::HostPath);
        assert_eq!(stage(Kind::NumaEffect, Some(Sweep::CorePair)), Stage::Placement);
        assert_eq!(stage(Kind::SlowRank1Core, Some(Sweep::CorePair)), Stage::Placement);
        assert_eq!(stage(Kind::LoadSensitive, Some(Sweep::H2d)), Stage::Load);
    }
}
