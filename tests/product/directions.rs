//! Sweeps of copies to the host, of both directions at once, of all devices at once, and of messages
//! of a few bytes.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::ascend_cli::run as run_ascend;
use crate::support::{Folder, MIB, Place, QUIET, assert_whole, close, contents, json};

const SLOW: &str = "[[fault]]\nkind = \"slow_device\"\ndevices = \"2\"\nfactor = 0.8\n";

/// 16 MiB at 58.5 GB/s after 12 µs, the scenario's defaults.
const COPY_NS: u64 = 298_790;

#[test]
fn a_slow_device_is_found_in_every_direction_and_named_with_it() {
    for (direction, stem, rate) in [
        ("d2h", "h2d-16MiB-d2h", "d2h"),
        ("bidirectional", "h2d-16MiB-bidirectional", "per_direction"),
    ] {
        let place = Place::with_machine(&format!("{QUIET}{SLOW}"));
        let folder = place.sweep(1, &format!("--sizes 16MiB --direction {direction}"));
        assert!(folder.points.iter().all(|point| point.sweep == direction && point.check == "ok"));
        assert!(folder.points.iter().all(|point| point.timer == "host"));
        let csv = folder.csv(stem);
        assert_eq!((csv.measured(), csv.columns.len()), (64, 4));
        assert!(close(csv.at(3, 2).unwrap() / csv.at(3, 1).unwrap(), 0.81, 0.02), "{csv:?}");
        let row = &folder.run["summary"][0];
        assert_eq!((&row["sweep"], &row["rate"]), (&direction.into(), &rate.into()));
        let document = place.run("diagnose --json @out").json();
        let findings = document["findings"].as_array().unwrap();
        assert_eq!(findings.len(), 1, "{document:#}");
        assert_eq!(findings[0]["kind"], "slow_device");
        assert_eq!(findings[0]["sweep"], direction);
        assert_eq!(findings[0]["devices"], Value::from(vec![2]));
        // A cost model wants copies to the device.
        let costs = json(&place.path("out/calibration.json"));
        for field in ["h2d_gbps_by_core_device", "h2d_alpha_beta"] {
            assert_eq!(costs[field], Value::Array(Vec::new()), "{field}");
        }
    }
}

#[test]
fn both_directions_at_once_last_until_both_are_done() {
    // Without noise both copies take equally long: together as long as one, not twice that.
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 16MiB --direction bidirectional");
    for point in folder.first_class() {
        assert!(point.iter_ns.iter().all(|time| time.abs_diff(COPY_NS) <= 1), "{point:?}");
        // Both arenas of the node are copied from and to.
        assert_eq!(point.page_nodes.as_ref().unwrap().values().sum::<u32>(), 1024);
    }
    // With noise the later one decides: the mean of the larger of two normal draws is 0.56 standard
    // deviations above that of one.
    let noisy = QUIET.replace("noise = 0\n", "noise = 0.1\n");
    let mean = |direction: &str| {
        let place = Place::with_machine(&noisy);
        let line = format!(
            "h2d --quiet --backend synthetic:@machine.toml --out @out --sizes 16MiB \
                            --direction {direction}"
        );
        assert_whole(&place.run(&line));
        let times: Vec<u64> = Folder::read(&place.path("out"))
            .first_class()
            .flat_map(|p| p.iter_ns.clone())
            .collect();
        times.iter().sum::<u64>() as f64 / times.len() as f64
    };
    let ratio = mean("bidirectional") / mean("d2h");
    assert!((1.03..1.09).contains(&ratio), "{ratio}");
}

#[test]
fn spoilt_data_is_found_at_the_end_that_it_arrives_at() {
    let corrupt = "[[fault]]\nkind = \"data_corruption\"\ndevices = \"1\"\n";
    for (direction, end) in [("h2d", "device's"), ("d2h", "host's"), ("bidirectional", "device's")]
    {
        let place = Place::with_machine(&format!("{QUIET}{corrupt}"));
        let folder = place.sweep(1, &format!("--sizes 1MiB --repeats 2 --direction {direction}"));
        for point in &folder.points {
            assert_eq!(point.status == "failed", point.device == 1, "{point:?}");
            if point.device == 1 {
                assert_eq!(point.check, "mismatch");
                assert!(point.reason.as_ref().unwrap().contains(end), "{point:?}");
            }
        }
    }
}

