//! Starts a command only on a node that is fit for it.
//!
//! `launcher_preflight [--baseline FILE|DIR] [--budget 10s] [--backend NAME] [--lenient] -- torchrun train.py`
//!
//! The command replaces this program when the node passes, so a scheduler sees its exit code and its
//! signals reach it. A node that fails is refused with 1, and so is one of which too little could be told
//! (`inconclusive`), unless `--lenient` is given; 2 is an error. Started by torchrun, mpirun or srun itself, one
//! rank of each host measures and all ranks start their command, or none does.
//!
//! Without arguments it shows itself on two simulated machines, one of them with a slow device.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program prints its result")]

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use cluster_health_core::{Machine, RankGroup, Scenario, parse_duration};
use cluster_health_matrix::preflight::{Baseline, DEFAULT_BUDGET, Gate, Outcome, Preflight};
use cluster_health_matrix::{Error, Result};

/// Bound of every wait for a device or another rank.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What the command line says.
struct Wanted {
    baseline: Option<PathBuf>,
    budget: Duration,
    backend: String,
    lenient: bool,
    command: Vec<OsString>,
}

impl Wanted {
    fn parse(args: impl Iterator<Item = OsString>) -> Result<Self> {
        let mut wanted = Self {
            baseline: None,
            budget: DEFAULT_BUDGET,
            backend: "auto".to_owned(),
            lenient: false,
            command: Vec::new(),
        };
        let mut args = args;
        while let Some(arg) = args.next() {
            let name = arg.to_string_lossy().into_owned();
            let mut value = || args.next().ok_or_else(|| Error::invalid(&name, "lacks its value"));
            match name.as_str() {
                "--baseline" => wanted.baseline = Some(value()?.into()),
                "--budget" => wanted.budget = parse_duration(&value()?.to_string_lossy())?,
                "--backend" => wanted.backend = value()?.to_string_lossy().into_owned(),
                "--lenient" => wanted.lenient = true,
                "--" => wanted.command = args.by_ref().collect(),
                _ => return Err(Error::invalid(name, "unknown; the command comes after --")),
            }
        }
        if wanted.command.is_empty() {
            return Err(Error::invalid("--", "no command to start"));
        }
        Ok(wanted)
    }
}

/// True when the command may start.
fn may_start(outcome: &Outcome, lenient: bool) -> bool {
    match outcome.verdict {
        Gate::Pass => true,
        Gate::Inconclusive => lenient,
        _ => false,
    }
}

fn gate(wanted: &Wanted) -> Result<bool> {
    let mut group = RankGroup::from_environment(TIMEOUT)?;
    let baseline = match &wanted.baseline {
        Some(path) => Baseline::read(path)?,
        None => Baseline::itself(),
    };
    let machine = Machine::by_name(&wanted.backend)?;
    let preflight = Preflight::new().budget(wanted.budget).timeout(TIMEOUT);
    let outcome = preflight.run(&machine, &baseline, group.as_mut(), &mut ())?;
    if group.is_none_or(|group| group.rank() == 0) {
        // The output is the command's.
        eprint!("{outcome}");
    }
    Ok(may_start(&outcome, wanted.lenient))
}

/// A healthy machine starts the command, one with a slow device does not.
fn show() -> Result<()> {
    const NODE: &str = "[machine]\ncpus = 64\nsmt = 2\nnuma_nodes = 4\ndevices = 8\n";
    let sick = format!("{NODE}[[fault]]\nkind = \"slow_device\"\ndevices = \"5\"\nfactor = 0.8\n");
    for (name, scenario, wanted) in [("healthy", NODE, Gate::Pass), ("sick", &sick, Gate::Fail)] {
        let machine = Machine::synthetic(Scenario::parse(scenario, name)?)?;
        let outcome = Preflight::new().run(&machine, &Baseline::itself(), None, &mut ())?;
        print!("{name} node, {outcome}");
        if outcome.verdict != wanted {
            return Err(Error::output(name, format!("{wanted} was expected")));
        }
        if may_start(&outcome, false) {
            let status = Command::new("echo").arg("-> the job was started\n").status();
            status.map_err(|error| Error::io("starting", "echo", error))?;
        } else {
            println!("-> the job was not started\n");
        }
    }
    Ok(())
}

fn run() -> Result<u8> {
    let mut args = std::env::args_os().skip(1).peekable();
    if args.peek().is_none() {
        show()?;
        return Ok(0);
    }
    let wanted = Wanted::parse(args)?;
    if !gate(&wanted)? {
        eprintln!("launcher_preflight: {} is not started", wanted.command[0].display());
        return Ok(1);
    }
    let error = Command::new(&wanted.command[0]).args(&wanted.command[1..]).exec();
    Err(Error::io("starting", &wanted.command[0], error))
}

fn main() -> ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("launcher_preflight: {error}");
            ExitCode::from(2)
        },
        ExitCode::from,
    )
}
