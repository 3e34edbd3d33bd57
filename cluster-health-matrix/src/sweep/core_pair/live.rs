//! Ranks that are processes of their own.

use cluster_health_core::Machine;

use super::PairRunner;
use crate::error::Result;
use crate::plan::CorePairPlan;

/// Whether this machine's ranks can be had at all, found out without starting them.
pub(super) fn ready(machine: &Machine) -> Result<()> {
    Err(cluster_health_core::Error::Unavailable {
        what: format!("the pair matrix on the {} backend", machine.backend()),
        message: "live ranks are not built yet".to_owned(),
    }
    .into())
}

/// The ranks of `plan`, started and ready for the first point.
pub(super) fn core_pair_runner<'a>(
    machine: &'a Machine,
    _plan: &'a CorePairPlan,
) -> Result<Box<dyn PairRunner + 'a>> {
    match ready(machine) {
        Ok(()) => Err(crate::Error::Cancelled),
        Err(error) => Err(error),
    }
}
