//! A file compressed with gzip, such as HH-RLHF's `train.jsonl.gz`: unpacked to a temporary file and read as what is inside.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::Path;

use ferrl_engine::{Error, Result};
use flate2::read::MultiGzDecoder;
use tempfile::NamedTempFile;

use super::{Each, FileFormat, FileRow, extension, format_of, unreadable};

/// Any other format, compressed.
pub struct Gzip;

const MAGIC: [u8; 2] = [0x1f, 0x8b];

impl FileFormat for Gzip {
    fn name(&self) -> &'static str {
        "gzip"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["gz"]
    }
    fn begins(&self, head: &[u8]) -> bool {
        head.starts_with(&MAGIC)
    }
    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let unpacked = unpack(path)?;
        let inside = format_of(unpacked.path()).map_err(|e| e.at(path.display()))?;
        if inside.name() == self.name() {
            return Err(Error::data("is compressed twice").at(path.display()).fix("unpack it with gunzip"));
        }
        // Where a row stands in the temporary file says nothing once that is gone.
        let mut kept = |line: FileRow| each(FileRow { at: None, ..line });
        inside.read(unpacked.path(), &mut kept).map_err(|e| e.at(path.display()))
    }
}

fn unpack(path: &Path) -> Result<NamedTempFile> {
    // What is inside says its extension: rows.jsonl.gz holds rows.jsonl.
    let kind = format!(".{}", extension(&path.with_extension("")));
    let packed = File::open(path).map_err(|e| unreadable(path, &e))?;
    let file = NamedTempFile::with_suffix(kind).map_err(|e| full(&e))?;
    let mut from = MultiGzDecoder::new(BufReader::new(packed));
    std::io::copy(&mut from, &mut BufWriter::new(&file)).map_err(|e| match e.kind() {
        std::io::ErrorKind::StorageFull => full(&e),
        _ => Error::data(format!("cannot be unpacked: {e}"))
            .at(path.display())
            .fix("download it again; gunzip -t tests it"),
    })?;
    Ok(file)
}

fn full(e: &std::io::Error) -> Error {
    Error::resource(format!("cannot unpack to a temporary file: {e}"))
        .at(std::env::temp_dir().display())
        .fix("free some space, or point TMPDIR at a disk that has it")
}
