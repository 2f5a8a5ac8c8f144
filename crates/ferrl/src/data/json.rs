//! A JSON file: one array of objects.

use std::fmt;
use std::path::Path;

use ferrl_engine::{Error, Result};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::Value;

use super::{BOM, Each, Format, object, unreadable};

/// A JSON array of objects.
pub struct Json;

impl Format for Json {
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
        let bytes = std::fs::read(path).map_err(|e| unreadable(path, &e))?;
        let bytes = bytes.strip_prefix(BOM).unwrap_or(&bytes);
        let mut parser = serde_json::Deserializer::from_slice(bytes);
        let (mut failed, mut count) = (None, 0);
        let rows = Rows { each, failed: &mut failed, count: &mut count };
        let parsed = parser.deserialize_seq(rows).and_then(|()| parser.end());
        if let Some(error) = failed {
            return Err(error);
        }
        parsed.map_err(|e| {
            Error::data(format!("is not valid JSON after row {count}: {e}"))
                .at(format!("{}:{}", path.display(), e.line()))
                .fix("a JSON file holds one array of objects: [{...}, {...}]; one object per line is JSONL")
        })
    }
}

/// Gives rows on as they are parsed, so that only one tree is in memory beside what the taker keeps.
struct Rows<'a, 'b> {
    each: Each<'a>,
    /// What the taker refused; the parser's own error type cannot carry it.
    failed: &'b mut Option<Error>,
    count: &'b mut usize,
}

impl<'de> Visitor<'de> for Rows<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<(), A::Error> {
        while let Some(value) = items.next_element::<Value>()? {
            *self.count += 1;
            if let Err(error) = (self.each)(*self.count, object(value)) {
                *self.failed = Some(error);
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
