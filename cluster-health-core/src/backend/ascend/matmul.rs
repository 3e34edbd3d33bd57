//! Matrix products on an NPU, as load: `aclnnMatmul` in a stream of their own.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use ascend_sys::load::Aclnn;
use ascend_sys::status::{Family, Status};
use ascend_sys::{aclnn as abi, function};

use super::{DeviceContext, missing, stream_of};
use crate::buffer::DeviceBuffer;
use crate::device::Device;
use crate::error::{BackendError, Error, Result};
use crate::load::{Achieved, Work};
use crate::stream::{Event, Stream};
use crate::units::ByteSize;

/// Rows of the first product that is tried; they are doubled until one takes long enough.
const FEWEST: u32 = 128;
const MOST: u32 = 4096;
const LONG_ENOUGH: Duration = Duration::from_millis(1);

/// Products that are queued together take about so long.
const PORTION: Duration = Duration::from_millis(5);
const MOST_PRODUCTS: u32 = 64;

/// Square matrices of half-precision numbers, and what multiplies them.
pub(crate) struct AscendMatmul {
    products: Products,
    marks: [Event; 2],
    count: u32,
}

impl AscendMatmul {
    /// Finds a size of matrices that keeps this device busy.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the libraries of aclnn do not load, with every path tried.
    pub(crate) fn new(device: &Device, timeout: Duration) -> Result<Self> {
        let aclnn = ascend_sys::load::aclnn().map_err(|error| Error::Unavailable {
            what: "load device".to_owned(),
            message: format!(
                "{error}; its matrix products need the operator package of the toolkit (source its \
                 set_env.sh), or leave device out of --load"
            ),
        })?;
        let marks = [Event::new(device)?, Event::new(device)?];
        let mut rows = FEWEST;
        loop {
            let mut products = Products::new(device, aclnn, rows, timeout)?;
            // The first one loads the kernel.
            products.run(1)?;
            let began = Instant::now();
            products.run(1)?;
            let one = began.elapsed();
            if one >= LONG_ENOUGH || rows >= MOST {
                let fit = PORTION.as_nanos() / one.as_nanos().max(1);
                let count = u32::try_from(fit).unwrap_or(MOST_PRODUCTS).clamp(1, MOST_PRODUCTS);
                return Ok(Self { products, marks, count });
            }
            rows *= 2;
        }
    }
}

