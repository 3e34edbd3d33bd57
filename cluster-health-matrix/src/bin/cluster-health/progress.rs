//! The progress bar: drawn only when the measuring thread is about to leave its core anyway.

use std::io::IsTerminal as _;

use cluster_health_matrix::samples::{PointStatus, Sample};
use cluster_health_matrix::{CancelToken, Observer, Progress, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Draws on stderr when that is a terminal, and passes on Ctrl-C.
pub(crate) struct Terminal {
    bar: Option<ProgressBar>,
    cancel: CancelToken,
    not_measured: u64,
}

impl Terminal {
    pub(crate) fn new(quiet: bool, cancel: CancelToken) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            // No ticker thread: it would draw from whatever core the kernel gives it.
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(5));
            let style = "{bar:32} {pos}/{len} points · {msg} · {elapsed} of about {duration}";
            ProgressStyle::with_template(style).map(|style| bar.set_style(style)).ok();
            bar
        });
        Self { bar, cancel, not_measured: 0 }
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Observer for Terminal {
    fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.not_measured += u64::from(sample.status != PointStatus::Measured);
        Ok(())
    }

    fn between_visits(&mut self, progress: &Progress) {
        let Some(bar) = &self.bar else { return };
        bar.set_length(progress.total.max(progress.done));
        #[allow(clippy::cast_precision_loss, reason = "shown with two digits")]
        let rate = progress.bytes as f64 / (progress.elapsed_ns.max(1)) as f64;
        let holes = match self.not_measured {
            0 => String::new(),
            count => format!(", {count} not measured"),
        };
        bar.set_message(format!("{rate:.2} GB/s over all{holes}"));
        bar.set_position(progress.done);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}
