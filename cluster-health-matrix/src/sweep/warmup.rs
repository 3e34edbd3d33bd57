//! When a point has settled: the rule that ends its warm-up.

use crate::stats::to_f64;

/// Most discarded transfers of one point.
const MOST_TRANSFERS: usize = 32;
/// Longest warm-up of one point, nanoseconds.
const LONGEST_NS: u64 = 100_000_000;
/// Two consecutive transfers agree within this ratio.
const AGREEMENT: f64 = 1.05;
/// A settled transfer is this close to the best one seen for its device and size. Agreement alone
/// accepts a stall that several transfers share.
const NEAR_BEST: f64 = 1.25;

/// Times that differ by less are the same to the clock and to a cache line on its way.
const RESOLUTION_NS: u64 = 100;

/// What to do after a discarded transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Again,
    Settled,
    GiveUp,
}

/// The warm-up of one point.
#[derive(Debug)]
pub(crate) struct Warmup {
    /// Exactly so many transfers, when given.
    exactly: Option<u32>,
    /// The thread migrated or memory was allocated since the last transfer: caches and
    /// translations are cold, so one good transfer is not enough.
    cold: bool,
    /// A run of transfers that agree is enough, however slow.
    takes_steady: bool,
}

/// Transfers of such a run, and the ratio that all of them agree within.
const STEADY: usize = 6;
const STEADY_AGREEMENT: f64 = 1.15;

impl Warmup {
    pub(crate) fn new(exactly: Option<u32>, cold: bool) -> Self {
        Self { exactly, cold, takes_steady: false }
    }

    /// In a sampled sweep most cells are visited once: what is slow by nature never meets a best of
    /// its own, and must not cost 32 transfers at every visit.
    pub(crate) const fn in_sample(mut self, is_sampled: bool) -> Self {
        self.takes_steady = is_sampled;
        self
    }

    /// True when the point needs no transfer at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.exactly == Some(0)
    }

    /// `seen` are the point's discarded transfers so far (at least one), `best` the fastest
    /// transfer before this point that it can be compared with, where there was one.
    pub(crate) fn verdict(&self, seen: &[u64], best: Option<u64>) -> Verdict {
        if let Some(exactly) = self.exactly {
            return if seen.len() >= exactly as usize { Verdict::Settled } else { Verdict::Again };
        }
        let Some((&last, before)) = seen.split_last() else { return Verdict::Again };
        let within = |a: u64, b: u64, ratio: f64| {
            a.abs_diff(b) <= RESOLUTION_NS || to_f64(a.max(b)) <= to_f64(a.min(b)) * ratio
        };
        let near_best = best.is_none_or(|best| last <= best || within(last, best, NEAR_BEST));
        let agrees = before.last().is_some_and(|&previous| within(last, previous, AGREEMENT));
        let warm_enough = agrees || (!self.cold && best.is_some());
        let is_steady = self.takes_steady
            && agrees
            && seen.len().checked_sub(STEADY).is_some_and(|first| {
                let run = &seen[first..];
                let (least, most) = (run.iter().min(), run.iter().max());
                least.zip(most).is_some_and(|(a, b)| within(*a, *b, STEADY_AGREEMENT))
            });
        if near_best && warm_enough || is_steady {
            Verdict::Settled
        } else if seen.len() >= MOST_TRANSFERS || seen.iter().sum::<u64>() >= LONGEST_NS {
            Verdict::GiveUp
        } else {
            Verdict::Again
        }
    }
}

/// No transfer yet.
const NEVER: u64 = u64::MAX;

/// Points of a class that give up one after another: then the class has become slower for good, and
/// 32 transfers at every further point would tell nothing new.
const SLOWER_FOR_GOOD: u8 = 3;

/// The fastest transfers of one size, timed or not. Cells of a class are normally equally fast: the
/// devices of an H2D sweep, what the CPUs of a pair share.
#[derive(Debug)]
pub(crate) struct Best {
    classes: Vec<Class>,
    /// Fastest transfer of each cell and the era of its class that it belongs to.
    of_cell: Vec<(u64, u16)>,
}

#[derive(Debug, Clone, Copy)]
struct Class {
    best: u64,
    /// Counts how often the class became slower for good: what was seen before no longer counts.
    era: u16,
    gave_up: u8,
}

impl Best {
    pub(crate) fn new(classes: usize, cells: usize) -> Self {
        let class = Class { best: NEVER, era: 0, gave_up: 0 };
        Self { classes: vec![class; classes], of_cell: vec![(NEVER, 0); cells] }
    }

