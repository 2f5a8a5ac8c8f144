//! Arrow IPC: the file format, and the stream format that `datasets` saves to disk.

use std::fs::File;
use std::path::Path;

use arrow_ipc::reader::{FileReader, StreamReader};
use ferrl_engine::{Error, Result};

use super::{Each, FileFormat, columns, unreadable};

/// Arrow IPC with a footer.
pub struct ArrowFile;
/// Arrow IPC as a stream of messages.
pub struct ArrowStream;

impl FileFormat for ArrowFile {
    fn name(&self) -> &'static str {
        "Arrow file"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["feather"]
    }
    fn begins(&self, head: &[u8]) -> bool {
        head.starts_with(b"ARROW1")
    }
    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let file = File::open(path).map_err(|e| unreadable(path, &e))?;
        let reader = columns::guarded(|| FileReader::try_new_buffered(file, None));
        let broken = |what| broken(path, what);
        columns::batches(path, reader.map_err(broken)?, &broken, each)
    }
}

impl FileFormat for ArrowStream {
    fn name(&self) -> &'static str {
        "Arrow stream"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["arrow", "arrows", "ipc"]
    }
    fn begins(&self, head: &[u8]) -> bool {
        head.starts_with(&[0xff; 4])
    }
    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let file = File::open(path).map_err(|e| unreadable(path, &e))?;
        let reader = columns::guarded(|| StreamReader::try_new_buffered(file, None));
        let broken = |what| broken(path, what);
        columns::batches(path, reader.map_err(broken)?, &broken, each)
    }
}

fn broken(path: &Path, what: String) -> Error {
    Error::data(format!("is not a usable Arrow file: {what}"))
        .at(path.display())
        .fix("the file is truncated or damaged: copy or download it again")
}
