//! Visits in random order within blocks, then those of points that are out of line.

use cluster_health_core::rank::RankGroup;
use cluster_health_core::{Binding, ByteSize, CpuId, Machine, PointContext};
use serde::{Deserialize, Serialize};

use super::{Series, SizeSweep, SizeVisit, SizesPlan, falls};
use crate::error::{Error, Result};
use crate::observer::{Observer, Progress};
use crate::run::{SCHEMA_VERSION, Tool};
use crate::schedule::Random;
use crate::visit::talk::{decode, encode, hear};
use crate::visit::{Copies, Operation, Ranks, SyntheticRanks, Visit};

/// Points out of line are visited again so often.
const ROUNDS: u32 = 2;

/// What rank 0 tells the other one.
#[derive(Debug, Serialize, Deserialize)]
enum Call {
    Gather { bytes: ByteSize, seed: u64 },
    Finish,
}

fn shared_text(plan: &SizesPlan) -> Result<String> {
    serde_json::to_string_pretty(plan).map_err(|error| Error::format("the plan", error.to_string()))
}

/// The other rank; false when it was asked to end.
pub(super) fn follow(
    machine: &Machine,
    plan: &SizesPlan,
    group: &RankGroup,
    observer: &mut dyn Observer,
) -> Result<bool> {
    group.all_equal("the plan", &shared_text(plan)?)?;
    let rank = group.rank() as usize;
    let (Some(pair), Some(cpus)) = (plan.pair, plan.pair_cpus) else { return Ok(true) };
    if rank > 1 {
        // A pair has two ranks.
        return Ok(true);
    }
    let binding = machine.bind(cpus[rank]);
    let made = binding.map_err(Error::from).and_then(|binding| {
        let (device, cpu) = (pair[rank], cpus[rank]);
        let ranks = Ranks::new(machine, group, device, cpu, plan.largest(), plan.settings())?;
        Ok((binding, ranks))
    });
    // Rank 0 learns of an error from its own attempt.
    let mut made = made.ok();
    loop {
        let Some(message) = hear(group, 0, observer)? else { return Ok(false) };
        match decode(0, &message)? {
            Call::Gather { bytes, seed } => {
                if let Some((_, ranks)) = &mut made {
                    // Its error is rank 0's, too, which writes it down.
                    ranks.visit(Operation::AllGather, bytes, seed).ok();
                }
            }
            Call::Finish => return Ok(true),
        }
    }
}

/// What serves a series.
enum Source<'a> {
    NotYet,
    Copies(usize),
    Live(Box<Ranks<'a>>),
    Synthetic(SyntheticRanks),
}

struct Sweep<'a> {
    machine: &'a Machine,
    plan: &'a SizesPlan,
    group: Option<&'a RankGroup>,
    copies: Vec<Result<Copies<'a>, String>>,
    series: Vec<Series>,
    sources: Vec<Source<'a>>,
    binding: Option<Binding>,
    visits: u64,
    bytes: u64,
}

pub(super) fn lead(
    machine: &Machine,
    plan: &SizesPlan,
    group: Option<&RankGroup>,
    observer: &mut dyn Observer,
) -> Result<SizeSweep> {
    if let Some(group) = group {
        group.all_equal("the plan", &shared_text(plan)?)?;
        if group.size() != 2 {
            let message = format!("a pair has two ranks, this group has {}", group.size());
            return Err(Error::invalid("--ranks", message));
        }
    }
    let mut sweep = Sweep {
        machine,
        plan,
        group,
        copies: Vec::new(),
        series: Vec::new(),
        sources: Vec::new(),
        binding: None,
        visits: 0,
        bytes: 0,
    };
    sweep.prepare()?;
    let complete = sweep.run(observer)?;
    if let Some(group) = group {
        group.send(1, &encode(&Call::Finish)?)?;
    }
    let mut found = SizeSweep {
        schema_version: SCHEMA_VERSION,
        tool: Tool { version: env!("CARGO_PKG_VERSION").to_owned() },
        complete,
        expect_hbm_gbps: plan.expect_hbm.map(|rate| rate.as_gb_per_second()),
        series: sweep.series,
    };
    found.evaluate();
    Ok(found)
}

