//! Binding that is verified and undone.
//!
//! The raw system calls are used because their return value tells the size of the kernel's own
//! mask, which the C library hides.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libc::pid_t;

use super::set::{CpuSet, MAX_ID, locate};
use crate::error::{Error, Result};
use crate::id::CpuId;

// The kernel reads arrays of `unsigned long`; arrays of u64 have the same bytes on these machines.
const _: () = assert!(cfg!(target_pointer_width = "64") || cfg!(target_endian = "little"));

/// Words of a mask at first; the kernel says when that is too little.
const FIRST_WORDS: usize = 16;
/// Words of the largest mask that is tried.
const MAX_WORDS: usize = (MAX_ID as usize + 1) / 64;
/// Words that sufficed last time, so that only the first call of a process has to search.
static WORDS: AtomicUsize = AtomicUsize::new(FIRST_WORDS);

/// The calling thread, in the kernel's convention.
const SELF: pid_t = 0;

/// A refused call: its name and errno; errno 0 when the mask read back is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Refusal {
    call: &'static str,
    errno: i32,
}

impl Refusal {
    fn last(call: &'static str) -> Self {
        Self { call, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or_default() }
    }

    fn into_error(self, context: String) -> Error {
        let error = Error::system(self.call, self.errno, context);
        match self.errno {
            0 => error.with_advice(
                "the mask read back is another one; look for a program that sets affinities",
            ),
            libc::EINVAL => {
                error.with_advice("the CPU is offline or outside the cpuset; see the census")
            }
            _ => error,
        }
    }
}

/// Reads a mask with `read`, which gets the words and returns how many bytes it filled, growing
/// the mask as long as it answers EINVAL (too small). Returns the number of CPUs in the mask.
fn read_growing(
    words: &mut Vec<u64>,
    mut read: impl FnMut(&mut [u64]) -> Result<usize, Refusal>,
) -> Result<usize, Refusal> {
    let least = WORDS.load(Ordering::Relaxed);
    if words.len() < least {
        words.resize(least, 0);
    }
    loop {
        match read(words) {
            Ok(bytes) => {
                let filled = bytes.div_ceil(8).min(words.len());
                words[filled..].fill(0);
                WORDS.fetch_max(filled, Ordering::Relaxed);
                return Ok(bytes * 8);
            }
            Err(refusal) if refusal.errno == libc::EINVAL && words.len() < MAX_WORDS => {
                let larger = (words.len() * 2).clamp(1, MAX_WORDS);
                words.resize(larger, 0);
            }
            Err(refusal) => return Err(refusal),
        }
    }
}

/// Reads a task's mask; the words keep their number unless they have to grow. Returns the number
/// of CPUs in the kernel's mask.
fn get_affinity(task: pid_t, words: &mut Vec<u64>) -> Result<usize, Refusal> {
    read_growing(words, |words| {
        // SAFETY:
        // - the pointer and the length in bytes describe `words`, which is borrowed mutably;
        // - the kernel writes at most that many bytes, and any bytes are valid u64 values;
        // - the arguments have the types that this system call takes.
        let bytes = unsafe {
            libc::syscall(libc::SYS_sched_getaffinity, task, size_of_val(words), words.as_mut_ptr())
        };
        usize::try_from(bytes).map_err(|_| Refusal::last("sched_getaffinity"))
    })
}

fn set_affinity(task: pid_t, words: &[u64]) -> Result<(), Refusal> {
    // SAFETY:
    // - the pointer and the length in bytes describe `words`, which is borrowed for the call;
    // - the kernel only reads from it;
    // - the arguments have the types that this system call takes.
    let status = unsafe {
        libc::syscall(libc::SYS_sched_setaffinity, task, size_of_val(words), words.as_ptr())
    };
    if status == 0 { Ok(()) } else { Err(Refusal::last("sched_setaffinity")) }
}

/// The CPUs that the calling thread may run on.
///
/// # Errors
/// [`Error::System`] when the kernel refuses to tell.
pub fn thread_affinity() -> Result<CpuSet> {
    let mut words = Vec::new();
    get_affinity(SELF, &mut words).map_err(reading_own_mask)?;
    Ok(CpuSet::from_words(&words))
}

