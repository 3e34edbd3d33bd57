//! `placement.json`: which cores should feed which device, as far as the difference is real.
//!
//! Core groups are the CPUs of a NUMA node. A group's value in a block is the median over its CPUs
//! of the logarithm of the rate at the largest size; groups are compared with the best one in a
//! model of group and block effects, whose residuals give the error (Bonferroni over all pairs of
//! groups and all devices, 1 %). Where no group is beyond noise, the answer is "any". A CPU is to be
//! avoided when it is below its node's median by more than noise and by more than 1 % in every one
//! of at least three blocks (1 % over all CPUs and devices), or when it cannot be bound.

use std::collections::BTreeMap;

use cluster_health_core::ByteSize;
use ndarray::Array2;
use serde::Serialize;

use crate::classes::PairClasses;
use crate::compare::{Logs, Ratio, list};
use crate::matrix::{Axis, Matrix};
use crate::report::Report;
use crate::run::{AffinityFile, SCHEMA_VERSION};
use crate::samples::Sweep;
use crate::stats::{median, robust_sd};
use crate::student::{Contrast, to_f64, two_sided_quantile};

/// Name of the file.
pub const PLACEMENT: &str = "placement.json";

/// Error over all comparisons of a file.
const LEVEL: f64 = 0.01;

/// A CPU that is slower by less is not avoided.
const SMALLEST: f64 = 0.01;

/// Blocks in which a CPU must be slow.
const ENOUGH_BLOCKS: usize = 3;

/// CPUs from which the scatter of a block can be told.
const ENOUGH_CPUS: usize = 8;

/// The content of `placement.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Placement {
    /// Version of the file.
    pub schema_version: u32,
    /// What the rates are.
    pub gbps: &'static str,
    /// One entry per device, sweep and memory kind.
    pub devices: Vec<DevicePlacement>,
}

/// Which cores should feed a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DevicePlacement {
    /// Physical id.
    pub device: u32,
    /// NUMA node next to it, where the system tells; a label, not a measurement.
    pub device_numa_node: Option<u32>,
    /// What was measured.
    pub sweep: Sweep,
    /// The rank whose CPU varies, for pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Load profile.
    pub load: String,
    /// Kind of memory, as in `run.json`.
    pub memory: &'static str,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// Blocks behind it.
    pub blocks: usize,
    /// Whether any core group is slower than the best one beyond noise.
    pub differences_exceed_noise: bool,
    /// CPUs to use: `any`, or the list of those in groups that are as good as the best.
    pub cores: String,
    /// Core groups, the fastest first.
    pub ranking: Vec<CoreGroup>,
    /// CPUs to leave out.
    pub avoid: Vec<Avoid>,
    /// What limits the ranking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The measured CPUs of a NUMA node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CoreGroup {
    /// NUMA node; `None` = unknown.
    pub numa_node: Option<u32>,
    /// Its measured CPUs, as a list with ranges.
    pub cpus: String,
    /// One CPU of each core, the first thread; `None` when siblings are unknown.
    pub one_per_core: Option<String>,
    /// Median over the group's CPUs, decimal GB/s.
    pub gbps: f64,
    /// ÷ that of the best group, with its 95 % interval; NaN (null) = unknown.
    pub to_best: Ratio,
    /// True unless the group is slower than the best one beyond noise.
    pub as_good_as_best: bool,
    /// NUMA node that held the host memory of its copies; `None` = unverified, and for pairs.
    pub memory_node: Option<u32>,
}

/// A CPU to leave out.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Avoid {
    /// The CPU.
    pub cpu: u32,
    /// `unbindable` or `slow`.
    pub kind: &'static str,
    /// Rate ÷ its node's median, for slow ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// In words.
    pub reason: String,
}

/// Logarithms of the rates of one device: blocks × CPUs; NaN = not measured.
struct Table<'a> {
    device: u32,
    rank: Option<u32>,
    cpus: &'a Axis,
    /// Of the estimates.
    estimates: Vec<f64>,
    blocks: Vec<Vec<f64>>,
}

