//! Examples from files, in a shuffled order that can be taken up again.

use super::{Group, Item, Prompt, Source};
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
use ferrl_kernels::philox::philox4x32;
use serde_json::Value;
use std::path::Path;

/// Rows of one or more datasets as examples.
pub struct FileSource {
    datasets: Vec<Dataset>,
    /// Rows of each dataset that are used.
    rows: Vec<Vec<usize>>,
    loader: Loader,
    options: loader::Options,
    encoder: Encoder,
    wants: algo::Wants,
    /// Whether rows bring their answers.
    grouped: bool,
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
        Self::over(datasets, settings, model, tokenizer, wants, seed)
    }

    /// The same over rows that are in memory.
    pub fn over(
        datasets: Vec<Dataset>,
        settings: &Data,
        model: &Path,
        tokenizer: &Tokenizer,
        wants: algo::Wants,
        seed: u64,
    ) -> Result<Self> {
        let chat = ChatTemplate::from_dir(model).ok();
        let encoding = encoding(settings)?;
        let grouped = wants == algo::Wants::Rollouts && grouped(&datasets, &encoding)?;
        let encoder = Encoder::new(tokenizer.clone(), chat, encoding)?;
        let options = loader::Options { seed, shuffle: settings.shuffle, drop_last: true };
        let loader = Loader::new(&datasets, options)?;
        let rows = datasets.iter().map(|d| (0..d.len()).collect()).collect();
        let counts = Counts::default();
        Ok(FileSource { datasets, rows, loader, options, encoder, wants, grouped, drawn: 0, counts })
    }

    /// Only the rows that a share holds out, or only the others. Which these are depends on the seed and on how many
    /// rows each source has; at least one of each source is on either side.
    pub fn split(mut self, share: f64, held_out: bool) -> Result<Self> {
        for (d, rows) in self.rows.iter_mut().enumerate() {
            let n = rows.len();
            if n < 2 {
                return Err(Error::data(format!("{n} rows cannot be split"))
                    .at(&self.datasets[d].name)
                    .fix("more rows, or eval.data instead of eval.split"));
            }
            let key = [self.options.seed as u32, (self.options.seed >> 32) as u32];
            rows.sort_by_key(|&row| (philox4x32([row as u32, d as u32, 0, HELD_OUT], key), row));
            let held = ((share * n as f64).round() as usize).clamp(1, n - 1);
            *rows = if held_out { rows[..held].to_vec() } else { rows[held..].to_vec() };
            rows.sort_unstable();
        }
        let sizes = self.rows.iter().zip(&self.datasets).map(|(rows, d)| (rows.len(), d.weight)).collect();
        self.loader = Loader::over(sizes, self.options)?;
        Ok(self)
    }
}

/// What a choice is for; part of its random numbers' counter.
const HELD_OUT: u32 = 0x6865_6c64;

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
        overlong: serde_json::from_value(settings.overlong.as_str().into())
            .map_err(|e| Error::usage(format!("data.overlong: {e}")))?,
        ..Default::default()
    })
}

