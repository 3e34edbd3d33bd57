//! All-gathers of the two ranks of a synthetic machine, in one process and virtual time.

use cluster_health_core::machine::SyntheticPair;
use cluster_health_core::{ByteSize, CpuId, DeviceId, Machine, PointContext};

use super::{Fastest, Operation, Settings, Visit, warm_up};
use crate::error::{Error, Result};
use crate::samples::Timer;

pub(crate) struct SyntheticRanks {
    pair: SyntheticPair,
    devices: [DeviceId; 2],
    cpus: [CpuId; 2],
    settings: Settings,
    fastest: Fastest,
}

impl SyntheticRanks {
    pub(crate) fn new(
        pair: SyntheticPair,
        devices: [DeviceId; 2],
        cpus: [CpuId; 2],
        settings: Settings,
    ) -> Self {
        Self { pair, devices, cpus, settings, fastest: Fastest::default() }
    }

    /// The ranks run on these CPUs from now on.
    pub(crate) fn move_to(&mut self, cpus: [CpuId; 2]) {
        self.cpus = cpus;
    }

    /// What warm-ups are compared with, to be exchanged for that of another class of visits.
    pub(crate) fn fastest(&mut self) -> &mut Fastest {
        &mut self.fastest
    }

    /// One visit; `point` is its number among all visits of the run.
    pub(crate) fn visit(
        &mut self,
        machine: &Machine,
        operation: Operation,
        bytes: ByteSize,
        (point, load): (u64, &str),
    ) -> Result<Visit> {
        if operation != Operation::AllGather {
            return Err(Error::Core(cluster_health_core::Error::Unavailable {
                what: operation.as_str().to_owned(),
                message: "a scenario has no such link".to_owned(),
            }));
        }
        let context = PointContext { seq: point, visit: point, sweep_is_pair: true, load };
        machine.begin_point(&context);
        for (rank, cpu) in (0..).zip(self.cpus) {
            self.pair.bind(rank, cpu)?;
        }
        let best = self.fastest.of(operation, bytes.bytes());
        let mut visit = Visit { timer: Some(Timer::Host), skew_ns: Some(0), ..Visit::default() };
        let once = || {
            let outcome = self.pair.all_gather(self.devices, bytes, self.settings.timeout)?;
            if outcome.corrupted {
                let message = "a receive buffer does not hold what the ranks sent";
                return Err(Error::output("data check", message));
            }
            Ok(outcome.ns)
        };
        visit.settled = warm_up(self.settings.warmup, best, &mut visit.warmup_ns, once)?;
        for _ in 0..self.settings.iters {
            visit.iter_ns.push(once()?);
        }
        // As of live ranks, whose process sees itself only.
        visit.ran_on.insert(self.pair.running_cpu(0)?);
        visit.rank_ns = Some(vec![visit.iter_ns.clone(); 2]);
        self.fastest.note(operation, bytes.bytes(), &visit);
        Ok(visit)
    }
}