fn reading_own_mask(refusal: Refusal) -> Error {
    refusal.into_error("reading the affinity of the calling thread".to_owned())
}

/// Lets the calling thread run on these CPUs only; the kernel leaves out those outside the cpuset.
///
/// # Errors
/// [`Error::System`] when the kernel refuses, for example because none of them is online and in
/// the cpuset.
pub fn set_thread_affinity(cpus: &CpuSet) -> Result<()> {
    set_affinity(SELF, cpus.words())
        .map_err(|refusal| refusal.into_error(format!("binding the calling thread to CPUs {cpus}")))
}

/// The CPU that the calling thread runs on at this moment. Does not allocate.
///
/// # Errors
/// [`Error::System`] when the kernel cannot tell.
pub fn current_cpu() -> Result<CpuId> {
    // SAFETY:
    // - the call takes nothing and only returns a number.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu)
        .map(CpuId)
        .map_err(|_| Error::last_os("sched_getcpu", "asking for the running CPU"))
}

fn thread_id() -> pid_t {
    // SAFETY:
    // - the call takes nothing, cannot fail and only returns a number.
    unsafe { libc::gettid() }
}

/// The threads of this process.
fn task_ids() -> Result<Vec<pid_t>> {
    let failed = |error: std::io::Error| {
        let errno = error.raw_os_error().unwrap_or_default();
        Error::system("readdir", errno, "listing the threads in /proc/self/task")
    };
    let mut tasks = Vec::new();
    for entry in std::fs::read_dir("/proc/self/task").map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        tasks.extend(name.to_str().and_then(|id| id.parse::<pid_t>().ok()));
    }
    Ok(tasks)
}

/// Two masks, possibly of different lengths, with the same CPUs.
fn same(a: &[u64], b: &[u64]) -> bool {
    let shared = a.len().min(b.len());
    a[..shared] == b[..shared] && a[shared..].iter().chain(&b[shared..]).all(|&word| word == 0)
}

/// Binds one task to one CPU and reads back; reuses its two masks.
#[derive(Debug, Default)]
pub(super) struct Binder {
    wanted: Vec<u64>,
    read: Vec<u64>,
}

impl Binder {
    /// Binds the calling thread and checks its mask and the running CPU.
    pub(super) fn bind_self(&mut self, cpu: CpuId) -> Result<()> {
        let context = || format!("binding the calling thread to CPU {cpu}");
        self.want(cpu)?;
        self.bind_task(SELF).map_err(|refusal| refusal.into_error(context()))?;
        let running = current_cpu()?;
        if running == cpu {
            Ok(())
        } else {
            Err(Error::system("sched_setaffinity", 0, context())
                .with_advice(format!("the thread still runs on CPU {running}")))
        }
    }

    /// Makes `cpu` the target of [`Self::bind_task`].
    fn want(&mut self, cpu: CpuId) -> Result<()> {
        if cpu.0 > MAX_ID {
            return Err(Error::invalid("cpu", format!("{cpu} is above the largest id, {MAX_ID}")));
        }
        let (word, bit) = locate(cpu);
        self.wanted.fill(0);
        if word >= self.wanted.len() {
            self.wanted.resize(word + 1, 0);
        }
        self.wanted[word] = bit;
        Ok(())
    }

    fn bind_task(&mut self, task: pid_t) -> Result<(), Refusal> {
        set_affinity(task, &self.wanted)?;
        get_affinity(task, &mut self.read)?;
        if same(&self.wanted, &self.read) {
            Ok(())
        } else {
            Err(Refusal { call: "sched_setaffinity", errno: 0 })
        }
    }

    /// What the kernel leaves of a mask with every CPU for the calling thread: the cpuset,
    /// whatever mask the thread inherited; where it refuses such a mask, that one. The second value is
    /// the size of the kernel's mask.
    pub(super) fn widen_self(&mut self) -> Result<(CpuSet, usize)> {
        let bits = get_affinity(SELF, &mut self.read).map_err(reading_own_mask)?;
        self.wanted.clear();
        self.wanted.resize(self.read.len(), u64::MAX);
        // A sandbox that refuses this refuses the CPUs one by one, too, each with its reason.
        set_affinity(SELF, &self.wanted).ok();
        get_affinity(SELF, &mut self.read).map_err(reading_own_mask)?;
        Ok((CpuSet::from_words(&self.read), bits))
    }
}

