//! `policies`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::ascend_cli;
use crate::ranks::{allowed, assert_nothing_left, meeting};
use crate::support::{MIB, Place, QUIET, Ran, close, json as read, names, openpyxl};

/// 16 CPUs, 0–7 on node 0 and 8–15 on node 1, four devices, 50 GB/s after 10 µs; copies from node 1 at
/// half the rate.
fn scenario(noise: &str) -> String {
    format!(
        "[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n\
         [h2d]\ngbps = 50\nlatency_us = 10\nnoise = {noise}\n\
         [all_gather]\ngbps = 40\nlatency_us = 20\nnoise = {noise}\n\
         [[fault]]\nkind = \"slow_core\"\ncpus = \"8-15\"\nfactor = 0.5\n"
    )
}

const SYNTHETIC: &str = "policies --quiet --json --backend synthetic:@machine.toml --out @out";

fn lines<'a>(sweep: &'a Value, operation: &'a str) -> impl Iterator<Item = &'a Value> {
    sweep["lines"].as_array().unwrap().iter().filter(move |line| line["operation"] == operation)
}

fn line<'a>(sweep: &'a Value, operation: &'a str, policy: &str, memory: &Value) -> &'a Value {
    lines(sweep, operation)
        .find(|line| line["policy"] == policy && line["memory"] == *memory)
        .unwrap_or_else(|| panic!("no {operation} {policy} {memory}"))
}

fn visits(sweep: &Value) -> Vec<(&Value, &Value, &Value)> {
    let mut found = Vec::new();
    for line in sweep["lines"].as_array().unwrap() {
        for rank in line["per_rank"].as_array().unwrap() {
            for visit in rank["visits"].as_array().unwrap() {
                found.push((line, rank, visit));
            }
        }
    }
    found
}

fn is(value: &Value, expected: f64) {
    let found = value.as_f64().unwrap_or_else(|| panic!("{value} for {expected}"));
    // Times are whole nanoseconds.
    assert!(close(found, expected, 1e-3), "{found}, not {expected}");
}

/// Ids of a list as the kernel writes it.
fn ids(list: &str) -> BTreeSet<u32> {
    list.trim()
        .split(',')
        .flat_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            first.parse::<u32>().unwrap()..=last.parse::<u32>().unwrap()
        })
        .collect()
}

