//! One block in a fixed order: what place and time explain alike is confounded.
//!
//! The outer loop of the scan is time: its lines are visited once, and nothing tells them from
//! what happened meanwhile. Lines of the inner loop, and the pairs that share a CPU or a core,
//! recur through the whole scan. They are findings when every eighth of it shows them, no step in
//! time does, and nothing else comes with them: the first line of a NUMA node in the scan comes
//! after a change of node, and the first devices of the scan are the first to use a new buffer, so
//! of devices only a slowness that grows with the bytes counts.

mod recorded;
mod recur;
mod scan;

use super::artefact::{self, time};
use super::confirm::Estimate;
use super::finding::{Finding, Kind, MOST_NAMES, Replicates, names, sorted};
use super::judge;
use super::table::{Kinship, Table};
use crate::run::Manifest;
use crate::stats::{median, quantile, robust_sd};
use recur::{Recurrence, Why};
use scan::{Grid, Scan};

/// Standard errors that a class needs.
const LEAST_Z: f64 = 6.0;
/// A healthy spread is not known from a few lines: so many of this spread are added to them.
const PRIOR_LINES: f64 = 6.0;
const PRIOR_SPREAD: f64 = 0.016;
/// Deviations beyond this are no healthy ones.
const WIDEST_HEALTHY: f64 = 0.045;
/// Share of a node's lines that must be on its side.
const NODE_SHARE: f64 = 0.8;

/// What is known at each of the scan's sizes.
type BySize = Vec<Option<Recurrence>>;

/// A suspicion that the scan cannot decide.
struct Undecided {
    what: String,
    devices: Vec<u32>,
    why: String,
}

/// Everything about one scan.
struct View<'a> {
    scan: Scan<'a>,
    manifest: &'a Manifest,
    min_effect: f64,
    /// The order of measurement is known.
    is_ordered: bool,
}

/// Findings of a table that was measured in a fixed order.
pub(super) fn judge(table: &Table, manifest: &Manifest, min_effect: f64) -> Vec<Finding> {
    let Some(scan) = Scan::new(table) else { return Vec::new() };
    let is_ordered = manifest.order != "imported-unknown";
    let view = View { scan, manifest, min_effect, is_ordered };
    let mut undecided = Vec::new();
    let mut findings = view.classes(&mut undecided);
    let mut artefacts = artefact::leads(table);
    if is_ordered {
        findings.extend(view.lines(&mut undecided));
        if !artefacts.iter().any(|finding| finding.kind == Kind::FirstVisit) {
            artefacts.extend(recorded::first_visit(&view));
        }
        artefacts.extend(recorded::device_steps(&view, &findings, &mut undecided));
        artefacts.extend(recorded::stall(&view));
        view.outer(&mut artefacts, &mut undecided);
        if !artefacts.iter().any(|finding| finding.kind == Kind::Checkpoint) {
            artefacts.extend(recorded::checkpoint(&view));
        }
    }
    view.cells(&mut undecided);
    for finding in &mut findings {
        view.assumptions(finding);
    }
    findings.extend(view.confounded(undecided));
    for finding in &mut artefacts {
        view.assumptions(finding);
    }
    findings.extend(artefacts);
    findings
}

