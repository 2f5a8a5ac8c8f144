//! JSON Lines: one object per line; blank lines are passed over.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use ferrl_engine::{Error, Result};

use super::{BOM, Each, FileFormat, FileRow, MAX_ROW, Row, object, too_long, unreadable};

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
        let mut reader = BufReader::with_capacity(1 << 16, File::open(path).map_err(failed)?);
        let (mut line, mut start) = (Vec::new(), 0u64);
        for number in 1.. {
            line.clear();
            let read =
                reader.by_ref().take(MAX_ROW as u64 + 1).read_until(b'\n', &mut line).map_err(failed)?;
            if read == 0 {
                break;
            }
            let mut length = read as u64;
            if read > MAX_ROW && line.last() != Some(&b'\n') {
                line.clear();
                length += pass_over(&mut reader).map_err(failed)?;
                each(FileRow::new(number, Err(too_long(length as usize))))?;
            }
            let bytes = if number == 1 { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
            let text = bytes.trim_ascii();
            if !text.is_empty() {
                let before = line.len() - bytes.len() + (bytes.len() - bytes.trim_ascii_start().len());
                let at = Some((start + before as u64, text.len() as u32));
                each(FileRow { number, row: row(bytes), at })?;
            }
            start += length;
        }
        Ok(())
    }
}

/// Skips to the end of the line; how much that was.
pub(super) fn pass_over(reader: &mut impl BufRead) -> std::io::Result<u64> {
    let mut passed = 0;
    loop {
        let buffer = reader.fill_buf()?;
        let end = buffer.iter().position(|&b| b == b'\n');
        let used = end.map_or(buffer.len(), |i| i + 1);
        reader.consume(used);
        passed += used as u64;
        if end.is_some() || used == 0 {
            return Ok(passed);
        }
    }
}

fn row(line: &[u8]) -> Result<Row> {
    let value = serde_json::from_slice(line).map_err(|e| {
        // The parser counts lines within this line; only its column says something.
        let what = e.to_string();
        let what = what.split(" at line ").next().unwrap_or(&what).to_owned();
        Error::data(format!("is not valid JSON: {what} at column {}", e.column()))
            .fix("each line of JSONL is one whole JSON object; many lines per object need a JSON array")
    })?;
    object(value)
}