/// Whom a [`PinGuard`] binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindScope {
    /// The calling thread.
    Thread,
    /// Every thread of the process, because vendor runtimes start threads with masks of their own.
    /// One such guard at a time.
    Process,
}

/// The other threads' part of a process-wide binding.
struct Tasks {
    /// Masks to restore; `None` for a thread that inherited the binding, so was born meanwhile.
    saved: BTreeMap<pid_t, Option<Vec<u64>>>,
    _claim: Claim,
}

/// The right to bind the whole process.
struct Claim;

static CLAIMED: AtomicBool = AtomicBool::new(false);

impl Claim {
    fn take() -> Result<Self> {
        if CLAIMED.swap(true, Ordering::Acquire) {
            return Err(Error::Busy(
                "the whole process is already bound by another guard; drop that one first"
                    .to_owned(),
            ));
        }
        Ok(Self)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.store(false, Ordering::Release);
    }
}

/// Keeps the calling thread, or the process, on one CPU until dropped.
///
/// Every bind reads back the mask of each thread bound, and for the calling thread the running
/// CPU. Dropping restores the masks found. In process scope, threads that appeared meanwhile get
/// the mask that the calling thread had; vanished ones are ignored.
///
/// # Thread binding
/// The guard belongs to the thread that made it and is neither `Send` nor `Sync`.
///
/// ```
/// use cluster_health_core::affinity::{BindScope, PinGuard, current_cpu, thread_affinity};
///
/// let before = thread_affinity()?;
/// let cpu = before.first().expect("a running thread has a CPU");
/// let guard = PinGuard::bind(cpu, BindScope::Thread)?;
/// assert_eq!(current_cpu()?, cpu);
/// drop(guard);
/// assert_eq!(thread_affinity()?, before);
/// # Ok::<(), cluster_health_core::Error>(())
/// ```
///
/// ```compile_fail
/// fn send<T: Send>() {}
/// send::<cluster_health_core::affinity::PinGuard>();
/// ```
#[doc(alias = "sched_setaffinity")]
pub struct PinGuard {
    cpu: CpuId,
    binder: Binder,
    /// The calling thread's mask from before.
    saved: Vec<u64>,
    tasks: Option<Tasks>,
    _of_this_thread: PhantomData<*const ()>,
}

impl fmt::Debug for PinGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinGuard")
            .field("cpu", &self.cpu)
            .field("process", &self.tasks.is_some())
            .field("saved", &CpuSet::from_words(&self.saved).to_string())
            .finish_non_exhaustive()
    }
}

impl PinGuard {
    /// Binds to `cpu`.
    ///
    /// # Errors
    /// [`Error::System`] with the errno when the kernel refuses, or with errno 0 when the mask or
    /// the running CPU read back is another one; [`Error::Busy`] for a second process-wide guard;
    /// [`Error::Invalid`] for an id above 1,048,575. The masks are then as before.
    pub fn bind(cpu: CpuId, scope: BindScope) -> Result<Self> {
        let tasks = match scope {
            BindScope::Thread => None,
            BindScope::Process => Some(Tasks { saved: BTreeMap::new(), _claim: Claim::take()? }),
        };
        let mut saved = Vec::new();
        get_affinity(SELF, &mut saved).map_err(reading_own_mask)?;
        let mut guard =
            Self { cpu, binder: Binder::default(), saved, tasks, _of_this_thread: PhantomData };
        guard.rebind(cpu, true)?;
        Ok(guard)
    }

    /// Binds to another CPU; what is restored in the end stays the same. In thread scope this does
    /// not allocate, once a CPU with the largest id has been visited.
    ///
    /// # Errors
    /// As [`PinGuard::bind`]. When the calling thread is refused, everything stays where it was;
    /// when another thread is, the threads before it have moved. Dropping restores all.
    pub fn move_to(&mut self, cpu: CpuId) -> Result<()> {
        self.rebind(cpu, false)
    }

