//! How good sampled sweeps are: machines of 640 CPUs and 16 devices drawn from a seed, sampled in
//! virtual time, judged, and compared with what was planted.
//!
//! ```text
//! cargo run --release -p cluster-health-examples --example sampling -- [options]
//!   --machines N        so many machines (20)
//!   --seed S            the first one's seed, the others' follow (1)
//!   --sweep KIND        h2d, core_pair or both (both)
//!   --budget D          machine time of a sweep (30s for copies, 8s for pairs)
//!   --keep DIR          result folders are left there
//!   --print             one line per fault that is missed and finding that is wrong
//! ```
//!
//! Planted are 0 to 3 faults of different kinds: one to eight CPUs, neighbours or not, as rows or columns, one or two
//! devices, a NUMA node, a rectangle of neighbours, pairs on one CPU; each costs 5 % to 40 % at the
//! largest size. Exit code 1 when recall is below 0.95, precision below 0.99, or a budget is exceeded.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints its result")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "ids and counts of a machine that is drawn here"
)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use cluster_health_core::{ByteSize, Machine, Scenario, parse_duration};
use cluster_health_matrix::analysis::{Finding, Kind};
use cluster_health_matrix::plan::{CheckPolicy, CorePairPlan, H2dPlan, Sampling};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::session::{RecordOptions, record_core_pair, record_h2d};

type Error = Box<dyn std::error::Error + Send + Sync>;

const CPUS: usize = 640;
const NODE: usize = 80;
const DEVICES: usize = 16;

/// Random numbers that are the same in every version (`SplitMix64`).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.unit() * bound as f64) as usize
    }
}

/// A planted fault: kind, the ids of both axes (empty = all).
struct Planted {
    kind: Kind,
    rows: Vec<u32>,
    columns: Vec<u32>,
    ratio: f64,
}

impl Planted {
    fn cells(&self, columns: usize) -> Vec<bool> {
        cells((&self.rows, &self.columns), columns, self.kind == Kind::SameCore)
    }
}

fn cells((rows, cols): (&[u32], &[u32]), columns: usize, diagonal: bool) -> Vec<bool> {
    let is_in = |list: &[u32], count: usize| -> Vec<bool> {
        let mut all = vec![list.is_empty(); count];
        list.iter().for_each(|&id| all[id as usize] = true);
        all
    };
    let (rows, cols) = (is_in(rows, CPUS), is_in(cols, columns));
    (0..CPUS * columns)
        .map(|at| {
            rows[at / columns] && cols[at % columns] && (!diagonal || at / columns == at % columns)
        })
        .collect()
}

