//! What a launcher tells a process about its place among the ranks.
//!
//! | family | rank, size | rank and size on this host | job |
//! |---|---|---|---|
//! | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT`, `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` | `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid` |
//! | PMI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` (or `PMI_LOCAL_RANK`, `PMI_LOCAL_SIZE`) | `PMI_JOBID`, `PALS_APID` or Slurm's step |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
//!
//! The first family that is there decides: a launcher inside another one (torchrun or mpirun inside
//! a Slurm step) is the one that started the ranks. Our own variables come on top:
//!
//! * `CLUSTER_HEALTH_JOB` replaces the job key, which tells jobs of one user on one host apart;
//! * `CLUSTER_HEALTH_RENDEZVOUS=HOST:PORT` is where rank 0 listens when the ranks span hosts;
//!   without it `MASTER_ADDR` and `CLUSTER_HEALTH_PORT` (or `MASTER_PORT` + 1) are taken;
//! * `CLUSTER_HEALTH_TOKEN` is the secret that ranks on different hosts prove to each other.

use std::fmt;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The launcher whose variables describe the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RankFamily {
    /// `torchrun`, and everything else that sets its variables.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH, Intel MPI and other launchers with a process management interface.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

impl fmt::Display for RankFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
        })
    }
}

/// The secret of `CLUSTER_HEALTH_TOKEN`; its `Debug` form does not show it.
#[derive(Clone, Eq)]
pub struct RankToken(String);

/// How long a comparison takes says nothing about the secrets.
impl PartialEq for RankToken {
    fn eq(&self, other: &Self) -> bool {
        Sha256::digest(&self.0) == Sha256::digest(&other.0)
    }
}

impl RankToken {
    /// A token; use at least 128 random bits, because whoever can listen to the handshake can
    /// try guesses at leisure.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for RankToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RankToken(..)")
    }
}

/// The place of this process among the ranks of a job, and how the ranks find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnvironment {
    /// This process' rank, below `size`.
    pub rank: u32,
    /// Number of ranks, at least 1.
    pub size: u32,
    /// The rank among those on this host, where the launcher tells.
    pub local_rank: Option<u32>,
    /// Number of ranks on this host, where the launcher tells.
    pub local_size: Option<u32>,
    /// Whose variables these are.
    pub family: RankFamily,
    /// What tells this job from others of the same user on the same host; empty when unknown.
    pub job: String,
    /// `HOST:PORT` where rank 0 listens; only used (and only set) when the ranks span hosts.
    pub rendezvous: Option<String>,
    /// The secret of ranks that span hosts.
    pub token: Option<RankToken>,
    /// Where the folder with the sockets of local ranks may go; the first that exists and can be
    /// written is taken.
    pub folders: Vec<PathBuf>,
}

/// The names of a family's variables; of several names of one thing the first that is set counts.
struct Names {
    family: RankFamily,
    rank: &'static [&'static str],
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

const TORCHRUN: Names = Names {
    family: RankFamily::Torchrun,
    rank: &["RANK"],
    size: &["WORLD_SIZE"],
    local_rank: &["LOCAL_RANK"],
    local_size: &["LOCAL_WORLD_SIZE"],
};
const OPEN_MPI: Names = Names {
    family: RankFamily::OpenMpi,
    rank: &["OMPI_COMM_WORLD_RANK"],
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
};
const PMI: Names = Names {
    family: RankFamily::Pmi,
    rank: &["PMI_RANK"],
    size: &["PMI_SIZE"],
    local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
    local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
};
const SLURM: Names = Names {
    family: RankFamily::Slurm,
    rank: &["SLURM_PROCID"],
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: &["SLURM_LOCALID"],
    local_size: &[],
};

/// The most ranks of a job: beyond that a number in the environment is a mistake.
pub(super) const MAX_RANKS: u32 = 1 << 16;

