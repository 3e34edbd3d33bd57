//! Limits on bytes, depth, counts and unpacked size, each at input that would take the machine.

use std::fs;
use std::path::{Path, PathBuf};

use cluster_health_core::Scenario;
use cluster_health_core::topology::Topology;
use cluster_health_matrix::older::import::{ImportRequest, SourceFormat, read};
use cluster_health_matrix::report::Report;
use cluster_health_matrix::run::{MANIFEST, Manifest, SAMPLES, SampleReader};
use cluster_health_matrix::samples::Sweep;
use cluster_health_matrix::sizes;
use serde_json::Value;
use tempfile::TempDir;

use crate::bodies::archive;
use crate::corpus::inputs;

/// A folder with the files of a kept input.
fn folder(name: &str) -> TempDir {
    let (_, data) = inputs("run_folder").into_iter().find(|(found, _)| found == name).unwrap();
    let dir = TempDir::new().unwrap();
    let text = String::from_utf8(data).unwrap();
    for part in text.split("=== ").skip(1) {
        let (file, content) = part.split_once('\n').unwrap();
        fs::write(dir.path().join(file), content).unwrap();
    }
    dir
}

/// A file that has this length and takes no room.
fn sparse(dir: &Path, name: &str, length: u64) -> PathBuf {
    let path = dir.join(name);
    fs::File::create(&path).unwrap().set_len(length).unwrap();
    path
}

/// What the files here would take is a multiple of this; other tests run meanwhile.
const MOST: u64 = 1 << 30;

/// Bytes that this process has in memory at most, since it began.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

#[test]
fn a_line_without_an_end_is_not_kept_in_memory() {
    let dir = folder("import");
    sparse(dir.path(), SAMPLES, 1 << 40);
    let before = peak();
    let error = SampleReader::open(dir.path()).unwrap().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("line 1: longer than any line of a log"), "{error}");
    let error = Report::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("longer than any line of a log"), "{error}");
    assert!(peak() - before < MOST, "{}", peak() - before);
}

#[test]
fn numbers_of_blocks_are_names_and_no_lengths() {
    let dir = folder("sizes");
    let plain = sizes::read(dir.path()).unwrap();
    assert!(plain.series.iter().any(|series| series.fit.is_some()));
    let path = dir.path().join("sizes.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    // The same order, so the same fits.
    for visit in file["series"].as_array_mut().unwrap().iter_mut().flat_map(visits) {
        let block = visit["block"].as_u64().unwrap();
        visit["block"] = (u64::from(u32::MAX) - 5 + block).into();
    }
    fs::write(&path, file.to_string()).unwrap();
    let renamed = sizes::read(dir.path()).unwrap();
    for (renamed, plain) in renamed.series.iter().zip(&plain.series) {
        assert_eq!((&renamed.fit, &renamed.points), (&plain.fit, &plain.points));
    }

    let visit = visits(&mut file["series"][0])[0].clone();
    let many = (0..9000_u64).map(|number| {
        let mut visit = visit.clone();
        (visit["block"], visit["bytes"]) = (number.into(), number.into());
        visit
    });
    file["series"][0]["visits"] = many.collect();
    fs::write(&path, file.to_string()).unwrap();
    let error = sizes::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("sizes.json") && error.contains("too many sizes"), "{error}");
}

fn visits(series: &mut Value) -> &mut Vec<Value> {
    series["visits"].as_array_mut().unwrap()
}

#[test]
fn nested_json_is_refused_by_depth() {
    let dir = TempDir::new().unwrap();
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let deep = format!("{}1{}", open.repeat(100_000), close.repeat(100_000));
        fs::write(dir.path().join(MANIFEST), &deep).unwrap();
        let error = Manifest::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("recursion limit"), "{error}");
        fs::write(dir.path().join(SAMPLES), deep + "\n").unwrap();
        let mut reader = SampleReader::open(dir.path()).unwrap();
        assert!(reader.next_line().unwrap().unwrap().is_err());
    }
    let deep = format!("a = {}{}", "[".repeat(50_000), "]".repeat(50_000));
    let error = Scenario::parse(&deep, "x.toml").unwrap_err().to_string();
    assert!(error.starts_with("x.toml:1: ") && error.contains("recurs"), "{error}");
}

#[test]
fn files_that_are_too_large_are_refused_before_they_are_read() {
    let dir = TempDir::new().unwrap();
    let csv = sparse(dir.path(), "h2d-1MiB.csv", 3 << 30);
    let json = sparse(dir.path(), "results.json", 3 << 30);
    let before = peak();
    for (format, path) in [(SourceFormat::Csv, csv), (SourceFormat::ClusterHealthDetect, json)] {
        let error = read(&ImportRequest::new(format, Sweep::H2d, vec![path])).unwrap_err();
        assert!(error.to_string().contains("bytes are not read"), "{error}");
    }
    let table = sparse(dir.path(), "sizes.csv", 3 << 30);
    let error = sizes::import(&table).unwrap_err().to_string();
    assert!(error.contains("bytes are not read"), "{error}");
    let scenario = sparse(dir.path(), "machine.toml", 1 << 40);
    let error = Scenario::load(&scenario).unwrap_err().to_string();
    assert!(error.contains("at most 1 MiB"), "{error}");
    let cpus = dir.path().join("sys/devices/system/cpu");
    fs::create_dir_all(&cpus).unwrap();
    sparse(&cpus, "present", 1 << 40);
    let error = Topology::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("longer than 1048576 bytes"), "{error}");
    assert!(peak() - before < MOST, "{}", peak() - before);
}

#[test]
fn an_endless_manifest_is_cut_off() {
    let dir = folder("import");
    fs::write(dir.path().join(MANIFEST), " ".repeat(1 << 20) + "{\"schema_version\":7}").unwrap();
    let error = Manifest::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("schema version 7 is newer"), "{error}");
    sparse(dir.path(), MANIFEST, 1 << 40);
    let error = Manifest::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("more than 256 MiB"), "{error}");
}

#[test]
fn parts_of_a_workbook_are_not_unpacked_to_files() {
    let dir = TempDir::new().unwrap();
    let inside = dir.path().join("inside");
    fs::create_dir(&inside).unwrap();
    let (_, data) =
        inputs("older_xlsx").into_iter().find(|(name, _)| name == "part_outside").unwrap();
    let path = inside.join("results.xlsx");
    fs::write(&path, data).unwrap();
    let request = ImportRequest::new(SourceFormat::ClusterHealthDetect, Sweep::H2d, vec![path]);
    drop(read(&request));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(fs::read_dir(&inside).unwrap().count(), 1);
}

#[test]
fn a_workbook_of_too_many_parts_is_refused() {
    let parts = (0..10_001).map(|number| (PathBuf::from(number.to_string()), Vec::new()));
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("results.xlsx");
    fs::write(&path, archive(&parts.collect())).unwrap();
    let request = ImportRequest::new(SourceFormat::ClusterHealthDetect, Sweep::H2d, vec![path]);
    let error = read(&request).unwrap_err().to_string();
    assert!(error.contains("10001 parts; at most 10000 are read"), "{error}");
}
