//! Writing samples as the older tool's `results.json` and `affinity.json`.
//!
//! One metric per point of a matrix. Its rate is bytes ÷ the median iteration, as everywhere in
//! this crate, and `avg_seconds` is that iteration; `seconds` is the sum over all of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use cluster_health_core::{CpuId, DeviceId};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::samples::{PointStatus, RanOn, Sample, Sweep};
use crate::stats::median;

const MIB: u64 = 1 << 20;

/// What the samples do not say.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ExportMeta {
    /// Start of the run, seconds since 1970 (UTC); the points' times follow from it.
    pub started: Option<i64>,
    /// End of the run, seconds since 1970 (UTC).
    pub finished: Option<i64>,
    /// The command line of the run.
    pub argv: Vec<String>,
    /// Environment variables that matter.
    pub env: BTreeMap<String, String>,
    /// `npu`, `host`, …: what comes before the id in `device`.
    pub device_kind: String,
    /// What carried the collectives: `hccl`, `host`, …
    pub collective_backend: String,
    /// Name of the machine.
    pub host: String,
    /// False for a run that did not finish.
    pub complete: bool,
}

/// Writes `results.json`, and `affinity.json` where a census is given (the document of a result
/// folder, whose fields are the older tool's), into `folder`, which is created. Files of these
/// names are replaced. Returns what was left out, one line each.
///
/// # Errors
/// [`Error::Invalid`] when nothing can be exported, [`Error::Io`] when a file cannot be written.
pub fn export(
    folder: &Path,
    samples: &[Sample],
    meta: &ExportMeta,
    affinity: Option<&Value>,
) -> Result<Vec<String>> {
    let mut kept = Vec::new();
    let mut left_out = BTreeMap::<String, usize>::new();
    for sample in samples {
        match metric_class(sample) {
            Ok(()) => kept.push(sample),
            Err(why) => *left_out.entry(why).or_default() += 1,
        }
    }
    let notes: Vec<String> =
        left_out.iter().map(|(why, count)| format!("{count} points left out: {why}")).collect();
    if kept.is_empty() {
        let mut message = "no point that the older format can hold".to_owned();
        for note in &notes {
            message.push_str("; ");
            message.push_str(note);
        }
        return Err(Error::invalid("DIR", message));
    }
    fs::create_dir_all(folder).map_err(|error| Error::io("--out: creating", folder, error))?;
    let results =
        Results { meta: header(&kept, meta, affinity), metrics: Metrics { samples: &kept, meta } };
    write(&folder.join("results.json"), &results)?;
    if let Some(affinity) = affinity {
        write(&folder.join("affinity.json"), affinity)?;
    }
    Ok(notes)
}

/// Whether the older format has a place for the point, or why not.
fn metric_class(sample: &Sample) -> Result<(), String> {
    if !matches!(sample.sweep, Sweep::H2d | Sweep::CorePair) {
        return Err(format!("the older format has no sweep {}", sample.sweep));
    }
    if !sample.is_matrix_point() {
        return Err("sentinel, probe and confirmation visits belong to no matrix".to_owned());
    }
    if sample.load != "idle" {
        return Err(format!("the older format has no load ({})", sample.load));
    }
    if sample.bytes.bytes() == 0 || !sample.bytes.bytes().is_multiple_of(MIB) {
        return Err(format!("size_mb is a whole number of MiB, {} is not", sample.bytes));
    }
    if sample.cell().is_none() {
        return Err("without a cell".to_owned());
    }
    Ok(())
}

fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    let failed = |error| Error::io("writing", path, error);
    let temporary = path.with_extension("json.tmp");
    let mut file = BufWriter::new(crate::files::create(&temporary).map_err(failed)?);
    serde_json::to_writer_pretty(&mut file, value).map_err(|error| failed(error.into()))?;
    file.write_all(b"\n").and_then(|()| file.flush()).map_err(failed)?;
    fs::rename(&temporary, path).map_err(failed)
}

