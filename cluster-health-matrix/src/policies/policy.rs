//! Where a rank's thread may run, and where its host memory lies.

use std::fmt;
use std::str::FromStr;

use cluster_health_core::affinity::{CpuSet, parse_id_list};
use cluster_health_core::{CpuId, Machine, NodeId};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// CPUs that a rank's thread may use.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum Policy {
    /// `none`: the thread is not bound; it runs where the process that was started may.
    None,
    /// `all`: every CPU that can be bound, also where the process was started with fewer.
    All,
    /// `local_rank`: the rank's own contiguous share of them.
    LocalRank,
    /// `numa:N`: those of node N.
    Numa(NodeId),
    /// `numa:N:shard`: the rank's own contiguous share of node N's.
    NumaShard(NodeId),
    /// `cpu:LIST`: the whole list, for every rank.
    Cpus(Vec<CpuId>),
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::All => f.write_str("all"),
            Self::LocalRank => f.write_str("local_rank"),
            Self::Numa(node) => write!(f, "numa:{node}"),
            Self::NumaShard(node) => write!(f, "numa:{node}:shard"),
            Self::Cpus(cpus) => write!(f, "cpu:{}", cpus.iter().copied().collect::<CpuSet>()),
        }
    }
}

impl From<Policy> for String {
    fn from(policy: Policy) -> Self {
        policy.to_string()
    }
}

impl TryFrom<String> for Policy {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || {
            let message = format!(
                "'{text}' is none of none, all, local_rank, numa:N, numa:N:shard, cpu:LIST"
            );
            Error::invalid("policy", message)
        };
        if let Some(list) = text.strip_prefix("cpu:") {
            let cpus = parse_id_list("policy", list)?;
            // One set of CPUs is one policy, in whatever order it is named.
            let cpus: CpuSet = cpus.into_iter().map(CpuId).collect();
            return Ok(Self::Cpus(cpus.iter().collect()));
        }
        if let Some(node) = text.strip_prefix("numa:") {
            let (node, shard) = match node.strip_suffix(":shard") {
                Some(node) => (node, true),
                None => (node, false),
            };
            if node.is_empty() || !node.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(unknown());
            }
            let node = NodeId(node.parse().map_err(|_| unknown())?);
            return Ok(if shard { Self::NumaShard(node) } else { Self::Numa(node) });
        }
        match text {
            "none" => Ok(Self::None),
            "all" => Ok(Self::All),
            "local_rank" => Ok(Self::LocalRank),
            _ => Err(unknown()),
        }
    }
}

/// Reads `none,numa:0,cpu:0-3,8,all`: what begins with a digit continues the list of a `cpu:`.
///
/// # Errors
/// Naming `option` and the number of the policy in the list, from 1.
pub fn parse_policies(option: &str, text: &str) -> Result<Vec<Policy>> {
    let mut words: Vec<String> = Vec::new();
    for part in text.split(',').map(str::trim) {
        match words.last_mut() {
            Some(word)
                if word.starts_with("cpu:") && part.starts_with(|c: char| c.is_ascii_digit()) =>
            {
                word.push(',');
                word.push_str(part);
            }
            _ => words.push(part.to_owned()),
        }
    }
    let numbered = |(index, word): (usize, &String)| {
        word.parse().map_err(|error| match error {
            Error::Invalid { message, .. } => element(option, index, &message),
            // Of the core crate, about a list of CPUs.
            other => element(option, index, &format!("'{word}': {other}")),
        })
    };
    words.iter().enumerate().map(numbered).collect()
}

/// An error about the element at `index` of a list.
pub(super) fn element(option: &str, index: usize, message: &str) -> Error {
    Error::invalid(option, format!("element {}: {message}", index + 1))
}

/// Host memory of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Memory {
    /// Touched from a CPU of the policy's node: that of its CPUs if they are on one, else the
    /// device's.
    Bound,
    /// Touched by the rank's thread under the policy itself.
    FirstTouch,
}

impl Memory {
    /// The name as files have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bound => "bound",
            Self::FirstTouch => "first_touch",
        }
    }
}

/// A rank's place among those of its host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local {
    pub(super) rank: usize,
    pub(super) size: usize,
}

/// The rank's contiguous part of a list; ranks beyond its length share elements.
fn share(cpus: &[CpuId], local: Local) -> CpuSet {
    let size = local.size.max(1);
    let start = local.rank * cpus.len() / size;
    let end = ((local.rank + 1) * cpus.len() / size).max(start + 1);
    cpus[start.min(cpus.len())..end.min(cpus.len())].iter().copied().collect()
}

/// A policy as one rank follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resolved {
    /// `None`: unbound.
    pub(super) cpus: Option<CpuSet>,
    /// The node that `bound` memory lies on.
    pub(super) node: Option<NodeId>,
}

/// CPUs that can be bound, ascending.
pub(super) fn usable(machine: &Machine) -> Result<Vec<CpuId>> {
    let set: CpuSet = machine.census()?.bindable().into_iter().collect();
    Ok(set.iter().collect())
}

