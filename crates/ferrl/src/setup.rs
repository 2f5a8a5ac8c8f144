//! From a recipe to a stage that can take steps: models, data, rewards, schedules.

mod data;
pub mod trained;

pub(crate) use data::room;
pub use data::{source, task, task_verifier, tasks, total_steps};

use crate::algo::{self, Algorithm, Needs, Wants};
use crate::recipe::{Recipe, Rollout};
use crate::reward::Rewards;
use crate::source::Source;
use crate::train::Stage;
use crate::warnings::Warnings;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::{CacheOptions, Sampler};
use ferrl_engine::model::{Head, Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Decay, OptimizerOptions, Rule, Schedule, Trainer};
use ferrl_engine::{Class, Error, Result, nearest};
use ferrl_kernels::{Backend, DType};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The algorithm a stage's recipe names, and what it learns from.
pub fn algorithm(recipe: &Recipe) -> Result<(Box<dyn Algorithm>, Wants)> {
    Ok((recipe.algorithm()?, algo::find(recipe.algorithm_name())?.wants))
}

/// The directory a run starts from: the recipe's, or a new random model written to `fresh`.
pub fn starting_model(recipe: &Recipe, fresh: &Path) -> Result<PathBuf> {
    match (&recipe.model.path, &recipe.model.init) {
        (Some(path), None) => crate::data::hub::model_dir(Path::new(path)),
        (None, Some(init)) => {
            data::new_model(recipe, init, fresh)?;
            Ok(fresh.to_path_buf())
        }
        _ => Err(Error::usage("a run starts from model.path or from model.init, one of the two")
            .at("model")
            .fix("model.path = \"a Hugging Face directory\"")),
    }
}

/// A stage that starts from the model in `dir` and learns from what its recipe names.
pub fn stage(recipe: Recipe, backend: Arc<dyn Backend>, dir: &Path) -> Result<Stage> {
    let data = recipe.clone();
    stage_over(recipe, backend, dir, |tokenizer, wants, warnings| {
        source(&data, dir, tokenizer, wants, false, warnings)
    })
}

/// A stage that starts from the model in `dir` and learns from any source.
pub fn stage_over(
    recipe: Recipe,
    backend: Arc<dyn Backend>,
    dir: &Path,
    source: impl FnOnce(&Arc<Tokenizer>, Wants, &Warnings) -> Result<Box<dyn Source>>,
) -> Result<Stage> {
    backend.set_exact(recipe.exact).map_err(|e| e.at("exact"))?;
    let (algo, wants) = algorithm(&recipe)?;
    let needs = algo.needs();
    let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
    let opened = ModelDir::open(dir)?;
    if opened.config.vocab < tokenizer.vocab_size() {
        let (model, tokens) = (opened.config.vocab, tokenizer.vocab_size());
        return Err(
            Error::model(format!("the model knows {model} tokens, its tokenizer {tokens}")).at(dir.display())
        );
    }
    let opened = with_policy_head(opened, &recipe, needs)?;
    let critic_dir = match needs.critic && !recipe.critic.shared {
        true => {
            let own = recipe.critic.path.as_ref().map(|path| crate::data::hub::model_dir(Path::new(path)));
            let start = own.transpose()?.unwrap_or_else(|| dir.to_path_buf());
            Some(ModelDir::open(&start)?.with_head(Head::Score, recipe.seed)?)
        }
        false => None,
    };
    trained::check(&opened.config, critic_dir.as_ref().map(|d| &d.config), &recipe.model.frozen)?;
    let policy = trainer(&recipe, backend.clone(), &opened)?;
    let reference = match needs {
        Needs { teacher: true, .. } => Some(crate::teacher::load(&recipe, &policy.model)?),
        Needs { reference: true, .. } | Needs { start: true, .. } => Some(policy.model.frozen_copy()?),
        _ => None,
    };
    let critic = critic_dir.map(|dir| trainer(&recipe, backend.clone(), &dir)).transpose()?;
    let warnings = Warnings::default();
    crate::recipe::warn(&recipe, &warnings);
    let source = source(&tokenizer, wants, &warnings)?;
    let samples = recipe.rollout.samples;
    let sampler = if wants == Wants::Rollouts && !source.graded() {
        if samples < needs.group {
            let what = format!("{samples} answer to a prompt has no others to be compared with");
            return Err(Error::usage(what).at("rollout.samples").fix("rollout.samples = 8"));
        }
        let cache = cache_options(&recipe.rollout, &*backend);
        let sampler = Sampler::new(&policy.model, cache).map_err(|e| cache_error(e, &recipe.rollout))?;
        Some(sampler.with_tokenizer(tokenizer.clone()))
    } else {
        None
    };
    let total = total_steps(&recipe, &*source, wants)?;
    let rate = |lr| schedule(&recipe, lr, total);
    let schedules = (rate(recipe.optim.lr)?, rate(recipe.critic.lr.unwrap_or(5.0 * recipe.optim.lr))?);
    let rewards = if source.graded() { own_rewards(&recipe)? } else { rewards(&recipe, wants, &backend)? };
    Ok(Stage {
        recipe,
        algo,
        wants,
        policy,
        reference,
        critic,
        tokenizer,
        source,
        rewards,
        sampler,
        schedules,
        step: 0,
        ahead: VecDeque::new(),
        foresees: backend.is_exact(),
        updating: false,
        warnings,
        waits: Arc::new(|_| ()),
    })
}

