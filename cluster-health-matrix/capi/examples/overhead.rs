//! What the way through C costs: a sweep of two CPUs, one device and three sizes on this machine's
//! memory, in turns through the shared library and from Rust.
//!
//! `cargo run --release -p cluster-health-capi --example overhead -- 260`
//!
//! Prints the median of the ratios of neighbours, C ÷ Rust, with its 95 % interval (order
//! statistics): of time, and of the thread's time on a CPU, which is what to look at where the
//! machine has other work. The way through C has its plan from JSON and reads its cells through the header's
//! view; that of Rust has a builder and the array.
#![allow(clippy::print_stdout, reason = "an example prints its result")]

use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::ptr;
use std::time::Instant;

use cluster_health_core::{ByteSize, Machine};
use cluster_health_matrix::plan::{H2dPlan, Order};
use cluster_health_matrix::sweep;
use libloading::{Library, Symbol};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// In this order, with this warm-up, both ways do the same work: nothing of it depends on rates.
const PLAN: &str = r#"{"sweep": "h2d", "cpus": "0,1", "devices": "0", "order": "sequential",
                       "sizes": ["1MiB", "4MiB", "16MiB"], "repeats": 3, "warmup": 1}"#;

/// The start of `clh_matrix`.
#[repr(C)]
struct View {
    words: [*const c_char; 3],
    counts: [usize; 3],
    bytes: *const u64,
    ids: [*const u32; 2],
    gbps: *const f64,
    rest: [*const c_void; 4],
}

type Open = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type NewPlan = unsafe extern "C" fn(*const c_void, *const c_char, *mut *mut c_void) -> c_int;
type Sweep = unsafe extern "C" fn(*const c_void, *const c_void, *mut *mut c_void) -> c_int;
type Matrix = unsafe extern "C" fn(*const c_void, usize, *mut View) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void);
type Message = unsafe extern "C" fn() -> *const c_char;

struct Calls<'a> {
    plan: Symbol<'a, NewPlan>,
    sweep: Symbol<'a, Sweep>,
    matrix: Symbol<'a, Matrix>,
    free_result: Symbol<'a, Free>,
    free_plan: Symbol<'a, Free>,
    message: Symbol<'a, Message>,
}

impl Calls<'_> {
    fn check(&self, status: c_int) -> Outcome<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY:
        // * A function of the header, without arguments.
        let message = unsafe { (self.message)() };
        // SAFETY:
        // * It returns a C string that lives until this thread's next failing call.
        let message = unsafe { CStr::from_ptr(message) };
        Err(message.to_string_lossy().into_owned().into())
    }

    /// Sum of the rates, so that they were read.
    fn sweep(&self, machine: *const c_void, json: &CString) -> Outcome<f64> {
        let (mut plan, mut result) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY:
        // * The machine is open, the text a C string, the place this variable.
        self.check(unsafe { (self.plan)(machine, json.as_ptr(), &raw mut plan) })?;
        // SAFETY:
        // * The plan was made above, options may be NULL, the place is this variable.
        self.check(unsafe { (self.sweep)(plan, ptr::null(), &raw mut result) })?;
        let mut view = View {
            words: [ptr::null(); 3],
            counts: [0; 3],
            bytes: ptr::null(),
            ids: [ptr::null(); 2],
            gbps: ptr::null(),
            rest: [ptr::null(); 4],
        };
        // SAFETY:
        // * The result was made above; `View` is laid out as the header's struct.
        self.check(unsafe { (self.matrix)(result, 0, &raw mut view) })?;
        let cells = view.counts.iter().product();
        let sum = (0..cells).map(|cell| {
            // SAFETY:
            // * The header promises so many cells.
            let place = unsafe { view.gbps.add(cell) };
            // SAFETY:
            // * They can be read until the result is freed below.
            unsafe { *place }
        });
        let sum = sum.sum();
        // SAFETY:
        // * Made above, given back once.
        unsafe { (self.free_result)(result) };
        // SAFETY:
        // * Made above, given back once.
        unsafe { (self.free_plan)(plan) };
        Ok(sum)
    }
}

