//! Streams: one worker thread with a first-in-first-out queue each; events; copies on streams.

use std::{
    collections::{BTreeMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::{
    clock,
    codes::{
        ACL_ERROR_INTERNAL_ERROR, RT_DRV_INTERNAL_ERROR, RT_EVENT_SYNC_TIMEOUT,
        RT_EVENT_TIMESTAMP_INVALID, RT_EVENT_TIMESTAMP_REVERSAL, RT_FEATURE_NOT_SUPPORT,
        RT_INVALID_HANDLE, RT_NO_EVENT_RESOURCE, RT_NO_STREAM_RESOURCE, RT_PARAM_INVALID,
        RT_STREAM_CONTEXT, RT_STREAM_SYNC_TIMEOUT, RT_SYS_DMA,
    },
    config::{self, Cost, Path},
    device,
    ffi::{self, Fail, In, Mark, Out, Outcome, exports, fail, lock, null},
    memory::{self, Kind, Place},
};

/// Work on a stream; an error code surfaces at the next synchronisation.
pub(crate) type Task = Box<dyn FnOnce(&Stream) -> Result<(), i32> + Send>;

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    submitted: u64,
    done: u64,
    error: Option<i32>,
    closing: bool,
}

pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    pub(crate) logic: u32,
    id: i32,
    queue: Mutex<Queue>,
    changed: Condvar,
    aborted: AtomicBool,
    /// When the last task ended.
    time: AtomicU64,
}

static STREAMS: Mutex<BTreeMap<usize, Arc<Stream>>> = Mutex::new(BTreeMap::new());
static IDS: AtomicU64 = AtomicU64::new(0);

impl Stream {
    pub(crate) fn start(context: usize, logic: u32) -> Result<Arc<Self>, Fail> {
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let stream = Arc::new(Self {
            handle: device::handle(),
            context,
            logic,
            id: i32::try_from(id).unwrap_or(i32::MAX),
            queue: Mutex::default(),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            time: AtomicU64::new(0),
        });
        let worker = Arc::clone(&stream);
        let made =
            thread::Builder::new().name(format!("ascend-sim-{id}")).spawn(move || worker.work());
        if let Err(error) = made {
            return fail(RT_NO_STREAM_RESOURCE, format!("no thread for a stream: {error}"));
        }
        Ok(stream)
    }

    fn work(&self) {
        loop {
            let task = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(task) = queue.tasks.pop_front() {
                        break task;
                    }
                    if queue.closing {
                        return;
                    }
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let result = catch_unwind(AssertUnwindSafe(|| task(self)))
                .unwrap_or(Err(ACL_ERROR_INTERNAL_ERROR));
            let mut queue = lock(&self.queue);
            queue.done += 1;
            if let Err(code) = result {
                queue.error.get_or_insert(code);
            }
            self.changed.notify_all();
        }
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Drops what waits in the queue and lets the worker end; the running task is told.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        let mut queue = lock(&self.queue);
        queue.done += queue.tasks.len() as u64;
        queue.tasks.clear();
        queue.closing = true;
        self.changed.notify_all();
    }

    fn close(&self) {
        lock(&self.queue).closing = true;
        self.changed.notify_all();
    }

    /// Queues a task, behind one that never ends when the fault list says so.
    pub(crate) fn push(&self, task: Task) {
        let stall = ffi::mark() == Some(Mark::Stall);
        let mut queue = lock(&self.queue);
        if stall {
            let before = config::releases();
            queue.tasks.push_back(Box::new(move |stream| {
                while config::releases() == before && !stream.is_aborted() {
                    thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }));
            queue.submitted += 1;
        }
        queue.tasks.push_back(task);
        queue.submitted += 1;
        self.changed.notify_all();
    }

    /// Does `work` so that the stream is busy for as long as the model says. Times are of the
    /// host's clock; `from` is the earliest start.
    pub(crate) fn occupy(
        &self,
        from: u64,
        ns: u64,
        work: impl FnOnce() -> Result<(), i32>,
    ) -> Result<(), i32> {
        if config::get().virtual_time {
            let start = self.time.load(Ordering::Acquire).max(from);
            let result = work();
            self.time.store(start.saturating_add(ns), Ordering::Release);
            return result;
        }
        let start = clock::monotonic().max(from);
        let result = work();
        if ns > 0 {
            clock::wait_until(start.saturating_add(ns), || self.is_aborted());
        }
        self.time.store(clock::monotonic(), Ordering::Release);
        result
    }

    /// The moment the stream has reached.
    pub(crate) fn reached(&self, from: u64) -> u64 {
        if config::get().virtual_time {
            self.time.fetch_max(from, Ordering::AcqRel).max(from)
        } else {
            clock::monotonic()
        }
    }

    /// Waits for what is queued now. `timeout` in milliseconds, −1 for none.
    pub(crate) fn synchronize(&self, timeout: i32) -> Outcome {
        let deadline = deadline(timeout)?;
        let mut queue = lock(&self.queue);
        let target = queue.submitted;
        while queue.done < target {
            queue = match wait(&self.changed, queue, deadline) {
                Some(queue) => queue,
                None => {
                    return fail(RT_STREAM_SYNC_TIMEOUT, format!("stream {} timed out", self.id));
                }
            };
        }
        let error = queue.error.take();
        drop(queue);
        clock::host_reached(self.time.load(Ordering::Acquire));
        match error {
            Some(code) => fail(code, format!("a task of stream {} failed", self.id)),
            None => Ok(()),
        }
    }

    fn idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.done == queue.submitted
    }
}

