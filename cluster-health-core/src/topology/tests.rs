use std::fs;

use tempfile::TempDir;

use super::*;
use crate::affinity::Census;

fn set(text: &str) -> CpuSet {
    CpuSet::parse_kernel_list(text).unwrap()
}

/// A dump of the given files.
fn dump(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

const CPU: &str = "sys/devices/system/cpu";
const NODE: &str = "sys/devices/system/node";

fn read(files: &[(&str, &str)]) -> Topology {
    Topology::read(dump(files).path()).unwrap()
}

#[test]
fn f1_offline_cpu_zero() {
    let mut files = vec![
        (format!("{CPU}/present"), "0-11\n".to_owned()),
        (format!("{CPU}/online"), "1-11\n".to_owned()),
        (format!("{CPU}/cpu0/online"), "0\n".to_owned()),
        (format!("{NODE}/node0/cpulist"), "1-5\n".to_owned()),
        (format!("{NODE}/node1/cpulist"), "6-11\n".to_owned()),
    ];
    for cpu in 1..12 {
        let folder = format!("{CPU}/cpu{cpu}/topology");
        files.push((format!("{folder}/physical_package_id"), format!("{}\n", cpu / 6)));
        files.push((format!("{folder}/core_id"), format!("{}\n", cpu % 6 / 2)));
        let even = cpu / 2 * 2;
        files.push((format!("{folder}/thread_siblings_list"), format!("{even}-{}\n", even + 1)));
    }
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), t.as_str())).collect();
    let topology = read(&files);
    assert_eq!(topology.present(), set("0-11"));
    assert_eq!(topology.online(), set("1-11"));
    assert!(!topology.is_online(CpuId(0)) && !topology.is_online(CpuId(12)));
    assert_eq!(topology.node_of(CpuId(5)), Some(NodeId(0)));
    assert_eq!(topology.node_of(CpuId(0)), None);
    let cpu = topology.cpu(CpuId(9)).unwrap();
    assert_eq!((cpu.package, cpu.core, cpu.siblings.to_string()), (Some(1), Some(1), "8-9".into()));

    let census = Census::inspect(&topology);
    let zero = census.record(CpuId(0)).unwrap();
    assert!(!zero.online && !zero.allowed && zero.bindable.is_none());
    assert!(census.cpus[1..].iter().all(|record| record.online && record.allowed));
}

#[test]
fn f3_a_node_with_memory_only() {
    let topology = read(&[
        (&format!("{CPU}/present"), "0-3"),
        (&format!("{NODE}/node0/cpulist"), "0-3\n"),
        (&format!("{NODE}/node0/meminfo"), "\nNode 0 MemTotal:  4 kB\nNode 0 MemFree:  1 kB\n"),
        (&format!("{NODE}/node1/cpulist"), "\n"),
        (&format!("{NODE}/node1/meminfo"), "Node 1 MemTotal:  16 kB\nNode 1 MemFree:  8 kB\n"),
    ]);
    let node = topology.memory_node(NodeId(1)).unwrap();
    assert_eq!((node.cpus.len(), node.mem_total, node.mem_free), (0, 16 << 10, 8 << 10));
    let error = topology.cpu_node(NodeId(1)).unwrap_err().to_string();
    assert!(error.contains("CPUs of NUMA node 1") && error.contains("no online CPU"), "{error}");
    assert!(error.ends_with("nodes 0"), "{error}");
    assert!(topology.cpus.iter().all(|info| info.node == Some(NodeId(0))));
}

#[test]
fn f4_a_node_with_cpus_only() {
    let topology = read(&[
        (&format!("{CPU}/present"), "0-47\n"),
        (&format!("{NODE}/node0/cpulist"), "0-5,24-29\n"),
        (&format!("{NODE}/node0/meminfo"), "Node 0 MemTotal:       0 kB\nNode 0 MemFree: 0 kB\n"),
        (&format!("{NODE}/node1/cpulist"), "6-11,30-35\n"),
        (&format!("{NODE}/node1/meminfo"), "Node 1 MemTotal:       9 kB\nNode 1 MemFree: 0 kB\n"),
    ]);
    assert_eq!(topology.cpu_node(NodeId(0)).unwrap().cpus, set("0-5,24-29"));
    assert_eq!(topology.node_of(CpuId(25)), Some(NodeId(0)));
    let error = topology.memory_node(NodeId(0)).unwrap_err();
    assert_eq!(error.kind(), "unavailable");
    let error = error.to_string();
    assert!(error.contains("memory of NUMA node 0") && error.contains("no memory"), "{error}");
    assert!(topology.memory_node(NodeId(7)).is_err());
}

