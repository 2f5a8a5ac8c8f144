//! Training from Rust in a few lines: a config, an agent, your own dataset, a trainer.
//!
//! A thin layer over [`Stage`]: whatever a recipe can say beyond this is set there. `examples/dpo.rs` and
//! `examples/grpo.rs` are whole programs.

use crate::algo::{self, Needs};
use crate::data::{self, Row};
use crate::experience::Metrics;
use crate::recipe::{self, Recipe};
use crate::setup;
use crate::source::{Item, Mixture, Part, Reading, Seen};
use crate::train::Stage;
use ferrl_engine::checkpoint::{Dtype, ModelDir, SaveOptions};
use ferrl_engine::model::{Model, Options};
use ferrl_kernels::{AUTO, Backend};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use ferrl_engine::{Error, Result};

/// How to learn.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How strongly the policy is held to the reference: DPO's beta, or the weight of the KL penalty. The algorithm's
    /// own where absent.
    pub beta: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Rows of one update.
    pub batch_size: usize,
    /// Longer sequences are cut.
    pub max_length: usize,
    /// Decides every random choice.
    pub seed: u64,
    /// Device: `cpu`, `cuda` or `cuda:N`; `auto` uses a GPU if there is one.
    pub device: String,
    /// Threads; all cores where absent.
    pub threads: Option<usize>,
}

impl Default for Config {
    fn default() -> Self {
        let device = AUTO.into();
        Config { beta: None, lr: 1e-5, batch_size: 4, max_length: 1024, seed: 0, device, threads: None }
    }
}

/// Rows to learn from, with the columns that files would have: `prompt`, `chosen` and `rejected`; `prompt`,
/// `completions` and `rewards`; `messages`; and so on.
pub trait Dataset {
    /// How many rows there are.
    fn len(&self) -> usize;
    /// One of them, as a JSON object.
    fn row(&self, index: usize) -> Value;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Dataset for Vec<Value> {
    fn len(&self) -> usize {
        Vec::len(self)
    }
    fn row(&self, index: usize) -> Value {
        self[index].clone()
    }
}

/// A model and the algorithm that trains it.
pub struct Agent {
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    model: PathBuf,
    reference: Option<Model>,
}

impl Agent {
    /// `algorithm` is one of `ferrl algorithms`, `model` a Hugging Face directory. Where the algorithm needs a reference
    /// and none is given, it is the model as it starts.
    pub fn new(
        algorithm: &str,
        config: &Config,
        model: impl AsRef<Path>,
        reference: Option<&Path>,
    ) -> Result<Self> {
        let model = model.as_ref();
        let recipe = recipe(algorithm, config, model)?;
        let needs: Needs = recipe.algorithm()?.needs();
        let backend = ferrl_kernels::open(&config.device, config.threads)?;
        let reference = match reference {
            None => None,
            Some(dir) if needs.reference => {
                Some(Model::load(backend.clone(), &ModelDir::open(dir)?, Options::default())?)
            }
            Some(dir) => {
                return Err(Error::usage(format!("{algorithm} as configured compares with no reference"))
                    .at(dir.display())
                    .fix("a beta above 0, or no reference"));
            }
        };
        Ok(Agent { recipe, backend, model: model.into(), reference })
    }
}

/// The recipe that a config stands for, checked like any other.
fn recipe(algorithm: &str, config: &Config, model: &Path) -> Result<Recipe> {
    let mut settings = json!({ "name": algorithm });
    if let Some(beta) = config.beta {
        let defaults = (algo::find(algorithm)?.defaults)();
        match (defaults.get("beta"), defaults.get("kl")) {
            (Some(_), _) => settings["beta"] = json!(beta),
            (None, Some(_)) => settings["kl"] = json!({ "coef": beta }),
            _ => {
                let what = format!("{algorithm} holds the policy to no reference, so it has no beta");
                return Err(Error::usage(what).at("Config::beta").fix("beta: None"));
            }
        }
    }
    let mut recipe = Recipe::default();
    recipe.model.path = Some(model.to_string_lossy().into());
    recipe.algo = settings.as_object().cloned().unwrap_or_default();
    (recipe.seed, recipe.device, recipe.optim.lr) = (config.seed, config.device.clone(), config.lr);
    recipe.data =
        recipe::Data { train: vec!["dataset".into()], max_length: config.max_length, ..recipe.data };
    (recipe.train.batch, recipe.rollout.prompts) = (config.batch_size, config.batch_size);
    let longest = 2 * config.max_length + recipe.rollout.max_new_tokens;
    recipe.train.micro_batch_tokens = recipe.train.micro_batch_tokens.max(longest);
    let text = toml::to_string(&recipe).map_err(|e| Error::usage(format!("the config: {e}")))?;
    let mut resolved = Recipe::parse(&text, "config", "api", &[])?;
    resolved.check(&[])?;
    Ok(resolved.stages.remove(0).recipe)
}

/// Trains an agent on a dataset.
pub struct Trainer {
    /// The loop, open to whoever wants to take single steps or look at the models.
    pub stage: Stage,
    model: PathBuf,
}

impl Trainer {
    /// Reads the dataset once; a row that does not fit the algorithm is an error that names it.
    pub fn new(agent: Agent, dataset: impl Dataset, config: Config) -> Result<Self> {
        let Agent { recipe: own, backend, model, reference } = agent;
        let expected = recipe(own.algorithm_name(), &config, &model)?;
        if own != expected {
            return Err(Error::usage("the trainer's config is not the one the agent was made with")
                .fix("give both the same config"));
        }
        let mut rows: Vec<Row> = Vec::new();
        for i in 0..dataset.len() {
            match dataset.row(i) {
                Value::Object(row) => rows.push(row),
                other => {
                    return Err(Error::data(format!("expected an object, got {other}"))
                        .at(format!("dataset:{}", i + 1)));
                }
            }
        }
        let rows = data::Dataset::from_rows("dataset", rows)?;
        let room = setup::room(&own, &model)?;
        let data = own.data.clone();
        let mut stage = setup::stage_over(own, backend, &model, |tokenizer, feed, warnings| {
            let (data, model, seed) = (&data, &*model, config.seed);
            let reading = Reading { data, model, tokenizer, feed, seed, split: None, room, warnings };
            Ok(Box::new(Mixture::new(vec![Part::of(Arc::new(rows), 1.0)], &reading)?))
        })?;
        let rewards = &stage.rewards;
        let look = |seen: Seen<'_>| match seen.item {
            Item::Ask(prompt) => rewards.check(prompt, seen.place),
            _ => Ok(()),
        };
        stage.source.check_with(&look, &mut |_, _| true)?;
        if reference.is_some() {
            stage.reference = reference;
        }
        Ok(Trainer { stage, model })
    }

    /// Goes over the dataset so many times more; gives what each step measured.
    pub fn train(&mut self, epochs: usize) -> Result<Vec<Metrics>> {
        let steps =
            epochs as u64 * setup::total_steps(&self.stage.recipe, &*self.stage.source, self.stage.feed)?;
        self.stage.schedules.0.total_steps = self.stage.step + steps;
        (0..steps).map(|_| Ok(self.stage.step()?.metrics)).collect()
    }

    /// Writes the trained model where transformers, and Ferrl, load it.
    pub fn save(&self, dir: impl AsRef<Path>) -> Result<()> {
        let options = SaveOptions { dtype: Dtype::F32, source: Some(&self.model), ..Default::default() };
        let json = ModelDir::open(&self.model)?.config_json;
        self.stage.policy.model.save(dir.as_ref(), Some(&json), &options)
    }
}
