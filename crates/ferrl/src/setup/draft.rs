//! A stage without its weights: all that can be built, and refused, before a model is loaded.
//!
//! Every stage of a run is drafted before the first begins, so that a mistake in the last one does not come up after days;
//! and a stage is made from its draft, so that both see the same mistakes.

use super::{algorithm, own_rewards, plain_rewards, source, total_steps};
use crate::algo::{Algorithm, Needs, Wants};
use crate::recipe::Recipe;
use crate::reward::Rewards;
use crate::source::Source;
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
    pub wants: Wants,
    /// What its algorithm needs.
    pub needs: Needs,
    /// The policy's.
    pub tokenizer: Arc<Tokenizer>,
    /// Where examples come from.
    pub source: Box<dyn Source>,
    /// Its steps.
    pub total: u64,
    /// What completions are worth, but for reward models.
    pub rewards: Rewards,
    /// What is doubtful.
    pub warnings: Warnings,
}

impl Draft {
    /// Of a stage that starts from the model in `dir` and learns from what its recipe names.
    pub fn new(recipe: &Recipe, dir: &Path, warnings: &Warnings) -> Result<Draft> {
        Self::over(recipe, dir, warnings, |tokenizer, wants, warnings| {
            source(recipe, dir, tokenizer, wants, false, warnings)
        })
    }

    /// Of a stage that learns from any source.
    pub fn over(
        recipe: &Recipe,
        dir: &Path,
        warnings: &Warnings,
        source: impl FnOnce(&Arc<Tokenizer>, Wants, &Warnings) -> Result<Box<dyn Source>>,
    ) -> Result<Draft> {
        crate::recipe::warn(recipe, warnings);
        let (algo, wants) = algorithm(recipe)?;
        let needs = algo.needs();
        let tokenizer = Arc::new(Tokenizer::from_dir(dir)?);
        let source = source(&tokenizer, wants, warnings)?;
        let samples = recipe.rollout.samples;
        if wants == Wants::Rollouts && !source.graded() && samples < needs.group {
            let what = format!("{samples} answer to a prompt has no others to be compared with");
            return Err(Error::usage(what).at("rollout.samples").fix("rollout.samples = 8"));
        }
        let total = total_steps(recipe, &*source, wants)?;
        let hooks = Hooks { warnings: warnings.clone(), ..Default::default() };
        let rewards =
            if source.graded() { own_rewards(recipe)? } else { plain_rewards(recipe, wants, &hooks)? };
        let sampled = wants == Wants::Rollouts && !source.graded();
        if sampled && recipe.rollout.temperature > HOT {
            let t = recipe.rollout.temperature;
            let what = format!("rollout.temperature = {t}: completions are close to random tokens");
            warnings.raise("hot-sampling", what, "rollout.temperature = 1.0");
        }
        Ok(Draft { algo, wants, needs, tokenizer, source, total, rewards, warnings: warnings.clone() })
    }
}
