//! One function per kind of input that comes from elsewhere. Each takes any bytes and panics when the
//! library breaks a promise: that what it reads it writes and reads again alike, that both readers
//! of a log agree, that limits hold, that nothing outside a folder is read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cluster_health_core::affinity::{CpuSet, parse_id_list};
use cluster_health_core::topology::Topology;
use cluster_health_core::{
    Bandwidth, ByteSize, LoadProfile, Machine, RankEnvironment, RankFamily, RankGroup, Scenario,
    parse_duration,
};
use cluster_health_matrix::calibrate::{CALIBRATION, Calibration};
use cluster_health_matrix::compare::{CompareOptions, compare};
use cluster_health_matrix::older::import::{ImportRequest, Imported, SourceFormat, read};
use cluster_health_matrix::output::{csv, markdown};
use cluster_health_matrix::placement::Placement;
use cluster_health_matrix::policies::{Policy, parse_policies};
use cluster_health_matrix::preflight::{Baseline, Gate, Outcome, Preflight};
use cluster_health_matrix::report::{Report, ReportOptions};
use cluster_health_matrix::run::{
    MANIFEST, Manifest, OpenMode, RunFolder, SAMPLES, SampleReader, timings_of_log, write_json,
};
use cluster_health_matrix::samples::{Sample, Sweep};
use cluster_health_matrix::session::record_import;
use cluster_health_matrix::{policies, sizes, validate};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

/// A target: its name, which is also the name of its corpus, and its body.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 11] = [
    ("run_folder", run_folder),
    ("samples", samples),
    ("baseline", baseline),
    ("older_json", older_json),
    ("older_xlsx", older_xlsx),
    ("older_csv", older_csv),
    ("scenario", scenario),
    ("lists", lists),
    ("launcher", launcher),
    ("sysfs", sysfs),
    ("channel", channel),
];

/// A folder for one input. Ranks meet in one, so its path has to stay short.
fn folder() -> TempDir {
    tempfile::Builder::new().prefix("fuzz").tempdir().unwrap()
}

/// The files that an input describes: each begins with a line `=== PATH`. Paths that would lead
/// out of the folder are left out: where files lie is not the input's to say.
fn files(data: &[u8]) -> BTreeMap<PathBuf, Vec<u8>> {
    const MARK: &[u8] = b"=== ";
    let mut found: BTreeMap<PathBuf, Vec<u8>> = BTreeMap::new();
    let mut current = None;
    for line in data.split_inclusive(|&byte| byte == b'\n') {
        if let Some(name) = line.strip_prefix(MARK) {
            let path = PathBuf::from(String::from_utf8_lossy(name).trim());
            let inside = path
                .components()
                .all(|part| matches!(part, Component::Normal(name) if name.len() <= 100));
            let taken = inside
                && !path.as_os_str().as_encoded_bytes().contains(&0)
                && path.components().count() <= 12
                && found.len() < 64;
            current = taken.then(|| found.entry(path).or_default());
        } else if let Some(content) = &mut current {
            content.extend_from_slice(line);
        }
    }
    found
}

fn write_files(root: &Path, data: &[u8]) {
    for (path, content) in files(data) {
        let path = root.join(path);
        // A file may stand where another one needs a folder.
        if fs::create_dir_all(path.parent().unwrap()).is_ok() {
            drop(fs::write(path, content));
        }
    }
}

/// `run.json`, `samples.jsonl`, `affinity.json` and the tables of a result folder.
pub fn run_folder(data: &[u8]) {
    let dir = folder();
    let dir = dir.path();
    write_files(dir, data);
    let Ok(manifest) = Manifest::read(dir) else { return };
    let again = folder();
    write_json(&again.path().join(MANIFEST), &manifest).unwrap();
    assert_eq!(Manifest::read(again.path()).unwrap(), manifest);

    drop(timings_of_log(dir, 0));
    if let Ok(report) = Report::read(dir) {
        let cells: usize = report.matrices.iter().map(|matrix| matrix.gbps.len()).sum();
        assert!(cells <= 1 << 27);
        assert!(!markdown::render(&report).is_empty());
        let mut text = Vec::new();
        Calibration::of(&report).write(&mut text).unwrap();
        serde_json::from_slice::<serde_json::Value>(&text).unwrap();
        serde_json::to_vec(&Placement::of(&report)).unwrap();
        serde_json::to_vec(&report.diagnosis).unwrap();
        let same = compare(("a", &report), ("b", &report), &CompareOptions::default());
        assert!(!same.to_string().is_empty());
    }
    drop(validate::rewrite(dir));
    drop(sizes::rewrite(dir));
    drop(policies::rewrite(dir));
    if let Ok(opened) = RunFolder::open(dir, OpenMode::Resume, &manifest) {
        drop(opened);
    }
}

