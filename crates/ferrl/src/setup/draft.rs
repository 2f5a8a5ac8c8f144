//! A stage without its weights: all that can be built, and refused, before a model is loaded.
//!
//! Every stage of a run is drafted before the first begins, so that a mistake in the last one does not come up after days;
//! and a stage is made from its draft, so that both see the same mistakes.

use super::{algorithm, own_rewards, plain_rewards, source, total_steps};
use crate::algo::{Algorithm, Feed, Needs};
use crate::recipe::Recipe;
use crate::reward::Rewards;
use crate::source::ExampleSource;
use crate::verify::Hooks;
use crate::warnings::Warnings;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// Above this temperature hardly any model writes sentences.
const HOT: f64 = 2.0;

/// What a stage is made of, beside models.
pub struct Draft {
    /// How it learns.
    pub algo: Box<dyn Algorithm>,
    /// What it learns from.
    pub feed: Feed,
    /// What its algorithm needs.
    pub needs: Needs,
    /// The policy's.
    pub tokenizer: Arc<Tokenizer>,
    /// Where examples come from.
    pub source: Box<dyn ExampleSource>,
    /// Its steps.
    pub total: u64,
    /// What completions are worth, but for reward models.
    pub rewards: Rewards,
    /// What is doubtful.
    pub warnings: Warnings,
}

/// Refuses a stage in which no step can move the policy.
fn moves(recipe: &Recipe, algo: &dyn Algorithm, total: u64) -> Result<()> {
    let rate = super::schedule(recipe, recipe.optim.lr, total)?;
    if recipe.optim.lr > 0.0 && total > 0 && (0..total.min(1 << 20)).all(|step| rate.at(step) == 0.0) {
        let what = format!(
            "the learning rate is 0 in all {total} steps: optim.warmup = {} begins at 0",
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
        source: impl FnOnce(&Arc<Tokenizer>, Feed, &Warnings) -> Result<Box<dyn ExampleSource>>,
    ) -> Result<Draft> {
        crate::recipe::warn(recipe, warnings);
        let (algo, feed) = algorithm(recipe)?;
        let needs = algo.needs();
        let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
        let source = source(&tokenizer, feed, warnings)?;
        let samples = recipe.rollout.samples;
        if feed.sampled() && !source.graded() && samples < needs.group {
            let what = format!("{samples} answer to a prompt has no others to be compared with");
            return Err(Error::usage(what).at("rollout.samples").fix("rollout.samples = 8"));
        }
        let least = source.epoch().unwrap_or(usize::MAX).min(recipe.train.batch);
        if !feed.sampled() && least < needs.batch {
            let what = format!(
                "{} compares {} examples at least, a batch has {least}",
                recipe.algorithm_name(),
                needs.batch
            );
            return Err(Error::usage(what).at("train.batch").fix("train.batch = 16, and as many rows"));
        }
        let total = total_steps(recipe, &*source, feed)?;
        moves(recipe, &*algo, total)?;
        let hooks = Hooks { warnings: warnings.clone(), ..Default::default() };
        let rewards = match rewards {
            Some(rewards) => rewards,
            None if source.graded() => own_rewards(recipe)?,
            None => plain_rewards(recipe, feed, &hooks)?,
        };
        let sampled = feed.sampled() && !source.graded();
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
