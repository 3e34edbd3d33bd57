//! Sweeps on machines that exist only as scenarios, where the right answer is known.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;

use crate::support::{Folder, MIB, Place, Point, QUIET, close, names};

/// Nanoseconds of a copy at 58.5 GB/s × `factor` with a latency of 12 us, both the defaults.
fn copy_ns(bytes: u64, factor: f64) -> u64 {
    let ns = 12_000.0 + bytes as f64 / (58.5 * factor);
    format!("{ns:.0}").parse().unwrap()
}

/// Positions in the schedule without what differs between blocks and machines.
fn order(points: &[Point]) -> Vec<(u64, u32, u32, bool)> {
    points.iter().map(|p| (p.bytes, p.cpu, p.device, p.sentinel)).collect()
}

fn of_block(folder: &Folder, block: u32) -> Vec<Point> {
    folder.points.iter().filter(|point| point.block == block).cloned().collect()
}

/// 640 CPUs × 16 devices × 3 sizes, 2 blocks, no noise and three planted faults.
#[test]
fn the_full_node_is_measured_in_randomised_complete_blocks() {
    const PROBE: u64 = 64 << 10;
    const SIZES: [u64; 3] = [16 * MIB, 64 * MIB, 256 * MIB];
    let place = Place::with_machine(
        "[machine]\ncpus = 640\nsmt = 2\nnuma_nodes = 8\ndevices = 16\n[h2d]\nnoise = 0\n\
         [[fault]]\nkind = \"slow_device\"\ndevices = \"5\"\nfactor = 0.8\n\
         [[fault]]\nkind = \"slow_core\"\ncpus = \"333\"\nfactor = 0.5\n\
         [[fault]]\nkind = \"slow_cell\"\ncpus = \"100\"\ndevices = \"9\"\nfactor = 0.7\n",
    );
    let folder = place.sweep(1, "--repeats 2");
    let points = &folder.points;
    let factor = |cpu: u32, device: u32| {
        let of = |hit: bool, factor: f64| if hit { factor } else { 1.0 };
        of(device == 5, 0.8) * of(cpu == 333, 0.5) * of((cpu, device) == (100, 9), 0.7)
    };
    // Cores of two adjacent threads, in eight contiguous ranges.
    let node = |cpu: u32| cpu / 2 * 8 / 320;

    for (seq, point) in points.iter().enumerate() {
        assert_eq!(point.seq, seq as u64);
        let wanted = copy_ns(point.bytes, factor(point.cpu, point.device));
        assert_eq!(point.iter_ns, [wanted; 3], "seq {seq}");
        assert_eq!(point.ran_on, [point.cpu]);
        assert_eq!(point.page_nodes, Some([(node(point.cpu), 512)].into()));
        assert_eq!(point.check, "ok");
        // Until its first visit is over, a slow cell is taken for a cold one.
        let slow = point.cpu == 333 || (point.cpu, point.device) == (100, 9);
        assert!(point.settled || (slow && point.block == 0 && !point.sentinel), "{point:?}");
    }

    // Every cell once per block.
    let cells = 640 * 16 * SIZES.len();
    for block in 0..2 {
        let first_class = points.iter().filter(|p| p.block == block && p.is_first_class());
        let visits: Vec<_> = first_class.map(Point::cell).collect();
        let distinct: HashSet<_> = visits.iter().copied().collect();
        assert_eq!((visits.len(), distinct.len()), (cells, cells));
        assert!(visits.iter().all(|(bytes, _, _)| SIZES.contains(bytes)));
    }
    assert!(points.iter().is_sorted_by_key(|point| point.block));

    // One visit per CPU and block, interrupted by sentinels alone.
    for block in 0..2 {
        let mut visited = HashSet::new();
        let ordinary: Vec<_> =
            points.iter().filter(|p| p.block == block && !p.sentinel).map(|p| p.cpu).collect();
        for run in ordinary.chunk_by(|a, b| a == b) {
            assert!(visited.insert(run[0]), "CPU {} is visited twice in block {block}", run[0]);
        }
        assert_eq!(visited.len(), 640);
        assert!(!ordinary.is_sorted());
    }

    // Probes: every CPU and every device in each block.
    for block in 0..2 {
        let probes: Vec<_> =
            points.iter().filter(|p| p.block == block && p.phase == "probe").collect();
        assert!(probes.iter().all(|p| p.bytes == PROBE && !p.sentinel));
        assert_eq!(probes.iter().map(|p| p.cpu).collect::<HashSet<_>>().len(), 640);
        assert_eq!(probes.iter().map(|p| p.device).collect::<HashSet<_>>().len(), 16);
    }

    // Sentinels: 48 to 80 points apart, four cells in turn on different devices and nodes.
    let mut gaps = Vec::new();
    let mut gap = 0;
    for point in points.iter().filter(|p| p.phase != "confirm") {
        if point.sentinel {
            gaps.push(gap);
            gap = 0;
        } else {
            gap += 1;
        }
    }
    assert!(gaps.iter().all(|gap| (48..=80).contains(gap)), "{gaps:?}");
    assert!(gap <= 80);
    assert!(gaps.iter().collect::<HashSet<_>>().len() >= 20, "a fixed period would resonate");
    let sentinels: Vec<_> = points.iter().filter(|p| p.sentinel).collect();
    assert!(sentinels.iter().all(|p| p.bytes == SIZES[1] && p.phase == "blocks"));
    let four = &sentinels[..4];
    assert_eq!(four.iter().map(|p| p.device).collect::<HashSet<_>>().len(), 4);
    assert_eq!(four.iter().map(|p| node(p.cpu)).collect::<HashSet<_>>().len(), 4);
    for (at, sentinel) in sentinels.iter().enumerate() {
        assert_eq!(sentinel.cell(), four[at % 4].cell());
    }

    // Blocks differ in their order and in the arena of each cell.
    assert_ne!(order(&of_block(&folder, 0)), order(&of_block(&folder, 1)));
    let first: HashMap<_, _> = folder
        .first_class()
        .filter(|p| p.block == 0)
        .map(|p| (p.cell(), p.arena.unwrap()))
        .collect();
    for point in folder.first_class().filter(|p| p.block == 1) {
        assert_eq!(first[&point.cell()] + point.arena.unwrap(), 1);
    }

    // Files recover what was planted.
    for (bytes, stem) in SIZES.iter().zip(["h2d-16MiB", "h2d-64MiB", "h2d-256MiB"]) {
        let csv = folder.csv(stem);
        assert_eq!((csv.rows.len(), csv.columns.len(), csv.measured()), (640, 16, 10_240));
        for (row, cpu) in csv.cells.iter().zip(&csv.rows) {
            for (cell, device) in row.iter().zip(&csv.columns) {
                let wanted = *bytes as f64 / copy_ns(*bytes, factor(*cpu, *device)) as f64;
                assert!(close(cell.unwrap(), wanted, 1e-12));
            }
        }
    }
    assert_eq!(names(&folder.dir).iter().filter(|name| name.ends_with(".csv")).count(), 3);
    for row in folder.run["summary"].as_array().unwrap() {
        assert_eq!(row["count"], 10_240);
    }

    // Virtual time is far ahead of real time: the sweep waits for nothing.
    let (wall, host) =
        (folder.run["wall_ns"].as_u64().unwrap(), folder.run["host_ns"].as_u64().unwrap());
    let copies: u64 = points.iter().flat_map(|p| p.iter_ns.iter().chain(&p.warmup_ns)).sum();
    assert!(wall > copies);
    assert!(host < wall / 4, "{host} ns for {wall} virtual ones");
}