#[test]
fn a_slow_node_shows_under_the_policies_that_use_it() {
    let place = Place::with_machine(&scenario("0"));
    let ran = place.run(&format!("{SYNTHETIC} --sizes 16MiB"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    assert_eq!(sweep, read(&place.path("out/policies.json")));
    let size = (16 * MIB) as f64;
    let (healthy, slow) = (size / (10_000.0 + size / 50.0), size / (10_000.0 + size / 25.0));
    let gather = size / (20_000.0 + size / 40.0);
    // Slowest and fastest rank, where they run, and the claim.
    let expected = [
        ("none", healthy, healthy, "0", Value::Null),
        ("all", healthy, healthy, "0", Value::Null),
        ("local_rank", slow, healthy, "0,4,8,12", json!("slower")),
        ("numa:0", healthy, healthy, "0", Value::Null),
        ("numa:1", slow, slow, "8", json!("slower")),
        ("numa:0:shard", healthy, healthy, "0,2,4,6", Value::Null),
        ("numa:1:shard", slow, slow, "8,10,12,14", json!("slower")),
    ];
    for memory in ["bound", "first_touch"].map(Value::from) {
        for (policy, min, max, cpus, claim) in &expected {
            let line = line(&sweep, "h2d", policy, &memory);
            assert_eq!((&line["status"], &line["ranks"]), (&json!("measured"), &json!(4)));
            assert_eq!((&line["convention"], &line["unit"]), (&json!("per_rank"), &json!("GB/s")));
            is(&line["min"], *min);
            is(&line["max"], *max);
            // Of the four ranks.
            is(&line["median"], (min + max) / 2.0);
            let ran_on: Vec<&str> = line["per_rank"]
                .as_array()
                .unwrap()
                .iter()
                .map(|rank| rank["ran_on"].as_str().unwrap())
                .collect();
            assert_eq!(ids(&ran_on.join(",")), ids(cpus), "{policy}");
            if *policy == "none" {
                assert_eq!(line["to_none"], Value::Null);
                continue;
            }
            let ratio = &line["to_none"];
            for name in ["ratio", "low", "high"] {
                is(&ratio[name], (min + max) / 2.0 / healthy);
            }
            assert_eq!((&ratio["claim"], &ratio["blocks"]), (claim, &json!(3)), "{policy}");
        }
    }
    // The fault is one of copies; the first two ranks gather.
    for (policy, ..) in &expected {
        let line = line(&sweep, "all_gather", policy, &Value::Null);
        assert_eq!(line["ranks"], 2);
        is(&line["median"], gather);
        is(&line["collective"], gather);
        assert!(line["to_none"]["claim"].is_null());
    }
    for line in lines(&sweep, "d2d_same_device") {
        assert_eq!((&line["status"], &line["memory"]), (&json!("not_available"), &Value::Null));
    }
    // By hand: half of 8 and a quarter of 16 CPUs.
    let rank2 = &sweep["ranks"][2];
    let of = |policy: &str| {
        let found = rank2["policies"].as_array().unwrap().iter().find(|of| of["policy"] == policy);
        found.unwrap()["cpus"].clone()
    };
    assert_eq!(of("none"), Value::Null);
    assert_eq!(of("local_rank"), "8-11");
    assert_eq!(of("numa:1:shard"), "12-13");
    assert_eq!(rank2["inherited"], "0-15");
}

#[test]
fn every_block_has_everything_once_in_an_order_of_its_own() {
    let place = Place::with_machine(&scenario("0.02"));
    let ran = place.run(&format!("{SYNTHETIC} --sizes 64KiB,1MiB --repeats 4 --operations h2d"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let mut seqs = BTreeSet::new();
    let mut blocks = BTreeMap::<u64, Vec<(u64, String)>>::new();
    for (line, rank, visit) in visits(&sweep) {
        let seq = visit["seq"].as_u64().unwrap();
        assert!(seqs.insert(seq), "every copy of a rank has a number of its own");
        let name = ["policy", "memory", "bytes"].map(|field| line[field].to_string()).join(" ");
        let block = blocks.entry(visit["block"].as_u64().unwrap()).or_default();
        block.push((seq, format!("{name} {}", rank["rank"])));
    }
    assert_eq!(blocks.len(), 4);
    let mut orders = BTreeSet::new();
    let mut end = 0;
    for points in blocks.values_mut() {
        points.sort_unstable();
        // 7 policies, 2 memories, 2 sizes, 4 ranks; no block begins before the last one ended.
        assert_eq!(points.len(), 7 * 2 * 2 * 4);
        assert_eq!((points[0].0, points.last().unwrap().0), (end, end + 111));
        end += 112;
        let order: Vec<String> = points.iter().map(|point| point.1.clone()).collect();
        assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 112);
        orders.insert(order);
    }
    assert_eq!(orders.len(), 4);
}

#[test]
fn nothing_is_claimed_where_the_interval_holds_1() {
    let healthy = scenario("0.03").split("[[fault]]").next().unwrap().to_owned();
    let mut wrong = 0;
    for seed in 1..=20 {
        let place = Place::with_machine(&healthy);
        let line = "--sizes 1MiB,16MiB --operations h2d,all_gather";
        let sweep = place.run(&format!("{SYNTHETIC} {line} --seed {seed}")).json();
        let mut claims = 0;
        for line in sweep["lines"].as_array().unwrap() {
            let ratio = &line["to_none"];
            if ratio.is_null() {
                continue;
            }
            let (low, high) = (ratio["low"].as_f64().unwrap(), ratio["high"].as_f64().unwrap());
            assert!(low <= ratio["ratio"].as_f64().unwrap() && low < high);
            claims += u32::from(!ratio["claim"].is_null());
            assert!(ratio["claim"].is_null() || low > 1.0 || high < 1.0, "{line}");
        }
        wrong += u32::from(claims > 0);
    }
    // One sweep in twenty at most, on average, says anything at all where there is nothing.
    assert!(wrong <= 4, "{wrong} of 20 healthy machines");

    // One block tells no interval and claims nothing.
    let place = Place::with_machine(&scenario("0"));
    let sweep = place.run(&format!("{SYNTHETIC} --sizes 16MiB --repeats 1")).json();
    let ratio = &line(&sweep, "h2d", "numa:1", &json!("bound"))["to_none"];
    assert!(ratio["ratio"].as_f64().unwrap() < 0.6);
    assert_eq!([&ratio["low"], &ratio["high"], &ratio["claim"]], [&Value::Null; 3]);
    // Without the unbound thread there is nothing to compare with.
    let options = "--sizes 1MiB --policies all,cpu:3,8 --force";
    let sweep = place.run(&format!("{SYNTHETIC} {options}")).json();
    assert!(sweep["lines"].as_array().unwrap().iter().all(|line| line["to_none"].is_null()));
    assert_eq!(line(&sweep, "h2d", "cpu:3,8", &json!("bound"))["per_rank"][0]["ran_on"], "3");
}

#[test]
fn a_policy_that_is_refused_is_skipped_with_the_errno() {
    let refused = "[[failure]]\nkind = \"bind_refused\"\nrank = 0\ncpus = \"8-15\"\n";
    let place = Place::with_machine(&format!("{}{refused}", scenario("0")));
    // Both devices are on node 0: memory bound for an unbound thread lies there, too.
    let options = "--sizes 1MiB --policies none,numa:1,numa:0 --devices 0,1";
    let ran = place.run(&format!("{SYNTHETIC} {options}"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let sweep = ran.json();
    for (operation, memory) in
        [("h2d", json!("bound")), ("h2d", json!("first_touch")), ("all_gather", Value::Null)]
    {
        let skipped = line(&sweep, operation, "numa:1", &memory);
        assert_eq!((&skipped["status"], &skipped["errno"]), (&json!("skipped"), &json!(1)));
        let reason = skipped["reason"].as_str().unwrap();
        assert!(reason.contains("EPERM") && reason.contains("CPU 15"), "{reason}");
        assert_eq!((&skipped["median"], &skipped["ranks"]), (&Value::Null, &json!(0)));
        for policy in ["none", "numa:0"] {
            let line = line(&sweep, operation, policy, &memory);
            assert_eq!((&line["status"], &line["errno"]), (&json!("measured"), &Value::Null));
        }
    }
    let points = &read(&place.path("out/run.json"))["points"];
    // Two ranks by two memories, D2D and a gather, in three blocks; D2D is not there elsewhere.
    assert_eq!((&points["skipped"], &points["measured"]), (&json!(24), &json!(36)));
    let report = fs::read_to_string(place.path("out/report.md")).unwrap();
    assert!(report.contains("| numa:1 | 0 | 0 | - |"), "{report}");

    let everywhere = "[[failure]]\nkind = \"bind_refused\"\nrank = 0\n";
    let place = Place::with_machine(&format!("{}{everywhere}", scenario("0")));
    let ran = place.run(&format!("{SYNTHETIC} --sizes 1MiB --policies all"));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("nothing could be measured"), "{ran:?}");
}

#[test]
fn the_folder_has_every_output_and_gives_them_again() {
    let place = Place::with_machine(&scenario("0.01"));
    let options = "--sizes 64KiB,16MiB --policies none,numa:1,cpu:0-3,8 --devices 1,3 --seed 9";
    let ran = place.run(&format!("{SYNTHETIC} {options}"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let out = place.path("out");
    let files = [
        "affinity.json",
        "policies.csv",
        "policies.json",
        "policies.png",
        "policies.xlsx",
        "report.md",
        "run.json",
        "samples.jsonl",
    ];
    assert_eq!(names(&out), files.map(str::to_owned).into());
    let run = read(&out.join("run.json"));
    assert_eq!((&run["command"], &run["status"]), (&json!("policies"), &json!("complete")));
    let plan = &run["plan"]["policies"];
    assert_eq!(plan["policies"], json!(["none", "numa:1", "cpu:0-3,8"]));
    assert_eq!(plan["memory"], json!(["bound", "first_touch"]));
    assert_eq!((&plan["devices"], &plan["seed"]), (&json!([1, 3]), &json!(9)));
    let lines = sweep["lines"].as_array().unwrap();
    // H2D with two memories, D2D and all-gather with none.
    assert_eq!(lines.len(), 3 * 2 * (2 + 1 + 1));
    let csv = fs::read_to_string(out.join("policies.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + lines.len());
    if let Some(book) = openpyxl(
        &out.join("policies.xlsx"),
        "rows = [[cell.value for cell in row] for row in book['Policies'].iter_rows()]
print(json.dumps({'sheets': book.sheetnames, 'rows': rows, 'ranks': book['Ranks'].max_row}))",
    ) {
        assert_eq!(book["sheets"], json!(["Policies", "Ranks", "Affinity", "Environment"]));
        let rows = book["rows"].as_array().unwrap();
        let column =
            |name: &str| rows[0].as_array().unwrap().iter().position(|cell| *cell == name).unwrap();
        assert_eq!(rows.len(), 1 + lines.len());
        let mut ranks = 0;
        for (row, line) in rows[1..].iter().zip(lines) {
            assert_eq!(row[column("policy")], line["policy"]);
            assert_eq!(row[column("claim")], line["to_none"]["claim"]);
            match line["to_none"]["ratio"].as_f64() {
                Some(ratio) => is(&row[column("to_none")], ratio),
                None => assert!(row[column("to_none")].is_null()),
            }
            ranks += line["per_rank"].as_array().unwrap().len();
        }
        assert_eq!(book["ranks"], 1 + ranks);
    }
    let before = ["policies.csv", "policies.png", "report.md"].map(|file| {
        let content = fs::read(out.join(file)).unwrap();
        fs::remove_file(out.join(file)).unwrap();
        (file, content)
    });
    fs::remove_file(out.join("policies.xlsx")).unwrap();
    let report = place.run("report @out --json");
    assert_eq!((report.code, report.json()), (Some(0), sweep.clone()));
    for (file, content) in before {
        assert!(fs::read(out.join(file)).unwrap() == content, "{file}");
    }
    assert_eq!(names(&out), files.map(str::to_owned).into());

    let again = format!("{SYNTHETIC} {options}");
    assert_eq!(place.run(&again).code, Some(2), "the folder is not empty");
    let resumed = place.run(&format!("{again} --resume"));
    assert_eq!((resumed.code, resumed.json()), (Some(0), sweep), "nothing is left to do");
    let other = place.run(&format!("{again} --resume --memory bound"));
    assert_eq!(other.code, Some(2), "{other:?}");
    assert!(other.stderr.contains("memory"), "{other:?}");
    let diagnosed = place.run("diagnose @out");
    assert_eq!(diagnosed.code, Some(2));
    assert!(diagnosed.stderr.contains("report.md"), "{diagnosed:?}");
}

#[test]
fn options_come_from_variables_too() {
    let place = Place::with_machine(QUIET);
    let mut command = place.command("policies --quiet --json --out @out");
    let backend = format!("synthetic:{}", place.path("machine.toml").display());
    for (name, value) in [
        ("BACKEND", backend.as_str()),
        ("POLICIES", "none,cpu:1,2,all"),
        ("MEMORY", "first-touch"),
        ("OPERATIONS", "h2d"),
        ("SIZES", "4KiB"),
        ("REPEATS", "2"),
        ("DEVICES", "3"),
    ] {
        command.env(format!("CLUSTER_HEALTH_{name}"), value);
    }
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let plan = &read(&place.path("out/run.json"))["plan"]["policies"];
    assert_eq!(plan["policies"], json!(["none", "cpu:1-2", "all"]));
    assert_eq!((&plan["memory"], &plan["operations"]), (&json!(["first_touch"]), &json!(["h2d"])));
    assert_eq!((&plan["sizes"], &plan["devices"]), (&json!([4096]), &json!([3])));
    assert_eq!(plan["repeats"], 2);
}

#[test]
fn wrong_options_are_named_and_leave_nothing() {
    let place = Place::with_machine(
        "[machine]\ncpus = 8\nnuma_nodes = 2\ndevices = 2\noffline = \"4-6\"\nrefuse_bind = [7]\n",
    );
    let cases = [
        ("--policies none,numa:9", "--policies: element 2: numa:9: NUMA node 9 does not exist"),
        ("--policies numa:1", "--policies: element 1: numa:1: NUMA node 1 has no usable CPU"),
        ("--policies none,all,numa:1:shard", "element 3: numa:1:shard: NUMA node 1 has no usable"),
        ("--policies none,cpu:0-2,99", "--policies: element 2: cpu:0-2,99: CPU 99: is not present"),
        ("--policies cpu:4", "--policies: element 1: cpu:4: CPU 4: offline"),
        ("--policies cpu:7", "--policies: element 1: cpu:7: CPU 7: refused"),
        ("--policies none,nearest", "--policies: element 2: 'nearest' is none of none, all"),
        ("--policies none,all,none", "--policies: element 3: none is there twice"),
        ("--policies cpu:0,1,cpu:1,0", "--policies: element 2: cpu:0-1 is there twice"),
        ("--policies numa:x", "--policies: element 1: 'numa:x'"),
        ("--policies cpu:", "--policies: element 1: 'cpu:'"),
        ("--policies cpu:0-99999999", "--policies: element 1: 'cpu:0-99999999'"),
        ("--policies ,", "--policies: element 1: ''"),
        ("--memory bound,far", "--memory: element 2: 'far' is none of bound, first-touch"),
        ("--memory bound,bound", "--memory: element 2: bound is there twice"),
        ("--operations h2d,d2h", "--operations: element 2: 'd2h' is none of h2d, d2d, all_gather"),
        ("--operations d2d,d2d", "--operations: element 2"),
        ("--sizes 1MiB,0", "--sizes: element 2"),
        ("--sizes 1MiB,1024KiB", "--sizes: element 2: 1MiB is there twice"),
        ("--devices 9", "--devices: device 9 does not exist"),
        ("--iters 0", "--iters: 0"),
        ("--repeats 0", "--repeats: 0"),
        ("--load cpu:1", "--load: 'cpu:1'"),
        ("--timeout 0s", "--timeout"),
        ("--resume --force", "--resume"),
        ("--cpus 0", "--cpus"),
    ];
    for (options, words) in cases {
        let ran = place.run(&format!("{SYNTHETIC} {options}"));
        assert_eq!(ran.code, Some(2), "{options}: {ran:?}");
        assert!(ran.stderr.contains(words), "{options}: {}", ran.stderr);
        assert!(ran.json()["error"]["message"].is_string(), "{options}");
        assert!(!place.path("out").exists(), "{options}");
    }
    // What is left of the default: node 1 has nothing to run on.
    let ran = place.run(&format!("{SYNTHETIC} --sizes 1MiB --operations h2d"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let plan = &read(&place.path("out/run.json"))["plan"]["policies"]["policies"];
    assert_eq!(*plan, json!(["none", "all", "local_rank", "numa:0", "numa:0:shard"]));
}

/// Holds every visit on this machine against what its policy may use.
fn assert_bound(sweep: &Value, inherited: &BTreeSet<u32>, bindable: &BTreeSet<u32>) {
    for seat in sweep["ranks"].as_array().unwrap() {
        assert_eq!(ids(seat["inherited"].as_str().unwrap()), *inherited, "{seat}");
    }
    for (line, rank, visit) in visits(sweep) {
        assert_eq!(visit["status"], "measured", "{line}");
        let policy = line["policy"].as_str().unwrap();
        let may = ids(visit["allowed"].as_str().unwrap());
        match policy.strip_prefix("cpu:") {
            Some(list) => assert_eq!(may, ids(list)),
            None if policy == "none" => assert_eq!(may, *inherited),
            None if policy == "all" => assert_eq!(may, *bindable),
            None => assert!(may.is_subset(bindable) && !may.is_empty(), "{policy}"),
        }
        let ran_on: Vec<u32> = serde_json::from_value(visit["times"]["ran_on"].clone()).unwrap();
        assert!(!ran_on.is_empty());
        assert!(ran_on.iter().all(|cpu| may.contains(cpu)), "{policy}: {visit}");
        if let Some(nodes) = visit["page_nodes"].as_object() {
            assert!(!line["memory"].is_null());
            let seats = sweep["ranks"].as_array().unwrap();
            let seat = seats.iter().find(|seat| seat["rank"] == rank["rank"]).unwrap();
            let of = seat["policies"].as_array().unwrap().iter().find(|p| p["policy"] == policy);
            if line["memory"] == "bound" {
                let node = of.unwrap()["memory_node"].to_string();
                assert_eq!(nodes.keys().collect::<Vec<_>>(), [&node], "{visit}");
            }
        }
    }
}

fn bindable(place: &Place) -> BTreeSet<u32> {
    let census = read(&place.path("out/affinity.json"));
    let cpus = census["cpus"].as_array().unwrap().iter().filter(|cpu| cpu["bindable"] == true);
    cpus.map(|cpu| serde_json::from_value(cpu["cpu"].clone()).unwrap()).collect()
}

#[test]
fn threads_of_this_machine_run_where_the_policy_lets_them() {
    let place = Place::new();
    let inherited = ids(&allowed("self").unwrap());
    let first = *inherited.first().unwrap();
    let line = "policies --quiet --json --backend host --out @out --sizes 64KiB,1MiB --repeats 2";
    let all = format!("{line} --policies none,all,local_rank,numa:0,numa:0:shard,cpu:{first}");
    // A machine without NUMA has no node 0 to name.
    let ran = place.run(&all);
    let ran = if ran.stderr.contains("NUMA node 0") {
        place.run(&format!("{line} --policies none,all,local_rank,cpu:{first}"))
    } else {
        ran
    };
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    let bindable = bindable(&place);
    assert_bound(&sweep, &inherited, &bindable);
    for operation in ["h2d", "d2d_same_device", "all_gather"] {
        for line in lines(&sweep, operation) {
            assert_eq!(line["repetitions"], 2, "{line}");
            assert!(line["ranks"].as_u64().unwrap() >= 2, "{line}");
            assert!(line["min"].as_f64().unwrap() > 0.0, "{line}");
        }
        assert!(lines(&sweep, operation).count() > 0);
    }

    // Started with one CPU: unbound is that one, `all` is still all.
    let mut command = Command::new("taskset");
    let program = place.command(&format!("{line} --policies none,all --operations h2d --force"));
    command.args(["-c", &first.to_string()]).arg(program.get_program()).args(program.get_args());
    for (name, _) in program.get_envs() {
        command.env_remove(name);
    }
    match command.output() {
        Err(_) => println!("skipped: no taskset"),
        Ok(output) => {
            assert_eq!(output.status.code(), Some(0), "{output:?}");
            let sweep: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_bound(&sweep, &[first].into(), &bindable);
        }
    }
}

#[test]
fn ranks_of_a_launcher_follow_the_same_policies() {
    let place = Place::new();
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: no mpirun");
        return;
    }
    let program = place.command(
        "policies --quiet --json --backend host --out @out --sizes 64KiB --repeats 2 \
         --policies none,local_rank",
    );
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]);
    command.arg(program.get_program()).args(program.get_args());
    command.env("XDG_RUNTIME_DIR", meeting(&place));
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // One document: rank 1 printed nothing.
    let sweep = ran.json();
    assert_eq!(sweep["ranks"].as_array().unwrap().len(), 2);
    assert_bound(&sweep, &ids(&allowed("self").unwrap()), &bindable(&place));
    let gather = line(&sweep, "all_gather", "local_rank", &Value::Null);
    assert_eq!((&gather["status"], &gather["ranks"]), (&json!("measured"), &json!(2)));
    assert_nothing_left(&place);
}

#[test]
fn links_of_the_simulator_have_their_rates_under_every_policy() {
    let place = Place::new();
    let ran = ascend_cli::run(
        &place,
        "policies --backend ascend --quiet --json --out @out --sizes 1MiB --repeats 2 \
         --policies none,all,local_rank",
        &[
            ("ASCEND_SIM_DEVICES", "2"),
            ("ASCEND_SIM_VIRTUAL", "1"),
            ("ASCEND_SIM_LINKS", "h2d,gbps=10,us=0;d2d,gbps=400,us=0"),
        ],
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let sweep = ran.json();
    for (operation, rate) in
        [("h2d", Some(10.0)), ("d2d_same_device", Some(400.0)), ("all_gather", None)]
    {
        let found: Vec<&Value> = lines(&sweep, operation).collect();
        assert_eq!(found.len(), if operation == "h2d" { 6 } else { 3 });
        for line in found {
            assert_eq!(
                (&line["status"], &line["ranks"]),
                (&json!("measured"), &json!(2)),
                "{line}"
            );
            if let Some(rate) = rate {
                // The clock of events has ticks of 20 ns.
                assert!(close(line["median"].as_f64().unwrap(), rate, 0.01), "{line}");
            }
        }
    }
}
