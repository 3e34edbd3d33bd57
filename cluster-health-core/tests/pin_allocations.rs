//! Moving a bound thread must not allocate, because it happens between timed transfers.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use cluster_health_core::affinity::{BindScope, PinGuard, thread_affinity};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY:
// - every call is passed on unchanged to the system's allocator, which keeps the contract;
// - counting neither allocates nor unwinds: the cell is constant-initialised and has no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY:
        // - the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY:
        // - `memory` came from `alloc` above, so from `System`, with this `layout`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn moving_a_thread_does_not_allocate() {
    let cpus = thread_affinity().unwrap();
    let mut guard = PinGuard::bind(cpus.first().unwrap(), BindScope::Thread).unwrap();
    cpus.iter().for_each(|cpu| guard.move_to(cpu).unwrap());
    let before = ALLOCATIONS.get();
    assert!(before > 0, "nothing is counted");
    for _ in 0..100 {
        cpus.iter().for_each(|cpu| guard.move_to(cpu).unwrap());
    }
    assert_eq!(ALLOCATIONS.get(), before);
}
