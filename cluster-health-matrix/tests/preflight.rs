//! Preflights of synthetic machines whose faults are known.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::time::Duration;

use cluster_health_core::{ByteSize, Machine, Scenario};
use cluster_health_matrix::plan::H2dPlan;
use cluster_health_matrix::preflight::{
    Baseline, ChangeState, Gate, Outcome, Preflight, preflight,
};
use cluster_health_matrix::session::{RecordOptions, record_h2d};

const NODE: &str = "[machine]\ncpus = 640\nsmt = 2\nnuma_nodes = 8\ndevices = 16\n";
const SMALL: &str = "[machine]\ncpus = 64\nsmt = 2\nnuma_nodes = 4\ndevices = 8\n";

fn machine(text: &str) -> Machine {
    Machine::synthetic(Scenario::parse(text, "test").unwrap()).unwrap()
}

fn fault(kind: &str, members: &str) -> String {
    format!("[[fault]]\nkind = \"{kind}\"\n{members}\n")
}

/// A full sweep of a machine at 16 MiB, as an operator would keep it.
fn baseline(text: &str) -> Baseline {
    let machine = machine(text);
    let plan = H2dPlan::builder().sizes([ByteSize::mib(16)]).build(&machine).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = RecordOptions::default();
    record_h2d("h2d", &machine, &plan, &dir.path().join("out"), &options, &mut ()).unwrap();
    Baseline::read(&dir.path().join("out/calibration.json")).unwrap()
}

fn alone(text: &str) -> Outcome {
    preflight(&machine(text), &Baseline::itself(), Duration::from_secs(10)).unwrap()
}

fn against(text: &str, baseline: &Baseline) -> Outcome {
    preflight(&machine(text), baseline, Duration::from_secs(10)).unwrap()
}

fn assert_fails(outcome: &Outcome, kind: &str, of: impl Fn(&serde_json::Value) -> bool) {
    assert_eq!((outcome.verdict, outcome.exit_code()), (Gate::Fail, 1), "{outcome}");
    let document = serde_json::to_value(outcome).unwrap();
    let findings = document["nodes"][0]["findings"].as_array().unwrap();
    let found = findings
        .iter()
        .any(|finding| finding["kind"] == kind && finding["fails"] == true && of(finding));
    assert!(found, "{outcome}");
    assert!(outcome.reasons.iter().any(|reason| reason.contains(kind)), "{outcome}");
}

#[test]
fn a_node_is_judged_within_ten_seconds_by_plan() {
    let healthy = alone(NODE);
    assert_eq!((healthy.verdict, healthy.exit_code()), (Gate::Pass, 0), "{healthy}");
    assert!(healthy.reasons.is_empty());
    let sick = alone(&[NODE, &fault("slow_device", "devices = \"5\"\nfactor = 0.85")].concat());
    assert_fails(&sick, "slow_device", |finding| finding["devices"] == serde_json::json!([5]));
    for outcome in [healthy, sick] {
        let node = &outcome.nodes[0];
        assert!(node.wall_ns <= 10_000_000_000, "{}", node.wall_ns);
        assert!(node.wall_ns > 2_000_000_000, "it is there to be used: {}", node.wall_ns);
    }
}

#[test]
fn faults_within_a_node_need_no_baseline() {
    let slow_node = fault("slow_core", "cpus = \"16-31\"\nfactor = 0.85");
    assert_fails(&alone(&[SMALL, &slow_node].concat()), "numa_effect", |finding| {
        finding["numa_nodes"] == serde_json::json!([1])
    });
    let slow_core = fault("slow_core", "cpus = \"9\"\nfactor = 0.7");
    assert_fails(&alone(&[SMALL, &slow_core].concat()), "slow_core", |finding| {
        finding["cpus"] == serde_json::json!([9])
    });
    let refused = alone(&format!("{SMALL}refuse_bind = \"7,8\"\n"));
    assert_fails(&refused, "unbindable", |finding| finding["cpus"] == serde_json::json!([7, 8]));
    let stalls = "[[artefact]]\nkind = \"first_visit\"\nextra_us = 40\n";
    assert_eq!(alone(&[SMALL, stalls].concat()).verdict, Gate::Pass, "an artefact is no fault");
}