impl Source for FileSource {
    fn next(&mut self, n: usize) -> Result<Vec<Item>> {
        let (mut items, mut dropped) = (Vec::new(), 0);
        // A row that was dropped as too long is replaced by the next.
        while items.len() < n {
            for pick in self.loader.next_batch(n - items.len())?.picks {
                let dataset = &self.datasets[pick.dataset];
                let number = self.rows[pick.dataset][pick.row];
                let (row, place) = (&dataset.records[number].row, dataset.place(number));
                let wants = schema_of(self.wants, self.grouped, &self.encoder.columns(row));
                if let Some(sample) = self.encoder.encode(row, wants, &place, &mut self.counts)? {
                    items.push(item(sample, self.wants, self.drawn, &self.encoder)?);
                    self.drawn += 1;
                    dropped = 0;
                } else if dropped > 2 * self.loader.epoch_rows() {
                    return Err(Error::data("every row is cut to nothing and dropped")
                        .at("data.max_length")
                        .fix("a larger data.max_length"));
                } else {
                    dropped += 1;
                }
            }
        }
        Ok(items)
    }
    fn epoch(&self) -> Option<usize> {
        Some(self.loader.epoch_rows())
    }
    fn epochs(&self) -> f64 {
        self.loader.epochs()
    }
    fn graded(&self) -> bool {
        self.grouped
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

/// Whether rows hold answers with rewards; what the first one says goes for all.
fn grouped(datasets: &[Dataset], settings: &Settings) -> Result<bool> {
    let Some((dataset, record)) = datasets.iter().find_map(|d| Some((d, d.records.first()?))) else {
        return Ok(false);
    };
    let row = settings.column_map()?.apply(&record.row).map_err(|e| e.at(dataset.place(0)))?;
    Ok(is_group(&row))
}

fn is_group(row: &data::Row) -> bool {
    ["completions", "rewards"].iter().all(|c| row.get(*c).is_some_and(|v| !v.is_null()))
}

/// How a row of these columns is read for an algorithm; `grouped` rows bring their answers.
pub fn schema_of(wants: algo::Wants, grouped: bool, columns: &[&str]) -> schema::Wants {
    match wants {
        algo::Wants::Demonstrations => schema::Wants::Sft,
        algo::Wants::Weighted if columns.contains(&"completions") => schema::Wants::Group,
        algo::Wants::Weighted => schema::Wants::Sft,
        algo::Wants::Pairs => schema::Wants::Preference,
        algo::Wants::StepPairs => schema::Wants::StepPreference,
        algo::Wants::Labelled => schema::Wants::Unpaired,
        algo::Wants::Targets => schema::Wants::Target,
        algo::Wants::Rollouts if grouped => schema::Wants::Group,
        algo::Wants::Rollouts => schema::Wants::Prompt,
    }
}

fn item(sample: Sample, wants: algo::Wants, index: u64, encoder: &Encoder) -> Result<Item> {
    let (tokenizer, renamed) = (encoder.tokenizer(), encoder.renamed());
    let sequence = |t: Tokens, kind: Kind| Sequence {
        pair: matches!(kind, Kind::Chosen | Kind::Rejected).then_some(0),
        ids: t.ids,
        trained: t.mask,
        weight: 1.0,
        kind,
        ..Default::default()
    };
    let ask = |ids: Vec<u32>, prompt: &Value, columns: data::Row| Prompt {
        index,
        ids,
        text: prompt.as_str().map_or_else(|| prompt.to_string(), String::from),
        messages: prompt.as_array().cloned().unwrap_or_default(),
        renamed: renamed.to_vec(),
        columns,
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
        Example::Group { completions, rewards } if wants == algo::Wants::Weighted => {
            let total = |i: usize| rewards.iter().map(|(_, list)| list[i]).sum();
            let answers = completions.into_iter().enumerate();
            Item::Given(answers.map(|(i, t)| sequence(t, Kind::Plain).rewarded(total(i))).collect())
        }
        Example::Prompt { .. } if is_group(&sample.extra) => {
            return Err(Error::data(
                "this row brings its answers and rewards, the first row is a prompt alone",
            )
            .at(sample.place)
            .fix("give either kind of row to a stage, not both"));
        }
        Example::Prompt { ids } => Item::Ask(ask(ids, &sample.prompt, sample.extra)),
        Example::Group { completions, rewards } => {
            let answer = |(i, tokens): (usize, Tokens)| {
                let mut s = sequence(tokens, Kind::Plain);
                // An answer without its end was cut.
                s.truncated = s.ids.last().is_some_and(|&id| !tokenizer.is_special(id));
                s.components = rewards.iter().map(|(name, list)| (name.clone(), list[i])).collect();
                s.sources = s.components.iter().map(|c| (1.0, Some(c.1))).collect();
                let total = s.components.iter().map(|c| c.1).sum();
                s.rewarded(total)
            };
            let answers: Vec<Sequence> = completions.into_iter().enumerate().map(answer).collect();
            let first = answers.first().and_then(|s| Some(s.ids[..=s.actions().next()?].to_vec()));
            let prompt = ask(first.unwrap_or_default(), &sample.prompt, sample.extra);
            Item::Graded(Group { prompt, answers, place: sample.place })
        }
        other => {
            return Err(Error::data(format!("no algorithm learns from {other:?} yet")).at(sample.place));
        }
    })
}
