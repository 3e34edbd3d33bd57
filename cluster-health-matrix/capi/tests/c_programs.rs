//! Programs in C and C++ against the installed library: what they measure is what Rust measures,
//! what they do wrong is a status, and nothing leaks.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use cluster_health_core::{Machine, Scenario};
use cluster_health_matrix::compare::{CompareOptions, compare};
use cluster_health_matrix::matrix::Matrix;
use cluster_health_matrix::plan::{PlanRequest, SweepPlan};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::session::{RecordOptions, record_h2d};
use cluster_health_matrix::{Observer, Progress, sweep};
use serde_json::Value;
use tempfile::TempDir;

const SCENARIO: &str = "seed = 7
[machine]
cpus = 16
smt = 2
numa_nodes = 2
devices = 4
offline = \"3\"
[[fault]]
kind = \"slow_device\"
sweep = \"h2d\"
devices = \"2\"
factor = 0.5
";

const H2D: &str = r#"{"sweep": "h2d", "cpus": "8,0-4", "devices": [3, 2], "sizes": ["16MiB", "1MiB"],
                      "iters": 2, "repeats": 3, "seed": 11, "load": "idle,cpu:2"}"#;

const CANNOT_LEAK: [&str; 6] = [
    "--quiet",
    "--error-exitcode=9",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite,indirect,possible",
    // Ranks that wait for each other get their turn.
    "--fair-sched=yes",
    "--suppressions=tests/valgrind.supp",
];

fn member(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Standard output of a command that succeeds.
fn output_of(command: &mut Command) -> String {
    let output = run(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        println!("skipped: no {program}");
    }
    found
}

/// Where the library that cargo built beside this test is installed.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        install(test.parent().unwrap(), "installed")
    })
}

fn install(built: &Path, name: &str) -> PathBuf {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    output_of(Command::new(member("install")).args([&prefix, built]).env_remove("DESTDIR"));
    prefix
}

fn compile(source: &str, name: &str, library: &[String]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (compiler, standard) =
        if source.ends_with(".c") { ("cc", "-std=c99") } else { ("c++", "-std=c++17") };
    let mut command = Command::new(compiler);
    command.args([standard, "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread"]);
    output_of(command.arg(member(source)).arg("-o").arg(&program).args(library));
    program
}

/// A program that uses the shared library.
fn program(source: &str) -> PathBuf {
    let prefix = installed().display();
    let name = Path::new(source).file_name().unwrap().to_str().unwrap();
    compile(
        source,
        &format!("{name}-shared"),
        &[
            format!("-I{prefix}/include"),
            format!("-L{prefix}/lib"),
            "-lcluster_health".to_owned(),
            format!("-Wl,-rpath,{prefix}/lib"),
        ],
    )
}

fn dump() -> &'static Path {
    static DUMP: OnceLock<PathBuf> = OnceLock::new();
    DUMP.get_or_init(|| program("tests/c/dump.c"))
}

/// A file with the scenario, as the name of a machine.
fn scenario(folder: &TempDir) -> String {
    let file = folder.path().join("node.toml");
    fs::write(&file, SCENARIO).unwrap();
    format!("synthetic:{}", file.display())
}

fn machine() -> Machine {
    Machine::synthetic(Scenario::parse(SCENARIO, "test").unwrap()).unwrap()
}

/// Cancelled by its n-th progress, as `dump … stop` is.
struct Stop {
    calls: usize,
    last: usize,
}

impl Observer for Stop {
    fn between_visits(&mut self, _progress: &Progress) {
        self.calls += 1;
    }

    fn is_cancelled(&self) -> bool {
        self.last > 0 && self.calls == self.last
    }
}

/// What Rust measures, in the words of `dump`.
fn expected(plan: &str, last: usize) -> String {
    let machine = machine();
    let mut observer = Stop { calls: 0, last };
    let plan = PlanRequest::from_json(plan).unwrap().build(&machine).unwrap();
    match plan {
        SweepPlan::H2d(plan) => {
            let found = sweep::h2d(&machine, &plan, &mut observer).unwrap();
            text(found.end.complete, &[&[found.matrix], &*found.under_loads].concat())
        }
        SweepPlan::CorePair(plan) => {
            let found = sweep::core_pair(&machine, &plan, None, &mut observer).unwrap();
            text(found.end.complete, &[&[found.matrix], &*found.under_loads].concat())
        }
        other => panic!("{other:?}"),
    }
}

fn text(complete: bool, matrices: &[Matrix]) -> String {
    let mut text = format!("complete {}\n", u8::from(complete));
    for matrix in matrices {
        let words = [matrix.sweep.as_str(), &matrix.load, matrix.memory.as_str()];
        writeln!(text, "{}", words.join(" ")).unwrap();
        let sizes: Vec<u64> = matrix.sizes.iter().map(|size| size.bytes()).collect();
        for labels in [&sizes, &wide(&matrix.rows.ids), &wide(&matrix.columns.ids)] {
            labels.iter().for_each(|label| write!(text, "{label} ").unwrap());
            text.push('\n');
        }
        for (index, rate) in matrix.gbps.indexed_iter() {
            let (rate, spread) = (rate.to_bits(), matrix.spread[index].to_bits());
            write!(text, "{rate:016x} {spread:016x} {}", matrix.status[index] as u8).unwrap();
            if let Some(predicted) = &matrix.predicted {
                let (rate, error) = (predicted.gbps[index], predicted.error[index]);
                write!(text, " {:08x} {:08x}", rate.to_bits(), error.to_bits()).unwrap();
            }
            text.push('\n');
        }
    }
    text
}