    /// The CPU that was bound to last.
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.cpu
    }

    /// Whether the guard binds the calling thread or the process.
    #[must_use]
    pub fn scope(&self) -> BindScope {
        if self.tasks.is_some() { BindScope::Process } else { BindScope::Thread }
    }

    fn rebind(&mut self, cpu: CpuId, mut first_scan: bool) -> Result<()> {
        // The calling thread comes first: if the kernel refuses the CPU, no other thread moves.
        self.binder.bind_self(cpu)?;
        let before = std::mem::replace(&mut self.cpu, cpu);
        let Some(tasks) = &mut self.tasks else { return Ok(()) };
        let binder = &mut self.binder;
        let caller = thread_id();
        let inherited = [before, cpu].map(|cpu| CpuSet::from_iter([cpu]));
        let mut seen = BTreeSet::from([caller]);
        // A thread that appears with the new mask was started by a bound one, so nothing else can
        // be unbound once a scan finds no other kind; waiting for no new thread at all might
        // never end in a program that keeps starting threads.
        let mut found_unbound = true;
        while std::mem::take(&mut found_unbound) {
            for task in task_ids()? {
                if !seen.insert(task) {
                    continue;
                }
                let bound = get_affinity(task, &mut binder.read).and_then(|_| {
                    let read = &binder.read;
                    // Threads of the first listing existed before anything was bound.
                    let born = !first_scan && inherited.iter().any(|mask| same(mask.words(), read));
                    tasks.saved.entry(task).or_insert_with(|| (!born).then(|| read.clone()));
                    if same(&binder.wanted, read) {
                        return Ok(());
                    }
                    found_unbound = true;
                    binder.bind_task(task)
                });
                match bound {
                    Err(refusal) if refusal.errno != libc::ESRCH => {
                        let context = format!("binding thread {task} of this process to CPU {cpu}");
                        return Err(refusal.into_error(context));
                    }
                    _ => {}
                }
            }
            first_scan = false;
        }
        Ok(())
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        // A mask that can no longer be restored, because the cpuset changed, has no one to tell.
        let restore = |task, words: &[u64]| set_affinity(task, words).unwrap_or_default();
        restore(SELF, &self.saved);
        let Some(tasks) = self.tasks.take() else { return };
        for (task, mask) in &tasks.saved {
            restore(*task, mask.as_deref().unwrap_or(&self.saved));
        }
        let bound = CpuSet::from_iter([self.cpu]);
        let mut seen: BTreeSet<pid_t> = tasks.saved.keys().copied().collect();
        seen.insert(thread_id());
        // Threads born meanwhile. The bound of the loop is for a saved mask that is this one CPU
        // in a program that keeps starting threads.
        for _ in 0..64 {
            let mut found = false;
            for task in task_ids().unwrap_or_default() {
                if seen.insert(task)
                    && get_affinity(task, &mut self.binder.read).is_ok()
                    && same(bound.words(), &self.binder.read)
                {
                    restore(task, &self.saved);
                    found = true;
                }
            }
            if !found {
                break;
            }
        }
    }
}

/// Lets the calling thread run on sets of CPUs, one after the other; dropping restores the mask
/// found.
///
/// Where a [`PinGuard`] keeps a thread on one CPU, this leaves the choice among several to the
/// kernel, or, after [`release`](Self::release), among those that the thread had before. Threads
/// that are started meanwhile inherit the mask of the moment; it is not theirs that is restored.
///
/// # Thread binding
/// The guard belongs to the thread that made it and is neither `Send` nor `Sync`.
///
/// ```
/// use cluster_health_core::affinity::{CpuSet, MaskGuard, thread_affinity};
///
/// let before = thread_affinity()?;
/// let mut guard = MaskGuard::new()?;
/// guard.allow(&CpuSet::from_iter(before.first()))?;
/// assert_eq!(guard.allowed()?.len(), 1);
/// guard.release()?;
/// assert_eq!(guard.allowed()?, before);
/// # Ok::<(), cluster_health_core::Error>(())
/// ```
#[doc(alias = "sched_setaffinity")]
pub struct MaskGuard {
    saved: Vec<u64>,
    read: Vec<u64>,
    _of_this_thread: PhantomData<*const ()>,
}

impl fmt::Debug for MaskGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MaskGuard")
            .field("saved", &CpuSet::from_words(&self.saved).to_string())
            .finish_non_exhaustive()
    }
}

