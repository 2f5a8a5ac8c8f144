//! Plain text: each line is a document, the column `text` of a row; blank lines are passed over.

use super::lines::{self, FileLine, LineReader};
use super::{Each, FileFormat, FileRow, Row, unreadable};
use ferrl_engine::Result;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

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
        let file = File::open(path).map_err(failed)?;
        let mut lines = LineReader::new(BufReader::with_capacity(1 << 16, file));
        while let Some(FileLine { number, bytes, .. }) = lines.next_line().map_err(failed)? {
            let row = match bytes.and_then(lines::text) {
                Ok(text) if text.trim().is_empty() => continue,
                Ok(text) => Ok(Row::from_iter([("text".to_owned(), text.into())])),
                Err(e) => Err(e),
            };
            each(FileRow::new(number, row))?;
        }
        Ok(())
    }
}
