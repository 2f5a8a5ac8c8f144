//! JSON Lines: one object per line; blank lines are passed over.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use ferrl_engine::{Error, Result};

use super::{BOM, Each, Format, Row, object, unreadable};

/// One JSON object per line.
pub struct Jsonl;

impl Format for Jsonl {
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

    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let mut reader = BufReader::new(File::open(path).map_err(|e| unreadable(path, &e))?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if reader.read_until(b'\n', &mut line).map_err(|e| unreadable(path, &e))? == 0 {
                break;
            }
            let bytes = if number == 1 { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
            if !bytes.trim_ascii().is_empty() {
                each(number, row(bytes))?;
            }
        }
        Ok(())
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
