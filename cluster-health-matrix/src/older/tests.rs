//! Import and export against recorded files, published statistics and other programs' readings.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cluster_health_core::{ByteSize, CpuId, DeviceId, NodeId};
use serde_json::{Value, json};

use super::ScanOrder;
use super::export::{ExportMeta, export};
use super::import::{ImportRequest, Imported, SourceFormat, read};
use crate::error::Error;
use crate::samples::{Phase, Pinned, PointStatus, RanOn, Sample, Sweep};
use crate::stats::quantile_sorted;

/// The recorded data lie beside the checkout; without them a test says so and ends.
fn recorded(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(name);
    if !path.exists() {
        println!("skipped: no recorded data");
        return None;
    }
    Some(path)
}

fn request(format: SourceFormat, sweep: Sweep, sources: &[&Path]) -> ImportRequest {
    ImportRequest::new(format, sweep, sources.iter().map(|path| path.to_path_buf()).collect())
}

fn older(sweep: Sweep, path: &Path) -> Result<Imported, Error> {
    read(&request(SourceFormat::ClusterHealthDetect, sweep, &[path]))
}

/// Decimal GB/s of a sample with one iteration.
fn rate(sample: &Sample) -> f64 {
    let [time] = sample.iter_ns[..] else { return f64::NAN };
    sample.bytes.bytes() as f64 / time as f64
}

/// min, p10, median, p90, max with three decimals, as they were published.
fn published(samples: &[Sample], size: ByteSize) -> String {
    let mut rates: Vec<f64> =
        samples.iter().filter(|sample| sample.bytes == size).map(rate).collect();
    rates.sort_by(f64::total_cmp);
    let quantiles = [0.0, 0.1, 0.5, 0.9, 1.0].map(|q| quantile_sorted(&rates, q));
    quantiles.map(|rate| format!("{rate:.3}")).join(" ")
}

#[test]
fn recorded_h2d_matrices_keep_their_published_statistics() {
    let Some(affinity) = recorded("a3-182-h2d-clean-20260707-affinity.csv") else { return };
    let file = |size: &str| recorded(&format!("a3-182-h2d-clean-20260707-{size}.csv")).unwrap();
    let (small, middle, large) = (file("16MB"), file("64MB"), file("256MB"));
    // The order of the files does not matter.
    let mut request = request(SourceFormat::Csv, Sweep::H2d, &[&large, &small, &middle]);
    request.affinity = Some(affinity);
    let imported = read(&request).unwrap();

    let samples = &imported.samples;
    assert_eq!(samples.len(), 3 * 640 * 16);
    assert_eq!(published(samples, ByteSize::mib(16)), "1.297 6.531 56.132 57.240 58.503");
    assert_eq!(published(samples, ByteSize::mib(64)), "4.739 37.252 58.376 58.848 59.356");
    assert_eq!(published(samples, ByteSize::mib(256)), "15.791 58.404 59.129 59.621 59.926");
    assert_eq!(imported.scan_order, ScanOrder::RowMajor);
    assert!(imported.scan_order_assumed);
    assert_eq!((imported.rows.len(), imported.columns.len()), (640, 16));
    // Row, then size ascending, then column.
    for (seq, cpu, mib, device) in [
        (0, 0, 16, 0),
        (15, 0, 16, 15),
        (16, 0, 64, 0),
        (47, 0, 256, 15),
        (48, 1, 16, 0),
        (30_719, 639, 256, 15),
    ] {
        let sample = &samples[seq];
        assert_eq!(sample.seq, seq as u64);
        assert_eq!(sample.cell(), Some((cpu, device)), "{seq}");
        assert_eq!(sample.bytes, ByteSize::mib(mib), "{seq}");
    }
    let first = &samples[0];
    // 16 MiB at 48.4951394133 GB/s.
    assert_eq!(first.iter_ns, [345_957]);
    assert_eq!((first.t_ns, first.block, first.pinned), (None, 0, None));
    assert!(imported.notes.iter().any(|note| note.contains("16MB read as 16MiB")));

    let census = imported.affinity.unwrap();
    assert_eq!(census.len(), 640);
    for row in &census {
        assert_eq!(row.numa_node, Some(NodeId(row.cpu.0 / 80)));
        let core = row.cpu.0 / 2 * 2;
        assert_eq!(row.thread_siblings, format!("{core},{}", core + 1));
        assert!(row.online && row.allowed && row.bindable == Some(true) && row.reason.is_none());
    }
    assert_eq!((census[0].socket_id, census[0].core_id), (Some(0), Some(196_608)));
}

