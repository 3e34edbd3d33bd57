//! The sweep on synthetic machines, whose truth is known.

use std::collections::BTreeSet;

use cluster_health_core::{Bandwidth, DeviceId, Scenario};

use super::*;
use crate::plan::{CheckPolicy, CorePairPlanBuilder, Order};
use crate::samples::{DataCheck, Phase};

/// 16 CPUs, cores of two adjacent threads, 2 nodes, 4 devices, no noise.
const QUIET: &str = "[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\nbind_us = 50\n\
                     point_us = 5\n[all_gather]\ngbps = 46\nlatency_us = 180\nnoise = 0\n";

fn machine(more: &str) -> Machine {
    Machine::synthetic(Scenario::parse(&format!("{QUIET}{more}"), "test").unwrap()).unwrap()
}

fn builder() -> CorePairPlanBuilder {
    CorePairPlan::builder().repeats(2)
}

/// Keeps every sample; asks for the end after so many.
#[derive(Default)]
struct Log {
    samples: Vec<Sample>,
    most: Option<usize>,
}

impl Observer for Log {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.samples.push(sample.clone());
        Ok(())
    }

    fn is_cancelled(&self) -> bool {
        self.most.is_some_and(|most| self.samples.len() >= most)
    }
}

fn sweep(more: &str, builder: CorePairPlanBuilder) -> (CorePairPlan, CorePairMatrix, Vec<Sample>) {
    let machine = machine(more);
    let plan = builder.build(&machine).unwrap();
    let mut log = Log::default();
    let result = core_pair(&machine, &plan, None, &mut log).unwrap();
    assert!(result.end.complete);
    (plan, result, log.samples)
}

/// 8 MiB in so many nanoseconds, decimal GB/s.
fn rate(ns: u64) -> f64 {
    8_388_608.0 / ns as f64
}

// By hand: 180 µs + 8,388,608 B at 46 B/ns (182,361.04 ns).
const HEALTHY: u64 = 362_361;

#[test]
fn without_noise_every_cell_takes_latency_plus_bytes_over_rate() {
    let (plan, result, samples) = sweep("", builder().rank0_cpus([4, 1]).rank1_cpus([0, 1, 9]));
    assert_eq!(result.per_rank_gbps().shape(), [1, 2, 3]);
    assert!(result.status().iter().all(|status| *status == CellStatus::Measured));
    for rate_found in result.per_rank_gbps() {
        assert!((rate_found - rate(HEALTHY)).abs() < 1e-12);
    }
    // nccl-tests with 2 ranks: algorithm bandwidth 2 S ÷ t, bus bandwidth half of that.
    assert!((result.alg_gbps()[[0, 1, 2]] - 2.0 * rate(HEALTHY)).abs() < 1e-12);
    assert!((result.bus_gbps()[[0, 1, 2]] - rate(HEALTHY)).abs() < 1e-12);
    assert_eq!(result.per_rank_gbps_at(ByteSize::mib(8)).unwrap().dim(), (2, 3));
    assert!(result.per_rank_gbps_at(ByteSize::mib(9)).is_none());
    assert_eq!(result.matrix.rows.ids, [4, 1]);
    assert_eq!(result.matrix.columns.nodes, [Some(0), Some(0), Some(1)]);

    for sample in &samples {
        assert_eq!(sample.sweep, Sweep::CorePair);
        assert_eq!((sample.cpu, sample.device), (None, None));
        assert_eq!(sample.device_pair, Some([DeviceId(0), DeviceId(1)]));
        assert_eq!(sample.status, PointStatus::Measured);
        assert_eq!((sample.skew_ns, sample.check, sample.settled), (Some(0), DataCheck::Ok, true));
        let cpus = [sample.rank0_cpu.unwrap(), sample.rank1_cpu.unwrap()];
        assert_eq!(sample.ran_on, RanOn::Ranks(vec![vec![cpus[0]], vec![cpus[1]]]));
        // 64 KiB: 180 µs + 1,424.70 ns.
        let time = if sample.phase == Phase::Probe { 181_425 } else { HEALTHY };
        assert_eq!(sample.iter_ns, [time; 3]);
        assert_eq!(sample.rank_ns.as_deref(), Some(&[vec![time; 3], vec![time; 3]][..]));
    }
    assert_eq!(samples.iter().filter(|sample| sample.is_matrix_point()).count(), 2 * plan.cells());
    assert_eq!(result.end.points, samples.len() as u64);
    assert_eq!(result.end.next_seq, samples.len() as u64);
}

