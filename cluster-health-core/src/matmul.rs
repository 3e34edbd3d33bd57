//! Matrix products on a device.
#![allow(unsafe_code, reason = "calls of C functions")]

use std::ffi::c_void;
use std::time::Duration;

use ascend_sys::load::Aclnn;
use ascend_sys::status::{Family, Status};
use ascend_sys::{aclnn as abi, function};

use crate::backend::BackendKind;
use crate::backend::ascend::{DeviceContext, missing, stream_of};
use crate::buffer::{Access, DeviceBuffer};
use crate::collective::DataType;
use crate::device::Device;
use crate::error::{BackendError, Error, Result};
use crate::stream::Stream;
use crate::units::ByteSize;
use crate::watch;

/// The product of two square matrices of a device, prepared once and queued many times: `aclnnMatmul`
/// on Ascend. Other backends have none.
#[derive(Debug)]
#[doc(alias = "aclnnMatmul")]
pub struct DeviceMatmul {
    aclnn: &'static Aclnn,
    context: DeviceContext,
    stream: Stream,
    /// Left factor, right factor, result.
    tensors: [Tensor; 3],
    /// What the tensors stand for.
    memory: [DeviceBuffer; 3],
    workspace: Option<DeviceBuffer>,
    order: usize,
    data_type: DataType,
    timeout: Duration,
}

impl DeviceMatmul {
    /// Two `order` × `order` matrices of [`DataType::Float16`], [`DataType::BFloat16`] or
    /// [`DataType::Float32`] in the memory of the stream's device, and room for their product.
    /// `timeout` bounds every wait.
    ///
    /// # Errors
    /// When the backend has no products, the operators of the toolkit do not load (with every path
    /// tried), for other types, and when memory is short.
    pub fn new(
        stream: &Stream,
        order: u32,
        data_type: DataType,
        timeout: Duration,
    ) -> Result<Self> {
        let device = stream.device();
        let kind = device.driver().kind();
        let unavailable = |message: String| Error::Unavailable {
            what: format!("the product of matrices on device {}", device.id()),
            message,
        };
        if kind != BackendKind::Ascend {
            return Err(unavailable(format!("the {kind} backend computes nothing")));
        }
        let element = match data_type {
            DataType::Float16 => abi::ACL_FLOAT16,
            DataType::BFloat16 => abi::ACL_BF16,
            DataType::Float32 => abi::ACL_FLOAT,
            other => return Err(unavailable(format!("not of {other:?}"))),
        };
        if order == 0 {
            return Err(Error::invalid("order", "0: there is nothing to multiply"));
        }
        let aclnn = ascend_sys::load::aclnn().map_err(|error| unavailable(error.to_string()))?;
        let context = DeviceContext::new(device.info())?;
        let n = usize::try_from(order).map_err(|_| Error::invalid("order", "too large"))?;
        let first = buffer(device, n, data_type, left)?;
        let second = buffer(device, n, data_type, right)?;
        let product = buffer(device, n, data_type, |_, _| 0)?;
        let memory = [first, second, product];
        context.enter()?;
        let tensor = |at: usize| Tensor::new(aclnn, device, order, element, &memory[at]);
        let tensors = [tensor(0)?, tensor(1)?, tensor(2)?];
        Ok(Self {
            aclnn,
            context,
            stream: stream.clone(),
            tensors,
            memory,
            workspace: None,
            order: n,
            data_type,
            timeout,
        })
    }

