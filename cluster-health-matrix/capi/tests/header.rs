//! The header that is checked in is what cbindgen makes of the sources.
//!
//! `CLUSTER_HEALTH_WRITE_HEADER=1 cargo test -p cluster-health-capi --test header` writes it anew.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::Path;

fn generated() -> String {
    let member = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(member.join("cbindgen.toml")).unwrap();
    let sources = member.join("src/lib.rs");
    let bindings = cbindgen::Builder::new().with_config(config).with_src(sources).generate();
    let mut header = Vec::new();
    bindings.unwrap().write(&mut header);
    // A heading of Rust's documentation that C has no use for.
    String::from_utf8(header).unwrap().replace(" * # Safety\n", "")
}

#[test]
fn header_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/cluster_health.h");
    let wanted = generated();
    if std::env::var_os("CLUSTER_HEALTH_WRITE_HEADER").is_some() {
        fs::write(&path, &wanted).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let differs = found.lines().zip(wanted.lines()).position(|(one, other)| one != other);
    assert!(
        found == wanted,
        "{} is not what cbindgen makes of the sources (line {}); the first lines of this file say \
         how to write it anew",
        path.display(),
        differs.unwrap_or_default() + 1
    );
}
