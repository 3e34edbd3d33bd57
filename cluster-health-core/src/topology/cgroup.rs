//! What the cgroups of this process leave it: CPUs, memory nodes, CPU time.
//!
//! The hierarchies are found through the mount table, because clusters mount them in many places:
//! cgroup v2, v1 controllers with or without prefixed file names, and the older `/dev/cpuset`.

use std::path::{Component, Path, PathBuf};

use super::{malformed, parse_number, read_list, read_text};
use crate::affinity::CpuSet;
use crate::error::Result;

#[derive(Debug, Default)]
pub(super) struct Limits {
    pub(super) cpus: Option<CpuSet>,
    pub(super) mems: Option<CpuSet>,
    /// CPUs worth of time: the least of this process's group and those above it.
    pub(super) quota: Option<f64>,
    /// The files that count throttling, of this process's group and those above it.
    pub(super) cpu_stats: Vec<PathBuf>,
}

/// A mounted hierarchy.
struct Mount {
    /// Where, below the root.
    point: PathBuf,
    /// The group that is seen there; not "/" in containers that share the host's namespace.
    group: String,
    /// The v1 controllers; `None` for v2.
    controllers: Option<Vec<String>>,
}

impl Limits {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mounts = mounts(root)?;
        let mut limits = Self::default();
        for folders in hierarchies(root, &mounts, "cpuset")? {
            let first = |names: [&str; 5]| -> Result<Option<CpuSet>> {
                for folder in &folders {
                    for name in names {
                        // An empty list is a group that was not set up, so its parent's holds.
                        let set = read_list(&folder.join(name))?.filter(|set| !set.is_empty());
                        if set.is_some() {
                            return Ok(set);
                        }
                    }
                }
                Ok(None)
            };
            if limits.cpus.is_none() {
                limits.cpus = first([
                    "cpuset.cpus.effective",
                    "cpuset.effective_cpus",
                    "effective_cpus",
                    "cpuset.cpus",
                    "cpus",
                ])?;
            }
            if limits.mems.is_none() {
                limits.mems = first([
                    "cpuset.mems.effective",
                    "cpuset.effective_mems",
                    "effective_mems",
                    "cpuset.mems",
                    "mems",
                ])?;
            }
        }
        for folders in hierarchies(root, &mounts, "cpu")? {
            for folder in folders {
                if let Some(quota) = read_quota(&folder)? {
                    limits.quota = Some(limits.quota.map_or(quota, |least| least.min(quota)));
                }
                let stat = folder.join("cpu.stat");
                if read_text(&stat)?.is_some_and(|text| text.contains("nr_throttled")) {
                    limits.cpu_stats.push(stat);
                }
            }
        }
        Ok(limits)
    }
}

/// Bytes that the memory limits of this process's group and those above it leave; `None` without a
/// limit. Page cache that the kernel would give back counts as left.
pub(super) fn memory_left(root: &Path) -> Result<Option<u64>> {
    let mounts = mounts(root)?;
    let mut least: Option<u64> = None;
    for folder in hierarchies(root, &mounts, "memory")?.into_iter().flatten() {
        let number = |name: &str| -> Result<Option<u64>> {
            Ok(read_text(&folder.join(name))?.and_then(|text| text.trim().parse().ok()))
        };
        let limit = number("memory.max")?.or(number("memory.limit_in_bytes")?);
        let used = number("memory.current")?.or(number("memory.usage_in_bytes")?);
        let (Some(limit), Some(used)) = (limit, used) else { continue };
        let stat = read_text(&folder.join("memory.stat"))?.unwrap_or_default();
        let cache = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
        let cache = cache.and_then(|value| value.trim().parse().ok()).unwrap_or(0);
        let left = limit.saturating_sub(used.saturating_sub(cache));
        least = Some(least.map_or(left, |least| least.min(left)));
    }
    Ok(least)
}

/// The time that one group grants in CPUs worth, from v2's or v1's files.
fn read_quota(folder: &Path) -> Result<Option<f64>> {
    let (path, quota, period) = {
        let path = folder.join("cpu.max");
        if let Some(text) = read_text(&path)? {
            let mut words = text.split_whitespace().map(str::to_owned);
            (path, words.next(), words.next())
        } else {
            let path = folder.join("cpu.cfs_quota_us");
            let quota = read_text(&path)?;
            (path, quota, read_text(&folder.join("cpu.cfs_period_us"))?)
        }
    };
    let (Some(quota), Some(period)) = (quota, period) else { return Ok(None) };
    if quota.trim() == "max" {
        return Ok(None);
    }
    let (quota, period): (f64, f64) = (parse_number(&path, &quota)?, parse_number(&path, &period)?);
    if quota < 0.0 {
        return Ok(None);
    }
    let worth = quota / period;
    if worth.is_finite() { Ok(Some(worth)) } else { Err(malformed(&path, "the period is 0")) }
}

