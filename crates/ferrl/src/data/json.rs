//! A JSON file: one array of objects.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use ferrl_engine::{Error, Result};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::Value;

use super::lines;
use super::unique::UniqueKeys;
use super::{BOM, Each, FileFormat, FileRow, MAX_ROW, object, too_long, unreadable};

/// A JSON array of objects.
pub struct JsonFormat;

impl FileFormat for JsonFormat {
    fn name(&self) -> &'static str {
        "JSON"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["json"]
    }
    fn begins(&self, head: &[u8]) -> bool {
        let head = head.trim_ascii_start();
        head.strip_prefix(b"[")
            .is_some_and(|rest| matches!(rest.trim_ascii_start().first(), Some(b'{' | b']')))
    }

    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let mut file = File::open(path).map_err(|e| unreadable(path, &e))?;
        skip_mark(&mut file).map_err(|e| unreadable(path, &e))?;
        let left = Cell::new(MAX_ROW);
        let reader = BufReader::with_capacity(BUFFER, BoundedFile { file, left: &left });
        let mut parser = serde_json::Deserializer::from_reader(reader);
        let (mut failed, mut count) = (None, 0);
        let rows = RowVisitor { each, failed: &mut failed, count: &mut count, left: &left };
        let parsed = parser.deserialize_seq(rows).and_then(|()| parser.end());
        if let Some(error) = failed {
            return Err(error);
        }
        parsed.map_err(|e| {
            if left.get() == 0 {
                return too_long(MAX_ROW + 1).at(format!("{}:{}", path.display(), count + 1));
            }
            Error::data(format!("is not valid JSON: {e}"))
                .at(format!("{}:{}", path.display(), count + 1))
                .fix(lines::json_fix(&e, &[]).unwrap_or(
                    "a JSON file holds one array of objects: [{...}, {...}]; one object per line is JSONL",
                ))
        })
    }
}

const BUFFER: usize = 1 << 16;

/// Moves behind a byte order mark.
fn skip_mark(file: &mut File) -> std::io::Result<()> {
    let mut head = [0; BOM.len()];
    if file.read_exact(&mut head).is_err() || head != BOM {
        file.rewind()?;
    }
    Ok(())
}

/// A file of which no row is read much beyond the longest: a quote that is never closed must not fill the memory.
struct BoundedFile<'a> {
    file: File,
    /// Bytes that the row under way may still take.
    left: &'a Cell<usize>,
}

impl Read for BoundedFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left.get() == 0 {
            return Err(std::io::Error::other("a row is too long"));
        }
        let n = self.file.read(buffer)?;
        self.left.set(self.left.get().saturating_sub(n));
        Ok(n)
    }
}

/// A row that is a list of turns, as some files of conversations have it, under the usual name of such a column.
fn conversation(value: Value) -> Value {
    let turn = |v: &Value| v.get("from").or(v.get("role")).is_some_and(Value::is_string);
    match value {
        Value::Array(turns) if !turns.is_empty() && turns.iter().all(turn) => {
            serde_json::json!({ "conversations": turns })
        }
        other => other,
    }
}

/// Gives rows on as they are parsed, so that only one tree is in memory beside what the taker keeps.
struct RowVisitor<'a, 'b> {
    each: Each<'a>,
    /// What the taker refused; the parser's own error type cannot carry it.
    failed: &'b mut Option<Error>,
    count: &'b mut usize,
    left: &'b Cell<usize>,
}

impl<'de> Visitor<'de> for RowVisitor<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<(), A::Error> {
        while let Some(UniqueKeys(value)) = items.next_element()? {
            *self.count += 1;
            self.left.set(MAX_ROW + BUFFER);
            if let Err(error) = (self.each)(FileRow::new(*self.count, object(conversation(value)))) {
                *self.failed = Some(error);
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