#[test]
fn time_is_accounted_for_to_the_nanosecond() {
    let (_, result, samples) = sweep("", builder().rank0_cpus([0, 2]).rank1_cpus([1, 3]));
    let mut bound = [None; 2];
    let mut now = 0;
    for sample in &samples {
        assert_eq!(sample.t_ns, Some(now));
        // 50 µs for each rank that moves, one after the other; 5 µs for the point.
        let cpus = [sample.rank0_cpu, sample.rank1_cpu];
        let moves = (0..2).filter(|&rank| bound[rank] != cpus[rank]).count() as u64;
        bound = cpus;
        assert_eq!(sample.bind_ns, 50_000 * moves);
        // A moved pair warms up until two agree.
        assert_eq!(sample.warmup_ns.len(), if moves > 0 { 2 } else { 1 });
        let spent: u64 = sample.warmup_ns.iter().chain(&sample.iter_ns).sum();
        now += 5_000 + sample.bind_ns + spent;
    }
    let timings = result.end.timings;
    assert_eq!(timings.wall_ns, now);
    let sum = |pick: fn(&Sample) -> u64| samples.iter().map(pick).sum::<u64>();
    assert_eq!(timings.bind_ns, sum(|sample| sample.bind_ns));
    assert_eq!(timings.iterations_ns, sum(|sample| sample.iter_ns.iter().sum()));
    assert_eq!(timings.warmup_ns, sum(|sample| sample.warmup_ns.iter().sum()));
}

#[test]
fn planted_faults_show_in_their_cells_and_nowhere_else() {
    let (plan, result, samples) = sweep(
        "[[fault]]\nkind = \"same_core\"\nfactor = 0.61\n\
         [[fault]]\nkind = \"smt_sibling\"\nfactor = 0.93\n\
         [[fault]]\nkind = \"slow_rank1_core\"\nrank1 = [12]\nfactor = 0.5\n",
        builder().rank0_cpus(0..8).rank1_cpus(0..16),
    );
    for ((_, row, column), &found) in result.per_rank_gbps().indexed_iter() {
        // 180 µs + 182,361.04 ns ÷ factor.
        let expected = if row == column {
            478_953
        } else if row / 2 == column / 2 {
            376_087
        } else if column == 12 {
            544_722
        } else {
            HEALTHY
        };
        assert!((found - rate(expected)).abs() < 1e-12, "{row} {column}: {found}");
    }
    // Pairs that share a core settle among themselves, although they are 32 % slower.
    assert_eq!(plan.cells(), 128);
    let unsettled: BTreeSet<_> = samples
        .iter()
        .filter(|sample| !sample.settled)
        .map(|sample| (sample.rank1_cpu, sample.block))
        .collect();
    // Half as fast as all others, a core does not settle before it is known.
    assert_eq!(unsettled, BTreeSet::from([(Some(CpuId(12)), 0)]));
}

#[test]
fn the_order_of_the_devices_is_kept_and_one_may_stand_for_both() {
    let fault = "[[fault]]\nkind = \"slow_device\"\nsweep = \"core_pair\"\ndevices = [3]\n\
                 factor = 0.5\n";
    for (pair, expected) in [([3, 1], 544_722), ([1, 2], HEALTHY), ([2, 2], HEALTHY)] {
        let cpus = builder().rank0_cpus([0]).rank1_cpus([2]);
        let (plan, result, samples) = sweep(fault, cpus.device_pair(pair));
        assert_eq!(plan.device_pair, pair.map(DeviceId));
        assert!(samples.iter().all(|sample| sample.device_pair == Some(pair.map(DeviceId))));
        assert!((result.per_rank_gbps()[[0, 0, 0]] - rate(expected)).abs() < 1e-12, "{pair:?}");
    }
}

