//! Size sweeps of the older tool: `series,size_mb,gbps,iters,avg_seconds`.

use std::fs::File;
use std::path::Path;

use cluster_health_core::ByteSize;

use super::{Series, SizeSweep, SizeVisit};
use crate::error::{Error, Result};
use crate::run::{SCHEMA_VERSION, Tool};
use crate::samples::Timer;
use crate::visit::{Operation, Visit, whole_ns};

/// Most rows of a file.
const MOST_ROWS: usize = 100_000;

const COLUMNS: [&str; 5] = ["series", "size_mb", "gbps", "iters", "avg_seconds"];

/// Reads a size sweep of the older tool. Its "MB" is MiB; of each point it has the mean time of its
/// iterations, which is kept as one.
///
/// # Errors
/// When the file cannot be read or is no such table; the error names the line.
pub fn import(path: &Path) -> Result<SizeSweep> {
    let file = File::open(path).map_err(|error| Error::io("reading", path, error))?;
    let mut reader = csv::Reader::from_reader(crate::output::csv::limited(file, path)?);
    let place = |line: u64| format!("{}, line {line}", path.display());
    let header = reader.headers().map_err(|error| Error::format(place(1), error.to_string()))?;
    if header.iter().collect::<Vec<_>>() != COLUMNS {
        let message = format!("is no size sweep: its columns are not {}", COLUMNS.join(","));
        return Err(Error::format(place(1), message));
    }
    let mut series: Vec<Series> = Vec::new();
    for (index, record) in reader.records().enumerate() {
        let line = index as u64 + 2;
        let record = record.map_err(|error| Error::format(place(line), error.to_string()))?;
        if index >= MOST_ROWS {
            return Err(Error::format(place(line), format!("more than {MOST_ROWS} rows")));
        }
        let field = |column: usize| record.get(column).unwrap_or_default().trim();
        let bad = |column: usize, why: &str| {
            let message = format!("{} '{}': {why}", COLUMNS[column], field(column));
            Error::format(place(line), message)
        };
        let name = field(0);
        let operation = match name {
            "h2d" => Operation::H2d,
            "d2h" => Operation::D2h,
            _ if name.starts_with("d2d") => Operation::D2dSameDevice,
            _ if name.starts_with("hccl") || name.starts_with("all_gather") => Operation::AllGather,
            _ => return Err(bad(0, "unknown; h2d, d2h, d2d… and hccl… are known")),
        };
        let bytes: ByteSize =
            format!("{}MiB", field(1)).parse().map_err(|_| bad(1, "is no size in MiB"))?;
        let seconds: f64 = field(4).parse().map_err(|_| bad(4, "is no number"))?;
        if !(seconds > 0.0 && seconds < 1e6) {
            return Err(bad(4, "is no time in seconds"));
        }
        let times = Visit {
            settled: true,
            iter_ns: vec![whole_ns(seconds * 1e9)],
            timer: Some(Timer::Host),
            ..Visit::default()
        };
        let label = Some(name.to_owned());
        let at = match series.iter().position(|found| found.label == label) {
            Some(at) => at,
            None => {
                let new = Series::new(operation, crate::validate::IDLE, Vec::new(), Vec::new());
                series.push(Series { label, ..new });
                series.len() - 1
            }
        };
        let found = &mut series[at];
        if found.visits.iter().any(|visit| visit.bytes == bytes) {
            return Err(bad(1, "is there twice in its series"));
        }
        let visit = SizeVisit { bytes, block: 0, again: false, times: Some(times), reason: None };
        found.visits.push(visit);
    }
    if series.is_empty() {
        return Err(Error::format(path.display().to_string(), "holds no point"));
    }
    let mut sweep = SizeSweep {
        schema_version: SCHEMA_VERSION,
        tool: Tool { version: env!("CARGO_PKG_VERSION").to_owned() },
        complete: true,
        expect_hbm_gbps: None,
        series,
    };
    sweep.evaluate();
    Ok(sweep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_sweep_has_the_published_plateau_and_its_cache() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../shared/data/A3-180-h2d-d2d-hccl-size-sweep-20260708.csv");
        if !path.exists() {
            println!("skipped: no recorded data");
            return;
        }
        let sweep = import(&path).unwrap();
        assert_eq!(sweep.series.len(), 6);
        assert!(sweep.series.iter().all(|series| series.points.len() == 14));
        let of = |operation| sweep.series.iter().find(|s| s.operation == operation).unwrap();
        // The recorded rates are the quotients of size and time.
        let h2d = of(Operation::H2d);
        assert!((h2d.points[13].gbps - 27.494_452_711_833_85).abs() < 1e-6);
        // 0.125 to 0.25 MiB and 16 to 32 MiB: the recording has stalls there.
        assert!(h2d.points.iter().any(|point| point.non_monotone));
        let d2d = of(Operation::D2dSameDevice);
        let cached: Vec<u64> = d2d
            .points
            .iter()
            .filter(|point| point.cached)
            .map(|point| point.bytes.bytes() >> 20)
            .collect();
        assert_eq!(cached, [16, 32, 64]);
        // Truth 7 of the recordings: the plateau is 600 to 620 GB/s.
        let beta = d2d.fit.as_ref().unwrap().beta_gbps;
        assert!((590.0..=640.0).contains(&beta), "{beta}");
    }

    #[test]
    fn foreign_files_are_refused_with_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sweep.csv");
        let head = "series,size_mb,gbps,iters,avg_seconds\n";
        for (text, words) in [
            ("cpu,0,1\n0,1,2\n".to_owned(), "line 1: is no size sweep"),
            (format!("{head}h2d,x,1,1,0.1\n"), "line 2: size_mb 'x'"),
            (
                format!("{head}h2d,1,1,1,0.1\nh2d,1,1,1,0.1\n"),
                "line 3: size_mb '1': is there twice",
            ),
            (format!("{head}h2d,1,1,1,-1\n"), "line 2: avg_seconds '-1'"),
            (format!("{head}what,1,1,1,1\n"), "line 2: series 'what'"),
            (head.to_owned(), "holds no point"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = import(&path).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
