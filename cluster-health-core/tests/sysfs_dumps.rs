//! Dumps of real machines, read here and by hwloc's `lstopo-no-graphics` (Debian: hwloc-nox).

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cluster_health_core::CpuId;
use cluster_health_core::affinity::{Census, CpuSet};
use cluster_health_core::topology::Topology;

/// What hwloc says about a machine.
#[derive(Default)]
struct Oracle {
    online: CpuSet,
    complete: CpuSet,
    allowed: CpuSet,
    allowed_nodes: BTreeSet<u32>,
    pus: CpuSet,
    cores: BTreeSet<String>,
    packages: BTreeMap<i64, CpuSet>,
    /// Node → (CPUs, bytes).
    nodes: BTreeMap<u32, (CpuSet, u64)>,
}

/// hwloc's masks: groups of 32 bits, the highest first; an empty group is 0.
fn mask(text: &str) -> CpuSet {
    let mut set = CpuSet::new();
    for (group, digits) in text.rsplit(',').enumerate() {
        let digits = digits.trim_start_matches("0x");
        let bits = if digits.is_empty() { 0 } else { u32::from_str_radix(digits, 16).unwrap() };
        for bit in (0..32).filter(|bit| bits & (1 << bit) != 0) {
            set.insert(CpuId(u32::try_from(group).unwrap() * 32 + bit));
        }
    }
    set
}

fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let start = line.find(&format!(" {name}=\""))? + name.len() + 3;
    line[start..].split('"').next()
}

fn ask_hwloc(root: &Path) -> Oracle {
    let output = Command::new("lstopo-no-graphics")
        .args(["--if", "fsroot", "--disallowed", "--of", "xml", "-i"])
        .arg(root)
        .env("HWLOC_THISSYSTEM", "0")
        // Memory of GPUs that the kernel shows as NUMA nodes is left out otherwise.
        .env("HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let xml = String::from_utf8(output.stdout).unwrap();
    let mut oracle = Oracle::default();
    for line in xml.lines().filter(|line| line.contains("<object ")) {
        let index = attribute(line, "os_index").map(|index| index.parse::<u32>().unwrap());
        let set = || mask(attribute(line, "cpuset").unwrap());
        match attribute(line, "type").unwrap() {
            "Machine" => {
                oracle.online = set();
                oracle.complete = mask(attribute(line, "complete_cpuset").unwrap());
                oracle.allowed = mask(attribute(line, "allowed_cpuset").unwrap());
                let nodes = mask(attribute(line, "allowed_nodeset").unwrap());
                oracle.allowed_nodes = nodes.iter().map(|node| node.0).collect();
            }
            "PU" => {
                oracle.pus.insert(CpuId(index.unwrap()));
            }
            "Core" => {
                oracle.cores.insert(set().to_string());
            }
            "Package" => {
                if let Some(index) = index {
                    oracle.packages.insert(index.into(), set());
                }
            }
            "NUMANode" => {
                let bytes = attribute(line, "local_memory").unwrap().parse().unwrap();
                oracle.nodes.insert(index.unwrap(), (set(), bytes));
            }
            _ => {}
        }
    }
    oracle
}

fn compare(name: &str, root: &Path) {
    let topology = Topology::read(root).unwrap();
    let hwloc = ask_hwloc(root);
    assert!(!hwloc.pus.is_empty() && hwloc.pus == hwloc.online, "{name}: oracle not understood");

    assert_eq!(topology.present(), hwloc.complete, "{name}: present");
    assert_eq!(topology.online(), hwloc.pus, "{name}: online");

    let online = topology.online();
    let cores: BTreeSet<String> = (topology.cpus.iter().filter(|info| info.online))
        .map(|info| info.siblings.intersection(&online).to_string())
        .collect();
    assert_eq!(cores, hwloc.cores, "{name}: cores");

    let mut packages: BTreeMap<i64, CpuSet> = BTreeMap::new();
    for info in topology.cpus.iter().filter(|info| info.online) {
        if let Some(package) = info.package {
            packages.entry(package).or_default().insert(info.cpu);
        }
    }
    assert_eq!(packages, hwloc.packages, "{name}: packages");

    let nodes: Vec<u32> = topology.nodes.iter().map(|node| node.id.0).collect();
    assert_eq!(nodes, hwloc.nodes.keys().copied().collect::<Vec<_>>(), "{name}: nodes");
    for node in &topology.nodes {
        let (cpus, bytes) = &hwloc.nodes[&node.id.0];
        assert_eq!(node.mem_total, *bytes, "{name}: memory of node {}", node.id);
        if node.cpus.is_empty() {
            // hwloc attaches a memory-only node to the CPUs near it.
            assert!(topology.cpu_node(node.id).is_err(), "{name}: node {}", node.id);
        } else {
            assert_eq!(node.cpus, *cpus, "{name}: CPUs of node {}", node.id);
        }
        for cpu in node.cpus.iter() {
            assert_eq!(topology.node_of(cpu), Some(node.id), "{name}: node of CPU {cpu}");
        }
    }

    let census = Census::inspect(&topology);
    let allowed: CpuSet = census.cpus.iter().filter(|r| r.allowed).map(|r| r.cpu).collect();
    if name == "nvidiagpunumanodes" {
        // The group's configured list (0-175, which hwloc reads) and its effective one (0-87)
        // differ here, and the kernel goes by the latter.
        assert_eq!(allowed.to_string(), "0-15");
    } else {
        assert_eq!(allowed, hwloc.allowed, "{name}: allowed");
        let nodes: BTreeSet<u32> = (topology.nodes.iter().map(|node| node.id))
            .filter(|id| topology.mems.as_ref().is_none_or(|mems| mems.contains(id)))
            .map(|id| id.0)
            .collect();
        assert_eq!(nodes, hwloc.allowed_nodes, "{name}: allowed nodes");
    }
    assert!(census.cpus.iter().all(|record| record.bindable.is_none()));
}

/// Below `folder`, the one with `sys/`: archives are not all named as what they hold.
fn dump_root(folder: &Path) -> PathBuf {
    let mut folders = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    folders.find(|path| path.join("sys").is_dir()).unwrap()
}

#[test]
fn dumps_read_as_hwloc_reads_them() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/sysfs");
    let Ok(archives) = fs::read_dir(&data) else {
        println!("skipped: no recorded data");
        return;
    };
    let mut version = Command::new("lstopo-no-graphics");
    if version.arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: lstopo-no-graphics is not installed (Debian: hwloc-nox)");
        return;
    }
    let mut compared = 0;
    for archive in archives {
        let archive = archive.unwrap().path();
        let name = archive.file_name().unwrap().to_str().unwrap();
        let Some(name) = name.strip_suffix(".tar.bz2") else { continue };
        let folder = tempfile::tempdir().unwrap();
        // Neither side of the comparison needs these thousands of small files.
        let unneeded = ["cache", "cpuidle", "device-tree", "memory[0-9]*", "sys/bus", "sys/class"];
        let unpacked = Command::new("tar")
            .args(unneeded.map(|name| format!("--exclude=*/{name}")))
            .arg("-xjf")
            .arg(&archive)
            .arg("-C")
            .arg(folder.path())
            .status();
        assert!(unpacked.unwrap().success(), "unpacking {name}");
        compare(name, &dump_root(folder.path()));
        compared += 1;
    }
    assert!(compared > 0, "no archive in {}", data.display());
}
