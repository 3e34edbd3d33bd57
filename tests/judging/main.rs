//! Judging on machines drawn from a seed, see `examples/judging`; and that the scores themselves
//! can be trusted: findings made from the truth are right, spoilt ones are not.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

#[path = "../../examples/judging/mod.rs"]
mod judging;

use std::collections::BTreeSet;

use cluster_health_matrix::samples::Sweep;

use crate::judging::generator::{Case, Shape, generate};
use crate::judging::judge::{Diagnosis, Effect, Finding};
use crate::judging::score::{Outcome, Summary, score};
use crate::judging::truth::{self, Truth};

/// The finding that says exactly what was planted.
fn perfect(case: &Case, truths: &[Truth]) -> Diagnosis {
    let findings = case.planted.iter().zip(truths).map(|(planted, truth)| {
        let (n, m) = (case.rows.len(), case.columns.len());
        let row = |row: &usize| (0..m).any(|column| planted.cells[case.at(*row, column)]);
        let column = |column: &usize| (0..n).any(|row| planted.cells[case.at(row, *column)]);
        let rows = (0..n).filter(row).map(|row| case.rows[row]).collect();
        let columns = (0..m).filter(column).map(|column| case.columns[column]).collect();
        let rows = if planted.shape == Shape::Columns { Vec::new() } else { rows };
        let columns = if planted.shape == Shape::Rows { Vec::new() } else { columns };
        let mut finding = Finding {
            kind: planted.kinds[0].to_owned(),
            numa_nodes: planted.nodes.clone(),
            effect: Some(Effect {
                ratio: Some(truth.ratio),
                low: Some(truth.ratio - 0.01),
                high: Some(truth.ratio + 0.01),
            }),
            scales_with_bytes: Some(!planted.is_fixed),
            ..Finding::default()
        };
        if case.sweep.is_pair() {
            (finding.rank0_cpus, finding.rank1_cpus) = (rows, columns);
        } else {
            (finding.cpus, finding.devices) = (rows, columns);
        }
        finding
    });
    Diagnosis { verdict: "findings".to_owned(), findings: findings.collect() }
}

/// Scores of some machines whose right diagnoses went through `spoil`.
fn scores(spoil: impl Fn(&Case, &mut Diagnosis)) -> Summary {
    let mut summary = Summary::default();
    for seed in 0..300 {
        let case = generate(seed, None).unwrap();
        let truths = truth::of(&case).unwrap();
        let mut diagnosis = perfect(&case, &truths);
        spoil(&case, &mut diagnosis);
        summary.add(&score(&case, &truths, &diagnosis));
    }
    assert!(summary.all.recall.of > 150, "{}", summary.all.recall.of);
    summary
}

#[test]
fn the_truth_scores_full_marks() {
    let summary = scores(|_, _| ());
    assert_eq!(summary.shortfalls(), Vec::<String>::new(), "{summary}");
    let all = &summary.all;
    for share in [all.precision, all.recall, all.effect, all.coverage, all.scale] {
        assert_eq!((share.hits, share.of), (all.recall.of, all.recall.of), "{summary}");
    }
    assert!(summary.failures().is_empty());
}

#[test]
fn silence_is_never_false_and_finds_nothing() {
    let summary = scores(|_, diagnosis| diagnosis.findings.clear());
    assert_eq!(summary.all.recall.hits, 0);
    assert_eq!(summary.all.precision.of, 0);
    assert_eq!(summary.shortfalls().len(), 1, "{:?}", summary.shortfalls());
}

#[test]
fn wrong_members_are_missed_and_false() {
    let summary = scores(|case, diagnosis| {
        for finding in &mut diagnosis.findings {
            let lists = [
                (&mut finding.cpus, &case.rows),
                (&mut finding.devices, &case.columns),
                (&mut finding.rank0_cpus, &case.rows),
                (&mut finding.rank1_cpus, &case.columns),
            ];
            for (list, axis) in lists.into_iter().filter(|(list, _)| !list.is_empty()) {
                // All others of the axis.
                let old: BTreeSet<u32> = list.drain(..).collect();
                list.extend(axis.iter().filter(|id| !old.contains(id)));
            }
        }
    });
    // All pairs on one CPU stay all of them, whichever list names them.
    let all = &summary.all;
    assert!(all.recall.value() < 0.1, "{summary}");
    assert!(all.precision.value() < 0.1, "{summary}");
}

#[test]
fn wrong_kinds_are_missed_and_false() {
    let summary = scores(|_, diagnosis| {
        for finding in &mut diagnosis.findings {
            finding.kind =
                if finding.kind == "slow_block" { "slow_core" } else { "slow_block" }.to_owned();
        }
    });
    assert_eq!((summary.all.recall.hits, summary.all.precision.hits), (0, 0), "{summary}");
    assert!(summary.all.precision.of >= summary.all.recall.of);
}

#[test]
fn a_fault_named_twice_is_false_once() {
    let summary = scores(|_, diagnosis| {
        let again = diagnosis.findings.clone();
        diagnosis.findings.extend(again);
    });
    let all = &summary.all;
    assert_eq!(all.recall.hits, all.recall.of);
    // Also those that were too weak to count.
    assert_eq!(all.precision.of - all.precision.hits, all.recall.of + all.weak.of);
}

