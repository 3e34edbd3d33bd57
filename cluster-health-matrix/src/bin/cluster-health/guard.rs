//! Ends this process when a driver does not return from a call.

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cluster_health_core::watch::{Overdue, Watchdog};
use cluster_health_matrix::report::{Report, ReportOptions};
use cluster_health_matrix::{Error, Result, session};

use crate::args::BackendArg;
use crate::{USAGE, print_error};

/// A rank that is inside a call says so before the others' time is over, so that they can name it.
const SHARE: f64 = 0.9;
/// So long may the outputs of what was measured take: all ends within a second after the timeout.
const OUTPUTS: Duration = Duration::from_millis(700);

/// What the end of this process has to tell.
#[derive(Debug)]
struct About {
    rank: Option<u32>,
    /// The result folder that this process writes, and how a sweep's outputs look.
    dir: Option<(PathBuf, Option<ReportOptions>)>,
    json: bool,
}

static ABOUT: Mutex<About> = Mutex::new(About { rank: None, dir: None, json: false });

fn about(change: impl FnOnce(&mut About)) {
    change(&mut ABOUT.lock().unwrap_or_else(PoisonError::into_inner));
}

/// This process is one of several ranks.
pub(crate) fn is_rank(rank: u32) {
    about(|about| about.rank = Some(rank));
}

/// This process is about to write this folder; of a sweep if it has `options`.
pub(crate) fn records(dir: &Path, options: Option<ReportOptions>) {
    about(|about| about.dir = Some((dir.to_owned(), options)));
}

/// Watches the calls into the backend, if it is one that could keep a thread.
pub(crate) fn watch(
    backend: &BackendArg,
    timeout: Duration,
    json: bool,
) -> Result<Option<Watchdog>> {
    about(|about| about.json = json);
    if !["auto", "ascend"].contains(&backend.backend.as_str()) {
        return Ok(None);
    }
    Ok(Some(Watchdog::start(timeout.mul_f64(SHARE), end)?))
}

fn end(overdue: &Overdue) {
    about(|about| {
        let error = Error::Core(overdue.error(about.rank));
        log!("cluster-health: {error}");
        if let Some((dir, options)) = &about.dir {
            match session::abandon(dir, &error.to_string()) {
                Ok(()) => log!(
                    "what was measured is in {}: {} shows it, --resume goes on",
                    dir.display(),
                    if options.is_some_and(|options| write_outputs(dir, options)) {
                        "report.md"
                    } else {
                        "cluster-health report"
                    }
                ),
                Err(error) => log!("cluster-health: {error}"),
            }
        }
        if about.json {
            print_error(&error);
        }
        // Without the functions that libraries registered for it: they may wait for the same.
        signal_hook::low_level::exit(i32::from(USAGE));
    });
}

/// Shows what was measured, if that does not take long: on a thread of its own, as a disk may hang,
/// too. Files are replaced whole, so the end of the process leaves none half written.
fn write_outputs(dir: &Path, options: ReportOptions) -> bool {
    let (sender, written) = channel();
    let dir = dir.to_owned();
    let work = move || {
        let report = Report::read(&dir).and_then(|mut report| report.write(&dir, &options));
        sender.send(report.is_ok()).ok();
    };
    thread::Builder::new().spawn(work).is_ok() && written.recv_timeout(OUTPUTS) == Ok(true)
}
