//! Which CPUs can be bound, tried out one by one, and why the others cannot.

use serde::{Deserialize, Serialize};

use super::pin::Binder;
use super::set::CpuSet;
use crate::error::{Error, Result, errno_text};
use crate::id::{CpuId, NodeId};
use crate::topology::{CpuInfo, Topology};

/// One present CPU. The serialised names are those of `affinity.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuRecord {
    /// The CPU.
    pub cpu: CpuId,
    /// Whether the kernel has it in use.
    pub online: bool,
    /// Whether the cgroup cpuset (else the kernel) lets this process use it. Never true of an
    /// offline CPU, and independent of the caller's own mask.
    pub allowed: bool,
    /// Whether a thread was bound to it and seen running there; `None` when not tried because the
    /// topology is not this machine's.
    pub bindable: Option<bool>,
    /// Its NUMA node.
    pub numa_node: Option<NodeId>,
    /// Its package; `None` when the kernel does not know.
    pub socket_id: Option<i64>,
    /// Its core, unique within the package.
    pub core_id: Option<i64>,
    /// The hardware threads of its core with itself, `"0,1"`; empty when unknown.
    pub thread_siblings: String,
    /// Why it is not bindable; `None` when it is. Isolation (isolcpus) does not prevent binding,
    /// so it is named only beside the cause, and all isolated CPUs are in [`Census::isolated`].
    pub reason: Option<String>,
}

/// Every present CPU with its state, and what limits the process as a whole.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Census {
    /// The present CPUs in ascending order.
    pub cpus: Vec<CpuRecord>,
    /// CPUs worth of time that the cgroup grants (0.5 = half a CPU); `None` when unlimited.
    pub quota: Option<f64>,
    /// CPUs kept free of other work (isolcpus). They are bindable.
    pub isolated: CpuSet,
}

/// Counts of a [`Census`] and its CPUs that cannot be bound, by reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CensusSummary {
    /// Number of present CPUs.
    pub present: usize,
    /// Number of online CPUs.
    pub online: usize,
    /// Number of allowed CPUs.
    pub allowed: usize,
    /// Number of bindable CPUs; `None` when none was tried.
    pub bindable: Option<usize>,
    /// CPUs worth of time, as [`Census::quota`].
    pub quota: Option<f64>,
    /// Isolated CPUs as a kernel list.
    pub isolated: CpuSet,
    /// CPUs that cannot be bound, one entry for each reason, ordered by their first CPU.
    pub not_bindable: Vec<NotBindable>,
}

/// CPUs that cannot be bound for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NotBindable {
    /// The reason.
    pub reason: String,
    /// The CPUs, serialised as a kernel list.
    pub cpus: CpuSet,
}

/// A user's list against the census: what can be used, and what was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Selection {
    /// The CPUs to use, in the user's order.
    pub usable: Vec<CpuId>,
    /// The other ones, in the user's order.
    pub left_out: Vec<LeftOut>,
}

/// A CPU that was asked for but cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeftOut {
    /// The CPU.
    pub cpu: CpuId,
    /// Why.
    pub reason: String,
}

/// What the census asks the kernel; tests answer in its place.
trait Trial {
    /// What the kernel leaves of a mask with every CPU, and the size of its mask in CPUs.
    fn widen(&mut self) -> Result<(CpuSet, usize)>;
    /// Binds to the CPU and checks it.
    fn bind(&mut self, cpu: CpuId) -> Result<()>;
}

impl Trial for Binder {
    fn widen(&mut self) -> Result<(CpuSet, usize)> {
        self.widen_self()
    }

    fn bind(&mut self, cpu: CpuId) -> Result<()> {
        self.bind_self(cpu)
    }
}