impl Placement {
    /// The placement that a run supports.
    #[must_use]
    pub fn of(report: &Report) -> Self {
        let cores = report.affinity.as_ref().map(AffinityFile::cores).unwrap_or_default();
        let has_idle = report.matrices.iter().any(|matrix| matrix.load == "idle");
        let mut devices = Vec::new();
        for (matrix, blocks) in report.matrices.iter().zip(&report.blocks) {
            if has_idle && matrix.load != "idle" {
                continue;
            }
            // The largest size of which anything was measured.
            let slices: Vec<_> = matrix.slices().collect();
            let Some(size) = slices.iter().rposition(|slice| slice.measured().next().is_some())
            else {
                continue;
            };
            let rows: Vec<usize> = (0..matrix.rows.len()).collect();
            let columns: Vec<usize> = (0..matrix.columns.len()).collect();
            let logs = Logs::of(matrix, blocks, size, &rows, &columns);
            let tables = tables(report, matrix, &logs, &cores);
            let count = tables.len();
            devices.extend(tables.iter().map(|table| {
                of_table(report, matrix, matrix.sizes[size], table, &cores, LEVEL / to_f64(count))
            }));
        }
        Self { schema_version: SCHEMA_VERSION, gbps: "decimal, 1e9 bytes per second", devices }
    }
}

fn tables<'a>(
    report: &Report,
    matrix: &'a Matrix,
    logs: &Logs,
    cores: &BTreeMap<u32, u32>,
) -> Vec<Table<'a>> {
    if !matrix.sweep.is_pair() {
        let column = |values: &Array2<f64>, at: usize| values.column(at).to_vec();
        let table = |(at, device): (usize, &u32)| Table {
            device: *device,
            rank: None,
            cpus: &matrix.rows,
            estimates: column(&logs.cells, at),
            blocks: logs.blocks.iter().map(|block| column(block, at)).collect(),
        };
        return matrix.columns.ids.iter().enumerate().map(table).collect();
    }
    let plan = &report.manifest.plan;
    let pair = plan.core_pair.as_ref().map(|plan| plan.device_pair.map(|device| device.0));
    let Some(pair) = pair.or_else(|| plan.import.as_ref()?.device_pair) else {
        return Vec::new();
    };
    // Ranks that share a core say nothing about where either should run.
    let classes = PairClasses::new(&matrix.rows, &matrix.columns, cores);
    let apart = |row: usize, column: usize| !matches!(classes.of(row, column), Some(0 | 1));
    let along = |values: &Array2<f64>, by_row: bool| {
        let mut sums =
            vec![(0.0, 0_usize); if by_row { matrix.rows.len() } else { matrix.columns.len() }];
        for ((row, column), value) in values.indexed_iter() {
            if value.is_finite() && apart(row, column) {
                let sum = &mut sums[if by_row { row } else { column }];
                sum.0 += value;
                sum.1 += 1;
            }
        }
        sums.into_iter().map(|(sum, count)| sum / to_f64(count)).collect::<Vec<f64>>()
    };
    let table = |(rank, by_row, cpus): (u32, bool, &'a Axis)| Table {
        device: pair[usize::from(!by_row)],
        rank: Some(rank),
        cpus,
        estimates: along(&logs.cells, by_row),
        blocks: logs.blocks.iter().map(|block| along(block, by_row)).collect(),
    };
    [(0, true, &matrix.rows), (1, false, &matrix.columns)].into_iter().map(table).collect()
}

/// Positions of the measured CPUs by NUMA node.
fn groups(table: &Table<'_>) -> BTreeMap<Option<u32>, Vec<usize>> {
    let mut groups = BTreeMap::<_, Vec<usize>>::new();
    for (at, estimate) in table.estimates.iter().enumerate() {
        if estimate.is_finite() {
            groups.entry(table.cpus.nodes[at]).or_default().push(at);
        }
    }
    groups
}

