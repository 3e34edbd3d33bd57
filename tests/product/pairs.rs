//! The pair sweep with live ranks: what it writes, and what becomes of it when a rank is lost.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ranks::{
    PairPoint, Running, SLACK, allowed, assert_complete, assert_nothing_left, is_gone, lines, name,
    pair_points, signal, two_cpus, wait_for,
};
use crate::support::{Csv, Place, Ran, assert_whole, close, json, middle, names};

const KIB: u64 = 1 << 10;

#[test]
fn the_live_sweep_writes_every_file_and_every_field() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let ran = place.run(&format!(
        "core-pair --backend host --sizes 64KiB,8B --rank0-cpus {a},{b} --rank1-cpus {a},{b} \
         --iters 5 --out @out --json"
    ));
    assert_whole(&ran);
    assert_nothing_left(&place);
    let out = place.path("out");
    let cpus = [a, b];
    assert_complete(&out, &[8, 64 * KIB], [&cpus, &cpus], 3);

    let mut files = vec!["affinity.json", "matrices.xlsx", "report.md", "run.json"];
    files.extend(["samples.jsonl", "calibration.json", "placement.json"]);
    let mut files: BTreeSet<String> = files.into_iter().map(str::to_owned).collect();
    for end in ["csv", "npy", "png"] {
        files.extend(["8B", "64KiB"].map(|size| format!("core-pair-{size}.{end}")));
    }
    assert_eq!(names(&out), files);

    // The fields of a pair, and none of a copy.
    let fields = "seq t_ns sweep load block rank0_cpu rank1_cpu device_pair bytes status reason \
                  iter_ns host_iter_ns timer rank_ns warmup_ns touch_ns bind_ns pinned page_nodes \
                  ran_on sentinel phase arena settled skew_ns check";
    let fields: BTreeSet<&str> = fields.split_whitespace().collect();
    for line in lines(&out) {
        assert!(line.as_object().unwrap().keys().map(String::as_str).eq(fields.iter().copied()));
        assert_eq!((&line["load"], &line["timer"]), (&"idle".into(), &"host".into()));
        for field in ["host_iter_ns", "pinned", "page_nodes", "arena", "reason"] {
            assert!(line[field].is_null(), "{field}: {line}");
        }
        assert!(line["settled"].is_boolean());
        let warmups = line["warmup_ns"].as_array().unwrap();
        assert!(!warmups.is_empty() && warmups.iter().all(|time| time.as_u64() > Some(0)));
    }
    let mut points = pair_points(&out);
    for point in &points {
        point.assert_measured(5);
        // Too few points for a sentinel, too small for probes.
        assert!(point.is_first_class() || point.phase == "confirm", "{point:?}");
        let devices = point.device_pair;
        assert_eq!(devices[0], json(&out.join("run.json"))["devices"][0]["id"]);
    }

    points.retain(PairPoint::is_first_class);
    assert_eq!(points.len(), 3 * 2 * 4);

    // Bytes per rank ÷ the slower rank's time: median iteration of a block, median of the blocks.
    let run = json(&out.join("run.json"));
    assert_eq!(run["summary"], ran.json()["summary"]);
    for (row, bytes) in run["summary"].as_array().unwrap().iter().zip([8, 64 * KIB]) {
        assert_eq!((&row["sweep"], &row["rate"]), (&"core_pair".into(), &"per_rank".into()));
        assert_eq!((&row["bytes"], &row["count"]), (&bytes.into(), &4.into()));
        let csv = Csv::read(&out.join(format!("core-pair-{}.csv", name(bytes))));
        let mut rates = Vec::new();
        for (rank0, rank1) in [(a, a), (a, b), (b, a), (b, b)] {
            let blocks: Vec<f64> = points
                .iter()
                .filter(|point| point.cell() == (bytes, rank0, rank1))
                .map(|point| {
                    let times: Vec<f64> = point.iter_ns.iter().map(|ns| *ns as f64).collect();
                    bytes as f64 / middle(&times)
                })
                .collect();
            assert_eq!(blocks.len(), 3);
            let rate = middle(&blocks);
            assert!(close(csv.at(rank0, rank1).unwrap(), rate, 1e-9), "{bytes} {rank0} {rank1}");
            rates.push(rate);
        }
        rates.sort_by(f64::total_cmp);
        assert!(close(row["max"].as_f64().unwrap(), rates[3], 1e-9));
        assert!(close(row["median"].as_f64().unwrap(), middle(&rates), 1e-9));
    }
    let npy = fs::read(out.join("core-pair-8B.npy")).unwrap();
    // Header of 128 bytes, four numbers of 8.
    assert_eq!((&npy[..6], npy.len()), (&b"\x93NUMPY"[..], 128 + 4 * 8));
    let png = fs::read(out.join("core-pair-8B.png")).unwrap();
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
}

