//! Nothing in a result folder leads out of it: neither a link nor a name in a file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use cluster_health_core::{ByteSize, Machine, Scenario};
use cluster_health_matrix::plan::H2dPlan;
use cluster_health_matrix::report::{Report, ReportOptions};
use cluster_health_matrix::run::{
    AFFINITY, MANIFEST, Manifest, OpenMode, PlanRecord, RunFolder, SAMPLES,
};
use cluster_health_matrix::session::{self, RecordOptions};
use tempfile::TempDir;

const PRECIOUS: &str = "a file of somebody else";

/// A complete run in a folder.
fn complete() -> TempDir {
    let dir = TempDir::new().unwrap();
    run(dir.path(), OpenMode::New).unwrap();
    dir
}

fn run(dir: &Path, mode: OpenMode) -> cluster_health_matrix::Result<()> {
    let scenario = Scenario::parse("[machine]\ncpus = 2\ndevices = 1\n", "machine").unwrap();
    let machine = Machine::synthetic(scenario).unwrap();
    let plan = H2dPlan::builder().sizes([ByteSize::mib(1)]).repeats(1).build(&machine).unwrap();
    let options = RecordOptions::default().with_mode(mode);
    session::record_h2d("h2d", &machine, &plan, dir, &options, &mut ()).map(drop)
}

/// A file outside, and a link to it in place of a file of the folder.
fn linked(dir: &Path, name: &str) -> (TempDir, std::path::PathBuf) {
    let outside = TempDir::new().unwrap();
    let target = outside.path().join("precious");
    fs::write(&target, PRECIOUS).unwrap();
    fs::remove_file(dir.join(name)).ok();
    symlink(&target, dir.join(name)).unwrap();
    (outside, target)
}

#[test]
fn what_is_read_is_a_file_of_the_folder() {
    for name in [MANIFEST, SAMPLES, AFFINITY] {
        let dir = complete();
        let (_outside, target) = linked(dir.path(), name);
        let error = Report::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("a symbolic link"), "{error}");
        assert!(!error.contains(PRECIOUS), "{error}");
        assert_eq!(fs::read_to_string(target).unwrap(), PRECIOUS);
    }
}

#[test]
fn what_is_written_replaces_a_link_or_fails() {
    let names = [MANIFEST, SAMPLES, AFFINITY, "matrices.xlsx", "report.md", "h2d-1MiB.csv"];
    let temporary = names.map(|name| format!("{name}.tmp"));
    for name in names.iter().copied().chain(temporary.iter().map(String::as_str)) {
        for mode in [OpenMode::Force, OpenMode::Resume] {
            let dir = complete();
            let (_outside, target) = linked(dir.path(), name);
            let result = run(dir.path(), mode);
            if let Err(error) = result {
                assert!(error.to_string().contains("a symbolic link"), "{name}: {error}");
            }
            if let Ok(mut report) = Report::read(dir.path()) {
                drop(report.write(dir.path(), &ReportOptions::default()));
            }
            assert_eq!(fs::read_to_string(target).unwrap(), PRECIOUS, "{name}");
        }
    }
}

#[test]
fn a_pipe_in_the_folder_is_refused_instead_of_waited_for() {
    for name in [MANIFEST, SAMPLES, AFFINITY] {
        let dir = complete();
        fs::remove_file(dir.path().join(name)).unwrap();
        let made = std::process::Command::new("mkfifo").arg(dir.path().join(name)).status();
        if !made.is_ok_and(|status| status.success()) {
            println!("skipped: no mkfifo");
            return;
        }
        let error = Report::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("no regular file"), "{error}");
    }
}

#[test]
fn names_in_a_manifest_lead_nowhere() {
    // Names of outputs are made from words of the manifest and the log.
    let elsewhere = TempDir::new().unwrap();
    let dir = elsewhere.path().join("a");
    fs::create_dir(&dir).unwrap();
    let dir = TempDir::new_in(dir).unwrap();
    run(dir.path(), OpenMode::New).unwrap();
    let log = fs::read_to_string(dir.path().join(SAMPLES)).unwrap();
    let log = log.replace("\"idle\"", "\"../../outside\"");
    fs::write(dir.path().join(SAMPLES), &log).unwrap();
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.path().join(MANIFEST)).unwrap()).unwrap();
    let plan = manifest["plan"]["h2d"].take();
    manifest["plan"] = serde_json::json!({"import": {
        "format": "../../outside", "sweep": "h2d", "sources": ["../../outside"],
        "scan_order_assumed": false, "rows": plan["cpus"], "columns": plan["devices"],
        "sizes": plan["sizes"], "device_pair": null,
    }});
    fs::write(dir.path().join(MANIFEST), manifest.to_string()).unwrap();
    let mut report = Report::read(dir.path()).unwrap();
    assert_eq!(report.matrices.len(), 1);
    report.write(dir.path(), &ReportOptions::default()).unwrap();
    let names: Vec<String> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.contains(&"h2d-1MiB-outside.csv".to_owned()), "{names:?}");
    assert_eq!(elsewhere.path().read_dir().unwrap().count(), 1);
}

#[test]
fn a_folder_that_is_a_link_may_be_used() {
    let dir = complete();
    let outside = TempDir::new().unwrap();
    let link = outside.path().join("link");
    symlink(dir.path(), &link).unwrap();
    assert!(Report::read(&link).is_ok());
    let manifest = Manifest::empty("h2d", PlanRecord::default(), "blocks".to_owned());
    assert!(RunFolder::open(&link, OpenMode::Force, &manifest).is_ok());
}
