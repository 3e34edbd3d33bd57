//! On which CPUs burners run: spread over a NUMA node, never on a core that is measured.

use std::collections::BTreeMap;

use super::LoadProfile;
use crate::error::{Error, Result};
use crate::id::{CpuId, NodeId};
use crate::machine::Machine;

/// Usable CPUs in the order in which they are given away: the first threads of all cores, then the
/// others.
#[derive(Debug, Clone, Default)]
struct Ranked {
    cpus: Vec<CpuId>,
    /// So many of them are first threads.
    cores: usize,
}

impl Ranked {
    fn new(mut cpus: Vec<(bool, CpuId)>) -> Self {
        cpus.sort_unstable();
        let cores = cpus.iter().filter(|(is_other, _)| !is_other).count();
        Self { cpus: cpus.into_iter().map(|(_, cpu)| cpu).collect(), cores }
    }

    /// A free CPU, for the `index`-th of `count` burners that are spread over these CPUs.
    fn pick(&self, index: usize, count: usize, taken: &[CpuId]) -> Option<CpuId> {
        let span = if count <= self.cores { self.cores } else { self.cpus.len() };
        let first = (index * span).checked_div(count)?;
        let near = (0..span).map(|step| self.cpus[(first + step) % span]);
        near.chain(self.cpus[span..].iter().copied()).find(|cpu| !taken.contains(cpu))
    }
}

/// Finds CPUs for burners.
#[derive(Debug)]
pub(super) struct Placer {
    all: Ranked,
    nodes: BTreeMap<Option<NodeId>, Ranked>,
    /// All threads of a CPU's core, where it has more than one.
    siblings: BTreeMap<CpuId, Vec<CpuId>>,
}

impl Placer {
    pub(super) fn new(machine: &Machine) -> Result<Self> {
        let topology = machine.topology();
        let mut all = Vec::new();
        let mut nodes = BTreeMap::<_, Vec<(bool, CpuId)>>::new();
        let mut siblings = BTreeMap::new();
        for cpu in machine.census()?.bindable() {
            let threads: Vec<CpuId> =
                topology.cpu(cpu).map(|info| info.siblings.iter().collect()).unwrap_or_default();
            let is_other = threads.first().is_some_and(|first| *first != cpu);
            all.push((is_other, cpu));
            nodes.entry(machine.node_of(cpu)).or_default().push((is_other, cpu));
            if threads.len() > 1 {
                siblings.insert(cpu, threads);
            }
        }
        let nodes = nodes.into_iter().map(|(node, cpus)| (node, Ranked::new(cpus))).collect();
        Ok(Self { all: Ranked::new(all), nodes, siblings })
    }

    /// A CPU for each of the homes (the node where a burner belongs) of each rank. Where a node has
    /// no CPU left, others serve.
    pub(super) fn place(
        &self,
        profile: &LoadProfile,
        measured: &[CpuId],
        homes: &[Vec<Option<NodeId>>],
    ) -> Result<Vec<Vec<CpuId>>> {
        let mut taken: Vec<CpuId> = measured.to_vec();
        for cpu in measured {
            taken.extend(self.siblings.get(cpu).into_iter().flatten());
        }
        let needed: usize = homes.iter().map(Vec::len).sum();
        let left = self.all.cpus.iter().filter(|cpu| !taken.contains(cpu)).count();
        if left < needed {
            let cpus: Vec<String> = measured.iter().map(ToString::to_string).collect();
            return Err(Error::Unavailable {
                what: format!("load {profile}"),
                message: format!(
                    "it needs {needed} CPUs beside the measured cores (of CPU {}), {left} can be \
                     bound; ask for fewer burners",
                    cpus.join(" and ")
                ),
            });
        }
        let mut counts = BTreeMap::<Option<NodeId>, [usize; 2]>::new();
        for home in homes.iter().flatten() {
            counts.entry(*home).or_default()[1] += 1;
        }
        let mut places = Vec::with_capacity(homes.len());
        for homes in homes {
            let mut own = Vec::with_capacity(homes.len());
            for home in homes {
                let [index, count] = counts.entry(*home).or_default();
                let node = self.nodes.get(home);
                let found = node
                    .and_then(|node| node.pick(*index, *count, &taken))
                    .or_else(|| self.all.pick(*index, *count, &taken));
                *index += 1;
                // There are as many as are needed, see above.
                let Some(cpu) = found else { continue };
                taken.push(cpu);
                own.push(cpu);
            }
            places.push(own);
        }
        Ok(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scenario;

    fn placer(text: &str) -> Placer {
        let scenario = Scenario::parse(&format!("[machine]\n{text}\n"), "test").unwrap();
        Placer::new(&Machine::synthetic(scenario).unwrap()).unwrap()
    }

    fn place(placer: &Placer, measured: &[u32], homes: &[Vec<Option<u32>>]) -> Vec<Vec<u32>> {
        let measured: Vec<CpuId> = measured.iter().copied().map(CpuId).collect();
        let homes: Vec<Vec<Option<NodeId>>> =
            homes.iter().map(|list| list.iter().map(|node| node.map(NodeId)).collect()).collect();
        let places = placer.place(&LoadProfile::Device, &measured, &homes).unwrap();
        places.iter().map(|list| list.iter().map(|cpu| cpu.0).collect()).collect()
    }

    #[test]
    fn burners_are_spread_over_the_cores_of_the_node() {
        // Cores 0–7 have the threads 2k and 2k + 1; node 1 has the cores 4–7.
        let placer = placer("cpus = 16\nsmt = 2\nnuma_nodes = 2");
        assert_eq!(place(&placer, &[0], &[vec![Some(1); 2]]), [[8, 12]]);
        assert_eq!(place(&placer, &[0], &[vec![Some(1); 4]]), [[8, 10, 12, 14]]);
        // Neither the measured CPU nor the other thread of its core.
        assert_eq!(place(&placer, &[8], &[vec![Some(1); 2]]), [[10, 12]]);
        for count in 1..=6 {
            let found = place(&placer, &[11], &[vec![Some(1); count]]);
            assert_eq!(found[0].len(), count);
            assert!(found[0].iter().all(|cpu| *cpu >= 8 && ![10, 11].contains(cpu)), "{found:?}");
        }
    }

    #[test]
    fn ranks_share_nothing_and_full_nodes_lend() {
        let placer = placer("cpus = 8\nsmt = 1\nnuma_nodes = 2");
        let found = place(&placer, &[0, 1], &[vec![Some(0); 2], vec![Some(0); 2]]);
        let mut all = found.concat();
        all.sort_unstable();
        assert_eq!(all.len(), 4);
        all.dedup();
        assert_eq!(all.len(), 4);
        assert!(all.contains(&2) && all.contains(&3) && !all.contains(&0) && !all.contains(&1));
    }

    #[test]
    fn too_few_cpus_are_an_error_that_counts() {
        let placer = placer("cpus = 4\nsmt = 2\nnuma_nodes = 1");
        let profile: LoadProfile = "cpu:3".parse().unwrap();
        let error = placer.place(&profile, &[CpuId(0)], &[vec![Some(NodeId(0)); 3]]).unwrap_err();
        assert_eq!(error.kind(), "unavailable");
        let text = error.to_string();
        assert!(
            text.contains("cpu:3") && text.contains("3 CPUs") && text.contains("2 can"),
            "{text}"
        );
    }
}
