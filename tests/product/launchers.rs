//! Ranks that a launcher starts: torchrun's variables, a real `mpirun`, and what goes wrong there.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::ranks::{
    Running, SLACK, assert_complete, assert_nothing_left, lines, meeting, pair_points, signal,
    two_cpus, wait_for,
};
use crate::support::{Csv, Place, Ran, assert_whole, json};

/// A rank as `torchrun --nproc_per_node 2` starts it: exactly the variables that its agent sets.
pub(crate) fn torchrun(place: &Place, rank: u32, line: &str) -> Command {
    let mut command = place.command(line);
    let rank = rank.to_string();
    for (name, value) in [
        ("LOCAL_RANK", rank.as_str()),
        ("RANK", &rank),
        ("GROUP_RANK", "0"),
        ("ROLE_RANK", &rank),
        ("ROLE_NAME", "default"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("WORLD_SIZE", "2"),
        ("GROUP_WORLD_SIZE", "1"),
        ("ROLE_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCHELASTIC_RUN_ID", "none"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("OMP_NUM_THREADS", "1"),
    ] {
        command.env(name, value);
    }
    command.env("TORCHELASTIC_ERROR_FILE", place.path(&format!("error-{rank}.json")));
    // Jobs of other tests have the same name.
    command.env("XDG_RUNTIME_DIR", meeting(place));
    command
}

/// Both ranks of a command line, rank 1 first.
fn both(place: &Place, line: &str) -> [Running; 2] {
    let [rank1, rank0] =
        [1, 0].map(|rank| Running::start(place, &rank.to_string(), torchrun(place, rank, line)));
    [rank0, rank1]
}

fn finish(place: &Place, ranks: [Running; 2]) -> [Ran; 2] {
    let ended = ranks.map(Running::end);
    assert_nothing_left(place);
    ended
}

fn small([a, b]: [u32; 2]) -> String {
    format!(
        "core-pair --backend host --sizes 8B,4KiB --rank0-cpus {a},{b} --rank1-cpus {b},{a} \
         --repeats 2 --out @out"
    )
}

#[test]
fn torchrun_runs_every_sweep() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = small([a, b]);
    let [rank0, rank1] = finish(&place, both(&place, &line));
    assert_whole(&rank0);
    assert_eq!(rank1.code, Some(0), "{rank1:?}");
    assert!(rank0.stdout.contains("report.md") && rank1.stdout.is_empty(), "{rank0:?} {rank1:?}");
    let out = place.path("out");
    assert_complete(&out, &[8, 4096], [&[a, b], &[b, a]], 2);
    pair_points(&out).iter().for_each(|point| point.assert_measured(3));

    // A complete run is a no-op for both.
    let [again0, again1] = finish(&place, both(&place, &format!("{line} --resume")));
    assert_whole(&again0);
    assert_eq!(again1.code, Some(0), "{again1:?}");
    assert_eq!((&again0.stdout, again1.stdout.as_str()), (&rank0.stdout, ""));

    let line = format!("h2d --backend host --cpus {a} --sizes 64KiB --repeats 1 --out @h2d");
    let [rank0, rank1] = finish(&place, both(&place, &line));
    assert_whole(&rank0);
    assert_eq!(rank1.code, Some(0), "{rank1:?}");
    assert!(rank1.stdout.is_empty() && rank1.stderr.contains("rank 1"), "{rank1:?}");
    assert_eq!(Csv::read(&place.path("h2d/h2d-64KiB.csv")).measured(), 1);

    let line = format!(
        "all --backend host --cpus {a} --sizes 64KiB --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 1 --out @all"
    );
    let [rank0, rank1] = finish(&place, both(&place, &line));
    assert_whole(&rank0);
    assert_eq!(rank1.code, Some(0), "{rank1:?}");
    assert!(rank1.stdout.is_empty(), "{rank1:?}");
    assert_complete(&place.path("all"), &[8 << 20], [&[a], &[b]], 1);
}

#[test]
fn mpirun_runs_every_sweep() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let mpirun = |line: &str| {
        let sweep = place.command(line);
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", "2"]);
        command.arg(sweep.get_program()).args(sweep.get_args());
        command.env("XDG_RUNTIME_DIR", meeting(&place));
        command
    };
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: no mpirun");
        return;
    }
    let line = format!("{} --json", small([a, b]));
    let ran = Ran::of(&mut mpirun(&line));
    assert_whole(&ran);
    // One document: rank 1 printed nothing.
    assert_eq!(ran.json()["status"], "complete");
    assert_nothing_left(&place);
    let out = place.path("out");
    assert_complete(&out, &[8, 4096], [&[a, b], &[b, a]], 2);
    pair_points(&out).iter().for_each(|point| point.assert_measured(3));

    let ran = Ran::of(&mut mpirun(&format!("{line} --resume")));
    assert_whole(&ran);
    assert_eq!(ran.json()["status"], "complete");

    let line = format!("h2d --backend host --cpus {a} --sizes 64KiB --repeats 1 --json --out @h2d");
    let ran = Ran::of(&mut mpirun(&line));
    assert_whole(&ran);
    assert_eq!(ran.json()["points"]["measured"], lines(&place.path("h2d")).len());

    let line = format!(
        "all --backend host --cpus {a} --sizes 64KiB --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 1 --json --out @all"
    );
    let ran = Ran::of(&mut mpirun(&line));
    assert_whole(&ran);
    assert_eq!(ran.json()["status"], "complete");
    assert_complete(&place.path("all"), &[8 << 20], [&[a], &[b]], 1);
    assert_nothing_left(&place);
}

