//! The program with the Ascend backend, on the simulator.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::simulator;
use crate::support::{Folder, MIB, Place, Ran, assert_whole, close, json};

/// The folder with the libraries.
fn libraries() -> PathBuf {
    static INSTALLED: OnceLock<TempDir> = OnceLock::new();
    let folder = INSTALLED.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        simulator::install(folder.path(), &simulator::LIBRARIES);
        folder
    });
    folder.path().to_owned()
}

pub(crate) fn run(place: &Place, line: &str, variables: &[(&str, &str)]) -> Ran {
    let mut command = place.command(line);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ASCEND_") {
            command.env_remove(name);
        }
    }
    command.env("CLUSTER_HEALTH_ASCEND_LIB_DIR", libraries());
    Ran::of(command.envs(variables.iter().copied()))
}

const SWEEP: &str = "h2d --backend ascend --quiet --out @out --cpus 0 --sizes 1MiB --iters 3";

fn sweep(place: &Place, code: i32, options: &str, variables: &[(&str, &str)]) -> Folder {
    let ran = run(place, &format!("{SWEEP} {options}"), variables);
    if code == 0 {
        assert_whole(&ran);
    } else {
        assert_eq!(ran.code, Some(code), "{ran:?}");
    }
    Folder::read(&place.path("out"))
}

#[test]
fn f22_columns_are_physical_devices_and_times_are_the_devices() {
    let place = Place::new();
    let folder = sweep(
        &place,
        1,
        "--repeats 2",
        &[
            ("ASCEND_SIM_DEVICES", "4"),
            ("ASCEND_SIM_PHY", "3,5,0,7"),
            ("ASCEND_RT_VISIBLE_DEVICES", "1,2"),
            ("ASCEND_SIM_VIRTUAL", "1"),
            // Logic ids; 1 MiB takes 104857.6 ns and 209715.2 ns.
            ("ASCEND_SIM_LINKS", "h2d,gbps=5,us=0;h2d,dev=1,gbps=10,us=0"),
        ],
    );
    let csv = folder.csv("h2d-1MiB");
    assert_eq!(csv.columns, [5, 0]);
    // The clock of events has ticks of 20 ns.
    assert!(close(csv.at(0, 5).unwrap(), 10.0, 0.002), "{csv:?}");
    assert!(close(csv.at(0, 0).unwrap(), 5.0, 0.002), "{csv:?}");
    assert!(folder.points.len() >= 4);
    for point in &folder.points {
        assert_eq!((point.status.as_str(), point.check.as_str()), ("measured", "ok"));
        assert_eq!(point.timer, "event");
        assert_eq!(point.pinned.as_deref(), Some("pinned"));
        assert_eq!(point.iter_ns.len(), 3);
        assert_eq!(point.host_iter_ns.as_ref().unwrap().len(), 3);
    }
    let devices = folder.run["devices"].as_array().unwrap();
    let ids = |name: &str| devices.iter().map(|device| device[name].clone()).collect::<Vec<_>>();
    assert_eq!(ids("id"), [Value::from(5), Value::from(0)]);
    assert_eq!(ids("runtime_id"), [Value::from(0), Value::from(1)]);
}

#[test]
fn warm_up_is_judged_by_the_clock_it_is_timed_with() {
    // By its own clock the device is a thousand times faster than any host clock sees it: judged
    // by that, no warm-up would ever come near the best time.
    let place = Place::new();
    let folder = sweep(
        &place,
        0,
        "--repeats 12",
        &[("ASCEND_SIM_VIRTUAL", "1"), ("ASCEND_SIM_LINKS", "h2d,gbps=100000")],
    );
    let settled = folder.points.iter().filter(|point| point.settled).count();
    // Probes are so short that the fixed cost of the simulated device is no less than the host's.
    for point in folder.points.iter().filter(|point| point.phase != "probe") {
        let host = point.host_iter_ns.as_ref().unwrap();
        assert!(point.iter_ns.iter().max() < host.iter().min(), "{point:?}");
    }
    // Most do where nothing else runs; judged by the wrong clock none would.
    assert!(settled * 20 > folder.points.len(), "{settled} of {}", folder.points.len());
}

