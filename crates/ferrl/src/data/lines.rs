//! Lines of a file: what JSON lines, plain text and the logs of a run are read by.

use super::unique::UniqueKeys;
use super::{BOM, MAX_ROW, too_long};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::fmt::Display;
use std::io::{self, BufRead, Read};

/// Reads lines one after the other, each no longer than a row may be.
pub struct LineReader<R> {
    reader: R,
    line: Vec<u8>,
    number: usize,
    /// Bytes read.
    end: u64,
}

pub struct FileLine<'a> {
    /// From 1.
    pub number: usize,
    /// Where its bytes begin in the file.
    pub start: u64,
    /// Without byte order mark and line end; an error where it is longer than a row may be.
    pub bytes: Result<&'a [u8]>,
}

impl<R: BufRead> LineReader<R> {
    /// From the start of a file.
    pub fn new(reader: R) -> Self {
        LineReader { reader, line: Vec::new(), number: 0, end: 0 }
    }

    /// The next line; none at the end.
    pub fn next_line(&mut self) -> io::Result<Option<FileLine<'_>>> {
        self.line.clear();
        let read = self.reader.by_ref().take(MAX_ROW as u64 + 1).read_until(b'\n', &mut self.line)?;
        if read == 0 {
            return Ok(None);
        }
        let start = self.end;
        self.number += 1;
        self.end += read as u64;
        if read > MAX_ROW && self.line.last() != Some(&b'\n') {
            self.end += self.reader.skip_until(b'\n')? as u64;
            let bytes = Err(too_long((self.end - start) as usize));
            return Ok(Some(FileLine { number: self.number, start, bytes }));
        }
        let mark = if self.number == 1 && self.line.starts_with(BOM) { BOM.len() } else { 0 };
        let mut bytes = &self.line[mark..];
        while let Some((b'\n' | b'\r', rest)) = bytes.split_last() {
            bytes = rest;
        }
        Ok(Some(FileLine { number: self.number, start: start + mark as u64, bytes: Ok(bytes) }))
    }
}

pub fn text(line: &[u8]) -> Result<&str> {
    std::str::from_utf8(line).map_err(|_| {
        Error::data("is not UTF-8 text").fix("save the file as UTF-8; it must be plain text, not compressed")
    })
}

pub fn json(line: &[u8]) -> Result<Value> {
    let line = text(line)?;
    match serde_json::from_str(line) {
        Ok(UniqueKeys(value)) => Ok(value),
        Err(e) => {
            let what = match e.is_eof() {
                true => "is not valid JSON: the line is cut short, it ends inside a JSON value".to_string(),
                // The parser counts lines within this line; only its column says something.
                false => format!(
                    "is not valid JSON: {} at column {}, got {}",
                    without_line(&e),
                    e.column(),
                    excerpt(line)
                ),
            };
            let rest = line.as_bytes().get(e.column().saturating_sub(2)..).unwrap_or_default();
            Err(Error::data(what).fix(json_fix(&e, rest).unwrap_or(match line.trim_start().starts_with('[') {
                true => {
                    "expected JSON lines, one object on each line; a JSON list becomes that with `jq -c '.[]'`"
                }
                false => "expected JSON lines, one whole object on each line",
            })))
        }
    }
}

/// The parser's words without the place.
fn without_line(e: &serde_json::Error) -> String {
    let words = e.to_string();
    words.rsplit_once(" at line").map_or(words.as_str(), |(words, _)| words).to_owned()
}

/// The fix for JSON that other programs write and that is none; `rest` is the text from where the parser stopped.
pub(super) fn json_fix(e: &serde_json::Error, rest: &[u8]) -> Option<&'static str> {
    let words = without_line(e);
    let has = |word: &[u8]| rest.windows(word.len()).take(3).any(|at| at == word);
    Some(if words.ends_with("occurs twice") {
        "leave out one of the two, or rename it"
    } else if has(b"NaN") || has(b"Infinity") || words.starts_with("number out of range") {
        "JSON has no NaN, no infinity and no number beyond 1.8e308: write null, or leave the column out"
    } else if words.contains("hex escape") || words.contains("surrogate") {
        "a \\u escape is half of a character: write both halves, or \\ufffd instead"
    } else if words.starts_with("control character") {
        "escape it, as in \\n, \\t or \\u0000"
    } else if words.starts_with("recursion limit") {
        "nest lists and objects at most 127 deep"
    } else {
        return None;
    })
}

/// Every line of a file that Ferrl wrote, as JSON with its number; blank ones are left out. `name` stands in errors.
pub fn json_lines<'a>(
    bytes: &'a [u8],
    name: impl Display + 'a,
) -> impl Iterator<Item = (usize, Result<Value>)> + 'a {
    let lines = (1..).zip(bytes.split(|b| *b == b'\n')).filter(|(_, line)| !line.trim_ascii().is_empty());
    lines.map(move |(number, line)| (number, json(line).map_err(|e| e.at(format!("{name}:{number}")))))
}

fn excerpt(line: &str) -> String {
    let line = line.trim_end();
    match line.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}...", &line[..end]),
        None => format!("{line:?}"),
    }
}