#[test]
fn a_cpu_that_is_offline_is_skipped_and_shifts_nobody() {
    let (_, result, samples) = sweep("", builder().rank0_cpus([0, 1]).rank1_cpus([2, 3, 4]));
    let machine = Machine::synthetic(
        Scenario::parse(&QUIET.replace("devices = 4\n", "devices = 4\noffline = \"3\"\n"), "test")
            .unwrap(),
    )
    .unwrap();
    let plan = builder().rank0_cpus([0, 1]).rank1_cpus([2, 3, 4]).build(&machine).unwrap();
    let mut log = Log::default();
    let broken = core_pair(&machine, &plan, None, &mut log).unwrap();
    assert!(broken.end.complete);
    for row in 0..2 {
        assert!(broken.per_rank_gbps()[[0, row, 1]].is_nan());
        assert_eq!(broken.status()[[0, row, 1]], CellStatus::Skipped);
        for column in [0, 2] {
            let [found, expected] =
                [&broken, &result].map(|result| result.per_rank_gbps()[[0, row, column]].to_bits());
            assert_eq!(found, expected);
        }
    }
    let skipped: Vec<&Sample> =
        log.samples.iter().filter(|sample| sample.rank1_cpu == Some(CpuId(3))).collect();
    assert_eq!(skipped.len(), 4);
    for sample in skipped {
        assert_eq!(sample.status, PointStatus::Skipped);
        assert_eq!(sample.reason.as_deref(), Some("rank 1: CPU 3 cannot be bound: offline"));
        assert!(sample.iter_ns.is_empty() && sample.warmup_ns.is_empty());
        assert_eq!(sample.rank_ns.as_deref(), Some(&[vec![], vec![]][..]));
        assert_eq!(sample.ran_on, RanOn::Ranks(vec![vec![], vec![]]));
    }
    // Points of the matrix come in the same order as without the fault.
    let cells = |samples: &[Sample]| -> Vec<_> {
        samples.iter().filter(|s| s.is_matrix_point()).map(Sample::cell).collect()
    };
    assert_eq!(cells(&log.samples).len(), cells(&samples).len());
    assert!(
        log.samples.iter().filter(|s| s.rank1_cpu != Some(CpuId(3))).all(|sample| {
            sample.status == PointStatus::Measured && sample.check == DataCheck::Ok
        })
    );
}

#[test]
fn a_rank_that_is_refused_only_at_run_time_is_named() {
    let (_, result, samples) = sweep(
        "[[failure]]\nkind = \"bind_refused\"\nrank = 1\ncpus = [9]\n",
        builder().rank0_cpus([0, 1]).rank1_cpus([8, 9]),
    );
    for sample in &samples {
        let refused = sample.rank1_cpu == Some(CpuId(9));
        assert_eq!(sample.status == PointStatus::Skipped, refused);
        if refused {
            let reason = sample.reason.as_deref().unwrap();
            assert!(reason.contains("rank 1") && reason.contains("EPERM"), "{reason}");
        } else {
            assert_eq!(
                sample.ran_on,
                RanOn::Ranks(vec![vec![sample.rank0_cpu.unwrap()], vec![CpuId(8)]])
            );
        }
    }
    assert!(result.per_rank_gbps()[[0, 0, 1]].is_nan());
    assert!((result.per_rank_gbps()[[0, 0, 0]] - rate(HEALTHY)).abs() < 1e-12);
}