#[test]
fn the_recorded_pair_matrix_keeps_its_statistics() {
    let Some(packed) = recorded("a3-182-allgather-pair05-8MB-clean-20260707.csv.xz") else {
        return;
    };
    let error = read(&request(SourceFormat::Csv, Sweep::CorePair, &[&packed])).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("unpack"), "{error}");
    let Ok(output) = Command::new("xz").arg("-dc").arg(&packed).output() else {
        println!("skipped: no xz");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a3-182-allgather-pair05-8MB-clean-20260707.csv");
    fs::write(&path, output.stdout).unwrap();
    let imported = read(&request(SourceFormat::Csv, Sweep::CorePair, &[&path])).unwrap();
    let samples = &imported.samples;
    assert_eq!(samples.len(), 640 * 640);
    // Published were 0.196 13.000 13.714 14.409 15.967. The file was recovered from a picture
    // (±0.052 GB/s below the median), and numpy finds these quantiles in it.
    assert_eq!(published(samples, ByteSize::mib(8)), "0.196 12.998 13.714 14.409 15.967");
    assert_eq!(samples[641].cell(), Some((1, 1)));
    assert_eq!(imported.device_pair, None);
    let error = read(&request(SourceFormat::Csv, Sweep::H2d, &[&path])).unwrap_err().to_string();
    assert!(error.contains("rank0_cpu") && error.contains("--sweep core-pair"), "{error}");
}

fn csv_file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_scan_order_decides_seq() {
    let folder = tempfile::tempdir().unwrap();
    let big = csv_file(folder.path(), "h2d-2MiB.csv", "cpu,9,4\n8,1,2\n3,3,\n");
    let small = csv_file(folder.path(), "h2d-1MiB.csv", "cpu,9,4\n8,5,6\n3,7,0\n");
    let mut request = request(SourceFormat::Csv, Sweep::H2d, &[&big, &small]);
    let mut order = |scan_order| {
        request.scan_order = scan_order;
        let imported = read(&request).unwrap();
        let cells: Vec<_> = imported
            .samples
            .iter()
            .map(|sample| {
                let (row, column) = sample.cell().unwrap();
                (row, sample.bytes.bytes() >> 20, column)
            })
            .collect();
        (imported, cells)
    };
    let rows = [(8, 1, 9), (8, 1, 4), (8, 2, 9), (8, 2, 4), (3, 1, 9), (3, 1, 4), (3, 2, 9)];
    let columns = [(8, 1, 9), (3, 1, 9), (8, 2, 9), (3, 2, 9), (8, 1, 4), (3, 1, 4), (8, 2, 4)];
    let (imported, cells) = order(None);
    assert_eq!(cells, rows);
    assert_eq!((imported.rows.as_slice(), imported.columns.as_slice()), (&[8, 3][..], &[9, 4][..]));
    assert!(imported.scan_order_assumed);
    assert!(imported.notes.iter().any(|note| note.contains("1 empty")), "{:?}", imported.notes);
    // A rate of 0 is recorded, but is no measurement.
    let zero = &imported.samples[5];
    assert_eq!(zero.status, PointStatus::Implausible);
    assert!(zero.reason.as_deref().unwrap().contains("0 GB/s") && zero.iter_ns.is_empty());

    let (imported, cells) = order(Some(ScanOrder::ColumnMajor));
    assert_eq!((cells.as_slice(), imported.scan_order_assumed), (&columns[..], false));
    let (imported, _) = order(Some(ScanOrder::Unknown));
    assert_eq!((imported.scan_order, imported.scan_order_assumed), (ScanOrder::Unknown, false));
    assert_eq!(imported.samples.len(), 7);
}

#[test]
fn sizes_come_from_names_or_from_the_option() {
    let folder = tempfile::tempdir().unwrap();
    let text = "cpu,0\n0,10\n";
    let size = |name: &str, size: Option<&str>| {
        let path = csv_file(folder.path(), name, text);
        let mut request = request(SourceFormat::Csv, Sweep::H2d, &[&path]);
        request.size = size.map(|size| size.parse().unwrap());
        read(&request).map(|imported| imported.samples[0].bytes.bytes())
    };
    for (name, bytes) in [
        ("h2d-16MiB.csv", 16 << 20),
        ("h2d-16MB.csv", 16 << 20),
        ("run_20260707_0.125MB_clean.csv", 128 << 10),
        ("h2d-1536KiB-cpu2.csv", 1536 << 10),
        ("h2d-1000B.csv", 1000),
        ("h2d-1GB.csv", 1 << 30),
    ] {
        assert_eq!(size(name, None).unwrap(), bytes, "{name}");
    }
    assert_eq!(size("plain.csv", Some("16MB")).unwrap(), 16_000_000);
    assert_eq!(size("h2d-16MiB.csv", Some("8MiB")).unwrap(), 8 << 20);
    for name in ["plain.csv", "h2d-16MiB-64MiB.csv", "h2d-MB.csv", "h2d-1.5.2MB.csv"] {
        let error = size(name, None).unwrap_err();
        assert!(error.is_usage(), "{name}");
        assert!(error.to_string().starts_with("--size: "), "{error}");
    }
    assert!(size("plain.csv", Some("0")).unwrap_err().is_usage());
    let path = folder.path().join("h2d-16MiB.csv");
    let mut two = request(SourceFormat::Csv, Sweep::H2d, &[&path, &path]);
    let error = read(&two).unwrap_err().to_string();
    assert!(error.matches("h2d-16MiB.csv:2, column 2").count() == 2, "{error}");
    two.size = Some(ByteSize::mib(1));
    assert!(read(&two).unwrap_err().is_usage());
    for sweep in [Sweep::D2h, Sweep::Bidirectional] {
        let error = read(&request(SourceFormat::Csv, sweep, &[&path])).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("--sweep"), "{error}");
    }
    assert!(read(&request(SourceFormat::Csv, Sweep::H2d, &[])).unwrap_err().is_usage());
    let missing = folder.path().join("h2d-4MiB.csv");
    let error = read(&request(SourceFormat::Csv, Sweep::H2d, &[&missing])).unwrap_err();
    assert_eq!(error.kind(), "io");
}