impl MaskGuard {
    /// Remembers the calling thread's mask and changes nothing.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not tell the mask.
    pub fn new() -> Result<Self> {
        let mut saved = Vec::new();
        get_affinity(SELF, &mut saved).map_err(reading_own_mask)?;
        Ok(Self { saved, read: Vec::new(), _of_this_thread: PhantomData })
    }

    /// Lets the thread run on these CPUs and no others, and reads that back.
    ///
    /// # Errors
    /// [`Error::System`] with the errno when the kernel refuses, or with errno 0 when it grants only
    /// some of the CPUs or the thread still runs elsewhere. The mask is then that of before.
    pub fn allow(&mut self, cpus: &CpuSet) -> Result<()> {
        let context = || format!("letting the calling thread run on CPUs {cpus} only");
        get_affinity(SELF, &mut self.read).map_err(reading_own_mask)?;
        let before = self.read.clone();
        set_affinity(SELF, cpus.words()).map_err(|refusal| refusal.into_error(context()))?;
        get_affinity(SELF, &mut self.read).map_err(reading_own_mask)?;
        let running = current_cpu()?;
        if same(cpus.words(), &self.read) && cpus.contains(running) {
            return Ok(());
        }
        let granted = CpuSet::from_words(&self.read);
        // It was the thread's mask a moment ago.
        set_affinity(SELF, &before).map_err(|refusal| refusal.into_error(context()))?;
        Err(Error::system("sched_setaffinity", 0, context())
            .with_advice(format!("the kernel granted CPUs {granted}; see the census")))
    }

    /// Gives the thread the mask back that it had when this guard was made.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel refuses, for example because the cpuset shrank.
    pub fn release(&mut self) -> Result<()> {
        set_affinity(SELF, &self.saved).map_err(|refusal| {
            refusal.into_error("restoring the affinity of the calling thread".to_owned())
        })
    }

    /// The mask that the kernel has for the thread now.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not tell.
    pub fn allowed(&mut self) -> Result<CpuSet> {
        get_affinity(SELF, &mut self.read).map_err(reading_own_mask)?;
        Ok(CpuSet::from_words(&self.read))
    }
}