#[test]
fn wrong_data_fails_the_point_unless_nobody_looks() {
    let fault = "[[fault]]\nkind = \"data_corruption\"\nsweep = \"core_pair\"\nrank0 = [2]\n\
                 rank1 = [5]\n";
    let plan = || builder().rank0_cpus([1, 2]).rank1_cpus([4, 5]);
    let (_, result, samples) = sweep(fault, plan());
    for sample in &samples {
        let hit = sample.cell() == Some((2, 5));
        assert_eq!(sample.check == DataCheck::Mismatch, hit);
        assert_eq!(sample.status == PointStatus::Failed, hit);
        assert_eq!(sample.reason.is_some(), hit);
    }
    assert_eq!(result.status()[[0, 1, 1]], CellStatus::Failed);
    assert!(result.per_rank_gbps()[[0, 1, 1]].is_nan());
    assert!(result.per_rank_gbps()[[0, 0, 1]].is_finite());
    // Without warm-up it shows after the last iteration.
    let (_, _, samples) = sweep(fault, plan().warmup(Some(0)));
    let hit = samples.iter().find(|sample| sample.cell() == Some((2, 5))).unwrap();
    assert_eq!((hit.status, hit.iter_ns.len()), (PointStatus::Failed, 3));
    let (_, result, samples) = sweep(fault, plan().check(CheckPolicy::Off));
    assert!(samples.iter().all(|sample| sample.check == DataCheck::Off));
    assert!(result.per_rank_gbps().iter().all(|rate| rate.is_finite()));
}

#[test]
fn an_error_at_one_point_fails_that_point() {
    let (_, result, samples) = sweep(
        "[[failure]]\nkind = \"error\"\nrank = 1\nat_point = 3\ncall = \"HcclAllGather\"\n\
         code = 9\n",
        builder().rank0_cpus([0, 1]).rank1_cpus([2, 3]),
    );
    for sample in &samples {
        assert_eq!(sample.status == PointStatus::Failed, sample.seq == 3, "{sample:?}");
    }
    let reason = samples[3].reason.as_deref().unwrap();
    assert!(reason.contains("HcclAllGather") && reason.contains("rank 1"), "{reason}");
    assert!(result.per_rank_gbps().iter().all(|rate| rate.is_finite()));
}

#[test]
fn a_lost_rank_ends_the_sweep() {
    for (failure, words) in [
        ("kind = \"rank_dead\"\nrank = 1\nat_point = 3\n", "rank 1"),
        ("kind = \"hang\"\nrank = 0\nat_point = 3\n", "not finished after 30000 ms"),
    ] {
        let machine = machine(&format!("[[failure]]\n{failure}"));
        let plan = builder().rank0_cpus([0, 1]).rank1_cpus([2, 3]).build(&machine).unwrap();
        let mut log = Log::default();
        let error = core_pair(&machine, &plan, None, &mut log).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(log.samples.len(), 3);
    }
}

#[test]
fn what_a_moved_pair_costs_once_stays_out_of_the_times() {
    let (_, result, samples) = sweep(
        "[[artefact]]\nkind = \"first_visit\"\nextra_us = 400\n",
        builder().rank0_cpus(0..4).rank1_cpus(4..8),
    );
    for sample in &samples {
        if sample.bind_ns > 0 {
            let healthy = sample.iter_ns[0];
            assert_eq!(sample.warmup_ns[0], healthy + 400_000);
        }
    }
    assert!(result.per_rank_gbps().iter().all(|found| (found - rate(HEALTHY)).abs() < 1e-12));
}

#[test]
fn a_rate_above_the_declared_one_is_implausible() {
    // 23.15 GB/s are within 1.25 × 19, and not within 1.25 × 18.
    for (expect, status) in [(19.0, CellStatus::Measured), (18.0, CellStatus::Implausible)] {
        let (_, result, _) = sweep(
            "",
            builder()
                .rank0_cpus([0])
                .rank1_cpus([2])
                .expect(Some(Bandwidth::gb_per_second(expect))),
        );
        assert_eq!(result.status()[[0, 0, 0]], status, "{expect}");
    }
}

