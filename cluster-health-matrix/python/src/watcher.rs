//! What Python hears of a sweep on its way, and how it stops one.

use std::cell::{Cell, OnceCell};
use std::time::{Duration, Instant};

use cluster_health_matrix::{Observer, Progress};
use pyo3::prelude::*;

/// Taking the interpreter can mean waiting for another thread to give it away: at most once in this
/// time.
const GAP: Duration = Duration::from_millis(50);

/// A sweep that stays at one CPU for longer than this is looked after between its points, too.
const LONGEST_DEAF: Duration = Duration::from_secs(1);

/// Stops sweeps from another thread: they end before their next point and return what they have.
#[pyclass(frozen, module = "cluster_health")]
#[derive(Debug, Default)]
pub(crate) struct CancelToken(cluster_health_matrix::CancelToken);

#[pymethods]
impl CancelToken {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Asks for the end; may be called from any thread and more than once.
    fn cancel(&self) {
        self.0.cancel();
    }

    /// True after `cancel()`.
    #[getter]
    fn cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

impl CancelToken {
    pub(crate) fn token(&self) -> cluster_health_matrix::CancelToken {
        self.0.clone()
    }
}

/// Follows a sweep that runs without the interpreter, and takes that between visits only.
pub(crate) struct Watcher {
    progress: Option<Py<PyAny>>,
    cancel: cluster_health_matrix::CancelToken,
    looked: Cell<Instant>,
    /// What a signal handler or the callback raised: it ends the sweep and becomes its result.
    raised: OnceCell<PyErr>,
}

impl Watcher {
    pub(crate) fn new(
        progress: Option<Py<PyAny>>,
        cancel: cluster_health_matrix::CancelToken,
    ) -> Self {
        Self { progress, cancel, looked: Cell::new(Instant::now()), raised: OnceCell::new() }
    }

    /// The exception that ended the sweep.
    pub(crate) fn into_raised(self) -> Option<PyErr> {
        self.raised.into_inner()
    }

    fn look(&self, progress: Option<&Progress>) {
        self.looked.set(Instant::now());
        let seen = Python::try_attach(|py| {
            py.check_signals()?;
            if let (Some(callback), Some(progress)) = (&self.progress, progress) {
                callback.call1(py, (progress.done, progress.total))?;
            }
            Ok(())
        });
        match seen {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                self.raised.set(error).ok();
            }
            // The interpreter is ending: nobody waits for the result.
            None => self.cancel.cancel(),
        }
    }
}

impl Observer for Watcher {
    fn between_visits(&mut self, progress: &Progress) {
        let is_last = progress.done >= progress.total;
        if self.raised.get().is_none() && (is_last || self.looked.get().elapsed() >= GAP) {
            self.look(Some(progress));
        }
    }

    fn is_cancelled(&self) -> bool {
        if self.raised.get().is_none() && self.looked.get().elapsed() >= LONGEST_DEAF {
            self.look(None);
        }
        self.raised.get().is_some() || self.cancel.is_cancelled()
    }
}
