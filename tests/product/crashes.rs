//! Runs that are killed at random moments, and go on.

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ranks::{
    Running, assert_complete, assert_nothing_left, lines, signal, two_cpus, wait_for,
};
use crate::support::{Place, Ran, assert_whole, contents, json};

/// How many runs are killed in all.
const KILLS: &str = "CLUSTER_HEALTH_TEST_KILLS";

/// With faults, so that there are findings that an interruption could change.
const MACHINE: &str = "[machine]\ncpus = 64\nsmt = 2\nnuma_nodes = 4\ndevices = 8\n\
     [h2d]\nnoise = 0.02\n[all_gather]\nnoise = 0.03\n\
     [[fault]]\nkind = \"slow_device\"\nsweep = \"h2d\"\ndevices = \"5\"\nfactor = 0.85\n\
     [[fault]]\nkind = \"same_core\"\nsweep = \"core_pair\"\nfactor = 0.6\n\
     [[fault]]\nkind = \"slow_rank1_core\"\nsweep = \"core_pair\"\nrank1 = \"9\"\nfactor = 0.8\n";

/// Marsaglia's xorshift: moments to kill at.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn kills() -> u64 {
    std::env::var(KILLS).map_or(20, |text| text.parse().unwrap())
}

/// The whole lines of a log; empty before there is one.
fn whole_lines(place: &Place) -> Vec<u8> {
    let mut log = fs::read(place.path("out/samples.jsonl")).unwrap_or_default();
    let end = log.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    log.truncate(end);
    log
}

fn log_bytes(place: &Place) -> u64 {
    fs::metadata(place.path("out/samples.jsonl")).map_or(0, |data| data.len())
}

fn count(log: &[u8]) -> usize {
    log.iter().filter(|byte| **byte == b'\n').count()
}

/// Points without the times that an interruption changes: when, and the bind where the run goes on.
fn comparable(place: &Place, out: &str) -> Vec<Value> {
    let mut points = lines(&place.path(out));
    for point in &mut points {
        point["t_ns"] = Value::Null;
        point["bind_ns"] = Value::Null;
    }
    points
}

/// What killed runs came to.
#[derive(Debug, Default)]
struct Figures {
    killed: u64,
    before_the_first_point: u64,
    while_measuring: u64,
    after_the_last_point: u64,
    torn_tails: u64,
    kept: u64,
}

#[test]
fn killed_runs_go_on_to_the_findings_of_an_uninterrupted_one() {
    let sweeps = [
        ("h2d", "h2d --sizes 4MiB,16MiB --warmup 1"),
        ("core-pair", "core-pair --sizes 8MiB --repeats 2 --warmup 1"),
        ("h2d, sampled", "h2d --sizes 16MiB --warmup 1 --sample"),
        ("core-pair, sampled", "core-pair --sizes 8MiB --warmup 1 --sample"),
    ];
    let mut random = Random(0x5eed_0000_1234);
    let each = kills().div_ceil(sweeps.len() as u64);
    for (name, sweep) in sweeps {
        let place = Place::with_machine(MACHINE);
        let line = format!("{sweep} --quiet --seed 9 --backend synthetic:@machine.toml");
        let began = Instant::now();
        let ran = place.run(&format!("{line} --out @whole"));
        assert_whole(&ran);
        let whole_ms = u64::try_from(began.elapsed().as_millis()).unwrap();
        let wanted = comparable(&place, "whole");
        let judged = place.run("diagnose @whole --json");
        let last = wanted.len();
        let bytes = fs::metadata(place.path("whole/samples.jsonl")).unwrap().len();
        let mut figures = Figures::default();
        while figures.killed < each {
            // Up to three times the same run.
            for _ in 0..=random.below(3) {
                let before = whole_lines(&place);
                let mut child = place
                    .command(&format!("{line} --out @out --resume"))
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap();
                // Most of the time goes into outputs, most of the loss would be points.
                match random.below(6) {
                    0 => thread::sleep(Duration::from_micros(random.below(whole_ms * 50 + 1))),
                    1 | 2 => thread::sleep(Duration::from_micros(random.below(whole_ms * 1_100))),
                    _ => {
                        let target = random.below(bytes);
                        while child.try_wait().unwrap().is_none() && log_bytes(&place) < target {
                            thread::sleep(Duration::from_micros(100));
                        }
                    }
                }
                if let Some(status) = child.try_wait().unwrap() {
                    assert_eq!(status.code(), ran.code);
                    break;
                }
                child.kill().unwrap();
                child.wait().unwrap();
                let log = fs::read(place.path("out/samples.jsonl")).unwrap_or_default();
                let kept = whole_lines(&place);
                assert!(kept.starts_with(&before), "{name}: lines were lost");
                figures.killed += 1;
                figures.torn_tails += u64::from(log.len() > kept.len());
                figures.kept += count(&kept) as u64;
                match count(&kept) {
                    0 => figures.before_the_first_point += 1,
                    lines if lines == last => figures.after_the_last_point += 1,
                    _ => figures.while_measuring += 1,
                }
            }
            let before = whole_lines(&place);
            let again = place.run(&format!("{line} --out @out --resume"));
            assert_eq!((again.code, &again.stderr), (ran.code, &ran.stderr), "{name}: {again:?}");
            let after = whole_lines(&place);
            assert!(after.starts_with(&before), "{name}: lines were lost");
            // Nothing but the point in flight can have been measured twice: every line stayed, and
            // all together are as many as without interruption.
            assert!(comparable(&place, "out") == wanted, "{name}: other points");
            let run = json(&place.path("out/run.json"));
            assert_eq!(run["status"], "complete");
            let found = place.run("diagnose @out --json");
            assert_eq!((found.code, &found.stdout), (judged.code, &judged.stdout), "{name}");
            assert_same_outputs(&place);
            fs::remove_dir_all(place.path("out")).unwrap();
        }
        println!("{name}: {last} points in {whole_ms} ms; {figures:?}; no line lost");
    }
}

