//! Findings against the truth.

use std::collections::BTreeMap;
use std::fmt;

use cluster_health_matrix::samples::Sweep;

use super::generator::{Case, Planted, Shape};
use super::judge::{Diagnosis, Finding};
use super::truth::{self, Truth};

/// Kinds that say something about the machine, not about the measurement.
const STRUCTURAL: [&str; 14] = [
    "slow_device",
    "slow_core",
    "slow_rank0_core",
    "slow_rank1_core",
    "slow_block",
    "slow_cell",
    "same_core",
    "smt_sibling",
    "numa_effect",
    "node_ceiling",
    "load_sensitive",
    "data_corruption",
    "implausible",
    "unbindable",
];
/// Kinds that leave it open.
const OPEN: [&str; 3] = ["confounded", "inconclusive", "underpowered"];

/// Members are right when so much of the cells is common to the finding and the fault.
const MEMBERS_AGREE: f64 = 0.9;
/// Largest error of an effect.
const EFFECT_AGREES: f64 = 0.03;

/// The shares that the judging has to reach.
pub(crate) const PRECISION: f64 = 0.99;
pub(crate) const RECALL: f64 = 0.99;
pub(crate) const COVERAGE: f64 = 0.93;
pub(crate) const FALSE_MACHINES: f64 = 0.005;

/// How one machine came out.
pub(crate) struct Outcome {
    pub(crate) seed: u64,
    pub(crate) sweep: Sweep,
    pub(crate) old_way: bool,
    pub(crate) faults: Vec<FaultOutcome>,
    pub(crate) wrong: Vec<Wrong>,
    pub(crate) artefacts: Vec<&'static str>,
    pub(crate) reported_artefacts: Vec<String>,
    pub(crate) verdict: String,
}

/// How one planted fault came out.
pub(crate) struct FaultOutcome {
    pub(crate) kind: &'static str,
    pub(crate) is_must: bool,
    pub(crate) is_clear: bool,
    /// The finding that is right about it.
    pub(crate) found: Option<Found>,
    /// What it was taken for when it was not found.
    pub(crate) taken_for: String,
}

/// How good a right finding is.
pub(crate) struct Found {
    pub(crate) ratio: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) effect_is_right: bool,
    pub(crate) is_covered: bool,
    /// The same for the ratio against all unaffected cells.
    pub(crate) is_crudely_covered: bool,
    /// `None`: it does not say.
    pub(crate) scale_is_right: Option<bool>,
}

/// A structural finding without a fault.
pub(crate) struct Wrong {
    pub(crate) kind: String,
    /// The fault that it overlaps most.
    pub(crate) on: Option<&'static str>,
    /// The noise-free ratio of its cells: a healthy deviation of the machine, or 1.
    pub(crate) true_ratio: f64,
}

impl Outcome {
    /// True when everything that counts is right.
    pub(crate) fn is_right(&self) -> bool {
        self.wrong.is_empty()
            && self.faults.iter().all(|fault| !fault.is_must || fault.found.is_some())
    }
}

fn share(common: usize, all: usize) -> f64 {
    if all == 0 { 0.0 } else { common as f64 / all as f64 }
}

/// Common cells ÷ all cells of both.
fn jaccard(a: &[bool], b: &[bool]) -> f64 {
    let count =
        |both: fn(bool, bool) -> bool| a.iter().zip(b).filter(|(a, b)| both(**a, **b)).count();
    share(count(|a, b| a && b), count(|a, b| a || b))
}

