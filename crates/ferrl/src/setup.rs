//! Builds a stage from a recipe: models, data, rewards, schedules.

mod data;
mod draft;
pub(crate) mod env;
mod fresh;
pub mod trained;

pub(crate) use data::room;
pub use data::{rewarded, source, task, task_verifier, tasks, total_steps};
pub use draft::Draft;
pub use env::environments;
pub(crate) use fresh::new_model_parts;

use crate::algo::{self, Algorithm, Feed, Needs};
use crate::health::Health;
use crate::parallel;
use crate::recipe::{Recipe, Rollout};
use crate::reward::{Rewards, Verified};
use crate::rollout;
use crate::search::Searcher;
use crate::signal::Signal;
use crate::source::Mixture;
use crate::train::Stage;
use crate::verify::{Hooks, Truncated};
use crate::warnings::Warnings;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::{CacheOptions, Generator, Sampler};
use ferrl_engine::model::shard::Split;
use ferrl_engine::model::{Frozen, Head, Model, ModelConfig, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Decay, ModelTrainer, Schedule};
use ferrl_engine::{Class, Error, Result};
use ferrl_kernels::{Backend, Ranks};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The algorithm of a stage's recipe, and its kind of training data.
pub fn algorithm(recipe: &Recipe) -> Result<(Box<dyn Algorithm>, Feed)> {
    Ok((recipe.algorithm()?, algo::find(recipe.algorithm_name())?.feed))
}

/// The directory a run starts from: the recipe's, or a new random model written to `fresh`.
pub fn starting_model(recipe: &Recipe, fresh: &Path) -> Result<PathBuf> {
    match (&recipe.model.path, &recipe.model.init) {
        (Some(path), None) => crate::data::hub::model_dir(Path::new(path)),
        (None, Some(init)) => {
            fresh::new_model(recipe, init, fresh)?;
            Ok(fresh.to_path_buf())
        }
        _ => Err(no_start()),
    }
}

/// The error for a recipe with neither `model.path` nor `model.init`, or with both.
pub(crate) fn no_start() -> Error {
    Error::usage("a recipe needs exactly one of model.path and model.init")
        .at("model")
        .fix("model.path = \"a Hugging Face directory\"")
}

/// A stage that starts from the model in `dir`, with the data of its recipe.
pub fn stage(recipe: Recipe, backend: Arc<dyn Backend>, dir: &Path) -> Result<Stage> {
    stage_on(recipe, backend, dir, Ranks::ALONE)
}

/// The same on one of several ranks, which call it together, and [`Stage::join`] next.
pub fn stage_on(recipe: Recipe, backend: Arc<dyn Backend>, dir: &Path, ranks: &Ranks) -> Result<Stage> {
    let draft = Draft::new(&recipe, dir, &Warnings::default())?;
    from_draft(recipe, draft, backend, dir, ranks)
}

/// A stage that starts from the model in `dir`, with any source, and with the recipe's rewards or these.
pub fn stage_over(
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    dir: &Path,
    rewards: Option<Rewards>,
    source: impl FnOnce(&Arc<Tokenizer>, Feed, &Warnings) -> Result<Mixture>,
) -> Result<Stage> {
    let draft = Draft::over(&recipe, dir, &Warnings::default(), rewards, source)?;
    from_draft(recipe, draft, backend, dir, Ranks::ALONE)
}

