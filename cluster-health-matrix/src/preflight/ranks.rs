//! One answer for all ranks: the lowest rank of each host measures, rank 0 gathers what they found and
//! tells all. Ranks other than 0 speak to rank 0 only, because between hosts they have no other
//! connection.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use cluster_health_core::Machine;
use cluster_health_core::rank::RankGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Baseline, NodeOutcome, Outcome, Preflight};
use crate::error::{Error, Result};
use crate::observer::{Observer, Progress};
use crate::samples::Sample;

/// A rank that waits looks so often whether it was asked to end.
const LOOK_UP: Duration = Duration::from_millis(200);
/// How much longer than rank 0 the others wait, so that they learn which rank rank 0 misses.
const GRACE: Duration = Duration::from_millis(500);
/// A rank that measures looks so often whether the others live.
const CHECK: Duration = Duration::from_millis(100);

/// What a rank is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Task {
    Wait,
    /// Whether other ranks measure, too: each then has a folder of its own.
    Measure {
        several: bool,
    },
}

/// What a rank that measured tells rank 0.
type Part = Result<NodeOutcome, Failure>;

/// What rank 0 tells all.
type Answer = Result<Outcome, Failure>;

/// Why there is no answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Failure {
    rank: u32,
    message: String,
    timed_out: bool,
}

impl Failure {
    /// `error` as the other ranks are told it by rank `own`.
    fn of(error: &Error, own: u32) -> Self {
        match error {
            Error::Core(cluster_health_core::Error::Rank { rank, message, timed_out }) => {
                Self { rank: *rank, message: message.clone(), timed_out: *timed_out }
            }
            other => Self { rank: own, message: format!("rank {own}: {other}"), timed_out: false },
        }
    }

    fn into_error(self) -> Error {
        let Self { rank, message, timed_out } = self;
        Error::Core(cluster_health_core::Error::Rank { rank, message, timed_out })
    }
}

/// What tells hosts apart: containers of one machine are as many hosts as they have names.
pub(super) fn this_host() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    format!("{} {}", read("/proc/sys/kernel/random/boot_id"), read("/proc/sys/kernel/hostname"))
}

/// The preflight of a rank of several.
pub(super) fn run(
    preflight: &Preflight,
    machine: &Machine,
    baseline: &Baseline,
    group: &mut RankGroup,
    host: &str,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let timeout = group.timeout();
    let result = Ranks { preflight, machine, baseline, group, timeout }.run(host, observer);
    group.set_timeout(timeout);
    result
}

struct Ranks<'a> {
    preflight: &'a Preflight,
    machine: &'a Machine,
    baseline: &'a Baseline,
    group: &'a mut RankGroup,
    timeout: Duration,
}

