//! CPUs, cores, packages, NUMA nodes and cgroup limits, read below an injectable root.
//!
//! The root holds `sys/` and `proc/` of a running kernel or of a dump. Missing files mean
//! "unknown", as dumps and older kernels lack many of them; files with unreadable content are
//! errors that name the file.

mod cgroup;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::affinity::{CpuSet, MAX_ID};
use crate::error::{Error, Result};
use crate::id::{CpuId, NodeId};

/// Longest file that is read; the kernel's own are far shorter.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// One present CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuInfo {
    /// Its number.
    pub cpu: CpuId,
    /// Whether the kernel has it in use.
    pub online: bool,
    /// Its NUMA node, where known.
    pub node: Option<NodeId>,
    /// Its package (socket); `None` where the kernel says −1 or nothing.
    pub package: Option<i64>,
    /// Its core, unique within a package only; `None` where the kernel says −1 or nothing.
    pub core: Option<i64>,
    /// The present hardware threads of its core, with itself; empty when unknown.
    pub siblings: CpuSet,
}

/// One NUMA node. Nodes without CPUs and nodes without memory both occur.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeInfo {
    /// Its number.
    pub id: NodeId,
    /// Its online CPUs; empty for a memory-only node.
    pub cpus: CpuSet,
    /// Bytes of memory; 0 for a node with CPUs only.
    pub mem_total: u64,
    /// Bytes of free memory, when the topology was read.
    pub mem_free: u64,
}

/// CPUs, NUMA nodes and limits of a machine.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Topology {
    /// The present CPUs in ascending order.
    pub cpus: Vec<CpuInfo>,
    /// The NUMA nodes in ascending order. A kernel without NUMA counts as one node 0.
    pub nodes: Vec<NodeInfo>,
    /// CPUs that the scheduler leaves alone (isolcpus).
    pub isolated: CpuSet,
    /// Present CPUs in the effective cpuset of this process; `None` when unreadable.
    pub cpuset: Option<CpuSet>,
    /// NUMA nodes in the effective cpuset of this process; `None` when unreadable.
    pub mems: Option<BTreeSet<NodeId>>,
    /// CPUs worth of time that the cgroups grant; `None` when unlimited or unreadable.
    pub cpu_quota: Option<f64>,
    /// How often the cgroups had used up their time, when the topology was read; see
    /// [`Topology::read_nr_throttled`].
    pub nr_throttled: Option<u64>,
    /// Present CPUs in `Cpus_allowed_list`. This is the mask of one thread, not the cpuset.
    pub proc_allowed: Option<CpuSet>,
    root: Option<PathBuf>,
    this_machine: bool,
    cpu_stats: Vec<PathBuf>,
}

impl Topology {
    /// Reads this machine.
    ///
    /// # Errors
    /// As [`Topology::read`].
    pub fn system() -> Result<Self> {
        Self::read(Path::new("/"))
    }

    /// A machine of given CPUs and nodes, without limits.
    #[must_use]
    pub fn from_parts(mut cpus: Vec<CpuInfo>, mut nodes: Vec<NodeInfo>) -> Self {
        cpus.sort_by_key(|info| info.cpu);
        nodes.sort_by_key(|info| info.id);
        Self { cpus, nodes, ..Self::default() }
    }