impl Sweep<'_> {
    fn bind(&mut self, cpu: CpuId) -> Result<()> {
        match &mut self.binding {
            Some(binding) => binding.move_to(cpu)?,
            None => self.binding = Some(self.machine.bind(cpu)?),
        }
        Ok(())
    }

    fn prepare(&mut self) -> Result<()> {
        let (machine, plan) = (self.machine, self.plan);
        for (at, (&device, &cpu)) in plan.devices.iter().zip(&plan.cpus).enumerate() {
            // Memory is touched where it is used.
            let made = self
                .bind(cpu)
                .and_then(|()| Copies::new(machine, device, None, plan.largest(), plan.settings()));
            for operation in [Operation::H2d, Operation::D2h, Operation::D2dSameDevice] {
                let mut series = Series::new(operation, &plan.load, vec![device], vec![cpu]);
                if let Ok(copies) = &made
                    && operation != Operation::D2dSameDevice
                {
                    series.memory = Some(copies.memory().to_owned());
                }
                self.series.push(series);
                self.sources.push(Source::Copies(at));
            }
            self.copies.push(made.map_err(|error| error.to_string()));
        }
        let (pair, cpus) = match (plan.pair, plan.pair_cpus) {
            (Some(pair), Some(cpus)) => (pair, cpus),
            _ => {
                let mut series = Series::new(Operation::AllGather, &plan.load, vec![], vec![]);
                series.unavailable = true;
                series.reason = Some("there is one device".to_owned());
                self.series.push(series);
                self.sources.push(Source::NotYet);
                return Ok(());
            }
        };
        let mut series =
            Series::new(Operation::AllGather, &plan.load, pair.to_vec(), cpus.to_vec());
        let mut source = Source::NotYet;
        if let Some(synthetic) = machine.synthetic_pair() {
            let ranks = SyntheticRanks::new(synthetic, pair, cpus, plan.settings());
            source = Source::Synthetic(ranks);
        } else if let Some(group) = self.group {
            self.bind(cpus[0])?;
            match Ranks::new(machine, group, pair[0], cpus[0], plan.largest(), plan.settings()) {
                Ok(ranks) => source = Source::Live(Box::new(ranks)),
                Err(error) => series.reason = Some(error.to_string()),
            }
        } else {
            series.unavailable = true;
            series.reason = Some("there is one rank".to_owned());
        }
        self.series.push(series);
        self.sources.push(source);
        Ok(())
    }

    /// False when it was asked to end.
    fn run(&mut self, observer: &mut dyn Observer) -> Result<bool> {
        let began = self.machine.now_ns();
        let blocks = self.plan.repeats;
        let all: Vec<(usize, ByteSize)> = (0..self.series.len())
            .flat_map(|series| self.plan.sizes.iter().map(move |bytes| (series, *bytes)))
            .collect();
        let mut total = u64::from(blocks) * all.len() as u64;
        let mut done = 0;
        for round in 0..=ROUNDS {
            let points = if round == 0 { all.clone() } else { self.out_of_line() };
            if points.is_empty() {
                break;
            }
            if round > 0 {
                total += u64::from(blocks) * points.len() as u64;
            }
            for block in 0..blocks {
                let mut order = points.clone();
                let seed = self.plan.seed ^ u64::from(block) << 32 ^ u64::from(round) << 48;
                Random::new(seed).shuffle(&mut order);
                for (series, bytes) in order {
                    if observer.is_cancelled() {
                        return Ok(false);
                    }
                    let elapsed_ns = self.machine.now_ns().saturating_sub(began);
                    let progress = Progress { done, total, bytes: self.bytes, elapsed_ns };
                    observer.between_visits(&progress);
                    self.visit(series, bytes, (block, round > 0))?;
                    done += 1;
                }
            }
        }
        Ok(true)
    }

    /// Points whose time falls although bytes grow, and those before them.
    fn out_of_line(&mut self) -> Vec<(usize, ByteSize)> {
        let peak = self.plan.expect_hbm.map(|rate| rate.as_gb_per_second());
        let mut found = Vec::new();
        for (at, series) in self.series.iter_mut().enumerate() {
            series.evaluate(peak);
            for place in falls(&series.points) {
                for point in &series.points[place - 1..=place] {
                    if !found.contains(&(at, point.bytes)) {
                        found.push((at, point.bytes));
                    }
                }
            }
        }
        found
    }

    /// One visit. An error ends the sweep: the other rank is lost.
    fn visit(&mut self, at: usize, bytes: ByteSize, (block, again): (u32, bool)) -> Result<()> {
        if self.series[at].reason.is_some() {
            return Ok(());
        }
        let seq = self.visits;
        self.visits += 1;
        let (machine, load) = (self.machine, self.plan.load.as_str());
        let seed = self.plan.seed ^ seq << 20;
        let operation = self.series[at].operation;
        if let Some(cpu) = self.series[at].cpus.first().copied() {
            self.bind(cpu)?;
        }
        let result: Result<Visit> = match &mut self.sources[at] {
            Source::Copies(device) => {
                let context = PointContext { seq, visit: seq, sweep_is_pair: false, load };
                machine.begin_point(&context);
                match &mut self.copies[*device] {
                    Ok(copies) => copies.visit(operation, bytes, seed),
                    Err(reason) => Err(Error::output("memory for copies", reason.clone())),
                }
            }
            Source::Live(ranks) => {
                if let Some(group) = self.group {
                    group.send(1, &encode(&Call::Gather { bytes, seed })?)?;
                }
                ranks.visit(operation, bytes, seed)
            }
            Source::Synthetic(ranks) => ranks.visit(machine, operation, bytes, (seq, load)),
            Source::NotYet => return Ok(()),
        };
        let series = &mut self.series[at];
        match result {
            Ok(times) => {
                let transfers = (times.warmup_ns.len() + times.iter_ns.len()) as u64;
                self.bytes += transfers * bytes.bytes();
                let times = Some(times);
                series.visits.push(SizeVisit { bytes, block, again, times, reason: None });
            }
            Err(error) if error.kind() == "unavailable" => {
                series.unavailable = true;
                series.reason = Some(error.to_string());
            }
            Err(error) => {
                let reason = error.to_string();
                // Neither a device that hangs nor ranks that lost each other are asked again.
                if matches!(error.kind(), "timeout" | "rank")
                    || matches!(self.sources[at], Source::Live(_))
                {
                    series.reason = Some(reason.clone());
                }
                let reason = Some(reason);
                series.visits.push(SizeVisit { bytes, block, again, times: None, reason });
            }
        }
        Ok(())
    }
}
