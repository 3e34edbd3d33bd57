//! The result folder of a run: manifest, log, lock, resume.
//!
//! | file | content | written |
//! |---|---|---|
//! | `run.json` | [`Manifest`] | by rename, before the first point and at the end |
//! | `samples.jsonl` | one [`Sample`] per line | one write per point, append-only |
//! | `affinity.json` | the census | before the first point |
//!
//! Everything else in the folder is derived from these three, see [`report`](crate::report).

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{channel, sync_channel};
use std::time::SystemTime;

use cluster_health_core::affinity::{Census, CpuRecord, parse_id_list};
use cluster_health_core::load::LoadRecord;
use cluster_health_core::{ByteSize, Machine};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::environment::{ActivityRecord, Environment};
use crate::error::{Error, Result};
use crate::files;
use crate::plan::{CorePairPlan, H2dPlan, Order, PROBE_SIZE};
use crate::policies::{POLICIES_CSV, POLICIES_JSON, POLICIES_PNG, POLICIES_XLSX, PoliciesPlan};
use crate::samples::{PointStatus, Sample, Sweep};
use crate::sizes::{SIZES_CSV, SIZES_JSON, SIZES_PNG, SizesPlan};
use crate::sweep::Timings;
use crate::validate::{VALIDATE_CSV, VALIDATE_JSON, VALIDATE_XLSX, ValidatePlan};

/// Version of all files in the folder.
pub const SCHEMA_VERSION: u32 = 1;

/// A line of the log is never longer; anything longer is not a line of ours.
const LONGEST_LINE: u64 = 16 << 20;

/// Name of the log.
pub const SAMPLES: &str = "samples.jsonl";
/// Name of the manifest.
pub const MANIFEST: &str = "run.json";
/// Name of the census.
pub const AFFINITY: &str = "affinity.json";

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunStatus {
    /// In progress, or killed.
    Running,
    /// Every point of the plan was visited.
    Complete,
    /// Stopped before the last point; `--resume` goes on.
    Interrupted,
}

/// Which program wrote the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tool {
    /// Its version.
    pub version: String,
}

/// One uninterrupted stretch of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Segment {
    /// UTC, RFC 3339.
    pub start: String,
    /// UTC, RFC 3339; `None` while running or after a crash.
    pub end: Option<String>,
    /// First point of the stretch.
    pub first_seq: u64,
    /// First bind to last sample on the machine's clock.
    #[serde(default)]
    pub wall_ns: u64,
    /// Real time, outputs excluded.
    #[serde(default)]
    pub host_ns: u64,
}

/// Number of points by how they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PointCounts {
    /// Timed.
    pub measured: u64,
    /// Not started.
    pub skipped: u64,
    /// Failed, or wrong data.
    pub failed: u64,
    /// Faster than the path can be.
    pub implausible: u64,
}

impl PointCounts {
    /// Counts one point.
    pub fn add(&mut self, status: PointStatus) {
        match status {
            PointStatus::Measured => self.measured += 1,
            PointStatus::Skipped => self.skipped += 1,
            PointStatus::Failed => self.failed += 1,
            PointStatus::Implausible => self.implausible += 1,
        }
    }

    /// True when every point was measured.
    #[must_use]
    pub fn all_measured(&self) -> bool {
        self.skipped + self.failed + self.implausible == 0
    }
}

/// Rates over the measured cells of one size: decimal GB/s, quantiles of type 7.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SummaryRow {
    /// What was measured.
    pub sweep: Sweep,
    /// Bytes per copy; per rank in collectives.
    pub bytes: ByteSize,
    /// Load profile.
    pub load: String,
    /// `h2d`, `d2h`, `per_direction` for both directions at once, or `per_rank` for pairs.
    pub rate: String,
    /// `page_locked` or `pageable` host memory, `device` memory (pairs), `unknown` (imports); never
    /// mixed in one row.
    pub memory: String,
    /// Measured cells.
    pub count: u64,
    /// Slowest cell.
    pub min: f64,
    /// 10th percentile.
    pub p10: f64,
    /// Median.
    pub median: f64,
    /// 90th percentile.
    pub p90: f64,
    /// Fastest cell.
    pub max: f64,
}

impl SummaryRow {
    /// Microseconds of a copy (of a collective for pairs) in the median cell, for messages so small
    /// that their time is a latency: up to 64 KiB.
    #[must_use]
    pub fn latency_us(&self) -> Option<f64> {
        #[allow(clippy::cast_precision_loss, reason = "up to 64 KiB")]
        let bytes = self.bytes.bytes() as f64;
        (self.bytes <= PROBE_SIZE).then(|| bytes / self.median / 1e3)
    }
}

/// A device as the run saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceRecord {
    /// Physical id, as everywhere in the folder.
    pub id: u32,
    /// The runtime's own number.
    pub runtime_id: i64,
    /// Model name.
    pub name: String,
    /// NUMA node next to it.
    pub numa_node: Option<u32>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// Why it could not be used.
    pub unavailable: Option<String>,
}

/// The load beside the points of one sweep, profile and rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadProfileRecord {
    /// The sweep that it accompanied.
    pub sweep: Sweep,
    /// What burned, and how much.
    #[serde(flatten)]
    pub load: LoadRecord,
}