/// A stage with its models in memory. Of weights that these ranks split, each reads its own part; they call it together, and
/// [`Stage::join`] next.
pub fn from_draft(
    recipe: Recipe,
    draft: Draft,
    backend: Arc<dyn Backend>,
    dir: &Path,
    ranks: &Ranks,
) -> Result<Stage> {
    let Draft { algo, feed, needs, tokenizer, source, total, rewards: drafted, warnings } = draft;
    backend.set_exact(recipe.exact).map_err(|e| e.at("exact"))?;
    let opened = ModelDir::open(dir)?;
    fits(&opened.config, &tokenizer, dir)?;
    let opened = with_policy_head(opened, &recipe, needs)?;
    let critic_dir = critic_dir(&recipe, needs, dir)?;
    trained::check(&opened.config, critic_dir.as_ref().map(|d| &d.config), &recipe.model)?;
    let mut policy = trainer(&recipe, backend.clone(), &opened, split(&recipe, needs, ranks, 0)?)?;
    let reference = reference(&recipe, needs, &mut policy)?;
    let critic =
        critic_dir.map(|dir| trainer(&recipe, backend.clone(), &dir, split(&recipe, needs, ranks, 1)?));
    let critic = critic.transpose()?;
    let samples = feed.sampled() && !source.has_rewards();
    let generator = samples.then(|| sampler(&recipe, &policy.model, &tokenizer)).transpose()?;
    let schedules = schedules(&recipe, total)?;
    let judged = recipe.reward.iter().any(|r| r.model.is_some()) && !source.has_rewards();
    let hooks = Hooks { warnings: warnings.clone(), ..Default::default() };
    let rewards = if judged { rewards(&recipe, feed, &backend, &hooks)? } else { drafted };
    let rewards = rewards.reading(&tokenizer);
    let searcher = Searcher::open(&recipe, &backend)?;
    let stops = rollout::stops(dir, &tokenizer, &recipe.rollout);
    let environments = environments(&recipe, dir, &tokenizer, &hooks)?;
    Ok(Stage {
        recipe,
        algo,
        feed,
        policy,
        reference,
        critic,
        stops,
        ranks: Ranks::alone(),
        tokenizer,
        source,
        rewards,
        searcher,
        environments,
        one_pass: generator.as_ref().is_some_and(|g| g.is_exact()),
        generator,
        schedules,
        step: 0,
        ahead: VecDeque::new(),
        unfinished: Vec::new(),
        lengths: Default::default(),
        teams: Default::default(),
        num_tokens: 0,
        skips_empty: true,
        signal: Signal::default(),
        health: Health::default(),
        updating: false,
        warnings,
        waits: Arc::new(|_| ()),
    })
}

/// Initial model of a critic with its own weights.
fn critic_dir(recipe: &Recipe, needs: Needs, dir: &Path) -> Result<Option<ModelDir>> {
    if !needs.critic || recipe.critic.shared {
        return Ok(None);
    }
    ModelDir::open(&critic_start(recipe, dir)?)?.with_head(Head::Score, recipe.seed).map(Some)
}

/// The directory that a critic with its own weights starts from: its own, or the policy's.
pub(crate) fn critic_start(recipe: &Recipe, policy: &Path) -> Result<PathBuf> {
    let own = recipe.critic.path.as_ref().map(|path| crate::data::hub::model_dir(Path::new(path)));
    Ok(own.transpose()?.unwrap_or_else(|| policy.to_path_buf()))
}

/// The frozen model of the algorithm: a teacher, or the initial policy.
fn reference(recipe: &Recipe, needs: Needs, policy: &mut ModelTrainer) -> Result<Option<Frozen>> {
    if needs.teacher {
        let teacher = crate::teacher::load(recipe, &policy.model)?;
        return Frozen::new(teacher, recipe.teacher.offload).map(Some);
    }
    if needs.reference || needs.start { first_policy(policy, needs, recipe) } else { Ok(None) }
}

/// The initial policy: a copy, or `None` if it is the policy without its adapter's change.
fn first_policy(policy: &mut ModelTrainer, needs: Needs, recipe: &Recipe) -> Result<Option<Frozen>> {
    if policy.model.adapter().is_some() && !needs.full_kl {
        return policy.keep_start().map(|()| None);
    }
    // Backward compares with it, so it stays on the device.
    let part = if needs.full_kl { None } else { policy.model.frozen_part(REFERENCE)? };
    let (copy, offload) = match part {
        Some(part) => (part, false),
        None if needs.start => (policy.model.exact_copy()?, recipe.reference.offload),
        None => (policy.model.frozen_copy()?, recipe.reference.offload),
    };
    Frozen::new(copy, offload).map(Some)
}

