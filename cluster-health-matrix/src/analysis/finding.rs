//! Findings and verdict: the content of `diagnose --json`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::run::SCHEMA_VERSION;
use crate::samples::Sweep;

/// What a finding says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Wrong data arrived.
    DataCorruption,
    /// A device is slower than the others.
    SlowDevice,
    /// CPUs are slower than the others as the source of copies.
    SlowCore,
    /// CPUs are slower than the others as rank 0's.
    SlowRank0Core,
    /// CPUs are slower than the others as rank 1's.
    SlowRank1Core,
    /// A rectangle of cells, narrower than both axes, is slow.
    SlowBlock,
    /// One cell is slow.
    SlowCell,
    /// Both ranks on one CPU are slow.
    SameCore,
    /// Ranks on the SMT siblings of one core are slow.
    SmtSibling,
    /// Everything stays below the expected rate.
    NodeCeiling,
    /// Slow under a load only.
    LoadSensitive,
    /// Rates that the path cannot have.
    Implausible,
    /// CPUs of the plan that cannot be bound.
    Unbindable,
    /// A whole NUMA node differs from the others.
    NumaEffect,
    /// The time of transfers changed during the run.
    TimeStep,
    /// The first transfers after an allocation stall.
    AllocationStall,
    /// The first transfer after a change of CPU is slow.
    FirstVisit,
    /// Rates drift during the run.
    Drift,
    /// Rates sink for short times, again and again.
    Burst,
    /// Points at regular distances have a slow first transfer.
    Checkpoint,
    /// A difference that the order of measurement explains as well as the machine.
    Confounded,
    /// Nothing can be said.
    Inconclusive,
    /// Effects of interest are below what the plan could see.
    Underpowered,
}

impl Kind {
    /// The word of the JSON output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DataCorruption => "data_corruption",
            Self::SlowDevice => "slow_device",
            Self::SlowCore => "slow_core",
            Self::SlowRank0Core => "slow_rank0_core",
            Self::SlowRank1Core => "slow_rank1_core",
            Self::SlowBlock => "slow_block",
            Self::SlowCell => "slow_cell",
            Self::SameCore => "same_core",
            Self::SmtSibling => "smt_sibling",
            Self::NodeCeiling => "node_ceiling",
            Self::LoadSensitive => "load_sensitive",
            Self::Implausible => "implausible",
            Self::Unbindable => "unbindable",
            Self::NumaEffect => "numa_effect",
            Self::TimeStep => "time_step",
            Self::AllocationStall => "allocation_stall",
            Self::FirstVisit => "first_visit",
            Self::Drift => "drift",
            Self::Burst => "burst",
            Self::Checkpoint => "checkpoint",
            Self::Confounded => "confounded",
            Self::Inconclusive => "inconclusive",
            Self::Underpowered => "underpowered",
        }
    }

    /// True for effects of how and when was measured, which say nothing about the machine's parts.
    #[must_use]
    pub const fn is_artefact(self) -> bool {
        matches!(
            self,
            Self::TimeStep
                | Self::AllocationStall
                | Self::FirstVisit
                | Self::Drift
                | Self::Burst
                | Self::Checkpoint
        )
    }

    /// True where nothing could be decided.
    #[must_use]
    pub const fn is_undecided(self) -> bool {
        matches!(self, Self::Confounded | Self::Inconclusive | Self::Underpowered)
    }
}

/// Rate of the members ÷ rate of the rest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Effect {
    /// Below 1 is slower.
    pub ratio: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
}

/// In how many replicates an effect was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Replicates {
    /// Those that showed at least half of it.
    pub seen: u32,
    /// All.
    pub of: u32,
}

/// One finding. Empty lists mean that it is not restricted to some ids of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// What.
    pub kind: Kind,
    /// Of which sweep; `None` for findings about the node.
    pub sweep: Option<Sweep>,
    /// Under which load profile.
    pub load: Option<String>,
    /// Physical ids.
    pub devices: Vec<u32>,
    /// CPUs of copies.
    pub cpus: Vec<u32>,
    /// CPUs of rank 0.
    pub rank0_cpus: Vec<u32>,
    /// CPUs of rank 1.
    pub rank1_cpus: Vec<u32>,
    /// NUMA nodes that differ.
    pub numa_nodes: Vec<u32>,
    /// How much, where it is a matter of rates.
    pub effect: Option<Effect>,
    /// Fixed cost per transfer, microseconds, where the effect is one.
    pub extra_us: Option<f64>,
    /// True when it grows with the bytes (a link), false for a fixed cost, `None` if not known.
    pub scales_with_bytes: Option<bool>,
    /// Reproduction.
    pub replicates: Option<Replicates>,
    /// Follows from the kind.
    pub is_artefact: bool,
    /// What was measured.
    pub facts: Vec<String>,
    /// What that most likely means.
    pub inference: String,
    /// What to do next.
    pub next: String,
}

