//! Process-wide binding. A test binary of its own, because it moves every thread of the process.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use cluster_health_core::CpuId;
use cluster_health_core::affinity::{
    BindScope, CpuSet, PinGuard, current_cpu, set_thread_affinity, thread_affinity,
};

/// Tests of this file exclude each other.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `Cpus_allowed_list` of every thread of this process, as the kernel tells it.
fn masks() -> BTreeMap<i32, String> {
    let mut masks = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap();
        if let Ok(status) = std::fs::read_to_string(task.path().join("status")) {
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
            let id = task.file_name().to_str().unwrap().parse().unwrap();
            masks.insert(id, list.unwrap().to_owned());
        }
    }
    masks
}

/// A thread that waits for the end and tells its id at once.
struct Worker {
    id: i32,
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn start(mask: Option<CpuSet>) -> Self {
        let (tell, told) = channel();
        let (stop, stopped): (_, Receiver<()>) = channel();
        let thread = thread::spawn(move || {
            if let Some(mask) = mask {
                set_thread_affinity(&mask).unwrap();
            }
            let link = std::fs::read_link("/proc/thread-self").unwrap();
            tell.send(link.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            stopped.recv().unwrap_err();
        });
        Self { id: told.recv().unwrap(), stop, thread }
    }

    fn stop(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

fn one(cpu: CpuId) -> CpuSet {
    CpuSet::from_iter([cpu])
}

/// First and last CPU of this thread, or none when there is only one.
fn two_cpus() -> Option<(CpuId, CpuId)> {
    let cpus = thread_affinity().unwrap();
    let (first, last) = (cpus.first().unwrap(), cpus.iter().last().unwrap());
    if first == last {
        println!("skipped: one CPU");
        return None;
    }
    Some((first, last))
}

#[test]
fn all_threads_are_bound_moved_and_restored() {
    let _alone = alone();
    let Some((first, last)) = two_cpus() else { return };
    let old = thread_affinity().unwrap();
    let workers = [None, Some(one(first)), Some(one(last))].map(Worker::start);
    let before: BTreeMap<i32, String> =
        workers.iter().map(|worker| (worker.id, masks()[&worker.id].clone())).collect();
    let texts = [old.to_string(), first.to_string(), last.to_string()];
    assert!(workers.iter().map(|worker| &before[&worker.id]).eq(&texts));

    let mut guard = PinGuard::bind(first, BindScope::Process).unwrap();
    assert_eq!((guard.scope(), guard.cpu()), (BindScope::Process, first));
    assert!(masks().values().all(|mask| *mask == first.to_string()), "{:?}", masks());
    let inherited = Worker::start(None);

    guard.move_to(last).unwrap();
    assert_eq!(current_cpu().unwrap(), last);
    assert!(masks().values().all(|mask| *mask == last.to_string()), "{:?}", masks());
    let late = Worker::start(None);
    guard.move_to(first).unwrap();
    let later = Worker::start(None);

    drop(guard);
    let after = masks();
    for (id, mask) in &before {
        assert_eq!(after.get(id), Some(mask), "thread {id}");
    }
    for born in [&inherited, &late, &later] {
        assert_eq!(after[&born.id], old.to_string());
    }
    workers.into_iter().chain([inherited, late, later]).for_each(Worker::stop);
}

#[test]
fn a_new_threads_own_mask_is_restored() {
    let _alone = alone();
    let Some((first, last)) = two_cpus() else { return };
    let mut guard = PinGuard::bind(first, BindScope::Process).unwrap();
    let seen = Worker::start(Some(one(last)));
    guard.move_to(first).unwrap();
    assert_eq!(masks()[&seen.id], first.to_string());
    let unseen = Worker::start(Some(one(last)));
    drop(guard);
    assert_eq!(masks()[&seen.id], last.to_string());
    assert_eq!(masks()[&unseen.id], last.to_string());
    seen.stop();
    unseen.stop();
}

#[test]
fn one_process_wide_guard_at_a_time() {
    let _alone = alone();
    let old = thread_affinity().unwrap();
    let cpu = old.first().unwrap();
    let guard = PinGuard::bind(cpu, BindScope::Process).unwrap();
    assert_eq!(PinGuard::bind(cpu, BindScope::Process).unwrap_err().kind(), "busy");
    drop(PinGuard::bind(cpu, BindScope::Thread).unwrap());
    drop(guard);
    // A failed bind gives the claim back too.
    let error = PinGuard::bind(CpuId(1_000_000), BindScope::Process).unwrap_err();
    assert_eq!((error.kind(), error.code()), ("system", Some(22)));
    drop(PinGuard::bind(cpu, BindScope::Process).unwrap());
    assert_eq!(thread_affinity().unwrap(), old);
}

#[test]
fn threads_may_come_and_go_meanwhile() {
    let _alone = alone();
    let old = thread_affinity().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    thread::spawn(|| ()).join().unwrap();
                }
            });
        }
        let bound = (0..200).try_for_each(|_| {
            let mut guard = PinGuard::bind(old.first().unwrap(), BindScope::Process)?;
            old.iter().try_for_each(|cpu| guard.move_to(cpu))
        });
        stop.store(true, Ordering::Relaxed);
        bound.unwrap();
        assert_eq!(thread_affinity().unwrap(), old);
    });
}
