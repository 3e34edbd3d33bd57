//! What a sweep runs on: CPUs, devices and a clock.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::OnceCell;

use crate::activity::DeviceActivity;
use crate::affinity::{BindScope, Census, CpuSet, MaskGuard, PinGuard, current_cpu};
use crate::backend::ascend::AscendDriver;
use crate::backend::host::{HostDriver, monotonic_ns};
use crate::backend::synthetic::{
    CopyOutcome, PointContext, RANK_DEAD, Scenario, SyntheticDriver, census_of, topology_of,
};
use crate::backend::{BackendKind, Driver};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::id::{CpuId, DeviceId, NodeId};
use crate::inventory::AscendSoftware;
use crate::topology::Topology;
use crate::units::ByteSize;

/// A machine: CPUs that threads can be bound to, devices that memory can be copied to, and the
/// clock that both are timed with. Cheap to clone.
///
/// ```
/// use cluster_health_core::{ByteSize, DeviceBuffer, HostBuffer, HostMemory, Machine, Stream};
/// use cluster_health_core::{TagPattern, Transfer};
/// use std::time::Duration;
///
/// # fn main() -> cluster_health_core::Result<()> {
/// let machine = Machine::host()?;
/// let cpu = machine.census()?.bindable()[0];
/// let device = machine.devices().remove(0);
///
/// let _binding = machine.bind(cpu)?;
/// let size = ByteSize::mib(1);
/// let mut source = HostBuffer::new(&machine, size, HostMemory::PageLocked)?;
/// let mut target = DeviceBuffer::new(&device, size)?;
/// let stream = Stream::new(&device)?;
///
/// let tags = TagPattern::sparse(1, size);
/// source.write_tags(&tags)?;
/// let mut copy =
///     Transfer::to_device(&stream, &source, &mut target, size, Duration::from_secs(30))?;
/// let start = machine.now_ns();
/// copy.issue()?;
/// copy.wait()?;
/// let nanoseconds = machine.now_ns() - start;
/// drop(copy);
/// assert!(target.check_tags(&tags)?);
/// # let _ = nanoseconds;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Machine(Arc<Inner>);

struct Inner {
    driver: Arc<dyn Driver>,
    cpus: Cpus,
    topology: Topology,
    census: OnceCell<Census>,
}

enum Cpus {
    System,
    Synthetic(Arc<SyntheticDriver>),
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("backend", &self.backend())
            .field("devices", &self.0.driver.devices())
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// The best backend of this machine: Ascend if its library loads and reports devices, else
    /// host memory. [`ascend_status`](Self::ascend_status) tells why it is not Ascend.
    ///
    /// # Errors
    /// When this machine's CPUs and memory nodes cannot be read.
    pub fn detect() -> Result<Self> {
        match AscendDriver::load() {
            Ok(driver) => Ok(Self::real(Arc::new(driver), Topology::system()?)),
            Err(_) => Self::host(),
        }
    }

    fn real(driver: Arc<dyn Driver>, topology: Topology) -> Self {
        Self(Arc::new(Inner { driver, cpus: Cpus::System, topology, census: OnceCell::new() }))
    }

    /// This machine's CPUs and its memory: one device per NUMA node with memory.
    ///
    /// # Errors
    /// When CPUs and memory nodes cannot be read.
    pub fn host() -> Result<Self> {
        let topology = Topology::system()?;
        let driver = Arc::new(HostDriver::new(&topology));
        Ok(Self::real(driver, topology))
    }

    /// This machine's Ascend NPUs, as far as `ASCEND_RT_VISIBLE_DEVICES` lets this process use
    /// them, by their physical ids. Each is opened by its first use, on any thread, and stays open.
    ///
    /// # Errors
    /// When the runtime's library does not load, with every path tried, or the runtime does not
    /// start or reports no device, with its code; each with what to do.
    pub fn ascend() -> Result<Self> {
        let driver = AscendDriver::load()?;
        Ok(Self::real(Arc::new(driver), Topology::system()?))
    }

    /// Why this machine's Ascend NPUs cannot be used; `None` when they can.
    #[must_use]
    pub fn ascend_status() -> Option<String> {
        AscendDriver::load().err().map(|error| error.to_string())
    }

    /// A machine that exists only as a scenario, in virtual time that starts at 0.
    ///
    /// # Errors
    /// When the scenario contradicts itself.
    pub fn synthetic(scenario: Scenario) -> Result<Self> {
        let topology = topology_of(&scenario);
        let driver = Arc::new(SyntheticDriver::new(scenario)?);
        let cpus = Cpus::Synthetic(Arc::clone(&driver));
        Ok(Self(Arc::new(Inner { driver, cpus, topology, census: OnceCell::new() })))
    }