#[test]
fn equal_seeds_give_equal_files_and_other_seeds_another_order() {
    let place = Place::with_machine("[machine]\ncpus = 32\nnuma_nodes = 4\ndevices = 4\n");
    let run = |seed: u64| {
        place.sweep(0, &format!("--force --sizes 1MiB,4MiB --repeats 2 --seed {seed}"));
        let folder = Folder::read(&place.path("out"));
        assert_eq!(folder.run["seed"], seed);
        (fs::read(place.path("out/samples.jsonl")).unwrap(), folder)
    };
    let (first, folder) = run(5);
    let (again, _) = run(5);
    let (other, other_folder) = run(6);
    assert!(first == again);
    assert!(first != other);
    assert_ne!(order(&folder.points), order(&other_folder.points));
    assert_ne!(order(&of_block(&folder, 0)), order(&of_block(&folder, 1)));
}

#[test]
fn planted_factors_are_recovered_under_noise() {
    let place = Place::with_machine(
        "[machine]\ncpus = 64\nnuma_nodes = 4\ndevices = 8\n\
         [h2d]\nlatency_us = 0\nnoise = 0.02\nvisit_noise = 0.005\n\
         [[fault]]\nkind = \"slow_device\"\ndevices = \"6\"\nfactor = 0.6\n\
         [[fault]]\nkind = \"slow_core\"\ncpus = \"17\"\nfactor = 0.7\n\
         [[fault]]\nkind = \"slow_cell\"\ncpus = \"40\"\ndevices = \"2\"\nfactor = 0.5\n",
    );
    let folder = place.sweep(1, "--sizes 16MiB --repeats 5");
    let csv = folder.csv("h2d-16MiB");
    // Noise of one block's median of three: 0.02 × 1.2533 ÷ √3 and 0.005; of the cell, over five
    // blocks, less than 0.9 % at one standard deviation.
    for &cpu in &csv.rows {
        for &device in &csv.columns {
            let of = |hit: bool, factor: f64| if hit { factor } else { 1.0 };
            let factor =
                of(device == 6, 0.6) * of(cpu == 17, 0.7) * of((cpu, device) == (40, 2), 0.5);
            let found = csv.at(cpu, device).unwrap() / 58.5;
            assert!(close(found, factor, 0.045), "CPU {cpu}, device {device}: {found}");
        }
    }
}