#[test]
fn wrong_figures_are_wrong_only_as_figures() {
    let summary = scores(|_, diagnosis| {
        for finding in &mut diagnosis.findings {
            let effect = finding.effect.as_mut().unwrap();
            for part in [&mut effect.ratio, &mut effect.low, &mut effect.high] {
                *part = part.map(|value| value + 0.031);
            }
            finding.scales_with_bytes = finding.scales_with_bytes.map(|scales| !scales);
        }
    });
    let all = &summary.all;
    assert_eq!((all.recall.hits, all.precision.hits), (all.recall.of, all.recall.of));
    assert_eq!((all.effect.hits, all.coverage.hits, all.scale.hits), (0, 0, 0));
}

#[test]
fn an_invented_fault_counts_against_its_machine() {
    let summary = scores(|case, diagnosis| {
        if case.planted.is_empty() {
            let device = Finding { kind: "slow_cell".to_owned(), ..Finding::default() };
            diagnosis.findings.push(device);
        }
        let open = Finding { kind: "confounded".to_owned(), ..Finding::default() };
        diagnosis.findings.push(open);
    });
    let invented = summary.healthy_new.of + summary.healthy_old.of;
    assert_eq!(summary.healthy_new.hits + summary.healthy_old.hits, invented);
    assert!(summary.healthy_old.of > 10 && summary.healthy_new.of > 50);
    assert_eq!(summary.all.precision.of - summary.all.precision.hits, invented);
}

/// What the table of the generator promises.
#[test]
fn machines_are_drawn_as_promised() {
    let (mut kinds, mut artefacts) = (BTreeSet::new(), BTreeSet::new());
    let mut counts = [0; 4];
    let (mut old, mut small, mut large) = (0, 0, 0);
    for seed in 0..1000 {
        let case = generate(seed, None).unwrap();
        let cpus = case.places.len();
        assert!((2..=640).contains(&cpus));
        small += u32::from(cpus < 12);
        large += u32::from(cpus > 200);
        assert!((1..=16).contains(&case.scenario.machine.devices));
        assert!((1..=8).contains(&case.scenario.machine.numa_nodes));
        counts[case.planted.len()] += 1;
        old += u32::from(case.old_way);
        assert!(!case.old_way || case.planted.is_empty());
        assert!(case.artefacts.len() <= 3);
        artefacts.extend(case.artefacts.iter().copied());
        let own: BTreeSet<_> = case.planted.iter().map(|planted| planted.kinds[0]).collect();
        assert_eq!(own.len(), case.planted.len(), "seed {seed}: one kind twice");
        kinds.extend(own);
        let cells = case.rows.len() * case.columns.len();
        for at in 0..cells {
            assert!(case.planted.iter().filter(|planted| planted.cells[at]).count() <= 1);
        }
        for planted in &case.planted {
            let count = planted.cells.iter().filter(|cell| **cell).count();
            assert!(count > 0 && count * 3 <= cells, "seed {seed}: {count} of {cells}");
        }
    }
    assert_eq!(kinds.len(), 9, "{kinds:?}");
    assert_eq!(artefacts.len(), 6, "{artefacts:?}");
    assert!(counts.iter().all(|count| *count > 50), "{counts:?}");
    assert!((60..140).contains(&old) && small > 100 && large > 100, "{old} {small} {large}");
}

/// The planted figures by the formula of the scenario, where no spread blurs them.
#[test]
fn truths_are_those_of_the_formula() {
    let mut checked = 0;
    for seed in 0..400 {
        let mut case = generate(seed, Some(Sweep::H2d)).unwrap();
        case.scenario.h2d.core_spread = 0.0;
        case.scenario.h2d.device_spread = 0.0;
        let truths = truth::of(&case).unwrap();
        let link = &case.scenario.h2d;
        let bytes_us = case.largest.bytes() as f64 / (link.gbps * 1e3);
        for (fault, truth) in case.scenario.fault.iter().zip(&truths) {
            let slow = link.latency_us
                + fault.extra_us.unwrap_or(0.0)
                + bytes_us / fault.factor.unwrap_or(1.0);
            let wanted = (link.latency_us + bytes_us) / slow;
            assert!((truth.ratio / wanted - 1.0).abs() < 1e-5, "seed {seed}: {wanted}");
            assert!((truth.weakest / wanted - 1.0).abs() < 1e-5);
            checked += 1;
        }
    }
    assert!(checked > 200, "{checked}");
}

#[test]
#[ignore = "until there is a judging"]
fn drawn_machines_are_judged_rightly() {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let summary = judging::many(1, 300, (None, false), jobs, &|judged| {
        let Outcome { seed, wrong, .. } = &judged.outcome;
        assert!(wrong.len() < 50, "seed {seed}: {} wrong findings", wrong.len());
    });
    println!("{summary}");
    for line in summary.failures() {
        println!("{line}");
    }
    assert_eq!(summary.shortfalls(), Vec::<String>::new());
}