#[test]
fn only_a_baseline_sees_what_all_parts_have_in_common() {
    let known = baseline(SMALL);
    let healthy = against(SMALL, &known);
    assert_eq!(healthy.verdict, Gate::Pass, "{healthy}");
    let compared = healthy.nodes[0].baseline.as_ref().unwrap();
    // One size, 8 devices, 4 nodes.
    assert_eq!(compared.changes.len(), 13, "{compared:?}");
    assert!(compared.changes.iter().all(|change| change.state == ChangeState::Unchanged));

    let slower = format!("{SMALL}[h2d]\ngbps = 52.65\n");
    assert_eq!(alone(&slower).verdict, Gate::Pass, "it cannot see that");
    let outcome = against(&slower, &known);
    assert_eq!(outcome.verdict, Gate::Fail, "{outcome}");
    // One cause, one reason: 16 MiB take 12 us and the bytes at 58.5 GB/s.
    assert_eq!(outcome.reasons.len(), 1, "{outcome}");
    let size = outcome.nodes[0].baseline.as_ref().unwrap().changes[0].clone();
    let bytes = 16.0 * f64::from(1 << 20);
    let wanted = (12e3 + bytes / 58.5) / (12e3 + bytes / 52.65);
    assert!((size.ratio.unwrap() / wanted - 1.0).abs() < 0.01, "{size:?} {wanted}");
    assert!(size.low.unwrap() < wanted && wanted < size.high.unwrap(), "{size:?} {wanted}");
    // What is smaller than what counts is left alone.
    let little = format!("{SMALL}[h2d]\ngbps = 57\n");
    assert_eq!(against(&little, &known).verdict, Gate::Pass);
    let faster = against(&format!("{SMALL}[h2d]\ngbps = 70\n"), &known);
    assert_eq!(faster.verdict, Gate::Pass, "{faster}");
    assert!(faster.nodes[0].notes.iter().any(|note| note.starts_with("faster")), "{faster}");
}

#[test]
fn what_was_lost_since_is_named() {
    let known = baseline(SMALL);
    let refused = against(&format!("{SMALL}refuse_bind = \"7\"\n"), &known);
    assert_fails(&refused, "unbindable", |finding| finding["cpus"] == serde_json::json!([7]));
    // One that could not be bound then either is no news, a further one is.
    let usual = baseline(&format!("{SMALL}refuse_bind = \"7\"\n"));
    let outcome = against(&format!("{SMALL}refuse_bind = \"7\"\n"), &usual);
    assert_eq!(outcome.verdict, Gate::Pass, "{outcome}");
    let notes = &outcome.nodes[0].notes;
    assert!(notes.iter().any(|note| note.contains("CPU 7 cannot be bound")), "{notes:?}");
    let more = against(&format!("{SMALL}refuse_bind = \"7,8\"\n"), &usual);
    assert_fails(&more, "unbindable", |finding| finding["cpus"] == serde_json::json!([8]));
    let offline = against(&format!("{SMALL}offline = \"12\"\n"), &known);
    assert_fails(&offline, "unbindable", |finding| finding["cpus"] == serde_json::json!([12]));
    let fewer = against(&SMALL.replace("devices = 8", "devices = 7"), &known);
    assert_eq!(fewer.verdict, Gate::Fail, "{fewer}");
    assert!(fewer.reasons[0].contains("device 7 of the baseline"), "{fewer}");
}

/// What a known-good node is like by nature is no fault of another one.
#[test]
fn what_the_baseline_shows_as_well_does_not_fail() {
    let far = fault("slow_block", "cpus = \"0-31\"\ndevices = \"4-7\"\nfactor = 0.8");
    let text = [SMALL, &far].concat();
    assert_eq!(alone(&text).verdict, Gate::Fail);
    let outcome = against(&text, &baseline(&text));
    assert_eq!(outcome.verdict, Gate::Pass, "{outcome}");
    assert!(outcome.nodes[0].findings.iter().any(|judged| judged.in_baseline && !judged.fails));
    let against_even = against(&text, &baseline(SMALL));
    assert_eq!(against_even.verdict, Gate::Fail, "{against_even}");
}

