//! What a run on this machine's own memory leaves behind.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::support::{
    Csv, Folder, MIB, Place, assert_summary, assert_whole, close, json, names, points, rates,
    summary,
};

/// Two small sizes: their arenas fit any usual limit on page-locked memory.
const SIZES: [u64; 2] = [128 << 10, MIB];

const SWEEP: &str = "--quiet --backend host --sizes 128KiB,1MiB --repeats 2 --out @out";

fn host(place: &Place) -> Folder {
    let ran = place.run(&format!("h2d {SWEEP}"));
    assert_whole(&ran);
    Folder::read(&place.path("out"))
}

/// CPUs that this process may use, as the kernel lists them.
fn allowed_cpus() -> BTreeSet<u32> {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let mut cpus = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u32>().unwrap()..=last.parse().unwrap());
    }
    cpus
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn all_and_h2d_make_exactly_the_files_of_the_contract() {
    for (command, stems) in [
        ("h2d", &["h2d-128KiB", "h2d-1MiB"][..]),
        ("all", &["h2d-128KiB", "h2d-1MiB", "core-pair-8MiB"]),
    ] {
        let place = Place::new();
        let ran = place.run(&format!("{command} {SWEEP}"));
        assert_whole(&ran);
        let mut wanted: BTreeSet<String> =
            ["samples.jsonl", "run.json", "affinity.json", "matrices.xlsx", "report.md"]
                .map(str::to_owned)
                .into();
        wanted.extend(["calibration.json", "placement.json"].map(str::to_owned));
        for stem in stems {
            wanted.extend(["csv", "npy", "png"].map(|end| format!("{stem}.{end}")));
        }
        assert_eq!(names(&place.path("out")), wanted);
        let run = json(&place.path("out/run.json"));
        assert_eq!((&run["command"], &run["status"]), (&command.into(), &"complete".into()));
        let summary = run["summary"].as_array().unwrap();
        assert_eq!(summary.len(), stems.len());
    }
}

#[test]
fn samples_have_the_fields_of_the_contract() {
    let place = Place::new();
    let folder = host(&place);
    let wanted: BTreeSet<&str> = [
        "seq",
        "t_ns",
        "sweep",
        "load",
        "block",
        "cpu",
        "device",
        "bytes",
        "status",
        "reason",
        "iter_ns",
        "host_iter_ns",
        "timer",
        "warmup_ns",
        "touch_ns",
        "bind_ns",
        "pinned",
        "page_nodes",
        "ran_on",
        "sentinel",
        "phase",
        "arena",
        "settled",
        "check",
    ]
    .into();
    let text = fs::read_to_string(folder.dir.join("samples.jsonl")).unwrap();
    for line in text.lines() {
        assert_eq!(keys(&serde_json::from_str(line).unwrap()), wanted);
    }

    let cpus = allowed_cpus();
    let mut before: Option<&crate::support::Point> = None;
    for (place, point) in folder.points.iter().enumerate() {
        assert_eq!(point.seq, place as u64);
        assert_eq!((point.sweep.as_str(), point.load.as_str()), ("h2d", "idle"));
        assert_eq!((point.status.as_str(), &point.reason), ("measured", &None));
        assert_eq!(point.iter_ns.len(), 3);
        assert!(point.iter_ns.iter().chain(&point.warmup_ns).all(|ns| *ns > 0));
        assert!((1..=32).contains(&point.warmup_ns.len()));
        assert_eq!((point.timer.as_str(), &point.host_iter_ns), ("host", &None));
        assert!(cpus.contains(&point.cpu));
        assert_eq!(point.ran_on, [point.cpu]);
        assert_eq!(point.pinned.as_deref(), Some("registered"));
        if let Some(nodes) = &point.page_nodes {
            // The arena holds the largest size.
            assert_eq!(nodes.values().sum::<u32>(), 256, "{nodes:?}");
        }
        assert_eq!(point.touch_ns, 0, "the arenas are touched before the first bind");
        assert!(point.arena.is_some_and(|arena| arena < 2));
        assert_eq!(point.check, "ok");
        assert!(["blocks", "probe", "confirm"].contains(&point.phase.as_str()));
        match before {
            None => assert_eq!(point.t_ns, 0, "time starts at the first bind"),
            Some(before) => {
                let spent =
                    before.bind_ns + before.warmup_ns.iter().chain(&before.iter_ns).sum::<u64>();
                assert!(point.t_ns >= before.t_ns + spent, "points {place} overlap");
            }
        }
        let moved = before.is_none_or(|before| before.cpu != point.cpu);
        assert_eq!(point.bind_ns > 0, moved, "seq {}", point.seq);
        before = Some(point);
    }
    let cells: BTreeSet<_> =
        folder.first_class().map(|p| (p.block, p.bytes, p.cpu, p.device)).collect();
    let devices = folder.run["devices"].as_array().unwrap().len();
    assert_eq!(cells.len(), 2 * SIZES.len() * cpus.len() * devices);
    assert_eq!(folder.first_class().count(), cells.len());
}