#[test]
fn wrong_data_fails_the_points_that_got_it() {
    let place = Place::with_machine(&format!(
        "{QUIET}[[fault]]\nkind = \"data_corruption\"\ndevices = \"2\"\n"
    ));
    for check in ["tags", "full"] {
        let folder = place.sweep(1, &format!("--force --sizes 1MiB --repeats 2 --check {check}"));
        for point in &folder.points {
            let hit = point.device == 2;
            let wanted = if hit { ("failed", "mismatch") } else { ("measured", "ok") };
            assert_eq!((point.status.as_str(), point.check.as_str()), wanted);
            assert_eq!(point.reason.is_some(), hit);
        }
        let csv = folder.csv("h2d-1MiB");
        assert!(csv.rows.iter().all(|&cpu| csv.at(cpu, 2).is_none()));
        assert_eq!(csv.measured(), 16 * 3);
        assert_eq!(folder.run["summary"][0]["count"], 16 * 3);
        assert!(folder.count("failed") >= 32);
    }
    let folder = place.sweep(0, "--force --sizes 1MiB --repeats 2 --check off");
    assert!(folder.points.iter().all(|p| p.check == "off" && p.status == "measured"));
}

#[test]
fn an_error_costs_only_its_point() {
    let place = Place::with_machine(&format!(
        "{QUIET}[[failure]]\nkind = \"error\"\nat_point = 10\ncall = \"aclrtMemcpyAsync\"\n\
         code = 507899\n"
    ));
    let folder = place.sweep(1, "--sizes 1MiB --repeats 2");
    let failed: Vec<_> = folder.points.iter().filter(|p| p.status != "measured").collect();
    assert_eq!(failed.len(), 1);
    assert_eq!((failed[0].seq, failed[0].status.as_str()), (10, "failed"));
    let reason = failed[0].reason.as_deref().unwrap();
    assert!(reason.contains("aclrtMemcpyAsync") && reason.contains("507899"), "{reason}");
    assert!(failed[0].iter_ns.is_empty());
    assert_eq!((folder.count("failed"), folder.count("skipped")), (1, 0));
    assert_eq!(folder.run["status"], "complete");
    // The other block measured the cell.
    assert_eq!(folder.csv("h2d-1MiB").measured(), 64);
}

#[test]
fn a_hang_is_a_failed_point_after_the_timeout() {
    let place =
        Place::with_machine(&format!("{QUIET}[[failure]]\nkind = \"hang\"\nat_point = 7\n"));
    let folder = place.sweep(1, "--sizes 1MiB --repeats 2 --timeout 2500ms");
    let point = &folder.points[7];
    let reason = point.reason.as_deref().unwrap();
    assert!(point.status == "failed" && reason.contains("2500 ms"), "{reason}");
    let device = format!("device {}", point.device);
    assert!(reason.contains(&device), "{reason}");
    let took = folder.points[8].t_ns - point.t_ns;
    assert!((2_500_000_000..2_600_000_000).contains(&took), "{took}");
    assert!(folder.points.iter().all(|p| p.seq == 7 || p.status == "measured"));
    assert_eq!(folder.count("failed"), 1);
}

