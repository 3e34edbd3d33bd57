//! The kept inputs, which are synthetic: seeds, and what the fuzzers found worth keeping.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bodies::TARGETS;

/// All together, so that the repository stays small.
const MOST_BYTES: usize = 300 << 10;

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus")
}

/// The kept inputs of a target with their names.
pub(crate) fn inputs(target: &str) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(corpora().join(target)).unwrap();
    let mut inputs: Vec<_> = files
        .map(|file| file.unwrap())
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    inputs.sort();
    inputs
}

#[test]
fn every_target_is_in_the_workspace_of_the_fuzzers_and_has_a_corpus() {
    let manifest = fs::read_to_string(corpora().join("../Cargo.toml")).unwrap();
    let mut bytes = 0;
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let inputs = inputs(name);
        assert!(inputs.len() >= 5, "{name}: {}", inputs.len());
        bytes += inputs.iter().map(|(_, data)| data.len()).sum::<usize>();
    }
    assert!(bytes <= MOST_BYTES, "{bytes}");
    assert_eq!(fs::read_dir(corpora()).unwrap().count(), TARGETS.len());
}

/// One test per target: they run at the same time, and a failure names its target.
macro_rules! replay {
    ($($target:ident)*) => {
        $(#[test]
        fn $target() {
            for (name, data) in inputs(stringify!($target)) {
                println!("{name}");
                crate::bodies::$target(&data);
            }
        })*

        #[test]
        fn every_target_is_replayed() {
            assert_eq!(TARGETS.map(|(name, _)| name), [$(stringify!($target)),*]);
        }
    };
}

replay! {
    run_folder samples baseline older_json older_xlsx older_csv scenario lists launcher sysfs channel
}
