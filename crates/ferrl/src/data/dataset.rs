//! All rows of a source, each with the place it came from.

use std::path::PathBuf;

use ferrl_engine::{Error, Result};

use super::hub::Cache;
use super::{Row, Source, format_of};

/// A row and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Its columns.
    pub row: Row,
    /// Which file of the dataset.
    pub file: usize,
    /// Line of a JSONL file, row of any other, from 1.
    pub number: usize,
}

/// The rows of one source, in the order of its files.
#[derive(Clone, Debug, Default)]
pub struct Dataset {
    /// The source as it was written.
    pub name: String,
    /// How often each row is seen in an epoch.
    pub weight: f64,
    /// The files it was read from.
    pub files: Vec<PathBuf>,
    /// Its rows.
    pub records: Vec<Record>,
}

impl Dataset {
    /// Reads a source; the first row that cannot be read is an error.
    pub fn read(source: &Source, cache: &Cache) -> Result<Self> {
        Self::read_with(source, cache, &mut Err)
    }

    /// Reads a source; `bad` is given each row that cannot be read and may pass over it.
    pub fn read_with(
        source: &Source,
        cache: &Cache,
        bad: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Self> {
        if !(source.weight.is_finite() && source.weight > 0.0) {
            return Err(Error::usage(format!("the weight is {}, expected a number above 0", source.weight))
                .at(&source.path)
                .fix("leave the source out, or give it a positive weight"));
        }
        let files = source.files(cache)?;
        let mut records = Vec::new();
        for (file, path) in files.iter().enumerate() {
            let format = format_of(path)?;
            format.read(path, &mut |number, row| {
                match row {
                    Ok(row) => records.push(Record { row, file, number }),
                    Err(e) => bad(e.at(format!("{}:{number}", path.display())))?,
                }
                Ok(())
            })?;
        }
        if let Some(slice) = source.slice {
            let range = slice.range(records.len());
            records = records.drain(range).collect();
        }
        if records.is_empty() {
            return Err(Error::data("there are no rows")
                .at(&source.path)
                .fix("check the files and the range"));
        }
        Ok(Dataset { name: source.path.clone(), weight: source.weight, files, records })
    }

    /// A dataset made of rows that are already in memory.
    pub fn from_rows(name: &str, rows: Vec<Row>) -> Self {
        let number = |(i, row)| Record { row, file: 0, number: i + 1 };
        let records = rows.into_iter().enumerate().map(number).collect();
        Dataset { name: name.to_owned(), weight: 1.0, files: vec![name.into()], records }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// File and number of a row, as messages name it.
    pub fn place(&self, index: usize) -> String {
        match self.records.get(index) {
            Some(r) => format!(
                "{}:{}",
                self.files.get(r.file).map_or("".into(), |f| f.display().to_string()),
                r.number
            ),
            None => format!("{}: row {index}", self.name),
        }
    }
}