#[test]
fn all_measures_pairs_after_copies_in_one_count() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let ran = place.run(&format!(
        "all --quiet --backend host --cpus {a},{b} --sizes 64KiB --rank0-cpus {a} \
         --rank1-cpus {b} --repeats 2 --out @out"
    ));
    assert_whole(&ran);
    assert_nothing_left(&place);
    let out = place.path("out");
    // The size of the pairs is their own.
    assert_complete(&out, &[8 << 20], [&[a], &[b]], 2);
    let sweeps: Vec<String> =
        lines(&out).iter().map(|line| line["sweep"].as_str().unwrap().to_owned()).collect();
    let copies = sweeps.iter().take_while(|sweep| *sweep == "h2d").count();
    assert!(copies >= 2 * 2 && sweeps.len() > copies, "{sweeps:?}");
    assert!(sweeps[copies..].iter().all(|sweep| sweep == "core_pair"), "{sweeps:?}");
    assert_eq!(Csv::read(&out.join("h2d-64KiB.csv")).rows, [a, b]);
    let run = json(&out.join("run.json"));
    let rates: Vec<_> = run["summary"].as_array().unwrap().iter().map(|row| &row["rate"]).collect();
    assert_eq!(rates, ["h2d", "per_rank"]);
}

#[test]
fn the_order_of_the_device_pair_is_kept() {
    let place = Place::with_machine(
        "[machine]\ncpus = 8\ndevices = 8\nnuma_nodes = 2\n[all_gather]\nnoise = 0\n",
    );
    let sweep = "core-pair --quiet --backend synthetic:@machine.toml --repeats 1 --rank1-cpus 1,0";
    let ran = place.run(&format!("{sweep} --device-pair 5,0 --out @out"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let out = place.path("out");
    let points = pair_points(&out);
    assert!(!points.is_empty() && points.iter().all(|point| point.device_pair == [5, 0]));
    let run = json(&out.join("run.json"));
    assert_eq!(run["plan"]["core_pair"]["device_pair"].to_string(), "[5,0]");
    let csv = fs::read_to_string(out.join("core-pair-8MiB.csv")).unwrap();
    assert!(csv.starts_with("rank0\\rank1,1,0\n"), "{csv}");
    // The other order is another run.
    let ran = place.run(&format!("{sweep} --device-pair 0,5 --out @out --resume"));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("device_pair"), "{}", ran.stderr);
}

#[test]
fn f16_a_cpu_of_rank_1_that_is_offline() {
    let place = Place::with_machine(
        "[machine]\ncpus = 8\ndevices = 2\nnuma_nodes = 2\noffline = \"3\"\n\
         [all_gather]\nnoise = 0\n",
    );
    let ran = place.run(
        "core-pair --quiet --backend synthetic:@machine.toml --rank0-cpus 0-2 --rank1-cpus 2-4 \
         --repeats 2 --out @out",
    );
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let out = place.path("out");
    for point in pair_points(&out) {
        let skipped = point.rank1_cpu == 3;
        assert_eq!(point.status, if skipped { "skipped" } else { "measured" }, "{point:?}");
        if skipped {
            let reason = point.reason.unwrap();
            assert!(reason.contains("rank 1") && reason.contains("CPU 3"), "{reason}");
            assert!(point.iter_ns.is_empty());
        }
    }
    let csv = Csv::read(&out.join("core-pair-8MiB.csv"));
    assert!(csv.cells.iter().all(|row| row[1].is_none()), "{csv:?}");
    assert_eq!(csv.measured(), 3 * 2);
    let run = json(&out.join("run.json"));
    assert_eq!((&run["points"]["skipped"], &run["status"]), (&(2 * 3).into(), &"complete".into()));
}

/// A group of processes that may use one CPU only; gone when dropped.
struct OneCpu(PathBuf);

impl OneCpu {
    /// `None` where this process may not make one.
    fn new(cpu: u32) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("cluster-health-test-{}-{count}", std::process::id());
        let (v1, v2) = (Path::new("/sys/fs/cgroup/cpuset"), Path::new("/sys/fs/cgroup"));
        let made = if v1.join("cpuset.mems").exists() {
            Self::make(&v1.join(&name)).and_then(|group| {
                let mems = fs::read_to_string(v1.join("cpuset.mems"))?;
                fs::write(group.0.join("cpuset.mems"), mems)?;
                Ok(group)
            })
        } else {
            // Only where the controller can be handed down.
            fs::write(v2.join("cgroup.subtree_control"), "+cpuset")
                .and_then(|()| Self::make(&v2.join(&name)))
        };
        let made = made.and_then(|group| {
            fs::write(group.0.join("cpuset.cpus"), cpu.to_string())?;
            Ok(group)
        });
        made.inspect_err(|error| println!("skipped: no cpuset can be made here: {error}")).ok()
    }

    fn make(path: &Path) -> std::io::Result<Self> {
        fs::create_dir(path)?;
        Ok(Self(path.to_owned()))
    }

    /// False where the kernel refuses it.
    fn take_in(&self, pid: u32) -> bool {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())
            .inspect_err(|error| println!("skipped: no process can be moved here: {error}"))
            .is_ok()
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        // The kernel needs a moment after its last process.
        wait_for("an empty cpuset", || fs::remove_dir(&self.0).ok());
    }
}