/// The same files, and the same numbers in all that hold numbers only.
fn assert_same_outputs(place: &Place) {
    let numbers = |out| -> BTreeMap<String, Vec<u8>> {
        let mut files = contents(&place.path(out));
        files.iter_mut().for_each(|(name, bytes)| {
            if ![".csv", ".npy", ".png"].iter().any(|end| name.ends_with(end)) {
                bytes.clear();
            }
        });
        files
    };
    assert!(numbers("whole") == numbers("out"), "{:?}", numbers("out").keys());
}

#[test]
fn killed_ranks_lose_no_line_and_the_run_goes_on() {
    let Some([a, b]) = two_cpus() else { return };
    let mut random = Random(0x5eed_0000_5678);
    let mut figures = [0_u64; 3];
    let line = format!(
        "core-pair --quiet --backend host --sizes 8B --rank0-cpus {a},{b} --rank1-cpus {a},{b} \
         --repeats 40 --iters 20 --timeout 5s --out @out"
    );
    for turn in 0..kills().div_ceil(4) {
        let place = Place::new();
        let mut running = Running::start(&place, "killed", place.command(&line));
        let pid = running.id();
        let rank1 = (turn % 3 == 1).then(|| running.rank1());
        thread::sleep(Duration::from_millis(random.below(600)));
        // It may have ended by itself.
        if running.is_running() {
            match rank1 {
                Some(rank1) if !crate::ranks::children(pid).contains(&rank1) => continue,
                Some(rank1) => signal(rank1, libc::SIGKILL),
                None if turn % 3 == 0 => signal(pid, libc::SIGKILL),
                None => running.signal_group(libc::SIGKILL),
            }
            figures[usize::try_from(turn % 3).unwrap()] += 1;
        }
        let ran: Ran = running.end_within(Duration::from_secs(5 + 1) + crate::ranks::SLACK);
        assert!(matches!(ran.code, None | Some(0..=2)), "{ran:?}");
        if ran.code == Some(2) {
            assert!(ran.stderr.contains("rank 1"), "{ran:?}");
        }
        wait_for("the end of the other rank", || {
            crate::ranks::users_of(&place.path("")).is_empty().then_some(())
        });
        assert_nothing_left(&place);
        let before = whole_lines(&place);
        let ran = place.run(&format!("{line} --resume"));
        assert_whole(&ran);
        assert!(whole_lines(&place).starts_with(&before), "lines were lost");
        assert_complete(&place.path("out"), &[8], [&[a, b], &[a, b]], 40);
    }
    println!(
        "killed: rank 0 {}, rank 1 {}, both {}; no line lost",
        figures[0], figures[1], figures[2]
    );
}