impl LoadProfileRecord {
    /// Adds what was recorded in one segment of a run to what the segments before have.
    pub(crate) fn add(all: &mut Vec<Self>, sweep: Sweep, records: Vec<LoadRecord>) {
        for load in records {
            let same = all.iter_mut().find(|other| {
                other.sweep == sweep
                    && (&other.load.name, other.load.rank) == (&load.name, load.rank)
            });
            match same {
                Some(other) => other.load.merge(&load),
                None => all.push(Self { sweep, load }),
            }
        }
    }
}

/// What an import knows instead of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ImportPlan {
    /// `clusterhealthdetect` or `csv`.
    pub format: String,
    /// The sweep of the sources.
    pub sweep: Sweep,
    /// Names of the source files.
    pub sources: Vec<String>,
    /// True when the scan order was assumed, not told.
    pub scan_order_assumed: bool,
    /// Row ids.
    pub rows: Vec<u32>,
    /// Column ids.
    pub columns: Vec<u32>,
    /// Bytes per copy, ascending.
    pub sizes: Vec<ByteSize>,
    /// Devices of rank 0 and 1.
    pub device_pair: Option<[u32; 2]>,
}

/// What the run set out to do.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanRecord {
    /// The H2D sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub h2d: Option<H2dPlan>,
    /// The core-pair sweep, measured after the H2D sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_pair: Option<CorePairPlan>,
    /// An import of somebody else's measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<ImportPlan>,
    /// The base table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validate: Option<ValidatePlan>,
    /// The size sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sizes: Option<SizesRecord>,
    /// The policy sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<PoliciesPlan>,
}

/// Where a size sweep comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SizesRecord {
    /// It was measured.
    Measured(SizesPlan),
    /// It is somebody else's.
    Imported {
        /// Names of the source files.
        sources: Vec<String>,
    },
}

impl PlanRecord {
    /// The record of an H2D sweep.
    #[must_use]
    pub fn of_h2d(plan: H2dPlan) -> Self {
        Self { h2d: Some(plan), ..Self::default() }
    }

    /// The record of a core-pair sweep.
    #[must_use]
    pub fn of_core_pair(plan: CorePairPlan) -> Self {
        Self { core_pair: Some(plan), ..Self::default() }
    }

    /// True when copies were measured while all other devices copied, too.
    #[must_use]
    pub fn is_concurrent(&self) -> bool {
        self.h2d.as_ref().is_some_and(|plan| plan.concurrent)
    }

    /// The record with a core-pair sweep after what it has.
    #[must_use]
    pub fn with_core_pair(mut self, plan: Option<CorePairPlan>) -> Self {
        self.core_pair = plan;
        self
    }
}

/// The content of `run.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Who wrote it.
    pub tool: Tool,
    /// The command that made the folder, for example `all`.
    pub command: String,
    /// What it set out to do.
    pub plan: PlanRecord,
    /// Seed of all orders.
    pub seed: u64,
    /// `blocks`, `sequential` or `imported-…`.
    pub order: String,
    /// Host, kernel, process.
    pub environment: Environment,
    /// Devices by physical id.
    pub devices: Vec<DeviceRecord>,
    /// Other processes on the devices, before, during and after the run, and their health; empty
    /// for backends that do not tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_activity: Vec<ActivityRecord>,
    /// What burned beside the points of each sweep, by profile and rank, all segments together; empty
    /// for a run of the idle machine alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub load_profiles: Vec<LoadProfileRecord>,
    /// Where the time went, all segments together.
    pub timings: Timings,
    /// First bind to last sample on the machine's clock (virtual on a synthetic machine), summed
    /// over the segments.
    pub wall_ns: u64,
    /// Real time, summed over the segments.
    pub host_ns: u64,
    /// Uninterrupted stretches.
    pub segments: Vec<Segment>,
    /// Where the run stands.
    pub status: RunStatus,
    /// Rates per size.
    pub summary: Vec<SummaryRow>,
    /// Points by how they ended.
    pub points: PointCounts,
    /// `None`: not judged.
    pub verdict: Option<String>,
    /// What a reader should know before trusting the numbers.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Manifest {
    /// A manifest at the start of a run on `machine`.
    #[must_use]
    pub fn of_machine(command: &str, plan: PlanRecord, machine: &Machine) -> Self {
        let h2d = plan.h2d.as_ref().map(|plan| (plan.seed, plan.order));
        let pair = plan.core_pair.as_ref().map(|plan| (plan.seed, plan.order));
        let (seed, order) = h2d.or(pair).unwrap_or_default();
        let order = match order {
            Order::Blocks => "blocks",
            Order::Sequential => "sequential",
        };
        let devices = machine
            .devices()
            .iter()
            .map(|device| {
                let info = device.info();
                DeviceRecord {
                    id: info.id.0,
                    runtime_id: info.runtime_id,
                    name: info.name.clone(),
                    numa_node: info.node.map(|node| node.0),
                    memory_bytes: info.memory.map(ByteSize::bytes),
                    unavailable: info.unavailable.clone(),
                }
            })
            .collect();
        Self {
            seed,
            devices,
            environment: Environment::of(machine),
            ..Self::empty(command, plan, order.to_owned())
        }
    }

    /// A manifest without machine.
    #[must_use]
    pub fn empty(command: &str, plan: PlanRecord, order: String) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            tool: Tool { version: env!("CARGO_PKG_VERSION").to_owned() },
            command: command.to_owned(),
            plan,
            seed: 0,
            order,
            environment: Environment::default(),
            devices: Vec::new(),
            device_activity: Vec::new(),
            load_profiles: Vec::new(),
            timings: Timings::default(),
            wall_ns: 0,
            host_ns: 0,
            segments: Vec::new(),
            status: RunStatus::Running,
            summary: Vec::new(),
            points: PointCounts::default(),
            verdict: None,
            notes: Vec::new(),
        }
    }

    /// Reads `run.json`.
    ///
    /// # Errors
    /// When it is missing, not ours, or of a newer schema.
    pub fn read(dir: &Path) -> Result<Self> {
        let value: Value = read_json(&dir.join(MANIFEST)).map_err(|error| match error {
            Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                let message = "no such file: this is no result folder";
                let source = io::Error::new(io::ErrorKind::NotFound, message);
                Error::io("reading", dir.join(MANIFEST), source)
            }
            other => other,
        })?;
        let place = || dir.join(MANIFEST).display().to_string();
        match value.get("schema_version").and_then(Value::as_u64) {
            Some(version) if version <= u64::from(SCHEMA_VERSION) => {}
            Some(version) => {
                return Err(Error::format(
                    place(),
                    format!(
                        "schema version {version} is newer than this program's {SCHEMA_VERSION}; \
                         use a newer cluster-health"
                    ),
                ));
            }
            None => return Err(Error::format(place(), "no schema_version: not a result folder")),
        }
        serde_json::from_value(value).map_err(|error| Error::format(place(), error.to_string()))
    }
}