#[test]
fn a_slow_copy_beyond_the_timeout_fails() {
    // 64 MiB take 1.16 ms.
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(1, "--sizes 1MiB,64MiB --repeats 1 --timeout 1ms");
    for point in &folder.points {
        assert_eq!(point.status == "failed", point.bytes == 64 * MIB);
    }
}

#[test]
fn cpus_asked_for_that_cannot_be_bound_are_skipped_with_reasons() {
    let place = Place::with_machine(
        "[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\noffline = \"5\"\nrefuse_bind = \"3\"\n",
    );
    let folder = place.sweep(1, "--cpus 0-7 --sizes 1MiB --repeats 2");
    for point in &folder.points {
        let reason = point.reason.as_deref().unwrap_or_default();
        match point.cpu {
            3 => assert!(point.status == "skipped" && reason.contains("EPERM"), "{point:?}"),
            5 => assert!(point.status == "skipped" && reason.contains("offline"), "{point:?}"),
            _ => assert_eq!(point.status, "measured"),
        }
        assert!(point.status == "measured" || reason.contains(&format!("CPU {}", point.cpu)));
    }
    assert_eq!(folder.first_class().filter(|p| p.status == "skipped").count(), 2 * 2 * 4);
    let csv = folder.csv("h2d-1MiB");
    assert_eq!((csv.rows.len(), csv.measured()), (8, 6 * 4));
}

#[test]
fn cpus_that_cannot_be_bound_are_left_out_of_auto() {
    let place = Place::with_machine(
        "[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\noffline = \"5\"\nrefuse_bind = \"3\"\n",
    );
    let folder = place.sweep(0, "--sizes 1MiB --repeats 1");
    let cpus: BTreeSet<u32> = folder.points.iter().map(|p| p.cpu).collect();
    assert_eq!(cpus, (0..16).filter(|cpu| ![3, 5].contains(cpu)).collect());
    let census = crate::support::json(&folder.dir.join("affinity.json"));
    let record = |cpu: usize| &census["cpus"][cpu];
    assert_eq!((&record(5)["online"], &record(5)["reason"]), (&false.into(), &"offline".into()));
    assert_eq!((&record(3)["online"], &record(3)["bindable"]), (&true.into(), &false.into()));
    assert!(record(4)["reason"].is_null());
}

#[test]
fn nothing_to_measure_is_an_error_with_its_reasons() {
    let place = Place::with_machine(
        "[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\noffline = \"5\"\nrefuse_bind = \"3\"\n",
    );
    let ran = place.run("h2d --backend synthetic:@machine.toml --cpus 3,5 --out @out --json");
    assert_eq!(ran.code, Some(2));
    let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
    for part in ["--cpus", "nothing can be measured", "offline", "EPERM"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!place.path("out").exists());
}

/// The census cannot know what a later bind says; the node's other CPUs still measure.
#[test]
fn a_refused_bind_skips_that_cpu_only() {
    for cpus in ["0", "8-15"] {
        let place = Place::with_machine(&format!(
            "{QUIET}[[failure]]\nkind = \"bind_refused\"\nrank = 0\ncpus = \"{cpus}\"\n"
        ));
        let folder = place.sweep(1, "--sizes 1MiB --repeats 1");
        for point in &folder.points {
            let refused = if cpus == "0" { point.cpu == 0 } else { point.cpu >= 8 };
            let wanted = if refused { "skipped" } else { "measured" };
            assert_eq!(point.status, wanted, "{point:?}");
            assert_eq!(point.reason.as_ref().is_some_and(|why| why.contains("EPERM")), refused);
        }
    }
}

#[test]
fn a_machine_that_refuses_every_bind_measures_nothing() {
    let place =
        Place::with_machine(&format!("{QUIET}[[failure]]\nkind = \"bind_refused\"\nrank = 0\n"));
    let ran = place.run("h2d --backend synthetic:@machine.toml --sizes 1MiB --out @out --json");
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.json()["error"]["message"].as_str().unwrap().contains("EPERM"));
}