impl Census {
    /// Binds a thread of its own to every online CPU; the caller's affinity neither changes nor
    /// matters.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the topology was not read from this machine (see
    /// [`Census::inspect`]), [`Error::System`] when no thread can be started or its mask not be
    /// read. A CPU that cannot be bound is no error.
    pub fn take(topology: &Topology) -> Result<Self> {
        if !topology.is_this_machine() {
            return Err(Error::invalid(
                "topology",
                "it does not describe this machine, so nothing can be bound; inspect it instead",
            ));
        }
        std::thread::scope(|scope| {
            let failed = |errno| Error::system("pthread_create", errno, "starting the census");
            std::thread::Builder::new()
                .name("census".to_owned())
                .spawn_scoped(scope, || Self::try_all(topology, &mut Binder::default()))
                .map_err(|error| failed(error.raw_os_error().unwrap_or_default()))?
                .join()
                .unwrap_or_else(|_| Err(failed(0)))
        })
    }

    /// The census of a machine that is only described: nothing is tried, so `bindable` is `None`
    /// and `reason` says "not this machine".
    #[must_use]
    pub fn inspect(topology: &Topology) -> Self {
        let allowed = topology.cpuset.as_ref().or(topology.proc_allowed.as_ref());
        Self::build(topology, |info| {
            let allowed = info.online && allowed.is_none_or(|set| set.contains(info.cpu));
            (allowed, None, Some("not this machine".to_owned()))
        })
    }

    /// A census of ready-made records, for example of a synthetic machine.
    #[must_use]
    pub fn from_records(mut cpus: Vec<CpuRecord>) -> Self {
        cpus.sort_by_key(|record| record.cpu);
        Self { cpus, ..Self::default() }
    }

    fn try_all(topology: &Topology, trial: &mut impl Trial) -> Result<Self> {
        let (kernel, mask_bits) = trial.widen()?;
        Ok(Self::build(topology, |info| {
            let cpu = info.cpu;
            if !info.online {
                return (false, Some(false), Some("offline".to_owned()));
            }
            let error = match trial.bind(cpu) {
                // What was tried outweighs what was read.
                Ok(()) => return (true, Some(true), None),
                Err(error) => error,
            };
            let in_mask = usize::try_from(cpu.0).is_ok_and(|id| id < mask_bits);
            let cpuset = topology.cpuset.as_ref().filter(|cpuset| !cpuset.contains(cpu));
            // The group's files are not always in sight, so the kernel's own answer counts too.
            let allowed = cpuset.is_none() && (kernel.contains(cpu) || !in_mask);
            let mut reason = if let Some(cpuset) = cpuset {
                format!("outside the cpuset {cpuset}")
            } else if !in_mask {
                format!("beyond the CPU mask of {mask_bits} CPUs")
            } else if !allowed {
                format!("outside the CPUs that the kernel allows, {kernel}")
            } else {
                match &error {
                    Error::System(system) if system.errno != 0 => {
                        format!("refused by the kernel: {}", errno_text(system.errno))
                    }
                    _ => error.to_string(),
                }
            };
            if topology.isolated.contains(cpu) {
                reason.push_str("; isolated (isolcpus)");
            }
            (allowed, Some(false), Some(reason))
        }))
    }

    /// Fills the records; `judge` gives `allowed`, `bindable` and `reason`.
    fn build(
        topology: &Topology,
        mut judge: impl FnMut(&CpuInfo) -> (bool, Option<bool>, Option<String>),
    ) -> Self {
        let record = |info: &CpuInfo| {
            let (allowed, bindable, reason) = judge(info);
            let siblings: Vec<String> = info.siblings.iter().map(|cpu| cpu.to_string()).collect();
            CpuRecord {
                cpu: info.cpu,
                online: info.online,
                allowed,
                bindable,
                numa_node: info.node,
                socket_id: info.package,
                core_id: info.core,
                thread_siblings: siblings.join(","),
                reason,
            }
        };
        let mut census = Self::from_records(topology.cpus.iter().map(record).collect());
        census.quota = topology.cpu_quota;
        census.isolated = topology.isolated.clone();
        census
    }

