//! Device time for criterion: copy this file, or depend on the package by its path.
//!
//! [`DeviceTime`] is a criterion [`Measurement`] that records an event of a stream before and after the
//! iterations of a sample and takes the device's own time in between, with the host's clock beside it.
//!
//! | in the device's time | not in it |
//! |---|---|
//! | the work that was issued on this stream, in order | submitting the first operation, waiting for the last |
//! | gaps while the stream waits for the host: of an operation that is waited for before the next is issued, the submission too | work on other streams, unless this one waits for it |
//! | what others put on the stream meanwhile | the host's work that delays nothing on the stream |
//!
//! So an operation that is issued again and again without waiting shows what the device takes (a
//! throughput), one that is waited for each time shows what a caller waits, less one submission.
//!
//! * The clock's resolution is that of the device ([`DeviceTime::resolution_ns`]). Criterion fits the time
//!   over numbers of iterations, of which a sample has as many as fit into its share of the
//!   measurement time, so that even a clock of a microsecond tells nanoseconds of many
//!   short operations. A sample shorter than some fifty ticks tells nothing.
//! * On the host backend an event is a time stamp of the host's clock, and a copy is done when it was
//!   issued: both clocks say the same. On the Ascend simulator and on synthetic machines the device's time is simulated
//!   (and synthetic time does not pass by itself: an idle iteration takes none, which criterion cannot
//!   fit).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use cluster_health_core::{EventTimer, Result, Stream};
use criterion::measurement::{Measurement, ValueFormatter, WallTime};

/// Nanoseconds of the same work by both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Times {
    /// Between two events of the device.
    pub device_ns: f64,
    /// From before the first event was recorded to the end of the wait for the second.
    pub host_ns: f64,
}

impl Times {
    fn plus(self, other: Self) -> Self {
        Self { device_ns: self.device_ns + other.device_ns, host_ns: self.host_ns + other.host_ns }
    }

    /// Host time ÷ device time; NaN before anything was measured.
    #[must_use]
    pub fn ratio(self) -> f64 {
        self.host_ns / self.device_ns
    }
}

/// What a [`DeviceTime`] measured so far, for its owner when criterion has it.
#[derive(Debug, Clone, Default)]
pub struct Beside(Rc<Cell<Times>>);

impl Beside {
    /// Both clocks over everything since the last call, warm-up included.
    #[must_use]
    pub fn take(&self) -> Times {
        self.0.take()
    }
}

/// Criterion's measurement by device events: nanoseconds on one stream.
///
/// ```
/// use std::time::Duration;
/// use cluster_health_benches::DeviceTime;
/// use cluster_health_core::{Machine, Stream};
/// use criterion::{Criterion, measurement::Measurement};
///
/// # fn main() -> cluster_health_core::Result<()> {
/// let machine = Machine::host()?;
/// let stream = Stream::new(&machine.devices()[0])?;
/// let time = DeviceTime::new(&stream, Duration::from_secs(30))?;
/// let beside = time.beside();
/// let begun = time.start();
/// std::thread::sleep(Duration::from_millis(2));
/// let times = time.end(begun);
/// // On the host backend both clocks are one.
/// assert!(times.device_ns >= 2e6 && times.host_ns >= times.device_ns);
/// assert_eq!(beside.take(), times);
/// let criterion: Criterion<DeviceTime> = Criterion::default().with_measurement(time);
/// # drop(criterion);
/// # Ok(())
/// # }
/// ```
pub struct DeviceTime {
    stream: Stream,
    timer: RefCell<EventTimer>,
    timeout: Duration,
    beside: Beside,
}

impl fmt::Debug for DeviceTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, timeout, .. } = self;
        f.debug_struct("DeviceTime")
            .field("stream", stream)
            .field("timeout", timeout)
            .finish_non_exhaustive()
    }
}

impl DeviceTime {
    /// Times what is issued on `stream`, waiting for it at most for `timeout` at a time. Some
    /// milliseconds are spent on looking at the device's clock.
    ///
    /// # Errors
    /// When the device refuses, or the stream does not become idle in time.
    pub fn new(stream: &Stream, timeout: Duration) -> Result<Self> {
        let timer = RefCell::new(EventTimer::new(stream, timeout)?);
        Ok(Self { stream: stream.clone(), timer, timeout, beside: Beside::default() })
    }

    /// Both clocks, to be asked after criterion took this.
    #[must_use]
    pub fn beside(&self) -> Beside {
        self.beside.clone()
    }

    /// The smallest step of the device's clock that was seen, nanoseconds; `None` where it did not
    /// show one (virtual time).
    #[must_use]
    pub fn resolution_ns(&self) -> Option<f64> {
        self.timer.borrow().resolution_ns()
    }
}

/// # Panics
/// All methods that ask the device, when it refuses or does not end in time: criterion knows no errors.
impl Measurement for DeviceTime {
    type Intermediate = Instant;
    type Value = Times;

    fn start(&self) -> Instant {
        // What was left in flight would be timed, too.
        self.stream.synchronize(self.timeout).expect("the stream became idle");
        let begun = Instant::now();
        self.timer.borrow_mut().begin(&self.stream).expect("an event was recorded");
        begun
    }

    fn end(&self, begun: Instant) -> Times {
        let mut timer = self.timer.borrow_mut();
        timer.end(&self.stream).expect("an event was recorded");
        self.stream.synchronize(self.timeout).expect("the stream became idle");
        let host_ns = begun.elapsed().as_secs_f64() * 1e9;
        let device_ns = timer.nanoseconds().expect("both events were reached");
        let times = Times { device_ns, host_ns };
        self.beside.0.set(self.beside.0.get().plus(times));
        times
    }

    fn add(&self, first: &Times, second: &Times) -> Times {
        first.plus(*second)
    }

    fn zero(&self) -> Times {
        Times::default()
    }

    fn to_f64(&self, times: &Times) -> f64 {
        times.device_ns
    }

    /// Nanoseconds, and bytes per second of a [`Throughput`](criterion::Throughput), as of the wall clock.
    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}
