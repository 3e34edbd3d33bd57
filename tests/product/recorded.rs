//! Judging recordings of one block in a fixed order: a 16-device node, whole, and changed in ways
//! that must change the findings.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cluster_health_matrix::analysis::{Diagnosis, Finding, Kind, Verdict, diagnose_folder};

use crate::support::{Place, run};

const SIZES: [&str; 3] = ["16MB", "64MB", "256MB"];

/// The recorded data lie beside the checkout; without them a test says so and ends.
fn recorded(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(name);
    if !path.exists() {
        println!("skipped: no recorded data");
        return None;
    }
    Some(path)
}

fn affinity() -> Option<PathBuf> {
    recorded("a3-182-h2d-clean-20260707-affinity.csv")
}

/// A matrix of rates with its labels.
#[derive(Clone)]
struct Matrix {
    corner: String,
    columns: Vec<String>,
    rows: Vec<(String, Vec<f64>)>,
}

impl Matrix {
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let mut head = lines.next().unwrap().split(',').map(str::to_owned);
        let corner = head.next().unwrap();
        let rows = lines.map(|line| {
            let mut cells = line.split(',');
            let label = cells.next().unwrap().to_owned();
            (label, cells.map(|cell| cell.parse().unwrap()).collect())
        });
        Self { corner, columns: head.collect(), rows: rows.collect() }
    }

    fn change(mut self, rate: impl Fn(usize, usize, f64) -> f64) -> Self {
        for (row, (_, cells)) in self.rows.iter_mut().enumerate() {
            for (column, cell) in cells.iter_mut().enumerate() {
                *cell = rate(row, column, *cell);
            }
        }
        self
    }

    fn write(&self, path: &Path) {
        let mut text = format!("{},{}\n", self.corner, self.columns.join(","));
        for (label, cells) in &self.rows {
            text.push_str(label);
            cells.iter().for_each(|cell| write!(text, ",{cell}").unwrap());
            text.push('\n');
        }
        fs::write(path, text).unwrap();
    }
}

fn import(place: &Place, sweep: &str, sources: &[PathBuf], affinity: &Path) -> PathBuf {
    let out = place.path("out");
    let mut words: Vec<String> =
        ["import", "--format", "csv", "--sweep", sweep, "--quiet"].map(str::to_owned).to_vec();
    words.extend(sources.iter().map(|path| path.display().to_string()));
    words.extend(["--affinity".to_owned(), affinity.display().to_string()]);
    words.extend(["--out".to_owned(), out.display().to_string()]);
    let ran = run(&words);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    out
}

/// The H2D recording, each rate changed by (CPU position, device, rate).
fn h2d(rate: impl Fn(usize, usize, f64) -> f64) -> Option<(Place, PathBuf, Diagnosis)> {
    let affinity = affinity()?;
    let place = Place::new();
    let sources: Vec<PathBuf> = SIZES
        .iter()
        .map(|size| {
            let text = recorded(&format!("a3-182-h2d-clean-20260707-{size}.csv")).unwrap();
            let matrix = Matrix::parse(&fs::read_to_string(text).unwrap());
            let path = place.path(&format!("h2d-{size}.csv"));
            matrix.change(&rate).write(&path);
            path
        })
        .collect();
    let out = import(&place, "h2d", &sources, &affinity);
    let diagnosis = diagnose_folder(&out).unwrap();
    Some((place, out, diagnosis))
}

/// The pair recording, changed.
fn pairs(change: impl Fn(Matrix) -> Matrix) -> Option<Diagnosis> {
    let affinity = affinity()?;
    let packed = recorded("a3-182-allgather-pair05-8MB-clean-20260707.csv.xz")?;
    let Ok(output) = Command::new("xz").arg("-dc").arg(&packed).output() else {
        println!("skipped: no xz");
        return None;
    };
    let place = Place::new();
    let path = place.path("pairs-8MB.csv");
    change(Matrix::parse(&String::from_utf8(output.stdout).unwrap())).write(&path);
    let out = import(&place, "core-pair", &[path], &affinity);
    Some(diagnose_folder(&out).unwrap())
}

fn of(diagnosis: &Diagnosis, kind: Kind) -> Vec<&Finding> {
    diagnosis.findings.iter().filter(|finding| finding.kind == kind).collect()
}

fn structural(diagnosis: &Diagnosis) -> Vec<Kind> {
    let kinds = diagnosis.findings.iter().map(|finding| finding.kind);
    kinds.filter(|kind| !kind.is_artefact() && !kind.is_undecided()).collect()
}

