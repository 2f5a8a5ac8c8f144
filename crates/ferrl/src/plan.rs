//! Estimates of a recipe's memory by part, time from FLOPs, and disk.
//!
//! Pure functions of a recipe, its models' configurations and the lengths of its data; nothing is allocated and no weight is
//! read. The memory formulas follow the buffers of `ferrl_engine`: see [`memory`]. A test compares them with the peak of real runs.

mod adapted;
pub mod advice;
pub mod cards;
mod exchange;
mod lengths;
pub mod memory;
mod rank_memory;
pub mod ranks;
mod show;
mod show_ranks;
mod trust_memory;
pub mod work;

pub use lengths::{Lengths, lengths};
pub use memory::MemoryPart;
pub use show::Room;
pub use work::{Rates, Work};

use crate::algo::{self, Feed, Needs, UpdatePlan};
use crate::data::hub::model_dir;
use crate::preflight::{check_adapter, check_base};
use crate::recipe::{InitSettings, Recipe, Resolved};
use crate::run::Disk;
use crate::setup;
use ferrl_engine::checkpoint::{InitOptions, ModelDir, base_of};
use ferrl_engine::model::{Head, ModelConfig, family_of, text_config};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{DType, Footprint};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Inputs of the formulas.
#[derive(Clone)]
pub struct Inputs {
    /// The stage's settings.
    pub recipe: Recipe,
    /// The model, with the head it is trained with.
    pub config: ModelConfig,
    /// A critic on its own weights.
    pub critic: Option<ModelConfig>,
    pub teacher: Option<ModelConfig>,
    /// Reward models, and whether each is offloaded between uses.
    pub judges: Vec<(ModelConfig, bool)>,
    /// Whether bf16 holds the weights that the stage starts from, which an adapter's base then takes 2 bytes for.
    pub fits_bf16: bool,
    /// A directory with the stage's tokenizer; `None` if the run trains one.
    pub tokenizer: Option<PathBuf>,
    /// What the algorithm computes.
    pub needs: Needs,
    pub feed: Feed,
    /// How the updates of a step are made.
    pub updates: UpdatePlan,
    /// Lengths of its sequences.
    pub lengths: Lengths,
    /// Memory and efficiency of its device.
    pub device: &'static Footprint,
    /// Bytes of the largest earlier stage.
    pub before: u64,
}

#[derive(Clone)]
pub struct StagePlan {
    pub name: String,
    /// Its own table in the recipe, as `stage.1`, and what that sets, which settings for all stages do not change.
    own: Option<(String, Vec<String>)>,
    pub inputs: Inputs,
    /// Memory, part by part.
    pub parts: Vec<MemoryPart>,
    /// Arithmetic.
    pub work: Work,
    /// Number of steps, if known.
    pub steps: Option<u64>,
    /// Bytes on the disk.
    pub disk: Disk,
}

#[derive(Clone)]
pub struct Plan {
    /// In order.
    pub stages: Vec<StagePlan>,
}

impl Inputs {
    /// Compute type.
    pub fn dtype(&self) -> DType {
        self.recipe.dtype().unwrap_or(DType::F32)
    }

    /// Sequences of one update.
    pub fn sequences(&self) -> usize {
        let r = &self.recipe;
        match self.feed {
            Feed::Rollouts => {
                (r.rollout.prompts * r.rollout.samples).div_ceil(self.updates.minibatches.max(1))
            }
            w if w.paired() => 2 * r.train.batch,
            _ => r.train.batch,
        }
    }

    /// Sequences sampled in one step, or in one evaluation if `evaluated`.
    pub fn sampled(&self, evaluated: bool) -> usize {
        let r = &self.recipe;
        if evaluated { r.eval.prompts * r.eval.samples } else { r.rollout.prompts * r.rollout.samples }
    }

    /// Whether evaluations sample completions.
    pub fn evaluates(&self) -> bool {
        let r = &self.recipe;
        let asks = (r.eval.every > 0 || r.eval.at_start) && r.eval.prompts > 0;
        let graded = self.feed.sampled() || crate::setup::rewarded(r).unwrap_or(false);
        asks && graded && !self.needs.score
    }

    pub fn update_tokens(&self) -> usize {
        (self.sequences() as f64 * self.lengths.sequence).ceil() as usize
    }

    /// Tokens of a micro-batch: all are about equally full.
    pub fn micro_tokens(&self) -> usize {
        let update = self.update_tokens().max(1);
        update.div_ceil(update.div_ceil(self.recipe.train.micro_batch_tokens.max(1)))
    }
}

