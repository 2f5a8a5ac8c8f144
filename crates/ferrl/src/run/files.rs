//! The one way to the file system for everything a run writes, with faults on demand.
//!
//! Each call that changes the disk is one operation. A fault strikes at the n-th of them, so that a test can break a
//! save at every place where it can break.

use ferrl_engine::checkpoint::FILE_LIMIT;
use ferrl_engine::{Class, Error, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The exit code of a process that a fault ended.
pub const FAULT_EXIT: i32 = 86;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The process ends; a write is half done by then.
    Exit,
    /// The device reports an error.
    Eio,
    /// A write takes only half of its bytes and says so; other operations report an error.
    Short,
    /// The disk is full; a write is half done by then.
    Enospc,
}

/// One thing that goes wrong at a given operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileFault {
    /// Which operation, counted from 1.
    pub at: u64,
    pub kind: FaultKind,
    /// Whether it happens at every later operation too.
    pub lasting: bool,
}

impl FileFault {
    /// Reads `<n>:<kind>` with kind `exit`, `eio`, `short` or `enospc`; a `+` at the end makes it lasting.
    pub fn parse(text: &str) -> Result<FileFault> {
        let (plain, lasting) = text.strip_suffix('+').map_or((text, false), |t| (t, true));
        let read = || {
            let (at, kind) = plain.split_once(':')?;
            let kind = match kind {
                "exit" => FaultKind::Exit,
                "eio" => FaultKind::Eio,
                "short" => FaultKind::Short,
                "enospc" => FaultKind::Enospc,
                _ => return None,
            };
            Some(FileFault { at: at.parse().ok()?, kind, lasting })
        };
        read().ok_or_else(|| {
            Error::usage(format!("{text:?} is no fault"))
                .at("FERRL_FAULT")
                .fix("<n>:<exit|eio|short|enospc>, such as 3:eio")
        })
    }
}

/// Performs, counts and, where asked to, breaks file operations. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct Files {
    done: Arc<AtomicU64>,
    fault: Option<FileFault>,
}

impl Files {
    /// Without faults; debug builds take one from `FERRL_FAULT` where it is set.
    pub fn new() -> Result<Files> {
        match std::env::var("FERRL_FAULT") {
            Ok(text) if cfg!(debug_assertions) => Ok(Files::with_faults(Some(FileFault::parse(&text)?))),
            _ => Ok(Files::default()),
        }
    }

    /// With this fault, in any build.
    pub fn with_faults(fault: Option<FileFault>) -> Files {
        Files { done: Arc::default(), fault }
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Counts an operation; a fault that strikes here.
    fn next(&self) -> Option<FaultKind> {
        let number = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let fault = self.fault?;
        (number == fault.at || fault.lasting && number > fault.at).then_some(fault.kind)
    }

    /// One operation that is not a write.
    fn gate(&self) -> io::Result<()> {
        match self.next() {
            None => Ok(()),
            Some(kind) => Err(strike(kind)),
        }
    }

    /// A place where something outside of this shim is about to write `path`.
    pub fn point(&self, path: &Path) -> Result<()> {
        self.gate().map_err(|e| error("cannot write", path, &e))
    }

    /// Makes a directory that must not be there yet.
    pub fn create_dir(&self, path: &Path) -> Result<()> {
        let made = self.gate().and_then(|()| fs::create_dir(path));
        made.map_err(|e| error("cannot create the directory", path, &e))
    }

    /// Makes a directory and those above it, where they are missing.
    pub fn create_dir_all(&self, path: &Path) -> Result<()> {
        let made = self.gate().and_then(|()| fs::create_dir_all(path));
        made.map_err(|e| error("cannot create the directory", path, &e))
    }

    /// A new, empty file; what was there is gone.
    pub fn create(&self, path: &Path) -> Result<OutFile> {
        self.open(path, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// A file to write at the end of.
    pub fn append(&self, path: &Path) -> Result<OutFile> {
        self.open(path, OpenOptions::new().append(true).create(true))
    }

    fn open(&self, path: &Path, how: &OpenOptions) -> Result<OutFile> {
        let file = self.gate().and_then(|()| how.open(path));
        let file = file.map_err(|e| error("cannot open for writing", path, &e))?;
        Ok(OutFile { file, path: path.into(), files: self.clone() })
    }

    /// A file with these bytes, on disk when this returns, whole or not at all.
    pub fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".tmp");
        let aside = path.with_file_name(name);
        let mut file = self.create(&aside)?;
        file.put(bytes)?;
        file.sync()?;
        drop(file);
        self.rename(&aside, path)?;
        self.sync_dir(path.parent().unwrap_or(Path::new(".")))
    }

    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let done = self.gate().and_then(|()| fs::rename(from, to));
        done.map_err(|e| error(&format!("cannot rename to {}", to.display()), from, &e))
    }

