//! What judging gathers from a log in one pass, and the order in which it looks at it.

use std::collections::{BTreeMap, BTreeSet};

use cluster_health_core::{Bandwidth, ByteSize};

use super::finding::{Diagnosis, Effect, Finding, Kind};
use super::table::Table;
use super::{Fitted, artefact, judge, load, one_block, sparse, suspect};
use crate::matrix::{Axis, Prediction};
use crate::plan::{DEFAULT_MIN_EFFECT, Order, PROBE_SIZE};
use crate::run::{Manifest, RunStatus};
use crate::samples::{DataCheck, PointStatus, Sample, Sweep};
use crate::stats::median;

/// Axes of a sweep: sizes, rows, columns.
pub(crate) type Axes = (Vec<ByteSize>, Axis, Axis);

/// What sampled sweeps predict, by sweep and load.
pub(crate) type Predictions = BTreeMap<(Sweep, String), Prediction>;

/// Cells of points that ended in some way.
#[derive(Debug, Clone, Default)]
struct Places {
    rows: BTreeMap<u32, u64>,
    cols: BTreeMap<u32, u64>,
    points: u64,
    /// Of the first one.
    reason: Option<String>,
}

impl Places {
    fn add(&mut self, sample: &Sample) {
        self.points += 1;
        if let Some((row, col)) = sample.cell() {
            *self.rows.entry(row).or_insert(0) += 1;
            *self.cols.entry(col).or_insert(0) += 1;
        }
        if self.reason.is_none() {
            self.reason.clone_from(&sample.reason);
        }
    }
}

/// All that one pass over a log gathers for judging.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    tables: BTreeMap<(Sweep, String), Table>,
    cores: BTreeMap<u32, u32>,
    mismatches: BTreeMap<(Sweep, String), Places>,
    implausible: BTreeMap<(Sweep, String), Places>,
    unbindable: BTreeMap<u32, String>,
}

impl Evidence {
    /// `cores` names the core of each CPU.
    pub(crate) fn new(cores: BTreeMap<u32, u32>) -> Self {
        Self { cores, ..Self::default() }
    }

    pub(crate) fn add(&mut self, sample: &Sample, axes: Option<&Axes>) {
        let key = || (sample.sweep, sample.load.clone());
        match sample.status {
            PointStatus::Failed if sample.check == DataCheck::Mismatch => {
                self.mismatches.entry(key()).or_default().add(sample);
            }
            PointStatus::Implausible => self.implausible.entry(key()).or_default().add(sample),
            _ => {}
        }
        let Some((sizes, rows, cols)) = axes else { return };
        if sample.status != PointStatus::Measured {
            return;
        }
        if let Some(table) = self.tables.get_mut(&key()) {
            table.add(sample);
            return;
        }
        let axes = (rows.clone(), cols.clone());
        let core_of = |cpu: u32| self.cores.get(&cpu).copied();
        let mut table = Table::new(sample.sweep, &sample.load, sizes.clone(), axes, core_of);
        table.add(sample);
        self.tables.insert(key(), table);
    }

