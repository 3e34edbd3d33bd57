//! What a program that embeds the library is promised: it prints nothing, changes nothing of its
//! process, and leaves nothing behind, however a sweep ends.
//!
//! Every case runs in a process of its own: this executable again, with the case's name.
#![allow(unsafe_code, reason = "looks at its own process as the kernel sees it")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{Read as _, Seek as _};
use std::os::fd::AsRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cluster_health_core::rank::RankGroup;
use cluster_health_core::watch::{self, Watchdog};
use cluster_health_core::{ByteSize, HostBuffer, HostMemory, Machine, Scenario};
use cluster_health_matrix::plan::{CorePairPlan, H2dPlan};
use cluster_health_matrix::run::OpenMode;
use cluster_health_matrix::samples::{PointStatus, Sample};
use cluster_health_matrix::session::{RecordOptions, record_h2d};
use cluster_health_matrix::{Error, Observer, Result, sweep};
use tempfile::TempDir;

use crate::simulator;
use crate::support::QUIET;

const CASE: &str = "EMBEDDING_CASE";
const FOLDER: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";

fn run(case: &str, variables: &[(&str, &str)]) {
    let folder = TempDir::new().unwrap();
    simulator::install(folder.path(), &simulator::LIBRARIES);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "embedding::one_case", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .env(FOLDER, folder.path())
        .envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {}\n{text}{said}", output.status);
    assert!(text.contains("1 passed"), "{case} did not run: {text}");
}

#[test]
fn sweeps_on_this_machine_leave_the_process_as_it_was() {
    run("host", &[]);
}

#[test]
fn sweeps_in_virtual_time_leave_the_process_as_it_was() {
    run("synthetic", &[]);
}

#[test]
fn ranks_that_are_threads_leave_the_process_as_it_was() {
    run("ranks", &[]);
}

#[test]
fn sweeps_on_a_failing_accelerator_leave_the_process_as_it_was() {
    run("ascend", &[("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:9+:507899")]);
}

#[test]
fn sweeps_at_once_in_one_process_work() {
    run("two", &[]);
}

#[test]
fn a_hung_call_is_reported_and_counted_in_a_library() {
    run("hung", &[("ASCEND_SIM_FAULTS", "aclrtMemcpyAsync@1:40:hang")]);
}

#[test]
#[ignore = "runs in the processes that the other tests start"]
fn one_case() {
    match std::env::var(CASE).as_deref() {
        Ok("host") => host(),
        Ok("synthetic") => synthetic(),
        Ok("ranks") => ranks(),
        Ok("ascend") => ascend(),
        Ok("two") => two(),
        Ok("hung") => hung(),
        other => panic!("no case {other:?}"),
    }
}

/// What the kernel knows about this process that a guest has no business to change.
#[derive(Debug, PartialEq)]
struct Process {
    /// Signal handlers, ignored and blocked signals, CPUs and nodes, locked memory.
    status: BTreeMap<String, String>,
    /// CPUs of every thread.
    threads: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
    /// Mappings of files without a name.
    segments: usize,
    children: String,
    policy: (i32, u64),
    folder: std::path::PathBuf,
    /// Of the environment, whose values are nobody's business.
    variables: u64,
}

fn line<'a>(text: &'a str, name: &str) -> &'a str {
    let start = format!("{name}:\t");
    text.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_default().trim()
}

