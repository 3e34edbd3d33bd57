//! What a preflight is held against: the copies of a known-good run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cluster_health_core::ByteSize;
use ndarray::Array2;
use serde::Deserialize;
use serde_json::Value;

use crate::calibrate::{CALIBRATION, Calibration, Origin};
use crate::error::{Error, Result};
use crate::report::Report;
use crate::run::{MANIFEST, SCHEMA_VERSION, read_json};

/// The convention of rates that this version reads and writes.
const UNIT: &str = "decimal, 1e9 bytes per second";

/// Most ids of an axis and most matrices, far beyond any machine.
const MOST_LINES: usize = 1 << 16;
const MOST_MATRICES: usize = 1 << 10;

/// A known-good run of the same kind of machine, or none.
///
/// Only its copies from host to device on the idle machine are used, and the CPUs that it could bind.
#[derive(Debug, Clone)]
pub struct Baseline {
    pub(super) known: Option<Known>,
}

/// What is kept of a known-good run.
#[derive(Debug, Clone)]
pub(super) struct Known {
    /// What the caller calls it, for example its file.
    pub(super) name: String,
    /// `None` in files of older versions.
    pub(super) run: Option<Origin>,
    /// `None` = not known.
    pub(super) bindable: Option<BTreeSet<u32>>,
    pub(super) rates: Vec<KnownRates>,
}

/// One matrix of it.
#[derive(Debug, Clone)]
pub(super) struct KnownRates {
    pub(super) memory: String,
    pub(super) bytes: ByteSize,
    /// `None` in files of older versions.
    pub(super) clock: Option<String>,
    pub(super) blocks: Option<usize>,
    pub(super) block_sd: Option<f64>,
    pub(super) rows: BTreeMap<u32, usize>,
    pub(super) columns: BTreeMap<u32, usize>,
    /// Decimal GB/s, NaN = not measured.
    pub(super) gbps: Array2<f64>,
}

/// What of `calibration.json` is read; other fields are left alone.
#[derive(Debug, Deserialize)]
struct Stored {
    conventions: StoredConventions,
    #[serde(default)]
    run: Option<Origin>,
    h2d_gbps_by_core_device: Vec<StoredRates>,
    affinity_bindable_cpus: Option<Vec<u32>>,
}

#[derive(Debug, Deserialize)]
struct StoredConventions {
    gbps: String,
}

#[derive(Debug, Deserialize)]
struct StoredRates {
    load: String,
    memory: String,
    bytes: ByteSize,
    #[serde(default)]
    clock: Option<String>,
    #[serde(default)]
    blocks: Option<usize>,
    #[serde(default)]
    block_sd: Option<f64>,
    rows: Vec<u32>,
    columns: Vec<u32>,
    gbps: Vec<Vec<Option<f64>>>,
}

impl Baseline {
    /// No known-good run: the machine is held against itself, which cannot see what all its parts have in
    /// common.
    #[must_use]
    pub const fn itself() -> Self {
        Self { known: None }
    }

    /// The run of a `calibration.json`, or of a result folder, whose log is read.
    ///
    /// # Errors
    /// When it cannot be read, is none of ours, or is of a newer schema; the error names the file and the
    /// place in it.
    pub fn read(path: &Path) -> Result<Self> {
        if path.join(MANIFEST).exists() {
            return Self::of_report(&path.display().to_string(), &Report::read(path)?);
        }
        if path.is_dir() {
            return Self::of_file(&path.join(CALIBRATION));
        }
        Self::of_file(path)
    }

    /// A run that was read or measured already; `name` is what the caller calls it.
    ///
    /// # Errors
    /// When it has no rates that can be used, see [`read`](Self::read).
    pub fn of_report(name: &str, report: &Report) -> Result<Self> {
        let mut text = Vec::new();
        let written = Calibration::of(report).write(&mut text);
        written.map_err(|error| Error::output(name, error.to_string()))?;
        let value = serde_json::from_slice(&text);
        Self::of_value(name, value.map_err(|error| Error::format(name, error.to_string()))?)
    }

    fn of_file(path: &Path) -> Result<Self> {
        Self::of_value(&path.display().to_string(), read_json(path)?)
    }

    fn of_value(place: &str, value: Value) -> Result<Self> {
        let bad = |message: String| Error::format(place, message);
        match value.get("schema_version").and_then(Value::as_u64) {
            Some(version) if version <= u64::from(SCHEMA_VERSION) => {}
            Some(version) => {
                return Err(bad(format!(
                    "schema version {version} is newer than this program's {SCHEMA_VERSION}; use a newer \
                     cluster-health"
                )));
            }
            None => return Err(bad(format!("no schema_version: this is no {CALIBRATION}"))),
        }
        let stored: Stored = serde_json::from_value(value)
            .map_err(|error| bad(format!("{error}: this is no {CALIBRATION}")))?;
        if stored.conventions.gbps != UNIT {
            let unit = stored.conventions.gbps;
            return Err(bad(format!("conventions.gbps: '{unit}' where '{UNIT}' is expected")));
        }
        if stored.h2d_gbps_by_core_device.len() > MOST_MATRICES {
            return Err(bad(format!(
                "h2d_gbps_by_core_device: more than {MOST_MATRICES} matrices"
            )));
        }
        let mut rates = Vec::new();
        for (at, matrix) in stored.h2d_gbps_by_core_device.into_iter().enumerate() {
            let found = KnownRates::of(&matrix)
                .map_err(|what| bad(format!("h2d_gbps_by_core_device[{at}]: {what}")))?;
            // A preflight measures the idle machine.
            if matrix.load == "idle" {
                rates.push(found);
            }
        }
        let bindable = stored.affinity_bindable_cpus.map(|cpus| cpus.into_iter().collect());
        Ok(Self { known: Some(Known { name: place.to_owned(), run: stored.run, bindable, rates }) })
    }

