//! Configuration: environment variables at the first call, `ascend_sim_configure` later.

use std::{
    collections::BTreeMap,
    ffi::CString,
    ops::RangeInclusive,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    sync::{Arc, Condvar, LazyLock, Mutex, PoisonError, RwLock},
    time::Duration,
};

use crate::{
    device,
    ffi::{Mark, lock},
};

/// One way data can go, and what decides its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    HostToDevice,
    DeviceToHost,
    Inner,
    Peer,
    Hccl,
    Matmul,
}

#[derive(Clone, Debug)]
struct Link {
    path: Path,
    cpu: Option<RangeInclusive<u32>>,
    dev: Option<u32>,
    peer: Option<u32>,
    gbps: Option<f64>,
    us: Option<f64>,
    submit_us: Option<f64>,
}

/// The modelled cost of one transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    /// Nanoseconds on the stream.
    pub(crate) stream_ns: u64,
    /// Nanoseconds that the submitting thread spends in the call.
    pub(crate) submit_ns: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) devices: u32,
    pub(crate) phy: Vec<u32>,
    pub(crate) visible: Option<String>,
    pub(crate) soc: CString,
    pub(crate) version: String,
    pub(crate) driver: String,
    pub(crate) hbm: u64,
    pub(crate) hbm_used: u64,
    pub(crate) stub: bool,
    pub(crate) virtual_time: bool,
    pub(crate) tick_ns: u64,
    pub(crate) no_peer: Vec<(u32, u32)>,
    pub(crate) peer_repeat: i32,
    pub(crate) host_register: bool,
    pub(crate) health: BTreeMap<u32, u32>,
    pub(crate) status: BTreeMap<u32, u32>,
    pub(crate) utilization: BTreeMap<u32, u32>,
    pub(crate) processes: Vec<(u32, i32, u64)>,
    pub(crate) topo: BTreeMap<(u32, u32), i32>,
    pub(crate) chips_per_card: u32,
    pub(crate) streams: usize,
    pub(crate) events: usize,
    pub(crate) destroy_again: u64,
    pub(crate) async_error: i32,
    pub(crate) capability: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) exec_timeout: Option<Duration>,
    pub(crate) workspace: u64,
    links: Vec<Link>,
}

impl Default for Config {
    fn default() -> Self {
        let seconds = |name: &str, otherwise| {
            let text = std::env::var(name).ok()?;
            Some(Duration::from_secs(text.parse().unwrap_or(otherwise)))
        };
        let exec = seconds("HCCL_EXEC_TIMEOUT", 1836).unwrap_or(Duration::from_secs(1836));
        Self {
            devices: 2,
            phy: Vec::new(),
            visible: std::env::var("ASCEND_RT_VISIBLE_DEVICES").ok(),
            soc: c"Ascend910B3".to_owned(),
            version: "1.17.0".to_owned(),
            driver: "25.0.rc1".to_owned(),
            hbm: 64 << 30,
            hbm_used: 3 << 30,
            stub: false,
            virtual_time: false,
            tick_ns: 20,
            no_peer: Vec::new(),
            peer_repeat: 0,
            host_register: true,
            health: BTreeMap::new(),
            status: BTreeMap::new(),
            utilization: BTreeMap::new(),
            processes: Vec::new(),
            topo: BTreeMap::new(),
            chips_per_card: 1,
            streams: 1984,
            events: 65_536,
            destroy_again: 0,
            async_error: 0,
            capability: 12,
            connect_timeout: seconds("HCCL_CONNECT_TIMEOUT", 120)
                .unwrap_or(Duration::from_secs(120)),
            exec_timeout: (!exec.is_zero()).then_some(exec),
            workspace: 65_536,
            links: Vec::new(),
        }
    }
}