/// Lines of a log: the quick reader, the general one and the one with threads agree, and a sample
/// is written as it was read.
pub fn samples(data: &[u8]) {
    let dir = folder();
    fs::write(dir.path().join(SAMPLES), data).unwrap();
    let mut reader = SampleReader::open(dir.path()).unwrap();
    let mut one_by_one = Vec::new();
    for line in data.split_inclusive(|&byte| byte == b'\n') {
        let read = reader.next_line().unwrap().unwrap();
        let general: Result<Sample, _> = serde_json::from_slice(line.trim_ascii_end());
        match (&read, &general) {
            (Ok(read), Ok(general)) => assert_eq!(read, general),
            (Err(bad), _) if bad.torn => assert_ne!(line.last(), Some(&b'\n')),
            (Err(_), Err(_)) => {}
            (Err(_), Ok(sample)) if nanoseconds(sample) >= 1 << 62 => {}
            other => panic!("the readers disagree: {other:?}"),
        }
        if let Ok(sample) = &read {
            let text = serde_json::to_vec(sample).unwrap();
            assert_eq!(serde_json::from_slice::<Sample>(&text).unwrap(), *sample);
        }
        one_by_one.push(read);
    }
    assert!(reader.next_line().unwrap().is_none());
    let mut beside = Vec::new();
    SampleReader::open(dir.path())
        .unwrap()
        .for_each_line(&mut |line| beside.push(line.cloned().map_err(Clone::clone)))
        .unwrap();
    assert_eq!(beside, one_by_one);
    drop(timings_of_log(dir.path(), 0));
}

/// All times of a sample.
fn nanoseconds(sample: &Sample) -> u128 {
    let lists = [&sample.iter_ns, &sample.warmup_ns].into_iter().chain(&sample.host_iter_ns);
    let lists = lists.chain(sample.rank_ns.iter().flatten());
    let single = [sample.t_ns, Some(sample.touch_ns), Some(sample.bind_ns), sample.skew_ns];
    lists.flatten().chain(single.iter().flatten()).map(|&time| u128::from(time)).sum()
}

/// The `calibration.json` of a known-good run: a preflight of a small machine against it has an answer
/// or an error, passes only what it compared, and its document is read again alike.
pub fn baseline(data: &[u8]) {
    const MACHINE: &str = "[machine]\ncpus = 4\nnuma_nodes = 2\ndevices = 2\n";
    let dir = folder();
    let path = dir.path().join(CALIBRATION);
    fs::write(&path, data).unwrap();
    let Ok(baseline) = Baseline::read(&path) else { return };
    assert!(baseline.sizes().is_sorted_by(|a, b| a < b));
    let machine = Machine::synthetic(Scenario::parse(MACHINE, "small").unwrap()).unwrap();
    let preflight = Preflight::new().budget(Duration::from_millis(200));
    let Ok(outcome) = preflight.run(&machine, &baseline, None, &mut ()) else { return };
    let against = outcome.nodes[0].baseline.as_ref().unwrap();
    assert!(outcome.verdict != Gate::Pass || against.cells > 0);
    for change in &against.changes {
        if let (Some(ratio), Some(low), Some(high)) = (change.ratio, change.low, change.high) {
            assert!(low <= ratio && ratio <= high, "{change:?}");
        }
    }
    let text = serde_json::to_vec(&outcome).unwrap();
    assert_eq!(serde_json::from_slice::<Outcome>(&text).unwrap(), outcome);
}

fn check_import(request: &ImportRequest, imported: &Imported) {
    for (seq, sample) in (0..).zip(&imported.samples) {
        assert_eq!(sample.seq, seq);
        let (row, column) = sample.cell().unwrap();
        assert!(imported.rows.contains(&row) && imported.columns.contains(&column));
    }
    // All outputs take hundreds of times as long as reading, so every eighth small input makes them.
    let first: u64 = imported.samples.first().map_or(0, |sample| sample.iter_ns.iter().sum());
    let small = imported.samples.len() <= 32 && imported.rows.len() * imported.columns.len() <= 256;
    if small && first.is_multiple_of(8) {
        let out = folder();
        let options = ReportOptions::default();
        let report =
            record_import(request, imported.clone(), out.path(), OpenMode::New, &options).unwrap();
        assert_eq!(report.bad_lines, [""; 0]);
    }
}

