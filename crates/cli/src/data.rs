//! Rows of JSON lines, each with its place for messages.

use crate::options::nearest_path;
use ferrl::data::{BOM, MAX_ROW};
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

/// One line of a file.
#[derive(Clone, Debug)]
pub struct Row {
    /// `file:line`
    pub place: String,
    /// Its fields.
    pub fields: Map<String, Value>,
}

/// Opens a file for reading, or standard input for `-`.
pub fn open(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(BufReader::new(std::io::stdin())));
    }
    let fail = |e: &std::io::Error| {
        let error = match e.kind() {
            ErrorKind::NotFound => Error::data("no such file"),
            _ => Error::data(format!("cannot read: {e}")),
        };
        let near = nearest_path(path).filter(|_| e.kind() == ErrorKind::NotFound);
        error.at(path.display()).fix(match near {
            Some(near) => format!("the nearest name there is {near}"),
            None => "check the path and its permissions".into(),
        })
    };
    if path.is_dir() {
        return Err(Error::data("is a directory, expected a file")
            .at(path.display())
            .fix("name a file in it"));
    }
    Ok(Box::new(BufReader::new(File::open(path).map_err(|e| fail(&e))?)))
}

/// How a file is called in messages.
pub fn name(path: &Path) -> String {
    if path.as_os_str() == "-" { "standard input".into() } else { path.display().to_string() }
}