    /// What it is called; `None` for [`itself`](Self::itself).
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.known.as_ref().map(|known| known.name.as_str())
    }

    /// Its sizes, ascending, each once.
    #[must_use]
    pub fn sizes(&self) -> Vec<ByteSize> {
        let rates = self.known.iter().flat_map(|known| &known.rates);
        let sizes: BTreeSet<ByteSize> = rates.map(|rates| rates.bytes).collect();
        sizes.into_iter().collect()
    }
}

impl Known {
    /// True when a device is in one of its matrices.
    pub(super) fn has_device(&self, id: u32) -> bool {
        self.rates.iter().any(|rates| rates.columns.contains_key(&id))
    }
}

impl KnownRates {
    /// # Errors
    /// What is wrong with it.
    fn of(stored: &StoredRates) -> Result<Self, String> {
        let places = |what: &str, ids: &[u32]| {
            if ids.len() > MOST_LINES {
                return Err(format!("{what}: more than {MOST_LINES} ids"));
            }
            let places: BTreeMap<u32, usize> =
                ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
            if places.len() < ids.len() {
                return Err(format!("{what}: an id is there twice"));
            }
            Ok(places)
        };
        let (rows, columns) = (places("rows", &stored.rows)?, places("columns", &stored.columns)?);
        if stored.gbps.len() != rows.len() {
            return Err(format!("gbps: {} rows for {} ids", stored.gbps.len(), rows.len()));
        }
        // Before anything of that size is allocated.
        if let Some(at) = stored.gbps.iter().position(|row| row.len() != columns.len()) {
            let (found, ids) = (stored.gbps[at].len(), columns.len());
            return Err(format!("gbps, row {at}: {found} rates for {ids} columns"));
        }
        let mut gbps = Array2::from_elem((rows.len(), columns.len()), f64::NAN);
        for (row, rates) in stored.gbps.iter().enumerate() {
            for (column, rate) in rates.iter().enumerate() {
                match rate {
                    Some(rate) if *rate > 0.0 => gbps[[row, column]] = *rate,
                    Some(rate) => {
                        return Err(format!("gbps, row {row}, column {column}: {rate} is no rate"));
                    }
                    None => {}
                }
            }
        }
        Ok(Self {
            memory: stored.memory.clone(),
            bytes: stored.bytes,
            clock: stored.clock.clone(),
            blocks: stored.blocks,
            block_sd: stored.block_sd.filter(|sd| *sd >= 0.0),
            rows,
            columns,
            gbps,
        })
    }

    /// The rate of a cell by its ids; NaN = not measured.
    pub(super) fn at(&self, cpu: u32, device: u32) -> f64 {
        let place = self.rows.get(&cpu).zip(self.columns.get(&device));
        place.map_or(f64::NAN, |(row, column)| self.gbps[[*row, *column]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Value {
        serde_json::json!({
            "schema_version": 1,
            "conventions": { "gbps": UNIT },
            "h2d_gbps_by_core_device": [{
                "load": "idle", "memory": "page_locked", "bytes": 1000, "axes": ["cpu", "device"],
                "rows": [4, 2], "columns": [0, 1], "gbps": [[1.0, null], [3.0, 4.0]],
            }, {
                "load": "cpu:2", "memory": "page_locked", "bytes": 500, "axes": ["cpu", "device"],
                "rows": [4], "columns": [0], "gbps": [[1.0]],
            }],
            "affinity_bindable_cpus": [2, 4],
            "of_a_later_version": { "a": [1, 2] },
        })
    }

    #[test]
    fn rates_are_found_by_their_ids() {
        let known = Baseline::of_value("c.json", document()).unwrap().known.unwrap();
        assert_eq!(known.rates.len(), 1, "the load is left out");
        let rates = &known.rates[0];
        assert!((rates.at(2, 0) - 3.0).abs() < 1e-12 && (rates.at(4, 0) - 1.0).abs() < 1e-12);
        assert!(rates.at(4, 1).is_nan() && rates.at(3, 0).is_nan() && rates.at(2, 9).is_nan());
        assert_eq!(known.bindable.unwrap().len(), 2);
        assert_eq!(Baseline::itself().sizes(), []);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let changed = |pointer: &str, value: Value| {
            let mut document = document();
            *document.pointer_mut(pointer).unwrap() = value;
            Baseline::of_value("c.json", document).unwrap_err().to_string()
        };
        let matrix = "/h2d_gbps_by_core_device/0";
        for (pointer, value, wanted) in [
            ("/schema_version".to_owned(), 2.into(), "c.json: schema version 2 is newer"),
            ("/schema_version".to_owned(), Value::Null, "c.json: no schema_version"),
            ("/conventions/gbps".to_owned(), "GiB/s".into(), "conventions.gbps: 'GiB/s'"),
            (format!("{matrix}/rows"), vec![2, 2].into(), "device[0]: rows: an id is there twice"),
            (format!("{matrix}/rows"), vec![2].into(), "device[0]: gbps: 2 rows for 1 ids"),
            (format!("{matrix}/gbps/1"), vec![1.0].into(), "row 1: 1 rates for 2 columns"),
            (format!("{matrix}/gbps/1/0"), (-1.0).into(), "row 1, column 0: -1 is no rate"),
            (matrix.to_owned(), "x".into(), "this is no calibration.json"),
        ] {
            let found = changed(&pointer, value);
            assert!(found.contains(wanted), "{found}");
        }
    }
}