fn deadline(timeout: i32) -> Result<Option<Instant>, Fail> {
    match u64::try_from(timeout) {
        Ok(ms) => Ok(Some(Instant::now() + Duration::from_millis(ms))),
        Err(_) if timeout == -1 => Ok(None),
        Err(_) => fail(RT_PARAM_INVALID, format!("timeout {timeout}")),
    }
}

/// Waits for a change; `None` when the deadline has passed.
fn wait<'a, T>(
    changed: &Condvar,
    guard: std::sync::MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Option<std::sync::MutexGuard<'a, T>> {
    let Some(deadline) = deadline else {
        return Some(changed.wait(guard).unwrap_or_else(PoisonError::into_inner));
    };
    let left = deadline.checked_duration_since(Instant::now())?;
    Some(changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0)
}

/// The stream of a handle, which must belong to the current context; null is the default stream.
pub(crate) fn stream(handle: usize) -> Result<Arc<Stream>, Fail> {
    let (context, _) = device::current()?;
    let default = device::default_stream()?;
    if handle == 0 || handle == default.handle {
        return Ok(default);
    }
    let Some(found) = lock(&STREAMS).get(&handle).map(Arc::clone) else {
        return fail(RT_INVALID_HANDLE, format!("{handle:#x} is not a stream"));
    };
    if found.context != context {
        return fail(RT_STREAM_CONTEXT, format!("stream {} is of another context", found.id));
    }
    Ok(found)
}

pub(crate) fn of_device(logic: u32) -> Vec<Arc<Stream>> {
    lock(&STREAMS).values().filter(|stream| stream.logic == logic).map(Arc::clone).collect()
}

pub(crate) fn end_context(context: usize) {
    lock(&STREAMS).retain(|_, stream| {
        let ours = stream.context == context;
        if ours {
            stream.abort();
        }
        !ours
    });
}

pub(crate) fn live_streams() -> u64 {
    lock(&STREAMS).len() as u64
}

fn create(out: &Out<usize>) -> Outcome {
    if out.is_null() {
        return null("stream");
    }
    let (context, logic) = device::current()?;
    if of_device(logic).len() >= config::get().streams {
        return fail(RT_NO_STREAM_RESOURCE, "all streams of the device are in use");
    }
    let made = Stream::start(context, logic)?;
    let handle = made.handle;
    lock(&STREAMS).insert(handle, made);
    out.set(handle)
}

fn destroy(handle: usize, force: bool) -> Outcome {
    if handle == 0 {
        return null("stream");
    }
    let found = stream(handle)?;
    if lock(&STREAMS).remove(&handle).is_none() {
        return fail(RT_PARAM_INVALID, "a default stream ends with its context");
    }
    if force {
        found.abort();
        return Ok(());
    }
    // Errors of tasks are the business of a synchronisation; the stream ends all the same.
    drop(found.synchronize(-1));
    found.close();
    Ok(())
}

// --- events -----------------------------------------------------------------------------------

const SYNC: u32 = 0x1;
const STREAM_MARK: u32 = 0x2;
const TIME_LINE: u32 = 0x8;
const KNOWN: u32 = 0x1 | 0x2 | 0x8 | 0x10 | 0x20 | 0x40;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Make {
    Default,
    WithFlag,
    Extended,
}