#[test]
fn every_direction_copies_on_the_host_backend_whatever_its_arenas() {
    for direction in ["d2h", "bidirectional"] {
        for arena in ["node", "core"] {
            let place = Place::new();
            let line = format!(
                "h2d --backend host --quiet --cpus 0 --sizes 64B,1MiB --repeats 2 --check full \
                 --out @out --direction {direction} --arena {arena}"
            );
            assert_whole(&place.run(&line));
            let folder = Folder::read(&place.path("out"));
            assert!(folder.points.len() >= 4);
            for point in &folder.points {
                assert_eq!((point.status.as_str(), point.check.as_str()), ("measured", "ok"));
                assert_eq!(point.sweep, direction);
                assert!(point.iter_ns.iter().all(|time| *time > 0));
            }
            let notes = folder.run["notes"].to_string();
            let is_told = notes.contains("one after the other");
            assert_eq!(is_told, direction == "bidirectional", "{notes}");
        }
    }
}

/// Cuts a complete run down to its first points, as an interruption leaves it.
fn cut(dir: &Path, points: usize) {
    let log = fs::read_to_string(dir.join("samples.jsonl")).unwrap();
    let kept: String = log.split_inclusive('\n').take(points).collect();
    fs::write(dir.join("samples.jsonl"), kept).unwrap();
    let mut run = json(&dir.join("run.json"));
    run["status"] = "interrupted".into();
    fs::write(dir.join("run.json"), run.to_string()).unwrap();
}

#[test]
fn a_sweep_goes_on_in_its_direction_only() {
    for direction in ["d2h", "bidirectional"] {
        let place = Place::with_machine(&QUIET.replace("noise = 0\n", "noise = 0.02\n"));
        let line = "h2d --quiet --backend synthetic:@machine.toml --out @out --warmup 1 \
                    --sizes 1MiB,4MiB --resume";
        let own = format!("{line} --direction {direction}");
        assert_whole(&place.run(&own));
        let csv = "h2d-4MiB-".to_owned() + direction + ".csv";
        let whole = contents(&place.path("out"))[&csv].clone();
        cut(&place.path("out"), 97);
        let refused = place.run(line);
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains("direction"), "{refused:?}");
        assert_whole(&place.run(&own));
        assert!(contents(&place.path("out"))[&csv] == whole, "other rates after going on");
    }
}

#[test]
fn values_that_are_none_name_their_option() {
    let place = Place::with_machine(QUIET);
    let base = "--quiet --backend synthetic:@machine.toml --sizes 1MiB";
    for (options, wanted) in [
        (format!("h2d {base} --out @out --direction sideways"), "--direction"),
        (format!("h2d {base} --out @out --concurrent"), "--concurrent"),
        (format!("plan {base} --concurrent"), "--concurrent"),
        (
            "h2d --backend host --cpus 0 --devices 0 --out @out --concurrent".to_owned(),
            "--concurrent",
        ),
        (format!("all {base} --out @out --direction d2h"), "--direction"),
    ] {
        let ran = place.run(&options);
        assert_eq!(ran.code, Some(2), "{options}: {ran:?}");
        assert!(ran.stderr.contains(wanted), "{options}: {ran:?}");
        assert!(!place.path("out").exists());
    }
    let json = place.run(&format!("plan {base} --direction bidirectional --json")).json();
    assert_eq!(json["plan"]["direction"], "bidirectional");
    let one_way = place.run(&format!("plan {base} --json")).json();
    assert!(one_way["plan"].get("direction").is_none(), "{one_way:#}");
    assert_eq!(json["cost"]["bytes"].as_u64(), one_way["cost"]["bytes"].as_u64().map(|b| 2 * b));
    assert_eq!(json["cost"]["seconds"], one_way["cost"]["seconds"]);
}

#[test]
fn messages_of_a_few_bytes_have_a_latency_in_the_report() {
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 8B,64B,4KiB,64KiB,1MiB");
    // None of them needs probes: the smallest sizes of the plan are as small.
    assert!(folder.points.iter().all(|point| point.phase != "probe"));
    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    let of = |stem: &str| {
        let from = report.find(&format!("## {stem}\n")).unwrap();
        let section = &report[from..];
        section.lines().find(|line| line.starts_with("| all |")).unwrap().to_owned()
    };
    // 12 µs and 8 B ÷ 58.5 GB/s; 64 KiB take 1.12 µs more.
    assert!(of("h2d-8B").ends_with("| 12.00 |"), "{}", of("h2d-8B"));
    assert!(of("h2d-8B").contains("| 0.000667 |"), "{}", of("h2d-8B"));
    assert!(of("h2d-64KiB").ends_with("| 13.12 |"), "{}", of("h2d-64KiB"));
    assert!(!of("h2d-1MiB").contains("13.12") && of("h2d-1MiB").ends_with("% |"));

    let pairs = "core-pair --quiet --backend synthetic:@machine.toml --out @pairs --sizes 8B,64KiB \
                 --rank0-cpus 0-3 --rank1-cpus 8-11";
    assert_whole(&place.run(pairs));
    let report = fs::read_to_string(place.path("pairs/report.md")).unwrap();
    assert!(report.contains("## core-pair-8B\n") && report.contains("median time, µs"), "{report}");
}

