//! Matrix products on one CPU, and on one device.

use cluster_health_core::{DataType, DeviceId, DeviceMatmul, EventTimer, Machine, Stream};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, LinalgScalar};

use crate::error::{Error, Result};
use crate::samples::Timer;
use crate::visit::{Fastest, Operation, Settings, Visit, warm_up, whole_ns};

/// Operations of a product of two n × n matrices: n² sums of n products.
pub(super) fn flops(order: u32) -> f64 {
    2.0 * f64::from(order).powi(3)
}

/// Times products on the calling thread, one core: ndarray computes with the kernels of the crate
/// `matrixmultiply`, which start no threads.
pub(super) fn visit(
    machine: &Machine,
    settings: Settings,
    order: u32,
    data_type: DataType,
    fastest: &mut Fastest,
) -> Result<Visit> {
    // The types are sizes of one operation in what the warm-up is compared with.
    let key = u64::from(order) << 1 | u64::from(data_type == DataType::Float64);
    let best = fastest.of(Operation::CpuMatmul, key);
    let visit = match data_type {
        DataType::Float32 => run::<f32>(machine, settings, order, best)?,
        DataType::Float64 => run::<f64>(machine, settings, order, best)?,
        other => {
            return Err(Error::invalid("data type", format!("no product of {other:?} on CPUs")));
        }
    };
    fastest.note(Operation::CpuMatmul, key, &visit);
    Ok(visit)
}

fn run<T: LinalgScalar + From<u8> + PartialEq>(
    machine: &Machine,
    settings: Settings,
    order: u32,
    best: Option<u64>,
) -> Result<Visit> {
    let n = order as usize;
    // Small whole numbers: every sum of them is exact in either type.
    let small = |row: usize, column: usize, factor: usize| {
        let value = (factor * row + 3 * column) % 4;
        T::from(u8::try_from(value).unwrap_or_default())
    };
    let a = Array2::from_shape_fn((n, n), |(row, column)| small(row, column, 5));
    let b = Array2::from_shape_fn((n, n), |(row, column)| small(row, column, 7));
    let mut c = Array2::from_elem((n, n), T::zero());
    let mut once = || {
        let start = machine.now_ns();
        general_mat_mul(T::one(), &a, &b, T::zero(), &mut c);
        std::hint::black_box(&mut c);
        Ok(machine.now_ns() - start)
    };
    let mut visit = Visit { timer: Some(Timer::Host), ..Visit::default() };
    visit.settled = warm_up(settings.warmup, best, &mut visit.warmup_ns, &mut once)?;
    for _ in 0..settings.iters {
        visit.iter_ns.push(once()?);
    }
    let (row, column) = (n / 2, n / 3);
    let expected = (0..n).fold(T::zero(), |sum, k| sum + a[[row, k]] * b[[k, column]]);
    if c[[row, column]] != expected {
        return Err(Error::output("data check", "the CPU computed a wrong product"));
    }
    Ok(visit)
}

/// Matrices of a device, kept for all visits: the first product loads a kernel.
pub(super) struct DeviceProduct {
    product: DeviceMatmul,
    timer: Option<EventTimer>,
    batch: Option<Option<u32>>,
    fastest: Fastest,
}

impl DeviceProduct {
    pub(super) fn new(
        machine: &Machine,
        device: DeviceId,
        order: u32,
        data_type: DataType,
        settings: Settings,
    ) -> Result<Self> {
        let missing = || Error::invalid("--devices", format!("device {device} does not exist"));
        let stream = Stream::new(&machine.device(device).ok_or_else(missing)?)?;
        let product = DeviceMatmul::new(&stream, order, data_type, settings.timeout)?;
        let timer = if machine.has_device_events() {
            Some(EventTimer::new(&stream, settings.timeout)?)
        } else {
            None
        };
        Ok(Self { product, timer, batch: None, fastest: Fastest::default() })
    }

    pub(super) fn visit(
        &mut self,
        machine: &Machine,
        settings: Settings,
        (operation, order): (Operation, u32),
    ) -> Result<Visit> {
        let best = self.fastest.of(operation, u64::from(order));
        let mut visit = Visit { timer: Some(Timer::Host), ..Visit::default() };
        let product = &mut self.product;
        let mut once = || {
            let start = machine.now_ns();
            product.queue()?;
            product.wait()?;
            Ok(machine.now_ns() - start)
        };
        visit.settled = warm_up(settings.warmup, best, &mut visit.warmup_ns, &mut once)?;
        let mut events = |timer: &mut EventTimer| {
            timer.begin(self.product.stream())?;
            for _ in 0..timer.batch() {
                self.product.queue()?;
            }
            timer.end(self.product.stream())?;
            self.product.wait()?;
            timer.nanoseconds()
        };
        if let Some(timer) = &mut self.timer {
            if self.batch.is_none() {
                let found = timer.choose(&mut events)?;
                self.batch = Some(found.then(|| timer.batch()));
            }
            if let Some(Some(batch)) = self.batch {
                timer.set_batch(batch);
                let mut host_ns = Vec::new();
                for _ in 0..settings.iters {
                    let start = machine.now_ns();
                    visit.iter_ns.push(whole_ns(events(timer)?));
                    host_ns.push((machine.now_ns() - start) / u64::from(batch));
                }
                visit.timer = Some(if batch == 1 { Timer::Event } else { Timer::EventBatch });
                visit.host_iter_ns = Some(host_ns);
            }
        }
        if visit.iter_ns.is_empty() {
            for _ in 0..settings.iters {
                let start = machine.now_ns();
                self.product.queue()?;
                self.product.wait()?;
                visit.iter_ns.push(machine.now_ns() - start);
            }
        }
        if !self.product.is_right()? {
            return Err(Error::output("data check", "the device computed a wrong product"));
        }
        self.fastest.note(operation, u64::from(order), &visit);
        Ok(visit)
    }
}
