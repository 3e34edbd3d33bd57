//! CPUs, cores, packages, NUMA nodes and cgroup limits, read below an injectable root.
