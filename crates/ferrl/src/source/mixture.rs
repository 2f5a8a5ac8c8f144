//! Examples from files, folders, hub datasets and generated tasks, mixed by weight, in a resumable order.

use super::item::{is_group, item};
use super::survey::{ModelRoom, Overlap};
use super::{Item, SourceSummary, SurveyProgress};
use crate::algo;
use crate::data::loader::{self, Loader, Size};
use crate::data::prompt::PromptSettings;
use crate::data::schema::RowKind;
use crate::data::{self, Dataset, Encoder, Finding, Overlong, RowCounts};
use crate::recipe::DataSettings;
use crate::task::TaskExamples;
use crate::warnings::Warnings;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// One of the sources that are mixed.
pub enum MixturePart {
    /// Rows of files.
    Rows(DatasetRows),
    /// A generated task and its weight.
    Task(Box<TaskExamples>, f64),
}

/// The rows of a dataset that are used.
pub struct DatasetRows {
    dataset: Arc<Dataset>,
    weight: f64,
    pub(super) used: Vec<u32>,
}

impl DatasetRows {
    /// A row in use, by its number in the dataset, and its place.
    pub(super) fn read(&self, number: u32) -> Result<(data::Row, String)> {
        Ok((self.dataset.row(number as usize)?, self.dataset.place(number as usize)))
    }

    pub(super) fn name(&self) -> &str {
        &self.dataset.name
    }
}

impl MixturePart {
    /// All rows of a dataset.
    pub fn of(dataset: Arc<Dataset>, weight: f64) -> Self {
        let used = (0..dataset.len() as u32).collect();
        MixturePart::Rows(DatasetRows { dataset, weight, used })
    }

    /// Its rows, where it has some.
    pub(super) fn rows(&self) -> Option<&DatasetRows> {
        match self {
            MixturePart::Rows(rows) => Some(rows),
            MixturePart::Task(..) => None,
        }
    }
}

pub struct ReadingPurpose<'a> {
    /// How rows become examples.
    pub data: &'a DataSettings,
    /// The directory of the model, for its chat template.
    pub model: &'a Path,
    pub tokenizer: &'a Tokenizer,
    pub feed: algo::Feed,
    /// Seed of the order.
    pub seed: u64,
    /// Fraction of held-out rows, and whether to read these or the others.
    pub split: Option<(f64, bool)>,
    /// How they become tokens.
    pub encoding: PromptSettings,
    /// What the model can take.
    pub room: ModelRoom,
    pub warnings: &'a Warnings,
}

pub struct Mixture {
    pub(super) parts: Vec<MixturePart>,
    loader: Loader,
    pub(super) encoder: Encoder,
    pub(super) feed: algo::Feed,
    /// Whether rows have completions with rewards.
    pub(super) grouped: bool,
    drawn: u64,
    /// Truncated sequences so far.
    counts: RowCounts,
    pub(super) room: ModelRoom,
    /// Rows that were left out when it was made.
    pub(super) dropped: Finding,
    /// Held-out data, checked together with this source and compared with it.
    pub(super) held_out: Vec<Mixture>,
    pub(super) summary: SourceSummary,
    pub(super) warnings: Warnings,
    pub(super) overlap: Overlap,
}

/// Examples of a task in a round of the loader, where only tasks are mixed and no epoch ends.
const ROUND: usize = 1024;

impl Mixture {
    /// Mixes sources by weight. A task of weight 1 adds as many examples to an epoch as all files have rows.
    pub fn new(mut parts: Vec<MixturePart>, how: &ReadingPurpose<'_>) -> Result<Self> {
        if parts.is_empty() {
            return Err(Error::usage("there is no training data")
                .at("data.train")
                .fix("data.train = [\"rows.jsonl\"]"));
        }
        if let Some((share, held_out)) = how.split {
            parts.iter_mut().enumerate().try_for_each(|(i, p)| p.split(i, share, held_out, how.seed))?;
        }
        let mixed = parts.len() > 1;
        for part in &mut parts {
            if let MixturePart::Task(task, _) = part {
                task.named = mixed;
            }
        }
        let encoding = how.encoding.clone();
        let drops = encoding.overlong == Overlong::Drop;
        let grouped = how.feed.sampled() && grouped(&parts, &encoding)?;
        let encoder = Encoder::for_model(how.tokenizer.clone(), how.model, encoding)?;
        let options =
            loader::Options { seed: how.seed, shuffle: how.data.shuffle, replacement: how.data.replacement };
        let loader = Loader::new(sizes(&parts), options)?;
        let mut mixture = Mixture {
            loader,
            encoder,
            feed: how.feed,
            grouped,
            drawn: 0,
            counts: RowCounts::default(),
            room: how.room,
            dropped: Finding::default(),
            held_out: Vec::new(),
            summary: SourceSummary { rows: rows(&parts), ..Default::default() },
            warnings: how.warnings.clone(),
            overlap: Overlap::named(&how.data.overlap)?,
            parts,
        };
        if drops {
            mixture.prune()?;
            mixture.loader = Loader::new(sizes(&mixture.parts), options)?;
        }
        unused(&mixture.parts, &mixture.loader, how.warnings);
        Ok(mixture)
    }

