//! Arrow IPC: the file format, and the stream format that `datasets` saves to disk.

use std::fs::File;
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::ArrowError;
use ferrl_engine::{Error, Result};

use super::{Each, Format, columns, unreadable};

/// Arrow IPC with a footer.
pub struct ArrowFile;
/// Arrow IPC as a stream of messages.
pub struct ArrowStream;

impl Format for ArrowFile {
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
        let reader = FileReader::try_new_buffered(file, None).map_err(|e| broken(path, &e))?;
        batches(path, reader, each)
    }
}

impl Format for ArrowStream {
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
        let reader = StreamReader::try_new_buffered(file, None).map_err(|e| broken(path, &e))?;
        batches(path, reader, each)
    }
}

fn batches(
    path: &Path,
    reader: impl Iterator<Item = std::result::Result<RecordBatch, ArrowError>>,
    each: Each<'_>,
) -> Result<()> {
    let mut number = 0;
    for batch in reader {
        let batch = batch.map_err(|e| broken(path, &e).at(format!("after row {number}")))?;
        columns::rows(&batch, path, &mut number, each)?;
    }
    Ok(())
}

fn broken(path: &Path, e: &ArrowError) -> Error {
    Error::data(format!("is not a usable Arrow file: {e}"))
        .at(path.display())
        .fix("the file is cut short or damaged: copy or download it again")
}
