//! Communicators and collectives, between threads and between processes of one host.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{CStr, c_char},
    os::unix::fs::FileExt,
    sync::atomic::{AtomicU64, Ordering},
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::{
    clock::{self, Patience},
    codes::{
        HCCL_E_AGAIN, HCCL_E_INTERNAL, HCCL_E_MEMORY, HCCL_E_NOT_FOUND, HCCL_E_NOT_SUPPORT,
        HCCL_E_PARA, HCCL_E_RUNTIME, HCCL_E_SYSCALL, HCCL_E_TCP_CONNECT, HCCL_E_TIMEOUT,
        RT_DRV_INTERNAL_ERROR, RT_TASK_TIMEOUT,
    },
    config::{self, Path},
    device,
    ffi::{self, Fail, In, Mark, Out, Outcome, Site, exports, fail, lock, null},
    memory::{self, Kind, Place},
    reduce,
    shared::{self, MAX_RANKS, Shared},
    stream::{self, Stream},
};

const ROOT_INFO_BYTES: usize = 4108;
const ROOT_MAGIC: &[u8; 8] = b"ASIMROOT";

/// `HcclRootInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RootInfo([u8; ROOT_INFO_BYTES]);

/// `HcclSendRecvItem`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendRecvItem {
    kind: u32,
    buf: usize,
    count: u64,
    data_type: u32,
    remote: u32,
}

struct Comm {
    shared: Arc<Shared>,
    ranks: usize,
    rank: usize,
    logic: u32,
    name: String,
    charged: u64,
    submitted: Mutex<u64>,
    executed: AtomicU64,
    /// Messages so far, per (from, to).
    messages: Mutex<HashMap<(usize, usize), u64>>,
    pending: AtomicU64,
    again: AtomicU64,
}

static COMMS: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());
/// Root infos given out: the file must stay open until all ranks have found it.
static ROOTS: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());
static ROOT_COUNT: AtomicU64 = AtomicU64::new(0);

pub(crate) fn live_comms() -> u64 {
    lock(&COMMS).len() as u64
}

fn comm(handle: usize) -> Result<Arc<Comm>, Fail> {
    if handle == 0 {
        return null("comm");
    }
    let found = lock(&COMMS).get(&handle).map(Arc::clone);
    found.map_or_else(|| fail(HCCL_E_NOT_FOUND, format!("{handle:#x} is not a communicator")), Ok)
}

/// Misuse that ACL has a code for is a wrong parameter or a runtime error here.
fn as_hccl(code: i32) -> impl Fn(Fail) -> Fail {
    move |error| Fail { code: error.code.map(|_| code), text: error.text }
}

fn syscall<T>(what: &str, result: std::io::Result<T>) -> Result<T, Fail> {
    result.or_else(|error| fail(HCCL_E_SYSCALL, format!("{what}: {error}")))
}

fn new_root() -> Result<(RootInfo, Arc<Shared>), Fail> {
    let root = Arc::new(syscall("memfd", Shared::create())?);
    let serial = ROOT_COUNT.fetch_add(1, Ordering::Relaxed);
    let cookie = (clock::monotonic() << 16) ^ (u64::from(std::process::id()) << 8) ^ serial;
    root.cell(shared::COOKIE).store(cookie, Ordering::Release);
    let mut info = [0; ROOT_INFO_BYTES];
    let bytes =
        ROOT_MAGIC.iter().copied().chain(cookie.to_le_bytes()).chain(root.path().into_bytes());
    for (to, from) in info.iter_mut().zip(bytes) {
        *to = from;
    }
    Ok((RootInfo(info), root))
}

fn open_root(info: &RootInfo) -> Result<Arc<Shared>, Fail> {
    let (head, path) = info.0.split_at(16);
    let path = CStr::from_bytes_until_nul(path).ok().and_then(|path| path.to_str().ok());
    let (magic, cookie) = head.split_at(8);
    let (Some(path), true) = (path, magic == ROOT_MAGIC) else {
        return fail(HCCL_E_PARA, "the root info was not made by HcclGetRootInfo");
    };
    match Shared::open(path) {
        Ok(found) if found.cookie().to_le_bytes() == cookie => Ok(Arc::new(found)),
        Ok(_) => fail(HCCL_E_TCP_CONNECT, "the process that made the root info is gone"),
        Err(error) => fail(HCCL_E_TCP_CONNECT, format!("{path}: {error}")),
    }
}

struct Wanted {
    name: Option<String>,
    buffer_mb: Option<u64>,
}

