//! Effects of when and how was measured: they explain differences, and are no faults.

use super::Fitted;
use super::finding::Finding;
use super::fit::Fit;
use super::table::Table;

pub(crate) fn find(_fitted: &Fitted) -> Vec<Finding> {
    Vec::new()
}

pub(crate) fn bimodal(_table: &Table, _fits: &[Option<Fit>]) -> Option<Finding> {
    None
}