    /// Adds held-out data to check before the first step. With `data.overlap = "drop"` overlapping rows are dropped now, since an epoch
    /// has a fixed number of rows.
    pub fn with_held_out(mut self, held_out: Vec<Mixture>) -> Result<Self> {
        self.held_out = held_out;
        if self.overlap == Overlap::Drop && !self.held_out.is_empty() {
            self.drop_overlap()?;
            self.loader = Loader::new(sizes(&self.parts), self.loader.options())?;
        }
        Ok(self)
    }

    fn draw(&mut self, part: usize, row: u64) -> Result<Item> {
        let number = self.drawn;
        self.drawn += 1;
        match &self.parts[part] {
            MixturePart::Task(task, _) => task.item(row, number, &self.encoder),
            MixturePart::Rows(rows) => {
                let (record, place) = rows.read(rows.used[row as usize])?;
                let kind = self.row_kind(&record);
                let sample = self.encoder.encode(&record, kind, &place, &mut self.counts)?;
                let sample = sample.ok_or_else(|| Error::data("the row was to be left out").at(&place))?;
                item(sample, self.feed, number, &self.encoder)
            }
        }
    }

    /// The kind of a row. Either all prompts have completions or none.
    pub(super) fn row_kind(&self, row: &data::Row) -> RowKind {
        let brings = || self.encoder.columns(row).contains(&"completions");
        self.feed.row_kind(if self.feed.sampled() { self.grouped } else { brings() })
    }

    fn ends(&self) -> bool {
        rows(&self.parts).is_some()
    }
}

impl MixturePart {
    /// Keeps only the held-out fraction of the rows, or only the others. The split depends on the seed and the number of rows, with at
    /// least one row on either side. Tasks have their own held-out part.
    fn split(&mut self, number: usize, share: f64, held_out: bool, seed: u64) -> Result<()> {
        let MixturePart::Rows(DatasetRows { dataset, used, .. }) = self else { return Ok(()) };
        let n = used.len();
        if n < 2 {
            return Err(Error::data(format!("{n} rows cannot be split"))
                .at(&dataset.name)
                .fix("more rows, or eval.data instead of eval.split"));
        }
        let key = [seed as u32, (seed >> 32) as u32];
        used.sort_by_cached_key(|&row| (philox4x32([row, number as u32, 0, HELD_OUT], key), row));
        let held = ((share * n as f64).round() as usize).clamp(1, n - 1);
        *used = if held_out { used[..held].to_vec() } else { used[held..].to_vec() };
        used.sort_unstable();
        Ok(())
    }

    fn name(&self) -> String {
        match self {
            MixturePart::Rows(rows) => rows.dataset.name.clone(),
            MixturePart::Task(task, _) => format!("task:{}", task.name),
        }
    }
}

/// What a choice is for; part of its random numbers' counter.
const HELD_OUT: u32 = 0x6865_6c64;

/// Rows of all files; none where there are only tasks.
fn rows(parts: &[MixturePart]) -> Option<usize> {
    let files = || parts.iter().filter_map(MixturePart::rows);
    files().next().map(|_| files().map(|rows| rows.used.len()).sum())
}

fn sizes(parts: &[MixturePart]) -> Vec<Size> {
    let all = rows(parts).unwrap_or(ROUND);
    let size = |part: &MixturePart| match part {
        MixturePart::Rows(rows) => Size::of(rows.used.len(), rows.weight),
        MixturePart::Task(_, weight) => Size { rows: all, weight: *weight, endless: true },
    };
    parts.iter().map(size).collect()
}

