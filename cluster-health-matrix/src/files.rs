//! Opening files of a folder whose content somebody else may have made.
//!
//! A symbolic link in it could lead anywhere: what is read would be told, and what is written would
//! replace a file of the user's. A pipe would never end. Only regular files of the folder itself are
//! opened; that the folder may be a link is the caller's business.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file; the options say what for.
///
/// # Errors
/// When it cannot be opened, is a symbolic link, or no regular file.
pub(crate) fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // Opening a pipe would wait for its other side.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let refused = |what: &str| {
        let message = format!("{what}; a result folder holds regular files of its own");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    match options.custom_flags(flags).open(path) {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(refused("no regular file")),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            Err(refused("a symbolic link"))
        }
        Err(error) => Err(error),
    }
}

/// Opens a file to read it.
///
/// # Errors
/// As [`open_with`].
pub(crate) fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Creates a file or empties it.
///
/// # Errors
/// As [`open_with`].
pub(crate) fn create(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().write(true).create(true).truncate(true), path)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_and_what_is_no_file_are_refused() {
        let outside = tempfile::tempdir().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (secret, link) = (outside.path().join("secret"), dir.path().join("run.json"));
        fs::write(&secret, "keep").unwrap();
        symlink(&secret, &link).unwrap();
        for error in [open(&link).unwrap_err(), create(&link).unwrap_err()] {
            assert!(error.to_string().starts_with("a symbolic link; "), "{error}");
        }
        // A link to nothing is no way to make a file elsewhere.
        fs::remove_file(&secret).unwrap();
        assert!(create(&link).is_err() && !secret.exists());

        let pipe = dir.path().join("pipe");
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        );
        assert_eq!(made, Ok(()));
        let error = open(&pipe).unwrap_err().to_string();
        assert!(error.starts_with("no regular file; "), "{error}");
        assert!(create(&pipe).is_err() && open(dir.path()).is_err());

        let file = dir.path().join("file");
        create(&file).unwrap();
        assert!(open(&file).is_ok());
        assert_eq!(open(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
