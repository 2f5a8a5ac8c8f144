//! A stage without its weights: everything that can be built and checked before a model is loaded.
//!
//! Every stage of a run is drafted before the first starts, so that a mistake in the last one is found at once; a stage is built
//! from its draft, so that both have the same checks.

use super::{algorithm, own_rewards, plain_rewards, source, total_steps};
use crate::algo::{Algorithm, Feed, Needs};
use crate::recipe::Recipe;
use crate::reward::Rewards;
use crate::source::Mixture;
use crate::verify::Hooks;
use crate::warnings::Warnings;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// Above this temperature samples are hardly ever sentences.
const HOT: f64 = 2.0;

/// Parts of a stage, without models.
pub struct Draft {
    pub algo: Box<dyn Algorithm>,
    /// Its kind of training data.
    pub feed: Feed,
    pub needs: Needs,
    pub tokenizer: Arc<Tokenizer>,
    pub source: Mixture,
    /// Its steps.
    pub total: u64,
    /// The rewards, without reward models.
    pub rewards: Rewards,
    pub warnings: Warnings,
}

/// Refuses a stage in which no step can change the policy.
fn moves(recipe: &Recipe, algo: &dyn Algorithm, total: u64) -> Result<()> {
    let rate = super::schedule(recipe, recipe.optim.lr, total)?;
    if recipe.optim.lr > 0.0 && total > 0 && (0..total.min(1 << 20)).all(|step| rate.at(step) == 0.0) {
        let what = format!(
            "the learning rate is 0 in all {total} steps: optim.warmup = {} starts at 0",
            recipe.optim.warmup
        );
        return Err(Error::usage(what).at("optim.warmup").fix("optim.warmup = 0.0, or more steps"));
    }
    match algo.updates().fits_steps(total) {
        Some(misfit) => Err(Error::usage(misfit.what).at(misfit.key).fix(misfit.fix)),
        None => Ok(()),
    }
}

impl Draft {
    /// Of a stage that starts from the model in `dir` and learns from what its recipe names.
    pub fn new(recipe: &Recipe, dir: &Path, warnings: &Warnings) -> Result<Draft> {
        Self::over(recipe, dir, warnings, None, |tokenizer, feed, warnings| {
            source(recipe, dir, tokenizer, feed, false, warnings)
        })
    }

    /// Of a stage that learns from any source, with the recipe's rewards or these.
    pub fn over(
        recipe: &Recipe,
        dir: &Path,
        warnings: &Warnings,
        rewards: Option<Rewards>,
        source: impl FnOnce(&Arc<Tokenizer>, Feed, &Warnings) -> Result<Mixture>,
    ) -> Result<Draft> {
        crate::recipe::warn(recipe, warnings);
        let (algo, feed) = algorithm(recipe)?;
        let needs = algo.needs();
        let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
        let source = source(&tokenizer, feed, warnings)?;
        let samples = recipe.rollout.samples;
        if feed.sampled() && !source.has_rewards() && samples < needs.group {
            let what = format!("{samples} completion per prompt cannot be compared with others");
            return Err(Error::usage(what).at("rollout.samples").fix("rollout.samples = 8"));
        }
        let least = source.epoch().unwrap_or(usize::MAX).min(recipe.train.batch);
        if !feed.sampled() && least < needs.batch {
            let what = format!(
                "{} needs at least {} examples per batch, got {least}",
                recipe.algorithm_name(),
                needs.batch
            );
            return Err(Error::usage(what).at("train.batch").fix("train.batch = 16, and as many rows"));
        }
        let total = total_steps(recipe, &source, feed)?;
        moves(recipe, &*algo, total)?;
        let hooks = Hooks { warnings: warnings.clone(), ..Default::default() };
        let rewards = match rewards {
            Some(rewards) => rewards,
            None if source.has_rewards() => own_rewards(recipe)?,
            None => plain_rewards(recipe, feed, &hooks)?,
        };
        let sampled = feed.sampled() && !source.has_rewards();
        if sampled {
            super::env::check(recipe, &hooks)?;
        }
        if sampled && recipe.rollout.temperature > HOT {
            let t = recipe.rollout.temperature;
            let what = format!("rollout.temperature = {t}: completions are close to random tokens");
            warnings.raise("hot-sampling", what, "rollout.temperature = 1.0");
        }
        Ok(Draft { algo, feed, needs, tokenizer, source, total, rewards, warnings: warnings.clone() })
    }
}
