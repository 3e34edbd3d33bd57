//! The map of a pod: many nodes measured with one plan, and which of them are odd.
//!
//! Compared are medians of cells, overall and per class. A node is odd when its ratio to the pod's
//! median is beyond the smallest effect and its distance, in robust standard deviations of the
//! nodes (1.4826 × MAD, and not below what its own noise explains), would not happen by chance:
//! Student's t with one degree of freedom less than there are nodes, Holm over nodes and matrices.
//! A class is taken against its node as a whole, its deviation pooled over the classes of an axis.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use cluster_health_core::ByteSize;
use serde::Serialize;

use super::{ClassId, CompareOptions, CompareVerdict, Logs, RunInfo, identity, setup};
use crate::classes::of_axes;
use crate::report::Report;
use crate::run::SCHEMA_VERSION;
use crate::samples::Sweep;
use crate::stats::{median, robust_sd};
use crate::student::{holm, to_f64, two_sided_p};

/// A class of cells of one node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NodeClass {
    /// As [`ClassRatio::axis`](super::ClassRatio::axis).
    pub axis: &'static str,
    /// Which one of the axis.
    pub id: ClassId,
    /// Median over its cells, decimal GB/s.
    pub median_gbps: f64,
    /// ÷ the median of this over the pod.
    pub ratio: f64,
    /// That ratio ÷ the node's own.
    pub relative: f64,
    /// Probability of a relative ratio as far from 1 by chance.
    pub p: f64,
    /// Apart from the same class of the other nodes.
    pub odd: bool,
}

/// One node in one matrix.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NodeRow {
    /// Host name, or what the caller calls the run.
    pub name: String,
    /// Position of the run in the caller's list.
    pub run: usize,
    /// Median over the cells that all nodes measured, decimal GB/s.
    pub median_gbps: f64,
    /// ÷ the pod's median.
    pub ratio: f64,
    /// Relative standard deviation of a visit between blocks; NaN (null) with one block.
    pub noise: f64,
    /// Probability of a ratio as far from 1 by chance.
    pub p: f64,
    /// Apart from the pod as a whole.
    pub odd: bool,
    /// Devices, NUMA nodes, kinds of pairs.
    pub classes: Vec<NodeClass>,
}

/// One matrix (sweep, load, memory, size) over the pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NodeMatrix {
    /// What was measured.
    pub sweep: Sweep,
    /// Load profile.
    pub load: String,
    /// Kind of memory, as in `run.json`.
    pub memory: &'static str,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// Cells that all nodes measured.
    pub cells: usize,
    /// Median over the nodes, decimal GB/s.
    pub median_gbps: f64,
    /// One row per run, in the caller's order.
    pub nodes: Vec<NodeRow>,
}

/// A pod: many runs of one plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PodMap {
    /// Version of the document.
    pub schema_version: u32,
    /// How it came out.
    pub verdict: CompareVerdict,
    /// The runs, in the caller's order.
    pub runs: Vec<RunInfo>,
    /// Differences below this share of the rate do not count.
    pub min_effect: f64,
    /// Family-wise error of all tests together.
    pub level: f64,
    /// Compared although the set-ups differ.
    pub forced: bool,
    /// Why the runs should not be compared, against the first one.
    pub differences: Vec<String>,
    /// What else a reader should know.
    pub notes: Vec<String>,
    /// Names of the odd nodes.
    pub odd: Vec<String>,
    /// One entry per sweep, load, memory kind and size.
    pub matrices: Vec<NodeMatrix>,
    /// What follows, in words.
    pub inference: Vec<String>,
    /// What was not compared.
    pub not_tested: Vec<String>,
}

/// The map of at least three runs of one plan; each comes with what the caller calls it.
#[must_use]
pub fn pod(runs: &[(&str, &Report)], options: &CompareOptions) -> PodMap {
    let mut map = PodMap {
        schema_version: SCHEMA_VERSION,
        verdict: CompareVerdict::Refused,
        runs: runs.iter().map(|(name, report)| RunInfo::of(name, report)).collect(),
        min_effect: options.min_effect,
        level: options.level,
        forced: false,
        differences: Vec::new(),
        notes: Vec::new(),
        odd: Vec::new(),
        matrices: Vec::new(),
        inference: Vec::new(),
        not_tested: Vec::new(),
    };
    let Some((first, others)) = runs.split_first() else { return map };
    for (name, other) in others {
        let found = setup::check(first.1, other);
        let told = |line: &String| format!("{} (A) and {name} (B): {line}", first.0);
        map.differences.extend(found.differences.iter().map(told));
        map.notes.extend(found.notes.iter().map(told));
    }
    if !map.differences.is_empty() {
        if !options.force {
            return map;
        }
        map.forced = true;
    }
    let names = names(&map.runs);
    for matrix in &first.1.matrices {
        for bytes in &matrix.sizes {
            map.matrices.extend(one_matrix(runs, identity(matrix), *bytes, &names));
        }
    }
    test(&mut map.matrices, options);
    tell(&mut map, &names);
    map
}