struct Event {
    id: u32,
    flags: u32,
    make: Make,
    logic: u32,
    state: Mutex<EventState>,
    changed: Condvar,
}

#[derive(Default)]
struct EventState {
    /// Records submitted and done: the event is complete when they are equal and not zero.
    recorded: u64,
    completed: u64,
    waits: u64,
    stamp: u64,
}

static EVENTS: Mutex<BTreeMap<usize, Arc<Event>>> = Mutex::new(BTreeMap::new());

fn event(handle: usize) -> Result<Arc<Event>, Fail> {
    if handle == 0 {
        return null("event");
    }
    let found = lock(&EVENTS).get(&handle).map(Arc::clone);
    found.map_or_else(|| fail(RT_INVALID_HANDLE, format!("{handle:#x} is not an event")), Ok)
}

pub(crate) fn live_events() -> u64 {
    lock(&EVENTS).len() as u64
}

fn create_event(out: &Out<usize>, flags: u32, make: Make) -> Outcome {
    if out.is_null() {
        return null("event");
    }
    let (_, logic) = device::current()?;
    if flags == 0 || flags & !KNOWN != 0 {
        return fail(RT_PARAM_INVALID, format!("flag {flags:#x}"));
    }
    let mut events = lock(&EVENTS);
    if events.values().filter(|event| event.logic == logic).count() >= config::get().events {
        return fail(RT_NO_EVENT_RESOURCE, "all events of the device are in use");
    }
    let handle = device::handle();
    let id = u32::try_from(handle & 0xffff_ffff).unwrap_or(0) >> 4;
    let (state, changed) = (Mutex::default(), Condvar::new());
    events.insert(handle, Arc::new(Event { id, flags, make, logic, state, changed }));
    drop(events);
    out.set(handle)
}

fn complete_stamp(handle: usize) -> Result<u64, Fail> {
    let event = event(handle)?;
    let state = lock(&event.state);
    let complete = state.recorded > 0 && state.recorded == state.completed;
    if event.flags & TIME_LINE == 0 || !complete {
        return fail(RT_EVENT_TIMESTAMP_INVALID, format!("event {} has no time stamp", event.id));
    }
    Ok(state.stamp)
}

fn synchronize_event(handle: usize, timeout: i32) -> Outcome {
    device::current()?;
    let event = event(handle)?;
    let deadline = deadline(timeout)?;
    let mut state = lock(&event.state);
    let target = state.recorded;
    if target == 0 {
        return fail(RT_PARAM_INVALID, format!("event {} was never recorded", event.id));
    }
    while state.completed < target {
        state = match wait(&event.changed, state, deadline) {
            Some(state) => state,
            None => {
                return fail(RT_EVENT_SYNC_TIMEOUT, format!("event {} timed out", event.id));
            }
        };
    }
    let stamp = state.stamp;
    drop(state);
    clock::host_reached(stamp);
    Ok(())
}

fn stream_wait(stream_handle: usize, event_handle: usize, timeout: i32) -> Outcome {
    let stream = stream(stream_handle)?;
    let event = event(event_handle)?;
    let patience = u64::try_from(timeout).ok().filter(|&ms| ms > 0).map(Duration::from_millis);
    let target = {
        let mut state = lock(&event.state);
        state.waits += 1;
        state.recorded
    };
    stream.push(Box::new(move |stream| {
        let deadline = patience.map(|patience| Instant::now() + patience);
        let mut state = lock(&event.state);
        let mut result = Ok(());
        while state.completed < target && !stream.is_aborted() {
            let step = Instant::now() + Duration::from_millis(20);
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                result = Err(RT_EVENT_SYNC_TIMEOUT);
                break;
            }
            // A short step, because an abort of this stream does not wake the event.
            state = event
                .changed
                .wait_timeout(state, step.saturating_duration_since(Instant::now()))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.waits -= 1;
        let stamp = state.stamp;
        drop(state);
        stream.reached(stamp);
        result
    }));
    Ok(())
}

// --- copies -----------------------------------------------------------------------------------

const H2H: u32 = 0;
const H2D: u32 = 1;
const D2H: u32 = 2;
const D2D: u32 = 3;
const DEFAULT: u32 = 4;
const HOST_BUFFER_DEVICE: u32 = 5;
const INNER: u32 = 6;
const INTER: u32 = 7;

