//! The two-phase matrix product: tensors, executors, a plain triple loop.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use crate::{
    clock,
    codes::{ACLNN_ERR_PARAM_INVALID, ACLNN_ERR_PARAM_NULLPTR, RT_DRV_INTERNAL_ERROR},
    config::{self, Path},
    device,
    ffi::{self, Fail, In, Out, Outcome, Site, exports, fail, lock, null},
    memory::{self, Kind, Place},
    reduce, stream,
};

const FLOAT: u32 = 0;
const FLOAT16: u32 = 1;
const BF16: u32 = 27;
const ND: u32 = 2;

#[derive(Clone)]
struct Tensor {
    dims: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    data_type: u32,
    addr: usize,
    elements: usize,
}

struct Executor {
    a: Tensor,
    b: Tensor,
    c: Tensor,
    workspace: u64,
    repeatable: bool,
}

static TENSORS: Mutex<BTreeMap<usize, Tensor>> = Mutex::new(BTreeMap::new());
static EXECUTORS: Mutex<BTreeMap<usize, Arc<Executor>>> = Mutex::new(BTreeMap::new());

pub(crate) fn live_tensors() -> u64 {
    lock(&TENSORS).len() as u64
}

pub(crate) fn live_executors() -> u64 {
    lock(&EXECUTORS).len() as u64
}

fn invalid<T>(text: impl Into<String>) -> Result<T, Fail> {
    fail(ACLNN_ERR_PARAM_INVALID, text)
}

fn tensor(handle: usize) -> Result<Tensor, Fail> {
    if handle == 0 {
        return null("a tensor");
    }
    let found = lock(&TENSORS).get(&handle).cloned();
    found.map_or_else(|| invalid(format!("{handle:#x} is not a tensor")), Ok)
}

fn executor(handle: usize) -> Result<Arc<Executor>, Fail> {
    if handle == 0 {
        return null("the executor");
    }
    let found = lock(&EXECUTORS).get(&handle).map(Arc::clone);
    found.map_or_else(|| invalid(format!("{handle:#x} is not an executor, or was used up")), Ok)
}

impl Tensor {
    fn width(&self) -> usize {
        if self.data_type == FLOAT { 4 } else { 2 }
    }

    fn place(&self, what: &str) -> Result<Place, Fail> {
        let bytes = self.elements * self.width();
        let place = memory::locate(what, self.addr, bytes)?;
        match place.kind {
            Kind::Device(_) => Ok(place),
            kind => invalid(format!("{what} is {kind:?} memory")),
        }
    }

    fn at(&self, row: usize, column: usize) -> usize {
        self.offset + row * self.strides[0] + column * self.strides[1]
    }

    fn read(&self, place: &Place) -> Vec<f32> {
        let bytes = place.bytes();
        let two = || bytes.as_chunks::<2>().0.iter().map(|&two| u16::from_le_bytes(two));
        match self.data_type {
            FLOAT => bytes.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
            FLOAT16 => two().map(reduce::half).collect(),
            _ => two().map(reduce::brain).collect(),
        }
    }

    fn write(&self, place: &Place, values: &[f32]) {
        let bytes: Vec<u8> = match self.data_type {
            FLOAT => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            FLOAT16 => {
                values.iter().flat_map(|&x| reduce::to_half(f64::from(x)).to_le_bytes()).collect()
            }
            _ => {
                values.iter().flat_map(|&x| reduce::to_brain(f64::from(x)).to_le_bytes()).collect()
            }
        };
        place.write(&bytes);
    }
}

