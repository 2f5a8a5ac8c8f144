//! Training from Rust in a few lines: a config, your own rows, your own reward.
//!
//! A thin layer over [`Stage`]; [`Config::settings`] takes any other setting of a recipe.
//! `examples/reward.rs`, `examples/dpo.rs` and `examples/grpo.rs` are whole programs.

#![warn(missing_docs)]

use crate::algo;
use crate::data::{self, Row};
use crate::experience::Metrics;
use crate::recipe::{self, Recipe};
use crate::setup;
use crate::source::{Item, Mixture, MixturePart, ReadingPurpose, SurveyedExample, encoding};
use crate::train::Stage;
use ferrl_engine::checkpoint::{ModelDir, SaveOptions, StorageFormat};
use ferrl_engine::model::{Frozen, Model, Options};
use ferrl_kernels::{AUTO, Backend};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use crate::reward::{Reward, Rewards};
pub use crate::verify::Sample;
pub use ferrl_engine::{Error, Result};

/// What to train, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The algorithm: a name that `ferrl algorithms` lists.
    pub algorithm: String,
    /// The model: a Hugging Face directory.
    pub model: PathBuf,
    /// The reference model; the initial model by default.
    pub reference: Option<PathBuf>,
    /// Strength of the regularisation towards the reference: DPO's beta, or the coefficient of the KL penalty. By default the
    /// algorithm's.
    pub beta: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Rows per update.
    pub batch_size: usize,
    /// Completions per prompt (group size), where they are sampled.
    pub group_size: usize,
    /// Maximum tokens of a sampled completion.
    pub max_new_tokens: usize,
    /// Maximum tokens of a row; longer ones are truncated.
    pub max_length: usize,
    /// Random seed.
    pub seed: u64,
    /// Device: `cpu`, `cuda` or `cuda:N`; `auto` uses a GPU if there is one.
    pub device: String,
    /// Threads; all cores by default.
    pub threads: Option<usize>,
    /// Any other setting of a recipe, as on the command line: `"rollout.temperature=0.7"`.
    pub settings: Vec<String>,
}

impl Config {
    /// An algorithm's usual settings for a model.
    pub fn new(algorithm: &str, model: impl AsRef<Path>) -> Self {
        let rollout = Recipe::default().rollout;
        Config {
            algorithm: algorithm.into(),
            model: model.as_ref().into(),
            reference: None,
            beta: None,
            lr: 1e-5,
            batch_size: 4,
            group_size: rollout.samples,
            max_new_tokens: rollout.max_new_tokens,
            max_length: 1024,
            seed: 0,
            device: AUTO.into(),
            threads: None,
            settings: Vec::new(),
        }
    }
}

/// The recipe that a config stands for, checked like any other.
fn recipe(config: &Config) -> Result<Recipe> {
    let algorithm = &*config.algorithm;
    let mut settings = json!({ "name": algorithm });
    if let Some(beta) = config.beta {
        let defaults = (algo::find(algorithm)?.defaults)();
        match (defaults.get("beta"), defaults.get("kl")) {
            (Some(_), _) => settings["beta"] = json!(beta),
            (None, Some(_)) => settings["kl"] = json!({ "coef": beta }),
            _ => {
                let what = format!("{algorithm} has no reference, so it has no beta");
                return Err(Error::usage(what).at("Config::beta").fix("beta: None"));
            }
        }
    }
    let mut recipe = Recipe::default();
    recipe.model.path = Some(config.model.to_string_lossy().into());
    recipe.algo = settings.as_object().cloned().unwrap_or_default();
    (recipe.seed, recipe.device, recipe.optim.lr) = (config.seed, config.device.clone(), config.lr);
    recipe.data =
        recipe::DataSettings { train: vec!["dataset".into()], max_length: config.max_length, ..recipe.data };
    (recipe.train.batch, recipe.rollout.prompts) = (config.batch_size, config.batch_size);
    (recipe.rollout.samples, recipe.rollout.max_new_tokens) = (config.group_size, config.max_new_tokens);
    let longest = 2 * config.max_length + config.max_new_tokens;
    recipe.train.micro_batch_tokens = recipe.train.micro_batch_tokens.max(longest);
    let text = toml::to_string(&recipe).map_err(|e| Error::usage(format!("the config: {e}")))?;
    let mut resolved = Recipe::parse(&text, "config", "api", &config.settings)?;
    resolved.check(&[])?;
    Ok(resolved.stages.remove(0).recipe)
}

