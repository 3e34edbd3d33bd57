use std::f64::consts::TAU;

use super::lead::{Periodic, periodic};
use super::time::{Course, Level};
use super::{bimodal, leads};
use crate::analysis::Fitted;
use crate::analysis::finding::Kind;
use crate::analysis::table::Table;
use crate::matrix::Axis;
use crate::samples::{Sample, Sweep};
use crate::schedule::Random;
use cluster_health_core::{ByteSize, CpuId, DeviceId};

/// Standard normal numbers of a seed (Box and Muller).
fn noise(seed: u64, count: usize) -> Vec<f64> {
    let mut random = Random::new(seed);
    let mut unit = || random.below(1 << 30) as f64 / f64::from(1 << 30);
    (0..count).map(|_| (-2.0 * (1.0 - unit()).ln()).sqrt() * (TAU * unit()).cos()).collect()
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "milliseconds, above 0")]
fn whole(time: f64) -> u64 {
    time as u64
}

fn levels(values: impl IntoIterator<Item = f64>) -> Vec<Level> {
    (0_u32..).zip(values).map(|(seq, value)| Level { seq, t_s: f64::from(seq), value }).collect()
}

#[test]
fn a_quiet_course_has_nothing() {
    for seed in 0..200 {
        let course = Course::of(&levels(noise(seed, 300).into_iter().map(|x| 0.01 * x)), 0.01);
        assert!(course.steps.is_empty() && course.drift.is_none(), "{seed}: {course:?}");
        assert!(course.bursts.is_none(), "{seed}: {course:?}");
    }
}

#[test]
fn a_step_a_drift_and_bursts_are_told_apart() {
    let noise = noise(5, 400);
    let course = |of: &dyn Fn(usize) -> f64| {
        let values = noise.iter().enumerate().map(|(at, noise)| of(at) + 0.01 * noise);
        Course::of(&levels(values), 0.01)
    };
    let step = course(&|at| if at >= 130 { 0.08 } else { 0.0 });
    assert_eq!(step.steps.len(), 1, "{step:?}");
    let (at, delta, error) = step.steps[0];
    assert!(at.abs_diff(130) <= 2 && (delta - 0.08).abs() < 4.0 * error, "{step:?}");
    assert!(step.drift.is_none() && step.bursts.is_none(), "{step:?}");

    let drift = course(&|at| 0.1 * at as f64 / 400.0);
    let (total, error) = drift.drift.expect("a drift");
    assert!((total - 0.1).abs() < 3.0 * error && error < 0.02, "{drift:?}");
    assert!(drift.steps.is_empty() && drift.bursts.is_none(), "{drift:?}");

    let bursts = course(&|at| if at % 50 < 4 { 0.2 } else { 0.0 }).bursts.expect("bursts");
    assert_eq!(bursts.windows.len(), 8, "{bursts:?}");
    assert!((bursts.depth - 0.2).abs() < 0.02, "{bursts:?}");
}

#[test]
fn events_at_regular_distances_are_found_among_others() {
    let mut random = Random::new(3);
    let mut events: Vec<u32> =
        (0..400).map(|_| u32::try_from(random.below(40_000)).unwrap()).collect();
    assert_eq!(periodic(&events_sorted(&mut events.clone()), 39_999, |_| true), None);
    events.extend((3277..40_000).step_by(3277));
    let found = periodic(&events_sorted(&mut events), 39_999, |_| true);
    assert_eq!(found, Some(Periodic { every: 3277, phase: 0, hits: 12, of: 12 }));
}

fn events_sorted(events: &mut Vec<u32>) -> Vec<u32> {
    events.sort_unstable();
    events.dedup();
    events.clone()
}