/// Imports the same bytes as both sweeps.
fn import(format: SourceFormat, name: &str, data: &[u8]) {
    let dir = folder();
    let path = dir.path().join(name);
    fs::write(&path, data).unwrap();
    for sweep in [Sweep::H2d, Sweep::CorePair] {
        let request = ImportRequest::new(format, sweep, vec![path.clone()]);
        if let Ok(imported) = read(&request) {
            check_import(&request, &imported);
        }
    }
}

/// Results of the older tool and a census, as JSON.
pub fn older_json(data: &[u8]) {
    let dir = folder();
    // A folder may hold both.
    if data.starts_with(b"=== ") {
        write_files(dir.path(), data);
        for sweep in [Sweep::H2d, Sweep::CorePair] {
            let sources = vec![dir.path().to_owned()];
            let request = ImportRequest::new(SourceFormat::ClusterHealthDetect, sweep, sources);
            if let Ok(imported) = read(&request) {
                check_import(&request, &imported);
            }
        }
    } else {
        import(SourceFormat::ClusterHealthDetect, "results.json", data);
    }
}

/// Workbooks of the older tool. An input is a workbook, or the parts of one as files, which are
/// then packed: a fuzzer does not find its way through checksums and compression.
pub fn older_xlsx(data: &[u8]) {
    let packed = if data.starts_with(b"=== ") { archive(&files(data)) } else { data.to_vec() };
    if packed.starts_with(b"PK") {
        import(SourceFormat::ClusterHealthDetect, "results.xlsx", &packed);
    }
}