impl Process {
    fn now() -> Self {
        let text = fs::read_to_string("/proc/thread-self/status").unwrap();
        let names = [
            "SigCgt",
            "SigIgn",
            "SigBlk",
            "ShdPnd",
            "Threads",
            "Cpus_allowed_list",
            "Mems_allowed_list",
            "VmLck",
        ];
        let status = names.map(|name| (name.to_owned(), line(&text, name).to_owned()));
        let (mut threads, mut files, mut children) =
            (BTreeMap::new(), BTreeMap::new(), String::new());
        for task in fs::read_dir("/proc/self/task").unwrap() {
            let task = task.unwrap();
            // One that ends just now.
            let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
            let name = format!("{:?}", task.file_name());
            threads.insert(name, line(&status, "Cpus_allowed_list").to_owned());
            let more = fs::read_to_string(task.path().join("children"));
            children.push_str(&more.unwrap_or_default());
        }
        let own = std::process::id().to_string();
        for file in fs::read_dir("/proc/self/fd").unwrap() {
            let file = file.unwrap();
            let target = fs::read_link(file.path()).unwrap_or_default().display().to_string();
            // The one that lists them.
            if !target.ends_with(&format!("/proc/{own}/fd")) {
                files.insert(format!("{:?}", file.file_name()), target);
            }
        }
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let segments = maps.lines().filter(|line| line.contains("/memfd:")).count();
        let mut variables = DefaultHasher::new();
        std::env::vars_os().for_each(|variable| variable.hash(&mut variables));
        let (mut mode, mut nodes) = (0_i32, [0_u64; 16]);
        let (mode_at, nodes_at): (*mut i32, *mut u64) = (&raw mut mode, nodes.as_mut_ptr());
        // SAFETY:
        // * The pointers are to live values of ours: a mode, and as many bits as is said.
        unsafe { libc::syscall(libc::SYS_get_mempolicy, mode_at, nodes_at, 1024, 0, 0) };
        Self {
            status: status.into(),
            threads,
            files,
            segments,
            children,
            policy: (mode, nodes[0]),
            folder: std::env::current_dir().unwrap(),
            variables: variables.finish(),
        }
    }

    /// As far as a runtime that stays loaded leaves it to itself: with threads and files of its own.
    fn without_the_runtime(mut self, before: &Self) -> Self {
        self.threads.retain(|name, _| before.threads.contains_key(name));
        self.files.retain(|name, _| before.files.contains_key(name));
        for name in ["Threads", "VmLck"] {
            self.status.insert(name.to_owned(), before.status[name].clone());
        }
        self.segments = before.segments;
        self
    }
}

/// Output of this process goes to a file for as long as this lives.
struct Silence {
    file: File,
    saved: [libc::c_int; 2],
}

impl Silence {
    fn begin() -> Self {
        let file = tempfile::tempfile().unwrap();
        let saved = [1, 2].map(|number| {
            // SAFETY:
            // * dup takes and returns numbers of files.
            let copy = unsafe { libc::dup(number) };
            assert!(copy >= 0);
            // SAFETY:
            // * As above; both are open.
            assert!(unsafe { libc::dup2(file.as_raw_fd(), number) } >= 0);
            copy
        });
        Self { file, saved }
    }

    /// What was written meanwhile.
    fn end(mut self) -> String {
        for (number, saved) in [1, 2].into_iter().zip(self.saved) {
            // SAFETY:
            // * As in `begin`.
            assert!(unsafe { libc::dup2(saved, number) } >= 0);
            // SAFETY:
            // * Our own copy, closed once.
            unsafe { libc::close(saved) };
        }
        let mut text = String::new();
        self.file.rewind().unwrap();
        self.file.read_to_string(&mut text).unwrap();
        text
    }
}

/// How a sweep is to end.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Complete,
    Cancelled,
    Refused,
    Panicked,
}

const WAYS: [Way; 4] = [Way::Complete, Way::Cancelled, Way::Refused, Way::Panicked];

struct Guest {
    way: Way,
    seen: usize,
    statuses: Vec<PointStatus>,
}

impl Guest {
    fn new(way: Way) -> Self {
        Self { way, seen: 0, statuses: Vec::new() }
    }
}

impl Observer for Guest {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.seen += 1;
        self.statuses.push(sample.status);
        match self.way {
            Way::Refused if self.seen == 5 => Err(Error::output("a disk", "full")),
            // Without the hook's words: they are the host's.
            Way::Panicked if self.seen == 5 => std::panic::resume_unwind(Box::new("the host's")),
            _ => Ok(()),
        }
    }

    fn is_cancelled(&self) -> bool {
        self.way == Way::Cancelled && self.seen >= 5
    }
}