    /// Counts, and the CPUs that cannot be bound by reason.
    #[must_use]
    pub fn summary(&self) -> CensusSummary {
        let count = |test: fn(&CpuRecord) -> bool| self.cpus.iter().filter(|&r| test(r)).count();
        let mut not_bindable: Vec<NotBindable> = Vec::new();
        for record in self.cpus.iter().filter(|record| record.bindable == Some(false)) {
            let reason = record.reason.as_deref().unwrap_or("unknown");
            match not_bindable.iter_mut().find(|entry| entry.reason == reason) {
                Some(entry) => {
                    entry.cpus.insert(record.cpu);
                }
                None => not_bindable.push(NotBindable {
                    reason: reason.to_owned(),
                    cpus: CpuSet::from_iter([record.cpu]),
                }),
            }
        }
        let tried = self.cpus.iter().any(|record| record.bindable.is_some());
        CensusSummary {
            present: self.cpus.len(),
            online: count(|record| record.online),
            allowed: count(|record| record.allowed),
            bindable: tried.then(|| count(|record| record.bindable == Some(true))),
            quota: self.quota,
            isolated: self.isolated.clone(),
            not_bindable,
        }
    }

    /// The CPUs that were bound successfully, in ascending order.
    #[must_use]
    pub fn bindable(&self) -> Vec<CpuId> {
        let bindable = self.cpus.iter().filter(|record| record.bindable == Some(true));
        bindable.map(|record| record.cpu).collect()
    }

    /// The record of a CPU.
    #[must_use]
    pub fn record(&self, cpu: CpuId) -> Option<&CpuRecord> {
        let index = self.cpus.binary_search_by_key(&cpu, |record| record.cpu).ok()?;
        self.cpus.get(index)
    }

    /// Splits a user's list into the CPUs that can be used and the others, each with its reason.
    /// Where nothing was tried, online and allowed CPUs count as usable.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `option` and the CPUs that are not present at all.
    pub fn select(&self, option: &str, wanted: &[u32]) -> Result<Selection> {
        let absent: CpuSet =
            wanted.iter().map(|&id| CpuId(id)).filter(|&cpu| self.record(cpu).is_none()).collect();
        if !absent.is_empty() {
            let present: CpuSet = self.cpus.iter().map(|record| record.cpu).collect();
            return Err(Error::invalid(
                option,
                format!("CPU {absent} does not exist here; present are {present}"),
            ));
        }
        let mut selection = Selection { usable: Vec::new(), left_out: Vec::new() };
        for record in wanted.iter().filter_map(|&id| self.record(CpuId(id))) {
            let cpu = record.cpu;
            if record.bindable.unwrap_or(record.online && record.allowed) {
                selection.usable.push(cpu);
                continue;
            }
            let reason = match (record.bindable, &record.reason) {
                (Some(_), Some(reason)) => reason.clone(),
                _ if !record.online => "offline".to_owned(),
                _ => "outside the cpuset".to_owned(),
            };
            selection.left_out.push(LeftOut { cpu, reason });
        }
        Ok(selection)
    }
}

#[cfg(test)]
mod tests {
    use super::super::list::parse_id_list;
    use super::super::pin::{BindScope, PinGuard, thread_affinity};
    use super::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    /// A kernel with an effective cpuset, a mask size and CPUs that it refuses otherwise.
    struct Kernel {
        cpuset: CpuSet,
        bits: usize,
        refused: Vec<(u32, i32)>,
        tried: CpuSet,
    }

    impl Kernel {
        fn new(cpuset: &str) -> Self {
            Self { cpuset: set(cpuset), bits: 8192, refused: Vec::new(), tried: CpuSet::new() }
        }
    }

    impl Trial for Kernel {
        fn widen(&mut self) -> Result<(CpuSet, usize)> {
            Ok((self.cpuset.clone(), self.bits))
        }

