//! What the program says about a machine, on machines whose faults were planted.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Place, QUIET, Ran, close, contents, json};

/// 32 CPUs in 16 cores, two nodes, four devices, ordinary noise.
const MACHINE: &str = "[machine]\ncpus = 32\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n\
                       [h2d]\nnoise = 0.01\n[all_gather]\nnoise = 0.01\n";
const SLOW_DEVICE: &str =
    "[[fault]]\nkind = \"slow_device\"\nsweep = \"h2d\"\ndevices = \"2\"\nfactor = 0.8\n";

const H2D: &str = "h2d --backend synthetic:@machine.toml --sizes 16MiB,64MiB --out @out --quiet";

fn kinds(document: &Value) -> Vec<&str> {
    document["findings"].as_array().unwrap().iter().map(|f| f["kind"].as_str().unwrap()).collect()
}

/// The three lines that an operator pastes into a ticket.
fn three_lines(text: &str) -> [&str; 3] {
    let mut lines = text.lines();
    let three = [(); 3].map(|()| lines.next().unwrap());
    for (line, word) in three.iter().zip(["**Verdict: ", "**Strongest:** ", "**Do:** "]) {
        assert!(line.starts_with(word), "{line}");
    }
    assert!(three[2].contains("**Not tested:** "), "{}", three[2]);
    three
}