impl Finding {
    /// A finding of a kind with nothing else said.
    #[must_use]
    pub fn new(kind: Kind, sweep: Option<Sweep>, load: Option<&str>) -> Self {
        Self {
            kind,
            sweep,
            load: load.map(str::to_owned),
            devices: Vec::new(),
            cpus: Vec::new(),
            rank0_cpus: Vec::new(),
            rank1_cpus: Vec::new(),
            numa_nodes: Vec::new(),
            effect: None,
            extra_us: None,
            scales_with_bytes: None,
            replicates: None,
            is_artefact: kind.is_artefact(),
            facts: Vec::new(),
            inference: String::new(),
            next: String::new(),
        }
    }
}

/// The judgement in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// Nothing but artefacts, and the plan could have seen more.
    Healthy,
    /// Faults or structure.
    Findings,
    /// No faults, but something could not be decided.
    Inconclusive,
}

impl Verdict {
    /// The word of the JSON output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Findings => "findings",
            Self::Inconclusive => "inconclusive",
        }
    }
}

/// What judging a result folder gives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Version of this format.
    pub schema_version: u32,
    /// All findings in one word.
    pub verdict: Verdict,
    /// The most important first.
    pub findings: Vec<Finding>,
    /// What was tested and how small an effect it would have shown, and what loads do to all cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tested: Vec<String>,
    /// What was not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_tested: Vec<String>,
}

impl Diagnosis {
    /// The verdict that follows from findings, which are put in order.
    #[must_use]
    pub fn of(mut findings: Vec<Finding>) -> Self {
        let weight = |finding: &Finding| {
            finding.effect.map_or(0.0, |effect| (1.0 - effect.ratio).abs().min(1e3))
        };
        findings.sort_by(|a, b| {
            class(a.kind)
                .cmp(&class(b.kind))
                .then(weight(b).total_cmp(&weight(a)))
                .then(a.kind.cmp(&b.kind))
                .then_with(|| {
                    let place = |f: &Finding| {
                        (
                            f.sweep,
                            f.devices.clone(),
                            f.cpus.clone(),
                            f.rank0_cpus.clone(),
                            f.rank1_cpus.clone(),
                            f.numa_nodes.clone(),
                        )
                    };
                    place(a).cmp(&place(b))
                })
        });
        let worst = findings.iter().map(|finding| class(finding.kind)).min();
        let verdict = match worst {
            Some(0 | 1) => Verdict::Findings,
            Some(2) => Verdict::Inconclusive,
            _ => Verdict::Healthy,
        };
        Self {
            schema_version: SCHEMA_VERSION,
            verdict,
            findings,
            tested: Vec::new(),
            not_tested: Vec::new(),
        }
    }
}

/// Wrong data before slowness, faults before doubts, artefacts last.
fn class(kind: Kind) -> u8 {
    match kind {
        Kind::DataCorruption => 0,
        kind if kind.is_artefact() => 3,
        kind if kind.is_undecided() => 2,
        _ => 1,
    }
}

/// Names in a fact.
pub(super) const MOST_NAMES: usize = 16;

/// Ids in order, each once.
pub(super) fn sorted(ids: impl IntoIterator<Item = u32>) -> Vec<u32> {
    ids.into_iter().collect::<BTreeSet<u32>>().into_iter().collect()
}

/// The first ids of a list that may be long.
pub(super) fn names(ids: impl IntoIterator<Item = u32>) -> String {
    let ids = sorted(ids);
    let shown: Vec<String> = ids.iter().take(MOST_NAMES).map(ToString::to_string).collect();
    let more = if ids.len() > shown.len() { ",…" } else { "" };
    format!("{}{more}", shown.join(","))
}
