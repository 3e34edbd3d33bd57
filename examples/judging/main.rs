//! How well the judging is: thousands of machines drawn from a seed, measured in virtual time,
//! judged, and compared with what was planted.
//!
//! ```text
//! cargo run --release -p cluster-health-examples --example judging -- [options]
//!   --machines N        so many machines (1000)
//!   --seed S            the first machine's seed, the others' follow (1)
//!   --sweep KIND        h2d, core_pair or both (both)
//!   --old-way           only machines measured in one block in a fixed order
//!   --jobs J            threads (all CPUs)
//!   --print-failures    one line per machine that is not all right
//!   --print-effects     one line per fault that was found: its ratio, what was estimated, the machine
//!   --only SEED         one machine: its scenario, the truth and the findings
//!   --keep DIR          with --only: its result folder is left in DIR
//! ```
//!
//! Exit code 1 when a goal is missed, 2 for bad options.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints its result")]

#[path = "mod.rs"]
mod judging;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use cluster_health_matrix::samples::Sweep;

use self::judging::{Judged, Result, many, one};

struct Options {
    machines: u64,
    seed: u64,
    sweep: Option<Sweep>,
    jobs: usize,
    old_way: bool,
    print_failures: bool,
    print_effects: bool,
    only: Option<u64>,
    keep: Option<PathBuf>,
}

fn options(mut words: impl Iterator<Item = String>) -> Result<Options> {
    let mut options = Options {
        machines: 1000,
        seed: 1,
        sweep: None,
        jobs: std::thread::available_parallelism().map_or(1, usize::from),
        old_way: false,
        print_failures: false,
        print_effects: false,
        only: None,
        keep: None,
    };
    while let Some(word) = words.next() {
        if word == "--print-failures" {
            options.print_failures = true;
            continue;
        }
        if word == "--print-effects" {
            options.print_effects = true;
            continue;
        }
        if word == "--old-way" {
            options.old_way = true;
            continue;
        }
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--machines" => options.machines = value.parse()?,
            "--seed" => options.seed = value.parse()?,
            "--jobs" => options.jobs = value.parse()?,
            "--only" => options.only = Some(value.parse()?),
            "--keep" => options.keep = Some(value.into()),
            "--sweep" => {
                options.sweep = match value.as_str() {
                    "h2d" => Some(Sweep::H2d),
                    "core_pair" => Some(Sweep::CorePair),
                    "both" => None,
                    _ => return Err(format!("--sweep {value}: h2d, core_pair or both").into()),
                }
            }
            _ => return Err(format!("{word}: unknown option").into()),
        }
    }
    Ok(options)
}

fn show(judged: &Judged) -> Result<()> {
    println!("{}", judged.case.text);
    let (rows, columns) = (judged.case.rows.len(), judged.case.columns.len());
    let way = if judged.case.old_way { "the old way" } else { "in blocks" };
    println!("# {rows} rows × {columns} columns, largest size {}, {way}", judged.case.largest);
    println!("# rows {:?}\n# columns {:?}", judged.case.rows, judged.case.columns);
    for (planted, truth) in judged.case.planted.iter().zip(&judged.truths) {
        println!(
            "# planted {}: {} cells, nodes {:?}, {}; ratio {:.4} (crude {:.4}), \
             weakest member {:.4}, standard error {:.4}, of one member {:.4}: {}",
            planted.kinds.join(" or "),
            planted.cells.iter().filter(|cell| **cell).count(),
            planted.nodes,
            if planted.is_fixed { "fixed" } else { "proportional to bytes" },
            truth.ratio,
            truth.crude_ratio,
            truth.weakest,
            truth.error,
            truth.member_error,
            if truth.is_must() { "must be found" } else { "too weak to have to be found" },
        );
    }
    println!("{}", serde_json::to_string_pretty(&judged.diagnosis)?);
    Ok(())
}

fn effects(judged: &Judged) {
    let Judged { case, truths, outcome, .. } = judged;
    for (fault, truth) in outcome.faults.iter().zip(truths) {
        let Some(found) = &fault.found else { continue };
        println!(
            "effect of {} on {}: {:.4}, estimated {:.4} ({:.4} to {:.4}), {}{}; {} x {}, {:?}",
            fault.kind,
            case.seed,
            truth.ratio,
            found.ratio,
            found.low,
            found.high,
            if found.is_covered { "covered" } else { "not covered" },
            if found.effect_is_right { "" } else { ", wrong" },
            case.rows.len(),
            case.columns.len(),
            case.artefacts,
        );
    }
}

fn run(options: &Options) -> Result<bool> {
    if let Some(seed) = options.only {
        let judged = one(seed, options.sweep, options.old_way)?;
        show(&judged)?;
        if let Some(dir) = &options.keep {
            judging::judge::measure(&judged.case, dir)?;
        }
        println!("{}", if judged.outcome.is_right() { "right" } else { "wrong" });
        return Ok(judged.outcome.is_right());
    }
    let began = Instant::now();
    let summary = many(
        options.seed,
        options.machines,
        (options.sweep, options.old_way),
        options.jobs,
        &|judged| {
            if options.print_effects {
                effects(judged);
            }
        },
    );
    println!("{summary}");
    if options.print_failures {
        for line in summary.failures() {
            println!("{line}");
        }
    }
    let shortfalls = summary.shortfalls();
    for line in &shortfalls {
        println!("missed: {line}");
    }
    println!("{:.1} s", began.elapsed().as_secs_f64());
    Ok(shortfalls.is_empty())
}

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
