//! Collectives of the Ascend backend: HCCL on the stream given, awaited with a bound.
#![allow(unsafe_code, reason = "calls of C functions")]

use std::ffi::c_void;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ascend_sys::config::HcclCommConfigV5;
use ascend_sys::load::Hccl;
use ascend_sys::status::{Family, Status};
use ascend_sys::{function, hccl as abi};

use super::types::{DataType, ReduceOp};
use crate::backend::ascend::{DeviceContext, missing, stream_of, text_of};
use crate::buffer::{Access, DeviceBuffer};
use crate::device::Device;
use crate::error::{BackendError, Error, Result};
use crate::id::DeviceId;
use crate::rank::RankGroup;
use crate::stream::Stream;
use crate::timer::EventTimer;
use crate::watch;

/// A waiting rank looks this often whether the others are alive.
const LOOK: Duration = Duration::from_secs(1);

/// So long `HcclCommDestroy` may say that the communicator is busy.
const DESTROY_BOUND: Duration = Duration::from_secs(2);

/// What a rank says of itself before the communicator is made.
const READY: &[u8] = b"+";
const FAILED: &[u8] = b"-";

/// A communicator of HCCL, destroyed with this value unless it is somebody else's or stuck.
#[derive(Debug)]
struct Comm {
    handle: abi::HcclComm,
    hccl: &'static Hccl,
    context: DeviceContext,
    /// One that the caller owns is not destroyed here.
    owned: bool,
    /// An operation did not end: destroying the communicator could block.
    stuck: bool,
}

impl Comm {
    fn new(handle: abi::HcclComm, hccl: &'static Hccl, context: DeviceContext) -> Self {
        Self { handle, hccl, context, owned: true, stuck: false }
    }

    fn borrowed(handle: abi::HcclComm, hccl: &'static Hccl, context: DeviceContext) -> Self {
        Self { handle, hccl, context, owned: false, stuck: false }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if !self.owned || self.stuck || self.context.enter().is_err() {
            return;
        }
        let Ok(destroy) = function!(self.hccl, HcclCommDestroy) else { return };
        let began = Instant::now();
        let destroy_once = || {
            let _call = watch::enter("HcclCommDestroy", Some(self.context.id()));
            // SAFETY:
            // * The communicator is ours, and "again" means that it is still alive.
            unsafe { destroy(self.handle) }
        };
        while destroy_once() == abi::HCCL_E_AGAIN && began.elapsed() < DESTROY_BOUND {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

// SAFETY:
// * A communicator is used by one thread at a time (operations take `&mut`), from any thread that
//   has its device's context, which every call here enters first.
unsafe impl Send for Comm {}
// SAFETY:
// * Shared references do nothing with the handle.
unsafe impl Sync for Comm {}

#[derive(Debug)]
pub(super) struct AscendCollectives<'g> {
    hccl: &'static Hccl,
    context: DeviceContext,
    id: DeviceId,
    comm: Comm,
    group: Option<&'g RankGroup>,
    rank: u32,
    size: u32,
    timeout: Duration,
    /// For barriers.
    stream: Stream,
    broken: bool,
}

/// One operation, for its submission and for what is said when it fails.
struct Operation<'a> {
    call: &'static str,
    stream: &'a Stream,
    reads: &'a [&'a DeviceBuffer],
    writes: &'a [&'a DeviceBuffer],
    /// The other rank, where there is only one.
    with: Option<u32>,
}