#[test]
fn f5_allowed_list_wider_than_the_machine() {
    let topology = read(&[
        (&format!("{CPU}/present"), "0-15\n"),
        ("proc/self/status", "Name:\tx\nCpus_allowed:\tffffffff\nCpus_allowed_list:\t0-31\n"),
        ("sys/fs/cgroup/cpuset.cpus.effective", "0-31\n"),
    ]);
    assert_eq!(topology.proc_allowed, Some(set("0-15")));
    assert_eq!(topology.cpuset, Some(set("0-15")));
    assert_eq!(Census::inspect(&topology).summary().allowed, 16);
}

#[test]
fn f7_more_than_1024_cpus() {
    let topology = read(&[
        (&format!("{CPU}/present"), "0-2000\n"),
        (&format!("{CPU}/online"), "0-2000\n"),
        (&format!("{NODE}/node0/cpulist"), "1020-1030,2000\n"),
    ]);
    assert_eq!(topology.cpus.len(), 2001);
    assert_eq!(topology.nodes[0].cpus.len(), 12);
    assert_eq!(topology.node_of(CpuId(2000)), Some(NodeId(0)));
}

#[test]
fn f9_half_a_cpu_of_quota() {
    let root = dump(&[
        (&format!("{CPU}/present"), "0-31\n"),
        ("proc/self/cgroup", "0::/job/step\n"),
        ("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/cpuset.cpus.effective", "0-63\n"),
        ("sys/fs/cgroup/cpu.stat", "usage_usec 5\n"),
        ("sys/fs/cgroup/job/cpuset.cpus.effective", "0-31\n"),
        ("sys/fs/cgroup/job/cpuset.mems.effective", "0\n"),
        ("sys/fs/cgroup/job/cpu.max", "50000 100000\n"),
        ("sys/fs/cgroup/job/cpu.stat", "usage_usec 5\nnr_periods 9\nnr_throttled 4\n"),
        ("sys/fs/cgroup/job/step/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/job/step/cpu.stat", "nr_periods 9\nnr_throttled 3\n"),
    ]);
    let topology = Topology::read(root.path()).unwrap();
    assert_eq!(topology.cpu_quota, Some(0.5));
    assert_eq!(topology.cpuset, Some(set("0-31")));
    assert_eq!(topology.mems, Some(BTreeSet::from([NodeId(0)])));
    assert_eq!(topology.nr_throttled, Some(7));
    assert_eq!(Census::inspect(&topology).summary().quota, Some(0.5));
    fs::write(root.path().join("sys/fs/cgroup/job/cpu.stat"), "nr_throttled 6\n").unwrap();
    assert_eq!(topology.read_nr_throttled().unwrap(), Some(9));
}