    /// Reads `sys/` and `proc/` below `root`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no CPU below `root`; [`Error::Format`] for a file with
    /// unreadable content or of more than 1 MiB; [`Error::System`] when reading fails otherwise.
    pub fn read(root: &Path) -> Result<Self> {
        let cpu_dir = root.join("sys/devices/system/cpu");
        let folders = numbered(&cpu_dir, "cpu")?;
        let present = match read_list(&cpu_dir.join("present"))? {
            Some(present) => present,
            None => folders.keys().copied().map(CpuId).collect(),
        };
        if present.is_empty() {
            return Err(Error::Unavailable {
                what: cpu_dir.display().to_string(),
                message: "it lists no CPU; the root must hold sys/ and proc/".to_owned(),
            });
        }
        let online = read_list(&cpu_dir.join("online"))?;
        let mut cpus = Vec::new();
        for cpu in present.iter() {
            let mut info = match folders.get(&cpu.0) {
                Some(folder) => read_cpu(cpu, folder, &present)?,
                None => CpuInfo {
                    cpu,
                    online: true,
                    node: None,
                    package: None,
                    core: None,
                    siblings: CpuSet::new(),
                },
            };
            info.online &= online.as_ref().is_none_or(|online| online.contains(cpu));
            cpus.push(info);
        }
        let mut topology = Self {
            cpus,
            isolated: read_list(&cpu_dir.join("isolated"))?.unwrap_or_default(),
            root: Some(root.to_owned()),
            this_machine: root.canonicalize().is_ok_and(|root| root == Path::new("/")),
            ..Self::default()
        };
        topology.read_nodes(root)?;

        let limits = cgroup::Limits::read(root)?;
        topology.cpuset = limits.cpus.map(|cpus| cpus.intersection(&present));
        topology.mems = limits.mems.map(|mems| mems.iter().map(|node| NodeId(node.0)).collect());
        topology.cpu_quota = limits.quota;
        topology.cpu_stats = limits.cpu_stats;
        topology.nr_throttled = topology.read_nr_throttled()?;

        let status = root.join("proc/self/status");
        let text = read_text(&status)?.unwrap_or_default();
        if let Some(list) = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")) {
            topology.proc_allowed = Some(parse_list(&status, list)?.intersection(&present));
        }
        Ok(topology)
    }

    fn read_nodes(&mut self, root: &Path) -> Result<()> {
        let (present, online) = (self.present(), self.online());
        for (id, folder) in numbered(&root.join("sys/devices/system/node"), "node")? {
            let id = NodeId(id);
            let cpus = match read_list(&folder.join("cpulist"))? {
                Some(cpus) => Some(cpus),
                None => read_mask(&folder.join("cpumap"))?,
            };
            let cpus = cpus.unwrap_or_default().intersection(&present);
            for info in self.cpus.iter_mut().filter(|info| cpus.contains(info.cpu)) {
                info.node = Some(id);
            }
            let path = folder.join("meminfo");
            let meminfo = read_text(&path)?.unwrap_or_default();
            self.nodes.push(NodeInfo {
                id,
                cpus: cpus.intersection(&online),
                mem_total: meminfo_bytes(&path, &meminfo, "MemTotal:")?.unwrap_or_default(),
                mem_free: meminfo_bytes(&path, &meminfo, "MemFree:")?.unwrap_or_default(),
            });
        }
        if self.nodes.is_empty() {
            let path = root.join("proc/meminfo");
            let meminfo = read_text(&path)?.unwrap_or_default();
            self.nodes.push(NodeInfo {
                id: NodeId(0),
                cpus: online,
                mem_total: meminfo_bytes(&path, &meminfo, "MemTotal:")?.unwrap_or_default(),
                mem_free: meminfo_bytes(&path, &meminfo, "MemFree:")?.unwrap_or_default(),
            });
            for info in &mut self.cpus {
                info.node = Some(NodeId(0));
            }
        }
        Ok(())
    }

    /// Whether it was read from the running kernel, so that its CPUs can be bound.
    #[must_use]
    pub fn is_this_machine(&self) -> bool {
        self.this_machine
    }

    /// The present CPUs.
    #[must_use]
    pub fn present(&self) -> CpuSet {
        self.cpus.iter().map(|info| info.cpu).collect()
    }

    /// The online CPUs.
    #[must_use]
    pub fn online(&self) -> CpuSet {
        self.cpus.iter().filter(|info| info.online).map(|info| info.cpu).collect()
    }

    /// A present CPU.
    #[must_use]
    pub fn cpu(&self, cpu: CpuId) -> Option<&CpuInfo> {
        let index = self.cpus.binary_search_by_key(&cpu, |info| info.cpu).ok()?;
        self.cpus.get(index)
    }

    /// Whether the CPU is present and online.
    #[must_use]
    pub fn is_online(&self, cpu: CpuId) -> bool {
        self.cpu(cpu).is_some_and(|info| info.online)
    }

    /// The NUMA node of a CPU, where known.
    #[must_use]
    pub fn node_of(&self, cpu: CpuId) -> Option<NodeId> {
        self.cpu(cpu)?.node
    }

    /// A NUMA node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NodeInfo> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// A node to run on: one with online CPUs.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a memory-only or unknown node.
    pub fn cpu_node(&self, id: NodeId) -> Result<&NodeInfo> {
        self.usable_node("CPUs", id, |node| {
            node.cpus.is_empty().then_some("the node has no online CPU")
        })
    }

    /// A node to bind memory to: one with memory, inside the cpuset.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a node that has CPUs only, that the cpuset excludes, or that is
    /// unknown.
    pub fn memory_node(&self, id: NodeId) -> Result<&NodeInfo> {
        self.usable_node("memory", id, |node| {
            if node.mem_total == 0 {
                Some("the node has no memory (MemTotal is 0)")
            } else if self.mems.as_ref().is_some_and(|mems| !mems.contains(&id)) {
                Some("the cpuset of this process excludes the node")
            } else {
                None
            }
        })
    }

    fn usable_node(
        &self,
        what: &str,
        id: NodeId,
        obstacle: impl Fn(&NodeInfo) -> Option<&'static str>,
    ) -> Result<&NodeInfo> {
        let node = self.node(id);
        let message = match node.map_or(Some("there is no such node"), &obstacle) {
            None => None,
            Some(why) => {
                let usable: CpuSet = (self.nodes.iter())
                    .filter(|node| obstacle(node).is_none())
                    .map(|node| CpuId(node.id.0))
                    .collect();
                Some(format!("{why}; use one of the nodes {usable}"))
            }
        };
        match (node, message) {
            (Some(node), None) => Ok(node),
            (_, message) => Err(Error::Unavailable {
                what: format!("{what} of NUMA node {id}"),
                message: message.unwrap_or_default(),
            }),
        }
    }

    /// How often this process's cgroup and those above it had used up their time, read anew; it
    /// grows while they are throttled. `None` when no cgroup counts.
    ///
    /// # Errors
    /// [`Error::Format`] or [`Error::System`] when a counter cannot be read.
    pub fn read_nr_throttled(&self) -> Result<Option<u64>> {
        let mut total = None;
        for path in &self.cpu_stats {
            let text = read_text(path)?.unwrap_or_default();
            if let Some(count) = text.lines().find_map(|line| line.strip_prefix("nr_throttled ")) {
                let count: u64 = parse_number(path, count)?;
                total = Some(total.unwrap_or(0_u64).saturating_add(count));
            }
        }
        Ok(total)
    }

    /// Bytes that can be allocated without swapping and within the memory limits of this process's
    /// cgroups, read anew; for a machine of given parts the free memory of its nodes.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the file says nothing, [`Error::Format`] or [`Error::System`]
    /// when it cannot be read.
    pub fn mem_available(&self) -> Result<u64> {
        let Some(root) = &self.root else {
            return Ok(self.nodes.iter().map(|node| node.mem_free).sum());
        };
        let path = root.join("proc/meminfo");
        let text = read_text(&path)?.unwrap_or_default();
        // Kernels before 3.14 do not estimate it; what is free is the cautious answer then.
        for key in ["MemAvailable:", "MemFree:"] {
            if let Some(bytes) = meminfo_bytes(&path, &text, key)? {
                // A limit that cannot be read is none; the allocation itself will tell.
                let left = cgroup::memory_left(root).ok().flatten();
                return Ok(left.map_or(bytes, |left| left.min(bytes)));
            }
        }
        Err(Error::Unavailable {
            what: "the amount of free memory".to_owned(),
            message: format!("{} has neither MemAvailable nor MemFree", path.display()),
        })
    }
}