/// Number of the reference among the models of a run that are split; the policy is 0, the critic 1.
const REFERENCE: usize = 2;

/// How the weights of a model of the stage are split over ranks, where they are. Under an adapter that is compared with a whole
/// reference they are read whole, copied and split afterwards.
fn split(recipe: &Recipe, needs: Needs, ranks: &Ranks, number: usize) -> Result<Option<Split>> {
    if ranks.is_alone() || recipe.adapter.is_some() && needs.full_kl {
        return Ok(None);
    }
    let layout = parallel::check(recipe, ranks.size())?;
    layout.splits().then(|| Split::new(ranks, layout.ddp, number)).transpose()
}

/// A generator on the policy's weights.
pub(crate) fn sampler(
    recipe: &Recipe,
    model: &Model,
    tokenizer: &Arc<Tokenizer>,
) -> Result<Box<dyn Generator>> {
    let cache = cache_options(&recipe.rollout, &*model.backend);
    let sampler = Sampler::new(model, cache).map_err(|e| cache_error(e, &recipe.rollout))?;
    Ok(Box::new(sampler.with_tokenizer(tokenizer.clone())))
}

/// Refuses a tokenizer with ids beyond the model's vocabulary.
pub(crate) fn fits(config: &ModelConfig, tokenizer: &Tokenizer, dir: &Path) -> Result<()> {
    let (model, tokens) = (config.vocab, tokenizer.vocab_size());
    if model < tokens {
        return Err(
            Error::model(format!("the model has {model} tokens, its tokenizer {tokens}")).at(dir.display())
        );
    }
    Ok(())
}

/// An error of the cache, at its key.
pub fn cache_error(error: Error, rollout: &Rollout) -> Error {
    let other = if error.class == Class::Resource { "smaller" } else { "larger" };
    error.at(format!("rollout.cache_mib = {}", rollout.cache_mib)).fix(format!("a {other} rollout.cache_mib"))
}

/// A completion that does not fit into the cache, at its key.
pub fn too_small(error: Error, rollout: &Rollout) -> Error {
    if error.class != Class::Resource {
        return error;
    }
    let fix = "a larger rollout.cache_mib, or a smaller rollout.max_new_tokens";
    error.at(format!("rollout.cache_mib = {}", rollout.cache_mib)).fix(fix)
}

/// The longest sequence of a recipe that trains: what LongRoPE chooses its divisors by.
fn context(recipe: &Recipe) -> Result<usize> {
    let evaluates = (recipe.eval.every > 0 || recipe.eval.at_start) && recipe.eval.prompts > 0;
    let samples = evaluates || algo::find(recipe.algorithm_name())?.feed.sampled();
    Ok(if samples { sampled_context(recipe) } else { recipe.data.max_length })
}

/// The longest sequence of a recipe that samples.
pub fn sampled_context(recipe: &Recipe) -> usize {
    recipe.data.max_length + recipe.rollout.max_new_tokens
}

pub fn cache_options(rollout: &Rollout, backend: &dyn Backend) -> CacheOptions {
    CacheOptions {
        bytes: rollout.cache_mib << 20,
        max_batch_tokens: backend.busy_tokens(),
        ..Default::default()
    }
}

fn with_policy_head(dir: ModelDir, recipe: &Recipe, needs: Needs) -> Result<ModelDir> {
    match policy_head(recipe, needs) {
        Some(head) => dir.with_head(head, recipe.seed),
        None => Ok(dir),
    }
}

/// The head that the policy needs besides a plain LM head.
pub(crate) fn policy_head(recipe: &Recipe, needs: Needs) -> Option<Head> {
    if needs.score {
        return Some(Head::Score);
    }
    (needs.critic && recipe.critic.shared).then_some(Head::LmAndValue)
}

