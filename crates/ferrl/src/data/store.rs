//! Rows on demand: where the JSON text of each one is, in memory or on disk. Nothing parsed is kept.
//!
//! Up to [`MEMORY`] bytes of text stay in memory. Beyond it a JSONL file is read again where each row stands, and rows of
//! any other format go to a file without a name in the system's folder for temporary files (`TMPDIR`).

use ferrl_kernels::lock;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use ferrl_engine::{Error, Result};

use super::unreadable;

/// Bytes of text that a dataset keeps in memory.
pub const MEMORY: u64 = 128 << 20;

/// Where a row is.
#[derive(Clone, Copy, Debug)]
pub struct RowSpan {
    start: u64,
    len: u32,
    /// Which file of the dataset.
    pub file: u32,
    /// Line of a text file, row of any other, from 1.
    pub number: u32,
}

#[derive(Debug, Default)]
pub struct RowStore {
    /// Text that was copied; what stands in a file of the dataset is read there.
    copied: Vec<u8>,
    /// The same once it has become too much for memory.
    spool: Option<Mutex<File>>,
    /// Bytes in `spool`.
    spooled: u64,
    /// Files that are read where they are; by number of the file.
    originals: Vec<Option<Original>>,
    /// How much is kept in memory.
    limit: u64,
}

/// A file of the user's, as it was when its rows were found.
#[derive(Debug)]
struct Original {
    path: PathBuf,
    stamp: Stamp,
    open: Mutex<Option<File>>,
}

type Stamp = (u64, Option<SystemTime>);

impl RowStore {
    /// An empty one that keeps this number of bytes in memory.
    pub fn new(limit: u64) -> Self {
        RowStore { limit, ..Default::default() }
    }

    /// Says that rows of this file are read where they stand.
    pub fn read_in_place(&mut self, file: usize, path: &Path) -> Result<()> {
        let open = File::open(path).map_err(|e| unreadable(path, &e))?;
        let stamp = stamp(&open).map_err(|e| unreadable(path, &e))?;
        self.originals.resize_with(file + 1, || None);
        self.originals[file] = Some(Original { path: path.into(), stamp, open: Mutex::new(None) });
        Ok(())
    }

    /// Keeps a row; `at` is where its text stands in its file, where it is text.
    pub fn add(
        &mut self,
        file: usize,
        number: usize,
        at: Option<(u64, u32)>,
        text: &[u8],
    ) -> Result<RowSpan> {
        let (file, number) = (file as u32, number as u32);
        if let (Some((start, len)), Some(Some(_))) = (at, self.originals.get(file as usize)) {
            return Ok(RowSpan { start, len, file, number });
        }
        if self.spool.is_none() && self.copied.len() as u64 + text.len() as u64 > self.limit {
            self.spool = Some(Mutex::new(tempfile::tempfile().map_err(|e| unspooled(&e))?));
        }
        let start = self.spooled + self.copied.len() as u64;
        self.copied.extend_from_slice(text);
        if self.spool.is_some() && self.copied.len() > 1 << 20 {
            self.flush()?;
        }
        Ok(RowSpan { start, len: text.len() as u32, file, number })
    }

    /// Every row is there.
    pub fn finish(&mut self) -> Result<()> {
        if self.spool.is_some() {
            self.flush()?;
        }
        self.copied.shrink_to_fit();
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if let Some(spool) = &self.spool {
            lock(spool).write_all(&self.copied).map_err(|e| unspooled(&e))?;
            self.spooled += self.copied.len() as u64;
            self.copied.clear();
        }
        Ok(())
    }

    pub fn text(&self, span: RowSpan) -> Result<Vec<u8>> {
        if let Some(Some(original)) = self.originals.get(span.file as usize) {
            return original.text(span);
        }
        let mut text = vec![0; span.len as usize];
        match &self.spool {
            Some(spool) => read_at(&mut lock(spool), span.start, &mut text).map_err(|e| unspooled(&e))?,
            None => {
                let start = span.start as usize;
                text.copy_from_slice(&self.copied[start..start + span.len as usize]);
            }
        }
        Ok(text)
    }
}

impl Original {
    fn text(&self, span: RowSpan) -> Result<Vec<u8>> {
        let failed = |e: std::io::Error| unreadable(&self.path, &e);
        let mut held = lock(&self.open);
        let file = match &mut *held {
            Some(file) => file,
            None => held.insert(File::open(&self.path).map_err(failed)?),
        };
        if stamp(file).map_err(failed)? != self.stamp {
            return Err(Error::data("the file was changed while its rows were in use")
                .at(self.path.display())
                .fix("leave data files alone during a run: put a new file beside the old one"));
        }
        let mut text = vec![0; span.len as usize];
        read_at(file, span.start, &mut text).map_err(failed)?;
        Ok(text)
    }
}

fn stamp(file: &File) -> std::io::Result<Stamp> {
    file.metadata().map(|m| (m.len(), m.modified().ok()))
}

fn read_at(file: &mut File, start: u64, text: &mut [u8]) -> std::io::Result<()> {
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(text)
}

fn unspooled(e: &std::io::Error) -> Error {
    Error::resource(format!("rows cannot be kept in a temporary file: {e}"))
        .at(std::env::temp_dir().display())
        .fix("free some space, point TMPDIR at a disk that has it, or give the data as JSONL, which is read in place")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_from_memory_and_from_the_spool() {
        for limit in [u64::MAX, 1000, 0] {
            let mut store = RowStore::new(limit);
            let row = |i: usize| format!("{{\"n\": {i}}}").repeat(1 + i % 7);
            let spans: Vec<RowSpan> =
                (0..500).map(|i| store.add(0, i + 1, None, row(i).as_bytes()).unwrap()).collect();
            store.finish().unwrap();
            assert_eq!(store.spool.is_some(), limit < 10_000, "limit {limit}");
            for (i, span) in spans.iter().enumerate().rev() {
                assert_eq!(store.text(*span).unwrap(), row(i).as_bytes(), "limit {limit}");
                assert_eq!(span.number as usize, i + 1);
            }
        }
    }

    #[test]
    fn a_file_that_changes_under_a_run_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, "{\"a\": 1}\n{\"a\": 2}\n").unwrap();
        let mut store = RowStore::new(0);
        store.read_in_place(0, &path).unwrap();
        let span = store.add(0, 2, Some((9, 8)), b"not kept").unwrap();
        assert_eq!(store.text(span).unwrap(), b"{\"a\": 2}");
        std::fs::write(&path, "{\"a\": 1}\n{\"a\": 3}\nmore\n").unwrap();
        let error = store.text(span).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl") && error.contains("changed"), "{error}");
    }
}