/// UTC now, RFC 3339 with seconds.
#[must_use]
pub fn utc_now() -> String {
    let now = time::OffsetDateTime::now_utc();
    now.replace_nanosecond(0)
        .unwrap_or(now)
        .format(&time::format_description::well_known::Rfc3339)
        .unwrap_or_default()
}

/// Seconds since 1970 of an RFC 3339 time, as [`utc_now`] writes it.
#[must_use]
pub fn unix_seconds(text: &str) -> Option<i64> {
    let format = time::format_description::well_known::Rfc3339;
    time::OffsetDateTime::parse(text, &format).ok().map(time::OffsetDateTime::unix_timestamp)
}

/// The largest JSON file that is read.
const LARGEST_JSON: u64 = 256 << 20;

/// Reads a JSON file of at most 256 MiB.
///
/// # Errors
/// When it cannot be read, is a symbolic link or is not what is expected; the error names file, line and column.
pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let file = files::open(path).map_err(|error| Error::io("reading", path, error))?;
    let mut text = Vec::new();
    let length = file
        .take(LARGEST_JSON + 1)
        .read_to_end(&mut text)
        .map_err(|error| Error::io("reading", path, error))?;
    if length as u64 > LARGEST_JSON {
        let message = format!("more than {} MiB, which is not read", LARGEST_JSON >> 20);
        return Err(Error::format(path.display().to_string(), message));
    }
    serde_json::from_slice(&text)
        .map_err(|error| Error::format(path.display().to_string(), error.to_string()))
}

/// Writes a file by rename, so that a reader sees the old or the new one and never half of one.
///
/// # Errors
/// When the folder cannot be written; the old file is then untouched.
pub fn write_by_rename(
    path: &Path,
    write: impl FnOnce(&mut io::BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let result = files::create(&temporary).and_then(|file| {
        let mut out = io::BufWriter::new(file);
        write(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_data()?;
        fs::rename(&temporary, path)
    });
    result.map_err(|error| {
        // The half-written temporary is of no use; that it may stay behind changes nothing.
        fs::remove_file(&temporary).ok();
        Error::io("writing", path, error)
    })
}

/// Writes pretty JSON by rename.
///
/// # Errors
/// As [`write_by_rename`].
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    write_by_rename(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })
}

/// The content of `affinity.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AffinityFile {
    /// UTC, RFC 3339.
    #[serde(default)]
    pub created_at: String,
    /// Counts and reasons.
    #[serde(default)]
    pub summary: Value,
    /// One record per present CPU.
    pub cpus: Vec<CpuRecord>,
}

impl AffinityFile {
    /// The census with the time it is written.
    #[must_use]
    pub fn of(census: &Census) -> Self {
        Self {
            created_at: utc_now(),
            summary: serde_json::to_value(census.summary()).unwrap_or_default(),
            cpus: census.cpus.clone(),
        }
    }

    /// The core of each CPU whose SMT siblings are known, named by its lowest CPU.
    #[must_use]
    pub fn cores(&self) -> BTreeMap<u32, u32> {
        self.cpus
            .iter()
            .filter_map(|cpu| {
                let siblings = parse_id_list("thread_siblings", &cpu.thread_siblings).ok()?;
                Some((cpu.cpu.0, siblings.into_iter().min()?))
            })
            .collect()
    }