/// Does `work` and holds the process against what it was before.
fn unchanged(what: &str, work: impl FnOnce()) {
    let before = Process::now();
    let silence = Silence::begin();
    let result = catch_unwind(AssertUnwindSafe(work));
    let printed = silence.end();
    assert!(result.is_ok(), "{what}: {printed}");
    assert_eq!(printed, "", "{what} printed");
    // A thread is gone for the kernel a moment after it was joined.
    let deadline = Instant::now() + Duration::from_secs(5);
    while Process::now() != before && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(Process::now(), before, "{what}");
}

fn plan(machine: &Machine) -> H2dPlan {
    let sizes = [ByteSize::kib(64), ByteSize::mib(1)];
    H2dPlan::builder().sizes(sizes).repeats(2).build(machine).unwrap()
}

/// A sweep that ends in this way.
fn sweep_in(machine: &Machine, way: Way) {
    let plan = plan(machine);
    let mut guest = Guest::new(way);
    let result = catch_unwind(AssertUnwindSafe(|| sweep::h2d(machine, &plan, &mut guest)));
    match (way, result) {
        (Way::Panicked, Err(panic)) => assert_eq!(panic.downcast_ref(), Some(&"the host's")),
        (Way::Refused, Ok(Err(error))) => assert_eq!(error.kind(), "output"),
        (Way::Complete, Ok(Ok(matrix))) => assert!(matrix.end.complete),
        (Way::Cancelled, Ok(Ok(matrix))) => assert!(!matrix.end.complete),
        (way, other) => panic!("{way:?}: {other:?}"),
    }
}

fn host() {
    // What a process has only after its first sweep belongs to it: thread-locals, the census.
    sweep_in(&Machine::host().unwrap(), Way::Complete);
    for way in WAYS {
        unchanged(&format!("{way:?}"), || sweep_in(&Machine::host().unwrap(), way));
    }
    unchanged("a recorded run", || {
        let machine = Machine::host().unwrap();
        let plan = plan(&machine);
        let folder = TempDir::new().unwrap();
        let options = RecordOptions::default().with_mode(OpenMode::Force);
        for way in [Way::Complete, Way::Cancelled, Way::Refused] {
            let mut guest = Guest::new(way);
            let report = record_h2d("test", &machine, &plan, folder.path(), &options, &mut guest);
            assert_eq!(report.is_ok(), way != Way::Refused, "{way:?}");
        }
        // Nowhere to write to.
        let nowhere = folder.path().join("file");
        fs::write(&nowhere, "").unwrap();
        let mut guest = Guest::new(Way::Complete);
        record_h2d("test", &machine, &plan, &nowhere, &options, &mut guest).unwrap_err();
    });
    unchanged("plans and buffers that are refused", || {
        let machine = Machine::host().unwrap();
        H2dPlan::builder().sizes([ByteSize(1 << 60)]).build(&machine).unwrap_err();
        HostBuffer::new(&machine, ByteSize(1 << 60), HostMemory::PageLocked).unwrap_err();
        Machine::by_name("synthetic:no.such.file").unwrap_err();
        Machine::by_name("cuda").unwrap_err();
    });
}

fn synthetic() {
    let machine = || Machine::synthetic(Scenario::parse(QUIET, "inline").unwrap()).unwrap();
    sweep_in(&machine(), Way::Complete);
    for way in WAYS {
        unchanged(&format!("{way:?}"), || sweep_in(&machine(), way));
    }
}

fn ranks() {
    let pair = |way: Way| {
        let machine = Machine::host().unwrap();
        let timeout = Duration::from_secs(5);
        let plan = CorePairPlan::builder().sizes([ByteSize(8)]).repeats(2).timeout(timeout);
        let plan = plan.build(&machine).unwrap();
        thread::scope(|scope| {
            let ranks = RankGroup::threads(2).unwrap().into_iter().map(|group| {
                let (machine, plan) = (&machine, &plan);
                // One rank alone has a host that behaves so.
                let way = if group.rank() == 0 { way } else { Way::Complete };
                scope.spawn(move || {
                    let mut guest = Guest::new(way);
                    let ended = catch_unwind(AssertUnwindSafe(|| {
                        sweep::core_pair(machine, plan, Some(&group), &mut guest)
                    }));
                    assert_eq!(ended.is_err(), way == Way::Panicked);
                })
            });
            // The end of a scope does not wait for the very end of its threads.
            ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
        });
    };
    pair(Way::Complete);
    for way in WAYS {
        unchanged(&format!("{way:?}"), || pair(way));
    }
}

