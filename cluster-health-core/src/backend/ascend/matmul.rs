//! Matrix products on an NPU, as load, in a stream of their own.

use std::time::{Duration, Instant};

use crate::collective::DataType;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::load::{Achieved, Work};
use crate::matmul::DeviceMatmul;
use crate::stream::{Event, Stream};

/// Rows of the first product that is tried; they are doubled until one takes long enough.
const FEWEST: u32 = 128;
const MOST: u32 = 4096;
const LONG_ENOUGH: Duration = Duration::from_millis(1);

/// Products that are queued together take about so long.
const PORTION: Duration = Duration::from_millis(5);
const MOST_PRODUCTS: u32 = 64;

/// Square matrices of half-precision numbers, and what multiplies them.
pub(crate) struct AscendMatmul {
    product: DeviceMatmul,
    rows: u32,
    marks: [Event; 2],
    count: u32,
}

impl AscendMatmul {
    /// Finds a size of matrices that keeps this device busy.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the libraries of aclnn do not load, with every path tried.
    pub(crate) fn new(device: &Device, timeout: Duration) -> Result<Self> {
        let stream = Stream::new(device)?;
        let marks = [Event::new(device)?, Event::new(device)?];
        let mut rows = FEWEST;
        loop {
            let mut product = DeviceMatmul::new(&stream, rows, DataType::Float16, timeout)
                .map_err(without_products)?;
            let mut run = || {
                product.queue()?;
                product.wait()
            };
            // The first one loads the kernel.
            run()?;
            let began = Instant::now();
            run()?;
            let one = began.elapsed();
            if one >= LONG_ENOUGH || rows >= MOST {
                let fit = PORTION.as_nanos() / one.as_nanos().max(1);
                let count = u32::try_from(fit).unwrap_or(MOST_PRODUCTS).clamp(1, MOST_PRODUCTS);
                return Ok(Self { product, rows, marks, count });
            }
            rows *= 2;
        }
    }
}

/// Tells what was asked for, and the way around it.
fn without_products(error: Error) -> Error {
    match error {
        Error::Unavailable { message, .. } => Error::Unavailable {
            what: "load device".to_owned(),
            message: format!(
                "{message}; its matrix products need the operator package of the toolkit (source \
                 its set_env.sh), or leave device out of --load"
            ),
        },
        other => other,
    }
}

impl Work for AscendMatmul {
    fn portion(&mut self, achieved: &Achieved) -> Result<()> {
        let [begin, end] = &mut self.marks;
        begin.record(self.product.stream())?;
        for _ in 0..self.count {
            self.product.queue()?;
        }
        end.record(self.product.stream())?;
        self.product.wait()?;
        Achieved::add(&achieved.flops, 2 * u64::from(self.rows).pow(3) * u64::from(self.count));
        let nanoseconds = end.nanoseconds_since(begin)?;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates, and negative or undefined times become 0"
        )]
        Achieved::add(&achieved.busy_ns, nanoseconds as u64);
        Ok(())
    }
}