        fn bind(&mut self, cpu: CpuId) -> Result<()> {
            self.tried.insert(cpu);
            let refusal = self.refused.iter().find(|(id, _)| *id == cpu.0).map(|(_, errno)| *errno);
            match refusal.or((!self.cpuset.contains(cpu)).then_some(libc::EINVAL)) {
                Some(errno) => Err(Error::system("sched_setaffinity", errno, "binding")),
                None => Ok(()),
            }
        }
    }

    fn machine(present: &str, online: &str) -> Topology {
        let online = set(online);
        let cpu = |cpu| CpuInfo {
            cpu,
            online: online.contains(cpu),
            node: None,
            package: None,
            core: None,
            siblings: CpuSet::new(),
        };
        Topology::from_parts(set(present).iter().map(cpu).collect(), Vec::new())
    }

    fn states(census: &Census, test: impl Fn(&CpuRecord) -> bool) -> String {
        let cpus: CpuSet = census.cpus.iter().filter(|r| test(r)).map(|r| r.cpu).collect();
        cpus.to_string()
    }

    #[test]
    fn f1_offline_cpu_zero_is_offline_not_unbindable() {
        let mut kernel = Kernel::new("1-11");
        let census = Census::try_all(&machine("0-11", "1-11"), &mut kernel).unwrap();
        assert_eq!(census.cpus.len(), 12);
        assert_eq!(census.record(CpuId(0)).unwrap().reason.as_deref(), Some("offline"));
        assert_eq!(states(&census, |r| r.bindable == Some(true) && r.reason.is_none()), "1-11");
        assert_eq!(kernel.tried.to_string(), "1-11");
    }

    #[test]
    fn f2_a_list_with_offline_cpus_uses_the_others() {
        let online = "0,2,4,6,8,10,12,14,16-31";
        let census = Census::try_all(&machine("0-31", online), &mut Kernel::new(online)).unwrap();
        let wanted = parse_id_list("--cpus", "0-7").unwrap();
        let selection = census.select("--cpus", &wanted).unwrap();
        assert_eq!(selection.usable, [0, 2, 4, 6].map(CpuId));
        assert_eq!(
            selection.left_out,
            [1, 3, 5, 7].map(|id| LeftOut { cpu: CpuId(id), reason: "offline".to_owned() })
        );
        let error = census.select("--cpus", &[31, 32, 33, 40]).unwrap_err().to_string();
        assert!(error.starts_with("--cpus: CPU 32-33,40 "), "{error}");
    }

    #[test]
    fn f6_positions_are_not_cpu_ids() {
        let mut topology = machine("0-3", "0-3");
        topology.cpuset = Some(set("0-1,3"));
        topology.proc_allowed = Some(set("3"));
        let census = Census::try_all(&topology, &mut Kernel::new("0-1,3")).unwrap();
        assert_eq!(states(&census, |r| r.allowed), "0-1,3");
        assert_eq!(census.bindable(), [0, 1, 3].map(CpuId));
        let left_out = census.record(CpuId(2)).unwrap();
        assert_eq!(left_out.reason.as_deref(), Some("outside the cpuset 0-1,3"));
        // The same without a readable cpuset: the kernel's answer stands in for it.
        topology.cpuset = None;
        let census = Census::try_all(&topology, &mut Kernel::new("0-1,3")).unwrap();
        assert_eq!(states(&census, |r| r.allowed), "0-1,3");
        let reason = census.record(CpuId(2)).unwrap().reason.clone().unwrap();
        assert!(reason.starts_with("outside") && reason.ends_with("0-1,3"), "{reason}");
        // And with the files of a wider group, all that some containers see.
        topology.cpuset = Some(set("0-3"));
        let census = Census::try_all(&topology, &mut Kernel::new("0-1,3")).unwrap();
        assert_eq!(states(&census, |r| r.allowed), "0-1,3");
        assert_eq!(census.record(CpuId(2)).unwrap().reason.as_ref(), Some(&reason));
    }

