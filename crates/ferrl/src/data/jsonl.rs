//! JSON Lines: one object per line; blank lines are passed over.

use super::lines::{self, FileLine, LineReader};
use super::{Each, FileFormat, FileRow, object, unreadable};
use ferrl_engine::Result;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// One JSON object per line.
pub struct Jsonl;

impl FileFormat for Jsonl {
    fn name(&self) -> &'static str {
        "JSONL"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["jsonl", "ndjson"]
    }
    fn begins(&self, head: &[u8]) -> bool {
        let head = head.trim_ascii_start();
        head.strip_prefix(b"{")
            .is_some_and(|rest| matches!(rest.trim_ascii_start().first(), Some(b'"' | b'}')))
    }

    fn in_place(&self) -> bool {
        true
    }

    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let failed = |e: std::io::Error| unreadable(path, &e);
        let file = File::open(path).map_err(failed)?;
        let mut lines = LineReader::new(BufReader::with_capacity(1 << 16, file));
        while let Some(FileLine { number, start, bytes }) = lines.next_line().map_err(failed)? {
            match bytes.map(|bytes| (bytes.trim_ascii_start(), bytes)) {
                Ok(([], _)) => {}
                Ok((text, bytes)) => {
                    let before = (bytes.len() - text.len()) as u64;
                    let at = Some((start + before, text.trim_ascii_end().len() as u32));
                    each(FileRow { number, row: lines::json(bytes).and_then(object), at })?;
                }
                Err(e) => each(FileRow::new(number, Err(e)))?,
            }
        }
        Ok(())
    }
}