    /// NUMA node of each CPU that has one.
    #[must_use]
    pub fn nodes(&self) -> BTreeMap<u32, u32> {
        self.cpus.iter().filter_map(|cpu| Some((cpu.cpu.0, cpu.numa_node?.0))).collect()
    }
}

/// Reads a log line by line.
#[derive(Debug)]
pub struct SampleReader {
    input: BufReader<File>,
    path: PathBuf,
    line: Vec<u8>,
    number: u64,
    /// Bytes up to the end of the last line that was read whole.
    end: u64,
}

/// Where the time went from point `first_seq` to the end of a log; data checks are not in it.
///
/// # Errors
/// When the log cannot be read.
pub fn timings_of_log(dir: &Path, first_seq: u64) -> Result<Timings> {
    let mut timings = Timings::default();
    let mut first = None;
    for sample in SampleReader::open(dir)? {
        let sample = sample?;
        if sample.seq < first_seq {
            continue;
        }
        let iterations = sample.host_times().iter().sum::<u64>();
        let warmup = sample.warmup_ns.iter().sum::<u64>();
        timings += Timings {
            iterations_ns: iterations,
            warmup_ns: warmup,
            touch_ns: sample.touch_ns,
            bind_ns: sample.bind_ns,
            ..Timings::default()
        };
        let begin = sample.t_ns.unwrap_or(0);
        let end = begin + iterations + warmup + sample.touch_ns + sample.bind_ns;
        timings.wall_ns = end.saturating_sub(*first.get_or_insert(begin));
    }
    Ok(timings)
}

/// A line that is not a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BadLine {
    /// Number from 1.
    pub line: u64,
    /// What is wrong.
    pub reason: String,
    /// True for a last line without its end: the point that was in flight at a crash.
    pub torn: bool,
}

/// Threads that parse beside the one that reads and the one that takes.
const PARSERS: usize = 2;
/// Bytes that are parsed together.
const BATCH: usize = 1 << 17;

/// Lines and what they say. Its room goes round between the threads and is used again: otherwise one
/// thread would allocate what another one frees, which takes as long as the parsing.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    /// Where each line ends.
    ends: Vec<usize>,
    /// Number of the first one.
    first: u64,
    /// At the places of their lines; those beyond, and of bad lines, are of no meaning.
    samples: Vec<Sample>,
    /// The bad lines in their order.
    bad: Vec<BadLine>,
}

impl Batch {
    fn parse(&mut self) {
        self.bad.clear();
        let blank = || Sample::new(0, Sweep::H2d, ByteSize(0));
        self.samples.resize_with(self.samples.len().max(self.ends.len()), blank);
        let mut start = 0;
        for ((number, &end), sample) in (self.first..).zip(&self.ends).zip(&mut self.samples) {
            self.bad.extend(parse(&self.bytes[start..end], number, sample).err());
            start = end;
        }
    }

    fn for_each(&self, take: &mut dyn FnMut(Result<&Sample, &BadLine>)) {
        let mut bad = self.bad.iter().peekable();
        for (number, (_, sample)) in (self.first..).zip(self.ends.iter().zip(&self.samples)) {
            take(bad.next_if(|bad| bad.line == number).map_or(Ok(sample), Err));
        }
    }
}

/// Reads a line of a log into `sample`, whose room it uses again.
fn parse(line: &[u8], number: u64, sample: &mut Sample) -> Result<(), BadLine> {
    let bad = |reason: String, torn| BadLine { line: number, reason, torn };
    if line.last() != Some(&b'\n') {
        return Err(bad("the line has no end".to_owned(), true));
    }
    if crate::line::parse(line, sample).is_none() {
        *sample = serde_json::from_slice(line.trim_ascii_end())
            .map_err(|error| bad(error.to_string(), false))?;
    }
    if sample.has_possible_times() {
        Ok(())
    } else {
        Err(bad("its times are longer than 146 years".to_owned(), false))
    }
}