/// Reads `HcclCommConfig`: as many of the 300 bytes of version 5 as the caller's size covers.
fn read_config(config: &In<u8>) -> Result<Wanted, Fail> {
    const HEADER: usize = 24;
    const NOT_SET: u32 = u32::MAX;
    let word = |bytes: &[u8], at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(&bytes[at..at + 4]);
        u32::from_le_bytes(word)
    };
    let header = config.list(HEADER)?;
    let (size, magic, version) = (word(&header, 0) as usize, word(&header, 8), word(&header, 12));
    if magic != 0xf0f0_f0f0 || word(&header, 4) != 0 || header[16..].iter().any(|&byte| byte != 0) {
        return fail(HCCL_E_PARA, format!("config magic {magic:#x}, size or reserved are wrong"));
    }
    // A newer version than this one knows is only warned about; its fields are behind ours.
    let needed = match version {
        0 => return fail(HCCL_E_PARA, "config version 0"),
        1 => 32,
        2 => 160,
        3 => 288,
        4 => 292,
        5 => 300,
        6 => 312,
        7..=9 => 1920,
        10 => 2240,
        _ => 2248,
    };
    if size < needed {
        return fail(HCCL_E_PARA, format!("config size {size} is too small for version {version}"));
    }
    let mut bytes = config.list(size.min(300))?;
    bytes.resize(300, 0);
    let within = |since, at, least: u32, most: u32| {
        let value = word(&bytes, at);
        version < since || value == NOT_SET || (least..=most).contains(&value)
    };
    let good = within(1, 24, 1, NOT_SET)
        && within(1, 28, 0, 2)
        && within(4, 288, 0, 6)
        && within(5, 292, 0, 255)
        && within(5, 296, 0, 7);
    if !good {
        return fail(HCCL_E_PARA, "a field of the config is out of its range");
    }
    let text = |since, at: usize| {
        if version < since {
            return Ok(None);
        }
        let Ok(text) = CStr::from_bytes_until_nul(&bytes[at..at + 128]) else {
            return fail(HCCL_E_PARA, "a name in the config has no terminator");
        };
        Ok(Some(text.to_string_lossy().into_owned()).filter(|text| !text.is_empty()))
    };
    text(3, 160)?;
    let buffer_mb = Some(word(&bytes, 24)).filter(|&mb| mb != NOT_SET).map(u64::from);
    Ok(Wanted { name: text(2, 32)?, buffer_mb })
}

fn join(
    shared: &Arc<Shared>,
    ranks: u32,
    rank: u32,
    logic: u32,
    wanted: Wanted,
) -> Result<usize, Fail> {
    let (size, me) = (ranks as usize, rank as usize);
    if size == 0 || size > MAX_RANKS || me >= size {
        return fail(HCCL_E_PARA, format!("rank {rank} of {ranks}"));
    }
    let agreed = shared.cell(shared::RANKS).compare_exchange(
        0,
        u64::from(ranks),
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    if let Err(other) = agreed
        && other != u64::from(ranks)
    {
        return fail(HCCL_E_PARA, format!("rank {rank} says {ranks} ranks, another said {other}"));
    }
    let mine = u64::from(std::process::id());
    let slot = shared.rank(me, shared::PRESENT);
    if slot.compare_exchange(0, mine, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return fail(HCCL_E_PARA, format!("rank {rank} joined twice"));
    }
    let from_env = || std::env::var("HCCL_BUFFSIZE").ok()?.parse().ok();
    let buffer = wanted.buffer_mb.or_else(from_env).unwrap_or(200);
    let charged = 2 * (buffer << 20);
    if !device::charge(logic, charged) {
        return fail(HCCL_E_MEMORY, format!("2 x {buffer} MB do not fit into the device"));
    }
    shared.cell(shared::JOINED).fetch_add(1, Ordering::AcqRel);
    let handle = device::handle();
    let name = wanted.name.unwrap_or_else(|| format!("hccl_world_{:016x}", shared.cookie()));
    lock(&COMMS).insert(
        handle,
        Arc::new(Comm {
            shared: Arc::clone(shared),
            ranks: size,
            rank: me,
            logic,
            name,
            charged,
            submitted: Mutex::new(0),
            executed: AtomicU64::new(0),
            messages: Mutex::default(),
            pending: AtomicU64::new(0),
            again: AtomicU64::new(config::get().destroy_again),
        }),
    );
    Ok(handle)
}

fn init(ranks: u32, info: &In<RootInfo>, rank: u32, wanted: Wanted, out: &Out<usize>) -> Outcome {
    if out.is_null() {
        return null("comm");
    }
    let info = info.get()?;
    let (_, logic) = device::current().map_err(as_hccl(HCCL_E_RUNTIME))?;
    let shared = open_root(&info)?;
    let handle = join(&shared, ranks, rank, logic, wanted)?;
    let deadline = clock::monotonic() + nanos(config::get().connect_timeout);
    let mut patience = Patience::default();
    while shared.cell(shared::JOINED).load(Ordering::Acquire) < u64::from(ranks) {
        if clock::monotonic() > deadline {
            drop(end(handle));
            let missing: Vec<usize> = (0..ranks as usize)
                .filter(|&r| shared.rank(r, shared::PRESENT).load(Ordering::Acquire) == 0)
                .collect();
            return fail(HCCL_E_TIMEOUT, format!("ranks {missing:?} did not come"));
        }
        patience.pause();
    }
    // All have the file open now.
    lock(&ROOTS).retain(|root| root.cookie() != shared.cookie());
    out.set(handle)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX >> 2)
}

fn end(handle: usize) -> Option<Arc<Comm>> {
    let comm = lock(&COMMS).remove(&handle)?;
    device::refund(comm.logic, comm.charged);
    Some(comm)
}