impl Work for AscendMatmul {
    fn portion(&mut self, achieved: &Achieved) -> Result<()> {
        let [begin, end] = &mut self.marks;
        begin.record(&self.products.stream)?;
        for _ in 0..self.count {
            self.products.queue()?;
        }
        end.record(&self.products.stream)?;
        self.products.stream.synchronize(self.products.timeout)?;
        let rows = u64::from(self.products.rows);
        Achieved::add(&achieved.flops, 2 * rows.pow(3) * u64::from(self.count));
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

/// The matrices of one size.
struct Products {
    aclnn: &'static Aclnn,
    context: DeviceContext,
    device: Device,
    tensors: [Tensor; 3],
    stream: Stream,
    /// Memory of the tensors, and what the operator needs beside it; outlives both.
    _memory: [DeviceBuffer; 3],
    workspace: Option<DeviceBuffer>,
    rows: u32,
    timeout: Duration,
}

impl Products {
    fn new(device: &Device, aclnn: &'static Aclnn, rows: u32, timeout: Duration) -> Result<Self> {
        let context = DeviceContext::new(device.info())?;
        let stream = Stream::new(device)?;
        let bytes = ByteSize(2 * u64::from(rows).pow(2));
        let buffer = || -> Result<DeviceBuffer> {
            let mut buffer = DeviceBuffer::new(device, bytes)?;
            // Zeros: numbers whatever was there before.
            buffer.write(0, &vec![0; bytes.as_len()?])?;
            Ok(buffer)
        };
        let memory = [buffer()?, buffer()?, buffer()?];
        context.enter()?;
        let tensor = |at: usize| Tensor::new(aclnn, device, rows, memory[at].raw.address);
        let tensors = [tensor(0)?, tensor(1)?, tensor(2)?];
        Ok(Self {
            aclnn,
            context,
            device: device.clone(),
            tensors,
            stream,
            _memory: memory,
            workspace: None,
            rows,
            timeout,
        })
    }

    fn run(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.queue()?;
        }
        self.stream.synchronize(self.timeout)
    }

    /// Queues one product. An executor is for one run, so both phases are done each time.
    fn queue(&mut self) -> Result<()> {
        self.context.enter()?;
        let plan = function!(self.aclnn, aclnnMatmulGetWorkspaceSize).map_err(missing)?;
        let launch = function!(self.aclnn, aclnnMatmul).map_err(missing)?;
        let (mut size, mut executor) = (0_u64, std::ptr::null_mut());
        let [left, right, out] = &self.tensors;
        // SAFETY:
        // * The tensors are alive, the pointers are to live variables of ours.
        // * 0 keeps the data type in the computation.
        let code = unsafe {
            plan(left.handle, right.handle, out.handle, 0, &raw mut size, &raw mut executor)
        };
        self.check("aclnnMatmulGetWorkspaceSize", code)?;
        if size > 0 && self.workspace.as_ref().is_none_or(|memory| (memory.len() as u64) < size) {
            self.stream.synchronize(self.timeout)?;
            self.workspace = Some(DeviceBuffer::new(&self.device, ByteSize(size))?);
            self.context.enter()?;
        }
        let workspace = self
            .workspace
            .as_ref()
            .map_or(std::ptr::null_mut(), |memory| memory.raw.address.cast::<c_void>());
        // SAFETY:
        // * The stream is from the Ascend driver and alive.
        let stream = unsafe { stream_of(self.stream.0.raw) };
        // SAFETY:
        // * The executor is that of the call before, not used yet; the workspace is as large as it
        //   asked for, and it is replaced only while the stream is idle.
        // * Tensors, their memory and the workspace live until the stream was waited for.
        let code = unsafe { launch(workspace, size, executor, stream) };
        self.check("aclnnMatmul", code)
    }

    fn check(&self, call: &'static str, code: i32) -> Result<()> {
        check(call, code, &self.device, &self.context)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // Queued products use the tensors' memory. Where they do not end, that is left behind.
        if self.stream.synchronize(self.timeout).is_err() {
            for memory in &self._memory {
                memory.pending.leave(&self.stream.0, crate::buffer::Access::Write);
            }
            if let Some(memory) = &self.workspace {
                memory.pending.leave(&self.stream.0, crate::buffer::Access::Write);
            }
        }
    }
}

fn check(call: &'static str, code: i32, device: &Device, context: &DeviceContext) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let status = Status::new(Family::Aclnn, code);
    Err(Error::Backend(Box::new(BackendError {
        call: call.to_owned(),
        code: status.code(),
        name: status.name().unwrap_or("unknown code").to_owned(),
        message: context.recent_message(),
        device: Some(device.id()),
        rank: None,
        advice: status.advice().map(str::to_owned),
        timed_out: status.is_timeout(),
    })))
}

/// A square matrix in device memory.
struct Tensor {
    aclnn: &'static Aclnn,
    handle: *mut abi::aclTensor,
}

impl Tensor {
    fn new(aclnn: &'static Aclnn, device: &Device, rows: u32, address: *mut u8) -> Result<Self> {
        // What could not be given back is not made.
        function!(aclnn, aclDestroyTensor).map_err(missing)?;
        let create = function!(aclnn, aclCreateTensor).map_err(missing)?;
        let dims = [i64::from(rows); 2];
        let strides = [i64::from(rows), 1];
        // SAFETY:
        // * The lists are as long as they are said to be and live during the call.
        // * The memory has rows × rows numbers of this type and outlives the tensor.
        let handle = unsafe {
            create(
                dims.as_ptr(),
                2,
                abi::ACL_FLOAT16,
                strides.as_ptr(),
                0,
                abi::ACL_FORMAT_ND,
                dims.as_ptr(),
                2,
                address.cast(),
            )
        };
        if handle.is_null() {
            return Err(Error::Unavailable {
                what: format!("load device on device {}", device.id()),
                message: "aclCreateTensor gave no tensor".to_owned(),
            });
        }
        Ok(Self { aclnn, handle })
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let Ok(destroy) = function!(self.aclnn, aclDestroyTensor) {
            // SAFETY:
            // * The tensor is from `aclCreateTensor` and given back once.
            unsafe { destroy(self.handle) };
        }
    }
}