const STALL: &str = "[[artefact]]\nkind = \"allocation_stall\"\nextra_ms = 25\n";
const STALL_NS: u64 = 25_000_000;

#[test]
fn warm_up_absorbs_the_stall_of_each_arena() {
    let place = Place::with_machine(&format!("{QUIET}{STALL}"));
    let folder = place.sweep(0, "--sizes 16MiB --repeats 2");
    assert!(folder.points.iter().all(|p| p.iter_ns == [copy_ns(p.bytes, 1.0); 3]));
    let warm_ups = folder.points.iter().flat_map(|p| &p.warmup_ns);
    let stalls = warm_ups.filter(|ns| **ns >= STALL_NS).count();
    assert_eq!(stalls, 4, "two arenas on each of two nodes");
}

#[test]
fn an_arena_per_core_shows_its_stall_without_warm_up() {
    let place = Place::with_machine(&format!("{QUIET}{STALL}"));
    let folder = place.sweep(0, "--sizes 16MiB --repeats 2 --arena core --warmup 0");
    let mut visits = 0;
    for point in &folder.points {
        let copy = copy_ns(point.bytes, 1.0);
        let new = point.touch_ns > 0;
        visits += u32::from(new);
        let first = if new { copy + STALL_NS } else { copy };
        assert_eq!(point.iter_ns, [first, copy, copy], "{point:?}");
        assert!(point.warmup_ns.is_empty());
        // Touching and locking 16 MiB, and the allocation, of the scenario's defaults.
        let cost = 200_000 + 16 * MIB / 4 + 16 * MIB / 20;
        assert!(!new || point.touch_ns.abs_diff(cost) <= 1, "{}", point.touch_ns);
    }
    let sentinels = u32::try_from(folder.points.iter().filter(|p| p.sentinel).count()).unwrap();
    // A sentinel leaves the core and comes back to it, unless the visit ends there.
    assert!((32 + sentinels..=32 + 2 * sentinels).contains(&visits), "{visits}");
}

#[test]
fn sequential_order_is_cpu_size_device() {
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(0, "--sizes 4MiB,1MiB --repeats 2 --order sequential");
    let mut wanted = Vec::new();
    for _ in 0..2 {
        for cpu in 0..16 {
            for bytes in [MIB, 4 * MIB] {
                wanted.extend((0..4).map(|device| (bytes, cpu, device, false)));
            }
        }
    }
    assert_eq!(order(&folder.points), wanted);
    assert!(folder.points.iter().all(|p| p.phase == "blocks"));
    assert_eq!(folder.run["order"], "sequential");
}

#[test]
fn warm_up_is_exact_when_asked_and_short_when_not() {
    let place = Place::with_machine(QUIET);
    for count in [0, 1, 4] {
        let folder = place.sweep(0, &format!("--force --sizes 1MiB --repeats 1 --warmup {count}"));
        assert!(folder.points.iter().all(|p| p.warmup_ns.len() == count && p.settled));
    }
    let folder = place.sweep(0, "--force --sizes 1MiB --repeats 2 --iters 5");
    assert!(folder.points.iter().all(|p| p.iter_ns.len() == 5 && p.settled));
    for point in &folder.points {
        // A CPU that was just bound needs two that agree.
        let wanted = if point.bind_ns > 0 { 2..=2 } else { 1..=2 };
        assert!(wanted.contains(&point.warmup_ns.len()), "{point:?}");
    }
}

