//! The pair sweep of the Ascend backend, on the simulator.

use std::collections::BTreeSet;

use crate::ranks::{assert_complete, assert_nothing_left, lines, pair_points, two_cpus};
use crate::simulator;
use crate::support::{Place, Ran, assert_whole, json};

const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";

const KIB: u64 = 1 << 10;

/// The program on simulated devices, which this place holds the libraries of.
fn run(place: &Place, line: &str, libraries: &[&str], variables: &[(&str, &str)]) -> Ran {
    let folder = place.path("lib");
    std::fs::create_dir(&folder).unwrap();
    simulator::install(&folder, libraries);
    let mut command = place.command(line);
    command.env(FOLDER, folder).envs(variables.iter().copied());
    Ran::of(&mut command)
}

#[test]
fn pairs_of_two_devices_are_measured_and_checked() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = format!(
        "core-pair --quiet --backend ascend --sizes 64KiB,8B --rank0-cpus {a} --rank1-cpus {b} \
         --iters 5 --repeats 2 --device-pair 3,1 --out @out"
    );
    let libraries = ["libascendcl.so", "libhccl.so"];
    let ran = run(&place, &line, &libraries, &[("ASCEND_SIM_DEVICES", "4")]);
    assert_whole(&ran);
    assert_nothing_left(&place);
    let out = place.path("out");
    assert_complete(&out, &[8, 64 * KIB], [&[a], &[b]], 2);
    let points = pair_points(&out);
    for point in &points {
        point.assert_measured(5);
        assert_eq!(point.device_pair, [3, 1]);
    }
    let run = json(&out.join("run.json"));
    assert_eq!(run["environment"]["backend"], "ascend");
}

#[test]
fn damaged_block_is_found() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = format!(
        "core-pair --quiet --backend ascend --sizes 8B --rank0-cpus {a} --rank1-cpus {b} --warmup 0 \
         --iters 1 --repeats 1 --out @out"
    );
    // The first is that of the set-up.
    let faults = [("ASCEND_SIM_FAULTS", "HcclAllGather:2+:corrupt")];
    let ran = run(&place, &line, &["libascendcl.so", "libhccl.so"], &faults);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("data check"), "{ran:?}");
    let points = pair_points(&place.path("out"));
    let found: BTreeSet<_> = points.iter().map(|point| (&*point.status, &*point.check)).collect();
    assert_eq!(found, BTreeSet::from([("failed", "mismatch")]));
}

#[test]
fn failure_of_hccl_ends_the_run_with_its_words() {
    let Some([a, b]) = two_cpus() else { return };
    let sweep = format!(
        "core-pair --quiet --json --backend ascend --sizes 8B --rank0-cpus {a} --rank1-cpus {b} \
         --out @out"
    );
    let both = ["libascendcl.so", "libhccl.so"];
    let place = Place::new();
    let faults = [("ASCEND_SIM_FAULTS", "HcclAllGather:1:7")];
    let ran = run(&place, &sweep, &both, &faults);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("HcclAllGather failed on device 0"), "{message}");
    assert!(message.contains("code 7 (HCCL_E_UNAVAIL)"), "{message}");

    let place = Place::new();
    let ran = run(&place, &sweep, &["libascendcl.so"], &[]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("libhccl.so") && ran.stderr.contains("set_env.sh"), "{ran:?}");
}

#[test]
fn both_ranks_on_one_device_are_refused() {
    let place = Place::new();
    let line = "core-pair --quiet --backend ascend --device-pair 0,0 --out @out";
    let ran = run(&place, line, &["libascendcl.so", "libhccl.so"], &[]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("needs two devices"), "{ran:?}");
}

