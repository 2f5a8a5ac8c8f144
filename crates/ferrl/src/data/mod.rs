//! Data: files of any format to rows, rows to examples, examples in a reproducible order.
//!
//! A [`DataSource`] names files; a [`FileFormat`] reads them into [`Row`]s; [`schema`] says what a row means to an
//! algorithm; [`prompt`] turns it into tokens with a mask; [`loader`] decides which rows come next.

#[cfg(feature = "parquet")]
mod arrow;
pub mod check;
#[cfg(feature = "parquet")]
mod columns;
mod csv;
mod dataset;
mod encode;
mod example;
mod findings;
mod gzip;
pub mod hub;
mod json;
mod jsonl;
pub mod lines;
pub mod loader;
pub mod overlap;
#[cfg(feature = "parquet")]
mod parquet;
mod portions;
pub mod prompt;
pub mod schema;
mod source;
mod store;
mod text;
mod texts;
mod unique;
pub mod unpair;

use std::io::Read;
use std::path::Path;

use ferrl_engine::{Error, Result, nearest};
use serde_json::Value;

pub use dataset::Dataset;
pub use encode::Encoder;
pub use example::{EncodedRow, Example, MaskedTokens, Overlong, RowCounts};
pub use findings::{Finding, Findings};
pub use portions::{PORTION, portions};
pub use source::{Bound, DataSource, RowSlice, nearest_path};
pub use texts::{Texts, strings};

/// One row of data: column names and JSON values, in the order of the file.
pub type Row = serde_json::Map<String, Value>;

/// Longest row, in bytes of JSON.
pub const MAX_ROW: usize = 8 << 20;

pub struct FileRow {
    /// Its number, from 1: the line of a text file (where the row begins), the row of any other.
    pub number: usize,
    /// Its columns; a row that cannot be read is an error the taker may pass over.
    pub row: Result<Row>,
    /// Where its JSON text stands in the file, and how long it is, where it stands there as it is.
    pub at: Option<(u64, u32)>,
}

impl FileRow {
    fn new(number: usize, row: Result<Row>) -> Self {
        FileRow { number, row, at: None }
    }
}

/// Takes each row of a file.
pub type Each<'a> = &'a mut dyn FnMut(FileRow) -> Result<()>;

pub trait FileFormat: Sync {
    /// Its name in messages.
    fn name(&self) -> &'static str;
    /// File extensions, in lower case.
    fn extensions(&self) -> &'static [&'static str];
    /// Whether a file that begins like this is certainly of this format.
    fn begins(&self, head: &[u8]) -> bool;
    /// Whether a row can be found again by where its text stands.
    fn in_place(&self) -> bool {
        false
    }
    /// Gives every row in order, with bounded memory.
    fn read(&self, path: &Path, each: Each<'_>) -> Result<()>;
}

pub const FORMATS: &[&dyn FileFormat] = &[
    &json::JsonFormat,
    &jsonl::Jsonl,
    &csv::Csv,
    &text::Text,
    &gzip::Gzip,
    #[cfg(feature = "parquet")]
    &parquet::Parquet,
    #[cfg(feature = "parquet")]
    &arrow::ArrowFile,
    #[cfg(feature = "parquet")]
    &arrow::ArrowStream,
];

