//! Runs of two live ranks: starting them, watching and disturbing them, and what they must not
//! leave behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use crate::support::{Csv, Place, Ran, json};

/// What a loaded machine may take for anything that has no bound of its own.
pub(crate) const SLACK: Duration = Duration::from_secs(4);
/// Longest wait for something that must come.
const PATIENCE: Duration = Duration::from_secs(60);

/// The first two CPUs that this process may use; most pairs need two.
pub(crate) fn two_cpus() -> Option<[u32; 2]> {
    let list = allowed("self")?;
    let mut cpus = list.split(',').flat_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<u32>().unwrap()..=last.parse().unwrap()
    });
    let pair = cpus.next().zip(cpus.next()).map(|(first, second)| [first, second]);
    if pair.is_none() {
        println!("skipped: one CPU");
    }
    pair
}

/// The CPUs that a process may run on now, as the kernel writes them.
pub(crate) fn allowed(process: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(line.trim().to_owned())
}

/// A line of `samples.jsonl` of a pair sweep.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct PairPoint {
    pub(crate) seq: u64,
    pub(crate) t_ns: u64,
    pub(crate) sweep: String,
    pub(crate) block: u32,
    pub(crate) rank0_cpu: u32,
    pub(crate) rank1_cpu: u32,
    pub(crate) device_pair: [u32; 2],
    pub(crate) bytes: u64,
    pub(crate) status: String,
    pub(crate) reason: Option<String>,
    pub(crate) iter_ns: Vec<u64>,
    pub(crate) rank_ns: [Vec<u64>; 2],
    pub(crate) ran_on: [Vec<u32>; 2],
    pub(crate) sentinel: bool,
    pub(crate) phase: String,
    pub(crate) skew_ns: Option<u64>,
    pub(crate) check: String,
}

impl PairPoint {
    pub(crate) fn cell(&self) -> (u64, u32, u32) {
        (self.bytes, self.rank0_cpu, self.rank1_cpu)
    }

    pub(crate) fn is_first_class(&self) -> bool {
        self.phase == "blocks" && !self.sentinel
    }

    pub(crate) fn cpus(&self) -> [u32; 2] {
        [self.rank0_cpu, self.rank1_cpu]
    }

    /// Holds a measured point of live ranks against the contract.
    pub(crate) fn assert_measured(&self, iters: usize) {
        assert_eq!((self.status.as_str(), self.check.as_str()), ("measured", "ok"), "{self:?}");
        assert_eq!(self.reason, None);
        assert_eq!(self.ran_on, self.cpus().map(|cpu| vec![cpu]), "{self:?}");
        assert!(self.rank_ns.iter().all(|times| times.len() == iters), "{self:?}");
        let [first, second] = &self.rank_ns;
        let slower: Vec<u64> = first.iter().zip(second).map(|(a, b)| *a.max(b)).collect();
        assert_eq!(self.iter_ns, slower);
        assert!(self.iter_ns.iter().all(|time| *time > 0), "{self:?}");
        assert!(self.skew_ns.is_some(), "{self:?}");
    }
}

/// Every line of the log, each of which must be a whole one.
pub(crate) fn lines(dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(dir.join("samples.jsonl")).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "torn tail");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The points of the pair sweep.
pub(crate) fn pair_points(dir: &Path) -> Vec<PairPoint> {
    let pairs = lines(dir).into_iter().filter(|line| line["sweep"] == "core_pair");
    pairs.map(|line| serde_json::from_value(line).unwrap()).collect()
}

/// Asserts that a run ended with every cell of every block measured once, in one count.
pub(crate) fn assert_complete(dir: &Path, sizes: &[u64], cpus: [&[u32]; 2], blocks: u32) {
    let run = json(&dir.join("run.json"));
    assert_eq!(run["status"], "complete");
    let all = lines(dir);
    for (seq, line) in (0_u64..).zip(&all) {
        assert_eq!(line["seq"], seq);
    }
    assert!(all.iter().map(|line| line["t_ns"].as_u64().unwrap()).is_sorted());
    let points = pair_points(dir);
    let mut cells = BTreeSet::new();
    for &bytes in sizes {
        for &rank0 in cpus[0] {
            cells.extend(cpus[1].iter().map(|&rank1| (bytes, rank0, rank1)));
        }
    }
    let mut found = BTreeMap::<u32, Vec<_>>::new();
    for point in points.iter().filter(|point| point.is_first_class()) {
        assert_eq!(point.status, "measured", "{point:?}");
        found.entry(point.block).or_default().push(point.cell());
    }
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), (0..blocks).collect::<Vec<_>>());
    for (block, mut visited) in found {
        visited.sort_unstable();
        assert!(visited.iter().eq(&cells), "block {block}: {visited:?}");
    }
    for &bytes in sizes {
        let csv = Csv::read(&dir.join(format!("core-pair-{}.csv", name(bytes))));
        assert_eq!((csv.corner.as_str(), csv.rows.as_slice()), ("rank0\\rank1", cpus[0]));
        assert_eq!(csv.columns, cpus[1]);
        assert_eq!(csv.measured(), cpus[0].len() * cpus[1].len());
    }
    assert_eq!(run["points"]["measured"], all.len());
}