#[test]
fn another_machine_is_inconclusive_and_named() {
    let known = baseline(SMALL);
    for (other, wanted) in [
        (SMALL.replace("cpus = 64", "cpus = 48"), "present CPUs: 48 here, 64 in the baseline"),
        (SMALL.replace("numa_nodes = 4", "numa_nodes = 2"), "NUMA nodes: 2 here, 4"),
        (SMALL.replace("devices = 8", "devices = 9"), "device 8 is not in the baseline"),
    ] {
        let outcome = against(&other, &known);
        assert_eq!((outcome.verdict, outcome.exit_code()), (Gate::Inconclusive, 1), "{outcome}");
        assert!(outcome.reasons.iter().any(|reason| reason.contains(wanted)), "{outcome}");
    }
    // A size that it does not have.
    let sizes = Preflight::new().sizes([ByteSize::mib(8)]);
    let outcome = sizes.run(&machine(SMALL), &known, None, &mut ()).unwrap();
    assert_eq!(outcome.verdict, Gate::Inconclusive, "{outcome}");
    assert!(outcome.reasons[0].contains("no copies of 8MiB"), "{outcome}");
    // Its own faults are seen all the same.
    let sick = SMALL.replace("cpus = 64", "cpus = 48")
        + &fault("slow_device", "devices = \"5\"\nfactor = 0.8");
    assert_fails(&against(&sick, &known), "slow_device", |_| true);
}

#[test]
fn a_budget_that_tells_too_little_does_not_pass() {
    let known = baseline(SMALL);
    let noisy = format!("{SMALL}[h2d]\nnoise = 0.3\nvisit_noise = 0.2\n");
    let brief = Preflight::new().budget(Duration::from_millis(30));
    let outcome = brief.run(&machine(&noisy), &known, None, &mut ()).unwrap();
    assert_eq!(outcome.verdict, Gate::Inconclusive, "{outcome}");
    assert!(
        outcome.reasons.iter().any(|reason| reason.contains("cannot be excluded")),
        "{outcome}"
    );
}

/// How often healthy machines fail, and how often sick ones pass; prints the table of docs/reliability.md.
#[test]
#[ignore = "minutes; run by hand in release"]
fn rates_over_drawn_machines() {
    let mut counts = std::collections::BTreeMap::<(&str, Gate), usize>::new();
    let mut longest = 0;
    for seed in 1..=100_u32 {
        // A hash of the seed as a source of settings.
        let draw = |salt: u32, of: u32| {
            let mut x = seed.wrapping_mul(0x9E37_79B9) ^ salt.wrapping_mul(0x85EB_CA6B);
            x ^= x >> 16;
            x = x.wrapping_mul(0xC2B2_AE35);
            (x ^ x >> 13) % of
        };
        let noise = [0.005, 0.015, 0.03][draw(1, 3) as usize];
        let visit = [0.0, 0.005, 0.01][draw(2, 3) as usize];
        let spread = [0.0, 0.005, 0.01][draw(3, 3) as usize];
        let dips = [0.0, 0.002][draw(4, 2) as usize];
        let node = |seed: u32, gbps: f64| {
            format!(
                "seed = {seed}\n{NODE}[h2d]\ngbps = {gbps}\nnoise = {noise}\nvisit_noise = {visit}\n\
                 core_spread = {spread}\ndevice_spread = {spread}\ndip_probability = {dips}\n"
            )
        };
        // Another healthy node of the same kind, as an operator's known-good one is.
        let known = baseline(&node(seed + 1000, 58.5));
        let device = draw(5, 16);
        let sick = fault("slow_device", &format!("devices = \"{device}\"\nfactor = 0.88"));
        let cases = [
            ("healthy, itself", node(seed, 58.5), false),
            ("healthy, baseline", node(seed, 58.5), true),
            ("one device at 0.88, itself", node(seed, 58.5) + &sick, false),
            ("one device at 0.88, baseline", node(seed, 58.5) + &sick, true),
            ("all at 0.9, baseline", node(seed, 58.5 * 0.9), true),
        ];
        for (name, text, with) in cases {
            let outcome = if with { against(&text, &known) } else { alone(&text) };
            longest = longest.max(outcome.nodes[0].wall_ns);
            if outcome.verdict != if name.starts_with("healthy") { Gate::Pass } else { Gate::Fail }
            {
                println!(
                    "{seed} {name} (noise {noise}, visit {visit}, spread {spread}, dips {dips}): {outcome}"
                );
            }
            *counts.entry((name, outcome.verdict)).or_default() += 1;
        }
    }
    for ((name, verdict), count) in &counts {
        println!("{name}: {verdict} {count}");
    }
    println!("longest: {longest} ns");
    let names: BTreeSet<&str> = counts.keys().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), 5);
    for name in ["healthy, itself", "healthy, baseline"] {
        assert!(counts.get(&(name, Gate::Fail)).copied().unwrap_or(0) <= 2, "{name}");
    }
}
