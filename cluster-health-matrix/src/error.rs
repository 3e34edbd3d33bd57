//! The error type of this crate: what failed, why, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a measurement, of a result folder or of an argument.
///
/// Every variant renders as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A backend, the operating system or an argument, as the core crate reports it.
    #[error(transparent)]
    Core(#[from] cluster_health_core::Error),
    /// A file or folder could not be used.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done, for example `writing`.
        action: String,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file holds something that cannot be read.
    #[error("{place}: {message}")]
    Format {
        /// The file, with the line, cell or record.
        place: String,
        /// What is wrong there.
        message: String,
    },
    /// An argument cannot be used; `option` names it as the caller knows it.
    #[error("{option}: {message}")]
    Invalid {
        /// The option or field at fault, for example `--size`.
        option: String,
        /// What is wrong with it, and what would be right.
        message: String,
    },
    /// A result folder is in use by somebody else.
    #[error("{0}")]
    Busy(String),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// An output could not be made.
    #[error("{what}: {message}")]
    Output {
        /// The output, for example `matrices.xlsx`.
        what: String,
        /// Why it could not be made.
        message: String,
    },
}

impl Error {
    /// A file or folder that could not be used: `action` is a participle such as `reading`.
    pub fn io(action: impl Into<String>, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { action: action.into(), path: path.into(), source }
    }

    /// An unusable argument.
    pub fn invalid(option: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { option: option.into(), message: message.into() }
    }

    /// The error of a value's own text, under the name of the option or field that it stands in.
    pub fn named(option: impl Into<String>, error: cluster_health_core::Error) -> Self {
        match error {
            cluster_health_core::Error::Invalid { message, .. } => Self::invalid(option, message),
            other => other.into(),
        }
    }

    /// Unreadable content of a file.
    pub fn format(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Format { place: place.into(), message: message.into() }
    }

    /// An output that could not be made.
    pub fn output(what: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Output { what: what.into(), message: message.into() }
    }

    /// The kind of error as a stable word for machine-readable output.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Core(error) => error.kind(),
            Self::Io { .. } => "io",
            Self::Format { .. } => "format",
            Self::Invalid { .. } => "invalid",
            Self::Busy(_) => "busy",
            Self::Cancelled => "cancelled",
            Self::Output { .. } => "output",
        }
    }

    /// True when the caller asked for something that cannot be done as asked, so that repeating
    /// the call unchanged is pointless.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Invalid { .. } => true,
            Self::Core(error) => error.kind() == "invalid",
            _ => false,
        }
    }
}

/// A message with `rank0_cpus` where it says `--rank0-cpus`: errors name the options of the command line,
/// which are fields or arguments elsewhere.
#[must_use]
pub fn as_fields(text: &str) -> String {
    let mut parts = text.split("--");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_name = !plain.ends_with(|c: char| c.is_alphanumeric() || "-_./".contains(c))
            && part.starts_with(|c: char| c.is_ascii_lowercase());
        if !is_name {
            plain.push_str("--");
            plain.push_str(part);
            continue;
        }
        let end = part.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        let (name, rest) = part.split_at(end.unwrap_or(part.len()));
        plain.push_str(&name.replace('-', "_"));
        plain.push_str(rest);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_fields_elsewhere() {
        let text = "--rank0-cpus: 3 is not in (--cpus); use --resume, see runs/a--b and x -- y";
        let fields = "rank0_cpus: 3 is not in (cpus); use resume, see runs/a--b and x -- y";
        assert_eq!(as_fields(text), fields);
    }

    #[test]
    fn errors_render_as_one_line_with_their_parts() {
        let denied = io::Error::new(io::ErrorKind::PermissionDenied, "permission denied");
        let cases = [
            (
                Error::io("writing", "out/run.json", denied),
                "io",
                "writing out/run.json: permission denied",
            ),
            (Error::format("a.csv:3", "no number"), "format", "a.csv:3: no number"),
            (Error::invalid("--size", "is missing"), "invalid", "--size: is missing"),
            (Error::output("x.npy", "too large"), "output", "x.npy: too large"),
            (Error::Cancelled, "cancelled", "cancelled"),
        ];
        for (error, kind, text) in cases {
            assert_eq!((error.kind(), error.to_string().as_str()), (kind, text));
            assert_eq!(error.is_usage(), kind == "invalid", "{error}");
        }
    }

    #[test]
    fn core_errors_keep_their_kind() {
        let error = Error::from(cluster_health_core::Error::invalid("--cpus", "'x': not a number"));
        assert_eq!(error.kind(), "invalid");
        assert!(error.is_usage());
        assert_eq!(error.to_string(), "--cpus: 'x': not a number");
    }
}
