//! The error type of this crate: what failed, why, and what to do about it.

use std::fmt;
use std::time::Duration;

use crate::id::DeviceId;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a backend, of the operating system or of an argument.
///
/// Every variant renders as one line that says what failed, why, and (where there is something to
/// do) what to do. The accessors give the parts that a machine wants.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call into a device backend failed.
    #[error("{0}")]
    Backend(Box<BackendError>),
    /// A call into the operating system failed.
    #[error("{0}")]
    System(Box<SystemError>),
    /// An argument cannot be used; `option` names it as the caller knows it.
    #[error("{option}: {message}")]
    Invalid {
        /// The option, field or variable at fault, for example `--cpus`.
        option: String,
        /// What is wrong with it, and where in it.
        message: String,
    },
    /// Something that was asked for does not exist on this machine.
    #[error("{what} is not available: {message}")]
    Unavailable {
        /// The backend, device or file that is missing.
        what: String,
        /// Why it is missing, and what to do.
        message: String,
    },
    /// A file or kernel interface holds something that cannot be read.
    #[error("{place}: {message}")]
    Format {
        /// The file, with a line where there is one.
        place: String,
        /// What is wrong there.
        message: String,
    },
    /// Two uses exclude each other, for example a second process-wide binding.
    #[error("{0}")]
    Busy(String),
    /// Another rank is missing, dead, or answered what it must not.
    #[error("{message}")]
    Rank {
        /// The rank that is at fault.
        rank: u32,
        /// What is the matter with it (naming the rank), and what to do.
        message: String,
        /// Set when the rank did not act within the time given.
        timed_out: bool,
    },
}

/// A failed call into a device backend, in the vendor's vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendError {
    /// The C call, for example `aclrtMemcpyAsync`.
    pub call: String,
    /// The code it returned. Codes are integers: a newer library may return unknown ones.
    pub code: i64,
    /// The code's name, or `unknown code`.
    pub name: String,
    /// The backend's own words, read at once on the failing thread.
    pub message: Option<String>,
    /// The device that the call was for.
    pub device: Option<DeviceId>,
    /// The rank that made the call, in a multi-rank run.
    pub rank: Option<u32>,
    /// What to do about it.
    pub advice: Option<String>,
    /// Set when the call did not return within its bound.
    pub timed_out: bool,
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code, name, .. } = self;
        write!(f, "{call} failed")?;
        if let Some(device) = self.device {
            write!(f, " on device {device}")?;
        }
        if let Some(rank) = self.rank {
            write!(f, " (rank {rank})")?;
        }
        write!(f, ": code {code} ({name})")?;
        if let Some(message) = &self.message {
            write!(f, ": {message}")?;
        }
        if let Some(advice) = &self.advice {
            write!(f, "; {advice}")?;
        }
        Ok(())
    }
}

/// A failed call into the operating system.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SystemError {
    /// The system call, for example `sched_setaffinity`.
    pub call: &'static str,
    /// Its errno; 0 when the call succeeded but did not do what was asked.
    pub errno: i32,
    /// What it was for, for example `binding the calling thread to CPU 3`.
    pub context: String,
    /// What to do about it.
    pub advice: Option<String>,
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} failed", self.context, self.call)?;
        if self.errno != 0 {
            write!(f, ": {}", errno_text(self.errno))?;
        }
        if let Some(advice) = &self.advice {
            write!(f, "; {advice}")?;
        }
        Ok(())
    }
}

/// Name and meaning of an errno, for example `EINVAL (22): Invalid argument`.
#[must_use]
pub fn errno_text(errno: i32) -> String {
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::ESRCH => "ESRCH",
        libc::EINTR => "EINTR",
        libc::EIO => "EIO",
        libc::E2BIG => "E2BIG",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::EEXIST => "EEXIST",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::ENOSYS => "ENOSYS",
        libc::ENOTSUP => "ENOTSUP",
        libc::ETIMEDOUT => "ETIMEDOUT",
        libc::EADDRINUSE => "EADDRINUSE",
        libc::EADDRNOTAVAIL => "EADDRNOTAVAIL",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::ELOOP => "ELOOP",
        libc::ENOTDIR => "ENOTDIR",
        _ => "errno",
    };
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    format!("{name} ({errno}): {text}")
}