/// How compressed files that are not read begin, by what they are compressed, and what unpacks them.
const PACKED: &[(&[u8], &str, &str)] = &[
    (&[0x28, 0xb5, 0x2f, 0xfd], "Zstandard", "unpack it with `zstd -d`"),
    (b"\xfd7zXZ\0", "xz", "unpack it with `unxz`"),
    (b"BZh", "bzip2", "unpack it with `bunzip2`"),
    (b"PK\x03\x04", "zip", "unpack it with `unzip` (or save a spreadsheet as CSV)"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", "unpack it with `7z x`"),
];

/// The format of a file: what it begins with decides, then its extension.
pub fn format_of(path: &Path) -> Result<&'static dyn FileFormat> {
    let head = head(path)?;
    let at = |e: Error| Err(e.at(path.display()));
    if head.is_empty() {
        return at(Error::data("the file is empty").fix("write it again, or leave it out"));
    }
    if head.starts_with(b"version https://git-lfs") {
        return at(Error::data("is a Git LFS pointer, not the data").fix("run `git lfs pull` in its folder"));
    }
    if let Some(format) = FORMATS.iter().find(|f| f.begins(&head)) {
        return Ok(*format);
    }
    if let Some((_, name, unpack)) = PACKED.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return at(Error::data(format!("is compressed with {name}"))
            .fix(format!("{unpack}, or compress it with gzip")));
    }
    let extension = extension(path);
    if let Some(format) = FORMATS.iter().find(|f| f.extensions().contains(&extension.as_str())) {
        return Ok(*format);
    }
    if cfg!(not(feature = "parquet")) && (head.starts_with(b"PAR1") || head.starts_with(b"ARROW1")) {
        return at(Error::data("this build does not read Parquet and Arrow")
            .fix("build with the feature `parquet`, or convert the file to JSONL"));
    }
    let names: Vec<&str> = FORMATS.iter().flat_map(|f| f.extensions()).copied().collect();
    // Short extensions are all near to each other.
    let near = nearest(&extension, names.iter().copied()).filter(|_| extension.len() > 3);
    at(Error::data(format!("unknown kind of data file: extension {extension:?}, expected {}", list(&names)))
        .fix(match near {
            Some(near) => format!("rename it to .{near} if that is what it holds"),
            None => "convert it to JSONL: one JSON object per line".into(),
        }))
}

/// Gives `take` every row of a file with its place, such as `rows.jsonl:3`.
pub(crate) fn each_row(path: &Path, mut take: impl FnMut(&str, Row) -> Result<()>) -> Result<()> {
    format_of(path)?.read(path, &mut |line| {
        let place = format!("{}:{}", path.display(), line.number);
        take(&place, line.row.map_err(|e| e.at(&place))?)
    })
}

pub(crate) fn columns_of(row: &Row) -> String {
    row.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Whether a file's extension is one that some format has.
fn known(path: &Path) -> bool {
    let extension = extension(path);
    FORMATS.iter().any(|f| f.extensions().contains(&extension.as_str()))
}

/// Whether a file is plain text, which may as well describe the data beside it.
fn is_text(path: &Path) -> bool {
    extension(path) == "txt"
}

fn extension(path: &Path) -> String {
    path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// The first bytes of a file, a byte order mark left out.
fn head(path: &Path) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(4096).read_to_end(&mut head))
        .map_err(|e| unreadable(path, &e))?;
    Ok(match head.strip_prefix(BOM) {
        Some(rest) => rest.to_vec(),
        None => head,
    })
}

/// What some editors write before a text of UTF-8.
pub const BOM: &[u8] = &[0xef, 0xbb, 0xbf];

fn unreadable(path: &Path, e: &std::io::Error) -> Error {
    Error::data(format!("cannot read: {e}"))
        .at(path.display())
        .fix("check the path and that you may read the file")
}

/// Refuses columns of the same name: a row holds one value by name.
fn once_each(names: &[&str]) -> Result<()> {
    match names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
        Some((_, name)) => {
            Err(Error::data(format!("two columns are named {name:?}")).fix("give each its own name"))
        }
        None => Ok(()),
    }
}

/// Names joined for a message.
fn list<S: AsRef<str>>(names: &[S]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    if names.is_empty() { "nothing".into() } else { names.join(", ") }
}

/// What a value is, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The error for a row above the size limit.
fn too_long(bytes: usize) -> Error {
    let mib = |n: usize| n as f64 / f64::from(1 << 20);
    Error::data(format!("the row has {:.1} MiB, at most {:.0} MiB", mib(bytes), mib(MAX_ROW)))
        .fix("cut it into documents, or check that line ends and quotes are where they belong")
}

/// A row from a value, which has to be an object.
pub(crate) fn object(value: Value) -> Result<Row> {
    match value {
        Value::Object(row) => Ok(row),
        other => Err(Error::data(format!("a row is {}, expected an object with columns", kind(&other)))
            .fix("write each row as {\"prompt\": ..., ...}")),
    }
}
