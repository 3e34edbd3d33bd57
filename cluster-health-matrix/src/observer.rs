//! What a sweep tells its caller while it runs, and how the caller stops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::samples::Sample;

/// How far a sweep is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Points done, those of an interrupted run before included.
    pub done: u64,
    /// Points known to be needed; `--ci` may add some.
    pub total: u64,
    /// Bytes moved by timed iterations and warm-ups in this call.
    pub bytes: u64,
    /// The machine's clock since the first bind of this call, nanoseconds.
    pub elapsed_ns: u64,
}

/// Follows a sweep. All methods run on the measuring thread, never inside a timed region.
pub trait Observer {
    /// Called after each point, before the next one is begun. Must be quick: it runs on the core
    /// that is being measured.
    ///
    /// # Errors
    /// An error ends the sweep and becomes its result.
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        let _ = sample;
        Ok(())
    }

    /// Called when the thread is about to be bound to another CPU: the place to draw progress.
    fn between_visits(&mut self, progress: &Progress) {
        let _ = progress;
    }

    /// Asked before each point; true ends the sweep with what was measured.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Observes nothing.
impl Observer for () {}

/// A flag to stop a sweep from another thread or a signal handler.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A token that is not cancelled.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks for the end; the sweep stops before its next point.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// True after [`cancel`](Self::cancel).
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for signal handlers that set one.
    #[must_use]
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// A token alone observes nothing but its own cancellation.
impl Observer for CancelToken {
    fn is_cancelled(&self) -> bool {
        Self::is_cancelled(self)
    }
}
