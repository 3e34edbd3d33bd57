//! File systems that are full or cannot be written. They are small ones of the test's own; where
//! none can be mounted, these tests are skipped.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use crate::support::{Place, QUIET, Ran, names, points};

/// A small file system, gone at the end.
struct Mount(PathBuf);

impl Mount {
    fn new(dir: PathBuf, options: &str) -> Option<Self> {
        fs::create_dir(&dir).unwrap();
        let ran =
            Ran::of(Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&dir));
        if ran.code == Some(0) {
            Some(Self(dir))
        } else {
            println!("skipped: no tmpfs can be mounted: {}", ran.stderr.trim());
            None
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        Command::new("umount").arg(&self.0).status().ok();
    }
}

#[test]
fn a_full_disk_keeps_every_line_that_was_written() {
    let place = Place::with_machine(QUIET);
    let Some(_mount) = Mount::new(place.path("out"), "size=200k") else { return };
    let ran = place
        .run("h2d --backend synthetic:@machine.toml --sizes 1MiB --repeats 100 --out @out --json");
    assert_eq!(ran.code, Some(2));
    let error = &ran.json()["error"];
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["kind"], "io");
    assert!(message.contains("samples.jsonl") && message.contains("No space"), "{message}");
    assert!(ran.stderr.contains(message), "{}", ran.stderr);
    let kept = points(&place.path("out"));
    assert!(kept.len() > 100, "{}", kept.len());
    assert!(kept.iter().enumerate().all(|(at, point)| point.seq == at as u64));
    assert!(!names(&place.path("out")).iter().any(|name| name.ends_with(".tmp")));
}

#[test]
fn a_read_only_folder_is_refused() {
    let place = Place::with_machine(QUIET);
    let Some(_mount) = Mount::new(place.path("out"), "ro,size=200k") else { return };
    let ran =
        place.run("h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --out @out --json");
    assert_eq!(ran.code, Some(2));
    let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
    let out = place.path("out").display().to_string();
    assert!(message.contains(&out) && message.contains("Read-only"), "{message}");
}

#[test]
fn outputs_that_do_not_fit_are_errors_and_the_samples_stay() {
    let place = Place::with_machine(QUIET);
    let Some(_mount) = Mount::new(place.path("out"), "size=200k") else { return };
    let mut ballast = fs::File::create(place.path("out/ballast")).unwrap();
    ballast.write_all(&vec![0; 100 << 10]).unwrap();
    drop(ballast);
    let ran = place.run(
        "h2d --quiet --backend synthetic:@machine.toml --sizes 1MiB --repeats 2 --out @out \
         --force",
    );
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("No space"), "{}", ran.stderr);
    assert_eq!(points(&place.path("out")).len() / 64, 2);
    fs::remove_file(place.path("out/ballast")).unwrap();
    assert_eq!(place.run("report @out").code, Some(0));
    assert!(place.path("out/matrices.xlsx").exists());
}