/// For each mounted hierarchy that can have the controller, v1 before v2: the folders from this
/// process's group up to the mount point.
fn hierarchies(root: &Path, mounts: &[Mount], controller: &str) -> Result<Vec<Vec<PathBuf>>> {
    let groups = read_text(&root.join("proc/self/cgroup"))?.unwrap_or_default();
    let cpuset = read_text(&root.join("proc/self/cpuset"))?;
    let group_of = |v1: bool| {
        let group = groups.lines().find_map(|line| {
            let (_, line) = line.split_once(':')?;
            let (controllers, group) = line.split_once(':')?;
            let ours = if v1 {
                controllers.split(',').any(|name| name == controller)
            } else {
                controllers.is_empty()
            };
            ours.then_some(group)
        });
        // Older kernels and dumps have only the second file, which tells the cpuset's group; with
        // one unified hierarchy that is the group of everything.
        let fallback = cpuset.as_deref().filter(|_| !v1 || controller == "cpuset");
        group.or(fallback.map(str::trim_end)).unwrap_or("/")
    };
    let of_v1 = mounts.iter().filter(|mount| {
        mount.controllers.as_ref().is_some_and(|names| names.iter().any(|name| name == controller))
    });
    let of_v2 = mounts.iter().filter(|mount| mount.controllers.is_none());
    let folders = |mount: &Mount| {
        let group = group_of(mount.controllers.is_some());
        let inside = Path::new(group).strip_prefix(&mount.group).unwrap_or(Path::new(group));
        let inside = below(inside);
        inside.ancestors().map(|part| mount.point.join(part)).collect()
    };
    Ok(of_v1.chain(of_v2).map(folders).collect())
}

fn mounts(root: &Path) -> Result<Vec<Mount>> {
    let table = if let Some(text) = read_text(&root.join("proc/self/mountinfo"))? {
        text.lines().filter_map(|line| from_mountinfo(root, line)).collect()
    } else {
        let text = read_text(&root.join("proc/mounts"))?.unwrap_or_default();
        text.lines().filter_map(|line| from_mounts(root, line)).collect::<Vec<_>>()
    };
    if !table.is_empty() {
        return Ok(table);
    }
    // No mount table, as in a reduced dump: the usual places.
    let usual = [
        ("", None),
        ("cpuset", Some("cpuset")),
        ("cpu,cpuacct", Some("cpu")),
        ("cpu", Some("cpu")),
    ];
    let mount = |(folder, controller): (&str, Option<&str>)| Mount {
        point: root.join("sys/fs/cgroup").join(folder),
        group: "/".to_owned(),
        controllers: controller.map(|name| vec![name.to_owned()]),
    };
    Ok(usual.map(mount).into())
}

/// `36 25 0:31 /group /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup rw`
fn from_mountinfo(root: &Path, line: &str) -> Option<Mount> {
    let (mount, filesystem) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (group, point) = (mount.next()?, mount.next()?);
    let mut filesystem = filesystem.split(' ');
    let (kind, _source, options) = (filesystem.next()?, filesystem.next()?, filesystem.next()?);
    hierarchy(root, group, point, kind, options)
}

/// `none /dev/cpuset cgroup rw,relatime,cpuset,noprefix 0 0`
fn from_mounts(root: &Path, line: &str) -> Option<Mount> {
    let mut fields = line.split(' ').skip(1);
    hierarchy(root, "/", fields.next()?, fields.next()?, fields.next()?)
}

fn hierarchy(root: &Path, group: &str, point: &str, kind: &str, options: &str) -> Option<Mount> {
    let controllers = match kind {
        "cgroup2" => None,
        "cgroup" => Some(options.split(',').map(str::to_owned).collect()),
        "cpuset" => Some(vec!["cpuset".to_owned()]),
        _ => return None,
    };
    let point = root.join(below(Path::new(&unescape(point))));
    Some(Mount { point, group: unescape(group), controllers })
}

/// A path from a file as one below the root: a dump must not lead out of itself, and a group
/// outside the cgroup namespace (`/../x`) has no folder here.
fn below(path: &Path) -> PathBuf {
    if path.components().any(|part| part == Component::ParentDir) {
        return PathBuf::new();
    }
    path.components().filter(|part| matches!(part, Component::Normal(_))).collect()
}

/// Undoes the mount table's octal escapes of white space and backslash.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}