/// The cells that a finding names; an empty list is the whole axis.
pub(crate) fn cells_of(case: &Case, finding: &Finding) -> Vec<bool> {
    let (rows, columns) = if case.sweep.is_pair() {
        (&finding.rank0_cpus, &finding.rank1_cpus)
    } else {
        (&finding.cpus, &finding.devices)
    };
    let is_node = finding.kind == "numa_effect" && rows.is_empty() && !case.sweep.is_pair();
    let has = |list: &[u32], id: u32| list.is_empty() || list.contains(&id);
    let is_row: Vec<bool> = case
        .rows
        .iter()
        .map(|cpu| {
            if is_node { finding.numa_nodes.contains(&case.places[cpu].1) } else { has(rows, *cpu) }
        })
        .collect();
    let is_column: Vec<bool> = case.columns.iter().map(|id| has(columns, *id)).collect();
    let mut cells = case.cells(|row| is_row[row], |column| is_column[column]);
    if matches!(finding.kind.as_str(), "same_core" | "smt_sibling") {
        let related = case.related(&finding.kind);
        cells.iter_mut().zip(related).for_each(|(cell, related)| *cell &= related);
    }
    cells
}

fn is_right(planted: &Planted, finding: &Finding, cells: &[bool]) -> bool {
    planted.kinds.contains(&finding.kind.as_str())
        && jaccard(&planted.cells, cells) >= MEMBERS_AGREE
        && (finding.kind != "numa_effect" || {
            let mut nodes = finding.numa_nodes.clone();
            nodes.sort_unstable();
            nodes == planted.nodes
        })
}

fn found(planted: &Planted, truth: &Truth, finding: &Finding) -> Found {
    let effect = finding.effect.unwrap_or_default();
    let value = |part: Option<f64>| part.unwrap_or(f64::NAN);
    let covers = |ratio: f64| (value(effect.low)..=value(effect.high)).contains(&ratio);
    Found {
        ratio: value(effect.ratio),
        low: value(effect.low),
        high: value(effect.high),
        effect_is_right: (value(effect.ratio) - truth.ratio).abs() <= EFFECT_AGREES,
        is_covered: covers(truth.ratio),
        is_crudely_covered: covers(truth.crude_ratio),
        scale_is_right: finding.scales_with_bytes.map(|scales| scales != planted.is_fixed),
    }
}

/// Scores what was found on a machine.
pub(crate) fn score(case: &Case, truths: &[Truth], diagnosis: &Diagnosis) -> Outcome {
    let cells: Vec<Vec<bool>> =
        diagnosis.findings.iter().map(|finding| cells_of(case, finding)).collect();
    let is_structural = |finding: &Finding| STRUCTURAL.contains(&finding.kind.as_str());
    let mut used = vec![false; cells.len()];
    let mut faults = Vec::new();
    for (planted, truth) in case.planted.iter().zip(truths) {
        let right = (0..cells.len())
            .find(|&at| !used[at] && is_right(planted, &diagnosis.findings[at], &cells[at]));
        if let Some(at) = right {
            used[at] = true;
        }
        faults.push(FaultOutcome {
            kind: planted.kinds[0],
            is_must: truth.is_must(),
            is_clear: truth.is_clear(),
            found: right.map(|at| found(planted, truth, &diagnosis.findings[at])),
            taken_for: taken_for(planted, diagnosis, &cells),
        });
    }
    let healthy = truth::healthy_cells(case);
    let mut rates = None;
    // Members of a fault that need not be found and was not, of which some are slower than it is as a
    // whole.
    let is_about_weak = |at: usize| {
        case.planted.iter().zip(truths).zip(&faults).any(|((planted, truth), fault)| {
            let mut both = planted.cells.iter().zip(&cells[at]);
            !truth.is_must()
                && fault.found.is_none()
                && planted.kinds.contains(&diagnosis.findings[at].kind.as_str())
                && both.all(|(planted, found)| *planted || !*found)
        })
    };
    let wrong = (0..cells.len())
        .filter(|&at| !used[at] && is_structural(&diagnosis.findings[at]) && !is_about_weak(at))
        .map(|at| {
            let overlap = |planted: &&Planted| jaccard(&planted.cells, &cells[at]);
            let on = case.planted.iter().max_by(|a, b| overlap(a).total_cmp(&overlap(b)));
            let rates = rates.get_or_insert_with(|| truth::rates(case).unwrap_or_default());
            let finding = &diagnosis.findings[at];
            let shape = match finding.kind.as_str() {
                "slow_device" | "slow_rank1_core" => Shape::Columns,
                "slow_core" | "slow_rank0_core" => Shape::Rows,
                "numa_effect" if finding.rank1_cpus.is_empty() => Shape::Rows,
                "numa_effect" => Shape::Columns,
                _ => Shape::Cells,
            };
            let rest: Vec<bool> = healthy.iter().zip(&cells[at]).map(|(a, b)| *a && !*b).collect();
            let expected = truth::expected(case, shape, rates, &rest);
            Wrong {
                kind: finding.kind.clone(),
                on: on.filter(|planted| overlap(planted) > 0.0).map(|planted| planted.kinds[0]),
                true_ratio: truth::ratio(rates, &expected, |cell| cells[at][cell]),
            }
        })
        .collect();
    let reported_artefacts = diagnosis
        .findings
        .iter()
        .filter(|finding| !is_structural(finding) && !OPEN.contains(&finding.kind.as_str()))
        .map(|finding| finding.kind.clone())
        .collect();
    Outcome {
        seed: case.seed,
        sweep: case.sweep,
        old_way: case.old_way,
        faults,
        wrong,
        artefacts: case.artefacts.clone(),
        reported_artefacts,
        verdict: diagnosis.verdict.clone(),
    }
}

