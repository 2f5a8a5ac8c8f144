//! Rows of JSON lines files, each with file and line for error messages.

use crate::options::nearest_path;
use ferrl::data::DataSource;
use ferrl::data::hub::HubCache;
use ferrl::data::lines::{self, LineReader};
use ferrl::recipe::Recipe;
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

/// The files of rows that a recipe names, which no output may replace; what cannot be found is refused where it is read.
pub fn files_read(recipe: &Recipe) -> Vec<PathBuf> {
    let cache = HubCache::from_env();
    let names = recipe.data.train.iter().chain(&recipe.eval.data);
    names.filter_map(|name| DataSource::parse(name).ok()?.files(&cache).ok()).flatten().collect()
}

/// One line of a file.
#[derive(Clone, Debug)]
pub struct PlacedRow {
    /// `file:line`
    pub place: String,
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

pub fn name(path: &Path) -> String {
    if path.as_os_str() == "-" { "standard input".into() } else { path.display().to_string() }
}

/// Non-blank lines of a file, each with its place.
pub fn lines(path: &Path) -> Result<impl Iterator<Item = Result<(String, String)>> + Send + use<>> {
    let (mut reader, name, mut failed) = (LineReader::new(open(path)?), name(path), false);
    Ok(std::iter::from_fn(move || {
        while !failed {
            let line = match reader.next_line() {
                Ok(line) => line?,
                Err(e) => {
                    failed = true;
                    return Some(Err(Error::data(format!("cannot read: {e}")).at(&name)));
                }
            };
            let place = format!("{name}:{}", line.number);
            match line.bytes.and_then(lines::text) {
                Ok(text) if text.trim().is_empty() => {}
                Ok(text) => return Some(Ok((place, text.to_string()))),
                Err(e) => return Some(Err(e.at(place))),
            }
        }
        None
    }))
}

pub fn parse(place: &str, line: &str) -> Result<Value> {
    lines::json(line.as_bytes()).map_err(|e| e.at(place))
}

/// All rows of a file of JSON objects.
pub fn rows(path: &Path) -> Result<Vec<PlacedRow>> {
    rows_or_errors(path)?.into_iter().collect()
}

/// All rows, with an error for each line that is not a row. A file that cannot be read, or has no rows, is an error.
pub fn rows_or_errors(path: &Path) -> Result<Vec<Result<PlacedRow>>> {
    let mut rows = Vec::new();
    for line in lines(path)? {
        rows.push(line.and_then(|(place, line)| {
            match parse(&place, &line)? {
                Value::Object(fields) => Ok(PlacedRow { place, fields }),
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

impl PlacedRow {
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