fn read_cpu(cpu: CpuId, folder: &Path, present: &CpuSet) -> Result<CpuInfo> {
    let online = match read_text(&folder.join("online"))? {
        Some(text) => text.trim() != "0",
        // CPUs that cannot be taken offline have no such file.
        None => true,
    };
    let topology = folder.join("topology");
    let id = |name: &str| -> Result<Option<i64>> {
        let path = topology.join(name);
        let id = read_text(&path)?.map(|text| parse_number(&path, &text)).transpose()?;
        Ok(id.filter(|&id: &i64| id >= 0))
    };
    let mut siblings = None;
    for name in ["core_cpus", "thread_siblings"] {
        if siblings.is_none() {
            siblings = read_list(&topology.join(format!("{name}_list")))?;
        }
        if siblings.is_none() {
            siblings = read_mask(&topology.join(name))?;
        }
    }
    Ok(CpuInfo {
        cpu,
        online,
        // A node's list leaves out its offline CPUs, so this link can be the only trace.
        node: numbered(folder, "node")?.into_keys().next().map(NodeId),
        package: id("physical_package_id")?,
        core: id("core_id")?,
        siblings: siblings.unwrap_or_default().intersection(present),
    })
}

/// The entries of a folder named `prefix` and a number; none when there is no such folder.
fn numbered(folder: &Path, prefix: &str) -> Result<BTreeMap<u32, PathBuf>> {
    let mut found = BTreeMap::new();
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return unless_missing("readdir", folder, &error, found),
    };
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return unless_missing("readdir", folder, &error, found),
        };
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
        let number = number.and_then(|number| number.parse().ok());
        if let Some(number) = number.filter(|&number| number <= MAX_ID) {
            found.insert(number, entry.path());
        }
    }
    Ok(found)
}