const SWEEP: &str = "h2d --backend ascend --quiet --out @out --cpus 0 --sizes 1MiB --iters 3";

#[test]
fn device_events_time_the_copies_to_the_host() {
    let place = Place::new();
    let links = ("ASCEND_SIM_LINKS", "h2d,gbps=10,us=0;d2h,gbps=5,us=0");
    let line = format!("{SWEEP} --direction d2h");
    assert_whole(&run_ascend(&place, &line, &[("ASCEND_SIM_VIRTUAL", "1"), links]));
    let folder = Folder::read(&place.path("out"));
    let csv = folder.csv("h2d-1MiB-d2h");
    assert!(close(csv.at(0, 0).unwrap(), 5.0, 0.002), "{csv:?}");
    for point in &folder.points {
        assert_eq!((point.timer.as_str(), point.check.as_str()), ("event", "ok"));
        assert_eq!(point.bytes, if point.phase == "probe" { MIB / 16 } else { MIB });
    }
}

#[test]
fn copies_that_arrive_spoilt_at_the_host_are_seen() {
    let place = Place::new();
    // The first copies of each device are discarded ones; a later one loses a bit.
    let faults = ("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:4+:corrupt");
    let line = format!("{SWEEP} --direction d2h --repeats 2 --check full --warmup 1");
    let ran = run_ascend(&place, &line, &[faults]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let folder = Folder::read(&place.path("out"));
    let spoilt = folder.points.iter().filter(|point| point.check == "mismatch").count();
    assert!(spoilt > 0, "{}", folder.run["points"]);
    for point in &folder.points {
        assert_eq!(point.status == "failed", point.check == "mismatch", "{point:?}");
        assert!(point.device == 1 || point.status == "measured", "{point:?}");
    }
}

#[test]
fn both_directions_on_two_streams_of_a_device() {
    let place = Place::new();
    // Either copy takes 50 ms on its own stream; one after the other they would take 100.
    let links = ("ASCEND_SIM_LINKS", "h2d,us=50000;d2h,us=50000");
    let line = format!("{SWEEP} --devices 0 --direction bidirectional --repeats 1 --warmup 1");
    assert_whole(&run_ascend(&place, &line, &[links]));
    let folder = Folder::read(&place.path("out"));
    let fastest = folder.points.iter().flat_map(|point| &point.iter_ns).min().unwrap();
    assert!((50_000_000..90_000_000).contains(fastest), "{fastest}");
    assert!(folder.points.iter().all(|point| point.timer == "host" && point.check == "ok"));
}

#[test]
fn all_devices_copy_at_once() {
    let bindable = run_ascend(&Place::new(), "affinity --json", &[]).json();
    let cpus = bindable["cpus"].as_array().unwrap().iter().filter(|cpu| cpu["bindable"] == true);
    if cpus.count() < 2 {
        println!("skipped: needs two CPUs");
        return;
    }
    let line = "h2d --backend ascend --quiet --out @out --cpus auto --sizes 1MiB --concurrent \
                --repeats 2 --warmup 1 --timeout 5s";
    let place = Place::new();
    assert_whole(&run_ascend(&place, line, &[]));
    let folder = Folder::read(&place.path("out"));
    assert!(folder.points.iter().all(|point| point.status == "measured" && point.check == "ok"));
    let notes = folder.run["notes"].to_string();
    assert!(notes.contains("device 0 from CPU") && notes.contains("device 1 from CPU"), "{notes}");
    let costs = json(&place.path("out/calibration.json"));
    assert_eq!(costs["h2d_gbps_by_core_device"], Value::Array(Vec::new()));

    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    assert!(report.contains("one copy while all other devices copied, too"), "{report}");

    // A device that cannot copy spoils the points of the other one: they were not made beside it.
    let place = Place::new();
    let faults = ("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:1+:507899");
    let ran = run_ascend(&place, line, &[faults]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let folder = Folder::read(&place.path("out"));
    let of_other: Vec<_> = folder.points.iter().filter(|point| point.device == 0).collect();
    assert!(!of_other.is_empty());
    for point in of_other {
        assert_eq!(point.status, "skipped");
        let reason = point.reason.as_ref().unwrap();
        assert!(reason.contains("device 1, which should copy at the same time"), "{reason}");
    }
}