/// Runs a pair sweep of `cpus` whose rank 1 may from some point on use CPU `left` only, `lost` no
/// longer; the points from the first that shows it. `None` where that cannot be arranged.
fn rank_1_loses_a_cpu(cpus: &str, options: &str, [left, lost]: [u32; 2]) -> Option<Vec<PairPoint>> {
    let group = OneCpu::new(left)?;
    let place = Place::new();
    let line = format!("core-pair --backend host --sizes 8B {cpus} {options} --out @out");
    let mut running = Running::start(&place, "run", place.command(&line));
    running.wait_for_points(8);
    if !group.take_in(running.rank1()) {
        return None;
    }
    let ran = running.end();
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_nothing_left(&place);
    let mut points = pair_points(&place.path("out"));
    let first = points.iter().position(|point| point.status != "measured").unwrap();
    assert!(first >= 8, "{first}");
    let after = points.split_off(first);
    let iters = points[0].iter_ns.len();
    points.iter().for_each(|point| point.assert_measured(iters));
    for (place, point) in after.iter().enumerate() {
        if point.rank1_cpu != lost {
            point.assert_measured(iters);
            continue;
        }
        let reason = point.reason.as_ref().unwrap();
        assert!(reason.contains("rank 1") && reason.contains(&format!("CPU {lost}")), "{reason}");
        assert!(!reason.contains("rank 0"), "{reason}");
        if place == 0 && point.status == "failed" {
            // The change came between its binding and its end.
            assert!(point.ran_on[1].contains(&left), "{point:?}");
        } else {
            assert_eq!(point.status, "skipped", "{point:?}");
        }
    }
    Some(after)
}

#[test]
fn f16_a_cpu_that_rank_1_loses_while_it_measures() {
    let Some([a, b]) = two_cpus() else { return };
    let both = format!("--rank0-cpus {a},{b} --rank1-cpus {a},{b}");
    let Some(after) = rank_1_loses_a_cpu(&both, "--repeats 150", [a, b]) else { return };
    let pairs: BTreeSet<_> = after.iter().map(PairPoint::cpus).collect();
    assert_eq!(pairs.len(), 4, "all pairs came after the change: {pairs:?}");

    // A pair that does not change is not bound anew.
    let one = format!("--rank0-cpus {a} --rank1-cpus {b}");
    rank_1_loses_a_cpu(&one, "--repeats 300 --iters 400", [a, b]);
}

#[test]
fn f16_a_cpu_of_rank_1_outside_its_cpuset() {
    let Some([a, b]) = two_cpus() else { return };
    let Some(group) = OneCpu::new(a) else { return };
    let place = Place::new();
    let script = format!("echo $$ > {}/cgroup.procs || exit 77; exec \"$@\"", group.0.display());
    let sweep = place.command(&format!(
        "core-pair --backend host --sizes 8B --rank0-cpus {a} --rank1-cpus {a},{b} --repeats 1 \
         --out @out"
    ));
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(sweep.get_program()).args(sweep.get_args());
    let ran = Ran::of(&mut command);
    if ran.code == Some(77) {
        println!("skipped: no process can be moved here: {}", ran.stderr);
        return;
    }
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let points = pair_points(&place.path("out"));
    assert_eq!(points.len(), 2, "{points:?}");
    for point in points {
        match point.reason {
            None => point.assert_measured(3),
            Some(reason) => {
                assert_eq!((point.status.as_str(), point.rank1_cpu), ("skipped", b));
                assert!(reason.contains("rank 1"), "{reason}");
            }
        }
    }
}