fn only(diagnosis: &Diagnosis, kind: Kind) -> &Finding {
    let [finding] = of(diagnosis, kind)[..] else {
        panic!("{kind:?} in {:#?}", diagnosis.findings)
    };
    finding
}

fn ratio(finding: &Finding) -> f64 {
    finding.effect.unwrap().ratio
}

#[test]
fn f13_the_slow_device_of_the_copies_is_a_stall_that_began_at_some_time() {
    let Some((_place, out, diagnosis)) = h2d(|_, _, rate| rate) else { return };
    assert_eq!(structural(&diagnosis), []);
    assert_eq!(diagnosis.verdict, Verdict::Inconclusive);

    let confounded = only(&diagnosis, Kind::Confounded);
    assert!(confounded.devices.starts_with(&[0, 1]), "{confounded:?}");
    assert!(confounded.next.contains("cluster-health h2d"), "{confounded:?}");
    assert!(confounded.next.contains("--repeats 3"), "{confounded:?}");

    let steps = of(&diagnosis, Kind::TimeStep);
    let of_device = |device: u32| steps.iter().find(|step| step.devices == [device]).unwrap();
    let at = |step: &Finding, size: &str, cpu: u32| {
        step.facts
            .iter()
            .any(|fact| fact.starts_with(size) && fact.contains(&format!("from cpu {cpu} ")))
    };
    for size in ["16MiB", "64MiB"] {
        assert!(at(of_device(0), size, 20), "{size}: {steps:#?}");
        assert!(at(of_device(1), size, 7), "{size}: {steps:#?}");
    }
    // 10.9 and 27.6 ms a point of three transfers: × 2.5 for × 16 in bytes.
    assert_eq!(of_device(0).scales_with_bytes, Some(false));

    let stall = only(&diagnosis, Kind::AllocationStall);
    assert!(stall.devices.starts_with(&[0, 1]), "{stall:?}");
    // 25.1, 16.2 and 25.2 ms per buffer, three transfers each.
    let extra_ms = stall.extra_us.unwrap() / 1e3;
    assert!((5.0..10.0).contains(&extra_ms), "{stall:?}");
    assert_eq!(stall.scales_with_bytes, Some(false));

    // The same lines in other orders say the same.
    let log = out.join("samples.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    for step in [7_usize, 1001] {
        let count = lines.len();
        (0..count).for_each(|at| lines.swap(at, at * step % count));
        fs::write(&log, lines.join("\n") + "\n").unwrap();
        assert_eq!(diagnose_folder(&out).unwrap(), diagnosis);
    }
}

#[test]
fn a_slow_device_among_them_is_found() {
    for (device, factor) in [(5_usize, 0.9), (11, 0.8)] {
        let slowed = h2d(|_, at, rate| if at == device { rate * factor } else { rate });
        let Some((_place, _, diagnosis)) = slowed else { return };
        assert_eq!(structural(&diagnosis), [Kind::SlowDevice]);
        let finding = only(&diagnosis, Kind::SlowDevice);
        assert_eq!(finding.devices, [u32::try_from(device).unwrap()]);
        assert!((ratio(finding) - factor).abs() < 0.02, "{finding:?}");
        assert_eq!(finding.scales_with_bytes, Some(true));
    }
}

#[test]
fn a_device_that_is_slow_for_a_part_of_the_scan_only_is_confounded() {
    let slowed = h2d(|cpu, at, rate| if at == 9 && cpu >= 60 { rate * 0.85 } else { rate });
    let Some((_place, _, diagnosis)) = slowed else { return };
    assert_eq!(structural(&diagnosis), []);
    assert!(only(&diagnosis, Kind::Confounded).devices.contains(&9));
    let step = diagnosis.findings.iter().find(|finding| finding.devices == [9]).unwrap();
    assert_eq!(step.kind, Kind::TimeStep);
    assert!(step.facts.iter().any(|fact| fact.contains("from cpu 60 ")), "{step:?}");
}

#[test]
fn f15_copies_that_become_slower_all_along_drift() {
    let slowed = h2d(|cpu, _, rate| rate * (1.0 - 0.1 * cpu as f64 / 640.0));
    let Some((_place, _, diagnosis)) = slowed else { return };
    assert_eq!(structural(&diagnosis), []);
    let drift = only(&diagnosis, Kind::Drift);
    assert!((ratio(drift) - 0.9).abs() < 0.01, "{drift:?}");
}