/// Step ids from here on are Slurm's own (batch script, interactive shell), not started by `srun`.
const SLURM_FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// A variable and its value.
type Found = (&'static str, String);

struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    /// The value of a variable; an empty one counts as not set.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn first(&self, names: &[&'static str]) -> Option<Found> {
        names.iter().find_map(|&name| Some((name, self.get(name)?)))
    }

    /// Those of the variables that are set, as one text.
    fn join(&self, names: &[&str]) -> String {
        let values: Vec<_> = names.iter().filter_map(|name| self.get(name)).collect();
        values.join(" ")
    }

    /// What a family's variables say; `None` when it did not start this process.
    fn read(&self, names: &Names) -> Result<Option<RankEnvironment>> {
        let family = names.family;
        let local_rank = self.first(names.local_rank);
        let (rank, size) = match (self.first(names.rank), self.first(names.size)) {
            (Some(rank), Some(size)) => (rank, size),
            (Some((set, _)), None) | (None, Some((set, _))) if local_rank.is_some() => {
                let (missing, local) = if names.rank.contains(&set) {
                    (names.size[0], names.local_rank[0])
                } else {
                    (names.rank[0], names.local_rank[0])
                };
                return Err(Error::invalid(
                    missing,
                    format!(
                        "not set, but {set} and {local} are ({family}): set all three or none, \
                         or choose with --ranks local"
                    ),
                ));
            }
            _ => return Ok(None),
        };
        let (rank_name, size_name) = (rank.0, size.0);
        let (rank, size) = (number(&rank)?, number(&size)?);
        if size == 0 {
            return Err(Error::invalid(size_name, "0 ranks; a job has at least one".to_owned()));
        }
        if size > MAX_RANKS {
            return Err(Error::invalid(size_name, format!("{size} ranks; at most {MAX_RANKS}")));
        }
        below(rank_name, rank, size_name, size)?;
        let local_rank_name = local_rank.as_ref().map_or("", |found| found.0);
        let local_rank = local_rank.as_ref().map(number).transpose()?;
        let (local_size_name, local_size) = match self.first(names.local_size) {
            Some(found) => (found.0, Some(number(&found)?)),
            None if family == RankFamily::Slurm => self.slurm_local_size(size)?,
            None => ("", None),
        };
        if let Some(local_size) = local_size {
            if local_size == 0 || local_size > size {
                return Err(Error::invalid(
                    local_size_name,
                    format!("{local_size} ranks on this host, but {size_name} is {size}"),
                ));
            }
            if let Some(local_rank) = local_rank {
                below(local_rank_name, local_rank, local_size_name, local_size)?;
            }
        } else if let Some(local_rank) = local_rank {
            below(local_rank_name, local_rank, size_name, size)?;
        }
        Ok(Some(RankEnvironment {
            rank,
            size,
            local_rank,
            local_size,
            family,
            job: String::new(),
            rendezvous: None,
            token: None,
            folders: Vec::new(),
        }))
    }

    /// Slurm's description, inside a step with more than one task only: a shell or a batch script
    /// inside an allocation carries most of the variables too, but is no rank.
    fn slurm(&self) -> Result<Option<RankEnvironment>> {
        let Some(step) = self.first(&["SLURM_STEP_ID", "SLURM_STEPID"]) else { return Ok(None) };
        if number(&step)? >= SLURM_FIRST_SPECIAL_STEP {
            return Ok(None);
        }
        Ok(self.read(&SLURM)?.filter(|found| found.size > 1))
    }

    /// The tasks on this node from a list such as `4(x2),3`.
    fn slurm_local_size(&self, size: u32) -> Result<(&'static str, Option<u32>)> {
        const LIST: &str = "SLURM_STEP_TASKS_PER_NODE";
        let Some(list) = self.get(LIST) else {
            let alone = self.get("SLURM_STEP_NUM_NODES").is_some_and(|nodes| nodes == "1");
            return Ok(("SLURM_STEP_NUM_NODES", alone.then_some(size)));
        };
        let wrong = || Error::invalid(LIST, format!("{list:?} is no list such as 4(x2),3"));
        let mut node = match self.get("SLURM_NODEID") {
            Some(text) => number(&("SLURM_NODEID", text))?,
            None if list.contains([',', '(']) => return Ok((LIST, None)),
            None => 0,
        };
        for item in list.split(',') {
            let (tasks, nodes) = match item.split_once("(x") {
                Some((tasks, rest)) => (tasks, rest.strip_suffix(')').ok_or_else(wrong)?),
                None => (item, "1"),
            };
            let tasks: u32 = tasks.parse().map_err(|_| wrong())?;
            let nodes: u32 = nodes.parse().map_err(|_| wrong())?;
            match node.checked_sub(nodes) {
                Some(rest) => node = rest,
                None => return Ok((LIST, Some(tasks))),
            }
        }
        Ok((LIST, None))
    }

    fn job(&self, family: RankFamily) -> String {
        if let Some(job) = self.get("CLUSTER_HEALTH_JOB") {
            return job;
        }
        let step = || self.join(&["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]);
        let key = match family {
            RankFamily::Torchrun => self.join(&[
                "TORCHELASTIC_RUN_ID",
                "TORCHELASTIC_RESTART_COUNT",
                "MASTER_ADDR",
                "MASTER_PORT",
            ]),
            RankFamily::OpenMpi => self
                .first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
                .map_or_else(String::new, |found| found.1),
            RankFamily::Pmi => self
                .first(&["PMI_JOBID", "PALS_APID", "PMIX_NAMESPACE"])
                .map_or_else(step, |found| found.1),
            RankFamily::Slurm => step(),
        };
        if key.is_empty() { key } else { format!("{family} {key}") }
    }

    fn rendezvous(&self) -> Result<Option<String>> {
        if let Some(place) = self.get("CLUSTER_HEALTH_RENDEZVOUS") {
            return Ok(Some(place));
        }
        let Some(host) = self.get("MASTER_ADDR") else { return Ok(None) };
        let port = |name| self.get(name).map(|text| port(name, &text)).transpose();
        let port = match (port("CLUSTER_HEALTH_PORT")?, port("MASTER_PORT")?) {
            (Some(port), _) => port,
            (None, Some(port)) => port.checked_add(1).ok_or_else(|| {
                Error::invalid("CLUSTER_HEALTH_PORT", "not set, and none follows MASTER_PORT 65535")
            })?,
            (None, None) => return Ok(None),
        };
        let host =
            if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        Ok(Some(format!("{host}:{port}")))
    }
}

fn number((name, text): &Found) -> Result<u32> {
    text.parse().map_err(|_| Error::invalid(*name, format!("{text:?} is no number of 32 bits")))
}

fn port(name: &str, text: &str) -> Result<u16> {
    match text.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(Error::invalid(name, format!("{text:?} is no port (1-65535)"))),
    }
}