/// A sweep of 120 points that takes a moment: many iterations, so that it does where points are
/// fast, but no two ranks on one CPU, where a busy machine makes each of them slow.
const SIZES: [u64; 3] = [8, 4 * KIB, 64 * KIB];
const BLOCKS: u32 = 40;

fn sweep([a, b]: [u32; 2], timeout: &str) -> String {
    format!(
        "core-pair --quiet --json --backend host --sizes 8B,4KiB,64KiB --rank0-cpus {a} \
         --rank1-cpus {b} --repeats {BLOCKS} --iters 400 --warmup 1 --timeout {timeout} --out @out"
    )
}

/// Resumes a run that must then be complete, with what was measured before kept as it was.
fn assert_resumes([a, b]: [u32; 2], place: &Place, line: &str, sizes: &[u64], blocks: u32) {
    let log = place.path("out/samples.jsonl");
    let before = fs::read_to_string(&log).unwrap();
    let whole_lines = before.rfind('\n').map_or("", |end| &before[..=end]);
    let ran = place.run(&format!("{line} --resume"));
    assert_whole(&ran);
    assert_nothing_left(place);
    assert!(fs::read_to_string(&log).unwrap().starts_with(whole_lines));
    assert_complete(&place.path("out"), sizes, [&[a], &[b]], blocks);
    let segments = json(&place.path("out/run.json"))["segments"].clone();
    assert_eq!(segments[1]["first_seq"], whole_lines.lines().count());
}

/// The error of a run that lost rank 1.
fn assert_lost(place: &Place, ran: &Ran, kind: &str) {
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let error = &ran.json()["error"];
    assert_eq!((&error["kind"], &error["rank"]), (&kind.into(), &1.into()), "{ran:?}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("rank 1"), "{message}");
    assert!(ran.stderr.contains(message), "{ran:?}");
    assert_nothing_left(place);
    assert_eq!(json(&place.path("out/run.json"))["status"], "interrupted");
    // Every line is whole, and each is a point that was measured.
    assert!(pair_points(&place.path("out")).iter().all(|point| point.status == "measured"));
}

#[test]
fn rank_1_killed_before_its_first_point() {
    let Some(cpus) = two_cpus() else { return };
    let place = Place::new();
    // Its death must end the wait, not the bound.
    let line = sweep(cpus, "60s");
    let mut running = Running::start(&place, "run", place.command(&line));
    let rank1 = running.rank1();
    signal(rank1, libc::SIGKILL);
    let ran = running.end_within(SLACK);
    assert_lost(&place, &ran, "rank");
    assert!(is_gone(rank1));
    assert_resumes(cpus, &place, &line, &SIZES, BLOCKS);
}

#[test]
fn rank_1_killed_during_a_point() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = format!(
        "core-pair --quiet --json --backend host --sizes 64MiB --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 1 --order sequential --warmup 0 --timeout 60s --out @out"
    );
    let mut running = Running::start(&place, "run", place.command(&line));
    let rank1 = running.rank1();
    // Binding is how a point begins.
    let thread = rank1.to_string();
    wait_for("the first point", || allowed(&thread).filter(|cpus| *cpus == b.to_string()));
    signal(rank1, libc::SIGKILL);
    let ran = running.end_within(SLACK);
    assert_lost(&place, &ran, "rank");
    assert_eq!(lines(&place.path("out")), Vec::<Value>::new(), "no point was finished");
    assert_resumes([a, b], &place, &line, &[64 << 20], 1);
}

#[test]
fn rank_1_killed_between_points() {
    let Some(cpus) = two_cpus() else { return };
    let place = Place::new();
    let line = sweep(cpus, "60s");
    let mut running = Running::start(&place, "run", place.command(&line));
    running.wait_for_points(5);
    let rank1 = running.rank1();
    signal(rank1, libc::SIGKILL);
    let ran = running.end_within(SLACK);
    assert_lost(&place, &ran, "rank");
    let measured = pair_points(&place.path("out")).len();
    assert!((5..120).contains(&measured), "{measured}");
    // What was measured is shown.
    assert!(place.path("out/core-pair-8B.csv").exists());
    assert_resumes(cpus, &place, &line, &SIZES, BLOCKS);
}