#[test]
fn run_json_has_the_fields_of_the_contract() {
    let place = Place::new();
    let folder = host(&place);
    let run = &folder.run;
    let wanted = [
        "schema_version",
        "tool",
        "command",
        "plan",
        "seed",
        "order",
        "environment",
        "devices",
        "timings",
        "wall_ns",
        "host_ns",
        "segments",
        "status",
        "summary",
        "points",
        "verdict",
    ];
    for key in wanted {
        assert!(run.get(key).is_some(), "{key}");
    }
    assert_eq!(run["schema_version"], 1);
    assert_eq!(run["tool"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&run["seed"], &run["order"]), (&1.into(), &"blocks".into()));
    assert_eq!(run["status"], "complete");
    // A machine that others use may well give findings.
    let verdict = run["verdict"].as_str().unwrap();
    assert!(["healthy", "findings", "inconclusive"].contains(&verdict), "{verdict}");
    assert_eq!(run["environment"]["backend"], "host");
    for key in ["skipped", "failed", "implausible"] {
        assert_eq!(folder.count(key), 0);
    }
    assert_eq!(folder.count("measured"), folder.points.len() as u64);

    let plan = &run["plan"]["h2d"];
    let cpus: Vec<u32> = allowed_cpus().into_iter().collect();
    assert_eq!(plan["cpus"], serde_json::to_value(&cpus).unwrap());
    assert_eq!(plan["sizes"], serde_json::to_value(SIZES).unwrap());
    for device in run["devices"].as_array().unwrap() {
        assert_eq!(device["id"], device["runtime_id"], "host devices are NUMA nodes");
    }

    let segments = run["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 1);
    assert_eq!(segments[0]["first_seq"], 0);
    assert!(segments[0]["start"].as_str() <= segments[0]["end"].as_str());

    let copies: u64 = folder.points.iter().flat_map(|p| p.iter_ns.iter().chain(&p.warmup_ns)).sum();
    let timings = &run["timings"];
    let time = |name: &str| timings[name].as_u64().unwrap();
    assert_eq!(time("iterations_ns") + time("warmup_ns"), copies);
    assert_eq!(time("bind_ns"), folder.points.iter().map(|p| p.bind_ns).sum::<u64>());
    let wall = run["wall_ns"].as_u64().unwrap();
    assert_eq!(wall, time("wall_ns"));
    assert!(wall >= copies + time("bind_ns") + time("check_ns"));
    assert!(wall >= folder.points.last().unwrap().t_ns);
    assert!(run["host_ns"].as_u64().unwrap() >= wall, "the host's clock is the machine's here");
}

#[test]
fn the_summary_is_what_the_samples_say() {
    let place = Place::new();
    let folder = host(&place);
    let wanted = summary(&rates(folder.first_class()));
    assert_eq!(wanted.keys().copied().collect::<Vec<_>>(), SIZES);
    assert_summary(&folder.run, &wanted, 1e-12);
    for row in folder.run["summary"].as_array().unwrap() {
        let words = ["sweep", "load", "rate", "memory"].map(|key| row[key].as_str().unwrap());
        assert_eq!(words, ["h2d", "idle", "h2d", "page_locked"]);
    }
}

#[test]
fn probes_and_sentinels_are_in_no_matrix_and_no_summary() {
    // Enough points for sentinels, and noise, so that their own values would show.
    let place = Place::with_machine("[machine]\ncpus = 32\ndevices = 4\nnuma_nodes = 4\n");
    let folder = place.sweep(0, "--sizes 1MiB,4MiB --repeats 3");
    let extra = |p: &&crate::support::Point| p.sentinel;
    assert!(folder.points.iter().filter(extra).count() >= 10);
    assert!(folder.points.iter().filter(|p| p.phase == "probe").count() >= 3 * 32);

    let wanted = summary(&rates(folder.first_class()));
    assert_summary(&folder.run, &wanted, 1e-12);
    let with_sentinels = rates(folder.points.iter().filter(|p| p.phase == "blocks"));
    let cells = rates(folder.first_class());
    assert_ne!(with_sentinels, cells, "the sentinels would change the matrix");
    assert_eq!(cells.len(), 2 * 32 * 4);
    for ((bytes, cpu, device), rate) in cells {
        let stem = if bytes == MIB { "h2d-1MiB" } else { "h2d-4MiB" };
        if cpu % 8 == 0 {
            assert!(close(folder.csv(stem).at(cpu, device).unwrap(), rate, 1e-12));
        }
    }
    assert!(!names(&folder.dir).iter().any(|name| name.contains("64KiB")), "the probes' size");
}

/// Shape and values of a version 1.0 npy file of little-endian doubles in row-major order.
fn read_npy(bytes: &[u8]) -> (Vec<usize>, Vec<f64>) {
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..10 + length]).unwrap();
    assert!(header.contains("'descr': '<f8'") && header.contains("'fortran_order': False"));
    let shape = header.split_once("'shape': (").unwrap().1.split_once(')').unwrap().0;
    let shape = shape.split(',').map(|n| n.trim().parse().unwrap()).collect();
    let values = bytes[10 + length..].as_chunks::<8>().0;
    (shape, values.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
}