#[test]
fn blocks_are_added_only_where_cells_vary_and_at_most_to_twenty() {
    let place = Place::with_machine(&format!(
        "{QUIET}[[fault]]\nkind = \"slow_device\"\ndevices = \"2\"\nfactor = 0.5\n\
         probability = 0.5\n"
    ));
    let folder = place.sweep(1, "--sizes 1MiB,4MiB --repeats 3 --ci 2%");
    for finding in place.run("diagnose @out --json").json()["findings"].as_array().unwrap() {
        // What is slow now and then is at most undecided; nothing of it belongs to a CPU.
        assert!(finding["cpus"].as_array().unwrap().is_empty(), "{finding}");
    }
    let times = |cell, below: u32| -> BTreeSet<u64> {
        folder
            .first_class()
            .filter(|p| p.cell() == cell && p.block < below)
            .map(|p| p.iter_ns[0])
            .collect()
    };
    let mut added = BTreeMap::<u32, BTreeSet<_>>::new();
    for point in folder.first_class().filter(|p| p.block >= 3) {
        added.entry(point.block).or_default().insert(point.cell());
    }
    // Two values a factor of two apart never have a 2 % interval, and equal ones need no more.
    assert_eq!(added.keys().copied().collect::<Vec<_>>(), (3..20).collect::<Vec<_>>());
    let mut varied = BTreeSet::new();
    for cpu in 0..16 {
        for device in 0..4 {
            varied.extend([MIB, 4 * MIB].map(|bytes| (bytes, cpu, device)));
        }
    }
    varied.retain(|cell| times(*cell, 3).len() > 1);
    assert!(varied.len() > 4 && varied.iter().all(|(_, _, device)| *device == 2), "{varied:?}");
    for cells in added.values() {
        assert_eq!(*cells, varied);
    }
    assert_eq!(folder.run["status"], "complete");
}

#[test]
fn a_precise_machine_needs_no_added_blocks() {
    let place = Place::with_machine("[machine]\ncpus = 16\nnuma_nodes = 2\ndevices = 4\n");
    let folder = place.sweep(0, "--sizes 16MiB --repeats 3 --ci 0.5");
    assert!(folder.points.iter().all(|p| p.block < 3));
}

#[test]
fn rates_above_the_declared_one_are_implausible() {
    // 64 KiB take 13.1 us, that is 5 GB/s, 64 MiB 1.16 ms, that is 57.9 GB/s.
    let place = Place::with_machine(QUIET);
    let folder = place.sweep(1, "--sizes 64KiB,64MiB --repeats 2 --expect 40GB/s");
    for point in &folder.points {
        let implausible = point.bytes == 64 * MIB;
        assert_eq!(point.status == "implausible", implausible);
        let says = point.reason.as_deref().is_some_and(|why| why.contains("40.000 GB/s"));
        assert_eq!(says, implausible, "{point:?}");
    }
    assert_eq!(folder.csv("h2d-64MiB").measured(), 0);
    assert_eq!(folder.csv("h2d-64KiB").measured(), 64);
    assert_eq!(folder.run["summary"].as_array().unwrap().len(), 1);
    assert!(folder.count("implausible") >= 128);
    // 57.9 is below 1.25 × 47.
    let folder = place.sweep(0, "--force --sizes 64KiB,64MiB --repeats 2 --expect 47");
    assert_eq!(folder.count("implausible"), 0);
}

#[test]
fn a_run_without_any_number_is_an_error_and_one_document() {
    let place = Place::with_machine(&format!("{QUIET}[[fault]]\nkind = \"data_corruption\"\n"));
    let ran = place.run("h2d --backend synthetic:@machine.toml --sizes 1MiB --out @out --json");
    assert_eq!(ran.code, Some(2));
    let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("nothing could be measured"), "{message}");
    assert!(message.contains("does not hold what was sent"), "{message}");
    let folder = Folder::read(&place.path("out"));
    assert_eq!(folder.run["status"], "complete");
    assert_eq!(folder.count("failed"), folder.points.len() as u64);
}

#[test]
fn lists_keep_their_order() {
    let place = Place::with_machine(&format!(
        "{QUIET}[[fault]]\nkind = \"slow_cell\"\ncpus = \"9\"\ndevices = \"3\"\nfactor = 0.5\n"
    ));
    let folder = place.sweep(1, "--cpus 9,2-4,0 --devices 3,0 --sizes 1MiB --repeats 1");
    let csv = folder.csv("h2d-1MiB");
    assert_eq!((csv.rows.as_slice(), csv.columns.as_slice()), (&[9, 2, 3, 4, 0][..], &[3, 0][..]));
    let slow: Vec<_> = csv.cells.iter().flatten().map(|rate| rate.unwrap() < 30.0).collect();
    assert_eq!(slow.iter().position(|slow| *slow), Some(0));
    assert_eq!(slow.iter().filter(|slow| **slow).count(), 1);
}