/// The `meta` object; keys come out sorted.
fn header(kept: &[&Sample], meta: &ExportMeta, affinity: Option<&Value>) -> Value {
    let unique = |id: fn(&Sample) -> Option<u64>| -> Vec<u64> {
        let mut ids: Vec<u64> = kept.iter().filter_map(|sample| id(sample)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    put("created_at", meta.started.map(iso).into());
    put("finished_at", meta.finished.map(iso).into());
    put("argv", json!(meta.argv));
    put("env", json!(meta.env));
    put("device_kind", json!(meta.device_kind));
    put("sizes_mb", json!(unique(|sample| Some(sample.bytes.bytes() / MIB))));
    put("partial", json!(!meta.complete));
    put(
        "affinity_summary",
        affinity.and_then(|document| document.get("summary")).cloned().unwrap_or_default(),
    );
    if kept.iter().any(|sample| sample.sweep == Sweep::H2d) {
        put("cpu_ids", json!(unique(|sample| Some(sample.cpu?.0.into()))));
        put("device_ids", json!(unique(|sample| Some(sample.device?.0.into()))));
    }
    if kept.iter().any(|sample| sample.sweep.is_pair()) {
        put("rank0_cpus", json!(unique(|sample| Some(sample.rank0_cpu?.0.into()))));
        put("rank1_cpus", json!(unique(|sample| Some(sample.rank1_cpu?.0.into()))));
        put("device_pair", json!(kept.iter().find_map(|sample| sample.device_pair)));
    }
    Value::Object(map)
}

#[derive(Serialize)]
struct Results<'a> {
    meta: Value,
    metrics: Metrics<'a>,
}

/// The metrics, made while they are written: a pair matrix has hundreds of thousands.
struct Metrics<'a> {
    samples: &'a [&'a Sample],
    meta: &'a ExportMeta,
}

impl Serialize for Metrics<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.samples.iter().map(|sample| metric(sample, self.meta)))
    }
}

/// One metric as an object; keys come out sorted.
fn metric(sample: &Sample, meta: &ExportMeta) -> Value {
    #[allow(clippy::cast_precision_loss, reason = "times and sizes stay far below 2^53")]
    let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
    let mut times: Vec<f64> = sample.iter_ns.iter().map(|time| seconds(*time)).collect();
    let sum = seconds(sample.iter_ns.iter().sum());
    let typical = median(&mut times);
    #[allow(clippy::cast_precision_loss, reason = "times and sizes stay far below 2^53")]
    let rate = sample.bytes.bytes() as f64 / typical / 1e9;
    let measured = sample.status == PointStatus::Measured && rate.is_finite();

    let mut object = json!({
        "status": match sample.status {
            PointStatus::Skipped => "skip",
            _ if measured => "ok",
            _ => "error",
        },
        "size_mb": sample.bytes.bytes() / MIB,
        "repeat": sample.block,
        "iterations": sample.iter_ns.len(),
        "seconds": sum,
        "dtype": "float16",
    });
    let Some(map) = object.as_object_mut() else { return object };
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    if let (Some(started), Some(since)) = (meta.started, sample.t_ns) {
        let since = i64::try_from(since / 1_000_000_000).unwrap_or_default();
        put("ts", iso(started.saturating_add(since)).into());
    }
    if !measured {
        let reason = sample.reason.as_deref().unwrap_or("not measured");
        put("reason", reason.into());
    }
    let device = |id: Option<DeviceId>| id.map(|id| format!("{}:{id}", meta.device_kind));
    if sample.sweep.is_pair() {
        put("test", "core_pair_d2d_matrix".into());
        put("operation", "all_gather".into());
        put("rank0_cpu", json!(sample.rank0_cpu));
        put("rank1_cpu", json!(sample.rank1_cpu));
        put("target_cpu", json!(sample.rank0_cpu));
        put("device_pair", json!(sample.device_pair));
        put("device", json!(device(sample.device_pair.map(|pair| pair[0]))));
        put("device_kind", json!(meta.device_kind));
        put("backend", json!(meta.collective_backend));
        put("host", json!(meta.host));
        put("pid", Value::Null);
        put("rank", 0.into());
        put("local_rank", 0.into());
        put("world_size", 2.into());
        put("local_world_size", 2.into());
        if measured {
            put("alg_gbps", rate.into());
            // × (ranks − 1), and there are two.
            put("rank_exchange_gbps", rate.into());
            put("avg_seconds", typical.into());
        }
    } else {
        put("test", "core_h2d_matrix".into());
        put("operation", "copy".into());
        put("direction", "host_to_device".into());
        put("host_cpu", json!(sample.cpu));
        put("device_id", json!(sample.device));
        put("device", json!(device(sample.device)));
        put("pinned", json!(sample.pinned.map(|pinned| !pinned.is_pageable())));
        let ran_on: &[CpuId] = match &sample.ran_on {
            RanOn::Thread(cpus) => cpus,
            RanOn::Ranks(_) => &[],
        };
        put("bind_actual_cpus", json!(ran_on));
        let list: Vec<String> = ran_on.iter().map(ToString::to_string).collect();
        put("bind_actual_cpus_list", list.join(",").into());
        if measured {
            put("gbps", rate.into());
        }
    }
    object
}

/// ISO 8601 in UTC, whole seconds, from seconds since 1970.
fn iso(seconds: i64) -> String {
    let (days, time) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years that begin in March put the leap day last, so that months have fixed offsets.
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day = days.rem_euclid(146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let in_year = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * in_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}+00:00",
        in_year - (153 * shifted + 2) / 5 + 1,
        time / 3600,
        time / 60 % 60,
        time % 60
    )
}
