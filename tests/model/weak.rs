//! The notes with atomics that take every order for relaxed.

pub(crate) mod atomic {
    use loom::sync::atomic;
    pub(crate) use loom::sync::atomic::Ordering;

    pub(crate) struct AtomicU64(atomic::AtomicU64);

    impl AtomicU64 {
        pub(crate) fn new(value: u64) -> Self {
            Self(atomic::AtomicU64::new(value))
        }

        pub(crate) fn load(&self, _order: Ordering) -> u64 {
            self.0.load(Ordering::Relaxed)
        }

        pub(crate) fn store(&self, value: u64, _order: Ordering) {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    pub(crate) struct AtomicPtr<T>(atomic::AtomicPtr<T>);

    impl<T> AtomicPtr<T> {
        pub(crate) fn new(value: *mut T) -> Self {
            Self(atomic::AtomicPtr::new(value))
        }

        pub(crate) fn load(&self, _order: Ordering) -> *mut T {
            self.0.load(Ordering::Relaxed)
        }

        pub(crate) fn store(&self, value: *mut T, _order: Ordering) {
            self.0.store(value, Ordering::Relaxed);
        }
    }
}

#[path = "../../cluster-health-core/src/watch/note.rs"]
#[allow(dead_code, reason = "made for its crate")]
pub(crate) mod note;