impl SampleReader {
    /// Opens the log of a result folder.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(SAMPLES);
        let file = files::open(&path).map_err(|error| Error::io("reading", &path, error))?;
        let input = BufReader::with_capacity(1 << 18, file);
        Ok(Self { input, path, line: Vec::new(), number: 0, end: 0 })
    }

    /// The next line as it stands in [`line`](Self::line), with its number; false at the end.
    fn read_line(&mut self) -> Result<bool> {
        self.line.clear();
        let mut limited = (&mut self.input).take(LONGEST_LINE);
        let length = limited
            .read_until(b'\n', &mut self.line)
            .map_err(|error| Error::io("reading", &self.path, error))?;
        if length == 0 {
            return Ok(false);
        }
        self.number += 1;
        if self.line.last() == Some(&b'\n') {
            self.end += length as u64;
        } else if length as u64 == LONGEST_LINE {
            return Err(Error::format(
                format!("{}, line {}", self.path.display(), self.number),
                "longer than any line of a log",
            ));
        }
        Ok(true)
    }

    /// The next line: a sample, or why it is none; `None` at the end.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn next_line(&mut self) -> Result<Option<Result<Sample, BadLine>>> {
        if !self.read_line()? {
            return Ok(None);
        }
        let mut sample = Sample::new(0, Sweep::H2d, ByteSize(0));
        Ok(Some(parse(&self.line, self.number, &mut sample).map(|()| sample)))
    }

    /// Hands every line that is left to `take`, in their order, while other threads parse those that
    /// follow: parsing is most of the work of reading a log.
    ///
    /// # Errors
    /// When the file cannot be read; the lines before that were handed over.
    pub fn for_each_line(mut self, take: &mut dyn FnMut(Result<&Sample, &BadLine>)) -> Result<()> {
        std::thread::scope(|scope| {
            let mut to_parsers = Vec::with_capacity(PARSERS);
            let mut from_parsers = Vec::with_capacity(PARSERS);
            let (send_used, used) = channel::<Batch>();
            for _ in 0..PARSERS {
                let (send_raw, raw) = sync_channel::<Batch>(2);
                let (send_parsed, parsed) = sync_channel::<Batch>(2);
                scope.spawn(move || {
                    for mut batch in raw {
                        batch.parse();
                        // Nobody waits any more: the reader ends, too.
                        if send_parsed.send(batch).is_err() {
                            break;
                        }
                    }
                });
                to_parsers.push(send_raw);
                from_parsers.push(parsed);
            }
            let reader = scope.spawn(move || -> Result<()> {
                for parser in to_parsers.iter().cycle() {
                    let mut batch = used.try_recv().unwrap_or_default();
                    batch.first = self.number + 1;
                    batch.bytes.clear();
                    batch.ends.clear();
                    while batch.bytes.len() < BATCH {
                        if !self.read_line()? {
                            break;
                        }
                        batch.bytes.extend_from_slice(&self.line);
                        batch.ends.push(batch.bytes.len());
                    }
                    let is_last = batch.ends.is_empty();
                    if is_last || parser.send(batch).is_err() {
                        break;
                    }
                }
                Ok(())
            });
            for parsed in from_parsers.iter().cycle() {
                let Ok(batch) = parsed.recv() else { break };
                batch.for_each(&mut *take);
                // The reader may have ended.
                send_used.send(batch).ok();
            }
            reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Bytes up to the end of the last whole line.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }
}

/// Every bad line is an error; a torn tail is the end.
impl Iterator for SampleReader {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.next_line() {
            Err(error) => Some(Err(error)),
            Ok(None) => None,
            Ok(Some(Ok(sample))) => Some(Ok(sample)),
            Ok(Some(Err(bad))) if bad.torn => None,
            Ok(Some(Err(bad))) => Some(Err(Error::format(
                format!("{}, line {}", self.path.display(), bad.line),
                bad.reason,
            ))),
        }
    }
}

/// A result folder that this process writes; locked until it is dropped.
#[derive(Debug)]
pub struct RunFolder {
    dir: PathBuf,
    log: File,
    /// Bytes of whole lines in the log.
    len: u64,
    line: Vec<u8>,
    next_seq: u64,
    /// When an interrupted run wrote its last line.
    written: Option<SystemTime>,
}

/// How a folder is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OpenMode {
    /// The folder must be absent or empty.
    #[default]
    New,
    /// Results of an earlier run in it are replaced.
    Force,
    /// An interrupted run of the same plan goes on; absent or empty = start.
    Resume,
}

/// What opening a folder found.
#[derive(Debug)]
#[non_exhaustive]
pub enum Opened {
    /// Start from the first point.
    Fresh(RunFolder),
    /// Go on; the manifest is the one of the interrupted run.
    Interrupted(RunFolder, Box<Manifest>),
    /// Nothing to do.
    Complete(Box<Manifest>),
}

fn lock(file: &File, dir: &Path) -> Result<()> {
    use rustix::fs::{FlockOperation, flock};
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Busy(format!(
            "{} is in use by another run; wait for it or choose another folder",
            dir.display()
        ))),
        // Some network file systems have no locks: the run goes on without one.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A result folder that nobody else may write, until this is dropped.
#[derive(Debug)]
pub struct FolderLock {
    _log: File,
}

impl FolderLock {
    /// Locks the result folder `dir`, whose outputs are about to be made again.
    ///
    /// # Errors
    /// When it holds no log or is in use.
    pub fn take(dir: &Path) -> Result<Self> {
        let path = dir.join(SAMPLES);
        let log = files::open(&path).map_err(|error| Error::io("opening", &path, error))?;
        lock(&log, dir)?;
        Ok(Self { _log: log })
    }
}

/// Files of a result folder: only these are ever replaced.
fn is_ours(name: &str) -> bool {
    let fixed = [
        MANIFEST,
        SAMPLES,
        AFFINITY,
        "matrices.xlsx",
        "report.md",
        "calibration.json",
        "placement.json",
        VALIDATE_JSON,
        VALIDATE_CSV,
        VALIDATE_XLSX,
        POLICIES_JSON,
        POLICIES_CSV,
        POLICIES_XLSX,
        POLICIES_PNG,
        SIZES_JSON,
        SIZES_CSV,
        SIZES_PNG,
    ];
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let matrix = (name.starts_with("h2d-") || name.starts_with("core-pair-"))
        && [".csv", ".npy", ".png"].iter().any(|end| name.ends_with(end));
    fixed.contains(&name) || matrix
}