/// Faults of a machine and the lines of its scenario.
fn plant(draw: &mut Draw, is_pair: bool) -> (Vec<Planted>, String) {
    let largest_us =
        if is_pair { 180.0 + 8.0 * 1048.576 / 46.0 } else { 12.0 + 256.0 * 1048.576 / 58.5 };
    let bytes_us = if is_pair { 8.0 * 1048.576 / 46.0 } else { 256.0 * 1048.576 / 58.5 };
    let mut kinds = vec![
        Kind::SlowRank0Core,
        Kind::SlowRank1Core,
        Kind::SlowBlock,
        Kind::SameCore,
        Kind::NumaEffect,
    ];
    if !is_pair {
        kinds = vec![Kind::SlowCore, Kind::SlowDevice, Kind::SlowBlock, Kind::NumaEffect];
    }
    for at in (1..kinds.len()).rev() {
        kinds.swap(at, draw.below(at + 1));
    }
    kinds.truncate(draw.below(4));
    let mut planted: Vec<Planted> = Vec::new();
    let mut text = String::new();
    let columns = if is_pair { CPUS } else { DEVICES };
    for kind in kinds {
        let (mut rows, mut cols) = (Vec::new(), Vec::new());
        let range = |draw: &mut Draw, all: usize, least: usize, most: usize| -> Vec<u32> {
            let count = least + draw.below(most - least + 1);
            let first = draw.below(all - count + 1);
            (first..first + count).map(|id| id as u32).collect()
        };
        // Neighbours, such as the CPUs of one cluster, or scattered ones.
        let some = |draw: &mut Draw, all: usize, most: usize| -> Vec<u32> {
            if draw.unit() < 0.5 {
                return range(draw, all, 1, most);
            }
            let count = 1 + draw.below(most);
            let mut list: Vec<u32> = (0..count).map(|_| draw.below(all) as u32).collect();
            list.sort_unstable();
            list.dedup();
            list
        };
        let (name, keys) = match kind {
            Kind::SlowRank0Core | Kind::SlowCore => {
                rows = some(draw, CPUS, 8);
                (if is_pair { "slow_rank0_core" } else { "slow_core" }, [true, false])
            }
            Kind::SlowRank1Core | Kind::SlowDevice => {
                cols = some(draw, columns, if is_pair { 8 } else { 2 });
                (if is_pair { "slow_rank1_core" } else { "slow_device" }, [false, true])
            }
            Kind::NumaEffect => {
                let first = NODE * draw.below(CPUS / NODE);
                let node = (first..first + NODE).map(|id| id as u32).collect();
                if is_pair && draw.unit() < 0.5 {
                    cols = node;
                    ("slow_rank1_core", [false, true])
                } else {
                    rows = node;
                    (if is_pair { "slow_rank0_core" } else { "slow_core" }, [true, false])
                }
            }
            Kind::SlowBlock => {
                if draw.unit() < 0.5 {
                    let first = NODE * draw.below(CPUS / NODE);
                    rows = (first..first + NODE).map(|id| id as u32).collect();
                } else {
                    rows = range(draw, CPUS, 40, 160);
                }
                cols = if !is_pair {
                    range(draw, DEVICES, 2, 5)
                } else if draw.unit() < 0.5 {
                    let first = NODE * draw.below(CPUS / NODE);
                    (first..first + NODE).map(|id| id as u32).collect()
                } else {
                    range(draw, CPUS, 40, 160)
                };
                ("slow_block", [true, true])
            }
            _ => ("same_core", [false, false]),
        };
        let new =
            Planted { kind, rows, columns: cols, ratio: 1.0 - 0.05 * 8.0_f64.powf(draw.unit()) };
        let own = new.cells(columns);
        let is_line = |kind: Kind| kind != Kind::SlowBlock && kind != Kind::SameCore;
        let overlaps = planted.iter().any(|other: &Planted| {
            let common = other.cells(columns).iter().zip(&own).filter(|(a, b)| **a && **b).count();
            let crosses = is_line(kind)
                && is_line(other.kind)
                && other.rows.is_empty() != new.rows.is_empty();
            common > 0 && !crosses && kind != Kind::SameCore && other.kind != Kind::SameCore
        });
        if overlaps {
            continue;
        }
        let _ = writeln!(text, "[[fault]]\nkind = \"{name}\"");
        let names = if is_pair { ["rank0", "rank1"] } else { ["cpus", "devices"] };
        for ((key, name), list) in keys.iter().zip(names).zip([&new.rows, &new.columns]) {
            if *key {
                let _ = writeln!(text, "{name} = {list:?}");
            }
        }
        let slowed = largest_us / new.ratio;
        let left = slowed - (largest_us - bytes_us);
        if draw.unit() < 0.3 {
            let _ = writeln!(text, "extra_us = {:.2}", slowed - largest_us);
        } else {
            let _ = writeln!(text, "factor = {:.4}", bytes_us / left);
        }
        planted.push(new);
    }
    (planted, text)
}

fn jaccard(a: &[bool], b: &[bool]) -> f64 {
    let both = a.iter().zip(b).filter(|(a, b)| **a && **b).count();
    let any = a.iter().zip(b).filter(|(a, b)| **a || **b).count();
    both as f64 / any.max(1) as f64
}

fn is_structural(kind: Kind) -> bool {
    !kind.is_artefact() && !kind.is_undecided()
}

#[derive(Default)]
struct Score {
    planted: usize,
    found: usize,
    findings: usize,
    right: usize,
    over: usize,
    longest_s: f64,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool, Error> {
    let (mut machines, mut first, mut budget, mut print) = (20_u64, 1_u64, None, false);
    let mut keep: Option<PathBuf> = None;
    let mut sweeps = vec![false, true];
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--print" {
            print = true;
            continue;
        }
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--machines" => machines = value.parse()?,
            "--seed" => first = value.parse()?,
            "--keep" => keep = Some(value.into()),
            "--budget" => budget = Some(parse_duration(&value)?),
            "--sweep" if value == "h2d" => sweeps = vec![false],
            "--sweep" if value == "core_pair" => sweeps = vec![true],
            "--sweep" if value == "both" => {}
            _ => return Err(format!("{word} {value}: unknown option").into()),
        }
    }
    let mut is_good = true;
    for is_pair in sweeps {
        let usual = if is_pair { Sampling::PAIRS } else { Sampling::COPIES };
        let budget = budget.unwrap_or(usual);
        let mut score = Score::default();
        for seed in first..first + machines {
            one(seed, is_pair, budget, keep.as_deref(), print, &mut score)?;
        }
        let (recall, precision) = (
            score.found as f64 / score.planted.max(1) as f64,
            score.right as f64 / score.findings.max(1) as f64,
        );
        println!(
            "{}: {machines} machines, budget {budget:?}: recall {recall:.3} ({} of {}), precision \
             {precision:.3} ({} of {}), longest {:.2} s, {} over budget",
            if is_pair { "core_pair" } else { "h2d" },
            score.found,
            score.planted,
            score.right,
            score.findings,
            score.longest_s,
            score.over
        );
        is_good &= recall >= 0.95 && precision >= 0.99 && score.over == 0;
    }
    Ok(is_good)
}