impl AscendCollectives<'static> {
    /// One communicator per device, in their order, for threads of this process.
    pub(super) fn of_threads(devices: &[Device], timeout: Duration) -> Result<Vec<Self>> {
        let mut users = Vec::with_capacity(devices.len());
        let mut streams = Vec::with_capacity(devices.len());
        let mut opened = None;
        for device in devices {
            let (hccl, context) = open(device)?;
            users.push(context.user());
            streams.push((context, Stream::new(device)?));
            opened = Some(hccl);
        }
        let (Some(hccl), Some(first)) = (opened, devices.first()) else { return Ok(Vec::new()) };
        let contexts: Vec<DeviceContext> = streams.iter().map(|(context, _)| *context).collect();
        let (call, id) = ("HcclCommInitAll", first.id());
        let comms = bounded(call, timeout, (id, None), move || {
            let context = contexts[0];
            context.enter()?;
            let init = function!(hccl, HcclCommInitAll).map_err(missing)?;
            let mut handles: Vec<abi::HcclComm> = vec![std::ptr::null_mut(); users.len()];
            let count = u32::try_from(users.len()).unwrap_or(u32::MAX);
            // SAFETY:
            // * Both lists have as many elements as is said.
            let code = unsafe { init(count, users.as_mut_ptr(), handles.as_mut_ptr()) };
            check(hccl, &context, call, code, id, None)?;
            let comm = |(handle, context)| Comm::new(handle, hccl, context);
            Ok(handles.into_iter().zip(contexts).map(comm).collect::<Vec<_>>())
        })
        .map_err(|error| with_devices(error, devices))?;
        let size = u32::try_from(comms.len()).unwrap_or(u32::MAX);
        let all = comms.into_iter().zip(streams).zip(devices).zip(0..);
        let one = |(((comm, (context, stream)), device), rank): (((_, (_, _)), &Device), _)| Self {
            hccl,
            context,
            id: device.id(),
            comm,
            group: None,
            rank,
            size,
            timeout,
            stream,
            broken: false,
        };
        Ok(all.map(one).collect())
    }
}

impl<'g> AscendCollectives<'g> {
    pub(super) fn new(group: &'g RankGroup, device: &Device) -> Result<Self> {
        let opened = open(device);
        let timeout = group.timeout();
        let root = exchange_root(group, &opened, device.id())?;
        let (hccl, context) = opened?;
        // Made first: whatever fails after the communicator must not leave it behind.
        let stream = Stream::new(device)?;
        let (rank, size, id) = (group.rank(), group.size(), device.id());
        let with_config = function!(hccl, HcclCommInitRootInfoConfig);
        let call = match with_config {
            Ok(_) => "HcclCommInitRootInfoConfig",
            Err(_) => "HcclCommInitRootInfo",
        };
        let comm = bounded(call, timeout, (id, Some(rank)), move || {
            context.enter()?;
            let mut comm: abi::HcclComm = std::ptr::null_mut();
            let code = if let Ok(init) = with_config {
                let config = HcclCommConfigV5::new();
                // SAFETY:
                // * The pointers are to live values of ours; the library reads as many bytes of
                //   the configuration as it states.
                // * This thread has the device's context.
                unsafe { init(size, &raw const *root, rank, config.as_ptr(), &raw mut comm) }
            } else {
                let init = function!(hccl, HcclCommInitRootInfo).map_err(missing)?;
                // SAFETY:
                // * As above, without a configuration.
                unsafe { init(size, &raw const *root, rank, &raw mut comm) }
            };
            check(hccl, &context, call, code, id, Some(rank))?;
            Ok(Comm::new(comm, hccl, context))
        })?;
        Ok(Self {
            hccl,
            context,
            id,
            comm,
            group: Some(group),
            rank,
            size,
            timeout,
            stream,
            broken: false,
        })
    }