/// What a run leaves that was killed before its manifest and its first point.
fn is_unstarted(dir: &Path, names: &[String]) -> bool {
    let empty = |name: &str| fs::metadata(dir.join(name)).is_ok_and(|data| data.len() == 0);
    let (manifest, affinity) = (format!("{MANIFEST}.tmp"), format!("{AFFINITY}.tmp"));
    names.iter().all(|name| {
        [AFFINITY, &manifest, &affinity].contains(&name.as_str())
            || (name == SAMPLES && empty(name))
    })
}

impl RunFolder {
    /// Opens `dir` for a run that `manifest` describes.
    ///
    /// # Errors
    /// When the folder cannot be written, is not empty ([`OpenMode::New`]), is in use, or holds
    /// another plan's run ([`OpenMode::Resume`]).
    pub fn open(dir: &Path, mode: OpenMode, manifest: &Manifest) -> Result<Opened> {
        let failed = |action: &str, error| Error::io(format!("--out: {action}"), dir, error);
        fs::create_dir_all(dir).map_err(|error| failed("creating", error))?;
        let mut names = Vec::new();
        for entry in fs::read_dir(dir).map_err(|error| failed("reading", error))? {
            let entry = entry.map_err(|error| failed("reading", error))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        let has_run = names.iter().any(|name| name == MANIFEST);
        match mode {
            OpenMode::New if !names.is_empty() => {
                return Err(Error::invalid(
                    "--out",
                    format!(
                        "{} is not empty; use --resume to go on with an interrupted run, --force \
                         to replace its results, or another folder",
                        dir.display()
                    ),
                ));
            }
            OpenMode::Resume if has_run => return Self::resume(dir, manifest),
            OpenMode::Resume if !is_unstarted(dir, &names) => {
                return Err(Error::invalid(
                    "--resume",
                    format!("{} is not empty and holds no run.json", dir.display()),
                ));
            }
            _ => {}
        }
        let folder = Self::locked(dir)?;
        folder.log.set_len(0).map_err(|error| Error::io("writing", dir.join(SAMPLES), error))?;
        for name in names.iter().filter(|name| is_ours(name) && *name != SAMPLES) {
            let path = dir.join(name);
            fs::remove_file(&path).map_err(|error| Error::io("replacing", &path, error))?;
        }
        Ok(Opened::Fresh(folder))
    }

    fn locked(dir: &Path) -> Result<Self> {
        let path = dir.join(SAMPLES);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let log = files::open_with(&mut options, &path)
            .map_err(|error| Error::io("--out: opening", &path, error))?;
        lock(&log, dir)?;
        Ok(Self {
            dir: dir.to_owned(),
            log,
            len: 0,
            line: Vec::with_capacity(1024),
            next_seq: 0,
            written: None,
        })
    }

    fn resume(dir: &Path, wanted: &Manifest) -> Result<Opened> {
        let mut folder = Self::locked(dir)?;
        let found = Manifest::read(dir)?;
        if let Some(difference) = difference(&found, wanted) {
            return Err(Error::invalid(
                "--resume",
                format!("{} holds a different run: {difference}", dir.display()),
            ));
        }
        if found.status == RunStatus::Complete {
            return Ok(Opened::Complete(Box::new(found)));
        }
        let mut reader = SampleReader::open(dir)?;
        while let Some(sample) = reader.next().transpose()? {
            // What is used of such a log is for a reader to see, not to be measured on.
            if sample.seq != folder.next_seq {
                return Err(Error::format(
                    format!("{}, line {}", reader.path.display(), reader.number),
                    format!(
                        "is point {} where {} comes next; `cluster-health report` uses the good lines",
                        sample.seq, folder.next_seq
                    ),
                ));
            }
            folder.next_seq += 1;
        }
        folder.len = reader.end();
        let path = dir.join(SAMPLES);
        // Before the torn tail is cut off, which would count as a write.
        folder.written = folder.log.metadata().and_then(|data| data.modified()).ok();
        folder
            .log
            .set_len(folder.len)
            .and_then(|()| folder.log.seek(SeekFrom::Start(folder.len)))
            .map_err(|error| Error::io("resuming", &path, error))?;
        Ok(Opened::Interrupted(folder, Box::new(found)))
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `seq` of the point that the log goes on with: 0 in an empty log.
    #[must_use]
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Time from the run's first bind to now, for a run that goes on on a real machine: the last
    /// point's end and the pause since, which a clock that was set back cannot make negative.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn elapsed_ns(&self, machine: &Machine) -> Result<u64> {
        let mut last = None;
        for sample in SampleReader::open(&self.dir)? {
            last = Some(sample?);
        }
        let Some(last) = last else { return Ok(0) };
        let spent = last.bind_ns
            + last.touch_ns
            + last.warmup_ns.iter().chain(last.host_times()).sum::<u64>();
        let pause = if machine.has_virtual_time() {
            0
        } else {
            self.written
                .and_then(|time| SystemTime::now().duration_since(time).ok())
                .and_then(|pause| u64::try_from(pause.as_nanos()).ok())
                .unwrap_or(0)
        };
        Ok((last.t_ns.unwrap_or(0) + spent).saturating_add(pause))
    }

    /// Appends one line with one write.
    ///
    /// # Errors
    /// When the point is not the one that the log goes on with, or the line cannot be written whole:
    /// what was written before stays valid, the part of this line is cut off.
    pub fn append(&mut self, sample: &Sample) -> Result<()> {
        let path = || self.dir.join(SAMPLES);
        if sample.seq != self.next_seq {
            return Err(Error::format(
                path().display().to_string(),
                format!("goes on with point {}, not {}", self.next_seq, sample.seq),
            ));
        }
        self.line.clear();
        serde_json::to_writer(&mut self.line, sample)
            .map_err(|error| Error::io("writing", path(), error.into()))?;
        self.line.push(b'\n');
        if let Err(error) = self.log.write_all(&self.line) {
            // A torn tail would be cut off by a reader as well.
            self.log.set_len(self.len).ok();
            self.log.seek(SeekFrom::Start(self.len)).ok();
            return Err(Error::io("writing", path(), error));
        }
        self.len += self.line.len() as u64;
        self.next_seq = sample.seq + 1;
        Ok(())
    }

    /// Makes sure that the log is on the disk.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn sync(&self) -> Result<()> {
        self.log.sync_data().map_err(|error| Error::io("writing", self.dir.join(SAMPLES), error))
    }