// --- operators --------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum What {
    AllGather = 1,
    AllReduce,
    ReduceScatter,
    Broadcast,
    Reduce,
    Scatter,
    AllToAll,
    Barrier,
    AllGatherV,
    ReduceScatterV,
}

fn type_size(data_type: u32) -> Result<u64, Fail> {
    match data_type {
        0 | 7 | 14..=17 => Ok(1),
        1 | 3 | 8 | 11 => Ok(2),
        2 | 4 | 9 => Ok(4),
        5 | 6 | 10 => Ok(8),
        12 => Ok(16),
        _ => fail(HCCL_E_PARA, format!("data type {data_type} does not exist")),
    }
}

fn size_of_elements(count: u64, data_type: u32) -> Result<usize, Fail> {
    let bytes = count.checked_mul(type_size(data_type)?).and_then(|x| usize::try_from(x).ok());
    bytes.map_or_else(|| fail(HCCL_E_PARA, format!("count {count} is too large")), Ok)
}

fn check_reduction(data_type: u32, op: u32) -> Outcome {
    const PROD: u32 = 1;
    if op > 3 {
        return fail(HCCL_E_PARA, format!("reduction {op} does not exist"));
    }
    if op == PROD && matches!(data_type, 1 | 11) || !reduce::supports(data_type) {
        return fail(HCCL_E_NOT_SUPPORT, format!("reduction {op} of data type {data_type}"));
    }
    Ok(())
}

impl Comm {
    /// Device memory of this communicator's device.
    fn buffer(&self, what: &str, addr: usize, bytes: usize) -> Result<Place, Fail> {
        let place = memory::locate(what, addr, bytes).map_err(as_hccl(HCCL_E_PARA))?;
        match place.kind {
            Kind::Device(owner) if owner == self.logic => Ok(place),
            kind => fail(
                HCCL_E_PARA,
                format!("{what} is {kind:?} memory, the communicator is of device {}", self.logic),
            ),
        }
    }

    fn stream(&self, handle: usize) -> Result<Arc<Stream>, Fail> {
        let stream = stream::stream(handle).map_err(as_hccl(HCCL_E_RUNTIME))?;
        if stream.logic != self.logic {
            return fail(
                HCCL_E_PARA,
                format!(
                    "a stream of device {}, communicator of device {}",
                    stream.logic, self.logic
                ),
            );
        }
        Ok(stream)
    }

    /// Waits until `ready`; fails when the stream ends or the execution timeout has passed.
    fn wait(&self, stream: &Stream, ready: impl Fn() -> bool) -> Result<(), i32> {
        let deadline = config::get().exec_timeout.map(|time| clock::monotonic() + nanos(time));
        let mut patience = Patience::default();
        while !ready() {
            if stream.is_aborted() || deadline.is_some_and(|due| clock::monotonic() > due) {
                return Err(RT_TASK_TIMEOUT);
            }
            patience.pause();
        }
        Ok(())
    }

    fn all(&self, cell: usize, at_least: u64) -> bool {
        (0..self.ranks).all(|r| self.shared.rank(r, cell).load(Ordering::Acquire) >= at_least)
    }

    fn read(&self, peer: usize, offset: usize, place: &Place) -> Result<(), i32> {
        let from = shared::rank_region(peer) + offset as u64;
        place.exchange(self.shared.fd(), from, false).map_err(|_| RT_DRV_INTERNAL_ERROR)
    }

    fn read_bytes(&self, peer: usize, offset: usize, len: usize) -> Result<Vec<u8>, i32> {
        let mut bytes = vec![0; len];
        self.shared
            .file()
            .read_exact_at(&mut bytes, shared::rank_region(peer) + offset as u64)
            .map_err(|_| RT_DRV_INTERNAL_ERROR)?;
        Ok(bytes)
    }

    fn link_cost(&self, peer: u32, bytes: u64) -> u64 {
        config::get().cost(Path::Hccl, clock::cpu(), self.logic, peer, bytes).stream_ns
    }
}

/// What is left to do once all ranks have shown their data.
type Finish = Box<dyn FnOnce(&Comm) -> Result<(), i32> + Send>;

/// A collective as one rank sees it.
struct Collective {
    what: What,
    /// What all ranks must agree on beside the kind: type, reduction, root.
    detail: u64,
    /// Elements, which all ranks must agree on too.
    count: u64,
    /// What this rank shows to the others: bytes of the simulator's own, then device memory.
    head: Vec<u8>,
    shown: Vec<Place>,
    /// Where this rank's result goes.
    results: Vec<Place>,
    /// Bytes that this rank receives from others, or sends where it receives nothing.
    moved: u64,
    finish: Finish,
}

fn run(
    comm_handle: usize,
    stream_handle: usize,
    build: impl FnOnce(&Comm) -> Result<Collective, Fail>,
) -> Outcome {
    let comm = comm(comm_handle)?;
    let stream = comm.stream(stream_handle)?;
    let op = build(&comm)?;
    let spoil = ffi::mark() == Some(Mark::Corrupt);
    let from = clock::host_now();
    let ns = comm.link_cost(comm.logic, op.moved);
    // The lock makes the order on the stream the order of the numbers.
    let mut submitted = lock(&comm.submitted);
    *submitted += 1;
    let number = *submitted;
    comm.pending.fetch_add(1, Ordering::AcqRel);
    let worker = Arc::clone(&comm);
    stream.push(Box::new(move |stream| {
        let target = if spoil { op.results.first().cloned() } else { None };
        let result = perform(&worker, stream, op, number, from, ns);
        if let Some(target) = target {
            target.spoil();
        }
        worker.executed.store(number, Ordering::Release);
        worker.pending.fetch_sub(1, Ordering::AcqRel);
        result
    }));
    Ok(())
}