fn ascend() {
    let before = Process::now();
    let silence = Silence::begin();
    let result = catch_unwind(|| {
        let machine = Machine::ascend().unwrap();
        let plan = plan(&machine);
        for way in [Way::Complete, Way::Cancelled] {
            let mut guest = Guest::new(way);
            sweep::h2d(&machine, &plan, &mut guest).unwrap();
            assert!(guest.statuses.contains(&PointStatus::Measured));
            assert!(guest.statuses.contains(&PointStatus::Failed) || way == Way::Cancelled);
        }
    });
    let printed = silence.end();
    assert!(result.is_ok(), "{printed}");
    assert_eq!(printed, "");
    assert_eq!(Process::now().without_the_runtime(&before), before);
}

/// They measure each other then, but both end, and the process is what it was.
fn two() {
    let machine = Machine::host().unwrap();
    let virtual_machine = Machine::synthetic(Scenario::parse(QUIET, "inline").unwrap()).unwrap();
    sweep_in(&machine, Way::Complete);
    unchanged("sweeps at once", || {
        thread::scope(|scope| {
            let sweeps: Vec<_> = [&machine, &machine, &virtual_machine, &machine]
                .into_iter()
                .map(|machine| {
                    scope.spawn(move || {
                        let plan = plan(machine);
                        let result = sweep::h2d(machine, &plan, &mut ()).unwrap();
                        assert!(result.end.complete);
                        assert!(result.gbps().iter().all(|rate| *rate > 0.0));
                    })
                })
                .collect();
            for sweep in sweeps {
                sweep.join().unwrap();
            }
        });
    });
    // The same folder twice is refused by a type that says so.
    let folder = TempDir::new().unwrap();
    struct Second<'a>(&'a Machine, &'a std::path::Path, Option<Result<()>>);
    impl Observer for Second<'_> {
        fn sample(&mut self, _sample: &Sample) -> Result<()> {
            if self.2.is_none() {
                let options = RecordOptions::default().with_mode(OpenMode::Resume);
                let again = record_h2d("test", self.0, &plan(self.0), self.1, &options, &mut ());
                self.2 = Some(again.map(|_| ()));
            }
            Ok(())
        }
    }
    let mut second = Second(&machine, folder.path(), None);
    let plan = plan(&machine);
    record_h2d("test", &machine, &plan, folder.path(), &RecordOptions::default(), &mut second)
        .unwrap();
    assert_eq!(second.2.unwrap().unwrap_err().kind(), "busy");
}

/// A host with a thread inside a driver that does not return: it is told, goes on, and ends when it
/// wants to.
fn hung() {
    static REPORTS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let reports = || REPORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let bound = Duration::from_millis(500);
    let watchdog = Watchdog::start(bound, |overdue| {
        let text = overdue.error(None).to_string();
        REPORTS.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    });
    let watchdog = watchdog.unwrap();
    let stuck = thread::spawn(|| {
        let machine = Machine::ascend().unwrap();
        let plan = plan(&machine);
        sweep::h2d(&machine, &plan, &mut ()).map(|_| ())
    });
    let began = Instant::now();
    while watch::left_behind() == 0 {
        assert!(began.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(bound);
    let found = reports().clone();
    assert_eq!(found.len(), 1, "{found:?}");
    let words = ["aclrtMemcpyAsync failed on device 1", "has not returned"];
    assert!(words.iter().all(|words| found[0].contains(words)), "{found:?}");
    assert!(!stuck.is_finished());
    // Everything else of the process works.
    sweep_in(&Machine::host().unwrap(), Way::Complete);
    assert_eq!(watch::left_behind(), 1);
    drop(watchdog);
}
