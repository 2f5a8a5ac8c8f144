//! Plain text: each line is a document, the column `text` of a row; blank lines are passed over.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use ferrl_engine::{Error, Result};

use super::{BOM, Each, FileFormat, FileRow, MAX_ROW, Row, jsonl, too_long, unreadable};

/// One document per line.
pub struct Text;

impl FileFormat for Text {
    fn name(&self) -> &'static str {
        "text"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["txt"]
    }
    fn begins(&self, _: &[u8]) -> bool {
        false
    }

    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let failed = |e: std::io::Error| unreadable(path, &e);
        let mut reader = BufReader::with_capacity(1 << 16, File::open(path).map_err(failed)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            let read =
                reader.by_ref().take(MAX_ROW as u64 + 1).read_until(b'\n', &mut line).map_err(failed)?;
            if read == 0 {
                break;
            }
            if read > MAX_ROW && line.last() != Some(&b'\n') {
                let rest = jsonl::pass_over(&mut reader).map_err(failed)?;
                each(FileRow::new(number, Err(too_long(read + rest as usize))))?;
                continue;
            }
            let bytes = if number == 1 { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
            let row = match std::str::from_utf8(bytes) {
                Ok(text) if text.trim().is_empty() => continue,
                Ok(text) => {
                    Ok(Row::from_iter([("text".to_owned(), text.trim_end_matches(['\n', '\r']).into())]))
                }
                Err(_) => Err(Error::data("is not UTF-8 text").fix("save the file as UTF-8")),
            };
            each(FileRow::new(number, row))?;
        }
        Ok(())
    }
}