fn wide(ids: &[u32]) -> Vec<u64> {
    ids.iter().copied().map(u64::from).collect()
}

#[test]
fn what_c_measures_is_what_rust_measures_bit_by_bit() {
    let folder = TempDir::new().unwrap();
    let node = scenario(&folder);
    for plan in [
        H2D,
        r#"{"sweep": "h2d", "direction": "d2h", "sizes": 65536, "repeats": 1}"#,
        r#"{"sweep": "core_pair", "rank0_cpus": "0-5", "rank1_cpus": "4-9", "repeats": 2}"#,
        r#"{"sweep": "core_pair", "budget": "100ms"}"#,
    ] {
        let found = output_of(Command::new(dump()).args([&*node, plan]));
        assert_eq!(found, expected(plan, 0), "{plan}");
        assert!(found.starts_with("complete 1\n"), "{plan}");
    }
}

#[test]
fn a_callback_stops_a_sweep_where_an_observer_does() {
    let folder = TempDir::new().unwrap();
    let node = scenario(&folder);
    let found = output_of(Command::new(dump()).args([&*node, H2D, "stop", "4"]));
    assert_eq!(found, expected(H2D, 4));
    assert!(found.starts_with("complete 0\n"), "{found}");
}

#[test]
fn recorded_folders_and_what_they_say_are_those_of_rust() {
    let folder = TempDir::new().unwrap();
    let node = scenario(&folder);
    let (of_c, of_rust) = (folder.path().join("c"), folder.path().join("rust"));
    let mut record = Command::new(dump());
    let found = output_of(record.args([&*node, H2D, "record"]).arg(&of_c));

    let machine = machine();
    let plan = PlanRequest::from_json(H2D).unwrap().build(&machine).unwrap();
    let SweepPlan::H2d(plan) = plan else { panic!("{plan:?}") };
    let options = RecordOptions::default();
    let report = record_h2d("test", &machine, &plan, &of_rust, &options, &mut ()).unwrap();
    let diagnosis = serde_json::to_value(&report.diagnosis).unwrap();
    let (matrices, json) = found.split_at(found.find('{').unwrap());
    assert_eq!(matrices, text(true, &report.matrices));
    assert_eq!(serde_json::from_str::<Value>(json).unwrap(), diagnosis);
    assert!(json.contains("slow_device"), "{json}");
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.collect();
        names.sort();
        names
    };
    assert_eq!(names(&of_c), names(&of_rust));

    let mut command = Command::new(dump());
    let found = output_of(command.arg("compare").args([&of_c, &of_rust]));
    let (a, b) = (Report::read(&of_c).unwrap(), Report::read(&of_rust).unwrap());
    let (of_c, of_rust) = (of_c.to_str().unwrap(), of_rust.to_str().unwrap());
    let wanted = compare((of_c, &a), (of_rust, &b), &CompareOptions::default());
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found, serde_json::to_value(wanted).unwrap());
    assert_eq!(found["verdict"], "no_difference");
}

#[test]
fn the_census_counts_what_the_scenario_has() {
    let folder = TempDir::new().unwrap();
    let found = output_of(Command::new(dump()).args(["census", &scenario(&folder)]));
    let (counts, json) = found.split_once('\n').unwrap();
    // 16 CPUs, of which one is offline.
    assert_eq!(counts, "synthetic 15 4");
    let census: Value = serde_json::from_str(json).unwrap();
    let cpus = census["cpus"].as_array().unwrap();
    let bindable = cpus.iter().filter(|cpu| cpu["bindable"] == true).count();
    assert_eq!((cpus.len(), bindable), (16, 15));
    assert_eq!(cpus[3]["online"], false);
}

/// `CPU 0, device 0: 12.3 GB/s` for every CPU and node of this machine.
fn check_first_matrix(printed: &str) {
    let machine = Machine::detect().unwrap();
    let cells = machine.census().unwrap().bindable().len() * machine.devices().len();
    assert_eq!(printed.lines().count(), cells, "{printed}");
    for line in printed.lines() {
        let rate = line.rsplit_once(": ").unwrap().1.strip_suffix(" GB/s").unwrap();
        assert!(line.starts_with("CPU ") && rate.parse::<f64>().unwrap() > 0.0, "{line}");
    }
}

#[test]
fn the_first_matrix_in_c() {
    check_first_matrix(&output_of(&mut Command::new(program("examples/first_matrix.c"))));
}