/// A zip archive of stored (not compressed) parts.
pub fn archive(parts: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut directory = Vec::new();
    for (name, content) in parts {
        let name = name.as_os_str().as_encoded_bytes();
        let offset = u32::try_from(out.len()).unwrap();
        let length = u32::try_from(content.len()).unwrap().to_le_bytes();
        let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        common.extend(crc32(content).to_le_bytes());
        common.extend(length);
        common.extend(length);
        common.extend(u16::try_from(name.len()).unwrap().to_le_bytes());
        common.extend([0, 0]);
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name);
        out.extend(content);
        directory.extend(b"PK\x01\x02\x14\0");
        directory.extend(&common);
        // No comment, first disk, no attributes.
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name);
    }
    let count = u16::try_from(parts.len()).unwrap().to_le_bytes();
    let start = u32::try_from(out.len()).unwrap();
    out.extend(&directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend(count);
    out.extend(count);
    out.extend(u32::try_from(directory.len()).unwrap().to_le_bytes());
    out.extend(start.to_le_bytes());
    out.extend([0, 0]);
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

/// Matrices, size sweeps and censuses as CSV.
pub fn older_csv(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(matrix) = csv::parse(text, "input")
    {
        assert_eq!(matrix.values.dim(), (matrix.rows.len(), matrix.columns.len()));
        // Ids and rates as text are read back alike.
        let mut copy = matrix.corner.clone();
        matrix.columns.iter().for_each(|id| copy += &format!(",{id}"));
        for (row, values) in matrix.rows.iter().zip(matrix.values.rows()) {
            copy += &format!("\n{row}");
            values.iter().for_each(|rate| copy += &format!(",{rate}"));
        }
        let again = csv::parse(&copy, "copy").unwrap();
        assert_eq!((&again.rows, &again.columns), (&matrix.rows, &matrix.columns));
        let bits = |matrix: &csv::CsvMatrix| -> Vec<u64> {
            matrix.values.iter().map(|rate| rate.to_bits()).collect()
        };
        assert_eq!(bits(&again), bits(&matrix));
    }
    import(SourceFormat::Csv, "h2d-1MiB.csv", data);
    let dir = folder();
    let path = dir.path().join("census.csv");
    fs::write(&path, data).unwrap();
    drop(sizes::import(&path));
    let matrix = dir.path().join("h2d-1KiB.csv");
    fs::write(&matrix, "cpu,0\n0,1.5\n").unwrap();
    let mut request = ImportRequest::new(SourceFormat::Csv, Sweep::H2d, vec![matrix]);
    request.affinity = Some(path);
    if let Ok(imported) = read(&request) {
        check_import(&request, &imported);
    }
}

/// Scenarios of synthetic machines.
pub fn scenario(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(scenario) = Scenario::parse(text, "input") else { return };
    let json = serde_json::to_string(&scenario).unwrap();
    let again: Scenario = serde_json::from_str(&json).unwrap();
    assert_eq!(again, scenario);
    again.validate().unwrap();
    let places = scenario.cpu_places();
    assert!(places.len() <= 1 << 16);
    if places.len() <= 256 {
        drop(Machine::synthetic(scenario));
    }
}

/// Lists of CPUs and ids, sizes, rates, durations, loads and policies.
pub fn lists(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(set) = CpuSet::parse_kernel_list(text) {
        assert!(set.len() <= 1 << 20);
        assert_eq!(CpuSet::parse_kernel_list(&set.to_string()).unwrap(), set);
    }
    if let Ok(ids) = parse_id_list("--cpus", text) {
        assert!(ids.len() <= 1 << 20);
        let set = CpuSet::parse_kernel_list(text).unwrap();
        assert_eq!(set.len(), ids.len());
        if ids.len() <= 4096 {
            let copy: Vec<String> = ids.iter().map(u32::to_string).collect();
            assert_eq!(parse_id_list("--cpus", &copy.join(",")).unwrap(), ids);
        }
    }
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
    }
    if let Ok(rate) = text.parse::<Bandwidth>() {
        let gbps = rate.as_gb_per_second();
        assert!(gbps > 0.0 && gbps.is_finite(), "{gbps}");
    }
    if let Ok(duration) = parse_duration(text) {
        assert!(duration > Duration::ZERO);
    }
    if let Ok(load) = text.parse::<LoadProfile>() {
        assert_eq!(load.to_string().parse::<LoadProfile>().unwrap(), load);
    }
    if let Ok(policy) = text.parse::<Policy>() {
        assert_eq!(policy.to_string().parse::<Policy>().unwrap(), policy);
    }
    if let Ok(policies) = parse_policies("--policies", text) {
        let copy: Vec<String> = policies.iter().map(ToString::to_string).collect();
        assert_eq!(parse_policies("--policies", &copy.join(",")).unwrap(), policies);
    }
    drop(policies::parse_operations("--operations", text));
    drop(policies::parse_memory("--memory", text));
}

/// A launcher's environment: lines `NAME=VALUE`.
pub fn launcher(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let variables: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.split_once('=')).collect();
    let get = |name: &str| variables.get(name).map(|&value| value.to_owned());
    let Ok(Some(found)) = RankEnvironment::from_variables(get) else { return };
    assert!(found.rank < found.size && found.size <= 1 << 16, "{found:?}");
    assert!(found.local_size.is_none_or(|local| 0 < local && local <= found.size));
    assert!(found.local_rank.is_none_or(|local| local < found.local_size.unwrap_or(found.size)));
    assert!(found.rendezvous.is_none() || !found.is_local());
    // A secret is not told.
    if let Some(token) = get("CLUSTER_HEALTH_TOKEN").filter(|token| token.trim().len() > 24) {
        let others = ["CLUSTER_HEALTH_JOB", "TMPDIR", "XDG_RUNTIME_DIR"];
        if !variables.iter().any(|(name, value)| {
            *name != "CLUSTER_HEALTH_TOKEN" && value.contains(token.trim()) || others.contains(name)
        }) {
            assert!(!format!("{found:?}").contains(token.trim()));
        }
    }
    // Joining with these variables ends by the timeout, wherever they point; only meeting places
    // of this test are touched.
    let base = folder();
    let mut here = found;
    here.folders = vec![base.path().to_owned()];
    here.rendezvous = here.rendezvous.map(|_| "127.0.0.1:0".to_owned());
    let began = Instant::now();
    drop(RankGroup::join(&here, Duration::from_millis(2)));
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0, "left something behind");
}