impl View<'_> {
    fn table(&self) -> &Table {
        self.scan.table
    }

    /// The largest size that was measured.
    fn largest(&self) -> Option<&Grid> {
        self.scan.grids.last()
    }

    fn assumptions(&self, finding: &mut Finding) {
        if self.manifest.plan.import.as_ref().is_some_and(|import| import.scan_order_assumed) {
            finding.facts.push(format!(
                "assumed: the scan order is that of the file ({})",
                self.manifest.order
            ));
        }
    }

    /// All pairs on one CPU, on one core.
    fn classes(&self, undecided: &mut Vec<Undecided>) -> Vec<Finding> {
        let mut found = Vec::new();
        for (kinship, kind, what) in [
            (Kinship::SameCpu, Kind::SameCore, "both ranks on one CPU"),
            (Kinship::Siblings, Kind::SmtSibling, "ranks on SMT siblings"),
        ] {
            let series: Vec<Vec<(usize, f64)>> =
                self.scan.grids.iter().map(|grid| grid.of_class(&self.scan, kinship)).collect();
            match self.weigh(&series, self.min_effect, 0.0) {
                Some(Ok(estimates)) => {
                    found.extend(self.structural(kind, &estimates, |_| {}));
                }
                Some(Err(why)) => {
                    undecided.push(Undecided { what: what.to_owned(), devices: Vec::new(), why });
                }
                None => {}
            }
        }
        found
    }

    /// Judges what recurs, by its series at each size: `None` when it is not slow (or, of a node,
    /// not different), else the estimates by size or why they decide nothing. `shared` is the
    /// error of what it is compared with.
    fn weigh(
        &self,
        series: &[Vec<(usize, f64)>],
        threshold: f64,
        shared: f64,
    ) -> Option<Result<BySize, String>> {
        self.weigh_signed(series, threshold, shared, false)
    }

    fn weigh_signed(
        &self,
        series: &[Vec<(usize, f64)>],
        threshold: f64,
        shared: f64,
        may_be_faster: bool,
    ) -> Option<Result<BySize, String>> {
        let slots = self.scan.slots.len();
        let all: BySize =
            series.iter().map(|series| Recurrence::of(series, slots, shared)).collect();
        let size = |value: f64| if may_be_faster { value.abs() } else { value };
        let shows = |r: &Recurrence| size(r.effect) > threshold;
        let strongest = all
            .iter()
            .flatten()
            .filter(|r| shows(r))
            .max_by(|a, b| size(a.effect).total_cmp(&size(b.effect)))?;
        let sign = strongest.effect.signum();
        let why = all.iter().flatten().filter(|r| shows(r)).find_map(|r| r.why.clone());
        if let Some(why) = why {
            return Some(Err(self.why(&why)));
        }
        if strongest.effect.abs() < LEAST_Z * strongest.error {
            return Some(Err("its effect is not beyond the noise".to_owned()));
        }
        let elsewhere = all.iter().flatten().all(|r| r.effect * sign > 3.0 * r.error);
        if !elsewhere {
            return Some(Err("it does not show at all sizes".to_owned()));
        }
        Some(Ok(all))
    }

    fn why(&self, why: &Why) -> String {
        let name = |slot: usize| {
            let (axis, slot) = (self.scan.outer_axis(), &self.scan.slots[slot]);
            format!(
                "{} {} (position {} of {})",
                axis.name,
                axis.ids[slot.line],
                slot.at,
                self.scan.slots.len()
            )
        };
        match why {
            Why::Short => "too few of them to be seen in every eighth of the scan".to_owned(),
            Why::Eighth(eighth) => format!("it does not show in eighth {} of the scan", eighth + 1),
            Why::Before(slot) => format!("it does not show before {}", name(*slot)),
            Why::After(slot) => format!("it does not show after {}", name(*slot)),
            Why::Noisy => "the noise leaves open whether it was there from the start".to_owned(),
        }
    }

    fn structural(
        &self,
        kind: Kind,
        by_size: &[Option<Recurrence>],
        place: impl Fn(&mut Finding),
    ) -> Option<Finding> {
        let (size, best) = by_size.iter().enumerate().rev().find_map(|(at, r)| {
            Some((at, r.as_ref()?)).filter(|(_, r)| r.effect.abs() > self.min_effect)
        })?;
        let table = self.table();
        let mut finding = Finding::new(kind, Some(table.sweep), Some(&table.load));
        place(&mut finding);
        finding.effect = Some(time::effect(best.effect, best.error));
        finding.replicates = Some(Replicates { seen: 8, of: 8 });
        let estimates: Vec<_> = self
            .scan
            .grids
            .iter()
            .zip(by_size)
            .filter_map(|(grid, r)| {
                let r = r.as_ref()?;
                let estimate = Estimate {
                    effect: r.effect,
                    se: r.error,
                    noise: r.error,
                    seen: 8,
                    of: 8,
                    rest_ns: grid.usual_ns(),
                    nominal_ns: grid.usual_ns(),
                    unsettled: false,
                };
                Some((table.sizes[grid.size], estimate))
            })
            .collect();
        let (scales, extra) = judge::growth(&estimates);
        finding.scales_with_bytes = scales;
        finding.extra_us = extra;
        for (bytes, estimate) in &estimates {
            let effect = time::effect(estimate.effect, estimate.se);
            finding.facts.push(format!(
                "{bytes}: × {:.3} of the rest's rate (95 % interval {:.3} to {:.3}), {:+.1} µs per \
                 transfer",
                effect.ratio,
                effect.low,
                effect.high,
                estimate.rest_ns * (estimate.effect.exp() - 1.0) / 1e3
            ));
        }
        let eighths: Vec<String> =
            best.eighths.iter().map(|value| format!("{:.3}", (-value).exp())).collect();
        finding.facts.push(format!(
            "in the eighths of the scan at {}: × {}",
            table.sizes[self.scan.grids[size].size],
            eighths.join(", ")
        ));
        judge::explain(&mut finding);
        finding.inference.push_str(
            " It recurs through the whole scan and shows in every eighth of it, so time does not \
             explain it.",
        );
        Some(finding)
    }

    /// Lines of the inner loop, single ones and NUMA nodes.
    fn lines(&self, undecided: &mut Vec<Undecided>) -> Vec<Finding> {
        let mut found = Vec::new();
        let is_pair = self.table().sweep.is_pair();
        let axis = self.scan.inner_axis();
        if self.scan.inner() < 3 {
            return found;
        }
        let mut nodes = Vec::new();
        if is_pair {
            nodes = self.nodes(undecided, &mut found);
        }
        let levels: Vec<Vec<f64>> =
            self.scan.grids.iter().map(|grid| self.flat(grid, &nodes)).collect();
        let hops = self.scan.hops();
        let thresholds: Vec<(f64, f64)> =
            levels.iter().map(|levels| self.threshold(levels, &hops)).collect();
        // What no finding names is the rest that effects are of.
        let mut decided: Vec<(usize, BySize)> = Vec::new();
        for line in 0..self.scan.inner() {
            let is_slow = levels
                .iter()
                .zip(&thresholds)
                .any(|(levels, (threshold, _))| levels[line] > *threshold);
            if !is_slow {
                continue;
            }
            let name = format!("{} {}", axis.name, axis.ids[line]);
            let devices = if is_pair { Vec::new() } else { vec![axis.ids[line]] };
            let mut leave = |why: String| {
                undecided.push(Undecided { what: name.clone(), devices: devices.clone(), why });
            };
            if is_pair && hops[line] {
                leave("it is the first after a change of NUMA node in every pass".to_owned());
                continue;
            }
            let series: Vec<Vec<(usize, f64)>> = self
                .scan
                .grids
                .iter()
                .zip(&levels)
                .map(|(grid, levels)| {
                    let shift = levels[line] - grid.line[line];
                    grid.of_line(line).into_iter().map(|(slot, v)| (slot, v + shift)).collect()
                })
                .collect();
            let least = thresholds.iter().map(|(t, _)| *t).fold(f64::INFINITY, f64::min);
            let shared = thresholds.last().map_or(0.0, |(_, shared)| *shared);
            match self.weigh(&series, least, shared) {
                None => {}
                Some(Err(why)) => leave(why),
                Some(Ok(by_size)) => {
                    match self.is_link(&by_size).and_then(|()| self.is_slower_than_most(line)) {
                        Ok(()) => decided.push((line, by_size)),
                        Err(why) => leave(why),
                    }
                }
            }
        }
        let kind = match (is_pair, self.scan.outer) {
            (true, 0) => Kind::SlowRank1Core,
            (true, _) => Kind::SlowRank0Core,
            (false, 0) => Kind::SlowDevice,
            (false, _) => Kind::SlowCore,
        };
        for group in group(decided) {
            let ids = sorted(group.iter().map(|(line, _)| axis.ids[*line]));
            let by_size: BySize = (0..self.scan.grids.len())
                .map(|size| {
                    let all: Vec<&Recurrence> =
                        group.iter().filter_map(|(_, by_size)| by_size[size].as_ref()).collect();
                    Recurrence::pooled(&all)
                })
                .collect();
            found.extend(self.structural(kind, &by_size, |finding| match kind {
                Kind::SlowRank1Core => finding.rank1_cpus.clone_from(&ids),
                Kind::SlowRank0Core => finding.rank0_cpus.clone_from(&ids),
                Kind::SlowDevice => finding.devices.clone_from(&ids),
                _ => finding.cpus.clone_from(&ids),
            }));
        }
        found
    }

    /// Whether a device is slower than most of the others one by one: where half of them change
    /// together, the level that all are compared with is no measure.
    fn is_slower_than_most(&self, line: usize) -> Result<(), String> {
        let Some(grid) = self.largest().filter(|_| !self.table().sweep.is_pair()) else {
            return Ok(());
        };
        let others: Vec<usize> = (0..self.scan.inner()).filter(|&other| other != line).collect();
        let slower = others
            .iter()
            .filter(|&&other| {
                let series = grid.difference(&[line], &[other]);
                Recurrence::of(&series, self.scan.slots.len(), 0.0).is_some_and(|recurrence| {
                    recurrence.why.is_none() && recurrence.effect > self.min_effect / 2.0
                })
            })
            .count();
        if 2 * slower > others.len() {
            Ok(())
        } else {
            Err("it is not slower than most of the others throughout the scan".to_owned())
        }
    }

    /// Of copies only what grows with the bytes is a link.
    fn is_link(&self, by_size: &[Option<Recurrence>]) -> Result<(), String> {
        if self.table().sweep.is_pair() || self.scan.outer != 0 {
            return Ok(());
        }
        let of = |at: usize| Some((&self.scan.grids[at], by_size[at].as_ref()?));
        let (Some((small, least)), Some((large, most))) = (of(0), of(by_size.len() - 1)) else {
            return Err("it is not known at all sizes".to_owned());
        };
        let sizes = &self.table().sizes;
        let growth = sizes[large.size].bytes() as f64 / sizes[small.size].bytes() as f64;
        if growth < 1.5 {
            return Err("one size cannot tell a slow link from a fixed cost".to_owned());
        }
        let extra = |grid: &Grid, r: &Recurrence| grid.usual_ns() * (r.effect.exp() - 1.0);
        let exponent = (extra(large, most) / extra(small, least)).ln() / growth.ln();
        if (0.7..1.3).contains(&exponent) {
            Ok(())
        } else {
            Err(format!(
                "its extra time does not grow with the bytes: {:.3} ms at {}, {:.3} ms at {}",
                extra(small, least) / 1e6,
                sizes[small.size],
                extra(large, most) / 1e6,
                sizes[large.size]
            ))
        }
    }

    /// Levels of the inner lines without the effects of whole nodes, about their healthy middle.
    fn flat(&self, grid: &Grid, nodes: &[(u32, Vec<usize>)]) -> Vec<f64> {
        let mut levels = grid.line.clone();
        let in_node = |line: usize| nodes.iter().any(|(_, members)| members.contains(&line));
        let center = |members: &mut dyn Iterator<Item = usize>| {
            median(
                &mut members
                    .map(|line| grid.line[line])
                    .filter(|l| l.is_finite())
                    .collect::<Vec<_>>(),
            )
        };
        let rest = center(&mut (0..levels.len()).filter(|&line| !in_node(line)));
        for (_, members) in nodes {
            let own = center(&mut members.iter().copied());
            members.iter().for_each(|&line| levels[line] -= own);
        }
        for (line, level) in levels.iter_mut().enumerate() {
            if !in_node(line) {
                *level -= rest;
            }
        }
        levels
    }

    /// What a line must exceed to be no healthy one, and the error of the healthy ones' middle.
    fn threshold(&self, levels: &[f64], hops: &[bool]) -> (f64, f64) {
        let all: Vec<f64> = levels
            .iter()
            .zip(hops)
            .filter(|(level, hop)| level.is_finite() && !**hop)
            .map(|(level, _)| *level)
            .collect();
        let spread = healthy_spread(&all);
        let lines = all.len().saturating_sub(1).max(1) as f64;
        let threshold = (3.0 + 4.0 / lines) * spread * (1.0 + 1.0 / lines).sqrt();
        (self.min_effect.max(threshold), 1.25 * spread / lines.sqrt())
    }

    /// NUMA nodes of the inner loop that differ as a whole: the members of those found or left
    /// open, which the single lines are judged without.
    fn nodes(
        &self,
        undecided: &mut Vec<Undecided>,
        found: &mut Vec<Finding>,
    ) -> Vec<(u32, Vec<usize>)> {
        let Some(grid) = self.largest() else { return Vec::new() };
        let inner_axis = 1 - self.scan.outer;
        let hops = self.scan.hops();
        let mut rest: Vec<(u32, Vec<usize>)> = self
            .table()
            .nodes(inner_axis)
            .into_iter()
            .map(|(node, mut members)| {
                members.retain(|&line| grid.line[line].is_finite());
                (node, members)
            })
            .filter(|(_, members)| !members.is_empty())
            .collect();
        let mut taken: Vec<(u32, Vec<usize>)> = Vec::new();
        while rest.len() >= 2 {
            let strongest = (0..rest.len())
                .filter_map(|index| Some((index, self.node_effect(grid, &rest, index, &hops)?)))
                .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
            let Some((index, _)) = strongest else { break };
            taken.push(rest.remove(index));
        }
        let others: Vec<usize> =
            rest.iter().flat_map(|(_, members)| members.iter().copied()).collect();
        let mut decided: Vec<(u32, &Vec<usize>, BySize)> = Vec::new();
        for (node, members) in &taken {
            let series: Vec<Vec<(usize, f64)>> =
                self.scan.grids.iter().map(|grid| grid.difference(members, &others)).collect();
            let spread =
                healthy_spread(&others.iter().map(|&line| grid.line[line]).collect::<Vec<f64>>());
            let shared = spread
                * (1.0 / self.cores(members) as f64 + 1.0 / self.cores(&others) as f64).sqrt();
            match self.weigh_signed(&series, self.min_effect, shared, true) {
                Some(Ok(by_size)) => decided.push((*node, members, by_size)),
                Some(Err(why)) => undecided.push(Undecided {
                    what: format!("NUMA node {node} as {}", self.scan.inner_axis().name),
                    devices: Vec::new(),
                    why,
                }),
                None => {}
            }
        }
        let axis = self.scan.inner_axis();
        let groups =
            group(decided.iter().enumerate().map(|(at, (_, _, r))| (at, r.clone())).collect());
        for group in groups {
            let by_size: BySize = (0..self.scan.grids.len())
                .map(|size| {
                    let all: Vec<&Recurrence> =
                        group.iter().filter_map(|(_, r)| r[size].as_ref()).collect();
                    Recurrence::pooled(&all)
                })
                .collect();
            let nodes = sorted(group.iter().map(|(at, _)| decided[*at].0));
            let ids = sorted(
                group.iter().flat_map(|(at, _)| decided[*at].1.iter().map(|&l| axis.ids[l])),
            );
            found.extend(self.structural(Kind::NumaEffect, &by_size, |finding| {
                finding.numa_nodes.clone_from(&nodes);
                if self.scan.outer == 0 {
                    finding.rank1_cpus.clone_from(&ids);
                } else {
                    finding.rank0_cpus.clone_from(&ids);
                }
            }));
        }
        taken
    }

    /// The difference of a node from the other ones, if it is one.
    fn node_effect(
        &self,
        grid: &Grid,
        nodes: &[(u32, Vec<usize>)],
        index: usize,
        hops: &[bool],
    ) -> Option<f64> {
        let usual = |line: &&usize| !hops[**line] || nodes[index].1.len() < 3;
        let own = &nodes[index].1;
        let others: Vec<f64> = nodes
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index)
            .flat_map(|(_, (_, members))| members)
            .filter(usual)
            .map(|&line| grid.line[line])
            .collect();
        let center = median(&mut others.clone());
        let effect =
            median(&mut own.iter().filter(usual).map(|&line| grid.line[line]).collect::<Vec<_>>())
                - center;
        let deviations: Vec<f64> = others.iter().map(|level| level - center).collect();
        let spread = healthy_spread(&deviations);
        let cores = self.cores(own) as f64;
        let threshold = self.min_effect.max(3.5 * spread / (cores / 1.5).max(1.0).sqrt());
        let beyond = own
            .iter()
            .filter(|&&line| (grid.line[line] - center) * effect.signum() > effect.abs() / 2.0)
            .count();
        let is_whole = beyond as f64 >= NODE_SHARE * own.len() as f64;
        let is_slower_of_two = nodes.len() > 2 || effect > 0.0;
        (own.len() >= 2 && effect.abs() > threshold && is_whole && is_slower_of_two)
            .then_some(effect)
    }

    /// Cores among lines of the inner loop.
    fn cores(&self, lines: &[usize]) -> usize {
        let table = self.table();
        let cores = if self.scan.outer == 0 { &table.col_cores } else { &table.row_cores };
        let named = sorted(lines.iter().filter_map(|&line| cores[line]));
        if named.is_empty() { lines.len().max(1) } else { named.len() }
    }

    /// The outer loop: what its levels tell about time, and its slow lines.
    fn outer(&self, artefacts: &mut Vec<Finding>, undecided: &mut Vec<Undecided>) {
        let Some(grid) = self.largest() else { return };
        let table = self.table();
        let levels: Vec<time::Level> = self
            .scan
            .slots
            .iter()
            .zip(&grid.level)
            .filter(|(_, level)| level.is_finite())
            .map(|(slot, &value)| time::Level { seq: slot.seq, t_s: slot.t_s, value })
            .collect();
        let which: Vec<usize> =
            (0..grid.level.len()).filter(|&slot| grid.level[slot].is_finite()).collect();
        let values: Vec<f64> = levels.iter().map(|level| level.value).collect();
        let mut course = time::Course::of(&levels, self.min_effect);
        // A slow line is as long as a slot: bursts are sought in shorter parts.
        course.bursts = None;
        let (parts, bursts) = self.bursts();
        artefacts.extend(bursts.map(|bursts| time::burst_finding(table, &parts, &bursts)));
        let axis = self.scan.outer_axis();
        let name = |place: usize| axis.ids[self.scan.slots[which[place]].line];
        // A step where the node changes may be the node's.
        let node = |place: usize| axis.nodes[self.scan.slots[which[place]].line];
        course.steps.retain(|&(at, delta, _)| {
            let is_border = node(at).is_some() && node(at) != node(at - 1);
            if is_border {
                undecided.push(Undecided {
                    what: format!("{} from {} on", axis.name, name(at)),
                    devices: Vec::new(),
                    why: format!(
                        "time × {:.3} from there on, where the NUMA node and the time change together",
                        delta.exp()
                    ),
                });
            }
            !is_border
        });
        let mut found = time::findings(table, &levels, &course);
        for finding in &mut found {
            if let (Kind::TimeStep, Some(effect)) = (finding.kind, finding.effect) {
                let at =
                    course.steps.iter().find(|step| ((-step.1).exp() - effect.ratio).abs() < 1e-12);
                if let Some((at, ..)) = at {
                    finding.facts.push(format!(
                        "at {} {} (position {at} of {} in the scan)",
                        axis.name,
                        name(*at),
                        levels.len()
                    ));
                }
            }
        }
        artefacts.extend(found);
        let rest: Vec<f64> =
            values.iter().zip(&course.model).map(|(value, model)| value - model).collect();
        let sd = robust_sd(&rest, median(&mut rest.clone()));
        let border = self.min_effect.max(4.0 * sd);
        let slow: Vec<usize> = (0..rest.len()).filter(|&at| rest[at] > border).collect();
        if !slow.is_empty() {
            let most = slow.iter().map(|&at| rest[at]).fold(0.0, f64::max);
            undecided.push(Undecided {
                what: format!(
                    "{} {} ({} of {})",
                    axis.name,
                    names(slow.iter().map(|&at| name(at))),
                    slow.len(),
                    rest.len()
                ),
                devices: Vec::new(),
                why: format!(
                    "slower by up to {:.1} %, but each was visited once, so it may be the CPU or \
                     the moment",
                    100.0 * (1.0 - (-most).exp())
                ),
            });
        }
    }

    /// Windows shorter than a slot that are slow, whichever place is measured in them, in levels of
    /// a few points.
    fn bursts(&self) -> (Vec<time::Level>, Option<time::Bursts>) {
        let scan = &self.scan;
        let points: usize = scan.grids.len() * scan.slots.len() * scan.inner();
        let width = if points <= 4000 { 4 } else { 8 };
        let mut levels: Vec<time::Level> = Vec::new();
        for (at, slot) in scan.slots.iter().enumerate() {
            for grid in &scan.grids {
                for lines in scan.visited.chunks(width) {
                    let mut values: Vec<f64> = lines
                        .iter()
                        .map(|&line| grid.rest(scan, at, line))
                        .filter(|value| value.is_finite())
                        .collect();
                    if values.len() * 2 >= width.min(lines.len()) && !values.is_empty() {
                        let seq = grid.seq(at, lines[0]);
                        let value = median(&mut values);
                        levels.push(time::Level { seq, t_s: slot.t_s, value });
                    }
                }
            }
        }
        let bursts = time::Course::of(&levels, self.min_effect).bursts;
        (levels, bursts)
    }

    /// Single cells.
    fn cells(&self, undecided: &mut Vec<Undecided>) {
        let Some(grid) = self.largest() else { return };
        let border = (6.0 * grid.point_sd).max(2.0 * self.min_effect);
        let (slow, all) = grid.count_beyond(&self.scan, border);
        let few = self.scan.slots.len() < 8 || self.scan.inner() < 3;
        let spread = self.scan.grids.iter().map(Grid::range).fold(0.0, f64::max);
        if few && spread > self.min_effect {
            undecided.push(Undecided {
                what: format!("differences of up to × {:.2} in time", spread.exp()),
                devices: Vec::new(),
                why: "too few points to tell what belongs to a place".to_owned(),
            });
        } else if slow > 0 {
            undecided.push(Undecided {
                what: format!("{slow} of {all} single cells"),
                devices: Vec::new(),
                why: "slow beyond their row and column, but each was visited once".to_owned(),
            });
        }
    }

    fn confounded(&self, undecided: Vec<Undecided>) -> Option<Finding> {
        if undecided.is_empty() {
            return None;
        }
        let table = self.table();
        let mut finding = Finding::new(Kind::Confounded, Some(table.sweep), Some(&table.load));
        finding.devices =
            sorted(undecided.iter().flat_map(|undecided| undecided.devices.iter().copied()));
        // Lines with one reason are one fact.
        let mut whys: Vec<(String, Vec<String>)> = Vec::new();
        for Undecided { what, why, .. } in undecided {
            match whys.iter_mut().find(|(known, _)| *known == why) {
                Some((_, names)) => names.push(what),
                None => whys.push((why, vec![what])),
            }
        }
        for (why, names) in whys {
            let shown = names.len().min(MOST_NAMES);
            let more = if names.len() > shown {
                format!(" and {} more", names.len() - shown)
            } else {
                String::new()
            };
            finding.facts.push(format!("{}{more}: {why}", names[..shown].join(", ")));
        }
        let outer = self.scan.outer_axis().name;
        finding.inference = if self.is_ordered {
            format!(
                "One block in a fixed order, {outer} by {outer}: what differs along the scan is \
                 explained by the time as well as by the place."
            )
        } else {
            "The order of measurement is not known, so nothing tells place from time.".to_owned()
        };
        let command = if table.sweep.is_pair() { "core-pair" } else { "h2d" };
        let devices = if finding.devices.is_empty() {
            String::new()
        } else {
            let healthy = self
                .scan
                .inner_axis()
                .ids
                .iter()
                .filter(|id| !finding.devices.contains(id))
                .take(2);
            let list: Vec<String> =
                finding.devices.iter().chain(healthy).map(ToString::to_string).collect();
            format!(" --devices {}", list.join(","))
        };
        finding.next = format!(
            "Measure again in random order: `cluster-health {command}{devices} --repeats 3 --out \
             DIR` visits everything in three randomised blocks and confirms what is suspected."
        );
        self.assumptions(&mut finding);
        Some(finding)
    }
}