impl Error {
    /// An unusable argument.
    pub fn invalid(option: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { option: option.into(), message: message.into() }
    }

    /// A file or kernel interface with unreadable content.
    pub fn format(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Format { place: place.into(), message: message.into() }
    }

    /// A failed system call with its errno.
    pub fn system(call: &'static str, errno: i32, context: impl Into<String>) -> Self {
        Self::System(Box::new(SystemError { call, errno, context: context.into(), advice: None }))
    }

    /// A failed system call, with the errno of the calling thread's last one.
    pub fn last_os(call: &'static str, context: impl Into<String>) -> Self {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or_default();
        Self::system(call, errno, context)
    }

    /// The same error with what to do about it.
    #[must_use]
    pub fn with_advice(mut self, text: impl Into<String>) -> Self {
        match &mut self {
            Self::Backend(error) => error.advice = Some(text.into()),
            Self::System(error) => error.advice = Some(text.into()),
            _ => {}
        }
        self
    }

    /// A rank that is at fault.
    pub fn rank_fault(rank: u32, message: impl Into<String>) -> Self {
        Self::Rank { rank, message: format!("rank {rank}: {}", message.into()), timed_out: false }
    }

    /// A rank that was waited for in vain.
    #[must_use]
    pub fn rank_timeout(rank: u32, bound: Duration) -> Self {
        let message = format!(
            "rank {rank}: timeout: nothing came for {} ms; look for a hung or stopped process, or raise \
             --timeout",
            bound.as_millis()
        );
        Self::Rank { rank, message, timed_out: true }
    }

    /// A call that did not finish within its bound.
    #[must_use]
    pub fn timeout(call: &str, bound: Duration, device: Option<DeviceId>) -> Self {
        Self::Backend(Box::new(BackendError {
            call: call.to_owned(),
            code: i64::from(libc::ETIMEDOUT),
            name: "timeout".to_owned(),
            message: Some(format!("not finished after {} ms", bound.as_millis())),
            device,
            rank: None,
            advice: Some("look for a hung device or raise --timeout".to_owned()),
            timed_out: true,
        }))
    }

    /// The kind of error as a stable word for machine-readable output.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Backend(error) if error.timed_out => "timeout",
            Self::Backend(_) => "backend",
            Self::System(_) => "system",
            Self::Invalid { .. } => "invalid",
            Self::Unavailable { .. } => "unavailable",
            Self::Format { .. } => "format",
            Self::Busy(_) => "busy",
            Self::Rank { timed_out: true, .. } => "timeout",
            Self::Rank { .. } => "rank",
        }
    }

    /// The C or system call that failed, where one did.
    #[must_use]
    pub fn call(&self) -> Option<&str> {
        match self {
            Self::Backend(error) => Some(&error.call),
            Self::System(error) => Some(error.call),
            _ => None,
        }
    }

    /// The backend's code or the errno.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        match self {
            Self::Backend(error) => Some(error.code),
            Self::System(error) => Some(i64::from(error.errno)),
            _ => None,
        }
    }

    /// The device that the failed call was for.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        match self {
            Self::Backend(error) => error.device,
            _ => None,
        }
    }

    /// The rank that made the failed call, or that is missing.
    #[must_use]
    pub fn rank(&self) -> Option<u32> {
        match self {
            Self::Backend(error) => error.rank,
            Self::Rank { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        match self {
            Self::Backend(error) => error.advice.as_deref(),
            Self::System(error) => error.advice.as_deref(),
            _ => None,
        }
    }
}