/// The kind of the finding that overlaps the fault most; right kinds with wrong members and
/// findings that leave it open have words of their own.
fn taken_for(planted: &Planted, diagnosis: &Diagnosis, cells: &[Vec<bool>]) -> String {
    let best = |kinds: &[&str]| {
        let findings = diagnosis.findings.iter().zip(cells);
        findings
            .filter(|(finding, _)| kinds.contains(&finding.kind.as_str()))
            .map(|(finding, cells)| (jaccard(&planted.cells, cells), &finding.kind))
            .filter(|(overlap, _)| *overlap > 0.0)
            .max_by(|a, b| a.0.total_cmp(&b.0))
    };
    match (best(&STRUCTURAL), best(&OPEN)) {
        (Some((_, kind)), _) if planted.kinds.contains(&kind.as_str()) => "members".to_owned(),
        (Some((_, kind)), _) | (None, Some((_, kind))) => kind.clone(),
        (None, None) => "nothing".to_owned(),
    }
}

/// A share with what it is a share of.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Share {
    pub(crate) hits: u64,
    pub(crate) of: u64,
}

impl Share {
    fn add(&mut self, hit: bool) {
        self.hits += u64::from(hit);
        self.of += 1;
    }

    /// Share of the hits; 1 of nothing.
    pub(crate) fn value(self) -> f64 {
        if self.of == 0 { 1.0 } else { self.hits as f64 / self.of as f64 }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.of == 0 {
            return f.pad("-");
        }
        let text = format!("{:.4} ({}/{})", self.value(), self.hits, self.of);
        f.pad(&text)
    }
}

/// Scores of one kind, or of all together.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Scores {
    /// Right findings among the structural ones, those about weak faults left out.
    pub(crate) precision: Share,
    /// Faults found among those that have to be.
    pub(crate) recall: Share,
    /// The same among faults whose members all have to be found alone.
    pub(crate) clear_recall: Share,
    pub(crate) effect: Share,
    pub(crate) coverage: Share,
    pub(crate) crude_coverage: Share,
    /// A finding that does not say counts as wrong.
    pub(crate) scale: Share,
    pub(crate) scale_open: u64,
    /// Faults that need not be found, and were.
    pub(crate) weak: Share,
}

/// Scores of many machines.
#[derive(Default)]
pub(crate) struct Summary {
    pub(crate) all: Scores,
    by_kind: BTreeMap<String, Scores>,
    /// Planted kind, or why nothing was, × what was reported.
    confusion: BTreeMap<String, BTreeMap<String, u64>>,
    machines: u64,
    old_machines: u64,
    /// Structural findings on machines without any planted fault, in machines.
    pub(crate) healthy_new: Share,
    pub(crate) healthy_old: Share,
    /// Of those with no artefact either.
    pub(crate) healthy_clean: Share,
    artefacts: BTreeMap<String, Share>,
    invented_artefacts: BTreeMap<String, u64>,
    verdicts: BTreeMap<String, u64>,
    failures: Vec<Failed>,
    pub(crate) errors: Vec<(u64, String)>,
}