    /// The judgement.
    pub(crate) fn judge(
        mut self,
        manifest: &Manifest,
        expect: Option<Bandwidth>,
    ) -> (Diagnosis, Predictions) {
        let mut predictions = Predictions::new();
        let mut findings = Vec::new();
        let mut tested = Vec::new();
        self.unbindable(manifest);
        if !self.unbindable.is_empty() {
            let mut finding = Finding::new(Kind::Unbindable, None, None);
            finding.cpus = self.unbindable.keys().copied().collect();
            finding.facts = self
                .unbindable
                .iter()
                .take(20)
                .map(|(cpu, reason)| format!("CPU {cpu}: {reason}"))
                .collect();
            finding.inference =
                "The plan names CPUs that no thread of this run can be bound to.".to_owned();
            finding.next =
                "Check the cpuset of the container or job, and CPUs that are offline.".to_owned();
            findings.push(finding);
        }
        for ((sweep, load), places) in &self.mismatches {
            findings.push(corruption(
                *sweep,
                load,
                places,
                self.tables.get(&(*sweep, load.clone())),
            ));
        }
        for ((sweep, load), places) in &self.implausible {
            findings.push(implausible(*sweep, load, places));
        }
        findings.extend(unfinished(manifest));
        let missing = not_tested(&self.tables, manifest, expect);
        let mut loads = load::compare(&self.tables, manifest, |sweep| settings(manifest, sweep).0);
        tested.append(&mut loads.tested);
        for mut table in std::mem::take(&mut self.tables).into_values() {
            let (min_effect, order, declared) = settings(manifest, table.sweep);
            table.sampled = is_sampled(manifest, table.sweep);
            let randomised = order == Some(Order::Blocks);
            let mut fitted = if randomised { Fitted::new(table) } else { Fitted::plain(table) };
            let mut suspects = Vec::new();
            if randomised {
                suspects = suspect::find(&fitted.table, &fitted.fits, min_effect);
                fitted.refit(&suspects);
            }
            let Fitted { table, fits, .. } = &fitted;
            if let Some(finding) = artefact::bimodal(table, fits) {
                findings.push(finding);
            }
            if randomised {
                let (mut found, unvisited) = judge::confirmed(table, fits, &suspects, min_effect);
                if table.sampled {
                    let predicted = sparse::predict(table, &suspects, &found);
                    predictions.insert((table.sweep, table.load.clone()), predicted);
                }
                findings.append(&mut found);
                let limits = (min_effect, manifest.status == RunStatus::Complete);
                findings.extend(judge::unconfirmed(table, fits, &unvisited, limits));
                findings.extend(judge::unsteady(table, fits, &suspects));
                let powers = judge::powers(table, fits, min_effect);
                findings.extend(judge::underpowered(table, &powers));
                findings.extend(artefact::find(&fitted));
                let power = judge::power(&powers).into_iter();
                tested.extend(power.map(|line| load::under(line, &table.load)));
            } else {
                findings.extend(one_block::judge(table, manifest, min_effect));
            }
            // In a run of both sweeps the rate that is asked for is that of copies.
            let is_meant = !table.sweep.is_pair() || manifest.plan.h2d.is_none();
            let expect = expect.filter(|_| is_meant).or(declared);
            findings.extend(expect.and_then(|expect| ceiling(table, fits, expect, min_effect)));
        }
        let mut diagnosis = Diagnosis::of(loads.join(findings));
        diagnosis.tested = tested;
        diagnosis.not_tested = missing;
        (diagnosis, predictions)
    }

    fn unbindable(&mut self, manifest: &Manifest) {
        let plan = &manifest.plan;
        if let Some(plan) = &plan.h2d {
            self.unbindable
                .extend(plan.unusable_cpus.iter().map(|(cpu, why)| (cpu.0, why.clone())));
        }
        if let Some(plan) = &plan.core_pair {
            for list in [&plan.unusable_rank0_cpus, &plan.unusable_rank1_cpus] {
                self.unbindable.extend(list.iter().map(|(cpu, why)| (cpu.0, why.clone())));
            }
        }
    }
}

/// Smallest effect, order and declared rate of a sweep's plan; imports have no order of ours.
fn settings(manifest: &Manifest, sweep: Sweep) -> (f64, Option<Order>, Option<Bandwidth>) {
    let plan = &manifest.plan;
    if sweep.is_pair() {
        if let Some(plan) = &plan.core_pair {
            return (plan.min_effect, Some(plan.order), plan.expect);
        }
    } else if let Some(plan) = &plan.h2d {
        return (plan.min_effect, Some(plan.order), plan.expect);
    }
    (DEFAULT_MIN_EFFECT, None, None)
}

/// Whether only a part of a sweep's cells was to be measured.
fn is_sampled(manifest: &Manifest, sweep: Sweep) -> bool {
    let plan = &manifest.plan;
    if sweep.is_pair() {
        plan.core_pair.as_ref().is_some_and(|plan| plan.sample.is_some())
    } else {
        plan.h2d.as_ref().is_some_and(|plan| plan.sample.is_some())
    }
}