/// `sys/` and `proc/` of another machine.
pub fn sysfs(data: &[u8]) {
    /// Outside of the root; nobody may see it.
    const SECRET: u32 = 1_048_571;
    let outside = folder();
    let root = outside.path().join("root");
    fs::create_dir(&root).unwrap();
    write_files(&root, data);
    for name in
        ["cpuset.cpus.effective", "cpuset.cpus", "cpus", "cpuset.mems", "present", "cpulist"]
    {
        fs::write(outside.path().join(name), SECRET.to_string()).unwrap();
    }
    let told = files(data)
        .values()
        .any(|content| String::from_utf8_lossy(content).contains(&SECRET.to_string()[..5]));
    let Ok(topology) = Topology::read(&root) else { return };
    assert!(topology.cpus.len() <= 1 << 20 && !topology.is_this_machine());
    let present = topology.present();
    assert!(topology.online().difference(&present).is_empty());
    for set in [&topology.cpuset, &topology.proc_allowed].into_iter().flatten() {
        assert!(set.difference(&present).is_empty());
    }
    for node in &topology.nodes {
        assert!(node.cpus.difference(&present).is_empty());
        drop(topology.cpu_node(node.id));
        drop(topology.memory_node(node.id));
    }
    assert!(topology.cpu_quota.is_none_or(|quota| quota >= 0.0 && quota.is_finite()));
    assert!(told || !format!("{topology:?}").contains(&SECRET.to_string()));
    drop(topology.mem_available());
    drop(topology.read_nr_throttled());
}

/// The prologue of the control channel.
const PROLOGUE: &[u8; 12] = b"CLHEALTH\0\0\0\x01";
const NONCE: usize = 32;
const JOB: &str = "fuzz";

fn mac(key: &[u8], role: &[u8], numbers: [u32; 3], nonces: [&[u8]; 2]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    mac.update(PROLOGUE);
    mac.update(role);
    numbers.iter().for_each(|number| mac.update(&number.to_le_bytes()));
    nonces.iter().for_each(|nonce| mac.update(nonce));
    mac.finalize().into_bytes().into()
}

fn rank(base: &Path, rank: u32) -> RankEnvironment {
    let variables = |name: &str| {
        Some(match name {
            "RANK" | "LOCAL_RANK" => rank.to_string(),
            "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => "2".to_owned(),
            "CLUSTER_HEALTH_JOB" => JOB.to_owned(),
            _ => return None,
        })
    };
    let mut environment = RankEnvironment::from_variables(variables).unwrap().unwrap();
    assert_eq!(environment.family, RankFamily::Torchrun);
    environment.folders = vec![base.to_owned()];
    environment
}

fn meeting_folder(base: &Path) -> PathBuf {
    let user = fs::metadata(base).map(|data| std::os::unix::fs::MetadataExt::uid(&data)).unwrap();
    let job: String = Sha256::digest(JOB)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    base.join(format!("cluster-health-{user}")).join(job)
}

/// The control channel: one side of a handshake, then frames. The first byte says which side the
/// input plays, and what of the proof of the secret is genuine.
pub fn channel(data: &[u8]) {
    // Descriptors and time are shared with nobody else then.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((&mode, data)) = data.split_first() else { return };
    let base = folder();
    if mode & 1 == 0 {
        as_caller(base.path(), mode, data);
    } else {
        as_listener(base.path(), mode, data);
    }
}

/// How long the side under test waits at most.
const BOUND: Duration = Duration::from_millis(40);

/// Both sides' answer within the bound and a margin for machines with other work.
fn ended(began: Instant) {
    assert!(began.elapsed() < BOUND + Duration::from_secs(4), "{:?}", began.elapsed());
}

