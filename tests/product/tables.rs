//! `validate` and `sizes`.

use std::fs;

use serde_json::Value;

use crate::support::{MIB, Place, QUIET, Ran, close, json, names, openpyxl};

/// Copies at 50 GB/s after 10 µs, all-gathers at 40 GB/s after 20 µs; device 2 is slower by half.
fn scenario() -> String {
    format!(
        "{}gbps = 50\nlatency_us = 10\n[all_gather]\ngbps = 40\nlatency_us = 20\nnoise = 0\n\
         [[fault]]\nkind = \"slow_device\"\nsweep = \"h2d\"\ndevices = \"2\"\nfactor = 0.5\n",
        QUIET
    )
}

fn lines<'a>(table: &'a Value, operation: &'a str) -> impl Iterator<Item = &'a Value> {
    let lines = table["lines"].as_array().unwrap();
    lines.iter().filter(move |line| line["operation"] == operation)
}

fn line<'a>(table: &'a Value, operation: &'a str, bytes: u64, convention: &str) -> &'a Value {
    lines(table, operation)
        .find(|line| line["bytes"] == bytes && line["convention"] == convention)
        .unwrap_or_else(|| panic!("no {operation} of {bytes} in {table}"))
}

fn is(value: &Value, expected: f64) {
    let found = value.as_f64().unwrap();
    // Times are whole nanoseconds.
    assert!(close(found, expected, 1e-3), "{found}, not {expected}");
}

