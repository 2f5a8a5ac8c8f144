//! What a recipe will need before it runs: memory by part, and time from arithmetic.
//!
//! Pure functions of a recipe, a model's configuration and the lengths of its data; nothing is allocated and no weight
//! is read. The memory formulas follow what `ferrl_engine` keeps: see [`memory`]. They are checked against the peak of
//! real runs by a test.

pub mod advice;
mod lengths;
pub mod memory;
mod show;
pub mod work;

pub use lengths::{Lengths, lengths};
pub use memory::Part;
pub use work::{Rates, Work};

use crate::algo::{self, Needs, Wants};
use crate::data::hub::model_dir;
use crate::recipe::{Init, Recipe, Resolved};
use crate::setup;
use ferrl_engine::checkpoint::InitOptions;
use ferrl_engine::model::{Config, Head, family_of};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{DType, Footprint};
use std::collections::BTreeSet;
use std::path::Path;

/// Everything the formulas look at.
#[derive(Clone)]
pub struct Inputs {
    /// The stage's settings.
    pub recipe: Recipe,
    /// The model, with the head it is trained with.
    pub config: Config,
    /// A critic on its own weights.
    pub critic: Option<Config>,
    /// What the algorithm computes.
    pub needs: Needs,
    /// What it learns from.
    pub wants: Wants,
    /// Passes over the experience, and updates in each.
    pub passes: (usize, usize),
    /// How long its sequences are.
    pub lengths: Lengths,
    /// What work takes on its device.
    pub device: &'static Footprint,
}

/// One stage.
#[derive(Clone)]
pub struct StagePlan {
    /// Its name.
    pub name: String,
    /// What it was made from.
    pub inputs: Inputs,
    /// Memory, part by part.
    pub parts: Vec<Part>,
    /// Arithmetic.
    pub work: Work,
    /// Steps, where they are known.
    pub steps: Option<u64>,
}

/// All stages.
#[derive(Clone)]
pub struct Plan {
    /// In order.
    pub stages: Vec<StagePlan>,
}

impl Inputs {
    /// Storage of activations.
    pub fn dtype(&self) -> DType {
        let bf16 = self.recipe.model.dtype.as_deref() == Some(DType::Bf16.name());
        if bf16 { DType::Bf16 } else { DType::F32 }
    }

    /// Sequences of one update.
    pub fn sequences(&self) -> usize {
        let r = &self.recipe;
        match self.wants {
            Wants::Rollouts => (r.rollout.prompts * r.rollout.samples).div_ceil(self.passes.1.max(1)),
            w if w.paired() => 2 * r.train.batch,
            _ => r.train.batch,
        }
    }

    /// Tokens of one update.
    pub fn update_tokens(&self) -> usize {
        (self.sequences() as f64 * self.lengths.sequence).ceil() as usize
    }

    /// Tokens computed at once: micro-batches are about equally full.
    pub fn micro_tokens(&self) -> usize {
        let update = self.update_tokens().max(1);
        update.div_ceil(update.div_ceil(self.recipe.train.micro_batch_tokens.max(1)))
    }
}

impl StagePlan {
    fn new(name: &str, inputs: Inputs) -> Self {
        let parts = memory::parts(&inputs);
        let steps = work::steps(&inputs);
        StagePlan { name: name.into(), parts, work: work::work(&inputs), steps, inputs }
    }

    /// Bytes at the peak.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }
}

impl Plan {
    /// Of a resolved recipe.
    pub fn new(resolved: &Resolved) -> Result<Plan> {
        let mut stages: Vec<StagePlan> = Vec::new();
        for stage in &resolved.stages {
            let previous = stages.last().map(|s| s.inputs.config.clone()).filter(|_| stage.continues);
            let inputs =
                inputs(&stage.recipe, previous).map_err(|e| e.at(format!("stage {}", stage.name)))?;
            stages.push(StagePlan::new(&stage.name, inputs));
        }
        Ok(Plan { stages })
    }

    /// Refuses a stage that does not fit into `available` bytes, and says what would.
    pub fn fit(&self, available: u64) -> Result<()> {
        match self.stages.iter().find(|s| s.bytes() > available) {
            Some(stage) => Err(advice::refusal(stage, available)),
            None => Ok(()),
        }
    }
}

fn inputs(recipe: &Recipe, previous: Option<Config>) -> Result<Inputs> {
    let algorithm = recipe.algorithm()?;
    let (needs, wants) = (algorithm.needs(), algo::find(recipe.algorithm_name())?.wants);
    let dir = recipe.model.path.as_ref().map(|p| model_dir(Path::new(p))).transpose()?;
    let dir = dir.as_deref();
    let mut config = match (previous, dir, &recipe.model.init) {
        (Some(config), None, None) => config,
        (_, Some(dir), _) => read_config(dir)?,
        (_, None, Some(init)) => new_config(recipe, init)?,
        _ => {
            return Err(Error::usage("a run starts from model.path or from model.init, one of the two")
                .at("model")
                .fix("model.path = \"a Hugging Face directory\""));
        }
    };
    let own = needs.critic && !recipe.critic.shared;
    let critic = match recipe.critic.path.as_ref().filter(|_| own) {
        Some(path) => Some(read_config(&model_dir(Path::new(path))?)?),
        None => own.then(|| config.clone()),
    };
    let critic = critic.map(|c| Config { head: Head::Score, ..c });
    if needs.score {
        config.head = Head::Score;
    } else if needs.critic && recipe.critic.shared {
        config.head = Head::LmAndValue;
    } else if config.head == Head::Score {
        config.head = Head::Lm;
    }
    let lengths = lengths(recipe, wants, dir);
    let passes = algorithm.passes();
    let device = ferrl_kernels::footprint(&recipe.device)?;
    Ok(Inputs { recipe: recipe.clone(), config, critic, needs, wants, passes, lengths, device })
}

/// A model's configuration; its weights need not be there.
pub fn read_config(dir: &Path) -> Result<Config> {
    let file = dir.join("config.json");
    let missing = |e: std::io::Error| {
        Error::model(format!("cannot read: {e}"))
            .at(file.display())
            .fix("give the directory that holds config.json; a plan needs no weights")
    };
    let text = std::fs::read_to_string(&file).map_err(missing)?;
    let json = serde_json::from_str(&text)
        .map_err(|e| Error::model(format!("is not valid JSON: {e}")).at(file.display()))?;
    family_of(&json).and_then(|f| f.config(&json)).map_err(|e| e.at(dir.display()))
}

/// The configuration that a run would start from; the characters of a few examples stand for the vocabulary.
fn new_config(recipe: &Recipe, init: &Init) -> Result<Config> {
    let mut options = InitOptions::new(&init.family);
    options.vocab = init.vocab;
    if let Some(task) = setup::task(recipe)?.filter(|_| init.tokenizer == "char") {
        let mut characters = BTreeSet::new();
        for i in 0..lengths::EXAMPLES as u64 {
            let e = task.example(i, false)?;
            characters.extend(e.prompt.chars().chain(e.answer.chars()));
        }
        options.vocab = characters.len() + 2; // padding and end
    }
    (options.hidden, options.layers) = (init.hidden, init.layers);
    (options.heads, options.kv_heads, options.ffn) = (init.heads, init.kv_heads, init.ffn);
    (options.max_positions, options.tied) = (init.max_positions, Some(true));
    Ok(options.build()?.0)
}