/// Lines of a file, numbered from 1, blank ones left out. A byte order mark before the first is none of it; a line may be as
/// long as a row of training data.
pub fn lines(path: &Path) -> Result<impl Iterator<Item = Result<(String, String)>> + Send + use<>> {
    let (mut reader, name, mut number, mut failed) = (open(path)?, name(path), 0, false);
    Ok(std::iter::from_fn(move || {
        loop {
            if failed {
                return None;
            }
            let mut line = Vec::new();
            number += 1;
            let place = format!("{name}:{number}");
            let unread = |e: std::io::Error| Error::data(format!("cannot read: {e}")).at(&place);
            match reader.by_ref().take(MAX_ROW as u64 + 1).read_until(b'\n', &mut line) {
                Ok(0) => return None,
                Ok(read) if read > MAX_ROW && line.last() != Some(&b'\n') => {
                    // The next line is the one behind its end.
                    if let Err(e) = reader.skip_until(b'\n') {
                        failed = true;
                        return Some(Err(unread(e)));
                    }
                    let error =
                        Error::data(format!("the line has more than {} MiB", MAX_ROW >> 20)).at(place);
                    return Some(Err(
                        error.fix("cut it into several rows, or check that line ends are there")
                    ));
                }
                Ok(_) => {}
                Err(e) => {
                    failed = true;
                    return Some(Err(unread(e)));
                }
            }
            let line = if number == 1 { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
            match std::str::from_utf8(line) {
                Ok(line) if line.trim().is_empty() => {}
                Ok(line) => return Some(Ok((place, line.trim_end_matches(['\n', '\r']).to_string()))),
                Err(_) => {
                    let error = Error::data("is not UTF-8 text").at(place);
                    return Some(Err(
                        error.fix("save the file as UTF-8; it must be plain text, not compressed")
                    ));
                }
            }
        }
    }))
}

/// One line as JSON.
pub fn parse(place: &str, line: &str) -> Result<Value> {
    serde_json::from_str(line).map_err(|e| {
        let what = if e.is_eof() {
            "the line is cut short: it ends inside a JSON value".to_string()
        } else {
            let words = e.to_string();
            let words = words.rsplit_once(" at line").map_or(words.as_str(), |(w, _)| w).to_owned();
            format!("is not valid JSON: {words} at column {}, got {}", e.column(), excerpt(line))
        };
        let list = line.trim_start().starts_with('[');
        Error::data(what).at(place).fix(if list {
            "expected JSON lines, one object on each line; a JSON list becomes that with `jq -c '.[]'`"
        } else {
            "expected JSON lines, one object on each line"
        })
    })
}

/// All rows of a file of JSON objects.
pub fn rows(path: &Path) -> Result<Vec<Row>> {
    rows_or_errors(path)?.into_iter().collect()
}

/// The same, with an error in the place of each line that is no row. A file that cannot be read, or has no rows, is an
/// error.
pub fn rows_or_errors(path: &Path) -> Result<Vec<Result<Row>>> {
    let mut rows = Vec::new();
    for line in lines(path)? {
        rows.push(line.and_then(|(place, line)| {
            match parse(&place, &line)? {
                Value::Object(fields) => Ok(Row { place, fields }),
                other => Err(Error::data(format!("holds {}, expected a JSON object", kind(&other)))
                    .at(place)
                    .fix("write each row as {\"field\": value, ...}")),
            }
        }));
    }
    if rows.is_empty() {
        return Err(Error::data("has no rows")
            .at(name(path))
            .fix("expected JSON lines, one object on each line"));
    }
    Ok(rows)
}

impl Row {
    /// An error about this row.
    pub fn error(&self, what: impl Into<String>) -> Error {
        Error::data(what).at(&self.place)
    }

    /// Which of the named fields the row has: exactly one, or an error that says what was expected.
    pub fn choose<'a>(&self, names: &[&'a str]) -> Result<&'a str> {
        let there: Vec<&str> = names.iter().copied().filter(|n| self.get(n).is_some()).collect();
        match there[..] {
            [one] => Ok(one),
            [] => {
                let keys: Vec<&str> = self.fields.keys().map(String::as_str).collect();
                let error = self.error(format!("has the fields {keys:?}, expected one of {names:?}"));
                let near = keys.iter().find_map(|k| Some((k, nearest(k, names.iter().copied())?)));
                Err(match near {
                    Some((key, near)) => error.fix(format!("rename {key:?} to {near:?}?")),
                    None => error.fix(format!("give each row one of {names:?}")),
                })
            }
            _ => {
                Err(self.error(format!("has {there:?}, expected only one of them")).fix("remove the others"))
            }
        }
    }

    /// A field that is present and not null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|v| !v.is_null())
    }

    /// A field of text.
    pub fn text(&self, name: &str) -> Result<&str> {
        match self.get(name) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(self.error(format!("field {name:?} is {}, expected a string", kind(other)))),
            None => {
                Err(self.error(format!("field {name:?} is missing")).fix(format!("add {name:?} to the row")))
            }
        }
    }

    /// A field of messages.
    pub fn messages(&self, name: &str) -> Result<&[Value]> {
        match self.get(name) {
            Some(Value::Array(list)) if !list.is_empty() => Ok(list),
            Some(Value::Array(_)) => Err(self.error(format!("field {name:?} is an empty list"))),
            Some(other) => Err(self
                .error(format!("field {name:?} is {}, expected a list of messages", kind(other)))
                .fix("write it as [{\"role\": \"user\", \"content\": ...}, ...]")),
            None => Err(self.error(format!("field {name:?} is missing"))),
        }
    }

    /// A field of token ids, each below `vocab`.
    pub fn ids(&self, name: &str, vocab: usize) -> Result<Vec<u32>> {
        let Some(Value::Array(list)) = self.get(name) else {
            let got = self.get(name).map_or("missing", kind);
            return Err(self.error(format!("field {name:?} is {got}, expected a list of token ids")));
        };
        let id = |(i, v): (usize, &Value)| {
            let fail = |what: String, fix: &str| {
                Err(Error::data(what).at(format!("{name}[{i}]")).at(&self.place).fix(fix))
            };
            match v.as_u64() {
                None => fail(format!("is {v}, expected a token id"), "token ids are whole numbers from 0 on"),
                Some(id) if id >= vocab as u64 => fail(
                    format!("token id {id} is not below the model's vocabulary of {vocab}"),
                    "use the ids of this model's tokenizer",
                ),
                Some(id) => Ok(id as u32),
            }
        };
        list.iter().enumerate().map(id).collect()
    }
}

/// The kind of a JSON value, in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn excerpt(line: &str) -> String {
    let line = line.trim_end();
    match line.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}...", &line[..end]),
        None => format!("{line:?}"),
    }
}