impl Ranks<'_> {
    fn run(&mut self, host: &str, observer: &mut dyn Observer) -> Result<Outcome> {
        // The folder may be another one on each host, and so may the baseline.
        let Preflight { budget, min_change, min_effect, cpus, devices, sizes, seed, .. } =
            self.preflight;
        let text = format!(
            "budget {budget:?}\nmin_change {min_change}\nmin_effect {min_effect}\ncpus {cpus:?}\n\
             devices {devices:?}\nsizes {sizes:?}\nseed {seed}\n"
        );
        self.group.all_equal("the preflight", &text)?;
        if self.group.rank() == 0 {
            let result = self.lead(host, observer);
            let answer: Answer = match &result {
                Ok(outcome) => Ok(outcome.clone()),
                Err(error) => Err(Failure::of(error, 0)),
            };
            for rank in 1..self.group.size() {
                // Whoever is gone cannot be told; the others must not miss it for that.
                self.send(rank, &answer).ok();
            }
            return result;
        }
        self.send(0, &host)?;
        let task: Task = self.receive(0, self.timeout + GRACE, observer)?;
        let bound = self.bound() + GRACE;
        let Task::Measure { several } = task else {
            return self.receive::<Answer>(0, bound, observer)?.map_err(Failure::into_error);
        };
        let measured = self.measure(several, &[0], observer);
        let rank = self.group.rank();
        let part: Part = match &measured {
            Ok(node) => Ok(node.clone()),
            Err(error) => Err(Failure::of(error, rank)),
        };
        self.send(0, &part)?;
        measured?;
        let outcome = self.receive::<Answer>(0, bound, observer)?.map_err(Failure::into_error)?;
        self.keep(&outcome, several)?;
        Ok(outcome)
    }

    /// Rank 0's part.
    fn lead(&mut self, host: &str, observer: &mut dyn Observer) -> Result<Outcome> {
        let size = self.group.size();
        // The lowest rank of a host comes first.
        let mut leaders = BTreeMap::from([(host.to_owned(), 0)]);
        for rank in 1..size {
            let host: String = self.receive(rank, self.timeout, observer)?;
            leaders.entry(host).or_insert(rank);
        }
        let leaders: Vec<u32> = leaders.into_values().filter(|rank| *rank > 0).collect();
        let several = !leaders.is_empty();
        for rank in 1..size {
            let task = if leaders.contains(&rank) { Task::Measure { several } } else { Task::Wait };
            self.send(rank, &task)?;
        }
        let began = Instant::now();
        let others: Vec<u32> = (1..size).collect();
        let mut nodes = vec![self.measure(several, &others, observer)?];
        for rank in leaders {
            let left = self.bound().saturating_sub(began.elapsed()).max(LOOK_UP);
            let part: Part = self.receive(rank, left, &())?;
            nodes.push(part.map_err(Failure::into_error)?);
        }
        nodes.sort_by_key(|node| node.rank);
        if !observer.is_cancelled() {
            others.iter().try_for_each(|rank| self.group.check_alive(*rank))?;
        }
        let outcome = Outcome::of(self.preflight, nodes);
        self.keep(&outcome, several)?;
        Ok(outcome)
    }

    /// How long a measurement may take.
    fn bound(&self) -> Duration {
        self.preflight.budget.saturating_add(self.timeout)
    }

    /// Measures this host, as long as the ranks of `others` live.
    fn measure(
        &self,
        several: bool,
        others: &[u32],
        observer: &mut dyn Observer,
    ) -> Result<NodeOutcome> {
        let rank = self.group.rank();
        let own = self.preflight.folder_of(rank);
        let out = if several { own.as_ref() } else { self.preflight.out.as_ref() };
        let mut watched = Watched {
            group: self.group,
            others,
            inner: observer,
            looked: Instant::now(),
            lost: None,
        };
        let node = self.preflight.measure(self.machine, self.baseline, rank, out, &mut watched);
        let lost = watched.lost.take();
        match lost.filter(|_| !watched.inner.is_cancelled()) {
            Some(error) => Err(error.into()),
            None => node,
        }
    }

    fn keep(&self, outcome: &Outcome, several: bool) -> Result<()> {
        let own = self.preflight.folder_of(self.group.rank());
        let out = if several { own.as_ref() } else { self.preflight.out.as_ref() };
        self.preflight.keep(outcome, out)
    }

    fn send<T: Serialize>(&self, to: u32, message: &T) -> Result<()> {
        let message = serde_json::to_vec(message)
            .map_err(|error| Error::format("a rank's message", error.to_string()))?;
        Ok(self.group.send(to, &message)?)
    }

    /// The next message of a rank, which lives and has `bound` for it.
    fn receive<T: DeserializeOwned>(
        &mut self,
        from: u32,
        bound: Duration,
        observer: &dyn Observer,
    ) -> Result<T> {
        let began = Instant::now();
        let received = loop {
            let left = bound.saturating_sub(began.elapsed());
            self.group.set_timeout(left.min(LOOK_UP));
            match self.group.receive(from) {
                Err(cluster_health_core::Error::Rank { timed_out: true, .. }) => {
                    if observer.is_cancelled() {
                        break Err(Error::Cancelled);
                    }
                    if began.elapsed() >= bound {
                        break Err(cluster_health_core::Error::rank_timeout(from, bound).into());
                    }
                }
                received => break received.map_err(Error::from),
            }
        };
        self.group.set_timeout(self.timeout);
        let message = received?;
        serde_json::from_slice(&message)
            .map_err(|error| Error::format(format!("rank {from}'s message"), error.to_string()))
    }
}

/// Ends a measurement whose other ranks are gone: nobody waits for its answer.
struct Watched<'a> {
    group: &'a RankGroup,
    others: &'a [u32],
    inner: &'a mut dyn Observer,
    looked: Instant,
    lost: Option<cluster_health_core::Error>,
}

impl Observer for Watched<'_> {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.inner.sample(sample)
    }

    fn between_visits(&mut self, progress: &Progress) {
        if self.looked.elapsed() >= CHECK && self.lost.is_none() {
            self.looked = Instant::now();
            let alive = self.others.iter().try_for_each(|rank| self.group.check_alive(*rank));
            self.lost = alive.err();
        }
        self.inner.between_visits(progress);
    }

    fn is_cancelled(&self) -> bool {
        self.lost.is_some() || self.inner.is_cancelled()
    }
}