#[test]
fn table_of_a_simulated_machine_has_its_rates() {
    let place = Place::with_machine(&scenario());
    let ran = place.run(
        "validate --quiet --json --backend synthetic:@machine.toml --out @out --sizes 1MiB,16MiB",
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let table = ran.json();
    assert_eq!(table, json(&place.path("out/validate.json")));
    assert_eq!(table["schema_version"], 1);
    for bytes in [MIB, 16 * MIB] {
        let size = bytes as f64;
        // Bytes per nanosecond are GB/s.
        let healthy = size / (10_000.0 + size / 50.0);
        let slow = size / (10_000.0 + size / 25.0);
        for operation in ["h2d", "d2h"] {
            let line = line(&table, operation, bytes, "per_rank");
            is(&line["max"], healthy);
            is(&line["median"], healthy);
            is(&line["min"], slow);
            assert_eq!((line["ranks"].as_u64(), line["repetitions"].as_u64()), (Some(4), Some(3)));
            assert_eq!(line["spread"], 0.0);
            assert_eq!(line["unit"], "GB/s");
            let slowest = &line["per_rank"].as_array().unwrap()[2];
            is(&slowest["value"], slow);
        }
        let gather = size / (20_000.0 + size / 40.0);
        for (convention, factor) in [("per_rank", 1.0), ("alg", 2.0), ("bus", 1.0)] {
            let line = line(&table, "all_gather", bytes, convention);
            is(&line["median"], factor * gather);
            is(&line["collective"], factor * gather);
        }
    }
    for operation in ["cpu_matmul", "device_matmul", "d2d_same_device", "device_to_device"] {
        for line in lines(&table, operation) {
            assert_eq!(line["status"], "not_available", "{line}");
            assert!(!line["reason"].as_str().unwrap().is_empty());
        }
        assert!(lines(&table, operation).count() > 0);
    }
    let global = lines(&table, "all_gather").find(|line| line["scope"] == "global").unwrap();
    assert_eq!(
        (&global["status"], &global["reason"]),
        (&"not_measured".into(), &"one host".into())
    );

    let run = json(&place.path("out/run.json"));
    assert_eq!((&run["command"], &run["status"]), (&"validate".into(), &"complete".into()));
    assert_eq!(run["plan"]["validate"]["sizes"], serde_json::json!([MIB, 16 * MIB]));
    let csv = fs::read_to_string(place.path("out/validate.csv")).unwrap();
    let rows = csv.lines().count();
    assert_eq!(rows, 1 + table["lines"].as_array().unwrap().len());
    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    assert!(report.contains("| d2d_same_device | rank | idle | 1MiB |"), "{report}");

    if let Some(book) = openpyxl(
        &place.path("out/validate.xlsx"),
        "sheet = book['Validate']
head = [cell.value for cell in sheet[1]]
rows = [dict(zip(head, [cell.value for cell in row])) for row in sheet.iter_rows(min_row=2)]
print(json.dumps({'sheets': book.sheetnames, 'rows': rows, 'ranks': book['Ranks'].max_row}))",
    ) {
        assert_eq!(
            book["sheets"],
            serde_json::json!(["Validate", "Ranks", "Affinity", "Environment"])
        );
        let found = book["rows"].as_array().unwrap();
        let lines = table["lines"].as_array().unwrap();
        assert_eq!(found.len(), lines.len());
        let mut ranks = 0;
        for (row, line) in found.iter().zip(lines) {
            ranks += line["per_rank"].as_array().unwrap().len() as u64;
            for name in ["operation", "scope", "bytes", "min", "median", "max", "status", "reason"]
            {
                let same = match line[name].as_f64() {
                    Some(value) => close(row[name].as_f64().unwrap(), value, 1e-12),
                    None => row[name] == line[name],
                };
                assert!(same, "{name}: {row} {line}");
            }
        }
        assert_eq!(book["ranks"], 1 + ranks);
    }

    // The same folder again.
    fs::remove_file(place.path("out/validate.xlsx")).unwrap();
    for file in ["validate.csv", "report.md"] {
        fs::remove_file(place.path("out").join(file)).unwrap();
    }
    assert_eq!(place.run("report @out").code, Some(0));
    assert!(place.path("out/validate.xlsx").exists());
    assert_eq!(csv, fs::read_to_string(place.path("out/validate.csv")).unwrap());
    assert_eq!(report, fs::read_to_string(place.path("out/report.md")).unwrap());
    let again = "validate --quiet --backend synthetic:@machine.toml --out @out --sizes 1MiB,16MiB";
    assert_eq!(place.run(again).code, Some(2), "the folder is not empty");
    assert_eq!(place.run(&format!("{again} --resume")).code, Some(0), "nothing is left to do");
    let diagnosed = place.run("diagnose @out");
    assert_eq!(diagnosed.code, Some(2));
    assert!(diagnosed.stderr.contains("report.md"), "{diagnosed:?}");
}

#[test]
fn table_of_this_machine_has_every_operation() {
    let place = Place::new();
    let ran = place.run(
        "validate --quiet --json --backend host --out @out --sizes 64KiB,4MiB \
         --matmul-sizes 8,64 --repeats 2",
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let table = ran.json();
    // A single device is that of two ranks.
    let ranks = table["ranks"].as_array().unwrap().len();
    assert!(ranks >= 2);
    for operation in ["cpu_matmul", "device_matmul", "h2d", "d2h", "d2d_same_device", "all_gather"]
    {
        assert!(lines(&table, operation).count() > 0, "{operation}");
        for line in lines(&table, operation).filter(|line| line["scope"] != "global") {
            assert_eq!(line["status"], "measured", "{line}");
            assert_eq!((&line["ranks"], &line["repetitions"]), (&ranks.into(), &2.into()));
            let value = |name: &str| line[name].as_f64().unwrap();
            assert!(0.0 < value("min"), "{line}");
            assert!(value("min") <= value("median") && value("median") <= value("max"), "{line}");
            for rank in line["per_rank"].as_array().unwrap() {
                assert_eq!(rank["repetitions"], 2);
            }
        }
    }
    for bytes in [1 << 16, 4 * MIB] {
        let of = |convention| line(&table, "all_gather", bytes, convention)["median"].clone();
        let per_rank = of("per_rank").as_f64().unwrap();
        is(&of("alg"), ranks as f64 * per_rank);
        is(&of("bus"), (ranks - 1) as f64 * per_rank);
        let sent = line(&table, "send_receive", bytes, "per_rank");
        assert_eq!((&sent["status"], &sent["scope"]), (&"measured".into(), &"local_pair".into()));
    }
}

#[test]
fn sizes_of_a_simulated_machine_give_its_costs_back() {
    let place = Place::with_machine(&scenario());
    let ran = place.run(
        "sizes --quiet --json --backend synthetic:@machine.toml --out @out --devices 1,2 \
         --sizes-from 8B --sizes-to 64MiB --factor 4",
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let series = sweep["series"].as_array().unwrap();
    let expected = [
        ("h2d", vec![1], 10.0, 50.0),
        ("d2h", vec![1], 10.0, 50.0),
        ("h2d", vec![2], 10.0, 25.0),
        ("d2h", vec![2], 10.0, 25.0),
        ("all_gather", vec![0, 1], 20.0, 40.0),
    ];
    for (operation, devices, alpha, beta) in expected {
        let found = series
            .iter()
            .find(|s| s["operation"] == operation && s["devices"] == serde_json::json!(devices))
            .unwrap();
        is(&found["fit"]["alpha_us"], alpha);
        is(&found["fit"]["beta_gbps"], beta);
        // 8 B × 4^n up to 33,554,432 B, and 64 MiB.
        let points = found["points"].as_array().unwrap();
        assert_eq!(points.len(), 13);
        for point in points {
            let bytes = point["bytes"].as_f64().unwrap();
            is(&point["ns"], alpha * 1e3 + bytes / beta);
            is(&point["gbps"], bytes / (alpha * 1e3 + bytes / beta));
            assert_eq!(point["visits"], 3);
            assert_eq!((&point["again"], &point["non_monotone"]), (&false.into(), &false.into()));
            assert!(point["residual"].as_f64().unwrap().abs() < 1e-3, "{point}");
        }
        // Blocks come in orders of their own.
        let visits = found["visits"].as_array().unwrap();
        assert_eq!(visits.len(), 39);
        let order = |block: u64| -> Vec<&Value> {
            visits.iter().filter(|v| v["block"] == block).map(|v| &v["bytes"]).collect()
        };
        assert_ne!(order(0), order(1));
    }
    for found in series.iter().filter(|s| s["operation"] == "d2d_same_device") {
        assert_eq!(found["unavailable"], true);
    }
    let files = names(&place.path("out"));
    for file in ["run.json", "sizes.json", "sizes.csv", "sizes.png", "report.md"] {
        assert!(files.contains(file), "{files:?}");
    }
    let csv = fs::read_to_string(place.path("out/sizes.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 5 * 13);

    let picture = fs::read(place.path("out/sizes.png")).unwrap();
    fs::remove_file(place.path("out/sizes.png")).unwrap();
    assert_eq!(place.run("report @out").code, Some(0));
    assert_eq!(picture, fs::read(place.path("out/sizes.png")).unwrap());

    // Two runs in one picture.
    let other = "sizes --quiet --backend synthetic:@machine.toml --out @two --sizes 1MiB,4MiB";
    assert_eq!(place.run(other).code, Some(0));
    let both = place.run("sizes --compare @out @two --out @both");
    assert_eq!(both.code, Some(0), "{both:?}");
    let table = fs::read_to_string(place.path("both/sizes-compare.csv")).unwrap();
    assert_eq!(table.lines().count(), 1 + 5 * 13 + 3 * 2);
    assert!(fs::read(place.path("both/sizes-compare.png")).unwrap().starts_with(b"\x89PNG"));
}

#[test]
fn point_out_of_line_is_measured_again() {
    // Every eleventh transfer or so of this machine is an outlier, whole visits of them.
    let place = Place::with_machine(&format!(
        "{QUIET}gbps = 50\nlatency_us = 10\ndip_probability = 0.5\ndip_factor = 0.05\n"
    ));
    let ran = place.run(
        "sizes --quiet --json --backend synthetic:@machine.toml --out @out --repeats 1 \
         --sizes-from 1MiB --sizes-to 256MiB --factor 2",
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let h2d = sweep["series"].as_array().unwrap().iter().find(|s| s["operation"] == "h2d").unwrap();
    let again: Vec<u64> = h2d["visits"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|visit| visit["again"] == true)
        .map(|visit| visit["bytes"].as_u64().unwrap())
        .collect();
    // A dip makes a visit up to twenty times as long: at 2 × the bytes a healthy one is shorter.
    assert!(!again.is_empty(), "{h2d}");
    for point in h2d["points"].as_array().unwrap() {
        let visits = 1 + again.iter().filter(|bytes| point["bytes"] == **bytes).count();
        assert_eq!(point["visits"], visits, "{point}");
        assert_eq!(point["again"], visits > 1, "{point}");
    }
}

#[test]
fn sizes_of_this_machine_have_every_series() {
    let place = Place::new();
    let line = "sizes --quiet --json --backend host --out @out --sizes 8B,64KiB,1MiB --repeats 2";
    let ran = place.run(line);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let series = sweep["series"].as_array().unwrap();
    let operations: Vec<&str> = series.iter().map(|s| s["operation"].as_str().unwrap()).collect();
    assert_eq!(operations, ["h2d", "d2h", "d2d_same_device", "all_gather"]);
    for found in series {
        assert_eq!(found["points"].as_array().unwrap().len(), 3, "{found}");
        let cpus = if found["operation"] == "all_gather" { 2 } else { 1 };
        assert_eq!(found["cpus"].as_array().unwrap().len(), cpus);
        for visit in found["visits"].as_array().unwrap() {
            assert_eq!(visit["times"]["iter_ns"].as_array().unwrap().len(), 3);
        }
    }
}

#[test]
fn wrong_options_are_named() {
    let place = Place::with_machine(&scenario());
    let cases = [
        ("validate", "--matmul-sizes 0", "--matmul-sizes: element 1"),
        ("validate", "--matmul-sizes 8,x", "--matmul-sizes: element 2"),
        ("validate", "--device-matmul-sizes 8,8", "--device-matmul-sizes: element 2"),
        ("validate", "--devices 9", "--devices: device 9 does not exist"),
        ("validate", "--cpus 0", "--cpus: 1 CPUs for 4 ranks"),
        ("validate", "--cpus 0,1,2,99", "--cpus: CPU 99"),
        ("validate", "--load cpu:1", "--load: 'cpu:1'"),
        ("validate", "--expect-hbm fast", "--expect-hbm"),
        ("validate", "--iters 0", "--iters: 0"),
        ("validate", "--repeats 0", "--repeats: 0"),
        ("validate", "--sizes 0B", "--sizes: element 1"),
        ("validate", "--resume --force", "--resume"),
        ("sizes", "--sizes-from 0", "--sizes-from: 0"),
        ("sizes", "--sizes-from 1MiB --sizes-to 1KiB", "--sizes-to: 1KiB is below"),
        ("sizes", "--factor 1", "--factor: 1"),
        ("sizes", "--sizes 8B --factor 2", "--sizes: is a list of its own"),
        ("sizes", "--sizes 8B,8B", "--sizes: element 2: 8B is there twice"),
        ("sizes", "--device-pair 0,9", "--device-pair: device 9"),
        ("sizes", "--pair-cpus 0", "--pair-cpus: 1 CPUs for 2"),
        ("sizes", "--devices 1,1", "--devices: element 2 repeats 1"),
        ("sizes", "--compare @nowhere", "no such file"),
    ];
    for (command, options, words) in cases {
        let ran = place.run(&format!(
            "{command} --quiet --backend synthetic:@machine.toml --out @out {options}"
        ));
        assert_eq!(ran.code, Some(2), "{options}: {ran:?}");
        assert!(ran.stderr.contains(words), "{options}: {}", ran.stderr);
        assert!(!place.path("out/run.json").exists(), "{options}");
    }
    assert_eq!(Ran::of(&mut place.command("sizes --quiet")).code, Some(2), "--out is missing");
}