#[test]
fn device_that_fails_mid_sweep_costs_its_cells_only() {
    let place = Place::new();
    let faults = ("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:5+:507899");
    let folder = sweep(&place, 1, "--repeats 3 --warmup 1", &[faults]);
    for point in &folder.points {
        if point.device == 0 {
            assert_eq!(point.status, "measured", "{point:?}");
        } else if point.status != "measured" {
            let reason = point.reason.as_ref().unwrap();
            assert!(reason.contains("aclrtMemcpyAsync failed on device 1"), "{reason}");
            assert!(reason.contains("507899 (ACL_ERROR_RT_DRV_INTERNAL_ERROR)"), "{reason}");
        }
    }
    assert!(folder.count("measured") > 0 && folder.count("failed") > 0, "{}", folder.run["points"]);
    let of = |device: u32| folder.first_class().filter(move |point| point.device == device).count();
    assert_eq!((of(0), of(1)), (3, 3));
    assert!(folder.csv("h2d-1MiB").at(0, 0).is_some());
}

#[test]
fn device_that_stands_still_costs_one_timeout_and_its_cells_only() {
    let place = Place::new();
    let variables = [
        ("ASCEND_SIM_DEVICES", "4"),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,3"),
        ("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:2:stall"),
    ];
    let start = Instant::now();
    let folder = sweep(&place, 1, "--repeats 3 --warmup 1 --timeout 1s", &variables);
    // Not once more for every point of either device, nor for what is dropped at the end.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let mut reasons = Vec::new();
    for point in &folder.points {
        if point.device == 1 {
            assert_eq!(point.status, "measured", "{point:?}");
        } else if point.status != "measured" {
            reasons.push(point.reason.clone().unwrap());
        }
    }
    assert!(reasons.len() >= 2, "{reasons:?}");
    for reason in &reasons {
        let words = "aclrtSynchronizeStreamWithTimeout failed on device 3: code 507046";
        assert!(reason.contains(words), "{reason}");
    }
    assert_eq!(folder.first_class().filter(|point| point.device == 1).count(), 3);
    assert!(folder.csv("h2d-1MiB").at(0, 1).is_some());
}

#[test]
fn all_goes_on_with_what_a_device_leaves() {
    let line = "all --backend ascend --quiet --out @out --sizes 64KiB --repeats 3 --warmup 1 \
                --iters 2 --timeout 1s";
    for (fault, words) in [
        ("aclrtMemcpyAsync@1:5+:507901", "code 507901 (ACL_ERROR_RT_SOCKET_CLOSE)"),
        ("aclrtMemcpyAsync@1:5:stall", "code 507046 (ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)"),
    ] {
        let place = Place::new();
        let ran = run(&place, line, &[("ASCEND_SIM_FAULTS", fault)]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let out = place.path("out");
        let run = json(&out.join("run.json"));
        assert_eq!(run["status"], "complete");
        let lines = std::fs::read_to_string(out.join("samples.jsonl")).unwrap();
        let points: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let of = |sweep: &str, device: u32| -> Vec<&Value> {
            let found = points.iter().filter(|point| point["sweep"] == sweep);
            found.filter(|point| sweep != "h2d" || point["device"] == device).collect()
        };
        let measured = |points: &[&Value]| points.iter().all(|p| p["status"] == "measured");
        assert!(measured(&of("h2d", 0)) && !of("h2d", 0).is_empty(), "{lines}");
        // What came after has the device to itself again: both ranks measured.
        assert!(measured(&of("core_pair", 0)) && !of("core_pair", 0).is_empty(), "{lines}");
        let lost = of("h2d", 1);
        let lost = lost.iter().filter_map(|point| point["reason"].as_str());
        let mut lost = lost.peekable();
        assert!(lost.peek().is_some(), "{lines}");
        assert!(lost.all(|reason| reason.contains("device 1: ") && reason.contains(words)));
    }
}

#[test]
fn runtime_that_cannot_be_used_is_exit_2_with_its_reason() {
    type Variables = [(&'static str, &'static str)];
    let cases: [(&Variables, &[&str]); 4] = [
        (&[("ASCEND_SIM_STUB", "1")], &["aclInit failed", "100039", "stub library", "set_env.sh"]),
        (&[("ASCEND_SIM_DEVICES", "0")], &["aclrtGetDeviceCount", "ASCEND_RT_VISIBLE_DEVICES"]),
        (
            &[("ASCEND_SIM_FAULTS", "aclrtGetDeviceCount:*:207006")],
            &["ACL_ERROR_RT_NO_PERMISSION", "HwHiAiUser"],
        ),
        (&[("CLUSTER_HEALTH_ASCEND_LIB_DIR", "none")], &["none/libascendcl.so", "set_env.sh"]),
    ];
    for (variables, words) in cases {
        let place = Place::new();
        let ran = run(&place, &format!("{SWEEP} --json"), variables);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        let document = ran.json();
        assert_eq!(document["schema_version"], 1);
        assert_eq!(document["error"]["kind"], "unavailable", "{document}");
        let message = document["error"]["message"].as_str().unwrap();
        for word in words {
            assert!(message.contains(word), "no '{word}' in {message}");
            assert!(ran.stderr.contains(word), "no '{word}' in {}", ran.stderr);
        }
        assert!(!place.path("out").exists());
    }
}

#[test]
fn devices_that_all_refuse_are_exit_2_by_name() {
    let place = Place::new();
    let faults = [("ASCEND_SIM_FAULTS", "aclrtSetDevice:*:507033")];
    let ran = run(&place, &format!("{SWEEP} --json"), &faults);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("507033 (ACL_ERROR_RT_DEV_SETUP_ERROR)"), "{message}");
}