    /// What a transfer of this cell is compared with: the cell's own best, so that a core that is
    /// slow by nature settles too, and before its first visit its class's.
    pub(crate) fn of(&self, class: usize, cell: usize) -> Option<u64> {
        let Class { best, era, .. } = self.classes[class];
        let (own, own_era) = self.of_cell[cell];
        let best = match (own, best) {
            (NEVER, best) => best,
            // Of an earlier era: the cell may have been slow before its class became so.
            (own, best) if own_era != era && best != NEVER => own.max(best),
            (own, _) => own,
        };
        (best != NEVER).then_some(best)
    }

    /// Takes notice of how a measured point's warm-up ended, before its times are noted.
    pub(crate) fn ended(&mut self, class: usize, settled: bool) {
        let class = &mut self.classes[class];
        class.gave_up = if settled { 0 } else { class.gave_up + 1 };
        if class.gave_up == SLOWER_FOR_GOOD {
            *class = Class { best: NEVER, era: class.era.wrapping_add(1), gave_up: 0 };
        }
    }

    pub(crate) fn note(&mut self, class: usize, cell: usize, time: u64) {
        let class = &mut self.classes[class];
        class.best = time.min(class.best);
        let (own, own_era) = &mut self.of_cell[cell];
        *own = if *own_era == class.era { time.min(*own) } else { time };
        *own_era = class.era;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cold_point_needs_two_transfers_that_agree() {
        let warmup = Warmup::new(None, true);
        assert_eq!(warmup.verdict(&[10_000], None), Verdict::Again);
        assert_eq!(warmup.verdict(&[10_000, 10_400], None), Verdict::Settled);
        assert_eq!(warmup.verdict(&[10_000, 10_600], None), Verdict::Again);
        assert_eq!(warmup.verdict(&[20_000, 10_000], None), Verdict::Again);
        assert_eq!(warmup.verdict(&[1000], Some(1000)), Verdict::Again);
    }

    #[test]
    fn a_warm_point_needs_one_transfer_near_the_best() {
        let warmup = Warmup::new(None, false);
        assert_eq!(warmup.verdict(&[1240], Some(1000)), Verdict::Settled);
        assert_eq!(warmup.verdict(&[1260], Some(1000)), Verdict::Again);
        assert_eq!(warmup.verdict(&[900], Some(1000)), Verdict::Settled);
        assert_eq!(warmup.verdict(&[1000], None), Verdict::Again);
    }

    #[test]
    fn a_stall_that_transfers_share_does_not_settle() {
        let warmup = Warmup::new(None, true);
        assert_eq!(warmup.verdict(&[5000, 5000, 5000], Some(1000)), Verdict::Again);
        assert_eq!(warmup.verdict(&[5000; 32], Some(1000)), Verdict::GiveUp);
        assert_eq!(warmup.verdict(&[60_000_000, 60_000_000], Some(1000)), Verdict::GiveUp);
    }

    #[test]
    fn differences_below_the_clock_are_none() {
        let warmup = Warmup::new(None, true);
        assert_eq!(warmup.verdict(&[160, 230], Some(150)), Verdict::Settled);
        assert_eq!(warmup.verdict(&[160, 270], Some(150)), Verdict::Again);
    }

    #[test]
    fn what_became_slower_for_good_is_the_new_best() {
        let mut best = Best::new(2, 3);
        for (class, cell, time) in [(0, 0, 100), (0, 1, 110), (1, 2, 50)] {
            best.ended(class, true);
            best.note(class, cell, time);
        }
        for settled in [false, false, true, false, false] {
            best.ended(0, settled);
            best.note(0, 0, 200);
            assert_eq!(best.of(0, 0), Some(100), "not three in a row");
        }
        best.ended(0, false);
        best.note(0, 0, 200);
        // The cell that was not visited since is compared with its class's new best.
        assert_eq!([best.of(0, 0), best.of(0, 1), best.of(1, 2)], [Some(200), Some(200), Some(50)]);
    }

    #[test]
    fn an_exact_number_is_exact() {
        assert!(Warmup::new(Some(0), true).is_empty());
        let warmup = Warmup::new(Some(2), true);
        assert_eq!(warmup.verdict(&[1000], Some(1)), Verdict::Again);
        assert_eq!(warmup.verdict(&[1000, 9000], Some(1)), Verdict::Settled);
    }
}
