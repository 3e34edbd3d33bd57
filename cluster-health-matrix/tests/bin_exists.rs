//! Cargo builds a program only for tests of its own package: with this one the program is there
//! for the tests of the whole product, which live in another package.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::Command;

#[test]
fn the_program_starts_and_tells_its_version() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_cluster-health")).arg("--version").output().unwrap();
    assert!(output.status.success());
    let version = format!("cluster-health {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), version);
}