fn trainer(
    recipe: &Recipe,
    backend: Arc<dyn Backend>,
    dir: &ModelDir,
    split: Option<Split>,
) -> Result<ModelTrainer> {
    let options = Options { dtype: recipe.dtype()?, training: true, context: context(recipe)? };
    let model = match (&recipe.adapter, split) {
        (Some(adapter), split) => {
            Model::load_adapted_part(backend, dir, options, (&adapter.options()?, recipe.seed), split)?
        }
        (None, Some(split)) => Model::load_split(backend, dir, options, split)?,
        (None, None) => Model::load(backend, dir, options)?,
    };
    let options = recipe.optim.options(trained::patterns(&dir.config, &recipe.model)?)?;
    let mut trainer = ModelTrainer::new(model, options)?;
    trainer.recompute = recipe.model.recompute;
    Ok(trainer)
}

/// The rewards of the recipe, or of its task.
pub fn rewards(recipe: &Recipe, feed: Feed, backend: &Arc<dyn Backend>, hooks: &Hooks) -> Result<Rewards> {
    if recipe.reward.iter().all(|r| r.model.is_none()) {
        return plain_rewards(recipe, feed, hooks);
    }
    let rewards = Rewards::load(recipe, recipe.dtype()?, backend, hooks)?;
    rewards.check_stops(&recipe.rollout.stop, recipe.rollout.include_stop)?;
    Ok(rewards)
}

/// The same without reward models, which need a device.
pub(crate) fn plain_rewards(recipe: &Recipe, feed: Feed, hooks: &Hooks) -> Result<Rewards> {
    if recipe.reward.is_empty() && feed.sampled() {
        let Some(own) = task_verifier(recipe)? else {
            let played = tasks(recipe)?.iter().any(|(_, task)| task.reward().is_none());
            let played = played || recipe.env.rewards();
            if played || recipe.algorithm()?.needs().rewardless {
                return Rewards::new(&[]);
            }
            return Err(Error::usage(format!(
                "{} needs rewards, but neither the recipe nor the rows have any",
                recipe.algorithm_name()
            ))
            .at("reward")
            .fix(
                "reward.0.verifier = \"numeric\", reward.0.python = \"my_reward.py\" or reward.0.model = \"DIR\"; or rows \
                 with completions and rewards; or algo.name = \"sft\" or \"dpo\" to train on given responses",
            ));
        };
        let own = Verified { verifier: own, truncated: Truncated::default() };
        return Ok(Rewards::of(own).without_episodes());
    }
    let plain: Vec<_> = recipe.reward.iter().filter(|r| r.model.is_none()).cloned().collect();
    let rewards = Rewards::with_hooks(&plain, hooks)?;
    rewards.check_stops(&recipe.rollout.stop, recipe.rollout.include_stop)?;
    Ok(rewards)
}

/// Rewards of rows that have completions with rewards: those of the recipe would be for evaluations only.
fn own_rewards(recipe: &Recipe) -> Result<Rewards> {
    let unused = !recipe.reward.is_empty() && recipe.eval.every == 0 && !recipe.eval.at_start;
    if unused || recipe.rollout.max_lag > 0 {
        let (key, what) = match unused {
            true => {
                ("reward", "the rows of data.train have completions with rewards, and no others are sampled")
            }
            false => ("rollout.max_lag", "the rows of data.train have completions; none are sampled"),
        };
        return Err(Error::usage(what).at(key).fix(format!("leave {key} out")));
    }
    Rewards::new(&[])
}

/// Learning rates of the policy and of the critic.
fn schedules(recipe: &Recipe, total_steps: u64) -> Result<(Schedule, Schedule)> {
    let lr = recipe.optim.lr;
    let critic_lr = recipe.critic.lr.unwrap_or(5.0 * lr);
    Ok((schedule(recipe, lr, total_steps)?, schedule(recipe, critic_lr, total_steps)?))
}

fn schedule(recipe: &Recipe, lr: f64, total_steps: u64) -> Result<Schedule> {
    let o = &recipe.optim;
    Ok(Schedule {
        lr,
        // Rounded up, as transformers does.
        warmup_steps: (o.warmup * total_steps as f64).ceil() as u64,
        total_steps,
        decay: Decay::named(&o.schedule).map_err(|e| e.at("optim.schedule"))?,
        min_ratio: o.min_ratio,
    })
}