fn one(
    seed: u64,
    is_pair: bool,
    budget: Duration,
    keep: Option<&Path>,
    print: bool,
    score: &mut Score,
) -> Result<(), Error> {
    let mut draw = Draw(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x7361_6d70);
    let (planted, faults) = plant(&mut draw, is_pair);
    let spread = if draw.unit() < 0.5 { 0.0 } else { draw.unit() * 0.01 };
    let section = if is_pair { "all_gather" } else { "h2d" };
    let text = format!(
        "seed = {seed}\n[machine]\ncpus = {CPUS}\nsmt = 2\nnuma_nodes = {}\ndevices = {DEVICES}\n[{section}]\n\
         core_spread = {spread:.4}\n{faults}",
        CPUS / NODE
    );
    let machine = Machine::synthetic(Scenario::parse(&text, "the example")?)?;
    let scratch = tempfile::tempdir()?;
    let dir = keep.unwrap_or(scratch.path()).join(seed.to_string());
    let sample = Some(Sampling::within(budget));
    let options = RecordOptions::default();
    let report = if is_pair {
        let plan = CorePairPlan::builder()
            .sample(sample)
            .check(CheckPolicy::Off)
            .seed(seed)
            .build(&machine)?;
        let mut none = || -> cluster_health_matrix::Result<_> {
            unreachable!("a synthetic machine has its ranks")
        };
        record_core_pair("sampling", &machine, &plan, &mut none, &dir, &options, &mut ())?
    } else {
        let sizes = [16, 64, 256].map(ByteSize::mib);
        let plan = H2dPlan::builder()
            .sizes(sizes)
            .sample(sample)
            .check(CheckPolicy::Off)
            .seed(seed)
            .build(&machine)?;
        record_h2d("sampling", &machine, &plan, &dir, &options, &mut ())?
    };
    if keep.is_some() {
        std::fs::write(dir.join("scenario.toml"), &text)?;
    }
    let wall = Duration::from_nanos(report.manifest.wall_ns);
    score.longest_s = score.longest_s.max(wall.as_secs_f64());
    score.over += usize::from(wall > budget);
    compare(seed, is_pair, &planted, &report, print, score);
    Ok(())
}

fn compare(
    seed: u64,
    is_pair: bool,
    planted: &[Planted],
    report: &Report,
    print: bool,
    score: &mut Score,
) {
    let columns = if is_pair { CPUS } else { DEVICES };
    let of_finding = |finding: &Finding| -> Vec<bool> {
        let lists = if is_pair {
            (&finding.rank0_cpus, &finding.rank1_cpus)
        } else {
            (&finding.cpus, &finding.devices)
        };
        cells((&lists.0[..], &lists.1[..]), columns, finding.kind == Kind::SameCore)
    };
    let findings: Vec<(&Finding, Vec<bool>)> = report
        .diagnosis
        .findings
        .iter()
        .filter(|finding| is_structural(finding.kind))
        .map(|finding| (finding, of_finding(finding)))
        .collect();
    let mut used = vec![false; findings.len()];
    for fault in planted {
        let own = fault.cells(columns);
        let hit = (0..findings.len()).find(|&at| {
            !used[at] && findings[at].0.kind == fault.kind && jaccard(&findings[at].1, &own) >= 0.9
        });
        score.planted += 1;
        match hit {
            Some(at) => {
                used[at] = true;
                score.found += 1;
            }
            None if print => {
                println!(
                    "seed {seed}: missed {} × {:.3} rows {:?} columns {:?}",
                    fault.kind.as_str(),
                    fault.ratio,
                    ends(&fault.rows),
                    ends(&fault.columns)
                );
            }
            None => {}
        }
    }
    score.findings += findings.len();
    score.right += used.iter().filter(|used| **used).count();
    for ((finding, _), used) in findings.iter().zip(used) {
        if !used && print {
            let (rows, cols) = if is_pair {
                (&finding.rank0_cpus, &finding.rank1_cpus)
            } else {
                (&finding.cpus, &finding.devices)
            };
            let ratio = finding.effect.map_or(f64::NAN, |effect| effect.ratio);
            println!(
                "seed {seed}: wrong {} × {ratio:.3} rows {:?} columns {:?}",
                finding.kind.as_str(),
                ends(rows),
                ends(cols)
            );
        }
    }
}

/// First, last, number.
fn ends(list: &[u32]) -> (Option<u32>, Option<u32>, usize) {
    (list.first().copied(), list.last().copied(), list.len())
}