#[test]
fn plan_that_a_device_has_no_memory_for_is_refused_with_the_figures() {
    let place = Place::new();
    let variables =
        [("ASCEND_SIM_PHY", "7,5"), ("ASCEND_SIM_HBM", "192M"), ("ASCEND_SIM_HBM_USED", "64M")];
    let line = "--backend ascend --cpus 0 --sizes 16MiB,256MiB";
    for command in ["h2d --quiet --json --out @out", "plan --json"] {
        let ran = run(&place, &format!("{command} {line}"), &variables);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        let words = ["--sizes: 256MiB needs 256 MiB", "device 7", "128 MiB of 192 MiB are free"];
        for word in words {
            assert!(ran.stderr.contains(word), "no '{word}' in {}", ran.stderr);
        }
        assert!(!place.path("out").exists());
    }
    // The default sizes give way, as on a small host.
    let line = "h2d --backend ascend --quiet --out @out --cpus 0 --iters 1 --repeats 1 --warmup 0";
    let ran = run(&place, line, &variables);
    assert_whole(&ran);
    let folder = Folder::read(&place.path("out"));
    assert_eq!(folder.run["plan"]["h2d"]["sizes"], serde_json::json!([16 * MIB, 64 * MIB]));
}

#[test]
fn device_that_does_not_tell_its_memory_is_measured() {
    let place = Place::new();
    let faults = [("ASCEND_SIM_FAULTS", "aclrtGetMemInfo:*:507899")];
    let folder = sweep(&place, 0, "--repeats 1", &faults);
    assert_eq!(folder.count("failed"), 0);
    assert!(folder.count("measured") > 0);
}

#[test]
fn copies_too_short_for_the_devices_clock_are_timed_in_batches() {
    // 100 µs per copy: 50 ticks of 20 ns are less, 50 of 1 ms are 500 copies.
    for (tick, timer) in [("20", "event"), ("1000000", "event_batch")] {
        let place = Place::new();
        let variables = [
            ("ASCEND_SIM_DEVICES", "1"),
            ("ASCEND_SIM_TICK_NS", tick),
            ("ASCEND_SIM_LINKS", "h2d,us=100"),
        ];
        let line = "h2d --backend ascend --quiet --out @out --cpus 0 --sizes 4KiB --repeats 2";
        let ran = run(&place, line, &variables);
        assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
        let folder = Folder::read(&place.path("out"));
        assert!(folder.count("measured") >= 2);
        for point in folder.points.iter().filter(|point| point.bytes == 4096) {
            assert_eq!(point.timer, timer, "{point:?}");
            let host = point.host_iter_ns.as_ref().unwrap();
            assert_eq!((point.iter_ns.len(), host.len()), (3, 3));
            // Of one copy, not of the batch; one tick in fifty may be lost.
            assert!(point.iter_ns.iter().all(|time| *time >= 97_000), "{point:?}");
            // A batch takes longer than any stall of a busy machine; a single copy does not.
            let alike = host.iter().zip(&point.iter_ns).all(|(host, device)| *host < 20 * *device);
            assert!(timer == "event" || alike, "{point:?}");
        }
    }
}