    /// Writes `run.json`.
    ///
    /// # Errors
    /// When it cannot be written; the old one is then untouched.
    pub fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        write_json(&self.dir.join(MANIFEST), manifest)
    }

    /// Writes `affinity.json`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_affinity(&self, census: &Census) -> Result<()> {
        write_json(&self.dir.join(AFFINITY), &AffinityFile::of(census))
    }
}

/// The first difference between a run and what is asked for now, in words.
fn difference(found: &Manifest, wanted: &Manifest) -> Option<String> {
    let value = |manifest: &Manifest| serde_json::to_value(&manifest.plan).unwrap_or_default();
    if found.environment.backend != wanted.environment.backend {
        return Some(format!(
            "backend: {} then, {} now",
            found.environment.backend, wanted.environment.backend
        ));
    }
    for (what, then, now) in [
        ("host", &found.environment.hostname, &wanted.environment.hostname),
        ("processor", &found.environment.cpu_model, &wanted.environment.cpu_model),
    ] {
        if then != now {
            let word = |name: &Option<String>| name.clone().unwrap_or_else(|| "unknown".to_owned());
            return Some(format!("{what}: {} then, {} now", word(then), word(now)));
        }
    }
    if found.environment.scenario != wanted.environment.scenario {
        return Some("the scenario of the synthetic machine changed".to_owned());
    }
    first_difference("plan", &value(found), &value(wanted))
}

fn first_difference(place: &str, found: &Value, wanted: &Value) -> Option<String> {
    match (found, wanted) {
        (Value::Object(left), Value::Object(right)) => {
            left.keys().chain(right.keys()).find_map(|key| {
                let get = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or(Value::Null)
                };
                first_difference(&format!("{place}.{key}"), &get(left), &get(right))
            })
        }
        _ if found == wanted => None,
        _ => Some(format!("{place}: {found} then, {wanted} now")),
    }
}

#[cfg(test)]
mod tests {
    use cluster_health_core::{CpuId, DeviceId};
    use serde_json::json;

    use super::*;

    fn manifest() -> Manifest {
        Manifest::empty("h2d", PlanRecord::default(), "blocks".to_owned())
    }

    fn sample(seq: u64) -> Sample {
        let mut sample = Sample::new(seq, Sweep::H2d, ByteSize::mib(1));
        (sample.cpu, sample.device) = (Some(CpuId(1)), Some(DeviceId(0)));
        sample.iter_ns = vec![10 + seq];
        sample
    }

    fn fresh(dir: &Path) -> RunFolder {
        match RunFolder::open(dir, OpenMode::New, &manifest()).unwrap() {
            Opened::Fresh(folder) => folder,
            other => panic!("{other:?}"),
        }
    }

    fn read(dir: &Path) -> Vec<Sample> {
        SampleReader::open(dir).unwrap().collect::<Result<_>>().unwrap()
    }