struct Failed {
    seed: u64,
    sweep: Sweep,
    why: String,
}

impl Summary {
    fn scores(&mut self, kind: &str, mut change: impl FnMut(&mut Scores)) {
        change(&mut self.all);
        change(self.by_kind.entry(kind.to_owned()).or_default());
    }

    fn confuse(&mut self, planted: &str, reported: &str) {
        let row = self.confusion.entry(planted.to_owned()).or_default();
        *row.entry(reported.to_owned()).or_default() += 1;
    }

    /// Counts a machine.
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        self.machines += 1;
        self.old_machines += u64::from(outcome.old_way);
        for fault in &outcome.faults {
            self.add_fault(fault);
        }
        for wrong in &outcome.wrong {
            self.scores(&wrong.kind, |scores| scores.precision.add(false));
            let nothing = if outcome.old_way { "(old way)" } else { "(nothing)" };
            if wrong.on.is_none() {
                self.confuse(nothing, &wrong.kind);
            }
        }
        if outcome.faults.is_empty() {
            let is_false = !outcome.wrong.is_empty();
            if outcome.old_way {
                self.healthy_old.add(is_false);
            } else {
                self.healthy_new.add(is_false);
                if outcome.artefacts.is_empty() {
                    self.healthy_clean.add(is_false);
                }
            }
        }
        for kind in &outcome.artefacts {
            let hit = outcome.reported_artefacts.iter().any(|reported| reported == kind);
            self.artefacts.entry((*kind).to_owned()).or_default().add(hit);
        }
        for kind in &outcome.reported_artefacts {
            if !outcome.artefacts.contains(&kind.as_str()) {
                *self.invented_artefacts.entry(kind.clone()).or_default() += 1;
            }
        }
        *self.verdicts.entry(outcome.verdict.clone()).or_default() += 1;
        if !outcome.is_right() {
            self.failures.push(Failed {
                seed: outcome.seed,
                sweep: outcome.sweep,
                why: why(outcome),
            });
        }
    }

    fn add_fault(&mut self, fault: &FaultOutcome) {
        let is_found = fault.found.is_some();
        if !fault.is_must {
            self.scores(fault.kind, |scores| scores.weak.add(is_found));
            return;
        }
        self.confuse(fault.kind, if is_found { fault.kind } else { &fault.taken_for });
        self.scores(fault.kind, |scores| {
            scores.recall.add(is_found);
            if fault.is_clear {
                scores.clear_recall.add(is_found);
            }
            let Some(found) = &fault.found else { return };
            scores.precision.add(true);
            scores.effect.add(found.effect_is_right);
            scores.coverage.add(found.is_covered);
            scores.crude_coverage.add(found.is_crudely_covered);
            scores.scale.add(found.scale_is_right == Some(true));
            scores.scale_open += u64::from(found.scale_is_right.is_none());
        });
    }

    /// Counts a machine that could not be measured or judged.
    pub(crate) fn add_error(&mut self, seed: u64, error: String) {
        self.errors.push((seed, error));
    }

    /// Brings failures into the order of their seeds, whichever thread was first.
    pub(crate) fn sort(&mut self) {
        self.failures.sort_by_key(|failed| failed.seed);
        self.errors.sort();
    }

    /// What is not reached; empty when everything is.
    pub(crate) fn shortfalls(&self) -> Vec<String> {
        let mut missed = Vec::new();
        let mut at_least = |what: &str, share: Share, wanted: f64| {
            if share.value() < wanted {
                missed.push(format!("{what} {share}, wanted at least {wanted}"));
            }
        };
        at_least("precision", self.all.precision, PRECISION);
        at_least("recall", self.all.recall, RECALL);
        at_least("effect within 3 points", self.all.effect, PRECISION);
        at_least("95 % interval covers", self.all.coverage, COVERAGE);
        at_least("bytes-proportional or fixed", self.all.scale, PRECISION);
        for (what, share) in
            [("measured in blocks", self.healthy_new), ("measured the old way", self.healthy_old)]
        {
            if share.of > 0 && share.value() > FALSE_MACHINES {
                missed.push(format!(
                    "machines without fault, {what}, with a structural finding: {share}, \
                     wanted at most {FALSE_MACHINES}"
                ));
            }
        }
        if !self.errors.is_empty() {
            missed.push(format!("{} machines could not be judged", self.errors.len()));
        }
        missed
    }
}