/// Host names where they are distinct, else what the caller calls the runs.
fn names(runs: &[RunInfo]) -> Vec<String> {
    let count = |host: &String| runs.iter().filter(|run| run.host.as_ref() == Some(host)).count();
    runs.iter()
        .map(|run| match &run.host {
            Some(host) if count(host) == 1 => host.clone(),
            Some(host) => format!("{host} ({})", run.name),
            None => run.name.clone(),
        })
        .collect()
}

fn one_matrix(
    runs: &[(&str, &Report)],
    key: (Sweep, &str, crate::matrix::Memory),
    bytes: ByteSize,
    names: &[String],
) -> Option<NodeMatrix> {
    // The position of this matrix and size in every run.
    let places: Vec<(usize, usize)> = runs
        .iter()
        .map(|(_, report)| {
            let matrix = report.matrices.iter().position(|other| identity(other) == key)?;
            let size = report.matrices[matrix].sizes.binary_search(&bytes).ok()?;
            Some((matrix, size))
        })
        .collect::<Option<_>>()?;
    let matrices: Vec<_> =
        runs.iter().zip(&places).map(|((_, report), place)| &report.matrices[place.0]).collect();
    let first = matrices[0];
    let common = |of: fn(&crate::matrix::Matrix) -> &crate::matrix::Axis| {
        let mut ids = of(first).ids.clone();
        ids.retain(|id| matrices.iter().all(|matrix| of(matrix).ids.contains(id)));
        ids
    };
    let (rows, columns) = (common(|matrix| &matrix.rows), common(|matrix| &matrix.columns));
    let place = |axis: &crate::matrix::Axis, ids: &[u32]| {
        let places: BTreeMap<u32, usize> =
            axis.ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        ids.iter().filter_map(|id| places.get(id).copied()).collect::<Vec<_>>()
    };
    let mut logs: Vec<Logs> = runs
        .iter()
        .zip(&places)
        .map(|((_, report), (matrix, size))| {
            let own = &report.matrices[*matrix];
            let (rows, columns) = (place(&own.rows, &rows), place(&own.columns, &columns));
            Logs::of(own, &report.blocks[*matrix], *size, &rows, &columns)
        })
        .collect();
    // Only cells that every node measured.
    let mut mask = logs[0].cells.mapv(|_| 0.0);
    for logs in &logs {
        mask += &(&logs.cells * 0.0);
    }
    for logs in &mut logs {
        logs.cells = &logs.cells + &mask;
    }
    let cells = mask.iter().filter(|value| value.is_finite()).count();
    if cells == 0 {
        return None;
    }
    let cores =
        runs[0].1.affinity.as_ref().map(crate::run::AffinityFile::cores).unwrap_or_default();
    let labels = |axis: &crate::matrix::Axis, ids: &[u32]| {
        let places = place(axis, ids);
        let nodes = places.iter().map(|at| axis.nodes[*at]).collect();
        crate::matrix::Axis::new(axis.name, ids.to_vec(), nodes)
    };
    let axes =
        of_axes(key.0, &labels(&first.rows, &rows), &labels(&first.columns, &columns), &cores);
    let medians: Vec<f64> =
        logs.iter().map(|logs| median(&mut finite(logs.cells.iter()))).collect();
    let center = median(&mut medians.clone());
    let mut nodes: Vec<NodeRow> = logs
        .iter()
        .enumerate()
        .map(|(run, logs)| NodeRow {
            name: names[run].clone(),
            run,
            median_gbps: medians[run].exp(),
            ratio: (medians[run] - center).exp(),
            noise: logs.noise,
            p: 1.0,
            odd: false,
            classes: Vec::new(),
        })
        .collect();
    for axis in axes.iter().filter(|axis| !axis.is_fine) {
        for (class, id) in axis.ids.iter().enumerate() {
            let of_node = |logs: &Logs| {
                let members = logs.cells.indexed_iter();
                let members =
                    members.filter(|((row, column), _)| axis.of(*row, *column) == Some(class));
                median(&mut finite(members.map(|(_, value)| value)))
            };
            let values: Vec<f64> = logs.iter().map(of_node).collect();
            if values.iter().any(|value| value.is_nan()) {
                continue;
            }
            let center_of_class = median(&mut values.clone());
            for (node, value) in nodes.iter_mut().zip(&values) {
                let ratio = value - center_of_class;
                node.classes.push(NodeClass {
                    axis: axis.name,
                    id: *id,
                    median_gbps: value.exp(),
                    ratio: ratio.exp(),
                    relative: (ratio - node.ratio.ln()).exp(),
                    p: 1.0,
                    odd: false,
                });
            }
        }
    }
    Some(NodeMatrix {
        sweep: key.0,
        load: key.1.to_owned(),
        memory: key.2.as_str(),
        bytes,
        cells,
        median_gbps: center.exp(),
        nodes,
    })
}

