//! Running the program and reading what it leaves behind, without its own code.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// 16 CPUs in 8 cores, two nodes, four devices, and copies that always take as long as they should.
pub(crate) const QUIET: &str =
    "[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n[h2d]\nnoise = 0\n";

/// The program under test, with none of this process's settings for it, and no launcher's.
pub(crate) fn cluster_health() -> Command {
    // target/PROFILE/deps/product-HASH → target/PROFILE/cluster-health
    let this = std::env::current_exe().unwrap();
    let program = this.parent().unwrap().parent().unwrap().join("cluster-health");
    assert!(
        program.exists(),
        "{} is missing; run `cargo test --workspace`, which builds it",
        program.display()
    );
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let ours = text.starts_with("CLUSTER_HEALTH_");
        // Or the tests of ranks would join a launcher that runs the tests.
        let launcher = ["OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "LOCAL_"]
            .iter()
            .any(|start| text.starts_with(start))
            || ["RANK", "WORLD_SIZE"].contains(&text.as_ref());
        if ours || launcher {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// How a call of the program ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The one JSON document on stdout.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A sweep came to its end with every point measured: 0, or 1 for what it found. This machine is not
/// ours alone, and may well give findings.
pub(crate) fn assert_whole(ran: &Ran) {
    let says = |verdict: &str| {
        ran.stdout.contains(&format!("**Verdict: {verdict}**"))
            || ran.stdout.contains(&format!("\"verdict\": \"{verdict}\""))
    };
    let wanted = if says("healthy") { 0 } else { 1 };
    assert!(wanted == 0 || says("findings") || says("inconclusive"), "no verdict: {ran:?}");
    assert_eq!(ran.code, Some(wanted), "{ran:?}");
}

pub(crate) fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    Ran::of(cluster_health().args(args))
}

/// Splits at blanks; what starts with `@` is a path inside `dir`.
pub(crate) fn words(dir: &Path, line: &str) -> Vec<String> {
    line.split_whitespace()
        .map(|word| match word.split_once('@') {
            Some((before, name)) => format!("{before}{}", dir.join(name).display()),
            None => word.to_owned(),
        })
        .collect()
}

/// A folder for one test, with a scenario in `machine.toml`.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(crate) fn with_machine(scenario: &str) -> Self {
        let place = Self::new();
        fs::write(place.path("machine.toml"), scenario).unwrap();
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a command line; `@NAME` is NAME in this folder.
    pub(crate) fn run(&self, line: &str) -> Ran {
        run(words(self.0.path(), line))
    }

    /// Runs a sweep on the scenario into `out`, which must end with this exit code.
    pub(crate) fn sweep(&self, code: i32, options: &str) -> Folder {
        let ran = self
            .run(&format!("h2d --quiet --backend synthetic:@machine.toml --out @out {options}"));
        assert_eq!(ran.code, Some(code), "{options}: {ran:?}");
        Folder::read(&self.path("out"))
    }

    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = cluster_health();
        command.args(words(self.0.path(), line));
        command
    }
}

/// A line of `samples.jsonl`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Point {
    pub(crate) seq: u64,
    pub(crate) t_ns: u64,
    pub(crate) sweep: String,
    pub(crate) load: String,
    pub(crate) block: u32,
    pub(crate) cpu: u32,
    pub(crate) device: u32,
    pub(crate) bytes: u64,
    pub(crate) status: String,
    pub(crate) reason: Option<String>,
    pub(crate) iter_ns: Vec<u64>,
    pub(crate) host_iter_ns: Option<Vec<u64>>,
    pub(crate) timer: String,
    pub(crate) warmup_ns: Vec<u64>,
    pub(crate) touch_ns: u64,
    pub(crate) bind_ns: u64,
    pub(crate) pinned: Option<String>,
    pub(crate) page_nodes: Option<BTreeMap<u32, u32>>,
    pub(crate) ran_on: Vec<u32>,
    pub(crate) sentinel: bool,
    pub(crate) phase: String,
    pub(crate) arena: Option<u32>,
    pub(crate) settled: bool,
    pub(crate) check: String,
}

impl Point {
    pub(crate) fn cell(&self) -> (u64, u32, u32) {
        (self.bytes, self.cpu, self.device)
    }

    pub(crate) fn is_first_class(&self) -> bool {
        self.phase == "blocks" && !self.sentinel
    }
}

/// What a result folder holds.
pub(crate) struct Folder {
    pub(crate) dir: PathBuf,
    pub(crate) points: Vec<Point>,
    pub(crate) run: Value,
}

impl Folder {
    pub(crate) fn read(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), points: points(dir), run: json(&dir.join("run.json")) }
    }

    pub(crate) fn first_class(&self) -> impl Iterator<Item = &Point> {
        self.points.iter().filter(|point| point.is_first_class())
    }

    /// Number of points with this status, as `run.json` says.
    pub(crate) fn count(&self, status: &str) -> u64 {
        self.run["points"][status].as_u64().unwrap()
    }

    pub(crate) fn csv(&self, stem: &str) -> Csv {
        Csv::read(&self.dir.join(format!("{stem}.csv")))
    }
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Every line of the log, each of which must be a whole one.
pub(crate) fn points(dir: &Path) -> Vec<Point> {
    let text = fs::read_to_string(dir.join("samples.jsonl")).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "torn tail");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Names and contents of a folder.