impl StagePlan {
    fn new(name: &str, own: Option<(String, Vec<String>)>, inputs: Inputs) -> Self {
        let parts = memory::parts(&inputs);
        let steps = work::steps(&inputs);
        let disk = Disk::of(&inputs.recipe, &inputs.config, inputs.critic.as_ref());
        StagePlan { name: name.into(), own, parts, work: work::work(&inputs), steps, disk, inputs }
    }

    /// Settings as on the command line, under this stage's own names where it sets them itself.
    fn own_names(&self, settings: &str) -> String {
        let Some((stage, keys)) = &self.own else { return settings.into() };
        let one = |setting: &str| {
            let name = setting.split('=').next().unwrap_or_default();
            let within = |key: &String| {
                name.strip_prefix(key.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            if keys.iter().any(within) { format!("{stage}.{setting}") } else { setting.into() }
        };
        settings.split(' ').map(one).collect::<Vec<_>>().join(" ")
    }

    /// Bytes at the peak.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }
}

impl Plan {
    pub fn new(resolved: &Resolved) -> Result<Plan> {
        let mut stages: Vec<StagePlan> = Vec::new();
        for stage in &resolved.stages {
            let previous = stages.last().filter(|_| stage.continues);
            let inputs = inputs(&stage.recipe, previous, &stages)
                .map_err(|e| e.at(format!("stage {}", stage.name)))?;
            stages.push(StagePlan::new(&stage.name, resolved.own_keys(stage), inputs));
        }
        Ok(Plan { stages })
    }

    /// Peak bytes on disk: checkpoints of all stages and their resulting models.
    pub fn disk(&self) -> u64 {
        Disk::total(&self.stages.iter().map(|s| s.disk).collect::<Vec<_>>())
    }

    /// Refuses a run of which a stage does not fit into `available` bytes, with settings that would for the largest: what makes that
    /// one fit mostly does the others too.
    pub fn fit(&self, available: u64) -> Result<()> {
        match self.stages.iter().rev().max_by_key(|s| s.bytes()).filter(|s| s.bytes() > available) {
            Some(stage) => Err(advice::refusal(stage, available)),
            None => Ok(()),
        }
    }

    /// Refuses a run whose checkpoints do not fit into `free` bytes of disk.
    pub fn fit_disk(&self, free: u64) -> Result<()> {
        if self.disk() <= free { Ok(()) } else { Err(advice::disk_refusal(self, free)) }
    }
}

fn inputs(recipe: &Recipe, previous: Option<&StagePlan>, earlier: &[StagePlan]) -> Result<Inputs> {
    let algorithm = recipe.algorithm()?;
    let (needs, feed) = (algorithm.needs(), algo::find(recipe.algorithm_name())?.feed);
    let (mut config, tokenizer) = starting_model(recipe, previous, earlier)?;
    let critic = critic_config(recipe, needs, &config, earlier)?;
    let teacher = recipe.teacher.path.as_ref().filter(|_| needs.teacher);
    let teacher =
        teacher.map(|path| model_at(path, earlier).map_err(|e| e.at("teacher.path"))).transpose()?;
    let scorer = recipe.search.model_reward();
    let judges =
        recipe.reward.iter().map(|r| ("reward", r)).chain(scorer.iter().map(|s| ("search.scorer", s)));
    let judges = judges.flat_map(|(place, r)| r.model_paths().map(move |path| (place, path, r.offload)));
    let judges = judges
        .map(|(place, path, offload)| Ok((model_at(path, earlier).map_err(|e| e.at(place))?.0, offload)))
        .collect::<Result<Vec<(ModelConfig, bool)>>>()?;
    config.head = match setup::policy_head(recipe, needs) {
        Some(head) => head,
        None if config.head == Head::Score => Head::Lm,
        None => config.head,
    };
    setup::trained::check(&config, critic.as_ref(), &recipe.model)?;
    check_adapters(recipe, previous, &config)?;
    let lengths = lengths(recipe, feed, tokenizer.as_deref());
    let (updates, device) = (algorithm.updates(), ferrl_kernels::footprint(&recipe.device)?);
    let fits_bf16 = fits_bf16(recipe, previous, earlier);
    let (recipe, teacher) = (recipe.clone(), teacher.map(|t| t.0));
    let before = earlier.iter().map(StagePlan::bytes).max().unwrap_or(0);
    Ok(Inputs {
        recipe,
        config,
        critic,
        teacher,
        judges,
        fits_bf16,
        tokenizer,
        needs,
        feed,
        updates,
        lengths,
        device,
        before,
    })
}

/// What the stage starts from: the previous stage's model, a directory or a new model; and where its tokenizer is.
fn starting_model(
    recipe: &Recipe,
    previous: Option<&StagePlan>,
    earlier: &[StagePlan],
) -> Result<(ModelConfig, Option<PathBuf>)> {
    match (previous, &recipe.model.path, &recipe.model.init) {
        (Some(stage), None, None) => Ok((stage.inputs.config.clone(), stage.inputs.tokenizer.clone())),
        (_, Some(path), _) => model_at(path, earlier).map_err(|e| e.at("model.path")),
        (_, None, Some(init)) => Ok((new_config(recipe, init)?, None)),
        _ => Err(setup::no_start()),
    }
}

/// See [`Inputs::fits_bf16`]. Trained or new weights are f32; a plan without weights takes those of a directory to fit.
fn fits_bf16(recipe: &Recipe, previous: Option<&StagePlan>, earlier: &[StagePlan]) -> bool {
    let (path, init) = (&recipe.model.path, &recipe.model.init);
    let named = path.as_ref().and_then(|path| path.strip_prefix("stage:"));
    let stage = match named {
        Some(name) => earlier.iter().find(|stage| stage.name == name),
        None => previous.filter(|_| path.is_none() && init.is_none()),
    };
    match (stage, path) {
        (Some(stage), _) => stage.inputs.recipe.adapter.is_some() && stage.inputs.fits_bf16,
        (None, None) => false,
        (None, Some(path)) => {
            model_dir(Path::new(path)).and_then(|dir| ModelDir::open(&dir)?.fits_bf16()).unwrap_or(true)
        }
    }
}

/// The configuration of a critic with its own weights.
fn critic_config(
    recipe: &Recipe,
    needs: Needs,
    policy: &ModelConfig,
    earlier: &[StagePlan],
) -> Result<Option<ModelConfig>> {
    if !needs.critic || recipe.critic.shared {
        return Ok(None);
    }
    let start = match &recipe.critic.path {
        Some(path) => model_at(path, earlier).map_err(|e| e.at("critic.path"))?.0,
        None => policy.clone(),
    };
    Ok(Some(ModelConfig { head: Head::Score, ..start }))
}

/// Refuses an adapter that does not fit the model, or the adapter that the previous stage leaves.
fn check_adapters(recipe: &Recipe, previous: Option<&StagePlan>, config: &ModelConfig) -> Result<()> {
    let Some(adapter) = &recipe.adapter else { return Ok(()) };
    let follows = recipe.model.path.is_none() && recipe.model.init.is_none();
    let left = previous.filter(|_| follows).and_then(|stage| stage.inputs.recipe.adapter.as_ref());
    let left = left.map(|adapter| adapter.options()).transpose()?;
    let wanted = adapter.options()?;
    check_adapter(&wanted, left.as_ref(), config)?;
    left.iter().try_for_each(|left| check_base(&wanted, left))
}

/// The configuration of a directory or of an earlier stage's model (`stage:NAME`), and the directory of its tokenizer.
fn model_at(path: &str, earlier: &[StagePlan]) -> Result<(ModelConfig, Option<PathBuf>)> {
    let stage = path.strip_prefix("stage:").map(|name| earlier.iter().find(|s| s.name == name));
    match stage {
        Some(Some(stage)) => Ok((stage.inputs.config.clone(), stage.inputs.tokenizer.clone())),
        Some(None) => Err(Error::usage(format!("{path:?} is not an earlier stage"))),
        None => {
            let dir = model_dir(Path::new(path))?;
            Ok((read_config(&dir)?, Some(dir)))
        }
    }
}

/// A model's configuration; its weights need not be there.
pub fn read_config(dir: &Path) -> Result<ModelConfig> {
    let base = base_of(dir)?;
    let dir = base.as_deref().unwrap_or(dir);
    let file = dir.join("config.json");
    let missing = |e: std::io::Error| {
        Error::model(format!("cannot read: {e}"))
            .at(file.display())
            .fix("give the directory that holds config.json; a plan needs no weights")
    };
    let text = std::fs::read_to_string(&file).map_err(missing)?;
    let json = serde_json::from_str(&text)
        .map_err(|e| Error::model(format!("is not valid JSON: {e}")).at(file.display()))?;
    let json = text_config(&json).map_err(|e| e.at(dir.display()))?.unwrap_or(json);
    family_of(&json).and_then(|f| f.config(&json)).map_err(|e| e.at(dir.display()))
}

/// The configuration that a run would start from; the characters of a few examples stand for the vocabulary.
pub(crate) fn new_config(recipe: &Recipe, init: &InitSettings) -> Result<ModelConfig> {
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
    (options.experts, options.experts_per_token) = (init.experts, init.experts_per_token);
    options.expert_ffn = init.expert_ffn;
    (options.max_positions, options.tied) = (init.max_positions, Some(true));
    Ok(options.build().map_err(|e| e.at("model.init"))?.0)
}
