//! Whether this machine is one that the baseline can speak for, and what it lost since.

use std::collections::BTreeSet;

use cluster_health_core::Machine;
use cluster_health_core::affinity::CpuRecord;

use super::baseline::Known;
use crate::analysis::{Finding, Kind};
use crate::calibrate::Origin;
use crate::compare::list;
use crate::plan::H2dPlan;

/// Most CPUs whose reasons are told.
const MOST_REASONS: usize = 20;

/// What the machine says against the baseline, before anything is measured.
#[derive(Debug, Default)]
pub(super) struct Shape {
    /// Why the baseline cannot speak for this machine.
    pub(super) differences: Vec<String>,
    /// Devices that the baseline had and this machine has not.
    pub(super) lost_devices: Vec<String>,
    /// CPUs that could be bound then and cannot be bound now, with the reason.
    pub(super) lost_cpus: Vec<(u32, String)>,
    pub(super) notes: Vec<String>,
}

impl Shape {
    /// `here` is what a run of `plan` says of this machine; CPUs and devices were named by the caller or
    /// are all that there are.
    pub(super) fn of(
        machine: &Machine,
        plan: &H2dPlan,
        here: &Origin,
        known: &Known,
        (all_cpus, all_devices): (bool, bool),
        census: &[CpuRecord],
    ) -> Self {
        let mut shape = Self::default();
        match &known.run {
            Some(run) => shape.compare(run, here),
            None => shape.notes.push(format!(
                "{} does not say what machine it is of: only its CPUs and devices could be compared",
                known.name
            )),
        }
        if known.rates.is_empty() {
            shape.differences.push(
                "the baseline has no copies from host to device of the idle machine".to_owned(),
            );
            return shape;
        }
        let of_baseline = |ids: fn(&super::baseline::KnownRates) -> Vec<u32>| {
            known.rates.iter().flat_map(ids).collect::<BTreeSet<u32>>()
        };
        let cpus = of_baseline(|rates| rates.rows.keys().copied().collect());
        let devices = of_baseline(|rates| rates.columns.keys().copied().collect());
        let present: BTreeSet<u32> = census.iter().map(|record| record.cpu.0).collect();
        if !cpus.is_subset(&present) {
            let missing: Vec<u32> = cpus.difference(&present).copied().collect();
            shape.differences.push(format!("no CPU {} here", list(&missing)));
        }
        if plan.cpus.iter().all(|cpu| !cpus.contains(&cpu.0)) {
            shape.differences.push("the baseline has none of the CPUs".to_owned());
        }
        let new: Vec<u32> =
            plan.devices.iter().map(|id| id.0).filter(|id| !devices.contains(id)).collect();
        if !new.is_empty() {
            shape.differences.push(format!("device {} is not in the baseline", list(&new)));
        }
        if shape.differences.is_empty() {
            shape.lost(machine, plan, known, (all_cpus, all_devices), census, &devices);
        }
        shape
    }

    fn differ<T: PartialEq + std::fmt::Display>(&mut self, what: &str, then: &T, now: &T) {
        if then != now {
            self.differences.push(format!("{what}: {now} here, {then} in the baseline"));
        }
    }

    fn compare(&mut self, then: &Origin, now: &Origin) {
        self.differ("backend", &then.backend, &now.backend);
        for (what, then, now) in
            [("present CPUs", then.cpus, now.cpus), ("NUMA nodes", then.numa_nodes, now.numa_nodes)]
        {
            if let (Some(then), Some(now)) = (then, now) {
                self.differ(what, &then, &now);
            }
        }
        if let (Some(then), Some(now)) = (&then.cpu_model, &now.cpu_model) {
            self.differ("processor", then, now);
        }
        for (id, name) in &now.devices {
            if let Some(then) = then.devices.get(id) {
                self.differ(&format!("device {id}"), then, name);
            }
        }
        if !then.complete {
            self.notes.push("the baseline's run did not come to its end".to_owned());
        }
        if let Some(verdict) = then.verdict.as_deref().filter(|verdict| *verdict != "healthy") {
            self.notes.push(format!(
                "the baseline's own verdict is {verdict}: what it found is taken for usual"
            ));
        }
    }

    fn lost(
        &mut self,
        machine: &Machine,
        plan: &H2dPlan,
        known: &Known,
        (all_cpus, all_devices): (bool, bool),
        census: &[CpuRecord],
        devices: &BTreeSet<u32>,
    ) {
        if all_devices {
            for &id in devices {
                match machine.devices().iter().find(|device| device.id().0 == id) {
                    None => self.lost_devices.push(format!(
                        "device {id} of the baseline is not there, or not visible to this process"
                    )),
                    Some(device) => {
                        let why = device.info().unavailable.as_ref();
                        self.lost_devices.extend(why.map(|why| {
                            format!("device {id} of the baseline is unavailable: {why}")
                        }));
                    }
                }
            }
        }
        let Some(bindable) = &known.bindable else {
            self.notes.push("the baseline does not say which CPUs could be bound".to_owned());
            return;
        };
        let is_wanted = |id: u32| all_cpus || plan.cpus.iter().any(|cpu| cpu.0 == id);
        let mut kept_out = Vec::new();
        for record in census {
            let id = record.cpu.0;
            if record.bindable != Some(false) || !bindable.contains(&id) || !is_wanted(id) {
                continue;
            }
            if record.online && !record.allowed {
                // The job's share of the node is another one; no part is at fault.
                kept_out.push(id);
            } else {
                let reason = record.reason.clone().unwrap_or_else(|| "not bindable".to_owned());
                self.lost_cpus.push((id, reason));
            }
        }
        if !kept_out.is_empty() {
            self.differences.push(format!(
                "CPU {} of the baseline is outside the cpuset of this job",
                list(&kept_out)
            ));
        }
    }
}

/// CPUs that the kernel should let this process use and does not.
pub(super) fn refused(census: &[CpuRecord]) -> Vec<(u32, String)> {
    let refused = census
        .iter()
        .filter(|record| record.online && record.allowed && record.bindable == Some(false));
    let reason = |record: &CpuRecord| record.reason.clone().unwrap_or_default();
    refused.map(|record| (record.cpu.0, reason(record))).collect()
}

/// The finding of CPUs that cannot be bound.
pub(super) fn unbindable(cpus: &[(u32, String)], inference: &str) -> Finding {
    let mut finding = Finding::new(Kind::Unbindable, None, None);
    finding.cpus = cpus.iter().map(|(cpu, _)| *cpu).collect();
    let told = cpus.iter().take(MOST_REASONS);
    finding.facts = told.map(|(cpu, reason)| format!("CPU {cpu}: {reason}")).collect();
    finding.inference = inference.to_owned();
    finding.next = "Look for CPUs that went offline, and what refuses to bind to them.".to_owned();
    finding
}