fn perform(
    comm: &Comm,
    stream: &Stream,
    op: Collective,
    number: u64,
    from: u64,
    ns: u64,
) -> Result<(), i32> {
    comm.wait(stream, || comm.executed.load(Ordering::Acquire) + 1 == number)?;
    // From here on nobody reads what the collective before has left in the regions.
    comm.wait(stream, || comm.all(shared::DONE, number - 1))?;
    if !op.shown.iter().chain(&op.results).all(Place::still_there) {
        return Err(RT_DRV_INTERNAL_ERROR);
    }
    let shared = &comm.shared;
    let mut offset = shared::rank_region(comm.rank);
    shared.file().write_all_at(&op.head, offset).map_err(|_| RT_DRV_INTERNAL_ERROR)?;
    offset += op.head.len() as u64;
    for place in &op.shown {
        place.exchange(shared.fd(), offset, true).map_err(|_| RT_DRV_INTERNAL_ERROR)?;
        offset += place.len as u64;
    }
    let mine = |cell| shared.rank(comm.rank, cell);
    let signature = (op.what as u64) << 48 | op.detail;
    mine(shared::START).store(stream.reached(from), Ordering::Release);
    mine(shared::WHAT).store(signature, Ordering::Release);
    mine(shared::COUNT).store(op.count, Ordering::Release);
    mine(shared::POSTED).store(number, Ordering::Release);
    comm.wait(stream, || comm.all(shared::POSTED, number))?;
    let values = |cell| (0..comm.ranks).map(move |r| shared.rank(r, cell).load(Ordering::Acquire));
    let agree = values(shared::WHAT).all(|other| other == signature)
        && values(shared::COUNT).all(|other| other == op.count);
    let start = values(shared::START).max().unwrap_or(from);
    let result = if agree {
        stream.occupy(start, ns, || (op.finish)(comm))
    } else {
        Err(RT_DRV_INTERNAL_ERROR)
    };
    mine(shared::DONE).store(number, Ordering::Release);
    result
}

fn reduce_into(comm: &Comm, offset: usize, to: &Place, data_type: u32, op: u32) -> Result<(), i32> {
    let mut sum = comm.read_bytes(0, offset, to.len)?;
    for peer in 1..comm.ranks {
        reduce::combine(&mut sum, &comm.read_bytes(peer, offset, to.len)?, data_type, op);
    }
    to.write(&sum);
    Ok(())
}

fn detail(data_type: u32, op: u32, root: u32) -> u64 {
    u64::from(data_type) | u64::from(op) << 8 | u64::from(root) << 16
}

fn elements(count: u64, data_type: u32) -> Result<usize, Fail> {
    if count == 0 {
        return fail(HCCL_E_PARA, "count is 0");
    }
    size_of_elements(count, data_type)
}

fn check_root(comm: &Comm, root: u32) -> Result<usize, Fail> {
    let root = root as usize;
    if root >= comm.ranks {
        return fail(HCCL_E_PARA, format!("root {root} of {} ranks", comm.ranks));
    }
    Ok(root)
}

/// Per rank a range of a buffer, from counts and displacements in elements.
fn ranges(
    comm: &Comm,
    what: &str,
    addr: usize,
    counts: &[u64],
    displs: &[u64],
    data_type: u32,
) -> Result<Vec<Option<Place>>, Fail> {
    let parts = counts.iter().zip(displs).map(|(&count, &displ)| {
        let (bytes, at) =
            (size_of_elements(count, data_type)?, size_of_elements(displ, data_type)?);
        if bytes == 0 {
            return Ok(None);
        }
        let Some(end) = at.checked_add(bytes) else {
            return fail(HCCL_E_PARA, format!("{what}: a displacement is too large"));
        };
        Ok(Some(comm.buffer(what, addr, end)?.part(at, bytes)))
    });
    parts.collect()
}

fn even(comm: &Comm, count: u64) -> (Vec<u64>, Vec<u64>) {
    let displs = (0..comm.ranks as u64).map(|rank| rank.saturating_mul(count)).collect();
    (vec![count; comm.ranks], displs)
}