/// A checked transfer: `rows` of (destination, source) of equal length.
struct Transfer {
    rows: Vec<(Place, Place)>,
    cost: Cost,
    pageable: bool,
    host_only: bool,
}

fn kind_fits(kind: u32, dst: &Place, src: &Place) -> bool {
    match kind {
        H2H => dst.is_host() && src.is_host(),
        H2D | HOST_BUFFER_DEVICE => !dst.is_host() && src.is_host(),
        D2H => dst.is_host() && !src.is_host(),
        D2D => !dst.is_host() && !src.is_host(),
        INNER => !dst.is_host() && dst.kind == src.kind,
        INTER => !dst.is_host() && !src.is_host() && dst.kind != src.kind,
        DEFAULT => true,
        _ => false,
    }
}

/// Checks a copy for a device whose stream or context it is given to.
fn check(logic: u32, dst: &Place, src: &Place, kind: u32, bytes: usize) -> Result<Transfer, Fail> {
    if !kind_fits(kind, dst, src) {
        return fail(
            RT_PARAM_INVALID,
            format!("kind {kind} does not fit a copy from {:?} to {:?} memory", src.kind, dst.kind),
        );
    }
    let owner = |place: &Place| match place.kind {
        Kind::Device(owner) => Some(owner),
        Kind::Mapped | Kind::Pinned | Kind::Registered | Kind::Pageable => None,
    };
    let (to, from) = (owner(dst), owner(src));
    let peer = match (to, from) {
        (Some(to), Some(from)) if to != from => {
            if to != logic && from != logic {
                return fail(
                    RT_PARAM_INVALID,
                    format!("a copy between devices {from} and {to} on device {logic}"),
                );
            }
            let peer = if to == logic { from } else { to };
            if !device::peer_enabled(logic, peer) {
                return fail(
                    RT_SYS_DMA,
                    format!("device {logic} has no access to device {peer} enabled"),
                );
            }
            Some(peer)
        }
        (Some(other), _) | (None, Some(other)) if other != logic => {
            return fail(
                RT_PARAM_INVALID,
                format!("memory of device {other} on a stream of device {logic}"),
            );
        }
        _ => None,
    };
    let host_only = dst.is_host() && src.is_host();
    let path = match (to, from) {
        (Some(_), Some(_)) if peer.is_some() => Path::Peer,
        (Some(_), None) => Path::HostToDevice,
        (None, Some(_)) => Path::DeviceToHost,
        _ => Path::Inner,
    };
    // For a peer copy `dev` is where the bytes come from and `peer` where they go.
    let (dev, other) = match (from, to) {
        (Some(from), Some(to)) => (from, to),
        (Some(dev), None) | (None, Some(dev)) => (dev, dev),
        (None, None) => (logic, logic),
    };
    let cost = if host_only {
        Cost::default()
    } else {
        config::get().cost(path, clock::cpu(), dev, other, bytes as u64)
    };
    let pageable = dst.kind == Kind::Pageable || src.kind == Kind::Pageable;
    Ok(Transfer { rows: Vec::new(), cost, pageable, host_only })
}

impl Transfer {
    fn run(&self, spoil: bool) -> Result<(), i32> {
        if !self.rows.iter().all(|(dst, src)| dst.still_there() && src.still_there()) {
            return Err(RT_DRV_INTERNAL_ERROR);
        }
        for (dst, src) in &self.rows {
            dst.copy_from(src);
        }
        if spoil && let Some((dst, _)) = self.rows.first() {
            dst.spoil();
        }
        Ok(())
    }

    fn now(&self) -> Outcome {
        let start = clock::host_now();
        let done = self.run(ffi::mark() == Some(Mark::Corrupt));
        clock::host_spends(start, self.cost.stream_ns + self.cost.submit_ns);
        done.or_else(|code| fail(code, "memory was freed during the copy"))
    }

    fn queue(self, stream: &Stream) -> Outcome {
        if self.host_only {
            return fail(RT_FEATURE_NOT_SUPPORT, "an asynchronous copy from host to host");
        }
        if self.pageable {
            // What the runtime does with memory that no DMA engine can reach.
            stream.synchronize(-1)?;
            return self.now();
        }
        let start = clock::host_now();
        clock::host_spends(start, self.cost.submit_ns);
        let spoil = ffi::mark() == Some(Mark::Corrupt);
        let (from, ns) = (clock::host_now(), self.cost.stream_ns);
        stream.push(Box::new(move |stream| stream.occupy(from, ns, || self.run(spoil))));
        Ok(())
    }
}