fn as_caller(base: &Path, mode: u8, data: &[u8]) {
    let environment = rank(base, 0);
    let began = Instant::now();
    let zero = thread::spawn(move || RankGroup::join(&environment, BOUND));
    let path = meeting_folder(base).join("rank-0.sock");
    let mut socket = loop {
        match UnixStream::connect(&path) {
            Ok(socket) => break socket,
            Err(_) if zero.is_finished() => return drop(zero.join().unwrap()),
            Err(_) => thread::yield_now(),
        }
    };
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut challenge = [0; 12 + NONCE];
    if socket.read_exact(&mut challenge).is_err() {
        return drop(zero.join().unwrap());
    }
    // What the input says of itself, and whether it proves it with the right key.
    let (mut number, mut size, mut ours) = (1_u32, 2_u32, [7_u8; NONCE]);
    let mut frames = data;
    if mode & 2 != 0 && data.len() >= 8 + NONCE {
        number = u32::from_le_bytes(data[..4].try_into().unwrap());
        size = u32::from_le_bytes(data[4..8].try_into().unwrap());
        ours.copy_from_slice(&data[8..8 + NONCE]);
        frames = &data[8 + NONCE..];
    }
    let key = if mode & 4 == 0 { JOB.as_bytes() } else { b"another key" };
    let proof = mac(key, b"hello", [0, number, size], [&challenge[12..], &ours]);
    let mut hello =
        [&PROLOGUE[..], &number.to_le_bytes(), &size.to_le_bytes(), &ours, &proof].concat();
    let genuine = mode & 8 == 0;
    if !genuine {
        // All of it is the input's.
        hello = data.to_vec();
        frames = &[];
    }
    // The other side may have hung up already.
    drop(socket.write_all(&hello));
    drop(socket.write_all(frames));
    if mode & 16 != 0 {
        drop(socket.shutdown(std::net::Shutdown::Write));
    }
    let met = zero.join().unwrap();
    ended(began);
    let known = genuine && mode & 4 == 0 && (number, size) == (1, 2);
    assert!(known || met.is_err(), "a stranger was let in");
    let Ok(group) = met else { return };
    receive(&group, 1, frames);
}

fn as_listener(base: &Path, mode: u8, data: &[u8]) {
    use std::os::unix::fs::DirBuilderExt as _;
    let meeting = meeting_folder(base);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&meeting).unwrap();
    let listener = UnixListener::bind(meeting.join("rank-0.sock")).unwrap();
    let environment = rank(base, 1);
    let began = Instant::now();
    let one = thread::spawn(move || RankGroup::join(&environment, BOUND));
    let (mut socket, _) = listener.accept().unwrap();
    drop(listener);
    let (mut challenge, mut frames) = ([&PROLOGUE[..], &[9; NONCE]].concat(), data);
    if mode & 2 != 0 {
        let (head, rest) = data.split_at(data.len().min(challenge.len()));
        challenge = head.to_vec();
        frames = rest;
    }
    drop(socket.write_all(&challenge));
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut hello = [0; 12 + 8 + NONCE + 32];
    let mut genuine = false;
    if socket.read_exact(&mut hello).is_ok() {
        let proof = mac(JOB.as_bytes(), b"hello", [0, 1, 2], [&challenge[12..], &hello[20..52]]);
        assert_eq!(hello[52..], proof);
        if mode & 4 == 0 {
            genuine = true;
            drop(socket.write_all(&[0]));
            drop(socket.write_all(&mac(
                JOB.as_bytes(),
                b"welcome",
                [0, 1, 2],
                [&challenge[12..], &hello[20..52]],
            )));
        }
        drop(socket.write_all(frames));
    }
    if mode & 16 != 0 || !genuine {
        drop(socket.shutdown(std::net::Shutdown::Write));
    }
    let met = one.join().unwrap();
    ended(began);
    assert!(genuine || met.is_err(), "a false rank 0 was believed");
    let Ok(group) = met else { return };
    receive(&group, 0, frames);
}

/// Takes what the frames hold; what is received is what they say.
fn receive(group: &RankGroup, from: u32, frames: &[u8]) {
    let mut rest = frames;
    let mut group_of_one_wait = Duration::ZERO;
    for _ in 0..64 {
        let frame = rest.split_first_chunk::<16>().and_then(|(header, body)| {
            let kind = u32::from_le_bytes(header[..4].try_into().unwrap());
            let length = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
            (kind == 0x4348_0001 && length <= 16 << 20).then(|| body.split_at_checked(length))?
        });
        let began = Instant::now();
        let message = group.receive(from);
        group_of_one_wait = group_of_one_wait.max(began.elapsed());
        match (frame, message) {
            (Some((body, tail)), Ok(message)) => {
                assert_eq!(message, body);
                rest = tail;
            }
            (None, Err(_)) => break,
            (frame, message) => panic!("{frame:?} was received as {message:?}"),
        }
    }
    drop(group.receive_fd(from, 0));
    drop(group.check_alive(from));
    drop(group.send(from, b"an answer"));
    drop(group.send_fd(from, 1, std::io::stdin().as_fd()));
    assert!(group_of_one_wait < BOUND + Duration::from_secs(4));
}
