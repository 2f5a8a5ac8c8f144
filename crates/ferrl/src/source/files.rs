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
    wants: algo::Wants,
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
        Ok(FileSource { datasets, loader, encoder, wants, drawn: 0, counts: Counts::default() })
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
                let wants = schema_of(self.wants, &self.encoder.columns(row));
                if let Some(sample) = self.encoder.encode(row, wants, &place, &mut self.counts)? {
                    items.push(item(sample, self.wants, self.drawn)?);
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

/// How a row is read for an algorithm.
fn schema_of(wants: algo::Wants, columns: &[&str]) -> schema::Wants {
    match wants {
        algo::Wants::Demonstrations => schema::Wants::Sft,
        algo::Wants::Weighted if columns.contains(&"completions") => schema::Wants::Group,
        algo::Wants::Weighted => schema::Wants::Sft,
        algo::Wants::Pairs => schema::Wants::Preference,
        algo::Wants::StepPairs => schema::Wants::StepPreference,
        algo::Wants::Labelled => schema::Wants::Unpaired,
        algo::Wants::Targets => schema::Wants::Target,
        algo::Wants::Rollouts => schema::Wants::Prompt,
    }
}

fn item(sample: Sample, wants: algo::Wants, index: u64) -> Result<Item> {
    let sequence = |t: Tokens, kind: Kind| Sequence {
        pair: matches!(kind, Kind::Chosen | Kind::Rejected).then_some(0),
        ids: t.ids,
        trained: t.mask,
        weight: 1.0,
        kind,
        ..Default::default()
    };
    let number = |name: &str, otherwise: f32| match sample.extra.get(name) {
        None | Some(Value::Null) => Ok(otherwise),
        Some(value) => value.as_f64().map(|n| n as f32).filter(|n| n.is_finite()).ok_or_else(|| {
            Error::data(format!("column {name} is {value}, expected a number")).at(&sample.place)
        }),
    };
    Ok(match sample.example {
        Example::Text(tokens) if wants == algo::Wants::Weighted => {
            Item::Given(vec![sequence(tokens, Kind::Plain).rewarded(number("advantage", 1.0)?)])
        }
        Example::Text(tokens) => Item::Given(vec![sequence(tokens, Kind::Plain)]),
        Example::Pair { chosen, rejected } => {
            let margin = number("margin", 0.0)?;
            let chosen = Sequence { margin, ..sequence(chosen, Kind::Chosen) };
            Item::Given(vec![chosen, sequence(rejected, Kind::Rejected)])
        }
        Example::Labelled { tokens, label } => Item::Given(vec![sequence(tokens, Kind::Labelled(label))]),
        Example::Target { tokens, target } => Item::Given(vec![sequence(tokens, Kind::Target(target))]),
        Example::Group { completions, rewards } => {
            let total = |i: usize| rewards.iter().map(|(_, list)| list[i]).sum();
            let answers = completions.into_iter().enumerate();
            Item::Given(answers.map(|(i, t)| sequence(t, Kind::Plain).rewarded(total(i))).collect())
        }
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
