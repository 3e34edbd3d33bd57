//! What both ranks of a pair sweep must have in common: every decision and every sample.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::thread;

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{ByteSize, Machine};
use cluster_health_matrix::plan::CorePairPlan;
use cluster_health_matrix::samples::Sample;
use cluster_health_matrix::session::{RankZero, follow};
use cluster_health_matrix::sweep::{CorePairMatrix, core_pair_from};
use cluster_health_matrix::{CancelToken, Observer, Result};

/// Keeps the samples, and ends the sweep after some.
struct Keeper {
    samples: Vec<Sample>,
    most: usize,
}

impl Observer for Keeper {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.samples.push(sample.clone());
        Ok(())
    }

    fn is_cancelled(&self) -> bool {
        self.samples.len() >= self.most
    }
}

type Outcome = (CorePairMatrix, Vec<Sample>);

/// Both ranks from `before` on; rank r stops after `most[r]` points.
fn both(plan: &CorePairPlan, before: &[Sample], most: [usize; 2]) -> [Outcome; 2] {
    let groups = RankGroup::threads(2).unwrap();
    let ranks: Vec<_> = groups
        .into_iter()
        .zip(most)
        .map(|(group, most)| {
            let (plan, before) = (plan.clone(), before.to_vec());
            thread::spawn(move || {
                let machine = Machine::host().unwrap();
                let mut keeper = Keeper { samples: Vec::new(), most };
                let mut before = before.into_iter().map(Ok);
                let ranks = Some(&group);
                let result =
                    core_pair_from(&machine, &plan, ranks, &mut before, 0, &mut keeper).unwrap();
                (result, keeper.samples)
            })
        })
        .collect();
    let mut outcomes = ranks.into_iter().map(|rank| rank.join().unwrap());
    [outcomes.next().unwrap(), outcomes.next().unwrap()]
}

/// Without what each rank reads from its own clock.
fn shared(samples: &[Sample]) -> Vec<Sample> {
    let mut samples = samples.to_vec();
    samples.iter_mut().for_each(|sample| sample.t_ns = None);
    samples
}

fn plan() -> CorePairPlan {
    let machine = Machine::host().unwrap();
    let sizes = [8, 5000, 300_000].map(ByteSize);
    // So strict that every run adds blocks, and which ones depends on every time measured.
    CorePairPlan::builder().sizes(sizes).repeats(2).ci(Some(0.02)).seed(3).build(&machine).unwrap()
}

#[test]
fn both_ranks_have_the_same_samples_also_after_a_resume() {
    let plan = plan();
    let [first, second] = both(&plan, &[], [17, usize::MAX]);
    assert_eq!(first.1.len(), 17);
    assert_eq!(shared(&first.1), shared(&second.1));
    assert!(!first.0.end.complete && !second.0.end.complete);

    let [third, fourth] = both(&plan, &first.1, [usize::MAX; 2]);
    assert_eq!(shared(&third.1), shared(&fourth.1));
    assert!(third.0.end.timings.check_ns > 0);
    assert!(third.0.end.complete && fourth.0.end.complete);
    assert_eq!(third.0.per_rank_gbps(), fourth.0.per_rank_gbps());
    assert_eq!(third.1.first().map(|sample| sample.seq), Some(17));

    // The other rank is the one that stops.
    let [fifth, sixth] = both(&plan, &first.1, [usize::MAX, 5]);
    assert_eq!(shared(&fifth.1), shared(&sixth.1));
    assert_eq!(fifth.1.len(), 5);
}

#[test]
fn a_waiting_rank_can_be_cancelled() {
    let mut groups = RankGroup::threads(2).unwrap();
    let mut second = groups.pop().unwrap();
    let mut cancel = CancelToken::new();
    cancel.cancel();
    // Rank 0 lives and says nothing.
    let machine = Machine::host().unwrap();
    assert!(!follow(&machine, &plan(), &mut second, RankZero::MeasuresFirst, &mut cancel).unwrap());
}