/// A size as file names carry it.
pub(crate) fn name(bytes: u64) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{}MiB", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{}KiB", bytes >> 10),
        bytes => format!("{bytes}B"),
    }
}

/// Waits until `look` finds something.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Process ids of everything that runs.
fn processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.parse().ok())
}

/// State and parent of a process; the dead that nobody reaped yet count as gone.
fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut words = stat.rsplit_once(") ")?.1.split(' ');
    let state = words.next()?;
    words.next()?.parse().ok().filter(|_| !matches!(state, "Z" | "X"))
}

/// The processes that this one started and that still run.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    processes().filter(|child| parent(*child) == Some(pid)).collect()
}

/// True once a process has ended.
pub(crate) fn is_gone(pid: u32) -> bool {
    parent(pid).is_none()
}

/// Processes with a path inside this folder on their command line.
pub(crate) fn users_of(dir: &Path) -> Vec<u32> {
    let dir = dir.to_str().unwrap();
    processes()
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(dir))
        })
        .collect()
}

pub(crate) fn signal(pid: u32, signal: libc::c_int) {
    signal_to(libc::pid_t::try_from(pid).unwrap(), signal);
}

fn signal_to(target: libc::pid_t, signal: libc::c_int) {
    // SAFETY:
    // * kill takes no pointers; the target is a process of this test that was there just now.
    let result = unsafe { libc::kill(target, signal) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A run that goes on while a test looks at it; killed when the test ends before it.
///
/// Its output goes to files: a pipe would stay open as long as any process of the run lives.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    dir: PathBuf,
    output: [PathBuf; 2],
}

impl Running {
    /// Starts a command in a process group of its own; `name` tells it from others of the place.
    pub(crate) fn start(place: &Place, name: &str, mut command: Command) -> Self {
        let output = ["out", "err"].map(|end| place.path(&format!("{name}.{end}")));
        let [out, err] = output.each_ref().map(|path| File::create(path).unwrap());
        let child = command.stdout(out).stderr(err).process_group(0).spawn().unwrap();
        Self { child, dir: place.path(""), output }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Rank 1, as soon as it is there.
    pub(crate) fn rank1(&mut self) -> u32 {
        wait_for("rank 1", || {
            assert!(self.child.try_wait().unwrap().is_none(), "ended: {:?}", self.outputs());
            processes().find(|pid| parent(*pid) == Some(self.child.id()))
        })
    }

    /// Waits until the log in `out` has at least so many lines.
    pub(crate) fn wait_for_points(&mut self, count: usize) {
        let log = self.dir.join("out/samples.jsonl");
        wait_for("points", || {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let found = text.matches('\n').count() >= count;
            assert!(
                found || self.child.try_wait().unwrap().is_none(),
                "ended: {:?}",
                self.outputs()
            );
            found.then_some(())
        });
    }

    /// Signals all processes of the run, as a terminal does.
    pub(crate) fn signal_group(&self, signal: libc::c_int) {
        signal_to(-libc::pid_t::try_from(self.child.id()).unwrap(), signal);
    }

    fn outputs(&self) -> [String; 2] {
        self.output.each_ref().map(|path| fs::read_to_string(path).unwrap_or_default())
    }

    /// Waits for the end, which must come within `bound`; nothing of the run may be left then.
    pub(crate) fn end_within(mut self, bound: Duration) -> Ran {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < bound, "still there after {bound:?}: {:?}", self.outputs());
            thread::sleep(Duration::from_millis(2));
        };
        let [stdout, stderr] = self.outputs();
        Ran { code: status.code(), stdout, stderr }
    }

    pub(crate) fn end(self) -> Ran {
        self.end_within(PATIENCE)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal_group(libc::SIGKILL);
            self.child.wait().unwrap();
        }
    }
}

/// Asserts that no process of a run is left, and nothing in the folder where ranks meet.
pub(crate) fn assert_nothing_left(place: &Place) {
    assert_eq!(users_of(&place.path("")), Vec::<u32>::new());
    let meeting = place.path("meet");
    if meeting.exists() {
        let left: Vec<_> = fs::read_dir(meeting).unwrap().map(|entry| entry.unwrap()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// The same of a run that ended without waiting for its children: the kernel kills them with their parent,
/// which is sent when the parent is gone and takes the children a moment to notice.
pub(crate) fn assert_nothing_left_within(place: &Place, bound: Duration) {
    let start = Instant::now();
    while !users_of(&place.path("")).is_empty() && start.elapsed() < bound {
        thread::sleep(Duration::from_millis(2));
    }
    assert_nothing_left(place);
}

/// A folder of this place, made where it is missing, in which launched ranks meet.
pub(crate) fn meeting(place: &Place) -> PathBuf {
    let path = place.path("meet");
    fs::create_dir_all(&path).unwrap();
    path
}