fn one_row(
    logic: u32,
    dst: usize,
    dest_max: usize,
    src: usize,
    count: usize,
    kind: u32,
) -> Result<Option<Transfer>, Fail> {
    if dst == 0 || src == 0 {
        return null("dst or src");
    }
    if count == 0 {
        return fail(RT_PARAM_INVALID, "count is 0");
    }
    if dest_max < count {
        return fail(RT_PARAM_INVALID, format!("destMax {dest_max} is less than count {count}"));
    }
    if kind > INTER {
        return fail(RT_PARAM_INVALID, format!("kind {kind} does not exist"));
    }
    let (to, from) = (memory::locate("dst", dst, count)?, memory::locate("src", src, count)?);
    if dst == src {
        return Ok(None);
    }
    let mut transfer = check(logic, &to, &from, kind, count)?;
    transfer.rows.push((to, from));
    Ok(Some(transfer))
}

#[derive(Clone, Copy)]
struct Pitched {
    dst: usize,
    dpitch: usize,
    src: usize,
    spitch: usize,
    width: usize,
    height: usize,
}

fn many_rows(logic: u32, it: Pitched, kind: u32) -> Result<Transfer, Fail> {
    if it.width == 0 || it.height == 0 || it.width > it.dpitch || it.width > it.spitch {
        return fail(RT_PARAM_INVALID, "width and height must be positive, width within pitch");
    }
    if !matches!(kind, H2D | D2H | D2D | DEFAULT) {
        return fail(RT_PARAM_INVALID, format!("kind {kind} is not possible in two dimensions"));
    }
    let span =
        |pitch: usize| (it.height - 1).checked_mul(pitch).and_then(|x| x.checked_add(it.width));
    let (Some(to), Some(from)) = (span(it.dpitch), span(it.spitch)) else {
        return fail(RT_PARAM_INVALID, "the rows do not fit into an address space");
    };
    let to = memory::locate("dst", it.dst, to)?;
    let from = memory::locate("src", it.src, from)?;
    let mut transfer = check(logic, &to, &from, kind, it.width * it.height)?;
    transfer.rows = (0..it.height)
        .map(|row| (to.part(row * it.dpitch, it.width), from.part(row * it.spitch, it.width)))
        .collect();
    Ok(transfer)
}

fn fill_place(
    addr: usize,
    max: usize,
    value: i32,
    count: usize,
) -> Result<(Place, u8, Cost), Fail> {
    if addr == 0 {
        return null("devPtr");
    }
    if count == 0 || max < count {
        return fail(RT_PARAM_INVALID, format!("count {count} of at most {max}"));
    }
    let (_, logic) = device::current()?;
    let place = memory::locate("devPtr", addr, count)?;
    if place.kind == Kind::Pageable {
        return fail(RT_PARAM_INVALID, "memory that the runtime does not know");
    }
    if let Kind::Device(owner) = place.kind
        && owner != logic
    {
        return fail(RT_PARAM_INVALID, format!("memory of device {owner}, current is {logic}"));
    }
    let cost = config::get().cost(Path::Inner, clock::cpu(), logic, logic, count as u64);
    Ok((place, value.to_le_bytes()[0], cost))
}