#[test]
fn torchrun_inside_a_slurm_step_decides() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    // A step of four tasks, in one of which torchrun starts two ranks.
    let ranks = [0, 1].map(|rank| {
        let mut command = torchrun(&place, rank, &small([a, b]));
        for (name, value) in [
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "3"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_TASKS_PER_NODE", "4"),
            ("SLURM_NODEID", "0"),
        ] {
            command.env(name, value);
        }
        Running::start(&place, &rank.to_string(), command)
    });
    let [rank0, rank1] = finish(&place, ranks);
    assert_whole(&rank0);
    assert_eq!(rank1.code, Some(0), "{rank1:?}");
    assert_complete(&place.path("out"), &[8, 4096], [&[a, b], &[b, a]], 2);
}

#[test]
fn ranks_by_hand_override_the_environment() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    // Rank 1 of a job whose rank 0 never comes, if it were asked.
    let line = format!("{} --ranks local --timeout 60s", small([a, b]));
    let ran = Running::start(&place, "local", torchrun(&place, 1, &line)).end();
    assert_whole(&ran);
    assert_complete(&place.path("out"), &[8, 4096], [&[a, b], &[b, a]], 2);
    assert_nothing_left(&place);

    let ran = place.run(&format!("{} --force --ranks env --json", small([a, b])));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let error = &ran.json()["error"];
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["kind"], "invalid");
    assert!(message.contains("--ranks") && message.contains("torchrun"), "{message}");
    assert_eq!(json(&place.path("out/run.json"))["status"], "complete", "nothing was replaced");
}

#[test]
fn f23_a_rank_that_does_not_come() {
    let Some(cpus) = two_cpus() else { return };
    for (present, missing) in [(0, 1), (1, 0)] {
        let place = Place::new();
        let line = format!("{} --json --timeout 1s", small(cpus));
        let running = Running::start(&place, "alone", torchrun(&place, present, &line));
        let ran = running.end_within(Duration::from_secs(1 + 1) + SLACK);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        let error = &ran.json()["error"];
        assert_eq!((&error["kind"], &error["rank"]), (&"timeout".into(), &missing.into()));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("rank {missing}")), "{message}");
        assert!(message.contains("--timeout"), "{message}");
        assert_nothing_left(&place);
        assert!(!place.path("out").exists(), "nothing was begun");
    }
}