    /// Around a communicator that the caller made and will destroy.
    ///
    /// # Safety
    /// As [`Communicator::from_raw_hccl`](super::Communicator::from_raw_hccl).
    pub(super) unsafe fn from_raw(device: &Device, comm: *mut c_void) -> Result<Self> {
        if comm.is_null() {
            return Err(Error::invalid("comm", "a null communicator"));
        }
        let (hccl, context) = open(device)?;
        context.enter()?;
        let (mut rank, mut size) = (0_u32, 0_u32);
        let get = function!(hccl, HcclGetRankId).map_err(missing)?;
        // SAFETY:
        // * The caller vouches for the communicator; the pointer is to a live integer of ours.
        let code = unsafe { get(comm, &raw mut rank) };
        check(hccl, &context, "HcclGetRankId", code, device.id(), None)?;
        let get = function!(hccl, HcclGetRankSize).map_err(missing)?;
        // SAFETY:
        // * As above.
        let code = unsafe { get(comm, &raw mut size) };
        check(hccl, &context, "HcclGetRankSize", code, device.id(), Some(rank))?;
        Ok(Self {
            hccl,
            context,
            id: device.id(),
            comm: Comm::borrowed(comm, hccl, context),
            group: None,
            rank,
            size,
            timeout: Duration::from_secs(30),
            stream: Stream::new(device)?,
            broken: false,
        })
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    fn blocks(&self) -> usize {
        self.size as usize
    }

    /// Submits an operation and waits until this rank's part of it is done. `submit` gets the
    /// communicator and the stream, both alive, with the device's context on this thread; it queues
    /// nothing that uses other memory than that of the operation.
    fn run(
        &mut self,
        operation: &Operation<'_>,
        submit: impl FnMut(abi::HcclComm, *mut c_void) -> abi::HcclResult,
    ) -> Result<()> {
        self.run_timed(operation, None, submit)
    }

    /// As [`run`](Self::run), a batch of them between two events.
    fn run_timed(
        &mut self,
        operation: &Operation<'_>,
        timer: Option<&mut EventTimer>,
        submit: impl FnMut(abi::HcclComm, *mut c_void) -> abi::HcclResult,
    ) -> Result<()> {
        if self.broken {
            return Err(Error::Busy(
                "an operation of this communicator failed before; make a new one".to_owned(),
            ));
        }
        let result = self.submit(operation, timer, submit).and_then(|()| self.wait(operation));
        if result.is_err() {
            self.broken = true;
            // Something may still be queued: who frees or uses the memory must look.
            let users = [(operation.reads, Access::Read), (operation.writes, Access::Write)];
            for (buffers, access) in users {
                for buffer in buffers {
                    buffer.pending.leave(&operation.stream.0, access);
                }
            }
        }
        result
    }

    fn submit(
        &mut self,
        operation: &Operation<'_>,
        mut timer: Option<&mut EventTimer>,
        mut submit: impl FnMut(abi::HcclComm, *mut c_void) -> abi::HcclResult,
    ) -> Result<()> {
        // Asked every time, since HCCL does not look whether the thread's device is its own: a
        // collective is long beside that.
        self.context.enter()?;
        // SAFETY:
        // * The stream belongs to this device (checked by the caller) and is borrowed.
        let stream = unsafe { stream_of(operation.stream.0.raw) };
        if let Some(timer) = &mut timer {
            timer.begin(operation.stream)?;
        }
        for _ in 0..timer.as_ref().map_or(1, |timer| timer.batch()) {
            let watched = watch::enter(operation.call, Some(self.id));
            let code = submit(self.comm.handle, stream);
            drop(watched);
            check(self.hccl, &self.context, operation.call, code, self.id, Some(self.rank))?;
        }
        timer.map_or(Ok(()), |timer| timer.end(operation.stream))
    }

    #[inline]
    fn wait(&mut self, operation: &Operation<'_>) -> Result<()> {
        match operation.stream.synchronize(self.timeout.min(LOOK)) {
            Err(Error::Backend(error)) if error.timed_out => self.wait_longer(operation, error),
            result => result,
        }
    }

    #[cold]
    fn wait_longer(
        &mut self,
        operation: &Operation<'_>,
        mut error: Box<BackendError>,
    ) -> Result<()> {
        let began = Instant::now();
        let rest = self.timeout.saturating_sub(LOOK);
        loop {
            // A rank that is done may be gone already: what it left behind comes first.
            let gone = self.missing_rank(operation);
            let left = rest.saturating_sub(began.elapsed());
            if left.is_zero() && gone.is_none() {
                break;
            }
            match operation.stream.synchronize(left.clamp(Duration::from_millis(1), LOOK)) {
                Err(Error::Backend(again)) if again.timed_out => error = again,
                result => return result,
            }
            if let Some(gone) = gone {
                self.comm.stuck = true;
                return Err(gone);
            }
        }
        self.comm.stuck = true;
        let others: Vec<String> = match operation.with {
            Some(rank) => vec![rank.to_string()],
            None => (0..self.size)
                .filter(|rank| *rank != self.rank)
                .map(|rank| rank.to_string())
                .collect(),
        };
        let ranks = if others.len() == 1 { "rank" } else { "ranks" };
        let mut message = format!(
            "{} with {ranks} {} not finished after {} ms",
            operation.call,
            others.join(", "),
            self.timeout.as_millis()
        );
        if let Some(status) = self.async_error() {
            message = format!("{message}; the communicator reports {status}");
        }
        error.message = Some(message);
        error.rank = Some(self.rank);
        error.advice = Some(
            "look for a rank that is stopped or in another call, for its device, or raise \
             --timeout"
                .to_owned(),
        );
        Err(Error::Backend(error))
    }

    /// The error of a rank of the operation that is gone.
    fn missing_rank(&self, operation: &Operation<'_>) -> Option<Error> {
        let group = self.group?;
        (0..self.size)
            .filter(|rank| *rank != self.rank && operation.with.is_none_or(|with| with == *rank))
            .find_map(|rank| group.check_alive(rank).err())
    }

    fn async_error(&self) -> Option<Status> {
        let get = function!(self.hccl, HcclGetCommAsyncError).ok()?;
        let mut found: abi::HcclResult = 0;
        // SAFETY:
        // * The communicator is alive, and the pointer is to a live integer of ours.
        let code = unsafe { get(self.comm.handle, &raw mut found) };
        let status = Status::new(Family::Hccl, found);
        (code == abi::HCCL_SUCCESS && !status.is_success()).then_some(status)
    }

    pub(super) fn all_gather(
        &mut self,
        send: Option<&DeviceBuffer>,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        stream: &Stream,
        timer: Option<&mut EventTimer>,
    ) -> Result<()> {
        let len = fits(receive, self.blocks(), count, data_type)?;
        let from = match send {
            Some(send) => {
                fits(send, 1, count, data_type)?;
                send.address()
            }
            None => receive.address().wrapping_add(self.rank as usize * len),
        };
        let to = receive.address();
        let f = function!(self.hccl, HcclAllGather).map_err(missing)?;
        let operation = Operation {
            call: "HcclAllGather",
            stream,
            reads: send.as_slice(),
            writes: &[receive],
            with: None,
        };
        if count == 0 {
            return Ok(());
        }
        self.run_timed(&operation, timer, |comm, stream| {
            // SAFETY:
            // * The sizes of both buffers were checked, and `run` waits or notes that they are in use.
            // * `run` vouches for the communicator, the stream and the context.
            unsafe { f(from.cast(), to.cast(), count as u64, type_of(data_type), comm, stream) }
        })
    }

    pub(super) fn all_reduce(
        &mut self,
        send: Option<&DeviceBuffer>,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        fits(receive, 1, count, data_type)?;
        let to = receive.address();
        let from = match send {
            Some(send) => {
                fits(send, 1, count, data_type)?;
                send.address()
            }
            None => to,
        };
        let f = function!(self.hccl, HcclAllReduce).map_err(missing)?;
        let operation = Operation {
            call: "HcclAllReduce",
            stream,
            reads: send.as_slice(),
            writes: &[receive],
            with: None,
        };
        if count == 0 {
            return Ok(());
        }
        let (data_type, op) = (type_of(data_type), op_of(op));
        self.run(&operation, |comm, stream| {
            // SAFETY:
            // * As in `all_gather`.
            unsafe { f(from.cast(), to.cast(), count as u64, data_type, op, comm, stream) }
        })
    }

    pub(super) fn reduce_scatter(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        fits(send, self.blocks(), count, data_type)?;
        fits(receive, 1, count, data_type)?;
        let (from, to) = (send.address(), receive.address());
        let f = function!(self.hccl, HcclReduceScatter).map_err(missing)?;
        let operation = Operation {
            call: "HcclReduceScatter",
            stream,
            reads: &[send],
            writes: &[receive],
            with: None,
        };
        if count == 0 {
            return Ok(());
        }
        let (data_type, op) = (type_of(data_type), op_of(op));
        self.run(&operation, |comm, stream| {
            // SAFETY:
            // * As in `all_gather`.
            unsafe { f(from.cast(), to.cast(), count as u64, data_type, op, comm, stream) }
        })
    }

    pub(super) fn broadcast(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        if root >= self.size {
            return Err(Error::invalid("root", format!("there is no rank {root}")));
        }
        fits(buffer, 1, count, data_type)?;
        let address = buffer.address();
        let f = function!(self.hccl, HcclBroadcast).map_err(missing)?;
        let operation =
            Operation { call: "HcclBroadcast", stream, reads: &[], writes: &[buffer], with: None };
        if count == 0 {
            return Ok(());
        }
        self.run(&operation, |comm, stream| {
            // SAFETY:
            // * As in `all_gather`.
            unsafe { f(address.cast(), count as u64, type_of(data_type), root, comm, stream) }
        })
    }

    pub(super) fn all_to_all(
        &mut self,
        send: &DeviceBuffer,
        receive: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        stream: &Stream,
    ) -> Result<()> {
        fits(send, self.blocks(), count, data_type)?;
        fits(receive, self.blocks(), count, data_type)?;
        let (from, to) = (send.address(), receive.address());
        let f = function!(self.hccl, HcclAlltoAll).map_err(missing)?;
        let operation = Operation {
            call: "HcclAlltoAll",
            stream,
            reads: &[send],
            writes: &[receive],
            with: None,
        };
        if count == 0 {
            return Ok(());
        }
        let (count, kind) = (count as u64, type_of(data_type));
        self.run(&operation, |comm, stream| {
            let (from, to) = (from.cast_const().cast(), to.cast_const().cast());
            // SAFETY:
            // * As in `all_gather`.
            unsafe { f(from, count, kind, to, count, kind, comm, stream) }
        })
    }

    fn other(&self, rank: u32, what: &str) -> Result<()> {
        if rank >= self.size {
            return Err(Error::invalid(what, format!("there is no rank {rank}")));
        }
        if rank == self.rank {
            return Err(Error::invalid(what, "is this rank itself"));
        }
        Ok(())
    }

    pub(super) fn send(
        &mut self,
        buffer: &DeviceBuffer,
        count: usize,
        data_type: DataType,
        to: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.other(to, "to")?;
        fits(buffer, 1, count, data_type)?;
        let address = buffer.address();
        let f = function!(self.hccl, HcclSend).map_err(missing)?;
        let operation =
            Operation { call: "HcclSend", stream, reads: &[buffer], writes: &[], with: Some(to) };
        if count == 0 {
            return Ok(());
        }
        self.run(&operation, |comm, stream| {
            // SAFETY:
            // * As in `all_gather`.
            unsafe { f(address.cast(), count as u64, type_of(data_type), to, comm, stream) }
        })
    }

    pub(super) fn receive(
        &mut self,
        buffer: &mut DeviceBuffer,
        count: usize,
        data_type: DataType,
        from: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.other(from, "from")?;
        fits(buffer, 1, count, data_type)?;
        let address = buffer.address();
        let f = function!(self.hccl, HcclRecv).map_err(missing)?;
        let operation =
            Operation { call: "HcclRecv", stream, reads: &[], writes: &[buffer], with: Some(from) };
        if count == 0 {
            return Ok(());
        }
        self.run(&operation, |comm, stream| {
            // SAFETY:
            // * As in `all_gather`.
            unsafe { f(address.cast(), count as u64, type_of(data_type), from, comm, stream) }
        })
    }

    pub(super) fn barrier(&mut self) -> Result<()> {
        let f = function!(self.hccl, HcclBarrier).map_err(missing)?;
        let stream = self.stream.clone();
        let operation =
            Operation { call: "HcclBarrier", stream: &stream, reads: &[], writes: &[], with: None };
        self.run(&operation, |comm, stream| {
            // SAFETY:
            // * `run` vouches for the communicator, the stream and the context. No memory is
            //   involved.
            unsafe { f(comm, stream) }
        })
    }
}

fn open(device: &Device) -> Result<(&'static Hccl, DeviceContext)> {
    let context = DeviceContext::new(device.info())?;
    let hccl = ascend_sys::load::hccl().map_err(|error| Error::Unavailable {
        what: "collectives of the Ascend backend".to_owned(),
        message: error.to_string(),
    })?;
    Ok((hccl, context))
}

/// Does what may block in the library, at most for `timeout`, on a thread of its own: HCCL's own
/// bound is two minutes at least. What comes later is dropped by that thread.
fn bounded<T: Send + 'static>(
    call: &'static str,
    timeout: Duration,
    (device, rank): (DeviceId, Option<u32>),
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let started = thread::Builder::new().name("hccl-setup".to_owned()).spawn(move || {
        watch::leave_unwatched();
        drop(sender.send(work()));
    });
    if let Err(error) = started {
        let errno = error.raw_os_error().unwrap_or_default();
        return Err(Error::system("pthread_create", errno, format!("a thread for {call}")));
    }
    let error = match receiver.recv_timeout(timeout) {
        Ok(result) => return result,
        Err(RecvTimeoutError::Timeout) => Error::timeout(call, timeout, Some(device)),
        Err(RecvTimeoutError::Disconnected) => {
            return Err(Error::Busy(format!("{call}: its thread ended without a result")));
        }
    };
    let Error::Backend(mut error) = error else { return Err(error) };
    error.rank = rank;
    error.advice = Some(
        "look for a rank that is stopped or never came, for the network between the devices \
         (HCCL_IF_IP, HCCL_SOCKET_IFNAME), or raise --timeout: HCCL itself waits for \
         HCCL_CONNECT_TIMEOUT"
            .to_owned(),
    );
    Err(Error::Backend(error))
}