impl Drop for MaskGuard {
    fn drop(&mut self) {
        // A mask that can no longer be restored, because the cpuset changed, has no one to tell.
        self.release().ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    #[test]
    fn binds_to_each_cpu_reads_back_and_restores() {
        on_own_thread(|| {
            let before = thread_affinity().unwrap();
            let mut guard = PinGuard::bind(before.first().unwrap(), BindScope::Thread).unwrap();
            for _ in 0..3 {
                for cpu in before.iter() {
                    guard.move_to(cpu).unwrap();
                    assert_eq!(guard.cpu(), cpu);
                    assert_eq!(thread_affinity().unwrap().to_string(), cpu.to_string());
                    assert_eq!(current_cpu().unwrap(), cpu);
                    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
                    assert!(status.contains(&format!("Cpus_allowed_list:\t{cpu}\n")));
                }
            }
            drop(guard);
            assert_eq!(thread_affinity().unwrap(), before);
        });
    }

    #[test]
    fn guards_nest() {
        on_own_thread(|| {
            let before = thread_affinity().unwrap();
            let (first, last) = (before.first().unwrap(), before.iter().last().unwrap());
            let outer = PinGuard::bind(first, BindScope::Thread).unwrap();
            drop(PinGuard::bind(last, BindScope::Thread).unwrap());
            assert_eq!(thread_affinity().unwrap(), CpuSet::from_iter([first]));
            drop(outer);
            assert_eq!(thread_affinity().unwrap(), before);
        });
    }

    #[test]
    fn a_refused_cpu_names_call_errno_and_cpu_and_changes_nothing() {
        on_own_thread(|| {
            let before = thread_affinity().unwrap();
            // Beyond any kernel's configuration, so refused on every machine.
            let error = PinGuard::bind(CpuId(1_000_000), BindScope::Thread).unwrap_err();
            assert_eq!(error.call(), Some("sched_setaffinity"));
            assert_eq!(error.code(), Some(22));
            let text = error.to_string();
            assert!(text.starts_with("binding the calling thread to CPU 1000000: "), "{text}");
            assert!(text.contains("EINVAL (22)"), "{text}");
            assert_eq!(thread_affinity().unwrap(), before);

            let cpu = before.first().unwrap();
            let mut guard = PinGuard::bind(cpu, BindScope::Thread).unwrap();
            assert!(guard.move_to(CpuId(1_000_000)).is_err());
            assert_eq!((guard.cpu(), current_cpu().unwrap()), (cpu, cpu));
            assert_eq!(guard.move_to(CpuId(u32::MAX)).unwrap_err().kind(), "invalid");
        });
    }

    #[test]
    fn f7_masks_grow_until_the_kernel_takes_them() {
        let mut tried = Vec::new();
        let mut words = Vec::new();
        // A kernel that insists on 5,000 CPUs.
        let bits = read_growing(&mut words, |words| {
            tried.push(words.len());
            words.fill(u64::MAX);
            if words.len() * 64 < 5000 {
                return Err(Refusal { call: "sched_getaffinity", errno: libc::EINVAL });
            }
            words[..79].fill(0);
            words[31] = 1 << 16;
            Ok(79 * 8)
        });
        assert_eq!(bits, Ok(5056));
        assert_eq!(tried.last(), Some(&128));
        assert_eq!(CpuSet::from_words(&words).to_string(), "2000");
        // Other errors end the search, and so does EINVAL for good.
        let refuse = |errno| {
            let mut calls = 0;
            let result = read_growing(&mut Vec::new(), |_| {
                calls += 1;
                Err(Refusal { call: "sched_getaffinity", errno })
            });
            (result.unwrap_err().errno, calls)
        };
        assert_eq!(refuse(libc::ESRCH), (libc::ESRCH, 1));
        let (errno, calls) = refuse(libc::EINVAL);
        assert!(errno == libc::EINVAL && calls < 16);
    }

    #[test]
    fn f7_wide_masks_are_taken_by_the_kernel() {
        on_own_thread(|| {
            let before = thread_affinity().unwrap();
            let wide = CpuSet::parse_kernel_list("0-2000").unwrap();
            set_thread_affinity(&wide).unwrap();
            assert!(thread_affinity().unwrap().difference(&wide).is_empty());
            let error = set_thread_affinity(&CpuSet::new()).unwrap_err();
            assert_eq!(error.code(), Some(22));
            set_thread_affinity(&before).unwrap();
        });
    }

    #[test]
    fn a_set_is_read_back_and_everything_restored() {
        on_own_thread(|| {
            let before = thread_affinity().unwrap();
            let status = || std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let inherited = format!("Cpus_allowed_list:\t{before}\n");
            let mut guard = MaskGuard::new().unwrap();
            assert!(status().contains(&inherited));
            for cpu in before.iter() {
                guard.allow(&CpuSet::from_iter([cpu])).unwrap();
                assert_eq!(current_cpu().unwrap(), cpu);
                assert!(status().contains(&format!("Cpus_allowed_list:\t{cpu}\n")));
                guard.release().unwrap();
                assert!(status().contains(&inherited));
            }
            guard.allow(&before).unwrap();
            assert_eq!(guard.allowed().unwrap(), before);
            guard.allow(&CpuSet::from_iter(before.first())).unwrap();
            drop(guard);
            assert_eq!(thread_affinity().unwrap(), before);
        });
    }

    #[test]
    fn a_refused_or_cut_set_names_its_cpus_and_changes_nothing() {
        on_own_thread(|| {
            let before = thread_affinity().unwrap();
            let mut guard = MaskGuard::new().unwrap();
            let beyond = CpuSet::from_iter([CpuId(1_000_000)]);
            let error = guard.allow(&beyond).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some("sched_setaffinity"), Some(22)));
            assert!(error.to_string().contains("CPUs 1000000 only"), "{error}");
            assert_eq!(guard.allowed().unwrap(), before);
            // The kernel takes what is there and says nothing.
            let mut partly = beyond;
            partly.insert(before.first().unwrap());
            let error = guard.allow(&partly).unwrap_err();
            assert!(error.to_string().contains("granted"), "{error}");
            assert_eq!(guard.allowed().unwrap(), before);
        });
    }
}
