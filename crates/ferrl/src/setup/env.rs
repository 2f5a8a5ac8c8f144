//! What plays the episodes of a recipe.

use super::data::tasks;
use crate::data::Encoder;
use crate::env::python::{Episodes, OfRows, Settings, What, Workers};
use crate::episode::Environments;
use crate::recipe::Recipe;
use crate::source::encoding;
use crate::task::Task;
use crate::verify::Hooks;
use ferrl_engine::Result;
use ferrl_engine::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The name under which `data.train` holds the episodes of the recipe's own environment.
pub(crate) const OWN: &str = "env";

/// What plays the prompts of a recipe that have several turns. The recipe's own environment is started.
pub fn environments(
    recipe: &Recipe,
    dir: &Path,
    tokenizer: &Tokenizer,
    hooks: &Hooks,
) -> Result<Environments> {
    let mut all = tasks(recipe)?;
    let encoder = Encoder::for_model(tokenizer.clone(), dir, encoding(&recipe.data)?)?;
    let workers = workers(recipe, hooks);
    if let Some(workers) = &workers {
        workers.check()?;
        // Instead of those that start nothing.
        all.retain(|(name, _)| name != OWN);
        all.push((OWN.into(), Arc::new(Episodes::new(workers.clone(), recipe.seed))));
    }
    let environments = Environments::new(all, recipe.rollout.max_turns)
        .with_concurrency(recipe.env.concurrency)
        .with_encoder(Arc::new(encoder));
    Ok(match workers {
        Some(workers) => environments.with_rows(Arc::new(OfRows::new(workers, recipe.seed))),
        None => environments,
    })
}

/// Refuses an environment that does not load.
pub(crate) fn check(recipe: &Recipe, hooks: &Hooks) -> Result<()> {
    workers(recipe, hooks).map_or(Ok(()), |workers| workers.check())
}

/// The episodes of the recipe's own environment, as a task that starts nothing yet.
pub(super) fn own_task(recipe: &Recipe) -> Option<Arc<dyn Task>> {
    let workers = workers(recipe, &Hooks::default())?;
    Some(Arc::new(Episodes::new(workers, recipe.seed)))
}

/// The processes of the recipe's own environment, none of them started.
fn workers(recipe: &Recipe, hooks: &Hooks) -> Option<Arc<Workers>> {
    let env = &recipe.env;
    let what = match *env.named().first()? {
        ("gem", name) => What::Gem(name.into()),
        ("reasoning_gym", name) => What::ReasoningGym(name.into()),
        (_, path) => What::file(path),
    };
    Some(Workers::new(Settings {
        what,
        options: env.options.clone(),
        workers: env.workers,
        timeout: Duration::from_secs_f64(env.timeout),
        start_timeout: Duration::from_secs_f64(env.start_timeout),
        memory: env.memory_mib << 20,
        python: env.python.clone(),
        hooks: hooks.clone(),
    }))
}