#[test]
fn csv_and_npy_hold_the_same_numbers_and_the_same_holes() {
    let place =
        Place::with_machine("[machine]\ncpus = 16\ndevices = 4\nnuma_nodes = 2\noffline = \"6\"\n");
    let folder = place.sweep(1, "--cpus 4-8 --sizes 1MiB");
    let csv = folder.csv("h2d-1MiB");
    assert_eq!(csv.corner, "cpu");
    assert_eq!(
        (csv.rows.as_slice(), csv.columns.as_slice()),
        (&[4, 5, 6, 7, 8][..], &[0, 1, 2, 3][..])
    );
    let cells = rates(folder.first_class());
    for cpu in 4..=8 {
        for device in 0..4 {
            match (csv.at(cpu, device), cells.get(&(MIB, cpu, device))) {
                (None, None) => assert_eq!(cpu, 6),
                (Some(found), Some(wanted)) => assert!(close(found, *wanted, 1e-12)),
                other => panic!("CPU {cpu}, device {device}: {other:?}"),
            }
        }
    }
    let path = folder.dir.join("h2d-1MiB.npy");
    let (shape, values) = read_npy(&fs::read(&path).unwrap());
    assert_eq!(shape, [5, 4]);
    let flat: Vec<Option<f64>> = csv.cells.iter().flatten().copied().collect();
    assert_eq!(values.iter().map(|x| (!x.is_nan()).then_some(*x)).collect::<Vec<_>>(), flat);

    let script = "import sys, numpy\na = numpy.load(sys.argv[1])\n\
                  print(a.shape, a.dtype, int(numpy.isnan(a).sum()), repr(float(a[0, 0])))";
    let python = Command::new("python3").args(["-c", script]).arg(&path).output();
    match python {
        Ok(output) if output.status.success() => {
            let wanted = format!("(5, 4) float64 4 {:?}\n", csv.at(4, 0).unwrap());
            assert_eq!(String::from_utf8(output.stdout).unwrap(), wanted);
        }
        _ => println!("reading with numpy skipped: python3 with numpy is not here"),
    }
}

#[test]
fn affinity_json_has_the_fields_of_the_older_tool() {
    let place = Place::new();
    let folder = host(&place);
    let census = json(&folder.dir.join("affinity.json"));
    assert_eq!(keys(&census), ["cpus", "created_at", "summary"].into());
    let created = census["created_at"].as_str().unwrap();
    assert!(created.len() == 20 && created.ends_with('Z') && &created[10..11] == "T", "{created}");
    let wanted: BTreeSet<&str> = [
        "cpu",
        "online",
        "allowed",
        "bindable",
        "numa_node",
        "socket_id",
        "core_id",
        "thread_siblings",
        "reason",
    ]
    .into();
    let allowed = allowed_cpus();
    let mut seen = BTreeSet::new();
    for cpu in census["cpus"].as_array().unwrap() {
        assert_eq!(keys(cpu), wanted);
        let id = u32::try_from(cpu["cpu"].as_u64().unwrap()).unwrap();
        assert!(seen.insert(id));
        assert_eq!(cpu["allowed"].as_bool().unwrap(), allowed.contains(&id));
        assert_eq!(cpu["bindable"].as_bool().unwrap(), allowed.contains(&id));
        assert_eq!(cpu["reason"].is_null(), allowed.contains(&id));
    }
    assert!(seen.is_superset(&allowed));
    assert_eq!(census["summary"]["bindable"], allowed.len());
}

#[test]
fn every_block_measures_the_host_again_with_the_other_arena() {
    let place = Place::new();
    let folder = host(&place);
    let arena_of = |block: u32| {
        folder.first_class().filter(move |p| p.block == block).map(|p| (p.cell(), p.arena.unwrap()))
    };
    let second: std::collections::BTreeMap<_, _> = arena_of(1).collect();
    for (cell, arena) in arena_of(0) {
        assert_eq!(second[&cell], 1 - arena, "{cell:?}");
    }
}

#[test]
fn a_matrix_has_a_number_in_every_cell() {
    let place = Place::new();
    let folder = host(&place);
    let devices = folder.run["devices"].as_array().unwrap().len();
    for size in ["128KiB", "1MiB"] {
        let csv = Csv::read(&folder.dir.join(format!("h2d-{size}.csv")));
        assert_eq!(csv.measured(), allowed_cpus().len() * devices);
        assert!(csv.cells.iter().flatten().flatten().all(|rate| *rate > 0.0));
    }
    assert_eq!(points(&folder.dir), folder.points);
}