#[test]
fn ranks_with_different_plans_are_refused() {
    let Some(cpus) = two_cpus() else { return };
    let place = Place::new();
    let line = format!("{} --json", small(cpus));
    let other = line.replace("4KiB", "1KiB");
    let ranks = [(0, &line), (1, &other)].map(|(rank, line)| {
        Running::start(&place, &rank.to_string(), torchrun(&place, rank, line))
    });
    for ran in finish(&place, ranks) {
        assert_eq!(ran.code, Some(2), "{ran:?}");
        let error = &ran.json()["error"];
        assert_eq!(error["kind"], "invalid", "{ran:?}");
        let message = error["message"].as_str().unwrap();
        for part in ["the plan", "4096", "1024", "rank 0", "rank 1"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
    assert_eq!(lines(&place.path("out")).len(), 0);
}

/// A sweep that takes a moment.
fn long([a, b]: [u32; 2]) -> String {
    format!(
        "core-pair --quiet --json --backend host --sizes 8B --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 100 --iters 400 --warmup 1 --timeout 60s --out @out"
    )
}

#[test]
fn a_launched_rank_that_is_killed_is_named_by_the_other() {
    let Some([a, b]) = two_cpus() else { return };
    for victim in [0, 1] {
        let place = Place::new();
        let line = long([a, b]);
        let [mut rank0, rank1] = both(&place, &line);
        rank0.wait_for_points(5);
        signal(if victim == 0 { rank0.id() } else { rank1.id() }, libc::SIGKILL);
        let ranks = [rank0.end_within(SLACK), rank1.end_within(SLACK)];
        assert_eq!(ranks[victim].code, None, "killed");
        let other = &ranks[1 - victim];
        assert_eq!(other.code, Some(2), "{other:?}");
        let error = &other.json()["error"];
        assert_eq!((&error["kind"], &error["rank"]), (&"rank".into(), &victim.into()));
        assert_nothing_left(&place);
        let measured = pair_points(&place.path("out")).len();
        assert!((5..100).contains(&measured), "{measured}");
        let [rank0, rank1] = finish(&place, both(&place, &format!("{line} --resume")));
        assert_whole(&rank0);
        assert_eq!(rank1.code, Some(0), "{rank1:?}");
        assert_complete(&place.path("out"), &[8], [&[a], &[b]], 100);
    }
}

#[test]
fn ctrl_c_ends_launched_ranks() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = long([a, b]);
    let [mut rank0, rank1] = both(&place, &line);
    rank0.wait_for_points(5);
    signal(rank0.id(), libc::SIGINT);
    signal(rank1.id(), libc::SIGINT);
    let [rank0, rank1] = finish(&place, [rank0, rank1]);
    assert_eq!((rank0.code, rank1.code), (Some(1), Some(1)), "{rank0:?} {rank1:?}");
    assert_eq!(json(&place.path("out/run.json"))["status"], "interrupted");
    let [rank0, rank1] = finish(&place, both(&place, &format!("{line} --resume")));
    assert_whole(&rank0);
    assert_eq!(rank1.code, Some(0), "{rank1:?}");
    assert_complete(&place.path("out"), &[8], [&[a], &[b]], 100);

    // While rank 0 measures copies and rank 1 waits for its turn.
    let place = Place::new();
    let line = format!(
        "all --quiet --backend host --cpus {a} --sizes 64KiB --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 2000 --out @out"
    );
    let [mut rank0, rank1] = both(&place, &line);
    rank0.wait_for_points(5);
    signal(rank0.id(), libc::SIGINT);
    signal(rank1.id(), libc::SIGINT);
    let [rank0, rank1] = finish(&place, [rank0, rank1]);
    assert_eq!((rank0.code, rank1.code), (Some(1), Some(1)), "{rank0:?} {rank1:?}");
    assert_eq!(pair_points(&place.path("out")), []);
}

#[test]
fn f11_the_meeting_place_of_a_dead_run_does_not_disturb() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let line = small([a, b]);
    let waiting = Running::start(&place, "dead", torchrun(&place, 0, &line));
    let sockets = || {
        let users = fs::read_dir(place.path("meet")).unwrap().flatten();
        let jobs = users.filter_map(|user| fs::read_dir(user.path()).ok()).flatten().flatten();
        jobs.filter_map(|job| fs::read_dir(job.path()).ok()).flatten().flatten().count()
    };
    wait_for("a socket", || (sockets() > 0).then_some(()));
    // A moment, so that it listens.
    thread::sleep(Duration::from_millis(50));
    signal(waiting.id(), libc::SIGKILL);
    waiting.end_within(SLACK);
    assert_eq!(sockets(), 1, "a killed rank cannot clean up");
    let [rank0, rank1] = finish(&place, both(&place, &line));
    assert_whole(&rank0);
    assert_eq!(rank1.code, Some(0), "{rank1:?}");
    assert_complete(&place.path("out"), &[8, 4096], [&[a, b], &[b, a]], 2);
}