fn below(name: &str, value: u32, limit_name: &str, limit: u32) -> Result<()> {
    if value < limit {
        return Ok(());
    }
    Err(Error::invalid(
        name,
        format!("{value}, but {limit_name} is {limit}: ranks count from 0 to {}", limit - 1),
    ))
}

impl RankEnvironment {
    /// What this process' environment says; `None` when no launcher started it as a rank.
    ///
    /// Where the launcher names no job, the job is taken to be the ranks with the same parent
    /// process; `CLUSTER_HEALTH_JOB` helps when a wrapper stands between.
    ///
    /// # Errors
    /// As [`RankEnvironment::from_variables`].
    pub fn detect() -> Result<Option<Self>> {
        let mut found = Self::from_variables(|name| std::env::var(name).ok())?;
        if let Some(found) = &mut found
            && found.job.is_empty()
            && let Some(parent) = rustix::process::getppid()
        {
            found.job = format!("{} parent {parent}", found.family);
        }
        Ok(found)
    }

    /// What these variables say, without a look at anything else. An empty variable counts as not
    /// set, and a rank without a number of ranks (or the reverse) is a stray, not a rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the variable when those of one family contradict each other or
    /// are no numbers. Variables of other families are not looked at then.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let variables = Variables(variable);
        let mut found = None;
        for names in [TORCHRUN, OPEN_MPI, PMI] {
            found = variables.read(&names)?;
            if found.is_some() {
                break;
            }
        }
        let Some(mut found) = (match found {
            Some(found) => Some(found),
            None => variables.slurm()?,
        }) else {
            return Ok(None);
        };
        // Slurm's PMI plugin says nothing about the host, but Slurm itself does.
        if found.family == RankFamily::Pmi
            && found.local_size.is_none()
            && let Ok(Some(slurm)) = variables.slurm()
            && (slurm.rank, slurm.size) == (found.rank, found.size)
        {
            (found.local_rank, found.local_size) = (slurm.local_rank, slurm.local_size);
        }
        found.job = variables.job(found.family);
        if !found.is_local() {
            found.rendezvous = variables.rendezvous()?;
        }
        found.token = variables.get("CLUSTER_HEALTH_TOKEN").map(RankToken);
        found.folders = ["XDG_RUNTIME_DIR", "TMPDIR"]
            .iter()
            .filter_map(|name| variables.get(name))
            .chain(["/tmp".to_owned()])
            .map(PathBuf::from)
            .collect();
        Ok(Some(found))
    }

    /// Whether all ranks are known to be on this host.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.size == 1 || self.local_size == Some(self.size)
    }
}