    /// Waits until the entries of a directory are on disk.
    pub fn sync_dir(&self, path: &Path) -> Result<()> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let done = self.gate().and_then(|()| File::open(path)?.sync_all());
        done.map_err(|e| error("cannot sync", path, &e))
    }

    pub fn remove_file(&self, path: &Path) -> Result<()> {
        let done = self.gate().and_then(|()| fs::remove_file(path));
        done.map_err(|e| error("cannot remove", path, &e))
    }

    /// Removes a directory and all within, file by file; links are removed, not followed.
    pub fn remove_dir_all(&self, path: &Path) -> Result<()> {
        let fail = |e: io::Error| error("cannot remove", path, &e);
        for entry in fs::read_dir(path).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            match entry.file_type().map_err(fail)?.is_dir() {
                true => self.remove_dir_all(&entry.path())?,
                false => self.remove_file(&entry.path())?,
            }
        }
        let done = self.gate().and_then(|()| fs::remove_dir(path));
        done.map_err(|e| error("cannot remove", path, &e))
    }

    pub fn truncate(&self, path: &Path, len: u64) -> Result<()> {
        let cut = || OpenOptions::new().write(true).open(path)?.set_len(len);
        self.gate().and_then(|()| cut()).map_err(|e| error("cannot truncate", path, &e))
    }
}

/// A file being written.
#[derive(Debug)]
pub struct OutFile {
    file: File,
    path: PathBuf,
    files: Files,
}

impl OutFile {
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes).map_err(|e| error("cannot write", &self.path, &e))
    }

    /// Waits until the bytes are on disk.
    pub fn sync(&self) -> Result<()> {
        let done = self.files.gate().and_then(|()| self.file.sync_all());
        done.map_err(|e| error("cannot finish writing", &self.path, &e))
    }
}

impl Write for OutFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(kind) = self.files.next() else { return self.file.write(bytes) };
        let half = &bytes[..bytes.len() / 2];
        match kind {
            FaultKind::Eio => Err(strike(kind)),
            FaultKind::Short if !half.is_empty() => self.file.write(half),
            FaultKind::Short => self.file.write(bytes),
            FaultKind::Exit | FaultKind::Enospc => {
                self.file.write_all(half)?;
                Err(strike(kind))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // nothing is held back
    }
}

/// The error of a fault, unless it ends the process.
fn strike(kind: FaultKind) -> io::Error {
    match kind {
        FaultKind::Exit => std::process::exit(FAULT_EXIT),
        FaultKind::Eio | FaultKind::Short => io::Error::other("input/output error (injected)"),
        FaultKind::Enospc => io::Error::new(io::ErrorKind::StorageFull, "no space left on device (injected)"),
    }
}

/// An input or output error, in words, with its file.
pub(crate) fn error(what: &str, path: &Path, e: &io::Error) -> Error {
    use io::ErrorKind::{
        AlreadyExists, FileTooLarge, NotADirectory, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem,
        StorageFull,
    };
    let full = matches!(e.kind(), StorageFull | QuotaExceeded | FileTooLarge);
    let class = if full { Class::Resource } else { Class::Data };
    let error = Error::new(class, format!("{what}: {e}")).at(path.display());
    match e.kind() {
        FileTooLarge => error.fix(FILE_LIMIT),
        _ if full => error.fix("free some disk space or choose another disk for the runs"),
        PermissionDenied => error.fix("check who owns the file and its permissions"),
        ReadOnlyFilesystem => error.fix("choose a directory that can be written"),
        AlreadyExists | NotADirectory => {
            error.fix("there is a file with the name of this folder: choose another path, or move the file")
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_from_text() {
        let at = |at, kind, lasting| FileFault { at, kind, lasting };
        assert_eq!(FileFault::parse("3:eio").unwrap(), at(3, FaultKind::Eio, false));
        assert_eq!(FileFault::parse("12:enospc+").unwrap(), at(12, FaultKind::Enospc, true));
        for bad in ["", "3", "3:", ":eio", "x:eio", "3:fire", "3:eio++"] {
            assert!(FileFault::parse(bad).is_err(), "{bad}");
        }
    }
}
