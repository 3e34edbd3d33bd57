//! Whether two runs measured the same thing the same way.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::plan::{CorePairPlan, H2dPlan};
use crate::report::Report;
use crate::run::{ImportPlan, Manifest, RunStatus};

/// What speaks against comparing, and what else differs.
#[derive(Debug, Default)]
pub(super) struct Setup {
    pub(super) differences: Vec<String>,
    pub(super) notes: Vec<String>,
}

impl Setup {
    fn differ<T: PartialEq>(&mut self, what: &str, a: &T, b: &T, show: impl Fn(&T) -> String) {
        if a != b {
            self.differences.push(format!("{what}: {} in A, {} in B", show(a), show(b)));
        }
    }

    /// A difference only where both sides tell.
    fn differ_if_known<T: PartialEq + Display>(&mut self, what: &str, a: Option<T>, b: Option<T>) {
        match (a, b) {
            (Some(a), Some(b)) => self.differ(what, &a, &b, ToString::to_string),
            (None, None) => {}
            (known, _) => {
                let side = if known.is_some() { "B" } else { "A" };
                self.notes.push(format!("{what}: unknown in {side}, so not compared"));
            }
        }
    }
}

/// Ids as a list with ranges, `0-3,8`, in their order.
pub(crate) fn list(ids: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &id in ids {
        match parts.last_mut() {
            Some(last) if last.1.checked_add(1) == Some(id) => last.1 = id,
            _ => parts.push((id, id)),
        }
    }
    let show = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.iter().map(show).collect::<Vec<_>>().join(",")
}

fn joined<T: Display>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn word<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(serde_json::Value::Null) | Err(_) => "none".to_owned(),
        Ok(other) => other.to_string(),
    }
}

pub(super) fn check(a: &Report, b: &Report) -> Setup {
    let mut setup = Setup::default();
    manifests(&mut setup, &a.manifest, &b.manifest);
    nodes(&mut setup, a, b);
    let kinds = |report: &Report| {
        report
            .matrices
            .iter()
            .map(|matrix| {
                let sizes = joined(&matrix.sizes);
                format!("{} {} {} {sizes}", matrix.sweep, matrix.load, matrix.memory.as_str())
            })
            .collect::<Vec<_>>()
    };
    setup.differ("matrices (sweep, load, memory, sizes)", &kinds(a), &kinds(b), |kinds| {
        format!("[{}]", kinds.join("; "))
    });
    let clock = |report: &Report| {
        let events = report.blocks.iter().any(|blocks| !blocks.host_gbps.is_empty());
        if events { "device events" } else { "host" }
    };
    setup.differ("clock of the rates", &clock(a), &clock(b), ToString::to_string);
    setup
}

fn manifests(setup: &mut Setup, a: &Manifest, b: &Manifest) {
    let text = |text: &String| if text.is_empty() { "import".to_owned() } else { text.clone() };
    setup.differ("backend", &a.environment.backend, &b.environment.backend, text);
    setup.differ("order", &a.order, &b.order, Clone::clone);
    let has = |manifest: &Manifest| {
        let plan = &manifest.plan;
        [
            ("h2d", plan.h2d.is_some()),
            ("core-pair", plan.core_pair.is_some()),
            ("import", plan.import.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, has)| has.then_some(name))
        .collect::<Vec<_>>()
    };
    setup.differ("sweeps", &has(a), &has(b), |sweeps| sweeps.join(" and "));
    if let (Some(a), Some(b)) = (&a.plan.h2d, &b.plan.h2d) {
        h2d(setup, a, b);
    }
    if let (Some(a), Some(b)) = (&a.plan.core_pair, &b.plan.core_pair) {
        core_pair(setup, a, b);
    }
    if let (Some(a), Some(b)) = (&a.plan.import, &b.plan.import) {
        imports(setup, a, b);
    }
    let models = |manifest: &Manifest| {
        let names = manifest.devices.iter().map(|device| (device.id, device.name.clone()));
        names.collect::<BTreeMap<_, _>>()
    };
    setup.differ("device models", &models(a), &models(b), |models| {
        let mut counts = BTreeMap::<&str, usize>::new();
        for name in models.values() {
            *counts.entry(name).or_insert(0) += 1;
        }
        let show = |(name, count): (&&str, &usize)| format!("{count} × {name}");
        counts.iter().map(show).collect::<Vec<_>>().join(", ")
    });
    let (left, right) = (&a.environment, &b.environment);
    setup.differ_if_known("processor", left.cpu_model.as_ref(), right.cpu_model.as_ref());
    setup.differ_if_known("CPU quota", left.cpu_quota, right.cpu_quota);
    for (what, a, b) in [
        ("kernel", word(&left.kernel), word(&right.kernel)),
        ("governors", word(&left.governors), word(&right.governors)),
        ("isolated CPUs", word(&left.isolated), word(&right.isolated)),
        ("numa_balancing", word(&left.numa_balancing), word(&right.numa_balancing)),
        (
            "transparent huge pages",
            word(&left.transparent_hugepage),
            word(&right.transparent_hugepage),
        ),
        ("cluster-health", a.tool.version.clone(), b.tool.version.clone()),
    ] {
        if a != b {
            setup.notes.push(format!("{what}: {a} in A, {b} in B"));
        }
    }
    if word(&left.ascend) != word(&right.ascend) {
        setup.notes.push("versions or files of the Ascend software differ".to_owned());
    }
    let names = left.variables.keys().chain(right.variables.keys());
    let mut changed: Vec<&str> = names
        .filter(|name| !name.starts_with("CLUSTER_HEALTH_"))
        .filter(|name| left.variables.get(*name) != right.variables.get(*name))
        .map(String::as_str)
        .collect();
    changed.sort_unstable();
    changed.dedup();
    if !changed.is_empty() {
        setup.notes.push(format!("variables differ: {}", changed.join(", ")));
    }
    for (side, manifest) in [("A", a), ("B", b)] {
        if manifest.status != RunStatus::Complete {
            setup.notes.push(format!("{side} is not complete"));
        }
    }
}