/// A reference model of its own, where the algorithm compares with one.
fn reference(config: &Config, recipe: &Recipe, backend: &Arc<dyn Backend>) -> Result<Option<Frozen>> {
    let Some(dir) = &config.reference else { return Ok(None) };
    if !recipe.algorithm()?.needs().reference {
        let what = format!("{} as configured has no reference", config.algorithm);
        return Err(Error::usage(what).at(dir.display()).fix("a beta above 0, or no reference"));
    }
    let model = Model::load(backend.clone(), &ModelDir::open(dir)?, Options::default())?;
    Frozen::new(model, recipe.reference.offload).map(Some)
}

/// Your rows as a dataset.
fn dataset(rows: impl IntoIterator<Item = Value>) -> Result<data::Dataset> {
    let row = |(i, row)| match row {
        Value::Object(row) => Ok(row),
        other => {
            Err(Error::data(format!("expected an object, got {other}")).at(format!("dataset:{}", i + 1)))
        }
    };
    let rows: Vec<Row> = rows.into_iter().enumerate().map(row).collect::<Result<_>>()?;
    data::Dataset::from_rows("dataset", rows)
}

/// Trains a model on rows.
pub struct Trainer {
    /// The training loop: single steps, models and data.
    pub stage: Stage,
    model: PathBuf,
}

impl Trainer {
    /// On rows with the columns that files would have: `prompt`, `chosen` and `rejected`; `prompt`, `completions` and
    /// `rewards`; `messages`; and so on. A row that does not fit the algorithm is an error that names it.
    pub fn new(config: Config, rows: impl IntoIterator<Item = Value>) -> Result<Self> {
        Self::build(config, rows, None)
    }

    /// On prompts: completions are sampled, and `reward` scores them. A closure is a reward.
    pub fn with_reward(
        config: Config,
        rows: impl IntoIterator<Item = Value>,
        reward: impl Reward + 'static,
    ) -> Result<Self> {
        Self::build(config, rows, Some(Rewards::of(reward)))
    }

    /// On prompts: completions are sampled, and several rewards score them.
    pub fn with_rewards(
        config: Config,
        rows: impl IntoIterator<Item = Value>,
        rewards: Rewards,
    ) -> Result<Self> {
        Self::build(config, rows, Some(rewards))
    }

    fn build(
        config: Config,
        rows: impl IntoIterator<Item = Value>,
        rewards: Option<Rewards>,
    ) -> Result<Self> {
        let own = recipe(&config)?;
        let backend = ferrl_kernels::open(&config.device, config.threads)?;
        let reference = reference(&config, &own, &backend)?;
        let (model, rows) = (config.model, dataset(rows)?);
        let room = setup::room(&own, &model)?;
        let (data, seed) = (own.data.clone(), own.seed);
        let mut stage = setup::stage_over(own, backend, &model, rewards, |tokenizer, feed, warnings| {
            let (data, model) = (&data, &*model);
            let reading = ReadingPurpose {
                data,
                model,
                tokenizer,
                feed,
                seed,
                split: None,
                encoding: encoding(data)?,
                room,
                warnings,
            };
            Mixture::new(vec![MixturePart::of(Arc::new(rows), 1.0)], &reading)
        })?;
        let rewards = &stage.rewards;
        let look = |seen: SurveyedExample<'_>| match seen.item {
            Item::Prompt(prompt) => rewards.check(prompt, seen.place),
            _ => Ok(()),
        };
        stage.source.check_with(&look, &mut |_, _| true)?;
        if reference.is_some() {
            stage.reference = reference;
        }
        Ok(Trainer { stage, model })
    }

    /// Trains for more epochs over the rows; returns the metrics of each step.
    pub fn train(&mut self, epochs: usize) -> Result<Vec<Metrics>> {
        let steps =
            epochs as u64 * setup::total_steps(&self.stage.recipe, &self.stage.source, self.stage.feed)?;
        self.stage.schedules.0.total_steps = self.stage.step + steps;
        (0..steps).map(|_| Ok(self.stage.step()?.metrics)).collect()
    }

    /// Writes the trained model, with `optim.ema` its average, where transformers, and Ferrl, load it.
    pub fn save(&self, dir: impl AsRef<Path>) -> Result<()> {
        let options =
            SaveOptions { dtype: StorageFormat::F32, source: Some(&self.model), ..Default::default() };
        let json = ModelDir::open(&self.model)?.config_json;
        let policy = &self.stage.policy;
        if self.stage.recipe.optim.ema.is_none() {
            return policy.model.save(dir.as_ref(), Some(&json), &options);
        }
        let mut average = policy.model.exact_copy()?;
        policy.optimizer.use_averages(&mut average)?;
        average.save(dir.as_ref(), Some(&json), &options)
    }
}