/// Pairs whose all-gather takes the simulated HCCL 100 µs, with a device clock of this tick.
fn timed_pairs(tick_ns: &str) -> Option<Vec<serde_json::Value>> {
    let [a, b] = two_cpus()?;
    let place = Place::new();
    let line = format!(
        "core-pair --quiet --backend ascend --sizes 4KiB --rank0-cpus {a} --rank1-cpus {b} \
         --warmup 1 --iters 3 --repeats 2 --out @out"
    );
    let variables = [("ASCEND_SIM_TICK_NS", tick_ns), ("ASCEND_SIM_LINKS", "hccl,us=100")];
    let ran = run(&place, &line, &["libascendcl.so", "libhccl.so"], &variables);
    assert_whole(&ran);
    let points = pair_points(&place.path("out"));
    points.iter().for_each(|point| point.assert_measured(3));
    Some(lines(&place.path("out")))
}

fn times(value: &serde_json::Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|time| time.as_u64().unwrap()).collect()
}

#[test]
fn pairs_are_timed_by_the_devices_with_the_host_beside() {
    let Some(points) = timed_pairs("20") else { return };
    assert!(points.len() >= 2);
    for point in points {
        assert_eq!(point["timer"], "event", "{point}");
        let (device, host) = (times(&point["iter_ns"]), times(&point["host_iter_ns"]));
        assert_eq!((device.len(), host.len()), (3, 3));
        // What the simulator makes it take, and what comes on top for the host.
        assert!(device.iter().all(|time| *time >= 100_000), "{point}");
        assert!(device.iter().zip(&host).all(|(device, host)| device <= host), "{point}");
    }
}

#[test]
fn pairs_too_short_for_the_devices_clock_are_timed_in_batches() {
    let Some(points) = timed_pairs("1000000") else { return };
    for point in points {
        assert_eq!(point["timer"], "event_batch", "{point}");
        let (device, host) = (times(&point["iter_ns"]), times(&point["host_iter_ns"]));
        // Of one all-gather, not of the batch; one tick in fifty may be lost.
        assert!(device.iter().all(|time| *time >= 97_000), "{point}");
        // Nor is the host's, in whose windows the same batches are.
        assert!(host.iter().zip(&device).all(|(host, device)| *host < 20 * *device), "{point}");
    }
}

#[test]
fn clock_that_is_too_coarse_for_pairs_leaves_them_to_the_host() {
    // Not even a thousand all-gathers are 50 ticks of 200 ms, on a busy machine either.
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = format!(
        "core-pair --quiet --backend ascend --sizes 8B --rank0-cpus {a} --rank1-cpus {b} \
         --warmup 1 --iters 2 --repeats 1 --out @out"
    );
    let variables = [("ASCEND_SIM_TICK_NS", "200000000")];
    let ran = run(&place, &line, &["libascendcl.so", "libhccl.so"], &variables);
    assert_whole(&ran);
    for point in lines(&place.path("out")) {
        assert_eq!(point["timer"], "host", "{point}");
        assert!(point["host_iter_ns"].is_null() && times(&point["iter_ns"]).len() == 2, "{point}");
    }
}

#[test]
fn plan_that_a_device_of_the_pair_has_no_memory_for_is_refused() {
    let Some([a, b]) = two_cpus() else { return };
    // 3 × 64 MiB and HCCL's two buffers; without the latter it would fit.
    for (buffer, fits) in [("200", false), ("1", true)] {
        let place = Place::new();
        let line = format!(
            "core-pair --quiet --backend ascend --sizes 64MiB --rank0-cpus {a} --rank1-cpus {b} \
             --warmup 0 --iters 1 --repeats 1 --device-pair 1,0 --out @out"
        );
        let variables =
            [("ASCEND_SIM_HBM", "300M"), ("ASCEND_SIM_HBM_USED", "0"), ("HCCL_BUFFSIZE", buffer)];
        let ran = run(&place, &line, &["libascendcl.so", "libhccl.so"], &variables);
        if fits {
            assert_whole(&ran);
        } else {
            assert_eq!(ran.code, Some(2), "{ran:?}");
            let words = "64MiB needs 592 MiB of the memory of device 1";
            assert!(ran.stderr.contains(words), "{ran:?}");
            assert!(ran.stderr.contains("300 MiB of 300 MiB are free"), "{ran:?}");
            assert!(!place.path("out").exists());
        }
    }
}