fn make_tensor(
    dims: &In<i64>,
    count: u64,
    data_type: u32,
    strides: &In<i64>,
    offset: i64,
    format: u32,
    storage: (&In<i64>, u64),
    addr: usize,
) -> Result<usize, Fail> {
    let sizes = |list: Vec<i64>| -> Result<Vec<usize>, Fail> {
        list.into_iter()
            .map(|x| usize::try_from(x).or_else(|_| invalid(format!("dimension {x}"))))
            .collect()
    };
    if count == 0 || count > 8 || storage.1 > 8 || format != ND {
        return invalid("one to eight dimensions, format ND");
    }
    if !matches!(data_type, FLOAT | FLOAT16 | BF16) {
        return invalid(format!("data type {data_type}"));
    }
    let dims = sizes(dims.list(usize::try_from(count).unwrap_or(0))?)?;
    let strides = if strides.is_null() {
        let mut strides = vec![1; dims.len()];
        for at in (1..dims.len()).rev() {
            strides[at - 1] = strides[at] * dims[at];
        }
        strides
    } else {
        sizes(strides.list(dims.len())?)?
    };
    let stored = sizes(storage.0.list(usize::try_from(storage.1).unwrap_or(0))?)?;
    let elements =
        stored.iter().try_fold(1_usize, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX >> 3);
    let [offset] = sizes(vec![offset])?[..] else { return invalid("offset") };
    let last: usize = dims.iter().zip(&strides).map(|(d, s)| d.saturating_sub(1) * s).sum();
    if dims.contains(&0) || offset + last >= elements {
        return invalid("the view does not lie in the storage");
    }
    let handle = device::handle();
    let made = Tensor { dims, strides, offset, data_type, addr, elements };
    lock(&TENSORS).insert(handle, made);
    Ok(handle)
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateTensor(
    dims: In<i64>,
    count: u64,
    data_type: u32,
    strides: In<i64>,
    offset: i64,
    format: u32,
    storage: In<i64>,
    storage_count: u64,
    addr: usize,
) -> usize {
    static SITE: Site = Site::new("aclCreateTensor");
    ffi::value(&SITE, 0, || {
        let storage = (&storage, storage_count);
        make_tensor(&dims, count, data_type, &strides, offset, format, storage, addr).unwrap_or(0)
    })
}

fn plan(a: usize, b: usize, c: usize, math: i8, size: &Out<u64>, out: &Out<usize>) -> Outcome {
    let (a, b, c) = (tensor(a)?, tensor(b)?, tensor(c)?);
    if size.is_null() || out.is_null() {
        return null("workspaceSize or executor");
    }
    if !(0..=4).contains(&math) {
        return invalid(format!("cubeMathType {math}"));
    }
    if a.data_type != b.data_type || a.data_type != c.data_type {
        return invalid("the data types differ");
    }
    let fits = match (&a.dims[..], &b.dims[..], &c.dims[..]) {
        (&[m, k], &[k2, n], &[m2, n2]) => k == k2 && m == m2 && n == n2,
        _ => false,
    };
    if !fits {
        return invalid(format!("shapes {:?} x {:?} -> {:?}", a.dims, b.dims, c.dims));
    }
    for (tensor, what) in [(&a, "self"), (&b, "mat2"), (&c, "out")] {
        tensor.place(what).map_err(|error| Fail {
            code: Some(error.code.map_or(ACLNN_ERR_PARAM_NULLPTR, |_| ACLNN_ERR_PARAM_INVALID)),
            text: error.text,
        })?;
    }
    let workspace = config::get().workspace;
    let handle = device::handle();
    let made = Executor { a, b, c, workspace, repeatable: false };
    lock(&EXECUTORS).insert(handle, Arc::new(made));
    size.set(workspace)?;
    out.set(handle)
}

fn execute(workspace: usize, size: u64, handle: usize, stream_handle: usize) -> Outcome {
    let plan = executor(handle)?;
    let stream = stream::stream(stream_handle)?;
    if size < plan.workspace {
        return invalid(format!("workspace of {size} bytes, {} are needed", plan.workspace));
    }
    if plan.workspace > 0 {
        let bytes = usize::try_from(plan.workspace).unwrap_or(usize::MAX);
        let place = memory::locate("workspace", workspace, bytes)?;
        if place.kind != Kind::Device(stream.logic) {
            return invalid("the workspace is not memory of the stream's device");
        }
    }
    let places = [plan.a.place("self")?, plan.b.place("mat2")?, plan.c.place("out")?];
    if places.iter().any(|place| place.kind != Kind::Device(stream.logic)) {
        return invalid("a tensor is not in memory of the stream's device");
    }
    if !plan.repeatable {
        lock(&EXECUTORS).remove(&handle);
    }
    let (m, k, n) = (plan.a.dims[0], plan.a.dims[1], plan.b.dims[1]);
    let flops = 2 * (m as u64) * (k as u64) * (n as u64);
    let logic = stream.logic;
    let cost = config::get().cost(Path::Matmul, clock::cpu(), logic, logic, flops / 1000);
    let from = clock::host_now();
    stream.push(Box::new(move |stream| {
        stream.occupy(from, cost.stream_ns, || {
            if !places.iter().all(Place::still_there) {
                return Err(RT_DRV_INTERNAL_ERROR);
            }
            let (a, b) = (plan.a.read(&places[0]), plan.b.read(&places[1]));
            let mut c = plan.c.read(&places[2]);
            for row in 0..m {
                for column in 0..n {
                    c[plan.c.at(row, column)] =
                        (0..k).map(|i| a[plan.a.at(row, i)] * b[plan.b.at(i, column)]).sum();
                }
            }
            plan.c.write(&places[2], &c);
            Ok(())
        })
    }));
    Ok(())
}

exports! { Aclnn;
    fn aclDestroyTensor(handle: usize) {
        tensor(handle)?;
        lock(&TENSORS).remove(&handle);
        Ok(())
    }
    fn aclSetAclOpExecutorRepeatable(handle: usize) {
        let plan = executor(handle)?;
        let (a, b, c) = (plan.a.clone(), plan.b.clone(), plan.c.clone());
        let made = Executor { a, b, c, workspace: plan.workspace, repeatable: true };
        lock(&EXECUTORS).insert(handle, Arc::new(made));
        Ok(())
    }
    fn aclDestroyAclOpExecutor(handle: usize) {
        executor(handle)?;
        lock(&EXECUTORS).remove(&handle);
        Ok(())
    }
    fn aclnnMatmulGetWorkspaceSize(
        a: usize,
        b: usize,
        c: usize,
        math: i8,
        size: Out<u64>,
        out: Out<usize>,
    ) {
        plan(a, b, c, math, &size, &out)
    }
    fn aclnnMatmul(workspace: usize, size: u64, handle: usize, stream: usize) {
        execute(workspace, size, handle, stream)
    }
    fn aclnnMmGetWorkspaceSize(
        a: usize,
        b: usize,
        c: usize,
        math: i8,
        size: Out<u64>,
        out: Out<usize>,
    ) {
        plan(a, b, c, math, &size, &out)
    }
    fn aclnnMm(workspace: usize, size: u64, handle: usize, stream: usize) {
        execute(workspace, size, handle, stream)
    }
}
