//! CSV and TSV with a header line.
//!
//! A column is read as numbers, booleans or JSON lists and objects when every cell of it is one and would be
//! written back with the same characters; otherwise it is text. Empty cells are null.

use std::path::Path;

use ::csv::{ReaderBuilder, StringRecord};
use ferrl_engine::{Error, Result};
use serde_json::Value;

use super::{BOM, Each, Format, Row, extension, unreadable};

/// Comma- or tab-separated values.
pub struct Csv;

impl Format for Csv {
    fn name(&self) -> &'static str {
        "CSV"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["csv", "tsv"]
    }
    fn begins(&self, _: &[u8]) -> bool {
        false
    }

    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let bytes = std::fs::read(path).map_err(|e| unreadable(path, &e))?;
        let bytes = bytes.strip_prefix(BOM).unwrap_or(&bytes);
        let delimiter = if extension(path) == "tsv" { b'\t' } else { b',' };
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(bytes);
        let header = reader.headers().map_err(|e| broken(path, &e))?.clone();
        check_header(&header).map_err(|e| e.at(format!("{}:1", path.display())))?;
        check_quotes(bytes, delimiter, header.len()).map_err(|e| e.at(path.display()))?;
        let records: std::result::Result<Vec<StringRecord>, _> = reader.records().collect();
        let records = records.map_err(|e| broken(path, &e))?;
        let types: Vec<Type> = (0..header.len())
            .map(|c| Type::of(records.iter().filter_map(|r| r.get(c)).filter(|cell| !cell.is_empty())))
            .collect();
        for (i, record) in records.iter().enumerate() {
            let cells = header.iter().zip(record).zip(&types);
            let row: Row = cells.map(|((name, cell), kind)| (name.to_owned(), kind.value(cell))).collect();
            each(i + 1, Ok(row))?;
        }
        Ok(())
    }
}

/// What all cells of a column are.
#[derive(Clone, Copy, PartialEq)]
enum Type {
    Text,
    Json,
}

impl Type {
    fn of<'a>(cells: impl Iterator<Item = &'a str>) -> Type {
        #[derive(Clone, Copy, PartialEq)]
        enum Class {
            Number,
            Bool,
            Nested,
        }
        let mut class = None;
        for cell in cells {
            let this = match serde_json::from_str::<Value>(cell) {
                Ok(Value::Number(n)) if n.to_string() == cell => Class::Number,
                Ok(Value::Bool(_)) => Class::Bool,
                Ok(Value::Array(_) | Value::Object(_)) => Class::Nested,
                _ => return Type::Text,
            };
            if *class.get_or_insert(this) != this {
                return Type::Text;
            }
        }
        if class.is_some() { Type::Json } else { Type::Text }
    }

    fn value(self, cell: &str) -> Value {
        match self {
            _ if cell.is_empty() => Value::Null,
            Type::Json => serde_json::from_str(cell).unwrap_or_else(|_| cell.into()),
            Type::Text => cell.into(),
        }
    }
}

fn check_header(header: &StringRecord) -> Result<()> {
    for (i, name) in header.iter().enumerate() {
        if header.iter().take(i).any(|earlier| earlier == name) {
            return Err(Error::data(format!("two columns are named {name:?}")).fix("give each its own name"));
        }
    }
    Ok(())
}

/// An open quote swallows the rest of the file without an error of the parser's: one more row shows it.
fn check_quotes(bytes: &[u8], delimiter: u8, columns: usize) -> Result<()> {
    if bytes.iter().filter(|&&b| b == b'"').count() % 2 == 0 {
        return Ok(());
    }
    let mut more = bytes.to_vec();
    more.push(b'\n');
    more.extend(vec!["x"; columns].join(&*String::from(delimiter as char)).into_bytes());
    let mut reader = ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(&*more);
    let last = reader.records().flatten().last();
    if last.is_some_and(|record| record.len() == columns && record.iter().all(|cell| cell == "x")) {
        return Ok(());
    }
    Err(Error::data("a quote is opened and never closed, or the file is cut short")
        .fix("write \"\" for a quote inside a quoted cell"))
}

fn broken(path: &Path, e: &::csv::Error) -> Error {
    let line = e.position().map_or(String::new(), |p| format!(":{}", p.line()));
    let what = match e.kind() {
        ::csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("got {len} cells, expected {expected_len} as in the header")
        }
        ::csv::ErrorKind::Utf8 { err, .. } => {
            format!("column {} is not UTF-8 text", err.field() + 1)
        }
        _ => format!("is not valid CSV: {e}"),
    };
    Error::data(what)
        .at(format!("{}{line}", path.display()))
        .fix("put cells with commas, quotes or line ends between quotes, and save as UTF-8")
}
