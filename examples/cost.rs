//! The cost of our types is told, whatever it is on the machine that runs this.
#![allow(clippy::unwrap_used, reason = "a failed expectation ends a test")]

use std::process::Command;

/// The number before `unit` on the line that starts with `what`.
fn number(text: &str, what: &str, unit: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(what));
    let (before, _) =
        line.unwrap_or_else(|| panic!("no '{what}' in {text}")).split_once(unit).unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn ascend_types_are_compared_with_c_and_allocate_nothing() {
    // target/PROFILE/deps/cost-HASH → target/PROFILE/examples/ascend_overhead
    let this = std::env::current_exe().unwrap();
    let folder = this.parent().unwrap().parent().unwrap().join("examples");
    let program = folder.join("ascend_overhead");
    assert!(program.exists(), "{} is built by `cargo test` without filters", program.display());
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("ASCEND_") || text.starts_with("CLUSTER_HEALTH_") {
            command.env_remove(name);
        }
    }
    let output = command.arg("300").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for part in ["two records and a copy: ours", "wait: ours"] {
        assert!(number(&text, part, " ns, C ") > 0.0, "{text}");
        number(&text, part, " ns per call");
    }
    number(&text, "added", " ns per call");
    assert!(text.contains("allocations in 300 of our rounds: 0\n"), "{text}");
}