/// The ids that a fault is narrowed to: those seen, unless they are spread over the whole axis.
fn narrowed(seen: &BTreeMap<u32, u64>, all: usize) -> Vec<u32> {
    // A fault that strikes at random has not been seen everywhere yet.
    if all > 1 && 2 * seen.len() > all { Vec::new() } else { seen.keys().copied().collect() }
}

fn corruption(sweep: Sweep, load: &str, places: &Places, table: Option<&Table>) -> Finding {
    let mut finding = Finding::new(Kind::DataCorruption, Some(sweep), Some(load));
    let [rows, cols] = table.map_or([usize::MAX, usize::MAX], |table| {
        // Cells that always fail have no times, but they have their place in the axes.
        table.shape()
    });
    let (in_rows, in_cols) = (narrowed(&places.rows, rows), narrowed(&places.cols, cols));
    if sweep.is_pair() {
        (finding.rank0_cpus, finding.rank1_cpus) = (in_rows, in_cols);
    } else {
        (finding.cpus, finding.devices) = (in_rows, in_cols);
    }
    finding.facts.push(format!("{} points delivered other data than was sent", places.points));
    finding.facts.push(format!(
        "seen in {} of the rows and {} of the columns",
        places.rows.len(),
        places.cols.len()
    ));
    finding.facts.extend(places.reason.clone());
    finding.inference =
        "Data is corrupted on its way: no rate of this path matters before that is repaired."
            .to_owned();
    finding.next =
        "Take the part out of service; check ECC and link error counters; run with --check full."
            .to_owned();
    finding
}

fn implausible(sweep: Sweep, load: &str, places: &Places) -> Finding {
    let mut finding = Finding::new(Kind::Implausible, Some(sweep), Some(load));
    let ids = |seen: &BTreeMap<u32, u64>| seen.keys().copied().take(4096).collect::<Vec<u32>>();
    if sweep.is_pair() {
        (finding.rank0_cpus, finding.rank1_cpus) = (ids(&places.rows), ids(&places.cols));
    } else {
        (finding.cpus, finding.devices) = (ids(&places.rows), ids(&places.cols));
    }
    finding.facts.push(format!("{} points were faster than the path can be", places.points));
    finding.facts.extend(places.reason.clone());
    finding.inference =
        "The clock or the transfer is not what it seems; these points are in no matrix.".to_owned();
    finding.next =
        "Check --expect, and whether the transfers are really made (--check full).".to_owned();
    finding
}

/// Everything stays below the rate that was expected. A rate is compared without the fixed cost of a
/// transfer where two sizes, or one and the probes, tell it.
fn ceiling(
    table: &Table,
    fits: &[Option<super::fit::Fit>],
    expect: Bandwidth,
    min_effect: f64,
) -> Option<Finding> {
    let size = fits.iter().rposition(Option::is_some)?;
    let fit = fits[size].as_ref()?;
    let bytes = table.sizes[size];
    // Where time slowed the whole run, its best stretch tells what the node can.
    let typical = |size: usize| -> Option<f64> {
        let mut times: Vec<f64> = table
            .obs
            .iter()
            .filter(|obs| usize::from(obs.size) == size && !obs.sentinel && !obs.is_confirm())
            .map(|obs| f64::from(obs.ln))
            .collect();
        (times.len() >= 2).then(|| median(&mut times).exp())
    };
    let smaller = (0..size)
        .map(|size| (size, table.sizes[size]))
        .chain([(table.sizes.len(), PROBE_SIZE)])
        .filter(|(_, smaller)| smaller.bytes() * 4 <= bytes.bytes())
        .find_map(|(size, bytes)| Some((bytes, typical(size)?)));
    let asymptotic = |large_ns: f64| match smaller {
        Some((small, small_ns)) if large_ns > small_ns => {
            (bytes.bytes() - small.bytes()) as f64 / (large_ns - small_ns)
        }
        _ => bytes.bytes() as f64 / large_ns,
    };
    let mut rates: Vec<f64> = fit
        .which
        .iter()
        .map(|&at| &table.obs[at as usize])
        .filter(|obs| obs.is_block())
        .map(|obs| asymptotic(f64::from(obs.ln).exp()))
        .collect();
    let typical = median(&mut rates);
    let expect = expect.as_gb_per_second();
    let ratio = typical / expect;
    // The fast cells too: a ceiling is what nothing comes above.
    let high = crate::stats::quantile_sorted(&rates, 0.9);
    if ratio >= 1.0 - min_effect || high >= expect {
        return None;
    }
    let mut finding = Finding::new(Kind::NodeCeiling, Some(table.sweep), Some(&table.load));
    let error = fit.point_sd / (rates.len() as f64).sqrt();
    finding.effect = Some(Effect {
        ratio,
        low: ratio * (-2.0 * error).exp(),
        high: ratio * (2.0 * error).exp(),
    });
    let how = match smaller {
        Some((small, _)) => format!("from {small} to {bytes}, without the cost per transfer"),
        None => format!("at {bytes}, the cost per transfer included"),
    };
    finding.facts.push(format!(
        "{how}: median {typical:.3} GB/s, 90th percentile {high:.3} GB/s, expected {expect:.3} GB/s"
    ));
    finding.inference = "All cells stay below the expected rate: the node as a whole is limited, \
                         or the expectation is not for this size."
        .to_owned();
    finding.next = "Compare with a node of the same kind (cluster-health compare); check link \
                    width, power and memory settings."
        .to_owned();
    Some(finding)
}