fn middle(values: &[f64], places: &[usize]) -> f64 {
    let mut known: Vec<f64> =
        places.iter().map(|at| values[*at]).filter(|value| value.is_finite()).collect();
    median(&mut known)
}

fn of_table(
    report: &Report,
    matrix: &Matrix,
    bytes: ByteSize,
    table: &Table<'_>,
    cores: &BTreeMap<u32, u32>,
    level: f64,
) -> DevicePlacement {
    let groups = groups(table);
    let avoid = avoid(report, table, &groups, level);
    let left_out = |cpu: u32| avoid.iter().any(|avoid| avoid.cpu == cpu);
    let mut ranking: Vec<(f64, Vec<usize>, CoreGroup)> = rank(table, &groups, level)
        .into_iter()
        .map(|(node, value, to_best, as_good_as_best)| {
            let places = groups[&node].clone();
            let cpus: Vec<u32> = places.iter().map(|at| table.cpus.ids[*at]).collect();
            let memory =
                node.and_then(|node| report.pages.get(&node)).filter(|_| table.rank.is_none());
            let group = CoreGroup {
                numa_node: node,
                cpus: list(&cpus),
                one_per_core: one_per_core(&cpus, cores).map(|cpus| list(&cpus)),
                gbps: value.exp(),
                to_best,
                as_good_as_best,
                memory_node: memory
                    .and_then(|pages| pages.iter().max_by_key(|(_, count)| **count))
                    .map(|(node, _)| *node),
            };
            (value, places, group)
        })
        .collect();
    ranking.sort_by(|left, right| right.0.total_cmp(&left.0));
    let exceed = ranking.iter().any(|(_, _, group)| !group.as_good_as_best);
    let cores = if exceed {
        let mut good: Vec<u32> = ranking
            .iter()
            .filter(|(_, _, group)| group.as_good_as_best)
            .flat_map(|(_, places, _)| places.iter().map(|at| table.cpus.ids[*at]))
            .filter(|cpu| !left_out(*cpu))
            .collect();
        good.sort_unstable();
        list(&good)
    } else {
        "any".to_owned()
    };
    let note = match (ranking.len(), table.blocks.len()) {
        (_, 0 | 1) => Some("one block: what is noise cannot be told".to_owned()),
        (1, _) => Some("one core group: nothing to rank".to_owned()),
        _ => None,
    };
    DevicePlacement {
        device: table.device,
        device_numa_node: report
            .manifest
            .devices
            .iter()
            .find(|device| device.id == table.device)
            .and_then(|device| device.numa_node),
        sweep: matrix.sweep,
        rank: table.rank,
        load: matrix.load.clone(),
        memory: matrix.memory.as_str(),
        bytes,
        blocks: table.blocks.len(),
        differences_exceed_noise: exceed,
        cores,
        ranking: ranking.into_iter().map(|(_, _, group)| group).collect(),
        avoid,
        note,
    }
}

/// Of every group its node, value, ratio to the best group, and whether it is as good.
fn rank(
    table: &Table<'_>,
    groups: &BTreeMap<Option<u32>, Vec<usize>>,
    level: f64,
) -> Vec<(Option<u32>, f64, Ratio, bool)> {
    // Blocks in which every group was measured.
    let blocks: Vec<Vec<f64>> = table
        .blocks
        .iter()
        .map(|block| groups.values().map(|places| middle(block, places)).collect::<Vec<_>>())
        .filter(|block| block.iter().all(|value| value.is_finite()))
        .collect();
    let (count, size) = (to_f64(blocks.len()), to_f64(groups.len()));
    let means: Vec<f64> = if blocks.is_empty() {
        groups.values().map(|places| middle(&table.estimates, places)).collect()
    } else {
        (0..groups.len())
            .map(|at| blocks.iter().map(|block| block[at]).sum::<f64>() / count)
            .collect()
    };
    let grand = means.iter().sum::<f64>() / size;
    let squares: f64 = blocks
        .iter()
        .map(|block| {
            let effect = block.iter().sum::<f64>() / size - grand;
            block
                .iter()
                .zip(&means)
                .map(|(value, mean)| (value - mean - effect).powi(2))
                .sum::<f64>()
        })
        .sum();
    let degrees = (count - 1.0) * (size - 1.0);
    let error = (2.0 * squares / degrees / count).sqrt();
    let best = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let pairs = (size * (size - 1.0) / 2.0).max(1.0);
    groups
        .keys()
        .zip(&means)
        .map(|(node, mean)| {
            let contrast = if degrees >= 1.0 {
                Contrast { difference: mean - best, error, degrees }
            } else {
                Contrast::without_error(mean - best)
            };
            (*node, *mean, Ratio::of(&contrast), contrast.p() > level / pairs)
        })
        .collect()
}