/// 12 CPUs × 4 devices in three blocks of a fixed random order; `shape` makes what is special.
fn table(shape: impl Fn(&mut Sample, usize)) -> Table {
    let axis = |name, count: u32| Axis::new(name, (0..count).collect(), vec![None; count as usize]);
    let size = ByteSize::mib(16);
    let axes = (axis("cpu", 12), axis("device", 4));
    let mut table = Table::new(Sweep::H2d, "idle", vec![size], axes, |_| None);
    let mut random = Random::new(9);
    let jitter = noise(4, 12 * 4 * 3 * 4);
    let mut seq = 0_usize;
    for block in 0..3 {
        let mut cpus: Vec<u32> = (0..12).collect();
        random.shuffle(&mut cpus);
        for cpu in cpus {
            for device in 0..4 {
                let mut sample = Sample::new(seq as u64, Sweep::H2d, size);
                sample.block = block;
                sample.cpu = Some(CpuId(cpu));
                sample.device = Some(DeviceId(device));
                sample.bind_ns = if device == 0 { 50_000 } else { 0 };
                sample.t_ns = Some(seq as u64 * 1_000_000);
                let time = |at: usize| whole(300_000.0 * (0.01 * jitter[4 * seq + at]).exp());
                sample.warmup_ns = vec![time(3)];
                sample.iter_ns = (0..3).map(time).collect();
                shape(&mut sample, seq);
                table.add(&sample);
                seq += 1;
            }
        }
    }
    table
}

#[test]
fn first_transfers_tell_visits_stalls_and_checkpoints() {
    let kinds = |shape: &dyn Fn(&mut Sample, usize)| {
        let Fitted { table, .. } = Fitted::new(table(shape));
        leads(&table)
    };
    assert!(kinds(&|_, _| ()).is_empty());

    let visits = kinds(&|sample, _| {
        sample.warmup_ns[0] += if sample.bind_ns > 0 { 40_000 } else { 0 };
    });
    assert_eq!(visits.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::FirstVisit]);
    let extra = visits[0].extra_us.unwrap();
    assert!((extra - 40.0).abs() < 2.0, "{extra}");

    let stalls = kinds(&|sample, seq| sample.warmup_ns[0] += if seq == 0 { 25_000_000 } else { 0 });
    assert_eq!(stalls.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::AllocationStall]);
    assert!((stalls[0].extra_us.unwrap() - 25_000.0).abs() < 50.0);

    let points = kinds(&|sample, seq| {
        sample.warmup_ns[0] += if seq > 0 && seq % 18 == 0 { 90_000 } else { 0 };
    });
    assert_eq!(points.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::Checkpoint]);
    assert!(points[0].facts[0].contains("every 18 points"), "{:?}", points[0].facts);
}

#[test]
fn two_modes_are_bimodal_and_a_slow_device_is_not() {
    let mut random = Random::new(1);
    let slow: Vec<bool> = (0..144).map(|_| random.below(10) < 4).collect();
    let judge = |is_slow: &dyn Fn(&Sample, usize) -> bool| {
        let Fitted { table, fits, .. } = Fitted::plain(table(|sample, seq| {
            let factor = if is_slow(sample, seq) { 3.2 / 2.1 } else { 1.0 };
            for time in &mut sample.iter_ns {
                *time = whole(*time as f64 * 7.0 * factor);
            }
        }));
        bimodal(&table, &fits)
    };
    let finding = judge(&|_, seq| slow[seq]).expect("two modes");
    assert_eq!(finding.kind, Kind::Inconclusive);
    assert!(finding.inference.contains("bimodal") && finding.inference.contains("numa_balancing"));
    // 7 × 0.3 ms, and 3.2 ÷ 2.1 of it.
    assert!(finding.facts[0].contains("2.1") && finding.facts[0].contains("3.2"), "{finding:?}");
    assert!(judge(&|_, _| false).is_none());
    assert!(judge(&|sample, _| sample.device == Some(DeviceId(1))).is_none());
    assert!(judge(&|sample, _| sample.cpu.is_some_and(|cpu| cpu.0 < 4)).is_none());
    assert!(judge(&|_, seq| seq > 70).is_none());
}