#[test]
fn a_slow_device_is_found_named_and_measured() {
    let place = Place::with_machine(&format!("{MACHINE}{SLOW_DEVICE}"));
    let ran = place.run(&format!("{H2D} --json"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let swept = ran.json();
    assert_eq!((&swept["verdict"], kinds(&swept)), (&"findings".into(), vec!["slow_device"]));
    assert_eq!(json(&place.path("out/run.json"))["verdict"], "findings");

    let ran = place.run("diagnose @out --json");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{ran:?}");
    let document = ran.json();
    assert_eq!(document["schema_version"], 1);
    assert_eq!(document["findings"], swept["findings"]);
    let finding = &document["findings"][0];
    let lists = ["devices", "cpus", "rank0_cpus", "rank1_cpus", "numa_nodes"];
    let members = lists.map(|list| finding[list].to_string());
    assert_eq!(members, ["[2]", "[]", "[]", "[]", "[]"]);
    assert_eq!((&finding["sweep"], &finding["load"]), (&"h2d".into(), &"idle".into()));
    // 64 MiB at 58.5 GB/s and 12 us: 1.1592 ms, at 0.8 of that rate 1.4459 ms.
    let effect = &finding["effect"];
    let [ratio, low, high] = ["ratio", "low", "high"].map(|name| effect[name].as_f64().unwrap());
    assert!((ratio - 1.1592 / 1.4459).abs() < 0.02 && low < ratio && ratio < high, "{effect}");
    assert_eq!(finding["scales_with_bytes"], true);
    assert_eq!(finding["is_artefact"], false);
    let [seen, of] = ["seen", "of"].map(|name| finding["replicates"][name].as_u64().unwrap());
    assert!(seen >= 5 && of == 6, "{finding}");
    for text in ["inference", "next"] {
        assert!(!finding[text].as_str().unwrap().is_empty());
    }
    assert!(!finding["facts"].as_array().unwrap().is_empty());

    // The visits that it rests on were made after the blocks, and are in no matrix.
    let text = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let confirming = lines.iter().position(|line| line["phase"] == "confirm").unwrap();
    assert!(lines[confirming..].iter().all(|line| line["phase"] == "confirm"));
    let summary = &swept["summary"];
    assert_eq!((&summary[0]["count"], &summary[1]["count"]), (&128.into(), &128.into()));
}

#[test]
fn a_healthy_machine_is_healthy_and_says_what_it_could_have_seen() {
    let place = Place::with_machine(QUIET);
    let ran = place.run(H2D);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.contains("**Verdict: healthy**"), "{}", ran.stdout);
    let ran = place.run("diagnose @out --json");
    assert_eq!(ran.code, Some(0));
    let document = ran.json();
    assert_eq!((&document["verdict"], kinds(&document)), (&"healthy".into(), vec![]));
    let tested = document["tested"].to_string();
    for part in ["64MiB", "device", "cpu", "slower by"] {
        assert!(tested.contains(part), "{tested}");
    }
    let missing = document["not_tested"].to_string();
    for part in ["bare communication", "load", "--expect", "framework"] {
        assert!(missing.contains(part), "{missing}");
    }
    let log = fs::read_to_string(place.path("out/samples.jsonl")).unwrap();
    assert!(!log.contains("\"confirm\""), "nothing was suspected");
}

#[test]
fn facts_inference_and_what_was_not_tested_stand_apart() {
    let place = Place::with_machine(&format!(
        "{MACHINE}{SLOW_DEVICE}[[fault]]\nkind = \"same_core\"\nfactor = 0.5\n"
    ));
    let ran = place
        .run("all --backend synthetic:@machine.toml --sizes 16MiB,64MiB --out @out --quiet --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let mut found = kinds(&ran.json()).join(" ");
    assert_eq!(found, "same_core slow_device", "the larger effect first");

    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    let [verdict, strongest, todo] = three_lines(&report);
    assert!(verdict.contains("findings") && verdict.contains("2 findings"), "{verdict}");
    assert!(strongest.contains("same_core"), "{strongest}");
    assert!(todo.contains("training-state load"), "{todo}");

    // Sections, and the stages of triage in their order.
    let headings: Vec<&str> = report.lines().filter(|line| line.starts_with("##")).collect();
    let at = |start: &str| {
        let found = headings.iter().position(|heading| heading.starts_with(start));
        found.unwrap_or_else(|| panic!("{start}: {headings:?}"))
    };
    let order = [
        "## Facts",
        "### 1. Bare communication",
        "### 2. Host path",
        "### 3. Placement",
        "### 4. Training-state load",
        "### 5. Framework",
        "## Inference",
        "## Not tested",
        "## What was measured",
    ];
    assert!(order.map(at).is_sorted(), "{headings:?}");
    let host_path = report.split("### 2. ").nth(1).unwrap().split("### 3. ").next().unwrap();
    assert!(host_path.contains("slow_device, device 2"), "{host_path}");
    let placement = report.split("### 3. ").nth(1).unwrap().split("### 4. ").next().unwrap();
    assert!(placement.contains("same_core"), "{placement}");

    // Every link leads somewhere.
    let mut links = 0;
    for target in report.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        links += 1;
        match target.strip_prefix('#') {
            Some(anchor) => {
                let slug = |heading: &&str| {
                    heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-")
                };
                assert!(headings.iter().map(slug).any(|slug| slug == anchor), "{target}");
            }
            None => assert!(place.path("out").join(target).exists(), "{target}"),
        }
    }
    assert!(links > 10, "{links}");
    for picture in ["h2d-64MiB.png", "core-pair-8MiB.png"] {
        let page = report.split("## Not tested").next().unwrap();
        assert!(page.contains(&format!("]({picture})")), "{picture}");
    }

    // The same page without a folder being touched.
    let before = contents(&place.path("out"));
    let ran = place.run("diagnose @out");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{ran:?}");
    assert!(report.starts_with(&ran.stdout), "{}", ran.stdout);
    found = kinds(&place.run("diagnose @out --json").json()).join(" ");
    assert_eq!(found, "same_core slow_device");
    assert_eq!(contents(&place.path("out")), before);
    // Making the outputs again changes nothing that was said, and is no judgement: exit code 0.
    let ran = place.run("report @out");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(fs::read_to_string(place.path("out/report.md")).unwrap(), report);
}

#[test]
fn an_expected_rate_is_held_against_the_whole_node() {
    let place = Place::with_machine(QUIET);
    assert_eq!(place.run(H2D).code, Some(0));
    let ran = place.run("diagnose @out --expect 70GB/s --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let document = ran.json();
    assert_eq!(kinds(&document), ["node_ceiling"]);
    // The 12 us of latency are no part of the link's rate.
    let ratio = document["findings"][0]["effect"]["ratio"].as_f64().unwrap();
    assert!(close(ratio, 58.5 / 70.0, 1e-3), "{ratio}");
    assert!(!document["not_tested"].to_string().contains("absolute level"));
    assert_eq!(place.run("diagnose @out --expect 58.5GB/s").code, Some(0));
    let mut command = place.command("diagnose @out");
    assert_eq!(Ran::of(command.env("CLUSTER_HEALTH_EXPECT", "70")).code, Some(1));
    for rate in ["fast", "-1", "0GB/s", "12kg"] {
        let ran = place.run(&format!("diagnose @out --json --expect={rate}"));
        assert_eq!(ran.code, Some(2), "{rate}: {ran:?}");
        let error = &ran.json()["error"];
        assert!(error["message"].as_str().unwrap().contains("--expect"), "{error}");
    }
}

#[test]
fn the_rate_of_copies_is_not_held_against_pairs() {
    let place = Place::with_machine(&format!("{QUIET}[all_gather]\nnoise = 0\n"));
    let all = "all --backend synthetic:@machine.toml --sizes 64MiB --out @out --quiet";
    assert_eq!(place.run(all).code, Some(0));
    // Pairs reach 46 GB/s per rank at most.
    assert_eq!(place.run("diagnose @out --expect 58.5GB/s").code, Some(0));
    let document = place.run("diagnose @out --expect 70GB/s --json").json();
    assert_eq!(document["findings"].as_array().unwrap().len(), 1, "{document}");
    assert_eq!(document["findings"][0]["sweep"], "h2d");

    let pairs = "core-pair --backend synthetic:@machine.toml --out @pairs --quiet";
    assert_eq!(place.run(pairs).code, Some(0));
    let document = place.run("diagnose @pairs --expect 58.5GB/s --json").json();
    assert_eq!(document["findings"][0]["sweep"], "core_pair");
}

#[test]
fn what_is_no_result_folder_is_refused() {
    let place = Place::new();
    fs::create_dir(place.path("empty")).unwrap();
    for dir in ["empty", "none"] {
        let ran = place.run(&format!("diagnose @{dir} --json"));
        assert_eq!(ran.code, Some(2), "{ran:?}");
        let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
        for part in [dir, "run.json", "no result folder"] {
            assert!(message.contains(part), "{message}");
        }
        assert!(ran.stderr.contains("no result folder"), "{ran:?}");
    }
    assert!(contents(&place.path("empty")).is_empty() && !place.path("none").exists());
    for line in ["diagnose", "diagnose @a @b", "diagnose @a --out @b"] {
        assert_eq!(place.run(line).code, Some(2), "{line}");
    }
}

/// The log of a run that was killed in the middle of a line.
#[test]
fn a_torn_log_is_read_up_to_its_tear_and_is_not_healthy_by_silence() {
    let place = Place::with_machine(QUIET);
    assert_eq!(place.run(H2D).code, Some(0));
    let log = place.path("out/samples.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, &text[..text.len() / 2]).unwrap();
    let manifest = fs::read_to_string(place.path("out/run.json")).unwrap();
    let running = manifest.replace("\"complete\"", "\"running\"");
    assert_ne!(running, manifest);
    fs::write(place.path("out/run.json"), running).unwrap();

    let before = contents(&place.path("out"));
    let ran = place.run("diagnose @out --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("samples.jsonl, line"), "{}", ran.stderr);
    let document = ran.json();
    assert_eq!(
        (&document["verdict"], kinds(&document)),
        (&"inconclusive".into(), vec!["inconclusive"])
    );
    let page = place.run("diagnose @out");
    assert!(three_lines(&page.stdout)[0].contains("unfinished"), "{}", page.stdout);
    assert_eq!(contents(&place.path("out")), before);

    fs::write(&log, "").unwrap();
    let ran = place.run("diagnose @out --json");
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("nothing could be measured"), "{message}");
}

/// While a run writes its folder it can be looked at.
#[test]
fn a_running_folder_can_be_diagnosed() {
    let place = Place::new();
    let mut child = place
        .command("h2d --backend host --sizes 4MiB --repeats 10000 --check off --out @out --quiet")
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let log = place.path("out/samples.jsonl");
    while fs::metadata(&log).map_or(0, |log| log.len()) < 4096 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let ran = place.run("diagnose @out --json");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(kinds(&ran.json()).contains(&"inconclusive"), "{ran:?}");
}

#[test]
fn holes_are_not_healthy_either() {
    let failure = "[[failure]]\nkind = \"bind_refused\"\nrank = 0\ncpus = \"3\"\n";
    let place = Place::with_machine(&format!("{QUIET}{failure}"));
    assert_eq!(place.run(H2D).code, Some(1));
    assert_eq!(place.run("diagnose @out").code, Some(1));
    // Commands that do not judge.
    for line in [
        "report @out",
        "export @out --format clusterhealthdetect --out @older",
        "plan --backend synthetic:@machine.toml",
        "affinity --backend synthetic:@machine.toml",
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
    }
}

#[test]
fn wrong_data_comes_before_slowness() {
    let place = Place::with_machine(&format!(
        "{MACHINE}{SLOW_DEVICE}[[fault]]\nkind = \"data_corruption\"\nsweep = \"h2d\"\n\
         cpus = \"5\"\nfactor = 1\n"
    ));
    let ran = place.run(&format!("{H2D} --json"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let document = ran.json();
    assert_eq!(kinds(&document), ["data_corruption", "slow_device"]);
    assert_eq!(document["findings"][0]["cpus"], serde_json::json!([5]));
}

#[test]
fn the_smallest_effect_is_a_share() {
    let place = Place::with_machine(&format!(
        "{}[[fault]]\nkind = \"slow_device\"\nsweep = \"h2d\"\ndevices = \"2\"\nfactor = 0.9\n",
        MACHINE
    ));
    for share in ["0", "0%", "100%", "1", "nan", "-3%", "3", "much"] {
        let ran = place
            .run(&format!("plan --backend synthetic:@machine.toml --json --min-effect={share}"));
        assert_eq!(ran.code, Some(2), "{share}: {ran:?}");
        let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("--min-effect"), "{message}");
        assert!(message.contains("3%") || message.contains("2%"), "an example: {message}");
    }
    assert_eq!(place.run(H2D).code, Some(1));
    let manifest = json(&place.path("out/run.json"));
    // The default is left out, so that a run of an older version can be resumed.
    assert!(
        manifest["plan"]["h2d"]["min_effect"]
            .as_f64()
            .is_none_or(|share| close(share, 0.03, 1e-12))
    );
    // A tenth less is nothing to who asks for a fifth.
    let ran = place.run(&format!("{H2D} --force --min-effect 20%"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(json(&place.path("out/run.json"))["plan"]["h2d"]["min_effect"], 0.2);
    // It is part of the plan.
    let ran = place.run(&format!("{H2D} --resume"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("min_effect"), "{ran:?}");
}

#[test]
fn plans_say_what_confirmation_may_cost() {
    let place = Place::with_machine(MACHINE);
    let plan =
        |options: &str| place.run(&format!("plan --backend synthetic:@machine.toml {options}"));
    let text = plan("").stdout;
    // Six visits of 32 × 4 cells at three sizes.
    for part in ["visited 6 more times", "never more than 2304", "below 3.00 %"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(plan("--json").json()["confirming_points_at_most"], 2304);
    assert_eq!(plan("--json --order sequential").json()["confirming_points_at_most"], 0);
    assert_eq!(plan("--sweep core-pair --json").json()["confirming_points_at_most"], 6 * 32 * 32);

    let faulty = Place::with_machine(&format!("{MACHINE}{SLOW_DEVICE}"));
    assert_eq!(faulty.run(&H2D.replace("16MiB,64MiB", "16MiB,64MiB,256MiB")).code, Some(1));
    let log = fs::read_to_string(faulty.path("out/samples.jsonl")).unwrap();
    let visits = log.lines().filter(|line| line.contains("\"phase\":\"confirm\"")).count();
    assert!((1..=2304).contains(&visits), "{visits}");
}

#[test]
fn cpus_that_are_as_another_node_put_the_topology_in_doubt() {
    let faults = |apart: &str| {
        let fault = |cpus: &str, factor: &str| {
            format!(
                "[[fault]]\nkind = \"slow_core\"\nsweep = \"h2d\"\ncpus = \"{cpus}\"\n\
                 factor = {factor}\n"
            )
        };
        // The second node, and two CPUs that are said to be of the first.
        fault("16-31", "0.8") + &fault("2-3", apart)
    };
    for (apart, doubted) in [("0.8", true), ("0.5", false)] {
        let place = Place::with_machine(&format!("{MACHINE}{}", faults(apart)));
        let found = place.run(&format!("{H2D} --json")).json();
        let at = kinds(&found).iter().position(|kind| *kind == "slow_core").unwrap();
        assert_eq!((at < 2, kinds(&found)[1 - at]), (true, "numa_effect"), "{found}");
        // Most CPUs are slow here: the rest is what is not suspected, not the middle of all.
        let node = &found["findings"][1 - at]["effect"]["ratio"];
        assert!((node.as_f64().unwrap() - 0.803).abs() < 0.02, "{node}");
        let slow = &found["findings"][at];
        assert_eq!(slow["cpus"].to_string(), "[2,3]");
        let says =
            slow["facts"].to_string().contains("not of NUMA node 1 by the kernel's topology");
        assert_eq!(says, doubted, "{slow}");
    }
}

/// Devices that become slow early in a run of two CPUs, whose visits are few.
#[test]
fn devices_that_became_slow_in_mid_run_are_no_slow_devices() {
    const SMALL: &str = "[machine]\ncpus = 2\ndevices = 8\n[h2d]\nnoise = 0.02\n";
    let changed = |at_point: u32, devices: &str| {
        format!(
            "{SMALL}[[artefact]]\nkind = \"time_step\"\nat_point = {at_point}\n\
             extra_ms = 0.5\ndevices = \"{devices}\"\n"
        )
    };
    let mut told = 0;
    for (at_point, devices) in [(20, "1,6"), (30, "2,5,7"), (45, "0,3,4")] {
        for seed in 1..=4 {
            let place = Place::with_machine(&changed(at_point, devices));
            let found = place.run(&format!("{H2D} --json --seed {seed}")).json();
            assert!(!kinds(&found).contains(&"slow_device"), "{at_point} {seed}: {found}");
            told += usize::from(kinds(&found).contains(&"time_step"));
        }
    }
    assert_eq!(told, 12);
    let slow = "[[fault]]\nkind = \"slow_device\"\nsweep = \"h2d\"\ndevices = \"0,3\"\n";
    let place = Place::with_machine(&format!("{SMALL}{slow}factor = 0.7\n"));
    let found = place.run(&format!("{H2D} --json")).json();
    assert_eq!(kinds(&found), ["slow_device"], "{found}");
    assert_eq!(found["findings"][0]["devices"].to_string(), "[0,3]");
}

/// Two CPUs are too few for a node of their own, but not beside a larger one that is as they are.
#[test]
fn nodes_of_one_rate_are_one_finding() {
    const NODES: &str = "[machine]\ncpus = 18\nsmt = 1\nnuma_nodes = 4\ndevices = 4\n\
                         [h2d]\nnoise = 0.01\n";
    let place = Place::with_machine(NODES);
    place.run(&format!("{H2D} --json"));
    let census = json(&place.path("out/affinity.json"));
    let nodes: Vec<u64> = census["cpus"]
        .as_array()
        .unwrap()
        .iter()
        .map(|cpu| cpu["numa_node"].as_u64().unwrap())
        .collect();
    let last: Vec<String> =
        (0..18).filter(|&cpu| nodes[cpu] == 3).map(|cpu| cpu.to_string()).collect();
    let first: Vec<String> =
        (0..18).filter(|&cpu| nodes[cpu] == 1).map(|cpu| cpu.to_string()).collect();
    let (usable, whole) = ([&last[..2], &first[..]].concat(), [&first[..], &last[..2]].concat());
    let machine = format!(
        "{NODES}[[fault]]\nkind = \"slow_core\"\nsweep = \"h2d\"\ncpus = \"{}\"\nfactor = 0.8\n",
        usable.join(",")
    );
    let others: Vec<String> =
        (0..18).map(|cpu| cpu.to_string()).filter(|cpu| !last[2..].contains(cpu)).collect();
    let place = Place::with_machine(&machine);
    let found = place.run(&format!("{H2D} --json --cpus {}", others.join(","))).json();
    assert_eq!(kinds(&found), ["numa_effect"], "{found}");
    assert_eq!(found["findings"][0]["numa_nodes"].to_string(), "[1,3]");
    assert_eq!(found["findings"][0]["cpus"].to_string(), format!("[{}]", whole.join(",")));
}