#[test]
fn base_table_has_the_rates_of_the_links() {
    let place = Place::new();
    let ran = run(
        &place,
        "validate --backend ascend --quiet --json --out @out --sizes 1MiB --matmul-sizes 8 \
         --device-matmul-sizes 64 --repeats 2",
        &[
            ("ASCEND_SIM_DEVICES", "2"),
            ("ASCEND_SIM_VIRTUAL", "1"),
            // A product of order 64 is 524,288 operations: 5,242.88 ns.
            (
                "ASCEND_SIM_LINKS",
                "h2d,gbps=10,us=0;d2h,gbps=8,us=0;d2d,gbps=400,us=0;peer,gbps=20,us=0;\
                 matmul,tflops=0.1,us=0",
            ),
        ],
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let table = ran.json();
    let lines = table["lines"].as_array().unwrap();
    for (operation, rate) in [
        ("h2d", 10.0),
        ("d2h", 8.0),
        ("d2d_same_device", 400.0),
        ("device_to_device", 20.0),
        ("device_matmul", 0.1),
    ] {
        let found: Vec<&Value> = lines.iter().filter(|l| l["operation"] == operation).collect();
        // Products of two types.
        assert_eq!(found.len(), if operation == "device_matmul" { 2 } else { 1 }, "{operation}");
        for line in found {
            assert_eq!(
                (&line["status"], &line["ranks"]),
                (&"measured".into(), &2.into()),
                "{line}"
            );
            // The clock of events has ticks of 20 ns.
            assert!(close(line["median"].as_f64().unwrap(), rate, 0.01), "{line}");
            assert_eq!(line["per_rank"][0]["timer"].as_str().unwrap()[..5], *"event", "{line}");
        }
    }
    for operation in ["all_gather", "send_receive", "cpu_matmul"] {
        let line = lines.iter().find(|l| l["operation"] == operation).unwrap();
        assert_eq!((&line["status"], &line["ranks"]), (&"measured".into(), &2.into()), "{line}");
    }
}

#[test]
fn without_operators_the_product_is_not_available_and_no_fault() {
    let place = Place::new();
    let folder = TempDir::new().unwrap();
    let some = simulator::LIBRARIES.into_iter().filter(|name| !name.contains("op"));
    simulator::install(folder.path(), &some.collect::<Vec<_>>());
    let path = folder.path().to_str().unwrap();
    let mut command = place.command(
        "validate --backend ascend --quiet --json --out @out --sizes 64KiB --matmul-sizes 8 \
         --repeats 1 --devices 0",
    );
    command.env("CLUSTER_HEALTH_ASCEND_LIB_DIR", path).env("ASCEND_SIM_DEVICES", "1");
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let table = ran.json();
    let lines = table["lines"].as_array().unwrap();
    let product = lines.iter().find(|l| l["operation"] == "device_matmul").unwrap();
    assert_eq!(product["status"], "not_available", "{product}");
    assert!(product["reason"].as_str().unwrap().contains("libopapi.so"), "{product}");
    // One device is one rank.
    let together = lines.iter().find(|l| l["operation"] == "all_gather").unwrap();
    assert_ne!(together["status"], "measured", "{together}");
}

#[test]
fn size_sweep_gives_the_costs_of_the_links_back() {
    let place = Place::new();
    let ran = run(
        &place,
        "sizes --backend ascend --quiet --json --out @out --sizes-from 64KiB --sizes-to 16MiB",
        &[
            ("ASCEND_SIM_DEVICES", "2"),
            ("ASCEND_SIM_VIRTUAL", "1"),
            ("ASCEND_SIM_LINKS", "h2d,gbps=10,us=30;d2d,gbps=400,us=5"),
        ],
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let series = sweep["series"].as_array().unwrap();
    for (operation, beta) in [("h2d", 10.0), ("d2d_same_device", 400.0)] {
        let found = series.iter().find(|s| s["operation"] == operation).unwrap();
        assert!(close(found["fit"]["beta_gbps"].as_f64().unwrap(), beta, 0.01), "{found}");
        assert_eq!(found["points"].as_array().unwrap().len(), 5);
    }
    let gather = series.iter().find(|s| s["operation"] == "all_gather").unwrap();
    assert_eq!(gather["points"].as_array().unwrap().len(), 5);
}