fn finite<T: Borrow<f64>>(values: impl Iterator<Item = T>) -> Vec<f64> {
    values.map(|value| *value.borrow()).filter(|value| value.is_finite()).collect()
}

/// Names what is odd: nodes as a whole, then classes of nodes.
fn test(matrices: &mut [NodeMatrix], options: &CompareOptions) {
    let smallest = options.smallest();
    for matrix in matrices.iter_mut() {
        let degrees = to_f64(matrix.nodes.len()) - 1.0;
        let own = |node: &NodeRow, cells: usize| node.noise.max(0.0) / to_f64(cells.max(1)).sqrt();
        let cells = matrix.cells;
        let ratios: Vec<f64> = matrix.nodes.iter().map(|node| node.ratio.ln()).collect();
        let spread = robust_sd(&ratios, median(&mut ratios.clone()));
        for node in &mut matrix.nodes {
            let deviation = spread.max(own(node, cells));
            node.p = chance(node.ratio.ln(), deviation, degrees);
        }
        let count = matrix.nodes.first().map_or(0, |node| node.classes.len());
        for class in 0..count {
            let axis = matrix.nodes[0].classes[class].axis;
            let pooled: Vec<f64> = matrix
                .nodes
                .iter()
                .flat_map(|node| &node.classes)
                .filter(|class| class.axis == axis)
                .map(|class| class.relative.ln())
                .collect();
            let classes = to_f64(pooled.len()) / to_f64(matrix.nodes.len());
            let spread = robust_sd(&pooled, median(&mut pooled.clone()));
            let degrees = (degrees * (classes - 1.0).max(1.0)).min(30.0);
            for node in &mut matrix.nodes {
                let deviation = spread.max(own(node, cells / count.max(1)));
                let relative = node.classes[class].relative.ln();
                node.classes[class].p = chance(relative, deviation, degrees);
            }
        }
    }
    let nodes = || matrices.iter().flat_map(|matrix| &matrix.nodes);
    let level = options.level / 2.0;
    let overall = holm(&nodes().map(|node| node.p).collect::<Vec<_>>(), level);
    let classes: Vec<f64> = nodes().flat_map(|node| &node.classes).map(|class| class.p).collect();
    let mut classes = holm(&classes, level).into_iter();
    let nodes = matrices.iter_mut().flat_map(|matrix| &mut matrix.nodes);
    for (node, rejected) in nodes.zip(overall) {
        node.odd = rejected && node.ratio.ln().abs() >= smallest;
        for class in &mut node.classes {
            let rejected = classes.next().unwrap_or_default();
            class.odd = rejected
                && class.ratio.ln().abs() >= smallest
                && class.relative.ln().abs() >= smallest;
        }
    }
}

fn chance(value: f64, deviation: f64, degrees: f64) -> f64 {
    if value == 0.0 { 1.0 } else { two_sided_p((value / deviation).abs(), degrees) }
}

fn tell(map: &mut PodMap, names: &[String]) {
    let is_odd = |node: &NodeRow| node.odd || node.classes.iter().any(|class| class.odd);
    for (run, name) in names.iter().enumerate() {
        let rows =
            || map.matrices.iter().flat_map(|matrix| &matrix.nodes).filter(|row| row.run == run);
        if !rows().any(is_odd) {
            continue;
        }
        let mut what: Vec<String> = Vec::new();
        let whole = rows().filter(|row| row.odd).map(|row| row.ratio).collect::<Vec<_>>();
        if !whole.is_empty() {
            what.push(format!("as a whole {:.4} of the pod", median(&mut whole.clone())));
        }
        for class in rows().flat_map(|row| &row.classes).filter(|class| class.odd) {
            let text = format!("{} {}", class.axis.replace('_', " "), class.id);
            if !what.contains(&text) {
                what.push(text);
            }
        }
        map.inference.push(format!("{name} is odd: {}", what.join(", ")));
        map.odd.push(name.clone());
    }
    map.verdict = if map.matrices.is_empty() {
        map.not_tested.push("nothing: the runs have no measured cell in common".to_owned());
        CompareVerdict::Inconclusive
    } else if map.odd.is_empty() {
        let smallest = 100.0 * map.min_effect;
        map.inference.push(format!("no node is apart from the pod by more than {smallest} %"));
        CompareVerdict::NoDifference
    } else {
        CompareVerdict::Differences
    };
    if map.forced {
        map.inference.push("the set-ups differ: every ratio above may come from that".to_owned());
    }
    map.not_tested.push("single CPUs and cells: compare two runs for those".to_owned());
}