    /// A machine by the name that operators use: `auto`, `host`, `ascend` or `synthetic:FILE`.
    ///
    /// # Errors
    /// When the name is unknown, the backend is not there or the scenario has an error.
    pub fn by_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Self::detect(),
            "host" => Self::host(),
            "ascend" => Self::ascend(),
            _ => match name.strip_prefix("synthetic:") {
                Some(file) => Self::synthetic(Scenario::load(Path::new(file))?),
                None => Err(Error::invalid(
                    "--backend",
                    format!("'{name}' is none of auto, ascend, host, synthetic:FILE"),
                )),
            },
        }
    }

    /// Which backend it runs on.
    #[must_use]
    pub fn backend(&self) -> BackendKind {
        self.0.driver.kind()
    }

    /// CPUs, cores, packages and NUMA nodes.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.0.topology
    }

    /// The scenario of a synthetic machine.
    #[must_use]
    pub fn scenario(&self) -> Option<&Scenario> {
        match &self.0.cpus {
            Cpus::System => None,
            Cpus::Synthetic(driver) => Some(driver.scenario()),
        }
    }

    /// Which CPUs can really be bound, and why not where they cannot. Taken once; on this machine
    /// each CPU is tried from a thread of its own.
    ///
    /// # Errors
    /// When the trial thread cannot be started or affinity masks cannot be read.
    pub fn census(&self) -> Result<&Census> {
        self.0.census.get_or_try_init(|| match &self.0.cpus {
            Cpus::System => Census::take(&self.0.topology),
            Cpus::Synthetic(driver) => Ok(census_of(driver.scenario(), &self.0.topology)),
        })
    }

    /// All devices, in the backend's order, unavailable ones included.
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        (0..self.0.driver.devices().len())
            .map(|index| Device::new(Arc::clone(&self.0.driver), index))
            .collect()
    }

    /// What else goes on on each device, as the driver's management interface tells it now; empty
    /// for backends without one. Takes some milliseconds per device.
    #[must_use]
    pub fn device_activity(&self) -> Vec<DeviceActivity> {
        self.0.driver.activity()
    }

    /// Versions and files of the Ascend software below the backend; `None` for other backends.
    #[must_use]
    pub fn ascend_software(&self) -> Option<AscendSoftware> {
        self.0.driver.software()
    }

    /// The device with this physical id.
    #[must_use]
    pub fn device(&self, id: DeviceId) -> Option<Device> {
        let index = self.0.driver.devices().iter().position(|info| info.id == id)?;
        Some(Device::new(Arc::clone(&self.0.driver), index))
    }

    /// NUMA node of a CPU.
    #[must_use]
    pub fn node_of(&self, cpu: CpuId) -> Option<NodeId> {
        self.0.topology.node_of(cpu)
    }

    /// The machine's clock: monotonic nanoseconds. Real machines share it between processes.
    #[must_use]
    #[inline]
    pub fn now_ns(&self) -> u64 {
        match &self.0.cpus {
            Cpus::System => monotonic_ns(),
            Cpus::Synthetic(driver) => driver.now_ns(),
        }
    }

    /// True when time passes only by what is done on the machine.
    #[must_use]
    pub fn has_virtual_time(&self) -> bool {
        matches!(self.0.cpus, Cpus::Synthetic(_))
    }

    /// Moves a virtual clock forward; nothing happens on a real machine. A resumed run goes on
    /// where the interrupted one stopped.
    pub fn advance_virtual_time(&self, nanoseconds: u64) {
        if let Cpus::Synthetic(driver) = &self.0.cpus {
            driver.advance_ns(nanoseconds);
        }
    }

    /// Binds the calling thread to one CPU, verified, until the binding is dropped.
    ///
    /// # Errors
    /// When the kernel refuses, or the thread runs elsewhere afterwards.
    pub fn bind(&self, cpu: CpuId) -> Result<Binding> {
        match &self.0.cpus {
            Cpus::System => Ok(Binding(Bound::System(PinGuard::bind(cpu, BindScope::Thread)?))),
            Cpus::Synthetic(driver) => {
                driver.bind(0, cpu)?;
                Ok(Binding(Bound::Synthetic(Arc::clone(driver))))
            }
        }
    }

    /// Leaves the calling thread where it is, ready to be let run on sets of CPUs.
    ///
    /// # Errors
    /// When the kernel does not tell the thread's mask.
    pub fn placement(&self) -> Result<Placement> {
        Ok(Placement(match &self.0.cpus {
            Cpus::System => Placed::System(MaskGuard::new()?),
            Cpus::Synthetic(driver) => {
                driver.release(0)?;
                let all = self.0.topology.online();
                Placed::Synthetic { driver: Arc::clone(driver), allowed: all.clone(), all }
            }
        }))
    }

    /// The CPU that runs the calling thread right now.
    ///
    /// # Errors
    /// When the kernel does not tell.
    #[inline]
    pub fn running_cpu(&self) -> Result<CpuId> {
        match &self.0.cpus {
            Cpus::System => current_cpu(),
            Cpus::Synthetic(driver) => driver.running_cpu(0),
        }
    }

    /// Tells a synthetic machine which point comes next, since its noise depends on it. Real
    /// machines ignore it.
    #[inline]
    pub fn begin_point(&self, context: &PointContext<'_>) {
        if let Cpus::Synthetic(driver) = &self.0.cpus {
            driver.begin_point(context);
        }
    }

    /// The two ranks of a synthetic machine; `None` on a real one, whose ranks are processes or
    /// threads.
    #[must_use]
    pub fn synthetic_pair(&self) -> Option<SyntheticPair> {
        match &self.0.cpus {
            Cpus::System => None,
            Cpus::Synthetic(driver) => Some(SyntheticPair(Arc::clone(driver))),
        }
    }

    /// True when events carry the device's own time stamps.
    #[must_use]
    pub fn has_device_events(&self) -> bool {
        self.0.driver.has_device_events()
    }

    pub(crate) fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.0.driver)
    }
}

