//! What surrounds a run: recorded, so that two runs can be compared honestly.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use cluster_health_core::inventory::AscendSoftware;
use cluster_health_core::{BackendKind, DeviceActivity, Machine};
use serde::{Deserialize, Serialize};

use crate::run::utc_now;

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
    /// Versions and files of the Ascend software; other backends have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ascend: Option<AscendSoftware>,
    /// A synthetic machine's scenario as JSON.
    pub scenario: Option<serde_json::Value>,
}

/// Prefixes of the variables that are recorded.
const VARIABLES: [&str; 5] = ["HCCL_", "ASCEND_", "NCCL_", "OMP_", "CLUSTER_HEALTH_"];

/// A token in a variable must not end up in a file that is passed around.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    ["TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL", "AUTH"].iter().any(|word| name.contains(word))
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
        environment.ascend = machine.ascend_software();
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

/// When a run looked at its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Moment {
    /// Before the first point.
    Before,
    /// Between two points.
    During,
    /// After the last point.
    After,
}

/// What else went on on the devices at some moment of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ActivityRecord {
    /// When that was.
    pub moment: Moment,
    /// UTC, RFC 3339.
    pub time: String,
    /// Per device.
    pub devices: Vec<DeviceActivity>,
}

/// Looks at the devices of a run now and then.
#[derive(Debug)]
pub(crate) struct ActivityWatch<'a> {
    machine: &'a Machine,
    looked: Instant,
    records: Vec<ActivityRecord>,
}

/// While points are measured, devices are looked at so often: the calls take milliseconds.
const BETWEEN_LOOKS: Duration = Duration::from_secs(10);

/// More changes than a reader looks at; a run of days shall not fill its manifest with them.
const RECORDS: usize = 100;

impl<'a> ActivityWatch<'a> {
    /// Looks before a run.
    pub(crate) fn begin(machine: &'a Machine) -> Self {
        let mut watch = Self { machine, looked: Instant::now(), records: Vec::new() };
        watch.look(Moment::Before);
        watch
    }

    /// Between two points: looks if the last time is long ago, or a sweep is at its end.
    pub(crate) fn during(&mut self, at_end: bool) {
        if !self.records.is_empty() && (at_end || self.looked.elapsed() >= BETWEEN_LOOKS) {
            self.look(Moment::During);
        }
    }

    /// Looks after a run; what was seen, and notes about it.
    pub(crate) fn end(mut self) -> (Vec<ActivityRecord>, Vec<String>) {
        if !self.records.is_empty() {
            self.look(Moment::After);
        }
        let notes = activity_notes(&self.records);
        (self.records, notes)
    }

    fn look(&mut self, moment: Moment) {
        let devices = self.machine.device_activity();
        self.looked = Instant::now();
        let seen = |record: &ActivityRecord| {
            record.moment == Moment::During
                && record
                    .devices
                    .iter()
                    .zip(&devices)
                    .all(|(a, b)| (&a.processes, a.health) == (&b.processes, b.health))
        };
        let is_news = moment != Moment::During
            || (self.records.len() < RECORDS && !self.records.last().is_some_and(seen));
        if is_news && !devices.is_empty() {
            self.records.push(ActivityRecord { moment, time: utc_now(), devices });
        }
    }
}

/// One sentence per disturbance of a device, with the moments when it was seen.
fn activity_notes(records: &[ActivityRecord]) -> Vec<String> {
    let before: Vec<(u32, i32)> = records
        .iter()
        .filter(|record| record.moment == Moment::Before)
        .flat_map(|record| &record.devices)
        .flat_map(|device| device.processes.iter().flatten().map(|p| (device.device, p.pid)))
        .collect();
    let mut notes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for record in records {
        let moment = match record.moment {
            Moment::Before => "before",
            Moment::During => "during",
            Moment::After => "after",
        };
        for device in &record.devices {
            let mut processes = device.processes.iter().flatten();
            // Inside a container the driver may list this very run by its number outside.
            let may_be_own =
                processes.any(|p| p.name.is_none() && !before.contains(&(device.device, p.pid)));
            for mut reason in device.disturbances() {
                if may_be_own && reason.starts_with("other processes") {
                    reason.push_str(", unless one is this run as seen from outside its container");
                }
                let moments = notes.entry(reason).or_default();
                if !moments.contains(&moment) {
                    moments.push(moment);
                }
            }
        }
    }
    notes.into_iter().map(|(text, when)| format!("{text}; {} the run", when.join(", "))).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn record(moment: &str, device: &str) -> ActivityRecord {
        let text = format!(
            r#"{{"moment": "{moment}", "time": "", "devices": [
                {{"device": 3, "health": 0, "processes": [{device}]}}]}}"#
        );
        let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
        for name in ["memory_used_bytes", "memory_bytes", "utilisation_percent"] {
            value["devices"][0][name] = serde_json::Value::Null;
        }
        serde_json::from_value(value).unwrap()
    }

    const TRAINING: &str = r#"{"pid": 12, "memory_bytes": 1073741824, "name": "python"}"#;
    const UNSEEN: &str = r#"{"pid": 99, "memory_bytes": 1048576, "name": null}"#;

    #[test]
    fn notes_name_processes_and_moments() {
        let records = [record("before", TRAINING), record("during", ""), record("after", TRAINING)];
        assert_eq!(
            activity_notes(&records),
            ["other processes on device 3: 12 python (1024 MiB); before, after the run"]
        );
        assert!(activity_notes(&[record("before", ""), record("after", "")]).is_empty());
    }

    #[test]
    fn process_from_outside_the_container_that_comes_with_the_run_may_be_the_run() {
        let records = [record("before", ""), record("after", UNSEEN)];
        assert_eq!(
            activity_notes(&records),
            [
                "other processes on device 3: 99 (1 MiB), unless one is this run as seen from outside \
              its container; after the run"
            ]
        );
        let records = [record("before", UNSEEN), record("after", UNSEEN)];
        assert_eq!(
            activity_notes(&records),
            ["other processes on device 3: 99 (1 MiB); before, after the run"]
        );
    }

    #[test]
    fn variables_that_may_hold_secrets_are_recognised() {
        let secret = ["ASCEND_TOKEN", "HCCL_api_key", "CLUSTER_HEALTH_PASSWD", "NCCL_AUTH"];
        for name in secret {
            assert!(is_secret(name), "{name}");
        }
        for name in ["HCCL_BUFFSIZE", "ASCEND_RT_VISIBLE_DEVICES", "OMP_NUM_THREADS"] {
            assert!(!is_secret(name), "{name}");
        }
    }
}
