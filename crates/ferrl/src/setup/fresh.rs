//! A new model for `[model.init]`: random weights, and a tokenizer trained on the stage's data.

use super::data::{task_name, tasks};
use crate::algo::{self, Feed};
use crate::data::hub::HubCache;
use crate::data::{self, Dataset, Texts, strings};
use crate::recipe::{InitSettings, Recipe};
use crate::source::encoding;
use ferrl_engine::checkpoint::{InitOptions, SaveOptions, StorageFormat, init_model};
use ferrl_engine::tokenizer::{Tokenizer, train_bpe, train_chars};
use ferrl_engine::{Error, Result, nearest};
use ferrl_kernels::lock;
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Examples of a generated task that a new tokenizer is trained on.
const EXAMPLES: u64 = 2000;

/// A random model with a tokenizer for the stage's data.
pub(super) fn new_model(recipe: &Recipe, init: &InitSettings, dir: &Path) -> Result<()> {
    let (tokenizer, options) = new_model_parts(recipe, init)?;
    init_model(dir, &options, &SaveOptions { dtype: StorageFormat::F32, ..Default::default() })?;
    tokenizer.save(dir)
}

/// The tokenizer and the shape of a random model.
pub(crate) fn new_model_parts(recipe: &Recipe, init: &InitSettings) -> Result<(Tokenizer, InitOptions)> {
    let tokenizer = tokenizer(recipe, init)?;
    let mut options = InitOptions::new(&init.family);
    options.vocab = tokenizer.vocab_size();
    (options.hidden, options.layers) = (init.hidden, init.layers);
    (options.heads, options.kv_heads, options.ffn) = (init.heads, init.kv_heads, init.ffn);
    (options.experts, options.experts_per_token) = (init.experts, init.experts_per_token);
    options.expert_ffn = init.expert_ffn;
    (options.max_positions, options.seed, options.tied) = (init.max_positions, recipe.seed, Some(true));
    (options.eos, options.pad) = (tokenizer.eos().first().copied(), tokenizer.pad());
    Ok((tokenizer, options))
}

/// A tokenizer for the stage's training and evaluation data. For conversations it has a ChatML template.
fn tokenizer(recipe: &Recipe, init: &InitSettings) -> Result<Tokenizer> {
    let files = RecipeFiles::read(recipe, init.tokenizer == "char")?;
    let specials: &[&str] = if files.chat()? || recipe.data.apply_chat_template == Some(true) {
        &["<pad>", "<|im_start|>", "<|im_end|>"]
    } else {
        &["<pad>", "<eos>"]
    };
    let specials: Vec<String> = specials.iter().map(|s| s.to_string()).collect();
    let mut texts = Vec::new();
    for (_, task) in tasks(recipe)? {
        for i in 0..EXAMPLES {
            let e = task.example(i, false)?;
            // Games of a random player do not contain all observations.
            if i == 0 && (!e.turns.is_empty() || e.prompt.is_empty()) {
                texts.push(printable());
            }
            let turns: String = e.turns.iter().map(|(action, shown)| format!("{action}{shown}")).collect();
            texts.push(e.prompt + &e.answer + &turns);
        }
    }
    // The trainers take an iterator of texts: an error ends it and is stored here.
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let rows = files.texts().map_while(|text| text.map_err(|e| *lock(&failed) = Some(e)).ok());
    let texts = texts.into_iter().chain(rows);
    let made = match init.tokenizer.as_str() {
        "char" => train_chars(texts, &specials),
        "bpe" => train_bpe(texts, init.vocab, &specials),
        other => {
            let hint = nearest(other, ["char", "bpe"]).unwrap_or("char");
            return Err(Error::usage(format!("unknown tokenizer {other:?}, expected char or bpe"))
                .at("model.init.tokenizer")
                .fix(format!("model.init.tokenizer = \"{hint}\"")));
        }
    };
    match failed.into_inner().unwrap_or_else(|p| p.into_inner()) {
        Some(error) => Err(error),
        None => made,
    }
}

/// Every printable character of ASCII.
fn printable() -> String {
    ('\n'..='\n').chain(' '..='~').collect()
}

/// The files of a recipe and how their rows are read.
struct RecipeFiles {
    datasets: Vec<Arc<Dataset>>,
    texts: Texts,
    feed: Feed,
    /// Texts of the recipe that are part of prompts.
    words: Vec<String>,
    /// Whether rows may come without a prompt.
    promptless: bool,
    /// Whether all texts of a row count: characters that occur only in an answer column are sampled, too.
    all: bool,
}

impl RecipeFiles {
    fn read(recipe: &Recipe, all: bool) -> Result<Self> {
        let sources =
            recipe.data.train.iter().filter(|n| task_name(n).is_none()).map(|n| data::DataSource::parse(n));
        let held_out =
            recipe.eval.data.iter().filter(|n| task_name(n).is_none()).map(|n| data::DataSource::held_out(n));
        let read =
            |source: Result<data::DataSource>| Ok(Arc::new(Dataset::read(&source?, &HubCache::from_env())?));
        let d = &recipe.data;
        let words = [d.system.clone(), d.prefill.clone(), Some(d.separator.clone())].into_iter().flatten();
        // Text of the ChatML template between messages.
        let chat = "system\nuser\nassistant\ntool\n".to_owned();
        // Observations are in no file.
        let any = (!recipe.env.named().is_empty()).then(printable);
        Ok(RecipeFiles {
            datasets: sources.chain(held_out).map(read).collect::<Result<_>>()?,
            texts: Texts::new(&encoding(d)?)?,
            feed: algo::find(recipe.algorithm_name())?.feed,
            words: words.chain([chat]).chain(any).collect(),
            promptless: !recipe.env.named().is_empty(),
            all,
        })
    }

    /// Whether rows are conversations, by the first row of each file.
    fn chat(&self) -> Result<bool> {
        for dataset in &self.datasets {
            if self.row(dataset, 0)?.1 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn row(&self, dataset: &Dataset, number: usize) -> Result<(Vec<String>, bool)> {
        let row = dataset.row(number)?;
        let columns = self.texts.columns(&row);
        if self.promptless && !["prompt", "messages"].iter().any(|name| columns.contains(name)) {
            return Ok((strings(Value::Object(row)), false));
        }
        let has = |column: &str| columns.contains(&column);
        let grouped = has("completions") && (has("rewards") || !self.feed.sampled());
        let kind = self.feed.row_kind(grouped);
        let (mut texts, chat) = self.texts.of(&row, kind).map_err(|e| e.at(dataset.place(number)))?;
        if self.all {
            texts.extend(strings(Value::Object(row)));
        }
        Ok((texts, chat))
    }

    fn texts(&self) -> impl Iterator<Item = Result<String>> + '_ {
        let words = self.words.iter().filter(|_| !self.datasets.is_empty()).cloned().map(Ok);
        let rows = self.datasets.iter().flat_map(|d| (0..d.len()).map(move |i| (d, i)));
        words.chain(rows.flat_map(|(dataset, i)| match self.row(dataset, i) {
            Ok((texts, _)) => texts.into_iter().map(Ok).collect(),
            Err(e) => vec![Err(e)],
        }))
    }
}
