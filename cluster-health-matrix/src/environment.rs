//! What surrounds a run: recorded, so that two runs can be compared honestly.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::Path;

use cluster_health_core::{BackendKind, Machine};
use serde::{Deserialize, Serialize};

/// Facts about host, kernel and process at the start of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(default)]
pub struct Environment {
    /// `host`, `ascend` or `synthetic`.
    pub backend: String,
    /// Host name; `None` for a synthetic machine.
    pub hostname: Option<String>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// Processor model.
    pub cpu_model: Option<String>,
    /// Frequency governors that are in use.
    pub governors: Vec<String>,
    /// CPUs that the scheduler keeps free.
    pub isolated: Option<String>,
    /// Kernel page migration between nodes.
    pub numa_balancing: Option<String>,
    /// Transparent huge pages.
    pub transparent_hugepage: Option<String>,
    /// The process's cgroup lines.
    pub cgroup: Option<String>,
    /// CPUs of the cgroup's cpuset.
    pub cpuset: Option<String>,
    /// CPUs' worth of time that the cgroup may use.
    pub cpu_quota: Option<f64>,
    /// How often the cgroup was throttled before the run.
    pub nr_throttled: Option<u64>,
    /// Page-lock limit in bytes; `None` = unlimited.
    pub memlock_bytes: Option<u64>,
    /// Load averages over 1, 5 and 15 minutes.
    pub load_average: Option<[f64; 3]>,
    /// Share of CPU time stolen by the hypervisor since boot, per cent.
    pub steal_percent: Option<f64>,
    /// Variables that change what is measured.
    pub variables: BTreeMap<String, String>,
    /// A synthetic machine's scenario as JSON.
    pub scenario: Option<serde_json::Value>,
}

/// Prefixes of the variables that are recorded.
const VARIABLES: [&str; 5] = ["HCCL_", "ASCEND_", "NCCL_", "OMP_", "CLUSTER_HEALTH_"];

/// A token in a variable must not end up in a file that is passed around.
fn is_secret(name: &str) -> bool {
    ["TOKEN", "SECRET", "PASSWORD", "KEY"].iter().any(|word| name.contains(word))
}

fn read(path: &str) -> Option<String> {
    let mut text = String::new();
    fs::File::open(Path::new(path)).ok()?.take(1 << 20).read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

impl Environment {
    /// Reads what this machine tells. Nothing here is an error: what cannot be read is left out.
    #[must_use]
    pub fn of(machine: &Machine) -> Self {
        let mut environment = Self { backend: machine.backend().to_string(), ..Self::default() };
        if let Some(scenario) = machine.scenario() {
            environment.scenario = serde_json::to_value(scenario).ok();
            return environment;
        }
        debug_assert!(machine.backend() != BackendKind::Synthetic);
        let topology = machine.topology();
        environment.hostname = read("/proc/sys/kernel/hostname");
        environment.kernel = read("/proc/sys/kernel/osrelease");
        environment.cpu_model = read("/proc/cpuinfo").and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        });
        environment.governors = governors(topology.cpus.iter().map(|info| info.cpu.0));
        environment.isolated = read("/sys/devices/system/cpu/isolated");
        environment.numa_balancing = read("/proc/sys/kernel/numa_balancing");
        environment.transparent_hugepage = read("/sys/kernel/mm/transparent_hugepage/enabled");
        environment.cgroup = read("/proc/self/cgroup");
        environment.cpuset = topology.cpuset.as_ref().map(ToString::to_string);
        environment.cpu_quota = topology.cpu_quota;
        environment.nr_throttled = topology.nr_throttled;
        environment.memlock_bytes = memlock_limit();
        environment.load_average = load_average();
        environment.steal_percent = steal_percent();
        environment.variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| VARIABLES.iter().any(|prefix| name.starts_with(prefix)))
            .map(|(name, value)| {
                let value = if is_secret(&name) { "(not recorded)".to_owned() } else { value };
                (name, value)
            })
            .collect();
        environment
    }

    /// Why the node is not quiet, one sentence each; empty when it is.
    #[must_use]
    pub fn disturbances(&self, cpus: usize) -> Vec<String> {
        let mut reasons = Vec::new();
        #[allow(clippy::cast_precision_loss, reason = "a number of CPUs")]
        let busy = (0.1 * cpus as f64).max(0.5);
        if let Some([load, ..]) = self.load_average
            && load > busy
        {
            reasons.push(format!("load average {load:.2} on {cpus} CPUs: other work is running"));
        }
        if let Some(steal) = self.steal_percent
            && steal > 1.0
        {
            reasons.push(format!("the hypervisor took {steal:.1} % of the CPU time since boot"));
        }
        if let Some(quota) = self.cpu_quota {
            reasons.push(format!("a cgroup quota of {quota} CPUs: long copies may be throttled"));
        }
        reasons
    }
}

fn governors(cpus: impl Iterator<Item = u32>) -> Vec<String> {
    let mut found: Vec<String> = cpus
        .filter_map(|cpu| {
            read(&format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"))
        })
        .collect();
    found.sort();
    found.dedup();
    found
}

fn memlock_limit() -> Option<u64> {
    let limits = read("/proc/self/limits")?;
    let line = limits.lines().find(|line| line.starts_with("Max locked memory"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

fn load_average() -> Option<[f64; 3]> {
    let text = read("/proc/loadavg")?;
    let mut words = text.split_whitespace().map(str::parse);
    Some([words.next()?.ok()?, words.next()?.ok()?, words.next()?.ok()?])
}

fn steal_percent() -> Option<f64> {
    let stat = read("/proc/stat")?;
    let ticks: Vec<f64> = stat
        .lines()
        .next()?
        .split_whitespace()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; guest time is part of user time.
    let total: f64 = ticks.iter().take(8).sum();
    (total > 0.0).then(|| 100.0 * ticks.get(7).copied().unwrap_or(0.0) / total)
}
