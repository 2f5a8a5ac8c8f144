//! A file compressed with gzip, such as HH-RLHF's `train.jsonl.gz`: unpacked to a temporary file and read as what is inside.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use ferrl_engine::{Error, Result};
use flate2::read::MultiGzDecoder;

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
        let unpacked = Unpacked::new(path)?;
        let inside = format_of(&unpacked.0).map_err(|e| e.at(path.display()))?;
        if inside.name() == self.name() {
            return Err(Error::data("is compressed twice").at(path.display()).fix("unpack it with gunzip"));
        }
        // Where a row stands in the temporary file says nothing once that is gone.
        let mut kept = |line: FileRow| each(FileRow { at: None, ..line });
        inside.read(&unpacked.0, &mut kept).map_err(|e| e.at(path.display()))
    }
}

/// A temporary file that goes with its reader.
struct Unpacked(PathBuf);

impl Unpacked {
    fn new(path: &Path) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // What is inside says its extension: rows.jsonl.gz holds rows.jsonl.
        let kind = extension(&path.with_extension(""));
        let name = format!("ferrl-unpacked-{}-{number}.{kind}", std::process::id());
        let unpacked = Unpacked(std::env::temp_dir().join(name));
        let packed = File::open(path).map_err(|e| unreadable(path, &e))?;
        let file = File::options().write(true).create_new(true).open(&unpacked.0).map_err(|e| full(&e))?;
        let mut from = MultiGzDecoder::new(BufReader::new(packed));
        std::io::copy(&mut from, &mut BufWriter::new(file)).map_err(|e| match e.kind() {
            std::io::ErrorKind::StorageFull => full(&e),
            _ => Error::data(format!("cannot be unpacked: {e}"))
                .at(path.display())
                .fix("download it again; gunzip -t tests it"),
        })?;
        Ok(unpacked)
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // a leftover is the system's to clean
    }
}

fn full(e: &std::io::Error) -> Error {
    Error::resource(format!("cannot unpack to a temporary file: {e}"))
        .at(std::env::temp_dir().display())
        .fix("free some space, or point TMPDIR at a disk that has it")
}