    #[test]
    fn samples_are_read_back_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut folder = fresh(dir.path());
        for seq in 0..3 {
            folder.append(&sample(seq)).unwrap();
        }
        assert_eq!(folder.next_seq(), 3);
        assert_eq!(read(dir.path()), [0, 1, 2].map(sample));
    }

    #[test]
    fn a_torn_tail_is_the_end_and_a_bad_line_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fresh(dir.path()).append(&sample(0)).unwrap();
        let path = dir.path().join(SAMPLES);
        let whole = fs::read(&path).unwrap();

        fs::write(&path, [&whole[..], &whole[..40]].concat()).unwrap();
        let mut reader = SampleReader::open(dir.path()).unwrap();
        assert_eq!(reader.next_line().unwrap().unwrap().unwrap(), sample(0));
        assert!(reader.next_line().unwrap().unwrap().unwrap_err().torn);
        assert_eq!(reader.end(), whole.len() as u64);
        assert_eq!(read(dir.path()), [sample(0)]);

        fs::write(&path, [&whole[..], b"{}\n", &whole[..]].concat()).unwrap();
        let lines: Vec<Result<Sample>> = SampleReader::open(dir.path()).unwrap().collect();
        assert_eq!(lines.len(), 3);
        let error = lines[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("seq"), "{error}");
    }

    #[test]
    fn times_that_no_clock_shows_are_bad_lines_and_sums_end_at_the_largest() {
        let dir = tempfile::tempdir().unwrap();
        let mut folder = fresh(dir.path());
        let longest = |seq, more| {
            let mut sample = sample(seq);
            (sample.iter_ns, sample.t_ns) = (vec![1 << 60, 1 << 60], Some((1 << 61) - 1 + more));
            sample
        };
        for seq in 0..9 {
            folder.append(&longest(seq, u64::from(seq == 8))).unwrap();
        }
        let mut reader = SampleReader::open(dir.path()).unwrap();
        for seq in 0..8 {
            assert_eq!(reader.next_line().unwrap().unwrap(), Ok(longest(seq, 0)));
        }
        let bad = reader.next_line().unwrap().unwrap().unwrap_err();
        assert_eq!((bad.line, bad.torn), (9, false));
        assert_eq!(bad.reason, "its times are longer than 146 years");
        assert_eq!(timings_of_log(dir.path(), 0).unwrap_err().kind(), "format");

        let path = dir.path().join(SAMPLES);
        let text = fs::read_to_string(&path).unwrap();
        let good: String = text.split_inclusive('\n').take(8).collect();
        fs::write(&path, good).unwrap();
        // 8 × 2⁶¹ is one more than a number of 64 bits holds.
        let timings = timings_of_log(dir.path(), 0).unwrap();
        assert_eq!((timings.iterations_ns, timings.wall_ns), (u64::MAX, 1 << 61));
    }

    #[test]
    fn a_folder_is_locked_while_it_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let folder = fresh(dir.path());
        folder.write_manifest(&manifest()).unwrap();
        let open = |mode| RunFolder::open(dir.path(), mode, &manifest());
        for mode in [OpenMode::Force, OpenMode::Resume] {
            assert_eq!(open(mode).unwrap_err().kind(), "busy");
        }
        assert_eq!(FolderLock::take(dir.path()).unwrap_err().kind(), "busy");
        drop(folder);
        let lock = FolderLock::take(dir.path()).unwrap();
        assert_eq!(open(OpenMode::Resume).unwrap_err().kind(), "busy");
        drop(lock);
        assert!(open(OpenMode::Resume).is_ok());
    }

    #[test]
    fn resuming_cuts_the_torn_tail_and_appends() {
        let dir = tempfile::tempdir().unwrap();
        let mut folder = fresh(dir.path());
        folder.write_manifest(&manifest()).unwrap();
        folder.append(&sample(0)).unwrap();
        folder.append(&sample(1)).unwrap();
        drop(folder);
        let path = dir.path().join(SAMPLES);
        let mut text = fs::read(&path).unwrap();
        text.extend(b"{\"seq\":2,\"t_ns\"");
        fs::write(&path, text).unwrap();
        match RunFolder::open(dir.path(), OpenMode::Resume, &manifest()).unwrap() {
            Opened::Interrupted(mut folder, _) => {
                assert_eq!(folder.next_seq(), 2);
                folder.append(&sample(2)).unwrap();
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(read(dir.path()), [0, 1, 2].map(sample));
    }

    #[test]
    fn only_our_own_files_are_ours() {
        let ours = "run.json run.json.tmp samples.jsonl affinity.json matrices.xlsx report.md \
                    h2d-16MiB.csv h2d-16MiB-pageable.npy core-pair-8MiB.png validate.xlsx \
                    policies.json policies.csv policies.xlsx policies.png";
        let others = "run.json.bak notes.md h2d.csv h2d-16MiB.csv.gz my-h2d-16MiB.csv a.npy \
                      samples.jsonl.old .tmp";
        assert!(ours.split(' ').all(is_ours));
        assert!(!others.split(' ').any(is_ours));
    }

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let (left, right) = (json!({"a": {"b": [1], "c": 2}}), json!({"a": {"b": [1], "c": 3}}));
        assert_eq!(first_difference("plan", &left, &left), None);
        let found = first_difference("plan", &left, &right).unwrap();
        assert_eq!(found, "plan.a.c: 2 then, 3 now");
        let found = first_difference("plan", &json!({}), &json!({"d": null, "e": 1})).unwrap();
        assert_eq!(found, "plan.e: null then, 1 now");
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        fs::write(&path, "old").unwrap();
        let error = write_by_rename(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("full"))
        });
        assert_eq!(error.unwrap_err().to_string(), format!("writing {}: full", path.display()));
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(unix_seconds("2026-11-30T10:20:30Z"), Some(1_796_034_030));
        assert_eq!(unix_seconds("2026-11-30T12:20:30+02:00"), Some(1_796_034_030));
        assert_eq!(unix_seconds("yesterday"), None);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let told = u64::try_from(unix_seconds(&utc_now()).unwrap()).unwrap();
        assert!(told.abs_diff(now) <= 2);
    }
}