exports! { Acl;
    fn aclrtCreateStream(out: Out<usize>) { create(&out) }
    fn aclrtCreateStreamWithConfig(out: Out<usize>, _priority: u32, flag: u32) {
        if flag & !0x3f != 0 {
            return fail(RT_PARAM_INVALID, format!("flag {flag:#x}"));
        }
        create(&out)
    }
    fn aclrtDestroyStream(handle: usize) { destroy(handle, false) }
    fn aclrtDestroyStreamForce(handle: usize) { destroy(handle, true) }
    fn aclrtSynchronizeStream(handle: usize) { stream(handle)?.synchronize(-1) }
    fn aclrtSynchronizeStreamWithTimeout(handle: usize, timeout: i32) {
        stream(handle)?.synchronize(timeout)
    }
    fn aclrtStreamQuery(handle: usize, status: Out<u32>) {
        let found = stream(handle)?;
        status.set(u32::from(!found.idle()))
    }
    fn aclrtStreamWaitEvent(handle: usize, event: usize) { stream_wait(handle, event, -1) }
    fn aclrtStreamWaitEventWithTimeout(handle: usize, event: usize, timeout: i32) {
        stream_wait(handle, event, timeout)
    }
    fn aclrtStreamAbort(handle: usize) {
        let found = stream(handle)?;
        let mut queue = lock(&found.queue);
        queue.done += queue.tasks.len() as u64;
        queue.tasks.clear();
        found.changed.notify_all();
        Ok(())
    }
    fn aclrtSetStreamFailureMode(handle: usize, mode: u64) {
        stream(handle)?;
        if mode > 1 { fail(RT_PARAM_INVALID, format!("mode {mode}")) } else { Ok(()) }
    }
    fn aclrtStreamGetId(handle: usize, id: Out<i32>) { id.set(stream(handle)?.id) }
    fn aclrtGetStreamAvailableNum(count: Out<u32>) {
        let (_, logic) = device::current()?;
        let left = config::get().streams.saturating_sub(of_device(logic).len());
        count.set(u32::try_from(left).unwrap_or(u32::MAX))
    }
    fn aclrtDeviceGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        device::current()?;
        least.set(7)?;
        greatest.set(0)
    }

    fn aclrtCreateEvent(out: Out<usize>) {
        create_event(&out, SYNC | TIME_LINE | STREAM_MARK, Make::Default)
    }
    fn aclrtCreateEventWithFlag(out: Out<usize>, flag: u32) {
        create_event(&out, flag, Make::WithFlag)
    }
    fn aclrtCreateEventExWithFlag(out: Out<usize>, flag: u32) {
        create_event(&out, flag, Make::Extended)
    }
    fn aclrtDestroyEvent(handle: usize) {
        event(handle)?;
        lock(&EVENTS).remove(&handle);
        Ok(())
    }
    fn aclrtRecordEvent(handle: usize, stream_handle: usize) {
        let stream = stream(stream_handle)?;
        let event = event(handle)?;
        let from = clock::host_now();
        let ticket = {
            let mut state = lock(&event.state);
            state.recorded += 1;
            state.recorded
        };
        stream.push(Box::new(move |stream| {
            let stamp = stream.reached(from);
            let mut state = lock(&event.state);
            state.completed = state.completed.max(ticket);
            state.stamp = stamp;
            event.changed.notify_all();
            Ok(())
        }));
        Ok(())
    }
    fn aclrtResetEvent(handle: usize, stream_handle: usize) {
        let stream = stream(stream_handle)?;
        let event = event(handle)?;
        if event.make != Make::WithFlag {
            return fail(RT_FEATURE_NOT_SUPPORT, "this event cannot be reset");
        }
        stream.push(Box::new(move |_| {
            let waits = lock(&event.state).waits;
            *lock(&event.state) = EventState { waits, ..EventState::default() };
            Ok(())
        }));
        Ok(())
    }
    fn aclrtQueryEvent(handle: usize, status: Out<u32>) {
        let event = event(handle)?;
        if event.make == Make::Extended {
            return fail(RT_FEATURE_NOT_SUPPORT, "aclrtQueryEventStatus is for this event");
        }
        let state = lock(&event.state);
        status.set(u32::from(state.recorded == 0 || state.recorded != state.completed))
    }
    fn aclrtQueryEventStatus(handle: usize, status: Out<u32>) {
        let event = event(handle)?;
        let state = lock(&event.state);
        status.set(u32::from(state.recorded > 0 && state.recorded == state.completed))
    }
    fn aclrtQueryEventWaitStatus(handle: usize, status: Out<u32>) {
        let event = event(handle)?;
        if event.make == Make::Extended {
            return fail(RT_FEATURE_NOT_SUPPORT, "this event has no wait status");
        }
        let waits = lock(&event.state).waits;
        status.set(u32::from(waits > 0))
    }
    fn aclrtSynchronizeEvent(handle: usize) { synchronize_event(handle, -1) }
    fn aclrtSynchronizeEventWithTimeout(handle: usize, timeout: i32) {
        synchronize_event(handle, timeout)
    }
    fn aclrtEventElapsedTime(ms: Out<f32>, start: usize, end: usize) {
        if ms.is_null() {
            return null("ms");
        }
        let (start, end) = (complete_stamp(start)?, complete_stamp(end)?);
        // The device counts ticks; what lies between two of them is not seen.
        let tick = config::get().tick_ns;
        let Some(ticks) = (end / tick).checked_sub(start / tick) else {
            return fail(RT_EVENT_TIMESTAMP_REVERSAL, "the second event was recorded first");
        };
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            reason = "the result is a float of milliseconds by definition"
        )]
        let elapsed = (ticks as f64 * tick as f64 / 1e6) as f32;
        ms.set(elapsed)
    }
    fn aclrtEventGetTimestamp(handle: usize, microseconds: Out<u64>) {
        microseconds.set(complete_stamp(handle)? / 1000)
    }
    fn aclrtGetEventId(handle: usize, id: Out<u32>) { id.set(event(handle)?.id) }
    fn aclrtGetEventAvailNum(count: Out<u32>) {
        device::current()?;
        let left = config::get().events.saturating_sub(lock(&EVENTS).len());
        count.set(u32::try_from(left).unwrap_or(u32::MAX))
    }

    fn aclrtMemcpy(dst: usize, dest_max: usize, src: usize, count: usize, kind: u32) {
        let (_, logic) = device::current()?;
        one_row(logic, dst, dest_max, src, count, kind)?.map_or(Ok(()), |copy| copy.now())
    }
    fn aclrtMemcpyAsync(
        dst: usize,
        dest_max: usize,
        src: usize,
        count: usize,
        kind: u32,
        handle: usize,
    ) {
        let stream = stream(handle)?;
        one_row(stream.logic, dst, dest_max, src, count, kind)?
            .map_or(Ok(()), |copy| copy.queue(&stream))
    }
    fn aclrtMemcpyAsyncWithCondition(
        dst: usize,
        dest_max: usize,
        src: usize,
        count: usize,
        kind: u32,
        handle: usize,
    ) {
        let stream = stream(handle)?;
        one_row(stream.logic, dst, dest_max, src, count, kind)?
            .map_or(Ok(()), |copy| copy.queue(&stream))
    }
    fn aclrtMemcpy2d(
        dst: usize,
        dpitch: usize,
        src: usize,
        spitch: usize,
        width: usize,
        height: usize,
        kind: u32,
    ) {
        let (_, logic) = device::current()?;
        many_rows(logic, Pitched { dst, dpitch, src, spitch, width, height }, kind)?.now()
    }
    fn aclrtMemcpy2dAsync(
        dst: usize,
        dpitch: usize,
        src: usize,
        spitch: usize,
        width: usize,
        height: usize,
        kind: u32,
        handle: usize,
    ) {
        let stream = stream(handle)?;
        many_rows(stream.logic, Pitched { dst, dpitch, src, spitch, width, height }, kind)?
            .queue(&stream)
    }
    /// The attributes only repeat what the addresses say.
    fn aclrtMemcpyBatch(
        dsts: In<usize>,
        dest_maxs: In<usize>,
        srcs: In<usize>,
        sizes: In<usize>,
        count: usize,
        _attrs: usize,
        _indexes: usize,
        _attr_count: usize,
        failed: Out<usize>,
    ) {
        let (_, logic) = device::current()?;
        for at in 0..count {
            let (dst, max, src, size) =
                (dsts.get_at(at)?, dest_maxs.get_at(at)?, srcs.get_at(at)?, sizes.get_at(at)?);
            let done = one_row(logic, dst, max, src, size, DEFAULT)
                .and_then(|copy| copy.map_or(Ok(()), |copy| copy.now()));
            if let Err(error) = done {
                failed.set(at)?;
                return Err(error);
            }
        }
        Ok(())
    }
    fn aclrtMemset(addr: usize, max: usize, value: i32, count: usize) {
        let (place, byte, cost) = fill_place(addr, max, value, count)?;
        let start = clock::host_now();
        place.fill(byte);
        clock::host_spends(start, cost.stream_ns);
        Ok(())
    }
    fn aclrtMemsetAsync(addr: usize, max: usize, value: i32, count: usize, handle: usize) {
        let stream = stream(handle)?;
        let (place, byte, cost) = fill_place(addr, max, value, count)?;
        let from = clock::host_now();
        stream.push(Box::new(move |stream| {
            stream.occupy(from, cost.stream_ns, || {
                if !place.still_there() {
                    return Err(RT_DRV_INTERNAL_ERROR);
                }
                place.fill(byte);
                Ok(())
            })
        }));
        Ok(())
    }
}