#[test]
fn sequential_order_is_measured_as_planned() {
    let (_, _, samples) = sweep(
        "",
        builder()
            .repeats(1)
            .order(Order::Sequential)
            .sizes([ByteSize::mib(1), ByteSize::mib(8)])
            .rank0_cpus([7, 2])
            .rank1_cpus([0, 3]),
    );
    let found: Vec<_> = samples
        .iter()
        .map(|sample| {
            let cell = sample.cell().unwrap();
            (cell.0, sample.bytes.bytes() >> 20, cell.1)
        })
        .collect();
    assert_eq!(
        found,
        [(7, 1, 0), (7, 1, 3), (7, 8, 0), (7, 8, 3), (2, 1, 0), (2, 1, 3), (2, 8, 0), (2, 8, 3)]
    );
}

#[test]
fn a_sweep_goes_on_where_it_was_stopped() {
    let noisy = QUIET.replace("noise = 0\n", "noise = 0.03\n");
    let machine = || Machine::synthetic(Scenario::parse(&noisy, "test").unwrap()).unwrap();
    let plan = builder().rank0_cpus(0..6).rank1_cpus(0..6).build(&machine()).unwrap();
    let mut whole = Log::default();
    let expected = core_pair(&machine(), &plan, None, &mut whole).unwrap();
    for stop in [1, 40, whole.samples.len() - 1] {
        let mut first = Log { most: Some(stop), ..Log::default() };
        let end = core_pair(&machine(), &plan, None, &mut first).unwrap().end;
        assert!(!end.complete && end.points == stop as u64);
        let mut second = Log::default();
        let mut before = first.samples.iter().cloned().map(Ok);
        let result = core_pair_from(&machine(), &plan, None, &mut before, 1, &mut second).unwrap();
        assert!(result.end.complete);
        let mut all = first.samples;
        all.append(&mut second.samples);
        let key = |sample: &Sample| (sample.seq, sample.cell(), sample.block, sample.bytes);
        assert_eq!(
            all.iter().map(key).collect::<Vec<_>>(),
            whole.samples.iter().map(key).collect::<Vec<_>>()
        );
        assert_eq!(result.per_rank_gbps().dim(), expected.per_rank_gbps().dim());
        assert!(result.per_rank_gbps().iter().all(|rate| rate.is_finite()));
    }
    let other = builder().seed(2).rank0_cpus(0..6).rank1_cpus(0..6).build(&machine()).unwrap();
    let mut before = whole.samples.iter().cloned().map(Ok);
    let error = core_pair_from(&machine(), &other, None, &mut before, 1, &mut ()).unwrap_err();
    assert!(error.to_string().contains("not the point that this plan has there"), "{error}");
}

#[test]
fn blocks_are_added_for_cells_that_need_them() {
    let noisy = QUIET.replace("noise = 0\n", "noise = 0\nvisit_noise = 0.05\n");
    let machine = Machine::synthetic(Scenario::parse(&noisy, "test").unwrap()).unwrap();
    let cpus = builder().repeats(2).rank0_cpus(0..4).rank1_cpus(4..8);
    let plan = cpus.ci(Some(0.05)).build(&machine).unwrap();
    let mut log = Log::default();
    let result = core_pair(&machine, &plan, None, &mut log).unwrap();
    assert!(result.end.complete);
    let of_blocks = log.samples.iter().filter(|sample| sample.is_matrix_point());
    let blocks = of_blocks.map(|sample| sample.block).max().unwrap() + 1;
    assert!((3..=20).contains(&blocks), "{blocks}");
    let count =
        |block| log.samples.iter().filter(|s| s.block == block && s.is_matrix_point()).count();
    assert_eq!((count(0), count(1)), (16, 16));
    assert!(count(blocks - 1) < 16);
}

#[test]
fn pairs_are_as_fast_as_the_clock_of_their_warm_ups_saw_them() {
    let mut sample = Sample::new(0, Sweep::CorePair, ByteSize(8));
    sample.warmup_ns = vec![900, 700];
    sample.iter_ns = vec![600, 800];
    assert_eq!(fastest(&sample), Some(600));
    // By the devices' own clock no warm-up, timed by the host's, would ever come near.
    sample.iter_ns = vec![10, 12];
    sample.host_iter_ns = Some(vec![650, 800]);
    assert_eq!(fastest(&sample), Some(650));
}