#[test]
fn rank_1_stopped() {
    let Some(cpus) = two_cpus() else { return };
    let place = Place::new();
    let line = sweep(cpus, "2s");
    let mut running = Running::start(&place, "run", place.command(&line));
    running.wait_for_points(5);
    let rank1 = running.rank1();
    signal(rank1, libc::SIGSTOP);
    let ran = running.end_within(Duration::from_secs(2 + 1) + SLACK);
    assert_lost(&place, &ran, "timeout");
    assert!(is_gone(rank1), "a stopped process is killed as well");
    assert_resumes(cpus, &place, &line, &SIZES, BLOCKS);
}

#[test]
fn rank_0_killed() {
    let Some(cpus) = two_cpus() else { return };
    let place = Place::new();
    let line = sweep(cpus, "60s");
    let mut running = Running::start(&place, "run", place.command(&line));
    running.wait_for_points(5);
    let rank1 = running.rank1();
    signal(running.id(), libc::SIGKILL);
    let ran = running.end_within(SLACK);
    assert_eq!(ran.code, None, "killed: {ran:?}");
    let start = Instant::now();
    wait_for("the end of rank 1", || is_gone(rank1).then_some(()));
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
    assert_nothing_left(&place);
    assert_resumes(cpus, &place, &line, &SIZES, BLOCKS);
}

#[test]
fn ctrl_c_ends_both_ranks_with_what_was_measured() {
    let Some(cpus) = two_cpus() else { return };
    // A terminal signals all processes, `kill` one.
    for target in ["group", "rank 0", "rank 1", "group at the start"] {
        let place = Place::new();
        let line = sweep(cpus, "60s");
        let mut running = Running::start(&place, "run", place.command(&line));
        let at_least = if target == "group at the start" { 0 } else { 5 };
        running.wait_for_points(at_least);
        let rank1 = running.rank1();
        match target {
            "rank 0" => signal(running.id(), libc::SIGINT),
            "rank 1" => signal(rank1, libc::SIGINT),
            _ => running.signal_group(libc::SIGINT),
        }
        let ran = running.end_within(SLACK);
        assert_eq!(ran.code, Some(1), "{target}: {ran:?}");
        assert_eq!(ran.json()["status"], "interrupted");
        assert!(ran.stderr.contains("--resume"), "{ran:?}");
        assert_nothing_left(&place);
        let run = json(&place.path("out/run.json"));
        assert_eq!(run["status"], "interrupted");
        let points = pair_points(&place.path("out"));
        assert!((at_least..120).contains(&points.len()), "{}", points.len());
        points.iter().for_each(|point| point.assert_measured(400));
        assert_eq!(run["points"]["measured"], points.len());
        assert_resumes(cpus, &place, &line, &SIZES, BLOCKS);
    }
}

#[test]
fn f11_pairs_do_not_need_room_in_dev_shm() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let temporary = place.path("tmp");
    fs::create_dir(&temporary).unwrap();
    // In a mount namespace of its own /dev/shm has 1 MiB; a segment of 2 MiB does not fit.
    let script = "mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77\n\
                  head -c 2097152 /dev/zero 2>/dev/null > /dev/shm/large && exit 78\n\
                  rm /dev/shm/large\n\
                  \"$@\"\n\
                  code=$?\n\
                  [ -z \"$(ls -A /dev/shm)\" ] || exit 79\n\
                  exit $code";
    let sweep = place.command(&format!(
        "core-pair --quiet --backend host --sizes 8MiB --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 1 --out @out"
    ));
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(sweep.get_program());
    command.args(sweep.get_args()).env("TMPDIR", &temporary).env("XDG_RUNTIME_DIR", &temporary);
    let Ok(output) = command.output() else {
        println!("skipped: no unshare");
        return;
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) || stderr.starts_with("unshare: ") {
        println!("skipped: no mount namespace can be had here: {stderr}");
        return;
    }
    assert!(matches!(output.status.code(), Some(0 | 1)), "{stderr}");
    assert_complete(&place.path("out"), &[8 << 20], [&[a], &[b]], 1);
    assert_nothing_left(&place);
    assert_eq!(names(&temporary), BTreeSet::new());
}
