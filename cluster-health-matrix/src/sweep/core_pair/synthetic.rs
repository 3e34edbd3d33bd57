//! Both ranks of a synthetic machine, in one process and virtual time.
//!
//! The machine has one clock, on which the binds of a point follow one another: `bind_ns` is their
//! sum, where live ranks bind at once. The ranks start together, so the skew is 0, and their times
//! are equal.

use cluster_health_core::load::{LoadGenerator, LoadRecord};
use cluster_health_core::machine::SyntheticPair;
use cluster_health_core::{CpuId, Machine, PointContext};

use super::{PairRunner, PlannedPair, ran_on};
use crate::error::{Error, Result};
use crate::plan::{CheckPolicy, CorePairPlan};
use crate::samples::{DataCheck, PointStatus, Sample};
use crate::sweep::engine::{loads_of, records_of};
use crate::sweep::warmup::{Verdict, Warmup};

pub(super) struct SyntheticRanks<'a> {
    machine: &'a Machine,
    plan: &'a CorePairPlan,
    ranks: SyntheticPair,
    bound: [Option<CpuId>; 2],
    /// Of each rank; nothing burns, but the CPUs that would are known.
    loads: Vec<LoadGenerator>,
}

impl<'a> SyntheticRanks<'a> {
    pub(super) fn new(
        machine: &'a Machine,
        plan: &'a CorePairPlan,
        ranks: SyntheticPair,
    ) -> Result<Self> {
        let devices = plan.load_devices(machine);
        let loads = |rank| loads_of(machine, &plan.loads, &devices, rank).transpose();
        let loads = [0, 1].into_iter().filter_map(loads).collect::<Result<_>>()?;
        Ok(Self { machine, plan, ranks, bound: [None; 2], loads })
    }

    /// Binds both ranks; true when one came from elsewhere, the reasons when one cannot.
    fn bind(&mut self, cpus: [CpuId; 2]) -> Result<bool, String> {
        let mut moved = false;
        let mut refused = Vec::new();
        for ((rank, cpu), bound) in (0..).zip(cpus).zip(&mut self.bound) {
            if *bound == Some(cpu) {
                continue;
            }
            *bound = None;
            match self.ranks.bind(rank, cpu) {
                Ok(()) => {
                    *bound = Some(cpu);
                    moved = true;
                }
                Err(error) => refused.push(error.to_string()),
            }
        }
        if refused.is_empty() { Ok(moved) } else { Err(refused.join("; ")) }
    }

    /// One all-gather: its time, and whether the data arrived.
    fn all_gather(&self, pair: &PlannedPair) -> Result<(u64, bool), Fault> {
        let outcome = self
            .ranks
            .all_gather(self.plan.device_pair, pair.point.bytes, self.plan.timeout())
            .map_err(|error| {
                if error.kind() == "timeout" || SyntheticPair::is_rank_dead(&error) {
                    Fault::Lost(error.into())
                } else {
                    Fault::Failed(error.to_string())
                }
            })?;
        Ok((outcome.ns, !outcome.corrupted))
    }

    fn check(&self, sample: &mut Sample, arrived: bool, when: &str) -> Result<(), Fault> {
        if self.plan.check == CheckPolicy::Off {
            return Ok(());
        }
        if arrived {
            sample.check = DataCheck::Ok;
            return Ok(());
        }
        sample.check = DataCheck::Mismatch;
        Err(Fault::Failed(format!(
            "data check: a receive buffer does not hold what the ranks sent ({when})"
        )))
    }

    fn run(
        &mut self,
        pair: &PlannedPair,
        best: Option<u64>,
        sample: &mut Sample,
    ) -> Result<(), Fault> {
        let began = self.machine.now_ns();
        let moved = self.bind(pair.cpus);
        sample.bind_ns = self.machine.now_ns() - began;
        let warmup = Warmup::new(self.plan.warmup, moved.map_err(Fault::Skipped)?)
            .in_sample(self.plan.sample.is_some());
        if !warmup.is_empty() {
            let arrived = loop {
                let (time, arrived) = self.all_gather(pair)?;
                sample.warmup_ns.push(time);
                match warmup.verdict(&sample.warmup_ns, best) {
                    Verdict::Again => {}
                    Verdict::Settled => break arrived,
                    Verdict::GiveUp => {
                        sample.settled = false;
                        break arrived;
                    }
                }
            };
            self.check(sample, arrived, "after the warm-up")?;
        }
        sample.skew_ns = Some(0);
        for ((rank, cpus), cpu) in (0..).zip(ran_on(sample)).zip(pair.cpus) {
            cpus.push(self.ranks.running_cpu(rank).unwrap_or(cpu));
        }
        let mut last_arrived = true;
        for _ in 0..self.plan.iters {
            let (time, arrived) = self.all_gather(pair)?;
            last_arrived = arrived;
            sample.iter_ns.push(time);
            sample.rank_ns.iter_mut().flatten().for_each(|times| times.push(time));
        }
        self.check(sample, last_arrived, "after the last iteration")
    }
}

/// Why a point has no times.
enum Fault {
    Skipped(String),
    Failed(String),
    /// A rank is gone or hangs: the run cannot go on.
    Lost(Error),
}

impl PairRunner for SyntheticRanks<'_> {
    fn measure(
        &mut self,
        pair: &PlannedPair,
        best: Option<u64>,
        sample: &mut Sample,
    ) -> Result<()> {
        for loads in &mut self.loads {
            loads.switch(pair.point.load, &pair.cpus)?;
        }
        sample.t_ns = Some(self.machine.now_ns());
        self.machine.begin_point(&PointContext {
            seq: pair.point.seq,
            visit: pair.point.visit,
            sweep_is_pair: true,
            load: &sample.load,
        });
        let (status, reason) = match self.run(pair, best, sample) {
            Ok(()) => (PointStatus::Measured, None),
            Err(Fault::Skipped(reason)) => (PointStatus::Skipped, Some(reason)),
            Err(Fault::Failed(reason)) => (PointStatus::Failed, Some(reason)),
            Err(Fault::Lost(error)) => return Err(error),
        };
        sample.status = status;
        sample.reason = reason;
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.machine.now_ns()
    }

    fn loads(&self) -> Vec<LoadRecord> {
        self.loads.iter().flat_map(|loads| records_of(Some(loads))).collect()
    }
}