fn results(folder: &Path, text: &str) -> PathBuf {
    csv_file(folder, "results.json", text)
}

#[test]
fn every_kind_of_metric_is_read() {
    let folder = tempfile::tempdir().unwrap();
    // What Python's json module writes, NaN included.
    let text = r#"{"meta": {"cpu_ids": [5, 6, 7], "device_ids": [1, 0], "partial": true}, "metrics": [
        {"test": "core_h2d_matrix", "status": "ok", "host_cpu": 5, "device_id": 1, "size_mb": 16,
         "gbps": 16.777216, "repeat": 1, "pinned": true, "bind_actual_cpus": [5], "ts": "2026-07-06T12:00:00+00:00",
         "direction": "host_to_device", "later_field": {"a": [NaN]}},
        {"test": "core_h2d_matrix", "status": "ok", "host_cpu": 5, "device_id": 1, "size_mb": 16,
         "gbps": 8.388608, "repeat": 2, "pinned": false, "ts": "2026-07-06T12:00:01+00:00"},
        {"test": "core_h2d_matrix", "status": "ok", "host_cpu": 5, "device_id": 0, "size_mb": 16,
         "gbps": NaN, "repeat": 1, "ts": "2026-07-06T12:00:01+00:00"},
        {"test": "core_h2d_matrix", "status": "ok", "host_cpu": 6, "device_id": 1, "size_mb": 16,
         "gbps": -Infinity, "repeat": 1, "ts": "2026-07-06T12:00:02+00:00"},
        {"test": "core_h2d_matrix", "status": "error", "host_cpu": 6, "device_id": 0, "size_mb": 0.5,
         "error": "copy said \"NaN\" and Infinity", "repeat": 1, "ts": "2026-07-06T12:00:03+00:00"},
        {"test": "core_h2d_matrix", "status": "skip", "host_cpu": 7, "device_id": 1, "size_mb": 16,
         "reason": "offline", "repeat": 1, "ts": "2026-07-06T12:00:04+00:00"},
        {"test": "core_h2d_matrix", "status": "error", "error": "no device"},
        {"test": "core_h2d_matrix", "status": "ok", "direction": "device_to_host", "host_cpu": 7, "device_id": 1,
         "size_mb": 16, "gbps": 1.0},
        {"test": "size_sweep", "size_mb": "all"}]}"#;
    results(folder.path(), text);
    csv_file(
        folder.path(),
        "affinity.json",
        r#"{"cpus": [{"cpu": 5, "online": true, "allowed": true, "bindable": null, "numa_node": -1,
            "thread_siblings": [5, 6], "reason": "not this machine"}]}"#,
    );
    // A folder stands for the files in it.
    let imported = older(Sweep::H2d, folder.path()).unwrap();
    assert_eq!((imported.rows, imported.columns), (vec![5, 6, 7], vec![1, 0]));
    let told: Vec<_> = imported
        .samples
        .iter()
        .map(|s| (s.cell().unwrap(), s.block, s.status, s.iter_ns.clone(), s.reason.as_deref()))
        .collect();
    let no_number = Some("status ok, but gbps is no number");
    assert_eq!(
        told,
        [
            ((5, 1), 0, PointStatus::Measured, vec![1_000_000], None),
            ((5, 1), 1, PointStatus::Measured, vec![2_000_000], None),
            ((5, 0), 0, PointStatus::Failed, vec![], no_number),
            ((6, 1), 0, PointStatus::Failed, vec![], no_number),
            ((6, 0), 0, PointStatus::Failed, vec![], Some(r#"copy said "NaN" and Infinity"#)),
            ((7, 1), 0, PointStatus::Skipped, vec![], Some("offline")),
        ]
    );
    let first = &imported.samples[0];
    assert_eq!(first.pinned, Some(Pinned::Pinned));
    assert_eq!(first.ran_on, RanOn::Thread(vec![CpuId(5)]));
    assert_eq!(imported.samples[1].pinned, Some(Pinned::Pageable));
    assert_eq!(imported.samples[4].bytes, ByteSize::kib(512));
    for part in
        ["1 metrics of other tests", "of other directions", "before they had a cell", "partial"]
    {
        assert!(
            imported.notes.iter().any(|note| note.contains(part)),
            "{part}: {:?}",
            imported.notes
        );
    }
    let census = imported.affinity.unwrap();
    assert_eq!((census[0].numa_node, census[0].bindable), (None, None));
    assert_eq!(census[0].thread_siblings, "5,6");
    assert_eq!(census[0].reason.as_deref(), Some("not this machine"));
}

/// Pair metrics of cells in this order, one second apart.
fn pairs(cells: &[(u32, u32, u32)]) -> String {
    let metrics: Vec<Value> = cells
        .iter()
        .enumerate()
        .map(|(index, (row, column, rank))| {
            json!({"test": "core_pair_d2d_matrix", "status": "ok", "rank0_cpu": row, "rank1_cpu": column,
                "size_mb": 8, "alg_gbps": 8.388608 / f64::from(rank + 1), "repeat": 0, "rank": rank,
                "device_pair": [0, 5], "ts": format!("2026-07-06T12:00:{index:02}+00:00")})
        })
        .collect();
    json!({"meta": {"device_pair": [0, 5]}, "metrics": metrics}).to_string()
}

#[test]
fn the_order_of_metrics_tells_the_scan_order() {
    let folder = tempfile::tempdir().unwrap();
    let read = |cells: &[(u32, u32, u32)]| {
        older(Sweep::CorePair, &results(folder.path(), &pairs(cells))).unwrap()
    };
    let order = |cells: &[(u32, u32, u32)]| {
        let imported = read(cells);
        let listed: Vec<_> = cells.iter().map(|cell| (cell.0, cell.1)).collect();
        let kept: Vec<_> = imported.samples.iter().filter_map(Sample::cell).collect();
        assert_eq!(kept, listed);
        (imported.scan_order, imported.scan_order_assumed)
    };
    assert_eq!(order(&[(3, 1, 0), (3, 2, 0), (1, 1, 0), (1, 2, 0)]), (ScanOrder::RowMajor, false));
    assert_eq!(
        order(&[(3, 1, 0), (1, 1, 0), (3, 2, 0), (1, 2, 0)]),
        (ScanOrder::ColumnMajor, false)
    );
    assert_eq!(order(&[(3, 1, 0), (1, 2, 0), (3, 2, 0), (1, 1, 0)]), (ScanOrder::Unknown, false));

    // Both ranks tell of one point: the slower one counts, as in our own log.
    let imported = read(&[(3, 1, 0), (3, 2, 1), (3, 1, 1), (3, 2, 0)]);
    let times: Vec<_> = imported.samples.iter().map(|sample| sample.iter_ns[0]).collect();
    assert_eq!(times, [2_000_000, 2_000_000]);
    assert_eq!(imported.device_pair, Some([0, 5]));
    assert_eq!(imported.samples[0].device_pair, Some([DeviceId(0), DeviceId(5)]));
    let path = results(folder.path(), &pairs(&[(3, 1, 0), (3, 2, 0), (3, 1, 0)]));
    let error = older(Sweep::CorePair, &path).unwrap_err().to_string();
    assert!(error.contains("metric 3: ") && error.contains("metric 1 already"), "{error}");
}

#[test]
fn unusable_results_name_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let metric = |fields: &str| {
        format!(
            r#"{{"metrics": [{{"test": "x"}}, {{"test": "core_h2d_matrix", "status": "ok", {fields}}}]}}"#
        )
    };
    for (text, words) in [
        ("{", vec!["not a results file", "line 1"]),
        ("[]", vec!["not a results file"]),
        (r#"{"meta": {}}"#, vec!["metrics"]),
        (r#"{"metrics": [], "x": NaN"#, vec!["not a results file"]),
        (r#"{"metrics": []}"#, vec!["0 metrics", "--sweep h2d"]),
        (
            &metric(r#""host_cpu": 1, "device_id": 1, "size_mb": 1"#)
                .replace("core_h2d", "core_pair_d2d"),
            vec!["2 metrics", "core_h2d_matrix"],
        ),
        (&metric(r#""host_cpu": -1, "device_id": 1, "size_mb": 1"#), vec!["metric 2", "-1"]),
        (&metric(r#""host_cpu": "a", "device_id": 1, "size_mb": 1"#), vec!["metric 2"]),
        (&metric(r#""device_id": 1, "size_mb": 1, "gbps": 1"#), vec!["metric 2", "host_cpu"]),
        (
            &metric(r#""host_cpu": 1, "device_id": 1, "size_mb": 0, "gbps": 1"#),
            vec!["metric 2", "size_mb 0"],
        ),
        (
            &metric(r#""host_cpu": 1, "device_id": 1, "size_mb": 1e300, "gbps": 1"#),
            vec!["metric 2", "size_mb"],
        ),
        (
            &metric(r#""status": "odd""#).replacen(r#""status": "ok", "#, "", 1),
            vec!["metric 2", "'odd'"],
        ),
        (&format!(r#"{{"metrics": {}{}}}"#, "[".repeat(5000), "]".repeat(5000)), vec![]),
        (
            &format!(
                r#"{{"meta": {{"a": {}{}}}, "metrics": []}}"#,
                "[".repeat(5000),
                "]".repeat(5000)
            ),
            vec!["recursion"],
        ),
    ] {
        let error = older(Sweep::H2d, &results(folder.path(), text)).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), "format", "{text}");
        assert!(text.contains("results.json"), "{text}");
        for word in words {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(older(Sweep::H2d, empty.path()).unwrap_err().is_usage());
}

/// Few points on very many rows and columns would make a matrix that no memory holds.
#[test]
fn scattered_points_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cells: Vec<_> = (0..9_000).map(|id| (id, id, 0)).collect();
    let error = older(Sweep::CorePair, &results(folder.path(), &pairs(&cells))).unwrap_err();
    assert!(error.to_string().contains("9000 rows × 9000 columns"), "{error}");
}

#[test]
fn unusable_census_files_name_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let source = csv_file(folder.path(), "h2d-1MiB.csv", "cpu,0\n0,1\n");
    let census = |text: &str| {
        let mut request = request(SourceFormat::Csv, Sweep::H2d, &[&source]);
        request.affinity = Some(csv_file(folder.path(), "affinity.csv", text));
        read(&request).map(|imported| imported.affinity.unwrap())
    };
    let rows = census("cpu,reason,thread_siblings\n3,\"off, line\",\"3,4\"\n").unwrap();
    assert_eq!((rows[0].cpu.0, rows[0].thread_siblings.as_str()), (3, "3,4"));
    assert_eq!(rows[0].reason.as_deref(), Some("off, line"));
    for (text, place, word) in [
        ("a,b\n1,2\n", "affinity.csv:2", "no cpu"),
        ("cpu\n0\n0\n", "affinity.csv:3", "already"),
        ("cpu\n-4\n", "affinity.csv:2", "-4"),
        ("cpu,online\n4,maybe\n", "affinity.csv:2", "'maybe'"),
        ("cpu,online\n4\n", "affinity.csv:2", "fields"),
        ("{\"cpus\": 3}", "affinity.csv", "no list"),
        ("{\"cpus\": [{\"cpu\": 1}, {}]}", "CPU entry 2", "no cpu"),
        ("[", "affinity.csv", "not a census"),
    ] {
        let error = census(text).unwrap_err().to_string();
        assert!(error.contains(place) && error.contains(word), "{text:?}: {error}");
    }
}

fn h2d_sample(seq: u64, cell: (u32, u32), bytes: ByteSize, block: u32, iter_ns: &[u64]) -> Sample {
    let mut sample = Sample::new(seq, Sweep::H2d, bytes);
    (sample.cpu, sample.device) = (Some(CpuId(cell.0)), Some(DeviceId(cell.1)));
    (sample.block, sample.iter_ns) = (block, iter_ns.to_vec());
    sample.t_ns = Some(seq * 1_000_000_000);
    sample.ran_on = RanOn::Thread(vec![CpuId(cell.0)]);
    sample.pinned = Some(Pinned::Registered);
    sample
}

fn meta() -> ExportMeta {
    ExportMeta {
        // 2024-02-29T23:59:58 UTC, as date(1) says.
        started: Some(1_709_251_198),
        finished: Some(1_709_251_260),
        argv: vec!["cluster-health".to_owned(), "h2d".to_owned()],
        env: BTreeMap::from([("HCCL_BUFFSIZE".to_owned(), "200".to_owned())]),
        device_kind: "npu".to_owned(),
        collective_backend: "hccl".to_owned(),
        host: "node-0182".to_owned(),
        complete: true,
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The fields and values that the older tool's readers expect.
#[test]
fn exported_h2d_metrics_have_every_field() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("a/b");
    let mut skipped = h2d_sample(2, (0, 1), ByteSize::mib(16), 0, &[]);
    (skipped.status, skipped.reason) = (PointStatus::Skipped, Some("offline".to_owned()));
    let mut failed = h2d_sample(3, (0, 2), ByteSize::mib(16), 0, &[7]);
    (failed.status, failed.reason) = (PointStatus::Failed, Some("data mismatch".to_owned()));
    let mut probe = h2d_sample(4, (0, 0), ByteSize::kib(64), 0, &[7]);
    probe.phase = Phase::Probe;
    let mut loaded = h2d_sample(5, (0, 0), ByteSize::mib(16), 0, &[7]);
    loaded.load = "cpu:2".to_owned();
    let mut back = h2d_sample(6, (0, 0), ByteSize::mib(16), 0, &[7]);
    back.sweep = Sweep::D2h;
    let samples = [
        // Median 0.5 ms, sum 2 ms.
        h2d_sample(0, (3, 0), ByteSize::mib(16), 1, &[500_000, 400_000, 1_100_000]),
        h2d_sample(1, (3, 0), ByteSize::kib(512), 1, &[500_000]),
        skipped,
        failed,
        probe,
        loaded,
        back,
    ];
    let census = json!({"summary": {"present": 4}, "cpus": [{"cpu": 0}]});
    let notes = export(&out, &samples, &meta(), Some(&census)).unwrap();
    assert_eq!(notes.len(), 4, "{notes:?}");
    assert!(
        notes.iter().any(|note| note.contains("1 points") && note.contains("512KiB")),
        "{notes:?}"
    );

    let text = fs::read_to_string(out.join("results.json")).unwrap();
    assert!(text.starts_with("{\n  \"meta\": {\n    \"affinity_summary\""), "{text}");
    let results = json(&out.join("results.json"));
    assert_eq!(
        results["meta"],
        json!({
            "created_at": "2024-02-29T23:59:58+00:00", "finished_at": "2024-03-01T00:01:00+00:00",
            "argv": ["cluster-health", "h2d"], "env": {"HCCL_BUFFSIZE": "200"},
            "device_kind": "npu", "device_ids": [0, 1, 2], "cpu_ids": [0, 3], "sizes_mb": [16],
            "affinity_summary": {"present": 4}, "partial": false,
        })
    );
    assert_eq!(results["metrics"].as_array().unwrap().len(), 3);
    assert_eq!(
        results["metrics"][0],
        json!({
            "test": "core_h2d_matrix", "status": "ok", "host_cpu": 3, "device_id": 0, "size_mb": 16,
            "gbps": 33.554432, "repeat": 1, "ts": "2024-02-29T23:59:58+00:00", "operation": "copy",
            "direction": "host_to_device", "iterations": 3, "seconds": 0.002, "pinned": true,
            "device": "npu:0", "dtype": "float16", "bind_actual_cpus": [3],
            "bind_actual_cpus_list": "3",
        })
    );
    assert_eq!(results["metrics"][1]["ts"], "2024-03-01T00:00:00+00:00");
    for (index, status, reason) in [(1, "skip", "offline"), (2, "error", "data mismatch")] {
        let metric = &results["metrics"][index];
        assert_eq!((&metric["status"], &metric["reason"]), (&status.into(), &reason.into()));
        assert!(metric.get("gbps").is_none());
    }
    assert_eq!(json(&out.join("affinity.json")), census);
    let mut names: Vec<_> =
        fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["affinity.json", "results.json"]);

    let error = export(&out, &samples[1..2], &meta(), None).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("512KiB"), "{error}");
}

#[test]
fn exported_pairs_have_every_field() {
    let folder = tempfile::tempdir().unwrap();
    let mut sample = Sample::new(0, Sweep::CorePair, ByteSize::mib(8));
    (sample.rank0_cpu, sample.rank1_cpu) = (Some(CpuId(2)), Some(CpuId(9)));
    sample.device_pair = Some([DeviceId(0), DeviceId(5)]);
    sample.iter_ns = vec![1_000_000, 500_000];
    export(folder.path(), &[sample], &meta(), None).unwrap();
    let results = json(&folder.path().join("results.json"));
    // 8 MiB in 0.75 ms.
    let rate = 8.388608 / 0.75;
    assert_eq!(
        results["metrics"][0],
        json!({
            "test": "core_pair_d2d_matrix", "status": "ok", "rank0_cpu": 2, "rank1_cpu": 9,
            "size_mb": 8, "alg_gbps": rate, "rank_exchange_gbps": rate, "repeat": 0,
            "operation": "all_gather", "iterations": 2, "seconds": 0.0015, "avg_seconds": 0.00075,
            "backend": "hccl", "device": "npu:0", "device_kind": "npu", "device_pair": [0, 5],
            "dtype": "float16", "target_cpu": 2, "rank": 0, "world_size": 2, "local_rank": 0,
            "local_world_size": 2, "host": "node-0182", "pid": null,
        })
    );
    let meta = &results["meta"];
    assert_eq!(meta["device_pair"], json!([0, 5]));
    assert_eq!((&meta["rank0_cpus"], &meta["rank1_cpus"]), (&json!([2]), &json!([9])));
    assert!(meta.get("device_ids").is_none());
}

#[test]
fn what_is_exported_imports_with_the_same_rates() {
    let folder = tempfile::tempdir().unwrap();
    let mut samples = Vec::new();
    let mut seq = 0;
    for block in 0..2 {
        for cpu in [4, 0, 7] {
            for device in [1, 0] {
                for size in [ByteSize::mib(1), ByteSize::gib(1)] {
                    let time = 10_000 + seq * 7_919 + u64::from(cpu);
                    samples.push(h2d_sample(
                        seq,
                        (cpu, device),
                        size,
                        block,
                        &[time + 90, time, time - 3],
                    ));
                    seq += 1;
                }
            }
        }
    }
    (samples[5].status, samples[5].reason) = (PointStatus::Skipped, Some("offline".to_owned()));
    samples[5].iter_ns.clear();
    export(folder.path(), &samples, &meta(), None).unwrap();
    let imported = older(Sweep::H2d, folder.path()).unwrap();
    let key = |sample: &Sample| {
        // The middle one of the three, which is the rate of the point.
        let time = if sample.iter_ns.len() == 3 { &sample.iter_ns[1..2] } else { &sample.iter_ns };
        (
            sample.cell(),
            sample.bytes,
            sample.block,
            sample.status,
            sample.reason.clone(),
            time.to_vec(),
        )
    };
    let mut exported: Vec<_> = samples.iter().map(key).collect();
    let mut back: Vec<_> = imported.samples.iter().map(key).collect();
    assert_eq!(back, exported, "the order is that of the measurement");
    exported.sort_by_key(|entry| (entry.0, entry.1, entry.2));
    back.dedup();
    assert_eq!(back.len(), 24);
    assert_eq!(imported.scan_order, ScanOrder::Unknown);
}

#[cfg(not(feature = "xlsx"))]
#[test]
fn workbooks_need_their_feature() {
    let folder = tempfile::tempdir().unwrap();
    let path = csv_file(folder.path(), "results.xlsx", "PK\u{3}\u{4}");
    let error = older(Sweep::H2d, &path).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("feature xlsx"), "{error}");
}

#[cfg(feature = "xlsx")]
mod workbooks {
    use std::io::{Cursor, Write as _};

    use rust_xlsxwriter::Workbook;
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// The heat sheet as openpyxl reads it: rows of cells.
    fn openpyxl(path: &Path, sheet: &str) -> Option<Value> {
        let script = "import sys, json, warnings; warnings.simplefilter('ignore'); import openpyxl
sheet = openpyxl.load_workbook(sys.argv[1])[sys.argv[2]]
print(json.dumps([list(row) for row in sheet.iter_rows(values_only=True)]))";
        if !Command::new("python3")
            .args(["-c", "import openpyxl"])
            .output()
            .is_ok_and(|output| output.status.success())
        {
            println!("skipped: no python3 with openpyxl");
            return None;
        }
        let output =
            Command::new("python3").args(["-c", script]).arg(path).arg(sheet).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(serde_json::from_slice(&output.stdout).unwrap())
    }

    fn smoke(file: &str, sheet: &str, sweep: Sweep) {
        let Some(path) = recorded(file) else { return };
        let imported = older(sweep, &path).unwrap();
        assert!(imported.scan_order_assumed);
        let census = imported.affinity.as_ref().unwrap();
        assert_eq!((census.len(), census[639].numa_node), (640, Some(NodeId(7))));
        assert_eq!(census[638].thread_siblings, "638,639");
        assert_eq!((census[1].core_id, census[1].bindable), (Some(196_608), Some(true)));
        let Some(rows) = openpyxl(&path, sheet) else { return };
        let rows = rows.as_array().unwrap();
        let mut samples = imported.samples.iter();
        for row in &rows[1..] {
            for (at, label) in rows[0].as_array().unwrap().iter().enumerate().skip(1) {
                let sample = samples.next().unwrap();
                let label = label.as_str().map_or_else(|| label.to_string(), ToOwned::to_owned);
                let column: u32 = label.trim_start_matches("npu:").parse().unwrap();
                assert_eq!(
                    sample.cell(),
                    Some((row[0].as_u64().unwrap().try_into().unwrap(), column))
                );
                assert_eq!(sample.bytes, ByteSize::mib(1));
                let expected = row[at].as_f64().unwrap();
                // Half a nanosecond of 1 MiB at 5 GB/s.
                assert!((rate(sample) / expected - 1.0).abs() < 2.5e-6, "{expected}");
            }
        }
        assert!(samples.next().is_none());
        let other = if sweep.is_pair() { Sweep::H2d } else { Sweep::CorePair };
        let error = older(other, &path).unwrap_err().to_string();
        assert!(error.contains("--sweep"), "{error}");
    }

    #[test]
    fn the_recorded_h2d_workbook_reads_as_openpyxl_reads_it() {
        smoke("A3-core-h2d-matrix-smoke.xlsx", "H2D_1MB", Sweep::H2d);
    }

    #[test]
    fn the_recorded_pair_workbook_reads_as_openpyxl_reads_it() {
        smoke("A3-core-pair-d2d-matrix-smoke.xlsx", "D2D_1MB", Sweep::CorePair);
    }

    #[test]
    fn a_workbook_without_a_matrix_is_refused() {
        let Some(path) = recorded("A3-numa-affinity-smoke-heatmap.xlsx") else { return };
        let error = older(Sweep::H2d, &path).unwrap_err().to_string();
        assert!(error.contains("H2D_<n>MB"), "{error}");
    }

    fn book(fill: impl FnOnce(&mut rust_xlsxwriter::Worksheet)) -> Vec<u8> {
        let mut book = Workbook::new();
        let sheet = book.add_worksheet();
        sheet.set_name("H2D_16MB").unwrap();
        sheet.write(0, 0, "title").unwrap();
        sheet.write(0, 1, "npu:4").unwrap();
        sheet.write(1, 0, 7).unwrap();
        fill(sheet);
        book.save_to_buffer().unwrap()
    }

    fn import(bytes: &[u8]) -> Result<Imported, Error> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("book.xlsx");
        fs::write(&path, bytes).unwrap();
        older(Sweep::H2d, &path)
    }

    #[test]
    fn bad_cells_are_named_as_in_the_sheet() {
        let imported = import(&book(|sheet| {
            sheet.write(1, 1, 16.777216).unwrap();
        }))
        .unwrap();
        assert_eq!(imported.samples[0].iter_ns, [1_000_000]);
        assert_eq!(imported.samples[0].cell(), Some((7, 4)));
        type Fill = fn(&mut rust_xlsxwriter::Worksheet);
        let cases: [(Fill, &str, &str); 4] = [
            (
                |sheet| {
                    sheet.write(1, 1, "fast").unwrap();
                },
                "cell B2",
                "text",
            ),
            (
                |sheet| {
                    sheet.write(1, 27, 1.5).unwrap();
                },
                "cell AB2",
                "without an id",
            ),
            (
                |sheet| {
                    sheet.write(2, 0, 1.5).unwrap();
                },
                "cell A3",
                "no id",
            ),
            (
                |sheet| {
                    sheet.write(1_000_000, 0, 1).unwrap();
                },
                "cell A1000001",
                "at most",
            ),
        ];
        for (fill, place, word) in cases {
            let error = import(&book(fill)).unwrap_err().to_string();
            assert!(error.contains("sheet H2D_16MB") && error.contains(place), "{error}");
            assert!(error.contains(word), "{error}");
        }
        let error = import(&book(|_| {})).unwrap_err().to_string();
        assert!(error.contains("no cell was measured"), "{error}");
    }

    /// The workbook with one part replaced.
    fn with_part(name: &str, content: &[u8]) -> Vec<u8> {
        let bytes = book(|sheet| {
            sheet.write(1, 1, 1.0).unwrap();
        });
        let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).unwrap();
        let mut out = ZipWriter::new(Cursor::new(Vec::new()));
        for index in 0..archive.len() {
            let part = archive.by_index_raw(index).unwrap();
            if part.name().unwrap() != name {
                out.raw_copy_file(part).unwrap();
            }
        }
        out.start_file(name, SimpleFileOptions::default()).unwrap();
        out.write_all(content).unwrap();
        out.finish().unwrap().into_inner()
    }

    #[test]
    fn bombs_are_refused() {
        let zeros = vec![b' '; 257 << 20];
        let packed = with_part("xl/media/picture.bin", &zeros);
        assert!(packed.len() < 1 << 20);
        let error = import(&packed).unwrap_err().to_string();
        assert!(error.contains("256 MiB"), "{error}");

        let strings =
            br#"<?xml version="1.0"?><sst uniqueCount = '99999999999999'><si><t>a</t></si></sst>"#;
        let error = import(&with_part("xl/sharedStrings.xml", strings)).unwrap_err().to_string();
        assert!(error.contains("99999999999999 strings"), "{error}");

        let sheet = |cell: &str| {
            let text = format!(
                "<worksheet><sheetData><row r=\"1\"><c r=\"{cell}\"><v>1</v></c></row></sheetData></worksheet>"
            );
            import(&with_part("xl/worksheets/sheet1.xml", text.as_bytes())).unwrap_err()
        };
        // The last cell of a sheet is an id that is out of reach, not a range of 17 × 10⁹ cells.
        assert!(sheet("XFD1048576").to_string().contains("at most"));
        for cell in ["A99999999999999", "ZZZZZZZZZZZZZ1", "A0", "1", ""] {
            assert_eq!(sheet(cell).kind(), "format", "{cell}");
        }
        for bytes in [&b"PK"[..], b"PK\x03\x04 and no archive", &packed[..packed.len() / 2]] {
            let error = import(bytes).unwrap_err().to_string();
            assert!(error.contains("not a workbook"), "{error}");
        }
    }
}