    #[test]
    fn f7_a_thousand_and_more_cpus() {
        let mut kernel = Kernel::new("0-2000");
        let census = Census::try_all(&machine("0-2000", "0-2000"), &mut kernel).unwrap();
        assert_eq!(census.summary().bindable, Some(2001));
        kernel.bits = 1024;
        kernel.refused = (1024..=2000).map(|id| (id, libc::EINVAL)).collect();
        let census = Census::try_all(&machine("0-2000", "0-2000"), &mut kernel).unwrap();
        let summary = census.summary();
        assert_eq!(summary.bindable, Some(1024));
        assert_eq!(summary.not_bindable.len(), 1);
        assert_eq!(summary.not_bindable[0].cpus.to_string(), "1024-2000");
        assert!(summary.not_bindable[0].reason.starts_with("beyond the CPU mask"));
    }

    #[test]
    fn a_refusal_names_the_errno_and_isolation() {
        let mut kernel = Kernel::new("0-3");
        kernel.refused = vec![(1, libc::EINVAL), (2, libc::EPERM)];
        let mut topology = machine("0-3", "0-3");
        topology.isolated = set("2-3");
        let census = Census::try_all(&topology, &mut kernel).unwrap();
        let reason = |id| census.record(CpuId(id)).unwrap().reason.clone();
        assert_eq!(
            reason(1).as_deref(),
            Some("refused by the kernel: EINVAL (22): Invalid argument")
        );
        assert_eq!(
            reason(2).as_deref(),
            Some("refused by the kernel: EPERM (1): Operation not permitted; isolated (isolcpus)")
        );
        assert_eq!(reason(3), None);
        assert_eq!(census.bindable(), [0, 3].map(CpuId));
        assert_eq!(census.summary().isolated.to_string(), "2-3");
        assert_eq!(census.summary().not_bindable.len(), 2);
    }

    #[test]
    fn a_described_machine_is_not_tried() {
        let mut topology = machine("0-3", "1-3");
        topology.cpuset = Some(set("1-2"));
        assert_eq!(Census::take(&topology).unwrap_err().kind(), "invalid");
        let census = Census::inspect(&topology);
        assert!(census.cpus.iter().all(|record| record.bindable.is_none()));
        assert!(census.cpus.iter().all(|r| r.reason.as_deref() == Some("not this machine")));
        assert_eq!(states(&census, |r| r.online), "1-3");
        assert_eq!(states(&census, |r| r.allowed), "1-2");
        assert_eq!(census.summary().bindable, None);
        let selection = census.select("--cpus", &[2, 0, 3]).unwrap();
        assert_eq!(selection.usable, [CpuId(2)]);
        let reasons: Vec<_> = selection.left_out.iter().map(|l| l.reason.as_str()).collect();
        assert_eq!(reasons, ["offline", "outside the cpuset"]);
    }

    #[test]
    fn f6_a_bound_thread_still_reports_all_cpus() {
        let topology = Topology::system().unwrap();
        let free = Census::take(&topology).unwrap();
        assert!(!free.bindable().is_empty());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for cpu in free.bindable() {
                    let _guard = PinGuard::bind(cpu, BindScope::Thread).unwrap();
                    assert_eq!(Census::take(&topology).unwrap(), free);
                    assert_eq!(thread_affinity().unwrap(), CpuSet::from_iter([cpu]));
                }
            });
        });
    }

    #[test]
    fn records_serialise_with_the_older_tools_names() {
        let mut topology = machine("0-1", "0-1");
        topology.cpus[1].siblings = set("0-1");
        topology.cpus[1].node = Some(NodeId(3));
        let census = Census::try_all(&topology, &mut Kernel::new("0-1")).unwrap();
        assert_eq!(
            serde_json::to_value(&census.cpus[1]).unwrap(),
            serde_json::json!({
                "cpu": 1, "online": true, "allowed": true, "bindable": true, "numa_node": 3,
                "socket_id": null, "core_id": null, "thread_siblings": "0,1", "reason": null,
            })
        );
    }
}
