//! The notes as in `cluster-health-core`, with loom's atomics.

pub(crate) mod atomic {
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
}

#[path = "../../cluster-health-core/src/watch/note.rs"]
#[allow(dead_code, reason = "made for its crate")]
pub(crate) mod note;