fn h2d(setup: &mut Setup, a: &H2dPlan, b: &H2dPlan) {
    let ids = |plan: &H2dPlan| plan.cpus.iter().map(|cpu| cpu.0).collect::<Vec<_>>();
    setup.differ("CPUs", &ids(a), &ids(b), |ids| list(ids));
    let ids = |plan: &H2dPlan| plan.devices.iter().map(|device| device.0).collect::<Vec<_>>();
    setup.differ("devices", &ids(a), &ids(b), |ids| list(ids));
    setup.differ("sizes", &a.sizes, &b.sizes, |sizes| joined(sizes));
    setup.differ("direction", &a.direction, &b.direction, word);
    setup.differ("other devices at the same time", &a.concurrent, &b.concurrent, word);
    setup.differ("iterations", &a.iters, &b.iters, ToString::to_string);
    setup.differ("warm-up", &a.warmup, &b.warmup, warmup);
    setup.differ("arenas", &a.arena, &b.arena, word);
    setup.differ("data check", &a.check, &b.check, word);
    if let (Some(a), Some(b)) = (&a.expect, &b.expect) {
        setup.differ("declared rate of the link", a, b, ToString::to_string);
    }
    blocks(setup, a.repeats, b.repeats);
}

fn core_pair(setup: &mut Setup, a: &CorePairPlan, b: &CorePairPlan) {
    setup.differ("device pair", &a.device_pair, &b.device_pair, |pair| joined(pair));
    let ids =
        |cpus: &[cluster_health_core::CpuId]| cpus.iter().map(|cpu| cpu.0).collect::<Vec<_>>();
    setup.differ("rank-0 CPUs", &ids(&a.rank0_cpus), &ids(&b.rank0_cpus), |ids| list(ids));
    setup.differ("rank-1 CPUs", &ids(&a.rank1_cpus), &ids(&b.rank1_cpus), |ids| list(ids));
    setup.differ("sizes of pairs", &a.sizes, &b.sizes, |sizes| joined(sizes));
    setup.differ("iterations of pairs", &a.iters, &b.iters, ToString::to_string);
    setup.differ("warm-up of pairs", &a.warmup, &b.warmup, warmup);
    setup.differ("data check of pairs", &a.check, &b.check, word);
    if let (Some(a), Some(b)) = (&a.expect, &b.expect) {
        setup.differ("declared rate per rank", a, b, ToString::to_string);
    }
    blocks(setup, a.repeats, b.repeats);
}

fn imports(setup: &mut Setup, a: &ImportPlan, b: &ImportPlan) {
    setup.differ("format", &a.format, &b.format, Clone::clone);
    setup.differ("imported sweep", &a.sweep, &b.sweep, ToString::to_string);
    setup.differ("rows", &a.rows, &b.rows, |ids| list(ids));
    setup.differ("columns", &a.columns, &b.columns, |ids| list(ids));
    setup.differ("sizes", &a.sizes, &b.sizes, |sizes| joined(sizes));
    setup.differ("device pair", &a.device_pair, &b.device_pair, word);
}

fn warmup(warmup: &Option<u32>) -> String {
    warmup.map_or_else(|| "until settled".to_owned(), |count| count.to_string())
}

/// More blocks make a run more precise, not another one.
fn blocks(setup: &mut Setup, a: u32, b: u32) {
    if a != b {
        setup.notes.push(format!("blocks: {a} in A, {b} in B"));
    }
}

fn nodes(setup: &mut Setup, a: &Report, b: &Report) {
    let nodes = |report: &Report| report.affinity.as_ref().map(crate::run::AffinityFile::nodes);
    let (left, right) = (nodes(a), nodes(b));
    let count = |nodes: &Option<BTreeMap<u32, u32>>| {
        let mut nodes: Vec<u32> = nodes.as_ref()?.values().copied().collect();
        nodes.sort_unstable();
        nodes.dedup();
        Some(nodes.len())
    };
    let (nodes_a, nodes_b) = (count(&left), count(&right));
    setup.differ_if_known("NUMA nodes", nodes_a, nodes_b);
    if nodes_a == nodes_b
        && let (Some(left), Some(right)) = (left, right)
    {
        let moved: Vec<u32> = left
            .iter()
            .filter(|(cpu, node)| right.get(cpu).is_some_and(|other| other != *node))
            .map(|(cpu, _)| *cpu)
            .collect();
        if !moved.is_empty() {
            let moved = list(&moved);
            setup.differences.push(format!("NUMA node of CPUs {moved} is another one"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::list;

    #[test]
    fn lists_keep_their_order() {
        assert_eq!(list(&[0, 1, 2, 8, 5, 6]), "0-2,8,5-6");
        assert_eq!(list(&[]), "");
        assert_eq!(list(&[u32::MAX]), "4294967295");
    }
}