#[test]
fn pairs_in_cpp() {
    let output = run(&mut Command::new(program("examples/pairs.cpp")));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains(" points\n"), "{}: {said}", output.status);
    let printed = String::from_utf8(output.stdout).unwrap();
    let cpus = Machine::host().unwrap().census().unwrap().bindable().len();
    assert_eq!(printed.lines().count(), cpus * cpus, "{printed}");
    assert!(printed.lines().all(|line| line.ends_with("GB/s per rank")), "{printed}");
}

#[test]
fn ranks_that_are_threads_of_the_caller() {
    let folder = TempDir::new().unwrap();
    output_of(Command::new(program("tests/c/ranks.cpp")).arg(folder.path().join("pairs")));
}

#[test]
fn misuse_is_a_status_with_a_message() {
    let folder = TempDir::new().unwrap();
    output_of(Command::new(program("tests/c/misuse.c")).arg(folder.path().join("run")));
}

#[test]
fn misuse_of_a_static_library_that_aborts_on_panics() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--profile", "abort", "--no-default-features"]);
    cargo.args(["--package", "cluster-health-capi", "--target-dir"]).arg(target);
    output_of(cargo.current_dir(member(".")).env_remove("RUSTFLAGS"));
    let prefix = install(&target.join("abort"), "aborting");
    let library = [
        format!("-I{}/include", prefix.display()),
        prefix.join("lib/libcluster_health.a").display().to_string(),
        "-lgcc_s".to_owned(),
        "-lm".to_owned(),
        "-ldl".to_owned(),
    ];
    let program = compile("tests/c/misuse.c", "misuse.c-static", &library);
    let folder = TempDir::new().unwrap();
    output_of(Command::new(program).arg(folder.path().join("run")));
}

#[test]
fn nothing_leaks_and_no_memory_is_misused() {
    if !has("valgrind") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let node = scenario(&folder);
    let plan = r#"{"sweep": "h2d", "cpus": "0-2", "sizes": "1MiB", "repeats": 1}"#;
    let dir = |name: &str| folder.path().join(name).display().to_string();
    for (program, arguments) in [
        (dump().to_owned(), vec![node, plan.to_owned(), "record".to_owned(), dir("dump")]),
        (program("tests/c/misuse.c"), vec![dir("misuse")]),
        (program("tests/c/ranks.cpp"), vec![dir("ranks")]),
        (program("examples/first_matrix.c"), vec![]),
    ] {
        let mut command = Command::new("valgrind");
        command.args(CANNOT_LEAK).arg(program).args(arguments).current_dir(member("."));
        output_of(&mut command);
    }
}

#[test]
fn exactly_what_the_header_declares_is_exported() {
    let header = fs::read_to_string(member("include/cluster_health.h")).unwrap();
    let code = header.split("/**").filter_map(|part| part.split_once("*/")).map(|(_, code)| code);
    let mut declared: Vec<String> = code
        .filter_map(|code| code.split_once('(').map(|(before, _)| before))
        .filter_map(|before| before.rsplit([' ', '*', '\n']).next())
        .filter(|name| name.starts_with("clh_"))
        .map(str::to_owned)
        .collect();
    declared.sort();
    let library = installed().join("lib/libcluster_health.so");
    let symbols = output_of(Command::new("nm").args(["-D", "--defined-only"]).arg(&library));
    let mut exported: Vec<&str> =
        symbols.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    exported.sort_unstable();
    assert_eq!(exported, declared);
    assert!(declared.len() > 20, "{declared:?}");

    let dynamic = output_of(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("[libcluster_health.so.0]"), "{dynamic}");
    assert!(header.contains("#define CLH_ABI_VERSION 0\n"));
}

#[test]
fn pkg_config_finds_the_installed_library() {
    if !has("pkg-config") {
        return;
    }
    let prefix = installed();
    let flags = |more: &[&str]| -> Vec<String> {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(more);
        let flags = output_of(command.arg("cluster-health"));
        flags.split_whitespace().map(str::to_owned).collect()
    };
    let version = flags(&["--modversion"]);
    assert_eq!(version, [env!("CARGO_PKG_VERSION")]);
    let shared =
        compile("examples/first_matrix.c", "first-pkg-config", &flags(&["--cflags", "--libs"]));
    let mut command = Command::new(shared);
    check_first_matrix(&output_of(command.env("LD_LIBRARY_PATH", prefix.join("lib"))));

    let mut flags = flags(&["--cflags", "--libs", "--static"]);
    for flag in flags.iter_mut().filter(|flag| *flag == "-lcluster_health") {
        *flag = "-l:libcluster_health.a".to_owned();
    }
    let alone = compile("examples/first_matrix.c", "first-static", &flags);
    check_first_matrix(&output_of(&mut Command::new(alone)));
}

#[test]
fn the_guide_shows_these_programs() {
    let guide = fs::read_to_string(member("../../docs/embedding.md")).unwrap();
    for (name, fence) in [("first_matrix.c", "```c\n"), ("pairs.cpp", "```cpp\n")] {
        let source = fs::read_to_string(member("examples").join(name)).unwrap();
        assert!(guide.contains(&format!("{fence}{source}```\n")), "docs/embedding.md lacks {name}");
    }
}