/// The first listed CPU of each core; `None` when siblings are unknown.
fn one_per_core(cpus: &[u32], cores: &BTreeMap<u32, u32>) -> Option<Vec<u32>> {
    let mut seen = std::collections::BTreeSet::new();
    let mut kept = Vec::new();
    for cpu in cpus {
        if seen.insert(cores.get(cpu)?) {
            kept.push(*cpu);
        }
    }
    Some(kept)
}

fn avoid(
    report: &Report,
    table: &Table<'_>,
    groups: &BTreeMap<Option<u32>, Vec<usize>>,
    level: f64,
) -> Vec<Avoid> {
    let records = report.affinity.iter().flat_map(|affinity| &affinity.cpus);
    let mut found: Vec<Avoid> = records
        .filter(|record| record.bindable == Some(false))
        .map(|record| Avoid {
            cpu: record.cpu.0,
            kind: "unbindable",
            ratio: None,
            reason: record.reason.clone().unwrap_or_else(|| "cannot be bound".to_owned()),
        })
        .collect();
    let measured: Vec<usize> = groups.values().flatten().copied().collect();
    if table.blocks.len() < ENOUGH_BLOCKS || measured.len() < ENOUGH_CPUS {
        return found;
    }
    // Few CPUs have no median apart from themselves: then the matrix gives it.
    let center_of = |values: &[f64], places: &[usize]| {
        middle(values, if places.len() < ENOUGH_CPUS { &measured } else { places })
    };
    let deviations = |values: &[f64]| {
        let mut deviations = vec![f64::NAN; values.len()];
        for places in groups.values() {
            let center = center_of(values, places);
            for at in places {
                deviations[*at] = values[*at] - center;
            }
        }
        deviations
    };
    // The chance that one CPU is that low in every block shall be `level` ÷ CPUs.
    let blocks = table.blocks.len();
    let chance = (level / to_f64(measured.len())).powf(1.0 / to_f64(blocks));
    let limit = two_sided_quantile(2.0 * chance, to_f64(measured.len()));
    let mut slow = vec![0_usize; table.estimates.len()];
    for block in &table.blocks {
        let deviations = deviations(block);
        let known: Vec<f64> =
            deviations.iter().copied().filter(|value| value.is_finite()).collect();
        let spread = robust_sd(&known, median(&mut known.clone()));
        let lowest = (limit * spread).max(SMALLEST);
        for (slow, deviation) in slow.iter_mut().zip(&deviations) {
            *slow += usize::from(*deviation < -lowest);
        }
    }
    let estimates = deviations(&table.estimates);
    for at in measured {
        if slow[at] == blocks {
            let ratio = estimates[at].exp();
            found.push(Avoid {
                cpu: table.cpus.ids[at],
                kind: "slow",
                ratio: Some(ratio),
                reason: format!(
                    "slower than the other CPUs beyond noise in each of {blocks} blocks, {ratio:.3} \
                     of their median"
                ),
            });
        }
    }
    found.sort_by_key(|avoid| avoid.cpu);
    found
}
