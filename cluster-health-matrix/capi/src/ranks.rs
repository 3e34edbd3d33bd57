//! Ranks of a pair.

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use cluster_health_core::RankGroup;

use crate::error::{Failure, Status, guard, guard_or};
use crate::text::cleared;

/// One rank's membership in a group of two, for `core_pair` on a real machine. One call at a time
/// uses it; a second one is `CLH_STATUS_BUSY`.
#[derive(Debug)]
pub struct Group(Mutex<Arc<RankGroup>>);

impl Group {
    fn new(group: RankGroup) -> Box<Self> {
        Box::new(Self(Mutex::new(Arc::new(group))))
    }

    /// The membership, for one call.
    pub(crate) fn claim(&self) -> Result<MutexGuard<'_, Arc<RankGroup>>, Failure> {
        match self.0.try_lock() {
            Ok(group) => Ok(group),
            // The messages of a call that panicked are the other rank's problem, which times out.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let message = "group: another call uses it; every rank has a group of its own";
                Err(Failure::new(Status::Busy, message))
            }
        }
    }
}

fn bound(timeout_ms: u64) -> Duration {
    Duration::from_millis(if timeout_ms == 0 { 30_000 } else { timeout_ms })
}

/// The two ranks of a pair as threads of this process: each of two threads that do nothing else
/// calls `clh_sweep` or `clh_record` with its own group and the same plan. `timeout_ms` bounds
/// every wait for the other rank; 0 is 30 s.
#[unsafe(no_mangle)]
pub extern "C" fn clh_group_threads(
    timeout_ms: u64,
    rank0: Option<&mut MaybeUninit<Option<Box<Group>>>>,
    rank1: Option<&mut MaybeUninit<Option<Box<Group>>>>,
) -> Status {
    guard(|| {
        let (rank0, rank1) = (cleared("rank0", rank0), cleared("rank1", rank1));
        let (rank0, rank1) = (rank0?, rank1?);
        let groups = RankGroup::threads(2)?.into_iter().map(|mut group| {
            group.set_timeout(bound(timeout_ms));
            Group::new(group)
        });
        for (place, group) in [rank0, rank1].into_iter().zip(groups) {
            *place = Some(group);
        }
        Ok(Status::Ok)
    })
}

/// This process as one of the ranks that a launcher (torchrun, mpirun, srun) started; waits for the
/// others, at most `timeout_ms` (0: 30 s), which then bounds every wait. `*group` is NULL when no
/// launcher started this process as one of several ranks.
#[unsafe(no_mangle)]
pub extern "C" fn clh_group_from_environment(
    timeout_ms: u64,
    group: Option<&mut MaybeUninit<Option<Box<Group>>>>,
) -> Status {
    guard(|| {
        let group = cleared("group", group)?;
        *group = RankGroup::from_environment(bound(timeout_ms))?.map(Group::new);
        Ok(Status::Ok)
    })
}

/// This rank's number, from 0; also 0 for NULL, and while a call uses the group.
#[unsafe(no_mangle)]
pub extern "C" fn clh_group_rank(group: Option<&Group>) -> u32 {
    guard_or(0, || group.and_then(|group| group.claim().ok()).map_or(0, |group| group.rank()))
}

/// Leaves the group; NULL is fine. The other rank's calls then fail instead of waiting.
#[unsafe(no_mangle)]
pub extern "C" fn clh_group_free(group: Option<Box<Group>>) {
    guard_or((), || drop(group));
}
