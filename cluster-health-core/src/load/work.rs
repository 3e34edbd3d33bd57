//! What burners do, one short portion after another, so that they can be stopped within one.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::CpuWork;
use super::burner::Place;
use crate::backend::BackendKind;
use crate::backend::ascend::matmul::AscendMatmul;
use crate::buffer::DeviceBuffer;
use crate::device::Device;
use crate::error::Result;
use crate::id::NodeId;
use crate::stream::Stream;
use crate::transfer::Transfer;
use crate::units::ByteSize;

/// Memory of one stream of copies: source and target together.
pub const STREAM_BYTES: ByteSize = ByteSize::mib(32);

/// Bytes of one copy of a stream.
const CHUNK: usize = 1 << 20;

/// Rows of the matrices of CPU burners: three of them fit into a first cache of 48 KiB.
const ROWS: usize = 64;

/// What a burner has achieved.
#[derive(Debug, Default)]
pub(crate) struct Achieved {
    pub(crate) flops: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Of devices: time of their work by their own clock.
    pub(crate) busy_ns: AtomicU64,
}

impl Achieved {
    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

/// Work that one thread makes and does.
pub(crate) trait Work {
    /// The thread is bound here from now on.
    fn arrive(&mut self, place: Place) {
        let _ = place;
    }

    /// One portion, done when this returns; a few milliseconds at most.
    fn portion(&mut self, achieved: &Achieved) -> Result<()>;
}

/// The work of a CPU burner.
pub(super) fn cpu(work: CpuWork) -> Box<dyn Work> {
    Box::new(CpuBurn {
        product: (work != CpuWork::Stream).then(Product::new),
        streams: (work != CpuWork::Matmul).then(BTreeMap::new),
        node: None,
    })
}

/// The work of a device's burner; it belongs to the thread that makes it.
pub(super) fn device(device: &Device, timeout: Duration) -> Result<Box<dyn Work>> {
    if device.driver().kind() == BackendKind::Ascend {
        return Ok(Box::new(AscendMatmul::new(device, timeout)?));
    }
    let half = ByteSize(STREAM_BYTES.bytes() / 2);
    Ok(Box::new(DeviceBurn {
        stream: Stream::new(device)?,
        source: DeviceBuffer::new(device, half)?,
        target: DeviceBuffer::new(device, half)?,
        product: Product::new(),
        timeout,
    }))
}

/// Square matrices that are multiplied again and again.
struct Product {
    left: Vec<f32>,
    right: Vec<f32>,
    out: Vec<f32>,
}

impl Product {
    fn new() -> Self {
        let matrix = |value| vec![value; ROWS * ROWS];
        Self { left: matrix(1.5), right: matrix(0.25), out: matrix(0.0) }
    }

    fn run(&mut self, achieved: &Achieved) {
        for (row, out) in self.left.chunks_exact(ROWS).zip(self.out.chunks_exact_mut(ROWS)) {
            out.fill(0.0);
            for (factor, right) in row.iter().zip(self.right.chunks_exact(ROWS)) {
                for (sum, value) in out.iter_mut().zip(right) {
                    *sum += factor * value;
                }
            }
        }
        black_box(&mut self.out);
        black_box(&mut self.left);
        Achieved::add(&achieved.flops, 2 * (ROWS * ROWS * ROWS) as u64);
    }
}

/// Copies within memory of one node.
struct CopyStream {
    source: Vec<u8>,
    target: Vec<u8>,
    at: usize,
}

impl CopyStream {
    /// Touched by the calling thread, so on its node.
    fn new() -> Self {
        let half = usize::try_from(STREAM_BYTES.bytes() / 2).unwrap_or(CHUNK);
        Self { source: vec![1; half], target: vec![2; half], at: 0 }
    }

    fn run(&mut self, achieved: &Achieved) {
        let end = (self.at + CHUNK).min(self.source.len());
        self.target[self.at..end].copy_from_slice(&self.source[self.at..end]);
        black_box(&mut self.target);
        Achieved::add(&achieved.bytes, (end - self.at) as u64);
        self.at = if end == self.source.len() { 0 } else { end };
    }
}

struct CpuBurn {
    product: Option<Product>,
    /// Of every node where it was; `None` when it does not stream.
    streams: Option<BTreeMap<Option<NodeId>, CopyStream>>,
    node: Option<NodeId>,
}

impl Work for CpuBurn {
    fn arrive(&mut self, place: Place) {
        self.node = place.node;
        if let Some(streams) = &mut self.streams
            && let Entry::Vacant(empty) = streams.entry(place.node)
        {
            empty.insert(CopyStream::new());
        }
    }

    fn portion(&mut self, achieved: &Achieved) -> Result<()> {
        if let Some(product) = &mut self.product {
            product.run(achieved);
        }
        if let Some(stream) = self.streams.as_mut().and_then(|all| all.get_mut(&self.node)) {
            stream.run(achieved);
        }
        Ok(())
    }
}

/// Work in the memory of a host device, whatever CPU it is done by.
struct DeviceBurn {
    stream: Stream,
    source: DeviceBuffer,
    target: DeviceBuffer,
    product: Product,
    timeout: Duration,
}

impl Work for DeviceBurn {
    fn portion(&mut self, achieved: &Achieved) -> Result<()> {
        self.product.run(achieved);
        let bytes = self.source.len() as u64;
        let mut copy = Transfer::between_devices(
            &self.stream,
            &self.source,
            &mut self.target,
            ByteSize(bytes),
            self.timeout,
        )?;
        copy.issue()?;
        copy.wait()?;
        Achieved::add(&achieved.bytes, bytes);
        Ok(())
    }
}
