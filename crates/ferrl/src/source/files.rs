//! Examples from files, in a shuffled order that can be taken up again.

use super::{Item, Prompt, Source};
use crate::algo;
use crate::data::hub::Cache;
use crate::data::loader::{self, Loader};
use crate::data::prompt::Settings;
use crate::data::schema;
use crate::data::{self, Counts, Dataset, Encoder, Example, Sample, Tokens};
use crate::experience::{Kind, Sequence};
use crate::recipe::Data;
use ferrl_engine::chat::ChatTemplate;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Rows of one or more datasets as examples.
pub struct FileSource {
    datasets: Vec<Dataset>,
    loader: Loader,
    encoder: Encoder,
    wants: schema::Wants,
    drawn: u64,
    /// What was cut or left out so far.
    pub counts: Counts,
}

impl FileSource {
    /// Reads the sources a recipe names.
    pub fn new(
        sources: &[String],
        settings: &Data,
        model: &Path,
        tokenizer: &Tokenizer,
        wants: algo::Wants,
        seed: u64,
    ) -> Result<Self> {
        if sources.is_empty() {
            return Err(Error::usage("there is nothing to learn from")
                .at("data.train")
                .fix("data.train = [\"rows.jsonl\"]"));
        }
        if !settings.weights.is_empty() && settings.weights.len() != sources.len() {
            let (weights, files) = (settings.weights.len(), sources.len());
            return Err(Error::usage(format!("{weights} weights for {files} sources")).at("data.weights"));
        }
        let cache = Cache::from_env();
        let mut datasets = Vec::new();
        for (i, text) in sources.iter().enumerate() {
            let mut source = data::Source::parse(text)?;
            source.weight = settings.weights.get(i).copied().unwrap_or(source.weight);
            datasets.push(Dataset::read(&source, &cache)?);
        }
        let chat = ChatTemplate::from_dir(model).ok();
        let encoder = Encoder::new(tokenizer.clone(), chat, encoding(settings)?)?;
        let options = loader::Options { seed, shuffle: settings.shuffle, drop_last: true };
        let loader = Loader::new(&datasets, options)?;
        let wants = schema_of(wants);
        Ok(FileSource { datasets, loader, encoder, wants, drawn: 0, counts: Counts::default() })
    }
}

/// The rows an algorithm needs, by what it learns from.
pub fn schema_of(wants: algo::Wants) -> schema::Wants {
    match wants {
        algo::Wants::Demonstrations => schema::Wants::Sft,
        algo::Wants::Pairs => schema::Wants::Preference,
        algo::Wants::Rollouts => schema::Wants::Prompt,
    }
}

/// The part of a recipe that says how rows become examples.
pub fn encoding(settings: &Data) -> Result<Settings> {
    let apply = match settings.apply_chat_template {
        None => "auto",
        Some(true) => "on",
        Some(false) => "off",
    };
    Ok(Settings {
        columns: settings.columns.clone(),
        template: settings.template.clone(),
        system: settings.system.clone(),
        prefill: settings.prefill.clone(),
        examples: settings.examples.clone(),
        separator: settings.separator.clone(),
        apply_chat_template: serde_json::from_value(apply.into())
            .map_err(|e| Error::usage(format!("data.apply_chat_template: {e}")))?,
        max_length: Some(settings.max_length),
        ..Default::default()
    })
}

impl Source for FileSource {
    fn next(&mut self, n: usize) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        // A row that was dropped as too long is replaced by the next.
        while items.len() < n {
            for pick in self.loader.next_batch(n - items.len())?.picks {
                let dataset = &self.datasets[pick.dataset];
                let (row, place) = (&dataset.records[pick.row].row, dataset.place(pick.row));
                if let Some(sample) = self.encoder.encode(row, self.wants, &place, &mut self.counts)? {
                    items.push(item(sample, self.drawn)?);
                    self.drawn += 1;
                }
            }
        }
        Ok(items)
    }
    fn epoch(&self) -> Option<usize> {
        Some(self.loader.epoch_rows())
    }
    fn state(&self) -> Value {
        serde_json::json!({ "loader": self.loader.state(), "drawn": self.drawn, "counts": self.counts })
    }
    fn restore(&mut self, state: &Value) -> Result<()> {
        let broken = |e: serde_json::Error| Error::data(format!("the loader's state cannot be read: {e}"));
        self.loader.restore(&serde_json::from_value(state["loader"].clone()).map_err(broken)?)?;
        self.drawn = serde_json::from_value(state["drawn"].clone()).map_err(broken)?;
        self.counts = serde_json::from_value(state["counts"].clone()).map_err(broken)?;
        Ok(())
    }
}

fn item(sample: Sample, index: u64) -> Result<Item> {
    let sequence = |t: Tokens, kind: Kind, pair: Option<usize>| Sequence {
        ids: t.ids,
        trained: t.mask,
        weight: 1.0,
        kind,
        pair,
        ..Default::default()
    };
    Ok(match sample.example {
        Example::Text(tokens) => Item::Given(vec![sequence(tokens, Kind::Plain, None)]),
        Example::Pair { chosen, rejected } => Item::Given(vec![
            sequence(chosen, Kind::Chosen, Some(0)),
            sequence(rejected, Kind::Rejected, Some(0)),
        ]),
        Example::Prompt { ids } => {
            let text = match &sample.prompt {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            Item::Ask(Prompt { index, ids, text, columns: sample.extra })
        }
        other => {
            return Err(Error::data(format!("no algorithm learns from {other:?} yet")).at(sample.place));
        }
    })
}