impl Config {
    /// Time of `bytes` over `path` (for matmul: `bytes` are floating point operations / 1000).
    ///
    /// The last link that matches and says something about a quantity decides it. Without a link,
    /// wall-clock time adds nothing to the real copy; virtual time has a plausible default, as
    /// every transfer would take no time at all otherwise.
    pub(crate) fn cost(&self, path: Path, cpu: u32, dev: u32, peer: u32, bytes: u64) -> Cost {
        let (mut gbps, mut us, mut submit_us) = match path {
            _ if !self.virtual_time => (f64::INFINITY, 0.0, 0.0),
            Path::HostToDevice | Path::DeviceToHost => (20.0, 10.0, 0.0),
            Path::Inner => (600.0, 5.0, 0.0),
            Path::Peer | Path::Hccl => (18.0, 15.0, 0.0),
            Path::Matmul => (300.0, 10.0, 0.0),
        };
        for link in self.links.iter().filter(|link| {
            link.path == path
                && link.cpu.as_ref().is_none_or(|cpus| cpus.contains(&cpu))
                && link.dev.is_none_or(|d| d == dev)
                && link.peer.is_none_or(|p| p == peer)
        }) {
            gbps = link.gbps.unwrap_or(gbps);
            us = link.us.unwrap_or(us);
            submit_us = link.submit_us.unwrap_or(submit_us);
        }
        #[allow(clippy::cast_precision_loss, reason = "a model of time, exact below 2^53 bytes")]
        let stream = bytes as f64 / gbps + us * 1e3;
        Cost { stream_ns: whole_ns(stream), submit_ns: whole_ns(submit_us * 1e3) }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let bad = || format!("{key}={value}: not understood");
        let number = || value.trim().parse::<u64>().map_err(|_| bad());
        let small = || value.trim().parse::<u32>().map_err(|_| bad());
        let millis = || number().map(Duration::from_millis);
        let pairs = || {
            let mut list = BTreeMap::new();
            for item in items(value) {
                let (id, x) = item.split_once('=').ok_or_else(bad)?;
                list.insert(
                    id.trim().parse().map_err(|_| bad())?,
                    x.trim().parse().map_err(|_| bad())?,
                );
            }
            Ok::<BTreeMap<u32, u32>, String>(list)
        };
        let key = key.to_ascii_uppercase();
        match key.strip_prefix("ASCEND_SIM_").unwrap_or(&key) {
            "DEVICES" => self.devices = small()?,
            "PHY" => {
                self.phy =
                    items(value).map(str::parse).collect::<Result<_, _>>().map_err(|_| bad())?;
            }
            "ASCEND_RT_VISIBLE_DEVICES" => self.visible = Some(value.to_owned()),
            "SOC" => self.soc = CString::new(value).map_err(|_| bad())?,
            "VERSION" => self.version = value.to_owned(),
            "DRIVER" => self.driver = value.to_owned(),
            "HBM" => self.hbm = bytes(value).ok_or_else(bad)?,
            "HBM_USED" => self.hbm_used = bytes(value).ok_or_else(bad)?,
            "STUB" => self.stub = flag(value).ok_or_else(bad)?,
            "VIRTUAL" => self.virtual_time = flag(value).ok_or_else(bad)?,
            "TICK_NS" => self.tick_ns = number()?.max(1),
            "NO_PEER" => {
                self.no_peer = items(value)
                    .map(|item| {
                        let (a, b) = item.split_once('-').ok_or_else(bad)?;
                        Ok((a.parse().map_err(|_| bad())?, b.parse().map_err(|_| bad())?))
                    })
                    .collect::<Result<_, String>>()?;
            }
            "PEER_REPEAT" => self.peer_repeat = value.parse().map_err(|_| bad())?,
            "HOST_REGISTER" => self.host_register = flag(value).ok_or_else(bad)?,
            "HEALTH" => self.health = pairs()?,
            "STATUS" => self.status = pairs()?,
            "UTILIZATION" => self.utilization = pairs()?,
            "PROCESSES" => {
                self.processes = items(value)
                    .map(|item| {
                        let (phy, rest) = item.split_once('=').ok_or_else(bad)?;
                        let (pid, size) = rest.split_once(':').ok_or_else(bad)?;
                        let size = bytes(size).ok_or_else(bad)?;
                        Ok((phy.parse().map_err(|_| bad())?, pid.parse().map_err(|_| bad())?, size))
                    })
                    .collect::<Result<_, String>>()?;
            }
            "TOPO" => {
                for item in items(value) {
                    let (ids, kind) = item.split_once('=').ok_or_else(bad)?;
                    let (a, b) = ids.split_once('-').ok_or_else(bad)?;
                    let (a, b) = (a.parse().map_err(|_| bad())?, b.parse().map_err(|_| bad())?);
                    let kind = kind.parse().map_err(|_| bad())?;
                    self.topo.extend([((a, b), kind), ((b, a), kind)]);
                }
            }
            "CHIPS_PER_CARD" => self.chips_per_card = small()?.max(1),
            "STREAMS" => self.streams = value.parse().map_err(|_| bad())?,
            "EVENTS" => self.events = value.parse().map_err(|_| bad())?,
            "DESTROY_AGAIN" => self.destroy_again = number()?,
            "ASYNC_ERROR" => self.async_error = value.parse().map_err(|_| bad())?,
            "CAPABILITY" => self.capability = small()?,
            "CONNECT_TIMEOUT_MS" => self.connect_timeout = millis()?,
            "EXEC_TIMEOUT_MS" => self.exec_timeout = Some(millis()?),
            "WORKSPACE" => self.workspace = bytes(value).ok_or_else(bad)?,
            "LINKS" => {
                self.links = value
                    .split(';')
                    .filter(|item| !item.trim().is_empty())
                    .map(|item| link(item).ok_or_else(bad))
                    .collect::<Result<_, _>>()?;
            }
            "FAULTS" => {
                let list = value
                    .split([';', ','])
                    .map(str::trim)
                    .filter(|item| !item.is_empty())
                    .map(|item| Fault::parse(item).ok_or_else(bad))
                    .collect::<Result<Vec<_>, _>>()?;
                FAULTY.store(!list.is_empty(), Ordering::Release);
                *FAULTS.write().unwrap_or_else(PoisonError::into_inner) = list;
            }
            "RELEASE" => {
                lock(&RELEASES.0).0 += 1;
                RELEASES.1.notify_all();
            }
            // Variables by which harnesses name the simulator itself.
            "LIB" | "DIR" | "PATH" => {}
            _ => return Err(format!("{key}: no such setting of the simulator")),
        }
        Ok(())
    }
}