/// Warns of sources without rows in the first epoch because of a small weight.
fn unused(parts: &[MixturePart], loader: &Loader, warnings: &Warnings) {
    let empty: Vec<String> =
        (0..parts.len()).filter(|&i| loader.rows_from(i) == 0).map(|i| parts[i].name()).collect();
    if !empty.is_empty() {
        let what =
            format!("the weight of {} is so small that the first epoch has no row of it", empty.join(", "));
        warnings.raise("unused-source", what, "a larger weight in data.weights, or leave the source out");
    }
}

/// The part of a recipe that says how rows become examples.
pub fn encoding(settings: &DataSettings) -> Result<PromptSettings> {
    let apply = match settings.apply_chat_template {
        None => "auto",
        Some(true) => "on",
        Some(false) => "off",
    };
    Ok(PromptSettings {
        columns: settings.columns.clone(),
        template: settings.template.clone(),
        system: settings.system.clone(),
        prefill: settings.prefill.clone(),
        examples: settings.examples.clone(),
        separator: settings.separator.clone(),
        date: settings.date.clone(),
        apply_chat_template: serde_json::from_value(apply.into())
            .map_err(|e| Error::usage(format!("data.apply_chat_template: {e}")))?,
        max_length: Some(settings.max_length),
        overlong: serde_json::from_value(settings.overlong.as_str().into())
            .map_err(|e| Error::usage(format!("data.overlong: {e}")))?,
        ..Default::default()
    })
}

impl Mixture {
    /// The next `n` examples, or what is left of the epoch.
    pub fn next(&mut self, n: usize) -> Result<Vec<Item>> {
        let picks = self.loader.next_batch(n)?.picks;
        picks.into_iter().map(|(part, row)| self.draw(part, row)).collect()
    }
    /// Examples per epoch; `None` if endless.
    pub fn epoch(&self) -> Option<usize> {
        self.ends().then(|| self.loader.epoch_rows())
    }
    /// Passes over the data so far; 0 for a stream without end.
    pub fn epochs(&self) -> f64 {
        if self.ends() { self.loader.epochs() } else { 0.0 }
    }
    /// Number of batches of up to `batch` examples in `epochs` passes over the data: the last one of a pass is smaller. `None` without
    /// end.
    pub fn batches(&self, epochs: f64, batch: usize) -> Option<u64> {
        self.ends().then(|| self.loader.batches(epochs, batch))
    }
    /// Whether all prompts come with completions and rewards: nothing is sampled then.
    pub fn has_rewards(&self) -> bool {
        self.grouped
    }
    /// Number of sequences truncated so far, and drawn so far.
    pub fn cut(&self) -> usize {
        self.counts.truncated
    }
    /// Checks every example, in the order of the files; returns the first error and raises warnings. Does not change the
    /// position.
    pub fn check(&mut self, progress: SurveyProgress<'_>) -> Result<()> {
        self.check_with(&|_| Ok(()), progress)
    }
    /// Summary of the source, exact after [`Mixture::check`].
    pub fn summary(&self) -> SourceSummary {
        self.summary
    }
    /// Position in the stream.
    pub fn state(&self) -> Value {
        serde_json::json!({ "loader": self.loader.state(), "drawn": self.drawn, "counts": self.counts })
    }
    /// Restores a position.
    pub fn restore(&mut self, state: &Value) -> Result<()> {
        let broken = |e: serde_json::Error| Error::data(format!("the loader's state cannot be read: {e}"));
        self.loader.restore(&serde_json::from_value(state["loader"].clone()).map_err(broken)?)?;
        self.drawn = serde_json::from_value(state["drawn"].clone()).map_err(broken)?;
        self.counts = serde_json::from_value(state["counts"].clone()).map_err(broken)?;
        Ok(())
    }
}

/// Whether rows have completions with rewards, by the first row.
fn grouped(parts: &[MixturePart], settings: &PromptSettings) -> Result<bool> {
    let first = parts.iter().filter_map(MixturePart::rows).find_map(|rows| Some((rows, *rows.used.first()?)));
    let Some((rows, number)) = first else { return Ok(false) };
    let (row, place) = rows.read(number)?;
    let record = settings.column_map()?.apply(&row).map_err(|e| e.at(place))?;
    let task = parts.iter().find(|p| matches!(p, MixturePart::Task(..)));
    match (is_group(&record), task) {
        (true, Some(task)) => Err(Error::usage(format!(
            "rows with completions and rewards cannot be mixed with {}",
            task.name()
        ))
        .at("data.train")
        .fix("train on them in a separate stage")),
        (grouped, _) => Ok(grouped),
    }
}