/// Standard deviation of healthy lines.
fn healthy_spread(deviations: &[f64]) -> f64 {
    let healthy = || deviations.iter().filter(|d| d.is_finite() && d.abs() < WIDEST_HEALTHY);
    let lines = healthy().count() as f64;
    let square: f64 = healthy().map(|d| d * d).sum();
    ((square + PRIOR_LINES * PRIOR_SPREAD * PRIOR_SPREAD) / (lines + PRIOR_LINES)).sqrt()
}

/// Members of about the same effect together.
fn group(mut found: Vec<(usize, BySize)>) -> Vec<Vec<(usize, BySize)>> {
    let effect = |by_size: &BySize| {
        by_size.iter().rev().flatten().next().map_or(0.0, |recurrence| recurrence.effect)
    };
    found.sort_by(|a, b| effect(&a.1).total_cmp(&effect(&b.1)).then(a.0.cmp(&b.0)));
    let mut groups: Vec<Vec<(usize, BySize)>> = Vec::new();
    for member in found {
        let own = effect(&member.1);
        match groups.last_mut() {
            Some(group)
                if group.last().is_some_and(|(_, last)| {
                    let last = effect(last);
                    own - last <= 0.05_f64.max(0.25 * own.abs()) && own.signum() >= last.signum()
                }) =>
            {
                group.push(member);
            }
            _ => groups.push(vec![member]),
        }
    }
    groups
}

/// The quantile on the fast side that a level is, of so many.
fn level(values: &mut [f64]) -> f64 {
    let q = if values.len() <= 4 { 0.34 } else { 0.5 };
    quantile(values, q)
}