fn items(value: &str) -> impl Iterator<Item = &str> {
    value.split([',', ';']).map(str::trim).filter(|item| !item.is_empty())
}

fn flag(value: &str) -> Option<bool> {
    match value {
        "1" => Some(true),
        "0" | "" => Some(false),
        _ => None,
    }
}

fn bytes(value: &str) -> Option<u64> {
    let value = value.trim();
    let (digits, shift) = match value.as_bytes().last()? {
        b'K' => (&value[..value.len() - 1], 10),
        b'M' => (&value[..value.len() - 1], 20),
        b'G' => (&value[..value.len() - 1], 30),
        _ => (value, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn link(item: &str) -> Option<Link> {
    let mut words = item.split(',').map(str::trim);
    let path = match words.next()? {
        "h2d" => Path::HostToDevice,
        "d2h" => Path::DeviceToHost,
        "d2d" => Path::Inner,
        "peer" => Path::Peer,
        "hccl" => Path::Hccl,
        "matmul" => Path::Matmul,
        _ => return None,
    };
    let mut link =
        Link { path, cpu: None, dev: None, peer: None, gbps: None, us: None, submit_us: None };
    for word in words {
        let (key, value) = word.split_once('=')?;
        match key {
            "cpu" => {
                let (first, last) = value.split_once('-').unwrap_or((value, value));
                link.cpu = Some(first.parse().ok()?..=last.parse().ok()?);
            }
            "dev" => link.dev = Some(value.parse().ok()?),
            "peer" => link.peer = Some(value.parse().ok()?),
            "gbps" | "tflops" => {
                link.gbps = Some(value.parse().ok().filter(|&x: &f64| x > 0.0)?);
            }
            "us" => link.us = Some(value.parse().ok().filter(|&x: &f64| x >= 0.0)?),
            "submit_us" => link.submit_us = Some(value.parse().ok().filter(|&x: &f64| x >= 0.0)?),
            _ => return None,
        }
    }
    Some(link)
}

fn whole_ns(ns: f64) -> u64 {
    Duration::try_from_secs_f64(ns * 1e-9)
        .ok()
        .and_then(|time| u64::try_from(time.as_nanos()).ok())
        .unwrap_or(u64::MAX >> 2)
}

/// What happens to a call on the fault list.
#[derive(Clone, Copy)]
pub(crate) enum Action {
    Code(i32),
    Hang,
    Crash,
    Mark(Mark),
}

struct Fault {
    call: String,
    /// User id of the device that must be current in the calling thread.
    device: Option<u32>,
    from: u64,
    to: u64,
    action: Action,
    seen: AtomicU64,
}

impl Fault {
    fn parse(item: &str) -> Option<Self> {
        let mut parts = item.splitn(3, ':');
        let (place, when, what) = (parts.next()?, parts.next()?, parts.next()?);
        let (call, device) = match place.split_once('@') {
            Some((call, device)) => (call, Some(device.parse().ok()?)),
            None => (place, None),
        };
        let (from, to) = match when.strip_suffix('+') {
            _ if when == "*" => (1, u64::MAX),
            Some(from) => (from.parse().ok()?, u64::MAX),
            None => (when.parse().ok()?, when.parse().ok()?),
        };
        let action = match what {
            "hang" => Action::Hang,
            "crash" => Action::Crash,
            "stall" => Action::Mark(Mark::Stall),
            "corrupt" => Action::Mark(Mark::Corrupt),
            code => Action::Code(code.parse().ok()?),
        };
        Some(Self { call: call.to_owned(), device, from, to, action, seen: AtomicU64::new(0) })
    }
}

static FAULTY: AtomicBool = AtomicBool::new(false);
static FAULTS: RwLock<Vec<Fault>> = RwLock::new(Vec::new());
static RELEASES: (Mutex<Released>, Condvar) = (Mutex::new(Released(0)), Condvar::new());
struct Released(u64);

struct Loaded {
    config: RwLock<Arc<Config>>,
    broken: RwLock<Option<String>>,
}

static LOADED: LazyLock<Loaded> = LazyLock::new(|| {
    let mut config = Config::default();
    let mut broken = None;
    for (name, value) in std::env::vars_os() {
        let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else { continue };
        if name.starts_with("ASCEND_SIM_")
            && let Err(text) = config.set(&name, &value)
        {
            broken = Some(text);
        }
    }
    Loaded { config: RwLock::new(Arc::new(config)), broken: RwLock::new(broken) }
});

pub(crate) fn get() -> Arc<Config> {
    Arc::clone(&LOADED.config.read().unwrap_or_else(PoisonError::into_inner))
}

/// Why the environment is not usable: every call then fails with this text.
pub(crate) fn broken() -> Option<String> {
    LOADED.broken.read().unwrap_or_else(PoisonError::into_inner).clone()
}

pub(crate) fn set(key: &str, value: &str) -> Result<(), String> {
    let mut slot = LOADED.config.write().unwrap_or_else(PoisonError::into_inner);
    let mut config = Config::clone(&slot);
    config.set(key, value)?;
    *slot = Arc::new(config);
    Ok(())
}

/// The action for this call of `name`, counted per entry of the list.
pub(crate) fn fault(name: &str) -> Option<Action> {
    if !FAULTY.load(Ordering::Acquire) {
        return None;
    }
    let current = device::current_user();
    FAULTS
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .iter()
        .filter(|fault| fault.call == name && (fault.device.is_none() || fault.device == current))
        .filter_map(|fault| {
            let seen = fault.seen.fetch_add(1, Ordering::Relaxed) + 1;
            (fault.from..=fault.to).contains(&seen).then_some(fault.action)
        })
        .next_back()
}

/// How often hung work was released so far.
pub(crate) fn releases() -> u64 {
    lock(&RELEASES.0).0
}

/// Blocks until the next release.
pub(crate) fn hang() {
    let mut count = lock(&RELEASES.0);
    let before = count.0;
    while count.0 == before {
        count = RELEASES.1.wait(count).unwrap_or_else(PoisonError::into_inner);
    }
}