/// Those on a node.
pub(super) fn usable_on(machine: &Machine, node: NodeId) -> Result<Vec<CpuId>> {
    let mut cpus = usable(machine)?;
    cpus.retain(|cpu| machine.node_of(*cpu) == Some(node));
    Ok(cpus)
}

impl Policy {
    /// What is wrong with it on this machine, in words.
    pub(super) fn check(&self, machine: &Machine) -> Result<Result<(), String>> {
        match self {
            Self::Numa(node) | Self::NumaShard(node) => {
                if machine.topology().node(*node).is_none() {
                    let nodes = machine.topology().nodes.iter().map(|node| node.id.to_string());
                    let nodes = nodes.collect::<Vec<_>>().join(",");
                    return Ok(Err(format!(
                        "{self}: NUMA node {node} does not exist; the nodes of this machine: {nodes}"
                    )));
                }
                if usable_on(machine, *node)?.is_empty() {
                    return Ok(Err(format!("{self}: NUMA node {node} has no usable CPU")));
                }
            }
            Self::Cpus(cpus) => {
                let census = machine.census()?;
                for cpu in cpus {
                    let why = match census.record(*cpu) {
                        None => "is not present".to_owned(),
                        Some(record) if record.bindable != Some(true) => {
                            record.reason.clone().unwrap_or_else(|| "cannot be bound".to_owned())
                        }
                        Some(_) => continue,
                    };
                    return Ok(Err(format!("{self}: CPU {cpu}: {why}")));
                }
            }
            Self::None | Self::All | Self::LocalRank => {}
        }
        Ok(Ok(()))
    }

    /// The CPUs of a rank whose device is on node `near`.
    pub(super) fn resolve(
        &self,
        machine: &Machine,
        local: Local,
        near: Option<NodeId>,
    ) -> Result<Resolved> {
        let cpus: Option<CpuSet> = match self {
            Self::None => None,
            Self::All => Some(usable(machine)?.into_iter().collect()),
            Self::LocalRank => Some(share(&usable(machine)?, local)),
            Self::Numa(node) => Some(usable_on(machine, *node)?.into_iter().collect()),
            Self::NumaShard(node) => Some(share(&usable_on(machine, *node)?, local)),
            Self::Cpus(cpus) => Some(cpus.iter().copied().collect()),
        };
        let first = cpus.as_ref().and_then(CpuSet::first).and_then(|cpu| machine.node_of(cpu));
        let one = |cpus: &CpuSet| cpus.iter().all(|cpu| machine.node_of(cpu) == first);
        let node = match &cpus {
            Some(cpus) if one(cpus) => first,
            _ => near.or(first).or_else(|| {
                machine.topology().nodes.iter().find(|node| !node.cpus.is_empty()).map(|n| n.id)
            }),
        };
        Ok(Resolved { cpus, node })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_and_written_alike() {
        let text = "none,all,local_rank,numa:0,numa:12:shard,cpu:3,cpu:0-3,8,11,numa:1";
        let policies = parse_policies("--policies", text).unwrap();
        let again: Vec<String> = policies.iter().map(ToString::to_string).collect();
        assert_eq!(
            again,
            [
                "none",
                "all",
                "local_rank",
                "numa:0",
                "numa:12:shard",
                "cpu:3",
                "cpu:0-3,8,11",
                "numa:1"
            ]
        );
        assert_eq!(again.join(","), text);
        for policy in policies {
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(serde_json::from_str::<Policy>(&json).unwrap(), policy);
        }
        for (text, words) in [
            ("", "--policies: element 1: ''"),
            ("none,", "element 2: ''"),
            ("none,numa:", "element 2: 'numa:'"),
            ("numa:-1", "element 1: 'numa:-1'"),
            ("numa:0:part", "element 1"),
            ("numa:99999999999", "element 1"),
            ("all,cpu:0,0", "element 2: 'cpu:0,0'"),
            ("cpu:x", "element 1"),
            ("none,3", "element 2: '3'"),
            ("NONE", "element 1: 'NONE'"),
        ] {
            let error = parse_policies("--policies", text).unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn shares_are_contiguous_and_cover_everything_once() {
        let cpus: Vec<CpuId> = [0, 1, 4, 5, 6, 9, 10].map(CpuId).to_vec();
        let of = |rank, size| share(&cpus, Local { rank, size }).to_string();
        assert_eq!([0, 1].map(|rank| of(rank, 2)), ["0-1,4", "5-6,9-10"]);
        assert_eq!([0, 1, 2].map(|rank| of(rank, 3)), ["0-1", "4-5", "6,9-10"]);
        // More ranks than CPUs: each has one, some the same.
        let two = &cpus[..2];
        let of = |rank| share(two, Local { rank, size: 4 }).to_string();
        assert_eq!([0, 1, 2, 3].map(of), ["0", "0", "1", "1"]);
        assert_eq!(share(&cpus, Local { rank: 0, size: 1 }).len(), 7);
    }
}