#[test]
fn cgroup_v1_in_its_variants() {
    let base = [(format!("{CPU}/present"), "0-31\n")];
    let with = |files: &[(&str, &str)]| {
        let mut all: Vec<(&str, &str)> = base.iter().map(|(p, t)| (p.as_str(), *t)).collect();
        all.extend_from_slice(files);
        read(&all)
    };
    // A container that sees only its own group of the host's hierarchies.
    let topology = with(&[
        ("proc/self/cgroup", "5:cpu,cpuacct:/docker/ab\n4:cpuset:/docker/ab\n0::/docker/ab\n"),
        (
            "proc/self/mountinfo",
            "1 0 0:1 /docker/ab /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n\
             2 0 0:2 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
        ),
        ("sys/fs/cgroup/cpuset/cpuset.cpus", "0-11\n"),
        ("sys/fs/cgroup/cpuset/cpuset.effective_cpus", "0-3,8\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/cpu.stat", "nr_throttled 2\n"),
    ]);
    assert_eq!(topology.cpuset, Some(set("0-3,8")));
    assert_eq!((topology.cpu_quota, topology.nr_throttled), (Some(2.5), Some(2)));
    // No limit, and a leaf whose cpuset was never set up.
    let topology = with(&[
        ("proc/self/cgroup", "5:cpu:/a\n4:cpuset:/a\n"),
        (
            "proc/mounts",
            "cgroup /cg\\040roup/s cgroup rw,cpuset 0 0\ncgroup /cg\\040roup/c cgroup rw,cpu 0 0\n",
        ),
        ("cg roup/s/a/cpuset.cpus", "\n"),
        ("cg roup/s/cpuset.cpus", "0-7\n"),
        ("cg roup/c/a/cpu.cfs_quota_us", "-1\n"),
        ("cg roup/c/a/cpu.cfs_period_us", "100000\n"),
    ]);
    assert_eq!((topology.cpuset, topology.cpu_quota), (Some(set("0-7")), None));
    // A group outside the namespace, and a mount point that leads out of the dump.
    let topology = with(&[
        ("proc/self/cgroup", "0::/../../etc\n"),
        ("proc/mounts", "cgroup2 /../../cg cgroup2 rw 0 0\n"),
    ]);
    assert_eq!(topology.cpuset, None);
}

#[test]
fn errors_name_the_file() {
    let present = format!("{CPU}/present");
    let online = format!("{CPU}/online");
    let error =
        |files: &[(&str, &str)]| Topology::read(dump(files).path()).unwrap_err().to_string();
    for (path, text) in [
        (online.as_str(), "0-x\n"),
        ("sys/devices/system/cpu/cpu0/topology/core_id", "none\n"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: much kB\n"),
        ("sys/fs/cgroup/cpu.max", "50000 0\n"),
        ("proc/self/status", "Cpus_allowed_list:\t0--1\n"),
        (online.as_str(), &"0,".repeat(600_000)),
    ] {
        let text = error(&[(&present, "0-3\n"), (path, text)]);
        assert!(text.contains(path), "{path}: {text}");
        assert!(text.len() < 500, "{text}");
    }
    assert!(error(&[("proc/meminfo", "")]).contains("must hold sys/ and proc/"));
    assert!(error(&[(&present, "0-9999999\n")]).contains("present"));
}

#[test]
fn this_machine() {
    let topology = Topology::system().unwrap();
    assert!(topology.is_this_machine());
    let list = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    assert_eq!(topology.online().to_string(), list.trim());
    let on_nodes: usize = topology.nodes.iter().map(|node| node.cpus.len()).sum();
    assert_eq!(on_nodes, topology.online().len());
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    let available = topology.mem_available().unwrap();
    assert!(0 < available && available <= total * 1024, "{available} of {total} KiB");
}

#[test]
fn a_memory_limit_bounds_what_is_available() {
    let present = format!("{CPU}/present");
    let files = [
        (present.as_str(), "0-1\n"),
        ("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable: 8000 kB\n"),
        ("proc/self/cgroup", "0::/job/step\n"),
        ("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/job/memory.max", "1000000\n"),
        ("sys/fs/cgroup/job/memory.current", "700000\n"),
        ("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 200000\n"),
        ("sys/fs/cgroup/job/step/memory.max", "max\n"),
        ("sys/fs/cgroup/job/step/memory.current", "600000\n"),
    ];
    let root = dump(&files);
    let topology = Topology::read(root.path()).unwrap();
    // 1,000,000 - (700,000 - 200,000), which is less than 8,000 KiB.
    assert_eq!(topology.mem_available().unwrap(), 500_000);
    fs::write(root.path().join("sys/fs/cgroup/job/memory.max"), "max\n").unwrap();
    assert_eq!(topology.mem_available().unwrap(), 8000 * 1024);
}

#[test]
fn given_parts() {
    let node = |id, mem_free| NodeInfo { id: NodeId(id), cpus: set("0"), mem_total: 9, mem_free };
    let topology = Topology::from_parts(Vec::new(), vec![node(3, 4), node(1, 2)]);
    assert!(!topology.is_this_machine());
    assert_eq!(topology.nodes[0].id, NodeId(1));
    assert_eq!(topology.mem_available().unwrap(), 6);
    assert_eq!(topology.read_nr_throttled().unwrap(), None);
}