fn gather(
    comm: &Comm,
    what: What,
    send: (usize, u64),
    recv: (usize, &[u64], &[u64]),
    data_type: u32,
) -> Result<Collective, Fail> {
    let targets = ranges(comm, "recvBuf", recv.0, recv.1, recv.2, data_type)?;
    if recv.1.get(comm.rank) != Some(&send.1) {
        return fail(HCCL_E_PARA, "sendCount is not what recvCounts says of this rank");
    }
    let own = size_of_elements(send.1, data_type)?;
    let shown = if own > 0 { vec![comm.buffer("sendBuf", send.0, own)?] } else { Vec::new() };
    let results: Vec<Place> = targets.iter().flatten().cloned().collect();
    let total: usize = results.iter().map(|place| place.len).sum();
    let finish: Finish = Box::new(move |comm| {
        let all = targets.iter().enumerate();
        all.filter_map(|(peer, to)| Some((peer, to.as_ref()?)))
            .try_for_each(|(peer, to)| comm.read(peer, 0, to))
    });
    let (detail, count) = (detail(data_type, 0, 0), recv.1.iter().sum());
    Ok(Collective {
        what,
        detail,
        count,
        head: Vec::new(),
        shown,
        results,
        moved: (total - own) as u64,
        finish,
    })
}

fn scatter_reduce(
    comm: &Comm,
    what: What,
    send: (usize, &[u64], &[u64]),
    recv: (usize, u64),
    data_type: u32,
    op: u32,
) -> Result<Collective, Fail> {
    check_reduction(data_type, op)?;
    let shown: Vec<Place> =
        ranges(comm, "sendBuf", send.0, send.1, send.2, data_type)?.into_iter().flatten().collect();
    if send.1.get(comm.rank) != Some(&recv.1) {
        return fail(HCCL_E_PARA, "recvCount is not what sendCounts says of this rank");
    }
    let own = size_of_elements(recv.1, data_type)?;
    let mut before = 0;
    for &count in send.1.iter().take(comm.rank) {
        before += size_of_elements(count, data_type)?;
    }
    let results = if own > 0 { vec![comm.buffer("recvBuf", recv.0, own)?] } else { Vec::new() };
    let targets = results.clone();
    let finish: Finish = Box::new(move |comm| {
        targets.iter().try_for_each(|to| reduce_into(comm, before, to, data_type, op))
    });
    let (detail, count) = (detail(data_type, op, 0), send.1.iter().sum());
    let moved = (own * (comm.ranks - 1)) as u64;
    Ok(Collective { what, detail, count, head: Vec::new(), shown, results, moved, finish })
}

/// What rank `me` sends to every rank, and where it wants what every rank sends to it.
fn all_to_all(
    comm: &Comm,
    send: (usize, &[u64], &[u64], u32),
    recv: (usize, &[u64], &[u64], u32),
) -> Result<Collective, Fail> {
    let sources = ranges(comm, "sendBuf", send.0, send.1, send.2, send.3)?;
    let targets = ranges(comm, "recvBuf", recv.0, recv.1, recv.2, recv.3)?;
    if send.3 != recv.3 {
        return fail(HCCL_E_NOT_SUPPORT, "sendType and recvType differ");
    }
    let mut table = Vec::new();
    let mut offset = 16 * comm.ranks as u64;
    for source in &sources {
        let len = source.as_ref().map_or(0, |place| place.len) as u64;
        table.extend(offset.to_le_bytes());
        table.extend(len.to_le_bytes());
        offset += len;
    }
    let shown: Vec<Place> = sources.into_iter().flatten().collect();
    let results: Vec<Place> = targets.iter().flatten().cloned().collect();
    let moved = targets
        .iter()
        .enumerate()
        .filter(|&(peer, _)| peer != comm.rank)
        .map(|(_, place)| place.as_ref().map_or(0, |place| place.len) as u64)
        .sum();
    let finish: Finish = Box::new(move |comm| {
        for (peer, target) in targets.iter().enumerate() {
            let entry = comm.read_bytes(peer, 16 * comm.rank, 16)?;
            let word = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&entry[at..at + 8]);
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
            };
            if target.as_ref().map_or(0, |place| place.len) != word(8) {
                return Err(RT_DRV_INTERNAL_ERROR);
            }
            if let Some(target) = target {
                comm.read(peer, word(0), target)?;
            }
        }
        Ok(())
    });
    let detail = detail(send.3, 0, 0);
    Ok(Collective {
        what: What::AllToAll,
        detail,
        count: 0,
        head: table,
        shown,
        results,
        moved,
        finish,
    })
}

// --- point to point ---------------------------------------------------------------------------

#[derive(Clone)]
struct Message {
    from: usize,
    to: usize,
    number: u64,
    place: Place,
    send: bool,
}

impl Comm {
    fn message(
        &self,
        send: bool,
        buf: usize,
        count: u64,
        data_type: u32,
        peer: u32,
    ) -> Result<Message, Fail> {
        let peer = check_root(self, peer)?;
        if peer == self.rank {
            return fail(HCCL_E_PARA, "a rank does not send to itself");
        }
        let place = self.buffer("the buffer", buf, elements(count, data_type)?)?;
        let (from, to) = if send { (self.rank, peer) } else { (peer, self.rank) };
        Ok(Message { from, to, number: 0, place, send })
    }