/// Both ranks of a synthetic machine; what they do passes on its one clock.
#[derive(Debug)]
pub struct SyntheticPair(Arc<SyntheticDriver>);

impl SyntheticPair {
    /// Binds rank 0 or 1 to a CPU.
    ///
    /// # Errors
    /// When the CPU is not there or refuses the rank, which then stays where it was.
    pub fn bind(&self, rank: u32, cpu: CpuId) -> Result<()> {
        self.0.bind(rank, cpu)
    }

    /// Lets rank 0 or 1 run on these CPUs: it runs on the first one that takes it.
    ///
    /// # Errors
    /// When none of them does; the rank then stays where it was.
    pub fn allow(&self, rank: u32, cpus: &CpuSet) -> Result<()> {
        self.0.allow(rank, cpus)
    }

    /// Lets rank 0 or 1 run anywhere: it runs on the first online CPU.
    ///
    /// # Errors
    /// For a rank other than 0 and 1.
    pub fn release(&self, rank: u32) -> Result<()> {
        self.0.release(rank)
    }

    /// The CPU that a rank runs on.
    ///
    /// # Errors
    /// For a rank other than 0 and 1.
    pub fn running_cpu(&self, rank: u32) -> Result<CpuId> {
        self.0.running_cpu(rank)
    }

    /// One all-gather of `bytes` per rank between these devices.
    ///
    /// # Errors
    /// For a failure of the scenario, a device that is not there, and a transfer that takes longer
    /// than `timeout`.
    pub fn all_gather(
        &self,
        device_pair: [DeviceId; 2],
        bytes: ByteSize,
        timeout: Duration,
    ) -> Result<CopyOutcome> {
        self.0.all_gather(device_pair, bytes, timeout)
    }

    /// True for the error of a rank that the scenario lets die: no later point can be measured.
    #[must_use]
    pub fn is_rank_dead(error: &Error) -> bool {
        matches!(error, Error::Backend(error) if error.name == RANK_DEAD)
    }
}

/// The calling thread bound to a CPU of a [`Machine`]; undone on drop.
#[derive(Debug)]
pub struct Binding(Bound);

#[derive(Debug)]
enum Bound {
    System(PinGuard),
    Synthetic(Arc<SyntheticDriver>),
}

impl Binding {
    /// Binds the thread to another CPU.
    ///
    /// # Errors
    /// When the kernel refuses, or the thread runs elsewhere afterwards; the thread is then bound
    /// to the old or the new CPU.
    pub fn move_to(&mut self, target: CpuId) -> Result<()> {
        match &mut self.0 {
            Bound::System(guard) => guard.move_to(target),
            Bound::Synthetic(driver) => driver.bind(0, target),
        }
    }

    /// The CPU that runs the calling thread right now.
    ///
    /// # Errors
    /// When the kernel does not tell.
    #[inline]
    pub fn running_cpu(&self) -> Result<CpuId> {
        match &self.0 {
            Bound::System(_) => current_cpu(),
            Bound::Synthetic(driver) => driver.running_cpu(0),
        }
    }
}

/// The calling thread on sets of CPUs of a [`Machine`], or unbound; undone on drop.
///
/// A synthetic machine has no scheduler: of several CPUs the thread runs on the first one that the
/// scenario lets it bind to, unbound on the first online one.
#[derive(Debug)]
pub struct Placement(Placed);

#[derive(Debug)]
enum Placed {
    System(MaskGuard),
    Synthetic { driver: Arc<SyntheticDriver>, allowed: CpuSet, all: CpuSet },
}

impl Placement {
    /// Lets the thread run on these CPUs and no others, verified.
    ///
    /// # Errors
    /// When the kernel refuses; the thread may then run where it could before.
    pub fn allow(&mut self, cpus: &CpuSet) -> Result<()> {
        match &mut self.0 {
            Placed::System(guard) => guard.allow(cpus),
            Placed::Synthetic { driver, allowed, .. } => {
                driver.allow(0, cpus)?;
                allowed.clone_from(cpus);
                Ok(())
            }
        }
    }

    /// Lets the thread run where it could before all this.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn release(&mut self) -> Result<()> {
        match &mut self.0 {
            Placed::System(guard) => guard.release(),
            Placed::Synthetic { driver, allowed, all } => {
                driver.release(0)?;
                allowed.clone_from(all);
                Ok(())
            }
        }
    }

    /// The CPUs that the thread may run on, as the kernel has them now.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn allowed(&mut self) -> Result<CpuSet> {
        match &mut self.0 {
            Placed::System(guard) => guard.allowed(),
            Placed::Synthetic { allowed, .. } => Ok(allowed.clone()),
        }
    }
}