#[test]
fn pairs_have_their_core_their_siblings_and_node_6() {
    let Some(diagnosis) = pairs(|matrix| matrix) else { return };
    let mut kinds = structural(&diagnosis);
    kinds.retain(|kind| *kind != Kind::SlowRank1Core);
    kinds.sort_unstable();
    assert_eq!(kinds, [Kind::SameCore, Kind::SmtSibling, Kind::NumaEffect]);
    for finding in of(&diagnosis, Kind::SlowRank1Core) {
        assert_eq!(finding.rank1_cpus, [228]);
    }
    assert!((ratio(only(&diagnosis, Kind::SameCore)) - 0.61).abs() < 0.02);
    assert!((ratio(only(&diagnosis, Kind::SmtSibling)) - 0.93).abs() < 0.01);
    let node = only(&diagnosis, Kind::NumaEffect);
    assert_eq!(node.numa_nodes, [6]);
    assert_eq!(node.rank1_cpus, (480..560).collect::<Vec<u32>>());
    assert!(node.rank0_cpus.is_empty());
    assert!((1.03..1.06).contains(&ratio(node)), "{node:?}");

    let checkpoint = only(&diagnosis, Kind::Checkpoint);
    assert!(checkpoint.facts[0].contains("32768"), "{checkpoint:?}");
    let replicates = checkpoint.replicates.unwrap();
    assert_eq!((replicates.seen, replicates.of), (12, 12));

    let first = only(&diagnosis, Kind::FirstVisit);
    assert!((15.0..45.0).contains(&first.extra_us.unwrap()), "{first:?}");
    for cpu in (0..640).step_by(80) {
        assert!(first.facts[0].contains(&format!(" {cpu} (")), "{cpu}: {first:?}");
    }
}

#[test]
fn pairs_with_other_labels_have_other_findings() {
    // Position p is called 7 p mod 640: a permutation, as 7 and 640 have no common factor.
    let labels: Vec<String> = (0..640).map(|at| (at * 7 % 640).to_string()).collect();
    let renamed = pairs(|mut matrix| {
        matrix.columns.clone_from(&labels);
        for ((name, _), label) in matrix.rows.iter_mut().zip(&labels) {
            name.clone_from(label);
        }
        matrix.rows.truncate(200);
        matrix
    });
    let Some(diagnosis) = renamed else { return };
    assert_eq!(structural(&diagnosis), [Kind::SameCore]);
}

#[test]
fn f14_pairs_without_their_diagonal_and_with_slow_columns() {
    let slow = [33, 35, 120, 121, 300, 301, 333, 600];
    let changed = pairs(|matrix| {
        let rates: Vec<f64> =
            matrix.rows.iter().enumerate().map(|(at, (_, cells))| cells[(at + 9) % 640]).collect();
        matrix.change(|row, column, rate| {
            let rate = if row == column { rates[row] } else { rate };
            if slow.contains(&column) { rate * 0.95 } else { rate }
        })
    });
    let Some(diagnosis) = changed else { return };
    assert_eq!(of(&diagnosis, Kind::SameCore), Vec::<&Finding>::new());
    let finding = only(&diagnosis, Kind::SlowRank1Core);
    assert_eq!(finding.rank1_cpus, slow.map(|column| u32::try_from(column).unwrap()));
    assert!((ratio(finding) - 0.95).abs() < 0.01, "{finding:?}");
    assert_eq!(only(&diagnosis, Kind::NumaEffect).numa_nodes, [6]);
}

#[test]
fn too_small_a_matrix_decides_nothing() {
    for (file, sweep) in [
        ("A3-core-h2d-matrix-smoke.xlsx", "h2d"),
        ("A3-core-pair-d2d-matrix-smoke.xlsx", "core-pair"),
    ] {
        let Some(path) = recorded(file) else { return };
        let place = Place::new();
        let out = place.path("out");
        let ran = run([
            "import".as_ref(),
            "--format=clusterhealthdetect".as_ref(),
            format!("--sweep={sweep}").as_ref(),
            path.as_os_str(),
            "--out".as_ref(),
            out.as_os_str(),
        ]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let diagnosis = diagnose_folder(&out).unwrap();
        assert_eq!(diagnosis.verdict, Verdict::Inconclusive, "{diagnosis:#?}");
        assert_eq!(structural(&diagnosis), []);
    }
}