    fn post(&self, stream: &Stream, message: &Message, start: u64) -> Result<(), i32> {
        let cell = |cell| self.shared.pair(message.from, message.to, cell);
        self.wait(stream, || cell(shared::TAKEN).load(Ordering::Acquire) + 1 == message.number)?;
        if !message.place.still_there() {
            return Err(RT_DRV_INTERNAL_ERROR);
        }
        let region = shared::pair_region(message.from, message.to);
        let written = message.place.exchange(self.shared.fd(), region, true);
        written.map_err(|_| RT_DRV_INTERNAL_ERROR)?;
        cell(shared::BYTES).store(message.place.len as u64, Ordering::Release);
        cell(shared::SENT_AT).store(start, Ordering::Release);
        cell(shared::SENT).store(message.number, Ordering::Release);
        Ok(())
    }

    fn take(&self, stream: &Stream, message: &Message) -> Result<u64, i32> {
        let cell = |cell| self.shared.pair(message.from, message.to, cell);
        self.wait(stream, || cell(shared::SENT).load(Ordering::Acquire) == message.number)?;
        if !message.place.still_there() {
            return Err(RT_DRV_INTERNAL_ERROR);
        }
        let fits = cell(shared::BYTES).load(Ordering::Acquire) == message.place.len as u64;
        let result = if fits {
            let region = shared::pair_region(message.from, message.to);
            let read = message.place.exchange(self.shared.fd(), region, false);
            read.map_err(|_| RT_DRV_INTERNAL_ERROR)
        } else {
            Err(RT_DRV_INTERNAL_ERROR)
        };
        let start = cell(shared::SENT_AT).load(Ordering::Acquire);
        cell(shared::TAKEN).store(message.number, Ordering::Release);
        result.map(|()| start)
    }
}

fn exchange(
    comm_handle: usize,
    stream_handle: usize,
    build: impl FnOnce(&Comm) -> Result<Vec<Message>, Fail>,
) -> Outcome {
    let comm = comm(comm_handle)?;
    let stream = comm.stream(stream_handle)?;
    let mut messages = build(&comm)?;
    let spoil = ffi::mark() == Some(Mark::Corrupt);
    let from = clock::host_now();
    let ns = messages
        .iter()
        .map(|message| {
            let peer = if message.send { message.to } else { message.from };
            comm.link_cost(u32::try_from(peer).unwrap_or(0), message.place.len as u64)
        })
        .max()
        .unwrap_or(0);
    let mut counts = lock(&comm.messages);
    for message in &mut messages {
        let count = counts.entry((message.from, message.to)).or_insert(0);
        *count += 1;
        message.number = *count;
    }
    comm.pending.fetch_add(1, Ordering::AcqRel);
    let worker = Arc::clone(&comm);
    stream.push(Box::new(move |stream| {
        let result = deliver(&worker, stream, &messages, from, ns);
        if spoil && let Some(received) = messages.iter().find(|message| !message.send) {
            received.place.spoil();
        }
        worker.pending.fetch_sub(1, Ordering::AcqRel);
        result
    }));
    Ok(())
}

fn deliver(
    comm: &Comm,
    stream: &Stream,
    messages: &[Message],
    from: u64,
    ns: u64,
) -> Result<(), i32> {
    let mut start = stream.reached(from);
    for message in messages.iter().filter(|message| message.send) {
        comm.post(stream, message, start)?;
    }
    for message in messages.iter().filter(|message| !message.send) {
        start = start.max(comm.take(stream, message)?);
    }
    // A send ends when the other side has the data.
    for message in messages.iter().filter(|message| message.send) {
        let taken = comm.shared.pair(message.from, message.to, shared::TAKEN);
        comm.wait(stream, || taken.load(Ordering::Acquire) >= message.number)?;
    }
    stream.occupy(start, ns, || Ok(()))
}

