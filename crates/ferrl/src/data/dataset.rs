//! All rows of a source, each with the place it came from.

use std::path::{Path, PathBuf};

use ferrl_engine::{Error, Result};

use super::hub::HubCache;
use super::store::{MEMORY, RowSpan, RowStore};
use super::{DataSource, MAX_ROW, Row, format_of, too_long};

/// The rows of one source, in the order of its files. They are parsed when they are asked for.
#[derive(Debug, Default)]
pub struct Dataset {
    /// The source as it was written.
    pub name: String,
    pub files: Vec<PathBuf>,
    spans: Vec<RowSpan>,
    store: RowStore,
    /// The suite whose published rows these are.
    suite: Option<&'static str>,
    /// Rows of a suite that were dropped because nothing could grade them.
    pub left_out: usize,
}

impl Dataset {
    /// Reads a source; the first row that cannot be read is an error.
    pub fn read(source: &DataSource, cache: &HubCache) -> Result<Self> {
        Self::read_with(source, cache, &mut Err)
    }

    /// Reads a source; `bad` is given each row that cannot be read and may pass over it.
    pub fn read_with(
        source: &DataSource,
        cache: &HubCache,
        bad: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Self> {
        Self::within(source, cache, bad, MEMORY)
    }

    /// The same with another bound on what is kept in memory.
    pub fn within(
        source: &DataSource,
        cache: &HubCache,
        bad: &mut dyn FnMut(Error) -> Result<()>,
        memory: u64,
    ) -> Result<Self> {
        let files = source.files(cache)?;
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |m| m.len());
        let large = files.iter().map(size).sum::<u64>() > memory;
        let (mut spans, mut store) = (Vec::new(), RowStore::new(memory));
        for (file, path) in files.iter().enumerate() {
            let format = format_of(path)?;
            if large && format.in_place() {
                store.read_in_place(file, path)?;
            }
            format.read(path, &mut |line| {
                let number = line.number;
                let kept = line.row.and_then(|row| {
                    let text = if line.at.is_some() && large { Vec::new() } else { text(&row)? };
                    let span = store.add(file, number, line.at, &text)?;
                    spans.push(span);
                    Ok(())
                });
                match kept {
                    Err(e) => bad(e.at(format!("{}:{number}", path.display()))),
                    Ok(()) => Ok(()),
                }
            })?;
        }
        if let Some(slice) = source.slice {
            let range = slice.range(spans.len());
            spans = spans.drain(range).collect();
        }
        if spans.is_empty() {
            return Err(Error::data("there are no rows")
                .at(&source.path)
                .fix("check the files and the range"));
        }
        if spans.len() > u32::MAX as usize {
            return Err(Error::data(format!("{} rows, at most {}", spans.len(), u32::MAX))
                .at(&source.path)
                .fix("name a part of it: train[:1000000]@path"));
        }
        store.finish()?;
        spans.shrink_to_fit();
        let name = source.path.clone();
        let mut dataset = Dataset { name, files, spans, store, suite: source.suite, left_out: 0 };
        dataset.leave_out()?;
        Ok(dataset)
    }

    /// Drops the rows of a suite that nothing could grade.
    fn leave_out(&mut self) -> Result<()> {
        let suite = self.suite.map(crate::suite::find).transpose()?;
        let Some(usable) = suite.and_then(|s| s.usable) else { return Ok(()) };
        let kept = (0..self.len()).map(|i| Ok(usable(&self.parsed(i)?))).collect::<Result<Vec<bool>>>()?;
        self.left_out = kept.iter().filter(|k| !**k).count();
        if self.left_out == self.len() {
            return Err(Error::data(format!(
                "none of the {} rows has tests that can be read",
                self.left_out
            ))
            .at(&self.name)
            .fix("give the published file"));
        }
        let mut kept = kept.into_iter();
        self.spans.retain(|_| kept.next().unwrap_or(true));
        Ok(())
    }

    /// A dataset made of rows that are already in memory.
    pub fn from_rows(name: &str, rows: Vec<Row>) -> Result<Self> {
        let (mut spans, mut store) = (Vec::with_capacity(rows.len()), RowStore::new(u64::MAX));
        for (i, row) in rows.into_iter().enumerate() {
            let at = |e: Error| e.at(format!("{name}:{}", i + 1));
            spans.push(store.add(0, i + 1, None, &text(&row).map_err(at)?)?);
        }
        store.finish()?;
        Ok(Dataset {
            name: name.to_owned(),
            files: vec![name.into()],
            spans,
            store,
            suite: None,
            left_out: 0,
        })
    }

    pub fn len(&self) -> usize {
        self.spans.len()
    }

    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// A row, parsed now; one of a suite with prompt and columns as the suite says.
    pub fn row(&self, index: usize) -> Result<Row> {
        let row = self.parsed(index)?;
        match self.suite {
            Some(name) => crate::suite::find(name)?.row(&row).map_err(|e| e.at(self.place(index))),
            None => Ok(row),
        }
    }

    fn parsed(&self, index: usize) -> Result<Row> {
        let Some(span) = self.spans.get(index) else {
            return Err(Error::data(format!("there is no row {index}")).at(&self.name));
        };
        let text = self.store.text(*span)?;
        serde_json::from_slice(&text).map_err(|e| {
            Error::data(format!("the row cannot be read a second time: {e}"))
                .at(self.place(index))
                .fix("leave data files alone during a run")
        })
    }

    /// File and number of a row, as messages name it.
    pub fn place(&self, index: usize) -> String {
        match self.spans.get(index) {
            Some(span) => {
                let file = self.files.get(span.file as usize).map_or(Path::new(""), PathBuf::as_path);
                format!("{}:{}", file.display(), span.number)
            }
            None => format!("{}: row {index}", self.name),
        }
    }
}

/// A row as it is kept.
fn text(row: &Row) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(row).map_err(|e| Error::data(format!("cannot be kept as JSON: {e}")))?;
    if text.len() > MAX_ROW {
        return Err(too_long(text.len()));
    }
    Ok(text)
}