fn from_rust(machine: &Machine) -> Outcome<f64> {
    let sizes = [1, 4, 16].map(ByteSize::mib);
    let plan = H2dPlan::builder().cpus([0, 1]).devices([0]).sizes(sizes).repeats(3);
    let plan = plan.order(Order::Sequential).warmup(Some(1));
    let result = sweep::h2d(machine, &plan.build(machine)?, &mut ())?;
    Ok(result.gbps().sum())
}

/// Nanoseconds that this thread had a CPU.
fn cpu_ns() -> Outcome<f64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat")?;
    let first = text.split_whitespace().next();
    Ok(first.ok_or("schedstat is empty")?.parse()?)
}

fn print_median(what: &str, mut ratios: Vec<f64>) {
    ratios.sort_by(f64::total_cmp);
    #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
    let count = ratios.len() as f64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a place in the list, rounded down and not below 0"
    )]
    let below = (count / 2.0 - 0.98 * count.sqrt()).max(0.0) as usize;
    let pairs = ratios.len();
    let (median, low, high) = (ratios[pairs / 2], ratios[below], ratios[pairs - 1 - below]);
    println!("{what}, C / Rust: {median:.4} ({low:.4} to {high:.4}), {pairs} pairs");
}

fn main() -> Outcome<()> {
    let pairs = std::env::args().nth(1).map_or(Ok(20), |pairs| pairs.parse::<usize>())?;
    let program = std::env::current_exe()?;
    let folder = program.ancestors().nth(2).ok_or("no folder above this program")?;
    // SAFETY:
    // * Its initialisers are those of Rust's standard library.
    let library = unsafe { Library::new(folder.join("deps/libcluster_health.so")) }?;
    macro_rules! symbol {
        ($name:literal) => {
            // SAFETY:
            // * Its type where it goes to is that of the header.
            unsafe { library.get($name) }?
        };
    }
    let calls = Calls {
        plan: symbol!("clh_plan_from_json"),
        sweep: symbol!("clh_sweep"),
        matrix: symbol!("clh_result_matrix"),
        free_result: symbol!("clh_result_free"),
        free_plan: symbol!("clh_plan_free"),
        message: symbol!("clh_last_error"),
    };
    let open: Symbol<'_, Open> = symbol!("clh_machine_open");
    let free_machine: Symbol<'_, Free> = symbol!("clh_machine_free");

    let machine = Machine::host()?;
    let mut of_c = ptr::null_mut();
    // SAFETY:
    // * The name is a C string, the place this variable.
    calls.check(unsafe { open(c"host".as_ptr(), &raw mut of_c) })?;
    let json = CString::new(PLAN)?;

    let mut ratios = [Vec::new(), Vec::new()];
    for pair in 0..=pairs.max(1) {
        let mut spent = [[0.0; 2]; 2];
        // Who comes first alternates: the second of two neighbours finds warmer caches.
        for turn in [pair % 2, 1 - pair % 2] {
            let (start, cpu) = (Instant::now(), cpu_ns()?);
            let sum = if turn == 0 { calls.sweep(of_c, &json)? } else { from_rust(&machine)? };
            spent[0][turn] = start.elapsed().as_secs_f64();
            spent[1][turn] = cpu_ns()? - cpu;
            if sum.is_nan() {
                return Err("a cell was not measured".into());
            }
        }
        // The first pair takes the census.
        if pair > 0 {
            for (ratios, [of_c, of_rust]) in ratios.iter_mut().zip(spent) {
                ratios.push(of_c / of_rust);
            }
        }
    }
    // SAFETY:
    // * Opened above, given back once.
    unsafe { free_machine(of_c) };
    for (what, ratios) in ["time", "time on a CPU"].into_iter().zip(ratios) {
        print_median(what, ratios);
    }
    Ok(())
}
