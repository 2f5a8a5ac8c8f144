//! CSV and TSV with a header line.
//!
//! A column is read as numbers, booleans or JSON lists and objects when every cell of it is one and would be
//! written back with the same characters; otherwise it is text. Empty cells are null.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use ::csv::{ReaderBuilder, StringRecord};
use ferrl_engine::{Error, Result};
use serde_json::Value;

use super::{BOM, Each, FileFormat, FileRow, MAX_ROW, Row, extension, once_each, too_long, unreadable};

/// Comma- or tab-separated values.
pub struct Csv;

impl FileFormat for Csv {
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
        let delimiter = if extension(path) == "tsv" { b'\t' } else { b',' };
        let open = || -> Result<BufReader<File>> {
            let mut reader =
                BufReader::with_capacity(1 << 16, File::open(path).map_err(|e| unreadable(path, &e))?);
            if reader.fill_buf().map_err(|e| unreadable(path, &e))?.starts_with(BOM) {
                reader.consume(BOM.len());
            }
            Ok(reader)
        };
        check_quotes(&mut open()?, delimiter, path)?;
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(open()?);
        let header = reader.headers().map_err(|e| broken(path, &e))?.clone();
        once_each(&header.iter().collect::<Vec<_>>()).map_err(|e| e.at(format!("{}:1", path.display())))?;
        let (mut types, mut record) = (vec![Type::default(); header.len()], StringRecord::new());
        while reader.read_record(&mut record).map_err(|e| broken(path, &e))? {
            let cells = record.iter().zip(&mut types).filter(|(cell, _)| !cell.is_empty());
            cells.for_each(|(cell, kind)| kind.see(cell));
        }
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(open()?);
        while reader.read_record(&mut record).map_err(|e| broken(path, &e))? {
            let number = record.position().map_or(0, |at| at.line() as usize);
            let cells = header.iter().zip(&record).zip(&types);
            let row: Row = cells.map(|((name, cell), kind)| (name.to_owned(), kind.value(cell))).collect();
            each(FileRow::new(number, Ok(row)))?;
        }
        Ok(())
    }
}

/// What all cells of a column are.
#[derive(Clone, Copy, Default, PartialEq)]
enum Type {
    /// No cell has anything in it.
    #[default]
    Empty,
    Number,
    Bool,
    Nested,
    Text,
}

impl Type {
    /// Looks at one more cell.
    fn see(&mut self, cell: &str) {
        if *self == Type::Text {
            return;
        }
        let this = match serde_json::from_str::<Value>(cell) {
            Ok(Value::Number(n)) if n.to_string() == cell => Type::Number,
            Ok(Value::Bool(_)) => Type::Bool,
            Ok(Value::Array(_) | Value::Object(_)) => Type::Nested,
            _ => Type::Text,
        };
        *self = if *self == Type::Empty || *self == this { this } else { Type::Text };
    }

    fn value(self, cell: &str) -> Value {
        match self {
            _ if cell.is_empty() => Value::Null,
            Type::Text | Type::Empty => cell.into(),
            _ => serde_json::from_str(cell).unwrap_or_else(|_| cell.into()),
        }
    }
}

/// Where the parser stands between two bytes.
#[derive(Clone, Copy, PartialEq)]
enum At {
    /// Of a cell.
    Start,
    Plain,
    Quoted,
    /// A quote inside a quoted cell: its end, or the first half of a quote that is meant.
    Quote,
}

/// An open quote swallows the rest of the file without an error of the parser's, and all memory with it: this looks first.
fn check_quotes(reader: &mut impl BufRead, delimiter: u8, path: &Path) -> Result<()> {
    let (mut at, mut line, mut opened, mut length) = (At::Start, 1, 1, 0);
    loop {
        let buffer = reader.fill_buf().map_err(|e| unreadable(path, &e))?;
        let read = buffer.len();
        if read == 0 {
            break;
        }
        for &b in buffer {
            let ends = at != At::Quoted && (b == b'\n' || b == b'\r');
            length = if ends { 0 } else { length + 1 };
            if length > MAX_ROW {
                return Err(too_long(length).at(format!("{}:{opened}", path.display())));
            }
            line += usize::from(b == b'\n');
            at = match (at, b) {
                (At::Start, b'"') => {
                    opened = line;
                    At::Quoted
                }
                (At::Quote, b'"') => At::Quoted,
                (At::Quoted, b'"') => At::Quote,
                (At::Quoted, _) => At::Quoted,
                (_, b'\n' | b'\r') => {
                    opened = line;
                    At::Start
                }
                (_, b) if b == delimiter => At::Start,
                _ => At::Plain,
            };
        }
        reader.consume(read);
    }
    if at == At::Quoted {
        return Err(Error::data("a quote is opened and never closed, or the file is cut short")
            .at(format!("{}:{opened}", path.display()))
            .fix("write \"\" for a quote inside a quoted cell"));
    }
    Ok(())
}

fn broken(path: &Path, e: &::csv::Error) -> Error {
    let line = e.position().map_or(String::new(), |p| format!(":{}", p.line()));
    let what = match e.kind() {
        ::csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            let cells = if *len == 1 { "cell" } else { "cells" };
            format!("got {len} {cells}, expected {expected_len} as in the header")
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