/// `missing` when the error means that the kernel (or the dump) does not offer this file to us.
fn unless_missing<T>(
    call: &'static str,
    path: &Path,
    error: &std::io::Error,
    missing: T,
) -> Result<T> {
    let errno = error.raw_os_error().unwrap_or_default();
    match errno {
        // An offline CPU's files may answer ENODEV or EINVAL, cgroup files EOPNOTSUPP.
        libc::ENOENT
        | libc::ENOTDIR
        | libc::EACCES
        | libc::EPERM
        | libc::ENODEV
        | libc::EINVAL
        | libc::EOPNOTSUPP => Ok(missing),
        _ => Err(Error::system(call, errno, format!("reading {}", path.display()))),
    }
}

/// The text of a file; `None` when there is no such file, or not for us.
fn read_text(path: &Path) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    // Asked for first, because opening a named pipe in a dump would wait for a writer.
    let read = std::fs::metadata(path).and_then(|metadata| {
        if metadata.is_file() {
            File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map(Some)
        } else {
            Ok(None)
        }
    });
    let length = match read {
        Ok(length) => length,
        Err(error) => return unless_missing("read", path, &error, None),
    };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(malformed(path, format!("longer than {MAX_FILE_BYTES} bytes")));
    }
    // Some kernels (5.15-rc1) end topology lists with a NUL.
    while bytes.pop_if(|last| *last == 0).is_some() {}
    Ok(length.map(|_| String::from_utf8_lossy(&bytes).into_owned()))
}

fn malformed(path: &Path, message: impl Into<String>) -> Error {
    Error::format(path.display().to_string(), message)
}

fn parse_list(path: &Path, text: &str) -> Result<CpuSet> {
    CpuSet::from_kernel_list(text).map_err(|message| malformed(path, message))
}

fn read_list(path: &Path) -> Result<Option<CpuSet>> {
    read_text(path)?.map(|text| parse_list(path, &text)).transpose()
}

fn read_mask(path: &Path) -> Result<Option<CpuSet>> {
    let parse =
        |text: String| CpuSet::from_kernel_mask(&text).map_err(|message| malformed(path, message));
    read_text(path)?.map(parse).transpose()
}

fn parse_number<T: std::str::FromStr>(path: &Path, text: &str) -> Result<T> {
    let text = text.trim();
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(60).collect();
        malformed(path, format!("'{shown}' is not a number"))
    })
}

/// Bytes of a line such as `Node 0 MemTotal:  8386704 kB` or `MemTotal:  8386704 kB`.
fn meminfo_bytes(path: &Path, text: &str, key: &str) -> Result<Option<u64>> {
    let mut values = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.find(|word| word.ends_with(':')).filter(|word| *word == key)?;
        words.next()
    });
    let Some(value) = values.next() else { return Ok(None) };
    let kib: u64 = parse_number(path, value)?;
    kib.checked_mul(1024).map(Some).ok_or_else(|| malformed(path, format!("{key} {kib} kB")))
}

#[cfg(test)]
mod tests;