/// What a run had not reached is not healthy by silence.
fn unfinished(manifest: &Manifest) -> Option<Finding> {
    if manifest.status == RunStatus::Complete {
        return None;
    }
    let mut finding = Finding::new(Kind::Inconclusive, None, None);
    finding.facts.push(format!(
        "the run did not come to its end: {} points measured",
        manifest.points.measured
    ));
    finding.inference =
        "Cells, blocks and confirming visits that it had not reached say nothing.".to_owned();
    finding.next = "Let it come to its end (--resume).".to_owned();
    Some(finding)
}

fn not_tested(
    tables: &BTreeMap<(Sweep, String), Table>,
    manifest: &Manifest,
    expect: Option<Bandwidth>,
) -> Vec<String> {
    let sweeps: BTreeSet<Sweep> = tables.keys().map(|(sweep, _)| *sweep).collect();
    let loads: BTreeSet<&str> = tables.keys().map(|(_, load)| load.as_str()).collect();
    let mut missing = Vec::new();
    if !sweeps.contains(&Sweep::CorePair) {
        missing.push("bare communication: no pair of ranks was measured".to_owned());
    }
    if !sweeps.contains(&Sweep::H2d) && !sweeps.contains(&Sweep::Bidirectional) {
        missing.push("host path: no copy from host to device was measured".to_owned());
    }
    let knows = |known: fn(&Table) -> bool| tables.values().all(known);
    if !sweeps.contains(&Sweep::CorePair) {
        missing.push("placement of pairs: ranks that share a core need pairs of ranks".to_owned());
    } else if !knows(|table| {
        table.row_cores.iter().chain(&table.col_cores).any(Option::is_some)
            || !table.sweep.is_pair()
    }) {
        missing
            .push("placement on threads: without a census SMT siblings are not known".to_owned());
    }
    if !knows(|table| table.rows.nodes.iter().any(Option::is_some)) {
        missing.push("placement on nodes: the NUMA nodes of the CPUs are not known".to_owned());
    }
    if loads.len() < 2 {
        missing.push("training-state load: only one load profile was measured".to_owned());
    }
    let declared = manifest.plan.h2d.as_ref().and_then(|plan| plan.expect);
    if expect.or(declared).is_none() {
        missing.push(
            "absolute level: no expected rate was given (--expect), so a node that is slow as a \
             whole looks healthy; compare it with another node"
                .to_owned(),
        );
    }
    let is_partial = |table: &Table| {
        is_sampled(manifest, table.sweep)
            && (0..table.sizes.len()).any(|size| sparse::coverage(table, size).1 < 0.99)
    };
    if tables.values().any(is_partial) {
        missing.push(
            "single cells: a sample visits a part of them, mostly once; rows, columns and rectangles \
             show, a single slow cell does not"
                .to_owned(),
        );
    }
    missing.push(
        "framework: how the training program places ranks and overlaps copies is not seen here"
            .to_owned(),
    );
    missing
}