exports! { Hccl;
    fn HcclGetRootInfo(info: Out<RootInfo>) {
        if info.is_null() {
            return null("rootInfo");
        }
        device::current().map_err(as_hccl(HCCL_E_RUNTIME))?;
        let (made, root) = new_root()?;
        lock(&ROOTS).push(root);
        info.set(made)
    }
    fn HcclCommInitRootInfo(ranks: u32, info: In<RootInfo>, rank: u32, out: Out<usize>) {
        init(ranks, &info, rank, Wanted { name: None, buffer_mb: None }, &out)
    }
    fn HcclCommInitRootInfoConfig(
        ranks: u32,
        info: In<RootInfo>,
        rank: u32,
        config: In<u8>,
        out: Out<usize>,
    ) {
        let wanted = read_config(&config)?;
        init(ranks, &info, rank, wanted, &out)
    }
    fn HcclCommInitAll(count: u32, devices: In<i32>, out: Out<usize>) {
        let users = devices.list(count as usize)?;
        if out.is_null() {
            return null("comms");
        }
        let mut logics = Vec::new();
        for &user in &users {
            let user = u32::try_from(user).unwrap_or(u32::MAX);
            let logic = device::logic_of_u32(user).map_err(as_hccl(HCCL_E_PARA))?;
            if logics.contains(&logic) {
                return fail(HCCL_E_PARA, format!("device {user} is named twice"));
            }
            logics.push(logic);
        }
        let (_, shared) = new_root()?;
        for (rank, &logic) in (0..count).zip(&logics) {
            let handle = join(&shared, count, rank, logic, Wanted { name: None, buffer_mb: None })?;
            out.set_at(rank as usize, handle)?;
        }
        Ok(())
    }
    fn HcclCommDestroy(handle: usize) {
        let comm = comm(handle)?;
        let again = comm.again.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
        if again.is_ok() || comm.pending.load(Ordering::Acquire) > 0 {
            return fail(HCCL_E_AGAIN, "the communicator is still busy");
        }
        drop(end(handle));
        Ok(())
    }
    fn HcclGetRankId(handle: usize, rank: Out<u32>) {
        rank.set(u32::try_from(comm(handle)?.rank).unwrap_or(u32::MAX))
    }
    fn HcclGetRankSize(handle: usize, ranks: Out<u32>) {
        ranks.set(u32::try_from(comm(handle)?.ranks).unwrap_or(u32::MAX))
    }
    fn HcclGetCommName(handle: usize, name: Out<c_char>) {
        name.set_text(&comm(handle)?.name, 128)
    }
    fn HcclGetCommAsyncError(handle: usize, error: Out<i32>) {
        comm(handle)?;
        error.set(config::get().async_error)
    }
    fn HcclCommSuspend(handle: usize) { comm(handle).map(drop) }
    fn HcclCommResume(handle: usize) { comm(handle).map(drop) }
    fn HcclSetConfig(config: u32, value: i32) {
        if config != 0 || !(0..=2).contains(&value) {
            return fail(HCCL_E_PARA, format!("config {config} = {value}"));
        }
        DETERMINISTIC.store(u64::from(value.unsigned_abs()), Ordering::Release);
        Ok(())
    }
    fn HcclGetConfig(config: u32, value: Out<i32>) {
        if config != 0 {
            return fail(HCCL_E_PARA, format!("config {config}"));
        }
        value.set(i32::try_from(DETERMINISTIC.load(Ordering::Acquire)).unwrap_or(0))
    }
    fn HcclGroupStart() { Ok(()) }
    fn HcclGroupEnd() { Ok(()) }

    fn HcclAllReduce(
        send: usize,
        recv: usize,
        count: u64,
        data_type: u32,
        op: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            check_reduction(data_type, op)?;
            let bytes = elements(count, data_type)?;
            let shown = vec![comm.buffer("sendBuf", send, bytes)?];
            let to = comm.buffer("recvBuf", recv, bytes)?;
            let results = vec![to.clone()];
            let moved = 2 * bytes as u64 * (comm.ranks as u64 - 1) / comm.ranks as u64;
            let finish: Finish = Box::new(move |comm| reduce_into(comm, 0, &to, data_type, op));
            let detail = detail(data_type, op, 0);
            Ok(Collective { what: What::AllReduce, detail, count, head: Vec::new(), shown, results, moved, finish })
        })
    }
    fn HcclAllGather(
        send: usize,
        recv: usize,
        count: u64,
        data_type: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            elements(count, data_type)?;
            let (counts, displs) = even(comm, count);
            gather(comm, What::AllGather, (send, count), (recv, &counts, &displs), data_type)
        })
    }
    fn HcclAllGatherV(
        send: usize,
        send_count: u64,
        recv: usize,
        recv_counts: In<u64>,
        recv_displs: In<u64>,
        data_type: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            let (counts, displs) = (recv_counts.list(comm.ranks)?, recv_displs.list(comm.ranks)?);
            gather(comm, What::AllGatherV, (send, send_count), (recv, &counts, &displs), data_type)
        })
    }
    fn HcclReduceScatter(
        send: usize,
        recv: usize,
        count: u64,
        data_type: u32,
        op: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            elements(count, data_type)?;
            let (counts, displs) = even(comm, count);
            let send = (send, counts.as_slice(), displs.as_slice());
            scatter_reduce(comm, What::ReduceScatter, send, (recv, count), data_type, op)
        })
    }
    fn HcclReduceScatterV(
        send: usize,
        send_counts: In<u64>,
        send_displs: In<u64>,
        recv: usize,
        recv_count: u64,
        data_type: u32,
        op: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            let (counts, displs) = (send_counts.list(comm.ranks)?, send_displs.list(comm.ranks)?);
            let send = (send, counts.as_slice(), displs.as_slice());
            scatter_reduce(comm, What::ReduceScatterV, send, (recv, recv_count), data_type, op)
        })
    }
    fn HcclBroadcast(
        buf: usize,
        count: u64,
        data_type: u32,
        root: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            let bytes = elements(count, data_type)?;
            let root_rank = check_root(comm, root)?;
            let place = comm.buffer("buf", buf, bytes)?;
            let (shown, results) = if comm.rank == root_rank {
                (vec![place.clone()], Vec::new())
            } else {
                (Vec::new(), vec![place.clone()])
            };
            let finish: Finish = Box::new(move |comm| {
                if comm.rank == root_rank { Ok(()) } else { comm.read(root_rank, 0, &place) }
            });
            let (detail, moved) = (detail(data_type, 0, root), bytes as u64);
            Ok(Collective { what: What::Broadcast, detail, count, head: Vec::new(), shown, results, moved, finish })
        })
    }
    fn HcclReduce(
        send: usize,
        recv: usize,
        count: u64,
        data_type: u32,
        op: u32,
        root: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            check_reduction(data_type, op)?;
            let bytes = elements(count, data_type)?;
            let target = if check_root(comm, root)? == comm.rank {
                Some(comm.buffer("recvBuf", recv, bytes)?)
            } else {
                None
            };
            let shown = vec![comm.buffer("sendBuf", send, bytes)?];
            let results = target.iter().cloned().collect();
            let finish: Finish = Box::new(move |comm| {
                target.map_or(Ok(()), |to| reduce_into(comm, 0, &to, data_type, op))
            });
            let (detail, moved) = (detail(data_type, op, root), bytes as u64);
            Ok(Collective { what: What::Reduce, detail, count, head: Vec::new(), shown, results, moved, finish })
        })
    }
    fn HcclScatter(
        send: usize,
        recv: usize,
        count: u64,
        data_type: u32,
        root: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            let bytes = elements(count, data_type)?;
            let root_rank = check_root(comm, root)?;
            let shown = if root_rank == comm.rank {
                vec![comm.buffer("sendBuf", send, bytes.saturating_mul(comm.ranks))?]
            } else {
                Vec::new()
            };
            let to = comm.buffer("recvBuf", recv, bytes)?;
            let results = vec![to.clone()];
            let finish: Finish =
                Box::new(move |comm| comm.read(root_rank, comm.rank * to.len, &to));
            let (detail, moved) = (detail(data_type, 0, root), bytes as u64);
            Ok(Collective { what: What::Scatter, detail, count, head: Vec::new(), shown, results, moved, finish })
        })
    }
    fn HcclAlltoAll(
        send: usize,
        send_count: u64,
        send_type: u32,
        recv: usize,
        recv_count: u64,
        recv_type: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            elements(send_count, send_type)?;
            let (sends, send_displs) = even(comm, send_count);
            let (recvs, recv_displs) = even(comm, recv_count);
            all_to_all(comm, (send, &sends, &send_displs, send_type), (recv, &recvs, &recv_displs, recv_type))
        })
    }
    fn HcclAlltoAllV(
        send: usize,
        send_counts: In<u64>,
        send_displs: In<u64>,
        send_type: u32,
        recv: usize,
        recv_counts: In<u64>,
        recv_displs: In<u64>,
        recv_type: u32,
        comm: usize,
        stream: usize,
    ) {
        run(comm, stream, |comm| {
            let n = comm.ranks;
            let (sends, send_displs) = (send_counts.list(n)?, send_displs.list(n)?);
            let (recvs, recv_displs) = (recv_counts.list(n)?, recv_displs.list(n)?);
            all_to_all(comm, (send, &sends, &send_displs, send_type), (recv, &recvs, &recv_displs, recv_type))
        })
    }
    fn HcclBarrier(comm: usize, stream: usize) {
        run(comm, stream, |_| {
            let finish: Finish = Box::new(|_| Ok(()));
            let (shown, results) = (Vec::new(), Vec::new());
            Ok(Collective { what: What::Barrier, detail: 0, count: 0, head: Vec::new(), shown, results, moved: 0, finish })
        })
    }
    fn HcclSend(buf: usize, count: u64, data_type: u32, to: u32, comm: usize, stream: usize) {
        exchange(comm, stream, |comm| Ok(vec![comm.message(true, buf, count, data_type, to)?]))
    }
    fn HcclRecv(buf: usize, count: u64, data_type: u32, from: u32, comm: usize, stream: usize) {
        exchange(comm, stream, |comm| Ok(vec![comm.message(false, buf, count, data_type, from)?]))
    }
    fn HcclBatchSendRecv(items: In<SendRecvItem>, count: u32, comm: usize, stream: usize) {
        exchange(comm, stream, |comm| {
            if count == 0 {
                return fail(HCCL_E_PARA, "no items");
            }
            items
                .list(count as usize)?
                .into_iter()
                .map(|item| {
                    if item.kind > 1 {
                        return fail(HCCL_E_PARA, format!("sendRecvType {}", item.kind));
                    }
                    comm.message(item.kind == 0, item.buf, item.count, item.data_type, item.remote)
                })
                .collect()
        })
    }
}

static DETERMINISTIC: AtomicU64 = AtomicU64::new(0);

#[unsafe(no_mangle)]
extern "C" fn HcclGetCommConfigCapability() -> u32 {
    static SITE: Site = Site::new("HcclGetCommConfigCapability");
    ffi::value(&SITE, 0, || config::get().capability)
}

#[unsafe(no_mangle)]
extern "C" fn HcclGetErrorString(code: i32) -> *const c_char {
    static SITE: Site = Site::new("HcclGetErrorString");
    let text = match code {
        0 => c"no error",
        1 => c"parameter error",
        2 => c"null pointer",
        3 => c"memory error",
        HCCL_E_INTERNAL => c"internal error",
        5 => c"not supported",
        6 => c"not found",
        7 => c"unavailable",
        8 => c"system call error",
        9 => c"timeout",
        11 => c"TCP connect error",
        15 => c"runtime error",
        19 => c"network error",
        20 => c"try again",
        21 => c"remote error",
        _ => c"unknown error",
    };
    ffi::value(&SITE, text.as_ptr(), || text.as_ptr())
}