/// The same error with all the devices that it is about.
fn with_devices(error: Error, devices: &[Device]) -> Error {
    let Error::Backend(mut error) = error else { return error };
    let ids: Vec<String> = devices.iter().map(|device| device.id().to_string()).collect();
    let about = format!("for devices {}", ids.join(", "));
    error.message = Some(match error.message.take() {
        Some(message) => format!("{message} ({about})"),
        None => about,
    });
    Error::Backend(error)
}

/// Rank 0 makes the root information when every rank is ready for it: HCCL would wait minutes for
/// one that is not.
fn exchange_root(
    group: &RankGroup,
    opened: &Result<(&'static Hccl, DeviceContext)>,
    device: DeviceId,
) -> Result<Box<abi::HcclRootInfo>> {
    let said = |opened: &Result<_>| match opened {
        Ok(_) => READY.to_vec(),
        Err(error) => [FAILED, error.to_string().as_bytes()].concat(),
    };
    if group.rank() != 0 {
        group.send(0, &said(opened))?;
        let root = answer(0, &group.receive(0)?)?;
        let mut info = Box::new(abi::HcclRootInfo { internal: [0; 4108] });
        if root.len() != info.internal.len() {
            return Err(Error::rank_fault(0, "sent root information of another size"));
        }
        for (place, byte) in info.internal.iter_mut().zip(root) {
            *place = byte.cast_signed();
        }
        return Ok(info);
    }
    let mut failure = None;
    for rank in 1..group.size() {
        let message = group.receive(rank)?;
        failure = failure.or(answer(rank, &message).err());
    }
    let root = match (failure, opened) {
        (Some(error), _) => Err(error),
        (None, Ok((hccl, context))) => {
            let (hccl, context) = (*hccl, *context);
            bounded("HcclGetRootInfo", group.timeout(), (device, Some(0)), move || {
                make_root(hccl, &context, device)
            })
        }
        (None, Err(error)) => Err(Error::Unavailable {
            what: "collectives of the Ascend backend".to_owned(),
            message: error.to_string(),
        }),
    };
    let message = match &root {
        Ok(info) => {
            let bytes = info.internal.iter().map(|byte| byte.cast_unsigned());
            READY.iter().copied().chain(bytes).collect()
        }
        Err(error) => [FAILED, error.to_string().as_bytes()].concat(),
    };
    for rank in 1..group.size() {
        let sent = group.send(rank, &message);
        // A rank that did not wait so long is gone because of the failure, not the other way round.
        if root.is_ok() {
            sent?;
        }
    }
    root
}

/// What a rank said; its failure is an error of that rank.
fn answer(rank: u32, message: &[u8]) -> Result<Vec<u8>> {
    match message.split_first() {
        Some((first, rest)) if [*first] == READY => Ok(rest.to_vec()),
        Some((first, rest)) if [*first] == FAILED => {
            Err(Error::rank_fault(rank, String::from_utf8_lossy(rest)))
        }
        _ => Err(Error::rank_fault(rank, "is not setting up HCCL at this point")),
    }
}

fn make_root(
    hccl: &Hccl,
    context: &DeviceContext,
    device: DeviceId,
) -> Result<Box<abi::HcclRootInfo>> {
    context.enter()?;
    let mut info = Box::new(abi::HcclRootInfo { internal: [0; 4108] });
    let get = function!(hccl, HcclGetRootInfo).map_err(missing)?;
    // SAFETY:
    // * The pointer is to a live value of ours; this thread has the device's context.
    let code = unsafe { get(&raw mut *info) };
    check(hccl, context, "HcclGetRootInfo", code, device, Some(0))?;
    Ok(info)
}

#[inline]
fn check(
    hccl: &Hccl,
    context: &DeviceContext,
    call: &'static str,
    code: abi::HcclResult,
    device: DeviceId,
    rank: Option<u32>,
) -> Result<()> {
    if code == abi::HCCL_SUCCESS {
        return Ok(());
    }
    Err(failure(hccl, context, call, code, device, rank))
}

#[cold]
fn failure(
    hccl: &Hccl,
    context: &DeviceContext,
    call: &'static str,
    code: abi::HcclResult,
    device: DeviceId,
    rank: Option<u32>,
) -> Error {
    let status = Status::new(Family::Hccl, code);
    // Asked before anything else is called: it belongs to the latest failure.
    let recent = context.recent_message();
    let words = function!(hccl, HcclGetErrorString).ok().and_then(|get| {
        // SAFETY:
        // * The call has no preconditions.
        let text = unsafe { get(code) };
        // SAFETY:
        // * The library returns null or a string of static lifetime.
        unsafe { text_of(text) }
    });
    let message: Vec<String> = words.into_iter().chain(recent).collect();
    Error::Backend(Box::new(BackendError {
        call: call.to_owned(),
        code: status.code(),
        name: status.name().unwrap_or("unknown code").to_owned(),
        message: (!message.is_empty()).then(|| message.join(": ")),
        device: Some(device),
        rank,
        advice: status.advice().map(str::to_owned),
        timed_out: status.is_timeout(),
    }))
}

/// Bytes of one of `blocks` blocks, all of which must fit the buffer.
fn fits(buffer: &DeviceBuffer, blocks: usize, count: usize, data_type: DataType) -> Result<usize> {
    let len = count.checked_mul(data_type.size());
    let needed = len.and_then(|len| len.checked_mul(blocks));
    match (len, needed) {
        (Some(len), Some(needed)) if needed <= buffer.len() => Ok(len),
        _ => Err(Error::invalid(
            "count",
            format!(
                "{blocks} × {count} × {} bytes in a buffer of {} bytes",
                data_type.size(),
                buffer.len()
            ),
        )),
    }
}

fn type_of(data_type: DataType) -> abi::HcclDataType {
    match data_type {
        DataType::Int8 => abi::HCCL_DATA_TYPE_INT8,
        DataType::Int16 => abi::HCCL_DATA_TYPE_INT16,
        DataType::Int32 => abi::HCCL_DATA_TYPE_INT32,
        DataType::Int64 => abi::HCCL_DATA_TYPE_INT64,
        DataType::UInt8 => abi::HCCL_DATA_TYPE_UINT8,
        DataType::UInt16 => abi::HCCL_DATA_TYPE_UINT16,
        DataType::UInt32 => abi::HCCL_DATA_TYPE_UINT32,
        DataType::UInt64 => abi::HCCL_DATA_TYPE_UINT64,
        DataType::Float16 => abi::HCCL_DATA_TYPE_FP16,
        DataType::Float32 => abi::HCCL_DATA_TYPE_FP32,
        DataType::Float64 => abi::HCCL_DATA_TYPE_FP64,
        DataType::BFloat16 => abi::HCCL_DATA_TYPE_BFP16,
    }
}

fn op_of(op: ReduceOp) -> abi::HcclReduceOp {
    match op {
        ReduceOp::Sum => abi::HCCL_REDUCE_SUM,
        ReduceOp::Prod => abi::HCCL_REDUCE_PROD,
        ReduceOp::Max => abi::HCCL_REDUCE_MAX,
        ReduceOp::Min => abi::HCCL_REDUCE_MIN,
    }
}