fn why(outcome: &Outcome) -> String {
    let missed = outcome.faults.iter().filter(|fault| fault.is_must && fault.found.is_none());
    let missed = missed.map(|fault| format!("{} taken for {}", fault.kind, fault.taken_for));
    let wrong = outcome.wrong.iter().map(|wrong| {
        let on = wrong.on.map_or_else(String::new, |kind| format!(" on {kind}"));
        format!("wrong {}{on} (true ratio {:.3})", wrong.kind, wrong.true_ratio)
    });
    missed.chain(wrong).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: Vec<&String> = {
            let mut columns: Vec<_> = self.confusion.values().flat_map(BTreeMap::keys).collect();
            columns.sort();
            columns.dedup();
            columns
        };
        writeln!(
            f,
            "{} machines, {} of them measured the old way",
            self.machines, self.old_machines
        )?;
        writeln!(
            f,
            "\nplanted (rows) and reported (columns); members: the right kind, other cells"
        )?;
        write!(f, "{:16}", "")?;
        for column in &columns {
            write!(f, " {column:>12.12}")?;
        }
        writeln!(f)?;
        for (planted, row) in &self.confusion {
            write!(f, "{planted:16}")?;
            for column in &columns {
                match row.get(*column) {
                    Some(count) => write!(f, " {count:>12}")?,
                    None => write!(f, " {:>12}", ".")?,
                }
            }
            writeln!(f)?;
        }
        writeln!(
            f,
            "\n{:16} {:>20} {:>20} {:>20} {:>20} {:>20} {:>20} {:>20} {:>20}",
            "kind",
            "precision",
            "recall",
            "recall, clear",
            "effect ±0.03",
            "interval covers",
            "covers crude",
            "scale",
            "weak, found"
        )?;
        let all = "all".to_owned();
        for (kind, scores) in self.by_kind.iter().chain(std::iter::once((&all, &self.all))) {
            writeln!(
                f,
                "{kind:16} {:>20} {:>20} {:>20} {:>20} {:>20} {:>20} {:>20} {:>20}",
                scores.precision,
                scores.recall,
                scores.clear_recall,
                scores.effect,
                scores.coverage,
                scores.crude_coverage,
                scores.scale,
                scores.weak
            )?;
        }
        writeln!(f, "scale left open: {}", self.all.scale_open)?;
        writeln!(f, "\nmachines without fault that have a structural finding")?;
        writeln!(f, "  measured in blocks       {}", self.healthy_new)?;
        writeln!(f, "    without artefact too   {}", self.healthy_clean)?;
        writeln!(f, "  measured the old way     {}", self.healthy_old)?;
        writeln!(f, "\nartefacts planted and reported (many are too small to see)")?;
        for (kind, share) in &self.artefacts {
            writeln!(f, "  {kind:18} {share}")?;
        }
        for (kind, count) in &self.invented_artefacts {
            writeln!(f, "  {kind:18} reported {count} times where none was planted")?;
        }
        writeln!(f, "verdicts: {:?}", self.verdicts)
    }
}

impl Summary {
    /// One line for each machine that is not all right, with what reruns it alone.
    pub(crate) fn failures(&self) -> Vec<String> {
        let errors = self.errors.iter().map(|(seed, error)| format!("--only {seed}: {error}"));
        self.failures
            .iter()
            .map(|failed| {
                format!("--sweep {} --only {}: {}", failed.sweep.as_str(), failed.seed, failed.why)
            })
            .chain(errors)
            .collect()
    }
}