    /// The stream that products are queued in.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Queues one product.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn queue(&mut self) -> Result<()> {
        self.context.enter()?;
        let plan = function!(self.aclnn, aclnnMatmulGetWorkspaceSize).map_err(missing)?;
        let launch = function!(self.aclnn, aclnnMatmul).map_err(missing)?;
        let (mut size, mut executor) = (0_u64, std::ptr::null_mut());
        let [left, right, out] = &self.tensors;
        let device = Some(self.stream.device().id());
        let watched = watch::enter("aclnnMatmulGetWorkspaceSize", device);
        // SAFETY:
        // * The tensors are alive, the pointers are to live variables of ours.
        let code = unsafe {
            plan(
                left.handle,
                right.handle,
                out.handle,
                KEEP_DATA_TYPE,
                &raw mut size,
                &raw mut executor,
            )
        };
        drop(watched);
        self.check_code("aclnnMatmulGetWorkspaceSize", code)?;
        if size > 0 && self.workspace.as_ref().is_none_or(|memory| (memory.len() as u64) < size) {
            // Products that are queued use the old one.
            self.wait()?;
            self.workspace = Some(DeviceBuffer::new(self.stream.device(), ByteSize(size))?);
            self.context.enter()?;
        }
        let workspace: *mut c_void = match &self.workspace {
            Some(memory) => memory.raw.address.cast(),
            None => std::ptr::null_mut(),
        };
        // SAFETY:
        // * The stream is from the Ascend driver and alive.
        let stream = unsafe { stream_of(self.stream.0.raw) };
        let _call = watch::enter("aclnnMatmul", device);
        // SAFETY:
        // * The executor is that of the call before, not used yet; the workspace is as large as it
        //   asked for.
        // * Tensors, their memory and the workspace live until the stream was waited for.
        let code = unsafe { launch(workspace, size, executor, stream) };
        self.check_code("aclnnMatmul", code)
    }

    /// Waits until all queued products are done.
    ///
    /// # Errors
    /// A timeout that names the device, or the device's own error.
    pub fn wait(&self) -> Result<()> {
        self.stream.synchronize(self.timeout)
    }

    /// Whether an element of the product is what the factors give, up to the rounding of its type;
    /// waits for the products.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn is_right(&self) -> Result<bool> {
        self.wait()?;
        let n = self.order;
        let (row, column) = (n / 2, n / 3);
        let width = self.data_type.size();
        let mut bytes = [0; 4];
        self.memory[2].read((row * n + column) * width, &mut bytes[..width])?;
        let found = match self.data_type {
            DataType::Float16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            DataType::BFloat16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_le_bytes(bytes),
        };
        let terms = (0..n).filter(|k| left(row, *k) * right(*k, column) == 1).count();
        #[allow(clippy::cast_precision_loss, reason = "within the tolerance")]
        let expected = terms as f32;
        Ok((found - expected).abs() <= 0.01 * expected)
    }

    fn check_code(&self, call: &'static str, code: i32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let status = Status::new(Family::Aclnn, code);
        Err(Error::Backend(Box::new(BackendError {
            call: call.to_owned(),
            code: status.code(),
            name: status.name().unwrap_or("unknown code").to_owned(),
            message: self.context.recent_message(),
            device: Some(self.stream.device().id()),
            rank: None,
            advice: status.advice().map(str::to_owned),
            timed_out: status.is_timeout(),
        })))
    }
}

impl Drop for DeviceMatmul {
    fn drop(&mut self) {
        if self.wait().is_err() {
            // Memory that queued products may still use is left behind.
            for memory in self.memory.iter().chain(&self.workspace) {
                memory.pending.leave(&self.stream.0, Access::Write);
            }
        }
    }
}

/// `cubeMathType`: no lower precision than that of the elements.
const KEEP_DATA_TYPE: i8 = 0;

/// Ones and zeros: sums of their products are exact in every type, up to the rounding of the result.
fn left(row: usize, column: usize) -> u8 {
    u8::from((5 * row + 3 * column) % 4 < 2)
}

fn right(row: usize, column: usize) -> u8 {
    u8::from((7 * row + column) % 3 < 2)
}

/// A matrix in device memory, row by row.
fn buffer(
    device: &Device,
    n: usize,
    data_type: DataType,
    value: impl Fn(usize, usize) -> u8,
) -> Result<DeviceBuffer> {
    let one: &[u8] = match data_type {
        DataType::Float16 => &half::f16::ONE.to_le_bytes(),
        DataType::BFloat16 => &half::bf16::ONE.to_le_bytes(),
        _ => &1.0_f32.to_le_bytes(),
    };
    let width = data_type.size();
    let mut row_bytes = vec![0; n * width];
    let bytes = (n as u64).saturating_mul(n as u64).saturating_mul(width as u64);
    let mut memory = DeviceBuffer::new(device, ByteSize(bytes))?;
    for row in 0..n {
        row_bytes.fill(0);
        for (column, element) in row_bytes.chunks_exact_mut(width).enumerate() {
            if value(row, column) == 1 {
                element.copy_from_slice(one);
            }
        }
        memory.write(row * n * width, &row_bytes)?;
    }
    Ok(memory)
}

/// A square matrix as the operators see it.
#[derive(Debug)]
struct Tensor {
    aclnn: &'static Aclnn,
    handle: *mut abi::aclTensor,
}

impl Tensor {
    fn new(
        aclnn: &'static Aclnn,
        device: &Device,
        order: u32,
        element: abi::aclDataType,
        memory: &DeviceBuffer,
    ) -> Result<Self> {
        // What could not be given back is not made.
        function!(aclnn, aclDestroyTensor).map_err(missing)?;
        let create = function!(aclnn, aclCreateTensor).map_err(missing)?;
        let dims = [i64::from(order); 2];
        let strides = [i64::from(order), 1];
        let address = memory.raw.address.cast();
        let format = abi::ACL_FORMAT_ND;
        // SAFETY:
        // * The lists have two elements and live during the call.
        // * The memory holds order × order elements of this type and outlives the tensor.
        let handle = unsafe {
            create(
                dims.as_ptr(),
                2,
                element,
                strides.as_ptr(),
                0,
                format,
                dims.as_ptr(),
                2,
                address,
            )
        };
        if handle.is_null() {
            return Err(Error::Unavailable {
                what: format!("a matrix on device {}", device.id()),
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