/// What is wrong with the cache, under its key.
pub fn cache_error(error: Error, rollout: &Rollout) -> Error {
    let other = if error.class == Class::Resource { "smaller" } else { "larger" };
    error.at(format!("rollout.cache_mib = {}", rollout.cache_mib)).fix(format!("a {other} rollout.cache_mib"))
}

/// A completion that the cache has no room for, under the cache's key.
pub fn too_small(error: Error, rollout: &Rollout) -> Error {
    if error.class != Class::Resource {
        return error;
    }
    let fix = "a larger rollout.cache_mib, or a smaller rollout.max_new_tokens";
    error.at(format!("rollout.cache_mib = {}", rollout.cache_mib)).fix(fix)
}

/// Room for the answers of a run.
pub fn cache_options(rollout: &Rollout, backend: &dyn Backend) -> CacheOptions {
    CacheOptions {
        bytes: rollout.cache_mib << 20,
        max_batch_tokens: backend.busy_tokens(),
        ..Default::default()
    }
}

fn with_policy_head(dir: ModelDir, recipe: &Recipe, needs: Needs) -> Result<ModelDir> {
    if needs.score {
        dir.with_head(Head::Score, recipe.seed)
    } else if needs.critic && recipe.critic.shared {
        dir.with_head(Head::LmAndValue, recipe.seed)
    } else {
        Ok(dir)
    }
}

fn dtype(recipe: &Recipe) -> Result<DType> {
    match recipe.model.dtype.as_deref() {
        None | Some("f32") => Ok(DType::F32),
        Some("bf16") => Ok(DType::Bf16),
        Some(other) => Err(Error::usage(format!("unknown dtype {other:?}, expected f32 or bf16"))
            .at("model.dtype")
            .fix("model.dtype = \"bf16\"")),
    }
}

fn trainer(recipe: &Recipe, backend: Arc<dyn Backend>, dir: &ModelDir) -> Result<Trainer> {
    let options = Options { dtype: dtype(recipe)?, training: true, context: 0 };
    let model = Model::load(backend, dir, options)?;
    let o = &recipe.optim;
    let rule = match o.name.as_str() {
        "adamw" => Rule::AdamW { beta1: o.beta1, beta2: o.beta2, eps: o.eps },
        "sgd" => Rule::Sgd { momentum: o.beta1 },
        other => {
            let hint = nearest(other, ["adamw", "sgd"]).unwrap_or("adamw");
            return Err(Error::usage(format!("unknown optimizer {other:?}, expected adamw or sgd"))
                .at("optim.name")
                .fix(format!("optim.name = \"{hint}\"")));
        }
    };
    let options = OptimizerOptions {
        rule,
        weight_decay: o.weight_decay,
        max_grad_norm: (o.max_grad_norm > 0.0).then_some(o.max_grad_norm as f32),
        ema: o.ema.map(|e| e as f32),
        frozen: trained::patterns(&dir.config, &recipe.model.frozen)?,
    };
    let mut trainer = Trainer::new(model, options)?;
    trainer.recompute = recipe.model.recompute;
    trainer.temperature = recipe.rollout.temperature as f32;
    Ok(trainer)
}

/// Rewards as the recipe says, or those that fit its task.
pub fn rewards(recipe: &Recipe, wants: Wants, backend: &Arc<dyn Backend>) -> Result<Rewards> {
    if recipe.reward.is_empty() && wants == Wants::Rollouts {
        let Some(own) = task_verifier(recipe)? else {
            if recipe.algorithm()?.needs().rewardless {
                return Rewards::new(&[]);
            }
            return Err(Error::usage(format!(
                "{} learns from rewards; the recipe names none, and the rows bring none",
                recipe.algorithm_name()
            ))
            .at("reward")
            .fix("reward = \"name of a verifier\", or rows with completions and rewards"));
        };
        return Ok(Rewards::of(own));
    }
    Rewards::load(recipe, dtype(recipe)?, backend)
}

/// Rows bring their rewards: what the recipe names beside them would be for evaluations only.
fn own_rewards(recipe: &Recipe) -> Result<Rewards> {
    let unused = !recipe.reward.is_empty() && recipe.eval.every == 0 && !recipe.eval.at_start;
    if unused || recipe.rollout.max_lag > 0 {
        let (key, what) = match unused {
            true => {
                ("reward", "the rows of data.train bring their answers and rewards; nothing else is rewarded")
            }
            false => ("rollout.max_lag", "the rows of data.train bring their answers; none is sampled ahead"),
        };
        return Err(Error::usage(what).at(key).fix(format!("leave {key} out")));
    }
    Rewards::new(&[])
}

fn schedule(recipe: &Recipe, lr: f64, total_steps: u64) -> Result<Schedule> {
    let o = &recipe.optim;
    Ok(Schedule {
        lr,
        warmup_steps: (o.warmup * total_steps as f64).round() as u64,
        total_steps,
        decay: Decay::named(&o.schedule).map_err(|e| e.at("optim.schedule"))?,
        min_ratio: o.min_ratio,
    })
}