pub(crate) fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        })
        .collect()
}

pub(crate) fn names(dir: &Path) -> BTreeSet<String> {
    contents(dir).into_keys().collect()
}

/// A matrix file.
#[derive(Debug, PartialEq)]
pub(crate) struct Csv {
    pub(crate) corner: String,
    pub(crate) columns: Vec<u32>,
    pub(crate) rows: Vec<u32>,
    /// Empty cells are `None`.
    pub(crate) cells: Vec<Vec<Option<f64>>>,
}

impl Csv {
    pub(crate) fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let header = lines.next().unwrap();
        let mut csv = Self {
            corner: header[0].to_owned(),
            columns: header[1..].iter().map(|id| id.parse().unwrap()).collect(),
            rows: Vec::new(),
            cells: Vec::new(),
        };
        for line in lines {
            assert_eq!(line.len(), header.len(), "{line:?}");
            csv.rows.push(line[0].parse().unwrap());
            let rate = |cell: &&str| (!cell.is_empty()).then(|| cell.parse::<f64>().unwrap());
            csv.cells.push(line[1..].iter().map(rate).collect());
        }
        csv
    }

    pub(crate) fn at(&self, cpu: u32, device: u32) -> Option<f64> {
        let row = self.rows.iter().position(|id| *id == cpu).unwrap();
        let column = self.columns.iter().position(|id| *id == device).unwrap();
        self.cells[row][column]
    }

    pub(crate) fn measured(&self) -> usize {
        self.cells.iter().flatten().filter(|cell| cell.is_some()).count()
    }
}

pub(crate) fn close(a: f64, b: f64, relative: f64) -> bool {
    (a - b).abs() <= relative * b.abs()
}

/// The value below which a share `q` of the sorted values lies, linear between neighbours: the
/// definition that Hyndman and Fan (1996) number 7.
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let h = (sorted.len() - 1) as f64 * q;
    let (mut below, mut k) = (0, 0.0);
    while k + 1.0 <= h {
        below += 1;
        k += 1.0;
    }
    match sorted.get(below + 1) {
        Some(above) => (h - k).mul_add(above - sorted[below], sorted[below]),
        None => sorted[below],
    }
}

pub(crate) fn middle(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    if n % 2 == 1 { sorted[n / 2] } else { (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0 }
}

/// Bytes, CPU, device.
pub(crate) type Cell = (u64, u32, u32);

/// Rates of all cells: the median over blocks of the median iteration.
pub(crate) fn rates(points: impl Iterator<Item = impl Borrow<Point>>) -> BTreeMap<Cell, f64> {
    let mut blocks = BTreeMap::<_, Vec<f64>>::new();
    for point in points {
        let point = point.borrow();
        if point.status == "measured" {
            let times: Vec<f64> = point.iter_ns.iter().map(|ns| *ns as f64).collect();
            blocks.entry(point.cell()).or_default().push(point.bytes as f64 / middle(&times));
        }
    }
    blocks.into_iter().map(|(cell, rates)| (cell, middle(&rates))).collect()
}

/// Summary rows, as far as numbers go: bytes → count, min, p10, median, p90, max.
pub(crate) fn summary(rates: &BTreeMap<Cell, f64>) -> BTreeMap<u64, (u64, [f64; 5])> {
    let mut sizes = BTreeMap::<u64, Vec<f64>>::new();
    for ((bytes, _, _), rate) in rates {
        sizes.entry(*bytes).or_default().push(*rate);
    }
    sizes
        .into_iter()
        .map(|(bytes, mut rates)| {
            rates.sort_by(f64::total_cmp);
            let quantiles = [0.0, 0.1, 0.5, 0.9, 1.0].map(|q| quantile(&rates, q));
            (bytes, (rates.len() as u64, quantiles))
        })
        .collect()
}

/// Holds the summary of `run.json` against one worked out here.
pub(crate) fn assert_summary(run: &Value, wanted: &BTreeMap<u64, (u64, [f64; 5])>, relative: f64) {
    let rows = run["summary"].as_array().unwrap();
    let found: Vec<u64> = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert_eq!(found, wanted.keys().copied().collect::<Vec<_>>());
    for (row, (count, quantiles)) in rows.iter().zip(wanted.values()) {
        assert_eq!(row["count"], *count);
        for (name, value) in ["min", "p10", "median", "p90", "max"].iter().zip(quantiles) {
            let found = row[*name].as_f64().unwrap();
            assert!(close(found, *value, relative), "{name}: {found}, worked out here {value}");
        }
    }
}

/// What Python with openpyxl prints as JSON for `script`, in which `book` is the workbook; `None`, with a
/// message, where it is missing.
pub(crate) fn openpyxl(path: &Path, script: &str) -> Option<Value> {
    let python = |code: &str| Command::new("python3").arg("-c").arg(code).arg(path).output();
    if !python("import openpyxl").is_ok_and(|output| output.status.success()) {
        println!("skipped: no python3 with openpyxl");
        return None;
    }
    let start = "import sys, json, openpyxl\nbook = openpyxl.load_workbook(sys.argv[1])\n";
    let output = python(&format!("{start}{script}")).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}
