//! Classes of cells that belong together: those of a device, of a NUMA node, of a kind of pair.

use std::collections::BTreeMap;

use ndarray::Array2;
use serde::Serialize;

use crate::matrix::Axis;
use crate::samples::Sweep;
use crate::student::to_f64;

/// Kinds of pairs, by how far the CPUs of both ranks are from each other.
pub(crate) const PAIR_CLASSES: [&str; 4] = ["same_cpu", "smt_sibling", "same_node", "other_node"];

/// What a class is called within its axis: an id, or a kind of pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(untagged)]
#[allow(clippy::exhaustive_enums, reason = "the two shapes are the file format")]
pub enum ClassId {
    /// Id of a device, NUMA node or CPU.
    Number(u32),
    /// `same_cpu`, `smt_sibling`, `same_node` or `other_node`.
    Word(&'static str),
}

impl std::fmt::Display for ClassId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(id) => write!(f, "{id}"),
            Self::Word(word) => f.write_str(word),
        }
    }
}

#[derive(Debug, Clone)]
enum Members {
    Rows(Vec<Option<usize>>),
    Columns(Vec<Option<usize>>),
    /// Row-major.
    Cells(Vec<Option<usize>>),
}

/// A partition of the cells of a matrix into classes.
#[derive(Debug, Clone)]
pub(crate) struct ClassAxis {
    /// `device`, `numa_node`, `rank0_numa_node`, `rank1_numa_node`, `pair_class`, `cpu`,
    /// `rank0_cpu`, `rank1_cpu`.
    pub(crate) name: &'static str,
    pub(crate) ids: Vec<ClassId>,
    /// Single CPUs: as many classes as rows or columns.
    pub(crate) is_fine: bool,
    members: Members,
    columns: usize,
}

impl ClassAxis {
    /// The class of a cell by its position.
    pub(crate) fn of(&self, row: usize, column: usize) -> Option<usize> {
        match &self.members {
            Members::Rows(classes) => classes[row],
            Members::Columns(classes) => classes[column],
            Members::Cells(classes) => classes[row * self.columns + column],
        }
    }

    /// True when a class has all or no cells of a row.
    pub(crate) fn is_by_row(&self) -> bool {
        matches!(self.members, Members::Rows(_))
    }

    /// True for the axis of single CPUs along which `coarser` has its classes.
    pub(crate) fn splits(&self, coarser: &Self) -> bool {
        match (&self.members, &coarser.members) {
            (Members::Rows(_), Members::Rows(_)) | (Members::Columns(_), Members::Columns(_)) => {
                self.is_fine && !coarser.is_fine
            }
            _ => false,
        }
    }

    /// Mean of the finite values of each class, with their number; NaN where there is none.
    pub(crate) fn means(&self, values: &Array2<f64>) -> Vec<(f64, usize)> {
        let mut sums = vec![(0.0, 0_usize); self.ids.len()];
        for ((row, column), value) in values.indexed_iter() {
            if value.is_finite()
                && let Some(class) = self.of(row, column)
            {
                sums[class].0 += value;
                sums[class].1 += 1;
            }
        }
        sums.into_iter().map(|(sum, count)| (sum / to_f64(count), count)).collect()
    }
}

fn by_label(labels: &[Option<u32>]) -> (Vec<ClassId>, Vec<Option<usize>>) {
    let mut distinct: Vec<u32> = labels.iter().flatten().copied().collect();
    distinct.sort_unstable();
    distinct.dedup();
    let place = |label: &Option<u32>| label.and_then(|label| distinct.binary_search(&label).ok());
    let classes = labels.iter().map(place).collect();
    (distinct.into_iter().map(ClassId::Number).collect(), classes)
}

/// What is known of a CPU of an axis.
#[derive(Debug, Clone, Copy)]
struct Place {
    cpu: u32,
    core: Option<u32>,
    node: Option<u32>,
}

/// The kinds of the pairs of two axes.
#[derive(Debug)]
pub(crate) struct PairClasses {
    rows: Vec<Place>,
    columns: Vec<Place>,
}

impl PairClasses {
    /// `cores` names the core of each CPU.
    pub(crate) fn new(rows: &Axis, columns: &Axis, cores: &BTreeMap<u32, u32>) -> Self {
        let places = |axis: &Axis| {
            let labels = axis.ids.iter().zip(&axis.nodes);
            labels
                .map(|(&cpu, &node)| Place { cpu, core: cores.get(&cpu).copied(), node })
                .collect()
        };
        Self { rows: places(rows), columns: places(columns) }
    }

    /// The kind of a cell as an index into [`PAIR_CLASSES`]; `None` when the nodes are unknown.
    pub(crate) fn of(&self, row: usize, column: usize) -> Option<usize> {
        let (left, right) = (self.rows[row], self.columns[column]);
        if left.cpu == right.cpu {
            return Some(0);
        }
        if left.core.is_some() && left.core == right.core {
            return Some(1);
        }
        Some(if left.node? == right.node? { 2 } else { 3 })
    }
}

/// All partitions of a matrix with these axes, coarse ones first.
pub(crate) fn of_axes(
    sweep: Sweep,
    rows: &Axis,
    columns: &Axis,
    cores: &BTreeMap<u32, u32>,
) -> Vec<ClassAxis> {
    let ids = |axis: &Axis| axis.ids.iter().map(|id| Some(*id)).collect::<Vec<_>>();
    let make = |name, is_fine, (ids, members): (Vec<ClassId>, Members)| ClassAxis {
        name,
        ids,
        is_fine,
        members,
        columns: columns.len(),
    };
    let in_rows = |labels: &[Option<u32>]| {
        let (ids, classes) = by_label(labels);
        (ids, Members::Rows(classes))
    };
    let in_columns = |labels: &[Option<u32>]| {
        let (ids, classes) = by_label(labels);
        (ids, Members::Columns(classes))
    };
    if !sweep.is_pair() {
        return vec![
            make("device", false, in_columns(&ids(columns))),
            make("numa_node", false, in_rows(&rows.nodes)),
            make("cpu", true, in_rows(&ids(rows))),
        ];
    }
    let pairs = PairClasses::new(rows, columns, cores);
    let kinds = (0..rows.len())
        .flat_map(|row| (0..columns.len()).map(move |column| (row, column)))
        .map(|(row, column)| pairs.of(row, column))
        .collect();
    let words = PAIR_CLASSES.map(ClassId::Word).to_vec();
    vec![
        make("pair_class", false, (words, Members::Cells(kinds))),
        make("rank0_numa_node", false, in_rows(&rows.nodes)),
        make("rank1_numa_node", false, in_columns(&columns.nodes)),
        make("rank0_cpu", true, in_rows(&ids(rows))),
        make("rank1_cpu", true, in_columns(&ids(columns))),
    ]
}
