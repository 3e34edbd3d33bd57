//! What devices are busy with and how they feel, as their management interface tells.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::rank::{RankEnvironment, RankFamily};

/// A process on a device, as the device's driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceProcess {
    /// Its process id. Inside a container it may be one of the host's, which means nothing here.
    pub pid: i32,
    /// Device memory that it uses.
    pub memory_bytes: u64,
    /// Its name; `None` where this process cannot see it.
    pub name: Option<String>,
}

impl fmt::Display for DeviceProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pid)?;
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        write!(f, " ({} MiB)", self.memory_bytes >> 20)
    }
}

/// A call that failed or could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedCall {
    /// The C function, or what was to be called.
    pub call: String,
    /// Physical id of the device that it was for.
    pub device: Option<u32>,
    /// What it returned; `None` when it could not be called.
    pub code: Option<i64>,
    /// Why, in words.
    pub message: String,
}

impl FailedCall {
    pub(crate) fn of(call: &str, error: &Error) -> Self {
        Self {
            call: error.call().unwrap_or(call).to_owned(),
            device: error.device().map(|device| device.0),
            code: error.code(),
            message: error.to_string(),
        }
    }
}

/// What else goes on on a device. What is not known is `None`, and `failures` says why.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceActivity {
    /// Physical id.
    pub device: u32,
    /// Processes on it, without the calling process, those that it started, and the other ranks
    /// of its launcher's job.
    pub processes: Option<Vec<DeviceProcess>>,
    /// 0 is healthy, 1 a minor, 2 a major, 3 a critical alarm; other numbers are the vendor's.
    pub health: Option<u32>,
    /// High-bandwidth memory in use, by the driver too: an idle device shows some GiB.
    pub memory_used_bytes: Option<u64>,
    /// Its high-bandwidth memory.
    pub memory_bytes: Option<u64>,
    /// How busy its compute cores are, per cent.
    pub utilisation_percent: Option<u32>,
    /// What could not be asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<FailedCall>,
}

impl DeviceActivity {
    /// Why the device is not at rest, one sentence each; empty when it is, or nothing is known.
    #[must_use]
    pub fn disturbances(&self) -> Vec<String> {
        let device = self.device;
        let mut reasons = Vec::new();
        if let Some(processes) = self.processes.as_ref().filter(|processes| !processes.is_empty()) {
            let list: Vec<String> = processes.iter().map(ToString::to_string).collect();
            reasons.push(format!("other processes on device {device}: {}", list.join(", ")));
        }
        if let Some(health) = self.health.filter(|health| *health != 0) {
            let meaning = match health {
                1 => "a minor alarm",
                2 => "a major alarm",
                3 => "a critical alarm",
                _ => "not known here",
            };
            reasons.push(format!("device {device} reports health {health}: {meaning}"));
        }
        reasons
    }
}

/// The name of a process that this process can see.
pub(crate) fn process_name(pid: i32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// True for this process, those that it started, directly or not, and the ranks that a launcher
/// started beside it, with theirs.
pub(crate) fn is_own(pid: i32) -> bool {
    let Ok(own) = i32::try_from(std::process::id()) else { return false };
    is_descendant(pid, own) || pid > 1 && launch(own).is_some_and(|job| launch(pid) == Some(job))
}

fn is_descendant(pid: i32, own: i32) -> bool {
    let mut ancestor = Some(pid);
    // Processes come and go while this looks, and a chain of ids could in theory close.
    for _ in 0..64 {
        match ancestor {
            Some(pid) if pid == own => return true,
            Some(pid) if pid > 1 => ancestor = parent(pid),
            _ => return false,
        }
    }
    false
}

/// What all ranks of a launcher's job have in common: its kind, their number, and the job's name or,
/// where it has none, the process that started them. `None` for no rank, and for processes whose
/// environment is not ours to see.
fn launch(pid: i32) -> Option<(RankFamily, u32, String, Option<i32>)> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let variable = |name: &str| {
        environment.split(|byte| *byte == 0).find_map(|entry| {
            let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            String::from_utf8(value.to_vec()).ok()
        })
    };
    let rank = RankEnvironment::from_variables(variable).ok()??;
    let starter = if rank.job.is_empty() { parent(pid) } else { None };
    Some((rank.family, rank.size, rank.job, starter))
}

fn parent(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_processes_are_this_one_and_its_children() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(is_own(own));
        assert!(!is_own(1));
        assert!(!is_own(0));
        assert!(!is_own(-1));
        assert!(!is_own(parent(own).unwrap()));
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(is_own(pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn disturbances_name_device_process_and_alarm() {
        let process = DeviceProcess { pid: 1234, memory_bytes: 5 << 30, name: None };
        let activity = DeviceActivity {
            device: 7,
            processes: Some(vec![process]),
            health: Some(2),
            ..DeviceActivity::default()
        };
        assert_eq!(
            activity.disturbances(),
            [
                "other processes on device 7: 1234 (5120 MiB)",
                "device 7 reports health 2: a major alarm"
            ]
        );
        assert!(DeviceActivity::default().disturbances().is_empty());
    }
}
